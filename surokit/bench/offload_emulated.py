"""Emulate a device that sleeps: ways of `bench offload` where there is no GPU, and the cases in which they are timed.

It computes by sleeping, for a time C, while the host's threads do their work. Gradients are real tensors that were made
once; a throttled link moves them, and the host adds them up and runs AdamW on them. The time that the emulation takes for
the device's own part (gathering cold columns, updating hot ones, taking weights in) is taken off the next C, in which a
device does it within a hundredth. A CPU takes longer for it than for AdamW; so C, which has to have room for it, is long,
and where a case asks for a host that is busy for longer still, its AdamW rests after its work.

f share of the control's step in which the device waits; k hot columns; S window; M bytes of the model; N its parameters; B the
link's rate; r the host's AdamW's
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

from surokit.bench.offload_ways import CHOSEN_ONCE, CONTROL, ZENFLOW, K, drain, turn


@dataclass(frozen=True)
class Case:
    """A Case sets the load. stalled: f, the share of its time that the control is stalled. link: the time of M over the link, in
    units of C; None: the link alone makes f, and AdamW has the host's own rate. interval: S."""

    name: str
    stalled: float
    link: float | None
    interval: int

    @property
    def slowed(self) -> bool:
        return self.link is not None


# With M/B = l C and N/r = a C ZenFlow's step is max(C, (1-k) l C, (1-k) a C/S) + (1-k) l C/S. To remove x of a stall of f/(1-f) C
# it has to be below C + (1-x) f/(1-f) C. At f = .5 that is 1.15 C: landing has .15 C, so l < .66 at S = 4. At f = .93 it is 3 C,
# and a is 13: at S = 4 AdamW alone takes 3 C, at S = 8 half of it. By the link alone l is 1 at f = .5, and S = 8 leaves landing
# .11 C.
CASES = (
    Case("f = .5, AdamW", 0.5, 0.25, 4),
    Case("f = .93, AdamW", 0.93, 0.5, 8),
    Case("f = .5, link", 0.5, None, 8),
)


