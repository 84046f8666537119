"""Fit a scaling law to your own small runs, with intervals that say how far it can be trusted.

    fit = sk.fit_scaling(runs)                    runs: parameters, tokens and final loss of each
    fit.loss(1e9, 20e9)                           a predicted loss with its interval, marked where it is extrapolated
    fit.optimal(1e20)                             the parameters and tokens that make the most of a budget of FLOPs

The law is L = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, approach 3), or with one of the two
terms where only one of the numbers varies. As there, log losses are compared, and a Huber loss gives less weight to runs
that went wrong; its threshold is 1.345 robust standard deviations of the residuals unless you give one (theirs is
1e-3). `solver.py` finds the minimum, `plot.py` draws the picture.

Intervals come from fitting again to runs drawn with replacement. They say how the law would differ with other runs of
the same kind, not that the law holds beyond them, and they are a little narrow: on synthetic runs with 0.3 % noise, 90 %
intervals, of constants and of predictions, held the truth in 83 to 88 of 100 fits to nine runs and in 86 to 89 of 100
fits to 25.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surokit import arguments, units
from surokit.planner.inputs.configs import read_shape
from surokit.planner.scaling.laws import Additive, Optimum, Predicted, ScalingLaw, read_loss
from surokit.planner.scaling.plot import draw
from surokit.planner.scaling.solver import Problem, robust_scatter
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Form = Literal["auto", "both", "parameters", "tokens"]

_COLUMNS = ("parameters", "tokens", "loss")
_FEWEST = {1: 5, 2: 8}  # runs, for one term and for two: as many as constants, and two or three to tell the noise
_FEW = {1: 8, 2: 12}
_DISTINCT = {1: 4, 2: 3}  # different values of each number that varies
_SAME = 0.02  # numbers closer than this share count as one


@dataclass(frozen=True)
class Run:
    """A Run is one finished run: its parameters, the tokens it saw, and its final loss in nats a token."""

    parameters: float
    tokens: float
    loss: float
    name: str = ""

    @property
    def flops(self) -> float:
        """Return the FLOPs of the run, counted as 6 N D."""
        return 6 * self.parameters * self.tokens


def fit_scaling(
    runs: Any,
    *,
    form: Form = "auto",
    level: float = 0.9,
    huber: float | None = None,
    samples: int = 500,
    seed: int = 0,
) -> ScalingFit:
    """Fit a scaling law to finished runs.

    runs     a DataFrame or a list of dicts with the columns parameters, tokens and loss (nats a token), or a list of
             Sessions, or a dict of them by name. Of a Session, the last held-out loss counts; without any, the mean
             training loss of its last tenth. Its model's parameters are counted as a plan's: of experts, those that a
             token passes, and no adapters.
    form     "both" fits both terms, "parameters" and "tokens" one of them; "auto" those whose numbers vary
    level    probability of the intervals
    huber    threshold of the Huber loss on log losses; without it, 1.345 robust standard deviations of the residuals
    samples  runs are drawn with replacement and fitted again so many times, from `seed`

    The same runs and seed give the same fit. Raises ValueError for too few runs, numbers that do not vary or vary only
    together, and losses that do not fall; TypeError for anything that is not a run.
    """
    read, notes = _read(runs)
    level = arguments.share("level", level)
    samples = arguments.integer("samples", samples, most=100_000)
    if form not in ("auto", "both", "parameters", "tokens"):
        raise ValueError(f"form={form!r} must be 'auto', 'both', 'parameters' or 'tokens'.")
    names = _terms(read, form)
    _check_spread(read, names)

    import numpy as np

    logs = np.log([[getattr(run, name) for run in read] for name in names])
    center = logs.mean(axis=1)
    log_loss = np.log([run.loss for run in read])
    problem = Problem(logs - center[:, None], log_loss)
    best, threshold = problem.minimum(None if huber is None else arguments.number("huber", huber))
    drawn = problem.drawn(best, threshold, samples, seed)
    residuals = log_loss - problem.model(best[None])[0][0]
    scatter = robust_scatter(residuals, 1 + 2 * len(names))
    notes += _judge(read, names, best, problem, scatter)
    point = _constants(best[None], names, center)
    law = ScalingLaw(
        name=f"Fit of {len(read)} runs",
        surface=Additive(**{name: float(value[0]) for name, value in point.items()}),
        source="your runs",
        parameters=_ends(run.parameters for run in read),
        tokens=_ends(run.tokens for run in read),
    )
    constants = _constants(drawn, names, center)
    low = float(np.quantile(constants["E"], (1 - level) / 2))
    if low < 0.01 * min(run.loss for run in read):
        notes.append("the loss that stays, E, is not told apart from zero: the runs do not show the curve's end")
    return ScalingFit(law, tuple(read), level, scatter, tuple(notes), Additive(**constants))


@dataclass(frozen=True, repr=False)
class ScalingFit:
    """A ScalingFit holds a law fitted to runs, with intervals. It prints as a table, in a notebook too.

    law       the fitted law; `loss`, `optimal` and the others are its own, with intervals of probability `level`
    runs      the runs that it was fitted to
    scatter   robust standard deviation of the runs about the law, as a share of the loss: a single run differs by it, and the
              intervals of the law do not contain it
    """

    law: ScalingLaw
    runs: tuple[Run, ...]
    level: float
    scatter: float
    notes: tuple[str, ...]
    drawn: Additive = field(compare=False)

    @property
    def name(self) -> str:
        return self.law.name

    @property
    def constants(self) -> dict[str, float]:
        """Return the fitted constants by name; a term that was not fitted has none."""
        return {name: value for name, value in self.law.constants.items() if name in self._fitted}

    def interval(self, name: str) -> tuple[float, float]:
        """Return the interval of a fitted constant, (low, high). Raises ValueError for a constant that was not fitted."""
        if name not in self._fitted:
            raise ValueError(f"There is no constant {name!r} in this fit; it has {', '.join(self._fitted)}.")
        return self._interval(getattr(self.drawn, name))

    def loss(self, parameters: Any = None, tokens: float | None = None) -> Predicted:
        """Predict the loss in nats a token as `ScalingLaw.loss` does, with its interval."""
        value = self.law.loss(parameters, tokens)
        n = None if parameters is None else self.law.count(parameters)[0]
        return self._with_interval(value, self.drawn.loss(n, tokens))

    def optimal(self, flops: Any) -> Optimum:
        """Return the split of a budget with the lowest loss as `ScalingLaw.optimal` does, with intervals."""
        best = self.law.optimal(flops)
        n, d, loss = self.drawn.optimal(6 * best.parameters * best.tokens)
        return Optimum(
            best.parameters,
            best.tokens,
            self._with_interval(best.loss, loss),
            parameters_range=self._interval(n),
            tokens_range=self._interval(d),
            level=self.level,
            note=best.note,
        )

    def parameters_for(self, loss: float, tokens: float | None = None) -> Predicted:
        """Return the number of parameters that reach a loss as `ScalingLaw.parameters_for` does, with its interval."""
        value = self.law.parameters_for(loss, tokens)
        return self._with_interval(value, self._inverse(self.drawn.parameters_for, loss, tokens))

    def tokens_for(self, loss: float, parameters: Any = None) -> Predicted:
        """Return the number of tokens on which a loss is reached as `ScalingLaw.tokens_for` does, with its interval."""
        value = self.law.tokens_for(loss, parameters)
        n = None if parameters is None else self.law.count(parameters)[0]
        return self._with_interval(value, self._inverse(self.drawn.tokens_for, loss, n))

    def table(self) -> pd.DataFrame:
        """Return the constants as a DataFrame: constant, value, low, high, what."""
        return data_frame(list(self._table()))

    def runs_table(self) -> pd.DataFrame:
        """Return the runs and the law's predictions as a DataFrame: name, parameters, tokens, loss, predicted, error (a share)."""
        return data_frame(
            [
                {
                    "name": run.name,
                    "parameters": run.parameters,
                    "tokens": run.tokens,
                    "loss": run.loss,
                    "predicted": float(self.law.surface.loss(run.parameters, run.tokens)),
                    "error": run.loss / float(self.law.surface.loss(run.parameters, run.tokens)) - 1,
                }
                for run in self.runs
            ]
        )

    def plot(self) -> Figure:
        """Draw the runs and the law with its interval; where both terms were fitted, also the best loss for a budget of FLOPs.

        Returns the figure, not yet shown.
        """
        return draw(self)

    @property
    def _fitted(self) -> tuple[str, ...]:
        surface = self.law.surface
        names = ["E"]
        names += ["A", "alpha"] if surface.has_parameters else []
        return (*names, *(["B", "beta"] if surface.has_tokens else []))

    def _table(self) -> Iterator[dict[str, Any]]:
        what = {
            "E": "nats a token that no size removes",
            "A": "of the term of parameters",
            "alpha": "exponent of parameters",
            "B": "of the term of tokens",
            "beta": "exponent of tokens",
        }
        for name, value in self.constants.items():
            low, high = self.interval(name)
            yield {"constant": name, "value": value, "low": low, "high": high, "what": what[name]}
        if {"alpha", "beta"} <= set(self._fitted):
            share = self.drawn.beta / (self.drawn.alpha + self.drawn.beta)
            value = self.constants["beta"] / (self.constants["alpha"] + self.constants["beta"])
            low, high = self._interval(share)
            yield {"constant": "a", "value": value, "low": low, "high": high, "what": "best parameters grow as FLOPs^a"}

    def _interval(self, values: Any) -> tuple[float, float]:
        import numpy as np

        # By rank and not between ranks: a sample that is without limit stays so.
        ends = np.quantile(values, [(1 - self.level) / 2, (1 + self.level) / 2], method="nearest")
        return float(ends[0]), float(ends[1])

    def _with_interval(self, value: Predicted, values: Any) -> Predicted:
        low, high = self._interval(values)
        return Predicted(value, value.unit, low=low, high=high, level=self.level, note=value.note)

    def _inverse(self, of: Any, loss: float, other: float | None) -> Any:
        import numpy as np

        with np.errstate(divide="ignore", over="ignore"):
            return of(float(loss), other)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for row in self._table():
            yield row["constant"], f"{row['value']:.4g}", f"{row['low']:.4g} to {row['high']:.4g}", row["what"]

    def _footer(self) -> Iterator[str]:
        yield f"measured on {_span(self.law.parameters)} parameters and {_span(self.law.tokens)} tokens; elsewhere extrapolated"
        yield f"single runs scatter by {100 * self.scatter:.2g} % about it"
        yield from self.notes

    def _header(self) -> tuple[str, ...]:
        return ("constant", "value", f"{self.level:.0%} interval", "")

    def __repr__(self) -> str:
        table = text_table(list(self._rows()), header=self._header(), right=(1,))
        return f"{self.name}: {self.law.form}\n{table}\n" + "\n".join(f"  {line}" for line in self._footer())

    def _repr_html_(self) -> str:
        rows = [*self._rows(), *((line,) for line in self._footer())]
        return html_table(rows, header=self._header(), right=(1,), title=f"{self.name}: {self.law.form}")


