"""Mixtures of experts as transformers computes them: folders, logits, gradients, the load-balancing loss, recipes, a session."""

import copy
import io
import json
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import surokit as sk
from surokit.errors import CheckpointError
from surokit.models.checkpoint import load, save
from surokit.models.decoder import MLP, Decoder, DecoderConfig
from surokit.models.sparse import Routed, SparseMLP
from surokit.nn import experts as module_of_experts
from surokit.nn.experts import ExpertsLinear, GatedExperts, Routing, adopt_experts, is_experts
from surokit.train.exporting import export
from surokit.widgets.picture import expert_lines, picture, summary_text
from surokit.widgets.records_tail import Reader
from surokit.widgets.state import PanelState
from tests.models.families import SPARSE, write
from tests.refusals import refused
from tests.train.replay import NoReads, graphed

CONFIG = DecoderConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocab=64, ffn=48, max_length=64, tied=False, experts=4, expert_ffn=24
)
each = pytest.mark.parametrize("family", SPARSE)
KINDS = pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-some-dense"])


@pytest.fixture
def ids():
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


def made(**changes):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**{**vars(CONFIG), **changes}))


def loaded(folder, **options):
    return load(folder, **{"dtype": torch.float32, "device": "cpu", **options})


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- the config


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig])
def test_a_silent_config_means_what_transformers_means(kind):
    theirs = kind()
    silent = {name: getattr(theirs, name) for name in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
    silent |= {name: getattr(theirs, name) for name in ("num_attention_heads", "intermediate_size")}
    said = json.loads(theirs.to_json_string(use_diff=False))
    ours = DecoderConfig.from_hf(silent)
    ends = {"bos_id": None, "eos_id": None}  # which tokens end a text is not guessed, in no family
    assert ours == DecoderConfig(**{**vars(DecoderConfig.from_hf(said)), **ends})
    assert ours.experts == theirs.num_experts
    assert ours.experts_per_token == theirs.num_experts_per_tok
    assert ours.balance == theirs.router_aux_loss_coef
    back = kind(**ours.to_hf())
    for name in said.keys() - {"architectures", "head_dim", "bos_token_id", "eos_token_id", "dtype"}:
        assert getattr(back, name) == getattr(theirs, name), name
    assert DecoderConfig.from_hf(ours.to_hf()) == ours


def test_which_family_can_say_it():
    assert DecoderConfig(**{**vars(CONFIG), "expert_ffn": None}).to_hf()["model_type"] == "mixtral"
    normed = {**vars(CONFIG), "qk_norm": True, "dense_layers": (1,), "norm_topk": False}
    hf = DecoderConfig(**normed).to_hf()
    assert hf["model_type"] == "qwen3_moe"
    assert hf["mlp_only_layers"] == [1]
    assert DecoderConfig(**{**normed, "family": "qwen3_moe"}) == DecoderConfig.from_hf(hf)
    with refused(CheckpointError):
        CONFIG.to_hf()
    with refused(CheckpointError):
        DecoderConfig(**{**vars(CONFIG), "family": "llama"}).to_hf()


def test_a_dense_config_is_what_it_was():
    dense: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "ffn": 48}
    config = DecoderConfig(**dense)
    assert not any(config.is_sparse(i) for i in range(2))
    fields = vars(config)
    assert list(fields.values())[-6:] == [None, None, None, True, None, ()]
    before = [name for name in list(fields)[:-6] if name != "rope_scaling"]
    assert before[-1] == "family"
    assert hash(config) == hash(tuple(fields[name] for name in before))
    assert not any("expert" in name or "router" in name for name in config.to_hf())
    assert not any("router" in name for name, _ in Decoder(config).named_modules())


@pytest.mark.parametrize(
    "change",
    [
        {"experts": 0},
        {"experts_per_token": 5},
        {"balance": -1.0},
        {"expert_ffn": 2.5},
        {"dense_layers": (2,)},
        {"dense_layers": (0, 1)},
        {"experts": None},
        {"experts": None, "experts_per_token": None, "expert_ffn": None, "balance": 0.1},
    ],
    ids=str,
)
def test_numbers_of_experts_that_do_not_fit(change):
    with refused(ValueError):
        DecoderConfig(**{**vars(CONFIG), **change})


