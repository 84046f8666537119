"""Time and money: exact arithmetic on what the user gives, and a bound from the peaks where a rate is not given.

    time = FLOPs / (GPUs x rate x goodput)      cost = GPU hours x price

Sums are done in rational numbers and rounded once, so that round inputs give round results. No rate and no price is
assumed: without one, the time is only bounded from below, each product at its own format's dense peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from surokit.planner.flops import Compute, Kinds
from surokit.planner.hardware import Gpu


def exact(value: float) -> Fraction:
    """The decimal number that was typed, so that 0.4 is four tenths."""
    return Fraction(repr(float(value)))


@dataclass(frozen=True)
class Time:
    """Predicted time; a figure that cannot be known from what was given is None.

    `rate_tflops` are model TFLOPS of one GPU, `rate_how` says where it comes from, `mfu` is its share of `peak_tflops`
    (`peak` names it) and `hfu` the share with recompute. `floor_*` are lower bounds: no run is faster than `floor_how`.
    """

    rate_tflops: float | None = None
    rate_how: str = ""
    peak: str = ""
    peak_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    goodput: float = 1.0
    days: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    floor_days: float | None = None
    floor_gpu_hours: float | None = None
    floor_step_ms: float | None = None
    floor_how: str = ""


@dataclass(frozen=True)
class Work:
    """What is to be computed: model FLOPs of the run and of one step over all GPUs, and the tokens of that step."""

    run: Fraction | None
    step: Fraction | None
    step_tokens: int | None
    recompute_share: float = 0.0


def count_time(
    work: Work,
    *,
    gpus: int,
    gpu: Gpu | None,
    tflops_per_gpu: float | None,
    mfu: float | None,
    goodput: float,
    usd_per_gpu_hour: float | None,
    compute: Compute | None = None,
    kinds: Kinds = (None, None, None),
) -> Time:
    """Time, GPU hours and cost of `work`.

    Without `compute`, the bound takes every FLOP at the highest peak of `kinds`.
    """
    peak_tflops, peak = gpu.peak() if gpu else (None, "")
    rate: Fraction | None = None
    how = ""
    if tflops_per_gpu is not None:
        rate, how = exact(tflops_per_gpu), "as given"
    elif mfu is not None:
        assert peak_tflops is not None, "plan() has checked it"
        rate = exact(mfu) * exact(peak_tflops)
        how = f"MFU {mfu:.1%} of {peak}, {peak_tflops:g} TFLOPS"
    share = None if rate is None or peak_tflops is None else float(rate) / peak_tflops
    hours = days = step_s = usd = None
    if rate is not None:
        flop_per_gpu_hour = rate * 10**12 * 3600 * exact(goodput)
        if work.run is not None:
            hours = work.run / flop_per_gpu_hour
            days = hours / gpus / 24
            usd = None if usd_per_gpu_hour is None else hours * exact(usd_per_gpu_hour)
        if work.step is not None:
            step_s = work.step / (rate * 10**12 * gpus)
    floor_share, floor_how = _floor(compute, gpu, kinds)
    floor_hours = floor_step = None
    if floor_share is not None:
        # hours of one GPU for one model FLOP when every product runs at its own peak
        if work.run is not None:
            floor_hours = float(work.run) * floor_share / 3600
        if work.step is not None:
            floor_step = float(work.step) * floor_share / gpus
    return Time(
        rate_tflops=None if rate is None else float(rate),
        rate_how=how,
        peak=peak,
        peak_tflops=peak_tflops,
        mfu=share,
        hfu=None if share is None else share * (1 + work.recompute_share),
        goodput=goodput,
        days=None if days is None else float(days),
        gpu_hours=None if hours is None else float(hours),
        usd=None if usd is None else float(usd),
        step_ms=None if step_s is None else float(step_s * 1000),
        tokens_per_s=None if step_s is None or work.step_tokens is None else float(work.step_tokens / step_s),
        floor_days=None if floor_hours is None else floor_hours / gpus / 24,
        floor_gpu_hours=floor_hours,
        floor_step_ms=None if floor_step is None else floor_step * 1000,
        floor_how=floor_how,
    )


def _floor(compute: Compute | None, gpu: Gpu | None, kinds: Kinds) -> tuple[float | None, str]:
    """(GPU seconds a model FLOP, in words) with every product at its own dense peak: nothing is faster than that."""
    if gpu is None or gpu.bf16_tflops is None:
        return None, ""
    if compute is None:
        tflops, name = max((gpu.peak(kind) for kind in kinds), key=lambda peak: peak[0] or 0.0)
        assert tflops is not None
        return 1 / (tflops * 1e12), f"100 % of {name}, {tflops:g} TFLOPS"
    seconds = 0.0
    names: dict[str, None] = {}
    for product in compute.products:
        for flop, kind in zip(
            (product.forward + product.recompute, product.grad_input, product.grad_weight), product.kinds
        ):
            tflops, name = gpu.peak(kind)
            assert tflops is not None
            seconds += flop / (tflops * 1e12)
            if flop:
                names[f"{name}, {tflops:g}"] = None
    return seconds / compute.model, "100 % of " + " and ".join(names) + " TFLOPS"
