"""Every test of a kernel runs with the corrected interpreter and with poisoned memory."""

import pytest

from tests.kernels.compiling import compiled
from tests.kernels.interpreter import correct, poisoned

correct()


@pytest.fixture(scope="session", autouse=True)
def _whole(request):
    compiled().whole = request.config.getoption("--whole")


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield
