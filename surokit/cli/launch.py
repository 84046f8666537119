"""Run `surokit launch`: a script in several processes of this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    launch = commands.add_parser(
        "launch",
        help="run a script in several processes of this machine, one for each GPU; several machines are torchrun's",
        usage="surokit launch [--gpus N] [--restarts N] [--hang SECONDS] [--output all|first|none] SCRIPT [ARGUMENT ...]\n"
        "       surokit launch [...] -m MODULE [ARGUMENT ...]",
        allow_abbrev=False,
    )
    launch.add_argument("--gpus", type=int, help="how many processes; all GPUs of this machine where it is not given")
    launch.add_argument("--restarts", type=int, default=0, help="how often all start anew after one has failed")
    launch.add_argument(
        "--hang", type=float, default=600.0, metavar="SECONDS", help="in which a session's run makes a step"
    )
    launch.add_argument("--output", choices=("all", "first", "none"), default="all", help="whose lines are shown")
    launch.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    launch.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT")
    launch.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Launch a script and wait for it: 1 where it failed."""
    from surokit.launching.launch import launch_script
    from surokit.launching.outcome import LaunchError

    try:
        launch_script(
            arguments.script,
            arguments.is_module,
            gpus=arguments.gpus,
            restarts=arguments.restarts,
            hang_s=arguments.hang,
            output=arguments.output,
        )
    except LaunchError as error:
        print(f"surokit: {error}", file=sys.stderr)
        return 1
    return 0
