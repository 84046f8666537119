"""Workers: order, errors, death, hanging, interrupts, ends (dropped, closed, forked, interpreter), cores and torch threads."""

import copy
import functools
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch

from surokit.errors import OffloadError
from surokit.offload import workers
from surokit.offload.workers import Worker, beat, split_cores
from tests.clocks import Clock, until
from tests.offload.runs import Slices, beats_of, meanwhile
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="cores and tasks are read as Linux tells them")


@pytest.fixture
def worker():
    worker = Worker("adam", patience_s=5.0)
    yield worker
    worker.close()


def boom():
    raise RuntimeError("the sum overflowed")


def nothing():
    pass


def thread_of(worker):
    assert worker._shared.thread is not None
    return worker._shared.thread


def test_jobs_are_done_in_their_order_on_one_thread_without_gradients(worker):
    seen = []
    jobs = [
        worker.submit(lambda i=i: seen.append((i, threading.current_thread().name, torch.is_grad_enabled())))
        for i in range(20)
    ]
    jobs[-1].wait()
    assert seen == [(i, "surokit-adam", False) for i in range(20)]
    assert all(job.done() for job in jobs)
    assert torch.is_grad_enabled()


def test_a_job_is_not_done_before_it_is(worker):
    go = threading.Event()
    job = worker.submit(go.wait)
    behind = worker.submit(nothing)
    assert not job.done()
    assert not behind.done()
    go.set()
    behind.wait()
    assert job.done()


def test_a_wait_raises_the_jobs_error_with_its_traceback(worker):
    job = worker.submit(boom)
    for _ in range(2):  # whoever waits again is told again
        with refused(OffloadError) as raised:
            job.wait()
    cause = raised.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["boom"]
    worker.check()  # told already
    worker.submit(nothing).wait()


def test_check_raises_an_error_once_and_never_waits(worker):
    go = threading.Event()
    worker.submit(lambda: (go.wait(), boom()))
    worker.check()
    go.set()
    until(lambda: worker._jobs[0].done())
    with refused(OffloadError):
        worker.check()
    worker.check()


def test_what_comes_behind_a_failed_job_is_not_done(worker):
    seen = []
    go = threading.Event()
    worker.submit(lambda: (go.wait(), boom()))
    behind = [worker.submit(lambda: seen.append("behind")) for _ in range(2)]
    go.set()
    with refused(OffloadError) as raised:
        behind[1].wait()
    assert str(raised.value.__cause__) == "the sum overflowed"  # the first failure, although nobody waited for that job
    worker.check()
    worker.submit(lambda: seen.append("after")).wait()
    assert seen == ["after"]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_ends_a_job_belongs_to_who_waits(worker, kind):
    def work():
        raise kind

    with refused(OffloadError) as raised:
        worker.submit(work).wait()
    assert isinstance(raised.value.__cause__, kind)
    worker.submit(nothing).wait()


def test_a_thread_that_has_died_is_told(worker):
    worker.submit(nothing).wait()
    worker._shared.queue.put(None)  # its thread ends, and nobody has closed it
    until(lambda: not thread_of(worker).is_alive())
    lost = workers.Job(worker._shared, nothing)
    for say in (lost.wait, worker.check, worker.check, lambda: worker.submit(nothing)):
        with refused(OffloadError):
            say()
    worker.close()
    worker.submit(nothing).wait()


def test_a_wait_ends_when_the_thread_dies_meanwhile(worker):
    go = threading.Event()
    worker.submit(go.wait)
    worker._shared.queue.put(None)
    lost = worker.submit(nothing)
    meanwhile(go.set)
    with refused(OffloadError):
        lost.wait()


def test_a_hanging_job_is_told_after_the_patience():
    worker, go = Worker("accumulator", patience_s=0.2), threading.Event()
    job = worker.submit(go.wait)
    with refused(OffloadError):
        job.wait()
    slices = Slices(nothing)
    with refused(OffloadError):
        slices.wait(worker, job.done)
    assert slices.count == pytest.approx(0.2 / workers.SLICE_S, abs=1)
    go.set()
    job.wait()  # it has not changed anything
    worker.close()


@pytest.mark.parametrize("sign", ["own", "module", "jobs"])
def test_a_beat_is_a_sign_of_life(worker, sign):
    """One in each slice of a wait that lasts longer than the patience; as a job's beginning and end are."""
    slice_begins, beaten = threading.Semaphore(0), threading.Semaphore(0)
    many = 3 * round(worker.patience_s / workers.SLICE_S)

    def step():
        slice_begins.acquire()
        if sign != "jobs":
            (worker.beat if sign == "own" else beat)()
        beaten.release()

    def work():
        for _ in range(many):
            step()

    jobs = [worker.submit(step) for _ in range(many)] if sign == "jobs" else [worker.submit(work)]

    def one_slice():
        slice_begins.release()
        beaten.acquire()

    slices = Slices(one_slice)
    slices.wait(worker, lambda: slices.count == many)
    jobs[-1].wait()
    beat()  # on other threads nothing


