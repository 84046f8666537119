"""The clocks and the power beside a figure: from NVML, from the driver's program, or not at all."""

import os
import sys
from types import SimpleNamespace

import pytest

from surokit.bench import clocks
from surokit.bench.process import Worker
from surokit.profiler.monitoring import device
from tests.clocks import until

ECHO = "import json, sys; print('{}', flush=True)\nfor line in sys.stdin: print(json.dumps({'got': line}), flush=True)"


def test_nvml_tells_where_it_is_there(monkeypatch):
    started = []

    class Watch:
        def __init__(self, index, every_s):
            started.append(index)

        def start(self):
            pass

        def figures(self):
            return SimpleNamespace(means={"power_w": 600.0, "sm_mhz": 1700.0, "throttled": 0.5, "pcie_rx_mib_s": 3.0})

        def stop(self):
            started.append("over")

    monkeypatch.setattr(clocks, "find_spec", lambda name: object())
    monkeypatch.setattr(device, "DeviceWatch", Watch)
    with clocks.device_clocks() as found:
        assert found == {}
    assert found == {"power_w": 600.0, "sm_mhz": 1700.0, "throttled": 0.5}
    assert started == [0, "over"]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A driver's program that says two lines, a line that it cannot tell, half a line, and then waits to be ended."""
    said = tmp_path / "said"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nprintf '600.0, 1700, 2619\\n500.0, 1500, 2619\\n[N/A], 1600, [N/A]\\n55'\n"
        f'printf "%s" "$*" > {said}.new\nmv {said}.new {said}\nexec tail -f /dev/null\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(clocks, "find_spec", lambda name: None)
    return said


def test_without_nvml_the_drivers_program_is_asked(smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with clocks.device_clocks() as found:
        until(smi.exists)
    assert found == {"power_w": 550.0, "sm_mhz": 1600.0, "memory_mhz": 2619.0}
    assert smi.read_text().startswith("-i 3 --query-gpu=power.draw,clocks.sm")


def test_an_answer_of_a_worker_comes_with_them(smi):
    with Worker([sys.executable, "-c", ECHO], "W", clocks=True) as worker:
        answer = worker.ask({"a": 1})
    assert set(answer) == {"got", "clocks"}


def test_where_nothing_tells_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(clocks, "find_spec", lambda name: None)
    with clocks.device_clocks() as found:
        pass
    assert found == {}
