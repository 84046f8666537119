"""The thread that reads a GPU's state, on a library and a device made up here, and on this machine, which has none."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surokit.profiler.monitoring import device
from surokit.profiler.monitoring.device import DeviceWatch
from tests.clocks import until
from tests.train.toys import make_session


class NotSupported(Exception):
    pass


class Nvml:
    """Names of pynvml that are read; `reasons` are answered in turn, `missing` names raise."""

    NVML_CLOCK_SM = 1
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, reasons=(0,), missing=()):
        self.reasons, self.missing, self.reads, self.open, self.asked = list(reasons), missing, 0, 0, []

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked.append(index)
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle):
        self._read("power")
        return 250_000 + 100_000 * (self.reads > 1)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert kind == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons[min(self.reads, len(self.reasons)) - 1]

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        self._read("pcie", 0)
        return 2048 * (1 + counter)

    def _read(self, name, count=1):
        if name in self.missing:
            raise NotSupported(f"no {name} here")
        self.reads += count


@pytest.fixture
def gpu(monkeypatch):
    """A device with the UUID of torch, which is NVML's without its prefix."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234-abcd"))


def running():
    return [thread for thread in threading.enumerate() if thread.name == "surokit-device"]


def watch(monkeypatch, nvml, samples=4):
    """A DeviceWatch that has read so many samples, and is stopped."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with DeviceWatch(every_s=0.01) as w:
        until(lambda: w.figures().samples >= samples or not running())
        latest = w.latest
    return w, latest


def test_means_and_reasons(monkeypatch, gpu):
    nvml = Nvml(reasons=[0x01, 0x04, 0x24, 0x02])  # idle; power cap; with thermal; a clock that somebody set
    w, latest = watch(monkeypatch, nvml)
    assert nvml.asked == ["GPU-1234-abcd"]
    assert nvml.open == 0
    assert latest["sm_mhz"] == 1980
    assert set(latest) == {"power_w", "sm_mhz", "throttled", "pcie_rx_mib_s", "pcie_tx_mib_s"}
    figures = w.figures()
    n = figures.samples
    assert n >= 4
    assert figures.means["power_w"] == pytest.approx((250 + 350 * (n - 1)) / n)
    assert (figures.means["pcie_rx_mib_s"], figures.means["pcie_tx_mib_s"]) == (4, 2)
    assert figures.means["throttled"] == pytest.approx(2 / n)
    assert figures.reasons == {"power cap": pytest.approx(2 / n), "thermal": pytest.approx(1 / n)}
    assert w.notes == []
    assert w.latest == {}
    assert not running()


def test_what_a_device_does_not_tell_is_said_once(monkeypatch, gpu):
    w, latest = watch(monkeypatch, Nvml(missing=("pcie", "power")))
    assert set(latest) == {"sm_mhz", "throttled"}
    assert w.notes == [
        "power_w is not read: NotSupported: no power here",
        "pcie_rx_mib_s is not read: NotSupported: no pcie here",
        "pcie_tx_mib_s is not read: NotSupported: no pcie here",
    ]
    assert set(w.figures().means) == {"sm_mhz", "throttled"}


def test_no_permission_to_open_it(monkeypatch, gpu):
    class Closed(Nvml):
        def nvmlInit(self):
            raise PermissionError("not here")

    w, latest = watch(monkeypatch, Closed())
    assert latest == {}
    assert w.notes == ["power and clocks are not read: PermissionError: not here"]
    assert w.figures().samples == 0


def test_no_package_is_said_once(monkeypatch, gpu):
    w, latest = watch(monkeypatch, None)
    with w:
        until(lambda: not running())
    assert latest == {}
    assert w.notes == ["power and clocks are not read: there is no pynvml (pip install nvidia-ml-py)"]


def test_an_older_torch_without_uuids_and_an_older_name(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())

    nvml: Any = Nvml(reasons=[0x08])
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = nvml.nvmlDeviceGetCurrentClocksEventReasons
    nvml.nvmlDeviceGetCurrentClocksEventReasons = None
    w, latest = watch(monkeypatch, nvml)
    assert nvml.asked == [0]
    assert w.figures().reasons == {"hardware slowdown": 1}
    assert latest["throttled"] == 1


def test_it_starts_again_and_stops_twice(monkeypatch, gpu):
    w, _ = watch(monkeypatch, Nvml(), samples=1)
    first = w.figures().samples
    w.start()
    w.start()
    until(lambda: w.figures().samples > first)
    assert len(running()) == 1
    w.stop()
    w.stop()
    assert not running()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_the_real_library_without_a_driver(gpu):
    with DeviceWatch(every_s=0.01) as w:
        until(lambda: w.notes and not running())
    (note,) = w.notes
    assert note.startswith("power and clocks are not read: ")


def test_the_bits_are_those_of_nvml():
    nvml = pytest.importorskip("pynvml")
    named = {
        "SwPowerCap": "power cap",
        "HwSlowdown": "hardware slowdown",
        "SyncBoost": "sync boost",
        "SwThermalSlowdown": "thermal",
        "HwThermalSlowdown": "hardware thermal",
        "HwPowerBrakeSlowdown": "power brake",
    }
    assert {getattr(nvml, f"nvmlClocksEventReason{name}"): text for name, text in named.items()} == device.SLOWED


class Latest:
    """What a session asks of a DeviceWatch."""

    def __init__(self):
        self.latest, self.calls = {}, []

    def start(self):
        self.calls.append("start")
        self.latest = {"power_w": 400.0, "sm_mhz": 1500.0, "throttled": 1.0, "pcie_rx_mib_s": 3.0}

    def stop(self):
        self.calls.append("stop")
        self.latest = {}


def test_a_session_on_a_gpu_records_it(monkeypatch):
    session, watch = make_session(), Latest()
    assert session.measuring.watch is None
    monkeypatch.setattr(session.measuring, "watch", watch)
    session.run(3)
    assert watch.calls == ["start", "stop"]
    frame = session.records.frame()
    assert frame.power_w.tolist() == [400.0] * 3
    assert (frame.sm_mhz.tolist(), frame.throttled.tolist()) == ([1500.0] * 3, [1.0] * 3)
    assert "pcie_rx_mib_s" not in frame.columns
    assert session.records[-1].meters["power_w"] == 400
    monkeypatch.setattr(watch, "start", lambda: None)  # NVML that tells nothing
    session.run(1)
    assert session.records.frame().power_w.isna().tolist() == [False, False, False, True]


def test_a_session_on_a_cpu_has_no_thread():
    session = make_session()
    session.run(2)
    assert "power_w" not in session.records.names
