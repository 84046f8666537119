"""Notebooks check what they say: what is exact is compared with what is stored, the rest asserts its claims.

Each code cell that shows something is one of these, by its tags:

    nbval-check-output   its output is exact on every machine: it is stored, and `pytest --nbval-lax notebooks` compares it
    (an assert)          it asserts what the text claims of it
    picture              it shows a picture or a live panel
    measured             it shows figures of the machine it runs on, of which nothing is claimed

Outputs are stored where they are compared, and nowhere else. `python -m tests.test_notebooks` runs the notebooks and stores
them anew; with names, as 01_quickstart, those.
"""

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

import surokit as sk
from surokit.headless import execute

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMPARED = "nbval-check-output"
TAGS = {COMPARED, "picture", "measured", "result"}


def code_cells(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            yield cell, set(cell.metadata.get("tags", ()))


def tree_of(cell):
    """A cell's Python, without magics: lines that begin with % and `await` at the top are a notebook's."""
    source = "\n".join("" if line.startswith("%") else line for line in cell.source.splitlines())
    return compile(source, "a cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def shows(cell):
    """Whether a cell shows something: it prints or displays, or ends in an expression whose value appears."""
    body = tree_of(cell).body
    calls = (node.func for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Call))
    said = any(isinstance(f, ast.Name) and f.id in ("print", "display") for f in calls)
    pictured = ".show()" in cell.source or ".live()" in cell.source or cell.source.startswith("%%surogate_profile")
    ends = bool(body) and isinstance(body[-1], ast.Expr) and not cell.source.rstrip().endswith(";")
    return said or pictured or ends


def asserts(cell):
    """Whether a cell can fail on a claim: an assert, or one of torch's or numpy's."""
    for node in ast.walk(tree_of(cell)):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr.startswith("assert_")):
            return True
    return False


def faults(path):
    """What a notebook does against the rule, a line each."""
    for n, (cell, tags) in enumerate(code_cells(path), 1):
        where = f"{path.name}, code cell {n} ({cell.source.splitlines()[0]})"
        if tags - TAGS:
            yield f"{where} has tags that mean nothing: {', '.join(tags - TAGS)}"
        if len(tags & {COMPARED, "picture", "measured"}) > 1:
            yield f"{where} is {' and '.join(sorted(tags))} at once"
        if bool(cell.outputs) != (COMPARED in tags):
            yield f"{where} {'stores an output that nobody compares' if cell.outputs else 'has no output to compare with'}"
        if (cell.execution_count is not None) != bool(cell.outputs):
            yield f"{where} is counted as run and has no output, or has one and is not"
        if shows(cell) and not (asserts(cell) or tags & {COMPARED, "picture", "measured"}):
            yield f"{where} shows something and checks nothing: assert the claim, or tag it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_checked(path):
    assert not list(faults(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_checks_more_than_that_it_runs(path):
    cells = list(code_cells(path))
    checked = sum(COMPARED in tags or asserts(cell) for cell, tags in cells)
    shown = sum(shows(cell) for cell, _ in cells)
    assert checked >= shown / 3, f"{checked} of {shown} cells that show something check it"


# -- that the comparison can fail


def nbval(path):
    """The exit status and the words of the check that `make test` does, of one notebook."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval-lax",
        str(path),
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def test_a_changed_number_in_a_stored_output_fails(tmp_path):
    """The plan of Llama 3's 405B as the quickstart stores it, and the same with one digit changed."""
    (cell,) = [cell for cell, tags in code_cells(NOTEBOOKS[0]) if COMPARED in tags and "405e9" in cell.source]
    cells = [new_code_cell("import surokit as sk"), cell]
    nbformat.write(new_notebook(cells=cells), tmp_path / "right.ipynb")
    text = (tmp_path / "right.ipynb").read_text(encoding="utf-8")
    assert "68.55" in text
    (tmp_path / "wrong.ipynb").write_text(text.replace("68.55", "68.56"), encoding="utf-8")
    status, said = nbval(tmp_path / "right.ipynb")
    assert status == 0, said
    status, said = nbval(tmp_path / "wrong.ipynb")
    assert status == 1
    assert "Cell outputs differ" in said


def test_the_rule_sees_what_breaks_it(tmp_path):
    def faults_of(source, tags=(), outputs=()):
        cell = new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})
        cell.execution_count = 1 if outputs else None
        nbformat.write(new_notebook(cells=[cell]), tmp_path / "nb.ipynb")
        return " ".join(faults(tmp_path / "nb.ipynb"))

    stored = [new_output("stream", text="1")]
    assert "checks nothing" in faults_of("x = 1\nx")
    assert "checks nothing" in faults_of("for x in (1, 2):\n    print(x)")
    assert "checks nothing" in faults_of("await session.run(3)")
    assert "nobody compares" in faults_of("x = 1", outputs=stored)
    assert "no output to compare" in faults_of("1", [COMPARED])
    assert "at once" in faults_of("1", [COMPARED, "picture"], stored)
    assert "mean nothing" in faults_of("x = 1", ["pictur"])
    for fine in ("x = 1", "x;", "assert x == 1\nx", "torch.testing.assert_close(x, y)"):
        assert not faults_of(fine)
    assert not faults_of("1", [COMPARED], stored)
    assert not faults_of("%%surogate_profile -o p\nstep()", ["picture"])


