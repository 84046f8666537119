"""Tests that go on where they ended: each outcome is kept in a file when it is known, and a test that has one is not run again.

`pytest --book FILE` is how the tests run on a GPU (surokit.bench.hour), in calls that may end at any moment. A test that two
processes ended in has failed. Where a test leaves the device without an answer, nothing behind it would say anything of itself: the
process ends with GOES_ON, and another one goes on behind that test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surokit.bench.hour import GOES_ON
from surokit.bench.offload_decoder import answers
from surokit.bench.results_store import Book

HEAD = {"benchmark": "tests on a device"}


class Keeping:
    """A plugin of pytest that keeps outcomes in a file: {"what": "test", "seconds": s, "passed": True}, else "failed" or "skipped"
    with the reason."""

    def __init__(self, path: Path) -> None:
        self.book = Book(path, "tests", HEAD, {})
        self.found: dict[str, Any] = {}
        before = self.book.data["calls"][:-1]
        if before and (test := before[-1].get("begun")):
            twice = "left_out" in self.book.found.get(test, {})
            end = {"failed": "Two processes ended in it."} if twice else {"left_out": "The process ended in it."}
            self.book.put(test, {"what": "test", **end})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if self.book.done(item.nodeid)]
        items[:] = [item for item in items if not self.book.done(item.nodeid)]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.found = {"what": "test", "seconds": 0.0, "passed": True}
        self.book.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found["seconds"] = round(self.found["seconds"] + report.duration, 3)
        if not report.passed:
            self.found.pop("passed", None)
            self.found[report.outcome] = _why(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.book.keep(nodeid, self.found)
        if "failed" in self.found and not answers():
            self.book.end("The device answers no more: another process goes on.")
            pytest.exit(f"The device answers no more after {nodeid}.", GOES_ON)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (0, 1, 5):  # 5: none was left
            self.book.end("")


def _why(report: pytest.TestReport) -> str:
    """The first line of what a test raised, or the reason why it was skipped."""
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    words = report.longreprtext if crash is None else crash.message
    return next((line for line in words.splitlines() if line.strip()), "")[:300]
