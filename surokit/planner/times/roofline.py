"""Estimate how long a step takes: each kernel the larger of its FLOPs over a rate and its bytes over a bandwidth.

traffic.py counts what one GPU computes, moves and launches; rates are applied here, the memory's or, where the GPU's cache holds
what a kernel reads and writes, the cache's. Where the GPU was calibrated (`Gpu.ceilings`)
these are rates that the machine reached, and the estimate is a prediction. Elsewhere they are the datasheet's, which few runs
reach, and the estimate is optimistic; it says so.

    row     max(FLOPs / rate, bytes / bandwidth, launches x launch time)       which of the three is the row's bound
    step    (max(sum of max(FLOPs, bytes) + gaps, sum of launches)) x fill + exposed communication

fill is 1 but for a pipeline, which fills and empties (division.py).

The host launches ahead of the device, so a row whose launches take longer than its kernels delays a step only where that holds for
the step as a whole: rows are what each part takes alone, and may sum to more than the step. A CPU launches and computes itself, so
there both sums add up; and there quantizing is arithmetic, slower than the copy that it is taken for, so that a quantized recipe's
estimate is optimistic at measured rates too.

A GPU waits about a microsecond from one kernel to the next (`GAP_US`, assumed and not measured), with graphs and without. In a step
that is captured as CUDA graphs the host launches nothing, and the gaps are all that launching costs. Where no launch was calibrated
it takes `LAUNCH_US`, assumed too.

Rates of large square products are an upper end: real shapes reach less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from surokit import arguments, units
from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import Pass
from surokit.hardware.rates import GAP_US, Rates, rates_of
from surokit.planner.counts.communication import GPUS_A_NODE, Communication, both, communicate
from surokit.planner.counts.division import NO_EXCHANGE, Exchange, sent_again
from surokit.planner.counts.flops import Compute, frozen, on_gpu, placements, trained_share
from surokit.planner.counts.fused_traffic import FusedStep
from surokit.planner.counts.memory import DTYPE_BYTES, Setup
from surokit.planner.counts.muon import muon_step
from surokit.planner.counts.traffic import GROUPS, Load, MicroBatch, loads, step_flops
from surokit.planner.inputs.shape import Shape

if TYPE_CHECKING:
    import pandas as pd

# What the kernel before has written, and a cache may still hold; weights and gradients are from long ago.
_PASSING = ("elementwise", "routing", "attention")
Bound = Literal["compute", "memory", "launch"]
_PROCESSOR_QUANTIZES = "quantizing is taken at the memory's bandwidth, which a processor does not reach"


@dataclass(frozen=True)
class KernelRow:
    """A KernelRow is one kind of work in one pass of a step on one GPU: FLOPs, bytes, launches, and the time that each takes alone.

    `ms` is the largest of the three times and `bound` names it; `device_ms` leaves the launches out. `launch_ms` is None where
    the cost of a launch is not known. `count` matrices or blocks share the row. `outputs` and `inner` are a product's, as in Load.
    """

    module: str
    group: str
    step: Pass
    part: str
    count: int
    flop: float
    bytes: float
    launches: float
    compute_ms: float
    memory_ms: float
    launch_ms: float | None
    outputs: float = 0.0
    inner: float = 0.0

    @property
    def device_ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)

    @property
    def ms(self) -> float:
        return max(self.device_ms, self.launch_ms or 0.0)

    def times(self, n: float) -> KernelRow:
        """Return a row of n times as much work."""
        if n == 1:
            return self
        sums = ("flop", "bytes", "launches", "compute_ms", "memory_ms")
        more = {name: n * getattr(self, name) for name in sums}
        return replace(self, **more, launch_ms=None if self.launch_ms is None else n * self.launch_ms)

    @property
    def bound(self) -> Bound:
        if (self.launch_ms or 0.0) > self.device_ms:
            return "launch"
        return "compute" if self.compute_ms >= self.memory_ms else "memory"


@dataclass(frozen=True)
class Estimate:
    """An Estimate holds a step's time on one GPU, row by row; the module's docstring says how rows make a step.

    kind    "prediction" at rates that a calibration reached; "optimistic" at a datasheet's, and where a processor quantizes
    tokens  of an optimizer step, over all GPUs
    fill    how many times as long as its micro-batches a step takes in a pipeline
    """

    rows: tuple[KernelRow, ...]
    communication: Communication
    rates: Rates
    tokens: int
    model_flop: float
    floor_ms: float
    peak_tflops: float | None
    notes: tuple[str, ...] = ()
    fill: float = 1.0

    @property
    def kind(self) -> Literal["prediction", "optimistic"]:
        return "prediction" if self.rates.measured and not _quantizes_slowly(self.rates, self.rows) else "optimistic"

    @property
    def how(self) -> str:
        return self.rates.how + (f"; {_PROCESSOR_QUANTIZES}" if _quantizes_slowly(self.rates, self.rows) else "")

    @property
    def device_ms(self) -> float:
        """Return the ms that the device computes and moves bytes."""
        return sum(row.device_ms for row in self.rows)

    @property
    def launch_ms(self) -> float | None:
        """Return the ms that the host takes for all launches; None where a launch's cost is not known."""
        return None if self.rates.launch_us is None else sum(row.launch_ms or 0.0 for row in self.rows)

    @property
    def gaps_ms(self) -> float:
        """Return the ms that the device waits between kernels."""
        return sum(row.launches for row in self.rows) * self.rates.gap_us / 1e3

    @property
    def exposed_ms(self) -> float | None:
        """Return the ms of communication that does not overlap with compute; None where the link's rate is not known."""
        return self.communication.exposed_ms

    @property
    def step_ms(self) -> float:
        """Return the ms of an optimizer step: the device's or the host's time, whichever is longer, and communication where it is
        known.

        On a CPU, which is both device and host, their sum counts.
        """
        return self.device_ms + self._added_ms + self.bubble_ms + (self.exposed_ms or 0.0)

    @property
    def bubble_ms(self) -> float:
        """Return the ms that a pipeline's GPU waits for the first micro-batch and after the last one."""
        updates = sum(row.device_ms for row in self.rows if row.step == "optimizer")
        return (self.fill - 1) * (self.device_ms + self._added_ms - updates)

    @property
    def _added_ms(self) -> float:
        """Return the ms that launching adds to the device's time: gaps, or the host's excess where that is longer."""
        launch = self.launch_ms or 0.0
        return max(self.gaps_ms, launch - self.device_ms) if self.rates.ahead else launch

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second over all GPUs."""
        return self.tokens / self.step_ms * 1e3

    @property
    def tflops(self) -> float:
        """Return the model TFLOPS that one GPU reaches."""
        return self.model_flop / self.step_ms / 1e9

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs as a share of what the dense BF16 peak could compute in the step; None where no peak is known."""
        return None if self.peak_tflops is None else self.tflops / self.peak_tflops

    @property
    def speed_of_light(self) -> float:
        """Return the share of the step that its products would take with each at its own rate (the peak, where it is known)."""
        return self.floor_ms / self.step_ms

    @property
    def binds(self) -> str:
        """Say what the step waits for most: compute, memory, launch or communication."""
        return max(self.by_bound().items(), key=lambda item: item[1])[0]

    def by_bound(self) -> dict[str, float]:
        """Return the ms of the step by what bounds it: compute, memory, launch (gaps, or what the host adds), communication, and a
        pipeline's bubble where there is one. They sum to the step."""
        sums = {"compute": 0.0, "memory": 0.0}
        for row in self.rows:
            sums["compute" if row.compute_ms >= row.memory_ms else "memory"] += row.device_ms
        sums |= {"launch": self._added_ms, "communication": self.exposed_ms or 0.0}
        return sums | ({"bubble": self.bubble_ms} if self.bubble_ms else {})

    def by_group(self) -> dict[str, float]:
        """Return the device ms by group: products, attention, head and loss, elementwise, routing, adapter, quantization,
        optimizer."""
        return self._sums(lambda row: row.group, GROUPS)

    def by_pass(self) -> dict[str, float]:
        """Return the device ms by pass: forward, recompute, backward, optimizer."""
        return self._sums(lambda row: row.step, ("forward", "recompute", "backward", "optimizer"))

    @property
    def forward_share(self) -> float:
        """Return the forward's share of the time that the device computes; the optimizer's is in neither part."""
        passes = self.by_pass()
        return passes["forward"] / (sum(passes.values()) - passes["optimizer"])

    def by_module(self) -> dict[str, float]:
        """Return the device ms by module, longest first."""
        return dict(sorted(self._sums(lambda row: row.module, ()).items(), key=lambda item: -item[1]))

    def _sums(self, key: Callable[[KernelRow], str], order: Iterable[str]) -> dict[str, float]:
        sums = dict.fromkeys(order, 0.0)
        for row in self.rows:
            sums[key(row)] = sums.get(key(row), 0.0) + row.device_ms
        return sums

    def table(self) -> pd.DataFrame:
        """Return the rows as a DataFrame, one a module, pass and part: FLOPs, bytes, launches, and the ms of each, on one GPU."""
        import pandas as pd

        columns = (
            *("module", "group", "step", "part", "count", "flop", "bytes", "launches"),
            *("compute_ms", "memory_ms", "launch_ms", "ms", "bound"),
        )
        return pd.DataFrame([[getattr(row, c) for c in columns] for row in self.rows], columns=list(columns))

    def lines(self) -> list[tuple[str, float, str, str, str]]:
        """Return the rows (term, value, unit, kind, how) of a plan's table."""
        rows: list[tuple[str, float, str, str, str]] = [("step, estimated", self.step_ms, "ms", self.kind, self.how)]
        device = self.device_ms
        for group, ms in self.by_group().items():
            if ms:
                bound = _mostly(row for row in self.rows if row.group == group)
                rows.append(
                    (f"  {group}", ms, "ms", self.kind, f"{ms / device:.0%} of the device's time, bound by {bound}")
                )
        if self.launch_ms is not None:
            count = units.count(sum(row.launches for row in self.rows))
            hidden = self.launch_ms <= device + self.gaps_ms
            if self.gaps_ms and hidden:
                how = (
                    f"{count} kernels{' of CUDA graphs' * self.rates.graphs}, a gap of {GAP_US:g} us assumed after each"
                )
                rows.append(("  gaps", self.gaps_ms, "ms", self.kind, how))
            if not self.rates.graphs:
                rest = ", hidden behind the device" if hidden else ": the host is what the step waits for"
                how = f"{count} launches of {self.rates.launch_us:.3g} us{' assumed' * self.rates.launch_assumed}"
                how += rest if self.rates.ahead else ", added to the rest"
                rows.append(("  launches", self.launch_ms, "ms", self.kind, how))
        if self.bubble_ms:
            how = "the pipeline fills and empties (1F1B): more micro-batches (accumulate=) make it a smaller share"
            rows.append(("  bubble", self.bubble_ms, "ms", self.kind, how))
        if self.communication.bytes and self.communication.exposed_ms is not None:
            how = f"of {self.communication.ms:,.1f} ms: {self.communication.how}"
            rows.append(("  communication, exposed", self.communication.exposed_ms, "ms", self.kind, how))
        rows.append(("tokens a second, estimated", self.tokens_per_s, "tokens/s", self.kind, "tokens a step / step"))
        return rows


