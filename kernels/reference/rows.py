"""Share what the row-wise definitions have in common: how a result that is made row by row is quantized. T rows, K columns, C
scales a row."""

from __future__ import annotations

from torch import Tensor

from surokit.formats import Format

from . import delayed, quantize


def quantized(
    y_TK: Tensor,
    format: Format,
    *,
    columns: int = 0,
    pow2: bool = False,
    floor: float = 0.0,
    in_force: Tensor | None = None,
    opened: Tensor | None = None,
    record: bool = False,
    both: bool = False,
) -> tuple[Tensor, ...]:
    """Return the codes [T, K] and decode scales, as separate operations give them; with `both` those of y' [K, T] too.

    columns, pow2, floor: a scale for each row (0) or for each `columns` elements of it, [T, C]; see quantize.py.
    in_force and opened [S], record: delayed scaling, one scale for all of y, [1, 1]; see delayed.py.
    """
    if in_force is None and opened is None:
        one_scale_a_part = quantize.quantize_both if both else quantize.quantize
        return one_scale_a_part(y_TK, format, 1, columns, pow2, floor=floor)
    if in_force is None or opened is None:
        raise ValueError(
            "Delayed scaling takes both `in_force` and `opened`, or neither: give the two views of the slots."
        )
    one_scale = delayed.quantize_both if both else delayed.quantize
    return one_scale(y_TK, format, in_force, opened, record, pow2, floor)
