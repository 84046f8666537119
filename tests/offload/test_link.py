"""Links: what arrives and when, order against what overwrites it, rates, bytes, stalls, ends. CUDA's is rehearsed on a stand-in
for its streams that runs late and writes down who waits for whom; tests/gpu/test_offload.py runs it on a device."""

import contextlib
import copy
import gc
import pickle
import random
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from surokit.errors import OffloadError
from surokit.offload import link as links
from surokit.offload.link import CudaLink, HostLink, ThrottledLink, link_for
from surokit.offload.workers import Worker
from tests.clocks import Clock, HeldClock, until
from tests.offload.copies import copied_from, filled, taking
from tests.offload.runs import Slices, beats_of, meanwhile
from tests.refusals import refused, warned

FAST = 100.0  # GB/s: faster than memory here, so without a rate


def make_host():
    return HostLink()


def make_throttled():
    return ThrottledLink(FAST)


def make_late():
    """Late in every way: fills run late, and delays are drawn."""
    draw = random.Random(0).random
    return ThrottledLink(FAST, latency_s=1e-4, delay=lambda: 2e-3 * draw(), late_fill=True)


@pytest.fixture(params=[make_host, make_throttled, make_late], ids=["host", "throttled", "late"])
def link(request):
    link = request.param()
    yield link
    link.close()


def failing(staging):
    raise ZeroDivisionError


def nothing(staging):
    pass


def test_what_goes_down_arrives_and_is_counted(link):
    grads = torch.arange(12.0).view(3, 4)
    to = link.buffer((4, 3), torch.float32)
    assert to.is_contiguous()
    ticket = link.down(copied_from(grads.t()), to, reads=[grads])
    ticket.wait()
    assert ticket.done()
    assert torch.equal(to, grads.t())
    assert (link.bytes_down, link.bytes_up, link.bytes_small) == (48, 0, 0)


def test_what_goes_up_is_taken_and_its_source_is_free_then(link):
    weight, source = torch.zeros(6, dtype=torch.bfloat16), torch.arange(3, dtype=torch.bfloat16)
    ticket = link.up(source, lambda staging: weight[::2].copy_(staging))
    ticket.wait()
    source.fill_(7)
    assert weight.tolist() == [0, 0, 1, 0, 2, 0]
    assert (link.bytes_down, link.bytes_up, link.bytes_small) == (0, 6, 0)


def test_a_fetched_copy_is_the_receivers(link):
    source = torch.arange(5)
    arrival = link.fetch(source)
    arrival.wait()
    source.zero_()
    landed = arrival.land()
    landed += 1
    assert landed.tolist() == [1, 2, 3, 4, 5]
    assert source.tolist() == [0] * 5
    assert link.bytes_up == 40


def test_a_small_value_is_copied_as_it_is(link):
    value, to = torch.tensor(3.0), link.buffer((), torch.float32)
    ticket = link.copy_down(value, to)
    value.fill_(4.0)
    ticket.wait()
    assert to.item() == 3.0
    assert (link.bytes_down, link.bytes_up, link.bytes_small) == (0, 0, 4)


def test_a_small_value_is_copied_in_its_order_and_to_another_dtype(link):
    value, to = torch.arange(6).view(2, 3).t(), link.buffer((3, 2), torch.float32)
    link.copy_down(value, to).wait()
    assert torch.equal(to, value.float())


def test_what_is_behind_a_fence_may_be_overwritten(link):
    grads, to = torch.ones(1000), [torch.zeros(1000) for _ in range(5)]
    tickets = []
    for each in to:
        tickets.append(link.down(copied_from(grads), each, reads=[grads]))
        link.fence()
        grads += 1
    for ticket in tickets:
        ticket.wait()
    assert [each.unique().tolist() for each in to] == [[1], [2], [3], [4], [5]]


def test_empty_tensors_go_both_ways(link):
    to = link.buffer((0, 4), torch.float32)
    link.down(filled(1), to).wait()
    taken = []
    link.up(to, lambda staging: taken.append(staging.shape)).wait()
    assert taken == [(0, 4)]


def test_transfers_of_a_direction_keep_their_order(link):
    to = torch.zeros(100)
    tickets = [link.down(filled(i), to) for i in range(20)]
    tickets[-1].wait()
    assert to.unique().tolist() == [19]
    assert all(ticket.done() for ticket in tickets)


