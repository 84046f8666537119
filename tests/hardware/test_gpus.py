"""The table of GPUs: what every row owes, a table of one's own, and JSON there and back."""

import csv
import dataclasses
import io
import re
from importlib.resources import files

import pytest

from surokit import planner
from surokit.hardware.gpus import COLUMNS, Ceilings, load_hardware
from surokit.planner import Gpu, find_gpu
from tests.refusals import refused

FIGURES = ("memory_gib", "bandwidth_tb_s", "bf16_tflops", "fp8_tflops", "fp4_tflops", "peer_gb_s", "host_gb_s", "watts")


@pytest.fixture
def table(monkeypatch):
    """A copy of the table, so that what a test registers is gone after it."""
    copy = dict(planner.GPUS)
    monkeypatch.setattr("surokit.hardware.gpus._TABLE", copy)
    return copy


def test_every_row_has_its_source_and_figures_in_their_units():
    for gpu in planner.GPUS.values():
        assert re.search("datasheet|data sheet|whitepaper|torchtitan", gpu.source), gpu.name
        ranges = {
            "memory_gib": (8, 300),
            "bandwidth_tb_s": (0.2, 10),
            "bf16_tflops": (40, 3000),
            "fp8_tflops": (80, 6000),
            "fp4_tflops": (300, 16000),
            "peer_gb_s": (16, 1000),
            "host_gb_s": (16, 500),
            "watts": (50, 1500),
        }
        for name in FIGURES:
            low, high = ranges[name]
            assert getattr(gpu, name) is None or low <= getattr(gpu, name) <= high, (gpu.name, name)
        assert gpu.ceilings is None
        assert gpu.device == "cuda"


@pytest.mark.parametrize(
    ("name", "figures"),
    [  # as the vendors print them, typed in again: memory, bandwidth, dense bf16, fp8, fp4, links in one direction, watts
        ("A100", (80, 2.039, 312, None, None, 600 / 2, 64 / 2, 400)),
        ("H100", (80, 3.35, 989, 3958 / 2, None, 900 / 2, 128 / 2, 700)),
        ("H100-PCIe", (80, 2.0, 756, 3026 / 2, None, 128 / 2, 128 / 2, 350)),
        ("H200", (141, 4.8, 989, 3958 / 2, None, 900 / 2, 128 / 2, 700)),
        ("H20", (96, 4.0, 148, 296, None, 900 / 2, 128 / 2, None)),  # 400 W printed, 500 W allowed
        ("B200", (180, 8.0, 4500 / 2, 9000 / 2, 18000 / 2, 1800 / 2, 128 / 2, 1000)),
        ("L4", (24, 0.3, 242 / 2, 484 / 2, None, 64 / 2, 64 / 2, 72)),
        ("L40S", (48, 0.864, 362, 733, None, 64 / 2, 64 / 2, 350)),
        ("RTX-4090", (24, 1.008, 165.2, 330.3, None, None, 64 / 2, 450)),
        ("RTX-5090", (32, 1.792, 209.5, 419, 3352 / 2, None, 128 / 2, 575)),
        ("RTX-PRO-6000", (96, 1.792, 503.8, 4000 / 4, 4000 / 2, 128 / 2, 128 / 2, 600)),
        ("T4", (16, 0.32, None, None, None, 32 / 2, 32 / 2, 70)),
        ("MI300X", (192, 5.3, 1300, None, None, 7 * 128 / 2, 128 / 2, 750)),
    ],
)
def test_figures_as_vendors_print_them(name, figures):
    gpu = find_gpu(name)
    for each, printed in zip(FIGURES, figures):
        assert getattr(gpu, each) == (None if printed is None else pytest.approx(printed, rel=0.003)), each


@pytest.mark.parametrize(("name", "fp16", "fp32"), [("T4", 65, 8.1), ("V100", 125, 15.7)])
def test_gpus_without_bf16_are_known_by_fp16_and_fp32(name, fp16, fp32):
    gpu = find_gpu(name)
    assert (gpu.bf16_tflops, gpu.fp16_tflops, gpu.fp32_tflops) == (None, fp16, fp32)
    assert not gpu.has_bf16
    assert gpu.multiplying("fp16").peak() == (fp16, f"{name} dense FP16")
    assert gpu.multiplying("bf16").peak() == gpu.multiplying("fp32").peak() == (fp32, f"{name} dense FP32")
    newer = find_gpu("H100")
    assert newer.multiplying("fp16") is newer


