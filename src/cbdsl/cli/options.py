"""Options that several commands have in common, beside those of a spec."""

from __future__ import annotations

from typing import Annotated

import typer

Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores if not given. Changes no number.")]
On = Annotated[
    str | None,
    typer.Option(metavar="PLACE", help="A Ray cluster: ray (start one here), auto, HOST:PORT or ray://HOST:PORT."),
]
Shards = Annotated[
    int | None, typer.Option(min=1, help="Parts of a swarm --on a cluster; one a processor if left out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, alone on standard output.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as cores if not given.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of every run; may repeat.")
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="FILE", help="A file or module with parts of your own; may repeat."),
]
