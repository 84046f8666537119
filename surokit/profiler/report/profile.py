"""Hold what a profiled block did, as one value without live handles: `Profile`.

It holds the recording (plain arrays) and the tables made from it; DataFrames are built when asked for, so pandas loads
only then.
"""

from __future__ import annotations

import gzip
import json
import operator
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from surokit.profiler.analysis.activities import activities_table
from surokit.profiler.analysis.causes import Waited
from surokit.profiler.analysis.collectives import by_size, collectives
from surokit.profiler.analysis.parts import parts_table
from surokit.profiler.analysis.roles import Observed
from surokit.profiler.analysis.tables import Analysis, Table, analyse
from surokit.profiler.record.chrome_trace import read_chrome, write_chrome
from surokit.profiler.record.recording import Recording, pack, unpack
from surokit.profiler.report.advice import advise, nothing_to_win
from surokit.profiler.report.picture import ADVICE, Shown, largest, profile_html, rates, short_name, step_svg
from surokit.tables import text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd

    from surokit.hardware.gpus import Gpu
    from surokit.profiler.report.verify import Verdict

FORMAT = "surokit profile"  # the first value in a saved file
_VERSION = 3  # 1 knew no shapes, settings, garbage collector and price, 2 no ranks and collectives; both are read
BY = ("module", "op", "kernel")


