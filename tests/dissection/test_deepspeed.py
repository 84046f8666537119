"""DeepSpeed's engine takes the same steps as ours, in processes of its own; where an engine changes the weights, a cell says so."""

from dataclasses import replace

import pytest

import surokit as sk
from surokit.dissection import deepspeed_engine
from surokit.dissection.cell import Cell
from surokit.dissection.job import Job, Tokens
from surokit.dissection.settings import Setting
from tests.dissection.sources import all_measured, decoder
from tests.refusals import refused

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

BASE = Job(Setting(batch=2, length=32, gpus=2), decoder, Tokens(seed=3), 2, 0, 1e-3, None, "cpu")
CHANGES = ({"zero": 2}, {"zero": 3, "accumulate": 2, "recompute": "full"})


@pytest.fixture(scope="module")
def cells():
    """Cells of our engine and of DeepSpeed's in turns, all measured in the same two processes."""
    settings = [replace(BASE.setting, engine=e, **c) for c in CHANGES for e in ("surokit", "deepspeed")]
    found = sk.launch(all_measured, [replace(BASE, setting=s) for s in settings], gpus=2, output="none")
    assert [each["state"] for each in found] == ["measured"] * 4, found
    return [Cell.of({"name": "a cell", **each}) for each in found]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_two_processes_reach_our_losses(cells, number):
    ours, theirs = cells[2 * number : 2 * number + 2]
    assert theirs.work == ours.work
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-4)


def test_what_divided_weights_and_their_masters_take(cells):
    whole = 4 * sum(p.numel() for p in decoder().parameters())
    zero2, zero3 = (cells[i].memory["rest"] for i in (1, 3))
    assert zero2["weights"] == pytest.approx(whole, rel=0.01)
    assert zero2["optimizer"] == pytest.approx(1.5 * whole, rel=0.01)  # half of two moments and a master
    assert zero3["weights"] == pytest.approx(1.5 * whole, rel=0.01)  # small ones are kept whole beside the parts
    assert zero3["optimizer"] == pytest.approx(whole, rel=0.01)  # its masters are in no group between steps


def test_zenflow_holds_transposes_and_the_cell_says_so():
    job = replace(BASE, setting=replace(BASE.setting, gpus=1, engine="deepspeed", optimizer="zenflow"), steps=4)
    (found,) = sk.launch(all_measured, [job], gpus=1, output="none")
    assert found["state"] == "measured", found
    assert found["work"]["changed"].startswith("8 of 11 parameters are others than before, the first ")
    assert found["work"]["changed"].endswith("which holds its transpose in the old shape")


def test_a_host_that_does_not_compile(monkeypatch):
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: False)
    monkeypatch.setattr("torch.utils.cpp_extension.get_cxx_compiler", lambda: "no such compiler")
    with refused(ImportError):
        deepspeed_engine.check_compiles()
