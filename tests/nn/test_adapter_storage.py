"""An adapter over every storage and under every recipe: gradients pass, the base never moves, and merging can be undone."""

import copy
import weakref
from unittest import mock

import peft
import pytest
import safetensors.torch
import torch

import surokit as sk
from surokit import convert
from surokit.models import load, load_adapter, merge, save, save_adapter, unmerge
from surokit.nn.linear import Linear
from surokit.quantized import sqnr_db
from surokit.recipe import Lora
from tests.conftest import Tiny
from tests.models.families import write
from tests.refusals import refused

STORAGES = {
    "qfp8": sk.QFP8.storage,
    "qfp4": sk.QFP4.storage,
    "qnf4": sk.QNF4.storage,
    "nf4-single": sk.Quantizer(sk.NF4, sk.NFBlock(64)),
    "mxfp8": sk.Quantizer(sk.E4M3, sk.MX(32)),
    "mxfp4": sk.Quantizer(sk.E2M1, sk.MX(32)),
    "nv-tiles": sk.Quantizer(sk.E2M1, sk.NV(16, 16)),
}
TARGETS = ("up_proj", "down_proj")
every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
every_recipe = pytest.mark.parametrize(
    "recipe", [r for r in sk.recipes.values() if not r.storage], ids=lambda r: r.name
)


def raw(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


def gaussian(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(layer):
    return [raw(part) for part in (layer.stored.parts if layer.stored else (layer.weight,))]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b))


def layer_with(storage, n=48, k=80, rank=0, seed=1):
    layer = Linear(k, n, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(gaussian(n, k, seed=seed))
    if storage is not None:
        layer.store(storage)
    if rank:
        layer.add_adapter(Lora(rank, 8.0))
        with torch.no_grad():
            layer.lora_B.weight.copy_(gaussian(n, rank, seed=2))
    return layer


def train(model, batch, steps=3):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


@every_storage
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("n", "k"), [(48, 80), (33, 47), (128, 256)])
def test_the_gradient_passes_the_frozen_weight(storage, keep, n, k):
    layer = layer_with(storage, n, k)
    layer.keeps_decoded = keep
    x, dy = gaussian(2, 5, k, seed=3).requires_grad_(), gaussian(2, 5, n, seed=4)
    y = layer(x)
    y.backward(dy)
    w = layer.dense_weight()
    assert w.dtype == torch.bfloat16
    assert torch.equal(y.detach(), (x.detach().view(10, k) @ w.t()).view(2, 5, n))
    assert torch.equal(x.grad, (dy.view(10, n) @ w).view(2, 5, k))
    assert all(p.grad is None and not p.requires_grad for p in layer.parameters())


@every_storage
def test_the_base_is_bit_identical_after_training(storage, tiny, batch):
    sk.apply(tiny, sk.BF16.store(storage).lora(rank=4, targets=TARGETS))
    before = {name: bits(layer) for name, layer in linears(tiny).items()}
    others = {name: raw(p) for name, p in tiny.named_parameters() if not p.requires_grad}
    losses = train(tiny, batch, steps=4)
    assert losses[-1] < losses[0]
    assert all(same(before[name], bits(layer)) for name, layer in linears(tiny).items())
    assert all(torch.equal(others[name], raw(p)) for name, p in tiny.named_parameters() if not p.requires_grad)
    assert all(layer.lora_B.weight.abs().sum() > 0 for layer in linears(tiny).values() if layer.has_adapter)


@every_recipe
@every_storage
def test_any_storage_under_any_products(recipe, storage, tiny, batch):
    sk.apply(tiny, recipe.keep_last(0).store(storage).lora(rank=4, targets=TARGETS))
    for layer in linears(tiny).values():
        if layer.has_adapter:
            torch.nn.init.normal_(layer.lora_B.weight, std=0.1)
            assert layer.storage == storage
            assert (layer.precision is not None) == recipe.quantized_products
    before = {name: bits(layer) for name, layer in linears(tiny).items()}
    loss = tiny(**batch).loss
    loss.backward()
    assert loss.isfinite()
    for name, parameter in tiny.named_parameters():
        if "lora_" in name:
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None
    assert all(same(before[name], bits(layer)) for name, layer in linears(tiny).items())


# -- PEFT


@pytest.fixture
def ids():
    return torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))


