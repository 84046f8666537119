"""The benchmark of a processor at a tiny shape, its systems in this process."""

import pytest

import surokit as sk
from surokit.bench import cpu, result


@pytest.fixture
def tiny(monkeypatch):
    shape = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "vocab": 64, "ffn": 48}
    for name, value in {"SHAPE": shape, "BATCH": 1, "LENGTH": 16}.items():
        monkeypatch.setattr(cpu, name, value)


class Here:
    """A worker that is no process."""

    def __init__(self, argv, name, timeout_s):
        self.ready, self.answer = cpu._start(*argv[-2:])

    def ask(self, request, timeout_s):
        return self.answer(request)

    def close(self):
        pass


def test_systems_take_turns_and_fused_is_the_same_training(tiny, monkeypatch):
    fused, fuse = [], sk.fuse
    monkeypatch.setattr(sk, "fuse", lambda model: fused.append(fuse(model)))
    monkeypatch.setattr(cpu, "Worker", Here)
    monkeypatch.setattr(cpu, "_bare_torch_mib", lambda: 1.0)
    data = cpu.run(["transformers", "surokit", "surokit, fused", "surokit fp8"], 2, 1)
    systems = {s["name"]: s for s in data["systems"]}
    assert list(systems) == ["transformers", "surokit", "surokit, fused", "surokit fp8"]
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
