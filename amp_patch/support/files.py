"""Writes of text files that leave either the whole new file or the old one."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file `path` atomically by one with this text, in UTF-8.

    A reader finds either the old file or the new one, also after an error or a kill. A symbolic link at `path` is
    replaced, not followed. A character that UTF-8 cannot encode (a stray byte of a file name) becomes a question mark.

    Raises:
        OSError: the file cannot be written. The old file remains.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with new.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def fresh(path: str | os.PathLike[str]) -> Path:
    """Delete the file or symbolic link at `path`, if one exists, and return `path`. The folder need not exist.

    Raises:
        OSError: the file cannot be deleted.
    """
    path = Path(path)
    path.unlink(missing_ok=True)
    return path
