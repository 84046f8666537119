"""The command line: words, exit states, one line for a user's error; and a notebook executed headless."""

import base64
import inspect
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import surokit as sk
from surokit import cli, headless
from surokit.widgets.follow import Watch
from tests.planner.families import QWEN3_8B
from tests.refusals import refused

# a 1 x 1 PNG
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def write(path, *cells):
    nb = new_notebook(cells=list(cells))
    nbformat.write(nb, path)
    return path


def test_plan_prints_the_405b_case(capsys):
    arguments = "plan 405e9 --tokens 15.6e12 --gpus 16000 --gpu H100 --tflops-per-gpu 400 --usd-per-gpu-hour 2"
    assert cli.main(arguments.split()) == 0
    text = capsys.readouterr().out
    for figure in ("3.7908e25 FLOP", "68.55 days", "26.325 M GPU hours", "52.65 M USD"):
        assert figure in text


def test_plan_says_what_to_act_on_and_all_of_it_when_asked(capsys):
    def said(*more: str) -> list[str]:
        assert cli.main(["plan", "llama-3.1-8b", "--batch", "2", "--gpu", "H100", "--tokens", "1e9", *more]) == 0
        return capsys.readouterr().out.splitlines()

    fits = said("--length", "4096", "--recompute", "full", "--usd-per-gpu-hour", "2")
    assert len(fits) == 9
    begins = (
        "Plan",
        "Fits",
        "Likely takes",
        "Likely costs",
        "Computes",
        "Moments are in bf16",
        "Likely goes into products",
        "Faster: recipe fp8",
        "--all prints",
    )
    assert all(line.strip().startswith(begin) for line, begin in zip(fits, begins))
    large = said("--length", "8192", "--layers", "transformers")
    plan = sk.plan("llama-3.1-8b", batch=2, length=8192, gpu="H100", tokens=1e9, layers="transformers")
    helps = next(line for line in large if "What helps" in line)
    assert plan.fitting().sentence in helps
    assert helps.endswith("ms (likely)")
    (options,) = (line.strip().removeprefix("As options: ") for line in large if "As options: " in line)
    assert said("--length", "8192", "--layers", "transformers", *options.split())[1].strip().startswith("Fits: ")
    less = said("--length", "8192", "--layers", "transformers", "--host-gib", "8")
    assert "on the host" not in next(line for line in less if "What helps" in line)
    assert not any("plan.fitting()" in line for line in large)
    assert not any("What helps" in line for line in said("--length", "8192", "--fitting"))
    assert said("--length", "8192", "--layers", "transformers", "--all") == str(plan).splitlines()


def test_plan_of_a_folder_and_whether_it_fits(tmp_path, capsys):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    arguments = ["plan", str(tmp_path), "--recipe", "qfp8", "--batch", "2", "--length", "128", "--fits"]
    assert cli.main([*arguments, "1"]) == 0
    assert "fits in 1 GiB" in capsys.readouterr().out
    assert cli.main([*arguments, "1e-3"]) == 0
    assert "does not fit in 0.001 GiB" in capsys.readouterr().out


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    return str(path)


def planned(capsys, *arguments):
    """What `surokit plan --json` says."""
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_argument_of_plan_is_one_of_the_command(config, capsys):
    names = set(inspect.signature(sk.plan).parameters) - {"what", "training"}
    assert cli.main(["plan", config, "--all"]) == 0
    plain = capsys.readouterr().out
    known = vars(cli.make_parser().parse_args(["plan", config]))
    assert names | {"training"} <= set(known)
    # and none is set that was not given
    assert all(known[name] is None for name in names)
    assert plain.splitlines()[1:] == str(sk.plan(QWEN3_8B)).splitlines()[1:]


