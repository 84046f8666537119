"""Read the question that a plan answers.

    Question    the arguments of `plan`, as they were given
    Asked       what they mean: model, run, machine, and the Setup of a step

Reading takes arguments that are not given from the live model or session, turns names into values, and refuses arguments that
contradict each other. It counts nothing.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, get_args

from surokit import arguments
from surokit.fusion import Fusion
from surokit.hardware.gpus import Gpu, find_gpu
from surokit.planner.counts.division import Division
from surokit.planner.counts.flops import Attention, Recompute, frozen, on_gpu, trained_parameters
from surokit.planner.counts.memory import (
    DTYPE_BYTES,
    SLACK,
    AttentionKernel,
    Engine,
    Layers,
    OffloadedActivations,
    Setup,
)
from surokit.planner.inputs.fusion import Transposed, read_fusion
from surokit.planner.inputs.shape import Shape, built_here
from surokit.planner.inputs.subject import Subject
from surokit.planner.offload.formulas import HOT, OFFLOADING, SLOTS
from surokit.planner.times.cost import Price, RunSpec, read_price

Logits = Literal["fused", "whole"]
_OPTIMIZERS = {name: name for name in ("adamw", "adamw8bit", "muon", *OFFLOADING, "none")} | {"sgd": "none"}
_WORDS: dict[str, tuple[Any, ...]] = {
    "attention": ("causal", "full"),
    "recompute": (None, *get_args(Recompute)),
    "logits": (None, "fused", "whole"),
    "layers": (None, "surokit", "transformers"),
    "transposed": (None, "cached", "on the fly"),
    "zero": (0, 1, 2, 3),
    "offload_activations": (None, "inputs"),
    "engine": (None, *get_args(Engine)),
    "attention_kernel": (None, *get_args(AttentionKernel)),
}
_FLAGS = ("graphs", "master", "training", "offload_states", "optimizer_in_backward")


@dataclass(frozen=True)
class Question:
    """A Question holds the arguments of `plan` as they were given; `plan` says what each of them means."""

    what: Subject
    tokens: float | None = None
    gpus: int = 1
    gpu: str | Gpu | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    goodput: float = 1.0
    usd_per_gpu_hour: float | tuple[float, float] | Price | None = None
    recipe: Any = None
    batch: int | None = None
    length: int | None = None
    attention: Attention = "causal"
    recompute: Recompute | None = None
    optimizer: Any = None
    state_dtype: Any = None
    dtype: Any = None
    master: bool = False
    zero: int = 0
    logits: Logits | None = None
    accumulate: int | None = None
    layers: Layers | None = None
    slack: float = SLACK
    between_gb_s: float | None = None
    training: bool = True
    fusion: Any = None
    graphs: bool | None = None
    transposed: Transposed | None = None
    offload_weights: bool | int | None = None
    offload_activations: OffloadedActivations | None = None
    engine: Engine | None = None
    attention_kernel: AttentionKernel | None = None
    optimizer_in_backward: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    virtual_stages: int = 1
    recompute_blocks: int | None = None
    offload_states: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """Return the arguments that are not None, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "what"}
        return {name: value for name, value in values.items() if value is not None}

    def but(self, **changes: Any) -> Question:
        """Return the question with other arguments; an argument that is None gets its default again.

        How many blocks are computed again goes with a change after which none are, or all.
        """
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        for name in changes:
            if defaults.get(name, MISSING) is MISSING:
                why = "multiple values for" if name == "what" else "an unexpected keyword"
                raise TypeError(f"plan() got {why} argument {name!r}")
        if changes.get("recompute", "full") in (None, "none") or changes.get("offload_weights"):
            changes = {"recompute_blocks": None, **changes}
        return replace(self, **{name: defaults[name] if value is None else value for name, value in changes.items()})


