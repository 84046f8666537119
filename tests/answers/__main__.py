"""Compare what BASE and the working copy answer: python -m tests.answers BASE, and --help for the rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.answers import trees
from tests.answers.compare import differences, read
from tests.answers.write import GROUPS

_MOST = 20  # differences that are printed of a group


def main(arguments: list[str] | None = None) -> int:
    """0 where all answers are equal, 1 where one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=str(__doc__).partition(":")[0])
    parser.add_argument("base", help="a revision, such as main~3")
    parser.add_argument(
        "--only",
        default=",".join(group for group in GROUPS if group != "kernels"),
        help=f"of {','.join(GROUPS)}; kernels takes minutes",
    )
    parser.add_argument("--all", action="store_true", help="kernels too")
    parser.add_argument("--keep", type=Path, help="a folder in which BASE's answers wait for the next time")
    parser.add_argument("--but", action="append", default=[], help='what may differ: "key: place", * matches anything')
    given = parser.parse_args(arguments)
    groups = GROUPS if given.all else tuple(given.only.split(","))
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"there is no group {unknown[0]!r}: {', '.join(GROUPS)}")
    equal = True
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        pair = trees.Pair(Path(folder), given.base, given.keep)
        for group in groups:
            began = time.monotonic()
            base, working = (read(path) for path in pair.ask(group))
            found = differences(base, working, tuple(given.but))
            equal &= not found
            print(f"{group}: {_verdict(len(working), len(found))}, {time.monotonic() - began:.0f} s", flush=True)
            for line in found[:_MOST]:
                print(f"  {line}")
            if len(found) > _MOST:
                print(f"  and {len(found) - _MOST:,} more")
    return 0 if equal else 1


def _verdict(answers: int, found: int) -> str:
    return f"{answers:,} answers are equal" if not found else f"{found:,} differences in {answers:,} answers"


if __name__ == "__main__":
    sys.exit(main())
