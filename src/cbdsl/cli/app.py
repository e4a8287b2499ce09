"""The command line application: a table of the commands. The module of a command is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cbdsl import __version__
from cbdsl.cli.interrupts import INTERRUPTS

COMMANDS = {  # by panel of the help page: name, place, and the first paragraph of the docstring there
    "Run": {
        "run": ("run_commands:run", "Run one experiment; write its records, model and summary into a folder."),
        "resume": (
            "run_commands:resume",
            "Resume an interrupted run. The result is identical to an uninterrupted one.",
        ),
        "watch": ("watch_command:watch", "Show a run or sweep in a browser while it runs. Only reads the folder."),
        "generate": ("generate_command:generate", "Train a generator and write a synthetic shared set (D_tr, D_sc)."),
    },
    "Study": {
        "sweep": ("study_commands:sweep", "Run a grid of experiments in parallel. Finished runs are not repeated."),
        "compare": (
            "study_commands:compare",
            "Compare finished runs: settings that differ, mean ± deviation over seeds, paired tests.",
        ),
        "study": (
            "study_commands:study",
            "Compare methods on a data set, clean and attacked; or find where a swarm pays.",
        ),
        "tune": ("study_commands:tune", "Search for good settings. The server's hold-out decides, never the test set."),
        "reproduce": ("study_commands:reproduce", "Reproduce the paper's figures, claims and theorems as one report."),
        "arena": ("study_commands:arena", "Run every attack against every defence and write one report."),
        "theory": ("measure_commands:theory", "Repeat a run and compare it with the paper's two theorems."),
        "bench": (
            "measure_commands:bench",
            "Measure the native engine against torch. Trust the ratios, not the times.",
        ),
    },
    "Use the model": {
        "audit": (
            "audit_command:audit",
            "Search a trained model for backdoors before it is released; remove them on request.",
        ),
        "predict": (
            "model_commands:predict",
            "Predict classes, numbers or anomalies of the samples in a file with a trained model.",
        ),
        "export": (
            "model_commands:export",
            "Write a trained model for other programs: ONNX, one C file and its header, or safetensors.",
        ),
    },
    "Deploy": {
        "swarm": (
            "serve_commands:swarm",
            "Run a deployment on this machine: a broker, the server, one process per worker.",
        ),
        "provision": (
            "provision_command:provision",
            "Create certificates for a swarm, and the broker's configuration.",
        ),
        "serve": ("serve_commands:serve", "Run the parameter server, with workers behind an MQTT broker."),
        "unban": ("unban_command:unban", "Lift the ban of a worker in a served run."),
        "work": ("work_command:work", "Run one worker. Its samples never leave this machine."),
        "flower": ("flower_command:flower", "Run CB-DSL as a Flower app."),
    },
    "Look up": {
        "list": ("list_commands:list_parts", "List what there is to choose from; without KIND, the kinds."),
        "presets": ("list_commands:presets", "Explain the presets; with NAME print one of them whole, as TOML."),
        "doctor": (
            "doctor_command:doctor",
            "Show what this installation supports, or check the connection to a broker or cluster.",
        ),
        "data": ("data_commands:data", "Download data sets, describe them, and draw partitions."),
    },
}


class LazyCommands(Mapping[str, Any]):
    """The commands by name; looking one up imports its module."""

    def __init__(self) -> None:
        self._places = {name: place for panel in COMMANDS.values() for name, (place, _) in panel.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer's type of a command is private
        module, function = self._places[name].split(":")
        INTERRUPTS.hold()
        try:
            command = getattr(import_module(f"cbdsl.cli.{module}"), function)
        finally:
            INTERRUPTS.release()
        if not isinstance(command, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(name)(command)
            command = single
        return typer.main.get_command(command)


class LazyGroup(TyperGroup):
    """A group that imports a command when it is used, and none to list them."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 - what typer passes
        super().__init__(**given | {"commands": LazyCommands()})

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002
        """See `TyperGroup.list_commands`."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Print the help page as plain text: rich would take longer to load than all the rest."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002
        """List the commands by the table."""
        for panel, entries in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, text) for name, (_, text) in entries.items()])


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Distributed swarm learning: communication-efficient, Byzantine-robust (CB-DSL, arXiv 2208.05578)."""
