"""What watching costs: the time that the live panel and the records take, as a share of the run they follow.

A difference between two runs would drown in their noise, so the work itself is timed: every call of the panel (drawing
included, shown nowhere) and of the records (file included) while a small decoder trains. The widget needs a kernel: there the
same run goes on in one of its own, where every message is packed, signed and sent, and no tab is open.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from surokit.widgets.panel import View
    from surokit.widgets.state import PanelState

SHAPE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "vocab": 2048, "ffn": 704}
BATCH, LENGTH = 8, 256


def run(steps: int) -> dict[str, Any]:
    """Train for so many steps with each view and return shares of the wall time, the time of a step, settings and environment."""
    from surokit.environment import environment

    svg, widget = measure(steps, "svg"), _in_a_kernel(steps)
    return {
        "benchmark": "watching: live panel and records",
        "settings": {**SHAPE, "batch": f"{BATCH} x {LENGTH}", "steps": steps},
        "environment": environment(),
        "step_ms": svg["step_ms"],
        "shares": {"panel": svg["panel"], "widget": widget["panel"], "records": svg["records"]},
        "pictures_per_s": {"panel": svg["pictures_per_s"], "widget": widget["pictures_per_s"]},
    }


def measure(steps: int, shown: Literal["svg", "widget"]) -> dict[str, float]:
    """One run: the shares of panel and records, pictures a second, ms a step."""
    import torch

    import surokit as sk
    from surokit.widgets.front import WidgetView
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
        view = _Counted(SvgView(display=lambda *args, **kwargs: _Handle()) if shown == "svg" else WidgetView())
        panel = Panel(PanelState(total=steps), view=view)
        for owner, names, key in (
            (panel, ("on_step", "on_end"), "panel"),
            (session.records, ("append", "flush"), "records"),
        ):
            for name in names:
                setattr(owner, name, _timed(getattr(owner, name), seconds, key))
        session.subscribe(panel)
        panel.open()
        start = time.perf_counter()
        session.run(steps)
        wall_s = time.perf_counter() - start
    shares = {key: value / wall_s for key, value in seconds.items()}
    return {**shares, "step_ms": wall_s / steps * 1e3, "pictures_per_s": view.pictures / wall_s}


def _in_a_kernel(steps: int) -> dict[str, float]:
    """`measure(steps, "widget")` in a notebook kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    source = f"import json\nfrom surokit.bench.watching import measure\nprint(json.dumps(measure({steps}, 'widget')))"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(book, timeout=None, kernel_name="python3").execute()
    (text,) = (output.text for output in book.cells[0].outputs if output.get("name") == "stdout")
    return json.loads(text)


def table(data: Mapping[str, Any]) -> str:
    """One line a part."""
    rates = data["pictures_per_s"]
    shares = "\n".join(
        f"{name:8} {share:.3%} of the run" + (f", {rates[name]:.1f} pictures a second" if name in rates else "")
        for name, share in data["shares"].items()
    )
    return f"{shares}\n{data['step_ms']:.1f} ms a step, {data['settings']['steps']} steps"


class _Counted:
    """A view that counts its pictures."""

    def __init__(self, view: View) -> None:
        self.every_s, self.pictures, self._view = view.every_s, 0, view

    def show(self, states: Mapping[str, PanelState], final: bool) -> None:
        self.pictures += 1
        self._view.show(states, final)


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
