"""Read what was measured of a run into one form: from a Session, a Profile or figures by hand, for `check` to set beside a plan.

Sessions and profiles are read by what they offer and not by their class: the planner imports neither. A profile's step is the one
without the profiler where that was measured too. Where it recorded the shapes of a step, it knows what its operators computed and
moved, and so the time that this takes at the rates of the planned device: its speed of light.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

from surokit.hardware.gpus import Gpu

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


class ModuleCost(NamedTuple):
    """A ModuleCost holds a module's own cost, without the modules inside it: ms and GFLOP a step, and ms at the speed of light
    (None: not known)."""

    path: str
    ms: float
    gflop: float | None = None
    light_ms: float | None = None


@dataclass(frozen=True)
class Measured:
    """A Measured holds the figures of one GPU, None where not measured; `source` names what they were read from.

    `modules` are a profile's own rows by path. Where `of_process`, `peak_gib` is that of the whole process, which is what sessions
    and profiles on a CPU know. `flops` are model FLOPs,
    `executed` those of the operators that a profile saw: attention over every key, and what is recomputed.
    """

    source: str
    step_ms: float | None = None
    tokens: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    flops: float | None = None
    executed: float | None = None
    idle_frac: float | None = None
    parameters: float | None = None
    loss: float | None = None
    device: str | None = None
    recipe: str | None = None
    emulated: str = ""
    waits: str = ""
    modules: tuple[ModuleCost, ...] = ()
    whole: ModuleCost | None = None
    of_process: bool = False
    notes: tuple[str, ...] = ()


def read_measured(measured: Any, gpu: Gpu | None = None) -> Measured:
    """Read a Session, a Profile or a dict of figures as a Measured; at the rates of `gpu` a profile knows its speed of light.

    Raises TypeError for anything else, ValueError for figures that cannot be meant.
    """
    if isinstance(measured, Mapping):
        return _of_figures(measured)
    summary = getattr(measured, "summary", None)
    if isinstance(summary, Mapping):
        whole, modules = _modules(measured, gpu)
        return replace(_of_profile(summary), modules=modules, whole=whole)
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
    """Read a Session's summary: its rates are those after warm-up, its memory is the most that ever was. Tokens are those of all
    its processes."""
    tokens = s.tokens / s.steps / s.processes if s.steps else None
    rate = None if _known(s.tokens_per_s) is None else s.tokens_per_s / s.processes
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
    """Read a Profile's summary. The step is the one without the profiler where that was measured too."""
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
        executed=None if (gflop := _known(s.get("gflop_per_step"))) is None else gflop * 1e9,
        idle_frac=(_known(s.get("idle_ms")) or 0.0) / wall if s.get("activity") == "gpu" else None,
        device="cpu" if s.get("activity") == "cpu" else device or None,
        of_process=s.get("activity") == "cpu",
        waits=f"{longest:.3g} ms of it for {words[name]}" if longest else "",
        notes=tuple(notes),
    )


def _modules(profile: Any, gpu: Gpu | None) -> tuple[ModuleCost | None, tuple[ModuleCost, ...]]:
    """Return (the whole step with its time at the speed of light, a profile's rows by path), and (None, ()) where the profile has
    no modules or pandas is not installed."""
    try:
        table = profile.modules
    except (AttributeError, ModuleNotFoundError):
        return None, ()
    light: dict[str, tuple[float, float]] = {}
    whole = None
    with suppress(AttributeError, ValueError):  # no shapes were recorded, or a rate of the device is not known
        found = None if gpu is None else profile.speed_of_light(gpu)
        columns = [] if found is None else [found[c] for c in ("module", "self_ms", "light_ms", "gflop")]
        for name, ms, light_ms, gflop in zip(*columns):
            whole = whole or ModuleCost("", float(ms), float(gflop), float(light_ms))  # the first row
            light[name] = float(gflop), float(light_ms)
    rows = zip(table["module"], table["depth"], table["self_ms"])
    # the model itself goes by its class's name: no path
    own = (
        ModuleCost("" if not depth and "(" not in name else str(name), float(ms), *light.get(name, ()))
        for name, depth, ms in rows
    )
    return whole, tuple(own)


def _known(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) or value < 0 else float(value)
