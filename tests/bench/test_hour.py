"""The hour on a GPU, rehearsed: its steps, a crash, a hang, a cut-off, the background, and what its files say of the machine.

Where something is planted, steps are small programs without torch that write a file as benchmarks do.
"""

import getpass
import json
import os
import platform
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from surokit.bench import hour, result
from surokit.bench.__main__ import main, make_parser
from surokit.bench.hour import HourStep
from tests.clocks import Clock, until
from tests.refusals import refused

ROOT = Path(__file__).parents[2]

# what a step does: `run` notes that it was called, `figure` keeps one as a book does, `over` says that nothing is left
PROGRAM = """
import json, os, signal, sys, threading
from pathlib import Path
out = Path(sys.argv[1])

def run(name):
    with (out / "runs").open("a") as file:
        file.write(name + "\\n")

def data():
    path = out / "raw.json"
    return json.loads(path.read_text()) if path.exists() else {"calls": [], "made": {}}

def figure(key, **more):
    found = data()
    found["calls"] = found["calls"] or [{}]
    found["calls"][-1].pop("left", None)
    found["made"][key] = {"what": "figure", **more}
    write(found)

def over(left=""):
    found = data()
    found["calls"][-1]["left"] = left
    write(found)

def write(found):
    (out / "raw.new").write_text(json.dumps(found))
    (out / "raw.new").replace(out / "raw.json")

def hang():
    (out / "hangs").write_text(str(os.getpid()))
    threading.Event().wait()

"""


def step(name, code, minutes=8.0, **more):
    """A step of this code; with part="made" it is one that writes a file as it goes."""
    command = ("-c", f"{PROGRAM}run({name!r})\n{code}", "{out}")
    return HourStep(name, f"does {name}", command, command, minutes, **more)


def goes(name, code, minutes=8.0, **more):
    return step(name, code, minutes, file="raw.json", part="made", **more)


def runs(folder):
    return (folder / "runs").read_text().split()


def status(folder):
    return json.loads((folder / "status.json").read_text())


def states(folder):
    return {name: entry["state"] for name, entry in status(folder)["steps"].items()}


# -- what the steps are


def test_the_steps_are_in_the_order_in_which_they_are_needed():
    names = [step.name for step in hour.steps()]
    assert names[:7] == ["smoke", "must", "kernels", "offload", "memory", "calibration", "dissection"]
    assert names[7:] == ["rest", "peers", "tests-device", "tests-kernels", "tests-others"]
    assert all(step.minutes <= hour.MOST_MIN for step in hour.steps())


@pytest.mark.parametrize("step", hour.steps(), ids=lambda step: step.name)
def test_every_command_is_one_that_there_is(step):
    for command in (step.command, step.rehearsal):
        words = [word.replace("{out}", "there").replace("{minutes}", "7") for word in command]
        if words[1] == "surokit.bench":
            make_parser().parse_args(words[2:])
            assert f"there/{step.file}" in words
        else:
            assert words[:2] == ["-m", "pytest"]
            files = [word for word in words if word.endswith(".py")]
            assert files
            assert all((ROOT / file).is_file() for file in files)


def test_every_test_that_needs_a_device_is_in_a_step():
    named = {word for step in hour.test_steps() for word in step.command}
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = str(path.relative_to(ROOT))
        if "mark.gpu" in path.read_text(encoding="utf-8") or name.startswith(
            ("tests/gpu/", "tests/kernels/test_triton_")
        ):
            assert name in named, name


# -- real steps


