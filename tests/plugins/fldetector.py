"""FLDetector (Zhang et al. 2022): drops workers whose updates are not what their last one and the curvature predict."""

from __future__ import annotations

import numpy as np
from quasi_newton import count_clusters, curvature, upper_cluster  # type: ignore[import-not-found]  # a file beside this one

import cbdsl
from cbdsl.arrays import Doubles


@cbdsl.register.aggregator("fldetector")
def fldetector(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference, *, window: int = 10) -> Doubles:  # noqa: ARG001
    """g_i is predicted as its last value + H (w_t - w_{t-1}), H by L-BFGS; the score is the mean relative error.

    Where the gap statistic finds more than one cluster of scores, those of the upper of two are left out from then on.
    """
    memory, here, w = trust.memory, trust.workers, trust.reference.astype(np.float64)
    if len(memory.get("out", here)) <= max(here):
        memory.clear()  # a worker joined
    out = memory.get("out", np.zeros(max(here) + 1, bool))
    moved, changed, errors = (memory.get(name, np.zeros((0, 0))) for name in ("moved", "changed", "errors"))
    gradients = np.full((len(out), len(w)), np.nan)
    gradients[here] = w - rows
    if len(moved):
        predicted = memory["gradients"] + curvature(moved, changed, w - memory["reference"])
        wrong = np.linalg.norm(gradients - predicted, axis=1)
        errors = np.vstack([*errors, wrong / np.nansum(wrong)])[-window:]
        scores = errors.mean(0)  # NaN of a worker that missed a round
        if len(errors) == window and np.isfinite(scores).all() and count_clusters(scores, trust.rng) > 1:
            out = out | upper_cluster(scores)
    mean = (w - rows)[~out[here] if (~out[here]).any() else slice(None)].mean(0)
    if memory and (w != memory["reference"]).any():
        moved = np.vstack([*moved, w - memory["reference"]])[-window:]
        changed = np.vstack([*changed, mean - memory["mean"]])[-window:]
    memory.update(moved=moved, changed=changed, errors=errors, gradients=gradients, reference=w, mean=mean, out=out)
    return np.asarray(w - mean)
