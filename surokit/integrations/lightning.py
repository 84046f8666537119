"""Show the live panel for Lightning: `Trainer(callbacks=[LiveCallback(tokens=lambda batch: batch["input_ids"].numel())])`.

A step in which no label counts, of batches with "labels", is a warning on the panel; five in a row raise NoTargetsError.

The panel has a point per optimizer step: the loss that `training_step` returned, the learning rate, and tokens where
`tokens=` says how many a batch has. Nothing here waits for the device. The panel's buttons take effect at the end of a
step: the Trainer stops (not before its `min_epochs` and `min_steps`, and with the validation that it does then), saves a
checkpoint, or waits. With several processes there are no buttons: one process cannot stop alone.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`; the callback is of the one that is imported
already.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from surokit.live import Live, count_targets, ending_of
from surokit.train.errors import NoTargetsError
from surokit.widgets.panel import View, ViewName


def _callback() -> Any:
    found: list[str] = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    found += [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    if not found:
        raise ModuleNotFoundError("The callback needs Lightning, which is not installed: pip install lightning.")
    return import_module("lightning.pytorch" if found[0] == "lightning" else found[0]).Callback


class LiveCallback(_callback()):  # type: ignore[misc]
    """A LiveCallback feeds a `surokit.Live` from a Lightning Trainer, on the main process only.

    title: by default the module's class name. tokens: from a batch to its number of tokens; None shows steps per second.
    eval_loss: the name under which the module logs its held-out loss. every: shortest time between two pictures, in
    seconds. run_dir: folder for the records, which `sk.watch` follows, and for checkpoints that a button asks for; without
    it they go to the Trainer's `default_root_dir`. usd_per_gpu_hour, view: as for `surokit.Live`. After training,
    `.live.frame()` has the numbers.
    """

    def __init__(
        self,
        title: str | None = None,
        every: float = 0.25,
        view: View | ViewName | None = "auto",
        *,
        tokens: Callable[[Any], int] | None = None,
        eval_loss: str = "val_loss",
        run_dir: str | Path | None = None,
        usd_per_gpu_hour: float | None = None,
    ) -> None:
        super().__init__()
        self.title = title
        self.every = every
        self.view = view
        self.tokens = tokens
        self.eval_loss = eval_loss
        self.run_dir = run_dir
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self.live: Live | None = None
        self._alone = True
        self._begin_step()

    def _begin_step(self) -> None:
        self._loss: torch.Tensor | None = None
        self._tokens = 0
        self._targets: torch.Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self._alone = trainer.world_size == 1
        total = trainer.estimated_stepping_batches
        self._step = trainer.global_step
        self._begin_step()
        self.live = Live(
            self.title or type(pl_module).__name__,
            self.every,
            total=int(total) if math.isfinite(total) else None,
            recipe="" if str(trainer.precision).startswith("32") else str(trainer.precision),
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            run_dir=self.run_dir,
            exist="resume" if trainer.global_step else "new",
            view=self.view,
            buttons=self._alone,
        )
        self._heed(trainer)  # so that the buttons know that somebody listens

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.live is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):  # of an accumulated step the parts, which add up to their mean
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if self.tokens is not None:
            self._tokens += int(self.tokens(batch))
        if isinstance(batch, Mapping):
            self._targets = count_targets(self._targets, batch.get("labels"))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        values = {"loss": self._loss, "tokens": self._tokens or None, "targets": self._targets, "lr": rate}
        self._begin_step()
        try:
            self.live.log(step=self._step, **values)
        except NoTargetsError:
            if self._alone:  # the other processes may have labels, and would wait for this one
                raise
        self._heed(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        value = trainer.callback_metrics.get(self.eval_loss)
        if self.live is not None and value is not None and self._step and not trainer.sanity_checking:
            self.live.log(step=self._step, eval_loss=value)

    def _heed(self, trainer: Any) -> None:
        """Pass the requests of the panel's buttons on to the Trainer."""
        if self.live is None or not self._alone:
            return
        self.live.wait_while_paused()
        if self.live.save_asked:
            folder = self.live.run_dir or Path(trainer.default_root_dir)
            try:
                trainer.save_checkpoint(folder / f"step-{trainer.global_step:06d}.ckpt")
            except Exception as error:
                warnings.warn(
                    f"The checkpoint that was asked for is not there: {error} Training goes on.", stacklevel=2
                )
        if self.live.stop_asked:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.live is not None:
            self.live.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.live is not None:
            self.live.close(ending_of(exception))
