"""Operations, products, layers and training on a real device, against the CPU's reference.

The kernels' own tests are tests/kernels/test_triton_*.py: `make test-gpu` runs them on the device too, where they are compiled
and not interpreted. Here is what lies above them. Draws of stochastic rounding come from a fixed key, so that both devices
make the same ones and every code can be compared.

Needs torch, triton, numpy, safetensors and pytest.
"""

import math
import time
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit import kernels
from surokit import product as products
from surokit.kernels import native
from surokit.kernels.ops import OPERATIONS
from surokit.kernels.reference import hadamard
from surokit.kernels.reference import random as draws
from surokit.nn.linear import Linear
from surokit.quantized import quantize, sqnr_db
from surokit.quantizer import kind_of

pytestmark = pytest.mark.gpu

KEY = torch.tensor([12345, -678], dtype=torch.int32)
NAN, INF = float("nan"), float("inf")


# -- operations: the same bits on both devices

# every operation that takes a matrix of numbers, with its arguments
QUANTIZERS: dict[str, list[tuple[Any, ...]]] = {
    "amax": [(0, 0), (1, 0), (0, 1), (128, 128)],
    "quantize": [
        *(
            ("e4m3", *tile, True)
            for tile in ((0, 0), (1, 0), (0, 1), (1, 128), (128, 128), (1, 32), (16, 16), (25, 17))
        ),
        *(("e5m2", *tile, False) for tile in ((0, 0), (1, 0), (1, 128), (128, 128))),
    ],
    "quantize_both": [("e4m3", *tile, True) for tile in ((0, 0), (1, 0), (1, 128), (128, 128))],
    "quantize_mx": [(format, rule) for format in ("e4m3", "e5m2", "e2m1") for rule in ("floor", "rceil", "even")],
    "quantize_mx_both": [("e4m3", "rceil"), ("e2m1", "even")],
    "quantize_nv": [(rows, error) for rows in (1, 16) for error in (None, "mse", "mae")],
    "quantize_nv_rotated": [(16,), (32,)],
    "quantize_nf4": [(0,), (256,)],
}
DRAWN = [
    ("quantize", ("e4m3", 0, 0, False)),
    ("quantize", ("e5m2", 1, 0, True)),
    ("quantize", ("e4m3", 1, 128, True)),
    ("quantize_mx", ("e4m3", "rceil")),
    ("quantize_mx", ("e2m1", "even")),
    ("quantize_nv", (1,)),
    ("quantize_nv", (16,)),
    ("quantize_nv_rotated", (16,)),
    ("quantize_nv_rotated", (32,)),
]

ROTATED = ("quantize_nv_rotated", "quantize_nv_eden")

SHAPES = [(0, 40), (1, 1), (1, 17), (33, 70), (128, 128), (257, 300), (40, 8200), (3000, 33)]


