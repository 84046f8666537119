"""Greedy search equals transformers'; sampling follows its generator; impossible requests are refused."""

import pytest
import torch

import surokit as sk
from surokit.models.checkpoint import load
from surokit.models.generation import generate
from tests.models.families import FAMILIES, write
from tests.refusals import refused


@pytest.fixture
def ids():
    return torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family, tmp_path, ids):
    theirs = write(tmp_path, family)
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert torch.equal(generate(ours, ids, 20), expected)


def test_a_row_ends_and_is_filled_up(tmp_path, ids):
    theirs = write(tmp_path, "llama3")
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    free = generate(ours, ids, 12)
    ends = [int(free[0, 12]), int(free[1, 15])]
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    assert torch.equal(generate(ours, ids, 12, eos_id=ends), expected)
    alone = generate(ours, ids[:1], 12, eos_id=ends[0])
    assert alone.shape[1] <= 13
    assert alone[0, -1] == ends[0]


def test_the_configs_own_end(tmp_path, ids):
    end = int(generate(load_with(tmp_path / "a", None), ids, 4)[0, 9])
    assert generate(load_with(tmp_path / "b", end), ids[:1], 8).shape == (1, 10)
    assert generate(load_with(tmp_path / "c", [end, 5]), ids[:1], 8, eos_id=()).shape == (1, 17)


def load_with(folder, eos):
    write(folder, "smollm2", eos_token_id=eos)
    return load(folder, dtype=torch.float32, device="cpu")


def test_sampling(tmp_path, ids):
    write(tmp_path, "qwen3")
    model = load(tmp_path, device="cpu").train()
    draw = [
        generate(model, ids, 10, temperature=1.5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert torch.equal(generate(model, ids, 10, temperature=0.7, top_k=1), generate(model, ids, 10))
    assert model.training
    # temperature 1 draws from the model's own distribution
    model.float()
    p = model(ids[:1]).logits[0, -1].softmax(-1)
    generator = torch.Generator().manual_seed(0)
    tokens = generate(model, ids[:1].expand(4000, -1), 1, temperature=1.0, generator=generator)[:, -1]
    share = torch.bincount(tokens, minlength=96) / 4000
    assert ((share - p).abs() < 4 * (p / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "temperature": -1.0},
        {"max_new_tokens": 4, "top_k": 0},
        {"max_new_tokens": 60},
    ],
)
def test_impossible_requests(arguments, ids):
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=8, heads=2, kv_heads=1, vocab=96, ffn=8, max_length=64))
    with refused(ValueError):
        generate(model, ids, **arguments)


def test_other_models_have_their_own_generate(ids):
    with refused(TypeError):
        generate(torch.nn.Linear(2, 2), ids, 4)
