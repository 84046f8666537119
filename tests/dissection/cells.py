"""Cells made by hand, whose every answer is known."""

from typing import Any

import torch

from surokit.dissection.cell import Cell
from surokit.dissection.settings import Setting

PARTS = ("part", "activities", "forward_ms", "backward_ms", "idle_ms", "ms")


def all_kernels():
    """Switch all of torch's attention kernels on again: they are the process', which is a cell's own outside of tests."""
    cuda = torch.backends.cuda
    for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp):
        enable(True)


def held(cell, term):
    """The bytes that a cell's process held between steps, by a term."""
    return cell.memory["rest"][term]


def peak(cell):
    """The most bytes, without what other tests of this process left behind."""
    return cell.memory["peak"] - held(cell, "others")


def profile(attention=20.0, linear=30.0, optimizer=10.0, idle=5.0):
    """Of a step of attention and linear layers (a third of each forward), an optimizer, and idle time in attention."""
    rows = [
        ("Linear q", 4.0, linear / 3, 2 * linear / 3, 0.0, linear),
        ("attention", 2.0, attention / 3, 2 * attention / 3, idle, attention + idle),
        ("optimizer", 1.0, optimizer, 0.0, 0.0, optimizer),
    ]
    wall = attention + linear + optimizer + idle
    forward = (attention + linear) / 3
    nothing = dict.fromkeys(("forward", "backward", "optimizer", "other", "data"), 0.0)
    return {
        "wall_ms": wall,
        "busy_ms": wall - idle,
        "idle_ms": idle,
        "phases_ms": {
            "forward": forward + idle,
            "backward": 2 * forward,
            "optimizer": optimizer,
            "other": 0.0,
            "data": 0.0,
        },
        "phases_idle_ms": {**nothing, "forward": idle},
        "phases_exposed_ms": {**nothing, "backward": 1.0},
        "phases_overlapped_ms": {**nothing, "backward": 2.0},
        "comm_exposed_ms": 1.0,
        "comm_ms": 3.0,
        "collectives": [{"collective": "all_gather", "bytes": 4096, "calls": 2.0, "ms": 3.0}],
        "activity": "cpu",
        "parts": [dict(zip(PARTS, row)) for row in rows],
        "activities": [
            {"activity": "aten::mm", "calls": 4, "ms": linear},
            {"activity": "aten::bmm", "calls": 2, "ms": attention},
            {"activity": "others", "calls": 7, "ms": optimizer - 1},
            {"activity": "all_gather, 4.1 kB", "calls": 2, "ms": 1.0},
            {"activity": "idle", "calls": None, "ms": idle},
        ],
        "lost": [],
    }


def cell(name, step_ms=(60.0,) * 6, losses=(5.0, 4.0), machine="cpu", peak=2**30, tokens=600, **changes):
    """A cell of a step with these switches changed."""
    facts: dict[str, Any] = {
        key: changes.pop(key) for key in ("state", "why", "profile", "origin", "planned") if key in changes
    }
    setting = Setting(**{"batch": 2, "length": 300, **changes})
    fields: dict[str, Any] = {
        "work": {"tokens_per_step": tokens, "batch": 2, "weights": "abc"},
        "step_ms": step_ms,
        "losses": losses,
        "memory": {"peak": peak},
        "planned": {"peak": 1.1 * peak, "step_ms": None},
        "profile": profile(),
    }
    if facts.get("state", "measured") != "measured":
        fields = {}
    given: dict[str, Any] = {"state": "measured", "setting": setting.labels(), "machine": machine, **fields, **facts}
    return Cell(name, **given)
