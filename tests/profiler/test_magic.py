"""The magics in a real shell: variables stay, results show, lines are those of the cell, exceptions appear and the
profile is kept."""

import asyncio
import gzip
import json
import re
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from surokit.profiler import Profile
from surokit.profiler.magic import ProfileMagics, load_ipython_extension
from surokit.profiler.record import capture, watch


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    load_ipython_extension(made)
    made.run_cell("import torch\nfrom tests.profiler.models import Net, train")
    yield made
    watch.name_source = str


def offered(shell, line):
    """What completion offers at the end of this line, as a notebook asks for it."""
    with provisionalcompleter():
        return {completion.text for completion in shell.Completer.completions(line, len(line))}


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


@pytest.mark.parametrize("cell", ["%%surokit_profile -o other\nx = '{y} $y'", "%surokit_profile -o other x = '{y} $y'"])
def test_the_magic_has_a_second_name(shell, cell):
    """An alias made by IPython would fill in {y} before the magic sees it."""
    run(shell, cell)
    assert isinstance(shell.user_ns["other"], Profile)
    assert shell.user_ns["x"] == "{y} $y"
    assert "--steps" in offered(shell, "%%surokit_profile --st")


def test_lines_are_those_of_the_cell(shell, capsys):
    cell = "%%surogate_profile -o p\nx = torch.ones(3)\n\ny = x.sum().item()\n"
    p = run(shell, cell)
    assert p.syncs.line.tolist() == [4]
    assert p.syncs.file.tolist() == [f"cell [{shell.execution_count - 1}]"]
    assert f"cell [{shell.execution_count - 1}]:4" in repr(p)


def test_lines_of_functions_are_those_of_the_cells_that_define_them(shell):
    run(shell, "def mean(x):\n    y = x * 2\n    return y.mean().item()\n")
    cell = shell.execution_count - 1
    p = run(shell, "%%surogate_profile -o p\nfor i in range(3):\n    m = mean(torch.ones(4))\n")
    assert list(zip(p.syncs.file, p.syncs.line, p.syncs["count"])) == [(f"cell [{cell}]", 3, 3)]


def test_the_last_expression_is_shown_once_and_stays_the_result(shell, capsys):
    returned = run(shell, "%%surogate_profile --steps 2 --warmup 1 -q -o p\nn = globals().get('n', 0) + 1\nn * 100")
    assert returned == 300
    assert shell.user_ns["n"] == 3
    out = capsys.readouterr().out
    assert "300" in out
    assert "100" not in out.replace("300", "")
    assert "Profile" not in out
    assert shell.user_ns["_"] == 300

    run(shell, "%%surogate_profile\ntorch.arange(3)")
    out = capsys.readouterr().out
    assert out.index("tensor([0, 1, 2])") < out.index("Profile of 1 step")
    # showing a tensor reads it, which is no part of the step
    assert "aten::_local_scalar_dense" not in set(shell.user_ns["_profile"].ops.op)
    assert shell.user_ns["_"].tolist() == [0, 1, 2]
    assert isinstance(shell.user_ns["_profile"], Profile)


def test_a_semicolon_silences_the_value(shell, capsys):
    run(shell, "%%surogate_profile -q\n40 + 2;  # not shown")
    assert "42" not in capsys.readouterr().out


def test_top_level_await_runs_with_and_without_a_loop_that_runs_already(shell, capsys):
    shell.user_ns["asyncio"] = asyncio
    cell = "%%surogate_profile -q -o p\nawait asyncio.sleep(0)\nx = torch.ones(2) + 1\nawait asyncio.sleep(0, 7)"
    run(shell, cell)
    assert "7" in capsys.readouterr().out

    async def as_a_kernel_does():
        task = asyncio.current_task()
        run(shell, cell)
        assert asyncio.current_task() is task
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)
        return shell.user_ns["p"]

    loop = asyncio.new_event_loop()
    try:
        p = loop.run_until_complete(as_a_kernel_does())
    finally:
        loop.close()
    assert "7" in capsys.readouterr().out
    assert "aten::add" in set(p.ops.op)


def test_a_line_runs_warmup_and_steps(shell):
    shell.user_ns["calls"] = []
    p = run(shell, "p = %surogate_profile --steps 3 --warmup 2 --by op calls.append(torch.ones(4) - -1)\np")
    assert len(shell.user_ns["calls"]) == 5
    assert p.summary["steps"] == 3
    assert p.by == "op"
    assert "aten::sub" in repr(p)


def test_a_statement_is_taken_as_it_was_typed(shell):
    shell.user_ns["kept"] = {"a": 1}
    p = run(shell, "p = %surogate_profile --steps 1 --warmup 0 -- -sum(kept[f'{k}'] for k in {'a': 2})\np")
    assert p.summary["steps"] == 1
    assert p is shell.user_ns["_profile"]


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


def test_what_the_user_sees_of_an_exception_is_their_own_code(shell, capsys):
    shell.run_cell("%%surogate_profile -q\ndef f(x):\n    return x / 0\nf(torch.ones(1).sum().item())\n")
    out = capsys.readouterr().out
    assert "return x / 0" in out
    assert "magic.py" not in out
    assert "capture.py" not in out


