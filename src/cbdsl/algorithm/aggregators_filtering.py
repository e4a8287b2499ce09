"""Aggregators that compare the uploads with each other and average those that they keep.

See `aggregators` for what a rule is given. D_i = w_i - w_t is the step of worker i.
"""

from __future__ import annotations

import math
from itertools import chain, combinations

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference
from cbdsl.arrays import Bools, Doubles, norm
from cbdsl.errors import UserError

MOST_SUBSETS = 1_000_000


@register.aggregator("mda")
def mda(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001 - all rules are called alike
    """The mean of the k - f rows with the least diameter, their largest distance (El Mhamdi et al. 2020).

    Of several such subsets it takes the one with the least sum of squared distances. It tries all k over f subsets, so
    it is refused above a million.
    """
    left_out = min(attackers, len(rows) - 1)
    if not left_out:
        return np.asarray(rows.mean(0))
    count = count_subsets(len(rows), left_out)
    subsets = chain.from_iterable(combinations(range(len(rows)), left_out))
    out = np.fromiter(subsets, np.int32, count * left_out).reshape(count, left_out)  # the rows that a subset leaves out
    apart = np.stack([np.einsum("ij,ij->i", rows - row, rows - row) for row in rows])  # (k, k)
    ends, others = np.triu_indices(len(rows), 1)
    for pair in np.argsort(-apart[ends, others], kind="stable"):  # leave out one row of each pair, the farthest first
        without = out[((out == ends[pair]) | (out == others[pair])).any(1)]
        if not len(without):
            break
        out = without
    removed = 2 * apart.sum(1)[out].sum(1) - apart[out[:, :, None], out[:, None, :]].sum((1, 2))
    return np.asarray(np.delete(rows, out[np.argmax(removed)], axis=0).mean(0))


def count_subsets(count: int, attackers: int) -> int:
    """Return the number of subsets that the rule mda compares; UserError if there are too many."""
    subsets = math.comb(count, min(attackers, count))
    if subsets > MOST_SUBSETS:
        raise UserError(
            f"The aggregator 'mda' compares all subsets of {count} uploads that leave out {attackers}: {subsets:,}. "
            f"At most {MOST_SUBSETS:,} are allowed. Set defence.declared or participation lower, or use another rule.",
            code="out-of-range",
        )
    return subsets


@register.aggregator("align-ins")
def align_ins(
    rows: Doubles,
    attackers: int,  # noqa: ARG001
    trust: TrustedReference,
    *,
    top: float = 0.3,
    cosines: float = 1.0,
    signs: float = 1.0,
) -> Doubles:
    """w_t + the mean step of the workers whose directions are usual, by two measures (AlignIns, Xu et al. 2025).

    The first is cos(D_i, w_t). The second is the share of the largest `top` of worker i's changes |D_ij| whose sign is
    that of sum_i sign(D_ij). Usual: less than `cosines` and `signs` standard deviations from the median of all. Steps
    are clipped to the median length of those kept.
    """
    reference = trust.reference.astype(np.float64)
    steps = rows - reference  # (k, D)
    lengths = np.linalg.norm(steps, axis=1)
    aligned = np.einsum("ij,j->i", steps, reference) / np.maximum(lengths * norm(reference), 1e-30)
    majority = np.sign(np.sign(steps).sum(0))
    largest = np.argsort(-np.abs(steps), axis=1, kind="stable")[:, : max(1, int(top * steps.shape[1]))]
    agreeing = (np.sign(np.take_along_axis(steps, largest, 1)) == majority[largest]).mean(1)
    kept = _are_usual(aligned, cosines) & _are_usual(agreeing, signs)
    return reference + clip_and_average(steps[kept], float(np.median(lengths[kept]))) if kept.any() else reference


def _are_usual(values: Doubles, deviations: float) -> Bools:
    """Return which values are less than this many standard deviations from the median, (k,); all if they are equal."""
    away = np.abs(values - np.median(values))
    return np.asarray(away < max(deviations * values.std(), 1e-12))


def clip_and_average(steps: Doubles, longest: float) -> Doubles:
    """Return the mean of steps (k, D), each shortened to a length if it is longer, (D,)."""
    lengths = np.linalg.norm(steps, axis=1)
    share = np.minimum(1.0, longest / np.maximum(lengths, 1e-30))
    return np.asarray(np.einsum("i,ij->j", share, steps) / len(steps))