# -- runs


def _read(runs: Any) -> tuple[list[Run], list[str]]:
    """Read the runs and check each number; return (the runs, notes about them)."""
    if isinstance(runs, ScalingFit):
        return list(runs.runs), []
    columns = getattr(runs, "columns", None)
    if columns is not None or (isinstance(runs, Mapping) and set(_COLUMNS) & set(runs)):
        missing = [name for name in _COLUMNS if name not in (runs if columns is None else columns)]
        if missing:
            raise ValueError(f"The runs lack {', '.join(missing)}: give a table of parameters, tokens and loss.")
        rows = zip(*(list(runs[name]) for name in _COLUMNS))
        return [_run(f"run {i}", *row) for i, row in enumerate(rows)], []
    if isinstance(runs, str | bytes) or not isinstance(runs, Iterable):
        raise TypeError(
            f"fit_scaling() cannot read a {type(runs).__name__}: give a DataFrame or a list of dicts with parameters, "
            "tokens and loss, or a list of Sessions."
        )
    named = list(runs.items()) if isinstance(runs, Mapping) else [(f"run {i}", run) for i, run in enumerate(runs)]
    found, trained = [], []
    for name, run in named:
        if isinstance(run, Run):
            found.append(_run(run.name or str(name), run.parameters, run.tokens, run.loss))
        elif isinstance(run, Mapping):
            missing = [column for column in _COLUMNS if column not in run]
            if missing:
                raise ValueError(f"{name} lacks {', '.join(missing)}: give parameters, tokens and loss of each run.")
            found.append(_run(str(run.get("name", name)), *(run[column] for column in _COLUMNS)))
        elif hasattr(run, "records") and hasattr(run, "model"):
            loss, held_out = _final_loss(str(name), run.records)
            if not held_out:
                trained.append(str(name))
            tokens = getattr(run, "tokens", None) or float(run.records.column("tokens").sum())
            found.append(Run(_parameters(run.model), float(tokens), loss, str(name)))
        else:
            raise TypeError(
                f"{name} is a {type(run).__name__}: give parameters, tokens and loss of each run, or a Session."
            )
    if trained and len(trained) < len(found):
        raise ValueError(
            f"{trained[0]} has no held-out loss and others have: the two cannot be compared, evaluate every session first."
        )
    notes = ["losses are the training loss of each run's last tenth, none was evaluated"] if trained else []
    return found, notes


