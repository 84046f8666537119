"""Read the events of a Chrome trace chunk by chunk, also from files of gigabytes, of other tools, damaged or cut off.

The file is inflated, decoded and parsed piece by piece, so memory holds one piece. A piece is cut at its last boundary
between two events and parsed as one list by the C scanner of `json`; where that fails its events are parsed singly, and
anything that is no event is counted and skipped. An object with `traceEvents` and a bare list are both traces, with or without
an end, with commas too many, and with NaN.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

_BLOCK = 1 << 15  # bytes read at a time from a gzipped file; they inflate to about 20 times as many
PIECE = 1 << 16  # bytes read at a time otherwise, and characters parsed at a time: larger pieces are slower
_SINGLES = 1000  # events parsed one by one before the fast way is tried again
TALK_FROM = 200 << 20  # bytes of file from which on progress is shown
_ROUNDED_FROM = 1 << 42  # microseconds: above, a float is no longer exact to a nanosecond
_SPACE = re.compile(r"[ \t\r\n]*")
_BOUNDARY = re.compile(r"\}\s*,\s*\{")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*(?=\[)')
_END = re.compile(r"\]\s*\}?\s*\Z")
_PART = re.compile(r"[\s\w\\,:+.-]*\Z")
_TIME = re.compile(r'"ts"\s*:\s*-?(\d{1,18})')
_KEPT = (
    *("schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "displayTimeUnit"),
    *("surokit", "surokitCheck"),
)


class EventStream:
    """An EventStream reads a file: iterate `chunks`, lists of JSON values; then `meta` holds what the file says of itself,
    `damaged` counts the skipped pieces, and `complete` tells whether the list of events had an end.

    `exact` is set when the file's times are too large for floats to hold nanoseconds: numbers with a fraction are then
    Decimals. Raises ValueError, with a text that follows the file's name, when the file is no JSON object or list.
    """

    def __init__(self, file: Path) -> None:
        self.meta: dict[str, Any] = {}
        self.damaged = 0
        self.complete = False
        self.exact = False
        self._decoder = json.JSONDecoder(strict=False)  # control characters in names are not worth losing an event
        self._pieces = _text(file)
        self._buffer, self._at = "", 0
        self._open = True  # whether the file has more
        self._boundary = "},{"

    def chunks(self) -> Iterator[list[Any]]:
        opening = self._next_character()
        if opening not in ("[", "{"):
            raise ValueError("is empty" if not opening else "is no JSON: neither an object nor a list")
        self._at += 1
        if opening == "[":
            yield from self._events()
            return
        found = False
        while self._next_character() == '"':
            try:
                name = self._value()
                if self._next_character() != ":":
                    raise ValueError("a name without a value")
                self._at += 1
                if name == "traceEvents" and self._next_character() == "[":
                    self._at, found = self._at + 1, True
                    yield from self._events()
                else:
                    self._next_character()
                    value = self._value()
                    if name in _KEPT:
                        self.meta[name] = value
            except ValueError:  # what a tool says of itself may be damaged where its events are not
                if found or not self._seek(_EVENTS):
                    break
                continue
            if self._next_character() == ",":
                self._at += 1
        if not found:
            raise ValueError("holds no list of trace events")

    # ------------------------------------------------------------------------------------------------ reading on

    def _more(self) -> bool:
        """Append a piece; return False at the end of the file."""
        piece = next(self._pieces, None)
        self._open = piece is not None
        self._buffer, self._at = self._buffer[self._at :] + (piece or ""), 0
        return self._open

    def _next_character(self) -> str:
        """Return the character at the next place that is no white space; "" at the end."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]  # it always matches
            if self._at < len(self._buffer) or not self._more():
                return self._buffer[self._at : self._at + 1]

    def _seek(self, pattern: re.Pattern[str]) -> bool:
        """Move on to the next match; return False when there is none."""
        while not (match := pattern.search(self._buffer, self._at)):
            self._at = max(len(self._buffer) - 100, self._at)  # a match may straddle two pieces
            if not self._more():
                return False
        self._at = match.start()
        return True

    def _value(self) -> Any:
        """Return the next JSON value. Raises ValueError when it is damaged or the file ends in it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except ValueError as error:
                if not self._is_cut(error) or not self._grow():
                    raise
            except RecursionError:
                raise ValueError("nested too deeply") from None
            else:
                if end < len(self._buffer) or not self._grow():  # a number may go on in the next piece
                    self._at = end
                    return value

    def _is_cut(self, error: ValueError) -> bool:
        """Return whether the text is no JSON because it ends too early: in a string, or with nothing but part of a word to
        come."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated") or bool(_PART.match(self._buffer, error.pos))

    def _grow(self) -> bool:
        """Double the buffer, so that a long value is parsed a few times and not once for every piece."""
        size = len(self._buffer) - self._at
        grown = False
        while len(self._buffer) - self._at <= 2 * size and self._more():
            grown = True
        return grown

    # ------------------------------------------------------------------------------------------------ events

    def _events(self) -> Iterator[list[Any]]:
        """Yield the list that begins here in chunks, up to its end."""
        while len(self._buffer) - self._at < PIECE and self._more():
            pass
        if max(map(int, _TIME.findall(self._buffer, self._at)), default=0) >= _ROUNDED_FROM:
            self.exact, self._decoder = True, json.JSONDecoder(strict=False, parse_float=Decimal)
        while not self.complete:
            while len(self._buffer) - self._at < PIECE and self._more():
                pass
            chunk = self._fast()
            if chunk is None:
                chunk = self._singly()
                if not chunk and not self.complete:
                    return
            if chunk:
                yield chunk

    def _fast(self) -> list[Any] | None:
        """Return all events up to the last boundary in the buffer; None when there is none, or it is not between two
        events, or something before it is damaged."""
        self._next_character()
        last = self._buffer.rfind(self._boundary, self._at)
        if last < 0 and (match := _BOUNDARY.search(self._buffer, self._at)):  # this tool's, or it changes its style
            self._boundary = match[0]
            last = self._buffer.rfind(self._boundary, self._at)
        if last < 0:
            return None
        text = f"[{self._buffer[self._at : last + 1]}]"
        try:
            chunk, end = self._decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        if end < len(text):  # the list ended on the way, and the boundary was in what follows
            self._at, self.complete = self._at + end - 1, True
        else:
            self._at = self._buffer.index("{", last + 1)
        return list(chunk)

    def _singly(self) -> list[Any]:
        """Return the next events one by one, past damaged ones; nothing at the end of the file."""
        chunk: list[Any] = []
        while len(chunk) < _SINGLES and (mark := self._next_character()):
            if mark == "]":
                self._at, self.complete = self._at + 1, True
                break
            if mark == ",":
                self._at += 1
                continue
            try:
                chunk.append(self._value())
            except ValueError as error:
                if not self._open and self._is_cut(error):  # the file was cut off in this event
                    self._at = len(self._buffer)
                    break
                self.damaged += 1
                if self._seek(_BOUNDARY):
                    self._at = self._buffer.index("{", self._at)
                else:
                    self._at, self.complete = len(self._buffer), bool(_END.search(self._buffer))
                    break
        return chunk