@dataclass(frozen=True)
class Asked:
    """An Asked holds the meaning of a question; `question` holds the arguments as they were given.

    recipe      of the model, with what a live one has
    gpu         the machine's, None where none was named
    run         tokens, rate and price
    setup       a step on one GPU, and how the model is spread over several
    graphs      whether CUDA graphs were asked for: `setup.graphs` says whether the step has them
    deferral    ZenFlow's settings, {} of another optimizer
    """

    question: Question
    recipe: Any
    gpu: Gpu | None
    run: RunSpec
    setup: Setup
    graphs: bool
    deferral: dict[str, Any]

    @property
    def subject(self) -> Subject:
        return self.question.what

    @property
    def carried(self) -> Any:
        """Return the recipe as the GPU executes it, with native products of stored weights if it has them."""
        return on_gpu(self.recipe, self.gpu)

    @property
    def counted_recipe(self) -> Any:
        """Return the recipe whose memory is counted: for a fused step the one that the GPU executes, else the one asked for."""
        return self.carried if self.setup.fusion.fuses else self.recipe

    @property
    def factor(self) -> int:
        """Return the FLOPs of a parameter and token by rule of thumb: 6 in training, 4 with a frozen base, 2 without training."""
        return 2 if not self.setup.training else 4 if frozen(self.recipe) else 6

    @property
    def trained_parameters(self) -> float:
        """Return the number of parameters that train, and so have a gradient and optimizer states."""
        if not self.setup.training:
            return 0.0
        if self.setup.trained is not None:
            return self.setup.trained.parameters
        return trained_parameters(self.subject.shape, self.subject.parameters, self.recipe)


def read_question(question: Question) -> Asked:
    """Read a question. Raises ValueError or TypeError, in one sentence with the remedy, for figures that cannot be meant."""
    _check_words(question)
    subject, gpu = question.what, None if question.gpu is None else find_gpu(question.gpu)
    dtype = question.dtype or subject.dtype or ("fp16" if gpu is not None and not gpu.has_bf16 else "bf16")
    dtype = read_dtype(dtype)
    gpu = gpu.multiplying(dtype) if gpu else None
    if question.between_gb_s is not None:
        arguments.number("between_gb_s", question.between_gb_s)
    run = _read_run(question, gpu)
    full = _with_own(question, subject.device if gpu is None else gpu.device)
    if full.recipe is not None:
        from surokit.recipe import find_recipe

        full = replace(full, recipe=find_recipe(full.recipe))
    setup = _read_setup(full, dtype, subject.device if gpu is None else gpu.device)
    deferral = read_deferral(full.optimizer)
    return Asked(question, full.recipe, gpu, run, setup, bool(full.graphs), deferral)


