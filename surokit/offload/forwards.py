"""Put a forward around a module's own: the base of streamed weights and of offloaded activations, and the link that both
take.

Such a forward is an attribute `forward` of one object, which nn.Module calls in place of its class' forward, between the
hooks. Class, parameters, names and hooks stay what they are. Several stand around one another and can be removed in any
order. Backward does not know them: a forward leaves the work to be done there with autograd (checkpoints, hooks for saved
tensors).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from surokit.applied import HostForward
from surokit.offload.link import CudaLink, Link, link_for
from surokit.torch_private import not_compiled


class Forward(HostForward):
    """A Forward is called by `module(...)` in place of the module's forward, until `remove`; a subclass defines `around`.

    Copies (deepcopy, pickle) of the module take along one of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.removed = False
        self._before: Callable[..., Any] | None = vars(module).get("forward")  # of somebody who did as we do
        module.forward = self

    @abstractmethod
    def around(self, *args: Any, **kwargs: Any) -> Any:
        """Call `self.__wrapped__(*args, **kwargs)`, and do the subclass's work before and after it."""

    @not_compiled  # copies and hooks are not for torch's compiler, which goes on around (and is not loaded for this)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs) if self.removed else self.around(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the next forward inside, at last the module's own; by this name `inspect.signature` finds its arguments."""
        return self._before or MethodType(type(self.module).forward, self.module)

    @property
    def follows_class(self) -> bool:
        """Return whether this ends in the forward that the module's class has, whatever class it becomes (models/fuse.py)."""
        return self._before is None or getattr(self._before, "follows_class", False)

    def remove(self) -> None:
        """Let the next forward inside run from now on. Where other code's forward stands around this one, this one stays
        there and only passes on."""
        self.removed = True
        outer = vars(self.module).get("forward")
        if outer is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before
        while isinstance(outer, Forward):
            if outer._before is self:
                outer._before = self._before
            outer = outer._before


F = TypeVar("F", bound=Forward)


def forwards_of(module: nn.Module, kind: type[F]) -> Iterator[F]:
    """Yield those of a kind that stand around a module's own forward and are not removed, from the outside in."""
    forward = vars(module).get("forward")
    while forward is not None:
        if isinstance(forward, kind) and not forward.removed:
            yield forward
        forward = getattr(forward, "__wrapped__", None)


def link_to(who: str, device: torch.device | str | None, link: Link | None) -> Link:
    """Return the link given, or a new one to the device: lean on CUDA. Raises ValueError where they do not fit, TypeError
    for an object that is no link."""
    if not isinstance(link, Link | None):
        raise TypeError(
            f"{who}(link={link!r}): a link of surokit.offload.link, such as ThrottledLink(gb_s=50), or None."
        )
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{who}(device={device!r}): a device as torch names it, such as 'cuda:0' or 'cpu'.") from None
    if link is not None:
        if place is not None and (place.type != link.device.type or len({place.index, link.device.index} - {None}) > 1):
            raise ValueError(f"{who}(device={str(place)!r}): the link given is one to {link.device}.")
        return link
    if place is None:
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.type != "cuda":
        return link_for(place)
    if not torch.cuda.is_available():
        raise ValueError(f"{who}(device={str(place)!r}): torch sees no CUDA device here; device='cpu' simulates one.")
    return CudaLink(place, lean=True)
