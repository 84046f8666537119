"""Run the command line, `surokit doctor | plan | race | reproduce | dissect | serve-bench | watch | launch | export | quickstart`.

Each command is a file of that name, which adds its arguments and runs it. A user's error prints one line to stderr and exits with
2; a failing notebook and a race that an error ends exit with 1, an interrupt or a stop with 130.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from surokit.cli import dissect, doctor, export, launch, plan, quickstart, race, reproduce, serve_bench, watch
from surokit.cli.options import Parser

COMMANDS = {
    "doctor": doctor,
    "plan": plan,
    "race": race,
    "reproduce": reproduce,
    "dissect": dissect,
    "serve-bench": serve_bench,
    "watch": watch,
    "launch": launch,
    "export": export,
    "quickstart": quickstart,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    try:
        arguments = make_parser().parse_args(argv)
        arguments.argv = list(sys.argv[1:] if argv is None else argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as in `surokit plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"surokit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("surokit: interrupted", file=sys.stderr)
        return 130


def make_parser() -> Parser:
    """Return the parser of all commands."""
    import surokit

    parser = Parser(prog="surokit", description="Train, watch and compare low-precision recipes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"surokit {surokit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for command in COMMANDS.values():
        command.add(commands)
    return parser