def _mostly(rows: Iterable[KernelRow]) -> str:
    sums: dict[str, float] = {}
    for row in rows:
        bound = "compute" if row.compute_ms >= row.memory_ms else "memory"
        sums[bound] = sums.get(bound, 0.0) + row.device_ms
    return max(sums, key=lambda bound: sums[bound])


def estimate_step(
    shape: Shape | None,
    compute: Compute | None,
    recipe: Any,
    setup: Setup,
    gpu: Gpu | None,
    *,
    trained_parameters: float,
    between_gb_s: float | None = None,
    gpus_a_node: int = GPUS_A_NODE,
) -> Estimate | None:
    """Estimate the time of an optimizer step; None where something is missing, which `why_no_estimate` names.

    trained_parameters: the number that have a gradient and optimizer states. between_gb_s: GB/s that one GPU has between nodes,
    needed beyond `gpus_a_node` GPUs.
    """
    if why_no_estimate(shape, compute, setup, gpu):
        return None
    assert shape is not None
    assert compute is not None
    assert gpu is not None
    assert setup.batch is not None
    assert setup.length is not None
    rates = rates_of(gpu, setup.dtype, setup.attention_kernel)
    assert isinstance(rates, Rates)
    mine = setup.batch * setup.length * setup.accumulate
    whole, stage, division = compute, shape, setup.division
    if division.divides:
        stage = division.stages(shape)[-1]  # the slowest: it has the head
        model, shape = shape, division.narrow(stage)
        setup = setup.of_part(shape, model, recipe)
        compute = step_flops(shape, on_gpu(recipe, gpu), setup, whole.attention)
        trained_parameters *= trained_share(shape, model, recipe)
    if setup.graphs:
        rates = replace(rates, launch_us=0.0, graphs=True)
    recipe = on_gpu(recipe, gpu)
    kind = FusedStep if setup.fusion.fuses else MicroBatch
    rows = tuple(_row(load, rates) for load in loads(shape, compute, recipe, setup, gpu, trained_parameters, kind))
    sent = _communication(shape, stage, recipe, setup, gpu, rows, trained_parameters, between_gb_s, gpus_a_node)
    of_one = mine / division.gpus
    return Estimate(
        rows=rows,
        communication=sent,
        rates=rates,
        tokens=mine * setup.replicas,
        model_flop=float(whole.model) * of_one,
        floor_ms=_floor_ms(whole, gpu, rates) * of_one,
        peak_tflops=gpu.plain_tflops,
        notes=tuple(_notes(rates, sent, rows)),
        fill=division.fill(setup.accumulate),
    )


