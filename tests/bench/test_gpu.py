"""The benchmark of a GPU, on a processor: every line of it rehearsed, its clock, its file, and what it refuses to say."""

import csv
import json
import math
import re
import sys
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.bench import correct, gpu, gpu_table, process, result, results_store, worker
from surokit.bench.__main__ import main
from surokit.bench.configurations import PARTS, TINY, BenchGroup, BenchWork, Configuration
from surokit.bench.corpus import corpus
from surokit.bench.process import Failed, Worker
from surokit.bench.targets import TARGETS
from surokit.bench.turns import OutOfTime, Running
from surokit.environment import environment
from surokit.fusion import OFF
from surokit.kernels import Choice
from surokit.train.session import Session
from tests.refusals import refused

CPU = torch.device("cpu")
PLAN = {"gib": 5.0, "memory_gib": 80.0, "flops_per_token": 3e9, "peak_tflops": 989.0, "floor_ms": 50.0}
PLAN |= {"predicted_tokens_per_s": 50e3}


@pytest.fixture(autouse=True)
def _fixed_source(monkeypatch):
    monkeypatch.setattr(results_store, "source", lambda: "0123456789abcdef")


# -- a rehearsal of all of it


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_store, "source", lambda: "0123456789abcdef")
        assert main(["gpu", "--rehearse", "--out", str(out)]) == 0
    return out


