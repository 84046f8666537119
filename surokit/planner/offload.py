"""What a step takes when the optimizer's states live on the host: three formulas, and which of them to take.

    none           C                                                                   surokit.AdamW
    synchronous    C + pipelined(M/B, N/r, M/B)                                        surokit.OffloadAdamW
    ZenFlow        max(C, (1-k) M/B, (1-k) N/(S r), (1-k) N/q) + (1-k) M/(S B)         surokit.ZenFlow

C computing of a step, M bytes of the trained weights in the gradients' dtype, N their number, B the link's rate in one direction, r
and q the host's rates of AdamW and of adding gradients up.

Synchronous: gradients go down, the host's AdamW, weights go up, while the GPU waits. They do so in n transfers, 16 or more, of
which one travels while another is worked on: pipelined(...) is the slowest of the three, and an nth of the other two. One after
the other they would be C + 2 M/B + N/r.

ZenFlow (arXiv 2505.12242) updates the share k of columns with the largest gradients on the GPU at once, and the others on the
host every S steps, beside the GPU's work. So a step waits for whatever takes longest, and besides for its share of the weights
that land: they are ordered before a forward pass and nothing hides them. Both directions together are (1-k)(1+1/S) M.

Where the synchronous step is stalled for a share f of its time and a share x of the stall is removed, the gain is 1 / (1 - x f).

r and q are those of the threads that they were measured with; a worker that has fewer may be slower, unless memory is what limits.

Host memory, bytes of an element that is not hot, with gradients and weights of b bytes: weights and moments in float32 12, two
accumulators 8, slots b each, updated weights that wait b. For the synchronous way 12, and three transfers each way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from surokit.planner import arguments, figures
from surokit.planner.hardware import Gpu

if TYPE_CHECKING:
    import pandas as pd

GIB = 2**30
Way = Literal["none", "synchronous", "zenflow"]
# Bytes that the host moves for a parameter: AdamW reads and writes weight and moments in float32, reads the sum of gradients and
# writes the weight in 16 bits; adding up reads 16 bits and reads and writes the sum.
_ADAM_BYTES, _ACCUMULATE_BYTES = 3 * 8 + 4 + 2, 2 + 8
OFFLOADING = ("zenflow", "offloadadamw")  # optimizers, as a plan calls them
SLOTS = 3
SUMS = 2  # accumulators: one is filled while the other is worked on
TRANSFERS = 16  # of a synchronous step, at least
_RING, _TRANSFER_BYTES = 2 * 3, 64 * 2**20  # pinned memory of the synchronous way: so many transfers, each no larger
# Below this gain the synchronous way is taken: it computes exactly what AdamW does, and deferred columns do not.
WORTH_DEFERRING = 1.05


@dataclass(frozen=True)
class Host:
    """A host: `link_gb_s` of pinned copies in one direction, parameters a second that its AdamW updates, memory.

    `accumulate_params_s` is how fast it adds gradients up; without it AdamW's rate times the bytes that AdamW moves over those
    that adding moves, which is 3.
    """

    link_gb_s: float
    adam_params_s: float
    memory_gib: float | None = None
    accumulate_params_s: float | None = None

    def __post_init__(self) -> None:
        arguments.number("link_gb_s", self.link_gb_s)
        rate = arguments.number("adam_params_s", self.adam_params_s)
        if rate < 1e5:
            raise ValueError(
                f"adam_params_s={rate:g} is slower than any host: the unit is parameters a second, 2e9 for two billion."
            )
        for name in ("memory_gib", "accumulate_params_s"):
            if getattr(self, name) is not None:
                arguments.number(name, getattr(self, name))

    @property
    def adds_params_s(self) -> float:
        return self.accumulate_params_s or self.adam_params_s * _ADAM_BYTES / _ACCUMULATE_BYTES


def host_of(gpu: Gpu, memory_gib: float | None = None) -> Host | None:
    """The host beside a GPU as a calibration measured it, with the datasheet's link where only that is known.

    None where AdamW's rate was not measured, or neither knows the link.
    """
    c = gpu.ceilings
    link = (c.host_gb_s if c else None) or gpu.host_gb_s
    rate, adding = (c.host_adam_params_s, c.host_accumulate_params_s) if c else (None, None)
    return None if link is None or rate is None else Host(link, rate, memory_gib, adding)


@dataclass(frozen=True)
class Offload:
    """Predicted times of a step and bytes, by way; `choice` is the one to take, and `why` says why in a sentence.

    stalled         f: share of the synchronous step in which the GPU waits
    removed         x: share of that stall that ZenFlow removes; below 0 where its step takes longer
    gain            of ZenFlow over the synchronous way, 1 / (1 - x f)
    binds           what ZenFlow's step takes as long as: compute, link, AdamW or adding
    landing_ms      that ZenFlow's step takes besides, for weights that come back
    traffic         bytes ZenFlow moves in a step over the model's; 2 without deferral
    host_gib        host memory by way; device_gib what the optimizer keeps on the GPU: states, and ZenFlow's
                    cold gradients until they have left
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
    choice: Way | None
    why: str

    @property
    def use(self) -> str:
        """The optimizer to take, as it is written; "" where there is no choice."""
        k, s = self.topk_ratio, self.update_interval
        ways = {
            "none": "surokit.AdamW",
            "synchronous": "surokit.OffloadAdamW",
            "zenflow": f"surokit.ZenFlow(topk_ratio={k:g}, update_interval={s})",
        }
        return ways.get(self.choice or "", "")

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
        """One row a way: step_ms, speed against no offload, host_gib, device_gib of states, chosen."""
        import pandas as pd

        ways: tuple[tuple[Way, float], ...] = (
            ("none", self.none_ms),
            ("synchronous", self.synchronous_ms),
            ("zenflow", self.zenflow_ms),
        )
        rows = [
            (way, ms, self.none_ms / ms, self.host_gib[way], self.device_gib[way], way == self.choice)
            for way, ms in ways
        ]
        return pd.DataFrame(rows, columns=["way", "step_ms", "speed", "host_gib", "device_gib", "chosen"])


