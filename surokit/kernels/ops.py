"""Register the operations with torch, `torch.ops.surokit.*`, so that compiled graphs hold each one whole.

An operation has a schema, a rule for the shapes of its results (the decorated function), and its implementations: on CUDA the
first that is there of the CUDA C++ kernel, the Triton kernel and the reference, on a CPU the first of C++ and the reference, and
elsewhere the reference. C++ is built on first use. All have the operation's file and function names. Formats travel by name.

M rows, K columns (the contracted dimension), R x C the grid of tiles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surokit.formats import FORMATS
from surokit.kernels.reference import gemm, hadamard, mx, nf4, nvfp4, transpose
from surokit.kernels.reference import quantize as tiles

_LIBRARY = torch.library.Library("surokit", "DEF")
KERNELS_FROM = (
    8,
    0,
)  # compute capability: Turing's GPUs and older ones have no bfloat16, and no kernel was compiled for them
Function = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """An Operation is one operation and its definition. `adapt` turns a function of kernels/ into one that takes the schema's
    arguments."""

    name: str
    reference: Function
    adapt: Callable[[Function], Function]

    @cached_property
    def definition(self) -> Function:
        return self.adapt(self.reference)

    def on(self, device: torch.device) -> Function:
        return _adapted(self, serving(self.reference, device).function)


@cache
def _adapted(operation: Operation, function: Function) -> Function:
    return operation.adapt(function)


OPERATIONS: dict[str, Operation] = {}
_BEFORE_THE_REFERENCE = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
_folders: dict[str, tuple[str, ...]] = _BEFORE_THE_REFERENCE


@contextmanager
def only_reference() -> Iterator[None]:
    """Let every device run the definitions in PyTorch inside the `with`: to compare against, and to find a fault."""
    global _folders
    before, _folders = _folders, {}
    try:
        yield
    finally:
        _folders = before


def best(function: Function, device: torch.device) -> Function:
    """Return the function that serves one of kernels/reference on `device`: itself, or on CUDA the best form of the same name.

    For those that no operation registers; kernels/cpu has none of them.
    """
    return serving(function, device).function if device.type == "cuda" else function


class Serving(NamedTuple):
    """A Serving says what serves a reference function: the folder of kernels/ that holds it, the function, and why.

    missed: why a faster form is not used; "" where there is none.
    """

    folder: str
    function: Function
    why: str
    missed: str = ""


def serving(function: Function, device: torch.device) -> Serving:
    """Return which function serves one of kernels/reference on a device, and why."""
    return first_serving(function, device, _folders.get(device.type, ()))


@cache
def first_serving(function: Function, device: torch.device, folders: tuple[str, ...]) -> Serving:
    file = function.__module__.rpartition(".")[2]
    missed = ""
    for folder in folders:
        form, why_not = _found(folder, file, function.__name__, device)
        if form:
            why = f"kernels/{folder}/{file}" + (f", since {missed}" if missed else "")
            return Serving(folder, _on(device, form) if folder == "triton" else form, why, missed)
        missed = "; ".join(filter(None, (missed, why_not)))
    return Serving("reference", function, missed or "the definition in PyTorch", missed)


def _on(device: torch.device, form: Function) -> Function:
    """Return a form that launches on the tensors' device: Triton launches on the current one, so that among several theirs has to
    be made the current one."""
    if torch.cuda.device_count() < 2:
        return form

    @wraps(form)
    def there(*args: Any, **options: Any) -> Any:
        with torch.cuda.device(device):
            return form(*args, **options)

    return there


def _found(folder: str, file: str, function: str, device: torch.device) -> tuple[Function | None, str]:
    """Return a function of kernels/<folder>/<file>.py, or None and why it cannot serve ("" where it was never written)."""
    name = f"surokit.kernels.{folder}.{file}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None, "" if error.name == name else f"{folder} cannot be loaded here ({error})"
    form = getattr(module, function, None)
    if form is None:
        return None, ""
    needs = getattr(module, "NEEDS", KERNELS_FROM)
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < needs:
        return None, f"kernels/{folder}/{file} needs compute capability {needs[0]}.{needs[1]}"
    if folder == "triton" and (fault := fault_of_triton(device)):
        return None, fault
    if hasattr(module, "why"):  # C++ has to be built for the device
        served, reason = module.why(device)
        if not served:
            return None, reason
    return form, ""


@cache
def fault_of_triton(device: torch.device) -> str:
    """Return why Triton cannot launch on a CUDA device, "" where it can: it compiles its launcher with the system's C compiler."""
    if not torch.cuda.is_available():
        return ""
    from surokit.kernels.triton import transpose as probe

    try:
        _on(device, probe.transpose_fp8)(torch.zeros((1, 1), dtype=torch.uint8, device=device))
    except Exception as error:
        # a missing compiler or header, a driver that is too old: whatever it is, the reference runs
        return f"Triton cannot launch here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return ""


def _as_it_is(f: Function) -> Function:
    return f


