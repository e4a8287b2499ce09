"""LASA (Xu et al. 2025): layer by layer, the mean of the updates whose length and signs are near the median's."""

from __future__ import annotations

import numpy as np

import cbdsl
from cbdsl.arrays import Bools, Doubles


def near_median(values: Doubles, radius: float) -> Bools:
    """Return which values are closer to their median than some deviations."""
    return np.asarray(np.abs(values - np.median(values)) < radius * max(values.std(), 1e-30))


@cbdsl.register.aggregator("lasa")
def lasa(
    rows: Doubles,
    attackers: int,  # noqa: ARG001 - it needs no number of attackers
    trust: cbdsl.TrustedReference,
    *,
    sparsity: float = 0.3,
    length: float = 2.0,  # lambda_n
    sign: float = 1.0,  # lambda_s
) -> Doubles:
    """Updates are clipped to the median length; for the filters the smallest 30 % of each one's numbers are 0."""
    steps = rows - trust.reference
    lengths = np.linalg.norm(steps, axis=1)
    steps *= np.minimum(1.0, np.median(lengths) / np.maximum(lengths, 1e-30))[:, None]
    sparse = np.where(np.abs(steps) > np.quantile(np.abs(steps), sparsity, axis=1, keepdims=True), steps, 0.0)
    combined = trust.reference.astype(np.float64)
    for first, last in trust.layers or ((0, rows.shape[1]),):
        layer, signs = sparse[:, first:last], np.sign(sparse[:, first:last])
        purity = 0.5 * (1 + (1 - sparsity) * signs.sum(1) / np.maximum(np.abs(signs).sum(1), 1))
        kept = near_median(np.linalg.norm(layer, axis=1), length) & near_median(purity, sign)
        combined[first:last] += steps[kept if kept.any() else slice(None), first:last].mean(0)
    return combined