@every_storage
def test_peft_loads_the_adapter_over_the_dequantized_weights(storage, tmp_path, ids):
    theirs = write(tmp_path / "base", "qwen3")
    recipe = sk.BF16.store(storage).lora(rank=4, alpha=12, targets=("q_proj", "v_proj", "down_proj"))
    ours = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=recipe)
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(ours, tmp_path / "adapter")
    logits = ours(ids).logits

    with torch.no_grad():
        for name, layer in linears(ours).items():
            theirs.get_submodule(name).weight.copy_(layer.dense_weight(torch.float32))
    plain = theirs(ids).logits
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    torch.testing.assert_close(wrapped(ids).logits, logits, atol=1e-4, rtol=1e-4)
    assert (logits - plain).abs().max() > 0.1

    again = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=sk.BF16.store(storage))
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(ids).logits, logits)


def test_an_adapter_trained_over_stored_weights_goes_round(tmp_path, ids):
    write(tmp_path / "base", "llama2")
    model = load(tmp_path / "base", device="cpu", recipe=sk.QNF4.lora(rank=4))
    train(model, {"input_ids": ids, "labels": ids}, steps=2)
    save_adapter(model, tmp_path / "adapter")
    fresh = load(tmp_path / "base", device="cpu", recipe=sk.QNF4.lora(rank=4))
    assert not torch.equal(fresh(ids).logits, model(ids).logits)
    load_adapter(fresh, tmp_path / "adapter")
    assert torch.equal(fresh(ids).logits, model(ids).logits)


# -- merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dense_weight_merges_and_comes_back_bit_for_bit(dtype):
    layer = layer_with(None).to(dtype)
    layer.add_adapter(Lora(4, 8.0))
    torch.nn.init.normal_(layer.lora_B.weight)
    x = gaussian(5, 80, seed=3).to(dtype)
    held, before, y = layer.weight, raw(layer.weight), layer(x)
    a, b = layer.lora_A, layer.lora_B
    merged = (layer.weight.double() + 2 * b.weight.double() @ a.weight.double()).to(dtype)
    layer.merge_adapter()
    torch.testing.assert_close(
        layer.weight.detach(), merged.detach(), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )
    assert not layer.has_adapter
    assert layer.can_unmerge
    assert layer.weight is held
    assert layer.state_dict().keys() == {"weight"}
    layer.unmerge_adapter()
    assert layer.weight is held
    assert torch.equal(raw(layer.weight), before)
    assert (layer.lora_A, layer.lora_B, layer.lora_alpha) == (a, b, 8.0)
    assert torch.equal(layer(x), y)
    assert not layer.can_unmerge


@every_storage
@pytest.mark.parametrize("requantize", [False, True])
def test_a_stored_weight_merges_and_its_codes_come_back(storage, requantize):
    layer = layer_with(storage, rank=4)
    x = gaussian(5, 80, seed=3)
    before, y = bits(layer), layer(x)
    names = set(layer.state_dict())
    exact = layer.dense_weight(torch.float32) + 2 * layer.lora_B.weight.float() @ layer.lora_A.weight.float()
    layer.merge_adapter(requantize=requantize)
    assert not layer.has_adapter
    if requantize:
        assert layer.storage == storage
        expected = sk.quantize(exact, storage)
        assert same(bits(layer), [raw(part) for part in expected.parts])
    else:
        assert layer.storage is None
        assert torch.equal(layer.weight, exact.bfloat16())
        assert not layer.weight.requires_grad
        assert set(layer.state_dict()) == {"weight"}
        assert sqnr_db(y, layer(x)) > 40
    layer.unmerge_adapter()
    assert layer.storage == storage
    assert same(bits(layer), before)
    assert set(layer.state_dict()) == names
    assert torch.equal(layer(x), y)


def test_merging_for_good_keeps_nothing():
    layer = layer_with(sk.QFP8.storage, rank=4)
    layer.merge_adapter(keep=False)
    assert not layer.can_unmerge
    with refused(ValueError):
        layer.unmerge_adapter()
    layer.merge_adapter()  # no adapter: nothing to do
    assert not layer.can_unmerge


def test_unmerging_under_another_adapter_is_refused():
    layer = layer_with(sk.QFP8.storage, rank=4)
    before = bits(layer)
    layer.merge_adapter()
    layer.add_adapter(Lora(2))
    with refused(ValueError):
        layer.unmerge_adapter()
    layer.remove_adapter()
    layer.unmerge_adapter()
    assert same(bits(layer), before)


