"""Run the study of what each recipe costs in held-out loss, and judge it: from scratch and fine-tuned, at three sizes, paired by
seeds.

    python -m surokit.bench evidence --out docs/measurements/evidence.json --folder runs/evidence --minutes 60

A run is one model trained by one recipe: those of a seed start from the same weights and see the same batches. The study is planned
before it runs: `plan` takes the spread between seeds of the study before (recipes.json) and says with how many seeds a gate can be
decided; `SEEDS` is what was taken. Every recipe trains at the learning rate that was best for it in a short sweep.

Runs are taken in an order in which the file says something early: sweeps, then seed by seed. Each writes its checkpoint as it goes,
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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench import result
from surokit.bench.result import markdown
from surokit.bench.results_store import Book
from surokit.environment import environment
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
#: How many seeds each size has; `plan` says why.
SEEDS = {"1M": 8, "3M": 4, "8M": 3}
SWITCHED = "fp4 then fp4(forward=bf16) at 0.82"
FROM_SCRATCH = ("bf16", "fp8-current", "mxfp8", "fp4", SWITCHED, "quartet-ii")
#: Frozen weights, under an adapter of rank 16, "loftq" where it begins with the quantization error; against bf16 with an adapter.
FROZEN = ("bf16+lora", "qfp8", "qfp4", "qnf4", "qfp8 loftq", "qfp4 loftq", "qnf4 loftq")
#: Recipes that are not trained at every size.
ONLY_AT = {"quartet-ii": ("1M", "3M")}
#: Where the gap of fp4 comes from: one product at a time, and all products of one kind of layer.
ALONE = (
    "bf16(forward=fp4)",
    "bf16(grad_input=fp4)",
    "bf16(grad_weight=fp4)",
    "fp4 in attention",
    "fp4 in mlp",
    "fp4 everywhere",
)
ALONE_SEEDS = 3
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
RATES = {"1M": (2e-3, 4e-3, 8e-3), "3M": (1.5e-3, 3e-3, 6e-3), "8M": (1e-3, 2e-3, 4e-3)}
SWEPT = ("bf16", "fp8-current", "mxfp8", "fp4", "quartet-ii")  # a recipe that changes takes the rate of its first part
TUNING_RATE = 1e-3
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
}


@dataclass(frozen=True)
class Run:
    """A Run is one model trained by one recipe. kind: "sweep", "scratch", "tuning", or "alone", where one thing is quantized.

    base_lr: of fine-tuning, the learning rate of the bf16 run whose model is tuned.
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
        return {"sweep": SWEEP_STEPS[self.size], "tuning": TUNING_STEPS}.get(self.kind, STEPS)

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
        "gates": GATES,
        "learning rates tried": RATES,
        "wanted": plan(json.loads(earlier.read_text(encoding="utf-8"))),
    }
    result.write(data, out)
    return data


