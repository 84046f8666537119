"""This module saves sessions as checkpoints, makes sessions from them, and forks twins.

A checkpoint holds all that the next step depends on. Settings that it cannot hold (data, evaluation, meters, functions of your
own) are given again. checkpoint_files.py writes it to the disk, whole or not at all.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from surokit import convert
from surokit.applied import fusion_of, note_recipe, part_of, recipe_of
from surokit.errors import CheckpointError
from surokit.fusion import Fusion
from surokit.models.config import DecoderConfig
from surokit.models.fuse import fuse
from surokit.optim.schedule import schedule_from_dict, schedule_to_dict
from surokit.optim.spec import spec_from_dict, spec_to_dict
from surokit.recipe import Recipe, find_recipe
from surokit.train import checkpoint_files as checkpoints
from surokit.train.errors import ResumeError
from surokit.train.measuring import Attachable, Meter, settings_of
from surokit.train.peers import Peers, class_of, is_sharded_model
from surokit.train.random_state import RandomState, seeded
from surokit.train.resharding import (
    WholeTensors,
    divided_tensors,
    fitting,
    load_model,
    load_optimizer,
    model_parts,
    optimizer_parts,
    parameters_by_name,
)
from surokit.train.setup import (
    adapters_of,
    apply_saved,
    check_adapters,
    check_recipe,
    rebuild_model,
    set_adapters,
    set_trainable,
)
from surokit.train.switching import go_over
from surokit.units import counted

if TYPE_CHECKING:
    from surokit.train.session import Session
    from surokit.train.sharded_files import DividedTensors

SETTINGS = ("accumulate", "clip", "seed", "eval_every", "save_every", "save_async", "keep", "max_skipped")


def content_of(session: Session, peers: Peers) -> checkpoints.Content:
    """Return what this process writes of the session as it is now, between two steps; the tensors are the session's own."""
    model, random, data = session.model, session.random.state.to_dict(), session.data.state_dict()
    sharded, scaling = is_sharded_model(model), convert.scaling_state(model)
    own: dict[str, Any] | None = None
    if peers.group is not None:
        own = {"random": random, "data": data, "fingerprint": session.data.fingerprint, "scaling": scaling}
    if not sharded and not peers.is_first:
        return checkpoints.Content({}, {}, {}, {"step": session.steps}, own=own)
    state = {"scaling": scaling, "data": data}
    tensors: dict[str, Any]
    if sharded:
        tensors, tied = model_parts(model)
        dtypes = checkpoints.dtypes_of(tensors)
        parts, state["optimizer"] = optimizer_parts(session.optimizer, model)
        tensors |= parts
    else:
        tensors, tied = checkpoints.distinct_tensors(model)
        dtypes = checkpoints.dtypes_of(tensors)
        state |= {"optimizer": session.optimizer.state_dict(), "random": random}
    return checkpoints.Content(
        tensors, tied, state, _meta(session), _config_of_hf(model), own, sharded=sharded, dtypes=dtypes
    )


def _config_of_hf(model: nn.Module) -> dict[str, Any] | None:
    """Return the model's configuration as Hugging Face has it; None where it has none, or no family there can express it."""
    to_hf = getattr(getattr(model, "config", None), "to_hf", None)
    with suppress(CheckpointError):
        return dict(to_hf()) if to_hf else None
    return None


def _meta(session: Session) -> dict[str, Any]:
    from surokit.environment import environment

    engine, model = session.engine, session.model
    return {
        "step": session.steps,
        "tokens": session.tokens,
        "elapsed_s": session.elapsed_s,
        "run_s": session.run_s,
        "recipe": session.recipe.to_dict() if session.recipe else None,
        "began_with": session.began_with.to_dict() if session.began_with else None,
        "part": part_of(model),
        "decoder": asdict(config) if isinstance(config := getattr(model, "config", None), DecoderConfig) else None,
        "model": f"{class_of(model).__module__}.{class_of(model).__qualname__}",
        "adapters": adapters_of(model),
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
        "data": session.data.fingerprint,
        "optimizer": spec_to_dict(session.spec, session.optimizer),
        "schedule": schedule_to_dict(session.schedule),
        "settings": {name: getattr(session, name) for name in SETTINGS},
        "compile": session.compile if engine.forward is None else engine.compiled,
        "graphs": engine.wants_graphs,
        "fusion": asdict(fusion) if (fusion := fusion_of(model)) else None,
        "evaluations": [asdict(evaluation) for evaluation in session.evaluations],
        "environment": environment(),
    }


