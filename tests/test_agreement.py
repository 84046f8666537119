"""parity: stacks that agree are said to, each planted fault is named by its module, and nothing of the models is changed."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import surokit as sk
from surokit.models.checkpoint import load
from surokit.nn.delayed import amaxes_of
from surokit.torch_private import version_of
from tests.models.families import write
from tests.refusals import refused

IDS = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """(ours, transformers') of each family, loaded from one folder."""
    found = {}
    for family in ("llama2", "llama3", "biased-llama", "qwen3", "mistral-window"):
        folder = tmp_path_factory.mktemp(family)
        theirs = write(folder, family, attn_implementation="eager")
        found[family] = load(folder, dtype=torch.float32, device="cpu"), theirs
    return found


@pytest.fixture
def pair(stacks):
    """Return copies of a family's two stacks, which a test may spoil."""
    return lambda family="llama2": copy.deepcopy(stacks[family])


# -- agreement


@pytest.mark.parametrize("family", ["llama2", "llama3", "biased-llama", "qwen3", "mistral-window"])
def test_ours_and_transformers_agree(stacks, family):
    ours, theirs = stacks[family]
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert found.verdict.startswith("The models agree: the largest difference is ")
    assert "other numbers" not in found.verdict
    assert found.dtype == "float32"
    assert not found.parameters
    names = {row.module for row in found.rows}
    assert names >= {
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.2.self_attn.o_proj",
        "model.norm",
        "lm_head",
    }
    for row in found.rows:
        assert row.forward <= row.explained < 1e-4
        assert not row.gradient > row.gradient_explained
    assert not found.loss.parts
    assert not found.grad_norm.parts
    assert found.step[0] <= found.step[1]


@pytest.mark.parametrize("fused", ["ours", "theirs", "both"])
def test_plain_and_fused_agree(pair, fused):
    ours, theirs = pair("qwen3")
    for name, model in (("ours", ours), ("theirs", theirs)):
        if fused in (name, "both"):
            sk.fuse(model)
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert found.rows[-1].module == "lm_head"


def test_bfloat16_against_float32_is_explained_by_the_dtype(pair):
    ours, theirs = pair()
    found = sk.parity(ours, theirs.bfloat16(), BATCH)
    assert found.agree
    assert found.dtype == "bfloat16"
    assert 1e-3 < found.rows[-1].forward < found.rows[-1].explained < 0.5
    assert not found.parameters  # the whole model's dtype is no parameter's fault


def test_two_recipes_are_told_apart_by_their_noise(pair):
    ours, theirs = pair()
    sk.apply(ours, sk.FP8_CURRENT)
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert "but for their recipes, fp8-current against no recipe" in found.verdict
    last = found.rows[-1]
    assert last.forward <= last.explained < 1e-4
    assert 0.01 < last.recipe <= last.recipe_explained


def test_stored_weights_are_compared_as_they_are_stored(pair):
    ours, _ = pair()
    theirs = copy.deepcopy(ours)
    sk.apply(theirs, sk.QNF4)
    before = copy.deepcopy(ours.state_dict())
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert found.rows[-1].forward <= found.rows[-1].explained < 1e-4
    assert any("weights" in note for note in found.notes)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    with torch.no_grad():
        ours.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert "at model.layers.1.mlp.up_proj:" in sk.parity(ours, theirs, BATCH).verdict


def test_adapters_and_wrappers_are_matched_by_a_checkpoints_names(pair):
    peft = pytest.importorskip("peft")
    ours, theirs = pair()
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    found = sk.parity(ours, adapted, BATCH)
    assert found.agree
    assert {"model.layers.1.self_attn.q_proj", "lm_head"} <= {row.module for row in found.rows}
    assert any("lora_A" in note for note in found.notes)
    with torch.no_grad():
        adapted.base_model.model.model.layers[1].self_attn.q_proj.lora_B["default"].weight[0, 0] = 0.1
    assert "They part at model.layers.1.self_attn.q_proj:" in sk.parity(ours, adapted, BATCH).verdict


@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (torch.no_grad(), "float32"),
        (torch.inference_mode(), "float32"),
        (torch.autocast("cpu", torch.bfloat16), "bfloat16"),
    ],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_inside_of_others_contexts(pair, context, dtype):
    ours, theirs = pair()
    with context:
        found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert found.dtype == dtype
    assert found.grad_norm.a > 0


