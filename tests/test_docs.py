"""The documentation is true: its code runs, it shows what comes out, its links lead somewhere, its tables are the tests' own.

In a page of docs/, a `python` block is run, and a `text` block right behind one is what it prints ("..." stands for anything).
`ipython` blocks are notebook cells and run too; a block that begins with `>>>` is a doctest. The blocks of a page share one
namespace and a temporary folder. A block that cannot run has `<!-- not run: why -->` before it. The README is a page as well.

`python -m tests.test_docs` runs the pages and writes new outputs into them.
"""

import contextlib
import doctest
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import surokit as sk
from tests.nn.test_linear import GATES, STORED_GATES
from tests.test_architecture import HOOKS, MAY_IMPORT

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OTHERS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (\S.*?) -->\s*\Z")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it begins at, why it is not run, and where its output stands."""

    language: str
    code: str
    line: int
    why_not: str
    output: re.Match[str] | None


def blocks(text: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None]):
        marked = NOT_RUN.search(text[: fence.start()])
        shown = (
            following
            if following and following[1] == "text" and not text[fence.end() : following.start()].strip()
            else None
        )
        line = text[: fence.start(2)].count("\n") + 1
        yield Block(fence[1], fence[2], line, marked[1] if marked else "", shown if fence[1] == "python" else None)


def run_page(path: Path) -> Iterator[tuple[Block, str]]:
    """Run a page's blocks in the working folder; each python block with what it printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shell = None
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.why_not or block.language not in ("python", "ipython"):
            continue
        if block.language == "ipython":
            shell = shell or notebook(namespace)
            shell.run_cell(block.code, store_history=True).raise_error()
            continue
        printed = io.StringIO()
        if block.code.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(block.code, namespace, path.name, str(path), block.line - 1)
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
                example, out=printed.write, clear_globs=False
            )
            assert not result.failed, printed.getvalue()
            continue
        # as many lines before it as in the page, so that a traceback names the page's line
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield block, printed.getvalue()


def notebook(namespace: dict[str, Any]) -> Any:
    """An IPython shell without files and history, over the page's namespace."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell(config=config, ipython_dir=tempfile.mkdtemp(dir="."), user_ns=namespace)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import torch

    from surokit.profiler.record import watch

    monkeypatch.chdir(tmp_path)
    random = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(random)
    watch.name_source = str  # a shell with our extension names its cells


@pytest.mark.parametrize("path", [*PAGES, README], ids=lambda p: p.stem)
def test_code_runs_and_prints_what_is_shown(path, folder):
    checker = doctest.OutputChecker()
    for block, printed in run_page(path):
        if block.output is None:
            continue
        want, got = plain(block.output[2]), plain(printed)
        if not checker.check_output(want, got, doctest.ELLIPSIS):
            pytest.fail(f"{path.name}:{block.line} shows\n{want}\nand prints\n{got}", pytrace=False)


def plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_opens_with_its_question(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert lines[0].startswith("# ")
    assert lines[1].startswith("**")
    assert lines[1].rstrip().endswith("?**")


def test_every_public_name_is_on_some_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    missing = [name for name in sk._NAMES if not re.search(rf"(\bsk\.|`){name}\b", text)]
    assert not missing


def test_make_targets_and_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = {
        "doctor",
        "plan",
        "race",
        "reproduce",
        "dissect",
        "serve-bench",
        "watch",
        "launch",
        "export",
        "quickstart",
    }
    for path in [*PAGES, *OTHERS]:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets, path
        assert set(re.findall(r"`surokit ([a-z-]+)", text)) <= commands, path


# -- links


def prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub both write them for plain words."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda p: p.stem)
def test_relative_links_resolve(path):
    for target in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(other), f"{path.name}: {target}"


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=[\"']?(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]+rel=[\"']?(?:stylesheet|preconnect)[^>]+href=[\"']?(?:https?:)?//", text), page
    assert (site / "search" / "search_index.json").is_file()

    # every notebook is a page that the navigation leads to
    start = (site / "index.html").read_text(encoding="utf-8")
    for notebook in NOTEBOOKS:
        assert (site / "notebooks" / f"{notebook.stem}.html").is_file()
        assert f"notebooks/{notebook.stem}.html" in start


def load_hook():
    """docs/notebooks.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("notebooks_hook", DOCS / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_an_executed_notebook_is_a_page_with_its_pictures(tmp_path, monkeypatch):
    hook = load_hook()
    monkeypatch.setattr(hook, "PAGES", tmp_path / "pages")
    cells = [
        new_markdown_cell("# Why?\n\n$2^{-3}$ is small, [more](../docs/data.md)."),
        new_code_cell("show()", metadata={"tags": ["picture"]}),
        new_code_cell("slider"),
    ]
    path = tmp_path / "07_why.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    assert hook.executed(path) is None

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    cells[1].outputs = [new_output("display_data", {"image/png": pixel, "text/plain": "<Figure>"})]
    cells[2].outputs = [new_output("display_data", {hook.WIDGET: {}, "text/plain": "IntSlider()"})]
    (hook.PAGES / path.stem).mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells), hook.PAGES / path.stem / path.name)
    text, pictures = hook.page(hook.executed(path), "07_why_files")
    (name,) = pictures
    assert f"]({name})" in text
    assert pictures[name].startswith(b"\x89PNG")
    assert "<math" in text
    assert "](../data.md)" in text
    assert "IntSlider" not in text

    cells[0].source = "# Another text"
    nbformat.write(new_notebook(cells=cells), path)
    assert hook.executed(path) is None


# -- tables that stand in two places


def rows(path: Path, first_heading: str) -> list[list[str]]:
    """The cells of the table whose first column is called so."""
    found: list[list[str]] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == first_heading:
            inside = True
        elif inside and not cells:
            break
        elif inside and set(cells[0]) != {"-"}:
            found.append(cells)
    assert found, f"{path.name} has no table of {first_heading}"
    return found


def test_the_drawing_of_imports_is_the_tests_own():
    drawn = {
        part.strip("`"): set(re.findall(r"[a-z_]+", imports))
        for part, imports in rows(DOCS / "architecture.md", "part")
    }
    expected = {part: set(names.split()) for part, names in MAY_IMPORT.items() if names != "*"}
    assert drawn == expected
    hooks = {cells[0].strip("`") for cells in rows(DOCS / "architecture.md", "hook")}
    assert hooks == {function for _, _, function in HOOKS}


def test_the_accuracy_table_is_the_tests_own():
    table = {cells[0].strip("`"): tuple(map(float, cells[1:4])) for cells in rows(DOCS / "recipes.md", "dB of")}
    assert table == GATES
    assert {cells[0].strip("`"): float(cells[1]) for cells in rows(DOCS / "recipes.md", "stored")} == STORED_GATES


@pytest.mark.parametrize("name", ["race", "race-hour"])
def test_a_race_that_is_shown_is_the_one_that_is_kept(name):
    shown = (DOCS / "racing.md").read_text(encoding="utf-8")
    assert plain(str(sk.Race.load(DOCS / "measurements" / name))) in plain(shown)


def write_outputs() -> None:
    """Run every page and put what it prints in place of what it shows, where no "..." stands for something."""
    for path in PAGES:
        text, here = path.read_text(encoding="utf-8"), Path.cwd()
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                results = list(run_page(path))
            finally:
                os.chdir(here)
        for block, printed in reversed(results):
            if block.output is not None and "..." not in block.output[2]:
                text = text[: block.output.start(2)] + plain(printed) + text[block.output.end(2) :]
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_outputs()
