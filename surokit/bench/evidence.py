"""Run the study of what each recipe costs, and judge it: in held-out loss, from scratch and fine-tuned, at three sizes; and in what
small models can do, by tasks that are graded exactly. Runs are paired by seeds.

    python -m surokit.bench evidence --out docs/measurements/evidence.json --folder runs/evidence --minutes 60

A run is one model trained by one recipe: those of a seed start from the same weights and see the same batches. The study is planned
before it runs: `plan` takes the spread between seeds of the study before (recipes.json) and says with how many seeds a gate can be
decided; `SEEDS` is what was taken. Every recipe trains at the learning rate that was best for it in a short sweep; where it was not
swept, at that of bf16.

Runs are taken in an order in which the file says something early: seed by seed, the sweep of a size before its first. Each writes
its checkpoint as it goes,
in --folder, so that the same command goes on in the middle of a run; what is done is in --out at once. A recipe that changes in
mid-run goes on from the run of its first part, bit for bit what it would have computed by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench import result
from surokit.bench.result import markdown
from surokit.bench.results_store import Book
from surokit.environment import environment
from surokit.places import write_whole
from surokit.statistics import count_for_gate, paired_gap

if TYPE_CHECKING:
    from surokit.train import Session
    from surokit.train.stream import Batch

VOCAB, LENGTH, BATCH = 1024, 128, 8
STEPS, TUNING_STEPS, WARMUP = 2000, 400, 50
SWEEP_STEPS = {"1M": 500, "3M": 400, "8M": 250}
#: Held-out losses are taken so many times in a run, at equal distances: how a gap grows with tokens.
POINTS = 8
CHUNK = 50  # steps between two checkpoints
GENERATED = 6_000_000  # characters of generated text that a run has, of which it reads less than one pass
HELD_OUT = 24  # batches of each kind of text
LAST_CHAPTERS = 8  # of Moby-Dick, which no run trains on


@dataclass(frozen=True)
class Size:
    """A Size is a shape of model, by about how many parameters it has."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: int