@pytest.mark.parametrize(
    ("family", "change"),
    [("mixtral", {"router_jitter_noise": 0.1}), ("qwen3-moe", {"decoder_sparse_step": 9})],
    ids=["noise", "dense"],
)
def test_configs_that_are_not_supported(family, change, tmp_path):
    write(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with refused(CheckpointError):
        loaded(tmp_path)


# -- as transformers


@each
def test_logits_loss_and_gradients_equal_transformers(family, tmp_path, ids):
    theirs = write(tmp_path, family)
    ours = loaded(tmp_path).eval()
    labels = ids.clone()
    labels[0, 5:9] = -100
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    a, b = ours(ids, labels=labels), theirs(ids, labels=labels)
    assert a.balance_loss is None
    torch.testing.assert_close(a.loss, b.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
    a.loss.backward()
    b.loss.backward()
    expected = gradients(theirs)
    for name, found in gradients(ours).items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-4)


@each
def test_the_load_balancing_loss_equals_transformers(family, tmp_path, ids):
    theirs = write(tmp_path, family, router_aux_loss_coef=0.3).train()
    ours = loaded(tmp_path).train()
    assert ours.config.balance == 0.3
    a, b = ours(ids, labels=ids), theirs(ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(a.balance_loss, b.aux_loss, atol=1e-5, rtol=1e-5)
    # the loss that is reported is the language model's, its gradient is that of both
    torch.testing.assert_close(a.loss + 0.3 * a.balance_loss, b.loss, atol=1e-5, rtol=1e-5)
    a.loss.backward()
    b.loss.backward()
    expected = gradients(theirs)
    for name, found in gradients(ours).items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-4)
    ours.zero_grad()
    object.__setattr__(ours.config, "balance", 0.0)
    ours(ids, labels=ids).loss.backward()
    gate = next(name for name in expected if name.endswith("mlp.gate.weight"))
    assert not torch.allclose(gradients(ours)[gate], expected[gate], atol=1e-4)


def test_padding_does_not_count(tmp_path, ids):
    theirs = write(tmp_path, "mixtral").train()
    ours = loaded(tmp_path).train()
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    a = ours(ids, labels=labels)
    b = theirs(ids, labels=labels, attention_mask=mask, output_router_logits=True)
    torch.testing.assert_close(a.balance_loss, b.aux_loss, atol=1e-5, rtol=1e-5)
    assert ours.router_use.tokens_LE.sum() == mask.sum() * 3 * 2
    # a prompt that is not learned from counts, and so do tokens before it
    labels[1, 3:9] = -100
    torch.testing.assert_close(ours(ids, labels=labels).balance_loss, a.balance_loss)
    nothing = ours(ids, labels=torch.full_like(ids, -100))
    assert nothing.balance_loss == 0


def test_the_balance_by_hand():
    index = torch.tensor([[0, 1], [0, 2], [0, 1]])
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.4, 0.35, 0.25]])
    routed = Routed(torch.tensor([[5, 6, 7]]))
    routed.add(4, p, index)
    routed.add(4, p, index)  # computed again
    assert routed.tokens_LE.tolist() == [[3, 2, 1]]
    torch.testing.assert_close(routed.balance(), 3 * (1.0 * 0.5 + 2 / 3 * 0.25 + 1 / 3 * 0.25) * torch.ones(()))
    logits = p.log()
    torch.testing.assert_close(routed.balance(), load_balancing_loss_func((logits,), 3, 2))


