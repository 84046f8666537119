"""`plan`: what a run computes, holds, takes and costs, before a GPU is touched.

    plan = sk.plan(405e9, tokens=15.6e12, gpus=16000, gpu="H100", tflops_per_gpu=400, usd_per_gpu_hour=2.0)
    plan.flops, plan.days, plan.gpu_hours, plan.usd        3.7908e25, 68.55, 26.325e6, 52.65e6

A Plan keeps apart what is exact, what is approximate and what is a prediction, and names the peak behind every share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from surokit import arguments, units
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.hardware.machine import machine_gib, room_for_decoded
from surokit.planner import picture
from surokit.planner.compare import check as checking
from surokit.planner.compare.check import Check
from surokit.planner.counts.flops import (
    Attention,
    Compute,
    Recompute,
    count_flops,
    frozen,
    on_gpu,
    product_kinds,
    trained_parameters,
)
from surokit.planner.counts.memory import DTYPE_BYTES, SLACK, Layers, Memory, Setup, blocks_of, count_memory
from surokit.planner.inputs.fusion import Transposed, read_fusion
from surokit.planner.inputs.shape import Shape, built_here
from surokit.planner.inputs.subject import Subject, read_subject
from surokit.planner.inverse import offload_plan, questions, recipe_choice, remedies, speedups
from surokit.planner.offload.formulas import HOT, OFFLOADING, SLOTS, Host, Offload, host_of
from surokit.planner.offload.streaming import Streamed
from surokit.planner.times.cost import Price, Time, Work, count_time, exact, read_price
from surokit.planner.times.energy import energy_kwh
from surokit.planner.times.roofline import Estimate, estimate_step
from surokit.planner.words import Line, as_html, as_text, plan_answers, plan_lines, plan_notes, plan_source
from surokit.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_OPTIMIZERS = {name: name for name in ("adamw", "adamw8bit", *OFFLOADING, "none")} | {"sgd": "none"}


@dataclass(frozen=True, repr=False)
class Plan:
    """Expectations of a run. Figures that need an argument that was not given are None, and `notes` say which.

    flops               model FLOPs of the whole run
    days, gpu_hours, usd    predictions; None without a rate (tflops_per_gpu, or mfu with gpu) and, for usd, a price
    time, memory, compute   the parts, with every figure behind these
    source      what was taken from a live model or session, in a line; "" without one
    """

    title: str
    parameters: float
    shape: Shape | None
    recipe: Any
    setup: Setup
    tokens: float | None
    gpu: Gpu | None
    price: Price | None
    flops_per_token: float
    flops: float | None
    flops_per_step: float | None
    compute: Compute | None
    time: Time
    memory: Memory
    factor: int
    notes: tuple[str, ...]
    source: str
    subject: Subject = field(compare=False)
    given: Mapping[str, Any] = field(compare=False)

    def but(self, **changes: Any) -> Plan:
        """The same plan with other arguments: `plan.but(batch=4)`; an argument that is None is taken back."""
        asked = {**self.given, **changes}
        return plan(self.subject, **{k: v for k, v in asked.items() if v is not None or k not in self.given})

    @property
    def days(self) -> float | None:
        """Predicted days of the run on all GPUs."""
        return self.time.days

    @property
    def gpu_hours(self) -> float | None:
        """Predicted GPU hours of the run."""
        return self.time.gpu_hours

    @property
    def usd(self) -> float | None:
        """Predicted cost in US dollars at the given price, at its middle where it is a range."""
        return self.time.usd

    @property
    def usd_range(self) -> tuple[float, float] | None:
        """Predicted cost in US dollars from the low to the high end of the given price."""
        return self.time.usd_range

    @property
    def kwh(self) -> float | None:
        """The most energy that the GPUs can draw: their hours at the power limit they are sold with; None without either."""
        return None if self.gpu is None or self.gpu_hours is None else energy_kwh(self.gpu_hours, self.gpu)

    @cached_property
    def estimate(self) -> Estimate | None:
        """A step's time, row by row; None where shape, batch, length or the rates of the GPU are missing."""
        between_gb_s = self.given.get("between_gb_s")
        return _estimate(self.shape, self.parameters, self.compute, self.recipe, self.setup, self.gpu, between_gb_s)

    @property
    def trained_parameters(self) -> float:
        """Parameters with a gradient and an optimizer's state."""
        return _trains(self.shape, self.parameters, self.recipe, self.setup)

    @property
    def room_gib(self) -> float | None:
        """The memory to fit into: the GPU's own; on a CPU that of the Gpu given for it, or of this machine. None where unknown."""
        if self.gpu is not None and self.gpu.memory_gib is not None:
            return self.gpu.memory_gib
        return machine_gib() if self.setup.device == "cpu" else None

    def fits(self, gib: float | None = None) -> bool:
        """Whether the memory of one GPU suffices: all terms, exact and approximate, against `gib` (`room_gib` without it).

        Raises ValueError where the answer needs a term that could not be counted.
        """
        fits = self.memory.gib <= recipe_choice.asked_gib(self, gib)
        if fits and self.memory.left_out:
            raise ValueError(f"fits() cannot tell yet, it lacks {self.memory.left_out[0]}.")
        return fits

    @property
    def answers(self) -> tuple[str, ...]:
        """Does it fit, how long, how much: a line each, where it is known; the first lines of what is printed."""
        return tuple(plan_answers(self))

    # -- asked backwards; see inverse/ for arguments and errors

    def largest(self, what: str, *, gib: float | None = None, multiple: int = 1) -> int:
        """The largest "batch", "length", number of "layers", or of "parameters" of a plan of a number, that fits one GPU."""
        return questions.largest(self, what, gib=gib, multiple=multiple)

    def gpus_for(self, **goals: Any) -> int:
        """The fewest GPUs that are done in `days=`, hold the model in `gib=` each, keep to `usd=`."""
        return questions.gpus_for(self, **goals)

    def tokens_for(self, **budgets: float) -> int:
        """The most tokens within `days=`, `gpu_hours=`, `usd=`."""
        return questions.tokens_for(self, **budgets)

    def rate_for(self, **budgets: float) -> float:
        """Model TFLOPS that each GPU must achieve for `days=`, `gpu_hours=`, `usd=`."""
        return questions.rate_for(self, **budgets)

    def parameters_for(self, *, law: Any = None, **budgets: float) -> questions.Optimal:
        """The model, and its tokens, that make most of `days=`, `gpu_hours=`, `usd=` by a scaling law."""
        return questions.parameters_for(self, law=law, **budgets)

    def recipes(self, names: Any = None, *, gib: float | None = None) -> pd.DataFrame:
        """This plan in every recipe: step, speedup, memory, native or emulated; of those that fit, the one predicted fastest."""
        return recipe_choice.recipes(self, names, gib=gib)

    def fitting(self, *, gib: float | None = None, host: Host | None = None) -> remedies.Fitting:
        """What would make the plan fit, and what each leaves; on the host too, where `host` has a `memory_gib`."""
        return remedies.fitting(self, gib=gib, host=host)

    def faster(self, *, gib: float | None = None) -> speedups.Faster:
        """What fusing, CUDA graphs, less recompute and a cached W' are planned to give, and which of them to choose."""
        return speedups.faster(self, gib=gib)

    def binds(self) -> remedies.Binds:
        """The term that memory depends on most, what takes the most time, and what to do about either."""
        return remedies.binds(self)

    def offload(self, host: Host | None = None, **options: Any) -> Offload:
        """A step with the optimizer's states on the host, synchronously and as ZenFlow, beside one without, and which to take: each
        way is held against the GPU's memory and the host's.

        host is what a calibration of the plan's GPU measured, without one. Options are those of `predict_offload`; without them
        ZenFlow's are the plan's own optimizer's. Raises ValueError where host or a step's time is not known, TypeError for a host
        that is none.
        """
        return offload_plan.offload(self, host, **options)

    def streamed(self, host: Host | None = None, *, prefetch: int | None = None) -> Streamed:
        """A step whose blocks' weights stay on the host (sk.offload_weights), so many fetched ahead: memory, bytes, time.

        host as for `offload`; prefetch is the plan's own, or 1, without it. Raises ValueError for a number of parameters, which has
        no blocks, and where host or a step's time is not known.
        """
        return offload_plan.streamed(self, host, prefetch=prefetch)

    @property
    def deferral(self) -> dict[str, Any]:
        """ZenFlow's settings that a prediction asks for, where the plan's optimizer is one."""
        given = self.given.get("optimizer")
        return _deferral(self.subject.own.arguments.get("optimizer") if given is None else given)

    # -- beside a measurement, and shown

    def check(self, measured: Any) -> Check:
        """This plan beside a Session, a Profile or a dict of figures, the misses first; `.recalibrated` follows the measured."""
        return checking.check(self, measured)

    def plot(self, gib: float | None = None) -> Figure:
        """Memory as a bar, exact terms solid, approximate ones hatched; `sk.plot_memory` draws several plans."""
        return picture.plot_memory(self, gib)

    def explore(self) -> Any:
        """This plan with sliders, in a notebook; printed elsewhere."""
        from surokit.widgets.planning import explore

        return explore(self)

    def lines(self) -> tuple[Line, ...]:
        """The table's lines, in order."""
        return tuple(plan_lines(self))

    def table(self) -> pd.DataFrame:
        """The plan as a DataFrame: group, term, value, unit, kind, how."""
        return data_frame([line.__dict__ for line in self.lines()])

    def gemms(self) -> pd.DataFrame:
        """FLOPs a token of every kind of product: module, n, k, count, forward, backward, recompute, share of the model FLOPs."""
        compute = self._counted()
        columns = ("module", "n", "k", "count", "forward", "grad_input", "grad_weight", "recompute")
        return data_frame(
            [
                {**{c: getattr(p, c) for c in columns}, "share": (p.forward + p.backward) / compute.model}
                for p in compute.products
            ]
        )

    def modules(self) -> pd.DataFrame:
        """FLOPs a token by module: module, forward, backward, recompute, share; the rows sum to the plan's own."""
        compute = self._counted()
        sums: dict[str, list[int]] = {}
        for p in compute.products:
            row = sums.setdefault(p.module.partition(".")[0], [0, 0, 0])
            for i, flop in enumerate((p.forward, p.backward, p.recompute)):
                row[i] += flop
        return data_frame(
            [
                {"module": name, "forward": f, "backward": b, "recompute": r, "share": (f + b) / compute.model}
                for name, (f, b, r) in sums.items()
            ]
        )

    def _counted(self) -> Compute:
        if self.compute is None:
            raise ValueError("A number of parameters has no products to list: plan with a config or a model.")
        return self.compute

    @property
    def all_notes(self) -> tuple[str, ...]:
        """What to know beside the figures, the estimate of a step included."""
        return (*self.notes, *(self.estimate.notes if self.estimate else ()))

    def __repr__(self) -> str:
        return as_text(f"Plan: {self.title}", self._opening, self.lines(), self.all_notes)

    def _repr_html_(self) -> str:
        return as_html(f"Plan: {self.title}", self._opening, self.lines(), self.all_notes)

    @property
    def _opening(self) -> tuple[str, ...]:
        return (*([self.source] if self.source else []), *self.answers)


