"""The transposes of codes on a device, in CUDA C++ and in Triton, against the reference there.

CUDA C++ needs a compiler (nvcc) beside torch's own requirements for extensions; the tests say so where there is none.
"""

import pytest
import torch

from surokit.kernels.cuda import transpose as cuda
from surokit.kernels.reference import transpose as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

SHAPES = [
    (0, 5),
    (1, 1),
    (1, 300),
    (300, 1),
    (33, 70),
    (127, 129),
    (128, 128),
    (257, 48),
    (1000, 999),
    (4096, 11008),
    (70000, 17),
]


@pytest.fixture(params=["cuda", "triton"])
def form(request):
    """The module with both transposes."""
    if request.param == "triton":
        return pytest.importorskip("surokit.kernels.triton.transpose")
    served, why = cuda.why(torch.device("cuda", 0))
    if not served:
        pytest.skip(why)
    return cuda


def codes(M, K, dtype=torch.uint8):
    generator = torch.Generator("cuda").manual_seed(M * 7919 + K)
    return torch.randint(256, (M, K), generator=generator, device="cuda", dtype=torch.uint8).view(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes(shape, form):
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
        x = codes(shape[0], shape[1], dtype)
        assert same(form.transpose_fp8(x), reference.transpose_fp8(x))
    assert same(form.transpose_fp8(x.t()), reference.transpose_fp8(x.t()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nibbles(shape, form):
    M, K = shape
    x = codes(M, (K + 1) // 2)
    assert same(form.transpose_fp4(x, K), reference.transpose_fp4(x, K))


def test_rows_that_begin_anywhere(form):
    memory = codes(1, 128 * 256 + 16).flatten()
    for offset in (0, 1, 8, 15):
        x = memory[offset : offset + 128 * 256].view(128, 256)
        assert same(form.transpose_fp8(x), reference.transpose_fp8(x))
        assert same(form.transpose_fp4(x, 512), reference.transpose_fp4(x, 512))


def test_follows_the_current_stream_and_fits_a_graph(form):
    x = codes(512, 768)
    expected = reference.transpose_fp8(x)
    form.transpose_fp8(x)  # built and loaded: no graph can record that
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = form.transpose_fp8(x)
    y.zero_()
    graph.replay()
    assert same(y, expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = form.transpose_fp8(x)
    stream.synchronize()
    assert same(y, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device(form):
    x = codes(512, 768)
    torch.cuda.set_sync_debug_mode("error")
    try:
        form.transpose_fp8(x)
        form.transpose_fp4(x, 1536)
    finally:
        torch.cuda.set_sync_debug_mode("default")
