"""Measure what measuring costs a training loop: interleaved A/B on the CPU, with a second plain loop (A/A) as the measure
of the noise.

The ways take turns in a new random order each round, a turn is some steps of the same loop on the same model, and each turn
is compared with the plain turn of its own round. Sampled windows are paid for once in 200 steps, so a turn with one window
in it is scaled to that distance. Beside this stands the one cost that can be timed alone: a mark of the monitor, in
microseconds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

SHAPE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "vocab": 2048, "ffn": 704}
BATCH, LENGTH = 4, 192
EVERY = 200  # steps between two sampled windows
PLAIN, CONTROL = "nothing", "nothing, again"
BARS = {"always-on": 0.005, "sampled windows": 0.01}
NOTES = {
    PLAIN: "the loop alone",
    CONTROL: "the noise of this measurement",
    "always-on": "Monitor(every=None): each step's clock, NVML where there is a GPU",
    "sampled windows": f"Monitor(every={EVERY}): a turn with one window of 2 steps, scaled to {EVERY} steps",
    "sk.profile": "while it records; start and stop are apart",
    "torch.profiler": "CPU activities, while it records; start and stop are apart",
}


def run(rounds: int, steps: int, shape: Mapping[str, Any] = SHAPE, length: int = LENGTH) -> dict[str, Any]:
    """Let the ways take turns and return the raw result. Raises ValueError for fewer than 2 rounds or other than 3 to 12
    steps a turn."""
    if rounds < 2 or not 3 <= steps <= 12:
        raise ValueError(f"overhead needs at least 2 rounds and 3 to 12 steps a turn, not {rounds} and {steps}.")
    from surokit.environment import environment

    step = _loop(shape, length)
    for _ in range(3):
        step()
    ways = _ways(steps)
    turns: dict[str, list[float]] = {name: [] for name in ways}
    around: dict[str, list[float]] = {name: [] for name in ways}
    order, dice = list(ways), random.Random(0)
    for number in range(-1, rounds):  # round -1 pays for what is built on first use
        dice.shuffle(order)
        for name in order:
            began = time.perf_counter()
            with ways[name]():
                inside = time.perf_counter()
                for _ in range(steps):
                    step()
                took = time.perf_counter() - inside
            if number >= 0:
                turns[name].append(took * 1e3)
                around[name].append((time.perf_counter() - began - took) * 1e3)
        print(f"turn {number + 1} of {rounds}", file=sys.stderr)
    step_ms = statistics.median(turns[PLAIN]) / steps
    return {
        "benchmark": "overhead: a training step on the CPU",
        "settings": {**shape, "batch": f"{BATCH} x {length}", "turns": f"{rounds} of {steps} steps"},
        "environment": environment(),
        "step_ms": step_ms,
        "mark_us": _mark_us(),
        "overhead": [row_of(name, turns, around[name], steps) for name in ways],
    }


def row_of(name: str, turns: Mapping[str, Sequence[float]], around: Sequence[float], steps: int) -> dict[str, Any]:
    scale = steps / EVERY if name == "sampled windows" else 1.0
    shares = [scale * (own / plain - 1) for own, plain in zip(turns[name], turns[PLAIN])]
    low, high = interval(shares)
    return {
        "name": name,
        "overhead": statistics.median(shares),
        "low": low,
        "high": high,
        "bar": BARS.get(name),
        "start_stop_ms": statistics.median(around),
        "turns_ms": [round(t, 3) for t in turns[name]],
        "note": NOTES[name],
    }


def interval(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median."""
    import numpy as np

    from surokit.statistics import drawn_again, percentile_interval

    return percentile_interval(drawn_again(values, lambda samples: np.median(samples, axis=1), resamples=draws))


def table(data: Mapping[str, Any]) -> str:
    """Make a row a way: its overhead with the interval, the bar that it is compared with, and the time of start and stop."""
    head = ["measured by", "overhead of a step (median, 95 %)", "bar", "start and stop ms", "note"]
    rows = []
    for way in data["overhead"]:
        share = f"{way['overhead']:+.2%} ({way['low']:+.2%} to {way['high']:+.2%})"
        bar = f"< {way['bar']:.1%}" if way["bar"] is not None else ""
        rows.append(
            [way["name"], "" if way["name"] == PLAIN else share, bar, f"{way['start_stop_ms']:.1f}", way["note"]]
        )
    from surokit.bench.result import markdown

    mark = f"A step takes {data['step_ms']:.1f} ms; a mark of the monitor, timed alone, {data['mark_us']:.1f} us"
    share = data["mark_us"] / data["step_ms"] / 1e3
    return f"{markdown(data, head, rows)}\n\n{mark} ({share:.3%} of the step)."


def _ways(steps: int) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    import torch

    from surokit.profiler import profile
    from surokit.profiler.monitoring.monitor import Monitor
    from surokit.profiler.record.tracer import new_trace, start, without_chatter

    class Torch:
        """A Torch runs torch.profiler without the lines that it prints when it starts and stops."""

        def __enter__(self) -> None:
            self.tracer = new_trace([torch.profiler.ProfilerActivity.CPU])
            start(self.tracer)

        def __exit__(self, *error: object) -> None:
            with without_chatter():
                self.tracer.stop()

    return {
        PLAIN: nullcontext,
        CONTROL: nullcontext,
        "always-on": lambda: Monitor(every=None),
        "sampled windows": lambda: Monitor(every=steps),  # one window, of the turn's last 2 steps
        "sk.profile": lambda: profile(steps=steps + 1, warmup=0),  # one more, so that it ends behind the turn
        "torch.profiler": Torch,
    }


def _loop(shape: Mapping[str, Any], length: int) -> Callable[[], None]:
    """Return a step of a loop that is not surokit's: forward, backward, torch's AdamW."""
    import torch

    import surokit as sk

    torch.manual_seed(0)
    model = sk.Decoder(sk.DecoderConfig(**shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(shape["vocab"], (BATCH, length))

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _mark_us(marks: int = 5000) -> float:
    """Return the microseconds of `Monitor.step`, the median of five loops."""
    from surokit.profiler.monitoring.monitor import Monitor

    found = []
    for _ in range(5):
        with Monitor(tokens=1, every=None) as m:
            began = time.perf_counter()
            for _ in range(marks):
                m.step()
            found.append((time.perf_counter() - began) / marks * 1e6)
    return statistics.median(found)
