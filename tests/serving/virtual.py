"""A loop whose clock jumps to whatever is due next, and a server in memory that answers by a script: times are exact."""

import asyncio
import json
import selectors

import httpx


class Jumping(selectors.DefaultSelector):
    """Never waits: the time that the loop would wait passes at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("the loop waits, and nothing is due")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self):
        return self.jumping.now


def run(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


async def passed(seconds):
    """Come back when so much time has passed on the loop's clock, which jumps there."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(seconds, done.set_result, None)
    await done


def event(text=None, *, finish=None, usage=None, chat=False, role=None, **more):
    """The bytes of one event: a choice with text, or none where text, role and finish are None."""
    chunk = dict(more)
    if text is not None or finish or role:
        delta = {**({"role": role} if role else {}), **({"content": text} if text is not None else {})}
        choice = {"delta": delta} if chat else {"text": text or ""}
        chunk["choices"] = [{**choice, "index": 0, "finish_reason": finish}]
    else:
        chunk.setdefault("choices", [])
    if usage:
        chunk["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), usage))
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Script(httpx.AsyncByteStream):
    """Pieces of an answer: bytes that are sent, seconds that pass, an exception that breaks the connection."""

    def __init__(self, pieces):
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            if isinstance(piece, bytes):
                yield piece
            elif isinstance(piece, BaseException):
                raise piece
            else:
                await passed(piece)


class Server(httpx.AsyncBaseTransport):
    """Answers each request by `answer(body)`: pieces of a stream, or a status with a text."""

    def __init__(self, answer, before_s=0.0):
        self.answer, self.before_s = answer, before_s
        self.bodies = []
        self.requests = []
        self.open = self.most = 0

    async def handle_async_request(self, request):
        self.requests.append(request)
        body = json.loads(request.content) if request.content else {}
        self.bodies.append(body)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await passed(self.before_s)
            found = self.answer(body)
        finally:
            self.open -= 1
        if isinstance(found, tuple):
            status, text = found
            return httpx.Response(status, text=text)
        return httpx.Response(200, stream=Script(found))
