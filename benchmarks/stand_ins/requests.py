"""Replacement of `requests` for public programs: a download opens the file of that name in the working directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def get(url: str, stream: bool = False) -> Iterator[SimpleNamespace]:
    with open(url.rpartition("/")[2], "rb") as raw:
        yield SimpleNamespace(raw=raw)
