"""Four processes that train one model with Session(parallel=...), over gloo, on a CPU: run by test_spread.py once.

    python -m tests.parallel.spread_ranks RANK FOLDER [JOB ...]

Each rank goes through every job, or through those that are named, and writes what it found to rankN.pt. A job that raises ends its
process, with its traceback written, since the others are in another collective by then. Where there are GPUs the same jobs run on
those, over NCCL if each rank has one of its own (tests/gpu/test_parallel.py).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import surokit as sk
from surokit import convert
from surokit.optim.tensors import local
from surokit.parallel.processes import join
from surokit.train import NonFiniteError
from surokit.train.stream import Batch
from tests.parallel import matrices
from tests.parallel.layouts import LAYOUTS, RANKS
from tests.train.ranks import ADAM, CASES, CONFIG, RECIPES, Case, is_sharded, make
from tests.train.toys import Toy, make_batches

STEPS = 3
ROWS, TOKENS = 1, 64


def batches(count: int = 2 * RANKS) -> list[Batch]:
    """Batches with different numbers of labels that count; the third has none."""
    generator = torch.Generator().manual_seed(5)
    found: list[Batch] = []
    for i in range(count):
        ids = torch.randint(CONFIG.vocab, (ROWS, TOKENS), generator=generator)
        labels = ids.clone()
        labels[:, : TOKENS if i == 2 else 20 * (i % 3)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def measured(
    case: Case, parallel: sk.Parallel | None, accumulate: int, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """What a session records, and the weights that it ends with; a session on several processes finds its device itself."""
    model = make(case).to(device)
    session = sk.Session(
        model,
        batches(),
        optimizer=case.optimizer,
        schedule=None,
        clip=0.5,
        accumulate=accumulate,
        parallel=parallel,
        eval=batches(RANKS + 1),
        **options,
    )
    session.run(STEPS)
    return {
        "losses": [r.loss for r in session.records],
        "norms": [r.grad_norm for r in session.records],
        "targets": [r.targets for r in session.records],
        "tokens": session.tokens,
        "eval": session.evaluate(),
        "in_force": convert.scaling_state(model).get("in_force"),
        "own": [whole(p) for p in model.parameters() if p.requires_grad and not hasattr(p, "to_local")],
        "graphs": session.graphs.state,
        "zero": session.plan_arguments().get("zero"),
    }


def whole(p: Tensor) -> Tensor:
    return p.detach().clone()


# -- jobs: what is done in every process


def _optimizers() -> dict[str, Case]:
    """Optimizers whose state is on the host, in 8 bits, or drawn, or that need whole matrices.

    A recipe without scales keeps the comparison sharp.
    """
    zenflow: Any = sk.ZenFlow(lr=1e-3, topk_ratio=0.25, update_interval=2, select_interval=2, select_strategy="step")
    offload: Any = sk.OffloadAdamW(lr=1e-3)
    found = {
        "ZenFlow": zenflow,
        "OffloadAdamW": offload,
        **{name: ADAM[name] for name in ("AdamW8bit", "AdamW, stochastic", "Muon")},
    }
    return {name: Case(sk.BF16, torch.bfloat16, optimizer) for name, optimizer in found.items()}


OPTIMIZERS = _optimizers()


CHANGING = {"changes": Case(sk.FP8.then(sk.FP8_ROWWISE, at=1))}  # its recipe, after a step


def learns(case: Case, layout: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: measured(case, LAYOUTS[layout], 1)


def accumulates(layout: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: measured(CASES["bf16"], LAYOUTS[layout], 2)


def whence(path: Path) -> dict[str, Callable[[str], nn.Module]]:
    """Models by where they are made: drawn or read, with experts or without."""
    return {
        "read": lambda device: sk.load(path, device=device),
        "drawn": lambda device: sk.Decoder(replace(CONFIG, ffn=64), device=device, dtype=torch.bfloat16),
        "experts": lambda device: sk.Decoder(
            replace(CONFIG, ffn=64, experts=4, experts_per_token=2), device=device, dtype=torch.bfloat16
        ),
    }


def write_model(path: Path) -> None:
    torch.manual_seed(7)
    sk.save(sk.Decoder(CONFIG, dtype=torch.bfloat16), path)


DEFERRED = {"bf16": sk.BF16, "fp8": sk.FP8, "qfp8": sk.QFP8.lora(rank=4), "qnf4": sk.QNF4.lora(rank=4)}


def trained(
    make: Callable[[str], nn.Module], device: str, recipe: sk.Recipe, layout: sk.Parallel, accumulate: int
) -> list[float]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # what the first would draw counts
    session = sk.Session(
        make(device), batches(), recipe=recipe, parallel=layout, accumulate=accumulate, schedule=None, clip=0.5
    )
    session.run(2)
    return [r.loss for r in session.records] + [r.grad_norm for r in session.records]


def is_deferred(folder: Path) -> dict[str, Any]:
    """Models without values, which each process fills with its part."""
    path = folder / "model"
    if dist.get_rank() == 0:
        write_model(path)
    dist.barrier()
    found: dict[str, Any] = {}
    for name, recipe in DEFERRED.items():
        for source, made in whence(path).items():
            for layout in ("copies", "both"):
                if layout == "both" and not is_sharded(Case(recipe)):
                    continue
                found[f"{name}, {source}, {layout}"] = trained(made, "meta", recipe, LAYOUTS[layout], 1)
    return found


def holds_little(folder: Path) -> dict[str, Any]:
    """The most memory that making a session takes, in bytes, of a model of many equal blocks."""
    config = replace(CONFIG, layers=16, ffn=256, vocab=32)
    whole_bytes = sum(p.nbytes for p in sk.Decoder(config, device="meta").parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        session = sk.Session(sk.Decoder(config, device="meta"), batches(), parallel=LAYOUTS["shards"])
    own = sum(p.to_local().nbytes for p in session.model.parameters())  # type: ignore[attr-defined]
    return {"whole": whole_bytes, "most": most_in(profile), "own": own}


def most_in(profile: Any) -> int:
    """The most bytes that a profiled block held at once, of what it allocated."""
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def is_planned(folder: Path) -> dict[str, Any]:
    """The most memory that a step takes, in bytes, beside the plan of the session that takes it."""
    config = replace(CONFIG, width=256, ffn=512, layers=8, vocab=512, max_length=256)
    ids = torch.randint(512, (2, 256), generator=torch.Generator().manual_seed(0))
    found = {}
    for layout, parallel in LAYOUTS.items():
        model = sk.Decoder(config, dtype=torch.bfloat16)
        session = sk.Session(
            model, [{"input_ids": ids, "labels": ids}], recipe=sk.BF16, parallel=parallel, schedule=None
        )
        session.run(2)
        state = [v for held in session.optimizer.state.values() for v in held.values() if isinstance(v, Tensor)]
        before = sum(t.nbytes for t in local([*session.model.parameters(), *state]))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            session.run(1)
        plan = sk.plan(config, recipe=sk.BF16, dtype="bf16", gpu="H100", **session.plan_arguments())
        found[layout] = before + most_in(profile), max(phase.bytes for phase in plan.memory.phases)
    return found


class Counts(TorchDispatchMode):
    """Counts the bytes of collectives inside of it, by name: of what a process gives."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.nbytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket).rpartition(".")[2].strip("_")
        if function.namespace == "c10d" and name in self.names:
            tensors = args[0] if name in ("allreduce", "broadcast") else [args[1]]
            if sum(t.numel() for t in tensors) > 1:  # a loss or a number of labels is no gradient
                self.nbytes[name] = self.nbytes.get(name, 0) + sum(t.nbytes for t in tensors)
        return function(*args, **(kwargs or {}))