def test_a_dense_weight_that_was_stored_since_comes_back_dense():
    layer = layer_with(None, rank=4)
    before = bits(layer)
    layer.merge_adapter()
    layer.store(sk.QFP4.storage)
    layer.unmerge_adapter()
    assert layer.storage is None
    assert same(bits(layer), before)


def test_a_merged_layer_can_be_copied():
    layer = layer_with(sk.QNF4.storage, rank=4)
    before = bits(layer)
    layer.merge_adapter()
    twin = copy.deepcopy(layer)
    twin.unmerge_adapter()
    assert same(bits(twin), before)
    assert layer.can_unmerge


@pytest.mark.parametrize("requantize", [False, True])
def test_a_whole_model_merges_saves_and_unmerges(requantize, tmp_path, ids):
    write(tmp_path / "base", "llama2")
    model = load(tmp_path / "base", device="cpu", recipe=sk.QFP8.lora(rank=4))
    train(model, {"input_ids": ids, "labels": ids}, steps=2)
    before, logits = {name: raw(t) for name, t in model.state_dict().items()}, model(ids).logits
    assert merge(model, requantize=requantize) == 21
    merged = model(ids).logits
    assert sqnr_db(logits, merged) > (15 if requantize else 30)
    save(model, tmp_path / "merged")
    again = load(tmp_path / "merged", device="cpu")
    assert {layer.storage for layer in linears(again).values()} == ({None, sk.QFP8.storage} if requantize else {None})
    assert torch.equal(again(ids).logits, merged)
    assert unmerge(model) == 21
    assert all(torch.equal(raw(t), before[name]) for name, t in model.state_dict().items())
    assert torch.equal(model(ids).logits, logits)


def test_models_without_anything_to_merge(tiny):
    sk.apply(tiny, sk.BF16)
    with refused(ValueError):
        merge(tiny)
    with refused(ValueError):
        unmerge(tiny)


def test_a_head_that_is_the_embedding_is_not_merged(tmp_path):
    write(tmp_path, "smollm2")
    model = load(tmp_path, device="cpu", recipe=sk.BF16.lora(rank=2, targets=("q_proj", "lm_head")))
    with refused(ValueError):
        merge(model)
    assert all(layer.has_adapter for name, layer in linears(model).items() if name.endswith(("q_proj", "lm_head")))


# -- state dicts


@every_storage
def test_state_dicts_load_strictly_both_ways(storage, batch):
    torch.manual_seed(0)
    recipe = sk.BF16.store(storage).lora(rank=4, targets=TARGETS)
    first, second = Tiny(), Tiny()
    for model in (first, second):
        sk.apply(model, recipe)
    train(first, batch, steps=2)
    for one, other in ((first, second), (second, first)):
        other.load_state_dict(one.state_dict(), strict=True)
        assert torch.equal(one(**batch).logits, other(**batch).logits)
    merge(first)
    unmerge(first)
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(first(**batch).logits, second(**batch).logits)


# -- decoding once or twice


@every_recipe
@every_storage
def test_decoding_once_gives_the_same_bits(recipe, storage, batch):
    runs = []
    for keep in (False, True):
        torch.manual_seed(0)
        model = Tiny()
        sk.apply(model, recipe.keep_last(0).store(storage).lora(rank=4, targets=TARGETS).decode_once(keep))
        torch.manual_seed(1)  # stochastic rounding draws from it
        losses = train(model, batch, steps=2)
        runs.append((losses, {name: raw(p) for name, p in model.named_parameters()}))
    (losses, weights), (kept_losses, kept_weights) = runs
    assert losses == kept_losses
    assert all(torch.equal(weights[name], kept_weights[name]) for name in weights)


def decodings(model, batch, monkeypatch):
    """How often a forward and a backward decode a weight; of four, the first wants no gradient of its input."""
    counts = [0]
    decode = sk.Quantized.dequantize

    def counting(self, dtype=None):
        counts[0] += 1
        return decode(self, dtype)

    monkeypatch.setattr(sk.Quantized, "dequantize", counting)
    model(**batch).loss.backward()
    monkeypatch.undo()
    return counts[0]


