"""Predict how long a step is likely to take, and how sure that is, from what published runs reached.

The estimate of roofline.py is what a step could take: each kernel at the datasheet's rate. A likely step has its rows at the rates
that published runs of the same kind of GPU and engine reached, and adds what stands between kernels:

    device  products x p + attention x a + bytes x m + gap x kernels, each factor fitted
    p       grows with t / number of waves of tiles of a product (at most t), and with s / length that it contracts
    a       grows with b / length of a sequence
    step    (device^4 + host^4)^(1/4) + c x communication + k            host: a time a launch; the longer of the two decides
    c       by kind: what overlaps with nothing, what can, and what GPUs that share a model send between layers

Factors are of a kind of GPU (products), of an architecture and a kernel (attention), and of an engine: "eager" PyTorch, "compiled"
by torch.compile, or "fused" by hand. `python -m surokit.bench published` fits them to the runs of compare/runs.csv and writes
hardware/reached.csv. The interval from `low_ms` to `high_ms` holds eight of ten runs: nine of ten take longer than `low_ms`, one
of ten longer than `high_ms`, by the errors of runs that were left out of the fit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from surokit.hardware.gpus import Gpu
from surokit.planner.counts.communication import GPUS_A_NODE
from surokit.planner.counts.memory import Engine, Setup
from surokit.planner.counts.muon import NEWTON_SCHULZ
from surokit.planner.offload.formulas import Host
from surokit.planner.times.roofline import Estimate

ANY = "any"  # in reached.csv: of what no published run has
#: (ms that a step computes, the host) -> ms of the step with what is kept on the host
WithHost = Callable[[float, Host], float]
#: in reached.csv: of models with experts, of others that GPUs share, and of adapters that are trained
EXPERTS, DIVIDED, ADAPTERS = "experts", "divided", "adapters"
#: What an interval is of, in words; that of full training on each GPU is not said.
_INTERVALS = {
    EXPERTS: "; the interval is of runs with experts",
    DIVIDED: "; the interval is of the few runs that divide a model",
    ADAPTERS: "; the interval is of runs with adapters",
}
#: Hosts differ: AdamW updates 4.6e9 parameters a second on the node of ml-engineering's H200s, and 1.1e9 on that of the article on
#: ZenFlow. The likely host is the former, the interval reaches to one so many times slower.
SLOWER_HOSTS = 4.0
_ONE_KERNEL = ("sm80", "sm89", "sm120")  # have no faster one than torch's, FlashAttention-2
_OTHER = "other"  # architecture of GPUs without a compute capability
#: Groups whose launches take the host longer: their modules do more in Python, and experts wait for the number of their tokens.
_BY_HOST = {"adapter": "adapter_launches", "routing": "routing_launches"}
_PRODUCTS = ("forward", "grad_input", "grad_weight")
_TILE = 128 * 256  # outputs that one multiprocessor computes at a time, in the kernels of large products
_SMS = 132  # of a GPU whose number is not known
_STEP = 128  # of the contracted length
_KEYS = 1024  # of a sequence
_NOTHING = 1e-9  # of a step: what rounding leaves


@dataclass(frozen=True)
class Terms:
    """A Terms holds what a step's time is made of, in ms at the datasheet's rates.

    products        of linear layers and the head; `unhidden`: bytes of these beyond their FLOPs; `tails` over the number of waves
                    of tiles, at most one; `short_inner` over the contracted length, in steps of 128
    newton_schulz   products of Muon's step, which are the optimizer's, at the rate of other products
    attention       FLOPs at the rate of plain products; `short_keys` over the length of sequence or window, in steps of 1,024
    waited, hidden  communication of gradients and weights that overlaps with nothing, and that can overlap
    exchange        what GPUs that share a model send each other between layers
    launches        number of kernels; by the host, none in CUDA graphs: `launched`, and apart from these `adapter_launches`, those
                    of adapters, and `routing_launches`, those that bring tokens to experts and back
    """

    products: float = 0.0
    tails: float = 0.0
    short_inner: float = 0.0
    unhidden: float = 0.0
    newton_schulz: float = 0.0
    attention: float = 0.0
    short_keys: float = 0.0
    elementwise: float = 0.0
    quantization: float = 0.0
    adapter: float = 0.0
    optimizer: float = 0.0
    launches: float = 0.0
    launched: float = 0.0
    adapter_launches: float = 0.0
    routing_launches: float = 0.0
    waited: float = 0.0
    hidden: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True)
class Factors:
    """A Factors holds what the terms of a step are multiplied by on one kind of GPU with one engine.

    gap_us, host_us     microseconds a kernel: between two on the device, and on the host for its launch; `adapter_us` of adapters,
                        whose modules do more in Python, `routing_us` where experts wait for the number of their tokens
    waited, hidden, exchange    times these kinds of communication that the step waits for
    constant_ms         of a step, whatever it does
    host_link           share of the datasheet's link to the host that copies reach
    host_adam           parameters a second that AdamW updates on the CPUs of a node
    """

    products: Any
    tails: Any
    short_inner: Any
    attention: Any
    short_keys: Any
    memory: Any
    quantization: Any
    adapter: Any
    optimizer: Any
    gap_us: Any
    host_us: Any
    adapter_us: Any
    routing_us: Any
    waited: Any
    hidden: Any
    exchange: Any
    constant_ms: Any
    host_link: Any
    host_adam: Any


@dataclass(frozen=True)
class Likely:
    """A Likely is the time of an optimizer step on one GPU that published runs make likely, in ms: `step_ms`, and from `low_ms` to
    `high_ms` eight of ten runs.

    tokens, model_flop  of the step, over all GPUs and on one
    how                 what the factors were fitted to, in words
    made_of             ms by what the step does, which sum to it: "launches" are what the host adds to the device's time, "gaps"
                        are between kernels, "bubble" is what a pipeline's GPU waits for others, "communication" what the step
                        waits for, "on the host" what waits there
    """

    step_ms: float
    low_ms: float
    high_ms: float
    tokens: int
    model_flop: float
    how: str
    made_of: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second over all GPUs."""
        return self.tokens / self.step_ms * 1e3

    @property
    def tflops(self) -> float:
        """Return the model TFLOPS that one GPU reaches."""
        return self.model_flop / self.step_ms / 1e9

    @property
    def spread(self) -> tuple[float, float]:
        """Return (low, high) over the likely time."""
        return self.low_ms / self.step_ms, self.high_ms / self.step_ms