class Sleeper:
    """A Sleeper is an emulated device: C seconds of computing are slept, less the time that the emulation itself worked in
    its place since."""

    def __init__(self, compute_s: float) -> None:
        self.compute_s, self.owed_s, self.worked_s = compute_s, 0.0, 0.0

    @contextlib.contextmanager
    def works(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            self.owed_s, self.worked_s = self.owed_s + took, self.worked_s + took

    def compute(self) -> None:
        from surokit.offload.timeline import span

        begun = time.perf_counter()
        pays = min(self.owed_s, self.compute_s)
        self.owed_s -= pays
        with span("compute"):
            while (left := begun + self.compute_s - pays - time.perf_counter()) > 0:
                time.sleep(left)


def link_of(device: Sleeper, gb_s: float) -> Any:
    """Make a throttled link that counts its `transfers` down, and whose device's own work is the Sleeper's."""
    from surokit.offload.link import ThrottledLink

    class Emulated(ThrottledLink):
        transfers = 0

        def computes(self) -> AbstractContextManager[None]:
            return device.works()

        def down(self, fill: Any, to: Any, reads: Any = ()) -> Any:
            self.transfers += 1
            return super().down(fill, to, reads)

    return Emulated(gb_s)


class Emulated:
    """An Emulated is a way on a Sleeper. rest_s: seconds that AdamW rests for each parameter that it updates."""

    def __init__(
        self, way: str, work: Sequence[Any], device: Sleeper, gb_s: float, rest_s: float = 0.0, interval: int = 4
    ) -> None:
        import torch

        import surokit as sk

        self.device, self.rest_s = device, rest_s
        self.params = [torch.nn.Parameter(g.clone()) for g in work]
        self.parameters = sum(g.numel() for g in work)
        self.window = interval if way == ZENFLOW else 1
        self.optimizer: Any = None
        self.jobs = 0  # of AdamW, each with a rest before it: one in a window, or one a transfer
        for p, g in zip(self.params, work):
            p.grad = g
        link = link_of(device, gb_s)
        if way == CONTROL:
            # one thread, as ZenFlow's AdamW has here: two that wait for one another are at the mercy of what else runs
            self.optimizer = sk.OffloadAdamW(self.params, pt_reserved_cores_perc=0.5, link=link)
        elif way == ZENFLOW:
            options: dict[str, Any] = {"topk_ratio": K, "update_interval": interval, **CHOSEN_ONCE}
            self.optimizer = sk.ZenFlow(self.params, link=link, **options)
        if self.optimizer is not None:
            self.optimizer.workers["adam"].delay = self._rest
            for _ in range(2 * self.window):  # the first one makes the states, and chooses columns
                link.transfers = 0
                self.optimizer.step()
            drain(self.optimizer)
            self.jobs = 1 if way == ZENFLOW else link.transfers

    def _rest(self) -> float:
        """Rest before each of AdamW's jobs, on its thread: for as many parameters as the job has."""
        from surokit.offload.workers import beat

        cold = 1.0 if self.window == 1 else 1 - K
        over = time.perf_counter() + (self.rest_s * self.parameters * cold / self.jobs if self.jobs else 0.0)
        while (left := over - time.perf_counter()) > 0:
            time.sleep(min(left, 0.05))
            beat()
        return 0.0

    def begin(self) -> None:
        self.device.owed_s = 0.0

    def step(self) -> None:
        self.device.compute()
        if self.optimizer is not None:
            self.optimizer.step()

    def over(self) -> float:
        owed, self.device.owed_s = self.device.owed_s, 0.0
        return min(owed, self.device.compute_s)  # has room in the C to come; what has none is time

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.link.close()
            self.optimizer.close()


def gradients(millions: float) -> list[Any]:
    """Make gradients in bf16, as matrices of a decoder's layers, of about so many million elements; columns differ in size,
    as they do in models."""
    import torch

    torch.manual_seed(0)
    width, ffn = 1024, 2816
    layer = [(width, width)] * 2 + [(width // 2, width)] * 2 + [(ffn, width)] * 2 + [(width, ffn)]
    if millions < 4:
        layer = [(64, 64), (96, 64)]
    size = sum(rows * columns for rows, columns in layer)
    shapes = layer * max(1, round(1e6 * millions / size))
    return [(torch.randn(rows, columns) * torch.rand(columns).square() * 1e-2).bfloat16() for rows, columns in shapes]


def setting(case: Case, work: Sequence[Any]) -> dict[str, Any]:
    """Find C, the link's rate and AdamW's rest of a case.

    C is twice the time that the emulation computes in a step of ZenFlow in the device's place, which takes longer when the
    host works beside it. Then the control runs, and AdamW's rest, or in a case of the link its rate, is corrected until the
    control is stalled for the share that the case asks for.
    """
    n, size = sum(g.numel() for g in work), sum(g.nbytes for g in work)
    device = Sleeper(0.0)
    with closing(Emulated(ZENFLOW, work, device, 1e3, interval=case.interval)) as way:
        worked = []
        for _ in range(3):
            before = device.worked_s
            turn(way, case.interval)
            worked.append((device.worked_s - before) / (2 * case.interval))
    c = 2 * statistics.median(worked)
    wanted_s = case.stalled / (1 - case.stalled) * c
    gb_s, rest_s = size / 1e9 / (case.link * c if case.link is not None else wanted_s), 0.0
    device = Sleeper(c)
    found: list[dict[str, float]] = []
    for _ in range(8):
        with closing(Emulated(CONTROL, work, device, gb_s, rest_s)) as way:
            stall_s = statistics.median(turn(way, 1)["ms"] for _ in range(3 if case.stalled > 0.8 else 7)) / 1e3 - c
        found.append({"link_gb_s": gb_s, "rest_s": rest_s, "stalled": stall_s / (c + stall_s)})
        if abs(stall_s / wanted_s - 1) < 0.02:
            break
        if case.slowed:
            rest_s = max(0.0, rest_s + (wanted_s - stall_s) / n)
        else:
            gb_s *= stall_s / wanted_s
    best = min(found, key=lambda each: abs(each["stalled"] - case.stalled))
    return {"compute_ms": 1e3 * c, "emulated_ms": 1e3 * statistics.median(worked), **best, "tried": found}
