"""Streamed weights: the same numbers as without, few blocks on the device, bytes by a formula, and time beside the computation."""

import copy
import functools
import gc
import pickle
import random
import signal
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.blocks import blocks_of
from surokit.models.decoder import Decoder, DecoderConfig
from surokit.offload.link import HostLink, ThrottledLink
from surokit.offload.weights import Streamed, offload_weights
from surokit.train import AdamW, Session
from tests.offload.reckoned import ReckonedLink
from tests.refusals import refused
from tests.train.toys import make_batches

CONFIG = DecoderConfig(vocab=32, width=64, ffn=128, layers=5, heads=2, kv_heads=1)
L = CONFIG.layers
FAST = 50.0  # GB/s


def decoder(seed=0, **changes):
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**{**CONFIG.__dict__, **changes}))


def link():
    """With transfers that come late, each by another time."""
    late = random.Random(0)
    return ThrottledLink(FAST, delay=lambda: late.uniform(0, 0.003), late_fill=True)


def ids(seed=0, rows=2, length=8):
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [p.grad for p in model.parameters()]


def assert_same_step(plain, streamed, seed=0, **options):
    """Forward and backward of both give the same loss and gradients, bit for bit."""
    tokens = ids(seed)
    losses = []
    for model in (plain, streamed):
        torch.manual_seed(seed)
        loss = model(input_ids=tokens, labels=tokens, **options).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    found = 0
    for (name, p), (other, q) in zip(plain.named_parameters(), streamed.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            found += 1
            assert torch.equal(p.grad, q.grad), name
    assert found


def bytes_of(*tensors):
    return sum(-(-t.nbytes // 16) * 16 for t in tensors)


# -- the same numbers


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_steps_are_those_of_the_model_without(prefetch):
    plain, model = decoder(), decoder()
    stream = offload_weights(model, prefetch=prefetch, link=link())
    for step in range(3):
        for part in range(2):  # gradients add up
            assert_same_step(plain, model, seed=2 * step + part)
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert stream.peak_blocks == min(L, prefetch + 1)
    assert stream.resident_blocks == 0


def test_the_same_parameters_keys_and_classes():
    model = decoder()
    before, keys = [id(p) for p in model.parameters()], list(model.state_dict())
    values = copy.deepcopy(model.state_dict())
    offload_weights(model, link=link())
    assert [id(p) for p in model.parameters()] == before
    assert list(model.state_dict()) == keys
    assert all(torch.equal(values[name], t) for name, t in model.state_dict().items())


def test_a_model_of_transformers_and_its_cache():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2, pad_token_id=None)
    gpt2 = transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=3, n_head=4)  # with dropout
    for config in (llama, gpt2):
        torch.manual_seed(0)
        plain = transformers.AutoModelForCausalLM.from_config(config)
        model = copy.deepcopy(plain)
        stream = offload_weights(model, link=link())
        # with a cache its keys lie otherwise in memory, and some processors sum otherwise
        plain.train().config.use_cache = False
        model.train().config.use_cache = True  # a block that is computed again must not extend it again
        assert_same_step(plain, model)
        assert (stream.blocks, stream.peak_blocks) == (3, 2)
        plain.eval().config.use_cache, model.eval().config.use_cache = True, True
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(plain.generate(ids(), **options), model.generate(ids(), **options))
        assert stream.peak_blocks == 2


def test_their_checkpointing_beside_it_costs_nothing():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, intermediate_size=64))
    model = copy.deepcopy(plain)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    stream = offload_weights(model.train(), link=link())
    assert_same_step(plain.train(), model)
    assert stream.bytes_up == (2 * 3 - 2) * stream.block_bytes


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_recipes_and_their_amaxes(recipe):
    plain, model = decoder(layers=3).bfloat16(), decoder(layers=3).bfloat16()
    for each in (plain, model):
        sk.apply(each, recipe)
    offload_weights(model, link=link())
    for step in range(2):
        assert_same_step(plain, model, seed=step)
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.step()  # rolls the histories
            optimizer.zero_grad()
    from surokit.nn.delayed import amaxes_of

    assert all(torch.equal(a, b) for a, b in zip(amaxes_of(plain), amaxes_of(model), strict=True))
    assert bool(amaxes_of(model)) == (recipe == "fp8")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_fused_model(recompute):
    plain, model = decoder().bfloat16(), decoder().bfloat16()
    for each in (plain, model):
        sk.apply(each, "fp8")
        sk.fuse(each, recompute=recompute)
    stream = offload_weights(model, link=link())
    for step in range(2):
        assert_same_step(plain, model, seed=step)
    assert stream.bytes_up == 2 * (2 * L - 2) * stream.block_bytes  # once again in backward, not twice
    assert stream.peak_blocks == 2


