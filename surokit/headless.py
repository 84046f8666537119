"""Execute a notebook without a browser, cell by cell, and keep what it made: notebook, web page, pictures.

The kernel is this very interpreter, whatever kernels are installed beside it, and it reads no IPython or Jupyter
settings of the user, so that the run is the same on every machine. What was executed is written whatever happens: a
failing cell, an interrupt, a dead kernel.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from surokit.environment import spare_threads
from surokit.places import make_folder

_KERNEL = "surokit"
_PICTURES = {"image/png": "png", "image/svg+xml": "svg"}


def execute(notebook: Path, run_dir: Path) -> int:
    """Execute `notebook` in a fresh folder (`run_dir`, or the next free name), its working directory.

    Prints a line a cell and, while a cell takes long, what it said last: of a session that trains its step and the time to go.
    At the end it prints the text of the cell tagged "result", and the web page that it kept. Returns 0, 1 after a failing cell, 130
    after an interrupt. Raises ModuleNotFoundError where nbclient or ipykernel are missing.
    """
    _require()
    import nbformat

    nb = nbformat.read(notebook, as_version=4)
    nb.metadata.setdefault("language_info", {"name": "python"})
    folder = fresh_folder(run_dir)
    print(f"{notebook.name} in {folder}", flush=True)
    try:
        status = _run(nb, folder)
    finally:
        kept = _keep(nb, folder, notebook.stem)
    if status == 0 and (text := result_text(nb)):
        print(f"\n{text}\n")
    print(kept.resolve())
    return status


def fresh_folder(wanted: Path) -> Path:
    """Make `wanted`, or wanted-2, wanted-3, ... if it is there already; made in one step, so two runs never share one."""
    make_folder(wanted.parent, "folder")
    folder, n = wanted, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            n += 1
            folder = wanted.with_name(f"{wanted.name}-{n}")


def result_text(nb: Any) -> str:
    """Return the plain text of the cell tagged "result": its values, else what it printed."""
    values, printed = [], []
    for cell in nb.cells:
        if "result" not in cell.metadata.get("tags", ()):
            continue
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                printed.append(output.text)
            elif "text/plain" in output.get("data", {}):
                values.append(output.data["text/plain"])
    return "\n".join(values or printed).rstrip()


def _require() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f'Running a notebook needs {" and ".join(missing)}: pip install "surokit[lab]".')


def _run(nb: Any, folder: Path) -> int:
    """Execute the cells in place, a line each; the exit status."""
    from nbclient import NotebookClient

    class Client(NotebookClient):
        """A client that also tells the progress what a cell says."""

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if said := _last_words(msg):
                progress.tell(said)
            return super().process_message(msg, cell, cell_index)

    progress = Progress(sys.stdout)

    code = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code" and cell.source.strip()]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        resources = {"metadata": {"path": str(folder)}}
        client = Client(nb, km=_kernel_manager(scratch), kernel_name=_KERNEL, timeout=None, resources=resources)
        client.reset_execution_trackers()
        # cleanup_kc: nbclient leaves a kernel running whose manager it did not make
        # what the kernel's process itself says, as it does when it is shut down in the middle of a cell, is no business of ours
        log = stack.enter_context((scratch / "kernel.log").open("w", encoding="utf-8"))
        with client.setup_kernel(env=_kernel_environment(scratch), cleanup_kc=True, stderr=log):
            for n, i in enumerate(code, 1):
                try:
                    progress.begin(f"[{n:>2}/{len(code)}] {_first_line(nb.cells[i].source)}")
                    status, outcome = _execute_cell(client, i, n)
                    progress.end()
                    client.set_widgets_metadata()
                except KeyboardInterrupt:
                    status, outcome = 130, "was interrupted."
                if status:
                    print(f"\nCell {n} {outcome}", file=sys.stderr)
                    return status
    return 0


class Progress:
    """Progress prints a line for the cell that runs. On a terminal what the cell said last stands behind it; in a log it gets a
    line now and then.

    stream: where it is written. clock: seconds, monotonic.
    """

    EVERY_S = 0.5  # on a terminal
    LOG_EVERY_S = 15.0
    WIDTH = 118

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream, self._clock = stream, clock
        self._every_s = self.EVERY_S if stream.isatty() else self.LOG_EVERY_S
        self._line = ""
        self._broken = False  # the cell's own line has ended, in a log
        self._began_s = self._told_s = 0.0

    def begin(self, line: str) -> None:
        """Show the line of a cell that begins."""
        self._line, self._broken = line[: self._width], False
        self._began_s = self._told_s = self._clock()
        self._write(self._line)

    def tell(self, words: str) -> None:
        """Show what the cell said last, if it is time."""
        if self._clock() - self._told_s < self._every_s:
            return
        self._told_s = self._clock()
        if self._stream.isatty():
            self._write(f"\r{f'{self._line}  {words}'[: self._width]:<{self._width}}")
        else:
            self._write(f"\n        {words[: self._width]}")
        self._broken = True

    def end(self) -> None:
        """Show how long the cell took."""
        taken = f"  {self._clock() - self._began_s:.1f} s\n"
        if not self._broken:
            self._write(taken)
        elif self._stream.isatty():
            taken = taken.rstrip()
            self._write(f"\r{self._line[: self._width - len(taken)] + taken:<{self._width}}\n")
        else:
            self._write(f"\n      {taken}")

    @property
    def _width(self) -> int:
        """Return the columns of a line: one longer than a terminal could not be written over."""
        if not self._stream.isatty():
            return self.WIDTH
        return min(self.WIDTH, max(shutil.get_terminal_size((self.WIDTH, 24)).columns - 1, 20))

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


def _last_words(message: Any) -> str:
    """Return the line of a kernel's message that says how a cell goes on: the first of a display's text, the last that was
    printed."""
    content = message["content"]
    if message["msg_type"] in ("display_data", "update_display_data"):
        lines = content["data"].get("text/plain", "").strip().splitlines()
        return lines[0].strip() if lines and not lines[0].startswith("<") else ""  # of a picture there are no words
    if message["msg_type"] == "stream":
        lines = content["text"].strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""


def _execute_cell(client: Any, index: int, count: int) -> tuple[int, str]:
    """Return (exit status, what became of the cell where that is not 0)."""
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    cell = client.nb.cells[index]
    try:
        client.execute_cell(cell, index, execution_count=count)
    except CellExecutionError as error:
        return 1, f"failed:\n{_plain(cell, error)}"
    except DeadKernelError:
        return 1, "ended the kernel, most likely for want of memory."
    return 0, ""


def _kernel_manager(scratch: Path) -> Any:
    """Return a manager of one kernel: this interpreter."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    spec = scratch / "kernels" / _KERNEL
    spec.mkdir(parents=True)
    # -Xfrozen_modules=off keeps the debugger's warning out of the first cell
    argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = json.dumps({"argv": argv, "display_name": "surokit", "language": "python"})
    (spec / "kernel.json").write_text(text, encoding="utf-8")
    specs = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
    manager = AsyncKernelManager(
        kernel_name=_KERNEL, kernel_spec_manager=specs, connection_file=str(scratch / "connection.json")
    )
    if sys.platform != "win32":  # sockets in our own folder, which nobody else on the machine can read
        manager.transport, manager.ip = "ipc", str(scratch / "socket")
    return manager


