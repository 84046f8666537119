"""FLOPs against torch's own counter over whole models, bytes by hand, and one call's work counted once."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import profiler as torch_profiler
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula, sdpa_flop_count

import surokit as sk
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.analysis.work import inputs_of, operator_work, shaped_step
from surokit.profiler.record.recording import RATES, Shaped
from surokit.profiler.record.tracer import without_chatter
from tests.planner.families import config_of, model_of
from tests.planner.test_flops import adapt
from tests.refusals import refused

aten = torch.ops.aten
F32, BF16, I64 = "float", "c10::BFloat16", "long int"
LISTS = torch.__version__ >= "2.13"  # whether torch's profiler keeps the shapes of a list's tensors


def shaped(run) -> Shaped:
    """The work of everything that `run` does."""
    with without_chatter(), torch_profiler.profile(use_kineto=True, record_shapes=True) as trace:
        run()
    raw = [e for e in trace.kineto_results.events() if e.name() != "[memory]"]
    raw.sort(key=lambda e: (e.start_ns(), -e.duration_ns()))
    events = [
        Event(
            Kind.OP, e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.device_resource_id(),
            sequence=e.sequence_nr(),
        )
        for e in raw
    ]  # fmt: skip
    return shaped_step(Timeline.of(events), [inputs_of(e) for e in raw])


def by_name(s: Shaped, of="bytes_E") -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, value in zip(s.timeline.name_E.tolist(), getattr(s, of).tolist()):
        sums[s.timeline.names[name]] = sums.get(s.timeline.names[name], 0) + value
    return {name: value for name, value in sums.items() if value}


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def _sdpa(q, k, v, *_, out_shape=None, **__):
    return sdpa_flop_count(q, _ungrouped(q, k), _ungrouped(q, v))


def _sdpa_backward(*given, **_):
    dy, q, k, v = given[:4]
    empty = [torch.empty(shape, device="meta") for shape in (dy, q, _ungrouped(q, k), _ungrouped(q, v))]
    return flop_registry[aten._scaled_dot_product_flash_attention_backward](*empty)


def _ungrouped(q, k):
    """The shape of keys with a head for each head of the queries: as many FLOPs, and torch's counter takes no other before 2.13."""
    return k[0], q[1], *k[2:]


#: torch's counter knows the fused attention of GPUs only: the same formulas for that of a CPU.
ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


