"""GPUs as data: memory, bandwidth and dense peak rates, each with its source, and a way to add your own.

A blank figure in hardware.csv means that nobody vouched for it, not that it is zero: whatever needs it says so. Peaks
are dense, since vendors also print figures for 2:4 sparsity, twice as high, which training never sees. `memory_gib` is
nominal: the driver keeps about 1 %.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from surokit.formats import TENSOR_CORES, Kind
from surokit.planner import arguments


@dataclass(frozen=True)
class Ceilings:
    """Rates that one machine reached, as a calibration measured them; None where it was not measured.

    Products in TFLOPS of a large square product; `bandwidth_tb_s` of a copy, reads and writes counted; `launch_us` host time of one
    kernel launch (of one operator call on a CPU); `host_gb_s` of a pinned copy between host and device, one direction;
    `peer_gb_s` of a copy to another GPU; `host_adam_params_s` parameters a second that the host's AdamW updates.
    """

    measured: str
    bf16_tflops: float | None = None
    fp32_tflops: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    bandwidth_tb_s: float | None = None
    launch_us: float | None = None
    host_gb_s: float | None = None
    peer_gb_s: float | None = None
    host_adam_params_s: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates are dense TFLOPS, None where unknown or not native; bandwidth in TB/s (1e12 bytes).

    `capability`, CUDA's compute capability, says which products are native; without it those are whose peak is given. `peer_gb_s`
    and `host_gb_s` are links to other GPUs of the node and to the host, GB/s in one direction; `watts` the power limit it is sold
    with. `ceilings` are what a calibration of one machine reached, None for a row of the table.
    """

    name: str
    memory_gib: float | None = None
    bandwidth_tb_s: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    source: str = "given by the user"
    aliases: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    peer_gb_s: float | None = None
    host_gb_s: float | None = None
    watts: float | None = None
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("A GPU needs a name: Gpu('MyGPU', bf16_tflops=100).")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_gib", "_tb_s", "_tflops")) and value is not None:
                arguments.number(f"{field.name} of {self.name}", value)

    @property
    def fastest_tflops(self) -> float | None:
        """The highest dense peak that is known, of any format."""
        return max((t for t in (self.bf16_tflops, self.fp8_tflops, self.fp4_tflops) if t is not None), default=None)

    def multiplies(self, kind: Kind | None) -> bool:
        """Whether its tensor cores compute products of this kind; None is a quantized product that has no kind."""
        if kind is None:
            return False
        if self.capability is None:
            return self._quantized(kind)[0] is not None
        return TENSOR_CORES[kind].on(self.capability)

    def peak(self, kind: Kind | None = None) -> tuple[float | None, str]:
        """(dense TFLOPS, name of the peak) of products of a kind; bf16's where they are not native or nobody vouched."""
        if kind is not None and self.multiplies(kind):
            tflops, name = self._quantized(kind)
            if tflops is not None:
                return tflops, f"{self.name} dense {name}"
        return self.bf16_tflops, f"{self.name} dense BF16"

    def _quantized(self, kind: Kind) -> tuple[float | None, str]:
        return (self.fp4_tflops, "FP4") if TENSOR_CORES[kind].bits == 4 else (self.fp8_tflops, "FP8")


def _key(name: str) -> str:
    """Names compare without case, spaces, dashes and vendor, so that what torch calls a device finds its row."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|amd", "", name.lower()))


def _read() -> dict[str, Gpu]:
    def figure(text: str) -> float | None:
        return float(text) if text else None

    table = {}
    for row in csv.DictReader(
        io.StringIO(files("surokit.planner").joinpath("hardware.csv").read_text(encoding="utf-8"))
    ):
        major, _, minor = row["capability"].partition(".")
        gpu = Gpu(
            name=row["name"],
            memory_gib=figure(row["memory_gib"]),
            bandwidth_tb_s=figure(row["bandwidth_tb_s"]),
            bf16_tflops=figure(row["bf16_tflops"]),
            fp8_tflops=figure(row["fp8_tflops"]),
            fp4_tflops=figure(row["fp4_tflops"]),
            source=row["source"],
            aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
            capability=(int(major), int(minor)) if major else None,
        )
        table[gpu.name] = gpu
    return table


_TABLE: dict[str, Gpu] = _read()
#: Every known GPU by name; `register` adds one.
GPUS: Mapping[str, Gpu] = MappingProxyType(_TABLE)


def register(gpu: Gpu) -> Gpu:
    """Add a GPU to the table, or replace the one of that name, for this process."""
    if not isinstance(gpu, Gpu):
        raise TypeError(f"register() takes a Gpu, not a {type(gpu).__name__}: register(Gpu('MyGPU', bf16_tflops=100)).")
    _TABLE[gpu.name] = gpu
    return gpu


def find_gpu(what: Any) -> Gpu:
    """The Gpu of a name, an alias or a device name as torch gives it.

    Raises ValueError for an unknown name, with the nearest known one.
    """
    if isinstance(what, Gpu):
        return what
    if not isinstance(what, str):
        raise TypeError(f"gpu={what!r} is a {type(what).__name__}: give a name such as 'H100', or a Gpu.")
    known: dict[str, Gpu] = {}
    for gpu in _TABLE.values():
        known.update({_key(alias): gpu for alias in (gpu.name, *gpu.aliases)})
    if found := known.get(_key(what)):
        return found
    names = sorted({gpu.name for gpu in known.values()})
    near = difflib.get_close_matches(_key(what), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]].name}? Known" if near else "known"
    raise ValueError(
        f"There is no GPU {what!r} in the table: {hint}: {', '.join(names)}; "
        f"add yours with planner.register(Gpu({what!r}, bf16_tflops=...))."
    )