def test_eight_bits_are_twice_and_four_bits_are_more_where_both_are_known():
    for gpu in planner.GPUS.values():
        if gpu.fp8_tflops is not None and gpu.bf16_tflops is not None:
            assert gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=0.02), gpu.name
            assert gpu.multiplies("tensor"), gpu.name
        if gpu.fp4_tflops is not None and gpu.fp8_tflops is not None:
            assert gpu.fp4_tflops >= 2 * gpu.fp8_tflops
            assert gpu.multiplies("nv"), gpu.name


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_as_torch_gives_them(torch_name, name):
    assert find_gpu(torch_name).name == name


def test_a_near_namesake_is_not_taken_for_it():
    with refused(ValueError):
        find_gpu("NVIDIA A10G")


def test_a_processor_has_no_rates_but_says_whose_kernels_run():
    assert find_gpu("cpu") is find_gpu("CPU")
    assert find_gpu("cpu").device == "cpu"
    assert find_gpu("cpu").peak()[0] is None


def test_a_table_of_ones_own(table, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "name,aliases,memory_gib,bf16_tflops,watts,capability,source\n"
        'Mine,My GPU;M1,24,100.5,,9.0,"a bench, ours"\nYours,,,,300,,\n',
        encoding="utf-8",
    )
    mine, yours = load_hardware(path)
    assert mine == Gpu(
        "Mine", memory_gib=24, bf16_tflops=100.5, source="a bench, ours", aliases=("My GPU", "M1"), capability=(9, 0)
    )
    assert yours == Gpu("Yours", watts=300)
    assert find_gpu("my-gpu") is mine
    assert planner.plan(8e9, tokens=1e9, gpu="M1", mfu=0.5).time.rate_tflops == 50.25
    with refused(ValueError):
        load_hardware(str(path))
    assert load_hardware(path, replace=True)[0] is table["Mine"]


def test_the_shipped_table_is_one_that_a_user_could_load(table):
    text = files("surokit.hardware").joinpath("gpus.csv").read_text(encoding="utf-8")
    assert set(csv.DictReader(io.StringIO(text)).fieldnames or ()) == set(COLUMNS)
    assert {gpu.name: gpu for gpu in load_hardware(text, replace=True)} == table


@pytest.mark.parametrize(
    "text",
    [
        "gpu,bf16_tflops\nMine,1\n",
        "name,bf16\nMine,1\n",
        "name,watts,watts\nMine,1,1\n",
        "name,watts\nMine,many\n",
        "name,watts\nMine,-3\n",
        "name,watts\nMine,inf\n",
        "name,capability\nMine,nine\n",
        "name,watts\n,3\n",
        "name,watts\nMine,1,000\n",
        "name,watts\nMine,1\nmine,2\n",
        "name,aliases\nMine,H100 SXM\n",
        "name,watts\n",
    ],
)
def test_tables_that_cannot_be_read(table, text):
    before = dict(table)
    with refused(ValueError) as caught:
        load_hardware(text)
    assert "\n" not in str(caught.value)
    assert table == before


def test_no_table_there(tmp_path):
    with refused(FileNotFoundError):
        load_hardware(tmp_path / "none.csv")
    with refused(TypeError):
        load_hardware(3)  # type: ignore[arg-type]


REACHED = Ceilings("2026-11-22", bf16_tflops=700, fp8_tflops=1200, bandwidth_tb_s=2.9)


def test_a_processor_has_no_tensor_cores():
    cpu = Gpu("cpu: some", ceilings=Ceilings("now", bf16_tflops=0.2), device="cpu")
    assert not cpu.multiplies("tensor")
    assert cpu.peak() == (None, "cpu: some dense BF16")


@pytest.mark.parametrize("gpu", [*planner.GPUS.values(), dataclasses.replace(planner.GPUS["H100"], ceilings=REACHED)])
def test_json_there_and_back(gpu):
    assert Gpu.from_json(gpu.to_json()) == gpu


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"name": "x", "tflops": 3}', '{"name": "x", "watts": -1}', '{"name": "x", "capability": 9}'],
)
def test_json_that_is_no_gpu(text):
    with pytest.raises(ValueError, match="This is no GPU as Gpu.to_json") as caught:
        Gpu.from_json(text)
    assert "\n" not in str(caught.value)


def test_figures_that_cannot_be():
    with refused(ValueError):
        Gpu("Bad", host_gb_s=0)
    with refused(ValueError):
        Ceilings("now", launch_us=float("nan"))
    with refused(TypeError):
        Gpu("Bad", ceilings={"bf16_tflops": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"bf16_tflops": 100e12},
        {"bandwidth_tb_s": 1008},
        {"memory_gib": 24 * 2**30},
        {"peer_gb_s": 450e9},
    ],
)
def test_figures_in_another_unit(given):
    with refused(ValueError):
        Gpu("Mine", **given)
