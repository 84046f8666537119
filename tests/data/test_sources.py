"""Sources: every kind gives the same documents; every wrong one gives one sentence."""

import json
from pathlib import Path

import pytest

from surokit import hub
from surokit.data import sources
from tests.refusals import refused

DOCUMENTS = ["First document.\n\nStill the first.", "Second — with a dash.", "Third."]


def listed(source, **options) -> list[str]:
    return list(sources.documents(source, **options)[1])


@pytest.fixture
def folder(tmp_path) -> Path:
    import datasets

    (tmp_path / "a.txt").write_text("\n\n\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    records = [{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "notes.log").write_text("not text to train on")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    return tmp_path


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.parquet"])
@pytest.mark.parametrize("kind", [str, Path])
def test_every_kind_of_file_gives_the_same_documents(folder, name, kind):
    assert listed(kind(folder / name)) == DOCUMENTS


def test_a_folder_gives_its_files_in_order_of_their_names(folder):
    assert listed(folder) == DOCUMENTS * 3
    assert listed([folder / "b.jsonl", folder / "a.txt", "one more"]) == [*DOCUMENTS, *DOCUMENTS, "one more"]


def test_a_json_list_and_another_text_file(folder):
    (folder / "e.json").write_text(json.dumps([{"text": text} for text in DOCUMENTS]), encoding="utf-8")
    assert listed(folder / "e.json") == DOCUMENTS
    code = "def a():\n    pass\n\n\n\ndef b():\n    pass"
    (folder / "code.py").write_text(code + "\n", encoding="utf-8")
    assert listed(folder / "code.py") == [code]  # only .txt is cut at blank lines


def test_datasets_objects(folder):
    import datasets

    whole = datasets.Dataset.from_list([{"id": i, "text": text} for i, text in enumerate(DOCUMENTS)])
    whole.save_to_disk(folder / "saved")
    assert listed(whole) == listed(folder / "saved") == listed(whole.to_iterable_dataset()) == DOCUMENTS
    both = datasets.DatasetDict({"train": whole, "validation": whole.select([2])})
    assert listed(both) == DOCUMENTS
    assert listed(both, split="validation") == ["Third."]
    with refused(ValueError):
        listed(both, split="valid")
    assert listed(whole.select([])) == []


def test_lists_generators_and_records():
    assert listed(DOCUMENTS) == listed(iter(DOCUMENTS)) == listed([{"text": text} for text in DOCUMENTS]) == DOCUMENTS


def test_missing_and_blank_documents_are_skipped():
    assert listed(["a", "", " \n", "b"]) == ["a", "b"]
    assert listed([{"text": None}, {"text": "a"}]) == ["a"]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_documents_of_a_txt_are_cut_at_two_blank_lines_or_more(tmp_path, ends):
    content = "\n\n\nA\n\nB\n\n\n\n\nC\n \t\n\nD\n\n\n\n".replace("\n", ends)
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + content.encode())  # a byte-order mark is no text
    assert listed(tmp_path / "x.txt") == ["A\n\nB", "C", "D"]


def test_the_column_is_text_or_the_only_one_of_text_or_named():
    assert listed([{"id": 1, "body": "a"}]) == ["a"]
    assert listed([{"text": "a", "title": "b"}]) == ["a"]
    assert listed([{"text": "a", "title": "b"}], column="title") == ["b"]
    with refused(ValueError):
        listed([{"body": "a", "title": "b"}])
    with refused(ValueError):
        listed([{"id": 1}])
    with refused(ValueError):
        listed([{"text": "a", "title": "b"}], column="titel")
    with refused(ValueError):
        listed([{"text": "a"}, {"body": "b"}])
    with refused(ValueError):
        listed([{"text": 3}], column="text")


# Bad input -------------------------------------------------------------------------------------------------------------


def test_a_missing_file_suggests_near_names(folder):
    with refused(FileNotFoundError):
        listed(str(folder / "aa.txt"))
    with refused(FileNotFoundError):
        listed(folder / "nowhere" / "a.txt")
    with refused(FileNotFoundError):
        listed("no_such.txt")
    with refused(FileNotFoundError):
        listed([folder / "absent"])


@pytest.mark.parametrize("source", ["Call me Ishmael.\nSome years ago", "word " * 1000])
def test_a_text_passed_as_a_path_is_told_to_be_put_in_a_list(source):
    with refused(FileNotFoundError):
        listed(source)


def test_a_folder_without_text(tmp_path):
    (tmp_path / "x.log").write_text("")
    with refused(ValueError):
        listed(tmp_path)


def test_lines_that_are_not_json_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    with refused(ValueError):
        listed(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n[1]\n')
    with refused(ValueError):
        listed(tmp_path / "x.jsonl")
    (tmp_path / "x.json").write_text('{"text": "a"}')
    with refused(ValueError):
        listed(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_what_is_not_utf8_says_so(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}')
    with refused(ValueError):
        listed(tmp_path / name)


@pytest.mark.parametrize("source", [3, None, {"text": "a"}, b"bytes"])
def test_what_is_no_source_is_a_type_error(source):
    with refused(TypeError):
        listed(source)


def test_a_hub_id_without_a_network_is_one_sentence(monkeypatch):
    def never(name, split, config):
        raise AssertionError("asked although nothing answers")

    monkeypatch.setattr(hub, "offline_by_choice", lambda: False)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr(sources, "load_dataset", never)
    with refused(FileNotFoundError) as caught:
        listed("someone/stories")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("online", [True, False])
def test_a_connection_that_breaks_is_the_same_sentence(monkeypatch, online):
    def broken(name, split, config):
        raise ConnectionError("Couldn't reach 'someone/stories' on the Hub")

    monkeypatch.setattr(hub, "offline_by_choice", lambda: not online)
    monkeypatch.setattr(hub, "reachable", lambda: online)
    monkeypatch.setattr(sources, "load_dataset", broken)
    with refused(FileNotFoundError):
        listed("someone/stories")


def test_a_dataset_that_does_not_load_says_why(monkeypatch):
    def unreachable(name, split, config):
        raise ValueError("Config name is missing.\nPlease pick one")

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(sources, "load_dataset", unreachable)
    with refused(ValueError):
        listed("stories")


def test_a_hub_id_gives_the_split_asked_for(monkeypatch):
    import datasets

    def load(name, split, config):
        return datasets.Dataset.from_dict({"text": [f"{name} {split}"]})

    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(sources, "load_dataset", load)
    assert listed("someone/stories", split="test") == ["someone/stories test"]


def test_progress_bars_are_quiet_inside_only():
    from datasets.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    with sources._quiet():
        assert are_progress_bars_disabled()
    assert are_progress_bars_disabled() == before


def test_chunks_keep_every_text_in_order():
    texts = ["ab", "c", "def", "", "g"]
    for items, characters in [(1, 99), (2, 99), (99, 3), (99, 99)]:
        groups = list(sources.chunks(iter(texts), items, characters))
        assert [text for group in groups for text in group] == texts
        assert all(0 < len(group) <= items for group in groups)
