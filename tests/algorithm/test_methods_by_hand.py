"""FedProx, SCAFFOLD, FedAvgM and FedAdam against their papers' pseudo-code, written out again in float64."""

from __future__ import annotations

import numpy as np
import pytest

from cbdsl.algorithm.ledger import by_kind, payload
from cbdsl.algorithm.methods import FedAdam, FedAvgM, FedProx, Scaffold
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import Doubles
from support.refusals import refused_as
from support.tiny_problem import RATE, STEPS, gradient, played, tiny_stage

ENGINES = ["native", "torch"]
BOTH, SECOND = (0, 1), (1,)


def near(found: object, expected: Doubles) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=3e-6)


def descend(start: Doubles, worker: int, mu: float = 0.0, correction: Doubles | float = 0.0) -> Doubles:
    """Gradient descent on F_i(w) + mu/2 |w - start|^2, every gradient corrected by a constant."""
    w = start.copy()
    for _ in range(STEPS):
        w = w - RATE * (gradient(w, worker) + mu * (w - start) + correction)
    return w


@pytest.mark.parametrize("engine", ENGINES)
def test_fedavg_is_the_mean_of_gradient_descents(engine: str) -> None:
    stage = tiny_stage("fedavg", engine=engine)
    w = stage.initial[0].astype(np.float64)
    for model in played(stage, [BOTH, BOTH])[0]:
        w = (descend(w, 0) + descend(w, 1)) / 2
        near(model, w)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedprox_descends_with_the_proximal_term(engine: str) -> None:
    stage = tiny_stage("fedprox", engine=engine, options__fedprox__mu=0.7)
    w = stage.initial[0].astype(np.float64)
    for model in played(stage, [BOTH, BOTH])[0]:
        w = (descend(w, 0, mu=0.7) + descend(w, 1, mu=0.7)) / 2
        near(model, w)
    assert np.abs(w - played(tiny_stage("fedavg", engine=engine), [BOTH, BOTH])[0][-1]).max() > 0.01


@pytest.mark.parametrize("engine", ENGINES)
def test_scaffold_is_option_two_of_algorithm_one(engine: str) -> None:
    """Karimireddy et al. 2020: N = 2, S = {1, 2}, then {2} alone, then both again; eta_g = 1, K = 3."""
    stage = tiny_stage("scaffold", engine=engine, rounds=3)
    x = stage.initial[0].astype(np.float64)
    c, own = np.zeros(6), [np.zeros(6), np.zeros(6)]
    rounds = [BOTH, SECOND, BOTH]
    for taking_part, model in zip(rounds, played(stage, rounds)[0], strict=True):
        moves, changes = [], []
        for i in taking_part:
            y = descend(x, i, correction=c - own[i])
            after = own[i] - c + (x - y) / (STEPS * RATE)
            moves.append(y - x)
            changes.append(after - own[i])
            own[i] = after
        x = x + np.mean(moves, axis=0)
        c = c + len(taking_part) / 2 * np.mean(changes, axis=0)
        near(model, x)
    near(stage.memory_swarm.particles.velocities, np.array(own))
    near(c, np.mean(own, axis=0))  # the invariant of the paper: c is the mean of all c_i


def test_scaffold_first_round_is_fedavgs() -> None:
    """All control variates are 0 before the first round, so it differs from FedAvg from the second on."""
    fedavg, scaffold = (played(tiny_stage(name), [BOTH, BOTH])[0] for name in ("fedavg", "scaffold"))
    np.testing.assert_array_equal(fedavg[0], scaffold[0])
    assert np.abs(fedavg[1] - scaffold[1]).max() > 1e-3


def test_scaffold_estimates_the_gradient_under_momentum() -> None:
    """With momentum b a constant gradient g moves a worker by about K rate / (1 - b) g: c_i stays of g's size."""
    stage = tiny_stage("scaffold", local__momentum=0.9, local__epochs=60, local__learning_rate=1e-4)
    played(stage, [BOTH])
    near_gradient = np.array([gradient(stage.initial[0].astype(np.float64), worker) for worker in BOTH])
    np.testing.assert_allclose(stage.memory_swarm.particles.velocities, near_gradient, rtol=0.2, atol=0.01)


def test_scaffold_sends_twice_the_bytes_of_fedavg() -> None:
    (_, fedavg), (_, scaffold) = (played(tiny_stage(name), [BOTH, SECOND]) for name in ("fedavg", "scaffold"))
    for plain, double in zip(fedavg, scaffold, strict=True):
        assert payload(double, "up") == 2 * payload(plain, "up")
        assert by_kind(double)["broadcast"].payload == 2 * by_kind(plain)["broadcast"].payload
        assert by_kind(double)["upload"].messages == by_kind(plain)["upload"].messages
        assert by_kind(double)["order"] == by_kind(plain)["order"]
    assert payload(fedavg[0], "up") == 2 * 6 * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_fedavgm_is_heavy_ball_at_the_server(engine: str) -> None:
    """Hsu et al. 2019: v <- beta v + mean of (w_t - w_i), w <- w - v."""
    stage = tiny_stage("fedavgm", engine=engine, rounds=3, options__fedavgm__beta=0.6)
    w, v = stage.initial[0].astype(np.float64), np.zeros(6)
    for model in played(stage, [BOTH, BOTH, BOTH])[0]:
        v = 0.6 * v + w - (descend(w, 0) + descend(w, 1)) / 2
        w = w - v
        near(model, w)


