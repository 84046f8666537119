"""Stages: what they compute is what norm, gate and layers compute one by one, under every recipe and every choice of fusion."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surokit as sk
from surokit import kernels
from surokit.convert import scaling_state
from surokit.fusion import OFF, Fusion
from surokit.nn import linear_gemms, stages
from surokit.nn.delayed import DelayedScales
from surokit.nn.joint import lay_layers, side_by_side
from surokit.nn.linear import Linear
from surokit.nn.linear_gemms import Operand
from surokit.nn.norm import RMSNorm
from surokit.nn.stages import Gated, Normed, Plain, fused_linear
from surokit.quantized import Quantized
from surokit.quantizer import kind_of
from surokit.recipe import ROLES
from tests.kernels.interpreter import INTERPRETED, correct, poisoned

K, ROWS, SHAPE = 128, (128, 256, 128), (2, 12)
PRODUCTS = [sk.BF16, sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.MXFP8, sk.FP4.keep_last(0), sk.MXFP4]
STORED = [
    sk.QFP8,
    sk.BF16.store(sk.Quantizer(sk.E4M3, sk.MX(32))),
    sk.QFP4,
    sk.QNF4,
    sk.QNF4.decode_once(),
    sk.FP8_BLOCK.store(sk.QFP8),
    sk.FP8.store(sk.QNF4),
]
CURRENT = sk.FP8_CURRENT  # a scale for the whole tensor: what is several layers' may not be quantized as one
MIXED = [sk.Recipe("dw", grad_weight=CURRENT.grad_weight), sk.Recipe("dx", grad_input=CURRENT.grad_input)]
RECIPES = [*PRODUCTS, *MIXED, *(r.lora(4) for r in PRODUCTS), *(r.lora(4) for r in STORED)]
EACH = [f.name for f in fields(Fusion) if f.name not in ("qk", "recompute")]
FUSIONS = [
    Fusion(),
    Fusion(frozen="transposed", recompute="selective"),
    *(Fusion().without(name) for name in EACH),
]
ALONE = [replace(OFF, **{name: getattr(Fusion(), name)}) for name in EACH]


def named(recipe):
    return f"{recipe.name}{' once' if recipe.keeps_decoded else ''}{' lora' if recipe.adapter else ''}"


def linears(stage):
    return [*stage.layers.values()]


class Stage(nn.Module):
    """A source of one kind and the layers that read it, with numbers of its own for everything."""

    def __init__(self, recipe, kind="normed", dtype=torch.float32, bias=False, rows=ROWS, width=K):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.recipe = kind, recipe
        self.norm = RMSNorm(width, dtype=dtype)
        self.layers = nn.ModuleDict({f"{name}_proj": Linear(width, n, bias=bias) for name, n in zip("qkv", rows)})
        self.to(dtype)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
        sk.apply(self, recipe.lora(4, targets=[*self.layers]) if recipe.adapter else recipe)
        for layer in linears(self):
            if layer.has_adapter:
                nn.init.normal_(layer.lora_B.weight, std=0.3)

    def source(self, first, second):
        match self.kind:
            case "normed":
                return Normed(first, self.norm, second)
            case "first":
                return Normed(first, self.norm)
            case "gated":
                return Gated(first, second)
            case "joint":
                joint = torch.cat([first, second], -1)
                gate, up = joint.chunk(2, -1)
                return Gated(gate, up, joint)
        return Plain(first)

    def forward(self, first, second, fusion):
        if fusion.joint:
            lay_layers([*self.layers.values()])
        return fused_linear(self.source(first, second), [*self.layers.values()], fusion)


class AsOne(nn.Module):
    """A stage computed by what its layers are together: one layer, their weights one above the other, and their adapters."""

    def __init__(self, stage):
        super().__init__()
        self.stage = [stage]
        self.norm, self.layers = stage.norm, stage.layers
        weights = [layer.weight for layer in linears(stage)]
        one: Any = nn.Module()
        one.norm, one.layer = stage.norm, Linear(weights[0].shape[1], sum(map(len, weights)), dtype=weights[0].dtype)
        sk.apply(one, replace(stage.recipe, adapter=None))
        one.beside = stage.layers  # what trains rolls the scales
        self.one: list[Any] = [one]

    def forward(self, first, second, fusion):
        (stage,), (one,) = self.stage, self.one
        stream, x = stage.source(first, second).composed()
        layers, record = linears(stage), self.training and torch.is_grad_enabled()
        w = torch.cat([layer.weight for layer in layers])
        y = linear_gemms.three_products(x.flatten(0, -2), w, len(w), "", (), one.layer.precision, record)
        parts = y.unflatten(0, x.shape[:-1]).split([layer.out_features for layer in layers], -1)
        biases = [0 if layer.bias is None else layer.bias for layer in layers]
        adapted = [layer.adapter(x) if layer.has_adapter else 0 for layer in layers]
        return stream, tuple(part + b + a for part, b, a in zip(parts, biases, adapted)), None

    def scaling_state(self):
        """The state of the stage's scales, if each layer has those of the one."""
        parts = len(self.layers)
        state = self.one[0].layer.precision.scales.state_dict()
        return {k: v.repeat(*[1] * (v.ndim - 1), parts) for k, v in state.items()}


