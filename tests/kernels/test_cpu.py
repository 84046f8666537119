"""The C++ for a CPU gives the definitions' codes and scales bit for bit, and where it cannot be built they serve."""

import os
import shutil
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from surokit import kernels
from surokit.formats import FORMATS
from surokit.kernels import ops
from surokit.kernels.cpu import adamw, build, library, mx, nvfp4, quantize
from surokit.kernels.reference import adamw as adamw_reference
from surokit.kernels.reference import mx as mx_reference
from surokit.kernels.reference import nvfp4 as nvfp4_reference
from surokit.kernels.reference import quantize as reference

KEY = torch.tensor([12345, -678], dtype=torch.int32)
SIGNS = torch.tensor([-9, 4321], dtype=torch.int32)
NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1), (16, 16), (33, 50), (100, 352), (37, 31)]
SIZES = [1.0, 1e-30, 1e30, 1e-38, 1e-44]  # the last two in float32's subnormals
CASES = list(product(SHAPES, SIZES, (torch.bfloat16, torch.float32)))
FOUR_OVER_SIX = (None, "mse", "mae")
TILES = [(0, 0), (1, 0), (1, 128), (128, 128), (0, 1), (7, 9)]
ODD = [NAN, INF, -INF, 3.4e38]  # bfloat16 has no room for the last

#: Without one, the definitions serve, and are tested elsewhere. Where there is one, all of this has to hold.
pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="there is no C++ compiler")


