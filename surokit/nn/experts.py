"""Experts computes the expert layers of a mixture of experts by a recipe, with stored weights and with adapters.

transformers keeps the experts of a layer in one module, whose weights have a dimension more: `gate_up_proj` [E, 2 I, H] (or
`up_proj` where nothing gates) and `down_proj` [E, H, I]. `adopt_experts` changes the class of such an object, as
`models/foreign.py` does: the class keeps its name, parameters, keys and hooks stay, and `projections` has one `ExpertsLinear` for
each weight. That is told what a `Linear` is told, and does for each expert what a `Linear` does: scales, histories and adapters
belong to one expert. `GatedExperts` are the experts of our own decoder.

Stored codes keep the weight's name, their scales get those of `Scaling.stored_as` behind it (`gate_up_proj_scale_inv`), and each
has the experts as its first dimension. Adapters are `lora_A.gate_up_proj` [E, r, K] and `lora_B.gate_up_proj` [E, N, r].

The pairs of a token and an expert that it is sent to are sorted by expert, so that those of one are rows of one matrix. Products
of quantized or stored weights go expert by expert (nn/linear_gemms.py); where nothing is quantized, torch's grouped product on
a CUDA device takes all experts at once, and the host waits for nothing.

E experts, T tokens, C experts of a token, S pairs of a token and an expert, K in_features, N out_features, r rank of an adapter.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from surokit.nn.drawn import note_drawn
from surokit.nn.linear_gemms import SLOTS, UNQUANTIZED, Operand, Precision, Products, storage_key_of, weight
from surokit.nn.loftq import TakenUp, added_up, take_up
from surokit.nn.swiglu import swiglu
from surokit.nn.weight_cache import KeepsDecoded
from surokit.quantized import Quantized, quantize
from surokit.quantizer import Quantizer
from surokit.recipe import Lora
from surokit.torch_private import not_compiled

# what transformers' decorator leaves at a module
_MARKS = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate")


def is_experts(module: nn.Module) -> bool:
    """Return whether these are the experts of a layer of transformers (5 or newer), adopted or not."""
    return all(hasattr(module, mark) for mark in _MARKS)


def unsupported(module: nn.Module) -> str:
    """Return in a few words why `adopt_experts` does not take this module; "" where it does."""
    if isinstance(module, Experts):
        return ""
    if not is_experts(module):
        return "no experts of transformers"
    if module.has_post_expert_norm:
        return "a norm after each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "expert parallel"
    names = {name for name, _ in module.named_parameters()}
    expected = {n for name in _names(module) for n in (name, f"{name}_bias") if module.has_bias or n == name}
    if names != expected:
        return f"its parameters are {', '.join(sorted(names)) or 'none'}"
    parameters = [p for _, p in module.named_parameters()]
    if any(p.dim() != (2 if name.endswith("_bias") else 3) for name, p in module.named_parameters()):
        return "its weights have no dimension for experts"
    if any(not p.is_floating_point() or p.itemsize < 2 for p in parameters):
        return "its weights are quantized already"
    return ""


def adopt_experts(module: nn.Module) -> Experts:
    """Return the same object with our forward: whoever holds it or its parameters keeps holding them.

    ValueError where `unsupported` says why not.
    """
    if isinstance(module, Experts):
        return module
    if why := unsupported(module):
        raise ValueError(f"{type(module).__name__} takes no recipe ({why}): leave it in bf16.")
    return _adopted(module, weights_of(module))


def adopt_stored(module: nn.Module, weights: Mapping[str, StoredExperts]) -> Experts:
    """Return the same object with our forward and these stored weights, for experts whose class holds weights in another way."""
    projections = {name: ExpertsLinear(module, name, stored.shape) for name, stored in weights.items()}
    experts = _adopted(module, projections)
    experts.own_forward = False
    for name, stored in weights.items():
        projections[name].set_stored_parts(stored.quantizer, stored.parts)
    return experts


def _adopted(module: nn.Module, projections: dict[str, ExpertsLinear]) -> Experts:
    module.__class__ = _class(type(module))
    module.__dict__["projections"] = projections
    assert isinstance(module, Experts)
    return module


def weights_of(module: nn.Module) -> dict[str, ExpertsLinear]:
    """Return the weights of experts by name; those of a module that is not adopted yet describe it, and hold nothing."""
    if isinstance(module, Experts):
        return module.projections
    return {name: ExpertsLinear(module, name) for name in _names(module)}


def _names(module: Any) -> tuple[str, str]:
    """Return the names of the two weights, in the order in which they are used."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """A StoredExperts is a weight of all experts, [E, N, K] by `shape`: codes, scales and scales of scales, [E, ...] each."""

    quantizer: Quantizer
    parts: tuple[Tensor, ...]
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


# -- which rows are whose


@dataclass(frozen=True, eq=False)
class Routing:
    """A Routing says which pairs of a token and an expert are whose: they are sorted by expert, and rows of matrices [S, ...] have
    this order.

    order_S: their places among all pairs, T x C. ends_E: int32, where the rows of each expert end. expert_S: whose they are.
    """

    order_S: Tensor
    expert_S: Tensor
    ends_E: Tensor
    choices: int  # C
    pairs: int  # T x C, of which those with no expert here are left out

    @staticmethod
    def of(index_TC: Tensor, experts: int) -> Routing:
        """Sort the pairs of `index_TC`; those of no expert (an index of E or more) come last."""
        expert_S, order_S = index_TC.reshape(-1).sort(stable=True)
        each_E = torch.arange(experts, dtype=expert_S.dtype, device=expert_S.device)
        ends_E = torch.searchsorted(expert_S, each_E, right=True, out_int32=True)
        return Routing(order_S, expert_S, ends_E, index_TC.shape[-1], expert_S.numel())

    @cached_property
    def rows(self) -> list[tuple[int, slice]]:
        """Return each expert that has tokens, and its rows.

        The host reads the ends, once a forward: a product of quantized operands is launched with its sizes, which the router
        chooses on the device.
        """
        ends = self.ends_E.tolist()
        return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends], ends)) if b > a]

    def cut(self) -> Routing:
        """Return the same without the pairs that no expert here computes."""
        last = self.rows[-1][1].stop if self.rows else 0
        if last == self.pairs:
            return self
        cut = Routing(self.order_S[:last], self.expert_S[:last], self.ends_E, self.choices, self.pairs)
        cut.__dict__["rows"] = self.rows
        return cut

    def gather(self, x_TK: Tensor) -> Tensor:
        """Return the rows of all pairs, [S, ...]."""
        return x_TK[self.order_S // self.choices]

    def sum(self, x_SK: Tensor) -> Tensor:
        """Return each token's sum over its experts, [T, ...]: in a fixed order, rounded once."""
        x_PK = x_SK.new_zeros((self.pairs, *x_SK.shape[1:])).index_copy_(0, self.order_S, x_SK)
        return x_PK.unflatten(0, (-1, self.choices)).sum(1) if self.pairs else x_PK