# -- faults that are planted


def turned(theirs):
    rotary = theirs.model.rotary_emb
    E = len(rotary.inv_freq)
    rotary.inv_freq.copy_(500_000.0 ** (-torch.arange(E) / E))
    return theirs


def short_sighted(theirs):
    """The mask of one layer hides one token more than the future."""

    def hook(module, args, kwargs):
        mask = torch.ones(20, 20, dtype=torch.bool).tril(-1)
        mask[0, 0] = True
        zero = torch.zeros(1, 1, 20, 20)
        return args, {**kwargs, "attention_mask": zero.masked_fill(~mask, -1e9)}

    theirs.model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return theirs


def far_sighted(theirs):
    def hook(module, args, kwargs):
        mask = torch.ones(20, 20, dtype=torch.bool).tril(1)
        return args, {**kwargs, "attention_mask": torch.zeros(1, 1, 20, 20).masked_fill(~mask, -1e9)}

    theirs.model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return theirs


def shifted(theirs):
    own = theirs.loss_function
    theirs.loss_function = lambda logits, labels, **rest: own(
        logits, nn.functional.pad(labels[:, 1:], (0, 1), value=-100), **rest
    )
    return theirs


def summed(theirs):
    own = theirs.loss_function
    theirs.loss_function = lambda logits, labels, **rest: own(logits, labels, **rest) * 38
    return theirs


def unbiased(theirs):
    theirs.model.layers[1].self_attn.k_proj.bias = None
    theirs.model.layers[1].self_attn.v_proj.bias = None
    return theirs


def coarse_norm(theirs):
    norm = theirs.model.layers[1].post_attention_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x.bfloat16()).bfloat16().float()
    return theirs


def norm_in_bfloat16(theirs):
    norm = theirs.model.layers[2].input_layernorm.bfloat16()
    norm.register_forward_hook(lambda module, args, y: y.bfloat16().float())
    return theirs


def changed(theirs):
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[3, 5] += 0.1
    return theirs


def sharpened(theirs):
    theirs.model.layers[0].self_attn.scaling *= 2
    return theirs


def cut(theirs):
    theirs.model.layers[1].mlp.register_forward_hook(lambda module, args, y: y.detach())
    return theirs


def damped(theirs):
    def hook(module, args, y):
        y.register_hook(lambda g: g * 1.01)

    theirs.model.layers[1].self_attn.v_proj.register_forward_hook(hook)
    return theirs


def other_eps(theirs):
    theirs.model.norm.variance_epsilon = 1e-2
    return theirs


def spoilt(theirs):
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    return theirs


def wide_window(theirs):
    theirs.config.sliding_window = 8  # a copy's layers share it
    return theirs


def rescaled(theirs):
    theirs.model.layers[1].register_forward_hook(lambda module, args, y: y * 1.0001)
    return theirs


def permuted(theirs):
    """Activation of the gate and of the other one, exchanged."""
    mlp = theirs.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
    return theirs


