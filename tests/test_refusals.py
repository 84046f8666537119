"""Tables of messages: what differs from them fails, and every entry belongs to a test."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.refusals import stale

TESTS = Path(__file__).parent

CONFTEST = """
import pytest
from tests import refusals

def pytest_addoption(parser):
    parser.addoption("--write-refusals", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(refusals.plugin(config))

@pytest.fixture(autouse=True)
def _temporary(pytestconfig, tmp_path_factory):
    pytestconfig.stash[refusals.TEMPORARY] = tmp_path_factory.getbasetemp()
"""
HEAD = """
import json
import warnings
import pytest
from tests.refusals import refused, warned
"""
SOME = """
@pytest.mark.parametrize("n", [1, 2])
def test_words(n, tmp_path):
    with refused(ValueError) as caught:
        raise ValueError(f"{n} is too little in {tmp_path}/file")
    assert caught.type is ValueError
    with warned(UserWarning):
        warnings.warn("take care", stacklevel=1)

class TestMore:
    def test_more(self):
        for error in (KeyError("gone"), IndexError("far")):
            with refused((KeyError, IndexError)):
                raise error
"""
FOREIGN = """
def test_a_library():
    with refused(ValueError):
        json.loads("{")
"""
TABLE = {
    "test_some.py::TestMore::test_more": ["'gone'", "far"],
    "test_some.py::test_words[1]": ["1 is too little in <tmp>/file", "take care"],
    "test_some.py::test_words[2]": ["2 is too little in <tmp>/file", "take care"],
}


def run(folder: Path, source: str, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_some.py").write_text(HEAD + source, encoding="utf-8")
    settings = TESTS.parent / "pyproject.toml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(settings),
        *options,
        str(folder),
    ]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


def written(folder: Path) -> dict[str, list[str]]:
    return json.loads((folder / "refusals.json").read_text(encoding="utf-8"))


def test_a_table_is_written_and_then_holds(tmp_path):
    """A library's words are not written. What is no longer said goes from the table, and so does a test or a case that is gone."""
    said = run(tmp_path, SOME + FOREIGN, "--write-refusals")
    assert "1 failed, 3 passed" in said
    assert "keep pytest.raises(..., match=...)" in said
    assert written(tmp_path) == TABLE
    assert "3 passed" in run(tmp_path, SOME)
    fewer = SOME.replace("[1, 2]", "[2]").replace("test_more", "test_all").replace('IndexError("far")', "")
    assert "2 passed" in run(tmp_path, fewer, "--write-refusals")
    assert written(tmp_path) == {
        "test_some.py::TestMore::test_all": ["'gone'"],
        "test_some.py::test_words[2]": TABLE["test_some.py::test_words[2]"],
    }


DIFFERENT = {
    "words": ("raise ValueError('other')", "Another message than in the table:\n.*now:   other\n.*table: right\n"),
    "class": ("raise TypeError('right')", "TypeError: right"),
    "nothing": ("pass", "DID NOT RAISE"),
    "missing": (
        "raise ValueError('right')",
        "has no message 1 of test_some.py::test_missing. `pytest .*--write-refusals`",
    ),
    "fewer": ("raise ValueError('right')", r"test_fewer no longer hears what the table holds: \['left'\]"),
}


def test_what_differs_fails(tmp_path):
    table = {f"test_some.py::test_{name}": ["right"] for name in DIFFERENT if name != "missing"}
    table["test_some.py::test_fewer"].append("left")
    (tmp_path / "refusals.json").write_text(json.dumps(table), encoding="utf-8")
    tests = [
        f"def test_{name}():\n    with refused(ValueError):\n        {code}\n" for name, (code, _) in DIFFERENT.items()
    ]
    said = run(tmp_path, "\n".join(tests))
    assert f"{len(DIFFERENT)} failed in" in said
    for _, words in DIFFERENT.values():
        assert re.search(words, said), said
    assert written(tmp_path) == table


def test_writing_is_for_one_process(tmp_path):
    pytest.importorskip("xdist")
    assert "leave out -n" in run(tmp_path, SOME, "--write-refusals", "-n", "2")


def test_every_entry_belongs_to_a_test():
    paths = sorted(TESTS.rglob("refusals.json"))
    assert paths
    for path in paths:
        table = json.loads(path.read_text(encoding="utf-8"))
        assert list(table) == sorted(table)
        assert not stale(path, table), f"`pytest {path.parent.relative_to(TESTS.parent)} --write-refusals` drops them"
