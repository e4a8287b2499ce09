"""What stands in the files that `provision` writes: the broker's configuration and rules, and a page for everybody."""

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

from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.broker import MESSAGE_LIMIT, QUEUE_LIMIT
from cbdsl.network.certificates import AUTHORITY_DAYS, Authority, IssuedCertificate, is_name, serials
from cbdsl.network.tls import MONITOR_NAME, SERVER_NAME, organization_of
from cbdsl.network.wire import piece_count

LARGEST_MODEL = 1_000_000
"""Numbers in the largest model that workers may upload, unless more is asked for."""

_SERVER_CONNECTIONS = 32  # server and monitor, what they leave behind when they reconnect, and room
_ROOM = 100  # connections beyond the workers' own: strangers count until the broker knows them for strangers
_OTHER_FILES = 64  # that a broker has open beside its connections
_QUEUED = 2000  # messages that may wait for one client, beyond those that come with the roster
_PROGRAM_BYTES = 32 * 2**20
_TLS_BYTES = 100 * 1024  # resident for each connection, not counted by the broker
_CONNECTION_BYTES = 64 * 1024  # of the broker's memory limit, for each connection

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_MAY_WRITE = ("hello", "claim", "status")
_MAY_READ = tuple(f"down/{what}" for what in topics.DOWN_ALL)


@dataclass(frozen=True)
class Provisioned:
    """What a folder of certificates is for."""

    folder: Path
    swarm: str
    hosts: tuple[str, ...]  # of the broker; the first one stands in the command lines
    port: int
    days: int  # that a certificate lasts
    workers: tuple[str, ...]  # all that ever had a certificate
    revoked: tuple[str, ...] = ()
    server_host: str = "localhost"  # where server and monitor find the broker
    server_port: int = 0  # of their own listener
    largest_model: int = LARGEST_MODEL  # numbers in it

    @property
    def url(self) -> str:
        """Where workers find the broker."""
        return _url(self.hosts[0], self.port)

    @property
    def server_url(self) -> str:
        """Where the server finds the broker."""
        return _url(self.server_host, self.server_port)

    @property
    def pieces(self) -> int:
        """Into how many pieces the largest model is cut."""
        return piece_count(4 * self.largest_model)

    @property
    def connections(self) -> int:
        """For workers: each with the connection it lost and the broker has not missed yet, and room for strangers."""
        return 2 * (len(self.workers) - len(self.revoked)) + _ROOM

    @property
    def open_files(self) -> int:
        """How many files the broker must be allowed to open."""
        return self.connections + _SERVER_CONNECTIONS + _OTHER_FILES

    @property
    def queued(self) -> int:
        """Messages that may wait for one client: all workers may speak to the server at once, some in pieces."""
        return _QUEUED + 4 * len(self.workers) + 2 * self.pieces

    @property
    def memory(self) -> int:
        """Bytes of messages, topics and clients that the broker may hold; what TLS takes comes on top."""
        models = 8 * self.pieces * MESSAGE_LIMIT  # retained ones, and those on their way to somebody slow
        return 2 * QUEUE_LIMIT + models + self.connections * _CONNECTION_BYTES

    @property
    def resident(self) -> int:
        """Bytes of memory that the broker takes at most, all in all."""
        return _PROGRAM_BYTES + self.memory + self.connections * _TLS_BYTES


def _url(host: str, port: int) -> str:
    return f"mqtts://{f'[{host}]' if ':' in host else host}:{port}"