def test_joint_weights_lie_side_by_side_on_the_device():
    model = decoder().bfloat16()
    sk.fuse(model)
    seen = []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda module, args: seen.append([p.weight.data_ptr() for p in module.readers]))
    offload_weights(model, link=link())
    with torch.no_grad():
        model(ids())
    q, k, v = seen[0]
    assert (k - q, v - k) == (attention.q_proj.weight.nbytes, attention.k_proj.weight.nbytes)
    assert q != attention.q_proj.weight.data_ptr()


class Dropping(nn.Module):
    """Blocks with dropout, called by keyword; a list of norms that are no blocks of the stack."""

    def __init__(self, layers=3, width=32, p=0.5):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(p), nn.ReLU(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 32)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def test_dropout_draws_the_same_numbers_again():
    torch.manual_seed(0)
    plain = Dropping()
    model = copy.deepcopy(plain)
    offload_weights(model, link=link())
    for seed in range(2):
        assert_same_step(plain, model, seed)


def test_autocast():
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(plain, model)


def test_a_block_that_is_called_twice_and_one_that_is_skipped():
    class Odd(Dropping):
        def forward(self, input_ids, labels):
            x = self.embed(input_ids)
            for n in (0, 2, 0, 4, 3):
                x = x + self.layers[n](x)
            return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    plain = Odd(layers=5)
    model = copy.deepcopy(plain)
    stream = offload_weights(model, link=link())
    for seed in range(2):
        assert_same_step(plain, model, seed)
        for each in (plain, model):
            each.zero_grad()  # onto others, two gradients of one backward are added one by one
    assert stream.peak_blocks <= 2


def test_two_forwards_before_their_backward():
    plain, model = decoder(), decoder()
    stream = offload_weights(model, link=link())
    first = []
    for each in (plain, model):
        losses = [each(ids(seed), labels=ids(seed)).loss for seed in (0, 1)]
        losses[0].backward()
        (2 * losses[1]).backward()
        first.append([p.grad.clone() for p in each.parameters()])
        each.zero_grad()
        sum(each(ids(seed), labels=ids(seed)).loss for seed in (2, 3)).backward()
    assert all(torch.equal(*pair) for pair in zip(*first))
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad), name
    assert (
        stream.peak_blocks <= 3
    )  # a graph may go on with another pass while the first one's last block is still there


def test_micro_batches_that_reach_different_parameters_of_a_block():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.either = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x, which):
            return sum((self.either[n](x) for n in which), x)

    torch.manual_seed(0)
    plain = nn.ModuleList(Either() for _ in range(2))
    model = copy.deepcopy(plain)
    offload_weights(model, blocks=model, link=link())
    for each in (plain, model):
        for seed, which in enumerate(([0], [1], [2, 0], [1, 2])):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            for block in each:
                x = block(x, which)
            x.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


def test_retain_graph():
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    for each in (plain, model):
        loss = each(ids(), labels=ids()).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(*pair) for pair in zip(grads(plain), grads(model), strict=True))


