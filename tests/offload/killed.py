"""Run by test_kills.py in a process of its own: kills training with ZenFlow at random moments, and lets it go on.

    python -m tests.offload.killed KILLS

A child resumes the run and trains; it saves every third step, so that windows of four steps are cut everywhere. After the kills
one child goes on to the end. It must be, bit for bit, where a run is that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import surokit as sk
from surokit.train import checkpoint_files as checkpoints
from tests.offload.runs import equal_trees
from tests.train.toys import Toy, make_batches

OPTIMIZER = {"lr": 1e-2, "topk_ratio": 0.25, "select_strategy": "step", "select_interval": 8, "full_warm_up_rounds": 2}
MORE = 7  # steps after the last kill
FOR_EVER = 10**6


def make_session(folder: Path, told: int | None = None) -> sk.Session:
    def tell(session: Any) -> dict[str, float]:
        if told is not None:
            os.write(told, b".")
        return {}

    return sk.Session(
        Toy(dropout=0.1),
        make_batches(),
        optimizer=sk.ZenFlow(**OPTIMIZER),
        schedule=None,
        run_dir=folder,
        exist="resume",
        save_every=3,
        meters=[tell],
        compile=False,
    )


def in_a_child(work: Callable[[], None]) -> int:
    """The process id of a fork that does the work; its threads are its own."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def trained(folder: Path, until: int) -> checkpoints.Checkpoint:
    """The last checkpoint, after so many steps, of a child that nobody kills."""

    def work() -> None:
        session = make_session(folder)
        session.run(until - session.steps)

    assert os.waitpid(in_a_child(work), 0)[1] == 0
    found = checkpoints.latest(folder / "checkpoints")
    assert found is not None
    assert found.step == until
    return found


def killed(folder: Path, steps: int, after_s: float) -> None:
    """A child that is killed so long after its so-manyth step."""
    read_end, write_end = os.pipe()

    def work() -> None:
        os.close(read_end)
        make_session(folder, write_end).run(FOR_EVER)

    child = in_a_child(work)
    os.close(write_end)
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        for _ in range(steps):
            assert pipe.read(1), "it ended by itself"
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(kills: int) -> None:
    torch.set_num_threads(1)
    generator = random.Random(kills)
    with tempfile.TemporaryDirectory() as place:
        folder, other = Path(place) / "killed", Path(place) / "whole"
        reached: list[int] = []
        torn = 0
        for _ in range(kills):
            killed(folder, generator.randint(1, 9), generator.uniform(0.0, 0.02))
            torn += any((folder / "checkpoints").glob(".unfinished-*"))
            found = checkpoints.latest(folder / "checkpoints")
            reached.append(found.step if found else 0)
        assert reached == sorted(reached)
        end = reached[-1] + MORE
        one, two = trained(folder, end), trained(other, end)
        equal_trees(one.state()["optimizer"], two.state()["optimizer"])
        models = [Toy(seed=1), Toy(seed=2)]
        for found, model in zip((one, two), models):
            checkpoints.load_model(found, model)
        equal_trees(dict(models[0].state_dict()), dict(models[1].state_dict()))
    sys.stdout.write(f"{kills} kills over {reached[-1]} steps, {torn} of them in the middle of saving\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
