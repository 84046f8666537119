"""Bytes of one GPU, term by term: what is exact from the shapes, and what is approximate and by which formula.

Exact terms follow from shapes and dtypes: weights, gradients, optimizer state, the adapter, the KV cache. Approximate
ones depend on what the layers really keep and on the allocator. Activations take the form of Korthikanti et al. (arXiv
2205.05198), bytes a token and layer, with constants derived for this family (RMSNorm, SwiGLU, grouped-query attention,
fused attention that keeps no scores), at 2 bytes an activation:

    2 (4h + 2q + 2kv + 3f) + 4 heads + 8

    h    width: both norms' inputs and outputs
    q    heads x head_dim: the query, and attention's output, which o_proj reads
    kv   kv_heads x head_dim: key, value
    f    ffn: gate, up, their product
    4 heads: attention's log-sum-exp; 8: two reciprocal RMS

A quantized product keeps its own codes of its input (1 byte an element for FP8) in place of the shared tensor at 2
bytes; under an adapter the adapter keeps that tensor, the frozen base nothing. Full recompute keeps each layer's input
and one layer whole. Quantized weights of a trained layer are made for each product and not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from surokit.planner.flops import Placement, Recompute, frozen, operand_bits, placements
from surokit.planner.shape import Shape

GIB = 2**30
#: Bytes an element of the dtypes that weights, gradients and optimizer states come in.
DTYPE_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
# Fragmentation and workspace: the upper end of the usual 5 to 10 %, so that "fits" errs on the safe side.
SLACK = 0.10
# Elements of the logits that the fused linear + cross-entropy holds at a time (kernels/reference/loss.py, which needs torch).
LOSS_ELEMENTS = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
LOSS_MIN_ROWS = 64
_SHARES_INPUT = {
    "self_attn.q_proj": "attention",
    "self_attn.k_proj": "attention",
    "self_attn.v_proj": "attention",
    "mlp.gate_proj": "mlp",
    "mlp.up_proj": "mlp",
}


#: Whose layers compute: what they keep for the backward differs.
Layers = Literal["surokit", "transformers"]


@dataclass(frozen=True)
class Term:
    """One term: bytes on one GPU, whether they are exact, how they come about, and whether training holds them."""

    name: str
    bytes: float
    exact: bool
    how: str
    counted: bool = True

    @property
    def gib(self) -> float:
        return self.bytes / GIB


@dataclass(frozen=True)
class Memory:
    """The terms of one GPU, and what is left out for want of an argument."""

    terms: tuple[Term, ...]
    left_out: tuple[str, ...] = ()

    @property
    def exact_gib(self) -> float:
        return sum(t.gib for t in self.terms if t.exact and t.counted)

    @property
    def approximate_gib(self) -> float:
        return sum(t.gib for t in self.terms if not t.exact and t.counted)

    @property
    def gib(self) -> float:
        """All terms that training holds, exact and approximate."""
        return self.exact_gib + self.approximate_gib

    @property
    def largest(self) -> Term:
        """The term that binds."""
        return max((t for t in self.terms if t.counted), key=lambda t: t.bytes)

    def __getitem__(self, name: str) -> Term:
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(f"There is no memory term {name!r}: there are {', '.join(t.name for t in self.terms)}.")


@dataclass(frozen=True)
class Setup:
    """What memory depends on besides shape and recipe.

    `zero` is the ZeRO stage over `gpus`: 1 shards optimizer states, 2 gradients too, 3 weights too. `batch` is
    sequences on one GPU, `length` tokens of each.
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
    logits: Literal["fused", "whole"] = "fused"
    training: bool = True
    device: Literal["cpu", "cuda"] = "cuda"
    layers: Layers = "surokit"
    accumulate: int = 1
    slack: float = SLACK


def count_memory(shape: Shape | None, parameters: float, recipe: Any, setup: Setup) -> Memory:
    """Memory of one GPU; without a shape only the states, and a recipe's storage applies to every parameter."""
    places = placements(shape, recipe) if shape is not None else ()
    terms, trained = _weights(shape, parameters, recipe, setup, places)
    if setup.training:
        terms += _states(trained, setup)
    left_out: list[str] = []
    if shape is None:
        left_out.append("activations, logits and KV cache: give a config in place of a number of parameters")
    elif setup.batch is None or setup.length is None:
        left_out.append("activations, logits and KV cache: give batch= and length=")
    else:
        terms += _passing(shape, recipe, setup, places)
    held = sum(t.bytes for t in terms if t.counted)
    terms.append(
        Term(
            "slack",
            setup.slack * held,
            False,
            f"allocator and workspace, {setup.slack:.0%} of the rest (usual: 5 to 10 %)",
        )
    )
    return Memory(tuple(terms), tuple(left_out))


def stored_bytes(quantizer: Any, n: int, k: int) -> float:
    """Bytes of a quantized weight [n, k]: codes and scales."""
    return float(quantizer.nbytes(n, k))


