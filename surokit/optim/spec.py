"""Specify an optimizer by a class and its options, which wait for the parameters of a model.

AdamW(lr=3e-4)                       a Spec: Session calls .build(model)
AdamW(model.parameters(), lr=3e-4)   the optimizer
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
_JSON = (type(None), bool, int, float, str, list, tuple)


@dataclass(frozen=True)
class Spec:
    """A Spec is an optimizer that waits for its parameters: a class and its options."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, params: Parameters | nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over those of `params`, or of a model's parameters, that require a gradient; ValueError if there is
        none.

        An optimizer that decides by modules (`takes_modules`) is given the model itself, and others of surokit the names too.
        """
        takes: Any = params
        if isinstance(params, nn.Module) and not getattr(self.optimizer, "takes_modules", False):
            takes = params.named_parameters() if is_ours(self.optimizer) else params.parameters()
        # a learning rate in a tensor is filled in place, and every optimizer has its own
        options: dict[str, Any] = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in self.options.items()
        }
        return self.optimizer(takes, **options)

    def __repr__(self) -> str:
        return f"{self.optimizer.__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


class SpecMeta(type):
    """Calling an optimizer class without parameters gives a Spec; with parameters first, the optimizer.

    Either way the class's `check` is given all options, with the defaults of its constructor.
    """

    def __call__(cls, params: Parameters | nn.Module | None = None, **options: Any) -> Any:
        options = with_plain_numbers(options)
        signature = cls.__signature__
        try:
            given = signature.bind(None, **options)
        except TypeError as error:  # a misspelt option
            known = ", ".join(list(signature.parameters)[1:])
            raise TypeError(f"{cls.__name__}: {error}. Its options are {known}.") from None
        given.apply_defaults()
        cls.check(given.arguments)  # type: ignore[attr-defined]
        return Spec(cls, options) if params is None else super().__call__(params, **options)  # type: ignore[arg-type]

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def spec_to_dict(spec: Spec | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return plain data for a checkpoint; an optimizer that was not built from a specification of ours is named, not stored.

    Options that are objects of this machine, such as an offloading optimizer's link, are not the checkpoint's.
    """
    if spec is None or not is_ours(spec.optimizer):
        return {"name": type(optimizer).__qualname__, "custom": True}
    plain = {name: _to_plain(value) for name, value in with_plain_numbers(spec.options).items()}
    options = {name: value for name, value in plain.items() if isinstance(value, _JSON)}
    return {"name": spec.optimizer.__name__, "options": options}


def spec_from_dict(data: dict[str, Any]) -> Spec:
    """Return the specification that `spec_to_dict` wrote; ValueError where the optimizer was the user's own, or is not known
    here."""
    if data.get("custom"):
        raise ValueError(f"The checkpoint's optimizer {data['name']} was built outside: pass optimizer= again.")
    found = _public(data["name"])
    if found is None:
        raise ValueError(f"This version of surokit has no optimizer {data['name']!r}: pass optimizer= again.")
    options = dict(data["options"])
    if options.get("state_dtype"):
        options["state_dtype"] = getattr(torch, options["state_dtype"])
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return Spec(found, options)


def with_plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with Python's own numbers for any others, such as NumPy's, which torch refuses to read from a checkpoint."""
    return {name: _number(value) for name, value in options.items()}


def is_ours(optimizer: Any) -> bool:
    """Return whether an optimizer class is one of surokit's public names, which can be made again from its options."""
    return isinstance(optimizer, SpecMeta) and _public(optimizer.__name__) is optimizer


def _public(name: str) -> Any:
    import surokit

    found = getattr(surokit, name, None)
    return found if isinstance(found, SpecMeta) else None


def _number(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_number, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return float(value) if isinstance(value, Tensor) else value
