"""FSDP2 in two processes, against a single process with the same global batch.

The processes run once (tests/train/ranks.py), and each test compares one of their cases. There are two comparisons:

- *In turn*: the single process takes the two halves of the batch one after the other, adds up the gradients and halves them.
  This is what the ranks compute, operand for operand, so losses and gradients are equal bit for bit, stochastic rounding
  included. (The ranks' seeds are known here.)

- *Whole*: the single process takes the batch at once. Equal is then what does not depend on who else is in the batch, up to
  the order of sums. A scale within a row of x or dy does not (rows, blocks, MX), nor one that comes from the past. grad_weight
  sums over tokens and its scales lie along them: with 128 tokens a rank, blocks of 128 and 32 are the same in the halves and
  the whole; a whole row is not, but its scales are powers of two, which change nothing above E4M3's subnormals. Not equal are
  scales of a whole tensor (current scaling, NVFP4's second level) and what stochastic rounding draws. There both sides are
  quantizations of the same numbers, and each is held against products in float32.

From the second step on everything is only close. AdamW's vectorized loop and the one for its last elements differ in the last
bit, shards end elsewhere than whole tensors, and a last bit of a weight can become another code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.optim.tensors import shard_number
from surokit.train import AdamW, AdamW8bit, Spec
from tests.processes import found_by
from tests.refusals import refused
from tests.train.ranks import (
    CASES,
    RANKS,
    RECIPES,
    SESSIONS,
    STEPS,
    STORAGES,
    Case,
    Result,
    halves,
    is_sharded,
    loss_of,
    make,
    records,
    train,
)

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300  # they take 20 s on a machine that is free


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    """What each of the two processes found, by case."""
    return found_by("tests.train.ranks", RANKS, tmp_path_factory.mktemp("ranks"), TIMEOUT_S)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are split over threads, and the ranks have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case_of(ranks: list[dict[str, Result]], name: str) -> list[Result]:
    """What each rank found in a case; fails with what ended the ranks where one did not finish it."""
    if not is_sharded(CASES[name.removesuffix(" in a session")]):
        pytest.skip("torch before 2.13 shards no parameters of integers, in which codes of 4 bits are kept")
    if any("error" in found.get(name, {"error": "not reached"}) for found in ranks):
        ends = [
            f"rank {i}, {last}:\n{found[last]['error']}" for i, found in enumerate(ranks) for last in [list(found)[-1]]
        ]
        pytest.fail("\n".join(ends))
    return [found[name] for found in ranks]


_single: dict[tuple[str, bool], Result] = {}


def single(name: str, in_turn: bool) -> Result:
    """The case in this process, each half in turn or the whole batch at once."""
    if (name, in_turn) not in _single:
        _single[name, in_turn] = in_one_process(CASES[name], in_turn)
    return _single[name, in_turn]


def in_one_process(case: Case, in_turn: bool) -> Result:
    model = make(case)

    def gradients(step: int) -> Any:
        losses = []
        for rank, ids in enumerate(halves() if in_turn else [torch.cat(halves())]):
            losses.append(loss_of(model, ids, step, rank))
            # the whole's loss is the mean of the halves': twice as large, dy is as in the halves, and so are its delayed scales
            (losses[-1] if in_turn else losses[-1] * RANKS).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= RANKS
        return [loss.item() for loss in losses]

    start = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    return {**train(case, model, gradients, lambda p: p), "start": start}


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| over all tensors together."""
    assert a.keys() == b.keys()
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a)) ** 0.5


def means(*results: Result) -> list[float]:
    """Each step's loss over the whole batch; a result has one loss a step, or a list of them."""
    rows = zip(*(result["losses"] for result in results))
    return [float(torch.tensor(row).double().mean()) for row in rows]


def size(a: dict[str, Tensor]) -> float:
    return distance(a, {name: torch.zeros_like(t) for name, t in a.items()})


def moves(result: Result, started: Result) -> dict[str, Tensor]:
    """What training changed in each parameter that is not stored in a byte or less."""
    start = started["start"]
    return {n: p.double() - start[n].detach().double() for n, p in result["params"].items() if p.itemsize > 1}


def assert_same_gradients(found: Result, expected: Result) -> None:
    """Bit for bit."""
    assert found["grads"].keys() == expected["grads"].keys()
    assert not [n for n, grad in expected["grads"].items() if not equal(found["grads"][n], grad)]


