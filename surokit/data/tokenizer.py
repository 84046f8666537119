"""Wrap the `tokenizers` package in one small class, however the tokenizer was obtained.

A Tokenizer is a vocabulary with its end-of-text token, its other special tokens and its chat template. It is loaded from
a folder, a `tokenizer.json`, an id on the Hub, or an object of `tokenizers` or `transformers`; or trained on a text. It is
written in the layout that `transformers.AutoTokenizer` reads.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from surokit import hub
from surokit.data import sources, templates
from surokit.places import make_folder

# Tried in this order where no configuration names the end-of-text token.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A Tokenizer turns text to token ids and back.

    Made by `load_tokenizer` and `train_tokenizer`. Never changes after it is made.

    Attributes:
        backend: the `tokenizers.Tokenizer`, without truncation and padding.
        name: where it came from, for messages.
        special: role to text, for instance {"eos_token": "<|endoftext|>"}.
        chat_template: the Jinja template of a conversation, or None.
    """

    def __init__(self, backend: Any, config: Mapping[str, Any] | None = None, name: str = "tokenizer") -> None:
        import tokenizers

        # A copy: the caller's object keeps its truncation and padding, which would cut documents here.
        self.backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.name = name
        self._config = {key: value for key, value in (config or {}).items() if key not in ("auto_map", "chat_template")}
        self.chat_template = _default_template((config or {}).get("chat_template"))
        self.special = {role: text for role in _ROLES if (text := _token_text(self._config.get(role))) is not None}
        if "eos_token" not in self.special:
            known = next((text for text in _END_OF_TEXT if self.backend.token_to_id(text) is not None), None)
            if known is not None:
                self.special["eos_token"] = known

    @cached_property
    def vocab_size(self) -> int:
        """Return the rows that an embedding needs: the largest id plus one, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_id(self) -> int | None:
        """Return the end-of-text token's id, or None where the tokenizer has none."""
        return self._id("eos_token")

    @cached_property
    def opening_id(self) -> int | None:
        """Return the begin-of-text token's id where this tokenizer puts one before every text (Llama does), else None."""
        bos = self._id("bos_token")
        opens = self.backend.encode("", add_special_tokens=True).ids[:1] == [bos]
        return bos if opens and bos != self.eos_id else None

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of all special tokens (end of turn and the like), longest first."""
        added = (token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)
        return tuple(sorted({*added, *self.special.values()}, key=lambda text: (-len(text), text)))

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ where the vocabulary, the special tokens or the template differ."""
        parts = [self.backend.to_str(), self.chat_template, sorted(self.special.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added at either end."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts at once, on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of `ids` (a list, an array or a tensor of one dimension); special tokens stay unless skipped."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = False, chat_template: str | None = None
    ) -> str:
        """Render a conversation to text with the chat template, as transformers' method of this name does with tokenize=False.

        Args:
            messages: a list of {"role": ..., "content": ...}, the first turn first.
            add_generation_prompt: also opens the assistant's turn that is to be written.
            chat_template: a Jinja template instead of the tokenizer's own.

        Raises:
            ValueError: there is no template, it refuses the conversation, or `messages` is no conversation.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise ValueError(
                f"the tokenizer ({self.name}) has no chat template: load one that has (its folder holds "
                "chat_template.jinja), or pass a Jinja template yourself"
            )
        where = "messages"
        plain = templates.normalise(messages, where)
        return templates.render(template, plain, self.special, where, prompt=add_generation_prompt)[0]

    def save(self, folder: str | Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json; `transformers.AutoTokenizer` loads the folder."""
        folder = Path(folder).expanduser()
        make_folder(folder, "folder of the tokenizer")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, **self.special}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return folder

    def _id(self, role: str) -> int | None:
        text = self.special.get(role)
        return None if text is None else self.backend.token_to_id(text)

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        template = "with a chat template" if self.chat_template else "no chat template"
        return f"Tokenizer({self.name}: {self.vocab_size:,} ids, end of text {self.special.get('eos_token')!r}, {template})"


