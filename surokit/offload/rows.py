"""Keep states of a weight's columns as rows: AdamW on them, sums of gradients, and copies between a weight and its rows.

A weight W [O, I] has a state for every input column. A device or a host stores its columns as [C, O]: a row is
a column of the weight, contiguous, so that columns come and go without moving their neighbours.

Every column counts its own updates. Columns side by side with equal clocks are one run, and a run is one tensor for torch's
fused AdamW, which is the only arithmetic here on a CPU, whichever part of a weight it is asked for. The bits of a row
depend on that row alone: not on its neighbours, the runs or the number of threads.

    C columns held here; O output rows of the weight; I its input columns
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surokit import torch_private
from surokit.kernels import best
from surokit.kernels.reference import columns
from surokit.offload.workers import beat

_LANES = 16  # floats of the widest vector: what is left over at a tensor's end is rounded otherwise
_BLOCK = 1 << 17  # float32 numbers a thread, widened or scaled together: they stay in its cache
_SIDE = 64  # rows of a weight, at least, that are transposed together

scratch = threading.local()


def runs(clocks: Sequence[int] | Tensor, betas: Sequence[float]) -> list[slice]:
    """Return the runs of neighbouring rows that one call can update: those with equal clocks.

    Clocks from `fading(betas)` on count as equal.
    """
    lengths, _ = _runs(torch.as_tensor(clocks, device="cpu"), betas)
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for length, end in zip(lengths, ends)]


def regrouped(clocks: Tensor, betas: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return how rows change places so that equal clocks become one run each: (to, source), int64 [M]; row source[i] goes
    to to[i].

    Only the M rows that lie outside their group's future place move, all at once and into each other's places. Every run costs
    about 4 us of Python beside its arithmetic; the moves cost as much as an update of as many rows, once.
    """
    capped = clocks.clamp(max=fading(betas))
    before = capped.sort().values  # the clock that each place will have
    away = (capped != before).nonzero().view(-1)
    return away, away[capped[away].argsort(stable=True)]


def fading(betas: Sequence[float]) -> int:
    """Return the clock from which both bias corrections 1 - beta^t are 1 in float64, so that it no longer matters."""
    return max(1 if beta == 0 else math.ceil(54 * math.log(2) / -math.log(beta)) for beta in betas)


@torch.no_grad()
def update_rows_(
    w_CO: Tensor,
    m_CO: Tensor,
    v_CO: Tensor,
    g_CO: Tensor,
    clocks_C: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float],
    weight_decay: float,
    eps: float,
    divide_by: float | Tensor | None = None,
    elapsed: int = 1,
) -> None:
    """Update every row once by AdamW, in place: w, m, v, and `elapsed` more on the clocks. g may be overwritten.

    w, m, v, g: contiguous float32 [C, O] on a CPU. clocks_C: int32, updates that each row has had.
    divide_by: gradients are divided by it, a number or 0-d float32.
    elapsed: steps n that this update stands for. The moments decay by betas^n, and the bias corrections are those of the clock;
    `lr` is then the sum over those steps, and so is the decay with it.
    """
    if not clocks_C.numel():
        return
    clocks_C += elapsed
    if w_CO.shape[1] % _LANES:  # a run's remainder would fall into its last row
        lengths, clocks = [1] * len(clocks_C), clocks_C.clamp(max=fading(betas)).tolist()
    else:
        lengths, clocks = _runs(clocks_C, betas)
    step = {clock: torch.tensor(clock / elapsed, device="cpu") for clock in set(clocks)}
    ws, gs, ms, vs = (list(x.split(lengths)) for x in (w_CO, g_CO, m_CO, v_CO))
    fused_adamw_(
        ws,
        gs,
        ms,
        vs,
        [step[clock] for clock in clocks],
        lr=lr,
        betas=(betas[0] ** elapsed, betas[1] ** elapsed) if elapsed > 1 else betas,
        weight_decay=weight_decay,
        eps=eps,
        divide_by=divide_by,
    )


def fused_adamw_(
    ws: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    betas: Sequence[float],
    weight_decay: float,
    eps: float,
    divide_by: float | Tensor | None = None,
) -> None:
    """Run torch's fused AdamW over lists of float32 tensors on a CPU; `steps`, 0-d float32, count this update already."""
    scale = (
        divide_by
        if divide_by is None or isinstance(divide_by, Tensor)
        else torch.tensor(float(divide_by), device="cpu")
    )
    torch_private.fused_adamw_(
        ws,
        gs,
        ms,
        vs,
        [],
        steps,
        lr=float(lr),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=None,
    )


