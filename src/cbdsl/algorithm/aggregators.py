"""How FedAvg can combine models when some of them lie: rows (k, D) -> (D,).

Every rule is a pure function of the rows, of f, the number of attackers the server reckons with, and, for those that
use one, of what a trusted server knows. Rows that are not finite are taken away before any rule but the mean sees them;
in a run the server has refused them already.

Workers that send nothing leave fewer rows, but f stays: a server cannot tell an attacker that hides from an honest
worker that is late. A rule that wants more rows than there are goes as far as it can: a trimmed mean keeps the middle
one or two values, Krum looks at one neighbour at least, multi-Krum, Zeno and mixing keep one row at least, Bulyan
lowers f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, unknown


@dataclass(frozen=True, eq=False)
class TrustedReference:
    """What a server with data of its own can compare uploads with."""

    reference: Floats  # w_t, where all workers started, (D,)
    root: Callable[[], Floats]  # root() is the server's own model, trained from w_t on D_tr, (D,)
    losses: Callable[[Floats], Doubles]  # losses(rows) are those on D_sc, (k, D) -> (k,)


AggregationRule = Callable[[Doubles, int, TrustedReference], Doubles]
"""Takes rows (k, D), f and the server's knowledge; gives (D,)."""


@register.aggregator("mean")
def mean(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001 - all rules are called alike
    """sum_i w_i / k: no defence at all."""
    return np.asarray(rows.mean(0))


@register.aggregator("median")
def median(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Coordinate-wise median (Yin et al. 2018)."""
    return np.asarray(np.median(rows, axis=0))


@register.aggregator("trimmed-mean")
def trimmed_mean(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Coordinate-wise mean without the f largest and the f smallest values (Yin et al. 2018)."""
    return trimmed(rows, attackers)


def trimmed(rows: Doubles, count: int) -> Doubles:
    """The mean of (k, D), coordinate by coordinate without so many of the highest and of the lowest, (D,)."""
    cut = min(count, (len(rows) - 1) // 2)
    return np.asarray(np.sort(rows, axis=0)[cut : len(rows) - cut].mean(0))


@register.aggregator("krum")
def krum(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The row with the least sum of squared distances to its k - f - 2 nearest others (Blanchard et al. 2017)."""
    return np.asarray(rows[_krum_order(_distances(rows), attackers)[0]])


@register.aggregator("multi-krum")
def multi_krum(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The mean of the k - f rows that Krum likes best (Blanchard et al. 2017)."""
    best = _krum_order(_distances(rows), attackers)[: max(1, len(rows) - attackers)]
    return np.asarray(rows[np.sort(best)].mean(0))


@register.aggregator("geometric-median")
def geometric_median(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """argmin_z sum_i |z - w_i| (Pillutla et al. 2022), by Weiszfeld's iteration.

    It would never leave a row that it meets; the pull of all others says whether it should (Vardi and Zhang 2000).
    """
    centre = np.median(rows, axis=0)
    for _ in range(200):
        steps = rows - centre
        apart = np.linalg.norm(steps, axis=1)
        met = apart <= 1e-9 * np.median(apart)  # not of the longest, which an attacker sets
        weights = np.where(met, 0.0, 1 / np.where(met, 1.0, apart))
        pull = weights @ steps
        strength = float(np.linalg.norm(pull))
        if strength <= met.sum():  # no further: what pulls away is no stronger than the rows here
            return np.asarray(centre)
        step = (1 - met.sum() / strength) * pull / weights.sum()
        centre = centre + step
        if np.linalg.norm(step) <= 1e-9 * (1 + np.linalg.norm(centre)):
            break
    return np.asarray(centre)


@register.aggregator("centred-clipping")
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


@register.aggregator("bulyan")
def bulyan(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """Krum picks k - 2f rows one by one; then, by coordinate, the mean of the k - 4f values nearest their median.

    (El Mhamdi et al. 2018.) It needs k >= 4f + 3; with more attackers than that f is what k allows, and nothing is
    guaranteed.
    """
    attackers = min(attackers, (len(rows) - 3) // 4) if len(rows) > 3 else 0
    apart, left, picked = _distances(rows), list(range(len(rows))), []
    for _ in range(len(rows) - 2 * attackers):
        best = left[_krum_order(apart[np.ix_(left, left)], attackers)[0]]
        picked.append(best)
        left.remove(best)
    chosen = rows[np.sort(picked)]
    nearest = _ranked(np.abs(chosen - np.median(chosen, axis=0)))
    keep = max(1, len(chosen) - 2 * attackers)
    return np.asarray(np.take_along_axis(chosen, nearest[:keep], 0).mean(0))


@register.aggregator("fltrust")
def fltrust(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """w_t + weighted mean of steps, each as long as the server's own; weights max(0, cos to it) (Cao et al. 2021)."""
    reference = trust.reference.astype(np.float64)
    own, steps = trust.root() - reference, rows - reference
    length, lengths = np.linalg.norm(own), np.linalg.norm(steps, axis=1)
    scale = length / np.maximum(lengths, 1e-30)
    weights = np.maximum(0.0, steps @ own / np.maximum(lengths * length, 1e-30))
    if not weights.sum() > 0:
        return reference
    return np.asarray(reference + (weights * scale) @ steps / weights.sum())


@register.aggregator("zeno")
def zeno(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:
    """The mean of the k - f rows with the greatest F(w_t) - F(w_i) - rho |w_i - w_t|^2 on D_sc (Xie et al. 2019).

    rho is 0.0005; F(w_t) is the same for all and left out.
    """
    losses = np.nan_to_num(trust.losses(rows.astype(np.float32)), nan=np.inf, posinf=np.inf)
    cost = losses + 5e-4 * ((rows - trust.reference) ** 2).sum(1)
    best = np.argsort(cost, kind="stable")[: max(1, len(rows) - attackers)]
    return np.asarray(rows[np.sort(best)].mean(0))


MIXING = "nnm"


def mixed(rows: Doubles, attackers: int) -> Doubles:
    """Nearest-neighbour mixing: each row becomes the mean of its k - f nearest with itself (Allouah et al. 2023)."""
    near = np.argsort(_distances(rows), axis=1, kind="stable")[:, : max(1, len(rows) - attackers)]
    share = np.zeros((len(rows), len(rows)))
    np.put_along_axis(share, near, 1 / near.shape[1], axis=1)
    return np.asarray(share @ rows)


def parse(name: str) -> tuple[bool, str]:
    """`nnm+krum` -> whether rows are mixed first, and the rule."""
    before, plus, rule = name.rpartition("+")
    if rule not in register.aggregator or (plus and before != MIXING):
        rules = register.aggregator.names()
        raise unknown("aggregator", name, [*rules, *(f"{MIXING}+{rule}" for rule in rules)], register.OWN)
    return bool(plus), rule


def aggregate(
    name: str, models: Sequence[Floats], attackers: int, trust: TrustedReference, rule: AggregationRule | None = None
) -> Floats:
    """Combine models, each (D,); w_t if none is left. rule: what the name stands for, if it has settings of its own."""
    mixing, plain = parse(name) if rule is None else (name.startswith(f"{MIXING}+"), name.rpartition("+")[2])
    apply: AggregationRule = rule or register.aggregator.get(plain)
    rows = np.stack(models).astype(np.float64)
    if plain != "mean" or mixing:
        finite = np.isfinite(rows).all(1)
        attackers, rows = max(0, attackers - int((~finite).sum())), rows[finite]
        if not len(rows):
            return trust.reference
    rows = rows[np.lexsort(rows[:, :8].T[::-1])]  # where rules have to choose among equals, the order must not tell
    if mixing:
        rows = mixed(rows, attackers)
    with np.errstate(over="ignore", invalid="ignore"):
        combined = np.asarray(apply(rows, attackers, trust))
        if combined.shape != rows.shape[1:]:
            raise UserError(_nonsense(apply, f"gives shape {combined.shape} for rows of shape {rows.shape}"))
        if not _ours(apply) and not np.isfinite(combined).all():
            raise UserError(_nonsense(apply, "gives numbers that are not finite for rows that are"))
        return combined.astype(np.float32)


def _ours(rule: AggregationRule) -> bool:
    return getattr(rule, "func", rule).__module__ == __name__


def _nonsense(rule: AggregationRule, what: str) -> str:
    name = getattr(getattr(rule, "func", rule), "__qualname__", repr(rule))
    return (
        f"The aggregator {name} {what}. A rule takes rows (k, D), the number of attackers and what the server knows, "
        "and gives (D,); try it with cbdsl.testing.check_aggregator."
    )


def demand(name: str, workers: int, attackers: int) -> None:
    """Refuse a number of attackers that no rule can stand: half of the workers or more."""
    parse(name)
    if name != "mean" and 2 * attackers >= workers:
        raise UserError(
            f"The aggregator '{name}' is told to reckon with {attackers} attackers of {workers} workers; "
            "it needs an honest majority. Set defence.declared lower."
        )


def _distances(rows: Doubles) -> Doubles:
    """Squared distances between rows, (k, k)."""
    centred = rows - np.median(rows, axis=0)  # so that long rows do not cancel short differences
    squares = (centred * centred).sum(1)
    return np.asarray(np.maximum(squares[:, None] + squares - 2 * centred @ centred.T, 0.0))


def _krum_order(apart: Doubles, attackers: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Rows from Krum's favourite on, by squared distances (k, k)."""
    others = np.sort(apart + np.diag(np.full(len(apart), np.inf)), axis=1)
    near = min(max(1, len(apart) - attackers - 2), max(1, len(apart) - 1))
    return _ranked(others[:, :near].sum(1))


def _ranked(values: Doubles) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The order from the least on, along the first axis; values that differ by rounding alone count as equal.

    Mixed rows often are equally far from everything, and which of them is taken must not hang on the last bit.
    """
    scale = np.median(values, axis=0)
    fine = np.where((scale > 0) & np.isfinite(scale), scale, 1.0) * 1e-9
    return np.argsort(np.round(values / fine), axis=0, kind="stable")
