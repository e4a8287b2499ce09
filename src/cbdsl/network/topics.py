"""The topics of a swarm. Access rules are built from these and from nothing else.

    cbdsl/<swarm>/down/...           server to all workers, retained: spec, order, model/<n>, update/<n>,
                                     shared/<n>
    cbdsl/<swarm>/to/<worker>/...    server to one worker: welcome, invitation, start/<n>
    cbdsl/<swarm>/from/<worker>/...  one worker to the server: hello, claim, upload/<n>, status (retained, last will)

The sender of a message is read from its topic alone, so a broker that guards topics guards identities.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cbdsl.errors import UserError

NAME_PATTERN = "[A-Za-z0-9_-]{1,64}"
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile("0|[1-9][0-9]{0,5}")
_INBOUND = {"hello": False, "claim": False, "upload": True, "status": False}  # kind -> whether a number follows

DOWN_ALL = ("spec", "order", "model/+", "update/+", "shared/+")
"""What a worker may read below `down/`."""


def check_name(name: str, what: str) -> str:
    """Return the name; raise UserError if it cannot be part of a topic."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"'{name}' cannot be the name of a {what}. Use 1 to 64 letters, digits, '-' and '_'.", code="invalid-name"
        )
    return name


def root(swarm: str) -> str:
    """Return what every topic of a swarm starts with."""
    return f"cbdsl/{swarm}"


def spec(swarm: str) -> str:
    """Return the topic of the announcement: server to all, retained."""
    return f"{root(swarm)}/down/spec"


def order(swarm: str) -> str:
    """Return the topic of the current order: server to all, retained."""
    return f"{root(swarm)}/down/order"


def model(swarm: str, number: int | str) -> str:
    """Return the topic of a piece of w^g: server to all, retained."""
    return f"{root(swarm)}/down/model/{number}"


def update(swarm: str, slot: int | str, number: int | str = "") -> str:
    """Return the topic of a piece of an update of w^g: server to all, retained in a few slots; `+` to subscribe."""
    return f"{root(swarm)}/down/update/{slot}" + (f".{number}" if slot != "+" else "")


def shared(swarm: str, number: int | str) -> str:
    """Return the topic of a piece of the shared samples: server to all, retained."""
    return f"{root(swarm)}/down/shared/{number}"


def down(swarm: str) -> str:
    """Return the subscription to everything from the server to all workers."""
    return f"{root(swarm)}/down/#"


def to_worker(swarm: str, worker: str, what: str) -> str:
    """Return a topic from the server to one worker: `welcome`, `invitation`, `start/<n>`, or `#`."""
    return f"{root(swarm)}/to/{worker}/{what}"


def from_worker(swarm: str, worker: str, what: str) -> str:
    """Return a topic from one worker to the server: `hello`, `claim`, `upload/<n>`, `status`, or `#`."""
    return f"{root(swarm)}/from/{worker}/{what}"


def from_all(swarm: str) -> str:
    """Return the subscription to everything from all workers to the server."""
    return f"{root(swarm)}/from/+/#"


def may_be_retained(topic: str) -> bool:
    """Return whether a message of a topic may be retained: of what workers send, `status` alone."""
    words = topic.split("/")
    return len(words) < 5 or words[2] != "from" or words[4] == "status"


@dataclass(frozen=True)
class MessageOrigin:
    """The sender and the kind of a message, as its topic tells."""

    worker: str
    kind: str  # hello, claim, upload, status
    number: int  # of a piece of an upload; 0 for the other kinds


def parse_origin(swarm: str, topic: str) -> MessageOrigin | None:
    """Read the topic of a message to the server; return None if it is not a topic of this swarm's workers."""
    prefix = f"{root(swarm)}/from/"
    if not topic.startswith(prefix):
        return None
    worker, _, rest = topic[len(prefix) :].partition("/")
    kind, separator, number = rest.partition("/")
    if not _NAME.fullmatch(worker) or _INBOUND.get(kind) is not bool(separator):
        return None
    if separator and not _NUMBER.fullmatch(number):
        return None
    return MessageOrigin(worker, kind, int(number or 0))


def kind_of(topic: str) -> str:
    """Return the kind of a message, for counting: the first word behind the address."""
    words = topic.split("/")
    start = 3 if len(words) > 2 and words[2] == "down" else 4
    return words[start] if len(words) > start else "other"