def test_packed_documents_equal_documents_alone(tmp_path, ids):
    theirs = write(tmp_path, "qwen3-moe")
    model = loaded(tmp_path).eval()
    positions = torch.cat((torch.arange(7), torch.arange(17))).expand(2, -1)
    packed = model(ids, position_ids=positions).logits
    alone = torch.cat((model(ids[:, :7]).logits, model(ids[:, 7:]).logits), dim=1)
    torch.testing.assert_close(packed, alone)
    expected = theirs(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    model.train()
    starts = torch.tensor([[0, 7, 24], [0, 7, 24]])
    a = model(ids, labels=ids, position_ids=positions, documents=starts)
    b = theirs(ids, labels=ids, position_ids=positions, use_cache=False, output_router_logits=True)
    torch.testing.assert_close(a.balance_loss, b.aux_loss, atol=1e-5, rtol=1e-5)


@each
def test_generation_equals_transformers_greedy_search(family, tmp_path, ids):
    theirs = write(tmp_path, family)
    model = loaded(tmp_path)
    ours = sk.generate(model, ids[:, :6], max_new_tokens=12)
    assert torch.equal(ours, theirs.generate(ids[:, :6], max_new_tokens=12, do_sample=False))
    assert not model.router_use.tokens_LE.any()


# -- folders


@each
def test_saved_folder_loads_strictly_in_transformers(family, tmp_path, ids):
    theirs = write(tmp_path / "theirs", family)
    save(loaded(tmp_path / "theirs"), tmp_path / "ours", shard_gib=3e-5)
    assert len(list((tmp_path / "ours").glob("model-*"))) > 1
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back) is type(theirs)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, theirs(ids).logits)
    again = loaded(tmp_path / "ours")
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in again.named_parameters())


def rewritten(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_what_does_not_fit_is_named(tmp_path):
    write(tmp_path, "mixtral")
    block = "model.layers.1.block_sparse_moe"

    def change(tensors):
        del tensors[f"{block}.experts.3.w2.weight"], tensors[f"{block}.gate.weight"]
        tensors[f"{block}.experts.0.w1.weight"] = torch.zeros(32, 48)
        tensors[f"{block}.experts.4.w1.weight"] = torch.zeros(48, 32)
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2)

    rewritten(tmp_path, change)
    with refused(CheckpointError):
        loaded(tmp_path)


