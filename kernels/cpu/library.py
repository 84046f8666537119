"""Call the functions of quantize.cpp with tensors, of which it knows the addresses only: what it is not made for is left to the
reference."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .build import built

SOURCE = "quantize"
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_MATRIX = (_P, _I, _L, _L)  # its address, whether it is float32, M and K
_ARGUMENTS = {
    "amax": (*_MATRIX, _L, _L, _P, _I),
    "quantize": (*_MATRIX, _L, _L, _I, _F, _P, _I, _P, _P, _P, _L, _L, _I),
    "quantize_nv": (*_MATRIX, _L, _F, _F, _P, _P, _I, _P, _P, _P, _I),
    "quantize_mx": (*_MATRIX, _I, _I, _P, _P, _P, _I),
    "dequantize_mx": (_P, _L, _L, _I, _P, _P, _I, _I),
    "factors_nv": (_P, _L, _L, _L, _P, _P, _I),
    "values": (_P, _L, _I, _P, _I),
    "transpose": (_P, _L, _L, _P, _I),
    "round_bf16": (_P, _L, _P, ctypes.c_uint32, _P, _I),
}


def why(device: torch.device) -> tuple[bool, str]:
    """Return whether the C++ of this folder serves the device, and why; builds it if that was not done yet."""
    if device.type != "cpu":
        return False, f"{device.type} runs no C++ for a CPU"
    found = built(SOURCE)
    return found.library is not None, found.why


def takes(x_MK: Tensor, key: Tensor | None = None) -> bool:
    """Return whether the C++ takes this matrix, and a key for stochastic rounding."""
    drawn = key is None or is_usual_key(key)
    floats = x_MK.dtype in (torch.bfloat16, torch.float32)
    return floats and is_on_cpu(x_MK, x_MK.dtype) and x_MK.ndim == 2 and x_MK.numel() > 0 and drawn and is_built()


def is_built() -> bool:
    return built(SOURCE).library is not None


def is_usual_key(key: Tensor) -> bool:
    """Return whether the C++ takes this key of random bits."""
    return is_on_cpu(key, torch.int32, (2,)) and key.is_contiguous()


def is_on_cpu(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> bool:
    """Return whether a tensor lies in the CPU's memory, with this dtype and shape."""
    return x.device.type == "cpu" and x.dtype == dtype and shape in (None, tuple(x.shape))


def row_by_row(x_MK: Tensor) -> Tensor:
    """Return the matrix with its rows one after the other; one of bfloat16 that lies column by column is turned in C++."""
    if x_MK.is_contiguous() or x_MK.dtype != torch.bfloat16 or not takes(x_MK) or not x_MK.t().is_contiguous():
        return x_MK.contiguous()
    x_KM = x_MK.t()
    turned = torch.empty_like(x_MK, memory_format=torch.contiguous_format)
    return turned if call("transpose", x_KM, *x_KM.shape, turned) else x_MK.contiguous()


def call_with(x_MK: Tensor, function: str, *arguments: Any) -> bool:
    """Call a function with a contiguous matrix first; return whether it could do it."""
    return call(function, x_MK, int(x_MK.dtype == torch.float32), *x_MK.shape, *arguments)


def call(function: str, *arguments: Any) -> bool:
    """Call a function, contiguous tensors going by their addresses; return whether it could do it."""
    given = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    return not _function(function)(*given, torch.get_num_threads())


@cache
def _function(name: str) -> Any:
    function = getattr(built(SOURCE).library, f"surokit_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], _I
    return function
