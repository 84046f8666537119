"""Hold the cells of a dissection, of one machine or several: tables by step, phase, module and operator, and what a switch
brings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from surokit.dissection.brought import brought
from surokit.dissection.cell import FORMAT, Cell
from surokit.dissection.effect import Effect, Pair, effects, switches_of
from surokit.dissection.settings import BASELINE, WORK
from surokit.offload.zenflow import UPDATE_EVERY
from surokit.profiler.analysis.parts import IN_LAYERS, ORDER
from surokit.statistics import ROUNDS, TOO_FEW
from surokit.tables import html_table, text_table
from surokit.units import counted, three_digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Level = Literal["step", "phase", "module", "operator", "communication"]
BUSY = 0.5  # cores that others use, from which a cell on a CPU is called disturbed
HEAD, CELLS, PROFILES = "dissection.json", "cells", "profiles"
PHASE_COLUMNS = ("wall_ms", "busy_ms", "exposed_ms", "idle_ms", "overlapped_ms")
_PHASES = ("forward", "backward", "optimizer")


class Dissection:
    """A Dissection is what `surokit.dissect` found. It prints as its table by step and shows itself in a notebook.

    cells: in the order in which they were asked for. head: what all cells of a folder share: model, data, steps, machine,
    environment, and the order of the cells.
    """

    def __init__(self, cells: Iterable[Cell], head: Mapping[str, Any] | None = None) -> None:
        self.cells = tuple(cells)
        self.head = dict(head or {})

    def add(self, other: Dissection | str | Path, machine: str = "") -> Dissection:
        """Return one with the cells of another machine or program beside these.

        other: a Dissection, its folder, a JSON file of cells, or a log of Megatron-LM; docs/dissecting.md has what a file holds.
        What `dissect` did not measure is marked as brought. machine: its name in the tables, the device's without one. ValueError
        where a cell of that name and machine is there already, and for a file that holds none.
        """
        if isinstance(other, Dissection):
            cells: Sequence[Cell] = other.cells
        elif (Path(other) / HEAD).exists():
            cells = Dissection.load(other).cells
        else:
            cells = brought(Path(other))
        cells = [replace(cell, machine=machine or cell.machine) for cell in cells]
        there = {(cell.name, cell.machine) for cell in self.cells}
        if double := next((cell for cell in cells if (cell.name, cell.machine) in there), None):
            raise ValueError(
                f"add(): there is a cell {double.name!r} of {double.machine!r} already: give add(..., machine=) another name."
            )
        return Dissection([*self.cells, *cells], self.head)

    @classmethod
    def load(cls, folder: str | Path) -> Dissection:
        """Read the folder that `dissect` kept, on any machine. FileNotFoundError or ValueError for another one."""
        place = Path(folder)
        if not (place / HEAD).exists():
            raise FileNotFoundError(f"There is no dissection in {place}: surokit.dissect(..., folder=) makes one.")
        try:
            head = json.loads((place / HEAD).read_text())
            if head["format"] != FORMAT:
                raise ValueError(f"{place} has the format {head['format']}, and this package reads {FORMAT}.")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{place / HEAD} is damaged ({error}): measure again in another folder.") from error
        cells = sorted(map(Cell.load, (place / CELLS).glob("*.json")), key=lambda cell: cell.name)
        return cls(cells, head).in_order(head["order"])

    def __getitem__(self, name: str) -> Cell:
        found = [cell for cell in self.cells if cell.name == name or _label(cell, True) == name]
        if not found:
            raise KeyError(f"There is no cell {name!r}: there are {', '.join(cell.name for cell in self.cells)}.")
        return found[0]

    @property
    def baseline(self) -> Cell:
        """Return the cell that the others are compared with. LookupError where there is none."""
        found = next((cell for cell in self.cells if cell.name == BASELINE), None)
        if found is None:
            raise LookupError(
                f"There is no cell {BASELINE!r} to compare with: there are {', '.join(cell.name for cell in self.cells) or 'none'}."
            )
        return found

    def in_order(self, names: Sequence[str]) -> Dissection:
        """Return the same with the cells of these names first."""
        place = {name: i for i, name in enumerate(names)}
        return Dissection(sorted(self.cells, key=lambda cell: place.get(cell.name, len(place))), self.head)

    # -- tables

    def table(self, level: Level = "step", cell: str | None = None) -> pd.DataFrame:
        """Return a DataFrame.

        "step": one row a cell: tokens_per_s with its interval low to high, step_ms, planned_ms, peak_gib, planned_gib, idle
            (share), loss, loss_change against the baseline of the same work, state, why.
        "phase": one row a cell and phase, in ms: wall_ms, of which busy_ms is what it computes, exposed_ms what it exchanges or
            waits for while nothing else runs, and idle_ms the rest; overlapped_ms is exchanged while it computes, in the phase
            that asked for it. The phases are forward, backward, optimizer and other; prefill and decode where tokens are generated.
        "module": one row a part of the decoder, in ms with the time in which it was waited; one column a cell. The rows sum to
        the step.
        "operator": the same by operator, on a GPU by kernel and copy, with collectives by their size and idle as rows; beyond
            the longest 40 they are the row `others`.
        "communication": one row a cell, collective and size: cell, collective, bytes, calls and ms a step; ms is from begin to
        end, with what is waited for other processes, and may pass while the process computes, so that it sums to nothing.

        cell: for "module" and "operator", one cell with the columns forward_ms, backward_ms, idle_ms (module), ms and share.
        Times by phase, module and operator are those of profiled steps times `scale`, so that they sum to a step without the
        profiler.
        """
        import pandas

        if level not in get_args(Level):
            raise ValueError(f"table({level!r}): the level is one of {', '.join(get_args(Level))}.")
        several = self._has_machines
        if level == "step":
            return pandas.DataFrame([self._step_row(one) for one in self.cells])
        profiled = [one for one in self.cells if one.profile]
        if level == "phase":
            return pandas.DataFrame(
                [{"cell": _label(one, several), **row} for one in profiled for row in phase_rows(one)],
                columns=["cell", "phase", *PHASE_COLUMNS],
            )
        if level == "communication":
            chosen = profiled if cell is None else [self[cell]]
            rows = [
                {"cell": _label(one, several), **row} for one in chosen for row in one.profile.get("collectives", ())
            ]
            return pandas.DataFrame(rows, columns=["cell", "collective", "bytes", "calls", "ms"])
        rows_of = _module_rows if level == "module" else _operator_rows
        if cell is not None:
            one = self[cell]
            if not one.profile:
                raise ValueError(
                    f"table({level!r}, cell={cell!r}): the cell has no profile, since it is '{one.state}'."
                )
            return pandas.DataFrame(rows_of(one))
        key = "part" if level == "module" else "operator"
        columns = {_label(one, several): {row[key]: row["ms"] for row in rows_of(one)} for one in profiled}
        order = (
            list(ORDER)
            if level == "module"
            else sorted(
                {name for found in columns.values() for name in found},
                key=lambda name: -max(c.get(name, 0.0) for c in columns.values()),
            )
        )
        frame = pandas.DataFrame(columns)
        return frame.reindex([name for name in order if name in frame.index]).fillna(0.0).rename_axis(key)

    @property
    def generates(self) -> bool:
        """Return whether tokens were generated: a step makes one of each row then, and there is no loss."""
        return any(cell.prefill_ms is not None for cell in self.cells)

    @property
    def _has_machines(self) -> bool:
        return len({cell.machine for cell in self.cells}) > 1

    def _same_work(self, cell: Cell) -> Cell | None:
        """Return the cell of the baseline's switches on the cell's machine and of its work."""
        base = next((c for c in self.cells if c.name == BASELINE), None)
        if base is None or not cell.setting:  # brought without one
            return None
        given = switches_of(cell)
        wanted = {**switches_of(base), **{name: given[name] for name in WORK}}
        return next(
            (c for c in self.cells if c.machine == cell.machine and c.setting and switches_of(c) == wanted), None
        )

    def _step_row(self, cell: Cell) -> dict[str, Any]:
        base, rate = self._same_work(cell), cell.tokens_per_s
        change = None if base is None or not cell.compares_with(base) else (cell.loss or 0.0) - (base.loss or 0.0)
        row: dict[str, Any] = {"cell": cell.name}
        if self._has_machines:
            row["machine"] = cell.machine
        if self.generates:
            row["prefill_ms"] = cell.prefill_ms
            row["same_output"] = None if base is None else cell.same_output(base)
        return row | {
            "tokens_per_s": None if rate is None else rate.mid,
            "low": rate.low if rate is not None and rate.known else None,
            "high": rate.high if rate is not None and rate.known else None,
            "step_ms": cell.ms,
            "planned_ms": cell.planned.get("step_ms"),
            "peak_gib": cell.peak_gib,
            "planned_gib": cell.planned_gib,
            "idle": cell.idle,
            "loss": cell.loss,
            "loss_change": change,
            "batch": cell.work.get("batch", cell.setting.get("batch")),
            "state": f"{cell.state}{', brought' * (cell.origin != '')}",
            "why": cell.why,
        }

    # -- what a switch brings

    def effect(self, switch: str) -> Effect:
        """Say what a switch brings: speed with an interval, memory, loss, and in which parts.

        switch: "recompute=full", or the value alone ("full", "flash") where only one switch has it, or a switch with two values.
        Cells that differ in nothing else are compared; there is one pair for each amount of work and machine, and for each
        combination that was measured. LookupError where no such pair was measured.
        """
        return Effect(*effects(self.cells, self.baseline, switch))

    # -- shown

    def text_rows(self) -> list[list[str]]:
        rows = []
        for cell in self.cells:
            row = self._step_row(cell)
            rate, base = cell.tokens_per_s, self._same_work(cell)
            interval = "" if rate is None or not rate.known else f"{rate.low:,.0f} to {rate.high:,.0f}"
            speed = None if base is None or base is cell else Pair(base, cell).speed
            gain = "" if speed is None else f"{speed.mid:.2f} x"
            if speed is not None and speed.known:
                gain += f", {speed.low:.2f} to {speed.high:.2f}"
            rows.append(
                [
                    _label(cell, self._has_machines),
                    "" if rate is None else f"{rate.mid:,.0f}",
                    interval,
                    gain,
                    *([_digits(row["prefill_ms"])] if self.generates else []),
                    *_beside(row["step_ms"], row["planned_ms"]),
                    *_beside(row["peak_gib"], row["planned_gib"]),
                    "" if cell.idle is None else f"{cell.idle:.0%}",
                    *self._outcome(row, cell is base),
                    "" if cell.is_measured and not cell.origin else row["state"],
                ]
            )
        return rows

    def _outcome(self, row: Mapping[str, Any], is_base: bool) -> list[str]:
        """Return the cells on what came out: the loss and its change, or whether the text is that of the baseline."""
        if self.generates:
            return ["" if is_base or row["same_output"] is None else "same" if row["same_output"] else "other"]
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        return [loss, "" if is_base else _change(row["loss_change"])]

    @property
    def header(self) -> tuple[str, ...]:
        """Return the heads of the columns that are shown by step."""
        before = ("prefill ms", "a token, ms") if self.generates else ("step ms",)
        after = ("text",) if self.generates else ("loss", "change")
        return ("cell", "tokens/s", "95 %", "speed", *before, "planned", "peak GiB", "planned", "idle", *after, "")

    @property
    def title(self) -> str:
        machine = "several machines" if self._has_machines else self.cells[0].machine if self.cells else ""
        return f"Dissection of {_what(self.head.get('what'))} on {machine}" if machine else "Dissection"

    @property
    def notes(self) -> list[str]:
        """Return what has to be known beside the table: why cells are missing, and which are brought."""
        found = [f"{cell.name}: {cell.why}" for cell in self.cells if cell.why]
        weights = {
            cell.work["weights"] for cell in self.cells if cell.work.get("weights") and not cell.setting.get("model")
        }
        if len(weights) > 1:
            found.append("the cells did not start from the same weights, so their losses cannot be compared")
        found += [
            f"{cell.name}: its engine changed the weights before the first step: {cell.work['changed']}"
            for cell in self.cells
            if cell.work.get("changed")
        ]
        found += self._rounds()
        steps = self.head.get("steps", UPDATE_EVERY)
        if uneven := [c.name for c in self.cells if steps % UPDATE_EVERY and c.setting.get("optimizer") == "zenflow"]:
            found.append(
                f"{', '.join(uneven)}: {counted(steps, 'step')} of a round hold more or fewer updates on the host than the mean of "
                f"one in {UPDATE_EVERY}: take a multiple of {UPDATE_EVERY}"
            )
        if busy := [cell.name for cell in self.cells if cell.cores_in_use > BUSY]:
            found.append(f"other programs used the processor while {', '.join(busy)} ran, so their times say little")
        if all(cell.planned.get("step_ms") is None for cell in self.cells) and self.cells:
            found.append(
                "steps have no planned time: surokit.calibrate() measures this machine's rates once, 20 seconds"
            )
        found += [f"{cell.name}: brought from {cell.origin}" for cell in self.cells if cell.origin]
        return found

    def _rounds(self) -> list[str]:
        """Say how far rounds of the same cell differ, which cells were not measured beside the baseline, and whose losses vary."""
        found = []
        ours = [cell for cell in self.cells if cell.step_ms and not cell.origin]
        if fewest := min((len(cell.step_ms) for cell in ours), default=0):
            if fewest < ROUNDS:
                found.append(f"{counted(fewest, 'round')} of all cells in turn, {TOO_FEW}: {ROUNDS} give an interval")
            most = max(max(cell.step_ms) / min(cell.step_ms) for cell in ours)
            if fewest > 1:
                found.append(f"the same cell's steps took up to {most:.2f} times as long in one round as in another")
        apart = [c.name for c in ours if (base := self._same_work(c)) is not None and not _beside_each_other(c, base)]
        if apart:
            found.append(
                f"{', '.join(apart)} {'was' if len(apart) == 1 else 'were'} measured in another call than the baseline, so their "
                "speeds compare the machine at two times"
            )
        found += [
            f"{cell.name}: the last loss differed by up to {vary:.2g} between rounds"
            for cell in ours
            if (vary := cell.work.get("loss_range"))
        ]
        return found

    def __repr__(self) -> str:
        table = text_table(self.text_rows(), header=self.header, right=range(1, len(self.header) - 1))
        return "\n".join([self.title, table, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        import html

        table = html_table(self.text_rows(), header=self.header, right=range(1, len(self.header) - 1), title=self.title)
        return table + "".join(f"<div><small>{html.escape(note)}</small></div>" for note in self.notes)

    def plot(self) -> Figure:
        """Draw the time of a token in each cell by parts of the decoder, and tokens/s against memory with the frontier."""
        from surokit.dissection.picture import picture

        return picture(self)

    def report(self, folder: str | Path) -> Path:
        """Write a report in Markdown with its pictures and the raw cells beside it; return the file."""
        from surokit.dissection.report import write

        return write(self, Path(folder))


def _what(what: str | None) -> str:
    return {"tune": "fine-tuning", "train": "a training step", "infer": "generation"}.get(what or "", "steps")


def _label(cell: Cell, several: bool) -> str:
    return f"{cell.name} on {cell.machine}" if several else cell.name


def _beside_each_other(cell: Cell, base: Cell) -> bool:
    return all(one == other for one, other in zip(cell.calls, base.calls))


def _beside(measured: float | None, planned: float | None) -> tuple[str, str]:
    return (_digits(measured), _digits(planned))


def _digits(value: float | None) -> str:
    return "" if value is None else three_digits(value)


def _change(change: float | None) -> str:
    return "" if change is None else "same" if change == 0 else f"{change:+.2g}"


def phase_rows(cell: Cell) -> list[dict[str, Any]]:
    """Return the phases of a cell's step, which sum to it; of generation the prefill and a token's step."""
    p = cell.profile
    if (prefill := p.get("prefill")) is not None:
        both = (("prefill", prefill, cell.prefill_ms or 0.0), ("decode", p, cell.ms or 0.0))
        return [{"phase": name, **_divided(ms, ms * of["idle_ms"] / of["wall_ms"], 0.0, 0.0)} for name, of, ms in both]
    columns = ("phases_ms", "phases_idle_ms", "phases_exposed_ms", "phases_overlapped_ms")
    named = {name: [p[column][name] * cell.scale for column in columns] for name in _PHASES}
    whole = [sum(p[column].values()) * cell.scale for column in columns]
    named["other"] = [all_of - sum(each) for all_of, each in zip(whole, zip(*named.values()))]
    return [{"phase": name, **_divided(*times)} for name, times in named.items()]


def _divided(wall: float, idle: float, exposed: float, overlapped: float) -> dict[str, float]:
    return dict(zip(PHASE_COLUMNS, (wall, wall - exposed - idle, exposed, idle, overlapped)))


def _module_rows(cell: Cell) -> list[dict[str, Any]]:
    whole = cell.profile["wall_ms"]
    if (prefill := cell.profile.get("prefill")) is not None:
        return _generated_rows(cell, prefill)
    return [
        {
            "part": part["part"],
            "in": "DecoderLayer" if part["part"] in IN_LAYERS else "",
            **{name: part[name] * cell.scale for name in ("forward_ms", "backward_ms", "idle_ms", "ms")},
            "share": part["ms"] / whole,
        }
        for part in cell.profile["parts"]
    ]


def _generated_rows(cell: Cell, prefill: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of the prefill and of a token's step, `ms`."""
    factor = (cell.prefill_ms or 0.0) / prefill["wall_ms"]
    first = {part["part"]: part["ms"] * factor for part in prefill["parts"]}
    each = {part["part"]: part["ms"] * cell.scale for part in cell.profile["parts"]}
    whole = sum(each.values())
    return [
        {
            "part": name,
            "in": "DecoderLayer" if name in IN_LAYERS else "",
            "prefill_ms": first.get(name, 0.0),
            "ms": each.get(name, 0.0),
            "share": each.get(name, 0.0) / whole,
        }
        for name in ORDER
        if name in first or name in each
    ]


def _operator_rows(cell: Cell) -> list[dict[str, Any]]:
    whole = cell.profile["wall_ms"]
    return [
        {
            "operator": row["activity"],
            "calls": row["calls"],
            "ms": row["ms"] * cell.scale,
            "share": row["ms"] / whole,
        }
        for row in cell.profile["activities"]
    ]


__all__ = ["CELLS", "HEAD", "PROFILES", "Dissection", "Level"]
