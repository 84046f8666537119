"""List GPUs: memory, bandwidth, dense peak rates, links and power, each with its source; and add your own.

A blank figure in gpus.csv means that nobody vouched for it, not that it is zero: whatever needs it says so. Peaks
are dense, since vendors also print figures for 2:4 sparsity, twice as high, which training never sees; with float32
accumulation, which training needs and which runs at half speed on GeForce cards. `memory_gib` is nominal: the driver
keeps about 1 %, and error correction a sixteenth on cards with GDDR6 (L4, L40S, A40 and the like); `usable_gib` is what
PyTorch's out-of-memory messages call the total capacity (of L4, L20, L40 and A10 by the share that an L40S has of its
own). `l2_mib` is from NVIDIA's architecture whitepapers. Links are in one
direction, half of what vendors print for both; between the GPUs of a node they are those that join all of them, so a
bridge for two does not count.

A calibration (surokit/calibration.py) adds what one machine really reached: `Ceilings`, far more use than a peak for
predicting a time. This file only holds them; there is no torch here.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from surokit import arguments
from surokit.formats import TENSOR_CORES, Kind

#: The compute capability from which tensor cores multiply bf16.
BF16_FROM = (8, 0)
#: What a process of PyTorch takes beside what it allocates, CUDA's context and libraries: .2 to .6 GiB in out-of-memory messages.
CONTEXT_GIB = 0.5


@dataclass(frozen=True)
class Ceilings:
    """Ceilings are the rates that one machine reached, as a calibration measured them; None where nothing was measured.

    `measured` says when, with what, and what is missing and why. Products in TFLOPS of a large square product; `bandwidth_tb_s` of
    a copy, reads and writes counted; `launch_us` host time of one kernel launch (of one operator call on a CPU); `host_gb_s` of a
    pinned copy between host and device, one direction, the slower one; `peer_gb_s` of a copy to another GPU; `host_adam_params_s`
    parameters a second that the host's AdamW updates, in float32, and `host_accumulate_params_s` gradients in 16 bits that it adds
    to float32 sums.
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
    host_accumulate_params_s: float | None = None

    def __post_init__(self) -> None:
        _check_figures(self, "the ceilings")


@dataclass(frozen=True)
class Gpu:
    """A Gpu is one kind of GPU. Rates are dense TFLOPS, None where unknown or not native; bandwidth in TB/s (1e12 bytes).

    `capability`, CUDA's compute capability, says which products are native; without it those are whose peak is given. `peer_gb_s`
    and `host_gb_s` are links to other GPUs of the node and to the host, GB/s in one direction; `watts` the power limit it is sold
    with. `ceilings` are what a calibration of one machine reached, None for a row of the table. `device` is "cpu" where a
    calibration measured a processor. fp16_tflops and fp32_tflops are known of GPUs that do not multiply bf16; `plain` says in which
    of the three a plan computes the products that no recipe quantizes. `sms` is the number of multiprocessors (AMD: compute units).
    `usable_gib` is what the driver leaves of the memory, `l2_mib` the last cache before it.
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
    device: Literal["cuda", "cpu"] = "cuda"
    fp16_tflops: float | None = None
    fp32_tflops: float | None = None
    sms: float | None = None
    plain: Literal["BF16", "FP16", "FP32"] = "BF16"
    usable_gib: float | None = None
    l2_mib: float | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("A GPU needs a name: Gpu('MyGPU', bf16_tflops=100).")
        _check_figures(self, self.name)
        if self.ceilings is not None and not isinstance(self.ceilings, Ceilings):
            raise TypeError(
                f"ceilings of {self.name} is a {type(self.ceilings).__name__}: give Ceilings(measured='...', bf16_tflops=...), "
                "or calibrate()."
            )

    @property
    def fastest_tflops(self) -> float | None:
        """Return the highest dense peak that is known, of any format."""
        known = (self.bf16_tflops, self.fp16_tflops, self.fp32_tflops, self.fp8_tflops, self.fp4_tflops)
        return max((t for t in known if t is not None), default=None)

    @property
    def room_gib(self) -> float | None:
        """Return the GiB that a process can allocate: of a GPU what is usable, less CUDA's context; None where it is not known."""
        memory = self.usable_gib or self.memory_gib
        return memory if memory is None or self.device == "cpu" else max(0.0, memory - CONTEXT_GIB)

    @property
    def has_bf16(self) -> bool:
        """True if its tensor cores multiply bf16, which is assumed where the compute capability is not known."""
        return self.device == "cpu" or self.capability is None or self.capability >= BF16_FROM

    @property
    def plain_tflops(self) -> float | None:
        """Return the dense peak, TFLOPS, of products that no recipe quantizes; None where it is not known."""
        return {"BF16": self.bf16_tflops, "FP16": self.fp16_tflops, "FP32": self.fp32_tflops}[self.plain]

    def multiplying(self, dtype: str) -> Gpu:
        """Return the GPU with the peak of plain products for a model of this dtype. Without bf16 products its tensor cores multiply
        fp16, and bf16 counts as fp32."""
        return self if self.has_bf16 else replace(self, plain="FP16" if dtype == "fp16" else "FP32")

    def multiplies(self, kind: Kind | None) -> bool:
        """True if its tensor cores compute products of this kind; None is a quantized product that has no kind."""
        if kind is None or self.device == "cpu":
            return False
        if self.capability is None:
            return self._quantized(kind)[0] is not None
        return TENSOR_CORES[kind].on(self.capability)

    def peak(self, kind: Kind | None = None) -> tuple[float | None, str]:
        """Return (dense TFLOPS, name of the peak) of products of a kind; those of plain products where the kind is not native or
        its peak is not known."""
        if kind is not None and self.multiplies(kind):
            tflops, name = self._quantized(kind)
            if tflops is not None:
                return tflops, f"{self.name} dense {name}"
        return self.plain_tflops, f"{self.name} dense {self.plain}"

    def to_json(self) -> str:
        """Return the GPU as JSON text, for `Gpu.from_json`; figures that are unknown are left out."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        if self.ceilings is not None:
            values["ceilings"] = {name: value for name, value in asdict(self.ceilings).items() if value is not None}
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Gpu:
        """Read a GPU from the text that `to_json` returned. Raises ValueError for anything else, in one sentence."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise TypeError(f"it holds a {type(values).__name__}")
            if (reached := values.get("ceilings")) is not None:
                values["ceilings"] = Ceilings(**reached)
            if (capability := values.get("capability")) is not None:
                major, minor = capability
                values["capability"] = (int(major), int(minor))
            return cls(**{**values, "aliases": tuple(values.get("aliases", ()))})
        except (ValueError, TypeError) as error:
            raise ValueError(f"This is no GPU as Gpu.to_json() writes it: {error}.") from None

    def _quantized(self, kind: Kind) -> tuple[float | None, str]:
        return (self.fp4_tflops, "FP4") if TENSOR_CORES[kind].bits == 4 else (self.fp8_tflops, "FP8")


