"""Models that are not classifiers, taken elsewhere: predictions in the unit of the data, scores and verdicts."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import cbdsl
from cbdsl import Dataset, Result, Spec
from cbdsl.cli.app import app
from cbdsl.export.c_source import c_file
from cbdsl.export.predict import predict, predict_values, read_unseen
from cbdsl.export.steps import program_of
from cbdsl.export.write import measure_rounding, write
from support.c_programs import CC, STRICT, needs_cc, needs_onnx
from support.refusals import refused_as

RNG = np.random.default_rng(3)
X = RNG.uniform(0, 9, (500, 2, 4)).astype(np.float32)
Y = np.stack([20 + X[:, 0].sum(1), 300 - 9 * X[:, 1, 0]], 1)
MARKS = (np.arange(100) % 5 == 0).astype(np.int32)
ODD = (X[400:] + 20 * MARKS[:, None, None] * RNG.normal(size=(100, 2, 4))).astype(np.float32)
DATA = {
    "regression": Dataset.from_arrays(X[:400], Y[:400], X[400:], Y[400:], task="regression", target_names=("a", "b")),
    "reconstruction": Dataset.from_arrays(X[:400], None, ODD, MARKS, task="reconstruction"),
}
CASES = [("regression", "mse"), ("reconstruction", "mse"), ("reconstruction", "mae"), ("reconstruction", "huber")]


def trained(folder: Path, task: str, loss: str = "mse") -> Result:
    settings = {
        "method": "fedavg", "workers": 3, "rounds": 3, "model": "mlp", "loss": loss, "local.learning_rate": 0.02,
        "data.samples_per_worker": 60, "data.shared_training": 10, "data.shared_scoring": 50, "data.holdout": 50,
    }  # fmt: skip
    return cbdsl.run(Spec().with_settings(settings), data=DATA[task], out=folder, threads=1, callbacks=[])


def unseen_file(folder: Path, task: str) -> tuple[Path, np.ndarray]:
    features, labels = (X[400:], Y[400:]) if task == "regression" else (ODD, MARKS)
    np.savez(folder / "unseen.npz", features=features, labels=labels)
    return folder / "unseen.npz", features


@pytest.mark.parametrize(("task", "loss"), CASES)
def test_the_saved_model_predicts_as_the_result_does(task: str, loss: str, tmp_path: Path) -> None:
    result, (file, features) = trained(tmp_path / "run", task, loss), unseen_file(tmp_path, task)
    model = cbdsl.load(tmp_path / "run")
    found = predict_values(model, read_unseen(file, model), 1)
    if task == "regression":
        assert np.allclose(found.outputs, result.predict(features), rtol=1e-5)
    else:
        assert np.allclose(found.outputs[:, 0], result.anomaly_scores(features), rtol=1e-5)
        assert found.anomalies is not None
        assert np.array_equal(found.anomalies, result.anomaly_scores(features) > (model.card.threshold or 0))
    for name, value in found.metrics.items():
        assert value == pytest.approx(result.summary.metrics[name], rel=1e-4)
    name, before, after = measure_rounding(model, read_unseen(file, model), 1)
    assert name == result.summary.metric
    assert after == pytest.approx(before, rel=0.1)
    with refused_as("not-supported", task):
        predict(model, read_unseen(file, model))


@needs_cc
@pytest.mark.parametrize(("task", "loss"), CASES)
def test_the_c_file_gives_the_same_numbers(task: str, loss: str, tmp_path: Path) -> None:
    result, features = trained(tmp_path / "run", task, loss), (X[400:] if task == "regression" else ODD)
    program = program_of(cbdsl.load(tmp_path / "run"))
    text = c_file(program).text
    (tmp_path / "model.c").write_text(text)
    words = [CC[0], *STRICT, "-shared", "-fPIC", "model.c", "-o", "model.so", "-lm"]
    subprocess.run(words, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "model.so"))
    pointer = ctypes.POINTER(ctypes.c_float)
    if task == "reconstruction":
        library.predict_score.restype = ctypes.c_float
    for row, expected in zip(features[:20], result.predict(features[:20]), strict=True):
        sample, made = np.ascontiguousarray(row), np.zeros(program.classes, np.float32)
        library.predict(sample.ctypes.data_as(pointer), made.ctypes.data_as(pointer))
        assert np.allclose(made, expected.reshape(-1), rtol=1e-4, atol=1e-4)
        if task == "reconstruction":
            score = library.predict_score(sample.ctypes.data_as(pointer), made.ctypes.data_as(pointer))
            assert score == pytest.approx(result.anomaly_scores(row[None])[0], rel=1e-3)
            verdict = library.predict_anomaly(sample.ctypes.data_as(pointer), made.ctypes.data_as(pointer))
            assert verdict == (score > (result.card.threshold or 0))  # type: ignore[union-attr]
    if task == "reconstruction":
        threshold = ctypes.c_float.in_dll(library, "predict_threshold").value
        assert threshold == pytest.approx(result.card.threshold, rel=1e-6)  # type: ignore[union-attr]
    else:
        assert '"a", "b"' in text


@needs_onnx
@pytest.mark.parametrize(("task", "loss"), CASES)
def test_onnx_gives_the_same_numbers(task: str, loss: str, tmp_path: Path) -> None:
    import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415

    result, features = trained(tmp_path / "run", task, loss), (X[400:] if task == "regression" else ODD)
    write(cbdsl.load(tmp_path / "run"), "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    made, *scores = session.run(None, {"features": features})
    assert np.allclose(made, result.predict(features).reshape(len(features), -1), rtol=1e-4, atol=1e-4)
    properties = session.get_modelmeta().custom_metadata_map
    assert properties["task"] == task
    if task == "reconstruction":
        assert np.allclose(scores[0][:, 0], result.anomaly_scores(features), rtol=1e-3)
        assert np.array_equal(scores[1], scores[0] > result.card.threshold)  # type: ignore[union-attr]
        assert json.loads(properties["threshold"]) == result.card.threshold  # type: ignore[union-attr]


@pytest.mark.parametrize("task", DATA)
def test_the_command_prints_numbers_or_verdicts(task: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", task)
    file, _ = unseen_file(tmp_path, task)
    told = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "--data", str(file)])
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert len(lines) == 102
    if task == "regression":
        assert lines[0].split() == ["sample", "a", "b"]
        assert lines[-1].startswith("RMSE ")
    else:
        assert {line.split()[-1] for line in lines[1:101]} == {"normal"}
        assert any("not normal" in line for line in lines)
        assert lines[-1].startswith("AUROC ")
    found = json.loads(
        CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "--data", str(file), "--json"]).output
    )
    assert found["samples"] == len(found["predictions"]) == 100
    assert set(found["predictions"][0]) == ({"a", "b"} if task == "regression" else {"score", "anomaly"})


def test_a_classifier_and_targets_do_not_go_together(tmp_path: Path) -> None:
    labels = (Y[:, 0] > 35).astype(int)
    data = Dataset.from_arrays(X[:400], labels[:400], X[400:], labels[400:])
    settings = {"workers": 2, "rounds": 1, "model": "mlp", "data.samples_per_worker": 20, "data.holdout": 0}
    spec = Spec().with_settings({**settings, "data.shared_training": 10, "data.shared_scoring": 50})
    cbdsl.run(spec, data=data, out=tmp_path / "run", threads=1, callbacks=[])
    file, _ = unseen_file(tmp_path, "regression")
    model = cbdsl.load(tmp_path / "run")
    with refused_as("wrong-shape", "classifier", "float32"):
        read_unseen(file, model)
    trained(tmp_path / "other", "regression")
    np.savez(tmp_path / "bad.npz", features=X[400:], labels=np.where(MARKS[:, None] == 1, np.nan, Y[400:]))
    with refused_as("out-of-range", "NaN", "row 0"):
        read_unseen(tmp_path / "bad.npz", cbdsl.load(tmp_path / "other"))


MAIN = """\
#include "model.h"
#include "model.h"
#include <stdio.h>

