"""This module predicts how much faster a recipe is than the baseline, so that a measured gain can be understood: why 1.1 x and
not 2 x.

    ratio = 1 / (1 - share + share / products + quantization)

share: the part of the baseline's step that goes into products which the recipe computes in another way, from a profile of a few
of its warm-up steps: time of matrix products, times the part of their FLOPs that the recipe changes. What these take in the recipe
is what they take in the baseline plus the difference that short runs show: single layers of each shape, forward and backward, the
baseline's and the recipe's, on this device (on CUDA as graphs, without the host's launches). quantization is that of the operands
alone, measured apart; what is left of the recipe's time is its products'. What all this does not see: quantization that norms and
gates do in passing, gaps between kernels, caches.
"""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surokit.layers import linear_layers, recipe_layers
from surokit.nn.experts import ExpertsLinear
from surokit.nn.linear import Linear
from surokit.profiler import profile
from surokit.profiler.analysis.parts import PRODUCT_KERNELS
from surokit.quantized import quantize
from surokit.quantizer import Quantizer
from surokit.racing.runs import Prediction
from surokit.recipe import Recipe

if TYPE_CHECKING:
    from surokit.profiler import Profile

_PRODUCTS = re.compile(
    r"aten::(_?scaled_mm|addmm_?|mm|matmul|linear|_scaled_grouped_mm|mkldnn_linear)(_out|_v2)?$|mkldnn::_linear"
)
_NO_KERNELS = re.compile(r"fmha|flash|attention|sdpa|cudnn_generated", re.IGNORECASE)
_RUN_S = 0.15  # time for one layer's measurement
_REPEATS = 3  # at least
# beyond these clocks erred
_FASTEST = 20  # times as fast, products
_LONGEST = 10  # steps, quantization


class Shares:
    """A Shares object keeps what the baseline's profile says: how much of a step goes into matrix products. Read it after the with
    block."""

    def __init__(self) -> None:
        self.why = "no step of the baseline was profiled"
        self._products_ms: float | None = None
        self._wall_ms = 0.0
        self._on_gpu = False

    @contextmanager
    def of(self, steps: int) -> Iterator[None]:
        """Profile the block, which makes `steps` steps, the first of them for the profiler's own warm-up."""
        with profile(steps=max(1, steps - 1), warmup=min(1, steps - 1), sample=False) as found:
            yield
        try:
            self._on_gpu = found.summary["activity"] == "gpu"
            self._products_ms, self._wall_ms = products_ms(found), found.summary["wall_ms"]
        except Exception as error:  # a race does not fail for want of a prediction
            self.why = f"the profile of the baseline could not be read ({type(error).__name__}: {error})"

    def products(self, step_s: float) -> float | None:
        """Return the share of a step that takes `step_s`: kernels take the same time in a profile, in which launches are slow; on a
        processor a profile slows everything, so that there its own wall time counts."""
        if self._products_ms is None:
            return None
        return self._products_ms / (step_s * 1e3 if self._on_gpu else self._wall_ms)


def products_ms(found: Profile) -> float:
    """Return the time of matrix products in a step; attention's own are not among them."""
    on_gpu = found.summary["activity"] == "gpu"
    table = found.kernels if on_gpu else found.ops
    names = table["kernel" if on_gpu else "op"].astype(str)
    return float(table["self_ms"][[_is_product(name, on_gpu) for name in names]].sum())


def _is_product(name: str, kernel: bool) -> bool:
    if kernel:
        return bool(PRODUCT_KERNELS.search(name)) and not _NO_KERNELS.search(name)
    return bool(_PRODUCTS.match(name))


class Layers:
    """A Layers object describes the linear layers of a model: what kind each is, its FLOPs, and how long each kind takes with
    `tokens` tokens, measured when it is asked for. bring: called before, to have the model on its device."""

    def __init__(self, model: nn.Module, tokens: int, bring: Callable[[], object] = lambda: None) -> None:
        self._layers = dict(linear_layers(model))
        self.experts = any(isinstance(layer, ExpertsLinear) for _, layer in recipe_layers(model))
        self._tokens, self._bring = tokens, bring
        self._known: dict[Any, tuple[float, float]] = {}
        self.shapes = {name: _shape(layer) for name, layer in self._layers.items()}
        self.kinds = {name: _kind(layer) for name, layer in self._layers.items()}
        self.flops = {name: _flops(layer) for name, layer in self._layers.items()}

    def seconds(self, names: Iterable[str]) -> tuple[float, float]:
        """Return the seconds of the named layers together: of forward and backward, and of quantizing their operands alone."""
        self._bring()
        total = quantizing = 0.0
        for name in names:
            kind, layer = self.kinds[name], self._layers[name]
            if kind not in self._known:
                self._known[kind] = _layer_seconds(layer, self._tokens), _quantize_seconds(layer, self._tokens)
            total += self._known[kind][0]
            quantizing += self._known[kind][1]
        return total, quantizing


