"""Where messages go: the topics of a swarm. Access rules are built from these and from nothing else.

    cbdsl/<swarm>/down/...           server to all workers, retained: spec, order, model/<n>, update/<n>,
                                     shared/<n>
    cbdsl/<swarm>/to/<worker>/...    server to one worker: welcome, invitation, start/<n>
    cbdsl/<swarm>/from/<worker>/...  one worker to the server: hello, claim, upload/<n>, status (retained, last will)

Who a message comes from is read from its topic alone, so a broker that guards topics guards identities.
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
    """The name, if it can stand in a topic."""
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot be the name of a {what}. Use 1 to 64 letters, digits, '-' and '_'.")
    return name


def root(swarm: str) -> str:
    """What every topic of a swarm starts with."""
    return f"cbdsl/{swarm}"


def spec(swarm: str) -> str:
    """What is run: server to all, retained."""
    return f"{root(swarm)}/down/spec"


def order(swarm: str) -> str:
    """The round that is being played: server to all, retained."""
    return f"{root(swarm)}/down/order"


def model(swarm: str, number: int | str) -> str:
    """A piece of w^g: server to all, retained."""
    return f"{root(swarm)}/down/model/{number}"


def update(swarm: str, slot: int | str, number: int | str = "") -> str:
    """A piece of what leads from one w^g to the next: server to all, retained in a few slots; `+` to subscribe."""
    return f"{root(swarm)}/down/update/{slot}" + (f".{number}" if slot != "+" else "")


def shared(swarm: str, number: int | str) -> str:
    """A piece of the shared samples: server to all, retained."""
    return f"{root(swarm)}/down/shared/{number}"


def down(swarm: str) -> str:
    """Everything from the server to all workers, as a subscription."""
    return f"{root(swarm)}/down/#"


def to_worker(swarm: str, worker: str, what: str) -> str:
    """From the server to one worker: `welcome`, `invitation`, `start/<n>`, or `#` to subscribe to all of it."""
    return f"{root(swarm)}/to/{worker}/{what}"


def from_worker(swarm: str, worker: str, what: str) -> str:
    """From one worker to the server: `hello`, `claim`, `upload/<n>`, `status`."""
    return f"{root(swarm)}/from/{worker}/{what}"


def from_all(swarm: str) -> str:
    """Everything from all workers to the server, as a subscription."""
    return f"{root(swarm)}/from/+/#"


def may_be_retained(topic: str) -> bool:
    """Whether the broker may keep the last message of a topic: of all that workers say, `status` alone."""
    words = topic.split("/")
    return len(words) < 5 or words[2] != "from" or words[4] == "status"


@dataclass(frozen=True)
class MessageOrigin:
    """What a topic says of a message from a worker."""

    worker: str
    kind: str  # hello, claim, upload, status
    number: int  # of a piece of an upload; 0 for the other kinds


def parse_origin(swarm: str, topic: str) -> MessageOrigin | None:
    """Read the topic of a message to the server; none if it is no topic of this swarm's workers."""
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
    """The kind of a message, for the ledger: the first word behind the address."""
    words = topic.split("/")
    start = 3 if len(words) > 2 and words[2] == "down" else 4
    return words[start] if len(words) > start else "other"
