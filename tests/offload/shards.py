"""Run by test_written.py as one of two processes: weights that FSDP2 shards, and that somebody writes between two steps; and
weights that both processes have whole, under DistributedDataParallel.

    python -m tests.offload.shards RANK FOLDER
"""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surokit as sk
from surokit.train import Spec
from tests.offload.ranks import halves, loss_of, make_model
from tests.train.ranks import together

REPLICAS: dict[str, Spec] = {
    "OffloadAdamW": sk.OffloadAdamW(lr=1e-2),
    "ZenFlow": sk.ZenFlow(lr=1e-2, topk_ratio=0.3, select_strategy="step", select_interval=4),
}
REPLICA_STEPS = 12


def replicated(spec: Spec, rank: int) -> list[Tensor]:
    """The weights of this process after some steps on its half of the batch."""
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = spec.build(model.parameters())
    for number in range(REPLICA_STEPS):
        model.zero_grad()
        loss_of(model, halves(number)[rank]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def written(name: str, rank: int) -> dict[str, Any]:
    """quiet: warnings of steps before which nobody wrote; said: of the others; held: whether what was written still stands after
    steps of a rate of 0, in which updates that were under way would land."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {"quiet": [], "said": [], "held": []}

    def step(number: int) -> list[str]:
        model.zero_grad()
        loss_of(model, halves(number)[rank]).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        with torch.no_grad():
            loss_of(model, halves(number)[rank])  # gathers the weights once more
        return [str(warning.message) for warning in caught if "were written" in str(warning.message)]

    def mine() -> list[Tensor]:
        return [p.detach().to_local().clone() for p in params]  # type: ignore[attr-defined]

    for wholly in (True, False):
        model = make_model()
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer)
        fully_shard(model)
        params = list(model.parameters())
        optimizer = getattr(sk, name)(params, lr=1e-2)
        for number in range(6):
            for group in optimizer.param_groups:
                group["lr"] = (
                    1e-2 if number < 3 else 0.0
                )  # a window ends at a rate of 0, and is under way when somebody writes
            found["quiet"] += step(number)
        with torch.no_grad():
            if wholly:
                model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
            else:
                for p in params:
                    p.to_local().mul_(0.5)  # type: ignore[attr-defined]
        values = mine()
        found["said"].append(step(6))
        for number in range(7, 15):
            found["quiet"] += step(number)
        found["held"] += [torch.equal(a, b) for a, b in zip(mine(), values)]
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with together(rank, folder):
        try:
            for name in ("OffloadAdamW", "ZenFlow"):
                found[name] = written(name, rank)
            found["replicas"] = {name: replicated(spec, rank) for name, spec in REPLICAS.items()}
        except Exception:
            found["error"] = traceback.format_exc()
        torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
