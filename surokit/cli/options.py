"""Read what stands on a command line, check it, and print JSON: what several commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A Parser is argparse's, with its complaint on one line, and about a command's options from that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class UsageError(ValueError):
    """A UsageError says what is wrong with a command line."""


def add_with_examples(commands: Any, name: str, *, help: str, examples: str, **more: Any) -> Any:
    """Add a command whose help ends with examples, and return its parser."""
    form = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=help, epilog=examples, formatter_class=form, allow_abbrev=False, **more)


def number(text: str) -> float:
    """Read a number, a whole one as int."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 15.6 trillion as 15.6e12") from None
    return int(value) if value.is_integer() else value


def price(text: str) -> float | tuple[float, float]:
    """Read 2.5, or a range 1.8-3.2; an exponent's minus sign is none of a range."""
    with contextlib.suppress(ValueError):
        return float(text)
    low, dash, high = text.partition("-")
    try:
        if dash:
            return float(low), float(high)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no price in USD: write 2.5, or a range as 1.8-3.2")


def split_at_commas(text: str) -> list[str]:
    """Return the parts between a text's commas, without the spaces around them. A comma within parentheses separates nothing, as in
    fp4(grad_input=bf16, grad_weight=bf16)."""
    return [part.strip() for part in re.split(r",(?![^()]*\))", text)]


def check_picture(path: Path | None) -> None:
    """Raise an error if no picture can be written there, before anything is computed for it."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} is no kind of picture that can be written: use .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: No such file or directory: {path.parent}. Make that folder first.")
    importlib.import_module("matplotlib")


def print_json(said: Mapping[str, Any]) -> None:
    """Print JSON that every reader takes: a figure that is no number is null, as JSON has neither NaN nor Infinity."""
    print(json.dumps(_finite(said), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
