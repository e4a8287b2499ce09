"""Robust aggregation: combines models of which some are attackers', rows (k, D) -> (D,).

Every rule is a pure function of the rows, of f, the number of attackers that the server expects, and of the server's
own measurements. Rows that are not finite are removed before any rule but the mean; in a run the server has declined
them already.

Workers that send nothing leave fewer rows, but f stays: a server cannot tell a silent attacker from a late worker. A
rule that needs more rows than there are degrades: a trimmed mean keeps the middle one or two values, Krum uses one
neighbour at least, multi-Krum, Zeno and mixing keep one row at least, Bulyan lowers f.

Products of BLAS depend on its number of threads in the last bits. Here they only order rows, see `_distances`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.algorithm.mixture import turn_disputed
from cbdsl.arrays import Doubles, Floats, Indices, NamedArrays, norm
from cbdsl.errors import UserError, unknown


@dataclass(frozen=True, eq=False)
class TrialSet:
    """The samples on which a server tries uploads: its private hold-out, or D_sc if there is none."""

    count: int  # of samples
    losses: Callable[[Floats], Doubles]  # losses(rows), (k, D) -> (k,)
    differentiate: Callable[[Floats, Indices], tuple[float, Floats]]  # a model's loss and gradient (D,) on some samples


@dataclass(frozen=True, eq=False)
class TrustedReference:
    """What a rule gets beside the rows: the server's own data, the rows' workers and sizes, and the rule's memory.

    >>> at = np.zeros(2, np.float32)
    >>> TrustedReference(at, root=lambda: at, losses=lambda rows: rows.sum(1)).root()
    array([0., 0.], dtype=float32)
    """

    reference: Floats  # w_t, where all workers started, (D,)
    root: Callable[[], Floats]  # root() returns the server's own model, trained from w_t on D_tr, (D,)
    losses: Callable[[Floats], Doubles]  # losses(rows) on D_sc, (k, D) -> (k,)
    sizes: Doubles = field(default_factory=lambda: np.ones(0))  # (k,) samples of each row's worker; ones if unknown
    workers: Indices = field(default_factory=lambda: np.zeros(0, np.int32))  # (k,) numbers of the rows' workers
    round: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))  # a stream of its own per round
    gradient: Callable[..., Floats] | None = None
    """gradient(weights, rows=None) of the mean loss on D_tr, (D,); rows: indices of samples of D_tr, all if None.

    On D_sc if there is no D_tr."""
    memory: NamedArrays = field(default_factory=dict)
    """The rule's memory: arrays by name, saved with the run. The rule reads them and replaces them by new arrays."""
    trial: TrialSet | None = None  # always given in a run
    layers: tuple[tuple[int, int], ...] = ()  # (start, end) columns of each tensor of weights; (): not known


AggregationRule = Callable[[Doubles, int, TrustedReference], Doubles]
"""Takes rows (k, D), f and a `TrustedReference`; returns (D,).

>>> def largest(rows, attackers, trust): return rows.max(0)
>>> largest(np.array([[1.0, 4.0], [3.0, 2.0]]), 0, None)
array([3., 4.])
"""


@register.aggregator("mean")
def mean(rows: Doubles, attackers: int, trust: TrustedReference, *, weights: str = "size") -> Doubles:  # noqa: ARG001 - all rules are called alike
    """sum_i n_i w_i / sum_i n_i, n_i being the samples of worker i: no defence at all; weights=equal: sum_i w_i / k.

    The numbers of samples are those that the server dealt; if workers state them, each is limited to three medians.
    """
    return average(rows, trust.sizes) if weighs_by_size(weights) else np.asarray(rows.mean(0))


def average(rows: Doubles, sizes: Doubles) -> Doubles:
    """Return the mean of rows (k, D) weighted by sizes (k,), as (D,); without sizes all rows have equal weight."""
    if (sizes == sizes[:1]).all():
        return np.asarray(rows.mean(0))
    return np.asarray(np.einsum("i,ij->j", sizes / sizes.sum(), rows))


def weighs_by_size(weights: str) -> bool:
    """Return whether the setting `weights` is "size", not "equal"; UserError if it is neither."""
    if weights not in {"size", "equal"}:
        raise unknown("value of options.mean.weights:", weights, ["size", "equal"])
    return weights == "size"


