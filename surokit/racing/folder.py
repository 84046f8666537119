"""This module writes and reads a race as a folder that another person can read, and run again: race.json, a records.jsonl of
each run, rerun.py; and turn.json, how the race stands just now.

race.json holds the settings, the environment, and of each run its recipe, its work, every turn as it was timed, the prediction and
the held-out losses: all that the table is computed from. Models and data are not in it; digests of both are, so that a rerun says
where they are others.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surokit.optim.schedule import schedule_from_dict
from surokit.optim.spec import Spec, is_ours, spec_from_dict, spec_to_dict
from surokit.places import make_folder, write_whole
from surokit.racing.entries import folder_of
from surokit.racing.runs import Run, read_steps, write_steps
from surokit.recipe import BF16, Recipe
from surokit.widgets.folder import TURN

if TYPE_CHECKING:
    from surokit.racing.result import RaceResult

R = TypeVar("R", bound="RaceResult")

_VERSION = 1
_KEPT = ("accumulate", "seed", "control", "turn_s", "target_loss", "usd_per_gpu_hour", "allow", "predict")


def write(race: RaceResult, where: Path) -> Path:
    """Write the race into the folder `where`, replacing what is there file by file; return the folder."""
    make_folder(where, "folder of the race")
    for name, run in race.runs.items():
        records = where / folder_of(name) / "records.jsonl"
        records.parent.mkdir(exist_ok=True)
        # in its run_dir a race's own sessions write their records; one that was given writes elsewhere or nowhere, as its twin does
        given = (race.baseline if name == race.twin else name) in race.settings["sessions"]
        if where != race.run_dir or given or not records.exists():
            write_steps(run.steps, records)
    data = {
        "version": _VERSION,
        "baseline": race.baseline,
        "twin": race.twin,
        "reason": race.reason,
        "command": race.command,
        "settings": race.settings,
        "environment": race.environment,
        "notes": race.notes,
        "runs": [run.to_dict() for run in race.runs.values()],
        "folders": {name: folder_of(name) for name in race.runs},
        "table": _table(race),
    }
    write_whole(where / "race.json", json.dumps(data, indent=1, allow_nan=True))
    write_whole(where / "rerun.py", script(race))
    return where


def tell_turn(where: Path, runs: Iterable[str], state: str, round: int, turn: str) -> None:
    """Write turn.json, how a race that goes on stands, for `surokit.watch`; a disk that does not take it is no reason to stop."""
    said = {"runs": {name: folder_of(name) for name in runs}, "state": state, "round": round, "turn": turn}
    with suppress(OSError):
        write_whole(where / TURN, json.dumps(said))


def _table(race: RaceResult) -> list[str]:
    """Return the table for people who read the file; a loaded race computes its own."""
    return race.text().splitlines()


def read(kind: type[R], where: Path) -> R:
    """Read the race of a folder. FileNotFoundError or ValueError where there is none."""
    path = where / "race.json"
    if not path.is_file():
        raise FileNotFoundError(f"{where} holds no race: there is no race.json in it, which race.save() writes.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] > _VERSION:
            raise ValueError(f"it was written by a later version of surokit ({data['environment'].get('surokit')})")
        runs = {
            r["name"]: Run.from_dict(r, read_steps(where / folder_of(r["name"]) / "records.jsonl"))
            for r in data["runs"]
        }
        race = kind(
            runs,
            data["baseline"],
            data["twin"],
            data["settings"],
            run_dir=where,
            environment=data["environment"],
            notes=data["notes"],
            reason=data["reason"],
        )
        race.command = data["command"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a race: {error}.") from error
    return race


def arguments_of(race: RaceResult, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `race` that run the same race again, with `changes`; all but its model and data.

    ValueError where the folder does not hold one of them and `changes` does not give it.
    """
    settings = race.settings
    if settings["sessions"] and "entries" not in changes:
        raise ValueError(
            f"{settings['sessions'][0]!r} was a session of its own, which a folder does not hold: make it again, and call "
            "surokit.race() as its race was called."
        )
    entries = {
        name: BF16 if run.recipe is None else Recipe.from_dict(run.recipe)
        for name, run in race.runs.items()
        if name != race.twin
    }
    given: dict[str, Any] = {name: settings[name] for name in _KEPT}
    given |= {"steps": min(len(run.steps) for run in race.runs.values()), "turn_s": settings["turn_s"] or _turn_s(race)}
    if settings.get("turn_steps") is not None:
        given |= {"turn_steps": settings["turn_steps"], "turn_s": None}
    if settings.get("until") is not None and "until" not in changes:
        from surokit.racing.goal import Goal

        steps = settings["steps"] or max(len(run.steps) for run in race.runs.values())
        given |= {"until": Goal.from_dict(settings["until"]), "steps": steps}
    if changes.get("minutes") is not None:  # else the steps of then would end it before
        del given["steps"]
    for one, other in (("turn_s", "turn_steps"), ("turn_steps", "turn_s")):
        if changes.get(one) is not None:  # both say how long a turn is
            given.pop(other, None)
    given |= changes
    try:
        if "optimizer" not in changes:
            given["optimizer"] = spec_from_dict(settings["optimizer"])
        if "schedule" not in changes:
            given["schedule"] = schedule_from_dict(settings["schedule"])
    except ValueError as error:
        raise ValueError(f"The folder does not hold everything that the race was run with. {error}") from error
    for name, value in settings["session"].items():
        if isinstance(value, dict) and "custom" in value and name not in changes:
            raise ValueError(
                f"The race was run with {name}={value['custom']}, which a folder does not hold: rerun({name}=...)."
            )
        given.setdefault(name, value)
    return {"entries": entries, **given}


