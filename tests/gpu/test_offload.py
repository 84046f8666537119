"""Offloading on a CUDA device: the link's order, memory and stalls, and optimizers that never synchronize and do not depend on
timing. What needs no device is in tests/offload.

Run by `make test-gpu`.
"""

import contextlib
import copy
import functools
import gc
import os
import random
import signal
import threading
import time

import pytest
import torch

import surokit as sk
from surokit.errors import OffloadError
from surokit.offload import link as links
from surokit.offload.link import CudaLink, link_for
from tests.offload.copies import copied_from, filled, taking

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

LARGE = 1 << 24  # float32 elements: 64 MiB, which take milliseconds on any link
both = pytest.mark.parametrize("lean", [False, True], ids=["whole", "lean"])


@pytest.fixture
def link(request):
    link = CudaLink(lean=getattr(request, "param", False))
    yield link
    link.close()
    torch.cuda.synchronize()


either = pytest.mark.parametrize("link", [False, True], indirect=True, ids=["whole", "lean"])


@functools.cache
def cycles_of_a_ms():
    begun, over = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first one starts the device
        begun.record()
        torch.cuda._sleep(10_000_000)
        over.record()
        over.synchronize()
    return 10_000_000 / begun.elapsed_time(over)


def busy(ms, stream=None):
    """Keeps a stream (the current one) at work."""
    cycles = int(ms * cycles_of_a_ms())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def no_sync():
    """Whatever makes the host wait for the device is an error."""
    cycles_of_a_ms()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# torch says once that the mode is a prototype
quiet = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


# -- memory


@pytest.mark.parametrize("shape", [(), (3, 5), (LARGE + 1024,)])
def test_buffers_are_pinned(link, shape):
    buffer = link.buffer(shape, torch.float32)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == (torch.Size(shape), torch.float32, "cpu")
    assert buffer.is_pinned()
    assert buffer.is_contiguous()


def test_large_buffers_can_be_pinned_again_where_others_were(link):
    for _ in range(5):
        buffer = link.buffer((LARGE + 1024,), torch.float32)
        assert buffer.is_pinned()
        buffer.zero_()
        link.up(buffer, filled(0)).wait()
        del buffer
        gc.collect()


def test_memory_that_cannot_be_pinned_harms_nothing(link):
    """CUDA remembers an error until somebody asks: it must not be the next kernel that does."""
    buffer = link.buffer((LARGE + 1024,), torch.float32)
    with pytest.raises(RuntimeError, match="CUDA's error"):  # it is registered already
        links._registered(buffer, link.device)
    assert torch.ones(4, device="cuda").sum().item() == 4
    weight = torch.zeros(8, device="cuda")
    ordinary = torch.ones(8)  # slower, and right
    link.up(ordinary, taking(weight)).wait()
    to = torch.zeros(8)
    link.down(copied_from(weight), to, [weight]).wait()
    assert to.tolist() == [1.0] * 8


# -- order


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_what_goes_down_and_up_again_is_the_same(link, dtype):
    there = torch.randint(100, (513, 257), device="cuda").to(dtype)
    to, weight = link.buffer((257, 513), dtype), torch.zeros(257, 513, dtype=dtype, device="cuda")
    link.down(copied_from(there.t()), to, [there]).wait()
    assert torch.equal(to, there.t().cpu())
    link.up(to, taking(weight)).wait()
    assert torch.equal(weight, there.t())
    assert link.bytes_down == link.bytes_up == to.nbytes


@either
def test_a_fill_follows_the_main_stream_and_the_main_stream_a_fence(link):
    grads, to = torch.zeros(LARGE, device="cuda"), [link.buffer((LARGE,), torch.float32) for _ in range(4)]
    tickets = []
    for value, each in enumerate(to, 1):
        busy(5)
        grads.fill_(value)
        tickets.append(link.down(copied_from(grads), each, [grads]))
        link.fence()
    for value, (each, ticket) in enumerate(zip(to, tickets), 1):
        ticket.wait()
        assert each.unique().tolist() == [value]


def test_a_fence_does_not_wait_for_copies(link):
    grads, to = torch.ones(8, device="cuda"), link.buffer((8,), torch.float32)
    busy(200, link.down_lane)
    ticket = link.down(copied_from(grads), to, [grads])
    link.fence()
    passed = torch.cuda.Event()
    passed.record()
    passed.synchronize()
    assert not ticket.done()
    ticket.wait()
    assert to.tolist() == [1.0] * 8


@either
def test_what_a_fill_reads_may_be_freed_at_once(link):
    """The allocator gives memory to the same stream again, and the fill is late: it must not get another tensor's."""
    grads, to = torch.ones(LARGE, device="cuda"), link.buffer((LARGE,), torch.float32)
    torch.cuda.synchronize()
    place = grads.data_ptr()
    busy(100, link.fill_lane)
    ticket = link.down(copied_from(grads), to, [grads])
    del grads
    other = torch.full((LARGE,), 2.0, device="cuda")
    assert other.data_ptr() != place
    ticket.wait()
    assert to.unique().tolist() == [1]


