"""Stages: a norm or a gate and the linear layers that read it, forward and backward each as one operation of autograd.

    x = RMSNorm(stream + delta), silu(gate) * up, or as it is          nn/sources.py
    y_i = x w_i' + bias_i + s_i (x A_i') B_i'                          for every layer

What is gained: x is quantized once for all layers, in the kernel that computes it where that has such a form; layers whose
weights lie side by side are one product, and so are the A of their adapters; the gradients of all layers meet in one dx, and that
of the residual stream joins it in the norm's kernel. An adapter's small product is written first, and the layer's own adds onto it
in the kernel that computes it; one of codes cannot add, and there the small one is added to it. What each operand is quantized to
is said by nn/products.py alone, as it is for a layer on its own.

T tokens (all leading dimensions), K features of x, N_i of layer i, r_i the rank of its adapter, R of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surokit import kernels
from surokit.fusion import Fusion
from surokit.nn.frozen import Members
from surokit.nn.grouping import Group, Held, Plan, is_ours, plan_of, stacked, tensors_of
from surokit.nn.linear import Linear
from surokit.nn.products import SLOTS, Operand, Products, in_rows
from surokit.nn.sources import Coded, Gated, Normed, Plain, Source
from surokit.product import adds_onto

__all__ = ["Gated", "Normed", "Plain", "Source", "project"]


def project(
    source: Source, layers: Sequence[nn.Module], fusion: Fusion
) -> tuple[Tensor | None, tuple[Tensor, ...], Tensor | None]:
    """(stream, parts, joint): the residual stream with delta added, y [..., N_i] of every layer, and their joint tensor.

    stream: the caller goes on with it, so that its gradient meets the norm's in one kernel; None but for `Normed`.
    joint: [..., sum N_i] of which the parts are views, where one product made them and nobody looks at a part; else None.

    Forward hooks of layers are called as by the layers themselves. A layer that is more than our Linear (another class, other
    hooks, a patched forward) is called as it is, and so is an adapter where `fusion.adapters` is off.
    """
    stream, x = None, None
    if not source.fuses(fusion):
        stream, x = source.composed()
        source = Plain(x)
    like = source.tensors[0]
    inside = [layer for layer in layers if is_ours(layer, like)]
    shares = fusion.joint or fusion.adapters or fusion.frozen != "no"
    if not inside or not like.numel() or (isinstance(source, Plain) and not shares):
        own, x = source.composed()
        return stream if own is None else own, tuple(layer(x) for layer in layers), None
    held = [tensors_of(layer, like, fusion) for layer in inside]
    plan = plan_of(source, layers, inside, held, fusion)
    made = list(_Stage.apply(plan, *source.tensors, *(t for tensors in held for t in tensors)))
    if plan.has_stream:
        stream = made.pop(0)
    x = made.pop(0) if plan.shows_x else None
    parts = dict(zip(map(id, inside), plan.split(made)))
    adapted = {id(layer) for layer, tensors in zip(inside, held) if tensors.A is not None}
    done = tuple(_finished(layer, x, parts.get(id(layer)), id(layer) in adapted) for layer in layers)
    joint = made[0] if len(made) == 1 < len(layers) and not plan.shows_x else None
    return stream, done, joint


def _finished(layer: nn.Module, x: Any, y: Tensor | None, adapted: bool) -> Tensor:
    """y after all that a call of the layer does beside its products; all of the call where y is None."""
    if y is None:
        called: Tensor = layer(x)
        return called
    assert isinstance(layer, Linear)
    if layer.has_adapter and not adapted:
        y = y + layer.adapter(x)
    for number, hook in list(layer._forward_hooks.items()):
        result = hook(layer, (x,), *([{}] if number in layer._forward_hooks_with_kwargs else ()), y)
        y = y if result is None else result
    return y


# -- the operation


def _is_coded(plan: Plan, group: Group, like: Tensor) -> bool:
    """Whether the source gives the codes that the group multiplies."""
    q, q_t = group.recipe.forward.a, group.recipe.grad_weight.b
    if q is None or not plan.form.gives_codes or not Coded.possible(q, like):
        return False
    if group.keeps_codes and not (q == q_t and (q.transposable or plan.form.gives_both(q))):
        return False  # both orientations are made in one pass over x
    return not q.delayed or (group.scales is not None and group.scales.spaced(_slots(plan, group)))


def _slots(plan: Plan, group: Group) -> list[int]:
    return [plan.layers[i].first_slot + SLOTS["x"] for i in group.members]


def _asked(plan: Plan, group: Group, like: Tensor) -> Coded:
    q, scales = group.recipe.forward.a, group.scales
    assert q is not None
    amaxes = scales.views(_slots(plan, group), like.device) if q.delayed and scales is not None else None
    turned = not q.transposable or in_rows(group.recipe.grad_weight, like.device)
    return Coded(q, amaxes, group.record, both=group.keeps_codes and turned and plan.form.gives_both(q))


def _output(
    plan: Plan, group: Group, held: Sequence[Held], members: Members, x_q: Operand, h: dict[int, Tensor]
) -> Tensor:
    """y [T, sum N_i] of one product, with the adapters of its layers from their h [T, r_i]."""
    products = plan.products(group, members)
    kept = group.frozen.codes(members) if group.frozen else None
    w_q = products.w(plan.weight(held, members)) if kept is None else kept
    if group.frozen and plan.layers[members[0]].storage is None:
        group.frozen.keep(members, w_q)

    def adapted(y_TN: Tensor, beta: float) -> Tensor:
        for i, part in plan.parts(members, y_TN, -1).items():
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


def _transposed(plan: Plan, group: Group, held: Sequence[Held], members: Members, products: Products) -> Operand:
    """w' [K, sum N_i] of one product of grad_input."""
    frozen, q = group.frozen, group.recipe.grad_input.b

    def make() -> Operand:
        codes = frozen.codes(members) if frozen else None
        if codes is not None and q is not None and q == group.recipe.forward.b and q.transposable:
            return codes.t()
        return products.w_t(plan.weight(held, members))

    return frozen.transposed(members, make, group.keeps_transposed) if frozen else make()


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        source, held = tensors[: plan.tensors], _of_layers(tensors[plan.tensors :])
        like: Tensor = source[0]
        adapted = [i for i, t in enumerate(held) if t.A is not None]
        coded = next((group for group in plan.groups if _is_coded(plan, group, like)), None)
        # whether backward wants x as numbers, and whether anybody does
        later = any(held[i].A.requires_grad for i in adapted) or any(
            g.trains and not g.keeps_codes for g in plan.groups
        )
        values = later or plan.shows_x or bool(adapted) or any(group is not coded for group in plan.groups)
        made = plan.form.forward(source, None if coded is None else _asked(plan, coded, like), values)
        x_TK: Any = made.x_TK
        h_TR = kernels.mm(x_TK, stacked([held[i].A for i in adapted]).t()) if adapted else None
        h = {} if h_TR is None else dict(zip(adapted, h_TR.split([len(held[i].A) for i in adapted], 1)))

        outputs: list[Tensor] = []
        x_codes: list[tuple[Tensor, ...]] = []  # of each group, transposed
        for group in plan.groups:
            if group is coded:
                x_q: Any = made.codes
                x_t: Any = x_q.t() if group.keeps_codes and made.codes_t is None else made.codes_t
            else:
                x_q, x_t = plan.products(group, group.members).x(x_TK, group.trains)
            x_codes.append(x_t.parts if group.keeps_codes else ())
            outputs += [_output(plan, group, held, members, x_q, h) for members in group.outputs]
            if group.frozen is not None:
                group.frozen.note([[held[i].w for i in members] for members in group.outputs], group.record)

        again = later and plan.recomputes
        kept = made.kept if again or any(t is not None and t.requires_grad for t in source) else ()
        w_scales = plan.w_scales
        ctx.plan, ctx.lengths = plan.with_scales([None] * len(w_scales)), [len(w_scales), len(kept), *map(len, x_codes)]
        weights = (t for layer in held for t in (layer.w, layer.A, layer.B))
        flat = (t for parts in (w_scales, kept, *x_codes) for t in parts)
        ctx.save_for_backward(*weights, h_TR, x_TK if later and not again else None, *flat)
        shape = like.shape[:-1]
        shown = [made.stream] if plan.has_stream else []
        shown += [x_TK.view(*shape, plan.columns)] if plan.shows_x else []
        return *shown, *(y_TN.view(*shape, y_TN.shape[-1]) for y_TN in outputs)

    @staticmethod
    @once_differentiable  # the rounding of dy has no gradient: an error is better than a wrong one
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        L, saved = len(ctx.plan.layers), ctx.saved_tensors
        held = [Held(saved[i], None, *saved[i + 1 : i + 3]) for i in range(0, 3 * L, 3)]
        (h_TR, x_TK), flat = saved[3 * L : 3 * L + 2], saved[3 * L + 2 :]
        w_scales, kept, *x_codes = (flat[end - n : end] for n, end in zip(ctx.lengths, accumulate(ctx.lengths)))
        plan: Plan = ctx.plan.with_scales(w_scales)
        wants_source = ctx.needs_input_grad[1 : 1 + plan.tensors]
        run = _Backward(plan, held, _of_layers(ctx.needs_input_grad[1 + plan.tensors :]), any(wants_source))

        given = list(grads)
        dstream = given.pop(0) if plan.has_stream else None
        dshown = given.pop(0) if plan.shows_x else None
        run.gradients(given)
        run.adapters(h_TR)
        run.products()
        if dshown is not None:
            run.add(dshown.reshape(-1, plan.columns))
        again = plan.recomputes and run.wants_x(x_codes)
        into_source, x_again = plan.form.backward(kept, run.dx_TK, dstream, wants_source, again)
        run.weights(x_codes, x_again if again else x_TK)
        source = (grad if wanted else None for grad, wanted in zip(into_source, wants_source))
        return None, *source, *(grad for layer in range(L) for grad in run.found(layer))


