"""Count FLOPs, bytes and launches of one optimizer step on one GPU, module by module and pass by pass; rates are not used here.

Products come from flops.py, one to one; layers.py says what quantization adds to them. Between the products stand kernels that
compute almost nothing and move bytes; these are counted here, in elements of the model's dtype that each reads or writes. The shape
is one GPU's part where a model is divided (division.py); between tensor-parallel products it has its share of the tokens.

    surokit layers          forward          backward                               kernels
    RMSNorm                 x y              dy x dx                                kernels/triton/norm.py
    rotary positions        x y              dy dx                                  kernels/triton/rope.py
    SwiGLU                  gate up y        dy gate up dgate dup                   kernels/triton/swiglu.py
    routed tokens           x y              dy dx, twice: to the experts, and summed
    residual sum            x y z            the same, where both branches meet
    fused loss              logits twice, dl once; dl is made in forward            kernels/triton/loss.py
    AdamW                   p twice, g once, both moments twice; g once for the norm

A tensor that several weights read has as many gradients, which autograd sums two at a time: three passes over it each. An
adapter adds a reader, and its own sum to the output. `transformers` composes norm, rotary positions and activation from small
operators; their bytes an element were counted through torch's dispatcher, and a test counts them again.

That is the eager step, one operation after the other; fused_traffic.py has the one that `Setup.fusion` computes together. CUDA
graphs change what a launch costs, not how many kernels there are (roofline.py). torch.compile is planned as one kernel for each.

Fused attention reads query, key and value and writes its output; its backward computes the scores again, one product more than
model FLOPs count (FlashAttention, arXiv 2205.14135), so its FLOPs here are 5/4 of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from surokit.formats import Kind
from surokit.hardware.gpus import Gpu
from surokit.hardware.linear import Kernel, Pass, linear_kernels
from surokit.planner.counts.activations import loss_rows
from surokit.planner.counts.flops import (
    Attention,
    Compute,
    Placement,
    Product,
    count_flops,
    frozen,
    gradients,
    last_products,
    placements,
    reached_layers,
)
from surokit.planner.counts.memory import DTYPE_BYTES, Setup
from surokit.planner.counts.muon import NEWTON_SCHULZ, hidden_share, muon_step
from surokit.planner.inputs.shape import Shape
from surokit.planner.offload.formulas import OFFLOADING

#: The groups that a step's time is summed by.
GROUPS = ("products", "attention", "head and loss", "elementwise", "routing", "adapter", "quantization", "optimizer")
# torch's fused optimizer kernels take about so many tensors, and so many elements, a launch (multi_tensor_apply: 36 tensors of
# four lists, 320 blocks of 65,536 elements).
_TENSORS_A_LAUNCH, _ELEMENTS_A_LAUNCH = 36, 320 * 65536
# Operations between the products of a feed-forward.
_OF_MLP = ("norm of mlp", "swiglu", "activation", "routing")
_TENSORS_8BIT = 32  # of our own 8-bit kernel (kernels/triton/adamw8bit.py)


@dataclass(frozen=True)
class Load:
    """A Load holds work of one kind in one pass, summed over the step: FLOPs, bytes, launches. `count` matrices or blocks share
    it. `once` is True where the first micro-batch does it for all. Of a product, `outputs` are the elements of one matrix's result
    and `inner` is the length that it contracts; of attention, `inner` is the length of the sequence or window."""

    module: str
    group: str
    step: Pass
    part: str
    count: int
    flop: float
    bytes: float
    launches: float
    kind: Kind | None = None
    outputs: float = 0.0
    inner: float = 0.0
    once: bool = False


@dataclass(frozen=True)
class _Elementwise:
    """An _Elementwise holds bytes an element and launches, (forward, backward), of an operation that only moves data; `trained` are
    the backward's bytes where its own weight has a gradient."""

    forward: float
    backward: float
    launches: tuple[int, int]
    trained: float | None = None


