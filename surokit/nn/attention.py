"""Compute attention by torch's kernels: the fastest one that is right for what is asked; documents may be packed into rows.

- bfloat16 on a CPU: torch's forward with a gradient of our own (kernels/reference/attention.py), because torch's is slow. With
  a mask the gradient is torch's, in float32 on processors without bfloat16 instructions. Ours is off
  where torch.backends.cuda.enable_flash_sdp(False) turned torch's off.
- Half precision on Hopper and data-center Blackwell: cuDNN's kernel, called by name rather than through a priority that is
  global to the process. torch's own switches (`torch.backends.cuda.enable_cudnn_sdp`, `torch.nn.attention.sdpa_kernel`)
  turn it off.
- Packed documents in half precision on CUDA: torch's varlen_attn, which never looks outside a document.
- Everything else: scaled_dot_product_attention as torch chooses.

Nothing here waits for the device, so all of it can be captured as a CUDA graph.

B batch, H query heads, G key heads (H a multiple of G), T query tokens, S key tokens, D head width, M documents a row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surokit import kernels
from surokit.kernels.reference import attention as reference
from surokit.torch_private import constant_when_compiled, is_transformed

_HALF = (torch.bfloat16, torch.float16)
_CUDNN_ANY_LENGTH = 91501  # before it, rows that are no multiple of 128 are read past their end (pytorch issue 169849)


@dataclass(frozen=True)
class Documents:
    """A Documents asks for causal attention within the documents of packed rows, for `attention(mask=...)`.

    ends: int32 [B M + 1], the cumulative lengths of all documents, rows one after the other. Empty ones keep the shape static;
        the kernel starts blocks for them too, so M is best no greater than the data's own largest number.
    length: T, an upper bound of a document's length.
    window: keys that a query sees, itself among them; None for all that its document has up to it.
    """

    ends: Tensor
    length: int
    window: int | None = None

    @classmethod
    def of(cls, starts_BM: Tensor, length: int, window: int | None = None) -> Documents:
        """Make a Documents from first tokens of documents: integers [B, M], ascending in a row, the first one 0, padded with T."""
        B = starts_BM.shape[0]
        row_B = torch.arange(0, B * length, length, device=starts_BM.device, dtype=torch.int32)
        starts = (starts_BM.int() + row_B.unsqueeze(1)).flatten()
        return cls(F.pad(starts, (0, 1), value=B * length), length, window)


def attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    causal: bool = True,
    mask: Tensor | Documents | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax(scale q k' + mask) v, [B, H, T, D]; scale is 1/sqrt(D) unless given, softmax in float32.

    `mask` is a boolean tensor that broadcasts to [B, H, T, S], True where a query sees a key, or `Documents`; it replaces
    `causal`. Causal wants T = S. Query heads h*H/G.. share key head h. Documents want CUDA tensors in bfloat16 or float16:
    `visibility` gives the right one of the two.
    """
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(mask, Documents):
        return _within_documents(q_BHTD, k_BGTD, v_BGTD, mask, scale)
    if q_BHTD.shape[2] == 1 and _folds(q_BHTD, k_BGTD, mask):
        q_BGHD = q_BHTD.reshape(*k_BGTD.shape[:2], -1, q_BHTD.shape[-1])  # heads of one key head, as if its queries
        return attention(q_BGHD, k_BGTD, v_BGTD, causal=False, mask=mask, scale=scale).reshape(q_BHTD.shape)
    if causal and mask is None and q_BHTD.dtype == torch.bfloat16 and q_BHTD.device.type == "cpu" and _flash():
        return _causal_cpu(q_BHTD, k_BGTD, v_BGTD, scale)
    if causal and mask is None and q_BHTD.is_cuda and not torch.compiler.is_compiling():
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHTD, k_BGTD, v_BGTD))
        if _cudnn(q_BHTD, k_BGTD, v_BGTD, grad):
            return _by_cudnn(q_BHTD, k_BGTD, v_BGTD, scale, grad)
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    if grouped and q_BHTD.is_cuda and (mask is not None or q_BHTD.dtype == torch.float32):
        # no fused kernel takes both; without one, all scores would be held at once
        repeats = q_BHTD.shape[1] // k_BGTD.shape[1]
        k_BGTD, v_BGTD = k_BGTD.repeat_interleave(repeats, 1), v_BGTD.repeat_interleave(repeats, 1)
        grouped = False
    how: dict[str, Any] = {"is_causal": causal and mask is None, "scale": scale, "enable_gqa": grouped}
    hides = (
        mask is None or mask.dtype == torch.bool
    )  # one that is added may want a gradient, and has a dtype of its own
    if kernels.through_float32(q_BHTD) and torch.is_grad_enabled() and hides:
        if torch.compiler.is_compiling():
            q, k, v = (x.float() for x in (q_BHTD, k_BGTD, v_BGTD))
            return F.scaled_dot_product_attention(q, k, v, mask, **how).to(q_BHTD.dtype)
        if is_transformed():
            return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, mask, **how)
        y: Tensor = _GradientInFloat32.apply(q_BHTD, k_BGTD, v_BGTD, mask, how)
        return y
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, mask, **how)


