"""The broker's access rules for the members of a swarm: as an `acl` file, as the state of mosquitto's dynamic-security
plugin, and as commands that change the rules of a running broker.

An `acl` file restricts what clients receive and publish, but not their subscriptions, so a member can fill the broker's
memory with subscriptions. The plugin restricts all three, and accepts new rules without a restart.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError
from cbdsl.network import topics
from cbdsl.network.mqtt import Address
from cbdsl.network.tls import ADMIN_NAME, MONITOR_NAME, SERVER_NAME, broker_user, make_context, organization_of

PLUGIN = "mosquitto_dynamic_security.so"
BYTES_PER_RULE = 512
"""Of the broker's memory, for one rule of the plugin."""

_PLUGIN_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib")
_CONTROL = "$CONTROL/dynamic-security/v1"
_RESPONSE = f"{_CONTROL}/response"
_SECONDS, _CONNECT_SECONDS = 60.0, 5.0  # for an answer: the plugin writes its whole file after every command
_COMMAND_BYTES = 90_000  # of one message of commands
_DENIED = dict.fromkeys(("publishClientSend", "publishClientReceive", "subscribe"), False) | {"unsubscribe": True}


@dataclass(frozen=True)
class MemberRights:
    """The rights of one client. Filters and topics may have wildcards."""

    user: str  # the whole name in its certificate
    subscribes: tuple[str, ...]  # filters
    receives: tuple[str, ...]
    publishes: tuple[str, ...]
    trusted: bool = False  # whether it may subscribe to anything below its filters; otherwise to these filters alone


def rights_of(swarm: str, workers: Iterable[str], pieces: int) -> list[MemberRights]:
    """Return the rights of server, monitor, administrator and workers. pieces: of the largest model."""
    root = topics.root(swarm)
    everything, status = (f"{root}/#",), topics.from_worker(swarm, "+", "status")
    staff = [
        MemberRights(broker_user(swarm, SERVER_NAME), everything, everything, everything, trusted=True),
        MemberRights(broker_user(swarm, MONITOR_NAME), ("$SYS/#", status), ("$SYS/#", status), (), trusted=True),
        MemberRights(broker_user(swarm, ADMIN_NAME), (_RESPONSE,), (_RESPONSE,), (_CONTROL,)),
    ]
    shared = tuple(f"{root}/down/{what}" for what in topics.DOWN_ALL)
    kinds = ("hello", "claim", "status", *(f"upload/{number}" for number in range(pieces)))
    return [*staff, *(_worker_rights(swarm, name, shared, kinds) for name in workers)]


def _worker_rights(swarm: str, name: str, shared: tuple[str, ...], kinds: Iterable[str]) -> MemberRights:
    own, sent = topics.to_worker(swarm, name, "#"), tuple(topics.from_worker(swarm, name, kind) for kind in kinds)
    return MemberRights(broker_user(swarm, name), (*shared, topics.down(swarm), own), (*shared, own), sent)


def write_acl(rights: Iterable[MemberRights]) -> str:
    """Return the lines of an `acl` file."""
    blocks = []
    for one in rights:
        both = [topic for topic in one.receives if topic in one.publishes]
        lines = [f"user {one.user}", *(f"topic readwrite {topic}" for topic in both)]
        lines += [f"topic read {topic}" for topic in one.receives if topic not in both]
        lines += [f"topic write {topic}" for topic in one.publishes if topic not in both]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def write_plugin_state(rights: Sequence[MemberRights]) -> str:
    """Return the content of the dynamic-security plugin's file."""
    state = {
        "defaultACLAccess": _DENIED,
        "clients": [{"username": one.user, "roles": [{"rolename": one.user, "priority": -1}]} for one in rights],
        "groups": [],
        "roles": [{"rolename": one.user, "acls": _rules(one)} for one in rights],
    }
    return json.dumps(state, indent=1) + "\n"


def _rules(rights: MemberRights) -> list[dict[str, Any]]:
    filters = "subscribePattern" if rights.trusted else "subscribeLiteral"
    kinds = (
        (filters, rights.subscribes),
        ("publishClientReceive", rights.receives),
        ("publishClientSend", rights.publishes),
    )
    return [
        {"acltype": kind, "topic": topic, "priority": 0, "allow": True} for kind, chosen in kinds for topic in chosen
    ]


