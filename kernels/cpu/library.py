"""Call the functions of quantize.cpp with tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .build import built

SOURCE = "quantize"
FLOATS = (torch.bfloat16, torch.float32)
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_MATRIX = (_P, _I, _L, _L)  # its address, whether it is float32, M and K
_ARGUMENTS = {
    "amax": (*_MATRIX, _L, _L, _P, _I),
    "encode": (*_MATRIX, _L, _L, _P, _I, _P, _P, _I),
    "quantize_nv": (*_MATRIX, _L, _F, _F, _P, _P, _I, _P, _P, _P, _I),
    "quantize_mx": (*_MATRIX, _I, _I, _P, _P, _P, _I),
    "dequantize_mx": (_P, _L, _L, _I, _P, _P, _I, _I),
    "factors_nv": (_P, _L, _L, _L, _P, _P, _I),
}


def why(device: torch.device) -> tuple[bool, str]:
    """Return whether the C++ of this folder serves the device, and why; builds it if that was not done yet."""
    if device.type != "cpu":
        return False, f"{device.type} runs no C++ for a CPU"
    found = built(SOURCE)
    return found.library is not None, found.why


def takes(x_MK: Tensor) -> bool:
    """Return whether the C++ can be given this matrix: what is of another dtype or holds nothing is left to the reference."""
    return x_MK.dtype in FLOATS and x_MK.numel() > 0 and built(SOURCE).library is not None


def call_with(x_MK: Tensor, function: str, *arguments: Any) -> bool:
    """Call a function with a contiguous matrix first; return whether it could do it."""
    return call(function, x_MK, int(x_MK.dtype == torch.float32), *x_MK.shape, *arguments)


def call(function: str, *arguments: Any) -> bool:
    """Call a function, tensors going by their addresses; return whether it could do it."""
    given = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    return not _function(function)(*given, torch.get_num_threads())


@cache
def _function(name: str) -> Any:
    function = getattr(built(SOURCE).library, f"surokit_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], _I
    return function
