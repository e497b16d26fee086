"""The wire format of protocol buffers: the numbered fields of a message, undecoded. Knows no schema.

Source: Google, Protocol Buffers documentation, "Encoding". Groups, which are long deprecated, are refused.
"""

from collections.abc import Iterator


class WireError(ValueError):
    """These bytes are no message, or it is cut; the message says at which byte."""


def varint(data: memoryview, at: int) -> tuple[int, int]:
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


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
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
    return value - (1 << 64) if value >> 63 else value


def text(value: "int | memoryview") -> str:
    """A string field."""
    return bytes(value).decode("utf-8", "replace") if isinstance(value, memoryview) else ""