def plan(
    what: Any,
    *,
    tokens: float | None = None,
    gpus: int = 1,
    gpu: str | Gpu | None = None,
    tflops_per_gpu: float | None = None,
    mfu: float | None = None,
    goodput: float = 1.0,
    usd_per_gpu_hour: float | tuple[float, float] | Price | None = None,
    recipe: Any = None,
    batch: int | None = None,
    length: int | None = None,
    attention: Attention = "causal",
    recompute: Recompute | None = None,
    optimizer: Any = None,
    state_dtype: Any = None,
    dtype: Any = None,
    master: bool = False,
    zero: int = 0,
    logits: Literal["fused", "whole"] | None = None,
    accumulate: int | None = None,
    layers: Layers | None = None,
    slack: float = SLACK,
    between_gb_s: float | None = None,
    training: bool = True,
    fusion: Any = None,
    graphs: bool | None = None,
    transposed: Transposed | None = None,
    offload_weights: bool | int | None = None,
    offload_activations: bool | None = None,
) -> Plan:
    """Plan a run: FLOPs, time, cost, and the memory of one GPU.

    what        number of parameters (405e9), a config (dict as in config.json, folder, path, DecoderConfig), a live model
                with a .config, or a Session. What a live one has is planned where no argument says otherwise: its recipe and
                adapters, what trains, fusion and recompute, dtype and device; a session's optimizer, steps and CUDA graphs too
    tokens      of the whole run; `batch` (sequences on one GPU) x `length` (tokens) x `gpus` is one step
    gpu         a name in the hardware table, "cpu", or a Gpu; gives peaks and memory, and whose kernels run (a GPU's without
                it, those of the device that a live model is on)
    tflops_per_gpu, mfu     the achieved rate of one GPU in model TFLOPS, or as a share of its dense BF16 peak: one of
                them, or neither
    goodput     share of the hours that makes progress (restarts and evaluation do not)
    usd_per_gpu_hour    a price, a range (1.8, 3.2) or a dated `Price`; none is assumed
    recipe      a Recipe or its name; its adapter and storage decide what trains and how weights are held
    attention   "causal" counts the keys that a token sees, "full" all of them
    recompute   "none" (unless a Fusion says otherwise), "full" (each layer's forward) or "selective": the outputs of norm and
                SwiGLU of our fused layers; attention's products in transformers' layers
    optimizer   "adamw" (without it), "adamw8bit", "sgd" (no state), "zenflow" or "offloadadamw" (states on the host), or an
                optimizer of ours; `state_dtype` is that of its moments, the weights' own without it
    dtype       of weights and gradients (bf16, or fp16 on a GPU without bf16 products; a live model's own); `master` adds float32
                masters
    zero        ZeRO stage over `gpus`: 1 shards optimizer states, 2 gradients too, 3 weights too
    layers      "surokit" or "transformers": whose layers compute, which decides what is kept for the backward; a live model's own
                without it
    logits      "fused" with the loss, as our layers do, or "whole", as transformers' do
    accumulate  micro-batches of `batch` sequences whose gradients one optimizer step sums
    slack       share on top of the bytes that tensors take: fragmentation and workspace
    between_gb_s    GB/s that one GPU has between nodes, in one direction; a step beyond 8 GPUs communicates over it
    training    False counts a forward pass, and the KV cache in place of training's states
    fusion      "none", "fused" or a Fusion: which operations are computed together (sk.fuse)
    graphs      True: a step is captured as CUDA graphs, and the host launches nothing; the gaps between kernels stay
    transposed  W' of a frozen weight that is quantized for its products: "cached", or turned "on the fly"; without it, as
                `fusion` says
    offload_weights     True, or how many are fetched ahead: the weights of blocks wait on the host (sk.offload_weights), and each
                block is computed again in backward
    offload_activations     True: what backward needs waits on the host (sk.offload_activations)

    Raises ValueError or TypeError, in one sentence with the remedy, for figures that cannot be meant.
    """
    given = {name: value for name, value in locals().items() if name != "what" and value is not None}
    subject = read_subject(what)
    shape, parameters, own = subject.shape, subject.parameters, subject.own.arguments
    gpus = arguments.integer("gpus", gpus, most=1e7)
    device = None if gpu is None else find_gpu(gpu)
    without_bf16 = device is not None and not device.has_bf16
    held = _dtype(dtype or subject.dtype or ("fp16" if without_bf16 else None))
    device = device.multiplying(held) if device else None
    batch = own.get("batch") if batch is None else arguments.integer("batch", batch)
    length = own.get("length") if length is None else arguments.integer("length", length)
    run_tokens = None if tokens is None else arguments.tokens(tokens)
    goodput = arguments.share("goodput", goodput)
    price = None if usd_per_gpu_hour is None else read_price(usd_per_gpu_hour)
    _choice("attention", attention, ("causal", "full"))
    _choice("recompute", recompute, (None, "none", "selective", "full"))
    _choice("logits", logits, (None, "fused", "whole"))
    _choice("layers", layers, (None, "surokit", "transformers"))
    _choice("transposed", transposed, (None, "cached", "on the fly"))
    accumulate = own.get("accumulate", 1) if accumulate is None else arguments.integer("accumulate", accumulate)
    flags = {"graphs": graphs, "master": master, "training": training, "offload_activations": offload_activations}
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is unknown: use True or False.")
    slack = 0.0 if slack == 0 and not isinstance(slack, bool) else arguments.share("slack", slack)
    between_gb_s = None if between_gb_s is None else arguments.number("between_gb_s", between_gb_s)
    _choice("zero", zero, (0, 1, 2, 3))
    if tflops_per_gpu is not None and mfu is not None:
        raise ValueError("tflops_per_gpu and mfu both say how fast a GPU is: give one of them.")
    if tflops_per_gpu is not None:
        tflops_per_gpu = arguments.rate(tflops_per_gpu, *((device.name, device.fastest_tflops) if device else ()))
    if mfu is not None:
        mfu = arguments.share("mfu", mfu)
        if device is None or device.plain_tflops is None:
            peak = "BF16" if device is None else device.plain
            name = "no GPU" if device is None else f"no {peak} peak of {device.name}"
            raise ValueError(
                f"mfu={mfu:g} is a share of a dense {peak} peak, and there is {name}: give gpu='H100' or the like, "
                "or tflops_per_gpu=."
            )
    if recipe is not None:
        from surokit.recipe import find_recipe

        recipe = find_recipe(recipe)
    layers = layers or subject.layers
    kind = subject.device if device is None else device.device
    recipe = own.get("recipe") if recipe is None else recipe
    if recompute is None and not hasattr(fusion, "recompute"):
        recompute = own.get("recompute")
    if fusion is None:
        fusion = _own_fusion(subject, layers, kind)
    fused, recompute = read_fusion(fusion, transposed, recompute)
    if fused and shape is not None and not built_here(shape):
        raise ValueError(f"surokit fuses no layers of {shape.family}: leave fusion= out.")
    if graphs and kind == "cpu":
        raise ValueError("CUDA graphs need a GPU: leave graphs= out, or give gpu='H100' or the like.")
    if graphs is None:
        graphs = kind == "cuda" and own.get("graphs", False)
    optimizer = own.get("optimizer", "adamw") if optimizer is None else optimizer
    if kind != "cpu" and training:  # on a CPU all is the host's
        offload_weights = own.get("offload_weights") if offload_weights is None else offload_weights
        offload_activations = own.get("offload_activations") if offload_activations is None else offload_activations
    # what trains of the model as it is says nothing of another recipe, or of other dtypes
    as_it_is = training and subject.own.has(recipe) and held == _dtype(subject.dtype)
    trained = subject.own.trained if as_it_is else None
    prefetch = _prefetch(offload_weights, shape, kind, training and not frozen(recipe), _optimizer(optimizer))
    if prefetch and training:
        recompute = "full"
    if prefetch and gpus > 1 and zero > 1:
        raise ValueError(
            f"offload_weights streams whole weights, and zero={zero} shards them: give zero=0 or 1, or leave it out."
        )
    if offload_activations and kind == "cpu":
        raise ValueError("offload_activations needs a GPU: leave it out, or give gpu='H100' or the like.")
    deferral = _deferral(optimizer)
    setup = Setup(
        dtype=held,
        optimizer=_optimizer(optimizer),
        state_dtype=_dtype(state_dtype or _option(optimizer, "state_dtype") or (trained and trained.dtype) or held),
        master=master,
        gpus=gpus,
        zero=zero,
        batch=batch,
        length=length,
        recompute=recompute,
        logits=logits or ("whole" if layers == "transformers" and not fused else "fused"),
        training=training,
        device=kind,
        layers=layers,
        accumulate=accumulate,
        slack=slack,
        fusion=fused,
        graphs=graphs,
        hot=deferral.get("topk_ratio", 0.0),
        overlap=deferral.get("overlap_step", True),
        slots=deferral.get("slots", SLOTS),
        prefetch=prefetch,
        offload_activations=bool(offload_activations),
        trained=trained,
    )
    if setup.offloads:
        setup = replace(setup, graphs=False)
    if kind == "cpu" and recipe != own.get("recipe"):
        recipe = _as_a_session_decodes(shape, parameters, recipe, setup, device)
    # our layers compute norms and SwiGLU again, which are no products
    ours = layers == "surokit" or bool(fused)
    repeated: Recompute = "none" if recompute == "selective" and ours else recompute
    factor = 2 if not training else 4 if frozen(recipe) else 6
    compute = None
    carried = on_gpu(recipe, device)
    per_token: Fraction = factor * exact(subject.active)
    recompute_share = 0.0
    if shape is not None:
        compute = count_flops(
            shape, length=length, recipe=carried, attention=attention, recompute=repeated, training=training
        )
        per_token = Fraction(compute.model)
        recompute_share = compute.recompute / compute.model
    elif recompute == "full" and training:
        recompute_share = 2 / factor
    estimate = None
    if tflops_per_gpu is None and mfu is None and device is not None and device.ceilings is not None:
        estimate = _estimate(shape, parameters, compute, recipe, setup, device, between_gb_s)
    memory = count_memory(shape, parameters, carried if fused else recipe, setup)
    waits_ms = None
    if setup.offloads and estimate is not None and device is not None and (host := host_of(device)) is not None:
        with_offload = offload_plan.with_offload(
            estimate.step_ms,
            host,
            shape=shape,
            recipe=recipe,
            setup=setup,
            trained=_trains(shape, parameters, recipe, setup),
            memory=memory,
            deferral=deferral,
        )
        waits_ms = with_offload - estimate.step_ms
    step_tokens = None if batch is None or length is None else batch * length * accumulate * gpus
    work = Work(
        run=None if run_tokens is None else per_token * exact(run_tokens),
        step=None if step_tokens is None else per_token * step_tokens,
        step_tokens=step_tokens,
        recompute_share=recompute_share,
    )
    time = count_time(
        work,
        gpus=gpus,
        gpu=device,
        tflops_per_gpu=tflops_per_gpu,
        mfu=mfu,
        goodput=goodput,
        price=price,
        compute=compute,
        kinds=product_kinds(carried),
        estimate=estimate,
        waits_ms=waits_ms,
    )
    parts = [subject.name]
    if recipe is not None:
        parts.append(f"recipe {getattr(recipe, 'name', recipe)}")
    if run_tokens is not None:
        parts.append(f"{units.count(run_tokens)} tokens")
    if step_tokens is not None:
        times = f" x {accumulate}" if accumulate > 1 else ""
        parts.append(f"{batch} x {length}{times} tokens a step" + (" and GPU" if gpus > 1 else ""))
    if fused or graphs:
        parts.append(" ".join([*(["fused"] if fused else []), *(["in CUDA graphs"] if graphs else [])]))
    if device is not None or gpus > 1:
        parts.append(f"{gpus:,} x {device.name if device else 'GPU'}")
    draft = Plan(
        title=", ".join(parts),
        parameters=parameters,
        shape=shape,
        recipe=recipe,
        setup=setup,
        tokens=run_tokens,
        gpu=device,
        price=price,
        flops_per_token=float(per_token),
        flops=None if work.run is None else float(work.run),
        flops_per_step=None if work.step is None else float(work.step),
        compute=compute,
        time=time,
        memory=memory,
        factor=factor,
        notes=subject.notes,
        source=plan_source(subject, given, setup, recipe),
        subject=subject,
        given=given,
    )
    return replace(draft, notes=(*subject.notes, *plan_notes(draft)))


