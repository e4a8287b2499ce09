"""Questions on their way and replies to them, over a Grid: each counts once, and only from the node that was asked.

Knows nothing of what is said. A reply that Flower itself cannot read harms nobody but its sender.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbdsl.flower import letters
from cbdsl.flower.letters import Grid, Letter
from cbdsl.protocol.messages import WorkerId
from cbdsl.text import one_line

if TYPE_CHECKING:
    from flwr.app import Message

_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines


@dataclass(frozen=True, eq=False)
class Question:
    """A message to a node."""

    node: int
    worker: WorkerId | None  # none: it is asked to join
    said: Letter
    kind: str
    round: int
    seconds: float  # for which it is worth anything


class Post:
    """What was asked and is not answered yet."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, Question] = {}  # by the message's id
        self._singly = False  # whether replies are fetched one by one

    def send(self, questions: Sequence[Question]) -> None:
        """Ask."""
        if questions:
            messages = [letters.message(one.said, one.node, one.kind, one.round, one.seconds) for one in questions]
            self._grid.push_messages(messages)  # an id of its own each, also for one that could not be sent
            self._open |= {message.metadata.message_id: one for message, one in zip(messages, questions, strict=True)}

    def keep(self, wanted: Callable[[Question], bool]) -> None:
        """Listen to no answers but those to these questions."""
        self._open = {key: one for key, one in self._open.items() if wanted(one)}

    def replies(self) -> list[tuple[Question, Message | None]]:
        """Answers that have come; none: one that cannot be read."""
        found: list[tuple[Question, Message | None]] = []
        for key, reply in self._pull():
            question = self._open.get(key)
            if question is None:
                continue  # it was answered before
            if reply is not None and not reply.has_error() and reply.metadata.src_node_id != question.node:
                _log.warning("another node answers for node %d; nobody listens", question.node)
                continue
            del self._open[key]
            found.append((question, reply))
        return found

    def _pull(self) -> list[tuple[str, Message | None]]:
        """Replies by the id of what they reply to.

        One that cannot be read costs Flower all those that it fetched with it. So everybody is asked again, which
        nodes answer as before, and from then on each reply is fetched by itself.
        """
        if not self._open:
            return []
        if not self._singly:
            try:
                replies = list(self._grid.pull_messages(list(self._open)))
                return [(reply.metadata.reply_to_message_id, reply) for reply in replies]
            except Exception as error:  # whatever the readers of Flower raise
                _log.warning("a reply cannot be read (%s); everybody is asked again", one_line(repr(error)))
            self._singly, questions, self._open = True, list(self._open.values()), {}
            self.send(questions)
        return [(key, reply) for key, question in self._open.items() for reply in self._pull_one(key, question)]

    def _pull_one(self, key: str, question: Question) -> Sequence[Message | None]:
        try:
            return list(self._grid.pull_messages([key]))
        except Exception as error:  # see above
            _log.warning("the reply of node %d cannot be read (%s)", question.node, one_line(repr(error)))
            return [None]
