"""The tests' own rules: no test sleeps or compares measured times, but where that is meant; and how cases are sampled.

A test that waits for a time fails on a machine that is busy, and one that is fast there says little elsewhere. So a test waits
until something holds (`tests.clocks.until`), and time is a clock of its own (`tests.clocks.Clock`). Seconds are compared in
benchmarks.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sampling import sample

TESTS = Path(__file__).parent

MEANT = {
    "clocks.py::until": "the one loop that looks again and again; its patience ends a test that fails",
    "clocks.py::until_async": "the same, awaited",
    "test_tests.py::test_what_is_found": "examples of what is found",
    # what must hang or sleep until another ends it
    "bench/test_gpu.py::test_what_a_process_cannot_do_is_one_sentence": "a process that takes too long, and is ended",
    "test_cli.py::test_an_interrupt_keeps_what_ran": "a cell that must be interrupted",
    "train/test_interrupts.py::TestProcess.test_a_second_interrupt": "a step that must be interrupted",
    "offload/killed.py::killed": "a kill comes at a random moment, and nothing is asserted of when",
    "train/killed.py::main": "the same",
    # where the profiler's subject is time that a host spends: it is at least so much, on a busy machine too
    "profiler/test_capture.py::busy_python": "host work whose line is to be found",
    "profiler/test_foreign.py::slow_data": "a sleep whose line is to be found",
    "profiler/test_gpu.py::busy_wait": "host work beside a GPU's idle time, which needs a GPU",
    "profiler/test_gpu.py::test_a_sleep_is_host_wait.wait": "a sleep beside a GPU's idle time, which needs a GPU",
    "profiler/test_monitor.py::test_every_level_on_a_gpu": "a GPU's idle time, which needs a GPU",
    # where growth or speed is the subject
    "profiler/test_timeline.py::test_many_events_in_bounded_time_and_memory": "the processor's time, in sorts of the same data",
    "profiler/test_causes.py::test_time_grows_in_proportion_to_the_events": "the processor's time, far from a square's growth",
    "planner/test_offload.py::test_a_steps_time_on_an_emulated_device": "a device that sleeps; only asked for",
    "planner/test_offload.py::test_a_steps_time_on_an_emulated_device.update_slowly": "its host",
    "browser/front_ends.py::<module>": "no test: the pace of redraws of a measurement",
    "browser/front_ends.py::measure": "no test: a tab comes to rest before it is measured",
}

PRIVATE = re.compile(r"_[A-Za-z]\w*")
FOREIGN = {  # of Python, torch and IPython, though something of ours is called the same
    "_replace",
    "_schema",
    "_base",
    "_forward_hooks",
    "_repr_html_",
    "_repr_mimebundle_",
    "_ipython_display_",
    "_reply_subshell_for",
}
# how often tests use private names of ours, by file: lower it where you can; there's no reason to raise one
PRIVATE_USES: dict[str, int] = {
    "bench/test_cpu.py": 2,
    "bench/test_gpu.py": 6,
    "bench/test_kernels.py": 1,
    "bench/test_peers.py": 2,
    "bench/test_predicted.py": 1,
    "data/test_batches.py": 4,
    "data/test_data.py": 2,
    "data/test_sources.py": 1,
    "gpu/test_offload.py": 4,
    "kernels/test_matmul.py": 8,
    "kernels/test_native.py": 2,
    "kernels/test_norm.py": 1,
    "kernels/test_nvfp4.py": 4,
    "kernels/test_transpose.py": 3,
    "kernels/test_triton_nvfp4.py": 3,
    "nn/test_adapter_storage.py": 1,
    "nn/test_attention.py": 10,
    "nn/test_delayed.py": 2,
    "nn/test_weight_cache.py": 3,
    "nn/test_pieces.py": 1,
    "nn/test_stages.py": 1,
    "offload/runs.py": 4,
    "offload/test_counters.py": 1,
    "offload/test_activations.py": 10,
    "offload/test_adamw.py": 14,
    "offload/test_columns.py": 1,
    "offload/test_link.py": 5,
    "offload/test_report.py": 1,
    "offload/test_rows.py": 1,
    "offload/test_workers.py": 6,
    "offload/test_written.py": 1,
    "offload/test_zenflow.py": 4,
    "optim/test_adamw8bit.py": 1,
    "planner/test_catalogue.py": 1,
    "planner/test_fused.py": 2,
    "planner/test_offload.py": 5,
    "planner/test_picture.py": 1,
    "planner/test_questions.py": 1,
    "planner/test_scaling.py": 1,
    "planner/test_streaming.py": 2,
    "profiler/test_capture.py": 8,
    "profiler/test_causes.py": 2,
    "profiler/test_foreign.py": 2,
    "profiler/test_gpu.py": 1,
    "profiler/test_light.py": 1,
    "profiler/test_monitor.py": 12,
    "profiler/test_picture.py": 2,
    "profiler/test_report.py": 9,
    "racing/conftest.py": 1,
    "racing/test_race.py": 2,
    "racing/test_threads.py": 1,
    "runs/test_health.py": 3,
    "test_architecture.py": 4,
    "test_docs.py": 1,
    "test_environment.py": 2,
    "test_live.py": 1,
    "train/test_background.py": 1,
    "train/test_capture.py": 7,
    "train/test_capture_noise.py": 8,
    "train/test_checkpoint.py": 2,
    "train/test_compiling.py": 1,
    "train/test_control.py": 4,
    "train/test_meters.py": 1,
    "train/test_random_state.py": 4,
    "train/test_run_status.py": 1,
    "train/test_summary.py": 1,
    "train/toys.py": 1,
    "widgets/test_follow.py": 1,
    "widgets/test_panel.py": 4,
    "widgets/test_planning.py": 1,
    "widgets/test_session.py": 1,
    "widgets/test_state.py": 3,
}

CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "time", "time_ns"}
SLEEP = re.compile(r"\bsleep\((?!0[,)])|\bEvent\(\)\.wait\([^)]")


SLEEPS = re.compile(r"((time|asyncio)\.)?sleep|(threading\.)?Timer|.*\bEvent\(\)\.wait|.*\.wait_for_timeout")


def reads_a_clock(node: ast.AST, stopwatches: frozenset[str] = frozenset()) -> bool:
    """stopwatches: functions that return what a clock said."""
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any(
        call.id in stopwatches
        if isinstance(call, ast.Name)
        else isinstance(call, ast.Attribute) and call.attr in CLOCKS and ast.unparse(call.value) == "time"
        for call in calls
    )


def offences(source: str) -> Counter[str]:
    """By function: calls of a real `sleep`, in strings of code too, timers, and comparisons of what a real clock said."""
    found: Counter[str] = Counter()
    if not re.search(r"sleep|Timer|Event\(\)\.wait|wait_for_timeout|\btime\.", source):  # nothing of it: most files
        return found
    tree = ast.parse(source)
    stopwatches: frozenset[str] = frozenset()

    def look(node: ast.AST, place: str, timed: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            where, known = place, timed
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                where = child.name if place == "<module>" else f"{place}.{child.name}"
                known = timed | measured(child)
            found[where] += offends(child, known)
            look(child, where, known)

    def measured(function: ast.AST) -> set[str]:
        """Names that hold what a clock said, or what was made of that."""
        names: set[str] = set()
        assigned = [
            n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign) and n.value
        ]
        grown = [
            n
            for n in ast.walk(function)
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and isinstance(n.func.value, ast.Name)
            and n.func.attr in ("append", "extend", "add", "insert")
        ]
        while True:
            more = set(names)
            for call in grown:
                if any(reads_a_clock(argument, stopwatches) or uses(argument, names) for argument in call.args):
                    more.add(call.func.value.id)  # type: ignore[attr-defined]
            for node in assigned:
                assert node.value is not None
                if reads_a_clock(node.value, stopwatches) or uses(node.value, names):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    more |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            if more == names:
                return names
            names = more

    def uses(node: ast.AST, names: set[str]) -> bool:
        return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))

    def offends(node: ast.AST, timed: set[str]) -> int:
        if isinstance(node, ast.Call):
            no_time = [ast.unparse(argument) for argument in node.args[:1]] in ([], ["0"])
            return SLEEPS.fullmatch(ast.unparse(node.func)) is not None and not no_time
        if isinstance(node, ast.Compare):
            return reads_a_clock(node, stopwatches) or uses(node, timed)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return len(SLEEP.findall(node.value))
        return 0

    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for function in functions:
        returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        if any(reads_a_clock(value) or uses(value, measured(function)) for value in returned):
            stopwatches |= {function.name}
    look(tree, "<module>", set())
    return +found


def test_no_test_sleeps_or_compares_times():
    found: Counter[str] = Counter()
    meant = set()
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name.startswith("gpu/"):  # where a device's time is the subject
            continue
        for where, count in offences(path.read_text(encoding="utf-8")).items():
            if f"{name}::{where}" in MEANT:
                meant.add(f"{name}::{where}")
            else:
                found[f"{name}::{where}"] += count
    assert not found, (
        f"these sleep or compare times: wait with tests.clocks.until, or let a tests.clocks.Clock pass: {dict(found)}"
    )
    assert MEANT.keys() == meant, "some are gone: shorten MEANT"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("time.sleep(1)", 1),
        ("await asyncio.sleep(0.1)", 1),
        ("await asyncio.sleep(0)", 0),
        ("run('import time; time.sleep(60)')", 1),
        ("await asyncio.sleep(0, result)", 0),
        ("run('await asyncio.sleep(0, 7)')", 0),
        ("clock.sleep(1)", 0),
        ("threading.Event().wait()", 0),
        ("threading.Event().wait(60)", 1),
        ("run('Event().wait(60)')", 1),
        ("page.wait_for_timeout(2000)", 1),
        ("threading.Timer(0.1, stop).start()", 1),
        ("began = time.perf_counter()\n    work()\n    took_s = time.perf_counter() - began\n    assert took_s < 5", 1),
        ("end = time.monotonic() + 10\n    while time.monotonic() < end:\n        pass", 1),
        ("times = []\n    times += [time.perf_counter()]\n    assert min(times) < 3", 1),
        ("times = []\n    times.append(time.perf_counter() - began)\n    assert min(times) < 3", 1),
        ("def seconds():\n        return time.time() - began\n    assert seconds() < 5", 1),
        ("began = clock.perf_counter()\n    assert began < 5", 0),
        ("assert x < 5", 0),
    ],
)
def test_what_is_found(code, count):
    assert offences(f"async def test():\n    {code}") == Counter({"test": count} if count else {})


# -- private names


def private_names(source: str) -> set[str]:
    """Names with one underscore that this code gives to functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if PRIVATE.fullmatch(name)}


