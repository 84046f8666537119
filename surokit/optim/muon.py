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

A matrix is updated by itself: each takes five products of a Newton-Schulz step and some more operations. Processes that hold
matrices in common share them out (owners.py): the owner of a matrix is sent U in bfloat16 and sends O, whether they have shards
(FSDP2's DTensor) or copies (DistributedDataParallel). Shards of experts hold whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surokit.optim.adamw import AdamW, Rounding, is_number, rounded, step_keys
from surokit.optim.matrices import muon_groups, why_no_matrix
from surokit.optim.owners import Holders, holders_of
from surokit.optim.spec import Parameters
from surokit.optim.states import adamw_states
from surokit.optim.tensors import gradients_of, local, scale_and_mask
from surokit.torch_private import foreach_add_, foreach_sub_, muon_rate, orthogonal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AdjustLr = Literal["match_rms_adamw", "original"]


class Muon(AdamW):
    """Muon is an optimizer that orthogonalizes the updates of hidden matrices; all other parameters are updated by AdamW.

    params: a model, of which the embeddings, the output head and everything that is no matrix are AdamW's (optim/matrices.py says
        how they are told); or torch's parameter groups, taken as they are, each with `use_muon` True or False. Absent: a `Spec`.
        Given DistributedDataParallel around a model, its processes share the work out.
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
    _copies: ProcessGroup | None  # of DistributedDataParallel
    _uncopied: list[Tensor]  # what it leaves to each process
    _holders: dict[Tensor, Holders]  # as far as they were asked for

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
        self._begin_alone()
        params = getattr(params, "_orig_mod", params)  # what torch.compile was given
        if isinstance(params, DistributedDataParallel):
            copied, params = params, params.module
            self._copies, own = copied.process_group, set(copied.parameters_to_ignore)
            self._uncopied = [p for name, p in copied.module.named_parameters() if name in own]
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

    def _by_kernel(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        # no kernel takes several matrices, and processes share out those that they update together
        return self._alike(group) if group["use_muon"] else super()._by_kernel(group)

    def _update_lists(self, lists: Iterable[tuple[list[Tensor], dict[str, Any]]]) -> None:
        held: dict[Holders, list[_Matrix]] = {}
        for params, options in lists:
            if "momentum" not in options:
                self._update(params, options)
                continue
            for p, matrices in zip(params, self._begin(params, options), strict=True):
                held.setdefault(self._holders_of(p), []).extend(matrices)
        for holders, matrices in held.items():
            matrices.sort(key=lambda each: _work(each.shape), reverse=True)  # so that those of a turn are alike
            for first in range(0, len(matrices), holders.at_a_time):
                _update_matrices(holders, matrices[first : first + holders.at_a_time])

    def _begin(self, params: list[Tensor], options: dict[str, Any]) -> list[list[_Matrix]]:
        """Count a step of hidden parameters that are alike, and return the matrices of each."""
        states = [self._state_of(p) for p in params]
        steps, device = [s["step"] for s in states], params[0].device
        self._check_moved(device, states[0]["momentum_buffer"].device)
        keys: list[Any] = [None] * len(params)
        if self._rounds(params[0].dtype):
            keys = step_keys([s["key"] for s in states], steps)
        scale, mask = scale_and_mask(self, device)
        foreach_add_(steps, 1)
        if mask is not None:
            foreach_sub_(steps, [mask] * len(steps))
        how = _How(scale, mask, **options)
        parts = zip(local(params), gradients_of(params), local([s["momentum_buffer"] for s in states]))
        return [_matrices(*part, key, p.shape, how) for p, part, key in zip(params, parts, keys)]

    def _holders_of(self, p: Tensor) -> Holders:
        if p not in self._holders:
            own = any(p is other for other in self._uncopied)
            self._holders[p] = holders_of(p, None if own else self._copies)
        return self._holders[p]

    def _moments_of(self, p: Tensor) -> tuple[str, ...]:
        hidden = any(group["use_muon"] and any(p is other for other in group["params"]) for group in self.param_groups)
        return ("momentum_buffer",) if hidden else super()._moments_of(p)

    def _sources(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        return adamw_states(self, state_dict, self._moments_of, "Muon with the same hidden matrices")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adamw_lr": self.adamw_lr, "of_matrices": self.of_matrices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin_alone()  # groups of processes are no state: a copy shares shards out, which know theirs, and no copies
        super().__setstate__(state)

    def _begin_alone(self) -> None:
        self._copies, self._uncopied, self._holders = None, [], {}


class _How(NamedTuple):
    """How matrices are updated: the gradients' scale and the mask of a step, and the options of a group."""

    scale: Tensor | None
    mask: Tensor | None
    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr_fn: AdjustLr


class _Matrix(NamedTuple):
    """A matrix of which `weight`, `grad` and `buffer` are what is here, of the whole's `shape`. key, start: of stochastic rounding,
    None rounds to nearest."""

    weight: Tensor
    grad: Tensor
    buffer: Tensor
    key: Tensor | None
    start: int
    shape: torch.Size
    how: _How


def _matrices(
    weight: Tensor, grad: Tensor, buffer: Tensor, key: Tensor | None, shape: torch.Size, how: _How
) -> list[_Matrix]:
    """Return the matrices of a parameter: one, or one for each expert that is here."""
    weight = weight.detach()
    if weight.ndim == 2:
        return [_Matrix(weight, grad, buffer, key, 0, shape, how)]
    # each expert's random bits begin at a multiple of a power of two, as stochastic_bf16 asks
    apart = 1 << (weight[0].numel() - 1).bit_length() if len(weight) else 0
    experts = enumerate(zip(weight.unbind(), grad.unbind(), buffer.unbind()))
    return [_Matrix(*each, key, e * apart, shape[1:], how) for e, each in experts]


def _update_matrices(holders: Holders, matrices: list[_Matrix]) -> None:
    """Update the matrices of a turn and their momentum in place; never read a value on the host."""
    shapes = [each.shape for each in matrices]
    whole = holders.bring(map(_direction, matrices), shapes)
    made = None if whole is None else orthogonal(whole, matrices[holders.number].how.ns_steps)
    del whole
    like = matrices[0].weight.new_empty(0, dtype=torch.bfloat16)
    for each, o in zip(matrices, holders.give(made, shapes, like), strict=True):
        _apply(each, o)


def _work(shape: torch.Size) -> int:
    """Return how long Newton-Schulz takes, by its FLOPs but for a factor."""
    m, n = sorted(shape)
    return m * m * (2 * n + m)


def _direction(matrix: _Matrix) -> Tensor:
    """Update a matrix' momentum in place, and return what is to be orthogonalized, in bfloat16."""
    how, wide = matrix.how, torch.promote_types(matrix.weight.dtype, torch.float32)
    g = matrix.grad.to(wide) if how.scale is None else matrix.grad.to(wide) / how.scale
    b = matrix.buffer.to(wide).lerp(g, 1 - how.momentum).to(matrix.buffer.dtype)
    u = (g.lerp(b.to(wide), how.momentum) if how.nesterov else b).to(torch.bfloat16, copy=True)
    _replace(matrix.buffer, b, how.mask)
    return u


def _apply(matrix: _Matrix, o: Tensor) -> None:
    """Update the weight by what its direction became."""
    w, how = matrix.weight, matrix.how
    rate = muon_rate(how.lr, how.adjust_lr_fn, matrix.shape)
    wide = o.to(torch.promote_types(w.dtype, torch.float32)).mul_(rate)
    new = w.to(wide.dtype, copy=True).mul_(1 - how.lr * how.weight_decay).sub_(wide)
    _replace(w, new.to(w.dtype) if matrix.key is None else rounded(new, matrix.key, matrix.start), how.mask)


def _replace(old: Tensor, new: Tensor, mask: Tensor | None) -> None:
    """Write what is new, but where the mask says that the gradients were not finite."""
    old.copy_(new if mask is None else torch.where(mask != 0, old, new))
