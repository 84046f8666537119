"""Match the collectives of several ranks, and compute who waited for whom.

A collective ends on all its ranks at about the same moment, and the rank that arrives last waits for nobody. So the shortest of
its durations is the *transfer*, what a rank took longer is its *wait*, and the rank with the shortest is the one that was
waited for. That needs no common clock. The clocks are compared by the ends, for pictures and starts: a rank's offset is the
median difference of its ends from those of a rank whose offset is known, and how far the ends scatter around it is the residual.

*Exposed* communication is the part under which a rank computes nothing. It is split exactly: *transfer* where any collective is
past its wait, and where data moves outside of matched collectives; *skew* where all are still waiting for another rank.

Suffixes: R ranks, in the order given; C collectives of one rank; M matched collectives, in order of time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.causes import Waited, cumulative
from surokit.profiler.analysis.collectives import Collectives, Group, is_matched
from surokit.profiler.analysis.timeline import Int

#: Collectives that end on all ranks together; a broadcast's root may go on before the others have it.
_END_TOGETHER = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
_NOTED_RANKS = 4  # named in a note

Layer = tuple[Int, Int]
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Exposed:
    """An Exposed divides one rank's steps, in nanoseconds of all of them: wall = compute + transfer + skew + idle, exactly.

    waited: the skew, by the rank that was waited for; the most first.
    """

    wall_ns: int
    compute_ns: int
    transfer_ns: int
    skew_ns: int
    waited: tuple[Waited, ...]

    @property
    def exposed_ns(self) -> int:
        """Return the communication under which nothing is computed."""
        return self.transfer_ns + self.skew_ns

    @property
    def idle_ns(self) -> int:
        return self.wall_ns - self.compute_ns - self.exposed_ns


@dataclass(frozen=True)
class Clock:
    """A Clock says what to add to a rank's times for those of the first rank, and how far the ends of collectives scatter: the
    median distance from their median. An offset below that is taken as none. Both are None where no collective connects the
    two."""

    offset_ns: int | None
    residual_ns: int | None


class Matched:
    """A Matched holds the collectives of several ranks, matched.

    index_MR: of each rank's collectives, -1 where a rank has no part. transfer_M, wait_MR: nanoseconds, wait 0 where a rank has
    no part. last_M: the rank (an index) that arrived last. notes: what could not be matched, and why.
    """

    def __init__(self, ranks: Sequence[Collectives]) -> None:
        self.ranks = tuple(ranks)
        self.notes: list[str] = []
        rows = _match(self.ranks, self.notes)
        start_M = [
            min(self.ranks[r].start_C[c] - self.ranks[r].begin for r, c in enumerate(row) if c >= 0) for row in rows
        ]
        order = np.argsort(np.array(start_M, np.int64), kind="stable")
        self.index_MR = np.array(rows, np.int64).reshape(-1, len(self.ranks))[order]
        self.taking_MR = self.index_MR >= 0
        self.start_MR, self.end_MR = self._of_all("start_C"), self._of_all("end_C")
        duration_MR = np.where(self.taking_MR, self.end_MR - self.start_MR, np.iinfo(np.int64).max)
        if len(rows):
            self.last_M = duration_MR.argmin(axis=1)
            self.transfer_M = duration_MR.min(axis=1)
        else:
            self.last_M = self.transfer_M = np.empty(0, np.int64)
        self.wait_MR = np.where(self.taking_MR, duration_MR - self.transfer_M[:, None], 0)

    def __len__(self) -> int:
        return len(self.index_MR)

    def _of_all(self, column: str) -> Int:
        values = np.zeros(self.index_MR.shape, np.int64)
        for r, rank in enumerate(self.ranks):
            taking = self.taking_MR[:, r]
            values[taking, r] = getattr(rank, column)[self.index_MR[taking, r]]
        return values

    def first(self, m: int) -> tuple[int, int]:
        """Return a rank that takes part in a collective, and the collective's index there."""
        r = int(self.taking_MR[m].argmax())
        return r, int(self.index_MR[m, r])

    # ------------------------------------------------------------------------------------------------ one rank

    def layers(self, r: int) -> dict[str | int, Layer]:
        """Return the intervals of one rank in the order in which they count: "compute", "transfer", then the waits by the rank that
        was waited for (an index), the longest first, and "around", the rest of communication."""
        rank, taking = self.ranks[r], self.taking_MR[:, r]
        start, end, wait, last = (
            a[taking] for a in (self.start_MR[:, r], self.end_MR[:, r], self.wait_MR[:, r], self.last_M)
        )
        alone = np.ones(len(rank), bool)
        alone[self.index_MR[taking, r]] = False
        moved = np.concatenate((start + wait, rank.start_C[alone])), np.concatenate((end, rank.end_C[alone]))
        layers: dict[str | int, Layer] = {"compute": rank.compute, "transfer": moved}
        lost = np.bincount(last, wait, minlength=len(self.ranks))
        for q in np.argsort(-lost, kind="stable").tolist():
            chosen = (last == q) & (wait > 0)
            if chosen.any():
                layers[q] = start[chosen], (start + wait)[chosen]
        return layers | {"around": rank.communication}

    @cached_property
    def exposed(self) -> tuple[Exposed, ...]:
        """Return how each rank's steps divide."""
        return tuple(self._exposed(r) for r in range(len(self.ranks)))

    def _exposed(self, r: int) -> Exposed:
        rank, layers = self.ranks[r], self.layers(r)
        unions = [tl.total(*tl.clip(*layer, rank.begin, rank.stop)) for layer in cumulative(list(layers.values()))]
        part = dict(zip(layers, np.diff([0, *unions]).tolist()))
        taking = self.taking_MR[:, r] & (self.wait_MR[:, r] > 0)
        times = np.bincount(self.last_M[taking], minlength=len(self.ranks))
        waited = [Waited(self.ranks[q].rank, part[q], int(times[q])) for q in layers if isinstance(q, int) and part[q]]
        waited.sort(key=lambda w: -w.ns)
        skew = sum(w.ns for w in waited)
        return Exposed(rank.stop - rank.begin, part["compute"], part["transfer"] + part["around"], skew, tuple(waited))

    # ------------------------------------------------------------------------------------------------ clocks

    @cached_property
    def clocks(self) -> tuple[Clock, ...]:
        """Return each rank's clock against the first's, along the shortest chain of shared collectives."""
        together = np.array(
            [self.ranks[r].names[c] in _END_TOGETHER for r, c in map(self.first, range(len(self)))], bool
        )
        found: dict[int, Clock] = {0: Clock(0, 0)}
        reached = [0]
        for known in reached:  # grows on the way
            for r in range(len(self.ranks)):
                shared = together & self.taking_MR[:, known] & self.taking_MR[:, r] if len(self) else together
                if r in found or not shared.any():
                    continue
                behind = self.end_MR[shared, known] - self.end_MR[shared, r]
                offset = int(np.median(behind))
                residual = int(np.median(np.abs(behind - offset)))
                if abs(offset) <= residual:  # no difference that can be told, as on one machine
                    offset = 0
                before = found[known]
                assert before.offset_ns is not None
                found[r] = Clock(before.offset_ns + offset, residual)
                reached.append(r)
        return tuple(found.get(r, Clock(None, None)) for r in range(len(self.ranks)))


