"""Run `surokit quickstart`: the first notebook, headless."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    quickstart = commands.add_parser("quickstart", help="run the quickstart notebook headless and keep what it made")
    quickstart.add_argument(
        "--run-dir", type=Path, default=Path("runs/quickstart"), help="folder; the next free name if taken"
    )
    quickstart.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the notebook and keep what it made."""
    from importlib.resources import as_file, files

    from surokit.headless import execute

    try:
        notebook = files("surokit.notebooks").joinpath("01_quickstart.ipynb")
    except ModuleNotFoundError:
        notebook = None
    if notebook is None or not notebook.is_file():
        raise FileNotFoundError("The quickstart notebook is not in this installation: install surokit again.")
    with as_file(notebook) as path:
        return execute(path, arguments.run_dir)
