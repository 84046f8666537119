"""`surokit serve-bench`: arguments reach the workload, a server is started, figures and files come out."""

import _thread
import shlex
import sys
from pathlib import Path

import pandas
import pytest

import surokit as sk
from surokit import cli
from tests.serving.servers import Words, listening

URL = "http://127.0.0.1:9/v1"  # where nothing answers
SIZES = "--requests 6 --input-tokens 20 --output-tokens 4"


def test_a_sweep_of_a_server_that_runs_beside_another(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo words\n")
    server = Words()
    with listening(server) as url:
        assert cli.main(f"serve-bench {url} {SIZES} --server first --folder {tmp_path / 'first'}".split()) == 0
        words = f"serve-bench {url} {SIZES} --server second --concurrency 1 2 --prompts {prompts} --chat --limits ttft=1e6 e2e=1e6"
        files = f"--usd-per-hour 3.6 --beside {tmp_path / 'first'} --csv {tmp_path / 'all.csv'} --plot {tmp_path / 'all.png'}"
        capsys.readouterr()
        assert cli.main([*words.split(), *files.split()]) == 0
    said = capsys.readouterr().out
    assert "second, 1 at once: 100.0% of the requests within ttft=1e6, e2e=1e6 ms" in said
    assert "USD for a million output tokens" in said
    assert "the last point that the server keeps up with" in said
    assert pandas.read_csv(tmp_path / "all.csv")["server"].tolist() == ["second", "second", "first"]
    assert (tmp_path / "all.png").exists()
    assert server.bodies[-1]["messages"][0]["content"] == "two words"
    assert sk.ServeBench.load(tmp_path / "first").points[0].workload == sk.Workload(6, 20, 4)


def test_a_sweep_that_is_interrupted_keeps_what_it_has_and_says_so(tmp_path, capsys):
    server = Words()
    usual = server.answer

    def interrupts(body):
        if len(server.bodies) == 3300:  # in the second workload, some way behind the first one's last
            _thread.interrupt_main()
        return usual(body)

    server.answer = interrupts
    with listening(server) as url:
        words = f"serve-bench {url} --requests 3000 --input-tokens 9 --output-tokens 2 --concurrency 8 16"
        files = ["--csv", str(tmp_path / "all.csv"), "--plot-sweep", str(tmp_path / "sweep.png")]
        assert cli.main([*words.split(), *files]) == 130
    assert len(pandas.read_csv(tmp_path / "all.csv")) == 1
    assert not (tmp_path / "sweep.png").exists()
    said = capsys.readouterr()
    assert ", 8 at once" in said.out
    assert ", 16 at once" not in said.out
    assert "keeps up with" not in said.out
    assert "interrupted; workloads that were measured are kept" in said.err


def test_a_server_is_started_and_ended(capsys):
    start = f"{sys.executable} -m surokit.bench.stub --port {{port}} --first-ms 1 --each-ms 1"
    assert cli.main(["serve-bench", "--start", start, *SIZES.split(), "--rate", "1000"]) == 0
    assert "1000 requests/s" in capsys.readouterr().out


def test_two_points_of_one_name_are_refused_before_anything_is_measured(tmp_path, capsys):
    name, first = Path(sys.executable).name, tmp_path / "first"
    with listening(Words()) as url:
        assert cli.main(f"serve-bench {url} {SIZES} --server {name} --folder {first}".split()) == 0
    start = f"--start '{sys.executable} -m no_such_server --port {{port}}'"
    for words in (start, f"{URL} --server {name}", f"{URL} --rate 9"):
        assert cli.main(shlex.split(f"serve-bench {words} {SIZES} --beside {first} {first}")) == 2
        assert f"its point of {name!r} under burst would be there twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve-bench", "give the address of a server that runs, or --start"),
        ("serve-bench http://127.0.0.1:9/v1 --start ls", "give the address of a server that runs, or --start"),
        ("serve-bench http://127.0.0.1:9/v1 --limits ttft", "write a time and its milliseconds"),
        ("serve-bench http://127.0.0.1:9/v1 --limits ttf=5", "a limit is of ttft"),
        ("serve-bench http://127.0.0.1:9/v1 --csv no-folder-here/all.csv", "there is no folder"),
        ("serve-bench --start ls", "the line does not tell the server its port"),
        ("serve-bench --start ''", "give the line that starts a server"),
        ("serve-bench --start 'false {port}'", "ended with exit status 1 before it was ready: false"),
        ("serve-bench http://127.0.0.1:9/v1 --rate 1 --concurrency 1", "not allowed with argument"),
        ("serve-bench http://127.0.0.1:9/v1 --plot table.txt", "is no kind of picture"),
        ("serve-bench http://127.0.0.1:9/v1", "does not list its models"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(capsys, words, said):
    assert cli.main(shlex.split(words)) == 2
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in found
