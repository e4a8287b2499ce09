"""Aggregators that try the uploads on the server's own samples, the trial set.

That is its private hold-out if there is one, else D_sc. Workers have D_sc, so an attacker can memorise it: a
`memoriser` passes every rule here if D_sc is the trial set. It does not pass on a hold-out, which no worker sees.
`aggregators` describes the arguments of a rule. D_i = w_i - w_t, and F is the loss on the trial set.
"""

from __future__ import annotations

import math

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, average
from cbdsl.arrays import Bools, Doubles
from cbdsl.errors import UserError

_NOBODY_GAINED = 0.001  # BANT's beta in a round in which no loss fell


def _try_rows(rows: Doubles, trust: TrustedReference) -> Doubles:
    """Return the losses of rows (k, D) on the trial set, (k,); infinity for those that are not finite."""
    losses = (trust.trial.losses if trust.trial else trust.losses)(rows.astype(np.float32))
    return np.where(np.isfinite(losses), losses, np.inf)


@register.aggregator("bant", family="server-data", ranges={"beta": (0, 1)})
def bant(rows: Doubles, attackers: int, trust: TrustedReference, *, beta: float = 0.5) -> Doubles:  # noqa: ARG001
    """w_t + sum_i o_i D_i, o_i in proportion to the trust in worker i, or 0 if F(w_i) >= F(w_t) (Bant, AAAI 2026).

    The trust m_i starts at 1/k and follows the workers' gains: m_i <- (1 - beta) m_i + beta s_i, s_i in proportion to
    max(0, F(w_t) - F(w_i)). If no worker gains, s_i = 1/k, beta = 0.001, and all with a finite loss count.
    """
    reference = trust.reference.astype(np.float64)
    losses = _try_rows(np.concatenate([reference[None], rows]), trust)
    finite = np.isfinite(losses[1:])
    if not finite.any():
        return reference
    gains = np.maximum(np.where(finite, losses[0] - losses[1:], 0.0), 0.0)
    if 0 < gains.sum() < np.inf:
        shares = gains / gains.sum()
    else:
        shares, beta = finite / len(rows), _NOBODY_GAINED
    known = dict(zip(trust.memory.get("workers", np.zeros(0)), trust.memory.get("trust", np.zeros(0)), strict=True))
    before = np.array([known.get(worker, 1 / len(rows)) for worker in trust.workers])
    trusted = (1 - beta) * before + beta * shares
    known |= dict(zip(trust.workers, trusted, strict=True))
    workers = sorted(known)
    trust.memory.update(workers=np.array(workers), trust=np.array([known[worker] for worker in workers]))
    weights = np.where(shares > 0, trusted, 0.0)
    return reference + average(rows - reference, weights)


@register.aggregator(
    "auto-bant",
    family="server-data",
    ranges={"epochs": (1, math.inf), "batch": (1, math.inf), "rate": (0, math.inf), "momentum": (0, 1)},
)
def auto_bant(
    rows: Doubles,
    attackers: int,  # noqa: ARG001
    trust: TrustedReference,
    *,
    epochs: int = 5,
    batch: int = 32,
    rate: float = 1.0,
    momentum: float = 0.05,
) -> Doubles:
    """w_t + sum_i o_i D_i with weights that lower its F, by mirror descent on the simplex (AutoBANT, AAAI 2026).

    From o_i = 1/k, per batch of the trial set: g_i = <gradient of F at w_t + sum_i o_i D_i, D_i>, o' in proportion to
    o exp(-rate g), o <- (1 - momentum) o + momentum o'. The result is the o with the least loss of a batch, without
    weights below 1/2k. A step is one gradient and k products of D numbers. Models without a finite loss are left out.
    """
    if trust.trial is None:
        raise UserError("The aggregator 'auto-bant' needs a trial set: data.holdout or D_sc.", code="conflict")
    reference, trial = trust.reference.astype(np.float64), trust.trial
    steps = (rows - reference)[np.isfinite(_try_rows(rows, trust))]
    if not len(steps):
        return reference
    shares = best = np.full(len(steps), 1 / len(steps))
    least = np.inf
    for _ in range(epochs):
        order = trust.rng.permutation(trial.count).astype(np.int32)
        for part in np.array_split(order, -(-trial.count // batch)):
            mixed = reference + np.einsum("i,ij->j", shares, steps)
            loss, gradient = trial.differentiate(mixed.astype(np.float32), part)
            slopes = np.einsum("ij,j->i", steps, gradient.astype(np.float64))
            if not (np.isfinite(loss) and np.isfinite(slopes).all()):
                continue
            if loss < least:
                best, least = shares, loss
            towards = shares * np.exp(-rate * (slopes - slopes.min()))
            shares = (1 - momentum) * shares + momentum * towards / towards.sum()
    best = np.where(best < 0.5 / len(steps), 0.0, best)
    return np.asarray(reference + np.einsum("i,ij->j", best, steps))


@register.aggregator("fedgreed", family="server-data")
def fedgreed(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The mean of the models with the least F, as many as lower the F of that mean (FedGreed, FLTA 2025).

    a_n is the mean of the first n models in order of F; the search stops at the first n with F(a_n) > F(a_(n-1)). A
    greedy soup (Wortsman et al. 2022) would leave that model out and continue.
    """
    losses = _try_rows(rows, trust)
    order = np.argsort(losses, kind="stable")[: np.isfinite(losses).sum()]
    best, least = trust.reference.astype(np.float64), np.inf
    for count in range(1, len(order) + 1):
        mean = rows[np.sort(order[:count])].mean(0)
        loss = _try_rows(mean[None], trust)[0]
        if loss > least:
            break
        if loss < least:
            best, least = mean, loss
    return np.asarray(best)


@register.aggregator("loss-clusters", family="server-data")
def loss_clusters(rows: Doubles, attackers: int, trust: TrustedReference) -> Doubles:  # noqa: ARG001
    """The mean, weighted by size, of the models in the lower of two clusters of F(w_i) (WAFL 2025).

    2-means starts at the least and the greatest F. One honest worker is enough. But if one attacker has a far greater
    loss than the other attackers, those are in the lower cluster with the honest workers.
    """
    losses = _try_rows(rows, trust)
    low = np.isfinite(losses)
    if not low.any():
        return trust.reference.astype(np.float64)
    low[low] = _are_low(losses[low])
    return average(rows[low], trust.sizes[low])


def _are_low(values: Doubles) -> Bools:
    """Return which values are in the lower of two clusters, by 2-means from the extremes, (n,)."""
    low = values <= (values.min() + values.max()) / 2
    while not low.all():
        again = values <= (values[low].mean() + values[~low].mean()) / 2
        if (again == low).all():
            break
        low = again
    return np.asarray(low)
