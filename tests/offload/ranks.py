"""Run by test_invariants.py as one of two processes: ZenFlow over weights that FSDP2 shards by rows.

    python -m tests.offload.ranks RANK FOLDER

17 and 5 rows do not divide by two, and of the one row of the last weight the second process has none.
"""

from __future__ import annotations

import copy
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import surokit as sk
from tests.train.ranks import gathered, together

STEPS = 18
SAVED = 10  # inside a window, with a job pending where there is overlap
CASES: dict[str, dict[str, Any]] = {
    "overlap": {"select_interval": 4},
    "no overlap": {"select_interval": 4, "overlap_step": False},
    "auto": {"select_interval": 4, "update_interval": "auto", "max_interval": 5, "auto_ratio": 0.5},
    "windows of one": {"select_interval": 2, "update_interval": 1, "overlap_step": False},
}


def options_of(case: str) -> dict[str, Any]:
    return {"lr": 1e-2, "topk_ratio": 0.3, "select_strategy": "step", **CASES[case]}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))


def halves(step: int) -> list[Tensor]:
    """The ranks' rows of a batch; some columns of x are larger, others in time."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 20, generator=generator) * (1 + torch.arange(20).add(step // 4).remainder(5))
    return list(x.chunk(2))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def run_case(case: str, rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model)
    params = list(model.parameters())
    optimizer: Any = sk.ZenFlow(params, **options_of(case))
    found: dict[str, Any] = {"hot": [], "shown": [], "resumed": True, "exchanged": []}
    twin: Any = None
    copies: list[nn.Parameter] = []

    for number in range(STEPS):
        model.zero_grad()
        loss_of(model, halves(number)[rank]).backward()
        with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
            optimizer.step()
        found["exchanged"].append(sum(call.args[0].nbytes for call in reduced.call_args_list))
        if twin is not None:  # the same step again, by what was restored
            for p, q in zip(params, copies):
                q.grad = p.grad
            twin.step()
            found["resumed"] &= all(torch.equal(_here(p), _here(q)) for p, q in zip(params, copies))
        if number + 1 == SAVED:
            copies = [nn.Parameter(p.detach().clone()) for p in params]
            twin = sk.ZenFlow(copies, **options_of(case))
            twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.state_dict()
        found["hot"].append([sorted(optimizer.state[p]["hot"].tolist()) for p in params if p.dim() > 1])
        found["shown"].append([gathered(p.detach()).clone() for p in params])
    return found


def _here(p: Tensor) -> Tensor:
    local: Tensor = p.detach().to_local()  # type: ignore[attr-defined]
    return local


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with together(rank, folder):
        for case in CASES:
            try:
                found[case] = run_case(case, rank)
            except Exception:
                found[case] = {"error": traceback.format_exc()}
                break
        torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
