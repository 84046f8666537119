"""This module decides whose turn it is in a race, and does what is asked of the race meanwhile.

    warm-up of every run -> rounds: every run has one turn of equally many steps, in balanced order -> held-out loss

Where a race has a goal, runs are judged by it after every round, in nobody's time; one that has reached it has no more turns.

A round's order is drawn from the seed, and the next round takes it backwards, so that a machine that slows down steadily slows all
alike. A turn is untimed steps, in which the machine changes over, and then timed ones. Everything happens in one thread, the
caller's or one of its own. What is asked meanwhile (pause, save, files named "stop", "pause" and "save" in the race's folder) is
looked at between turns; a stop and an interrupt end the turn at the next step, and the next `go_on` finishes it first.
"""

from __future__ import annotations

import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from surokit.racing import comparability, folder
from surokit.racing.entries import Builder
from surokit.racing.goal import Goal
from surokit.racing.model_swap import Parking, bytes_of
from surokit.racing.predicted import Layers, Shares, predict
from surokit.racing.result import RaceResult
from surokit.racing.runs import Prediction, Turn, WarmUp
from surokit.runs.control import RunControl
from surokit.runs.health import Event, Phase
from surokit.runs.records import Record
from surokit.train import Session
from surokit.train.background import Running
from surokit.train.run_info import numerics_of
from surokit.widgets.folder import race_words

WARM_UP = 7  # steps before the turns: compilers, autotuning and the recording of graphs are done then
TRIED = 2  # the last of them, by whose time the turns are planned
UNTIMED = 1  # first step of each turn
PREDICTED_FROM = 4 * (TRIED + 3)  # steps: the warm-up then has two, after the first, for a profile
ROUNDS_WANTED = 12  # that the length of a turn is chosen for
LONGEST_TURN_S = 10.0
SAVE_EVERY_S = 30.0
TELL_EVERY_S = 0.25
_UNTIMED_FIELDS = ("step", "loss", "tokens")


class _Follower:
    """A _Follower subscribes to a session for good, and listens only while the race lets it run: it may be used for other things
    between."""

    def __init__(self, driver: Driver, name: str, panel: Any) -> None:
        self._driver, self._name, self._panel = driver, name, panel

    @property
    def _listens(self) -> bool:
        return self._driver.running == self._name

    def on_step(self, record: Record) -> None:
        if self._listens:
            self._driver.control.stop_turn()
            run = self._driver.race.runs[self._name]
            run.steps.add(record)
            if self._panel is not None:  # without times for the warm-up, which is in no rate
                self._panel.on_step(
                    record if run.warm_up else {name: getattr(record, name) for name in _UNTIMED_FIELDS}
                )

    def on_health(self, phase: Phase, events: Sequence[Event]) -> None:
        if self._panel is not None:
            self._panel.on_health(phase, events if self._listens else ())

    def on_end(self, reason: str) -> None:
        """The race itself says how it ended."""

    def on_info(self, info: Any) -> None:
        if self._panel is not None:
            self._panel.on_info(info)


class RaceControl(RunControl):
    """A RaceControl holds what is asked of a race: it is looked at between turns, but for a stop, which ends the present turn."""

    look_every_s = 0.0

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        super().__init__(driver.race)

    def _forget(self) -> None:
        super()._forget()
        self._driver.race.reason = ""

    def stop(self, reason: str = "stopped: by race.stop()") -> None:
        """Ask the race to stop; does nothing where it does not go on. The first reason that is given holds."""
        super().stop(reason)
        self.stop_turn()

    def stop_turn(self) -> None:
        """End the turn that goes on, if the race shall stop; called again at each step, since a stop may come before the first."""
        if self._reason and (session := self._driver.session) is not None:
            session.control.stop(self._reason)

    @property
    def is_pausing(self) -> bool:
        """Return whether a pause was asked for that has not begun."""
        return self._state == "running" and not self._reason and (self._pause_asked or self.files.pause)

    def _busy(self) -> RuntimeError:
        return RuntimeError("The race goes on already: wait for it with race.wait(), or end it with race.stop().")

    def _serve(self) -> None:
        self._driver.sign()

    def _tell_pause(self, paused: bool) -> None:
        self._driver.tell_pause(paused)

    def _may_raise(self) -> bool:
        session = self._driver.session
        return not (self._driver.moving or (session and session.control.final))

    def _stopping(self) -> str:
        return "stopping the race after this step"


