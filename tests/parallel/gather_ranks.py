"""Two processes under FSDP2 over gloo that gather codes: run by test_gather.py once, each process in an interpreter of its own.

    python -m tests.parallel.gather_ranks RANK FOLDER

Each case is trained twice from the same start, with what FSDP2 gathers by itself ("numbers") and with codes ("codes"). What each
process found is written to rank0.pt or rank1.pt, and compared by the test.
"""

from __future__ import annotations

import copy
import io
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as sharded_state
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import surokit as sk
from surokit import convert
from surokit.nn.linear import Linear
from surokit.parallel.gather import prepare
from surokit.parallel.layout import Communicate, Parallel
from surokit.parallel.processes import Processes
from surokit.parallel.wire import wire
from tests.train.ranks import RANKS, gathered, together

Result = dict[str, Any]
STEPS = 2
WIDTH, HIDDEN = 64, 161  # 161 rows do not divide by two, and blocks of 128 are cut
ALIGNED = 256  # two blocks of 128 rows, one for each process
F32, BF16 = torch.float32, torch.bfloat16
PROCESSES = Processes(Parallel(shard=RANKS, replicate=1))
ASIS = MixedPrecisionPolicy()
CAST = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
TRAINED = ("fp8", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "fp4", "mxfp4", "quartet-ii")
STORED = ("qfp8", "qfp4", "qnf4", "fp8-block+qfp8")


@dataclass(frozen=True)
class Case:
    """A model that is trained, and how.

    recompute: the checkpoint stands inside what is sharded, or around it. adapters: beside weights that do not train. from_zero:
    some weights are zero at first. prefetch: the next block's weights are asked for. asks: somebody asks for a block's weights.
    """

    recipe: str
    hidden: int = HIDDEN
    dtype: torch.dtype = F32
    policy: MixedPrecisionPolicy = ASIS
    reshard: bool = True
    recompute: str = ""
    micro_batches: int = 1
    on_meta: bool = False
    decoder: bool = False
    adapters: bool = False
    from_zero: bool = False
    prefetch: bool = False
    asks: bool = False


CASES: dict[str, Case] = {
    **{name: Case(name) for name in TRAINED},
    **{f"{name}, aligned": Case(name, hidden=ALIGNED) for name in ("fp8-block", "fp4")},
    **{f"{name}, cast": Case(name, policy=CAST) for name in ("fp8", "fp8-rowwise", "fp8-block", *STORED)},
    **{name: Case(name) for name in STORED},
    **{f"{name}, whole until backward": Case(name, reshard=False) for name in ("fp8", "fp8-rowwise", "qfp4")},
    **{f"fp8-rowwise, recomputed {where}": Case("fp8-rowwise", recompute=where) for where in ("inside", "around")},
    "fp8, recomputed around": Case("fp8", recompute="around"),
    "fp8-rowwise, accumulated": Case("fp8-rowwise", micro_batches=2),
    **{f"{name}, from meta": Case(name, dtype=BF16, on_meta=True) for name in ("fp8-block", "fp8-rowwise")},
    **{f"{name}, a decoder": Case(name, dtype=BF16, decoder=True) for name in ("fp8", "fp8-rowwise", "fp8-block", "qfp4")},
    "fp8, adapters": Case("fp8", adapters=True),
    "fp8, from zero": Case("fp8", from_zero=True),
    **{f"{name}, prefetched": Case(name, prefetch=True) for name in ("fp8-current", "fp8-rowwise")},
    **{f"{name}, asked for": Case(name, asks=True) for name in ("fp8-block", "fp8-rowwise")},
}  # fmt: skip


# -- the models


class Block(nn.Module):
    def __init__(self, hidden: int, recomputes: bool) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.computed, x, use_reentrant=False) if self.recomputes else self.computed(x)
        return x + y

    def computed(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.up_proj(x)))
        return y


class Model(nn.Module):
    def __init__(self, hidden: int, recompute: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, recompute == "inside") for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 7, bias=False)
        self.recomputes = recompute == "around"

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        y: Tensor = self.lm_head(x)
        return y


def make(case: Case) -> nn.Module:
    """The same model in every process, before it is sharded."""
    torch.manual_seed(0)
    if case.decoder:
        config = sk.DecoderConfig(layers=2, width=WIDTH, heads=2, kv_heads=1, vocab=65, ffn=case.hidden)
        model: nn.Module = sk.Decoder(config, dtype=case.dtype)
    else:
        model = Model(case.hidden, case.recompute).to(case.dtype)
    recipe = sk.recipes.get(case.recipe) or sk.FP8_BLOCK.store(sk.QFP8)
    sk.apply(model, recipe.lora(rank=4) if recipe.storage or case.adapters else recipe)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zeros would leave A without a gradient
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 0.02)
            elif case.from_zero and "down_proj.weight" in name:
                p.zero_()
    return model.train()


