"""Conversations to token ids, and which of those ids the assistant wrote.

A conversation is rendered to one text by the tokenizer's chat template and tokenized once, so the ids are those of
transformers' `apply_chat_template`. Which characters are the assistant's is known either from the template's
`{% generation %}` tags, or from rendering it prefix by prefix: a turn starts where the conversation before it, with the
generation prompt, ends. A token is trained on when all of its characters are the assistant's; the end-of-turn token is,
the line break that a template puts behind it is not.

Templates come from downloaded files, so they run in Jinja's immutable sandbox and see plain JSON values only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surokit.data.sources import did_you_mean
from surokit.data.tokenizer import Tokenizer

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of a rendered conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "function": "tool"}

# ChatML. Used where a tokenizer has no template; its tags say which part the assistant writes.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# What a {% generation %} block renders to has these around it until the spans are read off.
_OPEN, _CLOSE = "\x00\x02", "\x00\x03"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# Templates that print today's date get this day, the one Llama's template falls back to: the same data gives the same
# tokens tomorrow, and a run resumed tomorrow still recognises its data.
_TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens.

    Attributes:
        ids_T: token ids.
        trained_T: True where the token counts in the loss.
        straddling: tokens that hold characters of both the prompt and the assistant; not trained on.
    """

    ids_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    straddling: int


def normalise(value: Any, where: str) -> list[Message]:
    """A conversation as a list of {"role", "content", ...}, from that or from ShareGPT's {"from", "value"}.

    Raises:
        ValueError: not a conversation, an unknown role, or a message without content. `where` opens the sentence.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        raise ValueError(f"{where} is not a conversation: a list of {{'role': ..., 'content': ...}} is expected")
    messages = []
    for turn, item in enumerate(value, 1):
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}, turn {turn}: a {type(item).__name__} where a message with a role is expected")
        message = {key: _plain(part) for key, part in item.items() if part is not None}
        if "role" not in message and "from" in message:
            message["role"] = message.pop("from")
            message["content"] = message.pop("value", None)
        role = str(message.get("role", "")).lower()
        role = _SHAREGPT.get(role, role)
        if role not in ROLES:
            hint = did_you_mean(role, (*ROLES, *_SHAREGPT))
            raise ValueError(f"{where}, turn {turn}: unknown role {message.get('role')!r}{hint}; roles are {ROLES}")
        content = message.get("content")
        if isinstance(content, list):  # parts; text only
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise ValueError(f"{where}, turn {turn}: only parts of text can be trained on, not images or audio")
            content = "".join(part["text"] for part in content)
        if content is None and "tool_calls" in message:
            content = ""
        if not isinstance(content, str):
            raise ValueError(f"{where}, turn {turn} ({role}) has no text as its content")
        messages.append({**message, "role": role, "content": content})
    return messages


def encode(
    conversations: Sequence[tuple[str, list[Message]]],
    tokenizer: Tokenizer,
    template: str | None = None,
    train_on: str = "assistant",
) -> list[Encoded]:
    """Tokenizes conversations, given with a phrase that says where each stands, and marks what is trained on.

    Raises:
        ValueError: no assistant turn (with train_on="assistant"), the template refuses a conversation, or the template
            rewrites earlier turns so that the assistant's part cannot be told.
    """
    template = template or tokenizer.chat_template or DEFAULT_TEMPLATE
    texts, spans = [], []
    for where, messages in conversations:
        text, tagged = render(template, messages, tokenizer, where)
        texts.append(text)
        if train_on == "all":
            spans.append([(0, len(text))])
            continue
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f'{where} has no assistant turn, so nothing in it is trained on: remove it, or pass train_on="all"'
            )
        spans.append(tagged if _GENERATION.search(template) else _spans(template, messages, text, tokenizer, where))
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [_mark(encoding, span) for encoding, span in zip(encodings, spans)]


def render(
    template: str, messages: list[Message], tokenizer: Tokenizer, where: str, prompt: bool = False
) -> tuple[str, list[Span]]:
    """A conversation as text, with the spans that the template's generation tags name; `prompt` opens the next turn."""
    import jinja2

    try:
        marked = _compile(template).render(messages=messages, add_generation_prompt=prompt, **tokenizer.special)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses {where} ({error})") from None
    pieces = re.split(f"({_OPEN}|{_CLOSE})", marked)
    text, spans, length = [], [], 0
    for piece in pieces:
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            spans.append((start, length))
        else:
            text.append(piece)
            length += len(piece)
    return "".join(text), spans


def _spans(template: str, messages: list[Message], text: str, tokenizer: Tokenizer, where: str) -> list[Span]:
    """The assistant's characters, from the template's own behaviour: each turn follows what was rendered before it."""
    ends = re.compile("|".join(map(re.escape, tokenizer.special_texts)) or r"(?!)")
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = render(template, messages[:i], tokenizer, where, prompt=True)
        through, _ = render(template, messages[: i + 1], tokenizer, where)
        start = len(before)
        if text.startswith(before) and text.startswith(through):
            # Behind the end-of-turn token a template may put a line break, which the model never has to write.
            last = [match.end() for match in ends.finditer(text, start, len(through))]
            spans.append((start, last[-1] if last else len(through)))
            continue
        # Templates of reasoning models render a turn differently once another follows: then look for its own words.
        content = message["content"].strip()
        at = text.find(content, start) if text.startswith(before) and content else -1
        found = at >= 0 and ends.search(text, start, at) is None  # and within this very turn
        end = ends.search(text, at + len(content)) if found else None
        if end is None:
            raise ValueError(
                f"{where}: the chat template rewrites earlier turns, so turn {i + 1} cannot be told apart; put "
                "{% generation %} ... {% endgeneration %} around the assistant's part and pass it as template=, or use "
                'train_on="all"'
            )
        spans.append((start, end.end()))
    return spans


def _mark(encoding: Any, spans: list[Span]) -> Encoded:
    offsets_T2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    start_T, end_T = offsets_T2[:, 0], offsets_T2[:, 1]
    # Some tokenizers leave a token's leading space out of its offsets: what lies between two tokens is the second one's.
    start_T = np.minimum(start_T, np.concatenate([[0], np.maximum.accumulate(end_T)[:-1]])) if len(end_T) else start_T
    trained_T = np.zeros(len(start_T), dtype=np.bool_)
    straddling_T = np.zeros(len(start_T), dtype=np.bool_)
    for start, end in spans:
        inside_T = (start_T >= start) & (end_T <= end)
        trained_T |= inside_T
        straddling_T |= (start_T < end) & (end_T > start) & ~inside_T
    return Encoded(np.array(encoding.ids, dtype=np.int64), trained_T, int(straddling_T.sum()))


def _plain(value: Any) -> Any:
    """Plain JSON values only: nothing with methods reaches a template."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return str(value)


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    """The template with what chat templates expect: loop controls, tojson, raise_exception, strftime_now."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja's own convention

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_tag"), [], [], body).set_lineno(line)

        def _tag(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is not valid Jinja ({error})") from None
