"""Other engines do the same work: from the same weights and adapters on the same tokens to the same losses."""

from dataclasses import replace

import pytest
import torch

import surokit as sk
from surokit.dissection import foreign
from surokit.dissection.cell import Cell
from surokit.dissection.changed import changed, digests
from surokit.dissection.loop import TorchLoop
from surokit.dissection.measure import measure, search
from tests.dissection.cells import held, peak
from tests.dissection.test_measure import CONFIG, job, values
from tests.refusals import refused

pytest.importorskip("transformers")


def decoder():
    return sk.Decoder(CONFIG)  # in float32, where libraries differ by little


def measured(source=decoder, what="train", **changes):
    found = values(replace(job(source=source, **changes), what=what))
    assert found["state"] == "measured", found.get("why")
    return Cell.of({"name": "a cell", **found})


def same_work(one, other):
    names = ("weights", "batch", "length", "accumulate", "tokens_per_step", "parameters", "trained")
    return [name for name in names if one.work[name] != other.work[name]]


@pytest.fixture(scope="module")
def ours():
    return measured()


@pytest.mark.parametrize("engine", ["transformers", "trainer"])
def test_training_is_the_same(ours, engine):
    theirs = measured(engine=engine)
    assert not same_work(ours, theirs)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)
    assert len(theirs.step_ms) == 1
    for term in ("weights", "optimizer"):
        assert held(theirs, term) == pytest.approx(held(ours, term), rel=0.01)
    assert set(theirs.memory["phases"]) == {"forward", "backward", "optimizer"}
    parts = theirs.profile["parts"]
    assert {"Linear q", "attention", "RMSNorm", "lm_head", "optimizer"} <= {row["part"] for row in parts}
    assert sum(row["ms"] for row in parts) == pytest.approx(theirs.profile["wall_ms"], rel=0.02)
    assert theirs.planned["peak"] == pytest.approx(peak(theirs), rel=0.25)


def test_peft_is_the_same():
    ours, theirs = (measured(what="tune", lora=4, engine=engine) for engine in ("surokit", "transformers"))
    assert not same_work(ours, theirs)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)


def test_recompute_and_accumulation(ours):
    plain = measured(engine="transformers", accumulate=2)
    full = measured(engine="transformers", accumulate=2, recompute="full")
    assert full.losses == pytest.approx(plain.losses, rel=1e-6)
    assert full.memory["phases"]["forward"] < plain.memory["phases"]["forward"]
    assert plain.losses == pytest.approx(measured(accumulate=2).losses, rel=1e-4)
    trained = measured(engine="trainer", accumulate=2)
    assert trained.losses == pytest.approx(plain.losses, rel=1e-4)


def test_four_bits_of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    made = {"source": CONFIG, "what": "tune", "lora": 4, "recipe": "qnf4"}
    theirs = measured(engine="transformers", **made)
    plain = measured(**{**made, "recipe": "bf16"})
    assert theirs.work["weights"] == plain.work["weights"]
    assert theirs.work["trained"] == plain.work["trained"]
    assert held(theirs, "frozen weights") < 0.6 * held(plain, "frozen weights")
    assert theirs.losses[0] == pytest.approx(plain.losses[0], rel=0.02)


def test_the_largest_batch_of_another_engine(monkeypatch):
    real = TorchLoop.step

    def step(self, batches):
        if len(batches[0]["input_ids"]) > 3:
            raise MemoryError
        return real(self, batches)

    monkeypatch.setattr(TorchLoop, "step", step)
    assert search(job(source=decoder, engine="transformers", batch="largest")) == 3


@pytest.mark.parametrize("engine", ["transformers", "deepspeed"])
def test_a_library_that_is_not_there(monkeypatch, engine):
    monkeypatch.setattr(foreign, "find_spec", lambda name: None if name == engine else "there")
    with refused(ImportError):
        measure(job(engine=engine))


# -- an engine that does not leave the weights as they are


def turned(p):
    return p.t().reshape(p.shape)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (turned, "holds its transpose in the old shape"),
        (lambda p: p.t(), "is transposed"),
        (lambda p: p.to(torch.float64), "is float64 now"),
        (lambda p: p + 1, "has other values"),
    ],
)
def test_changed_weights_are_named(change, said):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(4, 2))
    before = digests(model)
    assert changed(model, before) == ""
    model[1].weight.data = change(model[1].weight.data)
    assert changed(model, before) == f"1 of 4 parameters are others than before, the first 1.weight, which {said}"
    assert changed(torch.nn.Sequential(model[0]), before) == "2 of 4 parameters have other names, the first 1.weight"


def test_a_cell_says_what_its_engine_changed(monkeypatch):
    real = TorchLoop.__init__

    def scrambled(self, model, *given, **options):
        real(self, model, *given, **options)
        for p in self.parameters:
            p.data = turned(p.data) if p.ndim == 2 else p.data

    monkeypatch.setattr(TorchLoop, "__init__", scrambled)
    found = measured(engine="transformers")
    (note,) = [note for note in sk.Dissection([found]).notes if "its engine" in note]
    assert note == f"a cell: its engine changed the weights before the first step: {found.work['changed']}"
    assert "which holds its transpose in the old shape" in note
