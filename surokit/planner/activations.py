"""What a forward and a backward hold, operation by operation: our layers, and transformers' own.

Each function below is a module's forward as the tape sees it: which tensors it makes, which of them its backward reads, and
which names Python lets go. The tape (tape.py) does the rest. Sizes are bytes of all tokens of one micro-batch; every constant is
what the code does, and the tests hold it against the tensors that torch really keeps.

Ours (surokit/nn): a norm keeps its input and one float32 a row; a product keeps x, or the codes of x that grad_weight reads, or
nothing under a frozen weight; rotary positions keep nothing; attention keeps query, key, value, and where torch's fused kernel
does the gradient its output and the float32 log-sum-exp; SwiGLU keeps gate and up; the loss makes both its gradients in forward
and keeps these, never the logits.

transformers: a norm computes in float32 of its own, so it keeps that copy (4 bytes an element of a bf16 model) and the
normalized input that its weight multiplies; rotary positions keep nothing; SwiGLU keeps gate, silu(gate), up; the loss keeps
float32 log-probabilities of all tokens, and its backward holds them with two gradients of their size.

Experts, latent attention, Gemma's norms and GPT-2's feed-forward follow transformers' code; the tests hold tiny ones to a tenth.

What attention keeps depends on the kernel that torch chooses. A sliding window shorter than the sequence is a mask, and each
layer keeps it as numbers; on a GPU no fused kernel takes grouped heads with a mask or in float32: ours and transformers then
repeat keys and values for every query head, but transformers without a mask goes to torch's plain products, which keep all
scores (torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp). Gemma 2 and gpt-oss have no fused attention anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from surokit.planner.flops import Placement, Recompute, frozen
from surokit.planner.fusion import Fused
from surokit.planner.shape import Shape
from surokit.planner.tape import KEPT, LOGITS, Moment, Tape, Value

# Elements of the logits that the fused linear + cross-entropy holds at a time (kernels/reference/loss.py, which needs torch).
LOSS_ELEMENTS = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
LOSS_MIN_ROWS = 64
# Query rows and scores that the reference's attention gradient holds at a time (kernels/reference/attention.py).
ATTENTION_ROWS, ATTENTION_SCORES = 256, 2 * 2**20
# Elements of a float32 buffer of the reference's norm, for one thread (kernels/reference/norm.py).
NORM_ELEMENTS = 64 * 1024
# Bytes an element that the reference takes beside the result, on a CPU: to decode a stored weight, to encode an operand.
_DECODING = {"NFBlock": 15.0, "NV": 13.0, "Block": 8.0}
_ENCODING = {"NV": 12.0, "MX": 10.0}
# Where a family has several matrices in one.
_TOGETHER = {
    "self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.q_b_proj"),
    "self_attn.k_proj": ("self_attn.qkv_proj", "self_attn.kv_b_proj"),
    "self_attn.v_proj": ("self_attn.qkv_proj", "self_attn.kv_b_proj"),
    "mlp.gate_proj": ("mlp.gate_up_proj",),
    "mlp.up_proj": ("mlp.gate_up_proj",),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Families that transformers gives plain attention: tensors of scores kept in the model's dtype, and in float32. A soft cap keeps
# its tanh; the softmax is float32 for Gemma and in the model's dtype for gpt-oss.
_PLAIN_ATTENTION = {"gemma2": (2, 1), "gpt_oss": (1, 0)}


class Kind(NamedTuple):
    """What blocks in a row have in common: the products that are quantized, routed experts, a window that needs a mask."""

    quantized: frozenset[str]
    routed: bool
    masked: bool


class Step(Protocol):
    """What of a plan's Setup decides here."""

    @property
    def recompute(self) -> Recompute: ...
    @property
    def logits(self) -> Literal["fused", "whole"]: ...
    @property
    def device(self) -> Literal["cpu", "cuda"]: ...
    @property
    def layers(self) -> Literal["surokit", "transformers"]: ...
    @property
    def training(self) -> bool: ...
    @property
    def fusion(self) -> Fused: ...


