"""A model's file explains itself, and one that lies is an error with a reason, never a crash."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import cbdsl
from cbdsl.data.dataset import Dataset, Scaling
from cbdsl.errors import UserError
from cbdsl.export.predict import Unseen, predict, read_unseen
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Linear, Relu
from cbdsl.models.network import Network, read_tensors
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.runs import loop
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as
from support.written_modules import MODULES

NETWORK = Architecture((4,), (Linear(4, 6), Relu(), Linear(6, 3)))
CARD = ModelMetadata(
    (4,), NETWORK, tuple(NETWORK.tensors()), Scaling((0.5, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0)), ("a", "b", "c")
)


def write(path: Path, metadata: dict[str, str], **more: Any) -> Path:  # noqa: ANN401
    tensors = {name: np.ones(shape, np.float32) for name, shape in NETWORK.tensors().items()} | more
    save_file({name: each for name, each in tensors.items() if each is not None}, path, metadata)
    return path


def test_what_a_card_says_is_read_back(tmp_path: Path) -> None:
    model = cbdsl.load(write(tmp_path / "model.safetensors", CARD.metadata()))
    assert model.card == CARD
    assert model.weights.shape == (NETWORK.size,)
    assert [model.class_name(label) for label in range(4)] == ["a", "b", "c", "3"]


def test_the_file_of_a_run_says_what_the_run_knew(tmp_path: Path, mnist: Dataset) -> None:
    spec = small_spec(model="softmax", rounds=1)
    result = cbdsl.run(spec, data=mnist, out=tmp_path / "run")
    with safe_open(tmp_path / "run" / "model.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert all(isinstance(text, str) for text in metadata.values())
    assert json.loads(metadata["cbdsl_graph"]) == result.network.description().to_dict()
    model = cbdsl.load(tmp_path / "run")
    assert model.card.scaling == mnist.scaling
    assert model.card.scaling is not None
    assert model.card.scaling.shades
    assert (model.card.shape, model.card.obstacle) == ((1, 28, 28), "")
    np.testing.assert_array_equal(model.weights, result.weights)


def test_a_file_without_a_card_still_starts_a_run_and_says_how_to_get_one(tmp_path: Path) -> None:
    cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    save_file(load_file(path), path)
    with refused_as("not-supported", f"cbdsl resume {tmp_path / 'run'}"):
        cbdsl.load(tmp_path / "run")
    with refused_as("not-supported", "`cbdsl run`"):
        cbdsl.load(path)
    warm = cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), init=path)
    assert warm.summary.rounds == 1
    loop.resume(tmp_path / "run", model=perceptron, data=blobs())
    assert cbdsl.load(tmp_path / "run").card.graph is not None


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_ones_own_is_described_and_predicts_as_torch_does(name: str, tmp_path: Path) -> None:
    build, described = MODULES[name]
    shape, classes = described().shape, described().classes
    network = Network(shape, classes, None, build)
    weights = network.initial_weights(3)
    card = ModelMetadata.of(network)
    assert card.graph == described()
    path = tmp_path / "own.safetensors"
    save_file(network.tensors(weights), path, card.metadata())
    model = cbdsl.load(path)
    np.testing.assert_array_equal(model.weights, weights)
    features = np.random.default_rng(0).standard_normal((5, *shape), dtype=np.float32)
    with torch.no_grad():
        expected = network.module(weights)(torch.from_numpy(features)).softmax(1).max(1)
    found = predict(model, Unseen(features, None))
    np.testing.assert_array_equal(found.labels, expected.indices.numpy())
    np.testing.assert_allclose(found.probabilities, expected.values.numpy(), atol=1e-5)


def test_a_loaded_model_is_a_torch_module(tmp_path: Path) -> None:
    data = blobs()
    result = cbdsl.run(small_spec(model="mlp", rounds=1), data=data, out=tmp_path / "run")
    module = cbdsl.load(tmp_path / "run").model
    features = torch.from_numpy(data.test.features)
    assert not module.training
    assert torch.equal(module(features), result.model(features))


class Odd(nn.Module):
    """Nothing that can be described: it sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.sort(1).values)  # type: ignore[no-any-return]


def test_what_cannot_be_described_is_saved_and_says_why_only_torch_can_run_it(tmp_path: Path) -> None:
    cbdsl.run(small_spec(rounds=1), model=Odd, data=blobs(), out=tmp_path / "run")
    model = cbdsl.load(tmp_path / "run")
    assert model.card.graph is None
    for name in ("graph", "model"):
        with refused_as("not-supported", "sort"):
            getattr(model, name)


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")  # to open it would wait for ever
    for path in (tmp_path / "pipe.safetensors", Path("/dev/zero"), tmp_path):
        with refused_as("unreadable-file", "not a file"):
            read_tensors(path)