def test_closing_waits_and_a_link_can_be_used_again(link):
    for value in (1.0, 2.0):
        to = torch.zeros(10)
        link.down(filled(value), to)
        link.close()
        assert to.tolist() == [value] * 10
        link.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [make_host, make_throttled])
def test_a_copy_begins_anew(make, copied):
    link = make()
    link.down(filled(1), torch.zeros(4)).wait()
    other = copied(link)
    assert type(other) is type(link)
    assert other.bytes_down == 0
    to = torch.zeros(4)
    other.down(filled(1), to).wait()
    assert to.sum() == 4
    link.close()
    other.close()


def test_links_belong_to_devices():
    assert isinstance(link_for("cpu"), HostLink)
    assert link_for("cpu").device == torch.device("cpu")
    with refused(ValueError):
        link_for("meta")


# -- a simulated device


class Gate:
    """A delay that holds transfers until it is opened."""

    def __init__(self):
        self.open, self.held = threading.Event(), 0

    def __call__(self):
        self.held += 1
        self.open.wait()
        return 0.0


def test_nothing_is_done_before_it_arrives():
    gate = Gate()
    link = ThrottledLink(FAST, delay=gate)
    to, source = torch.zeros(4), torch.ones(4)
    down, up, small = link.down(filled(1), to), link.fetch(source), link.copy_down(source, torch.zeros(4))
    until(lambda: gate.held == 3)
    assert [ticket.done() for ticket in (down, up, small)] == [False] * 3
    assert to.sum() == 0
    gate.open.set()
    for ticket in (down, up, small):
        ticket.wait()
    assert to.sum() == 4
    link.close()


def test_half_of_a_transfer_is_there_when_it_has_begun(monkeypatch):
    clock = HeldClock()
    monkeypatch.setattr(links, "time", clock)
    link = ThrottledLink(1.0, latency_s=0.3)
    to = torch.zeros(4)
    ticket = link.down(filled(1), to)
    for _ in range(6):  # slices
        until(lambda: clock.sleepers)
        assert to.tolist() == [1, 1, 0, 0]
        assert not ticket.done()
        clock.pass_s(0.05)
    let_pass(clock, ticket.done)
    assert to.tolist() == [1, 1, 1, 1]
    link.close()


def let_pass(clock, over):
    """Time passes until it is over."""

    def passes():
        clock.pass_s(1.0)
        return over()

    until(passes)


def test_what_is_overwritten_without_a_fence_shows_where_fills_are_late():
    gate = Gate()
    link = ThrottledLink(FAST, delay=gate, late_fill=True)
    grads, to = torch.ones(4), torch.zeros(4)
    ticket = link.down(copied_from(grads), to, reads=[grads])
    grads.fill_(2)
    gate.open.set()
    ticket.wait()
    assert to.tolist() == [2, 2, 2, 2]
    link.close()


def test_a_fence_waits_for_late_fills_and_is_a_stall(monkeypatch):
    clock, gate = Clock(), Gate()
    monkeypatch.setattr(links, "time", clock)
    link = ThrottledLink(FAST, delay=gate, late_fill=True)
    grads, to = torch.ones(4), torch.zeros(4)
    ticket = link.down(copied_from(grads), to, reads=[grads])

    def open_it():
        clock.sleep(0.05)
        gate.open.set()

    meanwhile(open_it)
    link.fence()
    grads.fill_(2)
    ticket.wait()
    assert to.tolist() == [1, 1, 1, 1]
    assert link.device_stall_ms() == pytest.approx(50, rel=1e-3)
    link.close()


def test_a_failing_late_fill_is_raised_by_a_fence_and_its_ticket():
    link = ThrottledLink(FAST, late_fill=True)
    ticket = link.down(failing, torch.zeros(4))
    with refused(OffloadError):
        link.fence()
    with refused(OffloadError) as raised:
        ticket.wait()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    link.down(filled(1), torch.zeros(4)).wait()
    link.close()


def test_a_failing_fill_or_take_is_the_callers():
    link = ThrottledLink(FAST)
    with pytest.raises(ZeroDivisionError):
        link.down(failing, torch.zeros(4))
    with pytest.raises(ZeroDivisionError):
        link.up(torch.zeros(4), failing)
    link.close()


def test_a_link_that_hangs_is_told():
    gate = Gate()
    link = ThrottledLink(FAST, delay=gate, patience_s=0.2)
    ticket = link.down(filled(1), torch.zeros(4))
    with refused(OffloadError):
        ticket.wait()
    gate.open.set()
    link.close()


