"""This module holds scaling laws: they predict the loss of a number of parameters and tokens, and how best to split a budget.

Two forms are in use, with N parameters and D tokens:

    Additive    L = E + A / N^alpha + B / D^beta                            Hoffmann et al., arXiv 2203.15556, eq. 2
    Joint       L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D       Kaplan et al., arXiv 2001.08361, eq. 1.5

and three published sets of constants: `KAPLAN`, `CHINCHILLA` as printed, and `CHINCHILLA_REPLICATED`, fitted again by
Besiroglu et al. (arXiv 2404.10102) to the points of Hoffmann's own figure. Losses are in nats a token, on the text and
with the tokenizer of the paper: their differences and the split of a budget carry over to another text, the level does
not. For that, fit your own runs (`fit.py`).

A law was measured over a range of N and D. Outside of it an answer is still given, marked as extrapolated: in print, and
by `outside` and `note`. Kaplan's N leaves embeddings out, Hoffmann's counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

from surokit import arguments, units
from surokit.tables import html_table, text_table

Counts = Literal["all", "without embeddings"]
Range = tuple[float, float]

PETAFLOP_DAY = 8.64e19  # FLOPs, the unit of compute in Kaplan et al.


class Predicted(float):
    """A Predicted is a float that also has a unit, an interval and a note where it is extrapolated.

    `low` and `high` bound it with probability `level`, where the law was fitted to runs; None for a published law.
    `note` says what lies outside the measured range, and is empty inside.
    """

    unit: str
    low: float | None
    high: float | None
    level: float | None
    note: str

    def __new__(
        cls,
        value: float,
        unit: str = "",
        *,
        low: float | None = None,
        high: float | None = None,
        level: float | None = None,
        note: str = "",
    ) -> Predicted:
        new = super().__new__(cls, value)
        new.unit, new.low, new.high, new.level, new.note = unit, low, high, level, note
        return new

    @property
    def outside(self) -> bool:
        """True if the number is extrapolated: the law was not measured there."""
        return bool(self.note)

    def __repr__(self) -> str:
        words = f"{_figure(float(self), self.unit)} {self.unit}".rstrip()
        if self.low is not None and self.high is not None and self.level is not None:
            words += f", {self.level:.0%} interval {_figure(self.low, self.unit)} to {_figure(self.high, self.unit)}"
        return words + (f" (extrapolated: {self.note})" if self.note else "")

    __str__ = __repr__


class _Pair(NamedTuple):
    parameters: float
    tokens: float


class Optimum(_Pair):
    """An Optimum is the split of a budget with the lowest loss: a pair (parameters, tokens), with the loss predicted for it.

    Where the law was fitted to runs, `parameters_range` and `tokens_range` are intervals with probability `level`.
    """

    loss: Predicted
    parameters_range: Range | None
    tokens_range: Range | None
    level: float | None
    note: str

    def __new__(
        cls,
        parameters: float,
        tokens: float,
        loss: float = math.nan,
        *,
        parameters_range: Range | None = None,
        tokens_range: Range | None = None,
        level: float | None = None,
        note: str = "",
    ) -> Optimum:
        new = super().__new__(cls, parameters, tokens)
        new.loss = loss if isinstance(loss, Predicted) else Predicted(loss, _LOSS)
        new.parameters_range, new.tokens_range, new.level, new.note = parameters_range, tokens_range, level, note
        return new

    @property
    def outside(self) -> bool:
        """True if the split is extrapolated: the law was not measured there."""
        return bool(self.note)

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def __repr__(self) -> str:
        words = f"{units.count(self.parameters)} parameters"
        if self.parameters_range and self.level is not None:
            words += f" ({self.level:.0%} interval {_span(self.parameters_range)})"
        words += f" on {units.count(self.tokens)} tokens, {self.tokens_per_parameter:.3g} a parameter"
        words += f", loss {float(self.loss):.4g}"
        return words + (f" (extrapolated: {self.note})" if self.note else "")

    __str__ = __repr__


@dataclass(frozen=True)
class Additive:
    """An Additive is the law L = E + A / N^alpha + B / D^beta. A or B is zero where that number did not vary.

    It does only arithmetic, so that each field may also be an array: one law a sample.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    @property
    def formula(self) -> str:
        terms = ["E"]
        terms += ["A / N^alpha"] if self.has_parameters else []
        terms += ["B / D^beta"] if self.has_tokens else []
        return "L = " + " + ".join(terms)

    @property
    def has_parameters(self) -> bool:
        return not _is_zero(self.A)

    @property
    def has_tokens(self) -> bool:
        return not _is_zero(self.B)

    def loss(self, parameters: float | None, tokens: float | None) -> float:
        """Return the loss in nats a token; None stands for parameters or tokens without limit, whose term is then zero."""
        loss = self.E
        loss = loss if parameters is None or not self.has_parameters else loss + self.A / parameters**self.alpha
        return loss if tokens is None or not self.has_tokens else loss + self.B / tokens**self.beta

    def optimal(self, flops: float) -> tuple[float, float, float]:
        """Return (parameters, tokens, loss) with the lowest loss where 6 N D = flops, by eq. 4 of arXiv 2203.15556."""
        both = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        parameters = ratio * (flops / 6) ** (self.beta / both)
        tokens = flops / 6 / parameters
        return parameters, tokens, self.loss(parameters, tokens)

    def parameters_for(self, loss: float, tokens: float | None) -> float:
        """Return the number of parameters that reaches a loss; infinite where none does."""
        return _invert((loss - self.loss(None, tokens)) / self.A, self.alpha)

    def tokens_for(self, loss: float, parameters: float | None) -> float:
        """Return the number of tokens that reaches a loss; infinite where none does."""
        return _invert((loss - self.loss(parameters, None)) / self.B, self.beta)


