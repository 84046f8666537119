"""Keep a benchmark's raw result as plain data with environment and date, and make its table."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surokit.places import write_whole
from surokit.statistics import spread
from surokit.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def result(
    name: str, settings: Mapping[str, Any], systems: Sequence[Mapping[str, Any]], baseline: str
) -> dict[str, Any]:
    """Put a result together.

    Each system has `name`, `tokens_per_s` (one number a turn, in the order of the turns), `peak_mib`, `losses` (one a step) and
    may have `first_step_s`, `idle` and `note`. Turns of equal index ran side by side, so ratios are taken turn by turn.
    """
    from surokit.environment import environment

    return {
        "benchmark": name,
        "settings": dict(settings),
        "environment": environment(),
        "baseline": baseline,
        "systems": [dict(s) for s in systems],
    }


def ratios(data: Mapping[str, Any], system: str) -> list[float]:
    """Return tokens/s of a system over the baseline's, turn by turn."""
    rates = {s["name"]: s["tokens_per_s"] for s in data["systems"]}
    return [a / b for a, b in zip(rates[system], rates[data["baseline"]])]


def loss_gap(data: Mapping[str, Any], system: str) -> float:
    """Return the largest relative distance of a system's loss from the baseline's, over all steps."""
    losses = {s["name"]: s["losses"] for s in data["systems"]}
    return max(abs(a - b) / abs(b) for a, b in zip(losses[system], losses[data["baseline"]]))


def table(data: Mapping[str, Any]) -> str:
    """Make a Markdown table: one row a system, medians with their range over the turns."""
    baseline = next((s for s in data["systems"] if s["name"] == data["baseline"]), None)
    head = [
        "system",
        "tokens/s (median, range)",
        "x baseline (median, range)",
        "peak MiB",
        "x",
        "largest loss gap",
        "first step s",
        "note",
    ]
    rows = []
    for s in data["systems"]:
        low, mid, high = spread(s["tokens_per_s"])
        ratio = memory = ""
        if baseline is not None:
            r_low, r_mid, r_high = spread(ratios(data, s["name"]))
            ratio = f"{r_mid:.2f} ({r_low:.2f} to {r_high:.2f})"
            memory = f"{s['peak_mib'] / baseline['peak_mib']:.2f}"
        note = "; ".join(
            x for x in (s.get("note", ""), f"idle {s['idle']:.1%}" if s.get("idle") is not None else "") if x
        )
        rows.append(
            [
                s["name"],
                f"{mid:,.0f} ({low:,.0f} to {high:,.0f})",
                ratio,
                f"{s['peak_mib']:,.0f}",
                memory,
                f"{loss_gap(data, s['name']):.2%}" if baseline is not None else "",
                f"{s['first_step_s']:.1f}" if "first_step_s" in s else "",
                note,
            ]
        )
    return markdown(data, head, rows)


def markdown(data: Mapping[str, Any], head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table with the line under it: what was measured, how, where and when."""
    return f"{markdown_table(rows, header=head)}\n\n{footer(data)}"


def footer(data: Mapping[str, Any]) -> str:
    """Say what was measured, how, where and when."""
    environment = data["environment"]
    settings = ", ".join(f"{key} {value}" for key, value in data["settings"].items())
    device = environment["device"]
    if device == "cpu":
        parts = [environment["cpu"], f"{environment['cores']} cores", environment.get("cpu_vectors")]
        if "cpu_bf16" in environment:
            parts.append(environment["cpu_bf16"] or "no bf16 instructions")
        device = ", ".join(filter(None, parts))
    return f"{data['benchmark']}; {settings}; {device}, torch {environment.get('torch')}, {environment.get('date')}"


def write(data: Mapping[str, Any], path: Path) -> None:
    """Write the raw result as indented JSON, whole or not at all: a reader never finds half of it. Of paths in its words
    only the last name is written: a result is for others, and a message of an error may say where things lie on this
    machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(_without_paths(data), indent=1) + "\n")


_FOLDERS = re.compile(r"(?<![\w.:/~<])~?/(?:[^\s/'\"()<>:]+/)+")


def _without_paths(data: Any) -> Any:
    if isinstance(data, str):
        return _FOLDERS.sub("", data)
    if isinstance(data, Mapping):
        return {name: _without_paths(item) for name, item in data.items()}
    return [_without_paths(item) for item in data] if isinstance(data, list | tuple) else data


def check_writable(path: Path) -> None:
    """Raise ValueError, one sentence, where no result could be written there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --out the name of a file.")
    if not path.parent.exists():
        raise ValueError(f"There is no folder {path.parent}: make it first, or give another --out.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): give another --out.") from None


_PLACE = re.compile(r"(<!-- table: (?P<raw>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """Return `text` with every marked place holding the table of its raw file; paths are relative to `folder`.

    A place is `<!-- table: measurements/cpu.json -->` ... `<!-- end of table -->`.
    """

    def table_of(place: re.Match[str]) -> str:
        data = json.loads((folder / place["raw"]).read_text(encoding="utf-8"))
        return f"{place[1]}\n{_table_for(data)(data)}\n\n{place[3]}"

    return _PLACE.sub(table_of, text)


def _table_for(data: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Return the table function of a raw file, by the keys it holds."""
    for part in (
        "kernels",
        "ceilings",
        "study",
        "memory",
        "overhead",
        "gpu",
        "peers",
        "predicted",
        "scaling",
        "compiled",
        "front_ends",
        "watching",
        "offload",
        "deferral",
        "spans",
        "dissection",
        "serving",
        "zenflow",
        "published",
        "rounding",
        "evidence",
    ):
        if part in data:
            return cast("Callable[[Mapping[str, Any]], str]", _module(part).table)
    return table


_PICTURE = re.compile(r"<!-- figure: (?P<raw>\S+) (?P<picture>\S+) -->")


def pictures(text: str, folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the pictures that a page wants drawn and the raw data of each; paths are relative to `folder`.

    A place is `<!-- figure: measurements/recipes.json loss-gaps.png -->`, right before the image itself.
    """
    return {
        folder / place["picture"]: json.loads((folder / place["raw"]).read_text(encoding="utf-8"))
        for place in _PICTURE.finditer(text)
    }


def drawn_by(data: Mapping[str, Any]) -> Any:
    """Return the module whose `draw` makes the picture of a raw file, by the keys it holds; `digest` is the fingerprint in it."""
    known = ("peers", "deferral", "spans", "predicted", "dissection", "serving", "zenflow", "published", "evidence")
    return _module(next((part for part in known if part in data), "study"))


def fingerprint(shown: Any) -> str:
    """Return a fingerprint of what a picture shows, by which a page's picture and its raw file can be told apart."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def save_picture(picture: Figure, path: Path, digest: str) -> None:
    """Write a picture as PNG; it carries the fingerprint of its data and neither date nor version."""
    picture.savefig(path, dpi=110, metadata={"Software": None, "Description": digest})


MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"  # raw files, which only a clone has
STUDIES = ("deferral", "front_ends", "rounding", "study")  # finished: each lies in a clone beside its raw file


@cache
def _module(part: str) -> Any:
    if part not in STUDIES:
        return import_module(f"surokit.bench.{part}")
    file = MEASUREMENTS / f"{part}.py"
    spec = spec_from_file_location(f"docs.measurements.{part}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(
            f"The table of a finished study is made by {file.name}, which only a clone has: run this in one."
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
