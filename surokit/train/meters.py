"""This module takes measurements of numerics: what quantization does to each layer while it trains, and which layer goes bad first.

A meter is a function of the session, called after each update. `numerics` gives one that also looks into the step: every n-th
step it takes the operands of each quantized layer from the step's own forward and backward, quantizes a part of them once more
and holds the products against float32 (`accuracy.judge`). In between it costs nothing. It reads tensors and changes none,
draws from no random state and waits for no device: figures arrive with the step's record. So losses are bit for bit the same
with and without it.

What it costs: a sampled step computes the three products of `tokens` of its T tokens twice more, once in float32 and once
quantized, and passes over each weight about ten times. It holds `tokens` rows of every layer's x until its dy is there.

T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surokit.accuracy import Operands, judge
from surokit.kernels.ops import without_autocast
from surokit.layers import linear_layers
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import SLOTS
from surokit.recipe import ROLES, within_block
from surokit.runs.records import pinned

if TYPE_CHECKING:
    import pandas as pd

    from surokit.train.session import Session

NOT_FINITE = "not finite"
FEW = 3  # fewer layers of a kind have no median to speak of


class GemmReading(NamedTuple):
    """A GemmReading describes one product of one layer in one step. `in_force_*` are the amaxes that delayed scaling quantized by,
    NaN without it; `bad` says what is wrong, "" where nothing is."""

    layer: str
    gemm: str
    sqnr_db: float
    clipped: float
    underflow: float
    amax_a: float
    amax_b: float
    scale_spread: float
    in_force_a: float
    in_force_b: float
    bad: str = ""


@dataclass(frozen=True)
class Sample:
    """A Sample holds all products of one step in the order in which the data reaches them: forward, then the gradients from the
    last layer."""

    step: int
    rows: tuple[GemmReading, ...]

    def worst(self, n: int = 3) -> list[GemmReading]:
        """Return the rows that are bad as the data reaches them, then those furthest below the usual SQNR of their kind."""
        usual = _usual(self.rows)
        return sorted(self.rows, key=lambda row: -math.inf if row.bad else _key(row.sqnr_db) - usual[row[:2]].sqnr_db)[
            :n
        ]

    @property
    def first_bad(self) -> str:
        """Return words on the first row that is not finite, else on the first that is bad; "" where none is."""
        bad = sorted((r for r in self.rows if r.bad), key=lambda r: r.bad != NOT_FINITE)
        return f"{bad[0].layer} {bad[0].gemm}, step {self.step:,}: {bad[0].bad}" if bad else ""

    def first_bad_after(self, before: str) -> str:
        """Return `before`, the words on what went bad earlier, or `first_bad` where there are none or only now a row is not
        finite."""
        graver = self.first_bad.endswith(NOT_FINITE) and not before.endswith(NOT_FINITE)
        return self.first_bad if graver or not before else before


@dataclass(frozen=True)
class Numerics:
    """A Numerics says what to measure and what counts as bad; see `numerics`. Session gives each run a watcher of its own."""

    every: int = 20
    layers: str = "*"
    tokens: int = 256
    below_db: float = 12.0
    clipped: float = 0.01
    underflow: float = 0.1
    keep: int = 100

    def __post_init__(self) -> None:
        for name in ("every", "tokens", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"numerics({name}={value!r}): a whole number of at least 1.")

    def attach(self) -> Watcher:
        return Watcher(self)

    def judged(self, step: int, rows: list[GemmReading]) -> Sample:
        """Judge the rows of a step: return them as a Sample that says what is wrong with each."""
        usual = _usual(rows)
        return Sample(step, tuple(row._replace(bad=self._why(row, usual[row[:2]])) for row in rows))

    def _why(self, row: GemmReading, usual: _Usual) -> str:
        if any(map(math.isnan, (row.sqnr_db, row.amax_a, row.amax_b))) or math.inf in (row.amax_a, row.amax_b):
            return NOT_FINITE
        if row.clipped > self.clipped:
            return f"{100 * row.clipped:.1f} % clipped"
        # numbers that grow past the amax in force are cut for one step, which costs some dB: `clipped` says how many
        outgrown = 0 < row.in_force_a < row.amax_a or 0 < row.in_force_b < row.amax_b
        if row.sqnr_db < usual.sqnr_db - self.below_db * usual.margin and not outgrown:
            return f"SQNR {row.sqnr_db:.1f} dB, median {usual.sqnr_db:.1f} dB"
        if row.underflow > usual.underflow + self.underflow * usual.margin:
            return f"{100 * row.underflow:.0f} % underflow, median {100 * usual.underflow:.0f} %"
        return ""


def numerics(
    every: int = 20,
    *,
    layers: str = "*",
    tokens: int = 256,
    below_db: float = 12.0,
    clipped: float = 0.01,
    underflow: float = 0.1,
    keep: int = 100,
) -> Numerics:
    """Return a meter for Session(meters=...): SQNR, clipped and underflow share, amax and scale spread of each quantized layer's
    products, every n-th step.

    layers: a pattern of their names. tokens: how many of the step's first tokens are judged; what a scale over the whole tensor
    comes from is taken over all of them. A layer is bad where more than `clipped` of its operands are cut, its SQNR is `below_db`
    under the median of its product, `underflow` more of its operands fall to zero than in the median, or something is not finite.
    The median is over the layers of its kind, all `mlp.down_proj` say; where these are fewer than three, over all layers, with
    twice the limit. keep: samples in memory.

    The figures are in `session.layers()`, the worst also in the records (worst_sqnr_db, worst_clipped, worst_underflow) and in
    the panel; `session.first_bad` names the layer that went bad first, or the first that was not finite if one was.
    """
    return Numerics(every, layers, tokens, below_db, clipped, underflow, keep)


class Watcher:
    """A Watcher is the meter of one session: `watch` goes around a step's forward and backward, a call follows the step, and
    `arrived` gives the sample once its values are there."""

    def __init__(self, value: Numerics) -> None:
        self.value = value
        self.samples: deque[Sample] = deque(maxlen=value.keep)
        self.first_bad = ""
        self.__name__ = "numerics"
        self._due = False
        self._error: Exception | None = None
        self._order: list[str] = []  # layers as forward reached them
        self._taken: dict[str, _Taken] = {}  # those whose dy is on its way
        self._figures: dict[str, dict[str, Tensor]] = {}
        self._pending: deque[tuple[int, list[tuple[str, str]], Tensor]] = deque()

    def due(self, step: int) -> bool:
        return step % self.value.every == 0

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Take the operands of the quantized layers in the block. Call it only around a step that is due."""
        self._due, self._order, self._taken, self._figures = True, [], {}, {}
        handles = [
            layer.register_forward_hook(self._hook(name, layer))
            for name, layer in linear_layers(model)
            if isinstance(layer, Linear) and layer.precision is not None and fnmatch(name, self.value.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, taken in self._taken.items():  # no gradient came
            self._try(self._judge, name, taken, None)
        self._taken = {}

    def __call__(self, session: Session) -> Mapping[str, Tensor | float]:
        if not self._due:
            return {}
        self._due = False
        if self._error is not None:
            raise self._error
        forward = [(name, "forward") for name in self._order]
        backward = [(name, gemm) for name in reversed(self._order) for gemm in ("grad_input", "grad_weight")]
        rows = [(name, gemm) for name, gemm in forward + backward if gemm in self._figures.get(name, {})]
        if not rows:
            return {}
        table = torch.stack([self._figures[name][gemm] for name, gemm in rows])
        self._pending.append((session.steps, rows, pinned(table)))
        self._figures = {}
        sqnr_db, clipped, underflow = table[:, 0], table[:, 1], table[:, 2]
        return {
            "worst_sqnr_db": sqnr_db.amin(),
            "worst_clipped": clipped.amax(),
            "worst_underflow": underflow.amax(),
        }

    def arrived(self, step: int) -> Sample | None:
        """Return the sample of `step`, whose record has arrived; None where it was not sampled."""
        while self._pending and self._pending[0][0] <= step:
            at, names, table = self._pending.popleft()
            if at < step:
                continue
            sample = self.value.judged(at, [GemmReading(*name, *row) for name, row in zip(names, table.tolist())])
            self.samples.append(sample)
            self.first_bad = sample.first_bad_after(self.first_bad)
            return sample
        return None

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = [(sample.step, *row) for sample in self.samples for row in sample.rows]
        return pd.DataFrame(rows, columns=["step", *GemmReading._fields])

    # -- inside the step

    def _hook(self, name: str, layer: Linear) -> Any:
        def forward(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            if name in self._order or not torch.is_grad_enabled():  # one part of a step; recompute comes again
                return
            self._order.append(name)
            self._try(self._take, name, layer, args, y)

        return forward

    def _take(self, name: str, layer: Linear, args: tuple[Tensor, ...], y: Tensor) -> None:
        x = args[0]
        x_TK = x.detach().flatten(0, -2)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # a copy: the layer itself may let go of x, and who owns it may change it
        self._taken[name] = _Taken(layer, x_TK[: self.value.tokens].to(dtype, copy=True), _largest(x_TK))
        if y.requires_grad:
            y.register_hook(lambda dy: self._try(self._meet, name, dy))

    def _meet(self, name: str, dy: Tensor) -> None:
        taken = self._taken.pop(name, None)
        if taken is not None:
            self._judge(name, taken, dy.detach().flatten(0, -2))

    def _try(self, work: Callable[..., None], *args: Any) -> None:
        """Do the work, but keep an error: a meter that fails must not take the step with it, and the session drops it
        afterwards."""
        if self._error is None:
            try:
                work(*args)
            except Exception as error:
                self._error = error

    @torch.no_grad()
    def _judge(self, name: str, taken: _Taken, dy_TN: Tensor | None) -> None:
        layer, precision, x_TK = taken.layer, taken.layer.precision, taken.x_TK
        assert precision is not None
        # operands of a step under autocast are cast already, and must not be cast once more
        with without_autocast(x_TK.device):
            w_NK = layer.dense_weight(x_TK.dtype).detach()
            part = None if dy_TN is None else dy_TN[: self.value.tokens].to(x_TK.dtype)
            own = {"x": taken.amax, "w": _largest(w_NK)} | ({} if dy_TN is None else {"dy": _largest(dy_TN)})
            missing = torch.full((), math.nan, device=x_TK.device)
            in_force = dict.fromkeys(own, missing)
            amaxes = dict(own)
            if precision.scales is not None:
                for role in own:
                    in_force[role] = precision.scales.in_force_S[precision.first_slot + SLOTS[role]].clone()
                    amaxes[role] = torch.where(in_force[role] > 0, in_force[role], own[role])
            figures = {}
            operands = Operands(x_TK, w_NK, part)
            for gemm, values in judge(precision.recipe, operands, stored=layer.stored, amaxes=amaxes):
                if not getattr(precision.recipe, gemm).quantized or (
                    gemm == "grad_weight" and not layer.weight.requires_grad
                ):
                    continue
                a, b = ROLES[gemm]
                tail = (own[a], own[b], values[5], in_force[a], in_force[b])
                figures[gemm] = torch.cat([values[:3], torch.stack([t.float() for t in tail])])
            self._figures[name] = figures


@dataclass(frozen=True, eq=False)
class _Taken:
    """A _Taken holds a layer's input: its first tokens, and the largest magnitude of all of it."""

    layer: Linear
    x_TK: Tensor
    amax: Tensor


def _largest(x: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(x)).abs().amax().float()


class _Usual(NamedTuple):
    """A _Usual is what a row is held against: medians over its peers, and how many times the limits it may lie off them."""

    sqnr_db: float
    underflow: float
    margin: int


def _usual(rows: Sequence[GemmReading]) -> dict[tuple[str, str], _Usual]:
    """Return what each row is held against, by layer and product. Peers are the layers of a kind in the same product: SwiGLU's
    outputs, say, hold more near zero than what a norm gives, in every block. Where a kind has few layers, all layers are peers, and
    may differ twice as much."""
    kinds: dict[tuple[str, str], list[GemmReading]] = {}
    for row in rows:
        kinds.setdefault((row.gemm, within_block(row.layer)), []).append(row)
    gemms = {gemm: _medians([row for row in rows if row.gemm == gemm]) for gemm in {row.gemm for row in rows}}
    usual: dict[tuple[str, str], _Usual] = {}
    for (gemm, _), peers in kinds.items():
        held_against = _Usual(*_medians(peers), 1) if len(peers) >= FEW else _Usual(*gemms[gemm], 2)
        usual |= {row[:2]: held_against for row in peers}
    return usual


def _medians(rows: Sequence[GemmReading]) -> tuple[float, float]:
    return median(_key(row.sqnr_db) for row in rows), median(row.underflow for row in rows)


def _key(sqnr_db: float) -> float:
    """Return an SQNR as a number that sorts and has a median: exact (inf) is best of all, NaN worst."""
    return -1e3 if math.isnan(sqnr_db) else max(-1e3, min(sqnr_db, 1e3))