def likely_step(estimate: Estimate, gpu: Gpu, setup: Setup, with_host: WithHost | None = None) -> Likely:
    """Return the likely time of a step that was estimated at a datasheet's rates.

    with_host: takes the ms that a step computes and the host beside its GPU, and returns the ms with what is kept there; without
    it the step is what is computed. Raises ValueError where rates were measured, which predict by themselves, and where the link to
    the host is not known.
    """
    if gpu.ceilings is not None:
        raise ValueError(f"The rates of {gpu.name} were measured: its estimate is a prediction already.")
    reached = _reached()
    engine, factors = setup.engine, factors_for(gpu, setup, reached)
    terms = terms_of(estimate, gpu)
    computes = ms = slowest = float(step_ms(terms, factors))
    if with_host is not None:
        host = published_host(gpu, setup.gpus)
        slow = replace(host, adam_params_s=host.adam_params_s / SLOWER_HOSTS)
        ms, slowest = with_host(ms, host), with_host(ms, slow)
    kind = kind_of(estimate)
    seen, low, high = interval(gpu, engine, reached, kind)
    runs, of = "runs" if seen != 1 else "run", f"{gpu.name}, {engine}{', with experts' * (kind == EXPERTS)}"
    how = f"fitted to {seen} published {runs} of {of}" if seen else f"no published run of {of}"
    how += _INTERVALS.get(kind, "")
    if estimate.communication.bytes and estimate.communication.ms is None:
        how += ", without communication, whose rate is not known"
    alone = terms if estimate.fill == 1 else terms_of(replace(estimate, fill=1.0), gpu)
    made_of = _made_of(alone, factors, computes, ms)
    return Likely(ms, ms * low, slowest * high, estimate.tokens, estimate.model_flop, how, made_of)


def published_host(gpu: Gpu, gpus: int) -> Host:
    """Return the host beside one of `gpus` GPUs, with rates that published runs had. Raises ValueError where the link is not
    known."""
    reached = _reached()
    return likely_host(gpu, gpus, reached["host_link", ANY], reached["host_adam", ANY])


