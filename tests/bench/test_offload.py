"""The benchmark of offloading: its arithmetic, the emulated device, and short runs of both its parts."""

import itertools
import json
import math
import time
from typing import Any

import pytest
import torch

from surokit.bench import offload, result
from surokit.bench.__main__ import main
from surokit.bench.offload import AGAIN, CONTROL, NONE, WAYS, ZENFLOW, Case, Sleeper
from surokit.bench.process import Failed
from surokit.planner.offload import stall_gain

QUICK = {"compute_ms": 4.0, "emulated_ms": 2.0, "link_gb_s": 0.5, "rest_s": 1e-7, "stalled": 0.5, "tried": []}


def raw(rounds=6, zenflow_ms=110.0, up=0.225, landing=30.0):
    """A file of one case: C is 100 ms, and the control is stalled for as long."""
    case = {"name": "made up", "stalled": 0.5, "link": 0.25, "interval": 4}
    waits = {"slot": 0.0, "adam": 90.0, "landing": 10.0, "selection": 0.0}
    control: dict[str, Any] = {"ms": 200.0, "waits": waits, "device_waits": 10.0, "down": 1.0, "up": 1.0}
    zenflow = {"ms": zenflow_ms, "waits": {**waits, "adam": 0.0, "landing": landing}, "device_waits": 9.0}
    turns: dict[str, dict[str, Any]] = {
        NONE: {"ms": 100.0},
        CONTROL: control,
        AGAIN: control,
        ZENFLOW: {**zenflow, "down": 0.9, "up": up},
    }
    found = {
        f"made up/{number}/{way}": {"case": case, "what": way, "turn": {"steps": 4, **turns[way]}}
        for number in range(rounds)
        for way in WAYS
    }
    predicted = {"gain": 1.77}
    rates = {"link_gb_s": 1.0, "adam_params_s": 1e8, "zenflow_adam_params_s": 9e7, "adding_params_s": 3e8}
    found["made up/setting"] = {"case": case, "what": "setting", "setting": QUICK}
    found["made up/rates"] = {"case": case, "what": "rates", "rates": {**rates, "predicted": predicted}}
    environment = {"device": "cpu", "cpu": "some", "cores": 2, "torch": "2", "date": "today"}
    settings = {"parameters": 9}
    return {
        "benchmark": "offload: an emulated device",
        "settings": settings,
        "environment": environment,
        "offload": found,
    }


def test_figures():
    found = offload.figures(raw(), "made up")
    assert found["f"] == pytest.approx(0.5)
    assert found["gain"].mid == pytest.approx(200 / 110)
    assert found["removed"].mid == pytest.approx(0.9)  # 10 of 100 ms are left
    # where weights land the device waited 9 ms of the 30 that the host spent: 91 % of 100 ms by the accounts
    assert found["explained"] == pytest.approx(stall_gain(0.5, 0.91))
    assert found["needed"] == pytest.approx(1.74, abs=0.005)
    assert found["formula"] == pytest.approx(1.125)
    assert all(found["bars"].values())


@pytest.mark.parametrize(("change", "missed"), [({"zenflow_ms": 116.0}, {1, 2}), ({"up": 0.26}, {0})])
def test_bars_that_are_missed_are_told(change, missed):
    data = raw(**change)
    met = list(offload.figures(data, "made up")["bars"].values())
    assert met == [number not in missed for number in range(3)]
    assert offload.table(data).count("MISSED") == len(missed)


def test_the_table(tmp_path):
    text = offload.table(raw())
    assert "| made up | zenflow | 110.0 (110.0 to 110.0) | landing 9.0 | 90.0% (90.0% to 90.0%) | 1.818" in text
    assert "| 1.77 | 0.9000 + 0.2250 | 1.1250 |" in text
    assert "AdamW slowed by resting" in text
    result.write(raw(), tmp_path / "raw.json")
    page = result.filled("<!-- table: raw.json -->\n<!-- end of table -->", tmp_path)
    assert text in page


def test_only_whole_rounds_count():
    data = raw(rounds=3)
    del data["offload"][f"made up/1/{ZENFLOW}"]
    assert len(offload.turns_of(data, "made up")[NONE]) == 2
    for number in range(3):
        data["offload"].pop(f"made up/{number}/{NONE}")
    assert offload.table(data) == "No round is whole yet: call it again."


# -- the device


