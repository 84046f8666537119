"""Measure the cost of offloading in a step: no offload, OffloadAdamW and ZenFlow in turns, beside the formulas of
surokit.planner.offload.

    python -m surokit.bench offload --out offload.json

On a CUDA device these are real steps of a Decoder over the real link (offload_decoder). Elsewhere the device is emulated: it
computes by sleeping, while the host's threads do their work (offload_emulated).

In a round each way takes a turn, in a new random order; the control, OffloadAdamW, takes two, which shows the noise. A turn
is whole windows. ZenFlow's begins with a window that is not timed, so that AdamW has a job when the clock starts, as it has
one when the clock stops. Hot columns are chosen before, once. A ratio is taken within a round (offload_table). Each
measurement is in the file when it is made, and the same command goes on with what is missing. A failure is kept in words,
and the others go on. On a CUDA device each model is measured by a process of its own: an access to memory that is not there
ends that process and costs the measurement that it was making.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surokit.bench import offload_decoder, offload_emulated, offload_table
from surokit.bench.configurations import BenchWork
from surokit.bench.offload_decoder import Real, Trains
from surokit.bench.offload_emulated import CASES, Case, Emulated, Sleeper, gradients
from surokit.bench.offload_table import turns_of
from surokit.bench.offload_ways import AGAIN, CONTROL, NONE, WAYS, ZENFLOW, K, Way, host_busy, turn
from surokit.bench.process import Answers, Failed, Worker, left_s, serve
from surokit.bench.results_store import Book, next_free
from surokit.bench.turns import Call, OutOfTime, Turns
from surokit.planner.offload.formulas import Host, predict_offload

table = offload_table.table
VERSION = 1  # of the measurements: a change of what is measured begins a new file
GRACE_S = 60.0  # beyond the minutes of a call, for what was begun
LATE_S = 60.0  # beyond these, until a process that does not answer is ended
TRIES = 2  # processes of a model, the first one included, where one dies


@dataclass(frozen=True)
class Pace:
    """A Pace sets the length of turns. windows: of a turn of ZenFlow. steps: of another way's turn, at most; turn_s: above
    which it takes fewer, though two."""

    windows: int = 1
    steps: int = 4
    turn_s: float = 8.0

    def of(self, step_s: float) -> int:
        return max(2, min(self.steps, int(self.turn_s / max(step_s, 1e-9))))


Settings = dict[str, Any]
Job = Callable[[Book, Call, int], None]  # (where it is kept, the time that there is, rounds)


def run(
    device: str | None = None,
    rounds: int = 8,
    minutes: float = 20.0,
    millions: float = 25.0,
    models: Sequence[str] = (),
    layers: int | None = None,
    interval: int | None = None,
    cases: Sequence[str] = (),
    out: Path | None = None,
    new: bool = False,
    again: bool = False,
    rehearse: bool = False,
) -> dict[str, Any]:
    """Measure what is missing of the file for so many minutes; return its data.

    device: "cpu" or "cuda"; None is a GPU where there is one. rehearse: the code of a GPU with a tiny decoder on a CPU.
    millions: parameters of the emulated model, in millions. models: of Qwen3's shapes on a GPU ("1.7b", ...); unless given,
    those that its memory and the host's hold. layers: of each, all unless given; interval: S there, 4 unless given. cases:
    words of names of emulated cases; all of them unless given. new: the next free name instead of `out`. again: failed
    measurements are made once more. Raises ValueError for arguments out of range, and RuntimeError without the device.
    """
    import torch

    if rounds < 2 or not minutes > 0 or not millions > 0:
        raise ValueError(
            f"offload needs at least 2 rounds, minutes and millions above 0, not {rounds}, {minutes:g} and {millions:g}."
        )
    for name, value in (("layers", layers), ("interval", interval)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: at least 1.")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: without --device cuda the device is emulated.")
    real = rehearse or (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    if not real and (models or layers is not None or interval is not None):
        raise ValueError(
            "models, layers and interval are of the decoder on a GPU: an emulated case has its own, choose among cases."
        )
    if real and cases:
        raise ValueError("cases are of an emulated device: choose among models, or take --device cpu.")
    out = out or Path("offload-rehearsal.json" if rehearse else "offload.json")
    name, settings, jobs = _decoders(models, layers, interval or 4, rehearse) if real else _emulations(millions, cases)
    head = {"benchmark": name, "version": VERSION, "settings": {**settings, "k": K}, "rehearsal": rehearse}
    call = Call(time.monotonic() + 60 * minutes, grace_s=GRACE_S)
    book = Book(next_free(out) if new else out, "offload", head, {"minutes": minutes, "rounds": rounds})
    if again:
        book.forget(*[key for key, found in book.found.items() if "failed" in found])
    try:
        for job in jobs:
            job(book, call, rounds)
    except OutOfTime as end:
        book.end(str(end))
        print(f"{end} Call it again to go on.", file=sys.stderr)
    else:
        book.end("")
    print(f"raw result: {book.path}", file=sys.stderr)
    return book.data


def _decoders(
    models: Sequence[str], layers: int | None, interval: int, rehearse: bool
) -> tuple[str, Settings, list[Job]]:
    """Return the benchmark's name, its settings, and the measurements with decoders."""
    name = "offload: training steps" + (", rehearsed on a processor" if rehearse else "")
    work = BenchWork(batch=1, length=32, accumulate=2) if rehearse else BenchWork()
    if rehearse:
        device, pace, chosen = "cpu", Pace(1, 2), [offload_decoder.rehearsal(interval)]
    else:
        device, pace = "cuda", Pace(2, 8)
        chosen = offload_decoder.cases(work, models, layers, interval, *offload_decoder.free_memory(device))
    settings = {each: getattr(work, each) for each in ("batch", "length", "accumulate", "tokens")}
    measure = run_decoder if rehearse else in_a_process
    return name, settings, [partial(measure, case, pace, work, device) for case in chosen]


