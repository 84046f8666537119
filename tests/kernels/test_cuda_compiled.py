"""Every .cu file of kernels/cuda compiles for every architecture that it claims, and what comes out is what its text promises.

nvcc comes from NVIDIA's wheels, which are test dependencies; a CUDA toolkit on the PATH will do as well. Nothing here needs a GPU.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from surokit.kernels.cuda import transpose

FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"
SOURCES = sorted(FOLDER.glob("*.cu"))
ARCHITECTURES = [80, 89, 90, 100, 120]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA has no nvcc for this system")


@cache
def nvcc() -> str:
    """The compiler of the wheels, or the one on the PATH."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in Path(folder).glob("cu*/bin/nvcc"):
            return str(path)
    on_path = shutil.which("nvcc")
    assert on_path, "there is no nvcc: install surokit[test], or a CUDA toolkit"
    return on_path


def run(*arguments) -> str:
    """What nvcc prints; any warning is an error."""
    command = [nvcc(), "-std=c++17", "-Werror", "all-warnings", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_machine_code_without_spills(source, arch, tmp_path):
    out = tmp_path / "out.cubin"
    said = run("-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", source, "-o", out)
    assert out.read_bytes().startswith(b"\x7fELF")
    kernels = re.findall(rf"Compiling entry function '\w+' for 'sm_{arch}'", said)
    assert len(kernels) == len(re.findall(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", said)) > 0


def test_transpose_moves_16_bytes_at_a_time(tmp_path):
    """The forms for aligned rows: in and out of memory in 16 bytes only, one round of loads for the whole tile."""
    out = tmp_path / "out.ptx"
    run("-ptx", "-arch=sm_90", FOLDER / "transpose.cu", "-o", out)
    kernels = re.split(r"\.entry ", out.read_text(encoding="utf-8"))[1:]
    assert len(kernels) == 8  # 8 and 4 bits, with rows aligned or not on either side
    for kernel in kernels:
        ((bits, wide_in, wide_out),) = set(re.findall(r"ILi(\d)ELb(\d)ELb(\d)E", kernel))
        accesses = re.findall(r"\b((?:ld|st)\.(?:global|shared)\S*)", kernel)
        rows = 32 // int(bits)
        assert accesses.count("ld.global.v4.u32") == (rows if wide_in == "1" else 0)
        assert accesses.count("ld.global.u8") == (0 if wide_in == "1" else 16 * rows)
        assert accesses.count("st.global.v4.u32") == (rows if wide_out == "1" else 0)
        assert accesses.count("st.global.u8") == (0 if wide_out == "1" else 16 * rows)
        assert accesses.count("st.shared.u32") == 4 * rows
        assert accesses.count("ld.shared.v4.u32") == rows
        assert kernel.count("bar.sync") == 1


def test_the_library_loads_and_answers(tmp_path):
    """Both halves of the file, with the real runtime: a matrix too large for a grid is refused before any device is asked."""
    out = tmp_path / "transpose.so"
    libraries = Path(nvcc()).parents[1] / "lib"  # the wheels' place, which their nvcc does not look in
    run(
        "-shared",
        "-Xcompiler",
        "-fPIC,-Wall,-Wextra",
        "-arch=sm_90",
        FOLDER / "transpose.cu",
        f"-L{libraries}",
        "-o",
        out,
    )
    function = ctypes.CDLL(str(out)).transpose
    function.argtypes, function.restype = transpose._ARGUMENTS, ctypes.c_char_p
    for bits in (4, 8):
        assert function(16, 16, 2**50, 2**50, bits, None) == b"invalid configuration argument"
