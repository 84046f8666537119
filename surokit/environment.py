"""Describe this machine: versions and device for records and benchmarks, and `doctor()` for a person.

Everything is looked up when it is asked for; importing this file costs nothing and imports no torch.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.tables import html_table, text_table

if TYPE_CHECKING:
    from surokit.kernels.native import Kind

_BF16_FROM = (8, 0)
#: The quantized products by recipe, as tensor cores call them (surokit/formats.py); None is native nowhere.
PRODUCTS: dict[str, Kind | None] = {"fp8": "tensor", "fp8-block": "block", "mxfp8": "mx", "fp4": "nv", "mxfp4": None}
#: Recipes that store frozen weights, and the products that multiply the codes where they are native.
STORAGES: dict[str, Kind | None] = {"qfp8": "block", "qfp4": None, "qnf4": None}
_OPTIONAL = (
    # package, what it gives, the command that brings it
    ("pandas", "tables", "pip install pandas"),
    ("matplotlib", "plots", "pip install matplotlib"),
    ("tokenizers", "text data", "pip install tokenizers"),
    ("datasets", "data from the hub", "pip install datasets"),
    # named where they are there: nothing of ours needs them
    ("transformers", "its models and trainer", ""),
    ("peft", "its adapters", ""),
    ("bitsandbytes", "its optimizers and checkpoints", ""),
    ("jinja2", "chat templates", "pip install jinja2"),
    ("jupyterlab", "notebooks in a browser", 'pip install "surokit[lab]"'),
    ("nbclient", "surokit quickstart", 'pip install "surokit[lab]"'),
    ("nbconvert", "notebooks as web pages", 'pip install "surokit[lab]"'),
)
#: Oldest and newest release that the tests have run with; one between them passes. Newer ones install too: no upper bound is set.
TRIED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.7")}
_LOW_DISK_GIB = 5
_KERNELS = "surokit's kernels"


def environment() -> dict[str, Any]:
    """Return the versions and device of this process, as plain data.

    Keys: surokit, python, torch, triton, cuda, device, cuda_capability, cpu, cpu_vectors, cpu_bf16, cores, platform, date. What
    is not there is None; `device` is the GPU's name, or "cpu"; `cpu_vectors` the vector instructions that torch uses, as "AVX2";
    `cpu_bf16` the processor's instructions for bf16 products: those with "amx_bf16" are several times faster than those with
    "avx512_bf16", under one name. Imports torch.
    """
    import torch

    from surokit.kernels import bf16_instructions

    device, capability = "cpu", None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "surokit": installed_version("surokit"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "device": device,
        "cuda_capability": capability,
        "cpu": cpu_model(),
        "cpu_vectors": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16": bf16_instructions(),
        "cores": cores(),
        "platform": platform.platform(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    from surokit.kernels.reference.processor import cpuinfo

    told = cpuinfo().get("model name")
    if told:
        return told
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if found:
            return found
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_in_use(seconds: float = 0.25) -> float:
    """Return how many of the cores that this process may use are in use, by any process: a mean over `seconds`, which it takes."""
    if find_spec("psutil") is None:  # the package was installed without what it needs
        return 0.0
    import psutil

    percent = psutil.cpu_percent(interval=seconds, percpu=True)
    if hasattr(os, "sched_getaffinity"):
        percent = [percent[core] for core in os.sched_getaffinity(0) if core < len(percent)]
    return sum(percent) / 100


def spare_threads() -> int | None:
    """Return the number of threads for which there are free cores, at least 1, while the processor is busy; None while it is
    not."""
    used = cores_in_use()
    if not _is_busy(used):
        return None
    import psutil

    most = psutil.cpu_count(logical=False) or cores()  # as many as torch takes by itself
    return max(1, min(most, round(cores() - used)))


def _is_busy(used: float) -> bool:
    """Return whether so many cores in use are enough for torch's threads to hold up each other."""
    return used >= 0.25 * cores()


