"""The package's own networks, described without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbdsl import register
from cbdsl.models.layers import Flatten, Linear, Relu
from cbdsl.models.zoo import cnn, mlp, softmax
from support.helpers import shape_for
from support.refusals import refused_as

SIZES = {
    "cnn": 44_426,
    "mlp": 50_890,
    "autoencoder": 53_018,
    "softmax": 7_850,
    "har-cnn": 44_778,  # 992 + 2 * 5,152 + 32,832 + 650
    "har-gru": 21_034,  # 1,568 + 18,816 + 650
    "ds-cnn": 23_050,
    "resnet8": 77_562,
    "mobilenet-025": 215_642,
}


@pytest.mark.parametrize("name", register.model.names())
def test_networks_have_the_stated_size_and_one_output_per_class(name: str) -> None:
    network = register.model.get(name)(shape_for(name), 10)
    assert (network.shape, network.size, network.classes) == (shape_for(name), SIZES[name], 10)


@pytest.mark.parametrize("shape", [(8,), (1, 12, 28), (28, 28)])
def test_the_cnn_refuses_what_it_cannot_see(shape: tuple[int, ...]) -> None:
    with refused_as("wrong-shape", "16 x 16"):
        cnn(shape, 3)


@pytest.mark.parametrize("shape", [(20,), (4, 5), (1, 4, 5), (2, 1, 2, 5)])
def test_the_others_take_samples_of_any_shape(shape: tuple[int, ...]) -> None:
    assert mlp(shape, 3).layers == (Flatten(), Linear(20, 64), Relu(), Linear(64, 3))
    assert softmax(shape, 3).layers == (Flatten(), Linear(20, 3))


@pytest.mark.parametrize("name", register.model.names())
def test_samples_without_numbers_are_an_error_that_names_the_shape(name: str) -> None:
    with refused_as("wrong-shape", name, "(0, 30, 30)"):
        register.model.get(name)((0, 30, 30), 2)


def test_describing_naming_and_starting_a_network_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import cbdsl.engines.native_engine; from cbdsl.models import zoo;"
        "from cbdsl.models.network import Network, initial_weights;"
        "network = zoo.cnn((1, 28, 28), 10); weights = initial_weights(network, 0);"
        "print(len(weights), len(Network((1, 28, 28), 10, network).tensors(weights)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["44426", "10"]