def _communication(
    shape: Shape,
    stage: Shape,
    recipe: Any,
    setup: Setup,
    gpu: Gpu,
    rows: tuple[KernelRow, ...],
    trained_parameters: float,
    between_gb_s: float | None,
    gpus_a_node: int,
) -> Communication:
    """Count what a GPU sends in a step: between layers, and of what trains and of the weights to the GPUs that have the same.

    shape: one GPU's part of `stage`, which is of whole width.
    """
    assert setup.batch is not None
    assert setup.length is not None
    division, width = setup.division, DTYPE_BYTES[setup.dtype]
    passes = {
        step: sum(row.device_ms for row in rows if row.step == step) for step in ("forward", "recompute", "backward")
    }
    peer_gb_s = (gpu.ceilings.peer_gb_s if gpu.ceilings else None) or gpu.peer_gb_s
    exchange = division.exchange(
        stage,
        setup.batch * setup.length * setup.accumulate,
        width,
        again=sent_again(setup.repeats, (setup.recompute_blocks or stage.layers) / stage.layers, setup.early_stop),
        weight_gradients=not frozen(recipe),
        peer_gb_s=peer_gb_s,
        between_gb_s=between_gb_s,
        gpus_a_node=gpus_a_node,
    )
    node = max(1, gpus_a_node // division.gpus)
    trained, held = setup.experts
    weights = _weight_bytes(shape, recipe, width)
    updates = 0.0
    if setup.optimizer == "muon":
        updates = muon_step(shape, recipe, *setup.sharing).sent

    def over(e: int, trains: float, holds: float, exchange: Exchange) -> Communication:
        """Count what is sent over 1 / e of the replicas, of these shares of what trains and of the weights."""
        return communicate(
            gpus=setup.replicas // e if setup.training else 1,
            zero=setup.zero,
            gradient_bytes=trained_parameters * width * trains,
            weight_bytes=weights * holds,
            trained_bytes=trained_parameters * width * trains,
            accumulate=setup.accumulate,
            forward_ms=passes["forward"],
            backward_ms=passes["recompute"] + passes["backward"],
            peer_gb_s=peer_gb_s,
            between_gb_s=between_gb_s,
            gpus_a_node=max(1, node // e),
            exchange=exchange,
            update_bytes=updates if e == 1 else 0.0,
        )

    if division.expert == 1:
        return over(1, 1.0, 1.0, exchange)
    return both(over(1, 1 - trained, 1 - held, exchange), over(division.expert, trained, held, NO_EXCHANGE))


def why_no_estimate(shape: Shape | None, compute: Compute | None, setup: Setup, gpu: Gpu | None) -> str:
    """Say what is missing for an estimate, in one sentence with the remedy; empty where nothing is."""
    if shape is None or compute is None:
        return "A step's time needs shapes, and a number of parameters has none: plan with a config or a model."
    if setup.batch is None or setup.length is None:
        return "A step's time needs its tokens: give batch= and length=."
    if gpu is None:
        return "A step's time needs a GPU: give gpu='H100' or the like."
    rates = rates_of(gpu, setup.dtype)
    return rates if isinstance(rates, str) else ""


def _row(load: Load, rates: Rates) -> KernelRow:
    tflops = rates.attention_tflops if load.group == "attention" else rates.products[load.kind]
    return KernelRow(
        module=load.module,
        group=load.group,
        step=load.step,
        part=load.part,
        count=load.count,
        flop=load.flop,
        bytes=load.bytes,
        launches=load.launches,
        compute_ms=load.flop / tflops / 1e9,
        memory_ms=rates.memory_ms(load.bytes, load.launches, passing=load.group in _PASSING),
        launch_ms=None if rates.launch_us is None else load.launches * rates.launch_us / 1e3,
        outputs=load.outputs,
        inner=load.inner,
    )


def _floor_ms(compute: Compute, gpu: Gpu, rates: Rates) -> float:
    """Return the ms that a token's products take, each at its own peak, or at the measured rate where there is no peak."""
    total = 0.0
    for p in compute.products:
        for flop, kind in p.passes:
            tflops = gpu.peak(kind)[0] or rates.products[kind]
            total += flop / tflops / 1e9
    return total


def _weight_bytes(shape: Shape, recipe: Any, width: int) -> float:
    """Return the bytes of all weights as they are held, adapters included, which ZeRO 3 gathers."""
    storage = getattr(recipe, "storage", None)
    total = float(shape.parameters * width)
    for place in placements(shape, recipe):
        w = place.weight
        if storage is not None and not (shape.tied and w.name == "lm_head"):
            total += place.quantized * w.n * w.k * (storage.bits / 8 - width)
        total += place.adapter_parameters * width
    return total


def _quantizes_slowly(rates: Rates, rows: Iterable[KernelRow]) -> bool:
    return not rates.ahead and any(row.group == "quantization" for row in rows)


def _notes(rates: Rates, sent: Communication, rows: Iterable[KernelRow]) -> Iterable[str]:
    if _quantizes_slowly(rates, rows):
        yield f"{_PROCESSOR_QUANTIZES}: the step takes longer than estimated"
    if rates.launch_us is None:
        yield "launches are left out of the step's time: their cost is measured by sk.calibrate()"
    if sent.bytes and sent.ms is None:
        yield f"communication is left out of the step's time: {sent.how.rpartition('; ')[2]}"


def recipe_gain(step_ms: float, gemm_ms: float, speedup: float, quantize_ms: float = 0.0) -> float:
    """Return the gain of a step when `gemm_ms` of it run `speedup` times as fast and quantizing adds `quantize_ms`.

    T' = T - t_gemm (1 - 1/s) + t_quantize, from shares of *time*; the gain is T / T'. Shares of FLOPs promise more, since work that
    is no product takes time too.
    """
    step, gemm = arguments.number("step_ms", step_ms), arguments.number("gemm_ms", gemm_ms)
    faster = arguments.number("speedup", speedup)
    if gemm > step:
        raise ValueError(f"gemm_ms={gemm:g} is more than the whole step of {step:g} ms: give both of one step.")
    if quantize_ms < 0:
        raise ValueError(f"quantize_ms={quantize_ms:g} must not be negative.")
    return step / (step - gemm * (1 - 1 / faster) + quantize_ms)