def test_a_worker_that_waits_for_another_lives():
    front, back, go = Worker("front", patience_s=0.3), Worker("back", patience_s=60.0), threading.Event()
    slow = back.submit(go.wait)
    job = front.submit(slow.wait)
    slices = Slices(beats_of(front))
    slices.wait(front, lambda: slices.count == 20)  # 1 s
    go.set()
    job.wait()
    front.close()
    back.close()


def test_an_interrupt_ends_a_wait_and_changes_nothing(worker):
    for _ in range(3):
        go = threading.Event()
        job = worker.submit(go.wait)
        meanwhile(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            job.wait()
        assert not job.done()
        go.set()
        job.wait()
        worker.check()


def test_a_delay_comes_before_each_job(monkeypatch):
    clock, asked, begun = Clock(), [], []
    monkeypatch.setattr(workers, "time", clock)

    def delay():
        asked.append(clock.monotonic())
        return 0.02

    worker = Worker("adam", delay=delay)
    for _ in range(3):
        worker.submit(lambda: begun.append(clock.monotonic()))
    worker.submit(nothing).wait()
    worker.close()
    assert len(asked) == 4
    assert [b - a for a, b in zip(asked, begun)] == pytest.approx([0.02] * 3)


def test_closing_drops_what_has_not_begun_and_a_submit_starts_anew(worker):
    begun, go, seen = threading.Event(), threading.Event(), []

    def run_until_go():
        begun.set()
        seen.append(go.wait() and "running")

    running = worker.submit(run_until_go)
    dropped = worker.submit(lambda: seen.append("dropped"))
    assert begun.wait(10)
    meanwhile(go.set)
    worker.close()
    assert seen == ["running"]
    assert running.done()
    assert dropped.done()
    with refused(OffloadError):
        dropped.wait()
    worker.close()
    worker.check()
    worker.submit(lambda: seen.append("anew")).wait()
    assert seen == ["running", "anew"]


def test_closing_at_once_ends_a_job_at_its_next_beat(worker):
    begun = threading.Event()

    def work():
        begun.set()
        while True:
            beat()

    running = worker.submit(work)
    assert begun.wait(10)
    worker.close(at_once=True)
    assert running.done()
    worker.submit(nothing).wait()


def test_options_are_checked():
    with refused(ValueError):
        Worker("adam", threads=0)
    with refused(ValueError):
        Worker("adam", patience_s=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_has_a_thread_of_its_own(worker, copied):
    worker.submit(nothing).wait()
    other = copied(worker)
    threads = []
    for each in (worker, other):
        each.submit(lambda: threads.append(threading.get_ident())).wait()
    other.close()
    assert (other.name, other.threads, other.patience_s) == ("adam", 1, 5.0)
    assert len(set(threads)) == 2


class Owner:
    """As an optimizer: it holds its worker and jobs, and its jobs hold it."""

    def __init__(self, threads=1):
        self.worker = Worker("owned", threads=threads)
        self.sum = torch.zeros(4)
        self.job = self.worker.submit(self.add)

    def add(self):
        self.sum += 1

    def add_when(self, begun, go, done):
        begun.set()
        go.wait()
        self.add()
        done.append(self.sum[0].item())

    def fail(self):
        boom()


def tasks():
    """Of this process, torch's own threads among them."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_a_thousand_dropped_owners_leave_no_thread():
    Owner().job.wait()
    gc.collect()
    until(lambda: not any(thread.name == "surokit-owned" for thread in threading.enumerate()))
    threads = threading.active_count()
    before = len(tasks()) if sys.platform == "linux" else 0
    for _ in range(1000):
        Owner().job.wait()
    gc.collect()
    until(lambda: threading.active_count() <= threads)
    if sys.platform == "linux":
        until(lambda: len(tasks()) <= before)


def test_an_owner_that_is_dropped_with_an_error_that_nobody_saw_leaves_no_thread():
    owner = Owner()
    thread = thread_of(owner.worker)
    failed = owner.worker.submit(owner.fail)
    until(failed.done)
    del owner, failed
    gc.collect()
    until(lambda: not thread.is_alive())


def test_an_owner_that_is_dropped_while_its_job_runs_ends_after_it():
    owner, begun, go = Owner(), threading.Event(), threading.Event()
    done: list[float] = []
    thread = thread_of(owner.worker)
    owner.worker.submit(functools.partial(owner.add_when, begun, go, done))
    assert begun.wait(10)
    del owner
    gc.collect()
    assert thread.is_alive()
    go.set()
    until(lambda: not thread.is_alive())
    assert done == [2.0]


@linux
def test_torchs_own_threads_end_with_the_worker():
    if torch.get_num_threads() < 2 or "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("torch computes on one thread, or on threads that are kept")
    big = torch.zeros(1 << 20).sigmoid_()  # with this thread's own
    before = len(tasks())
    owner = Owner(threads=2)
    owner.worker.submit(big.sigmoid_).wait()
    assert len(tasks()) >= before + 2
    del owner
    gc.collect()
    until(lambda: len(tasks()) <= before)


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


def test_the_interpreter_ends_cleanly_with_jobs_running():
    done = run(
        """
import atexit, itertools, threading, time, torch
atexit.register(lambda: print("alive:", [t.name for t in known if t.is_alive()]))  # after the workers', who register when imported
from surokit.offload.workers import Worker
time.monotonic = itertools.count(step=60).__next__  # to nobody's harm: this process may have been stopped for a while
beating, short, idle, unused = (Worker(name, threads=2) for name in ("beating", "short", "idle", "unused"))
big = torch.zeros(1 << 20)
running = threading.Barrier(3)
def endless():
    running.wait()
    while True:
        big.sigmoid_()
        beating.beat()
def brief():  # without a beat: waited for
    running.wait()
    for _ in range(100):
        big.sigmoid()
    print("brief is done", flush=True)
beating.submit(endless)
beating.submit(lambda: print("never"))
short.submit(brief)
idle.submit(lambda: None).wait()
running.wait()
known = [t for t in threading.enumerate() if t.name.startswith("surokit-")]
assert len(known) == 3
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["brief is done", "alive: []"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_neither_uses_nor_joins_the_thread(worker):
    go = threading.Event()
    job = worker.submit(go.wait)
    child = os.fork()
    if child == 0:
        told = 0
        for say in (lambda: worker.submit(nothing), worker.check, job.wait):
            try:
                say()
            except OffloadError as error:
                told += "belongs to the process that this one was forked from" in str(error)
        worker.close()  # waits for nobody
        workers.end_all()
        worker.__init__("child")  # one of its own works
        worker.submit(nothing).wait()
        del worker
        os._exit(told)
    ended = [(0, 0)]

    def over():
        ended[0] = os.waitpid(child, os.WNOHANG)
        return ended[0] != (0, 0)

    until(over)
    assert os.waitstatus_to_exitcode(ended[0][1]) == 3
    assert not job.done()
    go.set()
    job.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="data loaders fork on Linux")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_data_loaders_processes_come_and_go_beside_it(worker):
    go = threading.Event()
    job = worker.submit(go.wait)
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork")
    assert [int(x) for (x,) in loader] == [0, 1, 2, 3]
    go.set()
    job.wait()


def test_torch_threads_are_the_workers_own():
    main = torch.get_num_threads()
    counts = {}

    def fresh(name):
        thread = threading.Thread(target=lambda: counts.update({name: torch.get_num_threads()}))
        thread.start()
        thread.join()

    fresh("before")
    for threads in (1, main + 2):
        worker = Worker("adam", threads=threads)
        worker.submit(lambda: counts.update(worker=torch.get_num_threads())).wait()
        assert counts["worker"] == threads
        assert torch.get_num_threads() == main
        fresh("after")
        assert counts["after"] == counts["before"]  # what new threads begin with is not changed either
        worker.close()


@linux
def test_a_worker_and_torchs_threads_under_it_are_bound():
    mine = os.sched_getaffinity(0)
    core = max(mine)
    before, bound = tasks(), {}
    worker, big = Worker("adam", cores=[core], threads=2), torch.zeros(1 << 20)

    def work():
        big.sigmoid_()
        bound.update({task: os.sched_getaffinity(task) for task in tasks() - before})

    worker.submit(work).wait()
    assert os.sched_getaffinity(0) == mine
    assert bound
    if workers.can_bind():
        assert set(map(frozenset, bound.values())) == {frozenset({core})}
    worker.close()


@linux
def test_nothing_is_bound_where_that_does_not_help(monkeypatch):
    mine, seen = os.sched_getaffinity(0), []

    def affinity_of_a_worker():
        worker = Worker("adam", cores=[min(mine)])
        worker.submit(lambda: seen.append(os.sched_getaffinity(threading.get_native_id()))).wait()
        worker.close()

    with monkeypatch.context() as patch:  # a group has the time of less than the cores
        patch.setattr(workers, "quota_of_cores", lambda: len(mine) - 0.5)
        affinity_of_a_worker()
    with monkeypatch.context() as patch:  # not Linux
        patch.delattr(os, "sched_setaffinity")
        affinity_of_a_worker()
    assert seen == [mine, mine]


@linux
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_begin_is_told(monkeypatch):
    monkeypatch.setattr(workers, "can_bind", boom)
    worker = Worker("adam", cores=[0])
    with refused(OffloadError):
        worker.submit(nothing).wait()
    worker.close()


def test_cores_that_are_gone_are_no_error():
    worker = Worker("adam", cores=[100_000])
    worker.submit(nothing).wait()
    worker.close()


@pytest.mark.parametrize(
    ("count", "reserved", "sizes"),
    [
        (3, 0.5, (1, 1, 1)),
        (4, 0.5, (2, 1, 1)),
        (8, 0.5, (4, 1, 3)),
        (16, 0.5, (8, 2, 6)),
        (64, 0.25, (16, 12, 36)),
        (8, 0.0, (1, 1, 6)),
        (8, 1.0, (6, 1, 1)),
    ],
)
def test_cores_are_split(monkeypatch, count, reserved, sizes):
    cores = list(range(10, 10 + count))
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    parts = split_cores(reserved)
    assert tuple(map(len, parts)) == sizes
    assert [core for part in parts for core in part] == cores


@pytest.mark.parametrize(("cores", "parts"), [([5], ([5], [5], [5])), ([5, 6], ([5], [6], [6]))])
def test_few_cores_are_shared(monkeypatch, cores, parts):
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    assert split_cores(0.5) == parts


@pytest.mark.parametrize("reserved", [-0.1, 1.1, math.nan])
def test_a_share_is_a_share(reserved):
    with refused(ValueError):
        split_cores(reserved)


def test_the_cores_are_the_processs_and_no_more_than_its_time(monkeypatch):
    monkeypatch.setattr(workers, "quota_of_cores", lambda: math.inf)
    if hasattr(os, "sched_getaffinity"):
        assert set(workers.usable_cores()) == os.sched_getaffinity(0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        monkeypatch.setattr(workers, "place_of", lambda core: (core % 4, core))
        assert workers.usable_cores() == [0, 4, 1, 5, 2, 6, 3, 7]  # two threads on each of four cores
        for quota, count in ((3.5, 3), (0.5, 1), (99.0, 8)):
            monkeypatch.setattr(workers, "quota_of_cores", lambda quota=quota: quota)
            assert len(workers.usable_cores()) == count
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(workers, "quota_of_cores", lambda: math.inf)
    assert workers.usable_cores() == list(range(6))


def test_ranks_of_a_machine_share_its_cores_unless_each_has_its_own(monkeypatch):
    launcher = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)) if pid == 0 else launcher, raising=False)
    monkeypatch.setattr(workers, "quota_of_cores", lambda: math.inf)
    monkeypatch.setattr(workers, "place_of", lambda core: (core, core))

    def cores_of_ranks(ranks):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            yield workers.usable_cores()

    assert list(cores_of_ranks(1)) == [list(range(8))]
    assert list(cores_of_ranks(3)) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert all(len(cores) == 1 for cores in cores_of_ranks(10))
    launcher = set(range(64))  # each rank was bound
    assert list(cores_of_ranks(2)) == [list(range(8))] * 2
    launcher = set(range(8))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert workers.usable_cores() == list(range(8))


