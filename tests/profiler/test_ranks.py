"""Merged ranks: exact answers for hand-made NCCL traces, the split of exposed time beside a raster, and two real processes.

The hand-made run is that of `traces.rank_events`. The all_reduce takes 10 us a step, for which rank 0 waits 20 us longer and rank 2
30 us, both for rank 1; in the all_gather rank 0 waits 5 us for rank 2, which its gemm hides.
"""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surokit as sk
from surokit.profiler.analysis.collectives import Collectives
from surokit.profiler.analysis.timeline import Event, Kind
from surokit.profiler.analysis.waiting import Matched
from surokit.profiler.record.messages import collective_name, message_of
from tests.processes import found_by
from tests.profiler.ranks import CASES, LAYERS, STEPS
from tests.profiler.traces import CLOCKS, gpu_recording, rank_events, write_rank
from tests.refusals import refused


@pytest.fixture
def run(tmp_path):
    """Merges the hand-made run's ranks; changes are those of `rank_events`, for all ranks or by rank."""

    def make(ranks=(0, 1, 2), of_rank=None, **changes):
        for rank in ranks:
            write_rank(tmp_path, rank, rank_events(rank, **changes, **(of_rank or {}).get(rank, {})))
        return sk.RankProfiles.load(tmp_path)

    return make


def us(frame, *columns):
    return [tuple(round(1000 * value, 6) for value in row) for row in zip(*(frame[c] for c in columns))]


FIGURES = ("wall_ms", "compute_ms", "transfer_ms", "skew_ms", "exposed_ms", "idle_ms", "caused_ms")


# ------------------------------------------------------------------------------------------------------ the hand-made run


@pytest.mark.parametrize(
    "changes",
    [{}, {"noted": "kernel"}, {"numbered": False}, {"noted": ""}],
    ids=["noted by operators", "noted on kernels", "without numbers", "without notes"],
)
def test_every_answer_of_the_hand_made_run(run, changes):
    merged = run(**changes)
    assert merged.numbers == (0, 1, 2)
    assert us(merged.ranks, *FIGURES) == [
        (100, 55, 10, 20, 30, 15, 0),
        (100, 75, 10, 0, 10, 15, 50),
        (100, 45, 10, 30, 40, 15, 0),
    ]
    assert merged.ranks.caused_share.tolist() == [0, 1, 0]
    waits = merged.waits
    assert list(zip(waits["rank"], waits.waits_for, waits.collectives)) == [(2, 1, 1), (0, 1, 1)]
    assert us(waits, "ms") == [(30,), (20,)]
    assert waits.share.tolist() == pytest.approx([0.3, 0.2])
    means = [merged.exposed_ms, merged.transfer_ms, merged.skew_ms]
    assert means == pytest.approx([0.08 / 3, 0.01, 0.05 / 3])
    assert (merged.summary["slowest_rank"], merged.summary["slowest_ms"]) == (1, pytest.approx(0.05 / 3))
    assert merged.ranks.clock_us.tolist() == list(CLOCKS)
    assert merged.ranks.residual_us.tolist() == [0, 0, 0]


def test_the_table_of_collectives(run):
    table = run().collectives
    assert [c for c in table.columns if c.endswith("_ms")] == ["start_ms", "transfer_ms", "wait_ms"]
    first = table[table.step == 0]
    rows = list(zip(first["name"], first["group"], first.nbytes, first["rank"], first.last_rank))
    assert rows == [
        ("all_gather", "1", 800, 0, 2),
        ("all_gather", "1", 800, 2, 2),
        ("all_reduce", "0", 2000, 0, 1),
        ("all_reduce", "0", 2000, 1, 1),
        ("all_reduce", "0", 2000, 2, 1),
    ]
    # since the first step's begin, at -10, on the first rank's clock
    assert us(first, "start_ms", "ms", "transfer_ms", "wait_ms") == [
        (20, 10, 5, 5),
        (25, 5, 5, 0),
        (55, 30, 10, 20),
        (75, 10, 10, 0),
        (45, 40, 10, 30),
    ]
    assert table.collective.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]


