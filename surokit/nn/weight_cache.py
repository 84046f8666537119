"""Keep from step to step what is computed of frozen weights: codes, where a product would quantize the same numbers again, and on a
CPU the numbers of stored codes.

It stands beside a layer, in no state dict, and is never copied; each time it is wanted it is asked whether the weights are
still the ones that it was computed of: the same tensors in the same memory, unchanged (torch counts changes in place, but not those
through `.data`, after which a layer's `frozen` and `kept` are to be set to None), and read by the same products.

Delayed scaling quantizes a weight by the largest amax of its history. For a weight that does not change this is its own, if
the history knows no other; only then are codes kept, and the open slots go on taking its amax, so that a history is what it would
have been. Whether it is so is asked once, when the codes are first there; that waits for the device, nothing later does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from surokit import kernels
from surokit.nn.delayed import DelayedScales
from surokit.quantized import Quantized
from surokit.quantizer import Quantizer
from surokit.torch_private import memory_states

if TYPE_CHECKING:
    from surokit.nn.linear_gemms import Precision

LayerIndices = tuple[int, ...]  # which of the layers; more than one where their weights are one operand


class Unchanged:
    """An Unchanged notes which tensors it is given, and their memory as it is now, so that `are` can tell later if they changed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._state = memory_states(tensors)
        self._refs = tuple(weakref.ref(t) for t in tensors)
        # memory that is freed is soon given out again: what is still referred to is not taken for another
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors in the same memory, unchanged."""
        return (
            len(tensors) == len(self._refs)
            and all(ref() is t for ref, t in zip(self._refs, tensors))
            and self._state == memory_states(tensors)
        )


class Kept:
    """A Kept holds the numbers that stored codes decode to. parts: the codes and scales."""

    def __init__(self, parts: Sequence[Tensor], numbers: Tensor) -> None:
        self._parts = Unchanged(parts)
        self.numbers = numbers

    def serves(self, parts: Sequence[Tensor], dtype: torch.dtype) -> bool:
        return self.numbers.dtype == dtype and self._parts.are(parts)


class KeepsDecoded:
    """A KeepsDecoded is mixed into what holds stored weights, and keeps the numbers that they decode to where that is wanted."""

    storage: Quantizer | None
    precision: Precision | None
    keeps_decoded: bool = False  # for backward, on a CPU for good
    kept: Kept | None = None  # the stored weights, decoded

    def keep_decoded(self, keep: bool) -> None:
        """Choose whether to keep stored weights once they are decoded; what was kept is let go where not."""
        self.keeps_decoded = keep
        if not keep:
            self.kept = None

    def decoded_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the stored weights, decoded, where they are kept: on a CPU the same tensor each time, until the codes change."""
        own: Any = self
        parts: tuple[Tensor, ...] = (own.weight, *own.stored_scales)
        compiles = torch.compiler.is_compiling()
        if parts[0].device.type != "cpu" or compiles or not (is_own(parts) and in_one_process()):
            numbers: Tensor = own.dense_weight(dtype)
            return numbers
        kept = self.kept  # other threads may put another one there
        if kept is None or not kept.serves(parts, dtype):
            with torch.inference_mode(False), torch.no_grad():
                kept = self.kept = Kept(parts, own.dense_weight(dtype))
        return kept.numbers

    @property
    def decodes(self) -> bool:
        """Return whether products need stored weights decoded: if they are stored, and none takes the codes as they are."""
        if self.storage is None:
            return False
        return self.precision is None or not self.precision.recipe.takes_codes(self.storage)

    @property
    def keeps_now(self) -> bool:
        """Return whether forward keeps its decoded weights, all of them."""
        return self.keeps_decoded and self.decodes