def test_steps_of_the_hour_on_a_processor(tmp_path, capsys):
    words = ["hour", "--rehearse", "--out", str(tmp_path / "hour"), "--only", "smoke", "calibration", "tests-device"]
    assert main(words) == 0
    folder = tmp_path / "hour"
    assert states(folder) == {
        **dict.fromkeys((step.name for step in hour.steps()), "waiting"),
        **dict.fromkeys(("smoke", "calibration", "tests-device"), "done"),
    }
    assert (
        "Left: must, kernels, offload, memory, dissection, rest, peers, tests-kernels, tests-others."
        in capsys.readouterr().out
    )
    smoke = json.loads((folder / "gpu.json").read_text())
    assert smoke["gpu"]["smoke/bf16 lora"]["fused"]["ok"]
    assert json.loads((folder / "ceilings.json").read_text())["ceilings"]["gpu"]["ceilings"]["bf16_tflops"] > 0
    (found,) = json.loads((folder / "tests-device.json").read_text())["tests"].values()
    assert found["passed"]
    for path in folder.glob("*.json"):  # they are for others
        text = path.read_text(encoding="utf-8")
        for name in (str(Path.home()), str(ROOT), str(tmp_path), platform.node(), f"/{getpass.getuser()}"):
            assert name not in text, path.name
    assert main(words) == 0
    assert all(entry["calls"] <= 1 for entry in status(folder)["steps"].values())


@pytest.mark.soak
def test_the_whole_hour_on_a_processor(tmp_path):
    assert main(["hour", "--rehearse", "--out", str(tmp_path)]) == 0
    assert set(states(tmp_path).values()) == {"done"}


def test_the_hour_in_the_background(tmp_path, capsys):
    folder = tmp_path / "hour"
    words = ["hour", "--rehearse", "--out", str(folder), "--only", "calibration"]
    assert main([*words, "--background"]) == 0
    said = capsys.readouterr().out
    assert f"cat {folder / 'status.json'}" in said
    process = int(re.findall(r"kill (\d+)", said)[0])
    until(lambda: (folder / "status.json").exists() and status(folder)["state"] == "over")
    assert status(folder)["process"] == process
    assert states(folder)["calibration"] == "done"
    with suppress(ChildProcessError):
        os.waitpid(process, 0)
    assert "calibration: done" in (folder / "hour.log").read_text()


# -- what goes wrong


def test_a_crash_and_a_hang_cost_their_step_and_the_others_go_on(tmp_path):
    planted = [
        step("first", ""),
        step("crash", "os.kill(os.getpid(), signal.SIGSEGV)"),
        step("exit", "sys.exit('the device is lost')"),
        goes("hang", "hang()", minutes=0.03),
        step("last", ""),
    ]
    hour.run(tmp_path, rehearse=True, known=planted)
    assert states(tmp_path) == {"first": "done", "crash": "failed", "exit": "failed", "hang": "failed", "last": "done"}
    reasons = {name: entry["reason"] for name, entry in status(tmp_path)["steps"].items()}
    assert reasons["crash"].startswith("It ended with signal 11 (SIGSEGV)")
    assert reasons["exit"] == "It ended with exit status 1: the device is lost"
    assert reasons["hang"] == "It did not end within 0.03 minutes, and measured nothing."
    assert gone(int((tmp_path / "hangs").read_text()))
    before = runs(tmp_path)
    hour.run(tmp_path, rehearse=True, known=planted)
    assert runs(tmp_path) == before == ["first", "crash", "exit", "hang", "last"]
    hour.run(tmp_path, rehearse=True, known=planted, again=True)
    assert runs(tmp_path)[len(before) :] == ["crash", "exit", "hang"]
    assert "crash          failed" in hour.table(status(tmp_path))


def test_a_step_that_measures_until_its_limit_goes_on(tmp_path, monkeypatch):
    wait = subprocess.Popen.wait

    def until_it_hangs(self, timeout=None):
        """The limit comes when the figure is in the file."""
        if timeout == 60 * 8.0:
            until(lambda: (tmp_path / "hangs").exists() or self.poll() is not None)
            if (tmp_path / "hangs").exists():
                (tmp_path / "hangs").unlink()
                raise subprocess.TimeoutExpired("step", timeout)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_it_hangs)
    code = "n = len(data()['made'])\nfigure(f'figure {n}')\nover() if n == 2 else hang()"
    hour.run(tmp_path, rehearse=True, known=[goes("long", code)])
    entry = status(tmp_path)["steps"]["long"]
    assert (entry["state"], entry["calls"]) == ("done", 3)


