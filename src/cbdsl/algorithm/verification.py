"""Verification of claims and uploads (Algorithm 1, lines 11 and 12), and the guard, a private hold-out.

One claim or upload at a time, without state: the server decides which workers are banned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from cbdsl.arrays import Doubles, Floats, dot
from cbdsl.util.student_t import tail


@dataclass(frozen=True)
class ClaimCheck:
    """The result of measuring an upload."""

    believed: bool
    measured: float | None  # the score that the server measured, if it has D_sc
    reason: str  # why it was not believed; of a believed claim, why it is of no use all the same; or ""


Score = Callable[[Floats], float]
"""F of a model on D_sc."""
_Found = TypeVar("_Found")
MEMORISED = "it has learned the scoring set by heart: private loss too high"
UNTRAINABLE = "it falls apart when it is trained on"
IMPRECISE = "the claim is within the tolerance, but far from a loss this small"
_LEAST_PRECISION = 0.1  # of a loss: a claim that is farther from it is of no use
_ROUNDING = 1e-6  # claims of honest workers are nearer than this, whatever the processor


@dataclass(frozen=True, eq=False)
class Verifier:
    """How a server verifies uploads. What it cannot measure is None.

    >>> verifier = make_verifier(lambda model: float(model.sum()), size=2, tolerance=1e-4)
    >>> verifier.check(3.0, np.array([1, 2], np.float32), 1).believed
    True
    """

    check: Callable[[float, Floats, int], ClaimCheck]  # check(claimed score, weights, round)
    score: Score | None = None  # score(model) is F of a model (D,) on D_sc; None: the server has no D_sc
    copies: Callable[[Floats, Sequence[Floats], Floats, int], bool] | None = None  # w^g, other uploads, upload, round
    doubt: Callable[[Floats, Floats, int], str] | None = None  # w^g, upload, round: why the guard distrusts it, or ""
    loss: Score | None = None  # on the private hold-out; with a guard
    train: Callable[[Floats, int], Floats] | None = None  # w^g, round: trained on D_tr and D_sc; with a guard and D_tr

    def worsens(self, current: Floats, proposed: Floats) -> bool:
        """Return whether a model is worse than w^g on the private hold-out; NaN is. Without a guard none is."""
        return self.loss is not None and not self.loss(proposed) <= self.loss(current)


def find_claim_flaw(claimed: float) -> str:
    """Return why a claim cannot be true, or "". A cross-entropy is finite and not negative."""
    if math.isnan(claimed):
        return "not a number"
    if math.isinf(claimed):
        return "infinite"
    if claimed < 0:
        return "negative"
    return ""


def find_model_flaw(weights: Floats, size: int) -> str:
    """Return why an upload is not a model, or ""."""
    if weights.shape != (size,):
        return f"shape {weights.shape} instead of ({size},)"
    if not np.isfinite(weights).all():
        return "weights that are not finite"
    return ""


def trust_uploads(size: int) -> Verifier:
    """Return a verifier that believes every upload that is a model: all a server can do without D_sc."""

    def check(claimed: float, weights: Floats, round_number: int) -> ClaimCheck:  # noqa: ARG001 - given to all
        fault = find_model_flaw(weights, size)
        return ClaimCheck(not fault, None, fault)

    return Verifier(check)


def make_verifier(score: Score, size: int, tolerance: float) -> Verifier:
    """Return a verifier that measures an upload on D_sc and compares it with the claim.

    The paper's `==` would ban honest workers: the order of a sum alone moves a loss by some 1e-8, other hardware or
    half precision by more. The tolerance is relative above a loss of 1 and absolute below. Where the loss is smaller
    than the tolerance, a false claim proves nothing: it is believed, with a reason to decline the upload.
    """

    def check(claimed: float, weights: Floats, round_number: int) -> ClaimCheck:  # noqa: ARG001 - given to all
        fault = find_model_flaw(weights, size)
        if fault:
            return ClaimCheck(False, None, fault)
        measured = score(weights)
        # A claim is a float32; the comparison is False for NaN and infinity, for a claim is finite.
        rounded = float(np.float32(measured))
        gap = abs(rounded - claimed)
        if gap <= tolerance * max(1.0, claimed):
            imprecise = gap > max(_LEAST_PRECISION * max(claimed, rounded), _ROUNDING)
            return ClaimCheck(True, measured, IMPRECISE if imprecise else "")
        return ClaimCheck(False, measured, "the claim is not what the server measures")

    return Verifier(check, score)


@dataclass(frozen=True, eq=False)
class HoldOutLosses:
    """Losses per small batch of samples: their mean is the loss, their spread its sampling error."""

    public: Callable[[Floats], Doubles]  # on D_sc, (B,)
    private: Callable[[Floats, int], Doubles]  # on the part of the private hold-out for a round, (B',)
    whole: Score  # on all of the private hold-out


def add_guard(
    inner: Verifier, holdout: HoldOutLosses, false_alarm: float, train: Callable[[Floats, int], Floats] | None = None
) -> Verifier:
    """Return a verifier that also measures uploads on data that no worker has seen; none is refuted for it.

    D_sc is public, so it can be memorised. Memorised: from w^g to the upload the loss on D_sc has fallen further than
    that on the private hold-out, by more than sampling explains, in a one-sided two-sample test (Welch) at the given
    false-alarm rate. What w^g has memorised already does not count. Untrainable: one round of training (train, on D_tr)
    more than doubles the private loss. Both are measured on a part of the hold-out that changes every round, so that
    what acceptance reveals about it is soon out of date. And no model replaces w^g that is worse on the whole hold-out.
    """
    losses = cache_per_round(lambda current, number: (holdout.public(current), holdout.private(current, number)))

    def doubt(current: Floats, proposed: Floats, round_number: int) -> str:
        public, private = losses(current, round_number)
        after = holdout.private(proposed, round_number)
        if is_memorised(holdout.public(proposed) - public, after - private, false_alarm):
            return MEMORISED
        if train is None:
            return ""
        trained = float(holdout.private(train(proposed, round_number), round_number).mean())
        return "" if trained <= 2 * after.mean() + _SLACK else UNTRAINABLE  # NaN is untrainable

    def loss(weights: Floats, round_number: int = 0) -> float:  # noqa: ARG001 - selections of users gave it before 1.0
        return holdout.whole(weights)

    return replace(inner, doubt=doubt, loss=loss)


_SLACK = 0.1  # a loss near 0 may more than double


def make_copy_check(train: Callable[[Floats, int], Floats]) -> Callable[[Floats, Sequence[Floats], Floats, int], bool]:
    """Return a check for uploads that took no work: w^g or another upload of the round, with noise or without.

    train: one round of training a model on D_tr alone, from w^g to w^r. Honest workers train on D_tr too, so they move
    along w^r - w^g. Noise in D dimensions hardly does, unless a weight's noise is near a tenth of the step's length.
    Copied: |<w - w^g, w^r - w^g>| < |w^r - w^g|^2 / 10, or |w - w'| < |w^r - w^g| / 2 for another w'.
    """
    step = cache_per_round(lambda current, number: (train(current, number) - current).astype(np.float64))

    def copies(current: Floats, others: Sequence[Floats], proposed: Floats, round_number: int) -> bool:
        own, upload = step(current, round_number), (proposed - current).astype(np.float64)
        length = dot(own, own)
        near = any(np.square(other - proposed, dtype=np.float64).sum() < length / 4 for other in others)
        return bool(near or abs(dot(upload, own)) < length / 10)

    return copies


def cache_per_round(compute: Callable[[Floats, int], _Found]) -> Callable[[Floats, int], _Found]:
    """Return a function that computes once per w^g and round."""
    last: tuple[Floats, int, _Found] | None = None

    def found(current: Floats, round_number: int) -> _Found:
        nonlocal last
        if last is None or last[0] is not current or last[1] != round_number:
            last = current, round_number, compute(current, round_number)
        return last[2]

    return found


def is_memorised(public: Doubles, private: Doubles, false_alarm: float) -> bool:
    """Return whether private losses exceed public ones by more than sampling explains (Welch); NaN counts as excess."""
    gap = private.mean() - public.mean()
    errors = np.array([losses.var(ddof=1) / len(losses) for losses in (public, private)])
    freedom = errors.sum() ** 2 / max((errors**2 / (len(public) - 1, len(private) - 1)).sum(), 1e-300)
    error = math.sqrt(errors.sum())
    if error == 0:
        return not gap <= 0
    return not tail(gap / error, float(np.clip(freedom, 1.0, 1e6))) >= false_alarm
