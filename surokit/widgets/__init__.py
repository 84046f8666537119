"""This package shows a run in a notebook while it goes on: one plain state, views of it, and figures of finished runs.

state.py         PanelState, Series, Ruler: the numbers of a run, in bounded memory
figure.py        line charts as SVG text
picture.py       one state or several as SVG, as text, as a display message
messages.py      states as small JSON messages, for a panel that a page draws itself
panel.py         Panel: subscribes to runs, shows the states through a widget, an SVG or a text view
front.py         the widget, whose script and style are in front/
follow.py        watch: the panel of runs that others train, from their folders
folder.py        one such run as its folder tells it, and the files that ask it to stop
records_tail.py  a records file, read as it grows
curves.py        plot_runs: several runs over each other; plot_errors: error against layer; with matplotlib
"""

from __future__ import annotations

from surokit.widgets.curves import plot_errors, plot_runs
from surokit.widgets.panel import Panel, SvgView, TextView
from surokit.widgets.state import PanelState

__all__ = ["Panel", "PanelState", "SvgView", "TextView", "plot_errors", "plot_runs"]
