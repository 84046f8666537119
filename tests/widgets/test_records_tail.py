"""A records file that grows: torn lines, resumes, replaced files, long ones."""

from __future__ import annotations

import json
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surokit.runs.jsonl import read
from surokit.widgets import records_tail
from surokit.widgets.records_tail import Reader
from surokit.widgets.state import PanelState
from tests.widgets.toys import grow, line

SERIES = ("loss", "loss_mean", "held_out", "rate", "rate_sustained", "idle", "lr", "grad_norm", "memory")


def picture(state):
    """Everything that a view draws."""
    curves = {name: getattr(state, name).points() for name in SERIES}
    return curves, state.tokens, state.step, state.elapsed_s, state.overall_rate, state.goodput, state.warning_lines()


def expected(path):
    """The same from the file as a resumed session reads it."""
    columns = read(path)
    state = PanelState()
    for i in range(len(columns["step"])):
        row = {name: float(column[i]) for name, column in columns.items()}
        state.add_row({name: value for name, value in row.items() if value == value or name == "loss"})
    return state


def same(a, b):
    return repr(picture(a)) == repr(picture(b))  # NaN is itself here


def test_a_file_is_read_as_it_grows(tmp_path):
    reader = Reader(tmp_path / "records.jsonl")
    with pytest.raises(FileNotFoundError):
        reader.read()
    grow(tmp_path, line(1) + line(2))
    assert reader.read()
    assert not reader.read()
    torn = line(3)
    grow(tmp_path, torn[:20])
    assert not reader.read()
    assert reader.state.step == 2
    grow(tmp_path, torn[20:] + '{"step": 3, "eval_loss": 4.5}\n')
    assert reader.read()
    assert reader.state.held_out.points() == ([3], [4.5])
    assert same(reader.state, expected(reader.path))


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path):
    grow(tmp_path, line(1) + line(2)[:30] + "\n" + line(2) + "[]\n\n" + '{"loss": 1}\n' + line(3, loss="NaN"))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader.state.loss.points()[0] == [1, 2, 3]
    assert reader.state.warning_lines() == ["loss not finite (NaN or infinite), at step 3"]
    assert same(reader.state, expected(reader.path))


def test_a_look_ends_however_fast_the_file_grows(tmp_path, monkeypatch):
    grow(tmp_path, line(1))
    reader = Reader(tmp_path / "records.jsonl")
    take = reader.take

    def meanwhile(data, left):
        take(data, left)
        assert reader.state.step < 10, "it never ends"
        grow(tmp_path, line(reader.state.step + 1))

    monkeypatch.setattr(reader, "take", meanwhile)
    assert reader.read()
    assert reader.state.step == 1
    assert reader.behind
    assert reader.read()
    assert reader.state.step == 2


