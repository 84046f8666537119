"""Muon against torch's, which parameters are hidden matrices, masks, stochastic rounding, sessions that resume and race."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surokit as sk
from surokit.optim.matrices import why_no_matrix
from surokit.optim.muon import Muon
from surokit.optim.spec import Spec, spec_from_dict, spec_to_dict
from surokit.train import Session
from tests.refusals import refused, warned
from tests.train.toys import Toy, assert_same_state, make_batches, make_session

SHAPES = [(24, 8), (8, 24), (16, 16), (1, 12)]
SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "vocab": 40, "ffn": 24}


def matrices(dtype: torch.dtype, shapes: list[Any] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (step % 5 - 3)).to(p.dtype)


def hidden(params: list[nn.Parameter], **options: Any) -> Muon:
    made: Any = sk.Muon([{"params": params, "use_muon": True}], **options)
    return made


def ulps(a: Tensor, b: Tensor, near: Tensor) -> float:
    """Largest difference in units of the spacing of the largest of a, b and `near`: where a weight was before its update."""
    a, b = a.detach(), b.detach()
    size = torch.stack([a.float().abs(), b.float().abs(), near.float().abs()]).amax(0)
    return float(((a.float() - b.float()).abs() / (torch.finfo(b.dtype).eps * size)).max())


class TestArithmetic:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "options",
        [
            {"adjust_lr_fn": "match_rms_adamw"},
            {"adjust_lr_fn": "original", "ns_steps": 3, "momentum": 0.8, "weight_decay": 0.3},
            {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        ],
    )
    def test_equals_torch(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        """Momentum and what is orthogonalized bit for bit; weights but for how often they are rounded: once here."""
        if dtype == torch.bfloat16 and not options.get("nesterov", True):
            pytest.skip("torch's own momentum is scaled in place then")
        ours, theirs = matrices(dtype), matrices(dtype)
        one = hidden(ours, lr=0.02, **options, **({"adamw_lr": 1e-3} if options["adjust_lr_fn"] == "original" else {}))
        two = torch.optim.Muon(theirs, lr=0.02, **options)
        for step in range(6):
            for params in (ours, theirs):
                set_grads(params, step)
            for a, b in zip(ours, theirs):
                b.data.copy_(a)
            before = [a.detach().clone() for a in ours]
            one.step()
            two.step()
            for a, b, old in zip(ours, theirs, before):
                assert torch.equal(one.state[a]["momentum_buffer"], two.state[b]["momentum_buffer"])
                assert not torch.equal(a, old)
                assert ulps(a, b, old) <= 1

    def test_everything_else_is_adamws(self) -> None:
        ours, theirs = ([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))] for _ in range(2))
        one: Any = sk.Muon([{"params": ours, "use_muon": False}], lr=0.02, betas=(0.8, 0.9))
        two: Any = sk.AdamW([{"params": theirs}], lr=0.02, betas=(0.8, 0.9))
        for step in range(3):
            for params, optimizer in ((ours, one), (theirs, two)):
                set_grads(params, step)
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))

    def test_an_update_has_the_root_mean_square_of_adamws(self) -> None:
        """0.2 to within what five steps of Newton-Schulz leave of singular values: 0.7 to 1.2."""
        for shape in [(128, 32), (32, 128), (64, 64)]:
            (p,) = matrices(torch.float32, [shape])
            p.data.zero_()
            set_grads([p], 3)
            hidden([p], lr=1.0).step()
            assert 0.12 < p.detach().square().mean().sqrt() < 0.26

    def test_experts_are_matrices_of_their_own(self) -> None:
        together, apart = matrices(torch.float32, [(3, 8, 12)])[0], matrices(torch.float32, [(3, 8, 12)])[0]
        alone = [nn.Parameter(each.detach().clone()) for each in apart]
        one, two = hidden([together]), hidden(alone)
        for step in range(3):
            set_grads([together], step)
            assert together.grad is not None
            for each, grad in zip(alone, together.grad):
                each.grad = grad.clone()
            one.step()
            two.step()
        assert torch.equal(together, torch.stack([*alone]))

    def test_a_rate_in_a_tensor_is_the_same_rate(self) -> None:
        ours, theirs = matrices(torch.float32), matrices(torch.float32)
        for params, lr in ((ours, 0.02), (theirs, torch.tensor(0.02, dtype=torch.float64))):
            set_grads(params, 0)
            hidden(params, lr=lr).step()
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(ours, theirs))

    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    def test_a_masked_step_changes_nothing(self, rounding: Any) -> None:
        params = [*matrices(torch.bfloat16), nn.Parameter(torch.ones(2, 4, 6, dtype=torch.bfloat16))]
        optimizer = hidden(params, rounding=rounding)
        set_grads(params, 0)
        optimizer.step()
        before = copy.deepcopy((params, optimizer.state_dict()["state"]))
        for p in params:
            p.grad = torch.full_like(p, torch.nan)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(torch.nan)
        optimizer.step()
        after = (params, optimizer.state_dict()["state"])
        assert all(torch.equal(a, b) for a, b in zip(before[0], after[0]))
        assert all(torch.equal(before[1][i][k], v) for i, of in after[1].items() for k, v in of.items())

    def test_gradients_are_divided_by_the_scale(self) -> None:
        ours, theirs = matrices(torch.float32), matrices(torch.float32)
        one, two = hidden(ours), hidden(theirs)
        set_grads(ours, 0)
        one.grad_scale, one.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        one.step()
        set_grads(theirs, 0)
        for p in theirs:
            assert p.grad is not None
            p.grad /= 4
        two.step()
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)
            assert torch.equal(one.state[a]["momentum_buffer"], two.state[b]["momentum_buffer"])

    def test_float32_momentum_of_bf16_weights(self) -> None:
        params, wide = matrices(torch.bfloat16), matrices(torch.float32)
        one, two = hidden(params, state_dtype=torch.float32), hidden(wide)
        for step in range(3):
            set_grads(params, step)
            for p, w in zip(params, wide):
                assert p.grad is not None
                w.grad = p.grad.float()
                w.data.copy_(p)
            one.step()
            two.step()
            for p, w in zip(params, wide):
                assert one.state[p]["momentum_buffer"].dtype == torch.float32
                assert torch.equal(one.state[p]["momentum_buffer"], two.state[w]["momentum_buffer"])
                assert torch.equal(p, w.bfloat16())


class TestStochasticRounding:
    def test_is_right_on_average(self) -> None:
        """4,096 weights at 1 lose about 1/1000 in each of 20 steps, less than half a step of bfloat16."""
        found = []
        for dtype, rounding in [
            (torch.float32, "nearest"),
            (torch.bfloat16, "stochastic"),
            (torch.bfloat16, "nearest"),
        ]:
            p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
            optimizer = hidden([p], lr=1e-4, weight_decay=10.0, rounding=rounding, state_dtype=torch.float32)
            for step in range(20):
                set_grads([p], step)
                optimizer.step()
            found.append(float((p.detach().float() - 1).mean()))
        exact, at_random, to_nearest = found
        assert exact == pytest.approx(-0.02, rel=0.05)
        # a step of 2^-8 is taken with a probability of 1/4: over 20 steps the mean has a standard deviation of 1.4e-4
        assert at_random == pytest.approx(exact, abs=6e-4)
        assert to_nearest == 0

    def test_experts_draw_bits_of_their_own(self) -> None:
        p = nn.Parameter(torch.ones(2, 5, 7, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        hidden([p], lr=1e-3, rounding="stochastic").step()
        assert not torch.equal(p[0], p[1])


class Tied(nn.Module):
    """A head without a name that says so, tied to the embedding or not."""

    def __init__(self, tied: bool, width: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, width), nn.Embedding(4, width)
        self.mix, self.conv = nn.Linear(width, width), nn.Conv1d(width, width, 3)
        self.out = nn.Linear(width, 10, bias=False)
        if tied:
            self.out.weight = self.tokens.weight


class Stating(nn.Module):
    """A model that says which module its head is, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.last