def test_lost_time_has_the_wait_for_a_rank_as_a_cause(run):
    merged = run()
    for profile, waited in zip(merged.profiles, (20, 0, 30)):
        lost = dict(zip(profile.lost.cause, us(profile.lost, "ms_per_step")))
        assert lost["communication"] == (10,)
        assert lost.get("waiting for rank 1", (0,)) == (waited,)
        s = profile.summary
        assert profile.lost.ms_per_step.sum() == pytest.approx(s["idle_ms"] + s["comm_exposed_ms"])
        assert "waiting for rank 1" not in profile._repr_html_() or waited
    lost = merged.lost
    assert lost["rank"].unique().tolist() == [0, 1, 2]
    assert lost[lost.cause == "waiting for rank 1"]["rank"].tolist() == [0, 2]


def test_the_slowest_rank_is_named(run):
    advice = run().advice
    assert advice.rule.tolist() == ["slowest rank"]
    assert "rank 1" in advice.advice[1]
    assert "computes 0.075 ms a step, 0.05 on the others" in advice.evidence[1]
    assert advice.gain_ms.tolist() == pytest.approx([0.05 / 3])


def test_a_rank_that_waits_as_long_as_others_wait_for_it_is_not_slow(run):
    """Two of the ranks that both wait: without rank 1, rank 2 waits 10 us for rank 0, and rank 0 for nobody."""
    merged = run(ranks=(0, 2))
    assert us(merged.ranks, *FIGURES) == [(100, 55, 30, 0, 30, 15, 10), (100, 45, 30, 10, 40, 15, 0)]
    assert any("missing" in note for note in merged.notes)
    turns = Matched([spans(0, [(0, 10), (25, 30)]), spans(1, [(5, 10), (20, 30)])])
    assert [part.skew_ns for part in turns.exposed] == [5, 5]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_rank_whose_recording_lacks_one(run, numbered):
    merged = run(numbered=numbered, of_rank={1: {"skipped": True}})
    reduced = merged.collectives[merged.collectives.name == "all_reduce"]
    assert reduced.step.tolist() == [1, 1, 1]
    assert us(reduced, "ms", "wait_ms") == [(30, 20), (10, 0), (40, 30)]
    assert len(merged.notes) == 2  # of this, and of the clocks
    assert us(merged.ranks, "skew_ms") == [(10,), (0,), (15,)]  # of one step of two; the other's is transfer
    assert us(merged.ranks, "exposed_ms") == [(30,), (5,), (40,)]


def test_a_clock_is_known_along_a_chain_of_groups():
    merged = Matched(
        [
            spans(0, [(0, 100)], group=("a", (0, 1))),
            spans(1, [(0, 70), (80, 90)], group=("a", (0, 1)), other=("b", (1, 2))),
            spans(2, [(0, 5)], group=("b", (1, 2))),
            spans(3, []),
        ]
    )
    assert [clock.offset_ns for clock in merged.clocks] == [0, 30, 115, None]
    assert len(merged) == 2


def test_a_clock_whose_difference_is_within_the_scatter_is_left_as_it_is():
    ends = [[10, 30, 50, 70, 90], [12, 27, 53, 66, 95]]  # they differ by -2, 3, -3, 4 and -5
    merged = Matched([spans(r, [(end - 5, end) for end in of_rank]) for r, of_rank in enumerate(ends)])
    assert [(clock.offset_ns, clock.residual_ns) for clock in merged.clocks] == [(0, 0), (0, 3)]


def test_several_kernels_of_one_number_are_matched_in_order():
    first, second = (spans(r, [(0, 10 - r), (20, 30)], repeated=True) for r in (0, 1))
    merged = Matched([first, second])
    assert merged.index_MR.tolist() == [[0, 0], [1, 1]]
    assert merged.notes == []


# ----------------------------------------------------------------------------------------------------------- the split


def spans(rank, collectives, compute=(), group=("", ()), other=None, stop=200, repeated=False):
    """The collectives of a rank from (start, end), numbered in this order unless the number is repeated; where there is another
    group the last is its first."""
    times = np.array(collectives, np.int64).reshape(-1, 2)
    groups, numbers = [group] * len(times), [0 if repeated else number for number in range(len(times))]
    if other is not None:
        groups[-1], numbers[-1] = other, 0
    busy = np.array(compute, np.int64).reshape(-1, 2)
    nothing = np.zeros(len(times), np.int64)
    return Collectives(
        rank=rank,
        names=("all_reduce",) * len(times),
        groups=tuple(groups),
        step_C=nothing,
        sequence_C=np.array(numbers, np.int64),
        nbytes_C=nothing,
        activity_C=nothing - 1,
        start_C=times[:, 0],
        end_C=times[:, 1],
        compute=(busy[:, 0], busy[:, 1]),
        communication=(times[:, 0], times[:, 1]),
        windows=((0, stop),),
    )


