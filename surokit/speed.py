"""Plan how fast a recipe's layers are on a GPU beside bfloat16, before anything runs there.

The times are those of hardware/linear.py: each kernel at the GPU's peaks, so that shares say more than seconds do. What a step does
beside these layers is left out: `surokit.plan` has the whole step, and a race measures it.

T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import PARTS, linear_times
from surokit.recipe import BF16, Recipe

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Planned:
    """A Planned is the planned time of one layer's step: seconds of each part, by the recipe and in bfloat16.

    tokens: rows of x; of experts those of each. experts: how many matrices [N, K] there are, whose times are summed; 0 for a linear
    layer.
    """

    layer: str
    tokens: float
    shape_NK: tuple[int, int]
    experts: int
    own: dict[str, float]
    bf16: dict[str, float]
    stored: bool = False  # quantized, frozen
    changed: bool = True  # by the recipe

    @property
    def seconds(self) -> float:
        return sum(self.own.values())

    @property
    def seconds_bf16(self) -> float:
        return sum(self.bf16.values())

    @property
    def speed(self) -> float:
        """Return how much faster than bfloat16 the layer is; 1 is as fast."""
        return self.seconds_bf16 / self.seconds


def plan_layer(
    name: str,
    recipe: Recipe | None,
    shape_NK: tuple[int, int],
    tokens: float,
    *,
    trains: bool,
    stored: bool,
    gpu: Gpu,
    experts: int = 0,
) -> Planned:
    """Return the planned time of a layer that computes by `recipe` (None: in bfloat16) and reads `tokens` rows, of each expert
    where there are some.

    trains: whether its weight does. stored: whether the weight is held as the recipe stores it.
    """
    (n, k), times = shape_NK, max(experts, 1)
    own = linear_times(recipe, n, k, tokens, trains=trains, gpu=gpu, stored=stored)
    bf16 = linear_times(BF16, n, k, tokens, trains=trains, gpu=gpu)
    own, bf16 = ({part: seconds * times for part, seconds in one.items()} for one in (own, bf16))
    return Planned(name, tokens, shape_NK, experts, own, bf16, stored, recipe is not None)


@dataclass(frozen=True)
class PlannedSpeed:
    """A PlannedSpeed has the planned times of a model's layers on one GPU. It prints as its verdict; `.frame()` has every row."""

    gpu: str
    tokens: int
    rows: tuple[Planned, ...]
    left_out: tuple[str, ...] = ()  # layers whose tokens are not known

    @property
    def speed(self) -> float:
        """Return how much faster than in bfloat16 the layers are together."""
        own, bf16 = (sum(times) for times in zip(*((row.seconds, row.seconds_bf16) for row in self.rows)))
        return bf16 / own

    @property
    def slower(self) -> tuple[Planned, ...]:
        """Return the layers that are slower than in bfloat16."""
        return tuple(row for row in self.rows if row.changed and row.speed < 1)

    @property
    def verdict(self) -> str:
        """Return one sentence: how much faster the layers are planned to be, and what to do about those that are not."""
        own, bf16 = (1e3 * sum(times) for times in zip(*((row.seconds, row.seconds_bf16) for row in self.rows)))
        said = (
            f"planned on {self.gpu} for {self.tokens:,} tokens: {self.speed:.2f} x the speed of bf16 in its linear layers "
            f"({own:.2f} ms instead of {bf16:.2f})"
        )
        if self.left_out:
            said += f"; without {len(self.left_out)} weights of experts, whose share of the tokens is not known"
        if self.slower:
            changed = sum(row.changed for row in self.rows)
            only = "all" if len(self.slower) == changed else f"{len(self.slower)} of {changed}"
            said += f"; {only} lose: {self._remedy()}"
        return said

    def _remedy(self) -> str:
        if any(row.stored for row in self.slower):
            return "what decoding stored weights costs"
        if not any(row.changed and row.speed >= 1 for row in self.rows):
            return "this recipe saves no time here"
        losing = max(_least(row) for row in self.slower)
        if losing < min(_least(row) for row in self.rows if row.changed and row.speed >= 1):
            return f"recipe.keep_small({losing + 1}) keeps them in bf16"
        return f'recipe.keep_slower({self.tokens}, "{self.gpu}") keeps them in bf16'

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with a row a layer: tokens, K, N, milliseconds of each part, their sum, that of bf16, and speed."""
        import pandas as pd

        rows = []
        for row in self.rows:
            n, k = row.shape_NK
            parts = {f"{part}_ms": 1e3 * row.own[part] for part in PARTS}
            sums = {"ms": 1e3 * row.seconds, "bf16_ms": 1e3 * row.seconds_bf16, "speed": row.speed}
            rows.append({"layer": row.layer, "tokens": row.tokens, "K": k, "N": n, **parts, **sums})
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return self.verdict


def _least(row: Planned) -> int:
    return min(row.shape_NK)