def _parameters(model: Any) -> float:
    """Return N of a session's model as a law counts that of a plan: what a token passes, or all where its shape cannot be read."""
    with suppress(TypeError, ValueError):
        return float(read_shape(model)[0].active_parameters)
    return float(sum(p.numel() for p in model.parameters()))


def _run(name: str, parameters: Any, tokens: Any, loss: Any) -> Run:
    try:
        # numpy's numbers and torch's are taken as Python's
        values = [value.item() if hasattr(value, "item") else value for value in (parameters, tokens, loss)]
        if isinstance(values[2], float) and not math.isfinite(values[2]):
            raise ValueError(f"loss={values[2]} is no final loss: leave out runs that diverged.")
        return Run(arguments.parameters(values[0]), arguments.tokens(values[1]), read_loss(values[2]), name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _final_loss(name: str, records: Any) -> tuple[float, bool]:
    """Return (the final loss of a session's records, whether it is a held-out loss)."""
    import numpy as np

    for column, held_out in (("eval_loss", True), ("loss", False)):
        values = records.column(column)
        values = values[np.isfinite(values)]
        if len(values):
            return float(values[-1] if held_out else values[-max(1, len(values) // 10) :].mean()), held_out
    raise ValueError(f"{name} has no finite loss: run some steps first, and leave out runs that diverged.")


def _terms(runs: Sequence[Run], form: Form) -> tuple[str, ...]:
    if form != "auto":
        return ("parameters", "tokens") if form == "both" else (form,)
    names = tuple(name for name in ("parameters", "tokens") if _distinct(runs, name) > 1)
    if not names:
        raise ValueError(
            f"fit_scaling() got {len(runs)} run{'' if len(runs) == 1 else 's'} of the same parameters and tokens: "
            "add runs of other sizes or lengths."
        )
    return names


def _check_spread(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Raise ValueError where the runs cannot tell the constants apart, and say which runs would."""
    terms = len(names)
    needed, different = _FEWEST[terms], _DISTINCT[terms]
    if len(runs) < needed:
        what = f"each of {' and '.join(names)}" if terms == 2 else names[0]
        raise ValueError(
            f"{len(runs)} run{'' if len(runs) == 1 else 's'} cannot fix {1 + 2 * terms} constants: give at least {needed}, "
            f"with at least {different} different values of {what}."
        )
    for name in names:
        found = _distinct(runs, name)
        if found < different:
            other = "tokens" if name == "parameters" else "parameters"
            raise ValueError(
                f"The runs have {found} different value{'' if found == 1 else 's'} of {name}, and a curve needs at least "
                f"{different}: add runs with other {name}"
                + ("." if terms == 1 else f", or fit the other term alone with form={other!r}.")
            )
    if terms == 2 and _together(runs):
        ratio = math.exp(sum(math.log(run.tokens / run.parameters) for run in runs) / len(runs))
        raise ValueError(
            f"Tokens follow parameters in all runs (about {ratio:.3g} a parameter), so their effects cannot be told apart: "
            "add runs of the same size with other tokens."
        )


def _distinct(runs: Sequence[Run], name: str) -> int:
    values = sorted(getattr(run, name) for run in runs)
    return sum(1 for i, value in enumerate(values) if i == 0 or value > values[i - 1] * (1 + _SAME))


def _together(runs: Sequence[Run]) -> bool:
    """True if a straight line in logs predicts the tokens from the parameters, to a tenth of their spread."""
    import numpy as np

    n, d = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens"))
    return bool(1 - np.corrcoef(n, d)[0, 1] ** 2 < 0.1**2)


# -- the fit


def _constants(t: Array, names: Sequence[str], center: Array) -> dict[str, Any]:
    """Return E, A, alpha, B, beta, each [sets], for sets of unknowns that are relative to the center; a term that was not fitted is
    zero."""
    import numpy as np

    zero, one = np.zeros(len(t)), np.ones(len(t))
    constants = {"E": np.exp(t[:, 0]), "A": zero, "alpha": one, "B": zero, "beta": one}
    for i, name in enumerate(names):
        factor, exponent = ("A", "alpha") if name == "parameters" else ("B", "beta")
        constants[exponent] = np.exp(t[:, 2 + 2 * i])
        constants[factor] = np.exp(t[:, 1 + 2 * i] + constants[exponent] * center[i])
    return constants


def _judge(runs: Sequence[Run], names: Sequence[str], best: Array, problem: Problem, scatter: float) -> list[str]:
    """Return notes about a fit. Raises ValueError where the loss does not fall at all."""
    import numpy as np

    notes = []
    low, high = problem.bounds()
    for i, name in enumerate(names):
        share = math.exp(best[1 + 2 * i] - problem.y.mean())
        exponent = math.exp(best[2 + 2 * i])
        drop = share * (np.exp(-exponent * problem.x[i].min()) - np.exp(-exponent * problem.x[i].max()))
        if best[1 + 2 * i] <= low[1 + 2 * i] + 0.1 or drop < 1e-4:
            raise ValueError(
                f"The loss does not fall with more {name} in these runs: look for runs that were stopped early or trained "
                "with another learning rate than they need, or keep that number the same in all."
            )
        if drop < 2 * scatter:
            notes.append(f"{name} change the loss by {100 * drop:.2g} %, hardly more than single runs scatter")
        if not low[2 + 2 * i] + 0.01 < best[2 + 2 * i] < high[2 + 2 * i] - 0.01:
            notes.append(f"the exponent of {name} ran into its bound {exponent:.2g}: the runs do not fix it")
    if len(runs) < _FEW[len(names)]:
        notes.append(f"{len(runs)} runs are few: the intervals are narrower than they say")
    left_out = [name for name in ("parameters", "tokens") if name not in names and _distinct(runs, name) > 1]
    return notes + [f"{name} vary too and were left out: what they change is in the scatter" for name in left_out]


def _span(ends: tuple[float, float]) -> str:
    low, high = (units.count(end) for end in ends)
    return low if low == high else f"{low} to {high}"


def _ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return min(every), max(every)
