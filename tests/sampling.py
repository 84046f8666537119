"""A sample of the cases of a test that has many: `pytest.mark.sampled`, on a test or as a module's `pytestmark`.

Of a test with several axes (`parametrize`), so many cases run that each value of each axis stands in at least one. The choice is
the same everywhere: it depends on the cases' names alone. `pytest --whole` runs all cases, which `make soak` and `make test-gpu`
do. A case that is asked for by its full name always runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import pytest

Case = Mapping[tuple[str, ...], object]  # axis, by its arguments' names -> value


def sample(cases: Mapping[str, Case]) -> set[str]:
    """Names of the cases that run: again and again the one with most values that none had before, of equals by lot."""
    missing = {value for case in cases.values() for value in case.items()}
    lots = sorted(cases, key=lambda name: crc32(name.encode()))
    chosen = set()
    while missing:
        best = max(lots, key=lambda name: len(missing & cases[name].items()))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen


def leave_out(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(what runs, what does not), each in its order."""
    items = list(items)
    tests: dict[str, dict[str, Case]] = {}
    for item in items:
        if _is_sampled(item):
            tests.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = _case(item)
    chosen = {name for cases in tests.values() for name in sample(cases)}
    left_out = [item for item in items if _is_sampled(item) and item.nodeid not in chosen]
    gone = {item.nodeid for item in left_out}
    return [item for item in items if item.nodeid not in gone], left_out


def _case(item: pytest.Item) -> Case:
    """Each `parametrize` is an axis, of several arguments where it names them together. A value is known by the objects given."""
    given: Mapping[str, object] = item.callspec.params  # type: ignore[attr-defined]
    axes = [_names(mark.args[0]) for mark in item.iter_markers("parametrize")]
    alone = [(name,) for name in given if not any(name in axis for axis in axes)]  # of fixtures with params
    return {axis: tuple(id(given[name]) for name in axis) for axis in (*axes, *alone)}


def _names(argnames: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in argnames.split(",")) if isinstance(argnames, str) else tuple(argnames)


def _is_sampled(item: pytest.Item) -> bool:
    marks: Sequence[str] = [mark.name for mark in item.iter_markers()]
    return "sampled" in marks and "soak" not in marks and hasattr(item, "callspec")