def shares(recipe, fusion, rows=ROWS):
    """Whether layers that are one product have scales in common then."""
    sides = [(recipe.forward.b, 0), (recipe.grad_input.a, 1), (recipe.grad_input.b, 1), (recipe.grad_weight.a, 0)]
    sides = [(q, d) for q, d in sides if q is not None]
    joins = fusion.joint and len(rows) > 1 and not recipe.storage and all(q.joins(d, rows) for q, d in sides)
    return joins and not all(q.separates(d, rows) for q, d in sides)


def definition(stage, fusion):
    """What a stage's values are to be under a fusion, as something to run without one."""
    rows = [layer.out_features for layer in linears(stage)]
    stage = copy.deepcopy(stage)
    lay_layers(linears(stage))
    side = side_by_side([layer.weight for layer in linears(stage)]) is not None
    return AsOne(stage) if side and shares(stage.recipe, fusion, rows) else stage


def numbers(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype=torch.float32, step=0, width=K, shape=SHAPE):
    return [numbers((*shape, width), 10 * step + i, dtype).requires_grad_() for i in range(2)]


def run(stage, fusion, step=0):
    """Outputs and gradients of one forward and backward, by name."""
    dtype, width = stage.norm.weight.dtype, stage.norm.weight.numel()
    first, second = inputs(dtype, step, width)
    stream, parts, _ = stage(first, second, fusion)
    found = dict(zip(stage.layers, parts)) | ({} if stream is None else {"stream": stream})
    torch.manual_seed(step)  # stochastic rounding draws in the order of the layers
    torch.autograd.backward([*found.values()], [numbers(y.shape, 99 + i, dtype) for i, y in enumerate(found.values())])
    found = {name: y.detach() for name, y in found.items()} | {"dfirst": first.grad}
    found |= {} if second.grad is None else {"dsecond": second.grad}
    return found | {f"d{name}": p.grad for name, p in stage.named_parameters() if p.grad is not None}


def compare(got, expected, bar):
    assert got.keys() == expected.keys()
    for name, e in expected.items():
        assert got[name].shape == e.shape, name
        assert got[name].dtype == e.dtype, name
        error = (got[name].double() - e.double()).norm() / e.double().norm()
        assert error <= bar, (name, float(error))


CASES = [("normed", r) for r in RECIPES]
CASES += [(kind, r) for kind in ("gated", "plain") for r in (sk.BF16, sk.FP8, sk.FP8_ROWWISE.lora(4), sk.QFP8.lora(4))]


@pytest.mark.parametrize(("kind", "recipe"), CASES, ids=lambda v: v if isinstance(v, str) else named(v))
def test_fused_and_not_are_equal(recipe, kind):
    """In float32 only the order of sums can differ: other codes would show."""
    stage = Stage(recipe, kind)
    for fusion in FUSIONS:
        compare(run(copy.deepcopy(stage), fusion), run(definition(stage, fusion), OFF), 1e-6)


