"""Trials make the change they say, measure it beside the prediction, and leave nothing behind."""

import copy
import gc
import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import surokit as sk
from surokit.environment import cores
from surokit.profiler.report import verify as trials
from surokit.profiler.report.verify import Verdict, verify
from tests.clocks import Clock
from tests.profiler.models import line_of
from tests.refusals import refused


def row(rule, gain_ms=1.0, file="", line=0):
    return {"rule": rule, "gain_ms": gain_ms, "file": file, "line": line, "advice": "", "evidence": ""}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the steps move, by milliseconds."""
    now = [0]
    monkeypatch.setattr(trials, "now_ns", lambda: now[0])

    def passes(ms):
        now[0] += round(ms * 1e6)

    return passes


def stepper(optimizer, model):
    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def small_layers(n=60):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))


# ----------------------------------------------------------------------------------------------------------- measuring


def test_a_change_of_known_size_is_measured(clock):
    drift = itertools.count()  # every call is slower than the one before
    found = verify(
        row("host gap", 7.0),
        lambda: clock(6 + next(drift) / 100),
        lambda: clock(1 + next(drift) / 100),
        rounds=9,
        steps=2,
    )
    assert found.gain_ms == pytest.approx(5, abs=0.05)
    assert found.gain_ms == pytest.approx(found.before_ms - found.after_ms)
    assert found.interval[0] <= found.gain_ms <= found.interval[1]
    assert found.noise_ms < 0.4
    assert found.helps
    assert found.verdict.startswith("predicted up to 7 ms a step, measured ")
    assert (found.rounds, found.steps, found.predicted_ms, found.rule) == (9, 2, 7.0, "host gap")


def test_a_step_is_measured_by_the_clock_of_the_module_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trials, "time", clock)
    found = verify(row("launches"), lambda: clock.sleep(0.02), lambda: clock.sleep(0.005), rounds=3)
    assert (found.before_ms, found.after_ms) == pytest.approx((20, 5))


def test_no_change_is_no_gain_and_a_worse_step_costs(clock):
    jitter = itertools.cycle([0.0, 0.3, 0.1, 0.05, 0.2])
    same = verify(row("launches"), lambda: clock(1 + next(jitter)), lambda: clock(1 + next(jitter)), rounds=11)
    assert not same.helps
    assert same.verdict.endswith("no gain beyond the noise")
    worse = verify(row("launches"), lambda: clock(1 + next(jitter)), lambda: clock(4), rounds=11)
    assert worse.gain_ms == pytest.approx(-2.9, abs=0.2)
    assert worse.verdict.endswith("it costs time here")


@pytest.mark.parametrize(
    ("gain", "interval", "noise", "ends"),
    [
        (3.8, (3.5, 4.0), 0.2, "measured 3.8 (3.5 to 4)"),
        (0.1, (0.05, 0.3), 0.2, "no gain beyond the noise"),
        (0.1, (-0.1, 0.3), 0.05, "no gain beyond the noise"),
        (-2.0, (-2.5, -1.5), 0.2, "it costs time here"),
    ],
)
def test_the_verdict_is_a_sentence(gain, interval, noise, ends):
    found = Verdict("sync", 4.1, 10.0, 10.0 - gain, gain, interval, noise, 20, 1)
    assert found.verdict.startswith("predicted up to 4.1 ms a step, measured ")
    assert found.verdict.endswith(ends)
    assert found.helps == (gain == 3.8)
    assert found.verdict in repr(found)
    assert "20 rounds of 1 step in turns" in repr(found)
    page = found._repr_html_()
    assert "<table>" in page
    assert ends in page
    assert "<script" not in page


def test_the_order_of_the_arms_rotates():
    calls = []
    verify(row("launches"), lambda: calls.append("a"), lambda: calls.append("b"), rounds=3)
    assert "".join(calls) == "ab" + "aba" + "aab" + "baa"


def test_the_interval_holds_the_difference_and_narrows():
    before, after = np.array([[4.0, 5.0], [9.0, 4.0], [4.5, 3.5], [4.0, 5.0]]), np.array([[1.0], [3.0], [2.0], [2.0]])
    value, low, high = trials.difference_of(before, after)
    assert low < value == 2.25 < high
    _, narrow_low, narrow_high = trials.difference_of(np.tile(before, (50, 1)), np.tile(after, (50, 1)))
    assert low < narrow_low <= value <= narrow_high < high
    assert trials.difference_of(np.full((3, 2), 4.0), np.full((3, 1), 3.0)) == (1, 1, 1)


@pytest.mark.parametrize("wrong", [{"rounds": 1}, {"steps": 0}])
def test_too_few_rounds_or_steps(wrong):
    with refused(ValueError):
        verify(row("launches"), lambda: None, lambda: None, **wrong)


def test_what_cannot_be_tried_from_outside_says_so():
    calls: list[int] = []
    with refused(ValueError):
        verify(row("launches"), lambda: calls.append(1))
    assert not calls


@pytest.mark.parametrize(
    "rule",
    [
        "optimizer",
        "data",
        "sync",
        "zero_grad",
        "synchronize",
    ],
)
def test_a_trial_that_the_step_does_not_meet_says_so(rule):
    with refused(ValueError):
        verify(row(rule, file="train.py", line=3), lambda: None)


# ----------------------------------------------------------------------------------------------------------- trials


def test_an_optimizer_loop_is_tried_fused_and_put_back():
    model = small_layers(40)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    groups, seen = copy.deepcopy(optimizer.param_groups), set()
    step = stepper(optimizer, model)

    def watching():
        seen.add(optimizer.param_groups[0]["fused"])
        step()

    attributes = set(vars(optimizer))
    found = verify(row("optimizer", 5.0), watching, rounds=6)
    assert seen == {None, True}
    assert found.after_ms < 0.9 * found.before_ms
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in groups
    ]
    assert set(vars(optimizer)) == attributes
    # two of the rounds' calls, the warm-ups and the search for the optimizer: each call was one real step
    assert {int(state["step"]) for state in optimizer.state.values()} == {3 + 6 * 3}


def test_a_fault_is_found_and_its_advice_tried():
    """From the profile to the verdict, as a user goes: the loop over the parameters is found, and the gain is of the size that
    was predicted."""
    model = small_layers(40)
    step = stepper(torch.optim.AdamW(model.parameters(), foreach=False), model)
    with sk.profile(4, 2) as p:
        for _ in range(6):
            step()
    advice: Any = p.advice[p.advice.rule == "optimizer"].iloc[0]
    found = verify(advice, step, rounds=8)
    assert found.predicted_ms == advice["gain_ms"]
    assert found.after_ms < found.before_ms
    assert 0 < found.gain_ms < 3 * found.predicted_ms


def test_fused_steps_are_the_same_steps():
    """A trial must not train another model than the user's."""
    models = [small_layers(3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    plain, tried = (stepper(o, m) for o, m in zip(optimizers, models))
    for _ in range(4):
        plain()
    context = trials.fused_optimizer(row("optimizer"), tried).context  # one step
    for within in (context, nullcontext, context):
        with within():
            tried()
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(a, b)


def test_an_optimizer_whose_step_calls_torchs_is_tried_once():
    """torch runs the hooks of both steps."""

    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = small_layers(4)
    optimizer, seen = Mine(model.parameters(), foreach=False), []
    step = stepper(optimizer, model)

    def noting():
        seen.append(optimizer.param_groups[0]["fused"])
        step()

    verify(row("optimizer"), noting, rounds=2)
    assert seen.count(True) == 3
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, False)


def test_several_optimizers_and_those_without_a_fused_form():
    model = small_layers(8)
    first, second = model[:4].parameters(), model[4:].parameters()
    adam, other = torch.optim.Adam(first), torch.optim.Adamax(second)

    def step():
        model(torch.ones(1, 4)).sum().backward()
        adam.step()
        other.step()

    assert verify(row("optimizer"), step, rounds=2).rounds == 2
    assert (adam.param_groups[0]["fused"], adam.param_groups[0]["foreach"]) == (None, None)
    assert "fused" not in other.param_groups[0]


def test_garbage_collection_is_off_in_the_trial_only():
    seen, collect = set(), gc.collect
    gc.freeze()  # the tests' own objects are many
    kept = [[i] for i in range(100_000)]

    def step():
        seen.add((gc.isenabled(), gc.collect is collect))
        gc.collect()

    try:
        found = verify(row("garbage", 20.0), step, rounds=4)
    finally:
        gc.unfreeze()
    assert seen == {(True, True), (False, False)}
    assert found.after_ms < 0.3 * found.before_ms
    assert gc.isenabled()
    assert gc.collect is collect
    del kept


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        verify(row("garbage"), lambda: None, rounds=2)
        assert not gc.isenabled()
    finally:
        gc.enable()


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length, reading=lambda: None):
        self.length, self.reading, self.read = length, reading, 0

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read += 1
        self.reading()
        return torch.tensor(i)


