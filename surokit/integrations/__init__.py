"""Connect surokit to other libraries, with one module for each, which is imported when it is first named: `sk.integrations.hf`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_MODULES = ("deepspeed", "hf", "lightning", "mirrors")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return import_module(f"surokit.integrations.{name}")
    raise AttributeError(f"surokit.integrations has no {name!r}; there is {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return [*_MODULES]
