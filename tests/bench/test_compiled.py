"""What ptxas says of a kernel. What it says of ours: tests/kernels/test_compiled.py, which compiles them."""

import json

import pytest

from surokit.bench import compiled as bench
from tests.kernels.compiling import ROOT
from tests.refusals import refused

ARCH = 90

# a kernel that keeps 280 floats at once, where a thread has 255 registers
SPILLS = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry spills(.param .u64 p) .maxntid 128
{{
    .reg .b64 %p; .reg .f32 %f<{n}>; .reg .f32 %s;
    ld.param.u64 %p, [p];
    {loads}
    bar.sync 0;
    mov.f32 %s, 0f00000000;
    {sums}
    st.global.f32 [%p], %s;
    ret;
}}
"""


def test_a_spill_is_found():
    n = 280
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%p+{4 * i}];" for i in range(n))
    sums = "\n".join(f"fma.rn.f32 %s, %s, %f{i}, %f{n - 1 - i};" for i in range(n))
    one = bench.assemble(SPILLS.format(n=n, loads=loads, sums=sums), ARCH, (4096, 4))
    assert one.kernel == "spills"
    assert one.registers == 255
    assert one.spilled > 100
    other = bench.assemble(SPILLS.format(n=8, loads="\n".join(loads.split("\n")[:8]), sums=""), ARCH, (1024, 8))
    assert (other.spilled, other.stack, other.shared, other.warps) == (0, 0, 1024, 8)
    with pytest.raises(RuntimeError, match=r"(?s)ptxas refuses a kernel for sm_90: .*nonsense"):
        bench.assemble(".version 8.4\n.target sm_90a\nnonsense", ARCH, (0, 4))


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "resident"),
    [
        (32, 0, 4, 64),  # as many as there are
        (255, 0, 4, 8),  # 65536 registers / 8192 a warp
        (33, 0, 4, 48),  # registers are handed out by 256 a warp: 40 a thread, 51 warps, 12 blocks
        (32, 100 * 1024, 8, 16),  # two blocks in 228 KiB
        (32, 0, 1, 32),  # 32 blocks at most
    ],
)
def test_resident_warps_by_hand(registers, shared, warps, resident):
    assert bench.resident(90, registers, shared, warps) == resident


def test_an_unknown_architecture_is_refused():
    with refused(ValueError):
        bench.run(75)


def test_the_committed_file_names_kernels_that_exist():
    raw = json.loads((ROOT / "docs" / "measurements" / "kernels-compiled.json").read_text(encoding="utf-8"))
    files = {path.stem for path in (ROOT / "kernels" / "triton").glob("*.py")}
    assert {row["file"] for row in raw["compiled"]} <= files
    assert bench.table(raw).startswith("| file | kernel |")