def model_of(found: checkpoints.Checkpoint, model: nn.Module | None, recipe: Recipe | str | None) -> nn.Module:
    """Return the model of a checkpoint with its recipe and fusion, but not its weights yet; `model` where one is given."""
    meta = found.meta
    saved = _saved_recipe(meta)
    given = saved if recipe is None else find_recipe(recipe)
    check_recipe(saved, given)
    if model is None:
        model = rebuild_model(found)
    own = recipe_of(model)
    # a recipe that differs only in what is kept of decoded weights gives way to the one that was asked for
    if given is not None and (own is None or (recipe is not None and own != given and own.numbers == given.numbers)):
        apply_saved(model, given)
        if set_adapters(model, meta.get("adapters")):  # many a recipe has frozen nothing below them
            set_trainable(model, set(meta["trainable"]))
    if meta.get("fusion") and fusion_of(model) is None:
        fuse(model, Fusion(**meta["fusion"]))
    return model


def settings_in(found: checkpoints.Checkpoint, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Session: the checkpoint's, with `changes` in their place."""
    meta = found.meta
    settings = {**meta["settings"], "compile": meta["compile"] is True, "graphs": meta.get("graphs", "auto"), **changes}
    try:
        settings.setdefault("optimizer", spec_from_dict(meta["optimizer"]) if "optimizer" not in changes else None)
        settings.setdefault("schedule", schedule_from_dict(meta["schedule"]) if "schedule" not in changes else None)
    except ValueError as error:
        raise ResumeError(str(error)) from error
    return settings


def load(session: Session, found: checkpoints.Checkpoint) -> None:
    """Load a checkpoint's state into the session. Everything is checked before anything changes, except what the parts refuse."""
    meta, peers = found.meta, session.peers
    own = peers.together(lambda: found.own_state(peers.rank))
    again = found.ranks == peers.world  # as many processes as wrote it
    peers.together(lambda: _check(session, found, own if again else {}))
    state = peers.together(found.state)
    groups = session.optimizer.param_groups
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    lost: set[str] = set()
    if found.sharded or is_sharded_model(session.model):
        lost = _load_parts(session, found, state["optimizer"], peers)
    else:
        peers.together(lambda: checkpoints.load_model(found, session.model))
        peers.together(lambda: fitting(lambda: session.optimizer.load_state_dict(state["optimizer"])))
    saved, given = _saved_recipe(meta), session.recipe
    session.began_with = _saved_recipe(meta, "began_with") or given
    if saved is not None and given is not None and saved.numbers != given.numbers:
        note_recipe(session.model, saved, part_of(session.model))  # with the changes that were made in the run
    if (part := meta.get("part", 0)) != part_of(session.model):
        assert session.recipe is not None
        go_over(session, session.recipe, part)
    if again and own:  # delayed scales of copies are each process's own
        state |= {"scaling": own["scaling"], "data": own["data"]}
    peers.together(lambda: fitting(lambda: convert.load_scaling_state(session.model, state["scaling"])))
    for group, own_options in zip(session.optimizer.param_groups, options):
        group.update(own_options)  # the options that this session was given count
    session.data.load_state_dict(state["data"])
    random = own.get("random") or (state.get("random") if peers.is_first else None)
    if random is not None:
        session.random.state = RandomState.from_dict(random, session.device)
    else:  # of a process that was not there
        session.random.state = RandomState.seeded(
            session.seed + 1_000_003 * (meta["step"] * peers.world + peers.rank), session.device
        )
    session.restore_counters(meta)
    if session.records.path is not None and session.records.path.exists():
        counted_ms, redone_ms = session.records.resume(session.steps)
        session.step_s, session.redone_s = counted_ms / 1e3, redone_ms / 1e3
        session.journal.restore()
    if found.passed_over and peers.is_first:
        _say(session, found.passed_over)
    if (not again or lost) and peers.is_first:
        parts = found.ranks * meta["settings"]["accumulate"], peers.world * session.accumulate
        said = _of_another_layout(found.ranks, peers.world, lost) + _of_another_batch(*parts, peers.world)
        session.note(said)
        print(f"surokit: {said}", file=sys.stderr, flush=True)


def _check(session: Session, found: checkpoints.Checkpoint, own_state: dict[str, Any]) -> None:
    """Raise ResumeError where the checkpoint is of another recipe, other data or other trained parameters."""
    meta = found.meta
    saved, given, began_with = _saved_recipe(meta), session.recipe, _saved_recipe(meta, "began_with")
    # a script that is started again gives what the run began with, whatever it was switched to
    if not (given and began_with and given.numbers == began_with.numbers):
        check_recipe(saved, given)
    own, data = session.data.fingerprint, own_state.get("fingerprint", meta["data"])
    if data != own:
        raise ResumeError(
            f"The data is not what the run was started with (fingerprint {own or 'unknown'}, in the checkpoint "
            f"{data or 'unknown'}): pass the same source, tokenizer, length, batch and seed, or start a new run."
        )
    trainable = [name for name, p in session.model.named_parameters() if p.requires_grad]
    if trainable != meta["trainable"]:
        differing = sorted(set(trainable) ^ set(meta["trainable"]))
        raise ResumeError(f"Other parameters are trained than in the checkpoint: {', '.join(differing[:20])}.")
    check_adapters(meta.get("adapters"), session.model)


def _saved_recipe(meta: Mapping[str, Any], name: str = "recipe") -> Recipe | None:
    return Recipe.from_dict(found) if (found := meta.get(name)) else None


def _load_parts(session: Session, found: checkpoints.Checkpoint, saved: Mapping[str, Any], peers: Peers) -> set[str]:
    """Load weights and the optimizer's state into the shards that this process holds; return what could not be kept."""
    model, optimizer = session.model, session.optimizer
    source: DividedTensors | WholeTensors
    if found.sharded:
        source = peers.together(lambda: divided_tensors(found.path))
        load_model(found, model, source, peers)
        params = parameters_by_name(optimizer, model)
    else:
        source = whole = peers.together(lambda: WholeTensors(found))
        load_model(found, model, source, peers)
        params = parameters_by_name(optimizer, model)
        saved = peers.together(lambda: whole.with_state(saved, optimizer, params))
    lost = load_optimizer(optimizer, params, saved, source, peers)
    return set().union(*peers.now(lambda: peers.agree(lambda: lost)))


def _of_another_layout(before: int, now: int, lost: set[str]) -> str:
    """Return in words what is not as it would have been without a change in the number of processes."""
    go_on = f"{now} process{'es go' if now > 1 else ' goes'} on"
    text = (
        f"The checkpoint was written by {before} process{'es' * (before > 1)} and {go_on} from it: weights, optimizer state and "
        "the place in the data are the same, and what is drawn from here on (dropout, stochastic rounding) is drawn anew."
    )
    if "8-bit moments" in lost:
        text += " The 8-bit moments were decoded and encoded again, since their blocks begin with each process's part."
    return text


def _of_another_batch(before: int, now: int, world: int) -> str:
    """Return in words that a step takes another number of batches than before the change; "" where it takes as many."""
    if before == now:
        return ""
    same = f": accumulate={before // world} keeps it" if before % world == 0 else ""
    return f" A step takes {counted(now, 'batch', 'batches')} now and took {before}{same}."


def go_on(session: Session) -> None:
    """Go on from the latest checkpoint in the first peer's folder whose bytes are as they were written.

    Where there is none the run begins; where there are damaged ones, what it had written is moved out of the way.
    """
    peers, run_dir = session.peers, session.run_dir
    folder = peers.now(lambda: peers.first(lambda: None if run_dir is None else run_dir / "checkpoints"))
    if folder is None:
        return
    if (last := checkpoints.latest(folder, peers, verify=True)) is not None:
        load(session, last)
        return
    why = checkpoints.damage(folder, peers, verify=True)
    if not why or run_dir is None or not peers.is_first:
        return
    aside = next(path for n in itertools.count(1) if not (path := run_dir / f"damaged-{n}").exists())
    aside.mkdir()
    for name in ("run.json", "records.jsonl", "checkpoints"):  # these last: without them nothing is seen of the others
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    _say(
        session,
        f"{why}. There is no other one, so the run begins anew and all of its steps are lost; what it had written is in {aside}.",
    )


def _say(session: Session, text: str) -> None:
    session.note(text)
    warnings.warn(text, stacklevel=4)


def fork(
    session: Session,
    recipe: Recipe | str | None,
    run_dir: str | Path | None,
    meters: Sequence[Meter | Attachable] | None,
) -> Session:
    """Return a twin of the session as it is now, between two steps."""
    model, optimizer = copy.deepcopy((session.model, session.optimizer))
    if recipe is not None and find_recipe(recipe) != session.recipe:
        with seeded(session.seed, session.device):
            convert.apply(model, recipe)
    trained = {p for p in model.parameters() if p.requires_grad}
    if trained != {p for group in optimizer.param_groups for p in group["params"]}:
        if session.spec is None:
            raise ValueError(
                f"The recipe trains other parameters than the optimizer {type(optimizer).__name__} was built for: "
                "make the session with a specification such as surokit.AdamW(lr=3e-4)."
            )
        state = optimizer.state
        optimizer = session.spec.build(model)
        optimizer.state.update({p: state[p] for p in trained if p in state})
    elif session.schedule is not None:  # the schedule multiplies the rate that the optimizer began with
        for group, base in zip(optimizer.param_groups, session.engine.base_rates):
            group["lr"] = base if not isinstance(group["lr"], Tensor) else group["lr"].fill_(base)
    settings = {name: getattr(session, name) for name in SETTINGS}
    if run_dir is None:
        settings["save_every"] = None
    twin = type(session)(
        model,
        session.data.source,
        optimizer=optimizer,
        eval=session.eval,
        schedule=session.schedule,
        run_dir=run_dir,
        compile=session.compile,
        graphs=session.engine.wants_graphs,
        meters=[settings_of(m) for m in session.measuring.meters] if meters is None else meters,
        **settings,
    )
    twin.spec, twin.usd_per_gpu_hour = session.spec, session.usd_per_gpu_hour
    twin.steps, twin.tokens, twin.elapsed_s = session.steps, session.tokens, session.elapsed_s
    twin.data.load_state_dict(session.data.state_dict())
    twin.random.state = session.random.state
    return twin
