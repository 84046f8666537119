"""Predict what a step takes when the optimizer's states are on the host, by three formulas, and choose among the three ways.

    none           C                                                                   surokit.AdamW
    synchronous    C + pipelined(M/B, N/r, M/B)                                        surokit.OffloadAdamW
    ZenFlow        max(C, (1-k) M/B, (1-k) N/(S r), (1-k) N/q) + (1-k) M/(S B)         surokit.ZenFlow
      no overlap   max(C, h) + (min(C, h) + (1-k) N/r + (1-k) M/B) / S                 overlap_step=False
                   h = max((1-k) M/B, (1-k) N/q)

C is the compute time of a step, M the bytes of the trained weights in the gradients' dtype, N their number, B the link's rate in
one direction, r and q the host's rates of AdamW and of adding gradients up.

Synchronous: gradients go down, the host's AdamW runs, weights go up, while the GPU waits. They do so in n transfers, 16 or more, of
which one travels while another is worked on: pipelined(...) is the slowest of the three, and an nth of the other two. One after
the other they would be C + 2 M/B + N/r.

ZenFlow (arXiv 2505.12242) updates the share k of columns with the largest gradients on the GPU at once, and the others on the
host every S steps, beside the GPU's work. So a step waits for whatever takes longest, and also for its share of the weights that
come back: they come before a forward pass and overlap with nothing. Both directions together are (1-k)(1+1/S) M.

Without overlap the device waits at each window's end for all of the host's update. The gradients of S steps come down and are added
beside the S - 1 computations after the first, C + (S-1) max(C, h) + h in all; then AdamW updates all cold columns, and then they
come back, none of it beside the device's work.

Where the synchronous step is stalled for a share f of its time and a share x of the stall is removed, the gain is 1 / (1 - x f).

r and q are those of the threads that they were measured with; a worker that has fewer may be slower, unless memory is what limits.

Host memory, bytes of an element that is not hot, with gradients and weights of b bytes: weights and moments in float32 12, two
accumulators 8 (without overlap one, 4), slots b each, updated weights that wait b. For the synchronous way 12, and three transfers
each way, which are on the device too; on the device ZenFlow takes 12 of an element that is hot, b of one that is not, and three
transfers up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from surokit import arguments, units
from surokit.hardware.gpus import Gpu
from surokit.tables import data_frame, html_table, text_table

if TYPE_CHECKING:
    import pandas as pd

GIB = 2**30
Way = Literal["none", "synchronous", "zenflow"]
WAYS: tuple[Way, ...] = ("none", "synchronous", "zenflow")
# Bytes that the host moves for a parameter: AdamW reads and writes weight and moments in float32, reads the sum of gradients and
# writes the weight in 16 bits; adding up reads 16 bits and reads and writes the sum.
_ADAM_BYTES, _ACCUMULATE_BYTES = 3 * 8 + 4 + 2, 2 + 8
OFFLOADING = ("zenflow", "offloadadamw")  # optimizers, as a plan calls them
HOT = 0.1  # ZenFlow's topk_ratio where none is given
INTERVAL = 4  # its update_interval where none is given, or the "auto" rule decides
SLOTS = 3
TRANSFERS = 16  # of a synchronous step, at least
# Memory of the synchronous way, on the host and on the device: so many transfers, each no larger.
_RING, _TRANSFER_BYTES = 2 * 3, 64 * 2**20
_STAGED = 3  # ZenFlow's buffers on the device, which weights that go up use in turn
# A step of which this share of the GPU's memory is known to be taken is said to fit, whatever its activations take.
AMPLE = 0.5
# Beyond these a Host was given in other units: GB/s of a link, GiB, parameters a second.
_MOST_GB_S, _MOST_GIB, _PARAMS_S = 1e4, 1e5, (1e3, 1e13)
# Below this gain the synchronous way is taken: it computes exactly what AdamW does, and deferred columns do not.
WORTH_DEFERRING = 1.05


@dataclass(frozen=True)
class Host:
    """A Host describes the host of one GPU: GB/s of pinned copies in one direction, parameters a second that AdamW updates, GiB.

    `accumulate_params_s` is how many gradients a second it adds up; without it, 3 times AdamW's rate, since AdamW moves 3 times
    the bytes. Where several GPUs share a host, each has its part of it.
    """

    link_gb_s: float = math.nan
    adam_params_s: float = math.nan
    memory_gib: float | None = None
    accumulate_params_s: float | None = None

    def __post_init__(self) -> None:
        rates = {"link_gb_s": self.link_gb_s, "adam_params_s": self.adam_params_s}
        if missing := [name for name, rate in rates.items() if isinstance(rate, float) and math.isnan(rate)]:
            raise TypeError(
                f"Host() lacks {' and '.join(f'{name}=' for name in missing)}: plan(gpu=sk.calibrate()) measures them on this "
                "machine; or give figures, such as link_gb_s=50 and adam_params_s=2e9."
            )
        link = arguments.number("link_gb_s", self.link_gb_s)
        if link > _MOST_GB_S:
            guess = link / (1e9 if link > 1e8 else 1e3)
            raise ValueError(
                f"link_gb_s={link:g} is more than any link has: did you mean {guess:.4g} (the unit is 1e9 bytes a second)?"
            )
        _plausible_rate("adam_params_s", self.adam_params_s)
        if self.accumulate_params_s is not None:
            _plausible_rate("accumulate_params_s", self.accumulate_params_s)
        if self.memory_gib is not None and (memory := arguments.number("memory_gib", self.memory_gib)) > _MOST_GIB:
            guess = memory / (GIB if memory > 1e9 else 1024)
            raise ValueError(
                f"memory_gib={memory:g} is more than any host has: did you mean {guess:.4g} (the unit is GiB)?"
            )

    @property
    def adds_params_s(self) -> float:
        return self.accumulate_params_s or self.adam_params_s * _ADAM_BYTES / _ACCUMULATE_BYTES


def _plausible_rate(name: str, value: float) -> None:
    rate, unit = arguments.number(name, value), "the unit is parameters a second, 2e9 for two billion"
    if rate < _PARAMS_S[0]:
        raise ValueError(f"{name}={rate:g} is slower than any host: {unit}.")
    if rate > _PARAMS_S[1]:
        raise ValueError(f"{name}={rate:g} is faster than any host: {unit}.")


def host_of(gpu: Gpu, memory_gib: float | None = None) -> Host | None:
    """Return the host beside a GPU as a calibration measured it, with the datasheet's link where only that is known.

    None where AdamW's rate was not measured, or neither knows the link.
    """
    c = gpu.ceilings
    link = (c.host_gb_s if c else None) or gpu.host_gb_s
    rate, adding = (c.host_adam_params_s, c.host_accumulate_params_s) if c else (None, None)
    return None if link is None or rate is None else Host(link, rate, memory_gib, adding)


def asked_host(asks: str, host: object, gpu: Gpu | None) -> Host | None:
    """Return the host that was given, or the one beside the GPU where that is known. asks: the method that was called. Raises
    TypeError for anything that is not a Host."""
    if host is None:
        return None if gpu is None else host_of(gpu)
    if isinstance(host, Host):
        return host
    raise TypeError(
        f"{asks}(host={host!r}) is a {type(host).__name__}: give planner.Host(link_gb_s=50, adam_params_s=2e9), or nothing where "
        "the plan has gpu=sk.calibrate()."
    )


@dataclass(frozen=True)
class Room:
    """A Room holds the memory of one GPU, `gib` (None: not known), and the GiB of it that a step `takes` in each way.

    left_out    what `takes` leaves out, "" nothing; otherwise a way surely fits only where it takes little
    cure        what helps where no way fits, in words
    """

    gib: float | None
    takes: Mapping[Way, float]
    left_out: str = ""
    cure: str = ""

    def fits(self, way: Way) -> bool | None:
        """Return whether a step fits in this way; None where that is not known."""
        if self.gib is None:
            return None
        if self.takes[way] > self.gib:
            return False
        return None if self.left_out and self.takes[way] > AMPLE * self.gib else True


@dataclass(frozen=True, repr=False)
class Offload:
    """An Offload holds predicted times and memory of a step by way: without offload ("none"), "synchronous" and "zenflow".

    choice          the way to take, None where none fits; why says the reason in a sentence
    stalled         f: share of the synchronous step in which the GPU waits
    removed         x: share of that stall that ZenFlow removes; below 0 where its step takes longer
    gain            of ZenFlow over the synchronous way, 1 / (1 - x f)
    binds           what takes most of ZenFlow's step: compute, link, AdamW or adding
    landing_ms      the milliseconds that ZenFlow's step takes in addition, for weights that come back
    update_ms       and without overlap, for the window's last gradients and the host's AdamW; 0 with overlap
    traffic         bytes ZenFlow moves in a step over the model's; 2 without deferral
    host_gib        host memory by way, and hosted whether the host has that much; device_gib what the optimizer keeps on the GPU:
                    states, and ZenFlow's cold gradients until they have left
    gpu_gib         the GPU's memory that the whole step takes by way, and fits whether it has that much; None where not known
    without         the optimizer of the way without offload
    kind            of the times, "prediction", "likely" or "optimistic"; rates says what they are based on, "" for rates that were
                    given
    """

    parameters: float
    host: Host
    topk_ratio: float
    update_interval: int
    none_ms: float
    synchronous_ms: float
    zenflow_ms: float
    binds: str
    landing_ms: float
    traffic: float
    host_gib: dict[Way, float]
    device_gib: dict[Way, float]
    choice: Way | None = None
    why: str = ""
    gpu_gib: dict[Way, float | None] = field(default_factory=lambda: dict.fromkeys(WAYS))
    fits: dict[Way, bool | None] = field(default_factory=lambda: dict.fromkeys(WAYS))
    without: str = "surokit.AdamW"
    overlap_step: bool = True
    slots: int = SLOTS
    update_ms: float = 0.0
    kind: str = "prediction"
    rates: str = ""

    @property
    def use(self) -> str:
        """Return the optimizer to take, as a user writes it; "" where no way can be taken."""
        return "" if self.choice is None else self._optimizers[self.choice]

    @property
    def _optimizers(self) -> dict[Way, str]:
        zenflow = f"surokit.ZenFlow(topk_ratio={self.topk_ratio:g}, update_interval={self.update_interval}"
        zenflow += ")" if self.overlap_step else ", overlap_step=False)"
        return {"none": self.without, "synchronous": "surokit.OffloadAdamW", "zenflow": zenflow}

    @property
    def step_ms(self) -> dict[Way, float]:
        return {"none": self.none_ms, "synchronous": self.synchronous_ms, "zenflow": self.zenflow_ms}

    @property
    def hosted(self) -> dict[Way, bool | None]:
        """Return by way whether the host has the memory; None where its memory is not known."""
        limit = self.host.memory_gib
        return {way: None if limit is None else gib <= limit for way, gib in self.host_gib.items()}

    @property
    def stalled(self) -> float:
        return 1 - self.none_ms / self.synchronous_ms

    @property
    def removed(self) -> float:
        stall = self.synchronous_ms - self.none_ms
        return (self.synchronous_ms - self.zenflow_ms) / stall

    @property
    def gain(self) -> float:
        return self.synchronous_ms / self.zenflow_ms

    def table(self) -> pd.DataFrame:
        """Return the ways as a DataFrame, one a row: step_ms, speed against no offload, gpu_gib of the step and whether it fits,
        device_gib that the optimizer keeps of it, host_gib and whether the host has it, chosen, kind of the times."""
        columns = ["way", "step_ms", "speed", "gpu_gib", "fits", "device_gib", "host_gib", "hosted", "chosen", "kind"]
        rows = [
            (
                w,
                ms,
                self.none_ms / ms,
                self.gpu_gib[w],
                self.fits[w],
                self.device_gib[w],
                self.host_gib[w],
                self.hosted[w],
                w == self.choice,
                self.kind,
            )
            for w, ms in self.step_ms.items()
        ]
        return data_frame(rows, columns)

    _HEADER = ("", "step", "speed", "GPU", "", "of it optimizer", "host", "", "")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        words = {True: "fits", False: "does not fit", None: ""}
        for way, ms in self.step_ms.items():
            gpu = self.gpu_gib[way]
            yield (
                self._optimizers[way].removeprefix("surokit."),
                units.value(ms, "ms"),
                f"{self.none_ms / ms:.2f}",
                "not known" if gpu is None else units.gib(gpu),
                words[self.fits[way]],
                units.gib(self.device_gib[way]),
                units.gib(self.host_gib[way]),
                words[self.hosted[way]] if self.host_gib[way] else "",
                "taken" if way == self.choice else "",
            )

    def _title(self) -> str:
        return f"Offload of {units.count(self.parameters)} trained parameters: {f'take {self.use}' if self.use else 'no choice'}"

    def _parts(self) -> list[str]:
        optimistic = [] if self.kind == "prediction" else [f"times are {self.kind}: {self.rates.partition(';')[0]}"]
        return [*self.why.split("; "), *optimistic]

    def __repr__(self) -> str:
        table = text_table([*self._rows()], header=self._HEADER, right=(1, 2, 3, 5, 6))
        return "\n".join([self._title(), *(f"  {part}" for part in self._parts()), "", table])

    def _repr_html_(self) -> str:
        why = "".join(f"<div>{escape(part)}</div>" for part in self._parts())
        return f"<b>{escape(self._title())}</b>{why}" + html_table(
            [*self._rows()], header=self._HEADER, right=(1, 2, 3, 5, 6)
        )


def predict_offload(
    compute_ms: float,
    parameters: float,
    host: Host,
    *,
    topk_ratio: float = HOT,
    update_interval: int | Literal["auto"] = INTERVAL,
    overlap_step: bool = True,
    slots: int = SLOTS,
    gradient_bytes: int = 2,
    fits: bool | None = None,
    room: Room | None = None,
    states_gib: float | None = None,
    without: str = "surokit.AdamW",
) -> Offload:
    """Predict a step's time and memory by way, and choose the way to take.

    compute_ms      the time of a step without offload (an Estimate's step_ms)
    parameters      the number that train; `gradient_bytes` are the bytes of each of their gradients
    topk_ratio, update_interval, overlap_step, slots    ZenFlow's settings; topk_ratio below 1, since at 1 nothing is offloaded. The
                    length of windows by the "auto" rule is not known before a run: S is taken to be 4, and `why` says so
    fits            whether the GPU's memory suffices without offload; None: `room` decides, or it is not known
    room            memory of the GPU, and what a step takes of it by way; `plan.offload` knows it
    states_gib      GiB that the optimizer `without` offload keeps on the GPU; None: float32 AdamW's 12 bytes a parameter
    """
    c, n = arguments.number("compute_ms", compute_ms), arguments.parameters(parameters)
    s = INTERVAL if update_interval == "auto" else arguments.integer("update_interval", update_interval, most=1e6)
    slots = arguments.integer("slots", slots, most=1e6)
    if not isinstance(overlap_step, bool):
        raise ValueError(f"overlap_step={overlap_step!r} is unknown: use True or False.")
    if not isinstance(topk_ratio, bool) and topk_ratio == 1:
        raise ValueError(
            "topk_ratio=1 offloads nothing: every column is hot, and all states stay on the GPU as float32 AdamW's do. Give a "
            "share below 1, 0.1 is a tenth of the columns."
        )
    k, m = _hot(topk_ratio), n * arguments.integer("gradient_bytes", gradient_bytes, most=8)
    over_link_ms = m / (host.link_gb_s * 1e9) * 1e3
    adam_ms, adding_ms = n / host.adam_params_s * 1e3, n / host.adds_params_s * 1e3
    waits = {
        "compute": c,
        "link": (1 - k) * over_link_ms,
        "AdamW": (1 - k) * adam_ms / s,
        "adding": (1 - k) * adding_ms,
    }
    binds = max(waits, key=lambda name: waits[name])
    beside_ms, update_ms, landing_ms = waits[binds], 0.0, waits["link"] / s
    if not overlap_step:
        down_ms = max(waits["link"], waits["adding"])
        beside_ms, update_ms = max(c, down_ms), min(c, down_ms) / s + waits["AdamW"]
    held: dict[str, Any] = {"gradient_bytes": gradient_bytes, "slots": slots, "overlap": overlap_step}
    synchronous, zenflow = (host_bytes(n, share, **held) / GIB for share in (None, k))
    known: dict[Way, bool | None] = {way: None if room is None else room.fits(way) for way in WAYS}
    draft = Offload(
        parameters=n,
        host=host,
        topk_ratio=k,
        update_interval=s,
        none_ms=c,
        synchronous_ms=c + _pipelined(max(TRANSFERS, m / _TRANSFER_BYTES), over_link_ms, adam_ms, over_link_ms),
        zenflow_ms=beside_ms + update_ms + landing_ms,
        binds=binds,
        landing_ms=landing_ms,
        traffic=(1 - k) * (1 + 1 / s),
        host_gib={"none": 0.0, "synchronous": synchronous, "zenflow": zenflow},
        device_gib={
            "none": 12 * n / GIB if states_gib is None else states_gib,
            "synchronous": device_bytes(n, None, gradient_bytes) / GIB,
            "zenflow": device_bytes(n, k, gradient_bytes) / GIB,
        },
        gpu_gib={way: None if room is None else room.takes[way] for way in WAYS},
        fits=known if fits is None else {**known, "none": fits},
        without=without,
        overlap_step=overlap_step,
        slots=slots,
        update_ms=update_ms,
    )
    most = math.inf
    if host.memory_gib:
        most = max(largest_on_host(host.memory_gib, share, **held) for share in (None, k))
    choice, why = _choose(draft, most, room)
    if update_interval == "auto":
        why += f"; how long windows by the 'auto' rule are is not known: ZenFlow's are taken to have {s} steps"
    return replace(draft, choice=choice, why=why)


def _choose(o: Offload, most: float, room: Room | None) -> tuple[Way | None, str]:
    """Return (the way to take, the reason). `most` is the number of parameters that the better of the two ways that offload could
    train on this host."""
    if o.fits["none"]:
        return "none", _suffices(room)
    choice, why = _choose_offload(o, most, room)
    if o.fits["none"] is None and choice is not None:
        return choice, f"not known whether it fits without: {_doubt(room)}; if it does not, {why}"
    return choice, why


def _suffices(room: Room | None) -> str:
    if room is None or room.gib is None or not room.left_out:
        return "the GPU's memory suffices, and offload only adds time"
    return f"{_taken(room)}: fits but for the {room.left_out}; offload only adds time"


def _doubt(room: Room | None) -> str:
    if room is None:
        return "plan.offload() compares with a GPU's memory, or say fits="
    if room.gib is None:
        return "the plan names no GPU whose memory is known, gpu="
    return f"{_taken(room)} are taken without the {room.left_out}"


def _taken(room: Room) -> str:
    return f"{units.gib(room.takes['none'])} of the GPU's {units.gib(room.gib or 0.0)}"


def _choose_offload(o: Offload, most: float, room: Room | None) -> tuple[Way | None, str]:
    """Return (the better of the two ways that offload, the reason); None where neither can be taken."""
    limit, hosted = o.host.memory_gib, {way: there is not False for way, there in o.hosted.items()}
    if room is not None and room.gib is not None and o.fits["synchronous"] is False and o.fits["zenflow"] is False:
        least = min(room.takes["synchronous"], room.takes["zenflow"])
        needs = f"a step takes {units.gib(least)} with the optimizer's states on the host"
        return None, f"none of these fits: {needs}, the GPU has {units.gib(room.gib)}" + "; " * bool(
            room.cure
        ) + room.cure
    if limit is not None and not hosted["zenflow"] and not hosted["synchronous"]:
        return None, (
            f"the host's {units.gib(limit)} hold no more than {units.count(most)} trained parameters: "
            "train an adapter, or shard the states over GPUs with zero=1"
        )
    hot, hot_fits = units.gib(o.device_gib["zenflow"]), o.fits["zenflow"] is not False
    if hosted["zenflow"] and hot_fits and (o.gain >= WORTH_DEFERRING or not hosted["synchronous"]):
        return "zenflow", (
            f"ZenFlow's step is {o.gain:.2f} times as fast as OffloadAdamW's, bound by {o.binds}; deferred columns learn "
            "differently, so look at the loss"
        )
    if not hosted["synchronous"]:
        return None, (
            f"the host lacks memory for all states, and ZenFlow keeps {hot} on the GPU, more than is free: lower topk_ratio as "
            "far as the host has room for what that adds there"
        )
    if not hosted["zenflow"]:
        return "synchronous", (
            f"ZenFlow's sums and slots bring its host memory to {units.gib(o.host_gib['zenflow'])}, more than there is"
        )
    if not hot_fits:
        return "synchronous", (
            f"ZenFlow keeps {hot} on the GPU, hot columns and gradients on their way, more than is free: lower topk_ratio to use it"
        )
    return "synchronous", (
        f"ZenFlow's step would be {o.gain:.2f} times as fast as OffloadAdamW's, which computes what AdamW does"
    )


def stall_gain(stalled: float, removed: float) -> float:
    """Return 1 / (1 - x f), the speedup of a step that is `stalled` for a share f of its time when a share x of the stall is
    `removed`."""
    for name, value in (("stalled", stalled), ("removed", removed)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value:g} must be a share between 0 and 1.")
    if stalled * removed == 1:
        raise ValueError("A step that only stalls cannot lose all of its stall: give stalled below 1.")
    return 1 / (1 - removed * stalled)


def device_bytes(parameters: float, topk_ratio: float | None, gradient_bytes: int = 2) -> float:
    """Return the bytes of the GPU that ZenFlow takes for so many trained parameters: states of hot columns, gradients of cold ones,
    which leave beside the next step, and buffers of weights that go up; with topk_ratio=None those of the synchronous transfers."""
    if topk_ratio is None:
        return _rings(parameters, gradient_bytes)
    cold = parameters * (1 - topk_ratio) * gradient_bytes
    return parameters * 12 * topk_ratio + cold + _STAGED * min(cold, _TRANSFER_BYTES)


def host_bytes(
    parameters: float,
    topk_ratio: float | None = 0.0,
    gradient_bytes: int = 2,
    slots: int = SLOTS,
    overlap: bool = True,
) -> float:
    """Return the bytes of host memory that ZenFlow allocates for so many trained parameters of `gradient_bytes`, with
    topk_ratio=None those of the synchronous way. Columns that turn hot or cold take up to 128 MiB more."""
    if topk_ratio is None:
        return parameters * 12 + _rings(parameters, gradient_bytes)
    sums = 2 if overlap else 1  # one is filled while the other is worked on
    return parameters * (1 - topk_ratio) * (12 + 4 * sums + (slots + 1) * gradient_bytes)


def _rings(parameters: float, gradient_bytes: int) -> float:
    """Return the bytes of the synchronous way's transfers, on the host and again on the device."""
    return _RING * min(parameters * gradient_bytes / TRANSFERS, _TRANSFER_BYTES)


def largest_on_host(
    memory_gib: float,
    topk_ratio: float | None = 0.0,
    gradient_bytes: int = 2,
    slots: int = SLOTS,
    overlap: bool = True,
) -> float:
    """Return the most trained parameters for which a host has enough memory; topk_ratio as for `host_bytes`."""
    room = arguments.number("memory_gib", memory_gib) * GIB
    if topk_ratio is None:
        rings = _RING * _TRANSFER_BYTES
        most = (room - rings) / 12
        small = _TRANSFER_BYTES * TRANSFERS / gradient_bytes  # parameters up to which a transfer is smaller than that
        return most if most > small else room / (12 + _RING * gradient_bytes / TRANSFERS)
    return room / host_bytes(1.0, _hot(topk_ratio), gradient_bytes, slots, overlap)


def _hot(topk_ratio: Any) -> float:
    number = isinstance(topk_ratio, Real) and not isinstance(topk_ratio, bool)
    if not number or not 0 <= topk_ratio < 1:
        raise ValueError(f"topk_ratio={topk_ratio!r} must be a share from 0 to below 1: 0.1 is a tenth of the columns.")
    return float(topk_ratio)


def _pipelined(transfers: float, *stages_ms: float) -> float:
    """Return the time of work that passes the stages one after the other, split into so many equal transfers."""
    slowest = max(stages_ms)
    return slowest + (sum(stages_ms) - slowest) / transfers
