"""Options and log lines that the commands with a broker share."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer

from cbdsl.errors import unknown
from cbdsl.network.mqtt import Address, exposure_warning
from cbdsl.spec import read_tree
from cbdsl.util.formatting import single_line

_LONGEST_LINE = 1000  # characters of a message in a log

_LEVELS, _LAYOUTS = ("debug", "info", "warning", "error"), ("text", "json")

LogLevel = Annotated[str, typer.Option(help="Lowest level that is logged: debug, info, warning or error.")]
LogFormat = Annotated[str, typer.Option(help="Log lines as text, or as json, one object per line.")]
Broker = Annotated[str, typer.Option(help="The broker: mqtt://host:port, or mqtts://host:port with TLS.")]
SwarmName = Annotated[str, typer.Option(help="The swarm's name, part of every topic.")]
Ca = Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the broker's, PEM.")]
Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
Key = Annotated[Path | None, typer.Option(help="Private key of --cert, PEM.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads; default: all cores. Changes no result.")]


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Read the options of a command from a TOML file; those on the command line take precedence."""
    if path is None:
        return None
    known = {option: one.name for one in context.command.params for option in one.opts}
    found: dict[str, object] = {}
    for key, value in read_tree(path).items():
        name = known.get(f"--{key.replace('_', '-')}")
        if name is None:
            raise unknown(f"option in {path}:", key, [option[2:] for option in known if option.startswith("--")])
        found[name] = value
    context.default_map = {**(context.default_map or {}), **found}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", callback=read_config, is_eager=True,
        help="TOML file with options of this command, such as broker = \"mqtts://hub:8883\"; the command line wins.",
    ),
]  # fmt: skip


def warn_if_exposed(address: Address) -> None:
    """Print a warning if messages to a broker can be read by others."""

    warning = exposure_warning(address)
    if warning:
        typer.secho(warning, fg="red", bold=True, err=True)


def log_to_stderr(level: str = "info", layout: str = "text") -> None:
    """Print log messages on standard error, one line each."""
    for given, allowed, option in ((level, _LEVELS, "--log-level"), (layout, _LAYOUTS, "--log-format")):
        if given not in allowed:
            raise unknown(f"value of {option}:", given, allowed)
    handler = _CurrentStderrHandler(sys.stderr)
    line = _OneLineFormatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JsonFormatter() if layout == "json" else line)
    logging.basicConfig(handlers=[handler], level=level.upper())


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


class _JsonFormatter(logging.Formatter):
    """Formats a message as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = single_line(record.getMessage(), _LONGEST_LINE)
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": message}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