def test_staging_is_kept_until_it_is_copied(link):
    """Several transfers are filled before the first is copied."""
    to = [link.buffer((LARGE,), torch.float32) for _ in range(4)]
    busy(100, link.down_lane)
    tickets = [link.down(filled(value), each) for value, each in enumerate(to)]
    for value, (each, ticket) in enumerate(zip(to, tickets)):
        ticket.wait()
        assert each.unique().tolist() == [value]


def test_a_lean_links_transfers_need_the_memory_of_one():
    link, to = CudaLink(lean=True), [torch.zeros(LARGE).pin_memory() for _ in range(4)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tickets = [link.down(filled(value), each) for value, each in enumerate(to)]
    assert torch.cuda.max_memory_allocated() - before == to[0].nbytes
    for value, (each, ticket) in enumerate(zip(to, tickets)):
        ticket.wait()
        assert each.unique().tolist() == [value]
    link.close()


def test_a_lean_links_fetched_copies_use_memory_again_however_far_the_host_is_ahead():
    link = CudaLink(lean=True)
    sources = [link.buffer((LARGE,), torch.float32).fill_(value) for value in range(8)]
    sums = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    busy(50)
    for value, source in enumerate(sources):
        landed = link.fetch(source).land()
        sums[value].copy_(landed[::4096].mean())
        del landed
    assert torch.cuda.max_memory_allocated() - before < 1.1 * sources[0].nbytes
    assert sums.tolist() == list(range(8))
    link.close()


@either
def test_what_is_taken_up_is_kept_for_the_main_stream(link):
    sources = [link.buffer((LARGE,), torch.float32).fill_(value) for value in range(4)]
    weights = [torch.zeros(LARGE, device="cuda") for _ in sources]
    torch.cuda.synchronize()
    busy(50)
    for source, weight in zip(sources, weights):
        link.up(source, taking(weight))
    for value, weight in enumerate(weights):
        assert weight.unique().tolist() == [value]


def test_a_source_may_be_written_when_its_ticket_is_done(link):
    source, weight = link.buffer((LARGE,), torch.float32).fill_(1), torch.zeros(LARGE, device="cuda")
    busy(50)
    link.up(source, taking(weight)).wait()  # the copy is done, and the main stream has not taken it
    source.fill_(2)
    assert weight.unique().tolist() == [1]


def test_host_memory_may_be_dropped_before_its_copy_is_done(link):
    weight, before = torch.zeros(LARGE + 1024, device="cuda"), torch.ones(())
    source = link.buffer((LARGE + 1024,), torch.float32).fill_(1)
    busy(50, link.up_lane)
    link.up(source, taking(weight))
    del source
    gc.collect()
    again = link.buffer((LARGE + 1024,), torch.float32).fill_(2)
    assert weight.unique().tolist() == [1]
    assert again[0] == 2 * before


def test_a_small_value_is_as_it_was_and_does_not_wait_for_payload(link):
    value, to = torch.tensor(3.0, device="cuda"), link.buffer((), torch.float32)
    payload = link.buffer((8,), torch.float32)
    busy(200, link.down_lane)
    slow = link.down(filled(1), payload)
    busy(5)
    value.add_(1)
    quick = link.copy_down(value, to)
    value.fill_(9)
    quick.wait()
    assert to.item() == 4
    assert not slow.done()
    slow.wait()
    assert link.bytes_small == 4


def test_another_stream_can_be_the_main_one(link):
    side, to = torch.cuda.Stream(), link.buffer((LARGE,), torch.float32)
    with torch.cuda.stream(side):
        grads = torch.zeros(LARGE, device="cuda")
        busy(20)
        grads.fill_(1)
        ticket = link.down(copied_from(grads), to, [grads])
        link.fence()
        grads.fill_(2)
    ticket.wait()
    assert to.unique().tolist() == [1]


# -- the host


@quiet
@either
def test_no_transfer_synchronizes(link):
    grads, weight = torch.ones(LARGE, device="cuda"), torch.zeros(LARGE, device="cuda")
    to, small = link.buffer((LARGE,), torch.float32), link.buffer((), torch.float32)

    def all_of_them():
        down = link.down(copied_from(grads), to, [grads])
        link.fence()
        value = link.copy_down(grads[0], small)
        link.up(to, taking(weight))
        link.fetch(to).land()
        link.device_stall_ms()
        return down, value

    all_of_them()  # allocates
    with no_sync():
        busy(100)
        begun = time.perf_counter()
        down, value = all_of_them()
        assert time.perf_counter() - begun < 0.05  # the host did not wait in any other way
        assert not down.done()
        down.wait()
        value.wait()
    assert small.item() == 1


def test_an_interrupt_ends_a_wait_at_once(link):
    to, sent = link.buffer((8,), torch.float32), []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    busy(2000)
    ticket = link.down(filled(1), to)
    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert time.monotonic() - sent[0] < 0.1
    assert not ticket.done()
    ticket.wait()
    assert to.tolist() == [1.0] * 8


def test_a_device_that_hangs_is_told():
    link = CudaLink(patience_s=0.2)
    busy(1000)
    ticket = link.down(filled(1), torch.zeros(8).pin_memory())
    with pytest.raises(OffloadError, match="is not done after"):
        ticket.wait()
    torch.cuda.synchronize()
    ticket.wait()


def test_stalls_are_the_main_streams_waits(link):
    source, weight = link.buffer((4 * LARGE,), torch.float32).zero_(), torch.zeros(4 * LARGE, device="cuda")
    link.up(source, taking(weight)).wait()  # memory is there
    torch.cuda.synchronize()
    before, begun = link.device_stall_ms(), time.perf_counter()
    link.up(source, taking(weight))
    torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - begun)
    exposed = link.device_stall_ms() - before
    assert 0.3 * took < exposed <= 1.05 * took
    arrival = link.fetch(source)
    busy(3 * took)  # long enough to hide it
    arrival.land()
    torch.cuda.synchronize()
    assert link.device_stall_ms() - before - exposed < 0.1 * took