def data_moves(layers: str, width: int, *, layer_norm: bool = False) -> dict[str, _Elementwise]:
    """Return what each operation between products moves. layers: "surokit" for one kernel each, as torch.compile makes them too.
    layer_norm: the norm is a LayerNorm, which torch has as one kernel."""
    alone = {
        "norm": _Elementwise(2 * width, 3 * width, (1, 3)),
        "rope": _Elementwise(2 * width, 2 * width, (1, 1)),
        "swiglu": _Elementwise(3 * width, 5 * width, (1, 1)),
        "activation": _Elementwise(2 * width, 3 * width, (1, 1)),
        "routing": _Elementwise(2 * width, 2 * width, (2, 2)),
    }
    if layers == "surokit":
        return alone
    # RMSNorm computes in float32, and casts to it and back where the model is narrower
    narrow = width < 4
    norm = _Elementwise(36, 84, (8, 14), trained=92) if narrow else _Elementwise(28, 76, (6, 12), trained=92)
    if layer_norm:
        norm = alone["norm"]
    return {
        "norm": norm,
        "rope": _Elementwise(10.25 * width, 14.25 * width, (5, 7)),
        "swiglu": _Elementwise(5 * width, 9 * width, (2, 3)),
        "activation": _Elementwise(2 * width, 3 * width, (1, 1)),
        "routing": _Elementwise(2 * width, 2 * width, (6, 6)),
    }


def step_flops(shape: Shape, recipe: Any, setup: Setup, attention: Attention) -> Compute:
    """Count the FLOPs a token of a step, as `setup` computes again and trains."""
    return count_flops(
        shape,
        length=setup.length,
        recipe=recipe,
        attention=attention,
        recompute=setup.repeats,
        recompute_blocks=setup.recompute_blocks,
        early_stop=setup.early_stop,
        training=setup.training,
    )


def loads(
    shape: Shape,
    compute: Compute,
    recipe: Any,
    setup: Setup,
    gpu: Gpu,
    trained_parameters: float,
    kind: type[MicroBatch] | None = None,
) -> Iterator[Load]:
    """Yield everything that one optimizer step launches on one GPU, summed over its micro-batches; `kind` is the class that counts
    one (MicroBatch without it)."""
    step = (kind or MicroBatch)(shape, compute, recipe, setup, gpu)
    every = [*step.products(), *step.attention(), *step.between(), *step.embedding(), *step.loss()]
    for load in every:
        if load.bytes or load.flop:
            n = 1 if load.once else setup.accumulate
            yield replace(load, flop=load.flop * n, bytes=load.bytes * n, launches=load.launches * n)
    if setup.training and trained_parameters:
        yield from _update(shape, recipe, setup, trained_parameters, step.tensors)


