"""Who may speak to the broker: a certificate for every machine, and the rules by which a broker goes.

    DIR/ca/            the authority's key, which makes new members: keep it off the network
    DIR/broker/        mosquitto.conf, acl, crl.pem, the broker's certificate and key
    DIR/server/        the parameter server's certificate and key, and roster.txt: the workers it may take
    DIR/monitor/       a certificate for whoever watches the broker: it reads statistics and who is there
    DIR/workers/NAME/  one worker's certificate and key, to be copied to its device

A worker's name is the common name of its certificate. The broker takes it for user name and client id and lets a name
publish below `from/<name>/` alone: so a topic proves who wrote to it, and nobody can take another's connection over.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cbdsl.deploy import topics, wire
from cbdsl.deploy.certificates import AUTHORITY_DAYS, Authority, Issued, is_name, serials
from cbdsl.deploy.identity import MONITOR_NAME, SERVER_NAME, organization_of
from cbdsl.deploy.provision_files import (
    LARGEST_MODEL,
    LOCAL_HOSTS,
    Provisioned,
    access_rules,
    broker_config,
    monitor_readme,
    readme,
    server_readme,
    worker_readme,
)
from cbdsl.errors import UserError

DAYS = 825
PORT = 8883

_MOST_NUMBERS = wire.MAX_WHOLE // 4
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


def provision(  # noqa: PLR0913 - the last ones by name
    out: Path,
    workers: Sequence[str],
    swarm: str,
    hosts: Sequence[str],
    days: int = DAYS,
    port: int = PORT,
    *,
    server_host: str = LOCAL_HOSTS[0],
    server_port: int | None = None,
    largest_model: int = LARGEST_MODEL,
) -> Provisioned:
    """Make a new folder: an authority, and certificates for a broker, a parameter server and these workers.

    server_host, server_port: where server and monitor reach the broker; the port after the workers' if not given.
    largest_model: how many numbers the largest model has that workers may upload.
    """
    topics.check_name(swarm, "swarm")
    _check_workers(workers)
    _check_hosts([*hosts, server_host] if hosts else hosts)
    _check_model(largest_model)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"Certificates can last 1 to {AUTHORITY_DAYS} days; given {days}.")
    inner = _beside(port) if server_port is None else server_port
    for number in (port, inner):
        if not 1 <= number <= 65535:
            raise UserError(f"A port is a number from 1 to 65535; given {number}.")
    if inner == port:
        raise UserError(f"Workers and server need a port each; both were given {port}.")
    made = Provisioned(
        out, swarm, tuple(dict.fromkeys(hosts)), port, days, tuple(workers),
        server_host=server_host, server_port=inner, largest_model=largest_model,
    )  # fmt: skip
    with _writing(out), _all_or_nothing(out) as folder:
        authority = Authority.new(organization_of(swarm))
        (folder / "ca" / "issued").mkdir(parents=True)
        _write_pair(folder / "ca", "ca", authority.pem())
        (folder / "broker" / "data").mkdir(parents=True)
        _write_broker(folder, made, authority)
        _write_rules(folder, made)
        _write(folder / "broker" / "crl.pem", authority.revocation_list([]))
        _write_server(folder, made, authority)
        _write_roster(folder, workers)
        _write_monitor(folder, made, authority)
        for name in workers:
            _write_worker(folder, name, made, authority)
        _write(folder / "README.txt", readme(made))
        _write_settings(folder, made)
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            path.chmod(0o700)
    return made


def add_workers(out: Path, workers: Sequence[str]) -> Provisioned:
    """Certificates for further workers by the same authority, and the broker's limits for so many."""
    known, authority = read(out), _authority(out)
    _check_workers(workers)
    listed = _read_roster(out)
    for name in workers:  # whoever has a record and is not listed was taken from the roster, or never got there
        if name in known.workers and (name in known.revoked or name in [line.strip() for line in listed]):
            raise UserError(
                f"The worker '{name}' has its certificate, and keys are never overwritten. Give another name, or "
                f"new keys to everybody: cbdsl provision {out} --renew"
            )
    now = replace(known, workers=tuple(dict.fromkeys((*known.workers, *workers))))
    with _writing(out):
        for name in workers:
            if name not in known.workers or not (out / "workers" / name / "README.txt").exists():
                _write_worker(out, name, known, authority)
        _write_rules(out, now)
        _write_settings(out, now)
        _write_roster(out, [*listed, *workers])  # last: with this it is done
    return now


