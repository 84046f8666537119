"""Triton's CPU interpreter, made to compute what a GPU computes; and memory that shows what a kernel did not write.

On a machine without CUDA the kernels of kernels/triton run in Triton's interpreter (TRITON_INTERPRET=1, set in
tests/conftest.py). Unchanged it gives wrong numbers in silence. The kernels stay clean and `correct()` mends it here:

- casts between float32, bfloat16 and float8 round to nearest even, saturate in float8 (the instruction is cvt.rn.satfinite)
  and keep NaN and inf
- products of bfloat16 and float8 operands
- maximum and minimum take the other operand where one is NaN, unless asked to propagate it; so does clamp
- arithmetic on bfloat16 and float8 themselves is refused (numpy would do it on the bits): kernels compute in float32
- masked-off lanes of a load without `other` are full of ones, not zeros: they are undefined on a GPU
- a load or a store outside every tensor argument raises an error
- constants are known as such in files with `from __future__ import annotations`
- numpy's floating-point warnings stay silent: a kernel may overflow

`poisoned()` fills torch.empty and its kin with ones (0xFF: NaN in every floating-point type, -1 or 255 in integers).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device(
    "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
)  # where Triton tests put tensors

_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


class _Poison(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and out.device.type != "meta":
            out.untyped_storage().fill_(0xFF)
        return out


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory from torch.empty, empty_like, new_empty is 0xFF throughout."""
    with _Poison():
        yield


_corrected = False


def correct() -> None:
    """Mend the interpreter of this process, once. Nothing to do where kernels are compiled."""
    global _corrected
    if INTERPRETED and not _corrected:
        _correct()
        _corrected = True


def _correct() -> None:
    import ml_dtypes
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

    small = {  # types that numpy holds as bits: their numpy type, and the largest finite number where casts saturate
        tl.bfloat16: (ml_dtypes.bfloat16, None),
        tl.float8e4nv: (ml_dtypes.float8_e4m3fn, 448.0),
        tl.float8e5: (ml_dtypes.float8_e5m2, 57344.0),
    }

    def widen(data: Any, type: Any) -> Any:
        return data.view(small[type][0]).astype(np.float32) if type in small else data

    def narrow(data: Any, type: Any) -> Any:
        if type not in small:
            return data.astype(interpreter._get_np_dtype(type))
        numpy_type, largest = small[type]
        data = data.astype(np.float32)
        if largest is not None:
            data = np.clip(data, -largest, largest)
        return data.astype(numpy_type).view(interpreter._get_np_dtype(type))

    def cast(self: Any, src: Any, dst_type: Any, rounding: Any = None) -> Any:
        if rounding not in (None, ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError("the corrected interpreter rounds to nearest even only")
        to = dst_type.scalar
        return TensorHandle(narrow(widen(src.data, src.dtype.scalar), to), to)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(widen(a.data, a.dtype.scalar), widen(b.data, b.dtype.scalar), dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        if propagate == ir.PROPAGATE_NAN.ALL:
            return self.ternary_op(x, low, high, np.clip)
        return self.ternary_op(x, low, high, lambda x, low, high: np.fmin(np.fmax(x, low), high))

    binary_op = InterpreterBuilder.binary_op

    def refuse_small(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar in small or rhs.dtype.scalar in small:
            raise NotImplementedError(f"{op.__name__} of {lhs.dtype} and {rhs.dtype}: compute in float32")
        return binary_op(self, lhs, rhs, op)

    spans: list[tuple[int, int]] = []  # first and last byte of each tensor argument

    def check(ptrs: Any, mask: Any) -> None:
        size = np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        used = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in spans:
            inside |= (used >= np.uint64(first)) & (used + size <= np.uint64(end))
        if not inside.all():
            raise IndexError(f"{(~inside).sum()} of {used.size} elements lie outside the tensors given to the kernel")

    masked_load, masked_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        check(ptrs, mask)
        if other is None and ptrs.data.size > 1:  # for one element, an `other` of zero comes as None too
            dtype = ptrs.get_element_ty()
            numpy_type = np.dtype(interpreter._get_np_dtype(dtype))
            ones = np.full((*ptrs.data.shape, numpy_type.itemsize), 0xFF, dtype=np.uint8).view(numpy_type)[..., 0]
            other = TensorHandle(ones, dtype)
        return masked_load(self, ptrs, mask, other, *rest, **named)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(ptrs, mask)
        return masked_store(self, ptrs, value, mask, *rest, **named)

    init_args = GridExecutor._init_args_hst

    def note_spans(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = init_args(self, args_dev, kwargs)
        spans.clear()
        given = (*args, *named.values())
        for tensor in chain.from_iterable(a if isinstance(a, tuple) else (a,) for a in given):
            tensor = getattr(tensor, "base", tensor)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
                spans.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()))
        return args, named

    init = GridExecutor.__init__

    def init_with_constants(self: Any, fn: Any, arg_names: Any, *rest: Any, **named: Any) -> None:
        init(self, fn, arg_names, *rest, **named)
        # the interpreter overlooks "tl.constexpr", which is what the annotation is under `from __future__ import annotations`
        self.constexprs = [name for name in arg_names if "constexpr" in str(fn.__annotations__.get(name, ""))]

    run = InterpretedFunction.run

    def run_quietly(self: Any, *args: Any, **named: Any) -> Any:
        # a mode that poisons memory is for the code under test, not for the interpreter's own tensors
        with np.errstate(all="ignore"), warnings.catch_warnings(), torch._C.DisableTorchFunction():
            warnings.simplefilter("ignore", RuntimeWarning)
            return run(self, *args, **named)

    builder: Any = InterpreterBuilder
    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.create_dot = dot
    builder.create_clampf = clamp
    builder.binary_op = refuse_small
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_masked_load = load
    builder.create_masked_store = store
    executor: Any = GridExecutor
    executor.__init__ = init_with_constants
    executor._init_args_hst = note_spans
    function: Any = InterpretedFunction
    function.run = run_quietly
