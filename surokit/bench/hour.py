"""Run the first hour on a GPU: everything that is measured and tested there, the most needed first, in steps of at most
eight minutes.

    python -m surokit.bench hour --out gpu-hour --minutes 60

A step is a command in a process of its own, which is ended at its limit. Its measurements are in its file at once (those of
`kernels`, `memory`, `calibration` and `dissection` at their end), its printed text in its log. `status.json` says of each step
whether it is waiting, running, done, failed or cut off, for how many seconds it ran and what went wrong; it is written whole
after every change. The same command goes on where the last one ended, however that ended: a step that is done is not repeated,
one that was cut off goes on, and one that failed is named and tried once more only where --again asks.

A step that writes a file as it goes (results_store.py) may take several calls. One that adds nothing to its file until its
limit has failed; so has one that dies of itself. The others go on.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from surokit.bench import result
from surokit.bench.results_store import commit
from surokit.child_processes import end_group, end_with_parent

ROOT = Path(__file__).resolve().parents[2]
VERSION = 1  # of status.json
MOST_MIN = 8.0  # of any step
SPARE_MIN = 1.0  # between the minutes that a step is given and those after which it is ended
LEAST_MIN = 1.5  # that a step which goes on later is worth beginning with


@dataclass(frozen=True)
class HourStep:
    """An HourStep is a command to run: `command` are arguments of this Python, with {out} for the folder and {minutes} for the
    minutes left.

    minutes: after which it is ended. rehearsal: the same on a CPU. file: the file that it writes in the folder; part: the
    key of the measurements in it, where it is written as it goes. fine: exit statuses that are no failure. once: it leaves
    the rest to another call of the hour. lacks: why it cannot run here.
    """

    name: str
    words: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    minutes: float = MOST_MIN
    file: str = ""
    part: str = ""
    fine: tuple[int, ...] = (0,)
    once: bool = False
    lacks: Callable[[], str] = lambda: ""


def _bench(*words: str) -> tuple[str, ...]:
    return ("-m", "surokit.bench", *words)


def _gpu(name: str, words: str, *parts: str, minutes: float = MOST_MIN, once: bool = False) -> HourStep:
    chosen = ("--part", *parts) if parts else ()
    command = _bench("gpu", *chosen, "--minutes", "{minutes}", "--out", "{out}/gpu.json")
    return HourStep(name, words, command, (*command, "--rehearse"), minutes, "gpu.json", "gpu", once=once)


def _tests(name: str, words: str, files: Sequence[Path], marked: str = "not soak") -> HourStep:
    command: tuple[str, ...] = (
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--present",
        "--book",
        f"{{out}}/{name}.json",
    )
    chosen = tuple(str(path.relative_to(ROOT)) for path in files)
    rehearsal = (*command, "--rehearse", "tests/gpu/test_memory.py", "-k", "meter")
    command = (*command, *chosen, "-m", marked)
    return HourStep(name, words, command, rehearsal, file=f"{name}.json", part="tests", fine=(0, 1, 5), lacks=_no_tests)


def _marked() -> list[Path]:
    """List the test files beside others, of which some tests need a device."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if path.parent.name != "gpu" and "mark.gpu" in path.read_text(encoding="utf-8")]


def _no_tests() -> str:
    return (
        "" if (ROOT / "tests" / "gpu").is_dir() else "The tests are not here: run it in a checkout of the repository."
    )


def _no_peers() -> str:
    from surokit.bench import peers

    return (
        ""
        if peers.next_baseline({"train": "lora", "device": "cuda"})
        else f"None of {', '.join(peers.BASELINES)} is installed."
    )


