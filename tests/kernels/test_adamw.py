"""AdamW's definition against scalar arithmetic in Python's floats. (Session's optimizer against it: tests/train.)"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surokit.kernels.reference import adamw
from surokit.kernels.reference.adamw import adamw_, stochastic_bf16

LR, BETA1, BETA2, DECAY, EPS = 0.03, 0.9, 0.95, 0.1, 1e-8


def by_hand(p: float, grads: list[float], scale: float) -> tuple[float, float, float]:
    m = v = 0.0
    for t, grad in enumerate(grads, 1):
        g = grad / scale
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p -= LR * DECAY * p
        p -= LR * (m / (1 - BETA1**t)) / (math.sqrt(v / (1 - BETA2**t)) + EPS)
    return p, m, v


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("grads", [[0.0] * 4, [1.0, -2.0, 0.5], [1e-12, 3e-9], [1e15, 1.0, -1e15], [0.3] * 40])
def test_equals_scalar_arithmetic(grads: list[float], scale: float) -> None:
    p, m, v, t = torch.tensor([[0.7]]), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(())
    for grad in grads:
        adamw_(
            [p],
            [torch.tensor([[grad]])],
            [m],
            [v],
            [t],
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=DECAY,
            eps=EPS,
            grad_scale=torch.tensor(scale),
        )
    expected = by_hand(0.7, grads, scale)
    assert (p.item(), m.item(), v.item()) == pytest.approx(expected, rel=2e-5, abs=1e-30)
    assert t.item() == len(grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_stay_and_a_mask_keeps_every_bit(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    p = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    m, v, t = torch.full((3, 5), 0.5, dtype=state_dtype), torch.full((3, 5), 0.25, dtype=state_dtype), torch.tensor(4.0)
    options = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPS}
    before = [x.clone() for x in (p, m, v, t)]
    bad = torch.full((3, 5), math.nan, dtype=dtype)
    adamw_([p], [bad], [m], [v], [t], found_inf=torch.tensor(1.0), **options)
    assert all(torch.equal(x, old) for x, old in zip((p, m, v, t), before))
    adamw_([p], [torch.ones(3, 5, dtype=dtype)], [m], [v], [t], found_inf=torch.tensor(0.0), **options)
    assert (p.dtype, m.dtype, v.dtype, t.item()) == (dtype, state_dtype, state_dtype, 5.0)
    assert not torch.equal(p, before[0])


def key(first: int, second: int = 77) -> Tensor:
    return torch.tensor([first, second], dtype=torch.int32)


class TestStochasticRounding:
    @pytest.mark.parametrize("value", [1.0 + 1e-3, -1.0 - 3e-3, 1e-30, -3.3e37, 1.5e-40, 0.3])
    def test_is_right_on_average(self, value: float) -> None:
        n = 1 << 16
        x = torch.full((n,), value)
        rounded = stochastic_bf16(x, key(1))
        low = (x[:1].view(torch.int32) & -0x10000).view(torch.float32).double()
        high = ((x[:1].view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
        assert bool(((rounded.double() == low) | (rounded.double() == high)).all())
        share = float((x[0].double() - low) / (high - low))
        ups = float((rounded.double() == high).double().mean())
        assert abs(ups - share) <= 4.5 * math.sqrt(share * (1 - share) / n) + 1e-9
        assert 0 < share < 1

    def test_every_pattern_of_the_bits_that_go(self) -> None:
        """Over many keys, each of the 65,536 fractions goes up as often as it should."""
        fractions = torch.arange(1 << 16, dtype=torch.int32)
        x = (fractions + 0x3F800000).view(torch.float32)
        ups = sum((stochastic_bf16(x, key(i, 3 * i)) > 1).double() for i in range(200)) / 200
        share = fractions.double() / 65536
        assert float(((ups - share).square().mean()).sqrt()) < 1.1 * float((share * (1 - share) / 200).mean().sqrt())
        assert abs(float((ups - share).mean())) < 4.5 * float((share * (1 - share)).mean().sqrt()) / math.sqrt(
            200 * 65536
        )

    def test_what_bfloat16_holds_stays(self) -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        rounded = stochastic_bf16(every.float(), key(5))
        assert torch.equal(rounded.isnan(), every.isnan())
        held = ~every.isnan()
        assert torch.equal(rounded[held].view(torch.int16), every[held].view(torch.int16)), "the sign of 0 included"

    @pytest.mark.parametrize("value", [3.4028e38, -3.4028e38, 3.39e38, math.inf, -math.inf, math.nan])
    def test_the_end_of_the_range(self, value: float) -> None:
        rounded = stochastic_bf16(torch.full((999,), value), key(6)).float()
        limit = torch.finfo(torch.bfloat16).max
        expected = value if not math.isfinite(value) else math.copysign(limit, value)
        torch.testing.assert_close(rounded, torch.full((999,), expected), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("shape", [(0,), (1,), (7, 9), (3, 1, 5)])
    def test_shapes(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        rounded = stochastic_bf16(x, key(7))
        assert (rounded.shape, rounded.dtype) == (x.shape, torch.bfloat16)
        assert bool(((rounded.float() - x).abs() <= 2**-7 * x.abs()).all())

    def test_positions_count_in_row_major_order(self) -> None:
        x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
        assert torch.equal(stochastic_bf16(x, key(8)), stochastic_bf16(x.t().contiguous().t(), key(8)))

    def test_the_same_in_one_piece_and_in_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        whole = stochastic_bf16(x, key(-9))
        parts = [stochastic_bf16(x[start : start + 256], key(-9), start) for start in range(0, 1000, 256)]
        assert torch.equal(torch.cat(parts), whole)
        monkeypatch.setattr(adamw, "_PIECE", 64)
        assert torch.equal(stochastic_bf16(x, key(-9)), whole)

    def test_keys_matter(self) -> None:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        first = stochastic_bf16(x, key(1))
        assert torch.equal(first, stochastic_bf16(x, key(1)))
        assert not torch.equal(first, stochastic_bf16(x, key(2)))
        assert not torch.equal(first, stochastic_bf16(x, key(1, 78)))

    def test_in_a_step(self) -> None:
        """The parameter is the one of float32 arithmetic, rounded; float32 parameters are not touched by a key."""
        generator = torch.Generator().manual_seed(0)
        p, grad = torch.randn(50, 60, generator=generator).bfloat16(), torch.randn(50, 60, generator=generator)
        results = {}
        for name, start, keys in (
            ("wide", p.float(), None),
            ("wide with key", p.float(), [key(4)]),
            ("low", p, [key(4)]),
        ):
            new, m, v = start.clone(), torch.zeros(50, 60), torch.zeros(50, 60)
            options = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPS}
            adamw_([new], [grad], [m], [v], [torch.zeros(())], **options, keys=keys)
            results[name] = new
        assert torch.equal(results["wide"], results["wide with key"])
        assert torch.equal(results["low"], stochastic_bf16(results["wide"], key(4)))
        assert not torch.equal(results["low"], results["wide"].bfloat16())


def test_lists_of_different_lengths() -> None:
    one = [torch.ones(2)]
    with pytest.raises(ValueError, match="shorter|longer"):
        adamw_(one, [], one, one, one, lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=EPS)