def _weights(
    shape: Shape | None, parameters: float, recipe: Any, setup: Setup, places: tuple[Placement, ...]
) -> tuple[list[Term], float]:
    """The terms of weights, and the number of trained parameters."""
    width = DTYPE_BYTES[setup.dtype]
    shard, sharded = (setup.gpus, f" / {setup.gpus} (ZeRO 3)") if setup.zero >= 3 else (1, "")
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

    adapter = sum(p.rank * (p.weight.n + p.weight.k) * p.weight.count for p in places)
    if adapter:
        terms.append(
            Term(
                "adapter",
                adapter * width / shard,
                True,
                f"{adapter:,} x {width} bytes, rank {recipe.adapter.rank}{sharded}",
            )
        )
    largest = max((p.weight.n * p.weight.k for p in places if p.quantized), default=0)
    if largest and storage is not None:
        held, how = largest, "the largest stored weight, made for its product and let go"
        if setup.training and getattr(recipe, "keeps_decoded", False) and not recipe.takes_codes(storage):
            if setup.recompute == "full":
                held, how = -(-count // shape.layers), "one layer's stored weights; recompute lets the others go"
            else:
                held, how = count, "every stored weight, kept from forward to backward"
        terms.append(Term("dequantized weight", held * width, False, how))
    elif largest:
        how = "codes of the largest weight and their transpose, made for its product and let go"
        terms.append(Term("quantized copies", 2 * largest * operand_bits(recipe.forward) / 8, False, how))
    return terms, adapter if frozen(recipe) else parameters


def _states(trained: float, setup: Setup) -> list[Term]:
    width, state = DTYPE_BYTES[setup.dtype], DTYPE_BYTES[setup.state_dtype]
    g_shard, g_how = (setup.gpus, f" / {setup.gpus} (ZeRO {setup.zero})") if setup.zero >= 2 else (1, "")
    o_shard, o_how = (setup.gpus, f" / {setup.gpus} (ZeRO {setup.zero})") if setup.zero >= 1 else (1, "")
    terms = [Term("gradients", trained * width / g_shard, True, f"{trained:,.0f} x {width} bytes{g_how}")]
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
    if setup.master:
        terms.append(Term("master weights", trained * 4 / o_shard, True, f"{trained:,.0f} x 4 bytes{o_how}"))
    return terms


def _passing(shape: Shape, recipe: Any, setup: Setup, places: tuple[Placement, ...]) -> list[Term]:
    """What comes and goes with a step, and the KV cache of generation, which training does not hold."""
    assert setup.batch is not None
    assert setup.length is not None
    tokens, width = setup.batch * setup.length, DTYPE_BYTES[setup.dtype]
    terms = []
    if setup.training:
        layers = _layer_bytes(shape, recipe, setup, places)
        one = sum(layers) / shape.layers
        if setup.recompute == "full":
            held, how = shape.layers * width * shape.width + one, "each layer's input, and one layer whole"
        elif setup.recompute == "selective":
            held, how = sum(layers), f"{one:,.0f} bytes a token and layer; fused attention keeps no scores to drop"
        else:
            held, how = sum(layers), f"{one:,.0f} bytes a token and layer"
        held += 2 * width * shape.width + 4  # the last norm and the head's input
        terms.append(Term("activations", tokens * held, False, f"{tokens:,} tokens x {how} (form of arXiv 2205.05198)"))
        terms.append(_loss(shape, recipe, setup, tokens, width))
    cache = 2 * shape.layers * shape.kv_width * width * tokens
    how = f"2 x {shape.layers} layers x {shape.kv_width} x {width} bytes x {tokens:,} tokens"
    how += ", for generation only" if setup.training else ""
    return [*terms, Term("KV cache", cache, True, how, counted=not setup.training)]


def _loss(shape: Shape, recipe: Any, setup: Setup, tokens: int, width: int) -> Term:
    """What the loss holds: logits, and the gradients that its forward makes already."""
    if setup.logits == "whole":
        # the logits, and in float32 the loss's copy and its gradient
        how = f"{tokens:,} tokens x {shape.vocab:,} x {width + 8} bytes, whole"
        return Term("logits", tokens * shape.vocab * (width + 8), False, how)
    rows = min(tokens, max(LOSS_MIN_ROWS, LOSS_ELEMENTS[setup.device] // shape.vocab))
    held = rows * shape.vocab * (width if width == 4 else width + 4) + tokens * shape.width * width
    how = f"fused with the loss: {rows:,} tokens at a time, never whole"
    if not frozen(recipe):
        held += shape.embedding_parameters * (width + 4)
        how += "; the head's gradient and its float32 sum"
    return Term("logits", held, False, how)


def _layer_bytes(shape: Shape, recipe: Any, setup: Setup, places: tuple[Placement, ...]) -> list[float]:
    """Bytes a token that each layer keeps for its backward."""
    h, q, kv, f = shape.width, shape.query_width, shape.kv_width, shape.ffn
    width = DTYPE_BYTES[setup.dtype]
    base_trains = not frozen(recipe)
    x_quantizer = getattr(getattr(recipe, "grad_weight", None), "b", None)
    by_name = {p.weight.name: p for p in places if p.weight.name != "lm_head"}
    # both norms' inputs; query, key, value; gate and up; two reciprocal RMS
    fixed = width * (2 * h + q + 2 * kv + 2 * f) + 8
    sizes = {"attention": h, "self_attn.o_proj": q, "mlp": h, "mlp.down_proj": f}
    if setup.device == "cuda" or width == 4:
        # fused attention keeps its output, the tensor that o_proj reads, and the log-sum-exp; our bf16 one on a CPU does not
        fixed += width * q + 4 * shape.heads
        sizes["self_attn.o_proj"] = 0
    layers = []
    for layer in range(shape.layers):
        total, in_full = float(fixed), set()
        for name, place in by_name.items():
            source = _SHARES_INPUT.get(name, name)
            # the places of a kind that stay bf16 are taken to be the last layers
            codes = base_trains and x_quantizer is not None and layer < place.quantized
            if codes:
                assert x_quantizer is not None
                total += place.weight.k * int(x_quantizer.format.bits) / 8
            if (base_trains and not codes) or place.rank:
                in_full.add(source)
            total += place.rank * width
        layers.append(total + width * sum(sizes[source] for source in in_full))
    return layers
