"""Answer completions as a stream at times that are known: the first token after --first-ms, each other after --each-ms.

    python -m surokit.bench.stub --port 8000

It has no model. What a client measures beyond these times is its own, or the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import Any


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_s: float, each_s: float) -> None:
    """Answer the requests of a connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            body = json.loads(await reader.readexactly(length) or b"{}")
            if head.startswith(b"get"):
                text = b'{"data": [{"id": "stub"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
            else:
                await _stream(writer, body, first_s, each_s)


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any], first_s: float, each_s: float) -> None:
    clock = asyncio.get_running_loop().time
    began, tokens = clock(), body["max_tokens"]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def send(data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))

    for i in range(tokens):
        await asyncio.sleep(max(0.0, began + first_s + i * each_s - clock()))
        reason = "length" if i == tokens - 1 else None
        send(json.dumps({"choices": [{"index": 0, "text": " x", "finish_reason": reason}]}))
    usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": tokens}
    send(json.dumps({"choices": [], "usage": usage}))
    send("[DONE]")
    writer.write(b"0\r\n\r\n")


async def serve(port: int, first_ms: float, each_ms: float) -> None:
    """Serve until the process ends."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer, first_ms / 1e3, each_ms / 1e3)

    server = await asyncio.start_server(one, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=50.0, metavar="MS")
    parser.add_argument("--each-ms", type=float, default=10.0, metavar="MS")
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.first_ms, given.each_ms))


if __name__ == "__main__":
    main()
