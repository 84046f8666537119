"""A Profile as a value: files, pickles, comparison, text and pictures."""

import gzip
import json
import pickle
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from surokit.calibration import calibrate
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.capture import profile
from surokit.profiler.report.picture import profile_html
from surokit.profiler.report.profile import Profile
from surokit.units import three_digits
from tests.profiler.models import train
from tests.profiler.traces import cpu_step, events, gpu_recording
from tests.refusals import refused

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def profile_():
    return Profile(gpu_recording(), "hand made")


def same(a, b):
    assert a.summary == b.summary
    for table in ("lost", "syncs", "gaps", "modules", "kernels", "ops", "copies", "steps", "advice"):
        assert getattr(a, table).equals(getattr(b, table)), table
    assert a.timeline() == b.timeline()


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_saved_and_loaded(profile_, tmp_path, name):
    path = profile_.save(tmp_path / name)
    again = Profile.load(path)
    same(again, profile_)
    assert again.name == "hand made"
    assert repr(again) == repr(profile_)


def test_pickled(profile_):
    same(pickle.loads(pickle.dumps(profile_)), profile_)


def test_a_file_of_the_first_version_is_read(profile_):
    first = Profile.load(Path(__file__).with_name("profile_v1.json.gz"))
    assert (first.name, first.by) == ("hand made", "kernel")
    for name in ("wall_ms", "busy_ms", "idle_ms", "host_wait_ms", "launches_per_step", "tokens_per_s"):
        assert first.summary[name] == profile_.summary[name], name
    assert first.lost.ms_per_step.tolist() == profile_.lost.ms_per_step.tolist()
    assert first.modules.self_ms.tolist() == profile_.modules.self_ms.tolist()


def test_kernels_of_a_graph_are_named_after_an_eager_step(tmp_path):
    eager = Profile(gpu_recording())
    # the same kernels, all launched by one replay outside any module
    replay = [Event(Kind.RUNTIME, "cudaGraphLaunch", 25_000, 30_000, 1, 500, -1)]
    replay += [
        replace(e, correlation=500, external=-1) for e in events() if e.kind == Kind.KERNEL and e.start_ns >= 30_000
    ]
    nobody = np.empty(0, np.int64)
    spans = {"module_S": nobody, "start_S": nobody, "end_S": nobody, "thread_S": nobody}
    graph = Profile(gpu_recording(timeline=Timeline.of(replay), modules=(), syncs=(), marks_ns=(), warmup=0, **spans))
    assert graph.modules.module.tolist() == ["(cuda graph)"]
    named = graph.named_by(eager)
    assert named.modules.set_index("module").self_ms["a"] == pytest.approx(0.021)
    assert "3 of 3 kernels" in " ".join(named.notes)
    same(Profile.load(named.save(tmp_path / "p.json.gz")), named)
    assert graph.modules.module.tolist() == ["(cuda graph)"]