# -- the machine that the quickstart fits itself to


def quickstart(name):
    """The value of a name in the quickstart that is set to a literal."""
    for cell, _ in code_cells(NOTEBOOKS[0]):
        for node in ast.walk(tree_of(cell)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
    raise KeyError(name)


def seconds(size, slower):
    """What a step of three recipes takes on a server of two cores without bf16 instructions, or one that is `slower`.

    Measured there: 35 GFLOP/s in bfloat16, FP8 emulated at 1.28 and 1.47 times that time; and some ms for the operators' calls.
    """
    layers, width, batch, length = size
    parameters = layers * 12.25 * width**2 + 2048 * width
    return slower * (6 * parameters * batch * length / 35e9 + 0.004 * layers) * (1 + 1.28 + 1.47)


@pytest.mark.parametrize(
    ("slower", "name", "at_most_s"),
    [(20, "tiny", 70), (5, "tiny", 30), (1, "small", 30), (1 / 3, "medium", 30), (1 / 10, "large", 30)],
)
def test_the_quickstart_ends_in_time_on_slow_machines_and_does_more_on_fast_ones(slower, name, at_most_s):
    """It always trains 40 steps, for which one that is twenty times as slow needs a minute."""
    now = [0.0]

    class Session:
        def __init__(self, size):
            self.size = size

        def run(self, steps):
            now[0] += steps * seconds(self.size, slower)

    sizes = {name: size for name, size in quickstart("SIZES").items() if "GPU" not in name}
    fit = sk.fit_to_time(sizes, lambda size, steps: [Session(size)], seconds=30, clock=lambda: now[0])
    Session(fit.size).run(fit.steps)
    assert now[0] <= at_most_s
    assert fit.steps >= 40
    assert fit.name == name


def test_a_gpu_gets_a_model_worth_one():
    sizes = quickstart("SIZES")
    layers, width, *_ = list(sizes.values())[-1]
    assert layers * 12.25 * width**2 > 80e6
    work = [seconds(size, 1) for size in sizes.values()]
    assert work == sorted(work)


# -- stored outputs


def write_outputs(*names):
    """Run the notebooks of these names, or all, and store the outputs that are compared."""
    for path in [path for path in NOTEBOOKS if path.stem in names or not names]:
        with tempfile.TemporaryDirectory() as scratch:
            if execute(path, Path(scratch) / "run"):
                raise SystemExit(f"{path.name} failed: nothing of it was stored.")
            done = nbformat.read(Path(scratch) / "run" / path.name, as_version=4)
        take_outputs(path, done)


def take_outputs(path, done):
    """Store an executed notebook's compared outputs, as text, and no others."""
    nb = nbformat.read(path, as_version=4)
    for cell, run in zip(nb.cells, done.cells, strict=True):
        if cell.cell_type != "code":
            continue
        assert cell.source == run.source
        compared = COMPARED in cell.metadata.get("tags", ())
        # nbval asks for the count
        cell.outputs, cell.execution_count = (run.outputs, run.execution_count) if compared else ([], None)
    nbformat.write(nb, path)


if __name__ == "__main__":
    write_outputs(*sys.argv[1:])