def _own_fusion(subject: Subject, layers: Layers, device: str) -> Any:
    """What a live model computes together: as it was fused, and a Decoder on CUDA everything."""
    if subject.shape is None or not built_here(subject.shape):
        return "none"
    by_default = "fused" if subject.own.source and layers == "surokit" and device == "cuda" else "none"
    return subject.own.arguments.get("fusion", by_default)


def _as_a_session_decodes(shape: Shape | None, parameters: float, recipe: Any, setup: Setup, device: Gpu | None) -> Any:
    """The recipe on a CPU: where it leaves open whether stored weights are decoded once, as a session there decides."""
    if not setup.training or getattr(recipe, "storage", None) is None or recipe.keeps_decoded is not None:
        return recipe
    once = recipe.decode_once()
    terms = count_memory(shape, parameters, once, setup).terms
    decoded = sum(term.bytes for term in terms if term.name == "dequantized weight")
    return once if decoded <= room_for_decoded(device.memory_gib if device else None) else recipe


def _trains(shape: Shape | None, parameters: float, recipe: Any, setup: Setup) -> float:
    if not setup.training:
        return 0.0
    return setup.trained.parameters if setup.trained is not None else trained_parameters(shape, parameters, recipe)


def _estimate(
    shape: Shape | None,
    parameters: float,
    compute: Compute | None,
    recipe: Any,
    setup: Setup,
    gpu: Gpu | None,
    between_gb_s: float | None,
) -> Estimate | None:
    trained = _trains(shape, parameters, recipe, setup)
    if (blocks := blocks_of(shape, recipe, setup)) is not None:
        trained -= sum(blocks.trained)  # are updated on the host
    return estimate_step(shape, compute, recipe, setup, gpu, trained_parameters=trained, between_gb_s=between_gb_s)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is unknown: use {', '.join(repr(c) for c in choices if c is not None)}.")