# (a figure that no device reaches, its unit, the likely factor of a figure in a wrong unit), by the end of a field's name
_LIMITS = {
    "_tflops": (1e8, "TFLOPS", 1e12),
    "_tb_s": (200.0, "TB/s", 1e3),
    "_gb_s": (2e4, "GB/s", 1e9),
    "_gib": (20_000.0, "GiB", 2**30),
    "_mib": (20_000.0, "MiB", 2**20),
    "watts": (1e5, "W", 1e3),
    "_us": (1e6, "us", 1e3),
    "_params_s": (1e14, "parameters a second", 1e3),
}


def _check_figures(owner: Gpu | Ceilings, name: str) -> None:
    for field in fields(owner):
        value = getattr(owner, field.name)
        if field.name.endswith(tuple(_LIMITS)) and value is not None:
            figure = arguments.number(f"{field.name} of {name}", value)
            most, unit, size = next(limit for end, limit in _LIMITS.items() if field.name.endswith(end))
            if figure > most:
                raise ValueError(
                    f"{field.name} of {name}={figure:g} is more than any device has: did you mean {figure / size:.4g} "
                    f"(the unit is {unit})?"
                )


def _key(name: str) -> str:
    """Return a name without case, spaces, dashes and vendor, so that what torch calls a device finds its row."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|amd", "", name.lower()))


#: Columns of gpus.csv and of a user's table; only the name is needed.
COLUMNS = tuple(f.name for f in fields(Gpu) if f.name not in ("ceilings", "device", "plain"))


def _parse(text: str, where: str) -> Iterator[Gpu]:
    """Yield the GPUs of a CSV table. Raises ValueError with the place of what cannot be read."""
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    if "name" not in header:
        raise ValueError(
            f"{where} has no column 'name' in its first line: the columns are {', '.join(COLUMNS)}, and only the name is needed."
        )
    for name in header:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? The" if near else "the"
            raise ValueError(f"{where} has a column {name!r} that no GPU has: {hint} columns are {', '.join(COLUMNS)}.")
    if len(set(header)) < len(header):
        raise ValueError(f"{where} names a column twice: {', '.join(header)}.")
    reader.fieldnames = header
    for row in reader:
        yield _read_row(row, f"line {reader.line_num} of {where}")


def _read_row(row: Mapping[str | None, Any], where: str) -> Gpu:
    if None in row:
        raise ValueError(f"{where} has more fields than there are columns: put text that holds commas in quotes.")
    cells = {str(name): (text or "").strip() for name, text in row.items()}
    values: dict[str, Any] = {}
    for name, text in cells.items():
        if not text:
            continue
        if name in ("name", "source"):
            values[name] = text
        elif name == "aliases":
            values[name] = tuple(alias.strip() for alias in text.split(";") if alias.strip())
        elif name == "capability":
            if not (found := re.fullmatch(r"(\d+)\.(\d+)", text)):
                raise ValueError(f"{where}: capability is {text!r} where two numbers are needed, as in 9.0.")
            values[name] = (int(found[1]), int(found[2]))
        else:
            try:
                values[name] = float(text)
            except ValueError:
                raise ValueError(
                    f"{where}: {name} is {text!r} where a number is needed; leave it empty if unknown."
                ) from None
    if "name" not in values:
        raise ValueError(f"{where} has no name: every GPU needs one.")
    try:
        return Gpu(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _shipped() -> dict[str, Gpu]:
    text = files("surokit.hardware").joinpath("gpus.csv").read_text(encoding="utf-8")
    return {gpu.name: gpu for gpu in _parse(text, "gpus.csv")}


_TABLE: dict[str, Gpu] = _shipped()
#: Every known GPU by name; `register` and `load_hardware` add to it.
GPUS: Mapping[str, Gpu] = MappingProxyType(_TABLE)


#: A processor: our CPU kernels compute, at rates that `surokit.calibrate("cpu")` would measure.
PROCESSOR = Gpu("CPU", source="any processor", device="cpu")


def register(gpu: Gpu) -> Gpu:
    """Add a GPU to the table, or replace the one of that name, for this process."""
    if not isinstance(gpu, Gpu):
        raise TypeError(f"register() takes a Gpu, not a {type(gpu).__name__}: register(Gpu('MyGPU', bf16_tflops=100)).")
    _TABLE[gpu.name] = gpu
    return gpu


def load_hardware(source: str | Path, *, replace: bool = False) -> tuple[Gpu, ...]:
    """Add the GPUs of a CSV file, or of CSV text, to the table for this process; all of them or none.

    The columns are those of surokit/hardware/gpus.csv; only `name` is needed, and an empty field is an unknown figure. `replace`
    allows names that the table already has. Raises FileNotFoundError, or ValueError with the line of what cannot be read.
    """
    if isinstance(source, str) and "\n" in source:
        text, where = source, "the table"
    elif isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no table of GPUs at {path}: give a CSV file with the columns {', '.join(COLUMNS)}."
            )
        text, where = path.read_text(encoding="utf-8-sig"), path.name
    else:
        raise TypeError(f"load_hardware() takes a path or CSV text, not a {type(source).__name__}.")
    loaded: list[Gpu] = []
    taken = {} if replace else {key: gpu.name for key, gpu in _by_key().items()}
    for gpu in _parse(text, where):
        keys = {_key(alias): alias for alias in (gpu.name, *gpu.aliases)}
        for key, alias in keys.items():
            if key in taken:
                remedy = "" if taken[key] in {g.name for g in loaded} else ", or give replace=True"
                raise ValueError(
                    f"{where} names {alias!r}, which is {taken[key]} already: give each GPU a name of its own{remedy}."
                )
        taken.update(dict.fromkeys(keys, gpu.name))
        loaded.append(gpu)
    if not loaded:
        raise ValueError(f"{where} holds no GPU: give a line for each under the column names.")
    for gpu in loaded:
        register(gpu)
    return tuple(loaded)


def _by_key() -> dict[str, Gpu]:
    known: dict[str, Gpu] = {}
    for gpu in _TABLE.values():
        known.update({_key(alias): gpu for alias in (gpu.name, *gpu.aliases)})
    return known


def find_gpu(what: Any) -> Gpu:
    """Return the Gpu of a name, an alias or a device name as torch gives it; "cpu" is a processor whose rates nobody measured.

    Raises ValueError for an unknown name, with the nearest known one.
    """
    if isinstance(what, Gpu):
        return what
    if not isinstance(what, str):
        raise TypeError(f"gpu={what!r} is a {type(what).__name__}: give a name such as 'H100', or a Gpu.")
    known = _by_key()
    if found := known.get(_key(what)):
        return found
    if _key(what) == "cpu":
        return PROCESSOR
    names = sorted({gpu.name for gpu in known.values()})
    near = difflib.get_close_matches(_key(what), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]].name}? Known" if near else "known"
    raise ValueError(
        f"There is no GPU {what!r} in the table: {hint}: {', '.join(names)}; "
        f"add yours with planner.register(Gpu({what!r}, bf16_tflops=...))."
    )