class Unet(nn.Module):
    """Down, attention, up: convolutions, a transposed one and a jump over."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.inner = nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.last = nn.Conv2d(11, 3, 1)

    def forward(self, x_BCHW):
        h = F.silu(self.inner(self.norm(self.down(x_BCHW))))
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).unflatten(2, h.shape[2:])
        return self.last(torch.cat([x_BCHW, self.up(h)], 1))


def language(model, accumulate=1):
    ids = torch.randint(3, 90, (2, 40))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def step():
        for _ in range(accumulate):
            model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoder():
    model = sk.Decoder(sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=96, ffn=128))
    ids = torch.randint(3, 90, (2, 40))
    return lambda: model(ids, labels=ids).loss.backward()


def transformer(family, attention, **more):
    from transformers import AutoModelForCausalLM  # takes seconds

    return language(AutoModelForCausalLM.from_config(config_of(family), attn_implementation=attention), **more)


def checkpointed(reentrant, bias):
    """Without reentrance torch stops the second forward pass of each part at its last product."""
    parts = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32, bias=bias)) for _ in range(3)]
    first = torch.randn(64, 32, requires_grad=True)

    def step():
        x = first
        for part in parts:
            x = x + checkpoint(part, x, use_reentrant=reentrant)
        x.square().sum().backward()

    return step


def gradients_of_gradients():
    x, up, down = (torch.randn(*shape, requires_grad=True) for shape in ((32, 64), (64, 128), (128, 64)))

    def step():
        (slope,) = torch.autograd.grad((torch.tanh(x @ up) @ down).square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    return step


def lora():
    model = model_of(config_of("llama"))
    assert adapt(model, sk.Lora(4, targets=("q_proj", "v_proj", "down_proj")))
    return language(model)


def unet():
    model, x_BCHW = Unet(), torch.randn(2, 3, 16, 16)
    return lambda: model(x_BCHW).square().mean().backward()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(decoder, id="decoder"),
        pytest.param(lambda: transformer("llama", "sdpa"), id="llama"),
        pytest.param(lambda: transformer("llama", "eager"), id="llama, eager attention"),
        pytest.param(lambda: transformer("llama", "sdpa", accumulate=3), id="accumulation"),
        pytest.param(lambda: transformer("gpt2", "sdpa"), id="gpt2"),
        pytest.param(lora, id="lora"),
        pytest.param(lambda: checkpointed(False, bias=True), id="checkpoints"),
        pytest.param(lambda: checkpointed(False, bias=False), id="checkpoints of matrices alone"),
        pytest.param(lambda: checkpointed(True, bias=True), id="reentrant checkpoints"),
        pytest.param(gradients_of_gradients, id="gradients of gradients"),
        pytest.param(unet, id="unet"),
    ],
)
def test_a_step_against_torchs_counter(make):
    torch.manual_seed(0)
    step = make()
    step()  # the first fills optimizer state and lazy buffers
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        step()
    s = shaped(step)
    assert int(s.flop_E.sum()) == pytest.approx(counter.get_total_flops(), rel=0.005)
    assert counter.get_total_flops() > 1e6
    assert set(s.rate_E[s.flop_E > 0].tolist()) == {RATES.index("fp32")}
    # whatever is read or written at least once moves: each weight forward, backward, as a gradient
    assert int(s.bytes_E.sum()) > 0


@given(
    groups=st.integers(1, 3),
    transposed=st.booleans(),
    width=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 1),
    dimensions=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_convolutions(groups, transposed, width, stride, dilation, padding, dimensions):
    """torch's counter forgets the groups in the gradient of a weight, so that is compared without groups."""
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    if transposed:
        kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dimensions]
    layer = kind(2 * groups, 4 * groups, width, stride, padding, dilation=dilation, groups=groups)
    x = torch.randn(2, 2 * groups, *[9] * dimensions, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    forward = counter.get_total_flops()
    s = shaped(lambda: layer(x))
    assert int(s.flop_E.sum()) == forward
    s = shaped(lambda: y.sum().backward(retain_graph=True))
    assert int(s.flop_E.sum()) == 2 * forward
    assert set(by_name(s, "flop_E")) == {"aten::convolution_backward"}
    if groups == 1:
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert int(s.flop_E.sum()) == counter.get_total_flops()


def test_a_convolution_of_which_only_the_weight_trains():
    layer, x = nn.Conv2d(2, 4, 3), torch.randn(1, 2, 8, 8)
    loss = layer(x).sum()
    s = shaped(loss.backward)
    assert int(s.flop_E.sum()) == 2 * 6 * 6 * 9 * 2 * 4


def call(name, **given):
    """(name, shapes, dtypes, values) of a call as a profiler records it, by the schema of the torch that is here: tensors are given
    by their shape, numbers by their value, the rest is left out."""
    shapes: list[Any] = []
    dtypes, values = [], []
    for argument in getattr(torch.ops.aten, name).default._schema.arguments:
        value = given.get(argument.name.rstrip("_"))
        shapes.append(value if isinstance(value, tuple) else [])
        dtypes.append(BF16 if isinstance(value, tuple) else "Scalar" if value is not None else "")
        values.append(None if isinstance(value, tuple) else value)
    return f"aten::{name}", shapes, dtypes, values


@given(b=st.integers(1, 3), h=st.integers(1, 2), t=st.integers(1, 9), s=st.integers(1, 9), d=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_attention_in_every_layout(b, h, t, s, d):
    """The call that models make and the one inside it, which has its dimensions in another order, cost the same."""
    q: tuple[int, ...] = (b, 2 * h, t, d)
    k: tuple[int, ...] = (b, h, s, d)
    forward, backward = _sdpa(q, k, k), _sdpa_backward(q, q, k, k)
    outer = {"query": q, "key": k, "value": k, "grad_out": q, "out": q}
    q, k = (b, t, 2 * h, d), (b, s, h, d)
    inner = {"query": q, "key": k, "value": k, "grad_out": q, "out": q}
    q, k = (b * t, 2 * h, d), (b * s, h, d)  # one after another: a query sees as many keys as the longest sequence has
    packed = {"query": q, "key": k, "value": k, "grad_out": q, "out": q, "max_q": t, "max_k": s}
    packed |= {"cum_seq_q": (b + 1,), "cum_seq_k": (b + 1,)}
    one = {k: (1, *v) if len(v) == 3 else v for k, v in packed.items() if isinstance(v, tuple)}
    one |= {"max_seqlen_q": t, "max_seqlen_k": s, "cu_seqlens_q": (b + 1,), "cu_seqlens_k": (b + 1,)}
    for kind in ("flash", "efficient", "cudnn"):
        for suffix, flop in (("", forward), ("_backward", backward)):
            assert operator_work(*call(f"_scaled_dot_product_{kind}_attention{suffix}", **outer))[::2] == (flop, 0)
    for kind, at_once in (("flash", packed), ("efficient", one)):
        for suffix, flop in (("_forward", forward), ("_backward", backward)):
            assert operator_work(*call(f"_{kind}_attention{suffix}", **inner))[::2] == (flop, 0)
            assert operator_work(*call(f"_{kind}_attention{suffix}", **at_once))[::2] == (flop, 0)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "flop", "rate"),
    [
        ("aten::mm", [(3, 5), (5, 7)], [F32, F32], 2 * 3 * 5 * 7, "fp32"),
        ("aten::mm", [(3, 5), (5, 7), (3, 7)], [BF16] * 3, 2 * 3 * 5 * 7, "bf16"),  # out=
        ("aten::mm", [(3, 0), (0, 7)], [F32, F32], 0, None),
        ("aten::bmm", [(2, 3, 5), (2, 5, 7)], ["c10::Half"] * 2, 2 * 2 * 3 * 5 * 7, "bf16"),
        ("aten::mv", [(3, 5), (5,)], [F32, F32], 2 * 3 * 5, "fp32"),
        ("aten::dot", [(5,), (5,)], ["double"] * 2, 2 * 5, "fp32"),
        ("aten::addmm", [(7,), (3, 5), (5, 7), [], []], [F32] * 3 + ["Scalar"] * 2, 2 * 3 * 5 * 7, "fp32"),
        (
            "aten::baddbmm",
            [(2, 3, 7), (2, 3, 5), (2, 5, 7), [], []],
            [BF16] * 3 + ["Scalar"] * 2,
            2 * 2 * 3 * 5 * 7,
            "bf16",
        ),
        (
            "aten::addbmm",
            [(3, 7), (2, 3, 5), (2, 5, 7), [], []],
            [BF16] * 3 + ["Scalar"] * 2,
            2 * 2 * 3 * 5 * 7,
            "bf16",
        ),
        ("aten::linear", [(2, 3, 5), (7, 5), (7,)], [BF16] * 3, 2 * 6 * 5 * 7, "bf16"),
        ("aten::_int_mm", [(32, 16), (16, 8)], ["signed char"] * 2, 2 * 32 * 16 * 8, "fp8"),
        (
            "aten::_scaled_mm",
            [(16, 32), (32, 48), [], [], [], [], [], []],
            ["c10::Float8_e4m3fn", "c10::Float8_e5m2", F32, F32, "", "", "Scalar", "Scalar"],
            2 * 16 * 32 * 48,
            "fp8",
        ),
        ("aten::_grouped_mm", [(20, 5), (4, 5, 7), (4,), [], []], [BF16] * 2 + ["int", "", ""], 2 * 20 * 5 * 7, "bf16"),
        ("aten::_grouped_mm", [(4, 3, 5), (5, 20), (4,), [], []], [BF16] * 2 + ["int", "", ""], 2 * 3 * 5 * 20, "bf16"),
        ("aten::_grouped_mm", [(3, 20), (20, 7), (4,), [], []], [BF16] * 2 + ["int", "", ""], 2 * 3 * 20 * 7, "bf16"),
        (
            "surokit::fp8_mm",
            [(6, 16), (8, 16), (8, 1), [], [], []],
            [BF16, "c10::Float8_e4m3fn", F32, "Scalar", "Scalar", "Scalar"],
            2 * 6 * 16 * 8,
            "bf16",
        ),
        (
            "surokit::nv_mm",
            [(6, 16), (8, 8), (8, 1), [], [], [], []],
            [BF16, "unsigned char", "c10::Float8_e4m3fn", F32, "Scalar", "Scalar", "Scalar"],
            2 * 6 * 16 * 8,
            "bf16",
        ),
        (
            "surokit::emulated_mm",
            [(6, 16), (1, 1), (8, 16), (1, 1), [], []],
            [BF16, F32, BF16, F32, "Scalar", "Scalar"],
            2 * 6 * 16 * 8,
            "bf16",
        ),
        ("aten::embedding", [(50, 8), (2, 3), [], [], []], [F32, I64] + ["Scalar"] * 3, 0, None),
        ("aten::add", [(3, 5), (3, 5), []], [F32, F32, "Scalar"], 0, None),
    ],
)
def test_products(name, shapes, dtypes, flop, rate):
    assert hasattr(torch.ops.surokit, "fp8_mm")
    given = [1 if dtype == "Scalar" else None for dtype in dtypes]
    got = operator_work(name, shapes, dtypes, given)
    assert (got[0], got[2]) == (flop, -1 if rate is None else RATES.index(rate))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed 4-bit dtype")
