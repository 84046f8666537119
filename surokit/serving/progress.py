"""Show a measurement while it runs: a line in a terminal, the points so far and a line in a notebook."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from surokit.environment import front_end
from surokit.serving import measures
from surokit.serving.client import Answer

_RECENT = 200  # answers of which a progress has the median
_EVERY_S = 0.5


class Progress:
    """A Progress is told by the loop that measures, and shows itself from the caller's thread, whose cell or terminal it is."""

    def __init__(self) -> None:
        self._told, self._shown, self._at = "", "", 0.0
        self._done: list[str] = []
        self._handle: Any = None
        self._written = 0
        self._in_notebook = front_end() in ("Jupyter", "VS Code", "Colab")

    def tell(self, text: str) -> None:
        """Take what is being done now."""
        self._told = text

    def tell_answers(self, name: str, requests: int, answers: Mapping[int, Answer], seconds: float) -> None:
        """Take the answers of a workload so far."""
        recent = list(answers.values())[-_RECENT:]
        whole = measures.answered(recent)
        count = len(measures.answered([*answers.values()]))
        text = f"{name}: {count:,} of {requests:,} answered, {seconds:.0f} s"
        if lost := len(answers) - count:
            text += f", {lost:,} lost"
        if whole and seconds:
            first = float(np.median(measures.ttft_ms(whole)))
            text += f"; {count / seconds:.3g} requests/s, first token after {first:.3g} ms"
        self.tell(text)

    def point(self, line: str) -> None:
        """Take the line of a workload that has been measured."""
        self._done = [*self._done, line]

    def show(self, is_last: bool = False) -> None:
        """Show what was told since the last time, at most twice a second."""
        now = time.monotonic()
        text = "\n".join([*self._done, "" if is_last else self._told])
        if text == self._shown or (now - self._at < _EVERY_S and not is_last):
            return
        self._shown, self._at = text, now
        if self._in_notebook:
            self._display(text)
        elif not sys.stderr.isatty():  # in a file, a line for each workload that is measured
            for line in self._done[self._written :]:
                print(f"surokit: {line}", file=sys.stderr, flush=True)
            self._written = len(self._done)
        elif is_last:
            print(file=sys.stderr)
        else:
            print(f"\rsurokit: {self._told:<110}", end="", file=sys.stderr, flush=True)

    def _display(self, text: str) -> None:
        from IPython.display import HTML, display

        lines = "".join(f"<div>{html.escape(line)}</div>" for line in text.splitlines())
        if self._handle is None:
            self._handle = display(HTML(lines), display_id=True)
        else:
            self._handle.update(HTML(lines))


__all__ = ["Progress"]
