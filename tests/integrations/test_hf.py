"""The callback in a real, tiny transformers Trainer."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

import surokit
from surokit.runs.jsonl import read
from surokit.train.errors import NoTargetsError
from tests.clocks import until
from tests.refusals import refused, warned
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
    assert frame[["stall_ms", "idle_frac"]].ge(0).all(axis=None)
    assert set(state.idle_causes) >= {"data", "between steps"}
    assert frame["peak_gib"].gt(0).all()
    assert list(frame["eval_ms"].notna()) == [False, False, True]
    assert callback.view.ended == ["done"]


def test_the_gpus_of_data_parallel_are_counted(trainer, monkeypatch):
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    monkeypatch.setattr("surokit.live.gpus_of", lambda device, told=None: told or 1)
    run, callback = trainer(include_num_input_tokens_seen=True)
    run.train()
    assert callback.live.info.gpus == 2
    assert list(callback.live.frame()["tokens"]) == [32, 32, 32]


def test_an_evaluation_after_training_leaves_the_end_as_it_is(trainer):
    run, callback = trainer()
    run.train()
    loss = run.evaluate()["eval_loss"]
    assert callback.live.state.reason == "done"
    assert callback.live.state.held_out.points() == ([3], [loss])
    assert callback.view.ended == ["done"]


def test_with_rare_logs(trainer):
    run, callback = trainer(max_steps=4, logging_steps=2)
    run.train()
    frame = callback.live.frame()
    assert list(frame["step"]) == [1, 2, 3, 4]
    assert list(frame["loss"].notna()) == [False, True, False, True]
    assert list(frame["tokens"]) == [16] * 4, "nobody asked the Trainer to count"
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


def test_a_stop_saves_and_a_training_goes_on_from_there(trainer, tmp_path, capsys):
    whole, _ = trainer(max_steps=6)
    whole.train()
    run, callback = trainer(max_steps=6)
    run.add_callback(ask(callback, "stop", 2))
    run.train()
    assert callback.saved == tmp_path / "checkpoint-3"
    how = f"trainer.train(resume_from_checkpoint={str(callback.saved)!r}) goes on from there"
    assert f"surokit: saved {callback.saved}; {how}\n" in capsys.readouterr().err
    assert [event.text for event in callback.live.state.events] == [f"saved {callback.saved}"]
    run, _ = trainer(max_steps=6)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(run.model.parameters(), whole.model.parameters()):
        assert torch.equal(one, other)


def test_a_stop_saves_where_only_the_best_would_be_kept(trainer):
    run, callback = trainer(
        max_steps=6, save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="none_such"
    )
    run._determine_best_metric = lambda metrics, trial: False
    run.add_callback(ask(callback, "stop", 1))
    run.train()
    assert callback.saved.name == "checkpoint-2"
    assert callback.saved.exists()


def test_the_checkpoint_of_a_stop_outlives_a_limit_that_keeps_the_best(trainer, tmp_path):
    run, callback = trainer(
        max_steps=6, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, save_total_limit=1
    )
    run.args.metric_for_best_model, run.args.greater_is_better = "eval_loss", True  # the first one is the best
    run.add_callback(ask(callback, "stop", 2))
    run.train()
    assert callback.saved == tmp_path / "checkpoint-3"
    assert run.state.best_global_step == 1
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    assert run.args.save_total_limit == 1


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_a_stop_neither_evaluates_nor_saves_again_where_the_trainer_does_at_an_epochs_end(trainer, strategy):
    from transformers import TrainerCallback

    seen = []

    class Spy(TrainerCallback):
        def on_evaluate(self, args, state, control, **context):
            seen.append(("evaluate", state.global_step))

        def on_save(self, args, state, control, **context):
            seen.append(("save", state.global_step))

    options = {"metric_for_best_model": "eval_loss"} if strategy == "best" else {}
    run, callback = trainer(max_steps=18, save_strategy=strategy, eval_strategy="epoch", **options)
    run.add_callback(ask(callback, "stop", 8))  # of 6 steps an epoch
    run.add_callback(Spy())
    run.train()
    assert seen == [("evaluate", 6), ("save", 6), ("save", 9)]


def test_a_stop_need_not_save(trainer, tmp_path):
    run, callback = trainer(max_steps=6)
    callback.save_on_stop = False
    run.add_callback(ask(callback, "stop", 2))
    run.train()
    assert run.state.global_step == 3
    assert callback.saved is None
    assert not [*tmp_path.glob("checkpoint-*")]


def interrupts(times):
    """A callback that is Ctrl-C in the middle of a step."""
    from transformers import TrainerCallback

    class Interrupts(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **context):
            if state.global_step == 1:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

    return Interrupts()


def test_an_interrupt_ends_the_step_saves_and_stops(trainer, capsys):
    before = signal.getsignal(signal.SIGINT)
    run, callback = trainer(max_steps=6)
    run.add_callback(interrupts(1))
    run.train()
    assert run.state.global_step == 2
    assert callback.saved.name == "checkpoint-2"
    assert callback.view.ended == ["interrupted"]
    assert "stopping after this step, which is saved; interrupt again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_the_training_at_once(trainer):
    before = signal.getsignal(signal.SIGINT)
    run, callback = trainer(max_steps=6)
    run.add_callback(interrupts(2))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.state.global_step == 1
    assert callback.saved is None
    # no callback hears that a training failed: the handler finds out, and gives the signal back
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_can_be_left_alone(trainer):
    run, callback = trainer(max_steps=6)
    callback.interrupts = False
    run.add_callback(interrupts(1))
    with pytest.raises(KeyboardInterrupt):
        run.train()


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
    assert list(callback.live.frame()["targets"]) == [42, 42], "the first token of a row is not predicted"
    assert not run.model._forward_pre_hooks, "the hook goes when the training ends"


class Padded(Rows):
    """Rows of which the last three tokens are padding."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        keep = torch.arange(8) < 5
        return {
            "input_ids": row["input_ids"],
            "labels": row["labels"].where(keep, -100),
            "attention_mask": keep.long(),
        }


