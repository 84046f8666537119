"""Count the memory of one GPU, term by term, exact or approximate, at the moment of a step at which it peaks.

Exact terms follow from shapes and dtypes: weights, gradients, optimizer state, the adapter, the KV cache. What comes and goes with
a step (activations, the loss, gradients of activations, temporaries) is replayed operation by operation: activations.py says
what our layers and transformers' keep, tape.py which tensors live at each moment. So the terms are those of one moment, the
fullest one, and sum to the total; `Term.most` is what a term takes at its own fullest. Gradients grow while activations go: a
step whose loss is the fullest moment holds none yet.

Korthikanti et al. (arXiv 2205.05198) give the form, bytes a token and layer, for other layers than these. For ours in bf16,
with RMSNorm, SwiGLU and fused attention, it comes to

    2 (4h + 2q + 2kv + 3f) + 4 heads + 8

    h    width: both norms' inputs and outputs
    q    heads x head_dim: the query, and attention's output, which o_proj reads
    kv   kv_heads x head_dim: key, value
    f    ffn: gate, up, their product
    4 heads: attention's log-sum-exp; 8: two reciprocal RMS

and transformers' to 2 (8h + 2q + 2kv + 4f) + 4 heads + 8, as its norms keep float32. A quantized product keeps its own codes
of its input (1 byte an element for FP8) in place of the shared tensor at 2 bytes; under an adapter the adapter keeps that tensor,
the frozen base nothing. Full recompute keeps each layer's input. Quantized weights of a trained layer are made for each
product and not kept.

A plan without training replays the forward alone: one layer's tensors at a time, the KV cache, and logits of every token
("whole") or of the last one of each sequence ("fused"), as generation takes them.

The replay of a GPU's kernels follows their code; so far it is measured on a CPU alone (docs/measurements/memory-cpu.json).

Of a model that is divided over GPUs (division.py) the fullest GPU is counted. With tensor and sequence parallelism a GPU keeps what
one GPU keeps of its share of the tokens, since each kept tensor is divided, by tokens or by features.

Under ZeRO 2 and 3 a layer's gradient is whole until it is reduced; under 3 two layers' weights are gathered, the one that
computes and the next, and with them the embeddings, which FSDP2 holds in the root's group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from surokit.fusion import OFF, Fusion
from surokit.planner.counts.activations import Activations, Ours, loss_rows, replay
from surokit.planner.counts.division import WHOLE, Division
from surokit.planner.counts.flops import (
    Placement,
    Recompute,
    Trained,
    frozen,
    gradients,
    operand_bits,
    placements,
    trained_share,
)
from surokit.planner.counts.fused_activations import FusedLayers
from surokit.planner.counts.muon import OWN, SCRATCH, hidden_matrices, hidden_share
from surokit.planner.counts.tape import GRADIENTS, KEPT, LOGITS, PASSING, Moment
from surokit.planner.counts.transformers_activations import Theirs
from surokit.planner.inputs.shape import Shape, built_here
from surokit.planner.inputs.typical import typical_shape
from surokit.planner.offload.formulas import OFFLOADING, SLOTS, device_bytes, host_bytes
from surokit.planner.offload.streaming import GRADIENT_BLOCKS, Blocks, read_blocks

GIB = 2**30
#: Bytes an element of the dtypes that weights, gradients and optimizer states come in.
DTYPE_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
# Fragmentation and workspace: the upper end of the usual 5 to 10 %, so that "fits" errs on the safe side.
SLACK = 0.10
# Elements that our AdamW widens to float32 at a time (optim/adamw.py), and that the 8-bit one takes at a time on a CPU.
WIDENED, CHUNK_8BIT, CHUNK_8BIT_BYTES = 1 << 25, 1 << 16, 40
# inputs of blocks that are on the device though they wait on the host: two fetched ahead, one that leaves
ON_THEIR_WAY = 3
#: The terms that `offload_states` leaves on the host.
STATES = ("optimizer", "master weights")
#: The phases of a step, in order.
PHASES = ("forward", "loss", "backward", "optimizer")

#: The library whose layers compute: they differ in what they keep for the backward.
Layers = Literal["surokit", "transformers"]
#: What of the activations waits on the host: nothing, all of them, or the inputs of blocks.
OffloadedActivations = bool | Literal["inputs"]
Engine = Literal["eager", "compiled", "fused"]
#: Who computes attention, for times: torch; FlashAttention-3, FlashAttention-4 or cuDNN; or FlashAttention's first Triton kernel.
AttentionKernel = Literal["sdpa", "flash3", "triton"]


@dataclass(frozen=True)
class Term:
    """A Term holds its bytes on one GPU at the step's fullest moment, whether they are exact, and how they come about.

    `counted` is False for bytes that training does not hold. `most` is what the term takes at its own fullest moment, where that is
    another one.
    """

    name: str
    bytes: float
    exact: bool
    how: str
    counted: bool = True
    most: float = -1.0

    def __post_init__(self) -> None:
        if self.most < 0:
            object.__setattr__(self, "most", self.bytes)

    @property
    def gib(self) -> float:
        return self.bytes / GIB

    @property
    def most_gib(self) -> float:
        return self.most / GIB


@dataclass(frozen=True)
class Phase:
    """A Phase holds the bytes at the fullest moment of one phase of a step: forward, loss, backward or optimizer."""

    name: str
    bytes: float

    @property
    def gib(self) -> float:
        return self.bytes / GIB


@dataclass(frozen=True)
class Memory:
    """A Memory holds the terms of one GPU at the fullest moment, the phases, and what is left out for want of an argument.

    Without batch and length there are no phases, and the terms are what a step holds in any case. `host` is what waits on the
    host, where anything does.
    """

    terms: tuple[Term, ...]
    left_out: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    host: tuple[Term, ...] = ()

    @property
    def host_gib(self) -> float:
        """Return the GiB of the host's memory that each GPU needs."""
        return sum(t.gib for t in self.host)

    @property
    def exact_gib(self) -> float:
        return sum(t.gib for t in self.terms if t.exact and t.counted)

    @property
    def approximate_gib(self) -> float:
        return sum(t.gib for t in self.terms if not t.exact and t.counted)

    @property
    def gib(self) -> float:
        """Return the GiB of all counted terms at the fullest moment, exact and approximate, slack included."""
        return self.exact_gib + self.approximate_gib

    @property
    def peak_gib(self) -> float:
        """Return the GiB without slack, which predict torch.cuda.max_memory_allocated."""
        return sum(t.gib for t in self.terms if t.counted and t.name != "slack")

    @property
    def peak_phase(self) -> str | None:
        """Return the name of the phase in which memory peaks; None without phases."""
        return max(self.phases, key=lambda p: p.bytes).name if self.phases else None

    @property
    def largest(self) -> Term:
        """Return the counted term with the most bytes."""
        return max((t for t in self.terms if t.counted), key=lambda t: t.bytes)

    def __getitem__(self, name: str) -> Term:
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(f"There is no memory term {name!r}: there are {', '.join(t.name for t in self.terms)}.")