def test_four_bits_hold_two_numbers_an_element():
    four = "c10::Float4_e2m1fn_x2"
    got = operator_work(
        "aten::_scaled_mm",
        [(16, 16), (16, 48), (512,), (512,), [], [], [], []],
        [four, four, "c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "", "", "Scalar", "Scalar"],
        [None, None, None, None, None, None, 15, False],
    )
    assert (got[0], got[2]) == (2 * 16 * 32 * 48, RATES.index("fp4"))


def test_a_formula_that_somebody_registered_counts():
    library = torch.library.Library("surokit_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    assert operator_work("surokit_test::twice", [(3, 4)], [BF16], [None])[0] == 0
    target = torch.ops.surokit_test.twice

    @register_flop_formula(target)
    def _(x_shape, out_shape=None, **_):
        return 10 * x_shape[0]

    try:
        assert operator_work("surokit_test::twice", [(3, 4)], [BF16], [None])[::2] == (30, 0)
    finally:
        del flop_registry[target]


def test_somebodys_operator_without_a_rule_for_shapes_is_not_run():
    library = torch.library.Library("surokit_test_run", "DEF")
    library.define("loud(Tensor x) -> Tensor")
    ran = []

    def loud(x):
        ran.append(x)
        return x

    library.impl("loud", loud, "CompositeExplicitAutograd")
    assert operator_work("surokit_test_run::loud", [(3, 4)], [BF16], [None]) == (0, 24, -1)
    assert not ran


def test_the_callers_own_counter_and_warnings_see_nothing():
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings(record=True) as caught:
        filters = list(warnings.filters)
        assert operator_work("aten::mm", *MM) == (210, 4 * 71, RATES.index("fp32"))
        assert operator_work("aten::_prelu_kernel", [(3, 4), (1,)], [F32, F32], [None, None])[1] == 4 * 25
        assert shaped_step(Timeline.of([op("aten::mm", 0, 1)]), [MM]).flop_E.tolist() == [210]
        assert warnings.filters == filters
    assert counter.get_total_flops() == 0
    assert not caught


def test_products_under_autocast_run_at_the_rate_of_what_they_are_cast_to():
    layer, x = nn.Linear(32, 16), torch.randn(8, 32)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)

    s = shaped(run)
    assert int(s.flop_E.sum()) == 2 * 8 * 32 * 16
    assert set(s.rate_E[s.flop_E > 0].tolist()) == {RATES.index("bf16")}
    casts = by_name(s)["aten::copy_"]
    assert casts >= 6 * (8 * 32 + 16 * 32)  # float32 read, bfloat16 written


def test_quantized_products_count_once():
    config = sk.DecoderConfig(layers=1, width=64, heads=4, kv_heads=2, vocab=96, ffn=128)
    ids = torch.randint(96, (2, 32))
    flop = []
    for recipe in (sk.BF16, sk.FP8):
        model = sk.Decoder(config).to(torch.bfloat16)
        sk.apply(model, recipe)
        flop.append(int(shaped(lambda model=model: model(ids, labels=ids).loss.backward()).flop_E.sum()))
    assert flop[0] == flop[1]


# ---------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda x, y: x + y, {"aten::add": 3 * 4 * 600}),
        (lambda x, y: x + y[:1], {"aten::add": 4 * (600 + 30 + 600)}),
        (lambda x, y: x.add_(y), {"aten::add_": 3 * 4 * 600}),
        (lambda x, y: torch.add(x, y, out=torch.empty(20, 30)), {"aten::add": 3 * 4 * 600}),
        (lambda x, y: x > y, {"aten::gt": 2 * 4 * 600 + 600}),
        (lambda x, y: x.copy_(y), {"aten::copy_": 2 * 4 * 600}),
        (lambda x, y: x.to(torch.bfloat16), {"aten::copy_": 6 * 600}),
        (lambda x, y: x.to(torch.float8_e4m3fn), {"aten::copy_": 5 * 600}),
        (lambda x, y: x.t().contiguous(), {"aten::copy_": 8 * 600}),
        (lambda x, y: x.fill_(1.0), {"aten::fill_": 4 * 600}),
        (lambda x, y: torch.zeros_like(x), {"aten::zero_": 4 * 600}),
        (lambda x, y: x.sum(), {"aten::sum": 4 * 601}),
        (lambda x, y: x.sum(0), {"aten::sum": 4 * 630}),
        (lambda x, y: x.amax(1, keepdim=True), {"aten::amax": 4 * 620}),
        (lambda x, y: torch.softmax(x, -1), {"aten::_softmax": 8 * 600}),
        (lambda x, y: torch.cat([x, y]), {"aten::cat": 16 * 600} if LISTS else {}),
        (lambda x, y: x @ y.t(), {"aten::mm": 4 * (600 + 600 + 400)}),
        (lambda x, y: F.linear(x, y, torch.ones(20)), {"aten::addmm": 4 * (600 + 600 + 20 + 400)}),
        (lambda x, y: F.embedding(torch.tensor([3, 3, 5]), x), {"aten::index_select": 2 * 4 * 90 + 24}),
        (lambda x, y: F.layer_norm(x, (30,)), {"aten::native_layer_norm": 4 * (600 + 600 + 20 + 20)}),
        (lambda x, y: F.max_pool2d(x.view(1, 1, 20, 30), 2), {"aten::max_pool2d_with_indices": 4 * (600 + 150) + 8 * 150}),
        (lambda x, y: torch._foreach_add([x, y], [y, x]), {"aten::add": 24 * 600}),
        (lambda x, y: x.view(30, 20).t()[3:, 4].expand(2, 17).detach().unflatten(1, (1, 17)), {}),
        (lambda x, y: torch.empty(50), {}),
        (lambda x, y: F.dropout(x, 0.5, training=False), {}),
    ],
)  # fmt: skip
def test_bytes(run, moved):
    x, y = torch.randn(20, 30), torch.randn(20, 30)
    found = by_name(shaped(lambda: run(x, y)))
    small = {"aten::fill_", "aten::ones", "aten::copy_"} - set(moved)
    assert {name: n for name, n in found.items() if name not in small} == moved


