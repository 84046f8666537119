"""Run `surokit doctor`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from surokit.cli.options import print_json


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    doctor = commands.add_parser("doctor", help="what this machine has, which formats are native, what is missing")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what this machine has: 0 where all is well, else 1."""
    from surokit.environment import doctor

    found = doctor()
    if arguments.json:
        print_json({"ok": found.ok, "findings": [asdict(finding) for finding in found.findings]})
    else:
        print(found)
    return 0 if found.ok else 1
