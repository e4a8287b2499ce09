"""`cbdsl watch`: a page that shows a run's folder, while the run is played and afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli.interrupts import INTERRUPTS, command_line
from cbdsl.errors import UserError

_LOOK_SECONDS = 0.5  # between looks at whether the command that started us is still there
_END_SECONDS = 5.0
_LAST_NEWS_SECONDS = 1.2  # in which open pages hear how the run ended


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a sweep; it may come later.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where to listen; 8750 or a free one if not given.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; beyond this machine the page is behind a secret in its URL.")
    ] = "127.0.0.1",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show a run or a sweep in a browser, round by round: accuracy, bytes, workers, bans. It only reads the folder."""
    from cbdsl.watch.server import start  # noqa: PLC0415

    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file. Give the folder of a run or of a sweep.")
    INTERRUPTS.advise(f"Whatever is played there goes on. Look again with: {command_line()}")
    server = start(run, host, port)
    waits = "" if run.is_dir() else f"; {run} is not there yet, and the page waits for it"
    typer.echo(f"watch {run} at {server.url}{waits}")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        while parent is None or os.getppid() == parent:
            server.stopping.wait(_LOOK_SECONDS)
    finally:
        server.stopping.set()
        server.shutdown()


@contextlib.contextmanager
def page_beside(folder: Path, wanted: bool) -> Iterator[None]:
    """The page of a folder, in a process of its own that ends with this one, however that ends."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "cbdsl", "watch", str(folder), "--parent", str(os.getpid())]
    process = subprocess.Popen(  # a session of its own: Ctrl-C is for us, and we end it
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        if process.stdout is not None:
            said = process.stdout.readline().strip()
            typer.echo(said or "The page could not be started; the run goes on without it.", err=True)
        yield
        time.sleep(_LAST_NEWS_SECONDS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()
