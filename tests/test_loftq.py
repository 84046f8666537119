"""LoftQ on models: applied, loaded, stored in PEFT's layout, resumed, forked and raced."""

import copy
import json
import shutil
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open

import surokit as sk
from surokit.convert import recipe_of
from surokit.layers import recipe_layers
from surokit.models import load, load_adapter, save, save_adapter
from surokit.nn.experts import ExpertsLinear
from surokit.racing import comparability
from surokit.racing.model_swap import share_frozen
from surokit.train.exporting import export
from tests.models.families import write
from tests.refusals import refused

SIZES = sk.DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, vocab=64, ffn=48, max_length=32, tied=False)
FITTED = sk.QFP8.lora(rank=4, init="loftq")
STORED = {"qfp8": sk.QFP8, "qfp4": sk.QFP4, "qnf4": sk.QNF4}
every_storage = pytest.mark.parametrize("recipe", STORED.values(), ids=STORED)


def made(dtype=torch.bfloat16, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sk.Decoder(SIZES, dtype=dtype)


def weights(model):
    """Each layer's weight with its adapter, as numbers."""
    found = {}
    layer: Any
    for name, layer in recipe_layers(model):
        w = layer.dense_weight(torch.float32)
        if layer.has_adapter:
            a, b = (m if isinstance(layer, ExpertsLinear) else m.weight for m in (layer.lora_A, layer.lora_B))
            w = w + layer.lora_alpha / layer.lora_rank * b.float() @ a.float()
        found[name] = w.detach()
    return found


def squared_error(model, original):
    return sum(float((w - original[name]).square().sum()) for name, w in weights(model).items())


def batches(count=3, seed=0):
    ids = torch.randint(64, (count, 2, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": each, "labels": each} for each in ids]


def values(model):
    return {name: p.detach().reshape(-1).view(torch.uint8).clone() for name, p in model.named_parameters()}


def alike(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@every_storage
def test_the_report_says_what_the_adapters_take_up(recipe):
    model, plain = made(), made()
    original = weights(model)
    sk.apply(plain, recipe.lora(rank=4))
    report = sk.apply(model, recipe.lora(rank=4, init="loftq"))
    share = 1 - squared_error(model, original) / squared_error(plain, original)
    assert f"LoftQ: 7 adapters of rank 4 take up {share:.1%} of the squared quantization error" in report.notes
    assert 0.25 < share < 0.6
    rows = [row for row in report.rows if row.adapter]
    assert all(row.taken_up is not None and 0.2 < row.taken_up < 0.8 for row in rows)
    assert [row.taken_up for row in report.rows if not row.adapter] == [None]
    assert report.frame()["taken_up"].dropna().tolist() == [row.taken_up for row in rows]
    # the codes are those of the recipe without LoftQ, and so are the layers' first draws
    base = {name for name in values(model) if "lora_" not in name}
    assert alike(*({name: values(m)[name] for name in base} for m in (model, plain)))
    assert all(torch.isfinite(p).all() for n, p in model.named_parameters() if "lora_" in n)


def test_it_is_the_same_each_time_and_again():
    first, second = made(), made()
    recipe = sk.QNF4.lora(rank=4, init="loftq")
    notes = [sk.apply(model, recipe).notes for model in (first, second)]
    assert alike(values(first), values(second))
    assert sk.apply(first, recipe).notes == notes[0]  # adapters that are there stay
    assert alike(values(first), values(second))


def test_a_layer_in_bfloat16_has_no_error_to_begin_with():
    model, plain = made(), made()
    recipe = sk.QFP4.keep("mlp.*").lora(rank=4)
    torch.manual_seed(3)
    sk.apply(plain, recipe)
    torch.manual_seed(3)
    report = sk.apply(model, recipe.lora(rank=4, init="loftq"))
    assert report.notes[-1].startswith("LoftQ: 4 adapters of rank 4 take up ")
    assert report.notes[-1].endswith("; 3 begin without it")
    adapters = [{n: v for n, v in values(m).items() if ".mlp." in n and "lora_" in n} for m in (model, plain)]
    assert len(adapters[0]) == 6
    assert alike(*adapters)
    none = sk.apply(made(), sk.QFP4.keep("layers.*").lora(rank=4, init="loftq"))
    assert none.notes[-1].startswith("LoftQ: no adapter began with a quantization error")


def test_another_storage_under_an_adapter_makes_its_figure_stale():
    model = made()
    sk.apply(model, sk.QFP8.lora(rank=4, init="loftq"))
    report = sk.apply(model, sk.QNF4.lora(rank=4, init="loftq"))
    assert all(row.taken_up is None for row in report.rows)
    assert all(row.again for row in report.rows if row.storage)


def stored_before():
    model = made()
    sk.apply(model, sk.BF16.store(sk.QNF4))
    return model


@pytest.mark.parametrize("of", [stored_before, lambda: sk.Decoder(SIZES, device="meta")], ids=["stored", "meta"])
def test_where_the_error_is_not_known(of):
    model = of()
    before = [(name, p.dtype) for name, p in model.named_parameters()]
    with refused(ValueError):
        sk.apply(model, sk.QNF4.lora(rank=4, init="loftq"))
    assert [(name, p.dtype) for name, p in model.named_parameters()] == before
    assert recipe_of(model) in (None, sk.BF16.store(sk.QNF4))


def test_a_folder_is_loaded_layer_by_layer(tmp_path):
    recipe = sk.QNF4.lora(rank=4, init="loftq")
    model = made()
    save(model, tmp_path / "base")
    loaded = load(tmp_path / "base", device="cpu", recipe=recipe)
    report = sk.apply(model, recipe)
    assert alike(values(loaded), values(model))
    assert sk.apply(loaded, recipe).notes == report.notes
    save(load(tmp_path / "base", device="cpu", recipe=sk.BF16.store(sk.QNF4)), tmp_path / "stored")
    with refused(ValueError):
        load(tmp_path / "stored", device="cpu", recipe=recipe)
    with refused(ValueError):
        load(tmp_path / "base", device="meta", recipe=recipe)


def test_each_expert_has_its_own(tmp_path):
    sizes: Any = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "vocab": 64, "ffn": 48, "tied": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = sk.Decoder(sk.DecoderConfig(**sizes, experts=3, experts_per_token=2), dtype=torch.bfloat16)
    save(model, tmp_path / "base")
    original, recipe = weights(model), sk.QFP4.lora(rank=4, init="loftq")
    report = sk.apply(model, recipe)
    up: Any = dict(recipe_layers(model))["model.layers.0.mlp.experts.gate_up_proj"]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    taken = []
    for expert, w in enumerate(original[name]):
        error = w - up.stored_of(expert).dequantize()
        S = torch.linalg.svdvals(error)
        left = (weights(model)[name][expert] - w).square().sum()
        assert float(left) == pytest.approx(float((S[4:] ** 2).sum()), rel=2e-3)
        taken.append(float(error.square().sum() - left))
    assert up.taken_up.before - up.taken_up.after == pytest.approx(sum(taken), rel=2e-3)
    assert report.notes[-1].startswith("LoftQ: 6 adapters of rank 4 take up ")
    assert alike(values(load(tmp_path / "base", device="cpu", recipe=recipe)), values(model))
    up.remove_adapter()
    assert up.taken_up is None


# -- PEFT


@every_storage
def test_peft_computes_the_same_over_the_dequantized_base(recipe, tmp_path):
    theirs = write(tmp_path / "base", "llama2")
    ours = load(tmp_path / "base", dtype=torch.float32, device="cpu")
    sk.apply(ours, recipe.lora(rank=4, alpha=12, init="loftq"))
    with torch.no_grad():
        layer: Any
        for name, layer in recipe_layers(ours):
            theirs.get_parameter(f"{name}.weight").copy_(layer.dense_weight(torch.float32))
    theirs.save_pretrained(tmp_path / "decoded")
    save_adapter(ours, tmp_path / "adapter", str(tmp_path / "decoded"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["init_lora_weights"] is True
    base = {name: p.clone() for name, p in theirs.named_parameters()}
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    ids = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(wrapped(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
    # PEFT has initialized nothing: A and B are ours, and the base is as it was
    held = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", ""): p
        for name, p in wrapped.named_parameters()
    }
    assert all(torch.equal(held[name], p) for name, p in base.items())
    assert all(torch.equal(held[name], p) for name, p in ours.named_parameters() if "lora_" in name)
    # and what it writes is read again, over a base that was stored in the same way
    wrapped.save_pretrained(tmp_path / "theirs")
    again = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=recipe)
    load_adapter(again, tmp_path / "theirs")
    assert torch.equal(again(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("other", [sk.QNF4, sk.QFP8, None], ids=str)
def test_an_adapter_over_another_storage_is_warned_of(other, tmp_path, recwarn):
    write(tmp_path / "base", "llama2")
    fitted, base = (
        load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=recipe)
        for recipe in (sk.QNF4.lora(rank=4, init="loftq"), other)
    )
    save_adapter(fitted, tmp_path / "adapter")  # warns too, of the base that it names
    load_adapter(base, tmp_path / "adapter")
    said = [str(each.message) for each in recwarn if "The adapter in" in str(each.message)]
    assert len(said) == (other is not sk.QNF4)
    assert all(
        "storing weights as nf4 blocks of 64" in each and "Load the model with the recipe" in each for each in said
    )


def test_an_adapter_that_names_the_weights_before_quantizing_is_warned_of(run, tmp_path):
    session, folder = run
    save(made(), tmp_path / "base")
    decoded = made()
    sk.apply(decoded, sk.BF16.store(sk.QFP8))
    sk.apply(decoded, sk.BF16)
    save(decoded, tmp_path / "decoded")
    fitted = load(tmp_path / "base", device="cpu", recipe=FITTED)
    for writing in (
        lambda: save_adapter(fitted, tmp_path / "adapter"),
        lambda: save_adapter(fitted, tmp_path / "adapter", base="somebody/base"),
        lambda: export(folder, tmp_path / "exported", base=str(tmp_path / "base")),
    ):
        with pytest.warns(UserWarning, match="is not known to hold them decoded"):
            writing()
    # and not over the decoded weights, nor where no base is named, nor of an adapter that makes up for nothing
    save_adapter(fitted, tmp_path / "adapter", base=str(tmp_path / "decoded"))
    export(folder, tmp_path / "exported", base=str(tmp_path / "decoded"))
    save_adapter(session.model, tmp_path / "adapter")
    plain = load(tmp_path / "base", device="cpu", recipe=sk.QFP8.lora(rank=4))
    save_adapter(plain, tmp_path / "adapter")


def test_what_an_adapter_was_made_for_stays_known(run, tmp_path):
    """Over a resumed run, a merge that is undone, and a file that is read and written again: else nobody would be warned."""
    _, folder = run
    resumed, merged = sk.Session.resume(folder, made(), data=batches()).model, made()
    sk.apply(merged, FITTED)
    written = save_adapter(merged, tmp_path / "fresh")
    sk.merge(merged)
    sk.unmerge(merged)
    again = made()
    sk.apply(again, sk.QNF4)
    with pytest.warns(UserWarning, match="The adapter in"):
        load_adapter(again, written)
    for name, model in {"resumed": resumed, "merged": merged, "again": again}.items():
        with safe_open(save_adapter(model, tmp_path / name) / "adapter_model.safetensors", "pt") as file:
            assert file.metadata()["surokit.storage"] == str(sk.QFP8.storage)


def test_an_adapter_that_peft_made_by_loftq_is_read(tmp_path):
    write(tmp_path / "base", "llama2")
    ours = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=sk.QNF4.lora(rank=4, init="loftq"))
    with pytest.warns(UserWarning, match="its base"):
        save_adapter(ours, tmp_path / "adapter")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=sorted(sk.Lora().targets),
        init_lora_weights="loftq",
        loftq_config=peft.LoftQConfig(loftq_bits=4),
        task_type="CAUSAL_LM",
    )
    config.save_pretrained(tmp_path / "adapter")  # as PEFT writes it
    assert '"loftq"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    again = load(tmp_path / "base", dtype=torch.float32, device="cpu", recipe=sk.QNF4)
    load_adapter(again, tmp_path / "adapter")
    assert alike(values(again), values(ours))


# -- sessions


def session_of(model, recipe, **options):
    return sk.Session(model, batches(), recipe=recipe, optimizer=sk.AdamW(lr=1e-2), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A session of four steps, and the folder of one that was saved after two."""
    folder = tmp_path_factory.mktemp("loftq") / "run"
    whole, half = session_of(made(), FITTED), session_of(made(), FITTED, run_dir=folder)
    assert alike(values(whole.model), values(half.model))
    whole.run(4)
    half.run(2)
    half.save()
    return whole, folder


def stored_otherwise():
    """A model with stored weights of which it is not noted by what recipe, as of one that another library quantized."""
    model = made(seed=6)
    sk.apply(model, sk.BF16.store(sk.QFP8))
    part = torch.nn.ModuleDict({"model": model.model, "lm_head": model.lm_head})
    again = made()
    again.model, again.lm_head = part["model"], part["lm_head"]
    return again


@pytest.mark.parametrize(
    "model", [lambda: None, lambda: made(seed=5), stored_otherwise], ids=["none", "other", "stored"]
)
def test_a_resumed_session_does_the_same(model, run, monkeypatch):
    whole, folder = run
    with monkeypatch.context() as patch:  # the checkpoint has the adapters: nothing is decomposed for them
        patch.setattr(torch.linalg, "eigh", None)
        again = sk.Session.resume(folder, model(), data=batches())
    assert again.recipe == FITTED
    again.run(2)
    assert alike(values(whole.model), values(again.model))


def test_a_run_goes_on_in_its_folder_and_is_exported(run, tmp_path, monkeypatch):
    whole, folder = run
    shutil.copytree(folder, tmp_path / "run")
    again = session_of(made(), FITTED, run_dir=tmp_path / "run", exist="resume")
    exported = export(folder, tmp_path / "adapter")
    fresh = made()
    sk.apply(fresh, sk.QFP8.lora(rank=4))
    load_adapter(fresh, exported)
    assert alike(values(again.model), values(fresh))
    again.run(2)
    assert alike(values(whole.model), values(again.model))


def test_a_fork_begins_with_the_error_of_the_weights_as_they_are():
    session = session_of(made(), "bf16")
    session.run(2)
    trained = weights(session.model)
    plain, fitted = session.fork(sk.QNF4.lora(rank=4)), session.fork(sk.QNF4.lora(rank=4, init="loftq"))
    assert squared_error(fitted.model, trained) < 0.8 * squared_error(plain.model, trained)
    twin = fitted.fork()
    assert alike(values(twin.model), values(fitted.model))
    for each in (fitted, twin):
        each.run(2)
    assert alike(values(twin.model), values(fitted.model))
    with refused(ValueError):  # the base of a session without an adapter is stored, and what that lost is gone
        session.fork(sk.BF16.store(sk.QNF4).lora(rank=4, targets=("q_proj",))).fork(sk.QNF4.lora(rank=4, init="loftq"))


def test_sessions_of_both_beginnings_share_the_codes():
    session = session_of(made(), "bf16")
    plain, fitted = session.fork(sk.QNF4.lora(rank=4)), session.fork(sk.QNF4.lora(rank=4, init="loftq"))
    frozen = sum(p.nbytes for p in fitted.model.parameters() if not p.requires_grad)
    assert share_frozen(fitted, [plain]) == frozen
    works = {"loftq": comparability.work_of(fitted), "ordinary": comparability.work_of(plain)}
    (difference,) = comparability.differences("loftq", works["loftq"], "ordinary", works["ordinary"])
    assert difference.name == "weights"


def test_a_copy_keeps_the_figure_and_merging_ends_it():
    model = made()
    recipe = sk.QFP8.lora(rank=4, init="loftq")
    note = sk.apply(model, recipe).notes[-1]
    again = copy.deepcopy(model)
    assert sk.apply(again, recipe).notes[-1] == note
    original, before = weights(made()), weights(model)
    sk.merge(model)
    assert all(torch.allclose(w, before[name], atol=1e-2) for name, w in weights(model).items())
    assert squared_error(model, original) < 0.9 * squared_error(stored_as(sk.QFP8), original)


def stored_as(recipe):
    model = made()
    sk.apply(model, recipe)
    return model
