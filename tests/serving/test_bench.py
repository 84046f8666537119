"""serve_bench against servers in memory: what is sent, what a server refuses, folders, tables, and what goes wrong."""

import _thread
import asyncio
import dataclasses
import json

import pytest

import surokit as sk
from surokit.serving.client import Answer
from surokit.serving.served import HEAD
from tests.refusals import refused
from tests.serving.servers import BESIDE, Words, listening, tokens_of
from tests.serving.virtual import Server, event

URL = "http://127.0.0.1:9/v1"
WORK = sk.Workload(requests=6, input_tokens=20, output_tokens=4)


def benched(there, work=WORK, server="tiny server", **options):
    with listening(there) as url:
        return sk.serve_bench(url, workload=work, server=server, **options)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_have_the_wanted_number_of_the_servers_tokens(chat):
    server = Words()
    (point,) = benched(server, sk.Workload(requests=6, input_tokens=20, output_tokens=4, chat=chat)).points
    sent = server.bodies[-6:]
    assert {tokens_of(body) for body in sent} == {20}
    assert {body["max_tokens"] for body in sent} == {4}
    assert all(body["ignore_eos"] and body["stream"] for body in sent)
    assert len({json.dumps(body) for body in sent}) == 6
    assert server.heads[-1].startswith(f"POST /v1/{'chat/' if chat else ''}completions ")
    assert point.count("answered") == 6
    assert (point.answers[0].input_tokens, point.answers[0].output_tokens) == (20, 4)
    assert not [note for note in point.notes if "prompts" in note]


def test_chunks_that_come_at_once_say_nothing_of_the_time_per_token():
    server = Words()
    usual = server.answered
    server.answer = lambda body: [b"".join(usual(body))] if isinstance(usual(body), list) else usual(body)
    (point,) = benched(server, sk.Workload(requests=6, input_tokens=20, output_tokens=4)).points
    assert any("times between chunks are zero" in note for note in point.notes)


def test_the_users_own_prompts_are_sent_in_turn():
    server = Words()
    benched(server, sk.Workload(requests=3, output_tokens=2, prompts=("one", "two words")))
    assert [body["prompt"] for body in server.bodies[-3:]] == ["one", "two words", "one"]


def test_what_a_server_does_not_know_is_left_out_and_said():
    found = benched(Words(knows=("stream_options",), stops=2))
    (point,) = found.points
    assert point.short == 6
    assert "refuses ignore_eos" in repr(found)
    assert "6 answers ended before the 4 tokens" in repr(found)
    silent = benched(Words(knows=("ignore_eos",)))
    assert "prompts have as many words" in repr(silent)
    assert silent.points[0].answers[0].output_tokens == 4


def test_a_table_over_servers(tmp_path):
    both = benched(Words(), server="a").add(benched(Words(), server="b"))
    table = both.table()
    assert table["server"].tolist() == ["a", "b"]
    assert table["answered"].tolist() == [6, 6]
    assert (table["ttft_p50_ms"] >= 0).all()
    text = repr(both)
    assert "time to the first token: from sending" in text
    assert "a" in both._repr_html_()
    both.plot().savefig(tmp_path / "served.png")
    with refused(ValueError):
        both.add(benched(Words(), server="a"))


def test_a_folder_goes_on_with_what_is_missing(tmp_path):
    first = benched(Words(), folder=tmp_path)
    server = Words()
    both = benched(server, [WORK, *WORK.concurrencies(2)], folder=tmp_path)
    assert [p.workload.name for p in both.points] == ["burst", "2 at once"]
    assert both.points[0].answers == first.points[0].answers
    assert sk.ServeBench.load(tmp_path).points == both.points
    with refused(ValueError):
        benched(Words(), folder=tmp_path, server="another")
    (tmp_path / HEAD).write_text("{}")
    with refused(ValueError):
        sk.ServeBench.load(tmp_path)
    with refused(FileNotFoundError):
        sk.ServeBench.load(tmp_path / "nothing")


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with refused(ValueError):
        benched(Words(), folder=tmp_path)


def test_a_key_comes_from_the_environment_and_is_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = Words()
    benched(server, folder=tmp_path)
    assert "authorization: Bearer sk-secret\r\n" in server.heads[-1]
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and "sk-secret" in file.read_text()]


def test_a_server_that_cannot_be_measured():
    with refused(ValueError):
        benched(Words(models=("one", "two")))
    with refused(ConnectionError):
        benched(Server(lambda body: (404, "nothing here")))
    with refused(ValueError):
        benched(Server(lambda body: (400, "no such model")), model="tiny")


def test_an_interrupted_workload_leaves_its_answers_and_is_measured_anew(tmp_path):
    server = Words()
    answered = server.answered
    first = benched(server, folder=tmp_path)
    (more,) = WORK.concurrencies(2)
    seen = []

    def interrupts(body):
        if body["max_tokens"] == WORK.output_tokens:  # of the workload, not asked before it
            seen.append(body)
        if len(seen) == 20:
            _thread.interrupt_main()
        return answered(body)

    server.answer = interrupts
    found = benched(server, [WORK, dataclasses.replace(more, requests=100_000)], folder=tmp_path)
    assert found.points == first.points
    (left,) = (tmp_path / "answers").glob("*.interrupted.jsonl")
    assert all(Answer.read(line).state == "answered" for line in left.read_text().splitlines())
    whole = benched(server, [WORK, more], folder=tmp_path)
    assert [p.count("answered") for p in whole.points] == [6, 6]
    assert not left.exists()


