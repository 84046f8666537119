"""Read the state of a GPU once a second from NVML: power, clock, throttling, PCIe traffic. A thread reads it; a user takes
the latest sample, which costs one look into a dictionary.

NVML comes with the driver; `pip install nvidia-ml-py` brings its Python names. A figure that a device does not give (a MIG
slice has no power of its own, a container may lack permission) is left out, and one note says so. NVML's "utilization" is
not read: it only means that some kernel was resident.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean the device runs slower than it could, and what they are called
# (nvml.h, NvmlClocksEventReasons). Idle, and clocks that somebody has set, are none.
SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True)
class DeviceFigures:
    """DeviceFigures holds the means over all samples, by name, and the reasons of throttling.

    means: power_w, sm_mhz, throttled (share of the samples), pcie_rx_mib_s, pcie_tx_mib_s; a figure that was not measured is
    missing. reasons: what throttled it, with the share of the samples.
    """

    samples: int = 0
    means: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)


class DeviceWatch:
    """A DeviceWatch reads a GPU's state every `every_s` while the block lasts. `latest` is the last sample by name, {}
    where there is none; `notes` says why. It never raises and never waits on the thread that trains."""

    def __init__(self, device: int | None = None, every_s: float = 1.0) -> None:
        self.latest: dict[str, float] = {}
        self.notes: list[str] = []
        self._index, self._every_s = device, every_s
        self._samples = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DeviceWatch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if self._thread is None:
            self._over = threading.Event()
            index = torch.cuda.current_device() if self._index is None else self._index
            self._thread = threading.Thread(
                target=self._run, args=(index, self._over), name="surokit-device", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread; the figures stay, `latest` becomes empty. A call that hangs in the driver is not waited for."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(timeout=2 * self._every_s)
            self._thread, self.latest = None, {}

    def figures(self) -> DeviceFigures:
        """Return the means of all samples so far."""
        samples = max(self._samples, 1)
        return DeviceFigures(
            self._samples,
            {name: total / self._counts[name] for name, total in dict(self._sums).items()},
            {name: count / samples for name, count in self._reasons.most_common()},
        )

    def _run(self, index: int, over: threading.Event) -> None:
        try:
            nvml = _load()
            nvml.nvmlInit()
        except Exception as error:
            self._note("power and clocks are", error)
            return
        try:
            handle = _handle(nvml, index)
            readers = _readers(nvml, handle)
            while readers and not over.is_set():
                self._sample(readers)
                over.wait(self._every_s)
        except Exception as error:
            self._note("power and clocks are", error)
        finally:
            self.latest = {}
            nvml.nvmlShutdown()

    def _sample(self, readers: dict[str, Callable[[], float]]) -> None:
        """Take one sample; a reader that fails is dropped."""
        sample = {}
        for name, read in list(readers.items()):
            try:
                value = read()
            except Exception as error:
                del readers[name]
                self._note(f"{name} is", error)
                continue
            if name == "throttled":
                self._reasons.update(reason for bit, reason in SLOWED.items() if int(value) & bit)
                value = float(any(int(value) & bit for bit in SLOWED))
            sample[name] = value
            self._sums[name] += value
            self._counts[name] += 1
        self._samples += bool(sample)
        self.latest = sample

    def _note(self, what: str, error: Exception) -> None:
        missing = isinstance(error, ImportError)
        why = "there is no pynvml (pip install nvidia-ml-py)" if missing else f"{type(error).__name__}: {error}"
        if (note := f"{what} not read: {why}") not in self.notes:
            self.notes.append(note)


def _load() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old package of the same name says that it is old
        import pynvml
    return pynvml


def _handle(nvml: Any, index: int) -> Any:
    """Find the device by its UUID: NVML counts all devices of the machine, torch only those it may see."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    text = str(uuid)
    return nvml.nvmlDeviceGetHandleByUUID(text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}")


def _readers(nvml: Any, handle: Any) -> dict[str, Callable[[], float]]:
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
    pcie = nvml.nvmlDeviceGetPcieThroughput  # KiB/s, over the last 20 ms
    return {
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "throttled": lambda: reasons(handle),
        "pcie_rx_mib_s": lambda: pcie(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1024,
        "pcie_tx_mib_s": lambda: pcie(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1024,
    }