@dataclass(frozen=True)
class Setup:
    """A Setup describes the step that is planned: everything that its memory depends on besides shape and recipe.

    `zero` is the ZeRO stage over `gpus`: 1 shards optimizer states, 2 gradients too, 3 weights too. `batch` is the number of
    sequences on one GPU, `length` that of tokens of each. `fusion` says which operations are computed together, `graphs` whether a
    step is captured as CUDA graphs. `hot` is the share of the trained parameters whose states ZenFlow keeps on the device,
    `overlap` and `slots` are its settings. `prefetch` is how many blocks are fetched ahead where weights are streamed (0: they are
    not). `trained` is the part of a live model that trains; without it the recipe decides. `engine` says who makes the kernels:
    PyTorch, torch.compile, or a hand. `attention_kernel` is torch's scaled_dot_product_attention or a faster one.
    With `in_backward` each weight is updated as its gradient arrives, and the gradient freed. `division` says how the model itself
    is divided over GPUs, and `experts` the shares of experts in what trains and in the weights, which ZeRO shards over fewer GPUs
    where these have different ones.
    """

    dtype: str = "bf16"
    optimizer: str = "adamw"
    state_dtype: str = "bf16"
    master: bool = False
    gpus: int = 1
    zero: int = 0
    batch: int | None = None
    length: int | None = None
    recompute: Recompute = "none"
    recompute_blocks: int | None = None
    logits: Literal["fused", "whole"] = "fused"
    training: bool = True
    device: Literal["cpu", "cuda"] = "cuda"
    layers: Layers = "surokit"
    accumulate: int = 1
    slack: float = SLACK
    fusion: Fusion = OFF
    graphs: bool = False
    hot: float = 0.0
    overlap: bool = True
    slots: int = SLOTS
    prefetch: int = 0
    offload_activations: OffloadedActivations = False
    offload_states: bool = False
    trained: Trained | None = None
    engine: Engine = "eager"
    attention_kernel: AttentionKernel = "sdpa"
    in_backward: bool = False
    division: Division = WHOLE
    experts: tuple[float, float] = (0.0, 0.0)

    @property
    def replicas(self) -> int:
        """Return the number of data-parallel GPUs, or groups of GPUs: each computes micro-batches of its own."""
        return self.gpus // self.division.gpus

    def shards_from(self, stage: int) -> float:
        """Return the number of GPUs over which ZeRO shards what it shards from `stage` on; 1 where it does not."""
        if self.replicas == 1 or self.zero < stage:
            return 1
        return self.replicas / (1 + (self.division.expert - 1) * self.experts[stage >= 3])

    @property
    def sharing(self) -> tuple[int, int, int]:
        """Return how many GPUs have the same matrices and the same experts, whole or in shards, and ZeRO's stage."""
        return self.replicas, max(1, self.replicas // self.division.expert), self.zero

    def of_part(self, part: Shape, whole: Shape, recipe: Any) -> Setup:
        """Return the setup of one GPU's part of a divided model; of what trains of a live one it has its share."""
        blocks = self.recompute_blocks
        blocks = None if blocks is None else -(-blocks // self.division.pipeline)
        trained = None if self.trained is None else self.trained.times(trained_share(part, whole, recipe))
        return replace(self, experts=_experts_of(part, recipe), recompute_blocks=blocks, trained=trained)

    @property
    def offloads(self) -> str:
        """Say in words what of a step is kept on the host; "" where nothing is."""
        states = {"zenflow": "ZenFlow's states", "offloadadamw": "OffloadAdamW's states"} if self.training else {}
        parts = [
            "the optimizer's states" if self.offload_states else states.get(self.optimizer, ""),
            "weights" * bool(self.prefetch),
            "inputs of blocks" if self.offload_activations == "inputs" else "activations" * self.offload_activations,
        ]
        return " and ".join(part for part in parts if part)

    @property
    def repeats(self) -> Recompute:
        """Return what backward computes of the products again; fused layers' "selective" repeats none."""
        return "none" if self.recompute == "selective" and self.fusion.fuses else self.recompute

    @property
    def early_stop(self) -> bool:
        """True if a layer is computed again only up to the last tensor that backward reads, as torch's checkpointing does."""
        return not self.fusion.fuses and self.engine != "fused"

    @property
    def trained_width(self) -> float:
        """Return the bytes of one parameter that trains, which are also those of its gradient."""
        return DTYPE_BYTES[self.dtype] if self.trained is None else self.trained.bytes / self.trained.parameters

    @property
    def has_masters(self) -> bool:
        """True if what trains has float32 masters beside it; float32 weights are their own."""
        return self.master and self.trained_width < 4


def _experts_of(part: Shape, recipe: Any) -> tuple[float, float]:
    """Return the shares of routed experts in what trains of a part, and in all of its parameters."""
    places = placements(part, recipe)
    experts = [place for place in places if place.weight.kind == "expert"]
    held = sum(place.weight.parameters for place in experts) / part.parameters
    if not frozen(recipe):
        return held, held
    adapters = sum(place.adapter_parameters for place in places)
    return sum(place.adapter_parameters for place in experts) / max(adapters, 1), held


def count_memory(shape: Shape | None, parameters: float, recipe: Any, setup: Setup) -> Memory:
    """Count the memory of one GPU. A number of parameters has that of a typical shape (typical.py) if batch and length are given;
    without them only the states are counted, and a recipe's storage applies to every parameter."""
    if shape is None and setup.batch and setup.length and (typical := typical_shape(parameters)) is not None:
        return _as_typical(typical[0], parameters, recipe, setup)
    if shape is not None and setup.division.divides:
        stages = setup.division.stages(shape)
        return max((_memory(stage, shape, recipe, setup) for stage in stages), key=lambda memory: memory.gib)
    return _count(shape, shape, parameters, recipe, setup)


def _memory(stage: Shape, whole: Shape, recipe: Any, setup: Setup) -> Memory:
    """Count the memory of a GPU that has its part of a pipeline's stage."""
    part = setup.division.narrow(stage)
    return _count(part, stage, part.parameters, recipe, setup.of_part(part, whole, recipe))


def _count(shape: Shape | None, stage: Shape | None, parameters: float, recipe: Any, setup: Setup) -> Memory:
    """Count the memory of a GPU that holds weights of this shape; `stage` has their whole width."""
    places = placements(shape, recipe) if shape is not None else ()
    terms, trained = _weights(shape, parameters, recipe, setup, places)
    host: list[Term] = []
    blocks = blocks_of(shape, recipe, setup, places)
    if blocks is not None:
        terms, host = _streamed(terms, blocks, setup), _blocks_on_host(blocks, setup)
        trained -= sum(blocks.trained) * setup.training
    if setup.training:
        for term in _states(trained, setup, hidden_share(shape, recipe) if shape is not None else 0.0):
            (host if setup.offload_states and term.name in STATES else terms).append(term)
        if blocks is not None:
            terms = _block_gradients(terms, blocks, setup)
        if setup.optimizer in OFFLOADING and setup.device != "cpu":
            host.append(_states_on_host(trained, setup))
    left_out: list[str] = []
    phases: tuple[Phase, ...] = ()
    if shape is None:
        wanted = "a config in place of a number of parameters" if setup.batch and setup.length else "batch= and length="
        left_out.append(f"activations, logits and KV cache: give {wanted}")
    elif setup.layers == "surokit" and not built_here(shape):
        raise ValueError(
            f"surokit's own layers are not counted for {shape.family}: leave layers= out, or give layers='transformers'."
        )
    elif setup.batch is None or setup.length is None:
        left_out.append("activations, logits and KV cache: give batch= and length=")
    else:
        assert stage is not None
        passing = places if stage is shape else placements(stage, recipe)
        terms, phases, kept = _with_step([*terms, _cache(shape, setup)], stage, trained, recipe, setup, passing)
        if kept:
            host.append(Term("activations", kept, False, "what backward needs, from 1 MiB on"))
    held = sum(t.bytes for t in terms if t.counted)
    how = f"allocator and workspace, {setup.slack:.0%} of the rest (usual: 5 to 10 %)"
    terms.append(Term("slack", setup.slack * held, False, how))
    return Memory(tuple(terms), tuple(left_out), phases, tuple(host))


def _as_typical(shape: Shape, parameters: float, recipe: Any, setup: Setup) -> Memory:
    """Return the memory of a shape of nearly as many parameters, scaled to their number; no term of it is exact."""
    found, ratio = count_memory(shape, shape.parameters, recipe, setup), parameters / shape.parameters

    def scaled(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        how = "as of a typical shape"
        return tuple(Term(t.name, t.bytes * ratio, False, how, t.counted, t.most * ratio) for t in terms)

    phases = tuple(replace(phase, bytes=phase.bytes * ratio) for phase in found.phases)
    return Memory(scaled(found.terms), found.left_out, phases, scaled(found.host))


def blocks_of(
    shape: Shape | None, recipe: Any, setup: Setup, places: tuple[Placement, ...] | None = None
) -> Blocks | None:
    """Return the blocks whose weights are streamed from the host; None where none are."""
    if shape is None or not setup.prefetch:
        return None
    places = placements(shape, recipe) if places is None else places
    base_trains = setup.training and not frozen(recipe)
    return read_blocks(shape, recipe, places, DTYPE_BYTES[setup.dtype], base_trains=base_trains, trained=setup.trained)


def _streamed(terms: list[Term], blocks: Blocks, setup: Setup) -> list[Term]:
    """Return the terms with those of weights replaced, as blocks are streamed: weights outside the blocks, and of the blocks that
    are on the device at a time."""
    own = [t for t in terms if t.name.partition(",")[0] == "weights"]
    outside, here = sum(t.bytes for t in own) - sum(blocks.bytes), blocks.resident(setup.prefetch)
    n = min(len(blocks.bytes), setup.prefetch + 1)
    return [
        Term("weights, outside the blocks", outside, True, "embeddings, head and the last norm"),
        Term(
            "weights, blocks at a time", here, True, f"{n} of {len(blocks.bytes)} blocks; the others wait on the host"
        ),
        *(t for t in terms if t not in own),
    ]


def _block_gradients(terms: list[Term], blocks: Blocks, setup: Setup) -> list[Term]:
    """Return the terms with gradients of blocks that are on their way to the host added to the gradients."""
    passing = min(GRADIENT_BLOCKS, len(blocks.trained)) * max(blocks.trained) * setup.trained_width
    how = f"; and {GRADIENT_BLOCKS} blocks' on their way to the host"
    return [
        replace(t, bytes=t.bytes + passing, most=t.bytes + passing, how=t.how + how, exact=False)
        if t.name == "gradients" and passing
        else t
        for t in terms
    ]


def _blocks_on_host(blocks: Blocks, setup: Setup) -> list[Term]:
    """Return the host's terms: weights of the blocks and, where they train, their gradients and optimizer states."""
    found = [Term("weights of the blocks", sum(blocks.bytes), True, "as they are stored")]
    if trained := sum(blocks.trained):
        found.append(Term("their gradients", trained * setup.trained_width, True, f"{trained:,.0f} parameters"))
        states = sum(t.bytes for t in _states(trained, replace(setup, gpus=1)) if t.name != "gradients")
        found.append(Term("their optimizer", states, True, f"{setup.optimizer}'s, {trained:,.0f} parameters"))
    return found


def _states_on_host(trained: float, setup: Setup) -> Term:
    shard, sharded = _shards(setup, 1)
    hot = setup.hot if setup.optimizer == "zenflow" else None
    size = host_bytes(trained / shard, hot, round(setup.trained_width), setup.slots, setup.overlap)
    return Term("optimizer", size, False, f"{trained:,.0f} x states, sums and transfers{sharded}")


def stored_bytes(quantizer: Any, n: int, k: int) -> float:
    """Return the bytes of a quantized weight [n, k]: codes and scales."""
    return float(quantizer.nbytes(n, k))


def _weights(
    shape: Shape | None, parameters: float, recipe: Any, setup: Setup, places: tuple[Placement, ...]
) -> tuple[list[Term], float]:
    """Return the terms of weights, their copies and adapters, and the number of trained parameters."""
    width = DTYPE_BYTES[setup.dtype]
    shard, sharded = _shards(setup, 3)
    storage = getattr(recipe, "storage", None)
    if shape is None:
        each = storage.bits / 8 if storage else width
        how = f"{each:.4g} bytes a parameter" + (", scales included" if storage else "")
        return [Term("weights", parameters * each / shard, storage is None, how + sharded)], 0 if frozen(
            recipe
        ) else parameters

    terms = []
    if storage is None:
        terms.append(Term("weights", parameters * width / shard, True, f"{parameters:,.0f} x {width} bytes{sharded}"))
    else:
        # a tied head is the embedding: it stays where the lookup needs it, whatever the rules say of lm_head
        stored = [p for p in places if p.quantized and not (shape.tied and p.weight.name == "lm_head")]
        count = sum(p.weight.n * p.weight.k * p.quantized for p in stored)
        codes = sum(stored_bytes(storage, p.weight.n, p.weight.k) * p.quantized for p in stored)
        rest = parameters - count
        terms.append(
            Term("weights, stored quantized", codes / shard, True, f"{count:,} in {storage}, scales included{sharded}")
        )
        terms.append(
            Term(
                "weights, others",
                rest * width / shard,
                True,
                f"{rest:,.0f} x {width} bytes (embeddings, norms, kept layers){sharded}",
            )
        )

    adapter, live = sum(p.adapter_parameters for p in places), setup.trained
    if adapter:
        held = adapter * width if live is None else live.adapter_bytes
        how = f"{adapter:,} x {held / adapter:.4g} bytes, rank {recipe.adapter.rank}{sharded}"
        terms.append(Term("adapter", held / shard, True, how))
    if setup.fusion.frozen != "no" and frozen(recipe) and setup.training and not setup.prefetch:
        terms += _codes(shape, recipe, setup, places)
    if setup.training and (history := _history(recipe)):
        slots = 3 * sum(p.quantized for p in places)
        how = f"{slots:,} operands x {history:,} steps in float32, with those in force and the open ones"
        terms.append(Term("amax histories", slots * (history + 2) * 4.0, True, how))
    stepping = setup.batch is not None and setup.length is not None
    largest = max((p.weight.n * p.weight.k for p in places if p.quantized), default=0)
    if largest and storage is not None:
        held, how = largest, "the largest stored weight, made for its product and let go"
        kept = getattr(recipe, "keeps_decoded", False) and not recipe.takes_codes(storage)
        if kept and setup.device == "cpu":
            held, how = count, "every stored weight, decoded once and kept"
        elif kept and setup.training:
            if setup.recompute == "full":
                held, how = -(-count // shape.layers), "one layer's stored weights; recompute lets the others go"
            else:
                held, how = count, "every stored weight, kept from forward to backward"
        elif setup.fusion.fuses and recipe.takes_codes(storage):
            turned = setup.fusion.frozen != "transposed" and setup.training
            held, how = (
                largest * storage.format.bits / 8 / width * turned,
                "the largest stored weight's codes, turned for its product",
            )
        if held:
            terms.append(Term("dequantized weight", held * width, False, how))
    elif largest and not stepping:
        how = "codes of the largest weight and their transpose, made for its product and let go"
        terms.append(Term("quantized copies", 2 * largest * operand_bits(recipe.forward) / 8, False, how))
    if setup.replicas > 1 and setup.zero >= 2 and setup.training and (found := _gathered(shape, recipe, setup, places)):
        terms.append(found)
    if setup.replicas > 1 and setup.zero == 2 and setup.training:
        whole = sum(term.bytes for term in terms if term.name.startswith(("weights", "adapter")))
        terms.append(
            Term(
                "shards of the weights",
                whole / setup.shards_from(2),
                True,
                "which FSDP2 keeps beside the gathered ones",
            )
        )
    if live is not None:
        return terms, live.parameters
    return terms, adapter if frozen(recipe) else parameters


def _codes(shape: Shape, recipe: Any, setup: Setup, places: tuple[Placement, ...]) -> list[Term]:
    """Return the terms of codes that a fused step keeps of frozen weights that are quantized for their products, of W' too."""
    found = []
    for name, product in (("codes of frozen weights", "forward"), ("codes of W'", "grad_input")):
        q = getattr(getattr(recipe, product, None), "b", None)
        turned = product == "grad_input"
        if q is None or (turned and setup.fusion.frozen != "transposed"):
            continue
        # the codes of a stored weight are there already; codes of another format would take the memory that storing it saves
        storage = recipe.storage
        if storage is not None and not (turned and storage.same_codes(q) and storage.transposable):
            continue
        live = gradients(shape, places, base_trains=False) if turned else {}
        count = [p.weight.a_layer * len(p.layers & live[p.weight.reads]) if turned else p.quantized for p in places]
        size = sum(stored_bytes(q, p.weight.n, p.weight.k) * n for p, n in zip(places, count))
        if size:
            how = "and not turned for each product" if turned else "and not quantized for each product"
            found.append(Term(name, size, True, f"kept in {q}, scales included, {how}"))
    return found


def _history(recipe: Any) -> int:
    """Return how many steps of amaxes a recipe's delayed scales remember; 0 where it has none."""
    gemms = (getattr(recipe, name, None) for name in ("forward", "grad_input", "grad_weight"))
    quantizers = (getattr(gemm, operand, None) for gemm in gemms for operand in ("a", "b"))
    return max((int(getattr(q.scaling, "history", 0)) for q in quantizers if q is not None), default=0)


def _gathered(shape: Shape, recipe: Any, setup: Setup, places: tuple[Placement, ...]) -> Term | None:
    """Return the term of sharded weights and gradients that are whole on every GPU for a moment; None where there are none."""
    width, storage = DTYPE_BYTES[setup.dtype], getattr(recipe, "storage", None)
    layer = shape.projection_parameters / shape.layers
    held, how = 0.0, []
    if setup.zero >= 3:
        each = storage.bits / 8 if storage is not None else width
        held += 2 * layer * each + shape.matrices_of_words * shape.embedding_parameters * width
        how.append("two layers' weights and the embeddings, gathered")
    if not frozen(recipe):
        held += layer * width
        how.append("a layer's gradients until they are reduced")
    return Term("gathered layers", held, False, f"{', and '.join(how)} (ZeRO {setup.zero})") if held else None


def _shards(setup: Setup, stage: int) -> tuple[float, str]:
    """Return the number of GPUs that a term is divided over if ZeRO shards it from `stage` on, and a phrase that says so."""
    shards = setup.shards_from(stage)
    if shards == 1:
        return 1, ""
    whole = shards == round(shards)
    over = f"{shards:.10g}" if whole else f"{shards:.2f}, experts over fewer GPUs"
    return shards, f" / {over} (ZeRO {setup.zero})"


def _states(trained: float, setup: Setup, hidden: float = 0.0) -> list[Term]:
    """Return the terms of gradients and optimizer states; hidden: the share of what trains that is in hidden matrices."""
    width, state = setup.trained_width, DTYPE_BYTES[setup.state_dtype]
    (g_shard, g_how), (o_shard, o_how) = _shards(setup, 2), _shards(setup, 1)
    terms = [Term("gradients", trained * width / g_shard, True, f"{trained:,.0f} x {width:.4g} bytes{g_how}")]
    if setup.in_backward:
        terms = [Term("gradients", 0.0, True, "each is used and freed as it arrives; the largest is in the workspace")]
    if setup.optimizer == "adamw":
        terms.append(
            Term(
                "optimizer",
                trained * 2 * state / o_shard,
                True,
                f"{trained:,.0f} x 2 moments in {setup.state_dtype}{o_how}",
            )
        )
    elif setup.optimizer == "adamw8bit":
        # two moments of one byte, a float32 scale for each block of 256
        terms.append(
            Term(
                "optimizer",
                trained * 2 * (1 + 4 / 256) / o_shard,
                False,
                f"{trained:,.0f} x 2 moments in 8 bits and their scales{o_how}",
            )
        )
    elif setup.optimizer == "muon":
        own, rest = hidden * trained, (1 - hidden) * trained
        how = f"{own:,.0f} x momentum and {rest:,.0f} x 2 moments in {setup.state_dtype}{o_how}"
        terms.append(Term("optimizer", (own + 2 * rest) * state / o_shard, setup.trained is None, how))
    elif setup.optimizer in OFFLOADING:
        terms.append(_offloaded(trained / o_shard, setup))
    # those of an offloading optimizer are on the host
    if setup.has_masters and setup.optimizer not in OFFLOADING:
        terms.append(Term("master weights", trained * 4 / o_shard, True, f"{trained:,.0f} x 4 bytes{o_how}"))
    return terms


def _offloaded(trained: float, setup: Setup) -> Term:
    """Return the term of an offloading optimizer on the device; on a CPU it holds the host's states too, without transfers."""
    deferred = setup.optimizer == "zenflow"
    if setup.device == "cpu":
        size = 12 * setup.hot * trained * deferred + _states_on_host(trained, replace(setup, gpus=1)).bytes
        return Term("optimizer", size, False, f"{trained:,.0f} x states, sums and transfers")
    size = device_bytes(trained, setup.hot if deferred else None, round(setup.trained_width))
    how = "transfers each way; the states are on the host"
    if deferred:
        how = f"{setup.hot:.0%} of {trained:,.0f} x 12 bytes, gradients on their way to the host, and transfers back"
    return Term("optimizer", size, False, how)


def _with_step(
    terms: list[Term], shape: Shape, trained: float, recipe: Any, setup: Setup, places: tuple[Placement, ...]
) -> tuple[list[Term], tuple[Phase, ...], float]:
    """Return the terms at the fullest moment of a step, activations and temporaries included, the phases, and the bytes of
    activations on the host. shape: of whole width."""
    division = setup.division
    if division.tensor > 1:
        assert setup.batch is not None
        assert setup.length is not None
        gathered = 2 * setup.batch * setup.length * shape.width * DTYPE_BYTES[setup.dtype]
        how = "a layer's input and a gradient, gathered over the GPUs that share it"
        terms = [*terms, Term("gathered tokens", gathered, False, how)]
        setup = replace(setup, length=-(-setup.length // division.tensor))
    # gradients of streamed blocks come and go, and are counted as if they were there all along
    there = setup.training and (setup.accumulate > 1 or setup.prefetch > 0)
    passing, on_host = _replayed(shape, recipe, setup, places, there), 0.0
    if setup.offload_activations and setup.training:
        inputs = shape.layers * _input_bytes(shape, setup)
        if setup.offload_activations == "inputs":
            on_host, most = inputs, passing.kept - inputs + ON_THEIR_WAY * inputs / shape.layers
        else:
            on_host, most = passing.kept, _kept_here(shape, recipe, setup, places)
        passing = _replayed(shape, recipe, setup, places, there, most)
    if more := passing.kept * (division.in_flight(shape, setup.accumulate) - 1):
        how = "of micro-batches whose backward has not begun (1F1B)"
        terms = [*terms, Term("activations in flight", more, False, how)]
    gradients = next((t for t in terms if t.name == "gradients"), None)
    fixed = sum(t.bytes for t in terms if t.counted and t is not gradients)
    moments = list(passing.moments)
    if gradients is not None:
        full = gradients.bytes
        if there:
            moments = [_with_gradients(m, full) for m in moments]
        # the optimizer meets all gradients, and no activation
        scratch = _optimizer_scratch(shape, trained, recipe, setup)
        at_end = {KEPT: 0.0, LOGITS: 0.0, GRADIENTS: full, PASSING: scratch}
        moments.append(Moment("optimizer", full + scratch, at_end))
    peak = max(moments, key=lambda m: m.bytes)
    if gradients is not None:
        held = min(peak.made_of[GRADIENTS], full)
        held = full if held > 0.999 * full else held
        terms[terms.index(gradients)] = replace(gradients, bytes=held, most=full, exact=held in (0.0, full))
    phases = tuple(Phase(m.phase, fixed + m.bytes) for m in moments)
    head = next((place for place in places if place.weight.name == "lm_head"), None)
    return [*terms, *_passing(shape, passing, peak, setup, head)], phases, on_host


def _replayed(
    shape: Shape,
    recipe: Any,
    setup: Setup,
    places: tuple[Placement, ...],
    gradients_there: bool,
    most_kept: float | None = None,
) -> Activations:
    assert setup.batch is not None
    assert setup.length is not None
    return replay(
        shape,
        recipe,
        setup,
        places,
        batch=setup.batch,
        length=setup.length,
        width=DTYPE_BYTES[setup.dtype],
        gradients_there=gradients_there,
        weight_share=0.0 if setup.in_backward else 1 / setup.shards_from(2) / setup.division.tensor,
        most_kept=most_kept,
        layers=_layers_of(setup),
    )


def _kept_here(shape: Shape, recipe: Any, setup: Setup, places: tuple[Placement, ...]) -> float:
    """Return the most bytes of activations on the device where they are offloaded: a block's, and those on their way, which are
    inputs of blocks that are computed again, else as much as a block's."""
    block = _replayed(shape, recipe, replace(setup, recompute="none"), places, False).kept / shape.layers
    if setup.recompute != "full" or setup.recompute_blocks is not None:
        return 2 * block
    return block + ON_THEIR_WAY * _input_bytes(shape, setup)


def _input_bytes(shape: Shape, setup: Setup) -> float:
    """Return the bytes of a block's input."""
    assert setup.batch is not None
    assert setup.length is not None
    return float(setup.batch * setup.length * shape.width * DTYPE_BYTES[setup.dtype])


def _layers_of(setup: Setup) -> type[Ours]:
    """Return the class that replays the step's layers; layers that PEFT wraps are no part of a fused operation."""
    if not setup.fusion.fuses:
        return Theirs if setup.layers == "transformers" else Ours
    return Ours if setup.trained is not None and setup.trained.peft else FusedLayers


def _with_gradients(moment: Moment, gradients: float) -> Moment:
    """Return the moment as a later micro-batch has it, which holds the sum of the gradients so far all along."""
    made_of = {**moment.made_of, GRADIENTS: moment.made_of[GRADIENTS] + gradients}
    return Moment(moment.phase, moment.bytes + gradients, made_of)


def _passing(shape: Shape, passing: Activations, peak: Moment, setup: Setup, head: Placement | None) -> list[Term]:
    """Return the terms that come and go with a step: activations, logits, workspace."""
    assert setup.batch is not None
    assert setup.length is not None
    tokens = setup.batch * setup.length
    whose = "transformers'" if setup.layers == "transformers" else "surokit's"
    if not setup.training:
        how = f"{tokens:,} tokens in one of {whose} layers at a time; nothing is kept for a backward"
    elif setup.recompute == "full" and setup.recompute_blocks is None:
        how = f"{tokens:,} tokens: each layer's input, and one layer whole while it is computed again"
    else:
        how = f"{tokens:,} tokens x {passing.kept / tokens / shape.layers:,.0f} bytes a token and layer"
        if setup.recompute == "mlp":
            how += "; each feed-forward is computed again"
        if setup.recompute_blocks is not None:
            how += f"; {setup.recompute_blocks} of the blocks are computed again"
        elif setup.recompute == "selective":
            again = "outputs of norm and SwiGLU are computed again, where they are kept as numbers"
            how += "; " + (
                again if setup.fusion.fuses else "all but attention and every second product is computed again"
            )
    if setup.offload_activations and setup.training:
        here = "those of a block" if setup.offload_activations is True else "all but inputs of blocks"
        how += f"; on the device {here}, and what is on its way"
    if passing.scores and setup.training:
        how += "; all of attention's scores, for want of a fused kernel"
    if setup.training:
        how += f", as {whose} layers keep them (form of arXiv 2205.05198)"
    most = passing.kept if setup.training and not setup.offload_activations else -1.0
    terms = [Term("activations", peak.made_of[KEPT], False, how, most=most)]
    if not setup.training:
        which = f"{tokens:,} tokens" if setup.logits == "whole" else "the last token of each sequence"
        how = f"{which} x {shape.vocab:,}, in {setup.dtype}"
    elif setup.logits == "whole":
        how = f"{tokens:,} tokens x {shape.vocab:,} whole, in {setup.dtype} and in the loss's float32"
    else:
        rows = loss_rows(tokens, shape.vocab, setup.device, DTYPE_BYTES[setup.dtype], head)
        how = f"fused with the loss: {rows:,} tokens at a time, never whole; the gradients that its forward makes"
    held = peak.made_of[LOGITS]
    terms.append(Term("logits", held, False, how, most=max(held, passing.loss)))
    how = "gradients of activations and temporaries of operations" if setup.training else "temporaries of operations"
    if setup.device == "cuda":
        how += "; libraries' own workspace is in the slack"
    terms.append(Term("workspace", peak.made_of[PASSING], False, how))
    return terms


def _optimizer_scratch(shape: Shape, trained: float, recipe: Any, setup: Setup) -> float:
    """Return the bytes that the optimizer's step takes beside weights, gradients and states."""
    mine = trained / setup.shards_from(1)
    if setup.optimizer == "adamw8bit":
        return min(mine, CHUNK_8BIT) * CHUNK_8BIT_BYTES if setup.device == "cpu" else 0.0
    scratch = 0.0
    widens = DTYPE_BYTES[setup.state_dtype] != setup.trained_width and not setup.has_masters
    if setup.optimizer in ("adamw", "muon") and widens:
        scratch = 8.0 * min(mine, max(WIDENED, shape.embedding_parameters))  # float32 copies of weights and gradients
    if setup.optimizer == "muon":
        each_element = SCRATCH + OWN * (setup.replicas > 1 and not setup.zero)
        scratch = max([scratch, *(each_element * each.n * each.k for each in hidden_matrices(shape, recipe))])
    return scratch


def _cache(shape: Shape, setup: Setup) -> Term:
    """Return the term of the KV cache, which generation holds and training does not."""
    assert setup.batch is not None
    assert setup.length is not None
    elements, width = shape.cache_width, DTYPE_BYTES[setup.dtype]
    windows = [shape.window_of(i) for i in range(shape.layers)] if setup.layers == "transformers" else []
    # transformers forgets what no window sees any more, and keeps the window less the token that comes; ours keeps all
    kept = [min(setup.length, w - 1) if w else setup.length for w in windows] or [setup.length] * shape.layers
    how = (
        f"{shape.layers} layers x {elements:,} keys and values x {width} bytes x {setup.batch * setup.length:,} tokens"
    )
    how += ", of which windows drop the oldest" if min(kept) < setup.length else ""
    how += ", for generation only: not counted" if setup.training else ""
    return Term("KV cache", setup.batch * sum(kept) * elements * width, True, how, counted=not setup.training)
