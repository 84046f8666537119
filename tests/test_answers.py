"""The comparison of two revisions' answers: it finds what differs and names it, and a question asked twice has one answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import surokit as sk
from tests.answers import __main__ as command
from tests.answers import plans, runs, trees, write
from tests.answers.book import Book
from tests.answers.compare import differences, read
from tests.answers.walk import name_place, plain

ANSWERS: dict[str, Any] = {
    "a plan": {"answer": {"gib": [1.5, 2.0], "text": "two\nlines"}},
    "a run": {"answer": float("nan")},
}


def changed(**of_plan):
    return {**ANSWERS, "a plan": {"answer": {**ANSWERS["a plan"]["answer"], **of_plan}}}


def test_equal_answers_have_no_difference():
    assert differences(ANSWERS, json.loads(json.dumps(ANSWERS))) == []


@pytest.mark.parametrize(
    ("working", "says"),
    [
        (
            changed(gib=[1.5, 2.0000000000000004]),
            "a plan: answer.gib[1]: 2.0 in BASE, 2.0000000000000004 in the working copy",
        ),
        (changed(gib=[1.5, 2]), "a plan: answer.gib[1]: 2.0 in BASE, 2 in the working copy"),
        (changed(gib=[1.5]), "a plan: answer.gib[1]: only BASE has it (2.0)"),
        (changed(text="two\nlimes"), 'a plan: answer.text: line 2: "lines" in BASE, "limes" in the working copy'),
        (changed(days=3), "a plan: answer.days: only the working copy has it (3)"),
        ({"a run": ANSWERS["a run"]}, "a plan: only BASE has it ("),
        ({**ANSWERS, "another": {"answer": 1}}, 'another: only the working copy has it ({"answer": 1})'),
        ({**ANSWERS, "a run": {"refused": "ValueError: no"}}, "a run: answer: only BASE has it (NaN)"),
    ],
)
def test_what_differs_is_named(working, says):
    found = differences(ANSWERS, working)
    assert found[0].startswith(says)
    assert differences(ANSWERS, working, ("a plan*", "a run*", "another*")) == []


def test_one_plan_and_one_run_give_the_same_answers_twice(tmp_path):
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        book = Book(file)
        book.write("a plan", lambda: plans.planned("llama-3.1-8b", **plans.RUN, recipe=sk.QFP8.lora(rank=8)))
        book.write("a run", lambda: runs.run(sk.FP8, sk.AdamW8bit(lr=3e-3, rounding="stochastic"), "plain"))
        book.write("refused", lambda: sk.plan("llama-3.1-8b", mfu=40, gpu="H100"))
        with pytest.raises(ValueError, match="Two answers are called 'a run'"):
            book.write("a run", dict)
    one, two = map(read, files)
    assert differences(one, two) == []
    assert files[0].read_bytes() == files[1].read_bytes()
    assert one["a plan"]["answer"]["parts"]["memory"]["peak_gib"] > 0
    assert len(one["a run"]["answer"]["weights"]) > 10
    assert one["refused"] == {"refused": "ValueError: mfu=40 must be a share between 0 and 1: did you mean 0.4?"}


def test_plain_data_are_exact_and_have_no_address_or_folder(tmp_path):
    @dataclass(frozen=True)
    class Part:
        x: float
        _hidden: int = 0

        @property
        def twice(self) -> float:
            return 2 * self.x

        @property
        def refuses(self) -> float:
            raise ValueError("no rate")

    name_place(tmp_path, "HERE")
    assert plain(Part(0.1)) == {"x": 0.1, "twice": 0.2, "refuses": "ValueError: no rate"}
    assert plain({1: (1, 2.0), "at": object(), "path": tmp_path / "a"}) == {
        "1": [1, 2.0],
        "at": "<object object at 0x>",
        "path": "HERE/a",
    }
    one, other = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    other[1] = 1 + 2**-7
    assert plain(one) != plain(other)
    assert plain(torch.tensor([0.0])) != plain(torch.tensor([-0.0]))
    assert plain(np.zeros(2)) != plain(np.zeros(2, np.float32))
    assert plain(torch.zeros(())) == plain(torch.zeros(()).clone())
    assert plain(pd.DataFrame({"a": [0.1]})) == ",a\n0,0.1\n"


def test_another_surokit_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="another one is installed in its place"):
        write.main("plans", str(tmp_path / "answers.jsonl"), str(tmp_path))


def test_the_command_tells_what_differs(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "base.jsonl", tmp_path / "working.jsonl"]
    for file, gib in zip(files, (1.5, 1.25)):
        Book(file).write("a plan", lambda gib=gib: {"gib": gib})
    monkeypatch.setattr(trees, "Pair", lambda *_: SimpleNamespace(ask=lambda _: files))
    assert command.main(["main", "--only", "plans"]) == 1
    assert "a plan: answer.gib: 1.5 in BASE, 1.25 in the working copy" in capsys.readouterr().out
    assert command.main(["main", "--only", "plans", "--but", "a plan: *.gib"]) == 0
    with pytest.raises(SystemExit):
        command.main(["main", "--only", "plants"])
