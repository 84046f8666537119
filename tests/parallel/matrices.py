"""Matrices that four processes update by Muon, divided in all ways: a job of spread_ranks.py.

The matrices and their gradients are the same in every process before they are cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import surokit as sk
from surokit.optim import adamw
from surokit.planner.counts.muon import STEPS as NEWTON_SCHULZ_STEPS
from surokit.planner.counts.muon import Hidden

STEPS = 3
ALONE = "alone"
SHARED_OUT = ("rows", "columns", "replicas", "rows and replicas", "copies")
BY_EACH = ("rows and columns", "replicas twice", "a plain model")
DRAWN = "stochastic"  # each shard draws bits of its own
#: Rows that do not divide by four, fewer rows than processes, columns and rows the longer, more matrices than a turn has.
SHAPES = [(24, 8), (8, 24), (16, 16), (3, 12), (24, 8), (10, 6), (8, 24), (13, 5), (1, 7)]
EXPERTS = (5, 6, 10)
F32, BF16 = torch.float32, torch.bfloat16
CHUNK = 64  # elements, of AdamW's lists: those of Muon's are not cut
#: dtype, options and whether a gradient of the second step is not finite.
CASES: dict[str, tuple[torch.dtype, dict[str, Any], bool]] = {
    "float32": (F32, {}, False),
    "bfloat16, masked": (BF16, {"nesterov": False, "ns_steps": 3}, True),
    "float32 momentum": (BF16, {"state_dtype": F32, "adjust_lr_fn": "original", "adamw_lr": 1e-3}, False),
    DRAWN: (BF16, {"rounding": "stochastic"}, False),
}
Divide = Callable[[Tensor], Tensor]


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in [*SHAPES, EXPERTS]]


def divides(mesh: DeviceMesh | None, *placements: Any) -> Divide:
    """Cut a tensor; experts by the first dimension, as whole matrices."""

    def divide(whole: Tensor) -> Tensor:
        if mesh is None:
            return whole.clone()
        of_experts = [Shard(0) if isinstance(each, Shard) else each for each in placements]
        return distribute_tensor(whole, mesh, placements if whole.ndim == 2 else of_experts)

    return divide


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def updated(
    case: str, divide: Divide, device: str, wrap: Callable[[nn.Module], nn.Module] | None = None
) -> dict[str, Any]:
    """Weights and momentum after STEPS steps, and the FLOPs that this process computed. wrap: the optimizer is given a module."""
    dtype, options, masked = CASES[case]
    module: Any = nn.Module()
    module.matrices = nn.ParameterList([nn.Parameter(divide(t.to(device))) for t in drawn(0, dtype)])
    module.embed, module.lm_head = nn.Embedding(4, 4, device=device), nn.Linear(4, 4, device=device)
    optimizer: Any
    if wrap is None:
        groups = [{"params": [*module.matrices][part], "use_muon": True} for part in (slice(4), slice(4, None))]
        optimizer = sk.Muon(groups, lr=0.1, **options)
    else:
        optimizer = sk.Muon(wrap(module), lr=0.1, **options)
    params = [*module.matrices]
    with FlopCounterMode(display=False) as counted, mock.patch.object(adamw, "CHUNK", CHUNK):
        for step in range(STEPS):
            for p, grad in zip(params, drawn(step + 1, dtype)):
                if masked and step == 1:
                    grad.view(-1)[-1] = torch.nan
                p.grad = divide(grad.to(device))
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = torch.tensor(float(masked and step == 1), device=device)
            optimizer.step()
    return {
        "weights": [whole(p.detach()) for p in params],
        "momentum": [whole(optimizer.state[p]["momentum_buffer"]) for p in params],
        "flop": counted.get_total_flops(),
    }


def jobs(device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is done in every process, by name: each case in every way of dividing it."""
    four, both = init_device_mesh(device, (4,)), init_device_mesh(device, (2, 2))
    ways: dict[str, Divide] = {
        ALONE: divides(None),
        "rows": divides(four, Shard(0)),
        "columns": divides(four, Shard(1)),
        "replicas": divides(four, Replicate()),
        "rows and replicas": divides(both, Replicate(), Shard(0)),
        "rows and columns": divides(both, Shard(0), Shard(1)),
        "replicas twice": divides(both, Replicate(), Replicate()),
    }
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in CASES:
        found |= {f"{case} by {way}": partial(updated, case, divide, device) for way, divide in ways.items()}
        found[f"{case} by copies"] = partial(updated, case, ways[ALONE], device, DistributedDataParallel)
        found[f"{case} by a plain model"] = partial(updated, case, ways[ALONE], device, lambda module: module)
    return found


def owned_flop(case: str, way: str, rank: int) -> int:
    """The FLOPs of the matrices that a process owns: every fourth, the largest first, and of experts whole ones that are here."""

    def of_owner(shapes: list[tuple[int, int]], owner: int, n: int) -> int:
        return sum(sorted((Hidden(*shape, count=1).flop for shape in shapes), reverse=True)[owner::n])

    experts = [EXPERTS[1:]] * EXPERTS[0]
    if way in ("copies", "replicas"):
        found = of_owner(SHAPES + experts, rank, 4)
    elif way == "rows and replicas":  # ranks 0 and 1 are a copy
        found = of_owner(SHAPES, rank, 4) + of_owner(experts[: 3 if rank % 2 == 0 else 2], rank // 2, 2)
    else:
        found = of_owner(SHAPES, rank, 4) + of_owner(experts[: (2, 2, 1, 0)[rank]], 0, 1)
    return STEPS * found * CASES[case][1].get("ns_steps", NEWTON_SCHULZ_STEPS) // NEWTON_SCHULZ_STEPS


def leaves_to_each(device: str) -> dict[str, Any]:
    """A matrix that DistributedDataParallel was told to leave alone, of other values and gradients in each process."""
    torch.manual_seed(dist.get_rank())
    module: Any = nn.Module()
    module.own, module.lm_head, module.embed = nn.Linear(6, 8), nn.Linear(4, 4), nn.Embedding(4, 4)
    module = module.to(device)
    twin = copy.deepcopy(module)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "own.bias"])
    for model, given in ((module, DistributedDataParallel(module)), (twin, twin)):
        optimizer: Any = sk.Muon(given, lr=0.1)
        model.own.weight.grad = model.own.weight.detach().cos()
        optimizer.step()
    return {"left": torch.equal(module.own.weight, twin.own.weight)}