WIRED = {
    "bf16": sk.BF16,
    **{name: sk.recipes[name] for name in ("fp8", "fp8-rowwise", "fp8-block", "mxfp8")},
    **{name: sk.recipes[name].lora(rank=4) for name in ("qfp8", "qfp4", "qnf4")},
}


def is_counted(folder: Path) -> dict[str, Any]:
    """What one step moves, counted, beside what was foretold."""
    found: dict[str, Any] = {}
    for name, recipe in WIRED.items():
        for layout in ("copies", "shards", "zero-2"):
            if layout != "copies" and not is_sharded(Case(recipe)):
                continue
            config = replace(CONFIG, width=256, ffn=511)  # which no number of processes divides
            model = sk.Decoder(config, dtype=torch.bfloat16)
            session = sk.Session(model, batches(), recipe=recipe, parallel=LAYOUTS[layout], schedule=None)
            session.run(1)
            with Counts("allreduce", "allgather_base", "reduce_scatter_base") as counts:
                session.run(1)
            wire = session.wire()
            weights = sum(flow.forward + flow.backward for flow in wire.flows)
            found[f"{name}, {layout}"] = counts.nbytes, weights, wire.gradients
        if is_sharded(Case(recipe)):
            model = sk.Decoder(replace(CONFIG, width=256, ffn=512), dtype=torch.bfloat16)
            wire = sk.Session(model, batches(), recipe=recipe, parallel=LAYOUTS["shards"]).wire()
            found[f"{name}, divided evenly"] = {flow.what: flow.per_element for flow in wire.flows}
    return found


