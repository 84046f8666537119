"""Memory: exact terms against a model's own tensors, approximate ones against what its layers really keep."""

import itertools
from typing import Any

import pytest
import torch

from surokit.convert import apply
from surokit.kernels.reference import loss as loss_kernel
from surokit.models import Decoder, DecoderConfig
from surokit.nn.linear import Linear
from surokit.planner import memory as module
from surokit.planner import plan
from surokit.recipe import BF16, FP8, FP8_ROWWISE, QFP8
from surokit.train import AdamW, AdamW8bit

BATCH, LENGTH = 2, 256
CONFIG = DecoderConfig(layers=4, width=256, heads=8, kv_heads=4, vocab=1024, ffn=704, tied=False, max_length=LENGTH)


def model_of(recipe, dtype=torch.bfloat16, config=CONFIG):
    torch.manual_seed(0)
    model = Decoder(config, dtype=dtype)
    if recipe is not None:
        apply(model, recipe)
    return model


def kept_bytes(model):
    """Bytes of the storages that one forward with a loss keeps for backward, the model's own tensors left out."""
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    ids = torch.randint(CONFIG.vocab, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [None, FP8, FP8_ROWWISE, QFP8, BF16.lora(8)], ids=lambda r: r.name if r else "none")
def test_activations_are_what_the_layers_keep(recipe, dtype):
    model = model_of(recipe, dtype)
    planned = plan(model, recipe=recipe, batch=BATCH, length=LENGTH, dtype=dtype)
    # the fused loss keeps the gradients that its forward has made: the hidden states', and the head's where it trains
    trains_head = recipe is None or recipe.adapter is None
    loss = dtype.itemsize * CONFIG.width * (BATCH * LENGTH + (CONFIG.vocab if trains_head else 0))
    assert planned.memory["activations"].bytes == pytest.approx(kept_bytes(model) - loss, rel=0.05)


@pytest.mark.parametrize("recipe", [None, FP8, QFP8.lora(8)], ids=lambda r: r.name if r else "none")
@pytest.mark.parametrize("tied", [True, False])
def test_states_are_exact(recipe, tied):
    config = DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=320, ffn=200, tied=tied, qkv_bias=True)
    model = model_of(recipe, config=config)
    memory = plan(model, recipe=recipe, batch=1, length=8).memory
    held = sum(p.nbytes for p in model.parameters())
    weights = [t for t in memory.terms if t.name.startswith(("weights", "adapter"))]
    assert sum(t.bytes for t in weights) == held
    assert all(t.exact for t in weights)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert memory["gradients"].bytes == sum(p.nbytes for p in trained)
    assert memory["optimizer"].bytes == 2 * memory["gradients"].bytes
    fp32 = plan(model, recipe=recipe, state_dtype="fp32", master=True).memory
    assert fp32["optimizer"].bytes == 8 * sum(p.numel() for p in trained)
    assert fp32["master weights"].bytes == 4 * sum(p.numel() for p in trained)


@pytest.mark.parametrize(("recipe", "each"), [("qfp8", 1.0002), ("qfp4", 0.5625), ("qnf4", 0.5159)])
def test_scales_count_where_only_a_number_of_parameters_is_known(recipe, each):
    weights = plan(8e9, recipe=recipe).memory["weights"]
    assert weights.bytes == pytest.approx(8e9 * each, rel=1e-4)
    assert weights.how.endswith("bytes a parameter, scales included")
    assert plan(8e9).memory["weights"].how == "2 bytes a parameter"


def test_a_stored_weight_of_odd_sizes():
    layer = Linear(130, 257)
    assert QFP8.storage is not None
    layer.store(QFP8.storage)
    held = layer.weight.nbytes + sum(scales.nbytes for scales in layer.stored_scales)
    assert module.stored_bytes(QFP8.storage, 257, 130) == held


def test_the_losss_chunks_are_the_kernels():
    assert module.LOSS_ELEMENTS == loss_kernel.CHUNK_ELEMENTS
    assert module.LOSS_MIN_ROWS == loss_kernel.MIN_ROWS


