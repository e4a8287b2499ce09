"""What stands in the files that `provision` writes: the broker's configuration and rules, and a page for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbdsl.deploy import topics
from cbdsl.deploy.broker import MESSAGE_LIMIT, QUEUE_LIMIT

SERVER_NAME, MONITOR_NAME = "parameter.server", "swarm.monitor"
"""Common names that no worker can have, for their dots."""

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


def access_rules(known: Provisioned) -> str:
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


def broker_config(known: Provisioned) -> str:
    """The configuration of mosquitto."""
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


def readme(known: Provisioned) -> str:
    """What is in the folder, and how to go on."""
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


def server_readme(known: Provisioned) -> str:
    """How to start the server."""
    return f"""\
The parameter server of the swarm '{known.swarm}'. In this folder:

    cbdsl serve SPEC --broker {known.url} --swarm {known.swarm} --roster roster.txt \\
        --ca ca.crt --cert server.crt --key server.key --out RUN

SPEC is a preset or a TOML file; RUN is the folder of the run, and the same command goes on with it after a stop.
roster.txt has the workers that may take part, one a line. A run keeps its roster: change it for the next run only.
server.key is secret: whoever has it can command every worker.
"""


def monitor_readme(known: Provisioned) -> str:
    """How to watch the broker."""
    host = known.hosts[0]
    return f"""\
For whoever watches the broker of the swarm '{known.swarm}'. In this folder:

    mosquitto_sub -h {host} -p {known.port} --cafile ca.crt --cert monitor.crt --key monitor.key -v -t '$SYS/#'

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
