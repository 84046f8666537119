"""How many kernels a layer launches, and what they move and multiply: a tiny decoder, through Triton's interpreter or uncomputed.

Counted are Triton's launches and torch's operations that are no views: each is one kernel on a GPU, more or less. Products in
FP8, which a CPU emulates, and attention's forward and backward count once each. What a layer costs is the difference between
models of two layers and of one, so embedding, last norm and loss cancel. Doors of kernels/ give the Triton form, as on CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surokit as sk
from surokit import kernels, product
from surokit.fusion import OFF, Fusion
from surokit.kernels import OPERATIONS
from surokit.planner import plan
from surokit.planner.times.roofline import KernelRow
from tests.kernels import steps
from tests.kernels.interpreter import INTERPRETED, correct
from tests.kernels.steps import triton_form
from tests.train.replay import _inside

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="with a GPU the profiler counts launches")

MEMORY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
}


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.muted = False
        from triton.runtime.interpreter import GridExecutor

        launch, mode = GridExecutor.__call__, self

        def counted(executor: Any, *args: Any, **options: Any) -> Any:
            mode.counts[f"triton {executor.fn.__name__}"] += 1
            mode.muted = True
            try:
                return launch(executor, *args, **options)
            finally:
                mode.muted = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)
        multiply = product.product

        def native(*args: Any, **options: Any) -> Any:
            mode.counts["product"] += 1
            muted, mode.muted = mode.muted, True
            try:
                return multiply(*args, **options)
            finally:
                mode.muted = muted

        for name, function in (("best", lambda function, device: triton_form(function)), ("product", native)):
            chosen = getattr(kernels if name == "best" else product, name)
            for module in [m for path, m in sys.modules.items() if path.startswith("surokit")]:
                if vars(module).get(name) is chosen:
                    monkeypatch.setattr(module, name, function)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self.muted:
            return func(*args, **kwargs)
        if func.namespace == "surokit" and not name.endswith("_mm"):
            operation = OPERATIONS.get(name)
            inner = operation.adapt(triton_form(operation.reference)) if operation else _inside(func)
            if inner is not None:
                with self:
                    return inner(*args, **kwargs)
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and name not in MEMORY:
            self.counts[name] += 1
        return func(*args, **kwargs)


def launches(recipe: sk.Recipe, fusion: Fusion, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of a block's forward and backward, after a step: codes of frozen weights are kept. Graphs add gradients all at once."""
    torch.manual_seed(0)
    config = sk.DecoderConfig(
        layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=32, qk_norm=True, tied=False
    )
    model = sk.Decoder(config, dtype=torch.bfloat16)
    sk.apply(model, recipe)
    sk.fuse(model, fusion)
    block = model.model.layers[0]
    met: list[Any] = []
    handle = block.register_forward_pre_hook(lambda _, args: met.extend(args))
    ids = torch.randint(0, 32, (1, 16))
    model(ids, labels=ids).loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    x = met[0].detach().requires_grad_()
    with monkeypatch.context() as patched, Launches(patched) as counting:
        y = block(x, *met[1:])
        torch.autograd.backward(y, torch.ones_like(y))
    counting.counts["ones_like"] -= 1
    return +counting.counts