def load_tokenizer(source: Any) -> Tokenizer:
    """Return a Tokenizer from a folder, a tokenizer.json, an id on the Hub, or a tokenizer object.

    Args:
        source: path of a folder with tokenizer.json, path of such a file, Hub id, `tokenizers.Tokenizer`, a fast
            tokenizer of `transformers`, or a Tokenizer (returned as it is).

    Raises:
        FileNotFoundError: nothing is there (near names are suggested), or the Hub does not answer.
        ValueError: the file is not a tokenizer.
        TypeError: not a tokenizer, or one of `transformers` without a `tokenizers` backend.
    """
    if isinstance(source, Tokenizer):
        return source
    if isinstance(source, str | Path):
        path = sources.existing_path(source)
        if path is not None:
            return _from_path(path)
        if isinstance(source, Path) or sources.looks_like_path(source):
            raise sources.missing(str(source), "tokenizer")
        return _from_hub(source)
    module = type(source).__module__.partition(".")[0]
    if module == "tokenizers" and hasattr(source, "to_str"):
        return Tokenizer(source)
    if hasattr(source, "backend_tokenizer"):
        config = {role: getattr(source, role, None) for role in _ROLES}
        config["chat_template"] = getattr(source, "chat_template", None)
        longest = getattr(source, "model_max_length", None)
        if isinstance(longest, int) and longest < 10**9:  # transformers writes 10**30 for "no limit"
            config["model_max_length"] = longest
        return Tokenizer(source.backend_tokenizer, config, getattr(source, "name_or_path", "") or "tokenizer")
    if module == "transformers":
        raise TypeError(f"{type(source).__name__} has no `tokenizers` backend: load its fast version instead")
    raise TypeError(
        f"a {type(source).__name__} is not a tokenizer: pass a folder, a tokenizer.json, a Hub id, or a tokenizer of "
        "tokenizers, transformers or surokit"
    )


def train_tokenizer(texts: Any, vocab_size: int, special: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
    """Train a byte-level byte-pair tokenizer (any text can be written with it; nothing is unknown).

    Args:
        texts: as for `sk.text`: a file, a folder, a list of texts or paths, a Dataset, a dataset id.
        vocab_size: ids wanted, special tokens included; a short text may give fewer.
        special: special tokens; they take the first ids, and the first of them ends a text.

    Raises:
        ValueError: `vocab_size` below 256 + len(special), no special token, or no text.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if isinstance(special, str) or not special:
        raise ValueError(f"special={special!r} must be a sequence of tokens, the one that ends a text first")
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size={vocab_size} is below {256 + len(special)}: 256 bytes and {len(special)} special tokens"
        )
    name, documents = sources.documents(texts)
    count = 0

    def counted() -> Iterable[Sequence[str]]:
        nonlocal count
        for group in sources.chunks(documents):
            count += len(group)
            yield group

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        counted(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if count == 0:
        raise ValueError(f"there is no text in {name}: nothing to train a tokenizer on")
    return Tokenizer(backend, {"eos_token": special[0]}, name=f"trained on {name}")


def check_vocabulary(tokenizer_or_batches: Any, vocab_size: int) -> None:
    """Refuse a tokenizer, or batches made with one, that has ids beyond a model's `vocab_size` embedding rows.

    Data without a tokenizer of ours (a list, a DataLoader) passes.

    Raises:
        ValueError: the tokenizer is larger than the model's vocabulary.
    """
    tokenizer = getattr(tokenizer_or_batches, "tokenizer", tokenizer_or_batches)
    if isinstance(tokenizer, Tokenizer) and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab_size:,} ids but the model embeds {vocab_size:,}: use the "
            "model's own tokenizer, or a model with a larger vocab"
        )


def _from_path(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        beside = sorted(entry.name for entry in path.iterdir())
        hint = "; save it once with transformers' fast tokenizer to get one" if "tokenizer.model" in beside else ""
        raise FileNotFoundError(f"the folder {str(path)!r} has no tokenizer.json (it has {beside[:8]}){hint}")
    folder = file.parent
    return _from_files(file, folder / "tokenizer_config.json", folder / "chat_template.jinja", str(path))


def _from_hub(name: str) -> Tokenizer:
    from huggingface_hub.errors import EntryNotFoundError

    online = hub.reachable()
    found: dict[str, Path] = {}
    for filename in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        try:
            found[filename] = hub.fetch(name, filename, online=online)
        except Exception as error:
            if filename != "tokenizer.json" and isinstance(error, EntryNotFoundError):
                continue  # these two are optional
            if not online:
                raise FileNotFoundError(
                    f"there is no folder {name!r}, the Hub does not answer, and the cache has no tokenizer of that name: "
                    "connect once, or pass a folder"
                ) from None
            reason = str(error).strip().partition("\n")[0]
            raise FileNotFoundError(f"no {filename} could be had from {name!r} on the Hub ({reason})") from error
    nowhere = found["tokenizer.json"].parent / "absent"
    return _from_files(
        found["tokenizer.json"],
        found.get("tokenizer_config.json", nowhere),
        found.get("chat_template.jinja", nowhere),
        name,
    )


def _from_files(file: Path, config_file: Path, template_file: Path, name: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{str(file)!r} is not a tokenizer.json ({error})") from None
    config: dict[str, Any] = {}
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{str(config_file)!r} is not JSON ({error})") from None
    if template_file.is_file():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    return Tokenizer(backend, config, name)


def _token_text(value: Any) -> str | None:
    """Return a special token as configurations write it: a text, {"content": text}, or nothing."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return None if value is None else str(value)


def _default_template(value: Any) -> str | None:
    """Return the template called "default" where a configuration has several (a list of named ones, or a mapping)."""
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value}
    if isinstance(value, Mapping):
        value = value.get("default")
    return value