class Driver:
    """A Driver makes a race go: its sessions, their turns, and what is asked meanwhile."""

    def __init__(
        self,
        of: RaceResult,
        builder: Builder,
        allowed: Sequence[str],
        live: bool,
        like: RaceResult | None,
        goal: Goal | None = None,
    ) -> None:
        self.race, self.builder, self.allowed, self.like = of, builder, allowed, like
        self.control = RaceControl(self)
        self.sessions: dict[str, Session] = {}
        self.parking = Parking({})
        self.running = ""  # whose turn it is
        self.session: Session | None = None  # that one's
        self.moving = False  # models, on to the device or from it: what is half moved is lost
        self._order = comparability.Order(looks=WARM_UP)
        self._works: dict[str, comparability.SessionWork] = {}
        self._goal = goal
        self._shares = Shares()
        self._view = _View(of, self.control) if live else None
        self._pending: list[_Due] = []  # turns of this round still to be taken
        self._aim: int | None = of.settings["steps"]  # steps of each run at which this call ends, None by time alone
        self._round = 0
        self._began_s = math.inf  # start of the race's own clock, which stands between two calls
        self._clock_s = 0.0
        self._paused_s = 0.0  # that sessions were within their turns
        self._saved_s = time.monotonic()
        self._told = ("", -math.inf)  # the state, and when
        self._shuffled = random.Random(of.settings["seed"])
        self._last_order: list[str] = []

    @property
    def left(self) -> int:
        """Return how many steps each run still needs for the number that the race was given, beyond those that are due already; 0
        without a number."""
        return max(0, (self.race.settings["steps"] or 0) - self._made)

    @property
    def _made(self) -> int:
        """Return how many steps the run that is furthest has, with those that are due already."""
        due = {due.name: due.untimed + due.timed for due in self._pending}
        return max(len(run.steps) + due.get(name, 0) for name, run in self.race.runs.items())

    # -- who drives

    def words(self) -> str:
        """Return a sentence that says how far the race is."""
        where = f"in round {self._round}" if self._round else "in its warm-up"
        whose = f", {self.running}'s turn" if self.running else ""
        made = min(len(run.steps) for run in self.race.runs.values())
        of = "" if self._aim is None else f" of {self._aim}"
        state = "is paused" if self.control.state == "paused" else "goes on"
        pauses = ", and pauses before the next turn" if self.control.is_pausing else ""
        told = f"every run has made at least {made}{of} steps" if made else "not every run has made a step yet"
        return f"The race {state} {where}{whose}{pauses}: {told}."

    @property
    def goes_on(self) -> str:
        """Return the call by which the race goes on after a stop: one by time has no steps to go on to."""
        return "race.go_on(minutes=1)" if self.race.settings["steps"] is None else "race.go_on()"

    @property
    def all_made(self) -> bool:
        """Return whether every run has the steps at which this call ends."""
        return all(map(self._has_all, self.race.runs))

    def _has_all(self, name: str) -> bool:
        return self._aim is not None and len(self.race.runs[name].steps) >= self._aim

    def _ending(self, name: str, reason: str) -> str:
        """Return why a run ended, where the race ends for `reason`: a run that has all its steps, or its goal, is done, whatever
        stopped the race."""
        has_all = self._has_all(name) or self.race.runs[name].reached is not None
        return "done" if has_all and not reason.startswith("failed") else reason

    def drive(self, work: Callable[[], None]) -> None:
        """Do the work in this thread."""
        self.control.begin()
        self._do(work)

    def start(self, work: Callable[[], None]) -> Running:
        """Start the work in a thread of its own."""

        def stoppable() -> None:
            try:
                self._do(work)
            except KeyboardInterrupt:
                if not self.control.reason:
                    raise  # else it was asked for, and `reason` says so

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        title = ", ".join(self.race.runs)
        if self._view and self.control.is_idle:
            self._view.wait()  # now, where the cursor is; before the thread, which an interrupt of this would leave to nobody
        return Running(stoppable, self.control, device, title, what="the race", goes_on=self.goes_on)

    def _do(self, work: Callable[[], None]) -> None:
        self.control.enter()
        try:
            work()
        finally:
            self.control.end()

    # -- warm-up

    def warm_up(self, steps: int | None) -> None:
        """Make the sessions, check that they do equal work, and take their first steps."""
        count = WARM_UP if steps is None else max(1, min(WARM_UP, steps // 4))
        first_s: dict[str, float] = {}
        if count < PREDICTED_FROM // 4:
            enough = f"steps={PREDICTED_FROM} or more, or minutes="
            self._shares.why = f"the race was too short for a profile of the baseline, so give {enough}"

        def started(name: str, session: Session) -> None:
            session.usd_per_gpu_hour = session.usd_per_gpu_hour or self.race.settings["usd_per_gpu_hour"]
            session.subscribe(_Follower(self, name, self._view.run(name, session) if self._view else None))
            self.sessions[name] = session
            self.sign()
            self._tell(name)
            self._enter(name)
            began = time.perf_counter()
            self._take(name, session, 1)
            first_s[name] = time.perf_counter() - began

        with self._driving("") as ends:
            self._tell("")
            self.sessions, self.parking, together = self.builder.build(self._join, started)
            baseline = self.race.baseline
            for name, session in self.sessions.items():
                self._bring(name)
                tried = min(TRIED, count - 1)
                rest = count - 1 - tried
                profiled = name == baseline and self.race.settings["predict"] and rest > 1
                began = time.perf_counter()
                with self._shares.of(rest) if profiled else nullcontext():
                    self._take(name, session, rest)
                rested = time.perf_counter()
                self._take(name, session, tried)
                ended = time.perf_counter()
                run, first = self.race.runs[name], first_s[name]
                step_s = (ended - rested) / tried if tried else first
                run.warm_up = WarmUp(len(run.steps), first, first + ended - began, step_s)
                if self.control.reason or len(run.steps) < count:
                    raise KeyboardInterrupt(f"the race ended in its warm-up: {self.control.reason or 'interrupted'}")
            if not together:
                graphs = ", and no steps ran as CUDA graphs" if self.sessions[baseline].device.type == "cuda" else ""
                self._note(f"The models took turns on the device: each was parked on the host between its own{graphs}.")
            ends.reason = ""

    def _join(self, name: str, session: Session) -> None:
        """Add a session to the race; its work must equal the baseline's, and that of the saved race if one is run again."""
        race, run = self.race, self.race.runs[name]
        own = self._works[name] = comparability.work_of(session)
        found = comparability.differences(name, own, race.baseline, self._works[race.baseline])
        if self.like is not None:
            found += comparability.not_as_before(name, own, self.like.runs[name].work)
        self._refuse(found)
        recipe = session.recipe
        run.algebra = "" if recipe is None else str(recipe)
        run.recipe = None if recipe is None else recipe.to_dict()
        run.changes = [] if recipe is None else [change.step(session.run_length) for change in recipe.later]
        parts = () if recipe is None else recipe.parts
        said = [numerics_of(part, session.device) for part in parts]
        run.numerics = next((words for words in said if words not in ("", "native")), session.numerics)
        run.work = comparability.work_to_dict(own)

    def _refuse(self, found: Sequence[comparability.Difference]) -> None:
        for text in comparability.refuse(found, self.allowed):
            self._note(f"Allowed: {text}.")

    def _note(self, text: str) -> None:
        if text not in self.race.notes:
            self.race.notes.append(text)

    # -- rounds

    def go_on(self, minutes: float | None, steps: int | None) -> None:
        deadline = math.inf if minutes is None else self._going_s + 60 * minutes
        left = math.inf if steps is None else steps
        self._aim = None if steps is None else self._made + steps
        size, rounds = self._plan(minutes, left)
        first = True
        with self._driving("done") as ends:
            for name in self.sessions:
                self._enter(name)
            while True:
                if not self._pending:
                    if not self._active:
                        break
                    late = self._going_s + size * self._all_step_s / 2 > deadline
                    if left < 1 or (late and not first):
                        break
                    now = size if left == math.inf else math.ceil(left / max(1, rounds))
                    self._pending = self._next_round(now)
                    left, rounds, first = left - now, rounds - 1, False
                if not self._turns_of_round():
                    ends.reason = self.control.reason or "interrupted"
                    return
                self._judge()
                self._save_now_and_then()
            if not self._finish():
                ends.reason = self.control.reason

    @property
    def _going_s(self) -> float:
        """Return a clock that stands while this call is paused: a pause is no part of `minutes`."""
        return time.monotonic() - self.control.paused_s - self._paused_s

    @property
    def _active(self) -> list[str]:
        """Return the runs that go on: all, but for those that have reached the race's goal."""
        return [name for name in self.sessions if self.race.runs[name].reached is None]

    def _judge(self) -> None:
        """Judge by the race's goal, if it has one, the runs that have not reached it; this is in no run's time."""
        if self._goal is None:
            return
        for name in self._active:
            run, session = self.race.runs[name], self.sessions[name]
            self._bring(name)
            value = self._goal.measure(session)
            run.goals.append((len(run.steps), value))
            if self._goal.task is None:
                run.held_out.append((session.steps, value))
                if self._view:
                    self._view.evaluated(name, session.steps, value)
            if self._goal.reached(value):
                run.reached = len(run.steps)

    @property
    def _all_step_s(self) -> float:
        """Return the seconds of a step of every run, one after the other."""
        return sum(map(self._step_s, self._active))

    def _step_s(self, name: str) -> float:
        """Return the seconds of a run's step, by its last turn or the end of its warm-up."""
        run = self.race.runs[name]
        if run.whole_turns:
            return run.whole_turns[-1].seconds / run.whole_turns[-1].steps
        assert run.warm_up is not None
        return run.warm_up.step_s

    def _plan(self, minutes: float | None, left: float) -> tuple[int, int]:
        """Return the steps of a turn, untimed ones included, and the number of rounds; 0 rounds where no number of steps is
        given."""
        settings = self.race.settings
        size = settings.get("turn_steps")
        if size is None:
            slowest_s = max(map(self._step_s, self.sessions))
            if settings["turn_s"] is not None:  # of timed steps, as in a race that is run again
                size = UNTIMED + max(1, round(settings["turn_s"] / slowest_s))
            else:
                total_s = min(left * self._all_step_s, math.inf if minutes is None else 60 * minutes)
                wanted_s = min(LONGEST_TURN_S, total_s / ROUNDS_WANTED / len(self.sessions))
                size = max(UNTIMED + 1, math.floor(wanted_s / slowest_s))
            if self._goal is not None:  # a race that is run again has to be judged after the same steps
                settings["turn_steps"] = size
        return size, 0 if left == math.inf else max(1, int(left // size))

    def _next_round(self, size: int) -> list[_Due]:
        """Return a turn of every run: in an order that is drawn, and in the next round backwards."""
        self._round += 1
        order = self._last_order[::-1]
        if self._round % 2:
            order = list(self.sessions)
            self._shuffled.shuffle(order)
        self._last_order = order
        active = self._active
        untimed = min(UNTIMED, size - 1)
        return [_Due(self._round, name, untimed, size - untimed) for name in order if name in active]

    def _turns_of_round(self) -> bool:
        """Take the turns of this round and return whether all were; what a stop leaves is taken first when the race goes on."""
        while self._pending:
            if self.control.poll_requests():
                return False
            self.sign()
            due = self._pending[0]
            before = self.sessions[due.name].steps
            try:
                self._turn(due)
            finally:  # an error or a second interrupt may leave it half done, too
                self._pending[:1] = due.without(self.sessions[due.name].steps - before)
            if self._pending and self._pending[0].name == due.name:
                return False
        self._order.forget(min(self.sessions[name].steps for name in self._active or self.sessions))
        return True

    def _turn(self, due: _Due) -> None:
        session, run = self.sessions[due.name], self.race.runs[due.name]
        self._bring(due.name)
        on_gpu, at_s = session.device.type == "cuda", self._now_s()
        broken = any(turn.round == due.round for turn in run.turns)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(session.device)
            before = torch.cuda.memory_allocated(session.device)
        untimed = self._take(due.name, session, due.untimed)
        first, began = len(run.steps), time.perf_counter()
        timed = self._take(due.name, session, due.timed) if untimed == due.untimed else 0
        seconds = time.perf_counter() - began
        if timed:
            seconds -= session.control.paused_s
        if on_gpu:
            working = torch.cuda.max_memory_allocated(session.device) - before
            own = (bytes_of([session], planned=False) + working) / 2**30
            run.peak_gib = max(run.peak_gib or 0.0, own)
        tokens = int(run.steps["tokens"][first:].sum())
        whole = not broken and untimed == UNTIMED and timed == due.timed
        turn = Turn(due.round, untimed, timed, session.steps, tokens, seconds if timed else 0.0, at_s, whole)
        if untimed or timed:
            run.turns.append(turn)

    def _bring(self, name: str) -> None:
        """Bring a run's model to the device; an interrupt waits meanwhile, since a model that is half moved is lost."""
        self.sign()
        self._tell(name)
        self.moving = True
        try:
            self.parking.bring(name)
        finally:
            self.moving = False

    def sign(self, state: str | None = None) -> None:
        """Write a sign of life into run.json of every run, between turns: the runs that wait have not gone. In a pause turn.json
        gets one too."""
        for session in self.sessions.values():
            session.journal.beat(state)
        if self.control.state == "paused":  # else a turn that begins tells of itself
            self._tell("")

    def _tell(self, turn: str, state: str = "") -> None:
        """Tell the panel and whoever reads the folder how the race stands: a new state at once, another turn if that is due."""
        state = state or self.control.state
        if self._view:
            self._view.headline(race_words(state, self._round, turn))
        now = time.monotonic()
        if self.race.run_dir is not None and (state != self._told[0] or now - self._told[1] > TELL_EVERY_S):
            self._told = state, now
            folder.tell_turn(self.race.run_dir, self.race.runs, state, self._round, turn)

    def _enter(self, name: str) -> None:
        """Make what this session runs from now on a part of the race, unless it has been one since its warm-up."""
        session = self.sessions[name]
        if not session.control.is_nested:
            made = len(self.race.runs[name].steps)
            session.journal.begin_group(None if self._aim is None else session.steps - made + self._aim)

    def _take(self, name: str, session: Session, steps: int) -> int:
        """Take so many steps of a run; return how many were made. Its batches are compared with those of the others."""
        if steps <= 0 or self.control.reason:
            return 0
        before, evaluates, saves = session.steps, session.eval_every, session.save_every
        session.eval_every = session.save_every = None  # the race evaluates, between turns
        self.running, self.session = name, session
        try:
            with self._order.following(name, session):
                session.run(steps, thread=False)
                if (drain := getattr(session.optimizer, "drain", None)) is not None:
                    drain()  # the work of an offloading optimizer's threads belongs to this turn, and takes no time of the next
        finally:
            self.running, self.session = "", None
            session.eval_every, session.save_every = evaluates, saves
        self._paused_s += session.control.paused_s
        if why := session.control.reason:  # also what came in during the last step
            what = why.removeprefix("stopped: ")
            self.control.stop(why if what == why else f"stopped: {name}, {what}")
        found = self._order.check(name, session.steps)
        self.race.runs[name].batches = self._order.combined.get(name, "")
        self._refuse(found)
        return session.steps - before

    def _finish(self) -> bool:
        """Measure held-out losses and predict gains after the last round; return whether all of it was done."""
        for name, session in self.sessions.items():
            run = self.race.runs[name]
            if session.eval is not None and (not run.held_out or run.held_out[-1][0] < session.steps):
                self._bring(name)
                run.held_out.append((session.steps, session.evaluate()))
                if self._view:
                    self._view.evaluated(name, *run.held_out[-1])
            before = None if self.like is None else self.like.runs[name]
            if before and len(before.steps) == len(run.steps) and before.batches != run.batches:
                self._note(f"The batches of {name!r} were not those of the saved race.")
            recipe, made = session.recipe, len(run.steps)
            if recipe and recipe.later and recipe.part_at(session.steps - 1, session.run_length) < len(recipe.later):
                self._note(
                    f"{name!r} has not come to {recipe.parts[-1].name}: its recipe was to change later than in {made} steps."
                )
            if self.control.reason:
                return False
        if self.race.settings["predict"]:
            self._predict()
        return True

    def _predict(self) -> None:
        baseline, runs = self.race.baseline, self.race.runs
        others = [n for n, run in runs.items() if run.prediction is None and n not in (baseline, self.race.twin)]
        parts = self.sessions[baseline].accumulate
        tokens = int(runs[baseline].steps["tokens"][-1]) // parts
        step_s = statistics.median(
            [turn.seconds / turn.steps for turn in runs[baseline].whole_turns] or [self._step_s(baseline)]
        )

        def layers_of(name: str) -> Layers:
            return Layers(self.sessions[name].model, tokens, lambda: self._bring(name))

        try:
            base, trained_by = layers_of(baseline), type(self.sessions[baseline].optimizer)
            for name in others:
                why = ""
                if runs[name].changes or runs[baseline].changes:
                    why = "the recipe changes on the way, and each part has a speed of its own"
                elif type(self.sessions[name].optimizer) is not trained_by:
                    why = "it is trained by another optimizer, and what products take says nothing of that"
                own = Prediction(None, why=why) if why else predict(layers_of(name), base, self._shares, step_s, parts)
                runs[name].prediction = own
        except Exception as error:  # a race does not fail for want of a prediction
            for name in others:
                runs[name].prediction = runs[name].prediction or Prediction(
                    None, why=f"{type(error).__name__}: {error}"
                )

    def tell_pause(self, paused: bool) -> None:
        """Show that a pause begins, or is over."""
        self.sign(self.control.state)
        if self._view:
            self._view.pause(paused)

    @contextmanager
    def _driving(self, reason: str) -> Iterator[_End]:
        """Let an interrupt in the block ask for a stop, and a second one raise. At the end everything is told and kept; an error
        carries the race."""
        self._began_s = time.monotonic()
        ends = _End(reason)
        try:
            with self.control.interruptible():
                yield ends
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            ends.reason = self.control.reason or "interrupted"
            if not stopped:
                ends.reason = f"failed: {type(error).__name__}: {error}"
            error.race = self.race  # type: ignore[attr-defined]
            raise
        finally:
            self._clock_s, self._began_s = self._now_s(), math.inf
            if ends.reason:  # the race does not go on at once
                self.race.reason = ends.reason
                self._close(ends.reason)

    def _close(self, reason: str) -> None:
        """Keep the race and tell everybody how it ended, each whatever becomes of the one before. In this order: who finds the race
        over has its last records, and who finds all runs over knows how it ended."""
        with ExitStack() as last_first:
            if self._view:
                last_first.callback(self._view.end, {name: self._ending(name, reason) for name in self.race.runs})
            for name, each in reversed(self.sessions.items()):
                last_first.callback(each.journal.end_group, self._ending(name, reason))
            last_first.callback(self._tell, "", reason)
            last_first.callback(self._save_now_and_then, at_once=True)

    def _now_s(self) -> float:
        return self._clock_s + max(0.0, time.monotonic() - self._began_s)

    def _save_now_and_then(self, at_once: bool = False) -> None:
        if self.race.run_dir is None:
            return
        asked = self.control.take_save()
        if not (asked or at_once) and time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        self._saved_s = time.monotonic()
        try:
            self.race.save()
        except OSError as error:
            warnings.warn(
                f"The race cannot be written to {self.race.run_dir} ({error.strerror}); it goes on.", stacklevel=2
            )


@dataclass(frozen=True)
class _Due:
    """A _Due is a turn that is to be taken."""

    round: int
    name: str
    untimed: int
    timed: int

    def without(self, made: int) -> list[_Due]:
        """Return what is left of the turn after `made` steps, in a list that is empty where nothing is."""
        untimed = max(0, self.untimed - made)
        timed = self.untimed + self.timed - made - untimed
        return [replace(self, untimed=untimed, timed=timed)] if untimed + timed > 0 else []


@dataclass
class _End:
    """An _End says why the race ends; "" where it goes on at once."""

    reason: str


class _View:
    """A _View is the panel of all runs. What fails in it costs a warning, never the race."""

    def __init__(self, of: RaceResult, control: Any) -> None:
        from surokit.widgets.panel import Panel
        from surokit.widgets.state import Runs

        self._states = Runs()
        self._total = of.settings["steps"]
        self._panel = Panel(self._states, control=control)
        self._names = list(of.runs)

    def wait(self) -> None:
        """Show the runs that are not there yet."""
        from surokit.widgets.state import PanelState

        for name in self._names:
            self._states.setdefault(name, PanelState(name, total=self._total))
        self._panel.refresh()

    def run(self, name: str, session: Session) -> Any:
        from surokit.widgets.state import PanelState

        total = None if self._total is None else session.steps + self._total
        self._states[name] = PanelState(name, recipe=session.numerics, total=total)
        self._panel.refresh()  # opens it
        return self._panel.run(name)

    def headline(self, words: str) -> None:
        self._states.headline = words

    def evaluated(self, name: str, step: int, loss: float) -> None:
        self._panel.run(name).on_eval(step, loss)

    def pause(self, paused: bool) -> None:
        for name in self._states:
            self._panel.run(name).on_pause(paused)

    def end(self, reasons: dict[str, str]) -> None:
        """Leave the final picture, if anything was shown. reasons: why each run ended."""
        for name in self._states:
            self._panel.run(name).state.reason = reasons[name]
        if self._states:
            self._panel.refresh()
