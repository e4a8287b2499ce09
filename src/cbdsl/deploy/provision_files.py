"""What stands in the files that `provision` writes: the broker's configuration and rules, and a page for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbdsl.deploy import topics
from cbdsl.deploy.broker import MESSAGE_LIMIT, QUEUE_LIMIT
from cbdsl.deploy.identity import MONITOR_NAME, SERVER_NAME
from cbdsl.deploy.wire import piece_count

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
