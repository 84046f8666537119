"""A forward put around a module's own: an attribute of that one object, so that its class, keys, hooks and parameters stay."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo


class Forward:
    """What `module(...)` runs, hooks aside, until `remove`: a subclass says what, in `around`.

    Copies (deepcopy, pickle) of the module take along one of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: Callable[..., Any] | None = vars(module).get("forward")  # of somebody who did as we do
        self._removed = False
        module.forward = self

    def around(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @_disable_dynamo  # copies and hooks are not for torch's compiler, which goes on around (and is not loaded for this)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs) if self._removed else self.around(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own; by this name `inspect.signature` finds its arguments."""
        return self._before or MethodType(type(self.module).forward, self.module)

    def remove(self) -> None:
        """From now on the module's own runs. Where another stands around ours, ours only passes on."""
        self._removed = True
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before