def _folds(q_BH1D: Tensor, k_BGTD: Tensor, mask: Tensor | None) -> bool:
    """Return whether heads that share keys are better taken for queries of one head, where each has a single query.

    Else keys would be copied for every head, or read by each; kernels that share them, in half precision on CUDA, do it themselves.
    """
    grouped = q_BH1D.shape[1] != k_BGTD.shape[1]
    shared = mask is None or mask.ndim < 3 or mask.shape[-3] == 1  # one mask for all heads
    return grouped and shared and not (q_BH1D.is_cuda and mask is None and q_BH1D.dtype in _HALF)


def _flash() -> bool:
    """Return whether torch's switch for kernels that hold no scores is on, as ours on a CPU is one."""
    return torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()


# What is seen ----------------------------------------------------------------------------------------------------------


def visibility(
    T: int,
    start: int,
    window: int | None,
    position_ids: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,
) -> Tensor | Documents | None:
    """Make the `mask` that `attention` takes for T queries from position `start` on, once a forward.

    `documents` are the first tokens of each row's documents, see `Documents.of`: with them, and if torch has a kernel for it
    (CUDA from compute capability 8.0 on, `dtype` bfloat16 or float16), a Documents is made. Otherwise the mask is that of
    `visible`; without documents, position_ids tell where a document starts.
    """
    if documents is not None and start == 0 and _has_varlen(device, dtype):
        return Documents.of(documents, T, window if window is None or window < T else None)
    if documents is not None and start == 0:
        t_BT = torch.arange(T, device=device, dtype=documents.dtype).repeat(len(documents), 1)
        position_ids = t_BT - documents.gather(1, torch.searchsorted(documents, t_BT, right=True) - 1)
    return visible(T, start, window, position_ids, device)