def predict(own: Layers, base: Layers, shares: Shares, step_s: float, parts: int = 1) -> Prediction:
    """Predict the gain of one model over the baseline, whose step takes `step_s` in `parts` micro-batches; both are left as they
    are."""
    if base.experts or own.experts:
        return Prediction(None, why="the models have experts, whose products are not timed apart")
    products = shares.products(step_s)
    if products is None:
        return Prediction(None, why=shares.why)
    if not base.shapes or own.shapes != base.shapes:
        return Prediction(None, why="the two models do not have the same linear layers")
    changed = sorted(name for name, kind in own.kinds.items() if kind != base.kinds[name])
    if not changed:
        return Prediction(1.0, share=0.0, products=1.0, quantization=0.0)
    share = products * sum(base.flops[name] for name in changed) / sum(base.flops.values())
    base_s, _ = (parts * seconds for seconds in base.seconds(changed))
    own_s, quantize_s = (parts * seconds for seconds in own.seconds(changed))
    quantization = min(quantize_s, 0.9 * own_s) / step_s
    left = share + (own_s - base_s) / step_s - quantization
    now = max(left, share / _FASTEST)
    if left < now or quantization > _LONGEST:
        why = "its short runs do not fit the baseline's steps, as on a busy machine, so race again with nothing else running"
        return Prediction(None, share, share / now, quantization, why)
    return Prediction(1 / (1 - share + now + quantization), share, share / now, quantization)


def _shape(layer: nn.Linear) -> tuple[int, int]:
    return layer.out_features, layer.in_features


def _kind(layer: nn.Linear) -> Any:
    """Return what a layer's time depends on, besides the number of tokens."""
    if not isinstance(layer, Linear):
        return _shape(layer), layer.weight.requires_grad, None, None, 0, False
    recipe = layer.precision.recipe if layer.precision is not None else None
    gemms = recipe.gemms if recipe is not None else None
    return _shape(layer), layer.weight.requires_grad, gemms, layer.storage, layer.lora_rank, layer.keeps_now


def _flops(layer: nn.Linear) -> int:
    """Return the FLOPs of forward and backward for each token, 2 a multiply-add: the weight's gradient only if it trains, and an
    adapter's own with them."""
    adapter = 6 * layer.lora_rank * (layer.in_features + layer.out_features) if isinstance(layer, Linear) else 0
    return (6 if layer.weight.requires_grad else 4) * layer.in_features * layer.out_features + adapter


def _layer_seconds(layer: nn.Linear, tokens: int) -> float:
    """Return the seconds of forward and backward of a copy of the layer, whatever it trains."""
    sample = copy.deepcopy(layer).train()
    for parameter in sample.parameters():
        parameter.grad = None
    x = _random(tokens, layer.in_features, sample).requires_grad_(True)
    dy = _random(tokens, layer.out_features, sample)

    def once() -> None:
        x.grad = None
        sample.zero_grad(set_to_none=True)
        sample(x).backward(dy)

    return _seconds(once, x.device)


def _quantize_seconds(layer: nn.Linear, tokens: int) -> float:
    """Return the seconds of quantizing each operand of the layer's products alone, in every orientation that a product needs."""
    if not isinstance(layer, Linear) or layer.precision is None:
        return 0.0
    total = 0.0
    x, dy = _random(tokens, layer.in_features, layer), _random(tokens, layer.out_features, layer)
    w = None if layer.storage is not None else layer.weight.detach()
    for operand, quantizers in zip((x, w, dy), _quantizers(layer.precision.recipe, layer.weight.requires_grad)):
        for q in quantizers:
            if operand is not None:
                total += _seconds(partial(quantize, operand, q), operand.device)
    return total


def _quantizers(recipe: Recipe, trains: bool) -> Iterator[list[Quantizer]]:
    """Yield the quantizers of x, w and dy: one for each orientation, unless the codes of one can be turned into the other's."""
    forward, grad_input, grad_weight = recipe.gemms
    roles = (
        (forward.a, grad_weight.b if trains else None),
        (forward.b, grad_input.b),
        (grad_input.a, grad_weight.a if trains else None),
    )
    for pair in roles:
        there = [q for q in pair if q is not None]
        yield there[:1] if len(there) == 2 and there[0] == there[1] and there[0].transposable else there


def _random(rows: int, columns: int, layer: nn.Linear) -> Tensor:
    stored = isinstance(layer, Linear) and layer.storage is not None
    held = layer.lora_A.weight if isinstance(layer, Linear) and layer.has_adapter else layer.weight
    dtype = torch.bfloat16 if stored and held is layer.weight else held.dtype
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), device="cpu")
    return drawn.to(layer.weight.device, dtype)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of repeated calls, each waited for; on CUDA of a graph of the call, if it can be captured."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # a graph records what is launched on the current one
            work = _as_graph(work)
    taken: list[float] = []
    work()
    _wait(device)
    end = time.perf_counter() + _RUN_S
    while len(taken) < _REPEATS or (time.perf_counter() < end and len(taken) < 200):
        began = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _as_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of what the work launches, which takes as long as it does within a step; the work itself if it cannot be
    captured because it waits for the device. Runs it a few times before, for what is made or tuned on first use."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return work
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