def steps() -> tuple[HourStep, ...]:
    """Return the steps of the hour, in their order."""
    kernels = _bench("kernels", "--out", "{out}/kernels.json")
    offload = _bench("offload", "--minutes", "{minutes}", "--out", "{out}/offload.json")
    memory = _bench("memory", "--out", "{out}/memory.json")
    ceilings = _bench("ceilings", "--out", "{out}/ceilings.json")
    dissection = _bench("dissection", "--folder", "{out}/dissection", "--out", "{out}/dissection.json", "--rounds", "1")
    dissection += ("--model", "135M")
    peers = _bench("peers", "--minutes", "{minutes}", "--out", "{out}/peers.json")
    return (
        _gpu("smoke", "a small step of every recipe against the definition", "smoke", minutes=3.0, once=True),
        _gpu("must", "LoRA on 0.6B and 8B in BF16, FP8 and QFP8", "must"),
        HourStep(
            "kernels",
            "each kernel beside a copy or a product in bfloat16",
            kernels,
            (*kernels, "--rounds", "1", "--shape", "128", "256"),
            minutes=5.0,
            file="kernels.json",
        ),
        HourStep(
            "offload",
            "no offload, OffloadAdamW and ZenFlow",
            (*offload, "--device", "cuda"),
            (*offload, "--rehearse", "--rounds", "2"),
            file="offload.json",
            part="offload",
        ),
        HourStep(
            "memory",
            "bytes of a step, as planned and as allocated",
            memory,
            (*memory, "--settings", "bf16", "--device", "cpu"),
            minutes=4.0,
            file="memory.json",
        ),
        HourStep(
            "calibration",
            "the rates that the device reaches, for the planner",
            ceilings,
            (*ceilings, "--seconds", "0.1"),
            minutes=3.0,
            file="ceilings.json",
        ),
        HourStep(
            "dissection",
            "each optimization of a 135M shape alone",
            dissection,
            (*dissection, "--what", "tune", "--model", "tiny"),
            file="dissection.json",
        ),
        _gpu("rest", "the rest of the benchmark"),
        HourStep(
            "peers",
            "other libraries at the same work",
            peers,
            (*peers, "--rehearse", "--rounds", "1", "--steps", "1", "--settings", "equal"),
            file="peers.json",
            part="peers",
            lacks=_no_peers,
        ),
        *test_steps(),
    )


def test_steps() -> tuple[HourStep, ...]:
    """Return the tests on a device, those of the Triton kernels among them."""
    folder = ROOT / "tests"
    return (
        _tests("tests-device", "tests of what is above the kernels", sorted(folder.glob("gpu/test_*.py"))),
        _tests("tests-kernels", "tests of the Triton kernels", sorted(folder.glob("kernels/test_triton_*.py"))),
        _tests("tests-others", "tests of other folders that need a device", _marked(), "gpu and not soak"),
    )


def run(
    out: Path = Path("gpu-hour"),
    minutes: float = 60.0,
    only: Sequence[str] = (),
    again: bool = False,
    rehearse: bool = False,
    known: Sequence[HourStep] | None = None,
) -> dict[str, Any]:
    """Run the steps that are left (of those named in `only`) for so many minutes; return the status that status.json has
    then.

    out: the folder of all files, made where it is not there. again: steps that failed, and measurements that their files
    have as failed or unchecked, are tried once more. rehearse: every step on a CPU, tiny; known: other steps than those of
    the hour. Raises ValueError for a step that is not there or a folder of something else, RuntimeError without a GPU or
    where an hour runs already.
    """
    known = steps() if known is None else known
    names = [step.name for step in known]
    for name in only:
        if name not in names:
            raise ValueError(f"There is no step {name!r}: known are {', '.join(names)}.")
    if not minutes > 0:
        raise ValueError(f"minutes={minutes}: a number above zero; 60 is usual, 9 where a command may take ten.")
    if not rehearse:
        needs_gpu()
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder), _stoppable():
        hour = Hour(folder, known, minutes, rehearse, again)
        try:
            for step in known:
                if not only or step.name in only:
                    hour.take(step)
        except KeyboardInterrupt:
            hour.end("stopped")
            raise
        hour.end("over")
        return hour.status


