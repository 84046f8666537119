"""One cell: bytes and counts of each switch, the largest batch, and that all cells do the same work."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.dissection import memory
from surokit.dissection.cell import Cell
from surokit.dissection.job import Job, Tokens
from surokit.dissection.measure import largest, measure, search
from surokit.dissection.planned import planned_of, why_not
from surokit.dissection.settings import Setting
from surokit.dissection.training import Training
from surokit.dissection.work import BEFORE, PROFILED, WARM_UP
from surokit.kernels import converts
from tests.dissection.cells import all_kernels, held, peak
from tests.refusals import refused

CONFIG = sk.DecoderConfig(layers=2, width=64, heads=2, kv_heads=1, vocab=128, ffn=192, max_length=128)
BASE = Setting(batch=2, length=64)
STEPS = 2


def job(source=CONFIG, gib=None, **changes):
    return Job(replace(BASE, **changes), source, Tokens(seed=3), STEPS, 0, 1e-3, gib, "cpu")


def values(asked):
    found = measure(asked)
    assert found is not None
    return found


def measured(**changes):
    found = values(job(**changes))
    assert found["state"] == "measured", found.get("why")
    return Cell.of({"name": "a cell", **found})


@pytest.fixture(autouse=True)
def switches():
    yield
    all_kernels()


@pytest.fixture(scope="module")
def baseline():
    return measured()


def forward(cell):
    return cell.memory["phases"]["forward"] - held(cell, "others")


def planned_well(cell, share):
    """Whether a cell's peak is the planned one; products through float32 hold copies, which no plan has."""
    if not converts():
        return cell.planned["peak"] == pytest.approx(peak(cell), rel=share)
    return cell.planned["peak"] < peak(cell) < 1.4 * cell.planned["peak"]


def test_a_cell_has_its_work_steps_memory_plan_and_profile(baseline):
    parameters = sum(p.numel() for p in sk.Decoder(CONFIG).parameters())
    assert baseline.work["tokens_per_step"] == 128
    assert (baseline.work["batch"], baseline.work["length"]) == (2, 64)
    assert baseline.work["trained"] == baseline.work["parameters"] == parameters
    assert len(baseline.step_ms) == 1
    assert len(baseline.losses) == STEPS + WARM_UP
    assert held(baseline, "weights") == 2 * parameters
    assert held(baseline, "optimizer") == pytest.approx(4 * parameters, rel=0.01)  # two moments in bfloat16, and steps
    assert held(baseline, "gradients") == 0
    assert held(baseline, "frozen weights") == sum(b.nbytes for b in sk.Decoder(CONFIG).buffers())
    assert set(baseline.memory["phases"]) == {"forward", "backward", "optimizer"}
    assert baseline.memory["peak"] > sum(baseline.memory["rest"].values())
    assert planned_well(baseline, 0.06)
    parts = sum(row["ms"] for row in baseline.profile["parts"])
    assert parts == pytest.approx(baseline.profile["wall_ms"], rel=0.02)
    assert sum(baseline.profile["phases_ms"].values()) == pytest.approx(baseline.profile["wall_ms"], rel=0.02)


def test_recompute_keeps_less_and_changes_no_loss(baseline):
    full = measured(recompute="full")
    assert forward(full) < forward(baseline)
    assert peak(full) < peak(baseline)
    assert full.losses == baseline.losses
    for term in ("weights", "frozen weights", "gradients", "optimizer"):
        assert held(full, term) == held(baseline, term)


def test_scores_that_are_kept_whole_take_memory(baseline):
    math, flash = measured(attention="math"), measured(attention="flash")
    scores = 2 * 2 * 64 * 64 * CONFIG.layers  # of two rows and two heads
    assert peak(math) >= peak(flash) + (1 if converts() else 2) * scores
    assert peak(flash) == peak(baseline)
    ours = "surokit::causal_attention_cpu"
    assert ours in {row["activity"] for row in flash.profile["activities"]}
    assert ours not in {row["activity"] for row in math.profile["activities"]}


def test_optimizers_hold_what_they_say(baseline):
    eight = measured(optimizer="adamw8bit")
    assert held(eight, "optimizer") < 0.65 * held(baseline, "optimizer")
    assert held(measured(optimizer="sgd"), "optimizer") == 0


