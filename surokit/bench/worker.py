"""Run one system that trains inside a process of `bench gpu`, or the checks and ceilings that come before speed.

    python -m surokit.bench.worker '{"kind": "train", "configuration": {...}, ...}'

It says one JSON line when it is ready and one for every line that it is asked; see process.py. A rehearsal
calls `serve` in its own process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import surokit as sk
from surokit.bench import ceilings, correct, process
from surokit.bench.configurations import BenchWork, Configuration
from surokit.convert import apply
from surokit.data import Batches
from surokit.kernels import choices

_SDP = {"": (True, True), "flash": (False, True), "efficient": (False, False)}  # cuDNN's attention, flash attention


def serve(task: Mapping[str, Any]) -> tuple[dict[str, Any], process.Answers]:
    """Return (the first line, the function that answers a request) of a task: {"kind": "train" | "prepare", "device":
    "cuda" | "cpu", ...}."""
    device = torch.device(task["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if task["kind"] == "train":
        training = Training(task, device)
        return {"ready": True, "build_s": training.build_s, "note": training.note}, training.answer
    return {"ready": True}, lambda request: _prepare(request, device)


def _prepare(request: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Answer a request for ceilings, correctness or choices: {"device": seconds}, {"model": shape, ...}, {"check": {...}},
    {"choices": True}."""
    if "device" in request:
        return ceilings.device_ceilings(device, request["device"])
    if "model" in request:
        return ceilings.model_ceilings(request["model"], request["tokens"], device, request["seconds"])
    if "choices" in request:
        return _chosen(device)
    return correct.check(device=device, **request["check"])


def _chosen(device: torch.device) -> dict[str, Any]:
    """Return the kernel that serves each operation, as surokit.kernels chooses it; "missed" in words, where a form that
    comes before it cannot serve."""
    rows = choices(device)
    missed: dict[str, list[str]] = {}
    for row in rows:
        if row.missed:
            missed.setdefault(f"by {row.backend}: {row.why}", []).append(row.op)
    words = "; ".join(f"{', '.join(ops)} {how}" for how, ops in missed.items())
    return {"choices": [asdict(row) for row in rows], **({"missed": words} if words else {})}


class _WhenNeeded:
    """A _WhenNeeded gives batches that are copied when their step begins, on the stream that computes; the host waits for
    it. A session then finds them where it would take them to, and prefetches nothing."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.batches:
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}


class Training:
    """A Training is a session of one configuration on random weights. Its clock starts before the weights are made."""

    def __init__(self, task: Mapping[str, Any], device: torch.device) -> None:
        c, work = Configuration.from_dict(task["configuration"]), BenchWork(**task["work"])
        self.device, self.work = device, work
        self._profiled: sk.Profile | None = None
        self._choose_attention(c)
        began = time.perf_counter()
        torch.manual_seed(0)
        config = sk.DecoderConfig(**task["shape"], max_length=work.length)
        model = sk.Decoder(config, device=device, dtype=torch.bfloat16)
        apply(model, correct.recipe_of(c.recipe, c.train, work.rank, work.alpha, c.fast_dx))
        report = sk.fuse(model, c.fusion)
        optimizer = sk.AdamW if c.optimizer == "adamw" else sk.AdamW8bit
        batches = self._batches(task["tokens"], task["documents"] if c.documents else None)
        self.session = sk.Session(
            model,
            batches if c.prefetch else _WhenNeeded(batches, device),
            optimizer=optimizer(lr=work.lr),
            accumulate=work.accumulate,
            schedule=None,
            compile=c.compile,
            graphs="auto" if c.graphs else False,
            meters=[sk.activity(every=task["sample_every"]) if task["sample_every"] else self._mark],
        )
        self.wait()
        self.build_s = time.perf_counter() - began
        self.note = report.line
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what making the weights took
            torch.cuda.reset_peak_memory_stats(device)

    def _choose_attention(self, c: Configuration) -> None:
        cudnn, flash = _SDP[c.attention]
        if c.attention and self.device.type == "cuda":  # a process of its own; a rehearsal's goes on
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            torch.backends.cuda.enable_flash_sdp(flash)

    def _batches(self, tokens: str, documents: str | None) -> Batches:
        starts_SM = None if documents is None else np.load(documents)
        return Batches(
            np.load(tokens).astype(np.uint32), batch=self.work.batch, shuffle=False, starts_SM=starts_SM, name="text"
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "steps" in request:
            return self._steps(request["steps"])
        if "profile" in request:
            return self._profile(request["profile"])
        return self._sustain(request["minutes"])

    def _steps(self, steps: int) -> dict[str, Any]:
        self.wait()
        began = time.perf_counter()
        correct.run(self.session, steps)
        self.wait()
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "steps": steps,
            "tokens": steps * self.work.tokens,
            "losses": self.session.records.column("loss")[-steps:].tolist(),
            "graphs": self._graphs(),
            **self._memory(),
        }

    def _graphs(self) -> str:
        return correct.not_captured(self.session) or "captured"

    def _memory(self) -> dict[str, float]:
        """Return the peak memory since the weights are made: a graph's memory is handed out once, while it is recorded, and
        not by its replays."""
        return process.peak_memory(self.device.type == "cuda")

    def _mark(self, session: sk.Session) -> dict[str, float]:
        """End a step of the profile that runs, as a meter: a replayed graph calls no optimizer that would."""
        if self._profiled is not None:
            self._profiled.step()
        return {}

    def _profile(self, steps: int) -> dict[str, Any]:
        with sk.profile(steps, warmup=2, tokens=self.work.tokens, sample=False) as p:
            self._profiled = p
            correct.run(self.session, steps + 2)
            self._profiled = None
        s = p.summary
        return {
            "idle": s["idle_ms"] / s["wall_ms"],
            "launches": s["launches_per_step"],
            "graph_launches": s["graph_launches_per_step"],
            "syncs": s["syncs_per_step"],
            "busy_ms": s["busy_ms"],
            "wall_ms": s["wall_ms"],
            "graphs": self._graphs(),
            "notes": list(p.notes),
        }

    def _sustain(self, minutes: float) -> dict[str, Any]:
        self.session.run(minutes=minutes)
        s = self.session.summary()
        kept = (
            "tokens_per_s",
            "tokens_per_s_p5",
            "tokens_per_s_p95",
            "drift",
            "idle_frac",
            "sampled_idle_frac",
            "steps",
        )
        return {
            "minutes": s.run_s / 60,
            **{name: getattr(s, name) for name in kept},
            "graphs": self._graphs(),
            **self._memory(),
        }


def main(argv: list[str]) -> int:
    return process.serve(lambda: serve(json.loads(argv[1])))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
