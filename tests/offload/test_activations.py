"""Activations on the host: the same gradients, one copy of a memory, little on the device, time beside the computation."""

import copy
import gc
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

from surokit.models.decoder import Decoder, DecoderConfig
from surokit.offload.activations import ActivationStream, offload_activations
from surokit.offload.link import HostLink, ThrottledLink
from surokit.offload.weights import offload_weights
from surokit.train import AdamW, Session
from tests.offload.reckoned import ReckonedLink
from tests.offload.test_weights import Dropping, assert_same_step, decoder, ids
from tests.refusals import refused
from tests.train.toys import make_batches

FAST = 50.0  # GB/s


def link():
    return ThrottledLink(FAST, late_fill=True)


def saving(min_bytes=1, **options):
    return offload_activations(min_bytes=min_bytes, link=link(), **options)


# -- the same numbers


@pytest.mark.parametrize("prefetch", [0, 1, 2, 99])
def test_gradients_are_those_of_the_model_without(prefetch):
    plain, model = decoder(), decoder()
    stream = offload_activations(model, min_bytes=64, prefetch=prefetch, link=link())
    for step in range(2):
        assert_same_step(plain, model, seed=step)
    assert stream.bytes_down == stream.link.bytes_down
    assert stream.bytes_up == stream.link.bytes_up <= stream.bytes_down
    assert stream.device_bytes == 0


def test_what_a_block_is_computed_from_again():
    """With recomputation, blocks' inputs go to the host; with streamed weights beside."""
    fused, streamed = decoder(), decoder()
    offload_weights(streamed, link=link())
    import surokit as sk

    sk.fuse(fused, sk.Fusion.OFF)
    fused.model.fusion = sk.Fusion(recompute="full")
    for model in (fused, streamed):
        plain = decoder()
        stream = offload_activations(model, min_bytes=2 * 8 * 64 * 4, link=link())
        assert_same_step(plain, model)
        inputs = model.config.layers * 2 * 8 * 64 * 4
        # and what is kept beside the blocks: of the last norm and the loss
        assert inputs <= stream.bytes_down < inputs + 6 * 2 * 8 * 64 * 4


def test_a_context_around_any_code():
    x = torch.randn(64, 64, requires_grad=True)
    w = nn.Parameter(torch.randn(64, 64))

    def loss():
        return ((x @ w).tanh() @ w).exp().mean()

    expected = torch.autograd.grad(loss(), (x, w))
    with saving() as stream:
        outside = loss()
    found = torch.autograd.grad(outside, (x, w))  # after the context
    assert all(torch.equal(*pair) for pair in zip(expected, found))
    assert isinstance(stream, ActivationStream)
    assert stream.bytes_down == 2 * 64 * 64 * 4  # of tanh and exp; x and w are where they belong
    with stream, torch.no_grad():
        loss()
    assert stream.copies == 2


def test_dropout_and_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    gpt2 = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2)
    ).train()
    for plain in (Dropping(), gpt2):
        model = copy.deepcopy(plain)
        stream = offload_activations(model, min_bytes=256, link=link())
        assert_same_step(plain, model)
        assert stream.copies


def test_retain_graph_and_two_graphs_at_a_time():
    plain, model = decoder(), decoder()
    stream = offload_activations(model, min_bytes=64, link=link())
    for each in (plain, model):
        first = each(ids(0), labels=ids(0)).loss
        second = each(ids(1), labels=ids(1)).loss
        first.backward(retain_graph=True)
        second.backward()
        first.backward(retain_graph=True)
    assert stream.device_bytes <= 2 * 2 * 8 * 64 * 4  # what was fetched ahead for nobody
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters()))


# -- what is copied


