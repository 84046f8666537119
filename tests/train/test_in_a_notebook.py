"""Runs in threads in a real kernel: cells go on beside one, wait for one, interrupt one, and are told what it prints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    """
from tests.train.toys import ENDLESS, assert_same_state, interrupt_when, make_batches, make_session

def third(session):
    if session.steps == 3:
        print("three", flush=True)
    return {}

session = make_session(eval=make_batches(1), meters=[third])
session.live(thread=True)
await session.run(10)
print(session.steps)
""",
    # 1: the cell ends, the run goes on
    """
run = session.run(ENDLESS)
print(run)
""",
    # 2: another cell meanwhile
    """
assert session.evaluate() > 0
assert run.running
session.note("looked")
session.stop()
run.wait()
print(session.steps < ENDLESS, session.control.state)
""",
    # 3: the notebook's stop button, while the cell awaits
    """
before = session.steps
interrupt_when(lambda: session.steps > before, waits=False)
await session.run(ENDLESS)
print("after", session.steps < ENDLESS)
""",
    # 4: and while it trains itself
    """
before = session.steps
interrupt_when(lambda: session.steps > before, waits=False)
session.run(ENDLESS, thread=False)
print("after", session.control.state)
""",
    # 5: all of it was one run
    """
alone = make_session()
alone.run(session.steps)
assert_same_state(session, alone)
print("the same")
""",
    # 6: a run that fails is the waiting cell's error
    """
session.model.register_forward_pre_hook(lambda *_: 1 / 0)
await session.run(3)
""",
]


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    """As executed; a cell's exception stays in its output."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in CELLS])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    root = Path(__file__).parents[2]
    client = NotebookClient(book, timeout=120, allow_errors=True, resources={"metadata": {"path": str(root)}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zmq and asyncio have their own of each version
        client.execute()
    return list(book.cells)


def said(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def errors(cell: Any) -> list[str]:
    return [f"{out.ename}: {out.evalue}" for out in cell.outputs if out.output_type == "error"]


def test_a_cell_awaits_its_run(cells: list[Any]) -> None:
    assert errors(cells[0]) == []
    assert said(cells[0]) == "three\n10\n", "what the thread prints is the cell's"


def test_other_cells_go_on(cells: list[Any]) -> None:
    assert errors(cells[1]) == errors(cells[2]) == []
    assert "<Running Toy: " in said(cells[1])
    assert said(cells[2]) == "True idle\n"


@pytest.mark.parametrize("cell", [3, 4])
def test_an_interrupt_ends_the_run_and_not_the_cell(cells: list[Any], cell: int) -> None:
    assert errors(cells[cell]) == []
    assert said(cells[cell]).startswith("after ")


def test_it_is_the_run_of_one_thread(cells: list[Any]) -> None:
    assert errors(cells[5]) == []
    assert said(cells[5]) == "the same\n"


def test_a_failure_is_raised_where_it_is_awaited(cells: list[Any]) -> None:
    assert errors(cells[6]) == ["ZeroDivisionError: division by zero"]
