"""Keep the first values of adapters on the meta device beside them, until they have memory."""

from __future__ import annotations

from torch import Tensor, nn

_DRAWN = "_surokit_drawn"


def note_drawn(module: nn.Module, name: str, values: Tensor) -> None:
    """Keep the values of the module's own parameter `name`."""
    vars(module).setdefault(_DRAWN, {})[name] = values


def take_drawn(module: nn.Module) -> dict[str, Tensor]:
    """Return the values that were kept for the module's own parameters, by name, and forget them."""
    drawn: dict[str, Tensor] = vars(module).pop(_DRAWN, {})
    return drawn
