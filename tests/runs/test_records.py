"""Records: ring, late values, the file, and reading it back after a kill."""

from __future__ import annotations

import copy
import gc
import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surokit.runs.jsonl import COLUMNS, read
from surokit.runs.records import Deferred, Record, Records
from tests.refusals import refused, warned


class OnItsWay(Deferred):
    """Values that arrive when the test says so."""

    def __init__(self, **values: float) -> None:
        super().__init__({name: torch.tensor(value) for name, value in values.items()}, {})
        self.here = False
        self.waited = False

    def ready(self) -> bool:
        return self.here

    def wait(self) -> dict[str, float]:
        self.waited = self.waited or not self.here
        self.here = True
        return super().wait()


def make_record(step: int, late: Deferred | None = None, **host: float) -> Record:
    values = {"loss": 2.0 / step, "grad_norm": 1.0, "skipped": 0.0, "targets": 30.0}
    late = late or Deferred({name: torch.tensor(value) for name, value in values.items()}, host)
    return Record(step, lr=0.1, tokens=32, wall_ms=20.0, stall_ms=0.5, peak_gib=0.25, elapsed_s=step / 50, late=late)


def fill(records: Records, steps: range, **host: float) -> None:
    for step in steps:
        records.append(make_record(step, None, **host))
        list(records.drain())


def test_a_record_reads_its_values() -> None:
    record = make_record(4, idle_frac=0.25, sqnr=31.0)
    assert (record.loss, record.grad_norm, record.targets, record.skipped) == (0.5, 1.0, 30, False)
    assert record.tokens_per_s == 1600.0
    assert record.idle_frac == 0.25
    assert record.meters == {"sqnr": 31.0}
    with pytest.raises(AttributeError):
        record.step = 5  # type: ignore[misc]


def test_the_table() -> None:
    records = Records()
    fill(records, range(1, 4), sqnr=30.0)
    frame = records.frame()
    assert tuple(frame.columns) == (*COLUMNS, "sqnr")
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["loss"].tolist() == pytest.approx([2.0, 1.0, 2 / 3])
    assert frame["tokens"].dtype == np.int64
    assert frame["eval_loss"].isna().all()


def test_late_values_are_not_waited_for() -> None:
    records = Records()
    late = [OnItsWay(loss=float(i), skipped=0.0, grad_norm=1.0, targets=1.0) for i in range(3)]
    for i, values in enumerate(late):
        records.append(make_record(i + 1, values))
    assert list(records.drain()) == []
    assert records.frame()["loss"].isna().all()
    assert records.column("tokens").tolist() == [32, 32, 32], "what the host knows is there"
    late[0].here = late[2].here = True  # the middle one holds the last one back
    assert [r.step for r in records.drain()] == [1]
    assert not any(values.waited for values in late)
    assert [r.step for r in records.drain(wait=True)] == [2, 3]
    assert late[1].waited
    assert records.column("loss").tolist() == [0.0, 1.0, 2.0]


def test_reading_a_late_loss_waits() -> None:
    late = OnItsWay(loss=3.0)
    record = make_record(1, late)
    assert record.loss == 3.0
    assert late.waited


@pytest.mark.parametrize("capacity", [1, 5, 1024, 3000])
def test_the_ring_is_bounded(capacity: int) -> None:
    records = Records(capacity=capacity)
    fill(records, range(1, 2051), sqnr=1.0)
    kept = list(range(2051 - min(capacity, 2050), 2051))
    assert len(records) == len(kept)
    assert records.column("step").tolist() == kept
    assert records.column("loss").tolist() == pytest.approx([2.0 / step for step in kept])


def test_a_value_that_arrives_after_its_row_left_goes_to_the_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl", capacity=2)
    late = OnItsWay(loss=7.0)
    records.append(make_record(1, late))
    for step in (2, 3):
        records.append(make_record(step))
    late.here = True
    list(records.drain())
    assert records.column("loss").tolist() == pytest.approx([1.0, 2 / 3])
    records.flush()
    assert read(tmp_path / "records.jsonl")["loss"].tolist() == pytest.approx([7.0, 1.0, 2 / 3])