def test_what_is_emulated_is_taken_off_the_computing():
    device = Sleeper(0.05)
    with device.works():
        time.sleep(0.03)
    assert device.owed_s >= 0.03
    begun = time.perf_counter()
    device.compute()
    assert time.perf_counter() - begun > 0.01
    assert device.owed_s == 0
    device.owed_s = 0.12
    begun = time.perf_counter()
    device.compute()
    assert time.perf_counter() - begun < 0.04  # all of it was paid for
    assert device.owed_s == pytest.approx(0.07)


def test_fill_and_take_are_the_devices_work_and_the_transfer_is_not():
    device = Sleeper(0.0)
    link = offload._link(device, gb_s=1e-3)
    data = torch.arange(50_000, dtype=torch.uint8)  # 50 ms
    to = torch.empty_like(data)

    def fill(staging):
        staging.copy_(data)

    link.down(fill, to).wait()
    link.up(to, lambda staging: time.sleep(0.02))
    link.close()
    assert torch.equal(to, data)
    assert 0.02 <= device.worked_s < 0.05
    assert link.device_stall_ms() >= 40


class Steps:
    """A way whose steps are counted."""

    window, parameters, optimizer = 4, 0, None

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def step(self):
        self.calls.append("step")
        time.sleep(0.005)

    def over(self):
        return 0.01

    def close(self):
        self.calls.append("close")


def test_a_turn_begins_behind_a_window_and_is_not_charged_what_is_owed():
    way = Steps()
    found = offload.turn(way, 8)
    assert way.calls == ["begin", *["step"] * 4, "begin", *["step"] * 8]
    assert found["steps"] == 8
    assert 3.75 <= found["ms"] < 20
    assert found["owed_ms"] == 10


@pytest.mark.parametrize("case", [Case("adamw", 0.93, 0.5, 8), Case("link", 0.5, None, 8)])
def test_a_setting_brings_the_control_to_its_stall(case, monkeypatch):
    class Model:
        """Stalled for AdamW and, in part, for the link."""

        window, optimizer = 1, None

        def __init__(self, way, work, device, gb_s, rest_s=0.0, interval=1):
            self.ms = 1e3 * (1e-3 + rest_s * 1000 + 1.1e-3 * (2e-3 / gb_s)) + 1e3 * device.compute_s
            self.device = device

        def close(self):
            pass

    class Gradient:
        nbytes = 2000

        def numel(self):
            return 1000

    def turn(way, steps):
        way.device.worked_s += 2 * steps * 0.02
        return {"ms": way.ms}

    monkeypatch.setattr(offload, "Emulated", Model)
    monkeypatch.setattr(offload, "turn", turn)
    s = offload.setting(case, [Gradient()])
    assert s["compute_ms"] == pytest.approx(40)
    assert s["stalled"] == pytest.approx(case.stalled, rel=0.02)
    assert (s["rest_s"] > 0) == case.slowed


def test_what_no_computing_had_room_for_is_time():
    way = offload.Emulated(NONE, [torch.ones(2, 2)], Sleeper(0.01), gb_s=1.0)
    for owed_s, off in ((0.004, 0.004), (0.5, 0.01)):
        way.device.owed_s = owed_s
        assert way.over() == off
        assert way.device.owed_s == 0


# -- runs


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(offload, "setting", lambda case, work: QUICK)
    out = tmp_path_factory.mktemp("offload") / "raw.json"
    data = offload.run(device="cpu", rounds=2, millions=0.02, cases=["AdamW"], out=out)
    yield data, out
    patch.undo()


def test_an_emulated_run(emulated):
    data, out = emulated
    assert json.loads(out.read_text()) == data
    assert offload.cases_of(data) == ["f = .5, AdamW", "f = .93, AdamW"]
    for case, interval in (("f = .5, AdamW", 4), ("f = .93, AdamW", 8)):
        turns = offload.turns_of(data, case)
        for each in turns[CONTROL] + turns[AGAIN]:
            assert (each["down"], each["up"]) == (1, 1)
        for each in turns[ZENFLOW]:
            hot = 6 / 64  # floor(.1 * 64) columns of 64
            assert each["down"] == pytest.approx(1 - hot)
            assert each["up"] == pytest.approx((1 - hot) / interval)
            assert each["migrated"] == 0
            assert each["steps"] == interval
        assert all(each["ms"] > 4.0 for way in WAYS for each in turns[way])
        assert data["offload"][f"{case}/rates"]["rates"]["predicted"]["gain"] > 0