def numbers(M, K, dtype=torch.bfloat16):
    """Rows of every kind: normal, zeros of both signs, huge, tiny, ties, a wide range, one large number."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M * 1000 + K), dtype=torch.float64)
    for row in range(min(M, 200)):
        match row % 8:
            case 1:
                x[row] = x[row].sign() * 0.0
            case 2:
                x[row] *= 1e30
            case 3:
                x[row] *= 1e-30
            case 4:
                x[row] = (x[row] * 8).round() / 8 * 28
            case 5:
                x[row] *= torch.exp2(torch.arange(K) % 28 - 14)
            case 6:
                x[row, K // 2] = 1e4
    return (x.clamp(-6e4, 6e4) if dtype == torch.float16 else x).to(dtype)


VIEWS = {
    "transposed": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "every third row": lambda x: x[::3],
    "from the second element": lambda x: x.flatten()[1 : 1 + 32 * 40].view(32, 40),
}


def parts(out):
    return list(out) if isinstance(out, tuple | list) else [out]


def same(theirs, ours):
    """The same shapes, dtypes and bits; any NaN is as good as another."""
    for a, b in zip(parts(theirs), parts(ours), strict=True):
        b = b.cpu()
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        numeric = a.dtype.is_floating_point
        nan = a.float().isnan() if numeric else torch.zeros_like(a, dtype=torch.bool)
        if numeric:
            assert torch.equal(b.float().isnan(), nan)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        bits = [t.contiguous().view(integers).masked_fill(nan, 0) for t in (a, b)]
        assert torch.equal(*bits), f"{(bits[0] != bits[1]).sum()} of {nan.numel()} differ"


def positions(packed):
    """Where packed E2M1 codes stand among the fifteen numbers in order, -7 to 7."""
    codes = torch.stack((packed & 15, packed >> 4)).int()
    return torch.where(codes & 8 != 0, -(codes & 7), codes & 7)


def near(theirs, ours, dtype):
    """Codes and scales of rotated numbers: no further than the next ones, and that once in a thousand.

    The sums of a rotation are in another order in a BLAS and in tensor cores, so that their last bits differ.
    """
    (codes, scales, scale), (our_codes, our_scales, our_scale) = theirs, (t.cpu() for t in ours)
    rtol = max(torch.finfo(dtype).eps, 2**-20)
    torch.testing.assert_close(our_scale, scale, rtol=rtol, atol=0)
    ordered = [t.view(torch.uint8).int() for t in (our_scales, scales)]  # no scale is negative
    for found, expected in (ordered, (positions(our_codes), positions(codes))):
        assert found.shape == expected.shape
        steps = (found - expected).abs()
        assert not steps.numel() or steps.max() <= 1, f"{steps.max()} steps apart"
        assert (steps > 0).sum() <= 1 + steps.numel() // 1000, f"{(steps > 0).sum()} of {steps.numel()} differ"


def dirty(device):
    """Leave ones in the memory that the next results get: an element that a kernel leaves out is not zero by chance."""
    if device.type == "cuda":
        blocks = [torch.full((2**k,), 255, dtype=torch.uint8, device=device) for k in range(9, 26) for _ in range(4)]
        del blocks


def check(device, op, x, *arguments, on_device=None, meaning=False, **options):
    """One operation on the CPU and on the device, of equal inputs.

    Codes under a scale that is NaN mean nothing (the sign of a NaN is the device's own affair): with `meaning`, 4-bit codes are
    compared by what they decode to.
    """
    operation = getattr(torch.ops.surokit, op)
    there = {name: t.to(device) for name, t in options.items()}
    dirty(device)
    theirs = operation(x, *arguments, **options)
    ours = operation(on_device if on_device is not None else x.to(device), *arguments, **there)
    if meaning:
        theirs, ours = (decoded(op, x.shape, arguments, [t.cpu() for t in parts(out)]) for out in (theirs, ours))
    if op in ROTATED and device.type == "cuda" and not meaning:
        near(theirs, ours, x.dtype)
    else:
        same(theirs, ours)


def decoded(op, shape, arguments, out):
    """Scales, and what packed codes stand for in their place."""
    (M, K), ops, f32 = shape, torch.ops.surokit, torch.float32
    match op, arguments, out:
        case "quantize_mx", ("e2m1", _), (codes, scales):
            return scales, ops.dequantize_mx(codes, scales, K, "e2m1", f32)
        case "quantize_mx_both", ("e2m1", _), (codes, scales, *transposed):
            one_way = "quantize_mx"
            return *decoded(one_way, (M, K), arguments, [codes, scales]), *decoded(
                one_way, (K, M), arguments, transposed
            )
        case "quantize_nv", (rows, *_), (codes, scales, scale):
            return scales, scale, ops.dequantize_nv(codes, scales, scale, rows, K, f32)
        case "quantize_nv_rotated", (block,), (codes, scales, scale):
            return scales, scale, ops.dequantize_nv(codes, scales, scale, 1, K + -K % block, f32)
        case "quantize_nf4", _, (codes, scales, *second):
            return ops.dequantize_nf4(codes, scales, second, M, K, f32)
    return out


every_quantizer = pytest.mark.parametrize(
    ("op", "arguments"), [(op, arguments) for op, each in QUANTIZERS.items() for arguments in each], ids=str
)


@every_quantizer
def test_quantizers_at_every_shape(op, arguments, device):
    for shape in SHAPES:
        check(device, op, numbers(*shape), *arguments)


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantizers_of_other_dtypes(op, arguments, dtype, device):
    x = numbers(70, 129, dtype)
    # a rotation adds sixteen numbers or more, which float16 has to hold
    check(device, op, x / 64 if op == "quantize_nv_rotated" else x, *arguments)


@every_quantizer
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_quantizers_see_what_is_not_finite(op, arguments, bad, device):
    x = numbers(40, 150)
    x[0, 5] = x[20, 149] = x[21, 0] = bad
    check(device, op, x, *arguments, meaning=True)


@every_quantizer
@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_quantizers_of_any_strides(op, arguments, view, device):
    x = numbers(48, 80)
    check(device, op, view(x), *arguments, on_device=view(x.to(device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arguments", [("e4m3", 0, 0, False), ("e5m2", 0, 0, False)], ids=str)
def test_every_number_of_sixteen_bits_is_cast_as_on_the_cpu(arguments, dtype, device):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()].view(1, -1)
    for amax in (448.0, 1.0, 57344.0):
        check(device, "quantize", x, *arguments, amax=torch.full((1, 1), amax))


@pytest.mark.parametrize(("op", "arguments"), DRAWN, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (257, 300)], ids=str)
def test_stochastic_rounding_draws_the_same(op, arguments, shape, device):
    check(device, op, numbers(*shape), *arguments, key=KEY)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eden_rotates_and_draws_the_same(block, shape, device):
    check(device, "quantize_nv_eden", numbers(*shape), block, rotation=KEY.flip(0), key=KEY)


@pytest.mark.parametrize("n", [1, 1000, 2**20 + 3])
def test_random_bits(n, device):
    assert torch.equal(draws.bits(n, KEY), draws.bits(n, KEY.to(device)).cpu())


@pytest.mark.parametrize("op", ["quantize", "quantize_nv"])
@pytest.mark.parametrize("amax", [4.0, 0.01, 0.0, INF, NAN])
def test_an_amax_that_is_given(op, amax, device):
    arguments = ("e4m3", 0, 0, False) if op == "quantize" else (1,)
    check(device, op, numbers(33, 70), *arguments, amax=torch.full((1, 1), amax), meaning=not math.isfinite(amax))


def encodings(M, K):
    """What the quantizers make of one matrix: the operation that turns it back, codes and scales, and its arguments."""
    x = numbers(M, K)
    ops = torch.ops.surokit
    for format in ("e4m3", "e5m2"):
        yield "values", ops.quantize(x, format, 0, 0, False)[:1], ()
    for rows in (1, 16):
        yield "factors_nv", ops.quantize_nv(x, rows)[:2], (rows, K)
    for dtype in (torch.bfloat16, torch.float32):
        for tile in ((0, 0), (1, 0), (1, 128), (128, 128)):
            yield "dequantize", ops.quantize(x, "e4m3", *tile, True), (*tile, dtype)
        for format in ("e4m3", "e5m2", "e2m1"):
            yield "dequantize_mx", ops.quantize_mx(x, format, "rceil"), (K, format, dtype)
        for rows in (1, 16):
            yield "dequantize_nv", ops.quantize_nv(x, rows), (rows, K, dtype)
        for double in (0, 256):
            codes, scales, *second = ops.quantize_nf4(x, double)
            yield "dequantize_nf4", (codes, scales, second), (M, K, dtype)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_decoding(shape, device):
    for op, encoded, arguments in encodings(*shape):
        there = [[t.to(device) for t in part] if isinstance(part, list) else part.to(device) for part in encoded]
        dirty(device)
        operation = getattr(torch.ops.surokit, op)
        same(operation(*encoded, *arguments), operation(*there, *arguments))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("drawn", "block"), [(False, 16), (False, 32), (True, 16), (True, 128)])
def test_rotation(drawn, block, shape, device):
    """Rounded once, after sums whose error is small beside what they add, in whichever order that is."""
    operation = torch.ops.surokit.rotate_drawn if drawn else torch.ops.surokit.rotate
    exactly = hadamard.rotate_drawn if drawn else hadamard.rotate
    key, keys_there = ((KEY,), (KEY.to(device),)) if drawn else ((), ())
    for back in (False, True):
        x = numbers(shape[0], -(-shape[1] // block) * block if back else shape[1])
        exact = exactly(x.double(), block, *key, back)
        dirty(device)
        ours = operation(x.to(device), block, *keys_there, back)
        assert (ours.dtype, ours.shape) == (x.dtype, exact.shape)
        size = exact.unflatten(1, (-1, block)).norm(dim=2, keepdim=True).expand(-1, -1, block).flatten(1)
        bound = exact.abs() * torch.finfo(x.dtype).eps / 2 + size * 2.0**-18
        assert ((ours.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposes(shape, device):
    M, K = shape
    codes = torch.randint(256, (M, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    check(device, "transpose_fp8", codes.view(torch.float8_e4m3fn))
    check(device, "transpose_fp4", codes, 2 * K)
    if K > 1:
        check(device, "transpose_fp4", codes, 2 * K - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_emulated_products(dtype, device):
    a, b = numbers(33, 70) / 1e3, numbers(65, 70)
    a, b = (torch.randn_like(t, dtype=torch.float32).bfloat16() for t in (a, b))
    a_scale, b_scale = torch.rand(33, 1) + 0.5, torch.rand(65, 1) + 0.5
    theirs = (a.double() * a_scale) @ (b.double() * b_scale).t()
    ours = torch.ops.surokit.emulated_mm(*(t.to(device) for t in (a, a_scale, b, b_scale)), dtype).cpu()
    assert ours.dtype == dtype
    assert sqnr_db(theirs, ours) > (48 if dtype == torch.bfloat16 else 100)


FROZEN = {
    "fp8_mm": lambda w: [*torch.ops.surokit.quantize(w, "e4m3", 128, 128, True), 128, 128],
    "nv_mm": lambda w: [*torch.ops.surokit.quantize_nv(w, 1), 1, w.shape[1]],
    "nf4_mm": lambda w: [*torch.ops.surokit.quantize_nf4(w), [], *w.shape],
}


@pytest.mark.parametrize("op", FROZEN)
@pytest.mark.parametrize("shape", [(1, 17, 5), (33, 70, 129), (300, 256, 512), (3, 4096, 1024)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_frozen_weights(op, shape, transposed, device):
    T, K, N = shape
    g = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=g).bfloat16()
    x = torch.randn(T, N if transposed else K, generator=g).bfloat16()
    arguments = FROZEN[op](w)
    there = [t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments]
    operation = getattr(torch.ops.surokit, op)
    dirty(device)
    theirs, ours = operation(x, *arguments, transposed), operation(x.to(device), *there, transposed)
    assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
    assert sqnr_db(theirs, ours.cpu()) > 42


def compared():
    """Names of the operations that the tests above compare."""
    others = {"quantize_nv_eden", "rotate", "rotate_drawn", "transpose_fp8", "transpose_fp4", "emulated_mm"}
    return {*QUANTIZERS, *(op for op, _, _ in encodings(4, 32)), *others, *FROZEN}


def test_kernels_serve_and_not_the_reference(cuda):
    """Were Triton not to load, every test above would compare the reference with itself."""
    backends = {choice.op: (choice.backend, choice.why) for choice in kernels.choices(cuda)}
    by_reference = {op for op in OPERATIONS if backends[op][0] == "reference"}
    assert by_reference <= {"emulated_mm", "values"}, backends  # which are a product and a cast of torch's
    assert not {op for op in kernels.FUSED if backends[op][0] == "reference"}, backends


@pytest.mark.parametrize(
    ("op", "arguments", "options"),
    [
        ("quantize", ("e4m3", 1, 0, True), {}),
        ("quantize", ("e4m3", 1, 128, True), {}),
        ("quantize", ("e4m3", 0, 0, False), {"amax": torch.full((1, 1), 5.0)}),
        ("quantize_mx", ("e4m3", "rceil"), {}),
        ("quantize_mx", ("e2m1", "even"), {}),
        ("quantize_nv", (1, None), {"amax": torch.full((1, 1), 5.0)}),
        ("quantize_nf4", (0,), {}),
    ],
    ids=str,
)
def test_positions_beyond_thirty_one_bits(op, arguments, options, cuda):
    """A matrix of more than 2^31 elements: its last rows have the codes that they have alone."""
    if torch.cuda.mem_get_info(cuda)[0] < 30 * 2**30:
        pytest.skip("this needs 30 GiB of free memory")
    M, K, last = 70_000, 32_768, 5
    x = torch.zeros(M, K, dtype=torch.bfloat16, device=cuda)
    x[-last:] = numbers(8 * last, K)[::8].to(cuda)
    options = {name: t.to(cuda) for name, t in options.items()}
    operation = getattr(torch.ops.surokit, op)
    whole = parts(operation(x, *arguments, **options))
    alone = parts(operation(x[-last:].clone(), *arguments, **options))
    for a, b in zip(whole, alone):
        same(b.cpu(), a[-last:] if len(a) == M else a)


# -- products of tensor cores

Q = sk.Quantizer
PAIRS: dict[str, Any] = {
    "tensor": (Q(sk.E4M3, sk.PerTensor()), Q(sk.E4M3, sk.PerTensor())),
    "tensor, e5m2": (Q(sk.E5M2, sk.PerTensor()), Q(sk.E4M3, sk.PerTensor())),
    "row": (Q(sk.E4M3, sk.PerRow()), Q(sk.E4M3, sk.PerRow())),
    "row and tensor": (Q(sk.E4M3, sk.PerRow()), Q(sk.E4M3, sk.PerTensor())),
    "block": (Q(sk.E4M3, sk.Block(1, 128)), Q(sk.E4M3, sk.Block(128, 128))),
    "block, rows": (Q(sk.E4M3, sk.Block(1, 128)), Q(sk.E4M3, sk.Block(1, 128))),
    "mx": (Q(sk.E4M3, sk.MX()), Q(sk.E4M3, sk.MX())),
    "nv": (Q(sk.E2M1, sk.NV()), Q(sk.E2M1, sk.NV())),
    "nv, tiles": (Q(sk.E2M1, sk.NV()), Q(sk.E2M1, sk.NV(16, 16))),
    "nv, drawn signs": (sk.QUARTET_II.grad_weight.a, sk.QUARTET_II.grad_weight.b),
}


def scattered(M, K, seed=0):
    """Rows and stretches of columns of different size, so that a scale in the wrong place shows."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp2(torch.arange(M)[:, None] % 7 - 3.0) * torch.exp2(torch.arange(K) // 16 % 5 - 2.0)).bfloat16()


def multiplied(m):
    """The numbers that a product multiplies: of a rotated matrix, the rotated ones."""
    if not m.quantizer.hadamard:
        return m.dequantize(torch.float32).double()
    values, scale = m.factors()
    return values.double() * scale


def needs_tensor_cores(pair, device):
    """Without them there would be two emulations to compare; a rehearsal does just that."""
    kind = kind_of(*pair)
    assert kind is not None
    if device.type == "cuda" and not native.available(kind, device):
        pytest.skip(native.choice(kind, device)[1])


@pytest.mark.parametrize(
    ("pair", "fast"),
    [
        # cuBLAS has fast accumulation where scales do not vary along the sum
        *(pytest.param(pair, False, id=name) for name, pair in PAIRS.items()),
        *(
            pytest.param(pair, True, id=f"{name}, fast")
            for name, pair in PAIRS.items()
            if kind_of(*pair) in ("tensor", "row")
        ),
    ],
)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 17, 5), (16, 32, 16), (33, 70, 129), (130, 300, 257), (512, 1024, 384)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_native_products(pair, shape, dtype, fast, device):
    needs_tensor_cores(pair, device)
    (M, K, N), (q_a, q_b) = shape, pair
    scale = 2.0**-3 if dtype == torch.float16 else 1.0  # a sum of a float16 result ends at 65504
    a = quantize(scattered(M, K) * scale, q_a)
    b = quantize(scattered(N, K, seed=1) * scale, q_b, rotation=a.rotation)
    exact = multiplied(a) @ multiplied(b).t()
    there = {id(t): t.to(device) for m in (a, b) for t in m.parts}  # both have one key
    a, b = (sk.Quantized.of(m.quantizer, tuple(there[id(t)] for t in m.parts), m.shape) for m in (a, b))
    y = products.product(a, b, dtype, fast)
    assert (y.shape, y.dtype) == ((M, N), dtype)
    # bfloat16's own rounding is at 50 dB; fast accumulation keeps 14 bits or so of the sum
    assert sqnr_db(exact, y.cpu()) > (35 if fast or dtype != torch.bfloat16 else 45)


