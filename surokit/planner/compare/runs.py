"""Read single runs that others published (runs.csv), and say how `plan` is asked for each of them.

A row is one configuration: what was trained on how many GPUs, the tokens a second of one GPU (or its model TFLOPS), and the memory
where it was printed. `assumed` names what the source does not state. Models that the catalogue lacks are in shapes.csv. Runs that
no plan expresses are listed too: `why_not` says what it lacks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surokit.fusion import Fusion
from surokit.hardware.gpus import find_gpu
from surokit.planner.counts.memory import AttentionKernel, Engine
from surokit.planner.inputs import catalogue
from surokit.planner.inputs.configs import read_shape
from surokit.planner.inputs.shape import built_here

#: GB/s that one GPU has between nodes where a run does not say: a card of 400 Gbit/s each.
BETWEEN_GB_S = 50.0
_RECOMPUTES = ("none", "selective", "mlp", "full", "every second block")
#: What a run keeps on the host -> the arguments of a plan that does.
_OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "CPU AdamW": {"optimizer": "offloadadamw"},
    "activations": {"offload_activations": True},
    "inputs": {"offload_activations": "inputs"},
    "moments": {"offload_states": True},
    "moments and inputs": {"offload_states": True, "offload_activations": "inputs"},
}
# Of others that fuse by hand the products of an adapter stand alone.
_FUSED = Fusion(adapters=False)
_NUMBERS = ("gpus", "batch", "length", "accumulate", "rank", "zero", "tp", "pp", "vp", "ep", "cp")
_FIGURES = ("between_gb_s", "tokens_per_s", "tflops", "memory_gib")


@dataclass(frozen=True)
class PublishedRun:
    """A PublishedRun is one run of others: its arguments as `plan` has them, and what was measured.

    source          repository at a commit, and the file
    between_gb_s    GB/s that one GPU has between nodes
    tokens_per_s    of one GPU; `tflops` are its model TFLOPS, where only these were printed
    vp              virtual stages of each of `pp`
    layers, logits, optimizer   as `plan` has them, where they are not ours, fused, and AdamW; "+in backward" may follow it
    states          "fp32": float32 weights or masters and moments
    targets         modules with an adapter, where these are not all of a block
    memory_gib      of one GPU; `memory` says which: "allocated" or "reserved"
    engine          "eager" PyTorch, "compiled" by torch.compile, or "fused": kernels written by hand
    attention       its kernel where that is not the engine's usual one
    assumed         names of what the source does not state
    """

    source: str
    model: str
    gpu: str
    gpus: int | None
    batch: int | None
    length: int | None
    accumulate: int | None
    recipe: str
    rank: int | None
    recompute: str
    zero: int | None
    offload: str
    tp: int | None
    pp: int | None
    vp: int | None
    ep: int | None
    cp: int | None
    between_gb_s: float | None
    engine: Engine
    attention: AttentionKernel | None
    layers: str
    logits: str
    optimizer: str
    states: str
    targets: str
    tokens_per_s: float | None
    tflops: float | None
    memory_gib: float | None
    memory: str
    assumed: tuple[str, ...]
    note: str

    @property
    def where(self) -> str:
        """Return the source without commit and path: who published it, and in which file."""
        repository, _, path = self.source.partition(":")
        name = repository.partition("@")[0].rpartition("/")[2]
        return f"{name} {path.rpartition('/')[2].partition('.')[0]}".strip()

    @property
    def publisher(self) -> str:
        """Return the repository, without the commit: runs of one are alike in more than their columns say."""
        return self.source.partition(":")[0].partition("@")[0]

    @property
    def why_not(self) -> str:
        """Say what of the run a plan cannot express; "" where it can."""
        if self.gpus is None or self.batch is None or self.length is None:
            return "the batch or the length is not stated"
        if self.cp is not None and self.cp > 1:
            return "context parallelism"
        if self.offload not in _OFFLOADS:
            return f"on the host: {self.offload}"
        from surokit.recipe import recipes

        if self.recipe not in recipes:
            return self.recipe
        if self.recompute not in _RECOMPUTES:
            return f"recompute of {self.recompute}"
        try:
            find_gpu(self.gpu)
        except ValueError:
            return f"the GPU {self.gpu}"
        if (config := _config(self.model, self.length)) is None:
            return f"the model {self.model}"
        recipe = self.recipe if self.recipe != "bf16" else ""
        is_gpt2 = isinstance(config, dict) and config["model_type"] == "gpt2"
        return f"{recipe} of a GPT-2, whose matrices recipes do not reach" if recipe and is_gpt2 else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `plan` for the run. Raises ValueError where it cannot be expressed."""
        if why := self.why_not:
            raise ValueError(f"A plan cannot express this run of {self.model}: {why}.")
        assert self.gpus is not None
        assert self.length is not None
        from surokit.recipe import PROJECTIONS, find_recipe

        recipe = None if self.recipe == "bf16" and not self.rank else find_recipe(self.recipe)
        config = _config(self.model, self.length)
        assert config is not None
        shape, _ = read_shape(config)
        optimizer, _, in_backward = self.optimizer.partition("+")
        every_second = self.recompute == "every second block"
        targets = self.targets.split() or PROJECTIONS
        whole = (self.tp or 1) * (self.pp or 1) * (self.ep or 1) == 1
        return {
            "what": config,
            "engine": self.engine,
            "attention_kernel": self.attention or ("flash3" if self.engine == "fused" else None),
            "fusion": _FUSED if self.engine == "fused" and whole and built_here(shape) else None,
            "layers": self.layers or ("transformers" if self.engine == "fused" and not whole else None),
            "gpu": self.gpu,
            "gpus": self.gpus,
            "batch": self.batch,
            "length": self.length,
            "accumulate": self.accumulate,
            "recipe": recipe.lora(self.rank, targets=targets) if recipe is not None and self.rank else recipe,
            "logits": self.logits or None,
            "optimizer": optimizer or None,
            "optimizer_in_backward": bool(in_backward),
            "master": self.states == "fp32",
            "state_dtype": self.states or None,
            "recompute": "full" if every_second else self.recompute,
            "recompute_blocks": shape.layers // 2 if every_second else None,
            "zero": self.zero or 0,
            "tensor_parallel": self.tp or 1,
            "pipeline_parallel": self.pp or 1,
            "virtual_stages": self.vp or 1,
            "expert_parallel": self.ep or 1,
            **_OFFLOADS[self.offload],
            "between_gb_s": (self.between_gb_s or BETWEEN_GB_S) if self.gpus > 8 else None,
        }


