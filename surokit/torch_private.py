"""Hold what torch does not promise, names with an underscore, each behind one function.

Torch may change such a name in any release. Whoever needs one asks here; each function says in a sentence what it relies on, and
`tests/test_torch_private.py` tries that. What a step calls often is torch's function itself under a public name.

Some names serve one file, which is about them, and stay there. The same test fails where a file uses one that is not listed here:

    kernels/cuda/build.py: the folder in which torch's loader builds, to lock it
        torch.utils.cpp_extension._get_build_directory
    kernels/reference/attention.py: an operator that writes its result over its input
        torch.ops.aten._softmax_backward_data.out
    surokit/kernels/native.py: the product with scales, before torch.nn.functional.scaled_mm
        torch._scaled_mm
    surokit/agreement/batches.py: what torch.compile wraps
        _orig_mod
    surokit/launching/agent.py: a method that torchelastic's agents extend, which sees how each process ended, and their processes
        _monitor_workers, _pcontext
    surokit/models/decoder.py: a method that a module extends, for what it keeps beside its parameters
        _apply
    surokit/models/foreign.py: the same, and the module's own layers
        _apply, _modules
    surokit/models/sparse.py: a method that the module extends, for what it counts
        _apply
    surokit/nn/attention.py: cuDNN's attention, which no public function asks for
        torch.ops.aten._scaled_dot_product_cudnn_attention
    surokit/nn/delayed.py: the dictionaries in which a model's layers and parameters are compared with those of an earlier walk
        _modules, _parameters
    surokit/nn/experts.py: methods that the module extends, for what it keeps; its own parameters and children
        _apply, _load_from_state_dict, _modules, _parameters
    surokit/nn/linear.py: methods that the layer extends, for what it keeps; its own parameters and children
        _apply, _load_from_state_dict, _modules, _parameters
    surokit/nn/rope.py: a method that the module extends, which builds its tables anew for a device or dtype
        _apply
    surokit/offload/weights.py: a module is moved but for some of its parameters
        _apply
    surokit/optim/muon.py: what torch.compile wraps
        _orig_mod
    surokit/planner/inputs/introspect.py: what torch.compile wraps, in a part that imports no torch
        _orig_mod
    surokit/profiler/analysis/work.py: operators, what they take and write, and which of them are made of others
        torch._ops.OpOverload, torch._ops.OpOverloadPacket, _schema
        torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Meta
    surokit/profiler/record/settings.py: settings of a DataLoader's iterator
        _num_workers, _pin_memory
    surokit/profiler/record/tracer.py: a long kernel, behind which a queue is filled
        torch.cuda._sleep
    surokit/profiler/report/verify.py: an iterator's place in its epoch, a value that is read, an optimizer's note of a fused step
        _num_yielded, _index_sampler, torch.ops.aten._local_scalar_dense.default, _need_device_dtype_check_for_fused
    surokit/train/compiling.py: compile workers, which end where a compile is given up
        torch._inductor.async_compile
    surokit/train/cuda_graphs.py: the allocator's pool of a capture that failed
        torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool
    surokit/train/fingerprint.py: a module's dictionary of children, as one of its attributes
        _modules
    surokit/train/observing.py: the copies that DataParallel makes of a model
        _is_replica

Names of operators that a profile reads in a trace are data, and not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.autograd import profiler as torch_profiler
from torch.optim import _muon
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import _BaseDataLoaderIter

# -- operations on lists of tensors: one call, on a GPU one kernel, for what torch.add and others do to each

foreach_add_ = torch._foreach_add_
foreach_sub_ = torch._foreach_sub_
foreach_div_ = torch._foreach_div_
foreach_zero_ = torch._foreach_zero_
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm
#: torch.optim.AdamW(fused=True)'s kernel: the step counts include this update already, and where `found_inf` is 1 nothing changes.
fused_adamw_ = torch._fused_adamw_


# -- tensors and their memory


def version_of(t: Tensor) -> int:
    """Return how often a tensor's memory was written; relies on `_version`, which views share and writes through `.data` skip."""
    return t._version


def frozen_versions(parameters: Iterable[Tensor]) -> list[int | None]:
    """Return the version of each parameter that does not train, None for others; relies on `_version`."""
    return [None if p.requires_grad else p._version for p in parameters]


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is one for all tensors in this memory while it lives; relies on `_cdata`, also for empty memory."""
    number: int = storage._cdata
    return number


def memory_states(tensors: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return for each tensor its memory, address and version: equal where nothing was written or exchanged."""
    return tuple((t.untyped_storage()._cdata, t.data_ptr(), t._version) for t in tensors)


def base_of(t: Tensor) -> Tensor:
    """Return the tensor that this is a view of, or itself; relies on `_base`, which autograd sets to the first of all bases."""
    base: Tensor | None = t._base
    return t if base is None else base


