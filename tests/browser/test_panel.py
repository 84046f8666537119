"""The live panel in a real JupyterLab and a real Chromium: what is drawn, what the buttons reach, and what is left.

One server and one browser for all tests of this file, and for most one tab and one kernel, where each test runs cells of its own at
the end of the notebook.
Screenshots go to runs/browser, which git ignores: look at them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser.lab import Lab, Tab, browser, chromium, wait_for

pytest.importorskip("playwright")
pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
pytestmark = pytest.mark.skipif(chromium() is None, reason="needs chromium (Debian: apt-get install chromium)")

SHOTS = Path(__file__).parents[2] / "runs" / "browser"
PANEL = ".surokit-panel"
MESSAGE_BYTES = 20_000

# A run without training: what a session tells its subscribers, at a pace of our choosing. `steps` is the loop; `plain` and
# `awaiting` wait between them. Where there is a file `hold`, half of the way is the end until it goes.
SETUP = """
import asyncio, json, math, threading, time
from pathlib import Path
from surokit.train.status import RunInfo
from surokit.widgets import Panel, PanelState
class Buttons:
    def __init__(self):
        self.asked, self.stopped, self.paused = [], False, False
    def stop(self, reason):
        self.asked.append("stop"); self.stopped = True
    def pause(self):
        self.asked.append("pause"); self.paused = True
    def resume(self):
        self.asked.append("resume"); self.paused = False
    def save(self):
        self.asked.append("save")
def row(step):
    loss = 1.8 + 6 / step ** 0.45 + 0.1 * math.sin(7 * step)
    return {"step": step, "loss": loss, "tokens": 16384, "wall_ms": 190 + 10 * math.sin(step), "idle_frac": 0.03, "lr": 1e-3,
            "grad_norm": 1.0, "peak_gib": 11.5, **({"eval_loss": 1.83 + 6 / step ** 0.45} if step % 50 == 0 else {})}
def new(steps, **options):
    buttons = Buttons()
    state = PanelState("smollm", recipe="fp8 y = Q(x)Q(w)', native", total=steps, resumes=True)
    panel = Panel(state, control=buttons, **options)
    panel.on_info(RunInfo(title="smollm", total=steps, gpus=1, usd_per_gpu_hour=2.0, run_dir="runs/a"))
    panel.open().on_start(steps)
    return panel, buttons
