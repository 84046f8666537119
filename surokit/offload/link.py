"""Copy between host and device beside the computation, in both directions, with the bytes counted.

    HostLink        the device is a CPU: no copies but those that are asked for, at once
    ThrottledLink   directions with a rate, on threads: a device's link simulated on a CPU
    CudaLink        streams, pinned memory, events

All statements on order hold for the device's main stream, the one that is current when a method is called. The host waits
nowhere but in PendingCopy.wait and close; a simulated device waits where a real one's main stream would. A link belongs to the
thread that trains; other threads may query and wait for its tickets. A copy of a link, or an unpickled one, begins anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from surokit.errors import OffloadError
from surokit.offload.workers import SLICE_S, Job, Worker, beat, nothing

# bytes above which memory is the system's own pages, which are pinned as they are: glibc's largest mmap threshold, below which
# neighbours may share a page, and a page is pinned once
_REGISTERED = 32 << 20
_SHAPES = 64  # of staging memory that is kept
LIVE = 512  # pairs of events that wait to be read
_BUFFERS = 3  # on a device, that `up` takes turns with

_C = TypeVar("_C", bound="_Copy")


class PendingCopy(Protocol):
    """A PendingCopy belongs to a transfer that was started."""

    def done(self) -> bool:
        """Return whether the transfer is over; never waits."""
        ...

    def wait(self) -> None:
        """Let the host thread wait until the transfer is done. Raises OffloadError if it failed, or after patience_s
        without a sign of life. Ctrl-C ends the wait and changes nothing."""
        ...


class Arrival(PendingCopy, Protocol):
    """An Arrival is a copy to the device that was started with `Link.fetch`. Once it is done, the source may be written again."""

    def land(self) -> Tensor:
        """Return the copy, for all work that the device is given from now on: its main stream waits for it. Call it once;
        the copy may be kept and changed."""
        ...


class Link(ABC):
    """A Link copies between the host and `device`. Counters: bytes_down, bytes_up of payload, bytes_small of `copy_down`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_down = self.bytes_up = self.bytes_small = 0
        self._stall_s = 0.0  # of a CPU that stands for a device

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory, contiguous and not initialized, pinned where it can be."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    @abstractmethod
    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        """Copy from device to host, beside the main stream.

        fill(staging) writes a device buffer of the shape and dtype of `to`, after all work that the device was given so far;
        staging is copied into `to`, contiguous host memory.

        reads: tensors that fill reads. They may be freed at once. They must not be *written in place* before `fence`, as
        fill may still be reading them.
        """

    @abstractmethod
    def fence(self) -> None:
        """Let all later work of the device begin after the fills so far have read their tensors; the host does not wait. It
        is for tensors that are then overwritten in place: columns that were sent down, gradients that are zeroed."""

    @abstractmethod
    def fetch(self, source: Tensor) -> Arrival:
        """Start to copy `source`, contiguous, from host to device, for later: into a new device buffer, beside the main stream."""

    def up(self, source: Tensor, take: Callable[[Tensor], None]) -> PendingCopy:
        """Copy `source`, contiguous, from host to device and let the main stream take it.

        The copy goes to a staging buffer beside the main stream, which waits for it and runs take(staging); staging belongs to
        it alone. Once it is done, `source` may be written again.
        """
        arrival = self.fetch(source)
        take(arrival.land())
        return arrival

    @abstractmethod
    def copy_down(self, value: Tensor, to: Tensor) -> PendingCopy:
        """Copy a small value (a scale, found_inf, indices, statistics) as it is after all work so far, into `to`, host
        memory of its shape. It does not wait for payload; `value` may be overwritten at once."""

    def computes(self) -> contextlib.AbstractContextManager[None]:
        """Mark the work that is given to the device inside the block as its own; for a device that is emulated."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[None]:
        """Count the time of the host inside the block as waiting, which may leave the device without work. On a CPU the two
        are one thread."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited(time.perf_counter() - begun)

    def waited(self, seconds: float) -> None:
        """Add a wait of the simulated device."""
        self._stall_s += seconds

    def device_stall_ms(self) -> float:
        """Return how long the device was without work so far: while it waited in `up`, `Arrival.land` and `fence`, or the
        host in `host_waits`."""
        return 1e3 * self._stall_s

    @abstractmethod
    def close(self) -> None:
        """Wait for the transfers under way and end the threads, if there are any; the link can be used again. Closing twice
        does nothing."""


