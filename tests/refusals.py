"""The words of errors and warnings, which stand in tables and not in the tests: `refusals.json` in each folder of tests.

A test asks for the class, `with refused(ValueError) as caught:`, and the whole message is compared with the table, under the test's
name and case, in the order in which the test hears them. `pytest FILE --write-refusals` runs every case and writes what was said;
read the difference. Errors that torch, Python or another library words stay with `pytest.raises(..., match=...)`, as their words
differ between versions.
"""

from __future__ import annotations

import ast
import dis
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Generic, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEMPORARY = pytest.StashKey[Path]()  # the folder of this run's temporary ones
E = TypeVar("E", bound=BaseException)


class refused(Generic[E]):
    """Like `pytest.raises(kind)`, and the message must be that of the table."""

    def __init__(self, kind: type[E] | tuple[type[E], ...]) -> None:
        self.raises = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        return self.raises.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        __tracebackhide__ = True
        expected = self.raises.__exit__(kind, error, traceback)
        if expected:
            _Refusals.here().hear(str(error), error)
        return expected


@contextmanager
def warned(kind: type[Warning]) -> Iterator[pytest.WarningsRecorder]:
    """Like `pytest.warns(kind)`, and the messages of that kind must be those of the table."""
    __tracebackhide__ = True
    with pytest.warns(kind) as caught:
        yield caught
    for warning in caught:
        if issubclass(warning.category, kind):
            _Refusals.here().hear(str(warning.message))


class _Refusals:
    """The plugin of pytest: it knows which test runs, and compares or writes what the test hears."""

    running: ClassVar[_Refusals | None] = None

    def __init__(self, write: bool) -> None:
        self.write = write
        self.tables: dict[Path, dict[str, list[str]]] = {}
        self.collected: dict[Path, set[str]] = {}
        self.heard: list[str] = []

    @classmethod
    def here(cls) -> _Refusals:
        assert cls.running is not None, "refused and warned are for tests that run"
        return cls.running

    def table(self, path: Path) -> dict[str, list[str]]:
        if path not in self.tables:
            self.tables[path] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return self.tables[path]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.collected.setdefault(item.path, set()).add(name_of(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.item, self.path, self.heard, before = item, item.path.with_name("refusals.json"), [], _Refusals.running
        _Refusals.running = self
        table, name = self.table(self.path), name_of(item)  # read before a test may break the disk
        try:
            result = yield
        finally:
            _Refusals.running = before
        if self.write:
            table.pop(name, None)
            table |= {name: self.heard} if self.heard else {}
        elif more := table.get(name, [])[len(self.heard) :]:
            pytest.fail(f"{name} no longer hears what the table holds: {more}. {self.remedy()}", pytrace=False)
        return result

    def hear(self, message: str, error: BaseException | None = None) -> None:
        __tracebackhide__ = True
        message, name, place = self.plain(message), name_of(self.item), len(self.heard)
        self.heard.append(message)
        if self.write:
            if error is not None and (foreign := _foreign(error, self.path.parent)):
                pytest.fail(f"Its words are not ours, so keep pytest.raises(..., match=...): {foreign!r}")
            return
        known = self.table(self.path).get(name, [])
        if len(known) <= place:
            pytest.fail(f"The table has no message {place + 1} of {name}. {self.remedy()}")
        if message != known[place]:
            pytest.fail(
                f"Another message than in the table:\n  now:   {message}\n  table: {known[place]}\n{self.remedy()}"
            )

    def remedy(self) -> str:
        return f"`pytest {self.item.nodeid.partition('::')[0]} --write-refusals` writes what is said now: read the difference."

    def plain(self, message: str) -> str:
        """The message without what differs between runs and machines: its folders, addresses, digests of weights, table of GPUs."""
        own = getattr(self.item, "funcargs", {}).get("tmp_path")
        message = re.sub(rf"{re.escape(str(self.item.config.stash[TEMPORARY]))}/[^/\s'\"`,;:)]+", "<tmp>", message)
        message = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w{{8}}", "<tmp>", message)
        message = message.replace(own.name, "<tmp>") if own else message
        message = re.sub(r"\b(weights?) [0-9a-f]{8}\b", r"\1 <digest>", message.replace(str(ROOT), "<root>"))
        message = re.sub(r"\b(127\.0\.0\.1:|port=)\d+", r"\1<port>", message)
        message = re.sub(r"(?i)\b(known: )A10, [^;]+", r"\1<every GPU>", message)  # the table of GPUs grows
        return re.sub(r"\b0x[0-9a-f]{8,}", "<address>", message)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.write:
            return
        whole = not any("::" in argument for argument in session.config.args)
        for path, table in self.tables.items():
            gone = stale(path, table)
            if whole:
                names = {file.name: names for file, names in self.collected.items() if file.parent == path.parent}
                gone |= {name for name in table if name not in names.get(name.partition("::")[0], {name})}
            kept = {name: table[name] for name in sorted(table) if name not in gone}
            if kept:
                path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            else:
                path.unlink(missing_ok=True)


def plugin(config: pytest.Config) -> object:
    """What `conftest.py` registers."""
    write = config.getoption("--write-refusals")
    if write and (hasattr(config, "workerinput") or config.getoption("numprocesses", None)):
        raise pytest.UsageError("--write-refusals is for one process: leave out -n.")
    return _Refusals(write)


def name_of(item: pytest.Item) -> str:
    """`test_file.py::test[case]`, whatever folder pytest was started in."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def stale(path: Path, table: dict[str, list[str]]) -> set[str]:
    """Names in a table of which no function exists any more. The cases of a test are not looked at: they are known when it runs."""
    functions: dict[str, set[str]] = {}
    for file in {name.partition("::")[0] for name in table}:
        source = path.with_name(file)
        tree = ast.parse(source.read_text(encoding="utf-8") if source.exists() else "")
        functions[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {
        name for name in table if name.partition("[")[0].rpartition("::")[2] not in functions[name.partition("::")[0]]
    }


def _foreign(error: BaseException, tests: Path) -> str:
    """What a library worded: the message, if no `raise` of ours made it, or that of a cause which the message repeats."""
    seen: BaseException | None = error
    while seen is not None:
        words = str(seen.args[0]) if isinstance(seen, KeyError) and seen.args else str(seen)
        if not _raised_here(seen.__traceback__, tests) and (seen is error or (len(words) > 12 and words in str(error))):
            return words
        seen = seen.__cause__ or seen.__context__
    return ""


def _raised_here(traceback: TracebackType | None, tests: Path) -> bool:
    """Whether its last frame is in this repository, or in these tests, and stands at a `raise`."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return True  # it was never raised, as a cause that was made for a test
    code = traceback.tb_frame.f_code
    file = Path(code.co_filename).resolve()
    at_raise = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts
    return at_raise and (ours or file.is_relative_to(tests))
