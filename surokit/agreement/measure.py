"""Measure how far two runs lie apart, and how far a dtype's roundings alone would put them apart.

The difference of two outputs is that of the token where it is largest, as a share of the mean size of a token: a fault at one
token shows as one at all tokens does.

explained = 4 x the larger difference that two disturbed runs show (observe.py). 4 is the square root of 16: two models round, 2,
and a module rounds up to 8 times (norm, rotation, softmax, product, sum) where the disturbance comes in once. A disturbance has the
size of one rounding of the coarser dtype: u / sqrt(3), as of numbers spread evenly from -u to u. A product that sums K numbers in
float32 has sqrt(K) roundings of float32, if that is more: a random walk, since the signs of errors are as good as random.

B batch, T tokens, K summands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from surokit.agreement.observe import Seen, dtype_of, layers_of, modules_of, parameters_by_name
from surokit.layers import Layer
from surokit.nn.experts import ExpertsLinear
from surokit.nn.linear import Linear
from surokit.quantized import quantize

MARGIN = 4.0
_TF32 = 2.0**-11


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to the dtype."""
    return torch.finfo(dtype).eps / 2


def roundoff_of(a: nn.Module, b: nn.Module) -> tuple[float, str]:
    """Return the roundoff of the coarser of two models, and the name of what has it.

    That of float32 at least: norms, rotary tables and losses are computed in it in float64 models too.
    """
    dtype = max((torch.float32, *(dtype_of(model) for model in (a, b))), key=roundoff)
    on_cuda = any(p.is_cuda for p in a.parameters())
    if dtype == torch.float32 and on_cuda and torch.get_float32_matmul_precision() != "highest":
        return _TF32, "TF32"
    return roundoff(dtype), str(dtype).removeprefix("torch.")


