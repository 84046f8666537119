"""The callback in a real, tiny SFTTrainer: its batches, and what is counted of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.test_live import View

WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(29)}}
TEXTS = [{"text": " ".join(f"w{(i + j) % 29}" for j in range(3 + i % 5))} for i in range(12)]
ANSWERS = [{"prompt": "w1 w2 w3", "completion": " w4 w5" + " w6" * (i % 3)} for i in range(12)]
CASES: dict[str, tuple[list[dict[str, str]], dict[str, Any]]] = {
    "padded": (TEXTS, {}),
    "accumulated": (TEXTS, {"gradient_accumulation_steps": 2}),
    "completion only": (ANSWERS, {}),
    "packed": (TEXTS, {"packing": True, "max_length": 8}),
    "packed in whole rows": (TEXTS, {"packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    "padding-free": (TEXTS, {"padding_free": True, "max_length": None}),
}


@pytest.fixture
def train(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing it says of its own
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

    from surokit.integrations.hf import LiveCallback

    def run(rows, **options):
        torch.manual_seed(0)
        words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=1,
            pad_token_id=0,
        )
        callback = LiveCallback(view=View())
        settings = {
            "output_dir": str(tmp_path),
            "max_steps": 3,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
        }
        batches = []

        class Spy(SFTTrainer):
            def compute_loss(self, model, inputs, *args, **options):
                batches.append({"labels": inputs["labels"].clone(), "step": self.state.global_step + 1})
                return super().compute_loss(model, inputs, *args, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, of arguments that transformers renames
            arguments = SFTConfig(**settings | options)
            data = Dataset.from_list(rows)
            trainer = Spy(
                LlamaForCausalLM(config),
                arguments,
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[callback],
            )
            trainer.train()
        return trainer, callback, batches

    return run


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_targets_of_every_kind_of_batch(train, case):
    rows, options = CASES[case]
    trainer, callback, batches = train(rows, **options)
    frame = callback.live.frame()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert list(frame["step"]) == [1, 2, 3]
    assert list(frame["tokens"].cumsum()) == [entry["num_tokens"] for entry in logged], "as TRL counts them itself"
    predicted = [0, 0, 0]
    for batch in batches:
        predicted[batch["step"] - 1] += int((batch["labels"][:, 1:] != -100).sum())
    assert list(frame["targets"]) == predicted
    assert list(frame["loss"]) == [entry["loss"] for entry in logged]
    assert callback.live.state.goodput is not None


def test_a_stop_saves_and_a_training_goes_on_from_there(train, tmp_path):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **context):
            if state.global_step == 1:
                callback.live.control.stop()

    trainer, callback, _ = train(TEXTS, max_steps=1)
    trainer.args.max_steps = 4
    trainer.add_callback(Stop())
    trainer.train()
    assert callback.saved == tmp_path / "checkpoint-2"
    trainer.pop_callback(Stop)
    trainer.train(resume_from_checkpoint=str(callback.saved))
    assert trainer.state.global_step == 4
    assert list(callback.live.frame()["step"]) == [3, 4]
