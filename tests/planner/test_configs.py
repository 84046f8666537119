"""Shapes against transformers' own models: parameters, windows, defaults where a config is silent; and configs that are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surokit import hub
from surokit.models.config import ARCHITECTURES, DecoderConfig
from surokit.planner import plan
from surokit.planner.inputs.configs import FAMILIES, read_shape
from surokit.planner.inputs.shape import BUILT_HERE, Shape, Weight
from tests.planner.families import FAMILIES as SMALL
from tests.planner.families import config_of, fields, model_of
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
ROUTED = [name for name, family in FAMILIES.items() if family.experts]


def parameters_of(config):
    """Parameters of transformers' own model, made without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_of(config).parameters())


def test_every_family_is_tested():
    # names that transformers does not have: ours for llama, and Kimi-K2's own for DeepSeek-V3's layers
    assert set(SMALL) == set(FAMILIES) - {"smollm", "decoder", "kimi_k2"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SMALL)
def test_parameters_equal_the_models_own(family, tied):
    config = config_of(family, tie_word_embeddings=tied)
    model = model_of(config)
    shape, source = read_shape(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.family == family
    assert source == f"from the config of a live {type(model).__name__}"
    assert read_shape(config)[0] == read_shape(fields(family, tie_word_embeddings=tied))[0] == shape


@pytest.mark.parametrize("family", SMALL)
def test_a_silent_config_is_read_as_transformers_does(family):
    """The sizes alone, so that every default of the family is in play, its experts and latents at their published sizes."""
    given = {
        "num_hidden_layers": 5,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 512,
        "vocab_size": 64,
    }
    if family == "gpt2":
        given = {"n_layer": 5, "n_embd": 64, "n_head": 4, "vocab_size": 64}
    if family == "deepseek_v2":
        given["num_experts_per_tok"] = 6  # which it has no default for
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **given, **tokens)
    shape, _ = read_shape({"model_type": family, **given})
    assert shape.parameters == parameters_of(config)
    assert shape == read_shape(config)[0]


# parameters as the model cards and reports state them: total, and those that a token passes
@pytest.mark.parametrize(
    ("family", "total", "active"),
    [
        ("mistral", 7.24e9, None),  # Mistral-7B-v0.1
        ("gpt2", 124.4e6, None),
        ("phi3", 3.82e9, None),  # Phi-3-mini
        ("gemma", 8.54e9, None),  # Gemma-7B
        ("gemma2", 2.61e9, None),  # Gemma-2-2B
        ("smollm3", 3.08e9, None),
        ("mixtral", 46.7e9, 12.9e9),  # arXiv 2401.04088: 47B and 13B
        ("qwen2_moe", 14.3e9, 2.7e9),  # Qwen1.5-MoE-A2.7B
        ("gpt_oss", 116.83e9, 5.71e9),  # arXiv 2508.10925: 116.83B and 5.13B, the latter without the embedding's 0.58B
        ("deepseek_v3", 671e9, 37.5e9),  # arXiv 2412.19437: 671B and 37B
    ],
)
def test_published_sizes(family, total, active):
    """transformers' default configs are these models."""
    shape, _ = read_shape(transformers.AutoConfig.for_model(family))
    assert shape.parameters == pytest.approx(total, rel=0.005)
    assert shape.active_parameters == (shape.parameters if active is None else pytest.approx(active, rel=0.02))


def test_kimi_k2():
    """Its card: a trillion parameters, of which a token activates 32 billion."""
    shape, _ = read_shape(
        {
            "model_type": "kimi_k2",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 64,
            "intermediate_size": 18432,
            "vocab_size": 163840,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
        }
    )
    assert shape.parameters == pytest.approx(1e12, rel=0.03)
    assert shape.active_parameters == pytest.approx(32e9, rel=0.03)


