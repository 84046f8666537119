"""Read the clocks and the power of a GPU while another process computes on it; they stand beside its figure, which depends
on them.

NVML's Python names are used where they are installed (surokit/profiler/monitoring/device.py), else the driver's own nvidia-smi;
without both, clocks and power are unknown and left out.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

_EVERY_S = 0.5
#: What nvidia-smi is asked for, and what a recording calls it (surokit.profiler.monitoring.device.DeviceFigures).
_ASKED = {"power.draw": "power_w", "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz"}


@contextmanager
def device_clocks(wanted: bool = True) -> Iterator[dict[str, float]]:
    """Yield a dict that is filled when the block ends: means over the block of power_w (W) and sm_mhz (MHz), and where they
    are known `throttled` (share of the samples) and memory_mhz."""
    found: dict[str, float] = {}
    if not wanted:
        yield found
    elif find_spec("pynvml") is not None:
        from surokit.profiler.monitoring.device import DeviceWatch

        watch = DeviceWatch(0, _EVERY_S)
        watch.start()
        try:
            yield found
        finally:
            means = watch.figures().means
            found.update({name: means[name] for name in ("power_w", "sm_mhz", "throttled") if name in means})
            watch.stop()
    else:
        with tempfile.TemporaryFile("w+") as said:
            reader = _nvidia_smi(said.fileno())
            try:
                yield found
            finally:
                if reader is not None:
                    reader.terminate()
                    reader.wait()
                said.seek(0)
                found.update(_means(said.read()))


def _nvidia_smi(out: int) -> subprocess.Popen[bytes] | None:
    """Start the driver's own program, which writes a line of figures every so often; None where it is not there."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    how = [f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", f"--loop-ms={round(1e3 * _EVERY_S)}"]
    try:
        return subprocess.Popen(["nvidia-smi", "-i", index, *how], stdout=out, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def _means(lines: str) -> dict[str, float]:
    """Return the means of the columns; a figure that a device does not give ("[N/A]") is left out."""
    columns: dict[str, list[float]] = {name: [] for name in _ASKED.values()}
    for line in lines.splitlines():
        cells = line.split(",")
        if len(cells) == len(columns):  # the last line may be half of one
            for values, cell in zip(columns.values(), cells):
                with suppress(ValueError):
                    values.append(float(cell))
    return {name: sum(values) / len(values) for name, values in columns.items() if values}
