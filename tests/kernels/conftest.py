"""Every test of a kernel runs with the corrected interpreter and with poisoned memory."""

import pytest

from tests.kernels.compiling import Compiled
from tests.kernels.interpreter import correct, poisoned

correct()


@pytest.fixture(scope="session", autouse=True)
def _compiling(request, tmp_path_factory):
    """Processes of a run share what they compile; the next run compiles anew."""
    Compiled.whole = request.config.getoption("--whole")
    base = tmp_path_factory.getbasetemp()
    Compiled.cache = (base.parent if hasattr(request.config, "workerinput") else base) / "triton"


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield
