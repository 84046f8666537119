"""This module checks for equal work: what two runs must share before their speeds and losses may be compared. Every difference
is put in a sentence.

Only the recipe may differ, which is the question. Whatever else does is refused by name, unless it is allowed by that name; then
the table says so. What is compared before the first step stands in `SessionWork`; tokens a step and the batches themselves are
compared as the steps happen (`Order`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from surokit.applied import fusion_of
from surokit.fusion import Fusion
from surokit.nn.linear import Linear
from surokit.racing.runs import optimizer_in_short
from surokit.train import Session
from surokit.train.stream import Batch, Stream, check_batch, fingerprint

_CHUNK = 1 << 24  # elements hashed at a time
_FACTORS = (*range(200), *range(200, 5000, 100), 10_000, 100_000)  # steps at which schedules are compared


@dataclass(frozen=True)
class SessionWork:
    """A SessionWork describes what a session is about to do in each step.

    weights: a digest of what it trains, before the first step. frozen: digests of what it does not train, by parameter and how
    that is stored: only what two models store alike can be compared.
    """

    device: str
    model: str
    parameters: int
    dtype: str
    weights: str
    frozen: Mapping[str, str]
    steps: int
    accumulate: int
    optimizer: str
    schedule: tuple[float, ...]
    schedule_name: str
    clip: float | None
    seed: int
    data: str | None
    held_out: str | None
    recompute: str
    fusion: str
    compile: str
    graphs: str
    meters: str


@dataclass(frozen=True)
class Difference:
    """A Difference is one thing that a run and the baseline do not share. name: the one that `allow` takes."""

    name: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}."


#: name -> (how a value is put, remedy); a field of SessionWork, or found while running.
_QUESTIONS: dict[str, tuple[Callable[[Any], str], str]] = {
    "device": ("runs on {}".format, "put both models on one device"),
    "model": ("has a {}".format, "race the same architecture"),
    "parameters": (
        lambda n: f"trains {n:,} parameters",
        "full training against an adapter compares two kinds of training, so give both the same, for example with recipe.lora()",
    ),
    "dtype": ("trains {}".format, "load both models in the same dtype"),
    "weights": (
        "starts from the weights {}".format,
        "start all from the same weights, with session.fork() for example",
    ),
    "frozen": ("keeps the frozen weight {}".format, "train all over the same base"),
    "steps": (lambda n: f"has done {n:,} steps", "start all at the same step"),
    "accumulate": ("takes {} batches a step".format, "give all the same accumulate="),
    "optimizer": ("is trained by {}".format, "give all the same optimizer"),
    "schedule": ("has the schedule {}".format, "give all the same schedule"),
    "clip": ("clips at {}".format, "give all the same clip="),
    "seed": ("has the seed {}".format, "give all the same seed="),
    "data": ("reads the data {}".format, "give all the same source, with the same order and position"),
    "held_out": ("is evaluated on {}".format, "give all the same eval="),
    "recompute": ("computes again in backward: {}".format, "give all the same recompute"),
    "fusion": ("fuses: {}".format, "fuse all in the same way, with surokit.fuse()"),
    "compile": ("has compile={}".format, "give all the same compile="),
    "graphs": ("has graphs={}".format, "give all the same graphs="),
    "meters": ("has the meters {}".format, "give all the same meters="),
    "tokens": (lambda n: f"takes {n:,} tokens a step", "give all the same batch and length"),
    "batches": ("gets the batch {}".format, "give all the same data in the same order"),
}
NAMES = tuple(_QUESTIONS)


class UnequalWork(ValueError):
    """Two runs of a race do not do the same work; `differences` names what differs."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        names = ", ".join(repr(d.name) for d in differences)
        comma = "," if len(differences) == 1 else ""
        super().__init__(
            f"This is no equal work. {' '.join(map(str, differences))} If that is what you want to compare: allow=({names}{comma})."
        )


def work_of(session: Session) -> SessionWork:
    """Return what can be compared of a session before it makes a step; waits for the device."""
    trained = [p for p in session.model.parameters() if p.requires_grad]
    fusion = fusion_of(session.model)
    config = getattr(session.model, "config", None)
    sizes = "" if config is None else f" {_sizes(config)}"
    schedule = session.schedule
    return SessionWork(
        device=str(session.device),
        model=f"{type(session.model).__name__}{sizes}",
        parameters=sum(p.numel() for p in trained),
        dtype=" and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        weights=digest_of(trained),
        frozen=_frozen(session.model),
        steps=session.steps,
        accumulate=session.accumulate,
        optimizer=optimizer_words(session.optimizer, session.engine.base_rates),
        schedule=() if schedule is None else tuple(round(float(schedule(step)), 9) for step in _FACTORS),
        schedule_name=repr(schedule),
        clip=session.clip,
        seed=session.seed,
        data=session.data.fingerprint,
        held_out=None if session.eval is None else fingerprint(session.eval) or "unknown",
        recompute=_recompute(session.model, fusion),
        fusion="as the device has it" if fusion is None else str(replace(fusion, recompute="none")),
        compile=repr(session.compile),
        graphs="on where they can be" if session.engine.wants_graphs else "off",
        meters=", ".join(sorted(_name(meter) for meter in session.measuring.meters)) or "none",
    )


