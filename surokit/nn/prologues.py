"""A source is what the linear layers of a stage read: a norm of the residual stream, a gate, or a tensor as it is.

A source gives its values x, or their codes straight from the kernel that computes them, and its own gradient from that of x.
Inside a stage (nn/stages.py) a source is its tensors and one of the forms below, which do to them what they say; the products
know nothing of it.

T tokens (all leading dimensions), K features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from surokit.fusion import Fusion
from surokit.kernels import best, serving
from surokit.kernels.reference import norm as norms
from surokit.kernels.reference import quantize as tiles
from surokit.kernels.reference import swiglu as gates
from surokit.nn.norm import RMSNorm
from surokit.nn.swiglu import swiglu
from surokit.quantized import Quantized, least_amax
from surokit.quantizer import Block, PerRow, Quantizer
from surokit.torch_private import is_hooked

Tensors = tuple[Any, ...]  # None for a delta that is not there
Kept = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Coded:
    """A Coded says which codes a source is asked for: how they are made, and for delayed scaling the amaxes in force and the open
    slots."""

    quantizer: Quantizer
    amaxes: tuple[Tensor, Tensor] | None = None
    record: bool = False
    both: bool = False  # codes of x' too, in rows of their own

    @staticmethod
    def possible(q: Quantizer | None, x: Tensor) -> bool:
        """Return whether norm and gate have a form that gives such codes: delayed per tensor, per row, or for parts of a row."""
        if q is None or q.draws or q.hadamard or x.itemsize > 4:
            return False
        if x.is_cuda and serving(tiles.quantize, x.device)[0] != "triton":  # a device without float8
            return False
        match q.scaling:
            case PerRow():
                return True
            case Block(rows=1, columns=columns):
                return columns >= 16 and columns.bit_count() == 1
        return q.delayed

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which kernels make these codes."""
        q = self.quantizer
        given: dict[str, Any] = {"columns": q.scaling.tile()[1], "pow2": q.scaling.pow2, "floor": least_amax(q)}
        if self.amaxes is not None:
            given |= {"in_force": self.amaxes[0], "opened": self.amaxes[1], "record": self.record}
        return given | {"both": True} if self.both else given

    def of(self, codes_TK: Tensor, *scales: Tensor) -> tuple[Quantized, Quantized | None]:
        """Wrap codes and scales as the kernels give them; with `both`, those of x' follow."""
        shape = codes_TK.shape[0], codes_TK.shape[1]
        codes = Quantized.of(self.quantizer, (codes_TK, scales[0]), shape)
        return codes, Quantized.of(self.quantizer, scales[1:], shape[::-1]) if self.both else None


@dataclass(frozen=True, eq=False)
class Made:
    """A Made holds what forward made of a source: x and its codes, as far as they were asked for, and what backward needs."""

    x_TK: Tensor | None
    codes: Quantized | None
    codes_t: Quantized | None  # of x'
    kept: Kept
    stream: Tensor | None = None


class Prologue(Protocol):
    """A Prologue computes a source from its tensors inside a stage, forward and backward."""

    gives_codes: ClassVar[bool]

    def gives_both(self, q: Quantizer) -> bool:
        """Return whether the form gives the codes of x and of x' in one pass."""
        ...

    def forward(self, tensors: Tensors, coded: Coded | None, values: bool) -> Made: ...

    def backward(
        self, kept: Kept, dx_TK: Tensor | None, dstream: Tensor | None, wants: tuple[bool, ...], again: bool
    ) -> tuple[Tensors, Tensor | None]:
        """Return the gradients of the tensors, at least those that are wanted; and `again`, x [T, K] once more, bit for bit."""
        ...


@dataclass(frozen=True, eq=False)
class Normed:
    """A Normed gives RMSNorm(stream + delta), or of the stream alone; all [..., K] in one dtype. The sum goes on as the stream."""

    stream: Tensor
    norm: RMSNorm
    delta: Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        return self.stream, self.norm.weight, self.delta

    @property
    def form(self) -> Prologue:
        return _Norm(self.norm.eps)

    def fuses(self, fusion: Fusion) -> bool:
        ours = type(self.norm).forward is RMSNorm.forward and not is_hooked(self.norm)
        same = self.delta is None or (self.delta.shape == self.stream.shape and self.delta.dtype == self.stream.dtype)
        return fusion.norm and ours and same

    def composed(self) -> tuple[Tensor | None, Tensor]:
        """Return the stream and x, computed by separate operations."""
        stream = self.stream if self.delta is None else self.stream + self.delta
        return stream, self.norm(stream)


@dataclass(frozen=True, eq=False)
class Gated:
    """A Gated gives silu(gate) * up, both [..., K] in one dtype.

    joint: the tensor [..., 2 K] whose halves they are, if one product made them; its gradient is then written as one.
    """

    gate: Tensor
    up: Tensor
    joint: Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        return (self.gate, self.up) if self.joint is None else (self.joint,)

    @property
    def form(self) -> Prologue:
        return _Gate()

    def fuses(self, fusion: Fusion) -> bool:
        return fusion.gate and self.gate.shape == self.up.shape and self.gate.dtype == self.up.dtype

    def composed(self) -> tuple[Tensor | None, Tensor]:
        return None, swiglu(self.gate, self.up)


