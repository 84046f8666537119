"""Models take turns on a device on which they do not fit together: what a session holds there waits on the host between its turns.

The memories (storages) of parameters, buffers, optimizer state and delayed scales are parked: copied into pinned host memory, then
given back to the allocator; the tensors stay the objects they are, so that views, tied weights and whoever holds them see no
difference. When a session comes back, every memory gets its bytes again. So no number changes; addresses do, and CUDA graphs, which
rest on them, would have to be recorded anew each turn: a race that parks does without.

Frozen weights that two sessions hold with the same bits are held once (`share_frozen`), and such memory is never parked. What an
offloading optimizer has on the host stays there; between turns nobody works on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from surokit.nn.delayed import amaxes_of
from surokit.nn.linear import Linear
from surokit.torch_private import storage_id
from surokit.train import Session

Storage = torch.UntypedStorage
SHARE_OF_DEVICE = (
    0.6  # that weights, gradients and moments of all may take for them to stay together; the rest is for activations
)


class Parking:
    """A Parking holds the sessions of a race: `bring` has one on its device and parks the others; `sessions` may gain entries
    later. `Parking({})` parks nothing."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions
        self._host: dict[str, dict[int, tuple[Storage, Tensor]]] = {}  # parked memories, by session
        self._buffers: dict[int, Tensor] = {}  # host memory, kept for the next time

    @property
    def parked(self) -> tuple[str, ...]:
        return tuple(self._host)

    def bring(self, name: str) -> None:
        """Bring this session to its device, and park all others. Waits for the device."""
        for other, session in self._sessions.items():
            if other != name and other not in self._host:
                self._park(other, session)
        if name in self._host:
            self._unpark(name)

    def _park(self, name: str, session: Session) -> None:
        for module in session.model.modules():
            if isinstance(module, Linear):
                module.frozen = None  # kept codes are made again
        shared = self._shared()
        away: dict[int, tuple[Storage, Tensor]] = {}
        for key, storage in storages_of(session).items():
            if key in shared or not storage.resizable() or not storage.nbytes():
                continue
            host = self._buffers.get(key)
            if host is None or host.nbytes != storage.nbytes():
                host = self._buffers[key] = _host_memory(storage)
            host.copy_(_as_bytes(storage), non_blocking=True)
            away[key] = storage, host
        _wait_for(session.device)
        for storage, _ in away.values():
            storage.resize_(0)
        self._host[name] = away

    def _unpark(self, name: str) -> None:
        for storage, host in self._host.pop(name).values():
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        _wait_for(self._sessions[name].device)

    def _shared(self) -> set[int]:
        held = Counter(key for session in self._sessions.values() for key in storages_of(session))
        return {key for key, times in held.items() if times > 1}


def tensors_of(session: Session) -> Iterator[Tensor]:
    """Yield everything that stays on the device between two steps: parameters, buffers, optimizer state, delayed scales."""
    yield from session.model.parameters()
    yield from session.model.buffers()
    for state in session.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    yield from amaxes_of(session.model)


def storages_of(session: Session) -> dict[int, Storage]:
    """Return the memories of a session's tensors on its device, each once."""
    found: dict[int, Storage] = {}
    for tensor in tensors_of(session):
        if tensor.device == session.device and type(tensor) in (Tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage_id(storage)] = storage
    return found


def bytes_of(sessions: Iterable[Session], planned: bool = True) -> int:
    """Return the sessions' bytes on the device, what is shared counted once. planned: with gradients, and two moments where there
    are none yet, unless the optimizer keeps them on the host."""
    memories: dict[int, int] = {}
    later = 0
    for session in sessions:
        memories |= {key: storage.nbytes() for key, storage in storages_of(session).items()}
        trained = sum(p.nbytes for p in session.model.parameters() if p.requires_grad)
        offloads = hasattr(session.optimizer, "accounts")
        later += trained if session.optimizer.state or offloads else 3 * trained
    return sum(memories.values()) + planned * later


def fits(sessions: Sequence[Session]) -> bool:
    """Return whether all stay on a CUDA device together, by SHARE_OF_DEVICE; a CPU is where they would be parked."""
    device = sessions[0].device
    if device.type != "cuda":
        return True
    return bytes_of(sessions) <= SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory


@torch.no_grad()
def share_frozen(session: Session, others: Iterable[Session]) -> int:
    """Let frozen parameters take the memory of another session's with the same name, kind and bits; return the bytes saved.

    Nobody writes a frozen weight, so all compute as before. Looks at bits only where the memory is not shared yet.
    """
    saved = 0
    frozen = {name: p for name, p in session.model.named_parameters() if not p.requires_grad}
    for other in others:
        theirs = {name: p for name, p in other.model.named_parameters() if not p.requires_grad}
        for name in frozen.keys() & theirs.keys():
            own, given = frozen[name], theirs[name]
            if own.data_ptr() == given.data_ptr() or not _same(own, given):
                continue
            saved += own.nbytes
            own.data = given.data
            del frozen[name]
    return saved


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype, a.device, a.stride()) != (b.shape, b.dtype, b.device, b.stride()) or not a.is_contiguous():
        return False
    if min(t.untyped_storage().nbytes() for t in (a, b)) < a.nbytes:  # parked
        return False
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def _as_bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(storage: Storage) -> Tensor:
    """Return host memory for a storage: pinned, where there is a device to copy from and memory to pin; else ordinary."""
    if storage.device.type != "cuda":
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
