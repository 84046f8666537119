"""Transpose codes on a GPU: transpose.cu behind the names and the meaning of kernels/reference/transpose.py.

Where the library cannot be built, the door takes kernels/triton/transpose.py; `why(device)` says why. Called all the
same, there and on any other device, these functions are the reference.

Shapes: M rows, K columns, in codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..reference import transpose as reference
from .build import built

Kernel = Callable[[int, int, int, int, int, int], bytes | None]
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)


def why(device: torch.device) -> tuple[bool, str]:
    """Return whether CUDA C++ serves the device, and why; builds it if that was not done yet."""
    found = built("transpose", device)
    return found.library is not None, found.why


def transpose_fp8(codes_MK: Tensor) -> Tensor:
    """Return codes_KM, contiguous and in memory of its own, for codes of one byte."""
    kernel = _kernel(codes_MK.device)
    if kernel is None:
        return reference.transpose_fp8(codes_MK)
    reference.check_fp8(codes_MK)
    M, K = codes_MK.shape
    codes_KM = codes_MK.new_empty(K, M)
    _launch(kernel, codes_MK, codes_KM, M, K, 8)
    return codes_KM


def transpose_fp4(packed_MK: Tensor, K: int) -> Tensor:
    """Return the 4-bit codes packed along M: uint8 [K, ceil(M/2)], the even row in the low nibble."""
    kernel = _kernel(packed_MK.device)
    if kernel is None:
        return reference.transpose_fp4(packed_MK, K)
    reference.check_fp4(packed_MK, K)
    M = packed_MK.shape[0]
    packed_KM = packed_MK.new_empty(K, (M + 1) // 2)
    _launch(kernel, packed_MK, packed_KM, M, K, 4)
    return packed_KM


@cache
def _kernel(device: torch.device) -> Kernel | None:
    library = built("transpose", device).library
    if library is None:
        return None
    kernel = library.transpose
    kernel.argtypes, kernel.restype = _ARGUMENTS, ctypes.c_char_p
    return kernel


def _launch(kernel: Kernel, codes_MK: Tensor, codes_KM: Tensor, M: int, K: int, bits: int) -> None:
    """Fills codes_KM on the current stream of its device."""
    if M == 0 or K == 0:
        return
    codes_MK = codes_MK.view(torch.uint8).contiguous()
    device = codes_MK.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        error = kernel(codes_MK.data_ptr(), codes_KM.data_ptr(), M, K, bits, stream)
    if error is not None:
        raise RuntimeError(f"The CUDA transpose of [{M}, {K}] codes on {device} could not start: {error.decode()}.")
