"""`cbdsl provision`: keys, certificates, broker configuration and READMEs for the machines of a swarm.

The texts of the files stand at the end.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.broker import MESSAGE_LIMIT, QUEUE_LIMIT
from cbdsl.network.certificates import AUTHORITY_DAYS, Authority, IssuedCertificate, is_name, serials
from cbdsl.network.tls import MONITOR_NAME, SERVER_NAME, organization_of
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
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class ProvisionedSwarm:
    """The settings of a folder of certificates, and the broker's limits that follow from them."""

    swarm: str
    hosts: Annotated[tuple[str, ...], Bounds(1, 1000)]  # of the broker; the first one is in the command lines
    port: int
    days: int  # validity of a certificate
    revoked: tuple[str, ...] = ()
    server_host: str = "localhost"  # where server and monitor reach the broker
    server_port: int = 0  # of their own listener
    largest_model: int = LARGEST_MODEL  # numbers in it
    folder: Path = Path()
    workers: tuple[str, ...] = ()  # all that ever had a certificate

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
        return 2 * QUEUE_LIMIT + models + self.connections * _CONNECTION_BYTES

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
) -> ProvisionedSwarm:
    """Create a folder with an authority and certificates for a broker, a parameter server, a monitor and the workers.

    server_host, server_port: where server and monitor reach the broker; default: localhost and the port after `port`.
    largest_model: limit for the numbers in a model that workers upload.
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
        folder=out,
        workers=tuple(workers),
    )
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
        _write(folder / "README.txt", README.format(known=made, hosts=", ".join(made.hosts)))
        _write_settings(folder, made)
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            path.chmod(0o700)
    return made


def add_workers(out: Path, workers: Sequence[str]) -> ProvisionedSwarm:
    """Issue certificates for further workers, and raise the broker's limits."""
    known, authority = read_settings(out), _authority(out)
    _check_workers(workers)
    listed = _read_roster(out)
    for name in workers:  # one with a record that is not listed was taken from the roster, or never added
        if name in known.workers and (name in known.revoked or name in [line.strip() for line in listed]):
            raise UserError(
                f"The worker '{name}' has its certificate, and keys are never overwritten. Give another name, or "
                f"renew all keys: cbdsl provision {out} --renew",
                code="exists-already",
            )
    now = replace(known, workers=tuple(dict.fromkeys((*known.workers, *workers))))
    with _writing(out):
        for name in workers:
            if name not in known.workers or not (out / "workers" / name / "README.txt").exists():
                _write_worker(out, name, known, authority)
        _write_rules(out, now)
        _write_settings(out, now)
        _write_roster(out, [*listed, *workers])  # last: a worker on the roster is complete
    return now


def allow_models(out: Path, numbers: int) -> ProvisionedSwarm:
    """Set the limit for the numbers in a model that workers upload."""
    _check_model(numbers)
    now = replace(read_settings(out), largest_model=numbers)
    with _writing(out):
        _write_settings(out, now)
        _write_rules(out, now)
    return now


def revoke(out: Path, workers: Sequence[str]) -> ProvisionedSwarm:
    """Exclude workers for good: revoke their certificates, and deny them all topics."""
    known, authority = read_settings(out), _authority(out)
    for name in workers:
        if name not in known.workers:
            raise UserError(
                f"There is no worker '{name}' in {out}. There are: {', '.join(known.workers) or 'none'}.",
                code="unknown-name",
            )
    now = replace(known, revoked=tuple(sorted({*known.revoked, *workers})))
    with _writing(out):
        _write_settings(out, now)
        refused = [serial for name in now.revoked for serial in serials(_record(out, name).read_bytes())]
        _write(out / "broker" / "crl.pem", authority.revocation_list(refused))
        _write_rules(out, now)
        if (out / "server" / "roster.txt").exists():
            _write_roster(out, [line for line in _read_roster(out) if line.strip() not in now.revoked])
    return now


def renew(out: Path) -> ProvisionedSwarm:
    """Issue new keys and certificates to all that are not revoked; the old ones stay valid until they expire."""
    known, authority = read_settings(out), _authority(out)
    with _writing(out):
        _write_rules(out, known)
        _write_settings(out, known)
        _write_broker(out, known, authority)
        _write_server(out, known, authority)
        _write_monitor(out, known, authority)
        for name in known.members:
            _write_worker(out, name, known, authority)
    return known


