"""`cbdsl provision`: keys, certificates, broker configuration and READMEs for the machines of a swarm.

The texts of the files are in templates/.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

from cbdsl.errors import UserError
from cbdsl.network import access_rules, topics, wire
from cbdsl.network.access_rules import BYTES_PER_RULE, MemberRights
from cbdsl.network.broker import MESSAGE_LIMIT, QUEUE_LIMIT
from cbdsl.network.certificates import (
    AUTHORITY_DAYS,
    MAKE_REQUEST,
    Authority,
    IssuedCertificate,
    RequestedKey,
    identity_of,
    is_name,
    keys_of,
    read_request,
    serials,
)
from cbdsl.network.mqtt import Address
from cbdsl.network.tls import ADMIN_NAME, IDENTITY, LIMITS, MONITOR_NAME, SERVER_NAME, broker_user, organization_of
from cbdsl.network.wire import piece_count
from cbdsl.util.files import read_json
from cbdsl.util.serialize import Bounds, from_plain, to_plain

DAYS = 825
PORT = 8883
LARGEST_MODEL = 1_000_000
"""Default limit for the numbers in a model that workers upload."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_SERVER_CONNECTIONS = 32  # server and monitor, with those they lost and the broker still counts
_ROOM = 100  # connections beyond the workers' own, for clients that have not shown a certificate yet
_OTHER_FILES = 64  # that a broker has open beside its connections
_QUEUED = 2000  # messages that may wait for one client, beyond those that grow with the roster
_PROGRAM_BYTES = 32 * 2**20
_TLS_BYTES = 100 * 1024  # resident per connection, not counted by the broker
_CONNECTION_BYTES = 64 * 1024  # per connection, of the broker's memory limit
_MOST_NUMBERS = wire.MAX_WHOLE // 4
_INCLUDED = "conf.d"  # the folder of the generated part of the broker's configuration
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class ProvisionedSwarm:
    """The settings of a folder of certificates, and the broker's limits that follow from them."""

    swarm: str
    hosts: Annotated[tuple[str, ...], Bounds(1, 1000)]  # of the broker; the first one is in the command lines
    port: Annotated[int, Bounds(1, 65535)]
    days: Annotated[int, Bounds(1, AUTHORITY_DAYS)]  # validity of a certificate
    server_host: str = "localhost"  # where server and monitor reach the broker
    server_port: Annotated[int, Bounds(0, 65535)] = 0  # of their own listener
    largest_model: Annotated[int, Bounds(1, _MOST_NUMBERS)] = LARGEST_MODEL  # numbers in it
    plugin: str = ""  # the dynamic-security plugin on the broker's machine; empty: an acl file
    folder: Path = Path()
    workers: tuple[str, ...] = ()  # all that ever had a certificate
    revoked: tuple[str, ...] = ()  # those of them that are excluded

    @property
    def url(self) -> str:
        """The broker's address for workers."""
        return _url(self.hosts[0], self.port)

    @property
    def server_url(self) -> str:
        """The broker's address for the server."""
        return _url(self.server_host, self.server_port)

    @property
    def members(self) -> tuple[str, ...]:
        """The workers that are not revoked."""
        return tuple(name for name in self.workers if name not in self.revoked)

    @property
    def pieces(self) -> int:
        """The number of pieces of the largest model."""
        return piece_count(4 * self.largest_model)

    @property
    def connections(self) -> int:
        """Connections for workers: two each, because a lost one is counted until the broker notices."""
        return 2 * len(self.members) + _ROOM

    @property
    def open_files(self) -> int:
        """The number of files that the broker must be allowed to open."""
        return self.connections + _SERVER_CONNECTIONS + _OTHER_FILES

    @property
    def queued(self) -> int:
        """Messages that may wait for one client: all workers may send to the server at once, some in pieces."""
        return _QUEUED + 4 * len(self.workers) + 2 * self.pieces

    @property
    def memory(self) -> int:
        """The broker's limit in bytes for messages, topics and clients, without TLS."""
        models = 8 * self.pieces * MESSAGE_LIMIT  # retained ones, and those on their way to slow clients
        rules = len(self.members) * (20 + self.pieces) * BYTES_PER_RULE if self.plugin else 0
        return 2 * QUEUE_LIMIT + models + rules + self.connections * _CONNECTION_BYTES

    @property
    def administrator(self) -> Address:
        """The broker's address, with the certificate that may change the rules of the running broker."""
        key, certificate = (self.folder / "ca" / f"admin.{end}" for end in ("key", "crt"))
        authority = self.folder / "ca" / "ca.crt"
        return Address(self.server_host, self.server_port, True, authority, certificate, key)

    @property
    def resident(self) -> int:
        """The largest number of bytes that the broker's process uses."""
        return _PROGRAM_BYTES + self.memory + self.connections * _TLS_BYTES


