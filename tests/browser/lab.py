"""A real JupyterLab, and a notebook in it driven by a real browser.

`Lab` is a server on its own port with its own folders: no setting of the user's is read, nothing of theirs is written.
`Tab` is one notebook in Chromium: cells are run through JupyterLab's own commands, clicks and keys are real. A tab keeps
every request, every console error and every websocket message, so that a test can say what left the machine and what
a panel costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.clocks import until

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_S = 240.0  # a guard against hanging: every wait is for a condition
# the clock that can be moved calls what shall run in an idle moment without the deadline that JupyterLab reads
IDLE = """const idle = window.requestIdleCallback;
window.requestIdleCallback = (call, how) => idle(() => call({ didTimeout: false, timeRemaining: () => 50 }), how);"""


def chromium() -> str | None:
    """Where Chromium is, or None."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Lab:
    """A JupyterLab server that serves `folder`; use it in a `with` block. app: "jupyterlab", or "notebook" for Notebook 7."""

    def __init__(self, folder: Path, app: str = "jupyterlab") -> None:
        self.folder, self.app = folder, app
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Lab:
        own = self.folder / ".jupyter"
        jupyter = ("CONFIG", "DATA", "RUNTIME")
        names = [
            "IPYTHONDIR",
            *(f"JUPYTER_{x}_DIR" for x in jupyter),
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
        ]
        folders = {name: own / name.lower() for name in names}
        for path in folders.values():
            path.mkdir(parents=True, exist_ok=True)
        config = folders["JUPYTER_CONFIG_DIR"] / "labconfig"
        config.mkdir()
        off = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (config / "page_config.json").write_text(json.dumps(off), encoding="utf-8")
        # a save by itself, where a test has moved the clock, meets the one that the test asks for
        saves = {"@jupyterlab/docmanager-extension:plugin": {"autosave": False}}
        (config / "default_setting_overrides.json").write_text(json.dumps(saves), encoding="utf-8")
        command = [sys.executable, "-m", self.app, "--no-browser", "--allow-root", "--expose-app-in-browser"]
        command += [f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"]
        command += [f"--ServerApp.root_dir={self.folder}", "--IdentityProvider.token=", "--ServerApp.password="]
        command += ["--ServerApp.disable_check_xsrf=True", "--MappingKernelManager.cull_idle_timeout=0"]
        self._log = (own / "server.log").open("w", encoding="utf-8")
        environment = {**os.environ, **{name: str(path) for name, path in folders.items()}, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment, cwd=self.folder)
        try:
            wait_for(self._answers, "JupyterLab to start")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()

    def notebook(self, name: str, cells: Sequence[str]) -> Path:
        """Write a notebook with these code cells."""
        import nbformat

        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        # without a kernelspec JupyterLab asks for one in a dialog that blocks clicks
        book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / f"{name}.ipynb"
        nbformat.write(book, path)
        return path

    def _answers(self) -> bool:
        if self._server.poll() is not None:
            log = (self.folder / ".jupyter" / "server.log").read_text(encoding="utf-8")
            raise RuntimeError(f"JupyterLab ended with {self._server.returncode}:\n{log[-2000:]}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.url}/api", timeout=2):
            return True
        return False


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A Playwright browser context on Chromium with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            str(folder / "profile"),
            executable_path=chromium(),
            args=FLAGS,
            headless=True,
            viewport={"width": 1100, "height": 1000},
        )
        context.set_default_timeout(1e3 * WAIT_S)
        try:
            yield context
        finally:
            context.close()


