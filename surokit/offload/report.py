"""Report what offloading did so far: waits, traffic, ages of gradients, energy in the hot columns, memory, threads.

    optimizer.report()            prints as a table
    optimizer.report().table()    a row a weight whose columns are chosen, or a row a transfer
    optimizer.report().energy     each weight's columns, as a table, a DataFrame and a picture

Asking reads the scores of the latest choice of columns from the device, and so waits for it; steps do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surokit.offload.counters import CAUSES, Accounts
from surokit.offload.energy import Energy, WeightEnergy, curve, warning_of
from surokit.optim.tensors import local
from surokit.tables import data_frame, html_table, text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd

    from surokit.offload.adamw import Transfer
    from surokit.offload.workers import Worker

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_TOLD = {
    "slot": "for a free slot",
    "adam": "for the host's Adam",
    "landing": "while weights land",
    "selection": "for scores",
}
_TOLD_SYNCHRONOUS = {**_TOLD, "slot": "for gradients to come down"}


@dataclass(frozen=True)
class Stall:
    """A Stall gives the milliseconds a step that the host's training thread waited for one cause: mean over all steps, p95
    over the last 4,096."""

    cause: str
    mean_ms: float
    p95_ms: float


@dataclass(frozen=True)
class Moved:
    """A Moved is one of the transfers that a synchronous step consists of: gradients down, an update, weights up.

    first: name of the parameter that it begins with. parameters: how many it has of, some of which in part. bytes_down,
    bytes_up: a step. lr: of its parameter group.
    """

    first: str
    parameters: int
    elements: int
    bytes_down: int
    bytes_up: int
    lr: float


@dataclass(frozen=True, repr=False, eq=False)
class OffloadReport:
    """An OffloadReport prints as a table and shows itself in a notebook; `as_dict()` serves other uses. Figures are of this
    process, and of the steps since the optimizer was made or loaded.

    stalls: of the host, by cause; stall: all of them together. device_stall_ms: a step, that the device was without work,
    as it waited for a copy or the host's wait left it none; at least, as far as it was measured. model_bytes: of all
    parameters it updates, in their gradients' dtype. down, up: bytes a step over model_bytes, migration left out; expected:
    (1 - k) (1 + 1/S), with the share k of elements that are hot and the mean length S of a window, which down + up come to
    over whole windows. migration: the same each way, of columns that change sides. adopted: the same of weights that were
    written by hand, which came down. staleness: share of the gradient's elements by how many steps later they reached the
    weights; staleness_bound: the most. intervals: windows by their length in steps. hot_share: of the elements. selected:
    share of the squared norm in the hot columns, over all weights, at the latest choice; selected_mean: over the choices
    that are remembered, weights counted alike; NaN without a choice. energy: by weight. host_bytes, device_bytes: held for
    the optimizer on each side. threads: name -> (torch threads, cores). transfers: of OffloadAdamW, whose steps are
    synchronous: nothing is deferred, a step is a window, and all figures of columns are empty.
    """

    optimizer: str
    steps: int
    windows: int
    stalls: tuple[Stall, ...]
    stall: Stall
    device_stall_ms: float
    model_bytes: int
    down: float
    up: float
    expected: float
    migration: tuple[float, float]
    staleness: Mapping[int, float]
    staleness_bound: int
    intervals: Mapping[int, int]
    hot_share: float
    selected: float
    selected_mean: float
    energy: Energy
    host_bytes: int
    device_bytes: int
    threads: Mapping[str, tuple[int, tuple[int, ...]]]
    transfers: tuple[Moved, ...] = ()
    synchronous: bool = False
    adopted: float = 0.0

    @property
    def traffic(self) -> float:
        """Return the bytes a step, both ways, over the model's; without migration."""
        return self.down + self.up

    @property
    def interval(self) -> float:
        """Return S, the mean steps of a window; NaN before the first is over."""
        return _mean_interval(self.intervals)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the arguments against the setting, in sentences."""
        return tuple(filter(None, (warning_of(self.energy),)))

    def as_dict(self) -> dict[str, Any]:
        """Return every figure by name; plain numbers, strings, lists and dicts."""
        plain = (
            *("optimizer", "steps", "windows", "device_stall_ms", "model_bytes", "down", "up", "traffic", "expected"),
            *("staleness_bound", "hot_share", "selected", "selected_mean", "host_bytes", "device_bytes"),
        )
        return {
            **{name: getattr(self, name) for name in plain},
            "stall_ms": {s.cause: {"mean": s.mean_ms, "p95": s.p95_ms} for s in (*self.stalls, self.stall)},
            "migration": {"down": self.migration[0], "up": self.migration[1]},
            "adopted": self.adopted,
            "staleness": dict(self.staleness),
            "intervals": dict(self.intervals),
            "threads": {name: {"threads": n, "cores": list(cores)} for name, (n, cores) in self.threads.items()},
            "transfers": [asdict(moved) for moved in self.transfers],
            "warnings": list(self.warnings),
        }

    def table(self) -> pd.DataFrame:
        """Return a row a weight whose columns are chosen, as Energy.table(). For OffloadAdamW it is a row a transfer, as
        Moved; empty before the first step."""
        if not self.synchronous:
            return self.energy.table()
        return data_frame([astuple(moved) for moved in self.transfers], [f.name for f in fields(Moved)])

    def _rows(self) -> list[tuple[str, str]]:
        told = _TOLD_SYNCHRONOUS if self.synchronous else _TOLD
        adopted = [("weights written by hand", f"{self.adopted:.3g} x down")] if self.adopted else []
        return [
            ("steps", f"{self.steps:,}{'' if self.synchronous else self._windows()}"),
            ("host waits", _ms(self.stall)),
            *((f"  {told[s.cause]}", _ms(s)) for s in self.stalls if s.mean_ms > 0),
            ("device waits", f"{three_digits(self.device_stall_ms)} ms a step"),
            ("gradients down", f"{self.down:.4g} x the model's {_bytes(self.model_bytes)} a step"),
            ("weights up", f"{self.up:.4g} x"),
            *(self._of_transfers() if self.synchronous else self._of_columns()),
            *adopted,
            ("memory", f"{_bytes(self.host_bytes)} of the host, {_bytes(self.device_bytes)} of the device"),
            *((f"thread {name}", _thread(n, cores)) for name, (n, cores) in self.threads.items()),
        ]

    def _windows(self) -> str:
        windows = ", ".join(f"{count} of {length}" for length, count in sorted(self.intervals.items()))
        return f", windows {self.windows:,}" + (f" ({windows} steps)" if windows else "")

    def _of_transfers(self) -> list[tuple[str, str]]:
        sizes = [max(moved.bytes_down, moved.bytes_up) for moved in self.transfers]
        largest = f", {_bytes(max(sizes))} at most" if sizes else ""
        all_of_it = sum(moved.bytes_down + moved.bytes_up for moved in self.transfers) / max(self.model_bytes, 1)
        return [
            ("both", f"{self.traffic:.4g} x; all gradients and all weights are {all_of_it:.4g}"),
            ("transfers each way", f"{len(sizes)} a step{largest}"),
        ]

    def _of_columns(self) -> list[tuple[str, str]]:
        ages = ", ".join(f"{age}: {share:.1%}" for age, share in sorted(self.staleness.items()))
        down, up = self.migration
        formula = f"; (1 - k)(1 + 1/S) is {self.expected:.4g} with S = {self.interval:.3g}" if self.windows else ""
        rows = [
            ("both", f"{self.traffic:.4g} x" + formula),
            ("columns that change sides", f"{down:.3g} x down, {up:.3g} x up"),
            ("age of gradients, steps", f"{ages or 'none yet'}; at most {self.staleness_bound}"),
            (
                "hot",
                "not known before the first step"
                if math.isnan(self.hot_share)
                else f"{self.hot_share:.2%} of the elements",
            ),
        ]
        chosen = "not known before the next choice of columns"
        if len(self.energy):
            k = sum(w.hot for w in self.energy.weights) / sum(w.columns for w in self.energy.weights)
            chosen = f"{self.selected:.1%} at the last choice, {self.selected_mean:.1%} on average; at random {k:.1%}"
        return [*rows, ("energy in hot columns", chosen)]

    def __repr__(self) -> str:
        return "\n".join([self.optimizer, text_table(self._rows()), *self.warnings])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(line)}</p>" for line in self.warnings)
        return html_table(self._rows(), title=self.optimizer) + notes


def report_of(
    optimizer: Any,
    buffers: Iterable[Tensor] = (),
    workers: Iterable[Worker] = (),
    transfers: Iterable[Transfer] | None = None,
) -> OffloadReport:
    """Make the report of a ZenFlow or an OffloadAdamW, from its `accounts`, `state`, `link` and, where it has them,
    `settings`.

    buffers: host memory that it holds beside its state, such as staging slots. workers: its threads. transfers: those that a
    step of a synchronous one consists of; None for one that defers.
    """
    accounts: Accounts = optimizer.accounts
    settings: Mapping[str, Any] = getattr(optimizer, "settings", {})
    params = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    states = [value for p in params for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    elements = sum(local([p])[0].numel() for p in params)
    hot = sum(optimizer.state[p]["w_hot"].numel() for p in params if "w_hot" in optimizer.state[p])
    # on a CPU that stands for a device its states are told apart by name only
    on_device = [x for p in params for name, x in optimizer.state[p].items() if _is_of_device(name, x)]
    device_bytes = sum(x.nbytes for x in on_device)
    steps = max(accounts.steps, 1)
    model_bytes = accounts.model_bytes or sum(local([p])[0].nbytes for p in params)
    hot_share = hot / elements if elements else math.nan
    energy = _energy(accounts, optimizer)
    waits = tuple(
        Stall(cause, accounts.stall_by_cause[cause] / steps, _p95(accounts.stalls(cause))) for cause in CAUSES
    )
    together = np.sum([accounts.stalls(cause) for cause in CAUSES], axis=0).tolist()
    landed = sum(accounts.staleness.values())
    down, up = (
        [accounts.bytes[kind][way] / steps / max(model_bytes, 1) for kind in ("gradients", "weights", "migration")]
        for way in (0, 1)
    )
    shares = [chosen.share for found in accounts.choices.values() for chosen in found]
    return OffloadReport(
        optimizer=type(optimizer).__name__,
        steps=accounts.steps,
        windows=accounts.windows,
        stalls=waits,
        stall=Stall("all", accounts.stall_ms / steps, _p95(together)),
        device_stall_ms=(optimizer.link.device_stall_ms() - accounts.link_before_ms) / steps,
        model_bytes=model_bytes,
        down=down[0] + down[1],
        up=up[0] + up[1],
        expected=(1 - hot_share) * (1 + 1 / _mean_interval(accounts.intervals)),
        migration=(down[2], up[2]),
        staleness={age: count / landed for age, count in sorted(accounts.staleness.items())} if landed else {},
        staleness_bound=staleness_bound(settings),
        intervals=dict(sorted(accounts.intervals.items())),
        hot_share=hot_share,
        selected=_selected(accounts),
        selected_mean=float(np.mean(shares)) if shares else math.nan,
        energy=energy,
        host_bytes=sum(x.nbytes for x in states) - device_bytes + sum(x.nbytes for x in buffers),
        device_bytes=device_bytes,
        threads={"training": (torch.get_num_threads(), ()), **{w.name: (w.threads, w.cores) for w in workers}},
        transfers=_moved(transfers or (), _names(accounts, optimizer)),
        synchronous=transfers is not None,
        adopted=accounts.bytes["adopted"][0] / steps / max(model_bytes, 1),
    )


def staleness_bound(settings: Mapping[str, Any]) -> int:
    """Return the most steps from a cold gradient to the weights: S - 1, with overlap 2 S - 1; 0 for an optimizer without
    windows."""
    if "update_interval" not in settings:
        return 0
    interval = settings["max_interval"] if settings["update_interval"] == "auto" else settings["update_interval"]
    return int((2 if settings["overlap_step"] else 1) * interval - 1)


def _mean_interval(intervals: Mapping[int, int]) -> float:
    windows = sum(intervals.values())
    return sum(length * count for length, count in intervals.items()) / windows if windows else math.nan


def _names(accounts: Accounts, optimizer: Any) -> dict[Tensor, str]:
    """Return the names of all parameters, in their order."""
    order = (p for group in optimizer.param_groups for p in group["params"])
    return {p: accounts.names.get(p, f"parameter {number} {list(p.shape)}") for number, p in enumerate(order)}


def _moved(transfers: Iterable[Transfer], names: Mapping[Tensor, str]) -> tuple[Moved, ...]:
    return tuple(
        Moved(
            first=names[t.pieces[0].p],
            parameters=len(t.pieces),
            elements=t.numel,
            bytes_down=t.numel * t.grad_dtype.itemsize,
            bytes_up=t.numel * t.dtype.itemsize,
            lr=float(t.group["lr"]),
        )
        for t in transfers
    )


def _energy(accounts: Accounts, optimizer: Any) -> Energy:
    found = []
    for p, name in _names(accounts, optimizer).items():
        if p in accounts.scores:
            last, scores = accounts.choices[p][-1], accounts.scores[p].double().cpu().numpy()
            shares = tuple(chosen.share for chosen in accounts.choices[p])
            found.append(
                WeightEnergy(name, last.step, last.columns, last.hot, last.share, last.entered, curve(scores), shares)
            )
    return Energy(tuple(found))


def _selected(accounts: Accounts) -> float:
    """Return the share of the squared norm over all weights that the hot columns have."""
    sums = {p: float(scores.double().sum()) for p, scores in accounts.scores.items()}
    total = sum(sums.values())
    return sum(accounts.choices[p][-1].share * each for p, each in sums.items()) / total if total else math.nan


def _is_of_device(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and (
        value.device.type != "cpu" or name.endswith("_hot") or name in ("hot", "cold")
    )


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95)) if values else 0.0


def _ms(stall: Stall) -> str:
    return f"{three_digits(stall.mean_ms)} ms a step, p95 {three_digits(stall.p95_ms)} ms"


def _bytes(count: float) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if count >= size), _UNITS[-1])
    return f"{three_digits(count / size)} {unit}"


def _thread(threads: int, cores: tuple[int, ...]) -> str:
    where = f", on core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}" if cores else ""
    return f"{threads} torch thread{'s' * (threads != 1)}{where}"
