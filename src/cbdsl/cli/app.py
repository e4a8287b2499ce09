"""The command line application: all commands by group. A command imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from cbdsl import __version__
from cbdsl.cli.data_commands import data
from cbdsl.cli.doctor_command import doctor
from cbdsl.cli.list_commands import list_parts, presets
from cbdsl.cli.model_commands import export, predict
from cbdsl.cli.network_commands import flower, provision, serve, swarm, watch, work
from cbdsl.cli.run_commands import resume, run
from cbdsl.cli.study_commands import arena, bench, compare, generate, reproduce, study, sweep, theory, tune

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


@app.callback()
def common(version: _Version = False) -> None:
    """Distributed swarm learning: communication-efficient, Byzantine-robust (CB-DSL, arXiv 2208.05578)."""


_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {"run": run, "resume": resume, "watch": watch, "generate": generate},
    "Study": {
        "sweep": sweep,
        "compare": compare,
        "study": study,
        "tune": tune,
        "reproduce": reproduce,
        "arena": arena,
        "theory": theory,
        "bench": bench,
    },
    "Use the model": {"predict": predict, "export": export},
    "Deploy": {"swarm": swarm, "provision": provision, "serve": serve, "work": work},
    "Look up": {"list": list_parts, "presets": presets, "doctor": doctor},
}
for _title, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_title)(_command)
app.add_typer(flower, name="flower", rich_help_panel="Deploy")
app.add_typer(data, name="data", rich_help_panel="Look up")
