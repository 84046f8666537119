"""Count the FLOPs and bytes of operators from the names and shapes that a profiler records.

Products count 2 FLOPs a multiply-add, as torch's FlopCounterMode counts them: attention over every key, masked or not, and
its fused backward with the scores that it computes again. Norms, activations and other elementwise work count none. Bytes
are what an operator reads and writes of its tensors, each once: caches and strides are not known here. Views and
allocations are free.

Operators call operators (`linear` an `addmm`, `clone` a `copy_`), and each recorded call is looked at on its own. The work
of one is what its own arguments ask for or what the calls inside it do, whichever is more, so that nothing counts twice and
no work that a library does without operators is lost.

torch itself says which argument is written and what shape a result has: its schemas, and its kernels for meta tensors.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from surokit.profiler.analysis.timeline import Kind, Timeline
from surokit.profiler.record.recording import RATES, Shaped
from surokit.torch_private import without_modes

Shape = tuple[int, ...]
Inputs = tuple[Sequence[Any], Sequence[str], Sequence[Any]]  # shapes, dtypes and values of one operator's arguments

#: A profiler's names of dtypes, which are C++'s.
_DTYPES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64,
    "long": torch.int64,
    "long long": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "short": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    **{
        f"c10::{name}": getattr(torch, name.lower())
        for name in (
            "Float8_e4m3fn",
            "Float8_e5m2",
            "Float8_e4m3fnuz",
            "Float8_e5m2fnuz",
            "Float8_e8m0fnu",
            "Float4_e2m1fn_x2",
        )
        if hasattr(torch, name.lower())
    },
}
_LIST = "TensorList"
_UNKNOWN = ("", "GenericList")  # nothing, or what a profiler does not look into
_PACKED = "c10::Float4_e2m1fn_x2"  # two numbers an element
_RATE_OF = {
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp32",
    torch.int8: "fp8",
    **{d: "fp8" for name, d in _DTYPES.items() if "Float8" in name},
    **({_DTYPES[_PACKED]: "fp4"} if _PACKED in _DTYPES else {}),
}
_NODE = "autograd::engine::evaluate_function"
_KEEP_THEIR_OPERANDS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")}
_OPERATOR = re.compile(r"\w+::\w+")
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")  # bound by links, not by memory
#: Neither read nor write what they are given, though no alias of their schema says so.
_FREE = re.compile(r"(new_)?empty|resize|set_|alias|detach|lift|_unsafe_view|_reshape_alias|as_strided|record_stream")
_OVERWRITES = re.compile(r"(copy|fill|zero|normal|uniform|random|bernoulli|exponential|log_normal|geometric|cauchy)_")
_LIKE = re.compile(r"new_\w+|\w+_like")  # their argument is a pattern
#: Arguments of which only chosen elements are read: as many as are written.
_PICKED = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0, "take": 0}
#: Arguments of which nothing to speak of is read.
_UNREAD = {"nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1, "nll_loss2d_backward": 1}
#: Writes into chosen places of their first argument: the position of what is written there.
_INTO = {"index_add_": 3, "index_copy_": 3, "scatter_": 3, "scatter_add_": 3, "index_put_": 2, "_index_put_impl_": 2}


class _Tensor(NamedTuple):
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


Argument = _Tensor | tuple[_Tensor, ...] | None  # None: no tensor


class OperatorWork(NamedTuple):
    """An OperatorWork holds FLOPs, bytes, and the index into RATES of the format that multiplies, -1 for no product."""

    flop: int = 0
    bytes: int = 0
    rate: int = -1


def operator_work(name: str, shapes: Sequence[Any], dtypes: Sequence[str], concrete: Sequence[Any]) -> OperatorWork:
    """Return (FLOPs, bytes, index into RATES or -1) of one recorded operator, without the operators that it calls.

    `shapes` and `dtypes` are its arguments' as torch's profiler records them (a list of tensors has a list of shapes, and
    counts as float32), `concrete` the values of arguments that are numbers. An operator that is not known counts nothing.
    """
    with _unseen():
        return _work(name, _arguments(shapes, dtypes, {}), tuple(dtypes), concrete)


def inputs_of(event: Any) -> Inputs:
    """Return (shapes, dtypes, values) of a profiler's event; for a list of tensors the shape of each, where torch has it."""
    shapes = getattr(event, "structured_input_shapes", event.shapes)()
    return shapes, event.dtypes(), event.concrete_inputs()


