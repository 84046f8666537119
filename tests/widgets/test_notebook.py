"""In a real kernel, headless: what a notebook is left with is a static picture, whatever way the cell ended."""

from __future__ import annotations

import base64
import re
import warnings
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    # 0: a subscriber of a run, fed by hand; cell 1 lets the same run go on
    """
from surokit.widgets import Panel, PanelState
panel = Panel(PanelState("fp8", recipe="emulated", total=400, resumes=True)).open()
print("before")
for step in range(1, 301):
    panel.on_step({"step": step, "loss": 8 / step ** 0.3, "tokens": 512, "wall_ms": 20.0, "idle_frac": 0.02})
print("after")
panel.on_end("interrupted")
""",
    """
for step in range(301, 401):
    panel.on_step({"step": step, "loss": 8 / step ** 0.3, "tokens": 512, "wall_ms": 20.0, "idle_frac": 0.02})
panel.on_end("done")
""",
    # 2: a foreign loop that fails without closing its panel
    """
import surokit.live
live = surokit.live.Live("mine")
for step in range(5):
    live.log(loss=1.0 / (step + 1))
raise ZeroDivisionError("in the user's own loop")
""",
    # 3: a finished run shows itself
    """
Panel(PanelState.from_records([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "old run"))
""",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The executed notebook; a cell's exception stays in its output."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in CELLS])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = NotebookClient(
        book, timeout=120, allow_errors=True, resources={"metadata": {"path": str(tmp_path_factory.mktemp("nb"))}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zmq and asyncio have their own of each version
        client.execute()
    return book


def pictures(cell):
    return [output.data for output in cell.outputs if "image/svg+xml" in output.get("data", {})]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (0, "Interrupted after step 300. The next run() goes on from there."),
        (1, "Done at step 400."),
        (2, "Failed after step 5: ZeroDivisionError: in the user's own loop"),
        (3, "step 2"),
    ],
)
def test_each_cell_ends_with_one_static_picture(notebook, cell, words):
    (data,) = pictures(notebook.cells[cell])
    assert set(data) == {"text/plain", "image/svg+xml"}
    root = ElementTree.fromstring(data["image/svg+xml"])
    assert words in "".join(root.itertext())
    assert words in data["text/plain"]
    assert root.findall(".//{http://www.w3.org/2000/svg}path[@class='l c0']")


def test_prints_are_left_alone(notebook):
    assert "".join(o.text for o in notebook.cells[0].outputs if o.output_type == "stream") == "before\nafter\n"


def test_an_exported_page_shows_the_curve_and_asks_nobody(notebook):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    images = re.findall(r'<img[^>]+src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(images) == 4
    assert all(b'class="l c0"' in base64.b64decode(image) for image in images)
