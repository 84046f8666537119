"""Read a plan's arguments from a live model or the session that trains it, for those that are not given.

    recipe          the one that `sk.apply` applied, with the adapters that its layers have (ours or PEFT's)
    fusion          the one of `sk.fuse`; recompute is the Fusion's, or transformers' gradient checkpointing
    on the host     weights and activations, by `sk.offload_weights` and `sk.offload_activations`
    what trains     the parameters that require a gradient, with their dtypes
    of a session    optimizer, micro-batches, batch and length where a step or its data tells them, whether it records CUDA graphs

Models are read by their attributes, and by what surokit/applied.py notes of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surokit.applied import Trainer, fusion_of, host_streams, is_adapter, recipe_of
from surokit.planner.counts.flops import Trained
from surokit.planner.counts.memory import DTYPE_BYTES
from surokit.recipe import BF16, Lora, block_of


@dataclass(frozen=True)
class LiveArguments:
    """A LiveArguments holds the arguments of `plan` that a model or session itself has; `source` names it, "" where none is live.

    `trained` describes the part that trains. `notes` say what of the model a plan cannot follow.
    """

    source: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trained: Trained | None = None
    notes: tuple[str, ...] = ()

    def has(self, recipe: Any) -> bool:
        """True if this is the model's recipe; None and BF16 are the same."""
        return bool((recipe or BF16) == (self.arguments.get("recipe") or BF16))

    def has_part(self, recipe: Any) -> bool:
        """True if this is the model's recipe, or a part of one that changes on the way."""
        return self.has(recipe) or (recipe or BF16) in (self.arguments.get("recipe") or BF16).parts


NOTHING = LiveArguments()


def model_in(what: Any) -> Any:
    """Return the model of a session, and anything else unchanged."""
    return what.model if isinstance(what, Trainer) else what


def read_own(what: Any) -> LiveArguments:
    """Read the arguments that a live model or a session has; return NOTHING for anything else."""
    model = model_in(what)
    if not all(callable(getattr(model, name, None)) for name in ("named_parameters", "named_modules", "modules")):
        return NOTHING
    named = list(model.named_parameters())
    adapters = _Adapters.of(named, [name for name, _ in model.named_modules()])
    notes = list(adapters.notes)
    trained = _trained(named, adapters)
    base = [p for name, p in named if not is_adapter(name)]
    trains = sum(_trains(p) for p in base)
    if not trained.parameters:
        notes.append("no parameter of this model requires a gradient: the plan takes what its recipe trains")
    elif adapters.rank and trains == len(base):
        adapters = replace(adapters, rank=0)
        notes.append("adapters train beside all weights: what they compute is left out")
    elif adapters.rank and trains:
        notes.append(
            f"{trains} of {len(base)} parameter tensors train beside the adapters: their gradients and the optimizer's states "
            "count, their FLOPs do not"
        )
    elif not adapters.rank and trains < len(base):
        notes.append(
            f"{len(base) - trains} of {len(base)} parameter tensors are frozen: gradients and the optimizer's states leave them "
            "out, FLOPs and activations are those of training all"
        )
    recipe = _recipe(model, adapters)
    if (packed := sum(map(_is_packed, base))) and getattr(recipe, "storage", None) is None:
        notes.append(
            f"{packed} weights that another library quantized are planned as if they were not: sk.apply takes them over, or give "
            "recipe= with their storage"
        )
    arguments = {"recipe": recipe, **_fusion(model), **_on_the_host(model)}
    if (isinstance(what, Trainer) and what.compile) or hasattr(model, "_orig_mod"):
        arguments["fusion"] = "none"
        notes.append("torch.compile is not planned: the step is taken as eager, with nothing fused")
    if isinstance(what, Trainer):
        arguments |= what.plan_arguments()
    source = "the session" if isinstance(what, Trainer) else f"the live {type(model).__name__}"
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return LiveArguments(source, arguments, trained if trained.parameters else None, tuple(notes))


def _is_packed(p: Any) -> bool:
    """True if a parameter holds codes in place of numbers, as bitsandbytes' and transformers' quantized layers do."""
    return str(getattr(p, "dtype", "")).rpartition(".")[2].startswith(("uint8", "int8", "float8"))


def _trains(p: Any) -> bool:
    return bool(getattr(p, "requires_grad", False))


_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}  # experts hold both in one weight


