"""Delayed scaling: the amax histories of all operands of a model, side by side in three tensors.

The scale of step t comes from the amaxes up to step t - 1, so that no product waits for a reduction over its own operand.
Within a step the amaxes are merged into an open slot and the amax in force is only read; after the optimizer's step the slot
is pushed into the history, once, however often forward ran (gradient accumulation, recompute). A slot without history takes
its first tensor's own amax: with scale 1 three quarters of a first gradient would be flushed to zero in E5M2.

Rule: TransformerEngine's DelayedScaling with amax_compute_algo="max": the largest of the last H amaxes; where that is zero or
not finite, the amax in force stays.

S operands, H steps of history.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from surokit import kernels

_banks: weakref.WeakSet[DelayedScales] = weakref.WeakSet()
_hook: Any = None


class DelayedScales:
    """The histories of one model's operands; layers claim a slot each and read and record through it.

    `owner` is the model whose optimizer steps roll the histories. A copy (copy.deepcopy, pickle) has no owner yet and rolls
    with any optimizer's step that follows a recorded forward.
    """

    def __init__(self, history: int, slots: int, owner: nn.Module | None, device: torch.device) -> None:
        self.history_HS = torch.zeros(history, slots, device=device)
        self.in_force_S = torch.zeros(slots, device=device)  # 0: nothing seen yet
        self.open_S = torch.zeros(slots, device=device)
        self.cursor = 0
        self.recorded = False
        self._owner = weakref.ref(owner) if owner is not None else None
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        _watch(self)

    def __reduce__(self) -> Any:
        """Copies and pickles carry the amaxes; the owner is not part of the state."""
        return _restored, (*self.history_HS.shape, self.in_force_S.device, self.state_dict())

    def amax(self, slot: int, x: Tensor, record: bool) -> Tensor:
        """The amax [1, 1] that quantizes `x` now; with `record`, x's own amax is merged into the open slot.

        NaN where x holds an inf or a NaN that would otherwise be cut to an ordinary number.
        """
        if self.in_force_S.device != x.device:
            self._move(x.device)
        in_force = self.in_force_S[slot : slot + 1]
        own = kernels.amax(x).view(1)
        used = torch.where(in_force > 0, in_force, own)
        if record:
            usable = (own > 0) & (own < torch.inf)
            in_force.copy_(torch.where(in_force > 0, in_force, torch.where(usable, own, 0.0)))
            opened = self.open_S[slot : slot + 1]
            torch.maximum(opened, own, out=opened)
            self.recorded = True
        return (used + (own - own)).view(1, 1)

    def roll(self, skipped: Tensor | None = None) -> None:
        """Close the step: push the open slots into the history and take the new maxima. Does nothing if nothing was recorded.

        `skipped` is above zero (on the device) where the optimizer masked its step out: such a step says nothing about the
        tensors to come, and an inf would freeze the amax in force until it leaves the history.
        """
        if not self.recorded:
            return
        self.history_HS[self.cursor] = self.open_S if skipped is None else torch.where(skipped > 0, 0.0, self.open_S)
        self.cursor = (self.cursor + 1) % len(self.history_HS)
        largest = self.history_HS.amax(0)
        usable = (largest > 0) & (largest < torch.inf)
        self.in_force_S = torch.where(usable, largest, self.in_force_S)
        self.open_S.zero_()
        self.recorded = False

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` trains the owner; looked up once for each optimizer."""
        if self._owner is None:
            return True
        if optimizer not in self._seen:
            owner = self._owner()
            mine = {id(p) for p in owner.parameters()} if owner is not None else set()
            self._seen[optimizer] = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        return self._seen[optimizer]

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, as tensors."""
        return {
            "history": self.history_HS.clone(),
            "in_force": self.in_force_S.clone(),
            "open": self.open_S.clone(),
            "cursor": torch.tensor([self.cursor, int(self.recorded)]),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict`; a ValueError names a history of another shape."""
        if state["history"].shape != self.history_HS.shape:
            raise ValueError(
                f"The delayed-scaling state holds {tuple(state['history'].shape)} amaxes (steps, operands) and the model "
                f"needs {tuple(self.history_HS.shape)}: it belongs to another recipe or model."
            )
        self.history_HS.copy_(state["history"])
        self.in_force_S.copy_(state["in_force"])
        self.open_S.copy_(state["open"])
        self.cursor, self.recorded = int(state["cursor"][0]), bool(state["cursor"][1])

    def _move(self, device: torch.device) -> None:
        self.history_HS, self.in_force_S, self.open_S = (
            t.to(device) for t in (self.history_HS, self.in_force_S, self.open_S)
        )


def _restored(history: int, slots: int, device: torch.device, state: dict[str, Tensor]) -> DelayedScales:
    bank = DelayedScales(history, slots, owner=None, device=device)
    bank.load_state_dict(state)
    return bank


def _watch(bank: DelayedScales) -> None:
    """Roll `bank` after optimizer steps, whoever writes the loop. The hook is registered with the first bank."""
    global _hook
    _banks.add(bank)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for bank in _banks:
        if bank.recorded and bank.follows(optimizer):
            bank.roll(getattr(optimizer, "found_inf", None))