def matrix(M: int, K: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal rows and, among them, zeros of both signs, outliers, powers of two, ties between codes, wide rows."""
    torch.manual_seed(1000 * M + K)
    x = torch.randn(M, K)
    x[1::7] = 0.0
    x[2::7] = x[2::7].sign() * 0.0
    x[3::7] *= 50
    x[4::7] = torch.exp2(torch.arange(K) % 7 - 3.0)
    x[5::7] = (x[5::7] * 4).round() / 4
    x[6::7] *= torch.exp2(torch.arange(K) % 28 - 20)
    return (x * size).to(dtype)


def same(ours, theirs):
    """Equal bits, shapes and dtypes, scales lying in memory alike; tensors or tuples of them."""
    if isinstance(ours, torch.Tensor):
        ours, theirs = (ours,), (theirs,)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert 1 in a.shape or a.stride() == b.stride()
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "size", "dtype"), CASES, ids=str)
def test_nvfp4(shape, size, dtype):
    M, K = shape
    x = matrix(M, K, size, dtype)
    below = x.abs().amax() * 0.7
    for rows, error, key in product((1, 16), FOUR_OVER_SIX, (None, KEY)):
        for amax in (None, below):
            same(nvfp4.quantize(x, rows, error, amax, key), nvfp4_reference.quantize(x, rows, error, amax, key))
    same(nvfp4.quantize_rotated(x.t(), 16, KEY), nvfp4_reference.quantize_rotated(x.t(), 16, KEY))
    same(nvfp4.quantize_eden(x, 32, SIGNS, KEY), nvfp4_reference.quantize_eden(x, 32, SIGNS, KEY))
    for rows in (1, 16):
        packed, scales, scale = nvfp4_reference.quantize(x, rows)
        given = packed, scales, rows, K
        same(nvfp4.factors(*given), nvfp4_reference.factors(*given))
        same(
            nvfp4.dequantize(packed, scales, scale, rows, K),
            nvfp4_reference.dequantize(packed, scales, scale, rows, K),
        )


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "size", "dtype"), CASES, ids=str)
def test_mx(shape, size, dtype):
    M, K = shape
    x = matrix(M, K, size, dtype)
    for name, rule in product(("e2m1", "e4m3", "e5m2"), ("rceil", "floor", "even")):
        format = FORMATS[name]
        for key in (None, KEY):
            same(mx.quantize(x, format, rule, key), mx_reference.quantize(x, format, rule, key))
        same(mx.quantize_both(x, format, rule), mx_reference.quantize_both(x, format, rule))
        codes, scales = mx_reference.quantize(x, format, rule)
        for back in (torch.float32, torch.bfloat16, torch.float16):
            given = codes, scales, K, format, back
            same(mx.dequantize(*given), mx_reference.dequantize(*given))


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "size", "dtype"), CASES, ids=str)
def test_tiles(shape, size, dtype):
    M, K = shape
    x = matrix(M, K, size, dtype)
    for rows, columns in TILES:
        same(quantize.amax(x, rows, columns), reference.amax(x, rows, columns))
    for name, tile, pow2 in product(("e4m3", "e5m2"), TILES, (False, True)):
        given = FORMATS[name], *tile, pow2
        same(quantize.quantize_both(x, *given), reference.quantize_both(x, *given))
        for amax in (None, reference.amax(x, *tile) * 0.7):
            same(quantize.quantize(x, *given, amax, 1e-12, KEY), reference.quantize(x, *given, amax, 1e-12, KEY))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_values_of_every_code_in_every_layout(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every[every.float().isfinite()]
    for codes in (every, finite, finite[3:], finite.expand(40, len(finite)).contiguous(), every.view(2, 8, 16)):
        same(quantize.values(codes), reference.values(codes))
    wide = finite.repeat(50)[: 90 * 130].view(90, 130)
    for codes in (wide, wide.t(), wide[:, 1:], wide[::2], wide[:0], wide.expand(2, 90, 130)):
        same(quantize.values(codes), reference.values(codes))


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (31, 33), (32, 64), (100, 32), (65, 130), (600, 512)], ids=str)
def test_a_matrix_that_lies_column_by_column_is_turned(shape):
    words = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(0))
    x = words.to(torch.int16).view(torch.bfloat16).t()
    for given in (x, x[:, ::2], x.t(), x.float()):
        turned = library.row_by_row(given)
        assert turned.is_contiguous()
        bits = torch.int32 if given.dtype == torch.float32 else torch.int16
        assert torch.equal(turned.view(bits), given.view(bits))


@pytest.mark.parametrize("shape", [(3000, 16), (601, 48), (1, 20_000), (3, 8191), (2000, 7)], ids=str)
def test_short_rows_go_together_and_long_ones_are_cut(shape):
    x = matrix(*shape)
    for key in (None, KEY):
        for rows in (1, 16):
            same(nvfp4.quantize(x, rows, None, None, key), nvfp4_reference.quantize(x, rows, None, None, key))
        for format in (FORMATS["e2m1"], FORMATS["e4m3"]):
            same(mx.quantize(x, format, "even", key), mx_reference.quantize(x, format, "even", key))
        for tile in ((0, 0), (1, 0), (1, 128), (64, 100)):
            given = FORMATS["e5m2"], *tile, False, None, 0.0, key
            same(quantize.quantize(x, *given), reference.quantize(x, *given))
    for rows in (1, 16):
        packed, scales, _ = nvfp4.quantize(x, rows)
        same(nvfp4.factors(packed, scales, rows, shape[1]), nvfp4_reference.factors(packed, scales, rows, shape[1]))
    for format in (FORMATS["e2m1"], FORMATS["e4m3"]):
        codes, scales = mx.quantize(x, format, "even")
        same(mx.dequantize(codes, scales, shape[1], format), mx_reference.dequantize(codes, scales, shape[1], format))
    codes, scales = quantize.quantize(x, FORMATS["e4m3"], 1, 128)
    same(quantize.decode(codes, scales, 1, 128, x.dtype), reference.decode(codes, scales, 1, 128, x.dtype))


@pytest.mark.parametrize("floor", [0.0, 1e-12, 3e38, INF, 1e39, NAN, -1.0])
def test_floors_of_every_kind(floor):
    x = matrix(20, 40)
    given = FORMATS["e4m3"], 1, 0, False, None, floor
    alike(outcome(quantize.quantize, x, *given), outcome(reference.quantize, x, *given))


@pytest.mark.parametrize("start", [0, 1 << 17, -(1 << 31)])
@pytest.mark.parametrize("shape", [(1,), (5, 7), (300, 333)], ids=str)
@pytest.mark.parametrize("odd", [None, *ODD])
def test_stochastic_rounding(shape, start, odd):
    """Of all bit patterns that are numbers, and with something that is none among them."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    x = torch.where(x.isfinite(), x, 3.4e38 * x.sign().nan_to_num())
    if odd is not None:
        x.view(-1)[-1] = odd
    for given in (x, x.t().contiguous().t() if x.ndim == 2 else x, x.bfloat16().float()):
        same(adamw.stochastic_bf16(given, KEY, start), adamw_reference.stochastic_bf16(given, KEY, start))


@pytest.mark.parametrize("codes", ["e2m1", "e4m3", "e5m2"])
def test_every_code_and_scale_is_decoded(codes):
    """All bytes under all scales of MX, and of NVFP4; NaN and infinity are the definition's."""
    every = torch.arange(256, dtype=torch.uint8)
    dtype = torch.uint8 if codes == "e2m1" else {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[codes]
    K = 512 if codes == "e2m1" else 256
    matrix_of = every.view(dtype).expand(256, 256).contiguous()
    scales = every.view(torch.float8_e8m0fnu)[:, None].expand(256, K // 32).contiguous()
    for rows in (slice(0, 255), slice(0, 256)):
        for back in (torch.float32, torch.bfloat16):
            given = matrix_of[rows], scales[rows], K, FORMATS[codes], back
            same(mx.dequantize(*given), mx_reference.dequantize(*given))
    if codes == "e2m1":
        scales = every.view(torch.float8_e4m3fn)[:, None].expand(256, K // 16).contiguous()
        for rows in (slice(0, 127), slice(0, 256)):
            same(
                nvfp4.factors(matrix_of[rows], scales[rows], 1, K),
                nvfp4_reference.factors(matrix_of[rows], scales[rows], 1, K),
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("odd", ODD)
def test_what_is_not_finite_becomes_what_the_definition_says(odd, dtype):
    x = matrix(40, 70, dtype=dtype)
    x[3, 7] = odd
    for rows, amax in product((1, 16), (None, torch.tensor(3.0), torch.tensor(odd))):
        same(nvfp4.quantize(x, rows, amax=amax), nvfp4_reference.quantize(x, rows, amax=amax))
    same(nvfp4.quantize_eden(x, 32, SIGNS, KEY), nvfp4_reference.quantize_eden(x, 32, SIGNS, KEY))
    for name, rule in product(("e2m1", "e4m3", "e5m2"), ("rceil", "floor", "even")):
        same(mx.quantize(x, FORMATS[name], rule), mx_reference.quantize(x, FORMATS[name], rule))
    for tile in TILES:
        same(quantize.amax(x, *tile), reference.amax(x, *tile))
        for amax in (None, torch.full(reference.grid_of_tiles(x, *tile), 2.0)):
            given = FORMATS["e4m3"], *tile, False, amax
            same(quantize.quantize(x, *given), reference.quantize(x, *given))


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)], ids=str)
def test_what_holds_nothing_and_other_dtypes_are_left_to_the_definition(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    same(nvfp4.quantize(x, 1), nvfp4_reference.quantize(x, 1))
    same(mx.quantize(x, FORMATS["e4m3"], "floor"), mx_reference.quantize(x, FORMATS["e4m3"], "floor"))
    same(quantize.quantize(x, FORMATS["e4m3"], 1, 0), reference.quantize(x, FORMATS["e4m3"], 1, 0))
    assert nvfp4.dequantize(*nvfp4_reference.quantize(x, 1), 1, shape[1]).shape == shape
    for name in ("e2m1", "e4m3"):
        coded = mx_reference.quantize(x, FORMATS[name], "floor")
        assert mx.dequantize(*coded, shape[1], FORMATS[name]).shape == shape
    for dtype in (torch.float16, torch.float64):
        x = matrix(20, 40, dtype=dtype)
        assert not library.takes(x)
        same(quantize.quantize(x, FORMATS["e4m3"]), reference.quantize(x, FORMATS["e4m3"]))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(default):
    x = matrix(33, 50)
    theirs = [each() for each in made_of(x)]
    torch.set_default_dtype(default)
    try:
        for ours, expected in zip(made_of(x), theirs, strict=True):
            same(ours(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(call, *given, **named):
    """What a call gives, or the kind of error that it raises."""
    try:
        return call(*given, **named)
    except Exception as error:
        return type(error)


def alike(ours, theirs):
    """Equal results, or errors of one kind."""
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        same(ours, theirs)


@pytest.mark.parametrize(
    "key",
    [
        KEY.long(),
        KEY.short(),
        torch.stack((KEY, SIGNS), 1)[:, 0],
        KEY[:1],
        KEY[None],
        KEY.float(),
        torch.cat((KEY, KEY)),
    ],
    ids=["int64", "int16", "strided", "one", "matrix", "float32", "four"],
)
def test_keys_of_other_forms_do_what_they_do_in_the_definition(key):
    x, format = matrix(20, 40), FORMATS["e4m3"]
    alike(outcome(nvfp4.quantize, x, 1, key=key), outcome(nvfp4_reference.quantize, x, 1, key=key))
    alike(outcome(mx.quantize, x, format, "floor", key), outcome(mx_reference.quantize, x, format, "floor", key))
    alike(outcome(quantize.quantize, x, format, key=key), outcome(reference.quantize, x, format, key=key))
    alike(outcome(nvfp4.quantize_eden, x, 32, SIGNS, key), outcome(nvfp4_reference.quantize_eden, x, 32, SIGNS, key))


@pytest.mark.parametrize("amax", [[[2.0]], [[NAN]], [[INF]], [[-2.0]], [[0.0]], [[1.0, 2.0]], [], 2.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_amaxes_of_other_forms_do_what_they_do_in_the_definition(amax, dtype):
    x, amax = matrix(20, 40), torch.tensor(amax, dtype=dtype)
    alike(outcome(nvfp4.quantize, x, 1, amax=amax), outcome(nvfp4_reference.quantize, x, 1, amax=amax))
    for key in (None, KEY):
        given = FORMATS["e4m3"], 0, 0, False, amax, 0.0, key
        alike(outcome(quantize.quantize, x, *given), outcome(reference.quantize, x, *given))


def test_codes_and_scales_that_do_not_belong_together_are_no_numbers():
    """As in a damaged checkpoint: what the definition refuses is refused, and nothing outside of a tensor is read."""
    x = matrix(32, 64)
    codes, scales = mx.quantize(x, FORMATS["e4m3"], "floor")
    for wrong in (
        (codes, scales[:3], 64, FORMATS["e4m3"]),
        (codes[:, :40], scales, 64, FORMATS["e4m3"]),
        (codes, scales.view(torch.uint8), 64, FORMATS["e4m3"]),
        (codes, scales, 64, FORMATS["e2m1"]),
    ):
        alike(outcome(mx.dequantize, *wrong), outcome(mx_reference.dequantize, *wrong))
    packed, blocks, _ = nvfp4.quantize(x, 1)
    for other in (
        (packed, blocks[:2], 1, 64),
        (packed, blocks, 16, 64),
        (packed[:, :9], blocks, 1, 64),
        (packed, blocks, 1, 32),
    ):
        alike(outcome(nvfp4.factors, *other), outcome(nvfp4_reference.factors, *other))


@pytest.mark.parametrize("rows", [3, 32, 64])
def test_blocks_of_other_heights_are_left_to_the_definition(rows):
    x = matrix(64, 64)
    for error in FOUR_OVER_SIX:
        alike(outcome(nvfp4.quantize, x, rows, error), outcome(nvfp4_reference.quantize, x, rows, error))


def test_where_there_is_no_memory_it_is_not_done():
    x, bytes_of, scale = matrix(1, 16), torch.empty(8, dtype=torch.uint8), torch.empty(1)
    huge = 2**56  # rows, for whose scales memory is asked before any is read
    given = huge, 16, 1, 2688.0, 1 / 6, None, None, 0, bytes_of, bytes_of, scale
    assert not library.call("quantize_nv", x, 0, *given)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(threads):
    x = matrix(1500, 700)
    before = torch.get_num_threads()
    theirs = [each() for each in made_of(x)]
    torch.set_num_threads(threads)
    try:
        for ours, expected in zip(made_of(x), theirs, strict=True):
            same(ours(), expected)
    finally:
        torch.set_num_threads(before)


def made_of(x):
    return (
        lambda: quantize.amax(x),
        lambda: quantize.values(quantize.quantize(x.t(), FORMATS["e4m3"])[0]),
        lambda: nvfp4.quantize(x, 16, "mse", None, KEY),
        lambda: nvfp4.quantize_eden(x, 32, SIGNS, KEY),
        lambda: mx.quantize(x, FORMATS["e2m1"], "even", KEY),
        lambda: quantize.quantize(x, FORMATS["e5m2"], 1, 128, False, None, 0.0, KEY),
        lambda: nvfp4.factors(*nvfp4.quantize(x, 1)[:2], 1, 700),
        lambda: mx.dequantize(*mx.quantize(x, FORMATS["e4m3"], "floor"), 700, FORMATS["e4m3"]),
        lambda: adamw.stochastic_bf16(x.float(), KEY, 1 << 21),
    )


def test_nothing_is_written_outside_of_the_results():
    """The results of odd shapes, among bytes of another value."""
    for M, K in [(1, 1), (3, 17), (33, 50)]:
        x, bytes_of = matrix(M, K), -(-K // 2)
        room = torch.full((M * bytes_of + 64,), 0xA5, dtype=torch.uint8)
        packed, scales, scale = (
            room[32 : 32 + M * bytes_of],
            torch.empty(M * -(-K // 16) + 64, dtype=torch.uint8),
            torch.ones(1),
        )
        scales.fill_(0xA5)
        inner = scales[32 : 32 + M * -(-K // 16)]
        assert library.call_with(x, "quantize_nv", 1, 2688.0, 1 / 6, None, None, 0, packed, inner, scale)
        assert (room[:32] == 0xA5).all()
        assert (room[-32:] == 0xA5).all()
        assert (scales[:32] == 0xA5).all()
        assert (scales[-32:] == 0xA5).all()
        codes = torch.full((M * K + 64,), 0xA5, dtype=torch.uint8)
        made = 1, 16, 0, 0.0, None, 4, None, codes[32 : 32 + M * K], torch.empty(M, -(-K // 16)), -(-K // 16), 1
        assert library.call_with(x, "quantize", *made)
        assert (codes[:32] == 0xA5).all()
        assert (codes[-32:] == 0xA5).all()
        turned = torch.full((M * K + 64,), 5.5, dtype=torch.bfloat16)
        assert library.call("transpose", x, M, K, turned[32 : 32 + M * K])
        assert library.call("values", codes[32 : 32 + M * K], M * K, 4, turned[32 : 32 + M * K])
        assert (turned[:32] == 5.5).all()
        assert (turned[-32:] == 5.5).all()
        weights = torch.full((M * K + 64,), 5.5, dtype=torch.bfloat16)
        assert library.call("round_bf16", x.float(), x.numel(), KEY, 0, weights[32 : 32 + M * K])
        assert (weights[:32] == 5.5).all()
        assert (weights[-32:] == 5.5).all()


# -- the door


def test_operations_on_a_cpu_take_it():
    served = ops.serving(nvfp4_reference.quantize, torch.device("cpu"))
    assert (served.folder, served.function, served.missed) == ("cpu", nvfp4.quantize, "")
    for function in kernels.FUSED.values():  # which are taken without asking
        assert ops.serving(function, torch.device("cpu")).folder == "reference"
    with kernels.only_reference():
        assert ops.serving(nvfp4_reference.quantize, torch.device("cpu")).folder == "reference"
    assert ops.serving(adamw_reference.stochastic_bf16, torch.device("cpu")).function is adamw.stochastic_bf16
    backends = {choice.op: choice.backend for choice in kernels.choices("cpu")}
    assert {backends[op] for op in ("quantize", "values", "quantize_mx_both", "quantize_nv_eden", "factors_nv")} == {
        "cpu"
    }
    assert backends["quantize_nf4"] == "reference"


# -- building


QUICK = ("-std=c++17", "-O0", "-shared", "-fPIC", "-pthread")  # what is built is only loaded


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing was built yet, and what is goes into a folder of the test, quickly."""
    monkeypatch.setattr(build, "FLAGS", QUICK)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    caches = (build.built, ops.first_serving)
    for cache in caches:
        cache.cache_clear()
    yield SimpleNamespace(folder=tmp_path / "surokit_cpu")
    for cache in caches:
        cache.cache_clear()


BUILD = f"""
import surokit.kernels
from surokit.kernels.cpu import build
build.FLAGS = {QUICK}
assert build.built("quantize").library is not None
"""


def test_it_is_built_once_for_a_text_and_a_processor(fresh, monkeypatch):
    calls = []
    run = subprocess.run

    def counted(*args, **named):
        calls.append(args)
        return run(*args, **named)

    monkeypatch.setattr(subprocess, "run", counted)
    assert build.built("quantize").why == "kernels/cpu/quantize.cpp, built for this CPU"
    (path,) = fresh.folder.iterdir()
    build.built.cache_clear()
    assert build.built("quantize").library is not None
    assert len(calls) == 1
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    build.built.cache_clear()
    assert build.built("quantize").library is not None
    assert len(calls) == 2
    assert len([each for each in fresh.folder.iterdir() if each != path]) == 1


def test_a_library_that_cannot_be_loaded_is_built_again(fresh):
    subprocess.run([sys.executable, "-c", BUILD], check=True, timeout=120)
    (path,) = fresh.folder.iterdir()
    path.write_bytes(b"")
    assert build.built("quantize").library is not None
    assert path.stat().st_size > 0


def test_a_compiler_may_have_arguments_and_know_less(fresh, monkeypatch, tmp_path):
    compiler = next(filter(shutil.which, build.COMPILERS))
    script = tmp_path / "cxx"
    script.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "assert sys.argv[1] == '-O1'\n"
        "if '-march=native' in sys.argv: sys.exit('error: unknown option -march=native')\n"
        f"sys.exit(subprocess.call([{compiler!r}, *sys.argv[1:]]))\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -O1")
    assert build.built("quantize").library is not None
    assert len(list(fresh.folder.iterdir())) == 1


BROKEN = "import sys; print('one.cpp:3: error: no such thing', file=sys.stderr); sys.exit(1)"


@pytest.mark.parametrize("why", ["no compiler", "fails", "no room"])
def test_where_it_cannot_be_built_the_definitions_serve_and_say_why(fresh, monkeypatch, tmp_path, why):
    words = {
        "no compiler": "there is no C++ compiler for kernels/cpu/quantize.cpp: install g++ or clang++, and start again",
        "fails": "kernels/cpu/quantize.cpp could not be built (one.cpp:3: error: no such thing)",
        "no room": "kernels/cpu/quantize.cpp could not be built ([Errno ",
    }[why]
    if why == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    elif why == "fails":
        script = tmp_path / "cxx"
        script.write_text(f"#!{sys.executable}\n{BROKEN}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    served = ops.serving(nvfp4_reference.quantize, torch.device("cpu"))
    assert (served.folder, served.function) == ("reference", nvfp4_reference.quantize)
    assert served.missed.startswith(words)
    x = matrix(20, 40)
    same(nvfp4.quantize(x, 1), nvfp4_reference.quantize(x, 1))
    same(mx.dequantize(*mx.quantize(x, FORMATS["e4m3"], "floor"), 40, FORMATS["e4m3"]), mx_of(x))


def mx_of(x):
    return mx_reference.dequantize(*mx_reference.quantize(x, FORMATS["e4m3"], "floor"), 40, FORMATS["e4m3"])


def test_processes_that_build_together_each_find_a_whole_library(tmp_path):
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", BUILD], env=environment) for _ in range(2)]
    assert [each.wait(timeout=120) for each in running] == [0, 0]
    assert [path.suffix for path in (tmp_path / "surokit_cpu").iterdir()] == [".so"]


def test_it_serves_no_other_device():
    assert nvfp4.why(torch.device("meta")) == (False, "meta runs no C++ for a CPU")