@dataclass(frozen=True, eq=False)
class Plain:
    """A Plain gives x [..., K] as it is."""

    x: Tensor

    @property
    def tensors(self) -> Tensors:
        return (self.x,)

    @property
    def form(self) -> Prologue:
        return _Itself(self.x.shape)

    def fuses(self, fusion: Fusion) -> bool:
        return True

    def composed(self) -> tuple[Tensor | None, Tensor]:
        return None, self.x


Source = Normed | Gated | Plain


# -- inside a stage


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Norm:
    """Tensors: stream, weight, delta or None. Kept: the stream as normed, weight, r."""

    gives_codes: ClassVar[bool] = True
    eps: float

    def gives_both(self, q: Quantizer) -> bool:
        return q.delayed  # a scale for a part of a column would wait for the norms of all its rows

    def forward(self, tensors: Tensors, coded: Coded | None, values: bool) -> Made:
        stream, w_K, delta = tensors
        stream_TK, delta_TK, sum_TK = _rows(stream), None if delta is None else _rows(delta), None
        codes = codes_t = None
        if coded is not None:
            *parts, r_T1, sum_TK, x_TK = best(norms.forward_quantized, stream.device)(
                stream_TK, w_K, self.eps, coded.quantizer.format, delta=delta_TK, values=values, **coded.arguments()
            )
            codes, codes_t = coded.of(*parts)
        elif delta_TK is not None:
            sum_TK, x_TK, r_T1 = best(norms.add_forward, stream.device)(stream_TK, delta_TK, w_K, self.eps)
        else:
            x_TK, r_T1 = best(norms.forward, stream.device)(stream_TK, w_K, self.eps)
        out = stream if sum_TK is None else sum_TK.view(stream.shape)
        return Made(x_TK, codes, codes_t, (out, w_K, r_T1), out)

    def backward(
        self, kept: Kept, dx_TK: Tensor | None, dstream: Tensor | None, wants: tuple[bool, ...], again: bool
    ) -> tuple[Tensors, Tensor | None]:
        if not kept:
            return (dstream, None, dstream), None
        stream, w_K, r_T1 = kept
        x_TK = best(norms.recompute, stream.device)(_rows(stream), w_K, r_T1) if again else None
        if dx_TK is None:  # no gradient came by way of x
            return (dstream, None, dstream), x_TK
        residual = None if dstream is None else _rows(dstream)
        dsum_TK, dw_K = best(norms.backward, stream.device)(
            dx_TK, _rows(stream), w_K, r_T1, residual=residual, need_dw=wants[1]
        )
        dsum = dsum_TK.view(stream.shape)
        return (dsum, dw_K, dsum), x_TK


@dataclass(frozen=True)
class _Gate:
    """Tensors, which are also what is kept: gate and up, or one whose halves they are."""

    gives_codes: ClassVar[bool] = True

    def gives_both(self, q: Quantizer) -> bool:
        return q.delayed or (q.both_in_one_pass and 0 < q.scaling.tile()[1] <= 128)

    def forward(self, tensors: Tensors, coded: Coded | None, values: bool) -> Made:
        gate, up = _halves(tensors)
        if coded is None:
            return Made(best(gates.forward, gate.device)(gate, up), None, None, tensors)
        form = best(gates.forward_quantized, gate.device)
        *parts, x_TK = form(gate, up, coded.quantizer.format, values=values, **coded.arguments())
        return Made(x_TK, *coded.of(*parts), tensors)

    def backward(
        self, kept: Kept, dx_TK: Tensor | None, dstream: Tensor | None, wants: tuple[bool, ...], again: bool
    ) -> tuple[Tensors, Tensor | None]:
        if not kept:
            return tuple(None for _ in wants), None
        gate, up = _halves(kept)
        if dx_TK is None:
            return tuple(None for _ in wants), best(gates.forward, gate.device)(gate, up) if again else None
        form = best(gates.backward, gate.device)
        grads = form(dx_TK, gate, up, joint=len(kept) == 1, values=again)
        return tuple(grad.view(t.shape) for grad, t in zip(grads, kept)), grads[-1] if again else None


def _halves(kept: Tensors) -> tuple[Tensor, Tensor]:
    gate, up = kept if len(kept) == 2 else kept[0].tensor_split(2, dim=-1)
    return _rows(gate), _rows(up)


@dataclass(frozen=True)
class _Itself:
    """Tensors: x. Nothing is kept."""

    gives_codes: ClassVar[bool] = False
    shape: torch.Size

    def gives_both(self, q: Quantizer) -> bool:
        return False

    def forward(self, tensors: Tensors, coded: Coded | None, values: bool) -> Made:
        return Made(_rows(tensors[0]), None, None, ())

    def backward(
        self, kept: Kept, dx_TK: Tensor | None, dstream: Tensor | None, wants: tuple[bool, ...], again: bool
    ) -> tuple[Tensors, Tensor | None]:
        return (None if dx_TK is None else dx_TK.view(self.shape),), None