def test_arguments_reach_the_plan(config, capsys):
    arguments = (
        "--batch 2 --length 1024 --gpus 8 --gpu H100 --recipe fp8 --lora 4 --accumulate 2 --logits whole --zero 1 "
    )
    arguments += "--layers transformers --master --slack 0.05 --state-dtype fp32 --optimizer adamw --recompute full "
    arguments += "--tokens 1e9 --mfu 0.4 --goodput 0.9 --usd-per-gpu-hour 1.8-3.2"
    said = planned(capsys, config, *arguments.split())
    expected = sk.plan(
        QWEN3_8B,
        batch=2,
        length=1024,
        gpus=8,
        gpu="H100",
        recipe=sk.FP8.lora(rank=4),
        accumulate=2,
        logits="whole",
        zero=1,
        layers="transformers",
        master=True,
        slack=0.05,
        state_dtype="fp32",
        recompute="full",
        tokens=1e9,
        mfu=0.4,
        goodput=0.9,
        usd_per_gpu_hour=(1.8, 3.2),
    )
    assert {(line["group"], line["term"]): line["value"] for line in said["lines"]} == {
        (line.group, line.term): line.value for line in expected.lines()
    }
    assert said["answers"] == list(expected.answers)
    assert said["notes"] == list(expected.all_notes)
    # those of the step's estimate too
    unlinked = planned(capsys, config, *arguments.replace("H100", "RTX-4090").split())["notes"]
    assert any("communication is left out" in note for note in unlinked)
    assert expected.usd_range is not None
    assert expected.usd_range[0] < expected.usd_range[1]


def test_a_name_on_the_hub(config, capsys, monkeypatch):
    def fetch(repo_id, filename, *, online):
        assert (repo_id, filename) == ("Some/Model-8B", "config.json")
        if not online:
            raise FileNotFoundError("not in the cache")
        return Path(config)

    monkeypatch.setattr("surokit.hub.fetch", fetch)
    monkeypatch.setattr("surokit.hub.reachable", lambda: True)
    lines = {line["term"]: line["value"] for line in planned(capsys, "Some/Model-8B")["lines"]}
    assert lines["parameters"] == sk.plan(QWEN3_8B).parameters
    monkeypatch.setattr("surokit.hub.reachable", lambda: False)
    assert cli.main(["plan", "Some/Model-8B"]) == 2
    captured = capsys.readouterr()
    assert "Some/Model-8B" in captured.err
    assert captured.err.count("\n") == 1


def test_a_model_of_the_catalogue_needs_no_network(capsys, monkeypatch):
    monkeypatch.delattr("surokit.hub.fetch")
    said = planned(capsys, "llama-3.1-8b", "--batch", 1, "--length", 512, "--gpu", "H100")
    assert said["title"].startswith("llama of 8.03 B parameters from the catalogue's meta-llama/Llama-3.1-8B")
    assert cli.main(["plan", "llama-3.1-9b"]) == 2
    assert "did you mean 'meta-llama/Llama-3.1-8B'" in capsys.readouterr().err


def test_inference_holds_a_cache_and_no_gradients(config, capsys):
    said = planned(capsys, config, "--inference", "--batch", 8, "--length", 4096)
    terms = {line["term"] for line in said["lines"]}
    assert "KV cache" in terms
    assert "gradients" not in terms


@pytest.mark.parametrize(
    ("text", "price"),
    [("2", 2.0), ("2.50", 2.5), ("1.8-3.2", (1.8, 3.2)), ("5e-1", 0.5), ("2-2", (2.0, 2.0))],
)
def test_prices(text, price):
    assert cli.make_parser().parse_args(["plan", "8e9", "--usd-per-gpu-hour", text]).usd_per_gpu_hour == price


