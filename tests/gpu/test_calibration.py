"""A calibration of a real device: below the datasheet's peaks, not far below, and the same twice.

Needs torch, numpy and pytest. With --rehearse on the CPU, which has ceilings and no peaks.
"""

import gc
import json

import pytest
import torch

from surokit.calibration import calibrate
from surokit.kernels import native
from surokit.planner import GPUS, Gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture
def gpu(device, folder):
    """Measured by the first test that asks, read back by the others."""
    return calibrate(device, seconds=10 if device.type == "cuda" else 0.5, cache=folder)


def test_everything_that_applies_is_measured(gpu, device):
    reached = gpu.ceilings
    assert "without" not in reached.measured
    wanted = {
        "bf16_tflops",
        "fp32_tflops",
        "bandwidth_tb_s",
        "launch_us",
        "host_adam_params_s",
        "host_accumulate_params_s",
    }
    if device.type == "cuda":
        wanted |= {"host_gb_s"} | ({"peer_gb_s"} if torch.cuda.device_count() > 1 else set())
    if native.available("tensor", device):
        wanted |= {"fp8_tflops"}
    figures = {name for name in vars(reached) if name != "measured" and getattr(reached, name) is not None}
    assert figures == wanted


def test_ceilings_are_under_the_peaks_and_not_far_under(gpu):
    """A peak that is passed, or missed by far, means a wrong row or a wrong unit."""
    reached = gpu.ceilings
    for name, least in (("bf16_tflops", 0.4), ("fp8_tflops", 0.3), ("bandwidth_tb_s", 0.5), ("host_gb_s", 0.1)):
        peak, rate = getattr(gpu, name), getattr(reached, name)
        if peak is not None and rate is not None:
            assert least * peak < rate < 1.02 * peak, name
    if reached.fp8_tflops is not None:
        assert reached.fp8_tflops > 1.2 * reached.bf16_tflops
    assert 0.5 < reached.launch_us < 100


def test_the_row_is_the_tables_where_it_has_one(gpu, device):
    if device.type == "cpu":
        assert gpu.name.startswith("cpu: ")
        assert gpu.device == "cpu"
        return
    row = GPUS.get(gpu.name)
    if row is not None:
        assert (gpu.bf16_tflops, gpu.watts, gpu.source) == (row.bf16_tflops, row.watts, row.source)
        assert gpu.memory_gib == pytest.approx(torch.cuda.get_device_properties(device).total_memory / 2**30, abs=0.01)
        assert row.memory_gib is None or 0.9 < gpu.memory_gib / row.memory_gib <= 1.0  # nominal
    assert gpu.capability is None or gpu.capability == torch.cuda.get_device_capability(device)


def test_a_second_measuring_agrees(gpu, device):
    """Median rates repeat but for the clock, which falls as a GPU warms; a busy processor moves more."""
    again = calibrate(device, seconds=10 if device.type == "cuda" else 0.5, cache=False)
    assert again.ceilings is not None
    for name in ("bf16_tflops", "bandwidth_tb_s"):
        rel = 0.25 if device.type == "cuda" else 0.9
        assert getattr(again.ceilings, name) == pytest.approx(getattr(gpu.ceilings, name), rel=rel), name


def test_the_result_is_read_back(gpu, device, folder):
    (file,) = folder.iterdir()
    assert Gpu.from_json(json.loads(file.read_text(encoding="utf-8"))["gpu"]) == gpu
    assert calibrate(device, seconds=0.1, cache=folder) == gpu


def test_memory_is_given_back(gpu, cuda):
    gc.collect()  # what other tests left would go meanwhile
    held = torch.cuda.memory_allocated(cuda)
    calibrate(cuda, seconds=1, cache=False)
    assert torch.cuda.memory_allocated(cuda) == held