def test_data_loading_is_tried_with_a_batch_that_is_there(clock):
    data = Numbers(64, lambda: clock(2))
    batches = iter(DataLoader(data, 1))
    plain = _BaseDataLoaderIter.__next__
    found = verify(row("data", 2.0), lambda: next(batches), rounds=5)
    assert (found.before_ms, found.after_ms, found.noise_ms) == (2, 0, 0)
    assert data.read == 1 + 1 + 2 * 5  # first call, the trial's batch, two of three calls in each round
    assert _BaseDataLoaderIter.__next__ is plain
    assert int(next(batches)) == data.read - 1


def test_epochs_keep_their_length_in_a_trial():
    loader, lengths = DataLoader(Numbers(6), 2), []
    verify(row("data"), lambda: lengths.append(sum(1 for _ in loader)), rounds=3, steps=2)
    assert set(lengths) == {3}


def test_an_iterator_that_runs_out_in_a_trial_ends():
    batches = iter(DataLoader(Numbers(9), 1))
    counts = []
    verify(row("data"), lambda: counts.append(sum(1 for _ in batches)), rounds=2)
    assert counts[0] == 9
    assert set(counts[1:]) == {0}
    standing = iter(DataLoader(Numbers(9), 1))
    next(standing)
    with trials.last_batch(row("data"), lambda: None).context():
        assert sum(1 for _ in standing) == 8 + 7  # eight answers, one of them read, then what is really left
    assert list(standing) == []