operations = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 30)),
        st.tuples(st.just("resume"), st.integers(1, 40)),
        st.tuples(st.just("eval"), st.just(0)),
        st.tuples(st.just("torn"), st.integers(1, 40)),
        st.tuples(st.just("nan"), st.just(0)),
        st.tuples(st.just("read"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations=operations, columns=st.booleans())
def test_whatever_is_written_it_shows_what_a_resume_would_read(operations, columns, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "records.jsonl"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_tail, "FIRST_BYTES", 300 if columns else 1 << 18)
        patch.setattr(records_tail, "BLOCK_BYTES", 2000)
        patch.setattr(records_tail, "COPIES", 4)
        reader, step, written, evaluated = Reader(path), 0, 0, 0
        for kind, number in operations:
            if kind == "steps":
                for _ in range(number):
                    step += 1
                    grow(folder, line(step, loss=4.0 + random.Random(step + number).random()))
            elif kind == "resume":
                step = max(0, step - number)
            elif kind == "eval" and step == written and step != evaluated:  # of two at a step the panel shows both
                evaluated = step
                grow(folder, json.dumps({"step": step, "eval_loss": 3.0 + step / 100}) + "\n")
            elif kind == "torn":
                grow(folder, line(step + 1)[:number] + "\n")
            elif kind == "nan":
                step += 1
                grow(folder, line(step, loss="NaN", skipped=1.0))
            elif kind == "read":
                reader.read()
            written = step if kind in ("steps", "nan") else written
        looks = 0
        while reader.behind:  # block by block, as a look that has no more time does
            reader.read(budget_s=0.0)
            looks += 1
            assert looks < 1000
        assert same(reader.state, expected(path))


def test_a_resume_goes_back_to_a_copy_not_to_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(records_tail, "FIRST_BYTES", 1000)
    monkeypatch.setattr(records_tail, "BLOCK_BYTES", 10_000)
    grow(tmp_path, "".join(line(step) for step in range(1, 2001)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    size = reader.offset
    taken, take = [], reader.take

    def counted(data, left):
        taken.append(len(data))
        take(data, left)

    monkeypatch.setattr(reader, "take", counted)
    grow(tmp_path, "".join(line(step, loss=1.0) for step in range(1900, 1950)))
    reader.read()
    assert sum(taken) < 0.25 * size
    assert len(reader.copies) <= records_tail.COPIES + 1
    assert reader.state.step == 1949
    assert same(reader.state, expected(reader.path))


@pytest.mark.parametrize("longer", [False, True], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path, longer):
    grow(tmp_path, "".join(line(step) for step in range(1, 20)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    other = "".join(line(step, loss=2.0) for step in range(1, 40 if longer else 5))
    (tmp_path / "records.jsonl").write_text(other)
    assert reader.read()
    assert reader.state.loss.points()[1] == [2.0] * (39 if longer else 4)


def test_a_copy_of_the_same_file_is_not_read_anew(tmp_path):
    """As rsync and its like put a new file in the place of the old one each time."""
    grow(tmp_path, "".join(line(step) for step in range(1, 20)))
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    state = reader.state
    new = tmp_path / "new"
    new.write_text(reader.path.read_text() + line(20))
    new.replace(reader.path)
    reader.read()
    assert reader.state is state
    assert state.step == 20
    assert state.loss.count == 20


def test_a_long_file_keeps_its_extremes_and_its_sums(tmp_path, monkeypatch):
    count = 30_000
    rng = random.Random(0)
    losses = [5.0 - 3.0 * step / count + 0.1 * rng.random() for step in range(1, count + 1)]
    losses[4_321], losses[12_345] = 99.0, 0.001
    rows = [line(step, loss=loss) for step, loss in enumerate(losses, 1)]
    rows[20_000] = line(20_001, loss="NaN", skipped=1.0)
    for step in range(1000, count + 1, 1000):
        rows[step - 1] += json.dumps({"step": step, "eval_loss": 5.0 - step / count}) + "\n"
    grow(tmp_path, "".join(rows))
    whole = Reader(tmp_path / "records.jsonl")
    whole.read()
    assert whole.fold == 2  # and yet nothing is folded: all of it is recent enough
    for name, value in {
        "FOLDED": 1000,
        "RECENT_BYTES": 100_000,
        "BLOCK_BYTES": 1 << 20,
        "FIRST_BYTES": 1 << 16,
    }.items():
        monkeypatch.setattr(records_tail, name, value)
    folded = Reader(tmp_path / "records.jsonl")
    folded.read()
    assert folded.fold > 20
    a, b = folded.state, whole.state
    assert (a.step, a.tokens, a.held_out.points()) == (b.step, b.tokens, b.held_out.points())
    assert a.elapsed_s == pytest.approx(b.elapsed_s)
    assert a.overall_rate == pytest.approx(b.overall_rate)
    assert a.goodput == pytest.approx(b.goodput)
    points = dict(zip(*a.loss.points()))
    assert points[4_322] == 99.0
    assert points[12_346] == 0.001
    assert math.isnan(points[20_001])
    assert a.loss_mean.points()[1][-1] == pytest.approx(b.loss_mean.points()[1][-1], rel=0.01)
    assert a.rate_sustained.points()[1][-1] == pytest.approx(b.rate_sustained.points()[1][-1], rel=1e-3)
    assert min(a.rate.points()[1]) == min(b.rate.points()[1])
    assert max(a.rate.points()[1]) == max(b.rate.points()[1])
    assert a.loss.points()[0] == sorted(a.loss.points()[0])


def test_waits_for_an_offloaded_optimizer_are_folded_too(tmp_path, monkeypatch):
    grow(
        tmp_path,
        "".join(line(step, wall_ms=10.0, idle_frac=0.3, offload_ms=float(step % 5)) for step in range(1, 5001)),
    )
    monkeypatch.setattr(records_tail, "FOLDED", 200)
    monkeypatch.setattr(records_tail, "RECENT_BYTES", 10_000)
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader.fold > 5
    assert reader.state.idle_causes["offload"] == pytest.approx(0.2, rel=0.02)


def test_what_later_lines_add_to_a_step_is_folded_with_it(tmp_path, monkeypatch):
    """As callbacks write: the loss in a line of its own, after the step."""
    rng = random.Random(0)
    losses = [3.0 + rng.random() for _ in range(4000)]
    rows = []
    for step, loss in enumerate(losses, 1):
        rows.append(json.dumps({"step": step, "wall_ms": 10.0, "elapsed_s": 0.01 * step, "tokens": 64}) + "\n")
        if step % 5 == 0:
            rows.append(json.dumps({"step": step, "loss": loss, "lr": 1e-3, "eval_loss": loss + 1}) + "\n")
    grow(tmp_path, "".join(rows))
    whole = Reader(tmp_path / "records.jsonl")
    whole.read()
    for name, value in {"FIRST_BYTES": 10_000, "RECENT_BYTES": 20_000, "BLOCK_BYTES": 50_000, "FOLDED": 100}.items():
        monkeypatch.setattr(records_tail, name, value)
    folded = Reader(tmp_path / "records.jsonl")
    folded.read()
    assert folded.fold > 10
    a, b = folded.state, whole.state
    known = losses[4::5]
    points = dict(zip(*a.loss.points()))
    assert points[5 * known.index(max(known)) + 5] == max(known)
    assert points[5 * known.index(min(known)) + 5] == min(known)
    assert (a.tokens, a.step, a.lr.last, a.held_out.last) == (b.tokens, b.step, b.lr.last, b.held_out.last)
    assert a.held_out.count == b.held_out.count == 800
    assert a.overall_rate == pytest.approx(b.overall_rate)


def test_the_end_of_a_long_file_is_never_folded(tmp_path, monkeypatch):
    """Not even where one block holds all that is left."""
    grow(tmp_path, "".join(line(step) for step in range(1, 3001)))
    monkeypatch.setattr(records_tail, "FIRST_BYTES", 20_000)
    monkeypatch.setattr(records_tail, "RECENT_BYTES", 100_000)
    monkeypatch.setattr(records_tail, "FOLDED", 100)
    monkeypatch.setattr(records_tail, "BLOCK_BYTES", 200_000)
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader.fold > 10
    assert list(reader.state.loss.last or ()) == [3000, json.loads(line(3000))["loss"]]
    assert 400 < reader.state.health.losses < 2000


def test_without_pyarrow_it_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(records_tail, "FIRST_BYTES", 2000)
    grow(tmp_path, "".join(line(step) for step in range(1, 200)))
    with_it = Reader(tmp_path / "records.jsonl")
    with_it.read()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    without = Reader(tmp_path / "records.jsonl")
    without.read()
    assert same(with_it.state, without.state)
