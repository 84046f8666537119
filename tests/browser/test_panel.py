"""The live panel in a real JupyterLab and a real Chromium: what is drawn, what the buttons reach, and what is left.

One server and one browser for all tests of this file, and for most one tab and one kernel, where each test runs cells of its own at
the end of the notebook.
Screenshots go to runs/browser, which git ignores: look at them.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.lab import WAIT_S, Lab, Tab, browser, chromium, paper, wait_for

pytest.importorskip("playwright")
pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
pytestmark = pytest.mark.skipif(chromium() is None, reason="needs chromium (Debian: apt-get install chromium)")

SHOTS = Path(__file__).parents[2] / "runs" / "browser"
PANEL = ".surokit-panel"
MESSAGE_BYTES = 20_000
GIVEN_UP = "Error displaying widget: model not found"

# A run without training: what a session tells its subscribers. `steps` is the loop; `plain` and `awaiting` wait between steps for
# a click, in a pause as long as it takes, else for a moment. Where there is a pipe `gate`, half of the way is the end until its
# other side is opened.
FOREVER = 10**9
SETUP = """
import asyncio, json, math, threading
from collections import defaultdict
from pathlib import Path
from surokit.runs.status import RunInfo
from surokit.widgets import Panel, PanelState
from surokit.widgets.front import WidgetView
class Buttons:
    def __init__(self):
        self.asked, self.stopped, self.paused, self.news = [], False, False, threading.Event()
    def stop(self, reason):
        self.stopped = True; self.ask("stop")
    def pause(self):
        self.paused = True; self.ask("pause")
    def resume(self):
        self.paused = False; self.ask("resume")
    def save(self):
        self.ask("save")
    def ask(self, what):
        self.asked.append(what); self.news.set()
    def wait(self):
        self.news.wait(None if self.paused and not self.stopped else 0.02)
        self.news.clear()
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
    for step in range(1, count + 1):
        panel.on_step(row(step))
        if step == count // 2 and Path("gate").exists():
            panel.refresh()
            Path("gate").read_text()
        yield
        if buttons.paused:
            buttons.asked.append(f"waits at {step}")
            panel.on_pause(True)
            while buttons.paused and not buttons.stopped:
                yield
            buttons.asked.append(f"goes on at {step}")
            panel.on_pause(False)
        if buttons.stopped:
            panel.on_end("interrupted")
            return
    panel.on_end("done")
hello = defaultdict(threading.Event)  # of each widget: the page says it when it draws, maybe before anybody waits for it
answered = WidgetView.on_message
def asked(view, widget, content):
    answered(view, widget, content)
    hello[widget.model_id].set()
WidgetView.on_message = asked
def seen(panel):
    hello[panel._view.widget.model_id].wait()
def at_once(panel, buttons, count):
    seen(panel)
    for _ in steps(panel, buttons, count):
        pass
def plain(panel, buttons, count):
    for _ in steps(panel, buttons, count):
        buttons.wait()
async def awaiting(panel, buttons, count):
    for _ in steps(panel, buttons, count):
        await asyncio.to_thread(buttons.wait)
def thread(panel, buttons, count):
    threading.Thread(target=plain, args=(panel, buttons, count), daemon=True).start()
"""
ALL_WAYS = ["plain", "await awaiting", "thread"]
WAYS = pytest.mark.parametrize("way", ALL_WAYS)


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


@pytest.fixture
def gate(lab):
    """Half of the way is the end of a run until the gate is opened, once."""
    pipe = lab.folder / "gate"
    os.mkfifo(pipe)

    def opened():
        pipe.write_text("")  # waits for the run to be there

    yield opened
    pipe.unlink()


def hours_pass(tab, panel):
    """Every timeout of the page, three times over; whatever it asks of Python meanwhile is answered."""
    for _ in range(3):
        panel.locator(".sk-buttons[aria-busy=false]").wait_for(state="attached")
        tab.later(3600)
    panel.locator(".sk-buttons[aria-busy=false]").wait_for(state="attached")


def click(tab, panel, word):
    """After a long time the button is still there, and works."""
    button = panel.locator(f".sk-{word}")
    button.wait_for()
    hours_pass(tab, panel)
    assert button.is_visible()
    assert button.is_enabled()
    assert not panel.locator(".sk-message").is_visible()
    button.click()


def pictures(book, cell):
    """The static pictures among a saved cell's outputs, as text and as SVG; what else is there is empty."""
    outputs = [output.data for output in book.cells[cell].outputs]
    assert all("image/svg+xml" in data or not data["text/plain"] for data in outputs)
    return [(data["text/plain"], data["image/svg+xml"]) for data in outputs if "image/svg+xml" in data]


