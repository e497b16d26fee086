"""Tables in and out: CSV, gzipped CSV, Parquet, lists of dicts and data frames, as a header and rows of cells.

Knows nothing of what the columns mean, except that a CSV cell is text. Each reader returns `(header, rows)`, a row
being its number and a dict, or its number and a sentence saying why it could not be split into cells.
"""
import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = tuple[int, dict[str, Any] | str]

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class RunFileError(ValueError):
    """A table of runs that cannot be used as it is.

    Attributes:
      problems: every problem found, one sentence or two each; the message shows the first five.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        rest = len(self.problems) - 5
        shown = "\n".join(self.problems[:5])
        super().__init__(shown + (f"\n... and {rest} more problem{'s' * (rest > 1)} like these." if rest > 0 else ""))


def read_csv(name: str) -> tuple[list[str], list[Row]]:
    """Header and rows of a CSV file, gzipped or not."""
    text = _text(name)
    if not text.strip():
        raise RunFileError([f"{name} is empty. Its first row should hold the column names."])
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True)]
    except csv.Error as error:
        raise RunFileError([f"{name} is not valid CSV: {error}. Usually a quotation mark was not closed; quote cells that "
                            'contain commas, and write " inside them twice.']) from None
    first = next(number for number, line in enumerate(lines) if any(cell.strip() for cell in line))
    header = [cell.strip() for cell in lines[first]]
    if len(header) == 1:
        for separator, word in _SEPARATORS.items():
            if separator in header[0]:
                raise RunFileError([f"{name} has {word} between its columns; write commas. In a spreadsheet choose \"CSV, "
                                    'comma separated" when saving.'])
    return header, [(number, _cells(header, line)) for number, line in enumerate(lines[first + 1:], first + 2)
                    if any(cell.strip() for cell in line)]


def read_parquet(name: str) -> tuple[list[str], list[Row]]:
    """Header and rows of a Parquet file."""
    import pyarrow
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.read_table(name)
    except (pyarrow.ArrowException, OSError) as error:
        raise RunFileError([f"{name} is not a readable Parquet file: {error}."]) from None
    return list(table.column_names), list(enumerate(table.to_pylist(), 1))


def from_records(records: Any, name: str) -> tuple[list[str], list[Row]]:
    """Header and rows of a list of dicts, a pandas DataFrame or a pyarrow Table."""
    if hasattr(records, "to_pylist") and hasattr(records, "column_names"):                # pyarrow
        header, rows = list(records.column_names), records.to_pylist()
    elif hasattr(records, "to_dict") and hasattr(records, "columns"):                     # pandas
        records = records.astype(object).where(records.notna(), None).rename(columns=str)
        header, rows = list(records.columns), records.to_dict("records")
    elif isinstance(records, (list, tuple)):
        rows = [row if isinstance(row, Mapping) else f"the record is a {type(row).__name__}; it should be a dict."
                for row in records]
        header = list(dict.fromkeys(str(key) for row in rows if isinstance(row, Mapping) for key in row))
    else:
        raise TypeError(f"{name} is a {type(records).__name__}; it should be a list of dicts, a pandas DataFrame or a pyarrow "
                        "Table.")
    if not rows:
        raise RunFileError([f"{name} has no rows. Give one per run."])
    return header, list(enumerate(rows, 1))


def csv_bytes(header: Sequence[str], rows: Iterable[Sequence[Any]], compress: bool) -> bytes:
    """A CSV file, UTF-8 with `\n` line ends; the same table always gives the same bytes, compressed too."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell_text(cell) for cell in row] for row in rows)
    data = text.getvalue().encode("utf-8")
    return gzip.compress(data, mtime=0) if compress else data


def parquet_bytes(header: Sequence[str], kinds: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """A Parquet file with one type per column: text, bool for flags, float64 for the rest."""
    import pyarrow
    import pyarrow.parquet
    types = {"text": pyarrow.string(), "flag": pyarrow.bool_()}
    columns = zip(*rows) if rows else [()] * len(header)
    arrays = [pyarrow.array(column, types.get(kind, pyarrow.float64())) for column, kind in zip(columns, kinds)]
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=list(header)), sink)
    return sink.getvalue()


def _cell_text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 1e15:
        return str(int(cell))
    return repr(cell) if isinstance(cell, float) else str(cell)


def _cells(header: list[str], line: list[str]) -> dict[str, str] | str:
    if len(line) == len(header):
        return dict(zip(header, line))
    cause = "a comma inside a cell that is not in quotation marks" if len(line) > len(header) else "missing commas at its end"
    return f"the row has {len(line)} cells, the header {len(header)}. The usual cause is {cause}."


def _text(name: str) -> str:
    """The text of a file, or why there is none."""
    try:
        with (gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb")) as file:
            data = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RunFileError([f"{name} is not a complete gzip file: {error}. If it is not compressed, remove .gz from its "
                            "name; otherwise copy it again."]) from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RunFileError([f"{name} is UTF-16 text; save it as UTF-8 (in Excel: \"CSV UTF-8, comma separated\")."])
    for start, what, mending in ((b"PK\x03\x04", "a zip or spreadsheet file", "export the sheet as CSV"),
                                 (b"\x1f\x8b", "gzip-compressed", "end its name with .csv.gz"),
                                 (b"PAR1", "a Parquet file", "end its name with .parquet")):
        if data.startswith(start):
            raise RunFileError([f"{name} is {what}, not CSV text; {mending}."])
    if 0 in data:
        line = data.count(b"\n", 0, data.index(0)) + 1
        raise RunFileError([f"{name} is a binary file, not CSV text: it holds a zero byte in line {line}."])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RunFileError([f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}. Save the file as UTF-8, "
                            "or remove that character."]) from None
