"""Content of the Flower app's messages: plain values, and large content as bytes.

The forms are those of `network.wire`, checked field by field. No array format is parsed and nothing is unpickled:
unexpected content is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cbdsl.errors import UserError
from cbdsl.network import wire
from cbdsl.network.wire import WireError

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError as error:
    raise UserError(
        f"flwr is needed here, because this is the part of cbdsl that talks to Flower; it is not installed ({error}). "
        "It pins another Ray than cbdsl's own, so give it an environment of its own: pip install 'flwr[simulation]' "
        "cbdsl",
        code="missing-package",
    ) from error

JOIN, ORDER, UPLOAD, FINISH = "query.join", "train", "query", "query.finish"
_RECORD = "cbdsl"
_LONGEST_TEXT = 40_000  # characters; of a spec

_M = TypeVar("_M", bound=wire.Message)


class Grid(Protocol):
    """The part of Flower's Grid that a server uses."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""
        ...

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """Send messages."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        """Return the replies to these messages that have come so far."""
        ...


class Context(Protocol):
    """The part of Flower's Context that is used."""

    node_config: Mapping[str, Any]
    run_config: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class FlowerMessage:
    """The content of a message."""

    values: Mapping[str, Any] = field(default_factory=dict)  # plain values
    large: Mapping[str, bytes] = field(default_factory=dict)

    def form(self, kind: type[_M]) -> _M:
        """Return the form of this kind; WireError if there is none."""
        content = self.values.get(kind.__name__)
        if type(content) is not bytes:
            raise WireError(f"no {kind.__name__}")
        return wire.decode(content, kind)

    def text(self, key: str) -> str:
        """Return a text; empty if there is none, or one that is far too long."""
        value = self.values.get(key, "")
        return value if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""

    def number(self, key: str, default: int) -> int:
        """Return a whole number."""
        value = self.values.get(key, default)
        return value if type(value) is int else default


def make_flower_message(
    forms: Sequence[wire.Message] = (), large: Mapping[str, bytes] | None = None, **values: object
) -> FlowerMessage:
    """Build the content of a message."""
    return FlowerMessage({**{type(form).__name__: wire.encode(form) for form in forms}, **values}, large or {})


def _write(content: FlowerMessage) -> RecordDict:
    arrays = {key: Array("uint8", (len(value),), "bytes", value) for key, value in content.large.items()}
    return RecordDict({_RECORD: ConfigRecord(dict(content.values)), f"{_RECORD}-large": ArrayRecord(arrays)})


def make_request(content: FlowerMessage, node: int, kind: str, round_number: int, seconds: float) -> Message:
    """Build a message to a node; it and its reply expire after `seconds`."""
    return Message(_write(content), node, kind, ttl=max(1.0, seconds), group_id=str(round_number))


def make_reply(content: FlowerMessage, to: Message) -> Message:
    """Build the reply to a message."""
    return Message(_write(content), reply_to=to)


def read(content: object) -> FlowerMessage:
    """Return the content of a message; anything that is not of the expected type is left out."""
    records = content if isinstance(content, RecordDict) else {}
    values, arrays = records.get(_RECORD), records.get(f"{_RECORD}-large")
    large = dict(arrays.items()) if isinstance(arrays, ArrayRecord) else {}
    return FlowerMessage(
        dict(values.items()) if isinstance(values, ConfigRecord) else {},
        {key: array.data for key, array in large.items() if isinstance(array.data, bytes)},
    )
