"""Take from a profile what a dissection shows of it."""

from __future__ import annotations

from typing import Any

from surokit.profiler import Profile

OPERATORS = 40  # rows that are kept


def summed(found: Profile) -> dict[str, Any]:
    """Return what a dissection shows of a profile, as plain values: milliseconds a step."""
    s = found.summary
    return {
        **{name: s[name] for name in ("wall_ms", "busy_ms", "idle_ms", "comm_ms", "comm_exposed_ms")},
        "phases_ms": s["phases_ms"],
        "phases_idle_ms": s["phases_idle_ms"],
        **{
            name: s[name]
            for name in ("launches_per_step", "syncs_per_step", "h2d_bytes", "d2h_bytes", "steps", "activity")
        },
        "parts": found.parts.to_dict("records"),
        "ops": found.ops.head(OPERATORS)[["op", "calls", "self_ms"]].to_dict("records"),
        "kernels": found.kernels.head(OPERATORS)[["kernel", "calls", "self_ms"]].to_dict("records"),
        "collectives": found.collectives.head(OPERATORS).to_dict("records"),
        "lost": found.lost[["cause", "ms_per_step"]].to_dict("records"),
    }
