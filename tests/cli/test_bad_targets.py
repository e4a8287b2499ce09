"""What is wrong with targets, columns or models for a task ends in one sentence, and nothing is written or lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import cbdsl
from cbdsl import Dataset, Spec
from cbdsl.export.predict import predict, read_unseen
from support.helpers import cbdsl as command
from support.refusals import refused_as

RNG = np.random.default_rng(2)
X = RNG.normal(size=(300, 3)).round(4)
Y = X @ np.array([1.0, 2.0, 3.0]) + 4
TARGETS: dict[str, Any] = {
    "good": Y, "gaps": np.where(Y > 5, np.nan, Y), "still": np.ones(300),
    "text": np.array(["hot", "cold", "mild"] * 100), "classes": (Y > 4).astype(int), "two": np.stack([Y, -Y], 1),
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "workers": 3, "rounds": 1, "model": "mlp", "data.samples_per_worker": 20, "data.holdout": 20,
    "data.shared_scoring": 20, "data.shared_training": 20,
}  # fmt: skip
SMALL = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
REGRESSION = ("--set", "data.task=regression")
LOAD = ("--set", "data.target=load")


def made(targets: str, task: Any = "regression", rows: slice = slice(None)) -> Dataset:  # noqa: ANN401
    x, y = X[rows], TARGETS[targets][rows]
    return Dataset.from_arrays(x[:200], y[:200], x[200:], y[200:], task=task)


def run(data: Dataset, out: Path | None = None, **given: Any) -> cbdsl.Result:  # noqa: ANN401
    settings = {**SETTINGS, **given.pop("settings", {})}
    return cbdsl.run(Spec().with_settings(settings), data=data, out=out, callbacks=[], **given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind, and two trained models."""
    folder = tmp_path_factory.mktemp("place")
    for name, y in TARGETS.items():
        np.savez(
            folder / f"{name}.npz", train_features=X[:200], train_labels=y[:200], test_features=X[200:],
            test_labels=y[200:],
        )  # fmt: skip
    (folder / "whole.csv").write_text("a,b,load\n" + "".join(f"{a},{b},{c}\n" for a, b, c in X))
    (folder / "gap.csv").write_text("a,b,load\n1,2,3\n1,,3\n")
    (folder / "words.csv").write_text("a,b,load\n1,2,low\n2,3,high\n")
    run(made("classes", "classification"), folder / "classifier")
    run(made("good"), folder / "regression")
    return folder


AT_THE_COMMAND_LINE = [
    (("run", "--data", "gaps.npz", *REGRESSION), "out-of-range", ("NaN", "row", "fill the gaps")),
    (("run", "--data", "still.npz", *REGRESSION), "out-of-range", ("all 200", "nothing to learn")),
    (("run", "--data", "text.npz", *REGRESSION), "wrong-type", ("text", "'hot'", "task=classification")),
    (("run", "--data", "good.npz"), "out-of-range", ("float64", "this is regression: set task")),
    (("run", "--data", "good.npz", *REGRESSION, "--set", "loss=cross-entropy"), "conflict", ("cross-entropy", "mse")),
    (("run", "--data", "good.npz", *REGRESSION, "--init", "classifier"), "conflict", ("'classification'",)),
    (("run", "--data", "whole.csv", "--set", "data.target=lod"), "unknown-name", ("'lod'", "'load'")),
    (("run", "--data", "gap.csv", *LOAD), "wrong-type", ("Line 3", "gap", "'b'")),
    (("run", "--data", "words.csv", *LOAD), "wrong-type", ("Line 2", "'low'", "data.task=classification")),
    (("run", "--data", "whole.csv", *LOAD, "--set", "data.task=classification"), "wrong-type", ("regression",)),
    (("run", "--data", "missing.parquet", *LOAD), "unreadable-file", ("missing.parquet", "No such file")),
    (("predict", "regression", "--data", "text.npz"), "wrong-type", ("text", "'mild'")),
    (("predict", "classifier", "--data", "good.npz"), "wrong-shape", ("float64", "classifier")),
    (("predict", "classifier", "--data", "gap.csv"), "wrong-type", ("Line 3", "gap", "'b'")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "facts"), AT_THE_COMMAND_LINE, ids=lambda value: str(value)[:40])
def test_a_command_refuses_it_in_one_sentence(
    words: tuple[str, ...], code: str, facts: tuple[str, ...], place: Path
) -> None:
    before = sorted(place.rglob("*"))
    done = command(*words, *(SMALL if words[0] == "run" else ()), cwd=place)
    done.check_refused(code, *facts)
    assert sorted(place.rglob("*")) == before


IN_PYTHON: list[tuple[Callable[[Path], Any], str, tuple[str, ...]]] = [
    (lambda _: made("gaps"), "out-of-range", ("NaN", "row")),
    (lambda _: made("still"), "out-of-range", ("nothing to learn",)),
    (lambda _: made("text"), "wrong-type", ("text", "task=classification")),
    (lambda _: made("good", "classification"), "out-of-range", ("this is regression: set task",)),
    (lambda _: run(made("good"), settings={"loss": "cross-entropy"}), "conflict", ("cross-entropy", "regression")),
    (lambda _: run(made("good"), settings={"data.task": "classification"}), "conflict", ("has no classes",)),
    (lambda _: run(made("good"), model=lambda: nn.Linear(3, 2)), "wrong-shape", ("2 outputs", "1 target")),
    (lambda place: run(made("two"), init=place / "classifier"), "conflict", ("'classification'", "regression")),
    (lambda place: run(made("classes", "classification"), init=place / "regression"), "conflict", ("'regression'",)),
    (lambda place: unseen(place, "regression", "good.npz"), "not-supported", ("regression", "no classes")),
    (lambda _: run(made("good")).anomaly_scores(X), "not-supported", ("reconstruction", "predict")),
]


def unseen(place: Path, model: str, file: str) -> Any:  # noqa: ANN401
    saved = cbdsl.load(place / model)
    return predict(saved, read_unseen(place / file, saved))


@pytest.mark.parametrize(("ask", "code", "facts"), IN_PYTHON)
def test_python_refuses_it_with_a_code(
    ask: Callable[[Path], Any], code: str, facts: tuple[str, ...], place: Path
) -> None:
    with refused_as(code, *facts):
        ask(place)


def test_a_softmax_at_the_end_of_a_regression_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run(made("two"), model=lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)))
    run(made("good"), model=lambda: nn.Sequential(nn.Linear(3, 1), nn.Softmax(1)))
    said = [record.message for record in caplog.records if "end in a softmax" in record.message]
    assert len(said) == 2
    assert all("cannot be those of a regression" in each for each in said)


def test_classes_by_name_in_a_file_are_learned(place: Path) -> None:
    done = command("run", "--data", "text.npz", "--out", "named", *SMALL, cwd=place)
    assert done.returncode == 0, done.stderr
    assert cbdsl.load(place / "named").card.class_names == ("cold", "hot", "mild")
    assert command("predict", "named", "--data", "text.npz", cwd=place).returncode == 0
