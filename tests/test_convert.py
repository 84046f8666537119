"""apply: which layer gets what, why the others did not, and that nothing else changes."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import surokit as sk
from surokit import convert
from surokit.convert import recipe_of, roll_scales
from surokit.errors import CheckpointError
from surokit.kernels import native
from surokit.nn.linear import Linear
from tests.refusals import refused


def loss(model, batch):
    return model(**batch).loss


def test_apply_reports_every_layer(tiny):
    report = sk.apply(tiny, sk.FP8.keep("layers.0.down_proj"))
    rows = {row.layer: row for row in report.rows}
    assert set(rows) == {f"layers.{i}.{p}" for i in (0, 1) for p in ("up_proj", "down_proj")} | {"lm_head"}
    assert report.converted == 3
    assert rows["lm_head"].why == "rule lm_head"
    assert rows["layers.0.down_proj"].why == "rule layers.0.down_proj"
    assert rows["layers.0.up_proj"].products == "fp8"
    assert "fp8: 3 of 5 linear layers converted, emulated on cpu" in repr(report)
    assert "1 in bf16 (rule lm_head): lm_head" in repr(report)
    assert list(report.frame().columns) == ["layer", "shape", "products", "storage", "adapter", "why", "bytes"]
    assert "emulated on cpu" in report._repr_html_()


def test_parameters_hooks_and_keys_stay(tiny, batch):
    keys, parameters = list(tiny.state_dict()), [id(p) for p in tiny.parameters()]
    seen = []
    tiny.layers[0]["up_proj"].register_forward_hook(lambda *a: seen.append(1))
    sk.apply(tiny, sk.FP8)
    loss(tiny, batch).backward()
    assert list(tiny.state_dict()) == keys
    assert [id(p) for p in tiny.parameters()] == parameters
    assert seen == [1]
    assert type(tiny.layers[0]["up_proj"]) is Linear


def test_bf16_undoes_a_recipe(tiny, batch):
    before = loss(tiny, batch)
    sk.apply(tiny, sk.FP8_ROWWISE)
    assert loss(tiny, batch) != before
    sk.apply(tiny, "bf16")
    assert torch.equal(loss(tiny, batch), before)
    assert recipe_of(tiny) == sk.BF16


def test_precision_is_temporary(tiny, batch):
    before = loss(tiny, batch)
    sk.apply(tiny, sk.FP8_CURRENT)
    quantized = loss(tiny, batch)
    with sk.precision(tiny, "bf16"):
        assert torch.equal(loss(tiny, batch), before)
    assert torch.equal(loss(tiny, batch), quantized)
    with pytest.raises(RuntimeError, match="inside"), sk.precision(tiny, "bf16"):
        raise RuntimeError("inside")
    assert torch.equal(loss(tiny, batch), quantized)


def test_precision_tries_a_recipe_on_a_model_that_has_none(tiny, batch):
    plain = loss(tiny, batch)
    with sk.precision(tiny, "fp8-current"):
        tried = loss(tiny, batch)
    with sk.precision(tiny, sk.FP8_CURRENT.keep("layers.*")):
        assert torch.equal(loss(tiny, batch), plain)
    assert torch.equal(loss(tiny, batch), plain)
    sk.apply(tiny, sk.FP8_CURRENT)
    assert torch.equal(loss(tiny, batch), tried)
    assert not torch.equal(tried, plain)


def test_leaving_a_frozen_recipe_gives_the_weights_back(tiny, batch):
    tiny.embed.weight.requires_grad_(False)  # frozen by the user, and so it stays
    sk.apply(tiny, sk.QFP8.lora(rank=4))
    sk.apply(tiny, sk.FP8)
    loss(tiny, batch).backward()
    assert tiny.layers[0]["up_proj"].weight.grad is not None
    assert tiny.lm_head.weight.grad is not None
    assert tiny.embed.weight.grad is None


def test_another_storage_or_rank_is_not_passed_over(tiny):
    small_blocks = sk.Recipe("small", storage=sk.Quantizer(sk.E4M3, sk.Block(16, 16, pow2=False))).lora(rank=2)
    sk.apply(tiny, small_blocks)
    with refused(ValueError):
        sk.apply(tiny, sk.QFP8.lora(rank=8))
    assert tiny.layers[0]["up_proj"].storage == small_blocks.storage  # refused before anything changed
    sk.apply(tiny, sk.QFP8.lora(rank=2))
    assert tiny.layers[0]["up_proj"].storage == sk.QFP8.storage
    assert tiny.layers[0]["up_proj"].weight_scale_inv.shape == (1, 1)


def test_what_is_native_is_said_product_by_product(monkeypatch):
    monkeypatch.setattr(native, "available", lambda kind, device: kind in ("tensor", "row"))
    row, block = sk.Quantizer(sk.E4M3, sk.PerRow()), sk.Quantizer(sk.E4M3, sk.Block(1, 128))
    half = sk.Recipe(
        "half", forward=sk.Gemm(row, None), grad_input=sk.Gemm(row, row), grad_weight=sk.Gemm(block, block)
    )
    device = torch.device("cuda")
    assert convert.emulation(sk.FP8, device) == ""
    assert convert.emulation(half, device) == "grad_weight emulated; forward multiplied in bf16"
    assert convert.emulation(sk.FP4, device) == "emulated on cuda"


def test_stored_codes_are_multiplied_natively_where_that_is_possible(tiny, batch, monkeypatch):
    weight_only = sk.apply(tiny, sk.QFP8.lora(rank=4))
    assert weight_only.emulated == "stored in e4m3, products in bf16"
    expected = loss(tiny, batch)
    monkeypatch.setattr(convert, "computes", lambda a, b, device: True)  # the device's word; the numbers are emulated
    report = sk.apply(tiny, sk.QFP8.lora(rank=4))
    assert report.emulated == ""
    layer = tiny.layers[0]["up_proj"]
    assert layer.precision.recipe.forward == sk.FP8_BLOCK.forward
    assert not layer.precision.recipe.grad_weight.quantized
    native = loss(tiny, batch)
    assert 0 < abs(native - expected) < 0.02
    native.backward()
    assert layer.lora_B.weight.grad.abs().sum() > 0
    assert convert.recipe_of(tiny) == sk.QFP8.lora(rank=4)


def test_a_storage_freezes_the_base_and_trains_adapters_only(tiny, batch):
    before = loss(tiny, batch)
    report = sk.apply(tiny, sk.QFP8.lora(rank=4))
    trainable = {name for name, p in tiny.named_parameters() if p.requires_grad}
    assert trainable == {
        f"layers.{i}.{p}.lora_{x}.weight" for i in (0, 1) for p in ("up_proj", "down_proj") for x in "AB"
    }
    codes = tiny.layers[0]["up_proj"].weight
    assert codes.dtype == torch.float8_e4m3fn
    assert tiny.layers[0]["up_proj"].weight_scale_inv.shape == (1, 1)
    assert abs(loss(tiny, batch) - before) < 0.02
    snapshot = {n: p.detach().clone() for n, p in tiny.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in tiny.parameters() if p.requires_grad], lr=1e-2)
    first = loss(tiny, batch).item()
    for _ in range(5):
        loss(tiny, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss(tiny, batch).item() < first
    for name, parameter in tiny.named_parameters():
        if name in snapshot:
            assert torch.equal(parameter.view(torch.uint8), snapshot[name].view(torch.uint8))
    assert "stored in e4m3, products in bf16" in repr(report)
    dense = 2 * 2 * (32 * 64) * 2
    stored = sum(r.nbytes for r in report.rows if r.storage) - sum(
        p.nbytes for n, p in tiny.named_parameters() if "lora_" in n or n.endswith("bias")
    )
    assert stored == dense // 2 + 4 * 4  # one byte an element and a scale a block


def test_bf16_dequantizes_a_stored_weight(tiny, batch):
    sk.apply(tiny, sk.QFP8.lora(rank=4))
    quantized, weight = loss(tiny, batch), tiny.layers[0]["up_proj"].dense_weight()
    sk.apply(tiny, sk.BF16)
    assert torch.equal(tiny.layers[0]["up_proj"].weight, weight)
    assert abs(loss(tiny, batch) - quantized) < 2e-3  # a bias is now added before the product is rounded
    assert "weight_scale_inv" not in " ".join(tiny.state_dict())


def test_applying_twice_changes_nothing(tiny, batch):
    for recipe in (sk.FP8_ROWWISE, sk.QFP8.lora(rank=4)):
        sk.apply(tiny, recipe)
        once = loss(tiny, batch)
        sk.apply(tiny, recipe)
        assert torch.equal(loss(tiny, batch), once)


def test_storage_with_quantized_products(tiny, batch):
    recipe = sk.Recipe(
        "both", sk.FP8_ROWWISE.forward, sk.FP8_ROWWISE.grad_input, sk.FP8_ROWWISE.grad_weight, storage=sk.QFP8.storage
    ).lora(rank=4)
    sk.apply(tiny, recipe)
    loss(tiny, batch).backward()
    assert tiny.layers[0]["up_proj"].lora_B.weight.grad.abs().sum() > 0


def test_a_weight_shared_with_an_embedding_is_not_stored():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(16, 8), "up_proj": nn.Linear(8, 8), "lm_head": nn.Linear(8, 16, bias=False)}
    )
    model["lm_head"].weight = model["embed"].weight
    report = sk.apply(model, sk.QFP8.also("lm_head"))
    assert {r.layer: r.why for r in report.rows}["lm_head"] == "shares its weight with an embedding"
    assert model["lm_head"].weight is model["embed"].weight


def test_the_report_says_what_else_changed(tiny):
    assert sk.apply(tiny, sk.FP8.keep("layres.0.*")).notes == ("the rule layres.0.* matches no layer",)
    assert sk.apply(tiny, sk.FP8.keep("layers.0.*")).notes == ()
    sk.apply(tiny, sk.QFP8.lora(rank=2))
    notes = " ".join(sk.apply(tiny, sk.BF16).notes)
    assert "4 stored weights dequantized" in notes
    assert "parameters that an earlier recipe froze are trainable again" in notes
    assert "4 adapters stay" in notes


def test_small_layers_stay(tiny):
    report = sk.apply(tiny, sk.FP8.keep_small(64))
    assert report.converted == 0
    assert {r.why for r in report.rows} == {"rule lm_head", "fewer than 64 features"}


def test_bad_input_is_named(tiny):
    with refused(ValueError):
        sk.apply(tiny, "fp9")
    with refused(ValueError):
        sk.apply(nn.Embedding(4, 4), sk.FP8)
    with refused(ValueError):
        sk.apply(tiny, sk.QFP8.lora(targets=("query",)))
    assert all(p.requires_grad for p in tiny.parameters())


def test_a_transformers_model_takes_a_recipe(batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=32,
            num_key_value_heads=2,
        )
    )
    keys = list(model.state_dict())
    before = model(**batch).loss
    report = sk.apply(model, sk.FP8)
    after = model(**batch).loss
    after.backward()
    assert report.converted == 14
    assert list(model.state_dict()) == keys
    assert after != before
    assert abs(after - before) < 0.02


def test_a_peft_model_keeps_its_adapters_in_bf16(batch, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    report = sk.apply(model, sk.QFP8)
    assert not any("lora_" in row.layer for row in report.rows)
    assert not any(row.adapter for row in report.rows if row.layer.endswith("base_layer"))
    assert "save_pretrained() of this PEFT model writes its adapter" in repr(report)
    with refused(CheckpointError):
        sk.save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert sorted(path.suffix for path in (tmp_path / "theirs").iterdir()) == [".json", ".md", ".safetensors"]
    loss = model(**batch).loss
    loss.backward()
    gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    assert gradients
    assert all("lora_" in n for n in gradients)


def test_what_keeps_a_stored_model_depends_on_its_adapter():
    """save_pretrained is there in models of transformers, and would lose the scales."""
    for adapter, keeper in (
        (None, "surokit.save, which"),
        (sk.Lora(rank=2, targets=("up_proj",)), "surokit.save_adapter"),
    ):
        model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32, bias=False)})
        model.save_pretrained = lambda folder: None  # type: ignore[assignment]
        report = sk.apply(model, sk.Recipe("stored", storage=sk.QFP8.storage, adapter=adapter))
        assert f"keep this model with {keeper}" in repr(report)


def test_layers_that_a_format_would_slow_down_stay_bf16_and_say_so():
    """Much work for few numbers pays for quantizing them, little does not: by shape, on a GPU with float8 and one without."""
    model = torch.nn.ModuleDict(
        {"wide": torch.nn.Linear(4096, 14336, bias=False), "thin": torch.nn.Linear(64, 64, bias=False)}
    )
    report = sk.apply(model, sk.FP8.keep_slower(tokens=8192, gpu="H100"))
    wide, thin = report.rows
    assert wide.products == "fp8"
    assert wide.planned_speed
    assert thin.planned_speed
    assert 1.2 < wide.planned_speed < 2
    assert thin.products == "bf16"
    assert thin.planned_speed < 1
    assert thin.why == f"{thin.planned_speed:.2f} x the speed of bf16, planned for 8,192 tokens on H100"
    assert list(report.frame().columns)[-1] == "planned_speed"
    assert thin.why in repr(report)
    assert not sk.apply(model, sk.FP8.keep_slower(tokens=8192, gpu="A100")).converted  # emulated: never faster
    assert sk.apply(model, sk.QFP8.keep_slower(tokens=8192, gpu="A100").lora(targets=("wide",))).converted == 2
    with refused(ValueError):
        sk.apply(model, sk.FP8.keep_slower(tokens=8192, gpu="H9000"))
    with refused(ValueError):
        sk.FP8.keep_slower(tokens=0, gpu="H100")


@pytest.mark.parametrize("storage", [sk.QFP8, sk.QFP4, sk.QNF4], ids=str)
def test_a_weight_frozen_by_hand_stays_frozen(tiny, storage):
    by_hand = tiny.layers[0]["up_proj"]
    by_hand.weight.requires_grad_(False)
    sk.apply(tiny, storage.lora(rank=2))
    sk.apply(tiny, sk.BF16.lora(rank=2))  # dense again, and still frozen
    assert not tiny.layers[1]["up_proj"].weight.requires_grad
    sk.apply(tiny, storage.lora(rank=2))
    sk.apply(tiny, sk.BF16)
    frozen = [name for name, p in tiny.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.0.up_proj.weight"]


def as_it_is(model):
    parameters = {name: (id(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    layers = {name: (type(m), getattr(m, "precision", None)) for name, m in model.named_modules()}
    return parameters, layers, recipe_of(model)


def spoilt(model):
    sk.apply(model, sk.QFP4.lora(rank=2))
    model.float()


def of_integers(model):
    model.layers[1]["up_proj"].weight = nn.Parameter(torch.ones(64, 32, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("before", "recipe", "error"),
    [
        (None, sk.FP8.keep_slower(100, "H2000").lora(rank=2), ValueError),
        (sk.FP8, sk.FP4.keep_slower(100, "H2000").store(sk.QNF4).lora(targets=("query",)), ValueError),
        (spoilt, sk.QNF4.lora(rank=2), TypeError),
        (spoilt, sk.BF16, TypeError),
        (of_integers, sk.QFP8.lora(rank=2), ValueError),
    ],
)
def test_a_recipe_that_is_refused_changes_nothing(tiny, before, recipe, error):
    if callable(before):
        before(tiny)
    elif before is not None:
        sk.apply(tiny, before)
    expected = as_it_is(tiny)
    with pytest.raises(error):
        sk.apply(tiny, recipe)
    assert as_it_is(tiny) == expected


@pytest.mark.parametrize(
    ("recipe", "notes"),
    [
        (sk.FP4, ("the rule last 15% of blocks covers no block of 2",)),
        (sk.FP4.keep_last(share=0.5), ()),
        (sk.FP4.keep_last(1), ()),
        (sk.FP4.keep_first(0), ("the rule last 15% of blocks covers no block of 2",)),
    ],
)
def test_a_share_of_too_few_blocks_is_said(tiny, recipe, notes):
    assert sk.apply(tiny, recipe).notes == notes


@pytest.mark.parametrize("recipe", [sk.FP8, sk.MXFP8, sk.BF16], ids=str)
def test_dropped_histories_are_said(tiny, batch, recipe):
    sk.apply(tiny, sk.FP8)
    assert not sk.apply(tiny, sk.FP8).notes  # there were none yet
    loss(tiny, batch).backward()
    roll_scales(tiny)
    assert sk.apply(tiny, recipe).notes == (
        "the delayed-scaling histories are dropped (scaling_state() keeps them for load_scaling_state())",
    )
    assert not sk.apply(tiny, recipe).notes


# -- what has to be done first, and forwards that are not the class'


def compiled(model):
    return torch.compile(model, backend="eager")


def in_parts(model, one_process):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)


def replicated(model, one_process):
    return DistributedDataParallel(model)


def sharded(model, one_process):
    fully_shard(model, mesh=one_process)
    return model


def offloaded(model):
    return cpu_offload(model)


def on_two_devices(model):
    model.layers[1].to("meta")
    return model


def sharing(model):
    model.layers[1]["up_proj"].weight = model.layers[0]["up_proj"].weight
    return model


@pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning", "ignore:.*FSDP1:FutureWarning")
@pytest.mark.parametrize("change", [compiled, in_parts, replicated, sharded, offloaded, on_two_devices, sharing])
def test_what_has_to_be_done_first_is_said_and_nothing_changes(tiny, change, request):
    needs = [request.getfixturevalue("one_process")] if "one_process" in change.__code__.co_varnames else []
    model = change(tiny, *needs)
    expected = as_it_is(model)
    with refused(ValueError):
        sk.apply(model, sk.QFP8.lora(rank=2))
    assert as_it_is(model) == expected


@pytest.mark.parametrize("change", [replicated, sharded])
def test_products_alone_may_come_after_wrapping(tiny, batch, change, one_process):
    model = change(tiny, one_process)
    before = loss(model, batch)
    assert sk.apply(model, sk.FP8_ROWWISE).converted == 4
    after = loss(model, batch)
    assert after != before
    after.backward()


def test_accelerates_hooks_call_the_forward_of_the_recipe(tiny, batch):
    """They keep the forward that they found, and FP8 was silently off."""
    twin = copy.deepcopy(tiny)
    for layer in [m for m in tiny.modules() if isinstance(m, nn.Linear)]:
        add_hook_to_module(layer, ModelHook())
    report = sk.apply(tiny, sk.FP8_ROWWISE)
    sk.apply(twin, sk.FP8_ROWWISE)
    assert report.converted == 4
    assert torch.equal(loss(tiny, batch), loss(twin, batch))
    for layer in [m for m in tiny.modules() if isinstance(m, nn.Linear)]:
        remove_hook_from_module(layer)
    assert torch.equal(loss(tiny, batch), loss(twin, batch))


def test_a_forward_that_another_put_there_is_left_and_the_report_says_so(tiny, batch):
    layer = tiny.layers[0]["up_proj"]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 1.0
    report = sk.apply(tiny, sk.FP8_ROWWISE)
    assert type(layer) is nn.Linear
    assert "layers.0.up_proj" not in {row.layer for row in report.rows}
    left = report.not_converted().set_index("module")
    assert left.loc["layers.0.up_proj", "why"] == "another replaced its forward"
    assert "1 Linear (another replaced its forward): layers.0.up_proj" in repr(report)


def test_everything_with_weights_is_in_the_report(tiny):
    tiny.table = nn.Parameter(torch.zeros(7, 3))
    tiny.convolution = nn.Conv1d(4, 5, 3)
    tiny.norm = nn.LayerNorm(6)
    report = sk.apply(tiny, sk.QFP8.lora(rank=2))
    assert report.nbytes == sum(p.nbytes for p in tiny.parameters())
    left = report.not_converted().set_index("module")
    assert left.loc["convolution", "why"] == "no recipe knows a Conv1d"
    assert left.loc["norm", "why"] == "vectors"
    assert left.loc["embed", "why"] == "looked up, not multiplied"
    assert left.loc["lm_head", "why"] == "rule lm_head"
    assert left.loc["", "bytes"] == 7 * 3 * 4
    assert left["share"].sum() == pytest.approx(left["bytes"].sum() / report.nbytes)


# -- adapters by name


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (("up_proj",), 2),
        (("layers.0.up_proj",), 1),
        (("layers.1.*",), 2),
        (("*_proj",), 4),
        (("up_proj", "foo"), 2),
    ],
    ids=str,
)
def test_targets_are_ends_of_paths_or_patterns(tiny, targets, layers):
    report = sk.apply(tiny, sk.BF16.lora(rank=2, targets=targets))
    assert sum(bool(row.adapter) for row in report.rows) == layers
    trained = sum(p.numel() for p in tiny.parameters() if p.requires_grad)
    assert f"{layers} adapters of rank 2: {trained:,} numbers train" in report.notes
    assert ("the adapter's target foo matches no layer" in report.notes) is ("foo" in targets)


@pytest.mark.parametrize("options", [{"rank": 1.5}, {"rank": 0}, {"targets": None}, {"targets": (3,)}, {"targets": ()}])
def test_an_adapter_that_cannot_be_is_refused(options):
    with refused((ValueError, TypeError)):
        sk.BF16.lora(**options)
