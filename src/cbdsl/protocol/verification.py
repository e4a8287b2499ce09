"""Does a claim deserve an invitation, and does an upload earn its claim? (Algorithm 1, lines 11 and 12)

Judges one claim or one upload at a time and keeps no state: whom to ban is the server's decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.student import quantile


@dataclass(frozen=True)
class Finding:
    """What the server found out about an upload."""

    believed: bool
    measured: float | None  # the score the server measured itself, if it could
    reason: str  # why it was not believed; empty if it was


Score = Callable[[Floats], float]
"""F of a model on D_sc."""


@dataclass(frozen=True, eq=False)
class Verifier:
    """How a server tells good uploads from bad ones."""

    check: Callable[[float, Floats, int], Finding]  # claimed score, weights, round
    score: Score | None = None  # F on D_sc, if the server has it
    worsens: Callable[[Floats, Floats, int], bool] | None = None  # w^g, what may replace it, round; if it has a guard
    copies: Callable[[Floats, Sequence[Floats], Floats, int], bool] | None = None  # w^g, other uploads, upload, round


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

    def check(claimed: float, weights: Floats, round_number: int) -> Finding:  # noqa: ARG001 - given to all
        fault = flaw(weights, size)
        return Finding(not fault, None, fault)

    return Verifier(check)


def measuring(score: Score, size: int, tolerance: float) -> Verifier:
    """Measure the upload on D_sc and compare with the claim.

    The paper's `==` would ban honest workers: the order of a sum alone moves a loss by some 1e-8, other hardware or
    half precision by more. The tolerance is relative above a loss of 1 and absolute below.
    """

    def check(claimed: float, weights: Floats, round_number: int) -> Finding:  # noqa: ARG001 - given to all
        fault = flaw(weights, size)
        if fault:
            return Finding(False, None, fault)
        measured = score(weights)
        # A claim is a float32; the comparison is False for NaN and infinity, for a claim is finite.
        if abs(float(np.float32(measured)) - claimed) <= tolerance * max(1.0, claimed):
            return Finding(True, measured, "")
        return Finding(False, measured, "the claim is not what the server measures")

    return Verifier(check, score)


@dataclass(frozen=True, eq=False)
class HoldOut:
    """Losses by small batches of samples: their mean is the loss, their spread its sampling error."""

    public: Callable[[Floats], Doubles]  # on D_sc, (B,)
    private: Callable[[Floats, int], Doubles]  # on the part of the private hold-out for a round, (B',)


def guarded(inner: Verifier, holdout: HoldOut, false_alarm: float) -> Verifier:
    """Measure what an inner verifier believes on data that no worker has seen, too.

    D_sc is public, so its score can be learned by heart. Memorised: the loss on the private hold-out exceeds the loss
    on D_sc by more than sampling explains, in a one-sided two-sample test (Welch) at the false-alarm rate given. And
    no model may take w^g's place that does worse than w^g on the same part of the hold-out. That part changes every
    round, so that what acceptance gives away about it is soon out of date.
    """

    def check(claimed: float, weights: Floats, round_number: int) -> Finding:
        finding = inner.check(claimed, weights, round_number)
        if not finding.believed:
            return finding
        if memorised(holdout.public(weights), holdout.private(weights, round_number), false_alarm):
            return Finding(False, finding.measured, "it has learned the scoring set by heart: private loss too high")
        return finding

    def worsens(current: Floats, proposed: Floats, round_number: int) -> bool:
        before, after = (holdout.private(weights, round_number).mean() for weights in (current, proposed))
        return not after <= before  # NaN worsens

    return replace(inner, check=check, worsens=worsens)


def copying(train: Callable[[Floats, int], Floats]) -> Callable[[Floats, Sequence[Floats], Floats, int], bool]:
    """Whether no work went into an upload: it is w^g again, or another upload of the round, with noise or without.

    train: one round's training of a model on D_tr alone, from w^g to w^r. Honest workers train on D_tr too, so they
    move along w^r - w^g; noise in so many dimensions hardly does, unless a weight's noise is near a tenth of the whole
    step's length. Copied: |<w - w^g, w^r - w^g>| < |w^r - w^g|^2 / 10, or |w - w'| < |w^r - w^g| / 2 for another w'.
    """

    last: tuple[Floats, int, Doubles] | None = None  # w^g, the round, the server's own step

    def copies(current: Floats, others: Sequence[Floats], proposed: Floats, round_number: int) -> bool:
        nonlocal last
        if last is None or last[0] is not current or last[1] != round_number:
            last = current, round_number, (train(current, round_number) - current).astype(np.float64)
        own_step, upload_step = last[2], (proposed - current).astype(np.float64)
        length = own_step @ own_step
        near = any(np.square(other - proposed, dtype=np.float64).sum() < length / 4 for other in others)
        return bool(near or abs(upload_step @ own_step) < length / 10)

    return copies


def memorised(public: Doubles, private: Doubles, false_alarm: float) -> bool:
    """Whether private losses exceed public ones by more than sampling explains (Welch); NaN counts as excess."""
    gap = private.mean() - public.mean()
    errors = np.array([losses.var(ddof=1) / len(losses) for losses in (public, private)])
    freedom = errors.sum() ** 2 / max((errors**2 / (len(public) - 1, len(private) - 1)).sum(), 1e-300)
    return not gap <= quantile(false_alarm, float(max(freedom, 1.0))) * math.sqrt(errors.sum())
