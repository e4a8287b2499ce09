"""The Python file: a module that stands alone, and computes what the model does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cbdsl.arrays import Floats
from cbdsl.data.dataset import Scaling
from cbdsl.export.steps import program_of
from cbdsl.export.torch_source import torch_source, torch_tensors
from cbdsl.export.write import write
from cbdsl.models.architecture import Architecture
from cbdsl.models.saved_model import SavedModel
from cbdsl.models.zoo import usual
from support.c_programs import difference, model_of, truth, zoo
from support.networks import graphs, samples_for

ALONE = """
import sys, numpy, torch
sys.modules["cbdsl"] = None  # an import of it would fail
import model
with torch.no_grad():
    numpy.save("logits.npy", model.load()(torch.from_numpy(numpy.load("features.npy"))).numpy())
print(model.CLASSES)
"""


def by_itself(model: SavedModel, features: Floats, folder: Path) -> float:
    """How far the written module is from the truth; it runs in a process that knows nothing else."""
    written = write(model, "torch", folder / "model.py")
    assert [path.name for path in written.paths] == ["model.py", "model.safetensors"]
    np.save(folder / "features.npy", features)
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inside = features if model.card.scaling is None else model.card.scaling.apply(features)
    return difference(np.load(folder / "logits.npy"), truth(model, inside))


def test_it_stands_alone(tmp_path: Path) -> None:
    model = model_of(usual("resnet8"), scaling=Scaling((0.5, 0.4, 0.3), (2.0, 3.0, 4.0)))
    assert by_itself(model, samples_for(model.graph, 3).features, tmp_path) < 1e-5


def run_here(model: SavedModel, features: Floats) -> Floats:
    program = program_of(model)
    space: dict[str, Any] = {"__file__": "model.py"}
    exec(torch_source(program), space)
    module = space["Network"]()
    module.load_state_dict({name: torch.from_numpy(values) for name, values in torch_tensors(program).items()})
    with torch.no_grad():
        logits: Floats = module.eval()(torch.from_numpy(features)).numpy()
    return logits


@pytest.mark.parametrize("name", ["cnn", "har-cnn", "ds-cnn", "resnet8", "mobilenet-025"])
def test_every_network_of_the_zoo_computes_the_same(name: str) -> None:
    model, features, logits = zoo(name)
    assert difference(run_here(model, features), logits) < 1e-5


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(architecture=graphs(dropout=True))
def test_random_graphs_compute_the_same(architecture: Architecture) -> None:
    model, features = model_of(architecture), samples_for(architecture, 3).features
    assert difference(run_here(model, features), truth(model, features)) < 1e-5