def test_sharding_divides_what_its_stage_says():
    names = ("optimizer", "gradients", "weights")
    for zero in (0, 1, 2, 3):
        memory = plan(8e9, gpus=8, zero=zero).memory
        plain = plan(8e9).memory
        assert [plain[name].bytes / memory[name].bytes for name in names] == [8 if zero > i else 1 for i in range(3)]


def test_eight_billion_parameters_with_bf16_states():
    # 65 GB of weights, gradients and moments: the figure of a full fine-tune of an 8B model
    assert sum(t.bytes for t in plan(8.19e9).memory.terms if t.exact) / 1e9 == pytest.approx(65.5, abs=0.1)


def test_optimizers():
    states = {name: plan(8e9, optimizer=name).memory for name in ("adamw", "adamw8bit", "sgd")}
    assert states["adamw"]["optimizer"].bytes == 8e9 * 4
    assert states["adamw8bit"]["optimizer"].bytes == pytest.approx(8e9 * 2, rel=0.02)
    with pytest.raises(KeyError):
        states["sgd"]["optimizer"]

    class AdamW:
        state_dtype = torch.float32

    assert plan(8e9, optimizer=AdamW()).memory["optimizer"].bytes == 8e9 * 8


def test_a_full_fine_tune_of_eight_billion_parameters_on_one_gpu():
    """Qwen3-8B in 141 GB with 8-bit moments and bf16 weights that are rounded stochastically, and not with other moments."""
    config = {
        **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        "tie_word_embeddings": False,
    }
    run: dict[str, Any] = {"batch": 4, "length": 4096, "gpu": "H200", "recipe": FP8}
    planned = plan(config, optimizer=AdamW8bit(lr=1e-4, rounding="stochastic"), **run)
    assert planned.fits()
    assert planned.memory.gib * 2**30 / 1e9 == pytest.approx(139.3, abs=0.1)
    held = sum(planned.memory[name].bytes for name in ("weights", "gradients", "optimizer"))
    assert held / 8.19e9 == pytest.approx(6 + 8 / 256, rel=0.001)
    assert not plan(config, optimizer=AdamW(lr=1e-4), **run).fits()
    assert not plan(config, state_dtype="fp32", master=True, **{**run, "batch": 1}).fits()


def test_eight_bit_moments_are_what_the_optimizer_holds():
    model = Decoder(CONFIG)
    optimizer = AdamW8bit(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    # small tensors keep float32 moments, and each has its step
    assert plan(model, optimizer=optimizer).memory["optimizer"].bytes == pytest.approx(held, rel=0.01)


def test_fits():
    planned = plan(CONFIG, batch=1, length=128, gpu="A100")
    assert planned.fits()
    assert planned.fits(planned.memory.gib)
    assert not planned.fits(planned.memory.gib * 0.99)
    assert planned.memory.gib == pytest.approx(planned.memory.exact_gib + planned.memory.approximate_gib)
    assert plan(405e9).fits(80) is False
    with pytest.raises(ValueError, match="give batch= and length="):
        plan(CONFIG).fits(80)
    with pytest.raises(ValueError, match="give a config"):
        plan(1e9).fits(80)
    with pytest.raises(ValueError, match=r"give fits\(gib=80\)"):
        plan(CONFIG, batch=1, length=8).fits()
    with pytest.raises(ValueError, match="above zero"):
        planned.fits(0)


def test_logits_in_pieces_or_whole():
    wide = DecoderConfig(layers=1, width=64, heads=2, kv_heads=2, vocab=50_000, ffn=64)
    fused, whole = (plan(wide, batch=4, length=1024, logits=how).memory["logits"].bytes for how in ("fused", "whole"))
    assert whole == 4096 * 50_000 * 10
    assert fused < whole / 10


def test_the_kv_cache_counts_where_it_is_held():
    tokens = BATCH * LENGTH
    training = plan(CONFIG, batch=BATCH, length=LENGTH).memory
    generating = plan(CONFIG, batch=BATCH, length=LENGTH, training=False).memory
    assert training["KV cache"].bytes == generating["KV cache"].bytes == 2 * 4 * 4 * 32 * 2 * tokens
    assert (training["KV cache"].counted, generating["KV cache"].counted) == (False, True)
    assert generating.largest.name == "weights"
