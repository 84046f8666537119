"""Do the same work in other libraries and in surokit, each in a process of its own, which `bench peers` starts.

    python -m surokit.bench.peers --worker unsloth '{"model": {...}, "batch": 2, "length": 2048, ...}'

Every system loads the same weights from one folder, trains on the same rows in the same order, and starts from the same
adapters (drawn from each layer's name), so that losses can be laid over each other. Other libraries get a plain loop, which
is the fastest form of what their trainers do: tokens that are on the device already, a fused AdamW, clipping, and no wait
within a turn.

A work is a dict:
    model               the fields of a DecoderConfig
    batch, length, accumulate, lr, seed
    train               "lora" (with rank, alpha) or "full"
    recompute           "none" or "full"
    settings            "equal": nothing beyond what the library does by itself; "best": as its documentation recommends for speed
    tokens              an .npy file of rows [S, T]; micro-batch i of a run takes rows i * batch .. modulo S
    held_out            optional: rows [S, T] for {"evaluate": true}
    weights             optional: a folder written by surokit.save; without one, random weights from the seed
    device              "cuda" or "cpu"
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surokit.bench import process

Work = Mapping[str, Any]


class Runner(Protocol):
    """A Runner is a model under training. `steps` returns each step's loss; `evaluate` the mean loss on the held-out rows;
    form: in words."""

    model: Any
    form: str

    def steps(self, count: int) -> list[float]: ...

    def evaluate(self) -> float: ...


@dataclass(frozen=True)
class System:
    """A System is a library in one form. packages: those that have to be installed, of which the first that is missing is
    reported; beside: those that may be installed, and would change its speed."""

    build: Callable[[Work, str], Runner]
    words: str
    packages: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    trains: tuple[str, ...] = ("lora", "full")
    cpu: bool = True
    exact: bool = True  # computes in bfloat16 throughout, so its losses are held to a narrow bound


def missing(system: System, work: Work) -> str | None:
    """Return why the system cannot do the work here; None where it can."""
    for package in system.packages:
        if not installed(package):
            return f"{package} is not installed"
    if work["train"] not in system.trains:
        return f"it has no {work['train']} training here"
    if work["device"] == "cpu" and not system.cpu:
        return "it needs a GPU"
    return None


# -- systems


def _transformers(work: Work, folder: str) -> Runner:
    compiled = work["settings"] == "best"
    model = _pretrained(work, folder)
    if compiled:
        model.compile()
    return Loop(model, work, "compiled" if compiled else "eager")


def _pretrained(work: Work, folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from surokit.dissection.loop import recomputed, with_peft

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    model.to(work["device"]).train()
    if work["recompute"] == "full":
        recomputed(model)
    if work["train"] != "lora":
        return model
    if work["recompute"] == "full":
        model.enable_input_require_grads()
    return with_peft(model, work["rank"], work["alpha"])


def _liger(work: Work, folder: str) -> Runner:
    import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3()
    return Loop(_pretrained(work, folder), work, "eager")


def _torchao(work: Work, folder: str) -> Runner:
    """Build torchao's system as its page says: dynamic scales per tensor, its fastest form; the head stays; always
    compiled, on a GPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = _pretrained(work, folder)
    on_cpu = work["device"] == "cpu"
    config = Float8LinearConfig(emulate=True) if on_cpu else Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, module_filter_fn=lambda _, name: "lm_head" not in name, config=config)
    if not on_cpu:
        model.compile()
    return Loop(model, work, "eager, emulated" if on_cpu else "compiled")


def _unsloth(work: Work, folder: str) -> Runner:
    """Build Unsloth's system in bfloat16 autocast, as its trainer runs it. At equal settings its adapters are bfloat16 as
    everyone's, at its best float32 with AdamW of 8 bits, as in its notebooks."""
    import torch

    from surokit.recipe import PROJECTIONS

    for name in ("HF_HUB_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"):
        os.environ.setdefault(name, "1")
    _write_tokenizer(Path(folder))
    os.chdir(folder)  # where it writes what it compiles
    fast = import_module("unsloth").FastLanguageModel  # before transformers, which it changes
    again, best = work["recompute"] == "full", work["settings"] == "best"
    model, _ = fast.from_pretrained(
        model_name=folder,
        max_seq_length=work["length"],
        dtype=torch.bfloat16,
        load_in_4bit=False,
        full_finetuning=work["train"] == "full",
        float32_mixed_precision=False,
        use_gradient_checkpointing=again,
    )
    if work["train"] == "lora":
        model = fast.get_peft_model(
            model,
            r=work["rank"],
            target_modules=list(PROJECTIONS),
            lora_alpha=work["alpha"],
            lora_dropout=0,  # what its fused adapters ask for
            bias="none",
            use_gradient_checkpointing=again,
            random_state=work["seed"],
        )
        for parameter in model.parameters():
            if parameter.requires_grad and not best:
                parameter.data = parameter.data.bfloat16()
    fast.for_training(model, use_gradient_checkpointing=again)
    return Loop(model, work, "its own kernels", eight_bit=best, autocast=True)


