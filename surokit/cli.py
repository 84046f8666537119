"""The command line: `surokit doctor | plan | quickstart`, each the function of that name with the same words.

A user's error prints one line to stderr and exits with 2; a failing notebook exits with 1, an interrupt with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaint on one line."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


class _UsageError(ValueError):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    import surokit

    parser = _Parser(prog="surokit", description="Train, watch and compare low-precision recipes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"surokit {surokit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor | plan | quickstart")

    doctor = commands.add_parser("doctor", help="what this machine has, which formats are native, what is missing")
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="FLOPs, time, cost and memory of a run", allow_abbrev=False)
    plan.add_argument("what", help="number of parameters (405e9), or a folder or config.json")
    numbers = {
        "--tokens": "tokens of the whole run",
        "--gpus": "number of GPUs",
        "--tflops-per-gpu": "achieved TFLOPS of one GPU",
        "--mfu": "or its share of the dense BF16 peak",
        "--goodput": "share of the hours that makes progress",
        "--usd-per-gpu-hour": "price",
        "--batch": "sequences a step, on one GPU",
        "--length": "tokens of a sequence",
        "--zero": "ZeRO stage, 0 to 3",
    }
    for name, text in numbers.items():
        plan.add_argument(name, type=_number, help=text, metavar="N")
    for name, text in {
        "--gpu": "name in the hardware table, such as H100",
        "--recipe": "name of a recipe, such as fp8 or qfp8",
        "--attention": "causal or full",
        "--recompute": "none, selective or full",
        "--optimizer": "adamw, adamw8bit or sgd",
        "--state-dtype": "dtype of the optimizer's moments",
        "--dtype": "dtype of weights and gradients",
    }.items():
        plan.add_argument(name, help=text)
    plan.add_argument("--fits", type=_number, metavar="GIB", help="also say whether it fits in so many GiB")
    plan.set_defaults(run=_plan)

    quickstart = commands.add_parser("quickstart", help="run the quickstart notebook headless and keep what it made")
    quickstart.add_argument(
        "--run-dir", type=Path, default=Path("runs/quickstart"), help="folder; the next free name if taken"
    )
    quickstart.set_defaults(run=_quickstart)
    return parser


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 15.6 trillion as 15.6e12") from None
    return int(value) if value.is_integer() else value


def _doctor(_: argparse.Namespace) -> int:
    from surokit.environment import doctor

    found = doctor()
    print(found)
    return 0 if found.ok else 1


def _plan(arguments: argparse.Namespace) -> int:
    from surokit.planner import plan

    what: Any = arguments.what
    with contextlib.suppress(ValueError):  # else it is a path
        what = float(what)
    given = {k: v for k, v in vars(arguments).items() if v is not None and k not in ("command", "run", "what", "fits")}
    planned = plan(what, **given)
    print(planned)
    if arguments.fits is not None:
        words = "fits" if planned.fits(arguments.fits) else "does not fit"
        print(
            f"\n  {words} in {arguments.fits:g} GiB: {planned.memory.gib:.1f} GiB, most of it {planned.memory.largest.name}"
        )
    return 0


def _quickstart(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    raise SystemExit(main())
