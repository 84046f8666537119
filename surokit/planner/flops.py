"""FLOPs a token of a decoder, product by product, forward and backward.

A matrix product of a token with a weight [n, k] takes 2 n k FLOPs (a multiply and an add), the gradient of its input
the same again, the gradient of its weight the same again: that is the 6 of 6ND. Attention's two products, q k' and p v,
have no weight: each takes 2 x keys x d_attn forward and twice that backward, d_attn = heads x head_dim.

Conventions, since published figures differ in them:
- `attention="causal"` counts the keys that a token sees, on average length / 2; "full" counts length, as PaLM, torchtitan
  and torch's FlopCounterMode do.
- Model FLOPs are what the mathematics asks for. Recompute, and the scores that fused attention forms again in its
  backward, are no model FLOPs; `recompute` is counted apart and makes hardware FLOPs.
- Norms, rotary positions, activations, softmax and the optimizer are not counted: they are no matrix products.
- A looked-up embedding multiplies nothing; the head multiplies, tied or not.
- With an adapter the base has no weight gradient, and the first layer's query, key and value no input gradient, since
  nothing below them trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from surokit.formats import Kind
from surokit.planner.hardware import Gpu
from surokit.planner.shape import Shape, Weight

Attention = Literal["causal", "full"]
Recompute = Literal["none", "selective", "full"]
#: How tensor cores call forward, grad_input and grad_weight; None where they stay bf16 or no tensor cores compute them.
Kinds = tuple[Kind | None, Kind | None, Kind | None]
_READS_LAYER_INPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Product:
    """One kind of matrix product. `n` x `k` is the weight (keys x head_dim for attention), present `count` times.

    `forward`, `grad_input`, `grad_weight` and `recompute` are FLOPs a token over all `count`; `kinds` say which peak the three
    products have.
    """

    module: str
    n: int
    k: int
    count: int
    forward: int
    grad_input: int
    grad_weight: int
    recompute: int = 0
    kinds: Kinds = (None, None, None)

    @property
    def backward(self) -> int:
        return self.grad_input + self.grad_weight


@dataclass(frozen=True)
class Compute:
    """FLOPs a token: the products, and the convention that attention is counted by."""

    products: tuple[Product, ...]
    attention: Attention
    recomputed: Recompute

    @property
    def forward(self) -> int:
        return sum(p.forward for p in self.products)

    @property
    def backward(self) -> int:
        return sum(p.backward for p in self.products)

    @property
    def recompute(self) -> int:
        return sum(p.recompute for p in self.products)

    @property
    def model(self) -> int:
        """Model FLOPs a token: forward and backward."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Hardware FLOPs a token: model FLOPs and what is recomputed."""
        return self.model + self.recompute

    @property
    def attention_share(self) -> float:
        """Share of the model FLOPs in attention's two products."""
        return sum(p.forward + p.backward for p in self.products if p.module.startswith("attention")) / self.model


@dataclass(frozen=True)
class Placement:
    """What a recipe does to one kind of weight: how many of its `weight.count` are quantized, and its adapter's rank."""

    weight: Weight
    quantized: int
    rank: int


def placements(shape: Shape, recipe: Any) -> tuple[Placement, ...]:
    """What `recipe` does to the seven projections and the head; the head last."""
    rank = getattr(getattr(recipe, "adapter", None), "rank", 0)
    targets = getattr(getattr(recipe, "adapter", None), "targets", ())
    return tuple(
        Placement(w, _quantized(w, shape, recipe), rank if w.name.rsplit(".", 1)[-1] in targets else 0)
        for w in (*shape.projections, shape.head)
    )


def _quantized(weight: Weight, shape: Shape, recipe: Any) -> int:
    if (
        recipe is None
        or not getattr(recipe, "quantized", True)
        or min(weight.n, weight.k) < getattr(recipe, "min_features", 0)
    ):
        return 0
    kept_by = getattr(recipe, "kept_by", None)
    if kept_by is None:
        return 0 if weight.name == "lm_head" else weight.count
    names = (
        ["lm_head"] if weight.name == "lm_head" else [f"model.layers.{i}.{weight.name}" for i in range(weight.count)]
    )
    return sum(kept_by(name, shape.layers) is None for name in names)


