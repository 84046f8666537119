"""A session over a sharded model becomes parts for a checkpoint, and goes on from one in as many processes as there are now.

Weights, moments and what else is a plain part of a whole come back bit for bit, whoever wrote them: as many processes, more,
fewer, or one that held all. What belongs to one division alone cannot, and a note says so: 8-bit moments, whose blocks begin with
a shard, are decoded and encoded again; the keys of stochastic rounding and random states of processes that were not there are drawn
anew, from the seed. A process that comes back as it was has all of it bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from surokit.optim.parts import (
    Part,
    Place,
    Rows,
    as_shard,
    from_rows,
    held_by,
    overlaps,
    place_of,
    rows_layout,
    rows_part,
)
from surokit.optim.tensors import local
from surokit.train.checkpoint_files import Checkpoint, check_fits, dtypes_of
from surokit.train.errors import CheckpointError, ResumeError
from surokit.train.peers import Peers

if TYPE_CHECKING:
    from surokit.train.sharded_files import DividedTensors

T = TypeVar("T")

OPTIM = "optim."  # before the names of what an optimizer keeps


# -- to parts


def model_parts(model: nn.Module) -> tuple[dict[str, Part], dict[str, str]]:
    """Return what this process holds of each tensor of the state_dict, and the names that stand for another."""
    state = model.state_dict()  # FSDP2 gives up what is gathered for it
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names: dict[int, str] = {}
    tied = {name: names[id(t)] for name, t in named if name in state and names.setdefault(id(t), name) != name}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} in the model's state_dict is a {type(value).__name__}; a checkpoint holds tensors only."
            )
    return {name: Part.of(t) for name, t in state.items() if name not in tied}, tied


def optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return what this process holds of the optimizer's tensors, and the rest of its state, the same in all processes."""
    state_dict = optimizer.state_dict()
    params = parameters_by_name(optimizer, model)
    parts: dict[str, Part] = {}
    values, tensors = _entries(optimizer, params, state_dict["state"])
    for name, keys in tensors.items():
        p = params[name]
        for key, value in keys.items():
            held = held_by(optimizer, p, key)
            if held == "own":
                parts[own_name(name, key, place_of(p))] = Part.of(value)
            else:
                parts[f"{OPTIM}{name}.{key}"] = rows_part(p, value, held) if isinstance(held, Rows) else Part.of(value)
    return parts, {**state_dict, "state": values, "tensors": {name: [*keys] for name, keys in tensors.items()}}


def _entries(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor], state: Mapping[int, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """Return by parameter and key what is plain or a scalar, and the tensors."""
    values: dict[str, dict[str, Any]] = {name: {} for name in params}
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in params}
    for number, (name, p) in enumerate(params.items()):
        for key, value in state.get(number, {}).items():
            if isinstance(value, Tensor) and (value.ndim or held_by(optimizer, p, key) == "own"):
                tensors[name][key] = value
            else:
                values[name][key] = value
    return values, tensors


def own_name(name: str, key: str, place: Place) -> str:
    """Return the name of what belongs to the shard at `place` alone."""
    return f"{OPTIM}{name}.{key}@{'.'.join(map(str, place))}"


def parameters_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's parameters by their names in the model, in the order of its groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.get(id(p), str(number)): p for number, p in enumerate(params)}


# -- from parts


class Source(Protocol):
    """A Source is the tensors of a checkpoint by name, from which parts are read."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype."""

    def chunks(self, name: str) -> Mapping[Place, tuple[int, ...]]:
        """Return the sizes of the pieces in which it was written, by place."""

    def read(self, wanted: Mapping[str, Part], peers: Peers) -> None:
        """Fill the parts, in all peers."""


def divided_tensors(folder: Path) -> DividedTensors:
    """Return the tensors of a sharded checkpoint."""
    from surokit.train.sharded_files import DividedTensors  # loads torch's distributed checkpoint

    return DividedTensors(folder)