int main(void)
{
    static float in[PREDICT_INPUTS], out[%s];
    predict(in, out);
    %s
    return 0;
}
"""
USES = {
    "classification": ("PREDICT_CLASSES", 'printf("%s", predict_names[PREDICT_CLASSES - 1]);'),
    "regression": ("PREDICT_OUTPUTS", 'printf("%s %d", predict_names[1], PREDICT_OUTPUTS);'),
    "reconstruction": ("PREDICT_OUTPUTS", 'printf("%d %.3f", predict_anomaly(in, out), (double)predict_threshold);'),
}


@needs_cc
@pytest.mark.parametrize("task", USES)
def test_a_program_needs_the_header_alone(task: str, tmp_path: Path) -> None:
    if task == "classification":
        kinds = np.where(Y[:, 0] > 35, "h*/ot", "cold")
        data = Dataset.from_arrays(X[:400], kinds[:400], X[400:], kinds[400:])
        settings = {"workers": 2, "rounds": 1, "model": "mlp", "data.samples_per_worker": 20, "data.holdout": 0}
        spec = Spec().with_settings({**settings, "data.shared_training": 10, "data.shared_scoring": 50})
        cbdsl.run(spec, data=data, out=tmp_path / "run", threads=1, callbacks=[])
    else:
        trained(tmp_path / "run", task)
    words = ["export", str(tmp_path / "run"), "--to", "c", "--out", str(tmp_path / "model.c")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "model.h" in told.output
    (tmp_path / "main.c").write_text(MAIN % USES[task])
    words = [CC[0], *STRICT, "main.c", "model.c", "-o", "main", "-lm"]
    subprocess.run(words, cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    threshold = cbdsl.load(tmp_path / "run").card.threshold or 0
    expected = {"classification": "h*/ot", "regression": "b 2", "reconstruction": f"{said[0]} {threshold:.3f}"}
    assert said == expected[task]
    (tmp_path / "model.c").unlink()
    with refused_as("exists-already", "model.h"):
        write(cbdsl.load(tmp_path / "run"), "c", tmp_path / "model.c")


def test_a_table_is_predicted_with_or_without_its_targets(tmp_path: Path) -> None:
    flat, lines = X.reshape(500, 8), ["a,b,c,d,e,f,g,h,load"]
    lines += [",".join(map(str, [*row, target])) for row, target in zip(flat.tolist(), Y[:, 0], strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    settings = {
        "method": "fedavg", "workers": 3, "rounds": 2, "model": "mlp", "data.samples_per_worker": 60,
        "data.holdout": 50, "data.shared_training": 10, "data.shared_scoring": 50,
        "data.source": str(tmp_path / "x.csv"), "data.target": "load",
    }  # fmt: skip
    cbdsl.run(Spec().with_settings(settings), out=tmp_path / "run", threads=1, callbacks=[])
    model = cbdsl.load(tmp_path / "run")
    whole = predict_values(model, read_unseen(tmp_path / "x.csv", model), 1)
    (tmp_path / "unknown.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    unknown = predict_values(model, read_unseen(tmp_path / "unknown.csv", model), 1)
    assert np.array_equal(whole.outputs, unknown.outputs)
    assert (set(whole.metrics), unknown.metrics) == ({"rmse", "mae", "r2", "loss"}, {})
    (tmp_path / "bad.csv").write_text("a,b\n1,\n")
    with refused_as("wrong-type", "Line 2", "gap"):
        read_unseen(tmp_path / "bad.csv", model)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with refused_as("wrong-shape", "(1, 2)", "(N, 8)"):
        read_unseen(tmp_path / "bad.csv", model)