@every_storage
def test_decoding_once_decodes_once_and_is_counted(storage, tiny, batch, monkeypatch):
    recipe = sk.BF16.store(storage).lora(rank=4, targets=TARGETS)
    report = sk.apply(tiny, recipe)
    assert not any(row.decoded for row in report.rows)
    assert not any("decoded" in note for note in report.notes)
    assert decodings(tiny, batch, monkeypatch) == 4 + 3
    once = sk.apply(tiny, recipe.decode_once())
    assert decodings(tiny, batch, monkeypatch) == 4
    assert decodings(tiny, batch, monkeypatch) == 0  # a CPU keeps them
    assert [row.decoded for row in once.rows] == [32 * 64 * 2] * 4 + [0]
    assert "4 weights decoded once: up to 0.0 MiB more" in once.notes
    assert [row.nbytes for row in once.rows] == [row.nbytes for row in report.rows]


def test_scales_that_are_stored_lie_in_rows(tmp_path):
    """As files want them; those of blocks within a row are made in columns."""
    q = sk.Quantizer(sk.E4M3, sk.Block(1, 32))
    layer, expected = layer_with(q), sk.quantize(layer_with(None).weight, q)
    assert not expected.scales.is_contiguous()
    assert all(p.is_contiguous() for p in layer.parameters())
    assert torch.equal(layer.stored.dequantize(), expected.dequantize())
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "layer.safetensors")["weight_scale_inv"], expected.scales)


@every_storage
def test_what_is_kept_is_decoded_again_when_the_codes_change(storage):
    layer, other = layer_with(storage, 64, 128), layer_with(storage, 64, 128, seed=3)
    layer.keeps_decoded = True
    x = torch.randn(3, 128).to(torch.bfloat16)
    with torch.inference_mode():
        before = layer(x)
    kept = layer.kept
    assert torch.equal(layer(x), before)
    assert layer.kept is kept
    assert not kept.numbers.is_inference()
    layer.load_state_dict(other.state_dict())  # in place
    assert torch.equal(layer(x), other(x))
    layer.set_stored(layer_with(storage, 64, 128).stored)
    assert torch.equal(layer(x), before)
    assert copy.deepcopy(layer).kept is None
    assert layer.float().kept is None


@pytest.fixture(autouse=True)
def no_other_sessions(monkeypatch):
    """Those of other tests may live until the collector runs."""
    monkeypatch.setattr(convert, "_keepers", weakref.WeakKeyDictionary())


def test_a_session_on_a_cpu_decodes_once_where_there_is_room(tiny, batch, monkeypatch):
    recipe = sk.QNF4.lora(rank=4, targets=TARGETS)
    weights = 4 * 32 * 64 * 2 / 2**30  # decoded
    with mock.patch("surokit.hardware.machine.machine_gib", return_value=4 * weights):
        session = sk.Session(tiny, [batch], recipe=recipe, schedule=None)
    assert session.report is not None
    assert "4 weights decoded once: up to 0.0 MiB more; recipe.decode_once(False) saves them" in session.report.notes
    assert session.recipe == recipe  # no other numbers, so no other recipe
    assert session.decoded in session.report.notes
    session.step(batch)
    assert decodings(session.model, batch, monkeypatch) == 0
    sk.apply(session.model, recipe.decode_once(False))  # as the note says
    assert all(layer.kept is None for layer in linears(session.model).values())
    with mock.patch("surokit.hardware.machine.machine_gib", return_value=3.9 * weights):
        crowded = sk.Session(Tiny(), [batch], recipe=recipe, schedule=None)
    assert decodings(crowded.model, batch, monkeypatch) == 4 + 3
    told = sk.Session(Tiny(), [batch], recipe=recipe.decode_once(False), schedule=None)
    assert decodings(told.model, batch, monkeypatch) == 4 + 3


def test_sessions_share_the_room(tiny, batch, monkeypatch):
    recipe = sk.QNF4.lora(rank=4, targets=TARGETS)
    room = 4 * 32 * 64 * 2 * 1.5
    monkeypatch.setattr("surokit.convert.room_for_decoded", lambda: room)
    first = sk.Session(tiny, [batch], recipe=recipe, schedule=None)
    second = sk.Session(Tiny(), [batch], recipe=recipe, schedule=None)
    assert (bool(first.decoded), bool(second.decoded)) == (True, False)
    assert sk.Session(first.model, [batch], schedule=None).decoded, "a model is not held against itself"
    sk.apply(first.model, recipe.decode_once(False))
    assert sk.Session(Tiny(), [batch], recipe=recipe, schedule=None).decoded


