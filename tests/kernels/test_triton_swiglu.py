"""SwiGLU in Triton: relative error against float64, and every fused form bit for bit against its steps."""

from functools import partial

import pytest
import torch

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import delayed, quantize
from surokit.kernels.reference import swiglu as reference
from surokit.kernels.triton import delayed as launches
from surokit.kernels.triton import swiglu as kernels
from tests.kernels.compiling import ANY, FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE, poisoned
from tests.refusals import refused

pytestmark = pytest.mark.sampled

INF, NAN = float("inf"), float("nan")
BLOCKS = {"columns": 128, "pow2": True}
SIZES = (90, 120)  # for what differs from another launch in its sizes only


def halves(K=512):
    """Gate and up as one product gives them."""
    return matrix(256, 2 * K).chunk(2, 1)


def quantized(K=512, format=E4M3, slots=0, **options):
    amaxes = {"in_force": torch.ones(slots), "opened": torch.ones(slots), "record": True} if slots else {}
    kernels.forward_quantized(*halves(K), format, **amaxes, **options)


LAUNCHES: Launches = {
    "forward": (ANY, lambda: kernels.forward(matrix(), matrix())),
    "forward, halves": (ANY, lambda: kernels.forward(*halves())),
    "backward": (ANY, lambda: kernels.backward(matrix(), matrix(), matrix())),
    "backward, joint": (ANY, lambda: kernels.backward(matrix(), *halves(), joint=True, values=True)),
    "quantized per row": (FP8, partial(quantized, 3072, floor=1e-12, pow2=True)),
    "quantized per row, 12288": (SIZES, partial(quantized, 12288, values=True)),
    "quantized, wide": (SIZES, partial(quantized, 28672)),
    "quantized, blocks": (FP8, partial(quantized, 9728, **BLOCKS)),
    "quantized, blocks, values": (FP8, partial(quantized, 12288, values=True, **BLOCKS)),
    "quantized, delayed": (FP8, partial(quantized, 12288, slots=1)),
    "quantized, e5m2": (FP8, partial(quantized, format=E5M2, slots=1)),
    "both, delayed": (FP8, partial(quantized, 12288, slots=1, both=True)),
    "both, delayed, values": (SIZES, partial(quantized, 3072, slots=1, values=True, both=True)),
    "both, blocks": (FP8, partial(quantized, 12288, both=True, **BLOCKS)),
    "both, short blocks": (SIZES, partial(quantized, 3072, both=True, columns=16)),
    "both, e5m2": (FP8, partial(quantized, format=E5M2, slots=1, both=True)),
}


