"""Count the FLOPs a token of a decoder, product by product, forward and backward.

A matrix product of a token with a weight [n, k] takes 2 n k FLOPs (a multiply and an add), the gradient of its input
the same again, the gradient of its weight the same again: that is the 6 of 6ND. Attention's two products, q k' and p v,
have no weight: each takes 2 x keys x d_attn forward and twice that backward, d_attn = heads x head_dim.

Conventions, since published figures differ in them:
- `attention="causal"` counts the keys that a token sees, on average length / 2, and w - w^2 / (2 length) behind a sliding
  window of w keys (the area of the band that the mask leaves); "full" counts length, as PaLM, torchtitan and torch's
  FlopCounterMode do, or the window where it is shorter.
- Model FLOPs are those of the mathematics. Recompute, and the scores that fused attention computes again in its backward, are no
  model FLOPs; `recompute` is counted apart, and with it they are hardware FLOPs.
- Norms, rotary positions, activations, softmax and the optimizer are not counted: they are no matrix products.
- A looked-up embedding multiplies nothing; the head multiplies, tied or not.
- Of experts, those that a token is routed to multiply; the router multiplies too. Attention over a latent (DeepSeek) is
  counted as it trains, expanded: keys of nope + rope and values of their own width for every head.
- With an adapter the base has no weight gradient, and no input gradient where nothing below trains: in the first layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from surokit.formats import Kind
from surokit.hardware.gpus import Gpu
from surokit.planner.inputs.shape import Shape, Weight

Attention = Literal["causal", "full"]
#: Tensor cores' kinds of forward, grad_input and grad_weight; None where they stay bf16 or no tensor cores compute them.
Kinds = tuple[Kind | None, Kind | None, Kind | None]
#: What backward computes again; surokit's own layers (`surokit.fusion.Recompute`) have all of these but "mlp".
Recompute = Literal["none", "selective", "mlp", "full"]
_ATTENDED = ("query", "key", "value")
_HEAD = -1  # the head's number among the layers


@dataclass(frozen=True)
class Product:
    """A Product is one kind of matrix product. `n` x `k` is the weight (keys x head_dim for attention), present `count` times.

    `forward`, `grad_input`, `grad_weight` and `recompute` are FLOPs a token, summed over the `active` matrices that it passes (all
    `count` without a router); `kinds` decide the peak of the three products.
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
    active: int = -1

    def __post_init__(self) -> None:
        if self.active < 0:
            object.__setattr__(self, "active", self.count)

    @property
    def backward(self) -> int:
        return self.grad_input + self.grad_weight

    @property
    def passes(self) -> Iterator[tuple[int, Kind | None]]:
        """Yield (hardware FLOPs a token, kind) of forward, grad_input and grad_weight."""
        return zip((self.forward + self.recompute, self.grad_input, self.grad_weight), self.kinds)


@dataclass(frozen=True)
class Compute:
    """A Compute holds the FLOPs a token: the products, and the convention that attention is counted by."""

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
        """Return the model FLOPs a token: forward and backward."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Return the hardware FLOPs a token: model FLOPs and recompute."""
        return self.model + self.recompute

    @property
    def attention_share(self) -> float:
        """Return the share of the model FLOPs that attention's two products take."""
        return sum(p.forward + p.backward for p in self.products if p.module.startswith("attention")) / self.model


@dataclass(frozen=True)
class Placement:
    """A Placement says what a recipe does to a kind of weight: how many of its `weight.count` it quantizes, in which `layers`, and
    the rank of the adapters on those of the layers `adapted`, 0 without any. `below` is True where an earlier stage of a pipeline
    has adapters on this kind of weight, so that a gradient goes through all of this one."""

    weight: Weight
    quantized: int
    rank: int
    layers: frozenset[int] = frozenset()
    adapted: frozenset[int] = frozenset()
    below: bool = False

    @property
    def adapters(self) -> int:
        """Return the number of matrices of this kind that have an adapter."""
        return self.weight.a_layer * len(self.adapted)

    @property
    def active_adapters(self) -> int:
        """Return how many of them a token passes."""
        return self.weight.active_a_layer * len(self.adapted)

    @property
    def adapter_parameters(self) -> int:
        """Return the number of parameters of all adapters on this kind of weight."""
        return self.rank * (self.weight.n + self.weight.k) * self.adapters


