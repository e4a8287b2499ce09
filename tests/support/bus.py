"""A broker in memory: delivers at once, in the thread of whoever publishes. Retains, forgets, breaks off."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cbdsl.network.mqtt import LastWill


def matches(pattern: str, topic: str) -> bool:
    wanted, given = pattern.split("/"), topic.split("/")
    for position, word in enumerate(wanted):
        if word == "#":
            return True
        if position >= len(given) or word not in {"+", given[position]}:
            return False
    return len(wanted) == len(given)


class Bus:
    def __init__(self) -> None:
        self.retained: dict[str, bytes] = {}
        self.links: list[BusLink] = []
        self.sent: list[tuple[str, bytes]] = []
        self.lock = threading.RLock()
        self.lose: Callable[[str], bool] = lambda topic: False  # noqa: ARG005
        self.copies = 1

    def link(
        self, on_message: Callable[[str, bytes], None], on_up: Callable[[], None], will: LastWill | None = None
    ) -> BusLink:
        return BusLink(self, on_message, on_up, will)

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        with self.lock:
            self.sent.append((topic, payload))
            if retain and payload:
                self.retained[topic] = payload
            elif retain:
                self.retained.pop(topic, None)
            listeners = [link for link in self.links if any(matches(one, topic) for one in link.patterns)]
        if not self.lose(topic):
            for _ in range(self.copies):
                for link in listeners:
                    link.on_message(topic, payload)


class BusLink:
    def __init__(
        self, bus: Bus, on_message: Callable[[str, bytes], None], on_up: Callable[[], None], will: LastWill | None
    ) -> None:
        self.bus, self.on_message, self.on_up, self.will = bus, on_message, on_up, will
        self.patterns: list[str] = []
        self._up = False

    def open(self) -> None:
        with self.bus.lock:
            self.bus.links.append(self)
        self._up = True
        for pattern in list(self.patterns):
            self._recall(pattern)
        self.on_up()

    def is_up(self) -> bool:
        return self._up

    def settled(self, seconds: float) -> bool:
        del seconds
        return True

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.bus.publish(topic, payload, retain)

    def subscribe(self, *patterns: str) -> None:
        for pattern in patterns:
            self.patterns.append(pattern)
            if self._up:
                self._recall(pattern)

    def unsubscribe(self, *patterns: str) -> None:
        self.patterns = [pattern for pattern in self.patterns if pattern not in patterns]

    def close(self) -> None:
        self._up = False
        with self.bus.lock:
            self.bus.links = [link for link in self.bus.links if link is not self]

    def vanish(self) -> None:
        """The process dies: the broker speaks its last will."""
        self.close()
        if self.will is not None:
            self.bus.publish(self.will.topic, self.will.payload, retain=True)

    def _recall(self, pattern: str) -> None:
        for topic, payload in list(self.bus.retained.items()):
            if matches(pattern, topic):
                self.on_message(topic, payload)