@pytest.mark.parametrize(
    ("recipe", "apart", "together"),
    [(sk.BF16.lora(16), 100, 56), (sk.FP8.keep_small(0).lora(16), 150, 84)],
    ids=["bf16", "fp8"],
)
def test_a_fused_layer_launches_few_kernels(
    recipe: sk.Recipe, apart: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct()
    with kernels.converting(False):  # as on a GPU
        before, after = (launches(recipe, fusion, monkeypatch) for fusion in (OFF, Fusion()))
    for counts in (before, after):
        print(counts.total(), dict(sorted(counts.items())))
    assert after.total() <= together
    assert before.total() >= apart


# -- as the planner counts


RANK = 16
WIDEST = 3 * RANK  # the A of q, k and v in one product; all sizes of layers are larger
PRODUCTS = ("mm", "addmm_", "_scaled_mm", "_scaled_mm_v2")
WRITTEN_ONLY = ("copy_", "fill_", "zero_", "new_zeros")  # what the first argument holds is not read
IDLE = ("amax_parts", "amax_rows", "amax_tiles")  # they read nothing where an amax is in force


@dataclass
class Work:
    """Launches by name; bytes and multiply-adds, as two FLOPs each, by the groups that the planner has."""

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    flop: Counter[str] = field(default_factory=Counter)

    @property
    def counters(self) -> tuple[Counter[str], ...]:
        return self.launches, self.bytes, self.flop

    def less(self, other: Work) -> Work:
        for mine, theirs in zip(self.counters, other.counters):
            mine.subtract(theirs)
        return self


class Counted(steps.Uncomputed):
    """Counts what a Hopper GPU would do in a step in which nothing is computed."""

    work: Work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        operation = OPERATIONS.get(name) if func.namespace == "surokit" else None
        ours = operation and triton_form(operation.reference) is not operation.reference  # counted as it launches
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not view and not ours and name not in {*MEMORY, "_local_scalar_dense"}:
            self.work.launches[name] += 1
            group = "gradients" if name == "add_" else "attention" if "attention" in name else "rest"
            if name in PRODUCTS:
                (M, K), N = args[-2].shape if name == "addmm_" else args[0].shape, result.shape[1]
                group = "adapter" if min(M, K, N) <= WIDEST else "products"
                self.work.flop[group] += 2 * M * K * N
            self.work.bytes[group] += _bytes(_read(func, args, kwargs or {})) + _bytes(_written(func, args, result))
        return result


def _read(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    overwrites = func.overloadpacket.__name__ in WRITTEN_ONLY or kwargs.get("beta") == 0
    yield from args[1:] if overwrites else args
    yield from (kwargs[a.name] for a in func._schema.arguments if a.name in kwargs and not a.is_out)


def _written(func: Any, args: Any, result: Any) -> Iterator[Any]:
    changed = [value for a, value in zip(func._schema.arguments, args) if a.alias_info and a.alias_info.is_write]
    yield from changed or [result]


def _bytes(arguments: Any) -> int:
    """Of the distinct tensors among them: of a view, its elements."""
    tensors = [t for t in tree_leaves(list(arguments)) if isinstance(t, Tensor)]
    distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in distinct.values())


def counted_and_planned(recipe: sk.Recipe, layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Work, Work]:
    """A second micro-batch as counted, and as planned without the optimizer."""
    from triton.runtime.interpreter import GridExecutor

    T = 256
    shape: dict[str, Any] = {"width": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "ffn": 1024, "vocab": 256}
    config = sk.DecoderConfig(layers=layers, **shape, qk_norm=True, tied=False, max_length=T)
    model = sk.Decoder(config, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    work = Work()
    with monkeypatch.context() as patched:

        def launched(executor: Any, *args: Any, **options: Any) -> None:
            name = executor.fn.__name__
            work.launches[f"triton {name}"] += 1
            work.bytes["rest"] += 0 if name in IDLE else _bytes((args, options))

        patched.setattr(GridExecutor, "__call__", launched)
        patched.setattr(Counted, "work", work, raising=False)
        patched.setattr(steps, "Uncomputed", Counted)
        with steps.on_hopper():
            sk.apply(model, recipe)
            sk.fuse(model, Fusion())
            ids = torch.zeros((1, T), dtype=torch.int64)
            for _ in range(2):
                for counter in work.counters:
                    counter.clear()
                model(ids, labels=ids).loss.backward()
    setting: dict[str, Any] = {"batch": 1, "length": T, "gpu": "H200", "graphs": True, "fusion": "fused"}
    estimate = plan(config, recipe=recipe, **setting).estimate
    assert estimate is not None
    return work, _planned(row for row in estimate.rows if row.step != "optimizer")


def _planned(rows: Iterator[KernelRow]) -> Work:
    planned = Work()
    for row in rows:
        group = row.group if row.group in ("products", "adapter", "attention") else "rest"
        planned.launches[row.module] += row.launches  # type: ignore[assignment]
        planned.bytes[group] += row.bytes  # type: ignore[assignment]
        planned.flop[group] += row.flop  # type: ignore[assignment]
    return planned


@cache
def a_layer(recipe: sk.Recipe) -> tuple[Work, Work]:
    """Counts what a layer does, and what the planner says of it: what two layers do beyond one."""
    with pytest.MonkeyPatch.context() as patched:
        one, two = (counted_and_planned(recipe.keep_small(0), layers, patched) for layers in (1, 2))
    return two[0].less(one[0]), two[1].less(one[1])


RECIPES = [sk.BF16, sk.FP8, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.QFP8]
TRAINED = [*(recipe.lora(RANK) for recipe in (*RECIPES, sk.FP8_CURRENT, sk.QFP4, sk.QNF4))]
TRAINED += [sk.BF16, sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK]
each = pytest.mark.parametrize("recipe", TRAINED, ids=lambda r: r.name + (" lora" if r.adapter else ""))
# (beyond the planner's, planned) a layer and micro-batch: merging the amaxes of kept codes of four groups; a scale for codes of x'
# and dy', where the planner knows the copy of v alone
BEYOND = {("fp8", True): {"maximum": (4, 0)}, ("fp8-current", False): {"copy_": (8, 1)}}


@each
def test_a_layer_launches_what_the_planner_says(recipe: sk.Recipe) -> None:
    counted, planned = a_layer(recipe)
    launches = Counter(counted.launches)
    for name, (beyond, known) in BEYOND.get((recipe.name, recipe.adapter is not None), {}).items():
        assert launches[name] == beyond + known
        launches[name] = known
    # a second micro-batch's gradients, of A and B or of weights and norms, which a graph adds all at once
    assert launches.pop("add_") == (14 if recipe.adapter else 7 + 4)
    attention = launches.pop("causal_attention_cpu") + launches.pop("causal_attention_cpu_backward")
    assert attention == 2  # of which a GPU makes four: three kernels in backward
    assert launches.total() + 4 == planned.launches.total()


@each
def test_a_layer_moves_and_multiplies_what_the_planner_says(recipe: sk.Recipe) -> None:
    """All but attention, whose operation on a CPU is another. Operands and results count once, in their own kernels."""
    counted, planned = a_layer(recipe)
    for group in ("products", "adapter"):
        assert counted.flop[group] == planned.flop[group]
        # equal, but for the scales of operands that have one a tensor or a row: up to 0.4 %
        assert planned.bytes[group] <= counted.bytes[group] <= 1.005 * planned.bytes[group]
    # the planner leaves out scales, the norms' weights and 1 / rms, and the rotation's tables: 0.4 to 1.8 % of so small a layer
    assert planned.bytes["rest"] <= counted.bytes["rest"] <= 1.02 * planned.bytes["rest"]
    assert counted.flop["rest"] == planned.flop["rest"] == 0
    # nothing else is added in a kernel of its own than a second micro-batch's gradients
    weights = [(512, 512)] * 4 + [(1024, 512)] * 3
    trained = sum(RANK * (n + k) if recipe.adapter else n * k for n, k in weights)
    trained += 0 if recipe.adapter else 2 * (512 + 128)  # of the norms
    assert counted.bytes["gradients"] == 3 * 2 * trained
