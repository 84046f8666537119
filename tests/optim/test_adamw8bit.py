"""AdamW8bit and stochastic rounding as optimizers: progress, bytes, states, resumed sessions. (Arithmetic: tests/kernels.)"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.kernels.reference.adamw import adamw_, stochastic_bf16
from surokit.kernels.reference.adamw8bit import adamw8bit_, dequantize
from surokit.optim import adamw as optim_module
from surokit.optim.spec import spec_from_dict, spec_to_dict
from surokit.train import AdamW, AdamW8bit, ResumeError, Session, Spec
from tests.refusals import refused
from tests.train.toys import Toy, assert_same_state, make_batches, make_session

SHAPES = [(70, 90), (64,), (20, 30), (5000,), (8, 16, 64)]
KINDS: dict[str, Any] = {
    "AdamW8bit": lambda params, **options: AdamW8bit(params, **options),
    "AdamW": lambda params, **options: AdamW(params, **options),
    "AdamW, float32 moments": lambda params, **options: AdamW(params, state_dtype=torch.float32, **options),
}


def make_params(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 2)).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def same(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestEightBits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    def test_equals_the_definitions(self, dtype: torch.dtype, rounding: Any) -> None:
        """From 4,096 elements the 8-bit one, below it float32 moments; vectors without weight decay; scaled gradients."""
        params = make_params(dtype)
        optimizer = AdamW8bit(params, lr=0.01, weight_decay=0.2, rounding=rounding)
        twins = [p.detach().clone() for p in params]
        optimizer.grad_scale = scale = torch.tensor(3.0)
        for step in range(3):
            set_grads(params, step)
            grads = [p.grad.clone() for p in params if p.grad is not None]  # torch's kernel leaves them scaled
            states = [copy.deepcopy(optimizer.state[p]) for p in params]
            optimizer.step()
            for p, twin, state, grad in zip(params, twins, states, grads, strict=True):
                new = optimizer.state[p]
                key = [_key_after(new["key"], step)] if "key" in new else None
                options: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_scale": scale}
                options |= {"weight_decay": 0.2 if p.ndim > 1 else 0.0, "keys": key}
                assert ("absmax" in new) == (p.numel() >= 4096)
                state = state or {name: torch.zeros_like(value) for name, value in new.items()}
                moments, step_t = [[state["exp_avg"]], [state["exp_avg_sq"]]], [state["step"]]
                if "absmax" in new:
                    adamw8bit_([twin], [grad], *moments, [state["absmax"]], [state["absmax_sq"]], step_t, **options)
                    assert torch.equal(p, twin)
                    assert all(torch.equal(state[name], new[name]) for name in state if name != "key")
                else:
                    assert new["exp_avg"].dtype == torch.float32
                    adamw_([twin], [grad], *moments, step_t, **options)
                    torch.testing.assert_close(
                        p.detach(), twin, rtol=0.008 if dtype == torch.bfloat16 else 1e-5, atol=1e-7
                    )
                    twin.copy_(p.detach())

    def test_bytes_a_parameter(self) -> None:
        p = nn.Parameter(torch.zeros(512, 512, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], rounding="stochastic")
        p.grad = torch.ones_like(p)
        optimizer.step()
        held = sum(value.untyped_storage().nbytes() for value in optimizer.state[p].values())
        assert held == p.numel() * (2 + 8 / 256) + 4 + 8, "two codes, two scales a block; the step and the key"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_mask_keeps_every_bit(self, dtype: torch.dtype) -> None:
        params = make_params(dtype)
        optimizer = AdamW8bit(params, lr=0.01, rounding="stochastic")
        train(optimizer, params, range(2))
        before, state = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict()["state"])
        for p in params:
            p.grad = torch.full_like(p, float("nan"))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(float("nan")), torch.tensor(1.0)
        optimizer.step()
        assert same(params, before)
        after = optimizer.state_dict()["state"]
        assert all(torch.equal(after[i][name], state[i][name]) for i in state for name in state[i])

    def test_learns_what_adamw_learns(self) -> None:
        losses = {}
        for kind in ("AdamW8bit", "AdamW"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
            target = torch.nn.Linear(64, 64)
            optimizer = KINDS[kind](model.parameters(), lr=3e-3)
            for _ in range(60):
                x = torch.randn(64, 64)
                loss = (model(x) - target(x).detach()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses[kind] = float(loss.detach())
        assert losses["AdamW8bit"] == pytest.approx(losses["AdamW"], rel=0.05)
        assert losses["AdamW"] < 0.2

    def test_a_tensor_as_learning_rate(self) -> None:
        floats, tensors = make_params(), make_params()
        train(AdamW8bit(floats, lr=0.25), floats, range(2))
        train(AdamW8bit(tensors, lr=torch.tensor(0.25)), tensors, range(2))
        for a, b in zip(floats, tensors):
            torch.testing.assert_close(a, b)


def _key_after(own: Tensor, step: int) -> Tensor:
    """A parameter's key for a step from its own key, by the definition: words 2 t and 2 t + 1 of the bits."""
    from surokit.kernels.reference.random import bits

    return bits(2 * step + 2, own)[-2:]


