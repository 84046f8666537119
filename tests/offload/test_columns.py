"""One weight's columns: shapes, choices, and that whoever changes sides takes all of its state along."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from surokit.offload import columns as under_test
from surokit.offload.columns import TRANSFER_BYTES, Columns, hot_columns, pieces
from surokit.offload.link import HostLink, ThrottledLink
from surokit.offload.swaps import Swaps
from surokit.offload.workers import Worker
from tests.refusals import refused

BETAS = (0.9, 0.95)


def made(p, ratio=0.3, sums=1, splits=True, link=None):
    columns = Columns(p, {}, splits, 0)
    columns.settle(columns.begin(ratio, sums, link or HostLink()))
    return columns


def weight(out, into, dtype=torch.float32, seed=0):
    return nn.Parameter(torch.randn(out, into, generator=torch.Generator().manual_seed(seed)).to(dtype))


@pytest.mark.parametrize(
    ("ratio", "columns", "hot"), [(0.1, 48, 4), (0.1, 5, 1), (0.0, 5, 0), (1.0, 5, 5), (0.3, 1, 1)]
)
def test_hot_columns(ratio, columns, hot):
    assert hot_columns(ratio, columns) == hot


@pytest.mark.parametrize("row_bytes", [4, 2**20, 3 * 2**24, 2**28])
def test_transfers_are_64_mib_at_most_and_cover_every_row(row_bytes):
    found = pieces(100, row_bytes)
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(100))
    assert all((part.stop - part.start) * row_bytes <= max(TRANSFER_BYTES, row_bytes) for part in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_begin_parts_the_columns_and_widens_them(dtype):
    p = weight(6, 10, dtype)
    columns = made(p, 0.3, sums=2)
    assert columns.hot.tolist() == [0, 1, 2]
    assert columns.cold.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert torch.equal(columns.w_hot, p.detach().t()[:3].float())
    assert torch.equal(columns.w, p.detach().t()[3:].float())
    assert columns.acc.shape == (2, 7, 6)
    assert columns.out.dtype == dtype
    assert not any(x.any() for x in (columns.m_hot, columns.v_hot, columns.m, columns.v, columns.t_hot, columns.t_cold))


def test_weights_of_more_dimensions_and_transposed_ones_are_seen_as_out_by_in():
    conv = nn.Parameter(torch.randn(4, 3, 2, 2))
    assert made(conv).weight.shape == (4, 12)
    assert made(conv).weight.data_ptr() == conv.data_ptr()
    assert made(nn.Parameter(torch.randn(4, 3, 5))).weight.shape == (4, 15), "a convolution along one dimension"
    experts = nn.Parameter(torch.randn(2, 6, 40))
    assert made(experts).weight.shape == (12, 40)
    assert made(experts).magnitudes(torch.full((12, 40), -2.0)).tolist() == [2.0, 2.0]
    turned = nn.Parameter(torch.randn(10, 6).t())
    assert torch.equal(made(turned).w, turned.detach().t()[3:])


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_a_parameter_that_is_hot_as_a_whole_is_one_column(shape):
    p = nn.Parameter(torch.randn(shape))
    columns = made(p, splits=False)
    assert columns.w_hot.shape == (1, p.numel())
    assert columns.t_hot.shape == (1,)
    assert not columns.divided
    assert columns.state.keys() == {"hot", "cold", "t_hot", "w_hot", "m_hot", "v_hot"}


def test_what_has_no_columns_is_refused_with_a_reason():
    cpu = torch.device("cpu")
    holes = nn.Parameter(torch.randn(4, 6, 2)[:, ::2])
    with refused(ValueError):
        Columns(holes, {}, True, 0).check(cpu)
    sparse = nn.Embedding(5, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with refused(ValueError):
        Columns(sparse.weight, {}, True, 0).check(cpu)
    with refused(ValueError):
        Columns(torch.empty(2, 2, dtype=torch.complex64), {}, True, 0).check(cpu)
    with refused(ValueError):
        Columns(torch.empty(2, 2, device="meta"), {}, True, 0).check(cpu)
    across = weight(4, 4)
    across.placements = (SimpleNamespace(is_shard=lambda: True, dim=1),)
    with refused(ValueError):
        Columns(across, {}, True, 0).check(cpu)
    Columns(across, {}, False, 0).check(cpu)


def test_the_largest_are_chosen_and_among_equals_the_lower():
    columns = made(weight(2, 6), 0.5)
    chosen, share = columns.choose(torch.tensor([1.0, 4, 2, 2, 2, 1]), None)
    assert sorted(chosen.tolist()) == [1, 2, 3]
    assert float(share) == pytest.approx(8 / 12)
    chosen, share = columns.choose(torch.full((6,), torch.nan), torch.ones(()))
    assert chosen.tolist() == columns.hot.tolist()
    assert share.isnan()


def test_energies_and_magnitudes_are_those_of_the_gradient(monkeypatch):
    monkeypatch.setattr(under_test, "_BLOCK", 40)  # several blocks of rows
    p = weight(9, 10)
    columns, g = made(p), torch.randn(9, 10)
    assert torch.allclose(columns.energies(g), g.square().sum(0))
    assert torch.allclose(columns.magnitudes(g), torch.stack([g[:, 3:].abs().mean(), g[:, :3].abs().mean()]))


def whole(columns):
    """[in, 3, out] and [in]: weight, moments and clock of each column, from whichever side has them."""
    out, into = columns.weight.shape
    states, clocks = torch.full((into, 3, out), torch.nan), torch.full((into,), -1, dtype=torch.int32)
    for index, names in (("hot", ("w_hot", "m_hot", "v_hot", "t_hot")), ("cold", ("w", "m", "v", "t_cold"))):
        at = columns.state[index].long()
        for i, name in enumerate(names[:3]):
            states[at, i] = columns.state[name]
        clocks[at] = columns.state[names[3]]
    return states, clocks


@pytest.mark.parametrize("swap_bytes", [1, 200, 2**20])
@pytest.mark.parametrize("late", [False, True])
def test_columns_change_sides_with_all_they_have(monkeypatch, swap_bytes, late):
    monkeypatch.setattr(under_test, "SWAP_BYTES", swap_bytes)
    generator = torch.Generator().manual_seed(0)
    link = ThrottledLink(1.0, late_fill=True) if late else HostLink()
    columns, worker = made(weight(6, 20), 0.3, link=link), Worker("adam")
    swaps = Swaps(link, worker)
    for name in ("m_hot", "v_hot", "m", "v"):
        columns.state[name].normal_(generator=generator)
    columns.t_hot.random_(0, 5, generator=generator)
    columns.t_cold.random_(0, 5, generator=generator)
    states, clocks = whole(columns)
    for _ in range(8):
        before = set(columns.hot.tolist())
        chosen = torch.randperm(20, generator=generator)[:6].int()
        changed, moved = columns.exchange(chosen, columns.t_hot.clone(), BETAS, link, swaps)
        link.fence()
        if changed:
            assert swaps.last is not None
            swaps.last.wait()
        assert changed == len(before - set(chosen.tolist()))
        assert moved == changed * 6 * 12
        assert set(columns.hot.tolist()) == set(chosen.tolist())
        assert sorted(columns.hot.tolist() + columns.cold.tolist()) == list(range(20))
        assert columns.hot.tolist() == columns.hot_order.tolist()
        assert columns.cold.tolist() == columns.cold_order.tolist()
        assert columns.t_cold.tolist() == sorted(columns.t_cold.tolist())  # equal clocks lie together
        now, ticked = whole(columns)
        assert torch.equal(now, states)
        assert torch.equal(ticked, clocks)
    assert columns.exchange(columns.hot.clone(), columns.t_hot.clone(), BETAS, link, swaps) == (0, 0)
    worker.close()
    link.close()


def test_columns_that_change_sides_give_signs_of_life(monkeypatch):
    beats: list[None] = []
    monkeypatch.setattr(under_test, "beat", lambda: beats.append(None))
    link, worker = HostLink(), Worker("adam")
    columns, swaps = made(weight(6, 20), 0.5, link=link), Swaps(link, worker)
    columns.t_cold += torch.tensor([0, 1]).repeat(5).int()
    columns.exchange(columns.cold.clone(), columns.t_hot.clone(), BETAS, link, swaps)
    assert swaps.last is not None
    swaps.last.wait()
    assert len(beats) == 6, "weight and two moments, which arrive and are grouped by their clocks"
    worker.close()


@pytest.mark.parametrize("slow", ["thread", "link"])
def test_columns_change_sides_in_bounded_memory_that_stays(monkeypatch, slow):
    """However late the thread or the link, and how many columns of how many weights move."""
    monkeypatch.setattr(under_test, "SWAP_BYTES", 3 * 6 * 4)  # a column
    link = ThrottledLink(1.0, latency_s=2e-3 if slow == "link" else 0.0, late_fill=True)
    worker = Worker("adam", delay=lambda: 2e-3 if slow == "thread" else 0.0)
    made_of, swaps = [made(weight(6, 20, seed=i), 0.5, link=link) for i in range(3)], Swaps(link, worker)
    states = [whole(columns) for columns in made_of]
    buffers = []

    def buffer(shape, dtype):
        buffers.append(torch.empty(shape, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(link, "buffer", buffer)
    for _ in range(2):
        for columns in made_of:
            there = columns.cold.clone()
            assert columns.exchange(there, columns.t_hot.clone(), BETAS, link, swaps) == (10, 10 * 72)
    assert [buffer.nbytes for buffer in buffers] == [256] * 4  # two columns' 144 bytes, rounded up
    assert len(swaps.buffers()) == 4
    assert swaps.last is not None
    swaps.last.wait()
    link.fence()
    for columns, (held, clocks) in zip(made_of, states):
        now, ticked = whole(columns)
        assert torch.equal(now, held)
        assert torch.equal(ticked, clocks)
    worker.close()
    link.close()


def test_a_sum_takes_what_counts_and_an_update_empties_it():
    columns, link = made(weight(4, 10), 0.3), HostLink()
    g = torch.randn(4, 10)
    slot = link.buffer((7, 4), torch.float32)
    for scale, lr, counts in ((2.0, 0.1, True), (None, 0.2, False), (None, 0.3, True)):
        columns.accumulate(0, slot, columns.send(g, slot, link), scale, lr, counts)
    assert torch.equal(columns.acc[0], 1.5 * g.t()[3:])
    assert columns.counts.tolist() == [2]
    assert columns.rates.tolist() == pytest.approx([0.4])
    options = {"lr": 0.1, "betas": BETAS, "weight_decay": 0.0, "eps": 0.0}
    before = columns.w.clone()
    assert columns.update_cold(0, options, corrected=False)
    assert torch.allclose(columns.w, before - 0.1 * g.t()[3:].sign())
    assert torch.equal(columns.out, columns.w)
    assert columns.t_cold.tolist() == [1] * 7
    assert not columns.update_cold(0, options, corrected=False)  # nothing has been summed since
    assert columns.t_cold.tolist() == [1] * 7


def test_weights_that_another_optimizer_left_are_taken_over():
    columns = made(weight(4, 10), 0.3)
    columns.w.add_(1)
    columns.counts.fill_(2)
    columns.take_over(HostLink())
    assert torch.equal(columns.weight[:, 3:], columns.w.t())
    assert columns.counts.tolist() == [0]


def test_a_state_of_another_shape_is_refused():
    with refused(ValueError):
        made(weight(4, 10)).check_fits(made(weight(4, 10), 0.3).state, 0.5)
