from __future__ import annotations

import numpy as np
import pytest

from cbdsl.verification import measuring, trusting

WEIGHTS = np.array([1.0, 2.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("claimed", "measured", "believed"),
    [
        (0.5, 0.5, True),
        (0.5, 0.50009, True),  # absolute below a loss of 1
        (0.5, 0.50011, False),
        (0.5, 0.4998, False),  # too modest a claim is not the truth either
        (10.0, 10.0009, True),  # relative above
        (10.0, 10.0011, False),
        (0.5, float("nan"), False),
        (0.5, float("inf"), False),
    ],
)
def test_a_claim_is_believed_within_the_tolerance(claimed: float, measured: float, believed: bool) -> None:
    finding = measuring(lambda _: measured, 2, 1e-4)(claimed, WEIGHTS)
    assert finding.believed is believed
    assert bool(finding.reason) is not believed


def test_the_literal_comparison_of_the_paper_bans_for_rounding() -> None:
    assert not measuring(lambda _: 0.5 + 4e-8, 2, 0.0)(0.5, WEIGHTS).believed
    assert measuring(lambda _: 0.5 + 4e-8, 2, 1e-4)(0.5, WEIGHTS).believed


def test_trust_measures_nothing() -> None:
    finding = trusting(2)(0.0, WEIGHTS)
    assert finding.believed
    assert finding.measured is None