def _dtype(value: Any) -> str:
    name = str(value if value is not None else "bf16").rpartition(".")[2]
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is none that training holds: use 'bf16', 'fp16' or 'fp32'.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(name, name)


def _option(optimizer: Any, name: str) -> Any:
    """An option of an optimizer, or of a spec that holds its options."""
    held = getattr(optimizer, "options", {}) | getattr(optimizer, "settings", {}) | getattr(optimizer, "helpers", {})
    return getattr(optimizer, name, None) or held.get(name)


def _deferral(optimizer: Any) -> dict[str, Any]:
    """ZenFlow's settings that memory and time depend on, as `predict_offload` takes them; {} of another optimizer."""
    if optimizer is None or _optimizer(optimizer) != "zenflow":
        return {}
    found = {name: _option(optimizer, name) for name in ("topk_ratio", "update_interval", "overlap_step", "slots")}
    return {"topk_ratio": HOT} | {name: value for name, value in found.items() if value is not None}


def _prefetch(asked: bool | int | None, shape: Shape | None, device: str, trains: bool, optimizer: str) -> int:
    """Blocks that are fetched ahead; 0 where weights are not streamed."""
    if not asked:
        return 0
    if shape is None:
        raise ValueError(
            "offload_weights streams blocks, and a number of parameters has none: plan with a config or a model."
        )
    if device == "cpu":
        raise ValueError("offload_weights needs a GPU: leave it out, or give gpu='H100' or the like.")
    if trains and optimizer in OFFLOADING:
        raise ValueError(
            "ZenFlow and OffloadAdamW take parameters of one device. Trained weights that offload_weights keeps on the host are "
            "updated there: give optimizer='adamw' with offload_weights."
        )
    return 1 if asked is True else arguments.integer("offload_weights", asked, most=1e4)


def _optimizer(value: Any) -> str:
    value = getattr(value, "optimizer", value)  # a spec names its class
    kind = value if isinstance(value, type) else type(value)
    name = (value if isinstance(value, str) else kind.__name__).lower()
    if name not in _OPTIMIZERS:
        known = ", ".join(repr(each) for each in _OPTIMIZERS if each not in ("none", "sgd"))
        raise ValueError(f"optimizer={name!r} has no known state size: use {known} or 'sgd'.")
    return _OPTIMIZERS[name]
