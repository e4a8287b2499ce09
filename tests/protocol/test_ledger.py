from __future__ import annotations

from cbdsl.protocol import ledger
from cbdsl.protocol.ledger import Traffic


def test_payload_is_counted_by_direction() -> None:
    traffic = [
        ledger.orders(3),
        ledger.broadcasts(3, 120),
        ledger.scores(3),
        ledger.invitations(1),
        ledger.uploads(2, 80),
    ]
    assert ledger.payload(traffic, "up") == 3 * 4 + 2 * 40
    assert ledger.payload(traffic, "down") == 3 * 12 + 3 * 40 + 4


def test_traffic_of_a_kind_adds_up() -> None:
    total = ledger.by_kind([ledger.scores(3), ledger.uploads(1, 40), ledger.scores(2)])
    assert total == {"score": Traffic("score", 5, 20), "upload": Traffic("upload", 1, 40)}
