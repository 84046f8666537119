"""Start and warm up the systems of `bench gpu`.

A system of surokit is a process of surokit.bench.worker, another library's one of surokit.bench.peers; all of them read the
same tokens from the same file. In a rehearsal surokit's live in this process, on the CPU and with a tiny shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surokit.bench import baselines
from surokit.bench.configurations import MODELS, SMALL, TINY, BenchWork, Configuration
from surokit.bench.process import Failed, Worker, left_s, understood
from surokit.bench.turns import Running, System

_ROWS = 2048  # of tokens, at least: so long an epoch that its end is rare


class Here:
    """A Here is a system in this process."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        from surokit.bench.worker import serve

        self.ready, self._answer = serve(task)

    def ask(self, request: Mapping[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        try:
            answer = self._answer(request)
        except Exception as error:  # as a process says it
            raise Failed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return understood(json.loads(json.dumps(answer)))

    def close(self) -> None:
        del self._answer


class Systems:
    """Systems starts the systems of one call. folder: for tokens. until_s, of time.monotonic, is when a system has to have
    answered."""

    def __init__(self, work: BenchWork, warm_up: int, rehearse: bool, folder: Path) -> None:
        self.work, self.warm_up, self.rehearse, self.folder = work, warm_up, rehearse, folder
        self.device = "cpu" if rehearse else "cuda"

    def shape(self, model: str) -> dict[str, Any]:
        return TINY if self.rehearse else SMALL if model == "small" else MODELS[model]

    def missing(self, c: Configuration) -> str:
        """Return what another library lacks here, in words; "" where it runs, and for surokit's own systems."""
        if not c.peer:
            return ""
        why = baselines.missing(baselines.SYSTEMS[c.peer], {"train": c.train, "device": self.device})
        return f"{c.peer}: {why}" if why else ""

    def training(
        self, c: Configuration, until_s: float, sample_every: int = 0, environment: Mapping[str, str] | None = None
    ) -> Running:
        """Start a new system, and return it after its warm-up. Raises Failed."""
        system = self._peer(c, until_s) if c.peer else self._ours(self._task(c, sample_every), until_s, environment)
        return Running(system, self.warm_up, until_s, steady=max(1, self.warm_up // 4))

    def preparing(self, until_s: float, environment: Mapping[str, str] | None = None) -> System:
        """Start a process of checks and ceilings."""
        return self._ours({"kind": "prepare"}, until_s, environment)

    def _task(self, c: Configuration, sample_every: int) -> dict[str, Any]:
        tokens, documents = self._corpus(self.shape(c.model)["vocab"])
        return {
            "kind": "train",
            "configuration": c.to_dict(),
            "shape": self.shape(c.model),
            "work": asdict(self.work),
            "tokens": str(tokens),
            "documents": str(documents),
            "sample_every": sample_every,
        }

    def _ours(self, task: Mapping[str, Any], until_s: float, environment: Mapping[str, str] | None = None) -> System:
        task = {**task, "device": self.device}
        if self.rehearse:
            return Here(task)
        argv = [sys.executable, "-m", "surokit.bench.worker", json.dumps(task)]
        return Worker(argv, "The worker", left_s(until_s), environment, clocks=True)

    def _peer(self, c: Configuration, until_s: float) -> System:
        task = {
            "model": {**self.shape(c.model), "max_length": self.work.length},
            **asdict(self.work),
            "train": c.train,
            "recompute": c.recompute,
            "settings": "equal",
            "tokens": str(self._corpus(self.shape(c.model)["vocab"])[0]),
            "device": self.device,
            "seed": 0,
        }
        return baselines.worker(c.peer, task, left_s(until_s))

    def _corpus(self, vocab: int) -> tuple[Path, Path]:
        """Return the files of tokens [S, T] and of the first tokens of the documents of each row [S, M]."""
        tokens, documents = self.folder / f"tokens-{vocab}.npy", self.folder / f"documents-{vocab}.npy"
        if not documents.exists():
            import numpy as np

            from surokit.bench.corpus import corpus

            ids_ST, starts_SM = corpus(vocab, self.work.length, self.work.batch * self.work.accumulate)
            repeats = -(-_ROWS // len(ids_ST))
            np.save(tokens, np.tile(ids_ST.astype(np.int32), (repeats, 1)))
            np.save(documents, np.tile(starts_SM, (repeats, 1)))
        return tokens, documents