FAULTS = {
    turned: (
        "llama2",
        "They part at model.rotary_emb:",
        "cos and sin differ from position 1 on: rotary base 10,000 against 500,000",
    ),
    short_sighted: ("llama2", "They part at model.layers.1.self_attn:", "sees 0 to 1 in a and 0 alone in b"),
    far_sighted: ("llama2", "They part at model.layers.1.self_attn:", "token 0 sees 0 alone in a and 0 to 1 in b"),
    shifted: ("llama2", "They part at the loss:", "b's labels are shifted twice"),
    summed: ("llama2", "They part at the loss:", "b's loss is a sum over tokens"),
    unbiased: ("biased-llama", "They part at model.layers.1.self_attn.", "_proj.bias is only in a"),
    coarse_norm: (
        "llama2",
        "They part at model.layers.1.post_attention_layernorm:",
        "of float32 in a and of bfloat16 in b",
    ),
    norm_in_bfloat16: ("llama2", "They part at model.layers.2.input_layernorm:", "is float32 in a and bfloat16 in b"),
    changed: ("llama2", "They part at model.layers.1.mlp.up_proj:", "up_proj.weight differs by 0.01"),
    sharpened: ("qwen3", "They part at model.layers.0.self_attn:", "its scale of the scores is 0.25 against 0.5"),
    cut: ("llama2", "part backward at model.layers.1.mlp:", "no gradient arrives in b"),
    damped: ("llama2", "part backward at model.layers.1.self_attn.v_proj:", "its gradient differs by 0.0099"),
    other_eps: ("llama2", "They part at model.norm:", "its eps is 1e-06 against 0.01"),
    spoilt: ("llama2", "They part at model.layers.1.mlp.up_proj:", "numbers that are not finite in b"),
    wide_window: (
        "mistral-window",
        "They part at model.layers.0.self_attn:",
        "its window is 7 against 8; token 7 sees 1 to 7 in a",
    ),
    rescaled: ("llama2", "They part at model.layers.1:", "its output differs by 0.0001"),
    permuted: ("llama2", "They part at model.layers.0.mlp:", "its parts agree up to model.layers.0.mlp.down_proj"),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(pair, plant):
    family, where, why = FAULTS[plant]
    ours, theirs = pair(family)
    found = sk.parity(ours, plant(theirs), BATCH)
    assert not found.agree
    assert where in found.verdict
    assert why in found.verdict


@pytest.mark.parametrize("plant", [coarse_norm, norm_in_bfloat16, rescaled], ids=lambda plant: plant.__name__)
def test_which_model_has_the_fault_does_not_matter(pair, plant):
    family, where, _ = FAULTS[plant]
    ours, theirs = pair(family)
    assert where in sk.parity(plant(theirs), ours, BATCH).verdict


def test_a_cast_of_the_whole_model_rounds_its_rotary_frequencies(pair):
    """transformers keeps them in a buffer, which `.bfloat16()` takes along; over a long text the angles are wrong."""
    _, theirs = pair("llama3")
    ids = torch.randint(2, 96, (1, 60), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    cast = copy.deepcopy(theirs).bfloat16()
    found = sk.parity(theirs, cast, batch)
    assert "They part at model.rotary_emb:" in found.verdict
    assert "b holds its inverse frequencies in bfloat16" in found.verdict
    cast.model.rotary_emb = copy.deepcopy(theirs.model.rotary_emb)
    assert sk.parity(theirs, cast, batch).agree


@pytest.mark.parametrize("fused", [False, True])
def test_a_fault_inside_of_a_fused_block_is_named(pair, fused):
    ours, theirs = pair()
    with torch.no_grad():
        theirs.model.layers[2].mlp.gate_proj.weight *= 1.01
    for model in (ours, theirs):
        sk.fuse(model)
    assert "They part at model.layers.2.mlp.gate_proj:" in sk.parity(ours, theirs, BATCH).verdict


def test_a_fused_computation_that_differs_is_told_from_its_modules(pair, monkeypatch):
    ours, theirs = pair()
    sk.fuse(ours)
    from surokit.models import decoder

    own = decoder.after_norm

    def wrong(reader, norm, x, y, fusion, *context):
        stream, out = own(reader, norm, x, y, fusion, *context)
        seen = norm._forward_hooks
        return stream, out if seen else out * 1.001

    monkeypatch.setattr(decoder, "after_norm", wrong)
    found = sk.parity(ours, theirs, BATCH)
    assert "They part at model.layers.0:" in found.verdict
    assert "computed without fusion the two agree" in found.verdict


def test_a_product_that_is_worse_than_its_recipe_is_named(pair):
    ours, theirs = pair()
    sk.apply(ours, sk.FP8_CURRENT)
    ours.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, args, y: y * 1.2 if module.precision is not None else y
    )
    found = sk.parity(ours, theirs, BATCH)
    assert not found.agree
    assert "a computes less well than its recipe at model.layers.1.mlp.up_proj" in found.verdict


def test_a_gradient_that_is_worse_than_its_recipe_is_named(pair):
    ours, theirs = pair()
    sk.apply(ours, sk.FP8_CURRENT)
    layer = ours.model.layers[1].mlp.down_proj
    layer.weight.register_hook(lambda g: g * 1.2 if layer.precision is not None else g)
    found = sk.parity(ours, theirs, BATCH)
    assert "at model.layers.1.mlp.down_proj: its weights' gradient has" in found.verdict


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp4", "qfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_recipe_is_taken_for_a_fault(pair, recipe, dtype):
    ours, theirs = pair()
    ours.to(dtype)
    rotary = copy.deepcopy(theirs.model.rotary_emb)
    theirs.to(dtype).model.rotary_emb = rotary
    sk.apply(ours, recipe)
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree, found.verdict


def test_stored_weights_under_quantized_products(pair):
    """Both at once: a's weights are stored, and b is run with them under its own products."""
    ours, theirs = pair()
    sk.apply(ours, sk.FP8_CURRENT.store(sk.QNF4))
    sk.apply(theirs, sk.FP8_CURRENT)
    assert sk.parity(ours, theirs, BATCH).agree


def test_delayed_scaling_is_compared_and_keeps_its_histories(pair):
    ours, theirs = pair()
    sk.apply(ours, sk.FP8)
    ours(**BATCH).loss.backward()
    before = [t.clone() for t in amaxes_of(ours)]
    assert before
    assert "fp8 against no recipe" in sk.parity(ours, theirs, BATCH).verdict
    assert all(torch.equal(x, y) for x, y in zip(amaxes_of(ours), before, strict=True))


# -- batches


def test_padding_at_the_end_needs_no_mask_in_a_causal_model(pair):
    ours, theirs = pair()
    mask, labels = torch.ones_like(IDS), IDS.clone()
    mask[1, 12:], labels[1, 12:] = 0, -100
    found = sk.parity(ours, theirs, {"input_ids": IDS, "labels": labels, "attention_mask": mask})
    assert found.agree
    assert "30 labels count; 8 tokens hidden" in found.inputs[0]
    assert "a takes no attention_mask" in found.notes[0]


def test_padding_in_front_is_left_out_of_the_comparison(pair):
    """Of models that take a mask: what a hidden token's output is, says nothing."""
    _, theirs = pair()
    other = copy.deepcopy(theirs)
    mask, labels = torch.ones_like(IDS), IDS.clone()
    mask[1, :6], labels[1, :6] = 0, -100

    def spoil(module, args, y):
        y = y.clone()
        y[1, :6] += 1
        return y

    other.model.norm.register_forward_hook(spoil)
    batch = {"input_ids": IDS, "labels": labels, "attention_mask": mask}
    assert "They part at model.norm" in sk.parity(theirs, other, BATCH).verdict
    found = sk.parity(theirs, other, batch)
    assert found.agree, found.verdict
    assert all(row.forward <= row.explained for row in found.rows)
    assert "32 labels count; 6 tokens hidden" in found.inputs[0]
    assert "1 label is predicted by hidden tokens: left out of the loss" in found.notes
    assert int(labels[1, 6]) == int(IDS[1, 6])  # the caller's own stay


def test_outputs_are_compared_as_they_were_given_and_not_as_they_were_written_to(pair):
    ours, theirs = pair()

    mlp = theirs.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x.mul_(2))  # what the norm gave was right
    assert "They part at model.layers.1.mlp:" in sk.parity(ours, theirs, BATCH).verdict


