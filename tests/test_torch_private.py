"""What torch does not promise is used through surokit.torch_private only, and does what it says there with this torch."""

import ast
import importlib
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from surokit import torch_private

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    p for folder in ("surokit", "kernels") for p in (ROOT / folder).rglob("*.py") if p.stem != "torch_private"
)


NUMBERS: Any = [1, 2, 3]  # a data set


# -- who uses what


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_members() -> set[str]:
    """Names with an underscore that objects of torch have, and some that torch gives them later."""
    layer = nn.Linear(2, 2)
    y = layer.weight * 2
    objects = (
        layer,
        layer.weight,
        y.grad_fn,
        torch.optim.AdamW(layer.parameters()),
        torch.UntypedStorage(1),
        torch.Generator(),
        iter(DataLoader(NUMBERS)),
        torch.profiler.profile(),
        torch.ops.aten.add.Tensor,
        torch.library.Library,
        torch.cuda.CUDAGraph,
        torch.cuda.Stream,
        torch.cuda.Event,
    )
    later = {"_orig_mod", "_is_replica", "_is_profiler_enabled", "_need_device_dtype_check_for_fused"}
    later |= {"_monitor_workers", "_pcontext"}  # of torchelastic's agents
    members = {name for found in objects for name in dir(found) if is_private(name)}
    return members | later | {"_step_supports_amp_scaling"}


MEMBERS = private_members()
PRIVATE = re.compile(r"(torch|triton)(\.\w+)*\._(?!_)\w+(\.\w+)*")


def chain(node: ast.expr) -> list[str]:
    """["torch", "cuda", "_sleep"] for torch.cuda._sleep; opens with "" where it is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def private_names(source: str) -> set[str]:
    """Private names of torch and Triton that a file uses: in full where they are reached from a module, else the member's name.

    A member of `self` counts unless the file defines one of this name; of anything else it always counts.
    """
    nodes = list(ast.walk(ast.parse(source)))
    bound: dict[str, str] = {}  # by an import: name -> module, or what was taken from it
    imported: set[str] = set()
    own: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {a.name for a in node.names}
            bound |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.ClassDef):
            own |= {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node)[0] == "self":
            own.add(node.attr)
    bound |= {name: name for name in ("torch", "triton")}
    bound = {name: of for name, of in bound.items() if of.partition(".")[0] in ("torch", "triton")}
    found = {name for name in (*imported, *bound.values()) if PRIVATE.fullmatch(name)}
    inside = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inside:
            first, *names = chain(node)
            if first in bound and any(map(is_private, names)):
                found.add(".".join((bound[first], *names)))
            elif first not in bound:
                found |= {name for name in names if name in MEMBERS and not (first == "self" and name in own)}
        elif isinstance(node, ast.Constant) and node.value.__class__ is str:
            text = str(node.value)
            found |= {text} if text in MEMBERS or PRIVATE.fullmatch(text) else set()
    return found


def listed() -> dict[str, set[str]]:
    """file -> names, as the module's docstring has them."""
    table: dict[str, set[str]] = {}
    file = ""
    for line in (torch_private.__doc__ or "").splitlines():
        if opening := re.match(r"    (\S+\.py): ", line):
            file = opening[1]
        elif line.startswith(" " * 8):
            table.setdefault(file, set()).update(line.strip().split(", "))
    return table


def test_private_names_of_torch_are_behind_the_module_or_listed_there():
    used = {str(p.relative_to(ROOT)): private_names(p.read_text(encoding="utf-8")) for p in SOURCES}
    assert {file: names for file, names in used.items() if names} == listed()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._foreach_add_(a, 1)", {"torch._foreach_add_"}),
        ("import torch._inductor.config", {"torch._inductor.config"}),
        ("from torch._compile import _disable_dynamo", {"torch._compile._disable_dynamo"}),
        ("from torch.utils import cpp_extension as c\nc._get(1)", {"torch.utils.cpp_extension._get"}),
        ("def f(t): return t.grad_fn, t._version", {"_version"}),
        ("for n in ('_forward_hooks', 'x'): getattr(m, n)", {"_forward_hooks"}),
        ("import sys\nsys.modules.get('torch._dynamo')", {"torch._dynamo"}),
        ("class A:\n def __init__(self): self._parameters = 1\n def f(self): return self._parameters", set()),
        ("class A:\n def f(self): return self._parameters", {"_parameters"}),
        ("import torch, sys\ntorch.add(sys._getframe(1), x._ours, torch.__version__)", set()),
    ],
)
def test_a_private_name_is_found(source: str, names: set[str]):
    assert private_names(source) == names


