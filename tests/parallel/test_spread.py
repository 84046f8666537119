"""Four processes train what one process trains with four times the accumulation: every recipe, every layout.

A process weights its loss by its share of the labels that count, and gradients are added up. So the processes compute what one
computes that takes their batches in turn, up to the order in which four numbers are added. From the second step on a last bit of a
weight can become another code, as in tests/train/test_parallel.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surokit as sk
from surokit.parallel.layout import Parallel
from surokit.planner.counts.muon import muon_step
from tests.parallel import matrices
from tests.parallel.layouts import LAYOUTS, RANKS
from tests.parallel.spread_ranks import (
    CHANGING,
    DEFERRED,
    JOBS,
    OPTIMIZERS,
    WIRED,
    can,
    measured,
    sees,
    trained,
    whence,
    write_model,
    written,
)
from tests.processes import found_by
from tests.refusals import refused
from tests.train.ranks import CASES, CONFIG
from tests.train.toys import Toy, make_batches, make_session

TIMEOUT_S = 300  # they take 40 s on a machine that is free
ORDER_OF_SUMS = 5e-6
ANOTHER_CODE = 2e-3


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four processes found, by job."""
    return found_by("tests.parallel.spread_ranks", RANKS, tmp_path_factory.mktemp("ranks"), TIMEOUT_S)


MATRICES = "shares matrices out"