def test_a_slow_transfer_lives(monkeypatch):
    """It gives a sign of life in each slice in which it sleeps."""
    clock = HeldClock()
    monkeypatch.setattr(links, "time", clock)
    link = ThrottledLink(1.0, latency_s=3.0, patience_s=0.2)
    job = link.down(filled(1), torch.zeros(4))
    worker = link.down_lane.worker
    beats = beats_of(worker)

    def one_slice():
        until(lambda: clock.sleepers)
        clock.pass_s(0.05)
        beats()

    slices = Slices(one_slice)
    slices.wait(worker, lambda: slices.count == 40)
    assert not job.done()
    let_pass(clock, job.done)
    link.close()


def test_the_rate_is_kept(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    link, to = ThrottledLink(0.1), torch.zeros(5_000_000, dtype=torch.uint8)
    source = torch.ones_like(to)
    for way in (lambda: link.down(filled(1), to).wait, lambda: link.fetch(source).land):
        asked = clock.perf_counter()
        way()()
        assert clock.perf_counter() - asked == pytest.approx(0.05)
    link.close()


@pytest.mark.parametrize("latency", [0.0, 2e-3])
def test_errors_of_sleeping_do_not_add_up(monkeypatch, latency):
    late_s = 1.5e-3
    clock, gate, count = Clock(late_s), Gate(), 10
    monkeypatch.setattr(links, "time", clock)
    link, source = ThrottledLink(0.2, latency, delay=gate), torch.ones(1_000_000, dtype=torch.uint8)  # 5 ms each
    arrivals = [link.fetch(source) for _ in range(count)]
    gate.open.set()
    for arrival in arrivals:
        arrival.wait()
    expected = count * (5e-3 + latency)
    assert expected <= clock.perf_counter() <= 1.02 * expected + late_s
    link.close()


def test_directions_do_not_share_a_rate(monkeypatch):
    clock = HeldClock()
    monkeypatch.setattr(links, "time", clock)
    link, to = ThrottledLink(0.1), torch.zeros(5_000_000, dtype=torch.uint8)
    both = link.down(filled(1), to), link.fetch(torch.zeros_like(to))
    until(lambda: clock.sleepers == 2)
    assert not any(ticket.done() for ticket in both)
    clock.pass_s(0.05 + 1e-6)
    for ticket in both:  # one after the other would take as long again
        ticket.wait()
    link.close()


def test_who_lands_waits_and_that_is_counted(monkeypatch):
    monkeypatch.setattr(links, "time", Clock())
    gate = Gate()
    link, source = ThrottledLink(0.1, delay=gate), torch.zeros(5_000_000, dtype=torch.uint8)
    arrival = link.fetch(source)
    assert link.device_stall_ms() == 0
    meanwhile(gate.open.set)
    arrival.land()
    assert link.device_stall_ms() == pytest.approx(50)
    arrival = link.fetch(source)
    arrival.wait()  # the host waited, and the device computed
    arrival.land()
    assert link.device_stall_ms() == pytest.approx(50)
    link.close()


def test_a_transfer_that_waits_costs_no_processor_time(monkeypatch):
    """It sleeps, in slices, and does not look at the clock again and again."""
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    link = ThrottledLink(0.1, latency_s=0.25)
    link.down(filled(1), torch.zeros(4)).wait()
    assert 5 <= clock.sleeps <= 8
    link.close()


def test_the_training_thread_runs_while_a_transfer_waits():
    """A thread that slept with Python's lock would stop it for the whole transfer. This link is slow, and really sleeps."""
    link, looks = ThrottledLink(0.1, latency_s=0.2), [0]
    while max(looks) < 100:  # or it goes on for ever
        ticket = link.down(filled(1), torch.zeros(4))
        looks.append(0)
        while not ticket.done():
            looks[-1] += 1
    link.close()


def test_dropped_links_leave_no_thread():
    def links_threads():
        return sum(thread.name.startswith("surokit-link") for thread in threading.enumerate())

    gc.collect()
    until(lambda: not links_threads())  # of other tests
    for _ in range(20):
        link = make_throttled()
        link.down(filled(1), torch.zeros(4)).wait()
        link.up(torch.zeros(4), nothing)
    assert links_threads() >= 2
    del link
    gc.collect()
    until(lambda: not links_threads())


@pytest.mark.parametrize(("gb_s", "latency_s"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), ("1", 0), (1, None)])
def test_a_rate_is_positive(gb_s, latency_s):
    with refused(ValueError):
        ThrottledLink(gb_s, latency_s)