SIZES = {
    size.name: size for size in (Size("1M", 4, 128, 4, 352), Size("3M", 6, 192, 6, 512), Size("8M", 8, 288, 8, 768))
}
OF_A_TASK = Size("task", 2, 64, 4, 176)
OF_TASKS = ("task", "retaught")
#: How many seeds each size has; `plan` says why.
SEEDS = {"1M": 6, "3M": 3, "8M": 2}
SWITCHED = "fp4 then fp4(forward=bf16) at 0.82"
FROM_SCRATCH = ("bf16", "fp8-current", "mxfp8", "fp4", SWITCHED, "quartet-ii")
#: Frozen weights, under an adapter of rank 16, "loftq" where it begins with the quantization error; against bf16 with an adapter.
FROZEN = ("bf16+lora", "qfp8", "qfp4", "qnf4", "qfp8 loftq", "qfp4 loftq", "qnf4 loftq")
#: Recipes that are not trained at every size, and those with fewer seeds: what they would take is most of the study's hours.
ONLY_AT = {"quartet-ii": ("1M",), "mxfp8": ("1M", "3M"), **dict.fromkeys(FROZEN[-3:], ("1M", "3M"))}
SEEDS_OF = {"quartet-ii": 3}
#: Where the gap of fp4 comes from: one product at a time, and all products of one kind of layer.
ALONE = (
    "bf16(forward=fp4)",
    "bf16(grad_input=fp4)",
    "bf16(grad_weight=fp4)",
    "fp4 in attention",
    "fp4 in mlp",
    "fp4 everywhere",
)
ALONE_SEEDS = 2
GATES = {
    "fp8-current": 0.0025,
    "mxfp8": 0.0025,
    "fp4": 0.01,
    SWITCHED: 0.005,
    "quartet-ii": 0.01,
    "qfp8": 0.0025,
    "qfp4": 0.01,
    "qnf4": 0.01,
    "qfp8 loftq": 0.0025,
    "qfp4 loftq": 0.01,
    "qnf4 loftq": 0.01,
}
RATES = {"1M": (2e-3, 4e-3, 8e-3, 1.6e-2), "3M": (1.5e-3, 3e-3, 6e-3), "8M": (1e-3, 2e-3, 4e-3)}
#: A recipe that changes takes the rate of its first part.
SWEPT = {"1M": ("bf16", "fp8-current", "mxfp8", "fp4", "quartet-ii"), "3M": ("bf16", "fp4"), "8M": ("bf16", "fp4")}
TUNING_RATE = 1e-3
#: Tasks by name; a small model learns each from scratch, and a task of its kind after it with an adapter over frozen weights.
TASKS = {
    "addition": lambda: _tasks().Addition(digits=2),
    "recall": lambda: _tasks().Recall(pairs=4),
    "brackets": lambda: _tasks().Brackets(kinds=2, size=16),
    "addition, reversed": lambda: _tasks().Addition(digits=2, reverse=True),
}
ABLE = ("bf16", "fp8-current", "fp4", SWITCHED)
TASK_STEPS, TASK_RATE, TASK_BATCH, TASK_SEEDS = 1600, 1e-3, 64, 5
RETAUGHT = "addition, reversed"  # after addition: the same characters, another order
RETAUGHT_STEPS, RETAUGHT_RATE = 800, 3e-3
PROBLEMS = 512  # that a model is graded on
SETTINGS = {
    "vocabulary": VOCAB,
    "tokens a step": BATCH * LENGTH,
    "steps": STEPS,
    "steps of a sweep": SWEEP_STEPS,
    "steps of fine-tuning": TUNING_STEPS,
    "sizes": {name: asdict(size) for name, size in SIZES.items()},
    "optimizer": "AdamW, float32 moments, bf16 weights rounded stochastically, cosine to a tenth after 50 steps of warm-up",
    "text": "generated stories and Moby-Dick, of which no part is seen twice; fine-tuning on Shakespeare",
    "kept in bf16": "the head, and of fp4 the last 15 % of the blocks",
    "tasks": {
        "model": asdict(OF_A_TASK),
        "problems a step": TASK_BATCH,
        "steps": TASK_STEPS,
        "learning rate": TASK_RATE,
        "retaught": f"{RETAUGHT_STEPS} steps at {RETAUGHT_RATE:g}, an adapter over the model of addition",
    },
}


@dataclass(frozen=True)
class Run:
    """A Run is one model trained by one recipe.

    kind: "sweep", "scratch", "tuning", "alone" (one thing is quantized), "task" or "retaught" (an adapter over a model of another
    task). size: the model's; of the last two kinds the task. base_lr: of an adapter, the learning rate of the run below it.
    """

    kind: str
    size: str
    recipe: str
    seed: int
    lr: float
    base_lr: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.kind} {self.size} {self.recipe} seed {self.seed}" + (
            f" lr {self.lr:g}" if self.kind == "sweep" else ""
        )

    @property
    def steps(self) -> int:
        if self.kind == "sweep":
            return SWEEP_STEPS[self.size]
        return {"tuning": TUNING_STEPS, "task": TASK_STEPS, "retaught": RETAUGHT_STEPS}.get(self.kind, STEPS)

    @property
    def base(self) -> Run | None:
        """Return the run whose model is below the adapter; None for a run from scratch."""
        if self.kind == "tuning":
            return Run("scratch", self.size, "bf16", self.seed, self.base_lr)
        return Run("task", "addition", "bf16", self.seed, self.base_lr) if self.kind == "retaught" else None

    @property
    def forks_at(self) -> int:
        """Return the step at which the run of a recipe that changes begins with this run's state; 0 for none."""
        return recipe_of(SWITCHED).later[0].step(STEPS) if (self.kind, self.recipe) == ("scratch", "fp4") else 0

    @property
    def folder(self) -> str:
        return hashlib.blake2b(f"{self}".encode(), digest_size=8).hexdigest()


