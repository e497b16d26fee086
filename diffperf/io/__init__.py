"""Readers of measured data and writers of results. They give plain tables and know no model."""
from ._published import published_runs_path as published_runs_path
from ._runs import (
    ARCHITECTURE_COLUMNS as ARCHITECTURE_COLUMNS,
    COLUMNS as COLUMNS,
    Run as Run,
    RunTable as RunTable,
    read_runs as read_runs,
    runs_from_records as runs_from_records,
    source_repository as source_repository,
    write_runs as write_runs,
)
from ._tables import RunFileError as RunFileError
from .._files import write_atomic as write_atomic

__all__ = ["ARCHITECTURE_COLUMNS", "COLUMNS", "Run", "RunFileError", "RunTable", "published_runs_path", "read_runs",
           "runs_from_records", "source_repository", "write_atomic", "write_runs"]
