"""What the server leaves on the broker for everybody: the announcement, the shared samples, the order, w^g.

It remembers all that is retained there, to say it again when the broker has forgotten it. Knows no link: what is put up
is handed to whoever has one. It decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cbdsl.arrays import Floats
from cbdsl.codecs.travel import Codecs, longest_update
from cbdsl.deploy import topics, wire
from cbdsl.deploy.wire import Announcement, OrderMessage
from cbdsl.protocol.releases import keyframe_before
from cbdsl.workers.local import KEPT_VERSIONS

_LEFT_BEHIND = 40  # pieces that an earlier run's model may have: 1,000,000 numbers, as many as brokers allow for


class Notices:
    """All that is retained below `down/`."""

    def __init__(
        self, swarm: str, announcement: Announcement, shared: bytes, codecs: Codecs, say: Callable[[str, bytes], None]
    ) -> None:
        """codecs: how models travel. say: hands a topic and what is to be retained there to the broker, if it is up."""
        self._swarm, self._run, self._codecs, self._say = swarm, announcement.run, codecs, say
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()  # until it is said: what another thread says meanwhile must not come before it
        numbers = announcement.size * announcement.vectors
        pieces = range(wire.piece_count(longest_update(codecs, numbers)) if codecs.down.relative else 0)
        slots = [topics.update(swarm, slot, piece) for slot in range(KEPT_VERSIONS) for piece in pieces]
        wholes = [topics.model(swarm, piece) for piece in range(_LEFT_BEHIND)]
        self._changing = (topics.order(swarm), *slots, *wholes)  # where an earlier process may have left something
        self.model, self.version, self._whole = (
            wire.NO_DIGEST,
            0,
            0,
        )  # w^g: its digest, its version; the last one put up whole
        self.digests: dict[int, bytes] = {}  # of the last versions of w^g
        self._put(topics.spec(swarm), wire.encode(announcement))
        for piece in wire.pieces(self._run, 0, shared) if shared else ():
            self._put(topics.shared(swarm, piece.index), wire.encode(piece))

    def say_again(self) -> None:
        """Say all that is retained, for the broker may have forgotten it.

        And clear what an earlier process left there that is not so any more, such as the order of a later round. The
        announcement comes last: whoever hears it may fetch the rest.
        """
        announcement = topics.spec(self._swarm)
        with self._lock:
            known = {*self._changing, *self._retained}
        for topic in sorted(known, key=lambda one: (one == announcement, one)):
            with self._lock:
                self._say(topic, self._retained.get(topic, b""))

    def order(self, order_message: OrderMessage) -> None:
        """Give an order."""
        self._put(topics.order(self._swarm), wire.encode(order_message))

    def order_again(self) -> None:
        """Who has answered answers again, which costs a message; who was not reached is."""
        topic = topics.order(self._swarm)
        with self._lock:
            self._say(topic, self._retained[topic])

    def recall(self, version: int, references: Sequence[Floats]) -> None:
        """The last versions of w^g, (D,) each and the present one last: by them a worker's state is recognised."""
        for age, reference in enumerate(reversed(references)):
            self.digests[version - age] = wire.digest_of(wire.weights_to_bytes(reference))

    def set_model(self, model: Floats, version: int, updates: Sequence[bytes], keyframe: Floats | None = None) -> None:
        """Put w^g (V D,) where every worker can fetch it: what leads to it, and now and then the whole.

        keyframe: the last version that was put up whole, after a restart.
        """
        content = wire.weights_to_bytes(model)
        self.model = wire.digest_of(content)
        self.digests = {one: digest for one, digest in self.digests.items() if one > version - KEPT_VERSIONS}
        self.digests[version] = self.model
        first = version + 1 - len(updates)
        for number, update in enumerate(updates, first):
            if number > self.version:
                for piece in wire.pieces(self._run, number, update):
                    slot = topics.update(self._swarm, number % KEPT_VERSIONS, piece.index)
                    self._put(slot, wire.encode(piece))
        whole = keyframe_before(version) if self._codecs.down.relative else version
        if whole > self.version or (whole and keyframe is not None):
            self._put_whole(whole, wire.weights_to_bytes(model if whole == version or keyframe is None else keyframe))
        self.version = version

    def set_last_model(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        """Put up the w^g (V D,) that a run came to, as in `set_model` and whole: for those who are away now."""
        self.set_model(model, version, updates)
        if self._whole < version:
            self._put_whole(version, wire.weights_to_bytes(model))

    def clear(self) -> None:
        """Leave announcement, order and w^g until the next run, and nothing else."""
        stays = (topics.spec(self._swarm), topics.order(self._swarm), topics.model(self._swarm, ""))
        with self._lock:
            done = [topic for topic in self._retained if not topic.startswith(stays)]
            for topic in done:
                del self._retained[topic]
                self._say(topic, b"")

    def bytes_left(self) -> int:
        """How much is retained, as far as it is known here."""
        with self._lock:
            return sum(map(len, self._retained.values()))

    def _put_whole(self, version: int, content: bytes) -> None:
        for piece in wire.pieces(self._run, version, content):
            self._put(topics.model(self._swarm, piece.index), wire.encode(piece))
        self._whole = version

    def _put(self, topic: str, payload: bytes) -> None:
        with self._lock:
            self._retained[topic] = payload
            self._say(topic, payload)