# -- the plan


def plan(earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return with how many seeds each gate can be decided in four of five studies, by gaps and spreads of an earlier study.

    earlier: recipes.json; a size twice as large is taken to have the same spread, which is what the first seeds will show.
    """
    rows = []
    for name, gate in GATES.items():
        known = "fp4" if name in (SWITCHED, "quartet-ii") else name.removesuffix(" loftq")
        base = "bf16-lora" if known.startswith("q") else "bf16"
        gaps = [run[known] / run[base] - 1 for run in earlier["runs"]]
        gap, spread = statistics.mean(gaps), statistics.stdev(gaps)
        gap = gap / 3 if name == SWITCHED else gap  # NVIDIA's 1.5 % became 0.5 %
        seeds = {f"spread x {factor:g}": count_for_gate(gate, gap, factor * spread) for factor in (1.0, 0.5)}
        rows.append({"recipe": name, "gate": gate, "gap": gap, "spread": spread, "seeds": seeds})
    return rows


def write_plan(earlier: Path, out: Path) -> dict[str, Any]:
    """Write down what is going to be run and with which gates, before it runs."""
    data = {
        "plan": "evidence",
        "settings": SETTINGS,
        "environment": {key: value for key, value in environment().items() if key != "platform"},
        "seeds": SEEDS,
        "seeds of some": SEEDS_OF,
        "only at": ONLY_AT,
        "gates": GATES,
        "learning rates tried": RATES,
        "tried with": SWEPT,
        "wanted": plan(json.loads(earlier.read_text(encoding="utf-8"))),
    }
    result.write(data, out)
    return data


def runs(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    """Yield all runs of the study that can begin, by what was `found`, in their order: some seeds of each size, tasks between."""
    all_of_them = [(size, seed) for size in SIZES for seed in range(SEEDS[size])]
    ordered = sorted(all_of_them, key=lambda each: (each[1] + 1) / SEEDS[each[0]])
    for place, (size, seed) in enumerate(ordered):
        if seed == 0:
            yield from sweep(size)
        yield from _of_seed(found, size, seed)
        if place < TASK_SEEDS:
            yield from _of_tasks(found, seed=place)


def _of_tasks(found: Mapping[str, Mapping[str, Any]], seed: int) -> Iterator[Run]:
    for task, recipe in itertools.product(TASKS, ABLE):
        if task != RETAUGHT:
            yield Run("task", task, recipe, seed, TASK_RATE)
    for recipe in FROZEN:
        run = Run("retaught", RETAUGHT, recipe, seed, RETAUGHT_RATE, TASK_RATE)
        if run.base is not None and run.base.key in found:
            yield run


def _of_seed(found: Mapping[str, Mapping[str, Any]], size: str, seed: int) -> Iterator[Run]:
    for recipe in trained_at(size, FROM_SCRATCH, seed):
        begins = recipe.partition(" then ")[0]
        if (lr := best_rate(found, size, begins)) is not None:
            run = Run("scratch", size, recipe, seed, lr)
            if recipe == begins or replace(run, recipe=begins).key in found:
                yield run
    if (lr := best_rate(found, size, "bf16")) and Run("scratch", size, "bf16", seed, lr).key in found:
        for recipe in trained_at(size, FROZEN, seed):
            yield Run("tuning", size, recipe, seed, TUNING_RATE, lr)
    if size == "1M" and seed < ALONE_SEEDS and (lr := best_rate(found, size, "fp4")):
        for recipe in ALONE:
            yield Run("alone", size, recipe, seed, lr)


def sweep(size: str) -> list[Run]:
    return [Run("sweep", size, recipe, 0, lr) for recipe in SWEPT[size] for lr in RATES[size]]


def trained_at(size: str, recipes: Iterable[str], seed: int = 0) -> list[str]:
    """Return those of the recipes that are trained at a size with a seed."""
    return [
        recipe for recipe in recipes if size in ONLY_AT.get(recipe, SIZES) and seed < SEEDS_OF.get(recipe, SEEDS[size])
    ]


def best_rate(found: Mapping[str, Mapping[str, Any]], size: str, recipe: str) -> float | None:
    """Return the learning rate with the lowest held-out loss in the sweep, of bf16 where the recipe was not swept; None before the
    sweep is over."""
    swept = recipe if recipe in SWEPT[size] else "bf16"
    tried = [run for run in sweep(size) if run.recipe == swept]
    if any(run.key not in found for run in tried):
        return None
    return min(tried, key=lambda run: (found[run.key]["held_out"], run.lr)).lr


# -- a run


def recipe_of(name: str) -> Any:
    """Return a recipe of the study; "in attention" and "in mlp" quantize one kind of layer."""
    from surokit.recipe import BF16, PROJECTIONS, find_recipe

    if name == "bf16+lora":
        return BF16.lora()
    if name.endswith(" loftq"):
        return find_recipe(name.removesuffix(" loftq")).lora(init="loftq")
    plain, where, part = name.partition(" in ")
    recipe = find_recipe(plain.removesuffix(" everywhere"))
    if name.endswith(" everywhere"):
        return recipe.keep_last(0)
    kept = {"attention": PROJECTIONS[4:], "mlp": PROJECTIONS[:4]}[part] if where else ()
    return recipe.keep(*(f"*.{projection}" for projection in kept))


def train(run: Run, folder: Path, ends_at: float) -> dict[str, Any] | None:
    """Train until the run is done or the clock says `ends_at`; return what it found, None where it is not done.

    Goes on from where an earlier call ended. ends_at: seconds of `time.time()`.
    """
    import torch

    torch.set_num_threads(1)
    began, where = time.process_time(), folder / run.folder
    train_on, held_out = texts_of(run)
    session = _session(run, folder, train_on)
    points = {run.steps * (i + 1) // POINTS for i in range(POINTS)}
    began_at, curve, seconds = session.steps, _read_curve(where, session.steps), _add_seconds(where, 0.0)
    while True:
        if session.steps in points and session.steps not in {row[0] for row in curve}:
            curve.append([session.steps, *_measured(run, session, held_out)])
            write_whole(where / CURVE, json.dumps(curve))
        if session.steps and session.steps == run.forks_at:
            _begin_switched(session, folder / replace(run, recipe=SWITCHED).folder)
        if session.steps >= run.steps:
            break
        if time.time() >= ends_at and session.steps > began_at:
            return None
        stops = [session.steps + CHUNK, min(point for point in points if point > session.steps)]
        stops += [run.forks_at] if session.steps < run.forks_at else []
        session.run(min(stops) - session.steps)  # and saves
        began, seconds = time.process_time(), _add_seconds(where, time.process_time() - began)
    return {
        **asdict(run),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "steps": run.steps,
        "curve": curve,
        "held_out": loss_at({"kind": run.kind, "curve": curve}),
        "cpu_s": round(seconds, 1),
        "skipped": int(sum(session.records.column("skipped"))),
    }


CURVE = "curve.json"


def _read_curve(folder: Path, done: int) -> list[list[float]]:
    """Return what a run has measured in its first `done` steps."""
    path = folder / CURVE
    rows: list[list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [row for row in rows if row[0] <= done]


def _measured(run: Run, session: Session, held_out: Iterable[list[Batch]]) -> list[float]:
    """Return the loss on each kind of text; or on a task, and its accuracy."""
    losses = [session.evaluate(batches) for batches in held_out]
    if run.kind not in OF_TASKS:
        return losses
    return [*losses, TASKS[run.size]().grade(session.model, PROBLEMS).accuracy]


def _begin_switched(session: Session, folder: Path) -> None:
    """Write the checkpoint with which the run of the recipe that changes goes on from this one."""
    if checkpoint_in(folder):
        return
    other = session.fork(run_dir=folder)
    other.switch(recipe_of(SWITCHED).parts[1])
    other.save()


def checkpoint_in(folder: Path) -> bool:
    """Return whether a run has left a checkpoint in its folder."""
    from surokit.train import checkpoint_files

    return checkpoint_files.latest(folder / "checkpoints") is not None


def _session(run: Run, folder: Path, data: Any) -> Session:
    import torch

    import surokit as sk

    where = folder / run.folder
    if checkpoint_in(where):
        return sk.Session.resume(where, data=data, keep=1)
    torch.manual_seed(run.seed)
    task = TASKS[run.size]() if run.kind in OF_TASKS else None
    size = SIZES[run.size] if task is None else OF_A_TASK
    config = sk.DecoderConfig(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads // 2,
        vocab=VOCAB if task is None else task.vocab,
        ffn=size.ffn,
        max_length=LENGTH if task is None else task.length,
    )
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if run.base is not None:
        trained = sk.Session.resume(folder / run.base.folder, data=texts_of(run.base)[0])
        model.load_state_dict(trained.model.state_dict())
    return sk.Session(
        model,
        data,
        recipe=recipe_of(run.recipe),
        optimizer=sk.AdamW(lr=run.lr, state_dtype=torch.float32, rounding="stochastic", seed=run.seed),
        schedule=sk.Cosine(warmup=WARMUP, steps=run.steps),
        seed=run.seed,
        save_every=run.steps,
        keep=1,
        run_dir=where,
        exist="resume",
    )


@lru_cache(maxsize=2)
def texts_of(run: Run) -> tuple[Any, list[list[Batch]]]:
    """Return what a run trains on, and what its loss is taken on: generated text and Moby-Dick, Shakespeare, or a task."""
    import surokit as sk
    from surokit import texts

    if run.kind in OF_TASKS:
        task = TASKS[run.size]()
        return task.batches(TASK_BATCH, seed=run.seed), [task.held_out(PROBLEMS)]
    tokenizer = _tokenizer()

    def held_out(documents: Iterable[str]) -> list[Batch]:
        batches = sk.text(list(documents), tokenizer, length=LENGTH, batch=BATCH, shuffle=False)
        return list(itertools.islice(batches, HELD_OUT))

    if run.kind == "tuning":
        plays = _documents(texts.SHAKESPEARE)
        train_on, last = plays[: -len(plays) // 8], plays[-len(plays) // 8 :]
        return sk.text(train_on, tokenizer, length=LENGTH, batch=BATCH, seed=run.seed), [held_out(last)]
    chapters = _documents(texts.MOBY_DICK)
    train_on = [*sk.stories(GENERATED, seed=run.seed), *chapters[:-LAST_CHAPTERS]]
    others = sk.stories(500_000, seed=_UNSEEN)
    data = sk.text(train_on, tokenizer, length=LENGTH, batch=BATCH, seed=run.seed)
    assert len(data) >= run.steps, f"{len(data)} batches for {run.steps} steps"
    return data, [held_out(others), held_out(chapters[-LAST_CHAPTERS:])]


def _tasks() -> Any:
    from surokit import tasks

    return tasks


_UNSEEN = 1_000_000  # seed of generated text that no run trains on


@cache
def _tokenizer() -> Any:
    import surokit as sk
    from surokit import texts

    return sk.train_tokenizer([texts.MOBY_DICK, *sk.stories(1_000_000, seed=_UNSEEN + 1)], vocab_size=VOCAB)


def _documents(path: Path) -> list[str]:
    from surokit.data.sources import documents

    return list(documents(path)[1])


def _add_seconds(folder: Path, seconds: float) -> float:
    """Add to the processor's seconds that a run has taken so far, and return them."""
    path = folder / "cpu_s"
    total = seconds + (float(path.read_text()) if path.exists() else 0.0)
    path.write_text(repr(total))
    return total


# -- the command


def run(
    out: Path | None = None, folder: Path = Path("runs/evidence"), minutes: float = 60.0, workers: int = 2
) -> dict[str, Any]:
    """Go on with the study for so many minutes, in `workers` processes; return the raw result, which is in `out` as it grows.

    folder: of checkpoints, which may be deleted when nothing is left.
    """
    book = Book(
        out or Path("evidence.json"), "runs", {"benchmark": "evidence", "settings": SETTINGS}, {"minutes": minutes}
    )
    folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.time() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    going: dict[Future[Any], Run] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        while True:
            left = [run for run in runs(book.found) if run.key not in book and run not in going.values()]
            while left and len(going) < workers and time.time() < ends_at:
                chosen = left.pop(0)
                going[pool.submit(train, chosen, folder, ends_at)] = chosen
            if not going:
                break
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                ended, found = going.pop(future), future.result()
                if found is not None:
                    book.put(ended.key, found)
                    print(f"{ended.key}: {found['held_out']:.4f}, {found['cpu_s']:,.0f} s", file=sys.stderr, flush=True)
    book.end(f"{len(left)} runs that can begin now are left." if left else "")
    return book.data


# -- what came of it


def baseline_of(recipe: str) -> str:
    """Return the recipe that a recipe is compared with: the one that trains the same parameters in bfloat16."""
    return "bf16+lora" if recipe in FROZEN else "bf16"


def _paired(data: Mapping[str, Any], kind: str, of: str, recipe: str) -> list[tuple[Any, Any]]:
    """Return a recipe's run and its baseline's, of a size or a task, for every seed that has both."""
    base = "scratch" if kind == "alone" else kind, baseline_of(recipe)
    keys = (
        (Run(kind, of, recipe, seed, 0.0).key, Run(base[0], of, base[1], seed, 0.0).key)
        for seed in range(max(*SEEDS.values(), TASK_SEEDS))
    )
    found = data["runs"]
    return [(found[own], found[other]) for own, other in keys if own in found and other in found]


def gaps(data: Mapping[str, Any], kind: str, size: str, recipe: str, step: int | None = None) -> list[float]:
    """Return the relative gap of the held-out loss to the baseline, of every seed that has both runs.

    step: of the training, one of the curve's; None for the last.
    """
    return [loss_at(own, step) / loss_at(base, step) - 1 for own, base in _paired(data, kind, size, recipe)]


def loss_at(found: Mapping[str, Any], step: int | None = None) -> float:
    """Return a run's held-out loss at a step of its curve, the mean over the kinds of text; the last without a step."""
    row = found["curve"][-1] if step is None else next(row for row in found["curve"] if row[0] == step)
    return statistics.mean(row[1:-1] if found["kind"] in OF_TASKS else row[1:])


def accuracies(data: Mapping[str, Any], kind: str, task: str, recipe: str) -> list[float]:
    """Return how much more of a task a recipe gets right than its baseline at the end, as a share, of every seed that has both."""
    return [own["curve"][-1][-1] - base["curve"][-1][-1] for own, base in _paired(data, kind, task, recipe)]


def steps_to(found: Mapping[str, Any], accuracy: float) -> int | None:
    """Return at which step of a task's curve the accuracy was reached first; None where it was not."""
    return next((int(row[0]) for row in found["curve"] if row[-1] >= accuracy), None)


def rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each size and recipe: the mean gap with its interval, its spread, p-value, gate and verdict."""
    found = []
    for kind, recipes in (("scratch", FROM_SCRATCH), ("tuning", FROZEN), ("alone", ALONE)):
        for size, recipe in itertools.product(SIZES, recipes):
            if recipe == baseline_of(recipe) or not (values := gaps(data, kind, size, recipe)):
                continue
            gap, gate = paired_gap(values), GATES.get(recipe) if kind != "alone" else None
            verdict = "" if gate is None else gap.within(gate) if gap.pairs > 1 else "undecided"
            found.append(
                {"kind": kind, "size": size, "recipe": recipe, **gap._asdict(), "gate": gate, "verdict": verdict}
            )
    return found


def task_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each task and recipe: accuracy, how far it is above the baseline's, with its interval, and the median of the
    steps to 90 % right of the seeds that got there."""
    found = []
    for kind, recipes in (("task", ABLE), ("retaught", FROZEN)):
        for task, recipe in itertools.product(TASKS, recipes):
            runs = [data["runs"].get(Run(kind, task, recipe, seed, 0.0).key) for seed in range(TASK_SEEDS)]
            done = [run for run in runs if run]
            if not done:
                continue
            values = accuracies(data, kind, task, recipe)
            reached = sorted(step for run in done if (step := steps_to(run, 0.9)) is not None)
            found.append(
                {
                    "kind": kind,
                    "task": task,
                    "recipe": recipe,
                    "accuracy": statistics.mean(run["curve"][-1][-1] for run in done),
                    "gap": None if not values or recipe == baseline_of(recipe) else paired_gap(values),
                    "steps": statistics.median(reached) if reached else None,
                    "reached": len(reached),
                    "seeds": len(done),
                }
            )
    return found


def table_of_tasks(data: Mapping[str, Any]) -> str:
    """Make a Markdown table of the accuracies."""
    head = [
        "trained",
        "task",
        "recipe",
        "right",
        "more than bf16",
        "95 % interval",
        "p",
        "steps to 90 %",
        "seeds there",
    ]
    body = []
    for row in task_rows(data):
        gap = row["gap"]
        known = gap is not None and gap.pairs > 1
        body.append(
            [
                "from scratch" if row["kind"] == "task" else "an adapter over addition",
                row["task"],
                f"`{row['recipe']}`",
                f"{row['accuracy']:.1%}",
                "" if gap is None else f"{100 * gap.mean:+.1f} points",
                f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}" if known else "",
                f"{gap.p:.2g}" if known else "",
                "" if row["steps"] is None else f"{row['steps']:,.0f}",
                f"{row['reached']} of {row['seeds']}",
            ]
        )
    return markdown(
        {**data, "benchmark": "tasks graded exactly", "settings": data["settings"].get("tasks", {})}, head, body
    )


