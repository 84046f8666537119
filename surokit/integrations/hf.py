"""Show the live panel for `transformers.Trainer`: `Trainer(..., callbacks=[LiveCallback()])`.

The Trainer tells a callback that a step ended, and every `logging_steps` the mean loss since the last time; so the loss
curve has a point per log, the rate one per step. Set `logging_steps=1` to see every step, and
`include_num_input_tokens_seen=True` to see tokens/s instead of steps/s.

A step in which no label counts (all are -100) is a warning on the panel and has no loss, whatever the Trainer makes of it
(by default it logs 0); five in a row raise NoTargetsError. A hook on the model counts labels, on the device; torch.compile
leaves it out.

The panel's buttons take effect at the end of a step: the Trainer stops, saves a checkpoint of its own, or waits. With several
processes there are no buttons: one process cannot stop alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surokit.live import Live, count_targets
from surokit.train.errors import NoTargetsError
from surokit.widgets.panel import View, ViewName

_NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "eval_loss": "eval_loss"}


class LiveCallback(TrainerCallback):
    """A LiveCallback feeds a `surokit.Live` from a Trainer, on the main process only.

    title: by default the model's class name. every: shortest time between two pictures, in seconds. run_dir: folder for the
    records, which `sk.watch` follows. usd_per_gpu_hour, view: as for `surokit.Live`. After training, `.live.frame()` has
    the numbers.
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        view: View | ViewName | None = "auto",
        *,
        run_dir: str | Path | None = None,
        usd_per_gpu_hour: float | None = None,
    ) -> None:
        self.title = title
        self.every = every
        self.view = view
        self.run_dir = run_dir
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self.live: Live | None = None
        self._tokens_seen = 0
        self._targets: torch.Tensor | None = None  # labels that counted since the last step, on the device
        self._counting: Any = None
        self._alone = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        model = context.get("model")
        self._alone = args.world_size == 1
        self.live = Live(
            self.title or (type(model).__name__ if model is not None else "Trainer"),
            self.every,
            total=state.max_steps or None,
            recipe="bf16 autocast" if args.bf16 else "fp16 autocast" if args.fp16 else "",
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            run_dir=self.run_dir,
            exist="resume" if state.global_step else "new",
            view=self.view,
            buttons=self._alone,
        )
        self._heed(control)  # so that the buttons know that somebody listens
        self._tokens_seen = _tokens(state)
        self._targets = None
        self._stop_counting()  # of a training that failed
        if model is not None:
            self._counting = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Add up the labels that count in the parts of a step."""
        replica = getattr(model, "_is_replica", False)  # of DataParallel, in a thread of its own
        if model.training and not replica and not torch.compiler.is_compiling():
            self._targets = count_targets(self._targets, inputs.get("labels"))

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.remove()
            self._counting = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        if self.live is None:
            return
        seen = _tokens(state)
        tokens, targets = seen - self._tokens_seen or None, self._targets
        self._tokens_seen, self._targets = seen, None
        try:
            self.live.log(step=state.global_step, tokens=tokens, targets=targets)
        except NoTargetsError:
            if self._alone:  # the other processes may have labels, and would wait for this one
                raise
        self._heed(control)

    def _heed(self, control: TrainerControl) -> None:
        """Pass the requests of the panel's buttons on to the Trainer."""
        if self.live is None or not self._alone:
            return
        self.live.wait_while_paused()
        if self.live.save_asked:
            control.should_save = True
        if self.live.stop_asked:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **context: Any,
    ) -> None:
        values = {_NAMES[name]: value for name, value in (logs or {}).items() if name in _NAMES}
        if self.live is not None and values and state.global_step > 0:
            self.live.log(step=state.global_step, **values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        self._stop_counting()
        if self.live is None:
            return
        early = state.global_step < state.max_steps and not self.live.control.reason
        self.live.close(f"stopped before the planned {state.max_steps:,} steps" if early else None)


def _tokens(state: TrainerState) -> int:
    """Return the input tokens so far; 0 unless the Trainer was asked to count them."""
    return int(state.num_input_tokens_seen or 0)
