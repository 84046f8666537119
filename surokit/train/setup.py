"""This module makes what a session is built from and fed with: settings, optimizer, run folder, a rebuilt model, batches in parts.

Every refusal of a setting is here, so that the session itself only trains.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surokit import convert
from surokit.applied import note_recipe
from surokit.layers import OwnLayer, recipe_layers
from surokit.optim.spec import Spec
from surokit.optim.tensors import is_sharded
from surokit.parallel.layout import Parallel
from surokit.places import check_module, check_values, make_folder
from surokit.ranks import rank_here
from surokit.recipe import Lora, Recipe
from surokit.torch_private import forward_pre_hooks
from surokit.train import checkpoint_files as checkpoints
from surokit.train.errors import ResumeError
from surokit.train.stream import Batch, check_batch, check_source


def check_settings(
    model: Any,
    accumulate: int,
    clip: float | None,
    schedule: Any,
    eval: Any,
    eval_every: int | None,
    save_every: int | None,
    keep: int | None,
    run_dir: Any,
    compile: Any,
    graphs: Any,
    max_skipped: int,
    parallel: Any = None,
    reads_weights: bool = False,
) -> None:
    check_module(model, "Session") if parallel is not None else check_values(model, "Session")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    _check_forward(model)
    counts = {"accumulate": accumulate, "max_skipped": max_skipped}
    counts |= {"eval_every": eval_every or 1, "save_every": save_every or 1, "keep": 1 if keep is None else keep}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Session({name}={value!r}): a whole number of at least 1.")
    if clip is not None and not clip > 0:
        raise ValueError(f"Session(clip={clip}): a norm above 0, or None for no clipping.")
    if schedule is not None and not callable(schedule):
        raise TypeError(
            f"Session(schedule=...): a function from step to factor such as surokit.Cosine(), not {schedule!r}."
        )
    if not isinstance(compile, bool):
        raise ValueError(f"Session(compile={compile!r}): True or False; 'auto' did not compile.")
    if graphs not in (True, False, "auto"):
        raise ValueError(f"Session(graphs={graphs!r}): True, False or 'auto'.")
    if eval is not None:
        check_source(eval)
    elif eval_every:
        raise ValueError(
            "Session(eval_every=...) needs held-out data: eval=... (resuming a run that evaluated needs it again)."
        )
    if save_every and run_dir is None:
        raise ValueError("Session(save_every=...) needs a folder: run_dir=...")
    if isinstance(parallel, Parallel) and parallel.communicate == "codes" and (compile or reads_weights):
        raise ValueError(
            f"Session({'compile=True' if compile else 'meters=[numerics()]'}) needs the numbers of weights, and "
            "Parallel(communicate='codes') leaves each process their codes: leave out one of the two."
        )


def _check_forward(model: nn.Module) -> None:
    """Raise TypeError for a model whose forward does not take what a batch holds; one that handles the call before forward is
    trusted."""
    taken = _parameters(model)
    if taken is not None and not {"input_ids", "labels"} <= _names(taken):
        raise TypeError(
            f"Session trains a model whose forward(input_ids=..., labels=...) returns an object with .loss, and that of this "
            f"{type(model).__name__} takes {', '.join(p.name for p in taken) or 'nothing'}: put it in a module that does, or keep "
            "your own loop and watch it with surokit.Live()."
        )


def _parameters(model: nn.Module) -> list[inspect.Parameter] | None:
    """Return the parameters of forward; None where it takes arguments of any name, or nobody knows which."""
    if type(model).__call__ is not nn.Module.__call__ or forward_pre_hooks(model):
        return None
    try:
        taken = list(inspect.signature(model.forward, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # forward is not written in Python
        return None
    return None if any(p.kind == p.VAR_KEYWORD for p in taken) else taken


def _names(taken: Sequence[inspect.Parameter]) -> set[str]:
    return {p.name for p in taken if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


@contextmanager
def explained_entries(model: nn.Module, *batches: Batch) -> Iterator[None]:
    """Raise TypeError that names them, for a forward in the block that failed since it does not take all entries of a batch."""
    try:
        yield
    except TypeError as error:
        taken = _parameters(model) or []
        strays = dict.fromkeys(name for batch in batches for name in batch if name not in _names(taken))
        if not taken or not strays:
            raise
        named, known = ", ".join(strays), ", ".join(p.name for p in taken)
        remedy = f"leave {named} out"
        if "attention_mask" in strays:  # of a collator of transformers
            remedy += ", set labels to -100 where the mask is 0, pad at the right, and tell texts in a row apart by position_ids"
        raise TypeError(
            f"The batch holds {named}, and the forward of {type(model).__name__} takes {known}: {remedy}."
        ) from error


def check_alone(model: nn.Module, parallel: Any) -> None:
    """Check what a session is told of the processes that train together; warn where it trains alone among several."""
    if parallel is not None:
        if not isinstance(parallel, Parallel):
            raise TypeError(f"Session(parallel={parallel!r}): a surokit.Parallel(), or None.")
        return
    world = rank_here().world
    together = any(is_sharded(p) for p in model.parameters()) or isinstance(model, DistributedDataParallel)
    if world > 1 and not together:
        warnings.warn(
            f"This is one of {world} processes that were started together, and its session trains a model of its own: give "
            "Session(parallel=surokit.Parallel()) for all to train one.",
            stacklevel=4,
        )


def check_changes(model: nn.Module, recipe: Recipe | None, total: int | None, layout: Parallel) -> None:
    """Raise ValueError where a recipe changes and nobody knows when, or where the model or what processes exchange cannot change
    with it.

    total: the steps of the run's schedule; None where none says.
    """
    if recipe is None or not recipe.later:
        return
    steps = [change.step(total) for change in recipe.later]
    if any(later <= before for before, later in itertools.pairwise(steps)):
        raise ValueError(
            f"The changes of {recipe.name} come after {', '.join(map(str, steps))} steps: each has to come at least a step "
            "after the one before."
        )
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise ValueError(
            f"{recipe.name} changes, and this model is compiled, with its layers as they are: give the session the model that was "
            "given to torch.compile, and compile=True."
        )
    if layout.is_sharded and layout.communicate == "codes":
        raise ValueError(
            f"{recipe.name} changes in a run whose processes exchange weights as codes of one recipe: give "
            "Parallel(communicate='numbers')."
        )


def planned_steps(steps: int | None, minutes: float | None, schedule: Any, done: int) -> int | None:
    """Return how many steps a run shall take, to the end of the schedule where neither is given; None where minutes decide."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
        raise ValueError(f"run(steps={steps!r}): the number of further steps is a whole number >= 0.")
    if minutes is not None and not 0 <= minutes < math.inf:
        raise ValueError(f"run(minutes={minutes!r}): a finite number >= 0.")
    if steps is None and minutes is None:
        total = getattr(schedule, "steps", None)
        if total is None:
            raise ValueError("run() needs steps= or minutes= where no schedule says how long the run is.")
        return max(0, int(total) - done)
    return steps


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which the model computes: its first parameter's, or the one that streamed weights come to."""
    streamed: Any = next((vars(m)["computes_on"] for m in model.modules() if "computes_on" in vars(m)), None)
    return next(model.parameters()).device if streamed is None else streamed