def access_rules(known: Provisioned) -> str:
    """The broker's rules; %u is the name in the certificate."""
    root = topics.root(known.swarm)
    may_write = (*_MAY_WRITE, *(f"upload/{number}" for number in range(known.pieces)))
    writes = "\n".join(f"pattern write {topics.from_worker(known.swarm, '%u', what)}" for what in may_write)
    reads = "\n".join(f"topic read {root}/{what}" for what in _MAY_READ)
    members = "\n".join(f"user {name}\n{reads}\n" for name in known.workers if name not in known.revoked)
    refused = "\n".join(f"user {name}\ntopic deny {root}/#\n" for name in known.revoked)
    return f"""\
# Who may publish (write) and receive (read) what. Everything that is not listed is refused.
# mosquitto reads this file anew on SIGHUP: systemctl reload, or kill -HUP.

# The parameter server.
user {SERVER_NAME}
topic readwrite {root}/#

# Whoever watches. What is refused here would be granted below, where every name has its rights.
user {MONITOR_NAME}
topic deny {root}/down/#
topic deny {topics.from_worker(known.swarm, MONITOR_NAME, "#")}
topic read $SYS/#
topic read {topics.from_worker(known.swarm, "+", "status")}

# Revoked workers: these lines silence a connection that is still open; crl.pem refuses the next one.
{refused}
# The workers, by name: they read what is for all of them.
{members}
# Everybody writes as itself and reads what is for it. %u is the name in its certificate.
pattern read {topics.to_worker(known.swarm, "%u", "#")}

# A model of {known.largest_model:,} numbers is uploaded in {known.pieces} pieces, and a worker can leave as many on the
# broker and no more. Larger models do not arrive: cbdsl provision DIR --largest-model NUMBERS allows them.
{writes}
"""


def broker_config(known: Provisioned) -> str:
    """The configuration of mosquitto."""
    members = len(known.workers) - len(known.revoked)
    return f"""\
# mosquitto 2 for the swarm '{known.swarm}'. All paths are relative: start it in the folder of this file,
#     cd broker && mosquitto -c mosquitto.conf
# or let systemd do so with WorkingDirectory= (docs/deploy.md). The folder can be copied to any machine as it is.
# mosquitto started as root becomes the user 'mosquitto', who then must own the folder: chown -R mosquitto: broker

# The limits below follow from {members:,} workers; `cbdsl provision --add` writes them anew, and the broker reads them
# when it starts. It needs {known.open_files:,} open files (LimitNOFILE= in its unit, or ulimit -n).

# The workers' door. Two connections for each, since one that broke is counted until it is missed, and room for
# strangers, who are counted until they fail to show a certificate or have said nothing for 90 seconds.
listener {known.port}
max_connections {known.connections}
{_door()}
# A door of their own for parameter server and monitor: nobody who crowds the other one keeps them out.
{_server_listener(known)}
max_connections {_SERVER_CONNECTIONS}
{_door()}
# The name in the certificate is the user name, whatever the client says; acl says what a name may do. It is the client
# id too: one certificate has one connection, and no member can throw another one out by borrowing its client id.
acl_file acl
allow_anonymous false

# No message of a swarm is larger than 100 KiB. Who sends a larger one is cut off before it is stored.
max_packet_size {MESSAGE_LIMIT}

# For each client: what is under way, and what waits. A worker that joins is sent the model and the shared samples at
# once, so both must fit here: raise the limits if they are larger together.
max_inflight_messages 100
max_queued_messages {known.queued}
max_queued_bytes {QUEUE_LIMIT}
persistent_client_expiration 1h

# For all clients together: over this limit a message is dropped and its sender cut off. What TLS takes comes on top:
# with every connection in use MemoryMax= must allow {known.resident // 2**20:,} MiB.
memory_limit {known.memory}

# Retained messages outlive a restart. After a crash the parameter server sends again what is missing.
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


def _server_listener(known: Provisioned) -> str:
    if known.server_host in LOCAL_HOSTS:
        return f"listener {known.server_port} 127.0.0.1"
    return (
        "# Other machines reach it: let the firewall keep out all but those two (docs/deploy.md).\n"
        f"listener {known.server_port}"
    )


def _door_of(known: Provisioned) -> str:
    where = f"Port {known.server_port} is the broker's door for server and monitor"
    return f"{where}; only the broker's own machine reaches it." if known.server_host in LOCAL_HOSTS else f"{where}."


def _door() -> str:
    """What holds for each listener."""
    return """\
