"""The embedded broker: amqtt in its own process, on loopback, for a swarm on one machine; one password, no TLS."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import sys
from typing import Any

from amqtt.broker import Broker  # type: ignore[import-untyped]

from cbdsl.network.broker import LOOPBACK, MESSAGE_LIMIT, PASSWORD_VARIABLE, USERNAME

_SESSION_SECONDS = 3600
_WATCH_SECONDS = 1.0


class EmbeddedBroker(Broker):  # type: ignore[misc]
    """amqtt's broker with a size limit, and without what would lose messages when many clients connect at once."""

    def __init__(self, port: int, password: str = "") -> None:
        """password: of `USERNAME`; anybody may connect if it is empty."""
        super().__init__(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"{LOOPBACK}:{port}"}},
                "session_expiry_interval": _SESSION_SECONDS,
                "plugins": {},
            }
        )
        self._deliveries: set[asyncio.Task[None]] = set()
        self._password = password

    async def _authenticate(self, session: Any, *_: object) -> bool:  # noqa: ANN401
        """Accept clients with the password. No session is marked anonymous, so durable ones last."""
        if not self._password:
            return True
        given = str(session.password or "")
        return session.username == USERNAME and hmac.compare_digest(given.encode(), self._password.encode())

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:  # noqa: ANN401
        """Send retained messages, to subscribers alone, without waiting for them.

        amqtt sends every client that connects what is retained for any client's subscription, and waits for the
        acknowledgements inside a loop over all subscriptions, which fails when another client subscribes meanwhile.
        """
        if all(subscriber is not session for subscriber, _ in self._subscriptions.get(subscription[0], [])):
            return
        delivery = asyncio.create_task(super()._publish_retained_messages_for_subscription(subscription, session))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def _delete_session(self, client_id: str) -> None:
        """End the connection of a clean session, too, when its client id connects again."""
        _, handler = self._sessions.get(client_id, (None, None))
        await super()._delete_session(client_id)
        if handler is not None:
            await self._stop_handler(handler)

    async def _handle_message_delivery(self, session: Any, handler: Any, waiter: asyncio.Future[Any]) -> bool:  # noqa: ANN401
        """Pass a message on unless it is larger than any of ours can be."""
        message = waiter.result()
        if message is not None and len(message.data or b"") > MESSAGE_LIMIT:
            return True
        return bool(await super()._handle_message_delivery(session, handler, waiter))


async def serve(port: int) -> None:
    """Serve until the process that started this one is gone."""
    parent = os.getppid()
    await EmbeddedBroker(port, os.environ.pop(PASSWORD_VARIABLE, "")).start()
    while os.getppid() == parent:
        await asyncio.sleep(_WATCH_SECONDS)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(int(sys.argv[1])))
