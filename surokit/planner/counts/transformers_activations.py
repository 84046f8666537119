"""Replay the memory of a forward and a backward of transformers' own layers, where they differ from ours (activations.py).

A norm computes in float32 of its own, so it keeps that copy (4 bytes an element of a bf16 model) and the normalized input that its
weight multiplies; rotary positions keep nothing; SwiGLU keeps gate, silu(gate), up; the loss keeps float32 log-probabilities of all
tokens, and its backward holds them with two gradients of their size.

Experts, latent attention, Gemma's norms and GPT-2's feed-forward follow transformers' code; the tests hold tiny ones to a tenth.
Gemma 2 and gpt-oss have no fused attention anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from surokit.planner.counts.activations import QKV, BlockKind, Ours
from surokit.planner.counts.tape import Value

#: Families that transformers gives plain attention: tensors of scores kept in the model's dtype, and in float32. A soft cap keeps
#: its tanh; the softmax is float32 for Gemma and in the model's dtype for gpt-oss.
PLAIN_ATTENTION = {"gemma2": (2, 1), "gpt_oss": (1, 0)}


class Theirs(Ours):
    """Theirs stands for transformers' own layers: Llama's, and other families' where they differ."""

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

    def attention(self, x: Value, kind: BlockKind) -> Value:
        s, tape = self.shape, self.tape
        if s.latent is not None:
            return self.latent_attention(x, kind)
        found = []
        for name, n, heads in zip(QKV, self.widths, (s.heads, s.kv_heads, 0)):
            z = self.product(name, x, kind, n, s.width)
            found.append(self.norm(z, s.head_dim, heads=heads) if s.qk_norm and heads else z)
        q, k, v = found
        q, k = self._pair(lambda z, heads: tape.run((z,), z.bytes, scratch=2 * z.bytes, back_scratch=2 * z.bytes), q, k)
        if self.step.recompute != "full":  # the cache's own copies
            k, v = (tape.run((z,), z.bytes, drops=(z,), passes=True) for z in (k, v))
        return self._attended(x, (q, k, v), kind)

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
        return s.family in PLAIN_ATTENTION or (s.latent is not None and self.on_cpu) or (math and unmasked)

    def _attend(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        plain = self.shape.family in PLAIN_ATTENTION
        if not plain and not masked and (self.on_cpu or self.w < 4 or not self.grouped):
            return self.fused_attention(q, k, v, masked)
        attend = self._plain_attention if plain else self.fused_attention if masked else self._all_scores
        if not self.grouped:
            return attend(q, k, v, masked)
        cached = (masked or plain) and self.step.recompute != "full"
        return self.with_repeated_keys(attend, q, k, v, masked, cached=cached)

    def _plain_attention(self, q: Value, k: Value, v: Value, masked: bool) -> Value:
        """Replay attention that the model computes in plain operations on the scores, with what each of them keeps."""
        own, wide = PLAIN_ATTENTION[self.shape.family]
        each = self.tokens * self.shape.heads * self.keys  # scores
        kept = each * (own * self.w + wide * 4.0 * (self.w < 4))
        passing = each * (self.w + 4.0)
        size = self.of(self.context)
        y = self.tape.run(
            (q, k, v), size, keeps=(q, k, v), extra=kept, scratch=passing, back_scratch=passing + each * 4.0
        )
        return self.tape.run((y,), size, drops=(y,))  # as [B, T, H, D]

    def latent_attention(self, x: Value, kind: BlockKind) -> Value:
        """Replay DeepSeek's attention: query and key-values through a normalized latent, then expanded for every head."""
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
        q = tape.run((q,), q.bytes, scratch=q.bytes, back_scratch=q.bytes, drops=(q,))  # rotated and concatenated again
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
        """Replay torch's attention without a fused kernel, which keeps all scores in float32."""
        tape, wide = self.tape, 4 / self.w
        scores = self.wide(self.shape.heads * self.keys)
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
