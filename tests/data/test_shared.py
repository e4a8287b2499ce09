"""D_G from a file: what a run takes from it, what it refuses, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.arrays import Samples
from cbdsl.data.dataset import SCALES, Scaling, load
from cbdsl.data.partition import split
from cbdsl.data.shared import SharedSet, add_shared, check_source, read_shared, write_shared
from cbdsl.errors import UserError
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.spec import Spec
from support.helpers import CLASSES, FEATURES, blobs, perceptron, small_spec
from support.refusals import refused_as


def points(count: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(rng.normal(size=(count, FEATURES)).astype(np.float32), np.arange(count, dtype=np.int32) % CLASSES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_shared(tmp_path / "shared.npz", SharedSet(points(30), points(80, 1)), None)
    return tmp_path / "shared.npz"


def rewritten(file: Path, **arrays: Any) -> Path:  # noqa: ANN401 - arrays of all kinds
    with np.load(file) as stored:
        np.savez(file, **({name: stored[name] for name in stored} | arrays))
    return file


def prepared(spec: Spec) -> Experiment:
    data, resolved = blobs(), resolve(spec)
    return Experiment.prepare(resolved, UserParts(data=data, model=perceptron), threads=1)


def test_d_tr_and_d_sc_come_from_the_file_and_workers_and_hold_out_stay(file: Path) -> None:
    plain, shared = prepared(small_spec()), prepared(small_spec(data__shared_source=str(file)))
    for own, same in zip(plain.split.workers, shared.split.workers, strict=True):
        assert np.array_equal(own, same)
    assert np.array_equal(plain.split.holdout, shared.split.holdout)
    train = shared.dataset.train
    assert np.array_equal(train.features[:600], plain.dataset.train.features)
    assert np.array_equal(train.taken(shared.split.shared_training).features, points(30).features[:20])
    assert np.array_equal(train.taken(shared.split.shared_scoring).features, points(80, 1).features[:60])


def test_a_hold_out_in_the_file_is_the_server_s(tmp_path: Path) -> None:
    path = tmp_path / "shared.npz"
    write_shared(path, SharedSet(points(30), points(80, 1), points(40, 2)), None)
    stage = prepared(small_spec(data__shared_source=str(path)))
    assert np.array_equal(stage.dataset.train.taken(stage.split.holdout).features, points(40, 2).features[:30])


def test_without_a_file_nothing_changes() -> None:
    data, spec = blobs(), small_spec()
    parts = split(data.train.labels, spec.data, 6, 0)
    same_data, same_parts = add_shared(data, parts, spec.data)
    assert same_data is data
    assert same_parts is parts


def test_a_run_learns_with_the_file_and_repeats_itself(file: Path) -> None:
    spec = small_spec(data__shared_source=str(file))
    first, again = (cbdsl.run(spec, data=blobs(), model=perceptron, callbacks=[]) for _ in range(2))
    plain = cbdsl.run(small_spec(), data=blobs(), model=perceptron, callbacks=[])
    assert np.array_equal(first.weights, again.weights)
    assert not np.array_equal(first.weights, plain.weights)


def test_what_is_in_the_file_is_part_of_the_key_and_where_it_is_is_not(file: Path, tmp_path: Path) -> None:
    spec = small_spec(data__shared_source=str(file))
    key = spec.key()
    elsewhere = tmp_path / "moved.npz"
    elsewhere.write_bytes(file.read_bytes())
    assert small_spec(data__shared_source=str(elsewhere)).key() == key
    write_shared(file, SharedSet(points(30, 5), points(80, 1)), None)
    assert spec.key() != key


def test_the_keys_of_runs_without_a_file_are_those_from_before_there_were_any() -> None:
    assert Spec().key() == "1ded684a55563594"
    assert small_spec().key() == "7f5e02431819c540"


def test_a_run_goes_on_with_the_same_file_alone(file: Path, tmp_path: Path) -> None:
    spec = small_spec(data__shared_source=str(file), model="softmax")
    out = tmp_path / "run"
    cbdsl.run(spec, data=blobs(), out=out, callbacks=[])
    write_shared(file, SharedSet(points(30, 5), points(80, 1)), None)
    with refused_as("wrong-run"):
        cbdsl.resume(out, data=blobs(), callbacks=[])


def test_a_server_without_training_samples_to_set_aside_needs_none(file: Path) -> None:
    data = blobs(train=50)
    spec = resolve(small_spec(data__shared_source=str(file)))
    stage = Experiment.prepare(spec, UserParts(data=data, model=perceptron), threads=1, deal=False)
    assert len(stage.split.shared_training) == 20
    assert stage.split.shared_training.min() >= 50
    assert len(stage.split.holdout) == 30
    with refused_as("out-of-range", "110"):
        Experiment.prepare(resolve(small_spec()), UserParts(data=data, model=perceptron), threads=1, deal=False)


def test_shades_are_stored_as_bytes_and_come_back_as_a_source_s(tmp_path: Path) -> None:
    mnist, path = load("mnist"), tmp_path / "shared.npz"
    real = mnist.train.taken(np.arange(40, dtype=np.int32))
    write_shared(path, SharedSet(real, real), mnist.scaling)
    with np.load(path) as stored:
        assert stored["training_features"].dtype == np.uint8
    assert np.array_equal(read_shared(path, mnist).training.features, real.features)


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.npz", "two.npz"):
        write_shared(tmp_path / name, SharedSet(points(30), points(80, 1)), None)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"training_features": np.zeros((30, 4), np.float32)}, r"samples of shape \(4,\).*shape \(8,\)"),
        ({"training_features": np.full((30, 8), np.nan, np.float32)}, "NaN"),
        ({"training_features": np.array(["a"] * 8)[None].repeat(30, 0)}, "numbers of shape"),
        ({"scoring_labels": np.full(80, 7)}, "label 7 in D_sc.*3 classes"),
        ({"scoring_labels": np.full(80, 0.5)}, "labels of the D_sc set must be integers"),
        ({"training_labels": np.zeros(3, np.int32)}, "needs features"),
        ({SCALES[0]: np.zeros(8), SCALES[1]: np.ones(8)}, "scaled by means"),
        (
            {SCALES[0]: np.zeros(8), SCALES[1]: np.ones(7)},
            r"as many numbers in both; given feature_mean float64 \(8,\)",
        ),
        ({SCALES[0]: np.array(["a"]), SCALES[1]: np.array(["b"])}, "given feature_mean <U1"),
        ({SCALES[0]: np.zeros(8), SCALES[1]: np.array(["b"] * 8)}, "feature_deviation <U1"),
        ({SCALES[0]: np.zeros((1, 8)), SCALES[1]: np.ones((1, 8))}, r"feature_mean float64 \(1, 8\)"),
        ({SCALES[0]: np.array(0.0), SCALES[1]: np.array(1.0)}, r"feature_mean float64 \(\)"),
        ({SCALES[1]: np.ones(8)}, "given feature_deviation float64"),
        ({SCALES[0]: np.full(8, np.nan), SCALES[1]: np.ones(8)}, "scaled by means"),
        ({"holdout_features": np.zeros((30, 8), np.float32)}, "no array holdout_labels"),
        ({"holdout_labels": np.zeros(30, np.int32)}, "no array holdout_features"),
        ({"training_features": np.zeros((0, 8), np.float32), "training_labels": np.zeros(0, np.int32)}, "N > 0"),
        ({"training_labels": np.zeros(30, np.int32), "scoring_labels": np.ones(80, np.int32)}, "no sample of class 2"),
        ({"scoring_labels": np.array(["a"] * 80)}, "labels of the D_sc set must be integers"),
        ({"scoring_labels": np.full(80, -1)}, "integers from 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(file: Path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_shared(rewritten(file, **arrays), blobs())


def test_a_file_for_other_features_is_refused(file: Path) -> None:
    mnist = load("mnist")
    with refused_as("conflict", "cbdsl generate --data mnist"):
        read_shared(file, mnist)


def test_a_missing_file_and_one_that_is_no_archive_are_refused(file: Path, tmp_path: Path) -> None:
    with refused_as("unreadable-file"):
        prepared(small_spec(data__shared_source=str(tmp_path / "none.npz")))
    for content in (b"", b"no archive", file.read_bytes()[:-100], file.read_bytes()[:200]):
        (tmp_path / "text.npz").write_bytes(content)
        with refused_as("unreadable-file"):
            prepared(small_spec(data__shared_source=str(tmp_path / "text.npz")))
    with refused_as("unreadable-file"):
        prepared(small_spec(data__shared_source=str(tmp_path)))


def test_more_samples_than_the_file_has_are_refused(file: Path) -> None:
    with refused_as("out-of-range", "30", "31"):
        prepared(small_spec(data__shared_source=str(file), data__shared_training=31))


def test_a_file_that_nobody_uses_is_refused(file: Path) -> None:
    spec = resolve(small_spec(data__shared_source=str(file), shared="none"))
    with refused_as("no-effect"):
        refuse_idle([spec], ["data.shared_source"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": CLASSES + 1}, r"own.npz has 4 classes; the spec's data \(blobs\) have 3,"),
        ({"scaling": Scaling((0.0,) * FEATURES, (1.0,) * FEATURES)}, r"scaled by means .* have .* scaled by nothing,"),
    ],
)
def test_data_of_which_no_run_takes_a_file_is_not_learned_from(change: dict[str, Any], words: str) -> None:
    check_source("own.npz", blobs(seed=1), blobs())
    with pytest.raises(UserError, match=words):
        check_source("own.npz", replace(blobs(), **change), blobs())