def test_a_step_that_leaves_something_goes_on_while_it_makes_headway(tmp_path):
    code = "figure('a')\nover('Next is b.')"
    hour.run(tmp_path, rehearse=True, known=[goes("stuck", code), step("last", "")])
    assert runs(tmp_path) == ["stuck", "stuck", "last"]
    assert status(tmp_path)["steps"]["stuck"]["reason"] == "Next is b."
    hour.run(tmp_path, rehearse=True, known=[goes("stuck", code), step("last", "")])
    assert runs(tmp_path)[3:] == ["stuck"]  # once in each call


def test_what_fails_within_a_step_is_named(tmp_path, monkeypatch):
    """A kernel that is not the first choice is told elsewhere: nothing failed."""
    code = "figure('right')\nfigure('wrong', failed='it broke')\nfigure('doubtful', unchecked='why')\n"
    code += "figure('choices', missed='no nvcc')\nover()"
    monkeypatch.setattr(hour, "steps", lambda: (goes("measures", code),))
    assert main(["hour", "--rehearse", "--out", str(tmp_path)]) == 1
    entry = status(tmp_path)["steps"]["measures"]
    assert entry["problems"] == {"wrong": "it broke", "doubtful": "why"}
    assert entry["state"] == "done"
    assert "    wrong: it broke" in hour.table(status(tmp_path))


