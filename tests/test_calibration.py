"""calibrate: figures of this machine, what a failing or an interrupted part leaves, and the kept result."""

import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surokit import calibration
from surokit.calibration import PARTS, RateMeasurement
from surokit.environment import cores, cpu_model
from surokit.hardware.gpus import Ceilings
from surokit.planner import Gpu, find_gpu, plan
from tests.clocks import Clock
from tests.refusals import warned

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
}


def calibrate(*args, **given):
    """Untyped, so that figures that may be None are used as they are."""
    return calibration.calibrate(*args, **given)


@pytest.fixture(scope="module")
def measured():
    return calibrate("cpu", seconds=0.2, cache=False)


@pytest.fixture
def counted(monkeypatch):
    """Parts that measure nothing: the number of calls, and figures that tell one call from another."""
    calls: list[str] = []

    def part(field):
        def measure(device, seconds):
            calls.append(field)
            return float(len(calls))

        return RateMeasurement(field, field, measure)

    monkeypatch.setattr(calibration, "PARTS", (part("bf16_tflops"), part("bandwidth_tb_s")))
    return calls


def test_a_processor(measured):
    assert measured.name == f"cpu: {cpu_model()}, {cores()} core{'s' if cores() > 1 else ''}"
    assert measured.device == "cpu"
    assert measured.memory_gib > 0.5
    assert (measured.bf16_tflops, measured.fp8_tflops) == (None, None)  # no peak, so no MFU
    reached: Any = measured.ceilings
    assert torch.__version__ in reached.measured
    assert "without" not in reached.measured
    assert reached.fp8_tflops is None  # no native product on a CPU
    assert reached.host_gb_s is None  # it is the host
    # wide bounds of any machine, narrow enough for a wrong unit
    assert 1e-4 < reached.bf16_tflops < 100
    assert 1e-3 < reached.fp32_tflops < 100
    assert 1e-4 < reached.bandwidth_tb_s < 5
    assert 0.1 < reached.launch_us < 1000
    assert 1e6 < reached.host_adam_params_s < 1e11
    assert 1e6 < reached.host_accumulate_params_s < 1e12  # usually the faster one, as it moves a third of the bytes


def test_a_plan_takes_it(measured):
    p: Any = plan(LLAMA, tokens=1e6, gpu=measured, batch=2, length=64, tflops_per_gpu=0.01)
    assert p.gpu is measured
    assert p.time.mfu is None
    assert p.days == pytest.approx(p.flops / 0.01e12 / 86400)


def test_what_stands_for_memory_fits_no_cache():
    """A processor's last cache holds up to 256 MiB or so, three times as fast as memory."""
    assert 2 * calibration.COPY_BYTES["cpu"] >= 512 * 2**20
    assert 4 * 4 * calibration.ADAM_PARAMS >= 512 * 2**20


def test_figures_have_the_digits_that_a_clock_is_worth(counted, monkeypatch):
    third = RateMeasurement("bf16_tflops", "bf16 products", lambda device, seconds: 100 / 3)
    monkeypatch.setattr(calibration, "PARTS", (third,))
    assert calibrate("cpu", 1, cache=False).ceilings.bf16_tflops == 33.33


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(calibration, "time", clock)
    return clock


@pytest.mark.parametrize("field", ["fp32_tflops", "bf16_tflops"])
def test_a_product_is_of_two_operations_for_each_pair_of_numbers(field, clock, monkeypatch):
    """The rate of a real product, on a clock that gives each one the time of 1e9 operations a second."""
    part = next(part for part in PARTS if part.field == field)

    class Multiplies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.mm:
                (rows, between), columns = args[0].shape, args[1].shape[1]
                clock.sleep(2 * rows * between * columns * 1e-9)
            return func(*args, **(kwargs or {}))

    monkeypatch.setitem(calibration.SIZES, "cpu", (32, 64))
    with Multiplies():
        assert part.measure(CPU, 0.01) == pytest.approx(1e-3, rel=0.01)


def test_a_part_lasts_as_long_as_it_may(clock):
    calls = []

    def call():
        calls.append(1)
        clock.sleep(0.01)

    assert calibration.median_s(call, CPU, 0.2) == pytest.approx(0.01)
    assert 0.2 <= clock.perf_counter() < 0.25
    calls.clear()
    calibration.median_s(call, CPU, 0)  # a minimum is kept
    assert len(calls) >= 5


def test_a_products_largest_size_is_left_out_where_it_would_take_too_long(clock):
    sizes = []

    def multiply(n):
        sizes.append(n)
        return lambda: clock.sleep(n**3 * 1e-10)

    rate = calibration.best_product(multiply, CPU, 0.1)
    assert sizes[0] == 256
    assert 2048 not in sizes  # 0.86 s a product
    assert rate == pytest.approx(2 / 1e-10 / 1e12)


def test_a_failing_part_is_none_and_said(monkeypatch):
    def fails(device, seconds):
        raise torch.OutOfMemoryError("no room\nfor this")

    parts = tuple(dataclasses.replace(p, measure=fails) if p.field == "fp32_tflops" else p for p in PARTS[:2])
    monkeypatch.setattr(calibration, "PARTS", parts)
    with pytest.warns(
        UserWarning, match=r"could not measure everything of cpu: .* without fp32 products \(no room\)\.$"
    ):
        gpu = calibrate("cpu", 0.01, cache=False)
    assert gpu.ceilings.fp32_tflops is None
    assert gpu.ceilings.bf16_tflops > 0
    assert gpu.ceilings.measured.endswith("; without fp32 products (no room)")


