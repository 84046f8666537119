"""The decoder's own contract: output, masks, packed documents, ids that are refused, compilation without a break."""

import copy
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

import surokit as sk
from surokit.models import decoder
from surokit.models.checkpoint import load
from surokit.models.decoder import Decoder, DecoderConfig, KeyValueCache
from surokit.nn.attention import visible
from surokit.nn.linear import Linear
from tests.models.families import write
from tests.refusals import refused

CONFIG = DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=50, ffn=48, max_length=64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(CONFIG)


@pytest.fixture
def ids():
    return torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(1))


def test_output(model, ids):
    out = model(ids, labels=ids)
    logits = model(ids).logits
    assert model(ids).loss is None
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.logits, logits)
    assert out.logits is out.logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    out.logits.sum().backward()  # read late, they still carry gradients
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_initial_parameters_and_keys(model):
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layer = model.model.layers[0]
    for weight, std in (
        (model.model.embed_tokens.weight, CONFIG.width**-0.5),
        (layer.mlp.up_proj.weight, 0.5 * CONFIG.width**-0.5),
        (layer.mlp.down_proj.weight, 0.5 * CONFIG.ffn**-0.5 / (2 * CONFIG.layers) ** 0.5),
        (layer.self_attn.o_proj.weight, 0.5 * CONFIG.width**-0.5 / (2 * CONFIG.layers) ** 0.5),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)
    assert "model.layers.1.self_attn.o_proj.weight" in model.state_dict()
    untied = Decoder(DecoderConfig(**{**vars(CONFIG), "tied": False}), dtype=torch.bfloat16)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert {p.dtype for p in untied.parameters()} == {torch.bfloat16}
    assert all(isinstance(m, Linear) for m in untied.modules() if isinstance(m, torch.nn.Linear))


def test_meta_device_and_copies(model, ids):
    empty = Decoder(CONFIG, device="meta")
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    for other in (empty, copy.deepcopy(model)):
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_packed_documents_with_positions_equal_documents_alone(tmp_path, ids):
    theirs = write(tmp_path, "qwen3")
    model = load(tmp_path, dtype=torch.float32, device="cpu")
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    packed = model(ids, position_ids=positions).logits
    alone = torch.cat((model(ids[:, :7]).logits, model(ids[:, 7:]).logits), dim=1)
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(
        packed, theirs(ids, position_ids=positions, use_cache=False).logits, atol=1e-5, rtol=1e-5
    )
    starts = torch.tensor([[0, 7, 20], [0, 7, 20]])
    assert torch.equal(model(ids, position_ids=positions, documents=starts).logits, packed)
    # without positions a row is one text
    assert not torch.allclose(model(ids).logits[:, 7:], alone[:, 7:])


def test_what_is_visible():
    cpu = torch.device("cpu")
    assert visible(5, 0, None, None, cpu) is None
    assert visible(5, 0, 5, None, cpu) is None
    assert visible(1, 9, None, None, cpu) is None
    assert seen(4, 0, 2) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(1, 3, 2) == [[0, 0, 1, 1]]
    assert seen(2, 1, None) == [[1, 1, 0], [1, 1, 1]]
    assert seen(3, 0, None, torch.tensor([[0, 1, 0]])) == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]


def seen(T, start, window, position_ids=None):
    mask = visible(T, start, window, position_ids, torch.device("cpu"))
    assert mask is not None
    return mask.int().tolist()


