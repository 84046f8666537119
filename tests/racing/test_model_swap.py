"""Parking: nothing is left on the device, everything comes back bit for bit, views and shared memory stay what they are."""

from __future__ import annotations

import pytest
import torch

import surokit as sk
from surokit.nn.joint import pack_sibling_weights, side_by_side
from surokit.racing.model_swap import Parking, bytes_of, fits, share_frozen, storages_of, tensors_of


def held(session):
    return sum(storage.nbytes() for storage in storages_of(session).values())


def bits(session):
    return [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in tensors_of(session)]


RECIPES = [sk.BF16, sk.FP8, sk.MXFP8, sk.QFP8.lora(rank=4), sk.QNF4.lora(rank=4)]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_everything_comes_back_bit_for_bit(session, recipe):
    one, two = session(recipe), session(recipe)
    one.run(2)
    before, objects = bits(one), [id(t) for t in tensors_of(one)]
    parking = Parking({"one": one, "two": two})
    parking.bring("two")
    assert held(one) == 0
    assert parking.parked == ("one",)
    parking.bring("one")
    assert parking.parked == ("two",)
    assert [id(t) for t in tensors_of(one)] == objects
    assert all(torch.equal(a, b) for a, b in zip(before, bits(one)))


def test_parameters_side_by_side_stay_so(session):
    one, two = session(), session()
    layers = one.model.model.layers[0].self_attn
    weights = [layers.q_proj.weight, layers.k_proj.weight, layers.v_proj.weight]
    joint = pack_sibling_weights(weights)
    assert joint is not None
    expected = joint.clone()
    parking = Parking({"one": one, "two": two})
    parking.bring("two")
    parking.bring("one")
    again = side_by_side(weights)
    assert again is not None
    assert torch.equal(again, expected)


def test_shared_memory_is_never_parked(session):
    one, two, three = (session(sk.FP8.lora(rank=4)) for _ in range(3))
    whole = bytes_of([one, two], planned=False)
    saved = share_frozen(two, [one])
    assert saved > 0
    assert bytes_of([one, two], planned=False) == whole - saved
    assert share_frozen(two, [one]) == 0
    parking = Parking({"one": one, "two": two, "three": three})
    parking.bring("three")
    assert held(one) == held(two) == saved
    parking.bring("one")
    assert held(three) == 0
    assert share_frozen(three, [one]) == 0, "what is parked is not compared"


def test_only_equal_bits_are_shared(session):
    one, two = session(sk.BF16.lora(rank=4)), session(sk.BF16.lora(rank=4))
    name, weight = next((n, p) for n, p in two.model.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        weight.view(-1)[0] += 1
    share_frozen(two, [one])
    theirs = dict(one.model.named_parameters())
    shared = {n for n, p in two.model.named_parameters() if p.data_ptr() == theirs[n].data_ptr()}
    assert name not in shared
    assert shared == {n for n, p in theirs.items() if not p.requires_grad} - {name}


def test_memory_that_cannot_be_resized_stays(session):
    one, two = session(), session()
    weight = one.model.lm_head.weight
    fixed = torch.frombuffer(bytearray(weight.nbytes), dtype=weight.dtype).view_as(weight)
    fixed.copy_(weight.detach())
    weight.data = fixed
    parking = Parking({"one": one, "two": two})
    parking.bring("two")
    assert held(one) == weight.nbytes
    parking.bring("one")
    assert torch.equal(one.model.lm_head.weight, fixed)


def test_planned_bytes_count_gradients_and_moments(session):
    one = session()
    weights = sum(p.nbytes for p in one.model.parameters())
    assert bytes_of([one]) == 4 * weights
    one.run(1)
    assert bytes_of([one]) == pytest.approx(4 * weights, rel=0.01)
    assert fits([one])
