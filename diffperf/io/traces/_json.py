"""A JSON file read as a stream: the members of its top object, and the items of its long arrays one by one, in bounded memory.

The values themselves are decoded by Python's own scanner, on a window of the text that grows only as far as the value at hand does. Files may be
gzipped. A file that is cut or damaged gives all values before that place, and then `CutError`.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterator
from typing import Any

_WINDOW = 1 << 20  # characters read at a time
_LARGEST = 1 << 28  # characters of one value at most
_ENDS = "the file ends"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False)


class CutError(Exception):
    """The text ends, or stops being JSON. `place` says where, in words; `started` whether any value was read before; `whole` that the document is complete
    and something follows it."""

    def __init__(self, place: str, started: bool, whole: bool = False):
        self.place, self.started, self.whole = place, started, whole
        super().__init__(place)


def open_bytes(path: str) -> io.BufferedReader | gzip.GzipFile:
    """The file, unpacked if it is gzipped, whatever its name."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else open(path, "rb")


def members(path: str, streamed: Collection[str]) -> Iterator[tuple[str, Any, bool]]:
    """The members of the object in `path`: name, value, False. Those named in `streamed`, if arrays, come as an empty list, and then item by item with True.
    An array at the top is taken as the first of `streamed`.

    Raises:
      CutError: after the last value that could be read.
      OSError: the file cannot be opened.
    """
    with open_bytes(path) as file:
        text = _Text(file)
        first = text.next()
        if first == "\ufeff":  # a byte order mark, which some editors write
            text.at += 1
            first = text.next()
        if first == "[":
            key = next(iter(streamed))
            yield key, [], False
            yield from ((key, item, True) for item in text.items())
            text.close()
            return
        if first != "{":
            raise text.cut("it begins with " + (repr(text.buffer[text.at : text.at + 20]) if first else "nothing"))
        text.at += 1
        while text.next() != "}":
            key = text.value()
            if text.next() != ":" or not isinstance(key, str):
                raise text.cut("a member of the top object has no name")
            text.at += 1
            if key in streamed and text.next() == "[":
                yield key, [], False
                yield from ((key, item, True) for item in text.items(key))
            else:
                yield key, text.value(key), False
            if text.next() == ",":
                text.at += 1
            elif text.next() != "}":
                raise text.cut(f"a comma is missing after {key!r}")
        text.at += 1
        text.close()


class _Text:
    """A window on the text; `at` is the place of reading in it."""

    def __init__(self, file: io.BufferedReader | gzip.GzipFile):
        self.file, self.decode = file, codecs.getincrementaldecoder("utf-8")("replace")
        self.buffer, self.at, self.before, self.ended, self.count, self.why = "", 0, 0, False, 0, _ENDS

    def next(self) -> str:
        """The next character that is no space, "" at the end; reading stands on it."""
        while True:
            match = _SPACE.match(self.buffer, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if self.ended:
                return ""
            self._more()

    def value(self, where: str = "") -> Any:
        """The value at the place of reading."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or self.ended:  # a number at the end of the window may go on
                    self.at, self.count = end, self.count + 1
                    return value
            except (json.JSONDecodeError, RecursionError) as error:
                place = getattr(error, "pos", self.at)
                inside = place < len(self.buffer) - 4096 and "Unterminated" not in str(error)
                if self.ended or inside or len(self.buffer) - self.at > _LARGEST:
                    raise self.cut((self.why if self.ended and not inside else f"it is no JSON ({error})") + (f" in {where}" if where else "")) from None
            self._more()

    def items(self, where: str = "") -> Iterator[Any]:
        """The items of the array at the place of reading."""
        self.at += 1
        number = 0
        while (mark := self.next()) != "]":
            if mark == "," and number:
                self.at += 1
                if self.next() == "]":  # some writers leave a comma behind the last
                    break
            elif number:
                raise self.cut(f"{self.why if not mark else 'a comma is missing'} after item {number} of {where or 'the array'}")
            number += 1
            yield self.value(f"item {number} of {where or 'the array'}")
        self.at += 1

    def close(self) -> None:
        """Makes sure that the document ends here, and a packed file whole."""
        place = self.before + self.at
        if self.next():
            raise CutError(f"{self.buffer[self.at : self.at + 20]!r} at character {place:,}", True, whole=True)
        if self.why != _ENDS:
            raise CutError(self.why, True, whole=True)

    def cut(self, what: str) -> CutError:
        return CutError(f"{what}, at character {self.before + self.at:,}", self.count > 0)

    def _more(self) -> None:
        wanted, parts = max(_WINDOW, len(self.buffer) - self.at), []
        try:
            while wanted > 0 and (data := self.file.read1(wanted)):  # not `read`, which loses what comes before a damaged place
                parts.append(data)
                wanted -= len(data)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.why = f"the gzip stream is damaged or cut ({error})"
        self.ended = wanted > 0
        self.before += self.at
        self.buffer, self.at = self.buffer[self.at :] + self.decode.decode(b"".join(parts), final=self.ended), 0