def allow_models(out: Path, numbers: int) -> Provisioned:
    """Let workers upload models of so many numbers and no more."""
    _check_model(numbers)
    now = replace(read(out), largest_model=numbers)
    with _writing(out):
        _write_settings(out, now)
        _write_rules(out, now)
    return now


def revoke(out: Path, workers: Sequence[str]) -> Provisioned:
    """Shut workers out for good: the broker's list names their certificates, its rules take their rights."""
    known, authority = read(out), _authority(out)
    for name in workers:
        if name not in known.workers:
            raise UserError(f"There is no worker '{name}' in {out}. There are: {', '.join(known.workers) or 'none'}.")
    now = replace(known, revoked=tuple(sorted({*known.revoked, *workers})))
    with _writing(out):
        _write_settings(out, now)
        refused = [serial for name in now.revoked for serial in serials(_record(out, name).read_bytes())]
        _write(out / "broker" / "crl.pem", authority.revocation_list(refused))
        _write_rules(out, now)
        if (out / "server" / "roster.txt").exists():
            _write_roster(out, [line for line in _read_roster(out) if line.strip() not in now.revoked])
    return now


def renew(out: Path) -> Provisioned:
    """New keys and certificates for everybody who is not revoked; the old ones are good until they expire."""
    known, authority = read(out), _authority(out)
    with _writing(out):
        _write_rules(out, known)
        _write_settings(out, known)
        _write_broker(out, known, authority)
        _write_server(out, known, authority)
        _write_monitor(out, known, authority)
        for name in known.workers:
            if name not in known.revoked:
                _write_worker(out, name, known, authority)
    return known


def read(out: Path) -> Provisioned:
    """What a folder was made for."""
    path = out / "provision.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Provisioned(
            folder=out,
            swarm=topics.check_name(stored["swarm"], "swarm"),
            hosts=tuple(map(str, stored["hosts"])),
            port=int(stored["port"]),
            days=int(stored["days"]),
            workers=tuple(sorted(record.stem for record in (out / "ca" / "issued").glob("*.crt"))),
            revoked=tuple(map(str, stored["revoked"])),
            server_host=str(stored.get("server_host", LOCAL_HOSTS[0])),
            server_port=int(stored.get("server_port", _beside(int(stored["port"])))),
            largest_model=int(stored.get("largest_model", LARGEST_MODEL)),
        )
    except FileNotFoundError as error:
        raise UserError(f"{out} was not made by this command. Make it: cbdsl provision {out} --workers 8") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}). Put it back as it was made.") from error


def numbered(count: int, taken: Sequence[str] = ()) -> list[str]:
    """So many names that are not taken: worker-1, worker-2 and so on."""
    candidates = (f"worker-{number}" for number in range(1, count + len(taken) + 1))
    return [name for name in candidates if name not in taken][:count]


def _check_workers(workers: Sequence[str]) -> None:
    for name in workers:
        topics.check_name(name, "worker")
        if workers.count(name) > 1:
            raise UserError(f"The name '{name}' is given twice. Every worker needs a name of its own.")


def _check_hosts(hosts: Sequence[str]) -> None:
    if not hosts:
        raise UserError("Server and workers must find the broker: give its name or address with --host.")
    for host in hosts:
        if is_name(host) and not _HOST.fullmatch(host):
            raise UserError(f"'{host}' is neither a host's name nor an IP address. Give broker.local or 10.0.0.5, say.")


