"""A Shape describes a decoder by the numbers that decide FLOPs and bytes, and lists its matrices.

One description covers the families that configs.py reads: attention with grouped queries or over a compressed latent (DeepSeek-V2,
arXiv 2405.04434), feed-forward of three matrices or two, dense or routed to a few of many experts, with or without biases, norms
of queries and keys, sliding windows, learned positions. Every matrix says what it reads and writes, so that flops.py can follow
where gradients flow. Everything is counted as transformers builds the model; no model code is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

#: A matrix belongs to a "linear" layer, which recipes reach; to one "expert" of many, each taken as linear layers of its own;
#: to an "other" parameter or module, which recipes do not reach (a router, GPT-2's Conv1D); or it is the output matrix ("head").
Kind = Literal["linear", "expert", "other", "head"]


@dataclass(frozen=True)
class Weight:
    """A Weight is one kind of weight matrix [n, k], present `count` times, of which a token passes `active` (all without a router).

    `layers` are the blocks that have it, all the same number; of a stage of a pipeline they are counted from the model's block
    `first`. `reads` names the tensor that it multiplies, which weights of one input share; `writes` names the tensors that its
    output goes into.
    """

    name: str
    n: int
    k: int
    count: int
    active: int = -1
    layers: tuple[int, ...] = ()
    reads: str = ""
    writes: tuple[str, ...] = ()
    kind: Kind = "linear"
    first: int = 0

    def __post_init__(self) -> None:
        if self.active < 0:
            object.__setattr__(self, "active", self.count)

    @property
    def parameters(self) -> int:
        return self.n * self.k * self.count

    @property
    def a_layer(self) -> int:
        """Return how many of these matrices one block has."""
        return self.count // (len(self.layers) or 1)

    @property
    def active_a_layer(self) -> int:
        """Return how many of one block's matrices a token passes."""
        return self.active // (len(self.layers) or 1)

    def path(self, layer: int) -> str:
        """Return the full module name in block `layer`, which a recipe's rules match; the first expert stands for all."""
        name = self.name.replace("experts.", "experts.0.") if self.kind == "expert" else self.name
        return f"model.layers.{self.first + layer}.{name}"


@dataclass(frozen=True)
class Experts:
    """An Experts describes the routed experts of the blocks `layers`: `count` in each, of inner width `ffn`; a token passes
    `chosen` of them.

    `shared_ffn` is the inner width of the shared experts that every token passes too (0 without), `shared_gate` says whether a gate
    weighs them. `here` is how many of a block's experts one GPU has, all of them without it.
    """

    count: int
    chosen: int
    ffn: int
    layers: tuple[int, ...]
    shared_ffn: int = 0
    shared_gate: bool = False
    bias: bool = False
    router: str = "gate"
    shared: str = "shared_experts"
    here: int = 0

    def __post_init__(self) -> None:
        if not self.here:
            object.__setattr__(self, "here", self.count)

    @property
    def idle(self) -> int:
        """Return the number of a block's experts that a token does not pass."""
        return self.count - self.chosen


