"""A Session owns a run: model, data, optimizer, records, checkpoints. `step` is the only place where a step happens.

    batches -> forward, backward (accumulated) -> norm of the gradients -> AdamW, clipped and masked -> Record

Nothing on this path reads the device: loss, norm and the mask of a non-finite step stay there and are read some steps
later (records.py). The session has its own random state, in force only while it works (random_state.py).
"""

from __future__ import annotations

import copy
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from surokit import convert
from surokit.data import check_vocabulary
from surokit.models.fuse import Fusion, fuse, fusion_of
from surokit.nn.delayed import kept_amaxes
from surokit.recipe import Recipe, find_recipe
from surokit.train import checkpoint as checkpoints
from surokit.train.capture import Capture
from surokit.train.diagnose import Finding, find_first_bad
from surokit.train.engine import Engine
from surokit.train.errors import NonFiniteError, ResumeError
from surokit.train.meters import Watcher
from surokit.train.optim import AdamW, Spec, spec_from_dict, spec_to_dict
from surokit.train.prefetch import Prefetch
from surokit.train.random_state import RandomState, kept, seeded
from surokit.train.records import Late, Record, Records, read, wall_ms_in
from surokit.train.schedule import Cosine, Schedule, schedule_from_dict, schedule_to_dict
from surokit.train.setup import (
    another_recipe,
    build_optimizer,
    check_settings,
    claim_folder,
    loss_of,
    options_for_documents,
    parts_of,
    peak_gib,
    rebuild_model,
    targets_in,
    vocabulary_of,
    with_targets,
)
from surokit.train.stream import Batch, Stream, check_batch, check_source
from surokit.train.summary import Summary, summarize

if TYPE_CHECKING:
    import pandas as pd

    from surokit.profiler.device import DeviceWatch

Meter = Callable[["Session"], Mapping[str, Tensor | float]]
Exist = Literal["new", "resume", "error"]

DEVICE_COLUMNS = {"power_w", "sm_mhz", "throttled"}  # of the records on a GPU, where NVML gives them
_STOP_FILE_EVERY_S = 0.5
_ADAMW = Spec(AdamW, {"lr": 3e-4})
_COSINE = Cosine(warmup=20, steps=500)


@runtime_checkable
class Attachable(Protocol):
    """A meter's settings: each session attaches one of its own, which keeps them as `value`. It may also have `paused()`, called
    when something that is no step has happened."""

    def attach(self) -> Meter: ...


def settings_of(meter: Meter) -> Meter | Attachable:
    value = getattr(meter, "value", None)
    return value if isinstance(value, Attachable) else meter


