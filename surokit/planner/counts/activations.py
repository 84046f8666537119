"""Replay the memory of a forward and a backward of our layers, one operation after the other.

transformers_activations.py has transformers' layers. Each function below is a module's forward as the tape sees it: the tensors it
makes, which of them its backward reads, and which Python variables end. The tape (tape.py) does the rest. Sizes are bytes of all
tokens of one micro-batch; every constant follows the code, and tests compare it with the tensors that torch really keeps.

In our layers (surokit/nn) a norm keeps its input and one float32 a row; a product keeps x, or the codes of x that grad_weight
reads, or nothing under a frozen weight; rotary positions keep nothing; attention keeps query, key, value, and where torch's fused
kernel computes the gradient its output and the float32 log-sum-exp; SwiGLU keeps gate and up; the loss computes both its gradients
in forward and keeps these, never the logits.

What attention keeps depends on the kernel that torch chooses. A sliding window shorter than the sequence is a mask, and each
layer keeps it as numbers; on a GPU no fused kernel takes grouped heads with a mask or in float32: ours and transformers then
repeat keys and values for every query head, but transformers without a mask goes to torch's plain products, which keep all
scores (torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from surokit.fusion import Fusion
from surokit.planner.counts.division import Division
from surokit.planner.counts.flops import Placement, Recompute, Trained, frozen, repeated_products
from surokit.planner.counts.tape import KEPT, LOGITS, Moment, Tape, Value
from surokit.planner.inputs.shape import Shape
from surokit.quantizer import MX, NV, Block, NFBlock

# The logits that the fused linear + cross-entropy holds at a time (kernels/reference/loss.py, which needs torch).
LOSS_BYTES = {"cpu": 16 * 2**20, "cuda": 640 * 2**20}
LOSS_MIN_ROWS, LOSS_TILE_ROWS, LOSS_MAX_ROWS = 64, 128, 2048
# Query rows and scores that the reference's attention gradient holds at a time (kernels/reference/attention.py).
ATTENTION_ROWS, ATTENTION_SCORES = 256, 2 * 2**20
# Elements of a float32 buffer of the reference's norm, for one thread (kernels/reference/norm.py).
NORM_ELEMENTS = 64 * 1024
# Bytes an element that the reference takes beside the result, on a CPU: to decode a stored weight, to encode an operand.
_DECODING: dict[type, float] = {NFBlock: 15.0, NV: 13.0, Block: 8.0}
_ENCODING: dict[type, float] = {NV: 12.0, MX: 10.0}
# Weights that some families have as one matrix: the names of that matrix.
_TOGETHER = {
    "self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.q_b_proj"),
    "self_attn.k_proj": ("self_attn.qkv_proj", "self_attn.kv_b_proj"),
    "self_attn.v_proj": ("self_attn.qkv_proj", "self_attn.kv_b_proj"),
    "mlp.gate_proj": ("mlp.gate_up_proj",),
    "mlp.up_proj": ("mlp.gate_up_proj",),
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def is_fused_with_loss(head: Placement | None) -> bool:
    """True if the head is neither quantized nor adapted, so that its product and the loss are one operation (nn/loss.py)."""
    return head is None or not (head.quantized or head.rank)


def loss_rows(tokens: int, vocabulary: int, device: str, width: float, head: Placement | None) -> int:
    """Return the number of tokens whose logits are held at once: `chunk_rows` of kernels/reference/loss.py, as nn/loss.py calls it.

    width: bytes an element of the weights.
    """
    itemsize = 4 if device == "cpu" else int(width) if is_fused_with_loss(head) else 12
    rows = max(LOSS_MIN_ROWS, LOSS_BYTES[device] // (vocabulary * itemsize))
    if device != "cpu" and rows >= LOSS_TILE_ROWS:
        rows = min(LOSS_MAX_ROWS, rows - rows % LOSS_TILE_ROWS)
    return min(tokens, rows)


class BlockKind(NamedTuple):
    """A BlockKind says what decides a block's memory: its quantized products, those with an adapter, whether experts are routed,
    whether it has a mask, and whether it is computed again."""

    quantized: frozenset[str]
    adapted: frozenset[str]
    routed: bool
    masked: bool
    again: bool


class StepSetup(Protocol):
    """A StepSetup has the fields of a plan's Setup that activations depend on."""

    @property
    def recompute(self) -> Recompute: ...
    @property
    def repeats(self) -> Recompute: ...
    @property
    def recompute_blocks(self) -> int | None: ...
    @property
    def division(self) -> Division: ...
    @property
    def logits(self) -> Literal["fused", "whole"]: ...
    @property
    def device(self) -> Literal["cpu", "cuda"]: ...
    @property
    def layers(self) -> Literal["surokit", "transformers"]: ...
    @property
    def training(self) -> bool: ...
    @property
    def fusion(self) -> Fusion: ...
    @property
    def trained(self) -> Trained | None: ...