def levels(model: nn.Module, u: float, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the size of the disturbance by module. weights: by parameter, how far it is from the other model's where storage
    explains it."""
    found = {}
    stored: dict[str, float] = {}
    for name, apart in weights.items():
        module_name = name.rpartition(".")[0]
        stored[module_name] = max(stored.get(module_name, 0.0), apart)
    for name, module in modules_of(model).items():
        summands = getattr(module, "in_features", 1)
        found[name] = max(one_rounding(u), accumulated(u, summands), stored.get(name, 0.0))
    return found


def one_rounding(u: float) -> float:
    """Return the root mean square of one rounding's relative error."""
    return u / math.sqrt(3)


def accumulated(u: float, summands: int) -> float:
    """Return the relative error of a sum in float32, or in what the model has where that is finer."""
    return one_rounding(min(u, roundoff(torch.float32))) * math.sqrt(summands)


def difference(x: Tensor | None, y: Tensor | None, real_BT: Tensor | None = None) -> float:
    """Return how far x is from y, as the opening of this file says; inf for another shape, or numbers that are not finite."""
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    apart, size = by_token(x, y, real_BT)
    if apart is None or size is None:
        return math.inf
    worst, scale = float(apart.amax()), float(size.mean())
    if worst == 0:
        return 0.0
    return math.sqrt(worst / scale) if math.isfinite(worst) and scale else math.inf


def by_token(x: Tensor, y: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return the squares of the difference and of y, summed over each token; (None, None) for shapes that do not fit.

    A token is a place [b, t] of the batch where the tensors have these two dimensions, and the whole tensor where not.
    """
    if x.shape != y.shape:
        try:
            x, y = torch.broadcast_tensors(x, y)
        except RuntimeError:
            if x.numel() != y.numel():
                return None, None
            x = x.reshape(y.shape)
    wide = torch.float64 if x.device.type == "cpu" else torch.float32
    x, y = x.to(wide), y.to(wide)
    tokens = real_BT is not None and x.shape[:2] == real_BT.shape
    start = 2 if tokens else 0
    apart, size = (x - y).square(), y.square()
    if x.ndim > start:
        apart, size = apart.flatten(start).sum(-1), size.flatten(start).sum(-1)
    if tokens and real_BT is not None:
        apart, size = apart[real_BT], size[real_BT]
    return apart.reshape(-1), size.reshape(-1)


def first_token(x: Tensor | None, y: Tensor | None, real_BT: Tensor, above: float) -> tuple[int, int] | None:
    """Return (row, token) of the first real token where x and y differ by more than `above` of the mean token; None without one."""
    if x is None or y is None:
        return None
    apart, size = by_token(x, y, real_BT)
    if apart is None or size is None or len(apart) != int(real_BT.sum()):
        return None
    places = real_BT.nonzero()[~(apart <= above**2 * size.mean())]
    if not len(places):
        return None
    row, token = places[places[:, 1].argmin()].tolist()
    return row, token


@dataclass
class Noise:
    """A Noise holds what disturbed runs differ by from the calm one: by module of outputs and inputs, of logits and loss, and of
    gradients; the largest of all runs.

    spread: root mean square of the logits' change. gradients: as `gradients_apart` has them. reach: by parameter, the largest
    change of an element of its gradient.
    """

    given: dict[str, float] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)
    logits: float = 0.0
    spread: float = 0.0
    loss: float = 0.0
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)
    reach: dict[str, float] = field(default_factory=dict)

    def take(self, noisy: Seen, calm: Seen, real_BT: Tensor) -> None:
        """Take in one more run; what is not finite says nothing."""
        for name, call in calm.calls.items():
            other = noisy.calls.get(name)
            for found, what in ((self.given, "given"), (self.taken, "taken")):
                x, y = getattr(other, what, None), getattr(call, what)
                if x is not None and y is not None:
                    found[name] = max(found.get(name, 0.0), _finite(difference(x, y, real_BT)))
        if noisy.logits is not None and calm.logits is not None:
            self.logits = max(self.logits, _finite(difference(noisy.logits, calm.logits, real_BT)))
            apart = noisy.logits.float() - calm.logits.float()
            self.spread = max(self.spread, _finite(float(apart.square().mean().sqrt())))
        if noisy.loss is not None and calm.loss is not None:
            self.loss = max(self.loss, _finite(abs(float(noisy.loss - calm.loss))))
        for name, pair in gradients_apart(noisy, calm).items():
            self.gradients[name] = max(self.gradients.get(name, pair), (_finite(pair[0]), pair[1]))
            g, h = noisy.gradients[name], calm.gradients[name]
            if g is not None and h is not None:
                self.reach[name] = max(self.reach.get(name, 0.0), _finite(float((g.float() - h.float()).abs().amax())))

    def beside(self, other: Noise, which: Callable[[Any, Any], Any]) -> Noise:
        """Return the smaller (which=min) or the larger (max) of two models' noise, thing by thing; where one has no such thing, or
        no noise of it at all, that of the other."""

        def chosen(x: Any, y: Any) -> Any:
            if isinstance(x, dict):
                return {name: chosen(x.get(name), y.get(name)) for name in x | y}
            return which(x, y) if x and y else x or y or 0.0

        return Noise(*(chosen(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def norm_of(gradients: Mapping[str, Tensor | None]) -> float:
    """Return the norm of all gradients together."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values() if g is not None))


def gradients_apart(x: Seen, y: Seen) -> dict[str, tuple[float, float]]:
    """Return (square of the difference, square of y's gradient) by parameter; inf where only one has a gradient."""
    found = {}
    for name in y.gradients:
        if name not in x.gradients:
            continue
        g, h = x.gradients[name], y.gradients[name]
        if g is None and h is None:
            continue
        if g is None or h is None:
            rest = g if h is None else h
            assert rest is not None
            nothing = not bool(rest.any())
            found[name] = (0.0, 0.0) if nothing else (math.inf, float(rest.double().square().sum()))
        elif g.shape == h.shape:
            found[name] = (float((g.double() - h.double()).square().sum()), float(h.double().square().sum()))
    return found


def together(
    apart: Mapping[str, tuple[float, float]], sizes: Mapping[str, tuple[float, float]], module: str = ""
) -> float:
    """Return the difference of the gradients of a module's parameters, relative to their size in `sizes`; NaN where it has none.

    What rounding explains is put against the same size as what was found: a gradient that cancels may be smaller than its noise.
    """
    mine = [name for name in sizes if name.startswith(f"{module}." if module else "")]
    found = sum(apart[name][0] for name in mine if name in apart), sum(sizes[name][1] for name in mine)
    return ratio(*found) if mine else math.nan


def ratio(apart: float, size: float) -> float:
    return 0.0 if apart == 0 else math.sqrt(apart / size) if size and math.isfinite(apart) else math.inf


def stepped(g: Tensor, step: str) -> Tensor:
    """Return what a first step of the optimizer takes off a parameter, float32, but for the learning rate.

    AdamW's first step divides the gradient by its own magnitude, since both averages hold nothing else.
    """
    g = g.float()
    return g / (g.abs() + 1e-8) if step == "adamw" else g


def steps_apart(x: Seen, y: Seen, noise: Noise, floor: float, step: str) -> tuple[float, float, str]:
    """Return (relative difference of a parameter's first step, what is explained of it, the parameter) where it is largest for what
    is explained; (0, 0, "") without gradients.

    A gradient near zero has no sure sign, and AdamW's first step is little else. So explained is the norm of what each element's
    step would change by if its gradient changed by MARGIN times the largest noise of any element of the parameter's gradient.
    """
    found, most = (0.0, 0.0, ""), -1.0
    for name, g in x.gradients.items():
        h = y.gradients.get(name)
        if g is None or h is None or g.shape != h.shape:
            continue
        reach = MARGIN * max(noise.reach.get(name, 0.0), floor * float(h.float().square().mean().sqrt()))
        own, other = stepped(g, step), stepped(h, step)
        ends = [(stepped(h.float() + sign * reach, step) - other).abs() for sign in (1, -1)]
        size = float(other.norm())
        apart = ratio(float((own - other).square().sum()), size**2)
        explained = ratio(float(torch.maximum(*ends).square().sum()), size**2)
        if apart > most * explained:
            found, most = (apart, explained, name), apart / explained if explained else 0.0
    return found


# -- parameters


def dense_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by plain name, stored weights as the products see them."""
    stored = {name: layer for name, layer in layers_of(model) if _is_stored(layer)}
    scales = {id(scale) for layer in stored.values() for scale in layer.stored_scales}
    found = {name: p.detach() for name, p in parameters_by_name(model).items() if id(p) not in scales}
    return found | {name: _dense(layer, dtype_of(model)) for name, layer in stored.items()}


def _is_stored(layer: Layer | None) -> TypeGuard[Linear | ExpertsLinear]:
    return isinstance(layer, Linear | ExpertsLinear) and layer.storage is not None


def _dense(layer: Layer, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight as its parameter holds it where it is not stored: [N, K], of experts [E, N, K] or [E, K, N]."""
    if not isinstance(layer, Linear | ExpertsLinear):
        return layer.weight.detach()
    weight = layer.dense_weight(dtype).detach()
    return weight.transpose(-2, -1) if isinstance(layer, ExpertsLinear) and layer.transposed else weight


def storage_noise(a: nn.Module, b: nn.Module) -> dict[str, float]:
    """Return by parameter how far weights may lie apart because one or both models store them in a format."""
    found = {}
    mine, theirs = dict(layers_of(a)), dict(layers_of(b))
    for name in mine.keys() & theirs.keys():
        power = 0.0
        for own, other in ((mine[name], theirs[name]), (theirs[name], mine[name])):
            if not _is_stored(own) or own.storage is None:
                continue
            if isinstance(other, Linear | ExpertsLinear):
                weight = other.dense_weight().detach()
            else:
                weight = other.weight.detach()
            # each expert has scales of its own, and as many weights as the others
            each = weight.unbind() if weight.ndim == 3 else (weight,)
            power += max(_lost(w_NK, quantize(w_NK, own.storage).dequantize(torch.float32)) for w_NK in each)
        if power:
            found[name] = 1.5 * math.sqrt(power)  # a weight that was merged or trained before has other noise
    return found


def _lost(weight: Tensor, rounded: Tensor) -> float:
    """Return the square of what rounding takes from a weight [N, K], as a share of the weight's."""
    return float((rounded - weight).square().sum() / weight.float().square().sum().clamp(min=1e-30))


def left_by_storage(a: nn.Module, b: nn.Module, allowed: Mapping[str, float]) -> dict[str, float]:
    """Return by parameter how far weights lie apart, where no more than storing explains."""
    mine, theirs = dense_parameters(a), dense_parameters(b)
    found = {name: weights_apart(mine[name], theirs[name]) for name in allowed}
    return {name: apart for name, apart in found.items() if apart <= allowed[name]}


def stored_weights(own: nn.Module, other: nn.Module, allowed: Mapping[str, float]) -> dict[str, Tensor]:
    """Return by parameter the weights that `other` stores in a format and `own` does not, where storing explains the difference.

    With these in its own's place a model is compared with what was stored, and no noise of a format is in between.
    """
    found = {}
    mine = dict(layers_of(own))
    for name, stored in layers_of(other):
        layer = mine.get(name)
        if layer is None or not _is_stored(stored) or _is_stored(layer):
            continue
        weight, held = _dense(stored, dtype_of(other)), layer.weight.detach()
        if weights_apart(weight, held) <= allowed.get(name, 0.0):
            found[name] = weight.to(held.dtype).contiguous()
    return found


def weights_apart(w: Tensor, v: Tensor) -> float:
    """Return the norm of w - v as a share of that of v; of weights of experts, [E, ...], for the expert where it is largest."""
    if w.shape != v.shape:
        return math.inf
    if w.dtype == v.dtype and torch.equal(w, v):
        return 0.0
    w, v = w.float(), v.float()
    apart, size = (w - v).square(), v.square()
    if w.ndim != 3:
        return ratio(float(apart.sum()), float(size.sum()))
    pairs = zip(apart.flatten(1).sum(-1).tolist(), size.flatten(1).sum(-1).tolist())
    return max((ratio(*pair) for pair in pairs), default=0.0)
