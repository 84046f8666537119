"""Equal work: every kind of difference is refused in a sentence, and let through by its name."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.racing import UnequalWork, comparability
from surokit.racing.comparability import digest_of, digest_of_batches
from surokit.racing.start import race
from tests.racing.conftest import CONFIG, batches
from tests.refusals import refused


def against(session, name, text, a=None, b=None, **options):
    """Two sessions that differ are refused with this sentence, and race where the difference is allowed."""
    a, b = a or {}, b or {}

    def both():
        return {"one": session(**a), "two": session(**b)}

    with pytest.raises(UnequalWork, match=text) as caught:
        race(both(), steps=8, live=False, predict=False, control=False, **options)
    assert [d.name for d in caught.value.differences] == [name]
    assert f"allow=({name!r},)" in str(caught.value)
    found = race(both(), steps=8, live=False, predict=False, control=False, allow=(name,), **options)
    assert any(note.startswith("Allowed: 'two' ") for note in found.notes)
    assert found.notes[0] in repr(found)


def test_accumulate(session):
    two = [{key: value.repeat(1, 1) for key, value in batch.items()} for batch in batches()]
    with refused(UnequalWork) as caught:
        race({"one": session(), "two": session(accumulate=2, data=two)}, steps=8, live=False)
    assert [d.name for d in caught.value.differences] == ["accumulate"]


def test_optimizer(session):
    against(
        session,
        "optimizer",
        "'two' is trained with other options than 'one', lr: 0.01 against 0.003: give",
        b={"optimizer": sk.AdamW(lr=1e-2)},
    )
    against(session, "optimizer", "trained by AdamW8bit", b={"optimizer": sk.AdamW8bit(lr=3e-3)})
    against(
        session,
        "optimizer",
        "rounding: stochastic against nearest",
        b={"optimizer": sk.AdamW(lr=3e-3, rounding="stochastic")},
    )
    against(
        session,
        "optimizer",
        "options than 'one', topk_ratio: 0.1 against 0.5, update_interval: 4 against 8: give",
        a={"optimizer": sk.ZenFlow(lr=3e-3, topk_ratio=0.5, update_interval=8)},
        b={"optimizer": sk.ZenFlow(lr=3e-3)},
    )


def test_schedule(session):
    against(session, "schedule", r"'two' has the schedule Cosine\(warmup=2, steps=99", b={"schedule": sk.Cosine(2, 99)})
    against(session, "schedule", "'two' has the schedule None", b={"schedule": None})


def test_clip_and_seed(session):
    against(session, "clip", "'two' clips at None and 'one' clips at 1.0", b={"clip": None})
    against(session, "seed", "'two' has the seed 1", b={"seed": 1})


def test_data_order(session):
    with refused(UnequalWork) as caught:
        race({"one": session(), "two": session(data=batches()[::-1])}, steps=8, live=False)
    assert [d.name for d in caught.value.differences] == ["data"]


class Unnamed:
    """Batches without a fingerprint."""

    def __init__(self, found):
        self.found = found

    def __iter__(self):
        return iter(self.found)


def test_batches_are_compared_as_they_come(session):
    given = batches()
    swapped = [*given[:3], given[4], given[3], *given[5:]]
    with refused(UnequalWork) as caught:
        race({"one": session(data=Unnamed(given)), "two": session(data=Unnamed(swapped))}, steps=16, live=False)
    assert caught.value.differences[0].name == "batches"
    assert getattr(caught.value, "race").reason.startswith(  # noqa: B009
        "failed: UnequalWork"
    )


def test_tokens_a_step(session):
    short = [{key: value[:, :12] for key, value in batch.items()} for batch in batches()]
    with refused(UnequalWork) as caught:
        race({"one": session(data=Unnamed(batches())), "two": session(data=Unnamed(short))}, steps=8, live=False)
    assert {d.name for d in caught.value.differences} == {"tokens", "batches"}
    allowed = race(
        {"one": session(data=Unnamed(batches())), "two": session(data=Unnamed(short))},
        steps=8,
        live=False,
        predict=False,
        allow=("tokens", "batches"),
    )
    assert "Allowed: 'two' takes 24 tokens a step and 'one' takes 32 tokens a step." in allowed.notes


def test_full_training_against_an_adapter(session):
    against(
        session,
        "parameters",
        r"'two' trains [\d,]+ parameters and 'one' trains [\d,]+ parameters: full training against an adapter",
        a={"recipe": sk.BF16},
        b={"recipe": sk.QFP8.lora(rank=4)},
    )
    against(session, "parameters", "adapter", a={"recipe": sk.BF16.lora(rank=4)}, b={"recipe": sk.FP8.lora(rank=8)})


def test_other_weights_dtype_and_shape(session, model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).view(-1)[7] += 1
    with refused(UnequalWork):
        race({"one": session(), "two": session(model=other)}, steps=8, live=False)
    with refused(UnequalWork):
        race({"one": session(), "two": session(model=copy.deepcopy(model).float())}, steps=8, live=False)
    narrow = sk.Decoder(
        sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=32), dtype=torch.bfloat16
    )
    with refused(UnequalWork):
        race({"one": session(), "two": session(model=narrow)}, steps=8, live=False)


def test_a_frozen_base_is_compared_where_it_is_stored_alike(session, model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.view(-1)[7] += 1
    lora = {recipe: recipe.lora(rank=4) for recipe in (sk.BF16, sk.FP8, sk.QFP8, sk.QNF4)}
    stored = {n: session(lora[sk.QFP8], model=copy.deepcopy(net)) for n, net in (("one", model), ("two", other))}
    with refused(UnequalWork) as c:
        race(stored, steps=8, live=False)
    assert [d.name for d in c.value.differences] == ["frozen"]
    text = r"'two' keeps the frozen weight model.layers.0.mlp.up_proj.weight in bfloat16, [0-9a-f]{8} and 'one' keeps"
    against(session, "frozen", text, {"recipe": lora[sk.BF16]}, {"recipe": lora[sk.FP8], "model": other})
    found = race({"a": session(lora[sk.QFP8]), "b": session(lora[sk.QNF4])}, steps=4, live=False, predict=False)
    assert not [note for note in found.notes if "Allowed" in note], "other codes of the same base"


def test_a_meter_that_only_one_has(session):
    def heavy(_):
        return {}

    against(session, "meters", "'two' has the meters heavy and 'one' has the meters none", b={"meters": [heavy]})


def test_a_model_that_computes_otherwise(session, model):
    other = copy.deepcopy(model)
    object.__setattr__(other, "config", dataclasses.replace(model.config, rope_theta=5e5))
    with refused(UnequalWork):
        race({"one": session(), "two": session(model=other)}, steps=8, live=False)


def test_batches_on_a_device_are_looked_at_first_wherever_a_session_began(monkeypatch):
    begun: Any = SimpleNamespace(steps=100, data=SimpleNamespace(on_draw=None))
    looked: list[bool] = []

    def digest(_, wait):
        looked.append(wait)
        return ""

    monkeypatch.setattr(comparability, "digest_of_batches", digest)
    with comparability.Order(looks=2).following("one", begun):
        for _ in range(3):
            begun.data.on_draw(batches(1))
    assert looked == [True, True, False]
    assert begun.data.on_draw is None


def test_recompute_and_fusion(session, model):
    def fused(**options):
        found = copy.deepcopy(model)
        sk.fuse(found, **options)
        return found

    with refused(UnequalWork) as c:
        race({"one": session(model=fused()), "two": session(model=fused(recompute="full"))}, steps=8, live=False)
    assert [d.name for d in c.value.differences] == ["recompute"]
    with refused(UnequalWork) as c:
        race({"one": session(model=fused()), "two": session()}, steps=8, live=False)
    assert [d.name for d in c.value.differences] == ["fusion"]
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing = True
    with refused(UnequalWork):
        race({"one": session(), "two": session(model=checkpointed)}, steps=8, live=False)


def test_compile_graphs_steps_and_held_out(session):
    for name, options in (
        ("compile", {"compile": True}),
        ("graphs", {"graphs": False}),
        ("held_out", {"eval": batches(1, seed=9)}),
    ):
        with refused(UnequalWork) as caught:
            race(
                {"one": session(graphs="auto", compile=False), "two": session(**{"compile": False, **options})},
                steps=8,
                live=False,
            )
        assert [d.name for d in caught.value.differences] == [name]
    ahead = session()
    ahead.run(2)
    with refused(UnequalWork):
        race({"one": session(), "two": ahead}, steps=8, live=False)


def test_several_differences_are_all_named(session):
    with refused(UnequalWork) as caught:
        race({"one": session(), "two": session(clip=2.0, seed=3)}, steps=8, live=False)
    assert {d.name for d in caught.value.differences} == {"clip", "seed"}
    assert "allow=('clip', 'seed')" in str(caught.value)


def test_an_unknown_name_to_allow(make):
    with refused(ValueError):
        make(allow="speed")


@pytest.mark.parametrize(
    "arguments",
    [
        {"steps": None},
        {"steps": 0},
        {"steps": 4.0},
        {"minutes": -1},
        {"turn_s": 0},
        {"turn_steps": 1},
        {"turn_steps": 4, "turn_s": 1.0},
        {"target_loss": float("nan")},
        {"usd_per_gpu_hour": -1},
        {"model": None},
        {"model": 3},
        {"entries": []},
        {"entries": 3},
        {"entries": {"": sk.BF16}},
        {"entries": {"a": 3}},
        {"entries": {"a": "fp88"}},
        {"entries": [sk.BF16, sk.BF16]},
        {"entries": {"a b": sk.BF16, "a-b": sk.FP8}},
        {"entries": {"a": sk.BF16, "a again": sk.FP8}},
        {"entries": [sk.BF16], "control": False},
        {"save_every": 3},
        {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)},
        {"command": "race --steps 8"},
    ],
)
def test_arguments_that_make_no_race(model, arguments):
    given = {"steps": 8, "live": False, "model": model, "data": batches(), **arguments}
    with refused((ValueError, TypeError)):
        race(given.pop("entries", ("bf16", "fp8")), **given)


def test_sessions_have_their_own_model(session, model):
    one = session()
    with refused(ValueError):
        race({"a": one, "b": session()}, steps=8, model=model, data=batches())
    settings: dict[str, Any] = {
        "optimizer": sk.AdamW(lr=1e-3),
        "schedule": None,
        "accumulate": 2,
        "eval": batches(1),
        "clip": 2.0,
    }
    for name, value in settings.items():
        with refused(ValueError):
            race({"a": one, "b": session()}, steps=8, **{name: value})
    with refused(ValueError):
        race({"a": one, "b": one}, steps=8)


def test_a_model_may_be_made_by_a_function_or_come_from_a_folder(make, model, tmp_path):
    made = make(model=lambda: copy.deepcopy(model), steps=8)
    sk.save(model, tmp_path / "model")
    loaded = make(model=tmp_path / "model", steps=8)
    copied = make(steps=8)
    for race_ in (made, loaded):
        assert race_.runs["fp8"].steps["loss"].tolist() == copied.runs["fp8"].steps["loss"].tolist()
    with refused(UnequalWork):
        make(model=lambda: sk.Decoder(CONFIG, dtype=torch.bfloat16), steps=8)


def test_digests_tell_bits_apart():
    x = torch.zeros(10)
    y = x.clone()
    y[3] = -0.0
    assert digest_of([x]) != digest_of([y])
    assert digest_of([x]) == digest_of([x.clone()])
    assert digest_of([x]) != digest_of([x.view(2, 5)])
    assert digest_of([]) == digest_of([])
    swapped = torch.arange(10.0)[[1, 0, *range(2, 10)]]
    assert digest_of([torch.arange(10.0)]) != digest_of([swapped])
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.int32):
        assert len(digest_of([torch.ones(3).to(dtype), torch.empty(0, dtype=dtype)])) == 8
    one, two = batches(2)
    assert digest_of_batches([one, two], True) != digest_of_batches([two, one], True)
    places = [{**one, "position_ids": torch.arange(16).expand(2, 16) % n} for n in (8, 16)]
    assert digest_of_batches(places[:1], True) != digest_of_batches(places[1:], True)