def exported(book, cell):
    """The cell alone as a page of nbconvert's."""
    from nbconvert import HTMLExporter

    alone = copy.deepcopy(book)
    alone.cells = [alone.cells[cell]]
    page, _ = HTMLExporter(template_name="lab").from_notebook_node(alone)
    return page


def test_it_draws_and_moves_while_a_plain_cell_runs_and_the_last_state_stays(tab, gate):
    cell = tab.add("panel, buttons = new(400); plain(panel, buttons, 400)")
    seen = len(tab.received)
    tab.run(cell)
    wait_for(lambda: shown_step(tab, cell) == 200, "half of the way")
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    assert tab.running(cell)
    gate()
    tab.idle()
    wait_for(lambda: "Done at step 400." in tab.output(cell), "the end")
    messages = [m for m in map(as_bytes, tab.received[seen:]) if b'"comm_msg"' in m[:4096]]
    assert max(map(len, messages)) <= MESSAGE_BYTES
    # the tab keeps the panel, with its picture hidden behind it; the file has the picture alone
    panel = tab.cell(cell).locator(PANEL)
    tab.cell(cell).locator("img").wait_for(state="attached")
    wait_for(panel.is_visible, "the panel in the picture's place")
    assert not tab.cell(cell).locator("img").is_visible()
    shot(tab, "ended")
    ((words, _),) = pictures(tab.save(), cell)
    assert "Done at step 400." in words


def test_a_notebook_saved_in_mid_run_has_a_picture_of_the_run(tab, lab, context, gate):
    cell = tab.add("panel, buttons = new(400); plain(panel, buttons, 400)")
    tab.run(cell)
    wait_for(lambda: shown_step(tab, cell) == 200, "half of the way")
    assert tab.cell(cell).locator(PANEL).is_visible()
    assert not tab.cell(cell).locator("img").is_visible()  # the panel is there
    tab.page.screenshot(path=str(SHOTS / "mid-run.png"))
    book = tab.save()
    ((words, drawn),) = pictures(book, cell)
    assert re.search(r"step \d+ / 400", words)  # one of the first, and then one every half a minute
    assert "waiting for the first step" not in words + drawn
    page = exported(book, cell)
    assert len(re.findall(r'<img[^>]+src="data:image/svg\+xml;base64', page)) == 1
    (lab.folder / "exported.html").write_text(page)
    other = context.new_page()
    other.goto(f"file://{lab.folder}/exported.html")
    other.locator("img").wait_for()
    other.screenshot(path=str(SHOTS / "mid-run-exported.png"))
    other.close()
    gate()
    tab.idle()
    wait_for(lambda: "Done at step 400." in tab.output(cell), "the end")


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
    assert float(rows["EMA"]) == pytest.approx(expected, abs=0.35)
    assert float(rows["each step"]) == pytest.approx(expected, abs=0.2)
    panel.locator(".sk-log").click()
    assert line.get_attribute("d") != before
    panel.locator(".sk-log").click()
    panel.get_by_role("button", name="EMA").click()
    assert chart.locator("path.sk-line").count() == 0
    panel.get_by_role("button", name="EMA").click()
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


