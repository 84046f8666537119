"""This module takes a session over to another recipe in mid-run: by hand, or at the steps that its recipe says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surokit import convert
from surokit.applied import in_copies, note_recipe, part_of
from surokit.parallel.spread import share_scales
from surokit.recipe import Recipe, find_recipe
from surokit.train.setup import check_changes

if TYPE_CHECKING:
    from surokit.train.session import Session


def switch(session: Session, recipe: Recipe | str) -> None:
    """Add a change to the session's recipe, at its next step, and go over. See Session.switch."""
    before, wanted = session.recipe, find_recipe(recipe)
    if before is None:
        raise ValueError(
            "This session has a model as it was given, so there is no recipe to change: give Session(recipe='bf16') or another."
        )
    kept = before.parts[0]
    for change in before.later[: part_of(session.model)]:
        if change.step(session.run_length) < session.steps:  # else it computed nothing
            kept = kept.then(change.recipe, at=change.at)
    after = kept if wanted.numbers == kept.parts[-1].numbers else kept.then(wanted, at=session.steps)
    check_changes(session.model, after, session.run_length, session.processes.layout)
    session.arrivals.drain(wait=True)
    part = part_of(session.model)
    note_recipe(session.model, after)
    try:
        _go_on_in(session, after, len(after.later))
    except ValueError:  # it cannot be applied to this model, which is as it was
        note_recipe(session.model, before, part)
        raise


def follow(session: Session) -> None:
    """Let that part of the session's recipe compute whose turn the next step is."""
    if (recipe := session.recipe) is not None and recipe.later:
        _go_on_in(session, recipe, recipe.part_at(session.steps, session.run_length))


def _go_on_in(session: Session, recipe: Recipe, part: int) -> None:
    if part == part_of(session.model):
        return
    go_over(session, recipe, part)
    session.journal.note(session.steps, f"the next step is the first in {recipe.parts[part].name}")
    session.journal.changed()
    session.measuring.restart()


def go_over(session: Session, recipe: Recipe, part: int) -> None:
    """Let this part of the session's recipe compute; nobody is told."""
    trained = {name: p.requires_grad for name, p in session.model.named_parameters()}
    convert.apply(in_copies(session.model), recipe.parts[part])
    for name, p in session.model.named_parameters():  # what a user has made trainable stays so
        p.requires_grad_(trained[name])
    note_recipe(session.model, recipe, part)
    share_scales(session.model, session.processes)
    if not session.processes.layout.is_sharded:
        session.decoded = convert.keep_decoded(session.model)
    session.engine.model_changed()
