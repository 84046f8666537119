"""Render a conversation to one text by its chat template, as transformers' `apply_chat_template` does.

Templates come from downloaded files, so they run in Jinja's immutable sandbox and see plain JSON values only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from surokit.data.sources import did_you_mean

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


def normalise(value: Any, where: str) -> list[Message]:
    """Return a conversation as a list of {"role", "content", ...}, from that or from ShareGPT's {"from", "value"}.

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


def has_tags(template: str) -> bool:
    """Return whether the template itself says which part the assistant writes."""
    return _GENERATION.search(template) is not None


def render(
    template: str, messages: list[Message], special: Mapping[str, str], where: str, prompt: bool = False
) -> tuple[str, list[Span]]:
    """Render a conversation to text, and find the spans that the template's generation tags name.

    Args:
        template: in Jinja.
        messages: as `normalise` returns them.
        special: special tokens by role, for instance {"eos_token": "</s>"}; the template may name them.
        where: opens the sentence of an error.
        prompt: also opens the assistant's next turn.

    Raises:
        ValueError: the template is not valid, or refuses the conversation.
    """
    import jinja2

    try:
        marked = _compile(template).render(  # templates ask whether there are tools: transformers says None as well
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **special
        )
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


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON values: nothing with methods of its own reaches a template."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return str(value)


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    """Return the template with what chat templates expect: loop controls, tojson, raise_exception, strftime_now."""
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