def test_siblings_are_read(tmp_path):
    for core, siblings in ((0, "0,4\n"), (4, "0,4\n"), (3, "2-3\n")):
        folder = tmp_path / f"cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert [workers.place_of(core, tmp_path) for core in (0, 4, 3, 7)] == [(0, 0), (0, 4), (2, 3), (7, 7)]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_time_of_control_groups_is_read(tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    assert workers.quota_of_cores(own, groups) == math.inf  # no such system
    own.write_text("0::/a/b\n")
    assert workers.quota_of_cores(own, groups) == math.inf
    write(groups / "a/b/cpu.max", "max 100000\n")
    assert workers.quota_of_cores(own, groups) == math.inf
    write(groups / "a/cpu.max", "250000 100000\n")  # what is above counts too
    assert workers.quota_of_cores(own, groups) == 2.5
    write(groups / "cpu.max", "nonsense\n")
    assert workers.quota_of_cores(own, groups) == 2.5
    own.write_text("0::/../elsewhere\n")  # a container sees its own group as the top
    write(groups / "cpu.max", "150000 100000\n")
    assert workers.quota_of_cores(own, groups) == 1.5


def test_the_time_of_the_first_version_of_control_groups_is_read(tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("5:memory:/a\n4:cpu,cpuacct:/a\n")
    write(groups / "cpu/a/cpu.cfs_quota_us", "-1\n")
    write(groups / "cpu/a/cpu.cfs_period_us", "100000\n")
    assert workers.quota_of_cores(own, groups) == math.inf
    write(groups / "cpu/cpu.cfs_quota_us", "400000\n")
    write(groups / "cpu/cpu.cfs_period_us", "100000\n")
    assert workers.quota_of_cores(own, groups) == 4.0