@dataclass(frozen=True)
class Joint:
    """A Joint is the law L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D, of training that stops before it overfits D tokens.

    With one of the two without limit, the laws count that were measured for that case alone: L = (N_c / N)^alpha_N with
    `alone_N` = (N_c, alpha_N), and `alone_D`. A budget is not split by minimizing L over 6 N D = C, since L holds for
    training to the end, many times over the data if need be. It is split by the measured frontier, with C the FLOPs in
    PF-days at a batch far below the critical one: N = `frontier_N`[0] C^`frontier_N`[1], and L = (C_c / C)^alpha_C with
    `frontier_L` = (C_c, alpha_C).
    """

    N_c: float
    alpha_N: float
    D_c: float
    alpha_D: float
    alone_N: tuple[float, float]
    alone_D: tuple[float, float]
    frontier_N: tuple[float, float]
    frontier_L: tuple[float, float]

    formula = "L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D"
    has_parameters = has_tokens = True

    def loss(self, parameters: float | None, tokens: float | None) -> float:
        """Return the loss in nats a token; None stands for parameters or tokens without limit."""
        if tokens is None:
            assert parameters is not None, "ScalingLaw.loss has checked it"
            return (self.alone_N[0] / parameters) ** self.alone_N[1]
        if parameters is None:
            return (self.alone_D[0] / tokens) ** self.alone_D[1]
        return ((self.N_c / parameters) ** (self.alpha_N / self.alpha_D) + self.D_c / tokens) ** self.alpha_D

    def optimal(self, flops: float) -> tuple[float, float, float]:
        """Return (parameters, tokens, loss) on the measured frontier; the tokens follow from 6 N D = flops."""
        days = flops / PETAFLOP_DAY
        parameters = self.frontier_N[0] * days ** self.frontier_N[1]
        return parameters, flops / 6 / parameters, (self.frontier_L[0] / days) ** self.frontier_L[1]

    def parameters_for(self, loss: float, tokens: float | None) -> float:
        """Return the number of parameters that reaches a loss; infinite where none does."""
        if tokens is None:
            return self.alone_N[0] * _invert(loss, self.alone_N[1])
        return self.N_c * _invert(loss ** (1 / self.alpha_D) - self.D_c / tokens, self.alpha_N / self.alpha_D)

    def tokens_for(self, loss: float, parameters: float | None) -> float:
        """Return the number of tokens that reaches a loss; infinite where none does."""
        if parameters is None:
            return self.alone_D[0] * _invert(loss, self.alone_D[1])
        return self.D_c * _invert(
            loss ** (1 / self.alpha_D) - (self.N_c / parameters) ** (self.alpha_N / self.alpha_D), 1.0
        )