def background(argv: Sequence[str], out: Path) -> str:
    """Start the same hour detached from this terminal; return how to watch and how to end it, in words.

    argv: the command's words without --background. Raises RuntimeError where an hour runs already.
    """
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        pass  # nobody is there
    null, log = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), str(folder / "hour.log")
    appended = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    command = [sys.executable, "-m", "surokit.bench", *argv]
    process = os.posix_spawn(
        sys.executable,
        command,
        _environment(),
        file_actions=[null, appended, (os.POSIX_SPAWN_DUP2, 1, 2)],
        setsid=True,
    )
    return (
        f"The hour runs in the background, process {process}.\n"
        f"watch it:  cat {out / STATUS}     or  tail -f {out / 'hour.log'}\n"
        f"end it:    kill {process}        the same command goes on with what is left"
    )


STATUS = "status.json"


class Hour:
    """An Hour is one call: the folder, its status, and the clock at which it ends."""

    def __init__(self, folder: Path, known: Sequence[HourStep], minutes: float, rehearse: bool, again: bool) -> None:
        self.folder, self.rehearse, self.whole_min = folder, rehearse, minutes
        self.ends_s = time.monotonic() + 60 * minutes
        self.status = _read(folder / STATUS, known, rehearse)
        self.status |= {"state": "running", "process": os.getpid(), "commit": commit(), "minutes": minutes}
        self._again: set[str] | None = set() if again else None  # files that were asked once more
        for entry in self.entries.values():
            if entry["state"] == "running":  # whoever ran it is gone
                entry |= {"state": "cut off", "reason": "The call before this one ended without a word."}
            elif again and (entry["state"] in ("failed", "left out") or entry["problems"]):
                entry |= {"state": "waiting", "reason": "", "problems": {}}
        self._write()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = self.status["steps"]
        return entries

    def take(self, step: HourStep) -> None:
        """Run a step until it is done, has failed, makes no headway, or the time does not suffice."""
        entry = self.entries[step.name]
        if entry["state"] in ("done", "failed", "left out"):
            return
        if not self.rehearse and (why := step.lacks()):
            return self._say(step, "left out", why)
        while (limit_min := self.limit_min_of(step)) > 0:
            before = len(self._found(step))
            self._run(step, limit_min)
            if entry["state"] != "cut off" or step.once or len(self._found(step)) == before:
                return

    def end(self, state: str) -> None:
        self.status["state"] = state
        self._write()

    def limit_min_of(self, step: HourStep) -> float:
        """Return the minutes that a step gets now; 0 where they are too few for it."""
        left_min = (self.ends_s - time.monotonic()) / 60
        least = LEAST_MIN if step.part else step.minutes
        return min(step.minutes, left_min) if left_min >= min(least, 0.9 * self.whole_min) else 0.0

    def _run(self, step: HourStep, limit_min: float) -> None:
        entry, began_s, before = self.entries[step.name], time.monotonic(), self._found(step)
        self._say(step, "running", "")
        log = self.folder / f"{step.name}.log"
        with log.open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, *self.command_of(step, limit_min)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # a process group of its own, which is ended whole
                preexec_fn=end_with_parent,  # and which does not outlive this process, however that ends
                env=_environment(),
            )
            state, reason = "cut off", "It was stopped."
            try:
                state, reason = self._judged(step, process.wait(60 * limit_min), log)
            except subprocess.TimeoutExpired:
                news = len(self._found(step)) > len(before)
                own = limit_min >= step.minutes
                state = "failed" if own and not news else "cut off"
                reason = f"It did not end within {limit_min:.3g} minutes" + (
                    ", and measured nothing." if state == "failed" else "."
                )
            finally:
                end_group(process)
                entry["seconds"] = round(entry["seconds"] + time.monotonic() - began_s, 1)
                entry["calls"] += 1
                entry["problems"] |= _problems(before, self._found(step))
                self._say(step, state, reason)

    def _judged(self, step: HourStep, status: int, log: Path) -> tuple[str, str]:
        """Return (state, reason) of a step that ended by itself."""
        if status not in step.fine:
            how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
            return ("cut off" if status == GOES_ON else "failed"), f"It ended with {how}: {_last_line(log)}"
        left = self._data(step)["calls"][-1].get("left", "It did not say what is left.") if step.part else ""
        return ("cut off", left) if left else ("done", "")

    def command_of(self, step: HourStep, limit_min: float) -> list[str]:
        spare = min(SPARE_MIN, 0.3 * limit_min)
        words = step.rehearsal if self.rehearse else step.command
        minutes = f"{limit_min - spare:.3g}"
        filled = [word.replace("{out}", str(self.folder)).replace("{minutes}", minutes) for word in words]
        if self._again is None or step.part not in ("gpu", "offload") or step.file in self._again:
            return filled
        self._again.add(step.file)
        return [*filled, "--again"]

    def _data(self, step: HourStep) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            data = json.loads((self.folder / step.file).read_text(encoding="utf-8"))
            if isinstance(data, dict) and data.get("calls"):
                return data
        return {step.part: {}, "calls": [{}]}

    def _found(self, step: HourStep) -> dict[str, Any]:
        """Return the measurements in the step's file, where it is written as it goes."""
        found: dict[str, Any] = self._data(step)[step.part] if step.part else {}
        return found

    def _say(self, step: HourStep, state: str, reason: str) -> None:
        self.entries[step.name] |= {"state": state, "reason": reason, "commit": self.status["commit"]}
        print(f"{step.name}: {state}{f': {reason}' if reason else ''}", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        self.status["changed"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        result.write(self.status, self.folder / STATUS)


GOES_ON = 70  # exit status of a step that asks to be called again: its process is of no more use


def _read(path: Path, known: Sequence[HourStep], rehearse: bool) -> dict[str, Any]:
    """Read the status file, and add an entry for each step."""
    new = {"state": "waiting", "reason": "", "seconds": 0.0, "calls": 0, "problems": {}}
    status: dict[str, Any] = {"hour": VERSION, "rehearsal": rehearse, "steps": {}}
    if path.exists():
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            if (status["hour"], status["rehearsal"]) != (VERSION, rehearse):
                raise KeyError
            status["steps"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is of something else than this hour: give another --out.") from None
    entries = {step.name: {"words": step.words, **new, **status["steps"].get(step.name, {})} for step in known}
    return {**status, "steps": {**status["steps"], **entries}}


def _problems(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return the failed or unchecked measurements that are new in a step's file."""
    news = {key: each for key, each in after.items() if before.get(key) != each and isinstance(each, dict)}
    why = {key: str(each.get("failed") or each.get("unchecked") or "") for key, each in news.items()}
    return {key: words for key, words in why.items() if words}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace")[-4000:].splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "without a word")


def _environment() -> dict[str, str]:
    """Return this process's environment, with the package's own folder where modules are looked for: nothing has to be
    installed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def needs_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: --rehearse goes through the hour on a processor, in minutes.")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for one hour. Raises RuntimeError where another one runs in it."""
    with (folder / "hour.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(
                f"An hour runs in {folder.name} already, as {STATUS} in it says: wait for it, end it, or give another --out."
            ) from None
        yield


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end the hour as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(status: Mapping[str, Any]) -> str:
    """Make a line a step: its state, its seconds and why it failed; under it the measurements that failed within it."""
    lines = []
    for name, entry in status["steps"].items():
        lines.append(f"{name:14} {entry['state']:9} {entry['seconds']:6.0f} s  {entry['reason']}".rstrip())
        lines += [f"    {key}: {why}" for key, why in entry["problems"].items()]
    left = [name for name, entry in status["steps"].items() if entry["state"] in ("waiting", "cut off")]
    lines.append(f"Left: {', '.join(left)}. The same command goes on." if left else "Nothing is left.")
    return "\n".join(lines)
