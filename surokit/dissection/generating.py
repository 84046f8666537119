"""Generate as a cell says: the forward over the prompts, and the steps behind it that each make a token of every row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from surokit.dissection import memory as memories
from surokit.dissection.job import Job, started
from surokit.dissection.planned import figures_of
from surokit.dissection.summed import summed
from surokit.dissection.work import BEFORE, PROFILED, WARM_UP, Work
from surokit.models.decoder import Decoder
from surokit.models.generation import Generation
from surokit.planner import Plan, plan
from surokit.profiler import Profile, profile
from surokit.racing.comparability import digest_of

PREFILLS = 3  # that are timed


class Generating(Work):
    """A Generating is a decoder that writes tokens behind prompts, greedily and with a static cache of keys and values."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__(job, device)
        model, self.weights = started(job, device)
        if not isinstance(model, Decoder):
            raise TypeError(
                f"dissect(what='infer'): a {type(model).__name__} has a generate() of its own, whose steps cannot be taken one by "
                "one: save it, and give the folder, which is loaded as a surokit.Decoder."
            )
        self.model = self.decoder = model.eval()
        self.tokens = WARM_UP + job.steps + 1 + BEFORE + PROFILED + 1  # the first is the prefill's
        self.step_ms: list[float] = []
        self.prefill_ms: list[float] = []
        self.writing: Generation

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "tokens_per_step": self.batch}

    def steps(self) -> bool:
        self._generation().prefill()  # what is made on first use
        self.prefill_ms = [self._timed(self._generation().prefill) for _ in range(PREFILLS)]
        self.writing = self._generation()
        self.writing.prefill()
        for _ in range(WARM_UP):
            self.writing.step()
        self.step_ms = [self._timed(self.writing.step) for _ in range(self.job.steps)]
        return True

    def observe(self, found: dict[str, Any]) -> bool:
        found["step_ms"] = self.step_ms
        found["work"] |= {"prefill_ms": self.prefill_ms, "output": digest_of([self.writing.ids])}
        found["memory"] |= self._memory()
        found["planned"] = self._planned()
        found["profile"] = {**summed(self._profiled(self.writing.step)), "prefill": self._prefill()}
        return True

    def attempt(self, batch: int) -> None:
        writing = self._generation(batch)
        writing.prefill()
        int(writing.step()[0])

    def planned(self, **changes: Any) -> Plan:
        given = {"batch": self.batch, "length": self.job.setting.length, **changes}
        return plan(self.model, training=False, gpu=self.job.gpu, **given)

    def _generation(self, batch: int | None = None) -> Generation:
        rows = self.batch if batch is None else batch
        ids = self.job.tokens.batches(1, rows, self.job.setting.length, self.decoder.config.vocab)[0]["input_ids"]
        return Generation(self.model, ids.to(self.device), self.tokens, eos_id=())

    def _timed(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - began)

    def _profiled(self, call: Callable[[], object]) -> Profile:
        with profile(steps=PROFILED, warmup=BEFORE, tokens=self.batch, sample=False) as found:
            for _ in range(PROFILED + BEFORE):
                call()
                found.step()
        return found

    def _prefill(self) -> dict[str, Any]:
        waiting = [self._generation() for _ in range(PROFILED + BEFORE)]
        found = self._profiled(lambda: waiting.pop().prefill())
        if self.job.keep:
            found.save(self.job.keep)
        return summed(found)

    def _memory(self) -> dict[str, Any]:
        """Measure a prefill and a step: bytes held before by term, the cache among them, and the most in each."""
        writing = self._generation()
        rest = memories.held(self.model, None)
        rest["KV cache"] = writing.cache.nbytes
        rest["others"] = max(0, rest["others"] - writing.cache.nbytes)

        with memories.listening(self.device, rest) as (meter, found):
            meter.mark("prefill")
            writing.prefill()
            meter.mark("decode")
            writing.step()
        return found

    def _planned(self) -> dict[str, Any]:
        forward = figures_of(self.planned)
        try:
            served = self.planned(batch=None, length=None).serving(self.job.setting.length, self.tokens, self.batch)
        except (ValueError, TypeError):
            return {**forward, "step_ms": None}
        return {**forward, "step_ms": served.token_ms, "prefill_ms": served.prefill_batch_ms}
