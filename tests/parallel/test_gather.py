"""Weights that are gathered as codes by two processes, against numbers that they gather: everything is equal bit for bit.

That a model whose numbers are gathered does what one process does is the subject of tests/train/test_parallel.py. The processes run
once (tests/parallel/gather_ranks.py), and each test compares one of their cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import surokit as sk
from surokit.parallel.gather import prepare
from surokit.parallel.processes import ALONE
from surokit.parallel.wire import wire
from tests.parallel.gather_ranks import BF16, CASES, QUANTIZERS, SHAPES, TRAINED, weight_of
from tests.processes import found_by
from tests.refusals import refused
from tests.train.ranks import RANKS

TIMEOUT_S = 300  # they take 10 s on a machine that is free


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return found_by("tests.parallel.gather_ranks", RANKS, tmp_path_factory.mktemp("gather"), TIMEOUT_S)


def case_of(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What each rank found in a case; fails with what ended the ranks where one did not finish it."""
    ends = [found[last]["error"] for found in ranks for last in [list(found)[-1]] if "error" in found[last]]
    assert all(name in found for found in ranks), "\n".join(ends)
    assert not any("error" in found[name] for found in ranks), "\n".join(ends)
    return [found[name] for found in ranks]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, of tensors or dictionaries of tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
    return bool(a == b)


# -- training


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_whether_codes_or_numbers_are_gathered(ranks: Any, name: str) -> None:
    """Losses, gradients and their norms, histories of delayed scaling, parameters, and a loss without gradients at the end."""
    for found in case_of(ranks, name):
        numbers, codes = found["numbers"], found["codes"]
        compared = [key for key in numbers if key not in ("planned", "expected", "sent")]
        assert {"losses", "norms", "grads 0", "grads 1", "scales 1", "params"} <= set(compared)
        assert [key for key in compared if not equal(numbers[key], codes[key])] == []
        assert all(grad.any() for grad in codes["grads 1"].values())


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_is_of_ordinary_tensors(ranks: Any, name: str) -> None:
    assert all(found["codes"]["plain"] for found in case_of(ranks, name))


# -- bytes


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.asks])
def test_the_bytes_of_a_step_are_those_that_were_predicted(ranks: Any, name: str) -> None:
    case = CASES[name]
    for found in case_of(ranks, name):
        for how in ("numbers", "codes"):
            expected, sent = found[how]["expected"], found[how]["sent"][1]
            amaxes = sent["amaxes"]
            if case.from_zero:  # two weights whose scales have no past yet, for which the second step is like a first
                assert amaxes == (16 if how == "codes" else 0)
                amaxes = 0
            assert sent["weights"] + amaxes == expected["weights"] * case.micro_batches
            assert sent["gradients"] == expected["gradients"]


@pytest.mark.parametrize("name", [n for n in CASES if n.partition(",")[0] in TRAINED and "whole" not in n])
def test_codes_of_weights_that_are_not_stored_save_bytes(ranks: Any, name: str) -> None:
    for found in case_of(ranks, name):
        numbers, codes = (found[how]["sent"][1] for how in ("numbers", "codes"))
        assert codes["weights"] + codes["amaxes"] < 0.8 * numbers["weights"]


PER_NUMBER = {  # bytes of one gather of a large weight; without an exchange, or with one of a float or a grid of floats
    "fp8": 1.0,
    "fp8-current": 1.0,
    "fp8-rowwise": 1.0,
    "fp8-block": 1.0,
    "mxfp8": 1 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
}
BOTH = ("fp8", "fp8-current", "fp8-block")


@pytest.mark.parametrize("name", PER_NUMBER)
def test_codes_are_a_byte_or_less_in_each_gather_that_takes_them(ranks: Any, name: str) -> None:
    codes, rest = CASES[name], case_of(ranks, name)[0]
    plain = rest["numbers"]["sent"][1]["weights"]
    weights = 2 * (codes.hidden * 64 + 64 * codes.hidden)  # two blocks of two matrices
    padded = weights + 2 * 64  # one row more of the odd ones
    gathers = 2 if name in BOTH else 1
    fewer = plain - rest["codes"]["sent"][1]["weights"]
    saved = gathers * padded / RANKS * (4 - PER_NUMBER[name])
    assert 0.93 * saved < fewer <= saved  # scales of these small weights are the rest


@pytest.mark.parametrize("name", ["fp8-block, aligned", "fp4, aligned", "fp8-rowwise", "mxfp8"])
def test_whole_tiles_exchange_no_amaxes_of_their_blocks(ranks: Any, name: str) -> None:
    """All but up_proj's: 256 rows are a block of 128 for each process, and down_proj's 64 rows are less than one."""
    sent = case_of(ranks, name)[0]["codes"]["sent"][1]
    expected = {"fp8-block, aligned": 2 * 2 * 2 * 4, "fp4, aligned": 4 * 2 * 4}
    assert sent["amaxes"] == expected.get(name, 0)


def test_delayed_scaling_exchanges_an_amax_in_the_first_step_only(ranks: Any) -> None:
    first, second = case_of(ranks, "fp8")[0]["codes"]["sent"]
    assert first["amaxes"] == 4 * 2 * 4  # four weights, gathered twice
    assert second["amaxes"] == 0


@pytest.mark.parametrize("name", ["qfp8, cast", "qfp4, cast", "qnf4, cast"])
def test_a_policy_that_casts_moves_stored_weights_as_bytes(ranks: Any, name: str) -> None:
    cast_, plain = (case_of(ranks, each)[0]["codes"] for each in (name, name.removesuffix(", cast")))
    assert cast_["sent"][1]["dtypes"] == ["torch.bfloat16", "torch.uint8"]
    assert cast_["sent"][1]["weights"] < plain["sent"][1]["weights"]  # adapters are cast