def _kernel_environment(scratch: Path) -> dict[str, str]:
    """Return the process's environment, with empty folders in place of the user's IPython and Jupyter settings.

    On a busy processor torch gets no more threads than cores are free: all of its threads wait for the slowest.
    """
    own = {name: str(scratch / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    if "OMP_NUM_THREADS" not in os.environ and (threads := spare_threads()) is not None:
        print(f"The processor is busy: torch computes with {threads} thread{'s' * (threads > 1)} here.", flush=True)
        own["OMP_NUM_THREADS"] = str(threads)
    return {**os.environ, **own}


def _first_line(source: str, width: int = 72) -> str:
    """Return the first line that says something, cut to fit."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return lines[0] if len(lines[0]) <= width else lines[0][: width - 3] + "..."


def _plain(cell: Any, error: Exception) -> str:
    """Return the traceback as the notebook shows it, without colours."""
    for output in cell.get("outputs", ()):
        if output.output_type == "error":
            return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
    return str(error)


def _keep(nb: Any, folder: Path, name: str) -> Path:
    """Write the executed notebook, its pictures, and a web page of it, which is returned; without nbconvert there is none, and the
    folder is."""
    import nbformat

    nbformat.write(nb, folder / f"{name}.ipynb")
    for i, cell in enumerate(nb.cells):
        pictures = [
            (kind, data[kind])
            for output in cell.get("outputs", ())
            if (data := output.get("data", {}))
            for kind in _PICTURES
            if kind in data
        ]
        for n, (kind, content) in enumerate(pictures, 1):
            raw = base64.b64decode(content) if kind == "image/png" else content.encode("utf-8")
            (folder / f"cell-{i + 1:02}-{n}.{_PICTURES[kind]}").write_bytes(raw)
    try:
        from nbconvert import HTMLExporter
    except ModuleNotFoundError:
        print('No web page without nbconvert: pip install "surokit[lab]".', file=sys.stderr)
        return folder
    quiet = logging.Logger("nbconvert", logging.ERROR)  # it asks for alternative texts of our own pictures
    text, _ = HTMLExporter(template_name="lab", log=quiet).from_notebook_node(nb)
    page = folder / f"{name}.html"
    page.write_text(text, encoding="utf-8")
    return page