def keeping(*tensors):
    """An output whose node keeps the tensors as they are."""

    class Keep(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors)
            return grad

    seen: list[tuple[torch.Tensor, ...]] = []
    y = Keep.apply(torch.ones(1, requires_grad=True))
    return y, seen


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (lambda x: [x, x], 1.0),  # the same
        (lambda x: [x, x.t(), x.view(-1), x[8:]], 1.0),  # the same memory
        (lambda x: [x[:32], x[32:]], 1.0),  # its halves
        (lambda x: list(x.chunk(2, dim=1)), 1.0),  # columns: all of it, for both
        (lambda x: [x[:, 0]], 1 / 64),  # few elements of much: only they
        (lambda x: [x[:1].expand(64, 64)], 1 / 64),  # what is there, not what it stands for
        (lambda x: [x.t().contiguous(), x], 2.0),
    ],
)
def test_memory_is_copied_once_and_comes_back_as_it_was(make, copied):
    tensors = make(torch.randn(64, 64))
    with saving() as stream:
        y, seen = keeping(*tensors)
    assert stream.bytes_down == copied * 64 * 64 * 4
    assert stream.tensors == len(tensors)
    y.backward()
    for t, back in zip(tensors, seen[0], strict=True):
        assert torch.equal(t, back)
        assert t.shape == back.shape
        assert t.dtype == back.dtype
        if copied >= 1:
            assert t.stride() == back.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool])
def test_any_dtype(dtype):
    kept = torch.randint(2, (37,)).to(dtype)
    for prefetch in (0, 2):
        with saving(prefetch=prefetch):
            y, seen = keeping(kept, torch.ones(3), torch.ones(4))
        y.backward()
        assert seen[0][0].dtype == dtype
        assert torch.equal(seen[0][0].float(), kept.float())


def test_what_stays():
    table = torch.randn(64, 64)
    model = nn.Linear(64, 64)
    model.register_buffer("table", table)
    stream = offload_activations(model, min_bytes=64 * 4 + 1, link=link())
    with stream.saving(model):
        keeping(model.weight, model.weight.t(), table, table[1:], torch.randn(64), torch.randn(0))
    assert stream.copies == 0


def test_a_change_in_place_is_caught_or_harmless():
    x = torch.randn(64, requires_grad=True)
    with saving():
        y = x.exp()
        y.add_(1)  # torch would refuse it as well
    with refused(RuntimeError):
        y.sum().backward()
    kept = torch.randn(64)
    before = kept.clone()
    with saving(prefetch=1):
        y, seen = keeping(kept)
        other, _ = keeping(torch.randn(64))  # the first one's copy is made now
        kept.zero_()
        third, seen_later = keeping(kept)
    (y + other + third).backward()
    assert torch.equal(seen[0][0], before)
    assert torch.equal(seen_later[0][0], kept)


# -- room, bytes and time