def likely_host(gpu: Gpu, gpus: int, link: float, adam: float) -> Host:
    """Return the host beside one of `gpus` GPUs, of which each has its part; link, adam: as Factors has them. Raises ValueError
    where the link is not known."""
    if gpu.host_gb_s is None:
        raise ValueError(f"The link between {gpu.name} and its host is not known: give a Gpu with host_gb_s=.")
    return Host(gpu.host_gb_s * link, adam / min(gpus, GPUS_A_NODE))


def terms_of(estimate: Estimate, gpu: Gpu) -> Terms:
    """Sum the rows of an estimate by what they are multiplied by."""
    found = dict.fromkeys((f.name for f in fields(Terms)), 0.0)
    for done in estimate.rows:
        row = done if done.step == "optimizer" else done.times(estimate.fill)
        # through the memory: what a cache saves of it is in the factors
        memory_ms = row.bytes / estimate.rates.bandwidth_tb_s / 1e9
        device_ms = max(row.compute_ms, memory_ms)
        found["launches"] += row.launches
        if not estimate.rates.graphs:
            found[_BY_HOST.get(row.group, "launched")] += row.launches
        if row.group in ("products", "head and loss") and row.part in _PRODUCTS:
            found["products"] += row.compute_ms
            found["tails"] += row.compute_ms * min(1.0, (gpu.sms or _SMS) * _TILE / (row.outputs or 1.0))
            found["short_inner"] += row.compute_ms * _STEP / (row.inner or 1.0)
            found["unhidden"] += max(0.0, memory_ms - row.compute_ms)
        elif row.part == NEWTON_SCHULZ:
            found["newton_schulz"] += device_ms
        elif row.group == "attention":
            ms = row.flop / estimate.rates.products[None] / 1e9
            found["attention"] += ms
            found["short_keys"] += ms * _KEYS / (row.inner or _KEYS)
        elif row.group in ("quantization", "adapter", "optimizer"):
            found[row.group] += device_ms
        else:
            found["elementwise"] += device_ms
    sent = estimate.communication
    found |= {"waited": sent.waited_ms, "exchange": sent.between_layers_ms}
    found["hidden"] = (sent.ms or 0.0) - sent.waited_ms - sent.between_layers_ms
    return Terms(**found)


def device_ms(t: Terms, f: Factors) -> dict[str, Any]:
    """Return the ms that a GPU computes and moves bytes, by what it does; terms and factors may be arrays of runs."""
    return {
        "products": (t.products + t.tails * f.tails + t.short_inner * f.short_inner) * f.products,
        "attention": (t.attention + t.short_keys * f.short_keys) * f.attention,
        "elementwise": (t.elementwise + t.unhidden) * f.memory,
        "quantization": t.quantization * f.quantization,
        "adapter": t.adapter * f.adapter,
        "optimizer": t.optimizer * f.optimizer + t.newton_schulz * f.products,
        "gaps": t.launches * f.gap_us / 1e3,
    }


def communication_ms(t: Terms, f: Factors) -> Any:
    """Return the ms that a step waits for other GPUs."""
    return t.waited * f.waited + t.hidden * f.hidden + t.exchange * f.exchange


def step_ms(t: Terms, f: Factors) -> Any:
    """Return the ms of a step."""
    device = sum(device_ms(t, f).values())
    host = (t.launched * f.host_us + t.adapter_launches * f.adapter_us + t.routing_launches * f.routing_us) / 1e3
    return (device**4 + host**4) ** 0.25 + communication_ms(t, f) + f.constant_ms


def _made_of(t: Terms, f: Factors, computes: float, ms: float) -> dict[str, float]:
    """Return the ms of a step by what they are: sums to `ms`.

    t           terms without a pipeline's bubble, in which a GPU waits for others until the step has taken `computes` ms
    computes    ms of the step without what waits on the host
    """
    device, busy = device_ms(t, f), float(step_ms(t, f))
    parts = device | {"bubble": computes - busy, "communication": communication_ms(t, f)}
    parts["launches"] = busy - sum(device.values()) - parts["communication"] - f.constant_ms
    parts |= {"rest": f.constant_ms, "on the host": ms - computes}
    return {name: float(part) for name, part in parts.items() if abs(part) > _NOTHING * ms}