@pytest.mark.parametrize("kind", ["made in inference mode", "borrowed"])
def test_what_may_change_unseen_is_not_kept(kind):
    with torch.inference_mode(kind == "made in inference mode"):
        layer = layer_with(sk.QNF4.storage, 64, 128)
    layer.keep_decoded(True)
    if kind == "borrowed":
        layer.weight.borrowed = True
    x = torch.randn(4, 128).bfloat16()
    before = layer(x)
    assert layer.kept is None
    layer.keep_decoded(False)
    assert torch.equal(layer(x), before)


def test_parameters_are_swapped_in():
    layer, other = (layer_with(sk.QNF4.storage, 64, 128) for _ in range(2))
    layer.keep_decoded(True)
    x = torch.randn(4, 128).bfloat16()
    layer(x)
    assert layer.kept is not None
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(other.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(layer(x), other(x))


def test_forward_holds_what_the_report_counts():
    torch.manual_seed(0)
    model = Tiny(width=64)
    held = []
    for recipe in (sk.QFP4, sk.QFP4.decode_once()):
        report = sk.apply(model, recipe.lora(rank=2, targets=TARGETS))
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        ids = torch.zeros(1, 4, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, labels=ids).loss
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held.append(sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in parameters))
        del loss
    # the first layer wants no gradient of its input, as nothing before it learns, so its weight is let go
    assert held[1] - held[0] == sum(row.decoded for row in report.rows[1:]) == 3 * 64 * 128 * 2


def test_codes_that_products_take_as_they_are_are_never_decoded(tiny, batch, monkeypatch):
    recipe = sk.FP8_BLOCK.store(sk.QFP8).lora(rank=4, targets=TARGETS).decode_once()
    report = sk.apply(tiny, recipe)
    assert not any(row.decoded for row in report.rows)
    assert decodings(tiny, batch, monkeypatch) == 0


def test_the_choice_travels_with_the_recipe():
    recipe = sk.QNF4.decode_once()
    assert "W: frozen in nf4 blocks of 64, double, decoded once" in str(recipe)
    assert sk.Recipe.from_dict(recipe.to_dict()) == recipe != sk.QNF4
    for choice in (sk.QNF4, recipe, recipe.decode_once(False)):
        assert sk.Recipe.from_dict(choice.to_dict()) == choice
    data = sk.QNF4.to_dict()
    del data["decoded_once"]
    for said, meant in ((None, sk.QNF4), (False, sk.QNF4), (True, recipe)):  # in older checkpoints
        older = data if said is None else {**data, "keeps_decoded": said}
        assert sk.Recipe.from_dict(older) == meant


@every_storage
@pytest.mark.parametrize(("n", "k"), [(48, 80), (33, 47), (1, 16), (257, 130), (300, 128)])
def test_bytes_are_known_beforehand(storage, n, k):
    layer = layer_with(storage, n, k)
    assert storage.nbytes(n, k) == layer.stored.nbytes == sum(p.nbytes for p in layer.parameters())


@every_storage
def test_the_plan_counts_what_is_stored(storage):
    config = sk.DecoderConfig(layers=2, width=128, heads=4, kv_heads=2, vocab=320, ffn=200)
    model = sk.Decoder(config)
    report = sk.apply(model, sk.BF16.store(storage))
    held = sum(row.nbytes for row in report.rows if row.storage)
    assert sk.plan(config, recipe=sk.BF16.store(storage)).memory["weights, stored quantized"].bytes == held


def test_the_plan_counts_what_is_kept():
    config = sk.DecoderConfig(layers=4, width=128, heads=4, kv_heads=2, vocab=320, ffn=200)
    report = sk.apply(sk.Decoder(config, dtype=torch.bfloat16), sk.QFP4.decode_once())

    def held(recipe, recompute="none"):
        planned = sk.plan(config, recipe=recipe, batch=1, length=64, recompute=recompute)
        return planned.memory["dequantized weight"].bytes

    once = held(sk.QFP4.decode_once())
    assert once == sum(row.decoded for row in report.rows)
    assert held(sk.QFP4.decode_once(), "full") == once / 4
    largest = 200 * 128 * 2
    assert held(sk.QFP4) == largest
    assert held(sk.FP8_BLOCK.store(sk.QFP8).decode_once()) == largest  # products take the codes: nothing is kept
