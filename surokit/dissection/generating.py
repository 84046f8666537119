"""Generate as a cell says: the forward over the prompts, and the steps behind it that each make a token of every row."""

from __future__ import annotations

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
        self.tokens = WARM_UP + job.steps + BEFORE + PROFILED + 1  # the first is the prefill's

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "tokens_per_step": self.batch}

    def steps(self) -> dict[str, Any]:
        self._generation().prefill()  # what is made on first use
        prefill_ms = [self.timed(self._generation().prefill) for _ in range(PREFILLS)]
        writing = self._written(WARM_UP)
        ms = self.timed(lambda: [writing.step() for _ in range(self.job.steps)])
        return {
            "step_ms": [ms / self.job.steps],
            "work": {"prefill_ms": prefill_ms, "output": digest_of([writing.ids])},
        }

    def observe(self) -> dict[str, Any]:
        decode = self._profiled(self._written(WARM_UP).step)
        return {
            "memory": self._memory(),
            "planned": self._planned(),
            "profile": {**summed(decode), "prefill": self._prefill()},
        }

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

    def _written(self, steps: int) -> Generation:
        """Return a Generation after the prefill and so many steps."""
        writing = self._generation()
        writing.prefill()
        for _ in range(steps):
            writing.step()
        return writing

    def _profiled(self, call: Callable[[], object]) -> Profile:
        with profile(steps=PROFILED, warmup=BEFORE, tokens=self.batch, sample=False) as found:
            for _ in range(PROFILED + BEFORE):
                call()
                found.step()
        return found

    def _prefill(self) -> dict[str, Any]:
        found = self._profiled(lambda: self._generation().prefill())  # with the cache that it fills
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
        if terms := forward.get("terms"):  # which have the cache of the prompts, without the tokens that are written
            more = terms["KV cache"] * self.tokens // self.job.setting.length
            forward["terms"] = {**terms, "KV cache": terms["KV cache"] + more}
            forward["peak"] += more
        try:
            served = self.planned(batch=None, length=None).serving(self.job.setting.length, self.tokens, self.batch)
        except (ValueError, TypeError):
            return {**forward, "step_ms": None}
        return {**forward, "step_ms": served.token_ms, "prefill_ms": served.prefill_batch_ms}