def check_place(model: nn.Module, device: torch.device) -> None:
    """Raise RuntimeError where the model computes elsewhere now than when its session was made."""
    here = next(model.parameters()).device
    if here != device and (here := device_of(model)) != device:
        raise RuntimeError(
            f"This session was made when its model computed on {device}, and now it does on {here}: move the model, or call "
            "offload_weights, before the Session is made."
        )


@dataclass(frozen=True)
class Vocabulary:
    """A Vocabulary says how many tokens a model knows.

    stated: by the model itself, so that other numbers are refused before a step; otherwise `size` is the largest embedding's rows,
    which may be of something else, and only explains a step that failed.
    """

    size: int
    stated: bool

    @staticmethod
    def of(model: nn.Module) -> Vocabulary:
        """Return the vocabulary of a Decoder, or of a model of transformers by its input and output embeddings; without embeddings
        it has any number."""
        if isinstance(size := getattr(getattr(model, "config", None), "vocab", None), int):
            return Vocabulary(size, stated=True)
        ends = []
        for name in ("get_input_embeddings", "get_output_embeddings"):
            with suppress(NotImplementedError):
                ends.append(len(getattr(getattr(model, name, lambda: None)(), "weight", ())))
        if any(ends):
            return Vocabulary(max(ends), stated=True)
        sizes = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        return Vocabulary(max(sizes, default=sys.maxsize), stated=False)

    def check(self, batch: Any) -> None:
        """Raise ValueError or TypeError where this is no batch, or has numbers outside of what the model states."""
        check_batch(batch, self.size if self.stated else None)

    @contextmanager
    def explains(self, *batches: Batch) -> Iterator[None]:
        """Raise ValueError for an index out of range in the block, if a batch has numbers outside of the vocabulary."""
        try:
            yield
        except (IndexError, RuntimeError) as error:
            said = ("out of bounds", "out of range", "device-side assert")
            if isinstance(error, IndexError) or any(words in str(error) for words in said):
                for batch in batches:
                    check_batch(batch, self.size)
            raise


