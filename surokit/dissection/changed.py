"""Say what another library did to a model's weights before the first step: engines ought to leave them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surokit.racing.comparability import digest_of


def digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of every parameter, by its name; what DeepSpeed has divided is gathered, in all processes together."""
    found = {}
    for name, p in model.named_parameters():
        with _gathered(p):
            found[name] = digest_of([p])
    return found


def changed(model: nn.Module, before: Mapping[str, str]) -> str:
    """Say how parameters differ from those that had these digests, in a sentence; "" where none does.

    All processes call this together, and it says what the first of them sees.
    """
    parameters = dict(model.named_parameters())
    missing = [name for name in before if name not in parameters]
    now = digests(model)
    others = _of_first([name for name in before if name in now and now[name] != before[name]])
    if missing:
        return f"{len(missing)} of {len(before)} parameters have other names, the first {missing[0]}"
    if not others:
        return ""
    first = others[0]
    with _gathered(parameters[first]):
        how = _how(parameters[first].detach(), before[first])
    return f"{len(others)} of {len(before)} parameters are others than before, the first {first}, which {how}"


def _of_first(names: list[str]) -> list[str]:
    """Return the names that the first process has: a parameter that all of them gather next has to be the same one in each."""
    told = [names]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _how(p: Tensor, before: str) -> str:
    """Say how a parameter differs from the one that had this digest."""
    if p.ndim == 2 and digest_of([p.reshape(p.shape[1], p.shape[0]).t()]) == before:
        return "holds its transpose in the old shape"
    if p.ndim == 2 and digest_of([p.t()]) == before:
        return "is transposed"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if p.dtype != dtype and digest_of([p.to(dtype)]) == before:
            return f"is {p.dtype} now".replace("torch.", "")
    return "has other values"


def _gathered(p: Tensor) -> AbstractContextManager[object]:
    """Return a context in which a parameter is whole, where DeepSpeed has divided it."""
    if not hasattr(p, "ds_id"):
        return nullcontext()
    found: AbstractContextManager[object] = import_module("deepspeed").zero.GatheredParameters([p])
    return found