def _of_layers(flat: Sequence[Any]) -> list[Held]:
    return [Held(*flat[i : i + 4]) for i in range(0, len(flat), 4)]


class _Backward:
    """The gradients of the layers: that of x first, then those that want x, which may be computed again on the way."""

    def __init__(self, plan: Plan, held: Sequence[Held], wants: Sequence[Held], wants_dx: bool) -> None:
        self.plan, self.held, self.wants, self.wants_dx = plan, held, wants, wants_dx
        self.dx_TK: Tensor | None = None
        self.dy: dict[int, Tensor] = {}  # [T, N_i] of the layers that a gradient reached
        self._dw: dict[int, Tensor] = {}
        self._db: dict[int, Tensor] = {}
        self._dA: dict[int, Tensor] = {}
        self._dB: dict[int, Tensor] = {}
        self._outputs: list[tuple[int, Members, Tensor]] = []  # dy of those that a gradient reached
        self._pending: list[tuple[int, Products, Members, Operand]] = []
        self._dh_TR: Tensor | None = None  # for dA, ...
        self._into_dx: Tensor | None = None  # ... and for dx, until it is in there
        self._adapted = [i for i, tensors in enumerate(held) if tensors.A is not None]
        self._ranks = [len(held[i].A) for i in self._adapted]

    def found(self, layer: int) -> tuple[Tensor | None, ...]:
        return tuple(grads.get(layer) for grads in (self._dw, self._db, self._dA, self._dB))

    def add(self, dx_TK: Tensor) -> None:
        if self.wants_dx:
            self.dx_TK = dx_TK if self.dx_TK is None else self.dx_TK.add_(dx_TK)

    def gradients(self, grads: Sequence[Tensor | None]) -> None:
        """dy of all layers, and db."""
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
        """dx of all products; in reverse, as autograd would come to the layers one by one, for the draws of random numbers."""
        for g, members, dy_TN in self._outputs:
            for some in reversed(self.plan.groups[g].backward[members]):
                self._product(g, some, dy_TN if some == members else self.dy[some[0]])
        self._through_A()

    def _product(self, g: int, members: Members, dy_TN: Tensor) -> None:
        group, wants_dw = self.plan.groups[g], self.wants[members[0]].w
        if not (self.wants_dx or wants_dw):
            return
        products = self.plan.products(group, members)
        dy_q, dy_t = products.dy(dy_TN, self.wants_dx, wants_dw)
        if self.wants_dx:
            w_t = _transposed(self.plan, group, self.held, members, products)
            if self.dx_TK is None and adds_onto(dy_q, w_t):
                self._through_A()
            self.dx_TK = products.grad_input(dy_q, w_t, self.dx_TK)
        if wants_dw:
            self._pending.append((g, products, members, dy_t))

    def _through_A(self) -> None:
        """dx of all adapters, once: before the first product where that adds onto it, else after the last."""
        dh_TR, self._into_dx = self._into_dx, None
        if dh_TR is not None:
            A_RK = stacked([self.held[i].A for i in self._adapted])
            self.dx_TK = kernels.mm(dh_TR, A_RK) if self.dx_TK is None else kernels.addmm_(self.dx_TK, dh_TR, A_RK)

    def adapters(self, h_TR: Tensor | None) -> None:
        """What goes through B: dB, and dh, of which dx and dA are made."""
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

    def wants_x(self, x_codes: Sequence[tuple[Tensor, ...]]) -> bool:
        """Whether a gradient that is still missing wants x as numbers."""
        return self._dh_TR is not None or any(not x_codes[g] for g, *_ in self._pending)

    def weights(self, x_codes: Sequence[tuple[Tensor, ...]], x_TK: Tensor | None) -> None:
        """dw of all products, and dA."""
        for g, products, members, dy_t in self._pending:
            kept = x_codes[g] or ((x_TK,) if x_TK is not None else ())
            x_t = products.x_t(kept, (self.plan.columns, len(self.dy[members[0]])))
            dw = products.grad_weight(dy_t, x_t, self.held[members[0]].w.dtype)
            self._dw |= self.plan.parts(members, dw, 0)
        if self._dh_TR is not None and x_TK is not None:
            dA_RK = kernels.mm(self._dh_TR.t(), x_TK)
            self._dA = {i: dA for i, dA in zip(self._adapted, dA_RK.split(self._ranks)) if self.wants[i].A}
