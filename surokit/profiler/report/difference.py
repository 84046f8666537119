"""Compare two profiles in a DataFrame that shows itself with both pictures. It is built only when asked for, so that pandas
loads only then.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from surokit.profiler.report.picture import Shown, difference_html
from surokit.tables import text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("metric", "before", "after", "change", "change_frac")
SHOWN = 14  # metrics that a shown difference lists
_STEP = ("wall_ms", "busy_ms", "idle_ms")  # these among them, whatever changed


def difference(before: Shown, after: Shown) -> pd.DataFrame:
    """Return metric, before, after, change, change_frac (None from 0): metrics that take longer now come first, then those
    that take less, then the metrics that are no times."""
    was, now = _numbers(before), _numbers(after)
    metrics = [m for m in was if m in now or m.startswith("module ")]
    metrics += [m for m in now if m not in was and m.startswith("module ")]
    rows = []
    for metric in metrics:
        a, b = was.get(metric, 0.0), now.get(metric, 0.0)
        rows.append((metric, a, b, b - a, (b - a) / a if a else None))
    rows.sort(key=lambda row: (not is_time(row[0]), -row[3] if is_time(row[0]) else 0.0))
    frame: pd.DataFrame = _frame_type()(rows, columns=list(COLUMNS))
    object.__setattr__(frame, "_pair", (before, after))
    return frame


def is_time(metric: str) -> bool:
    """Return whether a metric is in milliseconds a step, where less is better."""
    return metric.endswith(("_ms", " ms"))


def _numbers(shown: Shown) -> dict[str, float]:
    s, lost, modules = shown.summary, shown.tables["lost"], shown.tables["modules"]
    # a process's peak may be older than the profile
    left_out = ("steps", "warmup", *(["peak_gib"] if s["device"] == "cpu" else []))
    numbers = {k: float(v) for k, v in s.items() if isinstance(v, int | float) and k not in left_out}
    numbers |= {f"phase {phase} ms": ms for phase, ms in s["phases_ms"].items()}
    numbers |= {f"lost to {cause} ms": ms for cause, ms in zip(lost["cause"], lost["ms_per_step"])}
    return numbers | {f"module {name} ms": ms for name, ms in zip(modules["module"], modules["self_ms"])}


@cache
def _frame_type() -> Any:
    import pandas

    class Difference(pandas.DataFrame):
        """A Difference is the comparison as a DataFrame; a slice or pickle of it is an ordinary DataFrame."""

        _pair: tuple[Shown, Shown]

        @property
        def _constructor(self) -> Any:
            return pandas.DataFrame

        def __reduce__(self) -> Any:
            return pandas.DataFrame, (self.to_dict("list"),)

        def __repr__(self) -> str:
            if tuple(self.columns) != COLUMNS:  # changed in place
                return str(super().__repr__())
            before, after = self._pair
            rows = [
                (m, f"{a:,.4g}", f"{b:,.4g}", three_digits(b - a, "+"), share) for m, a, b, share in self._largest()
            ]
            table = text_table(rows, header=("ms a step", "before", "after", "change", ""), right=(1, 2, 3, 4))
            return f"before: {before.title}\nafter:  {after.title}\n{table}"

        def _repr_html_(self) -> str:
            if tuple(self.columns) != COLUMNS:
                return str(super()._repr_html_())  # type: ignore[misc]  # pandas has it
            before, after = self._pair
            rows = [(m, a, b) for m, a, b, _ in self._largest() if not m.startswith("lost to")]  # those are drawn
            return difference_html(before, after, rows)

        def _largest(self) -> list[tuple[str, float, float, str]]:
            """Return the step and the times by part that changed most, in the table's order."""
            times = [row for row in zip(*(self[c] for c in COLUMNS)) if row[0] in _STEP or row[0].endswith(" ms")]
            most = sorted(times, key=lambda row: (row[0] not in _STEP, -abs(row[3])))[:SHOWN]
            shown = {row[0] for row in most}
            return [
                (m, a, b, f"{f:+,.0%}" if f == f and f is not None else "") for m, a, b, _, f in times if m in shown
            ]

    return Difference
