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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cbdsl.deploy import topics
from cbdsl.deploy.broker import MESSAGE_LIMIT, QUEUE_LIMIT
from cbdsl.deploy.certificates import AUTHORITY_DAYS, Authority, Issued, is_name, serials
from cbdsl.errors import UserError

DAYS = 825
PORT = 8883
SERVER_NAME, MONITOR_NAME = "parameter.server", "swarm.monitor"
"""Common names that no worker can have, for their dots."""

_ALSO_LOCAL = ("localhost", "127.0.0.1", "::1")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_MAY_WRITE = ("hello", "claim", "upload/+", "status")
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

    @property
    def url(self) -> str:
        """Where server and workers find the broker."""
        host = self.hosts[0]
        return f"mqtts://{f'[{host}]' if ':' in host else host}:{self.port}"


def provision(
    out: Path, workers: Sequence[str], swarm: str, hosts: Sequence[str], days: int = DAYS, port: int = PORT
) -> Provisioned:
    """Make a new folder: an authority, and certificates for a broker, a parameter server and these workers."""
    topics.check_name(swarm, "swarm")
    _check_workers(workers)
    _check_hosts(hosts)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"Certificates can last 1 to {AUTHORITY_DAYS} days; given {days}.")
    if not 1 <= port <= 65535:
        raise UserError(f"A port is a number from 1 to 65535; given {port}.")
    made = Provisioned(out, swarm, tuple(dict.fromkeys(hosts)), port, days, tuple(workers))
    with _writing(out), _all_or_nothing(out) as folder:
        authority = Authority.new(f"cbdsl {swarm}")
        (folder / "ca" / "issued").mkdir(parents=True)
        _write_pair(folder / "ca", "ca", authority.pem())
        (folder / "broker" / "data").mkdir(parents=True)
        _write_broker(folder, made, authority)
        _write(folder / "broker" / "mosquitto.conf", _broker_config(made))
        _write(folder / "broker" / "acl", _access_rules(made))
        _write(folder / "broker" / "crl.pem", authority.revocation_list([]))
        _write_server(folder, made, authority)
        _write(folder / "server" / "roster.txt", _roster(workers))
        _write_monitor(folder, made, authority)
        for name in workers:
            _write_worker(folder, name, made, authority)
        _write(folder / "README.txt", _readme(made))
        _write_settings(folder, made)
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            path.chmod(0o700)
    return made


def add_workers(out: Path, workers: Sequence[str]) -> Provisioned:
    """Certificates for further workers by the same authority. The broker need not be told."""
    known, authority = read(out), _authority(out)
    _check_workers(workers)
    for name in workers:
        if name in known.workers:
            raise UserError(
                f"The worker '{name}' has its certificate, and keys are never overwritten. Give another name, or "
                f"new keys to everybody: cbdsl provision {out} --renew"
            )
    roster = out / "server" / "roster.txt"
    with _writing(out):
        for name in workers:
            _write_worker(out, name, known, authority)
        _write(roster, (roster.read_text(encoding="utf-8") if roster.exists() else "") + _roster(workers))
    return replace(known, workers=(*known.workers, *workers))


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
        _write(out / "broker" / "acl", _access_rules(now))
    return now


def renew(out: Path) -> Provisioned:
    """New keys and certificates for everybody who is not revoked; the old ones are good until they expire."""
    known, authority = read(out), _authority(out)
    with _writing(out):
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
    hosts = tuple(dict.fromkeys((*known.hosts, *_ALSO_LOCAL)))
    _write_pair(folder / "broker", "broker", authority.issue_broker(f"cbdsl {known.swarm}", hosts, known.days))
    _write(folder / "broker" / "ca.crt", authority.pem().certificate)


def _write_server(folder: Path, known: Provisioned, authority: Authority) -> None:
    issued = authority.issue_client(f"cbdsl {known.swarm}", SERVER_NAME, known.days)
    _write_member(folder / "server", "server", issued, authority, _server_readme(known))


def _write_monitor(folder: Path, known: Provisioned, authority: Authority) -> None:
    issued = authority.issue_client(f"cbdsl {known.swarm}", MONITOR_NAME, known.days)
    _write_member(folder / "monitor", "monitor", issued, authority, _monitor_readme(known))


def _write_worker(folder: Path, name: str, known: Provisioned, authority: Authority) -> None:
    """The record first: a certificate that nobody can revoke must not exist."""
    issued, record = authority.issue_client(f"cbdsl {known.swarm}", name, known.days), _record(folder, name)
    _write(record, (record.read_bytes() if record.exists() else b"") + issued.certificate)
    _write_member(folder / "workers" / name, "worker", issued, authority, _worker_readme(known, name))


def _write_member(home: Path, stem: str, issued: Issued, authority: Authority, readme: str) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(home, stem, issued)
    _write(home / "ca.crt", authority.pem().certificate)
    _write(home / "README.txt", readme)


def _roster(workers: Sequence[str]) -> str:
    return "".join(f"{name}\n" for name in workers)


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
    }
    _write(folder / "provision.json", (json.dumps(stored, indent=2) + "\n").encode())