def shaped_step(events: Timeline, inputs: Sequence[Inputs]) -> Shaped:
    """Count the work of each event of one step. `inputs` has one entry for each event, in the Timeline's order; events that
    are no operators have empty ones. Raises ValueError where the numbers differ."""
    if len(inputs) != len(events):
        raise ValueError(
            f"{len(inputs)} inputs were given for {len(events)} events: give one each, empty for no operator."
        )
    known: dict[str, tuple[OperatorWork, dict[Shape, str], bool]] = {}
    dtype_of: dict[Shape, str] = {}  # of the last tensor of a shape: what a list's tensors are most likely of
    names = [events.names[i] for i in events.name_E.tolist()]
    own: list[OperatorWork] = []
    causal_E = np.zeros(len(names), bool)
    with _unseen():
        operators = events.is_kind(Kind.OP).tolist()
        for i, (name, operator, (shapes, dtypes, concrete)) in enumerate(zip(names, operators, inputs)):
            if not operator or not len(shapes):
                own.append(OperatorWork())
                continue
            key = f"{name}{shapes}{dtypes}{concrete}"
            if key not in known or _LIST in dtypes:
                arguments = _arguments(shapes, dtypes, dtype_of)
                work = _work(name, arguments, tuple(dtypes), concrete)
                taken = {a.shape: a.dtype for a in arguments if isinstance(a, _Tensor)}
                known[key] = work, taken, work.flop > 0 and _is_causal(name, tuple(dtypes), concrete)
            work, taken, causal_E[i] = known[key]
            dtype_of.update(taken)
            own.append(work)
    parents = _parents(events)
    for i in _stopped(events, names, parents):
        own[i] = OperatorWork()
    settled = _settled(own, parents)
    flop_E, bytes_E, rate_E = (np.array([work[i] for work in settled], np.int64) for i in range(3))
    return Shaped(events, flop_E, bytes_E, rate_E, skipped_E=np.where(causal_E, flop_E // 2, 0))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the calls on meta tensors from the caller's modes, such as a counter of FLOPs, and drop their warnings."""
    with without_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _stopped(events: Timeline, names: list[str], parents: list[int]) -> list[int]:
    """Find the products that a checkpoint began and did not run, with the calls that hold them. torch recomputes what a
    backward node needs inside that node, and stops at the last tensor wanted: one that a product saves before it
    multiplies. So it is the last call in the node that autograd numbered; the detach of what it saves tells it from a graph
    of gradients."""
    node, last = [-1] * len(names), dict[int, int]()
    for i, (parent, number) in enumerate(zip(parents, events.sequence_E.tolist())):
        if parent >= 0:
            node[i] = parent if names[parent].startswith(_NODE) else node[parent]
        if names[i].startswith(_NODE):
            last[node[i]] = -1  # whole: a node that runs others has formed everything it needs
        elif node[i] >= 0 and number >= 0 and "::" in names[i] and last.get(node[i]) != -1:
            last[node[i]] = i
    keeping = {parent for parent, name in zip(parents, names) if name == "aten::detach"}
    found = []
    for of_node, i in last.items():
        if i in keeping and names[i] in _KEEP_THEIR_OPERANDS:
            while i not in (-1, of_node):
                found.append(i)
                i = parents[i]
    return found


def _settled(own: list[OperatorWork], parents: list[int]) -> list[OperatorWork]:
    """Count each piece of work once: a call keeps its own work where that is more than the calls inside it do, which then
    lose theirs; otherwise the call loses its own and they keep theirs."""
    below_flop, below_bytes = [0] * len(own), [0] * len(own)
    keeps = [False] * len(own)
    for i in range(len(own) - 1, -1, -1):  # children come after their parents
        flop, nbytes = own[i].flop, own[i].bytes
        keeps[i] = flop > below_flop[i] or (nbytes > below_bytes[i] and not below_flop[i])
        if not keeps[i]:
            flop, nbytes = below_flop[i], below_bytes[i]
        if (parent := parents[i]) >= 0:
            below_flop[parent] += flop
            below_bytes[parent] += nbytes
    settled = []
    inside = [False] * len(own)  # one that keeps its work
    for i, parent in enumerate(parents):
        inside[i] = parent >= 0 and (inside[parent] or keeps[parent])
        settled.append(own[i] if keeps[i] and not inside[i] else OperatorWork())
    return settled


def _parents(events: Timeline) -> list[int]:
    """Return the index of the operator that each operator runs in, -1 outside all."""
    parents, stacks = [], dict[int, list[int]]()
    ends = events.end_E.tolist()
    operator = events.is_kind(Kind.OP).tolist()
    for i, (start, end, thread) in enumerate(zip(events.start_E.tolist(), ends, events.thread_E.tolist())):
        stack = stacks.setdefault(thread, [])
        while stack and (ends[stack[-1]] <= start or ends[stack[-1]] < end):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        if operator[i]:
            stack.append(i)
    return parents


# ---------------------------------------------------------------------------------------------------------------- one call


def _arguments(shapes: Sequence[Any], dtypes: Sequence[str], dtype_of: dict[Shape, str]) -> tuple[Argument, ...]:
    def argument(shape: Sequence[Any], dtype: str) -> Argument:
        if dtype == _LIST:
            return tuple(_Tensor(tuple(s), dtype_of.get(tuple(s), "float")) for s in shape)
        return _Tensor(tuple(shape), dtype) if dtype in _DTYPES else None

    return tuple(map(argument, shapes, dtypes))


def _work(name: str, arguments: tuple[Argument, ...], dtypes: tuple[str, ...], concrete: Sequence[Any]) -> OperatorWork:
    if name.startswith("triton_"):  # a generated kernel reads or writes each of its tensors
        return OperatorWork(bytes=sum(t.nbytes for a in arguments for t in _tensors(a)))
    operator = _overload(name, dtypes)
    if operator is None:
        return OperatorWork()
    flop, rate = _flop(operator, name.partition("::")[2], arguments, concrete)
    return OperatorWork(flop, _bytes(operator, name.partition("::")[2], arguments, concrete), rate)


@cache
def _overload(name: str, dtypes: tuple[str, ...]) -> torch._ops.OpOverload | None:
    """Return torch's operator of this name that takes such arguments; None where there is none."""
    namespace, _, operator = name.partition("::")
    if not _OPERATOR.fullmatch(name) or namespace in _COMMUNICATION:
        return None
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
        found: torch._ops.OpOverload = getattr(packet, overload)
        taken = found._schema.arguments
        if len(taken) == len(dtypes) and all(_takes(str(a.type), dtype) for a, dtype in zip(taken, dtypes)):
            return found
    return None


def _is_causal(name: str, dtypes: tuple[str, ...], concrete: Sequence[Any]) -> bool:
    """Return whether the operator is attention in which a query sees no later key."""
    operator = _overload(name, dtypes)
    taken = () if operator is None else operator._schema.arguments
    return any(a.name in ("is_causal", "custom_mask_type") and bool(value) for a, value in zip(taken, concrete))


def _takes(declared: str, dtype: str) -> bool:
    if dtype in _DTYPES:
        return declared in ("Tensor", "Optional[Tensor]")
    if dtype == _LIST:
        return "List[Tensor]" in declared
    return dtype in _UNKNOWN or "Tensor" not in declared


def _tensors(argument: Argument) -> tuple[_Tensor, ...]:
    return () if argument is None else (argument,) if isinstance(argument, _Tensor) else argument


def _bytes(operator: torch._ops.OpOverload, name: str, arguments: tuple[Argument, ...], concrete: Sequence[Any]) -> int:
    """Return the bytes that one call reads and writes. One that is made of other calls (torch: implicitly composite) moves
    nothing itself."""
    schema = operator._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if views or _FREE.match(name) or _is_composite(operator):
        return 0
    sizes = [sum(t.nbytes for t in _tensors(a)) for a in arguments]
    if name in _INTO:
        return sum(sizes[1:]) + 2 * sizes[_INTO[name]]
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    if any(written):
        fresh = _OVERWRITES.fullmatch(name) is not None
        read = sum(s for a, s, w in zip(schema.arguments, sizes, written) if not (w and (fresh or a.is_out)))
        return read + sum(s for s, w in zip(sizes, written) if w)
    out = sum(t.nbytes for t in _leaves(_result(operator, arguments, concrete)))
    if name in _PICKED:
        sizes[_PICKED[name]] = out
    elif name in _UNREAD or _LIKE.fullmatch(name):
        sizes[_UNREAD.get(name, 0)] = 0
    return sum(sizes) + out


@cache
def _is_composite(operator: torch._ops.OpOverload) -> bool:
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _result(operator: torch._ops.OpOverload, arguments: tuple[Argument, ...], concrete: Sequence[Any]) -> Any:
    """Return the results of the call as meta tensors; None where they depend on data or on something that was not recorded,
    or where a custom operator has no meta kernel and would really run."""
    given, named = [], {}
    if operator.namespace != "aten" and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        return None
    try:
        for declared, a, value in zip(operator._schema.arguments, arguments, concrete, strict=True):
            made = _meta(a) if a is not None else value
            if declared.name == "mat2" and "_scaled" in operator.__name__:
                made = made.mT.contiguous().mT  # float8's second operand lies by columns
            if declared.kwarg_only:
                named[declared.name] = made
            else:
                given.append(made)
        if not any(a is not None for a in arguments):
            return None  # it would really allocate
        return operator(*given, **named)
    except Exception:  # whatever a kernel without data cannot do, the call is measured by what it reads
        return None


def _meta(argument: Argument) -> Any:
    if isinstance(argument, _Tensor):
        return torch.empty(argument.shape, dtype=_DTYPES[argument.dtype], device="meta")
    return [_meta(t) for t in argument or ()]


def _leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in _leaves(part)] if isinstance(result, tuple | list) else []


# ---------------------------------------------------------------------------------------------------------------- products


def _flop(
    operator: torch._ops.OpOverload, name: str, arguments: tuple[Argument, ...], concrete: Sequence[Any]
) -> tuple[int, int]:
    """Return (FLOPs, index into RATES) of one call, (0, -1) for no product. An operator that is not in the table below
    counts by the formula that is registered with torch for it."""
    if name in _FORMULAS:
        operand, formula = _FORMULAS[name]
        shapes = [a.shape if isinstance(a, _Tensor) else None for a in arguments]
        try:
            flop = formula(shapes, concrete)
        except (TypeError, IndexError, ValueError):  # not recorded, or a form of the call that the table does not know
            return 0, -1
        x = arguments[operand]
    elif (registered := flop_registry.get(operator.overloadpacket)) is not None:
        given = [value if a is None else _meta(a) for a, value in zip(arguments, concrete)]
        try:
            flop = int(registered(*given, out_val=_result(operator, arguments, concrete)))
        except Exception:  # a formula of somebody else, on arguments that are not all known
            return 0, -1
        x = next((a for a in arguments if isinstance(a, _Tensor)), None)
    else:
        return 0, -1
    if not isinstance(x, _Tensor) or not flop:
        return 0, -1
    packed = 2 if x.dtype == _PACKED else 1
    rate = _RATE_OF.get(_DTYPES[x.dtype])
    return flop * packed, -1 if rate is None else RATES.index(rate)


Shapes = Sequence[Any]  # of the arguments, None for what is no tensor
Formula = Callable[[Shapes, Sequence[Any]], int]


def _matrices(a: int, b: int) -> tuple[int, Formula]:
    """Count [..., m, k] @ [..., k, n] at these positions; a vector has n = 1."""
    return a, lambda s, _: 2 * prod(s[a]) * (s[b][-1] if len(s[b]) > 1 else 1)


def _linear(s: Shapes, _: Sequence[Any]) -> int:
    return 2 * prod(s[0]) * (s[1][0] if len(s[1]) > 1 else 1)


def _grouped(s: Shapes, _: Sequence[Any]) -> int:
    """Count a grouped product: each row (or column) of the flat operand meets one of the stacked matrices."""
    a, b = s[0], s[1]
    return 2 * prod(a[-2:]) * b[-1] if len(a) > len(b) else 2 * prod(a) * b[-1]


def _stored(numbers_an_element: int) -> tuple[int, Formula]:
    """Count x [T, K] with a weight kept as codes: every number of it meets every row."""
    return 0, lambda s, _: 2 * prod(s[0][:-1]) * prod(s[1]) * numbers_an_element


def _attention(
    heads: int, lengths: int | None = None, longest: int = -1, *, backward: bool = False
) -> tuple[int, Formula]:
    """Count attention's two products, or the five of its gradients: the scores again, those of the scores and values, those
    of queries and keys. q, k and v stand first, behind the gradient in the backward; `heads` is their dimension of heads.
    Where `lengths` is given the sequences lie one after another, and each query is taken to see as many keys as the longest
    has."""
    first, of_keys, of_values = (1, 3, 2) if backward else (0, 1, 1)

    def formula(s: Shapes, concrete: Sequence[Any]) -> int:
        q, k, v = s[first : first + 3]
        packed = lengths is not None and s[lengths] is not None
        keys = int(concrete[longest]) if packed else k[3 - heads]
        return 2 * prod(q[:-1]) * keys * (of_keys * q[-1] + of_values * v[-1])

    return first, formula


def _convolved(s: Shapes, concrete: Sequence[Any]) -> int:
    """Count a convolution: every weight meets every place of the output, of the input for a transposed one."""
    x, w, transposed = s[0], s[1], concrete[6]
    if transposed:
        return 2 * x[0] * prod(x[2:]) * prod(w)
    per_dimension = (_each(concrete[i], len(w) - 2) for i in (3, 4, 5))
    places = prod(
        (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
        for size, width, stride, padding, dilation in zip(x[2:], w[2:], *per_dimension)
    )
    return 2 * x[0] * places * prod(w)


def _each(values: Sequence[int], dimensions: int) -> Sequence[int]:
    return values if len(values) == dimensions else [values[0]] * dimensions


def _convolved_backward(s: Shapes, concrete: Sequence[Any]) -> int:
    """Count the gradients of input and weight, each as much as the forward pass; only those that `output_mask` asks for."""
    gradient, x, w = s[0], s[1], s[2]
    places = prod((x if concrete[7] else gradient)[2:])
    return 2 * x[0] * places * prod(w) * sum(map(bool, concrete[10][:2]))


#: The operators that multiply: the position of an operand, whose dtype names the rate, and FLOPs from shapes and values.
_FORMULAS: dict[str, tuple[int, Formula]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _matrices(0, 1)),
    **dict.fromkeys(("addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "addbmm"), _matrices(1, 2)),
    **dict.fromkeys(("linear", "mkldnn_linear"), (0, _linear)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), (0, _grouped)),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), (0, _convolved)),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), (0, _convolved_backward)),
    **{
        f"_scaled_dot_product_{kind}{direction}": _attention(heads=1, backward=direction != "")
        for kind in (
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "flash_attention_for_cpu",
            "fused_attention_overrideable",
        )
        for direction in ("", "_backward")
    },
    "_flash_attention_forward": _attention(heads=2, lengths=3, longest=6),
    "_flash_attention_backward": _attention(heads=2, lengths=6, longest=9, backward=True),
    "_efficient_attention_forward": _attention(heads=2, lengths=4, longest=7),
    "_efficient_attention_backward": _attention(heads=2, lengths=6, longest=9, backward=True),
    "emulated_mm": (0, lambda s, _: 2 * prod(s[0]) * s[2][0]),
    "fp8_mm": _stored(1),
    "nv_mm": _stored(2),
    "nf4_mm": _stored(2),
}