def find_plugin() -> Path | None:
    """Return the plugin's file on this machine, or None."""
    folders = (Path(folder) for folder in _PLUGIN_FOLDERS)
    found = (
        path for folder in folders if folder.is_dir() for path in (*folder.glob(PLUGIN), *folder.glob(f"*/{PLUGIN}"))
    )
    return next(found, None)


# --- a running broker


class RulesError(UserError):
    """The rules of a running broker could not be changed."""


def apply_rules(
    admin: Address, swarm: str, rights: Sequence[MemberRights], rewrite: bool = False, kick: Sequence[str] = ()
) -> int:
    """Update the rules of a running broker to those of a swarm's members; return the number of changes.

    admin: the broker's address, and the administrator's certificate. Rules of other swarms stay.
    rewrite: also replace the rules of members that the broker has already. kick: users to disconnect.
    Raises RulesError.
    """
    with _Connection(admin) as broker:
        known = {word: _names(broker, word) for word in ("Client", "Role")}
        kick = [user for user in kick if user in known["Client"]]
        wanted = {one.user: one for one in rights}
        ours = f",O={organization_of(swarm)}"
        gone = [
            {"command": f"delete{word}", key: name}
            for word, key in (("Client", "username"), ("Role", "rolename"))
            for name in sorted(known[word] - set(wanted))
            if name.endswith(ours)
        ]
        known["Client"] -= set(kick)
        gone += [{"command": "deleteClient", "username": user} for user in kick]
        made = [
            {"command": "modifyRole" if user in known["Role"] else "createRole", "rolename": user, "acls": _rules(one)}
            for user, one in wanted.items()
            if rewrite or user not in known["Role"]
        ]
        made += [
            {"command": "createClient", "username": user, "roles": [{"rolename": user, "priority": -1}]}
            for user in wanted
            if user not in known["Client"]
        ]
        for batch in _batches([*gone, *made]):
            broker.send(batch)
        return len(gone) + len(made)


def _names(broker: _Connection, word: str) -> set[str]:
    """Return the names of all clients or roles, read in pages because the size of a response is limited."""
    names: set[str] = set()
    while True:
        command = {"command": f"list{word}s", "verbose": False, "count": 500, "offset": len(names)}
        data = broker.send([command])[0].get("data", {})
        page = [str(name) for name in data.get(f"{word.lower()}s", [])]
        names.update(page)
        if not page or len(names) >= int(data.get("totalCount", 0)):
            return names


def _batches(commands: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for command in commands:
        length = len(json.dumps(command))
        if batch and size + length > _COMMAND_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(command)
        size += length
    if batch:
        yield batch


class _Connection:
    """Sends commands to the plugin and waits for its responses."""

    def __init__(self, admin: Address) -> None:
        self._admin, self._heard = admin, queue.Queue[bytes | None]()
        self._client = admin.make_client()
        self._client.tls_set_context(make_context(admin))
        self._client.connect_timeout = _CONNECT_SECONDS
        self._client.on_connect = lambda client, *_: client.subscribe(_RESPONSE, 1)
        self._client.on_subscribe = lambda *_: self._heard.put(None)
        self._client.on_message = lambda _client, _data, message: self._heard.put(bytes(message.payload))

    def __enter__(self) -> _Connection:
        try:
            self._client.connect(self._admin.host, self._admin.port)
        except OSError as error:
            raise self._failed(str(error)) from error
        self._client.loop_start()
        try:
            self._next()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def send(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the responses to some commands; raise RulesError for the first that failed."""
        self._client.publish(_CONTROL, json.dumps({"commands": commands}), qos=1)
        responses: list[dict[str, Any]] = []
        while len(responses) < len(commands):
            responses += json.loads(self._next() or b"{}").get("responses", [])
        for response in responses:
            if "error" in response:
                raise self._failed(f"{response.get('command')}: {response['error']}")
        return responses

    def _next(self) -> bytes | None:
        try:
            return self._heard.get(timeout=_SECONDS)
        except queue.Empty:
            raise self._failed(f"no answer within {_SECONDS:.0f} s") from None

    def _failed(self, why: str) -> RulesError:
        return RulesError(f"The broker at {self._admin} does not take the rules ({why}).", code="connection-failed")