def test_bytes_of_losses_and_lookups_leave_out_what_is_not_read():
    logits, ids = torch.randn(50, 1000, requires_grad=True), torch.randint(1000, (50,))
    table = torch.randn(1000, 16, requires_grad=True)
    s = by_name(shaped(lambda: (F.cross_entropy(logits, ids) + F.embedding(ids, table).sum()).backward()))
    whole = 4 * 50 * 1000
    assert s["aten::_log_softmax"] == 2 * whole
    assert s["aten::nll_loss_forward"] < 1000
    assert whole <= s["aten::nll_loss_backward"] < whole + 1000
    assert s["aten::_log_softmax_backward_data"] == 3 * whole
    assert s["aten::index_select"] == 8 * 50 * 16 + 8 * 50
    lookup = 4 * (50 * 16 + 1000 * 16)  # the gradient of what was looked up, and the whole table's
    assert lookup <= s["aten::zero_"] + s["aten::copy_"] < 1.2 * lookup


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_reads_four_tensors_and_writes_three(fused):
    p = [nn.Parameter(torch.randn(40, 50)), nn.Parameter(torch.randn(60))]
    optimizer = torch.optim.AdamW(p, fused=fused, foreach=False)
    for each in p:
        each.grad = torch.ones_like(each)
    optimizer.step()
    # hooks on optimizers, as of a model that another test left, are not the optimizer's own work
    moved = sum(v for name, v in by_name(shaped(optimizer.step)).items() if not fused or name == "aten::_fused_adamw_")
    if fused and not LISTS:
        assert moved == 0
        return
    least = 4 * 7 * 2060  # parameter, gradient and two averages read, all but the gradient written
    assert least <= moved
    if fused:
        assert moved <= 1.2 * least  # torch's schema says that the gradient may be written too