def private_uses(source: str, ours: set[str]) -> list[str]:
    """Where a test reaches for one of these names in what it tests: as an attribute, in an import, in setattr and its kin."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] not in ("self", "cls", "torch"):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "getattr", "delattr"):
            found += [str(name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)]
    return [name for name in found if name in ours]


def test_private_names_are_used_no_more_than_they_were():
    """What a test knows of the inside breaks when only that changes. Where a unit has no public face it may stand: the ceiling of a
    file is what it had, and a file that is not listed has none. Lower a ceiling where a file has less."""
    sources = (TESTS.parent / "surokit").rglob("*.py")
    ours = {name for path in sources for name in private_names(path.read_text(encoding="utf-8"))} - FOREIGN
    found = {
        path.relative_to(TESTS).as_posix(): private_uses(path.read_text(encoding="utf-8"), ours)
        for path in TESTS.rglob("*.py")
    }
    over = {name: uses for name, uses in found.items() if len(uses) > PRIVATE_USES.get(name, 0)}
    assert not over, f"ask through a public name, or give the name a public one in its module: {over}"


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("unit._inner", ["_inner"]),
        ("unit.a()._inner.b", ["_inner"]),
        ("from surokit.unit import _inner, other", ["_inner"]),
        ("monkeypatch.setattr(unit, '_inner', 1)", ["_inner"]),
        ("getattr(unit, '_inner')", ["_inner"]),
        ("self._inner", []),
        ("torch._inner", []),
        ("unit._foreign", []),
        ("'_inner'", []),
    ],
)
def test_what_is_a_private_use(code, uses):
    ours = private_names("class C:\n    def f(self):\n        self._inner = 1\n        self.__repr__ = 2")
    assert ours == {"_inner"}
    assert private_uses(code, ours) == uses


# -- sampling


def test_what_is_slow_is_there_and_in_order():
    lines = [line for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    assert not [line for line in lines if not (TESTS.parent / line).exists()]


def test_a_sample_has_each_value_of_each_axis():
    axes = {("format",): range(3), ("shape", "tile"): range(7), ("dtype",): range(4)}
    cases = {
        f"{f}-{s}-{d}": {("format",): f, ("shape", "tile"): s, ("dtype",): d}
        for f in axes["format",]
        for s in axes["shape", "tile"]
        for d in axes["dtype",]
    }
    chosen = sample(cases)
    assert len(chosen) == 7  # as many as the longest axis has
    for axis, values in axes.items():
        assert {cases[name][axis] for name in chosen} == set(values)
    assert sample(dict(reversed(cases.items()))) == chosen


def test_a_sample_of_one_axis_is_all_of_it():
    assert sample({str(n): {("n",): n} for n in range(5)}) == {"0", "1", "2", "3", "4"}
    assert sample({"test": {}}) == set()


SAMPLED = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize(("x", "y"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("z", "abc")
@pytest.mark.parametrize("w", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_many(x, y, z, w):
    pass

@pytest.mark.sampled
def test_one():
    pass

@pytest.mark.parametrize("x", range(3))
@pytest.mark.parametrize("y", range(3))
def test_not_sampled(x, y):
    pass
"""


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (["--whole"], {"test_many": 18, "test_one": 1, "test_not_sampled": 9}),
        (["-m", "not soak"], {"test_many": 3, "test_one": 1, "test_not_sampled": 9}),
    ],
)
def test_the_rest_is_left_out_unless_asked_for(tmp_path, options, counts):
    """Arguments that are given together are one axis; what is marked soak is neither sampled nor counted as a sample."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n", encoding="utf-8"
    )
    (tmp_path / "test_some.py").write_text(SAMPLED, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        *options,
        "-c",
        str(TESTS.parent / "pyproject.toml"),
    ]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=TESTS.parent, capture_output=True, text=True, timeout=300, check=True
    )
    found = Counter(line.split("::")[1].partition("[")[0] for line in done.stdout.splitlines() if "::" in line)
    assert found == counts
