"""What the machine is said to be."""

import datetime
import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from surokit import kernels
from surokit.environment import cores, cpu_model, doctor, float32_precision, front_end
from surokit.kernels.ops import Serving
from surokit.recipe import recipes
from surokit.tables import html_table, text_table

# the package's function of the same name would hide the module
module: Any = importlib.import_module("surokit.environment")


def test_environment_is_plain_data():
    found = module.environment()
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] == cores() >= 1
    assert found["cpu"] == cpu_model() != ""
    assert datetime.datetime.fromisoformat(found["date"]).tzinfo is not None
    assert (found["device"] == "cpu") is not torch.cuda.is_available()
    keys = "surokit python torch triton cuda device cuda_capability cpu cpu_vectors cpu_bf16 cores platform date"
    assert list(found) == keys.split()


def test_how_bf16_is_multiplied_is_told(monkeypatch):
    monkeypatch.setattr(module, "gpu_and_capability", lambda: ("none", None))
    for yes, state in ((True, "float32"), (False, "native")):
        with kernels.converting(yes):
            assert module.doctor()["bf16"].state == state


def test_importing_it_loads_nothing():
    program = "import sys, surokit.environment; assert not {'torch', 'IPython', 'pandas', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def pretend_gpu(monkeypatch, major, minor, hip=None, cuda="13.0"):
    properties = types.SimpleNamespace(name="Pretend", total_memory=80 * 2**30, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(
        kernels, "serving", lambda function, device: Serving("cuda", function, "kernels/cuda/transpose")
    )


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 5), set()),
        ((8, 6), {"bf16"}),
        ((8, 9), {"bf16", "fp8"}),
        ((9, 0), {"bf16", "fp8", "fp8-block", "qfp8"}),
        ((10, 0), {"bf16", "fp8", "mxfp8", "fp4"}),
        ((12, 0), {"bf16", "fp8", "mxfp8", "fp4"}),
    ],
)
def test_formats_by_compute_capability(monkeypatch, capability, native):
    pretend_gpu(monkeypatch, *capability)
    found = doctor()
    assert {f.name for f in found.findings if f.state == "native"} == native
    assert [f.name for f in found.findings if f.group == "formats"] == [
        "bf16",
        "fp8",
        "fp8-block",
        "mxfp8",
        "fp4",
        "mxfp4",
    ]
    assert [f.name for f in found.findings if f.group == "storage"] == ["qfp8", "qfp4", "qnf4"]
    assert {found[name].state for name in ("qfp4", "qnf4")} == {"ok"}  # decoded: nothing to emulate
    assert found["gpu"].detail == f"Pretend, 80 GiB, 1 of 2, compute capability {capability[0]}.{capability[1]}"
    emulated = repr(found).rpartition("no faster: ")[2].rstrip(".").split(", ")
    assert emulated == [name for name in ("bf16", *module.PRODUCTS) if name not in native]


def test_a_gpu_older_than_the_kernels_is_told_and_serves(monkeypatch):
    """As the free T4 of a hosted notebook: no bf16, no kernel of ours, and everything runs all the same."""
    pretend_gpu(monkeypatch, 7, 5)
    found = doctor()
    assert (found["surokit's kernels"].state, found["bf16"].state) == ("missing", "emulated")
    assert "they start at compute capability 8.0; the definitions in PyTorch run instead" in repr(found)
    assert "A100, L4, RTX 30" in repr(found)
    assert "This GPU is too old for surokit's kernels" in repr(found)
    assert found.ok
    pretend_gpu(monkeypatch, 8, 0)
    assert doctor()["surokit's kernels"].state == "ok"
    assert "too old" not in repr(doctor())


def test_what_transposes_codes_is_told(monkeypatch):
    pretend_gpu(monkeypatch, 9, 0)
    line = doctor()["transposes of codes"]
    assert (line.state, line.detail) == ("ok", "kernels/cuda/transpose")
    why = "kernels/triton/transpose, since there is no CUDA compiler: install the CUDA toolkit (nvcc)"
    served = Serving("triton", print, why, "there is no CUDA compiler")
    monkeypatch.setattr(kernels, "serving", lambda function, device: served)
    found = doctor()
    assert (found["transposes of codes"].state, found["transposes of codes"].detail) == ("slower", why)
    assert why in repr(found)
    assert found.ok


