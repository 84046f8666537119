"""Delayed scaling keeps the amax histories of all operands of a model side by side in four tensors.

The scale of step t comes from the amaxes up to step t - 1, so that no product waits for a reduction over its own operand.
Within a step the amaxes are merged into an open slot and the amax in force is only read; after the optimizer's step the slot
is pushed into the history, once, however often forward ran (gradient accumulation, recompute). A slot without history takes
its first tensor's own amax: with scale 1 three quarters of a first gradient would be flushed to zero in E5M2.

Where several processes train the model, each sees its own part of a batch: as a step closes, the open slots are reduced to
the largest over the processes, so that the next step has the same scales everywhere.

Rule: TransformerEngine's DelayedScaling with amax_compute_algo="max": the largest of the last H amaxes; where that is zero or
not finite, the amax in force stays.

S operands, H steps of history.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from surokit import kernels
from surokit.kernels.reference import delayed as reference
from surokit.kernels.reference.delayed import NOTHING
from surokit.quantized import Quantized, quantize
from surokit.quantizer import Quantizer

Slots = int | Sequence[int]  # of one operand; more than one where several layers read it

# All histories of the process, by number. Compiled graphs carry numbers: given tensors that an operation changes, they would copy
# them around each. And an optimizer's step has to find those that it rolls.
_banks: weakref.WeakValueDictionary[int, DelayedScales] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_hook: Any = None


class DelayedScales:
    """DelayedScales holds the histories of one model's operands; layers claim three slots each and read and record through it.

    An optimizer that trains the model rolls them: a parameter of a layer that uses them, or one of `owner`, the model they were
    made for, while that lives (its adapters may stand beside the layers). A copy (copy.deepcopy, pickle) belongs to the
    copied layers.
    """

    def __init__(self, history: int, slots: int, owner: nn.Module | None, device: torch.device) -> None:
        self._begin(history, slots, device)
        self._owner = weakref.ref(owner) if owner is not None else None
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that read and record here
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._walk: _Walk | None = None  # the parameters of all these modules
        self.number = next(_numbers)
        self.shared = False  # the model is whole in several processes, which its parameters do not show
        self.restored = 0  # how often the amaxes came from outside
        self.rolled = 0  # how often a step was closed
        self.rewound = 0  # how often earlier amaxes took the place of those in force
        _watch(self)

    def __reduce__(self) -> Any:
        """Let copies and pickles carry the amaxes; their layers register themselves (Linear.__setstate__)."""
        return _restored, (*self.history_HS.shape, self.in_force_S.device, self.state_dict())

    def quantize(self, slots: Slots, x_MK: Tensor, quantizer: Quantizer, record: bool) -> Quantized:
        """Quantize x by the amax in force; with `record`, x's own amax is merged into the open slots of all layers that read x.

        Decodes to NaN where x holds an inf or a NaN, which would otherwise be cut to an ordinary number.
        """
        slots = _several(slots)
        if quantizer.draws or not self.spaced(slots):
            own = kernels.amax(x_MK)
            amaxes = [reference.settle(own, *self.views(slot, x_MK.device), record) for slot in slots]
            return quantize(x_MK, quantizer, amax=amaxes[0])
        if x_MK.itemsize > 4:
            x_MK = x_MK.float()
        form = kernels.best(reference.quantize, x_MK.device)
        views = self.views(slots, x_MK.device)
        parts = form(x_MK, quantizer.format, *views, record, quantizer.scaling.pow2)
        return Quantized.of(quantizer, parts, (x_MK.shape[0], x_MK.shape[1]))

    def quantize_both(
        self, slots: Slots, x_MK: Tensor, quantizer: Quantizer, record: bool
    ) -> tuple[Quantized, Quantized]:
        """Quantize as `quantize` does, and make the same codes of x' in rows of their own, in one pass over x; for spaced slots."""
        if x_MK.itemsize > 4:
            x_MK = x_MK.float()
        form = kernels.best(reference.quantize_both, x_MK.device)
        parts = form(x_MK, quantizer.format, *self.views(slots, x_MK.device), record, quantizer.scaling.pow2)
        M, K = x_MK.shape
        return Quantized.of(quantizer, parts[:2], (M, K)), Quantized.of(quantizer, parts[2:], (K, M))

    def views(self, slots: Slots, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the amaxes in force and the open slots of one operand, [S] each, to be read and written in place on `device`.

        Raises ValueError for slots that are not `spaced`.
        """
        slots = _several(slots)
        if not self.spaced(slots):
            raise ValueError(f"Slots {list(slots)} are not evenly spaced, so no view holds them: quantize() takes any.")
        if self.in_force_S.device != device:
            self._move(device)
        step = slots[1] - slots[0] if len(slots) > 1 else 1
        where = slice(slots[0], slots[-1] + 1, step)
        return self.in_force_S[where], self.open_S[where]

    @staticmethod
    def spaced(slots: Slots) -> bool:
        """Return whether the slots ascend in equal steps, so that a view of the bank holds them."""
        steps = {later - slot for slot, later in itertools.pairwise(_several(slots))}
        return not steps or (len(steps) == 1 and min(steps) > 0)

    def in_force(self, slot: int, own: Tensor) -> Tensor:
        """Return the amax [1, 1] that quantizes what has the amax `own` [1, 1]: `own` without a past. Nothing is recorded."""
        return reference.settle(own, *self.views(slot, own.device), False)

    def note(self, slots: Slots, own: Tensor) -> None:
        """Merge the amax `own` [1, 1] of an operand that was quantized elsewhere into the open slots of all layers that read it."""
        for slot in _several(slots):
            reference.settle(own, *self.views(slot, own.device), True)

    def amax(self, slot: int, x: Tensor, record: bool) -> Tensor:
        """Return the amax [1, 1] that quantizes `x` now; with `record`, x's own amax is merged into the open slot.

        NaN where x holds an inf or a NaN.
        """
        return reference.settle(kernels.amax(x), *self.views(slot, x.device), record)

    @property
    def cursor(self) -> Tensor:
        """Return how many steps have been closed in which anything was recorded: those of the slot that saw most, a scalar."""
        return self.cursor_S.max()

    def roll(self, skipped: Tensor | None = None) -> None:
        """Close the step: push the open slots into the history and take the new maxima. Nothing recorded, nothing changed.

        So for each slot: an expert that got no token in a step keeps the history that it has.

        `skipped` is above zero (on the device) where the optimizer masked its step out: such a step says nothing about the
        tensors to come. Nor does an amax that is not finite: what was quantized by it was NaN, so its step was lost, whoever
        skipped it; in the history it would freeze the amax in force until it leaves (as it does in TransformerEngine). All of
        it stays on the device and in place, so that a captured graph can hold it.
        """
        self._reduce()
        self.rolled += 1
        recorded_S = ~(self.open_S < 0)  # a NaN counts
        closing_S = self.open_S.clamp(min=0.0).nan_to_num_(nan=0.0, posinf=0.0)
        if skipped is not None:
            closing_S = torch.where(skipped > 0, 0.0, closing_S)
        history, slots = self.history_HS.shape
        flat = self.history_HS.view(-1)
        where_S = self.cursor_S.remainder(history) * slots + torch.arange(slots, device=flat.device)
        flat.index_copy_(0, where_S, torch.where(recorded_S, closing_S, flat.index_select(0, where_S)))
        self.cursor_S += recorded_S
        largest_S = self.history_HS.amax(0)
        usable_S = recorded_S & (largest_S > 0) & (largest_S < torch.inf)
        self.in_force_S.copy_(torch.where(usable_S, largest_S, self.in_force_S))
        self.open_S.fill_(NOTHING)

    def _reduce(self) -> None:
        """Merge the open slots of all processes that train the model together; nothing where one does alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        groups = [dist.group.WORLD] if self.shared else self._groups_of_shards()
        if not groups:
            return
        # not every backend lets a NaN win; an inf says the same to the history
        self.open_S.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        for group in groups:
            dist.all_reduce(self.open_S, dist.ReduceOp.MAX, group)

    def _groups_of_shards(self) -> Sequence[dist.ProcessGroup | None]:
        parameters = (p for layer in self.layers for p in layer.parameters())
        mesh = next((p.device_mesh for p in parameters if hasattr(p, "device_mesh")), None)
        return [] if mesh is None or mesh.size() == 1 else mesh.get_all_groups()

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` trains the layers' model. A yes is remembered; a no may change with new parameters of either.

        Every step of every optimizer asks, those of other models too, so the model is walked only when it has changed.
        """
        if optimizer in self._followed:
            return True
        owner = self._owner() if self._owner is not None else None
        roots = [*self.layers] if owner is None else [owner, *self.layers]
        if self._walk is None or not self._walk.holds(roots):
            self._walk = _Walk(roots)
        trained = (id(p) for group in optimizer.param_groups for p in group["params"])
        # a copy whose layers are all frozen is trained by adapters that it cannot see
        frozen_copy = self._owner is None and not self._walk.trains()
        if frozen_copy or not self._walk.parameters.isdisjoint(trained):
            self._followed.add(optimizer)
            return True
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on, as tensors."""
        return {
            "history": self.history_HS.clone(),
            "in_force": self.in_force_S.clone(),
            "open": self.open_S.clone(),
            "cursor": self.cursor_S.clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take what `state_dict` gave; a ValueError names a history of another shape."""
        if state["history"].shape != self.history_HS.shape:
            raise ValueError(
                f"The delayed-scaling state holds {tuple(state['history'].shape)} amaxes (steps, operands) and the model "
                f"needs {tuple(self.history_HS.shape)}: it belongs to another recipe or model."
            )
        self.history_HS.copy_(state["history"])
        self.in_force_S.copy_(state["in_force"])
        self.open_S.copy_(state["open"])
        cursor = state["cursor"]
        if cursor.shape != self.cursor_S.shape:  # of an older version, which had one for all slots
            if len(cursor) == 2 and not cursor[1]:  # the first one kept a flag beside zeros
                self.open_S.fill_(NOTHING)
            cursor = cursor[:1]
        self.cursor_S.copy_(cursor)
        self.restored += 1
        self.rewound += 1

    def begin_on(self, device: torch.device) -> None:
        """Begin anew on `device`, for a bank that had no memory yet."""
        history, slots = self.history_HS.shape
        self._begin(history, slots, device)
        self.rewound += 1

    def _begin(self, history: int, slots: int, device: torch.device) -> None:
        self.history_HS = torch.zeros(history, slots, dtype=torch.float32, device=device)
        self.in_force_S = torch.zeros(slots, dtype=torch.float32, device=device)  # 0: nothing seen yet
        self.open_S = torch.full((slots,), NOTHING, dtype=torch.float32, device=device)
        self.cursor_S = torch.zeros(slots, dtype=torch.int64, device=device)  # steps closed so far in which it recorded

    def _move(self, device: torch.device) -> None:
        self.history_HS, self.in_force_S, self.open_S, self.cursor_S = (
            t.to(device) for t in (self.history_HS, self.in_force_S, self.open_S, self.cursor_S)
        )


class _Walk:
    """A _Walk holds the ids of the parameters of some modules and of all modules in them; ids keep nothing alive.

    `holds` reads what each module has, which costs a small part of a walk; an id that is given out again does no harm, since two
    objects that live now never share one.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}.values()
        self._modules = [weakref.ref(module) for module in modules]
        self._state = self._read(roots)
        self.parameters = {id(p) for module in modules for p in module._parameters.values() if p is not None}

    def holds(self, roots: Sequence[nn.Module]) -> bool:
        """Return whether a walk through `roots` would find the same."""
        return self._read(roots) == self._state

    def trains(self) -> bool:
        """Return whether a gradient is wanted for any of the parameters."""
        alive = (module for ref in self._modules if (module := ref()) is not None)
        return any(p is not None and p.requires_grad for module in alive for p in module._parameters.values())

    def _read(self, roots: Sequence[nn.Module]) -> list[int]:
        found: list[Any] = [*roots]
        for ref in self._modules:
            module = ref()
            if module is None:
                return []
            found += module._parameters.values()
            found += module._modules.values()
        return [*map(id, found)]


def _several(slots: Slots) -> Sequence[int]:
    return (slots,) if isinstance(slots, int) else slots


def bank(number: int) -> DelayedScales | None:
    """Return the histories with this number: compiled graphs carry numbers, not objects. None below zero."""
    return _banks[number] if number >= 0 else None


def banks_of(model: nn.Module) -> list[DelayedScales]:
    """Return the histories that layers of `model` use, in the order in which they were made."""
    modules = set(model.modules())
    return [scales for _, scales in sorted(_banks.items()) if any(layer in modules for layer in scales.layers)]


def amaxes_of(model: nn.Module) -> list[Tensor]:
    """Return all tensors of the histories of `model`; not copies."""
    return [t for bank in banks_of(model) for t in (bank.history_HS, bank.in_force_S, bank.open_S, bank.cursor_S)]


@contextmanager
def kept_amaxes(model: nn.Module) -> Iterator[None]:
    """Restore the histories at the end of the block, whatever forward and backward recorded inside, without a trace: frozen weights
    keep the codes that they have."""
    held = amaxes_of(model)
    before = [t.clone() for t in held]
    try:
        yield
    finally:
        for t, old in zip(held, before):
            t.copy_(old)
        for scales in banks_of(model):
            scales.rewound += 1


@contextmanager
def dropped_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Drop what forward and backward of a step recorded if the block raises, as if the step had not begun."""
    before = [(bank, bank.in_force_S.clone()) for bank in _banks.values() if bank.follows(optimizer)]
    try:
        yield
    except BaseException:
        for bank, in_force_S in before:
            bank.in_force_S.copy_(in_force_S)
            bank.open_S.fill_(NOTHING)
        raise


def _restored(history: int, slots: int, device: torch.device, state: dict[str, Tensor]) -> DelayedScales:
    bank = DelayedScales(history, slots, owner=None, device=device)
    bank.load_state_dict(state)
    return bank


def _watch(scales: DelayedScales) -> None:
    """Roll `scales` after optimizer steps, whoever writes the loop.

    The hook, registered with the first histories, is on every optimizer: the one that trains the model may be made before or after
    them, by code that knows nothing of them. It stays, since torch does not let go of a hook while it goes through all of them.
    """
    global _hook
    _banks[scales.number] = scales
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for bank in list(_banks.values()):
        if bank.follows(optimizer):
            bank.roll(getattr(optimizer, "found_inf", None))
