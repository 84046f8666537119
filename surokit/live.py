"""`sk.Live`: the panel around a training loop that is not ours.

    with sk.Live("my model", total=1000) as live:
        for batch in loader:
            ...
            live.log(loss=loss, tokens=batch["input_ids"].numel())

`log` never makes the host wait for the device. A value on a GPU is copied to pinned memory behind the work that
computes it, and read some steps later, when an event says that it has arrived. A value on the CPU is read at once:
there is nothing to wait for, and the caller may change the tensor in place afterwards.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from surokit.train.records import Late
from surokit.widgets.panel import Panel, View
from surokit.widgets.state import PanelState

if TYPE_CHECKING:
    import pandas as pd

KEEP = 1 << 16  # rows in memory; the oldest leave first


class Live:
    """A live panel that is fed by hand, and the numbers it was given.

    title: first words of the panel. every: shortest time between two pictures, in seconds. total: number of steps
    planned, for progress and time left. view, clock: for tests and other front ends.

    Shows loss, tokens/s (steps/s where `tokens` is never given) and, if `idle_frac` is logged, the idle share. Close
    it, or use it in a `with` block, for the final picture; in a notebook the end of a cell that fails closes it too.
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        *,
        total: int | None = None,
        recipe: str = "",
        view: View | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every <= 0:
            raise ValueError(f"Live(every={every}): the time between two pictures is in seconds and positive.")
        self._clock = clock
        self._panel = Panel(PanelState(title or "", recipe=recipe, total=total), view=view, every_s=every, clock=clock)
        self._rows: deque[dict[str, float]] = deque(maxlen=KEEP)
        self._late: deque[tuple[dict[str, float], dict[str, float], list[Late]]] = deque()
        self._step = 0
        self._logged_s: float | None = clock()
        self._elapsed_s = 0.0
        self._closed = False
        self._shell: Any = None
        self._watch_cell()
        self._panel.open()

    @property
    def state(self) -> PanelState:
        """What the panel shows."""
        return self._panel.state

    def log(
        self,
        loss: float | torch.Tensor | None = None,
        tokens: float | torch.Tensor | None = None,
        step: int | None = None,
        **more: float | torch.Tensor | None,
    ) -> None:
        """One step's numbers: floats, or tensors of one element on any device; None is left out. Never waits.

        step: its number, by default one more than the last. The same number again adds to that step. tokens: trained on
        in this step. more: further columns of `frame()`; `eval_loss` (held-out loss) and `idle_frac` (0..1) are drawn.
        Raises TypeError for what is not a number, ValueError for a tensor of more elements or a step that goes back.
        """
        step = self._step + 1 if step is None else int(step)
        again = step == self._step and bool(self._rows)
        if step < self._step:
            raise ValueError(
                f"log(step={step}) after step {self._step}: steps only go up; make a new sk.Live for a new run."
            )
        known: dict[str, float] = {}
        coming: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, value in {"loss": loss, "tokens": tokens, **more}.items():
            if value is not None:
                _sort(name, value, known, coming)
        if not again:
            known = {"step": step, **self._time(), **known}
            self._step = step
            self._rows.append({})
        row = self._rows[-1]
        row.update(known)
        # Rows reach the panel whole and in order: what is late holds back what comes after it.
        news = {"step": step, **known}
        if coming or self._late:
            self._late.append((row, news, [Late(values, {}) for values in coming.values()]))
        else:
            self._panel.on_step(news)
        self._harvest(wait=len(self._late) > KEEP)

    def close(self, reason: str = "done") -> None:
        """Take in the last values (waits for them) and leave the final picture. reason: "done", "interrupted",
        "failed: ..." or a sentence of your own. Closing twice does nothing; `log` after it opens a new panel."""
        if self._closed:
            return
        self._closed = True
        self._logged_s = None
        self._unwatch_cell()
        try:
            self._harvest(wait=True)
        finally:
            self._panel.on_end(reason)

    def frame(self) -> pd.DataFrame:
        """pandas, one row a step (the last 65,536): step, wall_ms, elapsed_s, loss, tokens and what else was logged.
        Never waits: a value still on its way from the device is NaN."""
        import pandas as pd

        self._harvest()
        return pd.DataFrame(list(self._rows))

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_reason(error))

    def _time(self) -> dict[str, float]:
        """The wall time since the last step, or since the panel was opened."""
        now = self._clock()
        if self._closed:  # a loop that goes on
            self._closed = False
            self._watch_cell()
        seconds = now - self._logged_s if self._logged_s is not None else None
        self._logged_s = now
        if seconds is None:
            return {"elapsed_s": self._elapsed_s}
        self._elapsed_s += seconds
        return {"wall_ms": 1e3 * seconds, "elapsed_s": self._elapsed_s}

    def _harvest(self, wait: bool = False) -> None:
        while self._late and (wait or all(late.ready() for late in self._late[0][2])):
            row, news, lates = self._late.popleft()
            for late in lates:
                row.update(late.wait())
                news.update(late.wait())
            self._panel.on_step(news)
        self._panel.tick()

    # -- the notebook cell: its end is the last chance for a picture when a loop fails without closing

    def _watch_cell(self) -> None:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None:
            self._shell = shell
            shell.events.register("post_run_cell", self._cell_ended)

    def _unwatch_cell(self) -> None:
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._cell_ended)
            self._shell = None

    def _cell_ended(self, result: Any) -> None:
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            self.close(_reason(error))
        else:
            self._harvest()
            self._panel.refresh()


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {type(error).__name__}: {error}"


def _sort(name: str, value: Any, known: dict[str, float], coming: dict[torch.device, dict[str, torch.Tensor]]) -> None:
    """Put a value where it belongs: numbers and CPU tensors with what is known, device tensors with what is coming."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"log({name}=tensor of shape {shape}): log one element, for example its .mean().")
        if value.device.type == "cpu":
            known[name] = float(value.detach())
        else:
            coming.setdefault(value.device, {})[name] = value.detach()
        return
    if isinstance(value, str | bytes):
        raise TypeError(f"log({name}={value!r}): a number or a tensor of one element is needed.")
    try:
        known[name] = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"log({name}={type(value).__name__}): a number or a tensor of one element is needed."
        ) from error
