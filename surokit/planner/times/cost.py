"""Count time and cost of a run: exact arithmetic on what the user gives, and a bound from the peaks where no rate is given.

    time = FLOPs / (GPUs x rate x goodput)      cost = GPU hours x price

Sums are done in rational numbers and rounded once, so that round inputs give round results. No rate and no price is
assumed: without one, the time is only bounded from below, each product at its own format's dense peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from surokit import arguments
from surokit.formats import Kind
from surokit.hardware.gpus import Gpu
from surokit.planner.counts.flops import Compute
from surokit.planner.times.roofline import Estimate


def exact(value: float) -> Fraction:
    """Return a float as the decimal number that was typed, so that 0.4 is four tenths."""
    return Fraction(repr(float(value)))


@dataclass(frozen=True)
class Price:
    """A Price holds US dollars of one GPU hour, as a range, with the month it was seen in and where. The planner assumes none."""

    low: float
    high: float
    date: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        arguments.price(self.low)
        arguments.price(self.high)
        if self.low > self.high:
            raise ValueError(
                f"A price from {self.low:g} to {self.high:g} USD goes backwards: give the lower figure first."
            )

    @property
    def middle(self) -> float:
        return float((exact(self.low) + exact(self.high)) / 2)

    def __str__(self) -> str:
        figure = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return ", ".join(part for part in (f"{figure} USD", self.date, self.source) if part)


def read_price(value: Any) -> Price:
    """Read a Price from a number, a pair (low, high), or a Price."""
    if isinstance(value, Price):
        return value
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(f"usd_per_gpu_hour={value!r}: a range of prices is a pair, (1.8, 3.2).")
        low, high = (arguments.price(each) for each in value)
        return Price(low, high)
    return Price(arguments.price(value), arguments.price(value))


@dataclass(frozen=True)
class Goodput:
    """A Goodput holds the share of the hours that makes progress, the run's hours between failures, and minutes between
    checkpoints."""

    share: float
    mtbf_hours: float
    save_every_minutes: float


def expected_goodput(
    gpus: int,
    *,
    gpu_mtbf_hours: float,
    save_minutes: float,
    restart_minutes: float,
    save_every_minutes: float | None = None,
) -> Goodput:
    """Predict the goodput of a synchronous run that any failing GPU stops, for `plan(..., goodput=expected_goodput(...).share)`.

    gpu_mtbf_hours   mean time between failures of one GPU with its share of host and network; the run's is 1 / gpus of it
    save_minutes     time that a checkpoint holds the training up
    restart_minutes  time from a failure to the first new step
    save_every_minutes   time between checkpoints; without it sqrt(2 save MTBF), which loses least

    A failure loses half an interval and the restart. Young, CACM 17 (1974); Daly, FGCS 22 (2006). Raises ValueError where nothing
    would be left.
    """
    mtbf = arguments.number("gpu_mtbf_hours", gpu_mtbf_hours) * 60 / arguments.integer("gpus", gpus, most=1e7)
    save = arguments.number("save_minutes", save_minutes)
    restart = arguments.number("restart_minutes", restart_minutes)
    every = (2 * save * mtbf) ** 0.5 if save_every_minutes is None else save_every_minutes
    every = arguments.number("save_every_minutes", every)
    share = (1 - save / (every + save)) * (1 - (every / 2 + restart) / mtbf)
    if share <= 0:
        raise ValueError(
            f"With a failure every {mtbf:.3g} minutes nothing gets done between checkpoints of {every:.3g} minutes and "
            f"restarts of {restart:.3g}: make saving or restarting faster, or use fewer GPUs."
        )
    return Goodput(share, mtbf / 60, every)


class StepTime(NamedTuple):
    """A StepTime holds the ms of an optimizer step, and their kind: "prediction" at measured rates, "likely" by published runs,
    "optimistic" at a datasheet's rates, or "bound", every product at its dense peak."""

    ms: float
    kind: str


@dataclass(frozen=True)
class Time:
    """A Time holds the predicted time and cost of a run; a figure that does not follow from what was given is None.

    `rate_tflops` are model TFLOPS of one GPU, `rate_how` says where it comes from, `mfu` is its share of `peak_tflops`
    (`peak` names it) and `hfu` the share with recompute. `usd` is at the middle of a price's range. `floor_*` are lower
    bounds: no run is faster than `floor_how`. `waits_ms` is what offloading adds to a predicted step; None where it is not known.
    """

    rate_tflops: float | None = None
    rate_how: str = ""
    rate_kind: str = "given"
    peak: str = ""
    peak_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    goodput: float = 1.0
    days: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    usd_range: tuple[float, float] | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    floor_days: float | None = None
    floor_gpu_hours: float | None = None
    floor_step_ms: float | None = None
    floor_how: str = ""
    waits_ms: float | None = None


@dataclass(frozen=True)
class RunSpec:
    """A RunSpec holds what was said of the run: its tokens, the rate of a GPU, the goodput, and the price of a GPU hour."""

    tokens: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    goodput: float = 1.0
    price: Price | None = None

    @property
    def has_rate(self) -> bool:
        """True if a rate was given: `tflops_per_gpu` or `mfu`."""
        return self.tflops_per_gpu is not None or self.mfu is not None