def float32_precision() -> str:
    """Return torch's "highest", "high" or "medium" for float32 products; "high" where its newer switches say so, since torch then
    refuses to be asked."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high"


@dataclass(frozen=True)
class Finding:
    """A Finding is one line of the doctor's table.

    state: ok, untried (a version that the tests have not run with), busy, native, float32 (products are computed in it), emulated,
    slower (a faster form cannot be used), missing or low.
    remedy: empty where none is needed.
    """

    group: str
    name: str
    state: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Doctor:
    """A Doctor holds what was found; it prints as a table in a terminal and in a notebook."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether everything that training needs is there."""
        return not any(f.state == "missing" and f.group == "core" for f in self.findings)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"The doctor has no line {name!r}: there are {', '.join(f.name for f in self.findings)}.")

    def _verdict(self) -> str:
        emulated = [f.name for f in self.findings if f.state == "emulated"]
        if not self.ok:
            return "Something that training needs is missing; the remedy stands beside it."
        old = any(f.name == _KERNELS and f.state == "missing" for f in self.findings)
        too_old = "This GPU is too old for surokit's kernels: everything runs, and slowly. " * old
        # never empty: no GPU multiplies all of them
        return f"Ready. {too_old}Emulated here, right in its numbers and no faster: {', '.join(emulated)}."

    def __repr__(self) -> str:
        rows = [(f.group, f.name, f.state, f.detail + (f"  ({f.remedy})" if f.remedy else "")) for f in self.findings]
        return f"surokit doctor\n\n{text_table(rows)}\n\n  {self._verdict()}"

    def _repr_html_(self) -> str:
        from html import escape

        rows = [(f.group, f.name, f.state, f.detail, f.remedy) for f in self.findings]
        table = html_table(rows, header=("", "", "state", "", "to get it"), title="surokit doctor")
        return f"{table}<p>{escape(self._verdict())}</p>"


def doctor(path: str | Path = ".") -> Doctor:
    """Look at this machine: versions, GPU, which formats are native, the front end, optional packages, disk space at `path`."""
    return Doctor((*_core(), *_formats(), *_front_end(), *_packages(), _disk(Path(path))))


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core() -> list[Finding]:
    findings = [Finding("core", "surokit", "ok", installed_version("surokit") or "not installed, run from its folder")]
    findings.append(Finding("core", "python", "ok", f"{platform.python_version()} ({sys.executable})"))
    for package in ("torch", "numpy", "safetensors"):
        version = installed_version(package)
        if version:
            findings.append(_present(package, version))
        else:
            findings.append(Finding("core", package, "missing", "not installed", f"pip install {package}"))
    version = installed_version("triton")
    if version:
        findings.append(_present("triton", version))
    else:
        why = "not installed; the reference kernels run instead"
        remedy = "pip install triton" if sys.platform == "linux" else ""
        findings.append(Finding("kernels", "triton", "missing", why, remedy))
    findings.append(_cpu())
    return findings


def _present(package: str, version: str) -> Finding:
    """Return the line of an installed package, which says so where its version is outside of what was tried."""
    oldest, newest = TRIED.get(package, (version, version))
    if _release(oldest) <= _release(version) <= _release(newest):
        return Finding("core", package, "ok", version)
    words = f"{version}; tried with {package} {oldest} and {newest}"
    return Finding("core", package, "untried", words, f'pip install "{package}=={newest}.*" if something fails')


