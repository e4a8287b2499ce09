"""`cbdsl generate`: a file that a run takes, a page, numbers of privacy, and clear words for what cannot be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from support.helpers import blobs, cbdsl

SMALL = (
    "--workers", "4", "--set", "data.samples_per_worker=40", "--set", "data.shared_training=20",
    "--set", "data.shared_scoring=60", "--set", "data.holdout=30", "--passes", "3",
)  # fmt: skip
FEW = ("--samples", "10", "--scoring", "40", "--holdout", "20")  # than a run would use


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = blobs()
    np.savez(
        tmp_path / "own.npz",
        train_features=data.train.features,
        train_labels=data.train.labels,
        test_features=data.test.features,
        test_labels=data.test.labels,
    )
    return tmp_path


def test_a_generated_file_is_used_by_a_run_and_the_page_shows_its_privacy(folder: Path) -> None:
    done = cbdsl("generate", "--data", "own.npz", *SMALL, "--out", "made", *FEW, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "membership tests" in done.stdout
    assert "prove no privacy" in done.stdout
    page = (folder / "made" / "generated.html").read_text()
    assert "An attacker has" in page
    assert '<img alt="Generated samples" src="data:image/png;base64,' in page
    assert imread(folder / "made" / "samples.png")[..., :3].min() < 0.5  # something is drawn
    advised = shlex.split(done.stdout.partition("Use it with: cbdsl ")[2].splitlines()[0])
    ran = cbdsl(*advised, "--rounds", "2", "--out", "run", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert 'shared_source = "made/shared.npz"' in (folder / "run" / "spec.toml").read_text()


def test_the_measures_come_as_json_and_data_of_the_server_s_own_will_do(folder: Path) -> None:
    done = cbdsl(
        "generate", "--data", "own.npz", "--from", "own.npz", "--passes", "2", "--json", "--out", "made", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compared"] == 150
    assert 0 <= found["by_samples"]["area"] <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "nowhere"], "neither a data set by name"),
        (["--from", "mnist"], "mnist has samples of shape (1, 28, 28); the spec's data (own.npz) have"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--scoring", "0"], "--scoring must be at least 1"),
        (["--rounds", "9"], "rounds has no effect here"),
        (["--set", "local.epochs=9"], "local.epochs has no effect here"),
        (["--byzantine", "2"], "Leave --byzantine out"),
        (["--participation", "0.5"], "participation has no effect here"),
        (["--codec", "q4"], "codec.up has no effect here"),
        (["--from", ""], "--from is empty"),
        (["--from", "workers", "--holdout", "9"], "must be secret"),
        (["--samples", "2", "--scoring", "2"], "cannot have all 3 classes"),
        (["--set", "data.shared_scoring=100000"], "data.holdout lower"),
        (["--workers", "100", "--from", "workers"], "Use fewer workers"),
        (["--set", "data.shared_source=x.npz"], "Leave it out"),
    ],
)
def test_bad_input_ends_in_a_sentence(folder: Path, words: list[str], said: str) -> None:
    done = cbdsl("generate", "--data", "own.npz", *SMALL, *words, cwd=folder)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert said in done.stderr
    assert [path.name for path in folder.iterdir()] == ["own.npz"]


def test_no_threads_are_refused(folder: Path) -> None:
    done = cbdsl("generate", "--data", "own.npz", *SMALL, "--threads", "0", cwd=folder)
    assert done.returncode == 2
    assert "threads must be at least 1" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["own.npz"]


def test_a_file_of_another_shape_is_refused(folder: Path) -> None:
    assert cbdsl("generate", "--data", "own.npz", *SMALL, "--out", "made", cwd=folder).returncode == 0
    done = cbdsl("run", "--set", "data.shared_source=made/shared.npz", cwd=folder)
    assert done.returncode == 2
    assert "Generate the file from the same data: cbdsl generate --data mnist" in " ".join(done.stderr.split())