def test_every_workload_has_prompts_of_its_own():
    server = Words()
    benched(server, WORK.concurrencies(1, 2))
    sent = [body["prompt"] for body in server.bodies if body["max_tokens"] == WORK.output_tokens]
    assert len(set(sent)) == len(sent) == 12


def test_a_second_measurement_has_other_prompts():
    server = Words()
    for _ in range(2):
        benched(server)
    sent = [body["prompt"] for body in server.bodies if body["max_tokens"] == WORK.output_tokens]
    assert len(set(sent)) == len(sent) == 12


def test_a_folder_is_of_one_model_and_one_request(tmp_path):
    with pytest.raises(ConnectionError, match="does not list its models"):
        sk.serve_bench(URL, workload=WORK, folder=tmp_path)
    with refused(ValueError):
        benched(Words(), folder=tmp_path, server="another")
    benched(Words(), server="127.0.0.1:9", folder=tmp_path)  # the call that met no server has left nothing in the way
    with refused(ValueError):
        benched(Words(), server="127.0.0.1:9", folder=tmp_path, model="other")
    with refused(ValueError):
        benched(Words(), server="127.0.0.1:9", folder=tmp_path, extra={"top_p": 0.5})


def test_a_folder_knows_the_only_model_of_its_server(tmp_path):
    benched(Words(), folder=tmp_path)
    both = [WORK, *WORK.concurrencies(2)]
    with refused(ValueError):
        benched(Words(models=("large",)), both, folder=tmp_path)
    assert len(benched(Words(), both, folder=tmp_path).points) == 2
    assert benched(Words(), both, folder=tmp_path, model="tiny").points == sk.ServeBench.load(tmp_path).points
    more = [*both, *WORK.concurrencies(3)]
    with refused(ValueError):
        benched(Words(models=("one", "two")), more, folder=tmp_path)
    server = Words(models=("large", "tiny"))
    assert len(benched(server, more, folder=tmp_path).points) == 3
    assert {body["model"] for body in server.bodies} == {"tiny"}


def test_a_folder_that_no_server_answered_for_takes_a_model(tmp_path):
    with pytest.raises(ConnectionError, match=r"Else give model=\."):
        sk.serve_bench(URL, workload=WORK, folder=tmp_path)
    assert len(benched(Words(), server="127.0.0.1:9", folder=tmp_path, model="tiny").points) == 1
    with refused(ValueError):
        benched(Words(), server="127.0.0.1:9", folder=tmp_path, model="other")


def test_workloads_that_arrive_alike_have_names_of_their_own():
    works = [
        WORK,
        dataclasses.replace(WORK, input_tokens=40),
        WORK,
        *(dataclasses.replace(WORK, seed=s) for s in (1, 2)),
    ]
    found = benched(Words(), works)
    assert list(found.named) == [
        "tiny server, burst, 20 tokens in, 4 out",
        "tiny server, burst, 40 tokens in, 4 out",
        "tiny server, burst, 20 tokens in, 4 out (2)",
        "tiny server, burst, 20 tokens in, 4 out (3)",
    ]
    assert list(found.cost(1)) == list(found.goodput(e2e=1e6)) == list(found.named)
    with refused(ValueError):
        found.cost(-1)
    with refused(ValueError):
        found.add(benched(Words(), server="b")).saturation()


def test_a_server_that_is_busy_is_not_one_that_takes_no_options():
    server = Words()
    answered = server.answered
    server.answer = lambda body: (503, "loading") if len(server.bodies) == 1 else answered(body)
    with refused(ConnectionError):
        benched(server)


def test_a_sweep_is_drawn(tmp_path):
    found = benched(Words(), WORK.concurrencies(1, 2))
    figure = found.plot_sweep()
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[1, 2]]
    figure.savefig(tmp_path / "sweep.png")
    with refused(ValueError):
        benched(Words()).plot_sweep()


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "localhost:8000"},
        {"url": None},
        {"url": "http://me:secret@127.0.0.1:9/v1"},
        {"connections": 0},
        {"connections": 1.5},
        {"stall_s": -1},
        {"limit_s": True},
    ],
)
def test_arguments(changes):
    with refused(ValueError):
        sk.serve_bench(**{"url": URL, "workload": WORK, **changes})


def test_prompts_shorter_than_what_is_around_them():
    with refused(ValueError):
        benched(Words(), sk.Workload(requests=1, input_tokens=BESIDE, output_tokens=1))


def test_it_runs_where_a_loop_runs_already():
    async def notebook():
        return benched(Words())

    assert asyncio.run(notebook()).points[0].count("answered") == 6


def test_the_saturation_point_and_cost_of_a_sweep():
    found = benched(Words(), WORK.concurrencies(1, 2))
    assert found.saturation() in found.points
    assert found.saturation("nobody") is None
    rate = found.table()["output_tokens_per_s"].iloc[0]
    assert found.cost(3.6)["tiny server, 1 at once"] == pytest.approx(1000 / rate)
    assert set(found.goodput(e2e=1e6).values()) == {1.0}


def test_chunks_without_text_long_before_the_text_are_said():
    class Waits(Words):
        def answered(self, body):
            return [event(role="assistant", chat=True), 0.02, *super().answered(body)]

    found = benched(Waits(), dataclasses.replace(WORK, chat=True))
    assert "tpot has that wait in it" in repr(found)
    assert "tpot has that wait in it" not in repr(benched(Words()))
