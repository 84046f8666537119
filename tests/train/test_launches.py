"""How many kernels a layer launches: a tiny decoder with an adapter, forward and backward, through Triton's interpreter.

Counted are Triton's launches and torch's operations that are no views: each is one kernel on a GPU, more or less. Products in
FP8, which a CPU emulates, and attention's forward and backward count once each. What a layer costs is the difference between
models of two layers and of one, so embedding, last norm and loss cancel. Doors of kernels/ give the Triton form, as on CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surokit as sk
from surokit import kernels, product
from surokit.kernels import OPERATIONS
from surokit.nn.fusion import OFF, Fusion
from surokit.planner import plan
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


class Counted(steps.Uncomputed):
    """Counts what a Hopper GPU would launch of a step in which nothing is computed."""

    counts: Counter[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        operation = OPERATIONS.get(name) if func.namespace == "surokit" else None
        ours = operation and triton_form(operation.reference) is not operation.reference  # counted as it launches
        if not view and not ours and name not in {*MEMORY, "_local_scalar_dense"}:
            self.counts[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def counted_and_planned(recipe: sk.Recipe, layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], float]:
    """Launches of a second micro-batch by name, and the planner's number for a step of one."""
    from triton.runtime.interpreter import GridExecutor

    T = 256
    shape: dict[str, Any] = {"width": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "ffn": 1024, "vocab": 256}
    config = sk.DecoderConfig(layers=layers, **shape, qk_norm=True, tied=False, max_length=T)
    model = sk.Decoder(config, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patched:

        def launched(executor: Any, *args: Any, **options: Any) -> None:
            counts[f"triton {executor.fn.__name__}"] += 1

        patched.setattr(GridExecutor, "__call__", launched)
        patched.setattr(Counted, "counts", counts, raising=False)
        patched.setattr(steps, "Uncomputed", Counted)
        with steps.on_hopper():
            sk.apply(model, recipe)
            sk.fuse(model, Fusion())
            ids = torch.zeros((1, T), dtype=torch.int64)
            for _ in range(2):
                counts.clear()
                model(ids, labels=ids).loss.backward()
    setting: dict[str, Any] = {"batch": 1, "length": T, "gpu": "H200", "graphs": True, "fusion": "fused"}
    estimate = plan(config, recipe=recipe, **setting).estimate
    assert estimate is not None
    return counts, sum(row.launches for row in estimate.rows)


# beyond the planner's, a layer and micro-batch: merging the amaxes of kept codes of four groups; scales turned column by column
BEYOND = {"fp8": {"maximum": 4}, "fp8-block": {"clone": 9}, "qfp8": {"clone": 9}}


@pytest.mark.parametrize(
    "recipe", [sk.BF16, sk.FP8, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.QFP8], ids=lambda recipe: recipe.name
)
def test_a_layer_launches_what_the_planner_says(recipe: sk.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, planned_one), (two, planned_two) = (
        counted_and_planned(recipe.keep_small(0).lora(16), layers, monkeypatch) for layers in (1, 2)
    )
    two.subtract(one)
    beyond = BEYOND.get(recipe.name, {})
    for name, launches in beyond.items():
        assert two.pop(name) == launches
    assert two.pop("add_") == 14  # a second micro-batch's gradients of A and B, which a graph adds all at once
    attention = two.pop("causal_attention_cpu") + two.pop("causal_attention_cpu_backward")
    assert attention == 2  # of which a GPU makes four: three kernels in backward
    assert two.total() + 4 == planned_two - planned_one
