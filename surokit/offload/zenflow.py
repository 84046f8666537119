"""Define ZenFlow, an optimizer whose state lies on the host, and which the device does not wait for (arXiv 2505.12242).

    ZenFlow(lr=3e-4)                       a specification: Session calls .build(model)
    ZenFlow(model.parameters(), lr=3e-4)   a torch Optimizer

A few columns of every weight, those with the largest gradients, are hot: their state is on the device and every step
updates them there. The others are cold: each step their gradients go down to the host, which adds up those of a window of
steps and updates the columns once, beside the device's next window. The new values go up at that window's end. One step k:

    exchange   where hot columns were chosen at the end of step k - 1: pending weights land, and columns change sides with all state
    send       cold gradients begin their way into a slot of the ring; the accumulator adds them to the window's sum
    update     hot columns, with this step's gradients
    window     where it ends: the window before lands, this one is given to Adam; every so often hot columns are chosen anew

The training thread counts steps and windows, and the two workers do as they are told: no number depends on timing. Nothing here
reads the device, except that the first choice of columns reads the first step's gradients where no warm-up precedes it.

Like sk.AdamW it divides gradients by `grad_scale` and masks the step where `found_inf` is not 0. Both travel with the gradients;
a step that is not finite counts neither in hot columns nor in cold ones, though it takes its place in a window.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from surokit.errors import OffloadError
from surokit.offload.columns import ALONG_ROWS, Columns, check_dense, placed, summed
from surokit.offload.counters import Accounts
from surokit.offload.link import Link, PendingCopy
from surokit.offload.options import check_group, check_zenflow, link_of
from surokit.offload.pipeline import ColumnChoice, Crew, Note, Window, whole
from surokit.offload.windows import LAG, Auto, Fixed
from surokit.offload.workers import Job, Worker, beat
from surokit.offload.written import Written
from surokit.optim.parts import Held, Rows
from surokit.optim.spec import Parameters, SpecMeta
from surokit.optim.states import check_state, decay_groups
from surokit.optim.tensors import scale_and_mask
from surokit.torch_private import declare_amp_scaling

if TYPE_CHECKING:
    from surokit.offload.report import OffloadReport

UPDATE_EVERY = 4  # steps of a window, where nobody says how many
SELECT_EVERY = 100  # steps, where nobody says how many an epoch has


class ParameterPart(NamedTuple):
    """A ParameterPart is a step's share of one parameter: its columns, its gradient and its group."""

    columns: Columns
    g_OI: Tensor
    group: dict[str, Any]


