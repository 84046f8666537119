"""The callback in a real, tiny Lightning Trainer."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch

from surokit.runs.jsonl import read
from tests.clocks import until
from tests.refusals import refused
from tests.test_live import View, read_status


@pytest.fixture
def fit(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing it says of its own
        import pytorch_lightning as lightning

    from surokit.integrations.lightning import LiveCallback

    class Module(lightning.LightningModule):
        def __init__(self, act=None):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.losses = []
            self.act = act or (lambda step: None)

        def training_step(self, batch, index):
            self.act(self.global_step)
            loss = self.layer(batch["x"] if isinstance(batch, dict) else batch).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run(act=None, validate=False, callback=None, checkpoint=None, rows=None, **options):
        torch.manual_seed(0)
        callback = callback or LiveCallback(view=View(), tokens=len)
        module = Module(act and (lambda step: act(callback.live, step)))
        settings = {"max_steps": 6, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        settings |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path)}
        trainer = lightning.Trainer(callbacks=[callback], **settings | options)

        def loader(count: int) -> Any:
            return torch.utils.data.DataLoader([*torch.randn(count, 4)], batch_size=2)  # type: ignore[arg-type]

        rows = loader(8) if rows is None else torch.utils.data.DataLoader(rows, batch_size=2)
        held_out = loader(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on data loaders
            trainer.fit(module, rows, held_out if validate else None, ckpt_path=checkpoint, weights_only=False)
        return trainer, module, callback

    return run


def test_six_steps(fit):
    _, module, callback = fit(validate=True)
    frame = callback.live.frame()
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(frame["loss"]) == pytest.approx(module.losses)
    assert set(frame["lr"]) == {0.01}
    assert set(frame["tokens"]) == {2.0}
    assert list(frame["eval_loss"].notna()) == [False, False, False, True, False, False]
    state = callback.live.state
    assert (state.title, state.total, state.step, state.reason) == ("Module", 6, 6, "done")
    assert callback.view.ended == ["done"]


def test_an_accumulated_step_is_one_step(fit):
    _, module, callback = fit(accumulate_grad_batches=2, max_steps=4)
    frame = callback.live.frame()
    pairs = list(zip(module.losses[::2], module.losses[1::2]))
    assert list(frame["loss"]) == pytest.approx([(a + b) / 2 for a, b in pairs])
    assert set(frame["tokens"]) == {4.0}


def test_the_loss_of_a_shorter_last_accumulation_is_its_mean(fit):
    _, module, callback = fit(rows=[*torch.ones(12, 4)], accumulate_grad_batches=4, max_epochs=1, max_steps=-1)
    first, last = module.losses[:4], module.losses[4:]
    assert len(last) == 2
    assert list(callback.live.frame()["loss"]) == pytest.approx([sum(first) / 4, sum(last) / 2])


def test_steps_without_a_label_that_counts_are_seen_and_end_the_training(fit):
    from surokit.integrations.lightning import LiveCallback
    from surokit.train.errors import NoTargetsError

    class Labelled(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return {"x": torch.ones(4), "labels": torch.full((4,), -100 if index > 3 else 1)}

    callback: Any = LiveCallback(view=View())
    with refused(NoTargetsError):
        fit(rows=Labelled(), callback=callback, max_steps=8)
    frame = callback.live.frame()
    assert list(frame["targets"]) == [8, 8, 0, 0, 0, 0, 0]
    assert list(frame["loss"].notna()) == [True] * 2 + [False] * 5
    assert callback.view.ended == [f"failed: {NoTargetsError.__name__}: {NoTargetsError(5)}"]


def test_the_stop_button_stops_the_trainer(fit):
    trainer, _, callback = fit(act=lambda live, step: step == 2 and live.control.stop(), max_steps=100)
    assert trainer.global_step == 3
    assert callback.view.ended == ["stopped: by live.control.stop()"]


def test_a_stop_saves_and_a_run_goes_on_from_there(fit, tmp_path, capsys):
    _, _, callback = fit(act=lambda live, step: step == 2 and live.control.stop())
    assert callback.saved == tmp_path / "step-000003.ckpt"
    how = f"trainer.fit(module, rows, ckpt_path={str(callback.saved)!r}) goes on from there"
    assert f"surokit: saved {callback.saved}; {how}\n" in capsys.readouterr().err
    trainer, again, _ = fit(checkpoint=str(callback.saved))
    assert trainer.global_step == 6
    assert len(again.losses) == 3


@pytest.mark.parametrize(("least", "end"), [({"min_steps": 6}, 6), ({"min_epochs": 2}, 8)])
def test_a_stop_that_has_to_go_on_saves_again_at_its_end(fit, tmp_path, least, end):
    def act(live, step):
        if step == 2:
            live.control.stop()

    trainer, _, callback = fit(act=act, max_steps=-1, max_epochs=4, **least)
    assert trainer.global_step == end
    assert callback.saved == tmp_path / f"step-{end:06d}.ckpt"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step-000003.ckpt", callback.saved.name]
    trainer, again, _ = fit(checkpoint=str(callback.saved), max_steps=-1, max_epochs=4)
    assert trainer.global_step == 16
    assert len(again.losses) == 16 - end


def test_a_stop_need_not_save(fit, tmp_path):
    from surokit.integrations.lightning import LiveCallback

    callback: Any = LiveCallback(view=View(), save_on_stop=False)
    fit(act=lambda live, step: step == 2 and live.control.stop(), callback=callback)
    assert callback.saved is None
    assert not [*tmp_path.glob("*.ckpt")]


def test_an_interrupt_ends_the_step_saves_and_stops(fit):
    before = signal.getsignal(signal.SIGINT)

    def act(live, step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    trainer, _, callback = fit(act=act)
    assert trainer.global_step == 3
    assert callback.saved.exists()
    assert callback.view.ended == ["interrupted"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_save_button_saves_and_a_run_goes_on_from_it(fit, tmp_path):
    from surokit.integrations.lightning import LiveCallback

    folder = tmp_path / "live"
    callback = LiveCallback(view=View(), run_dir=folder)
    fit(act=lambda live, step: step == 2 and live.control.save(), callback=callback)
    (checkpoint,) = folder.glob("*.ckpt")
    assert checkpoint.name == "step-000003.ckpt"
    assert list(read(folder / "records.jsonl")["step"]) == [1, 2, 3, 4, 5, 6]
    again: Any = LiveCallback(view=View(), run_dir=folder)
    fit(callback=again, checkpoint=str(checkpoint), max_steps=8)
    assert again.live.run_dir == folder
    assert list(read(folder / "records.jsonl")["step"]) == list(range(1, 9))
    assert read_status(folder).state == "done"


def test_a_save_that_fails_ends_no_training(fit, monkeypatch):
    import pytorch_lightning

    tried = []

    def full(trainer, path):
        tried.append(path.name)
        raise OSError("disk full")

    monkeypatch.setattr(pytorch_lightning.Trainer, "save_checkpoint", full)
    trainer, _, callback = fit(act=lambda live, step: step == 2 and live.control.save())
    assert tried == ["step-000003.ckpt"]
    assert trainer.global_step == 6
    assert callback.view.ended == ["done"]


def test_the_trainer_waits_while_it_is_paused(fit):
    seen = []

    def act(live, step):
        if step == 2:
            live.control.pause()
            threading.Thread(target=resume, args=(live,), daemon=True).start()

    def resume(live):
        until(lambda: live.state.paused)
        seen.append(live.state.step)
        live.control.resume()

    trainer, _, _ = fit(act=act)
    assert seen == [3]
    assert trainer.global_step == 6


def test_a_step_that_fails_is_said(fit):
    from surokit.integrations.lightning import LiveCallback

    def act(live, step):
        if step == 1:
            raise ZeroDivisionError("no")

    callback: Any = LiveCallback(view=View())
    with pytest.raises(ZeroDivisionError):
        fit(act=act, callback=callback)
    assert callback.view.ended == ["failed: ZeroDivisionError: no"]


def test_it_is_imported_by_nobody_else_and_its_absence_is_said():
    code = """
