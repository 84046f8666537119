"""Seeded faults on a GPU, each found with its line and its size. Tables are read without pandas, which a GPU machine may lack.

`python -m tests.profiler.test_gpu trace.json.gz` records a small real trace, of two steps, for tests without a GPU.
"""

import gc
import sys
import time

import pytest
import torch
from torch import nn

from surokit.profiler import Profile, profile
from tests.profiler.models import line_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


WITHIN = 0.25  # a machine's timers, and what Python does around the seeded wait


def model_on_gpu(width=1024, layers=8):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()


def train(each=lambda loss: None, steps=8, width=1024, batches=None, **options):
    model = model_on_gpu(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(512, width, device="cuda")
    with profile(steps=4, warmup=3, **options) as p:
        for batch in batches or [x] * steps:
            loss = model(batch.to("cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each(loss.detach())
    return p


def busy_wait(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass  # host work


def table(p, name):
    return p._analysis.tables[name]


def lost(p):
    return dict(zip(table(p, "lost")["cause"], table(p, "lost")["ms_per_step"]))


def lines(p, name):
    return table(p, name)["line"]


def test_parts_sum_and_kernels_have_modules():
    p = train()
    s = p.summary
    assert s["activity"] == "gpu"
    assert s["busy_ms"] + s["idle_ms"] == pytest.approx(s["wall_ms"])
    modules = table(p, "modules")
    assert sum(modules["self_ms"]) == pytest.approx(s["busy_ms"])
    named = sum(ms for m, ms in zip(modules["module"], modules["self_ms"]) if m != "(outside modules)")
    assert named >= 0.98 * s["busy_ms"]
    found = dict(zip(modules["module"], zip(modules["forward_ms"], modules["backward_ms"])))
    assert all(ms > 0 for ms in found["0"])
    assert lost(p)["launches"] + lost(p)["syncs"] + lost(p)["host"] <= s["idle_ms"] * (1 + 1e-9)


def test_flops_come_from_one_warmup_step():
    p = train()
    gflop = 3 * 2 * 8 * 512 * 1024 * 1024 - 2 * 512 * 1024 * 1024  # the input needs no gradient
    assert p.summary["gflop_per_step"] == pytest.approx(gflop / 1e9)
    assert p.summary["launches_per_step"] == pytest.approx(train().summary["launches_per_step"], rel=0.05)


def test_ten_milliseconds_of_host_work_between_steps():
    def wait(loss):
        torch.cuda.synchronize()
        busy_wait(0.010)

    p = train(wait)
    assert lost(p)["host"] == pytest.approx(10, rel=WITHIN)
    work = line_of("host work", __name__)
    assert lines(p, "gaps")[0] in (work - 1, work)


def test_a_sleep_is_host_wait():
    def wait(loss):
        torch.cuda.synchronize()
        time.sleep(0.010)  # asleep

    p = train(wait)
    assert p.summary["host_wait_ms"] == pytest.approx(10, rel=WITHIN)
    assert lines(p, "gaps")[0] == line_of("asleep", __name__)


def test_an_item_is_found_with_its_line():
    p = train(lambda loss: loss.item())  # item
    assert line_of("item", __name__) in lines(p, "syncs")
    assert lost(p)["syncs"] > 0


def test_waits_by_name_are_found_with_their_line():
    def wait(loss):
        torch.cuda.synchronize()  # device wait
        event = torch.cuda.Event()
        event.record()
        event.synchronize()  # event wait

    p = train(wait)
    assert {line_of("device wait", __name__), line_of("event wait", __name__)} <= set(lines(p, "syncs"))
    assert lost(p)["syncs"] > 0
    assert not hasattr(torch.cuda.synchronize, "__wrapped__")  # torch's own again


def test_a_pageable_copy_is_found_with_its_direction_and_line():
    block = torch.randn(2048, 2048)
    p = train(lambda loss: block.cuda())  # pageable
    copies = table(p, "copies")
    found = dict(zip(copies["direction"], zip(copies["bytes"], copies["pinned"])))
    assert found["host to device"] == (block.nbytes, False)
    assert p.summary["h2d_bytes"] == block.nbytes
    assert line_of("pageable", __name__) in lines(p, "syncs")


def test_a_pinned_copy_does_not_wait():
    block = torch.randn(2048, 2048).pin_memory()
    p = train(lambda loss: block.to("cuda", non_blocking=True))  # pinned
    copies = table(p, "copies")
    assert dict(zip(copies["direction"], copies["pinned"]))["host to device"] is True
    assert line_of("pinned", __name__) not in lines(p, "syncs")


def test_a_thousand_tiny_adds_are_launches():
    tiny = torch.zeros(4, device="cuda")

    def adds(loss):
        for _ in range(1000):
            tiny.add_(1)

    p = train(adds)
    assert p.summary["launches_per_step"] >= 1000
    assert max(lost(p), key=lambda cause: lost(p)[cause]) == "launches"


def test_the_garbage_collector_is_timed():
    kept: list[list[int]] = [[] for _ in range(1_000_000)]
    p = train(lambda loss: gc.collect())
    assert len(kept) == 1_000_000
    assert p.summary["collect_ms"] > 5
    assert lost(p)["host"] > 0.5 * p.summary["collect_ms"] - p.summary["busy_ms"]


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        busy_wait(0.020)
        return torch.zeros(512, 1024)


def test_waiting_for_data():
    p = train(batches=torch.utils.data.DataLoader(Slow(), batch_size=None))
    assert p.summary["phases_ms"]["data"] >= 20
    assert lost(p)["host"] >= 15
    assert "data" in table(p, "advice")["rule"]


def test_a_cuda_graph_is_no_host_wait_inside():
    model, x = model_on_gpu(), torch.randn(64, 1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        model(x)
    with profile(steps=4, warmup=3) as p:
        for _ in range(7):
            graph.replay()
            p.step()
    assert p.summary["graph_launches_per_step"] == pytest.approx(1)
    assert sum(table(p, "modules")["self_ms"]) == pytest.approx(p.summary["busy_ms"])
    assert "(cuda graph)" in table(p, "modules")["module"]


def test_a_step_captured_into_a_graph_inside_the_block_is_left_alone():
    model, x = model_on_gpu(256, 2), torch.randn(64, 256, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with profile(steps=3, warmup=2) as p:
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()  # reaches the optimizer's hooks, and is no step
        for _ in range(6):
            graph.replay()
            p.step()
    assert p.summary["steps"] == 3
    assert p.summary["busy_ms"] > 0


def test_compiled_code_is_a_row_and_eager_shows_inside():
    model, x = model_on_gpu(256, 2), torch.randn(64, 256, device="cuda")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    with profile() as p:
        compiled(x).sum().backward()
    with profile(eager=True) as inside:
        compiled(x).sum().backward()
    assert p.summary["busy_ms"] > 0
    assert any("sk.profile(eager=True)" in note for note in p.notes)
    assert any(name.endswith("1") for name in table(inside, "modules")["module"])


def test_without_device_activity():
    p = train(gpu=False)
    assert p.summary["activity"] == "cpu"
    assert any("gpu=False" in note for note in p.notes)


def test_the_peak_is_the_blocks():
    before = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del before
    assert train().summary["peak_gib"] < 0.9


def test_a_trace_comes_back_the_same(tmp_path):
    p = record(tmp_path / "trace.json.gz")
    back = Profile.from_trace(tmp_path / "trace.json.gz")
    assert back.summary["activity"] == "gpu"
    assert back.summary["busy_ms"] == pytest.approx(p.summary["busy_ms"], rel=0.01)


def record(path):
    """Two steps of a small model with an `.item()` and a pageable copy, as a Chrome trace."""
    block = torch.randn(256, 256)
    model, x = model_on_gpu(256, 2), torch.randn(64, 256, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(steps=2, warmup=2) as p:
        for _ in range(4):
            loss = model(x + block.cuda()[:64]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    p.to_perfetto(path)
    return p


if __name__ == "__main__":
    print(record(sys.argv[1]))