def test_active_parameters_of_qwen3_30b():
    """Its card: 30.5B in total, 29.9B without embeddings, 3.3B activated."""
    shape, _ = read_shape(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        }
    )
    assert round(shape.parameters / 1e9, 1) == 30.5
    assert round((shape.parameters - 2 * shape.embedding_parameters) / 1e9, 1) == 29.9
    assert int(shape.active_parameters / 1e8) == 33
    assert shape.cache_width == 2 * 4 * 128


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sizes(data):
    """Random sizes of random families against the model of transformers, experts and latents included."""
    draw, few = data.draw, st.integers(1, 4)
    family = draw(st.sampled_from(sorted(SMALL)))
    groups, heads = draw(few), draw(few)
    changes = {
        "num_hidden_layers": draw(st.integers(1, 5)),
        "num_attention_heads": groups * heads,
        "num_key_value_heads": groups * heads if "deepseek" in family else groups,
        "hidden_size": 8 * groups * heads * draw(few),
        "intermediate_size": draw(st.integers(1, 99)),
        "vocab_size": draw(st.integers(3, 99)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    own = SMALL[family]
    if "num_experts_per_tok" in own:
        changes["num_experts_per_tok"] = draw(st.integers(1, 3))
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            changes |= {name: draw(st.integers(3, 9))} if name in own else {}
        for name in (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "n_shared_experts",
        ):
            changes |= {name: draw(st.integers(1, 9))} if name in own else {}
    if "kv_lora_rank" in own:
        changes |= {"q_lora_rank": draw(st.none() | st.integers(1, 99)), "kv_lora_rank": draw(st.integers(1, 99))}
        changes |= {"v_head_dim": draw(st.integers(1, 9)), "first_k_dense_replace": draw(st.integers(0, 5))}
    config = config_of(family, **changes)
    with torch.device("meta"):
        model = model_of(config)
    shape, _ = read_shape(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.active_parameters <= shape.parameters
    # every matrix of ours that the model has by that name has those sizes
    held = {name: p.shape for name, p in model.named_parameters()}
    for weight in shape.projections:
        for layer in weight.layers:
            if weight.kind == "linear":
                assert tuple(held[f"model.layers.{layer}.{weight.name}.weight"]) == (weight.n, weight.k)


def seen(model, length):
    """Keys that the queries of each layer attend to, counted in the attention weights of a forward pass."""
    ids = torch.randint(3, 90, (1, length))
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    return [int((weights[0, 0] > 0).sum()) for weights in attentions]


WINDOWS: dict[str, dict[str, Any]] = {
    "llama": {},  # which ignores it
    "mistral": {},
    "phi3": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 4},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3_moe": {"use_sliding_window": True},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "smollm3": {"use_sliding_window": True},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_sliding_windows_are_where_the_model_has_them(family):
    length, window = 24, 8
    given = fields(family, num_hidden_layers=7, sliding_window=window, **WINDOWS[family])
    config = config_of(family, num_hidden_layers=7, sliding_window=window, **WINDOWS[family])
    band = sum(min(i + 1, window) for i in range(length))
    whole = length * (length + 1) // 2
    measured = seen(model_of(config), length)
    for shape in (read_shape(given)[0], read_shape(config)[0]):
        assert [whole if shape.window_of(i) is None else band for i in range(7)] == measured
    assert (band in measured) is (family != "llama")


def test_no_window_where_it_is_switched_off_or_null():
    for without in (
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 99},
    ):
        assert read_shape({**fields("llama"), **without})[0].sliding_window is None


def test_our_own_config_is_read_like_its_hugging_face_form():
    config = DecoderConfig(
        layers=4,
        width=64,
        heads=4,
        kv_heads=2,
        vocab=99,
        ffn=80,
        qk_norm=True,
        qkv_bias=True,
        o_bias=True,
        sliding_window=16,
        window_layers=(2, 3),
        family="qwen3",
    )
    shape = read_shape(config)[0]
    assert shape == read_shape(config.to_hf())[0]
    assert [shape.window_of(i) for i in range(4)] == [None, None, 16, 16]


def test_a_shape_is_read_as_it_is():
    shape = read_shape(fields("llama"))[0]
    assert read_shape(shape) == (shape, "as given")


def test_the_text_model_of_a_config_with_more():
    text = {k: v for k, v in fields("gemma3_text").items() if k != "model_type"} | {"model_type": "gemma3_text"}
    shape, source = read_shape({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert shape == read_shape(text)[0]
    assert source == "from a config, its text model alone"
    config = transformers.Gemma3Config(text_config=text)
    assert read_shape(config)[0] == shape


def test_the_order_of_the_matrices_is_the_order_of_the_data():
    """A matrix reads what one before it wrote, or a norm of the stream."""
    for family in SMALL:
        written = {"attention", "mlp", "context"}
        for weight in read_shape(fields(family))[0].projections:
            assert weight.reads in written, (family, weight)
            written |= set(weight.writes)
        assert {"query", "key", "value", "stream"} <= written


def test_latents_are_what_the_cache_holds():
    """Elements that transformers' own cache keeps a token and layer; it keeps DeepSeek's keys and values as the latent."""
    for family in ("llama", "gpt_oss", "deepseek_v3"):
        model = model_of(config_of(family)).eval()
        with torch.no_grad():
            cache = model(input_ids=torch.arange(3, 13)[None], use_cache=True).past_key_values
        kept = cache.layers[1].keys.numel() + cache.layers[1].values.numel()
        assert read_shape(model)[0].cache_width == kept // 10


def test_the_sizes_in_words():
    assert read_shape(fields("llama"))[0].words == "3 layers, width 64, 4 heads over 2, ffn 176, vocabulary 320"
    assert read_shape(fields("mixtral", tie_word_embeddings=True))[0].words == (
        "3 layers, width 64, 4 heads over 2, ffn 176, 4 experts of 176, 2 a token, vocabulary 320, tied"
    )
    assert read_shape(fields("deepseek_v3"))[0].words == (
        "3 layers, width 64, 4 heads over a latent of 32, ffn 176, 8 experts of 48 in 2 of them, 3 a token and 96 shared, "
        "vocabulary 320"
    )


def test_a_field_of_another_family_is_not_read():
    """Qwen3's mixtures have no shared expert, Llama no window, whatever their configs say."""
    for family, stray in (("qwen3_moe", {"shared_expert_intermediate_size": 80}), ("llama", {"sliding_window": 8})):
        assert read_shape({**fields(family), **stray}) == read_shape(fields(family))


@pytest.mark.parametrize("family", SMALL)
def test_every_family_is_planned_to_the_end(family):
    given = fields(family)
    shape = read_shape(given)[0]
    planned = plan(given, batch=2, length=64, training=False, gpu="H100", mfu=0.4, tokens=1e9)
    assert planned.memory["weights"].bytes == 2 * shape.parameters
    assert planned.memory["KV cache"].bytes == 2 * shape.cache_width * shape.layers * 2 * 64
    ours = planned.setup.layers == "surokit"
    assert ours is (family in BUILT_HERE)
    others: list[dict[str, Any]] = [{"recipe": "fp8"}, {"recipe": "qnf4", "layers": "transformers"}]
    for other in others:
        trained = plan(given, batch=2, length=64, gpu="H100", recompute="full", **other)
        assert "memory of one GPU" in repr(trained)


def test_layers_that_are_not_counted_are_transformers_own():
    """Our decoder's layers are counted for four families; the plan of another is not one of layers that nobody knows."""
    assert set(BUILT_HERE) == {*ARCHITECTURES, "decoder"} - {"mixtral", "qwen3_moe"}
    with refused(ValueError):
        plan(fields("mixtral"), layers="surokit")
    mixtral = plan(fields("mixtral"), batch=1, length=8)
    assert (mixtral.setup.layers, mixtral.setup.logits) == ("transformers", "whole")
    assert any(note.endswith("surokit's own are not counted for mixtral") for note in mixtral.notes)
    assert not any("not counted" in note for note in plan(fields("qwen3")).notes)
    assert any("gpt2 without dropout" in note for note in plan(fields("gpt2")).notes)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_cache_behind_windows_is_the_models(family):
    """transformers' cache forgets what no window sees any more."""
    given = fields(family, num_hidden_layers=7, sliding_window=8)
    model = model_of(config_of(family, num_hidden_layers=7, sliding_window=8)).eval()
    for length in (6, 8, 24):
        with torch.no_grad():
            cache = model(input_ids=torch.randint(3, 90, (2, length)), use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        planned = plan(given, batch=2, length=length, training=False, layers="transformers", dtype="fp32")
        assert planned.memory["KV cache"].bytes == held
    if family == "mistral":  # ours keeps every key
        assert plan(given, batch=2, length=24, training=False).memory["KV cache"].bytes == 2 * 64 * 7 * 2 * 24


def test_a_weight_says_how_many_a_layer_has():
    expert = next(w for w in read_shape(fields("qwen3_moe"))[0].projections if w.kind == "expert")
    assert (expert.count, expert.active, expert.a_layer, expert.active_a_layer) == (12, 4, 6, 2)
    assert expert.layers == (0, 2)
    assert expert.path(2) == "model.layers.2.mlp.experts.0.gate_proj"
    assert Weight("lone", 2, 3, 4).active == 4


# -- configs that are wrong


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_local_experts": 8}),
        ("jamba", {"num_experts": 16}),
        ("qwen3_moe", {"num_experts_per_tok": 7}),
        ("mixtral", {"num_experts_per_tok": None}),
        ("deepseek_v3", {"kv_lora_rank": None}),
        ("deepseek_v2", {"num_experts_per_tok": None}),
        ("deepseek_v3", {"qk_rope_head_dim": "wide"}),
        ("qwen2", {"hidden_size": None, "vocab_size": None}),
        ("gpt2", {"n_embd": None, "n_layer": None}),
        ("gemma2", {"layer_types": ["sliding_attention"]}),
        ("qwen3", {"use_sliding_window": True, "layer_types": "all"}),
        ("qwen3_moe", {"mlp_only_layers": 1}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1]}),
        ("gemma2", {"num_key_value_heads": 3}),
        ("mistral", {"sliding_window": -4}),
        ("llama", {"num_hidden_layers": 2.5}),
    ],
)
def test_a_wrong_config_is_one_sentence(family, changes):
    given = {**(fields(family) if family in SMALL else {**fields("llama"), "model_type": family}), **changes}
    with refused((ValueError, TypeError)) as caught:
        read_shape(given)
    assert "\n" not in str(caught.value)


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 2.5, float("nan"), 1e30, "8", "", True, [], [1], {}, "sliding_attention"]
)