def test_a_product_in_float8_reads_a_byte_a_number():
    codes = "c10::Float8_e4m3fn"
    got = operator_work(
        "aten::_scaled_mm",
        [(16, 32), (32, 48), [], [], [], [], [], []],
        [codes, codes, F32, F32, "", "", "Scalar", "Scalar"],
        [None] * 6 + [15, False],
    )
    assert got == (2 * 16 * 32 * 48, 16 * 32 + 32 * 48 + 4 + 4 + 2 * 16 * 48, RATES.index("fp8"))


def test_a_generated_kernel_moves_its_tensors():
    got = operator_work("triton_poi_fused_add_0", [(64, 8), (64, 8), []], [BF16, F32, "Scalar"], [None, None, 512])
    assert got == (0, 6 * 512, -1)


# ---------------------------------------------------------------------------------------------------------------- one step


def test_views_of_what_is_unknown_count_nothing():
    node = "autograd::engine::evaluate_function: AddBackward0"
    for name in ("my::operator", "hi", "ProfilerStep#3", node, "torch::autograd::AccumulateGrad", "", "::", "a::b::c"):
        assert operator_work(name, [(3, 4)], [F32], [None]) == (0, 0, -1)
    assert operator_work("aten::mm", [(3, 4)], [F32], [None]) == (0, 0, -1)  # too few arguments
    assert operator_work("aten::mm", [(3, 4), (4,)], [F32, "a dtype of tomorrow"], [None, None]) == (0, 0, -1)
    assert operator_work("aten::convolution", [(1, 2, 8, 8), (4, 2, 3, 3)] + [[]] * 7, [F32] * 2 + [""] * 7, [])[0] == 0
    assert operator_work("_c10d_functional::all_reduce", [(3, 4), [], []], [F32, "", ""], [None] * 3) == (0, 0, -1)
    unseen = operator_work("aten::index", [(3, 4), []], [F32, "GenericList"], [None, None])
    assert unseen == operator_work("aten::index", [(3, 4), []], [F32, ""], [None, None]) == (0, 0, -1)
    assert operator_work("aten::nonzero", [(3, 4)], [F32], [None]) == (0, 48, -1)  # how many it finds is not known


