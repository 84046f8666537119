"""Run by test_checkpoint.py in a process of its own: kills children at random moments while they save.

A child fills the whole model with the step's number and saves, step after step. Whatever checkpoint is left as the latest
must be whole, hold one number only, and never be older than the last one a child has reported as saved.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from surokit.train import checkpoint_files as checkpoints

KILLS = 25


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))


def save_for_ever(folder: Path, step: int, report: int) -> None:
    model = make_model()
    while True:
        step += 1
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
        checkpoints.save(folder, model, {"step": torch.tensor(step)}, {"step": step}, None, keep=2)
        os.write(report, step.to_bytes(4, "big"))


def main() -> None:
    torch.set_num_threads(1)
    generator = random.Random(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        last = 0
        interrupted = 0
        for _ in range(KILLS):
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read_end)
                save_for_ever(folder, last, write_end)
            os.close(write_end)
            os.read(read_end, 4)  # it is under way
            time.sleep(generator.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(read_end, "rb") as pipe:
                reported = pipe.read()
            interrupted += any(folder.glob(".unfinished-*"))
            found = checkpoints.latest(folder)
            assert found is not None
            saved = int.from_bytes(reported[-4:], "big") if reported else last + 1
            assert found.step in (saved, saved + 1), (found.step, saved)
            checkpoints.load_model(found, model)
            assert all((p == found.step).all() for p in model.parameters()), "torn"
            assert int(found.state()["step"]) == found.step
            last = found.step
    sys.stdout.write(f"{KILLS} kills, {interrupted} of them in the middle of saving, {last} checkpoints\n")
    assert interrupted > 0


if __name__ == "__main__":
    main()