def test_only_whole_memory_is_transferred():
    link = make_throttled()
    torn = torch.zeros(4, 4).t()
    for call in (
        lambda: link.down(filled(1), torn[:2]),
        lambda: link.up(torn[:2], nothing),
        lambda: link.copy_down(torch.zeros(2, 4), torn[:2]),
    ):
        with refused(ValueError):
            call()
    assert (link.bytes_down, link.bytes_up, link.bytes_small) == (0, 0, 0)
    link.close()


# -- CUDA, rehearsed: streams that do nothing before somebody lets them, and then only what others wait for


class LateStream:
    def __init__(self):
        self.work, self.passed, self.kept = [], 0, []

    def do(self, work):
        self.work.append(work)

    def wait_event(self, event):
        if event.at is not None:
            self.do(lambda at=event.at: at[0].run(at[1]))

    def wait_stream(self, other):
        count = len(other.work)
        self.do(lambda: other.run(count))

    def run(self, count=None):
        """Until `count` pieces of work are done."""
        while self.passed < (len(self.work) if count is None else count):
            self.passed += 1
            self.work[self.passed - 1]()


class LateEvent:
    clock = 0.0

    def __init__(self, enable_timing=False):
        self.at, self.time = None, 0.0

    def record(self, stream):
        self.at = stream, len(stream.work) + 1
        stream.do(self.stamp)

    def stamp(self):
        LateEvent.clock += 1.0
        self.time = LateEvent.clock

    def query(self):
        return self.at is None or self.at[0].passed >= self.at[1]

    def elapsed_time(self, other):
        return other.time - self.time


@pytest.fixture
def late(monkeypatch):
    """The main stream; what is copied is copied when its stream runs."""
    main = LateStream()
    streams = [main]

    @contextlib.contextmanager
    def stream(other):
        streams.append(other)
        yield
        streams.pop()

    copy_ = torch.Tensor.copy_

    def launch(to, source, non_blocking=False):
        streams[-1].do(lambda: copy_(to, source))
        return to

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: LateStream())
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.Tensor, "copy_", launch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.kept.append(tensor))
    return main


def rehearsed(lean=False, patience_s=60.0):
    link = CudaLink("cuda:0", lean, patience_s)
    link.device = torch.device("cpu")
    return link


both = pytest.mark.parametrize("lean", [False, True], ids=["whole", "lean"])


@both
def test_a_fill_comes_after_the_main_streams_work_and_a_fence_before_more(late, lean):
    link, grads, to = rehearsed(lean), torch.zeros(3), torch.zeros(3)
    late.do(lambda: grads.fill_(1))
    ticket = link.down(copied_from(grads), to, reads=[grads])
    link.fence()
    late.do(lambda: grads.fill_(2))
    late.run()  # as far ahead as it can
    assert not ticket.done()
    link.down_lane.run()
    assert ticket.done()
    ticket.wait()
    assert to.tolist() == [1, 1, 1]
    assert link.bytes_down == 12


@both
def test_a_copy_waits_for_its_fill_and_that_for_the_main_stream(late, lean):
    link, grads, to = rehearsed(lean), torch.zeros(3), torch.zeros(3)
    late.do(lambda: grads.fill_(1))
    link.down(copied_from(grads), to, reads=[grads])
    late.do(lambda: grads.fill_(2))
    link.down_lane.run()  # as far ahead as it can
    assert to.tolist() == [1, 1, 1]
    value, small = torch.zeros(()), torch.zeros(())
    late.do(lambda: value.fill_(1))
    link.copy_down(value, small)
    link.small_lane.run()
    assert value == 1  # what came before has happened


@both
def test_without_a_fence_the_main_stream_is_ahead_of_a_fill(late, lean):
    link, grads, to = rehearsed(lean), torch.ones(3), torch.zeros(3)
    link.down(copied_from(grads), to, reads=[grads])
    late.do(lambda: grads.fill_(2))
    late.run()
    link.down_lane.run()
    assert to.tolist() == [2, 2, 2]


@both
def test_a_fence_waits_for_copies_only_where_staging_is_lean(late, lean):
    link, grads = rehearsed(lean), torch.ones(3)
    tickets = [link.down(copied_from(grads), torch.zeros(3), reads=[grads]) for _ in range(3)]
    link.fence()
    late.run()
    assert [ticket.done() for ticket in tickets] == ([True, True, False] if lean else [False] * 3)
    assert (link.device_stall_ms() > 0) is lean  # else it waits for the device's own work