@pytest.mark.parametrize("name", ["tensor", "block", "nv, tiles"])
def test_native_products_with_a_transposed_weight(name, device):
    """grad_input multiplies w', whose codes and scales are views of those of w, or turned."""
    q_dy, q_w = PAIRS[name]
    needs_tensor_cores((q_dy, q_w), device)
    dy, w = scattered(40, 150), scattered(150, 70, seed=1)
    exact = quantize(dy, q_dy).dequantize().double() @ quantize(w, q_w).dequantize().double()
    y = products.product(quantize(dy.to(device), q_dy), quantize(w.to(device), q_w).t(), torch.bfloat16)
    assert sqnr_db(exact, y.cpu()) > 45


# -- layers

RECIPES = {r.name: r.keep_last(0) for r in sk.recipes.values() if r.quantized} | {
    r.name: r for r in (sk.FP8_BLOCK.store(sk.QFP8), sk.FP4.keep_last(0).store(sk.QNF4), sk.FP8.store(sk.QFP4))
}
STOCHASTIC = {name for name, r in RECIPES.items() if any(q and q.draws for g in r.gemms for q in (g.a, g.b))}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def layer_of(recipe, device, K=192, N=256):
    """One linear layer under the recipe, with an adapter where the base is frozen; equal on every device."""
    torch.manual_seed(0)
    layer = Linear(K, N, bias=True, dtype=torch.bfloat16)
    model = nn.Sequential(layer).to(device)
    sk.apply(model, recipe.lora(rank=4, targets=("0",)) if recipe.storage else recipe)
    if layer.has_adapter:  # B is zero at first, and A would get no gradient
        with torch.no_grad():
            layer.lora_B.weight.copy_(torch.randn(N, 4, generator=torch.Generator().manual_seed(1)))
    return model


