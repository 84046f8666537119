"""This module holds published runs, by which a plan is judged: their GPU hours amount to a share of the GPUs' peak.

That share is 6 x parameters x tokens / (GPU hours x dense BF16 peak). Llama 3 and 3.1 8B lie far below the other runs; why was not
published, so no rate is taken from them. The cases are data with their sources, in published.csv.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from surokit import arguments
from surokit.hardware.gpus import find_gpu

#: Share of the dense BF16 peak at which most published training steps in 16 bits run: nine in ten of 168, from the benchmarks of
#: llm-foundry, Megatron and NVIDIA among others. Hours of a whole run come to less, since they hold more than steps.
USUAL_MFU = (0.30, 0.60)
#: Outside these no rate is taken from the hours: they hold more than one training run, or one of the figures is wrong.
PLAUSIBLE_MFU = (0.20, 0.65)


@dataclass(frozen=True)
class Case:
    """A Case is a published run; figures that were not published are None."""

    model: str
    parameters: float
    tokens: float
    gpu: str
    gpu_hours: float | None
    flop: float | None
    mfu_eff_pct: float | None
    plausible: bool | None
    note: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """A Verdict says of GPU hours what `mfu` of `peak` they imply, whether they can be one training run, and why, in a sentence."""

    mfu: float
    peak: str
    plausible: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def published() -> tuple[Case, ...]:
    """Read the published cases."""

    def figure(text: str) -> float | None:
        return float(text) if text else None

    text = files("surokit.planner.compare").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        Case(
            model=row["model"],
            parameters=float(row["parameters"]),
            tokens=float(row["tokens"]),
            gpu=row["gpu"],
            gpu_hours=figure(row["gpu_hours"]),
            flop=figure(row["flop"]),
            mfu_eff_pct=figure(row["mfu_eff_pct"]),
            plausible={"yes": True, "no": False}.get(row["plausible"]),
            note=row["note"],
            source=row["source"],
        )
        for row in csv.DictReader(io.StringIO(text))
    )


def judge_hours(parameters: float, tokens: float, gpu: Any, gpu_hours: float) -> Verdict:
    """Judge the GPU hours of a finished or announced run by the share of the peak that they imply.

    `parameters` are the active ones, `gpu` a name or a Gpu. Raises ValueError for a GPU without a known BF16 peak.
    """
    device = find_gpu(gpu)
    if device.bf16_tflops is None:
        raise ValueError(f"{device.name} has no dense BF16 peak in the table: pass a Gpu with bf16_tflops.")
    flop = 6 * arguments.parameters(parameters) * arguments.tokens(tokens)
    mfu = flop / (arguments.number("gpu_hours", gpu_hours) * 3600 * device.bf16_tflops * 1e12)
    peak = f"{device.name}'s dense BF16 peak of {device.bf16_tflops:g} TFLOPS"
    low, high = PLAUSIBLE_MFU
    if mfu < low:
        why = f"less than {low:.0%}, far below other published runs: no rate is taken from it"
    elif mfu > high:
        why = "more than any published run sustains: a figure is wrong, or the parameters are not the active ones"
    else:
        shares = [case.mfu_eff_pct for case in published() if case.plausible and case.mfu_eff_pct]
        why = f"plausible: the published runs that surokit knows lie at {min(shares):.0f}% to {max(shares):.0f}%"
    return Verdict(mfu, peak, low <= mfu <= high, f"6ND over these GPU hours is {mfu:.1%} of {peak}, {why}.")