def frozen(recipe: Any) -> bool:
    """Whether the base model does not train: its weights are stored quantized, or there is an adapter."""
    return getattr(recipe, "storage", None) is not None or getattr(recipe, "adapter", None) is not None


def on_gpu(recipe: Any, gpu: Gpu | None) -> Any:
    """The recipe as the GPU carries it out: a stored weight's native products where it has them (`Recipe.where_native`)."""
    if gpu is None or not getattr(recipe, "where_native", ""):
        return recipe
    native = recipe.natively()
    return native if gpu.multiplies(native.forward.kind) and gpu.multiplies(native.grad_input.kind) else recipe


def operand_bits(gemm: Any) -> int:
    """Width of a product's operands: the wider of the two where both are quantized, else 16."""
    a, b = getattr(gemm, "a", None), getattr(gemm, "b", None)
    return 16 if a is None or b is None else max(int(a.format.bits), int(b.format.bits))


def gemms_of(recipe: Any) -> tuple[Any, Any, Any]:
    """A recipe's three products: forward, grad_input, grad_weight."""
    return getattr(recipe, "forward", None), getattr(recipe, "grad_input", None), getattr(recipe, "grad_weight", None)


def product_kinds(recipe: Any) -> Kinds:
    """The kinds of a recipe's three products."""
    forward, grad_input, grad_weight = (getattr(gemm, "kind", None) for gemm in gemms_of(recipe))
    return forward, grad_input, grad_weight


def count_flops(
    shape: Shape,
    *,
    length: int | None,
    recipe: Any = None,
    attention: Attention = "causal",
    recompute: Recompute = "none",
    training: bool = True,
) -> Compute:
    """FLOPs a token of `shape` at sequence length `length`; without a length attention's products are left out.

    `recompute` "full" repeats each layer's forward in the backward, "selective" attention's two products only (arXiv
    2205.05198).
    """
    products = [*_weights(shape, recipe, training, training and recompute == "full")]
    if length is not None:
        products += _attention(shape, length, attention, training, training and recompute != "none")
    return Compute(tuple(products), attention, recompute)


def _weights(shape: Shape, recipe: Any, training: bool, again: bool) -> Iterator[Product]:
    base_trains = training and not frozen(recipe)
    gradients = training and (base_trains or getattr(recipe, "adapter", None) is not None)
    for place in placements(shape, recipe):
        w = place.weight
        one = 2 * w.n * w.k
        repeated = again and w is not shape.head and w.name != "lm_head"
        # the head's input always needs a gradient; without a trained embedding the first layer's input does not
        blind = 1 if not base_trains and w.name in _READS_LAYER_INPUT else 0
        for quantized, count in ((True, place.quantized), (False, w.count - place.quantized)):
            if not count:
                continue
            first = blind if quantized == (place.quantized == w.count) else 0
            yield Product(
                w.name,
                w.n,
                w.k,
                count,
                forward=one * count,
                grad_input=one * (count - first) if gradients else 0,
                grad_weight=one * count if base_trains else 0,
                recompute=one * count if repeated else 0,
                kinds=product_kinds(recipe) if quantized else (None, None, None),
            )
        if place.rank:
            for name, n, k in (("lora_A", place.rank, w.k), ("lora_B", w.n, place.rank)):
                one, first = 2 * n * k, blind if name == "lora_A" else 0
                yield Product(
                    f"{w.name}.{name}",
                    n,
                    k,
                    w.count,
                    forward=one * w.count,
                    grad_input=one * (w.count - first) if gradients else 0,
                    grad_weight=one * w.count if gradients else 0,
                    recompute=one * w.count if repeated else 0,
                )


def _attention(shape: Shape, length: int, convention: Attention, training: bool, again: bool) -> Iterator[Product]:
    # twice the keys that a token sees: length / 2 on average behind a causal mask, length without
    keys2 = length if convention == "causal" else 2 * length
    one = keys2 * shape.query_width * shape.layers
    for name in ("attention.scores", "attention.values"):
        # both operands are activations: two gradients, each as large as the product; booked as grad_input
        yield Product(
            name,
            length,
            shape.head_dim,
            shape.layers * shape.heads,
            forward=one,
            grad_input=2 * one if training else 0,
            grad_weight=0,
            recompute=one if again else 0,
        )