@pytest.mark.parametrize("kind", ["first", "joint"])
@pytest.mark.parametrize("recipe", [sk.BF16.lora(4), sk.FP8.lora(4), sk.FP8_BLOCK], ids=named)
def test_each_choice_alone_and_every_source(recipe, kind):
    stage = Stage(recipe, kind, bias=True)
    for fusion in (*ALONE, *FUSIONS[:2]):
        compare(run(copy.deepcopy(stage), fusion), run(definition(stage, fusion), OFF), 1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_sizes_that_fit_no_tile(recipe):
    for rows, width in (((16, 48), 20), ((17, 33), 19), ((5,), 19)):
        stage = Stage(recipe, bias=True, rows=rows, width=width)
        fusion = Fusion(frozen="transposed")
        compare(run(copy.deepcopy(stage), fusion), run(definition(stage, fusion), OFF), 1e-6)


@pytest.mark.parametrize("recipe", [sk.BF16, sk.BF16.lora(4), sk.FP8, sk.FP8_BLOCK.lora(4), sk.QFP8.lora(4)], ids=named)
def test_bfloat16_is_rounded_no_more_often(recipe):
    """Against the same codes in float32 sums: the fused form is no further away."""
    errors = []
    for fusion in (OFF, Fusion()):
        stage = Stage(recipe, dtype=torch.bfloat16, bias=True)
        found = run(stage, fusion)
        exact = run(copy.deepcopy(stage).float() if recipe.forward.a is None and not recipe.storage else stage, OFF)
        errors.append({n: float((found[n].float() - e.float()).norm() / e.float().norm()) for n, e in exact.items()})
    for name, unfused in errors[0].items():
        assert errors[1][name] <= max(1.02 * unfused, 2**-7), name


@pytest.fixture
def operands(monkeypatch):
    """The two operands of every product, by the product's name."""
    seen: dict[str, list[tuple[Operand, Operand]]] = {name: [] for name in ROLES}

    def watched(name):
        real = getattr(linear_gemms.Products, name)

        def product(self, a, b, *rest):
            seen[name].append((a, b))
            return real(self, a, b, *rest)

        return product

    for name in ROLES:
        monkeypatch.setattr(linear_gemms.Products, name, watched(name))
    return seen


@pytest.fixture
def sums(monkeypatch):
    """Of every product that adds onto a tensor: how many terms it sums, and the columns of the tensor."""
    seen: list[tuple[int, int]] = []
    real = kernels.addmm_

    def addmm_(y, a, b, beta=1.0, alpha=1.0):
        if beta:
            seen.append((a.shape[1], y.shape[1]))
        return real(y, a, b, beta, alpha)

    monkeypatch.setattr(kernels, "addmm_", addmm_)
    return seen


ALL = sum(ROWS)
B_LAST, A_LAST = [(4, n) for n in ROWS], [(12, K)]  # the adapters are added to what the layers' products wrote
ONE_FIRST, EACH_FIRST = [(K, ALL)], [(K, n) for n in ROWS]
SUMS = [
    (sk.BF16, False, ONE_FIRST, [(ALL, K)]),
    (sk.QFP8, False, ONE_FIRST, [(ALL, K)]),
    (sk.QFP4, False, EACH_FIRST, [(n, K) for n in reversed(ROWS)]),
    (sk.QNF4, True, EACH_FIRST, [(n, K) for n in reversed(ROWS)]),
    (sk.BF16, True, B_LAST, [(ALL, K)]),  # what a product adds in 16 bits is its bias
    (sk.FP8, False, B_LAST, A_LAST),
    (sk.FP8_BLOCK, True, B_LAST, A_LAST),
    (sk.FP8_BLOCK.store(sk.QFP8), False, B_LAST, A_LAST),
    (sk.FP8_BLOCK.keep("v_proj"), False, [*B_LAST[:2], (K, 128)], [(128, K)]),  # v comes first in backward
    (sk.FP8_BLOCK.keep("q_proj"), False, [(K, 128), *B_LAST[1:]], [(128, K), *A_LAST]),
    (sk.Recipe("y", forward=sk.FP8_BLOCK.forward), False, B_LAST, [(ALL, K)]),
    (MIXED[1], False, ONE_FIRST, A_LAST),
]


@pytest.mark.parametrize(("recipe", "bias", "forward", "backward"), SUMS, ids=lambda v: getattr(v, "name", None))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_add_onto_their_adapters_where_they_can(recipe, bias, forward, backward, dtype, sums):
    """No pass over y or dx is left after a product that adds; one of codes has the adapters come after it."""
    stage = Stage(recipe.lora(4), bias=bias, dtype=dtype)
    expected = run(definition(stage, Fusion()), OFF)
    sums.clear()
    got = run(stage, Fusion())
    assert sums == [*forward, *backward]
    compare(got, expected, 1e-6 if dtype == torch.float32 else 2**-7)


def test_a_product_with_rows_that_have_no_adapter_comes_first(sums):
    found = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.BF16)
        layer = linears(stage)[1]
        layer.add_adapter(sk.Lora(4, 8.0))
        nn.init.normal_(layer.lora_B.weight)
        sums.clear()
        found.append(run(stage, fusion))
    assert sums == [(4, 256), (ALL, K)]
    compare(found[1], found[0], 1e-6)


# along which dimension the operands of several layers stand in those of one product; None: they are one
TOGETHER = {"forward": (None, 0), "grad_input": (1, 1), "grad_weight": (0, None)}


CODED = [("normed", r) for r in RECIPES if r.quantized_products] + [("gated", r.lora(4)) for r in PRODUCTS[1:5]]


