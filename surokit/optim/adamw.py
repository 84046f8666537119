"""Update parameters by AdamW on torch's fused kernel, with clipping and the mask for non-finite steps; also with 8-bit moments.

    AdamW(lr=3e-4)                       a specification: Session calls .build(model)
    AdamW(model.parameters(), lr=3e-4)   a torch Optimizer; its state_dict is torch.optim.AdamW's
    AdamW8bit(lr=3e-4)                   the same with moments of one byte, as bitsandbytes defines them

Like torch's fused optimizers it reads two attributes before a step, both 0-d float32 tensors or None: `grad_scale`, by
which gradients are divided, and `found_inf`, which masks the whole step where it is not 0. So the host decides nothing.

With rounding="stochastic" every bfloat16 parameter has a key of its own, drawn from the seed and kept in its state; the key
and its number of steps give the random bits of an update. So a resumed run draws what the whole one would have drawn.

A parameter that is sharded (FSDP2's DTensor) is updated where its shard is, without communication: moments are sharded as it
is, blocks of 8-bit moments begin with each shard, and every shard draws bits of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from surokit.kernels import best, serving
from surokit.kernels.reference.adamw import adamw_, stochastic_bf16
from surokit.kernels.reference.adamw8bit import BLOCK, adamw8bit_, dequantize, quantize
from surokit.kernels.reference.random import bits
from surokit.optim.parts import Held, Part, Place, overlaps
from surokit.optim.spec import Parameters, SpecMeta
from surokit.optim.states import ADAMW_MOMENTS, adamw_states, decay_groups, given_order, in_groups_of
from surokit.optim.tensors import (
    flat,
    gradients_of,
    is_sharded,
    local,
    memory_order,
    on_device,
    scale_and_mask,
    shard_number,
)
from surokit.torch_private import declare_amp_scaling, foreach_add_, foreach_copy_, foreach_sub_, fused_adamw_

Rounding = Literal["nearest", "stochastic"]

FUSED_DEVICES = ("cpu", "cuda")
CHUNK = 1 << 25  # elements that are widened to float32 at a time: 2 x 128 MiB of scratch, 4 x with the moments
MIN_8BIT = 4096  # elements from which moments take 8 bits: bitsandbytes' min_8bit_size


class AdamW(torch.optim.Optimizer, metaclass=SpecMeta):
    """AdamW is an optimizer whose formula stands in kernels/reference/adamw.py.

    params: tensors, of which the frozen ones are left out and those with fewer than two dimensions (norms, biases) get
        no weight decay, nor do biases of experts where names are given too (named_parameters()); or torch's parameter groups,
        taken as they are. Absent: a `Spec`.
    lr: a float, or a 0-d tensor on the parameters' device, which a compiled or captured step can read anew.
    state_dtype: None keeps the two moments in each parameter's dtype; torch.float32 keeps them in float32.
    rounding: "stochastic" rounds bfloat16 parameters up or down at random after each update, right on average. To nearest,
        updates below 1/512 of a parameter vanish.
    seed: of stochastic rounding.

    Bytes of a parameter with its moments: bf16 6; with float32 moments 10, and scratch for 32 Mi elements; fp32 12.
    """

    coded: ClassVar[Mapping[str, str]] = {}  # moments that are kept as codes, and where the scales of their blocks are

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
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        assert params is not None, "SpecMeta gives a Spec then"
        self.state_dtype, self.rounding, self.seed = state_dtype, rounding, seed
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "eps": eps, "fused": True}
        super().__init__(decay_groups(self, params, weight_decay), defaults)
        declare_amp_scaling(self)
        self._warn_stalling_moments()
        if rounding == "stochastic" and any(p.dtype == torch.float16 for p in self._all_params()):
            raise ValueError(
                f'{type(self).__name__}: rounding="stochastic" is for bfloat16 parameters, and some are float16: '
                "make the model bfloat16."
            )

    if TYPE_CHECKING:  # a type checker does not see that AdamW(lr=...) is a Spec

        def build(self, params: nn.Module | Parameters) -> AdamW: ...

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raise ValueError that names the option which is out of range."""
        name = cls.__name__
        check_adamw(name, options)
        if (dtype := options.get("state_dtype")) not in (None, torch.float32):
            raise ValueError(f"{name}: state_dtype={dtype} must be None (the parameters' dtype) or torch.float32.")
        if (rounding := options["rounding"]) not in ("nearest", "stochastic"):
            raise ValueError(f'{name}: rounding={rounding!r} must be "nearest" or "stochastic".')
        if not isinstance(seed := options["seed"], int) or not 0 <= seed < 2**64:
            raise ValueError(f"{name}: seed={seed!r} must be an integer from 0 to 2^64 - 1.")

    def _warn_stalling_moments(self) -> None:
        half = (torch.bfloat16, torch.float16)
        for group in self.param_groups:
            low = self.state_dtype is None and any(p.dtype in half for p in group["params"])
            if low and group["betas"][1] >= 0.998:
                warnings.warn(
                    f"{type(self).__name__}: beta2={group['betas'][1]} with bfloat16 moments: a decay below half a unit in the "
                    "last place rounds away, so the second moment stalls. Use state_dtype=torch.float32 or beta2 <= 0.99.",
                    stacklevel=4,
                )
                return

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_lists(
            (params, self._options_on(params[0].device, g)) for g in self.param_groups for params in self._by_kernel(g)
        )
        return loss

    def _update_lists(self, lists: Iterable[tuple[list[Tensor], dict[str, Any]]]) -> None:
        """Update lists of parameters that go together, each with its options."""
        for params, options in lists:
            self._update(params, options)

    def _options_on(self, device: torch.device, group: Mapping[str, Any]) -> dict[str, Any]:
        options = self._options(group)
        if isinstance(group["lr"], Tensor) and device.type != "cuda":  # where some parameters are on the host
            options["lr"] = on_device(device, group["lr"])
        return options

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, **{name: group[name] for name in ("lr", "weight_decay", "eps")}}

    def _by_kernel(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Yield the group's parameters with a gradient, split so that each list is one call of a kernel."""
        for params in self._alike(group):
            assert params[0].grad is not None
            mixed = self._mixed(params[0].dtype, params[0].grad.dtype)
            yield from _chunks(params) if mixed else [params]

    def _alike(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Return the group's parameters with a gradient in lists of one device and of one dtype, also of the gradients."""
        lists: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                lists.setdefault((p.device, p.dtype, p.grad.dtype), []).append(p)
        return lists.values()

    def _mixed(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> bool:
        return dtype != grad_dtype or self.state_dtype not in (None, dtype) or self._rounds(dtype)

    def _rounds(self, dtype: torch.dtype) -> bool:
        """Return whether parameters of `dtype` are rounded stochastically; float32 has nothing to round."""
        return self.rounding == "stochastic" and dtype == torch.bfloat16

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _update(self, params: list[Tensor], options: dict[str, Any]) -> None:
        states = [self._state_of(p) for p in params]
        for p, state in zip(params, states):
            if p.stride() != state["exp_avg"].stride():
                _lay_as(p, state)
        params, grads = local(params), gradients_of(params)
        moments, squares = local([s["exp_avg"] for s in states]), local([s["exp_avg_sq"] for s in states])
        steps = [s["step"] for s in states]
        device = params[0].device
        self._check_moved(device, moments[0].device)
        if device.type == "cpu":  # there torch's fused kernel goes by memory, whatever the strides (tried)
            grads = [
                g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
                for p, g in zip(params, grads)
            ]
        # torch's fused kernel wants one dtype: with float32 moments it works on float32 copies, a chunk at a time
        mixed = self._mixed(params[0].dtype, grads[0].dtype)
        keys = step_keys([s["key"] for s in states], steps) if self._rounds(params[0].dtype) else None
        scale, mask = scale_and_mask(self, device)
        if device.type not in FUSED_DEVICES:
            adamw_(params, grads, moments, squares, steps, grad_scale=scale, found_inf=mask, keys=keys, **options)
            return
        targets, wide_moments, wide_squares = params, moments, squares
        if mixed:
            wide_dtype = moments[0].dtype if keys is None else torch.float32
            targets, grads = _widened(params, wide_dtype), _widened(grads, wide_dtype)
            if moments[0].dtype != wide_dtype:
                wide_moments, wide_squares = _widened(moments, wide_dtype), _widened(squares, wide_dtype)
        foreach_add_(steps, 1)
        fused_adamw_(
            targets,
            grads,
            wide_moments,
            wide_squares,
            [],
            steps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=mask,
            **options,
        )
        if mask is not None:
            foreach_sub_(steps, [mask] * len(steps))
        if wide_moments is not moments:
            foreach_copy_(moments + squares, wide_moments + wide_squares)
        if keys is not None:
            targets = [rounded(target, key) for target, key in zip(targets, keys)]
        if mixed:
            foreach_copy_(params, targets)

    def _check_moved(self, weights: torch.device, moments: torch.device) -> None:
        if weights != moments:
            raise RuntimeError(
                f"{type(self).__name__}: weights are on {weights} and their moments on {moments}, since the model was moved or "
                "offloaded: optimizer.load_state_dict(optimizer.state_dict()) brings the moments there."
            )

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state.update(self._new_moments(p))
        if self._rounds(p.dtype) and "key" not in state:
            params = self._all_params()
            index = next(i for i, other in enumerate(params) if other is p)
            state["key"] = _key(self.seed, index + shard_number(p) * len(params)).to(p.device)
        return state

    def _new_moments(self, p: Tensor) -> dict[str, Tensor]:
        dtype = self.state_dtype or p.dtype
        return {
            name: torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format) for name in self._moments_of(p)
        }

    def _moments_of(self, p: Tensor) -> tuple[str, ...]:
        return ADAMW_MOMENTS

    def _sources(self, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any] | None]:
        """Return each parameter's entries in a state dict with the groups of this optimizer."""
        return adamw_states(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # the base class keeps three entries only
        own = {"state_dtype": self.state_dtype, "rounding": self.rounding, "seed": self.seed}
        return {**super().__getstate__(), **own, **given_order(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        declare_amp_scaling(self)
        super().__setstate__(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as torch's AdamW does, except that moments come back in this optimizer's dtype instead of the parameter's.

        torch.optim.AdamW's state is accepted too, unless it has amsgrad or maximize: where both were given one iterable of the same
        parameters, all options but the weight decay are that state's. So is OffloadAdamW's where weights are whole and float32, as
        are its masters.
        """
        state_dict = in_groups_of(self, state_dict)
        sources = self._sources(state_dict)
        if any("master" in source and not _shows_all(p) for p, source in sources.items() if source):
            raise ValueError(
                "This state was made by OffloadAdamW, and its float32 masters say more than the weights do: load it into an "
                f"OffloadAdamW, not into {type(self).__name__}."
            )
        state_dict = {**state_dict, "state": {k: _without_master(v) for k, v in state_dict["state"].items()}}
        if any(source and ("absmax" in source) != self._in_8bit(p) for p, source in sources.items()):
            raise ValueError("Moments of 8 bits and others do not mix: load the state into the optimizer that made it.")
        super().load_state_dict(dict(state_dict))
        for p, source in sources.items():
            if not source:
                continue
            state = self.state[p]
            for key in (*self._moments_of(p), "absmax", "absmax_sq", "key"):
                if key not in source:
                    continue
                # codes, scales and keys come back as they are
                dtype = source[key].dtype if self._in_8bit(p) or key == "key" else self.state_dtype or p.dtype
                state[key] = source[key].detach().to(device=p.device, dtype=dtype, copy=True)
            state["step"] = torch.as_tensor(source["step"]).to(device=p.device, dtype=torch.float32, copy=True)

    def held(self, p: Tensor, name: str) -> Held:
        """Return what an entry of a parameter's state is to its shard: see surokit/optim/parts.py."""
        return "own" if name in ("key", *self.coded.values()) else None

    def _in_8bit(self, p: Tensor) -> bool:
        return False


class AdamW8bit(AdamW):
    """AdamW8bit is AdamW with moments of one byte, as bitsandbytes defines them; the formula is in kernels/reference/adamw8bit.py.

    The arguments are those of AdamW. Tensors below 4,096 elements keep their moments in float32, as in bitsandbytes.

    Bytes of a parameter with its moments: bf16 4 + 8/256, fp32 6 + 8/256.
    """

    coded: ClassVar[Mapping[str, str]] = {"exp_avg": "absmax", "exp_avg_sq": "absmax_sq"}

    def __init__(
        self,
        params: Parameters | None = None,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay, eps, torch.float32, rounding, seed)

    def _in_8bit(self, p: Tensor) -> bool:
        return p.numel() >= MIN_8BIT

    def _new_moments(self, p: Tensor) -> dict[str, Tensor]:
        if not self._in_8bit(p):
            return super()._new_moments(p)
        blocks = -(-local([p])[0].numel() // BLOCK)
        return {
            "exp_avg": torch.zeros_like(p, dtype=torch.uint8, memory_format=torch.contiguous_format),
            "exp_avg_sq": torch.zeros_like(p, dtype=torch.uint8, memory_format=torch.contiguous_format),
            "absmax": torch.zeros(blocks, dtype=torch.float32, device=p.device),
            "absmax_sq": torch.zeros(blocks, dtype=torch.float32, device=p.device),
        }

    @staticmethod
    def recoded(
        name: str, codes: Part, scales: Mapping[Place, Tensor], place: Place, shape: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a moment of the shard of `shape` at `place`, from those of shards that overlap it.

        Blocks of a shard begin with it, so its moments are decoded and encoded again.
        """
        signed = name == "exp_avg"
        wide = torch.zeros(tuple(shape))
        for start, piece in codes.pieces.items():
            here = overlaps(place, shape, start, piece.shape)
            there = overlaps(start, piece.shape, place, shape)
            if here is not None and there is not None:
                wide[here] = dequantize(piece, scales[start], signed)[there]
        return quantize(wide, signed)

    def _update(self, params: list[Tensor], options: dict[str, Any]) -> None:
        small = [p for p in params if not self._in_8bit(p)]
        if small:
            super()._update(small, options)
        large = [p for p in params if self._in_8bit(p)]
        if not large:
            return
        states = [self._state_of(p) for p in large]
        steps = [s["step"] for s in states]
        self._check_moved(large[0].device, states[0]["exp_avg"].device)
        scale, mask = scale_and_mask(self, large[0].device)
        best(adamw8bit_, large[0].device)(
            local(large),
            gradients_of(large),
            local([s["exp_avg"] for s in states]),
            local([s["exp_avg_sq"] for s in states]),
            [s["absmax"] for s in states],
            [s["absmax_sq"] for s in states],
            steps,
            grad_scale=scale,
            found_inf=mask,
            keys=step_keys([s["key"] for s in states], steps) if self._rounds(large[0].dtype) else None,
            **options,
        )


def _lay_as(p: Tensor, state: dict[str, Tensor]) -> None:
    """Lay the moments out in the parameter's order of memory, by which torch's fused kernel goes. They are in another one where the
    state was loaded, or the model has taken another memory format. ValueError where the parameter has gaps in memory, over which
    that kernel would write."""
    flat(p)
    (weight,) = local([p])
    for name in ADAMW_MOMENTS:
        (moment,) = local([state[name]])
        orders = [[d for d in memory_order(t) if t.shape[d] > 1] for t in (moment, weight)]
        if orders[0] != orders[1] and moment.device == weight.device:
            state[name] = torch.empty_like(p, dtype=moment.dtype).copy_(state[name])


def _shows_all(p: Tensor) -> bool:
    """Return whether a parameter is its own float32 master, in its order."""
    return p.dtype == torch.float32 and p.is_contiguous() and not is_sharded(p)


def _without_master(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "master"}


def check_adamw(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError that names the option of AdamW which is out of range; `name`: of the optimizer."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"{name}: lr is one number, not a tensor of shape {list(lr.shape)}.")
    elif not is_number(lr) or not 0 <= lr < math.inf:
        raise ValueError(f"{name}: lr={lr!r} must be a finite number >= 0.")
    pair = isinstance(betas, Sequence) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: betas={betas!r} must be two numbers in [0, 1).")
    for option in ("weight_decay", "eps"):
        if not is_number(value := options[option]) or not value >= 0:
            raise ValueError(f"{name}: {option}={value!r} must be a number, and must not be negative.")


def is_number(value: Any) -> bool:
    """Return whether a value is a real number."""
    return isinstance(value, Real)


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.numel() for t in chunk) + tensor.numel() > CHUNK:
            yield chunk
            chunk = []
        chunk.append(tensor)
    yield chunk


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
    foreach_copy_(copies, tensors)
    return copies


def _key(seed: int, index: int) -> Tensor:
    """Return int32 [2]: words 2 index and 2 index + 1 of the seed's random bits."""
    halves = torch.tensor([seed & 0xFFFFFFFF, seed >> 32]).to(torch.int32)  # wraps
    return bits(2 * index + 2, halves)[-2:]


def rounded(x: Tensor, key: Tensor, start: int = 0) -> Tensor:
    """Return x, float32, as bfloat16, rounded stochastically; kernels/reference/adamw.py says how."""
    return serving(stochastic_bf16, x.device).function(x, key, start)


def step_keys(own: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
    """Return one key for each parameter and step t: words 2 t and 2 t + 1 of the bits that the parameter's own key gives."""
    first, second = torch.stack(own, 1)
    start = 2 * torch.stack(steps).int()
    even = torch.arange(0, 2 * len(own), 2, dtype=torch.int32, device=start.device)
    # bits() of all at once, with a key for each position; the position 2 i + {0, 1} becomes 2 t + {0, 1}
    keys = torch.stack((first ^ start ^ even, second)).repeat_interleave(2, dim=1)
    return list(bits(2 * len(own), keys).view(-1, 2).unbind(0))