@both
def test_memory_is_kept_for_the_streams_that_use_it(late, lean):
    link, grads = rehearsed(lean), torch.ones(3)
    link.down(copied_from(grads), torch.zeros(3), reads=[grads])
    assert [x is grads for x in link.fill_lane.kept] == [True]
    assert len(link.down_lane.kept) == 1  # the staging, or in a lean link the gradient
    assert (link.fill_lane is link.down_lane) == lean
    link.fetch(torch.ones(3)).land()
    assert [x.shape for x in late.kept] == ([] if lean else [(3,)])  # a lean link's is the main stream's own
    value = torch.ones(())
    link.copy_down(value, torch.zeros(()))
    assert [x is value for x in link.small_lane.kept] == [False]  # a copy, as value may be overwritten


def test_host_memory_is_kept_until_its_copy_is_done(late):
    link, to = rehearsed(), torch.zeros(3)
    kept = weakref.ref(to)
    link.down(filled(1), to)
    del to
    assert kept() is not None
    link.down_lane.run()
    link.down(filled(1), torch.zeros(3))
    late.work.clear()  # closures of this stand-in hold tensors
    link.down_lane.work.clear()
    assert kept() is None


def test_the_main_stream_waits_for_what_it_takes(late):
    link, weight, source = rehearsed(), torch.zeros(3), torch.ones(3)
    ticket = link.up(source, taking(weight))
    assert not ticket.done()
    late.run()
    assert ticket.done()
    assert weight.tolist() == [1, 1, 1]
    assert link.bytes_up == 12


@pytest.mark.parametrize("sizes", [[3] * 8, [1, 2, 3, 4, 5, 6, 7, 8]], ids=["equal", "growing"])
def test_what_goes_up_takes_turns_with_a_few_buffers(late, sizes):
    link, weights = rehearsed(), [torch.zeros(n) for n in sizes]
    places = set()
    for i, weight in enumerate(weights):

        def take(staging, weight=weight):
            places.add(staging.data_ptr())
            weight.copy_(staging)

        link.up(torch.full_like(weight, i + 1), take)
    link.up_lane.run()  # as far ahead as it can: not beyond what the main stream has taken
    late.run()
    assert [weight.unique().tolist() for weight in weights] == [[i + 1] for i in range(8)]
    assert len(places) <= 3 or sizes[0] != sizes[-1]
    assert sum(memory.nbytes for memory, _ in link._buffers) <= 3 * 4 * max(sizes)


def test_what_is_fetched_early_is_not_waited_for(late):
    link, weight = rehearsed(), torch.zeros(3)
    arrival = link.fetch(torch.ones(3))
    late.do(lambda: weight.fill_(5))
    late.run()
    assert not arrival.done()  # the main stream went on
    weight.copy_(arrival.land())
    late.run()
    assert weight.tolist() == [1, 1, 1]
    with refused(AssertionError):
        arrival.land()


def test_a_lean_links_fetched_copy_begins_after_the_work_so_far(late):
    """As its memory may be what that work has just freed."""
    link, order = rehearsed(lean=True), []
    late.do(lambda: order.append("work so far"))
    arrival = link.fetch(torch.ones(3))
    link.up_lane.do(lambda: order.append("copied"))
    late.do(lambda: order.append("work after"))
    link.up_lane.run()
    assert order == ["work so far", "copied"]
    assert arrival.land().tolist() == [1, 1, 1]


def test_stalls_are_read_late_and_only_where_there_can_be_one(late, monkeypatch):
    link = rehearsed()
    for _ in range(3):
        link.up(torch.ones(3), nothing)
    assert link.device_stall_ms() == 0
    late.run()
    stalled = link.device_stall_ms()
    assert stalled > 0
    assert link.device_stall_ms() == stalled
    arrival = link.fetch(torch.ones(3))
    link.up_lane.run()
    before = len(late.work)
    arrival.land()  # has arrived: neither waits nor events
    assert len(late.work) == before
    monkeypatch.setattr(links, "LIVE", 4)
    for _ in range(10):
        link.up(torch.ones(3), nothing)
    assert len(link.stalls.pairs) == 4
    late.run()
    assert link.device_stall_ms() > stalled
    assert not link.stalls.pairs
    assert len(link.stalls._free) == 4