def shard(model: nn.Module, case: Case) -> None:
    blocks = model.model.layers if case.decoder else model.blocks  # type: ignore[union-attr]
    for block in cast(nn.ModuleList, blocks):
        fully_shard(block, mp_policy=case.policy, reshard_after_forward=case.reshard)
    fully_shard(model, mp_policy=case.policy)
    if case.prefetch:
        first, second = cast("list[FSDPModule]", blocks)
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def loss_of(model: nn.Module, case: Case, rank: int, step: int) -> Tensor:
    """The loss of this rank's own part of a batch; stochastic rounding draws anew for each step and rank."""
    torch.manual_seed(1000 * step + rank)
    if case.decoder:
        ids = torch.randint(65, (1, 32))
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    x = torch.randn(32, WIDTH, dtype=case.policy.param_dtype or case.dtype)
    y: Tensor = model(x)
    return y.float().square().mean()


# -- what is sent


class Sent(TorchDispatchMode):
    """Counts the bytes that a process receives in gathers and reductions, as the operators of torch's process groups see them."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[int] = []
        self.dtypes: set[str] = set()
        self.gradients = 0
        self.amaxes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if func.namespace == "c10d" else ""
        if "allgather" in name:
            self.gathers.append(args[0].nbytes - args[1].nbytes)
            self.dtypes.add(str(args[1].dtype))
        elif "reduce_scatter" in name:
            self.gradients += args[1].nbytes - args[0].nbytes
        elif "allreduce" in name:
            self.amaxes += sum(t.nbytes for t in args[0])
        return func(*args, **(kwargs or {}))


# -- one of two processes


def run_case(case: Case, communicate: Communicate, rank: int) -> Result:
    model = make(case)
    whole = {name: t.clone() for name, t in model.state_dict().items()}
    if case.on_meta:
        model = model.to("meta")
    shard(model, case)
    prepare(model, communicate)
    planned = wire(model, PROCESSES)
    if case.on_meta:
        model.to_empty(device="cpu")
        options = sharded_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        sharded_state.set_model_state_dict(model, whole if rank == 0 else {}, options=options)
    optimizer = sk.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    result: Result = {"losses": [], "norms": [], "planned": repr(planned), "sent": []}
    result["expected"] = {"weights": planned.gathered, "gradients": planned.gradients, "without": planned.without_codes}
    for step in range(STEPS):
        if case.asks:
            model.blocks[0].unshard()  # type: ignore[union-attr, index]
        with Sent() as sent:
            for part in range(case.micro_batches):
                cast(FSDPModule, model).set_requires_gradient_sync(part == case.micro_batches - 1)
                loss = loss_of(model, case, rank, 10 * step + part)
                loss.backward()
                result["losses"].append(loss.item())
        result["sent"].append(
            {
                "weights": sum(sent.gathers),
                "amaxes": sent.amaxes,
                "gradients": sent.gradients,
                "dtypes": sorted(sent.dtypes),
            }
        )
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.1).full_tensor()))  # type: ignore[attr-defined]
        result[f"grads {step}"] = {name: gathered(p.grad).clone() for name, p in trained.items() if p.grad is not None}
        assert len(result[f"grads {step}"]) == len(trained)
        optimizer.step()
        optimizer.zero_grad()
        result[f"scales {step}"] = convert.scaling_state(model)
    with torch.no_grad():
        result["losses"].append(loss_of(model.eval(), case, rank, -1).item())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    result["params"] = {name: gathered(p.detach()).clone() for name, p in model.named_parameters()}
    result["plain"] = is_plain(model)
    return result


def is_plain(model: nn.Module) -> bool:
    """Whether a state dict of shards is of ordinary tensors, which a load that trusts nobody takes back; parameters are too."""
    state = model.state_dict()
    local = [t.to_local() for t in state.values()]
    parameters: list[Any] = [*model.parameters()]
    if any(
        type(t) is not Tensor or vars(t).keys() - {"_is_param"} for t in (*local, *(p.to_local() for p in parameters))
    ):
        return False
    copy.deepcopy(parameters)
    stream = io.BytesIO()
    torch.save(dict(zip(state, local)), stream)
    stream.seek(0)
    model.load_state_dict(state)
    return torch.load(stream, weights_only=True).keys() == state.keys()


# -- codes of one weight

QUANTIZERS = {
    "row": sk.Quantizer(sk.E4M3, sk.PerRow()),
    "block": sk.Quantizer(sk.E4M3, sk.Block(128, 128)),
    "small block": sk.Quantizer(sk.E4M3, sk.Block(4, 4, pow2=False)),
    "tensor": sk.Quantizer(sk.E4M3, sk.PerTensor()),
    "mx": sk.Quantizer(sk.E4M3, sk.MX(32)),
    "mxfp4": sk.Quantizer(sk.E2M1, sk.MX(32)),
    "nv": sk.Quantizer(sk.E2M1, sk.NV(16, 16)),
    "nv row": sk.Quantizer(sk.E2M1, sk.NV(16)),
}
SHAPES = ((7, 96), (1, 64), (300, 160), (384, 64), (512, 256))


def weight_of(N: int, K: int, dtype: torch.dtype) -> Tensor:
    """A weight [N, K] of very large and very small rows, with zeros."""
    generator = torch.Generator().manual_seed(N + K)
    w = torch.randn(N, K, generator=generator) * torch.logspace(-6, 3, N).view(-1, 1)
    w[N // 2, : K // 2] = 0
    return w.to(dtype)


def codes_of(q: sk.Quantizer, N: int, K: int, spoilt: float | None = None) -> list[Tensor] | None:
    """What two processes gather of a weight: codes, scales, scales of the scales; None for numbers."""
    layer = nn.Linear(K, N, bias=False, dtype=BF16)
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.copy_(weight_of(N, K, BF16))
        if spoilt is not None:
            layer.weight[-1, -1] = spoilt
    sk.apply(model, sk.Recipe("one", forward=sk.Gemm(q, q)))
    fully_shard(model[0])
    fully_shard(model)
    prepare(model)
    seen: list[list[Tensor] | None] = []

    def look(layer: nn.Module, _: Any) -> None:  # in the layer's turn, behind which torch takes the memory back
        held = getattr(layer.weight, "held", None)
        seen.append([t.clone() for t in held.parts] if isinstance(held, sk.Quantized) else None)

    model[0].register_forward_pre_hook(look)
    model(torch.ones(2, K, dtype=BF16))
    return seen[0]


def stored_codes(recipe: str, N: int, K: int) -> list[Tensor]:
    """What two processes gather of a stored weight under a policy that casts."""
    layer = nn.Linear(K, N, bias=False, dtype=BF16)
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.copy_(weight_of(N, K, BF16))
    sk.apply(model, replace(sk.recipes[recipe], adapter=None))
    fully_shard(model[0], mp_policy=CAST)
    fully_shard(model)
    prepare(model)
    seen: list[list[Tensor]] = []

    def look(layer: nn.Module, _: Any) -> None:
        assert isinstance(layer, Linear)
        seen.append([t.detach().clone() for t in (layer.weight, *layer.stored_scales)])

    model[0].register_forward_pre_hook(look)
    model(torch.ones(2, K, dtype=BF16))
    return seen[0]


def run_codes() -> Result:
    found: Result = {}
    for name, q in QUANTIZERS.items():
        for N, K in SHAPES:
            found[f"{name} {N} x {K}"] = codes_of(q, N, K)
    for name in ("row", "block", "tensor"):
        for spoilt in (torch.nan, torch.inf):
            found[f"{name} {spoilt}"] = codes_of(QUANTIZERS[name], 300, 160, spoilt)
    for name in ("qfp8", "qfp4", "qnf4"):
        for N, K in SHAPES:
            found[f"{name} {N} x {K}"] = stored_codes(name, N, K)
    return found


# -- what is said of each parameter


def whys() -> dict[str, list[str]]:
    """What is gathered of the weights of small models that hold no data, and why."""
    q = QUANTIZERS["row"]
    found = {}
    for name, recipe in {
        "numbers": sk.BF16,
        "stochastic": sk.Recipe("one", forward=sk.Gemm(q, replace(q, rounding="stochastic"))),
        "only backward": sk.Recipe("one", grad_input=sk.Gemm(q, q)),
        "nv": sk.FP4,
        "row": sk.FP8_ROWWISE,
        "tied": sk.FP8,
        "compiled": sk.FP8,
        "by columns": sk.FP8,
        "cast before": sk.FP8,
        "as chosen": sk.FP8,
        "a narrow row": sk.FP8_ROWWISE,
    }.items():
        K = 2 if name == "a narrow row" else 64
        model = nn.Sequential(nn.Sequential(nn.Linear(K, 12, bias=False, dtype=BF16, device="meta")))
        block = cast(nn.Sequential, model[0])
        sk.apply(model, replace(recipe, rules=()))
        layer = cast(Linear, block[0])
        if name == "tied":
            block.append(nn.Linear(K, 12, bias=False, device="meta"))
            block[1].weight = layer.weight
        if name == "compiled":
            block.compile(backend="eager")
        if name == "cast before":
            layer.compute_dtype = F32
        fully_shard(block, shard_placement_fn=(lambda p: Shard(1)) if name == "by columns" else None)
        fully_shard(model)
        prepare(model, "numbers" if name == "as chosen" else "codes")
        found[name] = [f"{flow.what}: {flow.why}" for flow in wire(model, PROCESSES).flows]
    return found


@contextmanager
def noted(found: dict[str, Any], name: str) -> Iterator[None]:
    """What went wrong in a case, after which the processes end: the other one is in another collective by then."""
    try:
        yield
    except Exception:
        found[name] = {"error": traceback.format_exc()}
        raise


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with together(rank, folder):
        try:
            with noted(found, "codes"):
                found["codes"] = run_codes()
            with noted(found, "whys"):
                found["whys"] = whys()
            for name, case in CASES.items():
                with noted(found, name):
                    found[name] = {how: run_case(case, how, rank) for how in ("numbers", "codes")}
        finally:
            torch.save(found, folder / f"rank{rank}.pt")
            assert dist.get_world_size() == RANKS


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
