"""Delayed scaling: the published update rule, and when a step begins and ends."""

import copy
import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import surokit as sk
from surokit import convert
from surokit.kernels.reference.quantize import encode_scale
from surokit.nn import delayed
from surokit.nn.delayed import DelayedScales, banks_of
from tests.refusals import refused

VECTORS = load_file(Path(__file__).parents[1] / "golden" / "fp8_delayed.safetensors")


@pytest.mark.parametrize("sequence", sorted({name.split(".")[0] for name in VECTORS}))
@pytest.mark.parametrize("format", [sk.E4M3, sk.E5M2])
def test_scales_follow_the_reference_kernel(sequence, format):
    bank = DelayedScales(4, 1, None, torch.device("cpu"))
    bank.in_force_S.fill_(format.max)  # the reference starts with scale 1
    prefix = f"{sequence}.{format.name}.max.roll_always"
    for t, amax in enumerate(VECTORS[f"{sequence}.amax"]):
        if not amax.isfinite():
            break  # from here on ours is another rule, see the next test
        scale = encode_scale(bank.amax(0, amax.view(1, 1), record=True), format, pow2=False)
        assert torch.equal(scale.view(()), VECTORS[f"{prefix}.scale_used"][t])
        bank.roll()
        after = encode_scale(bank.in_force_S.view(1, 1), format, pow2=False)
        assert torch.equal(after.view(()), VECTORS[f"{prefix}.scale_after"][t])


def test_an_amax_that_is_not_finite_spoils_its_step_and_no_other():
    """What it quantizes is NaN, so the step is lost; the history takes nothing of it and nothing freezes."""
    bank = DelayedScales(4, 1, None, torch.device("cpu"))
    for seen, in_force in ((3.0, 3.0), (float("inf"), 3.0), (5.0, 5.0), (float("nan"), 5.0), (1.0, 5.0)):
        used = bank.amax(0, torch.tensor([[seen]]), record=True)
        assert used.isnan() == (not math.isfinite(seen))
        bank.roll()
        assert bank.in_force_S.item() == in_force
    assert bank.history_HS.flatten().tolist() == [1.0, 0.0, 5.0, 0.0]  # in a ring of four


def step_of(bank, amaxes):
    """One step in which these slots record."""
    for slot, amax in amaxes.items():
        bank.amax(slot, torch.tensor([[amax]]), record=True)
    bank.roll()


def test_a_slot_that_records_nothing_keeps_its_history():
    """An expert without tokens says nothing: its history does not run out while others fill theirs."""
    bank = DelayedScales(2, 3, None, torch.device("cpu"))
    for amaxes in ({0: 8.0, 1: 8.0}, {0: 1.0}, {0: 2.0}, {0: 3.0}):
        step_of(bank, amaxes)
    assert bank.in_force_S.tolist() == [3.0, 8.0, 0.0]
    assert bank.cursor_S.tolist() == [4, 1, 0]
    assert bank.cursor.item() == 4
    step_of(bank, {1: 1.0, 2: 5.0})
    step_of(bank, {1: 2.0})
    assert bank.history_HS.t().tolist() == [[2.0, 3.0], [2.0, 1.0], [5.0, 0.0]]
    assert bank.in_force_S.tolist() == [3.0, 2.0, 5.0]


