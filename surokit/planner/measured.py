"""What was measured of a run, in one form: from a Session, a Profile or figures by hand, for `check` to set beside a plan.

Sessions and profiles are read by what they offer and not by their class: the planner imports neither. A profile's step is the one
without the profiler where that was measured too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

_KEYS = {
    "step_ms": "milliseconds of an optimizer step",
    "tokens": "tokens of a step on one GPU",
    "tokens_per_s": "of one GPU",
    "peak_gib": "most GiB that tensors took on one GPU",
    "reserved_gib": "most GiB that the allocator held",
    "flops": "FLOPs of a step on one GPU",
    "idle_frac": "share of the step without work",
    "parameters": "of the model",
    "loss": "",
    "device": "name of the GPU, or 'cpu'",
}


@dataclass(frozen=True)
class Measured:
    """What was measured of one GPU, or None; `source` is what it was read from, `modules` a profile's own ms a step by path.

    `of_process`: `peak_gib` is that of the whole process, as sessions and profiles on a CPU know it.
    """

    source: str
    step_ms: float | None = None
    tokens: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    flops: float | None = None
    idle_frac: float | None = None
    parameters: float | None = None
    loss: float | None = None
    device: str | None = None
    recipe: str | None = None
    emulated: str = ""
    waits: str = ""
    modules: tuple[tuple[str, float], ...] = ()
    of_process: bool = False
    notes: tuple[str, ...] = ()


def read_measured(measured: Any) -> Measured:
    """A measurement as `check` takes it. Raises TypeError for anything else, ValueError for figures that cannot be meant."""
    if isinstance(measured, Mapping):
        return _of_figures(measured)
    summary = getattr(measured, "summary", None)
    if isinstance(summary, Mapping):
        return replace(_of_profile(summary), modules=_own_ms(measured))
    if callable(summary) and hasattr(measured, "records"):
        return _of_summary(summary(), "a session")
    if hasattr(measured, "tokens_per_s") and hasattr(measured, "warmup_steps"):
        return _of_summary(measured, "a session's summary")
    raise TypeError(
        f"check() compares a plan with a Session, a Profile or a dict such as {{'step_ms': 120, 'peak_gib': 11}}, "
        f"not with a {type(measured).__name__}."
    )


def _of_figures(given: Mapping[str, Any]) -> Measured:
    known: dict[str, float] = {}
    device = None
    for name, value in given.items():
        if name not in _KEYS:
            near = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}? Known" if near else "known"
            raise ValueError(f"check() knows no figure {name!r}: {hint} are {', '.join(_KEYS)}.")
        if name == "device":
            if not isinstance(value, str):
                raise TypeError(f"device={value!r} is a {type(value).__name__}: give the GPU's name, or 'cpu'.")
            device = "cpu" if value.lower() == "cpu" else value
        else:
            known[name] = _figure(name, value)
    if not known:
        raise ValueError(
            f"check() got nothing to compare: give figures such as step_ms or peak_gib, of {', '.join(_KEYS)}."
        )
    return replace(Measured("given figures", device=device), **known)  # type: ignore[arg-type]


def _figure(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a number.")
    number, unit = float(value), f" ({_KEYS[name]})" if _KEYS[name] else ""
    if name == "idle_frac" and not 0 <= number <= 1:
        raise ValueError(f"{name}={value!r} must be a share between 0 and 1{unit}.")
    least = name in ("idle_frac", "loss")
    if not math.isfinite(number) or number < 0 or (number == 0 and not least):
        raise ValueError(f"{name}={value!r} must be a finite number above zero{unit}.")
    return number


def _of_summary(s: Any, source: str) -> Measured:
    """A Session's own summary: rates without warm-up, memory that ever was."""
    tokens = s.tokens / s.steps if s.steps else None
    rate = _known(s.tokens_per_s)
    return Measured(
        source=f"{source} of {s.steps} steps on {s.device}",
        step_ms=None if not tokens or not rate else tokens / rate * 1e3,
        tokens=tokens,
        tokens_per_s=rate,
        peak_gib=_known(s.peak_gib),
        idle_frac=_known(s.idle_frac),
        loss=_known(s.loss),
        device=s.device,
        of_process=s.device == "cpu",
        recipe=s.recipe,
        emulated=s.numerics if s.numerics not in ("", "native") else "",
    )


def _of_profile(s: Mapping[str, Any]) -> Measured:
    """A Profile's summary. The step is the one without the profiler where that was measured too."""
    wall, plain = _known(s.get("wall_ms")), _known(s.get("unprofiled_ms"))
    if wall is None:
        raise ValueError("check() found no steps in this profile: profile a few, with prof.step() after each.")
    step = plain or wall
    rate = _known(s.get("tokens_per_s"))
    notes = []
    if plain is None and (own := _known(s.get("overhead_ms"))) and own > 0.02 * wall:
        notes.append(f"the profiler's own share, about {own:.3g} ms, is in the step's {wall:.3g} ms")
    waits = {name: _known(s.get(f"{name}_wait_ms")) or 0.0 for name in ("host", "kernel", "other")}
    name, longest = max(waits.items(), key=lambda item: item[1])
    words = {"host": "the host", "kernel": "kernels that were launched", "other": "what the profile cannot name"}
    device = str(s.get("device") or "")
    return Measured(
        source=f"a profile of {s.get('steps', 0)} steps on {device or 'a device'}",
        step_ms=step,
        tokens=None if rate is None else rate * wall / 1e3,
        tokens_per_s=None if rate is None else rate * wall / step,
        peak_gib=_known(s.get("peak_gib")),
        idle_frac=(_known(s.get("idle_ms")) or 0.0) / wall if s.get("activity") == "gpu" else None,
        device="cpu" if s.get("activity") == "cpu" else device or None,
        of_process=s.get("activity") == "cpu",
        waits=f"{longest:.3g} ms of it for {words[name]}" if longest else "",
        notes=tuple(notes),
    )


def _own_ms(profile: Any) -> tuple[tuple[str, float], ...]:
    """(path, own ms a step) of a profile's modules; nothing where it has none, or where pandas is not there to list them."""
    try:
        table = profile.modules
    except (AttributeError, ModuleNotFoundError):
        return ()
    rows = zip(table["module"], table["depth"], table["self_ms"])
    # the model itself goes by its class's name: no path
    return tuple(("" if not depth and "(" not in name else str(name), float(ms)) for name, depth, ms in rows)


def _known(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) or value < 0 else float(value)
