"""The benchmark of the kernels: every operation is in it, each result is checked first, and ratios and gates are what they say.

The kernels run here as in tests/kernels: in Triton's interpreter on a machine without CUDA, on the device where there is one.
"""

import json
import math

import pytest
import torch

from surokit.bench import kernels, result
from surokit.bench.__main__ import main
from surokit.kernels.ops import OPERATIONS
from tests.kernels.interpreter import DEVICE, correct

correct()


def test_every_operation_is_timed_and_right():
    found = list(kernels.operations((34, 160), DEVICE))
    assert {k.op for k in found if k.op} == set(OPERATIONS)
    assert len({k.name for k in found}) == len(found)
    for kernel in found:
        assert kernel.wrong() <= kernel.allowed, kernel.name
        assert kernel.nbytes or kernel.flops
        assert kernel.against in {k.name for k in found} | {""}


def test_every_fused_kernel_is_right():
    found = list(kernels.fused((18, 128), DEVICE))
    assert len({k.name for k in found}) == len(found)
    for kernel in found:
        assert kernel.wrong() <= kernel.allowed, kernel.name
        assert kernel.against in {k.name for k in found} | {kernels.COPY, ""}


def test_an_optimizer_that_does_nothing_is_found():
    """Parameters move little in a step; the moments are compared too."""
    from surokit.kernels.triton import adamw, adamw8bit

    for module, name in ((adamw, "adamw_"), (adamw8bit, "adamw8bit_")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, lambda *lists, **options: None)
            found = {k.name: k for k in kernels.fused((18, 128), DEVICE)}[name.rstrip("_")]
            assert found.wrong() > found.allowed


def test_every_product_is_right():
    found = list(kernels.products([(16, 256, 48)], DEVICE, emulated=True))
    assert {k.name for k in found if k.against} == {
        f"{name}{how} 16 x 256 x 48"
        for name in ("FP8 per tensor", "FP8 per row", "FP8 blocks", "MXFP8", "NVFP4")
        for how in ("", " with quantization")
    }
    for kernel in found:
        assert kernel.wrong() <= kernel.allowed, kernel.name


def test_without_tensor_cores_no_product_is_timed():
    assert [k.name for k in kernels.products([(4, 16, 8)], torch.device("cpu"))] == ["bf16 4 x 16 x 8"]


def test_the_gate_of_products_is_hoppers_at_the_cube(monkeypatch):
    monkeypatch.setattr(kernels, "_gaussian", lambda *shape, **_: torch.zeros(shape, dtype=torch.bfloat16)[:8, :8])
    found = kernels.products([(4096, 4096, 4096), (64, 64, 64)], torch.device("cpu"), hopper=True, emulated=True)
    assert [k.name for k in found if k.gate] == ["FP8 per tensor with quantization 4096 x 4096 x 4096"]


def test_a_wrong_kernel_gets_no_speed():
    x = torch.ones(4, 4)
    one_off = x.clone()
    one_off[0, 0] = 2

    def broken():
        raise RuntimeError("no memory\nand much more")

    right = kernels.Kernel("right", lambda: x, kernels.bits(lambda: x, lambda: x.clone()), against="copy", nbytes=1.0)
    wrong = kernels.Kernel("wrong", lambda: x, kernels.bits(lambda: one_off, lambda: x), against="copy", gate=0.8)
    fails = kernels.Kernel("fails", broken, against="copy")
    rows = kernels.measured([right, wrong, fails], 3, torch.device("cpu"))
    assert [r["right"] for r in rows] == [True, False, False]
    assert [len(r["seconds"]) for r in rows] == [3, 0, 0]
    data = kernels.result("made up", {}, rows, [])
    text = kernels.table(data)
    assert "| wrong |  |  | differs from the reference by 0.031 | torch |" in text
    assert "| fails |  |  | RuntimeError: no memory | torch |" in text
    assert "nan, missed" in text


def test_a_kernel_that_fails_while_it_is_timed_costs_no_other_its_speed():
    calls = []

    def fails():
        calls.append(1)
        if len(calls) > 4:  # looked at once, warmed up twice, timed once
            raise RuntimeError("an illegal memory access\nand more")
        return torch.ones(1)

    both = [kernels.Kernel("fails", fails, nbytes=1.0), kernels.Kernel("works", lambda: torch.ones(1), nbytes=1.0)]
    first, second = kernels.measured(both, 3, DEVICE)
    assert first["failed"] == "RuntimeError: an illegal memory access"
    assert (len(first["seconds"]), len(second["seconds"])) == (1, 3)
    assert len(calls) == 5
    text = kernels.table(kernels.result("kernels", {}, [first, second], []))
    assert "| torch, until RuntimeError: an illegal memory access |" in text