@dataclass(frozen=True)
class Trained:
    """A Trained describes the part of a live model that trains: parameters, bytes, and their dtype where all have the same.

    `adapter_bytes` are those of adapters, frozen ones too; `peft` is the dtype of PEFT's adapters, None where they are ours.
    """

    parameters: int
    bytes: int
    dtype: str | None
    adapter_bytes: int = 0
    peft: str | None = None

    def times(self, share: float) -> Trained:
        """Return what trains where there is so many times as much of it, in the same dtypes."""
        parameters = max(1, round(share * self.parameters))
        size = round(self.bytes / self.parameters * parameters)
        return replace(self, parameters=parameters, bytes=size, adapter_bytes=round(share * self.adapter_bytes))


def placements(shape: Shape, recipe: Any) -> tuple[Placement, ...]:
    """Place `recipe` on every kind of matrix of the layers and on the head, which comes last if there is one.

    Experts are taken to be linear layers of their own, each quantized and each with its adapter. A router and the modules that
    are no linear layers (GPT-2's Conv1D) are left alone, as `surokit.apply` leaves them.
    """
    adapter: Any = getattr(recipe, "adapter", None)
    placed = []
    for w in (*shape.projections, *([shape.head] if shape.has_head else [])):
        layers = _quantized(w, shape, recipe)
        adapted = frozenset() if adapter is None else _adapted(w, adapter)
        rank, below = adapter.rank if adapted else 0, adapter is not None and _adapted_below(w, adapter)
        placed.append(Placement(w, w.a_layer * len(layers), rank, layers, adapted, below))
    return tuple(placed)


@lru_cache(maxsize=1024)  # a plan places its recipe many times, and patterns are slow to match
def _adapted(weight: Weight, adapter: Any) -> frozenset[int]:
    """Return the layers in which this kind of weight has an adapter."""
    return frozenset(layer for layer, path in _paths(weight, weight.layers) if adapter.meant(path))


@lru_cache(maxsize=1024)
def _adapted_below(weight: Weight, adapter: Any) -> bool:
    """True if a layer of an earlier stage has an adapter on this kind of weight."""
    return any(adapter.meant(path) for _, path in _paths(weight, range(-weight.first, 0)) if weight.first)