# -- every recipe and every storage

OPTIMIZED = [name for name in CASES if name.startswith(("AdamW", "Muon"))]
TRAINED = [name for name in CASES if name not in OPTIMIZED and CASES[name].calibrated]


ORDER_OF_SUMS = 5e-6  # sums of some hundred float32 numbers in another order, through two blocks; found: 2.4e-7
ANOTHER_CODE = 1e-3  # a code or two of many thousand differ; found: 7e-5


@pytest.mark.parametrize("name", TRAINED)
def test_equals_a_process_that_takes_the_halves_in_turn(ranks: Any, name: str) -> None:
    found, expected = case_of(ranks, name), single(name, in_turn=True)
    assert [result["losses"][0] for result in found] == expected["losses"][0]
    assert_same_gradients(found[0], expected)
    assert means(*found) == pytest.approx(means(expected), rel=ANOTHER_CODE)
    assert distance(moves(found[0], expected), moves(expected, expected)) < 1e-3 * size(moves(expected, expected))


@pytest.mark.parametrize("name", STORAGES)
def test_a_stored_weight_stays_what_it_was(ranks: Any, name: str) -> None:
    """Codes and scales of every dtype come back from their shards, which need not be equal, after training."""
    found, start = case_of(ranks, name)[0], single(name, in_turn=True)["start"]
    frozen = {n: p for n, p in start.items() if not p.requires_grad}
    codes = [n for n, p in frozen.items() if p.itemsize == 1 and n.endswith("proj.weight")]
    scales = [n for n in frozen if "proj.weight_" in n]
    assert len(codes) == 2 * 7
    assert len(scales) >= len(codes)
    assert all(equal(found["params"][n], p) for n, p in frozen.items())


WHOLE_TENSORS = ("fp8-current", "fp8-current over its own")
DRAWN = ("fp4", "fp4 over its own", "mxfp4", "mxfp4 over its own", "quartet-ii")


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in WHOLE_TENSORS + DRAWN])
def test_equals_a_process_with_the_whole_batch(ranks: Any, name: str) -> None:
    found, expected = case_of(ranks, name), single(name, in_turn=False)
    assert means(*found)[0] == pytest.approx(means(expected)[0], rel=ORDER_OF_SUMS)
    assert distance(found[0]["grads"], expected["grads"]) < ORDER_OF_SUMS * size(expected["grads"])
    assert means(*found) == pytest.approx(means(expected), rel=ANOTHER_CODE)
    # AdamW gives the smallest gradient as long a step as the largest, so what changed it a little turns some steps; found: 0.005
    assert distance(moves(found[0], expected), moves(expected, expected)) < 0.02 * size(moves(expected, expected))


@pytest.mark.parametrize("name", WHOLE_TENSORS + DRAWN)
def test_is_as_good_as_a_process_with_the_whole_batch(ranks: Any, name: str) -> None:
    found, expected = case_of(ranks, name), single(name, in_turn=False)
    within_rows = name.startswith("mxfp4")  # x and w, which are rounded to nearest
    rel = ORDER_OF_SUMS if within_rows else 5e-3  # found: 1.4e-3
    assert means(*found)[0] == pytest.approx(means(expected)[0], rel=rel)
    storage = CASES[name].recipe.storage
    unquantized = Case(sk.BF16.store(storage).lora(rank=4) if storage else sk.BF16)
    plain = in_one_process(unquantized, in_turn=False)["grads"]
    ours, theirs = found[0]["grads"], expected["grads"]
    error = distance(theirs, plain)
    assert 0 < error < 0.5 * size(plain)
    assert distance(ours, plain) < 1.25 * error
    assert distance(ours, theirs) < 2**0.5 * error  # as two independent errors of this size


# -- delayed scaling


def test_delayed_scales_are_the_same_on_both_ranks(ranks: Any) -> None:
    found, expected = case_of(ranks, "fp8"), single("fp8", in_turn=True)
    for step in range(STEPS):
        opened = [result["open"][step] for result in found]
        in_force = [result["in_force"][step] for result in found]
        assert not torch.equal(*opened)  # each has seen its own half
        assert torch.equal(*in_force)
        rtol = 0.0 if step == 0 else ANOTHER_CODE
        torch.testing.assert_close(torch.maximum(*opened), expected["open"][step], rtol=rtol, atol=0.0)
        torch.testing.assert_close(in_force[0], expected["in_force"][step], rtol=rtol, atol=0.0)