@dataclass(frozen=True)
class Activations:
    """What passes in one step: bytes kept at the end of the forward, bytes of the loss, and the fullest moment of each phase.

    `scores` says that attention keeps all of its scores.
    """

    kept: float
    loss: float
    moments: tuple[Moment, ...]
    scores: bool = False


def replay(
    shape: Shape,
    recipe: Any,
    step: Step,
    places: tuple[Placement, ...],
    *,
    batch: int,
    length: int,
    width: int,
    gradients_there: bool = False,
    weight_share: float = 1.0,
    layers: type[Ours] | None = None,
) -> Activations:
    """Forward and, in training, backward of `batch` sequences of `length` tokens, weights and activations of `width` bytes.

    layers: whose, ours or transformers' by the step without it.
    """
    tape = Tape(gradients_there=gradients_there, weight_share=weight_share, records=step.training)
    kind = layers or (_Theirs if step.layers == "transformers" else Ours)
    return kind(tape, shape, recipe, step, places, batch, length, width).replay()


class _Model:
    """What both kinds of layers share: sizes, products, embedding, the order of things."""

    def __init__(
        self,
        tape: Tape,
        shape: Shape,
        recipe: Any,
        step: Step,
        places: tuple[Placement, ...],
        batch: int,
        length: int,
        width: int,
    ) -> None:
        self.tape, self.shape, self.recipe, self.step = tape, shape, recipe, step
        self.batch, self.length, self.tokens, self.w = batch, length, batch * length, width
        self.places = {p.weight.name: p for p in places}
        self.trains = step.training and not frozen(recipe)
        self.fused_loss = step.logits == "fused"

    # -- sizes in bytes

    def of(self, features: float) -> float:
        """All tokens, so many elements each, in the model's dtype."""
        return self.tokens * features * self.w

    @property
    def on_cpu(self) -> bool:
        return self.step.device == "cpu"

    def wide(self, features: float) -> float:
        """The same in float32."""
        return self.tokens * features * 4.0

    @cached_property
    def head_gradient(self) -> float:
        return self.shape.embedding_parameters * self.w if self.trains else 0.0

    # -- the whole

    def replay(self) -> Activations:
        tape, shape = self.tape, self.shape
        ids = tape.new(self.tokens * 8.0)  # the token ids and the labels, int64
        tape.new(self.tokens * 8.0)
        x = self.embedding(ids)
        runs = self.runs()
        mask = tape.new(self.mask / self.w if any(kind.masked for _, kind in runs) else 0.0)
        for times, kind in runs:
            x = tape.repeated(lambda x, kind=kind: self.layer(x, kind), x, times)  # type: ignore[misc]
        tape.drop(mask)
        x = self.norm(x, shape.width)
        if not self.step.training:
            rows = self.batch if self.fused_loss else self.tokens
            logits = tape.run((x,), rows * shape.vocab * self.w, kind=LOGITS)
            return Activations(0.0, logits.bytes, tuple(tape.moments.values()))
        kept = tape.held[KEPT] - (self.of(shape.width) if self.fused_loss else 0.0)
        before = sum(tape.held.values())
        tape.phase = "loss"
        loss = self.fused(x) if self.fused_loss else self.whole(x)
        at_loss = tape.moments["loss"].bytes - before
        tape.backward(loss)
        return Activations(kept, at_loss, tuple(tape.moments.values()), self.keeps_scores)

    def runs(self) -> list[tuple[int, Kind]]:
        """Like layers in a row: how many, and of what kind."""
        return [(len(list(like)), kind) for kind, like in groupby(map(self.kind, range(self.shape.layers)))]

    def kind(self, layer: int) -> Kind:
        window = self.shape.window_of(layer)
        return Kind(
            frozenset(name for name, place in self.places.items() if layer in place.layers),
            layer in self.shape.expert_layers,
            window is not None and window < self.length,
        )

    @property
    def mask(self) -> float:
        """Bytes of a mask over all keys, as the numbers that attention adds to its scores."""
        return float(self.length * self.length * self.w)

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps all of its scores, for want of a fused kernel."""
        return False

    def layer(self, x: Value, kind: Kind) -> Value:
        if self.step.recompute == "full":
            return self.tape.recomputed(lambda x: self.block(x, kind), x)
        return self.block(x, kind)

    def block(self, x: Value, kind: Kind) -> Value:
        """x + attention(norm(x)), then x + mlp(norm(x)); with four norms, each part's output is normalized too."""
        for part in (self.attention, self.experts if kind.routed else self.mlp):
            y = part(self.norm(x, self.shape.width, keep_name=True), kind)
            if self.shape.norms == 4:
                y = self.norm(y, self.shape.width)
            if self.trains and part == self.attention:
                self.tape.also(self.small)
            x = self.tape.run((x, y), self.of(self.shape.width), passes=True, drops=(x, y))
        return x

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
            back_scratch=gradient if tied else 0.0,
        )

    # -- products

    def product(self, name: str, x: Value, kind: Kind, n: int, k: int, *, times: float = 1.0, count: int = 1) -> Value:
        """x w' with the adapter that the recipe puts there. `times`: of each token, `count`: matrices that share them."""
        tape = self.tape
        place = next((self.places[at] for at in (name, *_TOGETHER.get(name, ())) if at in self.places), None)
        found = place.weight.name if place is not None else name
        rank = place.rank if place is not None else 0
        storage = getattr(self.recipe, "storage", None)
        quantizes = found in kind.quantized and (
            storage is not None or getattr(self.recipe, "quantized_products", False)
        )
        y = (self.quantized if quantizes else self.plain)(x, n, k, times, count)
        if not rank:
            return y
        a = tape.run((x,), self.of(rank * times), keeps=(x,), weight=rank * k * count * self.w)
        scaled = tape.run((a,), a.bytes, drops=(a,))
        b = tape.run((scaled,), y.bytes, keeps=(scaled,), weight=n * rank * count * self.w, drops=(scaled,))
        return tape.run((y, b), y.bytes, passes=True, drops=(y, b))

    def plain(self, x: Value, n: int, k: int, times: float, count: int) -> Value:
        weight = n * k * count * self.w if self.trains else 0.0
        return self.tape.run((x,), self.of(n * times), keeps=(x,) if self.trains else (), weight=weight)

    def quantized(self, x: Value, n: int, k: int, times: float, count: int) -> Value:
        """A product of quantized operands, or of a stored weight that is decoded on the way."""
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
        """What quantizing the operands, or decoding a stored weight, takes in forward and in backward."""
        recipe, storage = self.recipe, getattr(self.recipe, "storage", None)
        forward = back = 0.0
        if storage is not None and self.on_cpu:  # beside the decoded weight, which is a term of its own
            forward = back = _DECODING.get(type(storage.scaling).__name__, 4.0) * n * k
        if recipe.forward.quantized:
            forward = max(forward, self._scratch(recipe.forward, rows * k, n * k))
            back = max(
                back,
                self._scratch(recipe.grad_input, rows * n, n * k),
                self._scratch(recipe.grad_weight, rows * n, rows * k) if self.trains else 0.0,
            )
        return forward, back

    def _scratch(self, gemm: Any, a: float, b: float) -> float:
        """Codes of both operands; where a CPU stands in for tensor cores, their values in bf16 or a copy on the way too."""
        both = ((a, gemm.a), (b, gemm.b))
        codes = sum(size * int(q.format.bits) / 8 for size, q in both if q is not None)
        if not self.on_cpu:
            return codes
        making = max(
            (size * _ENCODING.get(type(q.scaling).__name__, 6.0) for size, q in both if q is not None), default=0.0
        )
        return codes + max(making, 2 * (a + b) + max(a, b) * 2.0)

    # -- what differs

    def norm(self, x: Value, features: int, *, keep_name: bool = False, heads: int = 1) -> Value:
        raise NotImplementedError

    def attention(self, x: Value, kind: Kind) -> Value:
        raise NotImplementedError

    def mlp(self, x: Value, kind: Kind) -> Value:
        y = self.feed_forward("mlp", x, kind, self.shape.ffn)
        self.tape.drop(x)
        return y

    @cached_property
    def small(self) -> float:
        """Gradients of a layer's biases and other small parameters that no operation here counts."""
        s = self.shape
        counted = s.norms * s.width + (2 * s.head_dim if s.qk_norm else 0)
        return max(0.0, (s.small_parameters - s.width) / s.layers - counted) * self.w

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """Of query, key and value as attention reads them: a latent is expanded for every head."""
        s = self.shape
        if s.latent is not None:
            return s.query_width, s.query_width, s.context_width
        return s.query_width, s.kv_width, s.kv_width

    @cached_property
    def context(self) -> int:
        """Width of attention's output."""
        return self.shape.context_width

    def feed_forward(self, root: str, x: Value, kind: Kind, ffn: int, times: float = 1.0, count: int = 1) -> Value:
        """down(act(gate x) up x), or without a gate down(act(up x)); `x` keeps its name."""
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

    def experts(self, x: Value, kind: Kind) -> Value:
        """Each token gathered for its experts, theirs and the shared ones' outputs weighed and summed."""
        e, s, tape = self.shape.experts, self.shape, self.tape
        assert e is not None
        # the router in float32: scores, and its softmax
        weights = tape.run(
            (x,), self.wide(e.count), keeps=(x,) if self.trains else (), weight=e.count * s.width * self.w
        )
        tape.keep(weights)
        gathered = tape.run((x,), self.of(s.width * e.chosen), back_scratch=self.of(s.width))
        y = self.feed_forward("mlp.experts", gathered, kind, e.ffn, e.chosen, e.count)
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
        """act(gate) up, from the two products."""
        raise NotImplementedError

    def fused(self, x: Value) -> Value:
        """Linear and cross-entropy in one, in chunks of tokens (kernels/reference/loss.py)."""
        s, tape = self.shape, self.tape
        rows = min(self.tokens, max(LOSS_MIN_ROWS, LOSS_ELEMENTS[self.step.device] // s.vocab))
        head = self.places.get("lm_head")
        if head is not None and (head.quantized or head.rank):
            return self.through_the_head(x, rows, head)
        # a CPU takes the softmax in a float32 buffer of its own, the GPU's kernel within the logits
        chunk = rows * s.vocab * (self.w + 4.0 if self.w == 2 and self.on_cpu else self.w)
        # the chunk's gradient of x: as the product made it, and in float32 as a token's share multiplied it
        working = rows * s.width * (self.w + 4.0) if self.on_cpu else 0.0
        summed = 0.0
        if self.trains and rows < self.tokens:  # a float32 sum over chunks beside each chunk's own gradient
            summed = 4.0 * s.embedding_parameters + (
                max(4.0 if self.on_cpu else 0.0, self.w) * s.embedding_parameters if self.w == 2 else 0.0
            )
        elif self.trains and self.w == 2 and self.on_cpu:  # a CPU divides by way of float32
            summed = 8.0 * s.embedding_parameters
        # backward scales both gradients by the loss's own, so each is there twice for a moment
        return tape.run(
            (x,),
            0.0,
            extra=self.of(s.width) + self.head_gradient,
            scratch=chunk + max(working, summed),
            weight=self.head_gradient,
            kind=LOGITS,
            drops=(x,),
        )

    def through_the_head(self, x: Value, rows: int, head: Placement) -> Value:
        """The same through a quantized or adapted head: a chunk's logits are made again in backward (nn/loss.py)."""
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
        """Logits of all tokens, and cross-entropy on them in float32."""
        s, tape = self.shape, self.tape
        logits = self.tape.run(
            (x,),
            self.of(s.vocab),
            keeps=(x,) if self.trains else (),
            weight=self.head_gradient,
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
    """surokit/models/decoder.py and surokit/nn."""

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

    def attention(self, x: Value, kind: Kind) -> Value:
        s, tape = self.shape, self.tape
        q, k, v = (self.product(name, x, kind, n, s.width) for name, n in zip(_QKV, self.widths))
        if s.qk_norm:
            q, k = self._pair(lambda z, heads: self.norm(z, s.head_dim, keep_name=True, heads=heads), q, k)
        q, k = self._pair(lambda z, heads: tape.run((z,), z.bytes), q, k)
        y = self._attend(q, k, v, kind.masked)
        for value in (q, k, v):
            tape.drop(value)
        out = self.product("self_attn.o_proj", y, kind, s.width, self.context)
        tape.drop(y)
        tape.drop(x)
        return out

    def _pair(self, change: Any, q: Value, k: Value) -> tuple[Value, Value]:
        """Both names are bound anew together."""
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
        """Attention with keys and values repeated for every query head; a cache still holds them as they were."""
        pairs = ((k, self.shape.query_width), (v, self.context))
        k, v = (self.tape.run((z,), self.of(n), keeps=(z,) if cached else ()) for z, n in pairs)
        y = attend(q, k, v, masked)
        self.tape.drop(k)
        self.tape.drop(v)
        return y

    def fused_attention(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        """torch's scaled_dot_product_attention: keeps its output, the log-sum-exp, and a mask as numbers."""
        s, tape = self.shape, self.tape
        back = 0.0
        if not self.on_cpu:
            # flash attention sums the query's gradient in float32, and makes a key's gradient for each query head
            back = self.wide(s.query_width) + (self.of(2 * s.query_width) if k.bytes < q.bytes else 0.0)
        extra = self.tokens * s.heads * 4.0 + (self.mask if masked else 0.0)
        y = tape.run((q, k, v), self.of(self.context), keeps=(q, k, v), extra=extra, back_scratch=back)
        tape.keep(y)
        return y

    def gated(self, product: Callable[[str], Value]) -> Value:
        gate, up = product("gate_proj"), product("up_proj")
        return self.tape.run((gate, up), gate.bytes, keeps=(gate, up), drops=(gate, up))


class _Theirs(Ours):
    """transformers' own: Llama's layers, and where other families differ."""

    def norm(self, x: Value, features: int, *, keep_name: bool = False, heads: int = 1) -> Value:
        tape, size = self.tape, features * heads
        as_float = x if self.w == 4 else tape.run((x,), self.wide(size))
        if as_float is x:
            x.holders += 1
        row = self.tokens * heads * 4.0
        square = tape.run(
            (as_float,), row, keeps=(as_float,), extra=row, scratch=self.wide(size), back_scratch=2 * self.wide(size)
        )
        scaled = tape.run(
            (as_float, square), self.wide(size), keeps=(as_float,), back_scratch=self.wide(size), drops=(square,)
        )
        tape.drop(as_float)
        if self.shape.family.startswith("gemma"):  # multiplies by 1 + weight in float32, and rounds then
            weight = features * self.w if self.trains else 0.0
            out = tape.run(
                (scaled,),
                self.wide(size),
                keeps=(scaled,),
                weight=weight,
                back_scratch=self.wide(size),
                drops=(scaled,),
            )
            if self.w < 4:
                out = tape.run((out,), self.of(size), drops=(out,))
            if not keep_name:
                tape.drop(x)
            return out
        if self.w == 4:
            back = scaled
        else:
            back = tape.run((scaled,), self.of(size), drops=(scaled,))
        out = tape.run(
            (back,),
            self.of(size),
            keeps=(back,) if self.trains else (),
            weight=features * self.w if self.trains else 0.0,
            back_scratch=self.of(size) if self.trains else 0.0,
            drops=(back,),
        )
        if not keep_name:
            tape.drop(x)
        return out

    def attention(self, x: Value, kind: Kind) -> Value:
        s, tape = self.shape, self.tape
        if s.latent is not None:
            return self.latent_attention(x, kind)
        found = []
        for name, n, heads in zip(_QKV, self.widths, (s.heads, s.kv_heads, 0)):
            z = self.product(name, x, kind, n, s.width)
            found.append(self.norm(z, s.head_dim, heads=heads) if s.qk_norm and heads else z)
        q, k, v = found
        q, k = self._pair(lambda z, heads: tape.run((z,), z.bytes, scratch=2 * z.bytes, back_scratch=2 * z.bytes), q, k)
        if self.step.recompute != "full":  # the cache's own copies
            k, v = (tape.run((z,), z.bytes, drops=(z,), passes=True) for z in (k, v))
        y = self._attend(q, k, v, kind.masked)
        for value in (q, k, v):
            tape.drop(value)
        out = self.product("self_attn.o_proj", y, kind, s.width, self.context)
        tape.drop(y)
        tape.drop(x)
        return out

    @property
    def mask(self) -> float:
        return self.batch * super().mask

    @property
    def keeps_scores(self) -> bool:
        s = self.shape
        math = (
            self.grouped and self.w == 4 and not self.on_cpu
        )  # none fused: windows have masks, and then keys are repeated
        unmasked = any(not self.kind(i).masked for i in range(s.layers))
        return s.family in _PLAIN_ATTENTION or (s.latent is not None and self.on_cpu) or (math and unmasked)

    def _attend(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        plain = self.shape.family in _PLAIN_ATTENTION
        if not plain and not masked and (self.on_cpu or self.w < 4 or not self.grouped):
            return self.fused_attention(q, k, v, masked)
        attend = self._plain_attention if plain else self.fused_attention if masked else self._all_scores
        if not self.grouped:
            return attend(q, k, v, masked)
        cached = (masked or plain) and self.step.recompute != "full"
        return self.with_repeated_keys(attend, q, k, v, masked, cached=cached)

    def _plain_attention(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        """Written out in the model: what each of its operations on the scores keeps."""
        own, wide = _PLAIN_ATTENTION[self.shape.family]
        each = self.tokens * self.shape.heads * self.length  # scores
        kept = each * (own * self.w + wide * 4.0 * (self.w < 4))
        passing = each * (self.w + 4.0)
        size = self.of(self.context)
        y = self.tape.run(
            (q, k, v), size, keeps=(q, k, v), extra=kept, scratch=passing, back_scratch=passing + each * 4.0
        )
        return self.tape.run((y,), size, drops=(y,))  # as [B, T, H, D]

    def latent_attention(self, x: Value, kind: Kind) -> Value:
        """DeepSeek's: query and key-values by way of a normalized latent, then expanded for every head."""
        s, tape, m = self.shape, self.tape, self.shape.latent
        assert m is not None

        def product(name: str, x: Value, n: int, k: int) -> Value:
            return self.product(f"self_attn.{name}", x, kind, n, k)

        if m.query_rank is None:
            q = product("q_proj", x, s.query_width, s.width)
        else:
            latent = self.norm(product("q_a_proj", x, m.query_rank, s.width), m.query_rank)
            q = product("q_b_proj", latent, s.query_width, m.query_rank)
            tape.drop(latent)
        q = tape.run((q,), q.bytes, scratch=q.bytes, back_scratch=q.bytes, drops=(q,))  # turned, and put together again
        both = product("kv_a_proj_with_mqa", x, m.kv_rank + m.rope, s.width)
        latent = self.norm(both, m.kv_rank)
        expanded = product("kv_b_proj", latent, s.heads * (m.nope + m.value), m.kv_rank)
        tape.drop(latent)
        k = tape.run((expanded,), self.of(s.query_width))
        # keys and values of different widths: a CPU has no fused kernel for these
        y = (self._all_scores if self.on_cpu else self.fused_attention)(q, k, expanded, kind.masked)
        for value in (q, k, expanded):
            tape.drop(value)
        out = product("o_proj", y, s.width, self.context)
        tape.drop(y)
        tape.drop(x)
        return out

    def _all_scores(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        """torch's attention without a fused kernel: keeps all scores in float32."""
        tape, wide = self.tape, 4 / self.w
        scores = self.wide(self.shape.heads * self.length)
        extra = scores + (q.bytes + k.bytes) * wide + self.wide(self.context) if self.w < 4 else scores
        keeps = () if self.w < 4 else (q, k, v)
        size = self.of(self.context)
        y = tape.run((q, k, v), size, keeps=keeps, extra=extra, scratch=scores, back_scratch=2 * scores)
        return tape.run((y,), size, drops=(y,))  # as [B, T, H, D]

    def gated(self, product: Callable[[str], Value]) -> Value:
        gate = product("gate_proj")
        # gpt-oss clamps both, and keeps what it clamped
        clamped = 3 * gate.bytes if self.shape.family == "gpt_oss" else 0.0
        silu = self.tape.run((gate,), gate.bytes, keeps=(gate,), extra=clamped, drops=(gate,))
        up = product("up_proj")
        return self.tape.run((silu, up), up.bytes, keeps=(silu, up), drops=(silu, up))
