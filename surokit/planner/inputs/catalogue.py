"""Well-known models by their names on the Hub, so that a plan of one needs no network: models.csv.

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

_WORDS = {  # a column and the field of a config.json that it is; the second for a mixture of experts
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
# what a name may have more or less and still mean the same shape
_VARIANT = re.compile(r"-(?:instruct|it|chat|base|hf|pt)(?=-|$)|^meta-")


@dataclass(frozen=True)
class Known:
    """A model whose shape is known: its name on the Hub, the fields of its config.json that a plan reads, the parameters that were
    published, and the source of both."""

    name: str
    config: Mapping[str, Any]
    parameters: int
    source: str


@cache
def known() -> Mapping[str, Known]:
    """Return every known model by its name on the Hub, in the order of models.csv."""
    text = files("surokit.planner.inputs").joinpath("models.csv").read_text(encoding="utf-8")
    return MappingProxyType({row["name"]: _read(row) for row in csv.DictReader(io.StringIO(text))})


def find(name: str) -> Known | None:
    """Return the model of a name as on the Hub, in any case and with or without the organisation; None where it is not known."""
    organisation, _, _ = name.rpartition("/")
    for each in known().values():
        owner, _, _ = each.name.rpartition("/")
        if _key(each.name) == _key(name) and organisation.lower() in ("", owner.lower()):
            return each
    return None


def nearest(name: str) -> str:
    """Return the known name that is most like this one, "" where none is."""
    keys = {_key(each): each for each in reversed(list(known()))}
    near = difflib.get_close_matches(_key(name), keys, n=1, cutoff=0.75)
    return keys[near[0]] if near else ""


def _key(name: str) -> str:
    return _VARIANT.sub("", name.lower().rpartition("/")[2])


def _read(row: Mapping[str, str]) -> Known:
    config: dict[str, Any] = {field: int(row[column]) for column, field in _WORDS.items() if row[column]}
    config |= {"model_type": row["model_type"], "tie_word_embeddings": row["tied"] == "yes"}
    config.setdefault("sliding_window", None)
    return Known(row["name"], config, int(row["parameters"]), row["source"])