def test_an_interrupt_keeps_what_there_is_and_is_not_kept(counted, monkeypatch, tmp_path):
    def interrupted(device, seconds):
        raise KeyboardInterrupt

    whole = calibration.PARTS
    monkeypatch.setattr(
        calibration, "PARTS", (whole[0], RateMeasurement("fp32_tflops", "fp32 products", interrupted), whole[1])
    )
    with pytest.warns(UserWarning, match=r"without fp32 products \(interrupted\), bandwidth_tb_s \(interrupted\)"):
        gpu = calibrate("cpu", 1, tmp_path)
    assert gpu.ceilings.bf16_tflops == 1
    assert gpu.ceilings.bandwidth_tb_s is None
    assert not list(tmp_path.iterdir())


def test_the_result_is_kept(counted, tmp_path):
    first = calibrate("cpu", 5, tmp_path)
    assert calibrate("cpu", 5, tmp_path) == calibrate("cpu", 2, str(tmp_path)) == first
    assert len(counted) == 2
    (file,) = tmp_path.iterdir()
    assert Gpu.from_json(json.loads(file.read_text())["gpu"]) == first
    again = calibrate("cpu", 5, tmp_path, refresh=True)
    assert (again.ceilings.bf16_tflops, len(counted)) == (3, 4)
    assert calibrate("cpu", 1, tmp_path) == again
    assert calibrate("cpu", 60, tmp_path).ceilings.bf16_tflops == 5  # more time was asked for than the kept one took
    assert calibrate("cpu", 1, cache=False).ceilings.bf16_tflops == 7
    assert list(tmp_path.iterdir()) == [file]


def test_another_torch_is_another_result(counted, tmp_path, monkeypatch):
    calibrate("cpu", 1, tmp_path)
    monkeypatch.setattr(torch, "__version__", "99.0")
    calibrate("cpu", 1, tmp_path)
    assert len(counted) == 4
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}, "seconds": 9, "gpu": "{}"}'])
def test_a_damaged_file_is_measured_again(counted, tmp_path, damage):
    first = calibrate("cpu", 1, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert calibrate("cpu", 1, tmp_path).ceilings.bf16_tflops == 3
    assert calibrate("cpu", 1, tmp_path) != first


def test_a_folder_that_cannot_be_written_harms_nothing(counted, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with warned(UserWarning):
        assert calibrate("cpu", 1, blocked / "folder").ceilings.bf16_tflops == 1


@pytest.mark.parametrize(
    ("system", "variable", "where"),
    [
        ("Linux", "XDG_CACHE_HOME", "surokit/calibration"),
        ("Linux", None, ".cache/surokit/calibration"),
        ("Darwin", None, "Library/Caches/surokit/calibration"),
        ("Windows", "LOCALAPPDATA", "surokit/calibration"),
        ("Windows", None, "AppData/Local/surokit/calibration"),
    ],
)
def test_the_folder_is_the_platforms(system, variable, where, monkeypatch, tmp_path):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    assert calibration.cache_folder() == tmp_path / where


def test_a_known_gpu_keeps_its_row(monkeypatch, counted, tmp_path):
    """With a device that only the names know: the row is the table's, today's one also for a kept result."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85e9, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    row = calibration.row_of(torch.device("cuda", 0))
    # 80 GiB by name; a plan that must fit wants what there is
    assert row == dataclasses.replace(find_gpu("H100"), memory_gib=79.16, usable_gib=79.16)
    properties.name = "NVIDIA Unheard Of"
    assert calibration.row_of(torch.device("cuda", 0)) == Gpu(
        "NVIDIA Unheard Of",
        memory_gib=79.16,
        capability=(9, 0),
        source="torch's properties of the device; no row in the table",
    )
    stale = dataclasses.replace(row, watts=1, ceilings=Ceilings("then", bf16_tflops=700))
    calibration.write_kept(tmp_path / "x.json", {"a": 1}, 5, stale)
    assert calibration.read_kept(tmp_path / "x.json", {"a": 1}, 5) == dataclasses.replace(row, ceilings=stale.ceilings)
    assert calibration.read_kept(tmp_path / "x.json", {"a": 2}, 5) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "gpu"}, "device='gpu' is none that torch knows: give 'cuda', 'cuda:1' or 'cpu'"),
        ({"device": "meta"}, "a calibration measures 'cuda' or 'cpu'"),
        ({"device": "cuda:99"}, r"device='cuda:99' is not there, torch finds \d+ GPUs: calibrate\('cpu'\)"),
        ({"seconds": 0}, "seconds=0 must be a number above zero"),
        ({"seconds": float("nan")}, "must be a number above zero"),
        ({"seconds": "20"}, "must be a number above zero"),
    ],
)
def test_what_cannot_be_meant(given, said):
    with pytest.raises(ValueError, match=said) as caught:
        calibrate(**{"device": "cpu", "cache": False, **given})
    assert "\n" not in str(caught.value)


def test_the_line_shows_where_someone_looks(counted, monkeypatch, capsys):
    calibrate("cpu", 1, cache=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(calibration, "front_end", lambda: "Jupyter")
    calibrate("cpu", 1, cache=False)
    shown = capsys.readouterr().err
    assert ": bf16_tflops (1 of 2)" in shown
    assert shown.endswith("\r")
    calibrate("cpu", 1, cache=False, progress=False)
    assert capsys.readouterr().err == ""


def test_nothing_else_is_touched(measured):
    """No gradients switched, no threads, no default dtype: a calibration leaves the process as it was."""
    before = (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate("cpu", 0.01, cache=False)
    after = (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )
    assert after == before
    assert torch.equal(torch.get_rng_state(), state)