@pytest.mark.parametrize("cursor", [[1], [1, 1], [1, 0]], ids=str)
def test_a_state_of_an_older_version_has_one_cursor_for_all_slots(cursor):
    bank, other = (DelayedScales(2, 3, None, torch.device("cpu")) for _ in range(2))
    step_of(bank, {0: 8.0, 1: 4.0, 2: 2.0})
    bank.open_S.zero_()
    other.load_state_dict({**bank.state_dict(), "cursor": torch.tensor(cursor)})
    assert other.cursor_S.tolist() == [1, 1, 1]
    assert (other.open_S < 0).all() == (cursor == [1, 0])
    step_of(other, {0: 1.0})
    assert other.history_HS.tolist() == [[8.0, 4.0, 2.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("how", ["a wrapper that is gone", "parameters that came later", "layers one by one"])
def test_whoever_trains_the_layers_rolls_their_histories(tiny, batch, how):
    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    if how == "a wrapper that is gone":
        sk.apply(Wrapper(tiny), sk.FP8)
    elif how == "layers one by one":
        for block in tiny.layers:
            sk.apply(block, sk.FP8)
    else:
        sk.apply(tiny, sk.FP8)
    gc.collect()
    stranger = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([stranger] if how == "parameters that came later" else tiny.parameters(), lr=0.01)
    if how == "parameters that came later":
        optimizer.step()
        optimizer.add_param_group({"params": list(tiny.parameters())})
    for _ in range(3):
        train_step(tiny, batch, optimizer)
    assert [bank.cursor.item() for bank in banks_of(tiny)] == [3, 3] if how == "layers one by one" else [3]


@pytest.fixture
def walks(monkeypatch):
    """The modules whose parameters were looked for, a walk each."""
    walked: list[int] = []
    real = delayed._Walk.__init__

    def counting(walk, roots):
        walked.append(len(roots))
        real(walk, roots)

    monkeypatch.setattr(delayed._Walk, "__init__", counting)
    return walked


def test_steps_of_others_walk_a_model_once(tiny, batch, walks):
    """Several models in turns, as in a race: after the first step nobody's parameters are walked for anybody's."""
    models = [tiny, copy.deepcopy(tiny), copy.deepcopy(tiny)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for model in models:
        sk.apply(model, sk.FP8)
    for step in range(4):
        for model, optimizer in zip(models, optimizers):
            with delayed.dropped_on_error(optimizer):
                model(**batch).loss.backward()
            optimizer.step()
        if step == 0:
            assert len(walks) >= 3
            walks.clear()
    assert walks == []
    assert [bank.cursor.item() for model in models for bank in banks_of(model)] == [4] * 3


def add_group(bank, model, optimizer):
    optimizer.add_param_group({"params": list(model.parameters())})


def change_group(bank, model, optimizer):
    optimizer.param_groups[0]["params"][0] = model.embed.weight


def take_parameter(bank, model, optimizer):
    (stranger,) = optimizer.param_groups[0]["params"]
    model.lm_head.register_parameter("beside", stranger)


def put_parameter(bank, model, optimizer):
    (stranger,) = optimizer.param_groups[0]["params"]
    model.lm_head.bias = stranger


def take_module(bank, model, optimizer):
    (stranger,) = optimizer.param_groups[0]["params"]
    model.beside = torch.nn.ParameterList([stranger])


def take_layer(bank, model, optimizer):
    layer = torch.nn.Module()
    (layer.weight,) = optimizer.param_groups[0]["params"]
    model.kept_alive = [layer]
    bank.layers.add(layer)


@pytest.mark.parametrize(
    "change",
    [add_group, change_group, take_parameter, put_parameter, take_module, take_layer],
    ids=lambda c: c.__name__,
)
def test_a_no_holds_until_either_side_has_new_parameters(tiny, change, walks):
    sk.apply(tiny, sk.FP8)
    (bank,) = banks_of(tiny)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    assert not any(bank.follows(optimizer) for _ in range(3))
    assert len(walks) == 1
    change(bank, tiny, optimizer)
    assert bank.follows(optimizer)
    assert len(walks) == 1 + (change not in (add_group, change_group))


def test_a_copy_is_followed_once_all_of_it_is_frozen(tiny, walks):
    sk.apply(tiny, sk.FP8)
    twin = copy.deepcopy(tiny)
    (bank,) = banks_of(twin)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    assert not any(bank.follows(optimizer) for _ in range(3))
    twin.requires_grad_(False)
    assert bank.follows(optimizer)
    assert len(walks) == 1


def test_what_was_walked_is_not_kept_alive():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    sk.apply(model, sk.FP8.keep_small(0).keep_last(0))
    (bank,) = banks_of(model)
    assert not bank.follows(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01))
    gone = [weakref.ref(one) for one in (model, model[0], model[0].weight)]
    gc.disable()  # nothing goes around in a circle
    try:
        del model
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_histories_of_parts_are_all_saved(tiny, batch):
    for block in tiny.layers:
        sk.apply(block, sk.FP8)
    train_step(tiny, batch, torch.optim.SGD(tiny.parameters(), lr=0.01))
    state = convert.scaling_state(tiny)
    assert len(state) == 8
    assert all((state[f"{i}.cursor"] == 1).all() for i in (0, 1))
    twin = copy.deepcopy(tiny)
    for block in twin.layers:
        sk.apply(block, sk.FP8)
    convert.load_scaling_state(twin, state)
    assert all(torch.equal(a, b) for a, b in zip(convert.scaling_state(twin).values(), state.values()))
    sk.apply(twin, sk.FP8)
    with refused(ValueError):
        convert.load_scaling_state(twin, state)


def test_histories_are_found_while_another_precision_computes(tiny, batch):
    sk.apply(tiny, sk.FP8)
    train_step(tiny, batch, torch.optim.SGD(tiny.parameters(), lr=0.01))
    before = convert.scaling_state(tiny)
    with sk.precision(tiny, "bf16"):
        inside = convert.scaling_state(tiny)
    assert inside.keys() == before.keys()
    assert all(torch.equal(inside[key], before[key]) for key in before)


def test_the_first_tensor_seeds_its_slot():
    bank = DelayedScales(4, 2, None, torch.device("cpu"))
    assert bank.amax(0, torch.tensor([[3.0]]), record=True).item() == 3.0
    assert bank.amax(0, torch.tensor([[5.0]]), record=True).item() == 3.0  # read-only within the step
    bank.roll()
    assert bank.amax(0, torch.tensor([[1.0]]), record=False).item() == 5.0


def train_step(model, batch, optimizer, micro_batches=1):
    for _ in range(micro_batches):
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_histories_roll_once_per_optimizer_step(tiny, batch):
    sk.apply(tiny, sk.FP8)
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.01)
    train_step(tiny, batch, optimizer, micro_batches=3)
    state = convert.scaling_state(tiny)
    assert (state["cursor"] == 1).all()
    assert (state["history"][0] > 0).all()
    assert (state["history"][1:] == 0).all()
    train_step(tiny, batch, optimizer)
    assert (convert.scaling_state(tiny)["cursor"] == 2).all()


def test_evaluation_and_foreign_optimizers_touch_nothing(tiny, batch):
    sk.apply(tiny, sk.FP8)
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.01)
    train_step(tiny, batch, optimizer)
    before = convert.scaling_state(tiny)
    tiny.eval()
    with torch.no_grad():
        tiny(**batch)
    tiny.train()
    with torch.no_grad():
        tiny(**batch)
    with sk.precision(tiny, "bf16"):
        tiny(**batch).loss.backward()
    sk.compare(tiny, batch, sk.FP8)
    stranger = torch.nn.Parameter(torch.ones(1))
    stranger.grad = torch.ones(1)
    torch.optim.SGD([stranger], lr=0.1).step()
    after = convert.scaling_state(tiny)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_recomputed_activations_record_once(tiny, batch):
    from torch.utils.checkpoint import checkpoint

    twin = copy.deepcopy(tiny)
    for model, recompute in ((tiny, False), (twin, True)):
        sk.apply(model, sk.FP8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            if recompute:
                checkpoint(lambda: model(**batch).loss, use_reentrant=False).backward()  # noqa: B023
            else:
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(convert.scaling_state(tiny).values(), convert.scaling_state(twin).values()):
        assert torch.equal(a, b)
    for a, b in zip(tiny.parameters(), twin.parameters()):
        assert torch.equal(a, b)


def test_state_continues_bitwise(tiny, batch):
    sk.apply(tiny, sk.FP8)
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    train_step(tiny, batch, optimizer)
    weights, scales = copy.deepcopy(tiny.state_dict()), convert.scaling_state(tiny)
    train_step(tiny, batch, optimizer)
    expected = tiny(**batch).loss

    torch.manual_seed(9)
    other = type(tiny)()
    sk.apply(other, sk.FP8)
    other.load_state_dict(weights)
    convert.load_scaling_state(other, scales)
    train_step(other, batch, torch.optim.SGD(other.parameters(), lr=0.1))
    assert torch.equal(other(**batch).loss, expected)


def test_a_deep_copy_has_histories_of_its_own(tiny, batch):
    sk.apply(tiny, sk.FP8)
    train_step(tiny, batch, torch.optim.SGD(tiny.parameters(), lr=0.1))
    twin = copy.deepcopy(tiny)
    before = convert.scaling_state(tiny)
    train_step(twin, batch, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert (convert.scaling_state(twin)["cursor"] == 2).all()
    assert all(torch.equal(before[key], value) for key, value in convert.scaling_state(tiny).items())


def test_a_foreign_state_is_refused(tiny):
    sk.apply(tiny, sk.FP8)
    state = convert.scaling_state(tiny)
    with refused(ValueError):
        convert.load_scaling_state(tiny, {**state, "history": state["history"][:, :2]})
    with refused(ValueError):
        convert.load_scaling_state(tiny, {})
    sk.apply(tiny, sk.FP8_ROWWISE)
    with refused(ValueError):
        convert.load_scaling_state(tiny, state)


def test_a_masked_step_leaves_no_amax_behind(tiny, batch):
    sk.apply(tiny, sk.FP8)
    optimizer = sk.AdamW(tiny.parameters(), lr=1e-3)
    train_step(tiny, batch, optimizer)
    before = convert.scaling_state(tiny)
    with torch.no_grad():
        spoiled = tiny.embed.weight.clone()
        tiny.embed.weight.fill_(float("inf"))
    optimizer.found_inf = torch.ones(())
    train_step(tiny, batch, optimizer)
    optimizer.found_inf = None
    with torch.no_grad():
        tiny.embed.weight.copy_(spoiled)
    after = convert.scaling_state(tiny)
    assert torch.equal(after["in_force"], before["in_force"])
    assert after["history"].isfinite().all()


def test_an_inf_in_the_first_step_does_not_stay_in_force():
    bank = DelayedScales(4, 1, None, torch.device("cpu"))
    bank.amax(0, torch.tensor([[float("inf")]]), record=True)
    bank.roll(skipped=torch.ones(()))
    assert bank.amax(0, torch.tensor([[3.0]]), record=True).item() == 3.0


def test_products_that_are_delayed_in_backward_only_record_too(tiny, batch):
    fp8 = sk.FP8
    recipe = sk.Recipe("backward", grad_input=fp8.grad_input, grad_weight=fp8.grad_weight)
    sk.apply(tiny, recipe)
    train_step(tiny, batch, torch.optim.SGD(tiny.parameters(), lr=0.01))
    assert (convert.scaling_state(tiny)["in_force"] > 0).all()


def test_a_model_with_histories_can_be_pickled(tiny, batch):
    import pickle

    sk.apply(tiny, sk.FP8)
    train_step(tiny, batch, torch.optim.SGD(tiny.parameters(), lr=0.01))
    state = pickle.loads(pickle.dumps({n: m.precision for n, m in tiny.named_modules() if hasattr(m, "precision")}))
    banks = {id(p.scales) for p in state.values() if p is not None}
    assert len(banks) == 1
    restored = next(p.scales for p in state.values() if p is not None)
    for key, value in convert.scaling_state(tiny).items():
        assert torch.equal(restored.state_dict()[key], value)


@pytest.mark.parametrize("format", [sk.E4M3, sk.E5M2])
@pytest.mark.parametrize("given", [0.0, 0.3])
@pytest.mark.parametrize("slots", [2, (1, 4, 7), (7, 1, 4)], ids=str)
def test_quantizing_is_taking_the_amax_and_quantizing_by_it(format, given, slots):
    """Whether a view holds the slots of siblings or none does."""
    q = sk.Quantizer(format, sk.PerTensor(history=4))
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    banks = [DelayedScales(4, 9, None, torch.device("cpu")) for _ in range(2)]
    for bank in banks:
        bank.in_force_S.fill_(given)
    several = [slots] if isinstance(slots, int) else slots
    for record in (False, True):
        ours = banks[0].quantize(slots, x, q, record)
        amaxes = [banks[1].amax(slot, x, record) for slot in several]
        theirs = sk.quantize(x, q, amax=amaxes[0])
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scales, theirs.scales)
        states = [bank.state_dict() for bank in banks]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert banks[0].open_S.gt(0).sum() == len(several)


def test_a_delayed_operand_may_be_rounded_stochastically():
    q = sk.Quantizer(sk.E4M3, sk.PerTensor(history=4), rounding="stochastic")
    bank = DelayedScales(4, 1, None, torch.device("cpu"))
    x = torch.rand(64, 64) + 1
    torch.manual_seed(0)
    codes = [bank.quantize(0, x, q, record=True).codes.view(torch.uint8) for _ in range(2)]
    assert not torch.equal(*codes)
    assert bank.open_S.item() == bank.in_force_S.item() == x.max()


def test_views_hold_evenly_spaced_slots_only():
    bank = DelayedScales(4, 9, None, torch.device("cpu"))
    in_force, opened = bank.views((0, 3, 6), torch.device("cpu"))
    in_force.fill_(2.0)
    assert bank.in_force_S.tolist() == [2.0, 0.0, 0.0] * 3
    assert opened.shape == (3,)
    assert not any(bank.spaced(slots) for slots in ((0, 3, 7), (3, 0), (1, 1)))
    with refused(ValueError):
        bank.views((0, 3, 7), torch.device("cpu"))
