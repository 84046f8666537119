"""Count what GPUs send each other in a step and how much of it overlaps with compute; fit how well a measured run scales.

Bytes that one of n GPUs sends in an optimizer step, with G bytes of gradients, P of weights and A micro-batches, by ring
algorithms (Patarasuk and Yuan, 2009) and the stages of ZeRO (arXiv 1910.02054, section 7):

    ZeRO 0    2 (n-1)/n G                            all-reduce of the gradients, once a step
    ZeRO 1    (n-1)/n (G + T)                        reduce-scatter, once a step; all-gather of the T bytes that trained
    ZeRO 2    (n-1)/n (A G + T)                      the same with gradients scattered after each micro-batch
    ZeRO 3    (n-1)/n (2 A P + A G)                  weights gathered for forward and again for backward

Between nodes the same bytes go around a ring of nodes, and the GPUs of a node share what enters and leaves it, each over a network
card of its own: with N nodes of m GPUs, (N-1)/N / m of the payload takes the place of (n-1)/n. Both links carry their part at
the same time, so the slower one counts.

Gradients can overlap with the backward that makes them (of the last micro-batch where they are sent once), and ZeRO 3's gathers
with the pass they serve. The all-gather after the optimizer's step, and Muon's exchanges, overlap with nothing. This is the
most that can overlap: the last bucket, contention for the memory and the latency of short messages are left out, so exposed time is
a lower bound. What GPUs that share a model exchange between its layers (division.py) is taken to overlap in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surokit import arguments
from surokit.planner.counts.division import NO_EXCHANGE, Exchange

#: GPUs that share a node's fast links, in the common NVLink nodes; `gpus_a_node` says another number.
GPUS_A_NODE = 8


@dataclass(frozen=True)
class Communication:
    """A Communication holds the bytes that a GPU sends in one optimizer step, their time at `link_gb_s`, and the part of it that
    does not overlap with compute (`exposed_ms`). `between_layers_ms` is the part of the time that GPUs which share a model take,
    `waited_ms` the exposed part without it.

    Times are None where the link's rate is not known, and `how` says what is missing.
    """

    bytes: float = 0.0
    ms: float | None = 0.0
    exposed_ms: float | None = 0.0
    link_gb_s: float | None = None
    how: str = "one GPU"
    between_layers_ms: float = 0.0
    waited_ms: float = 0.0


def communicate(
    *,
    gpus: int,
    zero: int,
    gradient_bytes: float,
    weight_bytes: float,
    trained_bytes: float,
    accumulate: int = 1,
    forward_ms: float,
    backward_ms: float,
    peer_gb_s: float | None,
    between_gb_s: float | None = None,
    gpus_a_node: int = GPUS_A_NODE,
    exchange: Exchange = NO_EXCHANGE,
    update_bytes: float = 0.0,
) -> Communication:
    """Count the communication of data-parallel training on `gpus` GPUs, or groups of GPUs that share a model.

    forward_ms, backward_ms     of the whole step on one GPU, all micro-batches
    peer_gb_s       rate of a GPU's link within the node, GB/s in one direction
    between_gb_s    share of the node's network that one GPU has, 50 for a card of 400 Gbit/s; needed beyond `gpus_a_node` GPUs
    exchange        what each GPU of such a group sends between the layers, in the whole step
    update_bytes    that go between GPUs in the optimizer's step: Muon's matrices, to those that own them and back
    """
    if exchange.forward_ms is None or exchange.backward_ms is None:
        return Communication(exchange.bytes, None, None, None, f"between layers; {exchange.how}")
    between = exchange.forward_ms + exchange.backward_ms
    if gpus == 1:
        exposed = max(0.0, exchange.forward_ms - forward_ms) + max(0.0, exchange.backward_ms - backward_ms)
        return Communication(exchange.bytes, between, exposed, peer_gb_s, exchange.how or "one GPU", between)
    a, late = accumulate, 0.0
    if zero == 0:
        in_forward, in_backward, how = 0.0, 2 * gradient_bytes, "all-reduce of the gradients"
        backward_ms /= a
    elif zero == 1:
        in_forward, in_backward, late = 0.0, gradient_bytes, trained_bytes
        how = "reduce-scatter of the gradients, all-gather of the trained weights"
        backward_ms /= a
    elif zero == 2:
        in_forward, in_backward, late = 0.0, a * gradient_bytes, trained_bytes
        how = "reduce-scatter of the gradients, all-gather of the trained weights"
    else:
        in_forward, in_backward = a * weight_bytes, a * (weight_bytes + gradient_bytes)
        how = "all-gather of the weights twice, reduce-scatter of the gradients"
    if update_bytes:
        how = f"{how}, exchange of Muon's matrices"
    # shards go to owners and back, straight from GPU to GPU; whole matrices of an owner go around a ring
    direct = update_bytes if zero else 0.0
    late += update_bytes - direct
    ring = (gpus - 1) / gpus
    sent = ring * (in_forward + in_backward + late + direct) + exchange.bytes
    how = f"{how}{f', {a} micro-batches' if a > 1 else ''}; {gpus:,} GPUs"
    nodes = -(-gpus // gpus_a_node)
    if nodes > 1 and between_gb_s is None:
        return Communication(sent, None, None, None, f"{how}; the rate between nodes is not known: give between_gb_s=")
    if nodes == 1 and peer_gb_s is None:
        return Communication(sent, None, None, None, f"{how}; the rate between GPUs is not known: give Gpu(peer_gb_s=)")
    # ms of a byte of payload over each link; the slower one counts
    links = {} if peer_gb_s is None else {peer_gb_s: ring / peer_gb_s / 1e6}
    if nodes > 1 and between_gb_s is not None:
        links[between_gb_s] = max(links.get(between_gb_s, 0.0), (nodes - 1) / nodes / gpus_a_node / between_gb_s / 1e6)
    link = max(links, key=lambda rate: links[rate])
    each = links[link]
    inside = min(gpus, gpus_a_node)
    ways = [(inside - 1) / peer_gb_s] if peer_gb_s else []
    ways += [(gpus - inside) / between_gb_s] if nodes > 1 and between_gb_s else []
    late_ms = late * each + direct / gpus * max(ways) / 1e6
    ms = each * (in_forward + in_backward) + late_ms + between
    # gradients that are sent once meet the last backward, and what is sent between layers each of them
    last = a if zero <= 1 else 1
    more = exchange.backward_ms / last
    exposed = late_ms + max(0.0, in_forward * each + exchange.forward_ms - forward_ms)
    exposed += max(0.0, in_backward * each + more - backward_ms) + (last - 1) * max(0.0, more - backward_ms)
    waited = late_ms + max(0.0, in_forward * each - forward_ms) + max(0.0, in_backward * each - backward_ms)
    how += f", bound by the link of {link:g} GB/s{f'; {exchange.how}' * bool(exchange.how)}; the rest behind the passes"
    return Communication(sent, ms, exposed, link, how, between, waited)


def both(one: Communication, other: Communication) -> Communication:
    """Add up what is sent over two sets of GPUs."""
    if not other.bytes:
        return one
    sent = one.bytes + other.bytes
    if one.ms is None or other.ms is None or one.exposed_ms is None or other.exposed_ms is None:
        return replace(one if one.ms is None else other, bytes=sent)
    return replace(
        one,
        bytes=sent,
        ms=one.ms + other.ms,
        exposed_ms=one.exposed_ms + other.exposed_ms,
        waited_ms=one.waited_ms + other.waited_ms,
    )


# -- how a measured run scales


def efficiency(rates: Mapping[int, float]) -> dict[int, float]:
    """Return rate(n) / (n rate(1)) by number of GPUs, for measured rates (tokens/s), which must include that of one GPU."""
    rates = _checked(rates)
    return {n: rate / (n * rates[1]) for n, rate in rates.items()}


def loss_at_doublings(rates: Mapping[int, float]) -> dict[int, float]:
    """Return the share of the rate that each doubling loses: 1 - rate(2n) / (2 rate(n)) by 2n, where both were measured."""
    rates = _checked(rates)
    return {2 * n: 1 - rates[2 * n] / (2 * rate) for n, rate in rates.items() if 2 * n in rates}


@dataclass(frozen=True)
class Speedup:
    """A Speedup is the law rate(n) = n rate(1) / (1 + serial (n-1) + crosstalk n (n-1)): Amdahl's, with Gunther's term for what
    all GPUs exchange.

    `worst` is the largest relative miss of a measured rate. Gunther's universal scalability law: arXiv 0808.1431.
    """

    one: float
    serial: float
    crosstalk: float
    worst: float

    def rate(self, gpus: int) -> float:
        """Return the predicted rate on so many GPUs."""
        n = arguments.integer("gpus", gpus)
        return n * self.one / (1 + self.serial * (n - 1) + self.crosstalk * n * (n - 1))

    @property
    def best(self) -> int | None:
        """Return the number of GPUs beyond which more are slower; None where there is no such number."""
        if self.crosstalk <= 0:
            return None
        n = max(1, int((max(0.0, 1 - self.serial) / self.crosstalk) ** 0.5))
        return max((n, n + 1), key=self.rate)


def fit_speedup(rates: Mapping[int, float]) -> Speedup:
    """Fit a `Speedup` to measured rates by number of GPUs: that of one and at least one other; crosstalk needs three rates."""
    rates = _checked(rates)
    # n rate(1) / rate(n) - 1 = serial (n-1) + crosstalk n (n-1): least squares, linear in both
    points = [(n - 1.0, float(n * (n - 1)), n * rates[1] / rate - 1) for n, rate in rates.items() if n > 1]
    serial, crosstalk = _least_squares(points) if len(points) > 1 else (-1.0, -1.0)
    if serial < 0 or crosstalk < 0:  # no such cost: the other alone
        alone = max(0.0, sum(a * y for a, _, y in points) / sum(a * a for a, _, _ in points))
        both = max(0.0, sum(b * y for _, b, y in points) / sum(b * b for _, b, _ in points))
        serial, crosstalk = (0.0, both) if len(points) > 1 and serial < 0 <= crosstalk else (alone, 0.0)
    fit = Speedup(rates[1], serial, crosstalk, 0.0)
    worst = max(abs(fit.rate(n) / rate - 1) for n, rate in rates.items())
    return Speedup(rates[1], serial, crosstalk, worst)


def _least_squares(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    det = aa * bb - ab * ab
    return (bb * ay - ab * by) / det, (aa * by - ab * ay) / det


def _checked(rates: Mapping[int, float]) -> dict[int, float]:
    checked = {
        arguments.integer("GPUs", n): arguments.number(f"the rate of {n} GPUs", rate) for n, rate in rates.items()
    }
    if 1 not in checked or len(checked) < 2:
        raise ValueError(
            "Scaling is measured against one GPU: give the rates of 1 and of more GPUs, {1: 1000, 8: 7500}."
        )
    return dict(sorted(checked.items()))