@torch.no_grad()
def add_rows_(acc_CO: Tensor, slot_CO: Tensor, scale: float | None, first: bool) -> None:
    """Set acc = slot / scale if it is the first of a sum, else acc += slot / scale; in float32, in place, both contiguous.

    A scale of None is 1. The quotient is rounded to float32, and then the sum.
    """
    acc, slot = acc_CO.view(-1), slot_CO.view(-1)
    if first:
        for acc_part, slot_part in zip(acc.split(block()), slot.split(block())):
            acc_part.copy_(slot_part)
            if scale is not None:
                acc_part.div_(scale)
            beat()
        return
    for acc_part, slot_part in zip(acc.split(block()), slot.split(block())):
        if slot_part.dtype != torch.float32 or scale is not None:
            slot_part = widened(slot_part)
        if scale is not None:
            slot_part.div_(scale)
        acc_part.add_(slot_part)
        beat()


def block() -> int:
    """Return how many numbers to work on at a time, so that float32 copies of them stay in the caches of all threads."""
    return _BLOCK * torch.get_num_threads()


def widened(part: Tensor) -> Tensor:
    """Return a float32 copy of at most `block()` numbers, in memory of this thread that the next call writes again."""
    wide: Tensor | None = getattr(scratch, "wide", None)
    if wide is None or wide.numel() < part.numel():
        wide = scratch.wide = torch.empty(block(), device="cpu")
    return wide[: part.numel()].copy_(part)


@torch.no_grad()
def update_columns_(
    W_OI: Tensor,
    g_OI: Tensor,
    index_C: Tensor,
    w_CO: Tensor,
    m_CO: Tensor,
    v_CO: Tensor,
    clocks_C: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float],
    weight_decay: float,
    eps: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update a weight's columns W[:, index] once by AdamW, in place: their states, and the weight from its float32 rows.

    W, g: [O, I] in any floating-point dtype. index_C: int32 or int64, no column twice. w, m, v: contiguous float32 [C, O].
    clocks_C: int32. All on the weight's device, where nothing is read on the host unless that device is a CPU.
    grad_scale, found_inf: 0-d float32; a masked step changes nothing, clocks included.

    On a CPU this is `update_rows_`; elsewhere the kernel of columns.py.
    """
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
    if W_OI.device.type != "cpu":
        states = (W_OI, g_OI, index_C, w_CO, m_CO, v_CO, clocks_C)
        update_ = best(columns.update_columns_, W_OI.device)
        update_(*states, beta1=betas[0], beta2=betas[1], grad_scale=grad_scale, found_inf=found_inf, **options)
        return
    if found_inf is not None and bool(found_inf):
        return
    g_CO = torch.empty_like(w_CO)
    gather(g_OI, index_C, g_CO)
    update_rows_(w_CO, m_CO, v_CO, g_CO, clocks_C, betas=betas, divide_by=grad_scale, **options)
    scatter_(W_OI, index_C, w_CO)


@torch.no_grad()
def gather(src_OI: Tensor, index_C: Tensor, out_CO: Tensor) -> None:
    """Set out = src[:, index]', in out's dtype. index_C: int32 or int64; out_CO contiguous."""
    if src_OI.device.type != "cpu":
        best(columns.gather, src_OI.device)(src_OI, index_C, out_CO)
        return
    for part, some in _parts(src_OI):
        if _most(index_C, src_OI):
            out_CO[:, some] = part.t().contiguous().index_select(0, index_C)
        else:
            out_CO[:, some] = part.index_select(1, index_C).t()


@torch.no_grad()
def scatter_(dst_OI: Tensor, index_C: Tensor, rows_CO: Tensor) -> None:
    """Set dst[:, index] = rows', rounded to nearest in dst's dtype. index_C: int32 or int64, no column twice."""
    if dst_OI.device.type != "cpu":
        best(columns.scatter_, dst_OI.device)(dst_OI, index_C, rows_CO)
        return
    index_C = index_C.long()
    for part, some in _parts(dst_OI):
        rows = rows_CO[:, some].to(dst_OI.dtype)
        if _most(index_C, dst_OI):
            part.copy_(part.t().contiguous().index_copy_(0, index_C, rows.contiguous()).t())
        else:
            part.t().index_copy_(0, index_C, rows)


def _parts(weight_OI: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield some rows after the other, so few that their transposed copy stays in a cache (measured: 3 to 6 times as fast)."""
    O, I = weight_OI.shape  # noqa: E741
    size = max(_SIDE, _BLOCK // max(I, 1))
    return ((weight_OI[start : start + size], slice(start, start + size)) for start in range(0, O, size))


def _most(index_C: Tensor, weight_OI: Tensor) -> bool:
    """Return whether it pays to transpose all columns for these."""
    return 4 * len(index_C) > weight_OI.shape[1]


def _runs(clocks_C: Tensor, betas: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return rows and clock of every run."""
    clocks, lengths = torch.unique_consecutive(clocks_C.clamp(max=fading(betas)), return_counts=True)
    return lengths.tolist(), clocks.tolist()