class TestStochasticRounding:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("size", [1000, 5000])
    def test_goes_on_where_nearest_stalls(self, kind: str, size: int) -> None:
        """100 updates of 4e-5 on a parameter of 1: to nearest none of them is seen, stochastically all on average."""
        moved = {}
        for rounding in ("nearest", "stochastic"):
            p = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
            optimizer = KINDS[kind]([p], lr=4e-5, weight_decay=0.0, rounding=rounding)
            for _ in range(100):
                p.grad = torch.ones_like(p)  # the update is then lr, whatever the step
                optimizer.step()
            moved[rounding] = 1 - float(p.detach().double().mean())
        assert moved["nearest"] == 0
        # one step of 2^-8 with probability 4e-5 * 2^8, 100 times for each element
        spread = (100 * 4e-5 * 2**-8 / size) ** 0.5
        assert moved["stochastic"] == pytest.approx(0.004, abs=5 * spread)

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_float32_update_rounded(self, kind: str) -> None:
        """Which is what the same optimizer makes of a float32 copy whose moments are the same."""
        params = make_params()
        wide = [nn.Parameter(p.detach().float()) for p in params]
        low = KINDS[kind](params, lr=0.01, rounding="stochastic")
        reference = KINDS[kind](wide, lr=0.01)
        set_grads(params, 0)
        for p, w in zip(params, wide):
            assert p.grad is not None
            w.grad = p.grad.float()
        low.step()
        reference.step()
        for p, w in zip(params, wide):
            assert torch.equal(p, stochastic_bf16(w.detach(), _key_after(low.state[p]["key"], 0)))

    def test_moments_in_bfloat16_are_those_of_nearest(self) -> None:
        params, others = make_params(), make_params()
        one, two = AdamW(params, lr=0.01, rounding="stochastic"), AdamW(others, lr=0.01)
        set_grads(params, 0)
        set_grads(others, 0)
        one.step()
        two.step()
        for p, other in zip(params, others):
            for name in ("exp_avg", "exp_avg_sq"):
                assert one.state[p][name].dtype == torch.bfloat16
                assert torch.equal(one.state[p][name], two.state[other][name])

    @pytest.mark.parametrize("kind", KINDS)
    def test_float32_parameters_are_not_touched_by_it(self, kind: str) -> None:
        params, others = make_params(torch.float32), make_params(torch.float32)
        train(KINDS[kind](params, lr=0.01, rounding="stochastic"), params, range(2))
        train(KINDS[kind](others, lr=0.01), others, range(2))
        assert same(params, others)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_seed_decides_and_nothing_else(self, kind: str) -> None:
        results: list[list[nn.Parameter]] = []
        for seed in (3, 3, 4, 3 + 2**32):
            params = make_params()
            torch.manual_seed(len(results))
            train(KINDS[kind](params, lr=0.01, rounding="stochastic", seed=seed), params, range(2))
            results.append(params)
        assert same(results[0], results[1])
        assert not same(results[0], results[2])
        assert not same(results[0], results[3])

    def test_every_step_and_parameter_draws_on_its_own(self) -> None:
        params = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(40)]
        optimizer = AdamW(params, rounding="stochastic")
        keys = [tuple(optimizer._state_of(p)["key"].tolist()) for p in params]
        for step in range(50):
            states = [optimizer.state[p] for p in params]
            steps = [torch.tensor(float(step)) for _ in params]
            drawn = optim_module.step_keys([s["key"] for s in states], steps)
            for state, key in zip(states, drawn):
                assert torch.equal(key, _key_after(state["key"], step))
                keys.append(tuple(key.tolist()))
        assert len(set(keys)) == len(keys) == 40 * 51
        assert len({word for key in keys for word in key}) > 2 * len(keys) - 5

    @pytest.mark.parametrize("devices", [("cpu", "cuda"), ()])
    def test_devices_without_a_fused_kernel(self, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_module, "FUSED_DEVICES", devices)
        p = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, rounding="stochastic", state_dtype=torch.float32)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert 1 - float(p.detach().double().mean()) == pytest.approx(0.01, rel=0.1)

    def test_a_parameter_without_a_gradient(self) -> None:
        """Draws are a parameter's own: one that sits out changes nothing for the others."""
        params, others = make_params(), make_params()
        one, two = AdamW(params, lr=0.01, rounding="stochastic"), AdamW(others, lr=0.01, rounding="stochastic")
        set_grads(params, 0)
        set_grads(others, 0)
        others[0].grad = None
        one.step()
        two.step()
        assert same(params[1:], others[1:])

    @pytest.mark.parametrize("kind", KINDS)
    def test_float16_is_refused(self, kind: str) -> None:
        with refused(ValueError):
            KINDS[kind](make_params(torch.float16), rounding="stochastic")


