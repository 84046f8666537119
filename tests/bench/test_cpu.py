"""The benchmark of a processor at a tiny shape, its systems in this process."""

import sys
from dataclasses import replace

import pytest

import surokit as sk
from surokit.bench import cpu, result
from tests.refusals import refused

TINY = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "vocab": 64, "ffn": 48}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    small = {name: replace(case, shape=TINY, batch=1, length=16) for name, case in cpu.CASES.items()}
    monkeypatch.setattr(cpu, "CASES", small)
    monkeypatch.setattr(cpu, "Worker", Here)
    monkeypatch.setattr(cpu, "_bare_torch_mib", lambda: 1.0)
    yield
    for hidden in [name for name, found in sys.modules.items() if found is None]:
        del sys.modules[hidden]  # packages that the benchmark hides from transformers


class Here:
    """A worker that is no process."""

    def __init__(self, argv, name, timeout_s):
        self.ready, self.answer = cpu._start(*argv[-3:])

    def ask(self, request, timeout_s):
        return self.answer(request)

    def close(self):
        pass


def test_systems_take_turns_and_fused_is_the_same_training(monkeypatch):
    fused, fuse = [], sk.fuse
    monkeypatch.setattr(sk, "fuse", lambda model: fused.append(fuse(model)))
    names = ["transformers bf16", "transformers float32", "surokit", "surokit, fused", "surokit fp8"]
    data = cpu.run(names, 2, 1)
    systems = {s["name"]: s for s in data["systems"]}
    assert list(systems) == names
    assert [row.fused for row in fused[0].rows] == [True] * len(fused[0].rows)
    assert len(fused) == 1
    for s in systems.values():
        assert len(s["tokens_per_s"]) == 2
        assert min(s["tokens_per_s"]) > 0
        assert len(s["losses"]) == cpu.WARM_UP + 2
        assert s["peak_mib"] > 100
    assert result.loss_gap(data, "surokit") < 0.01
    assert systems["surokit, fused"]["losses"] == pytest.approx(systems["surokit"]["losses"], rel=1e-3)
    assert systems["surokit fp8"]["losses"] != systems["surokit"]["losses"]
    assert result.table(data).count("\n| surokit") == 3


def test_adapters_beside_those_of_peft():
    names = ["peft bf16", "peft float32", "surokit bf16", "surokit qnf4"]
    data = cpu.run(names, 1, 1, case="lora")
    losses = {s["name"]: s["losses"] for s in data["systems"]}
    assert list(losses) == names
    # B begins as zero, so the first loss is the base's
    assert losses["peft bf16"][0] == pytest.approx(losses["peft float32"][0], rel=1e-2)
    assert losses["surokit bf16"][0] == pytest.approx(losses["peft float32"][0], rel=1e-2)
    assert losses["surokit qnf4"][0] != losses["surokit bf16"][0]
    assert data["settings"]["trained"] == "LoRA, rank 16"


@pytest.mark.parametrize("faster", ["transformers bf16", "transformers float32"])
def test_the_faster_of_the_two_dtypes_is_the_baseline(monkeypatch, faster):
    class Timed(Here):
        def __init__(self, argv, name, timeout_s):
            self.seconds = 1.0 if name == faster else 2.0

        def ask(self, request, timeout_s):
            return {"seconds": self.seconds, "losses": [1.0] * request["steps"], "peak_mib": 2.0}

    monkeypatch.setattr(cpu, "Worker", Timed)
    data = cpu.run(["transformers bf16", "transformers float32", "surokit"], 2, 1)
    assert data["baseline"] == faster
    assert result.ratios(data, "surokit") == [0.5, 0.5]


def test_an_unknown_system_is_refused():
    with refused(ValueError):
        cpu.run(["peft bf16"], 1, 1)
