"""Weights of eight bits cost little: measured on MNIST, in the engine and in C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.data.dataset import Dataset
from cbdsl.export.c_source import c_file
from cbdsl.export.predict import Unseen
from cbdsl.export.steps import program_of
from cbdsl.export.write import measure_rounding, scoring_set
from cbdsl.models.saved_model import SavedModel
from support.c_programs import compiled, needs_cc

pytestmark = pytest.mark.slow

MOST_LOST = 0.005


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    folder = tmp_path_factory.mktemp("int8") / "run"
    settings = {"workers": 4, "rounds": 2, "data.samples_per_worker": 1500}
    cbdsl.run(cbdsl.preset("strong-iid").with_settings(settings), method="fedavg", out=folder)
    model: SavedModel = cbdsl.load(folder)
    return model


def test_eight_bits_lose_at_most_half_a_point(trained: SavedModel, mnist: Dataset) -> None:
    everything = Unseen(mnist.test.features, mnist.test.labels)
    _, before, after = measure_rounding(trained, everything)
    assert before > 0.93
    assert abs(before - after) <= MOST_LOST
    _, before, after = measure_rounding(trained, scoring_set(Path(trained.source), trained))
    assert abs(before - after) <= MOST_LOST


@needs_cc
def test_eight_bits_in_c_lose_no_more(trained: SavedModel, mnist: Dataset, tmp_path: Path) -> None:
    images, labels = mnist.test.features[:2000], mnist.test.labels[:2000]
    made = [c_file(program_of(trained, raw=True), int8) for int8 in (False, True)]
    runs = [compiled(one.text, tmp_path, 784, 10) for one in made]
    before, after = (float(np.mean(run(images).argmax(axis=1) == labels)) for run in runs)
    assert abs(before - after) <= MOST_LOST
    assert made[1].constants < 0.27 * made[0].constants