def operands(device, T=160, K=192, N=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(T, n, generator=g).bfloat16().to(device) for n in (K, N)]


def step(model, x, dy, forward=None):
    """y, dx and the gradients of one step."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = (forward or model)(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def fixed_draws(monkeypatch):
    """Stochastic rounding with one key, so that two devices draw the same."""

    def key(device, generator=None, seed=None):
        return (
            torch.arange(2, dtype=torch.int32, device=device) * 12345 + 678
        )  # made of operations, so that graphs can hold it

    monkeypatch.setattr(kernels, "new_key", key)


@each_recipe
def test_a_layer_gives_what_the_cpu_gives(recipe, device, fixed_draws):
    """Three steps, so that delayed scales meet their history. Sums are in another order, and nothing else differs."""
    here, there = layer_of(recipe, torch.device("cpu")), layer_of(recipe, device)
    for number in range(3):
        operands_here = [t * 2.0**number for t in operands("cpu", seed=number)]
        theirs, ours = step(here, *operands_here), step(there, *(t.to(device) for t in operands_here))
        assert len(theirs) == len(ours) >= 3
        for what, a, b in zip(("y", "dx", "dw"), theirs, ours):
            assert b.device.type == device.type
            # a forward with fast accumulation keeps 14 bits or so of the sum
            assert sqnr_db(a, b.cpu()) > (33 if what == "y" else 40), what


def compiled(model, device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@each_recipe
def test_a_compiled_layer_is_one_graph_with_the_same_numbers(recipe, device, fixed_draws):
    plain, twin = layer_of(recipe, device), layer_of(recipe, device)
    forward = compiled(twin, device)
    for number in range(3):
        x, dy = operands(device, seed=number)
        for a, b in zip(step(plain, x, dy), step(twin, x, dy, forward), strict=True):
            assert sqnr_db(a, b) > 40


def captured(call, device):
    """`call` as a CUDA graph: each call of the result replays it and gives copies of its results."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay():
        graph.replay()
        return [t.clone() for t in results]

    return replay


