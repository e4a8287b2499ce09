"""`cbdsl generate`: a file that a run takes, a page, numbers of privacy, and clear words for what cannot be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from support.helpers import blobs, cbdsl

pytestmark = pytest.mark.slow

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
    ("words", "refusal"),
    [
        (["--from", "nowhere"], ("unknown-name", "nowhere")),
        (["--from", "mnist"], ("conflict", "(1, 28, 28)", "own.npz")),
        (["--samples", "0"], ("out-of-range", "--samples")),
        (["--scoring", "0"], ("out-of-range", "--scoring")),
        (["--rounds", "9"], ("no-effect", "rounds")),
        (["--set", "local.epochs=9"], ("no-effect", "local.epochs")),
        (["--byzantine", "2"], ("no-effect", "--byzantine")),
        (["--participation", "0.5"], ("no-effect", "participation")),
        (["--codec", "q4"], ("no-effect", "codec.up")),
        (["--from", ""], ("unknown-name", "--from")),
        (["--from", "workers", "--holdout", "9"], ("conflict", "hold-out")),
        (["--samples", "2", "--scoring", "2"], ("out-of-range", "3")),
        (["--set", "data.shared_scoring=100000"], ("out-of-range", "data.holdout")),
        (["--workers", "100", "--from", "workers"], ("out-of-range", "workers")),
        (["--set", "data.shared_source=x.npz"], ("conflict", "data.shared_source")),
    ],
)
def test_bad_input_ends_in_a_sentence(folder: Path, words: list[str], refusal: tuple[str, ...]) -> None:
    done = cbdsl("generate", "--data", "own.npz", *SMALL, *words, cwd=folder)
    done.check_refused(*refusal)
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in folder.iterdir()] == ["own.npz"]


def test_no_threads_are_refused(folder: Path) -> None:
    done = cbdsl("generate", "--data", "own.npz", *SMALL, "--threads", "0", cwd=folder)
    done.check_refused("out-of-range", "threads", "1")
    assert [path.name for path in folder.iterdir()] == ["own.npz"]


def test_a_file_of_another_shape_is_refused(folder: Path) -> None:
    assert cbdsl("generate", "--data", "own.npz", *SMALL, "--out", "made", cwd=folder).returncode == 0
    done = cbdsl("run", "--set", "data.shared_source=made/shared.npz", cwd=folder)
    done.check_refused("conflict", "cbdsl generate --data mnist")