def test_what_would_make_a_plan_fit(config, capsys):
    arguments = [config, "--length", 2048, "--batch", 1, "--gpu", "A40"]
    said = planned(capsys, *arguments, "--fitting")
    assert "plan.fitting() says what helps" in "".join(said["answers"])
    fits = sk.plan(QWEN3_8B, length=2048, batch=1, gpu="A40").fitting()
    assert [row["remedy"] for row in said["fitting"]["remedies"]] == list(fits.table().remedy)
    assert [row["way"] for row in said["fitting"]["ways"]] == list(fits.together().way)
    assert said["fitting"]["sentence"] == fits.sentence
    assert said["fitting"]["options"]["the first"].startswith("--")
    assert cli.main(["plan", *map(str, arguments), "--fitting"]) == 0
    assert str(fits) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "--batch 1 --length 2048 --gpu A40",
        "--batch 2 --length 8192 --gpu H100 --gpus 4",
        "--batch 1 --length 512 --gpu T4",
        "--batch 1 --length 1024 --gpu L4 --lora 8",
        "--batch 1 --length 512 --gpu RTX-4090 --gpus 2 --master --state-dtype fp32",
        "--batch 2 --length 8192 --gpu H100 --recompute full --recompute-blocks 4",
    ],
)
def test_the_first_way_as_options_fits(config, capsys, arguments):
    """They are what a terminal takes, and make the plan that the answer promises; recipes are compared where it fits."""
    given = arguments.split()
    assert cli.main(["plan", config, *given, "--fitting", "--recipes", "--faster"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("  as options, ")]
    assert len(lines) == 1 + sum("faster still: " in line for line in out.splitlines())
    for line in lines:
        which, _, options = line.removeprefix("  as options, ").partition(": ")
        options, _, without = options.partition("without ")
        # with its value, where it has one
        gone = [i for i, word in enumerate(given) if word in without.split()]
        gone += [i + 1 for i in gone if not [*given, "--"][i + 1].startswith("--")]
        kept = [word for i, word in enumerate(given) if i not in gone]
        said = planned(capsys, config, *kept, *options.rstrip(", ").split())
        assert said["answers"][0].startswith("Fits: ")
        if which == "the first":
            assert f"every recipe: {said['title']}\n" in out
        else:
            assert said["answers"][1].startswith(f"A step likely takes {which}, ")


def test_what_makes_a_step_faster(config, capsys):
    arguments = [config, "--length", 2048, "--batch", 1, "--gpu", "H200"]
    said = planned(capsys, *arguments, "--faster")
    quicker = sk.plan(QWEN3_8B, length=2048, batch=1, gpu="H200").faster()
    assert [row["way"] for row in said["faster"]] == [way.how for way in quicker.ways]
    assert cli.main(["plan", *map(str, arguments), "--faster"]) == 0
    assert str(quicker) in capsys.readouterr().out


def test_the_largest_batch_fits_and_one_more_does_not(config, capsys):
    base = sk.plan(QWEN3_8B, length=2048, batch=1, gpu="H100", recipe="qfp8")
    arguments = [config, "--length", 2048, "--batch", 1, "--gpu", "H100", "--recipe", "qfp8", "--largest", "batch"]
    most = planned(capsys, *arguments)["largest"]["batch"]
    assert base.but(batch=most).fits()
    assert not base.but(batch=most + 1).fits()
    assert planned(capsys, *arguments, "--fits", 24)["largest"]["batch"] < most
    assert cli.main(["plan", *map(str, arguments)]) == 0
    assert f"largest batch that fits in H100's memory: {most}" in capsys.readouterr().out


def test_gpus_for_a_deadline(config, capsys):
    arguments = [config, "--tokens", "1e11", "--gpu", "H100", "--mfu", 0.4, "--days", 10, "--usd-per-gpu-hour", "2-4"]
    base = sk.plan(QWEN3_8B, tokens=1e11, gpu="H100", mfu=0.4, usd_per_gpu_hour=(2, 4))
    gpus = planned(capsys, *arguments)["gpus"]
    days, one_less = base.but(gpus=gpus).days, base.but(gpus=gpus - 1).days
    assert days is not None
    assert one_less is not None
    assert days <= 10 < one_less
    assert cli.main(["plan", *map(str, arguments)]) == 0
    assert base.gpu_hours is not None
    low, high = (f"{price * base.gpu_hours:,.0f}" for price in (2, 4))
    assert f"done within 10 days on {gpus} GPUs: {days:.2f} days, {low} to {high} USD" in capsys.readouterr().out


def test_recipes_and_a_picture_of_them(config, tmp_path, capsys):
    picture = tmp_path / "memory.png"
    arguments = [config, "--batch", 1, "--length", 2048, "--gpu", "H100", "--recipes", "--plot", picture]
    said = planned(capsys, *arguments)
    rows = {row["name"]: row for row in said["recipes"]}
    assert set(sk.recipes) <= set(rows)
    base = sk.plan(QWEN3_8B, batch=1, length=2048, gpu="H100")
    assert {name: row["gib"] for name, row in rows.items() if name in sk.recipes} == {
        name: base.but(recipe=name).memory.gib for name in sk.recipes
    }
    assert said["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert "every recipe" in out
    assert "fp8-rowwise" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan 405", "did you mean 405e9"),
        ("plan 405e9 --tokens 15.6", "did you mean 15.6e12"),
        ("plan 405e9 --tokens many", "is not a number"),
        ("plan 8B", "write a number of parameters as 8e9"),
        ("plan nowhere/at/all", "There is no nowhere"),
        ("plan 405e9 --gpu H10", "did you mean H100"),
        ("plan 8e9 --recipe fp9", "did you mean 'fp8'"),
        ("plan 8e9 --usd-per-gpu-hour cheap", "'cheap' is no price in USD: write 2.5, or a range as 1.8-3.2"),
        ("plan 8e9 --usd-per-gpu-hour 1.8-", "'1.8-' is no price in USD"),
        ("plan 8e9 --usd-per-gpu-hour 3.2-1.8", "goes backwards"),
        ("plan 8e9 --largest colour", "invalid choice: 'colour'"),
        ("plan 8e9 --largest batch", "give gib=80"),
        ("plan 8e9 --days 30", "tokens"),
        ("plan 8e9 --plot memory.txt", "--plot memory.txt is no kind of picture"),
        ("plan 8e9 --plot nowhere/at/all.png", "No such file"),
        ("plan 8e9 --lora 0", "rank"),
        ("plan", "required: what"),
        (f"quickstart --run-dir {__file__}/at/all", f"The folder {__file__}/at cannot be written to (Not a directory)"),
        ("doctor --xyzzy", "unrecognized arguments: --xyzzy (see surokit doctor --help)"),
        ("doctor --jsn", "unrecognized arguments: --jsn; did you mean --json?"),
        ("plan 8e9 --xyzzy", "unrecognized arguments: --xyzzy (see surokit plan --help)"),
        ("pln 8e9", "invalid choice: 'pln'"),
        ("dissect config.json --over recompute", "--over 'recompute': write a switch and its values"),
        ("dissect config.json --over flash=1", "has no switch 'flash'"),
        ("dissect config.json --plot step.txt", "is no kind of picture"),
        (
            "",
            "required: doctor | plan | race | reproduce | dissect | serve-bench | watch | launch | export | quickstart",
        ),
    ],
)
def test_a_users_error_is_one_line_and_two(arguments, said, capsys):
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_arguments_reach_dissect(tmp_path, capsys, monkeypatch):
    asked: dict[str, Any] = {}

    class Found:
        def __repr__(self):
            return "the table"

        def report(self, folder):
            return folder / "report.md"

    def dissect(model, batch, **given):
        asked.update(given, model=model, batch=batch)
        return Found()

    monkeypatch.setattr(sk, "dissect", dissect, raising=False)
    words = "dissect config.json --what tune --batch 3 --length 64 --steps 7 --gib 2 --together all --device cpu --over"
    over = "recompute=none,full batch=1,largest compile=false,true recipe=fp8"
    command = [*words.split(), *over.split(), "--report", str(tmp_path)]
    assert cli.main(command) == 0
    assert asked["batch"] == (3, 64)
    several = {"recompute": ("none", "full"), "batch": (1, "largest"), "compile": (False, True)}
    assert asked["over"] == {**several, "recipe": "fp8"}  # a value alone is set against the default
    assert {name: asked[name] for name in ("model", "what", "steps", "gib", "together", "device")} == {
        "model": "config.json",
        "what": "tune",
        "steps": 7,
        "gib": 2,
        "together": "all",
        "device": "cpu",
    }
    assert capsys.readouterr().out == f"the table\nreport: {tmp_path}/report.md\n"
    recipe = "fp4(grad_input=bf16, grad_weight=bf16)"  # its comma separates no values
    assert cli.main([*command, "--over", f"recipe=bf16,{recipe}, fp8"]) == 0
    assert asked["over"] == {"recipe": ("bf16", recipe, "fp8")}


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    assert "surokit doctor" in capsys.readouterr().out


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_doctor_as_json(capsys, monkeypatch):
    """The keys are documented in docs/index.md."""
    monkeypatch.setattr("psutil.cpu_percent", lambda interval, percpu: [0.0])  # the same for both
    assert cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    found = sk.doctor()
    assert list(said) == ["ok", "findings"]
    assert said["ok"] is found.ok
    assert {each["name"]: each["state"] for each in said["findings"]} == {f.name: f.state for f in found.findings}
    assert all(list(each) == ["group", "name", "state", "detail", "remedy"] for each in said["findings"])


