"""What watching costs: the time that the live panel and the records take, as a share of the run they follow.

A difference between two runs would drown in their noise, so the work itself is timed: every call of the panel (drawing
included, shown nowhere) and of the records (file included) while a small decoder trains.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "vocab": 2048, "ffn": 704}
BATCH, LENGTH = 8, 256


def run(steps: int) -> dict[str, Any]:
    """Train for so many steps and return shares of the wall time, the time of a step, settings and environment."""
    import torch

    import surokit as sk
    from surokit.environment import environment
    from surokit.widgets.panel import Panel, SvgView
    from surokit.widgets.state import PanelState

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = sk.Decoder(sk.DecoderConfig(**SHAPE)).to(device, torch.bfloat16)
    ids = torch.randint(SHAPE["vocab"], (BATCH, LENGTH))
    seconds = {"panel": 0.0, "records": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        data = [{"input_ids": ids, "labels": ids}]
        session = sk.Session(model, data, schedule=None, run_dir=Path(folder) / "run", compile=False)
        panel = Panel(PanelState(total=steps), view=SvgView(display=lambda *args, **kwargs: _Handle()))
        for owner, names, key in (
            (panel, ("on_step", "on_end"), "panel"),
            (session.records, ("append", "flush"), "records"),
        ):
            for name in names:
                setattr(owner, name, _timed(getattr(owner, name), seconds, key))
        session.subscribe(panel)
        start = time.perf_counter()
        session.run(steps)
        wall_s = time.perf_counter() - start
    return {
        "benchmark": "watching: live panel and records",
        "settings": {**SHAPE, "batch": f"{BATCH} x {LENGTH}", "steps": steps},
        "environment": environment(),
        "step_ms": wall_s / steps * 1e3,
        "shares": {key: value / wall_s for key, value in seconds.items()},
    }


def table(data: Mapping[str, Any]) -> str:
    """One line a part."""
    shares = "\n".join(f"{name:8} {share:.3%} of the run" for name, share in data["shares"].items())
    return f"{shares}\n{data['step_ms']:.1f} ms a step, {data['settings']['steps']} steps"


class _Handle:
    def update(self, *args: Any, **kwargs: Any) -> None:
        """A picture that nobody looks at."""


def _timed(call: Callable[..., Any], seconds: dict[str, float], key: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[key] += time.perf_counter() - start

    return timed