def _check_model(numbers: int) -> None:
    if not 1 <= numbers <= _MOST_NUMBERS:
        raise UserError(f"The largest model can have 1 to {_MOST_NUMBERS:,} numbers; given {numbers:,}.")


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _authority(out: Path) -> Authority:
    try:
        return Authority.load((out / "ca" / "ca.crt").read_bytes(), (out / "ca" / "ca.key").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"The authority in {out / 'ca'} cannot be used ({error}). Put its files back.") from error


# What is in the folder ------------------------------------------------------------------------------------------------


def _record(out: Path, worker: str) -> Path:
    """All certificates that a worker ever had: enough to revoke them when its folder is long on its device."""
    return out / "ca" / "issued" / f"{worker}.crt"


def _write_broker(folder: Path, known: Provisioned, authority: Authority) -> None:
    hosts = tuple(dict.fromkeys((*known.hosts, known.server_host, *LOCAL_HOSTS)))
    _write_pair(folder / "broker", "broker", authority.issue_broker(organization_of(known.swarm), hosts, known.days))
    _write(folder / "broker" / "ca.crt", authority.pem().certificate)


def _write_rules(folder: Path, known: Provisioned) -> None:
    _write(folder / "broker" / "mosquitto.conf", broker_config(known))
    _write(folder / "broker" / "acl", access_rules(known), mode=0o600)  # newer brokers warn of files that all can read


def _write_server(folder: Path, known: Provisioned, authority: Authority) -> None:
    issued = authority.issue_client(organization_of(known.swarm), SERVER_NAME, known.days)
    _write_member(folder / "server", "server", issued, authority, server_readme(known))


def _write_monitor(folder: Path, known: Provisioned, authority: Authority) -> None:
    issued = authority.issue_client(organization_of(known.swarm), MONITOR_NAME, known.days)
    _write_member(folder / "monitor", "monitor", issued, authority, monitor_readme(known))


def _write_worker(folder: Path, name: str, known: Provisioned, authority: Authority) -> None:
    """The record first: a certificate that nobody can revoke must not exist."""
    issued, record = authority.issue_client(organization_of(known.swarm), name, known.days), _record(folder, name)
    _write(record, (record.read_bytes() if record.exists() else b"") + issued.certificate)
    _write_member(folder / "workers" / name, "worker", issued, authority, worker_readme(known, name))


def _write_member(home: Path, stem: str, issued: Issued, authority: Authority, readme: str) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(home, stem, issued)
    _write(home / "ca.crt", authority.pem().certificate)
    _write(home / "README.txt", readme)


def _read_roster(folder: Path) -> list[str]:
    """The roster's lines, which its owner may have edited."""
    path = folder / "server" / "roster.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _write_roster(folder: Path, lines: Sequence[str]) -> None:
    _write(folder / "server" / "roster.txt", "".join(f"{line}\n" for line in lines))


def _write_pair(folder: Path, stem: str, issued: Issued) -> None:
    _write(folder / f"{stem}.key", issued.key, mode=0o600)
    _write(folder / f"{stem}.crt", issued.certificate)


def _write_settings(folder: Path, known: Provisioned) -> None:
    stored = {
        "swarm": known.swarm,
        "hosts": known.hosts,
        "port": known.port,
        "days": known.days,
        "revoked": known.revoked,
        "server_host": known.server_host,
        "server_port": known.server_port,
        "largest_model": known.largest_model,
    }
    _write(folder / "provision.json", (json.dumps(stored, indent=2) + "\n").encode())


def _write(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write whole or not at all, readable from the first moment by nobody but those who may.

    What is replaced keeps its owner and its mode: a broker that is somebody else, and cannot read its rules when it
    looks at them again, goes on without any.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        if path.exists():
            before = path.stat()
            with suppress(PermissionError):  # root may give a file away, and others need not
                os.fchown(stream.fileno(), before.st_uid, before.st_gid)
            os.fchmod(stream.fileno(), stat.S_IMODE(before.st_mode))
        stream.write(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}. Give another folder.") from error


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name once everything is in it; `out` must be free."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists, and keys are never overwritten. Give a new folder; for more workers in this one: "
            f"cbdsl provision {out} --add --names NAME"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    beside.mkdir(mode=0o700)
    try:
        yield beside
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
