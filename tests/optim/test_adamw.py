"""AdamW against its definition and against torch's, masks, float32 moments, state dicts, specifications."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import surokit as sk
from surokit.kernels.reference.adamw import adamw_
from surokit.optim import adamw as optim_module
from surokit.optim.spec import spec_from_dict, spec_to_dict
from surokit.optim.tensors import gradient_norm
from surokit.train import AdamW, AdamW8bit, Spec
from tests.refusals import refused, warned


def make_params(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (5,), (1, 1), (3, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (step % 5 - 3)).to(p.dtype)
        p.grad[..., 0] = 0.0


def ulps(a: Tensor, b: Tensor) -> float:
    """Largest difference in units of b's own spacing."""
    spacing = torch.finfo(b.dtype).eps * b.float().abs().clamp_min(torch.finfo(b.dtype).tiny)
    return float(((a.float() - b.float()).abs() / spacing).max())


every = pytest.mark.parametrize("kind", [sk.AdamW, sk.AdamW8bit, sk.OffloadAdamW, sk.ZenFlow])


class TestArithmetic:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [None, 1.0, 3.7])
    def test_equals_the_definition(self, dtype: torch.dtype, scale: float | None) -> None:
        params = make_params(dtype)
        optimizer = AdamW(params, lr=0.01, weight_decay=0.1)
        twins = [p.detach().clone() for p in params]
        state = [[torch.zeros_like(p) for p in twins] for _ in range(2)]
        steps = [torch.zeros(()) for _ in twins]
        for step in range(6):
            set_grads(params, step)
            grads = [p.grad.clone() for p in params if p.grad is not None]
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            for indices, decay in (([0, 2, 3], 0.1), ([1], 0.0)):  # the vector has no weight decay
                adamw_(
                    *([values[i] for i in indices] for values in (twins, grads, *state, steps)),
                    lr=0.01,
                    beta1=0.9,
                    beta2=0.95,
                    weight_decay=decay,
                    eps=1e-8,
                    grad_scale=None if scale is None else torch.tensor(scale),
                )
            optimizer.step()
        for p, twin in zip(params, twins):
            assert ulps(p.detach(), twin) <= (2 if dtype == torch.bfloat16 else 16)

    def test_equals_torch(self) -> None:
        ours, theirs = make_params(torch.float32), make_params(torch.float32)
        one = AdamW([{"params": ours}], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
        two = torch.optim.AdamW(theirs, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for step in range(5):
            set_grads(ours, step)
            set_grads(theirs, step)
            one.step()
            two.step()
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("state_dtype", [None, torch.float32])
    def test_a_gradient_in_another_order_than_its_weight(
        self, dtype: torch.dtype, state_dtype: torch.dtype | None
    ) -> None:
        """Backward lays it as the weight; whoever gives it by hand may not."""
        values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
        params = [nn.Parameter(values.clone()), nn.Parameter(values.t().contiguous().t())]
        assert params[0].stride() != params[1].stride()
        for p in params:
            optimizer = AdamW([p], lr=0.01, state_dtype=state_dtype)
            for step in range(3):
                set_grads([p], step)
                assert p.grad is not None
                p.grad = p.grad.contiguous()
                optimizer.step()
        assert torch.equal(params[0], params[1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("state_dtype", [None, torch.float32])
    @pytest.mark.parametrize("loaded", [False, True])
    def test_moments_in_another_order_than_their_weight(
        self, dtype: torch.dtype, state_dtype: torch.dtype | None, loaded: bool
    ) -> None:
        """After some steps the model takes another memory format, or one that has it loads the state."""
        values = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        params = [nn.Parameter(values.clone()) for _ in range(2)]
        for p, turns in zip(params, (False, True)):
            optimizer = AdamW([p], lr=0.01, state_dtype=state_dtype)
            for step in range(5):
                if step == 3 and turns:
                    p.data = p.data.to(memory_format=torch.channels_last)
                if step == 3 and loaded:
                    optimizer, state = AdamW([p], lr=0.01, state_dtype=state_dtype), optimizer.state_dict()
                    optimizer.load_state_dict(state)
                set_grads([p], step)
                optimizer.step()
        assert params[0].stride() != params[1].stride()
        assert torch.equal(params[0], params[1])

    def test_moments_stay_where_only_the_stride_of_one_element_differs(self) -> None:
        p = nn.Parameter(torch.ones(4).as_strided((4, 1), (1, 4)))
        optimizer = AdamW([p], lr=0.01)
        set_grads([p], 0)
        optimizer.step()
        moment = optimizer.state[p]["exp_avg"]
        optimizer.step()
        assert optimizer.state[p]["exp_avg"] is moment

    def test_a_weight_with_gaps_is_refused_and_nothing_is_written_into_them(self) -> None:
        whole = torch.ones(8, 16)
        p = nn.Parameter(whole[:, :10])
        set_grads([p], 0)
        with refused(ValueError):
            AdamW([p], lr=0.01).step()
        assert torch.equal(whole, torch.ones(8, 16))

    def test_float32_moments_of_bf16_parameters(self) -> None:
        params = make_params(torch.bfloat16)
        optimizer = AdamW(params, lr=0.01, weight_decay=0.1, state_dtype=torch.float32)
        wide = [nn.Parameter(p.detach().float()) for p in params]
        reference = AdamW(wide, lr=0.01, weight_decay=0.1)
        for step in range(6):
            set_grads(params, step)
            for p, w in zip(params, wide):
                assert p.grad is not None
                w.grad = p.grad.float()
                w.data.copy_(p.float())  # the same starting point in every step
            optimizer.step()
            reference.step()
            for p, w in zip(params, wide):
                assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
                assert torch.equal(p, w.to(torch.bfloat16))
                assert torch.equal(optimizer.state[p]["exp_avg_sq"], reference.state[w]["exp_avg_sq"])

    def test_float32_moments_decay_where_bf16_ones_stall(self) -> None:
        """The spec's experiment: gradients of 1 and then of nearly 0, beta2 = .999."""
        left = {}
        for state_dtype in (None, torch.float32):
            p = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = AdamW([p], lr=0.0, betas=(0.9, 0.999), state_dtype=state_dtype)
            for step in range(3000):
                p.grad = torch.full_like(p, 1.0 if step < 600 else 0.0)
                optimizer.step()
            left[state_dtype] = float(optimizer.state[p]["exp_avg_sq"][0, 0])
        assert left[torch.float32] == pytest.approx((1 - 0.999**600) * 0.999**2400, rel=1e-3)
        assert left[None] > 5 * left[torch.float32]

    def test_large_parameters_go_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = []
        for chunk in (1 << 25, 10):
            monkeypatch.setattr(optim_module, "CHUNK", chunk)
            params = make_params(torch.bfloat16)
            optimizer = AdamW(params, lr=0.01, state_dtype=torch.float32)
            set_grads(params, 0)
            optimizer.step()
            results.append(params)
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_devices_without_a_fused_kernel_take_the_definition(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_module, "FUSED_DEVICES", ())
        ours, fused = make_params(torch.float32), make_params(torch.float32)
        optimizer, other = AdamW(ours, lr=0.01), torch.optim.AdamW(fused, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        for step in range(3):
            set_grads(ours, step)
            set_grads(fused, step)
            optimizer.step()
            other.step()
        for a, b in zip(ours, fused):
            torch.testing.assert_close(a, b)

    def test_learning_rate_as_a_tensor(self) -> None:
        floats, tensors = make_params(torch.float32), make_params(torch.float32)
        one, two = AdamW(floats, lr=0.03), AdamW(tensors, lr=torch.tensor(0.03))
        set_grads(floats, 0)
        set_grads(tensors, 0)
        one.step()
        two.step()
        for a, b in zip(floats, tensors):
            torch.testing.assert_close(a, b)

    def test_closure(self) -> None:
        p = nn.Parameter(torch.ones(2, 2))
        optimizer = AdamW([p], lr=0.1)

        def closure() -> float:
            loss = (p * p).sum()
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure) == 4.0
        assert (p < 1).all()


class TestMask:
    @pytest.mark.parametrize("state_dtype", [None, torch.float32])
    @pytest.mark.parametrize("devices", [("cpu", "cuda"), ()])
    def test_a_masked_step_changes_nothing(
        self, state_dtype: torch.dtype | None, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(optim_module, "FUSED_DEVICES", devices)
        params = make_params(torch.bfloat16)
        optimizer = AdamW(params, lr=0.01, state_dtype=state_dtype)
        set_grads(params, 0)
        optimizer.step()
        before = copy.deepcopy([p.detach() for p in params])
        states = copy.deepcopy([optimizer.state[p] for p in params])
        set_grads(params, 1)
        for p in params:
            assert p.grad is not None
            p.grad[..., -1] = float("nan")
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(float("nan")), torch.tensor(1.0)
        optimizer.step()
        for p, old, state in zip(params, before, states):
            assert torch.equal(p, old)
            assert all(torch.equal(optimizer.state[p][key], state[key]) for key in state)

    def test_a_mask_of_zero_is_no_mask(self) -> None:
        params, others = make_params(torch.float32), make_params(torch.float32)
        one, two = AdamW(params, lr=0.01), AdamW(others, lr=0.01)
        set_grads(params, 0)
        set_grads(others, 0)
        one.found_inf = torch.tensor(0.0)
        one.step()
        two.step()
        assert all(torch.equal(a, b) for a, b in zip(params, others))
        assert float(one.state[params[0]]["step"]) == 1


class TestGroups:
    def test_no_weight_decay_on_vectors(self) -> None:
        optimizer = AdamW(nn.Linear(3, 4).parameters(), lr=0.1, weight_decay=0.5)
        assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.5), (1, 0.0)]
        optimizer = AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0]

    @every
    def test_no_weight_decay_on_biases_of_experts(self, kind: Any) -> None:
        experts = nn.Module()
        experts.down_proj = nn.Parameter(torch.ones(2, 3, 4))
        experts.down_proj_bias = nn.Parameter(torch.ones(2, 4))
        for optimizer in (kind(lr=0.1).build(experts), kind(experts.named_parameters(), lr=0.1)):
            assert [(g["params"], g["weight_decay"]) for g in optimizer.param_groups] == [
                ([experts.down_proj], 0.1),
                ([experts.down_proj_bias], 0.0),
            ]

    @every
    def test_a_matrix_that_is_called_a_bias_has_weight_decay(self, kind: Any) -> None:
        model = nn.Module()
        model.relative_bias = nn.Parameter(torch.ones(4, 4))
        model.debias = nn.Linear(3, 3, bias=False)
        model.debias.bias = nn.Parameter(torch.ones(3, 3))
        optimizer = kind(lr=0.1).build(model)
        assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(3, 0.1)]

    def test_frozen_parameters_are_left_out(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        optimizer = AdamW(lr=0.1).build(model.parameters())
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model[1].parameters()}

    def test_parameters_without_a_gradient_are_left_alone(self) -> None:
        params = make_params(torch.float32)
        params[0].grad = torch.ones_like(params[0])
        optimizer = AdamW(params, lr=0.1)
        before = params[1].detach().clone()
        optimizer.step()
        assert torch.equal(params[1], before)
        assert params[1] not in optimizer.state

    def test_groups_pass_unchanged(self) -> None:
        params = make_params(torch.float32)
        groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}]
        optimizer = AdamW(groups, lr=0.1, weight_decay=0.2)
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0.2)]