@settings(max_examples=150, deadline=None)
@given(family=st.sampled_from(sorted(SMALL)), data=st.data())
def test_any_junk_in_a_config_is_read_or_refused_in_a_sentence(family, data):
    known = sorted({**fields(family), **FAMILIES[family].defaults, "layer_types": None, "text_config": None})
    junk = data.draw(st.dictionaries(st.sampled_from(known), JUNK, min_size=1, max_size=3))
    said = "."
    try:
        shape, _ = read_shape({**fields(family), **junk})
    except (ValueError, TypeError) as error:
        said = str(error)
    else:
        assert shape.parameters >= shape.active_parameters > 0
    assert said.endswith((".", "?"))
    assert "\n" not in said


def test_a_mixture_that_routes_no_block_is_dense():
    for family, changes in (("qwen2_moe", {"num_experts": 0}), ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]})):
        config = config_of(family, **changes)
        shape = read_shape(config)[0]
        assert shape.experts is None
        assert shape.parameters == shape.active_parameters == parameters_of(config)


# -- paths and the Hub


def test_a_folder_a_file_and_what_is_not_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields("qwen3")), encoding="utf-8")
    shape = read_shape(fields("qwen3"))[0]
    assert read_shape(tmp_path) == (shape, f"from {tmp_path / 'config.json'}")
    assert read_shape(str(tmp_path / "config.json"))[0] == shape
    with refused(FileNotFoundError):
        read_shape(tmp_path / "none")
    with refused(TypeError):
        read_shape([1])


