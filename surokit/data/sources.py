"""Read text from files, folders, `datasets` objects, dataset ids on the Hub and plain lists.

Every source becomes one pass over values (documents, or conversations), read as they are needed: the only thing that is
kept of a corpus is its tokens. Text and JSON lines are read directly, so that nothing is copied into a cache and an error
can name the line; Parquet, Arrow and the Hub go through `datasets`.

A `.txt` file holds several documents when two or more blank lines separate them; any other text file is one document.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from surokit import hub

# Given a record's column names and the record, the name of the column to read.
Choose = Callable[[list[str], Mapping[str, Any]], str]

_FOLDER_SUFFIXES = (".txt", ".jsonl", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read(source: Any, split: str, choose: Choose | None) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Return a source's name and its values, each with a phrase that says where it stands ("book.jsonl line 3").

    Records give the column that `choose` picks, or themselves where it is None; text files and lists give their items as they are.

    Raises:
        FileNotFoundError: no such file, folder or dataset (near names are suggested), or the Hub does not answer.
        ValueError: not text, not JSON, no such split or column.
        TypeError: not a source at all.
    """
    if isinstance(source, str | Path):
        path = existing_path(source)
        if path is not None:
            return path.name or str(path), _path_values(path, split, choose)
        name = str(source)
        if isinstance(source, Path) or looks_like_path(name):
            raise missing(name, "text")
        return name, _dataset_values(from_hub(name, split), name, split, choose)
    if type(source).__module__.partition(".")[0] == "datasets":
        name = f"a datasets.{type(source).__name__}"
        return name, _dataset_values(source, name, split, choose)
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        return f"a {type(source).__name__}", _item_values(source, f"a {type(source).__name__}", split, choose)
    raise TypeError(
        f"cannot read text from a {type(source).__name__}: pass a file, a folder, a dataset id, a datasets.Dataset "
        "or a list"
    )


def documents(source: Any, column: str | None = None, split: str = "train") -> tuple[str, Iterator[str]]:
    """Return a source's name and its documents as strings; missing and blank ones are skipped. Raises as `read`."""

    def choose(names: list[str], record: Mapping[str, Any]) -> str:
        if column is None and "text" in names:
            return "text"
        of_text = [name for name in names if isinstance(record[name], str)]
        if column is None and len(of_text) == 1:
            return of_text[0]
        return _named_column(column, names, f"its text columns are {of_text}" if of_text else "none of them is text")

    name, values = read(source, split, choose)

    def strings() -> Iterator[str]:
        for where, value in values:
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{where} holds a {type(value).__name__} where text is expected: name another column=")
            if value is not None and value.strip():
                yield value

    return name, strings()


def choose_conversation(column: str | None) -> Choose:
    """Pick `column`, or the first of "messages", "conversations", "conversation" that a record has."""

    def choose(names: list[str], record: Mapping[str, Any]) -> str:
        if column is None:
            for usual in ("messages", "conversations", "conversation"):
                if usual in names:
                    return usual
        return _named_column(column, names, 'none of them is called "messages" or "conversations"')

    return choose


def _named_column(column: str | None, names: list[str], otherwise: str) -> str:
    if column is None:
        raise ValueError(f"which column to read is not clear (columns: {names}; {otherwise}): name one with column=")
    if column not in names:
        raise ValueError(f"there is no column {column!r}{did_you_mean(column, names)}; the columns are {names}")
    return column


# Paths ---------------------------------------------------------------------------------------------------------------


def existing_path(source: str | Path) -> Path | None:
    """Return `source` as a path if something is there, else None; a text passed by mistake is not a path."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long for a file name, a NUL in it, no such home
        return None


def looks_like_path(name: str) -> bool:
    """Return whether a missing name was meant as a path rather than as an id on the Hub."""
    known = Path(name).suffix.lower() in {*_FOLDER_SUFFIXES, ".json", ".md"} if len(name) < 4096 else True
    return known or name.startswith(("/", "~", ".")) or not _HUB_ID.fullmatch(name)


def missing(name: str, what: str) -> FileNotFoundError:
    """Return the error for a path that is not there, with the near names that are."""
    if len(name) > 255 or "\n" in name:
        return FileNotFoundError(f"no file is called {name[:40]!r}...: to pass {what} itself, put it in a list")
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return FileNotFoundError(f"there is no folder {str(path.parent)!r}, so no {what} at {name!r}")
    beside = [entry.name for entry in path.parent.iterdir()]
    return FileNotFoundError(f"there is no {what} at {name!r}{did_you_mean(path.name, beside)}")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'x' or 'y'?" for the nearest candidates, or nothing."""
    near = get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _path_values(path: Path, split: str, choose: Choose | None) -> Iterator[tuple[str, Any]]:
    if path.is_file():
        return _file_values(path, choose)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        import datasets

        return _dataset_values(datasets.load_from_disk(str(path)), path.name, split, choose)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _FOLDER_SUFFIXES and file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(
            f"the folder {str(path)!r} holds no {', '.join(_FOLDER_SUFFIXES)} file: there is no text in it"
        )
    return chain.from_iterable(_file_values(file, choose) for file in files)


def _file_values(path: Path, choose: Choose | None) -> Iterator[tuple[str, Any]]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import datasets

        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        return _dataset_values(rows, path.name, "train", choose)
    if suffix in (".jsonl", ".json"):
        return _column(_json_records(path), choose)
    return _text_documents(path)