def test_an_adapter_has_hardly_an_optimizer_and_freezes_the_rest(baseline):
    tuned = measured(lora=2)
    assert tuned.work["trained"] < 0.1 * tuned.work["parameters"]
    assert held(tuned, "optimizer") < 0.15 * held(baseline, "optimizer")
    assert held(tuned, "frozen weights") == pytest.approx(held(baseline, "weights"), rel=0.01)
    stored = measured(lora=2, recipe=sk.QNF4.decode_once(False))
    assert held(stored, "frozen weights") < 0.7 * held(tuned, "frozen weights")
    assert stored.work["weights"] == tuned.work["weights"]  # before the recipe


def test_more_rows_need_more(baseline):
    assert peak(measured(batch=1)) < peak(baseline) < peak(measured(batch=4))
    assert measured(accumulate=2).work["tokens_per_step"] == 256


def test_fusion_and_recipes_and_hosts_train(baseline):
    fused = measured(fusion="fused")
    assert {"Linear, fused"} <= {row["part"] for row in fused.profile["parts"]}
    fp8 = measured(recipe="fp8")
    assert fp8.losses[0] == pytest.approx(baseline.losses[0], rel=0.01)
    assert fp8.losses != baseline.losses
    moved = measured(offload_activations=True)
    assert moved.losses == baseline.losses
    for optimizer in ("offloadadamw", "zenflow"):
        assert measured(optimizer=optimizer).losses[0] == baseline.losses[0]


def test_all_cells_read_the_same_tokens_from_the_same_weights():
    tokens = Tokens(torch.arange(10), torch.arange(10, 20))
    (one,) = tokens.batches(1, 2, 6, 0)
    assert one["input_ids"].flatten().tolist() == [*range(10), 0, 1]
    assert one["labels"].flatten().tolist() == [*range(10, 20), 10, 11]
    two = tokens.batches(2, 1, 6, 0)
    assert torch.cat([b["input_ids"] for b in two]).tolist() == one["input_ids"].tolist()
    drawn = Tokens(seed=5)
    assert torch.equal(
        drawn.batches(1, 2, 8, 50)[0]["labels"],
        drawn.batches(2, 1, 8, 50)[0]["labels"].new_tensor(
            torch.cat([b["labels"] for b in drawn.batches(2, 1, 8, 50)]).tolist()
        ),
    )
    assert measured().work["weights"] == measured(recompute="full").work["weights"]


def test_models_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 128,
    }

    def make():
        return LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()

    cells = [measured(source=make, **changes) for changes in ({}, {"attention": "eager"}, {"recompute": "full"})]
    assert [c.losses[0] for c in cells] == pytest.approx([cells[0].losses[0]] * 3, rel=1e-3)
    assert peak(cells[2]) < peak(cells[0]) < peak(cells[1])
    assert {"Linear q", "attention", "RoPE and reshaping", "RMSNorm"} <= {
        row["part"] for row in cells[0].profile["parts"]
    }


# -- generation


def test_generation_has_prefill_and_steps_apart():
    found = values(replace(job(), what="infer"))
    made = Cell.of({"name": "a cell", **found})
    assert len(made.step_ms) == 1
    assert len(made.work["prefill_ms"]) == 3
    assert made.work["tokens_per_step"] == 2
    # keys and values of two layers, two rows and one head of 32 numbers in bfloat16, for the prompt and all that is written
    tokens = 64 + WARM_UP + STEPS + BEFORE + PROFILED + 1
    assert held(made, "KV cache") == 2 * 2 * 2 * tokens * 32 * 2
    assert held(made, "optimizer") == 0
    assert set(made.memory["phases"]) == {"prefill", "decode"}
    assert made.memory["phases"]["prefill"] > made.memory["phases"]["decode"]
    for part in (made.profile["parts"], made.profile["prefill"]["parts"]):
        assert {"attention", "lm_head", "Linear q", "RMSNorm"} <= {row["part"] for row in part}
        assert all(row["backward_ms"] == 0 for row in part)
    assert made.planned["terms"]["KV cache"] == held(made, "KV cache")
    assert planned_well(made, 0.1)  # a second cache would be 9 % more
    stored = values(replace(job(recipe=sk.QFP8.decode_once(False)), what="infer"))
    assert stored["memory"]["rest"]["weights"] + stored["memory"]["rest"]["frozen weights"] < 0.8 * held(
        made, "weights"
    )
    assert stored["work"]["weights"] == made.work["weights"]


