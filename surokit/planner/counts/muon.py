"""Count what sk.Muon takes of a step: which parameters are hidden matrices, the FLOPs of Newton-Schulz, bytes and kernels.

A Newton-Schulz step of a matrix, turned so that it has m rows and n >= m columns, is X = a X + (b A + c A A) X with A = X X':

    X X'                2 m^2 n FLOPs
    A A                 2 m^3
    (b A + c A A) X     2 m^2 n
    a step              2 (2 n m^2 + m^3), of which sk.Muon takes 5 unless told otherwise

A training step of T tokens computes 6 m n T FLOPs with the same matrix, so Muon adds (10 m + 5 m^2 / n) / (3 T): 5 m / T where the
matrix is square. The rest of an update is operation by operation, which optim/muon.py has; the counts below are of its lines.

GPUs that have the same matrices share them out, the largest first, n in a turn of n. Where ZeRO shards the states, the owner of a
matrix is sent the shards of its update in bfloat16 and sends back those of the result: of n GPUs each sends 1 / n of all matrices
twice. Without ZeRO an owner sends the result to all others. Experts are divided as whole matrices, of which ZeRO sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surokit.planner.counts.flops import frozen, placements, trained_parameters
from surokit.planner.inputs.shape import Shape

STEPS = 5
NEWTON_SCHULZ = "Newton-Schulz"  # the part of a step
_BF16 = 2  # bytes in which Newton-Schulz computes
#: Bytes an element of the largest matrix that an update holds at its fullest: a weight or a gradient, a momentum and two more in
#: float32 or less. A copy beside others holds the matrix that it owns too.
SCRATCH, OWN = 14, 2
_LAUNCHES = 26 + 3 * STEPS  # operations on a matrix
_MOVED = 130  # bytes an element of the operations beside the products: 126 to 134, by the dtypes


@dataclass(frozen=True)
class Hidden:
    """A Hidden is one kind of hidden matrix [n, k] that trains, present `count` times; `expert` says whether it is an expert's."""

    n: int
    k: int
    count: int
    expert: bool = False

    @property
    def parameters(self) -> int:
        return self.n * self.k * self.count

    @property
    def flop(self) -> int:
        """Return the FLOPs of Newton-Schulz on all of them, in an optimizer step."""
        m, n = sorted((self.n, self.k))
        return STEPS * 2 * (2 * n * m**2 + m**3) * self.count

    @property
    def bytes(self) -> int:
        """Return the bytes that Newton-Schulz reads and writes."""
        m, n = sorted((self.n, self.k))
        return STEPS * _BF16 * (3 * m * n + 4 * m**2) * self.count


def hidden_matrices(shape: Shape, recipe: Any) -> tuple[Hidden, ...]:
    """Return the matrices that Muon updates: those of the blocks, or of their adapters, without embeddings and head."""
    found = []
    for place in placements(shape, recipe):
        w, expert = place.weight, place.weight.kind == "expert"
        if w.kind == "head":
            continue
        if not frozen(recipe):
            found.append(Hidden(w.n, w.k, w.count, expert))
        elif place.rank:
            found += [Hidden(place.rank, w.k, place.adapters, expert), Hidden(w.n, place.rank, place.adapters, expert)]
    return tuple(found)


def hidden_share(shape: Shape, recipe: Any) -> float:
    """Return the share of the parameters that train which is in hidden matrices."""
    trained = trained_parameters(shape, shape.parameters, recipe)
    return sum(each.parameters for each in hidden_matrices(shape, recipe)) / trained if trained else 0.0


@dataclass(frozen=True)
class MuonStep:
    """A MuonStep is an update of hidden matrices on the GPU that has most to do: FLOPs and bytes of Newton-Schulz, bytes of the
    rest, launches of each, and the bytes that go between GPUs, of which (n - 1) / n leave or reach one of n."""

    flop: float
    products_bytes: float
    bytes: float
    products_launches: float
    launches: float
    sent: float


def muon_step(shape: Shape, recipe: Any, gpus: int = 1, expert_gpus: int = 1, zero: int = 0) -> MuonStep:
    """Count an update. gpus, expert_gpus: that have the same matrices, and the same experts. zero: ZeRO's stage."""
    every = hidden_matrices(shape, recipe)
    plain, experts = ([each for each in every if each.expert == expert] for expert in (False, True))
    if zero:
        owned = [
            *_first_owner(plain, gpus),
            *((each, each.count * _most_experts(shape, expert_gpus)) for each in experts),
        ]
        held = [(each, each.count / gpus) for each in plain] + owned[len(plain) :]
        launched = [(each, float(each.count)) for each in plain] + owned[len(plain) :]
        sent = sum(2 * each.parameters / gpus for each in plain) if gpus > 1 else 0.0
    else:
        turns = [(plain + experts, gpus)] if gpus == expert_gpus else [(plain, gpus), (experts, expert_gpus)]
        owned = [found for kinds, n in turns for found in _first_owner(kinds, n)]
        held = launched = [(each, float(each.count)) for each in every]
        sent = sum(each.parameters for kinds, n in turns for each in kinds if n > 1)
    return MuonStep(
        flop=sum(each.flop / each.count * count for each, count in owned),
        products_bytes=sum(each.bytes / each.count * count for each, count in owned),
        bytes=_MOVED * sum(each.n * each.k * count for each, count in held),
        products_launches=3 * STEPS * sum(count for _, count in owned),
        launches=(_LAUNCHES - 3 * STEPS) * sum(count for _, count in launched),
        sent=_BF16 * sent,
    )


def _first_owner(kinds: Iterable[Hidden], n: int) -> list[tuple[Hidden, float]]:
    """Return how many of each kind the first of n processes owns, which has the largest matrix of every turn."""
    found, before = [], 0
    for each in sorted(kinds, key=lambda each: each.flop / each.count, reverse=True):
        after = before + each.count
        found.append((each, float(-(-after // n) - -(-before // n))))
        before = after
    return found


def _most_experts(shape: Shape, n: int) -> float:
    """Return the share of a block's experts that the GPU with most of them has, whole ones, of n that divide them."""
    assert shape.experts is not None
    return -(-shape.experts.here // n) / shape.experts.here
