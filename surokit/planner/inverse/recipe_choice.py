"""Choose a recipe: plan each on the same model and GPU, and name the one predicted fastest of those that fit.

Times of recipes are likely ones where a plan has them, else those of its estimate. Without either they are bounds, every product at
its own dense peak: an emulated recipe then looks as fast as bfloat16, so none is called the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surokit.formats import TENSOR_CORES
from surokit.planner.counts.flops import frozen, gemms_of, on_gpu
from surokit.planner.inverse.budgets import known_memory_budget
from surokit.tables import data_frame

_COLUMNS = ("step_ms", "kind", "speedup", "against", "gib", "fits", "products", "why", "fastest")

if TYPE_CHECKING:
    import pandas as pd

    from surokit.hardware.gpus import Gpu
    from surokit.planner.planning import Plan
    from surokit.recipe import Recipe


@dataclass(frozen=True)
class RecipeChoice:
    """A RecipeChoice holds one recipe on a plan; figures that are not known are None.

    kind        of `step_ms`, as `Plan.step_time` has it: "prediction", "likely", "optimistic" or "bound"
    speedup     against the recipe that `against` names, bfloat16 with the same parameters trained; None where the kinds differ
    products    "bf16", "native", "partly native" or "emulated" on the plan's GPU, "" without one; `why` in words
    fastest     True for the least time of those that fit and train as much as the plan, everything or an adapter; none that is
                emulated and slower than what `against` names
    """

    name: str
    recipe: Recipe
    step_ms: float | None
    kind: str
    speedup: float | None
    against: str
    gib: float
    fits: bool | None
    products: str
    why: str
    fastest: bool = False


def recipes(plan: Plan, names: Iterable[str | Recipe] | None = None, *, gib: float | None = None) -> pd.DataFrame:
    """Compare recipes on the plan's model, GPU, batch and length, one a row: time, speedup, memory, native or emulated.

    names       recipes or their names; all named ones without it, and bfloat16 with an adapter where any freezes the base
    gib         memory to fit into, GiB; the GPU's own without it

    A plan whose recipe has an adapter compares recipes with that adapter. The plan's own recipe is among all, "as planned" where it
    keeps other layers than the named one that it is called after. Columns are the fields of `RecipeChoice`, recipe by name.
    """
    rows = [{"recipe": c.name, **{k: getattr(c, k) for k in _COLUMNS}} for c in compare_recipes(plan, names, gib=gib)]
    return data_frame(rows)


def compare_recipes(
    plan: Plan, names: Iterable[str | Recipe] | None = None, *, gib: float | None = None
) -> tuple[RecipeChoice, ...]:
    """Compare recipes as `recipes` does, and return its rows without pandas."""
    room = known_memory_budget(plan, gib)
    rows = []
    bases: dict[Recipe, tuple[float | None, str]] = {}
    pairs = candidates(plan, names)
    called = Counter(label_of(recipe) for recipe, _ in pairs)
    for recipe, baseline in pairs:
        again = plan.but(recipe=recipe)
        step_ms, kind = _step(again)
        if baseline not in bases:
            bases[baseline] = _step(plan.but(recipe=baseline))
        base_ms, base_kind = bases[baseline]
        products, why = products_on(recipe, plan.gpu)
        choice = RecipeChoice(
            name=label_of(recipe) + " (as planned)" * (recipe == plan.recipe and called[label_of(recipe)] > 1),
            recipe=recipe,
            step_ms=step_ms,
            kind=kind,
            speedup=base_ms / step_ms if base_ms and step_ms and kind == base_kind else None,
            against=label_of(baseline),
            gib=again.memory.gib,
            fits=_fits(again, room),
            products=products,
            why=why,
        )
        rows.append(choice)
    # a recipe that trains only an adapter is not compared with one that trains everything
    alike = [c for c in rows if c.recipe.frozen_base == frozen(plan.recipe)] or rows
    timed = [c for c in alike if c.step_ms and c.fits is not False]
    # a bound does not know what emulation costs
    timed = [c for c in timed if c.kind != "bound"] or [c for c in timed if c.products in ("bf16", "native")]
    # an emulated recipe tells about the loss, and is slower than what it emulates
    timed = [c for c in timed if c.products != "emulated" or not c.speedup or c.speedup > 1]
    if not timed:
        return tuple(rows)
    best = min(timed, key=lambda c: c.step_ms or 0.0)
    return tuple(replace(c, fastest=c is best) for c in rows)


def candidates(plan: Plan, names: Iterable[str | Recipe] | None = None) -> list[tuple[Recipe, Recipe]]:
    """Return the recipes to compare, each with its baseline: bfloat16 with the same parameters trained."""
    from surokit.recipe import BF16, Lora, Recipe, find_recipe
    from surokit.recipe import recipes as named

    own = plan.recipe
    adapter = own.adapter if isinstance(own, Recipe) else None
    if isinstance(names, str | Recipe):
        names = (names,)
    chosen = [find_recipe(name) for name in names] if names is not None else list(named.values())
    if not chosen:
        raise ValueError("There is no recipe to compare: give names, or none for all of them.")
    # whatever it is called: layers that a recipe keeps are not in its name
    if names is None and isinstance(own, Recipe) and replace(own, adapter=None, keeps_decoded=None) not in chosen:
        chosen.append(own)
    if adapter is not None:
        chosen = [r.lora(adapter.rank, adapter.alpha, adapter.targets) for r in chosen]
    pairs: dict[Recipe, Recipe] = {}
    for recipe in chosen:
        a = recipe.adapter or Lora()
        baseline = BF16.lora(a.rank, a.alpha, a.targets) if recipe.frozen_base else BF16
        if names is None:
            pairs.setdefault(baseline, baseline)
        pairs[recipe] = baseline
    return list(pairs.items())


def _fits(plan: Plan, room: float | None) -> bool | None:
    """Return whether the plan fits into `room` GiB; None where that is not known."""
    if room is None:
        return None
    fits = plan.memory.gib <= room
    return None if fits and plan.memory.left_out else fits


def label_of(recipe: Recipe) -> str:
    """Return the name of a recipe in tables, which says that it trains an adapter."""
    return f"{recipe.name}+lora" if recipe.adapter and recipe.storage is None else recipe.name


def _step(plan: Plan) -> tuple[float | None, str]:
    """Return (milliseconds of one step, the kind of that figure)."""
    return plan.step_time or plan.computing_time or (None, "")


def products_on(recipe: Recipe, gpu: Gpu | None) -> tuple[str, str]:
    """Return (a word for how the GPU computes a recipe's products, the reason in a sentence)."""
    gemms = gemms_of(on_gpu(recipe, gpu))
    # a frozen weight has no gradient
    quantized = [gemm for gemm in (gemms[:2] if frozen(recipe) else gemms) if gemm.quantized]
    if not quantized:
        over = f" over weights decoded from {recipe.storage.format}" if recipe.storage else ""
        return "bf16", f"products in bfloat16{over}"
    if gpu is None:
        return "", "which products are native is not known: give gpu="
    native: dict[str, None] = {}
    emulated: dict[str, None] = {}
    for gemm in quantized:
        if gemm.kind is None:
            emulated["no tensor cores compute them"] = None
        elif not gpu.multiplies(gemm.kind):
            cores = TENSOR_CORES[gemm.kind]
            emulated[f"{cores.name} need {cores.where}"] = None
        elif gpu.peak(gemm.kind) == gpu.peak():
            native[f"{TENSOR_CORES[gemm.kind].name}, counted at the {gpu.plain} peak: theirs is not known"] = None
        else:
            native[TENSOR_CORES[gemm.kind].name] = None
    word = "emulated" if not native else "partly native" if emulated else "native"
    return word, "; ".join([*native, *(f"emulated in bfloat16, {why}" for why in emulated)])