def read_runs(path: Path | None = None) -> tuple[PublishedRun, ...]:
    """Read the published runs, or those of a file with the same columns."""
    if path is None:
        return _shipped()
    return _parse(path.read_text(encoding="utf-8"))


@cache
def _shipped() -> tuple[PublishedRun, ...]:
    return _parse(files("surokit.planner.compare").joinpath("runs.csv").read_text(encoding="utf-8"))


def _parse(text: str) -> tuple[PublishedRun, ...]:
    def value(name: str, text: str) -> Any:
        if name == "assumed":
            return tuple(text.split())
        if name == "attention":
            return text or None
        if name in _NUMBERS:
            return int(text) if text else None
        return (float(text) if text else None) if name in _FIGURES else text

    names = [f.name for f in fields(PublishedRun)]
    return tuple(
        PublishedRun(**{name: value(name, row[name]) for name in names}) for row in csv.DictReader(io.StringIO(text))
    )


@cache
def _shapes() -> Mapping[str, catalogue.Known]:
    text = files("surokit.planner.compare").joinpath("shapes.csv").read_text(encoding="utf-8")
    return MappingProxyType(catalogue.read_rows(text))


def _config(model: str, length: int) -> str | dict[str, Any] | None:
    """Return what `plan` is asked about: a name of the catalogue, or the sizes; None where the model is not known."""
    if (found := _shapes().get(model)) is None:
        return model if catalogue.find(model) is not None else None
    config = dict(found.config)
    if config["model_type"] == "gpt2":  # learned positions, as many as the sequence has
        names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
        config |= {names[name]: config[name] for name in names} | {"n_positions": length}
    return config
