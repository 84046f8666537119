"""AdamW on torch's fused kernel, with clipping and the mask for non-finite steps folded into it.

    AdamW(lr=3e-4)                       a specification: Session calls .build(model.parameters())
    AdamW(model.parameters(), lr=3e-4)   a torch Optimizer; its state_dict is torch.optim.AdamW's

Like torch's fused optimizers it reads two attributes before a step, both 0-d float32 tensors or None: `grad_scale`, by
which gradients are divided, and `found_inf`, which masks the whole step where it is 1. So the host decides nothing.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surokit.kernels.reference.adamw import adamw_

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]

_FUSED_DEVICES = ("cpu", "cuda")
_CHUNK = 1 << 25  # elements that are widened to float32 at a time: 2 x 128 MiB of scratch


@dataclass(frozen=True)
class Spec:
    """An optimizer that waits for its parameters: a class and its options."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, params: Parameters) -> torch.optim.Optimizer:
        """The optimizer over those of `params` that require a gradient; ValueError if there is none."""
        # a learning rate in a tensor is filled in place, and every optimizer has its own
        options: dict[str, Any] = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in self.options.items()
        }
        return self.optimizer(params, **options)

    def __repr__(self) -> str:
        return f"{self.optimizer.__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


class SpecMeta(type):
    """Calling an optimizer class without parameters gives a Spec; with parameters first, the optimizer."""

    def __call__(cls, params: Parameters | None = None, **options: Any) -> Any:
        if params is not None:
            return super().__call__(params, **options)
        inspect.signature(cls.__init__).bind(None, None, **options)  # type: ignore[misc]  # a misspelt option fails here
        cls.check(**options)  # type: ignore[attr-defined]
        return Spec(cls, options)  # type: ignore[arg-type]

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class AdamW(torch.optim.Optimizer, metaclass=SpecMeta):
    """AdamW; the formula stands in kernels/reference/adamw.py.

    params: tensors, of which the frozen ones are left out and those with fewer than two dimensions (norms, biases) get
        no weight decay; or torch's parameter groups, taken as they are. Absent: a `Spec`.
    lr: a float, or a 0-d tensor on the parameters' device, which a compiled or captured step can read anew.
    state_dtype: None keeps the two moments in each parameter's dtype; torch.float32 keeps them in float32.

    Bytes of a parameter with its moments: bf16 6; with float32 moments 10, and scratch for 32 Mi elements; fp32 12.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Parameters | None = None,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        assert params is not None, "SpecMeta gives a Spec then"
        self.check(lr, betas, weight_decay, eps, state_dtype)
        self.state_dtype = state_dtype
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "eps": eps, "fused": True}
        super().__init__(decay_groups(params, weight_decay), defaults)
        self.grad_scale = self.found_inf = None
        self._step_supports_amp_scaling = True  # torch's word for: reads grad_scale and found_inf
        self._warn_stalling_moments()

    if TYPE_CHECKING:  # a type checker does not see that AdamW(lr=...) is a Spec

        def build(self, params: Parameters) -> AdamW: ...

    @staticmethod
    def check(
        lr: float | Tensor = 0.0,
        betas: tuple[float, float] = (0.0, 0.0),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """ValueError that names the option which is out of range."""
        if isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ValueError(f"AdamW: lr is one number, not a tensor of shape {list(lr.shape)}.")
        elif not 0 <= lr < float("inf"):
            raise ValueError(f"AdamW: lr={lr} must be a finite number >= 0.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: betas={betas} must be two numbers in [0, 1).")
        if weight_decay < 0 or eps < 0:
            raise ValueError(f"AdamW: weight_decay={weight_decay} and eps={eps} must not be negative.")
        if state_dtype not in (None, torch.float32):
            raise ValueError(f"AdamW: state_dtype={state_dtype} must be None (the parameters' dtype) or torch.float32.")

    def _warn_stalling_moments(self) -> None:
        half = (torch.bfloat16, torch.float16)
        for group in self.param_groups:
            low = self.state_dtype is None and any(p.dtype in half for p in group["params"])
            if low and group["betas"][1] >= 0.998:
                warnings.warn(
                    f"AdamW: beta2={group['betas'][1]} with bfloat16 moments: a decay below half a unit in the last "
                    "place rounds away, so the second moment stalls. Use state_dtype=torch.float32 "
                    "or beta2 <= 0.99.",
                    stacklevel=4,
                )
                return

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {
                "lr": group["lr"],
                "beta1": group["betas"][0],
                "beta2": group["betas"][1],
                "weight_decay": group["weight_decay"],
                "eps": group["eps"],
            }
            for params in self._by_kernel(group):
                self._update(params, options)
        return loss

    def _by_kernel(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """The group's parameters with a gradient, split so that each list is one call of a kernel."""
        lists: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                lists.setdefault((p.device, p.dtype, p.grad.dtype), []).append(p)
        for (_, dtype, grad_dtype), params in lists.items():
            if self._mixed(dtype, grad_dtype):
                yield from _chunks(params)
            else:
                yield params

    def _mixed(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> bool:
        return dtype != grad_dtype or self.state_dtype not in (None, dtype)

    def _update(self, params: list[Tensor], options: dict[str, Any]) -> None:
        states = [self._state_of(p) for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        moments, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        steps = [s["step"] for s in states]
        device = params[0].device
        # torch's fused kernel wants one dtype: with float32 moments it works on float32 copies, a chunk at a time
        mixed = self._mixed(params[0].dtype, grads[0].dtype)
        scale, mask = _on(device, self.grad_scale), _on(device, self.found_inf)
        if device.type not in _FUSED_DEVICES:
            adamw_(params, grads, moments, squares, steps, grad_scale=scale, found_inf=mask, **options)
            return
        targets = params
        if mixed:
            wide_dtype = moments[0].dtype
            targets, grads = _widened(params, wide_dtype), _widened(grads, wide_dtype)
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            targets,
            grads,
            moments,
            squares,
            [],
            steps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=mask,
            **options,
        )
        if mask is not None:
            torch._foreach_sub_(steps, [mask] * len(steps))
        if mixed:
            torch._foreach_copy_(params, targets)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            dtype = self.state_dtype or p.dtype
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return state

    def __getstate__(self) -> dict[str, Any]:
        # the base class keeps three entries only
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.grad_scale = self.found_inf = None
        self._step_supports_amp_scaling = True
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that moments come back in `state_dtype` instead of the parameter's dtype.

        torch.optim.AdamW's state is accepted too, unless it has amsgrad or maximize.
        """
        groups = state_dict["param_groups"]
        if any(group.get("amsgrad") or group.get("maximize") for group in groups):
            raise ValueError("This optimizer state was made with amsgrad or maximize, which AdamW does not have here.")
        super().load_state_dict(state_dict)
        own = [p for group in self.param_groups for p in group["params"]]
        saved = [index for group in groups for index in group["params"]]
        for p, index in zip(own, saved):
            if index not in state_dict["state"]:
                continue
            source, state = state_dict["state"][index], self.state[p]
            dtype = self.state_dtype or p.dtype
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = source[key].detach().to(device=p.device, dtype=dtype, copy=True)
            state["step"] = torch.as_tensor(source["step"]).to(device=p.device, dtype=torch.float32, copy=True)


def decay_groups(params: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the trainable `params`, with weight decay from two dimensions up. Groups pass unchanged.

    ValueError where nothing is trainable.
    """
    if isinstance(params, Tensor):
        raise TypeError("AdamW takes an iterable of parameters, for example model.parameters(), not one tensor.")
    every = list(params)
    if every and isinstance(every[0], dict):
        return every  # type: ignore[return-value]
    tensors: list[Tensor] = [p for p in every if isinstance(p, Tensor)]
    if len(tensors) < len(every):
        raise TypeError("AdamW takes parameters or torch's parameter groups; for named ones pass model.parameters().")
    trainable = [p for p in tensors if p.requires_grad]
    if not trainable:
        raise ValueError(
            "There is nothing to train: no parameter requires a gradient. "
            "Unfreeze some, or add an adapter with recipe.lora()."
        )
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    groups = ({"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _on(device: torch.device, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device, non_blocking=True)


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.numel() for t in chunk) + tensor.numel() > _CHUNK:
            yield chunk
            chunk = []
        chunk.append(tensor)
    yield chunk


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """L2 norm over all tensors together, 0-d float32 on the first one's device.

    On a CPU the norm of each low-precision tensor is rounded to its dtype, which is six times as fast there.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    norms = []
    for (device, _), tensors in groups.items():
        dtype = None if device.type == "cpu" else torch.float32
        norms.append(torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).float().to(grads[0].device))
    return torch.linalg.vector_norm(torch.cat(norms))


def spec_to_dict(spec: Spec | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Plain data for a checkpoint; an optimizer that was not built from a specification of ours is named, not stored."""
    if spec is None or spec.optimizer is not AdamW:
        return {"name": type(optimizer).__qualname__, "custom": True}
    options = {name: _to_plain(value) for name, value in spec.options.items()}
    return {"name": "AdamW", "options": options}


def spec_from_dict(data: dict[str, Any]) -> Spec:
    """Inverse of `spec_to_dict`; ValueError where the optimizer was the user's own."""
    if data.get("custom"):
        raise ValueError(f"The checkpoint's optimizer {data['name']} was built outside: pass optimizer= again.")
    options = dict(data["options"])
    if options.get("state_dtype"):
        options["state_dtype"] = getattr(torch, options["state_dtype"])
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return Spec(AdamW, options)


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return float(value) if isinstance(value, Tensor) else value
