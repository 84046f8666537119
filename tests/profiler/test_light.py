"""The speed of light of a hand-made step, of a real one, and where its rates come from."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import surokit as sk
from surokit.hardware.gpus import GPUS, Ceilings, Gpu
from surokit.profiler.analysis.roles import Table
from surokit.profiler.analysis.speed_of_light import WHOLE, cached_gpu, speed_of_light
from surokit.profiler.analysis.tables import analyse
from surokit.profiler.analysis.timeline import Event, Kind, Timeline
from surokit.profiler.record.recording import RATES, Recording, Shaped, pack, unpack
from tests.profiler.test_work import Unet, shaped
from tests.profiler.traces import gpu_recording
from tests.refusals import refused

# 1 TFLOPS in float32 and 4 in bfloat16 and below; 0.5 TB/s; 10 us a call
REACHED = Gpu("mine", ceilings=Ceilings("today", bf16_tflops=4.0, fp32_tflops=1.0, bandwidth_tb_s=0.5, launch_us=10.0))
PROCESSOR = Gpu("cpu: mine", ceilings=REACHED.ceilings, device="cpu")
BF16, FP32, FP8 = RATES.index("bf16"), RATES.index("fp32"), RATES.index("fp8")
EVENTS = [
    # name, start, end, FLOPs, bytes, rate
    ("aten::mm", 24, 26, 8e9, 1e6, BF16),  # in Net.a: 2 ms at 4 TFLOPS, 0.002 ms of bytes
    ("aten::add", 28, 30, 0, 5e8, -1),  # in Net.a: 1 ms of bytes
    ("aten::mul", 38, 40, 0, 1e8, -1),  # in Net: 0.2 ms of bytes
    ("aten::mm", 60, 62, 3e9, 1e8, FP32),  # outside: 3 ms at 1 TFLOPS
    ("hi", 64, 66, 0, 0, -1),
]


def hand_made(events=EVENTS) -> Recording:
    rows = [Event(Kind.OP, name, a * 1000, b * 1000, 1) for name, a, b, *_ in events]
    flop_E, bytes_E, rate_E = (np.array([e[i] for e in events], np.int64) for i in (3, 4, 5))
    return gpu_recording(shaped=Shaped(Timeline.of(rows), flop_E, bytes_E, rate_E))


MODULES: Table = {
    "module": ["Net", "a", "(outside modules)", "(copies)"],
    "self_ms": [0.4, 4.0, 2.0, 1.0],
}


def rows_of(table: Table) -> dict[str, dict[str, Any]]:
    return {row[0]: dict(zip(table, row)) for row in zip(*table.values())}


def test_a_step_by_hand():
    table = speed_of_light(hand_made(), MODULES, REACHED)
    assert list(table) == ["module", "self_ms", "light_ms", "share", "bound", "gflop", "gib"]
    assert table["module"] == [WHOLE, *MODULES["module"]]
    row = rows_of(table)
    assert row["a"]["light_ms"] == pytest.approx(3.0)
    assert row["a"]["share"] == pytest.approx(0.75)
    assert (row["a"]["bound"], row["a"]["gflop"]) == ("compute", 8.0)
    assert row["a"]["gib"] == pytest.approx((5e8 + 1e6) / 2**30)
    assert row["Net"]["light_ms"] == pytest.approx(0.2)
    assert (row["Net"]["bound"], row["Net"]["gflop"]) == ("memory", 0.0)
    assert row["(outside modules)"]["light_ms"] == pytest.approx(3.0)
    assert row["(outside modules)"]["share"] == pytest.approx(1.5)  # above one: not hidden, whatever the reason
    assert row["(copies)"]["bound"] == "unknown"
    assert row["(copies)"]["share"] is None
    whole = row[WHOLE]
    assert whole["light_ms"] == pytest.approx(6.2)
    assert whole["self_ms"] == pytest.approx(7.4)
    assert whole["share"] == pytest.approx(6.2 / 7.4)
    assert whole["gflop"] == pytest.approx(11.0)
    for column in ("self_ms", "light_ms", "gflop", "gib"):
        assert sum(table[column][1:]) == pytest.approx(table[column][0])


def test_what_has_work_and_no_own_time_has_a_row():
    table = speed_of_light(hand_made(), {"module": ["a"], "self_ms": [4.0]}, REACHED)
    row = rows_of(table)
    assert table["module"] == [WHOLE, "a", "Net", "(outside modules)"]
    assert row["Net"]["share"] is None
    assert row["Net"]["bound"] == "memory"


def test_a_processors_small_operators_are_bound_by_overhead():
    small = [("aten::mul", 38 + i, 39 + i, 0, 400_000, -1) for i in range(4)]  # 0.0008 ms of bytes each, 10 us a call
    events = [*EVENTS[:2], *small]
    assert rows_of(speed_of_light(hand_made(events), MODULES, PROCESSOR))["Net"]["bound"] == "overhead"
    assert rows_of(speed_of_light(hand_made(events), MODULES, PROCESSOR))["a"]["bound"] == "compute"
    # a GPU's calls are the host's, not its own time
    assert rows_of(speed_of_light(hand_made(events), MODULES, REACHED))["Net"]["bound"] == "memory"


def test_twice_the_rates_are_half_the_light():
    fast = Gpu("mine", ceilings=Ceilings("today", bf16_tflops=8.0, fp32_tflops=2.0, bandwidth_tb_s=1.0))
    slow_ms, fast_ms = (speed_of_light(hand_made(), MODULES, gpu)["light_ms"] for gpu in (REACHED, fast))
    assert fast_ms == pytest.approx([ms / 2 for ms in slow_ms])


def test_float8_runs_at_its_own_rate_where_there_is_one():
    event = [("aten::_scaled_mm", 24, 26, 8e9, 0, FP8)]
    assert speed_of_light(hand_made(event), MODULES, REACHED)["light_ms"][0] == pytest.approx(2.0)  # bf16's
    ceilings = Ceilings("today", bf16_tflops=4.0, fp8_tflops=8.0, bandwidth_tb_s=0.5)
    hopper = Gpu("mine", ceilings=ceilings, capability=(9, 0))
    assert speed_of_light(hand_made(event), MODULES, hopper)["light_ms"][0] == pytest.approx(1.0)


def test_causal_attention_has_the_light_of_half_its_flops():
    def of(causal):
        q, k, v = torch.randn(3, 1, 2, 256, 64, requires_grad=True).unbind()
        attend = nn.functional.scaled_dot_product_attention
        step = shaped(lambda: attend(q, k, v, is_causal=causal).sum().backward())
        recording = gpu_recording(shaped=unpack(pack(gpu_recording(shaped=step))).shaped)
        slow = Gpu("mine", ceilings=Ceilings("today", fp32_tflops=1e-3, bandwidth_tb_s=0.5))  # all is compute
        return {name: column[0] for name, column in speed_of_light(recording, MODULES, slow).items()}

    whole, half = of(False), of(True)
    assert half["gflop"] == whole["gflop"] > 0
    assert half["light_ms"] == pytest.approx(whole["light_ms"] / 2, rel=0.01)


def test_a_datasheet_knows_no_float32_so_its_bfloat16_is_the_bound():
    h100: Any = GPUS["H100"]
    row = rows_of(speed_of_light(hand_made(), MODULES, h100))
    assert row["(outside modules)"]["light_ms"] == pytest.approx(1e8 / h100.bandwidth_tb_s / 1e9)  # more than its FLOPs
    only_float32 = Gpu("cpu: mine", ceilings=Ceilings("t", fp32_tflops=1.0, bandwidth_tb_s=0.5), device="cpu")
    assert rows_of(speed_of_light(hand_made(), MODULES, only_float32))["a"]["light_ms"] == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("make", "gpu"),
    [
        (lambda: gpu_recording(), REACHED),
        (hand_made, Gpu("cpu: mine", device="cpu")),
        (hand_made, Gpu("mine", bf16_tflops=100)),
    ],
)
def test_what_is_missing_is_said(make, gpu):
    with refused(ValueError) as caught:
        speed_of_light(make(), MODULES, gpu)
    assert "\n" not in str(caught.value)


def test_the_device_of_a_profile(monkeypatch):
    asked: list[tuple[str, ...]] = []

    def calibrate(*given):
        asked.append(given)
        return REACHED

    monkeypatch.setattr("surokit.calibration.calibrate", calibrate)
    assert cached_gpu() is cached_gpu("cpu") is REACHED
    assert asked in ([(), ()], [(), ("cpu",)])  # the second on a machine with a GPU
    assert cached_gpu("NVIDIA H200").name == "H200"
    assert len(asked) == 2
    with refused(ValueError):
        cached_gpu("a GPU of tomorrow")


def test_an_empty_step():
    table = speed_of_light(hand_made([]), {"module": [], "self_ms": []}, REACHED)
    assert table["module"] == []


def test_a_real_step_sums_to_its_work(monkeypatch):
    """Every module of a small UNet under a recording of its own: spans by hooks, work by shapes."""
    torch.manual_seed(0)
    model, x_BCHW = Unet(), torch.randn(2, 3, 16, 16)
    with sk.profile(steps=2, warmup=3) as p:
        for _ in range(5):
            model(x_BCHW).square().mean().backward()
            p.step()
    recording = p._done()
    tables = analyse(recording).tables
    row = rows_of(speed_of_light(recording, tables["modules"], PROCESSOR))
    alone = shaped(lambda: model(x_BCHW).square().mean().backward())
    assert row[WHOLE]["gflop"] == pytest.approx(alone.flop_E.sum() / 1e9)
    assert row[WHOLE]["self_ms"] == pytest.approx(sum(tables["modules"]["self_ms"]))
    inner: nn.Conv2d = model.inner
    places = 2 * 8 * 8
    assert row["inner"]["gflop"] == pytest.approx(3 * 2 * places * inner.weight.numel() / 1e9)
    assert row["inner"]["light_ms"] >= row["inner"]["gflop"] / 1.0
    for name, each in row.items():
        assert each["light_ms"] >= 0
        assert each["bound"] in ("compute", "memory", "overhead", "unknown"), name
    assert next(iter(row)) == WHOLE