def predict_offload(
    compute_ms: float,
    parameters: float,
    host: Host,
    *,
    topk_ratio: float = 0.1,
    update_interval: int = 4,
    gradient_bytes: int = 2,
    fits: bool | None = None,
    free_gib: float | None = None,
    slots: int = SLOTS,
) -> Offload:
    """A step's time by way, and the way to take.

    compute_ms      of a step without offload (an Estimate's step_ms)
    parameters      that train; `gradient_bytes` of each of their gradients
    topk_ratio, update_interval     ZenFlow's k and S
    fits            whether the GPU's memory suffices without offload; None: not known, and nothing is said for it
    free_gib        memory of the GPU for optimizer states, so that ZenFlow's share is checked too
    slots           pinned buffers of the gradients
    """
    c, n = arguments.number("compute_ms", compute_ms), arguments.parameters(parameters)
    s = arguments.integer("update_interval", update_interval, most=1e6)
    if isinstance(topk_ratio, bool) or not 0 <= topk_ratio < 1:
        raise ValueError(f"topk_ratio={topk_ratio!r} must be a share from 0 to below 1: 0.1 is a tenth of the columns.")
    k, m = float(topk_ratio), n * arguments.integer("gradient_bytes", gradient_bytes, most=8)
    over_link_ms = m / (host.link_gb_s * 1e9) * 1e3
    adam_ms, adding_ms = n / host.adam_params_s * 1e3, n / host.adds_params_s * 1e3
    traffic = (1 - k) * (1 + 1 / s)
    waits = {
        "compute": c,
        "link": (1 - k) * over_link_ms,
        "AdamW": (1 - k) * adam_ms / s,
        "adding": (1 - k) * adding_ms,
    }
    binds = max(waits, key=lambda name: waits[name])
    landing_ms = (1 - k) * over_link_ms / s
    synchronous, zenflow = (host_bytes(n, share, gradient_bytes, slots) / GIB for share in (None, k))
    host_gib: dict[Way, float] = {"none": 0.0, "synchronous": synchronous, "zenflow": zenflow}
    device_gib: dict[Way, float] = {
        "none": 12 * n / GIB,
        "synchronous": 0.0,
        "zenflow": device_bytes(n, k, gradient_bytes) / GIB,
    }
    draft = Offload(
        parameters=n,
        host=host,
        topk_ratio=k,
        update_interval=s,
        none_ms=c,
        synchronous_ms=c + _pipelined(max(TRANSFERS, m / _TRANSFER_BYTES), over_link_ms, adam_ms, over_link_ms),
        zenflow_ms=waits[binds] + landing_ms,
        binds=binds,
        landing_ms=landing_ms,
        traffic=traffic,
        host_gib=host_gib,
        device_gib=device_gib,
        choice=None,
        why="",
    )
    most = float("inf")
    if host.memory_gib:
        most = max(largest_on_host(host.memory_gib, share, gradient_bytes, slots) for share in (None, k))
    choice, why = _choose(draft, most, fits, free_gib)
    return replace(draft, choice=choice, why=why)


