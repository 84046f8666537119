"""Run `surokit race`: the arguments of `sk.race` under their own names, and a model and a text where none is given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.cli.options import Parser, check_picture, number, split_at_commas

if TYPE_CHECKING:
    from surokit.racing.comparability import Difference
    from surokit.racing.start import Race
    from surokit.recipe import Init, Recipe


def add(commands: Any) -> None:
    """Add the command and its arguments."""
    race = commands.add_parser("race", help="race recipes on this machine, in turns", allow_abbrev=False)
    race.add_argument("--recipes", nargs="+", default=["bf16", "fp8"], metavar="NAME", help="the first is the baseline")
    race.add_argument("--lora", type=number, metavar="RANK", help="train an adapter over every recipe's frozen base")
    race.add_argument(
        "--lora-init",
        choices=("kaiming", "loftq"),
        help="how adapters begin: kaiming, or over stored weights with their quantization error (kaiming)",
    )
    race.add_argument(
        "--model", metavar="FOLDER", help="a folder or a model of the Hub; a small one of its own without"
    )
    text = race.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="FILE", help="what to train on; a built-in text without")
    text.add_argument(
        "--stories",
        type=number,
        metavar="N",
        help="train on so many characters of generated stories: in a long race none is seen twice",
    )
    for name, what in {
        "--minutes": "of the race, after its warm-up; 1 without --steps",
        "--steps": "of each run",
        "--batch": "sequences a batch (8)",
        "--length": "tokens a sequence (128)",
        "--accumulate": "batches a step (1)",
        "--layers": "of a model of its own (4)",
        "--width": "of a model of its own (128), a multiple of 32",
        "--lr": "learning rate (1e-3)",
        "--seed": "of everything that is drawn (0)",
        "--turn-s": "seconds of a turn",
        "--turn-steps": "or its steps",
        "--target-loss": "time to this loss is told",
        "--usd-per-gpu-hour": "price",
    }.items():
        race.add_argument(name, type=number, help=what, metavar="N")
    race.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of every run (adamw)")
    race.add_argument("--until", type=_loss, metavar="LOSS", help="held-out loss that every run trains to")
    race.add_argument("--no-control", dest="control", action="store_false", help="without the baseline's twin")
    race.add_argument("--run-dir", type=Path, metavar="FOLDER", help="keep everything there, to be run again")
    race.add_argument("--plot", type=Path, metavar="FILE", help="the picture: .png, .svg or .pdf")
    race.set_defaults(run=run, says_where=True)


def _loss(text: str) -> float:
    try:
        return number(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no held-out loss: write a number, as 3.2. A race to an accuracy on a task is one in Python, "
            "surokit.race(..., until=surokit.Goal(0.9, task))"
        ) from None


def run(arguments: argparse.Namespace) -> int:
    """Run a race and print it: 0 where it came to its end, 1 where an error ended it, 130 where it was stopped."""
    import torch

    import surokit as sk
    from surokit import texts
    from surokit.errors import OffloadError
    from surokit.recipe import find_recipe
    from surokit.train.errors import NonFiniteError

    _check_names(arguments.recipes)
    _check_shape(arguments)
    check_picture(arguments.plot)
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    lr, seed, length = given.get("lr", 1e-3), given.get("seed", 0), given.get("length", 128)
    recipes = {name: find_recipe(name) for name in arguments.recipes}
    source = arguments.text or texts.SHAKESPEARE if arguments.stories is None else sk.stories(arguments.stories)
    if arguments.lora is not None or arguments.lora_init is not None:
        recipes = _with_adapters(recipes, arguments.lora, arguments.lora_init)
    if arguments.model is not None:
        model = sk.load(arguments.model, dtype=torch.bfloat16, device=None)
        tokenizer = sk.load_tokenizer(arguments.model)
    else:
        width, layers = given.get("width", 128), given.get("layers", 4)
        tokenizer = sk.train_tokenizer(source if arguments.stories is None else sk.stories(1_000_000), vocab_size=1024)
        heads, pairs = width // 32, max(1, width // 64)
        shape = {"heads": heads, "kv_heads": heads if heads % pairs else pairs, "ffn": 3 * width, "vocab": 1024}
        torch.manual_seed(seed)
        config = sk.DecoderConfig(layers=layers, width=width, max_length=length, **shape)
        model = sk.Decoder(config, dtype=torch.bfloat16).to("cuda" if torch.cuda.is_available() else "cpu")
    train, held_out = sk.text(source, tokenizer, length=length, batch=given.get("batch", 8), seed=seed).split(
        held_out=0.01
    )
    named = (
        "minutes",
        "steps",
        "accumulate",
        "seed",
        "turn_s",
        "turn_steps",
        "target_loss",
        "until",
        "usd_per_gpu_hour",
        "control",
        "run_dir",
    )
    options = {name: given[name] for name in named if name in given}
    if "steps" not in options:
        options.setdefault("minutes", 1)
    if arguments.lora_init == "loftq":
        options["allow"] = ("weights",)  # each storage loses something else, with which its adapters begin
    options["command"] = _from_anywhere(arguments.argv)
    users = (ValueError, TypeError, OSError, ImportError, NonFiniteError, OffloadError, torch.OutOfMemoryError)
    try:
        optimizer = {"adamw": sk.AdamW, "muon": sk.Muon}[arguments.optimizer](lr=lr)
        race = sk.race(recipes, model=model, data=train, eval=held_out, optimizer=optimizer, **options)
    except Exception as error:
        ended, said = getattr(error, "race", None), str(error)
        if isinstance(error, sk.racing.UnequalWork):
            said = _unequal(error.differences)
            if ended is None or not any(run.turns for run in ended.runs.values()):  # it could not begin
                raise ValueError(said) from error
        if ended is None:  # there is none yet
            raise
        _show(ended, arguments)
        if not isinstance(error, users):  # a fault of ours, which its traceback shows
            raise
        print(f"surokit: {' '.join(said.split())}", file=sys.stderr)
        return 1
    _show(race, arguments)
    return 0 if race.reason == "done" else 130


def _show(race: Race, arguments: argparse.Namespace) -> None:
    """Print a race and where it is kept, before anything that is said of its error, and draw it where a picture is asked for."""
    print(race, flush=True)
    if arguments.says_where and race.run_dir is not None:
        print(f"Kept in {race.run_dir}.", flush=True)
    if arguments.plot is not None:
        race.plot().savefig(arguments.plot, dpi=150)


def run_again(argv: Sequence[str]) -> int:
    """Run the command line of an earlier race; the caller says where it is kept, if it is."""
    parser = Parser(prog="surokit")
    add(parser.add_subparsers())
    arguments = parser.parse_args(argv)
    arguments.argv, arguments.says_where = list(argv), False
    return run(arguments)


def _with_adapters(recipes: Mapping[str, Recipe], rank: int | None, init: Init | None) -> dict[str, Recipe]:
    """Return the recipes with an adapter of this rank, initialized so where they store weights; without a rank, those that have one
    keep its rank."""
    if init == "loftq" and not any(recipe.storage for recipe in recipes.values()):
        raise ValueError(
            f"--lora-init loftq is for recipes that store weights, and {', '.join(recipes)} stores none: race qfp8 or qnf4 too."
        )
    adapted = dict(recipes)
    for name, recipe in recipes.items():
        own = recipe.adapter.rank if rank is None and recipe.adapter else rank
        if own is not None:
            adapted[name] = recipe.lora(own, init=init if init and recipe.storage else "kaiming")
    return adapted


def _check_names(names: Sequence[str]) -> None:
    """A name is a run: none is given twice, and a comma stands in none but between the products of one, within parentheses."""
    if any(len(split_at_commas(name)) > 1 for name in names):
        apart = " ".join(filter(None, split_at_commas(" ".join(names))))
        raise ValueError(f"--recipes {' '.join(names)}: separate names by spaces, as in --recipes {apart}.")
    if double := next((name for name in names if names.count(name) > 1), None):
        twin = " (a twin of the first races anyway, as the control)" * (double == names[0])
        raise ValueError(f"--recipes {' '.join(names)}: {double!r} stands there twice; give each recipe once{twin}.")


def _check_shape(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a width that no heads of 32 fill, and for a shape beside a model that is given."""
    width = arguments.width
    if arguments.model is not None and (arguments.layers or width):
        raise ValueError(
            f"--layers and --width are for a model of its own: leave them out beside --model {arguments.model}."
        )
    if width is not None and (width < 32 or width % 32):
        raise ValueError(f"--width {width} is no multiple of 32, the width of a head: give one, for example 128.")


def _unequal(found: Sequence[Difference]) -> str:
    """Return what differs, with the remedies that there are on the command line."""
    said = [f"{each.text}." if each.name == "parameters" else str(each) for each in found]
    if any(each.name == "parameters" for each in found):
        said.append("Train an adapter over every recipe's base with --lora 16, or leave out recipes that freeze it.")
    return f"This is no equal work. {' '.join(said)} No option of the command line allows a difference."


def _from_anywhere(argv: Sequence[str]) -> list[str]:
    """Return the command, with absolute paths of a model and a text that lie here."""
    found: list[str] = []
    for before, word in zip(["", *argv], argv):
        option, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        here = option in ("--model", "--text") and value and Path(value).exists()
        found.append(word.removesuffix(value) + str(Path(value).resolve()) if here else word)
    return found