def test_samples_of_many_axes_count_as_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(700, 2, 2, 2, 2)), rng.integers(0, 3, 700)
    data = Dataset.from_arrays(features[:600], labels[:600], features[600:], labels[600:])
    result = cbdsl.run(small_spec(model="mlp", rounds=1), data=data, out=tmp_path / "run")
    np.savez(tmp_path / "x.npz", features=features[600:], labels=labels[600:])
    model = cbdsl.load(tmp_path / "run")
    assert (model.card.shape, model.graph.shape) == ((2, 2, 2, 2), (16,))
    found = predict(model, read_unseen(tmp_path / "x.npz", model))
    np.testing.assert_array_equal(found.labels, result.predict(data.test.features))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cbdsl_format": "2"}, "is written in format '2'; this version reads 1"),
        ({"cbdsl_graph": "{"}, "its graph is not JSON"),
        ({"cbdsl_graph": "[" * 100_000}, "its graph is not JSON (it is nested too deeply)"),
        ({"cbdsl_graph": " " * (2**24 + 1)}, "its graph is longer than 16,777,216 characters"),
        ({"cbdsl_graph": "[]"}, "its network cannot be: an architecture is a table"),
        ({"cbdsl_shape": "[4, 2]"}, "its network takes (4,), and a sample has the shape (4, 2)"),
        ({"cbdsl_shape": "[1.5]"}, "shape must be a whole number; given 1.5"),
        ({"cbdsl_shape": ""}, "shape is missing"),
        ({"cbdsl_scaling": '{"mean": [0, 0, 0, 0], "deviation": [1, 1, 1, 0], "shades": false}'}, "above 0"),
        ({"cbdsl_scaling": '{"mean": [0], "deviation": [1], "shades": false}'}, "it scales 1 channels"),
        ({"cbdsl_scaling": '{"mean": [NaN], "deviation": [1], "shades": false}'}, "the mean of features is (nan,)"),
        ({"cbdsl_scaling": '{"mean": {}, "deviation": [1], "shades": false}'}, "scaling.mean must be a list; given {}"),
        ({"cbdsl_classes": '["a", "\\ud800"]'}, "which cannot be printed"),
        ({"cbdsl_classes": '["a", "b\\u001b[2J"]'}, "which cannot be printed"),
        ({"cbdsl_classes": '["a", "b", "c", "d"]'}, "it names 4 classes of 3"),
        ({"cbdsl_classes": '"abc"'}, "classes must be a list; given 'abc'"),
        ({"cbdsl_tensors": '["nothing"]'}, "the tensor 'nothing' is missing"),
        ({"cbdsl_tensors": "[]"}, "it has 0 weights, its network 51"),
        ({"cbdsl_tensors": '["0.weight", "0.weight", "0.bias", "2.bias"]'}, "it has 57 weights, its network 51"),
    ],
)  # fmt: skip
def test_a_card_that_does_not_hold_together_is_refused_with_the_reason(
    changed: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.safetensors", CARD.metadata() | changed)
    with pytest.raises(UserError) as caught:
        cbdsl.load(path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_tensors_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", CARD.metadata(), **{"0.bias": np.ones(6, np.int64)})
    with refused_as("damaged-file", "'0.bias'", "int64"):
        cbdsl.load(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 7, b"\xff" * 100, b"\x08" + bytes(7) + b"not json", b"{}" * 50])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with refused_as("unreadable-file", "model.safetensors"):
        cbdsl.load(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, str]:
    """A card with one value, somewhere in it, that is something else."""
    metadata = CARD.metadata()
    key = draw(st.sampled_from(["cbdsl_graph", "cbdsl_shape", "cbdsl_scaling", "cbdsl_classes", "cbdsl_tensors"]))
    whole = [json.loads(metadata[key])]
    place: Any = whole
    where: Any = 0
    while isinstance(place[where], list | dict) and place[where] and draw(st.integers(0, 4)):
        place = place[where]
        where = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if isinstance(place, dict) and draw(st.booleans()):
        place[draw(st.text(max_size=4))] = copy.copy(place.pop(where))
    else:
        place[where] = draw(VALUES)
    return metadata | {key: json.dumps(whole[0])}


@given(metadata=damaged())
def test_whatever_the_metadata_hold_the_answer_is_a_model_or_a_reason(metadata: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", metadata)
    try:
        model = cbdsl.load(path)
        found = predict(model, Unseen(np.zeros((2, *model.graph.shape), np.float32), None))
    except UserError as error:
        assert len(str(error)) < 2000
    else:
        assert found.labels.shape == (2,)
