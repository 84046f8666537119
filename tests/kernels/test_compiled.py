"""Every Triton kernel compiles for every architecture that it claims, as it is launched; opcodes where they matter."""

import re

import pytest

from tests.kernels.compiling import FILES, compiled, launched_kernels


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