def _check_words(q: Question) -> None:
    for name, known in _WORDS.items():
        value = getattr(q, name)
        if name == "offload_activations" and isinstance(value, bool):
            continue
        if value not in known or isinstance(value, bool):
            choices = ", ".join(repr(c) for c in known if c is not None)
            choices = f"True, False or {choices}" if name == "offload_activations" else choices
            raise ValueError(f"{name}={value!r} is unknown: use {choices}.")
    for name in _FLAGS:
        value = getattr(q, name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is unknown: use True or False.")


def _read_run(q: Question, gpu: Gpu | None) -> RunSpec:
    tokens = None if q.tokens is None else arguments.tokens(q.tokens)
    price = None if q.usd_per_gpu_hour is None else read_price(q.usd_per_gpu_hour)
    tflops_per_gpu, mfu = q.tflops_per_gpu, q.mfu
    if tflops_per_gpu is not None and mfu is not None:
        raise ValueError("tflops_per_gpu and mfu both say how fast a GPU is: give one of them.")
    if tflops_per_gpu is not None:
        tflops_per_gpu = arguments.rate(tflops_per_gpu, *((gpu.name, gpu.fastest_tflops) if gpu else ()))
    if mfu is not None:
        mfu = arguments.share("mfu", mfu)
        if gpu is None or gpu.plain_tflops is None:
            peak = "BF16" if gpu is None else gpu.plain
            name = "no GPU" if gpu is None else f"no {peak} peak of {gpu.name}"
            raise ValueError(
                f"mfu={mfu:g} is a share of a dense {peak} peak, and there is {name}: give gpu='H100' or the like, "
                "or tflops_per_gpu=."
            )
    return RunSpec(tokens, tflops_per_gpu, mfu, arguments.share("goodput", q.goodput), price)


def _with_own(q: Question, device: str) -> Question:
    """Return the question with arguments that are not given taken from the live model or its session."""
    own = q.what.own.arguments
    layers = q.layers or q.what.layers
    takes = ["recipe", "batch", "length", "accumulate", "optimizer"]
    if not isinstance(q.fusion, Fusion):
        takes.append("recompute")
    if device != "cpu" and q.training:  # on a CPU all is the host's
        takes += ["offload_weights", "offload_activations"]
    if device == "cuda":
        takes.append("graphs")
    found = {name: own[name] for name in takes if name in own and getattr(q, name) is None}
    if q.fusion == "none" and found.get("recompute") == "selective":
        del found["recompute"]  # of the model's fused layers, which are not planned
    if q.fusion is None:
        found["fusion"] = _own_fusion(q.what, layers, device)
    return replace(q, layers=layers, **found)


def _own_fusion(subject: Subject, layers: Layers, device: str) -> Any:
    """Return a live model's fusion: as `sk.fuse` left it; otherwise "fused" for a Decoder on CUDA, and "none" for others."""
    if subject.shape is None or not built_here(subject.shape):
        return "none"
    by_default = "fused" if subject.own.source and layers == "surokit" and device == "cuda" else "none"
    return subject.own.arguments.get("fusion", by_default)


def _read_setup(q: Question, dtype: str, device: Literal["cpu", "cuda"]) -> Setup:
    """Read the Setup of a step from a question that a live model has completed."""
    subject, shape, optimizer = q.what, q.what.shape, read_optimizer("adamw" if q.optimizer is None else q.optimizer)
    fusion, recompute = read_fusion(q.fusion, q.transposed, q.recompute)
    if fusion.fuses and shape is not None and not built_here(shape):
        raise ValueError(f"surokit fuses no layers of {shape.family}: leave fusion= out.")
    if q.graphs and device == "cpu":
        raise ValueError("CUDA graphs need a GPU: leave graphs= out, or give gpu='H100' or the like.")
    gpus = arguments.integer("gpus", q.gpus, most=1e7)
    division = _read_division(q, shape, gpus, fusion)
    _check_muon(optimizer, shape, division, q.training)
    if q.training and optimizer == "none":
        _check_momentum(q.optimizer)
    prefetch = _read_prefetch(q.offload_weights, shape, device, q.training and not frozen(q.recipe), optimizer)
    if prefetch and gpus > 1 and q.zero > 1:
        raise ValueError(
            f"offload_weights streams whole weights, and zero={q.zero} shards them: give zero=0 or 1, or leave it out."
        )
    if q.offload_activations and device == "cpu":
        raise ValueError("offload_activations needs a GPU: leave it out, or give gpu='H100' or the like.")
    if q.offload_states and (optimizer in (*OFFLOADING, "none") or prefetch or device == "cpu" or not q.training):
        why = "a plan without training has none" if not q.training else "there is none" if device == "cpu" else ""
        why = why or ("they are there already" if prefetch or optimizer in OFFLOADING else "SGD has none")
        raise ValueError(f"offload_states keeps the optimizer's states on a GPU's host, and {why}: leave it out.")
    if q.optimizer_in_backward and ((q.accumulate or 1) > 1 or optimizer in OFFLOADING or prefetch):
        what = "accumulate= sums gradients" if optimizer not in OFFLOADING else f"{optimizer} takes all of them"
        what = "offload_weights updates on the host" if prefetch else what
        raise ValueError(f"optimizer_in_backward uses each gradient as it arrives, and {what}: leave one of them out.")
    # the parameters that train are those of the model as it is: with another recipe or dtype they are not known
    as_it_is = q.training and subject.own.has_part(q.recipe) and dtype == read_dtype(subject.dtype)
    trained = subject.own.trained if as_it_is else None
    state_dtype = q.state_dtype or _option(q.optimizer, "state_dtype") or (trained and trained.dtype) or dtype
    deferral = read_deferral(q.optimizer)
    assert q.layers is not None
    engine = _read_engine(q, fusion)
    # our fused layers take torch's attention
    kernel: AttentionKernel = "flash3" if engine == "fused" and not fusion.fuses else "sdpa"
    setup = Setup(
        dtype=dtype,
        optimizer=optimizer,
        state_dtype=read_dtype(state_dtype),
        master=q.master,
        gpus=gpus,
        zero=q.zero,
        batch=None if q.batch is None else arguments.integer("batch", q.batch),
        length=None if q.length is None else arguments.integer("length", q.length),
        recompute="full" if prefetch and q.training else recompute,
        recompute_blocks=_read_blocks(q, shape, prefetch, recompute),
        logits=q.logits
        or ("whole" if q.layers == "transformers" and not (fusion.fuses or subject.own_loss) else "fused"),
        training=q.training,
        device=device,
        layers=q.layers,
        accumulate=1 if q.accumulate is None else arguments.integer("accumulate", q.accumulate),
        slack=0.0 if q.slack == 0 and not isinstance(q.slack, bool) else arguments.share("slack", q.slack),
        fusion=fusion,
        graphs=bool(q.graphs),
        hot=deferral.get("topk_ratio", 0.0),
        overlap=deferral.get("overlap_step", True),
        slots=deferral.get("slots", SLOTS),
        prefetch=prefetch,
        offload_activations=q.offload_activations or False,
        offload_states=q.offload_states,
        trained=trained,
        engine=engine,
        in_backward=q.optimizer_in_backward and q.training,
        attention_kernel=q.attention_kernel or kernel,
        division=division,
    )
    if setup.offloads:
        check_whole(division, setup.offloads)
    return replace(setup, graphs=False) if setup.offloads else setup


def check_whole(division: Division, what: str) -> None:
    """Raise ValueError where the model is divided, of which nothing is planned on the host; `what` would be there."""
    if division.divides:
        raise ValueError(f"{what} on the host are planned of whole models: plan a model that is not {division.words}.")


def _check_muon(optimizer: str, shape: Shape | None, division: Division, training: bool) -> None:
    """Raise ValueError where Muon's step cannot be planned."""
    if optimizer != "muon" or not training:
        return
    if shape is None:
        raise ValueError(
            "Muon's states depend on which parameters are hidden matrices, and a number of parameters does not say: plan with a "
            "config or a model."
        )
    if division.tensor > 1:
        raise ValueError(
            "Muon updates whole matrices, and tensor_parallel= gives each GPU a part of each: leave it out, or give "
            "optimizer='adamw'."
        )


def _read_blocks(q: Question, shape: Shape | None, prefetch: int, recompute: Recompute) -> int | None:
    """Return how many blocks are computed again; None for all."""
    if q.recompute_blocks is None:
        return None
    blocks, remedy = arguments.integer("recompute_blocks", q.recompute_blocks), "leave it out"
    why = ""
    if shape is None:
        why = "a number of parameters has no blocks"
    elif prefetch:
        why = "offload_weights computes all of them again"
    elif recompute == "none":
        why, remedy = "nothing is", "give recompute='full' with it"
    elif blocks > shape.layers:
        why, remedy = f"the model has {shape.layers}", "give at most as many"
    if why:
        raise ValueError(f"recompute_blocks={blocks} says how many blocks are computed again, and {why}: {remedy}.")
    assert shape is not None
    return None if blocks == shape.layers else blocks


def _read_division(q: Question, shape: Shape | None, gpus: int, fusion: Fusion) -> Division:
    """Return over how many GPUs tensors, layers and experts are divided."""
    names = ("tensor", "pipeline", "expert")
    t, p, e = (arguments.integer(f"{name}_parallel", getattr(q, f"{name}_parallel")) for name in names)
    division = Division(t, p, e, arguments.integer("virtual_stages", q.virtual_stages))
    if not division.divides:
        return division
    experts = shape.experts.count if shape is not None and shape.experts is not None else 0
    heads, keys, layers = (shape.heads, shape.kv_heads, shape.layers) if shape is not None else (0, 1, 0)
    wrong = [
        (shape is None, "a number of parameters has no layers to divide", "plan with a config or a model"),
        (not q.training, "a plan without training is of one GPU", "leave it out"),
        (fusion.fuses, "surokit's fused layers are not divided", "leave fusion= out"),
        (gpus % (t * p) != 0, f"{gpus:,} GPUs are no multiple of {t * p}", "give gpus= that many, or a multiple"),
        (bool(heads % t), f"{heads} heads are not divided by {t}", "give a divisor of the heads"),
        (
            bool(keys % t and t % keys),
            f"{keys} heads of keys and values are not divided by {t}",
            "give a divisor of them",
        ),
        (p > layers, f"there are {layers} layers", "give at most as many"),
        (
            division.virtual > 1 and layers % (p * division.virtual) != 0,
            f"{layers} layers make no {p * division.virtual} parts",
            "give a divisor",
        ),
        (p == 1 < division.virtual, "virtual stages are parts of a pipeline's", "give pipeline_parallel="),
        (e > 1 and not experts, "the model has no experts", "leave it out"),
        (bool(experts % e), f"{experts} experts are not divided by {e}", "give a divisor of the experts"),
        (
            (gpus // (t * p)) % e != 0,
            f"{gpus // (t * p):,} data-parallel GPUs are no multiple of {e}",
            "give another gpus=",
        ),
    ]
    for is_wrong, why, remedy in wrong:
        if is_wrong:
            raise ValueError(f"A model that is {division.words} cannot be planned, since {why}: {remedy}.")
    return division


def _read_engine(q: Question, fusion: Fusion) -> Engine:
    """Return who makes the kernels of a step: without an answer PyTorch, or what `fusion` fuses."""
    if q.engine is None:
        return "fused" if fusion.fuses else "eager"
    if fusion.fuses and q.engine != "fused":
        raise ValueError(
            f"fusion= plans kernels that are fused by hand, and engine={q.engine!r} says otherwise: leave one out."
        )
    return q.engine


def _read_prefetch(asked: bool | int | None, shape: Shape | None, device: str, trains: bool, optimizer: str) -> int:
    """Return how many blocks are fetched ahead; 0 where weights are not streamed."""
    if not asked:
        return 0
    if shape is None:
        raise ValueError(
            "offload_weights streams blocks, and a number of parameters has none: plan with a config or a model."
        )
    if device == "cpu":
        raise ValueError("offload_weights needs a GPU: leave it out, or give gpu='H100' or the like.")
    if trains and optimizer == "muon":
        raise ValueError(
            "Muon's products are not planned on the host, where offload_weights updates trained weights: give optimizer='adamw' "
            "with offload_weights."
        )
    if trains and optimizer in OFFLOADING:
        raise ValueError(
            "ZenFlow and OffloadAdamW take parameters of one device. Trained weights that offload_weights keeps on the host are "
            "updated there: give optimizer='adamw' with offload_weights."
        )
    return 1 if asked is True else arguments.integer("offload_weights", asked, most=1e4)


def read_dtype(value: Any) -> str:
    """Return the plan's name of a dtype that training holds weights or moments in; bf16 for None."""
    name = str(value if value is not None else "bf16").rpartition(".")[2]
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is none that training holds: use 'bf16', 'fp16' or 'fp32'.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(name, name)


def read_optimizer(value: Any) -> str:
    """Return the plan's name of an optimizer, given as an object, a class, a spec or a name."""
    named = getattr(value, "optimizer", value)  # a spec names its class
    kind = named if isinstance(named, type) else type(named)
    name = (named if isinstance(named, str) else kind.__name__).lower()
    if name not in _OPTIMIZERS:
        known = ", ".join(repr(each) for each in _OPTIMIZERS if each not in ("none", "sgd"))
        raise ValueError(f"optimizer={name!r} has no known state size: use {known} or 'sgd'.")
    return _OPTIMIZERS[name]


def _check_momentum(optimizer: Any) -> None:
    """Raise ValueError for SGD that has momentum in any of its groups of parameters."""
    groups = getattr(optimizer, "param_groups", None) or [{"momentum": _option(optimizer, "momentum")}]
    if momentum := max(group.get("momentum") or 0 for group in groups):
        raise ValueError(
            f"SGD with momentum={momentum:g} has a state, which is not planned: give plan(optimizer='adamw'), which has two, or "
            "plan(optimizer='sgd'), which has none."
        )


def read_deferral(optimizer: Any) -> dict[str, Any]:
    """Return ZenFlow's settings that memory and time depend on, as `predict_offload` takes them; {} for another optimizer."""
    if optimizer is None or read_optimizer(optimizer) != "zenflow":
        return {}
    found = {name: _option(optimizer, name) for name in ("topk_ratio", "update_interval", "overlap_step", "slots")}
    return {"topk_ratio": HOT} | {name: value for name, value in found.items() if value is not None}


def _option(optimizer: Any, name: str) -> Any:
    """Return an option of an optimizer, or of a spec that holds its options."""
    held: dict[str, Any] = {}
    for where in ("defaults", "options", "settings", "helpers"):
        held |= getattr(optimizer, where, {})
    return getattr(optimizer, name, None) or held.get(name)
