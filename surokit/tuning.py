"""Choose which layers a recipe quantizes: measure the loss on one batch, plan the time for one GPU, and show the trade.

1. Sensitivity. Layers that are the same in every block (all `mlp.down_proj`, say) form a group. For each recipe and group the
   batch's loss is measured with only this group's forward products quantized. A layer's share of the change is its share of the
   group's noise as the loss feels it: loss_l = |change| n_l / sum n with n = 10^(-dB / 10) |y|^2 |dy|^2 / T, noise power times
   the curvature that the gradient tells of (Fisher's, with noise and gradient taken as independent).
2. Time. Three products and the quantization of their operands, each at the larger of FLOPs over the GPU's dense peak for the
   format and bytes over its bandwidth: planned, never measured. Without a known GPU, FLOPs x bits stand for it.
3. The front. For each recipe layers go back to bf16 one after another, those first that cost the most loss for the time they
   save; a layer that the format would make slower goes first of all. What no other mixture beats in both stays, and the loss of
   these is measured.

What it cannot see: gradients. Quantized gradient products do not change the loss of a forward pass; their worst SQNR is listed.

T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surokit.accuracy import judge, operands_of
from surokit.convert import gpu_for, precision, skip_reason
from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import linear_seconds
from surokit.layers import check_taken_over, linear_layers, recipe_layers
from surokit.nn.evaluating import evaluating
from surokit.nn.experts import ExpertsLinear
from surokit.planner.counts.flops import operand_bits
from surokit.recipe import BF16, Recipe, count_blocks, find_recipe, within_block
from surokit.tables import html_table, text_table
from surokit.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class LayerMixture(NamedTuple):
    """A LayerMixture is one mixture: gaps are shares of the batch's bf16 loss, `time` is planned for the linear layers of one step.

    quantized: how many layers are. worst_db: the lowest SQNR of any of their products, gradients included.
    """

    recipe: Recipe
    gap: float
    time: float
    measured: float
    quantized: int
    worst_db: float


@dataclass(frozen=True)
class Tuning:
    """A Tuning is what `tune` found: `front` from slow and accurate to fast, `best` within the gap that was allowed."""

    front: list[LayerMixture]
    max_gap: float
    loss: float  # of the batch, in bf16
    layers: int
    unit: str  # of the times, and where they come from
    slower: list[str] = field(default_factory=list)  # what stays bf16 because the format would lose time
    experts: int = 0  # weights of experts, which every mixture keeps in bf16

    @property
    def best(self) -> Recipe:
        """Return the fastest mixture whose measured loss on the batch is within `max_gap` of bf16's, above or below."""
        inside = [choice for choice in self.front if abs(choice.measured) <= self.max_gap]
        return min(inside, key=lambda choice: choice.time).recipe  # bf16 itself always is

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row a mixture: recipe, quantized, gap, measured, time, speed (bf16 is 1), worst_db."""
        import pandas as pd

        slowest = self.front[0].time
        rows = [
            (c.recipe.name, c.quantized, c.gap, c.measured, c.time, slowest / c.time, c.worst_db) for c in self.front
        ]
        return pd.DataFrame(rows, columns=["recipe", "quantized", "gap", "measured", "time", "speed", "worst_db"])

    def plot(self) -> Figure:
        """Plot the loss gap against planned time, predicted and measured, as a matplotlib figure."""
        from surokit.widgets.curves import plot_front

        return plot_front(self.front, self.best, self.max_gap, self.unit)

    _HEADER = ("", "recipe", "layers", "gap, predicted", "measured", "speed, planned", "worst dB")

    def _rows(self) -> list[tuple[str, ...]]:
        best, slowest = self.best, self.front[0].time
        return [
            (
                "best" if c.recipe == best else "",
                c.recipe.name,
                f"{c.quantized} of {self.layers}",
                f"{100 * c.gap:.3f} %",
                f"{100 * c.measured:+.3f} %",
                f"{slowest / c.time:.2f} x",
                f"{c.worst_db:.1f}" if math.isfinite(c.worst_db) else "",
            )
            for c in self.front
        ]

    def _notes(self) -> list[str]:
        notes = [f"times: {self.unit}", f"best within {100 * self.max_gap:g} %: {self.best}"]
        notes += [f"stays bf16, which is no slower: {line}" for line in self.slower]
        return notes + [f"stays bf16, not measured: {counted(self.experts, 'weight')} of experts"] * bool(self.experts)

    def __repr__(self) -> str:
        table = text_table(self._rows(), header=self._HEADER, right=(2, 3, 4, 5, 6), indent="")
        return "\n".join([table, *self._notes()])

    def _repr_html_(self) -> str:
        table = html_table(self._rows(), header=self._HEADER, right=(2, 3, 4, 5, 6), title="Loss against time")
        notes = "".join(f"<br><code>{html.escape(note)}</code>" for note in self._notes())
        return f"<div>{self._picture()}{table}{notes}</div>"

    def _picture(self) -> str:
        """Return the plot as an image of its own, so that its ids stay apart from a page's; "" without matplotlib."""
        drawn = io.BytesIO()
        try:
            self.plot().savefig(drawn, format="svg")
        except ImportError:
            return ""
        return f'<img src="data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"><br>'


