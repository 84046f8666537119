"""Writes the answers of the surokit that is imported: python -m tests.answers.write GROUP FILE TREE [MADE].

TREE is where surokit must come from: an editable install of another checkout must not answer in its place.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

GROUPS = ("plans", "profiles", "reports", "runs", "folders", "kernels")


def main(group: str, file: str, tree: str, made: str = "") -> None:
    """Ask the questions of a group, and write a line an answer."""
    import torch

    import surokit
    from surokit.kernels import reference
    from tests.answers.book import Book
    from tests.answers.walk import name_place

    found = [Path(str(module.__file__ or next(iter(module.__path__)))).resolve() for module in (surokit, reference)]
    print(f"answers of {surokit.__file__}")
    if strangers := [path for path in found if not path.is_relative_to(Path(tree).resolve())]:
        raise SystemExit(
            f"surokit comes from {strangers[0]} and not from {tree}: another one is installed in its place."
        )
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    name_place(Path(tree), "TREE")
    name_place(Path(sys.prefix), "ENVIRONMENT")
    module = import_module(f"tests.answers.{group}")
    module.write(Book(Path(file)), **({"made": Path(made)} if made else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