class TestStateDict:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_torch_goes_on_from_ours_and_back(self, dtype: torch.dtype) -> None:
        params = make_params(dtype)
        ours = AdamW([{"params": params}], lr=0.01)
        for step in range(3):
            set_grads(params, step)
            ours.step()
        others = [nn.Parameter(p.detach().clone()) for p in params]
        theirs = torch.optim.AdamW(others, lr=0.5, fused=True)
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch does not copy
        back_params = [nn.Parameter(p.detach().clone()) for p in params]
        back = AdamW([{"params": back_params}], lr=0.5)
        back.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for each, optimizer in ((params, ours), (others, theirs), (back_params, back)):
            set_grads(each, 3)
            optimizer.step()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(params, others, back_params))

    def test_float32_moments_stay_float32(self) -> None:
        params, fresh = make_params(torch.bfloat16), make_params(torch.bfloat16)
        one = AdamW(params, lr=0.01, state_dtype=torch.float32)
        set_grads(params, 0)
        one.step()
        two = AdamW(fresh, lr=0.01, state_dtype=torch.float32)
        two.load_state_dict(one.state_dict())
        for a, b in zip(params, fresh):
            assert two.state[b]["exp_avg_sq"].dtype == torch.float32
            assert torch.equal(one.state[a]["exp_avg_sq"], two.state[b]["exp_avg_sq"])
        two.state[fresh[0]]["exp_avg"].zero_()
        assert one.state[params[0]]["exp_avg"].any(), "loading copies"

    def test_deepcopy(self) -> None:
        model = nn.Linear(3, 3).bfloat16()
        optimizer = AdamW(model.parameters(), lr=0.1, state_dtype=torch.float32)
        model(torch.ones(1, 3).bfloat16()).sum().backward()
        optimizer.step()
        twin_model, twin = copy.deepcopy((model, optimizer))
        assert twin.state_dtype == torch.float32
        twin_model(torch.ones(1, 3).bfloat16()).sum().backward()
        before = model.weight.detach().clone()
        twin.step()
        assert torch.equal(model.weight, before)
        assert not torch.equal(twin_model.weight, before)

    def test_amsgrad_is_refused(self) -> None:
        p = nn.Parameter(torch.ones(2, 2))
        other = torch.optim.AdamW([p], amsgrad=True)
        with refused(ValueError):
            AdamW([{"params": [p]}]).load_state_dict(other.state_dict())