@pytest.mark.parametrize("name", ["fp8-rowwise, whole until backward"])
def test_one_gather_for_both_takes_the_numbers(ranks: Any, name: str) -> None:
    codes, numbers = (case_of(ranks, name)[0][how] for how in ("codes", "numbers"))
    assert codes["sent"] == numbers["sent"]
    assert "one gather serves forward and backward" in codes["planned"]


def test_the_report_is_a_table(ranks: Any) -> None:
    first, header, *rows = case_of(ranks, "fp8-block, aligned")[0]["codes"]["planned"].splitlines()
    assert first.startswith("In a step of one batch a process receives 67.1 KiB of weights (259 KiB without codes)")
    assert header.split()[:2] == ["gathered", "as"]
    assert [row.split()[0] for row in rows] == ["codes", "codes", "float32"]
    assert sum("shards cut them" in row for row in rows) == 1


# -- codes


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gathered_codes_are_those_of_the_whole_weight(ranks: Any, name: str) -> None:
    q, compared = QUANTIZERS[name], 0
    for N, K in SHAPES:
        whole = sk.quantize(weight_of(N, K, BF16), q).parts
        for codes in case_of(ranks, "codes"):
            parts = codes[f"{name} {N} x {K}"]
            if parts is None:
                assert (name, N) in {
                    ("nv", 7),
                    ("nv", 300),
                    ("small block", 1),
                }  # shards cut tiles, or scales are too many
                continue
            assert all(equal(a, b) and a.stride() == b.stride() for a, b in zip(parts, whole, strict=True))
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("spoilt", ["nan", "inf"])
@pytest.mark.parametrize("name", ["row", "block", "tensor"])
def test_what_is_not_finite_spoils_what_it_does_in_one_process(ranks: Any, name: str, spoilt: str) -> None:
    w = weight_of(300, 160, BF16)
    w[-1, -1] = float(spoilt)
    whole = sk.quantize(w, QUANTIZERS[name])
    for codes in case_of(ranks, "codes"):
        decoded = sk.Quantized.of(QUANTIZERS[name], tuple(codes[f"{name} {spoilt}"]), (300, 160)).dequantize()
        assert decoded.isnan().any()
        assert torch.equal(decoded.isnan(), whole.dequantize().isnan())


@pytest.mark.parametrize("name", ["qfp8", "qfp4", "qnf4"])
def test_stored_codes_come_whole_from_their_shards(ranks: Any, name: str) -> None:
    for N, K in SHAPES:
        storage = sk.recipes[name].storage
        assert storage is not None
        whole = sk.quantize(weight_of(N, K, BF16), storage).parts
        for codes in case_of(ranks, "codes"):
            assert all(equal(a, b) for a, b in zip(codes[f"{name} {N} x {K}"], whole, strict=True))


def test_numbers_are_gathered_for_a_reason_that_is_said(ranks: Any) -> None:
    found = case_of(ranks, "whys")[0]
    assert all(len(rows) == 1 for rows in found.values())
    assert {name: rows[0].partition(": ") for name, rows in found.items()} == {
        "numbers": ("bfloat16", ": ", "no layer quantizes it"),
        "stochastic": ("bfloat16", ": ", "forward rounds it stochastically or rotates it"),
        "only backward": ("bfloat16", ": ", "forward takes it as it is"),
        "nv": ("bfloat16", ": ", "a shard's rows are no multiple of 16"),
        "row": ("codes e4m3 per row", ": ", "bfloat16 in backward: it wants other codes"),
        "tied": ("bfloat16", ": ", "other modules read it too"),
        "compiled": ("bfloat16", ": ", "torch's compiler looks on"),
        "by columns": ("bfloat16", ": ", "columns are divided"),
        "cast before": ("bfloat16", ": ", "the layer casts it first"),
        "as chosen": ("bfloat16", ": ", "codes were not asked for"),
        "a narrow row": ("bfloat16", ": ", "codes and scales are no smaller"),
    }


# -- one process, and what is refused


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(recipe: sk.Recipe, policy: MixedPrecisionPolicy | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.SiLU())
    sk.apply(model, recipe)
    return fully_shard(model, mp_policy=policy or MixedPrecisionPolicy())


@pytest.mark.parametrize("stored", [False, True])
def test_one_process_gathers_nothing_and_computes_the_same(alone: Any, stored: bool) -> None:
    recipe = sk.Recipe("one", storage=sk.QFP8.storage) if stored else sk.FP8_ROWWISE
    x = torch.randn(4, 32)
    expected = model_of(recipe)(x)
    model = model_of(
        recipe, MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False) if stored else None
    )
    prepare(model)
    assert torch.equal(model(x), expected)
    assert wire(model, ALONE).gathered == wire(model, ALONE).gradients == 0


def test_a_choice_that_comes_too_early_or_too_late_is_refused(alone: Any) -> None:
    with refused(ValueError):
        prepare(nn.Linear(2, 2))
    model = model_of(sk.FP8_ROWWISE)
    model(torch.ones(1, 32))
    with refused(ValueError):
        prepare(model)
    stored = sk.Recipe("one", storage=sk.QFP8.storage)
    model = model_of(stored)
    prepare(model)
    with refused(ValueError):
        prepare(model, "numbers")
    offloaded = nn.Sequential(nn.Linear(32, 16, bias=False), nn.SiLU())
    sk.apply(offloaded, stored)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(offloaded, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with refused(ValueError):
        prepare(offloaded)
