"""From a recording to the tables of a profile: steps, lost time by cause, modules, operators, kernels, copies, sync
points, gaps.

A `Recording` is plain data (numpy arrays and tuples), whether it was captured live or read from a trace file. Every sum
here is built on `timeline`: the window is the step, a step on a GPU is cut on device time at the last activity launched
before the step's mark, and the parts of a window add up to it exactly. Where lost time goes:

GPU: each gap of the device is divided by what the host did in it. Host wait inside a synchronising call is *syncs*,
inside a copy call *copies*, inside an operator or a launch call *launches* (*syncs* when the queue had run empty behind
a sync), the rest *host*. Kernel wait is *launches*; other wait is *copies* when a copy comes next, else *launches*. So
the four sum to idle; copies that nothing hides are added to *copies*.
CPU: a gap under 0.1 ms between two operators is *launches* (Python and dispatcher), a longer one *host*, and these two
sum to idle; *syncs* and *copies* are time inside operators that read values back or move data.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from surokit.profiler import timeline as tl
from surokit.profiler.attribution import Attribution, lookup, on_threads, shown_path
from surokit.profiler.recording import Recording, SyncPoint
from surokit.profiler.timeline import Bool, Breakdown, Int, Kind, Timeline

SHORT_GAP_NS = 100_000  # CPU: a shorter gap between two operators is the price of launching the next one
BACKWARD_BRIDGE_NS = 200_000  # autograd nodes closer than this belong to one backward pass
NOTED_BEFORE_NS = 1_000_000  # a wait belongs to a sync that was noted at most this long before
GAP_ROWS = 200
CAUSES = ("launches", "syncs", "copies", "host")
PHASES = ("sync", "data", "copies", "optimizer", "backward", "forward", "other")
_SYNC_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
)
_COPY_OPS = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous")

Table = dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Analysis:
    """Plain tables (column -> values), ready to be stored or shown."""

    summary: dict[str, Any]
    tables: dict[str, Table]
    windows: tuple[tuple[int, int], ...]  # of each step, on device time
    notes: tuple[str, ...]


def analyse(recording: Recording) -> Analysis:
    """Every table of a profile but the advice."""
    return _Analyst(recording).run()


def is_operator(name: str) -> bool:
    """Whether a cpu_op counts as work. Autograd's node wrappers do not: they would hide the Python inside a custom
    backward."""
    return ("::" in name and not name.startswith(("autograd::", "torch::autograd::"))) or name.startswith(
        ("Torch-Compiled Region", "CompiledFunction")
    )


def _table(columns: str, rows: list[tuple[Any, ...]]) -> Table:
    names = columns.split()
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _ms(ns: float) -> float:
    return float(ns) / 1e6


class _Analyst:
    """The intermediate arrays that several tables share; `run` makes the tables."""

    def __init__(self, recording: Recording) -> None:
        self.r = recording
        self.notes = list(recording.notes)
        every = recording.timeline
        self.all = every
        self.on_gpu = bool(every.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET).any())
        self.ops = every.take(every.is_kind(Kind.OP))
        self.calls = every.take(every.is_kind(Kind.RUNTIME))
        self.ranges = every.take(every.is_kind(Kind.ANNOTATION))
        self.attribution = Attribution(recording)
        self.nodes = self.attribution.nodes
        self.work_ops = self.ops.take(self.ops.is_named(is_operator(n) for n in every.names))
        self.active = every.take(every.is_kind(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)) if self.on_gpu else self.work_ops
        if not len(every):
            why = "" if recording.notes else ": nothing in the block used PyTorch"
            self.notes.append(f"no events were recorded{why}")
        if every.damaged:
            self.notes.append(f"{every.damaged} damaged events were left out")
        self._join_launches()
        self._cut_steps()

    # ------------------------------------------------------------------------------------------------ joining host and
    # device

    def _join_launches(self) -> None:
        """For each activity the end of its launch call, and where on the host (thread, time) it was asked for."""
        a = self.active
        if not self.on_gpu:
            self.launch_end_A: Int | None = None
            self.host_thread_A, self.host_time_A = a.thread_E, a.start_E
            return
        call = lookup(self.calls.correlation_E, a.correlation_E)
        op = lookup(self.ops.external_E, a.external_E)
        self.call_A = call
        self.launch_end_A = np.where(call >= 0, self.calls.end_E[call] if len(self.calls) else -1, -1)
        by_call_thread = self.calls.thread_E[call] if len(self.calls) else a.start_E * 0 - 1
        by_call_time = self.calls.start_E[call] if len(self.calls) else a.start_E
        thread, time = np.where(call >= 0, by_call_thread, -1), np.where(call >= 0, by_call_time, a.start_E)
        if len(
            self.ops
        ):  # the operator is on the thread that the module hooks saw; the call's own thread id may be another numbering
            thread = np.where(op >= 0, self.ops.thread_E[op], thread)
            time = np.where(op >= 0, self.ops.start_E[op], time)
        self.host_thread_A, self.host_time_A = thread, time

    def _cut_steps(self) -> None:
        r, a = self.r, self.active
        marks = [m for m in r.marks_ns if r.start_ns < m <= r.end_ns]
        if len(marks) < 2:  # without steps, or with a single one, the block is the step
            hosts = [r.start_ns, max(r.end_ns, r.start_ns)]
            self.skipped = 0
        else:
            self.skipped = min(r.warmup, len(marks) - 1)
            if self.skipped < r.warmup:
                self.notes.append(
                    f"{len(marks)} steps were seen, so {self.skipped} instead of {r.warmup} count as warm-up"
                )
            hosts = [r.start_ns, *marks][self.skipped :]
        self.hosts = hosts
        cuts = list(hosts)
        if self.on_gpu:
            order = np.argsort(self.host_time_A, kind="stable")
            reach = np.maximum.accumulate(a.end_E[order])
            launched = np.searchsorted(self.host_time_A[order], hosts, side="left")
            for k, n in enumerate(launched.tolist()):
                first = k == 0 and self.skipped == 0
                cuts[k] = hosts[k] if first or n == 0 else int(reach[n - 1])
            # The block's own end follows a synchronisation, so a single window ends with the host or the device,
            # whichever is later.
            if len(marks) < 2:
                cuts[-1] = max(cuts[-1], hosts[-1])
            cuts = np.maximum.accumulate(cuts).tolist()
        self.windows = tuple(itertools.pairwise(cuts))
        self.begin, self.stop = cuts[0], cuts[-1]
        self.steps = len(self.windows)

    # ------------------------------------------------------------------------------------------------ the tables

    def run(self) -> Analysis:
        a, r = self.active, self.r
        self.parts = [
            tl.breakdown(a.start_E, a.end_E, begin, stop, self.launch_end_A, r.back_to_back_ns)
            for begin, stop in self.windows
        ]
        self.own_A = tl.own_time(a.start_E, a.end_E, self.begin, self.stop)
        self._find_sync_calls()
        phases = [self._phases(h0, h1) for h0, h1 in itertools.pairwise(self.hosts)]
        causes = [self._causes(part) for part in self.parts]
        lost = {cause: sum(int(c[cause].sum()) for c in causes) for cause in CAUSES}
        tables = {
            "steps": self._steps(phases),
            "gaps": self._gaps(causes),
            "syncs": self._syncs(),
            "modules": self._modules(),
            "ops": self._ops(),
            "kernels": self._kernels(),
            "copies": self._copies(),
        }
        if self.on_gpu:
            lost["copies"] += self._exposed_copies()
        else:
            lost["syncs"] = round(sum(tables["syncs"]["ms"]) * 1e6 * self.steps)
            lost["copies"] = self._named_self_time(_COPY_OPS)
        tables["lost"] = self._lost(lost, tables)
        summary = self._summary(phases)
        return Analysis(summary, tables, self.windows, tuple(self.notes))

    @property
    def wall_ns(self) -> int:
        return self.stop - self.begin

    def _in_steps(self, host_E: Int) -> Bool:
        return (host_E >= self.hosts[0]) & (host_E < self.hosts[-1])

    def _asked_in_steps(self) -> Bool:
        return self._in_steps(self.host_time_A)

    def _find_sync_calls(self) -> None:
        """Calls in which the host waits for the device: CUDA's own, and the recorded reads of device values."""
        waits = self.calls.is_named(n in _SYNC_CALLS or n == "cudaMemcpy" for n in self.all.names)
        self.wait_calls = self.calls.take(waits)
        if self.on_gpu:
            self.reads = self._with_their_waits([s for s in self.r.syncs if s.device != "cpu"])
        else:  # an optimizer's step counters live on the CPU on purpose: no read of them waits for a device
            self.reads = [s for s in self.r.syncs if not s.inside.startswith("torch/optim/")]
        start, end = self._read_intervals(self.reads)
        self.sync_start = np.concatenate((self.wait_calls.start_E, start))
        self.sync_end = np.concatenate((self.wait_calls.end_E, end))

    def _read_intervals(self, reads: list[SyncPoint]) -> tuple[Int, Int]:
        return np.array([s.start_ns for s in reads], np.int64), np.array([s.end_ns for s in reads], np.int64)

    def _with_their_waits(self, reads: list[SyncPoint]) -> list[SyncPoint]:
        """Syncs that were noted at their start only: the wait that follows gives the length, the operator around the name."""
        at, _ = self._read_intervals(reads)
        thread = np.array([s.thread for s in reads], np.int64)
        around = on_threads(self.ops.thread_E, self.ops.start_E, self.ops.end_E, thread, at)
        following = np.searchsorted(self.wait_calls.start_E, at)
        out = []
        for read, op, wait in zip(reads, around.tolist(), following.tolist()):
            if read.start_ns < read.end_ns:
                out.append(read)
                continue
            near = wait < len(self.wait_calls) and self.wait_calls.start_E[wait] < read.start_ns + NOTED_BEFORE_NS
            end = int(self.wait_calls.end_E[wait]) if near else read.end_ns
            call = self.all.names[self.ops.name_E[op]] if op >= 0 else read.call
            out.append(replace(read, call=call, end_ns=end))
        return out

    def _ranges_named(self, *prefixes: str) -> tuple[Int, Int]:
        chosen = self.ranges.take(self.ranges.is_named(n.startswith(prefixes) for n in self.all.names))
        return chosen.start_E, chosen.end_E

    def _copy_calls(self) -> tuple[Int, Int]:
        chosen = self.calls.take(self.calls.is_named(n.startswith(("cudaMemcpy", "cuMemcpy")) for n in self.all.names))
        return chosen.start_E, chosen.end_E

    def _phases(self, begin: int, stop: int) -> dict[str, int]:
        """The host's time in one step, by what it was doing; sums to the host's step."""
        node_end = np.maximum(self.nodes.end_E, self.nodes.start_E)
        start, end = tl.merge(self.nodes.start_E, node_end + BACKWARD_BRIDGE_NS)
        backward = (start, np.maximum(end - BACKWARD_BRIDGE_NS, start))
        return tl.partition(
            begin,
            stop,
            [
                ("sync", self.sync_start, self.sync_end),
                ("data", *self._ranges_named("enumerate(DataLoader)", "data:")),
                ("copies", *self._copy_calls()),
                ("optimizer", *self._ranges_named("Optimizer.")),
                ("backward", *backward),
                ("forward", self.r.start_S, self.r.end_S),
            ],
        )

    def _causes(self, part: Breakdown) -> dict[str, Int]:
        """Each gap of one window divided among the four causes; the four sum to the gap."""
        start_G, host_G = part.gap_start_G, part.host_wait_G
        nothing = np.zeros_like(host_G)
        if not self.on_gpu:
            short = host_G < SHORT_GAP_NS
            return {
                "launches": np.where(short, host_G, 0),
                "syncs": nothing,
                "copies": nothing,
                "host": np.where(short, 0, host_G),
            }
        until_G = start_G + host_G
        copy_start, copy_end = self._copy_calls()
        layers = [(self.sync_start, self.sync_end), (copy_start, copy_end)]
        layers.append(
            (np.concatenate((self.ops.start_E, self.calls.start_E)), np.concatenate((self.ops.end_E, self.calls.end_E)))
        )
        covered = []
        starts = ends = np.empty(0, np.int64)
        for layer_start, layer_end in layers:
            starts, ends = tl.merge(np.concatenate((starts, layer_start)), np.concatenate((ends, layer_end)))
            covered.append(tl.covered(starts, ends, start_G, until_G))
        in_sync, in_copy, in_op = covered[0], covered[1] - covered[0], covered[2] - covered[1]
        drained = tl.covered(self.sync_start, self.sync_end, start_G - 1, start_G + 1) > 0
        next_is_copy = np.where(part.next_G >= 0, self.active.kind_E[part.next_G] == Kind.MEMCPY, False)
        return {
            "launches": np.where(drained, 0, in_op) + part.kernel_wait_G + np.where(next_is_copy, 0, part.other_wait_G),
            "syncs": in_sync + np.where(drained, in_op, 0),
            "copies": in_copy + np.where(next_is_copy, part.other_wait_G, 0),
            "host": host_G - covered[2],
        }

    def _exposed_copies(self) -> int:
        """Copy time on the device under which no kernel runs."""
        a = self.active
        rest = a.take(~a.is_kind(Kind.MEMCPY))
        everything = sum(p.busy_ns for p in self.parts)
        return everything - tl.total(*tl.clip(rest.start_E, rest.end_E, self.begin, self.stop))

    def _self_ns(self) -> Int:
        if not hasattr(self, "_self"):
            self._self = tl.self_time(self.ops.start_E, self.ops.end_E, self.ops.thread_E)
        return self._self

    def _named_self_time(self, names: tuple[str, ...]) -> int:
        chosen = self.ops.is_named(n in names for n in self.all.names) & self._in_steps(self.ops.start_E)
        return int(self._self_ns()[chosen].sum())

    def _steps(self, phases: list[dict[str, int]]) -> Table:
        rows = []
        for k, (part, phase) in enumerate(zip(self.parts, phases)):
            waits = [_ms(w.sum()) for w in (part.host_wait_G, part.kernel_wait_G, part.other_wait_G)]
            rows.append(
                (k, _ms(part.wall_ns), _ms(part.busy_ns), _ms(part.idle_ns), *waits, *(_ms(phase[p]) for p in PHASES))
            )
        columns = "step wall_ms busy_ms idle_ms host_wait_ms kernel_wait_ms other_wait_ms "
        return _table(columns + " ".join(f"{p}_ms" for p in PHASES), rows)

    def _place_in(self, begin: int, stop: int) -> tuple[str, int]:
        """The user's line seen most often in an interval of host time; ("", 0) when the sampler saw none."""
        lo, hi = np.searchsorted(self.r.time_P, (begin, stop)).tolist()
        if lo == hi:
            return "", 0
        place, _ = Counter(self.r.place_P[lo:hi].tolist()).most_common(1)[0]
        return self.r.places[place]

    def _gaps(self, causes: list[dict[str, Int]]) -> Table:
        found: list[tuple[int, int, int, Breakdown, dict[str, Int]]] = []
        for step, (part, cause) in enumerate(zip(self.parts, causes)):
            length = part.gap_end_G - part.gap_start_G
            longest = np.argsort(-length, kind="stable")[:GAP_ROWS].tolist()
            found.extend((int(length[g]), step, g, part, cause) for g in longest)
        found.sort(key=lambda row: (-row[0], row[1]))
        found = found[:GAP_ROWS]
        middle = np.array([part.gap_start_G[g] + part.host_wait_G[g] // 2 for _, _, g, part, _ in found], np.int64)
        ranges = tl.innermost(self.ranges.start_E, self.ranges.end_E, middle)
        rows = []
        for (length_ns, step, g, part, cause), around in zip(found, ranges.tolist()):
            waits = {
                "host wait": part.host_wait_G[g],
                "kernel wait": part.kernel_wait_G[g],
                "other wait": part.other_wait_G[g],
            }
            start = int(part.gap_start_G[g])
            file, line = self._place_in(start, start + int(part.host_wait_G[g]))
            following = int(part.next_G[g])
            rows.append(
                (
                    step,
                    _ms(start - self.begin),
                    _ms(length_ns),
                    max(waits, key=lambda w: int(waits[w])),
                    max(CAUSES, key=lambda c: int(cause[c][g])),
                    _ms(cause["host"][g]),
                    file,
                    line,
                    self.all.names[self.active.name_E[following]] if following >= 0 else "",
                    self.all.names[self.ranges.name_E[around]] if around >= 0 else "",
                )
            )
        return _table("step start_ms ms kind cause host_ms file line next inside", rows)

    def _syncs(self) -> Table:
        """Sync points by the user's line, per step. On a GPU the time is the host's wait in the call."""
        lo, hi = self.hosts[0], self.hosts[-1]
        found: dict[tuple[str, int, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        reads = [s for s in self.reads if lo <= s.start_ns < hi]
        for s in reads:
            entry = found[s.file, s.line, s.call, s.inside]
            entry[0] += 1
            entry[1] += s.end_ns - s.start_ns
        waits = self.wait_calls.take(self._in_steps(self.wait_calls.start_E))
        if len(
            waits
        ):  # waits that no recorded read explains, such as torch.cuda.synchronize(): the line comes from the sampler
            start, end = self._read_intervals(reads)
            explained = tl.covered(start, end, waits.start_E, waits.end_E) > 0
            for i in np.flatnonzero(~explained).tolist():
                file, line = self._place_in(int(waits.start_E[i]), int(waits.end_E[i]))
                entry = found[file, line, self.all.names[waits.name_E[i]], ""]
                entry[0] += 1
                entry[1] += int(waits.end_E[i] - waits.start_E[i])
        rows = [
            (file, line, call, count / self.steps, _ms(ns) / self.steps, inside)
            for (file, line, call, inside), (count, ns) in found.items()
        ]
        rows.sort(key=lambda row: (-row[4], row[0], row[1]))
        return _table("file line call count ms inside", rows)

    def _modules(self) -> Table:
        """Busy time by module path; `self_ms` of all rows, the pseudo-rows in parentheses included, sums to busy."""
        module_A, backward_A = self.attribution.module_at(self.host_thread_A, self.host_time_A)
        own = self.own_A
        if self.on_gpu:
            module_A = np.where(self.active.is_kind(Kind.MEMCPY), -2, module_A)
        sums = np.zeros((len(self.r.modules), 2), np.int64)
        inside = module_A >= 0
        np.add.at(sums, (module_A[inside], backward_A[inside].astype(np.int64)), own[inside])
        spans = self._in_steps(self.r.start_S) if len(self.r.start_S) else np.zeros(0, bool)
        calls = np.bincount(self.r.module_S[spans], minlength=len(self.r.modules))
        rows = [
            self._module_row(path, kind, int(calls[m]), sums[m], totals)
            for m, ((path, kind), totals) in enumerate(zip(self.r.modules, self._with_children(sums)))
        ]
        rows = [row for row in rows if row[3] or row[6]]  # what neither ran nor holds a module that did is left out

        pseudo: dict[str, int] = defaultdict(int)
        outside = np.flatnonzero((module_A < 0) & (own > 0))
        in_optimizer = tl.covered(*self._ranges_named("Optimizer."), self.host_time_A, self.host_time_A + 1) > 0
        in_data = (
            tl.covered(*self._ranges_named("enumerate(DataLoader)", "data:"), self.host_time_A, self.host_time_A + 1)
            > 0
        )
        for i in outside.tolist():
            if module_A[i] == -2:
                name = "(copies)"
            elif in_optimizer[i]:
                name = "(optimizer)"
            elif in_data[i]:
                name = "(data)"
            else:
                name = "(backward)" if backward_A[i] else "(outside modules)"
            pseudo[name] += int(own[i])
        for name, ns in sorted(pseudo.items(), key=lambda item: -item[1]):
            forward, back = (0, ns) if name == "(backward)" else (ns, 0)
            both = np.array([forward, back], np.int64)
            rows.append(self._module_row(name, "", 0, both, both))
        return _table("module type depth calls forward_ms backward_ms ms self_ms share", rows)

    def _module_row(self, path: str, kind: str, calls: int, own: Int, totals: Int) -> tuple[Any, ...]:
        busy = max(sum(p.busy_ns for p in self.parts), 1)
        depth = path.count(".")
        per_step = [_ms(t) / self.steps for t in (totals[0], totals[1], totals.sum(), own.sum())]
        return (
            shown_path(path, self.r.modules),
            kind,
            depth,
            calls / self.steps,
            *per_step,
            float(totals.sum()) / busy,
        )

    def _with_children(self, sums: Int) -> Int:
        """Forward and backward time of each module and all below it. A path begins with the outermost module's class
        name."""
        index = {path: m for m, (path, _) in enumerate(self.r.modules)}
        totals = sums.copy()
        for path, m in index.items():
            parent = path
            while parent:
                parent = parent.rpartition(".")[0]
                if parent in index:
                    totals[index[parent]] += sums[m]
        return totals

    def _ops(self) -> Table:
        here = self._in_steps(self.ops.start_E)
        return self._by_name(self.ops, here, self._self_ns(), "op")

    def _by_name(self, events: Timeline, here: Bool, own_ns: Int, label: str) -> Table:
        names = events.name_E[here]
        size = len(self.all.names)
        count = np.bincount(names, minlength=size)
        own = np.bincount(names, own_ns[here], minlength=size)
        whole = np.bincount(names, events.duration_E()[here], minlength=size)
        order = sorted(np.flatnonzero(count).tolist(), key=lambda n: -own[n])
        n = self.steps
        rows = [
            (self.all.names[i], count[i] / n, _ms(own[i]) / n, _ms(whole[i]) / n, whole[i] / count[i] / 1e3)
            for i in order
        ]
        return _table(f"{label} calls self_ms ms mean_us", rows)

    def _kernels(self) -> Table:
        a = self.active
        if not self.on_gpu:
            return _table("kernel calls self_ms ms mean_us", [])
        here = a.is_kind(Kind.KERNEL) & self._asked_in_steps()
        return self._by_name(a, here, self.own_A, "kernel")

    def _copies(self) -> Table:
        """Copies by kind, per step. On a CPU: the operators that move data, without their bytes."""
        n = self.steps
        rows: list[tuple[Any, ...]]
        if not self.on_gpu:
            here = self.ops.is_named(name in _COPY_OPS for name in self.all.names) & self._in_steps(self.ops.start_E)
            ops = self._by_name(self.ops, here, self._self_ns(), "copy")
            rows = [
                (c, "host to host", k, None, ms, None, None)
                for c, k, ms in zip(ops["copy"], ops["calls"], ops["self_ms"])
            ]
            return _table("copy direction count bytes ms gb_per_s pinned", rows)
        copies = self.active.take(self.active.is_kind(Kind.MEMCPY) & self._asked_in_steps())
        rows = []
        for name in sorted(set(copies.name_E.tolist())):
            chosen = copies.take(copies.name_E == name)
            size, ns = int(chosen.nbytes_E.sum()), int(chosen.duration_E().sum())
            words = self.all.names[name]
            pinned = "Pageable" not in words if "HtoD" in words or "DtoH" in words else None
            direction = next((d for k, d in _DIRECTIONS.items() if k in words), "other")
            rows.append((words, direction, len(chosen) / n, size / n, _ms(ns) / n, size / max(ns, 1), pinned))
        rows.sort(key=lambda row: -row[4])
        return _table("copy direction count bytes ms gb_per_s pinned", rows)

    def _lost(self, lost_ns: dict[str, int], tables: dict[str, Table]) -> Table:
        evidence = {
            "launches": self._launch_evidence(),
            "syncs": _places(tables["syncs"], "call", "{count:.3g} x {call} at {place}", self._place_text),
            "copies": "; ".join(
                f"{c:.3g} x {name}" for name, c in zip(tables["copies"]["copy"][:2], tables["copies"]["count"][:2])
            )
            or "none",
            "host": self._host_evidence(tables["gaps"]),
        }
        rows = []
        for cause in CAUSES:
            share = lost_ns[cause] / max(self.wall_ns, 1)
            rows.append((cause, _ms(lost_ns[cause]) / self.steps, share, 24 * share, evidence[cause]))
        return _table("cause ms_per_step share gpu_hours_per_day evidence", rows)

    def _place_text(self, file: str, line: int) -> str:
        return f"{short_file(file)}:{line}" if file else "an unknown line"

    def _launches(self) -> int:
        """Device launches, or on a CPU operators called from outside any operator, in all steps."""
        if self.on_gpu:
            launch = self.calls.is_named("Launch" in n and "HostFunc" not in n for n in self.all.names)
            return int((launch & self._in_steps(self.calls.start_E)).sum())
        return int((self.own_A[self._asked_in_steps()] > 0).sum())

    def _launch_evidence(self) -> str:
        count = self._launches() / self.steps
        a = self.active
        if not self.on_gpu:
            short = (self.own_A > 0) & (a.duration_E() < 10_000) & self._asked_in_steps()
            return f"{count:.0f} operators a step, {int(short.sum()) / self.steps:.0f} of them under 10 us"
        cost = np.where(self.call_A >= 0, self.calls.duration_E()[self.call_A] if len(self.calls) else 0, 0)
        short = a.is_kind(Kind.KERNEL) & (a.duration_E() < cost) & self._asked_in_steps()
        return (
            f"{count:.0f} launches a step, {int(short.sum()) / self.steps:.0f} kernels shorter than their launch call"
        )

    def _host_evidence(self, gaps: Table) -> str:
        by_place: dict[str, float] = defaultdict(float)
        for file, line, ms in zip(gaps["file"], gaps["line"], gaps["host_ms"]):
            if ms:
                by_place[self._place_text(file, line) if file else "lines too short to be sampled"] += ms / self.steps
        best = sorted(by_place.items(), key=lambda item: -item[1])[:2]
        return "; ".join(f"{ms:.3g} ms at {place}" for place, ms in best) or "none"

    def _summary(self, phases: list[dict[str, int]]) -> dict[str, Any]:
        n, r = self.steps, self.r
        walls = np.array([p.wall_ns for p in self.parts]) / 1e6
        wall = _ms(self.wall_ns) / n

        def mean(value: Callable[[Breakdown], int]) -> float:
            return _ms(sum(value(p) for p in self.parts)) / n

        syncs = self.wait_calls.take(self._in_steps(self.wait_calls.start_E))
        reads = [s for s in self.reads if self.hosts[0] <= s.start_ns < self.hosts[-1]]
        sizes = {"HtoD": 0, "DtoH": 0}
        if self.on_gpu:
            copies = self.active.take(self.active.is_kind(Kind.MEMCPY) & self._asked_in_steps())
            for key in sizes:
                sizes[key] = int(copies.nbytes_E[copies.is_named(key in name for name in self.all.names)].sum())
        events = int(self._in_steps(self.ops.start_E).sum() + self._in_steps(self.calls.start_E).sum())
        spans = int(self._in_steps(r.start_S).sum()) if len(r.start_S) else 0
        samples = int(self._in_steps(r.time_P).sum()) if len(r.time_P) else 0
        watched = sum(self.hosts[0] <= s.start_ns < self.hosts[-1] for s in r.syncs)
        overhead = events * r.costs.event_ns + spans * r.costs.module_ns
        overhead += watched * r.costs.read_ns + samples * r.costs.sample_ns
        p5, p50, p95 = np.percentile(walls, [5, 50, 95]).tolist() if len(walls) else (0.0, 0.0, 0.0)
        return {
            "device": r.device,
            "activity": "gpu" if self.on_gpu else "cpu",
            "steps": n,
            "warmup": self.skipped,
            "wall_ms": wall,
            "busy_ms": mean(lambda p: p.busy_ns),
            "idle_ms": mean(lambda p: p.idle_ns),
            "host_wait_ms": mean(lambda p: int(p.host_wait_G.sum())),
            "kernel_wait_ms": mean(lambda p: int(p.kernel_wait_G.sum())),
            "other_wait_ms": mean(lambda p: int(p.other_wait_G.sum())),
            "busy_frac": mean(lambda p: p.busy_ns) / wall if wall else 0.0,
            "wall_p5_ms": p5,
            "wall_p50_ms": p50,
            "wall_p95_ms": p95,
            "tokens_per_s": r.tokens_per_step / wall * 1e3 if r.tokens_per_step and wall else None,
            "launches_per_step": self._launches() / n,
            "syncs_per_step": (len(syncs) if self.on_gpu and len(syncs) else len(reads)) / n,
            "h2d_bytes": sizes["HtoD"] / n,
            "d2h_bytes": sizes["DtoH"] / n,
            "peak_gib": r.peak_bytes / 2**30,
            "phases_ms": {p: _ms(sum(phase[p] for phase in phases)) / n for p in PHASES},
            "overhead_ms": _ms(overhead) / n,
            "unprofiled_ms": _ms(r.unprofiled_ns) if r.unprofiled_ns is not None else None,
        }


_DIRECTIONS = {
    "HtoD": "host to device",
    "DtoH": "device to host",
    "DtoD": "device to device",
    "PtoP": "device to device",
}


def short_file(file: str) -> str:
    """The last part of a path; a name such as `cell [3]` stays whole."""
    return file.replace("\\", "/").rpartition("/")[2]


def _places(table: Table, key: str, pattern: str, place: Callable[[str, int], str]) -> str:
    rows = zip(table["count"][:2], table[key][:2], table["file"][:2], table["line"][:2])
    return "; ".join(pattern.format(count=c, call=call, place=place(f, n)) for c, call, f, n in rows) or "none"
