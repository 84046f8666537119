"""Hold what servers did under workloads: a table over servers and arrivals, distributions, the saturation point, cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.serving import brought, measures
from surokit.serving.client import Answer
from surokit.serving.driving import Delay
from surokit.serving.planned import planned
from surokit.serving.point import Point
from surokit.serving.workload import Workload, listed
from surokit.tables import html_table, text_table
from surokit.units import three_digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from surokit.planner.planning import Plan

FORMAT = 2
HEAD, ANSWERS = "serving.json", "answers"
APART = 1.5  # times ttft, from which ttft_text is another figure
KEPT_UP = 0.95  # share of the offered requests, from which a server keeps up with a rate


class ServeBench:
    """A ServeBench is what `surokit.serve_bench` found. It prints as its table and shows itself in a notebook.

    points: one for each server and workload.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = tuple(points)

    def add(self, other: ServeBench | str | Path, server: str = "") -> ServeBench:
        """Return one with the points of another server or recipe beside these.

        other: a ServeBench, or the folder or file that `load` reads. server: its name in the tables. ValueError where a point of
        that server and workload is there already.
        """
        found = other if isinstance(other, ServeBench) else ServeBench.load(other)
        points = [replace(point, server=server or point.server) for point in found.points]
        there = {(point.server, point.workload) for point in self.points}
        if double := next((point for point in points if (point.server, point.workload) in there), None):
            raise ValueError(
                f"add(): there is a point of {double.server!r} under {double.workload.name} already: give add(..., server=) "
                "another name."
            )
        return ServeBench([*self.points, *points])

    def planned(
        self, plan: Plan, server: str = "planned", workload: Workload | Iterable[Workload] | None = None
    ) -> ServeBench:
        """Return one with what a plan for serving predicts beside what was measured, as a server of that name.

        plan: of the model on the server's GPU, as `surokit.plan(model, gpu=surokit.calibrate())`. workload: one or several, those
        that were measured without it. ValueError as `plan.serving` has it.
        """
        works = dict.fromkeys(p.workload for p in self.points) if workload is None else listed(workload)
        return self.add(ServeBench(planned(plan, work, server) for work in works))

    @classmethod
    def load(cls, path: str | Path) -> ServeBench:
        """Read the folder that `serve_bench` kept, on any machine, or a result file of another client: of vLLM's or SGLang's
        benchmark, guidellm or AIPerf. FileNotFoundError or ValueError for another one."""
        place = Path(path)
        if place.is_file():
            return cls(brought.read(place))
        if not (place / HEAD).exists():
            raise FileNotFoundError(
                f"There is no benchmark of a server in {place}: surokit.serve_bench(..., folder=) makes one."
            )
        try:
            head = json.loads((place / HEAD).read_text())
            if head["format"] != FORMAT:
                raise ValueError(f"{place} has the format {head['format']}, and this package reads {FORMAT}.")
            return cls(
                point_of(values, (place / ANSWERS / values["file"]).read_text().splitlines())
                for values in head["points"]
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{place / HEAD} is damaged ({error}): measure again in another folder.") from error

    def table(self) -> pd.DataFrame:
        """Return a DataFrame, one row a server and workload: requests, requests_per_s, input_tokens_per_s, output_tokens_per_s;
        p50, p90 and p99 of ttft, ttft_text, tpot, itl, e2e and queue in ms, each with the ends of its 95 % interval (low, high);
        how many were answered, failed, truncated, late, and short of the tokens that were asked for."""
        import pandas

        return pandas.DataFrame([point.row() for point in self.points])

    def goodput(self, **limits_ms: float) -> dict[str, float]:
        """Return for each point the share of its requests that were answered within every limit, such as ttft=500, tpot=50, in
        milliseconds; nan where its answers do not say one of these times."""
        return {
            name: math.nan if limits_ms.keys() & set(p.unknown) else measures.goodput(p.answers, limits_ms)
            for name, p in self.named.items()
        }

    @property
    def named(self) -> dict[str, Point]:
        """Return the points by a name of each: its server and arrivals, with lengths or a number where several are alike."""
        alike, seen = Counter(p.name for p in self.points), Counter[str]()
        found: dict[str, Point] = {}
        for p in self.points:
            lengths = (
                f", {p.workload.input_tokens} tokens in, {p.workload.output_tokens} out" if alike[p.name] > 1 else ""
            )
            name = p.name + lengths
            seen[name] += 1
            found[f"{name} ({seen[name]})" if seen[name] > 1 else name] = p
        return found

    def saturation(self, server: str | None = None) -> Point | None:
        """Return the last point of a sweep that a server keeps up with: requests are answered at 95 % of the pace at which they
        arrive, or it has 95 % of the best throughput with the fewest at once. Of a file that does not say when requests were sent
        it is the throughput that it states. None where there is no sweep, or it keeps up with nothing. ValueError where there are
        several servers and none is named."""
        if server is None and len(self._servers) > 1:
            raise ValueError(
                f"saturation(server=None): there are several servers, so name one: {', '.join(self._servers)}."
            )
        points = [p for p in self.points if server in (None, p.server)]
        offered = sorted((p for p in points if p.workload.rate), key=lambda p: p.workload.rate or 0.0)
        if offered:
            kept = [p for p in offered if _kept_up(p) >= KEPT_UP]
            return kept[-1] if kept else None
        closed = sorted((p for p in points if p.workload.concurrency), key=lambda p: p.workload.concurrency or 0)
        best = max(map(_rate, closed), default=math.nan)
        return next((p for p in closed if best and _rate(p) >= KEPT_UP * best), None)

    @property
    def _servers(self) -> list[str]:
        return list(dict.fromkeys(p.server for p in self.points))

    def cost(self, usd_per_hour: float) -> dict[str, float]:
        """Return US dollars for a million output tokens at each point, at a price of the server per hour."""
        rates = {name: p.throughput()["output_tokens_per_s"] for name, p in self.named.items()}
        if not usd_per_hour > 0:
            raise ValueError(f"cost(usd_per_hour={usd_per_hour!r}): US dollars an hour, a number above 0.")
        return {name: usd_per_hour / 3600 / rate * 1e6 if rate else math.inf for name, rate in rates.items()}

    def plot(self) -> Figure:
        """Draw the distributions of time to the first token and of the whole request."""
        from surokit.serving.picture import distributions

        return distributions(self)

    def plot_sweep(self) -> Figure:
        """Draw throughput and latencies of each server over the rates, or the numbers at once, of its sweep. ValueError where no
        server has more than one of them."""
        from surokit.serving.picture import sweep

        return sweep(self)

    @property
    def notes(self) -> list[str]:
        """Return what has to be known beside the table."""
        found = [f"all: {note}" for note in _shared(self.points)]
        of_all = set(_shared(self.points))
        of_server = {name: _shared([p for p in self.points if p.server == name]) for name in self._servers}
        for name, shared in of_server.items():
            found += [f"{name}: {note}" for note in shared if note not in of_all]
        for where, p in self.named.items():
            found += [f"{where}: {note}" for note in p.notes if note not in of_all.union(of_server[p.server])]
            if p.delay is not None and p.delay.is_saturated:
                found.append(
                    f"{where}: the client measured itself: it used {p.delay.cpu:.0%} of a core, and 1 of 100 times it was "
                    f"{p.delay.late_p99_ms:.0f} ms late or more; send fewer at once, or from a faster or idler machine"
                )
            if p.spread("ttft_text").mid > APART * p.spread("ttft").mid:
                found.append(
                    f"{where}: first chunks without text come long before the text: ttft_text says when a reader sees something, "
                    "and tpot has that wait in it"
                )
            if p.short:
                found.append(
                    f"{where}: {p.short} answers ended before the {p.workload.output_tokens} tokens that were asked for"
                )
            whys = [a.why for a in p.answers if a.state != "answered"]
            found += [f"{where}: {whys.count(why)} x {why}" for why in dict.fromkeys(whys)][:5]
        return found

    def _rows(self) -> list[list[str]]:
        rows = []
        for p in self.points:
            t = p.throughput()
            rows.append(
                [
                    p.server,
                    p.workload.name,
                    f"{p.workload.input_tokens:,} / {p.workload.output_tokens:,}",
                    f"{p.count('answered'):,}",
                    f"{p.lost:,}" if p.lost else "",
                    three_digits(t["requests_per_s"]),
                    three_digits(t["output_tokens_per_s"]),
                    *(_both(p, name) for name in self._shown),
                ]
            )
        return rows

    @cached_property
    def _shown(self) -> list[str]:
        """The times of the table: ttft_text is left out where it is ttft everywhere."""
        alike = all(_both(p, "ttft") == _both(p, "ttft_text") for p in self.points)
        return [name for name in measures.SPREADS if name != "ttft_text" or not alike]

    def _header(self) -> tuple[str, ...]:
        return (*HEADER, *(f"{name} ms" for name in self._shown))

    def _foot(self) -> list[str]:
        return [*self.notes, FOOT, *(f"{name}: {words}" for name, words in measures.DEFINITIONS.items())]

    def __repr__(self) -> str:
        table = text_table(self._rows(), header=self._header(), right=range(2, len(self._header())))
        return "\n".join([table, *(f"  {line}" for line in self._foot())])

    def _repr_html_(self) -> str:
        import html

        return html_table(self._rows(), header=self._header(), right=range(2, len(self._header()))) + "".join(
            f"<div><small>{html.escape(line)}</small></div>" for line in self._foot()
        )


FOOT = "in / out: tokens of a prompt and of an answer, as asked for; times: median / 99th percentile"
HEADER = ("server", "arrivals", "in / out", "answered", "lost", "requests/s", "tokens/s")


def _both(point: Point, name: str) -> str:
    found = [point.spread(name, q).mid for q in (0.5, 0.99)]
    return "" if all(map(math.isnan, found)) else " / ".join(map(three_digits, found))


def _shared(points: Sequence[Point]) -> list[str]:
    """Return the notes that several points have in common."""
    return [note for note in points[0].notes if all(note in p.notes for p in points)] if len(points) > 1 else []


def _share(point: Point) -> float:
    return point.count("answered") / len(point.answers) if point.answers else math.nan


def _kept_up(point: Point) -> float:
    """Return the share of the offered requests that a server answers as fast as they arrive."""
    found = measures.kept_up(point.answers) * _share(point)
    # a file without the times of requests states throughput, which has the time of the last answer in it
    is_stated = math.isnan(found) and "requests_per_s" in point.stated
    return _rate(point) / (point.workload.rate or math.nan) if is_stated else found


def _rate(point: Point) -> float:
    return point.throughput()["requests_per_s"]


def point_of(values: Mapping[str, Any], lines: Iterable[str]) -> Point:
    """Make a point of what `described` says of it, and the lines of its answers."""
    work = Workload(**{**values["workload"], "prompts": tuple(values["workload"]["prompts"])})
    delay = None if values["delay"] is None else Delay(**values["delay"])
    return Point(
        values["server"],
        work,
        tuple(map(Answer.read, lines)),
        delay,
        tuple(values["notes"]),
        values["date"],
        values["stated"],
        tuple(values["unknown"]),
    )


def described(point: Point) -> dict[str, Any]:
    """Return all of a point but its answers."""
    return {
        "server": point.server,
        "workload": asdict(point.workload),
        "delay": None if point.delay is None else asdict(point.delay),
        "notes": list(point.notes),
        "date": point.date,
        "stated": dict(point.stated),
        "unknown": list(point.unknown),
    }


__all__ = ["ANSWERS", "FORMAT", "HEAD", "ServeBench", "described", "point_of"]
