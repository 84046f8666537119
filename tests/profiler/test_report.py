"""A Profile as a value: files, pickles, comparison, text and pictures."""

import gzip
import json
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from surokit.profiler.report import Profile
from tests.profiler.traces import events, gpu_recording


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


def test_bad_files_are_one_sentence(tmp_path, profile_):
    with pytest.raises(FileNotFoundError, match="no profile at"):
        Profile.load(tmp_path / "none.json")
    for content in (b"", b"{}", b"[1]", b'{"format": "surokit profile", "version": 99}', b"\x1f\x8bbroken"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a profile"):
            Profile.load(tmp_path / "bad.json")
    whole = profile_.save(tmp_path / "p.json").read_bytes()
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
    steps = Profile(gpu_recording(warmup=0)).summary
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
    rows = profile_.diff(slower).set_index("metric")
    assert rows.loc["wall_ms", "change"] == 0
    assert rows.loc["kernel_wait_ms", "change"] == pytest.approx(0.001)
    assert "lost to syncs ms" in rows.index
    assert profile_.diff(profile_).change.abs().max() == 0


def test_text_names_the_essentials(profile_):
    text = repr(profile_)
    for word in ("hand made", "a GPU", "busy", "idle", "launches", "syncs", "copies", "host", "train.py:7"):
        assert word in text
    assert "CPU: idle" not in text


def test_html_is_well_formed_and_has_no_script(profile_):
    html = profile_._repr_html_()
    ET.fromstring(html)
    assert "<svg" in html
    assert "<script" not in html
    assert "currentColor" in html
    ET.fromstring(profile_.timeline(0))
    with pytest.raises(IndexError, match="steps 0 to 0"):
        profile_.timeline(1)


def test_html_escapes_names():
    nasty = Profile(gpu_recording(modules=(("<b>&", "<b>&"), ("<b>&.a", "Linear")), device='<i>&"'))
    ET.fromstring(nasty._repr_html_())
    assert "<b>&" not in nasty._repr_html_()


def test_pandas_loads_only_when_a_table_is_asked_for():
    code = "import sys, surokit.profiler; print('pandas' in sys.modules, 'IPython' in sys.modules, 'matplotlib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False", "False"]