@pytest.mark.parametrize(("kind", "recipe"), CODED, ids=lambda v: v if isinstance(v, str) else named(v))
def test_codes_and_scales_are_bit_for_bit_the_same(kind, recipe, operands):
    stage = Stage(recipe, kind, torch.bfloat16)
    for fusion in (Fusion(frozen="transposed").without("joint"), Fusion()):
        operands |= {name: [] for name in operands}
        run(definition(stage, fusion), OFF)
        separate = {name: found if name == "forward" else found[::-1] for name, found in operands.items()}
        operands |= {name: [] for name in operands}
        fused = copy.deepcopy(stage)
        for _ in range(2):  # the second takes the codes that were kept
            run(fused, fusion)
        for name, sides in TOGETHER.items():
            found = operands[name] if name == "forward" else operands[name][::-1]
            assert bool(found) == bool(separate[name])
            for side, dimension in enumerate(sides):
                got, expected = ([decoded(pair[side]) for pair in pairs] for pairs in (found, separate[name]))
                if len(got) in (1, 2) and len(expected) == 3:
                    expected = [expected[0] if dimension is None else torch.cat(expected, dimension)] * len(got)
                for i, one in enumerate(got):
                    assert torch.equal(one, expected[i % len(expected)]), (name, side)


def decoded(operand):
    """Numbers that tell codes and scales apart."""
    return operand.dequantize() if isinstance(operand, Quantized) else operand.float()


