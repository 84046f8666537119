"""Take from a profile what a dissection shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surokit.profiler import Profile
from surokit.profiler.analysis.activities import IDLE

if TYPE_CHECKING:
    import pandas as pd

ACTIVITIES = 40  # rows that are kept
OTHERS = "others"


def summed(found: Profile) -> dict[str, Any]:
    """Return what a dissection shows of a profile, as plain values: milliseconds a step."""
    s = found.summary
    return {
        **{name: s[name] for name in ("wall_ms", "busy_ms", "idle_ms", "comm_ms", "comm_exposed_ms")},
        "phases_ms": s["phases_ms"],
        **{name: s[name] for name in ("phases_exposed_ms", "phases_idle_ms", "phases_overlapped_ms")},
        **{
            name: s[name]
            for name in ("launches_per_step", "syncs_per_step", "h2d_bytes", "d2h_bytes", "steps", "activity")
        },
        "parts": found.parts.to_dict("records"),
        "activities": _longest(found.activities),
        "collectives": found.collectives.head(ACTIVITIES).to_dict("records"),
        "lost": found.lost[["cause", "ms_per_step"]].to_dict("records"),
    }


def _longest(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows that take longest, the sum of the others, and idle."""
    ran = table[table["activity"] != IDLE]
    rest = ran.iloc[ACTIVITIES:]
    others = {"activity": OTHERS, "calls": float(rest["calls"].sum()), "ms": float(rest["ms"].sum())}
    idle = table[table["activity"] == IDLE]
    return [*_rows(ran.head(ACTIVITIES)), *([others] if len(rest) else []), *_rows(idle)]


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows of plain values; what a column of numbers lacks is None."""
    return [{str(k): None if v != v else v for k, v in row.items()} for row in table.to_dict("records")]
