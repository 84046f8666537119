"""The benchmark of offloading: its arithmetic, the emulated device, and short runs of both its parts."""

import copy
import itertools
import json
import math
import sys
import threading
from typing import Any

import pytest
import torch

from surokit import environment
from surokit.bench import offload, offload_decoder, offload_emulated, offload_table, offload_ways, result, results_store
from surokit.bench.__main__ import main
from surokit.bench.configurations import MODELS, TINY, BenchWork
from surokit.bench.offload_decoder import Real, Trains
from surokit.bench.offload_emulated import Case, Emulated, Sleeper
from surokit.bench.offload_ways import AGAIN, CONTROL, NONE, WAYS, ZENFLOW, turn
from surokit.bench.process import Failed
from surokit.offload import link as links
from surokit.offload.counters import Accounts
from surokit.offload.link import HostLink
from surokit.planner.offload.formulas import stall_gain
from tests.clocks import Clock, until
from tests.offload.runs import waits
from tests.refusals import refused

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
    found = offload_table.figures(raw(), "made up")
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
    met = list(offload_table.figures(data, "made up")["bars"].values())
    assert met == [number not in missed for number in range(3)]
    assert offload_table.table(data).count("MISSED") == len(missed)


def test_the_table(tmp_path):
    text = offload_table.table(raw())
    assert "| made up | zenflow | 110.0 (110.0 to 110.0) | landing 9.0 | 90.0% (90.0% to 90.0%) | 1.818" in text
    assert "| 1.77 | 0.9000 + 0.2250 | 1.1250 |" in text
    assert "AdamW slowed by resting" in text
    result.write(raw(), tmp_path / "raw.json")
    page = result.filled("<!-- table: raw.json -->\n<!-- end of table -->", tmp_path)
    assert text in page


def test_commits_that_are_mixed_are_told():
    data = raw()
    assert "commits" not in offload_table.table(data)
    data["offload"]["made up/rates"]["commit"] = "abc"
    assert "- Measured with several commits, source unknown, abc: " in offload_table.table(data)


def test_only_whole_rounds_count():
    data = raw(rounds=3)
    del data["offload"][f"made up/1/{ZENFLOW}"]
    assert len(offload_table.turns_of(data, "made up")[NONE]) == 2
    for number in range(3):
        data["offload"].pop(f"made up/{number}/{NONE}")
    assert offload_table.table(data) == "No round is whole yet: call it again."


# -- the device


def test_what_is_emulated_is_taken_off_the_computing(monkeypatch):
    clock, device = Clock(), Sleeper(0.05)
    monkeypatch.setattr(offload_emulated, "time", clock)
    with device.works():
        clock.sleep(0.03)
    assert device.owed_s == pytest.approx(0.03)
    device.compute()
    assert clock.perf_counter() == pytest.approx(0.05)
    assert device.owed_s == 0
    device.owed_s = 0.12
    device.compute()
    assert clock.perf_counter() == pytest.approx(0.05)  # all of it was paid for
    assert device.owed_s == pytest.approx(0.07)


class Waited(Clock):
    """Time does not pass in another thread before this one waits."""

    main = threading.get_ident()

    def sleep(self, seconds):
        until(lambda: threading.get_ident() == self.main or waits(self.main))
        super().sleep(seconds)


def test_fill_and_take_are_the_devices_work_and_the_transfer_is_not(monkeypatch):
    clock, device = Waited(), Sleeper(0.0)
    for module in (offload_emulated, links):
        monkeypatch.setattr(module, "time", clock)
    link = offload_emulated.link_of(device, gb_s=1e-3)
    data = torch.arange(50_000, dtype=torch.uint8)  # 50 ms
    to = torch.empty_like(data)

    def fill(staging):
        staging.copy_(data)

    link.down(fill, to).wait()
    link.up(to, lambda staging: clock.sleep(0.02))
    link.close()
    assert torch.equal(to, data)
    assert device.worked_s == pytest.approx(0.02)
    assert link.device_stall_ms() == pytest.approx(50)


class Steps:
    """A way whose steps are counted, and take 5 ms each on a clock of their own."""

    window, parameters = 4, 0
    optimizer: Any = None

    def __init__(self):
        self.calls = []
        self.clock = Clock()

    def begin(self):
        self.calls.append("begin")

    def step(self):
        self.calls.append("step")
        self.clock.sleep(0.005)

    def over(self):
        return 0.01

    def close(self):
        self.calls.append("close")


