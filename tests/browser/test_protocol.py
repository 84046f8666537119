"""The page's own script asks the panel's own Python, without a notebook between them: what is asked, answered, and not answered.

The script runs in a blank page of a real Chromium, whose clock the tests move. Its model hands each question to a `WidgetView` and,
where the test lets it, the answer back.
"""

from __future__ import annotations

from typing import Any

import pytest

from surokit.runs.status import RunInfo
from surokit.widgets import protocol
from surokit.widgets.front import OVER, TAKEN_OVER, WidgetView
from surokit.widgets.panel import Panel
from surokit.widgets.state import PanelState
from tests.browser.lab import browser, chromium, wait_for

pytest.importorskip("playwright")
pytest.importorskip("anywidget")
pytestmark = pytest.mark.skipif(chromium() is None, reason="needs chromium (Debian: apt-get install chromium)")

MODEL = """
async source => {
    const told = {}, heard = {};
    window.model = {
        get: name => told[name] ?? "",
        send: async content => { for (const answer of await window.ask(content)) heard["msg:custom"]?.(answer); },
        on: (name, call) => { heard[name] = call; },
        off: name => { delete heard[name]; },
        take: texts => { Object.assign(told, texts); heard["change:head"]?.(); },
        answer: answer => heard["msg:custom"]?.(answer),
    };
    const script = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const el = document.createElement("div");
    document.body.append(el);
    window.leave = script.default.render({ model: window.model, el });
}
"""


class Control:
    """Stands for a run's control: takes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *why: self.asked.append(name)


class Output:
    """Stands for the notebook's output."""

    def __call__(self, content: Any, raw: bool, display_id: bool) -> Output:
        return self

    def update(self, content: Any, raw: bool) -> None:
        pass


class Side:
    """A page with a panel, and the Python that it asks. deaf: questions are kept until `hear`."""

    def __init__(self, page: Any, deaf: bool = False) -> None:
        self.page, self.control, self.deaf = page, Control(), deaf
        self.kept: list[Any] = []
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.view = WidgetView(self.control, display=Output())
        self.panel = Panel(PanelState("fp8", total=1000, resumes=True), view=self.view)
        self.panel.on_info(RunInfo(title="fp8", total=1000, run_dir="runs/a"))
        self.panel.open().on_start(1000)
        self.widget = self.view.widget
        self.answers: list[Any] = []
        self.widget.send = self.answers.append
        page.goto("about:blank")
        page.clock.install()
        if deaf:
            page.clock.pause_at(page.evaluate("Date.now()") + 60_000)
        page.expose_function("ask", self._asked)
        self.step(1)
        page.evaluate(MODEL, self.widget._esm)
        self.tell()

    def step(self, step: int, **more: Any) -> None:
        self.panel.on_step({"step": step, "loss": 3.0, "tokens": 100, "wall_ms": 50.0, "idle_frac": 0.1, **more})
        self.panel.refresh()

    def tell(self) -> None:
        """What Python has told so far."""
        names = [
            name
            for name in self.widget.trait_names()
            if name in ("head", "delta", "control", "token") or "key_" in name
        ]
        self.page.evaluate("texts => model.take(texts)", {name: getattr(self.widget, name) for name in names})

    def hear(self) -> None:
        """Answers what was kept."""
        self.deaf = False
        kept, self.kept = self.kept, []
        for answer in [answer for content in kept for answer in self._asked(content)]:
            self.page.evaluate("answer => model.answer(answer)", answer)

    def later(self, seconds: float) -> None:
        self.page.clock.fast_forward(round(1e3 * seconds))

    def settled(self) -> None:
        """Until nothing that the page asked waits for an answer."""
        self.page.locator(".sk-buttons[aria-busy=false]").wait_for(state="attached")

    def button(self, word: str) -> Any:
        return self.page.locator(f".sk-{word}")

    @property
    def message(self) -> str:
        return str(self.page.locator(".sk-message").inner_text())

    def _asked(self, content: Any) -> list[Any]:
        if self.deaf:
            self.kept.append(content)
            return []
        before = len(self.answers)
        self.view.on_message(self.widget, content)
        return self.answers[before:]


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as context:
        yield context


@pytest.fixture
def page(chrome):
    page = chrome.new_page()
    yield page
    page.clock.resume()  # it is the same for all pages
    page.close()


@pytest.fixture
def side(page):
    side = Side(page)
    side.settled()
    yield side
    assert side.errors == []


def test_the_page_offers_a_button_for_each_word_that_python_takes(side):
    offered = side.page.locator(".sk-buttons button").evaluate_all("all => all.map(b => b.className.slice(3))")
    assert tuple(offered) == protocol.ASKS
    assert all(hasattr(side.control, word) for word in protocol.ASKS)