def test_all_that_is_offered_is_used():
    offered = {
        name
        for node in ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8")).body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [t.id for t in node.targets if isinstance(t, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    text = "\n".join(p.read_text(encoding="utf-8") for p in SOURCES)
    assert not {name for name in offered if not re.search(rf"\b{name}\b", text)}
    here = Path(__file__).read_text(encoding="utf-8")
    assert not {name for name in offered if f"torch_private.{name}" not in here}


# -- operations on lists


def test_operations_on_lists_do_to_each_what_torch_does_to_one():
    a, b = [torch.arange(3.0), torch.full((2, 2), 5.0)], [torch.full((3,), 2.0), torch.ones(2, 2)]
    first = [t.clone() for t in a]
    torch_private.foreach_add_(a, b)
    torch_private.foreach_add_(a, 1)
    torch_private.foreach_sub_(a, b)
    torch_private.foreach_div_(a, torch.tensor(2.0))
    for t, was in zip(a, first, strict=True):
        assert torch.equal(t, (was + 1) / 2)
    norms = torch_private.foreach_norm([t.bfloat16() for t in a], 2, dtype=torch.float32)
    assert [n.dtype for n in norms] == [torch.float32] * 2
    assert torch.allclose(torch.stack(norms), torch.stack([t.norm() for t in a]))
    narrow = [torch.empty_like(t, dtype=torch.bfloat16) for t in a]
    torch_private.foreach_copy_(narrow, a)  # of another dtype
    assert all(torch.equal(n, t.bfloat16()) for n, t in zip(narrow, a, strict=True))
    torch_private.foreach_zero_(a)
    assert not any(t.any() for t in a)


@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_the_fused_adamw_counts_scales_and_masks(masked: float):
    """Counts include this update, gradients are divided by grad_scale, and found_inf leaves everything as it was."""
    p = nn.Parameter(torch.linspace(-1, 1, 7))
    w, g = p.detach().clone(), torch.linspace(2, 4, 7)
    m, v, step = torch.zeros(7), torch.zeros(7), torch.ones(())
    plain = torch.optim.AdamW([p], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, foreach=False)
    if not masked:
        p.grad = g / 4
        plain.step()
    torch_private.fused_adamw_(
        [w],
        [g],
        [m],
        [v],
        [],
        [step],
        lr=0.1,
        beta1=0.8,
        beta2=0.9,
        weight_decay=0.3,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(4.0),
        found_inf=torch.tensor(masked),
    )
    torch.testing.assert_close(w, p.detach(), atol=1e-6, rtol=0)
    assert m.any() == v.any() == (not masked)


# -- tensors and their memory


def test_a_matrix_is_orthogonalized_as_torchs_muon_does_it():
    w = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    spread = torch.linalg.svdvals(torch_private.orthogonal(w, 5).float())
    assert torch.linalg.svdvals(w).max() > 3
    assert spread.min() > 0.5
    assert spread.max() < 1.5
    p = nn.Parameter(torch.zeros(6, 10))
    p.grad = w
    torch.optim.Muon([p], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    rate = torch_private.muon_rate(torch.tensor(1.0), "match_rms_adamw", p.shape)
    assert torch.allclose(p.detach(), -rate * torch_private.orthogonal(w, 5).float())
    assert torch_private.muon_rate(1.0, "original", (40, 10)) == 2


def test_a_version_counts_writes_that_autograd_sees():
    t = torch.zeros(4)
    view, detached, before = t[1:], t.detach(), torch_private.version_of(t)
    t.add_(1)
    assert torch_private.version_of(t) == before + 1
    view.zero_()  # views and detached tensors share the count
    assert (
        torch_private.version_of(t)
        == torch_private.version_of(view)
        == torch_private.version_of(detached)
        == before + 2
    )
    t.data.copy_(torch.ones(4))
    assert torch_private.version_of(t) == before + 2
    assert torch_private.version_of(t.clone()) == 0


def test_versions_of_frozen_parameters_only():
    frozen, trained = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
    frozen.fill_(1)
    assert torch_private.frozen_versions([frozen, trained]) == [1, None]


def test_tensors_in_one_memory_have_one_storage_id():
    t, other = torch.zeros(4), torch.zeros(4)
    views = (t[1:], t.view(2, 2), t.detach(), nn.Parameter(t))
    assert {torch_private.storage_id(v.untyped_storage()) for v in views} == {
        torch_private.storage_id(t.untyped_storage())
    }
    empty, also_empty = torch.empty(0), torch.empty(0)  # their addresses are both 0
    ids = [torch_private.storage_id(x.untyped_storage()) for x in (t, other, empty, also_empty)]
    assert len(set(ids)) == 4


def test_the_state_of_memory_tells_writes_and_exchanges():
    t = torch.zeros(4)
    state = torch_private.memory_states([t])
    assert torch_private.memory_states([t]) == state
    assert torch_private.memory_states([t[1:]]) != state
    t.add_(1)
    written = torch_private.memory_states([t])
    assert written != state
    t.data = torch.zeros(4)
    assert torch_private.memory_states([t]) != written


def test_the_base_of_a_view_of_a_view_is_the_first():
    t = torch.zeros(2, 3)
    assert torch_private.base_of(t) is t
    assert torch_private.base_of(t[1]) is t
    assert torch_private.base_of(t[1][1:]) is t
    p = nn.Parameter(t)
    assert torch_private.base_of(p.t()) is p


# -- modules


def test_a_modules_dictionaries_are_live_and_its_own():
    layer = nn.Linear(2, 2, bias=False)
    layer.register_buffer("table", None)
    layer.inner = nn.Linear(1, 1)
    parameters, children, buffers = (
        f(layer) for f in (torch_private.parameters_of, torch_private.children_of, torch_private.buffers_of)
    )
    assert list(parameters.items()) == [("weight", layer.weight), ("bias", None)]
    assert children == {"inner": layer.inner}
    assert buffers == {"table": None}
    layer.table = torch.zeros(1)
    layer.bias = nn.Parameter(torch.zeros(2))
    assert buffers["table"] is layer.table
    assert parameters["bias"] is layer.bias
    del parameters["bias"]
    assert not hasattr(layer, "bias")


REGISTER = {
    "forward": lambda m: m.register_forward_hook(lambda *a: None),
    "before forward": lambda m: m.register_forward_pre_hook(lambda *a: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *a: None),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda *a: None),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_of_any_kind_is_seen_while_it_is_there(kind: str):
    layer = nn.Linear(2, 2)
    hooks = torch_private.hooks_of(layer)
    assert not torch_private.is_hooked(layer)
    handle = REGISTER[kind](layer)
    assert torch_private.is_hooked(layer)
    assert torch_private.is_hooked(layer, but_forward_hooks=True) == (kind != "forward")
    assert [len(found) for found in hooks] == [int(kind == other) for other in REGISTER]
    assert bool(torch_private.forward_hooks(layer)) == (kind == "forward")
    assert bool(torch_private.forward_pre_hooks(layer)) == (kind == "before forward")
    handle.remove()
    assert not torch_private.is_hooked(layer)


def test_a_forward_of_an_objects_own_counts_and_hooks_of_all_modules_do_not():
    layer = nn.Linear(2, 2)
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    assert not torch_private.is_hooked(layer)
    handle.remove()
    vars(layer)["forward"] = lambda x: x
    assert torch_private.is_hooked(layer, but_forward_hooks=True)


def test_hooks_that_are_always_called_are_told_apart():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *a: None)
    assert not torch_private.always_called_hooks(layer)
    layer.register_forward_hook(lambda *a: None, always_call=True)
    assert torch_private.always_called_hooks(layer)


def test_forward_hooks_do_to_an_output_what_a_call_would():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    seen = []
    layer.register_forward_hook(lambda module, args, y: y * 2)
    layer.register_forward_hook(lambda module, args, kwargs, y: seen.append((module, args, kwargs)), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, y: y + args[0], prepend=True)
    finished = torch_private.through_forward_hooks(layer, x, layer.forward(x))
    assert torch.equal(finished, layer(x))
    assert seen[0] == seen[1] == (layer, (x,), {})


# -- parameters and optimizers


def test_hooks_of_a_parameter_by_hand_are_those_of_backward():
    seen: list[Tensor] = []
    p = nn.Parameter(torch.ones(2))
    assert torch_private.gradient_hooks(p) == torch_private.accumulated_hooks(p) == []
    p.register_hook(lambda grad: grad * 3)
    p.register_hook(lambda grad: None)
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (p * 2).sum().backward()
    grad = torch.full((2,), 2.0)
    for hook in torch_private.gradient_hooks(p):
        grad = grad if (new := hook(grad)) is None else new
    assert p.grad is not None
    assert torch.equal(grad, p.grad)
    for hook in torch_private.accumulated_hooks(p):
        hook(p)
    assert torch.equal(seen[0], seen[1])
    assert len(seen) == 2


def test_the_training_state_changes_with_hooks_and_freezing():
    p = nn.Parameter(torch.ones(2))
    states = [torch_private.training_state(p)]
    assert states == [(True, None, None)]
    p.register_hook(lambda grad: None)
    states.append(torch_private.training_state(p))
    p.register_post_accumulate_grad_hook(lambda p: None)
    states.append(torch_private.training_state(p))
    p.requires_grad_(False)
    states.append(torch_private.training_state(p))
    assert all(a != b for a, b in pairwise(states))


class Masked(torch.optim.SGD):
    """Notes what the scaler tells it."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, params, declares: bool) -> None:
        super().__init__(params, lr=0.1)
        self.told: list[tuple[float, float]] = []
        if declares:
            torch_private.declare_amp_scaling(self)

    def step(self, closure=None):
        if torch_private.handles_amp_scaling(self):
            self.told.append((float(self.grad_scale), float(self.found_inf)))


def test_a_scaler_tells_scale_and_mask_to_those_who_declare_it():
    p = nn.Parameter(torch.ones(2))
    optimizer, scaler = Masked([p], declares=True), torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        p.grad = None
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.told == [(8.0, 0.0), (8.0, 1.0)]
    assert not torch_private.handles_amp_scaling(Masked([p], declares=False))
    assert torch_private.handles_amp_scaling(torch.optim.AdamW([p], fused=True))
    assert not torch_private.handles_amp_scaling(torch.optim.AdamW([p]))


def test_hooks_around_a_step_are_seen():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        assert not torch_private.has_step_hooks(optimizer)
        handle = register(lambda *a: None)
        assert torch_private.has_step_hooks(optimizer)
        handle.remove()


# -- autograd


def test_each_backward_pass_has_a_number_of_its_own():
    numbers: list[int] = []

    def note(grad: Tensor) -> None:
        assert torch_private.in_backward()
        numbers.append(torch_private.backward_number())
        if len(numbers) == 2:  # one inside the other
            with torch.enable_grad():
                w = torch.ones(1, requires_grad=True)
                y = w * 2
                y.register_hook(note)
                y.backward()

    p = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = p * 2
        y.register_hook(note)
        y.backward()
        assert torch_private.backward_number() == -1
        assert not torch_private.in_backward()
    assert len(numbers) == len(set(numbers)) == 3
    assert min(numbers) >= 0


def test_a_callback_comes_after_the_whole_backward_pass():
    order: list[str] = []
    p = nn.Parameter(torch.ones(1))
    p.register_post_accumulate_grad_hook(lambda p: order.append("gradient is there"))
    y = p * 2
    y.register_hook(lambda grad: torch_private.call_after_backward(lambda: order.append("end")))
    y.backward()
    assert order == ["gradient is there", "end"]
    with pytest.raises(RuntimeError):
        torch_private.call_after_backward(lambda: None)


def test_transforms_are_seen():
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch_private.is_transformed())
        return (x * x).sum()

    x = torch.ones(2)
    f(x)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        f(x)
    f(x)
    assert seen == [False, True, True, True, False]


# -- the dispatcher


class Seen(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class SeenFunctions(torch.overrides.TorchFunctionMode):
    """Counts functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_and_can_be_left_out():
    assert torch_private.count_dispatch_modes() == 0
    t = torch.ones(2)
    with Seen() as operations, SeenFunctions() as functions:
        assert torch_private.count_dispatch_modes() == 1
        torch.add(t, t)
        before = operations.count, functions.count
        assert min(before) > 0
        with torch_private.without_modes():
            torch.add(t, t)
        assert (operations.count, functions.count) == before
        torch.add(t, t)
        assert operations.count > before[0]
    assert torch_private.count_dispatch_modes() == 0


def test_a_kernel_in_front_of_the_backends_sees_calls_and_passes_them_on():
    met: list[tuple[int, bool]] = []
    operator = torch.ops.aten.masked_select.default
    below = torch_private.keys_below_backend_select()

    def kernel(keyset, t, mask):
        met.append((t.numel(), t.requires_grad))
        return operator.redispatch(keyset & below, t, mask)

    x = torch.arange(4.0, requires_grad=True)
    with torch_private.in_front_of_backends({"masked_select": kernel}):
        y = torch.masked_select(x, x > 1)
        y.sum().backward()
    assert met
    assert y.tolist() == [2, 3]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1, 1]  # autograd stands above
    calls = len(met)
    torch.masked_select(x, x > 1)
    assert len(met) == calls


