"""Aggregators that compare the uploads with each other and average those that they keep.

`aggregators` describes the arguments of a rule. D_i = w_i - w_t is the step of worker i.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import chain, combinations
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, average, rank
from cbdsl.arrays import Bools, Doubles, Indices, dot, norm
from cbdsl.errors import UserError, missing

MOST_SUBSETS = 1_000_000


@register.aggregator("mda", family="distances")
def mda(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001 - all rules are called alike
    """The mean of the k - f rows with the least diameter, their largest distance (El Mhamdi et al. 2020).

    Of several such subsets it takes the one with the least sum of squared distances. It compares all k over f subsets;
    more than a million are refused.
    """
    left_out = min(attackers, len(rows) - 1)
    if not left_out:
        return np.asarray(rows.mean(0))
    count = count_subsets(len(rows), left_out)
    subsets = chain.from_iterable(combinations(range(len(rows)), left_out))
    out = np.fromiter(subsets, np.int32, count * left_out).reshape(count, left_out)  # the rows that a subset leaves out
    apart = _square_distances(rows)
    ends, others = np.triu_indices(len(rows), 1)
    for pair in np.argsort(-apart[ends, others], kind="stable"):  # leave out one row of each pair, the farthest first
        without = out[((out == ends[pair]) | (out == others[pair])).any(1)]
        if not len(without):
            break
        out = without
    removed = 2 * apart.sum(1)[out].sum(1) - apart[out[:, :, None], out[:, None, :]].sum((1, 2))
    return np.asarray(np.delete(rows, out[np.argmax(removed)], axis=0).mean(0))


CLUSTERING = frozenset({"flame", "sign-guard"})


def check_rule(rule: str, rows: int, attackers: int) -> None:
    """Raise UserError if a rule of this module cannot run: too many subsets, or a package that is not installed."""
    if rule == "mda":
        count_subsets(rows, attackers)
    if rule in CLUSTERING and importlib.util.find_spec("sklearn") is None:
        raise _without_clustering(rule)


def _without_clustering(rule: str) -> UserError:
    return missing("scikit-learn", "cluster-defences", f"the aggregator '{rule}' clusters uploads")


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


def _square_distances(rows: Doubles) -> Doubles:
    """Return the squared distances between rows, (k, k), pair by pair, for rules that depend on their last digits."""
    apart = np.zeros((len(rows), len(rows)))
    for one, other in combinations(range(len(rows)), 2):
        step = rows[one] - rows[other]
        apart[one, other] = apart[other, one] = dot(step, step)
    return apart


@register.aggregator(
    "dnc", family="filtering", ranges={"times": (1, 10000), "share": (0, 1), "filtered": (0, math.inf)}
)
def dnc(
    rows: Doubles, attackers: int, trust: TrustedReference, *, times: int = 5, share: float = 0.2, filtered: float = 1.0
) -> Doubles:
    """The mean of the rows that are never an outlier on `times` random shares of the weights (DnC).

    With w_i cut to a `share` of the weights, m their mean and v the first right singular vector of the rows w_i - m,
    outliers are the `filtered` f rows with the greatest <w_i - m, v>^2 (Shejwalkar and Houmansadr 2021). If every row
    is an outlier at least once, w_t stays. Attackers far away in different directions hide all but the farthest.
    """
    most = min(int(filtered * attackers), len(rows) - 1)
    kept = np.ones(len(rows), bool)
    for _ in range(times):
        chosen = trust.rng.choice(rows.shape[1], max(1, int(share * rows.shape[1])), replace=False)
        centred = rows[:, chosen] - rows[:, chosen].mean(0)
        _, vectors = np.linalg.eigh(centred @ centred.T)  # <w_i - m, v> is in proportion to the last one's i-th number
        kept[rank(vectors[:, -1] ** 2)[len(rows) - most :]] = False
    return np.asarray(rows[kept].mean(0)) if kept.any() else trust.reference.astype(np.float64)


@register.aggregator(
    "sign-guard", family="filtering", ranges={"shortest": (0, math.inf), "longest": (0, math.inf), "share": (0, 1)}
)
def sign_guard(
    rows: Doubles,
    attackers: int,  # noqa: ARG001
    trust: TrustedReference,
    *,
    shortest: float = 0.1,
    longest: float = 3.0,
    share: float = 0.1,
) -> Doubles:
    """w_t + the mean of the steps of typical length and with the most typical signs (SignGuard, Xu et al. 2022).

    Typical: between `shortest` and `longest` median lengths, and in the largest mean-shift cluster by three features:
    the numbers of positive, zero and negative D_ij in a random block of a `share` of the weights, each divided by the
    largest of all workers. Steps are clipped to the median length.
    """
    reference = trust.reference.astype(np.float64)
    steps = rows - reference
    lengths = np.linalg.norm(steps, axis=1)
    middle, size = float(np.median(lengths)), max(1, int(share * steps.shape[1]))
    first = trust.rng.integers(steps.shape[1] - size + 1)
    signs = np.sign(steps[:, first : first + size])
    counts = np.stack([(signs == sign).sum(1) for sign in (1, 0, -1)], axis=1)  # (k, 3)
    clusters = _mean_shift(counts / np.maximum(counts.max(0), 1))
    kept = (clusters == np.bincount(clusters[clusters >= 0]).argmax()) & (lengths < longest * middle)
    kept &= lengths > shortest * middle
    return reference + clip_and_average(steps[kept], middle) if kept.any() else reference


def _mean_shift(features: Doubles) -> Indices:
    """Return each row's cluster, (k,), -1 for no cluster; the bandwidth is estimated from half of the rows."""
    cluster = _import_clustering("sign-guard")
    bandwidth = max(cluster.estimate_bandwidth(features, quantile=0.5), 1e-6)  # 0 if most rows are equal
    return np.asarray(cluster.MeanShift(bandwidth=bandwidth, cluster_all=False).fit(features).labels_, np.int32)