def inputs(*shape, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    gate, up, dy = torch.randn(3, *shape, generator=generator).unbind()
    return [t.to(DEVICE, dtype) for t in (gate * scale, up, dy)]


def same(a, b):
    """Equal values in equal places, NaN included, and equal signs of zeros."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit() | a.float().isnan(), b.float().signbit() | b.float().isnan())


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 530)])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(shape, scale, dtype):
    gate, up, dy = inputs(*shape, dtype=dtype, scale=scale)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    exact_dgate, exact_dup = torch.autograd.grad(expected, exact, dy.double())
    copies = [t.clone() for t in (gate, up, dy)]
    y = kernels.forward(gate, up)
    dgate, dup = kernels.backward(dy, gate, up)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for ours, theirs in ((y, expected), (dgate, exact_dgate), (dup, exact_dup)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    for a, b in zip(copies, (gate, up, dy)):
        assert torch.equal(a, b)  # inputs are never written over


@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 530)])
@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "reference"])
def test_joint_gradients_and_values(shape, scale, dtype, module):
    gate, up, dy = inputs(*shape, dtype=dtype, scale=scale)
    apart = module.backward(dy, gate, up)
    copies = [t.clone() for t in (gate, up, dy)]
    both = torch.cat((gate, up), -1)
    for a, b in ((gate, up), (both[..., : shape[-1]], both[..., shape[-1] :])):
        (joint,) = module.backward(dy, a, b, joint=True)
        if module is kernels:
            same(joint, torch.cat(apart, -1))
        else:  # torch's exponential of strided float32 differs in a last bit
            torch.testing.assert_close(joint, torch.cat(apart, -1), rtol=1e-6, atol=1e-6, equal_nan=True)
        assert joint.is_contiguous()
        y = module.forward(a, b)
        for ours, theirs in zip(module.backward(dy, a, b, joint=True, values=True), (joint, y)):
            same(ours, theirs)
        for ours, theirs in zip(module.backward(dy, a, b, values=True), (*module.backward(dy, a, b), y)):
            same(ours, theirs)
    for a, b in zip(copies, (gate, up, dy)):
        assert torch.equal(a, b)  # inputs are never written over


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("columns", "pow2"), [(0, True), (0, False), (16, True), (128, True), (128, False), (2048, True)]
)
def test_quantized_is_forward_then_quantize(shape, dtype, columns, pow2):
    gate, up, _ = inputs(*shape, dtype=dtype)
    up[-1] *= 1e-20 if shape[0] > 1 else 1
    up[:, : shape[1] // 3] = 0  # blocks of zeros
    y = kernels.forward(gate, up)
    expected = quantize.quantize(y, E4M3, 1, columns, pow2, floor=1e-12)
    for values in (False, True):
        options = {"columns": columns, "pow2": pow2, "floor": 1e-12, "values": values}
        codes, scales, again = kernels.forward_quantized(gate, up, **options)
        same(codes, expected[0])
        same(scales, expected[1])
        assert scales.stride(0) == 1
        assert torch.equal(again, y) if values else again is None


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (9, 1100)])
@pytest.mark.parametrize("given", [0.0, 3.0, 0.01])
@pytest.mark.parametrize(("format", "record"), [(E4M3, True), (E4M3, False), (E5M2, True)], ids=str)
def test_delayed_is_forward_then_quantize(shape, given, format, record, monkeypatch):
    monkeypatch.setattr(launches, "PARTS", 2)  # fewer than there are tiles
    gate, up, _ = inputs(*shape)
    gate[-1, -1] = up[-1, -1] = 8.0  # the last tile says what the amax is
    y = kernels.forward(gate, up)
    banks = [torch.tensor([[given] * 6, [1e-3, delayed.NOTHING] * 3], device=DEVICE) for _ in range(2)]
    ours, theirs = ({"in_force": b[0, ::2], "opened": b[1, 1::2]} for b in banks)
    codes, scale, again = kernels.forward_quantized(
        gate, up, format, **ours, record=record, floor=1e-3, values=format == E5M2
    )
    expected = delayed.quantize(y, format, theirs["in_force"], theirs["opened"], record, False, 1e-3)
    same(codes, expected[0])
    same(scale, expected[1])
    same(*banks)
    assert torch.equal(again, y) if format == E5M2 else again is None


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (37, 300), (200, 140)])
@pytest.mark.parametrize("given", [0.0, 3.0])
@pytest.mark.parametrize(("format", "record"), [(E4M3, True), (E4M3, False), (E5M2, True)], ids=str)
def test_codes_of_the_transpose_are_the_codes_turned(shape, given, format, record):
    gate, up, _ = inputs(*shape)
    banks = [torch.tensor([[given] * 3, [delayed.NOTHING] * 3], device=DEVICE) for _ in range(2)]
    with poisoned():
        *parts, again = kernels.forward_quantized(
            gate, up, format, both=True, values=record, in_force=banks[0][0], opened=banks[0][1], record=record
        )
    y = kernels.forward(gate, up)
    for ours, theirs in zip(parts, delayed.quantize_both(y, format, banks[1][0], banks[1][1], record), strict=True):
        same(ours, theirs)
    same(*banks)
    assert torch.equal(again, y) if record else again is None


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (37, 300), (200, 140)])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("columns", "pow2"), [(16, True), (64, False), (128, True), (128, False)])
def test_blocks_of_both_orientations_have_scales_of_their_own(shape, format, columns, pow2):
    gate, up, _ = inputs(*shape)
    up[:, : shape[1] // 3] = 0  # columns of zeros
    up[-1] *= 1e-20 if shape[0] > 1 else 1
    up[shape[0] // 2, -1] = INF
    options = {"columns": columns, "pow2": pow2, "floor": 1e-12}
    with poisoned():
        *parts, again = kernels.forward_quantized(gate, up, format, both=True, **options)
    expected = quantize.quantize_both(kernels.forward(gate, up), format, 1, **options)
    for ours, theirs in zip(parts, expected, strict=True):
        same(ours, theirs)
    assert again is None
    assert parts[1].stride(0) == parts[3].stride(0) == 1  # as tensor cores read them


@pytest.mark.parametrize("value", [0.0, INF, NAN])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", ["row", "blocks", "known", "first", "known, both", "first, both"])
def test_values_that_are_no_good_stay_visible(value, format, scaling):
    scaling, both = scaling.partition(", ")[::2]
    gate, up, _ = inputs(5, 300)
    gate[2], up[2] = 1.0, 0.0
    up[2, 7] = value
    y = kernels.forward(gate, up)
    if scaling in ("row", "blocks"):
        options = BLOCKS if scaling == "blocks" else {"columns": 0, "pow2": False}
        codes, scales, _ = kernels.forward_quantized(gate, up, format, **options)
        expected = quantize.quantize(y, format, 1, options["columns"], options["pow2"])
        same(codes, expected[0])
    else:
        banks = [torch.tensor([3.0 if scaling == "known" else 0.0, -1.0], device=DEVICE).split(1) for _ in range(2)]
        _, scales, *_ = kernels.forward_quantized(
            gate, up, format, in_force=banks[0][0], opened=banks[0][1], record=True, both=bool(both)
        )
        expected = delayed.quantize(y, format, *banks[1], True)
        for a, b in zip(*banks):
            same(a, b)
    same(scales, expected[1])
    assert scales.isnan().any() == (value != 0)


def test_the_definition_is_the_two_steps():
    gate, up, _ = inputs(6, 300)
    y = reference.forward(gate, up)
    codes, scales, again = reference.forward_quantized(gate, up, floor=1e-12, values=True, **BLOCKS)
    expected = quantize.quantize(y, E4M3, 1, 128, True, floor=1e-12)
    for ours, theirs in zip((codes, scales, again), (*expected, y)):
        same(ours, theirs)
    slots = torch.tensor([[0.0], [-1.0]], device=DEVICE).unbind()
    codes, _, again = reference.forward_quantized(gate, up, in_force=slots[0], opened=slots[1], record=True)
    same(codes, quantize.quantize(y, E4M3)[0])
    assert again is None
    for slot in slots:
        same(slot, quantize.amax(y).view(1))


def test_strides_and_empty_tensors():
    gate, up, dy = inputs(9, 48)
    y, gradients = kernels.forward(gate, up), kernels.backward(dy, gate, up)
    both = torch.cat((gate, up), 1)
    for a, b in (both.chunk(2, 1), (gate.t().contiguous().t(), up), (gate, both[:, 48:])):
        assert torch.equal(kernels.forward(a, b), y)
        for ours, theirs in zip(kernels.backward(dy, a, b), gradients):
            assert torch.equal(ours, theirs)
        for options in ({}, {"columns": 16}):
            ours, theirs = (kernels.forward_quantized(*pair, **options)[:2] for pair in ((a, b), (gate, up)))
            for x, z in zip(ours, theirs):
                same(x, z)
    one = dy[:1, :1].expand(9, 48)  # a gradient as sum() gives it
    assert torch.equal(kernels.backward(one, gate, up)[1], kernels.backward(one.contiguous(), gate, up)[1])
    for module in (kernels, reference):
        for none in (gate[:0], gate[:, :0]):
            assert module.forward(none, none).shape == none.shape
            assert [t.shape for t in module.backward(none, none, none, values=True)] == [none.shape] * 3
            assert module.backward(none, none, none, joint=True)[0].shape == (none.shape[0], 2 * none.shape[1])
    found = kernels.forward_quantized(gate[:0], up[:0], columns=16, values=True)
    assert [tuple(t.shape) for t in found] == [(0, 48), (0, 3), (0, 48)]
    found = kernels.forward_quantized(gate[:0], up[:0], columns=16, both=True)
    assert [tuple(t.shape) for t in found[:4]] == [(0, 48), (0, 3), (48, 0), (48, 0)]


def test_errors():
    gate, up, dy = inputs(4, 8)
    for function in (kernels.forward, kernels.forward_quantized, partial(kernels.backward, dy)):
        with refused(ValueError):
            function(gate, up[:3])
        with refused(TypeError):
            function(gate.double(), up.double())
    with refused(ValueError):
        kernels.forward_quantized(gate, up, columns=24)
    for columns in (0, 256):
        with refused(ValueError):
            kernels.forward_quantized(gate, up, columns=columns, both=True)


def test_everything_moves_in_16_bytes_and_codes_in_8():
    for launch, kernel, loads, stores in (
        ("forward, halves", "forward_blocks", 2, {"v4.b32"}),
        ("backward, joint", "backward_blocks", 3, {"v4.b32"}),
        ("quantized per row, 12288", "forward_tiles_quantized", 8, {"v4.b32", "v2.b32", "b32"}),
        ("quantized, blocks", "forward_tiles_quantized", 4, {"v2.b32", "b32"}),
        ("quantized, delayed", "forward_tiles_quantized", 4, {"v2.b32", "b32"}),
        ("quantized, delayed", "amax_tiles", 4, {"b32"}),
        ("both, delayed", "forward_tiles_quantized", 4, {"v4.b32", "v2.b32", "b32"}),  # 16 transposed codes
        ("both, blocks", "forward_tiles_quantized", 8, {"v4.b32", "v2.b32", "b32"}),
    ):
        ptx = compiled()["swiglu", launch, 90][kernel]
        assert ptx.count("ld.global.v4.b32") == loads, (launch, kernel)
        found = {line.split("st.global.")[1].split()[0] for line in ptx.splitlines() if "st.global." in line}
        assert found == stores, (launch, kernel)