def test_blocks_need_their_cuda(monkeypatch):
    pretend_gpu(monkeypatch, 9, 0, cuda="12.8")
    assert doctor()["fp8-block"].state == "emulated"
    assert doctor()["fp8-block"].detail == "native on compute capability 9.0, CUDA 12.9"


def test_the_doctors_formats_are_the_recipes():
    for name, kind in module.PRODUCTS.items():
        assert recipes[name].forward.kind == kind
    for name, kind in module.STORAGES.items():
        assert recipes[name].storage is not None
        assert recipes[name].natively().forward.kind == kind


def test_a_gpu_that_is_not_cudas(monkeypatch):
    pretend_gpu(monkeypatch, 9, 4, hip="6.2")
    found = doctor()
    assert "ROCm 6.2" in found["gpu"].detail
    assert found["fp8"].state == "emulated"


def test_without_a_gpu_low_precision_is_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor()
    assert found["fp8"].state == "emulated"
    assert "none" in found["gpu"].detail
    assert "Emulated here, right in its numbers and no faster: fp8, fp8-block, mxfp8, fp4, mxfp4." in repr(found)


def test_a_missing_package_comes_with_its_command(monkeypatch):
    real = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "jinja2" else real(name))
    found = doctor()
    assert found["jinja2"].state == "missing"
    assert "pip install jinja2" in repr(found)
    assert ">pip install jinja2</td>" in found._repr_html_()
    assert found.ok
    with pytest.raises(KeyError, match="no line 'abacus'"):
        found["abacus"]


def test_packages_beside_ours_are_named_where_they_are(monkeypatch):
    beside = ("transformers", "peft", "bitsandbytes")
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "installed_version", lambda name: "1.2.3")
    found = doctor()
    assert all(found[name].detail.startswith("1.2.3, for its") for name in beside)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if name == "torch" else None)
    assert not {f.name for f in doctor().findings} & set(beside)


@pytest.mark.parametrize(
    ("torch_version", "state"),
    [
        ("2.10.1", "untried"),
        ("2.11.0+cu128", "ok"),
        ("2.13.9", "ok"),
        ("2.14.0a0+git1234", "untried"),
        ("3.0.0", "untried"),
    ],
)
def test_a_torch_that_was_not_tried_is_named(torch_version: str, state: str, monkeypatch):
    real = module.installed_version
    monkeypatch.setattr(module, "installed_version", lambda name: torch_version if name == "torch" else real(name))
    found = doctor()
    assert found["torch"].state == state
    assert found.ok
    tried = f"{torch_version}; tried with torch 2.11 and 2.13"
    assert found["torch"].detail == (torch_version if state == "ok" else tried)
    assert bool(found["torch"].remedy) == (state == "untried")


@pytest.mark.parametrize("package", module.TRIED)
def test_what_was_tried_is_what_is_asked_for_and_pinned(package: str):
    """The oldest is pyproject.toml's lower bound (`make test-oldest`), the newest the pin of all other tests."""
    root = Path(__file__).parents[1]
    asked = re.search(rf'"{package}>=([\d.]+)["; ]', (root / "pyproject.toml").read_text(encoding="utf-8"))
    pinned = re.search(rf"^{package}==(\d+\.\d+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert asked is not None
    assert pinned is not None
    assert module.TRIED[package] == (asked[1], pinned[1])


def test_without_torch_there_are_no_formats(monkeypatch):
    real = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "torch" else real(name))
    assert not [f for f in doctor().findings if f.group in ("formats", "storage")]


def test_what_training_needs_is_not_optional(monkeypatch):
    real = module.installed_version
    monkeypatch.setattr(
        module, "installed_version", lambda name: None if name in ("safetensors", "triton") else real(name)
    )
    found = doctor()
    assert not found.ok
    assert found["safetensors"].remedy == "pip install safetensors"
    assert "the reference kernels run instead" in found["triton"].detail
    assert "the remedy stands beside it" in repr(found)


