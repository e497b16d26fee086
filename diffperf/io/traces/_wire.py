"""The wire format of protocol buffers, read as a stream: the numbered fields of a message, undecoded. Knows no schema.

Source: Google, Protocol Buffers documentation, "Encoding". Groups, which are long deprecated, are refused.
"""

import gzip
import io
import os
import zlib
from collections.abc import Iterator

_CHUNK = 1 << 20  # bytes read at a time
_LARGEST = 1 << 28  # bytes of one field that is held as a whole


class WireError(ValueError):
    """These bytes are no message, or it is cut; the message says at which byte."""


class Stream:
    """A file of protocol buffers, walked field by field: `at` is the byte of reading. Holds one chunk, or the field at hand where that is longer."""

    def __init__(self, file: io.BufferedReader | gzip.GzipFile):
        self._file, self._buffer, self._next, self._before = file, b"", 0, 0
        self._size = os.fstat(file.fileno()).st_size if isinstance(file, io.BufferedReader) else None  # unpacked size is known at the end only

    @property
    def at(self) -> int:
        """Byte of reading."""
        return self._before + self._next

    def ended(self) -> bool:
        """No byte is left."""
        return not self._has(1)

    def varint(self) -> int:
        """A number of variable length."""
        if not self._has(10) and self._next == len(self._buffer):
            raise WireError(f"a number is cut at byte {self.at:,}")
        try:
            value, self._next = varint(self._buffer, self._next)
        except WireError:
            raise WireError(f"a number is cut at byte {self.at:,}") from None
        return value

    def read(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > _LARGEST:
            raise WireError(f"a field at byte {self.at:,} claims {size:,} bytes; at most {_LARGEST:,} are read at once")
        if not self._has(size):
            raise WireError(f"{size:,} bytes are needed at byte {self.at:,}, {len(self._buffer) - self._next:,} are left")
        self._next += size
        return self._buffer[self._next - size : self._next]

    def skip_to(self, at: int) -> None:
        """Reads on from byte `at`, which is not before the byte of reading."""
        begin = self.at
        if at > self._before + len(self._buffer) and self._size is not None:
            if at > self._size:
                raise WireError(f"{at - begin:,} bytes are needed at byte {begin:,}, {self._size - begin:,} are left")
            self._file.seek(at)
            self._buffer, self._next, self._before = b"", 0, at
        while at > self._before + len(self._buffer):
            self._next = len(self._buffer)
            if not self._has(1):
                raise WireError(f"{at - begin:,} bytes are needed at byte {begin:,}, {self.at - begin:,} are left")
        self._next = at - self._before

    def fields(self, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Each field up to byte `end`: its number; the value of a number, else -1; the size of bytes that follow, else -1. What the caller does not read
        of them is skipped.

        Raises:
          WireError: after the last whole field.
        """
        while (self.at < end) if end is not None else self._has(1):
            begin = self.at
            key = self.varint()
            number, wire = key >> 3, key & 7
            if not number or wire not in (0, 1, 2, 5):
                raise WireError(f"byte {begin:,} begins no field (number {number}, wire type {wire})")
            if wire == 0:
                yield number, self.varint(), -1
                continue
            size = self.varint() if wire == 2 else 8 if wire == 1 else 4
            after = self.at + size
            if end is not None and after > end:
                raise WireError(f"the field that begins at byte {begin:,} needs {size:,} bytes, {end - self.at:,} are left")
            yield number, -1, size
            if self.at != after:
                self.skip_to(after)

    def _has(self, size: int) -> bool:
        """Whether that many bytes are left; reads on where they are not at hand."""
        while (left := len(self._buffer) - self._next) < size:
            try:
                data = self._file.read1(max(_CHUNK, size - left))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise WireError(f"the gzip stream is damaged or cut ({error})") from None
            if not data:
                return False
            self._before += self._next
            self._buffer, self._next = self._buffer[self._next :] + data, 0
        return True


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length at byte `at`, and the byte after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError(f"a number is cut at byte {at:,}")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def after(data: bytes, at: int) -> int:
    """The byte after the field that begins at byte `at`, within `data`."""
    begin = at
    key, at = varint(data, at)
    if key & 7 not in (0, 1, 2, 5) or not key >> 3:
        raise WireError(f"byte {begin:,} begins no field (number {key >> 3}, wire type {key & 7})")
    size, at = varint(data, at) if key & 7 in (0, 2) else (8 if key & 7 == 1 else 4, at)
    end = at if key & 7 == 0 else at + size
    if end > len(data):
        raise WireError(f"the field that begins at byte {begin:,} needs {size:,} bytes, {len(data) - at:,} are left")
    return end


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field of a message: its number, and its value as a whole number or as bytes.

    Raises:
      WireError: after the last whole field.
    """
    at, end = 0, len(data)
    while at < end:
        begin = at
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise WireError(f"byte {begin:,} begins no field (wire type {wire})")
        if at + size > end or not number:
            raise WireError(f"the field that begins at byte {begin:,} needs {size:,} bytes, {end - at:,} are left")
        yield number, data[at : at + size]
        at += size


def signed(value: int) -> int:
    """An int64 or int32 field, which negative numbers are written in as two's complement of 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def text(value: "int | bytes") -> str:
    """A string field."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
