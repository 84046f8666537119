"""Turn conversations into token ids, and mark which of those the assistant wrote.

A conversation is rendered to one text by the tokenizer's chat template (templates.py) and tokenized once, so the ids are those
of transformers' `apply_chat_template`. Which characters are the assistant's is known either from the template's
`{% generation %}` tags, or from rendering it prefix by prefix: a turn starts where the conversation before it, with the
generation prompt, ends. A token is trained on when all of its characters are the assistant's; the end-of-turn token is,
the line break that a template puts behind it is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surokit.data.templates import DEFAULT_TEMPLATE, Message, Span, has_tags, normalise, render
from surokit.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """An Encoded is one conversation as tokens.

    Attributes:
        ids_T: token ids.
        trained_T: True where the token counts in the loss.
        straddling: tokens that hold characters of both the prompt and the assistant; not trained on.
    """

    ids_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    straddling: int


def template_for(tokenizer: Tokenizer, template: str | None) -> str:
    """Return the template that conversations are rendered with: the given one, the tokenizer's, or ChatML."""
    return template or tokenizer.chat_template or DEFAULT_TEMPLATE


def encode(
    conversations: Sequence[tuple[str, list[Message]]],
    tokenizer: Tokenizer,
    template: str | None = None,
    train_on: str = "assistant",
) -> list[Encoded]:
    """Tokenize conversations, given with a phrase that says where each stands, and mark what is trained on.

    Raises:
        ValueError: no assistant turn (with train_on="assistant"), the template refuses a conversation, or the template
            rewrites earlier turns so that the assistant's part cannot be told.
    """
    template = template_for(tokenizer, template)
    texts, spans = [], []
    for where, messages in conversations:
        text, tagged = render(template, messages, tokenizer.special, where)
        texts.append(text)
        if train_on == "all":
            spans.append([(0, len(text))])
            continue
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f'{where} has no assistant turn, so nothing in it is trained on: remove it, or pass train_on="all"'
            )
        spans.append(tagged if has_tags(template) else _spans(template, messages, text, tokenizer, where))
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [_mark(encoding, span) for encoding, span in zip(encodings, spans)]


def _spans(template: str, messages: list[Message], text: str, tokenizer: Tokenizer, where: str) -> list[Span]:
    """Return the assistant's characters, from the template's own behaviour: each turn follows what was rendered before it."""
    ends = _special(tokenizer)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = render(template, messages[:i], tokenizer.special, where, prompt=True)
        through, _ = render(template, messages[: i + 1], tokenizer.special, where)
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


@dataclass(frozen=True)
class Prompt:
    """A Prompt is a conversation up to the point where the assistant speaks.

    Attributes:
        ids: the tokens, the opening of the assistant's turn included.
        end_ids: tokens that end the turn: the template's end-of-turn token and the tokenizer's end-of-text token.
        end_text: what the template puts behind a turn where that is no special token of the tokenizer, else "".
    """

    ids: list[int]
    end_ids: tuple[int, ...]
    end_text: str

    def reply(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """Return the text of a turn made of `ids`, up to its end, without special tokens and outer white space."""
        end = next((at for at, i in enumerate(ids) if i in self.end_ids), len(ids))
        text = tokenizer.decode(ids[:end], skip_special=True)
        return (text.partition(self.end_text)[0] if self.end_text else text).strip()


def prompt_for_reply(value: Any, tokenizer: Tokenizer, template: str | None = None) -> Prompt:
    """Return the prompt for the assistant's next turn: `value` is a conversation, or one text that the user says.

    Raises:
        ValueError: not a conversation, the assistant has the last word, there is no template, or it refuses.
    """
    where = "messages"
    messages = normalise([{"role": "user", "content": value}] if isinstance(value, str) else value, where)
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{where} ends with the assistant's turn, so there is nothing to reply to: end with the user's turn"
        )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, chat_template=template)
    # What ends a turn is read off the template: it stands behind the words of a finished one.
    word = "surokit"
    said = [*messages, {"role": "assistant", "content": word}]
    behind = tokenizer.apply_chat_template(said, chat_template=template).rpartition(word)[2]
    token = _special(tokenizer).search(behind)
    end_text = (behind[: token.start()] if token else behind).strip()
    mark = tokenizer.encode(token.group() if token else end_text)
    ends = {*([] if tokenizer.eos_id is None else [tokenizer.eos_id]), *(mark if len(mark) == 1 else [])}
    return Prompt(tokenizer.encode(text), tuple(sorted(ends)), end_text)


def _special(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern that matches the text of any special token, or nothing where there is none."""
    return re.compile("|".join(map(re.escape, tokenizer.special_texts)) or r"(?!)")


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
