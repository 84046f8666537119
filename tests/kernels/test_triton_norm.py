"""RMSNorm in Triton: relative error against float64, and every fused form bit for bit against its steps."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import delayed, quantize
from surokit.kernels.reference import norm as reference
from surokit.kernels.triton import delayed as launches
from surokit.kernels.triton import norm as kernels
from surokit.kernels.triton import rows
from tests.kernels.compiling import ANY, FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE, poisoned
from tests.refusals import refused

pytestmark = pytest.mark.sampled

INF, NAN = float("inf"), float("nan")
BLOCKS = {"columns": 128, "pow2": True}
SIZES = (90, 120)  # for what differs from another launch in its sizes only


def backward(M=256, K=512, dtype=torch.bfloat16, **options):
    x = matrix(M, K, dtype)
    kernels.backward(x, x, matrix(1, K, dtype)[0], torch.ones(M, 1), **options)


def quantized(K=512, format=E4M3, dtype=torch.bfloat16, slots=0, sum=False, **options):
    x = matrix(256, K, dtype)
    amaxes = {"in_force": torch.ones(slots), "opened": torch.ones(slots), "record": True} if slots else {}
    delta = matrix(256, K, dtype) if sum else None
    kernels.forward_quantized(x, matrix(1, K, dtype)[0], 1e-5, format, delta=delta, **amaxes, **options)


def forward(K=512, dtype=torch.bfloat16):
    kernels.forward(matrix(256, K, dtype), matrix(1, K, dtype)[0], 1e-5)


LAUNCHES: Launches = {
    "forward": (ANY, forward),
    "forward, heads": (ANY, partial(forward, 128)),
    "forward, wide": (SIZES, partial(forward, 16384)),
    "forward, float32": (ANY, partial(forward, dtype=torch.float32)),
    "add": (ANY, lambda: kernels.add_forward(matrix(), matrix(), matrix(1)[0], 1e-5)),
    "once more": (ANY, lambda: kernels.recompute(matrix(), matrix(1)[0], torch.ones(256, 1))),
    "backward": (ANY, backward),
    "backward, 4096": (ANY, lambda: backward(K=4096, residual=matrix(256, 4096))),
    "backward, 5120": (SIZES, lambda: backward(K=5120, residual=matrix(256, 5120))),
    "backward, wide": (SIZES, partial(backward, 16, 16384)),
    "backward, float32": (
        ANY,
        lambda: backward(K=8192, dtype=torch.float32, residual=matrix(256, 8192, torch.float32)),
    ),
    "backward, frozen": (ANY, lambda: backward(residual=matrix(), need_dw=False)),
    "quantized per row": (FP8, partial(quantized, floor=1e-12, pow2=True)),
    "quantized, wide": (SIZES, partial(quantized, 16384)),
    "quantized, float32": (FP8, partial(quantized, dtype=torch.float32)),
    "quantized, blocks": (FP8, partial(quantized, **BLOCKS)),
    "quantized, blocks of a sum": (FP8, partial(quantized, 4096, sum=True, values=True, **BLOCKS)),
    "quantized, delayed": (FP8, partial(quantized, slots=1)),
    "quantized, delayed, of a sum": (FP8, partial(quantized, 4096, slots=3, sum=True)),
    "quantized, e5m2": (FP8, partial(quantized, format=E5M2, slots=1)),
    "both": (FP8, partial(quantized, 1024, slots=3, sum=True, both=True)),
    "both, 4096": (FP8, partial(quantized, 4096, slots=3, sum=True, both=True)),
    "both, values": (SIZES, partial(quantized, 5120, slots=1, values=True, both=True)),
    "both, wide": (SIZES, partial(quantized, 16384, slots=1, sum=True, both=True)),
    "both, float32": (SIZES, partial(quantized, 4096, dtype=torch.float32, slots=1, sum=True, both=True)),
    "both, narrow": (SIZES, partial(quantized, 64, slots=1, both=True)),
    "both, e5m2": (FP8, partial(quantized, format=E5M2, slots=1, both=True)),
}

SHAPES = [(1, 1), (7, 33), (11, 512), (1, 2100)]


def inputs(T, K, *, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(T * K)
    x, dy = torch.randn(2, T, K, generator=generator).unbind()
    w = 1 + torch.randn(K, generator=generator) / 4
    return [t.to(DEVICE, dtype) for t in (x * scale, dy, w)]


def apart(x, delta, w):
    """r, x + delta (or None) and y, each by an operation of its own."""
    total = None if delta is None else x + delta
    y, r = kernels.forward(x if total is None else total, w, 1e-5)
    return r, total, y


def same(a, b):
    """Equal values in equal places, NaN included, and equal signs of zeros."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit() | a.float().isnan(), b.float().signbit() | b.float().isnan())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4, 1e15, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(shape, scale, dtype):
    x, dy, w = inputs(shape[0], shape[1], dtype=dtype, scale=scale)
    exact = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.nn.functional.rms_norm(exact[0], (shape[1],), exact[1], 1e-5)
    exact_dx, exact_dw = torch.autograd.grad(expected, exact, dy.double())
    copies = [t.clone() for t in (x, dy, w)]
    y, r = kernels.forward(x, w, 1e-5)
    dx, dw = kernels.backward(dy, x, w, r)
    torch.testing.assert_close(r, reference.forward(x, w, 1e-5)[1], rtol=1e-6, atol=0)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    # dx is a difference, and where a row has one element nothing is left of it: measured against its terms
    terms = r.double() * dy.double() * w.double()
    for ours, theirs, size in ((y, expected, expected), (dx, exact_dx, terms), (dw, exact_dw, exact_dw)):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= tolerance * size.norm()
    for a, b in zip(copies, (x, dy, w)):
        assert torch.equal(a, b)  # inputs are never written over


