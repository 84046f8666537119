"""Batches on their way to a device: what is asked of CUDA, in which order, and how far the host runs ahead."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from surokit.train.prefetch import AHEAD, Prefetch
from tests.clocks import JumpingClock
from tests.train.toys import make_batches, make_session


class FakeCuda:
    """The parts of torch.cuda that are used, which write down what happens. `done` says which events have been reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()
        self.events = 0
        self.stream = "main"
        fake = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "copies") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                fake.log.append(f"{self.name} waits for {other.name}")

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking
                self.number = fake.events
                fake.events += 1

            def record(self, stream: Stream) -> None:
                fake.log.append(f"event {self.number} in {stream.name}")

            def query(self) -> bool:
                return self.number in fake.done

            def synchronize(self) -> None:
                fake.log.append(f"host waits for {self.number}")
                fake.done.add(self.number)

        main = Stream(name="main")

        @contextmanager
        def stream(s: Stream) -> Any:
            fake.stream = s.name
            yield
            fake.stream = "main"

        for name, value in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", stream),
            ("current_stream", lambda device: main),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

        def to(t: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
            fake.log.append(f"copy in {fake.stream}, {'' if non_blocking else 'not '}async")
            return t.clone()

        def pin(t: Tensor) -> Tensor:
            fake.log.append("pin")
            return t

        monkeypatch.setattr(Tensor, "to", to)
        monkeypatch.setattr(Tensor, "is_pinned", lambda t: bool(t.shape == (2, 2)))
        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(Tensor, "record_stream", lambda t, s: fake.log.append(f"kept for {s.name}"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


CUDA = torch.device("cuda", 0)


def test_a_batch_is_copied_beside_the_work_that_goes_on(cuda: FakeCuda) -> None:
    unpinned, pinned = torch.zeros(3, 4), torch.zeros(2, 2)
    there = Prefetch(CUDA)({"input_ids": unpinned, "labels": pinned, "kind": "text"})  # type: ignore[dict-item]
    assert there["kind"] == "text"
    assert cuda.log == [
        "pin",
        "copy in copies, async",
        "kept for main",
        "copy in copies, async",
        "kept for main",
        "main waits for copies",
    ]


def test_what_is_on_the_device_stays(cuda: FakeCuda) -> None:
    prefetch = Prefetch(CUDA)
    prefetch.device = torch.device("cpu")
    t = torch.zeros(3, 4)
    assert prefetch({"input_ids": t})["input_ids"] is t
    assert cuda.log == ["main waits for copies"]


def test_the_host_runs_two_steps_ahead(cuda: FakeCuda) -> None:
    prefetch = Prefetch(CUDA)
    for _ in range(AHEAD):
        prefetch.begin()
        prefetch.launched()
    assert cuda.log == ["event 0 in main", "event 1 in main"]
    prefetch.begin()
    assert cuda.log[-1] == "host waits for 0"
    prefetch.launched()
    prefetch.begin()
    assert cuda.log[-2:] == ["event 2 in main", "host waits for 1"]


def test_a_wait_counts_where_the_device_had_nothing_to_do(cuda: FakeCuda) -> None:
    prefetch = Prefetch(CUDA)
    assert prefetch.begin()  # nothing was launched yet
    prefetch.launched()
    assert not prefetch.begin()
    cuda.done.add(0)
    assert prefetch.begin()


def test_on_a_cpu_nothing_happens() -> None:
    prefetch = Prefetch(torch.device("cpu"))
    batch = make_batches(1)[0]
    for _ in range(4):
        assert prefetch.begin()
        assert prefetch(batch)["input_ids"] is batch["input_ids"]
        prefetch.launched()


@pytest.mark.parametrize("busy", [False, True])
def test_a_stall_is_a_wait_that_work_did_not_hide(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = JumpingClock(time.perf_counter)
    monkeypatch.setattr(time, "perf_counter", clock)

    class Slow(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.ahead_s += 1000.0
                yield batch

    session = make_session(data=Slow(make_batches(4)))
    monkeypatch.setattr(session.prefetch, "begin", lambda *_: not busy)
    session.run(3)
    stalls = session.records.column("stall_ms")
    assert (stalls == 0).all() if busy else (stalls >= 1e6).all()


def test_no_batch_is_drawn_before_its_step() -> None:
    """So that a position, and what a resumed run draws, need no word about batches on their way."""
    drawn: list[int] = []

    class Counted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                drawn.append(number)
                yield batch

    session = make_session(data=Counted(make_batches(6)), accumulate=2)
    session.run(2)
    assert drawn == [0, 1, 2, 3]
    assert session.data.index == 4
