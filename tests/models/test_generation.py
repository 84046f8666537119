"""Greedy search equals transformers', of prompts of different lengths too; a row of a batch gets what it gets alone, in every
recipe; sampling follows its generator; impossible requests are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import surokit as sk
from surokit.models import decoder
from surokit.models.checkpoint import load
from surokit.models.decoder import KeyValueCache
from surokit.models.generation import Generation, generate
from surokit.nn.attention import attention as compute
from surokit.recipe import find_recipe
from tests.models.families import FAMILIES, SPARSE, write
from tests.refusals import refused

LENGTHS = (9, 4, 1)
CONFIG = sk.DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=96, ffn=256, max_length=64, qk_norm=True)
RECIPES = [*sk.recipes, "fp8-rowwise+qfp8", "fp8-block+qfp8", "mxfp8+qfp4", "mxfp4+qnf4", "fp4+qnf4"]


@pytest.fixture
def ids():
    return torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask():
    """Of prompts of LENGTHS tokens in `ids`, padded at the left."""
    return (torch.arange(9) >= 9 - torch.tensor(LENGTHS)[:, None]).long()


def prompts_of(ids, mask):
    return [row[real.bool()] for row, real in zip(ids, mask)]


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
    counted: Any = np.int64(ends[0])
    assert torch.equal(generate(ours, ids[:1], 12, eos_id=counted), alone)
    assert alone.shape[1] <= 13
    assert alone[0, -1] == ends[0]


# -- prompts of different lengths


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE])
def test_padded_prompts_equal_transformers(family, tmp_path, ids, mask):
    theirs = write(tmp_path, family)
    ours = load(tmp_path, dtype=torch.float32, device="cpu")
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(ours, ids, 20, attention_mask=mask), expected)
    end = int(expected[0, 15])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    expected = theirs.generate(ids, attention_mask=mask, **options)
    assert torch.equal(generate(ours, ids, 12, attention_mask=mask.bool(), eos_id=end), expected)


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "qwen3", "mixtral-window"])
def test_a_row_gets_what_it_gets_alone(family, tmp_path, ids, mask):
    write(tmp_path, family)
    model = load(tmp_path, dtype=torch.float32, device="cpu")
    tokens, logits = written(model, ids, attention_mask=mask)
    for row, prompt in enumerate(prompts_of(ids, mask)):
        alone, alone_logits = written(model, prompt[None])
        assert torch.equal(tokens[row, 9 - len(prompt) :], alone[0])
        torch.testing.assert_close(logits[row], alone_logits[0], atol=1e-5, rtol=1e-5)
        whole = model(alone).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits[row], whole, atol=1e-5, rtol=1e-5)


def test_a_list_of_prompts_is_padded(tmp_path, ids, mask):
    for pad, filled in ((None, 0), (-1, 0), (7, 7)):
        write(tmp_path / str(pad), "llama3", pad_token_id=pad)
        model = load(tmp_path / str(pad), dtype=torch.float32, device="cpu")
        prompts = prompts_of(ids, mask)
        out = generate(model, prompts, 8)
        assert out.dtype == torch.int64
        assert torch.equal(out[:, :9], torch.where(mask.bool(), ids, filled))
        assert torch.equal(out[:, 9:], generate(model, ids, 8, attention_mask=mask)[:, 9:])
        assert torch.equal(generate(model, tuple(prompt.tolist() for prompt in prompts), 8), out)
        assert torch.equal(generate(model, ids.tolist(), 8), generate(model, ids, 8))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 4, 1, 3), (6, 5, 1), (12,)])
def test_a_padded_cache_in_pieces_equals_each_row_alone(window, pieces, ids, mask):
    """Pieces may end anywhere: within the padding, or behind it in some rows only. Rotation and visibility are told exactly, as
    logits hardly are: only distances of positions count in them, and torch makes 0 of what sees nothing on a CPU alone."""
    model = decoded(sliding_window=window)
    padding = 9 - mask.sum(1)
    tokens = torch.cat((ids, ids[:, :3]), 1)
    cache = KeyValueCache(model.config, 3, 12, torch.device("cpu"), torch.float32, padding)
    rotated, parts = [], []
    model.model.rotary_emb.register_forward_pre_hook(lambda module, args: rotated.append(args[2]))
    with torch.no_grad():
        for piece in tokens.split(pieces, 1):
            sees = cache.visibility(piece.shape[1], window, None, piece.device, torch.float32)
            assert isinstance(sees, torch.Tensor)
            assert sees.any(-1).all()
            parts.append(model(piece, cache=cache).logits)
        assert torch.equal(torch.cat(rotated, 1), (torch.arange(12) - padding[:, None]).clamp_min(0))
        logits = torch.cat(parts, 1)
        for row, first in enumerate(padding.tolist()):
            alone = model(tokens[row : row + 1, first:]).logits[0]
            torch.testing.assert_close(logits[row, first:], alone, atol=1e-5, rtol=1e-5)


def test_a_full_cache(ids):
    model = decoded()
    cache = KeyValueCache(CONFIG, 3, 9, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        model(ids, cache=cache)
        with refused(ValueError):
            model(ids[:, :1], cache=cache)


def decoded(recipe=None, **changes):
    """A Decoder in float32 with `recipe`, in evaluation mode."""
    torch.manual_seed(0)
    model = sk.Decoder(sk.DecoderConfig(**{**vars(CONFIG), **changes}))
    if recipe is not None:
        assert recipe.name == "bf16" or sk.apply(model, recipe).converted == 14
    return model.eval()


def written(model, ids, **options):
    """The tokens of 8 steps, and the logits that they were chosen by, [B, 8, V]."""
    writing = Generation(model, ids, 8, eos_id=(), **options)
    writing.prefill()
    logits = [writing.logits]
    while not writing.ended:
        writing.step()
        logits.append(writing.logits)
    return writing.ids, torch.stack(logits, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name, ids, mask):
    """A row of a padded batch gets the logits that it gets alone, and those of one forward over all of its tokens.

    Up to float32's roundings where no activation is quantized, and where each token has scales of its own: a rounding may then
    turn a code at the border of two, seldom, and one code of many changes less than quantization itself. A scale that reaches over
    the tensor knows of the batch, so that its codes are others each time: their errors differ, and two of one size are at most
    sqrt(2) of it apart where they are independent.
    """
    recipe = find_recipe(name)
    model, plain, q = decoded(recipe), decoded(), recipe.forward.a
    if q is not None and q.delayed:  # the amaxes of a training step are in force from then on, whatever the batch is
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        model.eval()
    shared = q is not None and not q.delayed and isinstance(q.scaling, sk.PerTensor | sk.NV)
    tokens, logits = written(model, ids, attention_mask=mask)
    errors, own = [], []
    for row, prompt in enumerate(prompts_of(ids, mask)):
        alone, alone_logits = written(model, prompt[None])
        text = tokens[row : row + 1, 9 - len(prompt) :]
        alike = 1 + int((alone == text)[0, len(prompt) : -1].cumprod(0).sum())  # what was written before is the same
        with torch.no_grad():
            whole, exact = (m(text).logits[0, len(prompt) - 1 : -1] for m in (model, plain))
        errors += distances(logits[row, :alike], alone_logits[0, :alike]) + distances(logits[row], whole)
        own += distances(whole, exact)
    errors, typical = sorted(errors), sorted(own)[len(own) // 2]
    if shared:
        assert errors[len(errors) // 2] < 1.5 * typical
    else:
        assert errors[len(errors) // 2] < 1e-5
        assert errors[-1] < (1e-5 if q is None else typical)


def distances(ours, theirs):
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).tolist()


def test_every_module_keeps_its_mode(ids):
    model = decoded().train()
    frozen = model.model.layers[0].eval()
    generate(model, ids, 2)
    modes = {module: module.training for module in model.modules()}
    assert not any(modes.pop(module) for module in frozen.modules())
    assert all(modes.values())


# -- a forward at a time


def test_prefill_and_step(ids, mask):
    model = decoded()
    writing = Generation(model, ids, 5, attention_mask=mask)
    with refused(RuntimeError):
        writing.step()
    tokens = [writing.prefill()]
    assert torch.equal(writing.ids, torch.cat((ids, tokens[0]), 1))
    assert (writing.logits.shape, writing.logits.dtype) == ((3, 96), torch.float32)
    assert writing.cache.seen == 9
    assert not writing.logits.requires_grad
    with refused(RuntimeError):
        writing.prefill()
    while not writing.ended:
        tokens.append(writing.step())
    assert {(token.shape, token.dtype) for token in tokens} == {((3, 1), torch.int64)}
    assert torch.equal(writing.ids, torch.cat((ids, *tokens), 1))
    assert torch.equal(writing.ids, generate(model, ids, 5, attention_mask=mask))
    with refused(RuntimeError):
        writing.step()


@pytest.mark.parametrize("tied", [False, True])
def test_a_divided_model_generates_before_and_between_its_steps(tied, one_process, ids, mask):
    """FSDP2 gathers embedding, last norm and head around the root's own forward alone, which has to be the first that runs."""
    whole, divided = decoded(tied=tied), decoded(tied=tied)
    for block in divided.model.layers:
        fully_shard(block, mesh=one_process)
    fully_shard(divided, mesh=one_process)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, divided)]
    for _ in range(2):
        assert torch.equal(*(generate(model, ids, 8, attention_mask=mask) for model in (whole, divided)))
        for model, optimizer in zip((whole, divided), optimizers):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(*(written(model, ids)[1] for model in (whole, divided)))


