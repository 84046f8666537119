"""The decoder computed in fused steps gives what it gives in separate ones: every family, recipe, cache and hook."""

import copy
from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import surokit as sk
from surokit.convert import scaling_state
from surokit.models.checkpoint import load, save
from surokit.models.decoder import MLP, Attention, Decoder, DecoderConfig
from surokit.models.fuse import OFF, Fusion, fuse
from surokit.models.generation import generate
from surokit.nn.joint import side_by_side
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import SLOTS
from tests.models.families import FAMILIES, write

NAMES = [f.name for f in fields(Fusion)]
CONFIG = DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=96, ffn=256, max_length=64, qk_norm=True)
IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
RECIPES = [
    sk.FP8,
    sk.FP8_CURRENT,
    sk.FP8_ROWWISE,
    sk.FP8_BLOCK,
    sk.BF16.lora(rank=4),
    sk.FP8.lora(rank=4),
    sk.QFP8.lora(rank=4),
    sk.QNF4.lora(rank=4),
    sk.FP8_BLOCK.store(sk.QFP8).lora(rank=4),
]


def decoder(dtype=torch.float32, config=CONFIG):
    torch.manual_seed(0)
    model = Decoder(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    return model


def trained(model, **options):
    """Loss, gradients by name, logits."""
    model.zero_grad()
    out = model(IDS, labels=IDS, **options)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def all_side_by_side(model):
    readers = [module.readers for module in model.modules() if isinstance(module, (Attention, MLP))]
    return all(side_by_side([layer.weight for layer in layers]) is not None for layers in readers)


def error(ours, theirs):
    """Relative distance of two tensors."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-12))


def assert_close(ours, theirs, bar):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert error(ours[name], expected) <= bar, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    write(tmp_path, family)
    model = load(tmp_path, dtype=torch.float32, device="cpu")
    expected = [trained(model), trained(model, position_ids=POSITIONS)]
    prompt = IDS[:, :6]
    text = generate(model, prompt, 12)
    said = fuse(model)
    assert all(row.fused for row in said.rows)
    assert all_side_by_side(model)
    assert_close(trained(model), expected[0], 2e-5)
    assert_close(trained(model, position_ids=POSITIONS), expected[1], 2e-5)
    assert torch.equal(generate(model, prompt, 12), text)
    fuse(model, OFF)
    again = trained(model)
    assert all(torch.equal(again[name], t) for name, t in expected[0].items())


def recipe_id(recipe):
    return f"{recipe.name}{'-lora' if recipe.adapter else ''}"


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_every_recipe_is_as_close_to_exact_as_unfused(recipe):
    exact, unfused, fused = (
        trained(with_recipe(decoder(dtype), used, fusion))
        for dtype, used, fusion in (
            (torch.float32, sk.BF16.lora(rank=4) if recipe.adapter else sk.BF16, OFF),
            (torch.bfloat16, recipe, OFF),
            (torch.bfloat16, recipe, Fusion()),
        )
    )
    assert fused.keys() == unfused.keys() == exact.keys()
    ours, theirs = ({name: error(result[name], t) for name, t in exact.items()} for result in (fused, unfused))
    assert sum(ours.values()) < 1.1 * sum(theirs.values())
    for name in exact:
        assert ours[name] < 1.6 * theirs[name] + 0.01, name


def with_recipe(model, recipe, fusion):
    torch.manual_seed(1)
    sk.apply(model, recipe)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.has_adapter:
            torch.nn.init.normal_(layer.lora_B.weight, std=0.02)
    fuse(model, fusion)
    return model


def test_delayed_scaling_sees_the_same_amaxes():
    """In float32, where the fused steps give the same values to rounding: histories, and when they are read."""
    states = []
    for fusion in (OFF, Fusion().without("joint"), Fusion()):
        model = with_recipe(decoder(), sk.FP8, fusion)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            trained(model)
            optimizer.step()
        states.append(scaling_state(model))
    for key, theirs in states[0].items():
        torch.testing.assert_close(states[1][key], theirs, rtol=0.02, atol=1e-6)
    for block in model.model.layers:  # as one product, layers have one amax, the largest of theirs
        attention, mlp = block.self_attn, block.mlp
        for siblings in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            slots = torch.tensor([layer.precision.first_slot for layer in siblings])
            for role in SLOTS.values():
                alone, together = (states[i]["in_force"][slots + role] for i in (0, 2))
                torch.testing.assert_close(together, alone.amax().expand(len(slots)), rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_each_part_alone_and_all_but_it(name):
    model = decoder()
    expected = trained(model)
    on = Fusion(recompute="selective")
    others = [other for other in NAMES if other != name]
    for fusion in (on.without(name), on.without(*others)):
        fuse(model, fusion)
        assert_close(trained(model), expected, 2e-5)


def test_nothing_is_fused_on_a_cpu_unless_asked():
    model, fused = decoder(torch.bfloat16), decoder(torch.bfloat16)
    assert model.model.layers[0].fusion is None
    fuse(fused, OFF)
    plain = trained(model)
    assert all(torch.equal(t, plain[name]) for name, t in trained(fused).items())
    assert not all_side_by_side(model)


@pytest.mark.parametrize(
    "where", ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj"]
)
def test_hooks_see_and_replace_what_they_always_did(where):
    seen = []
    for fusion in (OFF, Fusion()):
        model = decoder()
        fuse(model, fusion)
        block = model.model.layers[1]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def hook(module, args, output, kept=kept):
            kept.append((args[0].detach(), output.detach()))
            return output * 2

        handle = block.get_submodule(where).register_forward_hook(hook)
        result = trained(model)
        handle.remove()
        seen.append((result, kept))
    assert_close(seen[1][0], seen[0][0], 2e-5)
    assert len(seen[1][1]) == len(seen[0][1]) == 1
    for ours, theirs in zip(seen[1][1][0], seen[0][1][0]):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_hooks_of_a_block():
    model = decoder()
    fuse(model)
    shapes = []
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: shapes.append((args[0].shape, output.shape))
    )
    model(IDS)
    assert shapes == [((2, 24, 128), (2, 24, 128))]


class Doubled(MLP):
    """Somebody's own MLP, which knows tensors only."""

    def forward(self, x):
        return 2 * self.down_proj(torch.relu(self.up_proj(x)))


@pytest.mark.parametrize("part", ["mlp", "post_attention_layernorm", "self_attn.q_norm", "mlp.up_proj"])
def test_a_part_that_another_put_there(part):
    results = []
    for fusion in (OFF, Fusion()):
        model = decoder()
        torch.manual_seed(2)
        parts = {
            "mlp": Doubled(CONFIG),
            "post_attention_layernorm": torch.nn.LayerNorm(128),
            "self_attn.q_norm": torch.nn.RMSNorm(32, 1e-3),
            "mlp.up_proj": torch.nn.Sequential(torch.nn.Linear(128, 8), torch.nn.Linear(8, 256)),
        }
        model.model.layers[1].set_submodule(part, parts[part])
        fuse(model, fusion)
        results.append(trained(model))
    assert_close(results[1], results[0], 2e-5)


def test_copies_conversions_and_loads_stay_right():
    model = decoder()
    fuse(model)
    expected = trained(model)
    for other in (copy.deepcopy(model), copy.deepcopy(model).half().float().double().float()):
        assert other.model.layers[0].fusion == Fusion()
        other.load_state_dict(model.state_dict())
        assert_close(trained(other), expected, 1e-6)
        with torch.no_grad():
            other.model.layers[0].self_attn.k_proj.weight.mul_(3)  # its own memory
    assert_close(trained(model), expected, 1e-6)


def test_it_stays_together_where_it_moves():
    model = decoder()
    fuse(model)
    model.to(torch.bfloat16)
    assert all_side_by_side(model)


def test_laid_by_the_first_forward_that_may():
    model = decoder()
    for module in model.modules():
        if isinstance(module, (Attention, MLP)):
            module.fusion = Fusion()
    with torch.inference_mode():
        model(IDS)
    assert not all_side_by_side(model)
    model(IDS)
    assert all_side_by_side(model)


@pytest.mark.parametrize("recipe", [sk.BF16, sk.QFP8, sk.QNF4], ids=recipe_id)
def test_saved_as_ever(tmp_path, recipe):
    models = {}
    for name, fusion in (("plain", OFF), ("fused", Fusion())):
        model = models[name] = decoder(torch.bfloat16)
        with_recipe(model, recipe, fusion)
        model(IDS)
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.has_adapter:
                layer.remove_adapter()
        save(model, tmp_path / name)
    assert all_side_by_side(models["fused"])
    assert not all_side_by_side(models["plain"])
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in models]
    assert contents[0] == contents[1]
    assert torch.equal(load(tmp_path / "fused", device="cpu")(IDS).logits, models["plain"](IDS).logits)


