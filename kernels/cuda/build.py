"""Builds a .cu file of this folder with torch's extension loader, on first use, and says why where it cannot.

The files export plain C functions and include nothing of torch: nvcc takes about a second, and what it built outlives a
change of Python. Results lie in torch's own cache for extensions, one for each kind of GPU.

A build may be killed, and several processes may start one together. torch's lock is a file that a killed build leaves
behind, and whoever comes next waits for it for ever. So the build is done under a lock of the operating system, which
ends with its process: whoever holds it may remove what is left of torch's.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from ..cpu.build import Built, gist

OLDEST = (8, 0)  # compute capability; tests compile for sm_80, 89, 90, 100 and 120


@cache
def built(stem: str, device: torch.device) -> Built:
    """Return the library of kernels/cuda/<stem>.cu for a device. The first call on a kind of GPU builds it, which takes seconds."""
    if device.type != "cuda":
        return Built(None, f"{device.type} runs no CUDA C++")
    if torch.version.hip is not None:
        return Built(None, "this is torch for ROCm, which has no CUDA compiler")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return Built(None, "the GPU has compute capability {}.{}, below 8.0".format(*capability))
    return _build(stem, *capability)


@cache
def _build(stem: str, major: int, minor: int) -> Built:
    try:
        from torch.utils import cpp_extension  # slow to import, and logs where there is no CUDA
    except ImportError as error:  # it wants setuptools
        return Built(None, f"torch's loader of extensions cannot be imported ({error})")
    if cpp_extension.CUDA_HOME is None:
        return Built(
            None, "there is no CUDA compiler: install the CUDA toolkit (nvcc) or set CUDA_HOME, and start again"
        )
    arch = f"{major}{minor}"
    try:
        path = _locked_load(f"surokit_{stem}_sm{arch}", Path(__file__).with_name(f"{stem}.cu"), arch)
        return Built(ctypes.CDLL(path), f"kernels/cuda/{stem}.cu, built for sm_{arch}")
    except Exception as error:  # whatever goes wrong in a compiler, a linker or a file system, there is the reference
        return Built(None, f"kernels/cuda/{stem}.cu could not be built for sm_{arch} ({gist(error)})")


def _locked_load(name: str, source: Path, arch: str) -> str:
    """Return the path of the library that torch's loader built or found, with one process at a time in its folder."""
    import fcntl

    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(name, False))
    with (folder / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            name=name,
            sources=[str(source)],
            extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}"],
            build_directory=str(folder),
            is_python_module=False,
        )
