"""Mirrors: what a session measured, read back from TensorBoard's and Weights & Biases' own files; dead and slow services."""

from __future__ import annotations

import math
import sys
import threading
import time
import types

import pytest
import torch

import surokit as sk
from surokit.integrations import mirrors
from surokit.integrations.mirrors import Mirror, TensorBoard, Trackio, Wandb
from surokit.runs.records import Deferred, Record
from tests.clocks import PATIENCE_S, Clock, JumpingClock
from tests.refusals import refused, warned


@pytest.fixture
def session():
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)
    ids = torch.randint(64, (3, 2, 16))
    batches = [{"input_ids": i, "labels": i} for i in ids]

    def measured(session):
        return {"weight_norm": 1.5}

    return sk.Session(sk.Decoder(config), batches, schedule=None, eval=batches[:1], eval_every=4, meters=[measured])


def record(step, loss=2.0):
    return Record(
        step, 1e-3, 32, 10.0, 0.0, 1.0, 0.01 * step, Deferred({}, {"loss": loss, "grad_norm": 1.0, "skipped": 0.0})
    )


class Kept(Mirror):
    """Keeps what it is given; may be slow, or fail."""

    def __init__(self, every=1, fails="", gate=None):
        super().__init__(every)
        self.calls, self.rows, self.fails, self.gate = [], [], fails, gate

        self.taken = threading.Event()

    def open(self, info, step):
        self.calls.append(("open", info and info.title, step))
        if self.fails == "open":
            raise ConnectionError("no route")

    def write(self, step, values, time_s):
        self.taken.set()
        if self.gate is not None:
            self.gate.wait()
        if self.fails == "write":
            raise ConnectionError("broken pipe")
        self.rows.append((step, values, time_s))

    def close(self, reason):
        self.calls.append(("close", reason))


def test_everything_is_forwarded_in_order(session, monkeypatch):
    kept, clock, arrived_s = Kept(), Clock(), {}

    class Arrival:
        """Of a step, a second after the one before."""

        def on_step(self, record):
            clock.sleep(1.0)
            arrived_s[record.step] = clock.time()

        def on_end(self, reason):
            pass

    monkeypatch.setattr(mirrors, "time", clock)
    session.subscribe(Arrival())
    session.subscribe(kept)
    session.run(8)
    assert kept.calls == [("open", "Decoder", 1), ("close", "done")]
    steps = [step for step, values, _ in kept.rows if "train/loss" in values]
    assert steps == list(range(1, 9))
    assert [step for step, values, _ in kept.rows if "eval/loss" in values] == [4, 8]
    frame = session.records.frame()
    for (step, values, time_s), row in zip([r for r in kept.rows if "train/loss" in r[1]], frame.to_dict("records")):
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "idle_frac", "peak_gib"):
            assert values[f"train/{name}"] == pytest.approx(row[name])
        assert values["meters/weight_norm"] == 1.5
        assert time_s == arrived_s[step]
    session.run(2)  # the next run goes on
    assert kept.calls[2:] == [("open", "Decoder", 9), ("close", "done")]
    assert kept.rows[-1][0] == 10


def test_an_evaluation_between_two_runs_is_forwarded(session):
    kept = Kept()
    session.subscribe(kept)
    session.run(1)
    session.evaluate()
    assert kept.rows[-1][1].keys() == {"eval/loss"}  # written by now: the process may end here
    assert kept.calls[-1] == ("close", "done")
    session.evaluate()
    session.run(1)
    assert [(step, sorted(values)[0]) for step, values, _ in kept.rows if len(values) == 1] == [(1, "eval/loss")] * 2
    opened = [call for call in kept.calls if call[0] == "open"]
    assert len(kept.calls) == 2 * len(opened)
    assert kept.rows[-1][0] == 2


def test_an_evaluation_before_the_first_mirrored_step_ends_nothing():
    """A run that goes on at step 20, with every=50."""
    kept = Kept(every=50)
    kept.on_start(100)
    kept.on_step(record(20))
    kept.on_eval(30, 2.5)
    kept.on_step(record(51))
    kept.on_end("done")
    assert [step for step, _, _ in kept.rows] == [30, 51]
    assert kept.calls == [("open", None, 31), ("close", "done")]


def test_a_mirror_that_lacks_a_method_is_not_made():
    """Said when it is made, and not by its thread in the middle of a run."""

    class Half(Mirror):
        def open(self, info, step): ...

    with pytest.raises(TypeError, match="abstract methods '?close'?, '?write'?"):
        Half()  # type: ignore[abstract]


def test_one_of_several_steps():
    kept = Kept(every=3)
    for step in range(1, 11):
        kept.on_step(record(step))
    kept.on_end("done")
    assert [step for step, _, _ in kept.rows] == [1, 4, 7, 10]
    with refused(ValueError):
        Kept(every=0)


