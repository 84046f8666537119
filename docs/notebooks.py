"""The notebooks as pages of the documentation, with their pictures.

Outputs are not kept in the repository, so a page shows a copy that was executed: `python docs/notebooks.py` executes the notebooks
that changed since the last time and keeps the copies in runs/pages (`make docs` calls it). For mkdocs this file is a hook that
turns the copies into pages. A notebook without a copy of its present text is shown without outputs, and says so.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "runs" / "pages"
WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_RUN = "!!! note\n    This page was built without running the notebook, so it has no outputs: `make docs` runs it."


def executed(notebook: Path) -> Any:
    """The notebook as it was executed, or None where that was not done since it changed."""
    copy = PAGES / notebook.stem / notebook.name
    if not copy.is_file():
        return None
    now, then = (nbformat.read(path, as_version=4) for path in (notebook, copy))
    same = [cell.source for cell in now.cells] == [cell.source for cell in then.cells]
    failed = any(output.output_type == "error" for cell in then.cells for output in cell.get("outputs", ()))
    return then if same and not failed else None


def page(nb: Any, folder: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their names in `folder`."""
    from latex2mathml.converter import convert
    from nbconvert import MarkdownExporter

    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\$([^$\n]+)\$", lambda formula: convert(formula[1]), cell.source)
            cell.source = cell.source.replace("](../docs/", "](../")
        else:  # a widget is nothing without its kernel; its picture is an output of its own
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    text, resources = MarkdownExporter().from_notebook_node(nb, {"output_files_dir": folder})
    return text, dict(resources.get("outputs", {}))


def on_files(files: Any, config: Any) -> Any:
    """For mkdocs: add a page for each notebook, and its pictures."""
    from mkdocs.structure.files import File

    for notebook in NOTEBOOKS:
        run = executed(notebook)
        text, pictures = page(run or nbformat.read(notebook, as_version=4), f"{notebook.stem}_files")
        if run is None:
            heading, _, rest = text.partition("\n")
            text = f"{heading}\n\n{NOT_RUN}\n{rest}"
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files


def main() -> int:
    """Execute the notebooks that changed; the number that failed."""
    from surokit.headless import execute

    failed = 0
    for notebook in NOTEBOOKS:
        if executed(notebook) is None:
            shutil.rmtree(PAGES / notebook.stem, ignore_errors=True)
            failed += bool(execute(notebook, PAGES / notebook.stem))
    return failed


if __name__ == "__main__":
    sys.exit(main())
