"""The device that the GPU suite runs on.

`pytest tests/gpu --rehearse` runs the bodies of test_triton.py on the CPU, where the reference serves every operation: slips
in the tests show without a GPU, and nothing is said about one.
"""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--rehearse", action="store_true", help="run the bodies of the GPU suite on the CPU")


@pytest.fixture(scope="session")  # so that what others make for it is not made where it is skipped
def device(request):
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if request.config.getoption("rehearse", False):
        return torch.device("cpu")
    pytest.skip("there is no CUDA device")


@pytest.fixture
def cuda(device):
    """For what has no meaning on a CPU."""
    if device.type != "cuda":
        pytest.skip("this needs a CUDA device")
    return device