class Hub:
    """Stands for the Hub: what is in the cache, what is online, and what was asked for."""

    def __init__(self, monkeypatch, path: Path, *, cached: bool, online: bool, exists: bool = True):
        self.asked: list[bool] = []
        self.path, self.cached, self.online, self.exists = path, cached, online, exists
        monkeypatch.setattr(hub, "fetch", self.fetch)
        monkeypatch.setattr(hub, "reachable", lambda: online)

    def fetch(self, repo_id, filename, *, online):
        assert (repo_id, filename) == ("Some/Model-0.6B", "config.json")
        self.asked.append(online)
        if self.exists and (self.cached or online):
            return self.path
        raise FileNotFoundError("no such entry")


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields("qwen3")), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("cached", "online", "asked"), [(True, False, [False]), (True, True, [False]), (False, True, [False, True])]
)
def test_a_hub_id_asks_the_cache_and_then_the_hub(stored, monkeypatch, cached, online, asked):
    stub = Hub(monkeypatch, stored, cached=cached, online=online)
    assert read_shape("Some/Model-0.6B") == (read_shape(fields("qwen3"))[0], "from Some/Model-0.6B")
    assert stub.asked == asked


@pytest.mark.parametrize("online", [False, True])
def test_a_hub_id_that_cannot_be_had(stored, monkeypatch, online):
    Hub(monkeypatch, stored, cached=False, online=online, exists=False)
    with refused(FileNotFoundError) as caught:
        read_shape("Some/Model-0.6B")
    assert "\n" not in str(caught.value)


def test_a_folder_of_that_name_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", None)
    (tmp_path / "Some" / "Model-0.6B").mkdir(parents=True)
    (tmp_path / "Some" / "Model-0.6B" / "config.json").write_text(json.dumps(fields("qwen3")), encoding="utf-8")
    assert isinstance(read_shape("Some/Model-0.6B")[0], Shape)