@pytest.mark.parametrize(("programs", "shape"), [(1, (50, 600)), (2, (50, 600)), (40, (131, 1030))])
def test_the_gradient_of_the_weight_does_not_depend_on_the_programs(programs, shape, monkeypatch):
    x, dy, w = inputs(*shape, dtype=torch.float32)
    _, r = kernels.forward(x, w, 1e-5)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: programs)
    for ours, theirs in zip(kernels.backward(dy, x, w, r), reference.backward(dy, x, w, r)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sum_is_rounded_and_then_normed(shape, scale, dtype):
    x, delta, w = inputs(*shape, dtype=dtype)
    x, delta = x * scale, delta * scale
    total, y, r = kernels.add_forward(x, delta, w, 1e-5)
    same(total, x + delta)
    for ours, theirs in zip((y, r), kernels.forward(total, w, 1e-5)):
        same(ours, theirs)
    for ours, theirs in zip(reference.add_forward(x, delta, w, 1e-5)[1:], reference.forward(total, w, 1e-5)):
        same(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
def test_once_more_is_the_same(shape, dtype, module):
    x, _, w = inputs(*shape, dtype=dtype)
    y, r = module.forward(x, w, 1e-5)
    same(module.recompute(x, w, r), y)


@pytest.mark.parametrize("shape", [*SHAPES[:-1], (5, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
def test_a_residual_joins_before_rounding(shape, dtype, module):
    x, dy, w = inputs(*shape, dtype=dtype)
    residual = dy.flip(0) * 3
    r = module.forward(x, w, 1e-5)[1]
    dx, dw = module.backward(dy, x, w, r, residual)
    alone = module.backward(dy.float(), x.float(), w.float(), r)[0]
    exact = (alone.double() + residual.double()).float().to(dtype)
    differ = (dx != exact).float().mean()
    assert differ <= 0.01 if dtype == torch.bfloat16 else (dx - exact).abs().max() <= 1e-5
    same(module.backward(torch.zeros_like(dy), x, w, r, residual)[0], residual)
    same(dw, module.backward(dy, x, w, r)[1])
    frozen = module.backward(dy, x, w, r, residual, need_dw=False)
    torch.testing.assert_close(frozen[0], dx)
    assert frozen[1] is None


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (5, 512), (3, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "pow2"), [(0, True), (0, False), (16, True), (128, True), (128, False)])
def test_quantized_is_forward_then_quantize(shape, dtype, columns, pow2):
    x, delta, w = inputs(*shape, dtype=dtype)
    x[-1] *= 1e-20 if shape[0] > 1 else 1
    w[: shape[1] // 3] = 0  # blocks of zeros
    for added, values in ((delta, False), (None, True)):
        expected = apart(x, added, w)
        codes, scales, *rest = kernels.forward_quantized(
            x, w, 1e-5, delta=added, values=values, columns=columns, pow2=pow2, floor=1e-12
        )
        for a, b in zip((codes, scales), quantize.quantize(expected[2], E4M3, 1, columns, pow2, floor=1e-12)):
            same(a, b)
        assert scales.stride(0) == 1
        assert rest[2] is not None or not values
        for a, b in zip(rest, expected[: 2 + values]):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (9, 1100)])
@pytest.mark.parametrize("given", [0.0, 3.0, 0.01])
@pytest.mark.parametrize(("format", "record"), [(E4M3, True), (E4M3, False), (E5M2, True)], ids=str)
def test_delayed_is_forward_then_quantize(shape, given, format, record, monkeypatch):
    monkeypatch.setattr(launches, "PARTS", 2)  # fewer than there are tiles
    x, delta, w = inputs(*shape)
    x[-1, -1] = 50.0  # the last tile says what the amax is
    for added in (None, delta):
        expected = apart(x, added, w)
        banks = [torch.tensor([[given] * 6, [1e-3, delayed.NOTHING] * 3], device=DEVICE) for _ in range(2)]
        ours, theirs = ({"in_force": bank[0, ::2], "opened": bank[1, 1::2]} for bank in banks)
        codes, scale, *rest = kernels.forward_quantized(
            x, w, 1e-5, format, delta=added, values=True, record=record, floor=1e-3, **ours
        )
        slots = theirs["in_force"], theirs["opened"]
        for a, b in zip((codes, scale), delayed.quantize(expected[2], format, *slots, record, False, 1e-3)):
            same(a, b)
        same(*banks)
        for a, b in zip(rest, expected):
            assert a is b is None or torch.equal(a, b)


SLOTS = [(E4M3, True), (E4M3, False), (E5M2, True)]
# rows of several tiles take the interpreter seconds each: the first slot always, the others in the soak run
MANY_TILES = [pytest.param((33, 2100), *slot, marks=[pytest.mark.soak] * (slot != SLOTS[0])) for slot in SLOTS]
FEW_TILES = [(shape, *slot) for shape in ((1, 1), (7, 33), (16, 64), (37, 300)) for slot in SLOTS]


@pytest.mark.parametrize("given", [0.0, 3.0])
@pytest.mark.parametrize(("shape", "format", "record"), [*FEW_TILES, *MANY_TILES], ids=str)
def test_codes_of_the_transpose_are_the_codes_turned(shape, given, format, record):
    x, delta, w = inputs(*shape)
    for added in (None, delta):
        banks = [torch.tensor([[given] * 3, [delayed.NOTHING] * 3], device=DEVICE) for _ in range(3)]
        slots = [{"in_force": bank[0], "opened": bank[1], "record": record} for bank in banks]
        options = {"delta": added, "values": added is None}
        with poisoned():
            both = kernels.forward_quantized(x, w, 1e-5, format, both=True, **options, **slots[0])
        one = kernels.forward_quantized(x, w, 1e-5, format, **options, **slots[1])
        y = apart(x, added, w)[2]
        steps = delayed.quantize_both(y, format, banks[2][0], banks[2][1], record)
        for ours, theirs in zip((*both[:2], *both[4:]), one):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                same(ours, theirs)
        for ours, theirs in zip(both, steps):
            same(ours, theirs)
        assert both[2].is_contiguous()
        for bank in banks[1:]:
            same(banks[0], bank)


@pytest.mark.parametrize("both", [False, True])
def test_rows_beyond_the_last_say_nothing(both):
    """A tile has more rows than there are, and where eps is zero they are zero by zero."""
    x, _, w = inputs(3, 300)
    in_force, opened = torch.tensor([[0.0], [-1.0]], device=DEVICE).unbind()
    scale = kernels.forward_quantized(x, w, 0.0, in_force=in_force, opened=opened, record=True, both=both)[1]
    for slot in (in_force, opened, 448 * scale.view(1)):
        torch.testing.assert_close(slot, quantize.amax(kernels.forward(x, w, 0.0)[0]).view(1))


@pytest.mark.parametrize("value", [0.0, INF, NAN])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", ["row", "blocks", "known", "first", "known, both", "first, both"])
def test_values_that_are_no_good_stay_visible(value, format, scaling):
    scaling, both = scaling.partition(", ")[::2]
    x, _, w = inputs(19, 300)
    x[2] = 0.0
    x[2, 7] = value
    y, _ = kernels.forward(x, w, 1e-5)
    if scaling in ("row", "blocks"):
        options = BLOCKS if scaling == "blocks" else {"columns": 0, "pow2": False}
        codes, scales, *_ = kernels.forward_quantized(x, w, 1e-5, format, **options)
        expected = quantize.quantize(y, format, 1, options["columns"], options["pow2"])
        same(codes, expected[0])
    else:
        banks = [torch.tensor([3.0 if scaling == "known" else 0.0, -1.0], device=DEVICE).split(1) for _ in range(2)]
        slots = {"in_force": banks[0][0], "opened": banks[0][1], "record": True, "both": bool(both)}
        _, scales, *_ = kernels.forward_quantized(x, w, 1e-5, format, **slots)
        expected = delayed.quantize(y, format, *banks[1], True)
        for a, b in zip(*banks):
            same(a, b)
    same(scales, expected[1])
    assert scales.isnan().any() == (value != 0)


def test_the_definition_is_the_two_steps():
    x, delta, w = inputs(6, 300)
    for given in (None, delta):
        y, r = reference.forward(x if given is None else x + delta, w, 1e-5)
        codes, scales, *rest = reference.forward_quantized(x, w, 1e-5, floor=1e-12, delta=given, values=True, **BLOCKS)
        expected = quantize.quantize(y, E4M3, 1, 128, True, floor=1e-12)
        for ours, theirs in zip((codes, scales, *rest), (*expected, r, None if given is None else x + delta, y)):
            assert ours is theirs is None or torch.equal(ours.float(), theirs.float())
    slots = torch.tensor([[0.0], [-1.0]], device=DEVICE).unbind()
    assert reference.forward_quantized(x, w, 1e-5, in_force=slots[0], opened=slots[1], record=True)[3:] == (None, None)
    own = quantize.amax(reference.forward(x, w, 1e-5)[0]).view(1)
    same(slots[0], own)
    same(slots[1], own)


def test_strides_and_no_rows():
    x, dy, w = inputs(9, 48)
    residual = dy.flip(1)
    y, r = kernels.forward(x, w, 1e-5)
    dx, dw = kernels.backward(dy, x, w, r, residual)
    total = kernels.add_forward(x, dy, w, 1e-5)
    for strided in (lambda t: torch.cat((t, t), 1)[:, :48], lambda t: t.t().contiguous().t()):
        x_s, dy_s, residual_s = strided(x), strided(dy), strided(residual)
        assert not x_s.is_contiguous()
        assert torch.equal(kernels.forward(x_s, w, 1e-5)[0], y)
        assert torch.equal(kernels.recompute(x_s, w, r), y)
        assert torch.equal(kernels.forward_quantized(x_s, w, 1e-5, delta=dy_s)[2], total[2])
        for ours, theirs in zip(kernels.add_forward(x_s, dy_s, w, 1e-5), total):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(kernels.backward(dy_s, x_s, w, r, residual_s), (dx, dw)):
            assert torch.equal(ours, theirs)
    row = dy[:1].expand(9, 48)  # a gradient as sum() gives it
    assert torch.equal(kernels.backward(row, x, w, r)[0], kernels.backward(row.contiguous(), x, w, r)[0])
    none = x[:0]
    assert [tuple(t.shape) for t in kernels.forward(none, w, 1e-5)] == [(0, 48), (0, 1)]
    assert [tuple(t.shape) for t in kernels.add_forward(none, none, w, 1e-5)] == [(0, 48), (0, 48), (0, 1)]
    assert kernels.recompute(none, w, r[:0]).shape == none.shape
    dx, dw = kernels.backward(none, none, w, r[:0], none)
    assert dx.shape == none.shape
    assert not dw.any()
    assert kernels.backward(none, none, w, r[:0], need_dw=False)[1] is None
    found = kernels.forward_quantized(none, w, 1e-5, columns=16, delta=none, values=True)
    assert [tuple(t.shape) for t in found] == [(0, 48), (0, 3), (0, 1), (0, 48), (0, 48)]
    slots = {"in_force": torch.ones(1, device=DEVICE), "opened": torch.ones(1, device=DEVICE)}
    found = kernels.forward_quantized(none, w, 1e-5, both=True, **slots)
    assert [tuple(t.shape) for t in found[:5]] == [(0, 48), (1, 1), (48, 0), (1, 1), (0, 1)]


def test_errors():
    x, dy, w = inputs(4, 8)
    with refused(ValueError):
        kernels.forward(x, w[:7], 1e-5)
    for call in (
        lambda: kernels.backward(dy[:3], x, w, x.new_ones(4, 1)),
        lambda: kernels.backward(dy, x, w, x.new_ones(4, 1), dy[:, :4]),
        lambda: kernels.add_forward(x, dy[:1], w, 1e-5),
        lambda: kernels.forward_quantized(x, w, 1e-5, delta=dy[:3]),
    ):
        with refused(ValueError):
            call()
    with refused(TypeError):
        kernels.forward(x.double(), w, 1e-5)
    with refused(ValueError):
        kernels.forward_quantized(x, w, 1e-5, columns=3)
    for module in (kernels, reference):
        with refused(ValueError):
            module.forward_quantized(x, w, 1e-5, in_force=torch.ones(1, device=DEVICE))
    for options in ({}, BLOCKS):
        with refused(ValueError):
            kernels.forward_quantized(x, w, 1e-5, both=True, **options)
    with refused(ValueError):
        kernels.forward(x.new_ones(1, 65537), x.new_ones(65537), 1e-5)


def test_gpus_without_float8_quantize_in_a_second_step(monkeypatch):
    x = SimpleNamespace(is_cuda=True, device="cuda", numel=lambda: 1)
    for capability, expected in (((8, 0), True), ((8, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert rows.apart(x) == expected
    x, delta, w = inputs(3, 300)
    fused = kernels.forward_quantized(x, w, 1e-5, delta=delta, values=True, **BLOCKS)
    monkeypatch.setattr(kernels, "apart", lambda x: True)
    monkeypatch.setattr(kernels, "forward_rows_quantized", None)  # is not launched
    for ours, theirs in zip(kernels.forward_quantized(x, w, 1e-5, delta=delta, values=True, **BLOCKS), fused):
        same(ours, theirs)
    assert len(kernels.forward_quantized(x, w, 1e-5, both=True, **BLOCKS)) == len(fused) + 2


def stores(launch, kernel="forward_rows_quantized"):
    lines = compiled()["norm", launch, 90][kernel].splitlines()
    return {line.split("st.global.")[1].split()[0] for line in lines if "st.global." in line}


def test_fused_and_unfused_sum_in_one_order():
    """Codes are stored in groups as wide as those of y; wider ones would change how the sum of a row is dealt out to threads."""
    for launch, group in (
        ("quantized per row", "v2.b32"),
        ("quantized, wide", "v2.b32"),
        ("quantized, float32", "b32"),
        ("quantized, blocks", "v2.b32"),
        ("quantized, delayed", "v2.b32"),
    ):
        assert stores(launch) == {"b32", group}, launch  # b32: scales and r
    assert stores("forward", "forward_rows") == {"b32", "v4.b32"}
    for launch in ("quantized, blocks of a sum", "quantized, delayed, of a sum"):
        assert stores(launch) == {"b32", "v2.b32", "v4.b32"}  # codes, and the sum (and y) in 16 bytes a thread
    # in both orientations as well, beside 16 transposed codes a thread
    for launch in ("both", "both, 4096", "both, values", "both, wide", "both, narrow"):
        assert stores(launch, "forward_rows_both") == {"b32", "v2.b32", "v4.b32"}, launch
    assert stores("both, float32", "forward_rows_both") == {"b32", "v4.b32"}


def test_everything_is_read_in_16_bytes_and_the_next_rows_in_advance():
    for launch, kernel, tensors in (
        ("add", "forward_rows", 2),
        ("quantized, blocks of a sum", "forward_rows_quantized", 3),
        ("quantized, delayed, of a sum", "amax_rows", 3),
        ("backward, frozen", "backward_rows", 3),
    ):
        ptx = compiled()["norm", launch, 90][kernel]
        assert ptx.count("ld.global.v4.b32") == 2 * tensors, launch  # 16 elements a thread
    for launch, ahead in (("backward, 4096", True), ("backward, frozen", False), ("backward, wide", False)):
        assert ("cp.async" in compiled()["norm", launch, 90]["backward_rows"]) == ahead, launch
    for launch, ahead in (("both", True), ("both, 4096", True), ("both, wide", False)):
        assert ("cp.async" in compiled()["norm", launch, 90]["forward_rows_both"]) == ahead, launch


def test_a_program_waits_before_it_turns_what_it_stored():
    """Behind the loop over rows, which ends with the slots, and before the codes are read: where nothing is fetched in advance no
    other barrier stands there."""
    for launch, count in (("both", 2), ("both, narrow", 2), ("both, wide", 1)):
        ptx = compiled()["norm", launch, 90]["forward_rows_both"]
        behind = ptx[max(ptx.rindex("atom.global"), ptx.rindex("st.global.b32")) :]
        assert behind[: behind.index("ld.global")].count("bar.sync") >= count, launch