# -- modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own dictionary of parameters, live; relies on `_parameters`, where None stands for an absent bias."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own dictionary of children, live; relies on `_modules`."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own dictionary of buffers, live; relies on `_buffers`."""
    return module._buffers


def is_hooked(module: nn.Module, but_forward_hooks: bool = False) -> bool:
    """Return whether a call of the module is more than its class' forward; `but_forward_hooks` says that these do not count.

    Relies on the dictionaries that the `register_..._hook` methods fill. Hooks on all modules, as profilers have them, do not
    count: they see the modules that are called.
    """
    hooks = [module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    if not but_forward_hooks:
        hooks.append(module._forward_hooks)
    return any(hooks) or "forward" in vars(module)


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the live dictionaries of a module's hooks: forward, before forward, backward, before backward."""
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that see a module's output; relies on `_forward_hooks`."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that see a module's input first; relies on `_forward_pre_hooks`."""
    return module._forward_pre_hooks


def always_called_hooks(module: nn.Module) -> Mapping[int, bool]:
    """Return which forward hooks run also where forward raises; relies on `_forward_hooks_always_called`."""
    return module._forward_hooks_always_called


def through_forward_hooks(module: nn.Module, x: Any, y: Any) -> Any:
    """Return y as the module's forward hooks leave it; relies on `_forward_hooks` and `_forward_hooks_with_kwargs`."""
    for number, hook in list(module._forward_hooks.items()):
        result = hook(module, (x,), *([{}] if number in module._forward_hooks_with_kwargs else ()), y)
        y = y if result is None else result
    return y


# -- parameters and optimizers


def gradient_hooks(p: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks that see a tensor's gradient before it is added to `.grad`; relies on `_backward_hooks`."""
    return list((getattr(p, "_backward_hooks", None) or {}).values())


def accumulated_hooks(p: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks that run once `.grad` is there; relies on `_post_accumulate_grad_hooks`."""
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


#: (requires_grad, hooks on the gradient, hooks behind its accumulation) of a parameter: the two are None until the first hook.
training_state = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def declare_amp_scaling(optimizer: Any) -> None:
    """Tell torch's GradScaler that this optimizer reads `grad_scale` and `found_inf` itself, so that no step waits for the host.

    Relies on `_step_supports_amp_scaling`, for which `GradScaler.step` looks.
    """
    optimizer._step_supports_amp_scaling = True


def handles_amp_scaling(optimizer: Any) -> bool:
    """Return whether the optimizer reads `grad_scale` and `found_inf` itself, as torch's fused ones and ours do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks around its step; relies on `_optimizer_step_pre_hooks` and `..._post_hooks`."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix with all its singular values near 1, in bfloat16, by Newton-Schulz steps; one in bfloat16 is overwritten.

    Relies on `torch.optim._muon`: the function and the constants that torch.optim.Muon takes for it.
    """
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, _muon.EPS)


def muon_rate(lr: Any, adjust_lr_fn: str, shape: Sequence[int]) -> Any:
    """Return torch.optim.Muon's rate for a matrix of this shape, a tensor where `lr` is one; relies on `_muon._adjust_lr`."""
    return _muon._adjust_lr(lr, adjust_lr_fn, torch.Size(shape))


# -- autograd

#: The number of the backward pass that runs on this thread, another one for each; -1 outside of any.
backward_number = torch._C._current_graph_task_id
#: Calls a function without arguments at the end of the backward pass that is running. Outside of one it raises.
call_after_backward = torch.autograd.Variable._execution_engine.queue_callback


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread; relies on -1 for none."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_transformed() -> bool:
    """Return whether torch.export, torch.func or forward-mode differentiation looks on: our autograd functions have no rules for
    them. Relies on functorch's flag, and on the level of forward_ad, which is -1 outside of any."""
    if torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# -- torch.compile


def constant_when_compiled(function: Callable[..., Any]) -> Any:
    """Let a compiled graph keep the answer that a function gave when the graph was made; returns the function.

    It does what torch.compiler.assume_constant_result does, which imports torch._dynamo at once: a second of every start. Relies
    on the mark that it sets.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# -- the dispatcher

#: How many modes see every operation on this thread, such as a TorchDispatchMode.
count_dispatch_modes = torch._C._len_torch_dispatch_stack


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide what is done inside from the caller's modes: those of the dispatcher, and those of torch functions."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def keys_below_backend_select() -> Any:
    """Return the dispatcher's keys behind BackendSelect: `operator.redispatch(keyset & this, ...)` goes on to the backend."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@contextmanager
def in_front_of_backends(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Call kernels(keyset, *arguments) in place of these operators of aten, below autograd and torch.compile's tracing.

    Relies on few operators having a kernel at BackendSelect already, and on `Library._destroy`, which takes ours away again.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for operator, kernel in kernels.items():
            library.impl(operator, kernel, "BackendSelect", with_keyset=True)
        yield
    finally:
        library._destroy()


# -- subclasses of tensors

#: Makes a tensor of a subclass that has a shape, a dtype and no memory of its own.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
#: tree_map_only(kind, function, tree) calls the function on each object of this kind in lists, tuples and dicts.
tree_map_only = torch.utils._pytree.tree_map_only


# -- FSDP2: what fully_shard makes of a model

# A group holds the parameters that are gathered together (`fsdp_params`, `mesh_info`, `post_forward_mesh_info`, `mp_policy`), as
# shards, one of each parameter (`sharded_param`, `padded_sharded_param_size`, `fsdp_placement`, `all_gather_outputs` and more).
# These names have no underscore, and torch promises them no more than the others.


def shard_groups(model: nn.Module) -> list[tuple[Any, bool]]:
    """Return FSDP2's groups of parameters in a model, each with whether its weights are let go after forward.

    Relies on `_get_fsdp_state`, on `_fsdp_param_groups` (before torch 2.13 the one `_fsdp_param_group`), and on
    `_auto_reshard_after_forward`, by which the outermost module keeps its weights until backward.
    """
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, tuple[Any, bool]] = {}
    inner: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        keeps = module not in inner and bool(state._auto_reshard_after_forward)
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                found.setdefault(id(group), (group, group.post_forward_mesh_info is not None and not keeps))
        inner.update(module.modules())
    return list(found.values())


def is_resharded_to_fewer(group: Any) -> bool:
    """Return whether forward leaves a group's weights with some of the processes (reshard_after_forward is a number).

    Relies on `_use_post_forward_mesh`.
    """
    return bool(group._use_post_forward_mesh)


def gathers_for(group: Any) -> str:
    """Return what the gather that is being made is for: "forward", "backward", or "" where somebody asked for the weights.

    Relies on `_training_state`, which prefetching sets too, and on -1 for no backward pass: forward within it is computed again.
    """
    state = group._training_state.name
    if state == "FORWARD":
        return "backward" if in_backward() else "forward"
    return "backward" if state == "PRE_BACKWARD" else ""


def holders_of(shard: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that have a sharded parameter, and its name in each; relies on `_module_info`."""
    info = shard._module_info
    return list(zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)))


def padded_shard(shard: Any) -> Tensor:
    """Return this process' rows of a sharded parameter with the zeros that make all shards equally long: what is gathered.

    Relies on `_sharded_param_data`.
    """
    data: Tensor = shard._sharded_param_data.view(shard.padded_sharded_param_size)
    return data


def extend_gather(shard: Any, before: Callable[[Any], Any], after: Callable[..., Any]) -> None:
    """Call before(mesh) and after(outputs, ...) around each gather of a shard, as `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

    torch looks for these on the local tensor of the shard, which is a tensor as any other here: whoever copies or saves it gets
    no more. Relies on torch's looking through `_sharded_local_tensor` only, and on `_init_extensions`.
    """
    looks_elsewhere = {"_sharded_local_tensor": property(lambda shard: shard.around_gathers)}
    shard.__class__ = type(type(shard).__name__, (type(shard),), looks_elsewhere)
    shard.around_gathers = SimpleNamespace(fsdp_pre_all_gather=before, fsdp_post_all_gather=after)
    shard._init_extensions()


def extension_of(shard: Any) -> Any:
    """Return the object whose method `extend_gather` has put before the gathers of a shard, None without one."""
    return shard.around_gathers.fsdp_pre_all_gather.__self__ if hasattr(shard, "around_gathers") else None


# -- torch's profiler, compiler and data loader

#: Whether a profiler of torch's runs on this thread.
profiler_runs = torch._C._autograd._profiler_enabled


def profiler_runs_anywhere() -> bool:
    """Return whether a profiler of torch's runs, on this thread or, as far as Python knows, on another.

    Relies on `torch.autograd.profiler._is_profiler_enabled` for other threads, which need not be there.
    """
    return profiler_runs() or bool(getattr(torch_profiler, "_is_profiler_enabled", False))


#: A range in a profile that costs a tenth of what record_function does, and is an operator there.
quick_range = torch._C._profiler._RecordFunctionFast


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was asked to compile a module's calls; relies on `_orig_mod` and `_compiled_call_impl`."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


#: Decorates a function that torch.compile is to call and not to trace; the compiler is loaded by the first call, not by this line.
not_compiled = _disable_dynamo
#: The class of all iterators of a DataLoader, whose `__next__` gives the batches.
DataLoaderIterator = _BaseDataLoaderIter
