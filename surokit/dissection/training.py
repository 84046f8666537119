"""Take the training steps of a cell, and say how fast they were, what one of them held, and where the time of a few more went."""

from __future__ import annotations

from typing import Any

import torch

from surokit.dissection import memory as memories
from surokit.dissection.job import Job, started
from surokit.dissection.loop import set_adapters
from surokit.dissection.planned import figures_of
from surokit.dissection.settings import Setting
from surokit.dissection.summed import summed
from surokit.dissection.work import BEFORE, PROFILED, WARM_UP, Work
from surokit.offload import OffloadAdamW, ZenFlow, offload_activations
from surokit.optim.adamw import AdamW, AdamW8bit
from surokit.optim.spec import Spec
from surokit.parallel.layout import Parallel
from surokit.planner import Plan, plan
from surokit.profiler import Profile, profile
from surokit.ranks import rank_here
from surokit.train.session import Session
from surokit.train.setup import Vocabulary


class Training(Work):
    """A Training is a session as the setting says; what runs out of memory does so in `steps`, or while it is made."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__(job, device)
        setting = job.setting
        self.model, self.weights = started(job, device)
        batches = (WARM_UP + job.steps + BEFORE + PROFILED + BEFORE + 1 + 1) * setting.accumulate * setting.gpus
        parallel = None
        if setting.gpus > 1:
            parallel = Parallel(shard=setting.gpus if setting.zero else 1, reshard=setting.zero != 2)
        if setting.lora:
            set_adapters(self.model)  # the same as other engines'
        self.session = Session(
            self.model,
            job.tokens.batches(batches, self.batch, setting.length, Vocabulary.of(self.model).size),
            optimizer=optimizer_of(setting, job.lr),
            accumulate=setting.accumulate,
            schedule=None,
            seed=job.seed,
            compile=setting.compile,
            parallel=parallel,
        )
        if setting.offload_activations:
            offload_activations(self.model)

    def steps(self) -> dict[str, Any]:
        self.session.run(WARM_UP)
        ms = self.timed(lambda: self.session.run(self.job.steps))
        return {
            "step_ms": [ms / self.job.steps],
            "losses": self.session.records.column("loss").tolist(),
            "work": {"tokens_per_step": self.session.tokens_per_step},
        }

    def observe(self) -> dict[str, Any]:
        planned = figures_of(self.planned)
        profiled = self._profiled(PROFILED)
        # a replayed graph calls no hook: modules and phases of memory are those of steps without
        if self.session.engine.give_up_graphs("a dissection measures memory and modules in eager steps"):
            planned = {**figures_of(self.planned), "step_ms": planned.get("step_ms")}
            profiled = profiled.named_by(self._profiled(1))
        if self.job.keep and rank_here().is_first:
            profiled.save(self.job.keep)
        return {"memory": self._memory(), "planned": planned, "profile": summed(profiled)}

    def _profiled(self, steps: int) -> Profile:
        with profile(steps=steps, warmup=BEFORE) as found:
            self.session.run(BEFORE + steps)
        return found

    def attempt(self, batch: int) -> None:
        s = self.job.setting
        batches = self.job.tokens.batches(s.accumulate, batch, s.length, self.session.vocabulary.size)
        float(self.session.step(batches).loss)

    def planned(self, **changes: Any) -> Plan:
        return plan(self.session, gpu=self.job.gpu, **changes)

    def _memory(self) -> dict[str, Any]:
        """Measure one step: bytes held before it by term, and the most in each phase."""
        model, optimizer = self.model, self.session.optimizer
        rest = memories.held(model, optimizer)
        with memories.listening(self.device, rest, model, optimizer) as (_, found):
            self.session.run(1)
        return found


def optimizer_of(setting: Setting, lr: float) -> Any:
    if isinstance(setting.optimizer, Spec):
        return setting.optimizer
    if setting.optimizer == "sgd":
        return lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)
    made = {"adamw": AdamW, "adamw8bit": AdamW8bit, "offloadadamw": OffloadAdamW, "zenflow": ZenFlow}
    return made[setting.optimizer](lr=lr)