class Tab:
    """A notebook open in the browser.

    The page's clock runs as usual until `later` moves it. requests: every URL asked for. errors: console errors and exceptions of
    scripts. sent, received: websocket messages (text, or bytes).
    """

    def __init__(self, context: Any, lab: Lab, name: str) -> None:
        self.lab, self.name = lab, name
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.sent: list[str | bytes] = []
        self.received: list[str | bytes] = []
        self.page = context.new_page()
        self.page.clock.install()
        self.page.add_init_script(IDLE)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        self.page.on("websocket", self._socket)
        self.open()

    def open(self, kernel: bool = True) -> None:
        """Open the notebook, or open it again: a reload of the page. kernel: wait for one."""
        where = "lab/tree" if self.lab.app == "jupyterlab" else "notebooks"
        self.page.goto(f"{self.lab.url}/{where}/{self.name}.ipynb?reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        if kernel:
            self._until("panel => panel.sessionContext.isReady", "a kernel")

    def connected(self) -> None:
        """Wait until the page hears the kernel, be it busy or not."""
        self._until("panel => panel.sessionContext.session?.kernel?.connectionStatus === 'connected'", "a connection")

    def add(self, source: str) -> int:
        """A new code cell at the end; its number."""
        return int(
            self.page.evaluate(
                """source => {
                    const { model } = jupyterapp.shell.currentWidget.content;
                    model.sharedModel.insertCell(model.cells.length, { cell_type: "code", source });
                    return model.cells.length - 1;
                }""",
                source,
            )
        )

    def cell(self, number: int) -> Any:
        """A Playwright locator of a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def see(self, cell: int) -> None:
        """Scroll to a cell: JupyterLab leaves out what is far away."""
        self._notebook(
            f"panel.content.activeCellIndex = {cell}; panel.content.deselectAll(); panel.content.scrollToItem({cell})"
        )
        self.cell(cell).locator(".jp-Editor").scroll_into_view_if_needed()

    def run(self, cell: int) -> None:
        """Run a cell and return at once."""
        self.see(cell)
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-cell'); }")

    def idle(self, wait_s: float = WAIT_S) -> None:
        """Wait until no cell runs."""
        self._until(
            "panel => panel.content.widgets.every(c => !c.model.executionState || c.model.executionState === 'idle')"
            " && panel.sessionContext.session.kernel.status === 'idle'",
            "the cell to end",
            wait_s,
        )

    def later(self, seconds: float) -> None:
        """Moves the page's clock ahead, as if the machine had slept: each timer that is due by then runs once."""
        self.page.clock.fast_forward(round(1e3 * seconds))

    def running(self, cell: int) -> bool:
        """Whether a cell runs. (The kernel's status says "idle" whenever a subshell has done its work.)"""
        return bool(self._notebook(f"return panel.content.widgets[{cell}].model.executionState === 'running'"))

    def shutdown(self) -> None:
        """End the kernel."""
        self.page.evaluate("async () => { await jupyterapp.shell.currentWidget.sessionContext.shutdown(); }")

    def interrupt(self) -> None:
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:interrupt-kernel'); }")

    def save(self) -> Any:
        """Save the notebook and read the file."""
        import nbformat

        self.page.evaluate("async () => { await jupyterapp.commands.execute('docmanager:save'); }")
        return nbformat.read(self.lab.folder / f"{self.name}.ipynb", as_version=4)

    def theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        self.page.evaluate(
            f"async () => {{ await jupyterapp.commands.execute('apputils:change-theme', {{theme: '{name}'}}); }}"
        )

    def output(self, cell: int) -> str:
        """The text of a cell's outputs."""
        return str(self.cell(cell).locator(".jp-OutputArea").inner_text())

    def outside(self) -> list[str]:
        """Requests that left the machine."""
        here = re.compile(rf"^(http|ws)s?://127\.0\.0\.1:{self.lab.port}/|^(data|blob|about):")
        return [url for url in self.requests if not here.match(url)]

    def _notebook(self, statement: str) -> Any:
        return self.page.evaluate(f"() => {{ const panel = jupyterapp.shell.currentWidget; {statement}; }}")

    def _until(self, condition: str, what: str, wait_s: float = WAIT_S) -> None:
        test = f"() => {{ const panel = jupyterapp.shell.currentWidget; return panel && panel.content && ({condition})(panel); }}"
        wait_for(lambda: bool(self.page.evaluate(test)), what, wait_s)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _socket(self, socket: Any) -> None:
        socket.on("framesent", lambda message: self.sent.append(message))
        socket.on("framereceived", lambda message: self.received.append(message))


def wait_for(condition: Any, what: str, wait_s: float = WAIT_S) -> None:
    """Ask the page until it is so, not more often than it can draw."""
    until(condition, what, wait_s, every_s=0.1)


def paper(element: Any) -> int:
    """How light an element's background is: 0, black, to 765, white."""
    color = str(element.evaluate("e => getComputedStyle(e).backgroundColor"))
    return sum(map(int, re.findall(r"\d+", color)[:3]))
