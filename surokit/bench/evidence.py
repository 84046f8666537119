"""Run the study of what each recipe costs: in held-out loss, from scratch and fine-tuned, at three sizes; and in what small models
can do, by tasks that are graded exactly. Runs are paired by seeds. evidence_plan.py says which runs there are,
evidence_table.py what came of them.

    python -m surokit.bench evidence --out docs/measurements/evidence.json --folder runs/evidence --minutes 60

A run is one model trained by one recipe: those of a seed start from the same weights and see the same batches. Runs are taken in an
order in which the file says something early: seed by seed, the sweep of a size before its first. Each writes its checkpoint as it
goes, in --folder, so that the same command goes on in the middle of a run; what is done is in --out at once. A recipe that changes
in mid-run goes on from the run of its first part, bit for bit what it would have computed by itself. Checkpoints may be lost
between two calls: a model that an adapter needs is trained again then, and what the file says of it stays. Where it comes out
another, as on another processor, the other adapters over it are trained again too.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench import evidence_picture, evidence_table
from surokit.bench.evidence_plan import (
    BATCH,
    CONTROL,
    LENGTH,
    OF_TASKS,
    ORTHONORMAL,
    PROCESSOR,
    SETTINGS,
    SWITCHED,
    TASK_BATCH,
    VOCAB,
    WARMUP,
    Run,
    loss_at,
    recipe_of,
    run_of,
    runs,
    task_of,
)
from surokit.bench.results_store import Book
from surokit.environment import environment
from surokit.places import write_whole

if TYPE_CHECKING:
    from torch import nn

    from surokit.train import Session
    from surokit.train.checkpoint_files import Checkpoint
    from surokit.train.stream import Batch

table = evidence_table.table
draw, digest = evidence_picture.draw, evidence_picture.digest
#: Held-out losses are taken so many times in a run, at equal distances: how a gap grows with tokens.
POINTS = 8
CHUNK = 50  # steps between two checkpoints
GENERATED = 6_000_000  # characters of generated text that a run has, of which it reads less than one pass
HELD_OUT = 24  # batches of each kind of text
LAST_CHAPTERS = 8  # of Moby-Dick, which no run trains on
TWIN = 1000  # between the draws of a run and of its twin
PROBLEMS = 512  # that a model is graded on


def train(run: Run, folder: Path, ends_at: float) -> dict[str, Any] | None:
    """Train until the run is done or the clock says `ends_at`; return what it found, None where it is not done.

    Goes on from where an earlier call ended. ends_at: seconds of `time.time()`.
    """
    import torch

    torch.set_num_threads(1)
    began, where = time.process_time(), folder / run.folder
    train_on, held_out = texts_of(run)
    session = _session(run, folder, train_on)
    points = {run.steps * (i + 1) // POINTS for i in range(POINTS)}
    began_at, curve, seconds = session.steps, _read_curve(where, session.steps), _add_seconds(where, 0.0)
    while True:
        if session.steps in points and session.steps not in {row[0] for row in curve}:
            curve.append([session.steps, *_measured(run, session, held_out)])
            write_whole(where / CURVE, json.dumps(curve))
        if session.steps and session.steps == run.forks_at:
            _begin_switched(session, folder / replace(run, recipe=SWITCHED).folder)
        if session.steps >= run.steps:
            break
        if time.time() >= ends_at and session.steps > began_at:
            return None
        stops = [session.steps + CHUNK, min(point for point in points if point > session.steps)]
        stops += [run.forks_at] if session.steps < run.forks_at else []
        session.run(min(stops) - session.steps)  # and saves
        began, seconds = time.process_time(), _add_seconds(where, time.process_time() - began)
    return {
        **asdict(run),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "steps": run.steps,
        "data": session.data.fingerprint,
        "curve": curve,
        "held_out": loss_at({"kind": run.kind, "curve": curve}),
        "cpu_s": round(seconds, 1),
        "skipped": int(sum(session.records.column("skipped"))),
    }


CURVE = "curve.json"


def _read_curve(folder: Path, done: int) -> list[list[float]]:
    """Return what a run has measured in its first `done` steps."""
    path = folder / CURVE
    rows: list[list[float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [row for row in rows if row[0] <= done]


def _measured(run: Run, session: Session, held_out: Iterable[list[Batch]]) -> list[float]:
    """Return the loss on each kind of text; or on a task, and its accuracy."""
    losses = [session.evaluate(batches) for batches in held_out]
    if run.kind not in OF_TASKS:
        return losses
    return [*losses, task_of(run.size).grade(session.model, PROBLEMS).accuracy]


def _begin_switched(session: Session, folder: Path) -> None:
    """Write the checkpoint with which the run of the recipe that changes goes on from this one."""
    if checkpoint_in(folder):
        return
    other = session.fork(run_dir=folder)
    other.switch(recipe_of(SWITCHED).parts[1])
    other.save()


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return the last checkpoint that a run has left in its folder."""
    from surokit.train import checkpoint_files

    return checkpoint_files.latest(folder / "checkpoints")


