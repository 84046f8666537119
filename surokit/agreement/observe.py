"""Run one model once, forward and backward, and keep what each of its modules took and gave; the model is left as it was.

A run may be disturbed: each value that a module takes or gives is then multiplied by 1 + a normal number of a given size, as if it
had been rounded once more, and so is the gradient that comes back through it. What a dtype's roundings do to this model and this
batch, its depth and its softmax included, is thereby measured (Monte Carlo arithmetic, Parker 1997) and needs no bound.

B batch, T tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surokit.layers import Layer, module_of
from surokit.models.decoder import MLP, Attention, Block
from surokit.models.foreign import FusedCausalLM, FusedMixin
from surokit.nn.delayed import kept_amaxes
from surokit.nn.experts import Experts, ExpertsLinear, is_experts, unsupported, weights_of
from surokit.nn.fusion import OFF, fusion_for
from surokit.nn.linear import Linear
from surokit.torch_private import buffers_of, children_of, parameters_of

Batch = Mapping[str, Tensor]

# what torch.compile, FSDP, checkpoints, DDP and PEFT put into a module's name
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)(\.|$)")


@dataclass
class Call:
    """A Call is a copy of what a module took and gave; None where that was no tensor of floating-point numbers.

    arrived: the gradient of what a linear layer gave, kept in a run with quantized products.
    """

    taken: Tensor | None
    given: Tensor | None
    arrived: Tensor | None = None


@dataclass
class Seen:
    """A Seen holds one run: `calls` by module in the order in which they ended, loss, logits, and gradients by parameter.

    A gradient is None where none arrived; parameters that do not train are left out.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    loss: Tensor | None = None
    logits: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without what wrappers put into it, so that both models' names are a checkpoint's."""
    name = _WRAPPERS.sub("", name).removeprefix("module.").removeprefix("base_model.model.")
    return re.sub(r"\b(lora_[AB])\.default\b", r"\1", name).strip(".")


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by plain name, the outer one where two share a name; lists and dictionaries of modules compute nothing."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found.setdefault(plain_name(name), module)
    return found


def layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield the linear layers and the weights of experts, each with the plain name of the parameter that holds its weight."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield plain_name(f"{name}.weight"), module
        elif isinstance(module, Experts) or (is_experts(module) and not unsupported(module)):
            for weight, layer in weights_of(module).items():
                yield plain_name(f"{name}.{weight}"), layer


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name; one that is tied stands under each of its names."""
    return {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}


def head_of(model: nn.Module) -> str:
    """Return the name of the module that makes the logits: no hook goes there, since a fused loss never calls it."""
    modules = modules_of(model)
    give = getattr(model, "get_output_embeddings", None)
    head = give() if callable(give) else None
    return next((name for name, module in modules.items() if module is head), "lm_head")


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that most of the model's numbers have; inside of autocast, autocast's."""
    counts: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.is_floating_point() and p.dtype.itemsize > 1:
            counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    device = device_of(model).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def balances(model: nn.Module) -> bool:
    """Return whether backward of a model's loss in training has the gradient of a load-balancing loss of experts."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(config, "balance", None) or getattr(config, "output_router_logits", False))


@contextmanager
def without_balance(model: nn.Module) -> Iterator[None]:
    """Leave the load-balancing loss out in the block."""
    config: Any = model.config
    ours = bool(getattr(config, "balance", None))
    name, off = ("balance", 0.0) if ours else ("output_router_logits", False)
    before = getattr(config, name)
    object.__setattr__(config, name, off)  # a frozen one, which all parts of the model hold
    try:
        yield
    finally:
        object.__setattr__(config, name, before)


def drops(model: nn.Module) -> bool:
    """Return whether training draws random numbers (dropout, noise in a router), or computes blocks again so that autograd.grad
    may not follow."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True or (isinstance(module, nn.Dropout) and module.p):
            return True
        noisy = [value for name, value in vars(module).items() if "dropout" in name or "jitter" in name]
        if any(isinstance(value, float) and value > 0 for value in noisy):
            return True
    return False


@contextmanager
def undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode in the block; at its end, modes, buffers, random states and amaxes are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (buffers_of(module), name, tensor, None if tensor is None else tensor.clone())
        for module in model.modules()
        for name, tensor in buffers_of(module).items()
    ]
    device = device_of(model)
    try:
        with kept_amaxes(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model.train(training)
            # stochastic rounding draws alike in both models; no generator but those that are restored is touched
            torch.default_generator.manual_seed(0)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for home, name, tensor, before in buffers:
            home[name] = tensor
            if tensor is not None and before is not None:
                with torch.no_grad():
                    tensor.copy_(before)


@contextmanager
def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute in the block with these weights, by plain name of the parameter, in place of its own."""
    homes = {name: parameters_of(module_of(layer)) for name, layer in layers_of(model) if name in weights}
    before = {name: home[_last(name)] for name, home in homes.items()}
    try:
        for name, home in homes.items():
            own = before[name]
            trains = own is not None and own.requires_grad
            home[_last(name)] = nn.Parameter(weights[name], requires_grad=trains)
        yield
    finally:
        for name, home in homes.items():
            home[_last(name)] = before[name]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@contextmanager
