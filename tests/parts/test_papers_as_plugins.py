"""Eight parts written outside the package, in tests/plugins/: each runs, and resumes exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register, testing
from cbdsl.algorithm.aggregators import TrustedReference
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.helpers import blobs, perceptron, run_until, small_spec
from support.outside_parts import forget_guests

FOLDER = Path(__file__).parents[1] / "plugins"
ATTACKED = {"attack__byzantine": 2, "method": "fedavg"}
RUNS: dict[str, dict[str, Any]] = {
    "moon": {"method": "moon"},
    "fldetector": {**ATTACKED, "attack__name": "sign-flip", "defence__aggregator": "fldetector", "rounds": 7},
    "lasa": {**ATTACKED, "attack__name": "sign-flip", "defence__aggregator": "lasa"},
    "mpaf": {**ATTACKED, "attack__name": "mpaf", "defence__aggregator": "trimmed-mean"},
    "multi_worker": {"selection__name": "below-mean"},
    "personal": {"method": "mixed-own", "data__local_test": 0.2},
    "oscillator": {**ATTACKED, "attack__name": "oscillator", "participation": 5},
    "on_demand": {"method": "fedavg", "data__partition": "drawn"},
}
CHECKS = {
    "moon": (testing.check_method, "moon"),
    "fldetector": (testing.check_aggregator, "fldetector"),
    "lasa": (testing.check_aggregator, "lasa"),
    "mpaf": (testing.check_attack, "mpaf"),
    "multi_worker": (testing.check_selection, "below-mean"),
    "personal": (testing.check_method, "mixed-own"),
    "oscillator": (testing.check_attack, "oscillator"),
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    forget_guests()


def spec_of(name: str, **more: object) -> cbdsl.Spec:
    spec = small_spec(**{"rounds": 4, **RUNS[name], "plugins": [str(FOLDER / f"{name}.py")], **more})
    return spec.with_settings({"options.fldetector.window": 2}) if name == "fldetector" else spec


def test_a_part_takes_at_most_forty_lines() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert lengths.keys() == {*RUNS, "quasi_newton"}
    assert max(lengths.values()) <= 40, lengths


@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_laws(name: str) -> None:
    register.load([str(FOLDER / f"{name}.py")])
    check, part = CHECKS[name]
    check(part)


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_a_resumed_run_has_the_same_digits(name: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    spec = spec_of(name)
    whole = cbdsl.run(spec, **parts)
    run_until(2, spec, out=tmp_path / "run", **parts)
    assert cbdsl.resume(tmp_path / "run", **parts).weights.tobytes() == whole.weights.tobytes()


def test_moon_without_its_term_is_fedavg() -> None:
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    plain = cbdsl.run(small_spec(rounds=3, method="fedavg", engine="torch"), **parts)
    none = cbdsl.run(spec_of("moon", rounds=3).with_settings({"options.moon.mu": 0.0}), **parts)
    assert none.weights.tobytes() == plain.weights.tobytes()
    assert cbdsl.run(spec_of("moon", rounds=3), **parts).weights.tobytes() != plain.weights.tobytes()


def test_fldetector_finds_the_workers_that_do_not_do_what_their_last_update_predicts() -> None:
    register.load([str(FOLDER / "fldetector.py")])
    rule = register.aggregator.make("fldetector", {"window": 3})
    rng, weights, memory = np.random.default_rng(0), np.ones(30), dict[str, Any]()
    for number in range(1, 12):  # F = |w|^2 / 2, so that every honest gradient is w and the curvature is 1
        rows = weights - 0.1 * weights + 1e-3 * rng.normal(size=(10, 30))
        rows[[2, 5]] += rng.normal(size=(2, 30))  # attackers do something else every time
        trust = TrustedReference(
            weights.astype(np.float32), lambda: None, lambda _: None,  # type: ignore[arg-type, return-value]
            np.ones(10), np.arange(10, dtype=np.int32), number, np.random.default_rng(number), memory=memory,
        )  # fmt: skip
        weights = rule(rows, 2, trust)
    assert np.flatnonzero(memory["out"]).tolist() == [2, 5]


def test_lasa_drops_what_is_too_long_or_has_other_signs_layer_by_layer() -> None:
    register.load([str(FOLDER / "lasa.py")])
    rng = np.random.default_rng(1)
    rows = np.abs(rng.normal(size=(9, 400)))
    rows[0, 200:] *= -1  # other signs in the second layer alone
    trust = TrustedReference(
        np.zeros(400, np.float32), lambda: None, lambda _: None,  # type: ignore[arg-type, return-value]
        layers=((0, 200), (200, 400)),
    )  # fmt: skip
    found = register.aggregator.get("lasa")(rows, 1, trust)
    clipped = rows * np.minimum(1, np.median(np.linalg.norm(rows, axis=1)) / np.linalg.norm(rows, axis=1))[:, None]
    np.testing.assert_allclose(found[200:].min(), clipped[1:, 200:].mean(0).min(), rtol=0.5)
    assert (found > 0).all()


def test_attackers_of_mpaf_pull_to_the_same_model() -> None:
    stage = Experiment.prepare(resolve(spec_of("mpaf")), UserParts(model=perceptron, data=blobs()), 1)
    state = stage.first_state()
    stage.swarm.report(stage.server.order(state))
    first, second = (upload for _, upload in sorted(stage.swarm.upload(stage.byzantine).items()))
    np.testing.assert_array_equal(first, second)
    assert np.linalg.norm(first) > 1e5


def test_the_curvature_of_a_quadratic_is_found_along_the_steps() -> None:
    register.load([str(FOLDER / "fldetector.py")])
    curvature = sys.modules["quasi_newton"].curvature
    hessian = np.diag([1.0, 2.0, 5.0])
    moved = np.random.default_rng(2).normal(size=(3, 3))
    np.testing.assert_allclose(curvature(moved, moved @ hessian, moved[-1]), hessian @ moved[-1], rtol=1e-9)