def table(data: Mapping[str, Any]) -> str:
    """Make Markdown tables of the gaps, and of what models can do."""
    return f"{table_of_losses(data)}\n\n{table_of_tasks(data)}"


def table_of_losses(data: Mapping[str, Any]) -> str:
    """Make a Markdown table of the gaps."""
    head = [
        "trained",
        "size",
        "recipe",
        "against",
        "mean gap",
        "95 % interval",
        "between seeds",
        "seeds",
        "p",
        "gate",
        "interval is",
    ]
    body = [
        [
            {"scratch": "from scratch", "tuning": "fine-tuned", "alone": "one thing alone"}[row["kind"]],
            row["size"],
            f"`{row['recipe']}`",
            f"`{baseline_of(row['recipe'])}`",
            f"{100 * row['mean']:+.3f} %",
            "" if row["pairs"] < 2 else f"{100 * row['low']:+.3f} to {100 * row['high']:+.3f} %",
            "" if row["pairs"] < 2 else f"{100 * row['spread']:.3f} %",
            str(row["pairs"]),
            "" if row["pairs"] < 2 else f"{row['p']:.2g}",
            "" if row["gate"] is None else f"{100 * row['gate']:g} %",
            row["verdict"],
        ]
        for row in rows(data)
    ]
    settings = {key: value for key, value in data["settings"].items() if isinstance(value, int | str)}
    return markdown(
        {**data, "benchmark": "held-out loss against bf16, paired by seeds", "settings": settings}, head, body
    )