def _url(host: str, port: int) -> str:
    return f"mqtts://{f'[{host}]' if ':' in host else host}:{port}"


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
    plugin: str | None = None,
) -> ProvisionedSwarm:
    """Create a folder with authorities and certificates for a broker, a parameter server, a monitor and the workers.

    server_host, server_port: the listener for server and monitor; default: localhost and the port after `port`.
    largest_model: limit for the numbers in a model that workers upload.
    plugin: path of mosquitto's dynamic-security plugin on the broker's machine; None: as on this machine; empty: none.
    """
    topics.check_name(swarm, "swarm")
    _check_workers(workers)
    _check_hosts([*hosts, server_host] if hosts else hosts)
    _check_model(largest_model)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"Certificates can last 1 to {AUTHORITY_DAYS} days; given {days}.", code="out-of-range")
    inner = _next_port(port) if server_port is None else server_port
    for number in (port, inner):
        if not 1 <= number <= 65535:
            raise UserError(f"A port is a number from 1 to 65535; given {number}.", code="out-of-range")
    if inner == port:
        raise UserError(f"Workers and server need a port each; both were given {port}.", code="conflict")
    made = ProvisionedSwarm(
        swarm,
        tuple(dict.fromkeys(hosts)),
        port,
        days,
        server_host=server_host,
        server_port=inner,
        largest_model=largest_model,
        plugin=str(access_rules.find_plugin() or "") if plugin is None else plugin,
        folder=out,
        workers=tuple(workers),
    )
    with _writing(out), _all_or_nothing(out) as folder:
        authority = Authority.new(organization_of(swarm))
        (folder / "ca" / "issued").mkdir(parents=True)
        _write_pair(folder / "ca", "ca", authority.pem())
        (folder / "broker" / "data").mkdir(parents=True)
        _write_staff(folder, made, authority)
        _write_roster(folder, workers)
        for name in workers:
            _write_worker(folder, name, made, authority)
        _write_rules(folder, made)
        _write_revocations(folder, authority)
        _write(folder / "README.txt", _fill("README.txt", made))
        _write_settings(folder, made)
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            path.chmod(0o700)
    return made


def add_workers(out: Path, workers: Sequence[str], requests: Sequence[Path] = ()) -> ProvisionedSwarm:
    """Issue certificates for further workers, and raise the broker's limits.

    requests: a certificate signing request for each worker that made its own key, in the same order.
    """
    with _changing(out) as (known, authority):
        _check_workers(workers)
        keys = _requested_keys(workers, requests)
        listed = _read_roster(out)
        for name in workers:  # a recorded name that is not listed was removed from the roster, or never added
            if name in known.workers and (name in known.revoked or name in [line.strip() for line in listed]):
                raise UserError(
                    f"The worker '{name}' has a certificate, and keys are never overwritten. Use another name, "
                    f"or issue a new key: cbdsl provision {out} --reissue {name}",
                    code="exists-already",
                )
        for name in workers:
            if name not in known.workers or not (out / "workers" / name / "README.txt").exists():
                _write_worker(out, name, known, authority, keys.get(name))
        now = read_settings(out)
        _write_rules(out, now)
        _write_settings(out, now)
        _write_roster(out, [*listed, *workers])  # last: a worker on the roster is complete
    return now


def allow_models(out: Path, numbers: int) -> ProvisionedSwarm:
    """Set the limit for the numbers in a model that workers upload."""
    _check_model(numbers)
    with _changing(out) as (known, _):
        now = replace(known, largest_model=numbers)
        _write_settings(out, now)
        _write_rules(out, now)
    return now


def revoke(out: Path, workers: Sequence[str]) -> ProvisionedSwarm:
    """Exclude workers: revoke their certificates, and deny them all topics."""
    with _changing(out) as (known, authority):
        _check_known(known, workers)
        for name in workers:
            _revoke_serials(out, name, serials(_record(out, name).read_bytes()))
        now = read_settings(out)
        _write_settings(out, now)
        _write_revocations(out, authority)
        _write_rules(out, now)
        if (out / "server" / "roster.txt").exists():
            _write_roster(out, [line for line in _read_roster(out) if line.strip() not in now.revoked])
    return now


