"""Read what is planned into a Subject: a number of parameters, or the shape of a config or a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from surokit import arguments, units
from surokit.planner.counts.memory import Layers
from surokit.planner.inputs.configs import FAMILIES, read_shape
from surokit.planner.inputs.introspect import NOTHING, LiveArguments, dtype_of, model_in, read_own
from surokit.planner.inputs.shape import Shape, built_here

# Families whose configs drop activations unless told otherwise; dropped ones have masks, and attention loses its fused kernel.
_DROPS = ("gpt2", "seed_oss")


@dataclass(frozen=True)
class Subject:
    """A Subject is what is planned: a shape, or a number of parameters alone.

    A live model's has its `dtype`, `layers` and `device`, and its `own` arguments. own_loss: it is a Decoder of ours or its config,
    whose loss makes no whole logits, whoever's layers are counted.
    """

    parameters: float
    name: str
    shape: Shape | None = None
    notes: tuple[str, ...] = ()
    dtype: str | None = None
    layers: Layers = "surokit"
    device: Literal["cpu", "cuda"] = "cuda"
    own: LiveArguments = NOTHING
    own_loss: bool = False

    @property
    def active(self) -> float:
        """Return the number of parameters that a token passes: the N of 6ND."""
        return self.parameters if self.shape is None else float(self.shape.active_parameters)


def read_subject(what: Any) -> Subject:
    """Read anything that `plan` takes as a Subject; a Subject is returned unchanged."""
    if isinstance(what, Subject):
        return what
    if isinstance(what, str) and not Path(what).exists():
        with suppress(ValueError):  # "8e9", as a command line has it
            what = float(what)
    if isinstance(what, (bool, Real)):
        parameters = arguments.parameters(what)
        return Subject(parameters, f"{units.count(parameters)} parameters")
    live, what = what, model_in(what)
    shape, source = read_shape(what)
    own = read_own(live)
    notes: tuple[str, ...] = ()
    if shape.family not in FAMILIES:
        notes += (
            f"model_type {shape.family!r} is counted as if it were a Llama-family decoder (three-matrix SwiGLU, RMSNorm)",
        )
    if shape.experts is not None:
        notes += (
            "gate and up of an expert are planned as two layers, each with an adapter of its own; apply() takes both as one weight",
        )
    if shape.family in _DROPS:
        notes += (f"memory takes {shape.family} without dropout, which its configs have: set it to 0, or expect more",)
    layers = _own_layers(what, shape)
    if layers == "transformers" and not built_here(shape):
        notes += (
            f"memory and time are those of transformers' layers: surokit's own are not counted for {shape.family}",
        )
    name = f"{shape.family} of {units.count(shape.parameters)} parameters {source}"
    dtype, device = _own_dtype(what), _own_device(what)
    return Subject(float(shape.parameters), name, shape, notes, dtype, layers, device, own, _has_own_loss(what, shape))


def _own_layers(what: Any, shape: Shape) -> Layers:
    """Return whose layers compute: "transformers" for shapes that ours cannot build and for transformers' live models, else
    "surokit".

    A model is transformers' where its class, or the one that an adapter wraps, is theirs.
    """
    if not built_here(shape):
        return "transformers"
    model = what.get_base_model() if hasattr(what, "get_base_model") else what
    theirs = type(model).__module__.startswith("transformers.models") and hasattr(model, "parameters")
    return "transformers" if theirs else "surokit"


def _has_own_loss(what: Any, shape: Shape) -> bool:
    config = getattr(what, "config", what)
    return config is not shape and hasattr(config, "layers") and hasattr(config, "width")


def _own_dtype(what: Any) -> str | None:
    """Return the dtype of a live model's first parameter that is in bf16, fp16 or fp32; None where there is none."""
    parameters = getattr(what, "parameters", None)
    if not callable(parameters):
        return None
    return next((name for p in parameters() if (name := dtype_of(p))), None)


def _own_device(what: Any) -> Literal["cpu", "cuda"]:
    """Return the kind of device of a live model's first parameter; "cuda" for a model that is on none yet."""
    parameters = getattr(what, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return "cpu" if getattr(getattr(first, "device", None), "type", None) == "cpu" else "cuda"