def tune(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    max_gap: float = 0.01,
    recipes: Sequence[Recipe | str] = ("fp8", "fp8-rowwise", "mxfp8", "fp4"),
    gpu: str | Gpu | None = None,
    points: int = 12,
) -> Tuning:
    """Return mixtures of bf16 and each recipe by layer, on the front of batch loss against planned time.

    Weights of experts stay in bfloat16 in every mixture, and are not counted.

    batch: {"input_ids": [B, T], "labels": [B, T]}. max_gap: largest change of its loss that `best` may have, as a share of the
    bf16 loss. recipes: of the products; storage and adapters are another choice, made on the result. gpu: whose peaks the times
    are planned by; by default the one the model is on, if the planner knows it. points: most mixtures whose loss is measured.

    The model and the random state stay as they are. Costs one forward and backward, and a forward for each recipe and group of
    layers and for each point.
    """
    check_taken_over(model, "tune")
    experts = [name for name, layer in recipe_layers(model) if isinstance(layer, ExpertsLinear)]
    kept = sorted({within_block(name) for name in experts})
    chosen = list(dict.fromkeys(part.keep(*kept) for recipe in recipes for part in find_recipe(recipe).parts))
    _check(chosen, max_gap, points)
    layers = dict(linear_layers(model))
    decibels, felt = _measure(model, batch, layers, chosen)
    where = next(model.parameters()).device
    clock, unit = _clock(gpu, where, batch["input_ids"].numel())
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    trains = {name: layer.weight.requires_grad for name, layer in layers.items()}
    plain = {name: clock(BF16, *shape, trains[name]) for name, shape in shapes.items()}
    total = sum(plain.values())
    candidates = [Mixture(BF16, 0.0, total, (), math.inf)]
    slower: list[str] = []
    with _undisturbed(model, where):
        base = _loss(model, batch, BF16)
        for recipe in chosen:
            sqnr_db = decibels[recipe.name]
            noise = {name: 10 ** (-db["forward"] / 10) * felt[name] for name, db in sqnr_db.items()}
            harm: dict[str, float] = {}
            for names in _groups(noise):
                change = abs(_loss(model, batch, recipe.keep("*").also(*names)) - base) / base
                power = sum(noise[name] for name in names)
                harm |= {name: change * noise[name] / power if power else 0.0 for name in names}
            saved = {name: plain[name] - clock(recipe, *shapes[name], trains[name]) for name in noise}
            worst = {name: min(db.values()) for name, db in sqnr_db.items()}
            lost = [name for name in noise if saved[name] <= 0]
            slower += [f"{recipe.name} at {', '.join(patterns_of(lost, noise))}"] if lost else []
            candidates += _chain(recipe, harm, saved, worst, total, lost)
        front = thin(pareto(candidates), points)
        choices = []
        for mixture in front:
            mixed = mixture.recipe
            if mixture.quantized:
                among = decibels[mixed.name]
                mixed = mixed.keep(*patterns_of([name for name in among if name not in mixture.quantized], among))
            measured = (_loss(model, batch, mixed) - base) / base if mixture.quantized else 0.0
            choices.append(
                LayerMixture(mixed, mixture.gap, mixture.time, measured, len(mixture.quantized), mixture.worst_db)
            )
    return Tuning(choices, max_gap, base, len(layers), unit, slower, len(experts))


def _check(recipes: list[Recipe], max_gap: float, points: int) -> None:
    if not recipes:
        raise ValueError("tune() needs at least one recipe, for example recipes=('fp8', 'fp4').")
    if not 0 <= max_gap < math.inf:
        raise ValueError(f"tune(max_gap={max_gap}): a share of the loss, for example 0.01 for one percent.")
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise ValueError(f"tune(points={points!r}): a whole number of at least 2.")
    for recipe in recipes:
        if recipe.frozen_base:
            raise ValueError(
                f"tune() chooses products and {recipe.name} freezes the weights: leave it out, and use .store() or .lora() "
                "on the recipe that tune() finds."
            )
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise ValueError(f"Two recipes share a name among {', '.join(names)}: give each its own.")


# -- loss