def test_a_turn_begins_behind_a_window_and_is_not_charged_what_is_owed(monkeypatch):
    way = Steps()
    monkeypatch.setattr(offload_ways, "time", way.clock)
    found = turn(way, 8)
    assert way.calls == ["begin", *["step"] * 4, "begin", *["step"] * 8]
    assert found["steps"] == 8
    assert found["ms"] == pytest.approx((8 * 5 - 10) / 8)
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

    monkeypatch.setattr(offload_emulated, "Emulated", Model)
    monkeypatch.setattr(offload_emulated, "turn", turn)
    s = offload_emulated.setting(case, [Gradient()])
    assert s["compute_ms"] == pytest.approx(40)
    assert s["stalled"] == pytest.approx(case.stalled, rel=0.02)
    assert (s["rest_s"] > 0) == case.slowed


def test_what_no_computing_had_room_for_is_time():
    way = Emulated(NONE, [torch.ones(2, 2)], Sleeper(0.01), gb_s=1.0)
    for owed_s, off in ((0.004, 0.004), (0.5, 0.01)):
        way.device.owed_s = owed_s
        assert way.over() == off
        assert way.device.owed_s == 0


# -- runs


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(offload_emulated, "setting", lambda case, work: QUICK)
    out = tmp_path_factory.mktemp("offload") / "raw.json"
    data = offload.run(device="cpu", rounds=2, millions=0.02, cases=["AdamW"], out=out)
    yield data, out
    patch.undo()


def test_an_emulated_run(emulated):
    data, out = emulated
    assert json.loads(out.read_text()) == data
    assert offload_table.cases_of(data) == ["f = .5, AdamW", "f = .93, AdamW"]
    for case, interval in (("f = .5, AdamW", 4), ("f = .93, AdamW", 8)):
        turns = offload_table.turns_of(data, case)
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
    monkeypatch.setattr(offload.Bench, "rates_of", lambda *arguments: {})
    again = offload.run(device="cpu", rounds=2, millions=0.02, cases=["AdamW"], out=out)
    assert set(again["offload"]) == set(data["offload"])
    changed = [name for name, each in again["offload"].items() if each != data["offload"][name]]
    assert changed == [key]


def test_without_time_nothing_is_lost(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offload_emulated, "setting", lambda case, work: QUICK)
    data = offload.run(device="cpu", millions=0.02, minutes=1e-6, out=tmp_path / "raw.json")
    assert data["offload"] == {}
    assert "Call it again to go on" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    return offload.run(rehearse=True, rounds=2, out=tmp_path_factory.mktemp("offload") / "raw.json")


def test_a_rehearsal_of_the_gpus_part(rehearsed):
    data = rehearsed
    turns = offload_table.turns_of(data, "tiny, S = 4")
    assert [len(turns[way]) for way in WAYS] == [2] * 4
    found = offload_table.figures(data, "tiny, S = 4")
    assert found["down"] + found["up"] == pytest.approx(found["formula"], rel=0.02)
    assert math.isnan(found["explained"])  # waits of a host that runs ahead explain nothing
    text = offload_table.table(data)
    assert "the times mean nothing" in text
    assert data["offload"]["tiny, S = 4/rates"]["rates"]["predicted"]["gain"] > 0


def test_where_memory_is_short_ways_are_built_for_their_turns(tmp_path, monkeypatch):
    build, count, room = Real.build, itertools.count(), 2

    def first(self):
        build(self)
        if next(count) == room:
            raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr(Real, "build", first)
    monkeypatch.setattr(offload.Bench, "rates_of", lambda *arguments: {})
    data = offload.run(rehearse=True, rounds=2, out=tmp_path / "raw.json")
    assert all(each["alone"] for key, each in data["offload"].items() if "turn" in each)
    assert "built anew for each turn" in offload_table.table(data)


def test_a_way_that_fails_leaves_the_table_without_rounds(tmp_path, monkeypatch):
    build = Real.build

    def none_of_them(self):
        build(self)
        if self.way == NONE:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Real, "build", none_of_them)
    data = offload.run(rehearse=True, rounds=2, out=tmp_path / "raw.json")
    assert "none has not the memory it needs" in data["offload"][f"tiny, S = 4/0/{NONE}"]["failed"]
    assert "turn" in data["offload"][f"tiny, S = 4/1/{ZENFLOW}"]
    assert "No round is whole" in offload_table.table(data)