# -- what was reached


#: (term, what it is of): factor
Reached = Mapping[tuple[str, str], float]


def factors_for(gpu: Gpu, setup: Setup, reached: Reached) -> Factors:
    """Return the factors of a kind of GPU, and of a step's engine and attention; of a GPU without a published run, those of any."""
    names = names_of(gpu, setup)
    return gather(lambda term, kind: reached.get((term, names[kind]), reached[term, ANY]))


def names_of(gpu: Gpu, setup: Setup) -> Mapping[str, str]:
    """Return the names that factors have in reached.csv, by what a factor is of."""
    generation, kernel = architecture(gpu), setup.attention_kernel
    if kernel == "flash3" and generation in _ONE_KERNEL:
        kernel = "sdpa"
    return {
        "gpu": gpu.name,
        "engine": setup.engine,
        "kernel": f"{generation} {kernel}",
        ANY: ANY,
    }


def gather(of: Callable[[str, str], Any]) -> Factors:
    """Put factors together; `of` returns that of a term, and of what (`names_of`)."""
    return Factors(
        products=of("products", "gpu") * of("products", "engine"),
        tails=of("tails", ANY),
        short_inner=of("short_inner", ANY),
        attention=of("attention", "kernel"),
        short_keys=of("short_keys", ANY),
        memory=of("memory", "engine"),
        quantization=of("quantization", ANY),
        adapter=of("adapter", "engine"),
        optimizer=of("optimizer", ANY),
        gap_us=of("gap_us", ANY),
        host_us=of("host_us", "engine"),
        adapter_us=of("adapter_us", "engine"),
        routing_us=of("routing_us", ANY),
        waited=of("waited", ANY),
        hidden=of("hidden", ANY),
        exchange=of("exchange", ANY),
        constant_ms=of("constant_ms", ANY),
        host_link=of("host_link", ANY),
        host_adam=of("host_adam", ANY),
    )


def architecture(gpu: Gpu) -> str:
    """Return the name that attention's factors have for a GPU: that of its generation, "other" without a compute capability."""
    if gpu.capability is None:
        return _OTHER
    return "sm89" if gpu.capability == (8, 9) else f"sm{gpu.capability[0]}0"


def kind_of(estimate: Estimate) -> str:
    """Return what the interval of a step is of: EXPERTS where tokens are routed to some, ADAPTERS where these are trained, DIVIDED
    where GPUs share a model, or ANY.

    Runs with experts differ by more than others, from one version of a program to the next by twice; those of divided models by
    how a program overlaps what is sent, and those of adapters by what its modules do in Python.
    """
    groups = {row.group for row in estimate.rows}
    if "routing" in groups or "adapter" in groups:
        return EXPERTS if "routing" in groups else ADAPTERS
    return DIVIDED if estimate.fill > 1 or estimate.communication.between_layers_ms else ANY


def interval(gpu: Gpu, engine: Engine, reached: Reached, kind: str) -> tuple[int, float, float]:
    """Return (number of published runs of this GPU and engine, low, high): the last two times a likely time are its p10 and p90.

    All runs are fitted together, and only how far they are off is told apart; those with experts count alone.
    """
    kinds = (EXPERTS,) if kind == EXPERTS else (ANY, DIVIDED, ADAPTERS)
    seen = sum(reached.get(("runs", pair(gpu, engine, each)), 0) for each in kinds)
    return int(seen), reached["low", kind], reached["high", kind]


def pair(gpu: Gpu, engine: Engine, kind: str) -> str:
    """Return the name in reached.csv of the runs of a GPU, an engine and a kind (`kind_of`)."""
    return f"{gpu.name} {engine}{f' {kind}' * (kind != ANY)}"


@cache
def _reached() -> Reached:
    return read_reached(files("surokit.hardware").joinpath("reached.csv").read_text(encoding="utf-8"))


def read_reached(text: str) -> Reached:
    """Read a table of factors: term, of, factor."""
    return {(row["term"], row["of"]): float(row["factor"]) for row in csv.DictReader(io.StringIO(text))}
