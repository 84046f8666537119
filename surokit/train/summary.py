"""This module puts a run in one table: sustained speed with its spread and drift, goodput, what was lost, utilisation of a named
peak, cost.

The first steps (caches, allocator, compilation) are left out of every rate, and how many they are is said. The arithmetic of
sustained figures is the profiler's (profiler/monitoring/sustained.py), which has them for any loop.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from surokit.runs.smoothing import LossMean, ema_words
from surokit.tables import html_table, text_table
from surokit.train.run_info import device_name, gpus_in, light_of

if TYPE_CHECKING:
    from surokit.train.session import Session


@dataclass(frozen=True)
class Summary:
    """A Summary says what a run came to. It prints as a table, shows itself in a notebook; `as_dict()` for other uses.

    processes: how many train together, with a GPU each where there is one. Tokens and rates are of all of them, lost hours and
    dollars of all GPUs; idle shares and peak_gib are those of the process that is asked. loss: of the last step that had a
    finite one. loss_mean: the smoothed loss, as the panel shows it, an EMA over loss_mean_steps steps (smoothing.py).

    Rates are over the steps after `warmup_steps`, which took warmup_s; step_s covers what happens between steps except
    evaluations and checkpoints, which run_s includes. redone_s, a part of run_s: steps that a resume took again, because they
    were behind the last checkpoint. tokens_per_s_1s, _1min, _10min: over the last steps that together take that long, NaN in a
    shorter run. tokens_per_s_p5 ... p95: over windows of one second, or over steps in a run of fewer than 20 s (`windows` says
    which). drift: speed of the last tenth of the steps over the first tenth, less 1. idle_frac: a lower bound (see Record);
    sampled_idle_frac: the mean over the windows of surokit.activity, None without them. offload_ms: a step, that the device was
    without work for an optimizer whose state is on the host, part of the idle share; None for others.
    without_targets: of the skipped steps, those in which no label counted. goodput: step time that was neither skipped nor
    waiting for data or offload over run_s. lost_gpu_hours: run_s less the busy time of the steps that count, at
    least (of the CPU where there is no GPU); lost_usd at the price given. mfu: share of `peak`;
    None where there is no peak to name, and `peak` says why. graphs: whether steps ran as CUDA graphs, and why not; "" where there
    is no CUDA.
    """

    recipe: str
    numerics: str
    device: str
    processes: int
    steps: int
    skipped: int
    without_targets: int
    tokens: int
    warmup_steps: int
    warmup_s: float
    run_s: float
    redone_s: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_1s: float
    tokens_per_s_1min: float
    tokens_per_s_10min: float
    tokens_per_s_p5: float
    tokens_per_s_p50: float
    tokens_per_s_p95: float
    windows: str
    drift: float
    idle_frac: float
    sampled_idle_frac: float | None
    offload_ms: float | None
    goodput: float
    lost_gpu_hours: float
    lost_usd: float | None
    mfu: float | None
    peak: str
    peak_gib: float
    usd_per_1e9_tokens: float | None
    loss: float
    loss_mean: float
    loss_mean_steps: int
    eval_loss: float | None
    graphs: str

    def as_dict(self) -> dict[str, Any]:
        """Return every field as plain numbers and strings."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, str]]:
        from surokit.profiler.monitoring.sustained import rows
        from surokit.units import number, percent

        skipped = f", {self.skipped} skipped" if self.skipped else ""
        skipped += f" ({self.without_targets} without a label that counts)" if self.without_targets else ""
        redone = f", {self.redone_s:.1f} s taken again after a restart" if self.redone_s else ""
        waits = "data" if self.offload_ms is None else "data or offload"
        figures = rows(self, waits=waits, on_gpu=self.device != "cpu")
        out = [
            ("recipe", f"{self.recipe}{f' ({self.numerics})' if self.numerics else ''}"),
            ("device", self._device()),
            *([("graphs", self.graphs)] if self.graphs else []),
            ("steps", f"{self.steps}{skipped}; {number(self.tokens)} tokens"),
            ("wall", f"{self.run_s:.1f} s, of it {self.step_s:.1f} s in steps{redone}"),
            *figures[:-2],
            ("idle, at least", percent(self.idle_frac)),
            *([] if self.offload_ms is None else [("  waiting for offload", self._offload())]),
            *([] if self.sampled_idle_frac is None else [("idle, sampled", percent(self.sampled_idle_frac))]),
            *figures[-2:],
            ("MFU", f"{self.mfu:.1%} of {self.peak}" if self.mfu is not None else f"none: {self.peak}"),
            ("peak memory", f"{number(self.peak_gib)} GiB"),
        ]
        if self.usd_per_1e9_tokens is not None:
            out.append(("USD per 1e9 tokens", f"{self.usd_per_1e9_tokens:,.2f}"))
        out.append(("loss, smoothed", f"{self.loss_mean:.4f} ({ema_words(self.loss_mean_steps)})"))
        out.append(("loss, last step", f"{self.loss:.4f}"))
        if self.eval_loss is not None:
            out.append(("held-out loss, last", f"{self.eval_loss:.4f}"))
        return out

    def _device(self) -> str:
        if self.processes == 1:
            return self.device
        return f"cpu, {self.processes} processes" if self.device == "cpu" else f"{self.processes} x {self.device}"

    def _offload(self) -> str:
        from surokit.units import number, percent

        assert self.offload_ms is not None
        steps_s = self.step_s - self.warmup_s
        share = self.offload_ms * (self.steps - self.warmup_steps) / (1e3 * steps_s) if steps_s > 0 else math.nan
        return f"{number(self.offload_ms)} ms a step, {percent(share)}"

    def __repr__(self) -> str:
        return text_table(self._rows(), indent="")

    def _repr_html_(self) -> str:
        return html_table(self._rows(), title="Run")


