"""Run `surokit export`: a Hugging Face folder, or an adapter's, of a run's checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    export = commands.add_parser("export", help="make a Hugging Face folder, or an adapter's, of a run's checkpoint")
    export.add_argument("source", metavar="RUN", help="the run_dir of a run, or one checkpoint in it")
    export.add_argument("folder", metavar="FOLDER", help="the folder to write")
    export.add_argument(
        "--base", help="name or folder of the model that an adapter belongs to; of a LoftQ adapter the decoded weights"
    )
    export.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print where it is."""
    from surokit.models.adapter import CONFIG
    from surokit.models.folder import read_json
    from surokit.train.exporting import export

    folder = export(arguments.source, arguments.folder, arguments.base)
    print(folder)
    if (folder / CONFIG).exists() and read_json(folder / CONFIG)["base_model_name_or_path"] is None:
        print(
            "surokit: the adapter does not say which model it belongs to, so that a reader has to be given it: --base NAME "
            "writes it down.",
            file=sys.stderr,
        )
    return 0