class WholeTensors:
    """WholeTensors are those of a checkpoint that one process wrote, which held all: a process reads the rows that it wants."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path / "model.safetensors"
        self._dtypes: dict[str, torch.dtype] = {
            name: getattr(torch, dtype.removeprefix("torch.")) for name, dtype in checkpoint.meta["dtypes"].items()
        }
        with self._open() as file:
            self._shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        self._state: dict[str, Tensor] = {}

    def with_state(
        self, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Take an optimizer's tensors in, by their names in a sharded checkpoint; return the rest as it is there."""
        values, tensors = _entries(optimizer, params, saved["state"])
        for name, keys in tensors.items():
            p = params[name]
            for key, value in keys.items():
                held = held_by(optimizer, p, key)
                if held == "own":
                    self._state[own_name(name, key, (0,) * p.ndim)] = value
                    continue
                if isinstance(held, Rows):
                    whole = (*value.shape[: held.lead], *p.shape[: held.dims])
                    if math.prod(whole) != value.numel():
                        _check_shape(f"{OPTIM}{name}.{key}", tuple(value.shape), whole)
                    value = value.reshape(whole)
                self._state[f"{OPTIM}{name}.{key}"] = value
        return {**saved, "state": values, "tensors": {name: [*keys] for name, keys in tensors.items()}}

    def _open(self) -> Any:
        try:
            return safe_open(self._path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path} cannot be read ({error}): use another checkpoint.") from error

    def __contains__(self, name: object) -> bool:
        return name in self._state or name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape) if name in self._state else self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype if name in self._state else self._dtypes[name]

    def chunks(self, name: str) -> Mapping[Place, tuple[int, ...]]:
        return {(0,) * len(self.shape(name)): self.shape(name)}

    def read(self, wanted: Mapping[str, Part], peers: Peers) -> None:
        with torch.no_grad(), self._open() as file:
            for name, part in wanted.items():
                for place, piece in part.pieces.items():
                    cut = tuple(slice(start, start + size) for start, size in zip(place, piece.shape))
                    if not piece.numel():
                        continue
                    if name in self._state:
                        piece.copy_(self._state[name][cut])
                    else:
                        piece.copy_(file.get_slice(name)[cut] if cut else file.get_tensor(name))


def load_model(found: Checkpoint, model: nn.Module, source: Source, peers: Peers) -> None:
    """Fill this process's parts of the model; ResumeError where it is another model, and nothing is changed then."""
    tied: dict[str, str] = found.meta["tied"]

    def plan() -> dict[str, Part]:
        own, own_tied = model_parts(model)
        shapes = {name: source.shape(name) for name in found.meta["dtypes"] if name in source}
        shapes |= {name: shapes[first] for name, first in tied.items()}
        wanted = own | {name: own[first] for name, first in own_tied.items()}
        check_fits(found, {name: part.whole for name, part in wanted.items()}, dtypes_of(wanted), shapes)
        return wanted

    wanted = peers.together(plan)
    source.read({name: part for name, part in wanted.items() if name not in tied}, peers)
    with torch.no_grad():
        for name, first in tied.items():  # which need not be one tensor here
            wanted[name].piece.copy_(wanted[first].piece)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    source: Source,
    peers: Peers,
) -> set[str]:
    """Load this process's parts of the optimizer's state; return which of "keys" and "8-bit moments" could not be kept.

    saved: what `optimizer_parts` gave besides the parts.
    """

    def plan() -> dict[str, _Plan]:
        if [*saved["state"]] == [*params]:
            return {name: _Plan(optimizer, name, p, saved["tensors"][name], source) for name, p in params.items()}
        differing = sorted({*saved["state"]} ^ {*params})
        raise ResumeError(
            "The optimizer has other parameters than in the checkpoint, or in another order"
            f"{': ' * bool(differing)}{', '.join(differing[:20])}: make it as it was made there."
        )

    plans = peers.together(plan)
    source.read({name: part for plan in plans.values() for name, part in plan.wanted.items()}, peers)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states = {number: {**saved["state"][name], **plans[name].tensors()} for number, name in zip(numbers, params)}
    rest = {key: value for key, value in saved.items() if key != "tensors"}
    state_dict = {**rest, "state": {number: state for number, state in states.items() if state}}
    peers.together(lambda: fitting(lambda: optimizer.load_state_dict(state_dict)))
    return {lost for plan in plans.values() for lost in plan.lost}


def fitting(work: Callable[[], T]) -> T:
    """Do the work; what an optimizer or a recipe refuses of a state becomes a ResumeError."""
    try:
        return work()
    except CheckpointError:
        raise
    except ValueError as error:
        raise ResumeError(f"The checkpoint's optimizer or scaling state does not fit: {error}") from error


