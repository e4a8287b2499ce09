"""The hold-out of a server on a network: not to be had from what workers are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cbdsl.data.partition import split
from cbdsl.network.session import open_run, read_secret, save_secret
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import DataSpec, Spec
from support.refusals import refused_as

LABELS = np.zeros(2000, np.int32)
SIZES = DataSpec(shared_training=50, shared_scoring=100, holdout=200)


def test_a_secret_draws_another_hold_out_and_leaves_what_is_public() -> None:
    known, hidden = split(LABELS, SIZES, 0, 7), split(LABELS, SIZES, 0, 7, secret=123)
    np.testing.assert_array_equal(known.shared_training, hidden.shared_training)
    np.testing.assert_array_equal(known.shared_scoring, hidden.shared_scoring)
    common = np.intersect1d(known.holdout, hidden.holdout)
    assert len(common) < 50  # of 200: some 22 by chance
    taken = [*hidden.shared_training, *hidden.shared_scoring, *hidden.holdout]
    assert len(set(taken)) == 350


def test_a_secret_stays_with_its_folder_and_is_nobody_elses(tmp_path: Path) -> None:
    first = read_secret(tmp_path)
    assert first > 2**64
    assert read_secret(tmp_path) != first
    save_secret(tmp_path, first)
    save_secret(tmp_path, 5)
    assert read_secret(tmp_path) == first
    assert (tmp_path / ".secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".secret").write_text("x")
    with refused_as("damaged-file", ".secret"):
        read_secret(tmp_path)


def test_the_folder_of_a_server_is_its_owners_alone(tmp_path: Path) -> None:
    spec = Spec(model="softmax", workers=2).with_settings({"data.shared_scoring": 50})
    stage = Experiment.prepare(resolve(spec), threads=1, deal=False)
    opened = open_run(stage, tmp_path / "run")
    assert opened.folder is not None
    opened.folder.rewind([])
    opened.close()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "run", tmp_path / "run" / "rounds.jsonl")]
    assert modes == [0o700, 0o600]