# --------------------------------------------------------------------------------------------------------------- matching


def _match(ranks: Sequence[Collectives], notes: list[str]) -> list[list[int]]:
    """Return for each matched collective its index on every rank, -1 where a rank has no part."""
    keys_R = _keys(ranks, notes)
    found: dict[Key, list[int]] = {}
    for r, keys in enumerate(keys_R):
        for c, key in enumerate(keys):
            if key is not None:
                found.setdefault(key, [-1] * len(ranks))[r] = c
    rows: list[list[int]] = []
    alone, missing, members_of = 0, set[int](), dict[Group, list[int]]()
    for row in found.values():
        r = next(r for r, c in enumerate(row) if c >= 0)
        group = ranks[r].groups[row[r]]
        if group not in members_of:
            members_of[group] = _members(ranks, group)
            missing |= set(group[1]) - {rank.rank for rank in ranks}
        members = members_of[group]
        if sum(c >= 0 for c in row) > 1 and all(row[q] >= 0 for q in members):
            rows.append(row)
        elif len(members) > 1:
            alone += 1
    if alone:
        notes.append(f"{alone} collectives were seen on some ranks of their group only, as at the edges of a recording")
    if missing:
        some = ", ".join(map(str, sorted(missing)[:_NOTED_RANKS])) + (", ..." if len(missing) > _NOTED_RANKS else "")
        notes.append(f"the profiles of ranks {some} are missing: what was waiting for them counts as transfer")
    if others := sum(not is_matched(name) for rank in ranks for name in rank.names):
        notes.append(f"{others} point-to-point transfers are not matched: all of their time counts as transfer")
    return rows


