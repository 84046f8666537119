"""This module builds the sessions of a race, from recipes or as given: all from the same weights, data and settings, and the
baseline twice."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surokit.optim.spec import Spec
from surokit.racing.model_swap import Parking, bytes_of, fits, share_frozen
from surokit.recipe import Recipe, find_recipe
from surokit.train import Session
from surokit.train.stream import Batch

Entry = Recipe | str | Session
Source = nn.Module | str | Path | Callable[[], nn.Module]
Made = Callable[[str, Session], None]


@dataclass(frozen=True)
class Grid:
    """A Grid says who races: names in order, the baseline first, its twin (A/A control) last if there is one."""

    entries: Mapping[str, Entry]
    twin: str | None

    @property
    def baseline(self) -> str:
        return next(iter(self.entries))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.entries, *([self.twin] if self.twin else []))

    def entry(self, name: str) -> Entry:
        return self.entries[self.baseline if name == self.twin else name]


def grid(entries: Any, control: bool) -> Grid:
    """Return the Grid of the entries that were given. ValueError or TypeError for what is no entry."""
    if isinstance(entries, Recipe | str | Session):
        entries = [entries]
    if isinstance(entries, Mapping):
        given = dict(entries)
    elif isinstance(entries, Iterable):
        listed = list(entries)
        given = {
            getattr(e, "name", e) if isinstance(e, Recipe | str) else f"run {i}": e for i, e in enumerate(listed, 1)
        }
        if len(given) < len(listed):
            raise ValueError("Two entries of the race have one name: give a dict of names and recipes.")
    else:
        raise TypeError(f"race() takes a dict of names and recipes or sessions, not a {type(entries).__name__}.")
    if not given:
        raise ValueError('race() needs entries: {"bf16": surokit.BF16, "fp8": surokit.FP8} for example.')
    found: dict[str, Entry] = {}
    for name, entry in given.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"race(): {name!r} is no name of an entry.")
        if isinstance(entry, Spec | torch.optim.Optimizer):
            raise TypeError(
                f"race(): {name!r} is an optimizer: give Sessions that are trained by them, with the same weights, data and "
                "schedule, and allow=('optimizer',)."
            )
        if not isinstance(entry, Recipe | str | Session):
            raise TypeError(f"race(): {name!r} is a {type(entry).__name__}: give a recipe, its name, or a Session.")
        found[name] = entry if isinstance(entry, Session) else find_recipe(entry)
    sessions = [entry for entry in found.values() if isinstance(entry, Session)]
    if len({id(session.model) for session in sessions}) < len(sessions):
        raise ValueError("Two entries of the race train one model: give each its own, with session.fork().")
    if len({folder_of(name) for name in found}) < len(found):
        raise ValueError("Two entries of the race have names that give one folder: choose others.")
    baseline = next(iter(found))
    twin = f"{baseline} again" if control else None
    if twin in found:
        raise ValueError(f"{twin!r} is the name of the baseline's twin: choose another, or race(control=False).")
    if len(found) == 1 and not control:
        raise ValueError("A race of one entry without control has nothing to compare: add a recipe.")
    return Grid(found, twin)


def folder_of(name: str) -> str:
    """Return the name of a run's folder: its own, with what a file system may refuse replaced."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"


def fresh_model(source: Source) -> nn.Module:
    """Return a model that no other run has: a copy, or what a function makes, or what a folder holds."""
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    if isinstance(source, str | Path):
        from surokit.models import load

        return load(source)
    made = source() if callable(source) else None
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"race(model=...) takes a torch.nn.Module, a folder, or a function that makes a model, not {source!r}."
        )
    return made


def own_data(source: Iterable[Batch]) -> Iterable[Batch]:
    """Return the data source for one more run: a copy where the source draws its order from a generator of its own or keeps its
    position, unless it makes a reader for each run itself (`fork`, as ours does)."""
    keeps = hasattr(source, "load_state_dict") or isinstance(getattr(source, "generator", None), torch.Generator)
    return copy.deepcopy(source) if keeps and not hasattr(source, "fork") else source


@dataclass(frozen=True)
class Builder:
    """A Builder makes the sessions of a grid one after the other.

    model, data, settings: for entries that are recipes. together: whether all stay on the device; None: if they fit. run_dir:
    where each session gets a folder.
    """

    grid: Grid
    model: Source | None
    data: Iterable[Batch] | None
    settings: Mapping[str, Any]
    together: bool | None
    run_dir: Path | None

    def check(self) -> None:
        recipes = [name for name, entry in self.grid.entries.items() if not isinstance(entry, Session)]
        missing = [name for name in ("model", "data") if getattr(self, name) is None]
        if recipes and missing:
            raise ValueError(f"race(): {recipes[0]!r} is a recipe, so {' and '.join(missing)} = ... must be given.")
        optimizer = self.settings.get("optimizer")
        if hasattr(optimizer, "param_groups"):
            raise ValueError(
                f"race(optimizer=...): this {type(optimizer).__name__} holds one model's parameters: give a specification "
                "such as surokit.AdamW(lr=3e-4), or a function from parameters to an optimizer."
            )

    def build(self, made: Made, started: Made) -> tuple[dict[str, Session], Parking, bool]:
        """Build the sessions; return them, where they park, and whether all stay on the device.

        `made` is called with each session as soon as it is there, `started` when it shall make its first step; where all stay,
        that is when all are there.
        """
        together = self.together
        if together is not False:
            sessions: dict[str, Session] = {}
            for name in self.grid.names:
                if together is None and sessions and not self._room_for_another(list(sessions.values())):
                    break
                sessions[name] = self._make(name, {}, sessions)
                made(name, sessions[name])
            else:
                if together or fits(list(sessions.values())):
                    before: list[Session] = []
                    for name, session in sessions.items():
                        started(name, session)
                        share_frozen(session, before)  # anew, since a first step on CUDA lays weights side by side
                        before.append(session)
                    return sessions, Parking({}), True
            sessions.clear()
        return self._build_parked(made, started)

    def _build_parked(self, made: Made, started: Made) -> tuple[dict[str, Session], Parking, bool]:
        """Build sessions that park: each makes its first step before the next is built, which then finds memories as they stay."""
        sessions: dict[str, Session] = {}
        parking = Parking(sessions)
        for name in self.grid.names:
            if name == self.grid.twin and isinstance(self.grid.entry(name), Session):
                parking.bring(self.grid.baseline)  # a parked session cannot be copied
            sessions[name] = self._make(name, {"graphs": False}, sessions)
            parking.bring(name)
            made(name, sessions[name])
            started(name, sessions[name])
        return sessions, parking, False

    def _make(self, name: str, changes: Mapping[str, Any], others: Mapping[str, Session]) -> Session:
        entry = self.grid.entry(name)
        if isinstance(entry, Session):
            return entry.fork() if name == self.grid.twin else entry
        assert self.model is not None
        assert self.data is not None
        folder = None if self.run_dir is None else self.run_dir / folder_of(name)
        settings = {**self.settings, **changes}
        session = Session(fresh_model(self.model), own_data(self.data), recipe=entry, run_dir=folder, **settings)
        share_frozen(session, others.values())
        return session

    def _room_for_another(self, sessions: list[Session]) -> bool:
        """Return whether a copy as large as the last session has room beside those that are there."""
        device = sessions[-1].device
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return bytes_of(sessions[-1:], planned=False) < free