def op(name, start, end, thread=1):
    return Event(Kind.OP, name, start, end, thread)


MM: Any = ([(3, 5), (5, 7)], [F32, F32], [None, None])
ADD: Any = ([(3, 7), (3, 7), []], [F32, F32, "Scalar"], [None, None, 1])
NOTHING: Any = ((), (), ())


def test_what_an_operator_calls_counts_once():
    rows = [
        (op("aten::linear", 0, 100), ([(3, 5), (7, 5), []], [F32, F32, ""], [None] * 3)),
        (op("aten::mm", 10, 50), MM),
        (op("aten::mm", 20, 40), MM),  # the same again, one dispatch deeper
        (op("aten::add", 20, 120, thread=2), ADD),  # another thread's
        (op("aten::add", 200, 220), ADD),
        (op("aten::copy_", 205, 206), ([(1,), (1,), []], [F32, F32, "Scalar"], [None, None, False])),  # a scalar's cast
        (Event(Kind.ANNOTATION, "Optimizer.step#AdamW.step", 300, 400, 1), NOTHING),
        (op("aten::mm", 310, 390), MM),
        (Event(Kind.KERNEL, "aten::mm", 310, 390, 7), MM),
    ]
    rows.sort(key=lambda row: (row[0].start_ns, -row[0].end_ns))
    s = shaped_step(Timeline.of(e for e, _ in rows), [given for _, given in rows])
    assert s.flop_E.tolist() == [0, 0, 0, 210, 0, 0, 0, 210, 0]
    moved = 4 * (15 + 35 + 21)
    assert s.bytes_E.tolist() == [0, 0, 4 * 63, moved, 4 * 63, 0, 0, moved, 0]
    assert s.rate_E.tolist() == [-1, -1, -1, 1, -1, -1, -1, 1, -1]