def visible(T: int, start: int, window: int | None, position_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which keys each of T queries from position `start` on sees: bool [T, S] or [B, 1, T, S] with S = start + T.

    None where plain causal attention (or, for a single query, all keys) says the same. A window of w shows the query itself and
    the w - 1 keys before it. position_ids [B, T] that do not go on by one start a new document.
    """
    S = start + T
    if window is not None and window >= S:
        window = None
    if position_ids is None and window is None and (start == 0 or T == 1):
        return None
    query, key = torch.arange(start, S, device=device)[:, None], torch.arange(S, device=device)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if position_ids is not None and start == 0:
        new_BT = F.pad(position_ids.diff() != 1, (1, 0))
        document_BT = new_BT.cumsum(-1)
        mask = mask & (document_BT[:, None, :, None] == document_BT[:, None, None, :])
    return mask


# Kernels of torch for CUDA ---------------------------------------------------------------------------------------------


def _within_documents(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, documents: Documents, scale: float) -> Tensor:
    """Rows are laid one after the other, which is a view where [B, T, heads, D] is what lies in memory."""
    form = _varlen_form()
    if form is None:
        raise RuntimeError(
            "Attention within documents needs torch >= 2.11: pass a mask, surokit.nn.attention.visible()."
        )
    from torch.nn.attention.varlen import varlen_attn  # here, because loading it takes a second

    B, _, T, D = q_BHTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD))
    if D % 8:
        q, k, v = (F.pad(x, (0, -D % 8)) for x in (q, k, v))
    ends, n = documents.ends, documents.length
    before = -1 if documents.window is None else documents.window - 1
    told: dict[str, Any] = {"enable_gqa": True} if form == "told" else {}
    y: Any = varlen_attn(q, k, v, ends, ends, n, n, scale=scale, window_size=(before, 0), **told)
    found: Tensor = y.unflatten(0, (B, T))[..., :D].transpose(1, 2)
    return found


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has attention for packed documents there."""
    return device.type == "cuda" and dtype in _HALF and _varlen_form() is not None and _has_flash(device)


@constant_when_compiled
def _has_flash(device: torch.device) -> bool:
    """Return whether a GPU runs FlashAttention, which is for Ampere and later ones."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@constant_when_compiled
def _varlen_form() -> Literal["told", "untold"] | None:
    """Return whether varlen_attn has to be told that key heads are shared; None where this torch has none with windows.

    Its kernel shares them in any version; from 2.12 on the function refuses unless told.
    """
    return _looked_up()


@cache
def _looked_up() -> Literal["told", "untold"] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None
    return "told" if "enable_gqa" in known else "untold"


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, grad: bool) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, grad, 0.0, True, scale=scale)[0]
    return y


def _cudnn(q: Tensor, k: Tensor, v: Tensor, grad: bool) -> bool:
    """Return whether cuDNN's kernel can compute causal attention of these; torch itself is asked once for each shape.

    It is False for a query after a cache, whose keys get longer with each token: cuDNN plans every shape anew.
    """
    return (
        q.dtype in _HALF
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and torch.backends.cuda.cudnn_sdp_enabled()
        and _cudnn_serves(q.shape, k.shape, q.dtype, q.device, grad, torch.are_deterministic_algorithms_enabled())
    )


@lru_cache(maxsize=256)
def _cudnn_serves(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,
    deterministic: bool,  # torch looks at it, so an answer holds for one setting
) -> bool:
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return False  # elsewhere it is not known to be the faster one
    if (torch.backends.cudnn.version() or 0) < _CUDNN_ANY_LENGTH and (q_shape[2] % 128 or k_shape[2] % 128):
        return False
    # one row of memory stands for all of them: only shapes, types and the need of gradients are looked at
    q, k = (torch.empty(s[-1], dtype=dtype, device=device, requires_grad=grad).expand(s) for s in (q_shape, k_shape))
    asked = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, q_shape[1] != k_shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(asked)


# A CPU -----------------------------------------------------------------------------------------------------------------


# Operators rather than an autograd.Function, so that torch.compile does not unroll the blocks of the gradient. Outputs lie
# in memory as [B, T, H, D], which is what the projections around them read.
@torch.library.custom_op("surokit::causal_attention_cpu", mutates_args=())
def _causal_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("surokit::causal_attention_cpu_backward", mutates_args=())
def _causal_cpu_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return reference.causal_backward(dy, q, k, v, scale)


class _GradientInFloat32(torch.autograd.Function):
    """torch's attention on a CPU without bfloat16 instructions: its forward is as fast in bfloat16 as in float32, its backward
    twice as slow, so that backward computes both again in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.how = how
        return F.scaled_dot_product_attention(q, k, v, mask, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        *inputs, mask = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (t.detach().float().requires_grad_() for t in inputs)
            y = F.scaled_dot_product_attention(q, k, v, mask, **ctx.how)
        grads = torch.autograd.grad(y, (q, k, v), dy.float())
        return *(g.to(dy.dtype) for g in grads), None, None


def _like(x_BHTD: Tensor) -> Tensor:
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty((B, T, H, D)).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_causal_cpu_backward(dy, *ctx.saved_tensors, ctx.scale), None


_causal_cpu.register_fake(lambda q, k, v, scale: _like(q))
_causal_cpu_backward.register_fake(lambda dy, q, k, v, scale: (_like(q), _like(k), _like(v)))
_causal_cpu.register_autograd(_backward, setup_context=_keep)