def test_a_host_that_waits_costs_the_device_nothing_while_it_has_work(link):
    torch.cuda.synchronize()
    busy(50)
    with link.host_waits():
        time.sleep(0.01)
    torch.cuda.synchronize()
    assert link.device_stall_ms() < 1
    with link.host_waits():
        time.sleep(0.05)
    torch.cuda.synchronize()
    assert 45 < link.device_stall_ms() < 100


def test_events_that_wait_to_be_read_are_bounded(link, monkeypatch):
    monkeypatch.setattr(links, "LIVE", 8)
    source = link.buffer((8,), torch.float32).zero_()
    busy(100, link.up_lane)
    for _ in range(50):
        link.up(source, filled(0))
    assert len(link.stalls.pairs) == 8
    torch.cuda.synchronize()
    assert link.device_stall_ms() > 50


def test_dropped_links_leave_no_memory():
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        link = link_for("cuda")
        link.down(filled(1), link.buffer((1024,), torch.float32)).wait()
    del link
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# -- optimizers

SHAPES = [(192, 256), (64, 512), (96,)]
ZENFLOW = {"lr": 1e-2, "topk_ratio": 0.1, "select_strategy": "step", "select_interval": 6}
KINDS = {
    "zenflow": lambda params, **more: sk.ZenFlow(params, **ZENFLOW, update_interval=3, **more),
    "waiting": lambda params, **more: sk.ZenFlow(params, **ZENFLOW, update_interval=3, overlap_step=False, **more),
    "auto": lambda params, **more: sk.ZenFlow(params, **ZENFLOW, update_interval="auto", max_interval=5, **more),
    "warm": lambda params, **more: sk.ZenFlow(params, **ZENFLOW, update_interval=2, full_warm_up_rounds=4, **more),
    "offload": lambda params, **more: sk.OffloadAdamW(params, lr=1e-2, **more),
}
every = pytest.mark.parametrize("kind", KINDS)


def parameters(device="cuda", dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in SHAPES]


def gradients(step, device="cuda", dtype=torch.bfloat16):
    """Some columns are always larger than others, and not by chance."""
    draw = torch.Generator().manual_seed(100 + step)
    return [
        (torch.randn(shape, generator=draw) * torch.linspace(0.5, 2, shape[-1])).to(device, dtype) for shape in SHAPES
    ]


def steps(optimizer, params, first, last, device="cuda", dtype=torch.bfloat16):
    for step in range(first, last):
        for p, g in zip(params, gradients(step, device, dtype)):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()


class LateLink(CudaLink):
    """Every stream is late, by times that are drawn."""

    def __init__(self, seed, lean=False):
        super().__init__(lean=lean)
        self._draw = random.Random(seed)

    def __reduce__(self):
        return LateLink, (0,)

    def _late(self):
        for stream in (self.down_lane, self.fill_lane, self.up_lane, self.small_lane, torch.cuda.current_stream()):
            if self._draw.random() < 0.3:
                busy(3 * self._draw.random(), stream)

    def down(self, fill, to, reads=()):
        self._late()
        return super().down(fill, to, reads)

    def fetch(self, source):
        self._late()
        return super().fetch(source)

    def copy_down(self, value, to):
        self._late()
        return super().copy_down(value, to)


