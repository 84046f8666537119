"""Two processes under FSDP2 over gloo, on a CPU: run by test_parallel.py once, each process in an interpreter of its own.

    python -m tests.train.ranks RANK FOLDER

Each rank runs every case on its half of the batch and writes rank0.pt or rank1.pt: for each case what it measured. Gathered
tensors are written by rank 0 only. A case that raises ends its process, since the other one is by then in another collective;
what it had found so far is written, with the traceback. test_parallel.py computes the same cases in a single process with the
functions here, and compares.

The processes find each other through a file, so that no port has to be free, and talk over the loopback interface.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import surokit as sk
from surokit import convert
from surokit.train import AdamW, AdamW8bit, Muon, Session, Spec

RANKS = 2
STEPS = 3
# a rank's half has 2 x 64 = 128 tokens, so that blocks of 16, 32 and 128 tokens are the same in the halves and in the whole;
# 161 and 65 rows do not divide by two, and 161 columns by no block
CONFIG = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=65, ffn=161)
BATCH, TOKENS = 4, 64

Result = dict[str, Any]


def _stored(recipe: sk.Recipe, storage: sk.Quantizer) -> sk.Recipe:
    return recipe.store(storage).lora(rank=4)


def _storages() -> dict[str, sk.Recipe]:
    """Each storage under products that multiply its codes as they are, or in bfloat16."""
    return {
        "qfp8": sk.QFP8.lora(rank=4),
        "qfp4": sk.QFP4.lora(rank=4),
        "qnf4": sk.QNF4.lora(rank=4),
        "fp8-current over its own": _stored(sk.FP8_CURRENT, sk.Quantizer(sk.E4M3, sk.PerTensor())),
        "fp8-rowwise over its own": _stored(sk.FP8_ROWWISE, sk.Quantizer(sk.E4M3, sk.PerRow())),
        "fp8-block over qfp8": sk.FP8_BLOCK.store(sk.QFP8).lora(rank=4),
        "mxfp8 over its own": _stored(sk.MXFP8, sk.Quantizer(sk.E4M3, sk.MX(32))),
        "mxfp4 over its own": _stored(sk.MXFP4, sk.Quantizer(sk.E2M1, sk.MX(32))),
        "fp4 over its own": _stored(sk.FP4, sk.Quantizer(sk.E2M1, sk.NV(16, 16))),
        "bf16 over nf4": _stored(sk.BF16, sk.Quantizer(sk.NF4, sk.NFBlock(64))),
    }


STORAGES = _storages()
RECIPES = {name: recipe for name, recipe in sk.recipes.items() if not recipe.storage} | STORAGES


@dataclass(frozen=True)
class Case:
    """A model under a recipe, trained for STEPS steps."""

    recipe: sk.Recipe
    dtype: torch.dtype = torch.float32
    optimizer: Spec = field(default_factory=lambda: Spec(AdamW, {"lr": 1e-3}))
    calibrated: bool = True  # delayed scaling starts from one pass over both halves


ADAM = {
    "AdamW": Spec(AdamW, {"lr": 1e-3}),
    "AdamW, float32 moments": Spec(AdamW, {"lr": 1e-3, "state_dtype": torch.float32}),
    "AdamW, stochastic": Spec(AdamW, {"lr": 1e-3, "rounding": "stochastic"}),
    "AdamW8bit": Spec(AdamW8bit, {"lr": 1e-3}),
    "AdamW8bit, stochastic": Spec(AdamW8bit, {"lr": 1e-3, "rounding": "stochastic"}),
    "Muon": Spec(Muon, {"lr": 1e-3}),
    "Muon, stochastic": Spec(Muon, {"lr": 1e-3, "rounding": "stochastic"}),
}
_F32, _BF16 = torch.float32, torch.bfloat16
CASES: dict[str, Case] = {
    **{name: Case(recipe) for name, recipe in RECIPES.items()},
    **{f"{name} in bfloat16": Case(RECIPES[name], _BF16) for name in ("fp8", "fp8-block", "fp4", "qfp4")},
    "fp8 without a past": Case(sk.FP8, calibrated=False),
    **{f"{name} of bfloat16": Case(sk.BF16, _BF16, optimizer) for name, optimizer in ADAM.items()},
    "AdamW8bit of float32": Case(sk.BF16, _F32, ADAM["AdamW8bit"]),
}


SESSIONS = ("bf16", "qfp4")  # each in a session too


def is_sharded(case: Case) -> bool:
    """Whether torch can: before 2.13 it shards no parameter of integers, in which codes of 4 bits are kept."""
    storage = case.recipe.storage
    return storage is None or storage.format.bits == 8 or torch.__version__ >= "2.13"


def halves() -> list[Tensor]:
    """The ranks' token ids [B / 2, T]."""
    ids = torch.randint(CONFIG.vocab, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return list(ids.chunk(RANKS))


def loss_of(model: nn.Module, ids: Tensor, step: int, rank: int) -> Tensor:
    """The loss of one half, or of the whole batch; stochastic rounding draws anew for each step and rank."""
    torch.manual_seed(1000 * step + rank)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def make(case: Case) -> nn.Module:
    """The same model in every process, before it is sharded."""
    torch.manual_seed(0)
    model = sk.Decoder(CONFIG, dtype=case.dtype)
    sk.apply(model, case.recipe)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zeros would leave A without a gradient
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
    model.train()
    if case.calibrated and convert.scaling_state(model):
        for rank, ids in enumerate(halves()):
            loss_of(model, ids, -1, rank).backward()
        convert.roll_scales(model)
        model.zero_grad(set_to_none=True)
    return model


def train(case: Case, model: nn.Module, gradients: Callable[[int], float], full: Callable[[Tensor], Tensor]) -> Result:
    """STEPS steps. `gradients(step)` leaves averaged gradients and returns the loss; `full` gathers a parameter."""
    optimizer = case.optimizer.build(model)
    result: Result = {"losses": [], "open": [], "in_force": []}
    for step in range(STEPS):
        result["losses"].append(gradients(step))
        if step == 0:
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            result["grads"] = {name: full(p.grad).clone() for name, p in trained if p.grad is not None}
            assert len(result["grads"]) == len(trained)
        result["open"].append(convert.scaling_state(model).get("open"))
        optimizer.step()
        result["in_force"].append(convert.scaling_state(model).get("in_force"))
        optimizer.zero_grad()
    result["params"] = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    result["optimizer"] = optimizer
    return result


# -- one of two processes


def shard(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """As torch's guide has it: block by block, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(p: Tensor) -> Tensor:
    """The whole of a sharded parameter. gloo moves no 8-bit floats, so they travel as bytes."""
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor), "not sharded"
    local = p.to_local()
    assert local.shape[0] < p.shape[0] or p.shape[0] == 1, "not sharded"
    if p.itemsize > 1:
        return p.full_tensor()
    stored = DTensor.from_local(
        local.view(torch.uint8), p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False
    )
    return stored.full_tensor().view(p.dtype)


def run_case(case: Case, rank: int) -> Result:
    model = make(case)
    shard(model)
    ids = halves()[rank]

    def gradients(step: int) -> float:
        loss = loss_of(model, ids, step, rank)
        loss.backward()
        return loss.item()

    result = train(case, model, gradients, gathered)
    optimizer = result.pop("optimizer")
    result["keys"] = [state["key"].tolist() for state in optimizer.state.values() if "key" in state]
    result["restored"] = restored(case, model, optimizer, gradients)
    return result if rank == 0 else {**result, "grads": None, "params": None}


def run_session(case: Case, rank: int) -> Result:
    model = make(case)
    shard(model)
    return records(case, model, halves()[rank])


def records(case: Case, model: nn.Module, ids: Tensor) -> Result:
    """Losses and norms of the gradients in a session that clips them."""
    data = [{"input_ids": ids, "labels": ids}]
    session = Session(model, data, optimizer=case.optimizer, schedule=None, clip=0.5, compile=False)
    session.run(STEPS)
    return {"losses": [r.loss for r in session.records], "norms": [r.grad_norm for r in session.records]}


def restored(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Callable[[int], float]) -> bool:
    """Whether an optimizer that takes over the state takes the same next step, bit for bit, on this rank's shards."""
    gradients(STEPS)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    twin = case.optimizer.build(model)
    twin.load_state_dict(torch.load(stream, weights_only=True))
    trained = [p for p in model.parameters() if p.requires_grad]
    locals_ = [p.detach().to_local() for p in trained]  # type: ignore[attr-defined]
    before = [p.clone() for p in locals_]
    optimizer.step()
    expected = [p.clone() for p in locals_]
    for p, old in zip(locals_, before):
        p.copy_(old)
    twin.step()
    moved = any(not torch.equal(a, b) for a, b in zip(expected, before))
    return moved and all(torch.equal(a, b) for a, b in zip(expected, locals_))


@contextmanager
def together(rank: int, folder: Path) -> Iterator[None]:
    """A process group over the loopback interface; whoever waits for a process that is gone gives up after 30 s."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with together(rank, folder):
        jobs = [(name, run_case, case) for name, case in CASES.items()]
        jobs += [(f"{name} in a session", run_session, CASES[name]) for name in SESSIONS]
        for name, run, case in jobs:
            if not is_sharded(case):
                continue
            try:
                found[name] = run(case, rank)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
                break
        torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
