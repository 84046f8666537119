"""Describe how a cell computes, and make the grid of settings: each switch alone, then all together, for each amount of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal, get_args

from surokit.fusion import Fusion, Recompute
from surokit.optim.spec import Spec
from surokit.recipe import Recipe, find_recipe

Engine = Literal["surokit", "transformers", "trainer", "deepspeed"]
What = Literal["train", "tune", "infer"]
Backend = Literal["auto", "math", "flash", "efficient", "cudnn", "eager", "sdpa"]
OPTIMIZERS = ("adamw", "adamw8bit", "muon", "sgd", "offloadadamw", "zenflow")
STAGES = (0, 2, 3)
RANK = 16  # of an adapter, where tuning does not say
LARGEST = "largest"


@dataclass(frozen=True)
class Setting:
    """A Setting is how one cell of a dissection computes; every field is a switch that `dissect(over=...)` knows.

    engine: "surokit"; "transformers", whose model is trained in a plain loop, with PEFT's adapters and bitsandbytes' 4 bits;
        "trainer", which is its Trainer; "deepspeed", whose engine trains the model of transformers.
    recipe: a recipe or its name. lora: the rank of an adapter, 0 trains all weights.
    recompute: "none", "selective" (outputs of norm and gate; for our layers it needs fusion="fused") or "full" (each layer).
    attention: whose kernels compute attention: "auto" as the model does; "math" holds all scores; "flash", "efficient", "cudnn" are
        torch's; "eager" and "sdpa" choose an implementation of transformers' models.
    fusion: "none", "fused", or a Fusion. optimizer: one of OPTIMIZERS, or a specification such as surokit.AdamW(lr=1e-3).
    offload_weights, offload_activations: kept on the host (surokit.offload_weights, surokit.offload_activations).
    zero: ZeRO's stage, 0 (copies), 2 or 3. compile: torch.compile.

    The amount of work: model (its name, where there are several sizes), batch (sequences of each process, or "largest"), length
    (tokens of each), accumulate (batches a step), gpus (processes that train together, each on a GPU or a share of the CPU, on a
    batch of its own).
    """

    model: str = ""
    batch: int | Literal["largest"] = 1
    length: int = 0
    accumulate: int = 1
    engine: Engine = "surokit"
    recipe: Recipe | str = "bf16"
    lora: int = 0
    recompute: Recompute = "none"
    attention: Backend = "auto"
    fusion: Fusion | Literal["none", "fused"] = "none"
    optimizer: Any = "adamw"
    offload_weights: bool = False
    offload_activations: bool = False
    gpus: int = 1
    zero: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise ValueError(f"dissect(over={{{name!r}: {value!r}}}): {name} is one of {', '.join(known)}.")
        for name in ("batch", "length", "accumulate", "gpus", "lora", "zero"):
            value, least = getattr(self, name), 0 if name in ("lora", "zero", "length") else 1
            if name == "batch" and value == LARGEST:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = f", or {LARGEST!r}" * (name == "batch")
                raise ValueError(
                    f"dissect(over={{{name!r}: {value!r}}}): {name} is a whole number of at least {least}{also}."
                )
        if self.zero not in STAGES:
            raise ValueError(
                f"dissect(over={{'zero': {self.zero}}}): ZeRO's stage is one of {', '.join(map(str, STAGES))}."
            )
        for name in ("offload_weights", "offload_activations", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"dissect(over={{{name!r}: {getattr(self, name)!r}}}): {name} is True or False.")
        if not isinstance(self.optimizer, str | Spec):
            raise ValueError(
                f"dissect(over={{'optimizer': {self.optimizer!r}}}): optimizer is one of {', '.join(OPTIMIZERS)}, or a "
                "specification such as surokit.AdamW(lr=1e-3)."
            )
        find_recipe(self.recipe)

    @property
    def on_host(self) -> bool:
        """Return whether the optimizer named computes on the host."""
        return self.optimizer in ("offloadadamw", "zenflow")

    @property
    def full_recipe(self) -> Recipe:
        """Return the recipe with an adapter of this rank, or without one where the rank is 0."""
        recipe = find_recipe(self.recipe)
        return recipe.lora(rank=self.lora) if self.lora else replace(recipe, adapter=None)

    @property
    def full_fusion(self) -> Fusion:
        """Return the Fusion, with what backward computes again."""
        if isinstance(self.fusion, Fusion):
            return self.fusion if self.recompute == "none" else replace(self.fusion, recompute=self.recompute)
        return replace(Fusion() if self.fusion == "fused" else Fusion.OFF, recompute=self.recompute)

    def labels(self) -> dict[str, Any]:
        """Return every switch with its value as a number, a bool or text."""
        return {field.name: label_of(getattr(self, field.name)) for field in fields(self)}

    def check(self, what: What) -> None:
        """Raise ValueError where two settings contradict each other, and name both."""
        for first, second, why in _contradictions(self, what):
            raise ValueError(f"{first} and {second} contradict each other: {why}.")


#: Switches that change how much is computed, and so cross with all others.
WORK = ("model", "batch", "length", "accumulate", "gpus")
_CHOICES: dict[str, Sequence[str]] = {
    "engine": get_args(Engine),
    "recompute": get_args(Recompute),
    "attention": get_args(Backend),
    "fusion": ("none", "fused"),
    "optimizer": OPTIMIZERS,
}


def _contradictions(s: Setting, what: What) -> Iterator[tuple[str, str, str]]:
    """Yield two settings that contradict each other, and why."""

    def named(switch: str) -> str:
        return f"{switch}={label_of(getattr(s, switch))}"

    if what == "train" and s.lora:
        yield named("lora"), "what='train'", "an adapter is fine-tuning, which is what='tune'"
    if what == "infer":
        for switch in _OF_TRAINING:
            if getattr(s, switch) != getattr(_DEFAULT, switch):
                yield named(switch), "what='infer'", "it is a switch of training"
    if what == "infer" and s.engine != "surokit":
        yield named("engine"), "what='infer'", "the steps of its generate() cannot be taken one by one"
    if s.engine != "surokit":
        for switch, taken in _THEIRS[s.engine].items():
            if label_of(getattr(s, switch)) not in taken:
                yield named("engine"), named(switch), f"it has {switch}={' or '.join(map(str, taken))} here"
    if s.engine == "deepspeed":
        if s.batch == LARGEST:
            yield named("engine"), named("batch"), "after a step that runs out of memory its engine takes no other"
        if s.optimizer == "zenflow" and s.zero == 3:
            yield named("optimizer"), named("zero"), "DeepSpeed's ZenFlow is taken with zero=2 here"
        if s.optimizer == "zenflow" and s.accumulate > 1:
            why = "in DeepSpeed's ZenFlow every batch is a step, so make batches larger"
            yield named("optimizer"), named("accumulate"), why
    if what != "infer" and find_recipe(s.recipe).storage and not s.lora:
        why = "its stored weights do not train, so give an adapter, as what='tune' does"
        yield named("recipe"), named("lora"), why
    if s.recompute == "selective" and s.fusion == "none":
        why = "outputs of norm and gate are computed again where they are fused with what reads them"
        yield named("recompute"), named("fusion"), why
    if s.offload_weights and s.recompute == "full":
        why = "a block whose weights are fetched is computed again in any case, so leave recompute out"
        yield named("offload_weights"), named("recompute"), why
    if s.offload_activations and s.recompute == "full":
        why = "what is computed again is not kept, so there is nothing to move"
        yield named("offload_activations"), named("recompute"), why
    for moved in ("offload_weights", "offload_activations"):
        if getattr(s, moved) and s.gpus > 1:
            yield named(moved), named("gpus"), "it works in one process"
        if getattr(s, moved) and s.compile:
            yield named(moved), named("compile"), "hooks that copy are not compiled"
    if s.zero and s.gpus == 1:
        yield named("zero"), named("gpus"), "it divides among several processes what each would hold"
    if s.zero and s.compile:
        yield named("zero"), named("compile"), "a divided model is not compiled here"
    optimizer = s.optimizer if isinstance(s.optimizer, str) else s.optimizer.optimizer.__name__.lower()
    if optimizer == "zenflow" and s.compile:
        yield named("optimizer"), named("compile"), "it reads gradients while they are made"


_DEFAULT = Setting()
#: What another engine takes of each switch; what is not named is taken as it is.
_THEIRS: dict[str, dict[str, tuple[Any, ...]]] = {
    "transformers": {
        "recipe": ("bf16", "qnf4"),
        "recompute": ("none", "full"),
        "fusion": ("none",),
        "optimizer": ("adamw", "adamw8bit", "sgd"),
        "offload_weights": (False,),
        "offload_activations": (False,),
        "gpus": (1,),
        "zero": (0,),
    }
}
_THEIRS["trainer"] = {**_THEIRS["transformers"], "optimizer": ("adamw", "sgd"), "compile": (False,)}
_THEIRS["deepspeed"] = {
    **{switch: taken for switch, taken in _THEIRS["trainer"].items() if switch not in ("gpus", "zero")},
    "recipe": ("bf16",),
    "optimizer": ("adamw", "offloadadamw", "zenflow"),
}
_OF_TRAINING = ("lora", "recompute", "optimizer", "offload_activations", "gpus", "zero", "accumulate", "compile")


def label_of(value: Any) -> Any:
    """Return a switch's value as a number, a bool or text; a recipe by its name, with what sets it apart from the known one."""
    if isinstance(value, bool | int | str):
        return value
    if not isinstance(value, Recipe):
        return str(value) if isinstance(value, Fusion) else repr(value)
    try:
        known = find_recipe(value.name)
    except ValueError:
        known = value
    other = [field.name for field in fields(value) if getattr(value, field.name) != getattr(known, field.name)]
    said = ", ".join(f"{name}={getattr(value, name)}" for name in other)
    return f"{value.name} ({said})" if said else value.name


