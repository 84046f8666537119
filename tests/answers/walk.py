"""Plain data of any answer: numbers to the last bit, texts, tensors by digest; no name of a class or module, no address or path."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_IMAGE = re.compile(
    r"(data:image/[a-z+]+;base64,)[A-Za-z0-9+/=]+"
)  # matplotlib writes dates and ids of its own; figures are walked
_DEEPEST = 14
# of a plan: what was asked, as it was read
_LEFT_OUT = ("subject", "given")
_places: dict[str, str] = {tempfile.gettempdir(): "TMP"}


def name_place(folder: Path, name: str) -> None:
    """From now on texts have `name` where they would have this folder, which is another one in each process."""
    _places[str(folder)] = name


def text(value: str) -> str:
    """The text without addresses and images, and with names in place of folders."""
    for place in sorted(_places, key=len, reverse=True):
        value = value.replace(place, _places[place])
    return _ADDRESS.sub("0x", _IMAGE.sub(r"\1", value))


def digest(value: Any) -> dict[str, Any]:
    """What a tensor or an array is: its bytes as a digest, its dtype, its shape."""
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous()
        data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return {"sha256": hashlib.sha256(data).hexdigest(), "dtype": str(held.dtype), "shape": list(held.shape)}
    if value.dtype == object:
        return {"values": [plain(each) for each in value.reshape(-1)], "shape": list(value.shape)}
    data = np.ascontiguousarray(value).tobytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "dtype": str(value.dtype), "shape": list(value.shape)}


def plain(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """None, bool, int, float, str, lists and dicts of them."""
    if value is None or isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return digest(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Path):
        return text(str(value))
    if id(value) in _above or len(_above) > _DEEPEST:
        return "(itself)"
    above = (*_above, id(value))
    if isinstance(value, Mapping):
        return {_key(key): plain(each, above) for key, each in value.items()}
    if hasattr(value, "to_csv"):
        return text(value.to_csv())
    if hasattr(value, "axes") and hasattr(value, "savefig"):
        return _figure(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _parts(value, [field.name for field in fields(value)], above)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _parts(value, value._fields, above)
    if isinstance(value, int | float):  # a number that knows more, such as a predicted loss
        return {"number": float(value), "said": text(str(value)), **_parts(value, vars(value), above)}
    if isinstance(value, Set):
        return sorted((plain(each, above) for each in value), key=repr)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Iterable) and isinstance(value, list | tuple | range):
        return [plain(each, above) for each in value]
    return text(str(value))


def _key(key: Any) -> str:
    return text(key if isinstance(key, str) else repr(key))


def _parts(value: Any, names: Iterable[str], above: tuple[int, ...]) -> dict[str, Any]:
    """Its public fields and properties; a property that refuses says so."""
    properties = [
        name
        for kind in reversed(type(value).__mro__)
        for name, what in vars(kind).items()
        if isinstance(what, property | cached_property) and kind not in (int, float, tuple)
    ]
    found = {}
    for name in dict.fromkeys([*names, *properties]):
        if name.startswith("_") or name in _LEFT_OUT:
            continue
        try:
            found[name] = plain(getattr(value, name), above)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {text(str(error))}"
    return found


def _figure(figure: Any) -> dict[str, Any]:
    """What a figure of matplotlib shows: lines, bars, texts and limits of each of its axes."""
    return {
        f"axes {i}": {
            "labels": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()],
            "limits": [list(map(float, axes.get_xlim())), list(map(float, axes.get_ylim()))],
            "lines": [np.asarray(line.get_xydata(), float).tolist() for line in axes.get_lines()],
            "bars": [[float(x) for x in bar.get_extents().bounds] for bar in axes.patches],
            "texts": [text(each.get_text()) for each in axes.texts],
            "legend": [each.get_text() for each in axes.get_legend().get_texts()] if axes.get_legend() else [],
            "ticks": [[each.get_text() for each in way.get_ticklabels()] for way in (axes.xaxis, axes.yaxis)],
        }
        for i, axes in enumerate(figure.axes)
    }
