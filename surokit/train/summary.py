"""A run in one table: sustained speed with its spread and drift, idle share, utilisation of a named peak, cost.

The first steps (caches, allocator, compilation) are left out of every rate, and how many they are is said.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from surokit.tables import html_table, text_table

if TYPE_CHECKING:
    from surokit.train.session import Session

WARM_UP = 10  # steps, or a tenth of the run if that is less
MIN_WINDOWS = 20


@dataclass(frozen=True)
class Summary:
    """What a run came to. Prints as a table, shows itself in a notebook; `as_dict()` for other uses.

    Rates are over the steps after `warmup_steps`; step time covers what happens between steps except evaluations and
    checkpoints, which `run_s` includes. tokens_per_s_p5 ... p95: over windows of one second, or over steps in a run
    of fewer than 20 s (`windows` says which). drift: speed of the last tenth of the steps over the first tenth, less 1.
    idle_frac: a lower bound (see Record). mfu: share of `peak`; None where there is no peak to name, and `peak` says why.
    lost_gpu_hours: idle share of the step time, in hours (of the CPU where there is no GPU).
    """

    recipe: str
    numerics: str
    device: str
    steps: int
    skipped: int
    tokens: int
    warmup_steps: int
    run_s: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_p5: float
    tokens_per_s_p50: float
    tokens_per_s_p95: float
    windows: str
    drift: float
    idle_frac: float
    mfu: float | None
    peak: str
    peak_gib: float
    lost_gpu_hours: float
    usd_per_1e9_tokens: float | None
    loss: float
    eval_loss: float | None

    def as_dict(self) -> dict[str, Any]:
        """Every field; plain numbers and strings."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, str]]:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        spread = "  ".join(_number(v) for v in (self.tokens_per_s_p5, self.tokens_per_s_p50, self.tokens_per_s_p95))
        warm_up = "the first step" if self.warmup_steps == 1 else f"the first {self.warmup_steps} steps"
        drift = _percent(self.drift, "+")
        rows = [
            ("recipe", f"{self.recipe}{f' ({self.numerics})' if self.numerics else ''}"),
            ("device", self.device),
            ("steps", f"{self.steps}{skipped}; {_number(self.tokens)} tokens"),
            ("wall", f"{self.run_s:.1f} s, of it {self.step_s:.1f} s in steps"),
            ("tokens/s, sustained", f"{_number(self.tokens_per_s)}, without {warm_up}"),
            ("p5  p50  p95", f"{spread}, over {self.windows}"),
            ("drift", drift if math.isnan(self.drift) else f"{drift} from the first to the last tenth"),
            ("idle, at least", _percent(self.idle_frac)),
            ("MFU", f"{self.mfu:.1%} of {self.peak}" if self.mfu is not None else f"none: {self.peak}"),
            ("peak memory", f"{_number(self.peak_gib)} GiB"),
            ("lost hours", _number(self.lost_gpu_hours)),
        ]
        if self.usd_per_1e9_tokens is not None:
            rows.append(("USD per 1e9 tokens", f"{self.usd_per_1e9_tokens:,.2f}"))
        rows.append(("loss, last", f"{self.loss:.4f}"))
        if self.eval_loss is not None:
            rows.append(("held-out loss, last", f"{self.eval_loss:.4f}"))
        return rows

    def __repr__(self) -> str:
        return text_table(self._rows(), indent="")

    def _repr_html_(self) -> str:
        return html_table(self._rows(), title="Run")


