"""Merge the profiles of processes that train together: `RankProfiles` says who waits for whom, and what communication costs.

Each rank makes a profile of its own. They are gathered while the processes run, or read from files, and merged by matching their
collectives (analysis/waiting.py says how).
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.collectives import collectives
from surokit.profiler.analysis.roles import Observed, Table, ms, table
from surokit.profiler.analysis.waiting import Matched, by_rank_waited_for
from surokit.profiler.report.advice import advise_ranks
from surokit.profiler.report.picture import BLUE, GREEN, GREY, VERMILION, Lane, rows_svg, swatch
from surokit.profiler.report.profile import FORMAT, Profile
from surokit.tables import html_table, text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = (".json", ".json.gz")
_COLORS = {"compute": BLUE, "transfer": GREEN, "waiting": VERMILION, "idle": GREY}
_ROWS = 8  # of the table of waits, shown


class RankProfiles:
    """A RankProfiles holds the profiles of processes that train together, merged. Times are milliseconds a step unless a name
    says otherwise; it is not changed once it is made, can be pickled, and is saved to a folder.

    `profiles` are those of the ranks, in order of rank; `lost` of each names what was waiting for another rank.
    """

    def __init__(self, profiles: Iterable[Profile]) -> None:
        """Merge profiles of one run, one of each rank, in any order; where no profile knows its rank, their order is taken.

        Raises ValueError where there is none, where two are of one rank, or where only some know their rank.
        """
        given = _by_rank(list(profiles))
        self._matched = Matched([replace(collectives(Observed(p._done())), rank=n) for n, p in given.items()])
        parts = self._matched.exposed
        self.profiles = tuple(p._merged(part.waited) for p, part in zip(given.values(), parts))
        self._tables = {name: build(self._matched, self.profiles) for name, build in _TABLES.items()}
        self._summary = _summary(self._tables["ranks"], len(self._matched))
        self._tables["advice"] = advise_ranks(self._summary, self._tables["ranks"])

    # ------------------------------------------------------------------------------------------------ where they come from

    @classmethod
    def gather(cls, profile: Profile) -> RankProfiles | None:
        """Gather the profiles of all ranks on rank 0, which gets them merged; the others get None. Every rank calls it, after its
        block. A process that trains alone gets its own.

        Profiles travel pickled through torch.distributed's default group. Raises RuntimeError for a profile that still
        runs.
        """
        profile._done()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls([profile])
        first = torch.distributed.get_rank() == 0
        found: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
        torch.distributed.gather_object(profile, found, dst=0)
        return None if found is None else cls(found)

    @classmethod
    def load(cls, paths: str | Path | Iterable[str | Path]) -> RankProfiles:
        """Read the profiles of several ranks: a folder, or files. Each is one that `Profile.save` wrote or a Chrome trace, as
        torch.profiler exports; of a folder all that end in .json and .json.gz, in order of name.

        Raises FileNotFoundError where nothing is there, and the errors of `Profile.load`, `Profile.from_trace` and
        `RankProfiles`.
        """
        if isinstance(paths, str | Path):
            folder = Path(paths)
            found = [f for f in folder.glob("*") if f.name.endswith(_SUFFIXES)]
            files = sorted(found, key=_by_number) if folder.is_dir() else [folder]
            if not files:
                raise FileNotFoundError(
                    f"{folder} holds no profile and no trace: no file there ends in .json or .json.gz"
                )
        else:
            files = [Path(path) for path in paths]
        return cls([Profile.load(file) if _is_saved(file) else Profile.from_trace(file) for file in files])

    def save(self, folder: str | Path) -> Path:
        """Write each rank's profile into a folder, rank0.json.gz and so on, from which `load` merges them again, and return the
        folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for number, profile in zip(self.numbers, self.profiles):
            profile.save(target / f"rank{number}.json.gz")
        return target

    # ------------------------------------------------------------------------------------------------ figures and tables

    def __len__(self) -> int:
        return len(self.profiles)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the ranks, which `profiles` are in the order of."""
        return tuple(rank.rank for rank in self._matched.ranks)

    @property
    def exposed_ms(self) -> float:
        """Return the communication under which a rank computes nothing, milliseconds a step, the mean of the ranks: the sum of
        `transfer_ms` and `skew_ms`."""
        return float(self._summary["exposed_ms"])

    @property
    def transfer_ms(self) -> float:
        """Return the part of `exposed_ms` in which data moves."""
        return float(self._summary["transfer_ms"])

    @property
    def skew_ms(self) -> float:
        """Return the part of `exposed_ms` that was waiting for a rank that had not yet arrived."""
        return float(self._summary["skew_ms"])

    @property
    def summary(self) -> dict[str, Any]:
        """Return figures of all ranks, by name: means over the ranks, milliseconds a step.

        wall_ms = compute_ms + transfer_ms + skew_ms + idle_ms, exposed_ms = transfer_ms + skew_ms; slowest_rank is the rank that
        the others wait for most, less what it waits for them (None where nobody waits): a rank that is late by chance is as
        often early. slowest_ms is that difference, shared among all ranks; ranks, steps (the fewest of a rank),
        collectives_per_step (that were matched), device.
        """
        return dict(self._summary)

    def _frame(self, name: str) -> pd.DataFrame:
        import pandas

        return pandas.DataFrame(self._tables[name])

    @property
    def ranks(self) -> pd.DataFrame:
        """Return one row for each rank.

        Columns: rank, device, steps; wall_ms = compute_ms + transfer_ms + skew_ms + idle_ms, and exposed_ms = transfer_ms +
        skew_ms; caused_ms (what the others together wait for it) and caused_share of all such waiting; clock_us (to add to
        the rank's times for those of the first rank) and residual_us (how far the ends of collectives scatter around it),
        None where no collective connects the two.
        """
        return self._frame("ranks")

    @property
    def waits(self) -> pd.DataFrame:
        """Return who waits for whom, the longest first.

        Columns: rank, waits_for (a rank), ms (exposed, a step), share of the waiting rank's step, collectives (a step, in which
        it waited for that rank).
        """
        return self._frame("waits")

    @property
    def collectives(self) -> pd.DataFrame:
        """Return one row for each matched collective and rank that takes part, in order of time.

        Columns: collective (its number), name, group ("" where it is not known), step, nbytes (of the larger of input and
        output on one rank, None where not known), rank, start_ms (since the first rank's first step, on its clock), ms
        (duration), transfer_ms (the shortest duration of a rank), wait_ms (the rest of this one's), last_rank (the last to
        arrive).
        """
        return self._frame("collectives")

    @property
    def lost(self) -> pd.DataFrame:
        """Return the lost time of all ranks by cause: `Profile.lost` of each, with the rank as the first column."""
        import pandas

        frames = [p.lost.assign(rank=number) for number, p in zip(self.numbers, self.profiles)]
        found = pandas.concat(frames, ignore_index=True)
        return found[["rank", *(column for column in found.columns if column != "rank")]]

    @property
    def advice(self) -> pd.DataFrame:
        """Return the advice on the ranks together, numbered from 1; that of each rank is its profile's.

        Columns: rule, advice, evidence, gain_ms, file, line.
        """
        frame = self._frame("advice")
        frame.index += 1
        return frame

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on what could not be matched, and on the clocks."""
        notes = list(self._matched.notes)
        if len(self) > 1 and not len(self._matched):
            notes.append("no collective was matched in these steps, so nobody is seen to wait for another rank")
        ranks = self._tables["ranks"]
        known = [
            (abs(clock), residual)
            for clock, residual in zip(ranks["clock_us"], ranks["residual_us"])
            if clock is not None
        ]
        if len(known) > 1:
            offset, residual = (max(values) for values in zip(*known))
            notes.append(
                f"the ranks' clocks differ by up to {three_digits(offset)} us, judged by the ends of collectives, which scatter by "
                f"up to {three_digits(residual)} us (median)"
            )
        if len({p.summary["steps"] for p in self.profiles}) > 1:
            notes.append("the ranks were profiled over different numbers of steps")
        return tuple(notes)

    # ------------------------------------------------------------------------------------------------ showing

    def timeline(self, step: int = 0) -> str:
        """Draw one step of all ranks as an inline SVG (text), on the first rank's clock. Raises IndexError for a step that no rank
        has."""
        matched, most = self._matched, max(len(rank.windows) for rank in self._matched.ranks)
        if not 0 <= step < most:
            raise IndexError(f"the profiles hold steps 0 to {most - 1}, not {step}")
        rows, begins, stops = [], [], []
        for r, (rank, clock) in enumerate(zip(matched.ranks, matched.clocks)):
            if step >= len(rank.windows):
                continue
            apart = matched.ranks[0].begin - rank.begin if clock.offset_ns is None else clock.offset_ns
            begin, stop = (at + apart for at in rank.windows[step])
            begins.append(begin)
            stops.append(stop)
            layers = {what: (start + apart, end + apart) for what, (start, end) in matched.layers(r).items()}
            compute, transfer, around = (layers.pop(what) for what in ("compute", "transfer", "around"))
            waiting = [
                Lane(f"waiting for rank {matched.ranks[q].rank}", VERMILION, *_within(layer, begin, stop))
                for q, layer in reversed(layers.items())
                if isinstance(q, int)
            ]
            whole = np.array([begin], np.int64), np.array([stop], np.int64)
            lanes = [
                Lane("idle", GREY, *whole),
                Lane("transfer", GREEN, *_within(around, begin, stop)),
                *waiting,
                Lane("transfer", GREEN, *_within(transfer, begin, stop)),
                Lane("compute", BLUE, *_within(compute, begin, stop)),
            ]
            rows.append((f"rank {rank.rank}", lanes))
        begin, stop = min(begins), max(stops)
        return rows_svg(f"step {step}, {three_digits((stop - begin) / 1e6)} ms", rows, begin, stop)

    def _headline(self) -> str:
        s = self._summary
        return (
            f"{s['ranks']} ranks, {s['steps']} step{'s' * (s['steps'] != 1)} on {s['device']}, "
            f"{three_digits(s['wall_ms'])} ms a step: {s['exposed_ms'] / (s['wall_ms'] or 1):.1%} exposed communication "
            f"({three_digits(s['transfer_ms'])} ms transfer, {three_digits(s['skew_ms'])} ms waiting for other ranks)"
        )

    def _cells(self) -> tuple[list[list[str]], list[list[str]]]:
        """Return the cells of both tables that are shown."""
        columns = ("wall_ms", "compute_ms", "transfer_ms", "skew_ms", "idle_ms", "caused_ms")
        ranks, waits = self._tables["ranks"], self._tables["waits"]
        first = [[str(rank), *(f"{ranks[c][i]:.3f}" for c in columns)] for i, rank in enumerate(ranks["rank"])]
        rows = list(zip(*(waits[c] for c in ("rank", "waits_for", "ms", "share", "collectives"))))[:_ROWS]
        return first, [[str(a), str(b), f"{t:.3f}", f"{share:.1%}", f"{n:.3g}"] for a, b, t, share, n in rows]

    def __repr__(self) -> str:
        ranks, waits = self._cells()
        lines = [f"Profiles of {self._headline()}", text_table(ranks, header=_RANK_HEADER, right=range(7))]
        if waits:
            lines.append(text_table(waits, header=_WAIT_HEADER, right=range(5)))
        advice = self._tables["advice"]
        for number, (text, gain) in enumerate(zip(advice["advice"], advice["gain_ms"]), 1):
            lines.append(f"  {number}. {text} (up to {three_digits(gain)} ms a step)")
        lines.extend(f"  - {note}" for note in self.notes)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        ranks, waits = self._cells()
        legend = " ".join(f"{swatch(color)} {what}" for what, color in _COLORS.items())
        parts = [
            '<div class="surokit-ranks" style="max-width:860px;overflow-x:auto">',
            f"<p><b>{escape(self._headline())}</b></p>",
            self.timeline(self._summary["steps"] // 2),
            f'<div style="font-size:11px">{legend}</div>',
            html_table(ranks, header=_RANK_HEADER, right=range(7), title="Ranks, ms a step"),
        ]
        if waits:
            parts.append(html_table(waits, header=_WAIT_HEADER, right=range(5), title="Who waits for whom"))
        if texts := self._tables["advice"]["advice"]:
            parts.append("<p><b>Advice</b></p><ol>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ol>")
        parts.append('<p style="opacity:0.75">' + "<br/>".join(map(escape, self.notes)) + "</p></div>")
        return "".join(parts)


_RANK_HEADER = ("rank", "wall ms", "compute", "transfer", "waiting", "idle", "others wait for it")
_WAIT_HEADER = ("rank", "waits for", "ms a step", "share", "collectives a step")


def _by_rank(profiles: list[Profile]) -> dict[int, Profile]:
    """Return the profiles by the number of their rank, in order."""
    if not profiles:
        raise ValueError("there is no profile to merge: give one of each rank")
    known = [p._done().rank for p in profiles]
    numbers = [number for number in known if number is not None] or list(range(len(profiles)))
    if len(numbers) < len(profiles):
        raise ValueError(
            f"only some of the profiles say which rank they are of ({known}): give profiles of one run, all recorded alike"
        )
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"several profiles are of one rank ({numbers}): give one profile of each rank")
    return {number: profiles[i] for number, i in sorted(zip(numbers, range(len(numbers))))}


def _by_number(file: Path) -> list[Any]:
    """Return a key that sorts rank2 before rank10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]


def _is_saved(file: Path) -> bool:
    """Return whether a file is one that `Profile.save` wrote, by how it begins."""
    if not file.is_file():
        return False
    with file.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(file) if zipped else file.open("rb") as opened:
            return f'"{FORMAT}"'.encode() in opened.read(64)
    except (OSError, EOFError):
        return False


def _within(layer: tuple[tl.Int, tl.Int], begin: int, stop: int) -> tuple[tl.Int, tl.Int]:
    """Cut a layer to the step: what another step waited for is not of this one."""
    return tl.clip(*layer, begin, stop)


# ---------------------------------------------------------------------------------------------------------------- tables


def _ranks_table(matched: Matched, profiles: tuple[Profile, ...]) -> Table:
    caused = by_rank_waited_for(matched.exposed)
    whole = sum(caused.values()) or 1
    rows = []
    for rank, part, clock, profile in zip(matched.ranks, matched.exposed, matched.clocks, profiles):
        n = len(rank.windows)
        parts = (part.wall_ns, part.compute_ns, part.exposed_ns, part.transfer_ns, part.skew_ns, part.idle_ns)
        mine = caused.get(rank.rank, 0)
        clocks = [None if ns is None else ns / 1e3 for ns in (clock.offset_ns, clock.residual_ns)]
        rows.append(
            (
                rank.rank,
                profile.summary["device"],
                n,
                *(ms(ns) / n for ns in parts),
                ms(mine) / n,
                mine / whole,
                *clocks,
            )
        )
    figures = "wall_ms compute_ms exposed_ms transfer_ms skew_ms idle_ms caused_ms caused_share clock_us residual_us"
    return table(f"rank device steps {figures}", rows)


def _waits_table(matched: Matched, profiles: tuple[Profile, ...]) -> Table:
    rows = []
    for rank, part in zip(matched.ranks, matched.exposed):
        n = len(rank.windows)
        for other, ns, count in part.waited:
            rows.append((rank.rank, other, ms(ns) / n, ns / max(part.wall_ns, 1), count / n))
    rows.sort(key=lambda row: -row[2])
    return table("rank waits_for ms share collectives", rows)


def _collectives_table(matched: Matched, profiles: tuple[Profile, ...]) -> Table:
    rows = []
    origin = matched.ranks[0].begin
    for m in range(len(matched)):
        first, c = matched.first(m)
        rank = matched.ranks[first]
        transfer, last = ms(matched.transfer_M[m]), matched.ranks[int(matched.last_M[m])].rank
        sizes = [matched.ranks[r].nbytes_C[i] for r, i in enumerate(matched.index_MR[m].tolist()) if i >= 0]
        nbytes = int(max(sizes)) if max(sizes) >= 0 else None
        for r in np.flatnonzero(matched.taking_MR[m]).tolist():
            clock = matched.clocks[r].offset_ns
            start, end, wait = (int(a[m, r]) for a in (matched.start_MR, matched.end_MR, matched.wait_MR))
            at = None if clock is None else ms(start + clock - origin)
            where = m, rank.names[c], rank.groups[c][0], int(rank.step_C[c]), nbytes, matched.ranks[r].rank
            rows.append((*where, at, ms(end - start), transfer, ms(wait), last))
    return table("collective name group step nbytes rank start_ms ms transfer_ms wait_ms last_rank", rows)


_TABLES = {"ranks": _ranks_table, "waits": _waits_table, "collectives": _collectives_table}


def _summary(ranks: Table, matched: int) -> dict[str, Any]:
    n = len(ranks["rank"])
    figures = ("wall_ms", "compute_ms", "exposed_ms", "transfer_ms", "skew_ms", "idle_ms")
    late = [caused - waiting for caused, waiting in zip(ranks["caused_ms"], ranks["skew_ms"])]
    most = max(range(n), key=lambda i: late[i])
    steps = min(ranks["steps"])
    return {
        "ranks": n,
        "steps": steps,
        "device": ranks["device"][0],
        **{name: sum(ranks[name]) / n for name in figures},
        "slowest_rank": ranks["rank"][most] if late[most] > 0 else None,
        "slowest_ms": late[most] / n,
        "collectives_per_step": matched / steps,
    }
