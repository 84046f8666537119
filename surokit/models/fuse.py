"""Compute a model's operations together, in place: `fuse(model)`; and say what was fused, what was not, and why.

    surokit.fuse(model)                          everything, as a model on CUDA does by default if it is a Decoder
    surokit.fuse(model, recompute="full")        the same, but of each block only the input is kept for backward
    surokit.fuse(model, surokit.Fusion().without("gate"))
    surokit.fuse(model, surokit.Fusion.OFF)      every forward as it was

Of transformers' models it takes norms and MLPs by what they compute, and attention, decoder layers and the loss of the families
that models/foreign.py knows. No class is changed for other models, and no parameter or state-dict key for this one.
"""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from surokit.fusion import OFF, Fusion
from surokit.models import foreign
from surokit.models.decoder import MLP, Attention, Backbone, Block
from surokit.models.sparse import SparseMLP
from surokit.nn.joint import LAID, lay
from surokit.nn.linear import KEPT, Linear
from surokit.nn.norm import RMSNorm
from surokit.places import check_module
from surokit.torch_private import children_of, parameters_of

if TYPE_CHECKING:
    import pandas as pd

_EVERYTHING = Fusion()
_ADOPTED = "_surokit_adopted"  # in a layer that was torch's own before it was fused
_GATES = ("gate_proj", "up_proj", "down_proj")
_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class FusedModule:
    """A FusedModule says what became of one module."""

    module: str
    kind: str  # "block", "attention", "MLP", "norm" or "loss"
    why: str = ""  # why it was left alone, or ""
    but: str = ""  # what of a fused module is computed apart, or ""

    @property
    def fused(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Fused:
    """A Fused has one row a module that was looked at. It prints as a summary; `.frame()` has every row."""

    fusion: Fusion
    rows: tuple[FusedModule, ...]

    @property
    def line(self) -> str:
        """Return one line: what is fused, and how."""
        if self.fusion == OFF:
            return "not fused: every forward is the model's own"
        counts = Counter(row.kind for row in self.rows if row.fused)
        said = ", ".join(f"{n} {kind}{'s' * (n > 1 and kind != 'attention')}" for kind, n in counts.items())
        return f"fused: {said or 'nothing'} ({self.fusion})"

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with the columns module, kind, fused, why, but."""
        import pandas as pd

        rows = [(r.module, r.kind, r.fused, r.why, r.but) for r in self.rows]
        return pd.DataFrame(rows, columns=["module", "kind", "fused", "why", "but"])

    def _notes(self) -> list[str]:
        said: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why:
                said.setdefault(f"{row.kind} left alone ({row.why})", []).append(row.module)
            if row.but:
                said.setdefault(f"{row.kind} fused, but {row.but}", []).append(row.module)
        return [f"{len(names)} {what}: {_few(names)}" for what, names in said.items()]

    def __repr__(self) -> str:
        return "\n".join([self.line, *(f"  {line}" for line in self._notes())])

    def _repr_html_(self) -> str:
        items = "".join(f"<br><code>{html.escape(line)}</code>" for line in self._notes())
        return f"<div><b>{html.escape(self.line)}</b>{items}</div>"


def fuse(model: nn.Module, fusion: Fusion = _EVERYTHING, **changes: Any) -> Fused:
    """Make `model` compute operations together as `fusion` says, with `changes` of its fields, in place.

    model: a Decoder or a model of transformers, before or after `surokit.apply`, with PEFT around it or not. Layers that PEFT
    wraps are computed as PEFT does. Weights of layers that read one input are laid side by side (fusion.joint); parameters stay
    the same objects. Codes and scales of a recipe are unchanged; sums are taken in another order or rounded less often, and so a
    fused norm or loss of transformers in bfloat16 differs from its own by roundings.

    In a training step of a fused transformers model the output's `logits` are computed only if they are read.

    Raises TypeError for what is no module or no `Fusion`, and for a field that it does not have, ValueError for a value it does not
    know.
    """
    check_module(model, "fuse")
    if not isinstance(fusion, Fusion):
        raise TypeError(f"fuse() takes a surokit.Fusion, not {fusion!r}: Fusion.OFF brings every forward back.")
    known = [f.name for f in fields(Fusion)]
    if strange := [name for name in changes if name not in known]:
        raise TypeError(f"fuse() takes the fields of surokit.Fusion ({', '.join(known)}), not {', '.join(strange)}.")
    fusion = replace(fusion, **changes)
    for layer in model.modules():
        if isinstance(layer, Linear):  # kept codes are made again where they are still wanted
            layer.frozen = None
    rows = [row for name, module in list(model.named_modules()) if (row := _fuse(name, module, fusion))]
    if fusion.joint and any(p.is_cuda for p in model.parameters()):
        torch.cuda.empty_cache()  # the memory that weights were moved from comes in other sizes than what a step asks for
    return Fused(fusion, tuple(rows))


def _fuse(name: str, module: nn.Module, fusion: Fusion) -> FusedModule | None:
    """Fuse one module, or undo it; None for what nobody would fuse."""
    if isinstance(module, foreign.FusedMixin) and not _restored(module):
        module.fusion = fusion
        return FusedModule(
            name, "part", "another changed its class after it was fused: its fusion is set, its class stays"
        )
    if isinstance(module, (Backbone, Block, Attention, MLP)):
        module.fusion = fusion
        kind: str | None = next((said for ours, said in _OURS.items() if isinstance(module, ours)), None)
    else:
        kind, part, why = _look(module)
        if kind is None or fusion == OFF:
            return None
        if part is foreign.FusedNorm and not fusion.norm:
            why = "norm is off"
        if "forward" in vars(module) and not getattr(module.forward, "follows_class", False):
            why = "another replaced its forward"
        if part is None or why:
            return FusedModule(name, kind, why)
        _adopt(module)
        foreign.fused(module, part, fusion)
    if isinstance(module, (Attention, MLP, foreign.FusedAttention)):
        lay(module.readers, fusion)
    return FusedModule(name, kind, but=_apart(module)) if kind else None


_OURS: dict[type[nn.Module], str] = {Block: "block", Attention: "attention", MLP: "MLP"}


def _apart(module: nn.Module) -> str:
    """Return which layers of the module others compute, in a few words."""
    children = children_of(module)
    layers = {name: children[name] for name in (*_HEADS, *_GATES) if name in children}
    others = [name for name, layer in layers.items() if type(layer) is not Linear]
    who = {type(layers[name]).__module__.partition(".")[0] for name in others}
    return f"{', '.join(others)} as {' and '.join(sorted(who))} computes it" if others else ""


def _adopt(module: nn.Module) -> None:
    """Make torch's linear layers of a module ours, which compute the same."""
    for name in (*_HEADS, *_GATES):
        layer = children_of(module).get(name)
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
            vars(layer)[_ADOPTED] = True


def _restored(module: foreign.FusedMixin) -> bool:
    """Give a module of transformers, and those of its layers that no recipe has taken, their own classes; False as in foreign."""
    for layer in children_of(module).values():
        if not isinstance(layer, Linear) or type(layer) is not Linear:
            continue
        vars(layer).pop(LAID, None)
        for name in KEPT:  # torch's class would take them into copies
            vars(layer).pop(name, None)
        more = layer.precision or layer.storage or layer.has_adapter or layer.can_unmerge
        if not more and vars(layer).pop(_ADOPTED, False):
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return foreign.restored(module)


# -- what a module of transformers is


def _look(module: nn.Module) -> tuple[str | None, type[foreign.FusedMixin] | None, str]:
    """(kind, what it can become, why not); kind is None for what nobody would fuse."""
    kind, children = type(module), children_of(module).keys()
    if kind is SparseMLP:
        return "MLP", None, "its experts are computed for all their tokens at once, from the norm's output"
    if "variance_epsilon" in vars(module) and "weight" in parameters_of(module):
        alone = len(parameters_of(module)) == 1 and not children and foreign.computes_rms_norm(kind)
        return "norm", foreign.FusedNorm, "" if alone else f"{kind.__name__} computes something else"
    if kind.__name__.endswith("Norm") and kind is not RMSNorm and "weight" in parameters_of(module):
        return "norm", None, f"{kind.__name__} is not known"
    if children >= set(_GATES):
        activation = getattr(module, "act_fn", None)
        if foreign.computes_swiglu(kind, activation):
            return "MLP", foreign.FusedMLP, ""
        return "MLP", None, f"{kind.__name__} with {type(activation).__name__} is not known"
    for suffix, (what, part) in _KNOWN.items():
        if kind.__name__.endswith(suffix) and (what != "loss" or "lm_head" in children):
            return what, part, _why_not(kind, kind.__name__.removesuffix(suffix))
    return None, None, ""


_KNOWN: dict[str, tuple[str, type[foreign.FusedMixin]]] = {
    "Attention": ("attention", foreign.FusedAttention),
    "DecoderLayer": ("block", foreign.FusedLayer),
    "ForCausalLM": ("loss", foreign.FusedCausalLM),
}


def _why_not(kind: type[nn.Module], family: str) -> str:
    """Return why this class is not one that models/foreign.py computes, or ""."""
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    if family not in foreign.FAMILIES or kind.__module__ != home:
        return f"{kind.__name__} is not known"
    if not foreign.computes_alike(family):
        return f"this transformers computes {kind.__name__} in another way than we know"
    return ""


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


__all__ = ["OFF", "Fused", "Fusion", "fuse"]
