"""Say what a recipe made of a model: a row for each layer, and everything with weights that it left as it was."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surokit.recipe import Recipe
from surokit.speed import PlannedSpeed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerReport:
    """A LayerReport says what one linear layer got, or one weight of experts."""

    layer: str
    shape: tuple[int, ...]  # of the weight
    products: str  # recipe of the three products, or "bf16"
    storage: str  # format of a stored weight, or ""
    adapter: str  # "r=16", or ""
    why: str  # why it stayed bf16, or ""
    nbytes: int  # weight as held, scales and adapter included
    decoded: int = 0  # bytes of the decoded weight that forward keeps for backward
    planned_speed: float | None = None  # of the recipe's products, bf16 is 1; where the recipe says `keep_slower`
    again: bool = False  # its weight was stored in another way, and both roundings count
    came: str = ""  # which library had quantized the weight, and how
    taken_up: float | None = (
        None  # share of the squared quantization error that the adapter began with; where LoftQ made it
    )

    @property
    def experts(self) -> int:
        """Return how many experts the weight is of; 0 for a linear layer's."""
        return self.shape[0] if len(self.shape) == 3 else 0

    @property
    def converted(self) -> bool:
        return self.products != "bf16" or bool(self.storage)


@dataclass(frozen=True)
class LeftReport:
    """A LeftReport says of one module with weights that no recipe is applied to it, and why."""

    module: str
    kind: str  # class of the module
    why: str
    nbytes: int


@dataclass(frozen=True)
class Report:
    """A Report has one row a linear layer. It prints as a summary; `.frame()` has every row.

    left: every other module that has weights.
    """

    recipe: Recipe
    rows: tuple[LayerReport, ...]
    emulated: str  # "" where the device multiplies the formats itself, else why not
    notes: tuple[str, ...] = ()  # what else changed, and what to look out for
    left: tuple[LeftReport, ...] = ()
    nbytes: int = 0  # of all weights of the model, a shared one once
    speed: PlannedSpeed | None = None  # planned, where a GPU was named or is at hand

    @property
    def converted(self) -> int:
        return sum(row.converted for row in self.rows)

    @property
    def line(self) -> str:
        """Return one line: how many layers, native or emulated, bytes."""
        held = sum(row.nbytes for row in self.rows)
        how = f", {self.emulated}" if self.emulated else ", native" if self.recipe.quantized else ""
        kinds = {
            "linear layers": [row for row in self.rows if not row.experts],
            "weights of experts": [row for row in self.rows if row.experts],
        }
        counts = [f"{sum(r.converted for r in rows)} of {len(rows)} {kind}" for kind, rows in kinds.items() if rows]
        return f"{self.recipe.name}: {' and '.join(counts)} converted{how}; {mib(held)}"

    def frame(self) -> pd.DataFrame:
        """Return a DataFrame with the columns layer, shape, products, storage, adapter, why, bytes; planned_speed (bf16 is 1)
        where the recipe says `keep_slower`, taken_up (a share) where LoftQ initialized adapters, and came where another library had
        quantized weights.
        """
        import pandas as pd

        columns = ["layer", "shape", "products", "storage", "adapter", "why", "bytes"]
        rows = [(r.layer, r.shape, r.products, r.storage, r.adapter, r.why, r.nbytes) for r in self.rows]
        frame = pd.DataFrame(rows, columns=columns)
        if self.recipe.pays:
            frame["planned_speed"] = [r.planned_speed for r in self.rows]
        if any(r.taken_up is not None for r in self.rows):
            frame["taken_up"] = [r.taken_up for r in self.rows]
        if any(r.came for r in self.rows):
            frame["came"] = [r.came for r in self.rows]
        return frame

    def not_converted(self) -> pd.DataFrame:
        """Return a DataFrame of everything with weights that stays as it was: module, kind, why, bytes, and share of the model's
        bytes."""
        import pandas as pd

        rows = [
            (r.layer, "experts" if r.experts else "linear layer", r.why, r.nbytes) for r in self.rows if not r.converted
        ]
        rows += [(r.module, r.kind, r.why, r.nbytes) for r in self.left]
        frame = pd.DataFrame(rows, columns=["module", "kind", "why", "bytes"])
        frame["share"] = frame["bytes"] / (self.nbytes or 1)
        return frame

    def _lines(self) -> list[str]:
        lines = [self.recipe.algebra()]
        kept = _grouped((row.why, row.layer, row.nbytes) for row in self.rows if row.why)
        lines += [f"{len(n)} in bf16 ({why}): {abbreviate(n)}; {self._size(nbytes)}" for why, n, nbytes in kept]
        if self.recipe.quantized:
            left = _grouped((f"{row.kind} ({row.why})", row.module, row.nbytes) for row in self.left)
            lines += [f"{len(n)} {kind}: {abbreviate(n, 2)}; {self._size(nbytes)}" for kind, n, nbytes in left]
        speed = [self.speed.verdict] if self.speed else []
        return [*lines, *speed, *self.notes]

    def _size(self, nbytes: int) -> str:
        return f"{mib(nbytes)}, {nbytes / (self.nbytes or 1):.1%}"

    def __repr__(self) -> str:
        return "\n".join([self.line, *(f"  {line}" for line in self._lines())])

    def _repr_html_(self) -> str:
        items = "".join(f"<br><code>{html.escape(line)}</code>" for line in self._lines())
        return f"<div><b>{html.escape(self.line)}</b>{items}</div>"


def _grouped(rows: Iterable[tuple[str, str, int]]) -> list[tuple[str, list[str], int]]:
    """Return (reason, names, bytes) for each reason, the most bytes first."""
    groups: dict[str, tuple[list[str], list[int]]] = {}
    for why, name, nbytes in rows:
        names, sizes = groups.setdefault(why, ([], []))
        names.append(name)
        sizes.append(nbytes)
    return sorted(((why, names, sum(sizes)) for why, (names, sizes) in groups.items()), key=lambda group: -group[2])


def mib(nbytes: int) -> str:
    """Return bytes in MiB, or in KiB where that reads better."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 / 10 else f"{nbytes / 2**10:.1f} KiB"


def abbreviate(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
