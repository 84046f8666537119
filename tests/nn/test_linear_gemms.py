"""The products as torch's operations: whole graphs, the same numbers compiled, gradients of the straight-through parts."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import surokit as sk
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import key_of, recipe_of, storage_key_of, storage_of
from surokit.quantized import sqnr_db

RECIPES = {r.name: r.keep_last(0) for r in sk.recipes.values() if r.quantized} | {
    r.name: r for r in (sk.FP8_BLOCK.store(sk.QFP8), sk.FP4.keep_last(0).store(sk.QNF4), sk.FP8.store(sk.QFP4))
}


def stack(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(64, 96, dtype=torch.bfloat16), nn.SiLU(), Linear(96, 32, bias=True, dtype=torch.bfloat16)
    )
    sk.apply(model, sk.BF16)
    sk.apply(model, recipe.lora(rank=4, targets=("0", "2")) if recipe.storage else recipe)
    return model


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "storage", [sk.QFP8, sk.QFP4, sk.QNF4, sk.BF16.store(sk.Quantizer(sk.E4M3, sk.MX(32)))], ids=str
)
def test_a_graph_is_whole_where_the_input_wants_no_gradient(storage):
    model = stack(storage)
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def results(model, forward, x):
    """y, dx and the gradients of two steps, so that delayed scales meet their own history."""
    found = []
    for step in range(2):
        torch.manual_seed(step)
        x = x.detach().requires_grad_()
        y = forward(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_compiled_graph_is_whole_and_gives_the_same_numbers(recipe):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = stack(recipe)
    expected = results(model, model, x)
    twin = stack(recipe)
    torch._dynamo.reset()
    compiled = results(twin, torch.compile(twin, backend="aot_eager", fullgraph=True), x)
    assert len(compiled) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_shapes_are_known_without_data(recipe):
    """What the operations promise to a graph is what they give."""
    layer = stack(recipe)[0]
    keys = key_of(recipe), layer.storage_key
    x, dy = torch.randn(33, 64).bfloat16(), torch.randn(33, 96).bfloat16()
    wants_dw = layer.storage is None
    layer.requires_grad_(False)
    forward = (x, layer.weight, list(layer.stored_scales), 96, *keys, -1, 0, wants_dw, False)
    given = torch.ops.surokit.products_forward(*forward)
    assert promised(torch.ops.surokit.products_forward, forward) == [(t.shape, t.dtype) for t in given]
    kept = given[1:] or [x]
    backward = (dy, layer.weight, list(layer.stored_scales), kept, 96, 64, *keys, -1, 0, True, wants_dw, False)
    given = torch.ops.surokit.products_backward(*backward)
    assert promised(torch.ops.surokit.products_backward, backward) == [(t.shape, t.dtype) for t in given]


def promised(operation, arguments):
    """Shapes and dtypes that an operation tells without data."""
    with FakeTensorMode() as mode, torch.no_grad():
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        return [(t.shape, t.dtype) for t in operation(*fake)]


def test_operations_know_a_recipe_by_its_text_alone():
    """In every process, whatever was made there: compiled graphs are kept on disk."""
    for recipe in sk.recipes.values():
        assert recipe_of.__wrapped__(key_of(recipe)).gemms == recipe.gemms
        assert storage_of.__wrapped__(storage_key_of(recipe.storage)) == recipe.storage
    assert key_of(sk.FP8) == key_of(sk.FP8.keep("a"))  # rules are not part of a product
    assert len({key_of(r) for r in sk.recipes.values() if r.quantized_products}) == 8
    assert storage_key_of(None) == ""


ROTATED = {"fp4": {"dw"}, "mxfp4": {"dx", "dw"}, "quartet-ii": {"dx", "dw"}}


@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "fp4", "mxfp4", "quartet-ii"])
def test_gradients_pass_straight_through(name):
    """On operands that the format holds exactly (signs) no product rounds, and the gradients are those of y = x w'.

    A rotated sign is a sign no longer: those products round, and have to keep the format's accuracy.
    """
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randint(0, 2, s, generator=g).mul(2).sub(1).float() for s in ((128, 64), (32, 64), (128, 32)))
    layer = Linear(64, 32)
    with torch.no_grad():
        layer.weight.copy_(w)
    sk.apply(nn.Sequential(layer), sk.recipes[name].keep_last(0))
    x.requires_grad_()
    y = layer(x)
    torch.manual_seed(0)
    y.backward(dy)
    for product, got, exact in (("y", y, x @ w.t()), ("dx", x.grad, dy @ w), ("dw", layer.weight.grad, dy.t() @ x)):
        if product in ROTATED.get(name, ()):
            assert got is not None
            assert 13 < sqnr_db(exact.detach(), got) < 40
        else:
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-4)