def steps(panel, buttons, count):
    told = False
    for step in range(1, count + 1):
        panel.on_step(row(step))
        Path("step.new").write_text(str(step))
        Path("step.new").replace("step")
        while True:
            yield
            if buttons.paused != told:
                told = buttons.paused
                panel.on_pause(told)
            if (not told or buttons.stopped) and not (step == count // 2 and Path("hold").exists()):
                break
        if buttons.stopped:
            panel.on_end("interrupted")
            return
    panel.on_end("done")
def plain(panel, buttons, count, wait_s):
    for _ in steps(panel, buttons, count):
        time.sleep(wait_s)
async def awaiting(panel, buttons, count, wait_s):
    for _ in steps(panel, buttons, count):
        await asyncio.sleep(wait_s)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with Lab(folder) as lab:
        yield lab


@pytest.fixture(scope="module")
def context(lab):
    with browser(lab.folder) as context:
        yield context


@pytest.fixture(scope="module")
def tab(lab, context):
    lab.notebook("run", [SETUP])
    tab = Tab(context, lab, "run")
    tab.run(0)
    tab.idle()
    return tab


@pytest.fixture(autouse=True)
def _quiet(tab):
    """After each test: no script failed, and nothing was asked of another machine."""
    yield
    errors, tab.errors = tab.errors, []
    assert errors == []
    assert tab.outside() == []


def shot(tab, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    tab.page.locator(PANEL).last.screenshot(path=str(SHOTS / f"{name}.png"))


def shown_step(tab, cell):
    found = re.match(r"step ([\d,]+)", tab.cell(cell).locator(".sk-now").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def as_bytes(message):
    return message.encode() if isinstance(message, str) else message


def last_step(lab):
    return int((lab.folder / "step").read_text())


def test_it_draws_and_moves_while_a_plain_cell_runs_and_the_last_state_stays(tab, lab):
    cell = tab.add("panel, buttons = new(400); plain(panel, buttons, 400, 0.02)")
    seen, began = len(tab.received), time.monotonic()
    hold = lab.folder / "hold"
    hold.touch()
    tab.run(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    first = shown_step(tab, cell)
    assert tab.running(cell)
    hold.unlink()
    assert 0 < first <= 200
    wait_for(lambda: shown_step(tab, cell) > first, "a further picture")
    tab.idle()
    wait_for(lambda: "Done at step 400." in tab.output(cell), "the end")
    messages = [m for m in map(as_bytes, tab.received[seen:]) if b'"comm_msg"' in m[:4096]]
    assert max(map(len, messages)) <= MESSAGE_BYTES
    assert len(messages) <= 4 * (time.monotonic() - began) + 32  # at the end a keyframe for each curve
    # the tab keeps the panel, with its picture hidden behind it; the file has the picture alone
    panel = tab.cell(cell).locator(PANEL)
    tab.cell(cell).locator("img").wait_for(state="attached")
    wait_for(panel.is_visible, "the panel in the picture's place")
    assert not tab.cell(cell).locator("img").is_visible()
    (output,) = tab.save().cells[cell].outputs
    assert set(output.data) == {"text/plain", "image/svg+xml"}
    assert "Done at step 400." in output.data["text/plain"]


def test_the_kept_panel_answers_the_pointer_and_its_tools(tab):
    panel = tab.page.locator(PANEL).last
    chart = panel.locator("figure svg").first
    line = chart.locator("path.sk-line").first
    before = line.get_attribute("d")
    chart.hover()
    tip = panel.locator(".sk-tip")
    step = int(tip.locator("b").inner_text().removeprefix("step ").replace(",", ""))
    rows = dict(tip.locator("tr").evaluate_all("rows => rows.map(r => [r.cells[1].innerText, r.cells[2].innerText])"))
    expected = 1.8 + 6 / step**0.45
    assert float(rows["smoothed"]) == pytest.approx(expected, abs=0.35)
    assert float(rows["each step"]) == pytest.approx(expected, abs=0.2)
    panel.locator(".sk-log").click()
    assert line.get_attribute("d") != before
    panel.locator(".sk-log").click()
    panel.get_by_role("button", name="smoothed").click()
    assert chart.locator("path.sk-line").count() == 0
    panel.get_by_role("button", name="smoothed").click()
    assert line.get_attribute("d") == before
    panel.locator("input[type=range]").evaluate("e => { e.value = 10; e.oninput(); }")
    assert line.get_attribute("d") != before
    panel.locator("input[type=range]").evaluate("e => { e.value = 0; e.oninput(); }")
    panel.locator("select").select_option("last half")
    assert "200" in chart.text_content()
    panel.locator("select").select_option("all")
    assert line.get_attribute("d") == before
    for axis, label in (("Tokens", "M"), ("Time", "0:"), ("Steps", "200")):
        panel.get_by_role("button", name=axis, exact=True).click()
        assert label in chart.text_content()
    chart.focus()
    tab.page.keyboard.press("ArrowLeft")
    assert "step 39" in tip.inner_text()
    tab.page.keyboard.press("Escape")
    assert not tip.is_visible()
    box = chart.bounding_box()
    tab.page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 50)
    tab.page.mouse.up()
    assert line.get_attribute("d") != before
    panel.get_by_role("button", name="whole run").click()
    assert line.get_attribute("d") == before


@pytest.mark.parametrize(
    "source",
    [
        "plain(panel, buttons, 6000, 0.02)",
        "await awaiting(panel, buttons, 6000, 0.02)",
        "run = threading.Thread(target=plain, args=(panel, buttons, 6000, 0.02)); run.start()",
    ],
    ids=["plain", "await", "thread"],
)
def test_pause_resume_save_and_stop(tab, lab, source):
    cell = tab.add(f"panel, buttons = new(6000); {source}")
    tab.run(cell)
    buttons = tab.cell(cell).locator(".sk-buttons")
    buttons.locator(".sk-pause").click()
    buttons.locator(".sk-resume").wait_for()
    paused = last_step(lab)
    assert "paused" in tab.cell(cell).locator(".sk-state").inner_text()
    tab.page.wait_for_timeout(300)
    assert last_step(lab) == paused
    buttons.locator(".sk-resume").click()
    wait_for(lambda: last_step(lab) > paused, "the run to go on")
    buttons.locator(".sk-save").click()
    buttons.locator(".sk-stop").click()
    wait_for(lambda: "Interrupted after step" in tab.output(cell), "the run to stop")
    assert last_step(lab) < 6000
    assert not buttons.locator("button:visible").count()
    tab.idle()
    check = tab.add("print(buttons.asked)")
    tab.run(check)
    wait_for(lambda: "stop" in tab.output(check), "the list")
    assert tab.output(check).strip() == "['pause', 'resume', 'save', 'stop']"


SESSION = """
import torch
import surokit as sk
torch.manual_seed(0)
ids = torch.randint(64, (1, 4, 32))
model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=64), dtype=torch.bfloat16)
session = sk.Session(model, [{"input_ids": i, "labels": i} for i in ids], schedule=None, run_dir="run")
"""


def test_a_session_is_stopped_by_its_panel(tab, lab):
    """The real thing: a plain cell, then a thread that the cell awaits; by the button and by an interrupt of the kernel."""
    first = tab.add(f"{SESSION}session.live()\nsession.run(100_000)")
    second = tab.add("session.live(thread=True)\nawait session.run(100_000)")
    for cell in (first, second):
        tab.run(cell)
        buttons = tab.cell(cell).locator(".sk-buttons")
        buttons.locator(".sk-save").last.click()
        wait_for(lambda: any((lab.folder / "run" / "checkpoints").glob("step-*")), "a checkpoint")
        buttons.locator(".sk-stop").last.click()
        wait_for(lambda cell=cell: "by the panel's button" in tab.output(cell), "the run to stop")
        tab.idle()
    for source in ("session.run(100_000, thread=False)", "await session.run(100_000)"):
        cell = tab.add(source)
        tab.run(cell)
        tab.cell(cell).locator("path.sk-line").first.wait_for()
        tab.interrupt()
        wait_for(lambda cell=cell: "Interrupted after step" in tab.output(cell), "the interrupted run to stop")
        tab.idle()
    check = tab.add("print(0 < session.steps < 400_000, session.control.state)")
    tab.run(check)
    wait_for(lambda: "idle" in tab.output(check), "the answer")
    assert tab.output(check).strip() == "True idle"


def test_a_newer_panel_takes_over(tab):
    made = SESSION.replace('"run"', '"run-replaced"')
    first = tab.add(f"{made}session.live()\nrunning = session.run(1_000_000, thread=True)")
    tab.run(first)
    tab.cell(first).locator(".sk-stop").wait_for()
    second = tab.add("session.live()")
    tab.run(second)
    wait_for(lambda: "A newer panel has taken over at step" in tab.output(first), "the words")
    assert not tab.cell(first).locator(".sk-buttons button:visible").count()
    tab.cell(second).locator(".sk-stop").click()
    wait_for(lambda: "by the panel's button" in tab.output(second), "the run to stop")


def test_where_no_click_is_heard_the_panel_says_how_to_stop(tab):
    # as in a front end without subshells: messages go to the loop that is busy
    cell = tab.add(
        "panel, buttons = new(4000); del panel._view._widget.comm._reply_subshell_for\nplain(panel, buttons, 4000, 0.02)"
    )
    tab.run(cell)
    message = tab.cell(cell).locator(".sk-message")
    wait_for(lambda: "interrupt the kernel" in message.inner_text(), "the words")
    assert not tab.cell(cell).locator(".sk-stop").is_visible()
    tab.interrupt()
    tab.idle()


def test_a_reloaded_page_recovers(tab, lab):
    cell = tab.add(
        "panel, buttons = new(2000)\nrun = threading.Thread(target=plain, args=(panel, buttons, 2000, 0.02)); run.start()"
    )
    tab.run(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    tab.save()
    tab.open()
    tab.see(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    first = shown_step(tab, cell)
    wait_for(lambda: shown_step(tab, cell) > first, "a further picture")
    tab.cell(cell).locator(".sk-stop").click()
    wait_for(lambda: "Interrupted after step" in tab.output(cell), "the run to stop")


def test_a_page_reloaded_while_a_plain_cell_runs_recovers_when_it_ends(tab, lab):
    cell = tab.add("panel, buttons = new(150); plain(panel, buttons, 150, 0.05)")
    tab.run(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    tab.save()
    tab.open()
    tab.see(cell)
    wait_for(lambda: "Done at step 150." in tab.output(cell), "the end")
    assert shown_step(tab, cell) == 150


def test_a_closed_tab_neither_slows_nor_stops_a_run(tab, lab, context):
    lab.notebook(
        "closed",
        [SETUP, "panel, buttons = new(150); plain(panel, buttons, 150, 0.02); Path('ended').write_text('yes')"],
    )
    other = Tab(context, lab, "closed")
    other.run(0)
    other.idle()
    other.run(1)
    other.cell(1).locator("path.sk-line").first.wait_for()
    other.page.close()
    wait_for((lab.folder / "ended").exists, "the run without a tab", 30)


def test_light_dark_and_narrow(tab, lab):
    cell = tab.add("panel, buttons = new(300); plain(panel, buttons, 300, 0.01)")
    tab.run(cell)
    tab.idle()
    wait_for(lambda: "Done at step 300." in tab.output(cell), "the end")
    papers = []
    panel = tab.cell(cell).locator(PANEL)
    for name in ("Light", "Dark"):
        tab.theme(f"JupyterLab {name}")
        tab.page.wait_for_timeout(500)
        papers.append(panel.evaluate("e => getComputedStyle(e).backgroundColor"))
        panel.scroll_into_view_if_needed()
        shot(tab, name.lower())
    tab.theme("JupyterLab Light")
    light, dark = (sum(map(int, re.findall(r"\d+", paper)[:3])) for paper in papers)
    assert light > 700
    assert dark < 100
    panel.evaluate("e => { e.style.width = '480px'; }")
    tab.page.wait_for_timeout(300)
    assert panel.evaluate("e => e.scrollWidth <= e.clientWidth")
    overlaps = panel.locator("figure svg").first.evaluate(
        "svg => { const b = [...svg.querySelectorAll('text[text-anchor=middle]')].map(t => t.getBoundingClientRect());"
        " return b.some((x, i) => i && x.left < b[i - 1].right); }"
    )
    assert not overlaps
    shot(tab, "narrow")


def test_screen_readers_are_told(tab):
    cell = tab.add("panel, buttons = new(30); plain(panel, buttons, 30, 0.01)")
    tab.run(cell)
    tab.idle()
    wait_for(lambda: "Done at step 30." in tab.output(cell), "the end")
    voice = tab.cell(cell).locator(".sk-voice")
    assert voice.get_attribute("aria-live") == "polite"
    assert "Done at step 30." in voice.inner_text()
    names = (
        tab.cell(cell)
        .locator(f"{PANEL} figure svg")
        .evaluate_all("all => all.map(svg => svg.getAttribute('aria-label'))")
    )
    assert names
    assert all(names)


EVIL = "<img src=x onerror='window.run_here=1'><script>window.run_here=1</script>"
SPOILED = f"""
evil = {EVIL!r}
state = PanelState(evil, recipe=evil, total=60)
panel = Panel({{evil: state}})
run = panel.run(evil)
panel.open()
run.on_start(60)
odd = {{20: {{"loss": float("nan")}}, 22: {{"loss": 1e300}}, 24: {{"loss": float("inf")}},
       30: {{"grad_norm": -1e300, "lr": float("-inf")}}}}
for step in range(1, 61):
    run.on_step({{**row(step), **odd.get(step, {{}})}})
run.on_note(40, evil)
run.on_end("failed: " + chr(27) + "[31m" + evil + chr(0))
"""


def test_words_of_a_run_are_shown_and_never_executed(tab):
    """HTML as title, recipe, note and error, values out of all bounds, colour codes: a panel and a picture all the same."""
    cell = tab.add(SPOILED)
    tab.run(cell)
    tab.idle()
    wait_for(lambda: "Failed after step 60" in tab.output(cell), "the end")
    assert EVIL in tab.cell(cell).locator(".sk-ending").inner_text()
    assert tab.page.evaluate("() => window.run_here") is None
    assert tab.cell(cell).locator(".surokit-panel img, .surokit-panel script").count() == 0
    drawn = (
        tab.cell(cell)
        .locator("figure svg *")
        .evaluate_all("all => all.map(e => [e.getAttribute('d'), e.getAttribute('cy')].join())")
    )
    assert any(path.startswith("M") for path in drawn)
    assert not any("NaN" in path or "Infinity" in path for path in drawn)
    picture = tab.cell(cell).locator("img")
    picture.wait_for(state="attached")
    wait_for(lambda: picture.evaluate("e => e.complete && e.naturalWidth > 300"), "the picture behind the panel")


LOOP = """
import time
from surokit.live import Live
with Live("elsewhere", total=5000, run_dir="runs/a") as live:
    for step in range(1, 5001):
        live.log(loss=5 / step ** 0.5, tokens=1024)
        time.sleep(0.02)
        live.wait_while_paused()
        if live.stop_asked:
            break
"""


def test_a_run_of_another_process_is_followed_paused_and_stopped(lab, context):
    """`sk.watch`: another process trains, the panel follows it through its folder, and its buttons reach it."""
    lab.notebook("watch", ["import surokit as sk\nsk.watch('runs/a')", "print('usable', 6 * 7)"])
    trainer = subprocess.Popen([sys.executable, "-c", LOOP], cwd=lab.folder)
    try:
        wait_for((lab.folder / "runs" / "a" / "records.jsonl").exists, "the run to begin")
        tab = Tab(context, lab, "watch")
        tab.run(0)
        tab.idle()
        head = tab.cell(0).locator(".sk-now")
        head.wait_for()
        before = head.inner_text()
        wait_for(lambda: head.inner_text() != before, "the panel to follow")
        assert tab.cell(0).locator(".surokit-panel").count() == 1
        tab.run(1)
        wait_for(lambda: "usable 42" in tab.output(1), "another cell")
        tab.cell(0).get_by_role("button", name="Pause").click()
        wait_for(lambda: tab.cell(0).get_by_role("button", name="Resume").count() == 1, "the pause")
        paused = (lab.folder / "runs" / "a" / "run.json").read_text()
        assert '"state": "paused"' in paused
        tab.cell(0).get_by_role("button", name="Resume").click()
        wait_for(lambda: not (lab.folder / "runs" / "a" / "pause").exists(), "the run to go on")
        tab.cell(0).get_by_role("button", name="Stop").click()
        assert trainer.wait(30) == 0
        wait_for(lambda: "by the panel's button" in tab.output(0), "the end")
        outputs = tab.save().cells[0].outputs
        assert [sorted(output.data) for output in outputs] == [["image/svg+xml", "text/plain"]]
        assert tab.errors == []
        assert tab.outside() == []
        tab.page.close()
    finally:
        trainer.kill()
        trainer.wait()


def test_reopened_without_a_kernel_and_exported_the_picture_is_seen(tab, lab):
    from nbconvert import HTMLExporter

    cell = tab.add("panel, buttons = new(60); plain(panel, buttons, 60, 0.01)")
    tab.run(cell)
    tab.idle()
    wait_for(lambda: "Done at step 60." in tab.output(cell), "the end")
    book = tab.save()
    assert "widgets" not in book.metadata
    book.cells = [book.cells[cell]]
    page, _ = HTMLExporter(template_name="lab").from_notebook_node(book)
    assert len(re.findall(r'<img[^>]+src="data:image/svg\+xml;base64', page)) == 1
    tab.shutdown()
    tab.open(kernel=False)
    tab.see(cell)
    picture = tab.cell(cell).locator("img")
    picture.wait_for()
    assert picture.evaluate("e => e.naturalWidth") > 300
    assert json.dumps(book.cells[0].outputs[0].data["text/plain"])