def test_a_rehearsal_measures_everything(rehearsal):
    data = json.loads(rehearsal.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["rehearsal"]
    found = data["gpu"]
    assert not [key for key, each in found.items() if "failed" in each]
    left_out = {each["name"] for each in found.values() if "left_out" in each}
    for part in PARTS.values():
        for group in part.groups:
            for c in group.configurations:
                if c.name not in left_out:
                    turn = found[f"turn/{group.name}/0/{c.system}"]
                    assert turn["tokens_per_s"] > 0
                    assert turn["peak_mib"] > 0
                    assert len(turn["first"]["losses"]) == turn["first"]["warm_up_steps"] == 2
    assert all("unsloth" in name or "torch.compile" in name for name in left_out)
    (sustained,) = [each for each in found.values() if each["what"] == "sustained"]
    assert sustained["steps"] >= 2
    assert sustained["minutes"] > 0
    start = found["start/0.6b lora fp8"]
    assert start["empty"]["all_s"] >= start["empty"]["first_step_s"] > 0
    assert {each["what"] for each in found.values()} >= {"turn", "profile", "correct", "ceilings", "plan", "start"}


def test_a_rehearsal_checks_and_plans_before_it_measures(rehearsal):
    found = json.loads(rehearsal.read_text())["gpu"]
    checked = [each for each in found.values() if each["what"] == "correct"]
    assert len(checked) == 20
    for each in checked:
        assert each["fused"]["ok"]
        assert each["graphs"]["ok"]
        assert each["graphs"]["runs"]["eager"]["targets"][0] > 0
    first_turn = next(i for i, key in enumerate(found) if key.startswith("turn/"))
    assert list(found).index("correct/0.6b lora fp8") < list(found).index("ceilings/device") < first_turn
    products = found["ceilings/0.6b"]["products"]
    assert [p["product"] for p in products] == ["q, k, v", "o", "gate, up", "down", "head"]
    assert all(p["bf16_tflops"] > 0 and p["fp8_tflops"] is None for p in products)


def test_a_second_call_has_nothing_left_to_do(rehearsal, capsys):
    before = json.loads(rehearsal.read_text())["gpu"]
    data = gpu.run(["full", "start"], out=rehearsal, rehearse=True)
    measured = {key: each for key, each in before.items() if "left_out" not in each}
    assert {key: data["gpu"][key] for key in measured} == measured
    assert "Nothing is left of full, start." in capsys.readouterr().err


def test_the_numbers_of_a_rehearsal_are_refused(rehearsal, tmp_path):
    data = json.loads(rehearsal.read_text())
    with refused(ValueError):
        gpu_table.table(data)
    (tmp_path / "gpu.json").write_text(rehearsal.read_text())
    with refused(ValueError):
        result.filled("<!-- table: gpu.json -->\n<!-- end of table -->", tmp_path)
    with rehearsal.with_suffix(".csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["rehearsal"] for line in lines} == {"True"}
    assert len(lines) == sum(each["what"] == "turn" for each in data["gpu"].values())


# -- one call: the clock, the turns, what goes wrong


class FakeSystems:
    """Systems whose steps take a second each on a clock of their own. `rules` say what goes wrong, by name."""

    def __init__(self, clock, **rules):
        self.work, self.rehearse, self.open = BenchWork(), False, set()
        self.clock, self.rules, self.said = clock, rules, []

    def shape(self, model):
        return TINY

    def missing(self, c):
        return self.rules.get("missing", {}).get(c.name, "")

    def preparing(self, until_s, environment=None):
        return Answering(self, "prepare")

    def training(self, c, until_s, sample_every=0, environment=None):
        self._wrong("open", c.name)
        self.said.append(f"open {c.system}")
        return Running(Answering(self, c.name), 8, until_s, steady=2)

    def _wrong(self, where, name):
        rule = self.rules.get(where, {}).get(name)
        if rule is not None and (problem := rule(self)):
            raise problem


class Answering:
    def __init__(self, systems, name):
        self.systems, self.name, self.steps = systems, name, 0
        self.ready: dict[str, Any] = {"build_s": 1.0}
        systems.open.add(name)

    def ask(self, request, timeout_s=0.0):
        self.systems._wrong("ask", self.name)
        if "definition" in request.get("check", {}):
            self.systems._wrong("smoke", request["check"]["recipe"])
            fused, graphs = self.systems.rules.get("smoked", {}).get(request["check"]["recipe"], (True, True))
            worst = {"name": "norm.weight", "fused": 0.5, "apart": 0.01}
            return {"fused": {"ok": fused, "worst": worst}, "graphs": {"ok": graphs}}
        if "check" in request:
            verdicts = self.systems.rules.get("check", {})
            ok = verdicts.get(request["check"]["recipe"], (True, True))
            return {"fused": {"ok": ok[0]}, "graphs": {"ok": ok[1]}}
        if "choices" in request:
            return {"choices": [], **self.systems.rules.get("choices", {})}
        if "device" in request:
            return {"gpu": {"name": "made up", "memory_gib": 80.0}, "notes": []}
        if "model" in request:
            return {"tokens": 1, "products": []}
        if "profile" in request:
            return {"idle": 0.01, "launches": 0.0, "graph_launches": 3.0}
        if self.steps >= WARM:
            self.systems.said.append(self.name.split(" ", 2)[2])
        steps = request["steps"]
        self.steps += steps
        self.systems.clock.now += steps
        return {"seconds": steps, "steps": steps, "tokens": 16384 * steps, "losses": [3.0] * steps, "peak_mib": 2048.0}

    def close(self):
        self.systems.open.discard(self.name)
        if self.name != "prepare":
            self.systems.said.append(f"close {self.name.split(' ', 2)[2]}")


WARM = 10  # steps of a system before its first turn: eight of warm-up, two more


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("surokit.bench.turns.time.monotonic", clock)
    monkeypatch.setattr(gpu, "planned", lambda c, *rest: PLAN)
    return clock


def bench_of(tmp_path, clock, seconds=1e4, **rules):
    notes = results_store.Book(tmp_path / "gpu.json", "gpu", {"benchmark": "gpu", "rehearsal": False}, {})
    systems: Any = FakeSystems(clock, **rules)
    return gpu.Bench(notes, systems, gpu.Pace(), clock.now + seconds)


def group_of(*recipes, rounds=2, model="0.6b"):
    return BenchGroup("g", tuple(Configuration(model, recipe) for recipe in recipes), rounds)


def measure(bench, group):
    bench.prepare(group.configurations)
    bench.run_group(group)
    return bench.systems.said


def test_systems_take_turns_and_stay(tmp_path, clock):
    bench = bench_of(tmp_path, clock)
    said = measure(bench, group_of("bf16", "fp8"))
    assert said == ["open bf16", "bf16", "open fp8", "fp8", "bf16", "fp8", "close bf16", "close fp8"]
    assert bench.book["turn/g/1/fp8"]["steps"] == 4  # a turn of four seconds
    assert not bench.book["turn/g/1/fp8"]["alone"]
    assert bench.book["profile/g/fp8"]["idle"] == 0.01


def test_without_room_for_all_some_are_built_anew(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(gpu, "planned", lambda c, *rest: {**PLAN, "gib": 30.0})
    bench = bench_of(tmp_path, clock)
    said = measure(bench, group_of("bf16", "fp8", "qfp8", rounds=1))
    assert said == [
        "open bf16",
        "bf16",
        "open fp8",
        "fp8",
        "close fp8",
        "open qfp8",
        "qfp8",
        "close qfp8",
        "close bf16",
    ]
    assert bench.book["turn/g/0/qfp8"]["alone"]
    assert gpu.resident([30, 30, 30], 72) == 1
    assert gpu.resident([30, 30], 60) == 2
    assert gpu.resident([50, 30], 60) == 0
    assert gpu.resident([20, 20, 30], 69) == 1
    assert gpu.resident([], 60) == 0


def test_out_of_memory_beside_others_is_tried_alone(tmp_path, clock):
    full = {"0.6b lora fp8": lambda systems: Failed("CUDA out of memory") if systems.open else None}
    bench = bench_of(tmp_path, clock, open=full)
    said = measure(bench, group_of("bf16", "fp8", rounds=1))
    assert said == ["open bf16", "bf16", "close bf16", "open fp8", "fp8", "close fp8"]
    assert bench.book["turn/g/0/fp8"]["alone"]
    assert "failed" not in bench.book["turn/g/0/fp8"]


def test_out_of_memory_alone_is_a_failure_and_the_others_go_on(tmp_path, clock):
    bench = bench_of(tmp_path, clock, open={"0.6b lora fp8": lambda systems: Failed("CUDA out of memory")})
    said = measure(bench, group_of("fp8", "bf16"))
    assert bench.book["turn/g/0/fp8"]["failed"] == "CUDA out of memory"
    assert "turn/g/1/fp8" not in bench.book
    assert said.count("bf16") == 2


def test_what_does_not_fit_is_left_out_with_the_reason(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(gpu, "planned", lambda c, *rest: {**PLAN, "gib": 90.0 if c.recipe == "fp8" else 5.0})
    bench = bench_of(tmp_path, clock)
    assert "fp8" not in measure(bench, group_of("fp8", "bf16"))
    assert bench.book["turn/g/0/fp8"]["left_out"] == "It needs 90 GiB as planned, and the device has 80."


@pytest.mark.parametrize(
    ("verdict", "c", "reason"),
    [
        ((False, True), Configuration("0.6b", "fp8"), "Fused, it is not"),
        ((True, False), Configuration("0.6b", "fp8"), "Replayed as graphs, it is not"),
        ((False, True), Configuration("0.6b", "fp8", without=("norm", "gate", "joint", "adapters", "qk")), ""),
        ((True, False), Configuration("0.6b", "fp8", graphs=False), ""),
        ((False, False), Configuration("0.6b", "fp8", graphs=False, compile=True), ""),
        ((False, False), Configuration("0.6b", "bf16"), ""),
    ],
)
def test_what_is_not_right_is_timed_and_called_unchecked(tmp_path, clock, verdict, c, reason):
    bench = bench_of(tmp_path, clock, check={"fp8": verdict})
    measure(bench, BenchGroup("g", (c,), 1))
    found = bench.book[f"turn/g/0/{c.system}"]
    assert found["tokens_per_s"] > 0
    assert found.get("unchecked", "").startswith(reason)
    assert ("unchecked" in found) == ("unchecked" in bench.book[f"profile/g/{c.system}"]) == bool(reason)


def test_after_a_check_that_breaks_a_figure_is_unchecked_too(tmp_path, clock):
    bench = bench_of(tmp_path, clock, ask={"prepare": lambda systems: Failed("an illegal memory access")})
    measure(bench, group_of("bf16", rounds=1))
    found = bench.book["turn/g/0/bf16"]
    assert found["unchecked"] == "Its check failed: an illegal memory access"
    assert found["tokens_per_s"] > 0


# -- the smoke test


def test_each_recipe_is_held_against_the_definition(rehearsal):
    found = {key: each for key, each in json.loads(rehearsal.read_text())["gpu"].items() if each["what"] == "smoke"}
    assert {key.partition("/")[2].partition(" ")[0] for key in found} == set(sk.recipes)
    assert all(each["fused"]["ok"] and each["graphs"]["ok"] for each in found.values())
    assert "smoke/bf16 lora" in list(found)[:1]


def test_a_step_that_is_not_the_definitions_is_named_and_its_figures_are_unchecked(tmp_path, clock, capsys):
    bench = bench_of(
        tmp_path,
        clock,
        smoked={"fp8": (False, True), "qfp8": (True, False)},
        smoke={"qnf4": lambda systems: Failed("it died")},
    )
    bench.part(PARTS["smoke"])
    far = (
        "In the smoke test its step is not the definition's: the gradient of norm.weight is 0.5 from float32's, and the "
        "definition's 0.01."
    )
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("NOT RIGHT")] == [
        f"NOT RIGHT: fp8 lora. {far}",
        "NOT RIGHT: qfp8 lora. In the smoke test its step replayed as graphs is not what it is launched one by one.",
        "NOT RIGHT: qnf4 lora. Its smoke test failed: it died",
        f"NOT RIGHT: fp8 full. {far}",
    ]
    eager = Configuration("0.6b", "qfp8", graphs=False)
    measure(bench, BenchGroup("g", (*(Configuration("0.6b", r) for r in ("bf16", "fp8", "qfp8", "qnf4")), eager), 1))
    unchecked = {key: each["unchecked"].split(":")[0] for key, each in bench.book.found.items() if "unchecked" in each}
    assert unchecked == {
        f"{what}/g/{number}{recipe}": why
        for recipe, why in (
            ("fp8", "In the smoke test its step is not the definition's"),
            ("qfp8", "In the smoke test its step replayed as graphs is not what it is launched one by one."),
            ("qnf4", "Its smoke test failed"),
        )
        for what, number in (("turn", "0/"), ("profile", ""))
    }
    assert all(bench.book[key]["tokens_per_s"] > 0 for key in unchecked if key.startswith("turn/"))


def test_a_smoke_test_without_time_goes_on_in_the_next_call(tmp_path, clock):
    asked = []

    def slow(systems):
        asked.append(1)
        clock.now += 100

    bench = bench_of(tmp_path, clock, seconds=150, smoke=dict.fromkeys(sk.recipes, slow))
    bench.pace = gpu.Pace(smoke_beside=1)
    with refused(OutOfTime):
        bench.part(PARTS["smoke"])
    assert len(asked) == 2
    bench = bench_of(tmp_path, clock, smoke=dict.fromkeys(sk.recipes, slow))
    bench.part(PARTS["smoke"])
    assert len(asked) == len(PARTS["smoke"].smoke)


def test_what_serves_each_operation_is_in_the_file(rehearsal):
    found = json.loads(rehearsal.read_text())["gpu"]["choices"]
    backends = {row["op"]: (row["backend"], row["missed"]) for row in found["choices"]}
    assert backends["transpose_fp8"] == backends["transpose_fp4"] == ("reference", "")
    assert "missed" not in found


TRITON = "transpose_fp8, transpose_fp4 by triton: kernels/triton/transpose, since there is no nvcc"


def test_a_kernel_that_is_not_the_first_choice_is_named_with_the_reason(monkeypatch):
    why, slow = "kernels/triton/transpose, since there is no nvcc", "kernels/triton/mx needs compute capability 8.9"
    rows = [Choice("amax", "triton", "kernels/triton/quantize")]
    rows += [Choice(op, "triton", why, "there is no nvcc") for op in ("transpose_fp8", "transpose_fp4")]
    rows += [Choice("quantize_mx", "reference", slow, slow)]
    monkeypatch.setattr(worker, "choices", lambda device: rows)
    found = worker._prepare({"choices": True}, CPU)
    assert [row["op"] for row in found["choices"]] == ["amax", "transpose_fp8", "transpose_fp4", "quantize_mx"]
    assert found["missed"] == f"{TRITON}; quantize_mx by reference: {slow}"


def test_the_smoke_test_says_what_is_not_the_first_choice(tmp_path, clock, capsys):
    bench = bench_of(tmp_path, clock, choices={"missed": TRITON})
    for _ in range(2):  # it is asked once, and said in each call
        bench.part(PARTS["smoke"])
        assert f"NOT THE FIRST CHOICE: {TRITON}\n" in capsys.readouterr().err
    assert bench.book["choices"]["missed"] == TRITON
    (tmp_path / "gpu.json").unlink()
    bench_of(tmp_path, clock).part(PARTS["smoke"])
    assert "FIRST CHOICE" not in capsys.readouterr().err


def test_what_was_not_right_is_looked_at_again_where_that_is_asked_for():
    right = {"fused": {"ok": True}, "graphs": {"ok": True}}
    asked: dict[str, dict[str, Any]] = {
        "smoke": {"what": "smoke", **right, "graphs": {"ok": False}},
        "correct": {"what": "correct", **right, "fused": {"ok": False}},
        "unchecked": {"what": "turn", "tokens_per_s": 1.0, "unchecked": "why"},
        "failed": {"what": "turn", "failed": "why"},
        "plan": {"what": "plan"},
        "choices": {"what": "choices", "missed": "why"},
        "first": {"what": "choices"},
        "right": {"what": "smoke", **right},
        "turn": {"what": "turn", "tokens_per_s": 1.0},
    }
    assert [name for name, found in asked.items() if gpu.in_question(found)] == [*asked][:6]


# -- one call: how it ends


def test_a_call_ends_in_time_and_the_next_goes_on(tmp_path, clock, monkeypatch):
    group = group_of("bf16", "fp8", rounds=3)
    monkeypatch.setattr(gpu, "OPENS_S", 20.0)
    bench = bench_of(tmp_path, clock, seconds=30)  # the first one took 14
    with refused(OutOfTime):
        measure(bench, group)
    assert bench.systems.said == ["open bf16", "bf16", "close bf16"]
    kept = bench.book["turn/g/0/bf16"]
    again = bench_of(tmp_path, clock)
    said = measure(again, group)
    assert said[:4] == ["open fp8", "fp8", "open bf16", "bf16"]
    assert again.book["turn/g/0/bf16"] == kept
    assert [again.book[f"turn/g/{n}/bf16"]["call"] for n in range(3)] == [0, 1, 1]
    # turns of one round in two calls are no pair
    bf16, fp8 = gpu_table.rows(again.book.data)["g"]
    assert len(fp8.turns) == len(bf16.turns) == 3
    assert len(fp8.ratios(bf16)) == 2


def test_a_loss_that_is_no_number_gives_no_speed(tmp_path, clock, monkeypatch):
    ask = Answering.ask

    def broken(self, request, timeout_s=0.0):
        answer = ask(self, request, timeout_s)
        return answer | {"losses": [3.0, math.nan]} if "losses" in answer else answer

    monkeypatch.setattr(Answering, "ask", broken)
    bench = bench_of(tmp_path, clock)
    measure(bench, group_of("bf16"))
    assert "not finite" in bench.book["turn/g/0/bf16"]["failed"]
    assert "tokens_per_s" not in bench.book["turn/g/0/bf16"]


def test_a_system_may_take_so_long_in_all(tmp_path, clock):
    bench = bench_of(tmp_path, clock, seconds=1000)
    first = bench.measure("a", 30.0, lambda until_s: {"until": until_s}, {})
    second = bench.measure("b", 990.0, lambda until_s: {"until": until_s}, {})
    assert (first["until"], second["until"]) == (clock.now + 30 + gpu.LATE_S, clock.now + 1000)
    clock.now += 999
    assert process.left_s(clock.now + 5) == 5
    assert process.left_s(clock.now - 5) == 0


def test_what_failed_is_measured_again_where_that_is_asked_for(tmp_path):
    out = tmp_path / "gpu.json"
    data = gpu.run(["start"], out=out, rehearse=True)
    for each in data["gpu"].values():
        if each["what"] == "start":
            each |= {"failed": "it broke"}
    result.write(data, out)
    assert "failed" in gpu.run(["start"], out=out, rehearse=True)["gpu"]["start/0.6b lora fp8"]
    assert "failed" not in gpu.run(["start"], out=out, rehearse=True, again=True)["gpu"]["start/0.6b lora fp8"]


def test_what_was_measured_says_how_long_the_next_start_takes(tmp_path, clock):
    bench = bench_of(tmp_path, clock)
    assert bench.opens_s("0.6b") == gpu.OPENS_S
    measure(bench, group_of("bf16", rounds=1))
    assert bench.opens_s("0.6b") == pytest.approx(1.25 * 10)
    assert bench.opens_s("8b") == gpu.OPENS_S


def test_late_with_little_time_is_no_failure(tmp_path, clock):
    bench = bench_of(tmp_path, clock, seconds=300, open={"0.6b lora bf16": lambda systems: Failed("late", "late")})
    with refused(OutOfTime):
        measure(bench, group_of("bf16"))
    assert "turn/g/0/bf16" not in bench.book
    bench = bench_of(tmp_path, clock, open={"0.6b lora bf16": lambda systems: Failed("too late", "late")})
    measure(bench, group_of("bf16"))
    assert bench.book["turn/g/0/bf16"]["failed"] == "too late"


def test_a_peer_that_is_missing_takes_no_room_and_is_asked_for_again_in_the_next_call(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(gpu, "planned", lambda c, *rest: {**PLAN, "gib": 30.0})
    peer = Configuration("0.6b", "bf16", peer="unsloth")
    group = BenchGroup("g", (Configuration("0.6b"), Configuration("0.6b", "fp8"), peer), 2)
    bench = bench_of(tmp_path, clock, missing={peer.name: "unsloth: unsloth is not installed"})
    said = measure(bench, group)
    assert said == ["open bf16", "bf16", "open fp8", "fp8", "bf16", "fp8", "close bf16", "close fp8"]
    assert bench.book["turn/g/0/unsloth bf16"]["left_out"] == "unsloth: unsloth is not installed"
    assert "turn/g/1/unsloth bf16" not in bench.book
    bench = bench_of(tmp_path, clock)
    said = measure(bench, group)
    assert said[:2] == ["open unsloth bf16", "unsloth bf16"]
    assert "profile/g/unsloth bf16" not in bench.book


# -- the file


def test_another_device_or_version_is_refused(tmp_path, monkeypatch):
    head = {"benchmark": "gpu", "rehearsal": False, "settings": {"batch": 2}}
    results_store.Book(tmp_path / "gpu.json", "gpu", head, {}).put("a", {"x": 1.0})
    results_store.Book(tmp_path / "gpu.json", "gpu", head, {})
    here = environment()
    for changed in ({"device": "NVIDIA H200"}, {"torch": "2.11.0"}):
        with monkeypatch.context() as patch:
            patch.setattr(results_store, "environment", lambda changed=changed: {**here, **changed})

            with refused(ValueError):
                results_store.Book(tmp_path / "gpu.json", "gpu", head, {})
    with refused(ValueError):
        results_store.Book(tmp_path / "gpu.json", "gpu", {**head, "settings": {"batch": 4}}, {})
    assert results_store.next_free(tmp_path / "gpu.json") == tmp_path / "gpu-2.json"
    assert results_store.next_free(tmp_path / "new.json") == tmp_path / "new.json"


def test_a_figure_keeps_the_commit_that_it_came_from(tmp_path, monkeypatch, clock):
    group, changed = group_of("bf16", rounds=2), group_of("bf16", "fp8", rounds=2)
    bench = bench_of(tmp_path, clock)
    measure(bench, group)
    kept = dict(bench.book.found)
    monkeypatch.setattr(results_store, "source", lambda: "other")
    monkeypatch.setattr(results_store, "commit", lambda: "fixed")
    again = bench_of(tmp_path, clock, check={"fp8": (True, True)})
    measure(again, changed)
    assert {key: again.book[key] for key in kept if key.startswith("turn/")} == {
        key: each for key, each in kept.items() if key.startswith("turn/")
    }
    assert again.book["turn/g/0/fp8"]["commit"] == "fixed"
    assert again.book.current("turn/g/0/fp8")
    assert not again.book.current("turn/g/0/bf16")
    bf16 = [kept["turn/g/0/bf16"]]
    assert results_store.commits(again.book.data, again.book.found.values()) == [
        *results_store.commits(bench.book.data, bf16),
        "fixed",
    ]
    assert results_store.commits({"environment": {"commit": None, "source": "12"}}, [{}]) == ["source 12"]


def test_a_check_of_other_sources_says_nothing_of_these(tmp_path, monkeypatch, clock):
    bench_of(tmp_path, clock).book.put("correct/0.6b lora fp8", {"what": "correct", "failed": "it broke"})
    monkeypatch.setattr(results_store, "source", lambda: "other")
    bench = bench_of(tmp_path, clock)
    measure(bench, group_of("fp8"))
    assert bench.book["correct/0.6b lora fp8"]["fused"]["ok"]
    assert "unchecked" not in bench.book["turn/g/0/fp8"]


@pytest.mark.parametrize("text", ["{", "[]", '{"environment": {}}', '{"kernels": []}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    (tmp_path / "gpu.json").write_text(text)
    with refused(ValueError):
        results_store.Book(tmp_path / "gpu.json", "gpu", {"benchmark": "gpu"}, {})
    assert (tmp_path / "gpu.json").read_text() == text


def test_a_measurement_is_in_the_file_at_once_and_any_reader_reads_it(tmp_path):
    notes = results_store.Book(tmp_path / "gpu.json", "gpu", {"benchmark": "gpu"}, {})
    notes.put("a", {"x": math.nan, "y": [1.0, math.inf], "z": {"w": (2.0,)}})
    read = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=pytest.fail)["gpu"]["a"]
    assert (read["x"], read["y"], read["z"]) == (None, [1.0, None], {"w": [2.0]})
    assert list(tmp_path.iterdir()) == [tmp_path / "gpu.json"]


def test_the_fingerprint_is_of_what_is_measured(monkeypatch):
    monkeypatch.undo()
    assert results_store.source() == results_store.source()
    assert len(results_store.source()) == 16


def test_bad_arguments_are_one_sentence(capsys, tmp_path):
    assert main(["gpu", "--part", "nonsense", "--rehearse"]) == 2
    assert "There is no part 'nonsense': known are smoke, must, sizes," in capsys.readouterr().err
    assert main(["gpu", "--minutes", "0", "--rehearse"]) == 2
    assert "minutes=0.0: a number above zero" in capsys.readouterr().err
    (tmp_path / "a file").touch()
    there = tmp_path / "there" / "gpu.json"
    for out, why in (
        (tmp_path, f"{tmp_path} is a folder"),
        (tmp_path / "a file" / "gpu.json", "cannot be written"),
        (there, f"There is no folder {there.parent}: make it first, or give another --out."),
    ):
        for command in (["gpu", "--rehearse"], ["predicted"]):
            assert main([*command, "--out", str(out)]) == 2
            assert why in capsys.readouterr().err
    assert not there.parent.exists()
    assert main(["tables", str(tmp_path / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err
    assert main(["gpu", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PARTS)


def test_an_interrupted_call_says_what_is_kept(capsys, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run", interrupted)
    assert main(["gpu", "--rehearse", "--out", str(tmp_path / "gpu.json")]) == 130
    assert "stopped; what was finished is in the file, and the same command goes on." in capsys.readouterr().err


def test_a_session_that_was_interrupted_measures_nothing():
    ids = torch.randint(32, (2, 8))
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=16, heads=1, kv_heads=1, vocab=32, ffn=32))

    def stops(session):
        session.stop()
        return {}

    session = sk.Session(model, [{"input_ids": ids, "labels": ids}], schedule=None, meters=[stops])
    with pytest.raises(KeyboardInterrupt):
        correct.run(session, 5)
    assert session.steps < 5


# -- processes


def script(tmp_path, *lines):
    path = tmp_path / "worker.py"
    path.write_text("import json, sys, time\nprint('{\"ready\": true}', flush=True)\n" + "\n".join(lines))
    return [sys.executable, str(path)]


def test_a_process_answers_line_by_line(tmp_path):
    echo = script(tmp_path, "for line in sys.stdin:", " print(json.dumps({'got': json.loads(line)}), flush=True)")
    with Worker(echo, "echo") as worker:
        assert worker.ready == {"ready": True}
        assert worker.ask({"steps": 2}) == {"got": {"steps": 2}}
        assert worker.ask({"steps": 3}) == {"got": {"steps": 3}}


@pytest.mark.parametrize(
    ("line", "message", "why"),
    [
        ("sys.exit('the last word')", "W ended with exit status 1: the last word", ""),
        ('print(\'{"error": "it broke"}\')', "it broke", ""),
        ('print(\'{"error": "CUDA out of memory. Tried"}\')', "CUDA out of memory. Tried", "memory"),
        ('print(\'{"missing": "not installed"}\')', "not installed", "missing"),
        ("print('Hello')", "W answered 'Hello', which is no JSON object.", ""),
        ("time.sleep(60)", "W took longer than 0 s.", "late"),
    ],
)
def test_what_a_process_cannot_do_is_one_sentence(tmp_path, line, message, why):
    with Worker(script(tmp_path, "sys.stdin.readline()", line), "W") as worker:
        with pytest.raises(Failed) as failed:
            worker.ask({}, timeout_s=0.2 if why == "late" else 60)
        assert (str(failed.value), failed.value.why) == (message, why)
        if why == "late":
            with refused(Failed):
                worker.ask({})


def test_a_worker_trains_in_a_process_of_its_own(tmp_path):
    from surokit.bench.systems import Systems

    systems = Systems(BenchWork(1, 16, 1, 4), 2, True, tmp_path)
    task = systems._task(Configuration("0.6b", "bf16"), 0) | {"device": "cpu"}
    with Worker([sys.executable, "-m", "surokit.bench.worker", json.dumps(task)], "ours") as worker:
        assert worker.ready["build_s"] > 0
        answer = worker.ask({"steps": 2})
        assert answer["tokens"] == 2 * 16
        with refused(Failed):
            worker.ask({"steps": "two"})
    here = systems.training(Configuration("0.6b", "bf16"), 60.0)
    assert here.losses[:2] == pytest.approx(answer["losses"], rel=1e-3)


# -- right or wrong


def tiny_check(**changes):
    asked = {"recipe": "bf16", "train": "lora", "rank": 4, "length": 48, "steps": 3}
    return correct.check(shape=TINY, device=CPU, **{**asked, **changes})


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_fused_step_that_is_wrong_is_found(monkeypatch, recipe):
    assert tiny_check(recipe=recipe)["fused"]["ok"]

    def broken(model, fusion):
        if fusion != OFF:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(1.3 if recipe == "fp8" else 1.05)

    monkeypatch.setattr(sk, "fuse", broken)
    found = tiny_check(recipe=recipe)["fused"]
    assert not found["ok"]
    assert found["wrong"]


def test_the_gradient_of_x_is_summed_fast_where_that_is_measured(tmp_path):
    from surokit.bench.systems import Systems
    from surokit.bench.worker import Training

    systems = Systems(BenchWork(1, 16, 1, 4), 2, True, tmp_path)
    for fast_dx in (False, True):
        training = Training(systems._task(Configuration("0.6b", "fp8", fast_dx=fast_dx), 0), CPU)
        recipe = training.session.recipe
        assert recipe is not None
        assert [gemm.fast_accumulation for gemm in recipe.gemms] == [True, fast_dx, False]


def test_gradients_that_are_not_numbers_are_wrong(monkeypatch):
    def broken(model, fusion):
        if fusion != OFF:
            model.register_forward_hook(lambda module, args, out: setattr(out, "loss", out.loss * math.nan))

    monkeypatch.setattr(sk, "fuse", broken)
    config = correct.small(TINY, 48)
    assert not correct._fused(config, correct.recipe_of("bf16", "lora", 4), CPU, CPU)["ok"]


@pytest.mark.parametrize("what", ["batch", "count", "rate"])
def test_a_replay_of_something_old_is_found(monkeypatch, what):
    assert tiny_check()["graphs"]["ok"]
    step = Session._step
    kept = []

    def stale(self, batches, tokens=None):
        if self.engine.wants_graphs == "auto":  # as a graph that was recorded with the first step's values
            kept.append(batches)
            if what == "batch":
                batches = kept[0]
            elif what == "count":
                batches = [{**new, "labels": old["labels"]} for new, old in zip(batches, kept[0])]
            else:
                self.schedule = lambda step: 0.01
        return step(self, batches, tokens)

    monkeypatch.setattr(Session, "_step", stale)
    found = tiny_check(steps=5)["graphs"]
    assert not found["ok"]
    assert not found["same_bits"]


# -- tokens


def test_the_same_text_for_everyone():
    ids_ST, starts_SM = corpus(1000, 64, 8)
    assert (ids_ST == corpus(1000, 64, 8)[0]).all()
    assert ids_ST.max() == 999
    assert len(ids_ST) % 8 == 0
    # a document starts behind the end of the one before
    flat, firsts = ids_ST.reshape(-1), [r * 64 + m for r, row in enumerate(starts_SM) for m in row if 0 < m < 64]
    assert firsts
    assert all(flat[first - 1] == 999 for first in firsts)
    with refused(ValueError):
        corpus(1000, 2048, 1000)


# -- tables


@pytest.fixture
def data():
    there = {**environment(), "device": "NVIDIA H200", "commit": "abc", "source": "123"}
    found = {}

    def turns(group, c, rates, **more):
        for number, rate in enumerate(rates):
            about = {"group": group, "round": number, "name": c.name, "system": c.system, "configuration": c.to_dict()}
            turn = {
                "tokens_per_s": rate,
                "seconds": 4.0,
                "steps": 8,
                "tokens": 131072,
                "peak_mib": 10240.0,
                "reserved_mib": 12288.0,
                "call": 0,
            }
            turn |= {"graphs": "captured", "alone": False, "peak_mib": 10240.0, "reserved_mib": 12288.0, **more}
            if number == 0:
                turn["first"] = {"build_s": 1.0, "first_step_s": 2.5, "losses": [5.0, 4.0], "note": ""}
            found[f"turn/{group}/{number}/{c.system}"] = {"what": "turn", **about, **turn}
            found[f"plan/{c.name}"] = {"what": "plan", **PLAN}
        found[f"profile/{group}/{c.system}"] = {
            "what": "profile",
            **about,
            "idle": 0.012,
            "launches": 5.0,
            "graph_launches": 3.0,
        }

    plain = Configuration("0.6b", "bf16")
    turns("0.6b lora", plain, [60e3, 62e3, 61e3])
    turns("0.6b lora", plain.but(recipe="qfp8"), [56e3, 57e3, 57e3], graphs="the model has hooks")
    turns("0.6b lora", plain.but(peer="unsloth"), [20e3, 31e3, 20e3])
    turns("t", plain.but(recipe="fp8"), [70e3, 70e3])
    turns("t", plain.but(recipe="fp8", graphs=False), [35e3, 35e3], alone=True)
    found["sustained/0.6b lora fp8"] = {
        **{"what": "sustained", "tokens_per_s": 7e4, "minutes": 5.0, "steps": 9},
        **{"drift": -0.041, "sampled_idle_frac": 0.013, "idle_frac": None},
    }
    found["ceilings/0.6b"] = {"what": "ceilings", "failed": "it broke"}
    settings = {"batch": 2, "length": 2048, "accumulate": 4, "rank": 16}
    return {
        **{"benchmark": "gpu", "rehearsal": False, "settings": settings, "environment": there},
        **{"calls": [{}], "gpu": found},
    }


def line_of(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_transposes_codes_stands_below_the_tables(data):
    rows = [{"op": op, "backend": "triton"} for op in ("quantize", "transpose_fp8", "transpose_fp4")]
    data["gpu"]["choices"] = {"what": "choices", "choices": rows}
    text = gpu_table.table(data)
    assert "- Codes are transposed by triton (transpose_fp8, transpose_fp4)" in text
    assert "FIRST CHOICE" not in text
    data["gpu"]["choices"]["missed"] = TRITON
    assert f"- **NOT THE FIRST CHOICE**: {TRITON}" in gpu_table.table(data)


def test_what_was_measured_stands_beside_the_bars(data):
    text = gpu_table.table(data)
    bf16 = line_of(text, "| 0.6b lora bf16 |")
    assert bf16[1:6] == ["61,000 (60,000 to 62,000)", "54k", "90k", "115k", "gate"]
    assert bf16[6] == "3.00 (2.00 to 3.05)"
    assert bf16[8] == f"{61e3 * 3e9 / 989e12:.1%}"
    assert bf16[9] == f"{50 / (16384 / 61e3 * 1e3):.1%}"
    assert bf16[10:15] == ["122%", "1.2%", "8", "10.0 / 12.0", "3.5"]
    qfp8 = line_of(text, "| 0.6b lora qfp8 |")
    assert qfp8[2:6] == ["0.9 x BF16", "90k", "125k", "gate"]  # 57 of 61 is more than 0.9
    assert qfp8[7].startswith("0.93")
    assert qfp8[1] == "57,000 (56,000 to 57,000) **NO CUDA GRAPHS**"
    assert qfp8[15:] == ["0.00%", "no CUDA graphs: the model has hooks"]
    assert line_of(text, "| 8b full fp8 |")[1:5] == ["not measured", "9.5k", "14k", "17k"]
    assert text.count("not measured") == len(TARGETS) - 3
    assert "NVIDIA H200" in text
    assert "commit abc" in text


def test_every_row_has_a_cell_for_each_heading(data):
    tables = re.findall(r"(?m)(?:^\|.*\n)+", gpu_table.table(data))
    assert len(tables) == 2
    assert all(len({line.count("|") for line in text.splitlines()}) == 1 for text in tables)


def test_a_share_of_bf16_is_judged_by_the_ratio_that_is_shown(data):
    for number, rates in enumerate(((50e3, 56e3), (60e3, 50e3), (70e3, 62e3))):  # medians: 0.93; turn by turn: 0.89
        for recipe, rate in zip(("bf16", "qfp8"), rates):
            data["gpu"][f"turn/0.6b lora/{number}/{recipe}"]["tokens_per_s"] = rate
    qfp8 = line_of(gpu_table.table(data), "| 0.6b lora qfp8 |")
    assert qfp8[7].startswith("0.89")
    assert qfp8[5] == "no"


def test_bars_of_another_device_are_not_reached(data):
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 120GB"):
        data["environment"]["device"] = device
        assert line_of(gpu_table.table(data), "| 0.6b lora bf16 |")[5] == ""


def test_what_was_not_right_is_called_unchecked_wherever_it_is_shown(data):
    for turn in data["gpu"].values():
        if turn["what"] == "turn" and turn["system"] == "qfp8":
            turn["unchecked"] = "Fused, it is not what it is apart."
    data["gpu"]["sustained/0.6b lora fp8"]["unchecked"] = "its check failed"
    text = gpu_table.table(data)
    qfp8 = line_of(text, "| 0.6b lora qfp8 |")
    assert qfp8[1].endswith("**UNCHECKED** **NO CUDA GRAPHS**")
    assert qfp8[5] == "unchecked"
    assert qfp8[16].startswith("unchecked: Fused, it is not what it is apart.")
    assert "(bar 1.5, goal 2.0): unchecked" in text
    assert "0.93 x its own BF16 (at least 0.9): unchecked" in text
    assert "**UNCHECKED**: its check failed" in text


def test_commits_that_are_mixed_are_shown(data):
    assert ", commit abc; " in gpu_table.table(data)
    for key, each in data["gpu"].items():
        if key.startswith("turn/0.6b lora/2/"):
            each["commit"] = "def"
    text = gpu_table.table(data)
    assert ", commit abc and def; " in text
    assert line_of(text, "| 0.6b lora bf16 |")[16] == "commit abc and def"
    assert line_of(text, "| 0.6b lora fp8, eager |")[7] == "commit abc; built anew for each turn"


def test_techniques_are_held_against_the_first_of_their_group(data):
    line = line_of(gpu_table.table(data), "| 0.6b lora fp8, eager |")
    assert line[1:4] == ["35,000 (35,000 to 35,000)", "0.50 (0.50 to 0.50)", "1.2%"]
    assert line[4:] == ["8", "10.0 / 12.0", "0.00%", "built anew for each turn"]


def test_verdicts_stand_below(data):
    text = gpu_table.table(data)
    assert (
        "- qfp8 over Unsloth BF16, mean of 0.6b: 2.80 x (bar 1.5, goal 2.0): goal reached so far, on these models alone"
        in text
    )
    assert "- 0.6b lora qfp8: 0.93 x its own BF16 (at least 0.9): holds" in text
    assert "idle 1.3% (below 2%: holds), drift -4.1% (within 3%: does not hold)" in text
    assert "- 0.6b lora qfp8: peak 10.0 GiB, below Unsloth BF16's 10.0: does not hold" in text
    assert "- ceilings/0.6b: it broke" in text


def test_a_page_is_filled_with_it(data, tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(data))
    page = result.filled("<!-- table: gpu.json -->\nstale\n<!-- end of table -->", tmp_path)
    assert gpu_table.table(data) in page
    assert "stale" not in page