def _text_documents(path: Path) -> Iterator[tuple[str, str]]:
    several = path.suffix.lower() == ".txt"
    lines: list[str] = []
    blank: list[str] = []  # lines since the last one with text in it
    count = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                if line.isspace():
                    blank.append(line)
                    continue
                if lines and several and len(blank) >= 2:
                    count += 1
                    yield f"{path.name} document {count}", "".join(lines).rstrip("\n")
                    lines = [line]
                else:
                    lines += [*blank, line] if lines else [line]
                blank = []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text ({error.reason}): convert it to UTF-8 first") from None
    if lines:
        yield f"{path.name} document {count + 1}", "".join(lines).rstrip("\n")


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    where = path.name
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix.lower() == ".json":
                whole = json.load(file)
                if not isinstance(whole, list):
                    raise ValueError(f"{path.name} holds a {type(whole).__name__} where a list of records is expected")
                yield from ((f"{path.name} record {i}", record) for i, record in enumerate(whole, 1))
                return
            for number, line in enumerate(file, 1):
                where = f"{path.name} line {number}"
                if not line.isspace():
                    yield where, json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}, column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text ({error.reason}): convert it to UTF-8 first") from None


def _item_values(items: Iterable[Any], name: str, split: str, choose: Choose | None) -> Iterator[tuple[str, Any]]:
    """Yield where each item stands, and its value: a path gives its file's, a mapping one column; others are given as they are."""
    chosen: str | None = None
    for number, item in enumerate(items, 1):
        where = f"item {number} of {name}"
        if isinstance(item, Path):
            path = existing_path(item)
            if path is None:
                raise missing(str(item), "text")
            yield from _path_values(path, split, choose)
        elif isinstance(item, Mapping) and choose is not None:
            chosen = chosen or choose(list(item), item)
            yield where, _cell(item, chosen, where)
        else:
            yield where, item


def _column(records: Iterable[tuple[str, Any]], choose: Choose | None) -> Iterator[tuple[str, Any]]:
    chosen: str | None = None
    for where, record in records:
        if not isinstance(record, Mapping):
            raise ValueError(f"{where} holds a {type(record).__name__} where a record ({{...}}) is expected")
        if choose is None:
            yield where, record
            continue
        chosen = chosen or choose(list(record), record)
        yield where, _cell(record, chosen, where)


def _cell(record: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in record:
        raise ValueError(f"{where} has no column {column!r}; it has {list(record)}")
    return record[column]


# datasets ------------------------------------------------------------------------------------------------------------


def _dataset_values(rows: Any, name: str, split: str, choose: Choose | None) -> Iterator[tuple[str, Any]]:
    if isinstance(rows, Mapping):  # DatasetDict: split -> Dataset
        if split not in rows:
            raise ValueError(f"{name} has no split {split!r}{did_you_mean(split, rows)}; the splits are {list(rows)}")
        rows = rows[split]
    first = next(iter(rows), None)
    if first is None:
        return iter(())
    if choose is None:
        return ((f"row {number} of {name}", row) for number, row in enumerate(rows, 1))
    column = choose(list(first), first)
    return _batched_column(rows.select_columns([column]), column, name)


def _batched_column(rows: Any, column: str, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in rows.iter(batch_size=1000):  # a thousand rows a call: many times faster than one by one
        for value in batch[column]:
            number += 1
            yield f"row {number} of {name}", value


def from_hub(name: str, split: str, config: str | None = None) -> Any:
    """Return one split of a dataset on the Hub, of one of its configurations where it has several; from the cache where the user
    switched the Hub's client off. Raises FileNotFoundError where the Hub does not answer, ValueError where it does not load."""
    if not hub.offline_by_choice() and not hub.reachable():
        raise FileNotFoundError(_unreachable(name))
    try:
        return load_dataset(name, split, config)
    except ConnectionError:
        raise FileNotFoundError(_unreachable(name)) from None
    except Exception as error:  # the loader's many kinds (no such id, gated, no such split, several configurations)
        reason = str(error).strip().partition("\n")[0]
        beside = did_you_mean(name, (entry.name for entry in Path().iterdir()))
        raise ValueError(
            f"the dataset {name!r} does not load ({reason}), and no file or folder here has that name{beside}; "
            "where it needs more arguments, pass datasets.load_dataset(...) itself"
        ) from error


def _unreachable(name: str) -> str:
    beside = did_you_mean(name, (entry.name for entry in Path().iterdir()))
    return (
        f"there is no file or folder {name!r}{beside}, and the Hub does not answer to look for a dataset of that name: "
        "connect, pass a local file, or set HF_HUB_OFFLINE=1 before Python starts to use a copy in the cache"
    )


def load_dataset(name: str, split: str, config: str | None = None) -> Any:
    import datasets

    with _quiet():
        return datasets.load_dataset(name, config, split=split)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars of `datasets` inside the block, and restore the user's choice afterwards."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def chunks(texts: Iterable[str], items: int = 1000, characters: int = 4_000_000) -> Iterator[Sequence[str]]:
    """Yield texts in groups of at most `items` and about `characters`: enough for every core, little enough for memory."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if len(group) == items or size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
