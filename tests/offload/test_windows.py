"""When windows end."""

from surokit.offload.windows import Auto, Fixed


def test_fixed_windows_end_after_their_interval():
    assert [Fixed(3).ends(length, weights=2) for length in (1, 2, 3, 4)] == [False, False, True, True]


def test_auto_ends_when_cold_gradients_have_added_up_to_the_mean_hot_one():
    window = Auto(share=1.0, longest=16)
    assert not window.ends(1, weights=1)  # nothing is known
    for cold, hot, over in ((1.0, 3.0, False), (1.0, 5.0, False), (1.0, 1.0, True)):  # sums 1, 2, 3; means 3, 4, 3
        window.note({0: (cold, hot)})
        assert window.ends(2, weights=1) is over


def test_auto_asks_for_a_share_of_the_weights():
    ready, waiting = {0: (2.0, 1.0), 1: (2.0, 1.0), 2: (0.5, 1.0)}, {0: (2.0, 1.0)}
    for share, statistics, over in (
        (0.66, ready, True),
        (0.67, ready, False),
        (0.3, waiting, True),
        (0.5, waiting, False),
    ):
        window = Auto(share, longest=16)
        window.note(statistics)
        assert window.ends(1, weights=3) is over, (share, statistics)


def test_auto_ends_at_the_longest_whatever_is_known():
    assert Auto(1.0, longest=4).ends(4, weights=3)
    assert Auto(1.0, longest=4).ends(4, weights=0)
    assert not Auto(0.0, longest=4).ends(3, weights=0)


def test_auto_forgets_at_a_window_s_beginning_and_goes_on_from_its_state():
    window = Auto(1.0, longest=16)
    window.note({0: (1.0, 3.0)})
    again = Auto(1.0, longest=16)
    again.load_state_dict(window.state_dict())
    for each in (window, again):
        each.note({0: (2.0, 3.0)})
        assert each.ends(2, weights=1)
    again.begin()
    again.note({0: (2.0, 3.0)})
    assert window.ends(3, weights=1)
    assert not again.ends(1, weights=1)