def test_a_session_trains_saves_and_resumes(tmp_path):
    losses: list[list[float]] = []
    batch = {"input_ids": IDS, "labels": IDS}
    for fusion in (OFF, Fusion()):
        model = decoder(torch.bfloat16)
        fuse(model, fusion)
        session = sk.Session(
            model,
            [batch],
            recipe=sk.FP8_ROWWISE,
            optimizer=sk.AdamW(lr=1e-3),
            run_dir=tmp_path / str(len(losses)),
            schedule=None,
        )
        session.run(3)
        session.save()
        losses.append([record.loss for record in session.records])
        other = decoder(torch.bfloat16)
        fuse(other, fusion)
        resumed = sk.Session.resume(tmp_path / str(len(losses) - 1), data=[batch], model=other)
        assert resumed.step(batch).loss == session.step(batch).loss
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_a_load_lays_them_at_once(tmp_path, monkeypatch):
    """As on CUDA, where it is the default; so no more than one group exists twice."""
    save(decoder(torch.bfloat16), tmp_path)
    for kind in (Attention, MLP):
        monkeypatch.setattr(kind, "fusion", Fusion())
    laid = load(tmp_path, device="cpu", recipe=sk.QFP8)
    assert all_side_by_side(laid)
    monkeypatch.undo()
    again = load(tmp_path, device="cpu", recipe=sk.QFP8)
    assert not all_side_by_side(again)
    with torch.no_grad():
        assert torch.equal(laid(IDS).logits, again(IDS).logits)


