"""Weights side by side: the same Parameters, keys and values in one storage; and what takes them out of it."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import surokit as sk
from surokit.nn.joint import lay_layers, pack_sibling_weights, side_by_side
from surokit.nn.linear import Linear
from surokit.train.checkpoint_files import distinct_tensors

ROWS = (16, 8, 8)


def siblings(dtype=torch.float32, K=32, bias=False, rows=ROWS):
    torch.manual_seed(0)
    model = nn.Module()
    for name, N in zip("qkv", rows):
        layer = Linear(K, N, bias=bias).to(dtype)
        model.add_module(name, layer)
    return model


def weights(model):
    return [layer.weight for layer in model.children()]


def joined(tensors, tell=side_by_side) -> Tensor:
    joint = tell(tensors)
    assert joint is not None
    return joint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_the_values_stay_and_one_tensor_sees_them(dtype):
    parameters = [nn.Parameter((torch.randn(N, 32) * 3).to(dtype), requires_grad=False) for N in ROWS]
    before, objects = [p.clone() for p in parameters], [id(p) for p in parameters]
    assert side_by_side(parameters) is None
    joint = joined(parameters, pack_sibling_weights)
    assert joint.shape == (32, 32)
    assert joint.dtype == dtype
    assert not joint.requires_grad
    assert [id(p) for p in parameters] == objects
    for p, b in zip(parameters, before):
        assert torch.equal(p.view(torch.uint8), b.view(torch.uint8))
    again = joined(parameters)
    assert again.data_ptr() == joint.data_ptr() == parameters[0].data_ptr()
    assert torch.equal(again.view(torch.uint8), torch.cat(before).view(torch.uint8))
    assert joined(parameters, pack_sibling_weights).data_ptr() == joint.data_ptr()  # nothing moves twice
    with torch.no_grad():
        parameters[1].copy_(before[2])  # and it is one memory
    assert torch.equal(joined(parameters)[16:24].view(torch.uint8), before[2].view(torch.uint8))


def test_biases_and_a_single_one():
    biases = [nn.Parameter(torch.randn(N)) for N in (8, 4, 4)]
    expected = torch.cat(list(biases)).detach()
    assert torch.equal(joined(biases, pack_sibling_weights), expected)
    assert torch.equal(joined(biases[:1]), biases[0])
    assert not joined(biases[:1]).requires_grad


def test_a_part_or_another_order_is_told_apart():
    q, k, v = weights(siblings())
    pack_sibling_weights((q, k, v))
    assert joined((q, k)).shape == (24, 32)
    assert torch.equal(joined((k, v)), torch.cat((k, v)))
    for wrong in ((k, q), (q, v), (q, q), (q, k.t())):
        assert side_by_side(wrong) is None


def test_storages_that_touch_are_not_one():
    """Two blocks of an arena may have consecutive addresses without being one storage."""
    arena = torch.zeros(8, 32)
    parts = [torch.from_numpy(rows.numpy()) for rows in arena.split(4)]
    assert parts[0].data_ptr() + parts[0].nbytes == parts[1].data_ptr()
    assert side_by_side(parts) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.randn(4, 8), torch.randn(4, 8, dtype=torch.bfloat16)],
        lambda: [torch.randn(4, 8), torch.randn(4, 12)],
        lambda: [torch.randn(4, 8), torch.randn(8, 4).t()],
        lambda: [torch.randn(4, 8, device="meta"), torch.randn(4, 8, device="meta")],
        lambda: [torch.randn(0, 8), torch.randn(4, 8)],
        lambda: [torch.randn(3, 3), torch.randn(3, 3)],  # 36 bytes
        lambda: list(torch.randn(8, 8).split(4, 1)),
        lambda: list(torch.randn(12, 8).split(4))[::2],  # parts of somebody's block
        lambda: [torch.randn(())] * 2,
        lambda: [torch.randn(4, 8)] * 2,
        lambda: [torch.randn(4, 8).share_memory_(), torch.randn(4, 8).share_memory_()],
    ],
    ids=["dtype", "width", "strides", "meta", "empty", "alignment", "columns", "part", "numbers", "twice", "shared"],
)
def test_left_alone(make):
    parameters = [nn.Parameter(t) for t in make()]
    before = [p.data_ptr() for p in parameters] if not parameters[0].is_meta else None
    assert pack_sibling_weights(parameters) is None
    assert before is None or [p.data_ptr() for p in parameters] == before


def test_left_alone_in_inference_mode():
    model = siblings()
    with torch.inference_mode():
        assert pack_sibling_weights(weights(model)) is None
    assert pack_sibling_weights(weights(model)) is not None
    with torch.inference_mode():
        assert side_by_side(weights(model)) is not None


def test_gradients_and_an_optimizer_that_held_the_parameters_before():
    plain, joint = siblings(), siblings()
    x = torch.randn(5, 32)
    results = []
    for model, lays in ((plain, False), (joint, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            if lays and step == 1:
                pack_sibling_weights(weights(model))
            optimizer.zero_grad()
            sum(layer(x).square().mean() for layer in model.children()).backward()
            optimizer.step()
        results.append([w.detach().clone() for w in weights(model)])
    assert side_by_side(weights(joint)) is not None
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_laying_between_forward_and_backward_changes_nothing():
    grads = []
    for lays in (False, True):
        model = siblings()
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
        loss = sum(layer(x).square().mean() for layer in model.children())
        if lays:
            pack_sibling_weights(weights(model))
        loss.backward()
        grads.append([w.grad for w in weights(model)])
    for a, b in zip(*grads):
        assert torch.equal(a, b)


@pytest.mark.parametrize("move", ["half", "deepcopy", "assign", "one"])
def test_what_moves_a_parameter_takes_it_out(move):
    model = siblings()
    pack_sibling_weights(weights(model))
    if move == "half":
        model.half()
    elif move == "deepcopy":
        model = copy.deepcopy(model)
    elif move == "assign":
        model.load_state_dict({key: t.clone() for key, t in model.state_dict().items()}, assign=True)
    else:
        model.k.double()
    assert side_by_side(weights(model)) is None
    assert (pack_sibling_weights(weights(model)) is None) == (move == "one")


def test_loading_in_place_keeps_them_together():
    model, other = siblings(), siblings()
    joint = joined(weights(model), pack_sibling_weights)
    with torch.no_grad():
        for w in weights(other):
            w.add_(1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(joint, torch.cat(weights(other)))


def test_saved_apart_and_not_twice(tmp_path):
    model = siblings(torch.bfloat16)
    plain = {key: t.clone() for key, t in model.state_dict().items()}
    save_file(plain, tmp_path / "plain.safetensors")
    pack_sibling_weights(weights(model))
    state = model.state_dict()
    assert list(state) == list(plain)
    save_file(state, tmp_path / "joint.safetensors")
    tensors, tied = distinct_tensors(model)
    assert not tied
    save_file(tensors, tmp_path / "ours.safetensors")
    torch.save(state, tmp_path / "state.pt")
    contents = (tmp_path / "plain.safetensors").read_bytes()
    assert (tmp_path / "joint.safetensors").read_bytes() == contents
    assert (tmp_path / "ours.safetensors").read_bytes() == contents
    for loaded in (load_file(tmp_path / "joint.safetensors"), torch.load(tmp_path / "state.pt")):
        assert all(torch.equal(loaded[key], t) for key, t in plain.items())
    values = sum(t.nbytes for t in plain.values())
    assert values < (tmp_path / "state.pt").stat().st_size < values + 4096


def test_layers_with_biases_codes_and_adapters():
    model = siblings(torch.bfloat16, bias=True)
    layers = list(model.children())
    lay_layers(layers)
    assert joined(weights(model)).shape == (32, 32)
    assert joined([layer.bias for layer in layers]).shape == (32,)
    plain = [layer.weight.clone() for layer in layers]
    sk.apply(model, sk.BF16.lora(rank=4, targets=("q", "k", "v")))
    assert side_by_side([layer.lora_A.weight for layer in layers]) is None
    lay_layers(layers)
    assert joined([layer.lora_A.weight for layer in layers]).shape == (12, 32)
    assert side_by_side([layer.lora_B.weight for layer in layers]) is None
    assert side_by_side(weights(model)) is not None
    for layer, w in zip(layers, plain):
        assert torch.equal(layer.weight, w)


@pytest.mark.parametrize("recipe", [sk.QFP8, sk.QFP4, sk.QNF4], ids=str)
def test_stored_codes_and_those_scales_that_fit(recipe):
    model = siblings(torch.bfloat16, K=256, rows=(256, 128, 128))
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    sk.apply(model, recipe.lora(rank=4, targets=("q", "k", "v")))
    layers = list(model.children())
    before = [layer(x) for layer in layers]
    state = {key: t.clone() for key, t in model.state_dict().items()}
    lay_layers(layers)
    codes = joined(weights(model))
    assert len(codes) == sum(len(w) for w in weights(model))
    assert torch.equal(codes.view(torch.uint8), torch.cat([w.view(torch.uint8) for w in weights(model)]))
    scales = [layer.stored_scales[0] for layer in layers]
    assert (side_by_side(scales) is not None) == (
        recipe is not sk.QFP8
    )  # 2 x 2 and 1 x 2 of 4 bytes: no multiple of 16
    for layer, y in zip(layers, before):
        assert torch.equal(layer(x), y)
    assert list(model.state_dict()) == list(state)
    for key, t in model.state_dict().items():
        assert torch.equal(t.view(torch.uint8), state[key].view(torch.uint8))


def test_layers_of_another_kind_are_left_alone():
    ours = Linear(32, 8)
    for others in ([ours], [ours, nn.Linear(32, 8)], [ours, nn.Identity()]):
        before = ours.weight.data_ptr()
        lay_layers(others)
        assert ours.weight.data_ptr() == before