max_qos 1
# TLS 1.2 or later; whoever has no certificate of this swarm's authority, or a revoked one, does not get in.
cafile ca.crt
certfile broker.crt
keyfile broker.key
crlfile crl.pem
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
use_username_as_clientid true
"""


def readme(known: Provisioned) -> str:
    """What is in the folder, and how to go on."""
    return f"""\
Certificates and broker rules of the swarm '{known.swarm}', made by `cbdsl provision`.

ca/        The authority. Who has ca.key can make members. Keep this folder off the network, and keep a copy.
broker/    To the machine of the broker ({", ".join(known.hosts)}). Start it there:
               cd broker && mosquitto -c mosquitto.conf
           (As root it becomes the user mosquitto, who must be able to read it all: chown -R mosquitto: broker)
server/    To the machine of the parameter server. README.txt in it has the command.
monitor/   For whoever watches the broker. README.txt in it has the command.
workers/   One folder for each device. README.txt in it has the command. Delete it here once it is there.

More workers:        cbdsl provision DIR --add --names NAME,NAME
    then copy broker/acl and broker/mosquitto.conf to the broker and restart it: until then they hear nothing.
Shut a worker out:   cbdsl provision DIR --revoke NAME
    then copy broker/crl.pem and broker/acl to the broker and restart it.
Larger models:       cbdsl provision DIR --largest-model NUMBERS
    then copy broker/mosquitto.conf and broker/acl to the broker and restart it.
Before {known.days} days are over:
                     cbdsl provision DIR --renew
    then copy the folders out again and restart broker, server and workers.
"""


def server_readme(known: Provisioned) -> str:
    """How to start the server."""
    return f"""\
The parameter server of the swarm '{known.swarm}'. In this folder:

    cbdsl serve SPEC --broker {known.server_url} --swarm {known.swarm} --roster roster.txt \\
        --ca ca.crt --cert server.crt --key server.key --out RUN

SPEC is a preset or a TOML file; RUN is the folder of the run, and the same command goes on with it after a stop.
roster.txt has the workers that may take part, one a line. It may change while a run is played: the server reads it
again before the next round, lets new names in and those go that are gone.
server.key is secret: whoever has it can command every worker.

{_door_of(known)}
The workers' door, {known.url}, takes this certificate too, but whoever crowds it keeps the server out.

The broker's rules let models of up to {known.largest_model:,} numbers through. The pieces of a larger one are
dropped there, and every worker that is invited counts as silent. To allow more:
    cbdsl provision DIR --largest-model NUMBERS
"""


def monitor_readme(known: Provisioned) -> str:
    """How to watch the broker."""
    return f"""\
For whoever watches the broker of the swarm '{known.swarm}'. In this folder:

    mosquitto_sub -h {known.server_host} -p {known.server_port} \\
        --cafile ca.crt --cert monitor.crt --key monitor.key -v -t '$SYS/#'

{_door_of(known)}
From elsewhere: -h {known.hosts[0]} -p {known.port}, the workers' door.

It reads the broker's statistics and which workers are there, and nothing else. Watch with it, not with the server's
certificate: a certificate has one connection at a time, and the newer one ends the older.
"""


def worker_readme(known: Provisioned, name: str) -> str:
    """How to start a worker."""
    return f"""\
The worker '{name}' of the swarm '{known.swarm}'. Copy this folder to its device; in it:

    cbdsl work --id {name} --broker {known.url} --swarm {known.swarm} \\
        --ca ca.crt --cert worker.crt --key worker.key --data DATA --state STATE

DATA is an .npz with features and labels, or a folder of IDX files; it never leaves the device. STATE is a folder in
which the worker keeps what it learned; with the same one it goes on after a stop.
worker.key is secret: whoever has it can speak as '{name}', until somebody revokes it.
"""


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


def _write_member(home: Path, stem: str, issued: IssuedCertificate, authority: Authority, readme: str) -> None:
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


def _write_pair(folder: Path, stem: str, issued: IssuedCertificate) -> None:
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
