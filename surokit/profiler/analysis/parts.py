"""Sum the time of a step by the parts of a decoder: linear layers by their role, norms, attention, rotation, gate, head, loss,
optimizer.

A part is found from the module that asked for the work, and inside of a module that computes several from the operator: the own
work of an attention module is attention, or else the rotation of queries and keys with what reshapes them; that of an MLP is its
gate; that of a decoder layer its residual sums. A stage that computes a norm or a gate with the layers that read it is divided in
its products and the rest. Where a loss computes the head's product, products are the head.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from surokit.profiler.analysis import timeline as tl
from surokit.profiler.analysis.attribution import pick
from surokit.profiler.analysis.modules import Modules
from surokit.profiler.analysis.owners import (
    CLIP,
    COMMUNICATION,
    COPIES,
    DATA,
    GRAPH,
    LOSS,
    OPTIMIZER,
    OUTSIDE,
    PSEUDO,
)
from surokit.profiler.analysis.roles import Observed, Table, ms, table
from surokit.profiler.analysis.timeline import Int
from surokit.profiler.record.recording import Recording

EMBEDDING, HEAD, NORM, GATE, ROTATION = "embedding", "lm_head", "RMSNorm", "SiLU and gate", "RoPE and reshaping"
ATTENTION, RESIDUAL, FUSED, FUSED_REST = "attention", "residual sum", "Linear, fused", "norm and gate, fused"
LOSS_PART, CLIP_PART, OPTIMIZER_PART, COMMUNICATION_PART = "loss", "gradient clipping", "optimizer", "communication"
ROUTER, OTHER_LINEAR, OTHER = "router", "Linear, other", "other"
#: The name of a linear layer in a decoder -> its role in the table.
LINEARS = {
    **{f"{role}_proj": f"Linear {role}" for role in ("q", "k", "v", "o", "gate", "up", "down")},
    **{"out_proj": "Linear o", "qkv_proj": "Linear q k v", "query_key_value": "Linear q k v", "c_attn": "Linear q k v"},
    **{"gate_up_proj": "Linear gate up", "fc1": "Linear up", "fc2": "Linear down", "c_fc": "Linear up"},
}
#: Every part, in the order of a step.
ORDER = (
    *(EMBEDDING, NORM),
    *dict.fromkeys(LINEARS.values()),
    *(OTHER_LINEAR, FUSED, FUSED_REST, ROTATION, ATTENTION, GATE, ROUTER, RESIDUAL, HEAD, LOSS_PART),
    *(CLIP_PART, OPTIMIZER_PART, COMMUNICATION_PART, "data", "copies", "CUDA graph", OTHER),
)
#: What lies in decoder layers.
IN_LAYERS = frozenset(ORDER[1 : ORDER.index(HEAD)])
_PSEUDO = {
    LOSS: LOSS_PART,
    CLIP: CLIP_PART,
    OPTIMIZER: OPTIMIZER_PART,
    DATA: "data",
    COMMUNICATION: COMMUNICATION_PART,
    COPIES: "copies",
    GRAPH: "CUDA graph",
}
_PRODUCT = re.compile(r"::(\w*_)?(mm|addmm|matmul|linear|bmm|einsum)(_\w+)?$|::mm_|_mm$", re.IGNORECASE)
#: A GPU's kernels that multiply matrices: of cuBLAS, CUTLASS and those that are like them.
PRODUCT_KERNELS = re.compile(r"gemm|cutlass|nvjet|xmma|wgmma|cublas", re.IGNORECASE)
_ATTENTION = re.compile(
    r"attention|attn|softmax|fmha|flash|::bmm|::baddbmm|bmmbackward|sdpa|::masked_fill", re.IGNORECASE
)
_SINGLE = re.compile(r"RMSNorm|LayerNorm|Norm$")


def parts_table(recording: Recording, named_by: Recording | None = None) -> Table:
    """Build the table `parts`: part, activities, forward_ms, backward_ms, idle_ms, ms. What backward computes again is backward.

    forward_ms and backward_ms sum to busy, idle_ms to idle and ms, their sum, to the wall time: idle time is in the row of the
    module that the host was in, or of communication while that goes on, and on a GPU of the module whose work ends it.
    """
    o = Observed(recording)
    modules = Modules(o, named_by)
    names, top_A = modules.outermost()
    busy = np.stack([modules.owner_A, o.active.name_E, top_A, modules.backward_A.astype(np.int64)])
    owner_P, ns_P = _idle(modules)
    nameless = np.full(len(owner_P), -1, np.int64)
    idle = np.stack([owner_P, nameless, nameless, np.full(len(owner_P), _IDLE)])
    keys, inverse = np.unique(np.concatenate((busy, idle), axis=1), axis=1, return_inverse=True)
    own, count = np.zeros((2, keys.shape[1]), np.int64)
    np.add.at(own, inverse.ravel(), np.concatenate((o.own_A, ns_P)))
    np.add.at(count, inverse.ravel(), np.concatenate((o.asked_in_steps(), np.zeros(len(owner_P), bool))))
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for (owner, name, top, column), ns, calls in zip(keys.T.tolist(), own.tolist(), count.tolist()):
        if ns or calls:
            path, kind = modules.modules[owner] if owner >= 0 else (PSEUDO[-1 - owner], "")
            operator, outermost = (names[i] if i >= 0 else "" for i in (name, top))
            part = _PSEUDO.get(owner) or part_of(path, kind, operator, outermost)
            sums[part][column] += ns
            sums[part][3] += calls
    rows = []
    for part in ORDER:
        if part in sums:
            *times, calls = sums[part]
            rows.append((part, calls / o.steps, *(ms(ns) / o.steps for ns in (*times, sum(times)))))
    return table("part activities forward_ms backward_ms idle_ms ms", rows)


_IDLE = 2  # the column after forward and backward


def _idle(modules: Modules) -> tuple[Int, Int]:
    """Return the owners of idle time in pieces P, and their nanoseconds."""
    o = modules.o
    if o.on_gpu:
        follows = np.where(o.next_G >= 0, pick(modules.owner_A, o.next_G), OUTSIDE)
        return follows, o.end_G - o.start_G
    talk = o.communication()
    begin, end = tl.cut((o.start_G, o.end_G), (o.r.start_S, o.r.end_S), talk)
    inside = tl.covered(o.start_G, o.end_G, begin, end) > 0
    begin, end = begin[inside], end[inside]
    owner, _ = modules.owners.at(np.full(len(begin), o.r.thread, np.int64), (begin + end) // 2)
    return np.where(tl.covered(*talk, begin, end) > 0, COMMUNICATION, owner), end - begin


def _is_product(operator: str) -> bool:
    return bool(_PRODUCT.search(operator) or PRODUCT_KERNELS.search(operator))


def part_of(path: str, kind: str, operator: str, outermost: str) -> str:
    """Return the part that an operator belongs to. path, kind: of the module that asked for it, kind being its class; outermost:
    the operator, or autograd's node, in which it ran."""
    names = path.split(".")
    leaf, lower = names[-1], kind.lower()
    role = next((LINEARS[name] for name in reversed(names) if name in LINEARS), None)
    if role is not None:  # an adapter's layers lie below the layer's own name
        return role
    if "embedding" in lower and "rotary" not in lower:
        return EMBEDDING
    if "rotary" in lower:
        return ROTATION
    if "lm_head" in names or (path == kind and "linear" in lower):  # a layer that is called by itself, as in generation
        return HEAD
    if _SINGLE.search(kind):
        return NORM
    if leaf in ("act_fn", "act") or kind in ("SiLU", "SiLUActivation", "GELU", "GELUActivation"):
        return GATE
    if "_Stage" in outermost and not _ATTENTION.search(operator):
        return FUSED if _is_product(operator) else GATE if "silu" in operator else FUSED_REST
    if "attention" in lower or "attn" in lower:
        is_own = _is_product(operator) or _ATTENTION.search(operator) or _ATTENTION.search(outermost)
        return ATTENTION if is_own or not operator else ROTATION
    if "CrossEntropy" in outermost or "loss" in outermost.lower():
        return HEAD if _is_product(operator) else LOSS_PART
    if leaf == "gate" or "router" in lower:
        return ROUTER
    if "expert" in lower:
        return OTHER_LINEAR if _is_product(operator) else GATE
    if "mlp" in lower or "feedforward" in lower:
        return GATE
    if kind.endswith(("Block", "DecoderLayer")):
        return RESIDUAL
    return OTHER_LINEAR if "linear" in lower else OTHER


__all__ = ["IN_LAYERS", "LINEARS", "ORDER", "PRODUCT_KERNELS", "part_of", "parts_table"]