class Profile:
    """A Profile is the result of `sk.profile()`, `%surogate_profile` or `Profile.from_trace`. Times are milliseconds a step
    unless a name says otherwise.

    Inside the `with` block only `step()` may be called; everything else is there once the block has ended. It can be
    pickled, and saved to one file.
    """

    by: str = "module"  # which table the shown profile breaks busy time down by
    _light: Table | None = None  # the speed of light, once it was asked for
    _parts: Table | None = None  # once they were asked for: they take as long as all other tables
    _eager: Recording | None = None  # of a step without CUDA graphs, which names the kernels of those replayed here
    _waited: tuple[Waited, ...] = ()  # for other ranks, once they were merged
    _too_early: str = "the profile is still running: read it after the with block"

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
        self._analysis: Analysis = analyse(recording, self._eager, self._waited)
        settings = dict(recording.settings)
        self._analysis.tables["advice"] = advise(self._analysis.summary, self._analysis.tables, settings)
        self._recording, self._on_step = recording, None

    def _done(self) -> Recording:
        if self._recording is None:
            raise RuntimeError(self._too_early)
        return self._recording

    def step(self) -> None:
        """Mark the end of a step, for code without an optimizer; the first call makes the block count its steps by these
        marks alone."""
        if self._on_step is None:
            raise RuntimeError("step() marks steps inside the with block; this profile has ended")
        self._on_step()

    # ------------------------------------------------------------------------------------------------ tables

    @property
    def summary(self) -> dict[str, Any]:
        """Return the means over the steps, by name.

        wall_ms = busy_ms + idle_ms, idle_ms = host_wait_ms + kernel_wait_ms + other_wait_ms;
        busy_frac, wall_p5_ms / p50 / p95, phases_ms (they sum to the wall), of which phases_exposed_ms (data is exchanged, and
        nothing else runs) and phases_idle_ms (not even that); phases_overlapped_ms (data is exchanged beside work);
        tokens_per_s, gflop_per_step, tflops (reached),
        launch_delay_us (median), each None where unknown; launches_per_step, graph_launches_per_step, syncs_per_step,
        h2d_bytes and d2h_bytes a step, comm_ms and comm_exposed_ms, collect_ms (Python's garbage collector), peak_gib (of tensors
        in the block on CUDA, of the process so far on a CPU);
        steps, warmup, device, activity ("gpu" or "cpu"); overhead_ms (the profiler's own share of a step, estimated from a
        calibration just before the block) and unprofiled_ms (a step measured without it, where calls were repeated).
        """
        self._done()
        return dict(self._analysis.summary)

    def _frame(self, table: str) -> pd.DataFrame:
        self._done()
        import pandas

        return pandas.DataFrame(self._analysis.tables[table])

    @property
    def lost(self) -> pd.DataFrame:
        """Return one row for each cause of lost time: launches, syncs, copies, host; communication where processes exchange
        data, offload where an optimizer keeps its state on the host. In a profile of `RankProfiles` the part of communication
        that was waiting for another rank is a cause "waiting for rank N".

        Columns: cause, ms_per_step, share of the wall, gpu_hours_per_day (24 x share, of whatever device), usd_per_day (None
        without a price), evidence; see surokit/profiler/analysis/causes.py.
        """
        return self._frame("lost")

    @property
    def syncs(self) -> pd.DataFrame:
        """Return the reads of device values and other waits by the user's line.

        Columns: file, line, call, count, ms (both a step), inside (library frame).
        """
        return self._frame("syncs")

    @property
    def gaps(self) -> pd.DataFrame:
        """Return the longest gaps.

        Columns: step, start_ms from the first step, ms, kind, cause, host_ms (the part that is the host's), file, line
        (sampled), next activity, inside (range).
        """
        return self._frame("gaps")

    @property
    def modules(self) -> pd.DataFrame:
        """Return busy time by module path.

        Columns: module, type, depth, calls, forward_ms, backward_ms, ms with children, self_ms, share of busy, gflop (None
        without shapes). self_ms sums to busy, pseudo-rows such as (optimizer) included.
        """
        return self._frame("modules")

    @property
    def parts(self) -> pd.DataFrame:
        """Return the time of a step by the parts of a decoder: linear layers by role, norms, attention, rotation, gate, head, loss,
        optimizer.

        Columns: part, activities (kernels, on a CPU operators, a step), forward_ms, backward_ms, idle_ms, ms, which sums to the
        wall time. What backward computes again is backward; idle time is where the host was, and on a GPU before whose work it
        ends.
        """
        if self._parts is None:
            self._parts = parts_table(self._done(), self._eager)
        import pandas

        return pandas.DataFrame(self._parts)

    @property
    def activities(self) -> pd.DataFrame:
        """Return the time of a step by what ran: operators, on a GPU kernels and copies, collectives by their size, and `idle`.

        Columns: activity, calls (None for idle), ms, which sums to the wall time. An operator has the time in which it calls
        no other; what two threads or streams do at once counts for the one that was there first.
        """
        import pandas

        return pandas.DataFrame(activities_table(self._done()))

    @property
    def collectives(self) -> pd.DataFrame:
        """Return the collectives of this process by kind and size; the table is empty for a process that is alone.

        Columns: collective, bytes (the larger of input and output on a rank, -1 where unknown), calls, ms (from begin to end, with
        what is waited for other ranks, also while the process computes) a step.
        """
        import pandas

        return pandas.DataFrame(by_size(collectives(Observed(self._done()))))

    @property
    def kernels(self) -> pd.DataFrame:
        """Return the GPU kernels; the table is empty on a CPU.

        Columns: kernel, calls, self_ms (time not already counted for another stream), ms, mean_us.
        """
        return self._frame("kernels")

    @property
    def ops(self) -> pd.DataFrame:
        """Return the operators on the host.

        Columns: op, calls, self_ms without the operators it calls, ms with them, mean_us.
        """
        return self._frame("ops")

    @property
    def copies(self) -> pd.DataFrame:
        """Return the copies; on a CPU these are the operators that move data.

        Columns: copy, direction, count, bytes, ms, gb_per_s, pinned, exposed_ms (under which no kernel runs); None where it
        does not apply.
        """
        return self._frame("copies")

    @property
    def steps(self) -> pd.DataFrame:
        """Return one row a step: wall_ms, busy_ms, idle_ms and its parts, and its time by phase."""
        return self._frame("steps")

    @property
    def advice(self) -> pd.DataFrame:
        """Return the advice, largest expected gain first, numbered from 1 as shown; `verify` tries one.

        Columns: rule, advice, evidence, gain_ms (an upper bound), file, line.
        """
        frame = self._frame("advice")
        frame.index += 1
        return frame

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on what could not be measured, and why."""
        self._done()
        return self._analysis.notes

    def diff(self, other: Profile) -> pd.DataFrame:
        """Compare this profile with a later one; the result shows itself with a picture of both.

        Columns: metric, before (this), after (other), change, change_frac; times a step first, from the largest growth down
        to the largest fall. Raises TypeError where `other` is no Profile.
        """
        from surokit.profiler.report.difference import difference

        if not isinstance(other, Profile):
            raise TypeError(
                f"diff() compares with another Profile, not {other!r}; Profile.load(path) reads a saved one"
            )
        return difference(self._shown(), other._shown())

    # ------------------------------------------------------------------------------------------------ questions

    def verify(
        self,
        advice: int | str | Mapping[str, Any] | pd.Series[Any],
        step: Callable[[], object],
        changed: Callable[[], object] | None = None,
        *,
        rounds: int = 20,
        steps: int = 1,
    ) -> Verdict:
        """Try a piece of advice on the user's own step and measure its gain, beside the gain that was predicted.

        advice: its number as shown (from 1), its rule's name, or its row of `p.advice`. step: one step of the loop, called
        over and over: as it is, and with the advice tried, in turns. changed: the step with the change made, for advice
        that cannot be tried from outside. rounds, steps: turns, and calls in each. Raises LookupError where there is no
        such advice, or a rule's name fits several rows, TypeError for an argument that names none, ValueError where it
        needs `changed`.
        """
        row = self._advice_row(advice)
        from surokit.profiler.report.verify import verify

        return verify(row, step, changed, rounds=rounds, steps=steps)

    def _advice_row(self, advice: int | str | Mapping[str, Any] | pd.Series[Any]) -> dict[str, Any]:
        self._done()
        table = self._analysis.tables["advice"]
        count = len(table["rule"])
        if isinstance(advice, str):
            found = [i for i, rule in enumerate(table["rule"]) if rule == advice]
            if len(found) > 1:
                numbers = ", ".join(str(i + 1) for i in found)
                raise LookupError(f"the rule {advice!r} speaks more than once here: give one of the numbers {numbers}")
            number = found[0] if found else -1
        elif isinstance(advice, SupportsIndex):  # numpy's integers too
            number = operator.index(advice) - 1
        elif hasattr(advice, "items") and isinstance(advice.get("rule"), str):
            return {str(name): value for name, value in advice.items()}
        else:
            raise TypeError(
                f"advice is named by its number, its rule or one row of p.advice, not {type(advice).__name__}"
            )
        if not 0 <= number < count:
            rules = ", ".join(f"{i} ({rule})" for i, rule in enumerate(table["rule"], 1))
            raise LookupError(f"there is no advice {advice!r} in this profile; it has {rules or 'none'}")
        return {name: column[number] for name, column in table.items()}

    def named_by(self, eager: Profile) -> Profile:
        """Return a copy in which the kernels of replayed CUDA graphs belong to the modules that launched the same kernels
        in `eager`, a profile of a step without graphs, and FLOPs are that step's. Hooks do not run in a replay; a note says how
        many could be named."""
        named = Profile.__new__(Profile)
        named._eager, named.by, named._waited = eager._done(), self.by, self._waited
        named._finish(self._done(), self.name)
        return named

    def _merged(self, waited: tuple[Waited, ...]) -> Profile:
        """Return a copy whose lost time says what was waiting for other ranks."""
        merged = Profile.__new__(Profile)
        merged._eager, merged._light, merged.by, merged._waited = self._eager, self._light, self.by, waited
        merged._finish(self._done(), self.name)
        return merged

    def speed_of_light(self, gpu: Gpu | None = None) -> pd.DataFrame:
        """Return the time of each module at the rates that the device reaches, beside its measured time.

        Columns: module, self_ms, light_ms, share (light / self), bound ("compute", "memory", "overhead" or "unknown"), gflop,
        gib. It is shown with the modules from then on.

        gpu: a row of the hardware table or the result of `sk.calibrate()`; None takes this machine's calibration, which
        is measured (20 seconds) unless it was before. Needs the shapes of one warm-up step, and for steps in CUDA graphs those
        of `named_by`.
        """
        from surokit.profiler.analysis.speed_of_light import cached_gpu, speed_of_light

        recording = self._done()
        found = gpu if gpu is not None else cached_gpu(recording.device)
        self._light = speed_of_light(recording, self._analysis.tables["modules"], found, self._eager)
        import pandas

        return pandas.DataFrame(self._light)

    # ------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path) -> Path:
        """Write one JSON file (gzipped when the path ends in .gz) that `Profile.load` reads back, and return its path."""
        recording = self._done()
        document = {
            "format": FORMAT,
            "version": _VERSION,
            "name": self.name,
            "by": self.by,
            "summary": self.summary,
            "light": self._light,
            "recording": pack(recording),
            "eager": None if self._eager is None else pack(self._eager),
        }
        data = json.dumps(document).encode()
        target = Path(path)
        target.write_bytes(gzip.compress(data) if target.suffix == ".gz" else data)
        return target

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote. Raises FileNotFoundError, or ValueError for another or a damaged file."""
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(f"no profile at {file}; Profile.save(path) writes one")
        raw = file.read_bytes()
        try:
            document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise ValueError("it is not a profile; a Chrome trace is read with Profile.from_trace")
            if document["version"] not in range(1, _VERSION + 1):
                raise ValueError(f"its version is {document['version']}, this package reads 1 to {_VERSION}")
            profile = cls.__new__(cls)
            profile._eager = unpack(document["eager"]) if document.get("eager") else None
            profile._finish(unpack(document["recording"]), document["name"])
            profile.by, profile._light = document["by"], document.get("light")
            if profile.by not in BY:
                raise ValueError(f"it is broken down by {profile.by!r}")
            profile._shown()
        except UnicodeDecodeError:
            raise ValueError(f"{file} cannot be read as a profile: it is no text") from None
        except (
            OSError,
            EOFError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            zlib.error,
        ) as error:
            raise ValueError(f"{file} cannot be read as a profile: {error}") from None
        return profile

    @classmethod
    def from_trace(
        cls, path: str | Path, *, unit: Literal["us", "ns"] | None = None, limit_gib: float | None = None
    ) -> Profile:
        """Make a profile of a Chrome trace, plain or gzipped, such as torch.profiler exports; without module paths and
        lines, which it lacks.

        unit: of the file's times, where it is not the usual one. limit_gib: a trace with more text is refused; None is the
        machine's free memory. Raises FileNotFoundError, or ValueError for a file that is no trace or too large.
        """
        return cls(read_chrome(path, unit=unit, limit_gib=limit_gib), Path(path).name)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace for ui.perfetto.dev (gzipped when the path ends in .gz) and return its path."""
        write_chrome(path, self._done(), self._analysis.windows)
        return Path(path)

    # ------------------------------------------------------------------------------------------------ showing

    def timeline(self, step: int = 0) -> str:
        """Draw one step as an inline SVG (text). Raises IndexError for a step that was not measured."""
        shown = self._shown()
        if not 0 <= step < len(shown.windows):
            raise IndexError(f"the profile holds steps 0 to {len(shown.windows) - 1}, not {step}")
        return step_svg(shown, step)

    def _shown(self) -> Shown:
        recording, a = self._done(), self._analysis
        light = self._light or {"module": [], "share": [], "bound": []}
        shares = {m: (f, b) for m, f, b in zip(light["module"], light["share"], light["bound"]) if f is not None}
        return Shown(
            self._headline(), recording, a.windows, a.summary, a.tables, self.by, tuple(self._all_notes()), shares
        )

    def _headline(self) -> str:
        s = self._analysis.summary
        plural = "s" if s["steps"] != 1 else ""
        warm = f" after {s['warmup']} warm-up" if s["warmup"] else ""
        spread = f" ({three_digits(s['wall_p5_ms'])} to {three_digits(s['wall_p95_ms'])})" if s["steps"] > 1 else ""
        title = f"{self.name}: " if self.name else ""
        return (
            f"{title}{s['steps']} step{plural}{warm} on {s['device']}, {three_digits(s['wall_ms'])} ms a step{spread}"
        )

    def _all_notes(self) -> list[str]:
        s = self._analysis.summary
        notes = [nothing] if (nothing := nothing_to_win(s, self._analysis.tables["advice"])) else []
        if s["activity"] == "cpu":
            notes.append("CPU: idle means time outside operators")
        if s["overhead_ms"]:
            notes.append(f"the profiler's own share is about {three_digits(s['overhead_ms'])} ms a step (calibrated)")
        if s["unprofiled_ms"] is not None:
            notes.append(f"a step without the profiler took {three_digits(s['unprofiled_ms'])} ms")
        if (usd := self._done().usd_per_gpu_hour) is not None and s["activity"] != "unknown":
            hour = "a GPU hour" if s["activity"] == "gpu" else "an hour"
            notes.append(f"at {usd:g} USD {hour}; a day is 24 hours of steps like these")
        return notes + list(self._analysis.notes)

    def __repr__(self) -> str:
        if self._recording is None:
            return f"Profile ({self._too_early})"
        shown = self._shown()
        s, tables = shown.summary, shown.tables
        wall, busy = s["wall_ms"] or 1.0, s["busy_ms"] or 1.0
        lines = [f"Profile of {shown.title}", f"  {', '.join(rates(s))}"]
        waits = ", ".join(f"{w} wait {three_digits(s[f'{w}_wait_ms'])}" for w in ("host", "kernel", "other"))
        rows = [
            ("busy", f"{s['busy_ms']:.3f}", f"{s['busy_ms'] / wall:.1%}", ""),
            ("idle", f"{s['idle_ms']:.3f}", f"{s['idle_ms'] / wall:.1%}", waits),
        ]
        traced = s["activity"] != "unknown"
        if traced:
            lines.append(text_table(rows, header=("", "ms a step", "share", ""), right=(1, 2)))
            lines.append(_lost_text(tables["lost"]))
        top = largest(tables, self.by, 8) if traced else []
        if top:
            known = shown.light if self.by == "module" else {}
            cells = [
                (
                    short_name(name, self.by),
                    f"{ms:.3f}",
                    f"{ms / busy:.1%}",
                    *([f"{known[name][0]:.0%}" if name in known else ""] if known else []),
                )
                for name, ms in top
            ]
            header = (self.by, "own ms", "of busy", *(["of light"] if known else []))
            lines.append(text_table(cells, header=header, right=(1, 2, 3)))
        advice = tables["advice"]
        for number, (text, gain) in enumerate(list(zip(advice["advice"], advice["gain_ms"]))[:ADVICE], 1):
            lines.append(f"  {number}. {text} (up to {three_digits(gain)} ms a step)")
        lines.extend(f"  - {note}" for note in shown.notes)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" if self._recording is None else profile_html(self._shown())


def _lost_text(lost: Table) -> str:
    """Show the causes as text, with dollars where a price is known."""
    dollars = any(usd is not None for usd in lost.get("usd_per_day", ()))
    rows = []
    for i, cause in enumerate(lost["cause"]):
        usd = [f"{lost['usd_per_day'][i]:.2f}"] if dollars else []
        rows.append((cause, f"{lost['ms_per_step'][i]:.3f}", f"{lost['share'][i]:.1%}", *usd, lost["evidence"][i]))
    header = ("lost to", "ms a step", "share", *(["USD a day"] if dollars else []), "evidence")
    return text_table(rows, header=header, right=(1, 2, 3) if dollars else (1, 2))