def test_positions_that_start_anew_are_given_to_both(pair):
    ours, theirs = pair("qwen3")
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    starts = torch.tensor([[0, 7, 20], [0, 7, 20]])
    found = sk.parity(ours, theirs, {**BATCH, "position_ids": positions, "documents": starts})
    assert found.agree
    assert "positions given" in found.inputs[0]
    theirs.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "position_ids": kwargs["position_ids"] + 1}), with_kwargs=True
    )
    found = sk.parity(ours, theirs, {**BATCH, "position_ids": positions})
    assert "cos and sin differ from position 0 on: the positions are not the same" in found.verdict


def test_labels_that_were_shifted_before_are_suspected(pair):
    ours, theirs = pair()
    labels = nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    found = sk.parity(ours, theirs, {"input_ids": IDS, "labels": labels})
    assert found.agree
    assert "labels are the next tokens already" in found.inputs[1]
    assert len(sk.parity(ours, theirs, BATCH).inputs) == 1


def test_what_parameters_differ_in_is_listed(pair):
    ours, theirs = pair("llama3")
    theirs.model.norm.weight.requires_grad_(False)
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    found = sk.parity(ours, theirs, BATCH)
    assert "model.norm.weight trains only in a" in found.parameters
    assert any("is tied to another in a alone" in line for line in found.parameters)


