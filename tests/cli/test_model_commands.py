"""`cbdsl predict` and `cbdsl export`, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from cbdsl.data import dataset
from cbdsl.data.dataset import Dataset, read_idx
from support.helpers import SMALL, cbdsl


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on MNIST, and raw and scaled samples of its test set."""
    folder = tmp_path_factory.mktemp("trained")
    done = cbdsl("run", *SMALL, "--rounds", "2", "--out", "run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    home = Path(dataset.__file__).with_name("mnist")
    images = read_idx(next(home.glob("t10k-images*")), 3)
    labels = read_idx(next(home.glob("t10k-labels*")), 1)
    np.savez(folder / "x.npz", features=images, labels=labels)
    np.savez(folder / "few.npz", features=images[:4])
    return folder


def accuracy(folder: Path) -> float:
    return float(json.loads((folder / "run" / "summary.json").read_text())["final_accuracy"])


def test_raw_images_are_scaled_as_the_run_scaled_them(trained: Path) -> None:
    done = cbdsl("predict", "run", "--data", "x.npz", cwd=trained)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10_001
    assert lines[-1] == f"accuracy {accuracy(trained):.2%} of 10,000 samples"
    number, name, chance = lines[7].split()
    assert (number, name in "0123456789", 0 < float(chance) < 1) == ("7", True, True)


def test_scaled_images_are_taken_as_they_are_with_raw(trained: Path, mnist: Dataset) -> None:
    np.savez(trained / "scaled.npz", features=mnist.test.features, labels=mnist.test.labels)
    done = cbdsl("predict", "run/model.safetensors", "--data", "scaled.npz", "--raw", "--json", cwd=trained)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["accuracy"] == pytest.approx(accuracy(trained), abs=1e-9)
    assert found["samples"] == len(found["predictions"]) == 10_000
    assert set(found["predictions"][0]) == {"class", "name", "probability"}


def test_without_labels_there_is_no_accuracy(trained: Path) -> None:
    done = cbdsl("predict", "run", "--data", "few.npz", "--json", cwd=trained)
    assert json.loads(done.stdout)["accuracy"] is None
    assert "accuracy" not in cbdsl("predict", "run", "--data", "few.npz", cwd=trained).stdout


def test_a_file_that_was_given_to_run_is_scaled_as_run_scaled_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 900)
    features = (np.eye(3)[labels] + 0.3 * rng.normal(size=(900, 3))) * [1, 10, 100] + [5, 6, 7]
    arrays: dict[str, Any] = {
        "train_features": features[:700],
        "train_labels": labels[:700],
        "test_features": features[700:],
    }
    arrays |= {"feature_mean": features.mean(0), "feature_deviation": features.std(0)}
    np.savez(tmp_path / "own.npz", test_labels=labels[700:], **arrays)
    small = ["--set", "data.samples_per_worker=50", "--set", "data.shared_scoring=100", "--set", "data.holdout=50"]
    words = ["--data", "own.npz", "--model", "softmax", "--workers", "4", "--rounds", "3", *small, "--out", "run"]
    done = cbdsl("run", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(cbdsl("predict", "run", "--data", "own.npz", "--json", cwd=tmp_path).stdout)
    assert found["accuracy"] == pytest.approx(accuracy(tmp_path), abs=1e-9)
    raw = json.loads(cbdsl("predict", "run", "--data", "own.npz", "--raw", "--json", cwd=tmp_path).stdout)
    assert raw["accuracy"] < found["accuracy"]


@pytest.mark.parametrize(
    ("arrays", "refusal"),
    [
        ({"pixels": np.zeros((2, 28, 28), np.uint8)}, ("unreadable-file", "'features'",)),
        ({"features": np.zeros((2, 28), np.uint8)}, ("wrong-shape", "uint8 (2, 28)", "features")),
        ({"features": np.zeros((0, 28, 28), np.uint8)}, ("wrong-shape", "uint8 (0, 1, 28, 28)")),
        ({"features": np.full((2, 28, 28), 200.0)}, ("out-of-range", "0 to 255")),
        ({"features": np.full((2, 28, 28), np.nan)}, ("out-of-range", "NaN")),
        ({"features": np.zeros((2, 28, 28), np.uint8), "labels": np.zeros(3, int)}, ("wrong-shape", "labels", "int64")),
        ({"features": np.array(["a", "b"])}, ("wrong-shape", "<U1 (2,)")),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused_with_the_reason(
    arrays: dict[str, Any], refusal: tuple[str, ...], trained: Path
) -> None:
    np.savez(trained / "bad.npz", **arrays)
    done = cbdsl("predict", "run", "--data", "bad.npz", cwd=trained)
    done.check_refused(*refusal)


def test_a_copy_has_all_that_the_model_says(trained: Path, tmp_path: Path) -> None:
    done = cbdsl("export", "run", "--to", "safetensors", "--out", str(tmp_path / "new" / "a.safetensors"), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "a.safetensors").read_bytes() == (trained / "run" / "model.safetensors").read_bytes()
    with safe_open(tmp_path / "new" / "a.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["cbdsl_shape"]) == [1, 28, 28]


def test_eight_bits_say_what_they_cost(trained: Path, tmp_path: Path, mnist: Dataset) -> None:
    words = ["export", "run", "--to", "c", "--int8", "--out"]
    done = cbdsl(*words, str(tmp_path / "a.c"), cwd=trained)
    assert done.returncode == 0, done.stderr
    first, sizes, lost = done.stdout.splitlines()
    assert first.startswith(f"written: {tmp_path / 'a.c'} (")
    assert sizes == "constants 7.9 kB, working memory 3.1 kB"
    assert lost.endswith("on 200 samples of D_sc")
    done = cbdsl(*words, str(tmp_path / "b.c"), "--data", "x.npz", cwd=trained)
    assert done.stdout.splitlines()[-1].startswith(f"accuracy {accuracy(trained):.2%} with floats, ")
    np.savez(trained / "scaled.npz", features=mnist.test.features, labels=mnist.test.labels)
    done = cbdsl(*words, str(tmp_path / "raw.c"), "--data", "scaled.npz", "--raw", cwd=trained)
    assert done.stdout.splitlines()[-1].startswith(f"accuracy {accuracy(trained):.2%} with floats, ")
    shutil.copy(trained / "run" / "model.safetensors", tmp_path / "alone.safetensors")
    done = cbdsl("export", "alone.safetensors", *words[2:], "c.c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy not measured: The model is a file without a run. Give labelled samples: --data" in done.stdout
    done = cbdsl(*words, str(tmp_path / "d.c"), "--data", "few.npz", cwd=trained)
    done.check_refused("wrong-shape", "labels")
    assert not (tmp_path / "d.c").exists()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            ["--to", "tflite", "--out", "a.tflite"],
            (
                "unknown-name",
                "'tflite'",
                "onnx, c, safetensors",
            ),
        ),
        (["--to", "c", "--out", "a.txt"], ("conflict", "--to c", "a.txt")),
        (["--to", "torch", "--out", "a.py"], ("not-supported", "cbdsl.load(path).model")),
        (["--to", "onnx", "--out", "a.onnx", "--int8"], ("no-effect", "--int8", "--to c")),
        (["--to", "c", "--out", "a.c", "--data", "x.npz"], ("no-effect", "--data", "--int8")),
        (["--to", "safetensors", "--out", "a.safetensors", "--raw"], ("no-effect", "--raw")),
        (["--to", "c", "--out", "there.c"], ("exists-already", "there.c")),
    ],
)
def test_words_that_do_not_go_together_are_refused(words: list[str], refusal: tuple[str, ...], trained: Path) -> None:
    (trained / "there.c").write_text("mine")
    done = cbdsl("export", "run", *words, cwd=trained)
    done.check_refused(*refusal)
    assert (trained / "there.c").read_text() == "mine"


def test_a_model_that_is_not_there_is_refused(trained: Path) -> None:
    for name, fact in (("nowhere", "nowhere"), (".", "model.safetensors")):
        cbdsl("predict", name, "--data", "x.npz", cwd=trained).check_refused("missing-file", fact)