def test_a_stream_without_length_cannot_be_tried():
    class Stream(IterableDataset[int]):
        def __iter__(self):
            return iter(itertools.count())

    batches = iter(DataLoader(Stream(), 1))
    with refused(ValueError):
        verify(row("data"), lambda: next(batches), rounds=2)


def test_reads_at_the_line_answer_with_the_value_before():
    counter, elsewhere, values = itertools.count(), torch.tensor(5), []

    def step():
        x = torch.tensor(next(counter))
        values.append(x.item())  # read
        assert elsewhere.item() == 5
        assert x.float().item() == float(x)  # other

    line = line_of("read", __name__)
    context = trials.old_values(row("sync", file=__file__, line=line), step).context
    step()
    for _ in range(2):
        with context():
            step()
            step()
    step()
    assert values == [0, 1, 1, 1, 1, 5]
    verify(row("library sync", file=__file__, line=line), step, rounds=2)


def test_a_read_at_one_line_keeps_its_dtypes_apart():
    values = []

    def step():
        values.append([x.item() for x in (torch.tensor(1), torch.tensor(0.5), torch.tensor(True))])  # dtypes

    with trials.old_values(row("sync", file=__file__, line=line_of("dtypes", __name__)), step).context():
        step()
        step()
    assert values == [[1, 0.5, True]] * 2
    assert [type(v) for v in values[1]] == [int, float, bool]


def test_gradients_are_dropped_whatever_is_asked():
    model = nn.Linear(2, 2)
    optimizer, grads = torch.optim.SGD(model.parameters()), []
    plain = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        grads.append(model.weight.grad is None)

    verify(row("zero_grad"), step, rounds=2)
    assert grads == [False, True, False, True, False, False, False, True]
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == plain


SWITCHES: dict[str, Any] = {  # rule -> how to read it, how to set it, what the user had, what the trial sets
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True, False),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True, False),
    "float32": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high"),
    "cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, trials.set_cudnn_benchmark, False, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, cores() + 1, cores()),
}


@pytest.mark.parametrize("rule", SWITCHES)
@pytest.mark.parametrize("raising", [None, ValueError, KeyboardInterrupt])
def test_switches_are_set_for_the_trial_and_put_back(rule, raising):
    read, write, mine, tried = SWITCHES[rule]
    before, seen = read(), []

    def step():
        seen.append(read())
        if raising and len(seen) == 5:
            raise raising("mine")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode warns that it is on
        write(mine)
        try:
            if raising is None:
                verify(row(rule), step, rounds=2)
                assert seen == [mine, tried, mine, tried, mine, mine, mine, tried]
            else:
                with refused(raising):
                    verify(row(rule), step, rounds=9)
                assert seen[1] == tried
            assert read() == mine
        finally:
            write(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("rule", ["optimizer", "garbage", "data", "sync", "zero_grad"])
def test_a_step_that_raises_in_a_trial_leaves_nothing_behind(rule, error):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Numbers(4), 1)
    plain = gc.collect, _BaseDataLoaderIter.__next__, torch.optim.Optimizer.zero_grad
    calls = itertools.count(1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        float(next(iter(loader)).item())  # the read
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if next(calls) == 4 + (rule == "optimizer"):
            raise error("mine")

    with refused(error):
        verify(row(rule, file=__file__, line=line_of("the read", __name__)), step, rounds=3)
    assert (gc.collect, _BaseDataLoaderIter.__next__, torch.optim.Optimizer.zero_grad) == plain
    assert gc.isenabled()
    assert optimizer.param_groups[0]["fused"] is None
    assert torch.tensor(3).item() == 3


def test_cuda_synchronize_is_skipped_in_the_trial(monkeypatch, clock):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(clock(2)))
    plain = torch.cuda.synchronize
    found = verify(row("synchronize", 2.0), lambda: torch.cuda.synchronize(), rounds=4)
    assert (found.before_ms, found.after_ms, found.interval) == (2, 0, (2, 2))
    assert len(calls) == 1 + 2 * 4
    assert torch.cuda.synchronize is plain