def _members(ranks: Sequence[Collectives], group: Group) -> list[int]:
    """Return the ranks, as indices, that take part in a group's collectives, of those that are here."""
    name, known = group
    if known:
        return [r for r, rank in enumerate(ranks) if rank.rank in known]
    return [r for r, rank in enumerate(ranks) if not name or any(g[0] == name for g in rank.groups)]


def _keys(ranks: Sequence[Collectives], notes: list[str]) -> list[list[Key | None]]:
    """Return a key for every collective of every rank, equal for those that belong together; None for one that cannot be told.

    A number in the group decides where torch noted it. Else they are counted by kind and group: through all steps where all
    ranks have equally many, else in each step in which they do.
    """
    numbered: list[list[Key | None]] = []
    counted: list[dict[Key, list[int]]] = []  # group and kind -> collectives, in order
    for rank in ranks:
        keys: list[Key | None] = [None] * len(rank)
        rows: dict[Key, list[int]] = defaultdict(list)
        seen: Counter[Key] = Counter()  # several kernels may have one number, as in a coalesced collective
        for c, (name, group, sequence) in enumerate(zip(rank.names, rank.groups, rank.sequence_C.tolist())):
            if not is_matched(name):
                continue
            if sequence >= 0:
                key = (group, name, sequence)
                keys[c] = (*key, seen[key])
                seen[key] += 1
            else:
                rows[group, name].append(c)
        numbered.append(keys)
        counted.append(rows)
    for kind in dict.fromkeys(key for rows in counted for key in rows):
        here = {r: counted[r].get(kind, []) for r in _members(ranks, kind[0])}
        if len(set(map(len, here.values()))) == 1:
            steps: dict[Any, dict[int, list[int]]] = {"all": here}
        else:
            texts = ", ".join(
                f"{len(found)} times on rank {ranks[r].rank}" for r, found in [*here.items()][:_NOTED_RANKS]
            )
            notes.append(f"{kind[1]} was seen {texts}: only steps in which all ranks have equally many are matched")
            steps = {
                k: {r: [c for c in found if ranks[r].step_C[c] == k] for r, found in here.items()}
                for k in range(max(len(rank.windows) for rank in ranks))
            }
        for step, of_rank in steps.items():
            if len(set(map(len, of_rank.values()))) == 1:
                for r, found in of_rank.items():
                    for k, c in enumerate(found):
                        numbered[r][c] = (*kind, step, k)
    return numbered


def by_rank_waited_for(parts: Iterable[Exposed]) -> dict[int, int]:
    """Sum what all ranks lost to each rank, nanoseconds of all steps."""
    caused: dict[int, int] = defaultdict(int)
    for part in parts:
        for rank, ns, _ in part.waited:
            caused[rank] += ns
    return dict(caused)