class TestSpec:
    def test_without_parameters_it_waits_for_them(self) -> None:
        spec = AdamW(lr=1e-3, betas=(0.8, 0.9))
        assert isinstance(spec, Spec)
        assert repr(spec) == "AdamW(lr=0.001, betas=(0.8, 0.9))"
        built = spec.build(nn.Linear(2, 2).parameters())
        assert isinstance(built, AdamW)
        assert isinstance(built, torch.optim.Optimizer)
        assert built.param_groups[0]["betas"] == (0.8, 0.9)

    def test_the_signature_shows_the_options(self) -> None:
        assert list(inspect.signature(AdamW).parameters)[:2] == ["params", "lr"]

    @pytest.mark.parametrize(
        "options",
        [
            {"lr": -1.0},
            {"lr": float("nan")},
            {"lr": torch.ones(2)},
            {"betas": (0.9, 1.0)},
            {"betas": (0.9,)},
            {"betas": 0.9},
            {"lr": "high"},
            {"eps": float("nan")},
            {"seed": -1},
            {"weight_decay": -0.1},
            {"eps": -1e-8},
            {"state_dtype": torch.float16},
        ],
    )
    def test_a_wrong_option_is_named_at_once(self, options: dict[str, Any]) -> None:
        with refused(ValueError):
            AdamW(**options)
        with refused(ValueError):
            AdamW(nn.Linear(2, 2).parameters(), **options)

    @every
    def test_numbers_of_groups_are_pythons(self, kind: Any) -> None:
        group = {"params": [nn.Parameter(torch.ones(2, 2))], "lr": np.float64(0.5), "betas": (np.float32(0.5), 0.9)}
        made = kind([group], eps=np.float64(1e-6)).param_groups[0]
        found = [made["lr"], *made["betas"], made["eps"]]
        assert found == [0.5, 0.5, 0.9, 1e-6]
        assert {type(value) for value in found} == {float}
        assert made["params"] == group["params"]

    @every
    def test_a_misspelt_option(self, kind: Any) -> None:
        for given in ((), (nn.Linear(2, 2).parameters(),)):
            with pytest.raises(TypeError, match=f"^{kind.__name__}: .*'learning_rate'. Its options are lr, betas, "):
                kind(*given, learning_rate=1e-3)

    @every
    def test_nothing_to_train(self, kind: Any) -> None:
        with refused(ValueError):
            kind(lr=1e-3).build(nn.Linear(2, 2).requires_grad_(False).parameters())

    @every
    def test_wrong_parameters(self, kind: Any) -> None:
        for wrong in (torch.ones(2), nn.Linear(2, 2)):
            with refused(TypeError):
                kind(wrong, lr=1e-3)
        with refused(TypeError):
            kind(["weight", "bias"], lr=1e-3)

    def test_bf16_moments_that_stall_are_warned_of_once(self) -> None:
        params = make_params(torch.bfloat16)
        with warned(UserWarning) as caught:
            AdamW(params, betas=(0.9, 0.999))
        assert len(caught) == 1
        AdamW(params, betas=(0.9, 0.999), state_dtype=torch.float32)
        AdamW(params, betas=(0.9, 0.95))
        AdamW(make_params(torch.float32), betas=(0.9, 0.999))

    def test_as_plain_data_and_back(self) -> None:
        spec: Any = AdamW(lr=torch.tensor(0.5), betas=(0.8, 0.9), state_dtype=torch.float32)
        again = spec_from_dict(spec_to_dict(spec, spec.build([nn.Parameter(torch.ones(2, 2))])))
        assert again.options == {"lr": 0.5, "betas": (0.8, 0.9), "state_dtype": torch.float32}
        numpys = AdamW(lr=np.float32(0.5), betas=[np.float64(0.8), 0.9], seed=np.int64(3))  # type: ignore[arg-type]
        for numbers in (numpys, Spec(AdamW, {"lr": np.float32(0.5), "betas": [0.8, 0.9], "seed": np.int64(3)})):
            data = spec_to_dict(numbers, numbers.build([nn.Parameter(torch.ones(2, 2))]))  # type: ignore[arg-type]
            assert json.loads(json.dumps(data))["options"] == {"lr": 0.5, "betas": [0.8, 0.9], "seed": 3}
        custom = spec_to_dict(None, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
        with refused(ValueError):
            spec_from_dict(custom)


class TestGradientNorm:
    def test_equals_the_norm_of_everything(self) -> None:
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), ()]]
        assert gradient_norm(grads).item() == pytest.approx(torch.cat([g.flatten() for g in grads]).norm().item())

    def test_low_precision_is_close(self) -> None:
        grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(8)]
        exact = torch.cat([g.flatten() for g in grads]).double().norm().item()
        assert gradient_norm([*grads, torch.ones(2)]).item() == pytest.approx((exact**2 + 2) ** 0.5, rel=4e-3)

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    def test_carries_what_is_not_finite(self, bad: float) -> None:
        assert not gradient_norm([torch.ones(3), torch.tensor([1.0, bad]).bfloat16()]).isfinite()


