"""Write figures as text: numbers, magnitudes and units that a reader takes in at a glance."""

from __future__ import annotations

import math


def three_digits(value: float, sign: str = "") -> str:
    """Write a number with three digits, or whole with commas. `sign` "+" writes a plus as well."""
    return f"{value:{sign}.3g}" if abs(value) < 999.5 else f"{value:{sign},.0f}"


def number(value: float) -> str:
    """Write three digits; "not measured" for NaN."""
    return "not measured" if math.isnan(value) else three_digits(value)


def percent(value: float, sign: str = "") -> str:
    """Write a share with one decimal; "not measured" for NaN."""
    return "not measured" if math.isnan(value) else f"{value:{sign}.1%}"


def times(ratio: float) -> str:
    """Write a ratio: 153, 2.04, 0.0123."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3g}"


def counted(count: int, what: str, several: str = "") -> str:
    """Write how many there are: 1 step, 2 steps; `several` where the plural is another."""
    return f"{count} {what if count == 1 else several or what + 's'}"


def elapsed(seconds: float) -> str:
    """Write a span of time: 12.3 s, 4.5 min, 2.1 h."""
    if math.isnan(seconds):
        return "no time"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def count(value: float, digits: int = 4) -> str:
    """Write a count with its magnitude: 405e9 is "405 B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{digits}g} {unit}"
    return f"{value:.{digits}g}"


def gib(value: float) -> str:
    """Write GiB, or MiB where that reads better."""
    if value >= 0.1:
        return f"{value:,.1f} GiB" if value >= 10 else f"{value:.2f} GiB"
    if value < 1e-6:  # a kilobyte is rounding
        return "0 MiB"
    return f"{value * 1024:.3g} MiB"


def size(nbytes: float) -> str:
    """Write a number of bytes in B, kB, MB or GB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes:.0f} B"


def days(value: float) -> str:
    """Write days, hours, minutes or seconds, whichever is at least one."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value * 86400:.3g} s"


def value(number: float, unit: str) -> str:
    """Write a number with its unit."""
    match unit:
        case "FLOP":
            return f"{number:.4e} FLOP".replace("e+", "e")
        case "GiB":
            return gib(number)
        case "days":
            return days(number)
        case "GPU hours" | "hours" | "USD":
            return f"{count(number, 5) if number >= 1e6 else f'{number:,.{2 if number < 100 else 0}f}'} {unit}"
        case "parameters":
            return count(number)
        case "share":
            return f"{number:.1%}"
        case _:
            return f"{number:,.4g} {unit}" if number < 1e4 else f"{number:,.0f} {unit}"


def span(low: float, high: float, unit: str) -> str:
    """Write from one to another, with the unit once; a single figure where both read alike."""
    first, last = value(low, unit), value(high, unit)
    return last if first == last else f"{first.removesuffix(f' {unit}')} to {last}"