class _Gather(torch.autograd.Function):
    """A _Gather is Routing.gather, with a gradient that is summed in a fixed order and rounded once."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return routing.gather(x_TK)

    @staticmethod
    def backward(ctx: Any, dx_SK: Tensor) -> Any:
        return ctx.routing.sum(dx_SK), None


class _OfEachRow(torch.autograd.Function):
    """An _OfEachRow gives each row the bias of its expert; the gradient is summed in float32 or wider, and rounded once."""

    @staticmethod
    def forward(ctx: Any, bias_EN: Tensor, routing: Routing) -> Tensor:
        ctx.routing, ctx.dtype = routing, bias_EN.dtype
        return bias_EN[routing.expert_S]

    @staticmethod
    def backward(ctx: Any, dy_SN: Tensor) -> Any:
        wide = torch.promote_types(dy_SN.dtype, torch.float32)
        ends_E = ctx.routing.ends_E.long()
        lengths_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        # unsafe: the lengths are not looked at, which the host would wait for
        sums_EN = torch.segment_reduce(dy_SN.to(wide), "sum", lengths=lengths_E, axis=0, unsafe=True, initial=0.0)
        return sums_EN.to(ctx.dtype), None


# -- the products


@dataclass(frozen=True, eq=False)
class _Each:
    """An _Each says how the product of each expert is computed. cast: the dtype that autocast gives a weight that is not stored."""

    shape_NK: tuple[int, int]
    transposed: bool = False
    storage: Quantizer | None = None
    precision: Precision | None = None
    record: bool = False
    cast: torch.dtype | None = None

    def products(self, expert: int, dtype: torch.dtype) -> Products:
        if self.precision is None:
            return Products(UNQUANTIZED, None, (0,), False, dtype)
        first = self.precision.first_slot + len(SLOTS) * expert
        return Products(self.precision.recipe, self.precision.scales, (first,), self.record, dtype)

    def weight(self, expert: int, w: Tensor, scales: Sequence[Tensor]) -> Operand:
        """Return the expert's weight [N, K] as it is held."""
        if self.storage is not None:
            return weight(w[expert], [s[expert] for s in scales], self.storage, self.shape_NK)
        w_NK = w[expert].t() if self.transposed else w[expert]
        return w_NK if self.cast is None else w_NK.to(self.cast)