def link_for(device: torch.device | str) -> Link:
    """Return a CudaLink on CUDA, a HostLink on a CPU; raises ValueError on others."""
    device = torch.device(device)
    if device.type == "cuda":
        return CudaLink(device)
    if device.type == "cpu":
        return HostLink()
    raise ValueError(f"Offloading knows CUDA devices and the CPU, not {device.type!r}: move the model to one of them.")


class _Done:
    """A _Done is the ticket of a transfer that was over when its method returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Here(_Done):
    def __init__(self, copy: Tensor) -> None:
        self._copy = copy

    def land(self) -> Tensor:
        return self._copy


class HostLink(Link):
    """A HostLink belongs to a CPU: fill writes `to` itself and take reads `source` itself, at once. Bytes are counted as on
    a device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def __reduce__(self) -> tuple[Any, ...]:
        return HostLink, ()

    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        fill(to)
        self.bytes_down += to.nbytes
        return _Done()

    def fence(self) -> None:
        pass

    def fetch(self, source: Tensor) -> Arrival:
        self.bytes_up += source.nbytes
        return _Here(source.clone())

    def up(self, source: Tensor, take: Callable[[Tensor], None]) -> PendingCopy:
        take(source)
        self.bytes_up += source.nbytes
        return _Done()

    def copy_down(self, value: Tensor, to: Tensor) -> PendingCopy:
        to.copy_(value)
        self.bytes_small += to.nbytes
        return _Done()

    def close(self) -> None:
        pass


