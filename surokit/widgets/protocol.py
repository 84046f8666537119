"""This module defines what a panel's page and Python ask each other; the page gets the values as the first line of its script.

The page sends {"ask": HELLO or one of ASKS, "n": the question's number}. Python answers {"n": the same number, "error": a sentence,
or ""}. A question without an answer after ANSWER_S counts as unheard; the page then hides its buttons until an answer comes,
however late. What is drawn goes the other way only: messages.py.
"""

from __future__ import annotations

import json
from typing import Any

HELLO = "hello"  # does anybody hear?
ASKS = ("stop", "pause", "resume", "save")  # a button each, in this order
ANSWER_S = 10.0
HELLO_S = (0, 1, 3, 6, 15, 30)  # seconds after which a new page says hello, until it is heard; then every LISTEN_S
TELL_HELLO = 3  # so many hellos without an answer, and the page says that nobody answers
LISTEN_S = 30.0
STALE_S = 20.0  # without news: from then on a page that was heard says hello again


def to_page() -> str:
    """Return the values as a line of JavaScript."""
    values = {name: value for name, value in globals().items() if name.isupper()}
    return f"const PROTOCOL = {json.dumps(values)};\n"


def question(content: Any) -> tuple[str, Any]:
    """Return (HELLO or one of ASKS, the question's number) of a message from the page; ("", None) if it is no question."""
    ask = content.get("ask") if isinstance(content, dict) else None
    return (ask, content.get("n")) if ask in (HELLO, *ASKS) else ("", None)


def answer(n: Any, error: str) -> dict[str, Any]:
    """Return the answer to question number `n`. error: why what was asked cannot be done, "" if it is done."""
    return {"n": n, "error": error}