def test_plan_as_json(config, capsys, monkeypatch):
    """The keys are documented in docs/planning.md; a figure that is no number is null."""
    said = planned(capsys, config, "--batch", 2, "--length", 128, "--fits", 80)
    assert list(said) == ["title", "answers", "lines", "notes", "fits"]
    assert all(list(line) == ["group", "term", "value", "unit", "kind", "how"] for line in said["lines"])
    monkeypatch.setattr("surokit.cli.plan.answers_of", lambda *_: {"fits": ({"gib": [math.inf, math.nan, 2.0]}, "")})
    assert cli.main(["plan", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=no_constant)["fits"] == {"gib": [None, None, 2.0]}


def test_watch_prints_until_the_runs_end(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "records.jsonl").write_text('{"step": 1, "loss": 2.0, "wall_ms": 5.0}\n')
    (tmp_path / "a" / "run.json").write_text('{"state": "done", "step": 1}')
    assert cli.main(["watch", str(tmp_path)]) == 0
    assert "Done at step 1." in capsys.readouterr().out


class Ticks:
    """The clock of a waiting command: each tick takes no time and something happens in it."""

    def __init__(self, *happens):
        self.happens, self.waited = list(happens), []

    def wait(self, seconds):
        self.waited.append(seconds)
        assert self.happens, "the command still waits, and nothing more happens"
        self.happens.pop(0)()


def test_watch_waits_for_a_folder_that_is_not_there_yet(tmp_path, capsys, monkeypatch):
    run, race = tmp_path / "later" / "a", tmp_path / "race"

    def is_a_run():
        (run / "run.json").write_text('{"state": "done", "step": 1}')
        (run / "records.jsonl").write_text('{"step": 1, "loss": 2.0, "wall_ms": 5.0}\n')

    def is_a_race():
        race.mkdir()
        (race / "race.json").write_text('{"reason": "done", "folders": {"a": "../later/a"}, "runs": []}')

    ticks = Ticks(run.parent.mkdir, run.mkdir, is_a_run, is_a_race)
    monkeypatch.setattr("surokit.cli.watch.threading", SimpleNamespace(Event=lambda: ticks))
    assert cli.main(["watch", str(run.parent), str(race)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[:2] == [
        f"Waiting for {folder}, which is not there yet; Ctrl-C ends the waiting." for folder in (run.parent, race)
    ]
    assert not ticks.happens
    assert "Done at step 1." in captured.out + captured.err


def test_an_interrupt_ends_the_waiting_for_a_folder(tmp_path, capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("surokit.cli.watch.threading", SimpleNamespace(Event=lambda: Ticks(interrupt)))
    assert cli.main(["watch", str(tmp_path / "b")]) == 130
    captured = capsys.readouterr()
    assert f"Waiting for {tmp_path / 'b'}" in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_watch_does_not_wait_for_what_is_no_folder_of_a_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["watch", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_an_interrupt_ends_the_watching_only(tmp_path, capsys, monkeypatch):
    def interrupted(self, timeout=None):
        if not self._asked.is_set():
            raise KeyboardInterrupt
        return wait(self, timeout)

    wait = Watch.wait
    monkeypatch.setattr(Watch, "wait", interrupted)
    assert cli.main(["watch", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []  # nobody was asked to stop
    assert "waiting" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "surokit", "plan", "405e9"]
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_quickstart_is_looked_for_in_the_package(tmp_path, monkeypatch, capsys):
    notebook = write(tmp_path / "01_quickstart.ipynb", new_code_cell("1"))
    monkeypatch.setattr("importlib.resources.files", lambda package: {"surokit.notebooks": tmp_path}[package])
    asked = []

    def execute(path, run_dir):
        asked.append((path, run_dir))
        return 0

    monkeypatch.setattr(headless, "execute", execute)
    assert cli.main(["quickstart", "--run-dir", str(tmp_path / "run")]) == 0
    assert asked == [(notebook, tmp_path / "run")]
    notebook.unlink()
    assert cli.main(["quickstart"]) == 2
    assert "install surokit again" in capsys.readouterr().err


def test_a_notebook_runs_in_this_interpreter_and_leaves_everything(tmp_path, capsys, monkeypatch):
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "mine.py").write_text("from_my_profile = 1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    show = "from IPython.display import SVG, display"
    notebook = write(
        tmp_path / "nb.ipynb",
        new_markdown_cell("# Title"),
        new_code_cell("import sys, os, pathlib\npathlib.Path('here.txt').write_text('x')\nprint(sys.executable)"),
        new_code_cell(f"display({{'image/png': {PIXEL!r}}}, raw=True)"),
        new_code_cell(f"# a drawing\n{show}\ndisplay(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>'))"),
        new_code_cell(""),
        new_code_cell("# the result\nprint('aside')\n{'answer': 42}", metadata={"tags": ["result"]}),
        new_code_cell("'from_my_profile' in globals()"),
    )
    runs = tmp_path / "runs" / "quickstart"
    assert headless.execute(notebook, runs) == 0
    out = capsys.readouterr().out
    assert "[ 1/5] import sys, os, pathlib  " in out
    assert "[ 3/5] # a drawing  " in out
    assert "{'answer': 42}" in out
    assert "aside" not in out
    assert out.rstrip().endswith(str(runs / "nb.html"))

    done = nbformat.read(runs / "nb.ipynb", as_version=4)
    assert done.cells[1].outputs[0].text.strip() == sys.executable
    assert [c.execution_count for c in done.cells if c.cell_type == "code" and c.source] == [1, 2, 3, 4, 5]
    assert done.cells[-1].outputs[0].data["text/plain"] == "False"
    assert (runs / "here.txt").read_text() == "x"
    assert (runs / "cell-03-1.png").read_bytes() == base64.b64decode(PIXEL)
    assert (runs / "cell-04-1.svg").read_text().startswith("<svg")
    assert "answer" in (runs / "nb.html").read_text(encoding="utf-8")
    assert nbformat.read(notebook, as_version=4).cells[1].outputs == []


class Screen(io.StringIO):
    """A terminal, or a log."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def lines(self):
        """What a reader sees: of what was written over, the last."""
        return [line.rpartition("\r")[2].rstrip() for line in self.getvalue().rstrip("\n").split("\n")]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_cell_says_is_shown_while_it_runs_now_and_then(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    now = [0.0]
    screen = Screen(terminal)
    progress = headless.Progress(screen, clock=lambda: now[0])
    progress.begin("[ 1/2] train()")
    for second in range(40):
        now[0] = float(second)
        progress.tell(f"step {second} / 40 · {40 - second} s to go" + " x" * 100)
        if second == 20:
            assert f"step {20 if terminal else 15} / 40" in screen.lines()[-1]
            assert len(screen.lines()[-1]) <= progress.WIDTH + 8
    now[0] = 40.0
    progress.end()
    progress.begin("[ 2/2] more()")
    now[0] = 40.1
    progress.tell("too soon")
    progress.end()
    between = [] if terminal else ["step 15 / 40", "step 30 / 40"]
    lines = screen.lines()
    assert lines[0] == ("[ 1/2] train()  40.0 s" if terminal else "[ 1/2] train()")
    assert [line.split(" ·")[0].strip() for line in lines[1:-1] if "step" in line] == between
    assert lines[-1] == "[ 2/2] more()  0.1 s"
    assert "too soon" not in screen.getvalue()


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    now = [0.0]
    screen = Screen(terminal=True)
    progress = headless.Progress(screen, clock=lambda: now[0])
    progress.begin("[ 1/2] a first line that is longer than the terminal is wide")
    now[0] = 1.0
    progress.tell("step 1 / 40")
    now[0] = 2.0
    progress.end()
    assert max(len(written) for written in screen.getvalue().replace("\n", "\r").split("\r")) <= 39
    assert screen.lines() == ["[ 1/2] a first line that is long  2.0 s"]


@pytest.mark.parametrize("threads", [1, None])
def test_a_busy_processor_leaves_the_notebook_fewer_threads(threads, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(headless, "spare_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = "import os\nprint('threads:', os.environ.get('OMP_NUM_THREADS'))"
    notebook = write(tmp_path / "nb.ipynb", new_code_cell(source, metadata={"tags": ["result"]}))
    assert headless.execute(notebook, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert ("The processor is busy: torch computes with 1 thread here." in said) == (threads == 1)
    assert f"threads: {threads}\n" in said
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the user's own word counts
    assert headless.execute(notebook, tmp_path / "run") == 0
    assert "threads: 2\n" in capsys.readouterr().out


def test_a_sessions_panel_says_how_long_it_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(headless.Progress, "LOG_EVERY_S", 0.0)
    training = """
import torch, surokit as sk
model = sk.Decoder(sk.DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, vocab=32, ffn=16))
ids = torch.randint(32, (2, 8))
session = sk.Session(model, [{"input_ids": ids, "labels": ids}], optimizer=sk.AdamW(lr=1e-3))
session.live()
session.run(3)
"""
    assert headless.execute(write(tmp_path / "nb.ipynb", new_code_cell(training)), tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "waiting for the first step" in out
    assert "step 3 / 3" in out


def test_a_failing_cell_is_told_and_what_ran_is_kept(tmp_path, capsys):
    notebook = write(
        tmp_path / "nb.ipynb",
        new_code_cell("print('first')"),
        new_code_cell("1 / 0"),
        new_code_cell("print('never')"),
    )
    assert headless.execute(notebook, tmp_path / "run") == 1
    captured = capsys.readouterr()
    assert "Cell 2 failed:" in captured.err
    assert "ZeroDivisionError: division by zero" in captured.err
    assert "\x1b" not in captured.err
    assert str(tmp_path / "run") in captured.out
    cells = nbformat.read(tmp_path / "run" / "nb.ipynb", as_version=4).cells
    assert cells[0].outputs[0].text == "first\n"
    assert cells[1].outputs[0].ename == "ZeroDivisionError"
    assert cells[2].outputs == []
    assert (tmp_path / "run" / "nb.html").is_file()


def test_a_dead_kernel_is_told(tmp_path, capsys):
    notebook = write(tmp_path / "nb.ipynb", new_code_cell("print('first')"), new_code_cell("import os\nos._exit(9)"))
    assert headless.execute(notebook, tmp_path / "run") == 1
    assert "Cell 2 ended the kernel" in capsys.readouterr().err
    assert nbformat.read(tmp_path / "run" / "nb.ipynb", as_version=4).cells[0].outputs[0].text == "first\n"


def test_an_interrupt_keeps_what_ran(tmp_path):
    notebook = write(
        tmp_path / "nb.ipynb",
        new_code_cell("print('first')"),
        new_code_cell("import threading\nthreading.Event().wait(120)"),
    )
    program = (
        "import sys, pathlib; from surokit.headless import execute; sys.exit(execute(*map(pathlib.Path, sys.argv[1:])))"
    )
    command = [sys.executable, "-c", program, str(notebook), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = ""
        while "[ 2/2]" not in seen:
            piece = process.stdout.read(1)
            assert piece, process.stderr.read()
            seen += piece
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Cell 2 was interrupted." in err
    assert "Traceback" not in err
    assert nbformat.read(tmp_path / "run" / "nb.ipynb", as_version=4).cells[0].outputs[0].text == "first\n"


def test_fresh_folders(tmp_path):
    names = [headless.fresh_folder(tmp_path / "a" / "run").name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_without_nbclient_one_sentence(tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nbclient" else real(name))
    notebook = write(tmp_path / "nb.ipynb", new_code_cell("1"))
    with refused(ModuleNotFoundError):
        headless.execute(notebook, tmp_path / "run")
    assert not (tmp_path / "run").exists()