def test_the_same_command_goes_on(emulated, monkeypatch):
    data, out = emulated
    key = f"f = .5, AdamW/1/{NONE}"
    kept = json.loads(out.read_text())
    kept["offload"] = {name: each for name, each in kept["offload"].items() if name != key}
    out.write_text(json.dumps(kept))
    monkeypatch.setattr(offload.Bench, "_rates", lambda *arguments: {})
    again = offload.run(device="cpu", rounds=2, millions=0.02, cases=["AdamW"], out=out)
    assert set(again["offload"]) == set(data["offload"])
    changed = [name for name, each in again["offload"].items() if each != data["offload"][name]]
    assert changed == [key]


def test_without_time_nothing_is_lost(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offload, "setting", lambda case, work: QUICK)
    data = offload.run(device="cpu", millions=0.02, minutes=1e-6, out=tmp_path / "raw.json")
    assert data["offload"] == {}
    assert "Call it again to go on" in capsys.readouterr().err


def test_a_rehearsal_of_the_gpus_part(tmp_path):
    data = offload.run(rehearse=True, rounds=2, out=tmp_path / "raw.json")
    turns = offload.turns_of(data, "real steps")
    assert [len(turns[way]) for way in WAYS] == [2] * 4
    found = offload.figures(data, "real steps")
    assert found["down"] + found["up"] == pytest.approx(found["formula"], rel=0.02)
    assert math.isnan(found["explained"])  # waits of a host that runs ahead explain nothing
    text = offload.table(data)
    assert "the times mean nothing" in text
    assert data["offload"]["real steps/rates"]["rates"]["predicted"]["gain"] > 0


def test_where_memory_is_short_ways_are_built_for_their_turns(tmp_path, monkeypatch):
    build, count, room = offload.Real._build, itertools.count(), 2

    def first(self, interval):
        build(self, interval)
        if next(count) == room:
            raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr(offload.Real, "_build", first)
    monkeypatch.setattr(offload.Bench, "_rates", lambda *arguments: {})
    data = offload.run(rehearse=True, rounds=2, out=tmp_path / "raw.json")
    assert all(each["alone"] for key, each in data["offload"].items() if "turn" in each)
    assert "built anew for each turn" in offload.table(data)


def test_a_way_that_fails_leaves_the_table_without_rounds(tmp_path, monkeypatch):
    build = offload.Real._build

    def none_of_them(self, interval):
        build(self, interval)
        if self.way == NONE:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offload.Real, "_build", none_of_them)
    data = offload.run(rehearse=True, rounds=2, out=tmp_path / "raw.json")
    assert "none has not the memory it needs" in data["offload"][f"real steps/0/{NONE}"]["failed"]
    assert "turn" in data["offload"][f"real steps/1/{ZENFLOW}"]
    assert "No round is whole" in offload.table(data)


def test_a_way_that_lacks_memory_keeps_nothing(monkeypatch):
    def build(self, interval):
        self.model = self.optimizer = object()
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(offload.Real, "_build", build)
    closed = []
    monkeypatch.setattr(offload.Real, "close", lambda self: closed.append(self))
    with pytest.raises(Failed, match="zenflow has not the memory") as caught:
        offload.Real(ZENFLOW, offload.Work({}), "cpu", 4)
    assert caught.value.why == "memory"
    assert caught.value.__context__ is None  # whose frames would hold the model
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "1"], "at least 2 rounds"),
        (["--minutes", "0"], "minutes and millions above 0"),
        (["--device", "cpu", "--interval", "8"], "layers and interval are of the decoder on a GPU"),
        (["--device", "cpu", "--cases", "nothing"], "known are 'f = .5, AdamW'"),
    ],
)
def test_what_cannot_be_measured(arguments, words, capsys, tmp_path):
    assert main(["offload", *arguments, "--out", str(tmp_path / "raw.json")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys, tmp_path):
    assert main(["offload", "--device", "cuda", "--out", str(tmp_path / "raw.json")]) == 2
    assert "without --device cuda the device is emulated" in capsys.readouterr().err


def test_the_command(monkeypatch, tmp_path, capsys):
    asked = []

    def run(**options):
        asked.append(options)
        return raw()

    monkeypatch.setattr(offload, "run", run)
    out = tmp_path / "raw.json"
    assert main(["offload", "--rounds", "5", "--layers", "4", "--out", str(out)]) == 0
    assert asked[0]["rounds"] == 5
    assert asked[0]["layers"] == 4
    assert asked[0]["out"] == out
    assert "| made up | zenflow" in capsys.readouterr().out
