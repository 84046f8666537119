"""The callback in a real, tiny transformers Trainer."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from surokit.runs.jsonl import read
from surokit.train.errors import NoTargetsError
from tests.clocks import until
from tests.refusals import refused
from tests.test_live import View, read_status


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def trainer(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from surokit.integrations.hf import LiveCallback

    def build(**arguments):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        callback = LiveCallback(view=View())
        defaults = {
            "output_dir": str(tmp_path),
            "max_steps": 3,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
        }
        return Trainer(
            LlamaForCausalLM(config),
            TrainingArguments(**defaults | arguments),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            callbacks=[callback],
        ), callback

    return build


def test_three_steps(trainer):
    run, callback = trainer(include_num_input_tokens_seen=True, eval_strategy="steps", eval_steps=3)
    run.train()
    frame = callback.live.frame()
    logged = {entry["step"]: entry for entry in run.state.log_history if "loss" in entry}
    assert list(frame["step"]) == [1, 2, 3]
    assert list(frame["loss"]) == [logged[step]["loss"] for step in (1, 2, 3)]
    assert list(frame["lr"]) == [logged[step]["learning_rate"] for step in (1, 2, 3)]
    assert frame["grad_norm"].gt(0).all()
    assert list(frame["tokens"]) == [16, 16, 16]
    assert frame["eval_loss"].iloc[2] > 0
    assert frame["wall_ms"].gt(0).all()
    state = callback.live.state
    assert (state.title, state.total, state.step, state.reason) == ("LlamaForCausalLM", 3, 3, "done")
    assert state.goodput is None  # nobody says how long it waited for data
    assert callback.view.ended == ["done"]


def test_an_evaluation_after_training_leaves_the_end_as_it_is(trainer):
    run, callback = trainer()
    run.train()
    loss = run.evaluate()["eval_loss"]
    assert callback.live.state.reason == "done"
    assert callback.live.state.held_out.points() == ([3], [loss])
    assert callback.view.ended == ["done"]


def test_without_token_counts_and_with_rare_logs(trainer):
    run, callback = trainer(max_steps=4, logging_steps=2)
    run.train()
    frame = callback.live.frame()
    assert list(frame["step"]) == [1, 2, 3, 4]
    assert list(frame["loss"].notna()) == [False, True, False, True]
    assert "tokens" not in frame
    assert callback.live.state.rate.count == 3


def test_an_early_stop_is_said(trainer):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **context):
            control.should_training_stop = state.global_step == 2

    run, callback = trainer()
    run.add_callback(Stop())
    run.train()
    assert callback.view.ended == ["stopped before the planned 3 steps"]


def ask(callback, word, step=1):
    from transformers import TrainerCallback

    class At(TrainerCallback):
        def on_step_begin(self, args, state, control, **context):
            if state.global_step == step:
                getattr(callback.live.control, word)()

    return At()


def test_the_stop_button_stops_the_trainer(trainer):
    run, callback = trainer(max_steps=10)
    run.add_callback(ask(callback, "stop", 2))
    run.train()
    assert run.state.global_step == 3
    assert callback.view.ended == ["stopped: by live.control.stop()"]


def test_the_save_button_saves_a_checkpoint_of_the_trainers(trainer, tmp_path):
    run, callback = trainer(max_steps=4)
    run.add_callback(ask(callback, "save", 1))
    run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert callback.view.ended == ["done"]


def test_the_trainer_waits_while_it_is_paused(trainer):
    run, callback = trainer(max_steps=3)
    run.add_callback(ask(callback, "pause", 1))
    seen = []

    def resume():
        until(lambda: callback.live and callback.live.state.paused)
        seen.append(run.state.global_step)
        callback.live.control.resume()

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    run.train()
    thread.join(10)
    assert seen == [2]
    assert run.state.global_step == 3


def test_a_folder_is_written_and_a_resume_goes_on_in_it(trainer, tmp_path):
    folder = tmp_path / "live"
    run, callback = trainer(max_steps=4, save_strategy="steps", save_steps=2)
    callback.run_dir = folder
    run.train()
    whole = read(folder / "records.jsonl")
    assert list(whole["step"]) == [1, 2, 3, 4]
    run, callback = trainer(max_steps=4)
    callback.run_dir = folder
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.live.run_dir == folder
    again = read(folder / "records.jsonl")
    assert list(again["step"]) == [1, 2, 3, 4]
    assert list(again["loss"]) == pytest.approx(list(whole["loss"]), rel=1e-3)
    assert read_status(folder).state == "done"


def test_only_the_integration_imports_transformers():
    code = "import sys, surokit.live, surokit.widgets; assert 'transformers' not in sys.modules"
    heavy = "for name in ('IPython', 'pandas', 'matplotlib', 'ipywidgets'): assert name not in sys.modules, name"
    subprocess.run([sys.executable, "-c", f"{code}\n{heavy}"], check=True)


def test_it_is_found_by_its_name():
    import surokit

    assert surokit.integrations.hf.LiveCallback.__module__ == "surokit.integrations.hf"
    with refused(AttributeError):
        _ = surokit.integrations.keras


class Masked(Rows):
    """Rows whose labels do not count."""

    def __getitem__(self, index):
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": torch.full_like(ids, -100)}


def test_steps_without_a_label_that_counts_are_seen(trainer):
    run, callback = trainer(max_steps=4)
    run.train_dataset = Masked()
    run.train()
    frame = callback.live.frame()
    assert list(frame["targets"]) == [0, 0, 0, 0]
    assert "loss" not in frame, "the Trainer logs 0 there"
    assert [e.kind for e in callback.live.state.events] == ["no_targets"]


def test_five_of_them_end_the_training(trainer):
    run, _ = trainer(max_steps=6)
    run.train_dataset = Masked()
    with refused(NoTargetsError):
        run.train()
    assert run.state.global_step == 5


def test_labels_of_all_parts_of_a_step_are_counted(trainer):
    run, callback = trainer(max_steps=2, gradient_accumulation_steps=3)
    run.train()
    assert list(callback.live.frame()["targets"]) == [48, 48]
    assert not run.model._forward_pre_hooks, "the hook goes when the training ends"
