"""Measure what watching costs: the time that the live panel and the records take, as a share of the run they follow.

A difference between two runs drowns in their noise, so the work itself is timed: every call of the panel (drawing included,
shown nowhere) and of the records (file included) while a small decoder trains. The widget needs a kernel: there the same
run goes on in one of its own, where every message is packed, signed and sent, and no tab is open. In that kernel turns with
the panel and turns without it alternate as well: their ratio shows the whole cost of a step, as well as noise lets it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surokit.bench.result import markdown
from surokit.statistics import bootstrap_interval

if TYPE_CHECKING:
    from surokit.train import Record, Session
    from surokit.widgets.panel import Panel, View
    from surokit.widgets.state import PanelState

SHAPE: dict[str, Any] = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "vocab": 1024, "ffn": 352}
BATCH, LENGTH = 4, 128
TURN = 10  # steps


def run(steps: int) -> dict[str, Any]:
    """Train for so many steps with each view and return shares of the wall time, the time of a step, settings and environment."""
    from surokit.environment import environment

    svg = measure(steps, "svg")
    widget, ratios = _in_a_kernel(f"measure({steps}, 'widget'), beside({max(2, steps // TURN)})")
    return {
        "benchmark": "watching: live panel and records",
        "settings": {**SHAPE, "batch": f"{BATCH} x {LENGTH}", "steps": steps, "steps a turn": TURN},
        "environment": environment(),
        "step_ms": svg["step_ms"],
        "watching": {"panel": svg["panel"], "widget": widget["panel"], "records": svg["records"]},
        "pictures_per_s": {"panel": svg["pictures_per_s"], "widget": widget["pictures_per_s"]},
        "step_time_with_widget_over_without": ratios,
    }


def measure(steps: int, shown: Literal["svg", "widget"]) -> dict[str, float]:
    """Measure one run: the shares of panel and records, pictures a second, ms a step."""
    from surokit.widgets.front import WidgetView
    from surokit.widgets.panel import Panel, SvgView
    from surokit.widgets.state import PanelState

    seconds = {"panel": 0.0, "records": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        session = _session(Path(folder) / "run")
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


def beside(rounds: int) -> list[float]:
    """Return the time of TURN steps that a widget follows over that of as many that nothing does, in each round, in
    alternating order."""
    from surokit.widgets.front import WidgetView
    from surokit.widgets.panel import Panel
    from surokit.widgets.state import PanelState

    session = _session(None)
    session.run(TURN)
    switch = _Switch(Panel(PanelState(), view=WidgetView()).open())
    session.subscribe(switch)
    found = []
    for number in range(rounds):
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):
            switch.on = on
            start = time.perf_counter()
            session.run(TURN)
            seconds[on] = time.perf_counter() - start
        found.append(seconds[True] / seconds[False])
    return found


class _Switch:
    """A _Switch hands a run's steps on while it is on."""

    def __init__(self, panel: Panel) -> None:
        self.on, self._panel = False, panel

    def on_step(self, record: Record) -> None:
        if self.on:
            self._panel.on_step(record)

    def on_end(self, reason: str) -> None:
        """Ignore a turn's end."""


def _session(run_dir: Path | None) -> Session:
    import torch

    import surokit as sk

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = sk.Decoder(sk.DecoderConfig(**SHAPE)).to(device, torch.bfloat16)
    ids = torch.randint(SHAPE["vocab"], (BATCH, LENGTH))
    return sk.Session(model, [{"input_ids": ids, "labels": ids}], schedule=None, run_dir=run_dir, compile=False)


def _in_a_kernel(expression: str) -> Any:
    """Evaluate an expression of this module's in a notebook kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    source = f"import json\nfrom surokit.bench.watching import *\nprint(json.dumps(({expression})))"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(book, timeout=None, kernel_name="python3").execute()
    (text,) = (output.text for output in book.cells[0].outputs if output.get("name") == "stdout")
    return json.loads(text)


def table(data: Mapping[str, Any]) -> str:
    """Make a row a part, and state the whole cost of a step."""
    names = {"panel": "panel as SVG", "widget": "panel as widget", "records": "records, with their file"}
    rates = data["pictures_per_s"]
    rows = [
        [names[part], f"{share:.2%}", f"{rates[part]:.1f}" if part in rates else ""]
        for part, share in data["watching"].items()
    ]
    ratio = bootstrap_interval(data["step_time_with_widget_over_without"])
    return (
        f"{markdown(data, ['part', 'share of the run', 'pictures a second'], rows)}\n\n"
        f"A step of {data['step_ms']:.1f} ms; with the widget over without: {ratio}."
    )


class _Counted:
    """A _Counted is a view that counts its pictures."""

    def __init__(self, view: View) -> None:
        self.every_s, self.pictures, self._view = view.every_s, 0, view

    def show(self, states: Mapping[str, PanelState], final: bool) -> None:
        self.pictures += 1
        self._view.show(states, final)


class _Handle:
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Drop a picture, which is shown nowhere."""


def _timed(call: Callable[..., Any], seconds: dict[str, float], key: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[key] += time.perf_counter() - start

    return timed
