"""This module knows well-known models by their names on the Hub (models.csv), so that a plan of one needs no network.

The shapes are those of each repository's config.json, and each row names where its parameters were published; a test counts every
one of them again. Tuned variants (-Instruct, -it, -chat, -Base) have the shape of the model that they come from.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

_WORDS = {  # column of models.csv: field of a config.json
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "window": "sliding_window",
    "experts": "num_local_experts",
    "chosen": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
# parts of a name that do not change the shape
_VARIANT = re.compile(r"-(?:instruct|it|chat|base|hf|pt)(?=-|$)|^meta-")


@dataclass(frozen=True)
class Known:
    """A Known is a model whose shape is known: its name on the Hub, the fields of its config.json that a plan reads, the number of
    parameters that was published (0: none), and the source of both."""

    name: str
    config: Mapping[str, Any]
    parameters: int
    source: str


@cache
def known() -> Mapping[str, Known]:
    """Return every known model by its name on the Hub, in the order of models.csv."""
    return MappingProxyType(
        read_rows(files("surokit.planner.inputs").joinpath("models.csv").read_text(encoding="utf-8"))
    )


def read_rows(text: str) -> dict[str, Known]:
    """Read a table with the columns of models.csv; return its models by name."""
    return {row["name"]: _read(row) for row in csv.DictReader(io.StringIO(text))}


def find(name: str) -> Known | None:
    """Return the model of a name as on the Hub, in any case and with or without the organisation; None where it is not known."""
    organisation, _, _ = name.rpartition("/")
    for each in known().values():
        owner, _, _ = each.name.rpartition("/")
        if _key(each.name) == _key(name) and organisation.lower() in ("", owner.lower()):
            return each
    return None


def nearest(name: str) -> str:
    """Return the known name that is most similar to this one; "" where none is similar."""
    keys = {_key(each): each for each in reversed(list(known()))}
    near = difflib.get_close_matches(_key(name), keys, n=1, cutoff=0.75)
    return keys[near[0]] if near else ""


def _key(name: str) -> str:
    return _VARIANT.sub("", name.lower().rpartition("/")[2])


def _read(row: Mapping[str, str]) -> Known:
    config: dict[str, Any] = {field: int(row[column]) for column, field in _WORDS.items() if row.get(column)}
    config |= {"model_type": row["model_type"], "tie_word_embeddings": row["tied"] == "yes"}
    config.setdefault("sliding_window", None)
    return Known(row["name"], config, int(row.get("parameters") or 0), row["source"])