class Operations(TorchDispatchMode):
    """The names of the operations of torch that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_neither_wait_nor_grow(window, padded, ids, mask, monkeypatch):
    """Every step runs the same operations, over keys that stay where they are, and makes no mask; without padding none is there."""
    model = decoded(sliding_window=window)
    writing = Generation(model, ids, 6, eos_id=95, attention_mask=mask if padded else torch.ones_like(mask))
    seen = []

    def attention(q, k, v, causal, mask):
        seen.append((k.data_ptr() - k.stride(2) * 4 * first(), k.shape[2], None if mask is None else mask.data_ptr()))
        return compute(q, k, v, causal=causal, mask=mask)

    def first():
        return 0 if window is None else max(0, writing.cache.seen + 1 - window)

    def made(*args):
        raise AssertionError("a mask is made")

    with Operations() as prefill:
        writing.prefill()
    monkeypatch.setattr(decoder, "attention", attention)
    monkeypatch.setattr(decoder, "visibility", made)
    monkeypatch.setattr(decoder, "visible", made)
    steps = []
    for _ in range(5):
        with Operations() as step:
            writing.step()
        steps.append(step.names)
    assert all(names == steps[0] for names in steps)
    assert not {"aten::cat", "aten::_local_scalar_dense", "aten::nonzero"} & {*prefill.names, *steps[0]}
    assert len({key for key, _, _ in seen}) == 2  # one place a block
    assert [S for _, S, _ in seen[::2]] == ([10, 11, 12, 13, 14] if window is None else [4] * 5)
    masks = {mask for _, _, mask in seen}
    assert masks == {None} if not padded else None not in masks


# -- ends and samples


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


@pytest.mark.parametrize(
    ("prompts", "mask", "error"),
    [
        ([[2, 3, 4], [5, 6, 0]], [[1, 1, 1], [1, 1, 0]], ValueError),
        ([[2, 3, 4], [5, 0, 6]], [[1, 1, 1], [1, 0, 1]], ValueError),
        ([[2, 3, 4], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]], ValueError),
        ([[2, 3, 4]], [[1, 1]], ValueError),
        ([[2, 3, 4]], [[1.0, 1.0, 1.0]], TypeError),
    ],
    ids=["right", "holes", "nothing", "shape", "dtype"],
)
def test_masks_that_are_refused(prompts, mask, error):
    with refused(error):
        generate(decoded(), torch.tensor(prompts), 4, attention_mask=torch.tensor(mask))


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([2, 3, 4], TypeError),
        (["a text"], TypeError),
        ([torch.ones(3)], TypeError),
        ([torch.ones(1, 3, dtype=torch.int64)], TypeError),
        ([[2], []], ValueError),
        ([], ValueError),
        (None, TypeError),
    ],
    ids=["flat", "text", "floats", "two-dimensional", "empty", "none", "nothing"],
)
def test_prompts_that_are_refused(prompts, error):
    with refused(error):
        generate(decoded(), prompts, 4)


def test_a_list_has_no_mask(mask):
    with refused(TypeError):
        generate(decoded(), [[2, 3], [4]], 4, attention_mask=mask)


def test_other_models_have_their_own_generate(ids):
    with refused(TypeError):
        generate(torch.nn.Linear(2, 2), ids, 4)