def is_asked(folder: Path) -> dict[str, Any]:
    """The second process is asked to save and then to stop; the first is asked by a file."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    session = sk.Session(
        Toy(),
        make_batches(),
        parallel=LAYOUTS["copies"],
        schedule=None,
        run_dir=folder / "asked",
        save_every=1000,
        keep=None,
    )

    class Asks:
        def on_step(self, record: Any) -> None:
            if rank == 1 and record.step == 3:
                session.control.save()
            if rank == 1 and record.step == 6:
                session.control.stop("stopped: by the second")

        def on_end(self, reason: str) -> None:
            found.setdefault("reasons", []).append(reason)

    session.subscribe(Asks())
    session.run(1000)
    found["steps"] = session.steps
    assert session.run_dir is not None
    found["saved"] = sorted(path.name for path in (session.run_dir / "checkpoints").iterdir())
    dist.barrier()

    class Writes(Asks):
        def on_step(self, record: Any) -> None:
            if rank == 3 and record.step == 9:
                (folder / "asked" / "stop").write_text("by a file")

    session.subscribe(Writes())
    session.run(100_000)
    found["by a file"] = session.steps
    session.run(minutes=0)
    found["after no minutes"] = session.steps
    found["folder"] = session.run_dir.name
    dist.barrier()
    last = sk.Session(Toy(), make_batches(), parallel=LAYOUTS["copies"], schedule=None, run_dir=folder / "last")

    class AtLast(Asks):
        def on_step(self, record: Any) -> None:
            if rank == 2 and record.step == 3:
                last.control.save()

    last.subscribe(AtLast())
    last.run(3)
    found["saved last"] = (folder / "last" / "checkpoints" / "step-000003").is_dir()
    other = sk.Session(Toy(), make_batches(), parallel=LAYOUTS["copies"], run_dir=folder / "asked")
    assert other.run_dir is not None
    found["second folder"] = other.run_dir.name
    try:
        sk.Session(Toy(), make_batches(), parallel=LAYOUTS["copies"], run_dir=folder / "asked", exist="error")
    except FileExistsError as error:
        found["refused"] = str(error)
    return found


def is_not_finite(folder: Path) -> dict[str, Any]:
    """One process' weights give NaN on one batch: nobody's step counts."""
    model = Toy()
    data = make_batches(2 * RANKS)
    for batch in data[::RANKS]:  # of the first process, which has nothing to learn and is not blamed
        batch["labels"].fill_(-100)
    session = sk.Session(model, data, parallel=LAYOUTS["copies"], schedule=None, max_skipped=3)
    session.run(2)
    before = whole(model.lm_head.weight)
    if dist.get_rank() == 2:  # a forward of this process alone
        model.hidden.register_forward_hook(lambda module, args, output: output * torch.nan)
    found: dict[str, Any] = {}
    try:
        session.run(5)
    except NonFiniteError as error:
        found["error"] = str(error)
    found["steps"] = session.steps
    found["kept"] = torch.equal(before, model.lm_head.weight)
    found["finding"] = str(session.findings[0])
    return found


def begins_as_the_first(folder: Path) -> dict[str, Any]:
    """Each process makes other weights, and draws other random numbers in training."""
    rank = dist.get_rank()
    model = Toy(seed=rank, dropout=0.5)
    first = torch.equal(model.embed.weight, Toy(seed=0).embed.weight)
    session = sk.Session(model, make_batches(), parallel=LAYOUTS["copies"])
    same = torch.equal(model.embed.weight, Toy(seed=0).embed.weight)
    seen: list[Tensor] = []
    model.drop.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    session.run(1)
    return {"own": first, "same": same, "dropped": (seen[0] == 0)}


def tells_the_slowest(folder: Path) -> dict[str, Any]:
    """The third process waits for its data, as it says."""
    session = sk.Session(Toy(), make_batches(), parallel=LAYOUTS["copies"], schedule=None)
    pace = session.measuring.pace
    assert pace is not None
    session.run(1)
    if dist.get_rank() == 2:
        pace.waited(1e9)  # ms
    session.run(9)
    told = session.records.column("slowest_rank"), session.records.column("slowest_ms")
    return {"told": [[*map(float, column)] for column in told]}


class Seen(nn.Module):
    """A model that remembers which batches it was given, by their first token."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy(dropout=0.0)
        self.ids: list[int] = []

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.ids += input_ids[:, 0].tolist()
        return self.toy(input_ids % 32, labels if labels is None else labels % 32)


