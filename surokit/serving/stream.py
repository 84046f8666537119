"""Read an answer as it comes: server-sent events, the chunks in them, their tokens, and when each arrived."""

from __future__ import annotations

import json
from typing import Any

DONE = "[DONE]"


class Events:
    """An Events turns bytes into the data of server-sent events, as soon as each is whole.

    A line ends in LF or CRLF, an event in an empty line; a line and a character may be cut anywhere. Comments and other fields
    than `data` are left out (WHATWG HTML, 9.2.6).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[str]:
        """Return the data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                found += self._event()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return found

    def close(self) -> list[str]:
        """Return the data of a last event that no empty line followed."""
        return [*self.feed(b"\n"), *self._event()]

    def _event(self) -> list[str]:
        data, self._data = self._data, []
        return [b"\n".join(data).decode("utf-8", "replace")] if data else []


class Seen:
    """A Seen holds what was seen of one answer. Times are seconds on the client's clock.

    at: when each chunk with a choice arrived, also one without text; text_at: the first with text. characters: of all text.
    finish: why it ended, "length" or "stop"; "" where it has not. error: what the server said in the stream.
    """

    def __init__(self) -> None:
        self.at: list[float] = []
        self.text_at: float | None = None
        self.characters = 0
        self.with_text = 0
        self.usage: dict[str, Any] = {}
        self.finish = ""
        self.error = ""
        self.is_done = False

    def take(self, data: str, now: float) -> None:
        """Take the data of an event. ValueError for what is no JSON object."""
        if data.strip() == DONE:
            self.is_done = True
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event holds {data[:80]!r}")
        if error := chunk.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise ValueError(f"an event has the choices {str(choices)[:80]!r}")
        for choice in choices[:1]:
            delta = choice.get("delta") if isinstance(choice, dict) else ""
            if not isinstance(delta, dict | None):
                raise ValueError(f"an event has the choice {str(choice)[:80]!r}")
            self.at.append(now)
            text = choice.get("text") or (delta or {}).get("content") or ""
            if text:
                self.characters += len(text)
                self.with_text += 1
                self.text_at = now if self.text_at is None else self.text_at
            self.finish = choice.get("finish_reason") or self.finish

    @property
    def has_ended(self) -> bool:
        """Return whether the server said that the answer is whole."""
        return self.is_done or bool(self.finish)

    def tokens(self) -> tuple[int | None, int | None, bool]:
        """Return the tokens in and out, and whether the server counted them; else those out are chunks with text."""
        asked, answered = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        return asked, self.with_text if answered is None else answered, answered is not None


__all__ = ["DONE", "Events", "Seen"]
