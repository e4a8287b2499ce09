"""A federation in this process: a Grid whose nodes are the app's own handlers, called on the way."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from cbdsl.flower import client, flower_messages

TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # what Flower's processes set for themselves

Handler = Callable[[Message, flower_messages.Context], Message | list[Message]]
HANDLERS: dict[str, Callable[[Message, flower_messages.Context], Message]] = {
    flower_messages.JOIN: client.join,
    flower_messages.ORDER: client.train,
    flower_messages.UPLOAD: client.upload,
    flower_messages.FINISH: client.finish,
}


@dataclass
class LocalNode:
    """A node: its configuration, and what it does instead of what the app does."""

    config: dict[str, Any]
    instead: dict[str, Handler] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    down: bool = False

    def answer(self, message: Message, node: int) -> list[Message]:
        kind = message.metadata.message_type
        self.heard.append(kind)
        context = SimpleNamespace(node_config=self.config, run_config={})
        replies = self.instead.get(kind, HANDLERS[kind])(message, context)
        replies = replies if isinstance(replies, list) else [replies]
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = node
        return replies


class LocalGrid:
    """Flower's Grid, as far as a server uses it."""

    def __init__(self, nodes: dict[int, LocalNode]) -> None:
        self.nodes = nodes
        self._waiting: dict[str, Message] = {}
        self._again: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if not node.down]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self._waiting[message.metadata.message_id] = message
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies, self._again = self._again, []
        for key in message_ids:
            message = self._waiting.get(key)
            number = message.metadata.dst_node_id if message else 0
            node = self.nodes.get(number)
            if message is None or node is None or node.down:
                continue
            del self._waiting[key]
            first, *more = node.answer(message, number) or [None]
            replies += [first] if first is not None else []
            self._again += more
        return replies


def federation(workers: int, state: Path, **config: object) -> LocalGrid:
    """A node for every worker."""
    return LocalGrid(
        {
            100 + worker: LocalNode(
                {"partition-id": worker, "num-partitions": workers, "state-path": str(state), **config}
            )
            for worker in range(workers)
        }
    )


def context_of(out: Path, **wishes: object) -> SimpleNamespace:
    """A run's configuration, as Flower hands it over."""
    config = {key.replace("_", "-"): value for key, value in wishes.items()}
    return SimpleNamespace(node_config={}, run_config={"runs": str(out.parent), "out": out.name, **config})
