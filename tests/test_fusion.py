"""Fusion: a value that says what is computed together, where it holds, and what takes a choice out of it."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from surokit.nn.fusion import OFF, Fusion, fusion_for
from tests.refusals import refused


def test_everything_is_on_by_itself_and_off_in_off():
    assert Fusion().without(*(f.name for f in fields(Fusion))) == OFF == Fusion.OFF
    for field in fields(Fusion):
        less = Fusion(frozen="transposed", recompute="full").without(field.name)
        assert getattr(less, field.name) == getattr(OFF, field.name)
        assert sum(getattr(less, f.name) != getattr(OFF, f.name) for f in fields(Fusion)) == len(fields(Fusion)) - 1


def test_it_is_frozen_and_prints_what_is_on():
    with pytest.raises(FrozenInstanceError):
        Fusion().norm = False  # type: ignore[misc]
    assert str(Fusion()) == "norm gate joint adapters qk frozen=codes"
    assert (
        str(Fusion(frozen="no", recompute="selective").without("qk", "gate"))
        == "norm joint adapters recompute=selective"
    )
    assert str(OFF) == "nothing fused"
    assert len({Fusion(), Fusion(), OFF}) == 2


def test_unknown_words_are_named():
    with refused(ValueError):
        Fusion().without("norm", "rope", "mlp")
    with refused(ValueError):
        Fusion(frozen="yes")  # type: ignore[arg-type]
    with refused(ValueError):
        Fusion(recompute="some")  # type: ignore[arg-type]
    with refused(TypeError):
        Fusion(norm="no")  # type: ignore[arg-type]


def test_where_it_holds():
    x = torch.zeros(1)
    assert fusion_for(None, x) is OFF
    assert fusion_for(Fusion(), x) == Fusion()
    assert fusion_for(OFF, x) is OFF
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fusion_for(Fusion(), x) is OFF
    on_a_gpu = torch.empty(1, device="meta")
    assert fusion_for(None, on_a_gpu) is OFF  # only CUDA has the kernels for it
    seen = []

    def compiled(x):
        seen.append(fusion_for(Fusion(), x))
        return x + 1

    torch.compile(compiled, backend="eager")(x)
    assert seen == [OFF]