class QuantizedWeightCache:
    """A QuantizedWeightCache holds the codes of the weights of layers that read one x.

    They lie as forward and (`transposed`) as grad_input multiply them.

    what: everything else that the codes depend on, to be compared. slots: where delayed scaling keeps the weights' amaxes.
    """

    def __init__(
        self, weights: Sequence[Tensor], what: Any, scales: DelayedScales | None = None, slots: Sequence[int] = ()
    ) -> None:
        self._weights = Unchanged(weights)
        self._what, self._scales, self._slots = what, scales, slots
        self._restored = scales.restored if scales else 0
        self._codes: dict[LayerIndices, Quantized] = {}
        self._transposed: dict[LayerIndices, Quantized] = {}
        self._turned: dict[LayerIndices, Tensor] = {}  # scales of W' in rows, where its codes are a view
        self._amaxes_S: Tensor | None = None
        self._stay: bool | None = True if scales is None else None  # whether codes may; None: not known yet

    def serves(self, weights: Sequence[Tensor], what: Any, scales: DelayedScales | None = None) -> bool:
        """Return whether these are the weights that were quantized, for the same products."""
        return (
            self._weights.are(weights)
            and self._what == what
            and self._scales is scales
            and (scales is None or scales.restored == self._restored)
        )

    @property
    def nbytes(self) -> int:
        """Count the bytes that are kept."""
        codes = sum(Q.nbytes for Q in (*self._codes.values(), *self._transposed.values()))
        return codes + sum(scales.nbytes for scales in self._turned.values())

    def codes(self, members: LayerIndices) -> Quantized | None:
        return self._codes.get(members) if self._stay else None

    def keep(self, members: LayerIndices, operand: Tensor | Quantized) -> None:
        """Keep the codes that forward multiplied, unless they are known to change or a CUDA graph is being recorded."""
        if isinstance(operand, Quantized) and self._stay is not False and not _capturing(operand.codes):
            self._codes[members] = operand

    def transposed(
        self, members: LayerIndices, make: Callable[[], Tensor | Quantized], keep: bool
    ) -> Tensor | Quantized:
        """Return w' [K, N] for grad_input: the kept one, or that of `make`, which is kept from then on if `keep` says so.

        Where its codes are a view of those of w, its scales are kept in rows all the same.
        """
        if members in self._transposed:
            return self._transposed[members]
        w_t = make()
        if not (self._stay and isinstance(w_t, Quantized)):
            return w_t
        if members not in self._turned and not _capturing(w_t.codes):
            if keep:
                w_t = self._transposed[members] = _contiguous(w_t)
            elif not (w_t.codes.is_contiguous() or w_t.scales.is_contiguous()):  # turning them is a launch of its own
                self._turned[members] = w_t.scales.contiguous()
        turned = self._turned.get(members)
        return w_t if turned is None else replace(w_t, scales=turned)

    def note(self, weights: Sequence[Sequence[Tensor]], record: bool) -> None:
        """Merge the amaxes of kept codes into the open slots, for delayed scaling; `weights` are those of each product. After the
        first recorded pass, which quantized as ever, it is told whether they may stay."""
        if self._scales is None or not record or self._stay is False:
            return
        in_force_S, opened_S = self._scales.views(self._slots, weights[0][0].device)
        if self._amaxes_S is not None:
            torch.maximum(opened_S, self._amaxes_S, out=opened_S)
            return
        if _capturing(in_force_S):
            return
        # layers that are one product have one scale
        own_S = torch.cat(
            [torch.stack([kernels.amax(w).view(()) for w in ws]).amax().expand(len(ws)) for ws in weights]
        )
        history_HS = self._scales.history_HS[:, list(self._slots)]
        constant = (own_S > 0) & (in_force_S == own_S) & (opened_S == own_S)
        constant &= ((history_HS == 0) | (history_HS == own_S)).all(0)
        self._stay = bool(constant.all())
        if self._stay:
            self._amaxes_S = own_S
        else:
            self._codes.clear()


def is_own(weights: Sequence[Tensor]) -> bool:
    """Return whether these are a model's own frozen parameters, whose changes torch counts.

    Those of inference mode are not, nor those that are streamed in for their layer's turn.
    """
    return all(
        type(w) is nn.Parameter and not w.requires_grad and not w.is_inference() and not hasattr(w, "borrowed")
        for w in weights
    )


def in_one_process() -> bool:
    """Return whether the whole model is here: where it is sharded, a weight's memory is only borrowed for its layer's turn."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def can_stay(q: Quantizer | None) -> bool:
    """Return whether a weight has the same codes each time it is quantized by `q`."""
    return q is None or not q.draws


def _capturing(t: Tensor) -> bool:
    """Return whether a CUDA graph is being recorded: what is computed then exists from its first replay on."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _contiguous(Q: Quantized) -> Quantized:
    """Put codes in rows, as tensor cores want them, where they are the view of a transpose."""
    if Q.codes.is_contiguous():
        return Q
    return replace(Q, codes=kernels.transpose_fp8(Q.codes.t()), scales=Q.scales.contiguous())
