"""What becomes of folders that BASE made (folders_made.py), opened, resumed and continued: the same in both revisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import surokit as sk
from tests.answers.book import Book
from tests.answers.folders_made import RUNS, STORED, adapted
from tests.answers.profiles import told
from tests.answers.reports import BATCH, IDS
from tests.answers.runs import decoder, state, text_data
from tests.answers.walk import name_place


def write(book: Book, made: Path) -> None:
    """Open all of them."""
    name_place(made, "MADE")
    for name in RUNS:
        book.write(f"run {name}", lambda n=name: _resumed(made / n))
    for name in ("race", "race-stopped"):
        book.write(name, lambda n=name: _raced(made / n))
        book.write(f"{name} run again", lambda n=name: _again(made / n))
    for name in ("model", *(f"model-{name}" for name in STORED)):
        book.write(name, lambda n=name: _loaded(sk.load(made / n, device="cpu")))
    book.write("model with a recipe", lambda: _loaded(sk.load(made / "model", device="cpu", recipe=sk.QFP8)))
    book.write("adapter", lambda: _adapter(made / "adapter"))
    for file in sorted(made.glob("*.json.gz")):
        book.write(f"profile {file.name}", lambda f=file: told(sk.Profile.load(f)))
    book.write("gpu", lambda: sk.Gpu.from_json((made / "gpu.json").read_text(encoding="utf-8")))


def _resumed(folder: Path) -> dict[str, Any]:
    session = sk.Session.resume(folder, data=text_data())
    found = {"session": str(session), "steps": session.steps, "begins": session.model.state_dict()}
    session.run(3)
    return {**found, **state(session), "again": sk.Session.resume(folder, data=text_data()).steps}


def _raced(folder: Path) -> dict[str, Any]:
    race = sk.Race.load(folder)
    steps = {name: run.steps["loss"] for name, run in race.runs.items()}
    drawn = {x: race.plot(x=x) for x in ("time", "steps", "tokens", "usd")} if steps else {}
    parts = {"settings": race.settings, "environment": race.environment, "reason": race.reason, "notes": race.notes}
    return {"text": repr(race), "html": race._repr_html_(), "table": race.table(), "steps": steps, **parts, **drawn}


def _again(folder: Path) -> dict[str, Any]:
    given: dict[str, Any] = {"data": list(text_data())[:12], "eval": list(text_data())[:1], "meters": ()}
    race = sk.Race.load(folder).rerun(model=decoder(), **given, live=False, steps=6)
    return {name: [run.steps["loss"], run.batches] for name, run in race.runs.items()}


def _loaded(model: Any) -> dict[str, Any]:
    with torch.no_grad():
        loss = model(**BATCH).loss
    return {"model": str(model), "state": model.state_dict(), "loss": loss, "tokens": sk.generate(model, IDS[:, :8], 8)}


def _adapter(folder: Path) -> dict[str, Any]:
    model = decoder()
    torch.manual_seed(7)
    sk.apply(model, sk.QFP8.lora(rank=4))
    sk.load_adapter(model, folder)
    return {**_loaded(model), "same as": adapted(sk.QFP8.lora(rank=4)).state_dict(), "merged": sk.merge(model)}
