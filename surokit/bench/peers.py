"""Race surokit beside other libraries at the same work, at equal settings and each at its documented best.

A race is a pair of processes that take turns on one device, the baseline and one system (A B A B), so a ratio is taken
within a turn and only two models are in memory. The baseline is Unsloth where it runs, else transformers with Liger's
kernels, else transformers alone. The first step and the warm-up come before the turns; the time of the first step is
reported apart. Speed alone proves nothing, so every race also reports how far the losses went from the baseline's on the
same rows, the loss on rows that no system trained on, and the ratio of tokens/s times the ratio of the steps that each
needed to the same training loss.

A call ends after so many minutes; with the same --out another call goes on with what is left. See baselines.py for the
systems.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surokit.bench import baselines
from surokit.bench.configurations import MODELS, TINY, BenchWork
from surokit.bench.corpus import corpus
from surokit.bench.process import Failed, left_s
from surokit.bench.result import markdown
from surokit.bench.results_store import Book, mixed
from surokit.bench.targets import OVER_UNSLOTH
from surokit.bench.turns import Call, OutOfTime, Running, Turns
from surokit.racing.statistics import smoothed, steps_to
from surokit.statistics import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("unsloth", "liger", "transformers")
WARM_UP = 5  # steps before the turns: compilers, autotuning and the capture of graphs are done then
AGAIN = 1  # step of each turn that is not timed: memory that was given back for the other's turn is taken again
EQUAL = {"recompute": "none", "optimizer": "AdamW with moments in the parameters' dtype", "data": "packed rows, causal"}
HELD_OUT = 4  # micro-batches
GRACE_S = 40.0  # beyond the minutes of a call, for what was begun
WEIGHTS_S = 240.0  # at most, to write a model's weights
SMOOTHED = 4  # steps
#: That a race takes on an H200, roughly; not measured.
MINUTES = {"0.6b": 1.5, "1.7b": 2.0, "4b": 3.0, "8b": 4.0}
#: How far losses may go from the baseline's: the first one, before anything was learned, and any of them.
BOUNDS = {True: (0.005, 0.01), False: (0.02, 0.03)}


@dataclass(frozen=True)
class PeerGroup:
    """A PeerGroup says what is raced together: a model's shape by name, what is trained, and the settings."""

    model: str
    train: str
    settings: str

    def __str__(self) -> str:
        return f"{self.model} {self.train} {self.settings}"

    def key(self, system: str) -> str:
        return f"{self}: {system}"


