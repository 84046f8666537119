"""Show the live panel for `transformers.Trainer`, and TRL's: `Trainer(..., callbacks=[LiveCallback()])`.

The Trainer tells a callback that a step ended, and every `logging_steps` the mean loss since the last time; so the loss
curve has a point per log, everything else one per step: set `logging_steps=1` to see the loss of every step. A loss that is not
finite is told at the next log, also where the Trainer leaves it out of its mean (`logging_nan_inf_filter`, on by default, which
waits for the device in every part of a step).

Tokens and labels are counted by a hook on the model, on the device; what torch.compile wraps as a whole has none, and there
`include_num_input_tokens_seen=True` counts instead. Of several processes the main one counts, and takes the others for equal.
What padding fills is no token where the model gets an attention mask of one row a sequence.

A step in which no label counts (all are -100) is a warning on the panel and has no loss, whatever the Trainer makes of it
(by default it logs 0); five in a row raise NoTargetsError.

The panel's buttons take effect at the end of a step: the Trainer stops, saves a checkpoint of its own, or waits. A stop saves
first, and says where; so does a first interrupt (Ctrl-C), and a second one ends the training at once. With several processes
there are no buttons: one process cannot stop alone.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surokit.integrations.following import Following
from surokit.train.observing import Seen, quantized_layers
from surokit.widgets.panel import View, ViewName

_NAMES = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "eval_loss": "eval_loss"}


class LiveCallback(Following, TrainerCallback):
    """A LiveCallback feeds a `surokit.Live` from a Trainer, on the main process only.

    title: by default the model's class name. every: shortest time between two pictures, in seconds. run_dir: folder for the
    records, which `sk.watch` follows. usd_per_gpu_hour, view: as for `surokit.Live`. save_on_stop: write a checkpoint of the
    Trainer's before a stop that was asked for, whatever its `save_strategy`; `saved` is its folder. interrupts: let a first
    Ctrl-C be such a stop, at the end of the step. profile: the first and the last step to profile, counted from 1, such as
    (20, 25); `profile` has the result. Evaluations and checkpoints are no step's time: columns eval_ms and save_ms. After
    training, `.live.frame()` has the numbers.
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        view: View | ViewName | None = "auto",
        *,
        run_dir: str | Path | None = None,
        usd_per_gpu_hour: float | None = None,
        save_on_stop: bool = True,
        interrupts: bool = True,
        profile: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(
            title,
            every,
            view,
            run_dir=run_dir,
            usd_per_gpu_hour=usd_per_gpu_hour,
            save_on_stop=save_on_stop,
            interrupts=interrupts,
            profile=profile,
        )
        self._tokens_seen = 0
        self._nonfinite: int | torch.Tensor = 0  # losses since the last log, on the device
        self._stopping = False  # at the end of the step
        self._stops = False  # with the checkpoint that is written now
        self._limit: tuple[TrainingArguments, int | None] | None = None  # how many checkpoints stay, but for the stop's

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._limit_again()
        model = context.get("model")
        self._alone = args.world_size == 1
        self._stopping = self._stops = False
        self._open(
            model,
            total=state.max_steps or None,
            recipe="bf16 autocast" if args.bf16 else "fp16 autocast" if args.fp16 else "",
            step=state.global_step,
            driver="transformers.trainer",
            gpus=args.n_gpu if args.n_gpu > 1 else None,  # DataParallel: one process drives them all
        )
        if model is not None and asked_precision() == "fp8" and not computes_in_fp8(model):
            warnings.warn(
                "accelerate was asked for mixed_precision='fp8', but no linear layer of the model that trains computes in it: "
                "apply a recipe of surokit to the model, surokit.apply(model, 'fp8'), or look why accelerate converted none.",
                stacklevel=2,
            )
        self._heed(args, control)  # so that the buttons know that somebody listens
        self._tokens_seen = _tokens(state)
        self._nonfinite = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        self._step_begins(state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        if self.live is None:
            return
        seen = Seen() if self._observer is None else self._observer.take()
        counted = _tokens(state)
        tokens: int | torch.Tensor | None = counted - self._tokens_seen or None
        if tokens is None and seen.tokens is not None:
            tokens = seen.tokens * args.world_size
        self._tokens_seen = counted
        if seen.nonfinite is not None:
            self._nonfinite = self._nonfinite + seen.nonfinite
        self._step_ends(state.global_step, tokens=tokens, targets=seen.targets)
        self._heed(args, control)
        self._passed_s()  # while it was paused

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        if self._stopping:  # the Trainer ends the epoch too, and has saved already
            control.should_evaluate, control.should_save = False, self._stops

    def _heed(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Pass the requests of the panel's buttons, and an interrupt, on to the Trainer."""
        if self.live is None or not self._alone:
            return
        self.live.wait_while_paused()
        if self.live.save_asked:
            control.should_save = True
        if self.live.stop_asked:
            self._stopping = control.should_training_stop = True
            control.should_evaluate = (
                False  # it would put off the end, and with save_strategy="best" decide on the checkpoint
            )
            if self.save_on_stop:
                self._stops = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any) -> None:
        self._leave_out("save_ms", state.global_step)
        if self.live is None or not self._stops:
            return
        self._stops = False
        # at the end the Trainer would delete all but the best one
        self._limit, args.save_total_limit = (args, args.save_total_limit), None
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        path = folder if folder.exists() else Path(args.output_dir)  # of a search, say
        how = f"trainer.train(resume_from_checkpoint={str(path)!r}) goes on from there"
        if args.save_only_model:
            how = "it holds the model alone (save_only_model), so that a training from it begins with a new optimizer"
        self._tell_saved(path, how)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **context: Any,
    ) -> None:
        logs = logs or {}
        values = {_NAMES[name]: value for name, value in logs.items() if name in _NAMES}
        if "loss" in values:  # the Trainer has just waited for the device
            if int(self._nonfinite):
                values["loss"] = math.nan  # by default the Trainer leaves these out of its mean
            self._nonfinite = 0
        if self.live is not None and values and state.global_step > 0:
            self.live.log(step=state.global_step, **values)
            self._tell_health()
        if not any(name.startswith("eval_") for name in logs):  # else it is in an evaluation
            self._passed_s()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        self._leave_out("eval_ms", state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        self._limit_again()
        if self.live is None:
            return
        early = state.global_step < state.max_steps and not self.live.control.reason
        self._close(f"stopped before the planned {state.max_steps:,} steps" if early else None)

    def _limit_again(self) -> None:
        """Give back the limit of checkpoints, from which that of a stop was spared."""
        if self._limit is not None:
            args, limit = self._limit
            args.save_total_limit, self._limit = limit, None


def asked_precision() -> str:
    """Return the mixed precision that accelerate was asked for."""
    from accelerate.state import AcceleratorState

    return str(AcceleratorState().mixed_precision)


def computes_in_fp8(model: torch.nn.Module) -> bool:
    """Return whether a model has layers with a recipe of ours, or those that accelerate converts linear ones to for FP8."""
    theirs = ("transformer_engine.", "torchao.float8")
    return bool(quantized_layers(model)) or any(type(m).__module__.startswith(theirs) for m in model.modules())


def _tokens(state: TrainerState) -> int:
    """Return the input tokens so far; 0 unless the Trainer was asked to count them."""
    return int(state.num_input_tokens_seen or 0)
