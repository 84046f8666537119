"""This module does CUDA's part of capturing (capture.py): it has a stream and a pool to rehearse and record on, and clears up
after a capture that fails.

A capture forbids calls that wait for the device, and work of other streams that it did not fork. A rehearsal finds both before,
where nothing is lost by it: a capture that fails can take a step's memory with it, or leave torch's generator in capture.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BROKEN = "operation failed due to a previous error during capture"  # CUDA's words for cudaErrorStreamCaptureInvalidated
STALE = "The AccumulateGrad node's stream does not match"  # the beginning of torch's warning


class Refused(Exception):
    """A Refused says why a step cannot be a graph."""


class Stale(Refused):
    """A Stale says why a step cannot be a graph now, though later perhaps."""


class CudaGraphs:
    """CudaGraphs makes the CUDA graphs of one device, recorded on a stream of their own and in one memory pool."""

    mended = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        current, mode = torch.cuda.current_stream(self.device), torch.cuda.get_sync_debug_mode()
        always = torch.is_warn_always_enabled()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the steps before have given these warnings already
            warnings.filterwarnings("error", message=STALE)
            torch.set_warn_always(True)
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            except UserWarning as warning:
                raise Stale(
                    "autograd waits for another stream (is a loss or an output of an earlier forward still held?)"
                ) from warning
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                torch.set_warn_always(always)
                current.wait_stream(self.stream)

    def record(self, work: Callable[[], Any]) -> Callable[[], None]:
        gc.collect()  # cycles may hold a step's memory
        state = torch.cuda.get_rng_state(self.device)
        graph, begun = torch.cuda.CUDAGraph(), False
        try:
            # the stream by itself too: where a capture fails, torch's context leaves its own in force. Other threads, which
            # prepare batches for instance, may go on with what a capture forbids
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(self.stream),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                begun = True
                work()
        except BaseException:
            self._mend(graph, begun, state)
            raise
        replay: Callable[[], None] = graph.replay
        return replay

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def clear(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _mend(self, graph: torch.cuda.CUDAGraph, begun: bool, state: Tensor) -> None:
        """Tell torch's allocator and generator that a failed capture is over: it can leave them as if it went on.

        A capture that did not come to its end keeps its pool for good, as much as a step's memory, up to torch 2.12 (pytorch pull
        request 190348). The generator may get another state, which graphs that were recorded before do not know: `mended` says so.
        """
        leaks = begun and not _ended(graph) and torch.version.hip is None and torch.__version__ < "2.13"
        graph.reset()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        if leaks:  # never twice: torch would fail from then on
            with suppress(Exception):
                torch._C._cuda_releasePool(self.device.index, self.pool)
        generator = torch.cuda.default_generators[self.device.index]
        try:
            torch.empty(1, device=self.device).uniform_()
        except RuntimeError:
            generator.graphsafe_set_state(torch.Generator(self.device))
            CudaGraphs.mended += 1
        generator.set_state(state)


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether the graph's capture came to its end: only then the graph says which pool it has."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def broken_by_others(error: BaseException) -> bool:
    """Return whether a capture was ended by another thread, which waited for the whole device meanwhile (torch.cuda.synchronize):
    then the first that the recording thread hears of it is that an error went before."""
    return BROKEN in str(_chain(error)[-1])


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those that led to it, the earliest last."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    return chain


def reason_of(error: BaseException) -> str:
    """Return a clause that says why recording failed."""
    chain = _chain(error)
    said = " ".join(map(str, chain))
    if isinstance(error, Refused):
        return str(error)
    if any(isinstance(e, torch.OutOfMemoryError) for e in chain):
        return "there is not enough memory to hold graphs beside the eager step"
    if broken_by_others(error):
        return "recording was broken off, as by another thread that waits for the whole device"
    if "synchronizing" in said or "stream is capturing" in said or "StreamCaptureUnsupported" in said:
        return f"the step waits for the device{_place(chain[-1])}: something reads a value on the host, as .item() does"
    if "current_seed" in said or "get_offset" in said or "philox_offset" in said:
        return "the step reads the random state, as torch's checkpoint does unless it has preserve_rng_state=False"
    first = str(chain[-1]).strip().splitlines() or [""]
    return f"recording failed ({type(chain[-1]).__name__}: {first[0][:200]})"


def _place(error: BaseException) -> str:
    """Return " in file.py, line n": the innermost frame that is neither torch's nor of this folder; "" where there is none."""
    ours, torchs = Path(__file__).parent, Path(torch.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if ours not in path.parents and torchs not in path.parents and path.suffix == ".py":
            return f" in {path.name}, line {frame.lineno}"
    return ""