class Subscriber(Protocol):
    """Told of every step once its values have arrived, and of the end of a run: "done", "interrupted", "failed: ...".

    A subscriber may also have on_start(total), the step a run is planned to end at, on_eval(step, loss), and on_sample(sample)
    for what `numerics` measured. One that raises is dropped with a warning.
    """

    def on_step(self, record: Record) -> None: ...

    def on_end(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss after `step`: the mean over `targets` labels; wall_ms on the host."""

    step: int
    loss: float
    targets: int
    wall_ms: float


class Session:
    """A training run.

    model: a module whose forward(input_ids=..., labels=...) returns an object with `.loss`, a mean over the labels that
        count. It is trained where its parameters are.
    data: re-iterable of dicts {"input_ids": int64 [B, T], "labels": int64 [B, T]}, labels unshifted, -100 ignored; it
        starts again when it ends. Further entries are handed to the model.
    optimizer: a specification such as surokit.AdamW(lr=3e-4), a torch Optimizer over the model's parameters, or a
        function from parameters to one. One that torch calls amp-scaling capable (ours, torch's fused ones) is clipped
        and masked on the device; any other needs one read of the device a step.
    recipe: applied to the model unless it has it already; None takes the model as it is.
    accumulate: batches a step takes, weighted by the labels that count.
    clip: largest norm of all gradients together; None does not clip.
    schedule: from the number of steps done to a factor of the learning rate; None leaves the optimizer's rate alone.
    seed: of everything drawn during training.
    eval, eval_every: held-out batches, and how often `run` evaluates on them, in steps.
    save_every, keep: how often `run` saves, in steps (and when it ends), and how many checkpoints stay; None: all.
    run_dir: folder for records and checkpoints; None writes nothing. exist: what to do where it has content already:
        "new" takes the next free name, "resume" goes on from its latest checkpoint, "error" raises FileExistsError.
    compile: True, False, or "auto": from 2000 planned steps on a CPU, where it pays for its start.
    graphs: "auto" records steps as CUDA graphs where they can be, which gives the same numbers; `session.graphs` says whether and
        why not. True warns where they cannot be, False does without.
    meters: functions of the session, called after each update while gradients are still there; each returns 0-d
        tensors or floats by name, which become columns of the records. surokit.numerics(every=20) measures each layer's
        quantization, surokit.activity(every=200) the device's busy share.
    max_skipped: non-finite steps in a row before NonFiniteError. Such steps change nothing; the first is explained.
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
        keep: int | None = 2,
        run_dir: str | Path | None = None,
        exist: Exist = "new",
        compile: bool | Literal["auto"] = "auto",
        graphs: bool | Literal["auto"] = "auto",
        meters: Sequence[Meter | Attachable] = (),
        max_skipped: int = 5,
    ) -> None:
        check_settings(
            model, accumulate, clip, schedule, eval, eval_every, save_every, keep, run_dir, compile, graphs, max_skipped
        )
        self.model = model
        self.device = next(model.parameters()).device
        self.accumulate, self.clip, self.schedule, self.seed = accumulate, clip, schedule, seed
        self.eval, self.eval_every, self.save_every, self.keep = eval, eval_every, save_every, keep
        self.compile, self.max_skipped = compile, max_skipped
        self.data = Stream(data, accumulate, guard=self._own_random_state, loop=self._loop)
        check_vocabulary(data, vocabulary_of(model))
        self.run_dir, found = claim_folder(run_dir, exist)
        self.report = None
        if recipe is not None and convert.recipe_of(model) != find_recipe(recipe):
            with seeded(seed, self.device):
                self.report = convert.apply(model, recipe)
        self._spec = optimizer if isinstance(optimizer, Spec) else None
        self.optimizer = build_optimizer(optimizer, model)
        self._engine = Engine(model, self.optimizer, clip, graphs)
        self._prefetch = Prefetch(self.device)
        self._for_documents = options_for_documents(model)
        self.records = Records(self.run_dir / "records.jsonl" if self.run_dir else None)
        self.evaluations: list[Evaluation] = []
        self.findings: list[Finding] = []
        self.steps = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        self.step_s = 0.0  # of elapsed_s, what is this session's own: a fork begins anew
        self.redone_s = 0.0
        self._run_s = 0.0
        self._began: float | None = None
        self.length: int | None = None
        self._meters: list[Meter] = [m.attach() if isinstance(m, Attachable) else m for m in meters]
        self._device_watch = self._make_device_watch()
        self._subscribers: list[Subscriber] = []
        self._random = RandomState.seeded(seed, self.device)
        self._working = False
        self._updating = False
        self._mark: float | None = None
        self._end: torch.cuda.Event | None = None
        self._recent: dict[int, tuple[list[Batch], RandomState]] = {}
        self._bad_in_a_row = 0
        self._saved_at: int | None = None
        self._stop_asked = False
        self._stop_file_at = 0.0
        self.model.train()
        if found is not None:
            self._load(found)

    # -- training

    def run(self, steps: int | None = None, minutes: float | None = None) -> None:
        """Trains for so many more steps, or minutes, whichever ends first; with neither, to the end of the schedule.

        An interrupt (Ctrl-C, the notebook's stop button), `stop()` from another thread or a file named "stop" in the
        run directory ends it between two steps; the next run() goes on. A second interrupt ends it at once, and the
        step in the making is undone. Records are written and subscribers told in any case.
        """
        steps = self._planned(steps, minutes)
        last = math.inf if steps is None else self.steps + steps
        self._began = time.monotonic()
        deadline = math.inf if minutes is None else self._began + 60 * minutes
        reason = "done"
        self._clear_stop()
        self._prepare(steps)
        self._tell("on_start", None if steps is None else self.steps + steps)
        try:
            with self._own_random_state(), self._interruptible(), self._loop():
                while self.steps < last and time.monotonic() < deadline:
                    if self._stop_wanted():
                        reason = "interrupted"
                        break
                    self._step_of_run()
                self._harvest(wait=True)
                if self.save_every and self.steps and self._saved_at != self.steps:
                    self.save()
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._run_s, self._began = self.run_s, None
            try:
                self._harvest(wait=True)
            finally:
                self.records.flush()
                self._tell("on_end", reason)

    @property
    def run_s(self) -> float:
        """Seconds in run() so far, with evaluations and checkpoints."""
        return self._run_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def step(self, batch: Batch | Sequence[Batch]) -> Record:
        """One optimizer step on a batch: a dict, which is split in `accumulate` equal parts along B, or a list of dicts.

        Nothing waits here; reading `.loss` of the record does.
        """
        parts = parts_of(batch, self.accumulate)
        with self._own_random_state():
            return self._step(parts)

    def _step_of_run(self) -> None:
        batches = self.data.draw()
        before = self.steps
        try:
            self._step(batches)
        finally:
            if self.steps == before:
                self.data.give_back()
        for every, work in ((self.eval_every, self.evaluate), (self.save_every, self.save)):
            if every and self.steps % every == 0:
                work()
                self._pause_clock()

    def _step(self, batches: Sequence[Batch]) -> Record:
        for batch in batches:
            check_batch(batch)
        self._prepare(None)
        if not self.model.training:
            self.model.train()
        stalled = self._prefetch.begin()
        random, start_s = RandomState.capture(self.device, torch_only=True), time.perf_counter()
        start = self._event()
        try:
            parts = [self._prefetch(self._with_options(batch)) for batch in with_targets(batches)]
            lr = self._engine.set_rate(None if self.schedule is None else self.schedule(self.steps))
            with self._watched(parts):
                loss, targets = self._engine.gradients(parts)
            self._updating = True
            values = self._engine.update(loss, targets)
            self.steps += 1
        except BaseException:
            self.model.zero_grad(set_to_none=True)
            random.restore()
            raise
        finally:
            self._updating = False
        end = self._event()
        self._prefetch.launched()
        host = self._read_meters(values)
        self.model.zero_grad(set_to_none=True)
        if not stalled:
            self.data.waited_ms = 0.0  # for a batch, while the device had work
        record = self._record(batches, lr, values, host, (start_s, time.perf_counter()), (start, end))
        self._recent[record.step] = (parts, random)
        self._harvest()
        return record

    def _with_options(self, batch: Batch) -> Batch:
        return {**batch, **self._for_documents} if "position_ids" in batch else batch

    def _record(
        self,
        batches: Sequence[Batch],
        lr: float,
        values: dict[str, Tensor],
        host: dict[str, float],
        clock_s: tuple[float, float],
        events: tuple[torch.cuda.Event | None, torch.cuda.Event | None],
    ) -> Record:
        start_s, end_s = clock_s
        start, end = events
        in_loop = self._mark is not None
        wall_s = end_s - (self._mark if self._mark is not None else start_s)
        if self.device.type != "cuda" and in_loop and wall_s > 0:
            host["idle_frac"] = 1 - (end_s - start_s) / wall_s
        if self._device_watch is not None:
            latest = self._device_watch.latest  # once: its thread puts another in its place
            host.update((name, latest[name]) for name in DEVICE_COLUMNS & latest.keys())
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        self.length = batches[0]["input_ids"].shape[1]
        self.tokens += tokens
        self.elapsed_s += wall_s
        self.step_s += wall_s
        record = Record(
            step=self.steps,
            lr=lr,
            tokens=tokens,
            wall_ms=wall_s * 1e3,
            stall_ms=self.data.waited_ms if in_loop else 0.0,
            peak_gib=peak_gib(self.device),
            elapsed_s=self.elapsed_s,
            late=Late(values, host, start, end, self._end),
        )
        self.data.waited_ms = 0.0
        self.records.append(record)
        if in_loop:
            self._mark, self._end = end_s, end
        return record

    @contextmanager
    def _watched(self, parts: Sequence[Batch]) -> Iterator[None]:
        """Lets the watchers that are due see this step's operands.

        A compiled graph calls no hooks: there the step's first part is computed a second time, uncompiled and aside.
        """
        due = [watcher for watcher in self._watchers if watcher.due(self.steps + 1)]
        with ExitStack() as stack:
            for watcher in due:
                stack.enter_context(watcher.watch(self.model))
            if not due or not self._engine.compiled:
                yield
                return
            with kept(self.device), kept_amaxes(self.model):
                loss_of(self.model(**parts[0])).backward()
            self.model.zero_grad(set_to_none=True)
        yield

    @property
    def _watchers(self) -> list[Watcher]:
        return [meter for meter in self._meters if isinstance(meter, Watcher)]

    def _read_meters(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Adds tensors to `values`, returns floats. A meter that raises is dropped with a warning."""
        host: dict[str, float] = {}
        for meter in list(self._meters):
            try:
                with torch.no_grad():
                    for name, value in meter(self).items():
                        if isinstance(value, Tensor):
                            values[name] = value.detach().reshape(()).to(self.device)
                        else:
                            host[name] = float(value)
            except Exception as error:
                self._meters.remove(meter)
                warnings.warn(
                    f"The meter {getattr(meter, '__name__', meter)} failed and is left out from step {self.steps} on "
                    f"({type(error).__name__}: {error}).",
                    stacklevel=2,
                )
        return host

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    # -- values that have arrived

    def _harvest(self, wait: bool = False) -> None:
        """Hands arrived records on, and looks into those whose step was masked."""
        for record in self.records.harvest(wait):
            batches, random = self._recent.pop(record.step, ([], self._random))
            self._tell("on_step", record)
            for sample in [watcher.arrived(record.step) for watcher in self._watchers]:
                if sample is not None:
                    self._tell("on_sample", sample)
            if not record.skipped:
                self._bad_in_a_row = 0
                continue
            self._bad_in_a_row += 1
            if self._bad_in_a_row == 1:
                self._explain(record.step, batches, random)
            if self._bad_in_a_row >= self.max_skipped:
                self._bad_in_a_row = 0
                raise NonFiniteError(
                    f"{self.max_skipped} steps in a row were not finite, first {self.findings[-1]}. None of them changed "
                    "the model: save() and evaluate() work. Lower the learning rate, look at the data, or keep that "
                    "layer in bf16 with recipe.keep()."
                )

    def _explain(self, step: int, batches: Sequence[Batch], random: RandomState) -> None:
        with kept(self.device), kept_amaxes(self.model):
            random.restore()
            finding = self._engine.with_room(find_first_bad, self.model, batches, step)
        self.findings.append(finding)
        self._pause_clock()
        if len(self.findings) == 1:
            warnings.warn(
                f"A step that is not finite was left out, {finding}. Later ones are in session.findings; "
                f"{self.max_skipped} in a row end the run.",
                stacklevel=2,
            )

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on tells `subscriber` of every step and of the end of each run."""
        self._subscribers.append(subscriber)

    def _tell(self, method: str, *args: Any) -> None:
        for subscriber in list(self._subscribers):
            try:
                if (call := getattr(subscriber, method, None)) is not None:
                    call(*args)
            except Exception as error:
                self._subscribers.remove(subscriber)
                warnings.warn(
                    f"The subscriber {type(subscriber).__name__} failed and is dropped ({type(error).__name__}: {error}); "
                    "training goes on.",
                    stacklevel=2,
                )

    def live(self) -> None:
        """Shows the live panel here; it follows this session's runs from now on."""
        from surokit.widgets.panel import Panel
        from surokit.widgets.state import PanelState

        name = self.recipe.name if self.recipe else type(self.model).__name__
        state = PanelState(name, recipe=self.numerics, total=getattr(self.schedule, "steps", None), resumes=True)
        panel = Panel(state)
        self.subscribe(panel)
        panel.open()

    # -- looking

    def evaluate(self, data: Iterable[Batch] | None = None) -> float:
        """Mean held-out loss over the labels that count, on `data` or the session's `eval`; waits for the device.

        Leaves training mode, random states, gradients and delayed scales as they were.
        """
        source = self.eval if data is None else data
        if source is None:
            raise ValueError("There is nothing to evaluate on: give Session(eval=...) or evaluate(data).")
        check_source(source)
        self._harvest(wait=True)
        began = time.perf_counter()
        total = torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._aside(), torch.no_grad():
            for batch in source:
                check_batch(batch)
                batch = self._prefetch(self._with_options(batch))
                targets = targets_in(batch)
                loss = loss_of(self._engine.with_room(self.model, **batch))
                # a batch without labels has a mean of nothing
                total += torch.where(targets > 0, loss.to(total.dtype) * targets, 0)
                count += targets
        labels = int(count)
        if not labels:
            raise ValueError("The held-out data has no label that counts: it is empty, or all labels are -100.")
        evaluation = Evaluation(self.steps, float(total) / labels, labels, (time.perf_counter() - began) * 1e3)
        self.evaluations.append(evaluation)
        self.records.update(self.steps, eval_loss=evaluation.loss)
        self._tell("on_eval", evaluation.step, evaluation.loss)
        self._pause_clock()
        return evaluation.loss

    def sample(self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> str:
        """`prompt` and what the model makes of it; temperature 0 is greedy. Needs data with a tokenizer."""
        tokenizer = self.data.tokenizer
        if tokenizer is None:
            raise ValueError("The data has no tokenizer, so a prompt cannot be encoded: use surokit.text(...) as data.")
        from surokit.models.generation import generate

        ids = torch.tensor([list(tokenizer.encode(prompt))], dtype=torch.int64, device=self.device)
        if not ids.numel():
            raise ValueError("The prompt has no tokens: give at least a word.")
        generator = torch.Generator(self.device).manual_seed(seed)
        with self._aside(), torch.no_grad():
            out = generate(self.model, ids, max_new_tokens, temperature=temperature, generator=generator)
        self._pause_clock()
        return str(tokenizer.decode(out[0].tolist()))

    def summary(self, usd_per_gpu_hour: float | None = None) -> Summary:
        """Sustained tokens/s with spread and drift, idle share, utilisation, memory, cost; see Summary."""
        self._harvest(wait=True)
        return summarize(self, usd_per_gpu_hour)

    def layers(self) -> pd.DataFrame:
        """What surokit.numerics() measured, one row a sampled step, layer and product: step, layer, gemm, sqnr_db, clipped,
        underflow, amax_a, amax_b, scale_spread, in_force_a, in_force_b, bad. Waits for what is on its way.
        """
        if not self._watchers:
            raise ValueError("No layer is measured: give Session(meters=[surokit.numerics(every=20)]).")
        self._harvest(wait=True)
        return self._watchers[0].frame()

    @property
    def first_bad(self) -> str:
        """The layer that went bad first, with the step and the reason; "" where none did or nothing is measured."""
        return next((watcher.first_bad for watcher in self._watchers if watcher.first_bad), "")

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that was applied to the model, None for a model as given."""
        return convert.recipe_of(self.model)

    @property
    def numerics(self) -> str:
        """ "native", or what is emulated and why; "" for bf16 and for a model as given."""
        recipe = self.recipe
        return "" if recipe is None or not recipe.quantized else convert.emulation(recipe, self.device) or "native"

    @property
    def graphs(self) -> Capture:
        """Whether steps run as CUDA graphs ("on", "waiting", "off"), and why."""
        return self._engine.capture

    def __repr__(self) -> str:
        recipe = f"{self.recipe.name} " if self.recipe else ""
        graphs = f", graphs {self.graphs}" if self.device.type == "cuda" else ""
        return (
            f"<Session {recipe}{type(self.model).__name__} on {self.device}, {self.steps} steps done, {self.run_dir}"
            f"{graphs}>"
        )

    # -- keeping

    def save(self) -> Path:
        """Writes a checkpoint of everything the next step depends on; returns its folder.

        CheckpointError where the disk does not take it: nothing is lost then, neither here nor on the disk.
        """
        if self.run_dir is None:
            raise ValueError("There is nowhere to save to: give Session(run_dir=...).")
        self._harvest(wait=True)
        self.records.flush()
        random = RandomState.capture(self.device) if self._working else self._random
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaling": convert.scaling_state(self.model),
            "data": self.data.state_dict(),
            "random": random.to_dict(),
        }
        config = getattr(self.model, "config", None)
        to_hf = getattr(config, "to_hf", None)
        path = checkpoints.save(
            self.run_dir / "checkpoints", self.model, state, self._meta(), to_hf() if to_hf else None, self.keep
        )
        self._saved_at = self.steps
        return path

    def _meta(self) -> dict[str, Any]:
        from surokit.environment import environment

        return {
            "step": self.steps,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "run_s": self.run_s,
            "recipe": self.recipe.to_dict() if self.recipe else None,
            "model": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
            "trainable": [name for name, p in self.model.named_parameters() if p.requires_grad],
            "data": self.data.fingerprint,
            "optimizer": spec_to_dict(self._spec, self.optimizer),
            "schedule": schedule_to_dict(self.schedule),
            "settings": {name: getattr(self, name) for name in _SETTINGS},
            "compile": self.compile if self._engine.forward is None else self._engine.compiled,
            "graphs": self._engine.wants_graphs,
            "fusion": asdict(fusion) if (fusion := fusion_of(self.model)) else None,
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "environment": environment(),
        }

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
        """The session of a run directory's latest checkpoint, or of one checkpoint, ready to go on bit for bit.

        model: a fresh one of the same shape; None rebuilds a surokit.Decoder from the checkpoint. data: what the run was
        started with. recipe: the checkpoint's, which is applied where `model` has none yet, and so is its fusion. changes:
        arguments of Session that shall differ, and those a checkpoint cannot hold (eval, meters, an optimizer or a schedule
        of your own).

        FileNotFoundError, CheckpointError, or ResumeError that names what does not match.
        """
        found = checkpoints.find(Path(path))
        meta = found.meta
        saved = Recipe.from_dict(meta["recipe"]) if meta["recipe"] else None
        if recipe is not None and find_recipe(recipe) != saved:
            raise another_recipe(saved, find_recipe(recipe))
        if model is None:
            model = rebuild_model(found)
        if convert.recipe_of(model) is None and saved is not None:
            convert.apply(model, saved)
        if meta.get("fusion") and fusion_of(model) is None:
            fuse(model, Fusion(**meta["fusion"]))
        settings = {**meta["settings"], "compile": meta["compile"], "graphs": meta.get("graphs", "auto"), **changes}
        try:
            settings.setdefault("optimizer", spec_from_dict(meta["optimizer"]) if "optimizer" not in changes else None)
            settings.setdefault("schedule", schedule_from_dict(meta["schedule"]) if "schedule" not in changes else None)
        except ValueError as error:
            raise ResumeError(str(error)) from error
        save_every = settings.pop("save_every")
        session = cls(model, data, **settings)
        if session.run_dir is None and found.path.parent.name == "checkpoints":
            session.run_dir = found.path.parent.parent
            session.records.path = session.run_dir / "records.jsonl"
        session.save_every = save_every if session.run_dir else None
        session._load(found)
        return session

    def _load(self, found: checkpoints.Checkpoint) -> None:
        """Takes on a checkpoint's state. Everything is checked before anything changes, except what the parts refuse."""
        meta = found.meta
        saved = Recipe.from_dict(meta["recipe"]) if meta["recipe"] else None
        if saved != self.recipe:
            raise another_recipe(saved, self.recipe)
        own = self.data.fingerprint
        if meta["data"] != own:
            raise ResumeError(
                f"The data is not what the run was started with (fingerprint {own or 'unknown'}, in the checkpoint "
                f"{meta['data'] or 'unknown'}): pass the same source, tokenizer, length, batch and seed, or start a new run."
            )
        trainable = [name for name, p in self.model.named_parameters() if p.requires_grad]
        if trainable != meta["trainable"]:
            differing = sorted(set(trainable) ^ set(meta["trainable"]))
            raise ResumeError(f"Other parameters are trained than in the checkpoint: {', '.join(differing[:20])}.")
        state = found.state()
        checkpoints.load_model(found, self.model)
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            convert.load_scaling_state(self.model, state["scaling"])
        except ValueError as error:
            raise ResumeError(f"The checkpoint's optimizer or scaling state does not fit: {error}") from error
        for group, own_options in zip(self.optimizer.param_groups, options):
            group.update(own_options)  # what this session was given holds
        self.data.load_state_dict(state["data"])
        self._random = RandomState.from_dict(state["random"], self.device)
        self.steps, self.tokens = meta["step"], meta["tokens"]
        self.elapsed_s = self.step_s = meta["elapsed_s"]
        self._run_s = meta["run_s"]
        self.evaluations = [Evaluation(**row) for row in meta["evaluations"]]
        self._saved_at = self.steps
        if self.records.path is not None and self.records.path.exists():
            rows = read(self.records.path)
            before = rows["step"] <= self.steps
            self.records.restore({name: column[before] for name, column in rows.items()})
            self.step_s = float(rows["wall_ms"][before].sum()) / 1e3
            self.redone_s = wall_ms_in(self.records.path) / 1e3 - self.step_s

    def fork(
        self,
        recipe: Recipe | str | None = None,
        run_dir: str | Path | None = None,
        meters: Sequence[Meter | Attachable] | None = None,
    ) -> Session:
        """A twin that goes on from here with copies of its own: same weights, optimizer state, step, schedule, seed and
        random states, same next batch; only the recipe differs. With the same recipe it does bit for bit the same.

        Optimizer state stays with every parameter that `recipe` still trains; new ones (adapters) start without. Delayed
        scales are kept for the same recipe and begin anew for another. Records begin empty, at this step. meters: None takes
        this session's.
        """
        self._harvest(wait=True)
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        if recipe is not None and find_recipe(recipe) != self.recipe:
            with seeded(self.seed, self.device):
                convert.apply(model, recipe)
        trained = {p for p in model.parameters() if p.requires_grad}
        if trained != {p for group in optimizer.param_groups for p in group["params"]}:
            if self._spec is None:
                raise ValueError(
                    f"The recipe trains other parameters than the optimizer {type(optimizer).__name__} was built for: "
                    "make the session with a specification such as surokit.AdamW(lr=3e-4)."
                )
            state = optimizer.state
            optimizer = self._spec.build(model.parameters())
            optimizer.state.update({p: state[p] for p in trained if p in state})
        elif self.schedule is not None:  # the schedule multiplies the rate that the optimizer began with
            for group, base in zip(optimizer.param_groups, self._engine.base_rates):
                group["lr"] = base if not isinstance(group["lr"], Tensor) else group["lr"].fill_(base)
        settings = {name: getattr(self, name) for name in _SETTINGS}
        if run_dir is None:
            settings["save_every"] = None
        twin = type(self)(
            model,
            self.data.source,
            optimizer=optimizer,
            eval=self.eval,
            schedule=self.schedule,
            run_dir=run_dir,
            compile=self.compile,
            graphs=self._engine.wants_graphs,
            meters=[settings_of(m) for m in self._meters] if meters is None else meters,
            **settings,
        )
        twin._spec = self._spec
        twin.steps, twin.tokens, twin.elapsed_s = self.steps, self.tokens, self.elapsed_s
        twin.data.load_state_dict(self.data.state_dict())
        twin._random = RandomState.capture(self.device) if self._working else self._random
        return twin

    # -- contexts, stopping, compiling

    def stop(self) -> None:
        """Ends the run that is going on, from another thread, at the end of its step."""
        self._stop_asked = True

    def _stop_wanted(self) -> bool:
        now = time.monotonic()
        if self.run_dir is not None and now >= self._stop_file_at:
            self._stop_file_at = now + _STOP_FILE_EVERY_S
            if (self.run_dir / "stop").exists():
                (self.run_dir / "stop").unlink(missing_ok=True)
                return True
        return self._stop_asked

    def _clear_stop(self) -> None:
        """What was asked of an earlier run does not hold for this one."""
        self._stop_asked = False
        self._stop_file_at = 0.0
        if self.run_dir is not None:
            (self.run_dir / "stop").unlink(missing_ok=True)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first interrupt asks for a stop, the second raises. Only the main thread receives signals."""
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
            yield
            return

        interrupted = False

        def handler(_signal: int, _frame: Any) -> None:
            nonlocal interrupted
            if interrupted and not self._updating:  # half an update cannot be undone; it ends within milliseconds
                raise KeyboardInterrupt
            interrupted = self._stop_asked = True
            print("\nsurokit: stopping after this step; run() goes on from there", file=sys.stderr)

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        if self._working:
            yield
            return
        with kept(self.device):
            self._random.restore()
            self._working = True
            try:
                yield
            finally:
                self._working = False
                self._random = RandomState.capture(self.device)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """For work that is no training: evaluation mode and other random numbers, both undone afterwards."""
        training = [module for module in self.model.modules() if module.training]
        with seeded(self.seed, self.device):
            self.model.eval()
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """While it lasts, the time between steps counts as theirs."""
        if self._device_watch is not None:
            self._device_watch.start()
        self._mark, self._end, self.data.waited_ms = time.perf_counter(), None, 0.0
        try:
            yield
        finally:
            self._mark = self._end = None
            self._pause_meters()
            if self._device_watch is not None:
                self._device_watch.stop()

    def _pause_clock(self) -> None:
        """What was done since the last step is not the next step's time."""
        self._pause_meters()
        if self._mark is not None:
            self._mark, self._end = time.perf_counter(), None

    def _pause_meters(self) -> None:
        for meter in self._meters:
            if (paused := getattr(meter, "paused", None)) is not None:
                paused()

    def _make_device_watch(self) -> DeviceWatch | None:
        """Power, clock and throttling of a GPU become columns of the records, read once a second by a thread."""
        if self.device.type != "cuda":
            return None
        from surokit.profiler.device import DeviceWatch

        return DeviceWatch(self.device.index)

    def _planned(self, steps: int | None, minutes: float | None) -> int | None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
            raise ValueError(f"run(steps={steps!r}): the number of further steps is a whole number >= 0.")
        if minutes is not None and not 0 <= minutes < math.inf:
            raise ValueError(f"run(minutes={minutes!r}): a finite number >= 0.")
        if steps is None and minutes is None:
            total = getattr(self.schedule, "steps", None)
            if total is None:
                raise ValueError("run() needs steps= or minutes= where no schedule says how long the run is.")
            return max(0, int(total) - self.steps)
        return steps

    def _prepare(self, steps: int | None) -> None:
        planned = max(steps or 0, getattr(self.schedule, "steps", 0) - self.steps)
        self._engine.prepare(planned, self.compile)


_SETTINGS = ("accumulate", "clip", "seed", "eval_every", "save_every", "keep", "max_skipped")