@WAYS
def test_pause_resume_save_and_stop_however_long_it_takes(tab, way):
    cell = tab.add(f"panel, buttons = new({FOREVER}); {way}(panel, buttons, {FOREVER})")
    tab.run(cell)
    panel = tab.cell(cell)
    click(tab, panel, "pause")
    panel.locator(".sk-resume").wait_for()
    assert "paused" in panel.locator(".sk-state").inner_text()
    paused = shown_step(tab, cell)
    click(tab, panel, "resume")
    wait_for(lambda: shown_step(tab, cell) > paused, "the run to go on")
    click(tab, panel, "save")
    click(tab, panel, "stop")
    wait_for(lambda: "Interrupted after step" in tab.output(cell), "the run to stop")
    assert not panel.locator(".sk-buttons button:visible").count()
    tab.idle()
    check = tab.add("print(*buttons.asked, sep=', ')")
    tab.run(check)
    wait_for(lambda: "stop" in tab.output(check), "the list")
    told = tab.output(check).strip()
    assert told == f"pause, waits at {paused}, resume, goes on at {paused}, save, stop"


def test_the_buttons_in_notebook_7(context, tmp_path):
    """Where it is installed. (What its own scripts find wrong with that is not asked.)"""
    pytest.importorskip("notebook")
    with Lab(tmp_path, "notebook") as lab:
        lab.notebook(
            "run", [SETUP, *(f"panel, buttons = new({FOREVER}); {way}(panel, buttons, {FOREVER})" for way in ALL_WAYS)]
        )
        tab = Tab(context, lab, "run")
        tab.run(0)
        tab.idle()
        for cell in (1, 2, 3):
            tab.run(cell)
            panel = tab.cell(cell)
            click(tab, panel, "pause")
            click(tab, panel, "resume")
            click(tab, panel, "save")
            click(tab, panel, "stop")
            wait_for(lambda cell=cell: "Interrupted after step" in tab.output(cell), "the run to stop")
            tab.idle()
        assert tab.outside() == []
        tab.page.close()


SESSION = """
import torch
import surokit as sk
torch.manual_seed(0)
ids = torch.randint(64, (1, 4, 32))
model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=64), dtype=torch.bfloat16)
session = sk.Session(model, [{"input_ids": i, "labels": i} for i in ids], schedule=None, run_dir="run", compile=False)
"""


def test_a_session_is_stopped_by_its_panel(tab, lab):
    """The real thing: a plain cell, then a thread that the cell awaits; by the button and by an interrupt of the kernel."""
    first = tab.add(f"{SESSION}session.live()\nsession.run({FOREVER})")
    second = tab.add(f"session.live(thread=True)\nawait session.run({FOREVER})")
    checkpoints = lab.folder / "run" / "checkpoints"
    for cell in (first, second):
        tab.run(cell)
        panel = tab.cell(cell)
        before = set(checkpoints.glob("step-*"))
        click(tab, panel, "save")
        wait_for(lambda before=before: set(checkpoints.glob("step-*")) - before, "a checkpoint")
        click(tab, panel, "pause")
        click(tab, panel, "resume")
        click(tab, panel, "stop")
        wait_for(lambda cell=cell: "by the panel's button" in tab.output(cell), "the run to stop")
        tab.idle()
    for source in (f"session.run({FOREVER}, thread=False)", f"await session.run({FOREVER})"):
        cell = tab.add(source)
        tab.run(cell)
        tab.cell(cell).locator("path.sk-line").first.wait_for()
        tab.interrupt()
        wait_for(lambda cell=cell: "Interrupted after step" in tab.output(cell), "the interrupted run to stop")
        tab.idle()
    check = tab.add("print(session.steps > 0, session.control.state)")
    tab.run(check)
    wait_for(lambda: "idle" in tab.output(check), "the answer")
    assert tab.output(check).strip() == "True idle"


def test_a_newer_panel_takes_over(tab):
    made = SESSION.replace('"run"', '"run-replaced"')
    first = tab.add(f"{made}session.live()\nrunning = session.run({FOREVER}, thread=True)")
    tab.run(first)
    tab.cell(first).locator(".sk-stop").wait_for()
    second = tab.add("session.live()")
    tab.run(second)
    wait_for(lambda: "A newer panel has taken over at step" in tab.output(first), "the words")
    assert not tab.cell(first).locator(".sk-buttons button:visible").count()
    click(tab, tab.cell(second), "stop")
    wait_for(lambda: "by the panel's button" in tab.output(second), "the run to stop")