class _ExpertByExpert(torch.autograd.Function):
    """y of each expert's rows, x w'. Of the weights one is looked at after the other, so that neither copies nor gradients of all
    of them are made for one."""

    @staticmethod
    def forward(
        ctx: Any, x_SK: Tensor, w: Tensor, each: _Each, routing: Routing, wants_dw: bool, *scales: Tensor
    ) -> Tensor:
        y_SN = x_SK.new_empty((len(x_SK), each.shape_NK[0]))
        kept: list[Tensor] = []
        for expert, rows in routing.rows:
            products = each.products(expert, x_SK.dtype)
            x_q, x_kept = products.x(x_SK[rows], wants_dw)
            y_SN[rows] = products.forward(x_q, products.w(each.weight(expert, w, scales)))
            if wants_dw and isinstance(x_kept, Quantized):
                kept += x_kept.parts
        whole = wants_dw and not kept  # grad_weight takes x as it is
        ctx.save_for_backward(w, x_SK if whole else None, *scales, *kept)
        ctx.constants = each, routing, len(scales), x_SK.shape
        return y_SN

    @staticmethod
    @once_differentiable  # the rounding of dy has no gradient: an error is better than a wrong one
    def backward(ctx: Any, dy_SN: Tensor) -> Any:
        each, routing, n_scales, shape_SK = ctx.constants
        w, x_SK, *rest = ctx.saved_tensors
        scales, kept = rest[:n_scales], rest[n_scales:]
        parts = len(kept) // len(routing.rows) if routing.rows else 0  # of each expert's x
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx_SK = dy_SN.new_empty(shape_SK) if wants_dx else None
        dw = None
        if wants_dw:  # an expert without tokens has a gradient too, of zeros
            dw = torch.empty_like(w) if len(routing.rows) == len(w) else torch.zeros_like(w)
        for i, (expert, rows) in enumerate(routing.rows):
            products = each.products(expert, dy_SN.dtype)
            w_NK = each.weight(expert, w, scales)
            x_KT = None
            if wants_dw:
                x_kept = [x_SK[rows]] if x_SK is not None else kept[i * parts : (i + 1) * parts]
                x_KT = products.x_t(x_kept, (shape_SK[1], rows.stop - rows.start))
            dy_q, dy_t = products.dy(dy_SN[rows].contiguous(), wants_dx, wants_dw, x_KT)
            if dx_SK is not None:
                dx_SK[rows] = products.grad_input(dy_q, products.w_t(w_NK, dy_q))
            if dw is not None and x_KT is not None:
                assert isinstance(w_NK, Tensor)
                dw_NK = products.grad_weight(dy_t, x_KT, w_NK.dtype)
                dw[expert] = dw_NK.t() if each.transposed else dw_NK
        return dx_SK, dw, *(None for _ in range(3 + n_scales))


def _products(x_SK: Tensor, w: Tensor, each: _Each, routing: Routing, scales: Sequence[Tensor] = ()) -> Tensor:
    """Return x w' of each expert's rows, [S, N], in the dtype of x."""
    if each.storage is None and each.precision is None and _groups(w, x_SK.dtype):
        y_SN = F.grouped_mm(x_SK, w if each.transposed else w.transpose(-2, -1), offs=routing.ends_E)
        if y_SN.requires_grad:  # torch's backward takes no gradient that repeats one number, as that of a sum does
            y_SN.register_hook(Tensor.contiguous)
        return y_SN
    wants_dw = w.requires_grad and torch.is_grad_enabled()
    y: Tensor = _ExpertByExpert.apply(x_SK, w, each, routing, wants_dw, *scales)
    return y