@pytest.mark.parametrize("recipe", [*PRODUCTS[1:], *MIXED, sk.FP8.store(sk.QNF4)], ids=named)
def test_without_joint_products_and_adapters_the_same_sums(recipe):
    """Each product is then the very same, so y and dw are bitwise, and so are all steps that follow from them."""
    runs = []
    for fusion in (OFF, Fusion().without("joint"), Fusion(frozen="transposed", recompute="selective").without("joint")):
        stage = Stage(recipe, dtype=torch.bfloat16)
        trained = [p for p in stage.layers.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
        found = []
        for step in range(3):
            got = run(stage, fusion, step)
            found += [v for n, v in got.items() if not n.startswith(("dfirst", "dsecond", "dnorm"))]
            if optimizer is None:
                sk.convert.roll_scales(stage)
            else:
                optimizer.step()
            stage.zero_grad()
        runs.append([*found, *scaling_state(stage).values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(("kind", "rows"), [("normed", ROWS), ("plain", ROWS), ("gated", (128,))])
@pytest.mark.parametrize("frozen", ["no", "codes", "transposed"])
def test_histories_go_on_as_ever(frozen, kind, rows):
    """With adapters and frozen weights, over steps of two parts, of which one is skipped."""
    states = []
    for fusion in (OFF, Fusion(frozen=frozen)):
        stage = Stage(sk.FP8.lora(4), kind, rows=rows)
        if fusion is OFF:
            stage = definition(stage, Fusion())
        optimizer = sk.AdamW([p for p in stage.parameters() if p.requires_grad], lr=0.1)
        for step in range(4):
            for part in range(2):
                run(stage, fusion, 2 * step + part)
            states.append(stage.scaling_state() if isinstance(stage, AsOne) else scaling_state(stage))
            optimizer.found_inf = torch.ones(()) if step == 2 else None
            optimizer.step()
            stage.zero_grad()
            states.append(stage.scaling_state() if isinstance(stage, AsOne) else scaling_state(stage))
        stage.eval()
        run(stage, fusion, 9)
        states.append(stage.scaling_state() if isinstance(stage, AsOne) else scaling_state(stage))
    half = len(states) // 2
    for a, b in zip(states[:half], states[half:], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_layer_in_evaluation_notes_nothing():
    states = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.FP8.lora(4))
        stage.layers["k_proj"].eval()
        run(stage, fusion)
        states.append(scaling_state(stage))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert (states[0]["open"] < 0).sum() == 3


@pytest.mark.parametrize("recipe", [sk.BF16.lora(4), sk.FP8.lora(4), sk.FP8_BLOCK], ids=named)
def test_memory_that_nobody_wrote_is_not_read(recipe):
    """Products into fresh memory leave what it holds, NaN here, out."""
    for dtype in (torch.float32, torch.bfloat16):
        expected = run(Stage(recipe, dtype=dtype), Fusion())
        with poisoned():
            got = run(Stage(recipe, dtype=dtype), Fusion())
        assert all(torch.equal(got[name], e) for name, e in expected.items())


def test_no_gradient_is_dropped():
    """Every gradient against finite differences, in float64."""
    for kind in ("normed", "first", "gated", "joint", "plain"):
        stage = Stage(sk.BF16, kind, torch.float64, bias=True, rows=(3, 5), width=4)
        for layer in linears(stage):
            layer.add_adapter(sk.Lora(2, 6.0))
            nn.init.normal_(layer.lora_B.weight)
        first, second = (numbers((2, 3, 4), i, torch.float64).requires_grad_() for i in range(2))
        wanted = [first, *([] if kind in ("first", "plain") else [second]), *stage.layers.parameters()]
        wanted += [stage.norm.weight] if kind in ("normed", "first") else []

        for fusion in (Fusion(), Fusion(recompute="selective").without("joint")):

            def outputs(*_):
                stream, parts, _ = stage(first, second, fusion)  # noqa: B023
                return *parts, *([] if stream is None else [stream])

            # RMSNorm computes in float32 inside
            eps, atol, rtol = (1e-3, 1e-2, 1e-2) if kind in ("normed", "first") else (1e-6, 1e-5, 1e-3)
            assert torch.autograd.gradcheck(outputs, wanted, eps=eps, atol=atol, rtol=rtol)


@pytest.mark.parametrize("recipe", [sk.BF16.lora(4), sk.FP8_ROWWISE, sk.FP8_BLOCK.lora(4)], ids=named)
@pytest.mark.parametrize("used", [("stream",), ("q",), ("k", "v"), ("stream", "v")])
def test_outputs_that_nobody_takes(used, recipe):
    found = []
    for fusion in (OFF, Fusion(), Fusion(recompute="selective").without("joint")):
        stage = Stage(recipe)
        first, second = inputs()
        stream, parts, _ = stage(first, second, fusion)
        outputs = dict(zip("qkv", parts), stream=stream)
        torch.autograd.backward([outputs[n] for n in used], [numbers(outputs[n].shape, 7) for n in used])
        norm = {} if used == ("stream",) else {"norm": stage.norm.weight.grad}
        grads = {n: p.grad for n, p in stage.layers.named_parameters() if p.grad is not None and p.grad.any()}
        found.append(
            {k: v for k, v in {"first": first.grad, "second": second.grad, **norm, **grads}.items() if v is not None}
        )
    for other in found[1:]:
        compare(other, found[0], 1e-6)


def test_a_part_of_a_joint_tensor_or_all_of_it():
    stage = Stage(sk.BF16)
    first, second = inputs()
    _, parts, joint = stage(first, second, Fusion())
    assert joint is not None
    assert torch.equal(torch.cat(parts, -1), joint)
    assert parts[1]._base is not None
    assert parts[1].data_ptr() == joint[..., 128:].data_ptr()
    dy = numbers(joint.shape, 5)
    expected = torch.autograd.grad(torch.cat(parts, -1), first, dy, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(joint, first, dy, retain_graph=True)[0], expected)
    twice = torch.autograd.grad([joint, parts[0]], first, [dy, torch.ones_like(parts[0])])[0]
    alone = run_gradient(stage, first, second, dy + F.pad(torch.ones_like(parts[0]), (0, 384)))
    torch.testing.assert_close(twice, alone)
    assert stage(first, second, Fusion().without("joint"))[2] is None


def run_gradient(stage, first, second, dy):
    return torch.autograd.grad(torch.cat(stage(first, second, OFF)[1], -1), first, dy)[0]


# -- who looks on


@pytest.mark.parametrize("recipe", [sk.BF16.lora(4), sk.FP8, sk.FP8_BLOCK.lora(4)], ids=named)
@pytest.mark.parametrize("fusion", [Fusion(), Fusion(recompute="selective"), Fusion().without("adapters")])
def test_forward_hooks_see_their_layer_and_change_no_bit(recipe, fusion):
    expected = run(Stage(recipe, dtype=torch.bfloat16), fusion)
    stage = Stage(recipe, dtype=torch.bfloat16)
    seen: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
    gradients: dict[nn.Module, torch.Tensor] = {}

    def look(layer, args, y):
        seen[layer] = (*args, y)
        y.register_hook(lambda dy: gradients.setdefault(layer, dy))

    for layer in stage.layers.values():
        layer.register_forward_hook(look)
    got = run(stage, fusion)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    x = stage.norm(sum(inputs(torch.bfloat16)))
    for i, (name, layer) in enumerate(stage.layers.items()):
        assert torch.equal(seen[layer][0], x)
        assert torch.equal(seen[layer][1], got[name])
        assert torch.equal(gradients[layer], numbers(got[name].shape, 99 + i, torch.bfloat16))


def test_a_hook_may_replace_y_and_use_x():
    found = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.FP8_BLOCK.lora(4))
        stage.layers["q_proj"].register_forward_hook(lambda _, args, y: 2 * y + args[0].sum(-1, keepdim=True))
        stage.layers["v_proj"].register_forward_hook(lambda _, args, kwargs, y: y - len(kwargs), with_kwargs=True)
        found.append(run(stage, fusion))
        assert stage(*inputs(), fusion)[2] is None
    compare(found[1], found[0], 1e-6)


@pytest.mark.parametrize("recipe", [sk.FP8.lora(4), sk.FP8_BLOCK], ids=named)
def test_a_run_with_numerics_has_the_same_losses(recipe):
    losses = []
    for meters in ((), (sk.numerics(every=2),)):
        torch.manual_seed(0)
        config = sk.DecoderConfig(layers=1, width=128, heads=2, kv_heads=1, vocab=32, ffn=128, qk_norm=True)
        model = sk.Decoder(config, dtype=torch.bfloat16)
        sk.apply(model, recipe)
        sk.fuse(model, Fusion())
        ids = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids}
        session = sk.Session(model, [batch], recipe=None, optimizer=sk.AdamW(lr=1e-2), schedule=None, meters=meters)
        losses.append([session.step(batch).loss for _ in range(4)])
    assert losses[0] == losses[1]
    assert len(session.layers())


class Twice(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def backward_hook(stage):
    stage.layers["k_proj"].register_full_backward_hook(lambda *_: None)


def pre_hook(stage):
    stage.layers["k_proj"].register_forward_pre_hook(lambda _, args: (args[0] * 3,))


def subclass(stage):
    stage.layers["k_proj"].__class__ = Twice


def patched(stage):
    layer = stage.layers["k_proj"]
    layer.forward = lambda x: Linear.forward(layer, x) + 1


def parametrized(stage):
    class Halved(nn.Module):
        def forward(self, w):
            return w / 2

    nn.utils.parametrize.register_parametrization(stage.layers["k_proj"], "weight", Halved(), unsafe=True)


def wrapped(stage):
    stage.layers["k_proj"] = nn.Sequential(stage.layers["k_proj"], nn.Tanh())


def adapter_hook(stage):
    stage.layers["k_proj"].lora_A.register_forward_hook(lambda _, args, h: h * 5)


def norm_hook(stage):
    stage.norm.register_forward_hook(lambda _, args, y: y * 5)


def always(stage):
    stage.layers["k_proj"].register_forward_hook(lambda _, args, y: y * 5, always_call=True)


@pytest.mark.parametrize(
    "change", [backward_hook, pre_hook, subclass, patched, parametrized, wrapped, adapter_hook, norm_hook, always]
)
def test_what_is_more_than_our_layer_is_called_as_it_is(change):
    found = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.BF16.lora(4) if change is adapter_hook else sk.FP8_BLOCK)
        change(stage)
        found.append(run(stage, fusion))
    compare(found[1], found[0], 1e-6)


def test_layers_of_several_kinds_beside_each_other():
    """v in bfloat16, k frozen, q trained: codes of x are shared by those that quantize it alike."""
    found = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.FP8_ROWWISE.keep("v_proj"), bias=True)
        stage.layers["k_proj"].weight.requires_grad_(False)
        stage.layers["q_proj"].bias.requires_grad_(False)
        found.append(run(stage, fusion))
    compare(found[1], found[0], 1e-6)
    assert "dlayers.k_proj.weight" not in found[1]
    assert "dlayers.q_proj.bias" not in found[1]


