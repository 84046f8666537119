"""Watch a profiled block, beside torch's own profiler: modules, reads of device values, the user's line, Python's garbage
collector, the data loader, optimizers' steps. All times are the host's clock.

Sync points come through the dispatcher: a kernel in front of each of the five operators that read a device value back notes
the caller's line and passes on. That costs 3 us for each such read and nothing elsewhere. A TorchFunctionMode also sees them,
but costs 2-4 us for every torch call and makes torch.compile recompile; `with_stack=True` gives the line where a function
begins, not the line that calls. On CUDA the other synchronising calls (`.cpu()`, pageable copies) come from torch's own sync
debug mode. The line that a long gap belongs to comes from a thread that samples the user's current line every 5 ms.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

import surokit
from surokit.kernels import reference
from surokit.profiler.record.recording import SyncPoint
from surokit.profiler.record.settings import loader_setting
from surokit.torch_private import DataLoaderIterator, in_front_of_backends, keys_below_backend_select

SAMPLE_SECONDS = 5e-3
# operator -> what the user wrote. Each of them waits for the device on CUDA because the host needs a value.
_READS = {
    "_local_scalar_dense": ".item()",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "torch.equal",
    "_unique2": "unique",
}


class Watch:
    """A Watch keeps what the hooks collect: appended on the hot path, put together at the end."""

    def __init__(self) -> None:
        self.active = False
        self.tokens = 0, 0  # looked up without gradients, and with
        self.autocast = ""  # its dtype, once a module ran under it
        self.loader = ""  # settings of the first DataLoader that gave a batch
        self.collections: list[tuple[int, int]] = []  # runs of the garbage collector
        self._collecting_since: int | None = None
        self._lookup = [0, 0]  # the largest embedding lookups of the outermost call that is running, as `tokens`
        self._local = threading.local()
        self._spans: list[tuple[int, int, int, int]] = []  # module, start, end, thread
        self._index: dict[int, int] = {}  # id of a module -> its number
        self._names: list[tuple[str, str]] = []
        self._alive: list[torch.nn.Module] = []  # ids stay unique while the modules live
        self._reads: list[SyncPoint] = []

    def forget(self) -> None:
        """Drop what calibration left behind."""
        self.tokens = 0, 0
        for kept in (self._spans, self._index, self._names, self._alive, self._reads, self.collections):
            kept.clear()

    def enter_module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not self.active or torch.compiler.is_compiling():
            return
        stack = self._stack()
        if isinstance(module, torch.nn.Embedding) and args and isinstance(args[0], torch.Tensor):
            kind = int(torch.is_grad_enabled())
            self._lookup[kind] = max(self._lookup[kind], args[0].numel())
        number = self._index.get(id(module))
        if number is None:
            number = self._name(module, stack)
        if not self.autocast and len(stack) < 2:  # trainers switch it on around the model or inside its forward
            self.autocast = _autocast()
        stack.append((number, time.time_ns()))

    def leave_module(self, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not self.active or torch.compiler.is_compiling():
            return
        now, stack, number = time.time_ns(), self._stack(), self._index.get(id(module))
        if not any(entry[0] == number for entry in stack):
            return
        while stack:  # an inner call that raised may have left its entry behind
            inner, start = stack.pop()
            self._spans.append((inner, start, now, self._local.thread))
            if inner == number:
                break
        if not stack:
            self.tokens = self.tokens[0] + self._lookup[0], self.tokens[1] + self._lookup[1]
            self._lookup = [0, 0]

    def _stack(self) -> list[tuple[int, int]]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.thread = [], threading.get_native_id()
        stack: list[tuple[int, int]] = self._local.stack
        return stack

    def _name(self, module: torch.nn.Module, stack: list[tuple[int, int]]) -> int:
        """Name a module by its path below the outermost module that is running, and everything else below that one with it."""
        kind = type(module).__name__
        trunk = f"{self._names[stack[-1][0]][0]}.{kind}" if stack else kind
        taken = {path for path, _ in self._names}
        root = (
            trunk
            if trunk not in taken
            else next(f"{trunk}#{n}" for n in range(2, 1 << 30) if f"{trunk}#{n}" not in taken)
        )
        for below, child in module.named_modules():
            if id(child) not in self._index:
                self._index[id(child)] = len(self._names)
                self._names.append((f"{root}.{below}" if below else root, type(child).__name__))
                self._alive.append(child)
        return self._index[id(module)]

    def reading(self) -> bool:
        return getattr(self._local, "reading", False)

    def waited(self, call: str, frame: FrameType) -> None:
        """Note a synchronising CUDA call at its start; its length is in the trace."""
        if self.active and not self.reading():
            now = time.time_ns()
            self._reads.append(SyncPoint(now, now, threading.get_native_id(), call, "cuda", *user_line(frame)))

    def collecting(self, phase: str, info: object) -> None:
        """Note a run of the garbage collector, as its callback; it runs on the thread that triggered it and holds up all
        threads."""
        now = time.time_ns()
        if phase == "start":
            self._collecting_since = now
        elif self._collecting_since is not None:
            if self.active:
                self.collections.append((self._collecting_since, now))
            self._collecting_since = None

    def called_since(self, at_ns: int) -> bool:
        """Return whether a call of a module has ended since then."""
        return bool(self._spans) and self._spans[-1][2] > at_ns

    def module_names(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._names)

    def spans(self) -> tuple[Any, Any, Any, Any]:
        """Return module, start, end, thread of each call, sorted by start with parents first."""
        table = np.array(self._spans, np.int64).reshape(-1, 4)
        module, start, end, thread = table[np.lexsort((-table[:, 2], table[:, 1]))].T
        return module, start, end, thread

    def sync_points(self) -> tuple[SyncPoint, ...]:
        return tuple(self._reads)


@contextmanager
def collector_watched(watch: Watch) -> Iterator[None]:
    """Note when Python's garbage collector runs."""
    gc.callbacks.append(watch.collecting)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user may have cleared the list
            gc.callbacks.remove(watch.collecting)