def _surokit(recipe: str) -> Callable[[Work, str], Runner]:
    return lambda work, folder: Ours(work, folder, recipe)


#: The versions whose documentation and code the systems below were written by.
WRITTEN_FOR = {
    **{"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "bitsandbytes": "0.50.2", "liger_kernel": "0.8.5"},
    **{"transformers": "5.23.0", "peft": "0.21.2", "torchao": "0.18.0"},
}
_HF = ("transformers", "peft")
SYSTEMS: dict[str, System] = {  # in the order in which they are raced
    "surokit bf16": System(_surokit("bf16"), "Session"),
    "surokit fp8": System(_surokit("fp8"), "Session", exact=False),
    "surokit qfp8": System(_surokit("qfp8"), "Session", trains=("lora",), exact=False),
    "unsloth": System(
        _unsloth,
        "FastLanguageModel",
        ("unsloth", "unsloth_zoo", "bitsandbytes"),
        (*_HF, "trl", "xformers", "flash_attn"),
        cpu=False,
    ),
    "transformers": System(_transformers, "AutoModelForCausalLM, PEFT for LoRA", _HF),
    "liger": System(_liger, "transformers, PEFT for LoRA, Liger's kernels", ("liger_kernel", *_HF), cpu=False),
    "torchao float8": System(
        _torchao, "transformers, float8 per tensor", ("torchao", "transformers"), trains=("full",), exact=False
    ),
}


# -- loops


class Loop:
    """A Loop is a plain training loop around a model of transformers' kind."""

    def __init__(self, model: Any, work: Work, form: str, *, eight_bit: bool = False, autocast: bool = False) -> None:
        import torch

        from surokit.dissection.loop import TorchLoop, set_adapters

        self.form = f"{form}, AdamW of 8 bits" if eight_bit else form
        self.model, self.work, self.taken = model, work, 0
        set_adapters(model)
        self.loop = TorchLoop(model, work["lr"], eight_bit=eight_bit, autocast=autocast)
        self.rows = torch.from_numpy(np.load(work["tokens"]).astype(np.int64)).to(self.loop.device)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            parts = range(self.taken, self.taken + self.work["accumulate"])
            losses.append(self.loop.step([self._batch(self.rows, index) for index in parts]))
            self.taken = parts.stop
        return [float(loss) for loss in losses]

    def _batch(self, rows: Any, index: int) -> dict[str, Any]:
        batch = self.work["batch"]
        first = index % (len(rows) // batch) * batch
        ids = rows[first : first + batch]
        return {"input_ids": ids, "labels": ids}

    def evaluate(self) -> float:
        import torch

        rows = torch.from_numpy(np.load(self.work["held_out"]).astype(np.int64)).to(self.loop.device)
        with torch.no_grad():
            losses = [self.loop.loss(self._batch(rows, i)) for i in range(len(rows) // self.work["batch"])]
        return float(sum(losses) / len(losses))


class Ours:
    """Ours is a session with all defaults."""

    def __init__(self, work: Work, folder: str, recipe: str) -> None:
        import torch

        import surokit as sk
        from surokit.dissection.loop import BETAS, CLIP, DECAY, set_adapters
        from surokit.recipe import find_recipe

        self.work, self.form = work, "by default"
        chosen = find_recipe(recipe)
        if work["train"] == "lora":
            chosen = chosen.lora(rank=work["rank"], alpha=work["alpha"])
        self.model = sk.load(folder, dtype=torch.bfloat16, device=work["device"])
        sk.apply(self.model, chosen)
        set_adapters(self.model)
        if work["recompute"] != "none":
            sk.fuse(self.model, recompute=work["recompute"])
        self.session = sk.Session(
            self.model,
            self._batches("tokens"),
            optimizer=sk.AdamW(lr=work["lr"], betas=BETAS, weight_decay=DECAY),
            accumulate=work["accumulate"],
            clip=CLIP,
            schedule=None,
            compile=False,
        )

    def _batches(self, name: str) -> Any:
        from surokit.data import Batches

        return Batches(np.load(self.work[name]), batch=self.work["batch"], shuffle=False, name="text")

    def steps(self, count: int) -> list[float]:
        self.session.run(count)
        losses: list[float] = self.session.records.column("loss")[-count:].tolist()
        return losses

    def evaluate(self) -> float:
        return self.session.evaluate(self._batches("held_out"))


# -- a process


class Racing:
    """A Racing builds a system and answers requests: {"steps": n} or {"steps": n, "before": m}, of which m more are not
    timed, {"evaluate": true}, {"profile": n}."""

    def __init__(self, name: str, work: Work) -> None:
        self.work, self.cuda = work, work["device"] == "cuda"
        began = time.perf_counter()
        self.runner = SYSTEMS[name].build(work, work["weights"])
        trained = [p for p in self.runner.model.parameters() if p.requires_grad]
        self.first = {
            "ready": True,
            "build_s": time.perf_counter() - began,
            "trained": sum(p.numel() for p in trained),
            "note": f"{SYSTEMS[name].words}, {self.runner.form}; trains {_dtypes(trained)}",
            "versions": versions(SYSTEMS[name].packages + SYSTEMS[name].beside),
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "steps" in request:
            return self._steps(int(request["steps"]), int(request.get("before", 0)))
        if "evaluate" in request:
            try:
                return {"loss": self.runner.evaluate()}
            except Exception as error:  # its speed was measured all the same
                return {"loss": None, "why": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {}

    def _steps(self, count: int, before: int = 0) -> dict[str, Any]:
        import torch

        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        losses = self.runner.steps(before) if before else []
        if self.cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses += self.runner.steps(count)
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        tokens = count * self.work["batch"] * self.work["length"] * self.work["accumulate"]
        return {"seconds": seconds, "steps": count, "tokens": tokens, "losses": losses, **self._memory()}

    def _memory(self) -> dict[str, float]:
        found = process.peak_memory(self.cuda)
        if self.cuda:
            import torch

            torch.cuda.empty_cache()  # room for the system that takes the next turn; not within the time
        return found


def worker(name: str, work: Work, timeout_s: float) -> process.Worker:
    """Start the process of a system."""
    argv = [sys.executable, "-m", "surokit.bench.peers", "--worker", name, json.dumps(work)]
    return process.Worker(argv, name, timeout_s, clocks=work["device"] == "cuda")


def serve(name: str, work: Work) -> int:
    """Run as the process of a system, or of "weights", which writes them and ends."""
    with tempfile.TemporaryDirectory() as own:
        return process.serve(lambda: _start(name, work, own))


def _start(name: str, work: Work, own: str) -> tuple[dict[str, Any], process.Answers | None]:
    if name == "weights":
        write_weights(work)
        return {"ready": True}, None
    if name not in SYSTEMS:
        return {"missing": f"there is no system {name!r}: known are {', '.join(SYSTEMS)}"}, None
    if lacking := missing(SYSTEMS[name], work):
        return {"missing": f"{name}: {lacking}"}, None
    racing = Racing(name, with_weights(work, own))
    return racing.first, racing.answer


def with_weights(work: Work, folder: str) -> Work:
    """Return the work; if it has no weights yet, write random ones in `folder` for it."""
    if not work.get("weights"):
        work = {**work, "weights": folder}
        write_weights(work)
    return work


def write_weights(work: Work) -> None:
    """Write a checkpoint with random bfloat16 weights of work["model"] to work["weights"], which all libraries load."""
    import torch

    import surokit as sk

    torch.manual_seed(work["seed"])
    config = sk.DecoderConfig(**{"max_length": work["length"], **work["model"]})
    sk.save(sk.Decoder(config, device=work["device"], dtype=torch.bfloat16), work["weights"])
    if work["device"] == "cuda":
        torch.cuda.empty_cache()


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer, without which Unsloth loads no model; nothing is tokenized with it."""
    if (folder / "tokenizer.json").exists():
        return
    from surokit.data import train_tokenizer

    special = ("<|endoftext|>", "<|pad|>")
    tokenizer = train_tokenizer(["Call me Ishmael."], 280, special=special)
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": special[1], "eos_token": special[0]}))


def _dtypes(parameters: list[Any]) -> str:
    return " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {package: version(package) for package in packages if installed(package)}


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
