"""Tokenizers: trained, loaded from everywhere, saved for transformers, refused with one sentence."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from surokit import hub
from surokit.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, train_tokenizer
from surokit.texts import MOBY_DICK
from tests.refusals import refused

TEXTS = ["Call me Ishmael. Some years ago—never mind how long precisely—", "There she blows! " * 5]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(TEXTS, 280, special=SPECIAL)


# Training --------------------------------------------------------------------------------------------------------------


def test_special_tokens_take_the_first_ids_and_the_first_ends_a_text(small):
    assert [small.encode(token) for token in SPECIAL] == [[0], [1], [2]]
    assert small.eos_id == 0
    assert small.vocab_size == len(small) == 280
    assert small.opening_id is None
    assert "280 ids" in repr(small)


@given(st.text())
def test_any_text_survives_a_round_trip(small, text):
    assert small.decode(small.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer_and_a_path_equals_its_text(tmp_path):
    texts = MOBY_DICK.read_text(encoding="utf-8").split("\n\n\n")[:8]
    (tmp_path / "book.txt").write_text("\n\n\n".join(texts), encoding="utf-8")
    (tmp_path / "part.txt").write_text(texts[0], encoding="utf-8")
    first = train_tokenizer(texts, 500)
    again = train_tokenizer(tmp_path / "book.txt", 500)
    assert first.fingerprint == again.fingerprint == train_tokenizer(str(tmp_path / "book.txt"), 500).fingerprint
    assert first.fingerprint != train_tokenizer([tmp_path / "part.txt"], 500).fingerprint
    assert first.vocab_size == 500


def test_decode_takes_arrays_and_tensors_and_can_skip_specials(small):
    ids = [*small.encode("There she"), 0]
    assert small.decode(np.array(ids)) == small.decode(torch.tensor(ids)) == "There she<|endoftext|>"
    assert small.decode(ids, skip_special=True) == "There she"


def test_encode_batch_equals_encode(small):
    assert small.encode_batch(["There", "", "she blows"]) == [small.encode(t) for t in ("There", "", "she blows")]


@pytest.mark.parametrize(("size", "special"), [(256, ("<e>",)), (0, ("<e>",)), (257, ("<e>", "<s>"))])
def test_a_vocabulary_smaller_than_the_bytes_is_refused(size, special):
    with refused(ValueError):
        train_tokenizer(TEXTS, size, special=special)


@pytest.mark.parametrize("special", [(), "<|endoftext|>"])
def test_special_must_be_a_sequence_of_tokens(special):
    with refused(ValueError):
        train_tokenizer(TEXTS, 300, special=special)


def test_training_on_nothing_is_refused():
    with refused(ValueError):
        train_tokenizer(["", "  \n"], 300)


# Saving and loading ----------------------------------------------------------------------------------------------------


def test_transformers_loads_what_was_saved(small, tmp_path):
    from transformers import AutoTokenizer

    folder = small.save(tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(str(folder))
    text = "Call me—Ishmael 🐋<|im_end|>\n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == small.encode(text)
    assert theirs.eos_token == "<|endoftext|>"
    assert len(theirs) == small.vocab_size
    assert theirs.decode(small.encode(text)) == text


@pytest.mark.parametrize("form", ["folder", "file", "str", "object", "transformers", "ours"])
def test_every_form_of_a_tokenizer_loads_as_the_same(small, tmp_path, form):
    from transformers import AutoTokenizer

    folder = small.save(tmp_path)
    source = {
        "folder": folder,
        "file": folder / "tokenizer.json",
        "str": str(folder),
        "object": small.backend,
        "transformers": AutoTokenizer.from_pretrained(str(folder)) if form == "transformers" else None,
        "ours": small,
    }[form]
    loaded = load_tokenizer(source)
    assert loaded.encode("There she blows!") == small.encode("There she blows!")
    assert (loaded.eos_id, loaded.vocab_size) == (0, 280)
    if form != "transformers":  # it rewrites tokenizer.json
        assert loaded.fingerprint == small.fingerprint


def test_a_chat_template_survives_saving_and_transformers_reads_it(small, tmp_path):
    from transformers import AutoTokenizer

    template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    mine = Tokenizer(small.backend, {"eos_token": "<|endoftext|>", "chat_template": template})
    folder = mine.save(tmp_path)
    assert load_tokenizer(folder).chat_template == template
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert theirs.chat_template == template
    assert load_tokenizer(theirs).chat_template == template
    assert mine.fingerprint != small.fingerprint


def test_a_template_file_comes_before_the_configuration_and_named_ones_give_their_default(small, tmp_path):
    folder = small.save(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).chat_template == "J"


def test_special_tokens_are_read_from_texts_and_from_records(small, tmp_path):
    folder = small.save(tmp_path)
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<|im_start|>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(folder)
    assert loaded.special == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert loaded.eos_id == 2


def test_a_tokenizer_that_opens_every_text_says_so(small):
    backend = tokenizers.Tokenizer.from_str(small.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    opening = Tokenizer(backend, {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"})
    assert opening.opening_id == 1
    assert opening.encode("There") == small.encode("There")


def test_truncation_and_padding_of_the_file_are_dropped_and_the_callers_object_is_left_alone(small):
    backend = tokenizers.Tokenizer.from_str(small.backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    assert len(load_tokenizer(backend).encode("There she blows!" * 9)) > 9
    assert backend.truncation is not None
    assert backend.padding is not None


def test_vocab_size_counts_rows_not_tokens():
    holes = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    loaded = load_tokenizer(holes)
    assert loaded.vocab_size == 10
    assert loaded.eos_id is None


# Bad input -------------------------------------------------------------------------------------------------------------


def test_a_wrong_path_suggests_near_names(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    with refused(FileNotFoundError):
        load_tokenizer(str(tmp_path / "tokeniser"))
    with refused(FileNotFoundError):
        load_tokenizer(tmp_path / "nowhere" / "tokenizer.json")


def test_a_folder_without_tokenizer_json_says_what_it_has(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with refused(FileNotFoundError):
        load_tokenizer(tmp_path)


def test_files_that_are_not_tokenizers(small, tmp_path):
    folder = small.save(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("source", [3, None, ["a"], object()])
def test_what_is_not_a_tokenizer_is_a_type_error(source):
    with refused(TypeError):
        load_tokenizer(source)


def test_a_hub_id_without_a_network_is_one_sentence(monkeypatch, tmp_path):
    asked = []

    def fetch(repo_id, filename, *, online):
        asked.append((repo_id, filename, online))
        raise OSError("no answer")

    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(hub, "fetch", fetch)
    with refused(FileNotFoundError) as caught:
        load_tokenizer("someone/model")
    assert asked == [("someone/model", "tokenizer.json", False)]
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_does_not_exist_says_why(monkeypatch):
    def fetch(repo_id, filename, *, online):
        raise OSError("404: no such repository\nmore")

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "fetch", fetch)
    with refused(FileNotFoundError):
        load_tokenizer("gpt3")


def test_a_hub_id_loads_with_and_without_its_optional_files(monkeypatch, small, tmp_path):
    from huggingface_hub.errors import EntryNotFoundError

    folder = small.save(tmp_path)

    def fetch(repo_id, filename, *, online):
        if not (folder / filename).is_file():
            raise EntryNotFoundError("not there")
        return folder / filename

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(hub, "fetch", fetch)
    assert load_tokenizer("someone/model").fingerprint == small.fingerprint
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer("someone/model").eos_id == 0  # the usual name is found in the vocabulary


def test_the_probe_takes_any_failure_as_no_answer(monkeypatch):
    import huggingface_hub

    class Session:
        def head(self, url, timeout):
            assert timeout <= 5
            raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(hub, "offline_by_choice", lambda: False)
    assert hub.reachable() is False
    monkeypatch.setattr(Session, "head", lambda self, url, timeout: None)
    assert hub.reachable() is True
    monkeypatch.setattr(hub, "offline_by_choice", lambda: True)
    assert hub.reachable() is False


def test_check_vocabulary(small):
    class Data:
        tokenizer = small

    check_vocabulary(small, 280)
    check_vocabulary(Data(), 512)
    check_vocabulary([{"input_ids": None}], 4)
    for wrong in (small, Data()):
        with refused(ValueError):
            check_vocabulary(wrong, 279)
