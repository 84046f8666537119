"""Find out what a server takes: its model, how it counts tokens, and how answers get a fixed length; and make the requests."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surokit.serving.client import Answer, Client
from surokit.serving.prompts import WORDS, Uncountable, single, texts
from surokit.serving.workload import Workload

#: What keeps an answer from ending early, in the servers that know it; the first that a server takes is sent.
FIXED_LENGTH: tuple[Mapping[str, Any], ...] = ({"ignore_eos": True}, {})
NOT_TAKEN = (400, 422)  # status of an answer to a request with fields that a server does not take
USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Server:
    """A Server is what is known of one: its model, what is sent with each request, and its words of one token.

    beside: tokens that a prompt has beside its words; words: () where tokens are not counted. notes: what a reader of the figures
    has to know.
    """

    model: str
    chat: bool
    options: Mapping[str, Any]
    beside: int = 0
    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return "chat/completions" if self.chat else "completions"

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Return the request for an answer of so many tokens, as a stream."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {"model": self.model, **asked, "max_tokens": tokens, "temperature": 0, "stream": True, **self.options}

    def bodies(self, workload: Workload, began: str) -> list[dict[str, Any]]:
        """Return the requests of a workload, with other prompts each time that it began.

        ValueError where they are shorter than what the server puts around them.
        """
        n = workload.requests
        if workload.prompts:
            prompts = [workload.prompts[i % len(workload.prompts)] for i in range(n)]
        else:
            length = workload.input_tokens - self.beside
            if length < 1:
                raise ValueError(
                    f"Workload(input_tokens={workload.input_tokens}): the server puts {self.beside} tokens around every prompt, "
                    "so give more."
                )
            # a server that keeps what it computed of a prompt would answer from memory when it comes again
            prompts = texts(self.words, [length] * n, (workload.seed, workload.digest, zlib.crc32(began.encode())))
        return [self.body(prompt, workload.output_tokens) for prompt in prompts]


async def asked(
    client: Client, model: str | None, workload: Workload, extra: Mapping[str, Any], known: str | None = None
) -> Server:
    """Find out what a server takes. extra: is sent with each request as it is. known: the model that was measured before, which is
    taken where none is given and the server has it.

    ConnectionError where it does not answer; ValueError for a model that has to be named, and for requests that it refuses.
    """
    named = model or await only_model(client, known)
    first = await _accepted(client, Server(named, workload.chat, extra))
    if workload.prompts:
        return first

    async def count(text: str) -> int:
        answer = await client.answer(first.path, first.body(text, 1))
        if answer.state != "answered":
            raise ConnectionError(
                f"serve_bench({client.url!r}): a request of {len(text)} characters got no answer: {answer.why}."
            )
        if answer.input_tokens is None:
            raise Uncountable("the server does not say how many tokens a prompt has")
        return answer.input_tokens

    try:
        beside, words = await single(count)
    except Uncountable as error:
        note = f"{error}, so prompts have as many words as tokens were asked for"
        return replace(first, words=WORDS, notes=(*first.notes, note))
    return replace(first, beside=beside, words=words)


async def only_model(client: Client, known: str | None = None) -> str:
    """Return the model of a server that has one, or `known` where it is among them. ValueError where there are several others."""
    try:
        found = await client.get("models")
        names = [str(each["id"]) for each in found["data"]]
    except (ConnectionError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(
            f"serve_bench({client.url!r}): the server does not list its models ({error}): is it up, and "
            "does the address end as OpenAI's does, in /v1? Else give model=."
        ) from error
    if not names:
        raise ValueError("serve_bench(model=None): the server names no model, so name one with model=.")
    if known in names:
        return str(known)
    if len(names) != 1:
        raise ValueError(
            f"serve_bench(model=None): the server has {len(names)} models, so name one: {', '.join(names[:8])}."
        )
    return names[0]


async def _accepted(client: Client, server: Server) -> Server:
    """Return the server with the options that it takes: a fixed length where it knows how, and the count of tokens."""
    tried: list[Answer] = []
    for fixed in FIXED_LENGTH:
        for usage in (USAGE, {}):
            asked = replace(server, options={**usage, **fixed, **server.options})
            answer = await client.answer(asked.path, asked.body("Hello", 2))
            if answer.state == "answered":
                notes = [] if fixed else ["the server refuses ignore_eos, so answers may end early"]
                notes += (
                    []
                    if usage or answer.counted
                    else ["the server does not count tokens: those out are chunks with text"]
                )
                return replace(asked, notes=tuple(notes))
            tried.append(answer)
            if answer.status not in NOT_TAKEN:  # no option will help a server that is not up, or busy
                raise ConnectionError(
                    f"serve_bench({client.url!r}): the server does not answer a request: {answer.why}."
                    + (" One that loads its model first may need a larger stall_s=." if answer.status is None else "")
                )
    raise ValueError(
        f"serve_bench({client.url!r}, model={server.model!r}): the server refuses a plain request (is that its model?): "
        f"{tried[-1].why}"
    )


__all__ = ["Server", "asked", "only_model"]