def read_settings(out: Path) -> ProvisionedSwarm:
    """Read the settings of a folder."""
    path = out / "provision.json"
    try:
        stored = from_plain(ProvisionedSwarm, read_json(path.read_text(encoding="utf-8")), defaults=True)
        topics.check_name(stored.swarm, "swarm")
    except FileNotFoundError as error:
        raise UserError(
            f"{out} was not made by this command. Make it: cbdsl provision {out} --workers 8", code="missing-file"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Restore it.", code="damaged-file") from error
    workers = sorted(record.stem for record in (out / "ca" / "issued").glob("*.crt"))
    inner = stored.server_port or _next_port(stored.port)  # older folders have none
    return replace(stored, folder=out, workers=tuple(workers), server_port=inner)


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


def _write_broker(folder: Path, known: ProvisionedSwarm, authority: Authority) -> None:
    hosts = tuple(dict.fromkeys((*known.hosts, known.server_host, *LOCAL_HOSTS)))
    _write_pair(folder / "broker", "broker", authority.issue_broker(organization_of(known.swarm), hosts, known.days))
    _write(folder / "broker" / "ca.crt", authority.pem().certificate)


def _write_rules(folder: Path, known: ProvisionedSwarm) -> None:
    config = BROKER_CONFIG.format(
        known=known,
        tls=_LISTENER_TLS,
        server_address=" 127.0.0.1" if known.server_host in LOCAL_HOSTS else "",
        server_connections=_SERVER_CONNECTIONS,
        packet=MESSAGE_LIMIT,
        queue=QUEUE_LIMIT,
        mebibytes=known.resident // 2**20,
    )
    _write(folder / "broker" / "mosquitto.conf", config)
    _write(folder / "broker" / "acl", _access_rules(known), mode=0o600)  # newer brokers warn if all users can read it


def _access_rules(known: ProvisionedSwarm) -> str:
    root = topics.root(known.swarm)
    may_write = ("hello", "claim", "status", *(f"upload/{number}" for number in range(known.pieces)))
    reads = "\n".join(f"topic read {root}/down/{what}" for what in topics.DOWN_ALL)
    return ACCESS_RULES.format(
        known=known, root=root, server=SERVER_NAME, monitor=MONITOR_NAME,
        from_monitor=topics.from_worker(known.swarm, MONITOR_NAME, "#"),
        status=topics.from_worker(known.swarm, "+", "status"),
        refused="\n".join(f"user {name}\ntopic deny {root}/#\n" for name in known.revoked),
        members="\n".join(f"user {name}\n{reads}\n" for name in known.members),
        to_itself=topics.to_worker(known.swarm, "%u", "#"),
        writes="\n".join(f"pattern write {topics.from_worker(known.swarm, '%u', what)}" for what in may_write),
    )  # fmt: skip


def _write_server(folder: Path, known: ProvisionedSwarm, authority: Authority) -> None:
    issued = authority.issue_client(organization_of(known.swarm), SERVER_NAME, known.days)
    _write_member(folder / "server", "server", issued, authority, SERVER_README.format(known=known))


def _write_monitor(folder: Path, known: ProvisionedSwarm, authority: Authority) -> None:
    issued = authority.issue_client(organization_of(known.swarm), MONITOR_NAME, known.days)
    _write_member(folder / "monitor", "monitor", issued, authority, MONITOR_README.format(known=known))


def _write_worker(folder: Path, name: str, known: ProvisionedSwarm, authority: Authority) -> None:
    # The record first: no certificate may exist that cannot be revoked.
    issued, record = authority.issue_client(organization_of(known.swarm), name, known.days), _record(folder, name)
    _write(record, (record.read_bytes() if record.exists() else b"") + issued.certificate)
    _write_member(folder / "workers" / name, "worker", issued, authority, WORKER_README.format(known=known, name=name))


def _write_member(home: Path, stem: str, issued: IssuedCertificate, authority: Authority, readme: str) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(home, stem, issued)
    _write(home / "ca.crt", authority.pem().certificate)
    _write(home / "README.txt", readme)


def _read_roster(folder: Path) -> list[str]:
    """Read the roster's lines, which its owner may have edited."""
    path = folder / "server" / "roster.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _write_roster(folder: Path, lines: Sequence[str]) -> None:
    _write(folder / "server" / "roster.txt", "".join(f"{line}\n" for line in lines))


def _write_pair(folder: Path, stem: str, issued: IssuedCertificate) -> None:
    _write(folder / f"{stem}.key", issued.key, mode=0o600)
    _write(folder / f"{stem}.crt", issued.certificate)


def _write_settings(folder: Path, known: ProvisionedSwarm) -> None:
    stored = {key: value for key, value in to_plain(known).items() if key not in {"folder", "workers"}}
    _write(folder / "provision.json", json.dumps(stored, indent=2) + "\n")


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


# --- texts

ACCESS_RULES = """\
# Who may publish (write) and receive (read) what. Everything else is refused.
# mosquitto reads this file again on SIGHUP: systemctl reload, or kill -HUP.

user {server}
topic readwrite {root}/#

# The monitor. The denied topics would be granted by the patterns below, which apply to every name.
user {monitor}
topic deny {root}/down/#
topic deny {from_monitor}
topic read $SYS/#
topic read {status}

# Revoked workers: these lines silence a connection that is still open; crl.pem refuses the next one.
{refused}
# The workers.
{members}
# Each member reads and writes its own topics. %u is the name in its certificate.
pattern read {to_itself}

# A model of {known.largest_model:,} numbers is uploaded in {known.pieces} pieces; larger ones are dropped.
# cbdsl provision DIR --largest-model NUMBERS allows them.
{writes}
"""

_LISTENER_TLS = """\
max_qos 1
# TLS 1.2 or later, with a certificate of this swarm's authority that is not revoked.
cafile ca.crt
certfile broker.crt
keyfile broker.key
crlfile crl.pem
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
use_username_as_clientid true
"""

BROKER_CONFIG = """\
# mosquitto 2 for the swarm '{known.swarm}'. Paths are relative: start it in the folder of this file,
#     cd broker && mosquitto -c mosquitto.conf
# or by systemd with WorkingDirectory= (docs/deploy.md). If root starts it, it runs as the user mosquitto, who must own
# the folder: chown -R mosquitto: broker

# The limits follow from the number of workers; `cbdsl provision --add` writes them again. The broker needs
# {known.open_files:,} open files (LimitNOFILE= in its unit, or ulimit -n).

# The listener for workers: two connections per worker, because a lost one counts until the broker notices, and room for
# clients that have not shown a certificate yet.
listener {known.port}
max_connections {known.connections}
{tls}
# The listener for server and monitor: clients that crowd the other one cannot keep them out. If other machines can
# reach it, let a firewall admit those two alone (docs/deploy.md).
listener {known.server_port}{server_address}
max_connections {server_connections}
{tls}
# The name in the certificate is both user name and client id. So the acl applies to it, a certificate has one
# connection, and no member can end another one's connection.
acl_file acl
allow_anonymous false

# Messages have at most 100 KiB. A client that sends a larger packet is disconnected.
max_packet_size {packet}

# Per client. A worker that joins is sent the model and the shared samples at once: both together must fit.
max_inflight_messages 100
max_queued_messages {known.queued}
max_queued_bytes {queue}
persistent_client_expiration 1h

# For all clients. Above it a message is dropped and its sender disconnected. TLS comes on top: MemoryMax= must allow
# {mebibytes:,} MiB.
memory_limit {known.memory}

# Retained messages survive a restart. After a crash the parameter server sends again what is missing.
persistence true
persistence_location data/
autosave_interval 60

set_tcp_nodelay true
sys_interval 10
log_dest stderr
log_type error
log_type warning
log_type notice
log_type information
"""

README = """\
Certificates and broker configuration of the swarm '{known.swarm}', written by `cbdsl provision`.

ca/        The authority. ca.key can create members: keep this folder offline, and keep a backup.
broker/    For the broker's machine ({hosts}). Start it there:
               cd broker && mosquitto -c mosquitto.conf
           (If root starts it, it runs as the user mosquitto, who must own the folder: chown -R mosquitto: broker)
server/    For the parameter server. README.txt in it has the command.
monitor/   For monitoring the broker. README.txt in it has the command.
workers/   One folder per device. README.txt in it has the command. Delete it here once it is on its device.

Add workers:         cbdsl provision DIR --add --names NAME,NAME
    then copy broker/acl and broker/mosquitto.conf to the broker and restart it.
Exclude a worker:    cbdsl provision DIR --revoke NAME
    then copy broker/crl.pem and broker/acl to the broker and restart it.
Allow larger models: cbdsl provision DIR --largest-model NUMBERS
    then copy broker/mosquitto.conf and broker/acl to the broker and restart it.
Renew certificates:  cbdsl provision DIR --renew
    within {known.days} days; then copy the folders again and restart broker, server and workers.
"""

SERVER_README = """\
The parameter server of the swarm '{known.swarm}'. In this folder:

    cbdsl serve SPEC --broker {known.server_url} --swarm {known.swarm} --roster roster.txt \\
        --ca ca.crt --cert server.crt --key server.key --out RUN

SPEC is a preset or a TOML file. RUN is the run's folder; the same command resumes it after a stop.
roster.txt names the workers that may take part, one per line. The server reads it again before each round.
server.key is secret: it can command every worker.

Port {known.server_port} of the broker is for server and monitor. Port {known.port} accepts this certificate too, but
may be crowded by other clients. Models of more than {known.largest_model:,} numbers do not pass the broker; to allow
them: cbdsl provision DIR --largest-model NUMBERS
"""

MONITOR_README = """\
Monitoring the broker of the swarm '{known.swarm}'. In this folder:

    mosquitto_sub -h {known.server_host} -p {known.server_port} \\
        --cafile ca.crt --cert monitor.crt --key monitor.key -v -t '$SYS/#'

From other machines: -h {known.hosts[0]} -p {known.port}. This certificate may read the broker's statistics and which
workers are connected, nothing else. Do not use the server's certificate instead: each has one connection at a time.
"""

WORKER_README = """\
The worker '{name}' of the swarm '{known.swarm}'. Copy this folder to its device; in it:

    cbdsl work --id {name} --broker {known.url} --swarm {known.swarm} \\
        --ca ca.crt --cert worker.crt --key worker.key --data DATA --state STATE

DATA is an .npz with features and labels, or a folder of IDX files; it never leaves the device. STATE is a folder for
the worker's state, with which it resumes after a stop.
worker.key is secret: with it anyone can act as '{name}' until it is revoked.
"""
