"""What a partition says about samples reaches the workers, and them alone."""

from __future__ import annotations

import numpy as np

import cbdsl
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.helpers import blobs, small_spec


def test_workers_train_on_what_a_feature_skew_makes_of_their_samples() -> None:
    data = blobs()
    plain, skewed = (
        Experiment.prepare(resolve(small_spec(model="softmax", data__partition=name)), UserParts(data=data))
        for name in ("iid", "feature")
    )
    held = np.concatenate(skewed.split.workers)
    np.testing.assert_array_equal(held, np.concatenate(plain.split.workers))
    others = np.setdiff1d(np.arange(len(data.train)), held)
    assert plain.dataset.train is data.train
    assert not np.isclose(skewed.dataset.train.features[held], data.train.features[held]).all(axis=1).any()
    np.testing.assert_array_equal(skewed.dataset.train.features[others], data.train.features[others])
    assert skewed.dataset.test is data.test


def test_the_strength_of_a_skew_is_a_setting_of_the_run() -> None:
    data = blobs()
    results = [
        cbdsl.run(small_spec(model="softmax", data__partition=name, rounds=2, options=options), data=data)
        for name, options in (
            ("iid", {}),
            ("feature", {"feature": {"noise": 0.0, "shift": 0.0}}),
            ("feature", {"feature": {"noise": 3.0}}),
        )
    ]
    weights = [result.weights for result in results]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[1], weights[2])
