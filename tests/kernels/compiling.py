"""Compile the Triton kernels for GPUs that are not there, exactly as their public functions launch them.

A test file `test_triton_<op>.py` says what to compile: calls of the op's public functions, with the architectures claimed.

    LAUNCHES = {
        "per row": (FP8, lambda: quantize(matrix(), E4M3, 1, 0)),
    }

`python -m tests.kernels.compiling OUT.json [--sample] [op ...]` (one process, since Triton decides at import between interpreter
and compiler) makes every call once for each of its architectures, on CPU tensors, with a driver that names that architecture and
launches nothing. So what is compiled has the real constants, number of warps and alignment, and the PTX shows what a GPU will run.
Results stay unwritten. `compiled()` starts that process for the file asked for and returns the PTX:

    compiled()["quantize", "per row", 90]["row_kernel"]     # file, launch, architecture; kernel -> PTX

Compiling takes minutes, so it is sampled (`--sample`): sm_90 compiles every launch, another architecture launch after launch
until it has each kernel once. `pytest --whole` compiles every launch for every architecture that it claims.

`python -m surokit.bench compiled` says what ptxas makes of each kernel; surokit/bench/compiled.py starts the process for both.

Kernels without float8 E4M3 run on sm_80 as well (ANY), the others from sm_89 (FP8).
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from surokit.bench import compiled as bench

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / "kernels" / "triton").glob("*.py") if p.stem != "__init__")

FP8 = (89, 90, 100, 120)
ANY = (80, *FP8)

Launches = dict[str, tuple[tuple[int, ...], Callable[[], Any]]]


def matrix(M: int = 256, K: int = 512, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An operand for a launch: sizes and address in multiples of 16, as real ones are."""
    return torch.zeros(M, K, dtype=dtype)


def launched_kernels(path: Path) -> set[str]:
    """Names of the @triton.jit functions that a file launches: kernel[grid](...)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    jitted = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    launched = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }
    return jitted & launched


class Compiled:
    """PTX by file, launch and architecture. A file is compiled when it is asked for, a sample of it unless `whole`."""

    whole = False

    def __getitem__(self, where: tuple[str, str, int]) -> dict[str, str]:
        file, launch, arch = where
        return self.of(file)[launch, arch]

    def of(self, file: str) -> dict[tuple[str, int], dict[str, str]]:
        """Launch and architecture -> kernel -> PTX."""
        return {(launch, arch): ptx for launch, arch, ptx, error, _ in self._rows(file) if not error}

    def failures(self, file: str) -> dict[tuple[str, int], str]:
        """The message of every launch that does not compile."""
        return {(launch, arch): error for launch, arch, _, error, _ in self._rows(file) if error}

    def rows(self) -> list[tuple[str, Row]]:
        """Everything: (file, row)."""
        self.everything()
        return [(path.stem, row) for path in FILES for row in _known[path.stem]]

    def everything(self) -> None:
        """Compile what is not yet, in one process."""
        self._run([path.stem for path in FILES if path.stem not in _known])

    def _rows(self, file: str) -> list[Row]:
        if file not in _known:
            self._run([file])
        return _known[file]

    def _run(self, files: list[str]) -> None:
        if not files:
            return
        found: dict[str, list[Row]] = {file: [] for file in files}
        for file, (launch, arch, kernels, error, sizes) in bench.launches(*files, sample=not self.whole):
            found[file].append((launch, arch, kernels, error, sizes))
        _known.update(found)


@cache
def compiled() -> Compiled:
    return Compiled()


# launch, architecture, kernel -> PTX, error, kernel -> (bytes of shared memory, warps) of each of its variants
Row = tuple[str, int, dict[str, str], str, dict[str, list[tuple[int, int]]]]
_known: dict[str, list[Row]] = {}


def _compile(paths: list[Path], sample: bool) -> list[tuple[str, *Row]]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """A driver for an architecture: its number is also the device's, so that Triton keeps one cache for each."""

        def __init__(self, arch: int) -> None:
            self.arch = arch

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.arch, 32)

        def get_current_device(self) -> int:
            return self.arch

        def get_current_stream(self, device: int) -> int:
            return 0

    found: dict[str, str] = {}
    sizes: dict[str, list[tuple[int, int]]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        name = self.fn.__name__
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        found[name] = found.get(name, "") + kernel.asm["ptx"]
        sizes.setdefault(name, []).append((kernel.metadata.shared, kernel.metadata.num_warps))
        return kernel

    JITFunction.run = compile_only
    results: list[tuple[str, *Row]] = []
    for path in paths:
        test = ROOT / "tests" / "kernels" / f"test_triton_{path.stem}.py"
        if not test.exists():
            continue
        try:
            launches: Launches = getattr(importlib.import_module(f"tests.kernels.{test.stem}"), "LAUNCHES", {})
        except Exception as error:
            results.append((path.stem, "import", 0, {}, f"{type(error).__name__}: {error}", {}))
            continue
        had: dict[int, set[str]] = {}  # architecture -> kernels
        for name, (architectures, call) in launches.items():
            kernels: set[str] = set()  # of this launch
            for arch in sorted(architectures, key=lambda arch: arch != 90):
                if sample and kernels and kernels <= had.get(arch, set()):
                    continue
                driver.set_active(Absent(arch))
                found.clear()
                sizes.clear()
                message = ""
                try:
                    call()
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
                kernels |= found.keys()
                had.setdefault(arch, set()).update(found)
                results.append((path.stem, name, arch, dict(found), message, dict(sizes)))
    return results


if __name__ == "__main__":
    out, sample, named = sys.argv[1], "--sample" in sys.argv, {p.stem for p in FILES} & set(sys.argv)
    chosen = [p for p in FILES if p.stem in named or not named]  # all, or the ops named
    Path(out).write_text(json.dumps(_compile(chosen, sample)), encoding="utf-8")