@register.aggregator("flame", family="filtering", ranges={"noise": (0, math.inf)})
def flame(
    rows: Doubles,
    attackers: int,  # noqa: ARG001
    trust: TrustedReference,
    *,
    noise: float = 0.001,
) -> Doubles:
    """w_t + the mean step of the largest cluster of models, clipped to the median length, + noise (Nguyen et al. 2022).

    The cluster has more than half of the workers, found by HDBSCAN with 1 - cos(w_i, w_j) as distance. Each weight gets
    noise N(0, s^2), s being `noise` median lengths.
    """
    reference = trust.reference.astype(np.float64)
    steps = rows - reference
    middle = float(np.median(np.linalg.norm(steps, axis=1)))
    kept = np.ones(len(rows), bool)
    if len(rows) > 1:
        units = rows / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)[:, None]
        kept = _largest_cluster(_square_distances(units) / 2)
    if not kept.any():
        return reference
    drawn = noise * middle * trust.rng.standard_normal(len(reference))
    return reference + clip_and_average(steps[kept], middle) + drawn


def _largest_cluster(apart: Doubles) -> Bools:
    """Return the members, (k,), of HDBSCAN's cluster of more than half of all rows, from distances (k, k)."""
    cluster = _import_clustering("flame")
    # Core distances are those to the nearest other: min_samples counts the point itself.
    found = cluster.HDBSCAN(
        min_cluster_size=len(apart) // 2 + 1, min_samples=2, metric="precomputed", allow_single_cluster=True, copy=True
    )
    return np.asarray(found.fit(apart).labels_ == 0)


def _import_clustering(name: str) -> Any:  # noqa: ANN401 - the module sklearn.cluster
    """Import scikit-learn's clustering; UserError naming the extra if it is not installed."""
    try:
        return importlib.import_module("sklearn.cluster")
    except ImportError as error:
        raise _without_clustering(name) from error


@register.aggregator(
    "align-ins", family="filtering", ranges={"top": (0, 1), "cosines": (0, math.inf), "signs": (0, math.inf)}
)
def align_ins(
    rows: Doubles,
    attackers: int,  # noqa: ARG001
    trust: TrustedReference,
    *,
    top: float = 0.3,
    cosines: float = 1.0,
    signs: float = 1.0,
) -> Doubles:
    """w_t + the mean of the steps of typical direction, by two measures (AlignIns, Xu et al. 2025).

    The first is cos(D_i, w_t). The second is the share of the largest `top` of worker i's changes |D_ij| whose sign is
    that of sum_i sign(D_ij). Typical: less than `cosines` and `signs` standard deviations from the median of all. Steps
    are clipped to the median length of those kept, and their mean is weighted by size.
    """
    reference = trust.reference.astype(np.float64)
    steps = rows - reference  # (k, D)
    lengths = np.linalg.norm(steps, axis=1)
    aligned = np.einsum("ij,j->i", steps, reference) / np.maximum(lengths * norm(reference), 1e-30)
    majority = np.sign(np.sign(steps).sum(0))
    largest = np.argsort(-np.abs(steps), axis=1, kind="stable")[:, : max(1, int(top * steps.shape[1]))]
    agreeing = (np.sign(np.take_along_axis(steps, largest, 1)) == majority[largest]).mean(1)
    kept = _are_usual(aligned, cosines) & _are_usual(agreeing, signs)
    if not kept.any():
        return reference
    return reference + clip_and_average(steps[kept], float(np.median(lengths[kept])), trust.sizes[kept])


def _are_usual(values: Doubles, deviations: float) -> Bools:
    """Return which values are less than this many standard deviations from the median, (k,); all if they are equal."""
    away = np.abs(values - np.median(values))
    return np.asarray(away < max(deviations * values.std(), 1e-12))


def clip_and_average(steps: Doubles, longest: float, sizes: Doubles | None = None) -> Doubles:
    """Return the mean of steps (k, D), each shortened to a length if it is longer, (D,); weighted by sizes if given."""
    lengths = np.linalg.norm(steps, axis=1)
    share = np.minimum(1.0, longest / np.maximum(lengths, 1e-30))
    return average(share[:, None] * steps, np.ones(len(steps)) if sizes is None else sizes)