def chain(layers, width=64):
    """tanh of tanh: one tensor kept a layer."""
    x = torch.randn(width, requires_grad=True)
    for _ in range(layers):
        x = x.tanh()
    return x


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_little_is_on_the_device(prefetch):
    peak = 0

    class Watch(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            nonlocal peak
            peak = max(peak, stream.device_bytes)
            return grad

    with saving(prefetch=prefetch) as stream:
        x = torch.randn(64, requires_grad=True)
        for _ in range(10):
            x = Watch.apply(x.tanh())
            peak = max(peak, stream.device_bytes)
    assert stream.bytes_down == 10 * 64 * 4
    x.sum().backward()
    assert peak <= (prefetch + 1) * 64 * 4
    assert stream.bytes_up == (10 - prefetch) * 64 * 4  # the latest were still there
    assert stream.device_bytes == 0


@pytest.mark.parametrize("late_fill", [False, True])
def test_copies_that_are_late_are_waited_for(late_fill):
    x = torch.randn(1000, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().tanh().exp().tanh().exp().tanh().sum(), x)
    slow = ThrottledLink(FAST, latency_s=0.02, late_fill=late_fill)
    stream = offload_activations(min_bytes=1, prefetch=1, link=slow)
    for _ in range(2):
        with stream:
            y = x.exp().tanh().exp().tanh().exp().tanh().sum()
        (found,) = torch.autograd.grad(y, x)
        assert torch.equal(expected, found)


def test_host_memory_is_used_again():
    stream = saving()
    asked = []

    def buffer(shape, dtype):
        asked.append(shape)
        return torch.empty(shape, dtype=dtype)

    stream.link.buffer = buffer
    for _ in range(3):
        with stream:
            y = chain(5)
        y.sum().backward()
        del y
    assert len(asked) == 5


def test_host_memory_is_used_again_whatever_lengths_come():
    stream = saving()
    for width in range(10, 200, 7):
        with stream:
            y = chain(5, width)
        y.sum().backward()
        del y
    with stream:
        y = chain(5, 3)
    assert len(stream._free) == 0 < 5 == len({copy() for _, copy in stream._tape})
    y.sum().backward()
    del y
    with stream:
        chain(1, 196)
    assert len(stream._free) + len(stream._returned) == 5  # never more than were needed at a time
    assert sum(memory.nbytes for memory in (*stream._free, *stream._returned)) <= 5 * 199 * 4


def test_the_tape_forgets():
    """Where a graph is always alive, and within one context around many steps."""
    stream = saving()
    for _ in range(30):
        with stream:
            y = chain(5)  # the one before is alive until here
    assert len(stream._tape) <= 10
    with stream:
        for _ in range(600):
            y = chain(5)
            assert len(stream._tape) <= 1024 + 3 * 10
            assert len(stream._known) <= 1024
    y.sum().backward()


def test_a_graph_that_is_dropped_leaves_nothing():
    stream = saving()
    with stream:
        y = chain(5)
    del y
    gc.collect()
    assert stream.device_bytes == 0
    with stream:
        y = chain(2)
    assert len(stream._tape) == 2
    y.sum().backward()


def test_copies_run_beside_the_computation():
    """Forward and backward take the larger of computing and copying, and at the ends what nothing can run beside."""
    compute_s, transfer_s, layers = 0.04, 0.03, 6
    link = ReckonedLink(transfer_s)

    class Busy(Function):
        @staticmethod
        def forward(ctx, x):
            link.compute(compute_s)
            y = x + 1
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            assert len(ctx.saved_tensors) == 1
            link.compute(compute_s)
            return grad

    expected, moved = 2 * layers * compute_s, (2 * layers - 2) * transfer_s
    with offload_activations(min_bytes=1, link=link):
        x = torch.ones(8, requires_grad=True)
        for _ in range(layers):
            x = Busy.apply(x)
    x.backward(torch.ones_like(x))
    assert link.now_s < expected + moved
    assert link.now_s == pytest.approx(expected)


# -- with the rest of the house


def test_a_session_saves_resumes_and_forks(tmp_path):
    def session(model, **options):
        return Session(model, make_batches(), optimizer=AdamW(lr=1e-2), **options)

    plain, model = session(decoder()), decoder()
    offload_activations(model, min_bytes=64, link=link())
    ours = session(model, run_dir=tmp_path)
    for each in (plain, ours):
        each.run(steps=2)
    ours.save()
    resumed = Session.resume(tmp_path, data=make_batches())
    for each in (plain, ours, ours.fork(), resumed):
        each.run(steps=1)
        assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), each.model.parameters(), strict=True))


def test_copies_remove_and_a_second_call():
    plain, model = decoder(), decoder()
    stream = offload_activations(model, min_bytes=64, link=link())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_step(plain, other)
        plain.zero_grad()
        assert other.forward.stream is not stream
        assert other.forward.stream.copies
    assert stream.copies == 0
    second = offload_activations(model, min_bytes=64, link=link())
    assert_same_step(plain, model)
    assert (stream.copies, second.copies > 0) == (0, True)
    done = second.copies
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(plain.forward).parameters)
    second.remove()
    assert_same_step(plain, model)
    assert second.copies == done
    assert "forward" not in vars(model)
    assert "fetched ahead" in repr(second)


def test_what_is_put_around_nothing_says_so():
    idle = offload_activations(min_bytes=64)
    assert "at present of nothing: give a model, or use it in a with" in repr(idle)
    with idle:
        assert "of nothing" not in repr(idle)
    assert "of nothing" not in repr(offload_activations(nn.Linear(4, 4), min_bytes=64))


def test_refusals():
    with refused(ValueError):
        offload_activations(prefetch=-1)
    each: list[Any] = [0, -1, True, "1", float("nan"), float("inf")]
    for wrong in each:
        with refused(ValueError):
            offload_activations(min_bytes=wrong)
    with refused(ValueError):
        offload_activations(device="cuda", link=HostLink())


def test_a_small_decoder_by_default():
    """Nothing is large enough to be worth it, and nothing changes."""
    model = Decoder(DecoderConfig(vocab=32, width=32, ffn=64, layers=2, heads=2, kv_heads=2))
    stream = offload_activations(model)
    model(ids(), labels=ids()).loss.backward()
    assert stream.copies == 0
