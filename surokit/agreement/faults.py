"""Find where two models part, and why: parameters, rotary tables, who sees whom, numbers that modules hold, the loss's labels.

B batch, T tokens, K width, E half of a head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surokit.agreement.measure import dense_parameters, roundoff, weights_apart
from surokit.agreement.observe import (
    Batch,
    Call,
    dtype_of,
    modules_of,
    parameters_by_name,
    plain_name,
    undisturbed,
    without_products,
)
from surokit.agreement.report import short
from surokit.nn.loss import IGNORED

# numbers that decide what a module computes, under each of their names
_NUMBERS: dict[str, tuple[str, ...]] = {
    "scale of the scores": ("scaling", "scale", "softmax_scale"),
    "eps": ("eps", "variance_epsilon"),
    "window": ("window", "sliding_window"),
    "head width": ("head_dim",),
}
_PROBES = 4  # tokens of which it is asked whom they see


def parameters_that_differ(a: nn.Module, b: nn.Module, stored: Mapping[str, float]) -> dict[str, str]:
    """Return by parameter how the two models' parameters differ, in words; without what dtypes or storage explain."""
    mine, theirs = dense_parameters(a), dense_parameters(b)
    own, other = parameters_by_name(a), parameters_by_name(b)
    main = dtype_of(a), dtype_of(b)
    u = max(map(roundoff, main))
    found: dict[str, str] = {}
    ties = [Counter(map(id, parameters.values())) for parameters in (own, other)]
    for name in dict.fromkeys((*mine, *theirs)):
        if name not in theirs or name not in mine:
            found[name] = f"is only in {'a' if name in mine else 'b'}"
            continue
        w, v = mine[name], theirs[name]
        if w.shape != v.shape:
            found[name] = f"has the shape {list(w.shape)} in a and {list(v.shape)} in b"
            continue
        apart = weights_apart(w, v)
        bar = max(u if w.dtype != v.dtype else 0.0, stored.get(name, 0.0))
        said = []
        if not apart <= bar:
            finite = all(bool(t.isfinite().all()) for t in (w, v))
            said.append(f"differs by {short(apart)}" if finite else "holds numbers that are not finite")
        kinds = own[name].dtype, other[name].dtype
        if kinds[0] != kinds[1] and kinds != main and not stored.get(name):
            said.append("is {} in a and {} in b".format(*(str(kind).removeprefix("torch.") for kind in kinds)))
        tied = [count[id(parameters[name])] > 1 for count, parameters in zip(ties, (own, other))]
        if tied[0] != tied[1]:
            said.append(f"is tied to another in {'a' if tied[0] else 'b'} alone")
        if own[name].requires_grad != other[name].requires_grad and not stored.get(name):
            said.append(f"trains only in {'a' if own[name].requires_grad else 'b'}")
        if said:
            found[name] = ", ".join(said)
    return found | _buffers_that_differ(a, b)


def _buffers_that_differ(a: nn.Module, b: nn.Module) -> dict[str, str]:
    """Return by buffer how those that both models have differ, such as inverse frequencies that a cast of the model has rounded."""
    mine, theirs = ({plain_name(name): x for name, x in model.named_buffers()} for model in (a, b))
    found = {}
    for name, x in mine.items():
        y = theirs.get(name)
        if y is None or x is y or not x.is_floating_point():
            continue
        apart = weights_apart(x.detach(), y.detach())
        if apart > 2 * roundoff(torch.float32):
            kinds = (
                ""
                if x.dtype == y.dtype
                else " and is {} in a and {} in b".format(*(str(t.dtype).removeprefix("torch.") for t in (x, y)))
            )
            found[name] = f"differs by {short(apart)}{kinds}"
    return found


def where_they_part(
    calls: Sequence[str], given: Mapping[str, bool], taken: Mapping[str, bool]
) -> tuple[str, str] | None:
    """Return (the module at fault, "" or the module inside of it where the difference first shows); None where nothing parts.

    calls: modules in the order in which they end, so that a module comes after those inside of it. given, taken: whether a module's
    output and input differ. The first module with another output and the same input is at fault; where the input of the first is
    another one already, what its owner computes itself is.
    """
    first = next((name for name in calls if given[name]), None)
    if first is None:
        return None
    if not taken[first]:
        return first, ""
    owner = first
    while "." in owner:
        owner = owner.rpartition(".")[0]
        if owner in given and given[owner] and not taken[owner]:
            return owner, first
    return first, ""


def reasons(a: nn.Module, b: nn.Module, name: str, differing: Mapping[str, str]) -> list[str]:
    """Return what of the modules called `name` differs, in words: parameters, and numbers that decide what they compute."""
    said = [f"{p} {how}" for p, how in differing.items() if p.startswith(f"{name}.")]
    return said + numbers_apart(modules_of(a)[name], modules_of(b)[name])


