"""Define delayed scaling of one operand: quantize with the amax in force and note the operand's own.

    used = in force, or the own amax where nothing is in force yet          own = amax(x)
    codes, decode scale = quantize(x, used)
    recorded: the open slots take the larger of themselves and own; where nothing was in force, own comes into force

One scale serves x and x', whose codes are then the same, turned (`quantize_both`).

Layers that read the same x are siblings: their slots record together and so hold the same, and the first one counts. What
becomes of the open slots when a step closes is the caller's: `surokit.nn.delayed` pushes them into a history.

M rows, K columns, S siblings. Source: NVIDIA TransformerEngine's DelayedScaling; a first tensor's own amax is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surokit.formats import Format

from . import quantize as tiles
from .transpose import transpose_fp8

NOTHING = -1.0  # in an open slot: no amax yet


def quantize(
    x_MK: Tensor,
    format: Format,
    in_force_S: Tensor,
    opened_S: Tensor,
    record: bool,
    pow2: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the codes [M, K] in the format's dtype and their decode scale [1, 1] float32.

    in_force_S, opened_S: float32 [S] of one stride, the amaxes in force (0: none) and the open slots of all layers that read x;
    written in place with `record`. pow2, floor: as in `tiles.quantize`. Where x holds an inf or a NaN the decode scale is NaN,
    which would otherwise be cut to an ordinary number, and the codes are of no account.
    """
    used = settle(tiles.amax(x_MK), in_force_S, opened_S, record)
    return tiles.quantize(x_MK, format, 0, 0, pow2, used, floor)


def quantize_both(
    x_MK: Tensor,
    format: Format,
    in_force_S: Tensor,
    opened_S: Tensor,
    record: bool,
    pow2: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `quantize`, and the codes of x' [K, M] in rows of their own with the same decode scale."""
    codes_MK, scale_inv = quantize(x_MK, format, in_force_S, opened_S, record, pow2, floor)
    return codes_MK, scale_inv, transpose_fp8(codes_MK), scale_inv


def settle(own: Tensor, in_force_S: Tensor, opened_S: Tensor, record: bool) -> Tensor:
    """Return the amax [1, 1] that quantizes what has the amax `own` [1, 1], NaN where that is not finite; records it."""
    own = own.view(1)
    given = in_force_S[:1]
    used = torch.where(given > 0, given, own) + (own - own)
    if record:
        first = ~(given > 0) & (own > 0) & (own < torch.inf)
        in_force_S.copy_(torch.where(first & ~(in_force_S > 0), own, in_force_S))
        torch.maximum(opened_S, own, out=opened_S)
    return used.view(1, 1)
