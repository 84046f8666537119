"""AdamW's 8-bit moments against bitsandbytes on the CPU: maps, codes, whole steps; masks, odd sizes, what is not finite.

bitsandbytes' plain quantizer, for any device, is compared bit for bit. Its CPU quantizer looks codes up in a table of 65,536
entries over [-1, 1], so where borders lie close it is off; its CPU optimizer is compared with the one and with the other.
"""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surokit.kernels.reference import adamw8bit
from surokit.kernels.reference.adamw import adamw_
from surokit.kernels.reference.adamw8bit import BLOCK, adamw8bit_, dequantize, dynamic_map, midpoints, quantize

CPU = torch.device("cpu")
NAMES = {"exp_avgs": "state1", "exp_avg_sqs": "state2", "absmaxes": "absmax1", "absmax_sqs": "absmax2"}
OPTIONS: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}


def plain_quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """bitsandbytes' implementation for devices that have no kernel of their own."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    op = torch.ops.bitsandbytes.quantize_blockwise.default
    codes, absmax = op.redispatch(keys, x, create_dynamic_map(signed), BLOCK)
    return codes, absmax


def plain_quantize_into(x: Tensor, code: Tensor, absmax_out: Tensor, out: Tensor, blocksize: int) -> None:
    assert blocksize == BLOCK
    codes, absmax = plain_quantize(x, signed=bool(code[0] < 0))
    out.copy_(codes)
    absmax_out.copy_(absmax)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def state_of(p: Tensor) -> dict[str, list[Tensor]]:
    blocks = -(-p.numel() // BLOCK)
    return {
        "exp_avgs": [torch.zeros(p.shape, dtype=torch.uint8)],
        "exp_avg_sqs": [torch.zeros(p.shape, dtype=torch.uint8)],
        "absmaxes": [torch.zeros(blocks)],
        "absmax_sqs": [torch.zeros(blocks)],
        "steps": [torch.zeros(())],
    }


class TestMap:
    @pytest.mark.parametrize("signed", [True, False])
    def test_is_that_of_bitsandbytes(self, signed: bool) -> None:
        assert torch.equal(dynamic_map(signed, CPU), create_dynamic_map(signed))

    @pytest.mark.parametrize("signed", [True, False])
    def test_every_value_is_its_own_code(self, signed: bool) -> None:
        values = dynamic_map(signed, CPU)
        codes, absmax = quantize(values, signed)
        assert codes.tolist() == list(range(256))
        assert absmax.tolist() == [1.0]
        assert torch.equal(dequantize(codes, absmax, signed), values)

    @pytest.mark.parametrize("signed", [True, False])
    def test_a_tie_takes_the_lower_code(self, signed: bool) -> None:
        borders = midpoints(signed, CPU)
        assert quantize(torch.cat([borders, torch.ones(1)]), signed)[0].tolist() == list(range(256))
        above = torch.nextafter(borders, torch.full_like(borders, 2.0))
        assert quantize(torch.cat([above, torch.ones(1)]), signed)[0].tolist() == [*range(1, 256), 255]


CASES = {
    "normal": normal(5, 256),
    "odd": normal(3, 333),
    "one": normal(1),
    "zeros": torch.zeros(700),
    "a block of zeros": torch.cat([torch.zeros(256), normal(256)]),
    "huge": normal(512, scale=5e37),
    "tiny": normal(512, scale=1e-30),
    "wide": torch.exp(normal(1024, scale=20.0)) * normal(1024, seed=1).sign(),
    "outlier": torch.cat([normal(300, scale=1e-3), torch.tensor([1e4])]),
    "transposed": normal(33, 40).t(),
    "bfloat16": normal(600).bfloat16(),
}


class TestQuantize:
    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("name", CASES)
    def test_equals_bitsandbytes(self, name: str, signed: bool) -> None:
        x = CASES[name] if signed else CASES[name].abs()
        codes, absmax = quantize(x, signed)
        # blocks of zeros keep 0 here; theirs has 1e-38 for the last one if it is short
        padded = torch.nn.functional.pad(x.reshape(-1).float(), (0, -x.numel() % BLOCK))
        theirs, their_absmax = plain_quantize(padded, signed)
        assert torch.equal(codes.reshape(-1), theirs[: x.numel()])
        assert torch.equal(absmax, their_absmax)
        assert (codes.shape, codes.dtype, absmax.dtype) == (x.shape, torch.uint8, torch.float32)

    @given(seed=st.integers(0, 2**31), rows=st.integers(1, 3), exponent=st.integers(-12, 30), signed=st.booleans())
    @settings(max_examples=30, deadline=None)
    def test_equals_bitsandbytes_on_anything(self, seed: int, rows: int, exponent: int, signed: bool) -> None:
        x = normal(rows * BLOCK, seed=seed, scale=10.0**exponent)
        x = x**3 if exponent < 0 else x
        x = x if signed else x.abs()
        ours, theirs = quantize(x, signed), plain_quantize(x, signed)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])

    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("name", CASES)
    def test_no_other_code_is_nearer(self, name: str, signed: bool) -> None:
        """Against a search through all values, in float64."""
        x = (CASES[name] if signed else CASES[name].abs()).reshape(-1).double()
        codes, absmax = quantize(x.float(), signed)
        decoded = dequantize(codes, absmax, signed).double()
        scale = absmax.double().repeat_interleave(BLOCK)[: x.numel()]
        nearest = (dynamic_map(signed, CPU).double()[None] * scale[:, None] - x[:, None]).abs().amin(1)
        assert bool(((decoded - x).abs() <= nearest + 1e-6 * scale).all())

    @pytest.mark.parametrize("signed", [True, False])
    def test_magnitudes_below_the_normal_ones_decode_to_what_is_no_larger(self, signed: bool) -> None:
        x = torch.tensor([1e-42, 0.0, 1e-45])
        codes, absmax = quantize(x, signed)
        assert absmax.tolist() == [x[0].item()]
        assert bool((dequantize(codes, absmax, signed).abs() <= x[0]).all())

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_stays_in_its_block(self, bad: float) -> None:
        x = normal(3 * BLOCK)
        clean = dequantize(*quantize(x, True), True)
        x[BLOCK + 7] = bad
        decoded = dequantize(*quantize(x, True), True)
        assert not decoded[BLOCK + 7].isfinite()
        assert torch.equal(decoded[:BLOCK], clean[:BLOCK])
        assert torch.equal(decoded[2 * BLOCK :], clean[2 * BLOCK :])

    def test_nothing(self) -> None:
        codes, absmax = quantize(torch.zeros(0, 4), True)
        assert codes.shape == (0, 4)
        assert absmax.shape == (0,)
        assert dequantize(codes, absmax, True).shape == (0, 4)


class TestStep:
    @pytest.mark.parametrize("shape", [(64, 64), (37, 129)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("exact", [True, False], ids=["its plain quantizer", "its table"])
    def test_equals_bitsandbytes_optimizer(
        self, shape: tuple[int, int], dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Step by step, each from bitsandbytes' state. Its sums are fused in part, so an absmax may differ in its last bit."""
        if exact:
            monkeypatch.setattr(bitsandbytes.backends.cpu.ops, "_quant_blockwise_fp32_direct", plain_quantize_into)
        theirs = torch.nn.Parameter(normal(*shape).to(dtype))
        optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
        state = state_of(theirs)
        for step in range(6):
            theirs.grad = normal(*shape, seed=step + 1, scale=10.0 ** (step % 3)).to(dtype)
            p = theirs.detach().clone()
            if step:
                own = optimizer.state[theirs]
                for mine, name in NAMES.items():
                    state[mine][0].copy_(own[name])
            adamw8bit_([p], [theirs.grad], **state, **OPTIONS)
            optimizer.step()
            own = optimizer.state[theirs]
            torch.testing.assert_close(p, theirs.detach(), rtol=0.008 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
            for codes, absmax, signed in (("exp_avgs", "absmaxes", True), ("exp_avg_sqs", "absmax_sqs", False)):
                torch.testing.assert_close(state[absmax][0], own[NAMES[absmax]], rtol=2.5e-7, atol=0.0)
                ours, other = state[codes][0].reshape(-1).int(), own[NAMES[codes]].reshape(-1).int()
                values = dynamic_map(signed, CPU)
                if exact:  # a number on a border may fall to either side
                    assert (ours != other).float().mean() < 1e-3
                    assert (ours - other).abs().max() <= 1
                else:
                    near = ((values[ours] - values[other]).abs() <= 2 / 65535) | ((ours - other).abs() <= 1)
                    assert bool(near.all())
                    assert (ours != other).float().mean() < 0.1
        assert state["steps"][0] == 6

    @pytest.mark.parametrize("scale", [None, 7.5])
    def test_the_first_step_is_that_of_adamw(self, scale: float | None) -> None:
        """The update takes the moments before they are encoded, and the first ones come from the gradient alone."""
        p, grad = normal(50, 90), normal(50, 90, seed=1)
        ours, state = p.clone(), state_of(p)
        plain, m, v, t = p.clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
        grad_scale = None if scale is None else torch.tensor(scale)
        adamw8bit_([ours], [grad], **state, **OPTIONS, grad_scale=grad_scale)
        adamw_([plain], [grad], [m], [v], [t], **OPTIONS, grad_scale=grad_scale)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)

    def test_the_moments_follow_those_of_adamw(self) -> None:
        p = normal(64, 128)
        ours, state = p.clone(), state_of(p)
        plain, m, v, t = p.clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
        for step in range(20):
            grad = normal(64, 128, seed=step + 1)
            adamw8bit_([ours], [grad], **state, **OPTIONS)
            adamw_([plain], [grad], [m], [v], [t], **OPTIONS)
        for exact, codes, absmax, signed, bar in (
            (m, "exp_avgs", "absmaxes", True, 0.03),
            (v, "exp_avg_sqs", "absmax_sqs", False, 0.03),
        ):
            decoded = dequantize(state[codes][0], state[absmax][0], signed)
            assert (decoded - exact).norm() < bar * exact.norm()
        moved = (plain - p).norm()
        assert (ours - plain).norm() < 0.05 * moved

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("stochastic", [False, True])
    def test_a_mask_keeps_every_bit(self, dtype: torch.dtype, stochastic: bool) -> None:
        p = normal(20, 300).to(dtype)
        state = state_of(p)
        keys = [torch.tensor([3, 4], dtype=torch.int32)] if stochastic else None
        adamw8bit_([p], [normal(20, 300, seed=1).to(dtype)], **state, **OPTIONS, keys=keys)
        before = [p.clone(), *(values[0].clone() for values in state.values())]
        bad = torch.full((20, 300), math.nan, dtype=dtype)
        adamw8bit_([p], [bad], **state, **OPTIONS, found_inf=torch.tensor(1.0), keys=keys)
        assert all(torch.equal(a, b) for a, b in zip([p, *(values[0] for values in state.values())], before))
        adamw8bit_([p], [torch.ones_like(p)], **state, **OPTIONS, found_inf=torch.tensor(0.0), keys=keys)
        assert not torch.equal(p, before[0])
        assert state["steps"][0] == 2

    @pytest.mark.parametrize("stochastic", [False, True])
    def test_the_same_in_one_piece_and_in_many(self, stochastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        results = []
        for chunk in (1 << 16, 256, 1024):
            monkeypatch.setattr(adamw8bit, "_CHUNK_CPU", chunk)
            p = normal(77, 99).bfloat16()
            state = state_of(p)
            keys = [torch.tensor([-5, 6], dtype=torch.int32)] if stochastic else None
            for step in range(2):
                adamw8bit_([p], [normal(77, 99, seed=step + 1).bfloat16()], **state, **OPTIONS, keys=keys)
            results.append([p, *(values[0] for values in state.values())])
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))

    def test_strides_do_not_matter(self) -> None:
        p, grad = normal(70, 90), normal(70, 90, seed=1)
        turned = p.t().contiguous().t()
        assert not turned.is_contiguous()
        state, other = state_of(p), state_of(p)
        adamw8bit_([p], [grad], **state, **OPTIONS)
        adamw8bit_([turned], [grad.t().contiguous().t()], **other, **OPTIONS)
        assert torch.equal(p, turned)
        assert all(torch.equal(state[name][0], other[name][0]) for name in state)

    def test_zero_gradients(self) -> None:
        p = normal(40, 130)
        state = state_of(p)
        before = p.clone()
        adamw8bit_([p], [torch.zeros_like(p)], **state, **{**OPTIONS, "weight_decay": 0.0})
        assert torch.equal(p, before)
        assert not any(state[name][0].any() for name in ("absmaxes", "absmax_sqs"))

    def test_lists_of_different_lengths(self) -> None:
        p = normal(10, 30)
        with pytest.raises(ValueError, match="shorter|longer"):
            adamw8bit_([p], [], **state_of(p), **OPTIONS)
