"""Servers in memory: each word of a prompt is one token, long words are two, and an answer has as many as it is asked for."""

import asyncio
import json
import threading
from contextlib import contextmanager

from tests.serving.virtual import DONE, Server, event

BESIDE = 3  # tokens around each prompt


def tokens_of(body):
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return BESIDE + sum(1 + (len(word) > 5) for word in text.split())


class Words(Server):
    """knows: fields that it takes beside the usual ones; counts: whether it says how many tokens there were; stops: after how many
    tokens it ends where it may."""

    def __init__(self, knows=("ignore_eos", "stream_options"), counts=True, stops=None, models=("tiny",)):
        super().__init__(self.answered)
        self.knows, self.counts, self.stops, self.models = knows, counts, stops, models

    def got(self, path):
        if path != "/v1/models":
            return super().got(path)
        return 200, json.dumps({"data": [{"id": name} for name in self.models]})

    def answered(self, body):
        usual = {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}
        if strange := set(body) - usual - set(self.knows):
            return 422, f"unknown field {min(strange)}"
        n = body["max_tokens"]
        if self.stops is not None and not body.get("ignore_eos"):
            n = min(n, self.stops)
        chat = "messages" in body
        usage = [event(usage=(tokens_of(body), n))] if self.counts and "stream_options" in body else []
        return [*(event("x", chat=chat) for _ in range(n)), event(finish="length", chat=chat), *usage, DONE]


@contextmanager
def listening(server):
    """Run a server in a thread, and give its address."""
    began, ended = threading.Event(), threading.Event()
    found = []

    async def serve():
        there = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        found.append(there.sockets[0].getsockname()[1])
        began.set()
        async with there:
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    began.wait()
    try:
        yield f"http://127.0.0.1:{found[0]}/v1"
    finally:
        ended.set()
        thread.join()
