"""Show the live panel for Lightning: `Trainer(callbacks=[LiveCallback(tokens=lambda batch: batch["input_ids"].numel())])`.

A step in which no label counts, of batches with "labels", is a warning on the panel; five in a row raise NoTargetsError.

The panel has a point per optimizer step: the loss that `training_step` returned, the learning rate, and tokens where batches have
"input_ids" or `tokens=` says how many they are. Nothing here waits for the device. The panel's buttons take effect at the end of a
step: the Trainer stops (not before its `min_epochs` and `min_steps`, and with the validation that it does then), saves a
checkpoint, or waits. A stop saves first, and says where; where the Trainer has to go on for a while, it saves again at the end.
So does a first interrupt (Ctrl-C), and a second one ends the training at once. With several processes there are no buttons: one
process cannot stop alone.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`; the callback is of the one that is imported
already.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from surokit.integrations.following import Following
from surokit.live import ending_of
from surokit.train.observing import Seen
from surokit.widgets.panel import View, ViewName


def _callback() -> Any:
    found: list[str] = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    found += [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    if not found:
        raise ModuleNotFoundError("The callback needs Lightning, which is not installed: pip install lightning.")
    return import_module("lightning.pytorch" if found[0] == "lightning" else found[0]).Callback


class LiveCallback(Following, _callback()):  # type: ignore[misc]
    """A LiveCallback feeds a `surokit.Live` from a Lightning Trainer, on the main process only.

    title: by default the module's class name. tokens: from a batch to its number of tokens; None counts "input_ids" where
    batches have them, without what "attention_mask" leaves out, and else shows steps per second. eval_loss: the name under
    which the module logs its held-out loss. grad_norm: measure the norm of the first optimizer's gradients before clipping,
    for health, with a pass over them on the device; not with several processes. every: shortest time between two pictures, in
    seconds. run_dir: folder for the records, which `sk.watch` follows, and for checkpoints that a button asks for; without it
    they go to the Trainer's `default_root_dir`. usd_per_gpu_hour, view: as for `surokit.Live`. save_on_stop: write a
    checkpoint before a stop that was asked for; `saved` is its path. interrupts: let a first Ctrl-C be such a stop, at the
    end of the step. profile: the first and the last step to profile, counted from 1, such as (20, 25); `profile` has the
    result. After training, `.live.frame()` has the numbers.
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        view: View | ViewName | None = "auto",
        *,
        tokens: Callable[[Any], int] | None = None,
        eval_loss: str = "val_loss",
        grad_norm: bool = True,
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
        self.tokens = tokens
        self.eval_loss = eval_loss
        self.grad_norm = grad_norm
        self._saves = False  # since the last step
        self._saved_at = 0  # the step of the stop's checkpoint
        self._begin_step()

    def _begin_step(self) -> None:
        self._loss: torch.Tensor | None = None
        self._parts = 0
        self._tokens = 0
        self._norm: torch.Tensor | None = None
        self._begun = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self._alone = trainer.world_size == 1
        total = trainer.estimated_stepping_batches
        self._step = trainer.global_step
        self._begin_step()
        self._open(
            pl_module,
            total=int(total) if math.isfinite(total) else None,
            recipe="" if str(trainer.precision).startswith("32") else str(trainer.precision),
            step=trainer.global_step,
            driver=type(trainer).__module__,
        )
        self._heed(trainer)  # so that the buttons know that somebody listens

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.live is None:
            return
        if not self._begun:
            self._begun = True
            if self._saves:  # who was waited for longer, the disk or the next batch, does not show
                self._saves = False
                self._leave_out("save_ms", self._step)
            self._step_begins(trainer.global_step + 1)
        if self._observer is not None:
            self._observer.see(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.live is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):  # of an accumulated step the parts, each divided by their planned number
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            self._parts += 1
        if self.tokens is not None:
            self._tokens += int(self.tokens(batch))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        seen = Seen() if self._observer is None else self._observer.take()
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        tokens: Any = self._tokens or seen.tokens
        tokens = None if tokens is None else tokens * trainer.world_size
        loss, norm = self._loss, self._norm
        if loss is not None and self._parts < trainer.accumulate_grad_batches:  # the last step of an epoch
            loss = loss * (trainer.accumulate_grad_batches / self._parts)
        self._begin_step()
        self._step_ends(self._step, loss=loss, grad_norm=norm, tokens=tokens, targets=seen.targets, lr=rate)
        self._heed(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.live is None or not self.grad_norm or not self._alone or self._norm is not None:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            self._norm = torch.nn.utils.get_total_norm(grads)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saves = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._passed_s()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        value = trainer.callback_metrics.get(self.eval_loss)
        if self.live is not None and value is not None and self._step and not trainer.sanity_checking:
            self.live.log(step=self._step, eval_loss=value)
        if self.live is not None and not trainer.sanity_checking:
            self._leave_out("eval_ms", self._step)

    def _heed(self, trainer: Any) -> None:
        """Pass the requests of the panel's buttons on to the Trainer."""
        if self.live is None or not self._alone:
            return
        self.live.wait_while_paused()
        self._passed_s()
        stops = self.live.stop_asked
        if self.live.save_asked:
            self._save(trainer, "Training goes on.")
        if stops and self.save_on_stop and (self.saved is None or _may_stop(trainer)):
            self._save_stop(trainer)
        if stops:
            trainer.should_stop = True

    def _save_stop(self, trainer: Any) -> None:
        """Save the checkpoint of a stop, and say where it is."""
        path = self._save(trainer, "Training stops without it.")
        if path is not None:
            self._saved_at = trainer.global_step
            self._tell_saved(path, f"trainer.fit(module, rows, ckpt_path={str(path)!r}) goes on from there")

    def _save(self, trainer: Any, then: str) -> Path | None:
        """Save a checkpoint; a failure costs a warning, which ends with `then`, and None is returned."""
        assert self.live is not None
        path = (self.live.run_dir or Path(trainer.default_root_dir)) / f"step-{trainer.global_step:06d}.ckpt"
        try:
            trainer.save_checkpoint(path)
        except Exception as error:
            warnings.warn(f"The checkpoint that was asked for is not there: {error} {then}", stacklevel=2)
            return None
        return path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        stops = self.live is not None and self._alone and self.live.stop_asked
        if stops and self.save_on_stop and (self.saved is None or self._saved_at < trainer.global_step):
            self._save_stop(trainer)  # the epochs that it had to do are over
        self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(ending_of(exception))


def _may_stop(trainer: Any) -> bool:
    """Return whether a Trainer that is asked to stop does so behind this step, which may be in the middle of an epoch."""
    return trainer.global_step >= (trainer.min_steps or 0) and trainer.current_epoch >= (trainer.min_epochs or 0)