@pytest.mark.parametrize("kind", [sk.AdamW, sk.AdamW8bit, sk.OffloadAdamW, sk.ZenFlow, sk.Muon])
def test_a_gradient_that_is_a_part_of_a_sum_is_summed_first(kind: Any) -> None:
    """Copies that are updated by their own parts alone would drift apart."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(DTensor.from_local(torch.ones(64, 64), mesh, [Replicate()], run_check=False))
        optimizer = kind([{"params": [p], **({"use_muon": True} if kind is sk.Muon else {})}], lr=1e-3)
        counts = []
        for placement in (Partial(), Replicate()):
            p.grad = DTensor.from_local(torch.ones(64, 64), mesh, [placement], run_check=False)
            with CommDebugMode() as seen:
                optimizer.step()
            counts.append(seen.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
        assert counts[0] > counts[1] == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [sk.AdamW, sk.AdamW8bit, sk.OffloadAdamW, sk.ZenFlow, sk.Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("found", [2.0, float("nan")])
def test_a_mask_is_whatever_is_not_0(kind: Any, dtype: torch.dtype, found: float) -> None:
    """torch's GradScaler gives the sum of what each of several devices has found."""

    def trained(*masks: float) -> tuple[Tensor, list[Tensor]]:
        p = nn.Parameter(torch.linspace(-1, 1, 80 * 64).view(80, 64).to(dtype))
        optimizer = kind([{"params": [p], **({"use_muon": True} if kind is sk.Muon else {})}], lr=0.1)
        for mask in masks:
            p.grad = torch.full_like(p, float("nan")) if mask else p.detach().cos()
            optimizer.found_inf = torch.tensor(mask)
            optimizer.step()
        return p.detach(), [value for _, value in sorted(optimizer.state_dict()["state"][0].items())]

    skipped, whole = trained(0.0, found, 0.0), trained(0.0, 1.0, 0.0)
    assert torch.equal(skipped[0], whole[0])
    assert all(torch.equal(a, b) for a, b in zip(skipped[1], whole[1], strict=True))
    assert skipped[0].isfinite().all()


def test_steps_under_torch_s_gradient_scaler():
    """It sets grad_scale and found_inf before a step and takes them away after it."""
    start = torch.randn(4, 6)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    found = []
    for kind in (AdamW, AdamW8bit, torch.optim.AdamW):
        p = nn.Parameter(start.clone())
        optimizer, scaler = kind([p], **options), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            size = torch.inf if step == 3 else 1.0
            scaler.scale((p.square() * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(p.detach())
    assert torch.allclose(found[0], found[2], atol=1e-6)
    assert torch.allclose(found[1], found[2], atol=1e-6)


def test_a_state_of_another_kind_is_refused():
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    other = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    other.step()
    with refused(ValueError):
        AdamW([p]).load_state_dict(other.state_dict())
