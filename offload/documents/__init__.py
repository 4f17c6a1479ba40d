"""Settings files: read, checked against tables of keys, and every mistake said with its file and line; without torch."""

from __future__ import annotations

from offload.documents.load import MAX_FILE_NBYTES, Document, Kind, Place, Spot, member, plain, read
from offload.documents.tables import (
    SIZE_SCHEMA,
    Name,
    Names,
    Size,
    Table,
    complain,
    explain,
    nearest,
    sized,
    tables_of,
    words,
)

__all__ = [
    "MAX_FILE_NBYTES",
    "SIZE_SCHEMA",
    "Document",
    "Kind",
    "Name",
    "Names",
    "Place",
    "Size",
    "Spot",
    "Table",
    "complain",
    "explain",
    "member",
    "nearest",
    "plain",
    "read",
    "sized",
    "tables_of",
    "words",
]
