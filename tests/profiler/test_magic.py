"""The magics in a real shell: variables stay, results show, lines are those of the cell, exceptions appear and the
profile is kept."""

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from surokit.profiler import Profile, watch
from surokit.profiler.magic import load_ipython_extension


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    load_ipython_extension(made)
    made.run_cell("import torch\nfrom tests.profiler.models import Net, train")
    yield made
    watch.name_source = str


def run(shell, cell):
    result = shell.run_cell(cell, store_history=True)
    result.raise_error()
    return result.result


def test_a_cell_keeps_its_variables_and_returns_the_profile(shell):
    p = run(shell, "%%surogate_profile -o kept\nmodel = train(6)\nanswer = 42")
    assert isinstance(p, Profile)
    assert shell.user_ns["kept"] is p
    assert shell.user_ns["answer"] == 42
    assert type(shell.user_ns["model"]).__name__ == "Net"
    assert (p.summary["steps"], p.summary["warmup"]) == (3, 3)


def test_lines_are_those_of_the_cell(shell, capsys):
    cell = "%%surogate_profile -o p\nx = torch.ones(3)\n\ny = x.sum().item()\n"
    p = run(shell, cell)
    assert p.syncs.line.tolist() == [4]
    assert p.syncs.file.tolist() == [f"cell [{shell.execution_count - 1}]"]
    assert f"cell [{shell.execution_count - 1}]:4" in repr(p)


def test_the_last_expression_is_shown_once(shell, capsys):
    run(shell, "%%surogate_profile --steps 2 --warmup 1 -q -o p\nn = globals().get('n', 0) + 1\nn * 100")
    assert shell.user_ns["n"] == 3
    out = capsys.readouterr().out
    assert "300" in out
    assert "100" not in out.replace("300", "")


def test_a_line_runs_warmup_and_steps(shell):
    shell.user_ns["calls"] = []
    p = run(shell, "p = %surogate_profile --steps 3 --warmup 2 --by op calls.append(torch.ones(4) - -1)\np")
    assert len(shell.user_ns["calls"]) == 5
    assert p.summary["steps"] == 3
    assert p.by == "op"
    assert "aten::sub" in repr(p)


def test_a_line_without_steps_runs_once(shell):
    shell.user_ns["calls"] = []
    run(shell, "%surogate_profile -q -o once calls.append(torch.ones(2).sum())")
    assert len(shell.user_ns["calls"]) == 1
    assert shell.user_ns["once"].summary["steps"] == 1


@pytest.mark.parametrize("options", ["", "--steps 3 --warmup 0"])
def test_an_exception_appears_and_the_profile_is_kept(shell, options, capsys):
    shell.user_ns["left"] = 2
    cell = f"%%surogate_profile -o broken {options}\ntorch.ones(2).sum()\nleft -= 1\nz = 1 / left\n"
    if not options:
        cell += "1 / 0\n"
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "aten::sum" in set(shell.user_ns["broken"].ops.op)
    assert "Profile" in capsys.readouterr().out
    assert shell.user_ns["z"] == 1.0


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%surogate_profile", "needs a statement"),
        ("%%surogate_profile x = 1\npass", "takes options only"),
        ("%%surogate_profile --steps 0\npass", "at least 1"),
        ("%%surogate_profile -o 1p\npass", "name of a variable"),
        ("%%surogate_profile --by colour\npass", "colour"),
        ("%%surogate_profile --nonsense\npass", "nonsense"),
    ],
)
def test_wrong_options_are_one_sentence(shell, cell, message, capsys):
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, UsageError)
    out = capsys.readouterr()
    assert message in str(result.error_in_exec) + out.out + out.err


def test_a_syntax_error_is_the_users(shell, capsys):
    result = shell.run_cell("%%surogate_profile\nfor\n")
    assert isinstance(result.error_in_exec, SyntaxError)


def test_magics_inside_the_cell_work(shell):
    run(shell, "%%surogate_profile -q -o p\nhere = %pwd\n")
    assert isinstance(shell.user_ns["here"], str)


def test_help_says_what_it_does(shell):
    text = shell.magics_manager.magics["cell"]["surogate_profile"].__doc__
    for word in ("--steps", "--warmup", "--by", "-o", "Without --steps it runs once"):
        assert word in text
