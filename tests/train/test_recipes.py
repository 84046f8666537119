"""Every recipe trains: a short form of the study in tests/soak, wide gates for few steps."""

import math

import pytest
import torch

import surokit as sk
from surokit import texts
from surokit.nn.delayed import amaxes_of

# a few steps of a small model differ by more than long runs of real ones; a recipe whose gradients are wrong is far outside
GAPS = {
    "fp8": 0.005,
    "fp8-current": 0.005,
    "fp8-rowwise": 0.005,
    "fp8-block": 0.005,
    "mxfp8": 0.005,
    "fp4": 0.02,
    "mxfp4": 0.03,
    "quartet-ii": 0.02,
}
CONFIG = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=128, ffn=160, max_length=64)


def batches(first):
    """Characters of the book, 8 x 64 of them a batch."""
    text = torch.frombuffer(bytearray(texts.MOBY_DICK.read_bytes()[:200_000]), dtype=torch.uint8).long() % 128
    parts = text[: 390 * 512].view(390, 8, 64)[first : first + 25]
    return [{"input_ids": ids, "labels": ids} for ids in parts]


def session(recipe):
    torch.manual_seed(0)
    return sk.Session(
        sk.Decoder(CONFIG).to(torch.bfloat16),
        batches(0),
        optimizer=sk.AdamW(lr=3e-3),
        schedule=None,
        eval=batches(300)[:6],
        recipe=recipe,
        compile=False,
    )


@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8, sk.QFP8.lora(rank=2)], ids=lambda r: r.name)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_failed_is_as_if_it_were_left_out(recipe, way, steps):
    """Delayed scales too: what the step had recorded of its tensors is dropped."""
    left_out, failed = session(recipe), session(recipe)
    first, second, third = batches(0)[:3]
    fail = [True]

    def hook(module, *_):
        if fail.pop():
            raise KeyboardInterrupt

    last = failed.model.model.layers[0].mlp.down_proj  # of the forward nearly the last, in the backward behind the head
    for each in (left_out, failed):
        for _ in range(steps):
            each.step(first)
    handle = last.register_forward_hook(hook) if way == "forward" else last.register_full_backward_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        failed.step(second)
    handle.remove()
    assert all(map(torch.equal, amaxes_of(failed.model), amaxes_of(left_out.model)))
    for each in (left_out, failed):
        each.step(third)
        each.step(first)
    ours, theirs = failed.model.state_dict(), left_out.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def held_out_loss(recipe, steps=25):
    run = session(recipe)
    run.run(steps)
    return run.evaluate()


@pytest.fixture(scope="module")
def bf16_loss():
    return held_out_loss(sk.BF16)


@pytest.mark.parametrize("name", GAPS)
def test_a_recipe_of_products_trains_as_bf16_does(name, bf16_loss):
    assert bf16_loss < 0.7 * math.log(128)
    assert held_out_loss(sk.recipes[name].keep_last(0)) == pytest.approx(bf16_loss, rel=GAPS[name])


@pytest.fixture(scope="module")
def dense_loss():
    """An adapter over weights that are not stored in another format."""
    return held_out_loss(sk.BF16.lora(rank=8), steps=40)


@pytest.mark.parametrize("name", ["qfp8", "qfp4", "qnf4"])
def test_an_adapter_learns_over_every_storage(name, dense_loss):
    recipe = sk.recipes[name].lora(rank=8)
    stored = held_out_loss(recipe, steps=40)
    assert stored < 0.9 * session(recipe).evaluate()
    assert stored == pytest.approx(dense_loss, rel=0.05)
