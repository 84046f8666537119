"""The systems of `bench gpu`: started, warmed up, kept open while they take turns, closed.

A system of ours is a process of surokit.bench.worker, another library's one of surokit.bench.peers; all of them read the same
tokens from the same file. In a rehearsal ours live in this process, on the CPU and with a tiny shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from surokit.bench.configurations import MODELS, TINY, Configuration, Work
from surokit.bench.process import Failed, Worker, left_s, understood

_ROWS = 2048  # of tokens, at least: so long an epoch that its end is rare


class System(Protocol):
    """What answers: process.Worker, or Here."""

    ready: dict[str, Any]

    def ask(self, request: Mapping[str, Any], timeout_s: float = ...) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Here:
    """A system in this process."""

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


@dataclass
class Opened:
    """A system that trains and is warm. first: what it took until then, and the losses on the way; each_s: of a step."""

    system: System
    first: dict[str, Any]
    each_s: float


class Systems:
    """Those of one call, under their names; leaving the block closes what is open. folder: for tokens.

    until_s, of time.monotonic, is when a system has to have answered.
    """

    def __init__(self, work: Work, warm_up: int, rehearse: bool, folder: Path) -> None:
        self.work, self.warm_up, self.rehearse, self.folder = work, warm_up, rehearse, folder
        self.device = "cpu" if rehearse else "cuda"
        self.open: dict[str, Opened] = {}
        self._missing: dict[str, str] = {}

    def shape(self, model: str) -> dict[str, Any]:
        return TINY if self.rehearse else MODELS[model]

    def training(
        self, c: Configuration, until_s: float, sample_every: int = 0, environment: Mapping[str, str] | None = None
    ) -> Opened:
        """The open system of that name, or a new one after its warm-up. Raises Failed."""
        if c.name not in self.open:
            system = self._peer(c, until_s) if c.peer else self._ours(self._task(c, sample_every), until_s, environment)
            try:
                self.open[c.name] = self._warm(system, until_s)
            except BaseException:
                system.close()
                raise
        return self.open[c.name]

    def _warm(self, system: System, until_s: float) -> Opened:
        first = system.ask({"steps": 1}, left_s(until_s))
        second = system.ask({"steps": max(1, self.warm_up - 1)}, left_s(until_s))
        steady = system.ask({"steps": max(1, self.warm_up // 4)}, left_s(until_s))
        took = {
            "build_s": system.ready.get("build_s"),
            "first_step_s": first["seconds"],
            "warm_up_s": second["seconds"],
            "warm_up_steps": 1 + second["steps"],
            "losses": first["losses"] + second["losses"],
            "note": system.ready.get("note", ""),
            "versions": system.ready.get("versions", {}),
        }
        return Opened(system, took, max(steady["seconds"] / steady["steps"], 1e-6))

    def preparing(self, until_s: float) -> System:
        """The process of checks and ceilings."""
        if "" not in self.open:
            self.open[""] = Opened(self._ours({"kind": "prepare"}, until_s), {}, 0.0)
        return self.open[""].system

    def close(self, name: str | None = None) -> None:
        """The system of that name, or all."""
        for each in list(self.open) if name is None else [name]:
            if each in self.open:
                self.open.pop(each).system.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        return Worker(argv, "The worker", left_s(until_s), environment)

    def _peer(self, c: Configuration, until_s: float) -> System:
        if c.peer in self._missing:
            raise Failed(self._missing[c.peer], "missing")
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
        argv = [sys.executable, "-m", "surokit.bench.peers", "--worker", c.peer, json.dumps(task)]
        try:
            return Worker(argv, c.peer, left_s(until_s))
        except Failed as problem:
            if problem.why == "missing":  # it will be missing the next time too
                self._missing[c.peer] = str(problem)
            raise

    def _corpus(self, vocab: int) -> tuple[Path, Path]:
        """Files of tokens [S, T] and of where the documents of each row begin [S, M]."""
        tokens, documents = self.folder / f"tokens-{vocab}.npy", self.folder / f"documents-{vocab}.npy"
        if not documents.exists():
            import numpy as np

            from surokit.bench.corpus import corpus

            ids_ST, starts_SM = corpus(vocab, self.work.length, self.work.batch * self.work.accumulate)
            repeats = -(-_ROWS // len(ids_ST))
            np.save(tokens, np.tile(ids_ST.astype(np.int32), (repeats, 1)))
            np.save(documents, np.tile(starts_SM, (repeats, 1)))
        return tokens, documents
