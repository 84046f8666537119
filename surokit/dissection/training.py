"""Take the training steps of a cell, and say how fast they were, what one of them held, and where the time of a few more went."""

from __future__ import annotations

from typing import Any

import torch

from surokit import convert
from surokit.applied import recipe_of
from surokit.dissection import memory as memories
from surokit.dissection.job import Job, started
from surokit.dissection.loop import set_adapters
from surokit.dissection.planned import figures_of
from surokit.dissection.settings import Setting
from surokit.dissection.summed import summed
from surokit.offload import OffloadAdamW, ZenFlow, offload_activations
from surokit.optim.adamw import AdamW, AdamW8bit
from surokit.optim.spec import Spec
from surokit.parallel.layout import Parallel
from surokit.planner import plan
from surokit.profiler import profile
from surokit.ranks import rank_here
from surokit.train.session import Session
from surokit.train.setup import Vocabulary

WARM_UP = 2
PROFILED, BEFORE = 3, 2  # steps that are profiled, and those before them


class Training:
    """A Training is a session as the setting says; what runs out of memory does so in `steps`, or while it is made."""

    def __init__(self, job: Job, device: torch.device) -> None:
        setting = job.setting
        assert isinstance(setting.batch, int)
        self.job = job
        self.model, self.weights = started(job, device)
        batches = (WARM_UP + job.steps + 1 + BEFORE + PROFILED) * setting.accumulate * setting.processes
        parallel = None
        if setting.processes > 1:
            parallel = Parallel(shard=setting.processes if setting.zero else 1, reshard=setting.zero != 2)
        if setting.full_recipe != recipe_of(self.model):
            convert.apply(self.model, setting.full_recipe)
        if setting.lora:
            set_adapters(self.model)  # the same as other engines'
        self.session = Session(
            self.model,
            job.tokens.batches(batches, setting.batch, setting.length, Vocabulary.of(self.model).size),
            optimizer=optimizer_of(setting, job.lr),
            accumulate=setting.accumulate,
            schedule=None,
            seed=job.seed,
            compile=setting.compile,
            parallel=parallel,
        )
        if setting.offload_activations:
            offload_activations(self.model)

    def work(self) -> dict[str, Any]:
        """Return what says whether two cells did the same work."""
        s, parameters = self.job.setting, list(self.model.parameters())
        return {
            "weights": self.weights,
            "batch": s.batch,
            "length": s.length,
            "accumulate": s.accumulate,
            "gpus": s.processes,
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
        }

    def steps(self) -> bool:
        """Take the steps that are timed, after those of the warm-up; False where somebody stopped them."""
        return self._run(WARM_UP + self.job.steps)

    def observe(self, found: dict[str, Any]) -> bool:
        """Fill in what the steps were, what one more holds, and where a few more spend their time; False as `steps`."""
        records = self.session.records
        found["work"]["tokens_per_step"] = self.session.tokens_per_step
        found["step_ms"] = records.column("wall_ms")[-self.job.steps :].tolist()
        found["losses"] = records.column("loss")[-WARM_UP - self.job.steps :].tolist()
        found["memory"] |= self._memory()
        found["planned"] = figures_of(lambda: plan(self.session, gpu=self.job.gpu))
        with profile(steps=PROFILED, warmup=BEFORE) as profiled:
            ended = self._run(PROFILED + BEFORE)
        if ended:
            found["profile"] = summed(profiled)
            if self.job.keep and rank_here().is_first:
                profiled.save(self.job.keep)
        return ended

    def fits(self, batch: int) -> bool:
        """Return whether a step of this batch fits; what it took is given back."""
        session, setting = self.session, self.job.setting
        batches = self.job.tokens.batches(setting.accumulate, batch, setting.length, session.vocabulary.size)
        try:
            float(session.step(batches).loss)
            return True
        except Exception as error:
            if not memories.is_out_of_memory(error):
                raise
            return False
        finally:
            self.model.zero_grad(set_to_none=True)
            memories.give_back(session.device)

    def planned_batch(self, gib: float | None) -> int:
        """Return the largest batch by plan, 1 where that is not known."""
        try:
            return max(1, plan(self.session, batch=1, length=self.job.setting.length).largest("batch", gib=gib))
        except (ValueError, TypeError):
            return 1

    def _run(self, steps: int) -> bool:
        before = self.session.steps
        self.session.run(steps)
        return self.session.steps == before + steps

    def _memory(self) -> dict[str, Any]:
        """Measure one step: bytes held before it by term, and the most in each phase."""
        model, optimizer = self.model, self.session.optimizer
        rest = memories.held(model, optimizer)
        with memories.listening(self.session.device, rest, model, optimizer) as (_, found):
            self.session.run(1)
        return found


def optimizer_of(setting: Setting, lr: float) -> Any:
    if isinstance(setting.optimizer, Spec):
        return setting.optimizer
    if setting.optimizer == "sgd":
        return lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)
    made = {"adamw": AdamW, "adamw8bit": AdamW8bit, "offloadadamw": OffloadAdamW, "zenflow": ZenFlow}
    return made[setting.optimizer](lr=lr)