def hidden_names(model: nn.Module) -> set[str]:
    optimizer: Any = sk.Muon(model, lr=1e-3)
    names = {id(p): name for name, p in model.named_parameters()}
    every = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(every) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0)
    return {names[id(p)] for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}


class TestHiddenMatrices:
    @pytest.mark.parametrize("tied", [True, False])
    def test_of_a_decoder(self, tied: bool) -> None:
        model = sk.Decoder(sk.DecoderConfig(**SMALL, tied=tied))
        layers = {name for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
        assert len(layers) == 7
        assert hidden_names(model) == layers

    def test_experts_and_router(self) -> None:
        model = sk.Decoder(sk.DecoderConfig(**SMALL, experts=2, expert_ffn=24))
        found = hidden_names(model)
        assert sum(p.ndim == 3 for name, p in model.named_parameters() if name in found) == 2
        assert {name.rpartition(".")[2] for name in found} == {"weight", "gate_up_proj", "down_proj"}

    def test_biases_of_experts_are_vectors(self) -> None:
        """[E, 2I] and [E, K] have two dimensions, and no matrix among them."""
        experts = nn.ParameterDict(
            {"up": torch.zeros(2, 4, 8), "up_bias": torch.zeros(2, 8), "down": torch.zeros(2, 8, 4)}
        )
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "experts": experts, "lm_head": nn.Linear(4, 9)})
        optimizer: Any = sk.Muon(model, lr=1e-3)
        hidden, _, vectors = optimizer.param_groups
        assert [p.shape for p in hidden["params"]] == [(2, 8, 4), (2, 4, 8)]
        assert [p.shape for p in vectors["params"]] == [(2, 8), (9,)]
        assert vectors["weight_decay"] == 0

    def test_adapters(self) -> None:
        """A and B of a hidden matrix are hidden matrices, those of the head are not, and what is frozen is left out."""
        model = sk.Decoder(sk.DecoderConfig(**SMALL))
        sk.apply(model, sk.BF16.lora(rank=2, targets=("q_proj", "down_proj", "lm_head")))
        ends = ("q_proj.lora_A.weight", "q_proj.lora_B.weight", "down_proj.lora_A.weight", "down_proj.lora_B.weight")
        found = hidden_names(model)
        assert len(found) == 4
        assert all(name.endswith(ends) for name in found)

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_head_is_told_by_its_weight(self, tied: bool) -> None:
        """It is the embedding's own, or the only one of its shape; a convolution is no matrix."""
        assert hidden_names(Tied(tied)) == {"mix.weight"}
        assert hidden_names(nn.ModuleDict({"module": Tied(tied)})) == {"module.mix.weight"}

    def test_a_head_that_the_model_states(self) -> None:
        assert hidden_names(nn.Sequential(Stating())) == {"0.first.weight"}

    @pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Tied(False, width=10)])
    def test_a_head_that_cannot_be_told(self, model: nn.Module) -> None:
        with refused(ValueError):
            sk.Muon(model, lr=1e-3)

    def test_parameters_alone_do_not_say(self) -> None:
        wrong: list[Any] = [Toy().parameters(), [*Toy().named_parameters()]]
        for params in wrong:
            with refused(TypeError):
                sk.Muon(params, lr=1e-3)
        with refused(TypeError):
            make_session(optimizer=lambda params: sk.Muon(params, lr=1e-3))

    def test_groups_are_taken_as_they_are(self) -> None:
        model = Toy()
        rest = [p for name, p in model.named_parameters() if name != "hidden.weight"]
        optimizer: Any = sk.Muon(
            [{"params": [model.hidden.weight], "use_muon": True, "momentum": 0.5}, {"params": rest, "use_muon": False}],
            lr=0.1,
            adamw_lr=0.01,
        )
        first, second = optimizer.param_groups
        assert (first["lr"], second["lr"]) == (0.1, 0.01)
        assert (first["momentum"], first["ns_steps"], "momentum" in second) == (0.5, 5, False)

    def test_a_group_that_does_not_say_or_has_no_matrix(self) -> None:
        good: Any = sk.Muon([{"params": matrices(torch.float32), "use_muon": True}])
        for group in ({}, {"use_muon": True}):
            with refused(ValueError):
                sk.Muon([{"params": [nn.Parameter(torch.ones(3))], **group}])
            with refused(ValueError):
                good.add_param_group({"params": [nn.Parameter(torch.ones(3))], **group})
        assert len(good.param_groups) == 1

    @pytest.mark.parametrize("divided", [0, 1])
    def test_shards_of_experts_are_whole_experts_or_refused(self, divided: int) -> None:
        """A stand-in for the DTensor of experts [E, N, K] that is divided along one dimension."""
        along: Any = SimpleNamespace(is_shard=lambda dim=None: dim in (None, divided))
        shard: Any = SimpleNamespace(ndim=3, placements=(along,), to_local=None)
        assert bool(why_no_matrix(shard)) == (divided == 1)

    def test_nothing_to_train(self) -> None:
        with refused(ValueError):
            sk.Muon(Toy().requires_grad_(False))
        with refused(ValueError):
            sk.Muon([])