@dataclass(frozen=True)
class Activations:
    """Activations holds bytes of one step: `kept` at the end of the forward, those of the loss, and each phase's fullest moment.

    `scores` is True if attention keeps all of its scores.
    """

    kept: float
    loss: float
    moments: tuple[Moment, ...]
    scores: bool = False


def replay(
    shape: Shape,
    recipe: Any,
    step: StepSetup,
    places: tuple[Placement, ...],
    *,
    batch: int,
    length: int,
    width: int,
    gradients_there: bool = False,
    weight_share: float = 1.0,
    most_kept: float | None = None,
    layers: type[Ours],
) -> Activations:
    """Replay the forward and, in training, the backward of `batch` sequences of `length` tokens, with `width` bytes an element.

    layers: the layers that are replayed: ours, ours fused, or transformers'. most_kept: bytes of activations that stay on the
    device where the others wait on the host.
    """
    tape = Tape(gradients_there=gradients_there, weight_share=weight_share, records=step.training, most_kept=most_kept)
    return layers(tape, shape, recipe, step, places, batch, length, width).replay()


class _Model:
    """A _Model has what all kinds of layers share: sizes, products, embedding, loss, and the order of operations."""

    def __init__(
        self,
        tape: Tape,
        shape: Shape,
        recipe: Any,
        step: StepSetup,
        places: tuple[Placement, ...],
        batch: int,
        length: int,
        width: int,
    ) -> None:
        self.tape, self.shape, self.recipe, self.step = tape, shape, recipe, step
        self.batch, self.length, self.tokens, self.w = batch, length, batch * length, width
        # GPUs that share the layers have their part of the tokens, of what is made of weights, and see all keys
        self.shared_by = step.division.tensor
        self.keys = length * self.shared_by
        self.places = {p.weight.name: p for p in places}
        self.trains = step.training and not frozen(recipe)
        self.fused_loss = step.logits == "fused"
        self.again = repeated_products(tuple(p.weight for p in places), step.repeats)

    # -- sizes in bytes

    def of(self, features: float) -> float:
        """Return the bytes of a tensor of so many features a token, in the model's dtype."""
        return self.tokens * features * self.w

    @property
    def on_cpu(self) -> bool:
        return self.step.device == "cpu"

    def wide(self, features: float) -> float:
        """Return the bytes of a tensor of so many features a token, in float32."""
        return self.tokens * features * 4.0

    @cached_property
    def head_gradient(self) -> float:
        return self.shape.embedding_parameters / self.shared_by * self.w if self.trains else 0.0

    # -- the whole

    def replay(self) -> Activations:
        tape, shape = self.tape, self.shape
        ids = tape.new(self.tokens * 8.0)  # the token ids and the labels, int64
        tape.new(self.tokens * 8.0)
        below = self.trains or (self.step.training and any(place.below for place in self.places.values()))
        x = self.embedding(ids) if shape.has_embedding else tape.new(self.of(shape.width), needs=below)
        runs = self.runs()
        mask = tape.new(self.mask / self.w if any(kind.masked for _, kind in runs) else 0.0)
        for times, kind in runs:
            x = tape.repeated(lambda x, kind=kind: self.layer(x, kind), x, times)  # type: ignore[misc]
        tape.drop(mask)
        if not shape.has_head:  # the next stage of a pipeline has it, and sends the gradient back
            kept = tape.held[KEPT]
            tape.backward(x, x.bytes)
            return Activations(kept, 0.0, tuple(tape.moments.values()), self.keeps_scores)
        x = self.norm(x, shape.width)
        if not self.step.training:
            rows = self.batch if self.fused_loss else self.tokens
            logits = tape.run((x,), rows * shape.vocab * self.w, kind=LOGITS)
            return Activations(0.0, logits.bytes, tuple(tape.moments.values()))
        kept = tape.held[KEPT] - (self.of(shape.width) if self.fused_loss else 0.0)
        before = sum(tape.here.values())
        tape.phase = "loss"
        loss = self.fused(x) if self.fused_loss else self.whole(x)
        at_loss = tape.moments["loss"].bytes - before
        tape.backward(loss)
        return Activations(kept, at_loss, tuple(tape.moments.values()), self.keeps_scores)

    def runs(self) -> list[tuple[int, BlockKind]]:
        """Group the layers into runs of equal ones; return (how many, their kind) of each run, in order."""
        return [(len(list(like)), kind) for kind, like in groupby(map(self.kind, range(self.shape.layers)))]

    def kind(self, layer: int) -> BlockKind:
        window = self.shape.window_of(layer)
        return BlockKind(
            frozenset(name for name, place in self.places.items() if layer in place.layers),
            frozenset(name for name, place in self.places.items() if layer in place.adapted),
            layer in self.shape.expert_layers,
            window is not None and window < self.keys,
            self.step.recompute_blocks is None or layer < self.step.recompute_blocks,
        )

    @property
    def mask(self) -> float:
        """Return the bytes of a mask over all keys, as the numbers that attention adds to its scores."""
        return float(self.keys * self.keys * self.w)

    @property
    def keeps_scores(self) -> bool:
        """True if attention keeps all of its scores because no fused kernel computes it."""
        return False

    def layer(self, x: Value, kind: BlockKind) -> Value:
        if self.step.repeats in ("none", "mlp") or not kind.again:
            return self.block(x, kind)

        return self.tape.recomputed(lambda x: self.block(x, kind), x)

    def block(self, x: Value, kind: BlockKind) -> Value:
        """Replay x + attention(norm(x)), then x + mlp(norm(x)); with four norms, each part's output is normalized too."""
        for part in (self.attention, self.feed):
            y = part(self.norm(x, self.shape.width, keep_name=True), kind)
            if self.shape.norms == 4:
                y = self.norm(y, self.shape.width)
            if self.trains and part == self.attention:
                self.tape.also(self.small)
            x = self.tape.run((x, y), self.of(self.shape.width), passes=True, drops=(x, y))
        return x

    def feed(self, x: Value, kind: BlockKind) -> Value:
        """Replay a block's feed-forward, which recompute "mlp" computes again in backward."""
        part = self.experts if kind.routed else self.mlp
        if self.step.repeats != "mlp" or not kind.again:
            return part(x, kind)
        return self.tape.recomputed(lambda x: part(x, kind), x)

    def embedding(self, ids: Value) -> Value:
        # a tied head's gradient is there already, and this one is added to it
        tied = self.shape.tied and self.trains
        gradient = self.shape.embedding_parameters * self.w
        return self.tape.run(
            (),
            self.of(self.shape.width),
            keeps=(ids,),
            weight=gradient if self.trains and not tied else 0.0,
            trains=self.trains,
            back_scratch=gradient / self.shared_by if tied else 0.0,
        )

    # -- products

    def product(
        self, name: str, x: Value, kind: BlockKind, n: int, k: int, *, times: float = 1.0, count: int = 1
    ) -> Value:
        """Replay x w' with the adapter that the recipe puts there. times: rows for each token; count: matrices that share the
        rows."""
        tape = self.tape
        place = next((self.places[at] for at in (name, *_TOGETHER.get(name, ())) if at in self.places), None)
        found = place.weight.name if place is not None else name
        rank = place.rank if place is not None and found in kind.adapted else 0
        storage = getattr(self.recipe, "storage", None)
        quantizes = found in kind.quantized and (
            storage is not None or getattr(self.recipe, "quantized_products", False)
        )
        if self.step.repeats == "selective" and found not in self.again:
            self.tape.save_next()
        y = (self.quantized if quantizes else self.plain)(x, n, k, times, count)
        if not rank:
            return y
        if (live := self.step.trained) is not None and live.peft is not None:
            return self.adapted_by_peft(x, y, rank, n, k, times, count, live.peft)
        a = tape.run((x,), self.of(rank * times), keeps=(x,), weight=rank * k * count * self.w)
        scaled = tape.run((a,), a.bytes, drops=(a,))
        b = tape.run((scaled,), y.bytes, keeps=(scaled,), weight=n * rank * count * self.w, drops=(scaled,))
        return tape.run((y, b), y.bytes, passes=True, drops=(y, b))

    def adapted_by_peft(
        self, x: Value, y: Value, rank: int, n: int, k: int, times: float, count: int, dtype: str
    ) -> Value:
        """Replay y + scale * B A x in the adapter's dtype; where that is not x's, each adapter makes and keeps a copy of x."""
        tape, w = self.tape, 4 if dtype == "fp32" else 2
        other, rows = w != self.w, self.tokens * times * w
        own = tape.run((x,), rows * k) if other else x
        a = tape.run((own,), rows * rank, keeps=(own,), weight=rank * k * count * w, drops=(own,) if other else ())
        b = tape.run((a,), rows * n, keeps=(a,), weight=n * rank * count * w, drops=(a,))
        scaled = tape.run((b,), b.bytes, drops=(b,))
        out = tape.run((y, scaled), scaled.bytes, passes=not other, drops=(y, scaled))
        return tape.run((out,), y.bytes, drops=(out,)) if other else out

    def plain(self, x: Value, n: int, k: int, times: float, count: int) -> Value:
        weight = n * k * count * self.w if self.trains else 0.0
        return self.tape.run((x,), self.of(n * times), keeps=(x,) if self.trains else (), weight=weight)

    def quantized(self, x: Value, n: int, k: int, times: float, count: int) -> Value:
        """Replay a product of quantized operands, or of a stored weight that is decoded for it."""
        t = round(self.tokens * times)
        forward, back = self.temporaries(n, k, t)
        kept = weight = 0.0
        keeps: tuple[Value, ...] = ()
        if self.trains:
            weight = n * k * count * self.w
            x_quantizer = getattr(self.recipe.grad_weight, "b", None)
            if x_quantizer is None:
                keeps = (x,)
            else:
                kept = float(x_quantizer.nbytes(k, t))
        return self.tape.run(
            (x,), self.of(n * times), keeps=keeps, extra=kept, weight=weight, scratch=forward, back_scratch=back
        )

    def temporaries(self, n: int, k: int, rows: int) -> tuple[float, float]:
        """Return the bytes that quantizing the operands, or decoding a stored weight, takes in forward and in backward."""
        recipe, storage = self.recipe, getattr(self.recipe, "storage", None)
        weight = n * k / self.shared_by
        forward = back = 0.0
        if storage is not None and self.on_cpu:  # beside the decoded weight, which is a term of its own
            forward = back = _DECODING.get(type(storage.scaling), 4.0) * weight
        if recipe.forward.quantized:
            forward = max(forward, self._scratch(recipe.forward, rows * k, weight))
            back = max(
                back,
                self._scratch(recipe.grad_input, rows * n, weight),
                self._scratch(recipe.grad_weight, rows * n, rows * k) if self.trains else 0.0,
            )
        return forward, back

    def _scratch(self, gemm: Any, a: float, b: float) -> float:
        """Return the bytes of both operands' codes; where a CPU emulates tensor cores, of their values in bf16 or a copy too."""
        both = ((a, gemm.a), (b, gemm.b))
        codes = sum(size * int(q.format.bits) / 8 for size, q in both if q is not None)
        if not self.on_cpu:
            return codes
        making = max((size * _ENCODING.get(type(q.scaling), 6.0) for size, q in both if q is not None), default=0.0)
        return codes + max(making, 2 * (a + b) + max(a, b) * 2.0)

    # -- the part that differs between kinds of layers

    def norm(self, x: Value, features: int, *, keep_name: bool = False, heads: int = 1) -> Value:
        raise NotImplementedError

    def attention(self, x: Value, kind: BlockKind) -> Value:
        raise NotImplementedError

    def mlp(self, x: Value, kind: BlockKind) -> Value:
        y = self.feed_forward("mlp", x, kind, self.shape.ffn)
        self.tape.drop(x)
        return y

    @cached_property
    def small(self) -> float:
        """Return the bytes of the gradients of a layer's biases and other small parameters that no operation here counts."""
        s = self.shape
        counted = s.norms * s.width + (2 * s.head_dim if s.qk_norm else 0)
        return max(0.0, (s.small_parameters - s.width) / s.layers - counted) * self.w

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of query, key and value as attention reads them: a latent is expanded for every head."""
        s = self.shape
        if s.latent is not None:
            return s.query_width, s.query_width, s.context_width
        return s.query_width, s.kv_width, s.kv_width

    @cached_property
    def context(self) -> int:
        """Return the width of attention's output."""
        return self.shape.context_width

    def feed_forward(self, root: str, x: Value, kind: BlockKind, ffn: int, times: float = 1.0, count: int = 1) -> Value:
        """Replay down(act(gate x) up x), or without a gate down(act(up x)); x stays alive afterwards."""
        s, tape = self.shape, self.tape

        def product(name: str, x: Value, n: int, k: int) -> Value:
            return self.product(f"{root}.{name}", x, kind, n, k, times=times, count=count)

        if not s.gated:
            up = product("up_proj", x, ffn, s.width)
            # the approximate GELU, written out: keeps x, its tanh, and both factors of the last product
            y = tape.run((up,), up.bytes, keeps=(up,), extra=3 * up.bytes, scratch=up.bytes, drops=(up,))
        else:
            y = self.gated(lambda name: product(name, x, ffn, s.width))
        out = product("down_proj", y, s.width, ffn)
        tape.drop(y)
        return out

    def experts(self, x: Value, kind: BlockKind) -> Value:
        """Replay routed experts: gather each token for its experts, then sum their weighted outputs and those of shared ones."""
        e, s, tape = self.shape.experts, self.shape, self.tape
        assert e is not None
        # the router in float32: scores, and its softmax
        weights = tape.run(
            (x,), self.wide(e.count), keeps=(x,) if self.trains else (), weight=e.count * s.width * self.w
        )
        tape.keep(weights)
        gathered = tape.run((x,), self.of(s.width * e.chosen), back_scratch=self.of(s.width))
        y = self.feed_forward("mlp.experts", gathered, kind, e.ffn, e.chosen, e.here)
        tape.drop(gathered)
        out = tape.run(
            (y, weights), self.of(s.width), keeps=(y,), scratch=y.bytes, back_scratch=y.bytes, drops=(y, weights)
        )
        if e.shared_ffn:
            shared = self.feed_forward(f"mlp.{e.shared}", x, kind, e.shared_ffn)
            out = tape.run((out, shared), out.bytes, passes=True, drops=(out, shared))
        tape.drop(x)
        return out

    def gated(self, product: Callable[[str], Value]) -> Value:
        """Replay act(gate) up, from the two products."""
        raise NotImplementedError

    def fused(self, x: Value) -> Value:
        """Replay linear and cross-entropy as one operation, in chunks of tokens (kernels/reference/loss.py)."""
        s, tape = self.shape, self.tape
        head = self.places.get("lm_head")
        rows = loss_rows(self.tokens, s.vocab, self.step.device, self.w, head)
        if head is not None and not is_fused_with_loss(head):
            return self.through_the_head(x, rows, head)
        # a CPU takes the softmax in a float32 buffer of its own, the GPU's kernel within the logits
        chunk = rows * s.vocab * (self.w + 4.0 if self.w == 2 and self.on_cpu else self.w)
        # the chunk's gradient of x: as the product made it, and in float32 as a token's share multiplied it
        working = rows * s.width * (self.w + 4.0) if self.on_cpu else 0.0
        summed = 0.0
        if self.trains and rows < self.tokens:  # a float32 sum over chunks beside each chunk's own gradient
            each = 4.0 + (max(4.0 if self.on_cpu else 0.0, self.w) if self.w == 2 else 0.0)
            summed = each * s.embedding_parameters / self.shared_by
        elif self.trains and self.w == 2 and self.on_cpu:  # a CPU divides by way of float32
            summed = 8.0 * s.embedding_parameters
        # backward scales both gradients by the loss's own, so each is there twice for a moment
        return tape.run(
            (x,),
            0.0,
            extra=self.of(s.width) + self.head_gradient,
            scratch=chunk + max(working, summed),
            weight=self.head_gradient * self.shared_by,  # of which this GPU has its share
            kind=LOGITS,
            drops=(x,),
        )

    def through_the_head(self, x: Value, rows: int, head: Placement) -> Value:
        """Replay the loss through a quantized or adapted head: a chunk's logits are computed again in backward (nn/loss.py)."""
        s, logits = self.shape, rows * self.shape.vocab
        forward, back = self.temporaries(s.vocab, s.width, rows) if head.quantized else (0.0, 0.0)
        weight = self.head_gradient + head.rank * (s.vocab + s.width) * self.w
        stored = head.quantized and getattr(self.recipe, "storage", None) is not None
        decoded = (
            s.embedding_parameters * self.w if stored else 0.0
        )  # a term of its own, gone while the gradients are made
        return self.tape.run(
            (x,),
            4.0,
            keeps=(x,),
            scratch=max(logits * 8.0, forward),  # in float32, and their logarithms
            # these and two gradients; of several chunks each makes a weight's gradient of its own beside the sum
            back_scratch=max(logits * 12.0 - decoded, logits * self.w + back) + (weight if rows < self.tokens else 0.0),
            weight=weight,
            kind=LOGITS,
            drops=(x,),
        )

    def whole(self, x: Value) -> Value:
        """Replay the logits of all tokens, and cross-entropy on them in float32."""
        s, tape = self.shape, self.tape
        logits = self.tape.run(
            (x,),
            self.of(s.vocab),
            keeps=(x,) if self.trains else (),
            weight=self.head_gradient * self.shared_by,
            kind=LOGITS,
            drops=(x,),
        )
        if self.w == 4:
            logits.holders += 1
            as_float = logits
        else:
            as_float = tape.run((logits,), self.wide(s.vocab), kind=LOGITS)
        logs = tape.run((as_float,), self.wide(s.vocab), kind=LOGITS)
        tape.keep(logs)
        loss = tape.run((logs,), 4.0, kind=LOGITS, drops=(logs,))
        tape.drop(as_float)
        tape.drop(logits)
        return loss


