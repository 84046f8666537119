"""The catalogue: every parameter count is the published one, names are found as people write them, and no network is asked."""

import pytest

from surokit.planner import plan
from surokit.planner.inputs import catalogue
from surokit.planner.inputs.configs import FAMILIES, read_shape
from surokit.planner.inputs.typical import NEAR, typical_shape
from tests.planner.families import LLAMA_1B, QWEN3_8B
from tests.refusals import refused


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """What is asked of the Hub's cache, which has nothing; there is no network."""
    asked: list[str] = []

    def fetch(repo_id, filename, *, online):
        asked.append(repo_id)
        raise FileNotFoundError(filename)

    monkeypatch.setattr("surokit.hub.fetch", fetch)
    monkeypatch.setattr("surokit.hub.reachable", lambda: False)
    return asked


@pytest.mark.parametrize("name", list(catalogue.known()))
def test_the_shape_has_the_published_parameters(name, asked):
    known = catalogue.known()[name]
    shape, source = read_shape(name)
    assert shape.parameters == known.parameters
    assert shape.family in FAMILIES
    assert source == f"from the catalogue's {name}"
    assert "config.json" in known.source
    assert "parameters: " in known.source
    assert not asked


@pytest.mark.parametrize(("name", "config"), [("Llama-3.2-1B", LLAMA_1B), ("Qwen3-8B", QWEN3_8B)])
def test_shapes_typed_in_again(name, config):
    assert read_shape(name)[0] == read_shape(config)[0]


@pytest.mark.parametrize(
    ("name", "active", "heads"),  # as their papers have them
    [("mixtral-8x7b-v0.1", 12.9e9, 32), ("qwen3-30b-a3b", 3.3e9, 32), ("qwen3-235b-a22b", 22e9, 64)],
)
def test_active_parameters_of_mixtures(name, active, heads):
    shape, _ = read_shape(name)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)
    assert shape.heads == heads


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("qwen/qwen3-8b-base", "Qwen/Qwen3-8B"),
        ("gemma-3-1b-it", "google/gemma-3-1b-pt"),
    ],
)
def test_names_as_people_write_them(written, name):
    found = catalogue.find(written)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", ["someone/Llama-3.1-8B", "llama-3.1", "8b", "", "Qwen3-4B-Instruct-2507"])
def test_what_is_not_that_model_is_not_found(name):
    assert catalogue.find(name) is None


def test_names_and_sources_are_apart():
    keys = [catalogue._key(name) for name in catalogue.known()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "written",
    [
        "llama-3.1-9b",
        "Qwen/Qwen3-8",
        "smolm2-135m",
        "someone/Llama-3.1-8B",
    ],
)
def test_a_near_miss_is_suggested(written, asked):
    with refused(FileNotFoundError):
        plan(written)
    assert asked == [written] * ("/" in written)


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    import json

    (tmp_path / "llama-3.1-8b").mkdir()
    (tmp_path / "llama-3.1-8b" / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_shape("llama-3.1-8b")[0] == read_shape(QWEN3_8B)[0]


@pytest.mark.parametrize("parameters", [135e6, 0.5e9, 1e9, 3e9, 8e9, 13e9, 30e9, 70e9, 405e9, 1e12])
def test_a_typical_shape_has_about_that_many_parameters(parameters):
    found = typical_shape(parameters)
    assert found is not None
    assert found[0].parameters == pytest.approx(parameters, rel=NEAR)
    assert found[0].experts is None


def test_what_is_far_from_every_model_has_no_typical_shape():
    assert typical_shape(1e6) is None