@KINDS
def test_stored_as_they_come(family, tmp_path, monkeypatch):
    write(tmp_path, family)
    late = loaded(tmp_path)
    recipe = sk.QFP8.lora(rank=2)
    sk.apply(late, recipe)
    most = []
    fill = GatedExperts.__setattr__

    def watch(self, name, value):
        if name == "gate_up_proj" and isinstance(value, nn.Parameter):
            most.append(value.dtype)
        fill(self, name, value)

    monkeypatch.setattr(GatedExperts, "__setattr__", watch)
    early = loaded(tmp_path, recipe=recipe)
    assert most
    assert set(most[len(most) // 2 :]) == {torch.float8_e4m3fn}
    state = early.state_dict()
    for name, t in late.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(t.view(torch.uint8), state[name].view(torch.uint8)), name
    report = sk.apply(early, recipe)
    assert {row.experts for row in report.rows if row.experts} == {early.config.experts}
    with refused(CheckpointError):
        save(early, tmp_path / "adapter")


def fp8(width=128, ffn=128, block=(128, 128), **changes):
    torch.manual_seed(0)
    sizes = {"width": width, "heads": 4, "kv_heads": 2, "ffn": ffn, "expert_ffn": ffn, "qk_norm": True, "experts": 2}
    model = Decoder(DecoderConfig(**{**vars(CONFIG), "head_dim": None, **sizes, **changes}))
    storage = sk.Quantizer(sk.E4M3, sk.Block(rows=block[0], columns=block[1], pow2=False))
    sk.apply(model, sk.BF16.store(storage))
    return model, storage


def test_fine_grained_fp8_goes_there_and_back(tmp_path, ids):
    model, storage = fp8(dense_layers=(1,))
    save(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert names["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"].shape == (1, 1)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
    again = loaded(tmp_path)
    assert again.model.layers[0].mlp.experts.projections["gate_up_proj"].storage == storage
    for name, t in model.state_dict().items():
        assert torch.equal(t.view(torch.uint8), again.state_dict()[name].view(torch.uint8)), name
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        gap = (theirs(ids).logits - model(ids).logits).norm() / model(ids).logits.norm()
    assert gap < 0.05


def test_storages_of_experts_without_a_format(tmp_path):
    model, _ = fp8(width=64, ffn=64)
    with refused(CheckpointError):
        save(model, tmp_path)
    model, _ = fp8(width=64, ffn=64, block=(64, 64))
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 64]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(CheckpointError):
        loaded(tmp_path)
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewritten(tmp_path, lambda t: t.update(_unquantized(t, "model.layers.0.mlp.experts.0.down_proj.weight")))
    with refused(CheckpointError):
        loaded(tmp_path)
    nf4 = made(qk_norm=True)
    sk.apply(nf4, sk.BF16.store(sk.QNF4))
    with refused(CheckpointError):
        save(nf4, tmp_path)


def _unquantized(tensors, name):
    tensors.pop(f"{name}_scale_inv")
    return {name: tensors[name].float()}


# -- training


@pytest.mark.parametrize("rounding", [None, "nearest", "stochastic"])
def test_recomputation_changes_neither_gradients_nor_counts(rounding, ids):
    plain, again = made(), made()
    sk.fuse(plain, sk.Fusion.OFF)
    sk.fuse(again, sk.Fusion.OFF, recompute="full")
    for model in (plain, again):
        if rounding is not None:  # of the experts alone
            q = sk.Quantizer(sk.E4M3, sk.PerRow(), rounding=rounding)
            sk.apply(model, sk.Recipe("random", forward=sk.Gemm(q, q)).keep("*self_attn*"))
        torch.manual_seed(5)
        model(ids, labels=ids).loss.backward()
    for name, found in gradients(again).items():
        assert torch.equal(found, gradients(plain)[name])
    assert torch.equal(plain.router_use.tokens_LE, again.router_use.tokens_LE)


def test_streamed_weights_change_neither_gradients_nor_counts(ids):
    plain, streamed = made(), made()
    sk.offload_weights(streamed, "cpu")
    for model in (plain, streamed):
        model(ids, labels=ids).loss.backward()
    for name, found in gradients(plain).items():
        torch.testing.assert_close(streamed.get_parameter(name).grad, found)
    assert torch.equal(plain.router_use.tokens_LE, streamed.router_use.tokens_LE)


def test_fused_attention_and_experts_that_read_the_norm(ids):
    plain, fused = made(dense_layers=(1,)), made(dense_layers=(1,))
    said = sk.fuse(fused)
    why = {row.module: row.why for row in said.rows if not row.fused}
    assert list(why) == ["model.layers.0.mlp"]
    assert {row.module for row in said.rows if row.fused and row.kind == "attention"} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }
    assert [type(block.mlp) for block in fused.model.layers] == [SparseMLP, MLP]
    seen = []
    fused.model.layers[0].mlp.experts.register_forward_hook(lambda m, args, y: seen.append(args[0]))
    norms = []
    fused.model.layers[0].post_attention_layernorm.register_forward_hook(lambda m, args, y: norms.append(y))
    for model in (plain, fused):
        model(ids, labels=ids).loss.backward()
    assert torch.equal(seen[0], norms[0].flatten(0, 1))
    for name, found in gradients(fused).items():
        torch.testing.assert_close(found, gradients(plain)[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("recipe", [sk.FP8, sk.MXFP8, sk.QNF4.lora(rank=2)], ids=lambda r: r.name)
def test_recipes_reach_the_experts(recipe, ids):
    model = made()
    before = model(ids, labels=ids).loss.item()
    report = sk.apply(model, recipe)
    rows = {row.layer: row for row in report.rows if row.experts}
    assert len(rows) == 4
    assert all(row.converted for row in rows.values())
    assert not any("Experts" in row.kind for row in report.left)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(before, rel=0.02)
    assert losses[0] != before
    assert losses[-1] < losses[0] - 0.05


def test_our_experts_are_experts_as_any(ids):
    model = made()
    experts = model.model.layers[0].mlp.experts
    assert is_experts(experts)
    assert adopt_experts(experts) is experts
    assert type(experts) is GatedExperts
    assert all(isinstance(p, ExpertsLinear) and p.module is experts for p in experts.projections.values())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin = other.model.layers[0].mlp.experts
        assert twin is not experts
        assert twin.projections["down_proj"].module is twin
        assert torch.equal(other(ids).logits, model(ids).logits)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    empty = Decoder(CONFIG, device="meta").to_empty(device="cpu")
    empty.load_state_dict(torch.load(file))
    assert torch.equal(empty(ids).logits, model(ids).logits)
    assert not empty.router_use.tokens_LE.any()
    half = model.to(torch.bfloat16)
    half(ids, labels=ids).loss.backward()
    assert half.router_use.balance_2.dtype == torch.float32
    assert half.router_use.tokens_LE.sum() == 2 * 2 * ids.numel()


def test_initial_parameters():
    model = made(width=64, ffn=96, expert_ffn=96, experts=8)
    mlp = model.model.layers[1].mlp
    for weight, std in (
        (mlp.gate.weight, 0.5 * 64**-0.5),
        (mlp.experts.gate_up_proj, 0.5 * 64**-0.5),
        (mlp.experts.down_proj, 0.5 * (96 * 4) ** -0.5),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)


# -- a session


def batches(rows=4, count=3):
    generator = torch.Generator().manual_seed(3)
    made_ids = [torch.randint(64, (rows, 16), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in made_ids]


def session(model, **options):
    settings = {"optimizer": sk.AdamW(lr=1e-3), "schedule": None, "clip": None, **options}
    return sk.Session(model, batches(), **settings)


def test_records_have_the_language_models_loss_and_the_routing(tmp_path):
    model, twin = made(balance=0.5), made(balance=0.5)
    batch = batches()[0]
    out = twin(**batch)
    load_LE = twin.router_use.tokens_LE.float()
    load_LE = load_LE / load_LE.mean(1, keepdim=True)
    most, least = load_LE.max().item(), load_LE.min().item()
    model(**batch)  # before the session, and so in none of its records
    run = session(model, run_dir=tmp_path)
    record = run.step(batch)
    assert record.loss == pytest.approx(out.loss.item())
    assert record.meters == pytest.approx(
        {"balance_loss": out.balance_loss.item(), "expert_load_max": most, "expert_load_min": least}
    )
    assert not model.router_use.tokens_LE.any()
    run.run(3)
    assert not run.records.frame()["expert_load_max"].isna().any()
    fork = run.fork()
    assert fork.measuring.meters == []
    assert fork.step(batch).meters.keys() == record.meters.keys()
    assert run.evaluate(batches()) == pytest.approx(run.evaluate(batches()))
    assert not model.router_use.tokens_LE.any()


def test_micro_batches_weigh_the_balance_as_one_batch_of_them():
    one, four = made(balance=0.5), made(balance=0.5)
    batch = batches(rows=8)[0]
    labels = batch["labels"]
    labels[:2, 4:] = -100  # parts count by their labels
    rows = labels[:, 1:].ne(-100).sum(1)
    shares = rows.view(4, 2).sum(1) / rows.sum()
    loss = sum(
        share * (out.loss + 0.0 * out.balance_loss)
        for share, out in zip(shares, (one(**{k: v[i : i + 2] for k, v in batch.items()}) for i in range(0, 8, 2)))
    )
    loss.backward()
    expected = gradients(one)
    found = {}
    run = session(four, accumulate=4, meters=[lambda s: found.update(gradients(s.model)) or {}])
    run.step(batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    gate = "model.layers.0.mlp.gate.weight"
    dense = made(balance=0.0)
    dense(**batch).loss.backward()
    assert not torch.allclose(found[gate], gradients(dense)[gate], atol=1e-4)


def test_training_with_the_loss_evens_the_load():
    def after(balance):
        model = made(balance=balance, experts=8, experts_per_token=1)
        with torch.no_grad():  # everything goes to two experts at first
            for block in model.model.layers:
                block.mlp.gate.weight[2:] *= 0.2
        run = session(model, optimizer=sk.AdamW(lr=3e-3))
        return [run.step(batches()[i % 3]).meters["expert_load_max"] for i in range(25)]

    with_it, without = after(1.0), after(0.0)
    assert with_it[0] == without[0]
    assert with_it[-1] < 0.7 * without[-1]


def test_a_dense_session_records_nothing_of_experts():
    run = session(Decoder(DecoderConfig(layers=1, width=32, heads=4, kv_heads=2, vocab=64, ffn=48)))
    assert run.step(batches()[0]).meters == {}


def test_a_checkpoint_of_a_session_is_resumed(tmp_path):
    run = session(made(qk_norm=True, dense_layers=(1,), norm_topk=False), run_dir=tmp_path)
    run.step(batches()[0])
    run.save()
    again = sk.Session.resume(tmp_path, data=batches())
    assert isinstance(again.model, Decoder)
    assert again.model.config.dense_layers == (1,)
    assert all(torch.equal(p, run.model.get_parameter(name)) for name, p in again.model.named_parameters())
    a, b = run.step(batches()[1]), again.step(batches()[1])
    assert a.loss == b.loss


@pytest.mark.parametrize("alpha", [8, 32])
def test_a_run_whose_only_adapters_are_on_experts_is_resumed_and_exported(alpha, tmp_path):
    """Also where they were loaded, with another alpha than the recipe's."""
    recipe = sk.BF16.lora(rank=2, targets=("gate_up_proj", "down_proj"))
    source = made(qk_norm=True)
    sk.apply(source, sk.BF16.lora(rank=2, alpha=alpha, targets=("gate_up_proj", "down_proj")))
    sk.save_adapter(source, tmp_path / "adapter")
    model = made(qk_norm=True)
    sk.apply(model, recipe)
    sk.load_adapter(model, tmp_path / "adapter")
    run = session(model, run_dir=tmp_path / "run")
    run.step(batches()[0])
    run.save()
    again = sk.Session.resume(tmp_path / "run", data=batches())
    assert run.step(batches()[1]).loss == again.step(batches()[1]).loss
    again.save()
    fresh = made(qk_norm=True)
    sk.load_adapter(fresh, export(tmp_path / "run", tmp_path / "exported"))
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all(torch.equal(p, fresh.get_parameter(name)) for name, p in trained.items())
    assert fresh(**batches()[2]).loss == run.model.eval()(**batches()[2]).loss


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it where a call is not traced
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_torch_compile_gets_the_same(ids):
    model = made()
    expected = model(ids, labels=ids)
    expected.loss.backward()
    before, counts = gradients(model), model.router_use.tokens_LE.clone()
    model.zero_grad()
    out = torch.compile(model, backend="eager")(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected.loss)
    out.loss.backward()
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, before[name])
    assert torch.equal(model.router_use.tokens_LE, 2 * counts)


def test_an_adapter_is_exchanged_with_peft(tmp_path, ids):
    from peft import PeftModel

    theirs = write(tmp_path / "base", "mixtral")
    model = loaded(tmp_path / "base")
    sk.apply(model, sk.BF16.lora(rank=3, targets=("gate_up_proj", "down_proj", "q_proj")))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    sk.save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        before = theirs(ids).logits
        ours = model.eval()(ids).logits
        wrapped = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        torch.testing.assert_close(ours, wrapped(ids).logits, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(ours, before, atol=1e-2)
        sk.merge(model)
        torch.testing.assert_close(model(ids).logits, ours, atol=1e-5, rtol=1e-4)


# -- plans


@each
def test_a_plan_has_the_experts(family, tmp_path):
    theirs = write(tmp_path, family)
    model = loaded(tmp_path)
    parameters = sum(p.numel() for p in model.parameters())
    of_the_config, of_theirs = sk.plan(model.config, tokens=1e6), sk.plan(theirs.config, tokens=1e6)
    assert of_the_config.parameters == parameters
    assert of_the_config.flops == of_theirs.flops
    sk.fuse(model)
    live = sk.plan(model, batch=1, length=16)
    assert live.memory["weights"].bytes == 4 * parameters
    assert any("transformers' layers" in note for note in live.notes)
    unnamed = DecoderConfig(**{**vars(model.config), "family": None})
    assert sk.plan(unnamed, tokens=1e6).flops == of_theirs.flops


def test_a_plan_of_a_live_model_knows_the_adapters_of_experts():
    model = made(qk_norm=True)
    sk.apply(model, sk.QFP8.lora(rank=3, targets=("gate_proj", "up_proj", "down_proj")))
    planned = sk.plan(model, batch=1, length=16)
    assert planned.recipe.adapter == sk.Lora(3, planned.recipe.adapter.alpha, ("gate_proj", "up_proj", "down_proj"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.memory["gradients"].most == 4 * trained


# -- without a look at the device


def test_a_step_reads_nothing_from_the_device_and_is_a_graph(monkeypatch):
    """In bfloat16, as on CUDA, where all experts are computed at once: the same losses and counts, replayed or not."""
    monkeypatch.setattr(module_of_experts, "has_grouped_product", lambda device: True)
    monkeypatch.setattr(Routing, "rows", property(lambda _: pytest.fail("the host asks for sizes")))

    def run():
        model = made(balance=0.5).bfloat16()
        return session(model, optimizer=sk.AdamW(lr=torch.tensor(1e-3)), accumulate=2)

    eager, graphs = run(), graphed(run())
    rows = []
    for one in (eager, graphs):
        records = [one.step([batches()[i % 3], batches()[(i + 1) % 3]]) for i in range(6)]
        rows.append([(record.loss, record.meters) for record in records])
    assert graphs.graphs.state == "on", graphs.graphs.why
    assert rows[0] == rows[1]
    use = eager.model.router_use
    with NoReads():
        use.take()


# -- the panel


def test_the_panel_says_how_even_the_load_is(tmp_path):
    run = session(made(), run_dir=tmp_path)
    state = PanelState()
    run.run(5)
    for record in run.records:
        state.add_record(record, record.late.wait())
    (line,) = expert_lines(state)
    last = run.records[-1].meters
    assert state.routing == (last["expert_load_max"], last["expert_load_min"], last["balance_loss"])
    assert line.startswith("Experts: 0.")
    assert line in summary_text(state)
    assert line in picture(state)
    assert expert_lines(PanelState.from_records(run.records.frame())) == [line]
    reader = Reader(tmp_path / "records.jsonl")
    reader.read()
    assert reader.state.routing == state.routing
    assert expert_lines(PanelState()) == []
    old = PanelState.from_records([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    assert expert_lines(old) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts_per_tok": 9},
        {"num_local_experts": "8"},
        {"router_aux_loss_coef": -1.0},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_a_config_that_cannot_be_is_named(wrong):
    hf = MixtralConfig(num_local_experts=4, num_attention_heads=2, num_key_value_heads=2).to_dict()
    with refused(CheckpointError):
        DecoderConfig.from_hf(hf | wrong)


def test_dense_layers_may_be_a_list():
    sizes: Any = {"layers": 2, "width": 8, "heads": 2, "kv_heads": 2, "vocab": 8, "ffn": 8, "experts": 2}
    assert DecoderConfig(**sizes | {"dense_layers": [0]}) == DecoderConfig(**sizes, dense_layers=(0,))


def test_experts_that_stay_unquantized_are_named_as_readers_know_them(tmp_path):
    """transformers asks for the module, which it would make an FP8 one."""
    config = DecoderConfig(layers=2, width=64, heads=2, kv_heads=2, vocab=32, ffn=64, experts=2, tied=False)
    model = sk.Decoder(config)
    sk.apply(model, sk.BF16.store(sk.Quantizer(sk.E4M3, sk.Block(64, 64, pow2=False))).keep("layers.0.*"))
    sk.save(model, tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.experts" in kept
    assert not any("gate_up_proj" in name or "layers.1.mlp" in name for name in kept)
