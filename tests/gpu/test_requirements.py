"""What the GPU suite may import, torch, triton, numpy, safetensors, pytest and what these bring, and whether it compares every
operation. No GPU is needed to know it."""

import os
import subprocess
import sys
from pathlib import Path

from surokit.bench import hour
from surokit.kernels.ops import OPERATIONS
from tests.gpu.test_triton import compared

ROOT = Path(__file__).parents[2]

# collects the suite in a process where the other packages of this environment cannot be imported
COLLECT = """
import importlib.metadata as metadata, re, sys
from importlib.machinery import PathFinder

def closure(names):
    found, open_ = set(), list(names)
    while open_:
        name = re.sub(r"[-_.]+", "-", open_.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        open_ += [re.match(r"[A-Za-z0-9._-]+", need)[0] for need in needs if "extra ==" not in need]
    return found

allowed = closure(["torch", "triton", "numpy", "safetensors", "pytest", "pip", "setuptools"]) | {"surokit"}
packages = metadata.packages_distributions()
hidden = {
    module for module, owners in packages.items() if not {re.sub(r"[-_.]+", "-", o).lower() for o in owners} & allowed
}
hidden -= {"ml_dtypes"}  # for Triton's interpreter, which stands in where there is no GPU

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

assert not {"torch", "triton", "numpy", "safetensors", "pytest"} & hidden
if "hypothesis" in packages:
    assert "hypothesis" in hidden
sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
import pytest
sys.exit(pytest.main([*sys.argv[1:], "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_every_operation_is_compared():
    assert compared() == set(OPERATIONS)


def test_the_suite_needs_no_other_package():
    make = ["make", "-n", "test-gpu", "GPU_PY=python3"]  # says what it would run
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = said.partition("--only ")[2].split()
    files = [
        str(ROOT / word) for step in hour.test_steps() if step.name in named for word in step.command if ".py" in word
    ]
    folders = ("gpu/", "kernels/test_triton_")
    marked = [path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    elsewhere = {str(path) for path in marked if not str(path.relative_to(ROOT / "tests")).startswith(folders)}
    assert elsewhere
    assert elsewhere <= set(files)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *files], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("test_triton.py", "test_triton_quantize.py", *(Path(path).name for path in elsewhere)):
        assert name in done.stdout
