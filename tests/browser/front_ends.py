"""Our own renderer beside plotly's FigureWidget, in a real JupyterLab: what a redraw weighs and takes, and what 100,000 steps
leave in the tab.

    python -m tests.browser.front_ends docs/measurements/front-ends.json

Each front end gets a tab of its own and the same records: 100 redraws, a thousand further steps before each, four a second. Counted
are websocket messages to the tab; the browser's own times of its main thread (Chromium's Performance domain, over all redraws) and
the heap after a collection, less the heap before the cell ran. `plotly, all points` gets every step instead of at most 1,000
points a curve, for what decimation saves. Opening is what creates the widget, its
script included: both send it over the websocket.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from surokit.bench.result import write
from surokit.environment import environment
from tests.browser.lab import Lab, Tab, browser

STEPS, REDRAWS, EVERY_S = 100_000, 100, 0.25

SETUP = f"""
import random, time
import numpy as np
from surokit.widgets import PanelState
NAMES = ("loss", "loss_mean", "held_out", "rate", "rate_sustained", "idle", "idle_mean")
def states():
    dice, state = random.Random(0), PanelState("run", total={STEPS})
    for step in range(1, {STEPS} + 1):
        state.add(step, loss=1.8 + 6 / step ** 0.3 + dice.gauss(0, 0.08), tokens=16384, seconds=0.19 + 0.02 * dice.random(),
                  idle=0.02 + 0.03 * dice.random(), held_out=2.0 if step % 500 == 0 else None)
        if step % {STEPS // REDRAWS} == 0:
            yield state
"""

OURS = f"""
from surokit.widgets.front import WidgetView
view, took, when = WidgetView(), [], time.monotonic()
for state in states():
    time.sleep(max(0.0, when - time.monotonic()))
    when, start = time.monotonic() + {EVERY_S}, time.perf_counter()
    view.show({{"run": state}}, False)
    took.append(time.perf_counter() - start)
print("ms", 1e3 * sorted(took)[len(took) // 2])
"""

PLOTLY = f"""
import plotly.graph_objects as go
from plotly.subplots import make_subplots
figure = go.FigureWidget(make_subplots(rows=2, cols=2, specs=[[{{"colspan": 2}}, None], [{{}}, {{}}]]))
for i, name in enumerate(NAMES):
    figure.add_trace(go.Scatter(name=name), row=1 if i < 3 else 2, col=1 if i < 5 else 2)
display(figure)
def curve(state, name):
    ALL
    x, y = getattr(state, name).points()
    return np.asarray(x), np.asarray(y)
took, when = [], time.monotonic()
for state in states():
    time.sleep(max(0.0, when - time.monotonic()))
    when, start = time.monotonic() + {EVERY_S}, time.perf_counter()
    with figure.batch_update():
        for trace, name in zip(figure.data, NAMES):
            trace.x, trace.y = curve(state, name)
    took.append(time.perf_counter() - start)
print("ms", 1e3 * sorted(took)[len(took) // 2])
"""
EVERY_POINT = """
    n = state.step if name != "held_out" else state.step // 500
    return np.arange(1, n + 1), every[:n]
""".strip()

FRONT_ENDS = {
    "ours": OURS,
    "plotly": PLOTLY.replace("ALL", "pass"),
    "plotly, all points": f"every = np.random.default_rng(0).normal(2, 0.1, {STEPS})\n"
    + PLOTLY.replace("ALL", EVERY_POINT),
}


def measure(name: str, cell: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        with Lab(folder) as lab, browser(folder) as context:
            lab.notebook("run", [SETUP, cell])
            tab = Tab(context, lab, "run")
            tools = context.new_cdp_session(tab.page)
            tools.send("Performance.enable")
            tab.run(0)
            tab.idle()
            tab.page.wait_for_timeout(2000)
            before, asked, messages = _seen(tools), len(tab.requests), len(tab.received)
            began = time.monotonic()
            tab.run(1)
            tab.idle(500)
            tab.page.wait_for_timeout(2000)
            after = _seen(tools)
            sent = [len(m) for m in tab.received[messages:] if _widget(m, "comm_msg")]
            largest = max(sent)
            update = sum(sent) / REDRAWS
            opening = sum(len(m) for m in tab.received[messages:] if _widget(m, "comm_open"))
            return {
                "name": name,
                "message_bytes": update,
                "largest_bytes": largest,
                "opening_bytes": opening,
                "requests": sorted(url.split("?")[0] for url in tab.requests[asked:]),
                "page_ms": 1e3 * (after["TaskDuration"] - before["TaskDuration"]) / REDRAWS,
                "script_ms": 1e3 * (after["ScriptDuration"] - before["ScriptDuration"]) / REDRAWS,
                "python_ms": float(tab.output(1).split("ms ")[1].split()[0]),
                "heap_mib": (after["heap"] - before["heap"]) / 2**20,
                "nodes": after["Nodes"] - before["Nodes"],
                "seconds": time.monotonic() - began,
                "outside": tab.outside(),
                "errors": tab.errors,
            }


def _widget(message: str | bytes, kind: str) -> bool:
    return (message.encode() if isinstance(message, str) else message)[:4096].find(f'"{kind}"'.encode()) >= 0


def _seen(tools: Any) -> dict[str, float]:
    for _ in range(3):
        tools.send("HeapProfiler.collectGarbage")
    values = {metric["name"]: metric["value"] for metric in tools.send("Performance.getMetrics")["metrics"]}
    return {**values, "heap": tools.send("Runtime.getHeapUsage")["usedSize"]}


def main(out: Path) -> None:
    from importlib.metadata import version

    names = ("jupyterlab", "ipywidgets", "anywidget", "plotly")
    write(
        {
            "benchmark": "front ends: redraws of a panel in a tab",
            "settings": {
                "steps": STEPS,
                "redraws": REDRAWS,
                "seconds between two": EVERY_S,
                **{n: version(n) for n in names},
            },
            "environment": environment(),
            "front_ends": [measure(name, cell) for name, cell in FRONT_ENDS.items()],
        },
        out,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