def late(optimizer, seed):
    """Its threads are late as well."""
    draw = random.Random(seed)
    crew = (
        [optimizer._worker]
        if isinstance(optimizer, sk.OffloadAdamW)
        else [optimizer._crew.accumulator, optimizer._crew.adam]
    )
    for worker in crew:
        worker.delay = lambda: 5e-3 * draw.random()
    return optimizer


@quiet
@every
def test_22_no_step_synchronizes(kind):
    params = parameters()
    optimizer = KINDS[kind](params)
    steps(optimizer, params, 0, 7)  # the first choice of columns reads its own step, and kernels are compiled
    grads = [gradients(step) for step in range(7, 25)]
    with no_sync():
        for each in grads:
            for p, g in zip(params, each):
                p.grad = g
            optimizer.grad_scale, optimizer.found_inf = torch.full((), 2.0, device="cuda"), None
            optimizer.step()
            optimizer.zero_grad()


@every
@both
def test_no_number_depends_on_timing(kind, lean):
    results = []
    for seed in (None, 0, 1):
        params = parameters()
        link = CudaLink(lean=lean) if seed is None else LateLink(seed, lean)
        optimizer = KINDS[kind](params, link=link)
        steps(optimizer if seed is None else late(optimizer, seed), params, 0, 25)
        torch.cuda.synchronize()
        results.append([p.detach().clone() for p in params])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@every
def test_gradients_may_be_overwritten_after_a_step(kind):
    """zero_grad(set_to_none=False), and a backward pass that adds to what is there."""
    results = []
    for in_place in (False, True):
        params = parameters()
        optimizer = late(KINDS[kind](params, link=LateLink(0)), 0)
        for step in range(20):
            for p, g in zip(params, gradients(step)):
                if in_place and p.grad is not None:
                    p.grad.add_(g)
                else:
                    p.grad = g
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every
def test_a_run_on_the_gpu_follows_the_run_on_the_cpu(kind):
    results = {}
    for device in ("cpu", "cuda"):
        params = parameters(device, torch.float32)
        steps(KINDS[kind](params), params, 0, 25, device, torch.float32)
        results[device] = [p.detach().cpu() for p in params]
    for here, there in zip(results["cpu"], results["cuda"]):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


@every
def test_a_restored_run_goes_on_bit_for_bit(kind):
    """In the middle of a window, with a job pending."""
    params = parameters()
    whole = KINDS[kind](params)
    steps(whole, params, 0, 11)
    saved, weights = copy.deepcopy(whole.state_dict()), [p.detach().clone() for p in params]
    steps(whole, params, 11, 25)
    others = [torch.nn.Parameter(w) for w in weights]
    restored = KINDS[kind](others)
    restored.load_state_dict(saved)
    steps(restored, others, 11, 25)
    assert all(torch.equal(a, b) for a, b in zip(params, others))


@every
def test_a_step_that_is_not_finite_changes_nothing_but_the_schedule(kind):
    params = parameters()
    optimizer = KINDS[kind](params)
    steps(optimizer, params, 0, 7)
    for p, g in zip(params, gradients(7)):
        p.grad = torch.full_like(g, float("inf"))
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    optimizer.found_inf = None
    steps(optimizer, params, 8, 20)
    assert all(p.isfinite().all() for p in params)


def test_states_are_on_the_host():
    width, share = 2048, 0.125
    weight = torch.nn.Parameter(torch.zeros(width, width, device="cuda"))
    for make, most in (
        (lambda: sk.OffloadAdamW([weight], lr=1e-2), 0.02),
        (lambda: sk.ZenFlow([weight], lr=1e-2, topk_ratio=share), share + 0.02),
    ):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        optimizer = make()
        for _ in range(9):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= most * 12 * weight.numel()
        del optimizer


@every
def test_waits_are_reported(kind):
    params = parameters()
    link = LateLink(0)
    optimizer = late(KINDS[kind](params, link=link), 0)
    steps(optimizer, params, 0, 13)
    torch.cuda.synchronize()
    assert link.bytes_down > 0
    assert link.bytes_up > 0
    assert link.device_stall_ms() > 0


@pytest.mark.parametrize("kind", ["ZenFlow", "OffloadAdamW"])
def test_a_session_trains_with_it(kind):
    torch.manual_seed(0)
    config = sk.DecoderConfig(layers=2, width=256, heads=4, kv_heads=2, vocab=512, ffn=512, max_length=256)
    model = sk.Decoder(config).to(torch.bfloat16).cuda()
    ids = torch.randint(512, (2, 128), generator=torch.Generator().manual_seed(0))
    session = sk.Session(
        model, [{"input_ids": ids, "labels": ids}], optimizer=getattr(sk, kind)(lr=1e-3), recipe=sk.FP8, schedule=None
    )
    session.run(16)
    loss = session.records.column("loss")
    assert loss[-1] < loss[0] - 0.5
