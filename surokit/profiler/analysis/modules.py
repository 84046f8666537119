"""Sum busy time and FLOPs by module path, forward and backward; together with the pseudo-rows of `owners` the rows sum to
all of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from surokit.profiler.analysis.attribution import pick, shown_path
from surokit.profiler.analysis.graphs import repeats
from surokit.profiler.analysis.owners import GRAPH, PSEUDO, Owners, owners_of
from surokit.profiler.analysis.roles import Observed, Table, ms, table
from surokit.profiler.analysis.timeline import Int
from surokit.profiler.record.recording import Recording

_IN_GRAPHS = (
    "FLOPs are unknown: no operator runs in a CUDA graph; p.named_by(eager) takes them from a step without graphs, profiled with "
    "warmup=2 or more"
)
_OTHER_SIZE = (
    "FLOPs are unknown: the warm-up step that was recorded for them had {:.3g} times the tokens of a measured step"
)


def _alike(size: float) -> bool:
    return abs(size - 1) <= 0.02


class Modules:
    """Modules say who asked for each activity of a recording. `named_by` is the recording of a step without CUDA graphs,
    from which the kernels of replayed graphs get their modules.

    owner_A indexes `modules`, or is -1 - p for PSEUDO[p].
    """

    def __init__(self, o: Observed, named_by: Recording | None = None) -> None:
        self.o = o
        self.modules = o.r.modules
        self.owners, self.owner_A, self.backward_A = owners_of(o)
        self.eager_A: Int | None = None
        self._eager: tuple[Observed, Owners] | None = None
        self.named_by = named_by
        if named_by is not None:
            known = {path for path, _ in o.r.modules}
            self.modules += tuple(m for m in named_by.modules if m[0] not in known)
        if o.in_graph_A.any():
            if named_by is not None:
                self._name_after(Observed(named_by))
            self._note_graphs()
        if o.r.shaped is not None and self.shaped_by is None:
            o.notes.append(_IN_GRAPHS if o.in_graph_A.any() else _OTHER_SIZE.format(o.r.shaped.size))

    def _name_after(self, eager: Observed) -> None:
        index = repeats(eager, self.o)
        found = np.flatnonzero(index >= 0)
        owners, owner, backward = owners_of(eager)
        self._eager = eager, owners
        self.owner_A[found] = self._own_index(eager.r, owner[index[found]])
        self.backward_A[found] = backward[index[found]]
        self.eager_A = index

    def _own_index(self, other: Recording, owner: Int) -> Int:
        """Translate the owners of another recording into owners of this one."""
        place = {path: m for m, (path, _) in enumerate(self.modules)}
        here = np.array([place[path] for path, _ in other.modules], np.int64)
        return np.where(owner >= 0, pick(here, np.maximum(owner, 0)), owner)

    def outermost(self) -> tuple[tuple[str, ...], Int]:
        """Return names, and for each activity the index among them of the outermost operator that asked for it, -1 without one.
        That of a replayed kernel is its counterpart's."""
        names, top_A = self.o.names, _tops(self.o, self.owners)
        if self._eager is not None and self.eager_A is not None:
            eager, owners = self._eager
            theirs = pick(_tops(eager, owners), self.eager_A)
            top_A = np.where(theirs >= 0, len(names) + theirs, top_A)
            names += eager.names
        return names, top_A

    def _note_graphs(self) -> None:
        o = self.o
        nodes, asked = o.in_graph_A & o.asked_in_steps(), o.own_A
        if self.eager_A is not None:
            named = nodes & (self.eager_A >= 0)
            share = asked[named].sum() / max(asked[nodes].sum(), 1)
            text = (
                f"{int(named.sum())} of {int(nodes.sum())} kernels in CUDA graphs are named after a step without graphs"
            )
            o.notes.append(f"{text} ({share:.0%} of their time)")
        elif (nodes & (self.owner_A == GRAPH)).any():
            o.notes.append("modules' hooks do not run in a CUDA graph: its kernels are the row (cuda graph)")

    # ------------------------------------------------------------------------------------------------ FLOPs

    @property
    def shaped_by(self) -> Recording | None:
        """Return the recording that has the shapes of a step like the measured ones, or None. No operator runs in the replay of a
        CUDA graph, so the shapes of such a step are those of the step without graphs."""
        known = (self.named_by,) if self.o.in_graph_A.any() else (self.o.r, self.named_by)
        return next((r for r in known if r is not None and r.shaped is not None and _alike(r.shaped.size)), None)

    @cached_property
    def flop(self) -> Int | None:
        """Sum the FLOPs of a step by owner: the modules, then PSEUDO from the end. The result is None without recorded shapes."""
        r = self.shaped_by
        if r is None or r.shaped is None:
            return None
        events = r.shaped.timeline
        owner, _ = Owners(r, events).at(events.thread_E, events.start_E)
        sums = np.zeros(len(self.modules) + len(PSEUDO), np.int64)
        np.add.at(sums, self._own_index(r, owner), r.shaped.flop_E)
        return sums

    # ------------------------------------------------------------------------------------------------ the table

    def table(self) -> Table:
        """Build the table `modules`: `self_ms` of all rows sums to busy; `ms`, `gflop` and their parts include children."""
        r, count = self.o.r, len(self.modules)
        sums = np.zeros((count + len(PSEUDO), 3), np.int64)  # forward, backward, FLOPs; pseudo-rows from the end
        np.add.at(sums, (self.owner_A, self.backward_A.astype(np.int64)), self.o.own_A)
        if self.flop is not None:
            sums[:, 2] = self.flop
        totals = sums.copy()
        totals[:count] = self._with_children(sums[:count])
        spans = r.module_S[self.o.in_steps(r.start_S)]
        calls = np.bincount(spans, minlength=count)
        rows = [
            self._row(shown_path(path, self.modules), kind, path.count("."), int(calls[m]), sums[m], totals[m])
            for m, (path, kind) in enumerate(self.modules)
            if calls[m] or totals[m].any()  # what neither ran nor holds a module that did is left out
        ]
        pseudo = [(p, sums[-1 - p]) for p in range(len(PSEUDO)) if sums[-1 - p].any()]
        pseudo.sort(key=lambda item: -int(item[1][:2].sum()))
        rows += [self._row(PSEUDO[p], "", 0, 0, own, own) for p, own in pseudo]
        return table("module type depth calls forward_ms backward_ms ms self_ms share gflop", rows)

    def _row(self, name: str, kind: str, depth: int, calls: int, own: Int, total: Int) -> tuple[Any, ...]:
        n, busy = self.o.steps, max(int(self.o.busy_K.sum()), 1)
        forward, backward, flop = total.tolist()
        per_step = [ms(t) / n for t in (forward, backward, forward + backward, int(own[:2].sum()))]
        gflop = None if self.flop is None else flop / 1e9
        return (name, kind, depth, calls / n, *per_step, (forward + backward) / busy, gflop)

    def _with_children(self, sums: Int) -> Int:
        """Add to the sums of each module those of all modules below it. A path begins with the outermost module's class name."""
        index = {path: m for m, (path, _) in enumerate(self.modules)}
        totals = sums.copy()
        for path, m in index.items():
            parent = path
            while parent := parent.rpartition(".")[0]:
                if parent in index:
                    totals[index[parent]] += sums[m]
        return totals


def _tops(o: Observed, owners: Owners) -> Int:
    """Return for each activity the name of the outermost operator that asked for it, an index into the names; -1 without one."""
    return pick(owners.tops.name_E.astype(np.int64), owners.top_at(o.host_thread_A, o.host_time_A))
