"""Two processes that train together over gloo, on a CPU, and profile: run by test_ranks.py once.

    python -m tests.profiler.ranks RANK FOLDER

Rank 1 multiplies twice as much as rank 0. Each case is profiled on both ranks and gathered on rank 0, which saves it in a folder;
for the last, torch's own profiler writes a trace of each rank. Each rank writes to rank0.pt or rank1.pt what it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity

import surokit as sk
from tests.train.ranks import together

WIDTH, HIDDEN, STEPS = 64, 128, 3
LAYERS = ((WIDTH + 1) * HIDDEN, (HIDDEN + 1) * WIDTH)  # elements of each


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def sharded() -> nn.Module:
    made = model()
    for layer in (made[0], made[2]):
        fully_shard(layer)
    fully_shard(made)
    return made


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(model())


CASES: dict[str, Callable[[], nn.Module]] = {"sharded": sharded, "replicated": replicated}


def training(made: nn.Module, rank: int) -> Callable[[int], None]:
    """Return a loop of some steps."""
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    x, other = torch.randn(32, WIDTH), torch.randn(128, 128)

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(1 + rank):
                other @ other
            made(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with together(rank, folder):
        for name, make in CASES.items():
            run = training(make(), rank)
            with sk.profile(steps=STEPS, warmup=2) as p:
                run(STEPS + 2)
            merged = sk.RankProfiles.gather(p)
            found[name] = {
                "merged": merged is not None,
                "exposed_ms": p.summary["comm_exposed_ms"],
                "text": repr(merged),
            }
            if merged is not None:
                merged.save(folder / name)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as trace:
            run(STEPS)
        (folder / "traces").mkdir(exist_ok=True)
        trace.export_chrome_trace(str(folder / "traces" / f"worker{rank}.pt.trace.json.gz"))
        torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