def test_a_host_that_waits_costs_a_device_nothing_while_it_has_work(late, monkeypatch):
    """The main stream's clock goes on while it works and while it has nothing to do."""

    def works():
        LateEvent.clock += 100.0

    link = rehearsed()
    late.do(works)
    with link.host_waits():  # over before the work is
        pass
    late.run()
    assert link.device_stall_ms() == 1  # from event to event
    late.do(works)
    with link.host_waits():
        late.run()
        LateEvent.clock += 30.0  # out of work
    late.run()
    assert link.device_stall_ms() == 1 + 31
    monkeypatch.setattr(links, "LIVE", 0)
    with link.host_waits():
        LateEvent.clock += 30.0
    late.run()
    assert link.device_stall_ms() == 32


@pytest.mark.parametrize("make", [HostLink, lambda: ThrottledLink(FAST)], ids=["host", "throttled"])
def test_on_a_cpu_the_waiting_host_is_the_waiting_device(make, monkeypatch):
    clock, link = Clock(), make()
    monkeypatch.setattr(links, "time", clock)
    with contextlib.suppress(KeyboardInterrupt), link.host_waits():
        clock.sleep(0.02)
        raise KeyboardInterrupt
    assert link.device_stall_ms() == pytest.approx(20)
    link.close()


def test_a_copy_is_waited_for_until_it_is_done_or_the_patience_ends(late, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    link = rehearsed(patience_s=0.05)
    ticket = link.down(filled(1), torch.zeros(3))
    with refused(OffloadError):
        ticket.wait()
    clock.after(0.02, link.down_lane.run)
    ticket.wait()
    ticket = link.down(filled(1), torch.zeros(3))
    clock.after(0.02, link.down_lane.run)
    link.close()
    assert ticket.done()
    link.close()


def test_host_memory_of_copies_outlives_their_link(late):
    """The device writes there, whoever has dropped the link meanwhile; another link's next copy lets it go."""

    def held():
        return any(copy._host is to for copy in links._kept)

    link, other, to = rehearsed(), rehearsed(), torch.zeros(3)
    down = link.down_lane
    link.down(filled(1), to)
    assert not held()
    del link
    gc.collect()
    assert held()
    down.run()
    other.down(filled(2), torch.zeros(3))
    assert not held()


def test_a_worker_that_waits_for_a_copy_lives(late):
    link, worker = rehearsed(), Worker("accumulator", patience_s=0.2)
    job = worker.submit(link.down(filled(1), torch.zeros(3)).wait)
    slices = Slices(beats_of(worker))
    slices.wait(worker, lambda: slices.count == 20)  # 1 s
    link.down_lane.run()
    job.wait()
    worker.close()


def test_memory_that_cannot_be_pinned_is_ordinary_and_said_once(monkeypatch):
    """Small buffers come from torch, which needs a device; large ones are registered."""
    link = rehearsed_buffers(monkeypatch, error=2)
    with warned(UserWarning):
        large = link.buffer((65 << 20,), torch.uint8)
    assert (large.shape, large.dtype) == ((65 << 20,), torch.uint8)
    link.buffer((65 << 20,), torch.uint8)  # a second warning would be an error here
    if not torch.cuda.is_available():
        assert link.buffer((3, 4), torch.bfloat16).shape == (3, 4)


def test_large_buffers_are_pinned_as_they_are_until_they_are_freed(monkeypatch):
    link = rehearsed_buffers(monkeypatch, error=0)
    large = link.buffer((65, 1 << 20), torch.uint8)
    place, view = large.data_ptr(), large[1:]
    assert link.calls == [("register", place, 65 << 20, 1)]
    del large
    assert len(link.calls) == 1  # a view is a use
    del view
    assert link.calls[1:] == [("unregister", place)]


def test_only_memory_of_pages_of_its_own_is_pinned_as_it_is(monkeypatch):
    """Two buffers that share a page would be pinned once, and unpinned under one another."""
    link = rehearsed_buffers(monkeypatch, error=0)
    link.buffer(((32 << 20) + 1,), torch.uint8)
    assert [call[0] for call in link.calls] == ["register", "unregister"]
    link._warned = True  # torch's own pins nothing where there is no device
    link.buffer((32 << 20,), torch.uint8)
    assert len(link.calls) == 2


def rehearsed_buffers(monkeypatch, error):
    calls = []

    def register(*arguments):
        calls.append(("register", *arguments))
        return error

    def unregister(place):
        calls.append(("unregister", place))

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    link = rehearsed()
    link.calls = calls
    return link
