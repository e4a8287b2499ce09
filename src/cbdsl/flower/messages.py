"""What server and nodes write into Flower's messages: a few plain values, and large things as bytes.

The forms are those of `deploy.wire`, checked field by field. Nothing here reads an array's own format, and nothing is
unpickled: whatever a stranger sends is either what is expected or nothing.
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
        "cbdsl"
    ) from error

JOIN, ORDER, UPLOAD, FINISH = "query.join", "train", "query", "query.finish"
_RECORD = "cbdsl"
_LONGEST_TEXT = 40_000  # letters; of a spec

_M = TypeVar("_M", bound=wire.Message)


class Grid(Protocol):
    """What a server needs of Flower's Grid."""

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are there."""
        ...

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """Send messages on their way."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        """The replies to these messages that have come so far."""
        ...


class Context(Protocol):
    """What is needed of Flower's Context."""

    node_config: Mapping[str, Any]
    run_config: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class FlowerMessage:
    """What a message says."""

    values: Mapping[str, Any] = field(default_factory=dict)  # plain ones
    large: Mapping[str, bytes] = field(default_factory=dict)

    def form(self, kind: type[_M]) -> _M:
        """The form of this kind in it; WireError if there is none."""
        content = self.values.get(kind.__name__)
        if type(content) is not bytes:
            raise WireError(f"no {kind.__name__}")
        return wire.decode(content, kind)

    def text(self, key: str) -> str:
        """A text in it; empty if there is none, or one that is far too long."""
        value = self.values.get(key, "")
        return value if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""

    def number(self, key: str, default: int) -> int:
        """A whole number in it."""
        value = self.values.get(key, default)
        return value if type(value) is int else default


def make_flower_message(
    forms: Sequence[wire.Message] = (), large: Mapping[str, bytes] | None = None, **values: object
) -> FlowerMessage:
    """A letter with these forms, values and large things."""
    return FlowerMessage({**{type(form).__name__: wire.encode(form) for form in forms}, **values}, large or {})


def _content(written: FlowerMessage) -> RecordDict:
    arrays = {key: Array("uint8", (len(content),), "bytes", content) for key, content in written.large.items()}
    return RecordDict({_RECORD: ConfigRecord(dict(written.values)), f"{_RECORD}-large": ArrayRecord(arrays)})


def message(written: FlowerMessage, node: int, kind: str, round_number: int, seconds: float) -> Message:
    """A message to a node; it and its reply are worth nothing after so many seconds."""
    return Message(_content(written), node, kind, ttl=max(1.0, seconds), group_id=str(round_number))


def reply(written: FlowerMessage, to: Message) -> Message:
    """The reply to a message."""
    return Message(_content(written), reply_to=to)


def read(content: object) -> FlowerMessage:
    """What a message's content says; what is not of the expected type is left out."""
    records = content if isinstance(content, RecordDict) else {}
    values, arrays = records.get(_RECORD), records.get(f"{_RECORD}-large")
    large = dict(arrays.items()) if isinstance(arrays, ArrayRecord) else {}
    return FlowerMessage(
        dict(values.items()) if isinstance(values, ConfigRecord) else {},
        {key: array.data for key, array in large.items() if isinstance(array.data, bytes)},
    )
