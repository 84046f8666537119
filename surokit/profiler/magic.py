"""Define `%surogate_profile` and `%%surogate_profile`, which profile a line or a cell in a notebook, and their other name,
`surokit_profile`. No other file of the profiler knows IPython.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import ast
import asyncio
import inspect
import keyword
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from surokit.profiler.record import capture, watch
from surokit.profiler.report.profile import BY, Profile

_WORD = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|\S)+)""")
_MAGIC = re.compile(r"[^%]*%%?(?:surogate|surokit)_profile\s")


@magics_class
class ProfileMagics(Magics):
    """The line magic and the cell magic have one set of options."""

    @no_var_expand
    @magic_arguments()
    @argument("-o", "--output", metavar="NAME", default=None, help="keep the Profile in this variable")
    @argument(
        "--steps",
        type=int,
        default=None,
        metavar="N",
        help="run the code N times after the warm-up, each run a step; without it, run once and take the optimizer's steps",
    )
    @argument("--warmup", type=int, default=3, metavar="N", help="steps to leave out at the start (default 3)")
    @argument("--by", choices=BY, default="module", help="what the shown Profile breaks busy time down by")
    @argument("--tokens", type=float, default=None, metavar="N", help="tokens in a step, for tokens/s")
    @argument("--price", type=float, default=None, metavar="USD", help="of a GPU hour: shows what lost time costs")
    @argument("--trace", default=None, metavar="FILE", help="write a trace for ui.perfetto.dev (.json or .json.gz)")
    @argument("--no-gpu", action="store_true", help="record the host only")
    @argument("--eager", action="store_true", help="run compiled regions eagerly, so that their modules get rows")
    @argument("-q", "--quiet", action="store_true", help="do not show the Profile")
    @argument("statement", nargs="*", help="%%surogate_profile only: the statement, after the options or --")
    @line_cell_magic("surokit_profile")
    @line_cell_magic
    def surogate_profile(self, line: str, cell: str | None = None) -> Profile | None:
        """Profile a statement or a cell: where its time goes, by module, and what time is lost to.

        The code runs in your namespace, as if the magic were not there: its variables stay, its last expression is
        shown, its exceptions appear (the profile so far is kept). Without --steps it runs once.

            %%surogate_profile -o p
            for batch in data: ...

            p = %surogate_profile --steps 5 --warmup 2 model(x).sum().backward()

        The last Profile is also kept as _profile: _profile.lost, _profile.modules, _profile.advice.
        """
        __tracebackhide__ = True
        options, statement = self._parse(line, cell)
        code = _UserCode(self.shell, statement, shift=0 if cell is None else 1)
        profile, error = self._run(code, options)
        shown = code.show()
        if profile is not None:
            self._keep(profile, options)
        if error is not None:
            if profile is not None and not options.quiet:
                display(profile)
            raise error
        if cell is None:  # `p = %surogate_profile ...` needs the value
            return None if options.quiet and options.output is not None else profile
        if options.quiet:
            return None
        if not shown:
            return profile
        display(profile)  # the cell's value stays the user's own
        return None

    def _parse(self, line: str, cell: str | None) -> tuple[Any, str]:
        """Read options up to the first word that is not one, or up to --; the rest of the line is the statement, as it was
        typed."""
        parser = self.surogate_profile.parser
        takes_value = {o for action in parser._actions if action.nargs is None for o in action.option_strings}
        words: list[str] = []
        rest = line.strip()
        while rest.startswith("-") and (found := _WORD.match(rest)):
            rest = rest[found.end() :]
            if found[1] == "--":
                break
            words.append(found[1])
            if found[1] in takes_value and (value := _WORD.match(rest)):
                words.append(value[1])
                rest = rest[value.end() :]
            rest = rest.strip()
        options = parse_argstring(self.surogate_profile, " ".join(words))
        rest = rest.strip()
        if cell is None and not rest:
            raise UsageError("%surogate_profile needs a statement; %surogate_profile? shows the options")
        if cell is not None and rest:
            raise UsageError(f"%%surogate_profile takes options only, not {rest!r}; the code goes on the next lines")
        _check(options)
        return options, rest if cell is None else cell

    def _run(self, code: _UserCode, options: Any) -> tuple[Profile | None, BaseException | None]:
        """Return the profile, also of code that raised, and the exception that it raised."""
        __tracebackhide__ = True
        how: dict[str, Any] = {
            "tokens": options.tokens,
            "gpu": not options.no_gpu,
            "eager": options.eager,
            "usd_per_gpu_hour": options.price,
        }
        profile: Profile | None = None
        try:
            if options.steps is None:
                with capture.profile(warmup=options.warmup, **how) as profile:
                    code.run()
            else:
                profile = capture.profile_calls(code.run, options.steps, options.warmup, **how)
        except BaseException as error:
            kept = profile or getattr(error, "profile", None)
            return kept if isinstance(kept, Profile) else None, error
        return profile, None

    def _keep(self, profile: Profile, options: Any) -> None:
        profile.by = options.by
        for name in ("_profile", options.output):
            if name is not None:
                self.shell.user_ns[name] = profile
        if options.trace is not None:
            try:
                print(f"trace for ui.perfetto.dev: {profile.to_perfetto(options.trace)}")
            except (OSError, RuntimeError) as error:  # the profile itself is not lost with it
                print(f"no trace was written: {error}")