def test_bad_files_are_one_sentence(tmp_path, profile_):
    with refused(FileNotFoundError):
        Profile.load(tmp_path / "none.json")
    for content in (b"", b"{}", b"[1]", b'{"format": "surokit profile", "version": 99}', b"\x1f\x8bbroken"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a profile"):
            Profile.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_bytes(b"\x80\x81" * 40)
    with refused(ValueError):
        Profile.load(tmp_path / "bad.json")
    whole = profile_.save(tmp_path / "p.json").read_bytes()
    stored = json.loads(whole)
    timeline = {**stored["recording"]["timeline"], "names": ["one"]}
    for wrong in (
        {"recording": None},
        {"by": "layer"},
        {"light": 3},
        {"eager": 3},
        {"recording": {**stored["recording"], "timeline": timeline}},
        {"recording": {**stored["recording"], "end_C": [[1]]}},
    ):
        (tmp_path / "wrong.json").write_text(json.dumps(stored | wrong))
        with pytest.raises(ValueError, match="cannot be read as a profile"):
            Profile.load(tmp_path / "wrong.json")
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as a profile"):
        Profile.load(tmp_path / "cut.json")


def test_to_perfetto_and_back_keeps_the_times(profile_, tmp_path):
    path = profile_.to_perfetto(tmp_path / "t.json.gz")
    items = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {i["cat"] for i in items if i["ph"] == "X"} >= {
        "cpu_op",
        "kernel",
        "gpu_memcpy",
        "cuda_runtime",
        "module",
        "step",
    }
    assert len(
        [i for i in items if i.get("cat") in ("cpu_op", "cuda_runtime", "kernel", "gpu_memcpy", "user_annotation")]
    ) == len(events())
    again = Profile.from_trace(path).summary
    steps = profile_.summary
    for name in (
        "wall_ms",
        "busy_ms",
        "idle_ms",
        "host_wait_ms",
        "kernel_wait_ms",
        "other_wait_ms",
        "launches_per_step",
        "d2h_bytes",
    ):
        assert again[name] == pytest.approx(steps[name]), name


def test_diff(profile_):
    slower = Profile(gpu_recording(back_to_back_ns=2000))
    frame = profile_.diff(slower)
    rows = frame.set_index("metric")
    assert type(rows) is pandas.DataFrame
    assert rows.loc["wall_ms", "change"] == 0
    assert rows.loc["kernel_wait_ms", "change"] == pytest.approx(0.001)
    assert "lost to syncs ms" in rows.index
    assert "module a ms" in rows.index
    assert profile_.diff(profile_).change.abs().max() == 0


def test_diff_with_a_path_says_how_to_read_it(profile_):
    with refused(TypeError):
        profile_.diff("before.json")


def longer_by(us):
    """The same profile with its last kernel ending later: what is added is busy time of module a."""
    shifted = [replace(e, end_ns=e.end_ns + us * 1000) if e.name == "mul" else e for e in events()]
    end_ns = max(e.end_ns for e in shifted)
    return Profile(gpu_recording(timeline=Timeline.of(shifted), end_ns=end_ns), "longer")


def test_diff_puts_what_grew_first_and_shows_both(profile_):
    after = longer_by(30)
    frame = profile_.diff(after)
    assert (frame.metric[0], frame.change[0]) == ("wall_p95_ms", pytest.approx(0.030)) or frame.change[0] == max(
        frame.change[:20]
    )
    times = frame[[m.endswith("ms") for m in frame.metric]]
    assert times.change.tolist() == sorted(times.change, reverse=True)
    assert frame.set_index("metric").loc["busy_ms", "change"] == pytest.approx(0.030)
    assert frame.set_index("metric").loc["idle_ms", "change"] == pytest.approx(0)
    text = repr(frame)
    assert "before: hand made" in text
    assert "after:  longer" in text
    assert "  wall_ms 0.06 0.09 +0.03 +50%" in re.sub(" +", " ", text).replace("\n ", "\n  ")
    html = frame._repr_html_()
    ET.fromstring(html)
    assert html.count("viewBox") == 2
    assert "<script" not in html
    # one scale: the shorter step ends at two thirds of the longer one
    widths = [
        float(r.get("width", "nan"))
        for svg in ET.fromstring(html).iter(f"{SVG}svg")
        if svg.get("viewBox")
        for r in svg.findall(f"{SVG}rect")
    ]
    assert min(widths) / max(widths) == pytest.approx(60 / 90, abs=0.002)


def test_diff_can_be_pickled_and_keeps_its_rows(profile_):
    frame = profile_.diff(longer_by(30))
    again = pickle.loads(pickle.dumps(frame))
    assert type(again) is pandas.DataFrame
    assert again.metric.tolist() == frame.metric.tolist()
    assert again.after.tolist() == frame.after.tolist()


def test_diff_with_other_columns_is_shown_as_a_dataframe(profile_):
    frame = profile_.diff(longer_by(30))
    frame["note"] = "mine"
    assert "mine" in repr(frame)
    assert "mine" in frame._repr_html_()


def test_advice_is_found_by_number_rule_or_row(profile_):
    table = profile_.advice
    assert table.index.tolist() == list(range(1, len(table) + 1))
    third = table.loc[3]
    for asked in (3, third["rule"], third, dict(third)):
        row = profile_._advice_row(asked)
        assert (row["rule"], row["advice"], row["gain_ms"]) == (third["rule"], third["advice"], third["gain_ms"])
    rules = profile_._analysis.tables["advice"]["rule"]
    rules.append(rules[0])
    with refused(LookupError):
        profile_.verify(rules[0], lambda: None)
    rules.pop()
    for asked in (0, len(table) + 1, "no such rule"):
        with refused(LookupError):
            profile_.verify(asked, lambda: None)
    assert profile_._advice_row(np.int64(1))["rule"] == table.loc[1, "rule"]
    for asked in (None, 1.0, [1], table[table.rule == third["rule"]], {}):
        with refused(TypeError):
            profile_.verify(asked, lambda: None)


@pytest.fixture(scope="module")
def trained():
    with profile(steps=3, warmup=2) as p:
        train(5, each=lambda step, loss: loss.item())
    return p


def test_rounding_is_no_flop(trained):
    changed = {**trained._analysis.tables["modules"]}
    changed["gflop"] = [1e-16 if g is None else g + 1e-16 for g in changed["gflop"]]
    page = profile_html(replace(trained._shown(), tables={**trained._analysis.tables, "modules": changed}))
    assert "e-1" not in page


def test_verify_tries_a_piece_of_advice(trained):
    number = trained.advice.rule.tolist().index("sync") + 1
    x = torch.ones(100, 100)
    verdict = trained.verify(number, lambda: [x @ x for _ in range(30)], lambda: None, rounds=4)
    assert verdict.rule == "sync"
    assert verdict.predicted_ms == trained.advice.gain_ms[number]
    assert verdict.after_ms < 0.5 * verdict.before_ms


def test_the_speed_of_light_stays_with_the_profile(trained, tmp_path):
    gpu = calibrate("cpu", seconds=0.2, cache=False, progress=False)
    assert "of light" not in trained._repr_html_()
    frame = trained.speed_of_light(gpu)
    assert {"module", "self_ms", "light_ms", "share", "bound"} <= set(frame.columns)
    again = Profile.load(trained.save(tmp_path / "p.json.gz"))
    for p in (trained, again):
        assert "of light" in p._repr_html_()
        assert "of light" in repr(p)
    with refused(ValueError):
        Profile(gpu_recording()).speed_of_light(gpu)


def test_a_running_profile_says_so():
    running = Profile._pending(lambda: None)
    assert "running" in repr(running)
    assert "running" in running._repr_html_()
    with refused(RuntimeError):
        running.summary  # noqa: B018
    with refused(RuntimeError):
        running.verify(1, lambda: None)


def test_what_the_page_quotes_is_what_profiles_say():
    root = Path(__file__).parents[2]
    table = (root / "docs/profiling.md").read_text().partition("| what the profile says |")[2]
    quoted = [row.split("|")[1].strip() for row in table.splitlines()[2:] if row.startswith("|")]
    code = " ".join(path.read_text() for path in (root / "surokit/profiler").rglob("*.py"))
    said = re.sub(r'"\s*f?"', "", code)  # texts that are written over several lines
    assert len(quoted) >= 8
    for words in quoted:
        (longest,) = sorted(re.split(r" ?\.\.\. ?|N |, or ", words), key=len)[-1:]
        assert longest in said, words


def test_dollars_are_shown_where_a_price_is_known(profile_):
    priced = Profile(gpu_recording(usd_per_gpu_hour=2.5))
    assert "USD" not in repr(profile_) + profile_._repr_html_()
    assert priced.lost.usd_per_day.tolist() == pytest.approx((priced.lost.share * 60).tolist())
    # syncs: 11 of 60 us
    assert "11.00" in next(line for line in repr(priced).splitlines() if line.startswith("  syncs"))
    assert "USD a day" in priced._repr_html_()
    assert "2.5 USD a GPU hour" in repr(priced)
    assert "GPU hours a day" in priced._repr_html_()


def test_a_cpu_loses_hours():
    priced = Profile(replace(cpu_step(), usd_per_gpu_hour=2.5))
    text, page = repr(priced), priced._repr_html_()
    assert "2.5 USD an hour" in text
    assert "<th" in page
    assert "hours a day" in page
    assert "GPU hour" not in text + page


def test_text_names_the_essentials(profile_):
    text = repr(profile_)
    for word in ("hand made", "a GPU", "busy", "idle", "launches", "syncs", "copies", "host", "train.py:7"):
        assert word in text
    assert "CPU: idle" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (0, "0"), (99.96, "100"), (999.4, "999"), (999.6, "1,000"), (-12_345, "-12,345")],
)
def test_numbers_have_three_digits_or_are_whole(value, text):
    assert three_digits(value) == text


