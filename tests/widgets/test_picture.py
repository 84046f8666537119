"""The picture says what matters, of one run or several, in valid SVG that fits a message."""

from __future__ import annotations

import math
import random
import re
from xml.etree import ElementTree

import pytest

from surokit.runs.status import RunInfo
from surokit.widgets.picture import (
    MESSAGE_BYTES,
    PANES,
    SHOWN_RUNS,
    bundle,
    figures,
    hours,
    idle_lines,
    money_words,
    phase_words,
    picture,
    run_table,
    suggestion,
    summary_line,
    summary_text,
)
from surokit.widgets.state import PanelState, Runs
from tests.widgets.toys import wild


def grown(steps=300, *, seed=0, title="fp8", spikes=(), nans=(), gpus=1, idle=0.05, reason=None, **more):
    dice = random.Random(seed)
    state = PanelState(title, recipe="y = Q(x) Q(w)ᵀ, native", total=1_000)
    if gpus:
        state.info = RunInfo(gpus=gpus, flops_per_token=6e9, peak_tflops=1000.0, usd_per_gpu_hour=3.6)
    for step in range(1, steps + 1):
        loss = 2.0 + 6 / step**0.5 + dice.gauss(0, 0.05) + 4 * (step in spikes)
        values = {"loss": math.nan if step in nans else loss, "idle": idle, "grad_norm": 1.0, "memory": 61.3}
        state.add(step, tokens=4_000, seconds=0.25, lr=3e-4, skipped=step in nans, **{**values, **more})
    state.reason = reason
    return state


def words(svg):
    return [text for text in ElementTree.fromstring(svg).itertext() if text.strip()]


def test_the_picture_says_what_matters():
    state = grown(400, spikes=(180,), stall=0.005, busy=0.85, launches=1840.0)
    state.note(300, "longer sequences, other data")
    for step in range(100, 401, 100):
        state.add(step, held_out=2.5)
    svg = picture(state)
    text = " ".join(words(svg))
    for told in (
        "fp8",
        "y = Q(x) Q(w)ᵀ, native",
        "peak 61.3 GiB · converging",
        "step 400 / 1,000 · 1:40 elapsed · 2:30 to go",
        "0.03 GPU h · $0.10",
        "held out 2.500",
        "Tokens/s 16k 9.6 % of peak",
        "Device idle 5.0 % at least",
        "Idle: waiting for data 2.0 %, between steps 3.0 %, inside steps 10 % (1,840 launches)",
        "loss spike, at step 180: loss",
        "go back about 100 steps",
        "longer sequences,…",
    ):
        assert told in re.sub(r"\s+", " ", text), told
    assert svg.count('class="e"') == 1
    assert svg.count('class="i"') == 1


@pytest.mark.parametrize("standing", ["paused", "failed", "diverging"])
def test_an_alarm_is_said_in_the_head(standing):
    state = grown(60)
    if standing == "paused":
        state.paused = True
    elif standing == "failed":
        state.reason = "failed: ValueError: x"
    else:
        for step in range(61, 130):
            state.add(step, loss=9.0)
    assert phase_words(state) == standing
    found = re.search(rf'<text class="(\w)"[^>]*>peak 61.3 GiB · {standing}<', picture(state))
    assert found is not None
    assert found[1] == ("m" if standing == "paused" else "v")


def test_marks_of_one_step_are_one_and_the_worst():
    state = grown(400, spikes=(180, 200, 240))
    assert [(e.step, e.kind) for e in state.events] == [
        (180, "spike"),
        (200, "spike"),
        (240, "spike"),
        (240, "unstable"),
    ]
    svg = picture(state)
    assert svg.count('class="e"') == 3
    assert len(re.findall(r'class="v" d="M[0-9. ]+l4 4-4 4-4-4z"', svg)) == 1  # the diamond
    assert suggestion(state).startswith("Lower the learning rate")


def test_without_idle_time_the_gradient_norm_is_drawn():
    assert "Gradient norm" in picture(grown(idle=None))
    waiting = grown(idle=None, stall=0.05)
    assert "Device idle" in picture(waiting)
    assert "≥ 20 %" in picture(waiting)
    assert idle_lines(waiting) == ["Idle: waiting for data 20 %"]
    assert idle_lines(PanelState()) == []


@pytest.mark.parametrize("steps", [0, 1, 2, 300, 3_000, 20_000])
def test_one_run_fits_a_message(steps):
    message = bundle(wild(steps))
    ElementTree.fromstring(message["image/svg+xml"])
    assert sum(len(text.encode()) for text in message.values()) <= MESSAGE_BYTES


@pytest.mark.parametrize("runs", [0, 1, 2, 8, 20])
def test_many_runs_fit_a_message(runs):
    states = {f"run {i} " + "x" * i: wild(400, i) for i in range(runs)}
    message = bundle(states)
    ElementTree.fromstring(message["image/svg+xml"])
    assert sum(len(text.encode()) for text in message.values()) <= MESSAGE_BYTES