def reissue(out: Path, workers: Sequence[str], requests: Sequence[Path] = ()) -> ProvisionedSwarm:
    """Issue new keys to workers, revoke their old ones, and put them back on the roster if they were excluded."""
    with _changing(out) as (known, authority):
        _check_known(known, workers)
        keys = _requested_keys(workers, requests)
        for name, key in keys.items():
            if key in keys_of(_record(out, name).read_bytes()):
                raise UserError(
                    f"The signing request of '{name}' is for a key that it has had already, and --reissue replaces the "
                    f"key. Make a new one on the device: {MAKE_REQUEST}",
                    code="conflict",
                )
        for name in workers:
            old = serials(_record(out, name).read_bytes())
            _write_worker(out, name, known, authority, keys.get(name))
            _revoke_serials(out, name, old)
        now = read_settings(out)
        _write_revocations(out, authority)
        _write_rules(out, now)
        listed = _read_roster(out)
        _write_roster(out, [*listed, *(name for name in workers if name not in {line.strip() for line in listed})])
    return now


def renew(out: Path, plugin: str | None = None) -> ProvisionedSwarm:
    """Issue new keys and certificates to all that are not revoked; the old ones stay valid until they expire.

    A worker that made its own key gets a new certificate for it.
    plugin: from now on the broker has this plugin, or none if it is empty; None: as before.
    """
    with _changing(out) as (stored, authority):
        known = stored if plugin is None else replace(stored, plugin=plugin)
        _write_staff(out, known, authority)
        for name in known.members:
            home = out / "workers" / name
            kept = (home / "worker.crt").exists() and not (home / "worker.key").exists()
            _write_worker(out, name, known, authority, keys_of(_record(out, name).read_bytes())[-1] if kept else None)
        _write_rules(out, known)
        _write_revocations(out, authority)
        _write_settings(out, known)
    return known


def update_broker(known: ProvisionedSwarm, rewrite: bool = False, kick: Sequence[str] = ()) -> int:
    """Send the rules of a folder to its running broker; return the number of changes, or raise RulesError.

    rewrite: also replace the rules of members that it has already. kick: workers to disconnect.
    """
    users = [broker_user(known.swarm, name) for name in kick]
    return access_rules.apply_rules(known.administrator, known.swarm, _rights_of(known), rewrite, users)


def _rights_of(known: ProvisionedSwarm) -> list[MemberRights]:
    return access_rules.rights_of(known.swarm, known.members, known.pieces)


