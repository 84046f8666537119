"""Find the blocks of a model: what its lists of like modules hold, which are called one after the other."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the items of the model's outermost lists (torch.nn.ModuleList) whose items are all of one class and have parameters
    and a forward, in order; none where there is no such list."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList) or len({type(item) for item in module}) != 1:
            continue
        if all(is_block(item) for item in module):
            found += module
            inside |= set(module.modules())
    return found


def is_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward of its own."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return has_forward and next(module.parameters(), None) is not None
