"""Runs without a scoring set, and wrong arguments of `cbdsl.run`."""

from __future__ import annotations

from typing import Any

import pytest

import cbdsl
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as

NONE: dict[str, object] = {"shared": "none", "data.shared_scoring": 0}


@pytest.mark.parametrize(
    "settings", [{}, {"method": "fedavg"}, {"data.holdout": 0, "data.shared_training": 0}, {"attack.byzantine": 1}]
)
def test_where_nobody_scores_on_it_there_need_be_no_scoring_set(settings: dict[str, object]) -> None:
    spec = small_spec(rounds=1).with_settings({**NONE, **settings})
    summary = cbdsl.run(spec, model=perceptron, data=blobs(), baseline=True).summary
    assert (summary.server_alone is None) == (spec.data.shared_training == 0)


def test_who_scores_needs_a_scoring_set() -> None:
    with refused_as("conflict", "data.shared_scoring"):
        cbdsl.run(small_spec(data__shared_scoring=0), model=perceptron, data=blobs())
    zeno = small_spec(method="fedavg", defence__aggregator="zeno").with_settings(NONE)
    with refused_as("conflict", "zeno", "data.shared_scoring"):
        cbdsl.run(zeno, model=perceptron, data=blobs())


@pytest.mark.parametrize("given", [{"method": "fedavg"}, None, 3])
def test_a_run_takes_a_spec_or_a_name(given: Any) -> None:  # noqa: ANN401
    with refused_as("wrong-type", "cbdsl.Spec", given):
        cbdsl.run(given)


def test_a_data_file_that_is_not_there_is_called_that() -> None:
    with refused_as("missing-file", "missing.npz"):
        cbdsl.run(small_spec(data__source="missing.npz"))
