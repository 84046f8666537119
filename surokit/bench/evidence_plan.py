"""Plan the study of what each recipe costs: which runs it has, with how many seeds, and by which gates it is judged.

The study is planned before it runs: `plan` takes the spread of a pilot (from scratch: runs that differ in nothing but the draws of
rounding) and of the study before (adapters), and says with how many seeds a gate can be decided, and how often it is with `SEEDS`.
bf16 and fp4 are trained at several learning rates with the first seed of a size, for all of its steps: short runs would choose
rates that are too high. Recipes of 8 bits take what was best for bf16, those of 4 bits what was best for fp4: of rates that are
equally good, the lowest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from surokit.bench import result
from surokit.environment import environment
from surokit.statistics import count_for_gate, power_of_gate

VOCAB, LENGTH, BATCH = 1024, 128, 8
#: Texts on which a run from scratch is held out, in this order, and their shares of the tokens that it trains on, by which its loss
#: weighs them. With halves it would be as uncertain as that on Moby-Dick, on which two runs that differ in no more than the draws
#: of stochastic rounding end 0.4 % apart.
SHARES = {"stories": 0.82, "Moby-Dick": 0.18}
TEXTS = tuple(SHARES)
STEPS, TUNING_STEPS, WARMUP = 2000, 400, 50


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
#: How many seeds each size has, which twelve hours on two cores allow; `plan` says what they decide.
SEEDS = {"1M": 12, "3M": 4, "8M": 3}
SWITCHED = "fp4 then fp4(forward=bf16) at 0.82"
#: bf16 once more, with other draws of stochastic rounding: what a gap of nothing looks like, and half of what others are compared
#: with.
CONTROL = "bf16 again"
FROM_SCRATCH = ("bf16", CONTROL, "fp8-current", "mxfp8", "fp4", SWITCHED, "quartet-ii")
#: bf16 with an adapter whose A begins with orthonormal rows, as a "loftq" one does: what that does where nothing is quantized.
ORTHONORMAL = "bf16+lora orthonormal"
#: Frozen weights, under an adapter of rank 16, "loftq" where it begins with the quantization error; against bf16 with an adapter.
FROZEN = ("bf16+lora", "qfp8", "qfp4", "qnf4", "qfp8 loftq", "qfp4 loftq", "qnf4 loftq", ORTHONORMAL)
#: Recipes that are not trained at every size, and those with fewer seeds: what they would take is most of the study's hours.
ONLY_AT = {"quartet-ii": ("1M",), "mxfp8": ("1M", "3M"), **dict.fromkeys(FROZEN[4:], ("1M", "3M"))}
SEEDS_OF = {"quartet-ii": 3, "fp4": 8, SWITCHED: 8, **dict.fromkeys(FROZEN, 3)}
#: Where the gap of fp4 comes from: one product at a time, all products of one kind of layer, and no last blocks in bf16.
ALONE = (
    "fp4(grad_input=bf16, grad_weight=bf16)",
    "fp4(forward=bf16, grad_weight=bf16)",
    "fp4(forward=bf16, grad_input=bf16)",
    "fp4 in attention",
    "fp4 in mlp",
    "fp4 everywhere",
)
ALONE_SEEDS = 3
#: Recipes of those kinds of runs that have a held-out loss on text.
OF_TEXTS = {"scratch": FROM_SCRATCH, "tuning": FROZEN, "alone": ALONE}
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
RATES = {"1M": (2e-3, 4e-3, 8e-3), "3M": (1.5e-3, 3e-3), "8M": (1e-3, 2e-3)}
SWEPT = ("bf16", "fp4")
#: The lowest rate is taken whose loss is within this share of the best: that far apart are runs that differ in draws alone.
ALIKE = 0.002
TUNING_RATE = 1e-3
#: Tasks by name; a small model learns each from scratch, and a task of its kind after it with an adapter over frozen weights.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "addition": ("Addition", {"digits": 2}),
    "recall": ("Recall", {"pairs": 4}),
    "brackets": ("Brackets", {"kinds": 2, "size": 16}),
    "addition, reversed": ("Addition", {"digits": 2, "reverse": True}),
}
ABLE = ("bf16", "fp8-current", "fp4", SWITCHED)
TASK_STEPS, TASK_RATE, TASK_BATCH, TASK_SEEDS = 1600, 1e-3, 64, 5
RETAUGHT = "addition, reversed"  # after addition: the same characters, another order
RETAUGHT_STEPS, RETAUGHT_RATE = 800, 3e-3
SETTINGS = {
    "vocabulary": VOCAB,
    "tokens a step": BATCH * LENGTH,
    "steps": STEPS,
    "steps of fine-tuning": TUNING_STEPS,
    "sizes": {name: asdict(size) for name, size in SIZES.items()},
    "optimizer": "AdamW, float32 moments, bf16 weights rounded stochastically, cosine to a tenth after 50 steps of warm-up",
    "text": "generated stories and Moby-Dick, of which no part is seen twice; fine-tuning on Shakespeare",
    "held-out loss": "of texts in the proportion in which they are trained on",
    "kept in bf16": "the head, and of fp4 the last 15 % of the blocks, rounded: 1 of 4, of 6 and of 8, none of 2",
    "tasks": {
        "model": asdict(OF_A_TASK),
        "problems a step": TASK_BATCH,
        "steps": TASK_STEPS,
        "learning rate": TASK_RATE,
        "retaught": f"{RETAUGHT_STEPS} steps at {RETAUGHT_RATE:g}, an adapter over the model of addition",
    },
}

#: What says which processor ran. It may differ between calls: sums in another order do to a run what other draws of rounding do.
PROCESSOR = ("cpu", "cpu_vectors", "cpu_bf16")


@dataclass(frozen=True)
class Run:
    """A Run is one model trained by one recipe.

    kind: "scratch", "tuning", "alone" (one thing is quantized), "task" or "retaught" (an adapter over a model of another
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
            f" lr {self.lr:g}" if self.kind == "scratch" else ""
        )

    @property
    def steps(self) -> int:
        return {"tuning": TUNING_STEPS, "task": TASK_STEPS, "retaught": RETAUGHT_STEPS}.get(self.kind, STEPS)

    @property
    def shape(self) -> Size:
        return OF_A_TASK if self.kind in OF_TASKS else SIZES[self.size]

    @property
    def base(self) -> Run | None:
        """Return the run whose model is below the adapter; None for a run from scratch."""
        if self.kind == "tuning":
            return Run("scratch", self.size, "bf16", self.seed, self.base_lr)
        return Run("task", "addition", "bf16", self.seed, self.base_lr) if self.kind == "retaught" else None

    @property
    def first_part(self) -> Run | None:
        """Return the run whose state this one goes on from, where its recipe changes; None for another."""
        begins, changes, _ = self.recipe.partition(" then ")
        return replace(self, recipe=begins) if changes else None

    @property
    def forks_at(self) -> int:
        """Return the step at which the run of a recipe that changes begins with this run's state; 0 for none."""
        return recipe_of(SWITCHED).later[0].step(STEPS) if (self.kind, self.recipe) == ("scratch", "fp4") else 0

    @property
    def folder(self) -> str:
        return hashlib.blake2b(f"{self}".encode(), digest_size=8).hexdigest()


