"""Four more methods: FedDyn, Ditto with personal models, LB-DSL, and DP-FedAvg with differential privacy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.algorithm.methods import AveragingMethod, ServerStep, SwarmMethod
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.worker_round import WorkerRound
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, missing

_LEAST_NOISE = 1e-6  # with less, epsilon is in the trillions, and the accountant divides by 0


@register.method("feddyn", ranges={"alpha": (0, 1e6)})
@dataclass(frozen=True)
class FedDyn(AveragingMethod):
    """FedAvg with dynamic regularisation: workers minimise F_i(w) - <g_i, w> + alpha/2 |w - w_t|^2.

    Then g_i <- g_i - alpha (w_i - w_t). The server has h <- h - alpha / U * sum of (w_i - w_t), U counting all workers,
    and w_{t+1} = mean of w_i - h / alpha. A worker keeps g_i as its personal best, and the mean is the aggregator's.
    """

    alpha: float = 0.1

    title = "FedDyn (Acar et al. 2021)"
    remembers = ("personal_best", "personal_score")  # g_i, and whether there is one

    def __post_init__(self) -> None:
        _check_positive("alpha of feddyn", self.alpha)

    def memory(self, size: int) -> Floats:
        """Return h, (D,)."""
        return np.zeros(size, np.float32)

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Train with -g_i and alpha (w - w_t) added to every gradient; update g_i, which is 0 after a divergence."""
        start = work.from_server(received)
        own = np.where(np.isinf(rows.personal_score)[:, None], np.float32(0), rows.personal_best)
        own = np.where(np.isfinite(own).all(1, keepdims=True), own, np.float32(0))
        trained = work.train(start, proximal=self.alpha, corrections=-own)
        own = own - np.float32(self.alpha) * (trained - start)
        return replace(work.place(rows, trained), personal_best=own, personal_score=np.zeros(len(own)))

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Compute h <- h - alpha * share * mean step, and w <- mean - h / alpha."""
        step = seen.combined - seen.current.astype(np.float64)
        state = seen.memory - self.alpha * seen.share * step
        return (seen.combined - state / self.alpha).astype(np.float32), state.astype(np.float32)


@register.method("ditto", ranges={"tie": (0, 1e6)})
@dataclass(frozen=True)
class Ditto(AveragingMethod):
    """FedAvg, and a model v_i of each worker's own, trained on F_i(v) + lambda/2 |v - w_t|^2 (the setting `tie`).

    In each round v_i is trained further, with the same batches as w_t. It is never sent; it is the worker's personal
    best.
    """

    tie: float = 0.1  # lambda

    title = "Ditto (Li et al. 2021)"
    remembers = ("personal_best",)

    def __post_init__(self) -> None:
        _check_positive("tie of ditto", self.tie)

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Train w_t as FedAvg does, and v_i with lambda (v - w_t) added to every gradient."""
        start = work.from_server(received)
        own = np.where(np.isfinite(rows.personal_best).all(1, keepdims=True), rows.personal_best, start)
        pull = np.float32(self.tie) * (own - start)  # with `proximal`, which pulls to `own`, this is lambda (v - w_t)
        personal = work.train(own, proximal=self.tie, corrections=pull)
        return replace(work.place(rows, work.train(start)), personal_best=personal)

    def personal(self, rows: Particles) -> Floats:
        """Return v_i."""
        return rows.personal_best


@register.method("lb-dsl")
class LbDsl(SwarmMethod):
    """CB-DSL whose w^g is the mean of the three best personal bests, adopted if its score on D_sc is below F^g.

    Workers move by 0.2 v + r1 (w^p - w) + r2 (w^g - w), r1 ~ U(0, 1) and r2 ~ U(0, 2) per parameter, and then train.
    The selection is `best-mean`. This follows the paper, not the authors' script, which averages only the last layer.
    Unlike in the script, a score is a loss, claims are verified, and an uploaded personal best is not sent again.
    """

    title = "LB-DSL (Fan et al. 2024)"
    verifies = True
    selects = "best-mean"
    fixes = {  # noqa: RUF012 - a constant of the class
        "inertia": (0.2, 0.2), "cognitive": 1.0, "social": 2.0, "draw": "parameter", "sgd_from": "moved",
        "velocity": "swarm",
    }  # fmt: skip


@register.method("dp-fedavg", ranges={"clip": (0, 1e30), "noise": (0, 1e6)})
@dataclass(frozen=True)
class DpFedAvg(AveragingMethod):
    """FedAvg with central differential privacy: w_{t+1} = w_t + (sum of clipped steps + N(0, (z S)^2)) / C.

    A step w_i - w_t is clipped to length S (`clip`), z is `noise`, and C is the number of workers asked; all have equal
    weight. The server is trusted. The summary's epsilon, at `delta`, bounds what all global models reveal about whether
    a worker took part. It is computed by the Renyi accountant of opacus for workers drawn independently with the
    probability `participation` (the server draws a fixed number of them).
    """

    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    title = "DP-FedAvg (McMahan et al. 2018)"
    combines: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive("clip of dp-fedavg", self.clip)
        if not (0 <= self.noise < float("inf") and 0 < self.delta < 1):
            raise UserError(
                f"dp-fedavg needs noise of at least 0 and delta between 0 and 1; given {self.noise} and {self.delta}.",
                code="out-of-range",
            )

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Return w_t + the noisy mean of the clipped steps."""
        total = seen.rng.normal(0.0, self.noise * self.clip, len(seen.current))
        for upload in seen.uploads:
            total += clip_steps(upload[None].astype(np.float64) - seen.current, self.clip)[0]
        return (seen.current + total / seen.asked).astype(np.float32), seen.memory

    def epsilon(self, rounds: int, share: float) -> float:
        """Return epsilon after `rounds` rounds; infinite without noise."""
        try:
            from opacus.accountants.analysis import rdp  # noqa: PLC0415 - loads torch, and the server alone needs it
        except ModuleNotFoundError as error:
            raise missing("opacus", "privacy", "dp-fedavg states how private it is") from error
        if self.noise < _LEAST_NOISE:
            return float("inf")
        orders = [*(1 + order / 10 for order in range(1, 100)), *range(11, 64), 128, 256, 512]
        spent = rdp.compute_rdp(q=min(share, 1.0), noise_multiplier=self.noise, steps=rounds, orders=orders)
        return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=self.delta)[0])


def clip_steps(steps: Doubles, length: float) -> Doubles:
    """Return rows (k, D), those longer than `length` scaled down to it."""
    lengths = np.sqrt(np.einsum("ij,ij->i", steps, steps))
    return np.asarray(steps * np.minimum(1.0, length / np.maximum(lengths, 1e-300))[:, None])


def _check_positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{what} must be above 0; given {value}.", code="out-of-range")
