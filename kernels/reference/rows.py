"""What the row-wise definitions share: how a result that is made row by row is quantized. T rows, K columns, C scales a row."""

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
) -> tuple[Tensor, Tensor]:
    """Codes [T, K] and decode scales, as separate operations give them.

    columns, pow2, floor: a scale for each row (0) or for each `columns` elements of it, [T, C]; see quantize.py.
    in_force and opened [S], record: delayed scaling, one scale for all of y, [1, 1]; see delayed.py.
    """
    if in_force is None and opened is None:
        return quantize.quantize(y_TK, format, 1, columns, pow2, floor=floor)
    if in_force is None or opened is None:
        raise ValueError(
            "Delayed scaling takes both `in_force` and `opened`, or neither: give the two views of the slots."
        )
    return delayed.quantize(y_TK, format, in_force, opened, record, pow2, floor)