def test_cache_in_pieces_equals_the_whole(model, ids):
    whole = model(ids).logits
    cache = KeyValueCache(CONFIG, 2, 20, torch.device("cpu"), torch.float32)
    with refused(ValueError):
        model(ids, cache=cache)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([8, 1, 6, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.seen == 20


@pytest.mark.parametrize("outside", [-1, "vocab"])
def test_ids_outside_of_the_vocabulary_are_named(model, ids, outside):
    """Where they make an error: on a GPU a look at them would wait for it."""
    value = model.config.vocab if outside == "vocab" else outside
    wrong = ids.clone()
    wrong[0, 2] = value

    with refused(IndexError):
        model(wrong)
    with refused(IndexError):
        sk.generate(model, wrong, 1)
    with refused(IndexError):
        model(ids, labels=wrong)


def test_lists_are_no_ids(model, ids):
    with refused(TypeError):
        model(ids.tolist())
    with refused(TypeError):
        model(ids, labels=ids.tolist())


def test_other_errors_of_forward_stay_what_they_are(model, ids):
    model.model.norm.register_forward_hook(lambda *args: [][1])
    with pytest.raises(IndexError, match="list index out of range"):
        model(ids)


def test_ids_that_are_refused(model, ids):
    with refused(TypeError):
        model(ids.float())
    for bad in (ids[0], ids[:, :0], ids[None]):
        with refused(ValueError):
            model(bad)
    with refused(ValueError):
        model(ids, labels=ids[:, 1:])
    with refused(ValueError):
        model(ids, documents=torch.tensor([0, 7]))
    with refused(TypeError):
        model(ids, labels=ids.int())
    with refused(ValueError):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_configs_that_do_not_fit():
    good = vars(CONFIG)
    for change in (
        {"heads": 3, "head_dim": None},
        {"width": 30, "head_dim": None},
        {"head_dim": 7},
        {"layers": 0},
        {"vocab": 10.5},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"family": "gpt2"},
    ):
        with refused(ValueError):
            DecoderConfig(**{**good, **change})


def test_config_goes_round():
    for config in (
        CONFIG,
        DecoderConfig(**{**vars(CONFIG), "qk_norm": True, "tied": False, "eos_id": (1, 2), "norm_eps": 1e-6}),
        DecoderConfig(**{**vars(CONFIG), "qkv_bias": True, "sliding_window": 8, "window_layers": (1,)}),
        DecoderConfig(**{**vars(CONFIG), "sliding_window": 8}),
    ):
        back = DecoderConfig.from_hf(config.to_hf())
        assert {**vars(back), "family": None} == vars(config)
        assert hash(back) == hash(DecoderConfig.from_hf(back.to_hf()))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.int64(3), 3),
        (np.uint32(0), 0),
        ([np.int64(3), np.int32(4)], (3, 4)),
        (np.array([3, 4]), (3, 4)),
        ((), ()),
        (None, None),
    ],
    ids=["one", "zero", "a list", "an array", "none of several", "none"],
)
def test_tokens_that_numpy_counted_are_numbers_of_json(given, kept):
    bos = np.int64(2**31 - 1)
    config = DecoderConfig(**{**vars(CONFIG), "eos_id": given, "bos_id": bos, "pad_id": np.int16(-1)})
    assert config == DecoderConfig(**{**vars(CONFIG), "eos_id": kept, "bos_id": 2**31 - 1, "pad_id": -1})
    assert DecoderConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert json.dumps(config.to_hf())


def test_a_head_that_is_more_than_a_weight(model, ids):
    plain = model(ids, labels=ids).loss
    sk.apply(model, sk.FP8_CURRENT.also("lm_head"))
    assert model.lm_head.precision is not None
    loss = model(ids, labels=ids).loss
    assert loss != plain
    assert abs(float((loss - plain).detach())) < 0.05 * float(plain.detach())
    loss.backward()
    assert model.lm_head.weight.grad is not None
    sk.apply(model, sk.BF16.lora(rank=2, targets=("lm_head",)))
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.lora_B.weight.grad.abs().max() > 0


def test_autocast(ids):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**vars(CONFIG), "qk_norm": True}))
    exact = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    for ours, best in zip(torch.autograd.grad(loss, list(model.parameters())), exact):
        assert ours.dtype == torch.float32
        assert (ours - best).norm() < 0.05 * best.norm()


# torch's own tracing of an autograd.Function makes an instance of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_a_break(model, ids, dtype):
    model.to(dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, expected = compiled(ids, labels=ids), model(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out.logits, expected.logits, atol=2e-2, rtol=2e-2)
    out.loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected.loss.backward()
    for name, parameter in model.named_parameters():
        assert (ours[name] - parameter.grad).norm() <= (
            1e-4 if dtype == torch.float32 else 0.03
        ) * parameter.grad.norm()
    torch.testing.assert_close(compiled(ids).logits, expected.logits, atol=2e-2, rtol=2e-2)


def test_weights_are_cast_as_they_are_made(monkeypatch):
    """A model of 8B would need 33 GB for a moment if all of it were there in float32."""
    made: list[decoder.Block] = []
    real = decoder.Block.__init__

    def init(block, *arguments):
        assert all(p.dtype == torch.bfloat16 for earlier in made for p in earlier.parameters())
        real(block, *arguments)
        made.append(block)

    monkeypatch.setattr(decoder.Block, "__init__", init)
    config = DecoderConfig(layers=3, width=32, heads=2, kv_heads=1, vocab=40, ffn=48)
    model = Decoder(config, dtype=torch.bfloat16)
    assert len(made) == 3
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