HOUR = """
import sys
from pathlib import Path
from surokit.bench import hour
from tests.bench.test_hour import goes, step

known = [
    step("first", ""),
    goes("cut", "figure('a')\\nhang() if 'b' not in sys.argv and not (out / 'second').exists() else figure('b')\\nover()"),
    step("last", ""),
]
hour.run(Path(sys.argv[1]), rehearse=True, known=known)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_hour_that_is_cut_off_goes_on_and_repeats_nothing(tmp_path, how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOUR, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        hangs = tmp_path / "hangs"
        until(lambda: hangs.exists() and hangs.read_text())  # the file is there before what is written in it
        child = int(hangs.read_text())
        assert states(tmp_path) == {"first": "done", "cut": "running", "last": "waiting"}
        with refused(RuntimeError):
            hour.run(tmp_path, rehearse=True, known=[])
        process.send_signal(how)
        process.wait()
    until(lambda: gone(child))
    if how != signal.SIGKILL:
        assert status(tmp_path)["state"] == "stopped"
        assert states(tmp_path)["cut"] == "cut off"
    (tmp_path / "second").touch()
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    assert runs(tmp_path) == ["first", "cut", "cut", "last"]
    assert set(states(tmp_path).values()) == {"done"}
    assert set(json.loads((tmp_path / "raw.json").read_text())["made"]) == {"a", "b"}


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return (
        Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    )  # its parent is gone too, and nobody has asked yet


def test_where_time_is_short_steps_wait(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hour, "time", clock)
    known = [goes("part", "figure('a')\nover()"), step("whole", "", minutes=4.0)]
    calls = hour.Hour(tmp_path, known, 9.0, rehearse=True, again=False)
    for left_min, part, whole in ((9.0, 8.0, 4.0), (3.0, 3.0, 0.0), (1.0, 0.0, 0.0)):
        calls.ends_s = clock.monotonic() + 60 * left_min
        assert calls.limit_min_of(known[0]) == pytest.approx(part, abs=0.1)
        assert calls.limit_min_of(known[1]) == pytest.approx(whole, abs=0.1)
    short = hour.Hour(tmp_path, known, 2.0, rehearse=True, again=False)  # in which no step has its minutes
    assert short.limit_min_of(known[1]) == pytest.approx(2.0, abs=0.1)
    words = ("gpu", "--minutes", "{minutes}")
    minutes = calls.command_of(HourStep("s", "", words, words), 8.0)[-1]
    assert float(minutes) == 8.0 - hour.SPARE_MIN


def test_what_fails_in_a_file_is_asked_for_again_once(tmp_path):
    known = [HourStep(name, "", ("gpu",), ("gpu",), file="gpu.json", part="gpu") for name in ("must", "rest")]
    call = hour.Hour(tmp_path, known, 9.0, rehearse=True, again=True)
    assert call.command_of(known[0], 8.0) == ["gpu", "--again"]
    assert call.command_of(known[0], 8.0) == call.command_of(known[1], 8.0) == ["gpu"]


def test_a_step_that_cannot_run_here_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(hour, "needs_gpu", lambda: None)
    known = [step("absent", "", lacks=lambda: "It is not installed."), step("last", "")]
    hour.run(tmp_path, known=known)
    assert runs(tmp_path) == ["last"]
    assert status(tmp_path)["steps"]["absent"]["state"] == "left out"


def test_bad_arguments_are_one_sentence(tmp_path, capsys):
    assert main(["hour", "--rehearse", "--only", "nonsense", "--out", str(tmp_path)]) == 2
    assert "There is no step 'nonsense': known are smoke, must," in capsys.readouterr().err
    assert main(["hour", "--rehearse", "--minutes", "0", "--out", str(tmp_path)]) == 2
    assert "minutes=0.0: a number above zero" in capsys.readouterr().err
    (tmp_path / "status.json").write_text("[]")
    assert main(["hour", "--rehearse", "--out", str(tmp_path)]) == 2
    assert "status.json is of something else than this hour: give another --out." in capsys.readouterr().err
    with hour.alone(tmp_path):
        assert main(["hour", "--rehearse", "--background", "--out", str(tmp_path)]) == 2
    assert "An hour runs in" in capsys.readouterr().err
    assert main(["hour", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(hour.steps())


def test_without_a_gpu_there_is_no_hour(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["hour", "--out", str(tmp_path / "hour")]) == 2
    assert "There is no CUDA device: --rehearse goes through the hour on a processor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("No such file: '/home/someone/.cache/x.so'", "No such file: 'x.so'"),
        ("nvcc failed (/tmp/a b/c.cu:12)", "nvcc failed (a b/c.cu:12)"),
        ("see https://example.org/a/b, 2 / 3 or fp8/block", "see https://example.org/a/b, 2 / 3 or fp8/block"),
    ],
)
def test_of_a_path_only_the_last_name_is_written(tmp_path, said, written):
    result.write({"failed": [said], "rate": 1.0}, tmp_path / "raw.json")
    assert json.loads((tmp_path / "raw.json").read_text()) == {"failed": [written], "rate": 1.0}


# -- tests that go on where they ended


TESTS = """
import os, pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "no"
def test_skipped(): pytest.skip("not here")
def test_dies(): os._exit(3)
def test_last(): pass
"""


def test_tests_go_on_behind_what_they_have(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sampled: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--book", str(tmp_path / "raw.json")]

    def call():
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        data = json.loads((tmp_path / "raw.json").read_text())
        return done.returncode, {key.partition("::")[2]: each for key, each in data["tests"].items()}, data["calls"][-1]

    code, found, last = call()
    assert code == 3
    assert found["test_right"]["passed"]
    assert found["test_wrong"]["failed"] == "AssertionError: no"
    assert found["test_skipped"]["skipped"] == "Skipped: not here"
    assert last["begun"].endswith("test_dies")
    code, found, last = call()
    assert (code, found["test_dies"]["left_out"]) == (3, "The process ended in it.")
    kept = found["test_right"]
    code, found, last = call()
    assert code == 0
    assert found["test_dies"]["failed"] == "Two processes ended in it."
    assert found["test_last"]["passed"]
    assert found["test_right"] == kept
    assert last["left"] == ""
