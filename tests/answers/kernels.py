"""What the Triton kernels compile to for compute capability 9.0, by their benchmark: registers, spills, shared memory. Minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import surokit as sk
from tests.answers.book import Book


def write(book: Book) -> None:
    """Compile them in this tree, and write an answer for each kernel of a launch."""
    tree = Path(str(sk.__file__)).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.json"
        # the launches are those of the tree's own tests, so nothing of these questions may stand before them
        command = [sys.executable, "-m", "surokit.bench", "compiled", "--arch", "90", "--out", str(out)]
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, stdout=sys.stderr)
        found = json.loads(out.read_text(encoding="utf-8"))
    book.write("settings", lambda: found["settings"])
    seen: Counter[str] = Counter()
    for row in found["compiled"]:
        name = f"{row['file']} {row['launch']} {row['kernel']}"
        seen[name] += 1
        book.write(f"{name} {seen[name]}", lambda row=row: row)
