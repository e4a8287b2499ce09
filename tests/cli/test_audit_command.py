"""`cbdsl audit`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cbdsl.models import saved_model
from cbdsl.studies import audit
from support.helpers import cbdsl
from support.small_pictures import picture_data

SMALL = [
    "--data", "own.npz", "--model", "mlp", "--workers", "6", "--rounds", "6", "--method", "fedavg", "--shared", "both",
    *(f"--set=data.{text}" for text in ("samples_per_worker=60", "shared_training=60", "holdout=160")),
    "--set=data.shared_scoring=60",
    "--set=local.learning_rate=0.05", "--set=local.momentum=0.9", "--set=local.epochs=3", "--no-baseline",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clean run and one in which half of the workers plant a backdoor."""
    folder = tmp_path_factory.mktemp("audited")
    data = picture_data()
    np.savez(
        folder / "own.npz", train_features=data.train.features, train_labels=data.train.labels,
        test_features=data.test.features, test_labels=data.test.labels,
    )  # fmt: skip
    for name, words in (("clean", []), ("bad", ["--attack", "backdoor", "--byzantine", "3"])):
        done = cbdsl("run", *SMALL, *words, "--out", name, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
    assert json.loads((folder / "bad" / "summary.json").read_text())["attack_success"] > 0.9
    return folder


@pytest.fixture(autouse=True)
def _fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_STEPS", 150)
    monkeypatch.setattr(audit, "_REFERENCES", 1)


def test_a_clean_run_is_reported_in_one_line_and_nothing_is_written(runs: Path) -> None:
    before = sorted(runs.joinpath("clean").iterdir())
    done = cbdsl("audit", "clean", "--repair", cwd=runs)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert done.stdout.startswith("nothing suspicious")
    assert sorted(runs.joinpath("clean").iterdir()) == before


def test_a_backdoor_ends_the_audit_with_one_and_a_repair_writes_another_model(runs: Path) -> None:
    own = (runs / "bad" / "model.safetensors").read_bytes()
    done = cbdsl("audit", "bad", cwd=runs)
    assert done.returncode == 1, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith("suspicious")] == ["0"]
    done = cbdsl("audit", "bad", "--repair", "--json", cwd=runs)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["suspicious"], report["left"], report["repaired"]) == ([0], [], "bad/repaired.safetensors")
    assert report["before"]["attack_success"] > 0.9
    assert report["after"]["attack_success"] < 0.1
    assert report["after"]["test_accuracy"] > 0.95
    assert (runs / "bad" / "model.safetensors").read_bytes() == own
    repaired, first = (saved_model.load(runs / "bad" / name) for name in ("repaired.safetensors", "model.safetensors"))
    assert repaired.card == first.card
    assert not np.array_equal(repaired.weights, first.weights)
    with safe_open(runs / "bad" / "repaired.safetensors", "numpy") as file:
        assert file.metadata()["cbdsl_repaired"] == "cbdsl audit"
    cbdsl("audit", "bad", "--repair", cwd=runs).check_refused("exists-already", "bad/repaired.safetensors")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["nowhere"], ("missing-file", "nowhere")),
        (["clean", "--out", "a.safetensors"], ("no-effect", "--repair")),
        (["clean", "--prune"], ("no-effect", "--repair")),
        (["clean", "--repair", "--out", "a.npz"], ("conflict", "a.npz")),
        (["clean", "--repair", "--out", "clean/model.safetensors"], ("exists-already", "clean/model.safetensors")),
    ],
)
def test_words_that_do_not_go_together_are_refused(words: list[str], refusal: tuple[str, ...], runs: Path) -> None:
    cbdsl("audit", *words, cwd=runs).check_refused(*refusal)