@pytest.mark.parametrize("word", ["stop", "pause", "save"])
def test_a_button_is_heard_however_late_it_is_clicked(side, word):
    for _ in range(5):
        side.later(3600)
        side.settled()
        assert side.button(word).is_visible()
        assert side.button(word).is_enabled()
    side.button(word).click()
    side.settled()
    assert side.control.asked == [word]
    side.later(protocol.ANSWER_S + 1)  # the answer came, so nothing is unheard
    assert side.button("stop").is_visible()
    assert side.button("stop").is_enabled()
    assert not side.page.locator(".sk-message").is_visible()


def test_a_paused_run_keeps_its_buttons(side):
    side.button("pause").click()
    side.panel.on_pause(True)
    side.tell()
    side.button("resume").wait_for()
    for _ in range(5):
        side.settled()
        side.later(600)
        for word in ("stop", "resume", "save"):
            assert side.button(word).is_visible()
    side.settled()
    side.button("resume").click()
    side.settled()
    assert side.control.asked == ["pause", "resume"]


def test_a_question_waits_as_long_as_both_sides_say_then_the_buttons_give_way_to_words(side):
    side.page.clock.pause_at(side.page.evaluate("Date.now()") + 60_000)
    side.settled()
    side.deaf = True
    side.tell()
    side.button("pause").click()
    side.page.clock.run_for(100)  # drawn
    assert side.button("pause").is_disabled()
    side.page.clock.run_for(round(1e3 * protocol.ANSWER_S) - 200)
    assert side.button("stop").is_visible()
    side.page.clock.run_for(200)
    assert not side.button("stop").is_visible()
    assert "To stop: interrupt the kernel" in side.message
    side.hear()  # late, and heard all the same
    side.page.clock.run_for(100)
    assert side.control.asked == ["pause"]
    assert side.button("stop").is_visible()
    assert side.button("pause").is_enabled()


def test_where_nobody_hears_the_page_asks_again_as_often_as_is_said_and_says_how_to_stop(page):
    side = Side(page, deaf=True)
    every = [*protocol.HELLO_S, *(protocol.HELLO_S[-1] + k * protocol.LISTEN_S for k in (1, 2, 3))]
    for number, (at, before) in enumerate(zip(every, [0, *every]), 1):
        side.page.clock.run_for(round(1e3 * (at - before)) + (50 if number == 1 else -50))
        wait_for(lambda number=number: len(side.kept) == number, f"hello at {at} s")
        side.tell()  # without news the words are others
        side.page.clock.run_for(50 * (number > 1))
        assert not side.button("stop").is_visible()
        told = "To stop: interrupt the kernel" in side.message
        assert told == (number > protocol.TELL_HELLO)
    assert [content["ask"] for content in side.kept] == [protocol.HELLO] * len(every)
    side.hear()
    side.page.clock.run_for(100)
    assert side.button("stop").is_visible()
    assert not side.page.locator(".sk-message").is_visible()
    assert side.errors == []


@pytest.mark.parametrize(("end", "words"), [("done", OVER), ("replaced", TAKEN_OVER)])
def test_what_cannot_be_done_is_said(side, end, words):
    side.control.save = lambda: (_ for _ in ()).throw(RuntimeError("There is no folder."))
    side.button("save").click()
    wait_for(lambda: side.message == "There is no folder.", "the words")
    side.deaf = True
    side.button("stop").click()
    side.panel.on_end(end) if end == "done" else side.panel.close()
    side.hear()  # before the page was told of the end
    wait_for(lambda: side.message == words, "the words")
    assert side.control.asked == []


DRAW_PICTURE = """
token => {
    document.querySelector("#output")?.remove();
    const output = Object.assign(document.createElement("div"), { id: "output" });
    output.innerHTML = `<div><svg data-panel="${token}"></svg></div>`;
    document.body.append(output);
}
"""


def drop(side: Side) -> None:
    """The page drops the widget's output."""
    side.page.evaluate(
        "() => { const el = document.querySelector('.surokit-panel').parentElement; leave(); el.remove(); }"
    )


def test_the_panel_takes_the_pictures_place_also_where_the_last_news_come_late(page):
    side = Side(page)
    page.evaluate(DRAW_PICTURE, side.widget.token)
    drop(side)
    side.later(1)  # whatever waited for a frame
    assert page.locator("#output svg[data-panel]").is_visible()
    assert page.locator(".surokit-panel").count() == 0
    side.panel.on_end("done")
    side.tell()
    page.locator("#output .surokit-panel").wait_for()
    assert "Done" in page.locator(".sk-voice").inner_text()
    assert not page.locator("#output svg[data-panel]").is_visible()


def test_a_picture_that_is_drawn_again_does_not_take_the_panel_away(page):
    side = Side(page)
    page.evaluate(DRAW_PICTURE, side.widget.token)
    side.panel.on_end("done")
    side.tell()
    drop(side)
    page.locator("#output .surokit-panel").wait_for()
    page.evaluate(DRAW_PICTURE, side.widget.token)
    page.locator("#output .surokit-panel").wait_for()
    assert page.locator(".surokit-panel").count() == 1
