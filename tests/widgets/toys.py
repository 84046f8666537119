"""A clock, a view, a run's folder as another process writes it, a state that is hard to draw."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import threading
import time
from typing import Any

import surokit as sk
from surokit.runs.status import RunInfo, StatusFile
from surokit.widgets.state import PanelState


class View:
    """Keeps what it is shown."""

    every_s = 0.0

    def __init__(self):
        self.shown, self.finals, self.news = [], 0, threading.Condition()

    def show(self, states, final):
        with self.news:
            self.shown.append({name: (state.step, state.reason) for name, state in states.items()})
            self.finals += final
            self.news.notify_all()

    def until(self, condition):
        """Waits until something holds, asking again whenever more is shown."""
        with self.news:
            assert self.news.wait_for(condition, 240), "waited in vain"


class Notebook:
    """Stands for IPython's `display`: what stands in each output, in their order."""

    def __init__(self):
        self.outputs = []

    def __call__(self, content, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(content)
        return Output(self, len(self.outputs) - 1)


class Output:
    """One of them."""

    def __init__(self, notebook, number):
        self.notebook, self.number = notebook, number

    def update(self, content, raw):
        assert raw
        self.notebook.outputs[self.number] = content


class Clock:
    def __init__(self, now=1_790_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


def line(step, loss=None, **more):
    loss = 5.0 - 0.001 * step + 0.1 * math.sin(step) if loss is None else loss
    row = {"step": step, "lr": 1e-3, "tokens": 128, "wall_ms": 10.0 + step % 7, "stall_ms": 0.1, "peak_gib": 1.5}
    row |= {"elapsed_s": 0.012 * step, "loss": loss, "grad_norm": 1.0 + step % 3, "skipped": 0.0, "idle_frac": 0.05}
    return json.dumps(row | more) + "\n"


def grow(folder, text):
    with (folder / "records.jsonl").open("a") as file:
        file.write(text)


def says(folder, state="running", step=0, events=(), clock=time.time, now=True, run_s=None, **info):
    known: dict[str, Any] = {
        "title": "fp8",
        "numerics": "emulated",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "total": 100,
    }
    StatusFile(folder, clock).beat(RunInfo(**known | info), state, step, events, now=now, run_s=run_s)


def small_session(run_dir):
    import torch

    torch.manual_seed(0)
    ids = torch.randint(64, (2, 16))
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48))
    batches = [{"input_ids": ids, "labels": ids}]
    return sk.Session(model, batches, schedule=None, eval=batches, run_dir=run_dir, compile=False)


def wild(steps, seed=0):
    """A state that is as hard to draw as they come."""
    dice = random.Random(seed)
    state = PanelState("fp8 " * 20, recipe="y = Q(x)Q(w)' " * 20, total=steps)
    state.info = RunInfo(gpus=1024, flops_per_token=1e30, peak_tflops=1e-9, usd_per_gpu_hour=1e9)
    for step in range(1, steps + 1):
        loss = dice.choice([dice.uniform(0, 1e4), dice.gauss(3, 1), math.nan, math.inf])
        state.add(
            step,
            loss=loss,
            tokens=4096,
            seconds=dice.uniform(0.01, 3.0),
            idle=dice.random(),
            held_out=dice.random(),
            skipped=math.isnan(loss),
            grad_norm=dice.choice([1e300, 1e-300, math.nan, 1.0]),
            memory=1e6,
            lr=dice.random(),
            stall=dice.random(),
            busy=dice.random(),
            launches=1e9,
        )
        if step % 10 == 0:
            state.note(step, "<words> & more words " * 5)
    state.reason = "failed: " + "a very long message & <tags> " * 100
    return state