def test_weights_that_change_are_seen():
    """After a step of a fused optimizer, a load and a change in place: nothing that was fetched before is used."""
    plain, model = decoder(), decoder()
    stream = offload_weights(model, prefetch=9, link=link())
    for each in (plain, model):
        each(ids(), labels=ids())  # no backward: blocks stay where they are
    other = decoder(seed=1).state_dict()
    for each in (plain, model):
        each.load_state_dict(other)
    assert_same_step(plain, model)
    for each in (plain, model):
        torch.optim.AdamW(each.parameters(), lr=0.1, fused=True).step()
    assert_same_step(plain, model)
    with torch.no_grad():
        for each in (plain, model):
            each(ids())
            each.model.layers[0].mlp.up_proj.weight.mul_(2)
            each.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(128, 64))
        assert torch.equal(plain(ids()).logits, model(ids()).logits)
    assert stream.resident_blocks == 0


def test_moving_the_model_lays_it_anew():
    plain, model = decoder().double(), decoder()
    stream = offload_weights(model, link=link())
    model.double()
    assert_same_step(plain, model)
    assert stream.block_bytes == bytes_of(*model.model.layers[0].parameters())


def test_a_backward_that_fails_leaves_no_trace():
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())

    def fail(*_):
        raise RuntimeError("on purpose")

    loss = model(ids(), labels=ids()).loss
    handle = model.model.layers[1].mlp.register_full_backward_hook(fail)
    loss = model(ids(), labels=ids()).loss
    with refused(RuntimeError):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    assert_same_step(plain, model)