@dataclass(frozen=True, repr=False)
class ScalingLaw:
    """A ScalingLaw is a law with its constants, their source, and the range in which they were measured.

    surface             the form and its constants
    parameters, tokens  the range of N and D that was measured
    counts              whether N counts "all" parameters or those "without embeddings"
    """

    name: str
    surface: Additive | Joint
    source: str
    parameters: Range
    tokens: Range
    counts: Counts = "all"
    notes: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Return the formula of the law as text."""
        return self.surface.formula

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of the law by name."""
        return asdict(self.surface)

    def loss(self, parameters: Any = None, tokens: float | None = None) -> Predicted:
        """Predict the loss in nats a token; parameters or tokens that are left out are without limit.

        `parameters` is a number as the law counts it (`counts`), or a Plan or a Shape, whose parameters are then counted
        so. Raises ValueError for numbers that cannot be meant.
        """
        n, note = (None, "") if parameters is None else self.count(parameters)
        d = None if tokens is None else self.count_tokens(tokens)
        if n is None and d is None:
            raise ValueError("loss() got neither parameters nor tokens: give one, or both.")
        for given, has, word in (
            (n, self.surface.has_parameters, "parameters"),
            (d, self.surface.has_tokens, "tokens"),
        ):
            other = d if word == "parameters" else n
            if given is not None and not has and other is None:
                raise ValueError(
                    f"{self.name} has no term for {word}, which its runs did not vary: give the other number."
                )
        return Predicted(self.surface.loss(n, d), _LOSS, note=_join(note, self.outside(n, d)))

    def optimal(self, flops: Any) -> Optimum:
        """Return the parameters and tokens with the lowest predicted loss where 6 N D = flops; `flops` is a number or a Plan.

        Raises ValueError where the law lacks one of the two terms.
        """
        budget = read_flops(flops)
        self._needs("parameters", "optimal")
        self._needs("tokens", "optimal")
        n, d, loss = self.surface.optimal(budget)
        note = self.outside(n, d)
        return Optimum(n, d, Predicted(loss, _LOSS, note=note), note=note)

    def parameters_for(self, loss: float, tokens: float | None = None) -> Predicted:
        """Return the number of parameters that reaches `loss` (nats a token) on so many tokens; without `tokens`, without limit.

        Raises ValueError for a loss that no number of parameters reaches.
        """
        self._needs("parameters", "parameters_for")
        target, d = read_loss(loss), None if tokens is None else self.count_tokens(tokens)
        n = self.surface.parameters_for(target, d)
        if n == math.inf:
            raise ValueError(self._unreachable(target, "parameters", d))
        return Predicted(n, "parameters", note=self.outside(n, d))

    def tokens_for(self, loss: float, parameters: Any = None) -> Predicted:
        """Return the number of tokens on which so many parameters (without limit, where not given) reach `loss` (nats a token).

        Raises ValueError for a loss that no number of tokens reaches.
        """
        self._needs("tokens", "tokens_for")
        target, (n, note) = read_loss(loss), (None, "") if parameters is None else self.count(parameters)
        d = self.surface.tokens_for(target, n)
        if d == math.inf:
            raise ValueError(self._unreachable(target, "tokens", n))
        return Predicted(d, "tokens", note=_join(note, self.outside(n, d)))

    def count(self, what: Any) -> tuple[float, str]:
        """Return (N as this law counts it, a note or "") for a number, a Plan or a Shape."""
        shape = getattr(what, "shape", what)
        if hasattr(shape, "embedding_parameters"):
            total = getattr(shape, "active_parameters", shape.parameters)
            note = (
                "" if total == shape.parameters else "the law was measured on dense models; these are active parameters"
            )
            if self.counts == "without embeddings":
                total -= shape.embedding_parameters * (1 if shape.tied else 2)
                total -= getattr(shape, "positions", 0) * shape.width  # learned ones
            return self._size(total, arguments.parameters, self.parameters), note
        if hasattr(what, "flops_per_token"):  # the plan of a number
            note = "N should leave embeddings out, and this number may not" if self.counts != "all" else ""
            what = what.parameters
            return self._size(what, arguments.parameters, self.parameters), note
        return self._size(what, arguments.parameters, self.parameters), ""

    def count_tokens(self, tokens: Any) -> float:
        """Return D as a checked number. Raises ValueError for one that cannot be meant."""
        return self._size(tokens, arguments.tokens, self.tokens)

    @staticmethod
    def _size(value: Any, check: Callable[[Any], float], measured: Range) -> float:
        """Return the value as a number; one in the measured range is taken, however small, any other is checked for its unit."""
        size = float(value) if isinstance(value, Real) else 0.0
        return size if measured[0] <= size <= measured[1] else check(value)

    def outside(self, parameters: float | None, tokens: float | None) -> str:
        """Say which of the numbers lie outside the measured range; "" where none does."""
        parts = []
        for value, (low, high), word in ((parameters, self.parameters, "parameters"), (tokens, self.tokens, "tokens")):
            if value is None:
                # Kaplan measured the limits themselves: alone_N, alone_D
                if isinstance(self.surface, Additive) and getattr(self.surface, f"has_{word}"):
                    parts.append(f"no run had {word} without limit")
            # A little room, for a range's own end that was computed.
            elif not low * (1 - 1e-6) <= value <= high * (1 + 1e-6):
                side = "above" if value > high else "below"
                span = _span((low, high)) if low < high else units.count(low)
                parts.append(f"{units.count(value, 3)} {word} lie {side} the measured {span}")
        return _join(*parts)

    def _needs(self, term: str, method: str) -> None:
        if not getattr(self.surface, f"has_{term}"):
            raise ValueError(
                f"{method}() needs runs in which {term} vary, and {self.name} has no term for them: "
                f"add runs with other {term} and fit again."
            )

    def _unreachable(self, loss: float, word: str, other: float | None) -> str:
        others = "tokens" if word == "parameters" else "parameters"
        if other is None:
            least = float(getattr(self.surface, "E", 0.0))
            return f"{self.name} never reaches a loss of {loss:.4g}, its limit is {least:.4g}: ask for a higher one."
        pair = (None, other) if word == "parameters" else (other, None)
        least = float(self.surface.loss(*pair))
        return (
            f"{self.name} reaches no loss of {loss:.4g} with {units.count(other)} {others}, however many {word} there are "
            f"(the limit is {least:.4g}): give more {others} or ask for a higher loss."
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "form", self.form
        for name, value in self.constants.items():
            yield name, " and ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}"
        yield (
            "N",
            f"{self.counts} parameters, {_span(self.parameters)}".replace("without embeddings parameters", _KAPLAN_N),
        )
        yield "D", f"{_span(self.tokens)} tokens"
        yield "source", self.source
        for note in self.notes:
            yield "note", note

    def __repr__(self) -> str:
        return f"{self.name}\n{text_table(list(self._rows()))}"

    def _repr_html_(self) -> str:
        return html_table(list(self._rows()), title=self.name)


_LOSS = "nats a token"
_KAPLAN_N = "parameters without embeddings"

KAPLAN = ScalingLaw(
    name="Kaplan et al.",
    # Table 2 for both together, eq. 1.1 and 1.2 for one alone, Table 6 and eq. 1.3 for the frontier.
    surface=Joint(
        N_c=6.4e13,
        alpha_N=0.076,
        D_c=1.8e13,
        alpha_D=0.103,
        alone_N=(8.8e13, 0.076),
        alone_D=(5.4e13, 0.095),
        frontier_N=(1.3e9, 0.73),
        frontier_L=(3.1e8, 0.050),
    ),
    source="arXiv 2001.08361, Tables 2 and 6; sizes and tokens in its section 3",
    parameters=(768, 1.5e9),
    tokens=(22e6, 23e9),
    counts="without embeddings",
    notes=(
        "its large models on few tokens come from the last layer's FLOPs left out, a warmup too long for small models, and "
        "an optimizer not tuned to the size (arXiv 2406.19146); put right, the split agrees with Chinchilla's",
    ),
)

CHINCHILLA = ScalingLaw(
    name="Chinchilla",
    surface=Additive(E=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28),
    source="arXiv 2203.15556, the parametric fit (approach 3) as printed; sizes and tokens in its abstract",
    parameters=(70e6, 16e9),
    tokens=(5e9, 500e9),
    notes=(
        "the printed exponents are rounded, and the split of a budget leans on them: the paper's other two approaches "
        "and the replication give about 20 tokens a parameter, these constants several times that at large budgets",
    ),
)

CHINCHILLA_REPLICATED = ScalingLaw(
    name="Chinchilla, replicated",
    surface=Additive(E=1.8172, A=482.01, alpha=0.3478, B=2085.43, beta=0.3658),
    source="arXiv 2404.10102: fitted again to 240 points read from Figure 4 of arXiv 2203.15556",
    parameters=(70e6, 16e9),
    tokens=(5e9, 500e9),
    notes=("standard errors: E 0.03, A 124.58, alpha 0.02, B 1293.23, beta 0.02",),
)


def read_flops(what: Any) -> float:
    """Read the FLOPs of a budget: a number, or those of a Plan. Raises ValueError for a number that cannot be meant."""
    if hasattr(what, "flops_per_token"):
        if what.flops is None:
            raise ValueError("The plan has no FLOPs to split: plan with tokens=, or give the FLOPs.")
        what = what.flops
    flops = arguments.number("flops", what)
    if flops < 6e7:
        raise ValueError(f"flops={flops:.12g} is no training run: the unit is FLOP, a PF-day is 8.64e19.")
    if flops > 1e32:
        raise ValueError(f"flops={flops:.12g} is beyond any training run: the unit is FLOP, a PF-day is 8.64e19.")
    return flops


def read_loss(value: Any) -> float:
    """Read a loss in nats a token. Raises ValueError for one that looks like a perplexity."""
    loss = arguments.number("loss", value)
    if loss > 20:
        hint = f": did you mean {math.log(loss):.4g}, the logarithm of a perplexity of {loss:.12g}?"
        raise ValueError(f"loss={loss:.12g} is no loss in nats a token{hint}")
    return loss


def _invert(room: Any, exponent: Any) -> Any:
    """Return x with x^-exponent = room, infinite where room is not above zero; room may be an array."""
    if hasattr(room, "clip"):
        return room.clip(0) ** (-1 / exponent)
    try:
        return room ** (-1 / exponent) if room > 0 else math.inf
    except OverflowError:
        return math.inf


def _is_zero(value: Any) -> bool:
    """True if a value is zero, or an array of zeros; an array has zeros alone or none."""
    return not (value.any() if hasattr(value, "any") else value)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _span(ends: Range) -> str:
    return f"{_figure(ends[0], 'parameters')} to {_figure(ends[1], 'parameters')}"


def _figure(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "without limit"
    return units.count(value) if unit in ("parameters", "tokens") else f"{value:.4g}"
