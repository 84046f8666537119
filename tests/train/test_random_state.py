"""The random state as a value."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from surokit.train.random_state import RandomState, kept

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


def test_torch_alone() -> None:
    with kept(CPU):
        state = RandomState.capture(CPU, torch_only=True)
        first = torch.rand(1).item()
        python = random.random()
        state.restore()
        assert torch.rand(1).item() == first
        assert random.random() != python