def _emulations(millions: float, words: Sequence[str]) -> tuple[str, Settings, list[Job]]:
    """Return name, settings and measurements as `_decoders` does, with an emulated device."""
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    if not chosen:
        raise ValueError(f"cases={list(words)}: known are {', '.join(repr(case.name) for case in CASES)}.")
    work = gradients(millions)
    settings = {"parameters": sum(g.numel() for g in work)}
    return "offload: an emulated device", settings, [partial(_emulation, case, work) for case in chosen]


def _emulation(case: Case, work: Sequence[Any], book: Book, call: Call, rounds: int) -> None:
    Bench(book, case, call, rounds).emulated(work)


def run_decoder(case: Trains, pace: Pace, work: BenchWork, device: str, book: Book, call: Call, rounds: int) -> None:
    Bench(book, case, call, rounds, pace).real(work, device)


def in_a_process(case: Trains, pace: Pace, work: BenchWork, device: str, book: Book, call: Call, rounds: int) -> None:
    """Measure a decoder as `_decoder` does, in another process, which writes the same file. Where that process dies, its
    current measurement has failed, and another process goes on. Raises OutOfTime."""
    if case.left_out:
        return run_decoder(case, pace, work, device, book, call, rounds)
    task = {"case": asdict(case), "pace": asdict(pace), "work": asdict(work), "device": device, "rounds": rounds}
    for _ in range(TRIES):
        if not left_s(call.ends_s):
            raise OutOfTime(f"Next is {case.name}, and no time is left.")
        book.begin(f"{case.name}/process")
        most_s = left_s(call.ends_s) + GRACE_S + LATE_S
        try:
            with Worker(argv_of({**task, "path": str(book.path), "head": book.head}), case.name, most_s) as worker:
                left = worker.ask({"seconds": left_s(call.ends_s)}, most_s)["left"]
        except Failed as problem:
            book.read_again()
            key = book.begun or f"{case.name}/process"
            book.put(key, {"case": asdict(case), "what": key.rpartition("/")[2], "failed": str(problem)})
            print(f"{case.name}: {problem}", file=sys.stderr, flush=True)
            continue
        book.read_again()
        if left:
            raise OutOfTime(left)
        return


def argv_of(task: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "surokit.bench.offload", json.dumps(task)]


