"""A CSV file that grows row by row, so that an interruption loses at most the row in the making, and that a later call goes on with."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._files import write_atomic


class GrowingTable:
    """Rows of a measurement on disk.

    Attributes:
      path: the file.
      columns: its header.
      rows: what it held when it was opened.
      repaired: bytes of an unfinished last line that were cut off.
    """

    def __init__(self, path: str | os.PathLike, columns: Sequence[str], fixed: Mapping[str, object], force_new: bool = False):
        """Opens `path`, or creates it with its header.

        Args:
          fixed: columns that have one value throughout a file: device and versions.
          force_new: drop the rows of a file that was measured elsewhere.
        Raises:
          ValueError: for a folder that does not exist, a file that is another table, or one of another device or other versions.
          OSError: when it cannot be read or written.
        """
        self.path, self.columns = Path(path), tuple(columns)
        self.rows: list[dict[str, str]] = []
        self.repaired = 0
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"{path}: the folder {self.path.absolute().parent} does not exist. Create it first.")
        if self.path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file in it.")
        header = self._line(columns)
        if not self.path.exists() or self.path.stat().st_size == 0:
            write_atomic(self.path, header)
            return
        text = self._whole_lines(header)
        self.rows = list(csv.DictReader(io.StringIO(text), restval=""))
        different = self._differences(fixed)
        if different and not force_new:
            raise ValueError(
                f"{path} was measured elsewhere: {different}. "
                "One file holds one device and its software: choose another file, or drop its rows with --force-new (force_new=True)."
            )
        if different:
            self.rows = []
            write_atomic(self.path, header)
        with open(self.path, "ab"):  # may it be written to? Said before anything is measured.
            pass

    def append(self, row: Mapping[str, object]) -> None:
        """Adds one row, and hands it to the disk before returning."""
        unknown = set(row) - set(self.columns)
        assert not unknown, f"columns that the table has not: {unknown}"
        with open(self.path, "r+b") as file:  # not "ab": a file that someone removed meanwhile would come back without its header
            file.seek(0, os.SEEK_END)
            file.write(self._line([_text(row.get(name, "")) for name in self.columns]).encode())
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self, header: str) -> str:
        """The file without an unfinished last line, which is cut off on disk too."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1] if b"\n" in data else b""
        if not whole.startswith(header.encode()):
            if header.encode().startswith(data):  # interrupted in the header
                write_atomic(self.path, header)
                return header
            start = data[:60].decode("utf-8", "replace").splitlines()[0] if data else ""
            raise ValueError(f"{self.path} is another table: it begins with {start!r}. Choose another file for these measurements.")
        self.repaired = len(data) - len(whole)
        if self.repaired:
            os.truncate(self.path, len(whole))
        return whole.decode("utf-8", "replace")

    def _differences(self, fixed: Mapping[str, object]) -> str:
        found = []
        for name, value in fixed.items():
            values = {row[name] for row in self.rows}
            if values - {_text(value)}:
                found.append(f"{name} is {', '.join(sorted(values))} there and {_text(value) or 'empty'} here")
        return "; ".join(found)

    @staticmethod
    def _line(cells: Sequence[object]) -> str:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerow(cells)
        return stream.getvalue()


def _text(value: object) -> str:
    """A cell: floats with six digits, no line ends."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())
