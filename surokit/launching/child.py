"""Do what was launched in one of its processes: `python -m surokit.launching.child FOLDER`, started by torchelastic's agent.

The launch's folder has the call, or the script and its arguments, and takes what becomes of it: the value of the first process, and
for one that fails its words. The environment is set before torch is imported, which reads some of it then.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from surokit.launching.call import loaded, value_bytes
from surokit.places import write_whole
from surokit.ranks import FOLDER, HANG_S, rank_here

CALL, VALUE, SETTINGS, ENDED = "call.pkl", "value.pkl", "settings.json", "ended"
PDEATHSIG = 1  # of prctl(2)


def main(folder: Path) -> None:
    if (folder / ENDED).exists():  # whoever asked for the launch has ended it
        os._exit(1)
    settings = json.loads((folder / SETTINGS).read_text())
    os.environ |= {FOLDER: str(folder), **settings["environment"]}
    if settings["hang_s"]:
        os.environ[HANG_S] = str(settings["hang_s"])
    _die_with(settings["launcher"])
    here = rank_here()
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with (folder / log_name(name, here.restarts, here.number)).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    (folder / f"pid-{here.number}").write_text(str(os.getpid()))
    try:
        value = _do(folder, settings)
        if here.is_first:
            write_whole(folder / VALUE, value_bytes(value))
        _leave()
        if settings["script"] is None:
            _end()
    except BaseException as error:
        if settings["script"] is not None and isinstance(error, SystemExit) and not error.code:
            return  # as the script would end by itself
        words = {
            "rank": here.number,
            "restarts": here.restarts,
            "at": time.time(),
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(type(error), error, _below(error.__traceback__))),
        }
        write_whole(folder / f"error-{here.restarts}-{here.number}.json", json.dumps(words).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of a process group that waits for others would hold the process


def log_name(stream: str, restarts: int, rank: int) -> str:
    """Return the name of the file that a process prints to. stream: "out" or "err"."""
    return f"{restarts:03d}-{rank:03d}.{stream}"


def _do(folder: Path, settings: dict[str, Any]) -> Any:
    """Do what was launched and return its value: of a function that ends itself by sys.exit(0), and of a script, none."""
    if settings["script"] is None:
        sys.path[:] = settings["path"]
        train, args, kwargs = loaded((folder / CALL).read_bytes())
        _take_gpu()
        try:
            return train(*args, **kwargs)
        except SystemExit as ended:
            if ended.code:
                raise
            return None
    sys.argv = [*settings["script"]]
    if settings["is_module"]:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    return None


def _leave() -> None:
    """End the process group once all are here: one that leaves early breaks the connections of the others, which end with it."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _end() -> None:
    """End the process of a function as multiprocessing ends its own: threads that are no daemons end, exit functions run, and the
    interpreter is not taken down. Threads of torch and of a process group may still run then, and some abort the process. A script
    ends as Python ends one, which also writes what its open files hold."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _below(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in ours:
        tb = tb.tb_next
    return tb


def _take_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(rank_here().local % torch.cuda.device_count())


def _die_with(launcher: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it has ended before this could be said
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