@pytest.mark.parametrize("error", ["KeyboardInterrupt()", "SystemExit(3)"])
def test_an_interrupt_keeps_the_profile(shell, error, capsys):
    shell.user_ns.pop("stopped", None)
    shell.run_cell(f"%%surogate_profile -o stopped -q\nx = torch.ones(2) * 3\nraise {error}")
    assert "aten::mul" in set(shell.user_ns["stopped"].ops.op)
    assert any(error.partition("(")[0] in note for note in shell.user_ns["stopped"].notes)


def test_options_reach_the_profile(shell, tmp_path, capsys):
    trace = tmp_path / "of a cell.json.gz"
    p = run(
        shell,
        f'%%surogate_profile --price 2.5 --tokens 64 --no-gpu --eager --warmup 1 --trace "{trace}" -o p\nmodel = train(4)',
    )
    assert p.summary["steps"] == 3
    assert p.summary["tokens_per_s"] == pytest.approx(64 / p.summary["wall_ms"] * 1e3)
    lost = p.lost
    assert lost.usd_per_day.tolist() == pytest.approx((lost.share * 24 * 2.5).tolist())
    assert "USD a day" in repr(p)
    assert str(trace) in capsys.readouterr().out
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_a_cell_inside_another_profile_is_read_when_that_one_ends(shell, tmp_path, capsys):
    with capture.profile(warmup=0) as outer:
        run(shell, f"%%surogate_profile -o nested --warmup 0 --trace {tmp_path / 't.json'}\nmodel = train(2)")
    said = capsys.readouterr().out
    assert "inside another profile" in said
    assert "no trace was written" in said
    assert outer.summary["steps"] == shell.user_ns["nested"].summary["steps"] == 2


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%surogate_profile", "needs a statement"),
        ("%%surogate_profile x = 1\npass", "takes options only"),
        ("%%surogate_profile --steps 0\npass", "at least 1"),
        ("%%surogate_profile -o 1p\npass", "name of a variable"),
        ("%%surogate_profile --by colour\npass", "colour"),
        ("%%surogate_profile --nonsense\npass", "nonsense"),
        ("%%surogate_profile --warmup -1\npass", "at least 0"),
        ("%%surogate_profile -o class\npass", "name of a variable"),
        ("%%surogate_profile --price 0\npass", "--price must be a number above zero"),
        ("%%surogate_profile --tokens nan\npass", "--tokens must be a number above zero"),
        ("%%surogate_profile --trace no/such/folder/t.json\npass", "a folder that exists"),
        ("%%surogate_profile -o\npass", "expected one argument"),
        ("%%surogate_profile", "cell body is empty"),
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


@pytest.mark.parametrize("body", ["\n", "# nothing\n", "x = 1\n"])
def test_a_cell_without_torch_says_so(shell, body):
    p = run(shell, f"%%surogate_profile\n{body}")
    assert p.summary["steps"] == 1
    assert "no torch operator was recorded in these steps" in repr(p)
    assert "<svg" in p._repr_html_()


def test_magics_inside_the_cell_work(shell, capfd):
    run(shell, "%%surogate_profile -q -o p\nhere = %pwd\n%time y = torch.ones(3) * 2\n!echo from the shell\n")
    assert isinstance(shell.user_ns["here"], str)
    assert shell.user_ns["y"].tolist() == [2, 2, 2]
    assert "aten::mul" in set(shell.user_ns["p"].ops.op)
    out = capfd.readouterr().out
    assert "from the shell" in out
    assert "Wall time" in out


def test_help_says_what_it_does(shell, capsys):
    text = shell.magics_manager.magics["cell"]["surogate_profile"].__doc__
    for word in ("--steps", "--warmup", "--by", "--trace", "--price", "--eager", "--no-gpu", "Without --steps it runs"):
        assert word in text
    shell.run_cell("%surogate_profile?")
    assert "where its time goes" in capsys.readouterr().out


def test_the_page_lists_the_options():
    page = (Path(__file__).parents[2] / "docs/profiling.md").read_text()
    listed = set(re.findall(r"^\| `(--?[a-z-]+)", page, re.MULTILINE))
    actions = [a for a in ProfileMagics.surogate_profile.parser._actions if a.option_strings]
    assert listed == {a.option_strings[0] for a in actions}


@pytest.mark.parametrize("start", ["%%surogate_profile", "%surogate_profile", "p = %surogate_profile"])
def test_options_are_completed(shell, start):
    assert offered(shell, f"{start} --st") == {"--steps"}
    assert offered(shell, f"{start} --t") == {"--tokens", "--trace"}
    assert offered(shell, f"{start} -q --by mo") == {"module"}
    assert offered(shell, f"{start} -q --by=mo") == {"module"}
    assert offered(shell, f"{start} --steps 3 --") >= {"--warmup", "--price", "--eager"}


def test_loading_it_again_completes_once(shell):
    before = len(shell.Completer.custom_matchers)
    load_ipython_extension(shell)
    assert len(shell.Completer.custom_matchers) == before
    assert offered(shell, "%surogate_profile --st") == {"--steps"}


def test_profiles_are_completed_as_outputs_and_statements_as_python(shell):
    run(shell, "%%surogate_profile -q -o before_all\npass")
    assert offered(shell, "%surogate_profile -o bef") == {"before_all"}
    offers = offered(shell, "%surogate_profile -q torch.one")
    assert any(offer.endswith("ones") for offer in offers)
    assert "--steps" not in offers