def test_a_backward_of_an_older_graph_after_one_that_failed():
    """Its gradients arrive, and nothing of those that the other had sent."""
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    older = [each(ids(1), labels=ids(1)).loss for each in (plain, model)]

    def fail(*_):
        raise RuntimeError("on purpose")

    loss = model(ids(), labels=ids()).loss
    handle = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(fail)  # when it is computed again
    with refused(RuntimeError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    for each in older:
        each.backward()
    assert all(torch.equal(*pair) for pair in zip(grads(plain), grads(model), strict=True))


def test_a_failed_backward_sends_nothing_later():
    model = decoder()
    stream = offload_weights(model, link=ThrottledLink(FAST))
    loss = model(ids(), labels=ids()).loss
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.zero_grad()
    copy.deepcopy(model)
    stream.remove()
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_change_between_forward_and_backward():
    model = decoder()
    offload_weights(model, link=link())
    loss = model(ids(), labels=ids()).loss
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(2)
    with refused(RuntimeError):
        loss.backward()


class Wide(nn.Module):
    """A block of many parameters and no work."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 1) for _ in range(150))

    def forward(self, x):
        return x


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer it is only printed
def test_no_interrupt_leaves_the_device_s_tensors_in_a_model():
    model = nn.ModuleList([Wide()])
    offload_weights(model, link=HostLink())
    before = [id(p) for p in model.parameters()]
    rng, x, caught = random.Random(0), torch.ones(1), 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 2e-3))
                for _ in range(50):  # a finalizer may have swallowed it
                    with torch.no_grad():
                        model[0](x)
            except KeyboardInterrupt:
                caught += 1
            assert [id(p) for p in model.parameters()] == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        torch.set_grad_enabled(True)  # its context may have been left halfway
    assert caught > 30


def test_hooks_of_parameters_change_what_arrives():
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    for each in (plain, model):
        each.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * (grad > 0))
        each.model.layers[2].mlp.up_proj.weight.register_hook(lambda grad: None)
    for seed in range(2):
        assert_same_step(plain, model, seed)
    assert model.model.layers[1].mlp.up_proj.weight.grad.min() == 0


def test_inference_mode_makes_nothing_that_cannot_be_trained():
    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    for each in (plain, model):
        each.double()  # laid anew in the next forward
    with torch.inference_mode():
        assert torch.equal(plain(ids()).logits, model(ids()).logits)
    for step in range(2):
        assert_same_step(plain, model, seed=step)
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()


def test_hooks_on_gradients_that_arrived():
    model = decoder()
    offload_weights(model, link=link())
    seen: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.norm()))
    model(ids(), labels=ids()).loss.backward()
    assert set(seen) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(seen[name], p.grad.norm()) for name, p in model.named_parameters())


# -- adapters and quantized storage


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "qfp8", "qnf4"])
def test_adapters_stay_and_nothing_but_frozen_weights_moves(recipe, fused):
    plain, model = decoder().bfloat16(), decoder().bfloat16()
    for each in (plain, model):
        torch.manual_seed(1)
        sk.apply(each, getattr(sk, recipe.upper()).lora(4))
        sk.fuse(each, sk.Fusion() if fused else sk.Fusion.OFF)
        with torch.no_grad():
            for name, p in each.named_parameters():
                if "lora_B" in name:
                    p.copy_(torch.arange(p.numel()).view_as(p) % 7 * 0.01)
    stream = offload_weights(model, link=link())
    assert_same_step(plain, model)
    frozen = [p for p in model.model.layers[0].parameters() if not p.requires_grad]
    assert stream.block_bytes == bytes_of(*frozen)
    assert stream.bytes_up == (2 * L - 2) * stream.block_bytes
    kept = [any(getattr(m, "frozen", None) is not None for m in each.modules()) for each in (plain, model)]
    assert kept == [fused and recipe == "fp8", False]  # codes of weights that are gone again are not
    assert stream.bytes_down == 0
    assert stream.peak_blocks == 2


def test_quantized_storage_moves_a_half_and_a_quarter():
    moved = {}
    for recipe in ("bf16", "qfp8", "qnf4"):
        model = decoder(width=256, ffn=512, heads=4, layers=3).bfloat16()
        sk.apply(model, getattr(sk, recipe.upper()).lora(4))
        stream = offload_weights(model, link=link())
        model(ids(), labels=ids()).loss.backward()
        moved[recipe] = stream.bytes_up
    assert moved["qfp8"] / moved["bf16"] == pytest.approx(0.5, abs=0.01)
    assert moved["qnf4"] / moved["bf16"] == pytest.approx(0.258, abs=0.01)  # 4 bits, and a byte for 64 of them


def test_parameters_that_others_share_stay():
    first, *_, last = (model := Dropping()).layers
    first.get_submodule("0").weight = last.get_parameter("0.weight")
    model.head.bias = first.get_submodule("3").bias = nn.Parameter(torch.zeros(32))
    plain = copy.deepcopy(model)
    stream = offload_weights(model, link=link())
    weight, bias = 4 * 32 * 32, 4 * 32
    assert stream.host_bytes == 3 * (2 * weight + 2 * bias) - 2 * weight - bias
    assert_same_step(plain, model)


def test_only_some_blocks_are_trained():
    """Backward ends where nothing before is trained, and fetches nothing beyond."""
    plain, model = decoder(), decoder()
    for each in (plain, model):
        each.requires_grad_(False)
        each.model.layers[3:].requires_grad_(True)
    stream = offload_weights(model, link=link())
    assert_same_step(plain, model)
    first = stream.bytes_up
    assert_same_step(plain, model)  # now it is known which blocks backward comes to
    assert (first, stream.bytes_up - first) == (L * stream.block_bytes, L * stream.block_bytes)
    assert stream.bytes_down == 2 * 2 * stream.block_bytes


# -- bytes, room and time


@pytest.mark.parametrize("prefetch", [1, 2, 3, 9])
def test_bytes_of_a_step(prefetch):
    model = decoder()
    stream = offload_weights(model, prefetch=prefetch, link=link())
    block = bytes_of(*model.model.layers[0].parameters())
    assert (stream.block_bytes, stream.host_bytes) == (block, L * block)
    for step in range(1, 3):
        model(ids(), labels=ids()).loss.backward()
        assert stream.bytes_up == stream.link.bytes_up == step * (2 * L - min(L, prefetch + 1)) * block
        assert stream.bytes_down == stream.link.bytes_down == step * L * block
    before = stream.bytes_up
    with torch.no_grad():
        model(ids())
    assert stream.bytes_up - before == L * block
    assert stream.peak_bytes == min(L, prefetch + 1) * block
    assert "5 blocks" in repr(stream)
    assert f"at most {min(L, prefetch + 1)} blocks" in repr(stream)


class Busy(nn.Module):
    """A block that computes for a given time, once forward and twice that backward (with what is computed again)."""

    def __init__(self, elements, link, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements))
        self.compute = functools.partial(link.compute, seconds)

    def forward(self, x):
        self.compute()
        return x * self.weight[:1]


@pytest.mark.parametrize(("compute_s", "transfer_s"), [(0.06, 0.03), (0.06, 0.08)])
def test_transfers_run_beside_the_computation(compute_s, transfer_s):
    """A step takes the larger of both, and at its ends what nothing can run beside; not their sum."""
    layers, link = 6, ReckonedLink(transfer_s)
    model = nn.Sequential(*(Busy(8, link, compute_s) for _ in range(layers)))
    stream = offload_weights(model, blocks=list(model), link=link)
    computed, moved = 2 * layers * compute_s, (2 * layers - 2) * transfer_s
    # the first block's weights and the last one's gradients; while forward turns to backward nothing has to move
    expected = max(computed + transfer_s, moved + 3 * compute_s) + transfer_s
    # at the end of forward the host, which is the device here, waits for the copy that began with the last block
    expected += max(0.0, transfer_s - compute_s)
    model(torch.ones(1, requires_grad=True)).sum().backward()
    assert max(computed, moved) < link.now_s < computed + moved
    assert link.now_s == pytest.approx(expected)
    assert stream.peak_blocks == 2


# -- with the rest of the house


def make_session(model, **options):
    return Session(model, make_batches(), optimizer=AdamW(lr=1e-2), **options)


def test_a_session_saves_resumes_and_forks(tmp_path):
    plain = make_session(decoder())
    model = decoder()
    offload_weights(model, link=link())
    session = make_session(model, run_dir=tmp_path)
    for each in (plain, session):
        each.run(steps=2)
    session.save()
    twin = session.fork()
    resumed_model = decoder(seed=1)
    stream = offload_weights(resumed_model, link=link())
    resumed = Session.resume(tmp_path, model=resumed_model, data=make_batches())
    for each in (plain, session, twin, resumed):
        each.run(steps=2)
        assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), each.model.parameters(), strict=True))
    assert plain.records[-1].loss == session.records[-1].loss == resumed.records[-1].loss
    assert stream.bytes_up
    assert isinstance(vars(twin.model.model.layers[0])["forward"], Streamed)
    assert twin.model.model.layers[0].forward.module is twin.model.model.layers[0]


def test_a_session_computes_where_weights_come_to():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    offload_weights(model, blocks=list(model), link=link())
    from surokit.train.setup import device_of

    vars(model[0])["computes_on"] = torch.device("meta")  # as if it were another device than the parameters'
    assert device_of(model) == torch.device("meta")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_generation():
    plain, model = decoder().eval(), decoder().eval()
    stream = offload_weights(model, link=link())
    prompt = ids(rows=1, length=4)
    assert torch.equal(
        torch.as_tensor(sk.generate(plain, prompt, max_new_tokens=6, temperature=0.0)),
        torch.as_tensor(sk.generate(model, prompt, max_new_tokens=6, temperature=0.0)),
    )
    assert stream.peak_blocks == 2


def test_copies_and_pickles_stream_by_themselves():
    model = decoder()
    stream = offload_weights(model, link=ThrottledLink(FAST))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_step(model, other)
        assert other.model.layers[0].forward.stream is not stream
        assert other.model.layers[0].forward.stream.bytes_up
        model.zero_grad()


def test_remove_and_a_second_call():
    plain, model = decoder(), decoder()
    first = offload_weights(model, link=link())
    second = offload_weights(model, prefetch=2, link=link())
    assert_same_step(plain, model)
    assert (first.bytes_up, second.peak_blocks) == (0, 3)
    second.remove()
    before = second.bytes_up
    assert_same_step(plain, model)
    assert second.bytes_up == before
    assert not any("forward" in vars(m) or "computes_on" in vars(m) for m in model.modules())


def test_a_stream_that_was_replaced_leaves_the_model_alone():
    plain, model = decoder(), decoder()
    first = offload_weights(model, link=link())
    second = offload_weights(model, link=link())
    first.remove()
    assert all(layer.computes_on == second.device for layer in model.model.layers)
    assert_same_step(plain, model)
    assert second.bytes_up > 0
    for _ in range(2):
        second.remove()
    assert "computes_on" not in vars(model.model.layers[0])


@pytest.mark.parametrize("change", ["remove", "again", "others"])
def test_streaming_ends_between_forward_and_backward(change):
    plain, model = decoder(), decoder()
    stream = offload_weights(model, link=link())
    losses = [each(ids(), labels=ids()).loss for each in (plain, model)]
    if change == "remove":
        stream.remove()
    else:
        blocks = None if change == "again" else list(model.model.layers[:2])
        stream = offload_weights(model, blocks=blocks, prefetch=2, link=link())
    for loss in losses:
        loss.backward()
    assert all(torch.equal(*pair) for pair in zip(grads(plain), grads(model), strict=True))
    assert_same_step(plain, model)
    assert stream.peak_blocks <= 3


def test_streams_around_one_another_are_found():
    """A second call finds the first one's forwards behind those of activations, and they are gone then."""
    from surokit.offload.activations import offload_activations

    plain, model = decoder(), decoder()
    offload_weights(model, link=link())
    first = model.model.layers[0]
    saving = offload_activations(first, min_bytes=64, link=link())
    for _ in range(2):
        offload_weights(model, link=link())
        assert_same_step(plain, model)
    saving.remove()
    assert isinstance(first.forward, Streamed)
    first.forward.stream.remove()
    assert "forward" not in vars(first)


def test_fusing_afterwards():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, intermediate_size=64))
    model = copy.deepcopy(plain)
    offload_weights(model, link=link())
    for fusion in (sk.Fusion(recompute="full"), sk.Fusion.OFF):
        assert sk.fuse(plain.train(), fusion).line == sk.fuse(model.train(), fusion).line
        assert_same_step(plain, model)


