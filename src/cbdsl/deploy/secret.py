"""A server's own number, which no worker is told: it draws the private hold-out, for the seed is no secret."""

from __future__ import annotations

import secrets
from pathlib import Path

from cbdsl.errors import UserError
from cbdsl.files import write_atomically

_BYTES = 16


def secret_of(out: Path) -> int:
    """The secret of a run's folder; a new one if it has none."""
    path = out / ".secret"
    if not path.exists():
        return int.from_bytes(secrets.token_bytes(_BYTES)) or 1
    try:
        return int(path.read_text(encoding="ascii"), 16)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove it: the hold-out is drawn anew, and nothing else changes."
        ) from error


def keep_secret(out: Path, secret: int) -> None:
    """Write it down, for the owner of the folder alone."""
    path = out / ".secret"
    if not path.exists():
        write_atomically(path, f"{secret:x}\n".encode(), private=True)
