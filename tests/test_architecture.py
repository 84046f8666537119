"""The house stays as drawn: who may import whom, what importing costs, names that do not collide."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import surokit as sk

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "surokit"

# a part may import itself, what stands on its line, and nothing else of ours
MAY_IMPORT = {
    "formats": "",
    "errors": "",
    "places": "",
    "environment": "kernels tables",
    "kernels": "formats",
    "quantizer": "formats",
    "quantized": "formats quantizer kernels",
    "product": "formats quantizer quantized kernels",
    "recipe": "formats quantizer",
    "nn": "quantizer quantized product recipe kernels",
    "convert": "quantizer product recipe nn places planner",
    "accuracy": "quantizer quantized product recipe nn convert kernels places",
    "tuning": "accuracy convert planner recipe tables widgets",
    "models": "formats quantizer quantized recipe kernels nn convert errors hub places",
    "texts": "",
    "tables": "",
    "hub": "",
    "headless": "environment places",
    "data": "errors texts hub places",
    "planner": "formats errors tables recipe hub widgets convert models",
    "calibration": "environment kernels planner",
    "profiler": "environment errors tables kernels planner calibration",
    "train": "recipe nn kernels convert accuracy data models environment errors places widgets tables planner profiler offload",
    "offload": "errors kernels places tables train",
    "racing": "train profiler widgets models nn convert recipe quantized quantizer environment places tables",
    "live": "train widgets environment",
    "widgets": "train planner recipe tables",
    "integrations": "live train widgets",
    "bench": "*",
    "cli": "*",
}
# found at run time only, inside the one function that needs it
LAZY_ONLY = {
    ("train", "widgets"),
    ("tuning", "widgets"),
    ("train", "planner"),
    ("planner", "recipe"),
    ("planner", "hub"),
    ("planner", "widgets"),
    ("planner", "convert"),
    ("planner", "models"),
    ("widgets", "recipe"),
    ("convert", "planner"),
    ("profiler", "planner"),
    ("profiler", "calibration"),
    ("train", "profiler"),
    ("train", "offload"),
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(part of surokit, whether at module level) for every import of ours in a file."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "surokit" else [node.module]
            )
        for name in names:
            parts = name.split(".")
            if parts[0] == "surokit" and len(parts) > 1:
                found.append((parts[1], id(node) in top))
    return found


SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_drawing(path):
    part = part_of(path)
    allowed = MAY_IMPORT[part].split()
    for imported, at_top in imports(path):
        if imported == part or "*" in allowed:
            continue
        assert imported in allowed, f"{part} may not import {imported}"
        assert not (at_top and (part, imported) in LAZY_ONLY), f"{part} imports {imported} only where it needs it"


def test_kernels_are_leaves():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert {part for part, _ in imports(path)} <= {"formats", "kernels"}, path
        text = path.read_text(encoding="utf-8")
        # siblings in kernels/, never the door
        assert set(re.findall(r"surokit\.kernels\b(?:\.\w+)?", text)) <= {"surokit.kernels.reference"}, path


def test_only_the_leaves_know_a_notebook():
    for path in SOURCES:
        if part_of(path) in ("widgets", "cli") or path.name == "magic.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # module level
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] in ("IPython", "ipywidgets", "anywidget") for n in names), path


def fresh(code: str) -> str:
    """Output of `code` in an interpreter of its own, started in the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_importing_loads_neither_torch_nor_notebook_nor_tables():
    loaded = fresh("import surokit, sys; print(*sorted(m.split('.')[0] for m in sys.modules))").split()
    assert not {"torch", "pandas", "ipywidgets", "IPython", "matplotlib", "datasets", "transformers"} & set(loaded)


def test_training_needs_torch_numpy_and_safetensors_only():
    code = """
import sys
for name in ('pandas', 'matplotlib', 'datasets', 'tokenizers', 'IPython', 'ipywidgets', 'transformers', 'jinja2'):
    sys.modules[name] = None
import torch, surokit as sk
torch.manual_seed(0)
model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)).to(torch.bfloat16)
ids = torch.randint(64, (2, 16))
session = sk.Session(model, [{'input_ids': ids, 'labels': ids}], optimizer=sk.AdamW(lr=1e-3), recipe=sk.FP8)
session.run(2)
print(len(session.records))
"""
    assert fresh(code) == "2"


def test_hugging_faces_kernels_is_not_shadowed():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    out = fresh("import kernels, surokit.kernels.reference as r; print(hasattr(kernels, 'get_kernel'), r.__file__)")
    flag, path = out.split(maxsplit=1)
    assert flag == "True"
    assert Path(path) == ROOT / "kernels" / "reference" / "__init__.py"


def test_pyproject_lists_every_package():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    ours = {"surokit"} | {".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")}
    leaves = {f"surokit.kernels.{p.parent.name}" for p in (ROOT / "kernels").glob("*/__init__.py")}
    assert set(setup["packages"]) == ours | leaves | {"surokit.notebooks"}
    for name in leaves:
        assert setup["package-dir"][name] == f"kernels/{name.rsplit('.', 1)[1]}"


def test_no_public_callable_shares_a_modules_name():
    modules = {p.stem if p.suffix else p.name for p in PACKAGE.iterdir() if not p.name.startswith("_")}
    assert not modules & set(sk._NAMES)


def test_names_mean_the_same_in_every_import_order():
    """Each order in a process of its own, forked from one that has imported torch, its compiler and nothing of ours."""
    orders = ["surokit.profiler", "surokit.planner", "surokit.data", "surokit.convert"]
    code = f"""
import os, torch._dynamo, torch._inductor.config, triton
for first in {orders}:
    if not os.fork():
        __import__(first)
        import surokit as sk
        print(first, callable(sk.profile), callable(sk.plan), callable(sk.text), callable(sk.apply))
        break
    os.wait()
"""
    assert fresh(code).splitlines() == [f"{first} True True True True" for first in orders]


def test_every_public_name_resolves_and_is_typed():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    typed = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "typing":
            typed.update({alias.asname or alias.name: node.module for alias in node.names})
    assert {name: module for name, module in typed.items() if name in sk._NAMES} == sk._NAMES
    for name in sk._NAMES:
        assert getattr(sk, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(sk, "nothing")  # noqa: B009


def test_recipes_and_module_exports_agree():
    assert sk.recipes["fp8"] is sk.FP8
    assert set(sk.recipes) >= {"bf16", "fp8", "fp8-current", "fp8-rowwise", "qfp8"}