def test_files_of_a_streamed_model(tmp_path):
    from safetensors.torch import load_file, save_file

    model = Dropping()
    values = copy.deepcopy(model.state_dict())
    offload_weights(model, link=link())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for found in (torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")):
        assert found.keys() == values.keys()
        assert all(torch.equal(values[name], t) for name, t in found.items())


def test_what_was_made_before_says_so():
    """A session whose model computes elsewhere since, an optimizer whose weights moved, a part that was moved away."""
    model = decoder()
    session = make_session(model)
    session.device = torch.device("meta")  # as if offload_weights had moved the model from there
    with refused(RuntimeError):
        session.run(steps=1)
    for optimizer in (AdamW(model.parameters(), lr=1e-2), sk.AdamW8bit(model.parameters(), lr=1e-2)):
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")
        with refused(RuntimeError):
            optimizer.step()
    streamed = Dropping()
    offload_weights(streamed, link=link())
    with refused(RuntimeError):
        streamed.layers[0](torch.ones(1, 32, device="meta"))


def test_nothing_piles_up():
    """Over many steps no memory, neither here nor in Python, and no thread; bytes as the formula says."""
    model = Dropping()
    stream = offload_weights(model, link=ThrottledLink(FAST))
    activations = sk.offload_activations(model, min_bytes=64, link=ThrottledLink(FAST))

    def steps(number):
        for step in range(number):
            model(ids(step % 3), ids(step % 3)).loss.backward()
            model.zero_grad(set_to_none=step % 2 == 0)
        gc.collect()
        return threading.active_count(), sum(type(o) is torch.Tensor for o in gc.get_objects())

    threads, tensors = steps(12)
    tracemalloc.start()
    try:
        steps(5)
        start = tracemalloc.get_traced_memory()[0]
        after = steps(20)
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert grown < 60_000
    assert after[0] <= threads
    assert after[1] < tensors + 15
    assert stream.bytes_up == stream.link.bytes_up == 37 * (2 * 3 - 2) * stream.block_bytes
    assert stream.bytes_down == stream.link.bytes_down == 37 * stream.host_bytes
    assert activations.bytes_down == activations.link.bytes_down
    assert (stream.resident_blocks, stream.peak_blocks, activations.device_bytes) == (0, 2, 0)


def test_compiled_around():
    """torch's compiler leaves the streamed blocks alone."""
    plain, model = Dropping(p=0.0), Dropping(p=0.0)
    model.load_state_dict(plain.state_dict())
    offload_weights(model, link=link())
    compiled = torch.compile(model, backend="eager")
    loss = compiled(ids(), ids()).loss
    loss.backward()
    plain(ids(), ids()).loss.backward()
    assert all(torch.equal(*pair) for pair in zip(grads(plain), grads(model), strict=True))


# -- what is found and refused


def test_blocks_are_the_outermost_lists_of_like_modules():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    encoder, decoder = (nn.ModuleList(kind() for _ in range(3)) for kind in (Nested, lambda: nn.Linear(2, 2)))
    mixed, drops = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.ModuleList(nn.Dropout() for _ in range(2))
    model = nn.ModuleDict({"encoder": encoder, "mixed": mixed, "drops": drops, "decoder": decoder})
    assert blocks_of(model) == [*encoder, *decoder]


def test_refusals(tiny):
    with refused(ValueError):
        offload_weights(tiny)  # its blocks are dicts, which nobody calls
    with refused(ValueError):
        offload_weights(decoder(), prefetch=0)
    model = decoder()
    with refused(ValueError):
        offload_weights(model, blocks=[model.model.layers[0]] * 2)
    with refused(ValueError):
        offload_weights(decoder(), blocks=[])
    with refused(ValueError):
        offload_weights(Decoder(CONFIG, device="meta"), device="cpu")
    with refused(ValueError):
        offload_weights(decoder(), blocks=model.model.layers)
    with refused(ValueError):
        offload_weights(model, blocks=[model.model.layers[0], model.model.layers[0].mlp])
    with refused(ValueError):
        offload_weights(decoder(), device="cuda", link=HostLink())


@pytest.mark.parametrize("function", [offload_weights, sk.offload_activations])
def test_kinds(function):
    for wrong in (3, "model", make_session(decoder())):
        with refused(TypeError):
            function(wrong)
    with refused(TypeError):
        function(decoder(), link=3)
    for wrong in ("cdua", 3.5):
        with refused(ValueError):
            function(decoder(), wrong)
    for wrong in (-1, True, 1.5, "2"):
        with refused(ValueError):
            function(decoder(), prefetch=wrong)
    with refused(ValueError):
        function(decoder(), "mps")
    if not torch.cuda.is_available():
        with refused(ValueError):
            function(decoder(), "cuda")


def test_blocks_that_are_none():
    each: list[Any] = [3, ["a"], [nn.Dropout()]]
    for wrong in each:
        with refused(ValueError):
            offload_weights(decoder(), blocks=wrong)


def test_a_prefix_of_keys_is_refused_in_training():
    model = Dropping()
    block = model.layers[0]
    offload_weights(model, link=link())
    with refused(ValueError):
        block(torch.ones(1, 32), past_key_values=SimpleNamespace(get_seq_length=lambda: 3))


def test_what_is_added_or_frozen_afterwards_finds_its_place():
    plain, model = decoder().bfloat16(), decoder().bfloat16()
    stream = offload_weights(model, link=link())
    everything = stream.host_bytes
    for each in (plain, model):
        torch.manual_seed(0)
        sk.apply(each, sk.QFP8.lora(4))
        for p in each.model.layers[0].parameters():
            p.requires_grad_(False)
    assert_same_step(plain, model)
    assert stream.host_bytes < 0.6 * everything
    assert stream.bytes_down == 0