# -- subclasses of tensors


def test_a_wrapper_has_a_shape_and_no_memory_and_trees_are_mapped_by_kind():
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return func(
                *torch_private.tree_map_only(Wrapper, lambda t: torch.full(t.shape, 3.0), args), **(kwargs or {})
            )

    wrapper = torch_private.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float32, device=torch.device("cpu"))
    assert (type(wrapper), wrapper.shape, wrapper.dtype) == (Wrapper, (2, 3), torch.float32)
    assert torch.equal(wrapper + 1, torch.full((2, 3), 4.0))
    assert torch.equal(torch.cat([wrapper, wrapper]), torch.full((4, 3), 3.0))


# -- FSDP2


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Any]:
    """Two blocks in a model, each of which FSDP2 divides, among this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()) for _ in range(2)), nn.Linear(3, 2)
    )
    model[1].append(nn.Linear(3, 3, bias=False))
    model[1][2].weight = model[1][0].weight
    for block in model[:2]:
        fully_shard(block)
    yield fully_shard(model)
    dist.destroy_process_group()


def test_groups_of_shards_are_found_with_who_holds_them(sharded: Any):
    (root, root_reshards), (first, reshards), (second, _) = torch_private.shard_groups(sharded)
    assert (root_reshards, reshards) == (False, True)  # the outermost keeps its weights until backward
    assert [len(group.fsdp_params) for group in (root, first, second)] == [2, 1, 1]
    assert torch_private.holders_of(second.fsdp_params[0]) == [(sharded[1][0], "weight"), (sharded[1][2], "weight")]
    assert not torch_private.is_resharded_to_fewer(first)
    shard = first.fsdp_params[0]
    assert torch.equal(torch_private.padded_shard(shard), shard.sharded_param.to_local())
    sharded(torch.ones(1, 3))
    assert [reshards for _, reshards in torch_private.shard_groups(sharded)] == [False, True, True]
    sharded.set_reshard_after_forward(False)
    assert [reshards for _, reshards in torch_private.shard_groups(sharded)] == [False, False, False]


def test_a_gather_is_extended_and_stays_so_where_torch_takes_another_tensor(sharded: Any):
    group = torch_private.shard_groups(sharded)[1][0]
    shard, seen = group.fsdp_params[0], []

    class Doubled:
        def before(self, mesh: Any) -> Any:
            seen.append(torch_private.gathers_for(group))
            return (torch_private.padded_shard(shard) * 2,), None

        def after(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            return (outputs[0], ()) if out is None else None

    extension, x = Doubled(), torch.ones(1, 3)
    assert torch_private.extension_of(shard) is None
    torch_private.extend_gather(shard, extension.before, extension.after)
    state = {name: torch.full_like(t, 0.5) for name, t in sharded.state_dict().items()}
    sharded.to_empty(device="cpu")
    sharded.load_state_dict(state, assign=True)
    assert torch_private.extension_of(shard) is extension
    y = sharded(x)
    assert y.tolist() == [[10.625] * 2]  # 3 behind the first block, twice what it would be
    assert seen == ["forward"]
    y.sum().backward()
    assert seen == ["forward", "backward"]
    sharded[0].unshard()
    assert seen == ["forward", "backward", ""]
    assert not vars(shard.sharded_param.to_local()).keys() - {
        "_is_param"
    }  # whoever copies or saves the parameter gets no more


# -- profiler, compiler, data loader


def test_a_constant_of_a_graph_is_marked_as_torch_marks_it():
    def answer() -> int:
        return 3

    def other() -> int:
        return 3

    marked: Any = torch.compiler.assume_constant_result(other)
    assert torch_private.constant_when_compiled(answer) is answer
    assert vars(answer) == vars(marked) != {}


def test_a_module_that_is_compiled_says_so():
    plain, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    assert [torch_private.is_compiled(module) for module in (plain, compiled, wrapped)] == [False, True, True]


def test_a_profiler_is_seen_from_its_thread_and_from_others():
    def look() -> tuple[bool, bool]:
        return torch_private.profiler_runs(), torch_private.profiler_runs_anywhere()

    there: list[tuple[bool, bool]] = []
    assert look() == (False, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert look() == (True, True)
        thread = threading.Thread(target=lambda: there.append(look()))
        thread.start()
        thread.join()
    assert there == [(False, True)]
    assert look() == (False, False)


def test_a_quick_range_is_one_event_of_its_name():
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profiler,
        torch_private.quick_range("a range"),
    ):
        torch.ones(1)
    assert profiler.profiler is not None
    found = {e.name(): e for e in profiler.profiler.kineto_results.events()}
    assert found["a range"].start_ns() <= found["aten::ones"].start_ns() < found["a range"].end_ns()
    assert [e.name() for e in profiler.profiler.kineto_results.events()].count("a range") == 1


def test_what_is_not_compiled_is_called_as_it_is():
    traced: list[bool] = []

    @torch_private.not_compiled
    def inner(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x + 1

    @torch.compile(backend="eager")
    def outer(x: Tensor) -> Tensor:
        return inner(x * 2) * 3

    assert outer(torch.ones(1)).item() == 9
    assert traced == [False]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_of_data_loaders_are_of_one_class_whose_next_gives_batches(workers: int, monkeypatch):
    kind = torch_private.DataLoaderIterator
    give = kind.__next__
    given: list[Any] = []

    def noted(iterator: Any) -> Any:
        given.append(iterator)
        return give(iterator)

    monkeypatch.setattr(kind, "__next__", noted)
    iterator = iter(DataLoader(NUMBERS, num_workers=workers))
    assert isinstance(iterator, kind)
    assert [int(batch) for batch in iterator] == [1, 2, 3]
    assert len(given) == 4


def test_the_names_of_one_file_are_there():
    """Those that are reached from a module; members are tried where they are used."""
    for names in listed().values():
        for name in (n for n in names if n.startswith("torch.") and "cuda_" not in n):
            first, *rest = name.split(".")
            found = importlib.import_module(first)
            for at, part in enumerate(rest, 2):
                found = getattr(found, part, None) or importlib.import_module(".".join(name.split(".")[:at]))
            assert found is not None
