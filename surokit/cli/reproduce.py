"""Run `surokit reproduce`: a race or a study again, and which figures come out."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.cli.race import run_again

if TYPE_CHECKING:
    from surokit.racing.reproduced import Reproduction


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    reproduce = commands.add_parser(
        "reproduce",
        help="run a race or a study again from its folder, and say which figures come out as it says",
        allow_abbrev=False,
    )
    reproduce.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of a race that `surokit race` has run; or the study's evidence.json",
    )
    reproduce.add_argument("--minutes", type=float, help="for a study: run again what fits (default 60)")
    reproduce.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="for a study: runs whose names contain this, and those they are compared with",
    )
    reproduce.add_argument("--run-dir", type=Path, metavar="FOLDER", help="keep what is run again there")
    reproduce.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run a race or a study again and compare: 0 where every figure comes out as it says, 1 where one does not, and 3 where none
    does not but one was too noisy to tell."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.run_dir or Path(temporary) / "again"
        of = arguments.folder.parent if arguments.folder.name == "race.json" else arguments.folder
        if of.is_file() or (of / "evidence.json").is_file():
            from surokit.bench.evidence_again import reproduce

            minutes = 60.0 if arguments.minutes is None else arguments.minutes
            found = reproduce(of, folder, minutes, arguments.only)
        else:
            if arguments.minutes is not None or arguments.only:
                raise ValueError("--minutes and --only choose from a study: a race is run again as long as it was.")
            found = _race_again(of, folder)
    print(f"\n{found}")
    if arguments.run_dir is not None:
        print(f"Kept in {arguments.run_dir}.")
    if not found.holds:
        return 1
    return 3 if found.is_noisy else 0


def _race_again(of: Path, folder: Path) -> Reproduction:
    """Run the race of a folder again, into a new one."""
    from surokit.racing.folder import words_again
    from surokit.racing.reproduced import compare_races
    from surokit.racing.start import Race

    then = Race.load(of)
    if not then.command:
        raise ValueError(
            f"{of} is a race of a script or notebook, which has the model and the data: run its rerun.py, or call "
            "surokit.Race.load(folder).rerun(model=..., data=...)."
        )
    if then.reason != "done":
        raise ValueError(
            f"{of} is a race that did not come to its end ({then.reason or 'saved while it went on'}), so that there is "
            "nothing to compare with: run its rerun.py, and reproduce the race that this makes."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has content already: give --run-dir another folder for what is run again.")
    status = run_again([*words_again(then), "--run-dir", str(folder)])
    if status == 1:
        raise ValueError(f"An error ended the race when it was run again, so nothing is compared with {of}: see above.")
    if status:
        raise KeyboardInterrupt  # it was stopped, so there is nothing to compare
    return compare_races(then, Race.load(folder))
