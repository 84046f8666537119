"""Build a .cpp file of this folder for the processor that runs it, on first use, and say why where that cannot be done.

The files export plain C functions and include nothing of torch: a compiler takes a few seconds, and what it built outlives a change
of Python. Results lie beside torch's own extensions, one for each text, compiler and kind of processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# -ffp-contract=off: a fused product and sum would round once where torch rounds twice
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 120


@dataclass(frozen=True)
class Built:
    """A Built is a loaded library, or None; and why, in words for a table of choices."""

    library: ctypes.CDLL | None
    why: str


@cache
def built(stem: str) -> Built:
    """Return the library of kernels/cpu/<stem>.cpp. The first call on a machine builds it, which takes seconds."""
    name = f"kernels/cpu/{stem}.cpp"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        return Built(None, f"there is no C++ compiler for {name}: install g++ or clang++, and start again")
    try:
        return Built(
            ctypes.CDLL(str(_compiled(Path(__file__).with_name(f"{stem}.cpp"), compiler))),
            f"{name}, built for this CPU",
        )
    except Exception as error:  # whatever goes wrong in a compiler or a file system, there is the reference
        return Built(None, f"{name} could not be built ({gist(error)})")


def _compiled(source: Path, compiler: str) -> Path:
    """Return the path of what was built of a source. Processes that build the same together each put a whole file there."""
    text = source.read_bytes()
    made_for = "\n".join((compiler, *FLAGS, platform.machine(), _processor()))
    name = f"{source.stem}-{hashlib.blake2b(text + made_for.encode(), digest_size=12).hexdigest()}.so"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser() / "surokit_cpu"
    if (path := folder / name).exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        new = Path(scratch) / name
        done = subprocess.run(
            [compiler, *FLAGS, str(source), "-o", str(new)], capture_output=True, text=True, timeout=PATIENCE_S
        )
        if done.returncode:
            raise RuntimeError(f"{compiler} failed:\n{done.stderr}")
        new.replace(path)
    return path


def _processor() -> str:
    """Return what tells kinds of processors apart: the instructions that they have, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def gist(error: Exception) -> str:
    """Return the line of a compiler's output that matters: the first with an error in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines[1:] if "error" in line.lower()), lines[0])[:200]
