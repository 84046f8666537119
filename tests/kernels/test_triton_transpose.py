"""Transposes of codes in Triton, byte for byte as the reference."""

import re

import numpy as np
import pytest
import torch

from surokit.kernels.reference import transpose as reference
from surokit.kernels.triton import transpose as kernels
from tests.kernels.compiling import ANY, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE, INTERPRETED
from tests.kernels.test_transpose import DTYPES, SHAPES, codes, same
from tests.refusals import refused

pytestmark = pytest.mark.sampled

LAUNCHES: Launches = {
    "bytes": (ANY, lambda: kernels.transpose_fp8(matrix(256, 512, torch.uint8))),
    "bytes, any size": (ANY, lambda: kernels.transpose_fp8(matrix(51, 77, torch.uint8))),
    "nibbles": (ANY, lambda: kernels.transpose_fp4(matrix(256, 256, torch.uint8), 512)),
    "nibbles, any size": (ANY, lambda: kernels.transpose_fp4(matrix(51, 39, torch.uint8), 77)),
}
each_shape = pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 300), (300, 1), *SHAPES], ids=str)


@each_shape
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes(shape, dtype):
    x = codes(shape[0], shape[1], dtype=dtype)
    y = kernels.transpose_fp8(x.to(DEVICE))
    assert y.is_contiguous()
    assert same(y.cpu(), reference.transpose_fp8(x))


@each_shape
def test_nibbles(shape):
    M, K = shape
    x = codes(M, (K + 1) // 2)  # the unused nibble of an odd K holds anything
    y = kernels.transpose_fp4(x.to(DEVICE), K)
    assert y.is_contiguous()
    assert same(y.cpu(), reference.transpose_fp4(x, K))


def test_zeros():
    x = torch.zeros(130, 140, dtype=torch.uint8, device=DEVICE)
    assert not kernels.transpose_fp8(x).any()
    assert not kernels.transpose_fp4(x, 280).any()


def test_strides_do_not_matter():
    wide = codes(140, 160)
    for view in (wide.t(), wide[::2], wide[:, 1::3], wide[3:, 5:]):
        there = view.to(DEVICE)
        assert same(kernels.transpose_fp8(there).cpu(), reference.transpose_fp8(view))
        K = 2 * view.shape[1]
        assert same(kernels.transpose_fp4(there, K).cpu(), reference.transpose_fp4(view, K))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7, 1)])
def test_results_have_memory_of_their_own(shape):
    x = codes(*shape).to(DEVICE)
    for view in (x, x.t()):
        assert kernels.transpose_fp8(view).data_ptr() != x.data_ptr()
        assert kernels.transpose_fp4(view, 2 * view.shape[1]).data_ptr() != x.data_ptr()


def test_what_is_not_codes_is_refused():
    with refused(ValueError):
        kernels.transpose_fp8(torch.zeros(2, 2, dtype=torch.bfloat16, device=DEVICE))
    with refused(ValueError):
        kernels.transpose_fp4(codes(2, 3).to(DEVICE), 8)


@pytest.mark.skipif(not INTERPRETED, reason="memory that is never touched costs nothing on the host only")
@pytest.mark.parametrize("far", ["read", "written"])
def test_rows_beyond_the_reach_of_32_bits(far):
    """The first tile of a matrix of 4 GiB, of which the other pages are never touched."""
    pitch = 2**25
    x = codes(128, 128)
    apart = torch.from_numpy(np.zeros(127 * pitch + 128, dtype=np.uint8)).as_strided((128, 128), (pitch, 1))
    if far == "read":
        given, out, sizes = apart.copy_(x), torch.empty_like(x), (128, pitch)
    else:
        given, out, sizes = x, apart, (pitch, 128)
    kernels.transpose_kernel[(1,)](given, out, 128, 128, *sizes, PER_BYTE=1, BLOCK=kernels.BLOCK)
    assert torch.equal(out, x.t())


def test_memory_is_read_and_written_16_bytes_at_a_time():
    for launch, accesses in (("bytes", 4), ("nibbles", 2)):  # of a thread, 256 of which have a tile
        code = compiled()["transpose", launch, 90]["transpose_kernel"]
        assert re.findall(r"\bld\.global\S*", code) == ["ld.global.v4.b32"] * accesses
        assert re.findall(r"\bst\.global\S*", code) == ["st.global.v4.b32"] * accesses
