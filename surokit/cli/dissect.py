"""Run `surokit dissect`: the arguments of `sk.dissect` under their own names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from surokit.cli.options import add_with_examples, check_picture, number, split_at_commas

_EXAMPLES = """\
examples:
  surokit dissect config.json --batch 2 --length 350 --what tune
  surokit dissect my/model --over attention=math,flash recompute=none,full batch=1,2,largest --folder runs/server-a
  surokit dissect config.json --what infer --over recipe=bf16,qfp8,qnf4 --report report"""


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    dissect = add_with_examples(
        commands,
        "dissect",
        help="what each optimization of a step brings, alone and together",
        examples=_EXAMPLES,
    )
    dissect.add_argument(
        "model", metavar="CONFIG", help="a config.json (random weights), a folder or a model of the Hub"
    )
    dissect.add_argument("--what", choices=("train", "tune", "infer"), default="train", help="(train)")
    for name, (value, what) in {
        "--batch": (2, "sequences of a batch (2)"),
        "--length": (350, "tokens of a sequence (350)"),
        "--steps": (10, "that are timed in each cell and round (10)"),
        "--rounds": (5, "of all cells in turn (5); with fewer there is no interval"),
        "--seed": (0, "of everything that is drawn (0)"),
        "--limit-s": (600, "seconds that a cell may take in a round (600)"),
        "--gib": (None, "memory that a cell may take (the device's)"),
        "--lr": (3e-4, "learning rate (3e-4)"),
    }.items():
        dissect.add_argument(name, type=number, default=value, help=what, metavar="N")
    dissect.add_argument(
        "--over",
        nargs="+",
        default=None,
        metavar="SWITCH=VALUES",
        help="separated by commas, the first is the baseline's; one alone is set against the default",
    )
    dissect.add_argument(
        "--together",
        choices=("no", "last", "all"),
        default="last",
        help="cells of several switches (one, the last values)",
    )
    dissect.add_argument("--device", metavar="NAME", help="cuda or cpu; a GPU where there is one")
    dissect.add_argument("--folder", type=Path, help="keep the cells there; a second call goes on")
    dissect.add_argument("--plot", type=Path, metavar="FILE", help="the picture: .png, .svg or .pdf")
    dissect.add_argument("--report", type=Path, metavar="FOLDER", help="write a report in Markdown")
    dissect.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Dissect a step and print the table."""
    import surokit as sk

    check_picture(arguments.plot)
    over = None if arguments.over is None else dict(map(_switch, arguments.over))
    named = ("what", "steps", "rounds", "seed", "limit_s", "gib", "lr", "device", "folder")
    given = {name: getattr(arguments, name) for name in named}
    together: Any = {"no": False, "last": True, "all": "all"}[arguments.together]
    found = sk.dissect(arguments.model, (arguments.batch, arguments.length), over=over, together=together, **given)
    print(found)
    if arguments.plot is not None:
        found.plot().savefig(arguments.plot, dpi=150)
    if arguments.report is not None:
        print(f"report: {found.report(arguments.report)}")
    return 0


def _switch(text: str) -> tuple[str, Any]:
    """Read a switch and its values, as in recompute=none,full, or one value alone."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--over {text!r}: write a switch and its values, as in recompute=none,full.")
    found = tuple(map(_value, split_at_commas(values)))
    return name, found if len(found) > 1 else found[0]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdigit() else text