def _check(options: Any) -> None:
    """Check the options and report a wrong one before the code runs."""
    name, trace = options.output, options.trace
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"-o needs the name of a variable, not {name!r}")
    if (options.steps is not None and options.steps < 1) or options.warmup < 0:
        raise UsageError("--steps must be at least 1 and --warmup at least 0")
    for option, value in (("--tokens", options.tokens), ("--price", options.price)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} must be a number above zero, not {value:g}")
    if trace is not None:
        trace = options.trace = trace.strip("\"'")
        if not trace or Path(trace).is_dir() or not Path(trace).parent.is_dir():
            raise UsageError(f"--trace needs a file in a folder that exists, not {trace!r}")


class _UserCode:
    """A statement or cell runs as IPython would run it: with its transformations, lines numbered as the user sees them in
    the cell, and the last expression's value kept for the display hook unless a semicolon ends it."""

    def __init__(self, shell: Any, source: str, shift: int) -> None:
        self.shell = shell
        self._value: Any = None
        text = "\n" * shift + shell.transform_cell(source)
        name = shell.compile.cache(text, shell.displayhook.prompt_count, raw_code=text)
        awaiting = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0
        with shell.compile.extra_flags(awaiting):
            tree = shell.transform_ast(shell.compile.ast_parse(text, filename=name))
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            self._body = shell.compile(tree, name, "exec")
            self._last = shell.compile(ast.Expression(last.value), name, "eval") if last is not None else None
        self._silent = last is not None and bool(shell.displayhook.semicolon_at_end_of_expression(text))

    def run(self) -> None:
        __tracebackhide__ = True
        self._value = None
        self._evaluate(self._body)
        if self._last is not None:
            self._value = self._evaluate(self._last)

    def show(self) -> bool:
        """Show the value of the last run, after the profile has ended, and return whether there was one to show."""
        value, self._value = self._value, None
        if value is None or self._silent:
            return False
        self.shell.displayhook(value)
        return True

    def _evaluate(self, code: Any) -> Any:
        __tracebackhide__ = True
        result = eval(code, self.shell.user_global_ns, self.shell.user_ns)
        return self._finish(result) if code.co_flags & inspect.CO_COROUTINE else result

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run top-level awaits to their end. A kernel runs cells inside its event loop, which cannot be entered twice:
        there, a new loop takes its place as long as they run."""
        __tracebackhide__ = True
        outer = asyncio._get_running_loop()
        if outer is None:
            return self.shell.loop_runner(coroutine)
        task = asyncio.current_task(outer)
        if task is not None:
            asyncio.tasks._leave_task(outer, task)
        asyncio._set_running_loop(None)
        try:
            return asyncio.run(coroutine)
        finally:
            asyncio._set_running_loop(outer)
            if task is not None:
                asyncio.tasks._enter_task(outer, task)


def completions(line: str, names: list[str]) -> list[str]:
    """List the texts that can follow this beginning of a line: an option, a value where there are few, or a Profile among
    `names` for -o. The list is empty outside the magic's line and in its statement, which the shell completes as Python."""
    start = _MAGIC.match(line)
    if start is None:
        return []
    actions = ProfileMagics.surogate_profile.parser._actions
    values = {option: action for action in actions if action.nargs is None for option in action.option_strings}
    *before, typed = re.split(r"\s+|(?<=[a-z])=", line[start.end() :])
    while before:
        word = before.pop(0)
        if word in values and before:
            before.pop(0)
        elif word in ("-o", "--output"):
            return [name for name in names if name.startswith(typed)]
        elif word in values:
            return [value for value in values[word].choices or () if value.startswith(typed)]
        elif not word.startswith("-") or word == "--":
            return []
    offered = (option for action in actions for option in action.option_strings)
    return [option for option in offered if option.startswith(typed)] if typed.startswith("-") else []


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics and their completion with this shell; from now on profiles say "cell [3]" for its cells."""
    ipython.register_magics(ProfileMagics)

    @context_matcher(identifier="surogate_profile")
    def options(context: Any) -> Any:
        names = [n for n, value in ipython.user_ns.items() if isinstance(value, Profile) and not n.startswith("_")]
        found = completions(context.text_until_cursor, names)
        return {"completions": [SimpleCompletion(text, type="param") for text in found], "suppress": bool(found)}

    matchers = ipython.Completer.custom_matchers  # without that of an earlier load
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != options.matcher_identifier]
    matchers.append(options)
    cells = ipython.compile._filename_map

    def name_source(file: str) -> str:
        return f"cell [{cells[file]}]" if file in cells else file

    watch.name_source = name_source
