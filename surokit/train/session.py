"""A Session keeps all that a run needs: model, data, optimizer, records, checkpoints. `step` is the only place where a step
happens.

    batches -> forward, backward (accumulated) -> norm of the gradients -> AdamW, clipped and masked -> Record

Nothing on this path reads the device: loss, norm and the mask of a non-finite step stay there and are read some steps
later (runs/records.py). The session has its own random state, in force only while it works (random_state.py). What others ask of a
run happens between two steps (control.py), whichever thread they ask from.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from surokit import convert
from surokit.applied import Trainer, recipe_of
from surokit.data import check_vocabulary
from surokit.nn.delayed import dropped_on_error
from surokit.optim.adamw import AdamW
from surokit.optim.schedule import Cosine, Schedule
from surokit.optim.spec import Spec
from surokit.parallel.layout import Parallel
from surokit.parallel.processes import join
from surokit.parallel.spread import is_deferred, spread
from surokit.parallel.wire import Wire, wire
from surokit.ranks import LIVE, rank_here, why_restarted
from surokit.recipe import Recipe, find_recipe
from surokit.runs.health import Event
from surokit.runs.records import Record, Records
from surokit.runs.status import RunInfo
from surokit.runs.watchdog import Watchdog, watched
from surokit.train import checkpoint_files as checkpoints
from surokit.train import checkpointing, evaluation, switching
from surokit.train.background import Running
from surokit.train.capture import Capture
from surokit.train.compiling import GivenUp
from surokit.train.control import Control, at_a_boundary
from surokit.train.diagnose import Finding
from surokit.train.engine import Engine
from surokit.train.evaluation import Evaluation
from surokit.train.events import Arrivals, Subscriber, Subscribers
from surokit.train.lengths import Lengths
from surokit.train.measuring import Attachable, Measuring, Meter
from surokit.train.meters import Numerics
from surokit.train.peers import ALONE, peers_of
from surokit.train.prefetch import Prefetch
from surokit.train.random_state import OwnRandom, RandomState, mixed, seeded
from surokit.train.run_info import numerics_of, plan_arguments, title_of
from surokit.train.run_status import Condition, Journal
from surokit.train.saving import Saving
from surokit.train.setup import (
    Vocabulary,
    began_in,
    build_optimizer,
    check_alone,
    check_changes,
    check_place,
    check_settings,
    claim_folder,
    device_of,
    explained_entries,
    note_beginning,
    options_for_documents,
    parts_of,
    planned_steps,
    with_targets,
)
from surokit.train.stream import Batch, Stream, check_source
from surokit.train.summary import Summary, summarize

if TYPE_CHECKING:
    import pandas as pd

    from surokit.widgets.panel import Panel

ViewName = Literal["auto", "widget", "svg", "text"]
Exist = Literal["new", "resume", "error"]

_ADAMW = Spec(AdamW, {"lr": 3e-4})
_COSINE = Cosine(warmup=20, steps=500)
COMPILING = "compiling the model: the first step takes longer, often a minute; an interrupt ends it"
BY_HAND = "{0}_every is for session.run(): in a loop of your own call session.{1}(), session.step() does not."


class Session(Trainer):
    """A Session is a training run.

    model: a module whose forward(input_ids=..., labels=...) returns an object with `.loss`, a mean over the labels that
        count. It is trained where its parameters are.
    data: re-iterable of dicts {"input_ids": int64 [B, T], "labels": int64 [B, T]}, labels unshifted, -100 ignored; it
        starts again when it ends. Further entries are handed to the model.
    optimizer: a specification such as surokit.AdamW(lr=3e-4), a torch Optimizer over the model's parameters, or a
        function from parameters to one. One that torch calls amp-scaling capable (ours, torch's fused ones) is clipped
        and masked on the device; any other needs one read of the device a step.
    recipe: applied to the model unless it has it already; None takes the model as it is. One that changes, as
        surokit.FP4.then("bf16", at=0.9), goes over by itself.
    accumulate: batches a step takes, weighted by the labels that count.
    clip: largest norm of all gradients together; None does not clip.
    schedule: from the number of steps done to a factor of the learning rate; None leaves the optimizer's rate alone.
    seed: of everything drawn during training.
    eval, eval_every: held-out batches, and how often `run` evaluates on them, in steps.
    save_every, keep: how often `run` saves, in steps (and when it ends), and how many checkpoints stay; None: all.
    save_async: whether `run` goes on while a checkpoint is written, from copies in the host's memory.
    run_dir: folder for records and checkpoints; None writes nothing. exist: what to do where it has content already:
        "new" takes the next free name, "resume" goes on from its latest checkpoint, "error" raises FileExistsError.
    compile: True compiles the model with torch.compile in the first step, which takes a minute or more.
        Where compiling fails the run goes on without and says so.
    graphs: "auto" records steps as CUDA graphs where they can be, which gives the same numbers; `session.graphs` says whether and
        why not. True warns where they cannot be, False does without.
    meters: functions of the session, called after each update while gradients are still there; each returns 0-d
        tensors or floats by name, which become columns of the records. surokit.numerics(every=20) measures each layer's
        quantization, surokit.activity(every=200) the device's busy share. With experts, records have balance_loss,
        expert_load_max and expert_load_min besides (RouterUse.take says what they are); loss is the language model's alone. On
        several processes they have slowest_rank, and slowest_ms and median_ms of what processes do alone in a step.
    max_skipped: non-finite steps in a row before NonFiniteError, steps without a label that counts before NoTargetsError. Such
        steps change nothing; the first that is not finite is explained.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Batch],
        *,
        optimizer: Spec | torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _ADAMW,
        recipe: Recipe | str | None = None,
        accumulate: int = 1,
        clip: float | None = 1.0,
        schedule: Schedule | None = _COSINE,
        seed: int = 0,
        eval: Iterable[Batch] | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        save_async: bool = False,
        keep: int | None = 2,
        run_dir: str | Path | None = None,
        exist: Exist = "new",
        compile: bool = False,
        graphs: bool | Literal["auto"] = "auto",
        meters: Sequence[Meter | Attachable] = (),
        max_skipped: int = 5,
        parallel: Parallel | None = None,
    ) -> None:
        check_settings(
            model,
            accumulate,
            clip,
            schedule,
            eval,
            eval_every,
            save_every,
            keep,
            run_dir,
            compile,
            graphs,
            max_skipped,
            parallel,
            any(isinstance(meter, Numerics) for meter in meters),
        )
        check_alone(model, parallel)
        self.parallel, self.processes = parallel, join(parallel)
        self.model = model
        if parallel is not None and not is_deferred(model):
            model.to(self.processes.device)
        self.device = self.processes.device if parallel is not None and is_deferred(model) else device_of(model)
        self.accumulate, self.clip, self.schedule, self.seed = accumulate, clip, schedule, seed
        self.eval, self.eval_every, self.save_every, self.keep = eval, eval_every, save_every, keep
        self.save_async, self.compile, self.max_skipped = save_async, compile, max_skipped
        self.random = OwnRandom(mixed(seed, self.processes.rank), self.device)
        self.data = Stream(
            data,
            accumulate,
            guard=self._own_random,
            loop=self._loop,
            part=(self.processes.rank, self.processes.world),
            seed=None if parallel is None else seed,
        )
        self.vocabulary = Vocabulary.of(model)
        check_vocabulary(data, self.vocabulary.size)
        claim = self.processes.first_does(partial(claim_folder, run_dir, exist, rank_here().restarts > 0))
        self.run_dir, self._claimed = claim.folder, claim.order
        self.report = None
        if recipe is not None and recipe_of(model) != find_recipe(recipe):
            with seeded(seed, self.device):
                self.report = convert.apply(model, recipe)
        self.began_with = self.recipe  # before anything was switched
        check_changes(model, self.recipe, self.run_length, self.processes.layout)
        over = spread(model, self.processes, "sum")
        # a sentence on stored weights that are decoded once; shards are decoded where they are gathered
        self.decoded = "" if self.processes.layout.is_sharded else convert.keep_decoded(model)
        if self.decoded and self.report is not None:
            self.report = replace(self.report, notes=(*self.report.notes, self.decoded))
        self.spec = optimizer if isinstance(optimizer, Spec) else None
        self.optimizer = build_optimizer(optimizer, over.forward)
        if (
            accounts := getattr(self.optimizer, "accounts", None)
        ) is not None:  # an optimizer that offloads: its report names weights
            accounts.call(model.named_parameters())
        self.engine = Engine(model, self.optimizer, clip, graphs, spread=over)
        self.prefetch = Prefetch(self.device)
        self._for_documents = options_for_documents(model)
        self.records = Records(self.own_folder / "records.jsonl" if self.own_folder else None)
        self.measuring = Measuring(self.device, meters, model, are_several=self.processes.are_several)
        self.subscribers = Subscribers()
        self.arrivals = Arrivals(self)
        self.control = Control(self)
        self.journal = Journal(self)
        self.peers = peers_of(model, self.processes.are_several)
        self.saving = Saving(self)
        self.evaluations: list[Evaluation] = []
        self.findings: list[Finding] = []
        self.steps = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        self._knows_run = False  # run() was called, or whoever calls step() was told what run() does besides
        self.step_s = 0.0  # the part of elapsed_s that is this session's own: a fork begins anew
        self.redone_s = 0.0
        self.length: int | None = None
        self.lengths = Lengths()
        self.tokens_per_step: int | None = None
        self.usd_per_gpu_hour: float | None = None
        self._panel: Panel | None = None
        self._thread = False
        self._run_s = 0.0
        self._began: float | None = None
        self.model.train()
        if claim.resumes or exist == "resume":
            checkpointing.go_on(self)
        self._watchdog: Watchdog | None = None
        self._ahead = 0  # steps that are there and will be asked for again, since the processes were started anew
        self._note_beginning()

    # -- training

    @overload
    def run(self, steps: int | None = None, minutes: float | None = None, *, thread: Literal[True]) -> Running: ...

    @overload
    def run(self, steps: int | None = None, minutes: float | None = None, *, thread: Literal[False]) -> None: ...

    @overload
    def run(
        self, steps: int | None = None, minutes: float | None = None, *, thread: bool | None = None
    ) -> Running | None: ...

    def run(
        self, steps: int | None = None, minutes: float | None = None, *, thread: bool | None = None
    ) -> Running | None:
        """Train for so many more steps, or minutes, whichever ends first; with neither, to the end of the schedule.

        An interrupt (Ctrl-C, the notebook's stop button), `stop()` from another thread or a file named "stop" in the
        run directory ends it between two steps; the next run() goes on. A second interrupt ends it at once, and the
        step in the making is undone. Records are written and subscribers told in any case.

        thread: True trains in another thread and returns a Running at once; `await` it, or call its wait(). Meanwhile evaluate(),
        save(), sample(), fork() and summary() happen between two steps. None takes what live(thread=...) said, else False.

        RuntimeError where a run of this session goes on, and for thread=True on several processes.
        """
        steps = planned_steps(steps, minutes, self.schedule, self.steps - self._ahead)
        if steps is not None:
            steps, self._ahead = max(0, steps - self._ahead), max(0, self._ahead - steps)
        thread = self._thread if thread is None else thread
        if thread and self.processes.are_several:
            raise RuntimeError(
                "A session on several processes trains in the thread that calls run(): leave thread=True out, and give it to "
                "surokit.launch where buttons shall work."
            )
        if not thread:
            self.control.begin()
            self._run(steps, minutes, shared=threading.current_thread() is not threading.main_thread())
            return None
        return Running(partial(self._run, steps, minutes, shared=True), self.control, self.device, title_of(self))

    def _run(self, steps: int | None, minutes: float | None, shared: bool = False) -> None:
        total = None if steps is None else self.steps + steps
        last = math.inf if total is None else total
        limit_s = math.inf if minutes is None else 60 * minutes
        reason = "done"
        try:
            self.control.enter()
            self._knows_run = True
            self._began = time.monotonic()
            self._prepare()
            self.journal.begin(total)
            with watched() as self._watchdog, self.random.in_force(shared), self.control.interruptible(), self._loop():
                while self.steps < last:
                    self.beat()
                    if time.monotonic() - self._began - self.control.paused_s >= limit_s:
                        self.control.stop("done")
                    if asked := self.control.poll_requests():
                        reason = asked
                        break
                    if self.random.yield_lock():
                        self.measuring.restart()
                    try:
                        self._step_of_run()
                    except GivenUp:  # a stop that did not wait for the compiler
                        reason = self.control.reason
                        break
                self.arrivals.drain(wait=True)
                self.control.settle()
                if self.save_every and self.steps and self.saving.saved_at != self.steps:
                    self.save()
                self.saving.wait()
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._run_s, self._began = self.run_s, None
            try:
                self.arrivals.drain(wait=True)
                self.saving.finish()
            finally:
                self._end(reason)

    def _end(self, reason: str) -> None:
        try:
            self.records.flush()
            self.control.finish()
            self.journal.end(reason)
        finally:
            self.control.end()

    @property
    def run_s(self) -> float:
        """Return how many seconds run() has taken so far, with evaluations and checkpoints."""
        return self._run_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def step(self, batch: Batch | Sequence[Batch]) -> Record:
        """Take one optimizer step on a batch: a dict, which is split in `accumulate` equal parts along B, or a list of dicts.

        On several processes each takes the step on a batch of its own, all of one size. Nothing waits here; reading `.loss` of
        the record does. An interrupt undoes the step, or comes at its end where weights change already. eval_every, save_every
        and the files that end or pause a run belong to run(): a loop of your own calls evaluate() and save() itself. A warning
        says so to who asked for one of them and has not called run().
        """
        parts = parts_of(batch, self.accumulate)
        if not self._knows_run:
            self._knows_run = True
            for every, name, method in ((self.eval_every, "eval", "evaluate"), (self.save_every, "save", "save")):
                if every:
                    warnings.warn(BY_HAND.format(name, method), stacklevel=2)
        with self._own_random(), self.control.by_hand():
            return self._step(parts)

    def _step_of_run(self) -> None:
        self.random.restore()
        batches = self.data.draw()
        before = self.steps
        try:
            self._step(batches, self.data.tokens)
        finally:
            if self.steps == before:
                self.data.give_back()
        self.saving.tell()
        for every, work in ((self.eval_every, self.evaluate), (self.save_every, self._save)):
            if every and self.steps % every == 0:
                work()
        self.random.snapshot()

    def _step(self, batches: Sequence[Batch], tokens: int | None = None) -> Record:
        """Take a step on this process' batches. tokens: of all processes; None takes the others' for as many."""
        for batch in batches:
            self.vocabulary.check(batch)
        if tokens is None:
            tokens = self.processes.world * sum(batch["input_ids"].numel() for batch in batches)
        check_place(self.model, self.device)
        switching.follow(self)
        self._prepare()
        if not self.model.training:
            self.model.train()
        stalled = self.prefetch.begin(self.random.waiting)
        random, start = RandomState.capture(self.device, torch_only=True), self.measuring.mark()
        with self.control.step():
            try:
                useful = batches if self.processes.are_several else with_targets(batches)
                parts = [self.to_device(batch) for batch in useful]
                lr = self.engine.set_rate(None if self.schedule is None else self.schedule(self.steps))
                watched = self.measuring.watched(self.engine, self.steps + 1, parts)
                with (
                    self.vocabulary.explains(*batches),
                    explained_entries(self.model, *batches),
                    watched,
                    self._compilation(parts),
                    dropped_on_error(self.optimizer),
                ):
                    loss, targets = self.engine.gradients(parts)
                self.control.final = True
                values = self.engine.update(loss, targets)
                self.steps += 1
            except BaseException:
                self.model.zero_grad(set_to_none=True)
                random.restore()
                raise
            self.control.midway = False
            end = self.measuring.mark()
            self.prefetch.launched()
            host = self.measuring.read(self, values)
            self.model.zero_grad(set_to_none=True)
            if not stalled:
                self.data.waited_ms = 0.0  # for a batch, while the device had work
            record = self.measuring.record(self, tokens, lr, values, host, start, end)
            self.data.waited_ms = 0.0
            self.tokens += record.tokens
            self.tokens_per_step, self.length = record.tokens, batches[0]["input_ids"].shape[1]
            for batch in batches:
                self.lengths.add_batch(batch)
            self.records.append(record)
            self.arrivals.expect(record, parts, random)
        self.arrivals.drain()
        return record

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch on the device, with the arguments that the model needs beside it."""
        return self.prefetch({**batch, **self._for_documents} if "position_ids" in batch else batch)

    # -- looking

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` now what the run is, and from now on of every step and of the end of each run."""
        self.subscribers.add(subscriber)
        if hasattr(subscriber, "on_info"):
            self.subscribers.emit_to(subscriber, "on_info", self.info)
        self.subscribers.emit_to(subscriber, "on_health", self.journal.phase, ())

    def live(
        self, *, thread: bool | None = None, view: ViewName = "auto", usd_per_gpu_hour: float | None = None
    ) -> None:
        """Show the live panel here; it follows this session's runs from now on. An earlier one keeps its picture.

        thread: True lets later runs train in a thread, so that the panel's buttons work while the cell waits:
        `await session.run(500)`. view: "widget", "svg" or "text"; "auto" takes the best that works here. usd_per_gpu_hour: what a
        GPU costs, for dollars so far; never assumed.
        """
        if not self.processes.is_first:
            return
        launch = rank_here().folder
        if launch is not None and self.run_dir is not None:  # whoever asked for the launch shows it there
            (launch / LIVE).write_text(json.dumps({"run_dir": str(self.run_dir.absolute())}))
            return
        from surokit.widgets.panel import Panel
        from surokit.widgets.state import PanelState

        if thread is not None:
            self._thread = thread
        if usd_per_gpu_hour is not None:
            self.usd_per_gpu_hour = float(usd_per_gpu_hour)
        info = self.info
        state = PanelState(info.title, recipe=self.numerics, total=info.total, resumes=True)
        panel = Panel(state, view=view, control=self.control)
        if self._panel is not None:
            self.subscribers.remove(self._panel)
            self._panel.close()
        self._panel = panel
        self.subscribe(panel)
        for event in self.journal.events:
            if event["kind"] in ("note", "slower"):  # said before there was a panel
                panel.on_event(Event(**event))
        panel.open()

    @property
    def info(self) -> RunInfo:
        """Return what the run is, as far as it is known now."""
        return self.journal.describe()

    def note(self, text: str) -> None:
        """Put a word of yours beside the step that is done: on the panel and in run.json."""
        self.journal.note(self.steps, text)

    def stop_when(self, *conditions: Condition) -> None:
        """End a run between two steps once one of `conditions` holds; without any, none does. The run says "stopped: ...".

        Each is what Health sees, by name ("diverging", "unstable", "plateau", "nonfinite", "no_targets", "spike", "grad_spike"),
        or a function of a Record that returns True or a reason. They see a step once its values have arrived. A name
        holds where its event or phase begins: the next run() goes on. A function is asked in later runs too, until stop_when()
        is called anew; the reason says so where it ends one after the other.
        """
        self.journal.stop_when(conditions)

    @at_a_boundary
    def evaluate(self, data: Iterable[Batch] | None = None) -> float:
        """Return the mean held-out loss over the labels that count, on `data` or the session's `eval`; waits for the device.

        Leaves training mode, random states, gradients and delayed scales as they were.
        """
        source = self.eval if data is None else data
        if source is None:
            raise ValueError("There is nothing to evaluate on: give Session(eval=...) or evaluate(data).")
        check_source(source)
        self.arrivals.drain(wait=True)
        found = evaluation.evaluate(self, source)
        self.evaluations.append(found)
        self.records.update(self.steps, eval_loss=found.loss)
        self.records.flush()
        self.subscribers.emit("on_eval", found.step, found.loss)
        self.measuring.restart()
        return found.loss

    @at_a_boundary
    def sample(
        self,
        prompt: str,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        tokenizer: Any = None,
    ) -> str:
        """Return `prompt` and how the model continues it; temperature 0 is greedy. No chat template is applied: see `chat`.

        max_new_tokens: at most; where not given 64, or as many as the model's max_length has room for. tokenizer: the data's
        where not given; else whatever surokit.load_tokenizer takes.
        """
        self.arrivals.drain(wait=True)
        text = evaluation.sample(self, prompt, max_new_tokens, temperature, seed, tokenizer)
        self.measuring.restart()
        return text

    @at_a_boundary
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        tokenizer: Any = None,
        template: str | None = None,
    ) -> str:
        """Return the model's reply to a conversation, without special tokens; temperature 0 is greedy.

        The conversation is rendered as surokit.chat renders its data, and opened for the assistant. The reply ends with the
        template's end of turn, an end token of the tokenizer or of the model, or max_new_tokens.

        messages: [{"role": ..., "content": ...}], the last one not the assistant's; or a text, which the user says.
        max_new_tokens: at most; where not given 128, or as many as the model's max_length has room for.
        tokenizer: the data's where not given; else whatever surokit.load_tokenizer takes, with its own template.
        template: a Jinja chat template; where not given, the one of the data, else the tokenizer's.

        ValueError without a tokenizer or a template, and where the conversation is none or the template refuses it.
        """
        self.arrivals.drain(wait=True)
        reply = evaluation.chat(self, messages, max_new_tokens, temperature, seed, tokenizer, template)
        self.measuring.restart()
        return reply

    @at_a_boundary
    def summary(self, usd_per_gpu_hour: float | None = None) -> Summary:
        """Return the sustained tokens/s with spread and drift, idle share, utilisation, memory, cost; see Summary."""
        self.arrivals.drain(wait=True)
        return summarize(self, usd_per_gpu_hour)

    @at_a_boundary
    def layers(self) -> pd.DataFrame:
        """Return the measurements of surokit.numerics(), one row a sampled step, layer and product: step, layer, gemm, sqnr_db,
        clipped, underflow, amax_a, amax_b, scale_spread, in_force_a, in_force_b, bad. Waits for what is on its way.
        """
        if not self.measuring.watchers:
            raise ValueError("No layer is measured: give Session(meters=[surokit.numerics(every=20)]).")
        self.arrivals.drain(wait=True)
        return self.measuring.watchers[0].frame()

    def to_deepspeed(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return these settings as a DeepSpeed configuration, and write it to `path` as JSON where one is given.

        ZeRO's stage (3 where parameters are sharded, 2 where the optimizer offloads, else 0), offload_optimizer, a zenflow block
        for surokit.ZenFlow, optimizer, gradient_clipping, gradient_accumulation_steps, train_micro_batch_size_per_gpu, bf16 or
        fp16. Hot columns are chosen every so many steps, as here; "epoch" stays. Without counterpart there: cold_update,
        max_interval, steps_per_epoch, slots, link; recipes, the schedule, groups of parameters. A warning says where a setting
        would behave differently; ValueError where ZenFlow's topk_ratio has no counterpart, or a batch's rows are not known yet.
        """
        from surokit.integrations.deepspeed import configuration

        return configuration(self, self.plan_arguments().get("batch"), path)

    def plan_arguments(self) -> dict[str, Any]:
        """Return arguments of `surokit.plan` that this session's steps have; batch and length where they are known."""
        return plan_arguments(self)

    def wire(self) -> Wire:
        """Return what each process receives from the others in a step of one batch: gathered weights and gradients, in bytes."""
        return wire(self.model, self.processes)

    @property
    def first_bad(self) -> str:
        """Return the layer that went bad first, with the step and the reason; "" where none did or nothing is measured."""
        return next((watcher.first_bad for watcher in self.measuring.watchers if watcher.first_bad), "")

    @property
    def recipe(self) -> Recipe | None:
        """Return the recipe that was applied to the model, None for a model as given."""
        return recipe_of(self.model)

    @property
    def recipe_now(self) -> Recipe | None:
        """Return the part of a recipe that changes which computes the next step; else the recipe."""
        recipe = self.recipe
        return None if recipe is None else recipe.parts[recipe.part_at(self.steps, self.run_length)]

    @property
    def run_length(self) -> int | None:
        """Return for how many steps the schedule is made, of which a recipe's changes may be shares; None where none says."""
        return getattr(self.schedule, "steps", None)

    @property
    def numerics(self) -> str:
        """Return "native", or what is emulated and why; "" for bf16 and for a model as given."""
        return numerics_of(self.recipe_now, self.device)

    @property
    def graphs(self) -> Capture:
        """Return whether steps run as CUDA graphs ("on", "waiting", "off"), and why."""
        return self.engine.capture

    def __repr__(self) -> str:
        recipe, now = self.recipe, self.recipe_now
        said = f"{recipe.name} " if recipe else ""
        if recipe and recipe.later and now:
            steps = ((change.step(self.run_length), change.recipe.name) for change in recipe.later)
            then = next((f", {name} after step {step:,}" for step, name in steps if step > self.steps), "")
            said += f"(the next step in {now.name}{then}) "
        graphs = f", graphs {self.graphs}" if self.device.type == "cuda" else ""
        return (
            f"<Session {said}{type(self.model).__name__} on {self.device}, {self.steps} steps done, {self.run_dir}"
            f"{graphs}>"
        )

    # -- keeping

    @at_a_boundary
    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of everything the next step depends on; return its folder.

        wait: False copies what is to be written, as it is now, and writes it in a thread while training goes on. The next
        save(), the end of run(), `session.saving.wait()` and the end of the process wait for it.

        Where several processes train the model together all of them call this, and rank 0 says where it is written.

        CheckpointError where the disk does not take it: nothing is lost then, neither here nor on the disk. One that was not waited
        for fails with a warning and a note, and the next save() or the end of run() raises it.
        """
        self.arrivals.drain(wait=wait)
        self.records.flush()
        path = self.saving.save(wait)
        self.measuring.restart()
        return path

    def _save(self) -> None:
        self.save(wait=not self.save_async)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module | None = None,
        *,
        data: Iterable[Batch],
        recipe: Recipe | str | None = None,
        **changes: Any,
    ) -> Session:
        """Return the session of a run directory's latest checkpoint, or of one checkpoint, ready to go on bit for bit.

        model: a fresh one of the same shape; None rebuilds a surokit.Decoder from the checkpoint. data: what the run was
        started with. recipe: the checkpoint's, which is applied where `model` has none yet, and so is its fusion. changes:
        arguments of Session that shall differ, and those a checkpoint cannot hold (eval, meters, an optimizer or a schedule
        of your own).

        FileNotFoundError, CheckpointError, or ResumeError that names what does not match.
        """
        processes = join(changes.get("parallel"))
        peers = ALONE if model is None or processes.are_several else peers_of(model)
        found = processes.first_does(lambda: checkpoints.find(Path(path), peers, verify=True))
        model = checkpointing.model_of(found, model, recipe)
        settings = checkpointing.settings_in(found, changes)
        save_every = settings.pop("save_every")
        session = cls(model, data, **settings)
        if (
            session.run_dir is None
            and found.path.parent.name == "checkpoints"
            and (peers.is_first or processes.are_several)
        ):
            session.run_dir = found.path.parent.parent
            session.records.path = session.own_folder / "records.jsonl" if session.own_folder else None
        session.save_every = save_every if session.run_dir or not peers.is_first else None
        if not (
            rank_here().restarts and session.steps
        ):  # else it has gone on from what its processes saved before one failed
            checkpointing.load(session, found)
        session._note_beginning()
        return session

    def restore_counters(self, meta: Mapping[str, Any]) -> None:
        """Let the counts go on from a checkpoint's."""
        self.steps, self.tokens = meta["step"], meta["tokens"]
        self.elapsed_s = self.step_s = meta["elapsed_s"]
        self._run_s = meta["run_s"]
        self.evaluations = [Evaluation(**row) for row in meta["evaluations"]]
        self.saving.saved_at = self.steps

    @at_a_boundary
    def fork(
        self,
        recipe: Recipe | str | None = None,
        run_dir: str | Path | None = None,
        meters: Sequence[Meter | Attachable] | None = None,
    ) -> Session:
        """Return a twin that goes on from here with copies of its own: same weights, optimizer state, step, schedule, seed and
        random states, same next batch; only the recipe differs. With the same recipe it does bit for bit the same.

        Optimizer state stays with every parameter that `recipe` still trains; new ones (adapters) start without. Delayed
        scales are kept for the same recipe and begin anew for another. Records begin empty, at this step. meters: None takes
        this session's. RuntimeError where several processes train the model.
        """
        if self.processes.are_several:
            raise RuntimeError(
                "A session that trains on several processes cannot be forked: save it, and resume the checkpoint with parallel=."
            )
        self.arrivals.drain(wait=True)
        return checkpointing.fork(self, recipe, run_dir, meters)

    # -- changing the recipe

    @at_a_boundary
    def switch(self, recipe: Recipe | str) -> None:
        """Go on in another recipe from the next step on; weights, optimizer state and random states stay.

        `session.recipe` is then the one so far with this change: checkpoints have it, and a resumed run goes on the same. Changes
        that were still to come are dropped; delayed scales begin anew. On several processes all call it after the same step.

        ValueError for a recipe that stores weights in another way or trains other parameters: fork() begins with any.
        """
        switching.switch(self, recipe)

    # -- contexts, stopping, compiling

    def stop(self) -> None:
        """End the run that is going on, from another thread, at the end of its step, as session.control.stop() does.

        Where none goes on it does nothing: the next run() is not stopped.
        """
        self.control.stop("stopped: by session.stop()")

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        self.control.only_here()
        with self.random.in_force():
            yield

    @contextmanager
    def _loop(self) -> Iterator[None]:
        self.data.waited_ms = 0.0
        with self.measuring.loop():
            yield

    def _note_beginning(self) -> None:
        """Note at which step the run begins, for when its processes are started anew; once they are, what they ask for anew is
        there in part."""
        if self.run_dir is None:
            return
        began = began_in(self.run_dir) if rank_here().restarts else None
        if began is not None:
            self._ahead = max(0, self.steps - began)
            if self.own_folder is not None:
                again = f"{self.redone_s:.1f} s of work are done again"
                self.note(f"{why_restarted()} The run goes on from step {self.steps}; {again}.")
        elif self.processes.is_first and rank_here().may_restart:
            note_beginning(self.run_dir, self.steps, self._claimed)

    @property
    def own_folder(self) -> Path | None:
        """Return the run's folder where this process writes in it: the first of several does."""
        return self.run_dir if self.processes.is_first else None

    def beat(self) -> None:
        """Say that the run goes on, to the watchdog of a launch: once a step, and once a batch of an evaluation."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def _prepare(self) -> None:
        if self.engine.prepare(self.compile):
            print(f"surokit: {COMPILING}", file=sys.stderr, flush=True)
            self.note(COMPILING)

    @contextmanager
    def _compilation(self, parts: Sequence[Batch]) -> Iterator[None]:
        """Let forward and backward in the block be given up while they compile, and say afterwards what fell back."""
        compiles = self.engine.will_compile(parts)
        with self.control.compilation if compiles else nullcontext():
            try:
                yield
            except KeyboardInterrupt:
                if compiles:
                    self.engine.forget_compiled()  # the next step begins it anew
                raise
        while self.engine.fallbacks:
            said = self.engine.fallbacks.pop()
            self.journal.note(self.steps, said, "slower")
            warnings.warn(said, stacklevel=3)
