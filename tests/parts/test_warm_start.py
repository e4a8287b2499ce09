"""A run may start from a model: a result, a folder, a file or an array."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cbdsl
from cbdsl import register
from cbdsl.errors import UserError
from cbdsl.runs.result import Result
from support.helpers import blobs, read_rounds, run_until, small_spec

SPEC = small_spec(model="softmax", rounds=4)


def run(**arguments: Any) -> Result:  # noqa: ANN401
    spec = small_spec(model="softmax", rounds=4, **arguments.pop("settings", {}))
    return cbdsl.run(spec, data=blobs(), callbacks=[], **arguments)


@pytest.fixture
def source(tmp_path: Path) -> Result:
    return run(out=tmp_path / "source", settings={"method": "fedavg", "seed": 9})


def test_all_doors_lead_to_the_same_run(source: Result, tmp_path: Path) -> None:
    assert source.folder is not None
    ways: list[Any] = [
        source,
        source.weights,
        source.weights.tolist(),
        source.folder,
        str(source.folder),
        source.folder / "model.safetensors",
    ]
    results = [run(init=way, out=tmp_path / f"run{number}") for number, way in enumerate(ways)]
    cold = run()
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result.weights, results[0].weights)
        assert read_rounds(tmp_path / f"run{number}") == read_rounds(tmp_path / "run0")
        kept = load_file(tmp_path / f"run{number}" / "init.safetensors")
        np.testing.assert_array_equal(np.concatenate([kept["1.weight"].ravel(), kept["1.bias"]]), source.weights)
    assert not np.array_equal(results[0].weights, cold.weights)


@pytest.mark.parametrize("method", register.method.names())
def test_every_method_starts_where_it_is_told(source: Result, method: str) -> None:
    first: list[Any] = []
    run(
        init=source,
        settings={"method": method},
        watch=lambda stage, _order: first.append((stage.first_state().global_best, stage.initial)),
    )
    np.testing.assert_array_equal(first[0][0], source.weights)
    if method == "pso":  # its workers must start apart, or they never part
        assert len(np.unique(first[0][1], axis=0)) == 6


@pytest.mark.parametrize("change", ["deleted", "changed"])
@pytest.mark.parametrize("kind", ["folder", "file", "array"])
def test_a_run_goes_on_without_its_source(source: Result, tmp_path: Path, kind: str, change: str) -> None:
    folder = source.folder
    assert folder is not None
    init: Any = {"folder": folder, "file": folder / "model.safetensors", "array": source.weights}[kind]
    run(init=init, out=tmp_path / "whole")
    run_until(2, SPEC, data=blobs(), init=init, out=tmp_path / "stopped")
    if change == "deleted":
        shutil.rmtree(folder)
    else:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: each + 1 for name, each in tensors.items()}, folder / "model.safetensors")
    resumed = cbdsl.resume(tmp_path / "stopped", data=blobs(), callbacks=[])
    assert read_rounds(tmp_path / "stopped") == read_rounds(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert resumed.summary.spec_key == whole["spec_key"]


def test_a_run_that_never_reached_a_checkpoint_starts_again_from_its_model(source: Result, tmp_path: Path) -> None:
    whole = run(init=source)
    run_until(1, SPEC, data=blobs(), init=source, out=tmp_path / "stopped")
    (tmp_path / "stopped" / "checkpoint.npz").unlink()
    np.testing.assert_array_equal(cbdsl.resume(tmp_path / "stopped", data=blobs()).weights, whole.weights)


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (np.zeros(5), "init has 5 numbers; the model 'softmax' has 27"),
        (np.zeros((1, 27)), r"flat weights \(D,\) of finite numbers; given shape \(1, 27\)"),
        (np.full(27, np.nan), "finite"),
        ("nowhere.safetensors", "nowhere.safetensors cannot be read"),
        ("nowhere", "nowhere cannot be read"),
    ],
)
def test_what_cannot_be_a_start_is_refused(init: Any, words: str, tmp_path: Path) -> None:  # noqa: ANN401
    with pytest.raises(UserError, match=words):
        run(init=init, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_of_another_network_or_without_numbers_are_refused(tmp_path: Path) -> None:
    spec = small_spec(model="mlp", method="fedavg", rounds=1)
    other = cbdsl.run(spec, data=blobs(), out=tmp_path / "other", callbacks=[])
    with pytest.raises(UserError, match=r"not a model of this network: 1.weight should have the shape \(3, 8\)"):
        run(init=other.folder)
    with pytest.raises(UserError, match="init has 771 numbers; the model 'softmax' has 27"):
        run(init=other)
    save_file(
        {"1.weight": np.full((3, 8), np.nan, np.float32), "1.bias": np.zeros(3, np.float32)},
        tmp_path / "nan.safetensors",
    )
    with pytest.raises(UserError, match="not finite"):
        run(init=tmp_path / "nan.safetensors")
    (tmp_path / "unfinished").mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        run(init=tmp_path / "unfinished")