def differences(name: str, own: SessionWork, base_name: str, base: SessionWork) -> list[Difference]:
    """Return everything in which `own` differs from the baseline's work."""
    found = []
    for field in fields(SessionWork):
        a, b = getattr(own, field.name), getattr(base, field.name)
        if field.name == "schedule_name" or a == b:
            continue
        if field.name == "schedule":
            a, b = own.schedule_name, base.schedule_name
        if field.name == "frozen":
            other = next((weight for weight in a if weight in b and a[weight] != b[weight]), None)
            if other is None:
                continue
            a, b = (f"{other}, {each[other]}" for each in (a, b))
        options = _options_that_differ(a, b) if field.name == "optimizer" else ""
        if field.name == "optimizer" and not options:
            a, b = optimizer_in_short(a), optimizer_in_short(b)
        found.append(difference(field.name, name, a, base_name, b))
        if options:
            text = f"{name!r} is trained with other options than {base_name!r}, {options}"
            found[-1] = replace(found[-1], text=text)
    if own.parameters != base.parameters:  # differences that follow from that one are not told
        kinds = [work.optimizer.rstrip(")").split("; ")[0] for work in (own, base)]
        implied = {"weights", *(["optimizer"] if kinds[0] == kinds[1] else [])}
        found = [d for d in found if d.name not in implied]
    return found


