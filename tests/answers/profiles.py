"""What the profiler says of recordings that are kept: every table, the advice, pictures, differences, traces out and in again."""

from __future__ import annotations

import gzip
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import surokit as sk
from surokit import planner
from tests.answers.book import Book

# profiled/ holds what Profile.save wrote of the hand-made recordings of tests/profiler/traces.py, of programs drawn at random, and
# of steps of a small network and of a Decoder on a CPU
HERE = Path(__file__).parent
FILES = (HERE.parent / "profiler" / "profile_v1.json.gz", *sorted((HERE / "profiled").glob("*.json.gz")))
TABLES = ("lost", "syncs", "gaps", "modules", "kernels", "ops", "copies", "steps", "advice")
GPUS = ("H100", planner.Gpu("slow", bf16_tflops=1, bandwidth_tb_s=0.05, ceilings=planner.Ceilings("by hand", 0.5, 0.4)))


def write(book: Book) -> None:
    """All of them."""
    profiles = {}
    for file in FILES:
        name = file.name.partition(".")[0]
        profiles[name] = sk.Profile.load(file)
        book.write(name, lambda p=profiles[name]: told(p))
        for gpu in GPUS:
            known = planner.find_gpu(gpu)
            book.write(f"{name}: light on {known.name}", lambda f=file, g=known: _lit(sk.Profile.load(f), g))
        for by in ("op", "kernel", "module"):
            book.write(f"{name} by {by}", lambda f=file, by=by: _by(sk.Profile.load(f), by))
        book.write(f"{name}: traces", lambda p=profiles[name]: _traces(p))
    for one, other in pairwise([*profiles, next(iter(profiles))]):
        book.write(f"{one} and then {other}", lambda a=profiles[one], b=profiles[other]: _shown(a.diff(b)))
    book.write("named by an eager step", lambda: told(profiles["replay"].named_by(profiles["eager_step"])))
    for wrong in ("none.json", "tests"):
        book.write(f"load {wrong}", lambda wrong=wrong: sk.Profile.load(wrong))
        book.write(f"trace {wrong}", lambda wrong=wrong: sk.Profile.from_trace(wrong))


def told(profile: sk.Profile) -> dict[str, Any]:
    """All that a profile says."""
    tables = {name: getattr(profile, name) for name in TABLES}
    return {
        "summary": profile.summary,
        **tables,
        "notes": profile.notes,
        "timelines": [profile.timeline(step) for step in range(len(profile.steps))],
        **_shown(profile),
    }


def _shown(value: Any) -> dict[str, Any]:
    return {
        "text": str(value),
        "html": value._repr_html_(),
        "csv": value.to_csv() if hasattr(value, "to_csv") else None,
    }


def _lit(profile: sk.Profile, gpu: planner.Gpu) -> dict[str, Any]:
    return {"light": profile.speed_of_light(gpu), **_shown(profile)}


def _by(profile: sk.Profile, by: str) -> dict[str, Any]:
    profile.by = by
    return _shown(profile)


def _traces(profile: sk.Profile) -> dict[str, Any]:
    """The trace that it writes, and what is read from it: as our own, and as any tool's, without what ours adds."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, saved = (Path(folder) / name for name in ("ours.json", "theirs.json", "saved.json.gz"))
        profile.to_perfetto(ours)
        trace = json.loads(ours.read_text(encoding="utf-8"))
        foreign = {name: value for name, value in trace.items() if not name.startswith("surokit")}
        theirs.write_text(json.dumps(foreign), encoding="utf-8")
        profile.save(saved)
        return {
            "written": foreign,
            "saved": json.loads(gzip.decompress(saved.read_bytes())),
            "read": told(sk.Profile.from_trace(ours)),
            "read as any tool's": told(sk.Profile.from_trace(theirs, limit_gib=1)),
            "loaded": told(sk.Profile.load(saved)),
        }
