"""Two trees of the repository, side by side, and a process that asks the surokit of one of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Pair:
    """BASE and the working copy in folders of their own, so that nobody's edits meet a process that is still importing.

    Both are asked by the working copy's questions. With `keep`, what BASE answered stays there by its commit and these questions.
    """

    def __init__(self, folder: Path, base: str, keep: Path | None = None) -> None:
        self.folder = folder
        commit = _git("rev-parse", "--verify", f"{base}^{{commit}}").strip()
        self.base, self.working, self.asking = folder / "base", folder / "working", folder / "asking"
        self.base.mkdir()
        archive = subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(self.base)], stdin=archive.stdout, check=True)
        if archive.wait():
            raise SystemExit(f"git archive {commit} failed.")
        for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            if name and (ROOT / name).is_file():
                (self.working / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.working / name)
        shutil.copytree(self.working / "tests", self.asking / "tests")
        self.kept = folder / "of-base"
        if keep is not None:
            self.kept = keep.resolve() / f"{commit[:12]}-{_questions(self.asking / 'tests')}"
        self.kept.mkdir(parents=True, exist_ok=True)

    def ask(self, group: str) -> tuple[Path, Path]:
        """BASE's answers to the questions of a group, and the working copy's.

        Folders that BASE made are continued by both, each in a copy of its own.
        """
        base, working, made = self.kept / f"{group}.jsonl", self.folder / f"{group}.jsonl", self.kept / "made"
        if not base.exists():
            if group == "folders":
                shutil.rmtree(made, ignore_errors=True)
                self._write("folders_made", self.kept / "made.jsonl", self.base, made)
            partial = base.with_suffix(".part")
            self._write(group, partial, self.base, self._copy(made) if group == "folders" else None)
            partial.rename(base)
        self._write(group, working, self.working, self._copy(made) if group == "folders" else None)
        if group == "folders":
            self._write("folders_made", self.folder / "made.jsonl", self.working, self.folder / "made-here")
            _join(base, self.kept / "made.jsonl", base := self.folder / "base-folders.jsonl")
            _join(working, self.folder / "made.jsonl", working := self.folder / "working-folders.jsonl")
        return base, working

    def _copy(self, made: Path) -> Path:
        copy = self.folder / "copied"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(made, copy)
        return copy

    def _write(self, group: str, file: Path, tree: Path, made: Path | None) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "TRITON_INTERPRET")},
            "PYTHONPATH": os.pathsep.join(map(str, (self.asking, tree))),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-P", "-m", "tests.answers.write", group, str(file), str(tree)]
        done = subprocess.run(
            [*command, *([str(made)] if made else [])], cwd=tree, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"The {group} of {tree.name} could not be written:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )


def _questions(tests: Path) -> str:
    """A short digest of what is asked."""
    files = sorted([*(tests / "answers").rglob("*"), tests / "planner" / "families.py"])
    seen = hashlib.sha256(b"".join(path.read_bytes() for path in files if path.is_file() and path.suffix != ".pyc"))
    return seen.hexdigest()[:12]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _join(one: Path, other: Path, whole: Path) -> None:
    whole.write_bytes(one.read_bytes() + other.read_bytes())
