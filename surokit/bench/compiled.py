"""Compile the Triton kernels for a GPU that is not there, and list registers, spills and shared memory by Triton's own
ptxas.

The launches that are compiled are those of the tests and of the benchmark's steps (tests/kernels/compiling.py), so this
runs in a checkout. Each kernel is assembled once more with `ptxas -v`, which says how many registers a thread has, and how
many bytes it has to put into local memory because they are too few: a spill costs bandwidth that no roofline knows of. From
registers, warps and shared memory follows how many warps a multiprocessor can hold.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
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
    """An Assembled describes one kernel: registers and bytes of a thread, shared bytes and warps of a block, warps that a
    multiprocessor holds."""

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
        """Return the bytes of a thread that go to local memory or come from it."""
        return self.spill_stores + self.spill_loads


def assemble(ptx: str, arch: int, sizes: tuple[int, int]) -> Assembled:
    """Assemble a module of PTX with ptxas, called as Triton calls it; sizes: (bytes of shared memory, warps) of a block.

    Raises RuntimeError where ptxas refuses the code.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(GPUTarget("cuda", arch, 32))
    log = io.StringIO()
    try:
        with redirect_stdout(log), knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            backend.make_cubin(ptx, {}, backend.parse_options({}), arch)
    except Exception as error:
        raise RuntimeError(f"ptxas refuses a kernel for sm_{arch}: {short(error)}") from error
    entry = _ENTRY.search(log.getvalue())
    if entry is None:
        raise RuntimeError(f"ptxas says nothing of registers and spills: {log.getvalue()[:400]}")
    registers, (shared, warps) = int(entry["registers"]), sizes
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


def short(error: BaseException) -> str:
    """Return a compiler's message, without the code that it is about."""
    return f"{type(error).__name__}: {error}"[:1500]


def resident(arch: int, registers: int, shared: int, warps: int) -> int:
    """Return how many warps of such blocks a multiprocessor of this architecture holds at once."""
    a_warp = -(-registers * 32 // 256) * 256  # handed out in pieces of 256
    blocks = min(
        _REGISTERS // a_warp // warps,
        _WARPS[arch] // warps,
        _SHARED_KIB[arch] * 1024 // (shared + _RESERVED),
        _BLOCKS[arch],
    )
    return blocks * warps


@dataclass(frozen=True)
class Variant:
    """A Variant is a kernel of one of the files of kernels/triton, compiled for an architecture with constants of its own."""

    file: str
    kernel: str
    ptx: str
    assembled: Assembled | None  # for the architecture that was asked for, by default 90


@dataclass(frozen=True)
class Launch:
    """A Launch is a call of a public function, compiled for an architecture: the kernels it launched, or the compiler's
    message."""

    group: str  # the file of kernels/triton whose tests make it, or "steps"
    name: str
    arch: int
    variants: tuple[Variant, ...]
    error: str = ""

    @property
    def ptx(self) -> dict[str, str]:
        """Return kernel -> PTX of its variants, one after the other."""
        found: dict[str, str] = {}
        for variant in self.variants:
            found[variant.kernel] = found.get(variant.kernel, "") + variant.ptx
        return found


@dataclass(frozen=True)
class Compilation:
    """A Compilation holds launches, and the version of Triton that compiled them."""

    triton: str
    launches: tuple[Launch, ...]


def run(arch: int = 90) -> dict[str, Any]:
    """Compile and assemble every kernel as it is launched, for compute capability arch / 10; return the raw result.

    Raises RuntimeError outside a checkout, and where a launch does not compile.
    """
    if arch not in _WARPS:
        raise ValueError(f"arch={arch} is none that kernels are compiled for: use {', '.join(map(str, _WARPS))}.")
    return result(compiled(only=arch), arch)


def compiled(
    *groups: str, only: int | None = None, sample: bool = False, triton: Path | None = None, cache: Path | None = None
) -> Compilation:
    """Compile the launches of these groups, or of all: for the architecture `only`, or for each that they claim.

    With `sample`, compute capability 9.0 has every launch, each other one as many as it takes to compile every kernel.
    triton: a folder with another Triton than this environment's. cache: a folder where compiled kernels are kept for the
    next call.

    tests/kernels/compiling.py compiles them, in a process of its own without Triton's interpreter. Raises RuntimeError
    outside a checkout, and where that process fails.
    """
    if not (ROOT / "tests" / "kernels" / "compiling.py").exists():
        raise RuntimeError("The launches to compile are in tests/kernels: run this in a checkout of the repository.")
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(cache or Path(folder) / "cache"), "TMPDIR": folder}
        if triton:
            environment["PYTHONPATH"] = str(triton)
        out = Path(folder) / "compiled.json"
        options = [*(["--sample"] if sample else []), *([f"--only={only}"] if only else [])]
        command = [sys.executable, "-m", "tests.kernels.compiling", str(out), *options, *groups]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise RuntimeError(f"Compiling ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
        raw = json.loads(out.read_text(encoding="utf-8"))
    variants = {
        key: Variant(**{**v, "assembled": v["assembled"] and Assembled(**v["assembled"])})
        for key, v in raw["variants"].items()
    }
    return Compilation(
        raw["triton"],
        tuple(
            Launch(**{**each, "variants": tuple(variants[key] for key in each["variants"])}) for each in raw["launches"]
        ),
    )


def result(compilation: Compilation, arch: int = 90) -> dict[str, Any]:
    """Return the raw result of a compilation: a row a variant, with the first launch that has it."""
    from surokit.environment import environment

    found: dict[Variant, str] = {}
    for launch in compilation.launches:
        if launch.error and launch.arch in (arch, 0):
            raise RuntimeError(f"{launch.group}, {launch.name}: {launch.error}")
        for variant in launch.variants if launch.arch == arch else ():
            found.setdefault(variant, launch.name)
    return {
        "benchmark": "kernels, compiled and not run",
        "settings": {"for": f"sm_{arch}", "triton": compilation.triton},
        "environment": environment(),
        "compiled": [
            {"file": variant.file, "launch": name, **asdict(variant.assembled)}
            for variant, name in found.items()
            if variant.assembled
        ],
    }


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: a row for each kernel of a file, over the variants that its launches make."""
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
