"""Processes that save and resume a sharded model over gloo, on a CPU: run by test_sharded_checkpoint.py, which compares.

    python -m tests.train.sharded_checkpoint_ranks RANK FOLDER RANKS RUNS

Four processes begin every case, save it and go on; two and then three resume what others saved. Each writes rank<n>.pt: what it
held of weights and moments when it saved and when it had loaded, and its losses.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import surokit as sk
from surokit.train import AdamW, AdamW8bit, CheckpointError, Muon, Session, Spec
from tests.train.ranks import shard
from tests.train.toys import Toy, make_batches

# 161 and 65 rows divide by no number of processes; rank 4 leaves nothing for the last of three
CONFIG = sk.DecoderConfig(layers=1, width=64, heads=2, kv_heads=1, vocab=65, ffn=161, tied=True)
BATCHES, ROWS, TOKENS = 3, 12, 32
FIRST, SAVED = 4, 2  # so many processes begin, and save after so many steps

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model under a recipe, and an optimizer."""

    recipe: sk.Recipe
    optimizer: Spec
    dtype: torch.dtype = torch.float32


def _zenflow() -> Spec:
    # saved in the middle of a window, with gradients summed
    spec: Any = sk.ZenFlow(lr=1e-3, topk_ratio=0.25, update_interval=3, select_interval=3, select_strategy="step")
    return spec


def _offload() -> Spec:
    spec: Any = sk.OffloadAdamW(lr=1e-3)
    return spec


CASES = {
    "bf16": Case(sk.BF16, Spec(AdamW, {"lr": 1e-3})),
    "fp8": Case(
        sk.FP8, Spec(AdamW, {"lr": 1e-3, "state_dtype": torch.float32, "rounding": "stochastic"}), torch.bfloat16
    ),
    "qfp4": Case(sk.QFP4.lora(rank=4), Spec(AdamW, {"lr": 1e-3})),
    "8-bit": Case(sk.BF16, Spec(AdamW8bit, {"lr": 1e-3})),
    "muon": Case(sk.BF16, Spec(Muon, {"lr": 1e-3, "rounding": "stochastic"}), torch.bfloat16),
    "offload": Case(sk.BF16, _offload()),
    "zenflow": Case(sk.BF16, _zenflow()),
}