def _measure(
    model: nn.Module, batch: Mapping[str, Tensor], layers: Mapping[str, nn.Linear], recipes: Sequence[Recipe]
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    """Return (SQNR in dB by recipe, layer and product, what the loss feels of a unit of relative noise in each layer's output).

    Of the layers that the batch reaches, and for each recipe of those that it does not keep.
    """
    blocks = count_blocks(layers)
    decibels: dict[str, dict[str, dict[str, float]]] = {recipe.name: {} for recipe in recipes}
    felt = {}
    found = operands_of(model, batch)
    for name in list(found):
        operands = found.pop(name)  # with its float32 products, which are large
        y_TN, dy_TN = operands.exact["forward"], operands.dy_TN
        gradient = 0.0 if dy_TN is None else float(dy_TN.double().square().sum())
        felt[name] = float(y_TN.double().square().sum()) * gradient / len(y_TN)
        for recipe in recipes:
            if not skip_reason(name, layers[name], recipe, blocks):
                judged = judge(recipe, operands)
                decibels[recipe.name][name] = {gemm: float(figures[0]) for gemm, figures in judged}
    return decibels, felt


@contextmanager
def _undisturbed(model: nn.Module, where: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients, and a random state of its own; all undone afterwards."""
    devices = [where] if where.type == "cuda" else []
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


def _loss(model: nn.Module, batch: Mapping[str, Tensor], recipe: Recipe) -> float:
    where = next(model.parameters()).device
    torch.manual_seed(0)  # stochastic rounding draws the same for every mixture
    with precision(model, recipe):
        loss = float(model(**{name: value.to(where) for name, value in batch.items()}).loss)
    if recipe == BF16 and not (math.isfinite(loss) and loss > 0):
        raise ValueError(
            f"The batch's loss in bf16 is {loss}, so there is no gap to measure: look at the batch and its labels."
        )
    return loss


# -- time


def _clock(gpu: str | Gpu | None, where: torch.device, tokens: int) -> tuple[Any, str]:
    """Return (a function from recipe, N, K and whether the weight trains to a layer's time, the unit of it and its source)."""
    found = gpu_for(gpu, where)
    if found is None:
        return (
            lambda recipe, n, k, trains: weighted_flop(recipe, n, k, tokens, trains) / 1e9,
            "1e9 FLOP x bits / 16, a proxy (no GPU named)",
        )
    name = f"ms a step of {tokens:,} tokens, planned from the peaks of {found.name}"
    return lambda recipe, n, k, trains: linear_seconds(recipe, n, k, tokens, trains=trains, gpu=found) * 1e3, name


def weighted_flop(recipe: Recipe, n: int, k: int, t: int, trains: bool) -> float:
    """Return the FLOPs of a layer's products, each times the width of its operands over 16."""
    products = recipe.gemms if trains else recipe.gemms[:2]
    return sum(2.0 * n * k * t * operand_bits(gemm) / 16 for gemm in products)


# -- the front


class Mixture(NamedTuple):
    recipe: Recipe
    gap: float
    time: float
    quantized: tuple[str, ...]
    worst_db: float


def _chain(
    recipe: Recipe,
    harm: dict[str, float],
    saved: dict[str, float],
    worst: dict[str, float],
    total: float,
    lost: list[str],
) -> list[Mixture]:
    """Put one layer after another back to bf16, the one with the most loss for its time first."""
    order = sorted((name for name in harm if name not in lost), key=lambda name: -harm[name] / saved[name])
    chain = []
    for kept in range(len(order)):
        names = tuple(order[kept:])
        gap, gain = sum(harm[name] for name in names), sum(saved[name] for name in names)
        chain.append(Mixture(recipe, gap, total - gain, names, min(worst[name] for name in names)))
    return chain


def pareto(mixtures: list[Mixture]) -> list[Mixture]:
    """Return those that no other beats in gap and time, slow ones first."""
    front: list[Mixture] = []
    for mixture in sorted(mixtures, key=lambda m: (m.gap, m.time)):
        if not front or mixture.time < front[-1].time:
            front.append(mixture)
    return front


def thin(front: list[Mixture], points: int) -> list[Mixture]:
    """At most `points` of them, both ends and evenly spread in time between."""
    if len(front) <= points:
        return front
    first, last = front[0].time, front[-1].time
    wanted = [first + (last - first) * i / (points - 1) for i in range(points)]
    near = {min(range(len(front)), key=lambda i: abs(front[i].time - time)) for time in wanted}
    return [front[i] for i in sorted(near | {0, len(front) - 1})]


# -- names


def _groups(names: Mapping[str, Any]) -> list[list[str]]:
    """Return groups of layers that differ in the number of their block only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(within_block(name), []).append(name)
    return list(groups.values())


def patterns_of(names: Sequence[str], among: Any) -> list[str]:
    """Return the rules that name exactly these layers: a group by what its layers have in common where all of it is meant."""
    meant = set(names)
    patterns = []
    for group in _groups(dict.fromkeys(among)):
        here = [name for name in group if name in meant]
        kind = within_block(group[0])
        alone = all(name in group for name in among if name == kind or name.endswith(f".{kind}"))
        patterns += [kind] if len(here) == len(group) and alone and here else sorted(here)
    return patterns