def summarize(session: Session, usd_per_gpu_hour: float | None = None) -> Summary:
    """Sum up the steps that `session.records` holds; ValueError before the first step."""
    from surokit.profiler.monitoring.sustained import sustain

    columns = {name: session.records.column(name) for name in session.records.names}
    steps = len(columns["step"])
    if not steps:
        raise ValueError("There is nothing to sum up before the first step: call session.run(steps) first.")
    step_s = float(columns["wall_ms"].sum()) / 1e3
    offload_ms = columns.get("offload_ms", np.full(steps, np.nan))
    # where older steps have left memory, those that are there stand for all
    all_steps_s = max(session.step_s, step_s)
    held = step_s / all_steps_s if all_steps_s else 1.0
    run_s = max(session.run_s, all_steps_s) + session.redone_s
    gpus = max(gpus_in(session), 1)  # a CPU counts as one, however many processes share it
    sustained = sustain(
        columns["wall_ms"],
        columns["tokens"],
        idle_frac=columns["idle_frac"],
        skipped=columns["skipped"],
        stall_ms=columns["stall_ms"] + np.nan_to_num(offload_ms),
        run_s=held * run_s,
        usd_per_gpu_hour=usd_per_gpu_hour,
        gpus=gpus,
    )
    busy = columns.get("busy_frac", np.array([]))
    busy = busy[np.isfinite(busy)]
    offload = offload_ms[sustained.warmup_steps :]
    offload = offload[np.isfinite(offload)]
    mfu, peak = _utilisation(session, sustained.tokens_per_s / gpus)
    losses, smoothed = columns["loss"][np.isfinite(columns["loss"])], LossMean()
    for loss in losses:
        smoothed.add(float(loss))
    usd_per_s = None if usd_per_gpu_hour is None else gpus * usd_per_gpu_hour / 3600
    return Summary(
        recipe=session.recipe.name if session.recipe else "as given",
        numerics=session.numerics,
        device=device_name(session.device),
        processes=session.processes.world,
        steps=steps,
        skipped=int(np.nansum(columns["skipped"])),
        without_targets=int((columns["targets"] == 0).sum()),
        tokens=int(columns["tokens"].sum()),
        redone_s=held * session.redone_s,
        **asdict(sustained),
        sampled_idle_frac=1 - float(busy.mean()) if len(busy) else None,
        offload_ms=float(offload.mean()) if len(offload) else None,
        mfu=mfu,
        peak=peak,
        peak_gib=float(np.nanmax(columns["peak_gib"])),
        usd_per_1e9_tokens=None if usd_per_s is None else 1e9 * usd_per_s / sustained.tokens_per_s,
        loss=float(losses[-1]) if len(losses) else math.nan,
        loss_mean=smoothed.value,
        loss_mean_steps=smoothed.over_steps,
        eval_loss=session.evaluations[-1].loss if session.evaluations else None,
        graphs=str(session.graphs) if session.device.type == "cuda" else "",
    )


def _utilisation(session: Session, tokens_per_s: float) -> tuple[float | None, str]:
    """Return (model FLOPs utilisation, the peak's name), or (None, why there is none). Always against bf16, whatever the recipe.

    tokens_per_s: those of one GPU.
    """
    flops, tflops, peak = light_of(session)
    return (None if flops is None or tflops is None else tokens_per_s * flops / (tflops * 1e12)), peak