def _format_second(f: Function) -> Function:
    return lambda x, format, *rest, **options: f(x, FORMATS[format], *rest, **options)


def operation(
    schema: str, reference: Function, adapt: Callable[[Function], Function] = _as_it_is
) -> Callable[[Function], Function]:
    """Register `schema` with its implementations; the decorated function makes empty results of the right shapes."""

    def register(shapes: Function) -> Function:
        name = schema.partition("(")[0]
        op = OPERATIONS[name] = Operation(name, reference, adapt)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, partial(_carried_out, op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"surokit::{name}", shapes, lib=_LIBRARY)
        return shapes

    return register


def _carried_out(operation: Operation, x: Tensor, *rest: Any, **options: Any) -> Any:
    """Carry an operation out on its tensors as they are: autocast would round what a definition multiplies in float32."""
    with without_autocast(x.device):
        return operation.on(x.device)(x, *rest, **options)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Compute in the block in the dtypes that tensors on the device have."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


# -- shapes


def _ceil(n: Any, d: int) -> Any:
    return (n + d - 1) // d


def _codes(x: Tensor, format: str) -> Tensor:
    M, K = x.shape
    if format == "e2m1":
        return x.new_empty((M, _ceil(K, 2)), dtype=torch.uint8)
    dtype = tiles.DTYPES[FORMATS[format]]
    return x.new_empty((M, K), dtype=dtype)


# -- a float32 scale a tile


