"""What is given away: the wheel, built from the tree, installed beside nothing of the tree, and tried; and how to cite it.

The tests' own interpreter has the package from its folder, so a file that the wheel lacks would never be missed there.
"""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import surokit as sk

ROOT = Path(__file__).parents[1]
FOLDERS = ("surokit", "kernels", "notebooks")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in a copy of the tree without what a build leaves behind."""
    tree = tmp_path_factory.mktemp("tree")
    left_behind = ["__pycache__", ".ipynb_checkpoints", "*.egg-info"]
    of_notebooks = ["checkpoint", "adapter", "runs"]  # what they write; surokit has a package called runs
    for folder in FOLDERS:
        ignored = left_behind + of_notebooks * (folder == "notebooks")
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns(*ignored))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        "dist",
        ".",
        cwd=tree,
    )
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a fresh environment with the wheel, which sees the packages of this one but not the tree."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, symlinks=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # a line of a .pth file adds a folder and no .pth file that lies there, so not the tree's own
    others = [path for path in sys.path if path.rstrip("/").endswith("site-packages")]
    (Path(own) / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    )
    return python


def run(*command, cwd=None):
    """What a command prints; its complaint where it fails. It runs outside of the tree."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd or Path(sys.prefix), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_that_is_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "surokit").rglob("*.py")}
    data = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "surokit").rglob("*")
        if path.suffix in (".csv", ".json", ".txt", ".js", ".css") or path.name == "py.typed"
    }
    kernels = {
        f"surokit/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "kernels").rglob("*") if p.suffix in (".py", ".cu")
    }
    notebooks = {f"surokit/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(data) > 5
    assert len(notebooks) > 5
    wanted = sources | data | kernels | notebooks
    assert wanted <= names, wanted - names
    assert {name.split("/")[0] for name in names} == {"surokit", f"surokit-{sk.__version__}.dist-info"}
    assert f"surokit-{sk.__version__}.dist-info/licenses/LICENSE" in names


TRAINS = """
import sys
from pathlib import Path
import torch, surokit as sk, surokit.kernels.reference
from surokit import texts
assert "site-packages" in sk.__file__ and Path(sys.prefix) in Path(sk.__file__).parents, sk.__file__
if sys.platform == "linux":
    import surokit.kernels.triton.quantize
tokenizer = sk.train_tokenizer([texts.SHAKESPEARE], vocab_size=300)
data = sk.text(texts.SHAKESPEARE, tokenizer, length=16, batch=2)
model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=300, ffn=48), dtype=torch.bfloat16)
session = sk.Session(model, data, recipe=sk.FP8, optimizer=sk.AdamW(lr=1e-3))
before = model.lm_head.weight.clone()
session.run(1)
assert not torch.equal(before, model.lm_head.weight)
session.live(view="widget")  # reads the page's script and style
sk.plan(8e9, gpu="H100")  # reads the table of GPUs
print("loss", session.records[-1].loss)
"""


def test_it_imports_and_trains_where_the_tree_is_not(installed):
    assert "loss" in run(installed, "-W", "error::RuntimeWarning", "-c", TRAINS)  # a panel that cannot be drawn warns


def test_its_command_is_there(installed):
    command = installed.with_name("surokit")
    said = run(command, "doctor")
    assert "surokit doctor" in said
    assert "Ready." in said
    assert sk.__version__ in run(command, "--version")
    assert "68.55 days" in run(
        command,
        *["plan", "405e9", "--tokens", "15.6e12", "--gpus", "16000", "--gpu", "H100", "--tflops-per-gpu", "400"],
    )


def test_the_citation_is_valid_and_of_this_version():
    """The keys that version 1.2.0 of the Citation File Format requires and those that it knows, with their types."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required: dict[str, Any] = {"cff-version": str, "message": str, "title": str, "authors": list}
    words = "abstract type version license repository-code url doi date-released"
    known = required | dict.fromkeys(words.split(), str) | {"keywords": list, "identifiers": list, "references": list}
    assert required.keys() <= cited.keys() <= known.keys()
    for key, value in cited.items():
        assert isinstance(value, known[key]), key
        assert value, key
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] in ("software", "dataset")
    assert all(
        {"name"} <= author.keys() or {"family-names", "given-names"} <= author.keys() for author in cited["authors"]
    )
    assert len(set(cited["keywords"])) == len(cited["keywords"])
    assert cited["title"] == SETUP["project"]["name"]
    assert cited["version"] == SETUP["project"]["version"] == sk.__version__
    assert cited["license"] == SETUP["project"]["license"]
