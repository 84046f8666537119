"""Servers in memory: each word of a prompt is one token, long words are two, and an answer has as many as it is asked for."""

import httpx

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

    async def handle_async_request(self, request):
        if request.method == "GET":
            self.requests.append(request)
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        return await super().handle_async_request(request)

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