def test_generation_takes_a_decoder():
    from transformers import GPT2Config, GPT2LMHeadModel

    with refused(TypeError):
        measure(
            replace(
                job(source=lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))),
                what="infer",
            )
        )


def test_the_largest_batch_of_generation(monkeypatch):
    from surokit.dissection.generating import Generating
    from surokit.models.generation import Generation

    monkeypatch.setattr(Generating, "planned_batch", lambda *given: 4)
    real = Generation.prefill

    def prefill(self):
        if len(self.ids) > 6:
            raise MemoryError
        return real(self)

    monkeypatch.setattr(Generation, "prefill", prefill)
    assert search(replace(job(batch="largest"), what="infer")) == 6


# -- memory


@pytest.mark.parametrize("most", [1, 2, 3, 9, 64, 100])
@pytest.mark.parametrize("guess", [1, 7, 500])
def test_the_search_finds_the_largest_batch_within_an_eighth(most, guess):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= most

    found = largest(fits, guess)
    assert found <= most < found + max(2, found // 4)
    assert len(tried) < 20


def test_not_one_sequence_may_fit():
    with pytest.raises(MemoryError):
        largest(lambda batch: False, 16)


def test_a_step_that_runs_out_of_memory_is_a_cell(monkeypatch):
    def run(training):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Training, "steps", run)
    found = values(job(gib=1))
    assert found["state"] == "does not fit"
    assert found["why"].startswith("Memory ran out in a step, with 1 GiB, although")
    assert found["planned"]["peak"] > 0


def test_a_model_that_is_too_large_is_a_cell():
    def make():
        raise MemoryError

    found = values(job(source=make, gib=1))
    assert found["state"] == "does not fit"
    assert found["why"] == "Memory ran out while the model was made, with 1 GiB."


def test_the_largest_batch_is_searched_with_steps(monkeypatch):
    monkeypatch.setattr(Training, "planned_batch", lambda *given: 3)
    steps = []
    real = sk.Session.step

    def step(session, batches):
        rows = batches[0]["input_ids"].shape[0]
        steps.append(rows)
        if rows > 5:
            raise MemoryError
        return real(session, batches)

    monkeypatch.setattr(sk.Session, "step", step)
    assert search(job(batch="largest")) == 5
    assert steps[:2] == [3, 6]
    monkeypatch.setattr(sk.Session, "step", lambda *given: (_ for _ in ()).throw(MemoryError()))
    assert search(job(batch="largest")) == 0


def test_what_counts_as_out_of_memory():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
    ):
        assert memory.is_out_of_memory(error)
    for other in (RuntimeError("shapes differ"), ValueError("out of memory")):
        assert not memory.is_out_of_memory(other)


def test_the_term_that_binds_is_named():
    planned = {"peak": 4 * 2**30, "phase": "backward", "terms": {"weights": 2**30, "activations": 3 * 2**30}}
    assert why_not(planned, 2.0, "in a step") == (
        "Memory ran out in a step, with 2 GiB: activations binds, with 3 of the 4 GiB that are planned at the fullest moment, in "
        "backward."
    )
    assert "although 4 GiB are planned" in why_not(planned, 8.0, "in a step")


def test_a_tensor_of_a_trace_holds_no_memory():
    model = nn.Linear(4, 4)
    found = []

    def traced(x):
        with pytest.raises(RuntimeError):  # which a tensor of a trace that something keeps raises wherever it is met
            x.untyped_storage().data_ptr()
        found.append(memory.held(model, None))
        return x

    torch.func.functionalize(traced)(torch.zeros(3))
    assert found[0]["weights"] == 4 * (16 + 4)


def test_a_limit_holds_within_its_block_only():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory.limited(torch.device("cpu"), 0.25), pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(2**30, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


# -- refused


def test_a_model_that_is_no_decoder():
    with refused(TypeError):
        measure(job(source=nn.Linear(4, 4)))
    with refused(TypeError):
        measure(job(source=lambda: "a model"))


def test_an_implementation_of_transformers_for_another_model():
    with refused(ValueError):
        measure(job(attention="eager"))


def test_a_plan_of_what_cannot_be_planned_says_why():
    assert planned_of(BASE, None, "cpu", None) == {"why": "the model's configuration is not known"}
    assert "why" in planned_of(BASE, {"model_type": "llama"}, "cpu", None)