def _choose(o: Offload, most: float, fits: bool | None, free_gib: float | None) -> tuple[Way | None, str]:
    """The way to take, and why. `most` parameters are what one of the two could train on this host."""
    if fits:
        return "none", "the GPU's memory suffices, and offload only adds time"
    limit = o.host.memory_gib
    room: dict[Way, bool] = {way: limit is None or gib <= limit for way, gib in o.host_gib.items()}
    if limit is not None and not room["zenflow"] and not room["synchronous"]:
        return None, (
            f"the host's {figures.gib(limit)} hold no more than {figures.count(most)} trained parameters: "
            "train an adapter, or shard the states over GPUs with zero=1"
        )
    hot = o.device_gib["zenflow"]
    hot_fits = free_gib is None or hot <= free_gib
    gain = o.synchronous_ms / o.zenflow_ms
    if room["zenflow"] and hot_fits and (gain >= WORTH_DEFERRING or not room["synchronous"]):
        return "zenflow", (
            f"{gain:.2f} x the synchronous way, bound by {o.binds}; deferred columns learn differently, so look at the loss"
        )
    if not room["synchronous"]:
        return None, (
            f"the host lacks memory for all states, and ZenFlow takes {figures.gib(hot)} of the GPU, more than is "
            "free: lower topk_ratio"
        )
    if not room["zenflow"]:
        return "synchronous", (
            f"ZenFlow's sums and slots bring its host memory to {figures.gib(o.host_gib['zenflow'])}, more than there is"
        )
    if not hot_fits:
        return "synchronous", (
            f"ZenFlow takes {figures.gib(hot)} of the GPU for hot columns and gradients on their way, more than is free: lower "
            "topk_ratio to use it"
        )
    return "synchronous", f"ZenFlow would gain {gain:.2f} x only, and the synchronous way computes what AdamW does"


def stall_gain(stalled: float, removed: float) -> float:
    """1 / (1 - x f): how much faster a step becomes that is `stalled` for a share f when a share x of the stall is `removed`."""
    for name, value in (("stalled", stalled), ("removed", removed)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value:g} must be a share between 0 and 1.")
    if stalled * removed == 1:
        raise ValueError("A step that only stalls cannot lose all of its stall: give stalled below 1.")
    return 1 / (1 - removed * stalled)


def device_bytes(parameters: float, topk_ratio: float, gradient_bytes: int = 2) -> float:
    """Bytes of the GPU that ZenFlow takes for so many trained parameters: states of hot columns, and gradients of cold ones, which
    leave beside the next step."""
    return parameters * (12 * topk_ratio + gradient_bytes * (1 - topk_ratio))


def host_bytes(parameters: float, topk_ratio: float | None = 0.0, gradient_bytes: int = 2, slots: int = SLOTS) -> float:
    """Bytes of host memory for so many trained parameters of `gradient_bytes`, as ZenFlow with overlap allocates them; with
    topk_ratio=None as the synchronous way does. Columns that change sides take some more, for a moment."""
    if topk_ratio is None:
        return parameters * 12 + _RING * min(parameters * gradient_bytes / TRANSFERS, _TRANSFER_BYTES)
    return parameters * (1 - topk_ratio) * (12 + 4 * SUMS + (slots + 1) * gradient_bytes)


def largest_on_host(
    memory_gib: float, topk_ratio: float | None = 0.0, gradient_bytes: int = 2, slots: int = SLOTS
) -> float:
    """The most trained parameters that a host of so much memory serves; topk_ratio as for `host_bytes`."""
    room = arguments.number("memory_gib", memory_gib) * GIB
    if topk_ratio is None:
        rings = _RING * _TRANSFER_BYTES
        most = (room - rings) / 12
        small = _TRANSFER_BYTES * TRANSFERS / gradient_bytes  # parameters up to which a transfer is smaller than that
        return most if most > small else room / (12 + _RING * gradient_bytes / TRANSFERS)
    return room / host_bytes(1.0, topk_ratio, gradient_bytes, slots)


def _pipelined(transfers: float, *stages_ms: float) -> float:
    """Of work in so many equal transfers, each of which passes one stage after the other."""
    slowest = max(stages_ms)
    return slowest + (sum(stages_ms) - slowest) / transfers
