"""Every Triton kernel compiles for every architecture that it claims, as it is launched; on an H100 none spills beyond a bound."""

import re

import pytest

from surokit.bench import compiled as bench
from tests.kernels.compiling import FILES, compiled, launched_kernels

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module", autouse=True)
def _everything():
    compiled().everything()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_launched_kernel_is_compiled(path):
    """LAUNCHES of tests/kernels/test_triton_<op>.py reaches all of them, from sm_90 on."""
    assert not compiled().failures(path.stem)
    for arch in (90, 100, 120):
        kernels = {name for (_, a), ptx in compiled().of(path.stem).items() if a == arch for name in ptx}
        missing = launched_kernels(path) - kernels
        assert not missing, f"{path.name} launches {missing}: add a call to LAUNCHES in test_triton_{path.stem}.py"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_code_is_for_the_architecture_claimed(path):
    for (_, arch), kernels in compiled().of(path.stem).items():
        for ptx in kernels.values():
            assert re.search(rf"\.target sm_{arch}a?\b", ptx)


# -- registers and spills

# bytes of a thread that may go to local memory and come back; one search over scales, of a storage that no step quantizes again
SPILLED = {("nvfp4", "16x16 mae"): 1024}


@pytest.fixture(scope="module")
def assembled():
    """What ptxas makes of all of them for an H100."""
    return bench.result([(file, row) for file, row in compiled().rows() if not row[3]], 90)


def test_no_kernel_spills(assembled):
    found: dict[tuple[str, str], int] = {}
    for row in assembled["compiled"]:
        key = row["file"], row["launch"]
        found[key] = max(found.get(key, 0), row["spill_stores"] + row["spill_loads"])
    assert len(found) > 60
    assert {key: spilled for key, spilled in found.items() if spilled > SPILLED.get(key, 0)} == {}
    assert all(found[key] for key in SPILLED), "what no longer spills needs no bound"


def test_every_kernel_fits_a_multiprocessor(assembled):
    assert all(8 <= row["resident_warps"] <= 64 for row in assembled["compiled"])
    assert all(16 <= row["registers"] <= 255 for row in assembled["compiled"])


def test_the_table_has_a_row_a_kernel(assembled):
    table = bench.table(assembled)
    kernels = {(row["file"], row["kernel"]) for row in assembled["compiled"]}
    assert all(f"| {file} | `{kernel}` |" in table for file, kernel in kernels)
    assert table.count("\n") == len(kernels) + 3
    assert "kernels, compiled and not run; for sm_90" in table
