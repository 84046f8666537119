"""The house stays as drawn: who may import whom, what importing costs, names that do not collide."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import surokit as sk
from tests.refusals import refused

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "surokit"

# From the bottom up. A part may import itself, what stands on its line, and nothing else of ours.
MAY_IMPORT = {
    "formats": "",
    "errors": "",
    "places": "",
    "arguments": "",
    "units": "",
    "statistics": "",
    "tables": "",
    "texts": "",
    "hub": "",
    "torch_private": "",
    "ranks": "",
    "child_processes": "",
    "blocks": "",
    "endings": "",
    "hardware": "arguments formats",
    "runs": "ranks places",
    "quantizer": "formats",
    "fusion": "",
    "recipe": "formats quantizer",
    "applied": "fusion recipe",
    "kernels": "formats torch_private",
    "environment": "kernels tables",
    "headless": "environment places",
    "quantized": "formats quantizer kernels",
    "product": "formats quantizer quantized kernels",
    "nn": "quantizer quantized product fusion recipe kernels torch_private",
    "optim": "kernels torch_private",
    "data": "errors texts hub places",
    "prequantized": "formats quantizer quantized nn kernels",
    "layers": "recipe applied nn prequantized",
    "speed": "hardware recipe",
    "report": "recipe speed",
    "takeover": "quantizer quantized recipe nn prequantized layers report",
    "convert": "quantizer quantized product recipe applied nn prequantized layers speed report takeover arguments hardware places",
    "planner": "formats errors arguments units tables hardware quantizer fusion recipe applied hub",
    "calibration": "places environment kernels hardware torch_private",
    "accuracy": "quantizer quantized product recipe nn layers convert kernels places",
    "tuning": "accuracy layers convert nn hardware planner recipe tables units",
    "models": "formats fusion quantizer quantized recipe kernels nn prequantized layers convert errors hub places torch_private",
    "agreement": "accuracy layers models nn quantized places tables torch_private",
    "offload": "errors blocks endings kernels places units tables applied optim torch_private",
    "profiler": "environment errors units statistics tables kernels hardware calibration torch_private",
    "parallel": "errors blocks ranks formats quantizer quantized recipe applied kernels nn layers convert models optim hub places "
    "units tables torch_private",
    "train": "ranks blocks endings parallel recipe fusion applied nn kernels layers convert accuracy data models environment "
    "errors places units tables optim runs planner profiler torch_private",
    "widgets": "planner recipe runs tables units",
    "launching": "environment errors ranks runs places units tables widgets torch_private",
    "efficiency": "planner launching train profiler places tables units",
    "tasks": "nn train data statistics",
    "live": "train widgets runs environment",
    "racing": "train tasks profiler widgets models nn layers convert recipe fusion applied quantized quantizer environment places "
    "units statistics tables optim runs torch_private",
    "dissection": "applied calibration convert environment fusion hardware launching models offload optim parallel places planner "
    "profiler racing ranks recipe statistics tables train units",
    "serving": "child_processes environment places planner statistics tables units",
    "integrations": "live train profiler widgets offload optim runs",
    "cli": "*",
    "bench": "*",
    "__main__": "*",
}
# methods of a lower part that open a front end: the only imports that go up
HOOKS = {
    ("train", "widgets", "Session.live"),
    ("train", "integrations", "Session.to_deepspeed"),
    ("planner", "widgets", "Plan.explore"),
    ("tuning", "widgets", "Tuning.plot"),
    ("agreement", "widgets", "Parity.plot"),
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(module or name of surokit, the function that imports it or "") for every import of ours in a file, lazy ones too."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{within}.{child.name}".removeprefix(".")
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            found.extend((name, within) for name in names if name.startswith("surokit."))
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


@cache
def for_types_only(path: Path) -> set[str]:
    """What a file imports under `if TYPE_CHECKING`: a type checker's business, nothing that runs."""
    guards = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    inside = (child for guard in guards for child in ast.walk(guard) if isinstance(child, ast.ImportFrom))
    return {f"{node.module}.{alias.name}" for node in inside for alias in node.names}


