"""`%surogate_profile` and `%%surogate_profile`: profile a line or a cell in a notebook. The only file of the profiler
that knows IPython."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import ast
from collections.abc import Callable
from types import CodeType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from surokit.profiler import capture, watch
from surokit.profiler.report import BY, Profile


@magics_class
class ProfileMagics(Magics):
    """The two magics share one set of options."""

    @magic_arguments()
    @argument(
        "--steps",
        type=int,
        default=None,
        help="run the statement or cell this many times, each run a step; without it, run once and take the optimizer's steps",
    )
    @argument(
        "--warmup",
        type=int,
        default=None,
        help="steps to leave out: runs without the profiler (default 1) with --steps, else optimizer steps (default 3)",
    )
    @argument("--by", choices=BY, default="module", help="what the shown profile breaks busy time down by")
    @argument("--tokens", type=float, default=None, help="tokens in a step, for tokens_per_s")
    @argument("-o", "--output", metavar="NAME", default=None, help="also keep the Profile in this variable")
    @argument(
        "-q", "--quiet", action="store_true", help="do not show the Profile; use with -o or p = %%surogate_profile ..."
    )
    @argument("statement", nargs="*", help="%%surogate_profile only: the statement")
    @line_cell_magic
    def surogate_profile(self, line: str, cell: str | None = None) -> Profile | None:
        """Profile a statement or a cell: where its time goes, by module, and what time is lost to.

        The code runs in your namespace, as if the magic were not there: its variables stay, its last expression is
        shown, its exceptions appear (the profile so far is kept). Without --steps it runs once.

            %%surogate_profile -o p
            for batch in data: ...

            p = %surogate_profile --steps 5 --warmup 2 model(x).sum().backward()
        """
        options, statement = self._parse(line, cell)
        if options.output is not None and not options.output.isidentifier():
            raise UsageError(f"-o needs the name of a variable, not {options.output!r}")
        if (options.steps is not None and options.steps < 1) or (options.warmup is not None and options.warmup < 0):
            raise UsageError("--steps must be at least 1 and --warmup at least 0")
        run = self._compile(statement, shift=0 if cell is None else 1)
        try:
            result = self._profile(run, options)
        except BaseException as error:
            kept = getattr(error, "profile", None)
            if isinstance(kept, Profile):
                self._keep(kept, options)
                if not options.quiet:
                    display(kept)
            raise
        self._keep(result, options)
        return None if options.quiet and options.output is not None else result

    def _parse(self, line: str, cell: str | None) -> tuple[Any, str]:
        """Options up to the first word that is not one; the rest of the line is the statement, kept as it was typed."""
        words, rest = [], line
        takes_value = {"--steps", "--warmup", "--by", "--tokens", "-o", "--output"}
        while rest.strip().startswith("-"):
            word, _, rest = rest.strip().partition(" ")
            words.append(word)
            if word in takes_value:
                value, _, rest = rest.strip().partition(" ")
                words.append(value)
        options = parse_argstring(self.surogate_profile, " ".join(w for w in words if w))
        if cell is None and not rest.strip():
            raise UsageError("%surogate_profile needs a statement; %%surogate_profile? shows the options")
        if cell is not None and rest.strip():
            raise UsageError(
                f"%%surogate_profile takes options only, not {rest.strip()!r}; the code goes on the next lines"
            )
        return options, rest.strip() if cell is None else cell

    def _profile(self, run: Callable[[bool], None], options: Any) -> Profile:
        if options.steps is not None:
            warmup = 1 if options.warmup is None else options.warmup
            turns = iter(range(1, warmup + options.steps + 1))
            last = warmup + options.steps
            return capture.profile_calls(lambda: run(next(turns) == last), options.steps, warmup, tokens=options.tokens)
        block = capture.profile(warmup=3 if options.warmup is None else options.warmup, tokens=options.tokens)
        result: Profile | None = None
        try:
            with block as result:
                run(True)
        except BaseException as error:
            error.profile = result  # type: ignore[attr-defined]
            raise
        return result

    def _keep(self, result: Profile, options: Any) -> None:
        result.by = options.by
        if options.output is not None:
            self.shell.user_ns[options.output] = result

    def _compile(self, source: str, shift: int) -> Callable[[bool], None]:
        """The code as IPython would run it: its own transformations, lines numbered as the user sees them in the cell,
        the last expression apart, so that it is shown by the display hook. Returns run(show)."""
        shell = self.shell
        text = "\n" * shift + shell.transform_cell(source)
        name = shell.compile.cache(text, shell.displayhook.prompt_count, raw_code=text)
        tree = shell.transform_ast(shell.compile.ast_parse(text, filename=name))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body: CodeType = compile(tree, name, "exec", dont_inherit=True)
        tail: tuple[CodeType, CodeType] | None = None
        if isinstance(last, ast.Expr):
            tail = (
                compile(ast.Expression(last.value), name, "eval", dont_inherit=True),
                compile(ast.Interactive([last]), name, "single", dont_inherit=True),
            )

        def run(show: bool) -> None:
            exec(body, shell.user_ns)
            if tail is not None:
                quiet, shown = tail
                exec(shown if show else quiet, shell.user_ns)

        return run


def load_ipython_extension(ipython: Any) -> None:
    """Registers the magics with this shell; from now on profiles say "cell [3]" for its cells."""
    ipython.register_magics(ProfileMagics)
    cells = ipython.compile._filename_map

    def name_source(file: str) -> str:
        return f"cell [{cells[file]}]" if file in cells else file

    watch.name_source = name_source