def numbered() -> Any:
    """A shuffled DataLoader of 22 rows, each with its number, in batches of one: no multiple of what a step takes."""
    rows = [{"input_ids": torch.full((6,), i), "labels": torch.full((6,), i)} for i in range(22)]
    return DataLoader(rows, batch_size=1, shuffle=True)  # type: ignore[arg-type]


def sees(parallel: sk.Parallel | None, accumulate: int, steps: Sequence[int]) -> list[list[int]]:
    """The numbers of the rows that each run of so many steps took, in order."""
    model = Seen()
    session = sk.Session(model, numbered(), parallel=parallel, accumulate=accumulate, schedule=None, seed=3)
    found = []
    for count in steps:
        model.ids.clear()
        session.run(count)
        found.append([*model.ids])
    return found


def shares_the_data(folder: Path) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # the caller's own numbers are no part of it
    return {"seen": sees(LAYOUTS["copies"], 1, (5, 4))}


def refuses(folder: Path) -> dict[str, Any]:
    found = {}
    for name, parallel in (("three", sk.Parallel(shard=3)), ("six", sk.Parallel(shard=2, replicate=3))):
        try:
            sk.Session(Toy(), make_batches(), parallel=parallel)
        except ValueError as error:
            found[name] = str(error)
    model = sk.parallelize(Toy(), sk.Parallel())
    try:
        sk.Session(model, make_batches(), parallel=sk.Parallel())
    except ValueError as error:
        found["twice"] = str(error)
    session = sk.Session(Toy(), make_batches(), parallel=LAYOUTS["copies"])
    try:
        session.fork()
    except RuntimeError as error:
        found["fork"] = str(error)
    return found


def own_loop(folder: Path) -> dict[str, Any]:
    """A loop of one's own: gradients are means over the processes."""
    rank, found = dist.get_rank(), {}
    data = make_batches(RANKS)
    for name in ("copies", "shards"):
        model = Toy(dropout=0.0)
        forward = sk.parallelize(model, LAYOUTS[name])
        forward(**data[rank]).loss.backward()
        grads = [p.grad for p in model.parameters()]
        found[name] = [whole(g.full_tensor() if hasattr(g, "full_tensor") else g) for g in grads if g is not None]
    return found