def test_a_bias_that_trains_beside_one_that_does_not():
    found = []
    for fusion in (OFF, Fusion()):
        stage = Stage(sk.BF16, bias=True)
        stage.layers["q_proj"].bias.requires_grad_(False)
        found.append(run(stage, fusion))
    compare(found[1], found[0], 1e-6)


# -- codes of transposes in rows, as tensor cores read them


@pytest.fixture
def tensor_cores(monkeypatch):
    """Operands as for a device that multiplies codes itself; the products are emulated all the same."""
    monkeypatch.setattr(linear_gemms, "computes", lambda a, b, device: kind_of(a, b) is not None)


TRAINED = [sk.FP8, sk.FP8_CURRENT, sk.FP8_ROWWISE, sk.FP8_BLOCK, sk.MXFP8, sk.FP4.keep_last(0), *MIXED]
IN_ROWS = [(kind, recipe) for kind in ("normed", "gated", "plain") for recipe in TRAINED]
IN_ROWS += [("normed", r.lora(4)) for r in (sk.FP8, sk.FP8_BLOCK)] + [("normed", sk.FP8.store(sk.QNF4).lora(4))]


@pytest.mark.parametrize(("kind", "recipe"), IN_ROWS, ids=lambda v: v if isinstance(v, str) else named(v))
@pytest.mark.parametrize("fusion", [OFF, Fusion().without("joint"), Fusion(recompute="selective")], ids=str)
def test_operands_in_rows_have_the_same_codes(kind, recipe, fusion, operands, request):
    """Over two parts of a step: codes, scales and histories bit for bit, whether a transpose is a view or lies in rows."""
    runs = []
    for cores in (False, True):
        if cores:
            request.getfixturevalue("tensor_cores")
        stage, found = Stage(recipe, kind, torch.bfloat16), []
        for part in range(2):
            operands |= {name: [] for name in operands}
            gradients = run(stage, fusion, part)
            factors = [decoded(side) for pairs in operands.values() for pair in pairs for side in pair]
            found.append((factors, gradients))
        runs.append((found, scaling_state(stage)))
    (views, state), (rows, state_in_rows) = runs
    assert all(torch.equal(state[key], state_in_rows[key]) for key in state)
    for (factors, gradients), (others, other_gradients) in zip(views, rows, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(factors, others, strict=True))
        compare(other_gradients, gradients, 2**-7)  # a product of other strides may sum in another order


