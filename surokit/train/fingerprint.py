"""A fingerprint holds what a recorded step rests on: addresses, settings and modes of a model and its optimizer, compared before
each step.

A look at everything takes some microseconds a module. Whether anything changed since is seen in a fraction of that, by the
identity of what each module holds: where all of it is the same object at the same address, nothing is looked at more closely.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from surokit.nn.delayed import DelayedScales
from surokit.nn.linear_gemms import Precision
from surokit.torch_private import (
    accumulated_hooks,
    buffers_of,
    children_of,
    frozen_versions,
    gradient_hooks,
    hooks_of,
    parameters_of,
    training_state,
    version_of,
)

_PLAIN = (bool, int, float, str, type(None))
_INTERNAL = vars(nn.Module()).keys() - {"training"}


class Fingerprint:
    """A Fingerprint holds what a model and, where given, its optimizer are made of now; two are equal where a graph of the one
    serves the other.

    `hooked` names what has hooks, which a graph would not call; "" where there are none. Every object that was looked at is held,
    so that no other gets its id.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.hooked = ""
        self._found: list[Any] = []
        self._held: list[Any] = []
        self._places: list[dict[Any, Any]] = []  # their values are looked at
        self._attributes: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        self._sizes: list[Sized] = []  # containers that are empty or only grow: their sizes are looked at
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []  # their addresses are looked at
        self._parameters: list[nn.Parameter] = []
        self._scales: list[DelayedScales] = []
        for module in model.modules():
            self._add_module(module)
        if optimizer is not None:
            self._add_optimizer(optimizer)
        self._quick = self._glance()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._found == other._found

    __hash__ = None  # type: ignore[assignment]

    def unchanged(self) -> bool:
        """Return whether everything still is the same object at the same address. False is no proof of a change: look again."""
        try:
            return self._glance() == self._quick
        except KeyError:  # an attribute is gone
            return False

    def _glance(self) -> list[Any]:
        found: list[Any] = [*map(id, chain.from_iterable(map(dict.values, self._places)))]
        found += map(id, chain.from_iterable([attributes(of) for attributes, of in self._attributes]))
        found += map(len, self._sizes)
        found += map(Tensor.data_ptr, self._tensors)
        found += map(training_state, self._parameters)
        found += frozen_versions(self._parameters)
        found += [scales.restored for scales in self._scales]
        if self._optimizer is not None:
            found += (id(self._optimizer.state), *_settings(self._optimizer))
        return found

    def _note(self, value: Any) -> None:
        self._held.append(value)
        if type(value) in _PLAIN:
            self._found.append(value)
            return
        self._found.append(id(value))
        if isinstance(value, Precision) and value.scales is not None:
            self._found.append(value.scales.restored)
            self._scales.append(value.scales)

    def _add_module(self, module: nn.Module) -> None:
        hooks = hooks_of(module)
        of = vars(module)
        self._held.append(module)
        self._found.append(type(module))
        names = [name for name in of if name not in _INTERNAL]
        self._places += [children_of(module), parameters_of(module), buffers_of(module)]
        self._attributes.append((itemgetter("_modules", *names), of))
        self._sizes += [of, *hooks]
        for name in names:
            self._note(of[name])
        for p in parameters_of(module).values():
            if p is not None:  # codes of a frozen weight may be kept, so its values count
                self._found += (p.data_ptr(), True if p.requires_grad else version_of(p))
                self._parameters.append(p)
                self._tensors.append(p)
                if gradient_hooks(p) or accumulated_hooks(p):
                    self.hooked = f"a parameter of {type(module).__name__}"
        for buffer in buffers_of(module).values():
            self._found.append(None if buffer is None else buffer.data_ptr())
            if buffer is not None:
                self._tensors.append(buffer)
        if any(hooks):
            self.hooked = type(module).__name__

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._found += _settings(optimizer)
        self._held += [optimizer.state, *(value for group in optimizer.param_groups for value in group.values())]
        self._places.append(optimizer.state)
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._held.append(p)
                state = optimizer.state.get(p, {})
                self._places.append(state)
                tensors = [value for value in state.values() if isinstance(value, Tensor)]
                self._tensors += tensors
                self._found += [value for value in state.values() if not isinstance(value, Tensor)]
                self._found += [t.data_ptr() for t in tensors]


def _settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the settings of an optimizer's groups, objects by identity. A rate that is a number is left out: the host may change
    it."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += map(id, group["params"])
        for name, value in group.items():
            if name != "params" and (name != "lr" or isinstance(value, Tensor)):
                found.append(value if type(value) in _PLAIN or isinstance(value, tuple) else id(value))
    return found