@each_recipe
def test_a_captured_step_can_be_replayed(recipe, device):
    """Forward, backward and the roll of delayed scales in one graph: it follows its input, and draws afresh."""
    model = layer_of(recipe, device)
    precision, bias = model[0].precision, model[0].bias
    scales = precision.scales if precision else None
    x, dy = operands(device)

    def whole():
        results = step(model, x, dy)
        if scales is not None:
            scales.roll()
        return results

    replay = captured(whole, device)
    replay()
    first, again = replay(), replay()
    for number, (a, b) in enumerate(zip(first, again, strict=True)):
        assert a.isfinite().all()
        if number == 0 or recipe.name not in STOCHASTIC:  # y is rounded to nearest by every recipe
            assert torch.equal(a, b)
    if recipe.name in STOCHASTIC:
        assert not torch.equal(first[1], again[1]), "the same draws twice"
        assert sqnr_db(first[1], again[1]) > 8
    closed = scales.cursor.item() if scales is not None else 0
    x *= 2
    replay()
    doubled = replay()  # a delayed scale has seen the larger x by now
    assert sqnr_db(2 * (first[0] - bias), doubled[0] - bias) > 20
    assert sqnr_db(step(model, x, dy)[0], doubled[0]) > 40  # outside the graph
    assert (scales is not None) == (recipe.name.split("+")[0] == "fp8")
    if scales is not None:
        assert scales.cursor.item() == closed + 2
        assert scales.in_force_S[precision.first_slot] == x.abs().max()


# -- training


def decoder(device):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=256, ffn=256, max_length=128)
    return sk.Decoder(config).to(torch.bfloat16).to(device)


def batches(count=4):
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(256, (2, 64), generator=g) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("recipe", [sk.BF16, *RECIPES.values()], ids=lambda r: r.name)
def test_twenty_steps_lower_the_loss(recipe, device):
    recipe = recipe.lora(rank=8) if recipe.storage else recipe
    session = sk.Session(
        decoder(device), batches(), optimizer=sk.AdamW(lr=3e-3), recipe=recipe, schedule=None, compile=False
    )
    start = time.perf_counter()
    session.run(20)
    losses = session.records.column("loss").tolist()
    print(f"{recipe.name}: {time.perf_counter() - start:.2f} s for 20 steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert all(map(math.isfinite, losses))
    assert sum(losses[-4:]) < sum(losses[:4])  # four steps see every batch once


# torch says once that the mode is a prototype
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@each_recipe
def test_a_layer_never_waits_for_the_device(recipe, cuda):
    model = layer_of(recipe, cuda)
    x, dy = operands(cuda)
    for _ in range(3):
        step(model, x, dy)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(model, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
