"""Read what torch notes of a collective beside its time: its kind, its group, its number there and its bytes.

With NCCL the operator `record_param_comms` has the note, and in a trace file so do its kernels. With gloo a range such as
`gloo:all_reduce` has the shapes of its tensors, where shapes are recorded, and neither group nor number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from surokit.profiler.analysis.timeline import Event, Kind

NOTING_OPERATOR = "record_param_comms"
GLOO_RANGE = "gloo:"
POINT_TO_POINT = ("send", "recv", "send_recv")
_KINDS = (  # the letters of a name -> the collective, as torch.distributed calls it; the first that fits
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)
_SIZES = {  # bytes of an element, by the names that torch gives a dtype
    **dict.fromkeys(("double", "long", "long int", "int64", "float64", "complexfloat"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int", "int16", "float16"), 2),
    **dict.fromkeys(("char", "signed char", "byte", "unsigned char", "bool", "int8", "uint8"), 1),
}


@dataclass(frozen=True)
class Message:
    """A Message is what was noted of one collective. The event that carries the note is an operator around the launch, a
    kernel or a range; `thread` is its host thread or stream.

    ranks: of the group, empty where they are not known. sequence: the collective's number in its group, -1 where it is not
    known. nbytes: of the larger of input and output on this rank, for gloo's all_gather of the input; -1 where not known.
    """

    kind: Kind
    start_ns: int
    end_ns: int
    thread: int
    collective: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    sequence: int = -1
    nbytes: int = -1


def collective_name(text: str) -> str:
    """Return the collective that a kernel, a range or a note is of, as torch.distributed calls it; the text itself where it is of
    none."""
    letters = re.sub(r"[^a-z]", "", text.lower())
    return next((name for fragment, name in _KINDS if fragment in letters), text)


def is_noting(name: str) -> bool:
    """Return whether an event of this name carries a note in torch's memory."""
    return name == NOTING_OPERATOR or name.startswith(GLOO_RANGE)


def message_of(event: Event, args: Mapping[str, Any]) -> Message | None:
    """Read the note from an event's arguments, named as in a trace file; None where they hold none. Numbers may be text. Raises
    TypeError or ValueError where they are damaged."""
    where = event.kind, event.start_ns, event.end_ns, event.thread
    if "Collective name" in args:
        size = _size(str(args.get("dtype", "")))
        elements = max(int(args.get(key, 0) or 0) for key in ("In msg nelems", "Out msg nelems"))
        ranks = str(args.get("Process Group Ranks", ""))
        return Message(
            *where,
            collective_name(str(args["Collective name"])),
            str(args.get("Process Group Name", "")).strip('"'),
            () if "..." in ranks else tuple(int(rank) for rank in re.findall(r"\d+", ranks)),  # torch cuts long lists
            int(args.get("Seq", -1)),
            elements * size if size else -1,
        )
    if event.name.startswith(GLOO_RANGE) and "Input Dims" in args:
        sizes = [_size(str(name)) for name in args.get("Input type", ())]
        shapes = [shape for shape in args["Input Dims"] if isinstance(shape, list | tuple)]
        known = 0 < len(shapes) == len(sizes) and all(sizes)
        nbytes = sum(prod(shape) * size for shape, size in zip(shapes, sizes)) if known else -1
        return Message(*where, collective_name(event.name), nbytes=nbytes)
    return None


def _size(dtype: str) -> int:
    """Return the bytes of an element, 0 where the dtype is not known."""
    name = dtype.strip('"').removeprefix("c10::").lower()
    return 1 if name.startswith("float8") else _SIZES.get(name, 0)
