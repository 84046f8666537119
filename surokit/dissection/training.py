"""Take the training steps of a cell, and say how fast they were, what one of them held, and where the time of a few more went."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surokit.dissection import memory as memories
from surokit.dissection.job import Job, started
from surokit.dissection.loop import set_adapters
from surokit.dissection.planned import figures_of
from surokit.dissection.settings import Setting
from surokit.dissection.summed import summed
from surokit.dissection.work import BEFORE, PROFILED, WARM_UP, Work
from surokit.offload import OffloadAdamW, ZenFlow, offload_activations
from surokit.optim.adamw import AdamW, AdamW8bit
from surokit.optim.muon import Muon
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
        self._running: Profile | None = None
        batches = (WARM_UP + job.steps + 1 + 2 * (BEFORE + PROFILED)) * setting.accumulate * setting.gpus
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
            meters=[self._mark],
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
        planned, graphed = figures_of(self.planned), None
        if self.session.graphs.state == "on":
            # a replayed graph calls no hook: modules and phases of memory are those of steps without
            graphed = self._profiled()
            self.session.engine.give_up_graphs("a dissection measures memory and modules in eager steps")
            planned = {**figures_of(self.planned), "step_ms": planned.get("step_ms")}
        memory, profiled = self._memory(), self._profiled()
        if graphed is not None:
            profiled = graphed.named_by(profiled)
        if self.job.keep and rank_here().is_first:
            profiled.save(self.job.keep)
        return {"memory": memory, "planned": planned, "profile": summed(profiled)}

    def _profiled(self) -> Profile:
        with profile(steps=PROFILED, warmup=BEFORE) as self._running:
            self.session.run(BEFORE + PROFILED)
        found, self._running = self._running, None
        return found

    def _mark(self, session: Session) -> dict[str, Tensor]:
        """End a step of the profile that runs: a replayed graph calls no optimizer that would."""
        if self._running is not None:
            self._running.step()
        return {}

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
    known: tuple[Any, ...] = AdamW, AdamW8bit, Muon, OffloadAdamW, ZenFlow
    made = {optimizer.__name__.lower(): optimizer for optimizer in known}
    return made[setting.optimizer](lr=lr)
