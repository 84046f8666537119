"""`surokit race`: the function of that name, with the same words."""

from __future__ import annotations

import inspect
import os
import runpy
import signal
from itertools import islice
from types import SimpleNamespace

import pytest

import surokit as sk
from surokit import cli, texts
from surokit.train.errors import NonFiniteError

SMALL = ["--layers", "1", "--width", "32", "--length", "16", "--batch", "2"]


@pytest.fixture
def text(tmp_path):
    """A file that a tokenizer is soon trained on."""
    path = tmp_path / "text.txt"
    path.write_text(texts.SHAKESPEARE.read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return ["--text", str(path)]


def failing(error):
    """`sk.race`, with data that fail after eight batches."""
    of_race = sk.race

    class Fails:
        def __init__(self, data):
            self.batches = list(islice(data, 8))

        def __iter__(self):
            yield from self.batches
            raise error

    def race(*entries, data, **options):
        return of_race(*entries, data=Fails(data), **options)

    return race


def test_a_race_from_the_command_line(tmp_path, capsys, text):
    folder, picture = tmp_path / "race", tmp_path / "race.png"
    arguments = [
        "race",
        "--recipes",
        "bf16",
        "fp8",
        "--lora",
        "2",
        "--steps",
        "8",
        *SMALL,
        *text,
        "--usd-per-gpu-hour",
        "2",
    ]
    assert cli.main([*arguments, "--run-dir", str(folder), "--plot", str(picture)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[0].startswith("run ")
    assert "bf16 again" in told.out
    assert picture.stat().st_size > 10_000
    race = sk.Race.load(folder)
    assert repr(race) in told.out
    assert told.out.splitlines()[-1] == f"Kept in {folder}."
    assert race.runs["fp8"].recipe is not None
    assert race.runs["fp8"].recipe["adapter"]["rank"] == 2
    assert race.settings["usd_per_gpu_hour"] == 2
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "rerun.py"))
    assert ended.value.code == 0
    again = sk.Race.load(tmp_path / "race-2")
    assert again.runs["fp8"].steps["loss"].tolist() == race.runs["fp8"].steps["loss"].tolist()


def test_a_race_trains_on_generated_stories(tmp_path, capsys):
    race = ["race", "--recipes", "bf16", "fp8", "--steps", "6", *SMALL, "--run-dir", str(tmp_path / "race")]
    assert cli.main([*race, "--stories", "40000"]) == 0
    tokenizer = sk.train_tokenizer(sk.stories(1_000_000), vocab_size=1024)
    data = sk.text(sk.stories(40_000), tokenizer, length=16, batch=2, seed=0).split(held_out=0.01)[0]
    assert sk.Race.load(tmp_path / "race").runs["bf16"].work["data"] == data.fingerprint
    capsys.readouterr()
    assert cli.main([*race, "--stories", "40000", "--text", "moby.txt"]) == 2
    assert "--text: not allowed with argument --stories" in capsys.readouterr().err
    assert cli.main([*race, "--stories", "0.5"]) == 2
    assert "stories(characters=0.5): a whole number of at least 1." in capsys.readouterr().err


def test_a_race_is_reproduced_from_its_folder(tmp_path, capsys, text):
    folder = tmp_path / "race"
    assert cli.main(["race", "--steps", "8", *SMALL, *text, "--until", "9", "--run-dir", str(folder)]) == 0
    capsys.readouterr()
    assert cli.main(["reproduce", str(folder / "race.json"), "--run-dir", str(tmp_path / "again")]) == 0
    told = capsys.readouterr().out
    assert "Versions, machine, weights and data are those of then." in told
    row = next(line for line in told.splitlines() if line.startswith("fp8: held-out loss"))
    assert row.split()[-1] == "equal"
    assert (tmp_path / "again" / "race.json").exists()
    assert [line for line in told.splitlines() if "Kept in" in line] == [f"Kept in {tmp_path / 'again'}."]
    assert cli.main(["reproduce", str(folder)]) == 0
    assert "Kept in" not in capsys.readouterr().out, "nothing is kept"
    assert cli.main(["reproduce", str(tmp_path / "nowhere")]) == 2
    assert cli.main(["reproduce", str(folder), "--run-dir", str(folder)]) == 2  # else it would be compared with itself
    assert "has content already" in capsys.readouterr().err


def test_a_race_of_a_script_is_not_reproduced_without_it(tmp_path, capsys, make):
    race = make(run_dir=tmp_path / "race")
    assert race.command is None
    assert cli.main(["reproduce", str(tmp_path / "race")]) == 2
    assert "rerun(model=..., data=...)" in capsys.readouterr().err


def test_a_goal_that_is_a_task_is_one_of_python(capsys, text):
    assert cli.main(["race", *SMALL, *text, "--until", "copying"]) == 2
    assert "'copying' is no held-out loss" in (said := capsys.readouterr().err)
    assert "surokit.Goal(0.9, task)" in said


def test_how_adapters_begin(monkeypatch, capsys, text):
    asked: dict[str, object] = {}

    def race(recipes, *, allow=(), **options):
        asked.update(recipes=recipes, allow=allow)
        return SimpleNamespace(run_dir=None, reason="done")

    monkeypatch.setattr(sk, "race", race)
    command = ["race", *SMALL, *text, "--lora-init"]
    assert cli.main([*command, "loftq", "--lora", "2", "--recipes", "bf16", "qnf4"]) == 0
    assert asked == {
        "recipes": {"bf16": sk.BF16.lora(rank=2), "qnf4": sk.QNF4.lora(rank=2, init="loftq")},
        "allow": ("weights",),
    }
    assert cli.main([*command, "loftq", "--recipes", "fp8", "qfp8"]) == 0
    assert asked["recipes"] == {"fp8": sk.FP8, "qfp8": sk.QFP8.lora(init="loftq")}
    assert cli.main([*command, "kaiming", "--recipes", "qfp8"]) == 0
    assert asked == {"recipes": {"qfp8": sk.QFP8}, "allow": ()}
    assert cli.main([*command, "loftq", "--recipes", "bf16", "fp8"]) == 2
    assert "--lora-init loftq is for recipes that store weights" in capsys.readouterr().err


def test_every_run_has_the_optimizer_that_is_asked_for(monkeypatch, text):
    asked = []

    def race(recipes, *, optimizer, **options):
        asked.append(optimizer)
        return SimpleNamespace(run_dir=None, reason="done")

    monkeypatch.setattr(sk, "race", race)
    assert cli.main(["race", *SMALL, *text, "--lr", "2e-3", "--optimizer", "muon"]) == 0
    assert cli.main(["race", *SMALL, *text, "--lr", "2e-3"]) == 0
    assert asked == [sk.Muon(lr=2e-3), sk.AdamW(lr=2e-3)]


def test_it_is_run_again_from_anywhere_and_overwrites_nothing(tmp_path, capsys, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    arguments = ["race", "--recipes", "bf16", "fp8", "--steps", "4", *SMALL, "--text", "text.txt"]
    assert cli.main([*arguments, "--run-dir=races/a", "--plot", "race.png"]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "races" / "a" / "race-2.png").write_text("taken", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "races" / "a" / "rerun.py"))
    assert ended.value.code == 0
    assert not list(elsewhere.iterdir())
    assert sk.Race.load(tmp_path / "races" / "a-2").reason == "done"
    assert (tmp_path / "races" / "a" / "race-2.png").read_text(encoding="utf-8") == "taken"
    assert (tmp_path / "races" / "a" / "race-3.png").stat().st_size > 10_000


def test_remedies_are_those_of_the_command_line(tmp_path, capsys, monkeypatch, text):
    assert cli.main(["race", "--recipes", "bf16", "qfp8", "--steps", "4", *SMALL, *text]) == 2
    told = capsys.readouterr().err
    assert "with --lora 16" in told
    assert "No option of the command line allows a difference." in told
    assert "recipe.lora" not in told
    assert "allow=" not in told
    assert cli.main(["race", "--recipes", "bf16", "qfp8", "--lora", "16", "--steps", "4", *SMALL, *text]) == 0


def test_an_interrupted_command_says_what_can_be_done(tmp_path, capsys, monkeypatch, text):
    of_race = sk.race

    def interrupted(*entries, **options):
        def interrupt(session):
            if session.steps == 6:
                os.kill(os.getpid(), signal.SIGINT)
            return {}

        return of_race(*entries, **options, meters=[interrupt])

    monkeypatch.setattr(sk, "race", interrupted)
    command = ["race", "--steps", "12", "--turn-s", "1e-6", "--no-control", *SMALL, *text]
    assert cli.main([*command, "--run-dir", str(tmp_path / "race")]) == 130
    told = capsys.readouterr()
    assert (
        f"A new process cannot go on: python {tmp_path / 'race' / 'rerun.py'} races again from the start." in told.out
    )
    for where in (told.out, told.err):
        assert "go_on()" not in where
        assert "run()" not in where
    assert cli.main(command) == 130
    assert "Without --run-dir nothing of it was kept" in capsys.readouterr().out
    again = ["--run-dir", str(tmp_path / "again")]
    assert cli.main(["reproduce", str(tmp_path / "race"), *again]) == 2
    assert "is a race that did not come to its end (interrupted)" in capsys.readouterr().err
    assert not (tmp_path / "again").exists(), "it is told before anything is run"
    monkeypatch.setattr(sk, "race", of_race)
    assert cli.main([*command, "--run-dir", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(sk, "race", interrupted)
    assert cli.main(["reproduce", str(tmp_path / "whole"), *again]) == 130
    assert "surokit: interrupted" in capsys.readouterr().err
    monkeypatch.setattr("surokit.cli.reproduce.run_again", lambda command: 1)
    assert cli.main(["reproduce", str(tmp_path / "whole"), "--run-dir", str(tmp_path / "failed")]) == 2
    assert "An error ended the race when it was run again, so nothing is compared" in capsys.readouterr().err


def test_an_error_of_one_run_loses_neither_the_result_nor_the_command(tmp_path, capsys, monkeypatch, text):
    monkeypatch.setattr(sk, "race", failing(NonFiniteError("5 steps in a row\nwere not finite.")))
    command = ["race", "--steps", "12", "--turn-steps", "2", *SMALL, *text]
    picture = ["--plot", str(tmp_path / "race.png")]
    assert cli.main([*command, *picture, "--run-dir", str(tmp_path / "race")]) == 1
    told = capsys.readouterr()
    assert "bf16 again" in told.out
    assert "The race ended early (failed: NonFiniteError" in told.out
    assert told.err.splitlines()[-1] == "surokit: 5 steps in a row were not finite."
    assert (tmp_path / "race.png").stat().st_size > 10_000
    race = sk.Race.load(tmp_path / "race")
    assert race.command == [*command, *picture, "--run-dir", str(tmp_path / "race")]
    assert "from surokit.cli import main" in (tmp_path / "race" / "rerun.py").read_text(encoding="utf-8")


def test_an_error_that_is_no_users_keeps_its_traceback(capsys, monkeypatch, text):
    monkeypatch.setattr(sk, "race", failing(AssertionError()))
    with pytest.raises(AssertionError):
        cli.main(["race", "--steps", "12", "--turn-steps", "2", *SMALL, *text])
    told = capsys.readouterr()
    assert "The race ended early (failed: AssertionError" in told.out
    assert "surokit:" not in told.err


def test_work_that_turns_unequal_on_the_way_ends_a_race_that_had_begun(capsys, monkeypatch, text):
    of_race = sk.race

    class Shrinks:
        """Every second run gets shorter batches from its tenth step on."""

        def __init__(self, data):
            self.batches, self.runs = list(islice(data, 12)), 0

        def __iter__(self):
            self.runs += 1
            length = 8 if self.runs % 2 == 0 else 16
            yield from self.batches[:9]
            for batch in self.batches[9:]:
                yield {name: value[:, :length] for name, value in batch.items()}

    def shrinking(*entries, data, **options):
        return of_race(*entries, data=Shrinks(data), **options)

    monkeypatch.setattr(sk, "race", shrinking)
    assert cli.main(["race", "--steps", "12", "--turn-steps", "2", *SMALL, *text]) == 1
    told = capsys.readouterr()
    assert "The race ended early (failed: UnequalWork" in told.out
    last = told.err.splitlines()[-1]
    assert last.startswith("surokit: This is no equal work.")
    assert last.endswith("No option of the command line allows a difference.")


def test_a_command_that_is_interrupted_in_its_warm_up_can_be_run_again(tmp_path, capsys, monkeypatch, text):
    of_race = sk.race

    def interrupted(*entries, **options):
        def interrupt(session):
            raise KeyboardInterrupt

        return of_race(*entries, **options, meters=[interrupt])

    monkeypatch.setattr(sk, "race", interrupted)
    command = ["race", "--steps", "12", *SMALL, *text, "--run-dir", str(tmp_path / "race")]
    assert cli.main(command) == 130
    assert sk.Race.load(tmp_path / "race").command == command


def test_errors_are_one_line(capsys, monkeypatch, text):
    with monkeypatch.context() as patch:
        patch.setattr(
            sk, "train_tokenizer", lambda *_, **__: pytest.fail("a name is looked at before anything is made")
        )
        assert cli.main(["race", "--recipes", "fp88", "--steps", "4", *SMALL]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["race", "--minutes", "soon"]) == 2
    assert "'soon' is not a number" in capsys.readouterr().err
    assert cli.main(["race", "--steps", "0", *SMALL, *text]) == 2
    assert "steps=0: a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--plot a.xyz", "--plot a.xyz is no kind of picture that can be written: use .png, .svg or .pdf"),
        ("--plot nowhere/at/all.png", "No such file or directory: nowhere/at. Make that folder first"),
        ("--recipes bf16 bf16", "'bf16' stands there twice; give each recipe once (a twin of the first"),
        ("--recipes bf16 fp8 fp8", "'fp8' stands there twice; give each recipe once."),
        ("--recipes bf16,fp8", "separate names by spaces, as in --recipes bf16 fp8"),
        ("--recipes bf16, fp8", "separate names by spaces, as in --recipes bf16 fp8"),
        ("--model a", "--layers and --width are for a model of its own: leave them out beside --model a."),
        ("--recipe fp8", "unrecognized arguments: --recipe fp8; did you mean --recipes? (see surokit race --help)"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_made(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(sk, "train_tokenizer", lambda *_, **__: pytest.fail("something was made"))
    assert cli.main(["race", *arguments.split(), "--steps", "4", *SMALL]) == 2
    told = capsys.readouterr().err
    assert said in " ".join(told.replace(" --steps 4 " + " ".join(SMALL), "").split())
    assert told.count("\n") == 1


def test_a_recipe_with_several_products_of_others_races(monkeypatch, capsys, text):
    raced = []

    def race(recipes, **options):
        raced.append(recipes)
        return SimpleNamespace(run_dir=None, reason="done")

    monkeypatch.setattr(sk, "race", race)
    name = "fp4(grad_input=bf16, grad_weight=bf16)"
    assert cli.main(["race", "--recipes", "bf16", name, *SMALL, *text]) == 0
    assert raced == [{"bf16": sk.BF16, name: sk.FP4.but(grad_input=sk.BF16, grad_weight=sk.BF16)}]
    assert cli.main(["race", "--recipes", f"bf16,{name},fp8", *SMALL]) == 2
    assert f"separate names by spaces, as in --recipes bf16 {name} fp8." in capsys.readouterr().err


def test_a_model_of_its_own_has_heads_of_32(monkeypatch, capsys, text):
    shapes = []

    def race(recipes, *, model, **options):
        shapes.append((model.config.heads, model.config.kv_heads, model.config.head_dim))
        return SimpleNamespace(run_dir=None, reason="done")

    monkeypatch.setattr(sk, "race", race)
    for width in range(32, 385, 32):
        assert cli.main(["race", "--layers", "1", "--width", str(width), *text]) == 0
    assert shapes[:4] == [(1, 1, 32), (2, 1, 32), (3, 1, 32), (4, 2, 32)]
    assert [heads for heads, _, _ in shapes] == list(range(1, 13))
    assert {head_dim for _, _, head_dim in shapes} == {32}
    for wrong in ("100", "0", "64.5"):
        assert cli.main(["race", "--width", wrong, *text]) == 2
        said = f"--width {wrong} is no multiple of 32, the width of a head: give one, for example 128."
        assert said in capsys.readouterr().err


def test_its_words_are_those_of_the_function():
    known = vars(cli.make_parser().parse_args(["race"]))
    apart = {"entries", "data", "optimizer", "schedule", "eval", "live", "allow", "together", "predict", "like"}
    apart |= {"thread"}  # a command has no other cells
    names = set(inspect.signature(sk.race).parameters) - apart - {"session_settings"}
    assert names <= set(known)
