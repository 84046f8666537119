"""Compute a norm or a gate and the linear layers that read it, a stage, as one operation of autograd forward and one backward.

    x = RMSNorm(stream + delta), silu(gate) * up, or as it is          nn/prologues.py
    y_i = x w_i' + bias_i + s_i (x A_i') B_i'                          for every layer

What is gained: x is quantized once for all layers, in the kernel that computes it where that has such a form; layers whose
weights lie side by side are one product, and so are the A of their adapters; the gradients of all layers meet in one dx, and that
of the residual stream joins it in the norm's kernel. An adapter's small product is written first, and the layer's own adds onto it
in the kernel that computes it; one of codes cannot add, and there the small one is added to it. What each operand is quantized to
is said by nn/linear_gemms.py alone, as it is for a layer on its own.

T tokens (all leading dimensions), K features of x, N_i of layer i, r_i the rank of its adapter, R of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surokit import kernels
from surokit.fusion import Fusion
from surokit.nn.grouping import InputGroup, LayerTensors, PlanKey, Shared, StagePlan, look, plan_for, shared_by, stacked
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import SLOTS, Operand, Products, needs_contiguous_transpose
from surokit.nn.prologues import Coded, Gated, Normed, Plain, Prologue, Source
from surokit.nn.weight_cache import LayerIndices
from surokit.product import adds_onto
from surokit.torch_private import through_forward_hooks

__all__ = ["Gated", "Normed", "Plain", "Source", "fused_linear"]


def fused_linear(
    source: Source, layers: Sequence[nn.Module], fusion: Fusion
) -> tuple[Tensor | None, tuple[Tensor, ...], Tensor | None]:
    """Return (stream, parts, joint): the residual stream with delta added, y [..., N_i] of every layer, and their joint tensor.

    stream: the caller goes on with it, so that its gradient meets the norm's in one kernel; None but for `Normed`.
    joint: [..., sum N_i] of which the parts are views, where one product made them and nobody looks at a part; else None.

    Forward hooks of layers are called as by the layers themselves. A layer that is more than our Linear (another class, other
    hooks, a patched forward) is called as it is, and so is an adapter where `fusion.adapters` is off.
    """
    stream, x = None, None
    if not source.fuses(fusion):
        stream, x = source.composed()
        source = Plain(x)
    tensors = source.tensors
    like = tensors[0]
    shares = fusion.joint or fusion.adapters or fusion.frozen != "no" or not isinstance(source, Plain)
    ordinary = shares and type(like) in (Tensor, nn.Parameter) and like.numel()
    found = [look(layer, like, fusion) for layer in layers] if ordinary else []
    inside = [cast(Linear, layer) for layer, ours in zip(layers, found) if ours is not None]
    if not inside:
        own, x = source.composed()
        return stream if own is None else own, tuple(layer(x) for layer in layers), None
    held = [ours[1] for ours in found if ours is not None]
    states = tuple(None if ours is None else ours[0] for ours in found)
    key = PlanKey(states, type(source), len(tensors), fusion, torch.is_grad_enabled(), like.dtype)
    plan = plan_for(inside[0], key, held)
    shared = [shared_by(group, inside, held) for group in plan.groups]
    made = list(_Stage.apply(source.form, plan, shared, *tensors, *_flat(held)))
    if plan.has_stream:
        stream = made.pop(0)
    if not plan.shows_x:
        return stream, tuple(plan.split(made)), made[0] if len(made) == 1 < len(layers) else None
    x, parts = made.pop(0), iter(plan.split(made))
    done = (
        layer(x) if state is None else _finished(layer, x, next(parts), state.is_adapted)
        for layer, state in zip(layers, states)
    )
    return stream, tuple(done), None


def _finished(layer: nn.Module, x: Tensor, y: Tensor, adapted: bool) -> Tensor:
    """Return y after all that a call of the layer does beside its products."""
    assert isinstance(layer, Linear)
    if layer.has_adapter and not adapted:
        y = y + layer.adapter(x)
    finished: Tensor = through_forward_hooks(layer, x, y)
    return finished


# -- the operation


def _is_coded(form: Prologue, plan: StagePlan, group: InputGroup, shared: Shared, like: Tensor) -> bool:
    """Return whether the source gives the codes that the group multiplies."""
    q, q_t = group.recipe.forward.a, group.recipe.grad_weight.b
    if q is None or not form.gives_codes or not Coded.possible(q, like):
        return False
    if group.keeps_codes and not (q == q_t and (q.transposable or form.gives_both(q))):
        return False  # both orientations are made in one pass over x
    return not q.delayed or (shared.scales is not None and shared.scales.spaced(_slots(plan, group)))


def _slots(plan: StagePlan, group: InputGroup) -> list[int]:
    return [plan.layers[i].first_slot + SLOTS["x"] for i in group.members]


def _asked(form: Prologue, plan: StagePlan, group: InputGroup, shared: Shared, like: Tensor) -> Coded:
    q, scales = group.recipe.forward.a, shared.scales
    assert q is not None
    amaxes = scales.views(_slots(plan, group), like.device) if q.delayed and scales is not None else None
    turned = not q.transposable or needs_contiguous_transpose(group.recipe.grad_weight, like.device)
    return Coded(q, amaxes, group.record, both=group.keeps_codes and turned and form.gives_both(q))


def _output(
    plan: StagePlan,
    group: InputGroup,
    shared: Shared,
    held: Sequence[LayerTensors],
    members: LayerIndices,
    x_q: Operand,
    h: dict[int, Tensor],
) -> Tensor:
    """Return y [T, sum N_i] of one product, with the adapters of its layers from their h [T, r_i]."""
    frozen, products = shared.frozen, plan.products(group, shared, members)
    kept = frozen.codes(members) if frozen else None
    w_q = products.w(plan.weight(held, members)) if kept is None else kept
    if frozen and plan.layers[members[0]].storage is None:
        frozen.keep(members, w_q)

    def adapted(y_TN: Tensor, beta: float) -> Tensor:
        for i, part in plan.parts(members, y_TN, -1).items() if h else ():
            if i in h:
                kernels.addmm_(part, h[i], held[i].B.t(), beta, plan.layers[i].scale)
        return y_TN

    biases = [held[i].bias for i in members if held[i].bias is not None]
    if group.plain and biases:  # the product adds the bias, and nothing else
        assert isinstance(x_q, Tensor)
        assert isinstance(w_q, Tensor)
        return adapted(kernels.linear(x_q, w_q, stacked(biases)), 1.0)
    first = all(i in h for i in members) and adds_onto(x_q, w_q)
    onto = adapted(h[members[0]].new_empty((x_q.shape[0], w_q.shape[0])), 0.0) if first else None
    y_TN = products.forward(x_q, w_q, onto)
    if biases:
        y_TN.add_(stacked(biases))
    return y_TN if first else adapted(y_TN, 1.0)


def _transposed(
    plan: StagePlan,
    group: InputGroup,
    shared: Shared,
    held: Sequence[LayerTensors],
    members: LayerIndices,
    products: Products,
    dy_q: Operand,
) -> Operand:
    """Return w' [K, sum N_i] of one product of grad_input, to be multiplied with dy_q."""
    frozen, q = shared.frozen, group.recipe.grad_input.b

    def make() -> Operand:
        codes = frozen.codes(members) if frozen else None
        if codes is not None and q is not None and q == group.recipe.forward.b and q.transposable:
            return codes.t()
        return products.w_t(plan.weight(held, members), dy_q)

    return frozen.transposed(members, make, group.keeps_transposed) if frozen else make()


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Prologue, plan: StagePlan, shared: Sequence[Shared], *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        source, held = tensors[: plan.key.tensors], _held(plan, tensors[plan.key.tensors :])
        like: Tensor = source[0]
        adapted, groups = plan.adapted, list(zip(plan.groups, shared))
        coded = next((both for both in groups if _is_coded(form, plan, *both, like)), None)
        # whether backward wants x as numbers, and whether anybody does
        later = any(held[i].A.requires_grad for i in adapted) or any(
            g.trains and not g.keeps_codes for g in plan.groups
        )
        values = later or plan.shows_x or bool(adapted) or any(both is not coded for both in groups)
        made = form.forward(source, None if coded is None else _asked(form, plan, *coded, like), values)
        x_TK: Any = made.x_TK
        h_TR = kernels.mm(x_TK, stacked([held[i].A for i in adapted]).t()) if adapted else None
        h = {} if h_TR is None else dict(zip(adapted, h_TR.split([len(held[i].A) for i in adapted], 1)))

        outputs: list[Tensor] = []
        x_codes: list[tuple[Tensor, ...]] = []  # of each group, transposed
        for both in groups:
            group, (_, frozen) = both
            if both is coded:
                x_q: Any = made.codes
                x_t: Any = x_q.t() if group.keeps_codes and made.codes_t is None else made.codes_t
            else:
                x_q, x_t = plan.products(*both, group.members).x(x_TK, group.trains)
            x_codes.append(x_t.parts if group.keeps_codes else ())
            outputs += [_output(plan, *both, held, members, x_q, h) for members in group.outputs]
            if frozen is not None:
                frozen.note([[held[i].w for i in members] for members in group.outputs], group.record)

        again = later and plan.recomputes
        kept = made.kept if again or any(t is not None and t.requires_grad for t in source) else ()
        ctx.form, ctx.plan, ctx.shared, ctx.lengths = form, plan, shared, [len(kept), *map(len, x_codes)]
        weights = _flat([t._replace(bias=None) for t in held])
        x_later = x_TK if later and not again else None
        ctx.save_for_backward(*weights, h_TR, x_later, *kept, *(t for parts in x_codes for t in parts))
        shape = like.shape[:-1]
        shown = [made.stream] if plan.has_stream else []
        shown += [x_TK.view(*shape, plan.columns)] if plan.shows_x else []
        return *shown, *(y_TN.view(*shape, y_TN.shape[-1]) for y_TN in outputs)

    @staticmethod
    @once_differentiable  # the rounding of dy has no gradient: an error is better than a wrong one
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        form, plan, saved = ctx.form, ctx.plan, ctx.saved_tensors
        layers = len(saved) - sum(ctx.lengths) - 2
        held, (h_TR, x_TK), flat = _held(plan, saved[:layers]), saved[layers : layers + 2], saved[layers + 2 :]
        kept, *x_codes = (flat[end - n : end] for n, end in zip(ctx.lengths, accumulate(ctx.lengths)))
        wanted = ctx.needs_input_grad[3:]
        wants_source, wants = wanted[: plan.key.tensors], _held(plan, wanted[plan.key.tensors :])
        run = _Backward(plan, ctx.shared, held, wants, any(wants_source), x_codes)

        given = list(grads)
        dstream = given.pop(0) if plan.has_stream else None
        dshown = given.pop(0) if plan.shows_x else None
        run.gradients(given)
        run.adapters(h_TR)
        run.products()
        if dshown is not None:
            run.add(dshown.reshape(-1, plan.columns))
        again = plan.recomputes and run.wants_x
        into_source, x_again = form.backward(kept, run.dx_TK, dstream, wants_source, again)
        run.weights(x_again if again else x_TK)
        source = (grad if wanted else None for grad, wanted in zip(into_source, wants_source))
        return None, None, None, *source, *run.found()


