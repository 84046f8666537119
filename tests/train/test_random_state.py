"""The random state as a value."""

from __future__ import annotations

import io
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from surokit.train.random_state import OwnRandom, RandomState, Turn, kept, seeded, turn
from tests.clocks import main_thread_waits, until

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
        own.hold()
        before = torch.get_rng_state()
        torch.rand(9)  # another thread's
        assert torch.equal(own.state.cpu, before), "a checkpoint holds the run's own"
        own.hold()
        torch.rand(9)
        own.take_back()
        second = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2), second)