class TestState:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    def test_goes_on_bit_for_bit(self, kind: str, rounding: str) -> None:
        params = make_params()
        optimizer = KINDS[kind](params, lr=0.01, rounding=rounding)
        train(optimizer, params, range(3))
        fresh = [nn.Parameter(p.detach().clone()) for p in params]
        # the seed is not asked for again: every parameter's key is in the state
        again = KINDS[kind](fresh, lr=0.01, rounding=rounding, seed=99)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        twins, twin = copy.deepcopy((params, optimizer))
        for name, value in optimizer.state[params[0]].items():
            assert again.state[fresh[0]][name].dtype == value.dtype
            assert again.state[fresh[0]][name].data_ptr() != value.data_ptr()
        for each, other in ((params, optimizer), (fresh, again), (twins, twin)):
            train(other, each, range(3, 6))
        assert same(params, fresh)
        assert same(params, twins)

    def test_from_nearest_to_stochastic(self) -> None:
        params = make_params()
        optimizer = AdamW8bit(params, lr=0.01)
        train(optimizer, params, range(1))
        again = AdamW8bit(params, lr=0.01, rounding="stochastic")
        again.load_state_dict(optimizer.state_dict())
        train(again, params, range(1, 2))
        assert all("key" in again.state[p] for p in params)

    @pytest.mark.parametrize("kinds", [(AdamW, AdamW8bit), (AdamW8bit, AdamW)])
    def test_eight_bits_and_others_do_not_mix(self, kinds: tuple[Any, Any]) -> None:
        params = make_params()
        optimizer = kinds[0](params)
        train(optimizer, params, range(1))
        with refused(ValueError):
            kinds[1](params).load_state_dict(optimizer.state_dict())

    def test_decoded_moments(self) -> None:
        params = make_params()
        optimizer = AdamW8bit(params)
        set_grads(params, 0)
        optimizer.step()
        state, grad = optimizer.state[params[0]], params[0].grad
        assert grad is not None
        torch.testing.assert_close(
            dequantize(state["exp_avg"], state["absmax"], signed=True), grad.float() * 0.1, rtol=0.08, atol=1e-5
        )