def _release(version: str) -> list[int]:
    """Return major and minor of a version: [2, 14] of "2.14.0a0+git1234"."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _cpu() -> Finding:
    words = f"{cpu_model()}, {cores()} cores"
    used = cores_in_use()
    if not _is_busy(used):
        return Finding("core", "cpu", "ok", words)
    # torch's threads wait by spinning, so the one that has no core to itself holds up all of them at every operation
    remedy = "OMP_NUM_THREADS=1 for small models, OMP_WAIT_POLICY=passive for others, set before torch is imported"
    return Finding("core", "cpu", "busy", f"{words}, of which {used:.1f} are in use", remedy)


def gpu_and_capability() -> tuple[str, tuple[int, int] | None]:
    """Return (the GPU in words, its CUDA capability); no capability without a CUDA GPU."""
    if find_spec("torch") is None:
        return "unknown without torch", None
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        words = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB" + (
            f", 1 of {count}" if count > 1 else ""
        )
        if torch.version.hip:
            return f"{words}, ROCm {torch.version.hip}", None
        return f"{words}, compute capability {properties.major}.{properties.minor}", (
            properties.major,
            properties.minor,
        )
    if torch.version.cuda:
        return f"none found by torch, although it is built for CUDA {torch.version.cuda}", None
    return "none, and torch is a CPU build", None


def _formats() -> list[Finding]:
    words, capability = gpu_and_capability()
    found = [Finding("device", "gpu", "ok" if capability else "none", words)]
    if find_spec("torch") is None:
        return found  # nothing multiplies anything
    from surokit.kernels import native
    from surokit.kernels.ops import KERNELS_FROM

    if capability is not None:
        start = f"compute capability {KERNELS_FROM[0]}.{KERNELS_FROM[1]}"
        if capability >= KERNELS_FROM:
            found += [Finding("device", _KERNELS, "ok", f"from {start}"), _transposes()]
        else:
            why = f"they start at {start}; the definitions in PyTorch run instead, with the same numbers"
            found.append(Finding("device", _KERNELS, "missing", why, "a GPU of 2020 or later: A100, L4, RTX 30"))
    first = f"tensor cores from compute capability {_BF16_FROM[0]}.{_BF16_FROM[1]}"
    if capability is None:
        found += [_quantizers_on_cpu(), _bf16_on_cpu()]
    else:
        found.append(Finding("formats", "bf16", "native" if capability >= _BF16_FROM else "emulated", first))
    for name, kind in PRODUCTS.items():
        detail = str(native.TENSOR_CORES[kind]) if kind else "torch has no product for it"
        here = native.multiplies(kind, capability)
        detail = detail if here or not kind else f"native on {native.TENSOR_CORES[kind].where}"
        found.append(Finding("formats", name, "native" if here else "emulated", detail))
    for name, kind in STORAGES.items():
        here = native.multiplies(kind, capability)
        detail = "stored codes are multiplied" if here else "stored, and decoded for bf16 products"
        found.append(Finding("storage", name, "native" if here else "ok", detail))
    return found


def _transposes() -> Finding:
    from surokit.kernels.reference.transpose import transpose_fp8

    return _served("transposes of codes", transpose_fp8, "cuda:0")


def _quantizers_on_cpu() -> Finding:
    from surokit.kernels.reference.quantize import quantize

    return _served("quantizers on the CPU", quantize, "cpu")


def _served(name: str, function: Callable[..., Any], device: str) -> Finding:
    """Return what serves a function of kernels/reference; its C++ is built here, which takes seconds the first time."""
    import torch

    from surokit.kernels import serving

    served = serving(function, torch.device(device))
    return Finding("device", name, "slower" if served.missed else "ok", served.why)


def _bf16_on_cpu() -> Finding:
    from surokit.kernels import choices

    product = next(choice for choice in choices("cpu") if choice.op == "product bf16")
    return Finding("formats", "bf16", "native" if product.backend == "torch" else "float32", product.why)


def front_end() -> str:
    """Return what the user sits at: "terminal", "IPython", "Jupyter", "VS Code", "Colab" or "marimo". Imports no IPython."""
    if "google.colab" in sys.modules:
        return "Colab"
    if "marimo" in sys.modules and "IPython" not in sys.modules:
        return "marimo"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return "terminal"
    # VS Code leaves the notebook's path in the namespace of its kernels
    if "__vsc_ipynb_file__" in getattr(shell, "user_ns", {}):
        return "VS Code"
    return "Jupyter" if getattr(shell, "kernel", None) is not None else "IPython"


_FRONT_ENDS = {
    "terminal": "a plain terminal: progress as text, no live panel",
    "IPython": "IPython in a terminal: progress as text, no live panel",
    "Jupyter": "a Jupyter kernel (JupyterLab or Notebook): live panel",
    "VS Code": "a notebook in VS Code: live panel as a picture, without buttons",
    "Colab": "Colab: live panel as a picture, without buttons",
    "marimo": "marimo: progress as text",
}


def _front_end() -> list[Finding]:
    return [Finding("notebook", "front end", "ok", _FRONT_ENDS[front_end()])]


def _packages() -> list[Finding]:
    findings = []
    for package, gives, command in _OPTIONAL:
        if find_spec(package) is not None:
            findings.append(
                Finding("optional", package, "ok", f"{installed_version(package) or 'present'}, for {gives}")
            )
        elif command:
            findings.append(Finding("optional", package, "missing", f"for {gives}", command))
    return findings


def _disk(path: Path) -> Finding:
    where = path.resolve()
    while not where.exists():  # a folder to come: its nearest parent
        where = where.parent
    free = shutil.disk_usage(where).free / 2**30
    if free < _LOW_DISK_GIB:
        return Finding("disk", "free space", "low", f"{free:.1f} GiB at {where}", "checkpoints need more: free some")
    return Finding("disk", "free space", "ok", f"{free:,.0f} GiB at {where}")