class ZenFlow(torch.optim.Optimizer, metaclass=SpecMeta):
    """ZenFlow is AdamW with most of its state on the host, updated while the device goes on, in float32 whatever the
    weights' dtype.

    params: tensors or torch's parameter groups, as for surokit.AdamW; absent: a `Spec`. Those with fewer than two
    dimensions, and
        groups with "offload": False, are hot as a whole.
    lr: a float or a 0-d tensor on the host, read every step. Cold columns are updated with the value of their window's last
    step. topk_ratio: share k of each weight's columns that are hot: max(1, floor(k * columns)), none where k is 0.
    select_strategy, select_interval: hot columns are chosen anew every so many epochs of `steps_per_epoch` steps ("epoch")
    or
        steps ("step" and "auto"), rounded up to whole windows; an interval of "auto" is one epoch, or 100 steps where
        `steps_per_epoch` is not given. Before the first choice, which follows a warm-up, the first columns are hot.
    update_interval: steps S of a window, or "auto": until the mean |gradient| of cold columns has added up to that of hot
    ones
        for a share `auto_ratio` of the weights, read two steps late, and at most `max_interval`.
    full_warm_up_rounds: steps in the beginning that update all columns, and wait for the host. overlap_step: the host
    updates beside the next window; otherwise the device waits for it. pt_reserved_cores_perc: share of the cores that stay
    with the training thread. cold_update: "deepspeed": one Adam step a window, with the mean gradient, so that cold columns
    train at lr / S.
        "time-corrected": one that stands for the window's steps (betas to their number, learning rates and decay summed);
        without overlap only.
    offload: DeepSpeed's option for hot state on the host, which is refused. slots: steps whose cold gradients may be on
    their way. link: between host and device; None is that of the parameters' device.

    Bytes of an element of a weight whose gradients have b: on the device 12 k, and (1 - k) b of gradients that are on their
    way, so that none waits for them; on the host 12 (1 - k), 4 (1 - k) for each sum (two with overlap), and (1 - k) b for
    each slot and the result. Columns change sides through 128 MiB of pinned memory at most; where a column has more than 16
    MiB of state, from 1.4 million rows on, through that of 8 to 16 columns.

    A Ctrl-C during `step` is raised when the step is complete; a second one at once. After that, or after the device's
    memory ran out in the middle of a step, cold columns have its gradients all or not at all, and hot ones as far as the
    step came, unless columns were just changing sides. After that, and after any other error in the middle of a step, a
    state has to be loaded; so it has after an error of a thread, which the next step raises. An error that comes before
    anything changes leaves all as it was.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    not_recorded = "the optimizer's state is on the host, and its schedule is not the device's"

    def __init__(
        self,
        params: Parameters | None = None,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        *,
        topk_ratio: float = 0.1,
        select_strategy: Literal["auto", "step", "epoch"] = "auto",
        select_interval: int | Literal["auto"] = "auto",
        update_interval: int | Literal["auto"] = UPDATE_EVERY,
        full_warm_up_rounds: int = 0,
        overlap_step: bool = True,
        auto_ratio: float = 0.99,
        max_interval: int = 16,
        pt_reserved_cores_perc: float = 0.5,
        cold_update: Literal["deepspeed", "time-corrected"] = "deepspeed",
        steps_per_epoch: int | None = None,
        offload: bool = False,
        slots: int = 3,
        link: Link | None = None,
    ) -> None:
        assert params is not None, "SpecMeta gives a Spec then"
        self.settings: dict[str, Any] = {
            "topk_ratio": topk_ratio,
            "select_strategy": select_strategy,
            "select_interval": select_interval,
            "update_interval": update_interval,
            "full_warm_up_rounds": full_warm_up_rounds,
            "overlap_step": overlap_step,
            "auto_ratio": auto_ratio,
            "max_interval": max_interval,
            "cold_update": cold_update,
            "steps_per_epoch": steps_per_epoch,
        }
        self.helpers: dict[str, Any] = {"pt_reserved_cores_perc": pt_reserved_cores_perc, "slots": slots}
        self._start(link)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "eps": eps, "offload": True}
        super().__init__(decay_groups(self, params, weight_decay), defaults)

    if TYPE_CHECKING:  # a type checker does not see that ZenFlow(lr=...) is a Spec

        def build(self, params: nn.Module | Parameters) -> ZenFlow: ...

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Check the options; raises ValueError that names the option which is out of range."""
        check_zenflow(cls.__name__, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does. Raises ValueError for an option that is one for all groups, or an "offload"
        that is no bool."""
        check_group(type(self).__name__, param_group, (*self.settings, *self.helpers, "link"))
        super().add_param_group(param_group)

    def _start(self, link: Link | None) -> None:
        """Set up the state before the first step; threads begin with their first job."""
        declare_amp_scaling(self)
        self.accounts = Accounts(link_ms=0.0 if link is None else link.device_stall_ms())
        self.stall_ms = 0.0  # that the host waited in the last step
        self.device_stall_ms = 0.0  # that the device was without work for it, as far as the last step knows
        self._given_link = link
        self._columns: dict[Tensor, Columns] = {}
        self._steps = 0
        self._position = 0  # in the window
        self._since: int | None = None  # the choice of hot columns: steps; None before the first
        s = self.settings
        auto = s["update_interval"] == "auto"
        self._windows = Auto(s["auto_ratio"], s["max_interval"]) if auto else Fixed(s["update_interval"])
        self._window = Window(0)  # in the making
        self._pending: Window | None = None  # given to Adam, and not landed
        self._choice: ColumnChoice | None = None
        self._moving: Job | None = None
        self._notes: deque[Note] = deque()
        self._written = Written(
            type(self).__name__, 'give such parameters a group with "offload": False, or write less often.'
        )
        self._broken: BaseException | None = None

    @property
    def select_every(self) -> int:
        """Return the steps between two choices of hot columns; with windows of their own length ("auto") at least so many."""
        s = self.settings
        interval: int = s["select_interval"] if s["select_interval"] != "auto" else 1
        if s["select_strategy"] == "epoch" or s["select_interval"] == "auto":
            interval *= s["steps_per_epoch"] or SELECT_EVERY
        window = 1 if s["update_interval"] == "auto" else s["update_interval"]
        return math.ceil(interval / window) * int(window)

    @functools.cached_property
    def link(self) -> Link:
        """Return the link between host and device."""
        return link_of(self, self._given_link)

    @functools.cached_property
    def _crew(self) -> Crew:
        return Crew(self.link, self.helpers["slots"], self.helpers["pt_reserved_cores_perc"])

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with whole(), self._unbroken():
            before = self.accounts.stall_ms
            self._adopt(stacklevel=7)  # found, _adopt, step, and torch's wrappers around both
            try:
                parts = self._parts()
                with self._changing():
                    self._step(parts)
            finally:  # a step that is cut short writes weights too
                self._written.note(self._columns)
            self.stall_ms = self.accounts.stall_ms - before
            self.device_stall_ms = self.accounts.device_waited(self.link)
        return loss

    def _step(self, parts: Sequence[ParameterPart]) -> None:
        settings, step = self.settings, self._steps + 1
        warming_up = step <= settings["full_warm_up_rounds"]
        if not warming_up:
            if self._since is None and self._choice is None:
                self._choose(step, parts)
            self._exchange(step)
        self._send(step, parts)
        self._steps, self._position = step, self._position + 1
        with self.link.computes():
            self._update_hot(parts)
        if warming_up:
            self._end_window(wait=True)
            if step == settings["full_warm_up_rounds"]:
                self._choose(step, parts)
        else:
            self._since = (self._since or 0) + 1
            if self._window_is_full():
                self._end_window(wait=not settings["overlap_step"])
                if self._since >= self.select_every:
                    self._choose(step, parts)
        self.link.fence()  # whoever comes next may write gradients and weights
        self.accounts.steps += 1

    @torch.no_grad()
    def _adopt(self, stacklevel: int) -> None:
        """Take over values that were written into weights by hand; an update of theirs that waits to land is made on the
        new values."""
        written = [self._columns[p] for p in self._written.found(stacklevel)]
        if not written:
            return
        pending = Window(0) if self._pending is None else self._pending
        if any(len(columns.cold_order) for columns in written):
            with self.accounts.stalled("adam", self.link):
                for job in (pending.applied, self._moving):
                    if job is not None:
                        job.wait()
        with self.accounts.stalled("landing"):
            came = sum(columns.adopt(self.link, pending.updated.get(columns)) for columns in written)
        self.accounts.moved("adopted", came, 0)
        self._written.note(columns.p for columns in written)

    def _parts(self) -> list[ParameterPart]:
        """Return the parameters that have a gradient; those whose first gradient it is get their state."""
        present = [(number, p, group) for number, (p, group) in enumerate(self._parameters()) if p.grad is not None]
        for _, p, _ in present:
            check_dense(p)
        self._begin([each for each in present if each[1] not in self._columns])
        return [ParameterPart(self._columns[p], self._columns[p].gradient, group) for _, p, group in present]

    def _send(self, step: int, parts: Sequence[ParameterPart]) -> None:
        """Send the cold gradients to the window's sum."""
        parts = [part for part in parts if len(part.columns.cold_order)]
        if not parts:
            return
        link, window, slot = self.link, self._window, self._crew.next_slot()
        with self.accounts.stalled("slot", self.link):
            if slot.job is not None:
                slot.job.wait()
        slot.tag(*scale_and_mask(self, link.device))
        sent = []
        for columns, g, group in parts:
            rows = slot.room(columns, g.dtype)
            sent.append((columns, rows, columns.send(g, rows, link), float(group["lr"])))
        elements = sum(rows.numel() for _, rows, _, _ in sent)

        def accumulate() -> None:
            scale, counts = slot.read()
            for columns, rows, tickets, lr in sent:
                columns.accumulate(window.b, rows, tickets, scale, lr, counts)
                beat()
            if counts:
                window.finite.append((step, elements))

        slot.job = window.filled = self._crew.accumulator.submit(accumulate)
        window.steps += 1
        self.accounts.moved("gradients", sum(rows.nbytes for _, rows, _, _ in sent), 0)
        self._note(parts)

    def _update_hot(self, parts: Sequence[ParameterPart]) -> None:
        for columns, g, group in parts:
            columns.update_hot(g, _options(group), *scale_and_mask(self, g.device))
            self.accounts.staleness[0] += columns.w_hot.numel()

    # -- windows

    def _window_is_full(self) -> bool:
        while len(self._notes) > LAG:
            with self.accounts.stalled("selection", self.link):
                self._windows.note(self._notes.popleft().read())
        return self._windows.ends(self._position, sum(columns.divided for columns in self._columns.values()))

    def _end_window(self, wait: bool) -> None:
        """End the window: the update of the window before lands, and this one is given to the host's Adam; with `wait` it
        lands as well."""
        self._land(self._steps)
        self._submit()
        if wait:
            self._land(self._steps)
        self.accounts.windows += 1
        self.accounts.intervals[self._position] += 1
        self._position = 0
        self._notes.clear()
        self._windows.begin()

    def _submit(self) -> None:
        """Submit Adam's job of this window: the only one in flight, on a sum that the next window leaves alone."""
        window = self._window
        if not window.steps:
            return
        corrected = self.settings["cold_update"] == "time-corrected"
        work = [(columns, _options(group)) for columns, group in self._cold()]

        def apply() -> None:
            if window.filled is not None:
                window.filled.wait()
            for columns, options in work:
                if (update := columns.update_cold(window.b, options, corrected)) is not None:
                    window.updated[columns] = update
                beat()

        window.applied = self._crew.adam.submit(apply)
        self._pending, self._window = window, Window((window.b + 1) % self._sums)

    def _land(self, step: int) -> None:
        """Copy the host's updates into the weights, once, before all work that the device is given from now on."""
        window = self._pending
        if window is None:
            return
        if window.applied is not None:
            with self.accounts.stalled("adam", self.link):
                window.applied.wait()
        with self.accounts.stalled("landing"):
            self.accounts.moved("weights", 0, sum(columns.land(self.link) for columns in window.updated))
        for taken, elements in window.finite:
            self.accounts.staleness[step - taken] += elements
        self._pending = None

    @property
    def _sums(self) -> int:
        return 2 if self.settings["overlap_step"] else 1

    def _note(self, parts: Sequence[ParameterPart]) -> None:
        """Send this step's statistics to the host, where windows have a length of their own."""
        parts = [part for part in parts if part.columns.divided]
        if not isinstance(self._windows, Auto) or not parts:
            return
        values = torch.stack(
            summed([columns.magnitudes(g) for columns, g, _ in parts], [part.columns.p for part in parts])
        )
        scale, bad = scale_and_mask(self, values.device)
        values = values if scale is None else values / scale
        values = values if bad is None else torch.where(bad != 0, -1.0, values)
        to = self.link.buffer(values.shape, torch.float32)
        self._notes.append(Note([part.columns.number for part in parts], to, self.link.copy_down(values, to)))

    # -- the choice of hot columns

    def _choose(self, step: int, parts: Sequence[ParameterPart]) -> None:
        """Choose the columns with the largest gradients and send them to the host; they are hot from the next step on."""
        parts = [part for part in parts if part.columns.divided]
        if not parts:
            return
        columns = [part.columns for part in parts]
        scores = summed([part.columns.energies(part.g_OI) for part in parts], [each.p for each in columns])
        found_inf = scale_and_mask(self, self.link.device)[1]
        picked = [each.choose(score, found_inf) for each, score in zip(columns, scores)]
        self._choice = ColumnChoice.on_its_way(columns, picked, self.link)
        self._choice.step, self._choice.scores = step, scores

    def _exchange(self, step: int) -> None:
        """Make the chosen columns hot from now on: pending weights land, then columns change sides."""
        choice = self._choice
        if choice is None:
            return
        self._land(step)
        with self.accounts.stalled("selection", self.link):
            choice.wait()
            if self._moving is not None:
                self._moving.wait()
        groups, swaps = dict(self._parameters()), self._crew.swaps
        try:
            for i, (columns, chosen, clocks, share) in enumerate(choice):
                with self.accounts.stalled("landing"):
                    entered, moved = columns.exchange(chosen, clocks, groups[columns.p]["betas"], self.link, swaps)
                self.accounts.moved("migration", moved, moved)
                if choice.scores and math.isfinite(share):
                    self.accounts.selected(choice.step, columns.p, choice.scores[i], share, len(chosen), entered)
        except BaseException as error:
            self._broken = error  # some column may be on both sides, or on none
            raise
        self._moving = swaps.last
        # a masked step says nothing of any column: the next window's end chooses again
        self._choice, self._since = None, self.select_every if choice.shares.isnan().all() else 0

    # -- parameters

    def _parameters(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return ((p, group) for group in self.param_groups for p in group["params"])

    def _cold(self) -> Iterator[tuple[Columns, dict[str, Any]]]:
        every = ((self._columns[p], group) for p, group in self._parameters() if p in self._columns)
        return ((columns, group) for columns, group in every if len(columns.cold_order))

    def _view(self, number: int, p: Tensor, group: Mapping[str, Any]) -> Columns:
        return Columns(p, self.state[p], splits=bool(group["offload"]) and p.ndim >= 2, number=number)

    def _begin(self, params: Sequence[tuple[int, Tensor, dict[str, Any]]]) -> None:
        """Make the state of parameters from the weights, or take it over where another optimizer left it in `state`. All or
        none."""
        begun: list[tuple[Columns, Sequence[PendingCopy]]] = []
        try:
            for number, p, group in params:
                columns = self._view(number, p, group)
                columns.check(self.link.device)
                if columns.state:
                    columns.take_over(self.link)
                    self._columns[p] = columns
                else:
                    begun.append((columns, ()))
                    begun[-1] = columns, columns.begin(self.settings["topk_ratio"], self._sums, self.link)
            for columns, tickets in begun:
                columns.settle(tickets)
        except BaseException:
            for columns, _ in begun:
                columns.state.clear()
            raise
        self._columns |= {columns.p: columns for columns, _ in begun}
        self.accounts.moved("setup", sum(c.out.nbytes for c, _ in begun if len(c.cold_order)), 0)
        taken = (self._columns[p] for _, p, _ in params)
        self.accounts.model_bytes += sum(c.weight.numel() * c.gradient.element_size() for c in taken)

    # -- threads

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Raise the error of a thread or a transfer that failed, before or inside; and from then on that a state has to be
        loaded."""
        if self._broken is not None:
            raise OffloadError(
                f"This {type(self).__name__} was cut short by an error and its state is incomplete: load a state, "
                "or make the optimizer anew."
            ) from self._broken
        try:
            if "_crew" in self.__dict__:
                self._crew.check()
            yield
        except OffloadError as error:
            self._broken = error
            raise

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the state as broken after an error inside: the step is done in an unknown part, so that a state has to be
        loaded. A Ctrl-C and memory that runs out are raised between two pieces of work, and training may go on."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._broken = error
            raise

    def drain(self) -> None:
        """Wait until threads and transfers have done all that they were given; nothing lands."""
        with self._unbroken():
            if "_crew" in self.__dict__:
                self._crew.drain()
            if self._choice is not None:
                self._choice.wait()
            for note in self._notes:
                note.read()

    def _drain_and_adopt(self) -> None:
        self.drain()
        with self._unbroken():
            self._adopt(stacklevel=6)  # found, _adopt with torch's wrapper, this, and state_dict

    # -- state

    def report(self) -> OffloadReport:
        """Report stalls, traffic, staleness and the share of the gradients that hot columns have had, so far."""
        from surokit.offload.report import report_of

        crew: Crew | None = self.__dict__.get("_crew")
        return report_of(self, crew.buffers() if crew else (), (crew.accumulator, crew.adam) if crew else ())

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the place in the schedule under "zenflow". It waits for the threads and changes
        nothing: gradients that are summed, and updates that wait to land, are in it, and weights that were written by hand
        are taken over, as by the next step. The tensors are the optimizer's own: copy or write them before the next step."""
        self._drain_and_adopt()
        return {**super().state_dict(), "zenflow": self._cursor()}

    def held(self, p: Tensor, name: str) -> Held:
        """Return what an entry of a parameter's state is to its shard: see surokit/optim/parts.py."""
        if name not in ALONG_ROWS:
            return "same"
        group = next(group for other, group in self._parameters() if other is p)
        return Rows(ALONG_ROWS[name], self._view(0, p, group).row_dims)

    def _cursor(self) -> dict[str, Any]:
        """Return everything but the tensors of each parameter, as plain data; drained before."""
        pending, choice = self._pending, self._choice
        return {
            "settings": dict(self.settings),
            "steps": self._steps,
            "position": self._position,
            "since": self._since,
            "window": self._window.to_dict(),
            "pending": None if pending is None else pending.to_dict(),
            "choice": None if choice is None else choice.to_dict(),
            "windows": self._windows.state_dict(),
            "notes": [note.read() for note in self._notes],
        }

    def _take_up(self, cursor: Mapping[str, Any]) -> None:
        """Go on from `self.state` and a cursor that belongs to it."""
        by_number: dict[int, Columns] = {}
        for number, (p, group) in enumerate(self._parameters()):
            if state := self.state.get(p):
                state.update({name: placed(name, value, p.device, self.link) for name, value in state.items()})
                by_number[number] = self._columns[p] = self._view(number, p, group)
                by_number[number].fit_out(self.link)
                self.accounts.model_bytes += by_number[number].weight.nbytes
        self._steps, self._position, self._since = cursor["steps"], cursor["position"], cursor["since"]
        self._window = Window.from_dict(cursor["window"], by_number)
        if cursor["pending"] is not None:
            self._pending = Window.from_dict(cursor["pending"], by_number)
        if cursor["choice"] is not None:
            self._choice = ColumnChoice.from_dict(cursor["choice"], by_number)
        self._windows.load_state_dict(cursor["windows"])
        self._notes.extend(Note.known(note) for note in cursor["notes"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state and go on bit for bit from where `state_dict` was made, in the middle of a window too. Raises
        ValueError where it does not fit."""
        check_state(self, state_dict)
        cursor = state_dict.get("zenflow")
        if cursor is None:
            raise ValueError(
                f"This state was not made by {type(self).__name__}: load it into the optimizer that made it."
            )
        differing = [name for name, value in self.settings.items() if cursor["settings"].get(name) != value]
        if differing:
            name = differing[0]
            raise ValueError(
                f"The state was made with {name}={cursor['settings'].get(name)!r}, and this optimizer has "
                f"{self.settings[name]!r}: give {name} the same value."
            )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = {p: state_dict["state"].get(n) for (p, _), n in zip(self._parameters(), numbers)}
        for (p, group), state in zip(self._parameters(), saved.values()):
            if state:
                self._view(0, p, group).check_fits(state, self.settings["topk_ratio"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        names = self.accounts.names
        self.close()
        self._start(self._given_link)
        self.accounts.names = names
        self.state.update({p: dict(state) for p, state in saved.items() if state})
        self._take_up(cursor)

    @property
    def workers(self) -> dict[str, Worker]:
        """Return the threads beside the training thread, by name."""
        return {"accumulator": self._crew.accumulator, "adam": self._crew.adam}

    def close(self) -> None:
        """End the threads, even if they are busy."""
        if (crew := self.__dict__.pop("_crew", None)) is not None:
            with contextlib.suppress(OffloadError):
                crew.close()
        if (link := self.__dict__.pop("link", None)) is not None:
            self.accounts.left(link, self._given_link)

    def __getstate__(self) -> dict[str, Any]:
        self._drain_and_adopt()
        own = {"settings": self.settings, "helpers": self.helpers, "_given_link": self._given_link}
        return {**super().__getstate__(), **own, "zenflow": self._cursor()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cursor = state.get("zenflow")
        super().__setstate__({name: value for name, value in state.items() if name != "zenflow"})
        if cursor is not None:  # a copy; load_state_dict comes here without
            self._start(self._given_link)
            self._take_up(cursor)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an update, as the group has them now."""
    return {"lr": float(group["lr"])} | {name: group[name] for name in ("betas", "weight_decay", "eps")}