@pytest.mark.usefixtures("tensor_cores")
def test_slots_that_are_not_spaced_are_turned_afterwards(monkeypatch):
    monkeypatch.setattr(DelayedScales, "spaced", staticmethod(lambda slots: isinstance(slots, int) or len(slots) == 1))
    stage = Stage(sk.FP8, dtype=torch.bfloat16)
    expected = run(definition(stage, Fusion()), OFF)
    compare(run(stage, Fusion()), expected, 2**-7)


# -- what is kept


def kept_bytes(stage, fusion):
    """Bytes of distinct memory that backward finds, apart from parameters and the inputs."""
    first, second = inputs(torch.bfloat16)
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = stage(first, second, fusion)  # weights move as they are laid side by side
    held = [t for t in (first, second, outputs[0], *stage.parameters()) if t is not None]
    for t in held:
        kept.pop(t.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["normed", "gated"])
@pytest.mark.parametrize("recipe", [sk.BF16, sk.BF16.lora(4), sk.FP8.lora(4), sk.QFP8.lora(4), sk.FP8], ids=named)
def test_selective_recompute_keeps_less_and_changes_no_bit(recipe, kind):
    stage = Stage(recipe, kind, torch.bfloat16)
    tokens = SHAPE[0] * SHAPE[1]
    plain, less = (kept_bytes(copy.deepcopy(stage), Fusion(recompute=r)) for r in ("none", "selective"))
    # x in bfloat16, unless its codes serve alone
    assert plain - less == (0 if recipe == sk.FP8 else tokens * K * 2)
    numbers_kept = 3 * tokens * 4 * 2 if recipe.adapter else 0
    codes = tokens * K + 4 if recipe == sk.FP8 else 0
    assert less == numbers_kept + codes + (tokens * 4 if kind == "normed" else 0)
    assert plain <= kept_bytes(copy.deepcopy(stage), OFF)
    a, b = (run(copy.deepcopy(stage), Fusion(recompute=r)) for r in ("none", "selective"))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_frozen_layer_keeps_nothing():
    stage = Stage(sk.FP8_BLOCK, "plain", torch.bfloat16)
    stage.layers.requires_grad_(False)
    first, second = inputs(torch.bfloat16)
    kept = []

    def pack(t):
        kept.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage(first, second, Fusion(frozen="no"))
    weights = {p.data_ptr() for p in stage.parameters()}
    assert set(kept) <= weights


