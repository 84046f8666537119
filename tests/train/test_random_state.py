"""The random state as a value."""

from __future__ import annotations

import io
import os
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

from surokit.train import random_state
from surokit.train.prefetch import AHEAD
from surokit.train.random_state import OwnRandom, RandomState, Turn, kept, seeded, turn
from tests.clocks import main_thread_waits, until
from tests.train.toys import ENDLESS, Toy, assert_same_state, make_session, whole

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float]:
    # an odd number of normal deviates: NumPy keeps the second of a pair in its state
    return random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_capture_and_restore() -> None:
    with kept(CPU):
        draw()
        state = RandomState.capture(CPU)
        first = draw()
        state.restore()
        assert draw() == first


def test_as_plain_data_and_back() -> None:
    with kept(CPU):
        draw()
        state = RandomState.capture(CPU)
        first = draw()
        file = io.BytesIO()
        torch.save(state.to_dict(), file)
        file.seek(0)
        RandomState.from_dict(torch.load(file, weights_only=True), CPU).restore()
        assert draw() == first


def test_seeded_disturbs_nothing_and_repeats() -> None:
    with kept(CPU):
        before = RandomState.capture(CPU)
        one, two, other = (RandomState.seeded(seed, CPU) for seed in (3, 3, 4))
        now = draw()
        before.restore()
        assert draw() == now
        draws = []
        for state in (one, two, other):
            state.restore()
            draws.append(draw())
        assert draws[0] == draws[1] != draws[2]


def interrupt_who_waits(turn: Turn) -> None:
    until(lambda: turn.wanted and main_thread_waits())
    os.kill(os.getpid(), signal.SIGINT)


def test_torch_alone() -> None:
    with kept(CPU):
        state = RandomState.capture(CPU, torch_only=True)
        first = torch.rand(1).item()
        python = random.random()
        state.restore()
        assert torch.rand(1).item() == first
        assert random.random() != python


class TestTurn:
    def test_one_at_a_time_in_the_order_of_coming(self) -> None:
        turn, order = Turn(), []

        def take(name: int) -> None:
            with turn:
                order.append(name)

        threads = []
        with turn, turn:  # who has it may take it again
            assert turn.mine
            for name in range(4):
                threads.append(threading.Thread(target=take, args=(name,)))
                threads[-1].start()
                until(lambda: len(turn._waiting) == len(threads))
            assert turn.wanted
            assert not order
        for thread in threads:
            thread.join(10)
        assert order == [0, 1, 2, 3]
        assert turn._owner is None

    def test_an_interrupt_of_the_waiting_leaves_it_free(self) -> None:
        turn, begun, done = Turn(), threading.Event(), threading.Event()

        def hold() -> None:
            with turn:
                begun.set()
                done.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        begun.wait(10)
        threading.Thread(target=interrupt_who_waits, args=(turn,)).start()
        with pytest.raises(KeyboardInterrupt), turn:
            pytest.fail("it was interrupted while it waited")
        assert not done.is_set(), "it waits no longer"
        done.set()
        thread.join(10)
        assert turn._owner is None
        with turn:
            assert turn.mine


def test_a_session_gives_way_between_two_steps() -> None:
    """What it leaves behind and what it finds again are its own and the caller's."""
    own, device = OwnRandom(3, torch.device("cpu")), torch.device("cpu")
    torch.manual_seed(5)
    callers = torch.get_rng_state()
    with own.in_force(shared=True):
        first = torch.rand(2)
        with own.aside():
            assert torch.equal(torch.get_rng_state(), callers)
            assert not turn.mine
            torch.rand(7)
            with seeded(1, device):
                torch.rand(1)
        own.snapshot()
        before = torch.get_rng_state()
        torch.rand(9)  # another thread's
        assert torch.equal(own.state.cpu, before), "a checkpoint holds the run's own"
        own.snapshot()
        torch.rand(9)
        own.restore()
        second = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2), second)


class _NoTurn:
    """What would be without the lock."""

    wanted = mine = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def enter(self) -> None: ...


class Meanwhile(Toy):
    """Its dropout draws from the host's generator; `meanwhile` is called before."""

    meanwhile = staticmethod(lambda: None)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.meanwhile()
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("locked", [True, False])
def test_why_one_lock_stays(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's generators are the process's: without the lock another session's step draws in the middle of this one's."""
    alone = whole(6)
    if not locked:
        monkeypatch.setattr(random_state, "turn", _NoTurn())
    model = Meanwhile()
    one, two = make_session(model), make_session(seed=2)
    other = two.run(ENDLESS, thread=True)
    until(lambda: two.steps)

    def meanwhile() -> None:
        before = two.steps
        until(lambda: two.steps > before or random_state.turn.wanted)

    model.meanwhile = meanwhile
    one.run(6, thread=True).wait()
    two.stop()
    other.wait()
    losses = one.records.column("loss").tolist()
    assert (losses == alone.records.column("loss").tolist()) == locked


def test_while_a_step_waits_for_its_device_another_session_takes_its_own() -> None:
    """And what others draw meanwhile, from any generator, is not the run's."""
    one, two = make_session(), make_session(seed=2)

    class Launched:
        """A device's work that is done once the other session has made two more steps."""

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            done = two.steps + 2
            until(lambda: two.steps >= done)
            with turn:
                draw()

    other = two.run(ENDLESS, thread=True)
    one.prefetch._launched.extend(Launched() for _ in range(AHEAD))  # type: ignore[misc]
    one.run(6, thread=True).wait()
    two.stop()
    other.wait()
    assert_same_state(one, whole(6))
    assert_same_state(two, whole(two.steps, seed=2))
