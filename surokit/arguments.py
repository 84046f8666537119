"""Check what a user gives, before anything is computed: each refusal is one sentence with the cause and the remedy.

Most wrong plans come from units: 405 for 405e9 parameters, 15.6 for 15.6e12 tokens, 40 for an MFU of 0.4. The bounds
here are wide enough for a toy model and for the largest run that anybody has announced, and narrow enough to catch
those.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def number(name: str, value: Any) -> float:
    """Return `value` as a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a number.")
    result = float(value)
    if not math.isfinite(result) or result <= 0:
        raise ValueError(f"{name}={value!r} must be a finite number above zero.")
    return result


def integer(name: str, value: Any, *, most: float = 1e9) -> int:
    """Return `value` as a whole number of at least one."""
    result = number(name, value)
    if result != int(result):
        raise ValueError(f"{name}={value!r} must be a whole number.")
    if result > most:
        raise ValueError(f"{name}={value!r} is more than {most:.0e}: check its unit.")
    return int(result)


def parameters(value: Any) -> float:
    """Return `value` as a number of parameters."""
    result = number("parameters", value)
    if result < 1e4:
        raise ValueError(
            f"{_short(result)} parameters is no model: did you mean {_short(result)}e9 "
            "(the unit is parameters, not billions)?"
        )
    if result > 1e14:
        raise ValueError(
            f"{_short(result)} parameters is beyond any model: did you mean {_short(result / 1e9)} "
            "(the unit is parameters)?"
        )
    return result


def tokens(value: Any) -> float:
    """Return `value` as a number of tokens of the whole run."""
    result = number("tokens", value)
    if result < 1000:
        unit = "e12" if result < 100 else "e9"
        raise ValueError(
            f"tokens={_short(result)} is no training run: did you mean {_short(result)}{unit} (the unit is tokens)?"
        )
    if result > 1e16:
        raise ValueError(
            f"tokens={_short(result)} is beyond any text there is: the unit is tokens, 15.6 trillion is 15.6e12."
        )
    return result


def share(name: str, value: Any) -> float:
    """Return `value` as a share in (0, 1]."""
    result = number(name, value)
    if result > 1:
        hint = f": did you mean {_short(result / 100)}?" if result <= 100 else "."
        raise ValueError(f"{name}={_short(result)} must be a share between 0 and 1{hint}")
    return result


def rate(value: Any, gpu: str = "", peak_tflops: float | None = None) -> float:
    """Return `value` as the TFLOPS that one GPU achieves; with a known GPU, between a thousandth of its fastest dense peak and that
    peak."""
    result = number("tflops_per_gpu", value)
    if result >= 1e9:
        raise ValueError(
            f"tflops_per_gpu={_short(result)} is in FLOP/s: did you mean {_short(result / 1e12)} (the unit is TFLOPS)?"
        )
    if peak_tflops is not None:
        if result > peak_tflops:
            raise ValueError(
                f"tflops_per_gpu={_short(result)} is above {gpu}'s fastest dense peak "
                f"of {_short(peak_tflops)} TFLOPS: give the achieved rate."
            )
        if result < peak_tflops / 1000:
            guess = (
                f": did you mean {_short(result * 1000)} (the unit is TFLOPS)?" if result * 1000 <= peak_tflops else "."
            )
            raise ValueError(
                f"tflops_per_gpu={_short(result)} is under a thousandth of {gpu}'s peak "
                f"of {_short(peak_tflops)} TFLOPS{guess}"
            )
    return result


def price(value: Any) -> float:
    """Return `value` as a price in US dollars for one GPU hour."""
    result = number("usd_per_gpu_hour", value)
    if result > 1000:
        raise ValueError(
            f"usd_per_gpu_hour={_short(result)} is no price of a GPU hour: give US dollars for one GPU and one hour."
        )
    return result


def _short(value: float) -> str:
    return f"{value:.12g}"