@dataclass(frozen=True)
class Latent:
    """A Latent describes attention over a compressed latent (MLA), by the ranks of the query's latent (None: not compressed) and
    of the key-values'.

    A head's query and key have `nope` elements without position and `rope` with, its value has `value`.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Shape:
    """A Shape holds the sizes of a decoder.

    `width` is the hidden size, `ffn` the inner size of a dense feed-forward, `kv_heads` the key and value heads of grouped-query
    attention, `head_dim` the width of a head's query and key. `sliding_window` holds in the blocks `window_layers` (None: in
    all). `norms` is the number of a block's norms over `width`. `layout` says which matrices are one: "split" none, "fused" q, k,
    v and gate, up (Phi-3), "gpt2" q, k, v. `positions` is the number of learned positions. A stage of a
    pipeline may have no embedding, or no head; its layers are those from `first` on of a model of `blocks` (0: it is no stage).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    family: str = "llama"
    window_layers: tuple[int, ...] | None = None
    layout: Literal["split", "fused", "gpt2"] = "split"
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    sinks: bool = False
    positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    has_embedding: bool = True
    has_head: bool = True
    first: int = 0
    blocks: int = 0

    @property
    def words(self) -> str:
        """Say the sizes in a line."""
        over = f"a latent of {self.cache_width}" if self.latent else self.kv_heads
        said = f"{self.layers} layers, width {self.width}, {self.heads} heads over {over}, ffn {self.ffn}"
        if (e := self.experts) is not None:
            blocks = "" if len(e.layers) == self.layers else f" in {len(e.layers)} of them"
            shared = f" and {e.shared_ffn} shared" if e.shared_ffn else ""
            said += f", {e.count} experts of {e.ffn}{blocks}, {e.chosen} a token{shared}"
        return f"{said}, vocabulary {self.vocab}" + (", tied" if self.tied else "")

    # -- widths

    @property
    def query_width(self) -> int:
        """Return heads x head_dim, the width of attention's products (d_attn)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Return the width of a head's value, and of its output."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def context_width(self) -> int:
        """Return heads x value_dim: attention's output, which the output projection reads."""
        return self.heads * self.value_dim

    @property
    def cache_width(self) -> int:
        """Return the elements of the KV cache a token and layer: keys and values, or the latent that both are made of."""
        return (
            self.latent.kv_rank + self.latent.rope if self.latent else self.kv_heads * (self.head_dim + self.value_dim)
        )

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the blocks whose feed-forward is routed."""
        return self.experts.layers if self.experts else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Return the blocks whose feed-forward is dense: every token passes it."""
        routed = set(self.expert_layers)
        return tuple(i for i in range(self.layers) if i not in routed)

    def window_of(self, layer: int) -> int | None:
        """Return the most keys that a query of block `layer` sees; None where it sees everything before it."""
        return self.sliding_window if self.window_layers is None or layer in self.window_layers else None

    def ffn_of(self, layer: int) -> int:
        """Return the inner width of the feed-forward that a token passes in block `layer`, summed over chosen and shared
        experts."""
        e = self.experts
        return self.ffn if e is None or layer not in e.layers else e.chosen * e.ffn + e.shared_ffn

    # -- matrices

    @property
    def projections(self) -> tuple[Weight, ...]:
        """Return the matrices of the blocks in the order in which data flows; recipes quantize them, and adapters go on them."""
        found = (*self._attention(), *self._feed_forward())
        return tuple(replace(weight, first=self.first) for weight in found) if self.first else found

    def _attention(self) -> Iterator[Weight]:
        d, q, kv, every = self.width, self.query_width, self.kv_width, tuple(range(self.layers))
        normed, out = "attention", "self_attn.o_proj"

        def weight(name: str, n: int, k: int, reads: str, *writes: str, kind: Kind = "linear") -> Weight:
            return Weight(name, n, k, self.layers, layers=every, reads=reads, writes=writes, kind=kind)

        if self.latent:
            m = self.latent
            if m.query_rank is None:
                yield weight("self_attn.q_proj", q, d, normed, "query")
            else:
                yield weight("self_attn.q_a_proj", m.query_rank, d, normed, "query latent")
                yield weight("self_attn.q_b_proj", q, m.query_rank, "query latent", "query")
            yield weight("self_attn.kv_a_proj_with_mqa", m.kv_rank + m.rope, d, normed, "kv latent", "key")
            yield weight("self_attn.kv_b_proj", self.heads * (m.nope + m.value), m.kv_rank, "kv latent", "key", "value")
        elif self.layout == "split":
            yield weight("self_attn.q_proj", q, d, normed, "query")
            yield weight("self_attn.k_proj", kv, d, normed, "key")
            yield weight("self_attn.v_proj", kv, d, normed, "value")
        elif self.layout == "fused":
            yield weight("self_attn.qkv_proj", q + 2 * kv, d, normed, "query", "key", "value")
        else:
            yield weight("attn.c_attn", q + 2 * kv, d, normed, "query", "key", "value", kind="other")
            out = "attn.c_proj"
        yield weight(
            out, d, self.context_width, "context", "stream", kind="other" if self.layout == "gpt2" else "linear"
        )

    def _feed_forward(self) -> Iterator[Weight]:
        if self.layout == "gpt2":
            names = {"up": "c_fc", "down": "c_proj"}
            yield from self._mlp("mlp", self.ffn, self.dense_layers, names, kind="other")
        else:
            yield from self._mlp("mlp", self.ffn, self.dense_layers)
        if (e := self.experts) is None:
            return
        routed = len(e.layers)
        yield Weight(
            f"mlp.{e.router}",
            e.count,
            self.width,
            routed,
            layers=e.layers,
            reads="mlp",
            writes=("stream",),
            kind="other",
        )
        yield from self._mlp("mlp.experts", e.ffn, e.layers, kind="expert", count=e.here, active=e.chosen)
        if e.shared_ffn:
            yield from self._mlp(f"mlp.{e.shared}", e.shared_ffn, e.layers)
        if e.shared_gate:
            name = f"mlp.{e.shared}_gate"
            yield Weight(name, 1, self.width, routed, layers=e.layers, reads="mlp", writes=("stream",))

    def _mlp(
        self,
        root: str,
        ffn: int,
        layers: tuple[int, ...],
        names: dict[str, str] | None = None,
        kind: Kind = "linear",
        count: int = 1,
        active: int = 1,
    ) -> Iterator[Weight]:
        """Yield the matrices of a feed-forward of inner width `ffn`, `count` in each of `layers`."""
        if not layers:
            return
        names = names or {"gate": "gate_proj", "up": "up_proj", "fused": "gate_up_proj", "down": "down_proj"}
        inner = f"{root} product"
        first = (
            [("up", ffn)]
            if not self.gated
            else [("fused", 2 * ffn)]
            if self.layout == "fused"
            else [("gate", ffn), ("up", ffn)]
        )
        sizes = [(name, n, self.width, "mlp", inner) for name, n in first]
        for name, n, k, reads, writes in (*sizes, ("down", self.width, ffn, inner, "stream")):
            yield Weight(
                f"{root}.{names[name]}",
                n,
                k,
                count * len(layers),
                active * len(layers),
                layers=layers,
                reads=reads,
                writes=(writes,),
                kind=kind,
            )

    @property
    def head(self) -> Weight:
        """Return the output matrix; the embedding itself where they are tied."""
        return Weight("lm_head", self.vocab, self.width, 1, reads="stream", kind="head")

    # -- parameters

    @property
    def projection_parameters(self) -> int:
        return sum(w.parameters for w in self.projections)

    @property
    def matrices_of_words(self) -> int:
        """Return the number of matrices of vocabulary x width: embedding and head, one where they are tied."""
        return self.has_embedding + self.has_head - (self.tied and self.has_embedding and self.has_head)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.width

    @property
    def lookup_parameters(self) -> int:
        """Return the number of parameters that are only looked up: learned positions, and the embedding unless the head is tied."""
        return self.positions * self.width + (0 if self.tied else self.embedding_parameters)

    @property
    def small_parameters(self) -> int:
        """Return the number of parameters in norms, biases and attention sinks."""
        return sum(map(self.small_of, range(self.layers))) + self._norm

    @property
    def _norm(self) -> int:
        return self.width * (2 if self.norm_bias else 1)

    def small_of(self, layer: int) -> int:
        """Return the number of parameters in one block's norms, biases and attention sinks."""
        found = self.norms * self._norm + (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)
        if self.latent:
            rank = self.latent.query_rank or 0
            found += rank + self.latent.kv_rank
            found += rank + self.latent.kv_rank + self.latent.rope if self.qkv_bias else 0
        elif self.qkv_bias:
            found += self.query_width + 2 * self.kv_width
        found += self.width if self.o_bias else 0
        if (e := self.experts) is None or layer not in e.layers:
            return found + ((2 if self.gated else 1) * self.ffn + self.width if self.mlp_bias else 0)
        found += e.here * self._expert_bias + e.count if e.bias else 0
        return found + (2 * e.shared_ffn + self.width if self.mlp_bias and e.shared_ffn else 0)

    @property
    def _expert_bias(self) -> int:
        """Return the number of bias elements of one routed expert."""
        return 2 * self.experts.ffn + self.width if self.experts and self.experts.bias else 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, a tied matrix counted once."""
        embeddings = self.matrices_of_words * self.embedding_parameters
        embeddings += self.positions * self.width * self.has_embedding
        return self.projection_parameters + embeddings + self.small_parameters

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that a token passes, the N of 6ND: all but those of experts it is not routed to."""
        if self.experts is None:
            return self.parameters
        idle = sum(w.n * w.k * (w.count - w.active) for w in self.projections)
        return self.parameters - idle - len(self.expert_layers) * self.experts.idle * self._expert_bias


#: The families whose layers are counted as our own Decoder builds them (surokit/models/config.py, which needs torch), and its own
#: name. It builds Mixtral and Qwen3-MoE too: their layers are counted as those of transformers.
BUILT_HERE = ("llama", "mistral", "qwen2", "qwen3", "decoder")


def built_here(shape: Shape) -> bool:
    """True if our own layers are counted for such a shape; otherwise transformers' are."""
    return shape.family in BUILT_HERE