def _session(run: Run, folder: Path, data: Any) -> Session:
    import torch

    import surokit as sk

    where = folder / run.folder
    if checkpoint_in(where):
        return sk.Session.resume(where, data=data, keep=1)
    torch.manual_seed(run.seed)
    task, size = task_of(run.size) if run.kind in OF_TASKS else None, run.shape
    draws = run.seed + (TWIN if run.recipe == CONTROL else 0)
    config = sk.DecoderConfig(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads // 2,
        vocab=VOCAB if task is None else task.vocab,
        ffn=size.ffn,
        max_length=LENGTH if task is None else task.length,
    )
    model = sk.Decoder(config, dtype=torch.bfloat16)
    if run.base is not None:
        trained = sk.Session.resume(folder / run.base.folder, data=texts_of(run.base)[0])
        assert trained.steps == run.base.steps, f"{run.base.key} has not ended, and {run.key} goes on from its end"
        model.load_state_dict(trained.model.state_dict())
    session = sk.Session(
        model,
        data,
        recipe=recipe_of(run.recipe),
        optimizer=sk.AdamW(lr=run.lr, state_dtype=torch.float32, rounding="stochastic", seed=draws),
        schedule=sk.Cosine(warmup=WARMUP, steps=run.steps),
        seed=run.seed,
        save_every=run.steps,
        keep=1,
        run_dir=where,
        exist="resume",
    )
    if run.recipe == ORTHONORMAL:
        _make_orthonormal(session.model, run.seed)
    return session


def _make_orthonormal(model: nn.Module, seed: int) -> None:
    """Let the adapters' A begin with orthogonal rows, as long as those that an adapter begins with otherwise."""
    import torch

    from surokit.nn.loftq import LENGTH

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.copy_(LENGTH * torch.nn.init.orthogonal_(torch.empty(p.shape), generator=generator))


@lru_cache(maxsize=2)
def texts_of(run: Run) -> tuple[Any, list[list[Batch]]]:
    """Return what a run trains on, and what its loss is taken on: generated text and Moby-Dick, Shakespeare, or a task."""
    import surokit as sk
    from surokit import texts

    if run.kind in OF_TASKS:
        task = task_of(run.size)
        return task.batches(TASK_BATCH, seed=run.seed), [task.held_out(PROBLEMS)]
    tokenizer = _tokenizer()

    def held_out(documents: Iterable[str]) -> list[Batch]:
        batches = sk.text(list(documents), tokenizer, length=LENGTH, batch=BATCH, shuffle=False)
        return list(itertools.islice(batches, HELD_OUT))

    if run.kind == "tuning":
        plays = _documents(texts.SHAKESPEARE)
        train_on, last = plays[: -len(plays) // 8], plays[-len(plays) // 8 :]
        return sk.text(train_on, tokenizer, length=LENGTH, batch=BATCH, seed=run.seed), [held_out(last)]
    chapters = _documents(texts.MOBY_DICK)
    train_on = [*sk.stories(GENERATED, seed=run.seed), *chapters[:-LAST_CHAPTERS]]
    others = sk.stories(500_000, seed=_UNSEEN)
    data = sk.text(train_on, tokenizer, length=LENGTH, batch=BATCH, seed=run.seed)
    assert len(data) >= run.steps, f"{len(data)} batches for {run.steps} steps"
    return data, [held_out(others), held_out(chapters[-LAST_CHAPTERS:])]


_UNSEEN = 1_000_000  # seed of generated text that no run trains on


@cache
def _tokenizer() -> Any:
    import surokit as sk
    from surokit import texts

    return sk.train_tokenizer([texts.MOBY_DICK, *sk.stories(1_000_000, seed=_UNSEEN + 1)], vocab_size=VOCAB)


def _documents(path: Path) -> list[str]:
    from surokit.data.sources import documents

    return list(documents(path)[1])


def _add_seconds(folder: Path, seconds: float) -> float:
    """Add to the processor's seconds that a run has taken so far, and return them."""
    path = folder / "cpu_s"
    total = seconds + (float(path.read_text()) if path.exists() else 0.0)
    path.write_text(repr(total))
    return total


def _first(run: Run, folder: Path) -> Run:
    """Return the run, or the one below it where that has no checkpoint of its end any more."""
    return run.base if run.base is not None and not _has_ended(run.base, folder) else run


def _has_ended(run: Run, folder: Path) -> bool:
    last = checkpoint_in(folder / run.folder)
    return last is not None and last.step == run.steps


def _over(book: Book, base: Run) -> list[str]:
    """Return the keys of what was trained on top of a run."""
    return [key for key, found in book.found.items() if run_of(found).base == base]


def run(
    out: Path | None = None,
    folder: Path = Path("runs/evidence"),
    minutes: float = 60.0,
    workers: int = 2,
    can_begin: Callable[[Mapping[str, Any]], Iterable[Run]] = runs,
    benchmark: str = "evidence",
) -> dict[str, Any]:
    """Go on with the study for so many minutes, in `workers` processes; return the raw result, which is in `out` as it grows.

    folder: of checkpoints. can_begin: of what was found, the runs to be made, in order. benchmark: what the file calls itself.
    """
    head = {"benchmark": benchmark, "settings": SETTINGS}
    here = environment()
    call = {"minutes": minutes, **{key: here[key] for key in PROCESSOR}}
    book = Book(out or Path("evidence.json"), "evidence", head, call)
    folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.time() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    going: dict[Future[Any], Run] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        while True:
            wanted = (_first(run, folder) for run in can_begin(book.found) if run.key not in book)
            left = [run for run in dict.fromkeys(wanted) if run not in going.values()]
            while left and len(going) < workers and time.time() < ends_at:
                chosen = left.pop(0)
                going[pool.submit(train, chosen, folder, ends_at)] = chosen
            if not going:
                break
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                ended, found = going.pop(future), future.result()
                if found is None:
                    continue
                if ended.key in book:  # trained again for what comes on top of it, all of which shares one base
                    same = found["held_out"] == book[ended.key]["held_out"]
                    book.forget(*([] if same else _over(book, ended)))
                else:
                    book.put(ended.key, found)
                print(f"{ended.key}: {found['held_out']:.4f}, {found['cpu_s']:,.0f} s", file=sys.stderr, flush=True)
    book.end(f"{len(left)} runs that can begin now are left." if left else "")
    return book.data
