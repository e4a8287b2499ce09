"""The audit finds a backdoor planted here, removes it, and reports nothing for a clean model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from cbdsl.algorithm.worker_round import draw_batches
from cbdsl.arrays import Floats, Samples
from cbdsl.attacks.protocol import stamp_trigger
from cbdsl.data.dataset import Dataset
from cbdsl.engines.engine import Sgd
from cbdsl.errors import UserError
from cbdsl.rng import stream
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.spec import LocalSpec
from cbdsl.studies import audit
from cbdsl.studies.audit import audit_model, deviations_below, find_patch, is_suspicious
from support.helpers import small_spec
from support.refusals import refused_as
from support.small_pictures import picture_data


@cache
def stage() -> Experiment:
    settings = {"model": "mlp", "attack__name": "backdoor", "attack__byzantine": 1, "local__momentum": 0.9}
    spec = small_spec(**settings, data__shared_training=60, data__shared_scoring=60, data__holdout=160)
    return Experiment.prepare(resolve(spec), UserParts(data=picture_data()), threads=1)


def trained(share: float) -> Floats:
    """A model of the workers' samples, a share of them with the trigger of `backdoor` and the label 0."""
    experiment = stage()
    samples = experiment.dataset.train.taken(np.concatenate(experiment.split.workers))
    marked = samples.taken(np.arange(int(share * len(samples)), dtype=np.int32))
    lessons = Samples.joined([samples, Samples(stamp_trigger(marked.features), np.zeros_like(marked.labels))])
    local = LocalSpec(epochs=20, batch_size=10)
    batches = draw_batches(np.arange(len(lessons), dtype=np.int32), local, stream(0, "batches"))
    return np.asarray(
        experiment.engine.train(experiment.initial, lessons, batches[None], Sgd(0.05, 0.9))[0], np.float32
    )


@pytest.fixture(autouse=True)
def _fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_STEPS", 150)
    monkeypatch.setattr(audit, "_REFERENCES", 1)


def test_a_clean_model_is_not_suspicious_and_not_changed() -> None:
    report, repaired = audit_model(stage(), trained(0), repair=True)
    assert (report.suspicious, report.left, report.after, repaired) == ((), (), None, None)
    assert min(one.ratio for one in report.classes) > audit.SMALL
    assert report.before.holdout_accuracy > 0.95


def test_a_planted_backdoor_is_found_and_removed_and_accuracy_stays() -> None:
    weights = trained(0.5)
    before = weights.copy()
    report, repaired = audit_model(stage(), weights, repair=True)
    assert (report.suspicious, report.left) == ((0,), ())
    assert report.before.attack_success is not None
    assert report.before.attack_success > 0.9
    assert report.before.patch_success[0] > 0.7
    assert report.after is not None
    assert report.after.attack_success is not None
    assert report.after.attack_success < 0.1
    assert report.after.patch_success[0] < 0.1
    assert report.after.holdout_accuracy > 0.95
    assert repaired is not None
    np.testing.assert_array_equal(weights, before)
    again, same = audit_model(stage(), weights, repair=True)
    assert again == report
    assert same is not None
    np.testing.assert_array_equal(same, repaired)


def test_pruning_removes_the_units_that_clean_samples_hardly_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_EPOCHS", 1)
    report, repaired = audit_model(stage(), trained(0), repair=True, prune=True)
    assert report.suspicious == ()
    assert report.after is not None
    assert report.after.holdout_accuracy > 0.9
    assert repaired is not None
    weights = stage().network.tensors(repaired)["1.weight"]
    assert int((weights == 0).all(1).sum()) == int(0.6 * 64)


def test_a_search_finds_the_one_place_that_decides() -> None:
    """Class 1 where place 5 is bright: any other patch does nothing."""

    class Place(torch.nn.Module):
        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            found = 10 * (samples[:, 0, 5] - 0.5)
            return torch.stack([-found, found], 1)

    features = np.zeros((8, 1, 12), np.float32)
    low, high = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    patch = find_patch(Place(), features, 1, low, high, 0.9)
    assert int(patch.mask.argmax()) == 5
    assert patch.size < 2
    assert (patch.stamp(features)[:, 0, 5] > 0.5).all()
    assert patch.size == pytest.approx(float(patch.mask.sum()))


@pytest.mark.parametrize(
    ("ratios", "suspicious"),
    [
        ([1.0, 0.9, 1.1, 1.2, 0.8], []),
        ([1.0, 0.9, 1.1, 1.2, 0.6], []),  # not far from the others
        ([1.0, 0.95, 1.05, 1.0, 0.6], [4]),
        ([0.3, 0.3, 0.3, 0.3, 0.3], [0, 1, 2, 3, 4]),  # no outlier, but all far below clean models
        ([2.0, 0.3], [1]),
        ([1.0, 0.6], []),
    ],
)
def test_outliers_and_tiny_patches_are_suspicious(ratios: list[float], suspicious: list[int]) -> None:
    below = deviations_below(np.array(ratios))
    found = [label for label, pair in enumerate(zip(ratios, below, strict=True)) if is_suspicious(*pair)]
    assert found == suspicious


@pytest.mark.parametrize(
    ("vectors", "settings", "code", "fact"),
    [(True, {}, "not-supported", "images and series"), (False, {"data__holdout": 30}, "out-of-range", "needs 40")],
)
def test_what_cannot_be_audited_is_refused_with_the_reason(
    vectors: bool, settings: dict[str, int], code: str, fact: str
) -> None:
    spec = resolve(small_spec(model="mlp", **{"data__holdout": 100} | settings))
    experiment = Experiment.prepare(spec, UserParts(data=picture_data(vectors)))
    with pytest.raises(UserError, match=fact) as refusal:
        audit_model(experiment, experiment.initial[0])
    assert refusal.value.code == code


def test_a_task_without_classes_is_refused_with_the_reason() -> None:
    given = picture_data()
    data = Dataset.from_arrays(given.train.features, None, given.test.features, None, task="reconstruction")
    spec = resolve(small_spec(model="mlp", data__holdout=100))
    experiment = Experiment.prepare(spec, UserParts(data=data), threads=1)
    with refused_as("not-supported", "reconstruction", "nothing to search for"):
        audit_model(experiment, experiment.initial[0])