@contextmanager
def watched_loader(watch: Watch) -> Iterator[None]:
    """Note the settings of the DataLoader that gives a batch. They are read from its iterator, since the loop may keep it
    in no variable."""
    kind = DataLoaderIterator
    give = kind.__next__

    @functools.wraps(give)
    def noted(iterator: Any) -> Any:
        if not watch.loader:
            watch.loader = loader_setting(iterator)
        return give(iterator)

    kind.__next__ = noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if kind.__next__ is noted:
            kind.__next__ = give  # type: ignore[method-assign]


def on_optimizer_step(call: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call `call(optimizer)` behind every optimizer's step, once: where a class's step calls its base class's, torch wraps
    both and calls its hooks behind each."""

    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        wrapper = sys._getframe(1)  # torch's function around a class's step
        wrapped = sum(hasattr(kind.__dict__.get("step"), "hooked") for kind in type(optimizer).__mro__)
        frame = wrapper.f_back if wrapped > 1 else None
        while frame is not None:
            if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
                return
            frame = frame.f_back
        call(optimizer)

    return register_optimizer_step_post_hook(hook)


def _autocast() -> str:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


@contextmanager
def watched_reads(watch: Watch) -> Iterator[None]:
    """Put kernels in front of the operators that read a device value; they sit just above the backends, below autograd and
    torch.compile's tracing."""
    below = keys_below_backend_select()
    kernels = {
        operator: _reading_kernel(watch, getattr(torch.ops.aten, operator).default, call, below)
        for operator, call in _READS.items()
    }
    with in_front_of_backends(kernels):
        yield


def _reading_kernel(watch: Watch, operator: Any, call: str, below: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not watch.active or watch.reading():
            return operator.redispatch(keyset & below, tensor, *args, **kwargs)
        watch._local.reading = True
        file, line, inside = user_line(sys._getframe(1))
        start = time.time_ns()
        try:
            return operator.redispatch(keyset & below, tensor, *args, **kwargs)
        finally:
            watch._local.reading = False
            end, thread = time.time_ns(), threading.get_native_id()
            watch._reads.append(SyncPoint(start, end, thread, call, tensor.device.type, file, line, inside))

    return kernel


@contextmanager
def watched_cuda_syncs(watch: Watch) -> Iterator[None]:
    """Turn on torch's sync debug mode, which warns at every synchronising CUDA call; the warnings are taken as records and
    not shown."""
    if not torch.cuda.is_initialized() or torch.cuda.get_sync_debug_mode() != 0:
        yield
        return
    with ignoring_warning("Synchronization debug mode"):  # a prototype, torch says
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with sync_warnings_to(watch), waits_noted(watch, torch.cuda), waits_noted(watch, torch.cuda.Event):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def sync_warnings_to(watch: Watch) -> Iterator[None]:
    message = "called a synchronizing CUDA operation"
    show = warnings.showwarning

    def note(text: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if message in str(text):
            watch.waited("cuda sync", sys._getframe(1))
        else:
            show(text, category, *rest, **named)

    warnings.filterwarnings("always", message=f".*{message}")
    entry = warnings.filters[0]
    warnings.showwarning = note  # type: ignore[assignment]
    try:
        yield
    finally:
        if warnings.showwarning is note:
            warnings.showwarning = show
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def waits_noted(watch: Watch, owner: Any) -> Iterator[None]:
    """Note the waits that the user calls by name, `torch.cuda.synchronize` and `Event.synchronize`: torch's sync debug mode
    is silent there."""
    wait = owner.synchronize
    call = f"{owner.__name__}.synchronize"

    @functools.wraps(wait)
    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.waited(call, sys._getframe(1))
        return wait(*args, **kwargs)

    owner.synchronize = noted
    try:
        yield
    finally:
        if owner.synchronize is noted:
            owner.synchronize = wait


@contextmanager
def ignoring_warning(message: str) -> Iterator[None]:
    """Ignore one warning, leaving the user's other filters alone: compiled modules warn that global hooks fire once more."""
    warnings.filterwarnings("ignore", message=message)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------- lines

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_PACKAGE = Path(surokit.__file__).resolve().parent
# folders of our own files, with what they are called: an editable install leaves the kernels outside of the package's
_OWN = {
    str(_PACKAGE) + os.sep: "surokit/",
    str(Path(str(reference.__file__)).resolve().parent.parent) + os.sep: "surokit/kernels/",
}
# what stands between a user's line and a library's while it is profiled
_BETWEEN = (f"{_PACKAGE / 'profiler'}{os.sep}", str(_PACKAGE / "torch_private.py"), _TORCH + "_ops.py", "<frozen")
_LIBRARIES = tuple(
    {
        path + os.sep
        for key, path in sysconfig.get_paths().items()
        if key in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_library: dict[
    str, str | None
] = {}  # source file -> its path inside its library ("" to stay silent), None for the user's own

# How a source file is called in a profile; the magics' extension says "cell [3]" here for notebook cells.
name_source: Callable[[str], str] = str


def user_line(frame: FrameType | None) -> tuple[str, int, str]:
    """Return file and line of the innermost frame that is the user's own (not torch, this package, the standard library or
    an installed one), and "torch/optim/adam.py:12" for the library frame that did it in between. Without a user frame, the
    innermost frame."""
    first, inside, inside_line = frame, "", 0
    while frame is not None:
        file = frame.f_code.co_filename
        try:
            library = _library[file]
        except KeyError:
            library = _library[file] = _inside_library(file)
        if library is None:
            return file, frame.f_lineno, f"{inside}:{inside_line}" if inside else ""
        if library and not inside:
            inside, inside_line = library, frame.f_lineno
        frame = frame.f_back
    own = f"{inside}:{inside_line}" if inside.startswith("surokit/") else ""  # one of our threads
    return (first.f_code.co_filename, first.f_lineno, own) if first is not None else ("", 0, "")


def _inside_library(file: str) -> str | None:
    if file.startswith(_BETWEEN):
        return ""
    for folder, name in _OWN.items():
        if file.startswith(folder):
            return name + file[len(folder) :].replace(os.sep, "/")
    if file.startswith(_TORCH):
        return "torch/" + file[len(_TORCH) :].replace(os.sep, "/")
    for folder in sorted(_LIBRARIES, key=len, reverse=True):
        if file.startswith(folder):
            return file[len(folder) :].replace(os.sep, "/")
    return None


class Sampler:
    """A Sampler is a thread that notes the profiled thread's line every 5 ms: evidence for gaps, where no operator runs."""

    def __init__(self, thread: int) -> None:
        self.thread = thread  # Python's id of the thread to look at; may be changed while it runs
        self._seen: list[tuple[int, str, int]] = []
        self._spent_ns = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="surokit-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            now = time.time_ns()
            frame = sys._current_frames().get(self.thread)
            if frame is None:
                break
            try:
                file, line, _ = user_line(frame)
            # CPython 3.11 may take for a running thread's frame what is none any more (its issue 97002)
            except AttributeError:
                continue
            finally:
                del frame
            self._seen.append((now, file, line))
            self._spent_ns += time.time_ns() - now

    def cost_ns(self) -> float:
        return self._spent_ns / max(len(self._seen), 1)

    def samples(self) -> tuple[tuple[tuple[str, int], ...], Any, Any]:
        """Return the places (file and line), and for each sample the index of its place and its time."""
        index: dict[tuple[str, int], int] = {}
        place = [index.setdefault((file, line), len(index)) for _, file, line in self._seen]
        moment = [t for t, _, _ in self._seen]
        return tuple(index), np.array(place, np.int64), np.array(moment, np.int64)


# ----------------------------------------------------------------------------------------------------------------
