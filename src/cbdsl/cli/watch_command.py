"""The command watch, and the page that other commands open beside a run."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli.interrupts import INTERRUPTS, command_line
from cbdsl.errors import UserError
from cbdsl.util.files import read_text

TOKEN_VARIABLE = "CBDSL_WATCH_TOKEN"
_PARENT_SECONDS = 0.5  # between checks that the command that started this one still runs
_START_SECONDS = 30.0  # for the page to print its address
_END_SECONDS = 5.0  # for the page to end
_LAST_NEWS_SECONDS = 1.2  # for open pages to show how the run ended


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or sweep; it need not exist yet.")],
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; default: 8750, or a free one.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; from other machines the page needs the secret in its URL.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with a fixed secret for the URL; {TOKEN_VARIABLE} sets it, too."),
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show a run or sweep in a browser while it runs. Only reads the folder."""
    from cbdsl.watch.page_server import start  # noqa: PLC0415 - it needs starlette

    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file. Give the folder of a run or sweep.", code="wrong-type")
    INTERRUPTS.advise(f"The run itself continues. Watch it again with: {command_line()}")
    waits = "" if run.is_dir() else f"; the page waits for {run}, which does not exist yet"
    with start(run, host, port, token=_read_token(token_file)) as server:
        typer.echo(f"watch {run} at {server.url}{waits}")
        sys.stdout.flush()
        while parent is None or os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)


def _read_token(path: Path | None) -> str:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    try:
        return read_text(path).strip()
    except (OSError, ValueError) as error:
        raise UserError(f"The token file {path} cannot be read: {error}.", code="unreadable-file") from error


@contextlib.contextmanager
def page_beside(folder: Path, wanted: bool) -> Iterator[None]:
    """Run `cbdsl watch` for a folder in another process, which ends with this one."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "cbdsl", "watch", str(folder), "--parent", str(os.getpid())]
    process = subprocess.Popen(  # its own session: Ctrl-C reaches this process alone, which ends the other
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        address = process.stdout.readline().strip() if ready else ""
        typer.echo(address or "The page could not be started; the run goes on without it.", err=True)
        yield
        time.sleep(_LAST_NEWS_SECONDS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()