def _turn_s(race: RaceResult) -> float | None:
    """Return the median time of the turns; None where there are none."""
    seconds = sorted(turn.seconds for run in race.runs.values() for turn in run.whole_turns)
    return seconds[len(seconds) // 2] if seconds else None


def script(race: RaceResult) -> str:
    """Return the text of rerun.py: the exact command where there was one, else a script to fill in."""
    if race.command:
        return _command_again(race)
    work = race.runs[race.baseline].work
    held_out = any(run.held_out for run in race.runs.values())
    eval_then = "# then: the batches that the held-out loss is taken on\neval = ...\n" * held_out
    given = f"model=model, data=data{', eval=eval' * held_out}"
    return (
        '"""Runs the race of this folder again, and shows both tables. Weights and batches are compared with those of then."""\n\n'
        "from pathlib import Path\n\nimport surokit as sk\n\n"
        f"# then: {_one_line(work.get('model'))}, of which {work.get('parameters')} parameters train; "
        f"their digest is {work.get('weights')}\n"
        "model = ...\n"
        f"# then: the fingerprint {work.get('data')}\n"
        f"data = ...\n{eval_then}\n"
        f"saved = sk.Race.load(Path(__file__).parent)\nprint(saved)\nprint(saved.rerun({given}))\n"
    )


def words_again(race: RaceResult) -> list[str]:
    """Return the words of the command that ran a race, without where its results go; one with a goal has the turns of then."""
    assert race.command
    words, turn_steps = without_options(race.command, "--run-dir", "--plot"), race.settings.get("turn_steps")
    if turn_steps is None:
        return words
    return [*without_options(words, "--turn-s", "--turn-steps"), "--turn-steps", str(turn_steps)]


def _command_again(race: RaceResult) -> str:
    """Return a script that gives a race's command again. It can be started anywhere, writes beside the folder that it lies in
    (Session's rule for one that is taken), and a picture under a name that is free."""
    command, rest = race.command or [], words_again(race)
    _, pictures = _without(command, "--plot")
    words = textwrap.wrap(" ".join(["surokit", *command]), 110, break_long_words=False, break_on_hyphens=False)
    lines = ['"""Runs the race of this folder again:', "", *words, '"""', ""]
    lines += ["from itertools import count"] * bool(pictures)
    lines += ["from pathlib import Path", "", "from surokit.cli import main", ""]
    lines += ["here = Path(__file__).resolve().parent"]
    lines += ["command = [", *(f"    {json.dumps(word)}," for word in [*rest, "--run-dir"]), "    str(here),", "]"]
    if pictures:
        plot = Path(pictures[-1])
        stem, suffix = json.dumps(plot.stem), json.dumps(plot.suffix)
        lines += [
            f'pictures = (here / ({stem} + f"-{{number}}" + {suffix}) for number in count(2))',
            'command += ["--plot", str(next(path for path in pictures if not path.exists()))]',
        ]
    return "\n".join([*lines, "raise SystemExit(main(command))", ""])


def without_options(command: list[str], *options: str) -> list[str]:
    """Return a command's words without these options and their values."""
    for option in options:
        command, _ = _without(command, option)
    return command


def _without(command: list[str], option: str) -> tuple[list[str], list[str]]:
    """Return the arguments without that option, and its values."""
    rest, values, words = [], [], iter(command)
    for word in words:
        if word == option:
            values.append(next(words))
        elif word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, values


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def plain(value: Any) -> Any:
    """Return a setting as JSON can hold it: what it cannot is told by its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and not value:
        return []
    return {"custom": repr(value)}


def optimizer_to_dict(optimizer: Any) -> dict[str, Any]:
    """Return a specification of one of our optimizers as data; anything else by its name."""
    if isinstance(optimizer, Spec) and is_ours(optimizer.optimizer):
        return spec_to_dict(optimizer, None)  # type: ignore[arg-type]  # that one is asked for a name only
    return {"name": getattr(optimizer, "__name__", repr(optimizer)), "custom": True}