def numbers_apart(module: nn.Module, other: nn.Module) -> list[str]:
    """Return in words which numbers that decide what a module computes differ between two."""
    said, modules = [], (module, other)
    if any("rotary" in type(each).__name__.lower() for each in modules):
        return []  # whose scaling is that of frequencies; the tables themselves are compared
    for what, names in _NUMBERS.items():
        known = [_number(each, names) for each in modules]
        if what == "scale of the scores" and any(known):
            known = [number or _scale(each) for number, each in zip(known, modules)]
        if all(known) and not _alike(known[0], known[1]):
            said.append(f"its {what} is " + " against ".join(_said(value) for number in known for value in number))
    return said


def _alike(one: tuple[float | None, ...], other: tuple[float | None, ...]) -> bool:
    """Return whether two numbers are the same up to how they were computed."""
    both = list(zip(one, other))
    return all(a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-12)) for a, b in both)


def _number(module: nn.Module, names: tuple[str, ...]) -> tuple[float | None, ...]:
    """Return (the number that the module or its config has under one of the names,), which may be None; () where it has none."""
    for home in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(home, name, "")
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                return (None if value is None else float(value),)
    return ()


def _scale(module: nn.Module) -> tuple[float | None, ...]:
    """Return the scale of an attention that does not say it: 1 / sqrt(head width), which is what ours and torch's are."""
    width = _number(module, ("head_dim",))
    return (width[0] ** -0.5,) if width and width[0] else ()