def test_padding_is_no_token_and_no_target(trainer):
    run, callback = trainer(max_steps=2, gradient_accumulation_steps=2)
    run.train_dataset = Padded()
    run.train()
    frame = callback.live.frame()
    assert list(frame["tokens"]) == [20, 20]
    assert list(frame["targets"]) == [16, 16]


def test_checkpoints_are_no_step(trainer):
    run, callback = trainer(max_steps=4, save_strategy="steps", save_steps=2)
    run.train()
    assert list(callback.live.frame()["save_ms"].notna()) == [False, True, False, True]


def test_a_loss_that_is_not_finite_is_told_although_the_trainer_hides_it(trainer, capsys):
    run, callback = trainer(max_steps=4, logging_steps=2)
    run.add_callback(spoil(2))
    run.train()
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert all(value == value for value in logged), "the Trainer's filter"
    assert [e.kind for e in callback.live.state.events] == ["nonfinite"]
    assert callback.live.state.events[0].step == 4
    assert "surokit: step 4: loss not finite (NaN or infinite). Go back to a checkpoint" in capsys.readouterr().err


def spoil(step):
    from transformers import TrainerCallback

    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **context):
            if state.global_step == step:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = float("nan")

    return Spoil()


def test_steps_in_mid_training_are_profiled(trainer):
    run, callback = trainer(max_steps=8, gradient_accumulation_steps=2, num_train_epochs=10)
    callback.profile_steps = (4, 5)
    run.train()
    assert run.state.global_step == 8
    profile = callback.profile
    assert len(profile.steps) == 2
    assert "steps 4 to 5" in str(profile)
    assert profile.summary["gflop_per_step"] > 0


def test_a_profile_that_fails_ends_no_training(trainer, monkeypatch):
    from surokit.integrations import following

    def fails(*args, **options):
        raise RuntimeError("another tool records")

    monkeypatch.setattr(following, "profile_block", fails)
    run, callback = trainer(max_steps=6)
    callback.profile_steps = (3, 4)
    with warned(UserWarning):
        run.train()
    assert run.state.global_step == 6
    assert callback.profile is None


def test_a_training_that_is_over_early_leaves_the_profile_so_far(trainer):
    run, callback = trainer(max_steps=4)
    callback.profile_steps = (3, 20)
    run.train()
    assert len(callback.profile.steps) == 2


@pytest.mark.parametrize("steps", [(0, 3), (5, 4), (2.5, 4)])
def test_steps_that_cannot_be_profiled(steps):
    from surokit.integrations.hf import LiveCallback

    with refused(ValueError):
        LiveCallback(profile=steps)


def test_the_recipe_that_trains_is_said(trainer, capsys):
    run, callback = trainer(max_steps=2)
    surokit.apply(run.model, surokit.FP8)
    run.train()
    assert callback.applied.wrong == ()
    assert callback.applied.words == f"{surokit.FP8.name} in 7 of 8 linear layers"
    assert f"surokit: {callback.applied.words}\n" in capsys.readouterr().err
    assert callback.live.state.recipe == callback.applied.words


def test_layers_that_were_replaced_after_the_recipe_are_warned_of(trainer):
    run, callback = trainer(max_steps=1)
    surokit.apply(run.model, surokit.FP8)
    run.model.model.layers[0].mlp.up_proj = torch.nn.Linear(16, 32, bias=False)
    with warned(UserWarning):
        run.train()
    assert len(callback.applied.wrong) == 1


def mixture():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return MixtralForCausalLM(config)


