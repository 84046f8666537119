"""Compile the Triton kernels for GPUs that are not there, exactly as their public functions launch them.

A test file `test_triton_<op>.py` says what to compile: calls of the op's public functions, with the architectures claimed.

    LAUNCHES = {
        "per row": (FP8, lambda: quantize(matrix(), E4M3, 1, 0)),
    }

`python -m tests.kernels.compiling OUT.json [--sample] [--only=90] [op ...]` (one process, since Triton decides at import between
interpreter and compiler) makes every call once for each of its architectures, on CPU tensors, with a driver that names that
architecture and launches nothing. So what is compiled has the real constants, number of warps and alignment, and the PTX shows what
a GPU will run. Results stay unwritten. `compiled()` starts that process for the file asked for and returns the PTX:

    compiled()["quantize", "per row", 90]["row_kernel"]     # file, launch, architecture; kernel -> PTX

The group "steps" is made of the benchmark's own steps (steps.py), at their shapes.

Compiling takes minutes, so it is sampled (`--sample`): sm_90 compiles every launch, another architecture launch after launch
until it has each kernel once. `pytest --whole` compiles every launch for every architecture that it claims. The same is done with
the oldest Triton that is allowed, which lies in a folder of its own: `compiled(oldest_triton())`, a sample of which is sm_90.

`python -m surokit.bench compiled` says what ptxas makes of each kernel; surokit/bench/compiled.py starts the process for both.

Kernels without float8 run on sm_80 as well (ANY), the others from sm_89 (FP8).
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from surokit.bench import compiled as bench

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / "kernels" / "triton").glob("*.py") if p.stem != "__init__")

STEPS = "steps"  # of the benchmark: tests/kernels/steps.py
GROUPS = [*(p.stem for p in FILES if (ROOT / "tests" / "kernels" / f"test_triton_{p.stem}.py").exists()), STEPS]

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
    """What one Triton makes of the launches. A group is compiled when it is asked for.

    Of this environment's Triton a sample, unless `whole`; of another one, which lies in a folder, sm_90 unless `whole`.
    """

    whole = False
    cache: Path | None = None  # for all processes of a test run

    def __init__(self, triton: Path | None = None) -> None:
        self.triton = triton
        self._known: dict[str, bench.Compilation] = {}

    def __getitem__(self, where: tuple[str, str, int]) -> dict[str, str]:
        group, launch, arch = where
        return self.of(group)[launch, arch]

    def of(self, group: str) -> dict[tuple[str, int], dict[str, str]]:
        """Launch and architecture -> kernel -> PTX."""
        return {(launch.name, launch.arch): launch.ptx for launch in self.launches(group) if not launch.error}

    def launches(self, group: str) -> tuple[bench.Launch, ...]:
        if group not in GROUPS:  # a file without launches of its own
            return ()
        if group not in self._known:
            self._compile([group])
        return self._known[group].launches

    def everything(self) -> bench.Compilation:
        """All groups; what is not yet known is compiled in one process."""
        self._compile([group for group in GROUPS if group not in self._known])
        versions = {known.triton for known in self._known.values()}
        return bench.Compilation(
            versions.pop(), tuple(launch for group in GROUPS for launch in self._known[group].launches)
        )

    def _compile(self, groups: list[str]) -> None:
        if not groups:
            return
        other = self.triton is not None and not self.whole
        compilation = bench.compiled(
            *groups, only=90 if other else None, sample=not self.whole, triton=self.triton, cache=self.cache
        )
        for group in groups:
            launches = tuple(launch for launch in compilation.launches if launch.group == group)
            self._known[group] = bench.Compilation(compilation.triton, launches)


@cache
def compiled(*triton: Path) -> Compiled:
    return Compiled(*triton)


def oldest_triton() -> Path:
    """The folder with the oldest Triton that pyproject.toml allows, which the Makefile puts beside this environment's own."""
    (version,) = re.findall(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return Path(sys.prefix) / f"triton-{version}"


def _compile(groups: list[str], only: int | None, sample: bool) -> dict[str, Any]:
    """{"triton": version, "launches": [...], "variants": {hash: ...}}: equal kernels are compiled and told once."""
    import triton
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

    variants: dict[str, dict[str, Any]] = {}
    launched: dict[str, str] = {}  # hash -> kernel, of one launch
    run = JITFunction.run
    target = 0

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel, name = run(self, *args, grid=grid, warmup=True, **named), self.fn.__name__
        if kernel.hash not in variants:
            ptx, sizes = kernel.asm["ptx"], (kernel.metadata.shared, kernel.metadata.num_warps)
            assembled = asdict(bench.assemble(ptx, target, sizes)) if target == (only or 90) else None
            file = self.fn.__module__.rpartition(".")[2]
            variants[kernel.hash] = {"file": file, "kernel": name, "ptx": ptx, "assembled": assembled}
        launched[kernel.hash] = name
        return kernel

    JITFunction.run = compile_only
    launches: list[dict[str, Any]] = []
    for group in groups:
        try:
            module = importlib.import_module(f"tests.kernels.{STEPS if group == STEPS else f'test_triton_{group}'}")
        except Exception as error:
            failed = {"group": group, "name": "import", "arch": 0, "variants": [], "error": bench.short(error)}
            launches.append(failed)
            continue
        calls: Launches = getattr(module, "LAUNCHES", {})
        had: dict[int, set[str]] = {}  # architecture -> kernels
        for name, (architectures, call) in calls.items():
            kernels: set[str] = set()  # of this launch
            for arch in sorted(architectures, key=lambda arch: arch != 90):
                if (only and arch != only) or (sample and kernels and kernels <= had.get(arch, set())):
                    continue
                target = arch
                driver.set_active(Absent(arch))
                launched.clear()
                message = ""
                try:
                    with redirect_stdout(io.StringIO()):  # Triton prints the code that ptxas refuses
                        call()
                except Exception as error:
                    message = bench.short(error)
                kernels |= set(launched.values())
                had.setdefault(arch, set()).update(launched.values())
                launches.append(
                    {"group": group, "name": name, "arch": arch, "variants": list(launched), "error": message}
                )
    return {"triton": triton.__version__, "launches": launches, "variants": variants}


if __name__ == "__main__":
    out, named = sys.argv[1], set(GROUPS) & set(sys.argv)
    only = next((int(option.removeprefix("--only=")) for option in sys.argv if option.startswith("--only=")), None)
    chosen = [group for group in GROUPS if group in named or not named]  # all, or those named
    Path(out).write_text(json.dumps(_compile(chosen, only, "--sample" in sys.argv)), encoding="utf-8")
