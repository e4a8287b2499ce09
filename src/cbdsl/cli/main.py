"""The entry point of the command line: an error that a user can correct is one message and exit code 2.

Nothing else is loaded before Ctrl-C is handled; the commands are in `cbdsl.cli.app`.
"""

from __future__ import annotations

import errno
import sys

from cbdsl.cli.interrupts import INTERRUPTS

_CORRECTABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENOENT,
    errno.EIO,
    errno.ENAMETOOLONG,
}
"""Errors about files that a user can correct."""


def main() -> None:
    """Run the command in `sys.argv`."""
    try:
        with INTERRUPTS:
            _run()
    except BaseException as error:
        if INTERRUPTS.happened or isinstance(error, KeyboardInterrupt):  # whatever it was turned into
            INTERRUPTS.conclude()
        raise


def _run() -> None:
    from cbdsl.errors import UserError  # noqa: PLC0415 - Ctrl-C is handled by now

    try:
        from cbdsl.cli.app import app  # noqa: PLC0415

        app()
    except UserError as error:
        _end(str(error))
    except MemoryError as error:
        _end(f"there is not enough memory ({error or 'nothing is left'}). Ask for fewer workers, epochs or samples.")
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            why = (error.strerror or "").partition(": ")[2]  # see `explain_full_disk`
            where += f" ({why})" if why else ""
            _end(f"the disk is full{where}. Everything recorded so far is safe: make room and continue.")
        if error.errno not in _CORRECTABLE or not where:
            raise
        _end(f"{error.filename} cannot be used: {error.strerror}. Check what it is and who may read and write it.")


def _end(message: str) -> None:
    if not INTERRUPTS.happened:
        print(f"cbdsl: {message}", file=sys.stderr)
    sys.exit(2)