class TestSpec:
    def test_as_plain_data_and_back(self) -> None:
        spec: Any = sk.Muon(lr=0.02, adjust_lr_fn="original", adamw_lr=3e-4, betas=(0.8, 0.9), nesterov=False)
        again = spec_from_dict(spec_to_dict(spec, spec.build(Toy())))
        assert again == Spec(Muon, {**spec.options})

    @pytest.mark.parametrize(
        "options",
        [
            {"lr": -1.0},
            {"momentum": 1.0},
            {"ns_steps": 0},
            {"ns_steps": 100},
            {"adjust_lr_fn": "keller"},
            {"adjust_lr_fn": "original"},
            {"adamw_lr": -1.0},
            {"state_dtype": torch.float16},
            {"rounding": "up"},
        ],
    )
    def test_a_wrong_option_is_named_at_once(self, options: dict[str, Any]) -> None:
        with refused(ValueError):
            sk.Muon(**options)

    def test_a_state_of_another_kind_is_refused(self) -> None:
        """AdamW over the same parameters in the same groups has two moments of each."""
        model = Toy()
        muon: Any = sk.Muon(model)
        adamw: Any = sk.AdamW([{"params": group["params"]} for group in muon.param_groups])
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        adamw.step()
        with refused(ValueError):
            muon.load_state_dict(adamw.state_dict())
        muon.step()
        with refused(ValueError):
            adamw.load_state_dict(muon.state_dict())

    def test_a_copy_goes_on_as_the_optimizer_does(self) -> None:
        model = Toy().bfloat16()
        options: dict[str, Any] = {"rounding": "stochastic", "adamw_lr": 1e-3, "state_dtype": torch.float32}
        optimizer: Any = sk.Muon(model, **options)
        twin, other = copy.deepcopy((model, optimizer))
        later: Any = sk.Muon(twin, **options)
        for step in range(3):
            for net, each in ((model, optimizer), (twin, other if step < 2 else later)):
                set_grads([*net.parameters()], step)
                if each is later:
                    later.load_state_dict(copy.deepcopy(other.state_dict()))
                each.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
        assert other.adamw_lr == 1e-3


