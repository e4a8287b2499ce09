"""Does a claim deserve an invitation, and does an upload earn its claim? (Algorithm 1, lines 11 and 12)

Judges one claim or one upload at a time and keeps no state: whom to ban is the server's decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cbdsl.engines.base import Floats


@dataclass(frozen=True)
class Finding:
    """What the server found out about an upload."""

    believed: bool
    measured: float | None  # the score the server measured itself, if it could
    reason: str  # why it was not believed; empty if it was


Verifier = Callable[[float, Floats], Finding]
"""Takes the claimed score and the uploaded weights."""


def objection(claimed: float) -> str:
    """Why a claim cannot be true, or an empty string. A cross-entropy is finite and not negative."""
    if math.isnan(claimed):
        return "not a number"
    if math.isinf(claimed):
        return "infinite"
    if claimed < 0:
        return "negative"
    return ""


def flaw(weights: Floats, size: int) -> str:
    """Why an upload is no model at all, or an empty string."""
    if weights.shape != (size,):
        return f"shape {weights.shape} instead of ({size},)"
    if not np.isfinite(weights).all():
        return "weights that are not finite"
    return ""


def trusting(size: int) -> Verifier:
    """Believe every upload that is a model: all a server can do without D_sc."""

    def verify(claimed: float, weights: Floats) -> Finding:  # noqa: ARG001 - a verifier is given the claim
        fault = flaw(weights, size)
        return Finding(not fault, None, fault)

    return verify


def measuring(score: Callable[[Floats], float], size: int, tolerance: float) -> Verifier:
    """Measure the upload on D_sc and compare with the claim.

    The paper's `==` would ban honest workers: the order of a sum alone moves a loss by some 1e-8, other hardware or
    half precision by more. The tolerance is relative above a loss of 1 and absolute below.
    """

    def verify(claimed: float, weights: Floats) -> Finding:
        fault = flaw(weights, size)
        if fault:
            return Finding(False, None, fault)
        measured = score(weights)
        if abs(measured - claimed) <= tolerance * max(1.0, claimed):  # False for NaN and infinity: a claim is finite
            return Finding(True, measured, "")
        return Finding(False, measured, "the claim is not what the server measures")

    return verify