def _groups(w: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product takes these weights, and x in this dtype."""
    fits = w.dtype == dtype and w.is_contiguous() and w.data_ptr() % 16 == 0
    return fits and _sizes_group(w.shape[1:], w.device, dtype)


def _sizes_group(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether it takes weights of these sizes: in bfloat16 on a CUDA device, with rows that begin at 16 bytes."""
    return has_grouped_product(device) and dtype == torch.bfloat16 and not any(n % 8 for n in sizes)


@cache
def has_grouped_product(device: torch.device) -> bool:
    """Return whether torch multiplies all experts at once on this device."""
    return device.type == "cuda" and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device) >= (8, 0)


# -- one weight of all experts


def _sizes(w: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Return E, N and K of a weight."""
    E, N, K = w.transpose(-2, -1).shape if transposed else w.shape
    return E, N, K


@dataclass(frozen=True, eq=False)
class _BeforeMerging:
    """A _BeforeMerging holds what merging an adapter replaced, outside the module's parameters, so in no state dict."""

    weight: Tensor | tuple[Tensor, ...]  # or the parts of a stored one
    storage: Quantizer | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_alpha: float
    adapter_fits: str


class ExpertsLinear(KeepsDecoded):
    """An ExpertsLinear is one weight of all experts, for example all down projections: E linear layers, each with what a
    `surokit.nn.Linear` has.

    The parameters are the module's, under the weight's name; this has what a Linear holds beside its own.
    """

    taken_up: TakenUp | None = None  # by all adapters, where they began with what quantizing the weights lost
    adapter_fits = ""  # the storage whose error they began with, in words, whatever the weights are stored in by now

    def __init__(self, module: nn.Module, name: str, shape_ENK: tuple[int, int, int] | None = None) -> None:
        self.name = name
        self.transposed = bool(getattr(module, "is_transposed", False))  # the parameter is [E, K, N]
        E, N, K = shape_ENK or _sizes(getattr(module, name), self.transposed)
        self.experts, self.out_features, self.in_features = E, N, K
        self.precision: Precision | None = None
        self.storage: Quantizer | None = None
        self.lora_alpha = 0.0
        self._before: _BeforeMerging | None = None
        self._module = weakref.ref(module)  # no circle, so that a model goes when its last name does

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the module binds what it has (Experts.__setstate__), and what is kept is of its weights alone."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_module", "kept")}

    def bound_to(self, module: nn.Module) -> ExpertsLinear:
        """Return a copy that belongs to another module."""
        other = copy.copy(self)
        other._module = weakref.ref(module)
        return other

    @property
    def module(self) -> Any:
        """Return the experts whose weight this is; they record amaxes where `precision` has histories."""
        module = self._module()
        if module is None:
            raise ReferenceError(f"The experts whose {self.name} this was are gone: hold the model while you use it.")
        return module

    @property
    def slots(self) -> int:
        """Return how many slots of histories the weight needs, from the first one of its `precision`: each expert has its own."""
        return len(SLOTS) * self.experts

    @property
    def weight(self) -> nn.Parameter:
        """Return the parameter: [E, N, K] (or [E, K, N] where `transposed`), or the codes of [N, K] for each expert."""
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the biases [E, N], or None."""
        bias: nn.Parameter | None = getattr(self.module, f"{self.name}_bias") if self.module.has_bias else None
        return bias

    @property
    def requires_grad(self) -> bool:
        return self.weight.requires_grad

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weight as held, its scales, the bias and the adapter."""
        adapter = (self.lora_A, self.lora_B) if self.has_adapter else ()
        yield from (p for p in (self.weight, *self.stored_scales, self.bias, *adapter) if p is not None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parameters, as they are held."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def active(self) -> bool:
        """Return whether anything is not as in transformers' own experts."""
        return self.precision is not None or self.storage is not None or self.has_adapter

    # -- what it computes

    def __call__(self, x_SK: Tensor, routing: Routing, record: bool = False) -> Tensor:
        """Compute y [S, N] of each expert's rows of x [S, K]; with `record`, delayed scaling notes the amaxes it sees."""
        bias_EN: Tensor | None = self.bias
        cast = None
        if torch.is_autocast_enabled(x_SK.device.type):
            cast = torch.get_autocast_dtype(x_SK.device.type)
            x_SK = x_SK.to(cast)
            bias_EN = None if bias_EN is None else bias_EN.to(cast)
        shape_NK = self.out_features, self.in_features
        if self.keeps_now:  # the products get ordinary frozen weights, and keep them as they would any
            w: Tensor = self.decoded_weight(x_SK.dtype)
            scales: tuple[Tensor, ...] = ()
            each = _Each(shape_NK, False, None, self.precision, record)
        else:
            w, scales = self.weight, self.stored_scales
            each = _Each(shape_NK, self.transposed, self.storage, self.precision, record, cast)
        y_SN = _products(x_SK, w, each, routing, scales)
        if bias_EN is not None:
            y_SN = y_SN + _OfEachRow.apply(bias_EN, routing).to(y_SN.dtype)
        return y_SN + self.adapter(x_SK, routing, cast) if self.has_adapter else y_SN

    def groups(self, dtype: torch.dtype) -> bool:
        """Return whether all of it is computed for all experts at once, so that the host needs to know no sizes."""
        if self.precision is not None or (self.storage is not None and not self.keeps_now):
            return False
        held = [self.lora_A, self.lora_B] if self.has_adapter else []
        held += [] if self.keeps_now else [self.weight]
        sizes = self.out_features, self.in_features
        return _sizes_group(sizes, self.weight.device, dtype) and all(_groups(w, dtype) for w in held)

    # -- stored weights

    def store(self, quantizer: Quantizer) -> bool:
        """Replace the weights by codes and scales, frozen, each expert by its own; the high-precision weights are let go.

        Returns whether any that were stored before had to be quantized again; see `surokit.nn.Linear.store`.
        """
        if self.storage is None:
            w_ENK = self.dense_weight().detach()
            self.set_stored(quantize(w_NK, quantizer) for w_NK in w_ENK)
            return False
        before = [self.stored_of(expert) for expert in range(self.experts)]
        same = [renamed for Q in before if (renamed := Q.renamed(quantizer))]
        again = len(same) < len(before)
        self.set_stored((quantize(Q.dequantize(), quantizer) for Q in before) if again else same)
        return again

    def set_stored(self, experts: Iterable[Quantized]) -> None:
        """Take E quantized weights [N, K] as they are, in the experts' order; they are copied one after the other."""
        parts: tuple[Tensor, ...] = ()
        quantizer = None
        for i, Q in enumerate(experts):
            if not parts:
                parts = tuple(part.new_empty((self.experts, *part.shape)) for part in Q.parts)
                quantizer = Q.quantizer
            for whole, part in zip(parts, Q.parts, strict=True):
                whole[i] = part
        assert quantizer is not None
        self.set_stored_parts(quantizer, parts)

    def set_stored_parts(self, quantizer: Quantizer, parts: Sequence[Tensor]) -> None:
        """Take the codes, the scales and the scales of the scales of all experts, [E, ...] each, for example from a checkpoint."""
        quantizer.check_stores()
        self.drop_stored()
        names = (self.name, *self._scale_names(quantizer))
        for name, part in zip(names, parts):
            setattr(self.module, name, nn.Parameter(part.contiguous(), requires_grad=False))
        self.storage = quantizer

    def drop_stored(self) -> None:
        """Forget the scales of a stored weight; `set_dense` or `set_stored` then gives another one."""
        if self.storage is not None:
            for name in self._scale_names(self.storage):
                if name in self.module._parameters:
                    delattr(self.module, name)
            self.storage = self.kept = self.taken_up = None

    def _scale_names(self, storage: Quantizer) -> tuple[str, ...]:
        """Return what the scales are called: `weight_scale_inv` of a Linear is `down_proj_scale_inv` here."""
        return tuple(self.name + name.removeprefix("weight") for name in storage.scaling.stored_as)

    @property
    def storage_key(self) -> str:
        """Return how the weight is stored, as text; "" where it is not."""
        return storage_key_of(self.storage)

    @property
    def stored_scales(self) -> tuple[nn.Parameter, ...]:
        """Return scales of a stored weight, and scales of the scales, [E, ...] each; empty without one."""
        if self.storage is None:
            return ()
        held = self.module._parameters
        return tuple(getattr(self.module, name) for name in self._scale_names(self.storage) if name in held)

    @property
    def stored(self) -> tuple[Quantized, ...] | None:
        """Return each expert's stored weight [N, K], or None. TypeError where a cast has spoilt them."""
        if self.storage is None:
            return None
        return tuple(self.stored_of(expert) for expert in range(self.experts))

    def stored_of(self, expert: int) -> Quantized:
        """Return the stored weight [N, K] of one expert."""
        if self.storage is None:
            raise ValueError(
                f"{self.name} is not stored quantized: store(quantizer) does that, and `weight` is what it has."
            )
        parts = tuple(part[expert] for part in (self.weight, *self.stored_scales))
        return Quantized.of(self.storage, parts, (self.out_features, self.in_features))

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights [E, N, K] as the products see them: themselves, or dequantized (bfloat16 unless `dtype` is given)."""
        if self.storage is None:
            w = self.weight.to(dtype or self.weight.dtype)
            return w.transpose(-2, -1) if self.transposed else w
        shape = self.experts, self.out_features, self.in_features
        w_ENK = torch.empty(shape, dtype=dtype or torch.bfloat16, device=self.weight.device)
        for expert in range(self.experts):
            w_ENK[expert] = self.stored_of(expert).dequantize(w_ENK.dtype)
        return w_ENK

    def set_dense(self, w_ENK: Tensor, requires_grad: bool = False) -> None:
        """Put weights [E, N, K] in place of what is held, as the parameter's own layout wants them."""
        self.drop_stored()
        w = (w_ENK.transpose(-2, -1) if self.transposed else w_ENK).detach().contiguous()
        setattr(self.module, self.name, nn.Parameter(w, requires_grad=requires_grad))

    # -- adapters

    def adapter(self, x_SK: Tensor, routing: Routing, cast: torch.dtype | None = None) -> Tensor:
        """Compute alpha / rank * B A x of each expert's rows, [S, N]."""
        a_ErK, b_ENr = (w if cast is None else w.to(cast) for w in (self.lora_A, self.lora_B))
        rank = self.lora_rank
        h_Sr = _products(x_SK, a_ErK, _Each((rank, self.in_features)), routing) * (self.lora_alpha / rank)
        return _products(h_Sr, b_ENr, _Each((self.out_features, rank)), routing)

    @property
    def has_adapter(self) -> bool:
        return "lora_A" in self.module._modules and self.name in self.module.lora_A

    @property
    def lora_A(self) -> nn.Parameter:
        """Return A of all experts, [E, r, K]."""
        a_ErK: nn.Parameter = self.module.lora_A[self.name]
        return a_ErK

    @property
    def lora_B(self) -> nn.Parameter:
        """Return B of all experts, [E, N, r]."""
        b_ENr: nn.Parameter = self.module.lora_B[self.name]
        return b_ENr

    @property
    def lora_rank(self) -> int:
        """Return the rank of the adapter, 0 without one."""
        return self.lora_A.shape[1] if self.has_adapter else 0

    def add_adapter(self, lora: Lora, dtype: torch.dtype | None = None, original: Tensor | None = None) -> None:
        """Add y += alpha / rank * B A x for each expert, A Kaiming-uniform and B zero, so that y is unchanged at first.

        A and B take `dtype`; without it the weight's own, or bfloat16 where the weight is stored. original: the weights [E, N, K]
        as they were before they were stored, with which each expert's A and B begin as LoftQ says.
        """
        dtype = dtype or (torch.bfloat16 if self.storage else self.weight.dtype)
        device = self.weight.device
        # drawn on the CPU, so that a seed gives the same adapter on every device; in rows of K, which the bounds depend on
        a = torch.empty(self.experts * lora.rank, self.in_features, dtype=torch.float32, device="cpu")
        a_ErK = nn.init.kaiming_uniform_(a, a=math.sqrt(5)).view(self.experts, lora.rank, self.in_features)
        b_ENr = torch.zeros(self.experts, self.out_features, lora.rank, dtype=dtype, device=device)
        self._set_adapter(nn.Parameter(a_ErK.to(device, dtype)), nn.Parameter(b_ENr), lora.alpha)
        if device.type == "meta":
            note_drawn(self.module.lora_A, self.name, a_ErK)
            note_drawn(self.module.lora_B, self.name, torch.zeros(b_ENr.shape))
        if original is not None:
            taken = []
            for expert, w_NK in enumerate(original.detach()):
                error_NK = w_NK.float() - self.stored_of(expert).dequantize(torch.float32)
                a_rK, b_Nr = self.lora_A.detach()[expert], self.lora_B.detach()[expert]
                taken.append(take_up(error_NK, a_rK, b_Nr, lora.alpha / lora.rank))
            self.adapter_fits, self.taken_up = str(self.storage), added_up(taken)

    def _set_adapter(self, a_ErK: nn.Parameter, b_ENr: nn.Parameter, alpha: float) -> None:
        module = self.module
        if "lora_A" not in module._modules:
            module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        module.lora_A[self.name], module.lora_B[self.name] = a_ErK, b_ENr
        self.lora_alpha = alpha

    def remove_adapter(self) -> None:
        """Drop the adapter without merging it."""
        self.adapter_fits = ""
        module = self.module
        del module.lora_A[self.name], module.lora_B[self.name]
        if not len(module.lora_A):
            del module.lora_A, module.lora_B
        self.taken_up = None

    @torch.no_grad()
    def merge_adapter(self, requantize: bool = False, keep: bool = True) -> None:
        """Add alpha / rank * B A to each expert's weight, rounded once, and set the adapter aside; without an adapter, nothing.

        requantize, keep: as for `surokit.nn.Linear.merge_adapter`.
        """
        if not self.has_adapter:
            return
        before = self.storage
        if keep:
            held = self.weight.detach().clone() if before is None else (self.weight, *self.stored_scales)
            adapter = self.lora_A, self.lora_B, self.lora_alpha, self.adapter_fits
            self._before = _BeforeMerging(held, before, *adapter)
        else:
            self._before = None
        if before is None:
            w_ENK = self.dense_weight()  # a view: whoever holds the parameter goes on holding it
            for expert in range(self.experts):
                w_ENK[expert] = self._merged(expert)
        elif requantize:
            self.set_stored(quantize(self._merged(expert), before) for expert in range(self.experts))
        else:
            shape = self.experts, self.out_features, self.in_features
            w_ENK = torch.empty(shape, dtype=self.lora_A.dtype, device=self.weight.device)
            for expert in range(self.experts):
                w_ENK[expert] = self._merged(expert)
            self.set_dense(w_ENK)
        self.remove_adapter()

    def _merged(self, expert: int) -> Tensor:
        """Return one expert's weight [N, K] with its adapter, in float32 or wider."""
        base = self.dense_weight()[expert] if self.storage is None else self.stored_of(expert).dequantize(torch.float32)
        wide = torch.promote_types(base.dtype, torch.float32)
        delta = self.lora_B[expert].to(wide) @ self.lora_A[expert].to(wide)
        return base.to(wide) + delta * (self.lora_alpha / self.lora_rank)

    @torch.no_grad()
    def unmerge_adapter(self) -> None:
        """Bring back the weights as they were before `merge_adapter`, bit for bit, and the adapter."""
        before = self._before
        if before is None:
            raise ValueError(
                "There is no merged adapter to take out again: merge_adapter(keep=True) keeps what it replaces."
            )
        if self.has_adapter:
            raise ValueError(
                "The experts have got another adapter since it was merged: remove_adapter() first, then unmerge_adapter()."
            )
        device = self.weight.device
        if isinstance(before.weight, Tensor) and self.storage is None:
            self.weight.copy_(before.weight)
        elif isinstance(before.weight, Tensor):
            w = before.weight.to(device)
            self.set_dense(w.transpose(-2, -1) if self.transposed else w)
        else:
            assert before.storage is not None
            self.set_stored_parts(before.storage, [part.to(device) for part in before.weight])
        a_ErK, b_ENr = (nn.Parameter(p.to(device), p.requires_grad) for p in (before.lora_A, before.lora_B))
        self._set_adapter(a_ErK, b_ENr, before.lora_alpha)
        self.adapter_fits, self._before = before.adapter_fits, None

    @property
    def can_unmerge(self) -> bool:
        """Return whether `unmerge_adapter` has something to bring back."""
        return self._before is not None

    def __repr__(self) -> str:
        parts = [
            f"{self.name}: experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        ]
        if self.precision is not None:
            parts.append(f"recipe={self.precision.recipe.name}")
        if self.storage is not None:
            parts.append(f"W={self.storage}")
        if self.has_adapter:
            parts.append(f"lora r={self.lora_rank}")
        return ", ".join(parts)


# -- the module


class Experts(nn.Module):
    """Experts is mixed into a class of transformers, which is `original`, and computes with what its `projections` hold.

    Where they hold nothing, the original's own forward runs. `GatedExperts` is a class of ours, without an original.
    """

    original: Any = None  # a class of transformers
    projections: dict[str, ExpertsLinear]
    own_forward: bool = True  # whether the original's computes with the weights as they are here
    has_gate: bool
    num_experts: int
    act_fn: Any
    _apply_gate: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The mixed class has no name of its own that a pickle could find: it is made again."""
        if self.original is None:
            return super().__reduce_ex__(protocol)
        return _empty, (self.original,), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.projections = {name: held.bound_to(self) for name, held in self.projections.items()}
        for held in self.projections.values():  # a copy's histories belong to its layers
            if held.precision is not None and held.precision.scales is not None:
                held.precision.scales.layers.add(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        self._let_go()
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._let_go()  # torch cannot swap in parameters that are still referred to
        super()._load_from_state_dict(*args, **options)

    def _let_go(self) -> None:
        for projection in self.projections.values():
            projection.kept = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_parametrized(self) and any(projection.storage for projection in self.projections.values()):
            raise RuntimeError(
                "PEFT's target_parameters adds to the weights of experts, which are stored as codes here: take "
                "recipe.lora(targets=(...)) for an adapter on stored experts."
            )
        if self.own_forward and not any(projection.active for projection in self.projections.values()):
            return super().forward(*args, **kwargs)
        if kwargs:  # which have other names in each model
            args = _signature(self.original).bind(self, *args, **kwargs).args[1:]
        return self._routed(*args)

    @not_compiled  # sizes are read from the device, and torch's compiler would make a graph of each
    def _routed(self, x_TK: Tensor, index_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return each token's sum over its experts, [T, N], in the dtype of x; an index of E or more is no expert."""
        up, down = self.projections.values()
        record = self.training and torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(x_TK.device.type)
        dtype = torch.get_autocast_dtype(x_TK.device.type) if autocast else x_TK.dtype
        if x_TK.numel() and up.groups(dtype) and down.groups(dtype):
            # sizes stay on the device, so that what is no expert's cannot be cut: it is computed, and counts for nothing
            elsewhere = index_TC >= self.num_experts
            index_TC = index_TC.clamp(max=self.num_experts - 1)
            weights_TC = weights_TC.masked_fill(elsewhere, 0.0)
            routing = Routing.of(index_TC, self.num_experts)
        else:
            routing = Routing.of(index_TC, self.num_experts).cut()
        x_SK = _Gather.apply(x_TK.to(dtype), routing)
        h_SN = up(x_SK, routing, record)
        h_SK = self._apply_gate(h_SN) if self.has_gate else self.act_fn(h_SN)
        y_SN = down(h_SK, routing, record)
        weighted_SN = y_SN * weights_TC.reshape(-1)[routing.order_S].unsqueeze(-1)
        return routing.sum(weighted_SN).to(x_TK.dtype)

    def extra_repr(self) -> str:
        return "\n".join(str(projection) for projection in self.projections.values())


class GatedExperts(Experts):
    """A GatedExperts computes down(silu(gate x) * up x) in each of the experts that a router chose for a token, and their weighted
    sum.

    Its parameters are those of transformers' experts: `gate_up_proj` [E, 2 I, K], gate first, and `down_proj` [E, K, I].
    """

    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False

    def __init__(self, experts: int, width: int, ffn: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, ffn))
        self.projections = {name: ExpertsLinear(self, name) for name in _names(self)}

    def forward(self, x_TK: Tensor, index_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts, [T, K], in the dtype of x."""
        y_TK: Tensor = self._routed(x_TK, index_TC, weights_TC)
        return y_TK

    def _apply_gate(self, gate_up_SN: Tensor) -> Tensor:
        gate_SI, up_SI = gate_up_SN.chunk(2, dim=-1)
        return swiglu(gate_SI, up_SI)


def _read_signature(original: Any) -> inspect.Signature:
    return inspect.signature(original.forward)


def _made(original: Any) -> Any:
    """Return the class that is both, under the original's name."""
    namespace: dict[str, Any] = {"original": original, "__module__": original.__module__, "__doc__": original.__doc__}
    namespace["__qualname__"] = original.__qualname__
    return type(original)(original.__name__, (Experts, original), namespace)


_signature: Any = cache(_read_signature)
_class: Any = cache(_made)  # one class for all objects


def _empty(original: Any) -> Any:
    kind = _class(original)
    return kind.__new__(kind)