@dataclass(frozen=True)
class ModelFlops:
    """A ModelFlops holds the model FLOPs of a token, of the run and of one step over all GPUs, and the tokens of that step."""

    token: Fraction
    run: Fraction | None
    step: Fraction | None
    step_tokens: int | None
    recompute_share: float = 0.0


def count_time(
    flops: ModelFlops,
    run: RunSpec,
    *,
    gpus: int,
    gpu: Gpu | None,
    compute: Compute | None = None,
    kinds: Sequence[Kind | None] = (None,),
    estimate: Estimate | None = None,
    waits_ms: float | None = None,
) -> Time:
    """Count the time, the GPU hours and the cost of `flops` in a run.

    Without a given rate, that of an `estimate` at measured rates is taken, whose step also waits for `waits_ms`; an estimate at a
    datasheet's rates is no prediction. Without `compute`, the bound takes equal shares of the FLOPs at the peaks of `kinds`.
    """
    peak_tflops, peak = gpu.peak() if gpu else (None, "")
    rate: Fraction | None = None
    how = ""
    predicted = not run.has_rate and estimate is not None and estimate.kind == "prediction"
    if run.tflops_per_gpu is not None:
        rate, how = exact(run.tflops_per_gpu), "as given"
    elif run.mfu is not None:
        assert peak_tflops is not None, "plan() has checked it"
        rate = exact(run.mfu) * exact(peak_tflops)
        how = f"MFU {run.mfu:.1%} of {peak}, {peak_tflops:g} TFLOPS"
    elif predicted and estimate is not None:
        rate, how = exact(estimate.tflops), f"predicted, {estimate.how}"
        if waits_ms:
            rate *= exact(estimate.step_ms) / exact(estimate.step_ms + waits_ms)
            how += ", with what the host adds"
    share = None if rate is None or peak_tflops is None else float(rate) / peak_tflops
    hours = days = step_s = usd = usd_range = None
    if rate is not None:
        flop_per_gpu_hour = rate * 10**12 * 3600 * exact(run.goodput)
        if flops.run is not None:
            hours = flops.run / flop_per_gpu_hour
            days = hours / gpus / 24
            if run.price is not None:
                usd = hours * exact(run.price.middle)
                usd_range = float(hours * exact(run.price.low)), float(hours * exact(run.price.high))
        if flops.step is not None:
            step_s = flops.step / (rate * 10**12 * gpus)
    floor_share, floor_how = _floor(compute, gpu, kinds)
    floor_hours = floor_step = None
    if floor_share is not None:
        # hours of one GPU for one model FLOP when every product runs at its own peak
        if flops.run is not None:
            floor_hours = float(flops.run) * floor_share / 3600
        if flops.step is not None:
            floor_step = float(flops.step) * floor_share / gpus
    return Time(
        rate_tflops=None if rate is None else float(rate),
        rate_how=how,
        rate_kind="given" if run.has_rate else "prediction",
        peak=peak,
        peak_tflops=peak_tflops,
        mfu=share,
        hfu=None if share is None else share * (1 + flops.recompute_share),
        goodput=run.goodput,
        days=None if days is None else float(days),
        gpu_hours=None if hours is None else float(hours),
        usd=None if usd is None else float(usd),
        usd_range=usd_range,
        step_ms=None if step_s is None else float(step_s * 1000),
        tokens_per_s=None if step_s is None or flops.step_tokens is None else float(flops.step_tokens / step_s),
        floor_days=None if floor_hours is None else floor_hours / gpus / 24,
        floor_gpu_hours=floor_hours,
        floor_step_ms=None if floor_step is None else floor_step * 1000,
        floor_how=floor_how,
        waits_ms=waits_ms if predicted else None,
    )


def time_in_parts(parts: Sequence[tuple[float, Time]]) -> Time:
    """Return the Time of a run from those that its parts would take over all of it, each with its share of the run.

    Hours and cost are sums; what is of a step is the first part's.
    """

    def summed(name: str) -> float | None:
        values = [getattr(time, name) for _, time in parts]
        return None if None in values else sum(share * value for (share, _), value in zip(parts, values))

    sums: dict[str, Any] = {
        name: summed(name) for name in ("days", "gpu_hours", "usd", "floor_days", "floor_gpu_hours")
    }
    ranges = [time.usd_range for _, time in parts]
    usd_range = None
    if None not in ranges:
        low, high = (sum(share * ends[i] for (share, _), ends in zip(parts, ranges) if ends) for i in (0, 1))
        usd_range = low, high
    return replace(parts[0][1], usd_range=usd_range, **sums)


def _floor(compute: Compute | None, gpu: Gpu | None, kinds: Sequence[Kind | None]) -> tuple[float | None, str]:
    """Return (GPU seconds a model FLOP, the peaks in words) with every product at its own dense peak, which nothing exceeds."""
    if gpu is None or gpu.plain_tflops is None:
        return None, ""
    # (FLOPs, kind) of each pass; without shapes all products are alike, and each pass has the same share
    passes = (
        [(1, kind) for kind in kinds]
        if compute is None
        else [each for product in compute.products for each in product.passes]
    )
    model = len(kinds) if compute is None else compute.model
    seconds = 0.0
    names: dict[str, None] = {}
    for flop, kind in passes:
        tflops, name = gpu.peak(kind)
        assert tflops is not None
        seconds += flop / (tflops * 1e12)
        if flop:
            names[f"{name}, {tflops:g}"] = None
    return seconds / model, "100 % of " + " and ".join(names) + " TFLOPS"
