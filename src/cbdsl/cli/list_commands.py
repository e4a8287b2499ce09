"""`cbdsl list` and `cbdsl presets`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cbdsl import register
from cbdsl.errors import unknown
from cbdsl.models import zoo
from cbdsl.presets import DESCRIPTIONS, PRESETS, preset
from cbdsl.spec import Spec, as_text, differences, reference

_OPTIONS = {
    "attacks": "--attack NAME",
    "aggregators": "--aggregator NAME",
    "pre-aggregations": "--aggregator NAME+AGGREGATOR",
    "selections": "--select NAME",
    "methods": "--method NAME",
    "partitions": "--set data.partition=NAME",
    "models": "--model NAME",
    "data": "--data NAME",
    "codecs": "--codec NAME",
    "augmentations": "--set local.augment=NAME",
    "metrics": "the task of the data",
    "presets": "--preset NAME",
    "settings": "--set KEY=VALUE",
}
KINDS = tuple(_OPTIONS)

_Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="FILE_OR_MODULE", help="Python code that registers parts of your own; may repeat."
    ),
]


def list_parts(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help=f"{', '.join(KINDS)}.")] = None,
    plugin: _Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> None:
    """List what there is to choose from; without KIND, the kinds."""
    register.load(plugin or ())
    rows: list[dict[str, Any]]
    if kind is None:
        rows = [{"kind": each, "count": len(rows_of(each)), "use": _OPTIONS[each]} for each in KINDS]
    elif kind in KINDS:
        rows = rows_of(kind)
    else:
        raise unknown("kind", kind, KINDS)
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=dict))
    elif kind is None:
        _print_table(["kind", "count", "use"], [[row["kind"], str(row["count"]), row["use"]] for row in rows])
        typer.echo("\nOne kind, with names and settings: cbdsl list attacks")
    elif kind == "settings":
        _print_settings()
    elif kind == "presets":
        _print_presets()
    elif kind == "models":
        _print_models(rows)
    else:
        columns = {"name": "name", "settings": "settings", "family": "family", "summary": "what it is"}
        keys = [key for key in columns if key in rows[0]]
        shown = [[_settings_text(row[key]) if key == "settings" else row[key] for key in keys] for row in rows]
        _print_table([columns[key] for key in keys], shown)
        chosen = "What is measured follows from" if kind == "metrics" else "Use one with"
        typer.echo(f"\n{chosen} {_OPTIONS[kind]}; change a setting with --set options.NAME.SETTING=VALUE.")


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Return everything of one kind, as plain values."""
    if kind == "settings":
        return [
            {"key": line.key, "default": line.default, "meaning": line.meaning, "allowed": line.allowed}
            for each in reference()
            for line in each.lines
        ]
    if kind == "presets":
        return [{"name": name, "summary": DESCRIPTIONS[name], "settings": _own(spec)} for name, spec in PRESETS.items()]
    parts = register.ALL[kind]
    families = {name: parts.family(name) for name in parts.names()}
    return [
        {
            "name": name,
            **({"family": families[name]} if any(families.values()) else {}),
            "settings": {
                key: None if value is inspect.Parameter.empty else value for key, value in parts.settings(name).items()
            },
            **(_sizes(name) if kind == "models" else {}),
            "summary": parts.summary(name),
        }
        for name in parts.names()
    ]


def _sizes(name: str) -> dict[str, Any]:
    """Return the size of a built-in network on the samples that it was made for; a plugin's is not built here."""

    if register.model.get(name).__module__ != zoo.__name__:
        return {"samples": None, "parameters": None, "multiply_adds": None}
    made = zoo.usual(name)
    return {"samples": list(made.shape), "parameters": made.size, "multiply_adds": sum(made.multiply_adds())}


def _print_models(rows: Sequence[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        samples = " x ".join(map(str, row["samples"] or []))
        counts = [f"{row[key]:,}" if row[key] else "" for key in ("parameters", "multiply_adds")]
        shown.append([row["name"], samples, *(f"{count:>11}" for count in counts), row["summary"]])
    _print_table(["name", "samples", "parameters", "multiply-adds", "what it is"], shown)
    typer.echo(
        f"\nUse one with {_OPTIONS['models']}. Sizes are for the samples that it was made for, multiply-adds for one "
        "of them, forward; on other samples they differ."
    )


def presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this preset whole, as TOML.")] = None,
) -> None:
    """Explain the presets; with NAME print one of them whole, as TOML."""
    if name is not None:
        typer.echo(preset(name).to_toml(), nl=False)
        return
    _print_presets()


def _print_presets() -> None:
    typer.echo(
        "A preset is a whole description of a run, under a name: a starting point that options change.\n"
        "Run one with `cbdsl run NAME`. This is what each of them sets; all else is at its default.\n"
    )
    for name, spec in PRESETS.items():
        typer.echo(f"{name}: {DESCRIPTIONS[name]}")
        for key, value in _own(spec).items():
            typer.echo(f"  {key} = {as_text(value)}")
    typer.echo(
        "\nEvery setting, its default and its meaning: cbdsl list settings"
        "\nOne preset whole, as TOML: cbdsl presets NAME"
    )


def _own(spec: Spec) -> dict[str, Any]:
    return {key: value for key, value in differences(spec, Spec()).items() if key != "preset"}


def _print_settings() -> None:
    for group in reference():
        typer.echo(f"{group.title}\n")
        _print_table(None, [[line.key, as_text(line.default), line.allowed, line.meaning] for line in group.lines])
        typer.echo()
    typer.echo("Parts have settings of their own, such as options.fedprox.mu: see `cbdsl list methods` and the others.")


def _settings_text(settings: dict[str, Any]) -> str:
    return " ".join(key if value is None else f"{key}={as_text(value)}" for key, value in settings.items())


def _print_table(headings: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the last column is wrapped to the terminal's width, and not wrapped in a pipe."""

    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headings is not None)
    *first, last = headings or [""] * len(rows[0])
    for heading in first:
        table.add_column(heading, no_wrap=True)
    table.add_column(last)
    for row in rows:
        table.add_row(*map(Text, row))
    if console.is_terminal:
        console.print(table)
    else:
        Console(width=500).print(table)  # one line per row, for grep