def test_a_way_that_lacks_memory_keeps_nothing(monkeypatch):
    def build(self):
        self.model = self.optimizer = object()
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Real, "build", build)
    closed = []
    monkeypatch.setattr(Real, "close", lambda self: closed.append(self))
    with refused(Failed) as caught:
        Real(ZENFLOW, Trains("", TINY, 4), BenchWork(), "cpu")
    assert caught.value.why == "memory"
    assert caught.value.__context__ is None  # whose frames would hold the model
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "1"], "at least 2 rounds"),
        (["--minutes", "0"], "minutes and millions above 0"),
        (["--device", "cpu", "--interval", "8"], "models, layers and interval are of the decoder on a GPU"),
        (["--device", "cpu", "--models", "4b"], "models, layers and interval are of the decoder on a GPU"),
        (["--device", "cpu", "--cases", "nothing"], "known are 'f = .5, AdamW'"),
        (["--rehearse", "--cases", "link"], "cases are of an emulated device"),
        (["--rehearse", "--interval", "0"], "interval=0: at least 1"),
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
    words = ["--rounds", "5", "--models", "4b", "8b", "--layers", "4", "--again", "--out", str(out)]
    assert main(["offload", *words]) == 0
    assert asked[0]["rounds"] == 5
    assert asked[0]["models"] == ["4b", "8b"]
    assert asked[0]["again"]
    assert asked[0]["layers"] == 4
    assert asked[0]["out"] == out
    assert "| made up | zenflow" in capsys.readouterr().out


# -- which decoders, and what becomes of a run that does not end well


def names_of(cases):
    return [case.name for case in cases if not case.left_out]


def test_decoders_are_chosen_by_free_memory():
    large = offload_decoder.cases(BenchWork(), (), None, 4, free_gib=78, host_gib=128)
    assert [case.name for case in large] == ["1.7b, S = 4", "4b, S = 4", "8b, S = 4"]
    assert names_of(large) == ["1.7b, S = 4"]
    assert not large[0].alone
    assert "GiB of the host as planned, and 70% of what is free are 90" in large[1].left_out
    assert "of the device as planned" in large[2].left_out
    assert names_of(offload_decoder.cases(BenchWork(), (), None, 4, 78, 1024)) == ["1.7b, S = 4", "4b, S = 4"]
    everything = offload_decoder.cases(BenchWork(), (), None, 8)
    assert names_of(everything) == ["1.7b, S = 8", "4b, S = 8", "8b, S = 8"]


def test_a_host_that_holds_one_way_holds_them_by_turns():
    case = offload_decoder.cases(BenchWork(), ("1.7b",), None, 4, host_gib=64)[0]
    assert not case.left_out
    assert set(case.alone) == {CONTROL, ZENFLOW}


def test_a_small_gpu_gets_fewer_layers():
    small = offload_decoder.cases(BenchWork(), (), None, 4, free_gib=22, host_gib=128)
    found = small[0]
    assert not found.left_out
    assert 1 <= found.shape["layers"] < MODELS["1.7b"]["layers"]
    assert found.name == f"1.7b of {found.shape['layers']} layers, S = 4"
    held, _ = offload_decoder.planned(found.shape, BenchWork(), NONE, 4)
    more, _ = offload_decoder.planned({**found.shape, "layers": found.shape["layers"] + 1}, BenchWork(), NONE, 4)
    assert held <= offload_decoder.ROOM * 22 < more
    # what was asked for by name is not replaced by something else
    assert offload_decoder.cases(BenchWork(), ("1.7b",), None, 4, free_gib=22, host_gib=128)[0].left_out
    assert (
        offload_decoder.cases(BenchWork(), ("1.7b",), 2, 4, free_gib=22, host_gib=128)[0].name
        == "1.7b of 2 layers, S = 4"
    )


