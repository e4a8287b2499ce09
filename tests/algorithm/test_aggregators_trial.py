"""The server of these tests stands at 0; F is the squared distance to (1, 1, ...)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cbdsl import register
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.aggregation import combine, trust
from support.refusals import refused_as


def test_bant_by_hand() -> None:
    # F is 1 at 0, and 0, 0.25 and 4 at the models: the gains are 1, 0.75 and none.
    known = trust(size=1)
    first = combine("bant", [[1.0], [0.5], [-1.0]], 1, known)
    one, half = 0.5 / 3 + 0.5 * 4 / 7, 0.5 / 3 + 0.5 * 3 / 7
    assert first == pytest.approx([(one + half / 2) / (one + half)])
    # Then nobody gains but the third. Its trust had halved to 1/6; it becomes 1/12 + 1/2, and it counts alone.
    assert combine("bant", [[-1.0], [-2.0], [1.0]], 1, known) == pytest.approx([1.0])
    assert known.memory["workers"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(known.memory["trust"], [one / 2, half / 2, 1 / 12 + 1 / 2])


def test_bant_averages_all_by_their_trust_if_nobody_gains() -> None:
    assert combine("bant", [[0.0], [-1.0], [-1.0]], 1, trust(size=1)) == pytest.approx([-2 / 3])


def test_bant_remembers_workers_that_miss_a_round() -> None:
    known = trust(size=1)
    for workers in ([0, 1], [1, 7]):
        rows = np.array([[1.0], [-1.0]])
        register.aggregator.get("bant")(rows, 0, replace(known, workers=np.array(workers), sizes=np.ones(2)))
    assert known.memory["workers"].tolist() == [0, 1, 7]
    np.testing.assert_allclose(known.memory["trust"], [0.75, 0.625, 0.25])


def test_auto_bant_by_hand() -> None:
    # The mixture of 0 and 2 in halves is at the target: its loss is 0, and no other is tried.
    assert combine("auto-bant", [[0.0], [2.0]], 0, trust(size=1)) == pytest.approx([1.0])
    # Of 1 and -1 the first's share grows. 500 samples in batches of 32, five times, are 80 steps; 79 lead to the last
    # that is tried. The second's share, then below 1/4, is dropped.
    shares = np.array([0.5, 0.5])
    for _ in range(79):
        slope = 2 * (shares[0] - shares[1] - 1)
        towards = shares * np.exp([-slope, slope])
        shares = 0.95 * shares + 0.05 * towards / towards.sum()
    assert shares[1] < 0.25
    assert combine("auto-bant", [[1.0], [-1.0]], 0, trust(size=1)) == pytest.approx([shares[0]], rel=1e-5)


def test_fedgreed_stops_at_the_first_mean_that_is_worse() -> None:
    # F: 0.04, 0.09, 0.16, 25. The means of the first are 0.8, 1.05 and 1.1667, and that is worse.
    assert combine("fedgreed", [[0.8], [1.3], [1.4], [-4.0]], 1, trust(size=1)) == pytest.approx([1.05])


def test_loss_clusters_averages_the_low_losses() -> None:
    # F: 0, 1, 4, 100. The border is 50, then (5/3 + 100)/2. Without the last it is 2, then (0.5 + 4)/2.
    assert combine("loss-clusters", [[1.0], [0.0], [3.0], [11.0]], 1, trust(size=1)) == pytest.approx([4 / 3])
    assert combine("loss-clusters", [[1.0], [0.0], [3.0]], 1, trust(size=1)) == pytest.approx([0.5])


def test_loss_clusters_weighs_by_samples() -> None:
    known = replace(trust(size=1), sizes=np.array([3.0, 1.0]))
    assert combine("loss-clusters", [[0.5], [1.5]], 0, known) == pytest.approx([0.75])


@pytest.mark.parametrize("name", ["bant", "auto-bant", "fedgreed", "loss-clusters"])
def test_models_without_a_finite_loss_have_no_weight(name: str) -> None:
    rows = [[0.8, 0.8], [0.9, 0.9], [3e38, 3e38], [-1e30, 1e30]]
    assert combine(name, rows, 2) == pytest.approx([0.85, 0.85], abs=0.06)
    assert combine(name, rows[2:], 1) == [0.0, 0.0]


def test_a_bucket_is_not_a_worker_that_bant_could_remember() -> None:
    with refused_as("conflict", "bant", "bucket"):
        resolve(Spec().with_settings({"method": "fedavg", "defence.aggregator": "bucketing+bant"}))
