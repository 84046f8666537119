"""The planner's widget, driven in Python: controls plan again, the picture follows, a contradiction is a sentence."""

import sys
from contextlib import contextmanager
from xml.etree import ElementTree

import nbformat
import pytest
import torch

import surokit as sk
from surokit.planner import Gpu, plan
from surokit.planner.picture import parts_of
from surokit.recipe import BF16, FP4, FP8
from surokit.units import gib
from surokit.widgets import planning
from surokit.widgets.figure import _css
from surokit.widgets.picture import MESSAGE_BYTES
from surokit.widgets.planning import NOT_GIVEN, explore, picture
from tests.planner.families import QWEN3_8B
from tests.refusals import refused

PLAN = plan(QWEN3_8B, batch=3, length=4096, gpus=8, gpu="H100", mfu=0.4, tokens=1e12, usd_per_gpu_hour=2.5)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def in_a_notebook(monkeypatch):
    monkeypatch.setattr(planning, "in_notebook", lambda: True)


def text(svg: str) -> str:
    return "\n".join("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text"))


class Screen:
    """Stands for IPython's `display`."""

    def __init__(self):
        self.shown = []

    def __call__(self, content, raw, display_id=False):
        assert raw
        self.shown.append(content)
        return self

    def update(self, content, raw):
        assert raw
        self.shown.append(content)


@pytest.fixture
def screen(monkeypatch):
    import IPython.display

    screen = Screen()
    monkeypatch.setattr(IPython.display, "display", screen)
    return screen


def test_controls_start_where_the_plan_stands():
    explorer = explore(PLAN)
    said = {name: control.value for name, control in explorer.controls.items()}
    assert said == {
        "batch": "3",
        "length": "4,096",
        "gpus": "8",
        "recipe": "bf16",
        "gpu": "H100",
        "recompute": "none",
        "optimizer": "adamw",
        "zero": "0",
    }
    assert explorer.plan is PLAN


@pytest.mark.parametrize(
    ("optimizer", "shown"),
    [
        (sk.AdamW8bit(lr=1e-3), "adamw8bit, as given"),
        (sk.AdamW(lr=1e-3, state_dtype=torch.float32), "adamw, as given"),
        (lambda ps: torch.optim.SGD(ps, lr=1e-3), "sgd"),
    ],
)
def test_a_session_starts_where_it_stands(optimizer, shown):
    """Its batch and optimizer, with the moments' dtype; and a change of something else leaves them, and what is frozen, alone."""
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48))
    model.model.embed_tokens.requires_grad_(False)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    session = sk.Session(model, [{"input_ids": ids, "labels": ids}], optimizer=optimizer, schedule=None)
    planned = plan(session, gpu="H100")
    explorer = explore(planned)
    said = {name: explorer.controls[name].value for name in ("batch", "length", "optimizer")}
    assert said == {"batch": "2", "length": "32", "optimizer": shown}
    explorer.controls["gpus"].value = "2"
    assert explorer.plan.memory == planned.but(gpus=2).memory
    assert explorer.plan.setup == planned.but(gpus=2).setup


@pytest.mark.parametrize(
    ("control", "value", "changes"),
    [
        ("batch", "8", {"batch": 8}),
        ("length", "16,384", {"length": 16384}),
        ("gpus", "1,024", {"gpus": 1024}),
        ("recipe", "qfp8", {"recipe": "qfp8"}),
        ("recipe", "bf16 + LoRA", {"recipe": BF16.lora()}),
        ("gpu", "A100", {"gpu": "A100"}),
        ("recompute", "full", {"recompute": "full"}),
        ("optimizer", "adamw8bit", {"optimizer": "adamw8bit"}),
        ("zero", "3", {"zero": 3}),
    ],
)
def test_a_control_is_the_plan_with_that_argument(control, value, changes, screen):
    explorer = explore(PLAN)
    explorer._ipython_display_()
    explorer.controls[control].value = value
    expected = PLAN.but(**changes)
    assert explorer.plan.memory == expected.memory
    assert explorer.plan.time == expected.time
    shown = screen.shown[-1]
    assert shown["text/plain"] == repr(explorer.plan)
    said = text(shown["image/svg+xml"])
    assert gib(expected.memory.gib) in said
    for part in parts_of(expected.memory):
        assert f"{part.group}{gib(part.gib)}" in said
    for line in expected.lines():
        if line.group == "time and cost":
            assert f"{line.term}\n{line.text}\n{line.kind}" in said


def test_controls_add_up_and_go_back():
    explorer = explore(PLAN)
    explorer.controls["recipe"].value = "qnf4"
    explorer.controls["batch"].value = "1"
    assert explorer.plan.memory == PLAN.but(recipe="qnf4", batch=1).memory
    explorer.controls["recipe"].value = "bf16"
    explorer.controls["batch"].value = "3"
    assert explorer.plan.memory == PLAN.memory


def test_a_contradiction_is_its_sentence_and_the_last_plan_stays(screen):
    explorer = explore(PLAN)
    explorer._ipython_display_()
    explorer.controls["gpu"].value = NOT_GIVEN
    sentence = str(explorer.error)
    assert sentence.startswith("mfu=0.4 is a share of a dense BF16 peak, and there is no GPU")
    assert explorer.plan is PLAN
    shown = screen.shown[-1]
    assert shown["text/plain"].startswith(sentence)
    assert "This is the last plan that could be made" in text(shown["image/svg+xml"]).replace("\n", " ")
    explorer.controls["gpu"].value = "H100"
    assert explorer.error is None
    assert "last plan" not in screen.shown[-1]["text/plain"]