import sys
sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *a: None if 'lightning' in name and 'surokit' not in name else find(name, *a)
import surokit
surokit.integrations, surokit.Live
del sys.modules['lightning'], sys.modules['pytorch_lightning']
try:
    surokit.integrations.lightning
except ModuleNotFoundError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "The callback needs Lightning, which is not installed: pip install lightning.\n"


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of a language model, of which the first half is not predicted."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(4)
        return {"input_ids": ids, "x": torch.ones(4), "labels": torch.where(ids < 2, -100, ids)}


def test_tokens_waits_and_memory_need_no_argument(fit):
    from surokit.integrations.lightning import LiveCallback

    callback: Any = LiveCallback(view=View())
    fit(rows=Tokens(), callback=callback, accumulate_grad_batches=2, max_steps=3)
    frame = callback.live.frame()
    assert list(frame["tokens"]) == [16, 16, 16]
    assert list(frame["targets"]) == [8, 8, 8]
    assert frame[["stall_ms", "idle_frac"]].ge(0).all(axis=None)
    assert frame["peak_gib"].gt(0).all()


def test_steps_in_mid_training_are_profiled(fit):
    from surokit.integrations.lightning import LiveCallback

    callback: Any = LiveCallback(view=View(), profile=(3, 4))
    trainer, _, _ = fit(callback=callback, accumulate_grad_batches=2, max_epochs=10)
    assert trainer.global_step == 6
    assert len(callback.profile.steps) == 2


def test_validations_and_checkpoints_are_no_step(fit):
    from surokit.integrations.lightning import LiveCallback

    callback: Any = LiveCallback(view=View())
    fit(act=lambda live, step: step == 1 and live.control.save(), callback=callback, validate=True)
    frame = callback.live.frame()
    assert list(frame["eval_ms"].notna()) == [False, False, False, True, False, False]
    assert list(frame["save_ms"].notna()) == [False, True, False, False, False, False]


def test_the_gradient_norm_is_that_before_clipping(fit):
    from surokit.integrations.lightning import LiveCallback

    seen = []

    class Spy(LiveCallback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
            seen.append(float(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).norm()))

    callback: Any = Spy(view=View())
    fit(callback=callback, gradient_clip_val=1e-3)
    assert list(callback.live.frame()["grad_norm"]) == pytest.approx(seen)
    assert min(seen) > 1e-3
    callback = LiveCallback(view=View(), grad_norm=False)
    fit(callback=callback)
    assert "grad_norm" not in callback.live.frame()


def test_a_loss_that_is_not_finite_is_told(fit, capsys):
    def act(live, step):
        if step == 3:
            with torch.no_grad():
                live.observer.model.layer.weight[0, 0] = float("nan")

    _, _, callback = fit(act=act, max_steps=5)
    assert [e.kind for e in callback.live.state.events] == ["nonfinite"]
    assert "surokit: step 4: loss not finite (NaN or infinite)." in capsys.readouterr().err