def found_in(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What each rank found in a job; fails with what ended the ranks where one did not finish it."""
    if not can(name):
        pytest.skip("torch before 2.13 shards no parameters of integers, in which codes of 4 bits are kept")
    if any("error" in found.get(name, {"error": ""}) and name not in ("is not finite",) for found in ranks):
        pytest.fail(
            "\n".join(f"rank {i}, {[*found][-1]}:\n{found[[*found][-1]]['error']}" for i, found in enumerate(ranks))
        )
    return [found[name] for found in ranks]


_alone_by: dict[str, dict[str, Any]] = {}
_alone: dict[tuple[str, int], dict[str, Any]] = {}


def alone(name: str, accumulate: int = RANKS) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if (name, accumulate) not in _alone:
            _alone[name, accumulate] = measured((CASES | CHANGING)[name], None, accumulate)
    finally:
        torch.set_num_threads(threads)
    return _alone[name, accumulate]


TRAINED = [name for name in JOBS if name.partition(", ")[0] in CASES | CHANGING]
DRAWN = (
    "fp4",
    "mxfp4",
    "quartet-ii",
)  # gradients are rounded stochastically, and each process draws numbers of its own


@pytest.mark.parametrize("name", TRAINED)
def test_equals_one_process_that_accumulates(ranks: Any, name: str) -> None:
    recipe = name.partition(", ")[0]
    found, expected = found_in(ranks, name), alone(recipe)
    drawn = recipe.startswith(DRAWN)
    for result in found:
        assert result["losses"] == found[0]["losses"]
        assert result["norms"] == found[0]["norms"]
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=ORDER_OF_SUMS)
        assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=0.05 if drawn else ORDER_OF_SUMS)
        assert result["losses"] == pytest.approx(expected["losses"], rel=0.02 if drawn else ANOTHER_CODE)
        assert result["eval"] == pytest.approx(expected["eval"], rel=0.02 if drawn else ANOTHER_CODE)
        assert result["targets"] == expected["targets"]
        assert result["tokens"] == expected["tokens"]


@pytest.mark.parametrize("layout", ["copies", "shards", "both"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_the_steps_of_one_process(ranks: Any, name: str, layout: str) -> None:
    """In bfloat16, whose gradients round sums: found 4e-4 of the loss after three steps."""
    if name not in _alone_by:
        _alone_by[name] = measured(OPTIMIZERS[name], None, RANKS)
    expected = _alone_by[name]
    for result in found_in(ranks, f"{name} by {layout}"):
        assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=ORDER_OF_SUMS)
        assert result["losses"] == pytest.approx(expected["losses"], rel=3e-3)
        assert result["norms"] == pytest.approx(expected["norms"], rel=2e-2)


@pytest.mark.parametrize("layout", ["copies", "shards"])
def test_accumulates_on_several_processes(ranks: Any, layout: str) -> None:
    found, expected = found_in(ranks, f"accumulates, {layout}"), alone("bf16", 2 * RANKS)
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=ANOTHER_CODE)
    assert found[0]["norms"][0] == pytest.approx(expected["norms"][0], rel=ORDER_OF_SUMS)
    assert found[0]["tokens"] == expected["tokens"]


@pytest.mark.parametrize("name", [name for name in TRAINED if name.endswith("copies")])
def test_copies_stay_equal(ranks: Any, name: str) -> None:
    found = found_in(ranks, name)
    assert found[0]["own"]
    for result in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result["own"], found[0]["own"], strict=True))


@pytest.mark.parametrize("source", ["read", "drawn", "experts"])
@pytest.mark.parametrize("name", DEFERRED)
def test_a_model_without_values_is_filled_in_parts(ranks: Any, name: str, source: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    device = "cpu" if source == "read" else "meta"  # drawn numbers are the same where both have none yet
    recipe = DEFERRED[name]
    expected = trained(whence(tmp_path / "model")[source], device, recipe, Parallel(), RANKS)
    found = found_in(ranks, "is deferred")
    for layout in ("copies", "both"):
        if (key := f"{name}, {source}, {layout}") in found[0]:
            assert all(result[key] == found[0][key] for result in found)
            losses, norms = found[0][key][:2], found[0][key][2:]
            # no scale has a past; sums are in bfloat16; one process leaves the batch without labels out of the experts' balance
            assert losses == pytest.approx(expected[:2], rel=ANOTHER_CODE if name == "bf16" else 0.01)
            assert norms == pytest.approx(expected[2:], rel=0.02 if name == "bf16" else 0.05)


def test_no_process_holds_all_of_a_model_without_values(ranks: Any) -> None:
    for result in found_in(ranks, "holds little"):
        assert result["own"] < 0.3 * result["whole"]
        assert result["own"] < result["most"] < 0.5 * result["whole"]  # its shards, and a layer or two


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_what_its_plan_says(ranks: Any, layout: str) -> None:
    for result in found_in(ranks, "is planned"):
        measured_bytes, planned_bytes = result[layout]
        assert planned_bytes == pytest.approx(measured_bytes, rel=0.1)


@pytest.mark.parametrize("layout", ["shards", "zero-2"])
@pytest.mark.parametrize("name", WIRED)
def test_the_bytes_that_move_are_those_that_are_foretold(ranks: Any, name: str, layout: str) -> None:
    others = RANKS - 1
    for result in found_in(ranks, "is counted"):
        if f"{name}, {layout}" not in result:
            pytest.skip("torch before 2.13 shards no parameters of integers, in which codes of 4 bits are kept")
        counted, gathered, reduced = result[f"{name}, {layout}"]
        assert counted["allgather_base"] * others == gathered
        assert counted["reduce_scatter_base"] * others == reduced * RANKS


@pytest.mark.parametrize(
    "name", [name for name in WIRED if name != "fp8"]
)  # which reduces the amaxes of all layers too
def test_copies_add_up_gradients_only(ranks: Any, name: str) -> None:
    for result in found_in(ranks, "is counted"):
        counted, gathered, reduced = result[f"{name}, copies"]
        assert gathered == 0
        assert 2 * counted["allreduce"] * (RANKS - 1) // RANKS == pytest.approx(reduced, abs=64)
        assert set(counted) == {"allreduce"}


@pytest.mark.parametrize(("name", "nbytes"), [("qfp8", 1.0), ("qfp4", 0.5625), ("qnf4", 0.516)])
def test_a_stored_weight_moves_as_codes_and_scales(ranks: Any, name: str, nbytes: float) -> None:
    (result, *_) = found_in(ranks, "is counted")
    if f"{name}, divided evenly" not in result:
        pytest.skip("torch before 2.13 shards no parameters of integers, in which codes of 4 bits are kept")
    each = next(each for what, each in result[f"{name}, divided evenly"].items() if what.startswith("stored as"))
    assert each == pytest.approx(nbytes, abs=0.002)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_scales_are_the_same_in_all(ranks: Any, layout: str) -> None:
    found = found_in(ranks, f"fp8, {layout}")
    assert all(torch.equal(result["in_force"], found[0]["in_force"]) for result in found)


def test_any_process_can_be_asked_to_save_and_to_stop(ranks: Any) -> None:
    found = found_in(ranks, "is asked")
    assert {result["steps"] for result in found} == {found[0]["steps"]}
    assert 6 <= found[0]["steps"] <= 9
    assert all(result["reasons"][0] == "stopped: by the second" for result in found)
    assert len(found[0]["saved"]) == 2
    assert all(result["saved last"] for result in found)
    assert found[0]["saved"][0] < f"step-{found[0]['steps']:06d}"


def test_a_file_and_a_limit_of_time_end_all_after_the_same_step(ranks: Any) -> None:
    found = found_in(ranks, "is asked")
    assert len({result["by a file"] for result in found}) == 1
    assert found[0]["steps"] < found[0]["by a file"] < 100_000
    assert all(result["after no minutes"] <= result["by a file"] + 1 for result in found)
    assert len({result["after no minutes"] for result in found}) == 1


def test_all_write_in_the_folder_that_the_first_has_claimed(ranks: Any) -> None:
    found = found_in(ranks, "is asked")
    assert {result["folder"] for result in found} == {"asked"}
    assert {result["second folder"] for result in found} == {"asked-2"}
    assert all("asked has content" in result["refused"] for result in found)


def test_a_step_that_is_not_finite_in_one_process_counts_in_none(ranks: Any) -> None:
    for result in found_in(ranks, "is not finite"):
        assert "3 steps in a row were not finite" in result["error"]
        assert result["steps"] == 5
        assert result["kept"]
        assert "hidden" in result["finding"]


def test_all_know_which_one_is_slow(ranks: Any) -> None:
    for result in found_in(ranks, "tells the slowest"):
        slowest, ms = result["told"]
        assert slowest[-1] == 2
        assert 1e8 < ms[-1] < 1e9


def test_the_first_process_weights_count(ranks: Any) -> None:
    found = found_in(ranks, "begins as the first")
    assert [result["own"] for result in found] == [True, False, False, False]
    assert all(result["same"] for result in found)


def test_each_process_draws_numbers_of_its_own(ranks: Any) -> None:
    dropped = [result["dropped"] for result in found_in(ranks, "begins as the first")]
    assert not any(torch.equal(dropped[0], other) for other in dropped[1:])


def test_no_row_is_taken_twice_or_left_out(ranks: Any) -> None:
    found = found_in(ranks, "shares the data")
    taken = [result["seen"][0] + result["seen"][1] for result in found]
    in_order = [row for rows in zip(*taken, strict=True) for row in rows]
    assert sorted(in_order[:22]) == [*range(22)]
    assert in_order == sees(Parallel(), RANKS, (9,))[0]  # as one process takes them, over the end of an epoch
    assert in_order[22:] != in_order[:14]  # which shuffles anew


def test_a_layout_that_does_not_fit_is_refused(ranks: Any) -> None:
    for result in found_in(ranks, "refuses"):
        assert "needs a multiple of 3 processes, and there are 4 processes" in result["three"]
        assert "needs 6 processes, and there are 4 processes" in result["six"]
        assert "divided among processes already" in result["twice"]
        assert "cannot be forked" in result["fork"]


def test_gradients_of_ones_own_loop_are_means(ranks: Any) -> None:
    model = Toy(dropout=0.0)
    for batch in make_batches(RANKS):
        (model(**batch).loss / RANKS).backward()
    expected = [p.grad for p in model.parameters()]
    for result in found_in(ranks, "own loop"):
        for name in ("copies", "shards"):
            for grad, right in zip(result[name], expected, strict=True):
                torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("layout", ["copies", "shards", "zero-2"])
def test_processes_write_text_together(ranks: Any, layout: str) -> None:
    (first, _), found = written(None), [found[layout] for found in found_in(ranks, "writes")]
    assert all(each == found[0] for each in found)
    assert found[0][0] == first


@pytest.mark.parametrize("way", matrices.SHARED_OUT + matrices.BY_EACH)
@pytest.mark.parametrize("case", matrices.CASES)
def test_processes_update_a_matrix_as_one_does(ranks: Any, case: str, way: str) -> None:
    """Bit for bit, whichever of them owns it."""
    if case == matrices.DRAWN and ("rows" in way or "columns" in way):
        pytest.skip("each shard draws bits of its own")
    for found in found_in(ranks, MATRICES):
        for what in ("weights", "momentum"):
            ours, expected = found[f"{case} by {way}"][what], found[f"{case} by {matrices.ALONE}"][what]
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("way", matrices.SHARED_OUT)
@pytest.mark.parametrize("case", matrices.CASES)
def test_each_matrix_is_computed_by_its_owner(ranks: Any, case: str, way: str) -> None:
    found = found_in(ranks, MATRICES)
    flop = [each[f"{case} by {way}"]["flop"] for each in found]
    assert sum(flop) == found[0][f"{case} by {matrices.ALONE}"]["flop"]
    assert flop == [matrices.owned_flop(case, way, rank) for rank in range(RANKS)]


def test_what_copies_do_not_share_is_each_process_own(ranks: Any) -> None:
    assert all(found["left"] for found in found_in(ranks, MATRICES))


@pytest.mark.parametrize("layout", ["copies", "shards"])
def test_a_session_shares_matrices_out_as_its_plan_says(ranks: Any, layout: str) -> None:
    found = [found[layout] for found in found_in(ranks, MATRICES)]
    shape: Any = sk.plan(CONFIG).shape
    planned = muon_step(shape, None, RANKS, RANKS, zero=LAYOUTS[layout].over(RANKS).zero)
    assert max(each["flop"] for each in found) == planned.flop
    assert sum(each["bytes"] for each in found) == RANKS * planned.sent


def test_a_layout_is_filled_from_the_number_of_processes() -> None:
    assert Parallel().over(8) == Parallel(shard=8, replicate=1)
    assert Parallel(shard=1).over(8) == Parallel(shard=1, replicate=8)
    assert Parallel(replicate=2).over(8) == Parallel(shard=4, replicate=2)
    assert Parallel().over(1) == Parallel(shard=1, replicate=1)
    assert [Parallel().over(4).zero, Parallel(reshard=False).over(4).zero, Parallel(shard=1).over(4).zero] == [3, 2, 0]


@pytest.mark.parametrize(
    "settings", [{"shard": 0}, {"replicate": 1.5}, {"shard": True}, {"reshard": 2}, {"communicate": "fp8"}]
)
def test_a_layout_of_other_values_is_refused(settings: dict[str, Any]) -> None:
    with refused(ValueError):
        Parallel(**settings)


def test_too_few_processes_are_refused_with_the_way_to_start_them() -> None:
    with refused(ValueError):
        make_session(parallel=sk.Parallel(shard=4))


def test_a_session_beside_others_says_how_they_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"give Session\(parallel=surokit.Parallel\(\)\)"):
        make_session()


@pytest.mark.parametrize("settings", [{"compile": True}, {"meters": [sk.numerics()]}], ids=["compile", "numerics"])
def test_codes_are_refused_where_weights_are_read(settings: dict[str, Any]) -> None:
    with refused(ValueError):
        make_session(parallel=sk.Parallel(communicate="codes"), **settings)


def test_one_process_is_a_layout_too() -> None:
    session, usual = make_session(parallel=sk.Parallel()), make_session()
    session.run(3)
    usual.run(3)
    assert [r.loss for r in session.records] == [r.loss for r in usual.records]
    assert not session.processes.are_several