def ring(arrows: dict[str, set[str]]) -> list[str]:
    """A way from a node back to itself, [] where there is none."""
    done: set[str] = set()

    def follow(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        done.add(node)
        return next((found for to in sorted(arrows.get(node, ())) if (found := follow(to, [*way, node]))), [])

    return next((found for node in sorted(arrows) if (found := follow(node, []))), [])


SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def part_in(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_drawing(path):
    part = part_of(path)
    allowed = MAY_IMPORT[part].split()
    for name, function in imports(path):
        imported = part_in(name)
        if imported != part and "*" not in allowed and (part, imported, function) not in HOOKS:
            on_top = name in for_types_only(path) and any(hook[:2] == (part, imported) for hook in HOOKS)
            assert imported in allowed or on_top, f"{part} may not import {imported}"


def test_a_part_imports_downwards_only():
    parts = list(MAY_IMPORT)
    for part, allowed in MAY_IMPORT.items():
        for below in allowed.replace("*", "").split():
            assert parts.index(below) < parts.index(part), f"{below} stands above {part}"


def test_no_parts_and_no_modules_import_each_other_in_a_ring():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
    parts: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    for module, path in modules.items():
        part, typing = part_of(path), for_types_only(path)
        for name, function in imports(path):
            if name in typing or (part, part_in(name), function) in HOOKS:
                continue
            target = name if name in modules else name.rpartition(".")[0]
            parts.setdefault(part, set()).update({part_in(name)} - {part})
            files.setdefault(module, set()).update({target} & modules.keys() - {module})
    assert not ring(parts)
    assert not ring(files)


def test_a_ring_is_found():
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}}) == ["b", "c", "b"]
    assert not ring({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_every_hook_is_there():
    found = {(part_of(p), part_in(name), function) for p in SOURCES for name, function in imports(p)}
    assert found >= HOOKS


def test_kernels_are_leaves():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert {part_in(name) for name, _ in imports(path)} <= {"formats", "torch_private", "kernels"}, path
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


def test_torch_loads_its_compiler_only_where_something_is_compiled():
    """It takes as long as the rest of torch: a command that plans, checks or converts would start a second later."""
    code = """
import sys, torch, surokit as sk, surokit.cli, surokit.train, surokit.planner, surokit.racing, surokit.profiler
model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48)).to(torch.bfloat16)
sk.apply(model, sk.FP8), sk.plan(model, batch=1, length=16), sk.doctor()
print('torch._dynamo' in sys.modules)
"""
    assert fresh(code) == "False"


def test_what_lies_on_the_host_is_made_there_whatever_the_default_device_is():
    """torch.set_default_device("cuda") would have pinned memory asked of the GPU, which refuses."""
    pinned = [
        line for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines() if "pin_memory=True)" in line
    ]
    assert len(pinned) > 4
    assert not [line for line in pinned if 'device="cpu"' not in line]
    code = """
import torch, surokit as sk
from surokit.train.session import Session
ids = torch.randint(64, (2, 16))
for optimizer in (sk.AdamW(lr=1e-3), sk.OffloadAdamW(lr=1e-3), sk.ZenFlow(lr=1e-3), sk.Muon(lr=1e-3)):
    model = sk.Decoder(sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48), device='cpu').to(torch.bfloat16)
    with torch.device('meta'):
        sk.apply(model, sk.FP8.lora(rank=2))
        session = Session(model, [{'input_ids': ids, 'labels': ids}], optimizer=optimizer)
        session.run(2)
    print(session.records[-1].loss > 0)
"""
    assert fresh(code).split() == ["True"] * 4


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
    with refused(AttributeError):
        getattr(sk, "nothing")  # noqa: B009


def test_recipes_and_module_exports_agree():
    assert sk.recipes["fp8"] is sk.FP8
    assert set(sk.recipes) >= {"bf16", "fp8", "fp8-current", "fp8-rowwise", "qfp8"}
