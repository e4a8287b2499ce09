from __future__ import annotations

from cbdsl.algorithm import ledger
from cbdsl.algorithm.ledger import Traffic


def test_payload_is_counted_by_direction() -> None:
    traffic = [
        ledger.order_traffic(3),
        ledger.broadcast_traffic(3, 120),
        ledger.claim_traffic(3),
        ledger.invitation_traffic(1),
        ledger.upload_traffic(2, 80),
    ]
    assert ledger.payload(traffic, "up") == 3 * 4 + 2 * 40
    assert ledger.payload(traffic, "down") == 3 * 12 + 3 * 40 + 4


def test_traffic_of_a_kind_adds_up() -> None:
    total = ledger.by_kind([ledger.claim_traffic(3), ledger.upload_traffic(1, 40), ledger.claim_traffic(2)])
    assert total == {"score": Traffic("score", 5, 20), "upload": Traffic("upload", 1, 40)}
