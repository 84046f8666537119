"""Predict bytes, memory and time of a step whose blocks' weights stay on the host (surokit.offload_weights), by formulas.

    up      (2 sum of W - those of the last min(L, p+1)) bytes of a micro-batch: forward and backward fetch each block, and
            backward begins with the blocks that forward ended with; a forward alone fetches each once
    down    L G: gradients of parameters that train in the blocks; nothing where an adapter trains, which stays on the device
    step    max(C, up/B, down/B) + (W + G)/B + the host's AdamW of the N parameters that train in the blocks, N/r

L blocks of W bytes, stored as the recipe says, p of them fetched ahead; G bytes of a block's gradients; C the compute time of a
step, in which each block is computed once again; B the link's rate in one direction, r the host's rate of AdamW. Three things
overlap with nothing: the first block of a forward, the gradients of the last block of backward, and surokit.AdamW's update on the
host. Further micro-batches add to gradients on the host, at its rate of adding up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surokit import units
from surokit.planner.counts.flops import Placement
from surokit.planner.inputs.shape import Shape
from surokit.planner.offload.formulas import GIB, Host
from surokit.tables import html_table, text_table

if TYPE_CHECKING:
    from surokit.planner.counts.flops import Trained

#: Blocks whose gradients the device has at a time: one is made, one read by the link, one staged.
GRADIENT_BLOCKS = 3


@dataclass(frozen=True)
class Blocks:
    """A Blocks holds the blocks that are streamed: the bytes of each one's weights as they are stored, and its parameters that
    train."""

    bytes: tuple[float, ...]
    trained: tuple[int, ...]

    def resident(self, prefetch: int) -> float:
        """Return the bytes of the largest prefetch + 1 blocks in a row."""
        n = min(len(self.bytes), prefetch + 1)
        return max(sum(self.bytes[i : i + n]) for i in range(len(self.bytes) - n + 1))

    def up(self, prefetch: int, *, training: bool = True) -> float:
        """Return the bytes that one micro-batch fetches: forward and backward, or a forward alone without training."""
        once = sum(self.bytes)
        return 2 * once - sum(self.bytes[-(prefetch + 1) :]) if training else once


def read_blocks(
    shape: Shape, recipe: Any, places: Sequence[Placement], width: int, *, base_trains: bool, trained: Trained | None
) -> Blocks:
    """Return the blocks of a shape, weights in the recipe's storage or of `width` bytes an element; adapters are not streamed."""
    storage: Any = getattr(recipe, "storage", None)
    if trained is not None and trained.parameters < shape.parameters:
        base_trains = False  # beside frozen matrices, what trains stays on the device
    sizes, counts = [], []
    for layer in range(shape.layers):
        size, count = shape.small_of(layer) * width, shape.small_of(layer)
        for place in places:
            w = place.weight
            if layer in w.layers:
                stored = storage is not None and layer in place.layers
                size += w.a_layer * (storage.nbytes(w.n, w.k) if stored else w.n * w.k * width)
                count += w.a_layer * w.n * w.k
        sizes.append(float(size))
        counts.append(count * base_trains)
    return Blocks(tuple(sizes), tuple(counts))


@dataclass(frozen=True, repr=False)
class Streamed:
    """A Streamed holds predicted bytes and times of a step with streamed weights on one GPU, by a formula and not measured.

    bytes_up, bytes_down    over the link in a step; `block_bytes` are the largest block's
    compute_ms      time of a step in which blocks are computed `again`, as in training; link_ms that of the link's busier direction
    exposed_ms      time of the link that does not overlap with compute; adam_ms that of the host's AdamW
    kind            of the times, "prediction", "likely" or "optimistic"; rates says what they are based on, "" for rates that were
                    given
    gpu_gib, host_gib   memory of one GPU at the step's fullest moment, and of the host; fits: whether the GPU has it, None where
                    that is not known
    """

    name: str
    prefetch: int
    blocks: int
    block_bytes: float
    bytes_up: float
    bytes_down: float
    compute_ms: float
    link_ms: float
    exposed_ms: float
    adam_ms: float
    gpu_gib: float
    host_gib: float
    fits: bool | None
    host: Host
    again: bool = True
    kind: str = "prediction"
    rates: str = ""

    @property
    def step_ms(self) -> float:
        return max(self.compute_ms, self.link_ms) + self.exposed_ms + self.adam_ms

    @property
    def binds(self) -> str:
        """Say what a step mostly waits for: compute, link or AdamW."""
        waits = {"compute": self.compute_ms, "link": self.link_ms, "AdamW": self.adam_ms}
        return max(waits, key=lambda name: waits[name])

    def _title(self) -> str:
        what = f"{self.blocks} blocks streamed, {self.prefetch} ahead ({self.name})"
        step, bound = f"{what}: a step of {_ms(self.step_ms)}", f", bound by {self.binds}"
        if self.kind == "prediction":
            return f"{step} is predicted{bound}"
        return f"{step} ({self.kind}: {self.rates.partition(';')[0]}){bound}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        gpu = {True: "fits", False: "does not fit", None: ""}[self.fits]
        limit = self.host.memory_gib
        host = "" if limit is None else "fits" if self.host_gib <= limit else f"more than {units.gib(limit)}"
        yield "GPU", units.gib(self.gpu_gib), gpu
        yield "host", units.gib(self.host_gib), host
        yield "a block", units.gib(self.block_bytes / GIB), ""
        yield "up", units.gib(self.bytes_up / GIB), "a step"
        yield "down", units.gib(self.bytes_down / GIB), "a step"
        yield "compute", _ms(self.compute_ms), "blocks are computed again" if self.again else ""
        yield "link", _ms(self.link_ms), "beside it"
        yield (
            "exposed",
            _ms(self.exposed_ms),
            "the first block up" + ", the last gradients down" * (self.bytes_down > 0),
        )
        if self.adam_ms:
            yield "AdamW", _ms(self.adam_ms), "on the host, after backward"

    def __repr__(self) -> str:
        return "\n".join([self._title(), text_table([*self._rows()], right=(1,))])

    def _repr_html_(self) -> str:
        return html_table([*self._rows()], right=(1,), title=self._title())


def predict_streamed(
    blocks: Blocks,
    host: Host,
    *,
    compute_ms: float,
    prefetch: int = 1,
    width: float = 2,
    accumulate: int = 1,
    training: bool = True,
    gpu_gib: float = 0.0,
    host_gib: float = 0.0,
    fits: bool | None = None,
    name: str = "",
) -> Streamed:
    """Predict a step by the formulas above, with gradients of `width` bytes a parameter and `accumulate` micro-batches a step."""
    passing, trained = host.link_gb_s * 1e6, sum(blocks.trained)  # bytes a millisecond
    up = accumulate * blocks.up(prefetch, training=training)
    down = accumulate * trained * width
    exposed = (blocks.bytes[0] + blocks.trained[0] * width) / passing
    return Streamed(
        name=name,
        prefetch=prefetch,
        blocks=len(blocks.bytes),
        block_bytes=max(blocks.bytes),
        bytes_up=up,
        bytes_down=down,
        compute_ms=compute_ms,
        link_ms=max(up, down) / passing,
        exposed_ms=exposed + (accumulate - 1) * trained / host.adds_params_s * 1e3,
        adam_ms=trained / host.adam_params_s * 1e3,
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        fits=fits,
        host=host,
        again=training,
    )


def _ms(value: float) -> str:
    return units.value(value, "ms")