class TestSessions:
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    @pytest.mark.parametrize("state_dtype", [None, torch.float32])
    def test_resumes_bit_for_bit(self, rounding: Any, state_dtype: torch.dtype | None, tmp_path: Path) -> None:
        spec: Any = sk.Muon(lr=1e-2, rounding=rounding, state_dtype=state_dtype, ns_steps=3)
        whole, part = (make_session(Toy().bfloat16(), optimizer=spec, run_dir=tmp_path / name) for name in "ab")
        whole.run(6)
        part.run(3)
        part.save()
        again = Session.resume(tmp_path / "b", Toy().bfloat16(), data=make_batches())
        assert again.spec == spec
        again.run(3)
        assert_same_state(whole, again)

    def test_a_fork_takes_the_same_steps_and_another_recipe_its_own(self) -> None:
        session = make_session(optimizer=sk.Muon(lr=1e-2))
        session.run(2)
        twin, adapted = session.fork(), session.fork(recipe=sk.BF16.lora(rank=2, targets=("hidden",)))
        for each in (session, twin, adapted):
            each.run(2)
        assert_same_state(session, twin)
        assert [len(group["params"]) for group in adapted.optimizer.param_groups] == [2]
        assert adapted.optimizer.param_groups[0]["use_muon"]

    def test_a_step_that_is_not_finite_is_skipped(self) -> None:
        session = make_session(optimizer=sk.Muon(lr=1e-2), clip=0.5, max_skipped=3)
        session.run(1)
        before = [p.detach().clone() for p in session.model.parameters()]
        hook = session.model.get_parameter("hidden.weight").register_hook(lambda grad: grad * torch.nan)
        with warned(UserWarning):
            session.run(1)
        hook.remove()
        assert session.records[-1].skipped == 1
        assert all(torch.equal(a, b) for a, b in zip(before, session.model.parameters()))

    def test_races_adamw(self) -> None:
        torch.manual_seed(0)
        start = Toy(dropout=0.0)
        runs = {
            name: make_session(copy.deepcopy(start), optimizer=spec)
            for name, spec in {"adamw": sk.AdamW(lr=1e-2), "muon": sk.Muon(lr=1e-2)}.items()
        }
        race = sk.race(runs, steps=8, live=False, predict=False, control=False, allow=("optimizer",))
        assert "trained by Muon at" in race.notes[0]
        assert len(race.runs["muon"].steps) == 8

    def test_trains_the_recipes_of_a_race(self) -> None:
        model = sk.Decoder(sk.DecoderConfig(**SMALL), dtype=torch.bfloat16)
        ids = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": ids, "labels": ids}]
        options: dict[str, Any] = {"live": False, "predict": False, "control": False, "steps": 8}
        race = sk.race(["bf16", "fp8"], model=model, data=data, optimizer=sk.Muon(lr=1e-2), **options)
        for run in race.runs.values():
            assert run.steps["loss"][-1] < run.steps["loss"][0]