def written(parallel: sk.Parallel | None) -> list[list[list[int]]]:
    """The tokens that a session's model writes before its first step and after it."""
    session = sk.Session(make(CASES["bf16"]), batches(), parallel=parallel, schedule=None)
    prompts = batches(1)[0]["input_ids"][:, :8].to(session.device)
    first = sk.generate(session.model, prompts, 8).tolist()
    session.run(1)
    return [first, sk.generate(session.model, prompts, 8).tolist()]


def writes(folder: Path) -> dict[str, Any]:
    return {layout: written(LAYOUTS[layout]) for layout in ("copies", "shards", "zero-2")}


def shares_matrices_out(folder: Path) -> dict[str, Any]:
    device = join(LAYOUTS["copies"]).device.type
    found = {name: job() for name, job in matrices.jobs(device).items()} | matrices.leaves_to_each(device)
    return found | {layout: in_a_step(LAYOUTS[layout]) for layout in ("copies", "shards")}


def in_a_step(parallel: sk.Parallel) -> dict[str, float]:
    """The FLOPs that this process computes when a session's Muon takes a step, and the bytes that it gives to exchanges."""
    spec: Any = sk.Muon(lr=1e-3)
    session = sk.Session(make(CASES["bf16"]), batches(), optimizer=spec, parallel=parallel, schedule=None)
    flop, sent = FlopCounterMode(display=False), Counts("broadcast", "alltoall_base")
    counting = ExitStack()

    def begin(*_: Any) -> None:
        counting.enter_context(flop)
        counting.enter_context(sent)

    session.optimizer.register_step_pre_hook(begin)
    session.optimizer.register_step_post_hook(lambda *_: counting.close())
    session.run(1)
    return {"flop": flop.get_total_flops(), "bytes": sum(sent.nbytes.values())}


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{f"{name}, copies": learns(CASES[name], "copies") for name in RECIPES},
    **{f"{name}, both": learns(CASES[name], "both") for name in ("bf16", "fp8", "fp8-block", "qfp8", "qfp4")},
    **{f"{name}, {layout}": learns(CASES[name], layout) for name in ("bf16", "fp8") for layout in ("shards", "zero-2")},
    "changes, copies": learns(CHANGING["changes"], "copies"),
    "changes, shards": lambda folder: measured(
        CHANGING["changes"], replace(LAYOUTS["shards"], communicate="numbers"), 1
    ),
    **{
        f"{name} by {layout}": learns(case, layout)
        for name, case in OPTIMIZERS.items()
        for layout in ("copies", "shards", "both")
    },
    **{f"accumulates, {layout}": accumulates(layout) for layout in ("copies", "shards")},
    "is deferred": is_deferred,
    "holds little": holds_little,
    "is planned": is_planned,
    "is counted": is_counted,
    "is asked": is_asked,
    "is not finite": is_not_finite,
    "tells the slowest": tells_the_slowest,
    "begins as the first": begins_as_the_first,
    "shares the data": shares_the_data,
    "refuses": refuses,
    "own loop": own_loop,
    "writes": writes,
    "shares matrices out": shares_matrices_out,
}


def on_host(found: Any) -> Any:
    """What a job found, with its tensors in the host's memory."""
    if isinstance(found, dict):
        return {name: on_host(value) for name, value in found.items()}
    if isinstance(found, list):
        return [on_host(value) for value in found]
    return found.cpu() if isinstance(found, Tensor) else found


def can(name: str) -> bool:
    recipe, _, layout = name.partition(", ")
    return layout in ("", "copies") or recipe not in CASES or is_sharded(CASES[recipe])


def main(rank: int, folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = f"file://{folder / 'meeting'}"
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(rank % gpus)
    backend = "cpu:gloo,cuda:nccl" if gpus >= RANKS else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        if not can(name) or (names and name not in names):
            continue
        try:
            found[name] = on_host(job(folder))
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
