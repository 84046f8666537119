"""Divide a model over GPUs: what one GPU holds and computes of it, and what it exchanges with the others between the layers.

    tensor      t GPUs share each layer: heads, the feed-forward's inner width and the vocabulary are divided by t, and between
                these products the tokens (tensor and sequence parallelism, arXiv 2205.05198)
    pipeline    p GPUs have layers / p each, one after the other, and compute micro-batches in the order 1F1B (arXiv 2104.04473):
                with m of them a step takes 1 + (p - 1) / m times as long as its micro-batches do, and the first GPU keeps the
                activations of p micro-batches;
                where each has its layers in v parts (interleaved), the pipeline fills v times as fast, the first GPU keeps
                (p - 1) / v micro-batches more, and the last ((v - 1) p + 1) / v
    expert      e GPUs have 1 / e of each layer's experts, and send each token to those of its experts (arXiv 2006.16668); they are
                among the data-parallel ones, so that a gradient of an expert is summed over 1 / e of these

GPUs that share a model are taken to be of one node where so many fit; then the data-parallel ones spread over nodes.
The others, gpus / (t p), are data-parallel. Tokens are taken to be spread over the experts evenly.

Bytes that a GPU sends for a micro-batch of T tokens, width d and w bytes an element, with k experts a token:

    tensor      (t-1)/t T d w: gathered before, scattered after attention and feed-forward, 4 a layer in forward and 4 in backward,
                which gathers both inputs once more for the gradients of the weights; the embedding scatters, the head gathers; of
                routed tokens k times as many are gathered and scattered
    expert      (e-1)/e T k d w / t: to the experts and back, 2 a layer in forward and 2 in backward
    pipeline    v T d w / t to the next stage, and as much back
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surokit.planner.counts.flops import Recompute
from surokit.planner.inputs.shape import Shape


@dataclass(frozen=True)
class Exchange:
    """An Exchange holds what a GPU sends between layers in a step: bytes, and their ms in forward and backward, None where a rate
    is not known."""

    bytes: float = 0.0
    forward_ms: float | None = 0.0
    backward_ms: float | None = 0.0
    how: str = ""


NO_EXCHANGE = Exchange()


@dataclass(frozen=True)
class Again:
    """An Again holds the shares of what layers send in forward that backward sends again: around attention, around the
    feed-forward, and to experts."""

    attention: float = 0.0
    feed_forward: float = 0.0
    experts: float = 0.0


def sent_again(repeats: Recompute, blocks: float, early_stop: bool) -> Again:
    """Return what backward sends again where a share of the blocks is computed again; an early stop leaves out what a block ends
    with."""
    ends = 0.5 if early_stop else 1.0
    if repeats == "full":
        return Again(blocks, blocks * ends, blocks)
    return Again(0.0, blocks * ends, blocks) if repeats == "mlp" else Again()


@dataclass(frozen=True)
class Division:
    """A Division says over how many GPUs tensors, layers and experts of a model are divided; 1 leaves them whole."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1

    @property
    def divides(self) -> bool:
        return self != WHOLE

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that have one model together; experts are spread over several of these."""
        return self.tensor * self.pipeline

    @property
    def words(self) -> str:
        """Say over how many GPUs what is divided."""
        degrees = (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert))
        said = " and ".join(f"{name} parallel over {n} GPUs" for name, n in degrees if n > 1)
        return (f"{said} in {self.virtual} virtual stages" if self.virtual > 1 else said).strip()

    def stages(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the stages of the pipeline with one GPU's experts, in order: the last has the head, and sets the pace."""
        if (e := shape.experts) is not None:
            shape = replace(shape, experts=replace(e, here=e.count // self.expert))
        if self.tensor > shape.kv_heads:  # several GPUs have the same keys and values
            shape = replace(shape, kv_heads=self.tensor)
        if self.pipeline == 1:
            return (shape,)
        n = -(-shape.layers // self.pipeline)
        first, last = _layers_from(shape, 0, n), _layers_from(shape, shape.layers - n, n)
        between = (_layers_from(shape, start, n) for start in range(n, shape.layers - n, n))
        return (
            replace(first, has_head=False),
            *(replace(stage, has_embedding=False, has_head=False) for stage in between),
            replace(last, has_embedding=False),
        )

    def narrow(self, stage: Shape) -> Shape:
        """Return one GPU's part of a stage's tensors."""
        t = self.tensor
        e = stage.experts
        return replace(
            stage,
            heads=stage.heads // t,
            kv_heads=max(1, stage.kv_heads // t),
            ffn=-(-stage.ffn // t),
            vocab=-(-stage.vocab // t),
            experts=None if e is None else replace(e, ffn=-(-e.ffn // t), shared_ffn=-(-e.shared_ffn // t)),
        )

    def in_flight(self, stage: Shape, micro_batches: int) -> float:
        """Return how many micro-batches' activations a stage keeps at a time."""
        p, v = self.pipeline, self.virtual
        behind = 0 if stage.has_head else p - 1 - stage.first // stage.layers
        # of an interleaved pipeline, all parts but the last wait for the first backward
        return min(((v - 1) * p + 2 * behind + 1) / v if v > 1 else behind + 1, micro_batches)

    def fill(self, micro_batches: int) -> float:
        """Return how many times as long as its micro-batches a step takes, while the pipeline fills and empties."""
        return 1 + (self.pipeline - 1) / micro_batches / self.virtual

    def exchange(
        self,
        stage: Shape,
        tokens: int,
        width: int,
        *,
        again: Again,
        weight_gradients: bool,
        peer_gb_s: float | None,
        between_gb_s: float | None,
        gpus_a_node: int,
    ) -> Exchange:
        """Count what a GPU sends between layers for `tokens`, those of all micro-batches of a step, and its time.

        stage       of whole width; width: bytes an element; again: what backward sends once more
        rates are in GB/s, within a node and of one GPU between nodes
        """
        t, e, p = self.tensor, self.expert, self.pipeline
        row = float(tokens * stage.width * width)
        once, head, words = (t - 1) / t * row, int(stage.has_head), int(stage.has_embedding)
        routed, chosen = len(stage.expert_layers), stage.experts.chosen if stage.experts is not None else 0
        # a layer's collectives around attention, and around the feed-forward
        inner, outer = 2.0 * stage.layers, 2.0 * (stage.layers - routed + routed * chosen)
        regathered = (inner + outer) / 2 + head if weight_gradients else 0.0
        repeated = again.attention * inner + again.feed_forward * outer
        sends = (e - 1) / e * row * chosen / t * routed * 2
        # (GPUs that exchange, bytes in forward, bytes in backward)
        parts = (
            (t, (inner + outer + head + words) * once, (inner + outer + repeated + head + words + regathered) * once),
            (t * p * e, sends, sends * (1 + again.experts)),
            (t * p, (p > 1) * self.virtual * row / t, (p > 1) * self.virtual * row / t),
        )
        sent = forward = backward = 0.0
        unknown = ""
        for group, down, up in parts:
            if not down:
                continue
            sent += down + up
            rate = peer_gb_s if group <= gpus_a_node else between_gb_s
            if rate is None:
                within = group <= gpus_a_node
                unknown = "between GPUs is not known: give Gpu(peer_gb_s=)" if within else ""
                unknown = unknown or "between nodes is not known: give between_gb_s="
                continue
            forward, backward = forward + down / rate / 1e6, backward + up / rate / 1e6
        if unknown:
            return Exchange(sent, None, None, f"the rate {unknown}")
        return Exchange(sent, forward, backward, f"between layers, divided by {self.words}" if sent else "")


#: One GPU has the whole model.
WHOLE = Division()


def _layers_from(shape: Shape, start: int, n: int) -> Shape:
    """Return a shape that has only `n` layers, from `start` on."""

    def own(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - start for i in layers if start <= i < start + n)

    e, windows = shape.experts, shape.window_layers
    return replace(
        shape,
        layers=n,
        first=start,
        blocks=shape.layers,
        window_layers=None if windows is None else own(windows),
        experts=replace(e, layers=own(e.layers)) if e is not None and own(e.layers) else None,
    )
