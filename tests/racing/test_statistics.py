"""Statistics of turns, against known values and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from surokit.racing.statistics import drift, reached_by_all, smoothed, smoothing, steps_to
from surokit.statistics import (
    ROUNDS,
    Interval,
    Noise,
    bootstrap_interval,
    count_for_gate,
    geometric_mean,
    harmonic_interval,
    paired_gap,
    power_of_gate,
    residual_noise,
    spread,
    student_t,
    wilson_interval,
)
from tests.refusals import refused


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [
        *((0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 5, 2.57058), (0.95, 9, 1.83311)),
        *((0.975, 30, 2.04227), (0.025, 7, -2.36462), (0.5, 3, 0.0), (0.999, 120, 3.15954)),
    ],
)
def test_students_t_is_that_of_the_tables(share, degrees, value):
    assert student_t(share, degrees) == pytest.approx(value, abs=2e-5)


def test_spread_and_geometric_mean():
    assert spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))
    with refused(ValueError):
        spread([])


@pytest.mark.parametrize(("rounds", "skewed"), [(5, False), (8, False), (8, True), (20, False), (40, True)])
def test_the_interval_holds_the_truth_as_often_as_it_says(rounds, skewed):
    random = np.random.default_rng(rounds)
    held = 0
    for seed in range(600):
        noise = random.gamma(4, 0.01, rounds) - 0.04 if skewed else random.normal(0, 0.02, rounds)
        held += bootstrap_interval(np.exp(math.log(1.3) + noise).tolist(), seed=seed, resamples=500).holds(1.3)
    assert 0.92 <= held / 600 <= 0.985


def test_the_plain_percentile_interval_would_be_too_narrow():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        logs = random.normal(0, 0.02, 5)
        low, high = np.quantile(random.choice(logs, (500, 5)).mean(axis=1), (0.025, 0.975))
        held += bool(low <= 0 <= high)
    assert held / 1000 < 0.9


def test_an_interval_is_seeded_ordered_and_scales():
    values = [1.1, 1.2, 1.15, 1.12, 1.18, 1.3]
    first = bootstrap_interval(values)
    assert first == bootstrap_interval(values)
    assert first.low < first.mid < first.high
    assert first.mid == pytest.approx(geometric_mean(values))
    assert first.times(2).high == 2 * first.high
    assert str(first) == f"{first.mid:.3f} ({first.low:.3f} to {first.high:.3f})"
    wider = bootstrap_interval(values, level=0.99)
    assert wider.low < first.low
    assert first.high < wider.high
    inverse = bootstrap_interval([1 / v for v in values])
    assert inverse.mid == pytest.approx(1 / first.mid)


def test_equal_turns_have_an_interval_of_no_width():
    assert bootstrap_interval([1.0] * 6) == Interval(1.0, 1.0, 1.0)


def test_too_few_turns_have_no_interval():
    found = bootstrap_interval([1.0, 1.1, 1.2][: ROUNDS - 1])
    assert not found.known
    assert not found.holds(1.0)
    assert found.mid > 1
    assert str(found) == f"{found.mid:.3f} (too few rounds to trust)"
    assert math.isnan(bootstrap_interval([]).mid)


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0], [math.nan], [math.inf]])
def test_what_is_no_ratio_is_refused(values):
    with refused(ValueError):
        bootstrap_interval(values)


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_a_level_is_a_share(level):
    with refused(ValueError):
        bootstrap_interval([1.0], level=level)


@pytest.mark.parametrize(("first", "second"), [(4, 4), (6, 30)])
def test_the_interval_of_a_run_in_parts_holds_the_truth_as_often_as_it_says(first, second):
    """Half of the steps at 0.5 of the baseline's speed, half at 2: four fifths of the time is the first part's."""
    random = np.random.default_rng(first)
    held = 0
    for _ in range(1000):
        parts = [np.exp(random.normal(math.log(0.5), 0.02, first)), np.exp(random.normal(math.log(2.0), 0.05, second))]
        held += harmonic_interval([part.tolist() for part in parts], (100, 100)).holds(0.8)
    assert 0.93 <= held / 1000 <= 0.985


def test_a_run_in_parts_has_no_interval_from_too_few():
    assert harmonic_interval([[0.5], [2.0]], (1, 3)).mid == pytest.approx(1 / (0.25 / 0.5 + 0.75 / 2))
    assert not harmonic_interval([[0.5, 0.5], [2.0, 2.0]], (1, 1)).known
    assert not harmonic_interval([[0.5] * 9, [2.0]], (1, 1)).known
    assert harmonic_interval([[0.5, 0.5, 0.5], [2.0, 2.0]], (1, 1)) == pytest.approx((0.8, 0.8, 0.8))


def test_drift():
    assert drift([1.0, 1.0, 5.0, 1.1, 1.1, 1.1][:6]) == pytest.approx(0.1)
    assert math.isnan(drift([1.0, 2.0]))


def test_smoothed_losses_leave_out_what_is_not_finite():
    nan = math.nan
    assert smoothed([4.0, 2.0, 3.0], 2).tolist() == [4.0, 3.0, 2.5]
    assert smoothed([4.0, nan, 2.0, math.inf], 2).tolist() == [4.0, 4.0, 2.0, 2.0]
    assert np.isnan(smoothed([nan, 1.0], 1)).tolist() == [True, False]
    assert smoothed([], 3).tolist() == []
    assert [smoothing(n) for n in (1, 100, 10_000)] == [4, 10, 50]


def test_steps_to_a_loss():
    losses = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert steps_to(losses, 2.5, 2) == 4
    assert steps_to(losses, 4.5, 2) == 2
    assert steps_to(losses, 5.0, 2) == 2, "not before there are as many as are averaged"
    assert steps_to(losses, 0.5, 2) is None
    assert steps_to(losses[:1], 9.0, 2) is None


def test_the_loss_that_all_have_reached():
    low, high = [5.0, 3.0, 2.0, 3.0], [5.0, 4.0, 3.0, 3.0]
    assert reached_by_all([low, high], 1) == 3.0
    assert reached_by_all([low], 2) == 2.5
    assert math.isnan(reached_by_all([low, []], 1))
    assert math.isnan(reached_by_all([], 1))


def test_wilsons_interval_is_that_of_the_formula():
    """Both ends are the shares p at which (right / total - p)^2 = z^2 p (1 - p) / total."""
    interval = wilson_interval(8, 10)
    for p in (interval.low, interval.high):
        assert (0.8 - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / 10)
    assert interval.mid == 0.8
    none, all_of_them = wilson_interval(0, 50), wilson_interval(50, 50)
    assert (none.low, all_of_them.high) == (0, 1)
    assert none.high == pytest.approx(1 - all_of_them.low)
    assert wilson_interval(8, 10, level=0.5).low > interval.low


def test_counts_that_are_no_share_are_refused():
    for right, total, level in ((3, 2, 0.95), (-1, 2, 0.95), (0, 0, 0.95), (1, 2, 1.0)):
        with refused(ValueError):
            wilson_interval(right, total, level)


class TestPairedGaps:
    def test_an_interval_and_a_p_value_are_those_of_student(self):
        values = np.random.default_rng(1).normal(0.1, 0.2, 8).tolist()
        gap = paired_gap(values)
        expected = stats.ttest_1samp(values, 0.0)
        assert gap.p == pytest.approx(expected.pvalue, rel=1e-9)
        low, high = expected.confidence_interval()
        assert [gap.low, gap.high] == pytest.approx([low, high])
        assert gap.pairs == 8

    def test_a_p_value_is_no_less_than_zero(self):
        assert paired_gap([20.0], noises=[Noise(1.0, 62)]).p == 0.0

    @pytest.mark.parametrize("spreads", [(1, 1, 1), (3, 2, 1), (1, 2, 3)])
    def test_of_groups_with_means_and_spreads_of_their_own_the_interval_holds_the_mean_of_means(self, spreads):
        draws, held = np.random.default_rng(2), 0
        for _ in range(1000):
            groups = [
                (mean + spread * draws.standard_normal(n)).tolist()
                for mean, spread, n in zip((0.0, 1.0, 5.0), spreads, (6, 3, 3), strict=True)
            ]
            gap = paired_gap(*groups)
            held += gap.low <= 2.0 <= gap.high
        assert 0.94 <= held / 1000 <= 0.985
        assert gap.pairs == 12

    def test_of_two_groups_it_is_welchs_interval(self):
        draws = np.random.default_rng(3)
        one, other = draws.normal(0, 1, 9).tolist(), draws.normal(0.3, 1, 9).tolist()
        gap = paired_gap(one, [-value for value in other])
        theirs = stats.ttest_ind(one, other, equal_var=False)
        assert gap.mean == pytest.approx((np.mean(one) - np.mean(other)) / 2)
        low, high = theirs.confidence_interval()
        assert [gap.low, gap.high] == pytest.approx([low / 2, high / 2], rel=0.02)  # whole degrees of freedom
        assert gap.p == pytest.approx(theirs.pvalue, rel=0.05)

    def test_known_noise_takes_the_place_of_the_spread_between_pairs(self):
        values = np.random.default_rng(4).normal(0.1, 0.2, 6).tolist()
        own = Noise(float(np.var(values, ddof=1)), 5)
        assert paired_gap(values, noises=[own]) == paired_gap(values)
        gap = paired_gap([0.5], noises=[Noise(0.04, 10)])
        assert gap.high - gap.mean == pytest.approx(student_t(0.975, 10) * 0.2)
        assert math.isnan(paired_gap([0.5, 0.6], noises=[Noise(math.nan, 0)]).low)

    def test_what_blocks_and_treatments_do_not_explain_is_noise(self):
        draws = np.random.default_rng(5)
        found = []
        for _ in range(300):
            cells = [(b, t, 3 * b - 7 * t + 0.5 * draws.standard_normal()) for b in range(4) for t in (0, 0, 1, 2)]
            found.append(residual_noise(cells[:-1]))  # one is missing
        assert {noise.degrees for noise in found} == {15 - (1 + 3 + 2)}
        assert np.mean([noise.variance for noise in found]) == pytest.approx(0.25, rel=0.05)
        alone = residual_noise([("seed", "one", 1.0), ("seed", "other", 2.0)])
        assert (alone.degrees, math.isnan(alone.variance)) == (0, True)
        assert residual_noise([]).degrees == 0

    def test_one_pair_has_no_interval_and_none_is_refused(self):
        gap = paired_gap([0.5])
        assert gap.mean == 0.5
        assert math.isnan(gap.low)
        assert math.isnan(gap.p)
        assert paired_gap([0.25, 0.25]).p == 0.0
        assert paired_gap([0.0, 0.0]).p == 1.0
        with refused(ValueError):
            paired_gap([0.5], [])

    @pytest.mark.parametrize(
        ("values", "verdict"),
        [([0.1, 0.11, 0.09], "inside"), ([0.9, 0.91, 0.89], "outside"), ([0.1, 0.4, -0.2], "undecided")],
    )
    def test_a_gate_is_decided_by_the_whole_interval(self, values, verdict):
        assert paired_gap(values).within(0.25) == verdict

    def test_the_power_of_a_gate_grows_with_pairs_and_falls_with_spread(self):
        powers = [power_of_gate(0.25, 0.08, 0.18, n) for n in (1, 4, 8, 16)]
        assert powers == sorted(powers)
        assert powers[0] == 0.0
        assert power_of_gate(0.25, 0.08, 0.09, 8) > powers[2]
        n = count_for_gate(0.25, 0.08, 0.18)
        assert n is not None
        assert power_of_gate(0.25, 0.08, 0.18, n) >= 0.8 > power_of_gate(0.25, 0.08, 0.18, n - 1)
        assert count_for_gate(0.25, 0.3, 0.1) is None
