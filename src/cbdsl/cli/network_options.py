"""Options and log lines that the commands with a broker share."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from cbdsl.network.mqtt import Address, exposure_warning
from cbdsl.util.formatting import single_line

_LONGEST_LINE = 1000  # characters of a message in a log

Broker = Annotated[str, typer.Option(help="The broker: mqtt://host:port, or mqtts://host:port with TLS.")]
SwarmName = Annotated[str, typer.Option(help="The swarm's name, part of every topic.")]
Ca = Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the broker's, PEM.")]
Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
Key = Annotated[Path | None, typer.Option(help="Private key of --cert, PEM.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads; default: all cores. Changes no result.")]


def warn_if_exposed(address: Address) -> None:
    """Print a warning if messages to a broker can be read by others."""

    warning = exposure_warning(address)
    if warning:
        typer.secho(warning, fg="red", bold=True, err=True)


def log_to_stderr() -> None:
    """Print log messages on standard error, one line each."""
    handler = _CurrentStderrHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _CurrentStderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress bar replaces to keep its own line last."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.stream = sys.stderr
        super().emit(record)


class _OneLineFormatter(logging.Formatter):
    """Formats a message as one line without control characters, because it may contain text from other machines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """See `logging.Formatter`."""
        record.message = single_line(record.message, _LONGEST_LINE)
        return super().formatMessage(record)