def test_fedavgm_by_hand() -> None:
    """beta 1/2, rate 2: m = 0/2 + 3 = 3, w = 1 + 6 = 7; then m = 3/2 + (6 - 7) = 1/2, w = 7 + 1 = 8."""
    method, memory = FedAvgM(beta=0.5, rate=2.0), FedAvgM().memory(1)
    one, memory = method.step(np.array([1.0], np.float32), memory, np.array([4.0], np.float32), 1.0)
    two, memory = method.step(one, memory, np.array([6.0], np.float32), 1.0)
    assert (one[0], two[0], memory[0]) == (7.0, 8.0, 0.5)
    assert one.dtype == two.dtype == memory.dtype == np.float32


@pytest.mark.parametrize("engine", ENGINES)
def test_fedadam_is_algorithm_two(engine: str) -> None:
    """Reddi et al. 2021: v_{-1} = tau^2, no bias correction; eta 0.1, beta_1 0.9, beta_2 0.99, tau 0.01."""
    options = {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
    stage = tiny_stage(
        "fedadam", engine=engine, **{f"options__fedadam__{key}": value for key, value in options.items()}
    )
    x, m, v = stage.initial[0].astype(np.float64), np.zeros(6), np.full(6, 0.01**2)
    for model in played(stage, [BOTH, SECOND])[0]:
        ends = [descend(x, 0), descend(x, 1)] if np.all(m == 0) else [descend(x, 1)]
        delta = np.mean([end - x for end in ends], axis=0)
        m = 0.9 * m + 0.1 * delta
        v = 0.99 * v + 0.01 * delta**2
        x = x + 0.1 * m / (np.sqrt(v) + 0.01)
        near(model, x)


def test_fedadam_by_hand() -> None:
    """beta_1 = beta_2 = 1/2, tau 1, eta 8, so v_{-1} = 1.

    Round 1, step 1: m = 1/2, v = 1/2 + 1/2 = 1, w = 0 + 8 (1/2) / (1 + 1) = 2.
    Round 2, step 7: m = 1/4 + 7/2 = 3.75, v = 1/2 + 49/2 = 25, w = 2 + 8 (3.75) / (5 + 1) = 7.
    """
    method = FedAdam(rate=8.0, beta1=0.5, beta2=0.5, tau=1.0)
    memory = method.memory(1)
    assert memory.tolist() == [[0.0], [1.0]]
    one, memory = method.step(np.zeros(1, np.float32), memory, np.array([1.0], np.float32), 1.0)
    assert (one[0], *memory[:, 0]) == (2.0, 0.5, 1.0)
    two, memory = method.step(one, memory, np.array([9.0], np.float32), 1.0)
    assert (two[0], *memory[:, 0]) == (7.0, 3.75, 25.0)
    assert two.dtype == memory.dtype == np.float32


def test_without_a_proximal_term_fedprox_is_fedavg_to_the_bit() -> None:
    fedavg = played(tiny_stage("fedavg"), [BOTH, SECOND])[0]
    fedprox = played(tiny_stage("fedprox", options__fedprox__mu=0.0), [BOTH, SECOND])[0]
    np.testing.assert_array_equal(fedavg, fedprox)


def test_without_momentum_fedavgm_is_fedavg_up_to_rounding() -> None:
    fedavg = played(tiny_stage("fedavg"), [BOTH, SECOND])[0]
    fedavgm = played(tiny_stage("fedavgm", options__fedavgm__beta=0.0), [BOTH, SECOND])[0]
    np.testing.assert_allclose(fedavg, fedavgm, rtol=0, atol=1e-6)


def test_scaffold_step_by_hand() -> None:
    """D = 2, half of the workers: c = (1, 1) + 1/2 (4, -2) = (3, 0)."""
    method = Scaffold()
    combined = np.array([7, 8, 4, -2], np.float32)
    model, control = method.step(np.zeros(2, np.float32), np.ones(2, np.float32), combined, 0.5)
    assert (model.tolist(), control.tolist()) == ([7.0, 8.0], [3.0, 0.0])
    assert method.broadcast(model, control).tolist() == [7.0, 8.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (FedProx, {"mu": -0.1}),
        (FedProx, {"mu": float("nan")}),
        (FedAvgM, {"beta": 1.0}),
        (FedAvgM, {"rate": 0.0}),
        (FedAdam, {"beta1": 1.0}),
        (FedAdam, {"beta2": -0.1}),
        (FedAdam, {"tau": 0.0}),
        (FedAdam, {"rate": float("nan")}),
        (FedAdam, {"rate": float("inf")}),
    ],
)
def test_impossible_settings_are_refused(kind: type, settings: dict[str, float]) -> None:
    with refused_as("out-of-range", next(iter(settings))):
        kind(**settings)


@pytest.mark.parametrize("engine", ENGINES)
def test_scaffold_lives_with_workers_that_diverge(engine: str) -> None:
    """A control variate that is not finite corrects nothing; the engines would refuse it."""
    stage = tiny_stage("scaffold", engine=engine, rounds=3)
    plain = played(tiny_stage("scaffold", engine=engine, rounds=3), [SECOND, SECOND])[0]
    broken = KeptRows(np.array([0], np.int32), {"velocities": np.full((1, stage.engine.size), np.nan, np.float32)})
    stage.memory_swarm.restore(broken, 0, stage.initial[0])
    np.testing.assert_array_equal(played(stage, [SECOND, SECOND])[0], plain)
    played(stage, [BOTH, BOTH])
    assert np.isfinite(stage.memory_swarm.particles.velocities).all()