class MicroBatch:
    """A MicroBatch counts one micro-batch: forward and backward of `batch` x `length` tokens."""

    def __init__(self, shape: Shape, compute: Compute, recipe: Any, setup: Setup, gpu: Gpu) -> None:
        assert setup.batch is not None
        assert setup.length is not None
        self.shape, self.compute, self.recipe, self.setup, self.gpu = shape, compute, recipe, setup, gpu
        self.tokens = setup.batch * setup.length
        # other engines that are fused by hand (Transformer Engine) keep the codes of a weight until it is updated
        self.keeps_codes = setup.engine == "fused" and not setup.fusion.fuses
        self.own_tokens = self.tokens / setup.division.tensor  # between products that GPUs share
        self.width = DTYPE_BYTES[setup.dtype]
        self.base_trains = setup.training and not frozen(recipe)
        self.places = {place.weight.name: place for place in placements(shape, recipe)}
        places = tuple(self.places.values())
        below = any(place.below for place in places)
        self.backward = self.base_trains or (setup.training and any(place.rank or place.below for place in places))
        self.flow = gradients(shape, places, base_trains=self.base_trains, training=setup.training)
        # the share of the blocks that backward reaches: those below the first adapter have no gradient
        self.reached = len(reached_layers(self.flow)) / shape.layers
        self.blocks_again = 1.0 if setup.recompute_blocks is None else setup.recompute_blocks / shape.layers
        self.again = self.blocks_again * (self.backward and setup.repeats != "none")
        # nothing wants a gradient of what enters the first of them where it is frozen: its norm and its skip have none
        self.blind = int(self.reached > 0 and not self.base_trains and not below)
        # a calibration may have measured a CPU although the setup is for CUDA
        self.device = "cpu" if gpu.device == "cpu" else setup.device
        one_kernel_each = setup.layers == "surokit" or setup.engine != "eager"
        layers = "surokit" if one_kernel_each else "transformers"
        self.moves = data_moves(layers, self.width, layer_norm=shape.norm_bias)
        rows = loss_rows(self.tokens, shape.vocab, self.device, self.width, self.places.get("lm_head"))
        self.chunks = -(-self.tokens // rows) if setup.training and setup.logits == "fused" else 1

    @property
    def tensors(self) -> int:
        """Return about how many tensors train, of which one launch of the optimizer takes a few dozen."""
        matrices = sum(2 * p.adapters for p in self.places.values())
        if self.base_trains:
            matrices += sum(p.weight.count for p in self.places.values()) + 2 * self.shape.layers
        return max(1, matrices)

    def repeated(self, module: str) -> float:
        """Return the share of an operation between products that backward computes again."""
        share = 1.0
        if self.setup.repeats == "mlp":
            share = float(module in _OF_MLP)
            if module.startswith("adapter's"):
                share = self._adapted(lambda name: name.startswith("mlp."))
        elif self.setup.repeats == "full" and self.setup.early_stop:
            # a block's last sums come after the last tensor that its backward reads
            if module == "residual":
                share = 0.5
            elif module == "adapter's sums":
                last = last_products(self.shape, tuple(self.places.values()))
                share = 1 - self._adapted(lambda name: f"{name}.lora_B" in last)
        return self.again * share * (1.0 if module.startswith("adapter's") else self.reached)

    def _adapted(self, chosen: Callable[[str], bool]) -> float:
        """Return the share of the matrices with an adapter that have a chosen name."""
        adapted = {name: place.active_adapters for name, place in self.places.items()}
        return sum(n for name, n in adapted.items() if chosen(name)) / max(sum(adapted.values()), 1)

    # -- products

    def products(self) -> Iterator[Load]:
        seen: Counter[str] = Counter()
        for product in self.compute.products:
            if product.module.startswith("attention."):
                continue
            place = self.places.get(product.module)
            # flops.py lists the quantized ones of a place before the others
            quantized = place is not None and place.quantized > 0 and not seen[product.module]
            seen[product.module] += 1
            yield from self._product(product, place, quantized)

    def _product(self, p: Product, place: Placement | None, quantized: bool) -> Iterator[Load]:
        head = p.module == "lm_head"
        name, _, adapter = p.module.partition(".lora_")
        group = "head and loss" if head else "adapter" if adapter else "products"
        active = p.forward / (2 * p.n * p.k)
        # matrices that a micro-batch touches (experts may see none of few tokens), and how often: once a chunk of the loss
        touched = min(float(p.count), max(1.0, active * self.tokens))
        pieces = self.chunks if head else 1
        rows = self.tokens * active / touched / pieces
        kernels = self._kernels(p, quantized, rows)
        # a grouped product serves a block's experts with one launch
        owner = self.places.get(name)
        grouped = owner is not None and owner.weight.kind == "expert"
        launched = p.count // owner.weight.a_layer if owner is not None and grouped else p.count
        together = max(1.0, touched / launched) if grouped else 1.0
        sizes = {"forward": (rows * p.n, p.k), "grad_input": (rows * p.k, p.n), "grad_weight": (float(p.n * p.k), rows)}
        chunked = head and self.backward and place is not None and (place.quantized > 0 or place.rank > 0)
        repeated = 1.0 if chunked else p.recompute / p.forward
        for kernel in kernels:
            share = self._share(kernel, p)
            if not share:
                continue
            outputs, inner = sizes.get(kernel.part, (0.0, 0.0))
            load = Load(
                p.module,
                "quantization" if kernel.part in ("quantize", "turn", "decode") else group,
                kernel.step,
                kernel.part,
                p.count,
                kernel.flop * touched * pieces * share,
                kernel.bytes * touched * pieces * share,
                kernel.launches * launched * pieces * share,
                kernel.kind,
                outputs * together,
                inner,
                once=kernel.role == "w" and self.keeps_codes,
            )
            yield load
            if kernel.step == "forward" and repeated and not load.once:
                parts = load.flop * repeated, load.bytes * repeated, load.launches * repeated
                yield replace(load, step="recompute", flop=parts[0], bytes=parts[1], launches=parts[2])

    def _kernels(self, p: Product, quantized: bool, rows: float) -> Iterator[Kernel]:
        """Return the kernels of one of a product's matrices for `rows` tokens."""
        stored = quantized and getattr(self.recipe, "storage", None) is not None
        return linear_kernels(
            self.recipe if quantized else None,
            p.n,
            p.k,
            rows,
            trains=p.grad_weight > 0,
            gpu=self.gpu,
            width=self.width,
            stored=stored and not (p.module == "lm_head" and self.shape.tied),
        )

    @staticmethod
    def _share(kernel: Kernel, p: Product) -> float:
        """Return the share of a product's matrices that launch this kernel: the first layer's input may need no gradient."""
        if kernel.step == "forward":
            return 1.0
        wanted = p.grad_weight if kernel.part == "grad_weight" else p.grad_input
        return wanted / p.forward

    # -- attention

    def attention(self) -> Iterator[Load]:
        s, t, e = self.shape, self.tokens, self.width
        parts = [p for p in self.compute.products if p.module.startswith("attention.")]
        if not parts:
            return
        inputs = s.query_width + s.kv_heads * (s.head_dim + s.value_dim)
        out = s.context_width
        forward = t * s.layers * (e * (inputs + out) + 4 * s.heads)
        backward = t * s.layers * (e * 2 * (inputs + out) + 4 * s.heads)
        flop = sum(p.forward for p in parts) * t
        keys = sum(p.n * p.forward for p in parts) * t / flop

        def load(step: Pass, flop: float, moved: float, launches: float) -> Load:
            launched = launches * s.layers
            return Load("attention", "attention", step, "fused", s.layers, flop, moved, launched, inner=keys)

        yield load("forward", flop, forward, 1)
        if again := sum(p.recompute for p in parts):
            share = self.blocks_again * self.reached
            yield load("recompute", again * t, forward * share, share)
        if self.backward:
            # the sum of dy y, the gradients, and the query's gradient to the model's dtype
            share = len(self.flow["context"]) / s.layers
            yield load("backward", sum(p.backward for p in parts) * t * 5 / 4, backward * share, 3 * share)

    # -- operations between the products

    def between(self) -> Iterator[Load]:
        s = self.shape
        own = self.own_tokens / self.tokens
        yield from self._moved("norm", "norm", s.norms * s.layers, s.norms * s.layers * s.width * own, blind=self.blind)
        if s.has_head:
            yield from self._moved("norm", "last norm", 1, s.width * own, layered=False)
        if s.qk_norm:
            yield from self._moved("norm", "q and k norm", 2 * s.layers, s.layers * (s.query_width + s.kv_width))
        if not s.positions:
            turned = s.query_width + s.kv_width if s.latent is None else (s.heads + 1) * s.latent.rope
            yield from self._moved("rope", "rope", 2 * s.layers, s.layers * turned)
        inner = sum(s.ffn_of(layer) for layer in range(s.layers))
        name = "swiglu" if s.gated else "activation"
        yield from self._moved(name, name, s.layers, inner)
        if (e := s.experts) is not None:
            # tokens are gathered for their experts, and the outputs summed: each a read and a write of a row for each expert
            both = 2 * len(e.layers)
            yield from self._moved("routing", "routing", both, both * e.chosen * s.width, group="routing")
        yield from self._sums()

    def _moved(
        self,
        kind: str,
        module: str,
        count: int,
        width: float,
        *,
        layered: bool = True,
        blind: int = 0,
        group: str = "elementwise",
    ) -> Iterator[Load]:
        """Yield the loads of an operation that only moves data, over `width` elements a token of all its `count` instances."""
        move, elements = self.moves[kind], self.tokens * width

        def load(step: Pass, each: float, launches: float) -> Load:
            return Load(module, group, step, "move", count, 0.0, elements * each, count * launches)

        yield load("forward", move.forward, move.launches[0])
        if layered and (again := self.repeated(module)):
            yield load("recompute", move.forward * again, move.launches[0] * again)
        if self.backward:
            trained = move.trained if self.base_trains and move.trained is not None else move.backward
            reached = self.reached if layered else 1.0
            yield load("backward", trained * (count * reached - blind) / count, move.launches[1] * reached)

    def _sums(self) -> Iterator[Load]:
        """Yield the loads of residual sums, of sums of gradients of one tensor, and of an adapter's sums: each reads two tensors,
        and writes one."""
        s = self.shape
        sums, width = 2 * s.layers, s.width * self.own_tokens / self.tokens
        yield from self._sum("residual", "elementwise", "forward", sums, sums * width)
        back = round(sums * self.reached) - self.blind
        yield from self._sum("residual", "elementwise", "backward", back, back * width)
        readers: dict[str, list[Placement]] = {}
        for place in self.places.values():
            if place.weight.kind != "head":
                readers.setdefault(place.weight.reads, []).append(place)
        met = met_width = also = also_width = 0
        for tensor, places in readers.items():
            # every reader beyond the first is a sum, where the input wants a gradient
            live = self.flow[tensor]
            blocks = max(len(live.intersection(place.weight.layers)) for place in places)
            adapters = sum(len(live & place.adapted) for place in places)
            wide = places[0].weight.k * places[0].weight.active_a_layer
            met, met_width = met + blocks * (len(places) - 1), met_width + blocks * (len(places) - 1) * wide
            also, also_width = also + adapters, also_width + adapters * wide
        yield from self._sum("gradients that meet", "elementwise", "backward", met, met_width)
        calls = sum(place.active_adapters for place in self.places.values())
        wide = sum(place.weight.n * place.active_adapters for place in self.places.values())
        yield from self._sum("adapter's sums", "adapter", "forward", calls, wide)
        yield from self._sum("adapter's sums", "adapter", "backward", also, also_width)
        if calls:  # the small product between A and B is scaled, in both passes
            small = sum(place.rank * place.active_adapters for place in self.places.values())
            yield from self._sum("adapter's scale", "adapter", "forward", calls, small, moves=2)
            yield from self._sum("adapter's scale", "adapter", "backward", calls, small, moves=2)

    def _sum(self, module: str, group: str, step: Pass, count: int, width: float, moves: int = 3) -> Iterator[Load]:
        """Yield the load of `count` operations on `width` elements a token in all, each read or written `moves` times."""
        if not count or (step == "backward" and not self.backward):
            return
        load = Load(module, group, step, "sum", count, 0.0, moves * self.width * self.tokens * width, count)
        yield load
        if step == "forward" and (again := self.repeated(module)):
            yield replace(load, step="recompute", bytes=load.bytes * again, launches=load.launches * again)

    # -- embedding and loss

    def embedding(self) -> Iterator[Load]:
        s, e, t = self.shape, self.width, self.own_tokens
        if not s.has_embedding:
            return
        yield Load("embedding", "elementwise", "forward", "lookup", 1, 0.0, 2 * e * s.width * t, 1)
        if self.base_trains:
            # zeros for the whole gradient, then each token's row is read, added and written
            moved = e * (s.embedding_parameters + 3 * s.width * t)
            moved += 3 * e * s.embedding_parameters if s.tied else 0  # and the head's gradient joins it
            yield Load("embedding", "elementwise", "backward", "scatter", 1, 0.0, moved, 5)

    def loss(self) -> Iterator[Load]:
        """Yield the loads of the cross-entropy on the logits; the head's products are among the products."""
        s, e, t = self.shape, self.width, self.tokens
        if not self.backward or not s.has_head:
            return

        def load(step: Pass, part: str, moved: float, launches: int) -> Load:
            return Load("loss", "head and loss", step, part, 1, 0.0, moved, launches)

        logits, head = float(t * s.vocab), float(s.embedding_parameters)
        if self.setup.logits == "whole":
            cast = e + 4 if e < 4 else 0  # to float32 and, in backward, from it
            yield load("forward", "cross-entropy", logits * (8 + cast), 3)
            yield load("backward", "cross-entropy", logits * (16 + cast), 3)
            return
        each = 3 * e if self.device == "cuda" else 20 + 2 * e  # the reference's passes, kernels/reference/loss.py
        yield load("forward", "cross-entropy", logits * each, self.chunks)
        if self.base_trains and self.chunks > 1:
            moved = head * (self.chunks * (8 + e) + 4 + 8 + e)
            yield load("forward", "sum over chunks", moved, self.chunks + 2)
        gradients = t * s.width + (head if self.base_trains else 0.0)
        yield load("backward", "scale", 2 * e * gradients, 2)


def _update(shape: Shape, recipe: Any, setup: Setup, trained: float, tensors: int) -> Iterator[Load]:
    """Yield the loads at the end of a step: sums of the micro-batches' gradients, the gradients' norm, the optimizer."""
    e, state = DTYPE_BYTES[setup.dtype], DTYPE_BYTES[setup.state_dtype]
    foreach = max(-(-tensors // _TENSORS_A_LAUNCH), int(trained / _ELEMENTS_A_LAUNCH) + 1)
    if setup.accumulate > 1:
        more = setup.accumulate - 1
        yield Load("gradients", "optimizer", "backward", "sum", 1, 0.0, more * 3 * e * trained, more * tensors)
    mine = trained / setup.shards_from(1)
    if not setup.in_backward:  # where there is never a whole gradient to take the norm of
        yield Load("gradient norm", "optimizer", "optimizer", "norm", 1, 0.0, e * mine, 3 * foreach)
    p = 2 * e if not setup.has_masters else 8 + e  # the parameter, or its float32 master and a copy of it
    moments = {"adamw": 4 * state, "muon": 4 * state, "adamw8bit": 4 * (1 + 4 / 256)}.get(setup.optimizer, 0)
    moved = p + e + moments
    launches = -(-tensors // _TENSORS_8BIT) if setup.optimizer == "adamw8bit" else foreach
    if setup.optimizer in ("adamw", "muon") and state != e and not setup.has_masters:
        # torch's kernel wants one dtype: parameters and gradients are widened first, and parameters narrowed afterwards
        moved = (e + 4) + (e + 4) + 7 * 4 + (4 + e)
        launches = 3 * foreach
    if setup.optimizer in OFFLOADING:
        # hot columns; of the others the gradients on their way down and, at most every step, the weights that land
        moved = setup.hot * (3 * 8 + 2 * e) + (1 - setup.hot) * 4 * e
    if setup.optimizer == "muon":
        m, mine = muon_step(shape, recipe, *setup.sharing), mine * (1 - hidden_share(shape, recipe))
        yield Load(
            "optimizer", "optimizer", "optimizer", NEWTON_SCHULZ, 1, m.flop, m.products_bytes, m.products_launches
        )
        yield Load("optimizer", "optimizer", "optimizer", "matrices", 1, 0.0, m.bytes, m.launches)
    yield Load("optimizer", "optimizer", "optimizer", setup.optimizer, 1, 0.0, moved * mine, launches)