def without_products(model: nn.Module) -> Iterator[None]:
    """Compute in the block without the recipe's quantized products; stored weights stay."""
    layers = [m for _, m in layers_of(model) if isinstance(m, Linear | ExpertsLinear) and m.precision is not None]
    before = [layer.precision for layer in layers]
    try:
        for layer in layers:
            layer.precision = None
        yield
    finally:
        for layer, own in zip(layers, before):
            layer.precision = own


def hookable(model: nn.Module, inside: bool) -> dict[str, nn.Module]:
    """Return the modules that may be hooked: with `inside` all but what experts compute between their products, else those whose
    hooks leave each fused step fused too."""
    probe = next(model.parameters())
    # an activation between the weights of experts may see one expert's rows or all of them
    hidden = {
        m for e in model.modules() if is_experts(e) for m in e.children() if not any(True for _ in m.parameters())
    }
    if not inside:
        for module in model.modules():
            fused = isinstance(module, Block | Attention | MLP | FusedMixin) and not isinstance(module, FusedCausalLM)
            if fused and fusion_for(getattr(module, "fusion", None), probe) != OFF:
                hidden |= set(module.modules()) - {module}
    head = head_of(model)
    return {
        name: module for name, module in modules_of(model).items() if name and name != head and module not in hidden
    }


def observe(
    model: nn.Module,
    batch: Batch,
    *,
    training: bool,
    inside: bool,
    products: bool = False,
    noise: Mapping[str, float] | None = None,
    draw: int = 0,
    weights: Mapping[str, Tensor] | None = None,
) -> Seen:
    """Run `model` on the batch and return what was seen.

    inside: whether modules inside of a fused step are looked at, which is then not fused. products: whether a recipe's products are
    quantized. noise: relative size of the disturbance by module, which `draw` numbers; none without it. weights: by parameter,
    in place of its own.
    """
    seen, active = Seen(), [True]

    def before(name: str, module: nn.Module) -> Any:
        leaf = not any(children_of(module).values())

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if active[0]:
                taken[name] = first_of((*args, *kwargs.values()))
            if noise is None or not leaf:
                return None
            size = noise.get(name, 0.0)
            return _disturbed(args, size, f"{name} in {draw}"), _disturbed(kwargs, size, f"{name} in {draw}")

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if noise is not None:
                output = _disturbed(output, noise.get(name, 0.0), f"{name} out {draw}")
            if active[0] and name not in seen.calls:
                call = seen.calls[name] = Call(taken.get(name), _given(module, output))
                if products and isinstance(module, Linear) and isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda g: setattr(call, "arrived", g))
            return output if noise is not None else None

        return hook

    taken: dict[str, Tensor | None] = {}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model, training))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(with_weights(model, weights or {}))
        if not products:
            stack.enter_context(without_products(model))
        for name, module in hookable(model, inside).items():
            for handle in (
                module.register_forward_pre_hook(before(name, module), with_kwargs=True),
                module.register_forward_hook(after(name)),
            ):
                stack.callback(handle.remove)
        output = model(**batch)
        loss = getattr(output, "loss", None)
        logits = getattr(output, "logits", None)
        active[0] = False  # what is computed again in backward is not looked at
        seen.loss = None if loss is None else loss.detach().float()
        seen.logits = None if logits is None else logits.detach()
        trained = {name: p for name, p in parameters_by_name(model).items() if p.requires_grad}
        if loss is not None and loss.requires_grad and trained:
            # into no parameter's .grad, where an optimizer's hooks wait
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            seen.gradients = dict(zip(trained, found))
    return seen


def first_of(values: Any) -> Tensor | None:
    """Return a copy of the first tensor of floating-point numbers, which others may write to later; None without one."""
    found = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    return None if found is None else found.detach().clone()


def _given(module: nn.Module, output: Any) -> Tensor | None:
    """Return what a module gave: the first tensor of a tuple or of an output of transformers; of rotary tables cos beside sin."""
    if "rotary" in type(module).__name__.lower() and isinstance(output, tuple):
        return torch.stack([half(table.detach().float()) for table in output], dim=-1)
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return first_of(output if isinstance(output, tuple) else (output,))


def half(table: Tensor) -> Tensor:
    """Return cos or sin [T, E] or [B, T, E] of tables whose last dimension may hold each number twice, one batch or none."""
    E = table.shape[-1] // 2
    if torch.equal(table[..., :E], table[..., E:]):
        table = table[..., :E]
    return table[0] if table.ndim == 3 and len(table) == 1 else table


def _disturbed(value: Any, size: float, key: str) -> Any:
    """Return value with each floating-point tensor in it times 1 + size x a normal number; the same key, the same numbers."""
    if not size:
        return value
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        generator = torch.Generator(value.device).manual_seed(zlib.crc32(key.encode()))
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        normal = torch.randn(value.shape, generator=generator, device=value.device, dtype=wide)
        return (value.to(wide) * (1 + size * normal)).to(value.dtype)
    if type(value) is tuple:
        return tuple(_disturbed(v, size, f"{key} {i}") for i, v in enumerate(value))
    if type(value) is dict:
        return {k: _disturbed(v, size, f"{key} {k}") if _is_state(k, v) else v for k, v in value.items()}
    return value


def _is_state(name: str, value: Any) -> bool:
    """Return whether an argument is a hidden state: no mask, whose numbers are -inf, nor tables, which were disturbed before."""
    return isinstance(value, Tensor) and "mask" not in name