LENGTH = 60
span = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(span, span, span), max_size=6), st.lists(st.lists(span, max_size=4), min_size=3, max_size=3))
def test_exposed_time_is_split_exactly(collectives, computes):
    """Beside a raster: a moment is compute, else transfer where any collective is past its wait, else skew, else idle."""
    ranks = [
        spans(r, [c[r] for c in collectives], compute, group=("g", (0, 1, 2)), stop=LENGTH)
        for r, compute in enumerate(computes)
    ]
    merged = Matched(ranks)
    assert len(merged) == len(collectives)
    for r, part in enumerate(merged.exposed):
        compute, transfer, waiting = (np.zeros(LENGTH, bool) for _ in range(3))
        for a, b in computes[r]:
            compute[a:b] = True
        for each in collectives:
            shortest = min(b - a for a, b in each)
            a, b = each[r]
            waiting[a : b - shortest] = True
            transfer[b - shortest : b] = True
        assert part.compute_ns == compute.sum()
        assert part.transfer_ns == (transfer & ~compute).sum()
        assert part.skew_ns == (waiting & ~transfer & ~compute).sum() == sum(w.ns for w in part.waited)
        assert part.wall_ns == part.compute_ns + part.exposed_ns + part.idle_ns
        assert r not in [w.rank for w in part.waited]


# -------------------------------------------------------------------------------------------------------- what is noted


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("gloo:barrier", "barrier"),
        ("gloo:send", "send"),
        ("all_to_allv", "all_to_all"),
        ("reduce", "reduce"),
        ("end coalesced", "end coalesced"),
    ],
)
def test_names(text, name):
    assert collective_name(text) == name


def noted(name="record_param_comms", **args):
    return message_of(Event(Kind.OP, name, 1, 2, 3), args)


def test_notes():
    text = {
        "Collective name": '"allreduce"',
        "In msg nelems": "30",
        "Out msg nelems": "30",
        "dtype": '"BFloat16"',
        "Seq": "7",
    }
    found = noted(
        **text, **{"Process Group Name": '"0"', "Process Group Ranks": "[0, 2]"}
    )  # as torch's memory has them
    assert (found.collective, found.nbytes, found.sequence, found.group, found.ranks) == (
        "all_reduce",
        60,
        7,
        "0",
        (0, 2),
    )
    long = noted(**text, **{"Process Group Ranks": "[0, 1, 2, ..., 63]"})  # torch shortens it
    assert long.ranks == ()
    assert noted(**text | {"dtype": "of a version to come"}).nbytes == -1
    assert noted(**text | {"dtype": "Float8_e4m3fn"}).nbytes == 30
    gloo = {"Input Dims": [[3, 4], []], "Input type": ["float", "c10::BFloat16"]}
    assert noted("gloo:all_reduce", **gloo).nbytes == 4 * 12 + 2
    assert noted("gloo:all_reduce", **gloo | {"Input type": ["float"]}).nbytes == -1
    assert noted("aten::mm", **gloo) is None
    assert noted() is None


def test_a_damaged_note_costs_only_the_note(tmp_path):
    for rank in (0, 1, 2):
        events = rank_events(rank)
        for event in events:
            event["args"] |= {"Seq": "damaged"} if "Seq" in event["args"] else {}
        write_rank(tmp_path, rank, events)
    merged = sk.RankProfiles.load(tmp_path)
    assert us(merged.ranks, "skew_ms") == [(20,), (0,), (30,)]
    assert merged.collectives.nbytes.isna().all()


# ------------------------------------------------------------------------------------------------------ files and showing


def test_saved_pickled_and_in_any_order(run, tmp_path):
    merged = run()
    again = sk.RankProfiles.load(merged.save(tmp_path / "saved"))
    copy = pickle.loads(pickle.dumps(merged))
    turned = sk.RankProfiles(reversed(merged.profiles))
    chrome = [p.to_perfetto(tmp_path / f"perfetto{i}.json.gz") for i, p in enumerate(merged.profiles)]
    for other in (again, copy, turned, sk.RankProfiles.load(chrome)):
        for name in ("ranks", "waits", "collectives", "lost", "advice"):
            assert getattr(other, name).equals(getattr(merged, name)), name
        assert repr(other) == repr(merged)


