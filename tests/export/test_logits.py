"""Exported models compute what the model does: every network of the zoo, and random graphs of every layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.export.c_source import c_file
from cbdsl.export.steps import program_of, rounded_flat
from cbdsl.models.architecture import Architecture
from cbdsl.models.saved_model import SavedModel
from cbdsl.runs.result import log_probabilities
from support.c_programs import (
    by_onnxruntime,
    compiled,
    difference,
    model_of,
    needs_cc,
    needs_clang,
    needs_onnx,
    truth,
    zoo,
)
from support.networks import graphs, needs_native, samples_for

NEAR = 1e-5
few = settings(
    max_examples=20, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
ZOO = [name for name in register.model.names() if register.model.get(name).__module__ == "cbdsl.models.zoo"]


def in_c(model: SavedModel, features: Floats, folder: Path, int8: bool = False, compiler: str = "gcc") -> Floats:
    run = compiled(c_file(program_of(model), int8).text, folder, features[0].size, model.graph.classes, compiler)
    return run(features)


def in_onnx(model: SavedModel, features: Floats, folder: Path) -> Floats:  # noqa: ARG001
    from cbdsl.export.onnx_file import onnx_model  # noqa: PLC0415

    return by_onnxruntime(onnx_model(program_of(model)), features)


Runner = Callable[[SavedModel, Floats, Path], Floats]
RUNNERS = [
    pytest.param(in_c, marks=needs_cc, id="gcc"),
    pytest.param(partial(in_c, compiler="clang"), marks=needs_clang, id="clang"),
    pytest.param(in_onnx, marks=needs_onnx, id="onnx"),
]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("run", RUNNERS)
def test_every_network_of_the_zoo_computes_the_same_elsewhere(run: Runner, name: str, tmp_path: Path) -> None:
    model, features, logits = zoo(name)
    assert difference(run(model, features, tmp_path), logits) < NEAR


@pytest.mark.parametrize("run", RUNNERS)
@few
@given(architecture=graphs(dropout=True))
def test_random_graphs_compute_the_same_elsewhere(run: Runner, architecture: Architecture, tmp_path: Path) -> None:
    model = model_of(architecture)
    features = samples_for(architecture, 4).features
    assert difference(run(model, features, tmp_path), truth(model, features)) < NEAR


@needs_native
@pytest.mark.parametrize("name", ZOO)
def test_probabilities_by_the_native_engine_are_those_of_the_logits(name: str) -> None:
    model, features, logits = zoo(name)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = log_probabilities(NativeEngine(model.graph, 1), model.weights, features, model.graph.classes)
    assert difference(found, expected) < NEAR


@needs_cc
@few
@given(architecture=graphs())
def test_eight_bits_in_c_are_the_model_with_rounded_weights(architecture: Architecture, tmp_path: Path) -> None:
    model = model_of(architecture)
    features = samples_for(architecture, 4).features
    rounded = SavedModel(model.card, rounded_flat(program_of(model).steps), "rounded")
    assert difference(in_c(model, features, tmp_path, int8=True), truth(rounded, features)) < NEAR