class TestSpec:
    def test_is_public_and_waits_for_parameters(self) -> None:
        spec: Any = sk.AdamW8bit(lr=1e-3, rounding="stochastic")
        assert isinstance(spec, Spec)
        assert repr(spec) == "AdamW8bit(lr=0.001, rounding='stochastic')"
        assert isinstance(spec.build(nn.Linear(2, 2).parameters()), sk.AdamW8bit)
        assert list(inspect.signature(AdamW8bit).parameters)[:2] == ["params", "lr"]

    @pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
    @pytest.mark.parametrize(
        "options",
        [
            {"rounding": "up"},
            {"seed": -1},
            {"seed": 2**64},
            {"lr": -1.0},
        ],
    )
    def test_a_wrong_option_is_named_at_once(self, kind: Any, options: dict[str, Any]) -> None:
        with refused(ValueError):
            kind(**options)
        with refused(ValueError):
            kind(nn.Linear(2, 2).parameters(), **options)

    def test_eight_bits_have_no_other_dtype(self) -> None:
        with pytest.raises(TypeError, match="state_dtype"):
            AdamW8bit(state_dtype=torch.float32)  # type: ignore[call-arg]

    @pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
    def test_as_plain_data_and_back(self, kind: Any) -> None:
        spec = kind(lr=1e-3, betas=(0.8, 0.9), rounding="stochastic", seed=7)
        again = spec_from_dict(spec_to_dict(spec, spec.build([nn.Parameter(torch.ones(2, 2))])))
        assert again == spec


class TestSession:
    SPECS: dict[str, Any] = {  # noqa: RUF012
        "8 bits": {"kind": AdamW8bit},
        "8 bits, stochastic": {"kind": AdamW8bit, "rounding": "stochastic", "seed": 5},
        "stochastic": {"kind": AdamW, "rounding": "stochastic"},
        "stochastic, float32 moments": {"kind": AdamW, "rounding": "stochastic", "state_dtype": torch.float32},
    }

    @pytest.mark.parametrize("name", SPECS)
    def test_six_steps_are_three_and_three(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_module, "MIN_8BIT", 64)  # the toy's largest tensor is smaller than 4,096

        def fresh(**options: Any) -> Session:
            spec = dict(self.SPECS[name])
            return make_session(Toy(seed=1).bfloat16(), optimizer=spec.pop("kind")(lr=1e-2, **spec), **options)

        whole, half = fresh(), fresh(run_dir=tmp_path / "run")
        whole.run(6)
        half.run(3)
        half.save()
        torch.manual_seed(12345)
        again = Session.resume(tmp_path / "run", Toy(seed=2).bfloat16(), data=make_batches())
        assert type(again.optimizer) is self.SPECS[name]["kind"]
        again.run(3)
        assert_same_state(whole, again)
        np.testing.assert_array_equal(again.records.column("loss"), whole.records.column("loss"))
        states = whole.optimizer.state_dict()["state"], again.optimizer.state_dict()["state"]
        assert any("absmax" in state for state in states[0].values()) == ("8 bits" in name)
        for i in states[0]:
            assert states[0][i].keys() == states[1][i].keys()
            assert all(torch.equal(states[0][i][key], states[1][i][key]) for key in states[0][i])

    def test_a_fork_draws_the_same(self) -> None:
        session = make_session(Toy(seed=1).bfloat16(), optimizer=AdamW8bit(lr=1e-2, rounding="stochastic"))
        session.run(2)
        twin = session.fork()
        session.run(2)
        twin.run(2)
        assert_same_state(session, twin)

    def test_resuming_with_the_other_kind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_module, "MIN_8BIT", 64)
        session = make_session(Toy(), optimizer=AdamW(lr=1e-2), run_dir=tmp_path / "run")
        session.run(1)
        session.save()
        with refused(ResumeError):
            Session.resume(tmp_path / "run", Toy(), data=make_batches(), optimizer=AdamW8bit(lr=1e-2))