@register.aggregator("median", family="coordinates")
def median(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Coordinate-wise median (Yin et al. 2018)."""
    return np.asarray(np.median(rows, axis=0))


@register.aggregator("trimmed-mean", family="coordinates")
def trimmed_mean(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Coordinate-wise mean without the f largest and the f smallest values (Yin et al. 2018)."""
    return trimmed_mean_of(rows, attackers)


def trimmed_mean_of(rows: Doubles, count: int) -> Doubles:
    """Return the mean of (k, D), coordinate by coordinate without the `count` highest and lowest values, (D,)."""
    cut = min(count, (len(rows) - 1) // 2)
    return np.asarray(np.sort(rows, axis=0)[cut : len(rows) - cut].mean(0))


@register.aggregator("krum", family="distances")
def krum(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The row with the least sum of squared distances to its k - f - 2 nearest others (Blanchard et al. 2017)."""
    return np.asarray(rows[_krum_order(_distances(rows), attackers)[0]])


@register.aggregator("multi-krum", family="distances")
def multi_krum(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The mean of the k - f rows that Krum likes best (Blanchard et al. 2017)."""
    best = _krum_order(_distances(rows), attackers)[: max(1, len(rows) - attackers)]
    return np.asarray(rows[np.sort(best)].mean(0))


@register.aggregator("geometric-median", family="distances")
def geometric_median(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """argmin_z sum_i |z - w_i| (Pillutla et al. 2022), by Weiszfeld's iteration.

    The iteration would never leave a row that it meets; the pull of all others decides (Vardi and Zhang 2000).
    """
    centre = np.median(rows, axis=0)
    for _ in range(200):
        steps = rows - centre
        apart = np.linalg.norm(steps, axis=1)
        met = apart <= 1e-9 * np.median(apart)  # not of the longest, which an attacker sets
        weights = np.where(met, 0.0, 1 / np.where(met, 1.0, apart))
        pull = np.einsum("i,ij->j", weights, steps)
        strength = norm(pull)
        if strength <= met.sum():  # the pull away is not stronger than the rows here
            return np.asarray(centre)
        step = (1 - met.sum() / strength) * pull / weights.sum()
        centre = centre + step
        if norm(step) <= 1e-9 * (1 + norm(centre)):
            break
    return np.asarray(centre)


@register.aggregator("centred-clipping", family="distances")
def centred_clipping(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """v <- v + mean of (w_i - v) min(1, tau / |w_i - v|), five times from v = w_t (Karimireddy et al. 2021).

    tau is the median of the lengths |w_i - v|, so that it needs no tuning.
    """
    centre = trust.reference.astype(np.float64)
    for _ in range(5):
        steps = rows - centre
        lengths = np.linalg.norm(steps, axis=1)
        share = np.minimum(1.0, np.median(lengths) / np.maximum(lengths, 1e-30))
        centre = centre + (share[:, None] * steps).mean(0)
    return np.asarray(centre)


@register.aggregator("bulyan", family="distances")
def bulyan(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Krum picks k - 2f rows one by one; then, by coordinate, the mean of the k - 4f values nearest their median.

    (El Mhamdi et al. 2018.) It needs k >= 4f + 3; with more attackers f is what k allows, and nothing is guaranteed.
    """
    attackers = min(attackers, (len(rows) - 3) // 4) if len(rows) > 3 else 0
    apart, left, picked = _distances(rows), list(range(len(rows))), []
    for _ in range(len(rows) - 2 * attackers):
        best = left[_krum_order(apart[np.ix_(left, left)], attackers)[0]]
        picked.append(best)
        left.remove(best)
    chosen = rows[np.sort(picked)]
    nearest = rank(np.abs(chosen - np.median(chosen, axis=0)))
    keep = max(1, len(chosen) - 2 * attackers)
    return np.asarray(np.take_along_axis(chosen, nearest[:keep], 0).mean(0))


@register.aggregator("fltrust", family="server-data")
def fltrust(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """w_t + weighted mean of steps, each as long as the server's own; weights max(0, cos to it) (Cao et al. 2021)."""
    reference = trust.reference.astype(np.float64)
    own, steps = trust.root() - reference, rows - reference
    length, lengths = norm(own), np.linalg.norm(steps, axis=1)
    scale = length / np.maximum(lengths, 1e-30)
    weights = np.maximum(0.0, np.einsum("ij,j->i", steps, own) / np.maximum(lengths * length, 1e-30))
    if not weights.sum() > 0:
        return reference
    return np.asarray(reference + np.einsum("i,ij->j", weights * scale, steps) / weights.sum())


@register.aggregator("zeno", family="server-data")
def zeno(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:
    """The mean of the k - f rows with the greatest F(w_t) - F(w_i) - rho |w_i - w_t|^2 on D_sc (Xie et al. 2019).

    rho is 0.0005; F(w_t) is the same for all and left out.
    """
    losses = np.nan_to_num(trust.losses(rows.astype(np.float32)), nan=np.inf, posinf=np.inf)
    cost = losses + 5e-4 * ((rows - trust.reference) ** 2).sum(1)
    best = np.argsort(cost, kind="stable")[: max(1, len(rows) - attackers)]
    return np.asarray(rows[np.sort(best)].mean(0))


@register.aggregator("rlr", family="coordinates", ranges={"theta": (0, math.inf)})
def rlr(rows: Doubles, attackers: int, trust: TrustedReference, *, theta: int = 0) -> Doubles:
    """w_t + the mean step, reversed in the weights on whose sign the workers disagree (Ozdayi et al. 2021).

    The learning rate of weight j is 1 if |sum_i sign(w_ij - w_tj)| >= theta, else -1. theta is a number of votes; 0
    stands for 2f, as in the authors' experiments with 40 workers. It is meant for backdoors: long steps pass.
    The mean is weighted by size.
    """
    reference = trust.reference.astype(np.float64)
    share = min(theta or 2 * attackers, len(rows)) / len(rows)
    return reference + average(turn_disputed(rows - reference, share), trust.sizes)


PreAggregation = Callable[[Doubles, int, TrustedReference], Doubles]
"""Takes what a rule takes, rows (k, D), f and a `TrustedReference`; returns the rows that the rule gets, (k', D)."""


@register.preaggregation("nnm")
def mix_neighbours(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Nearest-neighbour mixing: each row becomes the mean of its k - f nearest, itself included.

    (Allouah et al. 2023.)
    """
    near = np.argsort(_distances(rows), axis=1, kind="stable")[:, : max(1, len(rows) - attackers)]
    return np.stack([rows[np.sort(nearest)].mean(0) for nearest in near])


@register.preaggregation("bucketing")
def fill_buckets(rows: Doubles, attackers: int, trust: TrustedReference, *, size: int = 2) -> Doubles:  # noqa: ARG001
    """Bucketing: the means of `size` rows each, dealt at random (Karimireddy et al. 2022); the last one may be smaller.

    f attackers spoil at most f buckets. There are fewer buckets than rows, but they differ less.
    """
    if size < 1:
        raise UserError(f"options.bucketing.size must be at least 1; given {size}.", code="out-of-range")
    dealt = trust.rng.permutation(len(rows))
    return np.stack([rows[np.sort(dealt[first : first + size])].mean(0) for first in range(0, len(rows), size)])


Settings = Callable[[str], Mapping[str, Any]]
"""Returns the settings of a part by its name, such as `Options.of`."""


def use_defaults(part: str) -> Mapping[str, Any]:  # noqa: ARG001 - settings of any part
    """Return no settings."""
    return {}


def parse_aggregator(name: str) -> tuple[list[str], str]:
    """Split a name such as `bucketing+nnm+krum` into the pre-aggregations, in their order, and the rule."""
    *before, rule = name.split("+")
    earlier = register.preaggregation.names()
    if rule not in register.aggregator:
        hint = f"{' or '.join(f'{part}+' for part in earlier)} may precede it. {register.OWN}"
        raise unknown("aggregator", rule, register.aggregator.names(), hint)
    for part in before:
        if part not in earlier:
            raise unknown("pre-aggregation before the aggregator:", part, earlier, register.OWN)
    return before, rule


def count_rows(name: str, workers: int, settings: Settings = use_defaults) -> int:
    """Return how many rows the rule of a name such as `bucketing+krum` gets from this many workers."""
    for part in name.split("+")[:-1]:
        if part == "bucketing":
            workers = -(-workers // max(1, int(settings(part).get("size", 2))))
    return workers


def aggregate(
    name: str,
    models: Sequence[Floats],
    attackers: int,
    trust: TrustedReference,
    rule: AggregationRule | None = None,
    settings: Settings = use_defaults,
) -> Floats:
    """Combine models, each (D,); return w_t if none is left. rule: used instead of the one of this name.

    trust: with the sizes and workers of the models. The rule's memory is in `trust.memory` afterwards.
    """
    if rule is None:
        parse_aggregator(name)
    *before, plain = name.split("+")
    apply: AggregationRule = rule or register.aggregator.make(plain, settings(plain))
    rows = np.stack(models).astype(np.float64)
    sizes = trust.sizes if len(trust.sizes) else np.ones(len(rows))
    workers = trust.workers if len(trust.workers) else np.arange(len(rows), dtype=np.int32)
    if plain != "mean" or before:
        finite = np.isfinite(rows).all(1)
        attackers, rows = max(0, attackers - int((~finite).sum())), rows[finite]
        sizes, workers = sizes[finite], workers[finite]
        if not len(rows):
            return trust.reference
    ordered = np.lexsort(rows[:, :8].T[::-1])  # ties must not depend on the order of workers
    rows, sizes, workers = rows[ordered], sizes[ordered], workers[ordered]
    trust = replace(trust, sizes=sizes, workers=workers)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in before:
            made = np.asarray(register.preaggregation.make(part, settings(part))(rows, attackers, trust))
            if made.shape[1:] != rows.shape[1:] or not 1 <= len(made) <= len(rows) or not np.isfinite(made).all():
                raise UserError(
                    f"The pre-aggregation {part} returned shape {made.shape} for rows of shape {rows.shape}, or values "
                    "that are not finite. It must return finite rows (k', D), as many or fewer.",
                    code="invalid-part",
                )
            rows = made
            same = len(rows) == len(trust.workers)  # sizes no longer apply, and a bucket has no worker
            numbers = trust.workers if same else np.arange(len(rows), dtype=np.int32)
            trust = replace(trust, sizes=np.ones(len(rows)), workers=numbers)
        combined = np.asarray(apply(rows, attackers, trust))
        if combined.shape != rows.shape[1:]:
            raise _invalid_rule(apply, f"returns shape {combined.shape} for rows of shape {rows.shape}")
        if not _ours(apply) and not np.isfinite(combined).all():
            raise _invalid_rule(apply, "returns numbers that are not finite for rows that are")
        return combined.astype(np.float32)


def _ours(rule: AggregationRule) -> bool:
    return str(getattr(rule, "func", rule).__module__).startswith("cbdsl.")


def _invalid_rule(rule: AggregationRule, what: str) -> UserError:
    name = getattr(getattr(rule, "func", rule), "__qualname__", repr(rule))
    return UserError(
        f"The aggregator {name} {what}. A rule takes rows (k, D), the number of attackers and a TrustedReference, and "
        "returns (D,); try it with cbdsl.testing.check_aggregator.",
        code="invalid-part",
    )


def check_majority(name: str, workers: int, attackers: int, settings: Settings = use_defaults) -> None:
    """Raise UserError if the attackers are half of the rows that the rule gets, or more: no rule tolerates that."""
    before, _ = parse_aggregator(name)
    rows = count_rows(name, workers, settings)
    if name != "mean" and 2 * attackers >= rows:
        buckets = f", which fill {rows} buckets" if "bucketing" in before else ""
        raise UserError(
            f"The aggregator '{name}' is to tolerate {attackers} attackers of {workers} workers{buckets}; it needs an "
            "honest majority. Set defence.declared lower.",
            code="out-of-range",
        )


def _distances(rows: Doubles) -> Doubles:
    """Return the squared distances between rows, (k, k)."""
    centred = rows - np.median(rows, axis=0)  # so that long rows do not cancel short differences
    squares = (centred * centred).sum(1)
    return np.asarray(np.maximum(squares[:, None] + squares - 2 * centred @ centred.T, 0.0))


def _krum_order(apart: Doubles, attackers: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Sort rows by Krum's criterion, best first, from squared distances (k, k)."""
    others = np.sort(apart + np.diag(np.full(len(apart), np.inf)), axis=1)
    near = min(max(1, len(apart) - attackers - 2), max(1, len(apart) - 1))
    return rank(others[:, :near].sum(1))


def rank(values: Doubles) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Sort from the least on, along the first axis; values that differ by rounding alone count as equal.

    Mixed rows often are equally far from all others, and the choice must not depend on the last bit.
    """
    scale = np.median(values, axis=0)
    fine = np.where((scale > 0) & np.isfinite(scale), scale, 1.0) * 1e-9
    return np.argsort(np.round(values / fine), axis=0, kind="stable")
