"""Multiply bfloat16 matrices: as torch does, and through float32 on a CPU whose bfloat16 products are slower than float32's.

    y_MN = alpha a_MK b_KN + beta y_MN        summed in float32 and rounded once to bfloat16

Without such instructions torch multiplies bfloat16 at a third of float32's speed where oneDNN emulates them (AVX-512), and at
a fifth to a seventieth, as operands are laid out, where torch's own loops do it (AVX2). Converting both operands, multiplying in
float32 and rounding the result gives the same numbers up to the order of the sums, since both ways sum in float32 and round
once. Few rows, columns or terms do not pay for the conversion and stay with torch.

Intel's processors with AVX512_BF16 and no AMX multiply bfloat16 at half of float32's speed: their dot product of bfloat16 makes as
many multiply-adds in a cycle as the two units for float32, and operands have to be rearranged for it. AMD's is twice as fast as
float32 and stays with torch.

The float32 copies live in a buffer of at most SCRATCH_ELEMENTS. Each thread keeps its own, because a fresh one for every product
costs up to half of what converting wins. Larger products are cut into blocks; where K is cut too, the block's sum goes on in
float32, so that it is still rounded once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product

import torch
from torch import Tensor

from surokit.kernels.reference.processor import cpuinfo
from surokit.torch_private import constant_when_compiled

SCRATCH_ELEMENTS = 4 * 1024 * 1024  # float32: 16 MiB
LEAST_REUSE = 12  # multiply-adds for each number that is converted, from which a conversion pays
LEAST_REUSE_WITHOUT_ONEDNN = 4
LEAST_REUSE_WITH_SLOW_BF16 = 48
SMALL_ELEMENTS = 128 * 1024  # below, fresh memory is cheaper than looking after kept memory
MOST_SIDE = 1024  # rows and columns of a block of the result, ...
IN_CACHE = 0.375  # ... more columns where this share of the scratch holds all of the block

# of oneDNN's ONEDNN_MAX_CPU_ISA, those that leave bfloat16 instructions unused
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}

UNKNOWN = "unknown"

PLAIN = (Tensor, torch.nn.Parameter)  # what may be converted; other kinds of tensors multiply themselves
_converts: bool | None = None  # None: as the processor says
_kept = threading.local()


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the product [M, N] of two matrices of one dtype, in that dtype."""
    if not _pays(a_MK, b_KN):
        return a_MK @ b_KN
    return _through_float32_(a_MK.new_empty((a_MK.shape[0], b_KN.shape[1])), a_MK, b_KN, 0.0, 1.0)


def addmm_(y_MN: Tensor, a_MK: Tensor, b_KN: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta y + alpha a b, written over y [M, N]; all of one dtype, any strides. With beta 0 what y held does not count."""
    if _pays(a_MK, b_KN, y_MN):
        return _through_float32_(y_MN, a_MK, b_KN, beta, alpha)
    if beta == 0 and alpha == 1:
        return torch.mm(a_MK, b_KN, out=y_MN)
    return y_MN.addmm_(a_MK, b_KN, beta=beta, alpha=alpha)


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x w' + bias [T, N], rounded once."""
    if bias_N is None:
        return mm(x_TK, w_NK.t())
    if not _pays(x_TK, w_NK.t(), bias_N) or bias_N.dtype != x_TK.dtype:
        return torch.nn.functional.linear(x_TK, w_NK, bias_N)
    y_TN = bias_N.new_empty((len(x_TK), len(w_NK))).copy_(bias_N)
    return _through_float32_(y_TN, x_TK, w_NK.t(), 1.0, 1.0)


# -- which way


def through_float32(x: Tensor) -> bool:
    """Return whether large products of `x` with its like are computed in float32: bfloat16 on a CPU that is faster so."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and converts()


@constant_when_compiled
def converts() -> bool:
    """Return whether bfloat16 products on this CPU go through float32; a compiled graph keeps the answer of its making."""
    return bf16_instructions() is None or bf16_is_slower() if _converts is None else _converts


@contextmanager
def converting(yes: bool) -> Iterator[None]:
    """Make bfloat16 products on a CPU go through float32, or through torch, inside the `with`, whatever the processor can do."""
    global _converts
    before, _converts = _converts, yes
    try:
        yield
    finally:
        _converts = before


@cache
def bf16_instructions() -> str | None:
    """Return the widest instructions for bfloat16 products that torch uses on this processor, None without any.

    They are the processor's flags as Linux names them ("amx_bf16", "avx512_bf16", on Arm "bf16"), as far as the environment
    variable ONEDNN_MAX_CPU_ISA lets oneDNN use them. torch's own questions read the flags alone. UNKNOWN where the system has no
    /proc/cpuinfo to ask.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in _WITHOUT_BF16:
        return None
    told = cpuinfo()
    if not told:
        return UNKNOWN
    flags = set((told.get("flags") or told.get("Features", "")).split())
    if limit.startswith(("AVX512_CORE_BF16", "AVX512_CORE_FP16")) or limit == "AVX10_1_512":
        flags.discard("amx_bf16")
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags), None)


