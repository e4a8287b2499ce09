"""FedDyn, Ditto, LB-DSL and DP-FedAvg against their papers' formulas, written out again in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.algorithm.methods import ServerStep
from cbdsl.algorithm.methods_more import DpFedAvg, clip_steps
from cbdsl.algorithm.rotation import Rotation
from cbdsl.algorithm.selection import BestMean, Candidate, RoundContext, VerifiedUpload
from cbdsl.algorithm.verification import Verifier
from cbdsl.runs.records import summary_rows
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.helpers import blobs, fresh_state, perceptron, small_spec
from support.refusals import refused_as
from support.tiny_problem import RATE, STEPS, gradient, played, tiny_stage

BOTH, SECOND = (0, 1), (1,)


def near(found: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=3e-6)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_feddyn_is_algorithm_one(engine: str) -> None:
    """Acar et al. 2021: m = 2 devices, both, then the second alone, then both; alpha = 0.4."""
    stage = tiny_stage("feddyn", engine=engine, rounds=3, options__feddyn__alpha=0.4)
    alpha, h, own = 0.4, np.zeros(6), [np.zeros(6), np.zeros(6)]
    server = stage.initial[0].astype(np.float64)
    rounds = [BOTH, SECOND, BOTH]
    for taking_part, model in zip(rounds, played(stage, rounds)[0], strict=True):
        trained = {}
        for device in taking_part:
            theta = server.copy()
            for _ in range(STEPS):
                theta = theta - RATE * (gradient(theta, device) - own[device] + alpha * (theta - server))
            own[device] = own[device] - alpha * (theta - server)
            trained[device] = theta
        h = h - alpha / 2 * sum(theta - server for theta in trained.values())
        server = sum(trained.values()) / len(trained) - h / alpha
        near(model, server)


def test_ditto_trains_a_model_of_each_workers_own_on_a_spring_to_the_global_one() -> None:
    """Li et al. 2021: v <- v - rate (grad F_i(v) + lambda (v - w_t)); w as in FedAvg; lambda = 0.5."""
    stage = tiny_stage("ditto", rounds=2, options__ditto__tie=0.5)
    models = played(stage, [BOTH, BOTH])[0]
    near(models, played(tiny_stage("fedavg", rounds=2), [BOTH, BOTH])[0])
    starts = [stage.initial[0].astype(np.float64), np.asarray(models[0], np.float64)]
    own = stage.memory_swarm.table.take("personal_best", BOTH)
    for worker in BOTH:
        v = starts[0].copy()
        for start in starts:
            for _ in range(STEPS):
                v = v - RATE * (gradient(v, worker) + 0.5 * (v - start))
        near(own[worker], v)


def test_the_selection_of_lb_dsl_takes_the_mean_of_the_three_best_if_it_beats_the_global_score() -> None:
    def score(model: Any) -> float:  # noqa: ANN401
        return float(np.abs(model).sum())

    state = fresh_state(np.full(2, 5.0, np.float32), 3.0)
    view = RoundContext(state, 1, Verifier(check=None, score=score))  # type: ignore[arg-type]
    believed = [
        VerifiedUpload(worker, 0.1, np.array(model, np.float32))
        for worker, model in enumerate([[0, 3], [3, 0], [0, 0]])
    ]
    selection = BestMean()
    assert selection.invite([Candidate(7, 9.9)], believed[:2], view) == 7  # whether it beats F^g or not
    assert selection.invite([Candidate(7, 0.1)], believed, view) is None
    made = selection.combine(believed, view)
    np.testing.assert_array_equal(made.model, np.ones(2))
    assert made.score == 2.0
    worse = [VerifiedUpload(0, 0.1, np.full(2, 4.0, np.float32))]
    assert selection.combine(worse, view).model is None


def test_lb_dsl_brings_its_selection_and_its_update_equation() -> None:
    spec = resolve(Spec(method="lb-dsl"))
    assert (spec.selection.name, spec.swarm.inertia, spec.swarm.draw) == ("best-mean", (0.2, 0.2), "parameter")
    assert resolve(spec.with_settings({"method": "cb-dsl"})).selection.name == "best"
    result = cbdsl.run(small_spec(method="lb-dsl", rounds=3), model=perceptron, data=blobs())
    assert len(result.rounds[0].accepted) == 3


def test_dp_fedavg_adds_clipped_steps_and_noise_and_divides_by_those_asked() -> None:
    """w = 1; steps (3, 4) and (0.3, 0.4) clipped to 1: (0.6, 0.8) and as it is; four asked; noise of the generator."""
    current = np.ones(2, np.float32)
    uploads = tuple(np.array(step, np.float32) + current for step in ([3, 4], [0.3, 0.4]))
    seen = ServerStep(
        current, np.zeros(0, np.float32), uploads[0], 0.5, 1, (0, 1), 4, uploads, np.random.default_rng(3)
    )
    noise = np.random.default_rng(3).normal(0, 2.0, 2)
    near(DpFedAvg(clip=1.0, noise=2.0).update(seen)[0], 1 + (np.array([0.9, 1.2]) + noise) / 4)


def test_epsilon_is_that_of_the_gaussian_mechanism_and_less_where_few_take_part() -> None:
    pytest.importorskip("opacus", reason="opacus is not installed: pip install 'cbdsl[privacy]'")
    method = DpFedAvg(noise=2.0, delta=1e-5)
    assert DpFedAvg(noise=1e-300).epsilon(1, 1.0) == float("inf")
    # One round of everybody, RDP(a) = a / (2 z^2): min over a of a / 8 + log(1 - 1/a) - (log(delta) + log(a)) / (a - 1)
    orders = np.arange(1.1, 200, 0.01)
    bound = orders / 8 + np.log1p(-1 / orders) - (np.log(1e-5) + np.log(orders)) / (orders - 1)
    assert method.epsilon(1, 1.0) == pytest.approx(bound.min(), rel=1e-2)
    assert method.epsilon(10, 0.1) < method.epsilon(10, 1.0)
    assert DpFedAvg(noise=0.0).epsilon(1, 1.0) == np.inf
    result = cbdsl.run(small_spec(method="dp-fedavg", rounds=2), model=perceptron, data=blobs())
    assert result.summary.epsilon == pytest.approx(DpFedAvg().epsilon(2, 1.0))
    assert f"epsilon {result.summary.epsilon:.4g} " in dict(summary_rows(result.summary))["privacy"]


def test_what_has_no_effect_or_no_meaning_is_refused() -> None:
    with refused_as("no-effect", "krum"):
        resolve(small_spec(method="dp-fedavg", defence__aggregator="krum"))
    for settings in ({"options.dp-fedavg.clip": 0.0}, {"options.dp-fedavg.delta": 1.0}):
        with refused_as("out-of-range"):
            resolve(small_spec(method="dp-fedavg").with_settings(settings))
    with refused_as("out-of-range", "noise needs a clip"):
        Rotation(noise=1.0)


def test_rotation_with_clip_and_noise_uses_steps_only_in_that_form() -> None:
    steps = np.array([[3.0, 4.0], [0.3, 0.4]])
    near(clip_steps(steps, 1.0), [[0.6, 0.8], [0.3, 0.4]])
    spec = small_spec(method="restart", selection__name="rotation", rounds=3)
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    plain = cbdsl.run(spec, **parts)
    wide = cbdsl.run(spec.with_settings({"options.rotation.clip": 1e9}), **parts)
    noisy = cbdsl.run(spec.with_settings({"options.rotation.clip": 0.1, "options.rotation.noise": 1.0}), **parts)
    again = cbdsl.run(spec.with_settings({"options.rotation.clip": 0.1, "options.rotation.noise": 1.0}), **parts)
    np.testing.assert_allclose(plain.weights, wide.weights, atol=1e-6)
    assert np.abs(noisy.weights - plain.weights).max() > 1e-3
    assert noisy.weights.tobytes() == again.weights.tobytes()