def test_without_a_past_each_rank_seeds_its_slots_and_the_first_step_ends_that(ranks: Any) -> None:
    """The first step quantizes by a rank's own amaxes; what it records of weights and of the first layer is as in one process."""
    found, expected = case_of(ranks, "fp8 without a past"), single("fp8 without a past", in_turn=False)
    for step in range(STEPS):
        assert torch.equal(found[0]["in_force"][step], found[1]["in_force"][step])
    in_force, single_ = found[0]["in_force"][0], expected["in_force"][0]
    w = slice(1, None, 3)
    assert torch.equal(in_force[w], single_[w])
    assert torch.equal(in_force[:9:3], single_[:9:3])  # x of q, k and v in the first block
    torch.testing.assert_close(in_force, single_, rtol=0.1, atol=0.0)


# -- the optimizers


@pytest.mark.parametrize("name", OPTIMIZED)
def test_an_optimizer_updates_shards_as_it_does_the_whole(ranks: Any, name: str) -> None:
    found, expected = case_of(ranks, name), single(name, in_turn=True)
    assert_same_gradients(found[0], expected)
    ours, theirs = moves(found[0], expected), moves(expected, expected)
    bound = 1e-3 * size(theirs)  # the last bit of a vectorized loop's end; found: 0
    optimizer = CASES[name].optimizer
    if optimizer.options.get("rounding") == "stochastic":
        # the first shard has the whole's draws, and the second ones as unlike them as another seed's
        other = Spec(optimizer.optimizer, {**optimizer.options, "seed": 1})
        drawn = distance(moves(in_one_process(replace(CASES[name], optimizer=other), in_turn=True), expected), theirs)
        assert distance(ours, theirs) == pytest.approx(drawn / 2**0.5, rel=0.1)
        return
    if optimizer.optimizer is AdamW8bit:
        # blocks of 256 begin with each shard: no further apart than from moments in float32
        wide = replace(CASES[name], optimizer=Spec(AdamW, {"lr": 1e-3, "state_dtype": torch.float32}))
        bound = distance(moves(in_one_process(wide, in_turn=True), expected), theirs)
        assert 0 < bound < 0.1 * size(theirs)
    assert distance(ours, theirs) < bound


def test_stochastic_rounding_draws_other_bits_for_each_shard(ranks: Any) -> None:
    first, second = (result["keys"] for result in case_of(ranks, "AdamW, stochastic of bfloat16"))
    every = {tuple(key) for key in first + second}
    assert len(every) == len(first) + len(second) == 2 * len(single("bf16", in_turn=True)["grads"])


def test_replicas_of_a_shard_draw_the_same_bits() -> None:
    """Two machines that hold the same two shards each: a mesh of 2 x 2, replicated along the first axis."""
    placements = (SimpleNamespace(is_replicate=lambda: True), SimpleNamespace(is_replicate=lambda: False))

    def shard(machine: int, place: int) -> Any:
        mesh = SimpleNamespace(size=lambda axis: 2, get_local_rank=lambda axis: (machine, place)[axis])
        return SimpleNamespace(placements=placements, device_mesh=mesh)

    assert [shard_number(shard(machine, place)) for machine in range(2) for place in range(2)] == [0, 1, 0, 1]
    assert shard_number(torch.ones(2)) == 0


@pytest.mark.parametrize("name", CASES)
def test_an_optimizers_state_continues_in_another(ranks: Any, name: str) -> None:
    assert all(result["restored"] for result in case_of(ranks, name))


# -- around them


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_clips_by_the_norm_of_all_shards(ranks: Any, name: str) -> None:
    found = case_of(ranks, f"{name} in a session")
    expected = records(CASES[name], make(CASES[name]), torch.cat(halves()))
    assert found[0]["norms"] == found[1]["norms"]
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert min(expected["norms"]) > 0.5  # all were clipped
    assert means(*found) == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("name", STORAGES)
def test_a_cast_of_stored_weights_is_refused(name: str) -> None:
    """model.to(dtype), and what FSDP does to every floating-point parameter with MixedPrecisionPolicy(param_dtype=dtype)."""
    model = make(CASES[name]).to(torch.bfloat16)
    with refused(TypeError):
        loss_of(model, halves()[0], 0, 0)
