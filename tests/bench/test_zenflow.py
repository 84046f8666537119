"""ZenFlow beside DeepSpeed's: what follows from a raw file, and how the layout of DeepSpeed's matrices is corrected."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from surokit.bench import zenflow
from tests.refusals import refused

FILE = Path(__file__).parents[2] / "docs" / "measurements" / "zenflow.json"


def test_both_train_the_same_weights_on_the_same_batches():
    one, other = zenflow.session_of(1, 4, None), zenflow.session_of(1, 4, True)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters()))
    one.run(2)
    other.run(2)
    assert one.records.column("loss")[:2] == pytest.approx(other.records.column("loss")[:2], rel=1e-6)  # warm-up


def test_matrices_are_read_as_they_are_held():
    shapes = ((2, 3), (4,))
    weights = [torch.randn(*shape) for shape in shapes]
    flat = torch.cat([weights[0].t().reshape(-1), weights[1]])
    read = [torch.nn.Parameter(torch.empty(*shape)) for shape in shapes]
    optimizer = SimpleNamespace(
        bit16_groups_flat=[flat],
        round_robin_bit16_groups=[read],
        round_robin_bit16_meta=[[torch.empty(*shape, device="meta") for shape in shapes]],
        round_robin_bit16_offsets=[[0, 6]],
    )
    zenflow.correct_layout(optimizer)
    assert all(torch.equal(p, w) for p, w in zip(read, weights))


def test_the_committed_losses():
    data = json.loads(FILE.read_text())
    ends = {(way, overlap): zenflow.at_end(zenflow.losses_of(data, way, overlap)) for way, overlap in zenflow.RUNS}
    adamw = ends[zenflow.ADAMW, None]
    assert ends[zenflow.OFFLOAD, None] == pytest.approx(adamw, rel=1e-3)
    for overlap in (True, False):
        for shipped, turned in zip(ends[zenflow.SHIPPED, overlap], ends[zenflow.TURNED, overlap]):
            assert shipped > turned
    assert len(zenflow.figure(data).axes) == 2
    assert zenflow.table(data).count("\n| DeepSpeed") == 5


@pytest.mark.parametrize("given", [{"steps": 10}, {"seeds": 0}], ids=str)
def test_too_little_to_compare(given):
    with refused(ValueError):
        zenflow.run(**given)


def test_without_deepspeed(monkeypatch):
    monkeypatch.setattr("surokit.environment.installed_version", lambda package: None)
    with refused(ImportError):
        zenflow.run()
