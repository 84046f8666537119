"""What the Triton kernels compile to on a GPU that is not there: registers, spills and shared memory, by Triton's own ptxas.

The launches that are compiled are those of the tests (tests/kernels/compiling.py), so this runs in a checkout. Each kernel is
assembled once more with `ptxas -v`, which says how many registers a thread has, and how many bytes it has to put into local
memory because they are too few: a spill costs bandwidth that no roofline knows of. From registers, warps and shared memory
follows how many warps a multiprocessor can hold.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surokit.bench.result import markdown

ROOT = Path(__file__).resolve().parents[2]
# of one multiprocessor (CUDA C++ programming guide, technical specifications): registers, warps, bytes of shared memory, of which
# each block takes another KiB
_REGISTERS, _RESERVED = 65536, 1024
_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
_SHARED_KIB = {80: 164, 89: 100, 90: 228, 100: 228, 120: 100}
_BLOCKS = {80: 32, 89: 24, 90: 32, 100: 32, 120: 32}
_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Assembled:
    """One kernel: registers and bytes of a thread, shared bytes and warps of a block, warps that a multiprocessor holds."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    warps: int
    resident_warps: int

    @property
    def spilled(self) -> int:
        """Bytes of a thread that go to local memory or come from it."""
        return self.spill_stores + self.spill_loads


def assemble(ptx: str, arch: int, sizes: Sequence[tuple[int, int]]) -> list[Assembled]:
    """What ptxas makes of one or more modules of PTX in a row; sizes: (bytes of shared memory, warps) of each.

    Raises RuntimeError where ptxas refuses the code.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for module, (shared, warps) in zip(_modules(ptx), sizes, strict=True):
            source = Path(folder) / "kernel.ptx"
            source.write_text(module, encoding="utf-8")
            target = re.search(r"\.target (sm_\w+)", module)
            name = target[1] if target else f"sm_{arch}"
            command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(source), "-o", f"{folder}/kernel.cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"ptxas refuses a kernel for {name}: {done.stderr.strip()[-400:]}")
            found += [_read(entry, arch, shared, warps) for entry in _ENTRY.finditer(done.stderr)]
    return found


def _modules(ptx: str) -> list[str]:
    return re.split(r"(?m)(?=^\.version )", ptx)[1:]


def _read(entry: re.Match[str], arch: int, shared: int, warps: int) -> Assembled:
    registers = int(entry["registers"])
    return Assembled(
        kernel=entry["kernel"],
        registers=registers,
        stack=int(entry["stack"]),
        spill_stores=int(entry["stores"]),
        spill_loads=int(entry["loads"]),
        shared=shared,
        warps=warps,
        resident_warps=resident(arch, registers, shared, warps),
    )


def resident(arch: int, registers: int, shared: int, warps: int) -> int:
    """How many warps of such blocks a multiprocessor of this architecture holds at once."""
    a_warp = -(-registers * 32 // 256) * 256  # handed out in pieces of 256
    blocks = min(
        _REGISTERS // a_warp // warps,
        _WARPS[arch] // warps,
        _SHARED_KIB[arch] * 1024 // (shared + _RESERVED),
        _BLOCKS[arch],
    )
    return blocks * warps


def run(arch: int = 90) -> dict[str, Any]:
    """Compile and assemble every kernel as it is launched, for compute capability arch / 10; the raw result.

    Raises RuntimeError outside a checkout, and where a launch does not compile.
    """
    if arch not in _WARPS:
        raise ValueError(f"arch={arch} is none that kernels are compiled for: use {', '.join(map(str, _WARPS))}.")
    return result(launches(), arch)


def launches(*files: str, sample: bool = False) -> list[tuple[str, list[Any]]]:
    """What the launches of these files of kernels/triton, or of all, compile to: (file, row) with the row's launch, architecture,
    kernel -> PTX, error, and kernel -> sizes of its variants.

    With `sample`, compute capability 9.0 has every launch, each other one as many as it takes to compile every kernel.

    tests/kernels/compiling.py compiles them, in a process of its own without Triton's interpreter. Raises RuntimeError outside a
    checkout, and where that process fails.
    """
    if not (ROOT / "tests" / "kernels" / "compiling.py").exists():
        raise RuntimeError("The launches to compile are in tests/kernels: run this in a checkout of the repository.")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ptx.json"
        command = [sys.executable, "-m", "tests.kernels.compiling", str(out), *(["--sample"] if sample else []), *files]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"Compiling ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
        return [(file, row) for file, *row in json.loads(out.read_text(encoding="utf-8"))]


def result(rows: Iterable[tuple[str, Sequence[Any]]], arch: int = 90) -> dict[str, Any]:
    """The raw result of what `launches` gives."""
    import triton

    from surokit.environment import environment

    found: list[dict[str, Any]] = []
    for file, (launch, target, kernels, error, sizes) in rows:
        if target != arch and target:
            continue
        if error:
            raise RuntimeError(f"{file}, {launch}: {error}")
        for name, ptx in kernels.items():
            found += [{"file": file, "launch": launch, **asdict(one)} for one in assemble(ptx, arch, list(sizes[name]))]
    return {
        "benchmark": "kernels, compiled and not run",
        "settings": {"for": f"sm_{arch}", "triton": triton.__version__},
        "environment": environment(),
        "compiled": found,
    }


def table(data: Mapping[str, Any]) -> str:
    """A Markdown table: a row for each kernel of a file, over the variants that its launches make."""
    head = [
        "file",
        "kernel",
        "variants",
        "registers",
        "spilled bytes",
        "shared bytes",
        "warps of a block",
        "resident warps",
    ]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in data["compiled"]:
        groups.setdefault((row["file"], row["kernel"]), []).append(row)

    def span(rows: Sequence[Mapping[str, Any]], name: str) -> str:
        low, high = (f(row[name] for row in rows) for f in (min, max))
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    rows = [
        [
            file,
            f"`{kernel}`",
            str(len(each)),
            span(each, "registers"),
            f"{max(row['spill_stores'] + row['spill_loads'] for row in each):,}",
            *(span(each, name) for name in ("shared", "warps", "resident_warps")),
        ]
        for (file, kernel), each in groups.items()
    ]
    return markdown(data, head, rows)