def test_traces_that_do_not_know_their_rank_are_taken_in_order_of_name(tmp_path):
    for rank, number in ((0, 2), (1, 10), (2, 11)):
        write_rank(tmp_path, number, rank_events(rank), knows_rank=False)
    merged = sk.RankProfiles.load(tmp_path)
    assert us(merged.ranks, *FIGURES[:4]) == [(100, 55, 10, 20), (100, 75, 10, 0), (100, 45, 10, 30)]


def test_a_picture_of_the_ranks(run):
    merged = run()
    svg = merged.timeline(1)
    for words in ("rank 0", "rank 1", "rank 2", "compute", "transfer", "waiting for rank 1", "idle"):
        assert f">{words}<" in svg, words
    assert "waiting for rank 0" not in svg
    html = merged._repr_html_()
    assert merged.timeline(1) in html
    assert "Who waits for whom" in html
    with refused(IndexError):
        merged.timeline(2)


def test_ranks_that_share_nothing():
    alone = sk.RankProfiles.gather(sk.Profile(gpu_recording()))  # trains alone: no group of processes was made
    assert alone is not None
    assert len(alone) == 1
    assert (alone.exposed_ms, alone.skew_ms, alone.summary["slowest_rank"]) == (0, 0, None)
    two = sk.RankProfiles([sk.Profile(gpu_recording()), sk.Profile(gpu_recording())])
    assert all(table.empty for table in (two.collectives, two.waits, two.advice))
    assert two.ranks.clock_us.isna().tolist() == [False, True]
    assert len(two.notes) == 1
    assert "rank 1" in two.timeline()


def test_what_cannot_be_merged(tmp_path):
    of_rank_3, unknown = sk.Profile(gpu_recording(rank=3)), sk.Profile(gpu_recording())
    for profiles in ([], [of_rank_3, of_rank_3], [of_rank_3, unknown]):
        with refused(ValueError):
            sk.RankProfiles(profiles)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="holds no profile"):
        sk.RankProfiles.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no trace"):
        sk.RankProfiles.load(tmp_path / "missing.json")


# -------------------------------------------------------------------------------------------------- two real processes


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, found_by("tests.profiler.ranks", 2, folder, 120)


FLOAT = 4
BYTES = {  # (name, bytes) of every collective of a step
    "sharded": {("all_gather", FLOAT * n) for n in LAYERS}
    | {("all_reduce", FLOAT * n) for n in LAYERS},  # gloo's scatter
    "replicated": {("all_reduce", FLOAT * sum(LAYERS))},
}


@pytest.mark.parametrize("case", CASES)
def test_collectives_of_two_processes(real, case):
    folder, found = real
    assert [f[case]["merged"] for f in found] == [True, False]
    merged = sk.RankProfiles.load(folder / case)
    assert merged.numbers == (0, 1)
    table = merged.collectives
    assert len(table) == 2 * table.collective.nunique() > 0
    assert (table.groupby("rank").size() == len(table) / 2).all()
    for _, step in table.groupby(["step", "rank"]):
        assert set(zip(step["name"], step.nbytes)) == BYTES[case]
    for profile in merged.profiles:
        own = profile.collectives
        assert set(zip(own.collective, own.bytes)) == BYTES[case]
        assert own.calls.sum() * STEPS * 2 == len(table)
    assert sorted(table.step.unique()) == list(range(STEPS))
    assert (table.wait_ms >= 0).all()
    assert (table.groupby("collective").wait_ms.min() == 0).all()
    assert repr(merged) == found[0][case]["text"]
    for profile, row, there in zip(merged.profiles, merged.ranks.to_dict("records"), found):
        assert row["wall_ms"] == pytest.approx(
            sum(row[f"{part}_ms"] for part in ("compute", "transfer", "skew", "idle"))
        )
        assert row["exposed_ms"] == pytest.approx(there[case]["exposed_ms"])
        lost = dict(zip(profile.lost.cause, profile.lost.ms_per_step))
        assert lost["communication"] == pytest.approx(row["transfer_ms"])
        assert sum(ms for cause, ms in lost.items() if cause.startswith("waiting")) == pytest.approx(row["skew_ms"])


def test_traces_of_torchs_own_profiler(real):
    folder, _ = real
    merged = sk.RankProfiles.load(folder / "traces")
    assert merged.numbers == (0, 1)
    table = merged.collectives
    assert set(zip(table["name"], table.nbytes)) == BYTES["replicated"]
    assert len(table) == 2 * STEPS