def _paths(weight: Weight, layers: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield those of the layers in which a recipe reaches this kind of weight, each with the weight's path there."""
    if weight.kind == "head":
        yield _HEAD, weight.name
    elif weight.kind != "other":
        yield from ((layer, weight.path(layer)) for layer in layers)


def unmet_targets(shape: Shape, recipe: Any) -> tuple[str, ...]:
    """Return which targets of the recipe's adapter mean no layer of this shape."""
    if (adapter := getattr(recipe, "adapter", None)) is None:
        return ()
    weights = (*shape.projections, *([shape.head] if shape.has_head else []))
    met = {target for w in weights for _, path in _paths(w, w.layers) for target in adapter.meant(path)}
    return tuple(target for target in adapter.targets if target not in met)


def _quantized(weight: Weight, shape: Shape, recipe: Any) -> frozenset[int]:
    """Return the layers in which `recipe` quantizes this kind of weight."""
    if (
        recipe is None
        or weight.kind == "other"
        or not getattr(recipe, "quantized", True)
        or min(weight.n, weight.k) < getattr(recipe, "min_features", 0)
    ):
        return frozenset()
    kept_by, blocks = getattr(recipe, "kept_by", None), shape.blocks or shape.layers
    if weight.kind == "head":
        kept = kept_by is None or kept_by(weight.name, blocks) is not None
        return frozenset() if kept else frozenset({_HEAD})
    if kept_by is None:
        return frozenset(weight.layers)
    return frozenset(i for i in weight.layers if kept_by(weight.path(i), blocks) is None)


def frozen(recipe: Any) -> bool:
    """True if the base model does not train: its weights are stored quantized, or there is an adapter."""
    return getattr(recipe, "storage", None) is not None or getattr(recipe, "adapter", None) is not None


def on_gpu(recipe: Any, gpu: Gpu | None) -> Any:
    """Return the recipe as the GPU executes it: with native products of a stored weight if it has them (`Recipe.where_native`)."""
    if gpu is None or not getattr(recipe, "where_native", ""):
        return recipe
    native = recipe.natively()
    return native if gpu.multiplies(native.forward.kind) and gpu.multiplies(native.grad_input.kind) else recipe


def operand_bits(gemm: Any) -> int:
    """Return the bits of a product's operands: the wider of the two where both are quantized, else 16."""
    a, b = getattr(gemm, "a", None), getattr(gemm, "b", None)
    return 16 if a is None or b is None else max(int(a.format.bits), int(b.format.bits))


def gemms_of(recipe: Any) -> tuple[Any, Any, Any]:
    """Return a recipe's three products: forward, grad_input, grad_weight."""
    return getattr(recipe, "forward", None), getattr(recipe, "grad_input", None), getattr(recipe, "grad_weight", None)


def trained_parameters(shape: Shape | None, parameters: float, recipe: Any) -> float:
    """Return the number of parameters that train: all, or the adapter's where the base is frozen (0 without a shape)."""
    if not frozen(recipe):
        return parameters
    return float(sum(p.adapter_parameters for p in placements(shape, recipe))) if shape is not None else 0.0


def trained_share(part: Shape, whole: Shape, recipe: Any) -> float:
    """Return how many times as much trains of one shape as of another: by what the recipe trains, or by their parameters where that
    is nothing."""
    mine, every = (trained_parameters(shape, shape.parameters, recipe) for shape in (part, whole))
    return mine / every if every else part.parameters / whole.parameters


def product_kinds(recipe: Any) -> Kinds:
    """Return the tensor cores' kinds of a recipe's three products: forward, grad_input, grad_weight."""
    forward, grad_input, grad_weight = (getattr(gemm, "kind", None) for gemm in gemms_of(recipe))
    return forward, grad_input, grad_weight


def count_flops(
    shape: Shape,
    *,
    length: int | None,
    recipe: Any = None,
    attention: Attention = "causal",
    recompute: Recompute = "none",
    recompute_blocks: int | None = None,
    early_stop: bool = True,
    training: bool = True,
) -> Compute:
    """Count the FLOPs a token of `shape` at sequence length `length`; without a length attention's products are left out.

    `recompute` "full" repeats each layer's forward in the backward; "mlp" each feed-forward; "selective" all but attention and
    every second product, as torchtitan's selective checkpointing by operator. Fused layers, whose "selective" repeats no product,
    ask for "none". Of the layers `recompute_blocks` do so, all without it. With `early_stop`, torch's default, a layer is computed
    again up to the last tensor that backward reads, and so without the product that it ends with.
    """
    places = placements(shape, recipe)
    base_trains = training and not frozen(recipe)
    flow = gradients(shape, places, base_trains=base_trains, training=training)
    blocks = shape.layers if recompute_blocks is None else recompute_blocks
    ends = last_products(shape, places) if early_stop and recompute in ("full", "mlp") else {}
    products = [*_weights(places, recipe, base_trains, training, flow, recompute, ends)]
    if length is not None:
        products += _attention(shape, length, attention, flow, training and recompute == "full")
    if blocks != shape.layers:
        products = [replace(p, recompute=p.recompute * blocks // shape.layers) for p in products]
    return Compute(tuple(products), attention, recompute)


def repeated_products(weights: tuple[Weight, ...], recompute: Recompute) -> frozenset[str]:
    """Return the names of the products that backward computes again: selective checkpointing keeps the output of every second one
    of a layer, from the first on."""
    inside = [w for w in weights if w.kind != "head"]
    if recompute != "selective":
        root = {"full": "", "mlp": "mlp."}.get(recompute)
        return frozenset(w.name for w in inside if root is not None and w.name.startswith(root))
    layers = {tuple(w.name for w in inside if layer in w.layers) for w in inside for layer in w.layers}
    return frozenset(name for names in layers for name in names[1::2])


def last_products(shape: Shape, places: tuple[Placement, ...]) -> Mapping[str, frozenset[int]]:
    """Return the products that end a layer and whose output no backward reads, by name, and the layers that they end; a quantized
    one saves its input only when it is done, an adapter's second one comes last."""
    found: dict[str, frozenset[int]] = {}
    for place in places:
        w = place.weight
        if w.writes == ("stream",) and w.reads.startswith("mlp product") and shape.norms == 2 and not place.quantized:
            found |= {w.name: frozenset(w.layers) - place.adapted, f"{w.name}.lora_B": place.adapted}
    return found


def gradients(
    shape: Shape, places: tuple[Placement, ...], *, base_trains: bool, training: bool = True
) -> Mapping[str, frozenset[int]]:
    """Return the layers in which a tensor has a gradient, by the tensor's name: all where the base trains, else those with an
    adapter before it, in an earlier stage of a pipeline too."""
    weights = [(p.weight, set(p.weight.layers), p.adapted) for p in places if p.weight.kind != "head"]
    found: dict[str, set[int]] = {name: set() for w, _, _ in weights for name in (w.reads, *w.writes)}
    found |= {"stream": set(), "context": set()}
    trains_below = base_trains or any(place.below for place in places)  # through the embedding, or the stage before
    for layer in range(shape.layers) if training else ():
        live = {"attention", "mlp", "stream"} if trains_below else set()
        for weight, layers, adapted in weights:
            if layer in layers and (base_trains or layer in adapted or weight.reads in live):
                live.update(weight.writes)
                if not live.isdisjoint(_ATTENDED):
                    live.add("context")
                if weight.reads == "context":  # the feed-forward reads the stream as attention leaves it
                    live.add("mlp")
        trains_below = "stream" in live
        for name in live:
            found.setdefault(name, set()).add(layer)
    if training and trains_below:
        found["stream"].add(_HEAD)
    return {name: frozenset(layers) for name, layers in found.items()}


def reached_layers(flow: Mapping[str, frozenset[int]]) -> frozenset[int]:
    """Return the layers that backward reaches: those below the first adapter have no gradient, and nothing of them is computed
    again."""
    return frozenset[int]().union(*flow.values()) - {_HEAD}


def _weights(
    places: tuple[Placement, ...],
    recipe: Any,
    base_trains: bool,
    training: bool,
    flow: Mapping[str, frozenset[int]],
    recompute: Recompute,
    ends: Mapping[str, frozenset[int]],
) -> Iterator[Product]:
    again = repeated_products(tuple(place.weight for place in places), recompute) if training else frozenset()
    reached = reached_layers(flow)
    for place in places:
        w = place.weight
        every = frozenset(w.layers or (_HEAD,))
        live, repeated = flow[w.reads], w.name in again
        for quantized, layers in ((True, place.layers), (False, every - place.layers)):
            if not layers:
                continue
            one = 2 * w.n * w.k * w.active_a_layer
            yield Product(
                w.name,
                w.n,
                w.k,
                w.a_layer * len(layers),
                forward=one * len(layers),
                grad_input=one * len(layers & live),
                grad_weight=one * len(layers) if base_trains else 0,
                recompute=one * len((layers & reached).difference(ends.get(w.name, ()))) if repeated else 0,
                kinds=product_kinds(recipe) if quantized else (None, None, None),
                active=w.active_a_layer * len(layers),
            )
        if place.rank:
            for name, n, k in (("lora_A", place.rank, w.k), ("lora_B", w.n, place.rank)):
                one = 2 * n * k * w.active_a_layer
                # the first of the two passes a gradient on only where its input has one; the second's input is the first's output
                onward = len(place.adapted & live) if name == "lora_A" else len(place.adapted) if training else 0
                repeated = w.name in again if recompute == "mlp" else bool(again)
                module = f"{w.name}.{name}"
                yield Product(
                    module,
                    n,
                    k,
                    place.adapters,
                    forward=one * len(place.adapted),
                    grad_input=one * onward,
                    grad_weight=one * len(place.adapted) if training else 0,
                    recompute=one * len((place.adapted & reached).difference(ends.get(module, ()))) if repeated else 0,
                    active=place.active_adapters,
                )


def _attention(
    shape: Shape, length: int, convention: Attention, flow: Mapping[str, frozenset[int]], again: bool
) -> Iterator[Product]:
    query, key, value = (flow.get(name, frozenset()) for name in _ATTENDED)
    reached = reached_layers(flow)
    windows: dict[int | None, set[int]] = {}
    for layer in range(shape.layers):
        window = shape.window_of(layer)
        windows.setdefault(window if window is not None and window < length else None, set()).add(layer)
    for window, layers in windows.items():
        # both operands are activations: two gradients, each as large as the product, where they have one; booked as grad_input
        scores = len(layers & query) + len(layers & key)
        values = len(layers & (query | key)) + len(layers & value)
        for name, width, gradients in (("scores", shape.head_dim, scores), ("values", shape.value_dim, values)):
            one = _twice_the_keys(length, window, convention, shape.heads * width)
            yield Product(
                f"attention.{name}",
                window or length,
                width,
                len(layers) * shape.heads,
                forward=one * len(layers),
                grad_input=one * gradients,
                grad_weight=0,
                recompute=one * len(layers & reached) if again else 0,
            )


def _twice_the_keys(length: int, window: int | None, convention: Attention, width: int) -> int:
    """Return the FLOPs a token and layer of one of attention's two products: twice the keys that a token sees on average, times
    `width`."""
    if window is None:
        return (length if convention == "causal" else 2 * length) * width
    if convention == "full":
        return 2 * window * width
    return round((2 * window - window * window / length) * width)