def not_as_before(name: str, own: SessionWork, before: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of weights and data from those of a saved race."""
    now = work_to_dict(own)
    return [
        difference(what, name, now[what], f"{name} in the saved race", before.get(what))
        for what in ("parameters", "weights", "frozen", "data")
        if now[what] != before.get(what)
    ]


def difference(what: str, name: str, own: Any, base_name: str, base: Any) -> Difference:
    put, remedy = _QUESTIONS[what]
    return Difference(what, f"{name!r} {put(own)} and {base_name!r} {put(base)}", remedy)


def check_allowed(allow: Iterable[str]) -> tuple[str, ...]:
    """Return the allowed names as a tuple; ValueError for a name that no difference has."""
    if isinstance(allow, str):
        allow = (allow,)
    names = tuple(allow)
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"race(allow=...) does not know {unknown[0]!r}: a difference is called {', '.join(NAMES)}.")
    return names


def refuse(found: Sequence[Difference], allow: Sequence[str]) -> list[str]:
    """Raise UnequalWork for differences that are not allowed; return the others as sentences for the table."""
    if refused := [d for d in found if d.name not in allow]:
        raise UnequalWork(refused)
    return [d.text for d in found]


def work_to_dict(work: SessionWork) -> dict[str, Any]:
    """Return the work as a folder keeps it: with one digest of all that is frozen."""
    kept = {name: value for name, value in asdict(work).items() if name != "schedule"}
    return kept | {"frozen": hashlib.blake2b(repr(sorted(work.frozen.items())).encode(), digest_size=4).hexdigest()}


# -- batches as they are drawn


class Order:
    """An Order keeps digests of the batches that runs get: each step is compared with that of the run that came to it first.

    A batch on the device is looked at in the first `looks` steps of each run only, because that waits.
    """

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self._seen: dict[int, tuple[str, str, int]] = {}  # step -> the run that came to it first, digest and tokens
        self._own: dict[str, dict[int, tuple[str, int]]] = {}
        self._looked: dict[str, int] = {}  # steps
        self.combined: dict[str, str] = {}  # a digest of all batches so far

    @contextmanager
    def following(self, name: str, session: Session) -> Iterator[None]:
        """Note the batches that the session draws in the block; a step that did not happen draws its batches again."""

        def note(batches: Sequence[Batch]) -> None:
            for batch in batches:
                check_batch(batch)
            step = session.steps + 1
            self._looked[name] = self._looked.get(name, 0) + 1
            wait = self._looked[name] <= self.looks
            tokens = sum(batch["input_ids"].numel() for batch in batches)
            self._own.setdefault(name, {})[step] = digest_of_batches(batches, wait), tokens

        stream: Stream = session.data
        stream.on_draw = note
        try:
            yield
        finally:
            stream.on_draw = None

    def check(self, name: str, done: int) -> list[Difference]:
        """Return how the batches of a turn, up to step `done`, differ from another run's, at the first step where they do."""
        found: list[Difference] = []
        for step, (digest, tokens) in sorted(self._own.pop(name, {}).items()):
            if step > done:
                continue
            chain = hashlib.blake2b(f"{self.combined.get(name, '')}{digest}".encode(), digest_size=8)
            self.combined[name] = chain.hexdigest()
            first, other, other_tokens = self._seen.setdefault(step, (name, digest, tokens))
            if found:
                continue
            if tokens != other_tokens:
                found.append(difference("tokens", name, tokens, first, other_tokens))
            if digest != other:
                found.append(difference("batches", name, f"{digest} in step {step}", first, other))
        return found

    def forget(self, before: int) -> None:
        """Forget the steps up to `before`, which every run has made."""
        for step in [step for step in self._seen if step <= before]:
            del self._seen[step]


def digest_of_batches(batches: Sequence[Batch], wait: bool) -> str:
    """Return 12 hexadecimal digits over everything in them; of tensors on a device, unless it may wait, over their shapes alone."""
    digest = hashlib.blake2b(digest_size=6)
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            if tensor.device.type == "cpu" or wait:
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- what is compared


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return 8 hexadecimal digits of the bits of tensors, computed where they are: sums of the bits, weighed by position."""
    digest = hashlib.blake2b(digest_size=4)
    for tensor in tensors:
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        bits = local.detach().contiguous().reshape(-1).view(kind)
        sums = []
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].long()
            weight = torch.arange(len(part), device=part.device) % 65_521 + 1
            sums.append((part * weight).sum())
        total = torch.stack(sums).tolist() if sums else []
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}{total}".encode())
    return digest.hexdigest()


def _frozen(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter that does not train; where it is stored in a format of its own, that is in its name."""
    found = {}
    for name, module in model.named_modules():
        stored = module.storage if isinstance(module, Linear) else None
        for own, p in module.named_parameters(prefix=name, recurse=False):
            if not p.requires_grad:
                found[f"{own} in {stored or str(p.dtype).removeprefix('torch.')}"] = digest_of([p])
    return found


def _name(meter: Any) -> str:
    return str(getattr(meter, "__name__", type(meter).__name__))


def optimizer_words(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> str:
    """Return the optimizer's class and its groups' options, equal groups once. rates: learning rates of the groups at the start."""
    own = {name: getattr(optimizer, name) for name in ("state_dtype", "rounding", "seed") if hasattr(optimizer, name)}
    own |= getattr(
        optimizer, "settings", {}
    )  # settings of all groups, where an optimizer has such: ZenFlow's windows and columns
    groups: list[str] = []
    for group, rate in zip(optimizer.param_groups, rates):
        options = {k: _plain(v) for k, v in group.items() if k not in ("params", "initial_lr")}
        text = ", ".join(f"{k}={v}" for k, v in sorted({**options, **own, "lr": rate}.items()) if v is not None)
        if text not in groups:
            groups.append(text)
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _options_that_differ(own: str, base: str) -> str:
    """Return how two `optimizer_words` differ, such as "lr: 0.001 against 0.002"; "" if their classes or numbers of groups do."""
    (kind, groups), (base_kind, base_groups) = (
        (kind, rest.removesuffix(")").split("; ")) for kind, _, rest in (words.partition("(") for words in (own, base))
    )
    if kind != base_kind or len(groups) != len(base_groups):
        return ""
    found: dict[str, None] = {}
    for group, other in zip(groups, base_groups):
        a, b = (dict(option.partition("=")[::2] for option in re.split(r", (?=\w+=)", text)) for text in (group, other))
        for name in sorted(a | b):
            if a.get(name) != b.get(name):
                found[f"{name}: {a.get(name, 'none')} against {b.get(name, 'none')}"] = None
    return ", ".join(found)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _sizes(config: Any) -> str:
    """Return the numbers of a model's configuration, which are its shape, and how it computes attention where it says so."""
    given: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    numbers = {k: v for k, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    kept: dict[str, Any] = {k: v for k, v in numbers.items() if not k.startswith("_")}
    if attention := getattr(config, "_attn_implementation", None):
        kept["attention"] = attention
    return "(" + ", ".join(f"{k}={v}" for k, v in sorted(kept.items()) if not k.endswith("_token_id")) + ")"


def _recompute(model: nn.Module, fusion: Fusion | None) -> str:
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return "checkpoints"
    return "none" if fusion is None else fusion.recompute
