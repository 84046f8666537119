"""Compare the speed of one run on different numbers of GPUs: efficiency, and the loss at each doubling with its parts.

    efficiency of n       rate(n) / (n rate(1)), with the smallest number that was measured in the place of 1
    loss from n to m      1 - rate(m) / (m / n rate(n)): what m units lack of m / n times n units

The loss is divided by the time that a rank takes for a token, u = step time / tokens of a rank a step:

    loss = (u(m) - u(n)) / u(m),  u = communication that nothing hides + waiting for other ranks + computing + the rest

so each part's growth is its part of the loss. Computing that grows because a rank has fewer tokens a step (one batch divided among
more ranks) is called smaller batches; with as many tokens it belongs to the rest. A part below 0 is a gain.

Numbers of GPUs that are not there can be planned from the largest one that was measured, n: u(m) = u(n) + the plan's u(m) - the
plan's u(n). What a plan does not know (waiting for slow ranks, a busy network) is in u(n) as it was measured, and does not grow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.places import write_whole
from surokit.tables import html_table, text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from surokit.planner import Plan
    from surokit.planner.times.roofline import Estimate

FORMAT = 1


@dataclass(frozen=True)
class Rate:
    """A Rate is how fast a run was on some GPUs.

    gpus: processes, each on a GPU of its own, or on a share of a CPU. tokens_per_s: of all together, sustained. tokens_per_step: of
    all together, the mean. communication_ms, waiting_ms, computing_ms: milliseconds of a step, the mean of the ranks: communication
    that nothing hides while data moves, and while another rank is waited for, and time in which the rank computes; None where no
    profile says. planned: nobody measured it.
    """

    gpus: int
    tokens_per_s: float
    tokens_per_step: float | None = None
    communication_ms: float | None = None
    waiting_ms: float | None = None
    computing_ms: float | None = None
    planned: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 1:
            raise ValueError(f"Rate(gpus={self.gpus!r}): a whole number of at least 1.")
        if not 0 < self.tokens_per_s < math.inf:
            raise ValueError(f"Rate(tokens_per_s={self.tokens_per_s!r}): a number above 0.")

    @property
    def step_ms(self) -> float | None:
        """Return the time of a step in milliseconds."""
        return None if self.tokens_per_step is None else 1e3 * self.tokens_per_step / self.tokens_per_s

    def per_token(self, ms: float | None) -> float | None:
        """Return milliseconds of a step as microseconds of a rank for one of its tokens."""
        return None if ms is None or self.tokens_per_step is None else 1e3 * ms * self.gpus / self.tokens_per_step


@dataclass(frozen=True)
class Loss:
    """A Loss is what `to` GPUs lack of to / since times `since` GPUs, as shares of their rate; None where no profile says.

    total = communication + waiting + smaller_batches + rest.
    """

    since: int
    to: int
    total: float
    communication: float | None = None
    waiting: float | None = None
    smaller_batches: float | None = None
    rest: float | None = None


class Scaling:
    """A Scaling holds the rates of one run on different numbers of GPUs. It prints as a table and shows itself in a notebook.

    rates: one for each number, in any order. device: what they were measured on. ValueError for none, or two of one number.
    """

    def __init__(self, rates: Iterable[Rate], device: str = "") -> None:
        self.rates = tuple(sorted(rates, key=lambda rate: rate.gpus))
        self.device = device
        counts = [rate.gpus for rate in self.rates]
        if not counts or len(set(counts)) < len(counts):
            raise ValueError(f"A Scaling has one rate for each number of GPUs, and was given {counts or 'none'}.")

    @classmethod
    def of(cls, rates: Mapping[int, float], tokens_per_step: float | None = None, device: str = "") -> Scaling:
        """Make one of tokens/s by number of GPUs, as another machine or another program measured them.

        tokens_per_step: of one GPU, where it stays the same.
        """
        return cls(
            [Rate(n, r, None if tokens_per_step is None else n * tokens_per_step) for n, r in rates.items()], device
        )

    def planned(self, plan: Callable[[int], Plan], gpus: int | Sequence[int]) -> Scaling:
        """Return these rates with those that a plan expects of more GPUs, called planned.

        plan: gives the plan of the run on so many GPUs, as lambda n: surokit.plan(config, gpus=n, gpu="H100", zero=3, batch=4,
        length=4096). A rank takes as much longer for a token than on the largest number that was measured, as its plan says.
        gpus: larger numbers. ValueError for others, and for a plan without a time.
        """
        measured = [rate for rate in self.rates if not rate.planned]
        last = measured[-1]
        gpus = (gpus,) if isinstance(gpus, int) else gpus
        if not gpus or min(gpus) <= last.gpus:
            raise ValueError(
                f"planned(gpus={gpus!r}): numbers above {last.gpus}, which is the largest that was measured."
            )
        own_us, start = 1e6 * last.gpus / last.tokens_per_s, _estimated(plan, last.gpus)
        rates = []
        for n in gpus:
            found = _estimated(plan, n)
            us = own_us + _rank_us(found, n) - _rank_us(start, last.gpus)
            rates.append(Rate(n, 1e6 * n / us, found.tokens, planned=True))
        return Scaling([*measured, *rates], self.device)

    def __getitem__(self, gpus: int) -> Rate:
        for rate in self.rates:
            if rate.gpus == gpus:
                return rate
        raise KeyError(f"{gpus} GPUs were not measured; there are {', '.join(str(r.gpus) for r in self.rates)}.")

    def efficiency(self, gpus: int) -> float:
        """Return the rate of so many GPUs over as many times that of one, or of the smallest number there is in proportion."""
        first, found = self.rates[0], self[gpus]
        return found.tokens_per_s * first.gpus / (found.gpus * first.tokens_per_s)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Return the loss from each number to the next larger one: of 1, 2 and 4 at each doubling."""
        return tuple(_loss(a, b) for a, b in pairwise(self.rates))

    def frame(self) -> pd.DataFrame:
        """Return one row for each number of GPUs: gpus, tokens_per_s, efficiency, step_ms, planned, and the loss since the
        number before with its parts: loss, communication, waiting, smaller_batches, rest."""
        import pandas

        return pandas.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        losses: dict[int, Loss] = {loss.to: loss for loss in self.losses}
        rows = []
        for rate in self.rates:
            row = {
                "gpus": rate.gpus,
                "tokens_per_s": rate.tokens_per_s,
                "efficiency": self.efficiency(rate.gpus),
                "step_ms": rate.step_ms,
                "planned": rate.planned,
            }
            loss = losses.get(rate.gpus)
            row["loss"] = None if loss is None else loss.total
            row |= {part: None if loss is None else getattr(loss, part) for part in PARTS}
            rows.append(row)
        return rows

    # -- kept

    def save(self, path: str | Path) -> Path:
        """Write the rates as JSON, and return the file."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        rates = [asdict(rate) for rate in self.rates]
        write_whole(file, json.dumps({"format": FORMAT, "device": self.device, "rates": rates}, indent=1))
        return file

    @classmethod
    def load(cls, path: str | Path) -> Scaling:
        """Read what `save` wrote, on any machine. ValueError for another file."""
        try:
            found = json.loads(Path(path).read_text())
            known = {field.name for field in fields(Rate)}
            return cls(
                [Rate(**{k: v for k, v in rate.items() if k in known}) for rate in found["rates"]], found["device"]
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no rates that Scaling.save wrote ({error}).") from error

    # -- shown

    def _cells(self) -> list[list[str]]:
        cells = []
        for row in self._rows():
            step = "" if row["step_ms"] is None else three_digits(row["step_ms"])
            shares = [
                "" if row[name] is None else f"{round(row[name], 3) + 0:.1%}" for name in ("loss", *PARTS)
            ]  # no -0.0%
            gpus = f"{row['gpus']}{', planned' * row['planned']}"
            cells.append([gpus, f"{row['tokens_per_s']:,.0f}", f"{row['efficiency']:.1%}", step, *shares])
        return cells

    def _title(self) -> str:
        return f"Scaling{' on ' * bool(self.device)}{self.device}"

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(self._cells(), header=_HEADER, right=range(len(_HEADER)))}"

    def _repr_html_(self) -> str:
        return html_table(self._cells(), header=_HEADER, right=range(len(_HEADER)), title=self._title())

    def plot(self) -> Figure:
        """Draw tokens/s beside the ideal line, and the loss at each doubling by its parts."""
        from matplotlib import pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
        gpus = [rate.gpus for rate in self.rates]
        first = self.rates[0]
        ideal = [first.tokens_per_s * n / first.gpus for n in gpus]
        left.plot(gpus, ideal, "--", color="0.6", label="ideal")
        measured = [rate for rate in self.rates if not rate.planned]
        left.plot(*_points(measured), "o-", color="#0072b2", label="measured")
        if planned := [rate for rate in self.rates if rate.planned]:
            joined = [measured[-1], *planned]
            left.plot(
                *_points(joined),
                "o:",
                color="#0072b2",
                markerfacecolor="white",
                markevery=range(1, len(joined)),
                label="planned",
            )
        for rate in self.rates[1:]:
            left.annotate(
                f"{self.efficiency(rate.gpus):.0%}",
                (rate.gpus, rate.tokens_per_s),
                textcoords="offset points",
                xytext=(0, -14),
                ha="center",
            )
        left.set(
            xlabel="GPUs" if "cpu" not in self.device else "processes", ylabel="tokens/s", xticks=gpus, ylim=(0, None)
        )
        left.legend(frameon=False)
        losses = self.losses
        names = [f"{loss.since} → {loss.to}" for loss in losses]
        up, down = [0.0] * len(losses), [0.0] * len(losses)
        for part, color in zip(PARTS, ("#009e73", "#d55e00", "#cc79a7", "0.6")):
            values = [100 * (getattr(loss, part) or 0.0) for loss in losses]
            if any(values):
                bottoms = [u if v >= 0 else d for v, u, d in zip(values, up, down)]
                right.bar(names, values, bottom=bottoms, color=color, label=part.replace("_", " "), width=0.6)
                up = [u + max(v, 0.0) for u, v in zip(up, values)]
                down = [d + min(v, 0.0) for d, v in zip(down, values)]
        if not any(getattr(loss, part) for loss in losses for part in PARTS):
            right.bar(names, [100 * loss.total for loss in losses], color="0.6", label="not divided", width=0.6)
        right.axhline(0, color="0.3", linewidth=0.8)
        right.set(ylabel="lost, % of the rate", xlim=(-0.8, len(losses) - 0.2))
        right.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.suptitle(self._title(), fontsize=10)
        return figure


# times a rank's tokens before, below which its batch is smaller: where lengths differ, chance makes some so
FEWER = 0.9
PARTS = ("communication", "waiting", "smaller_batches", "rest")
_HEADER = ("GPUs", "tokens/s", "efficiency", "step ms", "lost", "communication", "waiting", "smaller batches", "rest")


def _loss(since: Rate, to: Rate) -> Loss:
    total = 1 - to.tokens_per_s * since.gpus / (to.gpus * since.tokens_per_s)
    whole = to.per_token(to.step_ms)
    grown = {name: _growth(since, to, name) for name in ("communication_ms", "waiting_ms", "computing_ms")}
    if whole is None or any(growth is None for growth in grown.values()):
        return Loss(since.gpus, to.gpus, total)
    shares = {name: growth / whole for name, growth in grown.items() if growth is not None}
    assert since.tokens_per_step is not None
    assert to.tokens_per_step is not None
    fewer = to.tokens_per_step / to.gpus < FEWER * since.tokens_per_step / since.gpus
    smaller = shares["computing_ms"] if fewer else 0.0
    rest = total - shares["communication_ms"] - shares["waiting_ms"] - smaller
    return Loss(since.gpus, to.gpus, total, shares["communication_ms"], shares["waiting_ms"], smaller, rest)


def _points(rates: Sequence[Rate]) -> tuple[list[int], list[float]]:
    return [rate.gpus for rate in rates], [rate.tokens_per_s for rate in rates]


def _estimated(plan: Callable[[int], Plan], gpus: int) -> Estimate:
    found = plan(gpus)
    if found.estimate is None:
        raise ValueError(
            f"The plan for {gpus} GPUs has no time: give surokit.plan a config, a GPU of its table, batch= and length=."
        )
    return found.estimate


def _rank_us(found: Estimate, gpus: int) -> float:
    """Return the microseconds of a rank for one of its tokens, as planned."""
    return 1e3 * found.step_ms * gpus / found.tokens


def _growth(since: Rate, to: Rate, name: str) -> float | None:
    before, after = since.per_token(getattr(since, name)), to.per_token(getattr(to, name))
    return None if before is None or after is None else after - before