# -- the answer


def test_frame_picture_and_text(pair):
    ours, theirs = pair()
    found = sk.parity(ours, sharpened(theirs), BATCH)
    frame = found.frame()
    assert list(frame.columns[:4]) == ["module", "class", "forward", "explained"]
    assert len(frame) == len(found.rows)
    assert frame["class"][list(frame["module"]).index("model.norm")] == "RMSNorm / LlamaRMSNorm"
    parts = frame[frame["forward"] > frame["explained"]]
    assert parts["module"].iloc[0] == "model.layers.0.self_attn.o_proj"
    figure = found.plot()
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "Output, relative difference",
        "Gradient, relative difference",
    ]
    assert repr(found).splitlines()[0] == found.verdict
    assert "model.layers.0.self_attn" in repr(found)
    assert found.verdict in found._repr_html_()
    assert "<table>" in found._repr_html_()
    with pytest.raises(AttributeError):
        found.verdict = ""  # type: ignore[misc]


def test_equal_models_are_equal_to_the_last_bit(pair):
    ours, _ = pair()
    found = sk.parity(ours, copy.deepcopy(ours), BATCH, step="sgd")
    assert found.verdict == "The models agree: every output is the same to the last bit."
    assert found.step[0] == 0
    assert all(row.gradient == 0 or math.isnan(row.gradient) for row in found.rows)
    assert found.plot()


def test_where_rounding_explains_nearly_all_it_says_that_little_was_tested(pair):
    _, theirs = pair()
    said = "that little was tested: compare float32 copies."
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.q_proj.weight *= 30  # a softmax that chooses one token makes much of a rounding
    coarse = copy.deepcopy(theirs).bfloat16()
    coarse.model.rotary_emb = copy.deepcopy(theirs.model.rotary_emb)
    found = sk.parity(theirs, coarse, BATCH)
    assert found.agree
    assert found.verdict.endswith(said)
    assert max(row.explained for row in found.rows) > 0.5
    assert said not in sk.parity(theirs, copy.deepcopy(coarse).float(), BATCH).verdict
    assert said not in sk.parity(coarse, copy.deepcopy(coarse), BATCH).verdict  # the same to the last bit


