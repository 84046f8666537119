"""Store the raw file of a benchmark that takes several calls: each finished measurement is written at once, the next call
goes on.

A measurement is a dict under a key, with the commit and the fingerprint of the sources that it was made with: they may differ
within a file, so that a fix of one line costs what it changes and no more. Measurements on another device or with other
versions do not belong in the same file: the difference is named. Numbers that are not finite become null, so that any reader of
JSON can read it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from surokit.bench import result
from surokit.environment import environment

#: What has to be the same in all calls.
SAME = ("device", "cuda_capability", "torch", "triton", "cuda")


class Book:
    """A Book is a raw file at `path`, new or gone on with.

    head: what the file says beside its measurements ("benchmark", "settings", ...); equal in every call. part: the key that
    holds them. Raises ValueError, which names the difference, for a file of another benchmark, device or version.
    """

    def __init__(self, path: Path, part: str, head: Mapping[str, Any], call: Mapping[str, Any]) -> None:
        result.check_writable(path)
        self.path, self.part, self.head = path, part, dict(head)
        self.made = {"commit": commit(), "source": source()}
        here = {**environment(), **self.made}
        del here["platform"]  # which may name the machine's owner
        self.data: dict[str, Any] = {**head, "environment": here, "calls": [], part: {}}
        if path.exists():
            self.data = self._read(head, here)
        self.calls = len(self.data["calls"])
        self.data["calls"].append({"date": here["date"], **self.made, **call})

    def _read(self, head: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            there = data["environment"] | {name: data[name] for name in head}
            data["calls"], data[self.part]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no file of this benchmark: give another --out.") from None
        now = {**here, **json.loads(json.dumps(head))}
        for name in (*head, *SAME):
            if there.get(name) != now.get(name):
                raise ValueError(
                    f"{self.path} was measured with {name} {there.get(name)!r}, and here it is {now.get(name)!r}: give another "
                    "--out, or --new for the next free name."
                )
        assert isinstance(data, dict)
        return data

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def __getitem__(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.found[key]
        return found

    def done(self, key: str) -> bool:
        """Return whether nothing is left to do under this key: it was measured, or failed."""
        return key in self and "left_out" not in self[key]

    def current(self, key: str) -> bool:
        """Return whether a measurement is there and was made with the sources that are here."""
        return key in self and self[key].get("source", self.data["environment"]["source"]) == self.made["source"]

    @property
    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data[self.part]
        return found

    def put(self, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a measurement with its date, call, commit and source, and write the file."""
        kept = self.keep(key, value)
        result.write(self.data, self.path)
        return kept

    def keep(self, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a measurement as `put` does, for a file that is written soon."""
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.data["calls"][-1].pop("begun", None)
        self.found[key] = _finite({**value, **self.made, "call": self.calls, "date": date})
        return self[key]

    def forget(self, *keys: str) -> None:
        for key in keys:
            self.found.pop(key, None)

    def begin(self, key: str) -> None:
        """Write in the file what is measured now, for a later call that finds that the measuring process is gone."""
        self.data["calls"][-1]["begun"] = key
        result.write(self.data, self.path)

    @property
    def begun(self) -> str:
        """Return the key that the last call was measuring when it last wrote the file; "" between measurements."""
        return str(self.data["calls"][-1].get("begun", ""))

    def read_again(self) -> None:
        """Take over the measurements that another process has written into the file."""
        self.data = json.loads(self.path.read_text(encoding="utf-8"))

    def end(self, left: str) -> None:
        """Write in the file what this call leaves to another, in words; "" where nothing is left."""
        self.data["calls"][-1]["left"] = left
        result.write(self.data, self.path)


def commits(data: Mapping[str, Any], measurements: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the commits that measurements of a file were made with, in their order; a source's fingerprint where there is
    no commit."""
    first = {"commit": None, "source": "unknown", **data["environment"]}
    made = ({**first, **each} for each in measurements)
    return list(dict.fromkeys(str(each["commit"] or f"source {each['source']}") for each in made))


def mixed(data: Mapping[str, Any], measurements: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the line below a table whose figures were measured with several commits; none where it was one."""
    made = commits(data, measurements)
    return [f"Measured with several commits, {', '.join(made)}: the raw file says what with which."] * (len(made) > 1)


def next_free(path: Path) -> Path:
    """Return `path`, or where it is taken path-2, path-3, ..."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def source() -> str:
    """Return 16 hexadecimal digits over the code that is measured: the package without its benchmarks, and its kernels."""
    digest = hashlib.blake2b(digest_size=8)
    roots = ["surokit", *(f"surokit.kernels.{folder}" for folder in ("reference", "triton", "cuda", "cpu"))]
    for root in roots:
        folder = Path(str(files(root)))
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.suffix in (".py", ".cu", ".cuh", ".cpp") and name.parts[0] != "bench":
                digest.update(f"{root}/{name.as_posix()}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """Return the commit of the sources, with "+" behind it where files differ; None where there is no repository."""
    folder = Path(str(files("surokit"))).parent

    def git(*words: str) -> str:
        ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