def _write(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write whole or not at all, readable from the first moment by nobody but those who may."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
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


# What is in the files -------------------------------------------------------------------------------------------------


def _access_rules(known: Provisioned) -> str:
    """The broker's rules; %u is the name in the certificate."""
    root = topics.root(known.swarm)
    writes = "\n".join(f"pattern write {topics.from_worker(known.swarm, '%u', what)}" for what in _MAY_WRITE)
    reads = "\n".join(f"pattern read {root}/{what}" for what in _MAY_READ)
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
# Every worker: it writes as itself, reads what is for all and what is for it. %u is the name in its certificate.
{writes}
pattern read {topics.to_worker(known.swarm, "%u", "#")}
{reads}
"""


def _broker_config(known: Provisioned) -> str:
    return f"""\
# mosquitto 2 for the swarm '{known.swarm}'. All paths are relative: start it in the folder of this file,
#     cd broker && mosquitto -c mosquitto.conf
# or let systemd do so with WorkingDirectory= (docs/deploy.md). The folder can be copied to any machine as it is.
# mosquitto started as root becomes the user 'mosquitto', who then must own the folder: chown -R mosquitto: broker

# Workers, server and monitor; raise the limit for a larger swarm, and the number of open files with it.
listener {known.port}
max_connections 1000

# TLS 1.2 or later; whoever has no certificate of this swarm's authority, or a revoked one, does not get in.
cafile ca.crt
certfile broker.crt
keyfile broker.key
crlfile crl.pem
tls_version tlsv1.2
require_certificate true
allow_anonymous false

# The name in the certificate is the user name, whatever the client says; acl says what a name may do. It is the client
# id too: one certificate has one connection, and no member can throw another one out by borrowing its client id.
use_identity_as_username true
use_username_as_clientid true
acl_file acl

# No message of a swarm is larger than 100 KiB. Over the first limit it is not passed on; over the second the sender is
# cut off before its packet is stored.
message_size_limit {MESSAGE_LIMIT}
max_packet_size {MESSAGE_LIMIT + 16 * 1024}

# For each client: what is under way, and what waits. A worker that joins is sent the model and the shared samples at
# once, so both must fit here: raise the limits if they are larger together.
max_inflight_messages 20
max_queued_messages 2000
max_queued_bytes {QUEUE_LIMIT}
persistent_client_expiration 1d

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


def _readme(known: Provisioned) -> str:
    return f"""\
Certificates and broker rules of the swarm '{known.swarm}', made by `cbdsl provision`.

ca/        The authority. Who has ca.key can make members. Keep this folder off the network, and keep a copy.
broker/    To the machine of the broker ({", ".join(known.hosts)}). Start it there:
               cd broker && mosquitto -c mosquitto.conf
server/    To the machine of the parameter server. README.txt in it has the command.
monitor/   For whoever watches the broker. README.txt in it has the command.
workers/   One folder for each device. README.txt in it has the command. Delete it here once it is there.

More workers:        cbdsl provision DIR --add --names NAME,NAME
Shut a worker out:   cbdsl provision DIR --revoke NAME
    then copy broker/crl.pem and broker/acl to the broker and restart it.
Before {known.days} days are over:
                     cbdsl provision DIR --renew
    then copy the folders out again and restart broker, server and workers.
"""


def _server_readme(known: Provisioned) -> str:
    return f"""\
The parameter server of the swarm '{known.swarm}'. In this folder:

    cbdsl serve SPEC --broker {known.url} --swarm {known.swarm} --roster roster.txt \\
        --ca ca.crt --cert server.crt --key server.key --out RUN

SPEC is a preset or a TOML file; RUN is the folder of the run, and the same command goes on with it after a stop.
roster.txt has the workers that may take part, one a line. A run keeps its roster: change it for the next run only.
server.key is secret: whoever has it can command every worker.
"""


def _monitor_readme(known: Provisioned) -> str:
    host = known.hosts[0]
    return f"""\
For whoever watches the broker of the swarm '{known.swarm}'. In this folder:

    mosquitto_sub -h {host} -p {known.port} --cafile ca.crt --cert monitor.crt --key monitor.key -v -t '$SYS/#'

It reads the broker's statistics and which workers are there, and nothing else. Watch with it, not with the server's
certificate: a certificate has one connection at a time, and the newer one ends the older.
"""


def _worker_readme(known: Provisioned, name: str) -> str:
    return f"""\
The worker '{name}' of the swarm '{known.swarm}'. Copy this folder to its device; in it:

    cbdsl work --id {name} --broker {known.url} --swarm {known.swarm} \\
        --ca ca.crt --cert worker.crt --key worker.key --data DATA --state STATE

DATA is an .npz with features and labels, or a folder of IDX files; it never leaves the device. STATE is a folder in
which the worker keeps what it learned; with the same one it goes on after a stop.
worker.key is secret: whoever has it can speak as '{name}', until somebody revokes it.
"""
