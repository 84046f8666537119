"""Read the facts of the process that advice rests on from torch, while the profiled code runs: name and value, all as text."""

from __future__ import annotations

import os
from typing import Any

import torch

from surokit import environment


def torch_settings() -> dict[str, str]:
    """Return float32_matmul_precision, cudnn.benchmark, deterministic, anomaly, threads, cores and allocator."""
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its new name and its old
    return {
        "float32_matmul_precision": environment.float32_precision(),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "deterministic": str(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic),
        "anomaly": str(torch.is_anomaly_enabled()),
        "threads": str(torch.get_num_threads()),
        "cores": str(environment.cores()),
        "allocator": next((os.environ[name] for name in allocator if name in os.environ), ""),
    }


def optimizer_setting(optimizer: Any) -> str:
    """Describe an optimizer, for example "AdamW fused=None foreach=None, 148 tensors"."""
    groups = optimizer.param_groups
    how = " ".join(f"{name}={groups[0].get(name)}" for name in ("fused", "foreach")) if groups else ""
    return f"{type(optimizer).__name__} {how}, {sum(len(g['params']) for g in groups)} tensors"


def loader_setting(iterator: Any) -> str:
    """Describe a DataLoader's iterator, for example "workers=0 pin_memory=False"."""
    return f"workers={iterator._num_workers} pin_memory={iterator._pin_memory}"
