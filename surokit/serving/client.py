"""Send one request and record its answer: bounded connections, a time limit on everything, one address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import aiohttp

from surokit.serving.stream import Events, Seen

State = Literal["answered", "failed", "truncated", "late"]
CONNECTIONS = 1024
AT_ONCE_S = 0.1  # in which a connection that was closed before breaks: later, the server had the request
CONNECT_S, STALL_S, LIMIT_S = 10.0, 60.0, 600.0
OK = 200  # status of an answer
_SAID = 300  # characters that are kept of what a server says


@dataclass(frozen=True)
class Answer:
    """An Answer is what became of one request. Times are seconds since the workload began, to the microsecond.

    due: when it had to be sent; began: when the client came to it; sent: when it had a connection's place. chunks: when each chunk
    with a choice arrived, the first of them perhaps without text; text: the first with text. done: when the stream had ended.
    state: "answered", whole; "truncated", closed before the server said that it was whole; "late", beyond the limit of a request;
        "failed", with `why`. finish: "length", "stop" or what the server says.
    input_tokens, output_tokens: as the server counts them; where it does not (counted is False) output tokens are chunks with text.
    """

    number: int
    due: float
    began: float
    sent: float
    done: float
    state: State
    why: str = ""
    chunks: tuple[float, ...] = ()
    text: float | None = None
    characters: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    counted: bool = False
    finish: str = ""
    status: int | None = None

    def line(self) -> str:
        """Return the answer as a line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, line: str) -> Answer:
        """Make one of a line. ValueError for another line."""
        try:
            values = json.loads(line)
            return cls(**{**values, "chunks": tuple(values["chunks"])})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a line holds no answer ({error}): {line[:80]!r}") from error


class Client:
    """A Client asks one server, with at most so many connections at once.

    url: of the interface, such as "http://127.0.0.1:8000/v1". key: sent as a bearer token, and kept nowhere. connect_s, stall_s:
    seconds to connect, and without a byte; limit_s: of a whole request. socket: path of a Unix socket, instead of the host.

    Nothing is sent to another address: redirects are failures, and the environment's proxies are not used. It is a context manager
    of a running loop.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        connections: int = CONNECTIONS,
        connect_s: float = CONNECT_S,
        stall_s: float = STALL_S,
        limit_s: float = LIMIT_S,
        socket: str | None = None,
    ) -> None:
        self.url, self.limit_s, self.stall_s = url.rstrip("/"), limit_s, stall_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=stall_s)
        self._headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._places = asyncio.Semaphore(connections)
        self._socket = socket

    async def __aenter__(self) -> Client:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark)
        # a place of the semaphore is a connection: what waits for one is measured, and the connector's own limit would hide it
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, ttl_dns_cache=None)
            if self._socket is None
            else aiohttp.UnixConnector(self._socket, limit=0)
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            trace_configs=[trace],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at a path below the address. ConnectionError or ValueError where there is none."""
        try:
            async with self._http.get(f"{self.url}/{path}", allow_redirects=False) as response:
                if response.status != OK:
                    raise ValueError(f"HTTP {response.status}")
                return json.loads(await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(_said(error)) from error

    async def answer(
        self, path: str, body: Mapping[str, Any], number: int = 0, due: float | None = None, zero: float = 0.0
    ) -> Answer:
        """Send a request that streams, and return its answer, whatever became of it.

        path: below the address, such as "completions". due: when it had to be sent, now without it; zero: when the workload began,
        both on the running loop's clock.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        events, seen = Events(), Seen()
        state: State = "failed"
        why, status = "", None
        content = json.dumps(body).encode()
        async with self._places:
            sent = clock()
            try:
                async with (
                    asyncio.timeout(self.limit_s),
                    self._opened(f"{self.url}/{path}", content) as response,
                ):
                    status = response.status
                    if status == OK:
                        async for received in response.content.iter_any():
                            now = clock()
                            for data in events.feed(received):
                                seen.take(data, now)
                        now = clock()
                        for data in events.close():
                            seen.take(data, now)
                        state, why = _ended(seen)
                    else:
                        said = (await response.read()).decode("utf-8", "replace")
                        why = f"HTTP {status}: {' '.join(said.split())[:_SAID]}"
            except aiohttp.ConnectionTimeoutError:
                why = "no connection in time"
            except aiohttp.SocketTimeoutError:
                why = f"nothing came for {self.stall_s:g} s"
            except TimeoutError:
                state, why = "late", f"the request took longer than {self.limit_s:g} s"
            except (aiohttp.ClientError, OSError) as error:
                # a stream that breaks after some text is an answer that was cut off
                state, why = "truncated" if seen.at else "failed", _said(error)
            except ValueError as error:
                why = f"what came is no stream of JSON: {error}"[:_SAID]
        inputs, outputs, counted = seen.tokens()

        def since(at: float) -> float:
            return round(at - zero, 6)

        return Answer(
            number=number,
            due=since(began if due is None else due),
            began=since(began),
            sent=since(sent),
            done=since(clock()),
            state=state,
            why=why,
            chunks=tuple(map(since, seen.at)),
            text=None if seen.text_at is None else since(seen.text_at),
            characters=seen.characters,
            input_tokens=inputs,
            output_tokens=outputs,
            counted=counted,
            finish=seen.finish,
            status=status,
        )

    @asynccontextmanager
    async def _opened(self, url: str, content: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and give its response. A connection that was used before may have been closed by the server meanwhile,
        after an idle while or an error: then it breaks at once, and the request is sent over another one."""
        clock = asyncio.get_running_loop().time
        while True:
            sent = clock()
            connection = SimpleNamespace(used_before=False)
            asking = self._http.post(url, data=content, allow_redirects=False, trace_request_ctx=connection)
            try:
                response = await asking
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.used_before or clock() - sent > AT_ONCE_S:
                    raise
                continue
            async with response:
                yield response
            return


async def _mark(session: aiohttp.ClientSession, context: SimpleNamespace, event: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.used_before = True


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_SAID]


def _ended(seen: Seen) -> tuple[State, str]:
    """Say what a stream was that came to its end."""
    if seen.error:
        return "failed", f"the server said in its answer: {seen.error}"[:_SAID]
    if not seen.has_ended:
        return "truncated", "the stream ended before the server said that the answer was whole"
    if not seen.at:
        return "failed", "the answer had no choices"
    return "answered", ""


__all__ = ["CONNECTIONS", "CONNECT_S", "LIMIT_S", "STALL_S", "Answer", "Client", "State"]