# ---------------------------------------------------------------------------------------------------------------- bytes


def uncompressed_bytes(file: Path) -> int:
    """Return the size of a file's text; for a gzipped one an estimate from how well its beginning was compressed."""
    size, done, given = file.stat().st_size, 0, 0
    for done, piece in _inflated(file):
        given += len(piece)
        if done >= 1 << 20 or given >= 1 << 24:
            break
    return size * given // done if given else size


def _text(file: Path) -> Iterator[str]:
    """Yield the file's text in pieces, up to its end or to where its compression is damaged; bytes that are no text become
    U+FFFD."""
    size, shown, head = file.stat().st_size, 0, b""
    decoder: codecs.IncrementalDecoder | None = None
    for done, piece in _inflated(file):
        if size >= TALK_FROM and done * 20 // size > shown:
            shown = done * 20 // size
            print(f"reading {file.name}: {5 * shown} %", end="\r" if shown < 20 else "\n", file=sys.stderr)
        head = piece if decoder else head + piece
        if decoder is None and (len(head) >= 4 or done == size):
            decoder = codecs.getincrementaldecoder(json.detect_encoding(head))("replace")
        if decoder and (text := decoder.decode(head)):
            yield text


def _inflated(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the file's bytes piece by piece, each with how many bytes of the file it took to get so far."""
    done = 0
    with file.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        inflate = zlib.decompressobj(31)
        while block := raw.read(_BLOCK if zipped else PIECE):
            done += len(block)
            if not zipped:
                yield done, block
            while zipped and block:
                try:
                    piece = inflate.decompress(block)
                except zlib.error:
                    return
                block = inflate.unused_data  # a file may hold several gzip streams
                if inflate.eof:
                    inflate = zlib.decompressobj(31)
                yield done, piece