def test_disk(monkeypatch, tmp_path):
    assert str(tmp_path) in doctor(tmp_path / "not" / "yet")["free space"].detail
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=2**30))
    assert doctor()["free space"].state == "low"


def test_front_ends(monkeypatch):
    def pretend(**shell):
        ipython: Any = types.ModuleType("IPython")
        ipython.get_ipython = lambda: types.SimpleNamespace(**shell) if shell else None
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        return front_end()

    assert pretend() == "terminal"
    assert pretend(user_ns={}) == "IPython"
    assert pretend(user_ns={}, kernel=object()) == "Jupyter"
    assert pretend(user_ns={"__vsc_ipynb_file__": "a.ipynb"}, kernel=object()) == "VS Code"
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    assert front_end() == "Colab"
    monkeypatch.delitem(sys.modules, "google.colab")
    monkeypatch.delitem(sys.modules, "IPython")
    assert front_end() == "terminal"
    monkeypatch.setitem(sys.modules, "marimo", types.ModuleType("marimo"))
    assert front_end() == "marimo"


def pretend_processor(monkeypatch, percent, mine=range(4), physical=4):
    """A processor with a share of each core in use; this process may use some of them."""
    monkeypatch.setattr("psutil.cpu_percent", lambda interval, percpu: list(percent))
    monkeypatch.setattr("psutil.cpu_count", lambda logical: physical)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(mine), raising=False)


@pytest.mark.parametrize(
    ("percent", "mine", "physical", "in_use", "threads"),
    [
        ((0, 0, 0, 0), range(4), 4, 0.0, None),
        ((90, 0, 5, 0), range(4), 4, 0.95, None),
        ((100, 0, 10, 0), range(4), 4, 1.1, 3),
        ((100, 0, 10, 0), range(4), 2, 1.1, 2),
        ((100, 0, 10, 0), range(4), None, 1.1, 3),
        ((100, 90, 100, 100), range(4), 4, 3.9, 1),
        ((100, 100, 0, 0), (2, 3), 4, 0.0, None),
        ((100, 0), (1, 7), 4, 0.0, None),
        ((0, 0, 60, 100), (2, 3), 4, 1.6, 1),
    ],
)
def test_threads_that_find_a_free_core(monkeypatch, percent, mine, physical, in_use, threads):
    pretend_processor(monkeypatch, percent, mine, physical)
    assert module.cores_in_use() == pytest.approx(in_use)
    assert module.spare_threads() == threads
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module.spare_threads() is None


def test_a_busy_processor_is_told(monkeypatch):
    pretend_processor(monkeypatch, (20, 0, 0, 70))
    assert doctor()["cpu"].state == "ok"
    pretend_processor(monkeypatch, (100, 100, 0, 40))
    cpu = doctor()["cpu"]
    assert cpu.state == "busy"
    assert cpu.detail.endswith("4 cores, of which 2.4 are in use")
    assert "OMP_NUM_THREADS=1" in cpu.remedy
    assert "OMP_WAIT_POLICY=passive" in cpu.remedy


def test_tables():
    assert text_table([("a", "1"), ("bb", "22")], header=("x", "y"), right=(1,)) == "  x    y\n  a    1\n  bb  22"
    assert text_table([]) == ""
    indented = html_table([("  part", "1")])
    assert '<td style="text-align:left;padding:0 .6em 0 1.6em">part</td>' in indented
    html = html_table([("group",), ("<a>", "1")], header=("x", "y"), title="t & t")
    assert "&lt;a&gt;" in html
    assert "t &amp; t" in html
    assert '<th colspan="2"' in html


def test_float32_precision_survives_torchs_new_switch():
    before = torch.backends.cuda.matmul.fp32_precision
    assert float32_precision() == torch.get_float32_matmul_precision() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert float32_precision() == "high"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert float32_precision() == "highest"