def summarize(session: Session, usd_per_gpu_hour: float | None = None) -> Summary:
    """The summary of the steps that `session.records` holds; ValueError before the first step."""
    if usd_per_gpu_hour is not None and not 0 <= usd_per_gpu_hour < math.inf:
        raise ValueError(f"summary(usd_per_gpu_hour={usd_per_gpu_hour}): a price is a finite number >= 0.")
    columns = {name: session.records.column(name) for name in session.records.names}
    steps = len(columns["step"])
    if not steps:
        raise ValueError("There is nothing to sum up before the first step: call session.run(steps) first.")
    warm = min(WARM_UP, steps // 10) or int(steps > 1)
    wall_ms, tokens = columns["wall_ms"][warm:], columns["tokens"][warm:]
    tokens_per_s = float(tokens.sum() / wall_ms.sum() * 1e3)
    rates, windows = _rates(tokens, wall_ms)
    p5, p50, p95 = (float(p) for p in np.percentile(rates, (5, 50, 95)))
    idle = _idle(columns["idle_frac"][warm:], wall_ms)
    step_s = float(columns["wall_ms"].sum()) / 1e3
    mfu, peak = _utilisation(session, tokens_per_s)
    losses = columns["loss"][np.isfinite(columns["loss"])]
    price = None if usd_per_gpu_hour is None else usd_per_gpu_hour * 1e9 / tokens_per_s / 3600
    return Summary(
        recipe=session.recipe.name if session.recipe else "as given",
        numerics=session.numerics,
        device=device_name(session.device),
        steps=steps,
        skipped=int(np.nansum(columns["skipped"])),
        tokens=int(columns["tokens"].sum()),
        warmup_steps=warm,
        run_s=max(session.run_s, step_s),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_p5=p5,
        tokens_per_s_p50=p50,
        tokens_per_s_p95=p95,
        windows=windows,
        drift=_drift(tokens, wall_ms),
        idle_frac=idle,
        mfu=mfu,
        peak=peak,
        peak_gib=float(np.nanmax(columns["peak_gib"])),
        lost_gpu_hours=idle * step_s / 3600,
        usd_per_1e9_tokens=price,
        loss=float(losses[-1]) if len(losses) else math.nan,
        eval_loss=session.evaluations[-1].loss if session.evaluations else None,
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _number(value: float) -> str:
    if math.isnan(value):
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float, sign: str = "") -> str:
    return "not measured" if math.isnan(value) else f"{value:{sign}.1%}"


def _rates(tokens: NDArray[np.float64], wall_ms: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Tokens/s over windows of at least one second, or over steps where there would be too few."""
    ends = np.cumsum(wall_ms)
    if ends[-1] < MIN_WINDOWS * 1e3:
        return tokens / wall_ms * 1e3, "steps"
    window = (ends // 1e3).astype(int)
    last = np.append(window[1:] != window[:-1], True)
    totals, times = np.cumsum(tokens)[last], ends[last]
    return np.diff(totals, prepend=0.0) / np.diff(times, prepend=0.0) * 1e3, "windows of 1 s"


def _drift(tokens: NDArray[np.float64], wall_ms: NDArray[np.float64]) -> float:
    tenth = len(tokens) // 10
    if not tenth:
        return math.nan
    first = tokens[:tenth].sum() / wall_ms[:tenth].sum()
    last = tokens[-tenth:].sum() / wall_ms[-tenth:].sum()
    return float(last / first - 1)


def _idle(idle_frac: NDArray[np.float64], wall_ms: NDArray[np.float64]) -> float:
    known = np.isfinite(idle_frac)
    return float((idle_frac[known] * wall_ms[known]).sum() / wall_ms[known].sum()) if known.any() else math.nan


def _utilisation(session: Session, tokens_per_s: float) -> tuple[float | None, str]:
    """(model FLOPs utilisation, the peak's name), or (None, why there is none). Always against bf16, whatever the recipe."""
    if session.device.type != "cuda":
        return None, f"no peak rate is known for {session.device.type}"
    from surokit.planner import count_flops, find_gpu, read_shape

    try:
        tflops, name = find_gpu(device_name(session.device)).peak()
        shape, _ = read_shape(session.model)
    except (ValueError, TypeError, FileNotFoundError) as error:
        return None, str(error)
    if tflops is None:
        return None, f"nobody vouched for a peak of {name}"
    flops = count_flops(shape, length=session.length, recipe=session.recipe).model
    return tokens_per_s * flops / (tflops * 1e12), name