def test_sharded_parameters_are_left_alone(one_process):
    """FSDP2 keeps them whole for a moment only: moved then, a later step would compute with stale weights."""
    losses = []
    for shards in (False, True):
        model = decoder()
        if shards:
            for block in model.model.layers:
                fully_shard(block, mesh=one_process)
            fully_shard(model, mesh=one_process)
        fuse(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][2] < losses[0][1] < losses[0][0]


@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8, sk.QFP8.lora(rank=4)], ids=recipe_id)
def test_watched_steps_change_no_bit(recipe):
    """The numerics meter hooks every layer on some steps; whoever compares runs must not see it."""
    losses = []
    batch = {"input_ids": IDS, "labels": IDS}
    for meters in ([], [sk.numerics(every=2)]):
        model = decoder(torch.bfloat16)
        fuse(model)
        torch.manual_seed(1)
        options = {"recipe": recipe, "optimizer": sk.AdamW(lr=1e-3), "schedule": None, "meters": meters}
        session = sk.Session(model, [batch], **options)
        session.run(4)
        losses.append([(record.loss, record.grad_norm) for record in session.records])
    assert losses[0] == losses[1]


def test_a_block_is_four_stages_and_what_lies_between():
    """Counted in autograd's graph, so that a step which falls apart is seen."""
    model = decoder()
    fuse(model)
    counted = operations(model(IDS, labels=IDS).loss)
    layers = CONFIG.layers
    assert counted["_StageBackward"] == 4 * layers
    assert counted["_JointBackward"] == counted["AddBackward0"] == layers
    assert counted["_RMSNormBackward"] == 1  # the last one
    assert counted["_SwiGLUBackward"] == counted["_RotateBackward"] == counted["MmBackward0"] == 0
    fuse(model, OFF)
    counted = operations(model(IDS, labels=IDS).loss)
    assert counted["_StageBackward"] == 0
    assert counted["_RMSNormBackward"] == 4 * layers + 1


def operations(loss):
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return Counter(node.name() for node in seen)
