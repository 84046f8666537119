"""Four processes train what one process trains, on GPUs: over NCCL where each has one of its own, else over gloo.

The jobs are those of tests/parallel, in which the same is held on a CPU. With fewer than four GPUs, and in a rehearsal, NCCL is not
used, since it takes no two processes on one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import matrices
from tests.parallel.layouts import RANKS
from tests.parallel.spread_ranks import JOBS, can, measured
from tests.processes import found_by
from tests.train.ranks import CASES

TIMEOUT_S = 400
ORDER_OF_SUMS = 2e-5  # kernels of GPUs add in another order for another number of tokens
ANOTHER_CODE = 5e-3
DRAWN = ("fp4", "mxfp4")  # gradients are rounded stochastically

MATRICES = "shares matrices out"
COPIES = ("bf16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "fp4", "qfp8", "qfp4", "qnf4")
TRAINED = [
    *(f"{name}, copies" for name in COPIES),
    *(f"{name}, {layout}" for name in ("bf16", "fp8") for layout in ("shards", "zero-2")),
    *(f"{name}, both" for name in ("fp8-block", "qfp8", "qfp4")),
]
OTHERS = [
    "ZenFlow by shards",
    "OffloadAdamW by copies",
    "AdamW8bit by shards",
    "is counted",
    "is asked",
    MATRICES,
    "is not finite",
]
NAMES = [*TRAINED, *OTHERS]


@pytest.fixture(scope="module")
def ranks(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four processes found, by job."""
    return found_by("tests.parallel.spread_ranks", RANKS, tmp_path_factory.mktemp("ranks"), TIMEOUT_S, *NAMES)


def found_in(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    if not can(name):
        pytest.skip("torch before 2.13 shards no parameters of integers, in which codes of 4 bits are kept")
    missing = [(rank, [*found][-1], found[[*found][-1]]) for rank, found in enumerate(ranks) if name not in found]
    assert not missing, "\n".join(
        f"rank {rank}, {last}: {result.get('error', result)}" for rank, last, result in missing
    )
    assert not any("error" in found[name] for found in ranks if name != "is not finite"), ranks[0][name]
    return [found[name] for found in ranks]


def test_the_jobs_are_there() -> None:
    assert set(NAMES) <= set(JOBS)


@pytest.mark.parametrize("name", TRAINED)
def test_equals_one_process_that_accumulates(device: torch.device, ranks: Any, name: str) -> None:
    found = found_in(ranks, name)
    recipe = name.partition(", ")[0]
    expected = measured(CASES[recipe], None, RANKS, device.type)
    drawn = recipe.startswith(DRAWN)
    for result in found:
        assert result["losses"] == found[0]["losses"]
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=ORDER_OF_SUMS)
        assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=0.05 if drawn else 10 * ORDER_OF_SUMS)
        assert result["losses"] == pytest.approx(expected["losses"], rel=0.02 if drawn else ANOTHER_CODE)


@pytest.mark.parametrize("name", ["ZenFlow by shards", "OffloadAdamW by copies", "AdamW8bit by shards"])
def test_optimizers_with_state_elsewhere_take_the_same_steps_in_all(
    device: torch.device, ranks: Any, name: str
) -> None:
    found = found_in(ranks, name)
    losses = found[0]["losses"]
    assert losses[-1] < losses[0]
    assert all(result["losses"] == losses for result in found)


def test_the_bytes_that_move_are_those_that_are_foretold(device: torch.device, ranks: Any) -> None:
    for result in found_in(ranks, "is counted"):
        for name, (counted, gathered, _) in ((n, v) for n, v in result.items() if n.endswith((", shards", ", zero-2"))):
            assert counted["allgather_base"] * (RANKS - 1) == gathered, name


@pytest.mark.parametrize("way", matrices.SHARED_OUT + matrices.BY_EACH)
@pytest.mark.parametrize("case", matrices.CASES)
def test_processes_update_a_matrix_as_one_does(device: torch.device, ranks: Any, case: str, way: str) -> None:
    if case == matrices.DRAWN and ("rows" in way or "columns" in way):
        pytest.skip("each shard draws bits of its own")
    for found in found_in(ranks, MATRICES):
        for what in ("weights", "momentum"):
            for ours, expected in zip(found[f"{case} by {way}"][what], found[f"{case} by {matrices.ALONE}"][what]):
                torch.testing.assert_close(ours, expected)


def test_any_process_can_be_asked_to_save_and_to_stop(device: torch.device, ranks: Any) -> None:
    found = found_in(ranks, "is asked")
    assert {result["steps"] for result in found} == {found[0]["steps"]}
    assert all(result["reasons"][0] == "stopped: by the second" for result in found)


def test_a_step_that_is_not_finite_in_one_process_counts_in_none(device: torch.device, ranks: Any) -> None:
    assert all(result["kept"] for result in found_in(ranks, "is not finite"))


def test_a_function_is_launched_after_this_process_has_used_the_device(device: torch.device, tmp_path: Path) -> None:
    import surokit as sk
    from tests.launching import functions

    torch.ones(1, device=device)
    found = sk.launch(functions.trains, tmp_path, {}, sk.Parallel(), 4, gpus=2)
    assert found["steps"] == 4
