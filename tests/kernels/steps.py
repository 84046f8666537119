"""Steps of the benchmark as they launch kernels on an H100 or H200, at full width and in no time: nothing is computed.

A model has one layer and memory that nothing fills. Views are made, Triton's launches go to whoever compiles or counts them, and
every other operation gives an empty result of the right shape. Doors of kernels/ give the Triton form, as on CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import surokit as sk
from surokit import kernels
from surokit.bench import correct
from surokit.bench.configurations import MODELS, PARTS, BenchWork, Configuration
from surokit.kernels import OPERATIONS, native

HOPPER = (9, 0)


def triton_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """What Triton has for a function of kernels/reference, or the function itself."""
    try:
        module = import_module(f"surokit.kernels.triton.{function.__module__.rpartition('.')[2]}")
    except ModuleNotFoundError:
        return function
    form: Callable[..., Any] = getattr(module, function.__name__, function)
    return form


class Uncomputed(TorchDispatchMode):
    """Operations of ours launch their Triton kernels; the rest gives shapes. What the host reads of a tensor is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        operation = OPERATIONS.get(name) if func.namespace == "surokit" else None
        if operation and (form := triton_form(operation.reference)) is not operation.reference:
            with self:
                return operation.adapt(form)(*args, **kwargs)
        if name == "_local_scalar_dense":
            return 1
        given = zip(func._schema.arguments, args)
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        written += [kwargs[a.name] for a in func._schema.arguments if a.name in kwargs and a.is_out]
        if written:
            return written[0] if len(func._schema.returns) < 2 else tuple(written)
        if any(returned.alias_info for returned in func._schema.returns):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _shape, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, _empty, func(*args, **kwargs))


def _shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


@contextmanager
def on_hopper() -> Iterator[None]:
    """Inside the `with`, models on the CPU launch what they would launch on a device of compute capability 9.0."""
    best = kernels.best
    with ExitStack() as patched:
        for module in [m for path, m in sys.modules.items() if path.startswith("surokit")]:
            if vars(module).get("best") is best:
                patched.enter_context(mock.patch.object(module, "best", lambda function, device: triton_form(function)))
        patched.enter_context(mock.patch.object(native, "cuda_version", return_value=(13, 0)))
        available = mock.patch.object(native, "available", lambda kind, device: native.multiplies(kind, HOPPER))
        patched.enter_context(available)
        patched.enter_context(kernels.converting(False))
        patched.enter_context(Uncomputed())
        yield


def step(c: Configuration, work: BenchWork) -> None:
    """Two micro-batches, the second with scales from the first; the optimizer is torch's."""
    config = sk.DecoderConfig(**{**MODELS[c.model], "layers": 1}, max_length=work.length)
    model = sk.Decoder(config, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    with on_hopper():
        sk.apply(model, correct.recipe_of(c.recipe, c.train, work.rank, work.alpha))
        sk.fuse(model, c.fusion)
        ids_BT = torch.zeros((work.batch, work.length), dtype=torch.int64)
        for _ in range(2):
            model(ids_BT, labels=ids_BT).loss.backward()


def configurations() -> dict[str, Configuration]:
    """Those that launch kernels of ours, by name; what differs in graphs, batches or attention only launches the same."""
    found: dict[Configuration, Configuration] = {}
    for part in PARTS.values():
        for c in part.configurations():
            if not c.peer and not c.compile:
                plain = c.but(graphs=True, prefetch=True, attention="", documents=False)
                found[plain] = plain
    return {c.name: c for c in found}


LAUNCHES: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    name: ((90,), partial(step, c, BenchWork())) for name, c in configurations().items()
}