def test_a_library_that_calls_a_part_of_its_work_openly_loses_none():
    conv: Any = (
        [(1, 2, 8, 8), (4, 2, 3, 3), [], [], [], [], [], [], []],
        [F32, F32, "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
        [None, None, None, [1], [0], [1], False, [0], 1],
    )
    rows = [op("aten::convolution", 0, 100), op("aten::mm", 10, 50), op("aten::add", 60, 70)]
    s = shaped_step(Timeline.of(rows), [conv, MM, ADD])
    assert s.flop_E.tolist() == [2 * 36 * 9 * 2 * 4, 0, 0]
    assert s.bytes_E.tolist() == [4 * (128 + 72 + 4 * 36), 0, 0]


def test_a_lists_tensors_have_the_dtype_that_their_shape_had_last():
    cat: Any = ([[(3, 7), (3, 7)], []], ["TensorList", "Scalar"], [None, 0])
    half: Any = ([(3, 7), (3, 7), []], [BF16, BF16, "Scalar"], [None, None, 1])
    s = shaped_step(Timeline.of([op("aten::add", 0, 1), op("aten::cat", 2, 3)]), [half, cat])
    assert s.bytes_E.tolist() == [2 * 63, 2 * 84]


def test_steps_that_cannot_be():
    empty = shaped_step(Timeline.of([]), [])
    assert [len(c) for c in (empty.flop_E, empty.bytes_E, empty.rate_E)] == [0, 0, 0]
    with refused(ValueError) as caught:
        shaped_step(Timeline.of([op("aten::mm", 0, 1), op("aten::mm", 2, 3)]), [MM])
    assert "\n" not in str(caught.value)


def test_the_inputs_of_an_older_torchs_event():
    """Without the shapes of lists' tensors these count nothing."""
    old = SimpleNamespace(
        shapes=lambda: [[], []], dtypes=lambda: ["TensorList", "Scalar"], concrete_inputs=lambda: [None, 0]
    )
    assert inputs_of(old) == ([[], []], ["TensorList", "Scalar"], [None, 0])
    assert operator_work("aten::cat", *inputs_of(old)) == (0, 0, -1)


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from([MM, ADD, NOTHING]), st.integers(1, 2)),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_never_more_than_the_work_of_all_and_never_less_than_the_greatest(drawn):
    names = {id(MM): "aten::mm", id(ADD): "aten::add", id(NOTHING): "hi"}
    rows = [(op(names[id(given)], a, a + n, thread), given) for a, n, given, thread in drawn]
    rows.sort(key=lambda row: (row[0].start_ns, -row[0].end_ns))
    s = shaped_step(Timeline.of(e for e, _ in rows), [given for _, given in rows])
    alone = [operator_work(e.name, *given) if given[0] else (0, 0, -1) for e, given in rows]
    for column, position in ((s.flop_E, 0), (s.bytes_E, 1)):
        assert int(column.sum()) <= sum(work[position] for work in alone)
    assert int(s.flop_E.sum()) >= max((work[0] for work in alone), default=0)
    assert ((s.flop_E > 0) == (s.rate_E >= 0)).all()


def test_random_numbers_stay_as_they_are():
    """Results of random operators are asked of kernels without data, which must not draw any."""
    x = torch.randn(4, 4)
    given: Any = ([(4, 4), [], []], [F32, "Scalar", "Scalar"], [None, 0.5, True])
    before = torch.get_rng_state()
    assert operator_work("aten::native_dropout", *given)[1] == 64 + 64 + 16
    assert operator_work(
        "aten::multinomial", [(4, 4), [], [], []], [F32, "Scalar", "Scalar", ""], [None, 2, True, None]
    )
    assert torch.equal(before, torch.get_rng_state())
    assert x.shape == (4, 4)
