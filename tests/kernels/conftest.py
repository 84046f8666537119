"""Every test of a kernel runs with the corrected interpreter and with poisoned memory."""

import pytest

from tests.kernels.interpreter import correct, poisoned

correct()


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield
