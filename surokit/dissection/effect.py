"""Compare cells that differ in one switch: what it brings in speed, memory and loss, and in which parts of the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit.dissection.cell import Cell
from surokit.dissection.settings import Setting
from surokit.profiler.analysis.parts import ORDER
from surokit.statistics import Interval, bootstrap_interval
from surokit.tables import html_table, text_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Pair:
    """A Pair is two cells that differ in one switch."""

    without: Cell
    with_it: Cell

    @property
    def speed(self) -> Interval | None:
        """Return tokens/s with the switch over those without, and its 95 % interval from the ratios of rounds that were measured
        beside each other."""
        a, b = self.without, self.with_it
        if a.tokens_per_s is None or b.tokens_per_s is None:
            return None
        if len(a.step_ms) != len(b.step_ms) or a.calls != b.calls or not a.step_ms:
            return Interval(float("nan"), b.tokens_per_s.mid / a.tokens_per_s.mid, float("nan"))
        tokens = b.work["tokens_per_step"] / a.work["tokens_per_step"]
        return bootstrap_interval([tokens * x / y for x, y in zip(a.step_ms, b.step_ms)])

    @property
    def gib(self) -> float | None:
        """Return the GiB at the peak that the switch adds."""
        a, b = self.without.peak_gib, self.with_it.peak_gib
        return None if a is None or b is None else b - a

    @property
    def loss(self) -> float | None:
        """Return how much larger the loss of the last step is."""
        a, b = self.without, self.with_it
        return (b.loss or 0.0) - (a.loss or 0.0) if b.compares_with(a) else None

    def parts(self) -> list[dict[str, Any]]:
        """Return how the time of each part changes, the largest change first; the changes sum to that of the step."""
        if not (self.without.profile and self.with_it.profile):
            return []
        a, b = (_times(cell) for cell in (self.without, self.with_it))
        rows = [
            {
                "part": name,
                "without_ms": a.get(name, 0.0),
                "with_ms": b.get(name, 0.0),
                "change_ms": b.get(name, 0.0) - a.get(name, 0.0),
            }
            for name in ORDER
            if name in a or name in b
        ]
        return sorted(rows, key=lambda row: -abs(row["change_ms"]))


@dataclass(frozen=True)
class Effect:
    """An Effect is what a switch brings, in each pair of cells that differ in nothing else; the first is that of the baseline."""

    switch: str
    pairs: tuple[Pair, ...]

    def table(self) -> pd.DataFrame:
        """Return one row a pair: without, with, machine, speed (ratio of tokens/s) with low and high, gib and loss
        (differences)."""
        import pandas

        return pandas.DataFrame([self._row(pair) for pair in self.pairs])

    def parts(self, pair: int = 0) -> pd.DataFrame:
        """Return how the time of each part changes in one pair: part, without_ms, with_ms, change_ms; the changes sum to the
        step's."""
        import pandas

        return pandas.DataFrame(self.pairs[pair].parts())

    def _row(self, pair: Pair) -> dict[str, Any]:
        speed = pair.speed
        return {
            "without": pair.without.name,
            "with": pair.with_it.name,
            "machine": pair.with_it.machine,
            "speed": None if speed is None else speed.mid,
            "low": speed.low if speed is not None and speed.known else None,
            "high": speed.high if speed is not None and speed.known else None,
            "gib": pair.gib,
            "loss": pair.loss,
        }

    def _lines(self) -> list[str]:
        found = []
        for pair in self.pairs:
            if pair.speed is None:
                bad = pair.with_it if pair.with_it.tokens_per_s is None else pair.without
                found.append(f"{pair.with_it.name} against {pair.without.name}: {bad.why or bad.state}")
                continue
            words = [f"{pair.speed} x tokens/s"]
            if pair.gib is not None:
                words.append(f"{pair.gib:+.3g} GiB")
            if pair.loss is not None:
                words.append("same loss" if pair.loss == 0 else f"loss {pair.loss:+.2g}")
            found.append(f"{pair.with_it.name} against {pair.without.name}: {', '.join(words)}")
        return found

    def _rows(self) -> list[list[str]]:
        return [
            [
                row["part"],
                *(f"{row[name]:{sign}.2f}" for name, sign in (("without_ms", ""), ("with_ms", ""), ("change_ms", "+"))),
            ]
            for row in self.pairs[0].parts()
        ]

    def __repr__(self) -> str:
        head = [f"What {self.switch} brings", *(f"  {line}" for line in self._lines())]
        rows = self._rows()
        return "\n".join([*head, text_table(rows, header=_HEADER, right=(1, 2, 3))] if rows else head)

    def _repr_html_(self) -> str:
        import html

        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self._lines())
        title = f"What {self.switch} brings"
        return f"<b>{html.escape(title)}</b>{lines}" + html_table(self._rows(), header=_HEADER, right=(1, 2, 3))


_HEADER = ("part", "without, ms", "with, ms", "change")


def effects(cells: Sequence[Cell], baseline: Cell, switch: str) -> tuple[str, tuple[Pair, ...]]:
    """Return the switch with its value, and the pairs. LookupError where there are none."""
    base = switches_of(baseline)
    cells = [cell for cell in cells if cell.setting]
    name, _, wanted = switch.partition("=")
    changed = {
        (key, str(value))
        for cell in cells
        for key, value in switches_of(cell).items()
        if str(value) != str(base.get(key))
    }
    if wanted:
        found = {(key, value) for key, value in changed if (key, value) == (name, wanted)}
    else:
        found = {(key, value) for key, value in changed if switch in (key, value)}
    known = ", ".join(sorted(f"{key}={value}" for key, value in changed)) or "none"
    if len(found) != 1:
        raise LookupError(
            f"effect({switch!r}): {'several switches have' if found else 'no cell has'} that; there are {known}."
        )
    key, value = next(iter(found))
    pairs = []
    for cell in cells:
        if str(switches_of(cell).get(key)) == value:
            twin = {**switches_of(cell), key: base.get(key)}
            other = next((c for c in cells if c.machine == cell.machine and switches_of(c) == twin), None)
            if other is not None:
                pairs.append(Pair(other, cell))
    if not pairs:
        raise LookupError(f"effect({switch!r}): no two cells differ in {key}={value} alone.")
    return f"{key}={value}", tuple(pairs)


def switches_of(cell: Cell) -> dict[str, Any]:
    """Return every switch of a cell that has a setting; one that it does not name has its default."""
    return {**Setting().labels(), **cell.setting}


def _times(cell: Cell) -> dict[str, float]:
    rows: Iterable[Any] = cell.profile["parts"]
    return {row["part"]: row["ms"] * cell.scale for row in rows}
