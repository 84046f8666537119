"""Every Triton kernel compiles for every architecture that it claims, as it is launched, with the oldest Triton that is allowed and
with this environment's; on an H100 none spills beyond a bound."""

import re
from importlib.metadata import version

import pytest

from surokit.bench import compiled as bench
from tests.kernels.compiling import FILES, STEPS, compiled, launched_kernels, oldest_triton

OURS, OLDEST = version("triton"), oldest_triton().name.removeprefix("triton-")
TRITONS = sorted({OLDEST, ".".join(OURS.split(".")[: OLDEST.count(".") + 1])})  # one, where ours is the oldest

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(1200)]  # a fixture compiles for minutes


@pytest.fixture(scope="module", params=TRITONS)
def tried(request):
    """All launches, compiled by one Triton."""
    own = OURS.startswith(request.param)
    if not own and not oldest_triton().exists():
        pytest.fail(f"There is no Triton {OLDEST} in {oldest_triton()}: `make test` puts it there.")
    made = compiled() if own else compiled(oldest_triton())
    assert made.everything().triton.startswith(request.param)
    return made


def test_every_launch_compiles(tried):
    failed = [x for x in tried.everything().launches if x.error]
    assert not failed, "\n\n".join(f"{x.group}, {x.name}, sm_{x.arch}: {x.error}" for x in failed)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_launched_kernel_is_compiled(path):
    """LAUNCHES of tests/kernels/test_triton_<op>.py reaches all of them, from sm_90 on."""
    compiled().everything()
    for arch in (90, 100, 120):
        kernels = {name for (_, a), ptx in compiled().of(path.stem).items() if a == arch for name in ptx}
        missing = launched_kernels(path) - kernels
        assert not missing, f"{path.name} launches {missing}: add a call to LAUNCHES in test_triton_{path.stem}.py"


def test_the_code_is_for_the_architecture_claimed(tried):
    for launch in tried.everything().launches:
        for variant in launch.variants:
            assert re.search(rf"\.target sm_{launch.arch}a?\b", variant.ptx)


def test_steps_of_the_benchmark_launch_what_they_train_with(tried):
    launches = {launch.name: {variant.file for variant in launch.variants} for launch in tried.launches(STEPS)}
    assert launches["0.6b lora bf16"] == {"norm", "qk", "swiglu", "loss"}
    assert launches["8b full fp8"] == {"norm", "qk", "swiglu", "loss", "delayed"}
    assert launches["8b lora qfp8"] == {
        "norm",
        "qk",
        "swiglu",
        "loss",
        "quantize",
        "transpose",
    }  # the last without nvcc
    assert launches["0.6b lora qfp4"] >= {"nvfp4"}
    assert launches["8b lora qnf4"] >= {"nf4"}
    assert launches["0.6b lora fp8, without qk"] >= {"rope"}


# -- registers and spills

# bytes of a thread that may go to local memory and come back, by file, launch and Triton
SPILLED = {
    # one search over scales, of a storage that no step quantizes again
    **{("nvfp4", "16x16 mae", triton): 1024 for triton in TRITONS},
    # ptxas keeps 96 registers for five programs a multiprocessor; 57 launches in a step of the smallest model, all of it trained
    ("norm", "0.6b full bf16", "3.6"): 16,
}


@pytest.fixture(scope="module")
def assembled(tried):
    """What ptxas makes of all of them for an H100."""
    made = tried.everything()
    return bench.result(bench.Compilation(made.triton, tuple(x for x in made.launches if not x.error)), 90)


def test_no_kernel_spills(assembled):
    triton = next(name for name in TRITONS if assembled["settings"]["triton"].startswith(name))
    allowed = {key: most for key, most in SPILLED.items() if key[2] == triton}
    found: dict[tuple[str, str, str], int] = {}
    for row in assembled["compiled"]:
        key = row["file"], row["launch"], triton
        found[key] = max(found.get(key, 0), row["spill_stores"] + row["spill_loads"])
    assert len(found) > 60
    assert {key: spilled for key, spilled in found.items() if spilled > allowed.get(key, 0)} == {}
    assert all(found[key] for key in allowed), "what no longer spills needs no bound"


def test_every_kernel_fits_a_multiprocessor(assembled):
    assert all(8 <= row["resident_warps"] <= 64 for row in assembled["compiled"])
    assert all(16 <= row["registers"] <= 255 for row in assembled["compiled"])


def test_the_table_has_a_row_a_kernel(assembled):
    table = bench.table(assembled)
    kernels = {(row["file"], row["kernel"]) for row in assembled["compiled"]}
    assert all(f"| {file} | `{kernel}` |" in table for file, kernel in kernels)
    assert table.count("\n") == len(kernels) + 3
    assert "kernels, compiled and not run; for sm_90" in table