class ThrottledLink(Link):
    """A ThrottledLink simulates the link of a device on a CPU. Each direction moves one transfer after the other, on a
    thread of its own: latency_s, then its bytes at `gb_s` (1e9 bytes/s). Small values have a direction of their own. `up`,
    `land` and `fence` block the caller, as the device would wait. Raises ValueError unless gb_s > 0 and latency_s >= 0.

    delay: gives more seconds for a transfer, and for a late fill, called in the direction's thread, for tests.
    late_fill: fill runs when its transfer begins, as on a lean CudaLink, and not at the call, so that an overwrite
        without a `fence` shows.

    Half of a transfer is copied when it begins and half when it ends, so that code which reads too early, or writes too early,
    shows as well.
    """

    def __init__(
        self,
        gb_s: float,
        latency_s: float = 0.0,
        delay: Callable[[], float] | None = None,
        late_fill: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        given: tuple[Any, ...] = gb_s, latency_s
        if not all(isinstance(value, Real) for value in given) or not gb_s > 0 or not latency_s >= 0:
            raise ValueError(
                f"ThrottledLink: gb_s={gb_s!r} must be positive and latency_s={latency_s!r} not negative, numbers both."
            )
        super().__init__(torch.device("cpu"))
        self._options = gb_s, latency_s, delay, late_fill, patience_s
        self._late_fill = late_fill
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.down_lane, self.up_lane, self.small_lane = (
            _Direction(name, 1e9 * gb_s, latency_s, delay, patience_s) for name in ("down", "up", "small")
        )
        self._filling: Job | None = None  # the latest late fill

    def __reduce__(self) -> tuple[Any, ...]:
        return ThrottledLink, self._options

    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        _whole(to)
        staging = self._staging(to)
        if self._late_fill:
            self._filling = self.down_lane.begin(lambda: fill(staging))
        else:
            with self.computes():
                fill(staging)
        self.bytes_down += to.nbytes
        return self.down_lane.move(staging, to, lambda: self._give_back(staging))

    def fence(self) -> None:
        begun = time.perf_counter()
        if self._filling is not None:
            self._filling.wait()
            self._filling = None
        self.waited(time.perf_counter() - begun)

    def fetch(self, source: Tensor) -> Arrival:
        _whole(source)
        staging = self._staging(source)
        self.bytes_up += source.nbytes
        return _Coming(self, self.up_lane.move(source, staging), staging)

    def up(self, source: Tensor, take: Callable[[Tensor], None]) -> PendingCopy:
        arrival = self.fetch(source)
        staging = arrival.land()
        with self.computes():
            take(staging)
        self._give_back(staging)
        return arrival

    def copy_down(self, value: Tensor, to: Tensor) -> PendingCopy:
        _whole(to)
        self.bytes_small += to.nbytes
        return self.small_lane.move(_snapshot(value, to.dtype), to)

    def _staging(self, like: Tensor) -> Tensor:
        """Return memory that was used before, if there is any: the system's fresh pages are slower than many a link."""
        with contextlib.suppress(KeyError, IndexError):
            return self._spare[like.shape, like.dtype].pop()
        return torch.empty_like(like)

    def _give_back(self, staging: Tensor) -> None:
        if len(self._spare) >= _SHAPES:
            self._spare.clear()
        self._spare.setdefault((staging.shape, staging.dtype), []).append(staging)

    def close(self) -> None:
        try:
            for direction in (self.down_lane, self.up_lane, self.small_lane):
                direction.drain()
        finally:
            for direction in (self.down_lane, self.up_lane, self.small_lane):
                direction.worker.close()


class _Direction:
    """A _Direction is one way of a ThrottledLink. Its transfers end at times of a running clock, so that errors of sleeping
    do not add up."""

    def __init__(
        self, name: str, rate: float, latency_s: float, delay: Callable[[], float] | None, patience_s: float
    ) -> None:
        self.worker = Worker(f"link {name}", patience_s=patience_s)
        self._rate, self._latency_s, self._delay = rate, latency_s, delay
        self._free = 0.0  # when the latest transfer is over, as time.perf_counter

    def begin(self, work: Callable[[], None]) -> Job:
        """Do `work` when the transfers that were asked for before are over."""
        asked = time.perf_counter()

        def do() -> None:
            self._next(asked, 0.0)
            work()

        return self.worker.submit(do)

    def move(self, source: Tensor, to: Tensor, end: Callable[[], None] = nothing) -> Job:
        asked = time.perf_counter()

        def do() -> None:
            over = self._next(asked, self._latency_s + to.nbytes / self._rate)
            halves = list(zip(source.view(-1).tensor_split(2), to.view(-1).tensor_split(2)))
            before = time.perf_counter()
            halves[0][1].copy_(halves[0][0])
            _sleep_until(over - (time.perf_counter() - before))
            halves[1][1].copy_(halves[1][0])
            _sleep_until(over)
            end()

        return self.worker.submit(do)

    def _next(self, asked: float, takes_s: float) -> float:
        """Return the time when a transfer that begins now is over; it begins when those before are over, and it was asked for."""
        start = max(asked, self._free) + (self._delay() if self._delay is not None else 0.0)
        self._free = start + takes_s
        _sleep_until(start)
        return self._free

    def drain(self) -> None:
        self.worker.submit(nothing).wait()


class _Coming:
    """A _Coming is a simulated transfer up."""

    def __init__(self, link: ThrottledLink, job: Job, staging: Tensor) -> None:
        self._link, self._job, self._staging = link, job, staging
        self.done, self.wait = job.done, job.wait

    def land(self) -> Tensor:
        begun = time.perf_counter()
        self._job.wait()
        self._link.waited(time.perf_counter() - begun)
        return self._staging


def _sleep_until(then: float) -> None:
    while (left := then - time.perf_counter()) > 0:
        time.sleep(min(left, SLICE_S))
        beat()


def _snapshot(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _whole(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"A tensor of shape {list(tensor.shape)} is not contiguous: only whole memory is transferred.")


class _Copy:
    """A _Copy was given to a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, host: Tensor, patience_s: float) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._host: Tensor | None = host
        self._patience_s = patience_s

    def done(self) -> bool:
        if self._host is not None and self.event.query():
            self._host = None
        return self._host is None

    def wait(self) -> None:
        # in slices: a wait in the driver ends neither by Ctrl-C nor if the device hangs
        silent_s, slice_s = 0.0, 2e-5
        while not self.done():
            time.sleep(slice_s)
            beat()
            silent_s, slice_s = silent_s + slice_s, min(2 * slice_s, 1e-3)
            if silent_s >= self._patience_s:
                raise OffloadError(
                    f"A copy between host and device is not done after {self._patience_s:g} s: the device hangs, or a step takes "
                    "longer. Give the link more patience_s, or go on from a checkpoint."
                )


class _CopyUp(_Copy):
    def __init__(
        self,
        stream: torch.cuda.Stream,
        host: Tensor,
        patience_s: float,
        staging: Tensor,
        stalls: _Stalls,
        recorded: bool,
    ) -> None:
        super().__init__(stream, host, patience_s)
        self._staging: Tensor | None = staging
        self.stalls, self._recorded = stalls, recorded

    def land(self) -> Tensor:
        staging, self._staging = self._staging, None  # this object may outlive it
        assert staging is not None, "a copy lands once"
        main = torch.cuda.current_stream(staging.device)
        self.stalls.wait(main, self.event)
        if self._recorded:
            staging.record_stream(main)
        return staging


class _Stalls:
    """A _Stalls measures how long a stream had nothing to do for waiting: between two events of its own around each wait,
    read when they are over."""

    def __init__(self) -> None:
        self._ms = 0.0
        self.pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if not event.query():
            with self.around(stream):
                stream.wait_event(event)

    @contextlib.contextmanager
    def around(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Measure a block in which the stream is given nothing but waits: it is without work from the end of the work that
        it was given before."""
        self.read()
        if len(self.pairs) == LIVE:
            yield
            return
        before, after = self._free.pop() if self._free else (_timed(), _timed())
        before.record(stream)
        try:
            yield
        finally:
            after.record(stream)
            self.pairs.append((before, after))

    def read(self) -> float:
        while self.pairs and self.pairs[0][1].query():
            before, after = self.pairs.popleft()
            self._ms += before.elapsed_time(after)
            self._free.append((before, after))
        return self._ms


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _registered(memory: Tensor, device: torch.device) -> Tensor:
    """Return `memory` with its pages locked; raises RuntimeError if they cannot be."""
    place, portable = memory.data_ptr(), 1
    error = int(torch.cuda.cudart().cudaHostRegister(place, memory.nbytes, portable))
    if error:
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next launch to find: let it be this one
            torch.zeros(1, device=device).add_(1)
        raise RuntimeError(f"CUDA's error {error}")
    weakref.finalize(memory, _unregister, place, os.getpid()).atexit = False
    return memory


def _unregister(place: int, pid: int) -> None:
    """Unlock pages when the memory is freed: not before the link's copies are done, as it keeps theirs."""
    if pid == os.getpid():
        torch.cuda.cudart().cudaHostUnregister(place)


_kept: list[_Copy] = []  # of links that were dropped


def _keep(under_way: deque[_Copy]) -> None:
    _kept.extend(copy for copy in under_way if not copy.done())


class CudaLink(Link):
    """A CudaLink belongs to a CUDA device: a stream for each direction, for fills and for small values, pinned host memory,
    events.

    lean: fills run on the stream that copies down. Staging then needs the memory of the largest transfer, as a buffer that is
        freed serves that stream's next fill at once; but a fill, the tensors it reads and `fence` wait for all copies before.
        Otherwise fills do not wait, and all transfers under way are staged at once. And a copy that is fetched begins after all
        work that the device was given so far, in memory of the main stream, which is free for that stream's next work as soon as
        no reference to the copy is left, however far the host is ahead; it has to land.

    Otherwise staging buffers, from torch's allocator, belong to the stream that fills them. Transfers `up` take turns with
    three of them, which are kept: a copy waits until the main stream has taken what came by its buffer before.

    patience_s: for how long a copy may wait for its turn, which comes after all work that the device was given before; as
    long as
        processes wait for one another in an exchange.
    """

    def __init__(self, device: torch.device | str = "cuda", lean: bool = False, patience_s: float = 600.0) -> None:
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self._options = lean, patience_s
        self._lean, self._patience_s = lean, patience_s
        self.down_lane, self.up_lane, self.small_lane, fill = (torch.cuda.Stream(self.device) for _ in range(4))
        self.fill_lane = self.down_lane if lean else fill
        self._filled = torch.cuda.Event()
        self._buffers = deque(
            (torch.empty(0, dtype=torch.uint8, device="cpu"), torch.cuda.Event()) for _ in range(_BUFFERS)
        )
        self._under_way: deque[_Copy] = deque()  # keeps the host memory of copies: the driver does not
        weakref.finalize(self, _keep, self._under_way).atexit = False
        self.stalls = _Stalls()
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaLink, (self.device, *self._options)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory as Link does. torch's pinned allocator rounds sizes up to powers of 2, so large buffers are
        pinned as they are."""
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if nbytes <= _REGISTERED:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
            return _registered(torch.empty(tuple(shape), dtype=dtype, device="cpu"), self.device)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{nbytes / 2**20:.0f} MiB of host memory could not be pinned ({error}). Copies from there are slower, and the "
                    "host waits for them: raise the limit on locked memory (ulimit -l), or offload less.",
                    stacklevel=2,
                )
            return super().buffer(shape, dtype)

    def down(self, fill: Callable[[Tensor], None], to: Tensor, reads: Sequence[Tensor] = ()) -> PendingCopy:
        _whole(to)
        self.fill_lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.fill_lane):
            staging = torch.empty(to.shape, dtype=to.dtype, device=self.device)
            fill(staging)
            self._filled.record(self.fill_lane)
        for tensor in reads:
            tensor.record_stream(self.fill_lane)
        if self.fill_lane is not self.down_lane:
            self.down_lane.wait_event(self._filled)
            staging.record_stream(self.down_lane)
        with torch.cuda.stream(self.down_lane):
            to.copy_(staging, non_blocking=True)
        self.bytes_down += to.nbytes
        return self._launched(_Copy(self.down_lane, to, self._patience_s))

    def fence(self) -> None:
        main = torch.cuda.current_stream(self.device)
        if self._lean:  # a fill waits for the copies before it
            self.stalls.wait(main, self._filled)
        else:  # it waits for the device's own work
            main.wait_event(self._filled)

    def fetch(self, source: Tensor) -> Arrival:
        _whole(source)
        if self._lean:
            staging = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            self.up_lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.up_lane):
            if not self._lean:
                staging = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            staging.copy_(source, non_blocking=True)
        self.bytes_up += source.nbytes
        return self._launched(
            _CopyUp(self.up_lane, source, self._patience_s, staging, self.stalls, recorded=not self._lean)
        )

    def up(self, source: Tensor, take: Callable[[Tensor], None]) -> PendingCopy:
        if self._lean:
            return super().up(source, take)
        _whole(source)
        staging, taken = self._next_buffer(source)
        main = torch.cuda.current_stream(self.device)
        self.up_lane.wait_event(taken)
        with torch.cuda.stream(self.up_lane):
            staging.copy_(source, non_blocking=True)
        self.bytes_up += source.nbytes
        copy = self._launched(_Copy(self.up_lane, source, self._patience_s))
        self.stalls.wait(main, copy.event)
        take(staging)
        taken.record(main)
        return copy

    def _next_buffer(self, like: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Return memory of the shape and dtype of `like`, and an event: the main stream is done with what came by this
        memory before.

        One that is too small is given back to the stream that copies up, which waits for that event before it copies again.
        """
        self._buffers.rotate(-1)
        memory, taken = self._buffers[-1]
        if memory.nbytes < like.nbytes:
            with torch.cuda.stream(self.up_lane):
                memory = torch.empty(like.nbytes, dtype=torch.uint8, device=self.device)
            self._buffers[-1] = memory, taken
        return memory[: like.nbytes].view(like.dtype).view(like.shape), taken

    def copy_down(self, value: Tensor, to: Tensor) -> PendingCopy:
        _whole(to)
        main, side = torch.cuda.current_stream(self.device), self.small_lane
        copy = _snapshot(value, to.dtype)  # on the main stream, so before what overwrites it
        side.wait_stream(main)
        with torch.cuda.stream(side):
            to.copy_(copy, non_blocking=True)
        copy.record_stream(side)
        self.bytes_small += to.nbytes
        return self._launched(_Copy(side, to, self._patience_s))

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[None]:
        """Count waits as Link does. A wait of the host while the main stream still works costs the device nothing, and is
        not counted."""
        with self.stalls.around(torch.cuda.current_stream(self.device)):
            yield

    def device_stall_ms(self) -> float:
        """Return the stalls as Link does, of the work that the device has passed so far, read without waiting. A copy that
        was there in time costs no events; while 512 stalls are not over, further ones are not measured."""
        return self.stalls.read()

    def close(self) -> None:
        while self._under_way:
            self._under_way[0].wait()
            self._under_way.popleft()

    def _launched(self, copy: _C) -> _C:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        for other in [other for other in _kept if other.done()]:
            _kept.remove(other)
        self._under_way.append(copy)
        return copy