def _said(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


# -- rotary tables


def rotary_words(x: Tensor, y: Tensor, explained: float) -> str:
    """Return how two rotary tables [T, E, 2] or [B, T, E, 2] (cos beside sin) differ: from where on, and by which base."""
    if x.shape[-2] != y.shape[-2]:
        return f"cos and sin have {x.shape[-2]} and {y.shape[-2]} frequencies"
    if x.ndim != y.ndim:
        x, y = torch.broadcast_tensors(x, y)
    x, y = x.reshape(-1, *x.shape[-2:])[: x.shape[-3]], y.reshape(-1, *y.shape[-2:])[: y.shape[-3]]
    apart_T = (x - y).abs().amax((-2, -1))
    size = y.square().mean().sqrt()
    places = (apart_T > explained * size).nonzero()
    said = f"cos and sin differ from position {int(places[0])} on" if len(places) else "cos and sin differ"
    if len(x) < 2:
        return said
    # the fastest pair turns by one radian a position, whatever the base
    moved_T = (_angles(x)[:, 0] - _angles(y)[:, 0] + math.pi).remainder(2 * math.pi) - math.pi
    if bool((moved_T.abs() > 0.5).any()):
        return f"{said}: the positions are not the same"
    turns = [_frequencies(table) for table in (x, y)]
    bases = [_base(turn) for turn in turns]
    if None not in bases and abs(math.log(bases[0] / bases[1])) > 0.1:  # type: ignore[operator]
        return f"{said}: rotary base {_round(bases[0])} against {_round(bases[1])}"
    if bool(((turns[0] - turns[1]).abs() > 0.1 * turns[1].abs() + 1e-3).any()):
        return f"{said}: the frequencies are scaled in another way"
    return said


def coarse_frequencies(a: nn.Module, b: nn.Module, name: str) -> list[tuple[str, str]]:
    """Return (model, dtype) where rotary frequencies have less than 32 bits, as a cast of the whole model leaves them."""
    found = []
    for who, model in (("a", a), ("b", b)):
        held = getattr(modules_of(model)[name], "inv_freq", None)
        if isinstance(held, Tensor) and held.dtype.itemsize < 4:
            found.append((who, str(held.dtype).removeprefix("torch.")))
    return found


def _angles(table: Tensor) -> Tensor:
    return torch.atan2(table[..., 1], table[..., 0])


def _frequencies(table: Tensor) -> Tensor:
    """Return the angle from one position to the next, by pair [E]."""
    angle_TE = _angles(table)
    return (angle_TE[1] - angle_TE[0]).remainder(2 * math.pi).double()


def _base(turn_E: Tensor) -> float | None:
    """Return the base whose powers the frequencies are: base^(-e / E) for pair e; None where they are no powers."""
    E = len(turn_E)
    if E < 2 or not bool((turn_E > 0).all()):
        return None
    base = float(turn_E[1]) ** -E
    powers = torch.tensor(base, dtype=torch.float64) ** (-torch.arange(E, dtype=torch.float64) / E)
    return base if torch.allclose(turn_E.cpu(), powers, rtol=2e-2) else None


def _round(base: float | None) -> str:
    """Return a base that was read from float32 tables: three digits of it are good."""
    assert base is not None
    return f"{float(f'{base:.3g}'):,.0f}"


# -- who sees whom


def sight_words(
    a: tuple[nn.Module, Batch], b: tuple[nn.Module, Batch], name: str, place: tuple[int, int], training: bool
) -> str:
    """Return how the tokens that a token's output depends on differ between the modules called `name`; "" where they do not.

    place: (row, token) where the outputs first differ. Asked by gradients: what a masked token holds changes nothing.
    """
    row, first = place
    seen = [_sight(model, batch, name, row, first, training) for model, batch in (a, b)]
    if seen[0] is None or seen[1] is None or seen[0] == seen[1]:
        return ""
    token = next(t for t in seen[0] if seen[0][t] != seen[1].get(t))
    return f"token {token} sees {_range(seen[0][token])} in a and {_range(seen[1].get(token, ()))} in b"


def _sight(
    model: nn.Module, batch: Batch, name: str, row: int, first: int, training: bool
) -> dict[int, tuple[int, ...]] | None:
    """Return the tokens that the output at some tokens from `first` on depends on."""
    module = modules_of(model)[name]
    held: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand the module a copy of its input that has a gradient of its own."""
        swapped: list[Tensor] = []

        def swap(value: Any) -> Any:
            if swapped or not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            swapped.append(value.detach().requires_grad_())
            return swapped[0].clone()  # which the module may write to

        args = tuple(swap(v) for v in args)
        kwargs = {key: swap(v) for key, v in kwargs.items()}
        if swapped and "x" not in held:
            held["x"] = swapped[0]
        return args, kwargs

    def after(_: nn.Module, args: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        if "y" not in held and isinstance(values[0], Tensor):
            held["y"] = values[0]

    with undisturbed(model, training), without_products(model), torch.enable_grad():
        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]
        try:
            model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        x, y = held.get("x"), held.get("y")
        if x is None or y is None or x.ndim < 3 or x.shape[:2] != y.shape[:2] or not y.requires_grad:
            return None
        found = {}
        for token in range(first, min(first + _PROBES, y.shape[1])):
            weights = torch.linspace(1, 2, y[row, token].numel(), device=y.device).reshape(y[row, token].shape)
            (g,) = torch.autograd.grad((y[row, token].float() * weights).sum(), x, retain_graph=True)
            felt = g[row].flatten(1).float().norm(dim=-1)
            found[token] = tuple((felt > 0).nonzero().flatten().tolist())
        return found


def _range(tokens: Sequence[int]) -> str:
    if not tokens:
        return "none"
    if list(tokens) == list(range(tokens[0], tokens[-1] + 1)):
        return f"{tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"{tokens[0]} alone"
    return ", ".join(map(str, tokens[:8])) + (" and more" if len(tokens) > 8 else "")


# -- dtype and loss


def dtype_words(x: Call, y: Call) -> str:
    """Return which of two outputs has a coarser dtype, or numbers that a coarser dtype holds exactly; "" where neither has."""
    if x.given is None or y.given is None:
        return ""
    kinds = [_held_in(call.given) for call in (x, y) if call.given is not None]
    if kinds[0] == kinds[1]:
        return ""
    return f"its output has the numbers of {kinds[0]} in a and of {kinds[1]} in b"


def _held_in(x: Tensor) -> str:
    for dtype in (torch.bfloat16, torch.float16):
        if x.dtype.itemsize <= dtype.itemsize:
            break
        if torch.equal(x.to(dtype).to(x.dtype), x) and bool(x.any()):
            return str(dtype).removeprefix("torch.")
    return str(x.dtype).removeprefix("torch.")


READINGS = {
    "next": "",
    "same": "labels are not shifted: token t is asked to predict itself",
    "second": "labels are shifted twice: token t is asked for token t + 2",
    "sum": "loss is a sum over tokens, not their mean",
}


def reading_of(loss: Tensor | None, logits: Tensor | None, labels: Tensor, u: float) -> str | None:
    """Return which of READINGS a loss is, by the cross-entropy of the model's own logits; None where it is none of them.

    The bar is the noise of logits that are rounded once, in the mean over the labels.
    """
    if loss is None or logits is None or logits.ndim != 3:
        return None
    T = logits.shape[1]
    logits = logits.float()

    def mean(skip: int, reduction: str = "mean") -> float:
        x, y = logits[:, : T - skip].flatten(0, 1), labels[:, skip:].flatten()
        return float(nn.functional.cross_entropy(x, y, ignore_index=IGNORED, reduction=reduction))

    values = {"next": mean(1), "same": mean(0), "second": mean(2) if T > 2 else math.inf, "sum": mean(1, "sum")}
    counted = int((labels[:, 1:] != IGNORED).sum())
    bar = 4 * u * (abs(float(loss)) + float(logits.square().mean().sqrt()) * math.sqrt(2 / counted))
    nearest = min(values, key=lambda name: abs(values[name] - float(loss)))
    if abs(values["next"] - float(loss)) <= 1e-5 * abs(float(loss)):
        return "next"
    return nearest if abs(values[nearest] - float(loss)) <= bar else None
