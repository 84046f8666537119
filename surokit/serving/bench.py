"""Measure a server under one workload or a sweep, in a folder that a second call goes on from."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from surokit.places import check_new, make_folder, write_whole
from surokit.serving.asking import Server, asked
from surokit.serving.client import CONNECTIONS, LIMIT_S, STALL_S, Answer, Client
from surokit.serving.driving import drive
from surokit.serving.measures import answered, itl_ms
from surokit.serving.point import Point
from surokit.serving.progress import Progress
from surokit.serving.served import ANSWERS, FORMAT, HEAD, ServeBench, described
from surokit.serving.workload import Workload, listed

BURST = Workload()
_MOST_FILES, _OTHER_FILES = 65536, 256  # that a process asks for, and that it needs beside connections
KEY = "OPENAI_API_KEY"  # of the environment, where no key is given


def serve_bench(
    url: str,
    model: str | None = None,
    workload: Workload | Iterable[Workload] = BURST,
    *,
    server: str = "",
    folder: str | Path | None = None,
    key: str | None = None,
    connections: int = CONNECTIONS,
    stall_s: float = STALL_S,
    limit_s: float = LIMIT_S,
    extra: Mapping[str, Any] | None = None,
) -> ServeBench:
    """Measure a server that speaks OpenAI's HTTP interface, and return its throughput and latencies.

    url: of the interface, such as "http://127.0.0.1:8000/v1". model: as the server names it; None takes the folder's, or the only
        one that the server has.
    workload: what is asked, or several for a sweep, which are measured one after the other.
    server: its name in the tables, the address without it.
    folder: keeps every answer as a line of JSON; a second call with the same folder measures the workloads that are missing.
    key: sent as a bearer token and kept nowhere; the environment's OPENAI_API_KEY without it.
    connections: at most so many requests are sent at once; what others wait for that is `queue`, and in no other time.
    stall_s: seconds without a byte, limit_s: of a whole request, beyond which it has failed. extra: fields that are sent with each
        request.

    A few requests before the first workload find out what the server takes. Answers that failed, were cut off or came too late are
    counted and in no time. An interrupt keeps the workloads that were measured, and returns them; the one that was under way is
    measured anew from its start, as a part of a load is another load, and its answers so far stay in the folder.

    ValueError or TypeError for arguments that cannot be, and a folder of another server or model;
    ConnectionError where nothing answers.
    """
    works = listed(workload)
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is not None and "@" in parts.netloc:
        raise ValueError("serve_bench(url): an address with a name and a password is not taken: give key= instead.")
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"serve_bench({url!r}): give the address of an interface, such as 'http://127.0.0.1:8000/v1'.")
    if isinstance(connections, bool) or not isinstance(connections, int) or connections < 1:
        raise ValueError(f"serve_bench(connections={connections!r}): a whole number of at least 1.")
    for name, value in (("stall_s", stall_s), ("limit_s", limit_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"serve_bench({name}={value!r}): a number above 0.")
    token = os.environ.get(KEY, "") if key is None else key
    place = None if folder is None else Path(folder)
    named = server or parts.netloc
    given: dict[str, Any] = {"server": named, "model": model, "extra": dict(extra or {})}
    points = [] if place is None else _opened(place, given)
    left = [work for work in works if work not in [point.workload for point in points]]

    async def measure(progress: Progress) -> None:
        client = Client(url, key=token, connections=min(connections, _connections()), stall_s=stall_s, limit_s=limit_s)
        servers: dict[tuple[bool, bool], Server] = {}
        async with client:
            for work in left:
                progress.tell(f"{named}, {work.name}: asking what the server takes")
                kind = work.chat, bool(work.prompts)  # what a server takes does not depend on the rest
                if kind not in servers:
                    servers[kind] = await asked(client, model, work, extra or {}, given["model"])
                found = servers[kind]
                if given["model"] not in (None, found.model):
                    raise _another(place, "model", given["model"], found.model)
                given["model"] = found.model
                began = datetime.now(UTC).isoformat()
                bodies = found.bodies(work, began)

                def tell(answers: Mapping[int, Answer], seconds: float, work: Workload = work) -> None:
                    progress.tell_answers(f"{named}, {work.name}", work.requests, answers, seconds)

                with _as_they_come(place, len(points)) as keep:
                    answers, delay = await drive(client, found.path, bodies, work, tell, keep)
                notes = (*found.notes, *_notes(work, answers))
                point = Point(named, work, tuple(answers), delay, notes, began)
                points.append(point)
                progress.point(point.line)
                if place is not None:
                    _keep(place, given, points)

    try:
        _in_a_loop(measure)
    except KeyboardInterrupt:
        print("\nsurokit: interrupted; workloads that were measured are kept", file=sys.stderr)
        if not points:
            raise
    wanted = [point for work in works for point in points if point.workload == work]
    return ServeBench([*wanted, *(point for point in points if point not in wanted)])


def _in_a_loop(measure: Callable[[Progress], Any]) -> None:
    """Run the measuring in a loop and a thread of its own: a notebook has a loop that runs already."""
    failed: list[BaseException] = []
    progress = Progress()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task = asyncio.ensure_future(measure(progress))
        started.append((asyncio.get_running_loop(), task))
        await task

    def body() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body, name="surokit serve_bench", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            progress.show()
    except KeyboardInterrupt:
        for loop, task in started:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    finally:
        progress.show(is_last=True)
    if failed:
        raise failed[0]


def _notes(work: Workload, answers: list[Answer]) -> list[str]:
    """Say where prompts are not as long as they were asked for, and where answers came without a time between their tokens."""
    notes = []
    sizes = {a.input_tokens for a in answers if a.input_tokens is not None}
    if not work.prompts and not sizes <= {work.input_tokens}:
        notes.append(f"prompts had {min(sizes)} to {max(sizes)} tokens where {work.input_tokens} were asked for")
    between = itl_ms(answered(answers))
    if (at_once := int((between == 0).sum())) > len(between) / 2:
        notes.append(
            f"{at_once} of {len(between)} times between chunks are zero, so the time per token is not the server's: something "
            "between may collect what it streams"
        )
    return notes


def _connections() -> int:
    """Return how many connections this process may have, where the system says it: its limit of open files is raised to what it
    may be."""
    try:
        import resource
    except ImportError:  # not on Windows
        return CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, soft - _OTHER_FILES)


# -- the folder


def _opened(place: Path, given: dict[str, Any]) -> list[Point]:
    """Return the points that a folder holds, which is made where it is not there; a model that is not given is the folder's.

    ValueError for a folder of something else.
    """
    if not (place / HEAD).exists():
        check_new(place, "serve_bench")
        make_folder(place / ANSWERS, "the answers of a server")
        _write(place, given, [])
        return []
    points = list(ServeBench.load(place).points)
    kept = json.loads((place / HEAD).read_text())
    # an address says nothing of the model behind it: the server is asked before it is measured
    given["model"] = given["model"] or kept["model"]
    for name, value in given.items():
        if kept[name] not in (None, value):  # None is the model before any server has named it
            raise _another(place, name, kept[name], value)
    return points


def _another(place: Path | None, name: str, kept: object, value: object) -> ValueError:
    return ValueError(
        f"serve_bench(folder={str(place)!r}): the folder has {name}={kept!r}, and this call {name}={value!r}: give another folder; "
        "add() puts both in one table."
    )


@contextmanager
def _as_they_come(place: Path | None, number: int) -> Iterator[Callable[[Answer], object] | None]:
    """Give what keeps each answer as it comes, in a file that the workload's whole one replaces; None where there is no folder."""
    if place is None:
        yield None
        return
    with (place / ANSWERS / _under_way(number)).open("w") as lines:
        yield lambda answer: lines.write(answer.line() + "\n")


def _under_way(number: int) -> str:
    return f"{number:02}.interrupted.jsonl"


def _keep(place: Path, given: Mapping[str, Any], points: list[Point]) -> None:
    """Write the last point's answers, then the head that names them."""
    number = len(points) - 1
    file = f"{number:02}.jsonl"
    write_whole(place / ANSWERS / file, "".join(answer.line() + "\n" for answer in points[-1].answers))
    (place / ANSWERS / _under_way(number)).unlink()
    _write(place, given, points)


def _write(place: Path, given: Mapping[str, Any], points: list[Point]) -> None:
    """Write the head: what was asked, and all of the points but their answers."""
    rows = [{"file": f"{i:02}.jsonl", **described(point)} for i, point in enumerate(points)]
    write_whole(place / HEAD, json.dumps({"format": FORMAT, **given, "points": rows}, indent=1))


__all__ = ["serve_bench"]
