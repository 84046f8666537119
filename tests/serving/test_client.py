"""Answers of a server that answers by a script, on a clock that jumps: every time is exact, and nothing that goes wrong is lost."""

import asyncio
import socket

import pytest

from surokit.serving import measures
from surokit.serving.client import Answer, Client
from surokit.serving.stream import Events, Seen
from tests.serving.virtual import BREAK, DONE, Server, asking, event, passed, run


def asked(pieces, chunked=True, before_s=0.0):
    """The answer to one request that this script answers."""

    async def ask():
        async with asking(Server(lambda body: pieces, before_s, chunked)) as client:
            return await client.answer("completions", {"prompt": "x"})

    return run(ask())


WHOLE = [0.2, event("a"), 0.1, event("bc"), 0.3, event("d", finish="length"), event(usage=(5, 4)), DONE]


@pytest.mark.parametrize("chunked", [True, False])
def test_times_and_tokens_of_a_whole_answer(chunked):
    a = asked(WHOLE, chunked, before_s=1.0)
    assert (a.state, a.why, a.finish, a.status) == ("answered", "", "length", 200)
    assert (a.input_tokens, a.output_tokens, a.counted, a.characters) == (5, 4, True, 4)
    assert a.chunks == pytest.approx((1.2, 1.3, 1.6))
    assert measures.ttft_ms([a]) == pytest.approx([1200])
    assert measures.tpot_ms([a]) == pytest.approx([400 / 3])
    assert measures.itl_ms([a]) == pytest.approx([100, 300])
    assert measures.e2e_ms([a]) == pytest.approx([1600])
    assert Answer.read(a.line()) == a


def test_a_role_without_text_is_the_first_chunk_and_not_the_first_text():
    a = asked(
        [0.1, event(role="assistant", chat=True), 0.4, event("hi", chat=True), event(finish="stop", chat=True), DONE]
    )
    assert measures.ttft_ms([a]) == pytest.approx([100])
    assert measures.ttft_text_ms([a]) == pytest.approx([500])
    assert (a.output_tokens, a.counted) == (1, False)  # no usage: chunks with text


def test_bytes_may_be_cut_anywhere():
    whole = event("é" * 3) + b": a comment\r\n\r\n" + event("ü", finish="stop").replace(b"\n", b"\r\n") + DONE
    for cut in range(1, len(whole)):
        seen, events = Seen(), Events()
        for piece in (whole[:cut], whole[cut:]):
            for data in events.feed(piece):
                seen.take(data, 0.0)
        assert (seen.characters, seen.finish, seen.is_done) == (4, "stop", True)


def test_an_event_that_ends_with_the_stream_counts():
    a = asked([event("a"), event("b", finish="stop").rstrip()])
    assert (a.state, a.output_tokens) == ("answered", 2)


@pytest.mark.parametrize(
    ("pieces", "state", "why"),
    [
        ((429, "slow down"), "failed", "HTTP 429: slow down"),
        ((500, "x" * 1000), "failed", "HTTP 500"),
        ((302, ""), "failed", "HTTP 302"),
        ([event("a")], "truncated", "before the server said"),
        ([event("a"), BREAK], "truncated", "ClientPayloadError: Response payload is not completed"),
        ([event("a")[:9], BREAK], "failed", "ClientPayloadError: Response payload is not completed"),
        ([b"data: {oh\n\n"], "failed", "no stream of JSON"),
        ([event("a"), b'data: {"choices": ["x"]}\n\n', DONE], "failed", "the choice"),
        ([event("a"), b'data: {"choices": [{"delta": "x"}]}\n\n', DONE], "failed", "the choice"),
        ([event("a"), b'data: {"choices": {"a": 1}}\n\n', DONE], "failed", "the choices"),
        ([event("a"), event(error={"message": "out of memory"}), DONE], "failed", "out of memory"),
        ([event(usage=(1, 0)), DONE], "failed", "no choices"),
        ([event("a"), *[30, b":\n\n"] * 20, DONE], "late", "longer than 600 s"),
        ([event("a"), 1e6, DONE], "failed", "nothing came for 60 s"),
        ([1e6], "failed", "nothing came for 60 s"),
    ],
)
def test_what_goes_wrong_is_said(pieces, state, why):
    a = asked(pieces)
    assert a.state == state
    assert why in a.why
    assert len(a.why) < 400
    assert Answer.read(a.line()) == a


def test_connections_are_bounded_and_waiting_for_one_is_apart():
    server = Server(lambda body: WHOLE, before_s=1.0)

    async def ask():
        async with asking(server, connections=2) as client:
            return await asyncio.gather(*(client.answer("completions", {}, n, 0.0) for n in range(4)))

    answers = run(ask())
    assert server.most == 2
    assert measures.queue_ms(answers) == pytest.approx([0, 0, 1600, 1600])
    assert measures.ttft_ms(answers) == pytest.approx([1200] * 4)


def test_a_key_is_sent_and_not_kept():
    server = Server(lambda body: WHOLE)

    async def ask():
        async with asking(server, key="secret") as client:
            return await client.answer("completions", {})

    assert "secret" not in run(ask()).line()
    assert "authorization: Bearer secret\r\n" in server.heads[0]


def test_a_connection_that_a_server_closes_after_an_error_is_not_used_again():
    server = Server(lambda body: (500, "no") if body["n"] == 0 else WHOLE)

    async def ask():
        async with asking(server) as client:
            return [await client.answer("completions", {"n": n}) for n in range(2)]

    assert [a.state for a in run(ask())] == ["failed", "answered"]


def test_a_request_that_the_server_had_for_long_is_not_sent_again():
    class Breaks(Server):
        async def sent(self, writer, found):
            if len(self.bodies) == 2:
                await passed(30.0)
                return False
            return await super().sent(writer, found)

    server = Breaks(lambda body: WHOLE)

    async def ask():
        async with asking(server) as client:
            return [await client.answer("completions", {"n": n}) for n in range(3)]

    assert [a.state for a in run(ask())] == ["answered", "failed", "answered"]
    assert [body["n"] for body in server.bodies] == [0, 1, 2]


def test_a_redirect_is_not_followed():
    server = Server(lambda body: (302, ""))

    async def ask():
        async with asking(server) as client:
            return await client.answer("completions", {})

    assert run(ask()).status == 302
    assert len(server.heads) == 1


def test_a_host_that_takes_no_connection():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()[:2]):
        # the kernel holds one connection that nobody has accepted, and drops the next

        async def ask():
            async with Client(f"http://127.0.0.1:{full.getsockname()[1]}/v1") as client:
                return await client.answer("completions", {})

        a = run(ask())
    assert (a.state, a.why, a.done) == ("failed", "no connection in time", pytest.approx(10))


def test_a_host_where_nobody_listens():
    async def ask():
        async with Client("http://127.0.0.1:9/v1") as client:
            return await client.answer("completions", {})

    a = run(ask())
    assert a.state == "failed"
    assert "ClientConnectorError" in a.why
