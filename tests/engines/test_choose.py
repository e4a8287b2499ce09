from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cbdsl.arrays import Samples
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native_engine import available
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.network import initial_weights
from cbdsl.models.zoo import cnn, mlp
from support.helpers import module_named
from support.refusals import refused_as

IMAGE = (1, 28, 28)
NETWORKS = [pytest.param(cnn(IMAGE, 10), id="described"), pytest.param(module_named("cnn", IMAGE, 10), id="module")]
needs_native = pytest.mark.skipif(available() is not None, reason="NO NATIVE ENGINE: install a C++ compiler")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same everywhere, whatever there is."""
    see(monkeypatch)


def see(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    """Let torch see these GPUs; they compute on the CPU, for there may be none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: "cuda" in gpus)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: "mps" in gpus)
    monkeypatch.setattr("cbdsl.engines.torch_engine.StackedTorchEngine", Elsewhere)


class Elsewhere(TorchEngine):
    """Stands for the engine on a GPU."""

    def __init__(self, module: nn.Module, device: torch.device, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(module, **settings)
        self.name = f"torch-{device.type}"


def unusual() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.ELU())


@needs_native
@pytest.mark.parametrize("network", NETWORKS)
def test_a_model_the_kernels_know_runs_natively_and_nothing_is_said(network: Architecture | nn.Module) -> None:
    choice = choose_engine("auto", network, IMAGE, 1)
    assert (choice.engine.name, choice.note) == ("native", "")


@needs_native
def test_a_model_with_another_layer_runs_on_torch_and_one_line_says_why() -> None:
    choice = choose_engine("auto", unusual(), IMAGE, 1)
    assert choice.engine.name == "torch"
    assert "ELU" in choice.note
    assert "\n" not in choice.note


@pytest.mark.parametrize("network", NETWORKS)
def test_without_the_library_torch_takes_over_and_says_so(
    network: Architecture | nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.engines.native_engine.available", lambda: "the native engine was not built")
    choice = choose_engine("auto", network, IMAGE, 1)
    assert (choice.engine.name, choice.note) == ("torch", "torch engine: the native engine was not built")
    with refused_as("not-supported", "not built"):
        choose_engine("native", network, IMAGE, 1)


@needs_native
def test_asking_for_native_where_it_cannot_is_an_error_that_names_the_layer() -> None:
    with refused_as("not-supported", "ELU"):
        choose_engine("native", unusual(), IMAGE, 1)


@pytest.mark.parametrize("network", NETWORKS)
def test_torch_is_used_when_it_is_asked_for(network: Architecture | nn.Module) -> None:
    assert choose_engine("torch", network, IMAGE, 1).engine.name == "torch"


@needs_native
@pytest.mark.parametrize("described", [True, False])
def test_samples_with_more_axes_than_images_run_on_torch(described: bool) -> None:
    shape = (2, 1, 2, 5)
    network = mlp(shape, 3)
    choice = choose_engine("auto", network if described else module_named("mlp", shape, 3), shape, 1)
    assert choice.engine.name == "torch"
    assert (
        "shape of a sample is (2, 1, 2, 5); give (features,), (channels, length) or (channels, height, width)"
        in choice.note
    )
    samples = Samples(np.ones((6, *shape), np.float32), np.zeros(6, np.int32))
    assert np.isfinite(choice.engine.losses(initial_weights(network, 0)[None], samples, np.arange(6, dtype=np.int32)))


@needs_native
def test_samples_of_another_shape_than_the_networks_are_an_obstacle() -> None:
    with refused_as("not-supported", "(20,)", "(1, 4, 5)"):
        choose_engine("native", mlp((20,), 3), (1, 4, 5), 1)


@needs_native
@pytest.mark.parametrize("network", NETWORKS)
def test_a_gpu_changes_nothing_where_the_kernels_know_the_model(
    network: Architecture | nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, "cuda", "mps")
    for device in ("auto", "cpu"):
        choice = choose_engine("auto", network, IMAGE, 1, device)
        assert (choice.engine.name, choice.note) == ("native", "")


@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("auto", [], "torch"),
        ("auto", ["cuda"], "torch-cuda"),
        ("auto", ["mps"], "torch-mps"),
        ("auto", ["cuda", "mps"], "torch-cuda"),
        ("cpu", ["cuda", "mps"], "torch"),
        ("cuda", ["cuda"], "torch-cuda"),
        ("mps", ["cuda", "mps"], "torch-mps"),
    ],
)
def test_a_model_for_torch_goes_where_it_was_asked_for_or_to_the_gpu_there_is(
    name: str, device: str, gpus: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, *gpus)
    assert choose_engine(name, unusual(), IMAGE, 1, device).engine.name == expected


@needs_native
def test_the_note_says_where_a_model_runs_that_the_kernels_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda")
    note = choose_engine("auto", unusual(), IMAGE, 1).note
    assert note.startswith("torch-cuda engine: the native engine cannot run this model")


@pytest.mark.parametrize("network", NETWORKS)
def test_asking_for_a_gpu_is_asking_for_torch(
    network: Architecture | nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, "cuda")
    choice = choose_engine("auto", network, IMAGE, 1, "cuda")
    assert (choice.engine.name, choice.note) == ("torch-cuda", "")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_native_engine_on_a_gpu_is_an_error_whatever_is_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, device)
    with refused_as("conflict", device):
        choose_engine("native", cnn(IMAGE, 10), IMAGE, 1, device)


def test_a_device_that_nobody_knows_is_an_error_with_those_there_are() -> None:
    with refused_as("unknown-name", "'gpu'", "auto, cpu, cuda, mps"):
        choose_engine("torch", unusual(), IMAGE, 1, "gpu")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cbdsl.engines import choose, native_engine
from cbdsl.errors import UserError
from cbdsl.models.zoo import cnn

def show(*words):
    try:
        print(choose.choose_engine(words[0], cnn((1, 28, 28), 10), (1, 28, 28), 1, *words[1:]).engine.name)
    except UserError as error:
        print(error)

for words in (["auto"], ["native"], ["torch"], ["auto", "cuda"]):
    show(*words)
native_engine.available = lambda: "the native engine was not built"
show("auto")
"""


@needs_native
def test_without_torch_a_described_network_runs_natively_and_an_error_says_why_torch_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    auto, native, asked, gpu, not_built = done.stdout.splitlines()
    assert (auto, native) == ("native", "native")
    for line, why in (
        (asked, "the torch engine was asked for"),
        (gpu, "the device cuda was asked for"),
        (not_built, "the native engine was not built"),
    ):
        assert why in line
        assert "pip install 'cbdsl[torch]'" in line