@WAYS
def test_without_subshells_clicks_are_heard_where_no_cell_blocks_else_the_panel_says_how_to_stop(tab, way):
    # as in a front end without subshells: messages go to the loop that is busy
    cell = tab.add(
        f"panel, buttons = new({FOREVER}); del panel._view.widget.comm._reply_subshell_for\n"
        f"{way}(panel, buttons, {FOREVER})"
    )
    tab.run(cell)
    panel = tab.cell(cell)
    if way == "plain":
        wait_for(lambda: "interrupt the kernel" in panel.locator(".sk-message").inner_text(), "the words")
        assert not panel.locator(".sk-stop").is_visible()
        tab.interrupt()
    else:
        for word in ("pause", "resume", "save", "stop"):
            click(tab, panel, word)
        wait_for(lambda: "Interrupted after step" in tab.output(cell), "the run to stop")
    tab.idle()


def test_a_reloaded_page_recovers(tab):
    cell = tab.add(f"panel, buttons = new({FOREVER}); thread(panel, buttons, {FOREVER})")
    tab.run(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    tab.save()
    tab.open()
    tab.see(cell)
    tab.cell(cell).locator("path.sk-line").first.wait_for()
    first = shown_step(tab, cell)
    wait_for(lambda: shown_step(tab, cell) > first, "a further picture")
    assert not tab.cell(cell).locator("img:visible").count()  # the one that was saved is behind the panel
    click(tab, tab.cell(cell), "stop")
    wait_for(lambda: "Interrupted after step" in tab.output(cell), "the run to stop")


def test_a_page_reloaded_while_a_plain_cell_runs_recovers_when_it_ends(lab, context, gate):
    lab.notebook("reloaded", [SETUP, "panel, buttons = new(150); plain(panel, buttons, 150)"])
    tab = Tab(context, lab, "reloaded")
    tab.run(0)
    tab.idle()
    tab.run(1)
    wait_for(lambda: shown_step(tab, 1) == 75, "half of the way")
    tab.save()
    assert tab.errors == []
    tab.open(kernel=False)  # a kernel that is ready would wait for the cell
    tab.connected()
    gate()
    tab.see(1)
    wait_for(lambda: any(said in tab.output(1) for said in ("Done at step 150.", GIVEN_UP)), "the end")
    if GIVEN_UP in tab.output(
        1
    ):  # at times JupyterLab has lost each widget of such a page, those of plain ipywidgets too
        assert tab.cell(1).locator("img:visible").count() == 1  # the picture is there instead
        tab.open()
        tab.see(1)
        wait_for(lambda: "Done at step 150." in tab.output(1), "the end, on the page loaded once more")
    assert shown_step(tab, 1) == 150
    # what JupyterLab says of a widget that it looked for too early, and nothing else
    assert [error for error in tab.errors if "widget model not found" not in error] == []
    assert tab.outside() == []
    tab.page.close()


def test_a_closed_tab_neither_slows_nor_stops_a_run(tab, lab, context, gate):
    lab.notebook(
        "closed",
        [SETUP, "panel, buttons = new(150); plain(panel, buttons, 150); Path('ended').write_text('yes')"],
    )
    other = Tab(context, lab, "closed")
    other.run(0)
    other.idle()
    other.run(1)
    wait_for(lambda: shown_step(other, 1) == 75, "half of the way")
    other.page.close()
    gate()
    wait_for((lab.folder / "ended").exists, "the run without a tab")


def test_light_dark_and_narrow(tab):
    cell = tab.add("panel, buttons = new(300); at_once(panel, buttons, 300)")
    tab.run(cell)
    wait_for(lambda: "Done at step 300." in tab.output(cell), "the end")
    panel = tab.cell(cell).locator(PANEL)
    for name, fits in (("Light", lambda light: light > 700), ("Dark", lambda light: light < 100)):
        tab.theme(f"JupyterLab {name}")
        wait_for(lambda fits=fits: fits(paper(panel)), f"the colours of {name}")
        panel.scroll_into_view_if_needed()
        shot(tab, name.lower())
    tab.theme("JupyterLab Light")
    panel.evaluate("e => { e.style.width = '480px'; }")
    tab.cell(cell).locator(f"{PANEL}.sk-narrow").wait_for()  # drawn anew
    assert panel.evaluate("e => e.scrollWidth <= e.clientWidth")
    overlaps = panel.locator("figure svg").first.evaluate(
        "svg => { const b = [...svg.querySelectorAll('text[text-anchor=middle]')].map(t => t.getBoundingClientRect());"
        " return b.some((x, i) => i && x.left < b[i - 1].right); }"
    )
    assert not overlaps
    shot(tab, "narrow")


def test_screen_readers_are_told(tab):
    cell = tab.add("panel, buttons = new(30); at_once(panel, buttons, 30)")
    tab.run(cell)
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
seen(panel)
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
import sys
from surokit.live import Live
with Live("elsewhere", total=5000, run_dir="runs/a") as live:
    for step, _ in enumerate(sys.stdin, 1):  # a step for each line
        live.log(loss=5 / step ** 0.5, tokens=1024)
        live.wait_while_paused()
        if live.stop_asked:
            break
"""


def test_a_run_of_another_process_is_followed_paused_and_stopped(lab, context):
    """`sk.watch`: another process trains, the panel follows it through its folder, and its buttons reach it."""
    lab.notebook("watch", ["import surokit as sk\nsk.watch('runs/a')", "print('usable', 6 * 7)"])
    folder = lab.folder / "runs" / "a"
    trainer = subprocess.Popen([sys.executable, "-c", LOOP], cwd=lab.folder, stdin=subprocess.PIPE, text=True)
    steps = trainer.stdin
    assert steps is not None

    def meanwhile(condition):
        """Asks, and lets the loop make a step before it asks again."""

        def asked():
            if condition():
                return True
            if trainer.poll() is None:
                steps.write("\n")
                steps.flush()
            return False

        return asked

    try:
        wait_for(meanwhile((folder / "records.jsonl").exists), "the run to begin")
        tab = Tab(context, lab, "watch")
        tab.run(0)
        tab.idle()
        panel = tab.cell(0)
        head = panel.locator(".sk-now")
        head.wait_for()
        before = head.inner_text()
        wait_for(meanwhile(lambda: head.inner_text() != before), "the panel to follow")
        assert panel.locator(".surokit-panel").count() == 1
        tab.run(1)
        wait_for(lambda: "usable 42" in tab.output(1), "another cell")
        click(tab, panel, "pause")
        wait_for(meanwhile(panel.locator(".sk-resume").is_visible), "the pause")
        assert '"state": "paused"' in (folder / "run.json").read_text()
        click(tab, panel, "resume")
        wait_for(lambda: not (folder / "pause").exists(), "the run to go on")
        click(tab, panel, "stop")
        wait_for(meanwhile(lambda: "by the panel's button" in tab.output(0)), "the end")
        assert trainer.wait(WAIT_S) == 0
        assert len(pictures(tab.save(), 0)) == 1
        assert tab.errors == []
        assert tab.outside() == []
        tab.page.close()
    finally:
        trainer.kill()
        trainer.wait()
        steps.close()


def test_reopened_without_a_kernel_and_exported_the_picture_is_seen(tab):
    cell = tab.add("panel, buttons = new(60); at_once(panel, buttons, 60)")
    tab.run(cell)
    wait_for(lambda: "Done at step 60." in tab.output(cell), "the end")
    book = tab.save()
    assert "widgets" not in book.metadata
    assert len(pictures(book, cell)) == 1
    assert len(re.findall(r'<img[^>]+src="data:image/svg\+xml;base64', exported(book, cell))) == 1
    tab.shutdown()
    tab.open(kernel=False)
    tab.see(cell)
    picture = tab.cell(cell).locator("img")
    picture.wait_for()
    assert picture.evaluate("e => e.naturalWidth") > 300
    tab.cell(cell).screenshot(path=str(SHOTS / "reopened.png"))
