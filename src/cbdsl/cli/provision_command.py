"""The command provision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import options
from cbdsl.errors import UserError
from cbdsl.network.roster import worker_names

if TYPE_CHECKING:
    from cbdsl.network.provision import ProvisionedSwarm


def provision(  # noqa: PLR0913, PLR0917 - one parameter per option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for keys and certificates.")],
    count: Annotated[
        int | None, typer.Option("--workers", help="Number of workers, named worker-1, worker-2 and so on.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="Names instead of --workers, separated by commas.")] = None,
    swarm: Annotated[str | None, typer.Option(help="The swarm's name, part of every topic; default: swarm.")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the broker; default: localhost; may repeat."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The broker's port for workers; default: 8883.")] = None,
    server_host: Annotated[
        str | None,
        typer.Option(help="Where server and monitor reach the broker; default: localhost."),
    ] = None,
    server_port: Annotated[
        int | None, typer.Option(help="The broker's port for server and monitor; default: the one after --port.")
    ] = None,
    largest_model: Annotated[
        int | None,
        typer.Option(help="Largest number of parameters of an upload; default: 1,000,000."),
    ] = None,
    days: Annotated[int | None, typer.Option(help="Validity of certificates in days; default: 825.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add workers to an existing folder.")] = False,
    revoke: Annotated[
        list[str] | None, typer.Option("--revoke", metavar="NAME", help="Exclude a worker; may repeat.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Issue new keys to all that are not revoked.")] = False,
    reissue: Annotated[
        list[str] | None,
        typer.Option("--reissue", metavar="NAME", help="Give a worker a new key and revoke the old one; may repeat."),
    ] = None,
    sign: Annotated[
        list[Path] | None,
        typer.Option(metavar="CSR", help="With --add or --reissue: the signing request of a worker with its own key."),
    ] = None,
    plugin: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="mosquitto's dynamic-security plugin on the broker's machine, or none; default: where this machine "
            "has it.",
        ),
    ] = None,
) -> None:
    """Create certificates for a swarm, and the broker's configuration."""
    options.demand("cryptography", "it makes keys and certificates")
    from cbdsl.network import provision as job  # noqa: PLC0415 - it needs cryptography

    wanted = (("--add", add), ("--revoke", revoke), ("--renew", renew), ("--reissue", reissue))
    actions = [word for word, given in wanted if given]
    if len(actions) > 1:
        raise UserError(f"{' and '.join(actions)} are given together. Do one after the other.", code="conflict")
    fixed = [
        word
        for word, value in (
            ("--swarm", swarm), ("--host", hosts), ("--port", port), ("--days", days),
            ("--server-host", server_host), ("--server-port", server_port), ("--plugin", None if renew else plugin),
        )
        if value not in (None, (), [])
    ]  # fmt: skip
    if actions and largest_model is not None:
        raise UserError(
            f"--largest-model and {actions[0]} are given together. Do one after the other.", code="conflict"
        )
    if actions and fixed:
        raise UserError(
            f"{fixed[0]} is fixed when a folder is created. Leave it out with {actions[0]}, or create another one.",
            code="conflict",
        )
    if actions and not add and (count is not None or names is not None):
        raise UserError(f"--workers and --names have no effect with {actions[0]}. Leave them out.", code="no-effect")
    if sign and not (add or reissue):
        raise UserError("--sign has no effect alone. Give --add --names NAME, or --reissue NAME.", code="no-effect")
    plugin = "" if plugin == "none" else plugin
    if revoke:
        _tell_revoked(job.revoke(folder, list(dict.fromkeys(revoke))), revoke)
    elif reissue:
        chosen = list(dict.fromkeys(reissue))
        _tell_reissued(job.reissue(folder, chosen, sign or ()), chosen)
    elif renew:
        _tell_renewed(job.renew(folder, plugin))
    elif add:
        before = job.read_settings(folder).workers
        chosen = _worker_names(count, names, before)
        _tell_added(job.add_workers(folder, chosen, sign or ()), chosen)
    elif largest_model is not None and count is None and names is None and not fixed:
        _tell_allowed(job.allow_models(folder, largest_model))
    else:
        chosen = _worker_names(count, names, ())
        made = job.provision(
            folder, chosen, swarm or "swarm", hosts or ["localhost"],
            job.DAYS if days is None else days, job.PORT if port is None else port,
            server_host=server_host or "localhost", server_port=server_port,
            largest_model=job.LARGEST_MODEL if largest_model is None else largest_model,
            plugin=plugin,
        )  # fmt: skip
        _tell_made(made, given_host=bool(hosts))


