"""Transposes of codes: the reference against plain loops, and the CUDA C++ of kernels/cuda/transpose.cu, run on a CPU, against it.

The .cu file is compiled by a C++ compiler as it is, with tests/kernels/cuda_on_cpu in the place of CUDA's runtime: once with the
sanitizers for addresses and undefined behaviour (misaligned 16-byte accesses among it), once as the library that the wrapper loads.
"""

import ctypes
import errno
import fcntl
import re
import shutil
import struct
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from surokit import kernels
from surokit.kernels import ops
from surokit.kernels.cuda import build
from surokit.kernels.cuda import transpose as cuda
from surokit.kernels.reference import transpose as reference
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
ON_CPU = ROOT / "tests" / "kernels" / "cuda_on_cpu"
DTYPES = [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
# single elements, rows, columns; inside a tile (128 codes of 8 bits, 256 of 4), on its edge, beyond it; multiples of 16 and not
SHAPES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 3),
    (16, 16),
    (5, 32),
    (32, 5),
    (33, 70),
    (128, 128),
    (127, 129),
    (144, 272),
    (257, 48),
]
SHAPES += [(256, 256), (31, 600), (288, 320)]


def codes(M, K, seed=0, dtype=torch.uint8):
    """Every byte is possible, NaN and the negative zero among them."""
    x = torch.randint(2 if dtype == torch.bool else 256, (M, K), generator=torch.Generator().manual_seed(seed))
    return x.to(torch.uint8).view(dtype)


def nibble(packed, row, column):
    return int(packed[row, column // 2]) >> (column % 2 * 4) & 15


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# -- the definition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 9), (9, 1), (5, 7)])
def test_reference_moves_bytes(shape, dtype):
    x = codes(shape[0], shape[1], dtype=dtype)
    y = reference.transpose_fp8(x)
    assert y.dtype == dtype
    assert y.shape == shape[::-1]
    assert y.is_contiguous()
    before, after = x.view(torch.uint8).tolist(), y.view(torch.uint8).tolist()
    assert all(after[k][m] == before[m][k] for m in range(shape[0]) for k in range(shape[1]))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 8), (8, 1), (5, 7), (6, 4), (3, 6), (4, 9)])
def test_reference_moves_nibbles(shape):
    M, K = shape
    x = codes(M, (K + 1) // 2)  # the unused nibble of an odd K holds anything
    y = reference.transpose_fp4(x, K)
    assert y.dtype == torch.uint8
    assert y.shape == (K, (M + 1) // 2)
    assert all(nibble(y, k, m) == nibble(x, m, k) for m in range(M) for k in range(K))
    assert all(nibble(y, k, M) == 0 for k in range(K) if M % 2)


def test_there_and_back_is_the_identity():
    x = codes(33, 70)
    assert same(reference.transpose_fp8(reference.transpose_fp8(x)), x)
    assert same(reference.transpose_fp4(reference.transpose_fp4(x, 140), 33), x)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7, 1)])
def test_results_have_memory_of_their_own(shape):
    for x in (codes(*shape), codes(*shape).t()):
        assert reference.transpose_fp8(x).data_ptr() != x.data_ptr()
        assert reference.transpose_fp4(x, 2 * x.shape[1]).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("form", [reference, cuda], ids=["reference", "cuda"])
def test_strides_do_not_matter(form):
    wide = codes(40, 60)
    for view in (wide.t(), wide[::2], wide[:, 1::3], wide[3:, 5:]):
        assert same(form.transpose_fp8(view), form.transpose_fp8(view.contiguous()))
        assert same(
            form.transpose_fp4(view, 2 * view.shape[1]), form.transpose_fp4(view.contiguous(), 2 * view.shape[1])
        )


@pytest.mark.parametrize("form", [reference, cuda], ids=["reference", "cuda"])
def test_what_is_not_codes_is_refused(form):
    with refused(ValueError):
        form.transpose_fp8(torch.zeros(2, 2, dtype=torch.bfloat16))
    with refused(ValueError):
        form.transpose_fp8(torch.zeros(2, 2, 2, dtype=torch.uint8))
    with refused(ValueError):
        form.transpose_fp8(codes(2, 2).view(torch.float4_e2m1fn_x2))
    with refused(ValueError):
        form.transpose_fp4(codes(2, 3), 8)
    with refused(ValueError):
        form.transpose_fp4(codes(2, 3, dtype=torch.int8), 6)


# -- the CUDA C++ on a CPU


