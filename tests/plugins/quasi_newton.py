"""What FLDetector needs of numerics: products with an L-BFGS Hessian, and clusters of numbers."""

from __future__ import annotations

import numpy as np
from sklearn.cluster import KMeans

from cbdsl.arrays import Bools, Doubles


def curvature(moved: Doubles, changed: Doubles, vector: Doubles) -> Doubles:
    """Return H v, where H is the L-BFGS Hessian (Byrd et al. 1994) of steps (m, D) and changes of gradients (m, D)."""
    product = moved @ changed.T  # s_i y_j
    scale, below = product[-1, -1] / (moved[-1] @ moved[-1]), np.tril(product, -1)
    middle = np.block([[scale * moved @ moved.T, below], [below.T, -np.diag(np.diag(product))]])
    sides = np.concatenate([scale * moved, changed])
    return np.asarray(scale * vector - sides.T @ np.linalg.lstsq(middle, sides @ vector, rcond=None)[0])


def spread(values: Doubles, clusters: int) -> float:
    """Return the sum of squared distances to the centres of k-means."""
    return float(KMeans(clusters, n_init=5, random_state=0).fit(values[:, None]).inertia_) + 1e-12


def count_clusters(values: Doubles, rng: np.random.Generator, most: int = 7, draws: int = 10) -> int:
    """Return the number of clusters by the gap statistic (Tibshirani et al. 2001)."""
    values = (values - values.min()) / max(np.ptp(values), 1e-30)
    uniform = rng.random((draws, len(values)))
    gaps, deviations = [], []
    for clusters in range(1, min(most, len(values)) + 1):
        drawn = np.log([spread(row, clusters) for row in uniform])
        gaps.append(np.log(np.exp(drawn).mean()) - np.log(spread(values, clusters)))
        deviations.append(drawn.std() * np.sqrt(1 + 1 / draws))
    return next((k + 1 for k in range(len(gaps) - 1) if gaps[k] >= gaps[k + 1] - deviations[k + 1]), 1)


def upper_cluster(values: Doubles) -> Bools:
    """Return which values are in the upper of two clusters."""
    found = KMeans(2, n_init=5, random_state=0).fit(values[:, None])
    return np.asarray(found.labels_ == found.cluster_centers_[:, 0].argmax())
