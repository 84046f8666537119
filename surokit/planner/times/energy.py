"""Count the energy of a run, GPU hours times watts. A datasheet's watts are a limit, so the energy is then an upper bound."""

from __future__ import annotations

from surokit import arguments
from surokit.hardware.gpus import Gpu


def energy_kwh(gpu_hours: float, watts: float | Gpu | None, utilisation: float = 1.0) -> float | None:
    """Return the kWh that GPUs draw in so many hours; None where the watts are not known.

    watts           of one GPU: what was measured, or a Gpu, whose power limit makes an upper bound
    utilisation     mean draw as a share of `watts`

    Hosts, networks and cooling are left out.
    """
    hours = arguments.number("gpu_hours", gpu_hours)
    each = watts.watts if isinstance(watts, Gpu) else watts
    if each is None:
        return None
    return hours * arguments.number("watts", each) * arguments.share("utilisation", utilisation) / 1000