class Data:
    """Batches of which each process takes its rows; the same data for any number of them."""

    fingerprint = "rows"

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        generator = torch.Generator().manual_seed(1)
        every = [torch.randint(CONFIG.vocab, (ROWS, TOKENS), generator=generator) for _ in range(BATCHES)]
        self._batches = [{"input_ids": ids[rank::ranks], "labels": ids[rank::ranks]} for ids in every]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def make(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = sk.Decoder(CONFIG, dtype=case.dtype)
    sk.apply(model, case.recipe)
    return model


def sharded(case: Case, seed: int = 0) -> nn.Module:
    model = make(case, seed)
    shard(model)
    return model


def begin(case: Case, model: nn.Module, data: Data, run_dir: Path | None) -> Session:
    return Session(model, data, optimizer=case.optimizer, schedule=None, clip=1.0, run_dir=run_dir, keep=None)


def state_of(session: Session) -> Result:
    """What this process holds of weights and the optimizer's state, copied; `divided`: which weights are in pieces."""
    tensors = session.model.state_dict()
    weights = {name: local(t) for name, t in tensors.items()}
    divided = [name for name, t in tensors.items() if hasattr(t, "to_local")]
    names = {p: name for name, p in session.model.named_parameters()}
    states = session.optimizer.state_dict()["state"]
    params = [p for group in session.optimizer.param_groups for p in group["params"]]
    state = {
        names[p]: {key: local(torch.as_tensor(value)) for key, value in states[i].items()}
        for i, p in enumerate(params)
        if i in states
    }
    return {"weights": weights, "state": state, "divided": divided}


def local(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.to_local() if hasattr(t, "to_local") else t).clone()


def losses(session: Session) -> list[float]:
    return [record.loss for record in session.records if record.step > 0]


def first(case: Case, rank: int, run_dir: Path) -> Result:
    """Train, save in a thread while training goes on, and resume from there."""
    data = Data(rank, FIRST)
    session = begin(case, sharded(case), data, run_dir if rank == 0 else None)
    session.run(SAVED)
    result: Result = {"saved": state_of(session)}
    result["path"] = str(session.save(wait=False))
    session.run(2)
    result |= {"unbroken": state_of(session), "losses": losses(session)}
    again = Session.resume(result["path"], sharded(case, seed=1), data=data)
    result["loaded"] = state_of(again)
    again.run(2)
    return result | {"resumed": state_of(again), "again": losses(again)[-2:], "notes": notes(again)}


def onward(case: Case, rank: int, ranks: int, run_dir: Path) -> Result:
    """Resume what as many processes as there were before have saved, take a step and save."""
    session = Session.resume(run_dir, sharded(case, seed=ranks), data=Data(rank, ranks))
    result: Result = {"loaded": state_of(session), "step": session.steps}
    if ranks == 2 and case is CASES["bf16"]:
        session, found = full_disk(session, rank)
        result |= found
    session.run(1)
    session.save()
    return result | {"saved": state_of(session), "losses": losses(session)[-1:], "notes": notes(session)}


def full_disk(session: Session, rank: int) -> tuple[Session, Result]:
    """A save for which one process has no room, and a session that begins again where this one did."""
    before, steps = state_of(session), session.steps
    session.run(1)
    trained = state_of(session)
    with mock.patch("torch.save", side_effect=OSError(28, "No space left on device")) if rank == 1 else nullcontext():
        try:
            session.save()
        except CheckpointError as error:
            refused = str(error)
    untouched = same(trained, state_of(session))
    last = refused.split("last good checkpoint is ")[1].split(":")[0]
    again = Session.resume(last, session.model, data=session.data.source)
    untouched = untouched and same(before, state_of(again)) and again.steps == steps
    return again, {"refused": refused, "untouched": untouched}


def same(one: Result, other: Result) -> bool:
    pairs = [(one["weights"], other["weights"])]
    pairs += [(one["state"][name], other["state"][name]) for name in one["state"]]
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def to_write() -> dict[str, nn.Module]:
    """Models whose folders are compared: plain weights, codes and scales, experts, an adapter."""
    torch.manual_seed(3)
    experts = sk.DecoderConfig(
        layers=1, width=64, heads=2, kv_heads=1, vocab=65, ffn=48, experts=5, expert_ffn=128, qk_norm=True, tied=False
    )
    models: dict[str, nn.Module] = {"plain": sk.Decoder(CONFIG), "experts": sk.Decoder(experts)}
    for name, recipe in (
        ("codes of 8 bits", sk.BF16.store(sk.QFP8)),
        ("codes of 4 bits", sk.BF16.store(sk.QFP4)),
        ("experts of 8 bits", sk.BF16.store(sk.QFP8)),
        ("adapted", sk.QFP8.lora(rank=4)),
    ):
        models[name] = sk.Decoder(experts if "experts" in name else CONFIG)
        sk.apply(models[name], recipe)
    return models


def write(model: nn.Module, name: str, folder: Path) -> None:
    if name == "adapted":
        sk.save_adapter(model, folder / name)
    else:
        sk.save(model, folder / name, shard_gib=2e-5)  # several files


def folders(runs: Path) -> Result:
    for name, model in to_write().items():
        shard(model)
        write(model, name, runs / "folders")
    (runs / "a file").touch()
    try:
        sk.save(sharded(CASES["bf16"]), runs / "a file")
    except CheckpointError as error:
        return {"refused": str(error)}
    return {}


def hybrid(rank: int, runs: Path) -> Result:
    """Two copies of a model in two shards each: what both have is written once. And a run that begins with a folder of rank 0."""
    case, data, mesh = (
        CASES["fp8"],
        Data(rank, FIRST),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")),
    )

    def session(seed: int) -> Session:
        model = make(case, seed)
        shard(model, mesh)
        run_dir = runs / "hybrid" if rank == 0 else None
        return Session(model, data, optimizer=case.optimizer, schedule=None, run_dir=run_dir, exist="resume")

    first = session(0)
    first.run(1)
    path = first.save()
    again = session(1)
    result = {"saved": state_of(first), "same": same(state_of(first), state_of(again)), "step": again.steps}
    written = sum(file.stat().st_size for file in path.glob("*.distcp"))
    return result | {"written": written, "path": str(path)}


def copies(rank: int, runs: Path) -> Result:
    """A model that every process holds as a whole, with dropout: rank 0 writes it, and each its own random states."""
    data = make_batches(3, seed=rank)

    def model(seed: int) -> nn.Module:
        return nn.parallel.DistributedDataParallel(Toy(seed, dropout=0.5))

    options: dict[str, Any] = {"optimizer": Spec(AdamW, {"lr": 1e-2}), "schedule": None}
    session = Session(model(0), data, seed=rank, run_dir=runs / "copies" if rank == 0 else None, **options)
    session.run(2)
    path = session.save()
    files = sorted(file.name for file in path.iterdir())  # all is there when any process goes on
    session.run(2)
    again = Session.resume(path, model(1), data=data)
    again.run(2)
    return {"files": files, "same": same(state_of(session), state_of(again)), "losses": losses(again)}


def notes(session: Session) -> list[str]:
    return [event["text"] for event in session.journal.events if event["kind"] == "note"]


def main(rank: int, folder: Path, ranks: int, runs: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            run_dir = runs / name
            found[name] = first(case, rank, run_dir) if ranks == FIRST else onward(case, rank, ranks, run_dir)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    if ranks == FIRST:
        found["hybrid"] = hybrid(rank, runs)
    if ranks == 2:
        found["copies"] = copies(rank, runs)
        found["folders"] = folders(runs)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
