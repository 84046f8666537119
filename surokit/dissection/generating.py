"""Generate as a cell says: the forward over the prompts, and the steps behind it that each make a token of every row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from surokit import convert
from surokit.applied import recipe_of
from surokit.dissection import memory as memories
from surokit.dissection.job import Job, started
from surokit.dissection.planned import figures_of
from surokit.dissection.summed import summed
from surokit.models.decoder import Decoder
from surokit.models.generation import Generation
from surokit.planner import plan
from surokit.profiler import Profile, profile
from surokit.racing.comparability import digest_of

WARM_UP = 2
PREFILLS = 3  # that are timed
PROFILED, BEFORE = 3, 2


class Generating:
    """A Generating is a decoder that writes tokens behind prompts, greedily and with a static cache of keys and values."""

    def __init__(self, job: Job, device: torch.device) -> None:
        setting = job.setting
        assert isinstance(setting.batch, int)
        self.job, self.device = job, device
        model, self.weights = started(job, device)
        if not isinstance(model, Decoder):
            raise TypeError(
                f"dissect(what='infer'): a {type(model).__name__} has a generate() of its own, whose steps cannot be taken one by "
                "one: save it, and give the folder, which is loaded as a surokit.Decoder."
            )
        if setting.full_recipe != recipe_of(model):
            convert.apply(model, setting.full_recipe)
        self.model = model.eval()
        self.tokens = WARM_UP + job.steps + 1 + BEFORE + PROFILED + 1  # the first is the prefill's
        self.step_ms: list[float] = []
        self.prefill_ms: list[float] = []
        self.writing: Generation

    def work(self) -> dict[str, Any]:
        """Return what says whether two cells did the same work."""
        s, parameters = self.job.setting, list(self.model.parameters())
        return {
            "weights": self.weights,
            "batch": s.batch,
            "length": s.length,
            "gpus": 1,
            "parameters": sum(p.numel() for p in parameters),
            "tokens_per_step": s.batch,
        }

    def steps(self) -> bool:
        """Take the prefills and the steps that are timed."""
        self._generation().prefill()  # what is made on first use
        self.prefill_ms = [self._timed(self._generation().prefill) for _ in range(PREFILLS)]
        self.writing = self._generation()
        self.writing.prefill()
        for _ in range(WARM_UP):
            self.writing.step()
        self.step_ms = [self._timed(self.writing.step) for _ in range(self.job.steps)]
        return True

    def observe(self, found: dict[str, Any]) -> bool:
        """Fill in what the steps were, what prefill and a step hold, and where each spends its time."""
        found["step_ms"] = self.step_ms
        found["work"] |= {"prefill_ms": self.prefill_ms, "output": digest_of([self.writing.ids])}
        found["memory"] |= self._memory()
        found["planned"] = self._planned()
        found["profile"] = {**summed(self._profiled(self.writing.step)), "prefill": self._prefill()}
        return True

    def fits(self, batch: int) -> bool:
        """Return whether the prefill and a step of this batch fit; what they took is given back."""
        try:
            writing = self._generation(batch)
            writing.prefill()
            int(writing.step()[0])
            return True
        except Exception as error:
            if not memories.is_out_of_memory(error):
                raise
            return False
        finally:
            memories.give_back(self.device)

    def planned_batch(self, gib: float | None) -> int:
        """Return the largest batch by plan, 1 where that is not known."""
        try:
            return max(
                1, plan(self.model, training=False, batch=1, length=self.job.setting.length).largest("batch", gib=gib)
            )
        except (ValueError, TypeError):
            return 1

    def _generation(self, batch: int | None = None) -> Generation:
        s, vocabulary = self.job.setting, self.model.config.vocab
        rows = s.batch if batch is None else batch
        assert isinstance(rows, int)
        ids = self.job.tokens.batches(1, rows, s.length, vocabulary)[0]["input_ids"].to(self.device)
        return Generation(self.model, ids, self.tokens, eos_id=())

    def _timed(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - began)

    def _profiled(self, call: Callable[[], object]) -> Profile:
        with profile(steps=PROFILED, warmup=BEFORE, tokens=self.job.setting.batch, sample=False) as found:  # type: ignore[arg-type]
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
        s = self.job.setting
        forward = figures_of(lambda: plan(self.model, training=False, batch=s.batch, length=s.length, gpu=self.job.gpu))  # type: ignore[arg-type]
        try:
            served = plan(self.model, training=False, gpu=self.job.gpu).serving(s.length, self.tokens, s.batch)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return {**forward, "step_ms": None}
        return {**forward, "step_ms": served.token_ms, "prefill_ms": served.prefill_batch_ms}
