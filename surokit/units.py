"""Figures as text: magnitudes and units that a reader takes in at a glance."""

from __future__ import annotations


def count(value: float, digits: int = 4) -> str:
    """405e9 -> "405 B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{digits}g} {unit}"
    return f"{value:.{digits}g}"


def gib(value: float) -> str:
    """GiB, or MiB where that reads better."""
    if value >= 0.1:
        return f"{value:,.1f} GiB" if value >= 10 else f"{value:.2f} GiB"
    if value < 1e-6:  # a kilobyte is rounding
        return "0 MiB"
    return f"{value * 1024:.3g} MiB"


def days(value: float) -> str:
    """Days, hours, minutes or seconds, whichever is at least one."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value * 86400:.3g} s"


def value(number: float, unit: str) -> str:
    """A number with its unit."""
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
    """From one to another, with the unit once; a single figure where both read alike."""
    first, last = value(low, unit), value(high, unit)
    return last if first == last else f"{first.removesuffix(f' {unit}')} to {last}"
