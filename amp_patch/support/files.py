"""Files that are there whole or not at all, and that are written where they lie."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Put a file with this text, in UTF-8, in the place of `path`: a symbolic link there is replaced, not followed.

    Who reads meanwhile finds the old file or the new one; so does everybody after an error or a kill. What UTF-8 has no
    form for (a stray byte of a file's name) becomes a question mark.

    Raises:
        OSError: it cannot be written. What was there stays.
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
    """`path`, with nothing there: a file or a symbolic link is taken away. Its folder is not looked at.

    Raises:
        OSError: what is there cannot be taken away.
    """
    path = Path(path)
    path.unlink(missing_ok=True)
    return path