@cache
def bf16_is_slower() -> bool:
    """Return whether this processor's widest bfloat16 instructions are slower than float32's: Intel's AVX512_BF16."""
    return bf16_instructions() == "avx512_bf16" and cpuinfo().get("vendor_id") == "GenuineIntel"


def choice(device: torch.device) -> tuple[str, str]:
    """Return what multiplies bfloat16 matrices on a device, "torch" or "float32", and why."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return (
            "emulated",
            "tensor cores multiply bfloat16 from compute capability 8.0 on: torch converts to float32 here",
        )
    if device.type != "cpu":
        return "torch", f"{device.type} multiplies them itself"
    found = bf16_instructions()
    instructions = f"this processor has {found}" if found else "torch finds no bfloat16 instructions here"
    if found == UNKNOWN:
        instructions = "the system does not say what instructions this processor has"
    if bf16_is_slower():
        instructions = f"this processor's {found} is slower than its float32"
    if converts():
        return "float32", f"{instructions}: operands are converted, and the result is rounded once"
    return "torch", instructions


def _pays(a_MK: Tensor, b_KN: Tensor, *added: Tensor) -> bool:
    if not through_float32(a_MK) or b_KN.dtype != a_MK.dtype:
        return False
    if type(a_MK) not in PLAIN or type(b_KN) not in PLAIN or torch.compiler.is_exporting():
        return False  # without data of their own to convert, or of sizes that are not known yet
    # scratch is not for autograd to record
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a_MK, b_KN, *added)):
        return False
    (M, K), N = a_MK.shape, b_KN.shape[1]
    return M * K * N >= _least_reuse() * (M * K + K * N + M * N) > 0


@constant_when_compiled
def _least_reuse() -> int:
    if not onednn_multiplies_bf16():
        return LEAST_REUSE_WITHOUT_ONEDNN
    return LEAST_REUSE_WITH_SLOW_BF16 if bf16_is_slower() else LEAST_REUSE


@cache
def onednn_multiplies_bf16() -> bool:
    """Return whether oneDNN has bfloat16 products for this processor: of x86 processors, for those with AVX-512."""
    return torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT")


# -- how


def _through_float32_(y_MN: Tensor, a_MK: Tensor, b_KN: Tensor, beta: float, alpha: float) -> Tensor:
    (M, K), N = a_MK.shape, b_KN.shape[1]
    # a compiler plans its own buffers
    if torch.compiler.is_compiling() or M * K + K * N + M * N <= SMALL_ELEMENTS:
        a, b = a_MK.float(), b_KN.float()
        # written to `y`, since autocast would make bfloat16 of the operands of a product that makes its own result
        if beta:
            y = y_MN.float()
            return y_MN.copy_(torch.addmm(y, a, b, beta=beta, alpha=alpha, out=y))
        y = torch.mm(a, b, out=a.new_empty((M, N)))
        return y_MN.copy_(y if alpha == 1 else y.mul_(alpha))
    m, k, n = _block(M, K, N)
    buffer = _scratch(m * n + m * k + k * n)
    for rows, columns in product(_cut(M, m), _cut(N, n)):
        y_block = y_MN if (m, n) == (M, N) else y_MN[rows, columns]
        y = _room(y_block, buffer, 0)
        if beta:
            y.copy_(y_block)
        for terms in _cut(K, k):
            a_block = a_MK if (m, k) == (M, K) else a_MK[rows, terms]
            b_block = b_KN if (k, n) == (K, N) else b_KN[terms, columns]
            a = _room(a_block, buffer, m * n).copy_(a_block)
            b = _room(b_block, buffer, m * n + m * k).copy_(b_block)
            # not addmm_, which FlopCounterMode does not count
            torch.addmm(y, a, b, beta=1.0 if terms.start else beta, alpha=alpha, out=y)
        y_block.copy_(y)
    return y_MN


def _block(M: int, K: int, N: int) -> tuple[int, int, int]:
    """Return how many rows, terms and columns are multiplied at once: m n + m k + k n <= SCRATCH_ELEMENTS. Beside few rows there
    are more columns, since `a` is converted again for each block of them."""
    m = min(M, MOST_SIDE)
    n = min(N, max(MOST_SIDE, (int(IN_CACHE * SCRATCH_ELEMENTS) - m * K) // (m + K)))
    n = -(-N // -(-N // n))  # blocks of one size
    return m, min(K, (SCRATCH_ELEMENTS - m * n) // (m + n)), n


def _cut(extent: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, extent)) for first in range(0, extent, most)]


def _room(x: Tensor, buffer: Tensor, first: int) -> Tensor:
    """Return a matrix like `x` [R, C] in `buffer` from element `first` on, laid out along the dimension that is contiguous in x."""
    R, C = x.shape
    turned = x.stride(0) == 1 and x.stride(1) != 1
    return buffer.as_strided((R, C), (1, R) if turned else (C, 1), first)


def _scratch(elements: int) -> Tensor:
    """Return scratch memory of this thread, kept from call to call."""
    kept: Tensor | None = getattr(_kept, "buffer", None)
    if kept is None or kept.numel() < elements:
        with torch.inference_mode(False):
            kept = _kept.buffer = torch.empty(elements, dtype=torch.float32, device="cpu")
    return kept