def test_a_recipe_on_experts_is_said_and_seen_to_be_missing_from_those_that_were_replaced():
    from surokit.integrations.hf import computes_in_fp8
    from surokit.train.observing import what_is_applied

    model = mixture()
    assert (
        what_is_applied(model).words
        == "no recipe is applied: 9 linear layers and 4 weights of experts compute in the loop's own precision"
    )
    assert not computes_in_fp8(model)
    surokit.apply(model, surokit.FP8.keep("*self_attn*"))
    found = what_is_applied(model)
    assert found.words == f"{surokit.FP8.name} in 0 of 9 linear layers and 4 of 4 weights of experts"
    assert found.wrong == ()
    assert computes_in_fp8(model)
    model.model.layers[1].mlp.experts = mixture().model.layers[1].mlp.experts
    found = what_is_applied(model)
    assert found.words.endswith(" and 2 of 4 weights of experts")
    assert [
        " it is missing from the weight of experts model.layers.1.mlp.experts.gate_up_proj and 1 more: " in said
        for said in found.wrong
    ] == [True]


def test_peft_around_the_model_hides_nothing(trainer):
    from peft import LoraConfig, get_peft_model

    run, callback = trainer(max_steps=2)
    surokit.apply(run.model, surokit.FP8)
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    run.model = run.model_wrapped = get_peft_model(run.model, config)
    run.optimizer = None
    run.train()
    assert callback.applied.words.startswith(f"{surokit.FP8.name} in 7 of ")
    assert callback.applied.wrong == ()
    assert list(callback.live.frame()["targets"]) == [14, 14]


def test_stored_weights_are_a_recipe_too(trainer):
    run, callback = trainer(max_steps=2)
    surokit.apply(run.model, surokit.QNF4.lora(2))
    run.train()
    assert callback.applied.words == f"{callback.applied.recipe.name} in 7 of 8 linear layers"
    assert callback.applied.wrong == ()


def test_a_forward_in_the_place_of_a_layers_own_is_warned_of(trainer):
    run, _ = trainer(max_steps=1)
    surokit.apply(run.model, surokit.FP8)
    layer = run.model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    with warned(UserWarning):
        run.train()


def test_layers_that_a_kernel_passes_by_are_warned_of(trainer):
    """As kernels do that compute a whole block with its weights."""
    run, _ = trainer(max_steps=1)
    surokit.apply(run.model, surokit.FP8)
    mlp = run.model.model.layers[0].mlp
    linear = torch.nn.functional.linear
    mlp.forward = lambda x: mlp.down_proj(linear(x, mlp.gate_proj.weight).sigmoid() * linear(x, mlp.up_proj.weight))
    with warned(UserWarning):
        run.train()


def test_fp8_that_accelerate_was_asked_for_and_did_not_do_is_warned_of(trainer, monkeypatch):
    from surokit.integrations import hf

    monkeypatch.setattr(hf, "asked_precision", lambda: "fp8")
    run, _ = trainer(max_steps=1)
    with warned(UserWarning):
        run.train()
    run, _ = trainer(max_steps=1)
    surokit.apply(run.model, "fp8")
    run.train()


def test_a_training_that_fails_leaves_nothing_behind_for_the_next(trainer):
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **context):
            if state.global_step == 2:
                raise ZeroDivisionError

    before = signal.getsignal(signal.SIGINT)
    run, callback = trainer(max_steps=5)
    callback.profile_steps = (2, 4)
    run.add_callback(Fails())
    with pytest.raises(ZeroDivisionError):
        run.train()
    run.pop_callback(Fails)
    run.train()
    assert callback.view.ended == ["ended without a word", "done"]
    assert len(callback.profile.steps) == 3
    assert signal.getsignal(signal.SIGINT) is before
    assert not run.model._forward_pre_hooks
    with surokit.profile(steps=1, warmup=0) as profile:
        torch.ones(2) + 1
    assert profile.summary["steps"] == 1, "no other profile runs"


class FailsAt4:
    """Is a part of a model, and fails in the fourth step."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *inputs):
        self.calls += 1
        if self.calls == 4:
            raise ZeroDivisionError


def test_another_callback_finds_nothing_that_a_failed_training_left(trainer):
    before = signal.getsignal(signal.SIGINT)
    run, first = trainer(max_steps=8)
    first.profile_steps = (3, 8)
    run.model.model.layers[0].register_forward_pre_hook(FailsAt4())
    with pytest.raises(ZeroDivisionError):
        run.train()
    again, second = trainer(max_steps=4)
    second.profile_steps = (3, 4)
    again.train()
    assert first.view.ended == ["ended without a word"]
    assert not run.model._forward_hooks
    assert len(second.profile.steps) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_training_inside_another_leaves_that_one_open(trainer):
    from transformers import TrainerCallback

    class Within(TrainerCallback):
        def on_step_begin(self, args, state, control, **context):
            if state.global_step == 1:
                inner.train()

    run, outer = trainer(max_steps=3)
    inner, callback = trainer(max_steps=2)
    run.add_callback(Within())
    run.train()
    assert (outer.view.ended, callback.view.ended) == (["done"], ["done"])
    assert list(outer.live.frame()["tokens"]) == [16, 16, 16]