class Ours(_Model):
    """Ours stands for surokit's own layers: surokit/models/decoder.py and surokit/nn."""

    def norm(self, x: Value, features: int, *, keep_name: bool = False, heads: int = 1) -> Value:
        buffer = 4.0 * min(self.tokens * features * heads, NORM_ELEMENTS) if self.step.device == "cpu" else 0.0
        return self.tape.run(
            (x,),
            self.of(features * heads),
            keeps=(x,),
            extra=self.tokens * heads * 4.0,
            weight=features * self.w if self.trains else 0.0,
            scratch=buffer,
            back_scratch=3 * buffer,
            drops=() if keep_name else (x,),
        )

    def attention(self, x: Value, kind: BlockKind) -> Value:
        s, tape = self.shape, self.tape
        q, k, v = (self.product(name, x, kind, n, s.width) for name, n in zip(QKV, self.widths))
        if s.qk_norm:
            q, k = self._pair(lambda z, heads: self.norm(z, s.head_dim, keep_name=True, heads=heads), q, k)
        q, k = self._pair(lambda z, heads: tape.run((z,), z.bytes), q, k)
        return self._attended(x, (q, k, v), kind)

    def _attended(self, x: Value, qkv: tuple[Value, Value, Value], kind: BlockKind) -> Value:
        """Replay attention and the output projection; forward needs x, q, k and v no longer afterwards."""
        y = self._attend(*qkv, kind.masked)
        for value in qkv:
            self.tape.drop(value)
        out = self.product("self_attn.o_proj", y, kind, self.shape.width, self.context)
        self.tape.drop(y)
        self.tape.drop(x)
        return out

    def _pair(self, change: Any, q: Value, k: Value) -> tuple[Value, Value]:
        """Apply `change` to q and k, and free both inputs only when both results are there, as q, k = f(q), f(k) does."""
        changed = change(q, self.shape.heads), change(k, self.shape.kv_heads)
        self.tape.drop(q)
        self.tape.drop(k)
        return changed

    def _attend(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        s, tape = self.shape, self.tape
        if not self.on_cpu and self.grouped and (masked or self.w == 4):
            return self.with_repeated_keys(self.fused_attention, q, k, v, masked)
        if not self.on_cpu or masked or self.w == 4:
            return self.fused_attention(q, k, v, masked)
        # our own gradient: copies of what it reads, three gradients and their copies, and blocks of scores
        B, G, T = self.batch, s.kv_heads, self.length
        R, rows = s.heads // s.kv_heads, min(ATTENTION_ROWS, self.length)
        group = max(1, min(B * G, ATTENTION_SCORES // (R * rows * T)))
        blocks = 2 * group * R * rows * T * self.w + 2 * group * T * s.head_dim * 4
        copies = self.of(2 * s.query_width + 2 * s.kv_width) if B > 1 else 0.0
        made = self.of(s.query_width + 2 * s.kv_width)
        y = tape.run((q, k, v), q.bytes, keeps=(q, k, v), back_scratch=copies + max(blocks, made))
        return y

    @property
    def grouped(self) -> bool:
        return self.shape.kv_heads < self.shape.heads

    def with_repeated_keys(
        self,
        attend: Callable[[Value, Value, Value, bool], Value],
        q: Value,
        k: Value,
        v: Value,
        masked: bool,
        *,
        cached: bool = False,
    ) -> Value:
        """Replay attention with keys and values repeated for every query head; where `cached`, a cache also holds the originals."""
        pairs = ((k, self.shape.query_width), (v, self.context))
        k, v = (self.tape.run((z,), self.of(n), keeps=(z,) if cached else ()) for z, n in pairs)
        y = attend(q, k, v, masked)
        self.tape.drop(k)
        self.tape.drop(v)
        return y

    def fused_attention(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        """Replay torch's scaled_dot_product_attention, which keeps its output, the log-sum-exp, and a mask as numbers."""
        s, tape = self.shape, self.tape
        back = 0.0
        if not self.on_cpu:
            # flash attention sums the query's gradient in float32, and makes a key's gradient for each query head
            back = self.wide(s.query_width) + (self.of(2 * s.query_width) if k.bytes < q.bytes else 0.0)
        extra = self.tokens * s.heads * 4.0 + (self.mask if masked else 0.0)
        if self.step.repeats == "selective":
            tape.save_next("all")
        y = tape.run((q, k, v), self.of(self.context), keeps=(q, k, v), extra=extra, back_scratch=back)
        tape.keep(y)
        return y

    def gated(self, product: Callable[[str], Value]) -> Value:
        gate, up = product("gate_proj"), product("up_proj")
        return self.tape.run((gate, up), gate.bytes, keeps=(gate, up), drops=(gate, up))
