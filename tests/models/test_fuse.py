"""fuse() on transformers' models: the same numbers, keys and outputs, undone without a trace, and honest about the rest."""

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

import surokit as sk
from surokit.models import foreign
from surokit.models.fuse import OFF, Fusion, fuse
from surokit.nn.joint import side_by_side
from surokit.nn.linear import Linear
from tests.models.families import FAMILIES, SIZES, write
from tests.refusals import refused

IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.rand(2, 24, generator=torch.Generator().manual_seed(1)) < 0.2, -100)


def family(name, dtype=torch.float32, **changes):
    """A random model of a family, in training mode; norms and biases are random too."""
    kind, special = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **special, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(*((0.5, 0.3) if parameter.ndim == 1 else (0.0, 0.2)))
    return model.to(dtype)


def trained(model, **options):
    """Loss, gradients by name, logits."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=LABELS, **options)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def error(ours, theirs):
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-12))


def assert_close(ours, theirs, bar=2e-5):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert error(ours[name], expected) <= bar, name


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_back(name):
    model = family(name)
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
    expected = trained(model), trained(model, position_ids=positions, use_cache=False)
    said = fuse(model)
    assert all(row.fused for row in said.rows)
    assert {row.kind for row in said.rows} == {"block", "attention", "MLP", "norm", "loss"}
    assert [type(m).__name__ for m in model.modules()] == [kind.__name__ for kind in kinds]
    assert list(model.state_dict()) == keys
    for layer in model.model.layers:
        assert side_by_side([p.weight for p in layer.self_attn.readers]) is not None
        assert side_by_side([p.weight for p in layer.mlp.readers]) is not None
    assert_close(trained(model), expected[0])
    assert_close(trained(model, position_ids=positions, use_cache=False), expected[1])
    assert repr(fuse(model, OFF)) == "not fused: every forward is the model's own"
    assert [type(m) for m in model.modules()] == kinds
    assert not any("fusion" in vars(m) for m in model.modules())
    assert_equal(trained(model), expected[0])


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_in_bfloat16_as_close_to_exact_as_theirs(name):
    exact = trained(family(name).to(torch.bfloat16).float())
    model = family(name, torch.bfloat16)
    theirs = trained(model)
    fuse(model)
    ours = trained(model)
    assert all(ours[key].dtype == t.dtype for key, t in theirs.items())
    ours, theirs = ({key: error(result[key], t) for key, t in exact.items()} for result in (ours, theirs))
    assert sum(ours.values()) < 1.05 * sum(theirs.values())


@pytest.mark.parametrize("part", ["norm", "gate", "joint", "adapters", "qk", "frozen"])
def test_each_part_off(part):
    model = family("qwen3")
    expected = trained(model)
    fuse(model, Fusion().without(part))
    assert_close(trained(model), expected)
    off: dict[str, Any] = {part: "no" if part == "frozen" else False}
    said = fuse(model, **off)
    assert part == "frozen" or part not in str(said.fusion).split()
    if part == "norm":
        assert {row.why for row in said.rows if row.kind == "norm"} == {"norm is off"}


@pytest.mark.parametrize("first", ["fuse", "apply"])
@pytest.mark.parametrize(
    "recipe", [sk.FP8_ROWWISE, sk.FP8, sk.QFP8.lora(rank=4), sk.QNF4.lora(rank=4)], ids=lambda r: r.name
)
def test_before_and_after_a_recipe(recipe, first):
    """As close to the exact model as unfused, and unfused again bit for bit."""
    results, keys = [], []
    exact = with_recipe(family("qwen3").to(torch.bfloat16).float(), sk.BF16.lora(rank=4) if recipe.adapter else sk.BF16)
    for fuses in (False, True):
        model = family("qwen3", torch.bfloat16)
        if fuses and first == "fuse":
            fuse(model)
        with_recipe(model, recipe)
        if fuses and first == "apply":
            fuse(model)
        results.append(trained(model))
        keys.append(list(model.state_dict()))
        if fuses and recipe is not sk.FP8:  # whose amaxes are those of the step before
            fuse(model, OFF)
            assert_equal(trained(model), results[0])
    assert keys[0] == keys[1]
    best = trained(exact)
    theirs, ours = ({key: error(result[key], t) for key, t in best.items()} for result in results)
    assert sum(ours.values()) < 1.25 * sum(theirs.values())


def with_recipe(model, recipe):
    torch.manual_seed(1)
    report = sk.apply(model, recipe)
    assert report.converted == (21 if recipe.quantized or recipe.storage else 0)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.has_adapter:
            torch.nn.init.normal_(layer.lora_B.weight, std=0.02)
    return model


@pytest.mark.parametrize("first", ["fuse", "peft"])
def test_with_peft_around(tmp_path, first):
    model = family("qwen3")
    if first == "fuse":
        fuse(model)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    fuse(wrapped, OFF)
    expected = trained(wrapped)
    said = fuse(wrapped)
    assert "q_proj, v_proj as peft computes it" in repr(said)
    assert_close(trained(wrapped), expected)
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(family("qwen3"), tmp_path)
    assert_close({"logits": again(IDS).logits.detach()}, {"logits": expected["logits"]})


def test_a_trainer_step(tmp_path):
    data = [{"input_ids": row, "labels": labels, "unused": 0} for row, labels in zip(IDS.tolist(), LABELS.tolist())] * 4
    losses = []
    for fuses in (False, True):
        model = family("llama2")
        if fuses:
            fuse(model)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            learning_rate=1e-3,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:2])
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        logged = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        losses.append([*logged, (trainer.evaluate()["eval_loss"], 0.0)])
        assert trainer.predict(data[:2]).predictions.shape == (2, 24, 96)
    assert len(losses[0]) == 4
    for ours, theirs in zip(losses[1], losses[0]):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_saved_as_ever(tmp_path):
    plain, fused = family("qwen3", torch.bfloat16), family("qwen3", torch.bfloat16)
    fuse(fused)
    fused(IDS)
    for model, name in ((plain, "plain"), (fused, "fused")):
        model.save_pretrained(tmp_path / name)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused", dtype=torch.bfloat16)
    assert_equal(again.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 100},
        {"num_items_in_batch": torch.tensor(30)},
        {"shift_labels": LABELS.roll(3)},
        {"ignore_index": int(LABELS[0, 5])},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"logits_to_keep": 24},
        {"attention_mask": torch.cat((torch.ones(2, 20), torch.zeros(2, 4)), 1).long()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_loss_as_transformers_takes_it(options):
    model = family("llama2")
    results = []
    for fuses in (False, True):
        if fuses:
            fuse(model)
        model.zero_grad()
        labels = LABELS if "ignore_index" not in options else IDS
        out = model(input_ids=IDS, labels=labels, use_cache=False, **options)
        loss = out[0]
        loss.backward()
        states = out.hidden_states if "output_hidden_states" in options else (loss,)
        results.append([loss.detach(), *states, *(p.grad.clone() for p in model.parameters())])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(results[1], results[0]):
        assert error(ours.detach(), theirs.detach()) < 2e-5


def test_logits_are_made_when_they_are_read():
    model = family("llama2")
    whole = model(input_ids=IDS, labels=LABELS)
    fuse(model)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert model(input_ids=IDS, labels=LABELS).logits is not None
    assert len(calls) == 1  # somebody looks at the head: it is called as ever
    model.lm_head._forward_hooks.clear()
    out = model(input_ids=IDS, labels=LABELS)
    assert list(out) == ["loss", "past_key_values"]
    assert out["loss"] is out.loss
    assert out.logits is out.logits is out["logits"]
    assert error(out.logits.detach(), whole.logits.detach()) < 1e-5
    assert out.get("logits") is out[1] is out[:2][1] is out.to_tuple()[1] is out.logits
    assert out[0] is out.loss
    assert out[2] is out.to_tuple()[2] is out.past_key_values
    out.logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    for other in (model(input_ids=IDS), model.eval()(input_ids=IDS, labels=LABELS)):
        assert "logits" in list(other)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_attention_is_the_models_own(how):
    model = family("mistral-window", attn_implementation=how)
    expected = trained(model)
    fuse(model)
    assert_close(trained(model), expected)
    if how == "eager":
        weights = model(IDS, output_attentions=True).attentions
        assert len(weights) == 3
        assert weights[0].shape == (2, 4, 24, 24)


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3"])
def test_the_same_text(name):
    model = family(name).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS[:, :6], **options)
    fuse(model)
    assert torch.equal(model.generate(IDS[:, :6], **options), expected)


def test_hooks_see_what_they_always_did():
    names = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", ""]
    shapes = []
    for fuses in (False, True):
        model = family("qwen3")
        if fuses:
            fuse(model)
        seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def hook(module, args, kwargs, output, name, seen):
            x = args[0] if args else kwargs["hidden_states"]
            y = output[0] if isinstance(output, tuple) else output
            seen[name] = (x.detach(), y.detach())

        for name in names:
            layer = model.model.layers[1].get_submodule(name)
            layer.register_forward_hook(
                lambda module, args, kwargs, output, name=name, seen=seen: hook(
                    module, args, kwargs, output, name, seen
                ),
                with_kwargs=True,
            )
        trained(model)
        shapes.append(seen)
    assert shapes[0].keys() == shapes[1].keys() == set(names)
    for name in names:
        for ours, theirs in zip(shapes[1][name], shapes[0][name]):
            assert error(ours, theirs) < 1e-5, name


def test_under_autocast_it_is_the_models_own():
    model = family("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(model)
    fuse(model, norm=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(trained(model), expected)


def test_no_other_model_changes():
    model, other = family("llama2"), family("llama2")
    forward, expected = LlamaMLP.forward, trained(other)
    state = torch.get_rng_state()
    fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert LlamaMLP.forward is forward
    assert type(other.model.layers[0].mlp) is LlamaMLP
    assert isinstance(model.model.layers[0].mlp, LlamaMLP)
    assert_equal(trained(other), expected)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_stay_fused_and_are_their_own(how):
    model = family("qwen3")
    fuse(model)
    expected = trained(model)
    other = how(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert_close(trained(other), expected, 1e-6)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.zero_()
    assert_close(trained(model), expected, 1e-6)
    fuse(other, OFF)
    assert type(other.model.layers[0].mlp).__mro__[1] is torch.nn.Module
    assert isinstance(model.model.layers[0].mlp, foreign.FusedMLP)


def test_what_it_does_not_know_is_left_alone():
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8, "pad_token_id": 0}
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes)).train()
    expected = trained(model)
    said = fuse(model)
    assert not any(row.fused for row in said.rows)
    lines = repr(said).splitlines()
    assert lines[0].startswith("fused: nothing")
    assert any("7 norm left alone (GemmaRMSNorm is not known)" in line for line in lines)
    assert any("3 MLP left alone (GemmaMLP with GELUTanh is not known)" in line for line in lines)
    assert any("3 attention left alone (GemmaAttention is not known)" in line for line in lines)
    assert_equal(trained(model), expected)
    assert said.frame().shape == (len(said.rows), 5)
    assert "left alone" in said._repr_html_()


def test_norms_and_mlps_of_other_families():
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": 0, "no_rope_layers": [1, 1, 1]}
    model = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**sizes)).train()
    expected = trained(model)
    said = fuse(model)
    assert {row.kind for row in said.rows if row.fused} == {"norm", "MLP"}
    assert_close(trained(model), expected)


def test_a_transformers_that_computes_otherwise(monkeypatch):
    """A class of a known name with another forward is told by its numbers."""
    foreign.computes_alike.cache_clear()
    theirs = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * theirs(self, x))
    try:
        model = family("llama2")
        said = fuse(model)
        assert {row.kind for row in said.rows if row.fused} == {"norm"}
        assert "this transformers computes LlamaAttention in another way than we know" in repr(said)
        assert "LlamaMLP with SiLUActivation is not known" in repr(said)
    finally:
        foreign.computes_alike.cache_clear()


def test_codes_are_kept_no_longer_than_they_are_wanted():
    model = family("llama2")
    sk.apply(model, sk.FP8_BLOCK.lora(rank=4))
    fuse(model)
    trained(model)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert any(layer.frozen for layer in layers)
    fuse(model, OFF)
    trained(model)
    assert not any(vars(layer).get("frozen") for layer in layers)


def test_a_model_that_is_not_fused_any_more_holds_nothing_of_ours():
    model = family("llama2")
    fuse(model)
    trained(model)
    fuse(model, OFF)
    assert b"surokit" not in pickle.dumps(model.model.layers[0].self_attn.q_proj)


def test_fields_it_does_not_have():
    model = family("llama2")
    with refused(TypeError):
        fuse(model, nrom=False)
    with refused(ValueError):
        fuse(model, recompute="half")
    assert type(model.model.layers[0].mlp) is LlamaMLP
    with refused(TypeError):
        fuse(model, None)  # type: ignore[arg-type]
    with refused(TypeError):
        fuse("llama")  # type: ignore[arg-type]


def test_loads_into_a_decoder_as_ever(tmp_path):
    theirs = write(tmp_path / "a", "qwen3")
    fuse(theirs)
    theirs.save_pretrained(tmp_path / "b")
    a, b = (sk.load(tmp_path / name, dtype=torch.float32, device="cpu") for name in "ab")
    assert torch.equal(a(IDS).logits, b(IDS).logits)


# torch's own tracing of an autograd.Function makes an instance of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_it_is_the_models_own_but_for_norms():
    model = family("qwen3", num_hidden_layers=1)
    expected = trained(model)["loss"]
    fuse(model)
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    hidden = compiled(IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.loss_function(model.lm_head(hidden), LABELS, 96), expected)


def test_a_forward_that_another_replaced():
    model = family("llama2")
    layer = model.model.layers[0]
    layer.mlp.forward = lambda x: 0 * x
    expected = trained(model)
    said = fuse(model)
    assert [row.module for row in said.rows if row.why == "another replaced its forward"] == ["model.layers.0.mlp"]
    assert_close(trained(model), expected)


def test_a_class_that_another_put_over_it():
    """As FSDP2 does, whose class knows ours only: undone, it computes what it did at first."""
    model = family("llama2")
    expected = trained(model)
    fuse(model)
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type(f"FSDP{type(mlp).__name__}", (type(mlp),), {})
    assert "1 part left alone (another changed its class after it was fused" in repr(fuse(model))
    fuse(model, OFF)
    assert type(mlp).__name__ == "FSDPLlamaMLP"
    assert_close(trained(model), expected, 1e-6)