@dataclass(frozen=True)
class _Adapters:
    """An _Adapters describes low-rank adapters, found by their parameters' names: ours are `q_proj.lora_A.weight`, PEFT's
    `q_proj.lora_A.default.weight`. `layers` has every layer of a name that one with an adapter has, and whether it has one."""

    rank: int = 0
    targets: tuple[str, ...] = ()
    peft: bool = False
    bytes: int = 0
    notes: tuple[str, ...] = ()
    layers: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Sequence[tuple[str, Any]], modules: Iterable[str]) -> _Adapters:
        ranks: Counter[str] = Counter()  # by layer, of all its adapters together
        peft, size, notes = False, 0, []
        parts: dict[str, tuple[str, ...]] = {}
        for name, p in named:
            if not is_adapter(name):
                continue
            size += p.numel() * p.element_size()
            path, _, rest = name.partition(".lora_A.")
            if rest and len(p.shape) == 3:  # of experts, [E, r, K]
                ranks[f"{path}.{rest}"] += p.shape[1]
                parts |= {rest: _PARTS.get(rest, (rest,))}
            elif rest:
                ranks[path] += p.shape[0]
                peft |= rest != "weight"
            elif ".lora_B." not in name:
                notes.append(f"what {name.rpartition('.lora_')[2]} of an adapter computes is left out")
        if not ranks:
            return cls(notes=tuple(notes))
        leaves = dict.fromkeys(map(_leaf, ranks))
        every = [*modules, *(name for name, _ in named)]  # experts' weights are no modules
        layers = dict.fromkeys(ranks, True)
        layers |= {path: path in ranks for path in every if _leaf(path) in leaves and not is_adapter(path)}
        targets = tuple(t for leaf in leaves for part in parts.get(leaf, (leaf,)) for t in _targets(part, leaf, layers))
        (rank, _), *others = Counter(ranks.values()).most_common()
        if others:
            notes.append(f"adapters of several ranks are planned with rank {rank}, that of most")
        return cls(rank, targets, peft, size, tuple(dict.fromkeys(notes)), layers)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _targets(name: str, leaf: str, layers: Mapping[str, bool]) -> Sequence[str]:
    """Return the targets that mean those of the layers called `leaf`, `name` in a plan, that have an adapter: the name, or where
    not all have one, a pattern for each block."""
    own = {path: adapted for path, adapted in layers.items() if _leaf(path) == leaf}
    blocks = dict.fromkeys(block_of(path) for path, adapted in own.items() if adapted)
    return [name] if all(own.values()) or None in blocks else [f"layers.{block}.*.{name}" for block in blocks]


def _trained(named: Sequence[tuple[str, Any]], adapters: _Adapters) -> Trained:
    those = [p for _, p in named if _trains(p)]
    dtypes = {dtype_of(p) for p in those}
    return Trained(
        parameters=sum(p.numel() for p in those),
        bytes=sum(p.numel() * p.element_size() for p in those),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        adapter_bytes=adapters.bytes,
        peft=next((dtype_of(p) for name, p in named if ".lora_A." in name), None) if adapters.peft else None,
    )


def dtype_of(p: Any) -> str | None:
    """Return a parameter's dtype as a plan names it; None for a dtype that does not train."""
    name = str(getattr(p, "dtype", "")).rpartition(".")[2]
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return short.get(name) if name in DTYPE_BYTES else None


def _recipe(model: Any, adapters: _Adapters) -> Any:
    """Return the recipe that was applied last, with the adapters that the model has now: they may outlive it, be merged, or come
    from elsewhere."""
    recipe = next((found for module in model.modules() if (found := recipe_of(module)) is not None), None)
    if recipe is not None and any(getattr(module, "keeps_decoded", False) for module in model.modules()):
        recipe = recipe.decode_once()  # as a session on a CPU decides
    if not adapters.rank:
        return recipe if recipe is None or recipe.adapter is None else replace(recipe, adapter=None)
    recipe = recipe or BF16
    now = recipe.adapter or Lora()
    means = all(bool(now.meant(path)) == adapted for path, adapted in adapters.layers.items())
    if recipe.adapter is not None and now.rank == adapters.rank and means:
        return recipe
    return recipe.lora(adapters.rank, now.alpha, adapters.targets)


def _fusion(model: Any) -> dict[str, Any]:
    fusion = fusion_of(model)
    checkpointed = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    # without fused layers, "selective" has nothing to compute again in ours
    recompute = fusion.recompute if fusion is not None and (fusion.fuses or fusion.recompute == "full") else None
    return {"fusion": fusion, "recompute": "full" if checkpointed and recompute in (None, "none") else recompute}


def _on_the_host(model: Any) -> dict[str, Any]:
    """Return the arguments for what `sk.offload_weights` and `sk.offload_activations` keep on the host."""
    kept = {stream.keeps: stream.prefetch for stream in host_streams(model)}
    found: dict[str, Any] = {"offload_activations": True} if "activations" in kept else {}
    return {**found, "offload_weights": kept["weights"], "recompute": "full"} if "weights" in kept else found