def test_arguments_of_the_user_are_among_the_choices():
    mine = Gpu("Mine", memory_gib=10, bf16_tflops=100)
    recipe = FP4.keep_last(0).lora(rank=4)
    given = plan(QWEN3_8B, gpu=mine, recipe=recipe, batch=5, length=1000, optimizer="none")
    explorer = explore(given)
    said = {name: explorer.controls[name].value for name in ("batch", "length", "gpu", "optimizer")}
    assert said == {"batch": "5", "length": "1,000", "gpu": "Mine", "optimizer": "sgd"}
    assert explorer.controls["recipe"].value == "fp4, as given"
    explorer.controls["zero"].value = "1"
    assert explorer.plan.recipe is recipe
    assert explorer.plan.gpu is mine


def test_a_number_of_parameters_says_what_it_leaves_out():
    explorer = explore(plan(405e9))
    assert {explorer.controls[name].value for name in ("batch", "length", "gpu")} == {NOT_GIVEN}
    said = text(explorer.bundle()["image/svg+xml"])
    assert "Holds at least 3,319.2 GiB, without activations, on each GPU" in said.replace("\n", " ")
    assert "memory leaves out activations" in said
    assert "Fits" not in said


def test_other_arguments_stay_when_a_control_moves():
    explorer = explore(PLAN)
    explorer.set(accumulate=4, batch=2)
    assert explorer.plan.memory == PLAN.but(accumulate=4, batch=2).memory
    explorer.controls["recompute"].value = "full"
    assert explorer.plan.setup.accumulate == 4
    explorer.controls["batch"].value = "4"
    assert explorer.plan.setup.batch == 4
    with refused(ValueError):
        explorer.set(accumulate=0)
    assert explorer.plan.setup.batch == 4


@pytest.mark.parametrize("each", [PLAN, PLAN.but(recipe="qfp8", batch=64), plan(8e9), PLAN.but(recipe=FP8, mfu=None)])
def test_the_picture_is_small_and_nothing_leaves_it(each):
    svg = picture(each, "a sentence <with> & marks " * 6)
    root = ElementTree.fromstring(svg)
    assert len(svg) < MESSAGE_BYTES
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.attrib["width"]) <= width
    for node in root.iter(f"{SVG}text"):
        assert 0 < float(node.attrib["y"]) < height
        # a character takes about 6 px at this size
        if node.get("text-anchor") != "end":
            assert float(node.attrib["x"]) + 5.8 * len("".join(node.itertext())) < width + 20


def test_its_style_leaves_other_pictures_of_the_page_alone():
    rules = picture(PLAN).partition("<style>")[2].partition("</style>")[0]
    panel = _css("auto")
    assert rules.startswith(panel)
    assert all(rule.startswith(".sk.plan ") for rule in rules.removeprefix(panel).split("}") if rule)


def test_a_change_is_little_work():
    """A picture that follows a slider: what a change calls in Python, which no processor's speed counts into."""
    explorer = explore(PLAN)
    calls = []
    for value in ("1", "2", "4", "8"):
        with counted() as count:
            explorer.controls["batch"].value = value
            explorer.bundle()
        calls.append(count[0])
    assert max(calls) < 60_000


@contextmanager
def counted():
    count = [0]

    def note(frame, event, argument):
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(before)


def test_without_ipywidgets_the_picture_stands_alone(monkeypatch, screen, capsys):
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    explorer = explore(PLAN)
    explorer._ipython_display_()
    assert explorer.controls == {}
    assert "pip install ipywidgets" in capsys.readouterr().out
    assert [set(shown) for shown in screen.shown] == [{"text/plain", "image/svg+xml"}]
    explorer.set(batch=1)
    assert len(screen.shown) == 2


def test_outside_a_notebook_the_plan_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(planning, "in_notebook", lambda: False)
    explorer = explore(PLAN)
    assert capsys.readouterr().out == f"{PLAN}\n"
    assert len(repr(explorer).splitlines()) == 1


def test_what_is_no_plan_is_refused():
    with refused(TypeError):
        explore(8e9)  # type: ignore[arg-type]


def test_a_saved_notebook_keeps_the_last_picture(tmp_path):
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    cells = [
        f"import surokit as sk\nfrom surokit.widgets.planning import explore\nplan = sk.plan({QWEN3_8B}, batch=1, length=2048, "
        "gpu='H100')\nexplorer = explore(plan)\nexplorer",
        "explorer.controls['recipe'].value = 'qfp8'",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}, store_widget_state=False
    ).execute()
    controls, shown = (output.data for output in book.cells[0].outputs)
    assert "application/vnd.jupyter.widget-view+json" in controls
    assert "running kernel" in controls["text/plain"]
    assert "qfp8" in text(shown["image/svg+xml"])
    page, _ = HTMLExporter(template_name="lab").from_notebook_node(book)
    assert "data:image/svg+xml;base64" in page
