"""Replay the memory of a fused forward and backward (surokit/nn/stages.py), as activations.py does for layers.

A stage takes the place of the layers that read one tensor, and is one operation of autograd. It keeps the residual stream that its
norm reads and a float32 a row, or gate and up. It keeps x itself where a gradient of an adapter or of an unquantized weight reads
it, unless x is computed again (recompute "selective"), and the codes of x once for all its layers where gradients of quantized
weights read these. Its backward holds the gradients of all its outputs until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from surokit.planner.counts.activations import NORM_ELEMENTS, BlockKind, Ours
from surokit.planner.counts.tape import Value

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


class FusedLayers(Ours):
    """FusedLayers stands for the layers of surokit/models/decoder.py with a fusion."""

    def block(self, x: Value, kind: BlockKind) -> Value:
        tape, s = self.tape, self.shape
        size = self.of(s.width)
        y = self.attention(x, kind)
        tape.also(self.small if self.trains else 0.0)
        stream = tape.run((x, y), size, passes=True, drops=(x, y))
        stream.holders += 1
        out = self.feed(stream, kind)
        return tape.run((stream, out), size, passes=True, drops=(stream, out))

    def attention(self, x: Value, kind: BlockKind) -> Value:
        s, tape = self.shape, self.tape
        parts = self.normed(x, _QKV, self.widths, kind)
        turned = [self.of(s.query_width), self.of(s.kv_width)]
        row = self.tokens * (s.heads + s.kv_heads) * 4.0 if s.qk_norm else 0.0
        weight = 2 * s.head_dim * self.w if s.qk_norm and self.trains else 0.0
        if not self.step.fusion.qk:
            if len(parts) == 1:  # one tensor under three names
                parts[0].holders += 2
            q, k, v = parts if len(parts) == 3 else parts * 3
            if s.qk_norm:
                q, k = self._pair(lambda z, heads: self.norm(z, s.head_dim, keep_name=True, heads=heads), q, k)
            q, k = self._pair(lambda z, heads: tape.run((z,), self.of(heads * s.head_dim)), q, k)
        elif len(parts) == 1:
            v_bytes = self.of(s.kv_width)
            # with norms v stays a view of the product's output, which is kept; its gradient is a tensor of its own
            shared = v_bytes if s.qk_norm else 0.0
            q, k, v = tape.run_many(
                parts,
                [*turned, v_bytes - shared],
                keeps=parts if s.qk_norm else (),
                extra=row,
                weight=weight,
                back_scratch=shared,
                drops=parts,
            )
        else:
            *raw, v = parts
            kept = raw if s.qk_norm else []
            q, k = tape.run_many(raw, turned, keeps=kept, extra=row, weight=weight, drops=raw)
        y = self._attend(q, k, v, kind.masked)
        for value in (q, k, v):
            tape.drop(value)
        (out,) = self.stage((y,), ("self_attn.o_proj",), (s.width,), self.context, kind)
        tape.drop(y)
        return out

    def mlp(self, x: Value, kind: BlockKind) -> Value:
        s = self.shape
        parts = self.normed(x, _GATED, (s.ffn, s.ffn), kind)
        source = "gate" if self.step.fusion.gate else ""
        inputs = parts if source else (self.tape.run(parts, self.of(s.ffn), keeps=parts),)
        (out,) = self.stage(inputs, ("mlp.down_proj",), (s.width,), s.ffn, kind, source=source)
        for part in {*parts, *inputs}:
            self.tape.drop(part)
        self.tape.drop(x)
        return out

    def normed(self, x: Value, names: Sequence[str], sizes: Sequence[int], kind: BlockKind) -> tuple[Value, ...]:
        width = self.shape.width
        if self.step.fusion.norm:
            return self.stage((x,), names, sizes, width, kind, source="norm")
        h = self.norm(x, width, keep_name=True)
        parts = self.stage((h,), names, sizes, width, kind)
        self.tape.drop(h)
        return parts

    def stage(
        self,
        inputs: tuple[Value, ...],
        names: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        kind: BlockKind,
        source: str = "",
    ) -> tuple[Value, ...]:
        """Replay as one operation the layers `names`, of `sizes` output features, that read one input of `columns` features.

        `source` is what the operation computes the input from: "norm", "gate", or "" where it is `inputs` itself.
        """
        adapters = [self.places[name].rank if name in kind.adapted else 0 for name in names]
        quantizes = [name in kind.quantized and self.recipe is not None for name in names]
        x_t = getattr(getattr(self.recipe, "grad_weight", None), "b", None)
        ranks = sum(adapters)
        # x as numbers, for a gradient: of an adapter, or of a weight that no product quantizes
        later = ranks > 0 or (self.trains and (x_t is None or not all(quantizes)))
        again = self.step.recompute == "selective" and bool(source)
        x = self.of(columns)
        keeps = inputs if source or later else ()
        extra = float(self.tokens * ranks * self.w)
        if source == "norm":
            extra += self.tokens * 4.0
        if source and later and not again:
            extra += x
        if any(quantizes) and self.trains and x_t is not None:
            extra += float(x_t.nbytes(columns, self.tokens))
        weight = sum(n * columns for n in sizes) * self.w if self.trains else 0.0
        weight += sum(rank * (n + columns) for rank, n in zip(adapters, sizes)) * self.w
        weight += columns * self.w if source == "norm" and self.trains else 0.0
        products = [sum(sizes)] if self.joins(names, sizes, kind) else list(sizes)
        forward = back = 0.0
        if any(quantizes) and (getattr(self.recipe, "storage", None) is not None or self.recipe.quantized_products):
            for n in products:
                f, b = self.temporaries(n, columns, self.tokens)
                forward, back = max(forward, f), max(back, b)
        buffer = 4.0 * min(self.tokens * columns, NORM_ELEMENTS) if self.on_cpu and source == "norm" else 0.0
        passing = x if source and not (later and not again) else 0.0
        # in backward: the gradient of x, and x again
        into = (x if source else 0.0) + (x if later and again else 0.0)
        return self.tape.run_many(
            inputs,
            [self.of(n) for n in products],
            keeps=keeps,
            extra=extra,
            weight=weight,
            scratch=passing + max(forward, buffer),
            back_scratch=into + max(back, 3 * buffer),
        )

    def joins(self, names: Sequence[str], sizes: Sequence[int], kind: BlockKind) -> bool:
        """True if these layers are computed as one product."""
        quantized = [name in kind.quantized for name in names]
        if not self.step.fusion.joint or len(names) == 1 or len(set(quantized)) > 1:
            return False
        gemm = getattr(self.recipe, "forward", None)
        if not quantized[0]:
            return True
        storage, b = getattr(self.recipe, "storage", None), getattr(gemm, "b", None)
        return (storage is None or storage.separates(0, sizes)) and (b is None or b.joins(0, sizes))
