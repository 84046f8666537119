"""`Profile`: what a profiled block did, as one value without live handles.

It holds the recording (plain arrays) and the tables made from it; DataFrames are built when asked for, so pandas loads
only then.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surokit.profiler.advice import advise
from surokit.profiler.analysis import CAUSES, Analysis, analyse
from surokit.profiler.picture import largest, profile_html, step_svg
from surokit.profiler.recording import Recording, pack, unpack
from surokit.profiler.trace import read_chrome, write_chrome
from surokit.tables import text_table

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = "surokit profile"
_VERSION = 1
BY = ("module", "op", "kernel")


class Profile:
    """The result of `sk.profile()`, `%surogate_profile` or `Profile.from_trace`. Times are milliseconds a step unless a
    name says otherwise.

    Inside the `with` block only `step()` may be called; everything else is there once the block has ended. Pickles, and
    saves to one file.
    """

    by: str = "module"  # which table the shown profile breaks busy time down by

    def __init__(self, recording: Recording, name: str = "") -> None:
        self._on_step: Callable[[], None] | None = None
        self._recording: Recording | None = None
        self._finish(recording, name)

    @classmethod
    def _pending(cls, on_step: Callable[[], None]) -> Profile:
        self = cls.__new__(cls)
        self._on_step, self._recording = on_step, None
        return self

    def _finish(self, recording: Recording, name: str) -> None:
        self.name = name
        self._analysis: Analysis = analyse(recording)
        self._analysis.tables["advice"] = advise(self._analysis.summary, self._analysis.tables)
        self._recording, self._on_step = recording, None

    def _done(self) -> Recording:
        if self._recording is None:
            raise RuntimeError("the profile is still running: read it after the with block")
        return self._recording

    def step(self) -> None:
        """Marks the end of a step, for code without an optimizer; the first call makes the block count its steps by
        these marks alone."""
        if self._on_step is None:
            raise RuntimeError("step() marks steps inside the with block; this profile has ended")
        self._on_step()

    # ------------------------------------------------------------------------------------------------ tables

    @property
    def summary(self) -> dict[str, Any]:
        """Means over the steps: wall_ms = busy_ms + idle_ms, idle_ms = host_wait_ms + kernel_wait_ms + other_wait_ms;
        tokens_per_s (None when unknown), launches_per_step, syncs_per_step, h2d_bytes and d2h_bytes a step, peak_gib,
        phases_ms (the host's step by what it did), wall_p5_ms / p50 / p95, steps, warmup, device, activity ("gpu" or
        "cpu"), overhead_ms (the profiler's own share of a step, estimated from a calibration just before the block) and
        unprofiled_ms (a measured step without the profiler, where calls were repeated)."""
        self._done()
        return dict(self._analysis.summary)

    def _frame(self, table: str) -> pd.DataFrame:
        self._done()
        import pandas

        return pandas.DataFrame(self._analysis.tables[table])

    @property
    def lost(self) -> pd.DataFrame:
        """Four rows, launches, syncs, copies, host: cause, ms_per_step, share of the wall, gpu_hours_per_day (24 x
        share), evidence. `surokit.profiler.analysis` defines each."""
        return self._frame("lost")

    @property
    def syncs(self) -> pd.DataFrame:
        """Reads of device values and other waits by the user's line: file, line, call, count, ms (both a step), inside
        (library frame)."""
        return self._frame("syncs")

    @property
    def gaps(self) -> pd.DataFrame:
        """The longest gaps: step, start_ms from the first step, ms, kind, cause, host_ms (the part that is the
        host's), file, line (sampled), next activity, inside (range)."""
        return self._frame("gaps")

    @property
    def modules(self) -> pd.DataFrame:
        """Busy time by module path: module, type, depth, calls, forward_ms, backward_ms, ms with children, self_ms,
        share of busy. self_ms sums to busy, pseudo-rows such as (optimizer) included."""
        return self._frame("modules")

    @property
    def kernels(self) -> pd.DataFrame:
        """GPU kernels: kernel, calls, self_ms (time not already counted for another stream), ms, mean_us. Empty on a
        CPU."""
        return self._frame("kernels")

    @property
    def ops(self) -> pd.DataFrame:
        """Operators on the host: op, calls, self_ms without the operators it calls, ms with them, mean_us."""
        return self._frame("ops")

    @property
    def copies(self) -> pd.DataFrame:
        """Copies: copy, direction, count, bytes, ms, gb_per_s, pinned (None where it does not apply)."""
        return self._frame("copies")

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step: wall_ms, busy_ms, idle_ms and its parts, and the host's time by phase."""
        return self._frame("steps")

    @property
    def advice(self) -> pd.DataFrame:
        """What to do, largest expected gain first: rule, advice, evidence, gain_ms (an upper bound), file, line."""
        return self._frame("advice")

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured, and why."""
        self._done()
        return self._analysis.notes

    def diff(self, other: Profile) -> pd.DataFrame:
        """This profile against a later one: metric, before (this), after (other), change, change_frac; the summary's
        numbers, then lost time."""
        import pandas

        before, after = self._numbers(), other._numbers()
        rows = []
        for metric in (m for m in before if m in after):
            a, b = before[metric], after[metric]
            rows.append((metric, a, b, b - a, (b - a) / a if a else None))
        return pandas.DataFrame(rows, columns=["metric", "before", "after", "change", "change_frac"])

    def _numbers(self) -> dict[str, float]:
        self._done()
        summary, lost = self._analysis.summary, self._analysis.tables["lost"]
        numbers = {
            k: float(v) for k, v in summary.items() if isinstance(v, (int, float)) and k not in ("steps", "warmup")
        }
        numbers |= {f"lost to {c} ms": ms for c, ms in zip(lost["cause"], lost["ms_per_step"])}
        return numbers

    # ------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path) -> Path:
        """Writes one JSON file (gzipped when the path ends in .gz) that `Profile.load` reads back, and returns its
        path."""
        recording = self._done()
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "by": self.by,
            "summary": self.summary,
            "recording": pack(recording),
        }
        data = json.dumps(document).encode()
        target = Path(path)
        target.write_bytes(gzip.compress(data) if target.suffix == ".gz" else data)
        return target

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote. Raises FileNotFoundError, or ValueError for another or a damaged file."""
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(f"no profile at {file}; Profile.save(path) writes one")
        raw = file.read_bytes()
        try:
            document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            if not isinstance(document, dict) or document.get("format") != _FORMAT:
                raise ValueError("it is not a profile; a Chrome trace is read with Profile.from_trace")
            if document["version"] != _VERSION:
                raise ValueError(f"its version is {document['version']}, this package reads {_VERSION}")
            profile = cls(unpack(document["recording"]), document["name"])
            profile.by = document["by"]
        except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"{file} cannot be read as a profile: {error}") from None
        return profile

    @classmethod
    def from_trace(cls, path: str | Path) -> Profile:
        """A profile of a Chrome trace that torch.profiler exported (.json or .json.gz); without module paths and lines,
        which it lacks."""
        return cls(read_chrome(path), Path(path).name)

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes a trace for ui.perfetto.dev (gzipped when the path ends in .gz) and returns its path."""
        write_chrome(path, self._done(), self._analysis.windows)
        return Path(path)

    # ------------------------------------------------------------------------------------------------ showing

    def timeline(self, step: int = 0) -> str:
        """One step as an inline SVG (text). Raises IndexError for a step that was not measured."""
        recording, windows = self._done(), self._analysis.windows
        if not 0 <= step < len(windows):
            raise IndexError(f"the profile holds steps 0 to {len(windows) - 1}, not {step}")
        begin, stop = windows[step]
        return step_svg(recording, (begin, stop), f"step {step}, {(stop - begin) / 1e6:.3g} ms")

    def _headline(self) -> str:
        s = self._analysis.summary
        plural = "s" if s["steps"] != 1 else ""
        warm = f" after {s['warmup']} warm-up" if s["warmup"] else ""
        spread = f" ({s['wall_p5_ms']:.3g} to {s['wall_p95_ms']:.3g})" if s["steps"] > 1 else ""
        title = f"{self.name}: " if self.name else ""
        return f"{title}{s['steps']} step{plural}{warm} on {s['device']}, {s['wall_ms']:.3g} ms a step{spread}"

    def _all_notes(self) -> list[str]:
        s = self._analysis.summary
        notes = []
        if s["activity"] == "cpu":
            notes.append("CPU: idle means time outside operators")
        if s["overhead_ms"]:
            notes.append(f"the profiler's own share is about {s['overhead_ms']:.3g} ms a step (calibrated)")
        if s["unprofiled_ms"] is not None:
            notes.append(f"a step without the profiler took {s['unprofiled_ms']:.3g} ms")
        return notes + list(self._analysis.notes)

    def __repr__(self) -> str:
        if self._recording is None:
            return "Profile (running)"
        s, tables = self._analysis.summary, self._analysis.tables
        wall = s["wall_ms"] or 1.0
        lines = [f"Profile of {self._headline()}"]
        rows = [("busy", f"{s['busy_ms']:.3f}", f"{s['busy_ms'] / wall:.1%}", "")]
        waits = ", ".join(f"{w} wait {s[f'{w}_wait_ms']:.3g}" for w in ("host", "kernel", "other"))
        rows.append(("idle", f"{s['idle_ms']:.3f}", f"{s['idle_ms'] / wall:.1%}", waits))
        lines.append(text_table(rows, header=("", "ms a step", "share", ""), right=(1, 2)))
        lost = tables["lost"]
        rows = [
            (lost["cause"][i], f"{lost['ms_per_step'][i]:.3f}", f"{lost['share'][i]:.1%}", lost["evidence"][i])
            for i in range(len(CAUSES))
        ]
        lines.append(text_table(rows, header=("lost to", "ms a step", "share", "evidence"), right=(1, 2)))
        top = largest(tables, self.by, 8)
        if top:
            busy = s["busy_ms"] or 1.0
            rows2 = [(name, f"{ms:.3f}", f"{ms / busy:.1%}") for name, ms in top]
            lines.append(text_table(rows2, header=(self.by, "own ms", "of busy"), right=(1, 2)))
        advice = tables["advice"]
        for number, (text, gain) in enumerate(list(zip(advice["advice"], advice["gain_ms"]))[:5], 1):
            lines.append(f"  {number}. {text} (up to {gain:.3g} ms a step)")
        lines.extend(f"  - {note}" for note in self._all_notes())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if self._recording is None:
            return "<p>Profile (running)</p>"
        s, windows = self._analysis.summary, self._analysis.windows
        middle = int(np.argsort([b - a for a, b in windows])[len(windows) // 2])
        wall = s["wall_ms"] or 1.0
        title = f"{self._headline()}: busy {s['busy_ms'] / wall:.1%}, idle {s['idle_ms'] / wall:.1%}"
        return profile_html(title, self.timeline(middle), s, self._analysis.tables, self.by, self._all_notes())