def test_how_far_results_are_apart():
    x = torch.randn(5, 7).to(torch.float8_e4m3fn)
    assert kernels.bits(lambda: (x, [x]), lambda: [x, (x,)])() == 0
    assert kernels.bits(lambda: x, lambda: x.float())() == math.inf
    assert kernels.bits(lambda: x[:1], lambda: x)() == math.inf
    assert kernels.bits(tuple, tuple)() == math.inf  # nothing compared is nothing known
    y = torch.ones(4)
    assert kernels.relative(lambda: 1.5 * y, lambda: y)() == pytest.approx(0.5)
    assert kernels.relative(lambda: y / 0 - y / 0, lambda: y)() == math.inf
    with pytest.raises(ValueError, match="zip"):
        kernels.bits(lambda: (x, x), lambda: x)()


@pytest.fixture
def data():
    def row(name, seconds, **more):
        empty = {
            "backend": "triton",
            "bytes": 0.0,
            "flops": 0.0,
            "against": "",
            "gate": 0.0,
            "error": 0.0,
            "right": True,
        }
        return {**empty, "name": name, "seconds": seconds, **more}

    rows = [
        row("copy", [1e-3, 1e-3, 2e-3], bytes=2e9),
        row("quantize", [1e-3, 2e-3, 2e-3], bytes=1.8e9, against="copy", gate=0.8),
        row("bf16 cube", [1e-3, 1e-3, 1e-3], flops=1e12),
        row("FP8 cube", [5e-4, 1e-3, 8e-4], flops=1e12, against="bf16 cube", gate=1.25),
        row("torchao FP8", [1e-3, 1e-3, 1e-3], bytes=1e9),
        row("FP8", [2e-3, 1e-3, 1.6e-3], bytes=1e9, against="torchao FP8", gate=1.5),
    ]
    return kernels.result("made up", {"x": "4 x 4"}, rows, ["A note."])


def test_ratios_are_taken_round_by_round(data):
    rows = {row["name"]: row for row in data["kernels"]}
    assert kernels.ratios(data, rows["quantize"]) == pytest.approx([0.9, 0.45, 0.9])
    assert kernels.ratios(data, rows["FP8 cube"]) == pytest.approx([2.0, 1.0, 1.25])
    assert kernels.ratios(data, rows["FP8"]) == pytest.approx([2.0, 1.0, 1.6])  # of the time: less is better
    assert kernels.ratios(data, rows["copy"]) == []


def test_gates_say_what_they_ask_and_whether_it_holds(data):
    assert kernels.gates(data) == [
        ("quantize: at least 80% of a copy's bandwidth: 0.90", True),
        ("FP8 cube: at least 1.25 x bfloat16: 1.25", True),
        ("FP8: at most 1.5 x torchao's time: 1.60", False),
    ]


def test_the_table_and_the_page_made_of_it(data, tmp_path):
    text = kernels.table(data)
    assert "| quantize | 2 (1 to 2) | 900 GB/s | 0.90 of a copy (0.45 to 0.90) | triton |" in text
    assert "| FP8 cube | 0.8 (0.5 to 1) | 1,250 TFLOPS | 1.25 x bf16 (1.00 to 2.00) | triton |" in text
    assert "| FP8 | 1.6 (1 to 2) | 625 GB/s | 1.60 x torchao's time (1.00 to 2.00) | triton |" in text
    assert f"torch {data['environment']['torch']}" in text
    assert text.endswith("- FP8: at most 1.5 x torchao's time: 1.60, missed\n\nA note.")
    result.write(data, tmp_path / "x.json")
    page = result.filled("<!-- table: x.json -->\n<!-- end of table -->\n", tmp_path)
    assert kernels.table(json.loads((tmp_path / "x.json").read_text())) in page


def test_the_command(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert (
        main(["kernels", "--rounds", "2", "--shape", "64", "128", "--only", "FP8 per tensor", "--out", str(out)]) == 0
    )
    data = json.loads(out.read_text())
    assert data["kernels"], data
    assert all(row["right"] and len(row["seconds"]) == 2 for row in data["kernels"])
    assert "FP8 per tensor" in capsys.readouterr().out
    assert main(["kernels", "--only", "nonsense"]) == 2
    assert "No kernel has 'nonsense' in its name" in capsys.readouterr().err