class _Plan:
    """A _Plan reads the tensors of one parameter's state: `wanted` says which, and once they are filled `tensors` gives them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, name: str, p: Tensor, keys: Sequence[str], source: Source
    ) -> None:
        self._optimizer, self._name, self._p = optimizer, name, p
        self._place, self._shape = place_of(p), tuple(local([p])[0].shape)
        self.wanted: dict[str, Part] = {}
        self.lost: set[str] = set()
        self._parts: dict[str, Part] = {}
        self._codes: dict[str, tuple[Part, dict[Place, Part]]] = {}
        coded: Mapping[str, str] = getattr(optimizer, "coded", {})
        divided = next((key for key in ("exp_avg", "momentum_buffer") if key in keys), "")
        apart = {key: scale for key, scale in coded.items() if scale in keys and not self._is_here(key, scale, source)}
        for key in keys:
            if key in apart:
                self._want_codes(key, apart[key], source)
            elif held_by(optimizer, p, key) != "own":
                self._want(key, source)
            elif key not in apart.values() and self._is_here(divided, key, source):
                self._parts[key] = self.wanted[self._own(key)] = _whole(self._own(key), source)
            elif key not in apart.values() and 0 not in self._shape:
                self.lost.add("keys")

    def _own(self, key: str, place: Place | None = None) -> str:
        return own_name(self._name, key, self._place if place is None else place)

    def _full(self, key: str) -> str:
        return f"{OPTIM}{self._name}.{key}"

    def _is_here(self, divided: str, key: str, source: Source) -> bool:
        """Return whether the checkpoint has this shard's own `key`: `divided`, an entry divided as the parameter, has a piece like
        it."""
        empty = 0 in self._shape  # such a piece is not written
        same = empty or source.chunks(self._full(divided)).get(self._place) == self._shape
        return same and self._own(key) in source

    def _want(self, key: str, source: Source) -> None:
        full, held = self._full(key), held_by(self._optimizer, self._p, key)
        if full not in source:  # another optimizer's, which is the shard's own there
            raise ResumeError(
                f"{type(self._optimizer).__name__} did not write the checkpoint's {key} of {self._name}: resume with the optimizer "
                "that did."
            )
        whole = shape = source.shape(full)
        place = (0,) * len(whole)
        if isinstance(held, Rows):
            expected, shape, place = rows_layout(self._p, whole[: held.lead], held)
            _check_shape(full, whole, expected)
        elif held is None and whole == tuple(self._p.shape):
            shape, place = self._shape, self._place
        self._parts[key] = self.wanted[full] = Part(
            whole, {place: torch.empty(shape, dtype=source.dtype(full), device="cpu")}
        )

    def _want_codes(self, key: str, scale: str, source: Source) -> None:
        full = self._full(key)
        _check_shape(full, source.shape(full), tuple(self._p.shape))
        near = {
            place: torch.empty(shape, dtype=source.dtype(full), device="cpu")
            for place, shape in source.chunks(full).items()
            if overlaps(self._place, self._shape, place, shape) is not None
        }
        scales = {place: _whole(self._own(scale, place), source) for place in near}
        self._codes[key] = Part(tuple(self._p.shape), near), scales
        self.wanted |= {self._own(scale, place): part for place, part in scales.items()}
        if near:
            self.wanted[full] = self._codes[key][0]
            self.lost.add("8-bit moments")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as the optimizer holds them."""
        found: dict[str, Tensor] = {}
        for key, part in self._parts.items():
            held = held_by(self._optimizer, self._p, key)
            found[key] = from_rows(part.piece, held) if isinstance(held, Rows) else part.piece
            if held is None and part.whole == tuple(self._p.shape):
                found[key] = as_shard(self._p, part.piece)
        optimizer: Any = self._optimizer
        for key, (part, scales) in self._codes.items():
            own = {place: scale.piece for place, scale in scales.items()}
            codes, found[optimizer.coded[key]] = optimizer.recoded(key, part, own, self._place, self._shape)
            found[key] = as_shard(self._p, codes)
        return found


def _whole(name: str, source: Source) -> Part:
    shape = source.shape(name)
    return Part(shape, {(0,) * len(shape): torch.empty(shape, dtype=source.dtype(name), device="cpu")})


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ResumeError(
            f"{name} is {[*found]} in the checkpoint and {[*wanted]} here: resume with the model and the optimizer that wrote it."
        )
