"""`cbdsl provision`: certificates for a swarm on real machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import extras
from cbdsl.errors import UserError

if TYPE_CHECKING:
    from cbdsl.deploy.provision_files import Provisioned

DEFAULT_SWARM = "swarm"
DEFAULT_HOST = "localhost"


def provision(  # noqa: PLR0913, PLR0917 - one parameter an option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for keys and certificates.")],
    count: Annotated[
        int | None, typer.Option("--workers", help="For how many workers: worker-1, worker-2 and so on.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="The workers' names instead, separated by commas.")] = None,
    swarm: Annotated[str | None, typer.Option(help="The swarm's name, which begins every topic.")] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the broker's machine; may repeat.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The broker's port for workers; 8883 if not given.")] = None,
    server_host: Annotated[
        str | None,
        typer.Option(help="Where server and monitor reach the broker; localhost if not given: they run beside it."),
    ] = None,
    server_port: Annotated[
        int | None, typer.Option(help="The broker's port for server and monitor; the one after --port if not given.")
    ] = None,
    largest_model: Annotated[
        int | None,
        typer.Option(help="Numbers in the largest model that workers may upload; 1,000,000 if not given."),
    ] = None,
    days: Annotated[int | None, typer.Option(help="How long certificates last; 825 days if not given.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add workers to a folder that is there.")] = False,
    revoke: Annotated[
        list[str] | None, typer.Option("--revoke", metavar="NAME", help="Shut a worker out; may repeat.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="New keys for everybody who is not shut out.")] = False,
) -> None:
    """Make certificates for a swarm on real machines, and the broker's rules that go with them."""
    extras.demand("cryptography", "it makes keys and certificates")
    from cbdsl.deploy import provision as job  # noqa: PLC0415
    from cbdsl.deploy.provision_files import LARGEST_MODEL  # noqa: PLC0415

    wishes = [word for word, wanted in (("--add", add), ("--revoke", revoke), ("--renew", renew)) if wanted]
    if len(wishes) > 1:
        raise UserError(f"{' and '.join(wishes)} are given together. Do one after the other.")
    fixed = [
        word
        for word, value in (
            ("--swarm", swarm), ("--host", hosts), ("--port", port), ("--days", days),
            ("--server-host", server_host), ("--server-port", server_port),
        )
        if value not in (None, (), [])
    ]  # fmt: skip
    if wishes and largest_model is not None:
        raise UserError(f"--largest-model and {wishes[0]} are given together. Do one after the other.")
    if wishes and fixed:
        raise UserError(f"{fixed[0]} is settled when a folder is made. Leave it out with {wishes[0]}, or make another.")
    if wishes and not add and (count is not None or names is not None):
        raise UserError(f"--workers and --names say whom to make; {wishes[0]} makes nobody. Leave them out.")
    if revoke:
        _tell_revoked(job.revoke(folder, list(dict.fromkeys(revoke))), revoke)
    elif renew:
        _tell_renewed(job.renew(folder))
    elif add:
        before = job.read(folder).workers
        chosen = _chosen(count, names, before)
        _tell_added(job.add_workers(folder, chosen), chosen)
    elif largest_model is not None and count is None and names is None and not fixed:
        _tell_allowed(job.allow_models(folder, largest_model))
    else:
        chosen = _chosen(count, names, ())
        made = job.provision(
            folder, chosen, swarm or DEFAULT_SWARM, hosts or [DEFAULT_HOST],
            job.DAYS if days is None else days, job.PORT if port is None else port,
            server_host=server_host or DEFAULT_HOST, server_port=server_port,
            largest_model=LARGEST_MODEL if largest_model is None else largest_model,
        )  # fmt: skip
        _tell_made(made, given_host=bool(hosts))


def _chosen(count: int | None, names: str | None, taken: Sequence[str]) -> list[str]:
    if (count is None) == (names is None):
        raise UserError("Say for whom: --workers 8 makes names for eight, --names east,west gives them. Give one.")
    if names is not None:
        return [name.strip() for name in names.split(",")]
    from cbdsl.deploy.provision import numbered  # noqa: PLC0415

    if count is None or not 1 <= count <= 10_000:
        raise UserError(f"1 to 10,000 workers can be made at a time; given {count}.")
    return numbered(count, taken)


def _count(workers: Sequence[str]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"


def _tell_added(made: Provisioned, added: Sequence[str]) -> None:
    typer.echo(f"{_count(added)} more in {made.folder / 'workers'}: {', '.join(added)}.")
    broker = made.folder / "broker"
    typer.echo(
        f"Copy {broker / 'acl'} and {broker / 'mosquitto.conf'} to the broker and restart it: until then they get in "
        f"and hear nothing. It needs {made.open_files:,} open files."
    )


def _tell_allowed(made: Provisioned) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Workers may upload models of up to {made.largest_model:,} numbers, in {made.pieces:,} pieces.")
    typer.echo(f"Copy {broker / 'mosquitto.conf'} and {broker / 'acl'} to the broker and restart it.")


def _tell_made(made: Provisioned, given_host: bool) -> None:
    typer.echo(f"{made.folder}: an authority, a broker at {made.url}, a parameter server, {_count(made.workers)}.")
    typer.echo(f"Server and monitor reach the broker at {made.server_url}, a door of their own.")
    broker = made.folder / "broker"
    typer.echo(f"Start the broker:  cd {broker} && mosquitto -c mosquitto.conf")
    typer.echo(f"(As root it becomes the user mosquitto, who must be able to read that: chown -R mosquitto: {broker})")
    typer.echo(f"The other commands:  {made.folder}/server/README.txt and {made.folder}/workers/*/README.txt")
    typer.echo(
        f"The broker needs {made.open_files:,} open files and up to {made.resident // 2**20:,} MiB of memory; "
        f"workers may upload models of up to {made.largest_model:,} numbers (--largest-model)."
    )
    typer.echo(f"Keep {made.folder / 'ca'} off the network: whoever has ca.key can make members.")
    if not given_host:
        typer.echo("Only this machine can reach a broker called localhost. Give --host to reach it from others.")


def _tell_revoked(made: Provisioned, names: Sequence[str]) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Revoked: {', '.join(dict.fromkeys(names))}.")
    typer.echo(f"Copy {broker / 'crl.pem'} and {broker / 'acl'} to the broker and restart it. Until then they get in.")


def _tell_renewed(made: Provisioned) -> None:
    typer.echo(f"New keys for broker, server and all workers but those revoked, good for {made.days} days.")
    typer.echo("Copy the folders out again and restart broker, server, workers. The old keys work until they expire.")