def run(
    systems: Sequence[str] | None = None,
    models: Sequence[str] = ("0.6b",),
    train: str = "lora",
    settings: Sequence[str] = ("equal", "best"),
    rounds: int = 4,
    steps: int = 4,
    minutes: float = 8.0,
    rehearse: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Race the systems (default: all) and return the raw result, which is in `out` too, beside a .csv, a .md and a .png.

    rehearse: everything on the CPU at a tiny shape, with the systems that run there. Raises ValueError for a name that is not
    known or a file of other work, RuntimeError without a GPU.
    """
    names = _names(systems, models)
    if min(rounds, steps) < 1 or not minutes > 0:
        raise ValueError(f"rounds={rounds}, steps={steps}, minutes={minutes:g}: each is above 0.")
    if not rehearse and not _has_cuda():
        raise RuntimeError("There is no CUDA device: --rehearse runs everything at a tiny shape on the CPU.")
    work = BenchWork(batch=2, length=32, accumulate=2, rank=4, alpha=8.0, lr=1e-2) if rehearse else BenchWork(lr=3e-4)
    head = {
        "benchmark": f"peers: the same work in other libraries{', rehearsed' if rehearse else ''}",
        "rehearsal": rehearse,
        "settings": {
            **asdict(work),
            **EQUAL,
            "turns": f"{rounds} of {steps} steps after {AGAIN} untimed",
            "warm-up steps": WARM_UP,
        },
    }
    call = Call(time.monotonic() + 60 * minutes, GRACE_S)
    with tempfile.TemporaryDirectory() as folder:
        book = Book(out or Path(folder) / "peers.json", "peers", head, {"minutes": minutes})
        book.data["missing"], book.data["left"] = {}, []
        for model in ("tiny",) if rehearse else models:
            groups = [PeerGroup(model, train, setting) for setting in settings]
            races = [_Race(group, names, rounds, steps, call, book) for group in groups]
            _run_model(model, [race for race in races if race.pending], work, "cpu" if rehearse else "cuda")
        book.end(", ".join(book.data["left"]))
        if out is not None:
            write_csv(book.data, out.with_suffix(".csv"))
            out.with_suffix(".md").write_text(table(book.data) + "\n", encoding="utf-8")
            if shown(book.data):
                draw(book.data, out.with_suffix(".png"))
        return book.data


def listing(
    systems: Sequence[str] | None = None,
    models: Sequence[str] = ("0.6b",),
    train: str = "lora",
    settings: Sequence[str] = ("equal", "best"),
    rehearse: bool = False,
    **_: Any,
) -> str:
    """List what `run` would race here, what the rest lacks, and about how long it takes."""
    names = _names(systems, models)
    work = {"train": train, "device": "cpu" if rehearse else "cuda"}
    lacking = {name: baselines.missing(baselines.SYSTEMS[name], work) for name in [*names, *BASELINES]}
    baseline = next_baseline(work)
    lines = [] if rehearse or _has_cuda() else ["There is no CUDA device here. On one, with these packages:"]
    for name in names:
        system, why = baselines.SYSTEMS[name], lacking[name]
        found = ", ".join(f"{package} {number}" for package, number in baselines.versions(system.packages).items())
        lines.append(f"{name:16} {'yes' if why is None else f'no: {why}':34} {system.words}{found and f' ({found})'}")
    wanted = sorted({package for name in names for package in baselines.SYSTEMS[name].packages})
    if absent := [package for package in wanted if package not in baselines.versions(wanted)]:
        pinned = [f"'{package}=={baselines.WRITTEN_FOR[package]}'" for package in absent]
        torch = [
            f"'torch=={number}'" for number in baselines.versions(["torch"]).values()
        ]  # which shall stay what it is
        lines.append(f"To install what is missing: pip install {' '.join(pinned + torch)}")
    if baseline is None:
        return "\n".join([*lines, f"Nothing can be raced: one of {', '.join(BASELINES)} has to be there."])
    able = sum(lacking[name] is None for name in names if name != baseline)
    minutes = len(settings) * able * sum(MINUTES[model] for model in models)
    races = f"{len(settings) * (1 if rehearse else len(models)) * able} races against {baseline}"
    return "\n".join([*lines, races + ("" if rehearse else f", about {minutes:.0f} minutes on an H200 by an estimate")])


def next_baseline(work: Mapping[str, Any]) -> str | None:
    """Return the first library here that others can be compared with; None where there is none."""
    return next((name for name in BASELINES if baselines.missing(baselines.SYSTEMS[name], work) is None), None)


def _names(systems: Sequence[str] | None, models: Sequence[str]) -> list[str]:
    names = list(systems or baselines.SYSTEMS)
    for asked, known in ((names, list(baselines.SYSTEMS)), (models, list(MODELS))):
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise ValueError(f"There is no {unknown[0]!r}: known are {', '.join(known)}.")
    return names


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_model(model: str, races: Sequence[_Race], work: BenchWork, device: str) -> None:
    """Run the races of one shape, all with the same weights and rows, which are written first."""
    if not any(left_s(race.call.ends_s) for race in races):
        for race in races:
            race.leave()
        return
    shape = TINY if model == "tiny" else MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        print(f"{model}: random weights", file=sys.stderr, flush=True)
        given = {"model": shape, **asdict(work), **_files(Path(folder), shape, work, device)}
        for race in races:
            race.run({**given, "train": race.group.train, "settings": race.group.settings})


def _files(folder: Path, shape: Mapping[str, Any], work: BenchWork, device: str) -> dict[str, Any]:
    ids_ST, _ = corpus(shape["vocab"], work.length, work.batch)
    held = HELD_OUT * work.batch
    rows = {"tokens": ids_ST[:-held], "held_out": ids_ST[-held:]}
    for name, ids in rows.items():
        np.save(folder / f"{name}.npy", ids.astype(np.int32))
    weights = {"model": shape, "device": device, "seed": 0, "weights": str(folder / "weights"), "length": work.length}
    if device == "cpu":
        baselines.write_weights(weights)
    else:  # in another process, because what this one takes of the device it never gives back
        baselines.worker("weights", weights, WEIGHTS_S).close()
    return {**weights, "recompute": "none", **{name: str(folder / f"{name}.npy") for name in rows}}


class _Racing(Running):
    """A _Racing is a system that has made its first step and its warm-up on this work, with its tokens/s of each turn."""

    def __init__(self, name: str, work: Mapping[str, Any], until_s: float) -> None:
        super().__init__(baselines.worker(name, work, left_s(until_s)), WARM_UP, until_s)
        self.name, self.work, self.until_s = name, work, until_s
        self.rates: list[float] = []
        self.held: list[float | None] = []

    def turn(self, steps: int) -> None:
        answer = self.take(steps, self.until_s, before=AGAIN)
        self.rates.append(round(answer["tokens"] / answer["seconds"], 1))

    def held_out(self) -> float | None:
        """Return the loss on rows that no system trained on, as it was when this was called first."""
        if not self.held:
            self.held.append(self.system.ask({"evaluate": True}, left_s(self.until_s))["loss"])
        return self.held[0]

    def entry(self, baseline: str, beside: list[float], losses: list[float]) -> dict[str, Any]:
        batch, length, accumulate = (self.work[name] for name in ("batch", "length", "accumulate"))
        return {
            **{"baseline": baseline, "tokens_per_s": self.rates, "baseline_tokens_per_s": beside},
            **{"losses": losses, "held_out": self.held_out(), "batch": f"{batch} x {length} x {accumulate}"},
            **{"first_step_s": self.first_step_s, "warm_up_s": self.first_step_s + self.warm_up_s},
            **{"peak_mib": self.peak_mib, "reserved_mib": self.reserved_mib, "clocks": self.clocks},
            **{name: self.system.ready[name] for name in ("build_s", "trained", "note", "versions")},
        }


class _Race:
    """A _Race holds the races of a group that are not in the book yet."""

    def __init__(self, group: PeerGroup, names: Sequence[str], rounds: int, steps: int, call: Call, book: Book) -> None:
        self.group, self.rounds, self.steps, self.call, self.book = group, rounds, steps, call, book
        self.need_s = 0.0  # what the next race takes, if it is like the last
        for name in names:
            if group.train not in baselines.SYSTEMS[name].trains:
                book.data["missing"][name] = f"it has no {group.train} training here"
        able = [n for n in names if group.train in baselines.SYSTEMS[n].trains]
        self.pending = [n for n in able if group.key(n) not in book]
        # a group keeps the baseline that it began with
        before = [e["baseline"] for e in shown(book.data) if _group(e) == group]
        self.baselines = tuple(dict.fromkeys(before)) or BASELINES

    def leave(self) -> None:
        """Leave the pending races to another call."""
        self.book.data["left"] += [self.group.key(name) for name in self.pending]

    def run(self, work: Mapping[str, Any]) -> None:
        """Run until nothing is pending or the time is up."""
        with suppress(OutOfTime):
            while self.pending:
                with closing(Turns(partial(self._started, work))) as turns:
                    baseline = next((name for name in self.baselines if self._runs(turns, name)), None)
                    if baseline is None:
                        break
                    self._against(turns, baseline)
        self.leave()

    def _against(self, turns: Turns[str, _Racing], baseline: str) -> None:
        """Race everything that is pending against a baseline, as long as that runs; then measure the baseline by itself."""
        late: OutOfTime | None = None
        try:
            for name in [n for n in self.pending if n != baseline]:
                self._tried(name, partial(self._pair, turns, name, baseline))
                if baseline not in turns.open:
                    return
        except OutOfTime as end:  # what was raced is nothing without the baseline's own entry
            late = end
        if baseline in turns.open and self.group.key(baseline) not in self.book:
            self._tried(baseline, lambda _: self._own(turns.open[baseline]), begun=True)
        if late is not None:
            raise late

    def _tried(self, name: str, race: Callable[[float], Mapping[str, Any]], begun: bool = False) -> None:
        """Keep the result of `race(until_s)` for a system, or why there is none. Raises OutOfTime."""
        key, began_s = self.group.key(name), time.monotonic()
        found = self.call.tried(key, None if begun else self.need_s, race)
        self.need_s = time.monotonic() - began_s
        if "left_out" in found:
            self.book.data["missing"][name] = found["left_out"]
        elif found:
            self.book.put(key, {**asdict(self.group), "system": name, **found})
        if found:
            self.pending = [n for n in self.pending if n != name]

    def _runs(self, turns: Turns[str, _Racing], name: str) -> bool:
        """Open a system as a baseline, unless it failed before, and return whether it is open."""

        def start(until_s: float) -> dict[str, Any]:
            turns.opened(name, until_s)
            return {}  # nothing to keep yet

        if "failed" not in self.book.found.get(self.group.key(name), {}):
            self._tried(name, start)
        return name in turns.open

    def _started(self, work: Mapping[str, Any], name: str, until_s: float) -> _Racing:
        """Return the system after its warm-up, with the largest micro-batch that fits where it is at its best."""
        if lacking := baselines.missing(baselines.SYSTEMS[name], work):
            raise Failed(lacking, "missing")
        *larger, given = ({**work, "batch": batch, "accumulate": count} for batch, count in shapes(work))
        for each in larger:
            try:
                return _Racing(name, each, until_s)
            except Failed as failure:
                if failure.why != "memory":
                    raise
        return _Racing(name, given, until_s)

    def _pair(self, turns: Turns[str, _Racing], name: str, baseline: str, until_s: float) -> dict[str, Any]:
        """Race a system against the baseline, in turns; of the two, the one that failed is closed."""
        system, beside = turns.opened(name, until_s), turns.opened(baseline, until_s)
        before, turning = len(beside.rates), baseline
        try:
            for number, turning in turns.rounds((baseline, name), self.rounds):
                if number > 1 and turning == baseline and not left_s(self.call.ends_s):
                    break
                turns.opened(turning, until_s).turn(self.steps)
            for turning in (baseline, name):
                if len(turns.open[turning].losses) == len(system.losses):
                    turns.open[turning].held_out()
        except Failed as failure:
            turns.close(turning)
            raise Failed(f"{turning}, both models being in memory: {failure}", failure.why) from None
        finally:
            turns.close(name)
        return system.entry(baseline, beside.rates[before:], system.losses)

    def _own(self, baseline: _Racing) -> dict[str, Any]:
        """Return the baseline's own entry: all its turns, and its losses of as many steps as a system makes."""
        while len(baseline.rates) < self.rounds:
            baseline.turn(self.steps)
        steps = WARM_UP + self.rounds * (AGAIN + self.steps)
        if len(baseline.losses) > steps and not baseline.held:  # a race that broke off left it ahead of the others
            baseline.held.append(None)
        return baseline.entry(baseline.name, baseline.rates, baseline.losses[:steps])


def shapes(work: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return micro-batches and how many of them: as given, or at its best all tokens of a step at once, then in halves."""
    batch, accumulate = work["batch"], work["accumulate"]
    if work["settings"] == "equal":
        return [(batch, accumulate)]
    pieces = [n for n in (1, 2, 4, 8) if n < accumulate and accumulate % n == 0]
    return [*((batch * accumulate // n, n) for n in pieces), (batch, accumulate)]


# -- what follows from the raw result


def shown(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the races that were run to their end, in groups, each group's baseline first."""
    found = [entry for entry in data["peers"].values() if "failed" not in entry]
    groups = list(dict.fromkeys(_group(entry) for entry in found))
    return sorted(found, key=lambda e: (groups.index(_group(e)), e["system"] != e["baseline"]))


def _group(entry: Mapping[str, Any]) -> PeerGroup:
    return PeerGroup(entry["model"], entry["train"], entry["settings"])


def _entry_of_baseline(data: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = data["peers"].get(_group(entry).key(entry["baseline"]))
    return None if found is None or "failed" in found else found


def ratios(entry: Mapping[str, Any]) -> list[float]:
    """Return tokens/s over the baseline's, turn by turn."""
    return [a / b for a, b in zip(entry["tokens_per_s"], entry["baseline_tokens_per_s"])]


def gaps(entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[float]:
    """Return how far each step's loss lies from the baseline's, as a share of it; nan where there is none."""
    nan = float("nan")
    return [
        abs(a - b) / abs(b) if a is not None and b is not None else nan
        for a, b in zip(entry["losses"], baseline["losses"])
    ]


def agrees(entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool:
    """Return whether both computed the same: the first loss and all losses are within their bounds."""
    first, all_of_them = BOUNDS[baselines.SYSTEMS[entry["system"]].exact]
    found = gaps(entry, baseline)
    return bool(found) and found[0] <= first and all(gap <= all_of_them for gap in found)


def matched(entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    """Return the ratio of tokens/s times the baseline's steps over this one's, to the lowest training loss that both reach."""
    count = min(len(entry["losses"]), len(baseline["losses"]))
    own, other = entry["losses"][:count], baseline["losses"][:count]
    if count < SMOOTHED or None in own or None in other:
        return None
    level = max(float(smoothed(losses, SMOOTHED)[-1]) for losses in (own, other))
    needed, other_needed = steps_to(own, level, SMOOTHED), steps_to(other, level, SMOOTHED)
    if needed is None or other_needed is None:
        return None
    return statistics.median(ratios(entry)) * other_needed / needed


def over_unsloth(data: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Return (mean over the models of the median ratio to Unsloth, how many models) for each recipe of surokit: LoRA, equal
    settings, and only where the losses agree."""
    found: dict[str, list[float]] = {}
    for entry in shown(data):
        library, _, recipe = entry["system"].partition(" ")
        equal = entry["train"] == "lora" and entry["settings"] == "equal" and entry["baseline"] == "unsloth"
        baseline = _entry_of_baseline(data, entry)
        if library == "surokit" and equal and baseline is not None and agrees(entry, baseline):
            found.setdefault(recipe, []).append(statistics.median(ratios(entry)))
    return {recipe: (statistics.mean(values), len(values)) for recipe, values in found.items()}


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table of all races, and under it the bars, what differs, failed, is missing and is left.

    The table of a rehearsal says in its first line that its numbers mean nothing.
    """
    head = [
        "work",
        "system",
        "micro-batches",
        "tokens/s (median, range)",
        "x baseline (median, range)",
        "loss-matched x",
    ]
    head += ["peak MiB", "x", "first step, warm-up s", "first, largest loss gap", "held-out loss", "what it is"]
    above = ["A rehearsal on a processor: its numbers mean nothing.\n"] if data["rehearsal"] else []
    rows, notes = [], list(_bars(data))
    notes += mixed(data, shown(data))
    for entry in shown(data):
        baseline = _entry_of_baseline(data, entry)
        low, mid, high = spread(entry["tokens_per_s"])
        r_low, r_mid, r_high = spread(ratios(entry))
        is_baseline = entry["system"] == entry["baseline"]
        memory = gap = exact = ""
        if baseline is not None and not is_baseline:
            found = gaps(entry, baseline)
            ratio = matched(entry, baseline)
            memory = f"{entry['peak_mib'] / baseline['peak_mib']:.2f}"
            gap = f"{found[0]:.2%}, {max(found):.2%}"
            exact = "" if ratio is None else f"{ratio:.2f}"
            notes += _differences(entry, baseline)
        rows.append(
            [
                str(_group(entry)),
                entry["system"] + (" (baseline)" if is_baseline else ""),
                entry["batch"],
                f"{mid:,.0f} ({low:,.0f} to {high:,.0f})",
                "" if is_baseline else f"{r_mid:.2f} ({r_low:.2f} to {r_high:.2f})",
                exact,
                f"{entry['peak_mib']:,.0f}",
                memory,
                f"{entry['first_step_s']:.1f}, {entry['warm_up_s']:.1f}",
                gap,
                "" if entry["held_out"] is None else f"{entry['held_out']:.4f}",
                ", ".join([entry["note"], *(f"{name} {number}" for name, number in entry["versions"].items())]),
            ]
        )
    failed = {key: e["failed"] for key, e in data["peers"].items() if "failed" in e}
    notes += [f"{key} failed: {why}" for key, why in failed.items()]
    notes += [f"{name} took no part: {why}." for name, why in data.get("missing", {}).items()]
    if data.get("left"):
        notes.append(f"Not raced yet, the same command goes on: {', '.join(data['left'])}.")
    return "\n".join([*above, markdown(data, head, rows), *(f"\n{note}" for note in notes)])


def _bars(data: Mapping[str, Any]) -> Iterator[str]:
    for recipe, (mean, models) in over_unsloth(data).items():
        bar = f"; the bar is {OVER_UNSLOTH[recipe][0]:g}" if recipe in OVER_UNSLOTH else ""
        yield f"surokit {recipe}: {mean:.2f} x Unsloth at equal settings, mean of {models} model{'s' * (models > 1)}{bar}."


def _differences(entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[str]:
    name = _group(entry).key(entry["system"])
    if not agrees(entry, baseline):
        yield f"{name} does not compute what {entry['baseline']} does: its losses differ too much for its speed to count."
    if entry["trained"] != baseline["trained"]:
        yield f"{name} trains {entry['trained']:,} numbers, {entry['baseline']} {baseline['trained']:,}."


def write_csv(data: Mapping[str, Any], path: Path) -> None:
    """Write a row for every turn."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["model", "train", "settings", "system", "baseline", "turn", "tokens_per_s", "baseline_tokens_per_s"]
        )
        for entry in shown(data):
            named = [entry[name] for name in ("model", "train", "settings", "system", "baseline")]
            for turn, rates in enumerate(zip(entry["tokens_per_s"], entry["baseline_tokens_per_s"])):
                rows.writerow([*named, turn, *rates])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Draw the loss curves as PNG; does nothing where matplotlib is not installed."""
    try:
        picture = figure(data)
    except ImportError:
        return
    picture.savefig(path, dpi=110, metadata={"Software": None})


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw a column a group: losses laid over each other, and under them each one's gap to the baseline in percent of it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    entries = shown(data)
    groups = list(dict.fromkeys(_group(entry) for entry in entries))
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = Picture(figsize=(1 + 4.2 * len(groups), 5.2), layout="constrained")
        axes = picture.subplots(2, len(groups), sharex="col", squeeze=False, height_ratios=(3, 2))
        for column, group in enumerate(groups):
            losses, apart = axes[:, column]
            for entry in entries:
                if _group(entry) != group:
                    continue
                baseline = _entry_of_baseline(data, entry)
                is_baseline = entry["system"] == entry["baseline"]
                style = {"color": "black", "linewidth": 2.5, "alpha": 0.35} if is_baseline else {"linewidth": 1.1}
                own = [float("nan") if loss is None else loss for loss in entry["losses"]]
                (line,) = losses.plot(range(1, len(own) + 1), own, label=entry["system"], **style)
                if baseline is not None and not is_baseline:
                    found = [100 * gap for gap in gaps(entry, baseline)]
                    apart.plot(range(1, len(found) + 1), found, color=line.get_color(), linewidth=1.1)
            losses.set_title(str(group), loc="left", fontsize=10)
            losses.legend(frameon=False, fontsize=8)
            apart.set_xlabel("step")
            for axis in (losses, apart):
                axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_ylabel("training loss")
        axes[1, 0].set_ylabel("gap to the baseline, %")
        picture.draw_without_rendering()  # texts take their font from here
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "--worker":
        raise SystemExit("python -m surokit.bench peers is the command; this module is started by it.")
    sys.exit(baselines.serve(sys.argv[2], json.loads(sys.argv[3])))