def options_for_documents(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that forward needs beside a batch with position_ids. A model of transformers that keeps keys and values,
    as it does unless told not to, takes a packed row for one document. With use_cache=False it looks for documents, which waits for
    the device.
    """
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    return {"use_cache": False} if caches and "use_cache" in inspect.signature(model.forward).parameters else {}


def build_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for p in model.parameters()}
        strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ValueError(
                f"{strangers} of the optimizer's parameters are not the model's: give a specification, as surokit.AdamW(lr=1e-4), "
                "or a function from parameters to an optimizer, which is built after the recipe and the division among processes."
            )
        return optimizer
    if isinstance(optimizer, Spec):
        return optimizer.build(model)
    built = optimizer(model.parameters()) if callable(optimizer) else None
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(
            f"Session(optimizer={optimizer!r}): a specification such as surokit.AdamW(lr=3e-4), a torch Optimizer, "
            "or a function from parameters to one."
        )
    return built


class Claim(NamedTuple):
    """A Claim is the folder that a run writes in.

    resumes: it goes on from what is there, with or without a checkpoint. order: number of the claim in this process.
    """

    folder: Path | None = None
    resumes: bool = False
    order: int = 0


_orders = itertools.count()


def claim_folder(run_dir: str | Path | None, exist: str, restarted: bool = False) -> Claim:
    """Make the folder to write in and return it.

    restarted: a launcher has started the processes anew since one failed, so that "new" goes on in the folder that they claimed
    with the claim of the same order.
    """
    if exist not in ("new", "resume", "error"):
        raise ValueError(f"Session(exist={exist!r}): 'new', 'resume' or 'error'.")
    if run_dir is None:
        return Claim()
    wanted = path = Path(run_dir)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"The run directory {path} is a file: choose another name.")
    order = next(_orders)
    earlier = _claimed_before(wanted, order) if restarted and exist == "new" else None
    if restarted := earlier is not None:
        wanted = path = earlier
    used = path.is_dir() and any(path.iterdir())
    if used and exist == "error":
        raise FileExistsError(f"The run directory {path} has content: choose another, or exist='new' or 'resume'.")
    number = 2
    while used and exist == "new" and not restarted:
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
        used = path.exists()
    make_folder(path, "run directory")
    if path != wanted:
        print(f"surokit: {wanted} has content already, so this run is in {path}", file=sys.stderr, flush=True)
    return Claim(path, restarted or exist == "resume", order)


def _claimed_before(wanted: Path, order: int) -> Path | None:
    """Return the folder that this launch claimed under the name, with the claim of this order, before a process failed."""
    path, number = wanted, 2
    while path.exists():
        if _beginning(path).get("claim") == [_launch_id(), order]:
            return path
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return None


def _launch_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _beginning(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / BEGAN).read_text()))
    return {}


BEGAN = "began.json"


def began_in(folder: Path) -> int | None:
    """Return the step at which the run in `folder` began when this launch started its processes first; None where nobody noted
    it."""
    found = _beginning(folder)
    return int(found["step"]) if found.get("claim", [""])[0] == _launch_id() and "step" in found else None


def note_beginning(folder: Path, step: int, order: int) -> None:
    """Write down at which step a run began, for when its processes are started anew."""
    (folder / BEGAN).write_text(json.dumps({"step": step, "claim": [_launch_id(), order]}))


def rebuild_model(found: checkpoints.Checkpoint, device: str | None = None) -> nn.Module:
    """Return a Decoder with the checkpoint's configuration, dtype and frozen parameters, on the GPU if there is one unless `device`
    is given."""
    from surokit.models.decoder import Decoder, DecoderConfig

    # a checkpoint of before has only what Hugging Face can say
    shape, of_hf = found.meta.get("decoder"), found.config()
    if (shape is None and of_hf is None) or found.meta["model"] != f"{Decoder.__module__}.{Decoder.__qualname__}":
        raise ResumeError(
            f"The checkpoint's model is a {found.meta['model']}, which only you can make: pass model= to resume()."
        )
    model: nn.Module = Decoder(DecoderConfig(**shape) if shape else DecoderConfig.from_hf(of_hf or {}))
    dtypes = found.meta["dtypes"].values()
    known = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    dtype = next((d for d in known if str(d) in dtypes), torch.float32)
    model.to(dtype=dtype, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.meta["recipe"]:
        apply_saved(model, Recipe.from_dict(found.meta["recipe"]))
    set_adapters(model, found.meta.get("adapters"))
    set_trainable(model, set(found.meta["trainable"]))
    return model


def set_trainable(model: nn.Module, names: set[str]) -> None:
    """Let the parameters of these names train, and no others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def apply_saved(model: nn.Module, recipe: Recipe) -> None:
    """Apply the recipe of a checkpoint, which has the values of adapters, so that none are computed of this model's weights."""
    convert.apply(model, recipe.without_values)
    note_recipe(model, recipe)
    if recipe.adapter and recipe.adapter.fits_errors:
        for _, layer in recipe_layers(model):
            if isinstance(layer, OwnLayer) and layer.has_adapter and layer.storage is not None:
                layer.adapter_fits = str(layer.storage)


def adapters_of(model: nn.Module) -> dict[str, list[Any]]:
    """Return rank, alpha and `adapter_fits` of each layer that has an adapter, as JSON has them."""
    layers = (
        (name, layer) for name, layer in recipe_layers(model) if isinstance(layer, OwnLayer) and layer.has_adapter
    )
    return {name: [layer.lora_rank, layer.lora_alpha, layer.adapter_fits] for name, layer in layers}


def set_adapters(model: nn.Module, saved: Mapping[str, Sequence[Any]] | None) -> bool:
    """Give the layers the adapters of a checkpoint, which need not be those of its recipe, without their values.

    Returns whether the layers had others.

    saved: as of `adapters_of`; None where a checkpoint of before does not say.
    """
    if saved is None or adapters_of(model) == saved:
        return False
    dtype = convert.dtype_of(model)
    for name, layer in recipe_layers(model):
        if not isinstance(layer, OwnLayer):
            continue
        if layer.has_adapter:
            layer.remove_adapter()
        if name in saved:
            rank, alpha, fits = saved[name]
            layer.add_adapter(Lora(rank, alpha), dtype if layer.storage else None)
            layer.adapter_fits = fits
    return True


def check_adapters(saved: Mapping[str, Sequence[Any]] | None, model: nn.Module) -> None:
    """Raise ResumeError where the adapters of a model are scaled otherwise than those of a checkpoint."""
    for name, (rank, alpha, _) in adapters_of(model).items():
        there = (saved or {}).get(name)
        if there is not None and [rank, alpha] != there[:2]:
            raise ResumeError(
                f"{name} has an adapter of rank {rank} and alpha {alpha:g}, and in the checkpoint one of {there[0]} and "
                f"{there[1]:g}: load the adapter that the run was started with."
            )


def check_recipe(saved: Recipe | None, given: Recipe | None) -> None:
    """Raise ResumeError where a checkpoint's recipe computes other numbers than the one that it is resumed with."""
    if (saved and saved.numbers) != (given and given.numbers):
        names = [recipe.name if recipe else "no recipe" for recipe in (saved, given)]
        if names[0] == names[1]:  # one name, and other settings
            names = [str(saved), str(given)]
        raise ResumeError(
            f"The checkpoint was trained with {names[0]} and this session has {names[1]}: "
            "resume with the checkpoint's, and switch() or fork() to another after resuming."
        )


def parts_of(batch: Batch | Sequence[Batch], accumulate: int) -> Sequence[Batch]:
    if not isinstance(batch, Mapping):
        if not isinstance(batch, Sequence) or not batch:
            raise TypeError(f"step() takes a batch, a dict, or a list of them, not {type(batch).__name__} {batch!r}.")
        return batch
    if accumulate == 1:
        return [batch]
    check_batch(batch)
    rows = len(batch["input_ids"])
    if rows % accumulate:
        raise ValueError(
            f"A batch of {rows} sequences cannot be split in accumulate={accumulate} equal parts: take a multiple, "
            "or pass a list of batches."
        )
    size = rows // accumulate
    return [
        {name: v[i : i + size] if isinstance(v, Tensor) else v for name, v in batch.items()}
        for i in range(0, rows, size)
    ]


def targets_in(batch: Batch) -> Tensor:
    """Return the number of labels that count, on the device: the first of a sequence is never a target."""
    return (batch["labels"][:, 1:] != -100).sum()


def mean_over(loss: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, a mean over `targets` labels; NaN where that is 0, which masks the update as any loss that is not finite
    does.

    Models disagree about the mean of nothing: ours say 0, and those of transformers NaN.
    """
    return loss.masked_fill(targets == 0, torch.nan)


def with_targets(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Remove the parts of a step without a label that counts: their mean loss is 0/0 in most models. Looks at the host only."""
    if len(batches) == 1:
        return batches
    useful = [b for b in batches if b["labels"].device.type != "cpu" or (b["labels"][..., 1:].numpy() != -100).any()]
    return useful or batches[:1]


def computable(batch: Batch, weight: Tensor) -> Batch:
    """Return a part whose mean loss is finite, for one of weight 0, in which no label counts: its tokens are the labels then. So
    every process takes part in every forward and backward, with something to learn or not, and labels on a GPU need not be looked
    at. Nothing waits for the device."""
    return {**batch, "labels": torch.where(weight > 0, batch["labels"], batch["input_ids"])}


def loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            "The model's forward(input_ids=..., labels=...) must return an object with a scalar .loss, "
            f"and it returned a {type(output).__name__}."
        )
    return loss.reshape(())


def peak_gib(device: torch.device) -> float:
    """Return the highest memory so far: of the device's allocator on CUDA, of the process elsewhere (NaN where that is unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB elsewhere