def read_settings(out: Path) -> ProvisionedSwarm:
    """Read the settings of a folder."""
    path = out / "provision.json"
    try:
        stored = from_plain(ProvisionedSwarm, read_json(path.read_text(encoding="utf-8")), defaults=True)
        topics.check_name(stored.swarm, "swarm")
        issued = {record.stem: serials(record.read_bytes()) for record in (out / "ca" / "issued").glob("*.crt")}
    except FileNotFoundError as error:
        raise UserError(
            f"{out} was not made by this command. Make it: cbdsl provision {out} --workers 8", code="missing-file"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Restore it.", code="damaged-file") from error
    refused = _revoked_serials(out)
    revoked = (name for name in issued if name in stored.revoked or not set(issued[name]) - refused)
    inner = stored.server_port or _next_port(stored.port)  # older folders have none
    return replace(stored, folder=out, workers=tuple(sorted(issued)), revoked=tuple(sorted(revoked)), server_port=inner)


@contextmanager
def _changing(out: Path) -> Iterator[tuple[ProvisionedSwarm, Authority]]:
    """Lock a folder, and yield its settings and authority."""
    read_settings(out)
    with _writing(out):
        folder = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            known, authority = read_settings(out), _authority(out)
            stored = read_json((out / "provision.json").read_text(encoding="utf-8"))
            _check_known(known, stored.get("revoked", ()))  # as earlier releases stored them
            for name in stored.get("revoked", ()):
                _revoke_serials(out, name, serials(_record(out, name).read_bytes()))
            if "revoked" in stored:
                _write_settings(out, known)
            yield known, authority
        finally:
            os.close(folder)


def _check_known(known: ProvisionedSwarm, workers: Sequence[str]) -> None:
    for name in workers:
        if name not in known.workers:
            raise UserError(
                f"There is no worker '{name}' in {known.folder}. Workers: {', '.join(known.workers) or 'none'}.",
                code="unknown-name",
            )


def _requested_keys(workers: Sequence[str], requests: Sequence[Path]) -> dict[str, RequestedKey]:
    """Read the public key of each worker's certificate signing request."""
    if not requests:
        return {}
    if len(requests) != len(workers):
        raise UserError(
            f"{len(requests)} signing requests are given for {len(workers)} workers. Give one for each, in order.",
            code="conflict",
        )
    return {name: read_request(path) for name, path in zip(workers, requests, strict=True)}


def _check_workers(workers: Sequence[str]) -> None:
    for name in workers:
        topics.check_name(name, "worker")
        if workers.count(name) > 1:
            raise UserError(f"The name '{name}' is given twice. Each worker needs its own.", code="conflict")


def _check_hosts(hosts: Sequence[str]) -> None:
    if not hosts:
        raise UserError("Give the broker's name or address with --host.", code="missing-value")
    for host in hosts:
        if is_name(host) and not _HOST.fullmatch(host):
            raise UserError(
                f"'{host}' is neither a host name nor an IP address. Give for example broker.local or 10.0.0.5.",
                code="invalid-name",
            )


def _check_model(numbers: int) -> None:
    if not 1 <= numbers <= _MOST_NUMBERS:
        raise UserError(
            f"The largest model can have 1 to {_MOST_NUMBERS:,} numbers; given {numbers:,}.", code="out-of-range"
        )


def _next_port(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _authority(out: Path) -> Authority:
    try:
        return Authority.load((out / "ca" / "ca.crt").read_bytes(), (out / "ca" / "ca.key").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The authority in {out / 'ca'} cannot be used ({error}). Restore its files.", code="damaged-file"
        ) from error


# --- files


def _record(out: Path, worker: str) -> Path:
    """Return the file with all certificates a worker ever had, which `revoke` needs."""
    return out / "ca" / "issued" / f"{worker}.crt"


def _revoked_serials(out: Path) -> set[int]:
    """Read the serial numbers of all certificates that were revoked; lines are only ever appended."""
    path = out / "ca" / "revoked.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return {int(line.split()[0], 16) for line in lines if line.strip()}
    except ValueError as error:
        raise UserError(
            f"{path} must have a serial number in each line ({error}). Restore it: it says whose keys are refused.",
            code="damaged-file",
        ) from error


def _revoke_serials(out: Path, name: str, numbers: Sequence[int]) -> None:
    known = _revoked_serials(out)
    new = [number for number in numbers if number not in known]
    if not new:
        return
    with (out / "ca" / "revoked.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{number:x} {name}\n" for number in new)
        file.flush()
        os.fsync(file.fileno())


def _write_revocations(out: Path, authority: Authority) -> None:
    """Write the revocation lists of all authorities; a broker refuses clients of an authority without one."""
    lists = [authority.revocation_list(sorted(_revoked_serials(out)))]
    staff = _staff_authority(out)
    if staff is not None:
        lists.append(staff.revocation_list([]))
    _write(out / "broker" / "crl.pem", b"".join(lists))


def _staff_authority(out: Path) -> Authority | None:
    """Read the authority of server, monitor and administrator; None in a folder of an earlier release."""
    if not (out / "ca" / "staff-ca.key").exists():
        return None
    return Authority.load((out / "ca" / "staff-ca.crt").read_bytes(), (out / "ca" / "staff-ca.key").read_bytes())


def _write_staff(folder: Path, known: ProvisionedSwarm, authority: Authority) -> None:
    """Write the certificates of broker, server, monitor and administrator; the last three have their own authority.

    The server's listener accepts no other authority, so workers are not admitted there.
    """
    organization = organization_of(known.swarm)
    staff = _staff_authority(folder) or Authority.new(organization)
    _write_pair(folder / "ca", "staff-ca", staff.pem())
    hosts = tuple(dict.fromkeys((*known.hosts, known.server_host, *LOCAL_HOSTS)))
    _write_pair(folder / "broker", "broker", authority.issue_broker(organization, hosts, known.days))
    _write(folder / "broker" / "ca.crt", authority.pem().certificate + staff.pem().certificate)
    _write(folder / "broker" / "staff-ca.crt", staff.pem().certificate)
    for home, stem, name in (("server", "server", SERVER_NAME), ("monitor", "monitor", MONITOR_NAME)):
        issued = staff.issue_client(organization, name, known.days)
        _write_member(folder / home, stem, issued, authority, _fill(f"{stem}-README.txt", known))
    admin = staff.issue_client(organization, ADMIN_NAME, known.days)
    _write_pair(folder / "ca", "admin", admin)


def _write_rules(folder: Path, known: ProvisionedSwarm) -> None:
    """Write the generated part of the broker's configuration, and the rules; keep an existing mosquitto.conf."""
    rights, broker = _rights_of(known), folder / "broker"
    inner = "staff-ca.crt" if (broker / "staff-ca.crt").exists() else "ca.crt"
    config = _fill(
        "cbdsl.conf",
        known,
        server_address=" 127.0.0.1" if known.server_host in LOCAL_HOSTS else "",
        server_connections=_SERVER_CONNECTIONS,
        server_authority=inner,
        access=_fill("plugin.conf" if known.plugin else "acl.conf", known),
        packet=MESSAGE_LIMIT,
        queue=QUEUE_LIMIT,
        mebibytes=f"{known.resident // 2**20:,}",
        open_files=f"{known.open_files:,}",
    )
    main = broker / "mosquitto.conf"
    if not main.exists() or f"include_dir {_INCLUDED}" not in main.read_text(encoding="utf-8"):
        if main.exists():  # of an earlier release: its owner may have edited it
            main.replace(broker / "mosquitto.conf.before")
        _write(main, _fill("mosquitto.conf", known))
    (broker / _INCLUDED).mkdir(mode=0o700, exist_ok=True)
    _write(broker / _INCLUDED / "cbdsl.conf", config)
    name, text = (
        ("dynamic-security.json", access_rules.write_plugin_state) if known.plugin else ("acl", access_rules.write_acl)
    )
    _write(broker / name, text(rights), mode=0o600)  # newer brokers warn if all users can read it


def _fill(template: str, known: ProvisionedSwarm, **more: object) -> str:
    """Fill a file of templates/ with the properties of a swarm and more values."""
    names = ("swarm", "port", "server_host", "server_port", "days", "url", "server_url", "plugin")
    limits = ("pieces", "connections", "queued", "memory")
    values = {name: getattr(known, name) for name in (*names, *limits)}
    values |= {"largest_model": f"{known.largest_model:,}", "host": known.hosts[0], "hosts": ", ".join(known.hosts)}
    text = (files("cbdsl.network") / "templates" / template).read_text(encoding="utf-8")
    return Template(text).substitute(values, **more)


def _write_worker(
    folder: Path, name: str, known: ProvisionedSwarm, authority: Authority, requested: RequestedKey | None = None
) -> None:
    # The record first: no certificate may exist that cannot be revoked.
    issued = authority.issue_client(organization_of(known.swarm), name, known.days, requested)
    record, home = _record(folder, name), folder / "workers" / name
    _write(record, (record.read_bytes() if record.exists() else b"") + issued.certificate)
    if requested is not None:
        (home / "worker.key").unlink(missing_ok=True)
    _write_member(home, "worker", issued, authority, _fill("worker-README.txt", known, name=name))


def _write_member(home: Path, stem: str, issued: IssuedCertificate, authority: Authority, readme: str) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(home, stem, issued)
    _write(home / IDENTITY, json.dumps(to_plain(identity_of(issued.certificate)), indent=2) + "\n")
    _write(home / "ca.crt", authority.pem().certificate)
    _write(home / "README.txt", readme)


def _read_roster(folder: Path) -> list[str]:
    """Read the roster's lines, which its owner may have edited."""
    path = folder / "server" / "roster.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _write_roster(folder: Path, lines: Sequence[str]) -> None:
    _write(folder / "server" / "roster.txt", "".join(f"{line}\n" for line in lines))


def _write_pair(folder: Path, stem: str, issued: IssuedCertificate) -> None:
    if issued.key:  # its owner may have made it
        _write(folder / f"{stem}.key", issued.key, mode=0o600)
    _write(folder / f"{stem}.crt", issued.certificate)


def _write_settings(folder: Path, known: ProvisionedSwarm) -> None:
    stored = {key: value for key, value in to_plain(known).items() if key not in {"folder", "workers", "revoked"}}
    _write(folder / "provision.json", json.dumps(stored, indent=2) + "\n")
    if (folder / "server").is_dir():
        _write(folder / "server" / LIMITS, json.dumps({"largest_model": known.largest_model}) + "\n")


def _write(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write atomically with final permissions.

    Keep owner and mode: otherwise mosquitto, running as another user, cannot reload its ACL and continues without one.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        if path.exists():
            before = path.stat()
            with suppress(PermissionError):  # only root may, and only root needs to
                os.fchown(stream.fileno(), before.st_uid, before.st_gid)
            os.fchmod(stream.fileno(), stat.S_IMODE(before.st_mode))
        stream.write(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written: {error.strerror}. Give another folder.", code="unwritable-file"
        ) from error


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `out` when everything is in it; `out` must not exist or be empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists, and keys are never overwritten. Give a new folder; for more workers in this one: "
            f"cbdsl provision {out} --add --names NAME",
            code="exists-already",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    beside.mkdir(mode=0o700)
    try:
        yield beside
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
