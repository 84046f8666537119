"""What a notebook shows while a run goes on: one plain state, views on it, and figures of finished runs.

state.py    PanelState and Series: what is known, in bounded memory
figure.py   line charts as SVG text
panel.py    Panel: subscribes to a run, shows the state through an SVG or a text view
curves.py   plot_runs: several runs over each other; plot_errors: error against layer; with matplotlib
"""

from __future__ import annotations

from surokit.widgets.curves import plot_errors, plot_runs
from surokit.widgets.panel import Panel, SvgView, TextView
from surokit.widgets.state import PanelState

__all__ = ["Panel", "PanelState", "SvgView", "TextView", "plot_errors", "plot_runs"]