def _flat(held: Sequence[LayerTensors]) -> list[Any]:
    """Return the tensors of all layers one after the other, as `_held` takes them."""
    return [t for layer in held for t in (*layer[:4], *layer.scales)]


def _held(plan: StagePlan, flat: Sequence[Any]) -> list[LayerTensors]:
    held, start = [], 0
    for layer in plan.layers:
        w, bias, A, B, *scales = flat[start : start + 4 + layer.scale_count]
        held.append(LayerTensors(w, bias, A, B, tuple(scales)))
        start += 4 + layer.scale_count
    return held


class _Backward:
    """A _Backward computes the gradients of the layers: that of x first, then those that need x, which may have to be computed
    again."""

    def __init__(
        self,
        plan: StagePlan,
        shared: Sequence[Shared],
        held: Sequence[LayerTensors],
        wants: Sequence[LayerTensors],
        wants_dx: bool,
        x_codes: Sequence[tuple[Tensor, ...]],
    ) -> None:
        self.plan, self.shared, self.held, self.wants, self.wants_dx = plan, shared, held, wants, wants_dx
        self._x_codes = x_codes  # of each group, transposed
        self.dx_TK: Tensor | None = None
        self.dy: dict[int, Tensor] = {}  # [T, N_i] of the layers that a gradient reached
        self._dw: dict[int, Tensor] = {}
        self._db: dict[int, Tensor] = {}
        self._dA: dict[int, Tensor] = {}
        self._dB: dict[int, Tensor] = {}
        self._outputs: list[tuple[int, LayerIndices, Tensor]] = []  # dy of those that a gradient reached
        self._pending: list[tuple[int, Products, LayerIndices, Operand]] = []
        self._dh_TR: Tensor | None = None  # for dA, ...
        self._into_dx: Tensor | None = None  # ... and for dx, until it is in there
        self._adapted = plan.adapted
        self._ranks = [len(held[i].A) for i in self._adapted]

    def found(self) -> list[Tensor | None]:
        """Return the gradients of the layers' tensors, in the order of `_flat`; scales have none."""
        grads: list[Tensor | None] = []
        for i, layer in enumerate(self.plan.layers):
            grads += [self._dw.get(i), self._db.get(i), self._dA.get(i), self._dB.get(i)]
            grads += [None] * layer.scale_count
        return grads

    def add(self, dx_TK: Tensor) -> None:
        if self.wants_dx:
            self.dx_TK = dx_TK if self.dx_TK is None else self.dx_TK.add_(dx_TK)

    def gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Take dy of all layers, and compute db."""
        outputs = [(g, members) for g, group in enumerate(self.plan.groups) for members in group.outputs]
        for (g, members), dy in reversed(list(zip(outputs, grads, strict=True))):
            if dy is None:
                continue
            dy_TN = dy.reshape(-1, dy.shape[-1]).contiguous()
            self.dy |= self.plan.parts(members, dy_TN, 1)
            if any(self.wants[i].bias for i in members):
                self._db |= self.plan.parts(members, dy_TN.sum(0), 0)
            self._outputs.append((g, members, dy_TN))

    def products(self) -> None:
        """Compute dx of all products in reverse, the order of autograd, so that random numbers are drawn in the same order."""
        for g, members, dy_TN in self._outputs:
            for some in reversed(self.plan.groups[g].backward[members]):
                self._product(g, some, dy_TN if some == members else self.dy[some[0]])
        self._through_A()

    def _product(self, g: int, members: LayerIndices, dy_TN: Tensor) -> None:
        group, wants_dw = self.plan.groups[g], self.wants[members[0]].w
        if not (self.wants_dx or wants_dw):
            return
        products = self.plan.products(group, self.shared[g], members)
        x_t = self._x_t(products, members, self._x_codes[g]) if wants_dw and self._x_codes[g] else None
        dy_q, dy_t = products.dy(dy_TN, self.wants_dx, wants_dw, x_t)
        if self.wants_dx:
            w_t = _transposed(self.plan, group, self.shared[g], self.held, members, products, dy_q)
            if self.dx_TK is None and adds_onto(dy_q, w_t):
                self._through_A()
            self.dx_TK = products.grad_input(dy_q, w_t, self.dx_TK)
        if wants_dw:
            self._pending.append((g, products, members, dy_t))

    def _through_A(self) -> None:
        """Compute dx of all adapters, once: before the first product where that adds onto it, else after the last."""
        dh_TR, self._into_dx = self._into_dx, None
        if dh_TR is not None:
            A_RK = stacked([self.held[i].A for i in self._adapted])
            self.dx_TK = kernels.mm(dh_TR, A_RK) if self.dx_TK is None else kernels.addmm_(self.dx_TK, dh_TR, A_RK)

    def adapters(self, h_TR: Tensor | None) -> None:
        """Compute dB, and dh, from which dx and dA are computed later."""
        reached = [i for i in self._adapted if i in self.dy]
        if h_TR is None or not reached:
            return
        dh_TR = torch.zeros_like(h_TR) if len(reached) < len(self._adapted) else torch.empty_like(h_TR)
        for i, h_Tr, dh_Tr in zip(self._adapted, h_TR.split(self._ranks, 1), dh_TR.split(self._ranks, 1)):
            if i in reached:
                scale, B = self.plan.layers[i].scale, self.held[i].B
                kernels.addmm_(dh_Tr, self.dy[i], B, beta=0.0, alpha=scale)
                if self.wants[i].B:
                    self._dB[i] = kernels.addmm_(torch.empty_like(B), self.dy[i].t(), h_Tr, beta=0.0, alpha=scale)
        self._into_dx = dh_TR if self.wants_dx else None
        self._dh_TR = dh_TR if any(self.wants[i].A for i in self._adapted) else None

    @property
    def wants_x(self) -> bool:
        """Return whether a gradient that is still missing needs x as numbers, not as codes."""
        return self._dh_TR is not None or any(not self._x_codes[g] for g, *_ in self._pending)

    def _x_t(self, products: Products, members: LayerIndices, kept: Sequence[Tensor]) -> Operand:
        return products.x_t(kept, (self.plan.columns, len(self.dy[members[0]])))

    def weights(self, x_TK: Tensor | None) -> None:
        """Compute dw of all products, and dA."""
        for g, products, members, dy_t in self._pending:
            x_t = self._x_t(products, members, self._x_codes[g] or ((x_TK,) if x_TK is not None else ()))
            dw = products.grad_weight(dy_t, x_t, self.held[members[0]].w.dtype)
            self._dw |= self.plan.parts(members, dw, 0)
        if self._dh_TR is not None and x_TK is not None:
            dA_RK = kernels.mm(self._dh_TR.t(), x_TK)
            self._dA = {i: dA for i, dA in zip(self._adapted, dA_RK.split(self._ranks)) if self.wants[i].A}
