"""Count what an offloading optimizer does as it runs: steps, waits by cause, bytes by kind, ages of gradients, choices of
columns.

The optimizer writes and report.py reads; both on the training thread. Nothing here reads the device: scores of columns stay
there until a report asks for them. A run that is resumed, or forked, counts anew.

    I columns of a weight
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.profiler import record_function

from surokit.offload.timeline import WAIT, span

if TYPE_CHECKING:
    from surokit.offload.link import Link

# slot      no staging slot was free: gradients were still on their way, or still being added up
# adam      the host's update was not done when it was due
# landing   updated weights, or columns that change sides, were given to the link, which took its time (on a device that is the
#           device's time, see the link); or weights that somebody wrote by hand came down and were taken over
# selection statistics or scores of gradients were not there yet
CAUSES = ("slot", "adam", "landing", "selection")
# setup: of states, as they are made. adopted: of weights that somebody wrote by hand. The others: of steps.
KINDS = ("gradients", "weights", "migration", "setup", "adopted")
# How waits are marked in a profile: RANGE and the cause. profiler/analysis/roles.py knows it by this name.
RANGE = "surokit.offload.wait "
_STEPS = 4096  # whose waits are held one by one
_CHOICES = 256  # of each weight


@dataclass(frozen=True)
class Chosen:
    """A Chosen is one choice of hot columns of one weight. share: their part of the gradient's squared norm. entered: how
    many of them were cold before."""

    step: int
    share: float
    hot: int
    columns: int
    entered: int


@dataclass(eq=False)
class Accounts:
    """Accounts holds the counters of one optimizer.

    model_bytes: of all parameters that it updates, in their gradients' dtype.
    link_ms: of the device's waits that its link has counted, those that are accounted for; link_before_ms: those before.
    staleness: steps from a gradient to the weights that it changed -> gradient elements; hot ones of masked steps too, since only
    the device knows these.
    intervals: steps of a window -> windows.
    names: of parameters, where `call` has set them.
    """

    model_bytes: int = 0
    link_ms: float = 0.0
    steps: int = 0
    windows: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    intervals: Counter[int] = field(default_factory=Counter)
    names: dict[Tensor, str] = field(default_factory=dict)
    bytes: dict[str, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(KINDS, (0, 0)))  # down, up
    choices: dict[Tensor, deque[Chosen]] = field(default_factory=dict)
    scores: dict[Tensor, Tensor] = field(default_factory=dict)  # [I], of the latest choice, on the device
    stall_by_cause: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))  # ms
    _stalls: deque[tuple[int, dict[str, float]]] = field(default_factory=deque)  # step, ms by cause

    def __post_init__(self) -> None:
        self.link_before_ms = self.link_ms

    @property
    def stall_ms(self) -> float:
        """Return the host's waits in all, ms."""
        return sum(self.stall_by_cause.values())

    @contextmanager
    def stalled(self, cause: str, link: Link | None = None) -> Iterator[None]:
        """Count the time inside the block as a wait for `cause`, one of CAUSES; a profile shows it by that name.

        link: the link whose device is given nothing meanwhile, and so may run out of work; None where the link itself
        counts its device's waits.
        """
        begun = time.perf_counter()
        idle = nullcontext() if link is None else link.host_waits()
        try:
            with record_function(RANGE + cause), span(f"{WAIT} {cause}"), idle:
                yield
        finally:
            ms = 1e3 * (time.perf_counter() - begun)
            self.stall_by_cause[cause] += ms
            if not self._stalls or self._stalls[-1][0] != self.steps:
                self._stalls.append((self.steps, dict.fromkeys(CAUSES, 0.0)))
            self._stalls[-1][1][cause] += ms
            while self._stalls[0][0] <= self.steps - _STEPS:
                self._stalls.popleft()

    def device_waited(self, link: Link) -> float:
        """Return the milliseconds that the device was without work because of waits since the last call; on CUDA only waits
        that it has passed."""
        before, self.link_ms = self.link_ms, link.device_stall_ms()
        return self.link_ms - before

    def left(self, link: Link, given: Link | None) -> None:
        """Take the waits of `link`, which is no longer used, out of the account. The next link is a new one, unless it is
        the one that was given."""
        shift = 0.0 if link is given else link.device_stall_ms()
        self.link_ms -= shift
        self.link_before_ms -= shift

    def stalls(self, cause: str) -> list[float]:
        """Return the milliseconds of each of the last steps, up to 4,096 of them, oldest first."""
        last = min(self.steps, _STEPS)
        found = [0.0] * last
        for step, ms in self._stalls:
            if (at := step - (self.steps - last)) in range(last):
                found[at] = ms[cause]
        return found

    def moved(self, kind: str, down: int, up: int) -> None:
        """Count bytes of `kind`, one of KINDS, that went from the device to the host and back."""
        before = self.bytes[kind]
        self.bytes[kind] = before[0] + down, before[1] + up

    def selected(self, step: int, p: Tensor, scores_I: Tensor, share: float, hot: int, entered: int) -> None:
        """Note that step `step` chose `hot` columns of parameter p. scores: float32 [I], kept until the next choice."""
        found = self.choices.setdefault(p, deque(maxlen=_CHOICES))
        found.append(Chosen(step, share, hot, len(scores_I), entered))
        self.scores[p] = scores_I

    def call(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of parameters, as module.named_parameters() gives them."""
        self.names = {p: name for name, p in named}
