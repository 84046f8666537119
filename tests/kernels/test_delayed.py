"""Delayed scaling of one operand: the definition against its parts, and what it leaves in the slots."""

import math

import pytest
import torch
from torch import Tensor

from surokit.formats import E4M3, E5M2, Format
from surokit.kernels.reference import quantize as tiles
from surokit.kernels.reference.delayed import NOTHING, quantize


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).bfloat16()


def slots(*in_force: float, opened: float = NOTHING) -> tuple[Tensor, Tensor]:
    """Every third slot of a bank."""
    bank = torch.full((2, 3 * len(in_force)), 7.0)
    bank[0, ::3], bank[1, ::3] = torch.tensor(in_force), opened
    return bank[0, ::3], bank[1, ::3]


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("given", [0.0, 0.5, 300.0])
def test_quantizes_by_the_amax_in_force_or_by_its_own(format: Format, pow2: bool, given: float) -> None:
    x = normal(9, 33)
    codes, scale_inv = quantize(x, format, *slots(given), record=True, pow2=pow2)
    used = torch.tensor([[given]]) if given else tiles.amax(x)
    expected = tiles.quantize(x, format, pow2=pow2, amax=used)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale_inv, expected[1])
    assert scale_inv.shape == (1, 1)


def test_the_first_amax_comes_into_force_and_later_ones_do_not() -> None:
    in_force, opened = slots(0.0, 0.0)
    for seen, merged in ((3.0, 3.0), (5.0, 5.0), (4.0, 5.0)):
        quantize(torch.tensor([[1.0, -seen]]), E4M3, in_force, opened, record=True)
        assert in_force.tolist() == [3.0, 3.0]
        assert opened.tolist() == [merged, merged]


def test_only_siblings_slots_are_written() -> None:
    bank = torch.zeros(2, 9)
    quantize(torch.ones(2, 2), E4M3, bank[0, 1::3], bank[1, 1::3], record=True)
    assert bank.tolist() == [[0.0, 1.0, 0.0] * 3] * 2


def test_a_sibling_with_an_amax_keeps_it() -> None:
    in_force, opened = slots(0.0, 9.0)
    _, scale_inv = quantize(torch.tensor([[448.0]]), E4M3, in_force, opened, record=True)
    assert scale_inv.item() == 1.0  # the first slot counts
    assert in_force.tolist() == [448.0, 9.0]
    in_force, opened = slots(9.0, 0.0)
    quantize(torch.tensor([[448.0]]), E4M3, in_force, opened, record=True)
    assert in_force.tolist() == [9.0, 0.0]
    assert opened.tolist() == [448.0, 448.0]


def test_without_recording_nothing_is_written() -> None:
    in_force, opened = slots(0.0)
    quantize(normal(4, 4), E4M3, in_force, opened, record=False)
    assert (in_force.item(), opened.item()) == (0.0, NOTHING)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("given", [0.0, 3.0])
def test_what_is_not_finite_decodes_to_nan_and_does_not_come_into_force(bad: float, given: float) -> None:
    x = normal(4, 4)
    x[1, 2] = bad
    in_force, opened = slots(given)
    assert quantize(x, E4M3, in_force, opened, record=True)[1].isnan()
    assert in_force.item() == given
    assert not opened.isfinite().any()


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.zeros(0, 5)], ids=["zeros", "nothing"])
@pytest.mark.parametrize("given", [0.0, 4.0])
def test_zeros_and_no_rows(x: Tensor, given: float) -> None:
    in_force, opened = slots(given)
    codes, scale_inv = quantize(x, E4M3, in_force, opened, record=True)
    assert not codes.float().any()
    assert scale_inv.item() == (torch.tensor(1.0) / (torch.tensor(448.0) / given) if given else 1.0)
    assert (in_force.item(), opened.item()) == (given, 0.0)
