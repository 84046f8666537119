"""Measure training steps on a GPU: Qwen3 shapes with random weights on packed text, recipe beside recipe, Unsloth beside
them.

    python -m surokit.bench gpu --out gpu.json

This is one command, called again until nothing is left. A call is bounded by --minutes; each finished measurement is in the
file before the next begins, and a call goes on with what is missing. The order is: a small step of every recipe against the
definition; the check that the fast step computes the same as the plain one, at the real widths; the ceilings of the device;
then the parts of configurations.py, the most important first. A configuration that is not found right is timed all the
same, and its figure is called unchecked wherever it is shown.

Every system is a process of its own, which waits while another runs. Those of a group take turns, A B A B: they stay as
long as the device has room for them together; the others are built and warmed up anew for each turn, and the table says
which. A ratio is taken within a round. Memory is planned before, and a configuration that does not fit is left out with the
reason. A rehearsal runs every line of it on a CPU, with a tiny shape, few steps and no process; its numbers mean nothing
and no table takes them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surokit.bench import gpu_table
from surokit.bench.configurations import PARTS, BenchGroup, BenchPart, BenchWork, Configuration, Train
from surokit.bench.process import Failed, left_s
from surokit.bench.results_store import Book, next_free
from surokit.bench.systems import Systems
from surokit.bench.turns import Call, OutOfTime, Running, System, Turns
from surokit.environment import cores
from surokit.hardware.gpus import CONTEXT_GIB, Gpu

table = gpu_table.table
shown = gpu_table.shown
VERSION = 1  # of the measurements: a change of what is measured begins a new file

ROOM = 0.9  # of the device's memory: what plans may come to together
CHOICES = "choices"  # the key of what serves each operation
LATE_S = 240.0  # what takes so much longer than it should has failed
SMOKE_S = 30.0  # to check a recipe in a process of its own, as long as none was
OPENS_S = 75.0  # to start a process and take its first steps, as long as none was measured
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")  # what compilers keep


@dataclass(frozen=True)
class Pace:
    """A Pace says how long things are measured. warm_up: steps that do not count, the first one among them."""

    turn_s: float = 4.0
    most_steps: int = 200
    warm_up: int = 8
    profile: int = 3
    ceilings_s: float = 12.0
    sustained_minutes: float = 5.0
    sample_every: int = 200
    check_length: int = 512
    check_steps: int = 8
    rounds: int = 99  # at most, whatever a group asks for
    profiles: int = 9999
    smoke_length: int = 128
    smoke_steps: int = 4  # the third one is recorded as a CUDA graph
    smoke_beside: int = max(1, cores() // 2)  # processes at a time


REHEARSAL = Pace(
    turn_s=0.0,
    most_steps=1,
    warm_up=2,
    profile=1,
    ceilings_s=0.05,
    sustained_minutes=0.005,
    sample_every=8,
    check_length=48,
    check_steps=3,
    rounds=1,
    profiles=2,
    smoke_length=32,
    smoke_beside=1,
)


def run(
    part: Iterable[str] = (),
    minutes: float = 8.0,
    out: Path | None = None,
    new: bool = False,
    again: bool = False,
    rehearse: bool = False,
) -> dict[str, Any]:
    """Measure what is missing of the parts (all of them where none is named) for so many minutes; returns the raw file's
    data.

    out: the file, "gpu.json" unless given, and its turns beside it as CSV. new: the next free name instead. again: failed
    measurements are made once more. Raises RuntimeError without a CUDA device, ValueError for a part that is not there or a
    file that was measured elsewhere.
    """
    import torch

    names = list(part) or list(PARTS)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"There is no part {name!r}: known are {', '.join(PARTS)}.")
    if not minutes > 0:
        raise ValueError(f"minutes={minutes}: a number above zero; 8 is usual.")
    if not rehearse and not torch.cuda.is_available():
        raise RuntimeError(
            "There is no CUDA device: `python -m surokit.bench cpu` runs without one, and --rehearse runs all of this on a CPU."
        )
    out = out or Path("gpu-rehearsal.json" if rehearse else "gpu.json")
    work = BenchWork(batch=1, length=32, accumulate=2, rank=4) if rehearse else BenchWork()
    head = {"benchmark": "gpu", "rehearsal": rehearse, "version": VERSION, "settings": asdict(work)}
    call = {"minutes": minutes, "parts": names}
    book = Book(next_free(out) if new else out, "gpu", head, call)
    if again:
        book.forget(*[key for key, found in book.found.items() if in_question(found)])
    pace = REHEARSAL if rehearse else Pace()
    with tempfile.TemporaryDirectory() as folder:
        systems = Systems(work, pace.warm_up, rehearse, Path(folder))
        bench = Bench(book, systems, pace, time.monotonic() + 60 * minutes)
        try:
            for name in names:
                bench.part(PARTS[name])
        except OutOfTime as end:
            book.end(str(end))
            print(f"{end} Call it again to go on.", file=sys.stderr)
        else:
            book.end("")
            print(f"Nothing is left of {', '.join(names)}.", file=sys.stderr)
        finally:
            gpu_table.write_csv(book.data, book.path.with_suffix(".csv"))
    print(f"raw result: {book.path}", file=sys.stderr)
    return book.data


def listing(**_: Any) -> str:
    """List the parts in their order, with about how long each takes."""
    return "\n".join(f"{part.name:12} about {part.minutes:2} minutes: {part.words}" for part in PARTS.values())


class Bench:
    """A Bench is one call: the file, the systems, and the clock at which it ends (of time.monotonic)."""

    def __init__(self, book: Book, systems: Systems, pace: Pace, ends_s: float) -> None:
        self.book, self.systems, self.pace, self.work = book, systems, pace, systems.work
        self.call = Call(ends_s, late_s=LATE_S)
        self._answered: dict[str, dict[str, Any]] = {}

    def part(self, part: BenchPart) -> None:
        if part.smoke:
            return self._smoke(part.smoke)
        self.prepare([c for c in self._unmeasured(part) if not c.peer])
        for group in part.groups:
            self.run_group(group)
        for c in part.starts:
            self._start(c)
        for c in part.sustained:
            self._sustain(c)

    def measure(
        self, key: str, need_s: float, work: Callable[[float], Mapping[str, Any]], what: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the file's entry under `key`, or make it: the result of `work(until_s)`, or why that failed or was left out.

        A measurement that was left out is tried again in the next call. Raises OutOfTime where fewer than `need_s` seconds
        are left.
        """
        if self.book.done(key):
            return self.book[key]
        return self.book.put(key, {**what, **self.call.tried(key, need_s, work)})

    def _unmeasured(self, part: BenchPart) -> Iterator[Configuration]:
        """Yield the configurations of a part of which something is missing in the file."""
        found = self.book.found
        for group in part.groups:
            for c in group.configurations:
                keys = [_key("turn", group, c, number) for number in range(min(group.rounds, self.pace.rounds))]
                if not any("failed" in found.get(key, {}) for key in keys) and not all(map(self.book.done, keys)):
                    yield c
        for kind, singles in (("start", part.starts), ("sustained", part.sustained)):
            yield from (c for c in singles if not self.book.done(f"{kind}/{c.name}"))

    # -- before speed

    def _smoke(self, recipes: Iterable[tuple[str, Train]]) -> None:
        """Check a small step of each recipe against the definition, several recipes at a time, each in a process of its
        own; and note the kernel that serves each operation."""
        sizes = {"length": self.pace.smoke_length, "steps": self.pace.smoke_steps, "rank": self.work.rank}
        shape = self.systems.shape("small")
        requests: dict[str, dict[str, Any]] = {} if self.book.current(CHOICES) else {CHOICES: {"choices": True}}
        for recipe, train in recipes:
            request = {"check": {"shape": shape, "recipe": recipe, "train": train, "definition": "cpu", **sizes}}
            if not self.book.current(_smoke(recipe, train)):
                requests[_smoke(recipe, train)] = request
        late: OutOfTime | None = None
        with ThreadPoolExecutor(self.pace.smoke_beside) as pool:
            found = {
                pool.submit(self.call.tried, key, SMOKE_S, partial(self._smoked, requests[key])): key
                for key in requests
            }
            for each in as_completed(found):
                try:
                    self.book.put(found[each], {"what": found[each].partition("/")[0], **each.result()})
                except OutOfTime as end:
                    late = end
        if missed := self.book.found.get(CHOICES, {}).get("missed"):
            print(f"NOT THE FIRST CHOICE: {missed}", file=sys.stderr, flush=True)
        for recipe, train in recipes:
            if why := self._smoke_says(recipe, train, fused=True, graphs=True):
                print(f"NOT RIGHT: {recipe} {train}. {why}", file=sys.stderr, flush=True)
        if late is not None:
            raise late

    def _smoked(self, request: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        with closing(self.systems.preparing(until_s, {"OMP_NUM_THREADS": "2"})) as system:
            return system.ask(request, left_s(until_s))

    def _smoke_says(self, recipe: str, train: Train, fused: bool, graphs: bool) -> str:
        """Return the fault that the smoke test found in a recipe; "" where it found none, or has not been made with these
        sources."""
        key = _smoke(recipe, train)
        found = self.book[key] if self.book.current(key) else {}
        if "failed" in found:
            return f"Its smoke test failed: {found['failed']}"
        if fused and found and not found["fused"]["ok"]:
            worst = found["fused"]["worst"]
            return (
                f"In the smoke test its step is not the definition's: the gradient of {worst['name']} is {worst['fused']:.2g} from "
                f"float32's, and the definition's {worst['apart']:.2g}."
            )
        if graphs and found and not found["graphs"]["ok"]:
            return "In the smoke test its step replayed as graphs is not what it is launched one by one."
        return ""

    def prepare(self, configurations: Iterable[Configuration]) -> None:
        """Check correctness, then measure ceilings, for the models and recipes of these configurations."""
        requests: dict[str, tuple[dict[str, Any], float]] = {}
        for c in configurations:
            what = {"shape": self.systems.shape(c.model), "recipe": c.recipe, "train": c.train, "rank": self.work.rank}
            sizes = {"length": self.pace.check_length, "steps": self.pace.check_steps}
            requests[_correct(c)] = {"check": {**what, **sizes}}, 30.0
        requests["ceilings/device"] = {"device": self.pace.ceilings_s}, 10 + self.pace.ceilings_s
        for model in dict.fromkeys(c.model for c in configurations):
            shape = {"model": self.systems.shape(model), "tokens": self.work.batch * self.work.length}
            requests[f"ceilings/{model}"] = {**shape, "seconds": self.pace.ceilings_s / 3}, self.pace.ceilings_s
        with closing(Turns[str, System](lambda _, until_s: self.systems.preparing(until_s))) as process:
            for key, (request, need_s) in requests.items():
                if key.startswith("correct/") and not self.book.current(key):
                    self.book.forget(key)  # what was right with other sources says nothing of these
                self.measure(key, need_s, partial(self._prepared, process, request), {"what": key.partition("/")[0]})

    def _prepared(self, process: Turns[str, System], request: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        asked = json.dumps(request)
        try:
            if asked not in self._answered:  # the models of a rehearsal are all the same
                self._answered[asked] = process.opened("", until_s).ask(request, left_s(until_s))
            return self._answered[asked]
        except Failed:  # an error on the device may stay in its process
            process.close()
            raise

    def _reason_against(self, c: Configuration) -> str:
        """Return why a configuration is not timed; "" where it may run."""
        if self.systems.rehearse and c.compile:
            return "Left out of a rehearsal: the compiler takes longer than all the rest."
        plan = self._plan(c)
        if plan["memory_gib"] is not None and plan["gib"] + CONTEXT_GIB > plan["memory_gib"]:
            return f"It needs {plan['gib']:.0f} GiB as planned, and the device has {plan['memory_gib']:.0f}."
        return self.systems.missing(c)

    def _unchecked(self, c: Configuration) -> dict[str, str]:
        """Return {"unchecked": why} for a configuration that is timed although it was not found right; {} where it was, and
        for a peer."""
        why = "" if c.peer else self._doubt(c)
        return {"unchecked": why} if why else {}

    def _doubt(self, c: Configuration) -> str:
        if why := self._smoke_says(c.recipe, c.train, c.fused, c.graphs):
            return why
        checked = self.book[_correct(c)]
        if "failed" in checked:
            return f"Its check failed: {checked['failed']}"
        if c.fused and not checked["fused"]["ok"]:
            return f"Fused, it is not what it is apart: see {_correct(c)} in the raw file."
        if c.graphs and not checked["graphs"]["ok"]:
            return f"Replayed as graphs, it is not what it is launched one by one: see {_correct(c)} in the raw file."
        return ""

    def _plan(self, c: Configuration) -> dict[str, Any]:
        """Return memory, FLOPs and the predicted time of a step, at the rates that the device reached."""
        key = f"plan/{c.name}"
        if key not in self.book:
            self.book.put(key, {"what": "plan", **planned(c, self.systems.shape(c.model), self.work, self._gpu())})
        return self.book[key]

    def _gpu(self) -> Gpu | None:
        found = self.book["ceilings/device"]
        return Gpu.from_json(json.dumps(found["gpu"])) if "gpu" in found else None

    # -- turns

    def run_group(self, group: BenchGroup) -> None:
        """Measure the rounds of a group; in the last one each system is profiled after its turn."""
        ready: list[Configuration] = []
        for c in group.configurations:
            if reason := self._reason_against(c):
                self._leave_out(_key("turn", group, c, 0), c, reason, group=group.name)
            else:
                ready.append(c)
        sizes_gib = [self._plan(c)["gib"] + CONTEXT_GIB for c in ready]
        room_gib = ROOM * (next((self._plan(c)["memory_gib"] for c in ready), None) or math.inf)
        rounds = min(group.rounds, self.pace.rounds)
        with closing(Turns(self.systems.training, alone=ready[resident(sizes_gib, room_gib) :])) as turns:
            for number, c in turns.rounds(ready, rounds):
                self._turn(turns, group, c, number, last=number == rounds - 1)

    def _turn(self, turns: _Turns, group: BenchGroup, c: Configuration, number: int, last: bool) -> None:
        what = {"group": group.name, "round": number, **_about(c), **self._unchecked(c)}
        need_s = self.pace.turn_s + (2.0 if c in turns.open else self.opens_s(c.model))
        found = self.measure(
            _key("turn", group, c, number), need_s, partial(self._timed, turns, c), {"what": "turn", **what}
        )
        if "failed" in found or "left_out" in found:
            return turns.drop(c)
        if last and not c.peer and self._profiles() < self.pace.profiles:
            key = f"profile/{group.name}/{c.system}"
            self.measure(key, need_s, partial(self._profiled, turns, c), {"what": "profile", **what})

    def _timed(self, turns: _Turns, c: Configuration, until_s: float) -> dict[str, Any]:
        """Time as many steps as a turn has time for."""
        new, began_s = c not in turns.open, time.monotonic()
        running = turns.opened(c, until_s)
        opened_s = time.monotonic() - began_s
        more: dict[str, Any] = {"first": {**_first(running), "opened_s": opened_s}} if new else {}
        steps = max(1, min(self.pace.most_steps, round(self.pace.turn_s / running.each_s)))
        found = running.take(steps, until_s)
        if not all(map(math.isfinite, found["losses"])):
            raise Failed("Its loss is not finite, so its speed means nothing.")
        if c.graphs and not c.peer and found.get("graphs", "captured") != "captured":
            more["no_cuda_graphs"] = found["graphs"]
            print(f"{c.name} runs WITHOUT CUDA graphs: {found['graphs']}", file=sys.stderr, flush=True)
        return {**found, "tokens_per_s": found["tokens"] / found["seconds"], "alone": turns.alone(c), **more}

    def _profiled(self, turns: _Turns, c: Configuration, until_s: float) -> dict[str, Any]:
        return turns.opened(c, until_s).system.ask({"profile": self.pace.profile}, left_s(until_s))

    def _profiles(self) -> int:
        return sum(each["what"] == "profile" for each in self.book.found.values())

    def opens_s(self, model: str) -> float:
        """Return the seconds that a system of this model takes until it is warm: the longest so far, and a quarter."""
        took = [
            each["first"]["opened_s"]
            for each in self.book.found.values()
            if "first" in each and each["configuration"]["model"] == model
        ]
        return 1.25 * max(took) if took else OPENS_S

    def _leave_out(self, key: str, c: Configuration, reason: str, **what: Any) -> None:
        if not self.book.done(key):
            self.book.put(key, {"what": key.partition("/")[0], **_about(c), **what, "left_out": reason})

    # -- alone

    def _start(self, c: Configuration) -> None:
        """Measure the seconds from the start of a process to its first step and to its last step of warm-up: caches empty,
        then full."""
        self._single(f"start/{c.name}", c, 3 * self.opens_s(c.model), partial(self._started, c))

    def _started(self, c: Configuration, until_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: f"{folder}/{name}" for name in CACHES}
            for state in ("empty", "full"):
                began_s = time.monotonic()
                with closing(self.systems.training(c, until_s, environment=caches)) as running:
                    first = _first(running)
                found[state] = {**first, "all_s": time.monotonic() - began_s}
        return found

    def _sustain(self, c: Configuration) -> None:
        minutes = self.pace.sustained_minutes
        self._single(f"sustained/{c.name}", c, 60 * minutes + self.opens_s(c.model), partial(self._sustained, c))

    def _sustained(self, c: Configuration, until_s: float) -> dict[str, Any]:
        with closing(self.systems.training(c, until_s, self.pace.sample_every)) as running:
            return running.system.ask({"minutes": self.pace.sustained_minutes}, left_s(until_s))

    def _single(self, key: str, c: Configuration, need_s: float, work: Callable[[float], Mapping[str, Any]]) -> None:
        if reason := self._reason_against(c):
            self._leave_out(key, c, reason)
        else:
            self.measure(key, need_s, work, {"what": key.partition("/")[0], **_about(c), **self._unchecked(c)})


_Turns = Turns[Configuration, Running]


def _about(c: Configuration) -> dict[str, Any]:
    return {"name": c.name, "system": c.system, "configuration": c.to_dict()}


def in_question(found: Mapping[str, Any]) -> bool:
    """Return whether --again repeats a measurement: it failed, was not right or not checked, missed something, or is a plan, which
    depends on others."""
    wrong = found["what"] in ("correct", "smoke") and not all(
        found.get(part, {}).get("ok") for part in ("fused", "graphs")
    )
    return any(name in found for name in ("failed", "unchecked", "missed")) or wrong or found["what"] == "plan"


def _first(running: Running) -> dict[str, Any]:
    """Return a system's times of build and warm-up, its losses until it was warm, its note and its versions."""
    names = ("first_step_s", "warm_up_s", "warm_up_steps")
    ready = running.system.ready
    return {
        "build_s": ready.get("build_s"),
        **{name: getattr(running, name) for name in names},
        "losses": running.losses[: running.warm_up_steps],
        "note": ready.get("note", ""),
        "versions": ready.get("versions", {}),
    }


def resident(sizes_gib: Sequence[float], room_gib: float) -> int:
    """Return how many of the first systems can stay in memory, with room beside them for the largest of the others."""
    if sum(sizes_gib) <= room_gib:
        return len(sizes_gib)
    count = 0
    while count < len(sizes_gib) - 1 and sum(sizes_gib[: count + 1]) + max(sizes_gib[count + 1 :]) <= room_gib:
        count += 1
    return count


def planned(c: Configuration, shape: Mapping[str, Any], work: BenchWork, gpu: Gpu | None) -> dict[str, Any]:
    """Return the plan of a configuration by `surokit.plan`; a peer's memory is planned as surokit's with nothing fused."""
    import surokit as sk
    from surokit.bench.correct import recipe_of

    unplanned = bool(c.peer) or c.compile  # neither another library's step nor a compiled one is planned
    plan = sk.plan(
        sk.DecoderConfig(**shape, max_length=work.length),
        recipe=recipe_of(c.recipe, c.train, work.rank, work.alpha),
        batch=work.batch,
        length=work.length,
        accumulate=work.accumulate,
        recompute=c.recompute,
        optimizer=c.optimizer,
        fusion=c.fusion,
        graphs=c.graphs and not unplanned and gpu is not None and gpu.device != "cpu",
        gpu=gpu,
    )
    estimate = plan.estimate
    return {
        "gib": plan.memory.gib,
        "memory_gib": None if gpu is None else gpu.memory_gib,
        "flops_per_token": plan.flops_per_token,
        "peak_tflops": None if gpu is None else gpu.bf16_tflops,
        "predicted_tokens_per_s": estimate.tokens_per_s
        if estimate is not None and estimate.rates.measured and not unplanned
        else None,
        "floor_ms": None if estimate is None else estimate.floor_ms,
    }


def _smoke(recipe: str, train: Train) -> str:
    return f"smoke/{recipe} {train}"


def _correct(c: Configuration) -> str:
    return f"correct/{c.model} {c.train} {c.recipe}"


def _key(what: str, group: BenchGroup, c: Configuration, number: int) -> str:
    return f"{what}/{group.name}/{number}/{c.system}"