def test_gradients_that_no_parameter_has_in_both_are_told(pair):
    ours, _ = pair()
    frozen = copy.deepcopy(ours).requires_grad_(False)
    found = sk.parity(ours, frozen, BATCH)
    said = "The models agree forward; their gradients have no parameter in common"
    assert found.agree
    assert found.verdict == f"{said}: every output is the same to the last bit."
    frozen.model.norm.weight.requires_grad_()
    assert sk.parity(ours, frozen, BATCH).verdict.startswith("The models agree: ")
    ours.model.norm.weight.requires_grad_(False)  # each trains, and none in both
    sk.apply(frozen, sk.FP8_CURRENT)
    assert f"{said}. Forward they agree but for their recipes" in sk.parity(ours, frozen, BATCH).verdict


# -- nothing is changed


def state_of(model):
    """All that a user could see of a model."""
    hooks = [len(hook) for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks)]
    return {
        "parameters": [(name, id(p), version_of(p), p.requires_grad) for name, p in model.named_parameters()],
        "values": [p.detach().clone() for p in model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), version_of(p.grad)) for p in model.parameters()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "modes": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "precisions": [getattr(module, "precision", None) for module in model.modules()],
        "hooks": hooks,
        "amaxes": [t.clone() for t in amaxes_of(model)],
    }


def same(x, y):
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    if isinstance(x, dict):
        return all(same(x[key], y[key]) for key in x)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [None, Broken, KeyboardInterrupt], ids=["fine", "fails", "interrupted"])
def test_both_models_and_the_random_state_stay_as_they_are(pair, error):
    ours, theirs = pair("qwen3")
    sk.apply(ours, sk.FP8)
    ours(**BATCH).loss.backward()
    theirs.train()
    theirs.model.layers[1].eval()
    theirs.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    if error:
        calls: list[None] = []

        def hook(module, args, y):
            calls.append(None)
            if len(calls) == 2:  # in the disturbed run
                raise error

        theirs.model.layers[2].register_forward_hook(hook)
    before = state_of(ours), state_of(theirs)
    torch.manual_seed(7)
    random = torch.get_rng_state()
    if error:
        with pytest.raises(error):
            sk.parity(ours, theirs, BATCH)
    else:
        assert sk.parity(ours, theirs, BATCH).agree
    assert torch.equal(torch.get_rng_state(), random)
    assert same(before[0], state_of(ours))
    assert same(before[1], state_of(theirs))


def test_dropout_is_turned_off_for_both(pair):
    ours, theirs = pair()
    for layer in theirs.model.layers:
        layer.self_attn.attention_dropout = 0.5
    theirs.train()
    found = sk.parity(ours, theirs, BATCH)
    assert found.agree
    assert "compared in evaluation mode" in found.notes[0]
    assert theirs.training


# -- what is refused


