"""The timeline: spans where somebody records, nothing elsewhere, what they sum to, and the picture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.errors import OffloadError
from surokit.offload import timeline as module
from surokit.offload.link import ThrottledLink
from surokit.offload.timeline import WAIT, WORK, Span, Timeline, plot, recorded, span
from surokit.offload.workers import Worker
from tests.clocks import Clock, until
from tests.offload.runs import waits
from tests.refusals import refused


def trained(**options: Any) -> Timeline:
    """Four steps of ZenFlow over a link that takes 4 ms for the gradients of one."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100, 100))
    link = ThrottledLink(0.01)
    optimizer = sk.ZenFlow([weight], lr=1e-3, topk_ratio=0.1, update_interval=2, link=link, **options)
    with recorded() as timeline:
        for _ in range(4):
            weight.grad = torch.randn(100, 100)
            with span("update"):
                optimizer.step()
        optimizer.drain()
    link.close()
    return timeline


def test_every_thread_has_its_lane() -> None:
    timeline = trained()
    lanes = {each.lane for each in timeline.spans}
    assert {"MainThread", "link down", "link up", "accumulator", "adam"} <= lanes
    assert timeline.table().columns.tolist() == ["lane", "what", "start_s", "stop_s"]
    assert len(timeline.table()) == len(timeline.spans)
    waits = {each.what for each in timeline.spans if each.lane == "MainThread"}
    assert f"{WAIT} landing" in waits


def test_a_span_is_as_long_as_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, main = Clock(), threading.get_ident()
    monkeypatch.setattr(module, "time", clock)
    worker = Worker("one")

    def work() -> None:
        until(lambda: waits(main))
        clock.sleep(0.02)

    with recorded() as timeline:
        worker.submit(work).wait()
    worker.close()
    spans = {(each.lane, each.what): each for each in timeline.spans}
    assert spans.keys() == {("one", WORK), ("MainThread", WAIT)}
    assert spans["one", WORK].seconds == pytest.approx(0.02)
    assert spans["MainThread", WAIT].seconds == pytest.approx(0.02)


def test_outside_nothing_is_recorded() -> None:
    timeline = trained()
    before = len(timeline.spans)
    worker = Worker("later")
    with span("compute"):
        worker.submit(lambda: None).wait()
    worker.close()
    assert len(timeline.spans) == before


def test_an_error_ends_the_recording_and_its_span() -> None:
    worker = Worker("failing")
    with pytest.raises(OffloadError, match="ZeroDivisionError"), recorded() as timeline:
        worker.submit(lambda: 1 / 0).wait()
    worker.close()
    assert (("failing", WORK)) in {(each.lane, each.what) for each in timeline.spans}
    with recorded(), refused(RuntimeError), recorded():
        pass
    with recorded():  # the one that was refused changed nothing
        pass


def test_what_a_lane_does_is_its_work_less_its_waits() -> None:
    timeline = Timeline()
    timeline.spans = [
        Span("adam", f"{WAIT} slot", 1.0, 3.0),
        Span("adam", WAIT, 1.5, 2.5),  # a part of the wait above
        Span("main", WAIT, 4.0, 5.0),
        Span("adam", WORK, 0.0, 10.0),
        Span("adam", WAIT, 11.0, 12.0),  # outside of its work
    ]
    assert timeline.busy_s("adam") == pytest.approx(8.0)
    assert timeline.busy_s("main") == 0
    assert repr(timeline) == "<Timeline of 5 spans on 2 threads, 12000 ms>"
    assert repr(Timeline()) == "<Timeline of 0 spans on 0 threads, 0 ms>"


def test_the_picture_has_a_row_for_every_thread() -> None:
    timelines = {"one": trained(), "other": trained(overlap_step=False)}
    figure = plot(timelines)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["one", "other"]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["training thread", "link, down", "accumulator", "Adam", "link, up"]
    drawn = sum(len(each.get_paths()) for each in figure.axes[0].collections)
    assert drawn == sum(each.lane != "link small" for each in timelines["one"].spans)
    last = max(each.stop_s for timeline in timelines.values() for each in timeline.spans)
    assert figure.axes[0].get_xlim() == pytest.approx((0, 1e3 * last))
    with refused(ValueError):
        Timeline().plot()
