"""Update hidden matrices by Muon and everything else by AdamW, with clipping and the mask for non-finite steps.

    Muon(lr=3e-4)          a specification: Session calls .build(model)
    Muon(model, lr=3e-4)   a torch Optimizer, in which modules have decided what is a hidden matrix

One step of a matrix W [m, n] with gradient G, as torch.optim.Muon has it:

    B = momentum B + (1 - momentum) G
    U = (1 - momentum) G + momentum B, or B without nesterov
    O = U with its singular values near 1, by Newton-Schulz steps in bfloat16: torch's own
    W = W (1 - lr weight_decay) - lr s O

    s    0.2 sqrt(max(m, n)) for "match_rms_adamw": an update has the root mean square of AdamW's, about 0.2
         (Liu et al., arXiv 2502.16982)
         sqrt(max(1, m / n)) for "original" (Jordan et al., 2024, kellerjordan.github.io/posts/muon)

Everything but O is computed in float32 from the values as stored, and W and B are rounded once, W at random where asked. Where
torch computes in a bfloat16 parameter's dtype it rounds W twice: after the decay, which vanishes then, and after the update.

A matrix is updated by itself: each takes five products of a Newton-Schulz step and some more operations. Where it is sharded
(FSDP2's DTensor) every process gathers U in bfloat16, computes O whole, and updates its own shard; shards of experts hold whole
matrices and gather nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from surokit.kernels.reference.adamw import stochastic_bf16
from surokit.optim.adamw import AdamW, Rounding, is_number, step_keys
from surokit.optim.matrices import muon_groups, why_no_matrix
from surokit.optim.parts import as_shard, place_of
from surokit.optim.spec import Parameters
from surokit.optim.states import adamw_states
from surokit.optim.tensors import is_sharded, local, scale_and_mask
from surokit.torch_private import foreach_add_, foreach_sub_, muon_rate, orthogonal

AdjustLr = Literal["match_rms_adamw", "original"]


class Muon(AdamW):
    """Muon is an optimizer that orthogonalizes the updates of hidden matrices; all other parameters are updated by AdamW.

    params: a model, of which the embeddings, the output head and everything that is no matrix are AdamW's (optim/matrices.py says
        how they are told); or torch's parameter groups, taken as they are, each with `use_muon` True or False. Absent: a `Spec`.
    lr: a float, or a 0-d tensor on the parameters' device. With adjust_lr_fn="match_rms_adamw" it is one for both: what was tuned
        for AdamW serves.
    adamw_lr: the rate of what AdamW updates; None: `lr`. adjust_lr_fn="original" needs it, as its rates are others, about 0.02.
    momentum, nesterov, ns_steps: of Muon; ns_steps is the number of Newton-Schulz steps. betas, eps: of AdamW.
    weight_decay: of all matrices, embeddings included, at the rate before it is adjusted; vectors get none.
    state_dtype: None keeps momentum and moments in each parameter's dtype; torch.float32 keeps them in float32.
    rounding, seed: as AdamW has them.

    Bytes of a hidden parameter with its momentum: bf16 4; with float32 momentum 6; fp32 8. Of any other as AdamW's.
    """

    takes_modules: ClassVar[bool] = True

    def __init__(
        self,
        params: nn.Module | Parameters | None = None,
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        assert params is not None, "SpecMeta gives a Spec then"
        self.adamw_lr = adamw_lr
        self.of_matrices = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        groups: list[Any] = muon_groups(params, weight_decay) if isinstance(params, nn.Module) else list(params)
        if not all(isinstance(group, dict) for group in groups):
            raise TypeError(
                "Muon cannot tell hidden matrices from embeddings by parameters alone: give it the model, as surokit.Muon(model), "
                'or parameter groups, {"params": [...], "use_muon": True} for the hidden matrices and False for all else.'
            )
        super().__init__(groups, lr, betas, weight_decay, eps, state_dtype, rounding, seed)

    if TYPE_CHECKING:  # a type checker does not see that Muon(lr=...) is a Spec

        def build(self, params: nn.Module | Parameters) -> Muon: ...

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raise ValueError that names the option which is out of range."""
        super().check(options)
        momentum, steps, adjust, rate = (options[n] for n in ("momentum", "ns_steps", "adjust_lr_fn", "adamw_lr"))
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(f"Muon: momentum={momentum!r} must be a number in [0, 1).")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
            raise ValueError(f"Muon: ns_steps={steps!r} must be a whole number from 1 to 99.")
        if adjust not in ("match_rms_adamw", "original"):
            raise ValueError(f'Muon: adjust_lr_fn={adjust!r} must be "match_rms_adamw" or "original".')
        if rate is None and adjust == "original":
            raise ValueError(
                'Muon: adjust_lr_fn="original" has learning rates that do not serve AdamW: give adamw_lr= too, for what is no '
                "hidden matrix."
            )
        if rate is not None and (not is_number(rate) or not 0 <= rate < float("inf")):
            raise ValueError(f"Muon: adamw_lr={rate!r} must be a finite number >= 0, or None.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which says by `use_muon` whether all of them are hidden matrices."""
        group = dict(param_group)
        if not isinstance(hidden := group.get("use_muon"), bool):
            raise ValueError(
                "Muon: a parameter group says by use_muon=True or False whether its parameters are hidden matrices."
            )
        if hidden:
            group = {**self.of_matrices, **group}
        elif self.adamw_lr is not None:
            group.setdefault("lr", self.adamw_lr)
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"] if hidden else ():
            if why := why_no_matrix(p):
                del self.param_groups[-1]
                raise ValueError(
                    f"Muon: a parameter of shape {list(p.shape)} {why}: put it into a group with use_muon=False."
                )

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if not group["use_muon"]:
            return super()._options(group)
        return {name: group[name] for name in ("lr", "weight_decay", *self.of_matrices)}

    def _update(self, params: list[Tensor], options: dict[str, Any]) -> None:
        if "momentum" not in options:
            super()._update(params, options)
            return
        states = [self._state_of(p) for p in params]
        steps, device = [s["step"] for s in states], params[0].device
        self._check_moved(device, states[0]["momentum_buffer"].device)
        keys: list[Any] = [None] * len(params)
        if self._rounds(params[0].dtype):
            keys = step_keys([s["key"] for s in states], steps)
        scale, mask = scale_and_mask(self, device)
        for p, state, key in zip(params, states, keys):
            assert p.grad is not None
            weight, grad, buffer = local([p.detach(), p.grad, state["momentum_buffer"]])
            if p.ndim == 2:
                _update_matrix(weight, grad, buffer, scale, mask, key, 0, p if is_sharded(p) else None, **options)
                continue
            # each expert's random bits begin at a multiple of a power of two, as stochastic_bf16 asks
            apart = 1 << (weight[0].numel() - 1).bit_length() if len(weight) else 0
            for e, each in enumerate(zip(weight.unbind(), grad.unbind(), buffer.unbind())):
                _update_matrix(*each, scale, mask, key, e * apart, None, **options)
        foreach_add_(steps, 1)
        if mask is not None:
            foreach_sub_(steps, [mask] * len(steps))

    def _moments_of(self, p: Tensor) -> tuple[str, ...]:
        hidden = any(group["use_muon"] and any(p is other for other in group["params"]) for group in self.param_groups)
        return ("momentum_buffer",) if hidden else super()._moments_of(p)

    def _sources(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        return adamw_states(self, state_dict, self._moments_of, "Muon with the same hidden matrices")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adamw_lr": self.adamw_lr, "of_matrices": self.of_matrices}


def _update_matrix(
    weight: Tensor,
    grad: Tensor,
    buffer: Tensor,
    scale: Tensor | None,
    mask: Tensor | None,
    key: Tensor | None,
    start: int,
    whole: Tensor | None,
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    adjust_lr_fn: AdjustLr,
) -> None:
    """Update a matrix and its momentum in place; never read a value on the host.

    key, start: of stochastic rounding, None rounds to nearest. whole: the DTensor of which these are the shards here, None for a
    whole matrix.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) / scale
    b = buffer.to(wide).lerp(g, 1 - momentum).to(buffer.dtype)
    u = (g.lerp(b.to(wide), momentum) if nesterov else b).to(torch.bfloat16, copy=True)
    del g
    if whole is not None:
        u = as_shard(whole, u).full_tensor()  # type: ignore[attr-defined]
    o = orthogonal(u, ns_steps)
    rate = muon_rate(lr, adjust_lr_fn, o.shape)
    if whole is not None:
        o = o[tuple(slice(first, first + size) for first, size in zip(place_of(whole), weight.shape))]
    del u
    w = weight.to(wide, copy=True).mul_(1 - lr * weight_decay).sub_(o.to(wide).mul_(rate))
    new = w.to(weight.dtype) if key is None else stochastic_bf16(w, key, start)
    for old, value in ((weight, new), (buffer, b)):
        old.copy_(value if mask is None else torch.where(mask != 0, old, value))
