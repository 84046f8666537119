"""A server as a process: there when it answers, gone with its block, and what it said where it does not come up."""

import sys

import pytest

import surokit as sk
from tests.refusals import refused

FILES = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]  # answers 404 at /health


def test_a_server_is_there_within_its_block_and_gone_after_it(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("{}")
    with sk.ServerProcess([*FILES, "-d", str(tmp_path)], log=tmp_path / "log.txt") as server:
        assert server.url == f"http://127.0.0.1:{server.port}/v1"
        with refused(ChildProcessError), sk.ServerProcess(FILES, port=server.port):
            pass
    assert "GET /v1/models" in (tmp_path / "log.txt").read_text()


def test_a_server_that_does_not_answer_in_time():
    with refused(TimeoutError), sk.ServerProcess(["sh", "-c", "sleep 60", "{port}"], ready_s=0):
        pass


def test_a_server_that_ends_says_what_it_printed(tmp_path):
    with (
        refused(ChildProcessError),
        sk.ServerProcess(["sh", "-c", "echo no such model >&2; exit 3", "{port}"]),
    ):
        pass


def test_a_line_is_split_as_a_shell_does_and_gets_a_port():
    server = sk.ServerProcess("serve 'my model' --port {port}")
    assert server.command == ["serve", "my model", "--port", str(server.port)]
    with refused(FileNotFoundError), sk.ServerProcess("no-such-server-anywhere {port}"):
        pass
    with refused(ValueError):
        sk.ServerProcess("")


def test_a_line_that_does_not_tell_the_port_is_refused():
    with refused(ValueError):
        sk.ServerProcess("vllm serve 'my model'")
    assert sk.ServerProcess("vllm serve", port=8000).url == "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_server_ends_where_its_block_fails(tmp_path, error):
    (tmp_path / "health").write_text("")
    with pytest.raises(error), sk.ServerProcess([*FILES, "-d", str(tmp_path)]) as server:
        raise error
    with sk.ServerProcess([*FILES, "-d", str(tmp_path)], port=server.port):  # nothing answers there any more
        pass
