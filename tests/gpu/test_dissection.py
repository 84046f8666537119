"""Cells of a dissection on a device: what a switch does to bytes, and that a step's parts are found; rehearsed on a CPU.

Cells are measured in this process, one after the other. Times are printed and not asserted.
"""

from dataclasses import replace

import pytest

import surokit as sk
from surokit.dissection.cell import Cell
from surokit.dissection.job import Job, Tokens
from surokit.dissection.measure import measure
from surokit.dissection.settings import Setting
from tests.dissection.cells import all_kernels, held, peak

SMALL = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=512, ffn=192, max_length=512)
LARGE = replace(SMALL, layers=12, width=1024, heads=16, kv_heads=8, vocab=32768, ffn=2816)
LINEARS = {f"Linear {role}" for role in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.fixture(autouse=True)
def switches():
    yield
    all_kernels()


def cell(device, what="train", **changes):
    config, batch, length = (LARGE, 4, 512) if device.type == "cuda" else (SMALL, 2, 64)
    setting = Setting(batch=batch, length=length, fusion="none")
    job = Job(replace(setting, **changes), config, Tokens(), 5, 0, 1e-4, None, str(device), what=what)
    values = measure(job)
    assert values is not None
    assert values["state"] == "measured", values["why"]
    found = Cell.of({"name": what, **values})
    parts = {row["part"]: row["ms"] for row in found.profile["parts"]}
    print(f"{what} {changes}: {found.ms:.3g} ms, {found.peak_gib:.3g} GiB, planned {found.planned_gib:.3g}, {parts}")
    assert sum(parts.values()) == pytest.approx(found.profile["wall_ms"], rel=0.02)
    return found, parts


def test_a_step_is_found_in_its_parts(device):
    found, parts = cell(device)
    assert set(parts) >= LINEARS | {"embedding", "RMSNorm", "attention", "SiLU and gate", "lm_head", "optimizer"}
    assert "CUDA graph" not in parts
    known = sum(ms for part, ms in parts.items() if part not in ("other", "Linear, other"))
    assert known > 0.8 * found.profile["wall_ms"]
    assert set(found.memory["phases"]) == {"forward", "backward", "optimizer"}


def test_recompute_and_kernels_of_attention_keep_less(device):
    whole, _ = cell(device, attention="math")
    flash, _ = cell(device, attention="flash")
    full, _ = cell(device, attention="math", recompute="full")
    assert peak(flash) < peak(whole) or device.type == "cpu"  # where copies of products in float32 may be the peak
    assert peak(full) < peak(whole)
    assert full.losses == pytest.approx(whole.losses, rel=1e-2)


def test_stored_weights_and_those_on_the_host_take_less(device):
    plain, _ = cell(device, "tune", lora=8)
    stored, _ = cell(device, "tune", lora=8, recipe="qnf4")
    kept = [held(each, "frozen weights") for each in (plain, stored)]
    assert kept[1] < 0.7 * kept[0] or device.type == "cpu"  # which keeps decoded copies of a small model
    if device.type == "cuda":
        away, _ = cell(device, "tune", lora=8, offload_weights=True)
        assert peak(away) < peak(plain)


def test_a_compiled_step_has_a_peak(cuda):
    plain, _ = cell(cuda)
    compiled, _ = cell(cuda, compile=True)
    assert peak(compiled) > sum(plain.memory["rest"].values()) - held(plain, "others")


def test_generation_by_parts(device):
    found, parts = cell(device, "infer")
    assert set(parts) >= LINEARS | {"attention", "lm_head"}
    assert found.prefill_ms is not None
    assert found.planned["terms"]["KV cache"] == held(found, "KV cache")


@pytest.mark.parametrize("engine", ["transformers", "trainer"])
def test_other_engines(device, engine):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ours, _ = cell(device)
    theirs, parts = cell(device, engine=engine)
    assert theirs.losses[0] == pytest.approx(ours.losses[0], rel=1e-2)
    assert set(parts) >= LINEARS | {"attention", "lm_head", "optimizer"}
