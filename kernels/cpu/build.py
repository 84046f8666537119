"""Build a .cpp file of this folder for the processor that runs it, on first use, and say why where that cannot be done.

The files export plain C functions and include nothing of torch: a compiler takes a few seconds, and what it built outlives a change
of Python. Results lie beside torch's own extensions, one for each text, compiler and kind of processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from surokit.kernels.reference.processor import cpuinfo

# -ffp-contract=off: a fused product and sum would round once where torch rounds twice
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC", "-pthread")
FOR_THIS_CPU = ("-march=native",)  # which some compilers do not know
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
    name, failed = f"kernels/cpu/{stem}.cpp", ""
    for compiler in _compilers():
        for flags in ((*FLAGS, *FOR_THIS_CPU), FLAGS):
            try:
                library = _loaded(Path(__file__).with_name(f"{stem}.cpp"), compiler, flags)
                return Built(library, f"{name}, built for this CPU")
            except Exception as error:  # whatever goes wrong in a compiler or a file system, there is the reference
                failed = failed or f"{name} could not be built ({gist(error)})"
    return Built(None, failed or f"there is no C++ compiler for {name}: install g++ or clang++, and start again")


def _compilers() -> Iterator[list[str]]:
    """Yield the commands of the compilers here: that which CXX names, or those that are usual."""
    for command in [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS:
        first, *more = shlex.split(command)
        if path := shutil.which(first):
            yield [path, *more]


def _loaded(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> ctypes.CDLL:
    """Return the library, built where it is not there, and once more where it cannot be loaded."""
    path = _path(source, compiler, flags)
    try:
        if path.stat().st_uid == os.getuid():  # nobody else's code is run
            return ctypes.CDLL(str(path))
    except OSError:
        pass
    _compile(source, compiler, flags, path)
    return ctypes.CDLL(str(path))


def _path(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """Return where the library lies that this compiler makes of the source for this processor."""
    program = Path(compiler[0]).resolve().stat()
    made_for = (*compiler, program.st_size, program.st_mtime_ns, *flags, platform.machine(), _processor())
    name = hashlib.blake2b(source.read_bytes() + repr(made_for).encode(), digest_size=12).hexdigest()
    cache_folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache_folder}/torch_extensions"
    return Path(folder).expanduser() / "surokit_cpu" / f"{source.stem}-{name}.so"


def _compile(source: Path, compiler: Sequence[str], flags: Sequence[str], path: Path) -> None:
    """Build a library. Processes that do it together each put a whole file there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        new = Path(scratch) / path.name
        command = [*compiler, *flags, str(source), "-o", str(new)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise RuntimeError(f"{compiler[0]} failed:\n{done.stderr}")
        new.replace(path)


def _processor() -> str:
    """Return what tells kinds of processors apart: the instructions that they have, where the system says so, else the machine."""
    told = cpuinfo()
    return told.get("flags") or told.get("Features") or platform.node()


def gist(error: Exception) -> str:
    """Return the line of a compiler's output that matters: the first with an error in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines[1:] if "error" in line.lower()), lines[0])[:200]