@operation("amax(Tensor x, int rows, int columns) -> Tensor", tiles.amax)
def _amax(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(tiles.grid_of_tiles(x, rows, columns), dtype=torch.float32)


@operation(
    "quantize(Tensor x, str format, int rows, int columns, bool pow2, Tensor? amax=None, float floor=0.0, "
    "Tensor? key=None) -> (Tensor, Tensor)",
    tiles.quantize,
    _format_second,
)
def _quantize(x: Tensor, format: str, rows: int, columns: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _codes(x, format), tiles.empty_scales(x, rows, columns)


@operation(
    "quantize_both(Tensor x, str format, int rows, int columns, bool pow2, float floor=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tiles.quantize_both,
    _format_second,
)
def _quantize_both(x: Tensor, format: str, rows: int, columns: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return *_quantize(x, format, rows, columns), *_quantize(x.t(), format, rows, columns)


@operation("dequantize(Tensor codes, Tensor scales, int rows, int columns, ScalarType dtype) -> Tensor", tiles.decode)
def _dequantize(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@operation("values(Tensor codes) -> Tensor", tiles.values)
def _values(codes: Tensor) -> Tensor:
    return torch.empty_like(codes, dtype=torch.bfloat16)


# -- Microscaling


@operation(
    "quantize_mx(Tensor x, str format, str rule, Tensor? key=None) -> (Tensor, Tensor)", mx.quantize, _format_second
)
def _quantize_mx(x: Tensor, format: str, rule: str, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _codes(x, format), x.new_empty(tiles.grid_of_tiles(x, 1, 32), dtype=torch.float8_e8m0fnu)


@operation(
    "quantize_mx_both(Tensor x, str format, str rule) -> (Tensor, Tensor, Tensor, Tensor)",
    mx.quantize_both,
    _format_second,
)
def _quantize_mx_both(x: Tensor, format: str, rule: str) -> tuple[Tensor, ...]:
    return *_quantize_mx(x, format, rule), *_quantize_mx(x.t(), format, rule)


def _format_fourth(f: Function) -> Function:
    return lambda codes, scales, columns, format, dtype: f(codes, scales, columns, FORMATS[format], dtype)


@operation(
    "dequantize_mx(Tensor codes, Tensor scales, int columns, str format, ScalarType dtype) -> Tensor",
    mx.dequantize,
    _format_fourth,
)
def _dequantize_mx(codes: Tensor, scales: Tensor, columns: int, format: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


# -- NVFP4


@operation(
    "quantize_nv(Tensor x, int rows, str? four_over_six=None, Tensor? amax=None, Tensor? key=None) "
    "-> (Tensor, Tensor, Tensor)",
    nvfp4.quantize,
)
def _quantize_nv(x: Tensor, rows: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    scales = x.new_empty(tiles.grid_of_tiles(x, rows, 16), dtype=torch.float8_e4m3fn)
    return _codes(x, "e2m1"), scales, x.new_empty((1, 1), dtype=torch.float32)


@operation(
    "quantize_nv_rotated(Tensor x, int block, Tensor? key=None) -> (Tensor, Tensor, Tensor)", nvfp4.quantize_rotated
)
def _quantize_nv_rotated(x: Tensor, block: int, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize_nv(_rotate(x, block), 1)


@operation(
    "quantize_nv_eden(Tensor x, int block, Tensor rotation, Tensor key) -> (Tensor, Tensor, Tensor)",
    nvfp4.quantize_eden,
)
def _quantize_nv_eden(x: Tensor, block: int, rotation: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize_nv(_rotate(x, block), 1)


@operation(
    "dequantize_nv(Tensor codes, Tensor scales, Tensor scale, int rows, int columns, ScalarType dtype) -> Tensor",
    nvfp4.dequantize,
)
def _dequantize_nv(codes: Tensor, scales: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


@operation("factors_nv(Tensor codes, Tensor scales, int rows, int columns) -> Tensor", nvfp4.factors)
def _factors_nv(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=torch.bfloat16)


# -- NF4


def _listed(f: Function) -> Function:
    def flat(x: Tensor, double: int = 0, format: str = "nf4") -> list[Tensor]:
        codes, scales, second = f(x, double, FORMATS[format])
        return [codes, scales, *second]

    return flat


@operation("quantize_nf4(Tensor x, int double=0, str format='nf4') -> Tensor[]", nf4.quantize, _listed)
def _quantize_nf4(x: Tensor, double: int = 0, format: str = "nf4") -> list[Tensor]:
    M, K = x.shape
    blocks = _ceil(M * K, 64)
    codes = x.new_empty((M, K // 2) if K % 2 == 0 else (1, _ceil(M * K, 2)), dtype=torch.uint8)
    grid = (M, K // 64) if K % 64 == 0 else (1, blocks)
    if not double:
        return [codes, x.new_empty(grid, dtype=torch.float32)]
    absmax_scale = x.new_empty((_ceil(blocks, double),), dtype=torch.float32)
    return [codes, x.new_empty(grid, dtype=torch.uint8), absmax_scale, x.new_empty((1,), dtype=torch.float32)]


def _with_shape(f: Function) -> Function:
    return lambda codes, scales, second, rows, columns, dtype, format="nf4": f(
        codes, scales, tuple(second), (rows, columns), dtype, FORMATS[format]
    )


@operation(
    "dequantize_nf4(Tensor codes, Tensor scales, Tensor[] second, int rows, int columns, ScalarType dtype, "
    "str format='nf4') -> Tensor",
    nf4.dequantize,
    _with_shape,
)
def _dequantize_nf4(
    codes: Tensor,
    scales: Tensor,
    second: list[Tensor],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    format: str = "nf4",
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


# -- rotation and transposition


@operation("rotate(Tensor x, int block, bool back=False) -> Tensor", hadamard.rotate)
def _rotate(x: Tensor, block: int, back: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], _ceil(x.shape[1], block) * block))


@operation("rotate_drawn(Tensor x, int block, Tensor key, bool back=False) -> Tensor", hadamard.rotate_drawn)
def _rotate_drawn(x: Tensor, block: int, key: Tensor, back: bool = False) -> Tensor:
    return _rotate(x, block)


@operation("transpose_fp8(Tensor codes) -> Tensor", transpose.transpose_fp8)
def _transpose_fp8(codes: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


@operation("transpose_fp4(Tensor codes, int columns) -> Tensor", transpose.transpose_fp4)
def _transpose_fp4(codes: Tensor, columns: int) -> Tensor:
    return codes.new_empty((columns, _ceil(codes.shape[0], 2)))


# -- products


@operation(
    "emulated_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, ScalarType dtype, bool pow2=False) -> Tensor",
    gemm.scaled_mm,
)
def _emulated_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, pow2: bool = False
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@operation(
    "fp8_mm(Tensor x, Tensor codes, Tensor scales, int rows, int columns, bool transposed) -> Tensor",
    gemm.dequantize_mm_fp8,
)
def _fp8_mm(x: Tensor, codes: Tensor, scales: Tensor, rows: int, columns: int, transposed: bool) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[1 if transposed else 0]))


def _columns_last(f: Function) -> Function:
    return lambda x, codes, scales, scale, rows, columns, transposed: f(
        x, codes, scales, scale, rows, transposed, columns
    )


@operation(
    "nv_mm(Tensor x, Tensor codes, Tensor scales, Tensor scale, int rows, int columns, bool transposed) -> Tensor",
    gemm.dequantize_mm_nvfp4,
    _columns_last,
)
def _nv_mm(
    x: Tensor, codes: Tensor, scales: Tensor, scale: Tensor, rows: int, columns: int, transposed: bool
) -> Tensor:
    return x.new_empty((x.shape[0], columns if transposed else codes.shape[0]))


def _shape_of_weight(f: Function) -> Function:
    return lambda x, codes, scales, second, rows, columns, transposed, format="nf4": f(
        x, codes, scales, tuple(second), (rows, columns), transposed, FORMATS[format]
    )


@operation(
    "nf4_mm(Tensor x, Tensor codes, Tensor scales, Tensor[] second, int rows, int columns, bool transposed, "
    "str format='nf4') -> Tensor",
    gemm.dequantize_mm_nf4,
    _shape_of_weight,
)
def _nf4_mm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    second: list[Tensor],
    rows: int,
    columns: int,
    transposed: bool,
    format: str = "nf4",
) -> Tensor:
    return x.new_empty((x.shape[0], columns if transposed else rows))
