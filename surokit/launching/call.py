"""Pack a function and its arguments for another process, also one that a notebook's cell defines, with what it closes over."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle


def packed(train: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return the call as bytes. TypeError that names what cannot be carried, such as a tensor on a GPU, a lock or a generator."""
    try:
        return _bytes_of((train, args, dict(kwargs)))
    except Exception as error:
        for name, value in _parts(train, args, kwargs):
            try:
                _bytes_of(value)
            except Exception as found:
                raise TypeError(
                    f"launch() cannot carry {name}, {_described(value)}, to another process: make it inside the function that is "
                    "launched."
                ) from found
        raise TypeError(
            f"launch() cannot carry {_name(train)} to another process ({error}): define what it needs inside it."
        ) from error


def _parts(train: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a call is made of, by the names that its author gave."""
    yield from ((f"argument {i + 1}", value) for i, value in enumerate(args))
    yield from kwargs.items()
    function = getattr(train, "__func__", train)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # an empty cell: the name has no value yet
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if (
            "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor) and value.is_cuda
        ):  # each process would put a copy on that GPU
            raise TypeError("a tensor on a GPU")
        if isinstance(value, io.TextIOWrapper) and value not in (sys.stdout, sys.stderr):  # it would be read to its end
            raise TypeError("an open file")
        return super().reducer_override(value)


def _bytes_of(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def value_bytes(value: Any) -> bytes:
    """Return what a function returned as bytes. TypeError where it cannot leave the process."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"The function returned {_described(value)}, which cannot leave its process ({error}): return numbers, text or "
            "tensors on the CPU."
        ) from error


def loaded(data: bytes) -> Any:
    """Return what the bytes hold. Only bytes that this program has written are read."""
    return pickle.loads(data)


def _name(train: Any) -> str:
    return getattr(train, "__qualname__", type(train).__qualname__)


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