def test_what_no_memory_holds_is_told(tmp_path, monkeypatch, capsys):
    here = environment.environment()
    monkeypatch.setattr(results_store, "environment", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(offload_decoder, "free_memory", lambda device: (1.0, 1.0))
    data = offload.run(device="cuda", out=tmp_path / "raw.json")
    assert "left_out" in data["offload"]["1.7b, S = 4/setting"]
    assert "GiB of the device as planned" in offload_table.table(data)


def test_steps_are_looked_at_by_themselves(rehearsed):
    for way, counted in ((NONE, 10), (CONTROL, 10), (ZENFLOW, 12)):
        seen = rehearsed["offload"][f"tiny, S = 4/steps/{way}"]["seen"]
        assert seen["steps"] == counted
        for name in ("compute_ms", "update_ms", "host_ms"):
            assert len(seen[name]) == counted
            assert all(ms > 0 for ms in seen[name])
        assert ("idle_ms" in seen) == (way != NONE)
    turn = rehearsed["offload"][f"tiny, S = 4/0/{ZENFLOW}"]["turn"]
    assert turn["model_bytes"] == 2 * rehearsed["offload"]["tiny, S = 4/rates"]["rates"]["parameters"]
    text = offload_table.table(rehearsed)
    assert "medians of single steps: " in text
    assert "landing as planned 0.0 ms, (1-k) M/B" in text


def test_landing_is_what_the_last_step_of_a_window_takes_longer():
    seen = {"update_ms": [1.0, 2.0, 1.0, 9.0, 1.0, 1.0, 1.5, 11.0]}
    assert offload_table.landing_ms(seen, 4) == pytest.approx(9.0)


def test_a_gpu_s_memory_is_in_the_table(rehearsed):
    data = copy.deepcopy(rehearsed)
    data["offload"][f"tiny, S = 4/steps/{ZENFLOW}"]["seen"] |= {"reserved_mib": [2048.0, 3072.0], "peak_mib": 1024.0}
    text = offload_table.table(data)
    assert "memory 1,024 MiB, reserved 2,048 after the first and 3,072 after the last of 12 steps" in text


class Counted:
    """An optimizer whose device was without work for 10 ms; of these its host waited 7, and the rest was for weights."""

    def __init__(self):
        self.accounts = Accounts(model_bytes=100)
        self.link = HostLink()

    def step(self):
        self.link.waited(10e-3)
        self.accounts.stall_by_cause["adam"] += 7.0
        self.accounts.stall_by_cause["landing"] += 20.0


def test_what_the_device_waits_where_weights_land_is_told_apart():
    class Offloads(Steps):
        optimizer: Any = Counted()

        def step(self):
            self.optimizer.step()

    found = turn(Offloads(), 4)
    assert found["idle_ms"] == pytest.approx(10)
    assert found["device_waits"] == pytest.approx(3)
    assert offload_table.waits([found]) == pytest.approx({"slot": 0, "adam": 7, "landing": 3, "selection": 0})


@pytest.fixture
def broken(monkeypatch):
    """ZenFlow's second turn fails, of another cause than memory; how often it was built is counted."""
    built: list[Real] = []
    step = Real.step

    def failing(self):
        if self.way == ZENFLOW and len(built) == 1 and self.steps_taken > 20:
            raise ValueError("made up\nand more")
        self.steps_taken += 1
        step(self)

    build = Real.build

    def counting(self):
        self.steps_taken = 0
        if self.way == ZENFLOW:
            built.append(self)
        build(self)

    monkeypatch.setattr(Real, "build", counting)
    monkeypatch.setattr(Real, "step", failing)
    monkeypatch.setattr(offload.Bench, "rates_of", lambda *arguments: {})
    return built


def test_what_fails_is_told_and_the_others_go_on(broken, tmp_path, capsys):
    out = tmp_path / "raw.json"
    data = offload.run(rehearse=True, rounds=3, out=out)
    failed = {key: each["failed"] for key, each in data["offload"].items() if "failed" in each}
    assert list(failed.values()) == ["ValueError: made up"]
    (key,) = failed
    assert key.endswith(ZENFLOW)
    assert len(broken) == 2  # the one that failed is not asked again
    assert f"- {key}: ValueError: made up" in offload_table.table(data)
    assert "Traceback" in capsys.readouterr().err
    assert all(len(turns) == 2 for turns in offload_table.turns_of(data, "tiny, S = 4").values())
    assert offload.run(rehearse=True, rounds=3, out=out)["offload"][key]["failed"]
    assert "turn" in offload.run(rehearse=True, rounds=3, out=out, again=True)["offload"][key]


def test_a_device_that_answers_no_more_ends_the_call_and_blames_no_one(broken, tmp_path, monkeypatch, capsys):
    out = tmp_path / "raw.json"
    monkeypatch.setattr(offload_decoder, "answers", lambda: False)
    assert main(["offload", "--rehearse", "--rounds", "3", "--out", str(out)]) == 2
    assert "The device answers no more, after ValueError: made up" in capsys.readouterr().err
    kept = json.loads(out.read_text())["offload"]
    assert not any("failed" in each for each in kept.values())
    assert sum("turn" in each for each in kept.values()) >= 4


DIES = """
import json, os, signal, sys
from surokit.bench import offload, process
from surokit.bench.offload_decoder import Real

task = json.loads(sys.argv[1])
dies_in, died = DIES_IN, task["path"] + ".died"
whole = getattr(Real, dies_in)

def dying(self):
    if self.way == "zenflow" and not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    return whole(self)

setattr(Real, dies_in, dying)
sys.exit(process.serve(lambda: offload._serving(task)))
"""


def rehearsed_apart(out, minutes=20.0):
    """A rehearsal whose models are measured as on a GPU, by processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "run_decoder", offload.in_a_process)
        return offload.run(rehearse=True, rounds=2, minutes=minutes, out=out)


@pytest.mark.parametrize(("dies_in", "what", "rounds"), [("begin", "zenflow", 1), ("build", "together", 2)])
def test_a_process_that_dies_costs_what_it_was_measuring(dies_in, what, rounds, tmp_path, monkeypatch, capsys):
    argv = [sys.executable, "-c", DIES.replace("DIES_IN", repr(dies_in))]
    monkeypatch.setattr(offload, "argv_of", lambda task: [*argv, json.dumps(task)])
    data = rehearsed_apart(tmp_path / "raw.json")
    failed = {key: each["failed"] for key, each in data["offload"].items() if "failed" in each}
    (key,) = failed
    assert "ended with exit status -11" in failed[key]
    assert failed[key] in capsys.readouterr().err
    assert data == json.loads((tmp_path / "raw.json").read_text())
    assert data["calls"][-1]["left"] == ""
    assert key.endswith(f"/{what}")
    assert len(offload_table.turns_of(data, "tiny, S = 4")[NONE]) == rounds  # that of the death is not whole
    assert data["offload"]["tiny, S = 4/rates"]["rates"]["predicted"]["gain"] > 0


def test_a_model_whose_processes_die_at_once_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(
        offload, "argv_of", lambda task: [sys.executable, "-c", "import sys; sys.exit('the device is lost')"]
    )
    data = rehearsed_apart(tmp_path / "raw.json")
    assert data["offload"]["tiny, S = 4/process"]["failed"].endswith("exit status 1: the device is lost")


def test_the_process_of_a_model_leaves_what_there_is_no_time_for(tmp_path, capsys):
    data = rehearsed_apart(tmp_path / "raw.json", minutes=1e-6)
    assert data["offload"] == {}
    assert data["calls"][-1]["left"] == "Next is tiny, S = 4, and no time is left."
    assert "Call it again to go on" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path, monkeypatch, capsys):
    take, out = offload.Bench.take_turn, tmp_path / "raw.json"

    def cut(self, turns, way, number):
        if number == 1:
            raise KeyboardInterrupt
        take(self, turns, way, number)

    monkeypatch.setattr(offload.Bench, "take_turn", cut)
    assert main(["offload", "--rehearse", "--out", str(out)]) == 130
    assert "what was finished is in the file" in capsys.readouterr().err
    data = json.loads(out.read_text())
    assert {key.partition("/")[2] for key in data["offload"]} == {
        "setting",
        *(f"0/{way}" for way in WAYS),
        *(f"steps/{way}" for way in (NONE, CONTROL, ZENFLOW)),
    }
    assert "1 rounds" in offload_table.table(data)


def test_a_turn_that_would_not_end_in_time_is_left_to_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setattr(offload.Bench, "step_s_of", lambda self, way: 3600.0)
    data = offload.run(rehearse=True, out=tmp_path / "raw.json")
    assert not any("turn" in each for each in data["offload"].values())
