"""The C++ for a CPU gives the definitions' codes and scales bit for bit, and where it cannot be built they serve."""

import os
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from surokit import kernels
from surokit.formats import FORMATS
from surokit.kernels import ops
from surokit.kernels.cpu import build, library, mx, nvfp4, quantize
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

needs_a_compiler = pytest.mark.skipif(
    build.built(library.SOURCE).library is None, reason=build.built(library.SOURCE).why
)
pytestmark = needs_a_compiler


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
    for dtype in (torch.float16, torch.float64):
        x = matrix(20, 40, dtype=dtype)
        assert not library.takes(x)
        same(quantize.quantize(x, FORMATS["e4m3"]), reference.quantize(x, FORMATS["e4m3"]))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_number_of_threads_changes_nothing(threads):
    x = matrix(901, 700)
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
        lambda: nvfp4.quantize(x, 16, "mse", None, KEY),
        lambda: nvfp4.quantize_eden(x, 32, SIGNS, KEY),
        lambda: mx.quantize(x, FORMATS["e2m1"], "even", KEY),
        lambda: quantize.quantize(x, FORMATS["e5m2"], 1, 128, False, None, 0.0, KEY),
        lambda: nvfp4.factors(*nvfp4.quantize(x, 1)[:2], 1, 700),
        lambda: mx.dequantize(*mx.quantize(x, FORMATS["e4m3"], "floor"), 700, FORMATS["e4m3"]),
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


# -- the door


def test_operations_on_a_cpu_take_it():
    served = ops.serving(nvfp4_reference.quantize, torch.device("cpu"))
    assert (served.folder, served.function, served.missed) == ("cpu", nvfp4.quantize, "")
    with kernels.only_reference():
        assert ops.serving(nvfp4_reference.quantize, torch.device("cpu")).folder == "reference"
    backends = {choice.op: choice.backend for choice in kernels.choices("cpu")}
    assert {backends[op] for op in ("quantize", "quantize_mx_both", "quantize_nv_eden", "factors_nv")} == {"cpu"}
    assert backends["quantize_nf4"] == "reference"


# -- building


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing was built yet, and what is goes into a folder of the test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    caches = (build.built, ops.first_serving)
    for cache in caches:
        cache.cache_clear()
    yield SimpleNamespace(folder=tmp_path / "surokit_cpu")
    for cache in caches:
        cache.cache_clear()


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
    program = "from surokit.kernels.cpu import build; assert build.built('quantize').library is not None"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", f"import surokit.kernels; {program}"], env=environment)
        for _ in range(2)
    ]
    assert [each.wait(timeout=120) for each in running] == [0, 0]
    assert [path.suffix for path in (tmp_path / "surokit_cpu").iterdir()] == [".so"]


def test_it_serves_no_other_device():
    assert nvfp4.why(torch.device("meta")) == (False, "meta runs no C++ for a CPU")