def test_rows_that_left_memory_come_back_from_the_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl", capacity=4)
    fill(records, range(1, 11), sqnr=2.0)
    records.update(2, eval_loss=9.0)
    frame = records.frame()
    assert frame["step"].tolist() == list(range(1, 11))
    assert frame["sqnr"].tolist() == [2.0] * 10
    assert frame["eval_loss"].tolist()[1] == 9.0


def test_an_evaluation_joins_its_step(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    records.update(0, eval_loss=4.0)  # before the first step: only in the file
    fill(records, range(1, 4))
    records.update(3, eval_loss=1.5)
    records.flush()
    for column in (records.column("eval_loss"), read(tmp_path / "records.jsonl")["eval_loss"]):
        np.testing.assert_array_equal(column, [math.nan, math.nan, 1.5])


def test_the_file_is_strict_json_and_keeps_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    for step, loss in enumerate((math.nan, math.inf, -math.inf), 1):
        values = {"loss": torch.tensor(loss), "skipped": torch.tensor(1.0)}
        records.append(make_record(step, Deferred(values, {})))
        list(records.drain())
    records.flush()

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    np.testing.assert_array_equal(read(path)["loss"], [math.nan, math.inf, -math.inf])


def test_reading_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    before = Records(path)
    fill(before, range(1, 9))
    before.flush()
    with path.open("a") as file:
        file.write('{"step": 9, "loss": 0.')  # the kill
    after = Records(path)
    fill(after, range(6, 8))  # resumed from a checkpoint at step 5
    after.flush()
    rows = read(path)
    assert rows["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.isfinite(rows["loss"]).all()


def test_restoring_rows() -> None:
    records = Records(capacity=8)
    records.restore({"step": np.arange(1.0, 11.0), "loss": np.arange(10.0), "sqnr": np.ones(10)})
    assert records.column("step").tolist() == list(range(3, 11))
    fill(records, range(11, 12))
    assert records.column("step").tolist() == list(range(4, 12))
    assert math.isnan(records.column("sqnr")[-1])


def test_a_full_disk_costs_a_warning_and_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    fill(records, range(1, 3))
    real = Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with warned(UserWarning):
        records.flush()
    records.flush()  # said once: a second warning would be an error here
    monkeypatch.setattr(Path, "open", real)
    fill(records, range(3, 4))
    records.flush()
    assert read(path)["step"].tolist() == [1, 2, 3]


def test_lines_are_written_while_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path, flush_s=0.0)
    fill(records, range(1, 3))
    assert read(path)["step"].tolist() == [1, 2]


def test_lines_that_wait_are_written_when_the_records_go(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    fill(records, range(1, 4))
    twin = copy.deepcopy(records)
    assert not path.exists()
    del records
    gc.collect()
    assert read(path)["step"].tolist() == [1, 2, 3]
    del twin  # no second time
    gc.collect()
    assert read(path)["step"].tolist() == [1, 2, 3]
    assert path.read_text().count("\n") == 3


def test_lines_that_wait_are_written_when_the_program_ends(tmp_path: Path) -> None:
    """Steps by hand have no end of a run that would write them. A fork has nothing to write."""
    code = f"""
import os
from pathlib import Path
from surokit.runs.records import Records
records = Records(Path({str(tmp_path / "records.jsonl")!r}))
records.update(3, wall_ms=1.0)
if os.fork() == 0:
    del records
    raise SystemExit
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert (tmp_path / "records.jsonl").read_text() == '{"step": 3, "wall_ms": 1.0}\n'


def test_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    """As a power cut may leave a file."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(
        b'{"step": 1, "wall_ms": 1}\n\xff\x00\xfe\n{"step": Infinity, "wall_ms": 1}\n[3]\n{"loss": 1}\n{"step": 2, "wall_ms": 1}\n'
    )
    assert read(path)["step"].tolist() == [1, 2]


def test_a_file_need_not_say_what_was_skipped_or_how_many_targets_there_were(tmp_path: Path) -> None:
    """As the file of a loop that is not a Session's, or that somebody else wrote."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1, "wall_ms": 1, "loss": 2.0}\n', encoding="utf-8")
    records = Records(path)
    records.resume(step=1)
    assert (records[0].loss, records[0].skipped, records[0].targets) == (2.0, False, 0)


def test_a_resume_fills_the_ring_and_counts_what_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    before = Records(path)
    fill(before, range(1, 9))
    fill(before, range(6, 12), sqnr=3.0)  # 6, 7 and 8 a second time
    before.flush()
    after = Records(path, capacity=4)
    assert after.resume(step=9) == (9 * 20.0, (3 + 2) * 20.0)
    assert after.column("step").tolist() == [6, 7, 8, 9]
    assert after.column("sqnr").tolist() == [3.0] * 4
    fill(after, range(10, 12))
    after.flush()
    assert after.column("step").tolist() == [8, 9, 10, 11]
    assert read(path)["step"].tolist() == list(range(1, 12))
    with refused(ValueError):
        Records().resume(3)


def test_steps_that_were_taken_back_leave_nothing(tmp_path: Path) -> None:
    """Neither values nor names; what comes later adds to the steps that count."""
    path = tmp_path / "records.jsonl"
    path.write_text(
        """{"step": 1, "wall_ms": 1, "b": 5}
{"step": 2, "wall_ms": 1, "a": 1}
{"step": 3, "wall_ms": 1, "c": 1}
{"step": 3, "eval_loss": 9, "d": 1}
{"step": 2, "wall_ms": 4}
{"step": 1, "eval_loss": 7, "e": "nan"}
{"step": 3, "eval_loss": 8}
"""
    )
    rows = read(path)
    assert tuple(rows) == (*COLUMNS, "b", "e")
    assert rows["step"].tolist() == [1, 2]
    assert rows["wall_ms"].tolist() == [1, 4]
    np.testing.assert_array_equal(rows["eval_loss"], [7, math.nan])
    np.testing.assert_array_equal(rows["b"], [5, math.nan])
    path.write_text("")
    assert {len(column) for column in read(path).values()} == {0}


def test_a_long_file_is_read_into_columns_and_nothing_else(tmp_path: Path) -> None:
    path, steps = tmp_path / "records.jsonl", 100_000
    with path.open("w") as file:
        file.writelines(f'{{"step": {step}, "wall_ms": 2.5, "loss": 3.25}}\n' for step in range(1, steps + 1))
    tracemalloc.start()
    try:
        rows = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows["loss"].sum() == 3.25 * steps
    assert peak < 1.2 * 8 * steps * len(COLUMNS)  # a dict a line takes five times that


def test_unknown_column() -> None:
    with refused(KeyError):
        Records().column("lost")


def test_an_empty_table() -> None:
    frame = Records().frame()
    assert len(frame) == 0
    assert tuple(frame.columns) == COLUMNS


def test_records_by_index() -> None:
    records = Records(capacity=3)
    fill(records, range(1, 5), sqnr=30.0)
    late = OnItsWay(loss=9.0)
    records.append(make_record(5, late))
    assert [r.step for r in records] == [3, 4, 5]
    assert records[-1].late is late, "the record itself while its values are late"
    assert not late.waited
    first = records[0]
    assert first.loss == pytest.approx(2 / 3)
    assert (first.step, first.targets, first.skipped) == (3, 30, False)
    assert first.meters == {"sqnr": 30.0}
    assert first.tokens_per_s == 1600.0
    assert math.isnan(first.idle_frac)
    assert [r.step for r in records[-2:]] == [4, 5]
    with refused(IndexError):
        records[3]


def test_capacity() -> None:
    with refused(ValueError):
        Records(capacity=0)


class Event:
    """Takes the place of a CUDA event at `ms`, which the device has passed once `here`."""

    def __init__(self, ms):
        self.ms, self.here = ms, False

    def query(self):
        return self.here

    def synchronize(self):
        self.here = True

    def elapsed_time(self, other):
        assert other.here, "asked before the device had passed it"
        return other.ms - self.ms


def test_events_without_values_are_waited_for_too():
    events: Any = Event(0.0), Event(10.0), Event(40.0)
    before, start, end = events
    before.here = start.here = True
    late = Deferred({}, {}, start, end, before)
    assert not late.ready()
    end.here = True
    assert late.ready()
    assert late.wait() == {"idle_frac": 0.25}
