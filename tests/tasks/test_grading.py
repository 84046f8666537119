"""Grading: what is right, that it is what greedy decoding writes, and that nothing of the model or the run changes."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import surokit as sk
from surokit.tasks import Addition, Brackets, Copying, Score
from surokit.tasks.grading import right_answers
from tests.refusals import refused


def small(task, seed: int = 0, **options) -> sk.Decoder:
    torch.manual_seed(seed)
    shape = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "eos_id": 0, **options}
    return sk.Decoder(sk.DecoderConfig(vocab=task.vocab, max_length=2 * task.length, **shape))


def trained(task, steps: int, **options) -> sk.Session:
    session = sk.Session(small(task), task.batches(32), optimizer=sk.AdamW(lr=1e-2), schedule=None, **options)
    session.run(steps)
    return session


class Oracle(nn.Module):
    """Answers by a table from a row's tokens to the row's next tokens; draws random numbers and notes how it was asked."""

    def __init__(self, ids, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.drop = nn.Dropout()
        self.ids, self.vocab, self.asked = ids, vocab, 0

    def forward(self, input_ids):
        assert not self.training
        assert not torch.is_grad_enabled()
        torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        self.asked += 1
        rows = [int((self.ids == row).all(1).int().argmax()) for row in input_ids]
        following = nn.functional.pad(self.ids[rows][:, 1:], (0, 1))
        return SimpleNamespace(logits=nn.functional.one_hot(following, self.vocab).float())


def oracle(task, n: int) -> Oracle:
    return Oracle(torch.cat([batch["input_ids"] for batch in task.held_out(n)]), task.vocab)


def test_right_answers_are_counted():
    task = Copying(3, 8)
    (batch,) = task.held_out(5)
    model = oracle(task, 5)
    assert task.grade(model, problems=5) == Score(5, 5)
    batch["labels"][1, -1] = 3  # the end
    batch["labels"][3, -2] = batch["labels"][3, -2] % 8 + 1
    assert right_answers(model, [batch]).tolist() == [True, False, True, False, True]


def test_problems_are_asked_many_at_a_time():
    task = Copying(3)
    model = oracle(task, 300)
    task.grade(model, problems=256)
    assert model.asked == 1
    assert task.grade(model, problems=300, batch=128).total == 300
    assert model.asked == 4


def test_a_prompt_and_what_stands_behind_the_end_do_not_count():
    task = Brackets()
    model = oracle(task, 20)
    first = model.ids.clone()
    noise = torch.Generator().manual_seed(0)
    (batch,) = task.held_out(20)
    other = torch.randint(task.vocab, first.shape, generator=noise)
    model.ids = first

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids):
            logits = model(input_ids).logits
            counts = nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
            wrong = nn.functional.one_hot(other, task.vocab).float()
            return SimpleNamespace(logits=torch.where(counts[..., None], logits, wrong))

    model.eval()
    assert task.grade(Forgetful(), problems=20).accuracy == 1


@pytest.mark.parametrize(
    ("task", "steps"),
    [(Copying(3, 8), 22), (Brackets(2, 8), 30), (Brackets(2, 8), 0)],
    ids=["copying", "brackets", "untrained"],
)
def test_it_is_what_greedy_decoding_writes(task, steps):
    model = trained(task, steps).model
    batches = task.held_out(60, batch=40)
    right = right_answers(model, batches).tolist()
    prompts, answers = zip(*(text for batch in batches for text in task.texts(batch)))
    ids = sk.generate(model, [task.tokenizer.encode(prompt) for prompt in prompts], max_new_tokens=8)
    ends = [[*task.tokenizer.encode(answer), 0] for answer in answers]
    written = [row[: len(end)] == end for row, end in zip(ids[:, max(map(len, prompts)) :].tolist(), ends)]
    assert right == written
    if steps:
        assert 0.05 < sum(right) / 60 < 0.999  # or nothing is compared


def test_a_model_of_transformers_is_graded():
    from transformers import LlamaConfig, LlamaForCausalLM

    task = Copying(3, 8)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=task.vocab, **shape))
    right = task.right(model, problems=50)
    assert right.shape == (50,)
    assert right.dtype == torch.bool
    assert task.grade(model, problems=50).correct == right.sum()


# Without a trace ----------------------------------------------------------------------------------------------------------


def test_modes_and_random_states_stay():
    task = Copying(3)
    model = oracle(task, 20).train()
    model.drop.eval()
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    task.grade(model, problems=20)
    assert model.training
    assert not model.drop.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def test_modes_come_back_after_an_error():
    task = Copying(4)
    model = small(Copying(1)).train()
    with pytest.raises(ValueError, match="max_length"):
        task.grade(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("recipe", [None, "fp8"])
def test_a_graded_run_is_the_same_run(recipe):
    task = Copying(3, 8)

    def losses(meters):
        session = sk.Session(
            small(task).to(torch.bfloat16), task.batches(8), recipe=recipe, schedule=None, meters=meters
        )
        session.run(5)
        return [record.loss for record in session.records]

    assert losses([task.meter(every=2, problems=16)]) == losses([])


def test_grading_in_a_run_is_a_column_of_its_records():
    task = Copying(3, 8)
    session = trained(task, 5, meters=[task.meter(every=2, problems=20), task.meter(every=5, problems=10, name="few")])
    frame = session.records.frame()
    assert frame.accuracy.notna().tolist() == [False, True, False, True, False]
    assert frame.few.notna().tolist() == [False] * 4 + [True]
    assert session.records[-1].meters["few"] == pytest.approx(task.grade(session.model, problems=10).accuracy)


def test_a_run_ends_at_an_accuracy():
    task = Copying(2, 14)
    meter = task.meter(every=10, problems=20)
    session = trained(task, 1, meters=[meter])
    session.stop_when(meter.reached(0.9))
    session.run(400)
    assert session.steps < 300
    assert session.control.reason.startswith("stopped: accuracy 0.9") or "accuracy 1.0" in session.control.reason
    assert task.grade(session.model, problems=20).accuracy >= 0.8


def test_held_out_problems_give_a_loss_too():
    task = Copying(3, 8)
    session = trained(task, 3, eval=task.held_out(20))
    assert 0 < session.evaluate() < 5


def test_a_session_samples_with_the_characters_of_its_task():
    task = Addition(1)
    session = trained(task, 1)
    assert session.sample("1+2=").startswith("1+2=")


def test_a_run_on_problems_resumes(tmp_path):
    task = Copying(3, 8)
    session = trained(task, 4, run_dir=tmp_path / "run")
    session.save()
    session.run(3)
    again = sk.Session.resume(tmp_path / "run", small(task), data=task.batches(32))
    again.run(3)
    assert again.records[-1].loss == session.records[-1].loss


# Values -------------------------------------------------------------------------------------------------------------------


def test_a_score_has_an_interval():
    score = Score(48, 50)
    assert score.accuracy == 0.96
    assert score.interval.low < 0.96 < score.interval.high
    assert str(score) == "48 of 50 right, accuracy 0.960 (0.865 to 0.989)"


def test_tasks_are_values():
    assert Addition(3) == Addition(digits=3)
    assert len({Addition(3), Addition(3), Addition(3, reverse=True), Copying()}) == 3
    with pytest.raises(AttributeError):
        Addition(3).digits = 4  # type: ignore[misc]


def test_what_cannot_be_reached_is_refused():
    meter = Copying().meter()
    for accuracy in (0, 95):
        with refused(ValueError):
            meter.reached(accuracy)
    with refused(ValueError):
        Copying().meter(every=0)
    with refused(ValueError):
        Addition(1).meter(problems=256)
    session = trained(Copying(2, 14), 1)
    with refused(ValueError):
        session.stop_when(meter.reached(0.9))


def test_a_task_with_few_test_problems_takes_all_of_them():
    task = Copying(size=4, symbols=4)
    model = small(task)
    assert 0 < task.grade(model).total < 256
    assert sk.Goal(0.5, task).problems is None