def compile_for_cpu(out, *flags):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile CUDA C++ for the CPU")
    command: list[str | Path] = [
        "g++",
        "-x",
        "c++",
        "-std=c++20",
        "-pthread",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    command += [
        "-Wno-unknown-pragmas",
        *flags,
        "-I",
        ON_CPU,
        "-I",
        ROOT / "kernels" / "cuda",
        ON_CPU / "transpose.cpp",
        "-o",
        out,
    ]
    subprocess.run(command, check=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A program that stops at the first access out of bounds or out of line."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return compile_for_cpu(tmp_path_factory.mktemp("watched") / "transpose", *flags)


@pytest.fixture
def on_cpu(library, monkeypatch):
    """kernels/cuda/transpose.py with the library built for the CPU."""
    cuda._kernel.cache_clear()
    monkeypatch.setattr(cuda, "built", lambda stem, device: build.Built(library, "compiled for the CPU"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    yield library
    cuda._kernel.cache_clear()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return ctypes.CDLL(str(compile_for_cpu(tmp_path_factory.mktemp("library") / "transpose.so", "-shared", "-fPIC")))


def test_every_byte_and_bound_of_the_cuda_kernel(watched):
    cases = [
        (bits, M, K, *offsets, codes(M, K if bits == 8 else (K + 1) // 2, seed=i))
        for bits in (8, 4)
        for i, (M, K) in enumerate(SHAPES)
        for offsets in ([(0, 0), (1, 0), (0, 5)] if (M, K) in [(16, 16), (128, 128), (33, 70)] else [(0, 0)])
    ]
    stdin = b"".join(struct.pack("5q", *case[:5]) + case[5].numpy().tobytes() for case in cases)
    done = subprocess.run([watched], input=stdin, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[:3000]
    at = 0
    for bits, M, K, offset_in, offset_out, x in cases:
        expected = reference.transpose_fp8(x) if bits == 8 else reference.transpose_fp4(x, K)
        got = torch.frombuffer(bytearray(done.stdout[at : at + expected.numel()]), dtype=torch.uint8)
        at += expected.numel()
        assert torch.equal(got.view_as(expected), expected), (bits, M, K, offset_in, offset_out)
    assert at == len(done.stdout)


def test_no_two_accesses_of_a_warp_meet_in_a_bank(watched):
    done = subprocess.run([watched, "banks"], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrapper_equals_the_reference(on_cpu, dtype):
    for shape in [(0, 5), (1, 1), (33, 70), (48, 32)]:
        x = codes(shape[0], shape[1], dtype=dtype)
        assert same(cuda.transpose_fp8(x), reference.transpose_fp8(x))
        assert same(cuda.transpose_fp8(x.t()), reference.transpose_fp8(x.t()))
    for M, K in [(0, 5), (1, 1), (33, 71), (48, 32)]:
        packed = codes(M, (K + 1) // 2)
        assert same(cuda.transpose_fp4(packed, K), reference.transpose_fp4(packed, K))


def test_wrapper_says_what_went_wrong(on_cpu, monkeypatch):
    library = SimpleNamespace(transpose=lambda *arguments: b"out of resources")
    monkeypatch.setattr(cuda, "built", lambda stem, device: build.Built(library, "fails"))
    with refused(RuntimeError):
        cuda.transpose_fp8(codes(4, 6))


# -- building


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of compute capability 9.0 with a compiler, as far as build.py can see, and an empty cache of torch's."""
    from torch.utils import cpp_extension

    build.built.cache_clear()
    build._build.cache_clear()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/somewhere")
    yield SimpleNamespace(device=torch.device("cuda", 0), cpp_extension=cpp_extension, folder=tmp_path)
    build.built.cache_clear()
    build._build.cache_clear()


def test_what_is_built_is_built_once(gpu, library, monkeypatch):
    calls = []

    def load(**named):
        calls.append(named)
        return library._name

    monkeypatch.setattr(gpu.cpp_extension, "load", load)
    first = build.built("transpose", gpu.device)
    assert isinstance(first.library, ctypes.CDLL)
    assert first.why == "kernels/cuda/transpose.cu, built for sm_90"
    assert build.built("transpose", torch.device("cuda", 1)) is first  # another GPU of the same kind
    (call,) = calls
    assert call["extra_cuda_cflags"] == ["-gencode=arch=compute_90,code=sm_90"]
    assert Path(call["build_directory"]) == gpu.folder / "surokit_transpose_sm90"
    assert Path(call["sources"][0]).samefile(ROOT / "kernels" / "cuda" / "transpose.cu")


def test_a_failed_build_says_why_and_is_not_tried_again(gpu, monkeypatch):
    calls = []

    def load(**named):
        calls.append(named)
        raise RuntimeError(
            "Error building extension 'x': [1/2] nvcc -c transpose.cu\nnvcc fatal : error: unsupported GPU\nstop"
        )

    monkeypatch.setattr(gpu.cpp_extension, "load", load)
    for _ in range(2):
        found = build.built("transpose", gpu.device)
        assert found.library is None
        assert (
            found.why == "kernels/cuda/transpose.cu could not be built for sm_90 (nvcc fatal : error: unsupported GPU)"
        )
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("device", "changes", "why"),
    [
        ("cpu", {}, "cpu runs no CUDA C\\+\\+"),
        ("mps", {}, "mps runs no CUDA C\\+\\+"),
        ("cuda", {"hip": "6.4"}, "torch for ROCm"),
        ("cuda", {"capability": (7, 5)}, "compute capability 7.5, below 8.0"),
        ("cuda", {"home": None}, "no CUDA compiler: install the CUDA toolkit"),
        ("cuda", {"error": OSError(errno.EROFS, "Read-only file system")}, "Read-only file system"),
        ("cuda", {"error": AssertionError()}, r"could not be built for sm_90 \(AssertionError\)"),
    ],
)
def test_where_it_cannot_be_built_the_reference_serves(gpu, monkeypatch, device, changes, why):
    def load(**named):
        raise changes["error"]

    monkeypatch.setattr(gpu.cpp_extension, "load", load)
    monkeypatch.setattr(torch.version, "hip", changes.get("hip"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: changes.get("capability", (9, 0)))
    monkeypatch.setattr(gpu.cpp_extension, "CUDA_HOME", changes.get("home", "/somewhere"))
    found, reason = cuda.why(torch.device(device))
    assert not found
    assert re.search(why, reason)
    cuda._kernel.cache_clear()
    assert cuda._kernel(torch.device(device)) is None
    cuda._kernel.cache_clear()


@pytest.fixture
def door(gpu, monkeypatch):
    """The door for that GPU, with Triton as it is here and a compiler that fails."""

    def load(**named):
        raise RuntimeError("Error building extension 'x':\nnvcc fatal : error: unsupported GPU")

    monkeypatch.setattr(gpu.cpp_extension, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ops, "fault_of_triton", lambda device: "")
    ops.first_serving.cache_clear()
    yield gpu.device
    ops.first_serving.cache_clear()


FAILED = "kernels/cuda/transpose.cu could not be built for sm_90 (nvcc fatal : error: unsupported GPU)"


@pytest.mark.parametrize("name", ["transpose_fp8", "transpose_fp4"])
def test_where_it_cannot_be_built_triton_serves_and_the_door_says_why(door, name):
    from surokit.kernels.triton import transpose as triton

    served = ops.serving(getattr(reference, name), door)
    assert served == ops.Serving("triton", getattr(triton, name), f"kernels/triton/transpose, since {FAILED}", FAILED)
    assert kernels.best(getattr(reference, name), door) is getattr(triton, name)
    rows = {row.op: row for row in kernels.choices(door)}
    assert (rows[name].backend, rows[name].why, rows[name].missed) == (served.folder, served.why, served.missed)
    assert (rows["quantize"].why, rows["quantize"].missed) == ("kernels/triton/quantize", "")


def test_where_triton_cannot_launch_either_both_reasons_are_said(door, monkeypatch):
    monkeypatch.setattr(ops, "fault_of_triton", lambda device: "Triton cannot launch here")
    served = ops.serving(reference.transpose_fp8, door)
    assert served.function is reference.transpose_fp8
    assert served.why == served.missed == f"{FAILED}; Triton cannot launch here"


def test_where_it_is_built_it_serves_and_nothing_is_missed(door, monkeypatch):
    monkeypatch.setattr(cuda, "built", lambda stem, device: build.Built(ctypes.CDLL(None), "built"))
    served = ops.serving(reference.transpose_fp8, door)
    assert served == ops.Serving("cuda", cuda.transpose_fp8, "kernels/cuda/transpose")


def test_a_killed_build_does_not_block_the_next_and_builds_take_turns(gpu, monkeypatch):
    left = gpu.folder / "some" / "lock"
    left.parent.mkdir()
    left.touch()  # torch's loader would wait for this to go away

    def load(**named):
        assert not left.exists()
        with (left.parent / "building").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as another process would
        return "loaded"

    monkeypatch.setattr(gpu.cpp_extension, "load", load)
    assert build._locked_load("some", Path("some.cu"), "90") == "loaded"
    with (left.parent / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
