"""The entry point: runs the command line; what a user can mend is one message and exit code 2.

Loads nothing but itself before it listens for Ctrl-C; the commands are tied together in `cbdsl.cli.app`.
"""

from __future__ import annotations

import sys

from cbdsl.cli.interrupts import INTERRUPTS


def main() -> None:
    """Run the command that the command line names."""
    try:
        with INTERRUPTS:
            _run()
    except BaseException as error:
        if INTERRUPTS.happened or isinstance(error, KeyboardInterrupt):  # whatever it was turned into on its way
            INTERRUPTS.conclude()
        raise


def _run() -> None:
    import errno  # noqa: PLC0415

    from cbdsl.errors import UserError  # noqa: PLC0415

    try:
        from cbdsl.cli.app import app  # noqa: PLC0415

        app()
    except UserError as error:
        _end(str(error))
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        where = f" at {error.filename}" if error.filename else ""
        _end(f"the disk is full{where}. What was recorded before is safe: make room and go on.")


def _end(message: str) -> None:
    if not INTERRUPTS.happened:
        print(f"cbdsl: {message}", file=sys.stderr)
    sys.exit(2)
