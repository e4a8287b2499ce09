"""Files that no crash can spoil, that others need not see, and that cannot spoil their reader.

Written beside their place, then moved there; private ones are their owner's alone. What is read is bounded: whatever
the bytes, the answer is a value, or a ValueError with a reason. Arrays are read in `archives`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cbdsl.text import size

_MOST_TEXT = 2**22  # bytes of a file that people write
_PRIVATE = 0o600


def write_atomically(path: Path, content: bytes | memoryview, private: bool = False) -> None:
    """Write a small file whole, or leave the old one. private: for its owner alone, whatever the umask."""
    replace_atomically(path, lambda file: file.write(content), private)


def replace_atomically(path: Path, write: Callable[[IO[bytes]], object], private: bool = False) -> None:
    """Write a file beside its place and move it there, so that a crash leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    if private:
        partial.unlink(missing_ok=True)  # one that was there already would keep its permissions
    with private_file(partial, "wb") if private else partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: object, private: bool = False) -> None:
    """Write plain values as indented JSON; NaN and infinity have no place in it."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(), private)


def is_free(path: Path) -> bool:
    """Whether a folder can be started there: it does not exist, or has nothing but hidden files, such as a lock."""
    return not path.exists() or (path.is_dir() and all(file.name.startswith(".") for file in path.iterdir()))


def private_folder(path: Path) -> None:
    """A folder that its owner alone can enter; one that is there already stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def private_file(path: Path, mode: str) -> IO[bytes]:
    """Open a file to write; if it is new, it is its owner's alone."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _PRIVATE))


def read_text(path: Path) -> str:
    """A file that people write, such as a spec; ValueError if it is far too long for one, or no UTF-8."""
    with path.open("rb") as file:
        content = file.read(_MOST_TEXT + 1)
    if len(content) > _MOST_TEXT:
        raise ValueError(f"it is longer than {size(_MOST_TEXT)}")
    return content.decode("utf-8")


def read_json(text: str) -> Any:  # noqa: ANN401 - what JSON holds
    """The value of JSON text; ValueError if there is none, however deep or long its parts are."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