def _worker_names(count: int | None, names: str | None, taken: Sequence[str]) -> list[str]:
    if (count is None) == (names is None):
        raise UserError("Give either --workers 8 or --names east,west.", code="missing-value")
    if names is not None:
        return [name.strip() for name in names.split(",")]
    if count is None or not 1 <= count <= 10_000:
        raise UserError(f"--workers takes 1 to 10,000; given {count}.", code="out-of-range")
    return list(worker_names(count, 1, taken))


def _count(workers: Sequence[str]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"


def _update_broker(made: ProvisionedSwarm, otherwise: str, rewrite: bool = False, kick: Sequence[str] = ()) -> bool:
    """Send the new rules to the running broker, or print what to do instead; return whether it has them."""
    from cbdsl.network.access_rules import RulesError  # noqa: PLC0415 - it needs cryptography
    from cbdsl.network.provision import update_broker  # noqa: PLC0415

    if not made.plugin:
        typer.echo(otherwise)
        return False
    try:
        changes = update_broker(made, rewrite, kick)
    except RulesError as error:
        typer.echo(f"{error} {otherwise}")
        return False
    typer.echo(f"The broker at {made.server_url} has the new rules ({changes} changes).")
    return True


def _copy(made: ProvisionedSwarm, *more: str) -> str:
    rules = "dynamic-security.json" if made.plugin else "acl"
    files = [str(made.folder / "broker" / name) for name in (rules, "conf.d/cbdsl.conf", *more)]
    return f"Copy {', '.join(files[:-1])} and {files[-1]} to the broker and restart it."


def _tell_added(made: ProvisionedSwarm, added: Sequence[str]) -> None:
    typer.echo(f"{_count(added)} more in {made.folder / 'workers'}: {', '.join(added)}.")
    _update_broker(made, f"{_copy(made)} Until then they can connect, but receive nothing.")
    typer.echo(f"Its limits rise at the next restart; it needs {made.open_files:,} open files.")


def _tell_reissued(made: ProvisionedSwarm, names: Sequence[str]) -> None:
    typer.echo(f"New keys in {made.folder / 'workers'}: {', '.join(names)}. The old ones are revoked.")
    _update_broker(made, _copy(made, "crl.pem"), kick=names)
    typer.echo(f"The old keys are refused once the broker has {made.folder / 'broker' / 'crl.pem'} and is reloaded.")


def _tell_allowed(made: ProvisionedSwarm) -> None:
    typer.echo(f"Workers may upload models of up to {made.largest_model:,} numbers, in {made.pieces:,} pieces.")
    typer.echo(f"Copy {made.folder}/server/limits.json to the server.")
    if _update_broker(made, _copy(made), rewrite=True):
        typer.echo("Its limits of memory and queues rise at the next restart.")


def _tell_made(made: ProvisionedSwarm, given_host: bool) -> None:
    typer.echo(f"{made.folder}: an authority, a broker at {made.url}, a parameter server, {_count(made.workers)}.")
    typer.echo(f"Server and monitor reach the broker at {made.server_url}.")
    broker = made.folder / "broker"
    typer.echo(f"Start the broker:  cd {broker} && mosquitto -c mosquitto.conf")
    typer.echo(
        f"(Started by root it runs as the user mosquitto, who must own the folder: chown -R mosquitto: {broker})"
    )
    typer.echo(f"The other commands:  {made.folder}/server/README.txt and {made.folder}/workers/*/README.txt")
    typer.echo(
        f"The broker needs {made.open_files:,} open files and up to {made.resident // 2**20:,} MiB of memory; "
        f"workers may upload models of up to {made.largest_model:,} numbers (--largest-model)."
    )
    typer.echo(f"Keep {made.folder / 'ca'} secret: its keys can create members and change the broker's rules.")
    if not made.plugin:
        typer.echo(
            "Without mosquitto's dynamic-security plugin a member can fill the broker's memory with subscriptions. If "
            "the broker's machine has it, give its path: --plugin PATH (Debian: it comes with mosquitto)."
        )
    if not given_host:
        typer.echo("Only this machine can reach a broker at localhost. Give --host to reach it from others.")


def _tell_revoked(made: ProvisionedSwarm, names: Sequence[str]) -> None:
    typer.echo(f"Revoked: {', '.join(dict.fromkeys(names))}.")
    _update_broker(made, f"{_copy(made, 'crl.pem')} Until then they take part.")
    typer.echo(
        f"They cannot connect once the broker has {made.folder / 'broker' / 'crl.pem'} and is reloaded "
        "(systemctl reload, or kill -HUP)."
    )


def _tell_renewed(made: ProvisionedSwarm) -> None:
    typer.echo(f"New keys for broker, server and all workers that are not revoked, valid for {made.days} days.")
    typer.echo("Copy the folders again and restart broker, server and workers. The old keys work until they expire.")
