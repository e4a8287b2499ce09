"""Options that several commands share, and hints for missing libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.errors import missing

EXTRAS = {
    "torch": "torch",
    "matplotlib": "study",
    "jinja2": "study",
    "starlette": "watch",
    "uvicorn": "watch",
    "cryptography": "deploy",
    "amqtt": "deploy",
    "onnx": "export",
    "ray": "ray",
    "optuna": "tune",
    "PIL": "data",
    "sklearn": "cluster-defences",
    "pyarrow": "parquet",
}
"""Modules and the extras that install them: pip install 'cbdsl[study]'."""

_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}  # modules that have another name on the package index


def is_installed(library: str) -> bool:
    """Return whether a library can be imported, without importing it."""
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def version_of(library: str) -> str:
    """Return a library's version, or how to install it."""
    if is_installed(library):
        try:
            return metadata.version(_DISTRIBUTIONS.get(library, library))
        except metadata.PackageNotFoundError:
            return "installed, version unknown"
    return f"not installed ({how_to_install(library)})"


def how_to_install(library: str) -> str:
    """Return the command that installs a library."""
    return f"pip install 'cbdsl[{EXTRAS[library]}]'" if library in EXTRAS else f"pip install {library}"


def demand(library: str, why: str) -> None:
    """Refuse to go on if a library is not installed."""
    if not is_installed(library):
        raise missing(library, EXTRAS[library], why)


def demand_pages(why: str) -> None:
    """Refuse to go on if the libraries for pages with figures are not installed; why: what matplotlib does."""
    demand("matplotlib", why)
    demand("jinja2", "it makes the page")


def write_page(name: str, write: Callable[[], Path], *, quiet: bool = False) -> None:
    """Write a page and print its path; without the libraries for it, print how to install them."""
    lacking = [library for library in ("matplotlib", "jinja2") if not is_installed(library)]
    if lacking:
        how = how_to_install(lacking[0])
        typer.echo(f"{name} was not written: {lacking[0]} is not installed ({how}).", err=True)
        return
    page = write()
    if not quiet:
        typer.echo(f"page: {page}")


Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores if not given. Changes no number.")]
On = Annotated[
    str | None,
    typer.Option(metavar="PLACE", help="A Ray cluster: ray (start one here), auto, HOST:PORT or ray://HOST:PORT."),
]
Shards = Annotated[
    int | None, typer.Option(min=1, help="Parts of a swarm --on a cluster; one per processor if left out.")
]
NoBaseline = Annotated[
    bool, typer.Option("--no-baseline", help="Do not train the server alone at the end, for comparison.")
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log", metavar="LOGGER", help="tensorboard[=DIR], wandb[=PROJECT] or mlflow[=EXPERIMENT]; may repeat."
    ),
]
Metrics = Annotated[
    bool, typer.Option("--metrics", help="Measure test loss, macro-F1, ... after every round, not only at the end.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, alone on standard output.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as cores if not given.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every run; may repeat.")
]
CONTINUES = "Output folder. The same folder continues a stopped command."
Out = Annotated[Path | None, typer.Option(help=CONTINUES)]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="FILE", help="A file or module with parts of your own; may repeat."),
]