# -- the grid


@dataclass(frozen=True)
class Asked:
    """An Asked is a cell that shall be measured. name: the switches in which it differs from the baseline; refused: why it cannot
    be."""

    name: str
    setting: Setting
    refused: str = ""


def grid(over: Mapping[str, Any], what: What, base: Setting, together: bool | Literal["all"] = True) -> list[Asked]:
    """Make the cells: for each amount of work the baseline, each switch alone, and all together.

    over: switch -> its values, the first being the baseline's; one value alone is set against the default. together: True adds
    the cell in which every switch has its last value, "all" every combination.

    ValueError for a switch or a value that is not known, and where the baseline or a switch alone contradicts itself; a
    combination that does is refused in its cell.
    """
    known = [field.name for field in fields(Setting)]
    if strange := [name for name in over if name not in known]:
        raise ValueError(f"dissect(over=...) has no switch {strange[0]!r}: it knows {', '.join(known)}.")
    axes = {name: _values(name, given, getattr(base, name)) for name, given in over.items()}
    base = replace(base, **{name: values[0] for name, values in axes.items()})
    base.check(what)
    works = {name: values for name, values in axes.items() if name in WORK}
    switches = {name: values for name, values in axes.items() if name not in WORK}
    changes: dict[str, dict[str, Any]] = {"": {}}
    changes |= {_said({name: value}): {name: value} for name, values in switches.items() for value in values[1:]}
    if together == "all":
        for values in product(*switches.values()):
            change = {name: value for name, value in zip(switches, values) if value != switches[name][0]}
            changes[_said(change)] = change
    elif together and len(switches) > 1:
        changes[TOGETHER] = {name: values[-1] for name, values in switches.items() if values[-1] != values[0]}
    cells: dict[str, Asked] = {}
    for values in product(*works.values()):
        work = dict(zip(works, values))
        for said, change in changes.items():
            setting = replace(base, **work, **change)
            where = _said({k: v for k, v in work.items() if v != works[k][0]})
            name = ", ".join(filter(None, (where, said))) or BASELINE
            refused = ""
            try:
                setting.check(what)
            except ValueError as error:
                if len(change) < 2:
                    raise
                refused = str(error)
            cells.setdefault(name, Asked(name, setting, refused))
    return list(cells.values())


def _values(name: str, given: Any, default: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = (default, given)
    values: tuple[Any, ...] = ()
    for value in given:
        if value not in values:  # compared, as a specification has no hash
            values += (value,)
    if not values:
        raise ValueError(f"dissect(over={{{name!r}: ...}}): give one value or more.")
    labels = [label_of(value) for value in values]
    if double := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(
            f"dissect(over={{{name!r}: ...}}): two values are called {double!r}, and a cell has one name: give one of them another "
            "name, a recipe with dataclasses.replace(recipe, name=...)."
        )
    return values


def _said(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={label_of(value)}" for name, value in changes.items())


BASELINE, TOGETHER = "baseline", "all together"

__all__ = [
    "BASELINE",
    "LARGEST",
    "OPTIMIZERS",
    "RANK",
    "TOGETHER",
    "WORK",
    "Asked",
    "Setting",
    "What",
    "grid",
    "label_of",
]