def config(**changes):
    return sk.DecoderConfig(
        **{"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "vocab": 96, "ffn": 16, "max_length": 32, **changes}
    )


class Silent(nn.Module):
    """A model that gives no loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 4)

    def forward(self, input_ids, labels):
        return self.embed(input_ids)


REFUSED: dict[str, Callable[[Any, Any], tuple[Any, Any, Any]]] = {
    "one model": lambda a, b: (a, a, BATCH),
    "no model": lambda a, b: (a, "b", BATCH),
    "vocabulary": lambda a, b: (a, sk.Decoder(config(vocab=128)), BATCH),
    "device": lambda a, b: (a, sk.Decoder(config(), device="meta"), BATCH),
    "token": lambda a, b: (a, b, {"input_ids": IDS + 90, "labels": IDS}),
    "no batch": lambda a, b: (a, b, IDS),
    "no tensor": lambda a, b: (a, b, {**BATCH, "use_cache": False}),
    "no labels": lambda a, b: (a, b, {"input_ids": IDS}),
    "shapes": lambda a, b: (a, b, {"input_ids": IDS, "labels": IDS[:, 1:]}),
    "nothing counts": lambda a, b: (a, b, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}),
    "too long": lambda a, b: (a, b, {"input_ids": IDS.repeat(1, 2), "labels": IDS.repeat(1, 2)}),
    "padding in front": lambda a, b: (a, b, {**BATCH, "attention_mask": (torch.arange(20) > 3).expand(2, -1)}),
    "hidden tokens": lambda a, b: (a, b, {**BATCH, "attention_mask": torch.zeros_like(IDS)}),
    "unknown": lambda a, b: (a, b, {**BATCH, "weights": IDS}),
    "no loss": lambda a, b: (a, Silent(), BATCH),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(case):
    a, b = sk.Decoder(config()), sk.Decoder(config())
    with refused((TypeError, ValueError)):
        a, b, batch = REFUSED[case](a, b)
        sk.parity(a, b, batch)


def test_an_unknown_step_is_refused():
    with refused(ValueError):
        sk.parity(sk.Decoder(config()), sk.Decoder(config()), BATCH, step="lion")


# -- experts, weights of other libraries, numbers that rounding hides


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE"])
def test_our_experts_and_transformers_agree(family, tmp_path):
    from tests.test_experts import IDS, made

    theirs = made(family)
    theirs.save_pretrained(tmp_path)
    ours = sk.load(tmp_path, dtype=torch.float32)
    balance = ours.config.balance
    found = sk.parity(ours, theirs, {"input_ids": IDS, "labels": IDS})
    assert found.agree, found.verdict
    assert "other numbers" not in found.verdict
    assert any("without the load-balancing loss of a" in note for note in found.notes) is bool(balance)
    assert ours.config.balance == balance


def test_quantized_experts_are_told_apart_by_their_noise():
    from tests.test_experts import IDS, made

    theirs = made("Mixtral")
    ours = copy.deepcopy(theirs)
    sk.apply(ours, "fp8")
    found = sk.parity(ours, theirs, {"input_ids": IDS, "labels": IDS})
    assert found.agree, found.verdict
    assert "but for their recipes, fp8 against no recipe" in found.verdict
    assert all(held.precision is not None for held in ours.model.layers[0].mlp.experts.projections.values())


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss"])  # gpt-oss holds its weights transposed
@pytest.mark.parametrize("storage", [sk.QFP8, sk.QNF4], ids=lambda recipe: recipe.name)
def test_stored_experts_are_compared_as_they_are_stored(family, storage):
    from tests.test_experts import IDS, made

    dense = made(family)
    stored = copy.deepcopy(dense)
    sk.apply(stored, sk.BF16.store(storage))
    before = state_of(dense)
    batch = {"input_ids": IDS, "labels": IDS}
    for a, b in ((stored, dense), (dense, stored)):
        found = sk.parity(a, b, batch)
        assert found.agree, found.verdict
        assert all(row.forward <= row.explained < 1e-3 for row in found.rows)
        assert not any("experts" in line and "differs" in line for line in found.parameters)
    assert any(" weights, " in note and "was run with the stored ones" in note for note in found.notes)
    assert same(before, state_of(dense))
    with torch.no_grad():
        dense.model.layers[1].mlp.experts.down_proj[2].mul_(1.5)  # one expert
    verdict = sk.parity(dense, stored, batch).verdict
    assert "They part at model.layers.1.mlp.experts:" in verdict
    assert "model.layers.1.mlp.experts.down_proj differs by 0.5" in verdict


def test_noise_in_a_router_is_turned_off_for_both():
    from tests.test_experts import IDS, made

    calm = made("Mixtral")
    noisy = copy.deepcopy(calm)
    for layer in noisy.model.layers:
        layer.mlp.jitter_noise = 0.5  # of config.router_jitter_noise
    found = sk.parity(noisy, calm, {"input_ids": IDS, "labels": IDS})
    assert found.agree, found.verdict
    assert "compared in evaluation mode" in found.notes[0]
    assert noisy.training


def test_weights_of_other_libraries_are_taken_over_first():
    from tests.test_prequantized import KINDS

    net = KINDS["nf4"][0]()
    with refused(ValueError):
        sk.parity(net, net, {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
