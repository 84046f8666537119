"""Train with DeepSpeed's engine: ZeRO in several processes, its optimizer on the host, and its ZenFlow.

Its schedule of ZenFlow is that of surokit.ZenFlow's defaults, in the words of DeepSpeed's configuration. On a CPU processes
exchange by gloo alone: its own exchange by shared memory would be compiled first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from shutil import which
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surokit.dissection.loop import BETAS, CLIP, DECAY, decayed
from surokit.offload.zenflow import SELECT_EVERY, UPDATE_EVERY
from surokit.parallel.layout import Parallel
from surokit.parallel.processes import join
from surokit.ranks import rank_here

#: ZenFlow's schedule; it chooses by steps, since epochs are those of a loader that it would make itself.
ZENFLOW: Mapping[str, Any] = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": SELECT_EVERY,
    "update_interval": UPDATE_EVERY,
    "full_warm_up_rounds": 0,
    "overlap_step": True,
}
BUCKET = 500_000_000  # elements of gradients that are reduced together, as DeepSpeed has it
ADAM, SHARED_MEMORY = "cpu_adam", "deepspeed_shm_comm"  # operators of DeepSpeed, that it compiles at first use


class DeepSpeedLoop:
    """A DeepSpeedLoop takes optimizer steps with DeepSpeed's engine, on a model whose forward returns a `.loss`.

    Every process of a launch makes one, and takes steps on batches of its own of `batch` rows, `accumulate` a step. zero: ZeRO's
    stage. offload: AdamW on the host, DeepSpeed's own; torch's otherwise. zenflow: the block of that name, which needs offload.
    decay: of matrices; the others have none, but in ZenFlow, whose hot parameters have one decay.

    ImportError where its AdamW has to be compiled, and nothing here compiles.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        batch: int,
        zero: int = 0,
        accumulate: int = 1,
        offload: bool = False,
        zenflow: Mapping[str, Any] | None = None,
        decay: float = DECAY,
    ) -> None:
        first = next(model.parameters())
        self.device = first.device
        deepspeed = _imported(self.device)
        if offload:
            check_compiles()
        _join(deepspeed)
        trained = [p for p in model.parameters() if p.requires_grad]
        parameters = decayed(trained, decay)
        bucket = min(BUCKET, sum(p.numel() for p in trained))  # a larger one is allocated, and never full
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": first.dtype == torch.bfloat16},
            "zero_optimization": {"stage": zero, "reduce_bucket_size": bucket},
            "steps_per_print": 10**9,
        }
        given: dict[str, Any] = {"model_parameters": parameters}
        if offload:
            config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
            config["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "betas": BETAS, "weight_decay": decay}}
        else:
            given = {"optimizer": torch.optim.AdamW(parameters, lr=lr, betas=BETAS)}
        if zenflow is not None:
            config["zero_optimization"] |= {"zenflow": dict(zenflow)}
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, config=config, **given)

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Take one optimizer step on the batches, and return their mean loss over all processes."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(batches)
        dist.all_reduce(total)
        return total / dist.get_world_size()


def _imported(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read on import
    deepspeed = import_module("deepspeed")
    if device.type == "cpu":
        import_module("deepspeed.ops").__compatible_ops__[SHARED_MEMORY] = False
    return deepspeed


def check_compiles() -> None:
    """Raise ImportError where DeepSpeed's AdamW on the host has to be compiled, and nothing here compiles."""
    if import_module("deepspeed.git_version_info").installed_ops.get(ADAM):
        return
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available  # 50 ms, in every process

    there = {"ninja": is_ninja_available(), "C++ compiler": which(get_cxx_compiler()) is not None}
    missing = [name for name, is_there in there.items() if not is_there]
    if missing:
        raise ImportError(
            f"DeepSpeed compiles its AdamW on the host ({ADAM}) at first use, and here is no {' and no '.join(missing)}: install "
            "it, or take optimizer=adamw."
        )


def _join(deepspeed: Any) -> None:
    """Make the process group that DeepSpeed uses."""
    world = rank_here().world
    if world > 1:
        join(Parallel(world))
    deepspeed.init_distributed(verbose=False)