def run_of(found: Mapping[str, Any]) -> Run:
    """Return the run of which a raw file says this."""
    return Run(**{field.name: found[field.name] for field in fields(Run)})


def plan(earlier: Mapping[str, Any], pilot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return with how many seeds each gate can be decided in four of five studies, and in which share of studies it is with the
    seeds of 1M, by gaps and spreads of an earlier study.

    earlier: recipes.json. pilot: evidence-pilot.json, runs of 1M that differ in nothing but the draws of stochastic rounding, from
    which the spread of a gap from scratch follows: that of one such run to the mean of two, bf16 and its twin.
    """
    rows = []
    alike: dict[tuple[float, float], list[float]] = {}
    for run in pilot["runs"]:
        alike.setdefault((run["lr"], run["floor"]), []).append(loss_at({"kind": "scratch", **run}))
    off = [loss / statistics.mean(losses) - 1 for losses in alike.values() for loss in losses]
    drawn = math.sqrt((1 + 1 / 2) * sum(each**2 for each in off) / (len(off) - len(alike)))
    for name, gate in GATES.items():
        known = "fp4" if name in (SWITCHED, "quartet-ii") else name.removesuffix(" loftq")
        base = "bf16-lora" if known.startswith("q") else "bf16"
        gaps = [run[known] / run[base] - 1 for run in earlier["runs"]]
        gap, spread = statistics.mean(gaps), drawn if base == "bf16" else statistics.stdev(gaps)
        gap = gap / 3 if name == SWITCHED else gap  # NVIDIA's 1.5 % became 0.5 %
        spreads = {f"spread x {factor:g}": factor * spread for factor in (1.5, 1.0, 0.5)}
        seeds = {words: count_for_gate(gate, gap, each) for words, each in spreads.items()}
        count = seeds_of(name, "1M")
        power = {words: power_of_gate(gate, gap, each, count) for words, each in spreads.items()}
        rows.append({"recipe": name, "gate": gate, "gap": gap, "spread": spread, "seeds": seeds, "power at 1M": power})
    return rows


def write_plan(earlier: Path, pilot: Path, out: Path) -> dict[str, Any]:
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
        "rates are alike within": ALIKE,
        "wanted": plan(*(json.loads(path.read_text(encoding="utf-8")) for path in (earlier, pilot))),
    }
    result.write(data, out)
    return data


def runs(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Run]:
    """Yield all runs of the study that can begin, by what was `found`, in their order: some seeds of each size, tasks between."""
    all_of_them = [(size, seed) for size in SIZES for seed in range(SEEDS[size])]
    ordered = sorted(all_of_them, key=lambda each: (each[1] + 1) / SEEDS[each[0]])
    for place, (size, seed) in enumerate(ordered):
        if seed == 0:
            yield from sweep(size, SWEPT)
        yield from _of_seed(found, size, seed)
        if place < TASK_SEEDS:
            yield from _of_tasks(found, seed=place)


class _Everything(dict[str, Any]):
    """Everything is found, a rate that was not tried yet with the worst loss: what `runs` yields then is the whole plan."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> dict[str, float]:
        return {"held_out": math.inf}


def planned(found: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the keys of all runs of the study, by the rates that are best so far."""
    return {run.key for run in runs(_Everything(found))}


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
        run = at_its_rate(found, "scratch", size, recipe, seed)
        if run and (run.first_part is None or run.first_part.key in found):
            yield run
    base = at_its_rate(found, "scratch", size, "bf16", seed)
    if base and base.key in found:
        for recipe in trained_at(size, FROZEN, seed):
            yield Run("tuning", size, recipe, seed, TUNING_RATE, base.lr)
    if size == "1M" and seed < ALONE_SEEDS:
        yield from filter(None, (at_its_rate(found, "alone", size, recipe, seed) for recipe in ALONE))


def sweep(size: str, recipes: Iterable[str]) -> list[Run]:
    return [Run("scratch", size, recipe, 0, lr) for recipe in recipes for lr in RATES[size]]


def at_its_rate(found: Mapping[str, Mapping[str, Any]], kind: str, of: str, recipe: str, seed: int) -> Run | None:
    """Return the run of a recipe, from scratch at the best learning rate of its kind; None before that is known."""
    if kind not in ("scratch", "alone"):
        return Run(kind, of, recipe, seed, 0.0)
    lr = best_rate(found, of, recipe)
    return None if lr is None else Run(kind, of, recipe, seed, lr)


def baseline_runs(found: Mapping[str, Any], kind: str, of: str, recipe: str, seed: int) -> list[Run]:
    """Return the runs with whose mean a recipe's is compared: the baseline's, and from scratch bf16's twin, since two are less
    uncertain than one; none before the learning rate is known."""
    base = at_its_rate(found, "scratch" if kind == "alone" else kind, of, baseline_of(recipe), seed)
    if base is None:
        return []
    return [base, replace(base, recipe=CONTROL)] if base.kind == "scratch" and recipe != CONTROL else [base]


def trained_at(size: str, recipes: Iterable[str], seed: int) -> list[str]:
    """Return those of the recipes that are trained at a size with a seed."""
    return [recipe for recipe in recipes if size in ONLY_AT.get(recipe, SIZES) and seed < seeds_of(recipe, size)]


def seeds_of(recipe: str, size: str) -> int:
    return min(SEEDS[size], SEEDS_OF.get(recipe, SEEDS[size]))


def best_rate(found: Mapping[str, Mapping[str, Any]], size: str, recipe: str) -> float | None:
    """Return the lowest learning rate whose held-out loss is as good as the best one's, of fp4 for recipes of 4 bits and else of
    bf16; None before all are known."""
    tried = sweep(size, ["fp4" if recipe.startswith(("fp4", "quartet")) else "bf16"])
    if any(run.key not in found for run in tried):
        return None
    best = min(found[run.key]["held_out"] for run in tried)
    return min(run.lr for run in tried if found[run.key]["held_out"] <= best * (1 + ALIKE))


def recipe_of(name: str) -> Any:
    """Return a recipe of the study; "in attention" and "in mlp" quantize one kind of layer."""
    from surokit.recipe import BF16, PROJECTIONS, find_recipe

    if name == CONTROL:
        return BF16
    if name in ("bf16+lora", ORTHONORMAL):
        return BF16.lora()
    if name.endswith(" loftq"):
        return find_recipe(name.removesuffix(" loftq")).lora(init="loftq")
    plain, where, part = name.partition(" in ")
    recipe = find_recipe(plain.removesuffix(" everywhere"))
    if name.endswith(" everywhere"):
        return recipe.keep_last(0)
    kept = {"attention": PROJECTIONS[4:], "mlp": PROJECTIONS[:4]}[part] if where else ()
    return recipe.keep(*(f"*.{projection}" for projection in kept))


def task_of(name: str) -> Any:
    """Return a task of the study."""
    from surokit import tasks

    kind, given = TASKS[name]
    return getattr(tasks, kind)(**given)


def baseline_of(recipe: str) -> str:
    """Return the recipe that a recipe is compared with: the one that trains the same parameters in bfloat16."""
    return "bf16+lora" if recipe in FROZEN else "bf16"


def loss_at(found: Mapping[str, Any], step: int | None = None, text: str | None = None) -> float:
    """Return a run's held-out loss at a step of its curve, the last without a step; from scratch on one of TEXTS, or on all of them
    by their SHARES."""
    row = found["curve"][-1] if step is None else next(row for row in found["curve"] if row[0] == step)
    if found["kind"] not in ("scratch", "alone"):
        return float(row[1])
    losses = dict(zip(TEXTS, row[1:], strict=True))
    return losses[text] if text else sum(share * losses[name] for name, share in SHARES.items())