def runs(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    """Yield all runs of the study that can begin, by what was `found`, in their order: sweeps, then some seeds of each size."""
    for size in SIZES:
        yield from sweep(size)
    all_of_them = [(size, seed) for size in SIZES for seed in range(SEEDS[size])]
    for size, seed in sorted(all_of_them, key=lambda each: (each[1] + 1) / SEEDS[each[0]]):
        yield from _of_seed(found, size, seed)


def _of_seed(found: Mapping[str, Mapping[str, Any]], size: str, seed: int) -> Iterator[Run]:
    rates = {recipe: best_rate(found, size, recipe) for recipe in SWEPT}
    for recipe in trained_at(size):
        begins = recipe.partition(" then ")[0]
        if (lr := rates[begins]) is not None:
            run = Run("scratch", size, recipe, seed, lr)
            if recipe == begins or replace(run, recipe=begins).key in found:
                yield run
    if (lr := rates["bf16"]) is not None and Run("scratch", size, "bf16", seed, lr).key in found:
        for recipe in FROZEN:
            yield Run("tuning", size, recipe, seed, TUNING_RATE, lr)
    if size == "1M" and seed < ALONE_SEEDS and (lr := rates["fp4"]) is not None:
        for recipe in ALONE:
            yield Run("alone", size, recipe, seed, lr)


def sweep(size: str) -> list[Run]:
    return [Run("sweep", size, recipe, 0, lr) for recipe in trained_at(size) if recipe in SWEPT for lr in RATES[size]]


def trained_at(size: str) -> list[str]:
    """Return the recipes that are trained from scratch at a size."""
    return [recipe for recipe in FROM_SCRATCH if size in ONLY_AT.get(recipe, SIZES)]


def best_rate(found: Mapping[str, Mapping[str, Any]], size: str, recipe: str) -> float | None:
    """Return the learning rate with the lowest held-out loss in the sweep; None before it is over."""
    tried = [run for run in sweep(size) if run.recipe == recipe]
    if not tried or any(run.key not in found for run in tried):
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
    every, seconds = run.steps // POINTS, _add_seconds(where, 0.0)
    while session.steps < run.steps:
        stops = [run.steps, session.steps + CHUNK, every * (session.steps // every + 1)]
        stops += [run.forks_at] if session.steps < run.forks_at else []
        session.run(min(stops) - session.steps)  # and saves
        if session.steps % every == 0 or session.steps == run.steps:
            for text in held_out:
                session.evaluate(text)
            session.save()
        if session.steps == run.forks_at:
            _begin_switched(session, folder / replace(run, recipe=SWITCHED).folder)
        began, seconds = time.process_time(), _add_seconds(where, time.process_time() - began)
        if time.time() >= ends_at and session.steps < run.steps:
            return None
    losses = [evaluation.loss for evaluation in session.evaluations]
    curve = [
        [session.evaluations[i].step, *losses[i : i + len(held_out)]] for i in range(0, len(losses), len(held_out))
    ]
    return {
        **asdict(run),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "steps": run.steps,
        "curve": curve,
        "held_out": statistics.mean(curve[-1][1:]),
        "cpu_s": round(seconds, 1),
        "skipped": int(sum(session.records.column("skipped"))),
    }


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
    size = SIZES[run.size]
    config = sk.DecoderConfig(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads // 2,
        vocab=VOCAB,
        ffn=size.ffn,
        max_length=LENGTH,
    )
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if run.kind == "tuning":
        base = Run("scratch", run.size, "bf16", run.seed, run.base_lr)
        trained = sk.Session.resume(folder / base.folder, data=texts_of(base)[0])
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


@cache
def texts_of(run: Run) -> tuple[Any, list[list[Batch]]]:
    """Return what a run trains on, and the kinds of text on which its loss is taken: generated and Moby-Dick, or Shakespeare."""
    import surokit as sk
    from surokit import texts

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


def gaps(data: Mapping[str, Any], kind: str, size: str, recipe: str, step: int | None = None) -> list[float]:
    """Return the relative gap of the held-out loss to the baseline, of every seed that has both runs.

    step: of the training, one of the curve's; None for the last.
    """
    found = data["runs"]
    base_kind = "scratch" if kind == "alone" else kind
    pairs = (
        (found.get(Run(kind, size, recipe, seed, 0.0).key), found.get(Run(base_kind, size, base, seed, 0.0).key))
        for base in [baseline_of(recipe)]
        for seed in range(max(SEEDS.values()))
    )
    return [loss_at(own, step) / loss_at(base, step) - 1 for own, base in pairs if own and base]


def loss_at(found: Mapping[str, Any], step: int | None = None) -> float:
    """Return a run's held-out loss at a step of its curve, the mean over the kinds of text; the last without a step."""
    row = found["curve"][-1] if step is None else next(row for row in found["curve"] if row[0] == step)
    return statistics.mean(row[1:])


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


def table(data: Mapping[str, Any]) -> str:
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
