"""Predict a step of decoding, in which a model makes one token of each of B sequences, by two sums and no more.

    bytes       weights once a step, and the KV cache of every sequence once
    products    2 FLOPs a parameter that a token passes, and attention over the keys of its sequence
    step        max(bytes / bandwidth, products at their rates) + launches, where their cost is known

This is the roofline of generation (Pope et al., arXiv 2211.05102, section 2.1), whose two sums overlap in full; kernels that run
one after the other take up to twice as long. Weights are read as they are held: a kernel that decodes stored codes within its
product is assumed, and tensors of a single token, which are small beside weights, are left out.

Both sums grow with B, but the weights' bytes do not: decoding turns from bytes to products at the B where both times are equal,

    (W + B kv) / bandwidth = B p        B = W / (bandwidth p - kv)

W bytes of weights, kv bytes of one sequence's cache, p the time of one token's products. There is no such B where reading a
sequence's cache takes at least as long as its token's products. Of E experts a batch reads those that any of its tokens is routed
to, E (1 - (1 - k/E)^B) where each token's k are drawn at random; W grows with B then. The equation W(B) = B x still has one
solution for x > 0, because W(B) - B x is concave, and positive at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from surokit.planner.counts.flops import placements
from surokit.planner.counts.memory import DTYPE_BYTES, Term, stored_bytes
from surokit.planner.inputs.shape import Shape
from surokit.planner.times.roofline import Estimate, KernelRow


@dataclass(frozen=True)
class Decoding:
    """A Decoding holds what a step asks for: bytes of weights that every step reads and bytes of all experts, bytes of one
    sequence's KV cache at its mean length, FLOPs and milliseconds of one token's products, and launches.

    `idle` is the share of the experts that a token does not pass, 1 without experts. `estimate` is that of a forward of one token,
    in rows: it has the rates, and says what launching adds.
    """

    dense_bytes: float
    expert_bytes: float
    idle: float
    kv_bytes: float
    token_flop: float
    token_ms: float
    launches: float
    estimate: Estimate

    def weight_bytes(self, batch: float) -> float:
        """Return the bytes of weights that a step of `batch` sequences reads: of experts those that are expected to be chosen."""
        return self.dense_bytes + self.expert_bytes * (1 - self.idle**batch)

    def bytes(self, batch: float) -> float:
        """Return the bytes that a step of `batch` sequences reads."""
        return self.weight_bytes(batch) + batch * self.kv_bytes

    def memory_ms(self, batch: float) -> float:
        """Return the milliseconds that the bytes of a step take."""
        return self.bytes(batch) / self.estimate.rates.bandwidth_tb_s / 1e9

    def products_ms(self, batch: float) -> float:
        """Return the milliseconds that the products of a step take."""
        return batch * self.token_ms

    def step(self, batch: int) -> Estimate:
        """Estimate a step of `batch` sequences as a single kernel with all launches, so that launches count as in any estimate."""
        us = self.estimate.rates.launch_us
        row = KernelRow(
            module="decoding",
            group="products",
            step="forward",
            part="decoding",
            count=1,
            flop=batch * self.token_flop,
            bytes=self.bytes(batch),
            launches=self.launches,
            compute_ms=self.products_ms(batch),
            memory_ms=self.memory_ms(batch),
            launch_ms=None if us is None else self.launches * us / 1e3,
        )
        return replace(self.estimate, rows=(row,), tokens=batch)

    def binds(self, batch: int) -> Literal["bytes", "products", "launches"]:
        """Say what a step of `batch` sequences waits for most."""
        found = self.step(batch).binds
        return "launches" if found == "launch" else "bytes" if found == "memory" else "products"

    @property
    def turning_batch(self) -> float | None:
        """Return the batch at which bytes and products take equally long; None where products never do.

        Experts make W depend on the batch: it is put in again and again, from all of them on, and the batch falls to the solution.
        """
        rate = self.estimate.rates.bandwidth_tb_s * 1e9  # bytes a millisecond
        spare = rate * self.token_ms - self.kv_bytes
        if spare <= 0:
            return None
        batch = (self.dense_bytes + self.expert_bytes) / spare
        for _ in range(1000):
            before, batch = batch, self.weight_bytes(batch) / spare
            if before - batch <= 1e-12 * before:
                break
        return batch


def decoding(
    shape: Shape, recipe: Any, dtype: str, weights: Iterable[Term], kv_bytes: float, one: Estimate
) -> Decoding:
    """Return what a step of decoding asks for, from `weights` as memory holds them, and `one`, the estimate of a forward of one
    token whose attention sees the keys of its sequence."""
    width, storage = DTYPE_BYTES[dtype], getattr(recipe, "storage", None)
    experts = 0.0
    for place in placements(shape, recipe):
        w = place.weight
        if w.kind == "expert":
            stored = place.quantized if storage is not None else 0
            experts += stored * stored_bytes(storage, w.n, w.k) if stored else 0.0
            experts += ((w.count - stored) * w.n * w.k + place.adapter_parameters) * width
    # an embedding of its own is only looked up: a step reads a row of it for each sequence
    read = sum(term.bytes for term in weights) - shape.lookup_parameters * width
    absorbed = _absorbed(shape)
    rows = [(row, absorbed if row.group == "attention" else 1.0) for row in one.rows]
    return Decoding(
        dense_bytes=read - experts,
        expert_bytes=experts,
        idle=shape.experts.idle / shape.experts.count if shape.experts else 1.0,
        kv_bytes=kv_bytes,
        token_flop=sum(row.flop * times for row, times in rows),
        token_ms=sum(row.compute_ms * times for row, times in rows),
        launches=sum(row.launches for row in one.rows if row.part != "decode"),
        estimate=one,
    )


def _absorbed(shape: Shape) -> float:
    """Return how many times as many FLOPs attention takes over a cached latent as over expanded heads.

    Every head multiplies the latent itself, the projections being absorbed into query and output (DeepSeek-V2, arXiv 2405.04434,
    section 2.1.2); projections of one token take the same either way.
    """
    if (m := shape.latent) is None:
        return 1.0
    return (2 * m.kv_rank + m.rope) / (shape.head_dim + shape.value_dim)
