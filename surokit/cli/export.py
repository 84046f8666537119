"""Run `surokit export`: a Hugging Face folder, or an adapter's, of a run's checkpoint."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    export = commands.add_parser("export", help="make a Hugging Face folder, or an adapter's, of a run's checkpoint")
    export.add_argument("source", metavar="RUN", help="the run_dir of a run, or one checkpoint in it")
    export.add_argument("folder", metavar="FOLDER", help="the folder to write")
    export.add_argument("--base", help="name or folder of the model that an adapter belongs to")
    export.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print where it is."""
    from surokit.train.exporting import export

    print(export(arguments.source, arguments.folder, arguments.base))
    return 0
