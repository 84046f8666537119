"""Run `surokit watch`: follow runs from their folders."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    watch = commands.add_parser(
        "watch",
        help="follow runs from their folders until they end; a folder may come later; Ctrl-C ends the watching only",
    )
    watch.add_argument("folders", nargs="+", metavar="FOLDER", help="the run_dir of a run, or a folder of some")
    watch.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show runs until they end: 130 where the watching was interrupted."""
    from surokit.widgets.follow import watch

    _wait_for(arguments.folders)
    seen = watch(*arguments.folders, view="text")
    status = 0
    try:
        seen.wait()
    except KeyboardInterrupt:
        status = 130
        seen.stop_following()
    print(seen)
    return status


_LOOK_EVERY_S = 0.5


def _wait_for(folders: Sequence[str]) -> None:
    """Wait until every folder that is not there yet is there, and holds what says whose it is."""
    from surokit.widgets.folder import begun

    missing = [path for path in (Path(folder).expanduser() for folder in folders) if not path.exists()]
    for path in missing:
        print(f"Waiting for {path}, which is not there yet; Ctrl-C ends the waiting.", file=sys.stderr, flush=True)
    tick = threading.Event()
    while not all(map(begun, missing)):
        tick.wait(_LOOK_EVERY_S)
