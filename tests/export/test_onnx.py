"""The ONNX file: checked, for any number of samples, with the scaling of features in it."""

from __future__ import annotations

import json

import numpy as np

from cbdsl.data.dataset import Scaling
from cbdsl.export.steps import program_of
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Flatten, Linear, Relu
from cbdsl.models.saved_model import ModelMetadata, SavedModel
from support.c_programs import by_onnxruntime, difference, model_of, needs_onnx, truth
from support.networks import samples_for

pytestmark = needs_onnx
SCALING = Scaling((3.0, -1.0), (0.5, 8.0))
SMALL = Architecture((2, 7), (Flatten(), Linear(14, 5), Relu(), Linear(5, 3)))


def onnx_of(model: SavedModel, raw: bool = False) -> bytes:
    from cbdsl.export.onnx_file import onnx_model  # noqa: PLC0415

    return onnx_model(program_of(model, raw))


def test_it_takes_any_number_of_samples_and_names_what_it_takes_and_gives() -> None:
    import onnx  # noqa: PLC0415

    model = model_of(SMALL, names=("a", "b"))
    content = onnx_of(model)
    read = onnx.load_from_string(content)
    onnx.checker.check_model(read, full_check=True)
    (given,), (made,) = read.graph.input, read.graph.output
    assert [given.name, made.name] == ["features", "logits"]
    sides = [side.dim_param or side.dim_value for side in given.type.tensor_type.shape.dim]
    assert sides == ["N", 2, 7]
    assert json.loads({entry.key: entry.value for entry in read.metadata_props}["classes"]) == ["a", "b"]
    for count in (1, 17):
        features = samples_for(SMALL, count).features
        assert difference(by_onnxruntime(content, features), truth(model, features)) < 1e-5


def test_features_are_scaled_inside_unless_they_come_scaled() -> None:
    model = model_of(SMALL, scaling=SCALING)
    raw = samples_for(SMALL, 4).features * 5
    expected = truth(model, SCALING.apply(raw))
    assert difference(by_onnxruntime(onnx_of(model), raw), expected) < 1e-5
    assert difference(by_onnxruntime(onnx_of(model, raw=True), SCALING.apply(raw)), expected) < 1e-5


def test_samples_of_many_axes_keep_their_shape_and_their_channels() -> None:
    rows = Architecture((24,), (Linear(24, 3),))
    made = model_of(rows, scaling=SCALING)
    model = SavedModel(ModelMetadata((2, 3, 2, 2), rows, made.card.tensors, SCALING), made.weights, "made here")
    raw = np.random.default_rng(0).normal(size=(4, 2, 3, 2, 2)).astype(np.float32)
    expected = truth(model, SCALING.apply(raw).reshape(4, 24))
    assert difference(by_onnxruntime(onnx_of(model), raw), expected) < 1e-5
