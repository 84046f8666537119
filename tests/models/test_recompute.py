"""Recompute: what is kept between forward and backward, that it changes no bit, and that it stays out of the way elsewhere."""

import pytest
import torch
import transformers

import surokit as sk
from surokit.convert import scaling_state
from surokit.models.decoder import Decoder, DecoderConfig, KeyValueCache
from surokit.models.fuse import OFF, Fusion, fuse
from surokit.quantizer import Quantizer

CONFIG = DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=96, ffn=128, qk_norm=True)
IDS = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def decoder(dtype=torch.bfloat16, recipe=None):
    torch.manual_seed(0)
    model = Decoder(CONFIG, dtype=dtype)
    if recipe is not None:
        sk.apply(model, recipe)
    return model


def trained(model, **options):
    model.zero_grad()
    torch.manual_seed(3)
    out = model(**BATCH, **options)
    out.loss.backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def bytes_kept(model):
    """Of the tensors that autograd holds after forward, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**BATCH).loss
    assert loss.requires_grad
    return sum(held.values())


STOCHASTIC = Quantizer(sk.E4M3, sk.PerRow(), rounding="stochastic")
RECIPES = {
    "bf16": None,
    "fp8": sk.FP8,
    "fp8-rowwise": sk.FP8_ROWWISE,
    "fp4": sk.FP4,
    "qfp8-lora": sk.QFP8.lora(rank=4),
    "random forward": sk.Recipe("random", forward=sk.Gemm(STOCHASTIC, STOCHASTIC)),
}


def two_steps(recipe, base, recompute):
    model = decoder(recipe=recipe)
    fuse(model, base, recompute=recompute)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    steps = []
    for _ in range(2):
        steps += trained(model)
        optimizer.step()
    return [*steps, *scaling_state(model).values()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_bit_changes(recipe):
    for base, others in ((OFF, ["full"]), (Fusion(), ["selective", "full"])):
        kept = two_steps(RECIPES[recipe], base, "none")
        for recompute in others:
            again = two_steps(RECIPES[recipe], base, recompute)
            assert len(again) == len(kept)
            assert all(torch.equal(a, b) for a, b in zip(again, kept)), recompute


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rowwise", "qfp8-lora"])
def test_less_is_kept(recipe):
    """Of a norm's output that backward wants in bfloat16; codes of one byte are kept rather than made again."""
    kept = {}
    for recompute in ("none", "selective", "full"):
        model = decoder(recipe=RECIPES[recipe])
        fuse(model, recompute=recompute)
        kept[recompute] = bytes_kept(model)
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["selective"] < 0.85 * kept["none"] or recipe == "fp8-rowwise"
    assert kept["selective"] <= kept["none"]


def test_a_block_keeps_its_input_only():
    model = decoder()
    fuse(model, recompute="full")
    calls = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    loss = model(**BATCH).loss
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_nothing_is_computed_again_without_gradients():
    model = decoder()
    fuse(model, recompute="full")
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    cache = KeyValueCache(CONFIG, 2, 32, torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in IDS.split(16, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(IDS).logits, atol=0.1, rtol=0.1)
    assert len(calls) == 3


def test_a_session_with_meters_trains_the_same():
    losses = []
    for recompute in ("none", "full"):
        model = decoder()
        fuse(model, recompute=recompute)
        session = sk.Session(
            model, [BATCH], recipe=sk.FP8, optimizer=sk.AdamW(lr=1e-3), schedule=None, meters=[sk.numerics(every=2)]
        )
        session.run(4)
        losses.append([(record.loss, record.grad_norm) for record in session.records])
    assert losses[0] == losses[1]


def test_under_autocast():
    results = []
    for recompute in ("none", "full"):
        model = decoder(torch.float32)
        fuse(model, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(trained(model))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# torch's own tracing of an autograd.Function makes an instance of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# torch's own tracing looks at .grad with this warning silenced, which a thread of another test can undo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled():
    model = decoder(torch.float32)
    fuse(model, recompute="full")
    compiled = torch.compile(model.model, backend="eager")
    ours, theirs = (
        torch.autograd.grad(f(IDS, None, None).sum(), [*model.model.parameters()]) for f in (compiled, model.model)
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_earlier_keys_in_a_cache_are_seen():
    """A block that is computed again starts without a cache, so one that has something to see there is not."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, head_dim=8, num_hidden_layers=2, vocab_size=96, pad_token_id=None)
    model = transformers.Qwen3ForCausalLM(config).train()
    losses = []
    for recompute in ("none", "full"):
        fuse(model, recompute=recompute)
        with torch.no_grad():
            cache = model(IDS[:, :9]).past_key_values
        losses.append(model(IDS[:, 9:], labels=IDS[:, 9:], past_key_values=cache).loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("own", [False, True], ids=["ours", "transformers' own beside it"])
def test_of_a_transformers_model(own):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=96, pad_token_id=None)
    model = transformers.Qwen3ForCausalLM(config).train()
    fuse(model)
    expected = trained(model)
    kept = bytes_kept(model)
    fuse(model, recompute="full")
    if own:
        model.activation_checkpointing_enable()
    calls = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for ours, theirs in zip(trained(model), expected):
        assert torch.equal(ours, theirs)
    assert len(calls) == 2
    assert bytes_kept(model) < 0.5 * kept
    model.eval()
    with torch.no_grad():
        assert model(IDS, use_cache=True).past_key_values.get_seq_length() == 32
