"""A loop whose clock jumps to whatever is due next, and a server on a Unix socket that answers by a script: times are exact."""

import asyncio
import json
import selectors
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

from surokit.serving.client import Client

URL = "http://test.invalid/v1"
BREAK = object()  # in a script: the connection breaks


class Jumping(selectors.DefaultSelector):
    """Never waits: where nothing has arrived, the time that the loop would wait passes at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if arrived := super().select(0):
            return arrived
        if timeout is None:
            raise RuntimeError("the loop waits, and nothing is due")
        self.now += max(0.0, timeout)
        return []


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
    """Come back when so much time has passed on the loop's clock."""
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


class Server:
    """Answers each request by `answer(body)`: pieces of a stream, or a status with a text.

    A piece is bytes that are sent, seconds that pass, or BREAK. chunked: the stream is sent in HTTP's chunks, else its end is the
    connection's. bodies, heads: what was asked, and its first lines; most: how many requests were unanswered together.
    """

    def __init__(self, answer, before_s=0.0, chunked=True):
        self.answer, self.before_s, self.chunked = answer, before_s, chunked
        self.bodies, self.heads = [], []
        self.open = self.most = 0

    def got(self, path):
        """What a GET is answered by."""
        return 404, "nothing here"

    async def handle(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                method, path, _ = head.split(" ", 2)
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                text = await reader.readexactly(int(fields.get("content-length", 0)))
                if method == "GET":
                    found = self.got(path)
                else:
                    body = json.loads(text)
                    self.bodies.append(body)
                    self.open += 1
                    self.most = max(self.most, self.open)
                    try:
                        if self.before_s:
                            await passed(self.before_s)
                        found = self.answer(body)
                    finally:
                        self.open -= 1
                if not await self.sent(writer, found):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # the other side has gone
            pass
        finally:
            writer.close()

    async def sent(self, writer, found):
        """Send an answer, and return whether the connection can be used again."""
        if isinstance(found, tuple):
            status, text = found
            writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(text)}\r\nlocation: /\r\n\r\n{text}".encode())
            return status < 500  # as uvicorn: the connection is closed, and no header says so
        how = "transfer-encoding: chunked" if self.chunked else "connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{how}\r\n\r\n".encode())
        for piece in found:
            if piece is BREAK:
                return False
            if not isinstance(piece, bytes):
                await passed(piece)
            elif piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.chunked else piece)
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        return self.chunked


@asynccontextmanager
async def asking(server, **options):
    """A client of this server, on the running loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        listening = await asyncio.start_unix_server(server.handle, path)
        async with Client(URL, socket=path, **options) as client:
            yield client
        listening.close()