def _serving(task: Mapping[str, Any]) -> tuple[dict[str, Any], Answers]:
    """Return (the first line, the function that answers) of the process of a model: to {"seconds": s} it measures so long
    and says {"left": why}."""
    case = Trains(**{**task["case"], "alone": tuple(task["case"]["alone"])})
    pace, work = Pace(**task["pace"]), BenchWork(**task["work"])

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        book = Book(Path(task["path"]), "offload", task["head"], {"case": case.name})
        call = Call(time.monotonic() + request["seconds"], grace_s=GRACE_S)
        try:
            run_decoder(case, pace, work, task["device"], book, call, task["rounds"])
        except OutOfTime as end:
            return {"left": str(end)}
        return {"left": ""}

    return {"ready": True}, answer


class Bench:
    """A Bench is one case in one call."""

    def __init__(self, book: Book, case: Case | Trains, call: Call, rounds: int, pace: Pace = Pace()) -> None:
        self.book, self.case, self.call, self.count, self.pace = book, case, call, rounds, pace

    def emulated(self, work: Sequence[Any]) -> None:
        import torch

        assert isinstance(self.case, Case)
        case = self.case
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # what stands for the device takes one core, as its workers are to have the others
        try:
            chosen = self._kept("setting", 60.0, lambda until_s: {"setting": offload_emulated.setting(case, work)})
            if "setting" in chosen:
                s = chosen["setting"]
                device = Sleeper(s["compute_ms"] / 1e3)
                options = {"gb_s": s["link_gb_s"], "rest_s": s["rest_s"], "interval": case.interval}
                self._turns(lambda way: Emulated(way, work, device, **options), s["link_gb_s"], s["rest_s"])
        finally:
            torch.set_num_threads(before)

    def real(self, work: BenchWork, device: str) -> None:
        assert isinstance(self.case, Trains)
        case = self.case
        if case.left_out:
            self.book.put(f"{case.name}/setting", {"case": asdict(case), "what": "setting", "left_out": case.left_out})
            return
        rates = self._kept("setting", 30.0, lambda until_s: {"setting": {"link_gb_s": _link_gb_s(device)}})
        gb_s = rates.get("setting", {}).get("link_gb_s")
        together = () if case.alone else (NONE, CONTROL, ZENFLOW)
        self._turns(lambda way: Real(way, case, work, device), gb_s, 0.0, together, case.alone)

    def _turns(
        self,
        make: Callable[[str], Way],
        gb_s: float | None,
        rest_s: float,
        together: Sequence[str] = (),
        alone: Sequence[str] = (),
    ) -> None:
        """Let the ways take turns. together: ways that are built before the first turn, so that a lack of room for all is
        known. alone: ways that are built for each turn."""
        keys = ["rates", *(f"{number}/{way}" for number in range(self.count) for way in WAYS)]
        if all(self.book.done(f"{self.case.name}/{key}") for key in keys):
            return
        with closing(Turns[str, Way](lambda way, until_s: make(way), alone=alone)) as turns:
            if not self.book.done(together_key := f"{self.case.name}/together"):  # unless a process died of it
                self.book.begin(together_key)
                for way in together:
                    with contextlib.suppress(Exception):  # its turn says so
                        turns.opened(way, math.inf)
            for number in range(self.count):
                for way in random.Random(number).sample(WAYS, len(WAYS)):
                    self.take_turn(turns, way, number)
            if turns_of(self.book.data, self.case.name)[NONE]:
                self._kept("rates", 60.0, lambda until_s: {"rates": self.rates_of(turns, until_s, gb_s, rest_s)})

    def take_turn(self, turns: Turns[str, Way], way: str, number: int) -> None:
        """Time a turn of a way, and after its first turn measure its steps one by one, if a real device takes them."""
        name = CONTROL if way == AGAIN else way

        def timed(until_s: float) -> dict[str, Any]:
            with self._left_whole(turns, name):
                system = turns.opened(name, until_s)
                return {"turn": turn(system, self._steps(way, system.window)), "alone": turns.alone(name)}

        def seen(until_s: float) -> dict[str, Any]:
            with self._left_whole(turns, name):
                system = turns.opened(name, until_s)
                assert isinstance(system, Real)
                return {"seen": offload_decoder.looked_at(system)}

        window = self.case.interval if way == ZENFLOW else 1
        took_s = self.step_s_of(name)
        one_s = took_s if math.isfinite(took_s) else 0.0
        found = self._kept(f"{number}/{way}", one_s * (self._steps(way, window) + window - 1), timed)
        if isinstance(self.case, Trains) and "turn" in found and way != AGAIN:
            self._kept(f"steps/{way}", one_s * offload_decoder.LOOKED_AT, seen)
        if turns.alone(name):
            turns.close(name)

    def _steps(self, way: str, window: int) -> int:
        return (
            self.pace.windows * window
            if way == ZENFLOW
            else self.pace.of(self.step_s_of(CONTROL if way == AGAIN else way))
        )

    @contextlib.contextmanager
    def _left_whole(self, turns: Turns[str, Way], name: str) -> Any:
        """Close a system that failed inside the block, so that its next turn has another one."""
        try:
            yield
        except BaseException:
            turns.close(name)
            raise

    def step_s_of(self, way: str) -> float:
        """Return the seconds of a step, by its turns so far."""
        prefix = f"{self.case.name}/"
        took = [each["turn"]["ms"] for key, each in self.book.found.items() if key.startswith(prefix) and "turn" in each
                and key.endswith(f"/{way}")]  # fmt: skip
        return statistics.median(took) / 1e3 if took else math.inf

    def rates_of(self, turns: Turns[str, Way], until_s: float, gb_s: float | None, rest_s: float) -> dict[str, Any]:
        """Return the rates of the host's threads in this case, and the planner's prediction with them."""
        control = turns.opened(CONTROL, until_s)
        adam_s, n = host_busy(control, 2)["adam"] + rest_s * control.parameters, control.parameters
        if turns.alone(CONTROL):
            turns.close(CONTROL)
        zenflow = turns.opened(ZENFLOW, until_s)
        busy = host_busy(zenflow, zenflow.window)
        found: dict[str, Any] = {
            "parameters": n,
            "link_gb_s": gb_s,
            "adam_params_s": n / adam_s,
            "adding_params_s": (1 - K) * n / busy["accumulator"],
            "zenflow_adam_params_s": (1 - K) * n / self.case.interval / busy["adam"],
        }
        if gb_s:
            found["predicted"] = self._predicted(found)
        return found

    def _predicted(self, rates: Mapping[str, Any]) -> dict[str, Any]:
        none_ms = statistics.median(each["ms"] for each in turns_of(self.book.data, self.case.name)[NONE])
        host = Host(rates["link_gb_s"], rates["adam_params_s"], accumulate_params_s=rates["adding_params_s"])
        o = predict_offload(
            none_ms, rates["parameters"], host, topk_ratio=K, update_interval=self.case.interval, gradient_bytes=2
        )
        return {
            **{
                name: getattr(o, name)
                for name in ("synchronous_ms", "zenflow_ms", "landing_ms", "stalled", "removed", "gain")
            },
            "binds": o.binds,
        }

    def _kept(self, key: str, need_s: float, work: Callable[[float], Mapping[str, Any]]) -> dict[str, Any]:
        full = f"{self.case.name}/{key}"
        if self.book.done(full):
            return self.book[full]
        about = {"case": asdict(self.case), "what": key.rpartition("/")[2]}

        def begun(until_s: float) -> Mapping[str, Any]:
            self.book.begin(full)
            return _in_words(work, until_s)

        return self.book.put(full, {**about, **self.call.tried(full, need_s, begun)})


def _in_words(work: Callable[[float], Mapping[str, Any]], until_s: float) -> Mapping[str, Any]:
    """Return the result of `work(until_s)`. The trace of an error is printed, and the error becomes Failed; if the device no longer
    answers, a RuntimeError ends the call, so that the measurements to come are not marked as failed."""
    try:
        return work(until_s)
    except (Failed, OutOfTime):
        raise
    except Exception as error:
        traceback.print_exc()
        words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not offload_decoder.answers():
        raise RuntimeError(
            f"The device answers no more, after {words}. What was finished is in the file; call it again."
        )
    raise Failed(words)


def _link_gb_s(device: str) -> float | None:
    import surokit as sk

    if device == "cpu":
        return 100.0  # a rehearsal's prediction means nothing
    ceilings = sk.calibrate(device, seconds=5.0, cache=False, progress=False).ceilings
    return ceilings.host_gb_s if ceilings else None


if __name__ == "__main__":
    sys.exit(serve(lambda: _serving(json.loads(sys.argv[1]))))