def test_a_step_does_not_wait_for_a_slow_service(monkeypatch):
    monkeypatch.setattr(mirrors, "WAITING", 100)
    monkeypatch.setattr(mirrors, "CLOSE_S", 0.2)
    gate = threading.Event()
    slow = Kept(gate=gate)
    records = [record(step) for step in range(1, 1001)]
    for r in records:
        slow.on_step(r)  # the service takes none: whoever waited for it would wait for ever
    with warned(RuntimeWarning):
        slow.on_end("done")
    gate.set()


def test_what_a_slow_service_misses_is_counted(monkeypatch):
    monkeypatch.setattr(mirrors, "WAITING", 10)
    gate = threading.Event()
    slow = Kept(gate=gate)
    slow.on_step(record(1))
    assert slow.taken.wait(20)  # the first; the thread waits at the gate
    for step in range(2, 32):
        slow.on_step(record(step))
    gate.set()
    with warned(RuntimeWarning):
        slow.on_end("done")
    assert [step for step, _, _ in slow.rows] == [1, *range(22, 32)]
    slow.on_step(record(32))  # the next run
    slow.on_end("done")
    assert slow.rows[-1][0] == 32


@pytest.mark.parametrize("fails", ["open", "write"])
def test_a_dead_service_costs_one_warning_and_no_step(session, fails):
    session.subscribe(Kept(fails=fails))
    with warned(RuntimeWarning) as caught:
        session.run(30)
    assert len(caught) == 1
    session.run(2)
    assert session.steps == 32


def test_tensorboard_reads_it_back(session, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session.subscribe(TensorBoard(tmp_path / "logs"))
    session.run(8)
    session.evaluate()  # a file of its own, which hides none of what is there
    session.run(2)
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    frame = session.records.frame()
    for name in ("loss", "lr", "grad_norm", "tokens_per_s"):
        scalars = events.Scalars(f"train/{name}")
        assert [event.step for event in scalars] == list(range(1, 11))
        assert [event.value for event in scalars] == pytest.approx(frame[name].tolist(), rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [4, 8, 8]
    assert [event.value for event in events.Scalars("meters/weight_norm")] == [1.5] * 10
    assert "run/text_summary" in events.Tags()["tensors"]


def test_tensorboard_hides_what_a_resume_takes_again(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = JumpingClock(time.time)
    monkeypatch.setattr(time, "time", clock)
    for first, last, loss in ((1, 6, 2.0), (4, 8, 1.0)):
        board = TensorBoard(tmp_path)
        for step in range(first, last + 1):
            board.on_step(record(step, loss if step != 8 else math.nan))
        board.on_end("done")
        clock.ahead_s += 2.0  # the name of an event file has whole seconds
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars[:-1]] == [
        (1, 2),
        (2, 2),
        (3, 2),
        (4, 1),
        (5, 1),
        (6, 1),
        (7, 1),
    ]
    assert math.isnan(scalars[-1].value)


def test_wandb_reads_it_back(session, tmp_path, monkeypatch):
    import wandb

    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(mirrors, "CLOSE_S", PATIENCE_S)  # its first import alone can take longer on a busy machine
    mirror = Wandb("tests", "mine", mode="offline", settings={"silent": True, "console": "off"})
    session.subscribe(mirror)
    session.run(8)
    assert mirror.run.name == "mine"
    wandb.teardown()  # the file of a finished run is closed by wandb's own process, at some time after
    rows = history(tmp_path)
    losses = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in losses] == list(range(1, 9))
    assert [row["train/loss"] for row in losses] == pytest.approx(session.records.frame()["loss"].tolist())
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8]


def history(folder):
    """The rows of an offline run, from its transaction log."""
    import json

    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store, rows = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    store.close()
    return rows


def test_trackio_is_spoken_to_as_it_expects(session, monkeypatch):
    """Against a stand-in with trackio's interface (0.30): the package itself brings a web server with it."""
    opened, logged = [], []

    class Run:
        def __init__(self, name):
            self.name, self.over = name or "dainty-sunset-0", False

        def log(self, metrics, step=None):
            assert not self.over
            logged.append((step, metrics))

        def finish(self):
            self.over = True

    def init(project, name=None, config=None, resume="never", **more):
        assert resume == "allow"
        opened.append((project, name, config["title"], more))
        return Run(name)

    module = types.SimpleNamespace(init=init, __spec__=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio", module)
    session.subscribe(mirror := Trackio("tests", space_id="me/board"))
    session.run(3)
    session.run(3)
    assert opened == [
        ("tests", None, "Decoder", {"space_id": "me/board"}),
        ("tests", "dainty-sunset-0", "Decoder", {"space_id": "me/board"}),
    ]
    assert [step for step, values in logged if "train/loss" in values] == [1, 2, 3, 4, 5, 6]
    assert mirror.run.over


@pytest.mark.parametrize("make", [TensorBoard, Wandb, Trackio])
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, make):
    monkeypatch.setattr(mirrors, "find_spec", lambda name: None)
    with refused(ModuleNotFoundError):
        make("x")