def test_a_second_backward_is_an_error():
    first, second = inputs()
    _, (q, *_), _ = Stage(sk.BF16)(first, second, Fusion())
    (dx,) = torch.autograd.grad(q.square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    _, (q, *_), _ = Stage(sk.BF16)(first, second, Fusion())
    q.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        q.sum().backward()


def test_a_weight_that_changed_before_backward_is_an_error():
    stage = Stage(sk.BF16)
    _, (q, *_), _ = stage(*inputs(), Fusion())
    with torch.no_grad():
        linears(stage)[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


# -- evaluation


@pytest.mark.parametrize(
    "recipe", [sk.BF16.lora(4), sk.FP8, sk.FP4.keep_last(0), sk.QFP8.lora(4), sk.QNF4.lora(4)], ids=named
)
def test_evaluation_touches_no_history_and_needs_no_gradient(recipe):
    stage = Stage(recipe).eval()
    before = scaling_state(stage)
    with torch.no_grad():
        expected = definition(stage, Fusion())(*inputs(), OFF)
        got = stage(*inputs(), Fusion())
    with torch.inference_mode():
        inside = stage(*inputs(), Fusion())
    for a, b, c in zip(expected[1], got[1], inside[1]):
        assert not b.requires_grad
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(c, a, rtol=1e-5, atol=1e-5)
    after = scaling_state(stage)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("storage", [sk.QFP8, sk.QFP4, sk.QNF4], ids=named)
def test_few_tokens_are_decoded_on_the_way(storage, monkeypatch, sums):
    stage = Stage(storage.lora(4), dtype=torch.bfloat16).eval()
    calls = []
    real = Quantized.times

    def times(W, x):
        calls.append(W.shape)
        return real(W, x)

    monkeypatch.setattr("surokit.product.decodes_on_the_way", lambda x, W: W.can_multiply)
    monkeypatch.setattr(Quantized, "times", times)
    with torch.no_grad():
        expected = stage(*inputs(torch.bfloat16), OFF)[1]
        assert len(calls) == 3
        calls.clear()
        sums.clear()
        got = stage(*inputs(torch.bfloat16), Fusion())[1]
    assert sums == B_LAST
    assert calls == ([(sum(ROWS), K)] if storage is sk.QFP8 else [(n, K) for n in ROWS])
    for a, b in zip(expected, got):
        torch.testing.assert_close(b, a, rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("recipe", [sk.BF16.lora(4), sk.FP8, sk.QNF4.lora(4)], ids=named)
def test_no_tokens(recipe):
    stage = Stage(recipe)
    first, second = (torch.zeros(2, 0, K, requires_grad=True) for _ in range(2))
    stream, parts, joint = stage(first, second, Fusion())
    assert [tuple(t.shape) for t in (stream, *parts)] == [(2, 0, n) for n in (K, *ROWS)]
    assert joint is None
    torch.cat(parts, -1).sum().backward()
    assert first.grad is not None


def test_off_is_the_separate_operations(monkeypatch):
    monkeypatch.setattr(stages._Stage, "apply", None)
    stage = Stage(sk.FP8)
    stage(*inputs(), OFF)
    with torch.no_grad():
        stage(*inputs(), OFF)


# -- through the kernels that a GPU runs


@pytest.fixture
def through_triton(monkeypatch):
    """CPU tensors are served by kernels/triton in the corrected interpreter."""
    from importlib import import_module

    from surokit import kernels
    from surokit.formats import FORMATS

    if not INTERPRETED:
        pytest.skip("with a GPU the kernels run on it")
    correct()
    from surokit.kernels.triton import quantize as triton_quantize

    used = set()

    def best(function, device):
        file = function.__module__.rpartition(".")[2]
        form = getattr(import_module(f"surokit.kernels.triton.{file}"), function.__name__)
        used.add(f"{file}.{function.__name__}")
        return form

    for module in ("surokit.nn.prologues", "surokit.nn.norm", "surokit.nn.swiglu"):
        monkeypatch.setattr(f"{module}.best", best)
    monkeypatch.setattr(kernels, "best", best)
    for name in ("quantize", "quantize_both"):
        function = getattr(triton_quantize, name)
        monkeypatch.setattr(kernels, name, lambda x, format, *rest, f=function: f(x, FORMATS[format], *rest))
    return used


@pytest.mark.parametrize(
    ("kind", "recipe", "from_codes"),
    [
        ("joint", sk.BF16.lora(4), False),
        ("normed", sk.FP8.lora(4), True),
        ("joint", sk.FP8, True),
        ("joint", sk.FP8_ROWWISE.lora(4), True),
        ("normed", sk.FP8_BLOCK.lora(4), True),
        ("normed", sk.FP8_BLOCK, False),  # both orientations of x in one pass
        ("joint", sk.FP8_BLOCK, True),
    ],
)
@pytest.mark.parametrize("cores", [False, True])
def test_through_the_kernels_of_a_gpu(recipe, kind, from_codes, cores, through_triton, request):
    if cores:
        request.getfixturevalue("tensor_cores")
    # the same kernels on both sides: whatever they round, they round alike
    expected = run(definition(Stage(recipe, kind, rows=(128, 128)), Fusion()), OFF)
    through_triton.clear()
    compare(run(Stage(recipe, kind, rows=(128, 128)), Fusion(recompute="selective")), expected, 2e-6)
    producer = "norm" if kind == "normed" else "swiglu"
    assert (f"{producer}.forward_quantized" in through_triton) == from_codes
    assert f"{producer}.backward" in through_triton


@pytest.mark.parametrize(("kind", "recipe"), [("normed", sk.FP8), ("gated", sk.FP8), ("gated", sk.FP8_BLOCK)])
@pytest.mark.usefixtures("tensor_cores", "through_triton")
def test_only_the_transposed_codes_are_kept(kind, recipe, operands):
    """They come from the kernel that makes x, in rows, and serve the gradients of all weights without a copy each."""
    stage = Stage(recipe, kind, torch.bfloat16, rows=(128,) * 3)
    tokens, scales = SHAPE[0] * SHAPE[1], 4 if recipe is sk.FP8 else 4 * K
    assert kept_bytes(copy.deepcopy(stage), Fusion()) == tokens * K + scales + (tokens * 4 if kind == "normed" else 0)
    run(stage, Fusion())
    x_t = {pair[1].codes.data_ptr(): pair[1] for pair in operands["grad_weight"]}
    assert len(x_t) == 1
    for product, side in (("forward", 0), ("forward", 1), ("grad_input", 0), ("grad_input", 1), ("grad_weight", 0)):
        assert all(pair[side].codes.is_contiguous() for pair in operands[product]), (product, side)
    (codes,) = x_t.values()
    assert codes.shape == (K, tokens)
    assert codes.codes.is_contiguous()
    if recipe is sk.FP8:
        assert torch.equal(codes.codes.float(), operands["forward"][0][0].codes.float().t())
