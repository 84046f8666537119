"""Weights that other libraries quantized: taken over bit for bit, with gradients as over the dequantized weight, or refused."""

import copy
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from peft import LoraConfig, get_peft_model
from peft import TaskType as PeftTask
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, PerRow, PerTensor, quantize_
from torchao.quantization.quantize_.workflows import Float8Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, Mxfp4GptOssMLP

import surokit as sk
from surokit.layers import recipe_layers
from surokit.nn.linear import Linear
from surokit.prequantized import library_of
from tests.refusals import refused
from tests.test_experts import made as moe

WIDTHS = (64, 160)  # of the tiny layers, neither a multiple of 128


class Net(nn.Module):
    """Two layers under names that adapters look for."""

    up_proj: Any
    down_proj: Any

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = nn.Linear(WIDTHS[0], WIDTHS[1], dtype=dtype)
        self.down_proj = nn.Linear(WIDTHS[1], WIDTHS[0], bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def layers(net) -> dict[str, Any]:
    return dict(net.named_children())


def bitsandbytes(kind, double, compute=None):
    def make(dtype=torch.float32):
        net = Net(dtype)
        for name, dense in layers(net).items():
            layer = bnb.nn.Linear4bit(
                dense.in_features,
                dense.out_features,
                dense.bias is not None,
                compute_dtype=compute,
                compress_statistics=double,
                quant_type=kind,
            ).to(dtype)
            layer.load_state_dict(dense.state_dict())
            setattr(net, name, layer.to("cpu"))
        return net

    def weight(layer):
        state = copy.copy(layer.weight.quant_state)
        shape, state.shape, state.dtype = (
            state.shape,
            (1, state.shape.numel()),
            torch.float32,
        )  # see tests/kernels/test_nf4.py
        return dequantize_4bit(layer.weight.data, state).view(shape)

    return make, weight


def transformers_fp8(block, scales=torch.float32):
    def make(dtype=torch.float32):
        net = Net(dtype)
        for name, dense in layers(net).items():
            with torch.device("meta"):
                layer = FP8Linear(
                    dense.in_features,
                    dense.out_features,
                    block,
                    scale_fmt="ue8m0" if scales != torch.float32 else "float",
                    has_bias=dense.bias is not None,
                )
            layer.to_empty(device="cpu")
            w = dense.weight.detach().float()
            rows, columns = block or w.shape
            grid = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
            scale = torch.rand(grid) + 0.5 if scales == torch.float32 else torch.exp2(torch.randn(grid).round())
            layer.weight.data = (w * 100 / spread(scale, w.shape, rows, columns)).to(torch.float8_e4m3fn)
            layer.weight_scale_inv.data = (scale if block else scale.view(())).to(scales)
            if dense.bias is not None:
                layer.bias.data = dense.bias.data.clone()
            setattr(net, name, layer.requires_grad_(False))
        return net

    def weight(layer):
        rows, columns = block or layer.weight.shape
        scale = layer.weight_scale_inv.data.float().view(-(-layer.weight.shape[0] // rows), -1)
        return layer.weight.data.float() * spread(scale, layer.weight.shape, rows, columns)

    return make, weight


def spread(scale, shape, rows, columns):
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def torchao(granularity):
    def make(dtype=torch.float32):
        net = Net(dtype)
        if granularity == "blocks":
            for layer in layers(net).values():
                w = Float8Tensor.from_hp(layer.weight.detach(), granularity=PerRow())
                codes, scale = w.qdata, torch.rand(-(-w.shape[0] // 32), w.shape[1] // 32) + 0.5
                layer.weight = nn.Parameter(Float8Tensor(codes, scale, [32, 32], dtype=dtype), requires_grad=False)
        else:
            quantize_(net, Float8WeightOnlyConfig())
            if granularity == "tensor":
                net = Net(dtype)
                for layer in layers(net).values():
                    w = Float8Tensor.from_hp(layer.weight.detach(), granularity=PerTensor())
                    layer.weight = nn.Parameter(w, requires_grad=False)
        return net

    def weight(layer):
        w = layer.weight
        rows, columns = w.block_size
        return w.qdata.float() * spread(w.scale.float().view(-(-w.shape[0] // rows), -1), w.shape, rows, columns)

    return make, weight


def compressed_tensors(preset):
    def make(dtype=torch.bfloat16):
        net = Net(dtype)
        config = QuantizationConfig(config_groups={"all": preset_name_to_scheme(preset, ["Linear"])})
        apply_quantization_config(net, config)
        for layer in layers(net).values():
            w = layer.weight.detach().float().abs()
            amax = w.amax(1, keepdim=True) if preset == "FP8_DYNAMIC" else w.amax().view(1)
            if preset == "FP8_BLOCK":
                amax = torch.rand(layer.weight_scale.shape) + w.amax()
            layer.weight_scale.data = (amax / 448).to(layer.weight_scale.dtype)
        ModelCompressor(quantization_config=config).compress_model(net)
        return net

    def weight(layer):
        w, scale = layer.weight.data.float(), layer.weight_scale.data.float()
        rows, columns = layer.quantization_scheme.weights.block_structure or (
            1 if scale.numel() > 1 else len(w),
            w.shape[1],
        )
        return w * spread(scale.view(-(-len(w) // rows), -1), w.shape, rows, columns)

    return make, weight


KINDS = {
    "nf4": bitsandbytes("nf4", False),
    "nf4 double": bitsandbytes("nf4", True),
    "fp4": bitsandbytes("fp4", False),
    "fp4 double": bitsandbytes("fp4", True),
    "fp8 blocks": transformers_fp8((128, 128)),
    "fp8 blocks of powers of two": transformers_fp8((32, 64), torch.float8_e8m0fnu),
    "fp8 tensor": transformers_fp8(None),
    "torchao rows": torchao("rows"),
    "torchao tensor": torchao("tensor"),
    "torchao blocks": torchao("blocks"),
    "compressed tensor": compressed_tensors("FP8"),
    "compressed channel": compressed_tensors("FP8_DYNAMIC"),
    "compressed blocks": compressed_tensors("FP8_BLOCK"),
}
each = pytest.mark.parametrize("kind", KINDS)


def storage_of(net):
    """What the net is stored in, read from a copy that a recipe took over."""
    library = library_of(net.up_proj)
    assert library is not None
    return library.read(net.up_proj).quantizer


def exact(net, weights, x, dy, adapters):
    """y and the gradient of x in float64, over the dequantized weights, with the adapters that the layers have."""
    x = x.double().requires_grad_()
    up, down = (weights[n].double() + delta(adapters[n]) for n in ("up_proj", "down_proj"))
    y = x + torch.tanh(x @ up.t() + net.up_proj.bias.double()) @ down.t()
    y.backward(dy.double())
    return y.detach(), x.grad


def delta(layer):
    scale = layer.lora_alpha / layer.lora_rank
    return (layer.lora_B.weight.double() @ layer.lora_A.weight.double()).detach() * scale


def codes_of(layer):
    weight = layer.weight.data
    return weight.qdata if type(weight) is Float8Tensor else weight


@each
def test_codes_are_taken_as_they_are(kind):
    make, decode = KINDS[kind]
    net = make()
    names = [name for name, _ in net.named_modules()]
    weights = {name: decode(layer) for name, layer in layers(net).items()}
    held = {name: codes_of(layer) for name, layer in layers(net).items()}
    objects = {name: id(layer) for name, layer in layers(net).items()}
    quantizer = storage_of(net)
    report = sk.apply(net, sk.BF16.store(quantizer).lora(rank=4))
    for name, layer in layers(net).items():
        assert type(layer) is Linear
        assert id(layer) == objects[name]
        # compressed-tensors cuts what it has padded to whole blocks
        assert layer.weight.data_ptr() == held[name].data_ptr() or not held[name].is_contiguous()
        assert torch.equal(layer.weight.flatten().view(torch.uint8), held[name].reshape(-1).view(torch.uint8))
        assert torch.equal(layer.dense_weight(torch.float32), weights[name])
        assert not any(p.requires_grad for n, p in layer.named_parameters() if "lora" not in n)
    assert [name for name, _ in net.named_modules() if "lora" not in name] == names
    assert report.notes[0].startswith("2 weights of ")
    assert report.notes[0].endswith("keep their codes and scales")
    assert all(row.came and row.storage == str(quantizer) for row in report.rows)


@each
def test_gradients_are_those_over_the_dequantized_weight(kind):
    make, decode = KINDS[kind]
    net = make()
    weights = {name: decode(layer) for name, layer in layers(net).items()}
    sk.apply(net, sk.BF16.store(storage_of(net)).lora(rank=4))
    x, dy = torch.randn(7, WIDTHS[0]), torch.randn(7, WIDTHS[0])
    for layer in layers(net).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    x = x.to(net.up_proj.bias.dtype).requires_grad_()
    y = net(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    y_exact, dx_exact = exact(net, weights, x.detach(), dy, layers(net))
    tolerance = 2e-2 if y.dtype == torch.bfloat16 else 1e-5
    assert (y.double() - y_exact).norm() < tolerance * y_exact.norm()
    assert (x.grad.double() - dx_exact).norm() < tolerance * dx_exact.norm()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in net.named_parameters() if "lora" in n)


@each
def test_another_storage_quantizes_again_and_says_what_it_costs(kind):
    make, decode = KINDS[kind]
    net = make()
    weights = {name: decode(layer) for name, layer in layers(net).items()}
    report = sk.apply(net, sk.QFP4.lora(rank=4))
    for name, layer in layers(net).items():
        assert layer.storage == sk.QFP4.storage is not None
        assert torch.equal(layer.dense_weight(), sk.quantize(weights[name], sk.QFP4.storage).dequantize(torch.bfloat16))
    assert "both roundings count" in report.notes[0]
    assert "keeps their codes" in report.notes[0]


@each
@pytest.mark.parametrize("recipe", [sk.BF16, sk.FP8_ROWWISE], ids=str)
def test_without_a_storage_they_are_decoded_and_may_train(kind, recipe):
    make, decode = KINDS[kind]
    net = make()
    weights = {name: decode(layer) for name, layer in layers(net).items()}
    report = sk.apply(net, recipe)
    dtype = net.up_proj.bias.dtype
    for name, layer in layers(net).items():
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight, weights[name].to(dtype))
        assert layer.weight.requires_grad
        assert {n for n, _ in layer.named_parameters()} == {"weight"} | ({"bias"} if layer.bias is not None else set())
    assert "decoded to" in report.notes[0]
    net(torch.randn(3, WIDTHS[0], dtype=dtype)).sum().backward()
    assert net.down_proj.weight.grad.abs().sum() > 0


def test_the_words_of_a_storage_keep_its_codes():
    """What the note says to type is what keeps the codes."""
    for kind, (make, _) in KINDS.items():
        note = sk.apply(make(), sk.QFP4.lora()).notes[0]
        said = note.partition("recipe.store(")[2].removesuffix(" keeps their codes").removesuffix(")")
        storage = eval(said, {"surokit": sk})
        again = sk.apply(make(), sk.BF16.store(storage).lora())
        assert again.notes[0].endswith("keep their codes and scales"), kind


def test_a_layer_that_a_cpu_evaluated_has_the_codes_that_it_had():
    """There bitsandbytes packs them in another way, and rounds absmaxes to bfloat16."""
    twin = KINDS["nf4 double"][0](torch.bfloat16)
    codes = twin.up_proj.weight.data.clone()
    state = twin.up_proj.weight.quant_state
    packed, packed_state = bnb.functional._convert_weight_packed_for_cpu(codes, copy.copy(state))
    twin.up_proj.weight.data, twin.up_proj.weight.quant_state = packed, packed_state
    sk.apply(twin, sk.BF16.store(sk.Quantizer(sk.NF4, sk.NFBlock(64))).lora())
    assert torch.equal(twin.up_proj.weight.flatten(), codes.flatten())
    assert twin.up_proj.weight_absmax.dtype == torch.float32


def test_products_stay_in_the_dtype_that_the_library_computed_in():
    make, _ = bitsandbytes("nf4", True, compute=torch.bfloat16)
    net = make(torch.float32)
    x = torch.randn(5, WIDTHS[0]).requires_grad_()
    expected = make(torch.float32).up_proj(x).detach()
    sk.apply(net, sk.QNF4.lora())
    y = net.up_proj(x)
    assert net.up_proj.compute_dtype == torch.bfloat16
    assert y.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float())
    assert (y - expected).norm() < 4e-3 * expected.norm()
    narrow = make(torch.bfloat16)
    sk.apply(narrow, sk.QNF4.lora())
    assert narrow.up_proj.compute_dtype is None
    sk.apply(net, sk.BF16)
    assert net.up_proj.compute_dtype is None


def test_a_second_recipe_works_as_on_any_model():
    net = KINDS["nf4 double"][0]()
    sk.apply(net, sk.QNF4.lora(rank=4))
    codes = net.up_proj.weight.data_ptr()
    sk.apply(net, sk.FP8_ROWWISE.store(sk.QNF4).lora(rank=4))
    assert net.up_proj.weight.data_ptr() == codes
    sk.apply(net, sk.BF16)
    assert net.up_proj.weight.requires_grad


# -- models of transformers

IDS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=96,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load_4bit(folder, dtype=torch.bfloat16):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def losses(model, adapters, steps=6):
    optimizer = torch.optim.AdamW(adapters, lr=5e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_model_of_bitsandbytes_trains_as_with_peft(folder):
    theirs = load_4bit(folder, torch.float32)
    ours = load_4bit(folder, torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(theirs, LoraConfig(PeftTask.CAUSAL_LM, r=4, lora_alpha=8, target_modules=targets))
    report = sk.apply(ours, sk.QNF4.lora(rank=4, alpha=8))
    assert report.converted == 14
    named = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                p.copy_(named[f"base_model.model.{name.replace('.weight', '.default.weight')}"])
    expected = losses(theirs.train(), [p for p in theirs.parameters() if p.requires_grad])
    found = losses(ours.train(), [p for p in ours.parameters() if p.requires_grad])
    assert expected[-1] < expected[0] - 0.3
    # the absmaxes are decoded in the same float32; the order of sums differs
    assert found == pytest.approx(expected, rel=2e-5)


def test_a_peft_model_over_bitsandbytes_keeps_its_adapters(folder):
    model = load_4bit(folder)
    model = get_peft_model(model, LoraConfig(PeftTask.CAUSAL_LM, r=4, target_modules=["q_proj", "up_proj"]))
    names = [name for name, _ in model.named_parameters()]
    report = sk.apply(model, sk.QNF4.lora(rank=4))
    assert report.converted == 14
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert set(names) <= {name for name, _ in model.named_parameters()}
    before = losses(model.train(), [p for p in model.parameters() if p.requires_grad], steps=3)
    assert before[-1] < before[0]


def test_the_trainer_takes_the_model(folder, tmp_path):
    """It refuses a model that calls itself quantized and has no adapters of PEFT."""
    model = load_4bit(folder)
    sk.apply(model, sk.QNF4.lora(rank=4))
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    arguments = TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=data).train()
    model.to("cpu")
    assert not hasattr(model.config, "quantization_config")


def test_fp8_modules_of_transformers_in_a_model(folder):
    """A layer of theirs once dropped the gradient of its input (transformers issue 46736): here it arrives."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dense = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(weight_block_size=(32, 32)))
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            Q = sk.quantize(dense[name], sk.Quantizer(sk.E4M3, sk.Block(32, 32, pow2=False)))
            layer.weight = nn.Parameter(Q.codes, requires_grad=False)
            layer.weight_scale_inv = nn.Parameter(Q.scales.contiguous(), requires_grad=False)
            dense[name] = Q.dequantize()
    twin = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).double()
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = dense[name].double()
    report = sk.apply(model, sk.BF16.store(sk.Quantizer(sk.E4M3, sk.Block(32, 32, pow2=False))).lora(rank=4))
    assert report.converted == 14
    embedded = [m.model.embed_tokens.weight.requires_grad_() for m in (model, twin)]
    for m in (model, twin):
        m(input_ids=IDS, labels=IDS).loss.backward()
    ours, exact = (w.grad.double() for w in embedded)
    assert (ours - exact).norm() < 1e-5 * exact.norm()


# -- experts


def fp8_experts(expert_dtype="fp8", block=(32, 32)):
    """Qwen3-MoE with transformers' FP8 modules, filled with codes of its own weights; and the model of the decoded ones."""
    model = moe("Qwen3-MoE")
    twin = copy.deepcopy(model)
    config = FineGrainedFP8Config(weight_block_size=block)
    config.expert_dtype = expert_dtype
    replace_with_fp8_linear(model, ["lm_head", "gate"], config)
    kind = (
        sk.Quantizer(sk.E2M1, sk.MX(32))
        if expert_dtype == "fp4"
        else sk.Quantizer(sk.E4M3, sk.Block(block[0], block[1], pow2=False))
    )
    for name, module in model.named_modules():
        theirs = twin.get_submodule(name)
        if isinstance(module, FP8Linear):
            Q = sk.quantize(theirs.weight.detach(), sk.Quantizer(sk.E4M3, sk.Block(block[0], block[1], pow2=False)))
            module.weight = nn.Parameter(Q.codes, requires_grad=False)
            module.weight_scale_inv = nn.Parameter(Q.scales.contiguous(), requires_grad=False)
            theirs.weight.data = Q.dequantize()
        elif isinstance(module, FP8Experts):
            for weight in ("gate_up_proj", "down_proj"):
                each = [sk.quantize(w, kind) for w in getattr(theirs, weight).detach()]
                codes, scales = (torch.stack([Q.parts[i].contiguous() for Q in each]) for i in (0, 1))
                held, held_scales = getattr(module, weight), getattr(module, f"{weight}_scale_inv")
                codes = codes.view(held.dtype)
                assert codes.shape == held.shape
                padded = torch.ones(held_scales.shape)
                padded[:, : scales.shape[1]] = scales.float()
                setattr(module, weight, nn.Parameter(codes, requires_grad=False))
                setattr(module, f"{weight}_scale_inv", nn.Parameter(padded.to(held_scales.dtype), requires_grad=False))
                getattr(theirs, weight).data = torch.stack([Q.dequantize() for Q in each])
    return model, twin, kind


class KernelTensor:
    """What gpt-oss' kernels hold: data in a layout of their own, here turned round, which knows how to turn it back."""

    def __init__(self, rows):
        self.storage = SimpleNamespace(data=rows.flip(-1), layout=self)

    @staticmethod
    def unswizzle_data(data):
        return data.flip(-1)


def mxfp4_experts():
    """gpt-oss as transformers holds it where its kernels are: MXFP4 in their layout."""
    model = moe("gpt-oss")
    twin = copy.deepcopy(model)
    kind = sk.Quantizer(sk.E2M1, sk.MX(32))
    for name, module in list(twin.named_modules()):
        if type(module).__name__ != "GptOssMLP":
            continue
        theirs, experts = module.experts, Mxfp4GptOssExperts(model.config)
        for weight in ("gate_up_proj", "down_proj"):
            each = [sk.quantize(w.t().contiguous(), kind) for w in getattr(theirs, weight).detach()]
            codes, scales = (torch.stack([Q.parts[i].view(torch.uint8) for Q in each]) for i in (0, 1))
            delattr(experts, weight)
            setattr(experts, weight, KernelTensor(codes.transpose(-1, -2)))
            said = SimpleNamespace(weight_scale=KernelTensor(scales.transpose(-1, -2)))
            setattr(experts, f"{weight}_precision_config", said)
            getattr(experts, f"{weight}_bias").data = getattr(theirs, f"{weight}_bias").data.clone()
            getattr(theirs, weight).data = torch.stack([Q.dequantize().t() for Q in each])
        model.set_submodule(name, Mxfp4GptOssMLP(model.get_submodule(name).router, experts))
    return model, twin, kind


@pytest.mark.parametrize(
    "make",
    [fp8_experts, lambda: fp8_experts(block=(128, 128)), lambda: fp8_experts("fp4"), mxfp4_experts],
    ids=["fp8", "fp8, gate and up in one block", "fp4", "mxfp4"],
)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "again"])
def test_quantized_experts_are_taken_over(make, keeps):
    model, twin, kind = make()
    recipe = sk.BF16.store(kind) if keeps else sk.QFP4
    report = sk.apply(
        model, recipe.keep("*self_attn*").lora(rank=2)
    )  # layers beside the experts have another format, or none
    rows = [row for row in report.rows if row.experts]
    assert len(rows) == 4
    assert all(row.came and row.storage and row.again is not keeps for row in rows)
    if not keeps:
        return
    for row in rows:
        layer: Any = dict(recipe_layers(model))[row.layer]
        dense = layer.dense_weight(torch.float32)
        assert torch.equal(dense.transpose(-2, -1) if layer.transposed else dense, twin.get_parameter(row.layer))
    embedded = [m.get_input_embeddings().weight.requires_grad_() for m in (model, twin)]
    losses: Any = [m.train()(input_ids=IDS, labels=IDS).loss for m in (model, twin)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    a, b = (w.grad.double() for w in embedded)
    assert (a - b).norm() < 1e-4 * b.norm()
    sk.apply(model, sk.BF16)
    assert model(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(losses[1].item(), rel=1e-2)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_kernels_tensors_without_scales_are_refused():
    model = moe("gpt-oss")
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = Mxfp4GptOssMLP(mlp.router, Mxfp4GptOssExperts(model.config))
    with refused(ValueError):
        sk.apply(model, sk.QFP8.lora())


# -- what is refused, and that nothing has changed then


def eight_bit():
    net = Net()
    layer = bnb.nn.Linear8bitLt(*WIDTHS, has_fp16_weights=False)
    layer.load_state_dict(net.up_proj.state_dict())
    net.up_proj = layer.to("cpu")
    return net


def of_integers():
    net = Net(torch.bfloat16)
    quantize_(net, Int8WeightOnlyConfig())
    return net


def not_quantized_yet():
    net = Net()
    net.up_proj = bnb.nn.Linear4bit(*WIDTHS)
    return net


def longer_blocks():
    net = KINDS["nf4"][0]()
    state = net.up_proj.weight.quant_state
    state.blocksize = 128
    return net


def other_table():
    net = KINDS["nf4"][0]()
    net.up_proj.weight.quant_state.code = torch.linspace(-1, 1, 16)
    return net


def other_float8():
    net = KINDS["fp8 blocks"][0]()
    net.up_proj.weight.data = net.up_proj.weight.data.float().to(torch.float8_e5m2)
    return net


def fewer_scales():
    net = KINDS["fp8 blocks"][0]()
    net.up_proj.weight_scale_inv.data = net.up_proj.weight_scale_inv.data[:1]
    return net


def not_compressed():
    net = Net(torch.bfloat16)
    apply_quantization_config(
        net, QuantizationConfig(config_groups={"all": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])})
    )
    return net


@pytest.mark.parametrize(
    "make",
    [
        eight_bit,
        of_integers,
        not_quantized_yet,
        longer_blocks,
        other_table,
        other_float8,
        fewer_scales,
        not_compressed,
    ],
    ids=lambda make: make.__name__,
)
def test_what_cannot_be_read_is_named_and_nothing_changes(make):
    net = make()
    before = [(name, type(m), [*vars(m)]) for name, m in net.named_modules()], [id(p) for p in net.parameters()]
    with refused(ValueError):
        sk.apply(net, sk.QNF4.lora())
    assert (
        [(name, type(m), [*vars(m)]) for name, m in net.named_modules()],
        [id(p) for p in net.parameters()],
    ) == before


def test_a_rule_leaves_what_cannot_be_read_and_the_report_says_so():
    net = eight_bit()
    report = sk.apply(net, sk.QNF4.keep("up_proj").lora(targets=("down_proj",)))
    assert [row.layer for row in report.rows] == ["down_proj"]
    left = report.not_converted().set_index("module")
    assert left.loc["up_proj", "why"] == "int8 codes, kept by a rule"
    assert type(net.up_proj) is bnb.nn.Linear8bitLt


def test_a_rule_that_keeps_a_layer_decodes_it():
    make, decode = KINDS["nf4"]
    net = make()
    weight = decode(net.up_proj)
    report = sk.apply(net, sk.QNF4.keep("up_proj").lora())
    assert torch.equal(net.up_proj.weight, weight)
    assert {row.layer: row.why for row in report.rows} == {"up_proj": "rule up_proj", "down_proj": ""}


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: sk.precision(model, sk.FP8).__enter__(),
        lambda model: sk.compare(model, {"input_ids": IDS, "labels": IDS}, sk.FP8),
        lambda model: sk.tune(model, {"input_ids": IDS, "labels": IDS}, recipes=[sk.FP8]),
    ],
    ids=["precision", "compare", "tune"],
)
def test_who_needs_a_recipe_first_says_so(ask):
    with refused(ValueError):
        ask(KINDS["nf4"][0]())


# -- what a stranger tried


def test_peft_over_a_quantized_base_keeps_it_frozen(folder):
    model = get_peft_model(load_4bit(folder), LoraConfig(PeftTask.CAUSAL_LM, r=4, target_modules=["q_proj"]))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    sk.apply(model, sk.FP8)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_a_subclass_with_a_forward_of_its_own_is_no_layer_of_the_library():
    class Doubling(bnb.nn.Linear4bit):
        def forward(self, x):
            return super().forward(x) * 2

    class Renamed(bnb.nn.LinearNF4):
        pass

    net = KINDS["nf4"][0]()
    net.up_proj.__class__ = Renamed
    assert sk.apply(net, sk.QNF4.lora()).converted == 2
    net = KINDS["nf4"][0]()
    net.up_proj.__class__ = Doubling
    with refused(ValueError):
        sk.apply(net, sk.QNF4.lora())
    report = sk.apply(net, sk.QNF4.keep("up_proj").lora(targets=("down_proj",)))
    assert type(net.up_proj) is Doubling
    assert not any("matches no layer" in note for note in report.notes)


def test_a_forward_that_stands_before_a_library_layer_is_left():
    net = KINDS["nf4"][0]()
    inner = net.up_proj.forward
    net.up_proj.forward = lambda x: inner(x) * 2
    report = sk.apply(net, sk.QNF4.lora(targets=("down_proj",)))
    left = report.not_converted().set_index("module")
    assert left.loc["up_proj", "why"] == "another replaced its forward"
    net(torch.randn(2, WIDTHS[0]))


def test_compressed_tensors_leaves_no_hook_that_decompresses():
    net = KINDS["compressed channel"][0]()
    assert net.ct_decompress_hook is not None
    sk.apply(net, sk.BF16.store(storage_of(net)).lora())
    codes = net.up_proj.weight.data_ptr()
    net(torch.randn(2, WIDTHS[0], dtype=torch.bfloat16))
    assert not hasattr(net, "ct_decompress_hook")
    assert net.up_proj.weight.data_ptr() == codes
    assert all("forward" not in vars(m) for m in net.modules())


def packed():
    net = Net(torch.bfloat16)
    config = QuantizationConfig(config_groups={"all": preset_name_to_scheme("W4A16", ["Linear"])})
    config.config_groups["all"].weights.group_size = 32
    apply_quantization_config(net, config)
    for layer in layers(net).values():
        layer.weight_scale.data.fill_(0.01)
    ModelCompressor(quantization_config=config).compress_model(net)
    return net


@pytest.mark.parametrize("make", [packed, of_integers], ids=["packed", "integers"])
def test_a_rule_leaves_what_a_known_library_holds_in_an_unknown_way(make):
    net = make()
    with refused(ValueError):
        sk.apply(net, sk.QNF4.lora())
    net.add_module("q_proj", nn.Linear(64, 64))
    held = {name: id(p) for name, p in net.up_proj.named_parameters()}
    report = sk.apply(net, sk.QNF4.keep("up_proj", "down_proj").lora(targets=("q_proj",)))
    assert [row.layer for row in report.rows] == ["q_proj"]
    assert {name: id(p) for name, p in net.up_proj.named_parameters()} == held
    assert {row.module for row in report.left} == {"up_proj", "down_proj"}


@pytest.mark.parametrize("extra", [torch.arange(WIDTHS[0]), torch.ones(4, dtype=torch.bool)], ids=["indices", "mask"])
def test_other_buffers_are_no_codes(extra):
    net = Net()
    net.up_proj.register_buffer("extra", extra)
    assert sk.apply(net, sk.FP8).converted == 2


def test_the_dtype_is_that_of_the_weight_before_it_was_quantized():
    for kind in ("nf4", "torchao rows"):
        net = KINDS[kind][0](torch.float32)
        net.up_proj.bias = None
        sk.apply(net, sk.BF16)
        assert net.up_proj.weight.dtype == torch.float32
        net(torch.randn(2, WIDTHS[0]))


def test_merging_and_back_keeps_the_dtype_of_the_products():
    net = bitsandbytes("nf4", True, compute=torch.bfloat16)[0](torch.float32)
    sk.apply(net, sk.QNF4.lora())
    sk.merge(net)
    sk.unmerge(net)
    assert net.up_proj.compute_dtype == torch.bfloat16
    sk.merge(net, requantize=True)
    assert net.up_proj.compute_dtype == torch.bfloat16


def test_a_config_that_others_hold_stays_as_it_is(folder):
    model = load_4bit(folder)
    config = model.config
    sk.apply(model, sk.QNF4.lora())
    assert hasattr(config, "quantization_config")
    assert not hasattr(model.config, "quantization_config")
    assert model.model.config is model.config


def test_dora_needs_numbers(folder):
    config = LoraConfig(PeftTask.CAUSAL_LM, r=4, target_modules=["q_proj"], use_dora=True)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), config)
    with refused(ValueError):
        sk.apply(model, sk.QNF4)
    assert sk.apply(model, sk.FP8).converted


def test_a_weight_that_a_rule_keeps_is_not_told_to_be_stored():
    report = sk.apply(KINDS["nf4 double"][0](), sk.QNF4.keep("up_proj").lora())
    note = next(note for note in report.notes if "decoded" in note)
    assert note.endswith("; the rule up_proj")
    assert note.startswith("1 weight of bitsandbytes")


def test_a_model_without_data_is_taken_over():
    net = KINDS["fp8 blocks of powers of two"][0]().to("meta")
    recipe = sk.BF16.store(sk.Quantizer(sk.E4M3, sk.Block(32, 64))).lora()
    assert sk.apply(net, recipe).converted == 2


def test_a_layer_alone_is_a_model_too():
    layer = nn.Linear(64, 64)
    sk.apply(layer, sk.QFP8.lora(targets=("",)))
    sk.apply(layer, sk.BF16)
    assert layer.weight.requires_grad
