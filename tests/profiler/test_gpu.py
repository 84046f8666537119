"""Seeded faults on a GPU, each found with its line and its size. Tables are read without pandas, which a GPU machine may lack."""

import time

import pytest
import torch
from torch import nn

from surokit.profiler import profile
from tests.profiler.models import line_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(each, steps=8, width=1024):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(512, width, device="cuda")
    with profile(steps=4, warmup=3) as p:
        for _ in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each(loss.detach())
    return p


def lost(p):
    table = p._analysis.tables["lost"]
    return dict(zip(table["cause"], table["ms_per_step"]))


def lines(p, table):
    return p._analysis.tables[table]["line"]


def test_parts_sum_and_kernels_have_modules():
    p = train(lambda loss: None)
    s = p.summary
    assert s["activity"] == "gpu"
    assert s["busy_ms"] + s["idle_ms"] == pytest.approx(s["wall_ms"])
    modules = p._analysis.tables["modules"]
    assert sum(modules["self_ms"]) == pytest.approx(s["busy_ms"])
    named = sum(ms for m, ms in zip(modules["module"], modules["self_ms"]) if m != "(outside modules)")
    assert named >= 0.9 * s["busy_ms"]
    found = dict(zip(modules["module"], zip(modules["forward_ms"], modules["backward_ms"])))
    assert all(ms > 0 for ms in found["0"])
    assert lost(p)["launches"] + lost(p)["syncs"] + lost(p)["host"] <= s["idle_ms"] * (1 + 1e-9)


def test_ten_milliseconds_of_host_work_between_steps():
    def wait(loss):
        torch.cuda.synchronize()
        end = time.perf_counter() + 0.010
        while time.perf_counter() < end:
            pass  # host work

    p = train(wait)
    assert lost(p)["host"] == pytest.approx(10, abs=1)
    work = line_of("host work", __name__)
    assert lines(p, "gaps")[0] in (work - 1, work)


def test_an_item_is_found_with_its_line():
    p = train(lambda loss: loss.item())  # item
    assert line_of("item", __name__) in lines(p, "syncs")
    assert lost(p)["syncs"] > 0


def test_a_pageable_copy_is_found_with_its_direction():
    block = torch.randn(2048, 2048)
    p = train(lambda loss: block.cuda())
    copies = p._analysis.tables["copies"]
    found = dict(zip(copies["direction"], zip(copies["bytes"], copies["pinned"])))
    assert found["host to device"] == (block.nbytes, False)
    assert p.summary["h2d_bytes"] == block.nbytes


def test_a_thousand_tiny_adds_are_launches():
    tiny = torch.zeros(4, device="cuda")

    def adds(loss):
        for _ in range(1000):
            tiny.add_(1)

    p = train(adds)
    assert p.summary["launches_per_step"] >= 1000
    assert max(lost(p), key=lambda cause: lost(p)[cause]) == "launches"