def test_long_steps_are_written_without_exponents(profile_):
    times = {"start_ns": 0, "end_ns": 9 * 10**9, "marks_ns": (3 * 10**9, 9 * 10**9)}
    longer = [replace(e, start_ns=e.start_ns * 10**5, end_ns=e.end_ns * 10**5) for e in events()]
    slow = Profile(gpu_recording(timeline=Timeline.of(longer), **times))
    change = profile_.diff(slow)
    shown = [slow._headline(), *slow._all_notes(), slow.timeline(), repr(change), change._repr_html_()]
    assert slow.summary["wall_ms"] == 5000
    assert "5,000 ms a step" in repr(slow)
    assert not any(re.search(r"\de\+", text) for text in shown)
    assert not re.search(r"\de\+", slow._repr_html_().partition("<b>Advice")[0])


def test_html_is_well_formed_and_has_no_script(profile_):
    html = profile_._repr_html_()
    ET.fromstring(html)
    assert "<svg" in html
    assert "<script" not in html
    assert "currentColor" in html
    ET.fromstring(profile_.timeline(0))
    with refused(IndexError):
        profile_.timeline(1)


def test_html_escapes_names():
    nasty = Profile(gpu_recording(modules=(("<b>&", "<b>&"), ("<b>&.a", "Linear")), device='<i>&"'))
    ET.fromstring(nasty._repr_html_())
    assert "<b>&" not in nasty._repr_html_()


def test_pandas_loads_only_when_a_table_is_asked_for():
    code = "import sys, surokit.profiler; print('pandas' in sys.modules, 'IPython' in sys.modules, 'matplotlib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False", "False"]