def test_the_reason_of_the_end_is_told_whole():
    stopped = grown(reason="stopped: by session.control.stop()")
    stopped.resumes = True
    told = [text for text in words(picture(stopped)) if text]
    at = next(i for i, text in enumerate(told) if text.startswith("Stopped after"))
    assert " ".join(told[at : at + 2]).endswith("session.control.stop(). The next run() goes on from there.")


def test_before_the_first_step_no_axis_is_made_up():
    empty = Runs(bf16=PanelState("bf16"), fp8=PanelState("fp8"))
    for svg in (picture(empty), picture(PanelState("bf16"))):
        told = [text for text in words(svg) if text]
        assert "no steps yet" in told
        assert "no timed steps yet" in told
        assert not {"0.0", "0.5", "1.0", "Steps/s"} & set(told)
        assert 'class="g"' not in svg


def test_where_the_runs_of_a_race_coincide_each_is_seen():
    """The baseline broad and first, the twin on it, the others on both."""
    runs = Runs((name, grown(200, title=name)) for name in ("bf16", "fp8", "bf16 again"))
    plain = picture(runs)
    assert 'class="w' not in plain
    runs.headline = "race · round 3"
    loss = picture(runs).split("</g>")[0]
    assert re.findall(r'class="([wl] c\d)"', loss) == ["w c0", "l c2", "l c1"]


def test_several_runs_in_one_picture():
    states = {"bf16": grown(title="a"), "fp8": grown(200, seed=1, spikes=(150,), reason="done"), "mxfp8": grown(0)}
    svg = picture(states)
    text = " ".join(words(svg))
    for told in (
        "3 runs",
        "1 ended",
        "bf16",
        "fp8",
        "mxfp8",
        "waiting",
        "done",
        "$0.07",
        "fp8: loss spike, at step 150",
    ):
        assert told in text, told
    assert all(f'class="l c{color}"' in svg for color in range(3))
    assert "run    step  loss (EMA)  tokens/s   idle   GiB  time   cost" in summary_text(states)
    assert "! fp8: loss spike, at step 150" in summary_text(states)
    assert picture({"only": states["bf16"]}) == picture(states["bf16"])


def test_runs_beyond_what_can_be_told_apart_are_counted():
    states = {f"r{i}": grown(30, seed=i) for i in range(SHOWN_RUNS + 3)}
    assert "and 3 more runs" in picture(states)


def test_the_table_leaves_out_what_no_run_has():
    columns, rows = run_table({"a": grown(20, gpus=0, idle=None), "b": grown(10, gpus=0, idle=None)})
    assert columns == ["run", "step", "loss (EMA)", "tokens/s", "GiB", "time", ""]
    assert [row[:2] for row in rows] == [["a", "20"], ["b", "10"]]
    assert rows[0][-1] == "warm-up"


def test_figures_are_those_that_are_known():
    assert figures(PanelState()) == []
    assert {figure.pane for figure in figures(grown())} == {pane.name for pane in PANES} | {""}
    assert {figure.name for figure in figures(PanelState.from_records([{"step": 1, "loss": 2.0}]))} == {"Loss"}


def test_money():
    state = grown(10)
    assert money_words(state) == "< 0.01 GPU h · $0.00"
    state.run_s = 36_000.0
    assert money_words(state) == "10 GPU h · $36.00"
    assert money_words(grown(10, gpus=0)) == ""
    assert [hours(value) for value in (0.0, 0.004, 0.005, 9.5, 1234.0)] == ["0.00", "< 0.01", "0.01", "9.50", "1,234"]
    assert "10 GPU h · $36.00" in summary_line(state)


def test_words_of_a_run_in_trouble():
    state = grown(60)
    for step in range(61, 130):
        state.add(step, loss=9.0)
    assert summary_line(state).endswith("· diverging")
    text = summary_text(state)
    assert "! diverging, at step" in text
    assert "  Stop, go back to a checkpoint before it, and lower the learning rate." in text


@pytest.mark.parametrize("text", ["<b>&\"'</b>", "\x1b[31mout of memory\x1b[0m", "\x00\x08", "half \ud800", "\ufffe"])
@pytest.mark.parametrize("where", ["title", "recipe", "reason", "note", "run"])
def test_no_text_spoils_the_picture(text, where):
    """An error's colour codes, a file name that is no text: the picture stays XML, and says the rest."""
    state = grown(20)
    if where == "note":
        state.note(9, f"see {text}")
    elif where != "run":
        setattr(state, where, f"failed: see {text}")
    message = bundle({text: state, "b": grown(20)} if where == "run" else state)
    root = ElementTree.fromstring(message["image/svg+xml"])
    shown = "".join(root.itertext())
    assert where == "run" or "see" in shown
    assert ("out of memory" in shown) == ("memory" in text)
    assert not set(message["text/plain"]) & {"\x00", "\x08", "\x1b", "\ud800", "\ufffe"}
    assert root.find(".//b") is None
