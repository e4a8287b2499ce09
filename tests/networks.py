"""Random networks for property tests."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from cbdsl.engines.architecture import (
    Architecture,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Sigmoid,
    Tanh,
)

_ACTIVATION: st.SearchStrategy[Layer] = st.sampled_from([Relu(), Tanh(), Sigmoid()])
_ACTIVATIONS = st.lists(_ACTIVATION, max_size=2)
_Image = tuple[int, int, int]


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Convolutions and pools that fit their images, then dense layers; each with or without a bias."""
    layers: list[Layer] = []
    if draw(st.booleans()):
        image = (draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 20)))
        sample: tuple[int, ...] = image
        for _ in range(draw(st.integers(0, 3))):
            layer, image = draw(_convolution(image) if draw(st.booleans()) else _pool(image))
            layers += [layer, *draw(_ACTIVATIONS)]
        layers.append(Flatten())
        inputs = math.prod(image)
    else:
        inputs = draw(st.integers(1, 400))
        sample = (inputs,)
        layers += [Flatten()] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        outputs = draw(st.integers(1, 30))
        layers += [Linear(inputs, outputs, draw(st.booleans())), *draw(_ACTIVATIONS)]
        inputs = outputs
    return Architecture(sample, tuple(layers))


@st.composite
def _convolution(draw: st.DrawFn, image: _Image) -> tuple[Layer, _Image]:
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    height, width = image[1] + 2 * padding[0], image[2] + 2 * padding[1]
    kernel = (draw(st.integers(1, min(height, 5))), draw(st.integers(1, min(width, 5))))
    outputs = draw(st.integers(1, 8))
    layer = Conv2d(image[0], outputs, kernel, padding, draw(st.booleans()))
    return layer, (outputs, height - kernel[0] + 1, width - kernel[1] + 1)


@st.composite
def _pool(draw: st.DrawFn, image: _Image) -> tuple[Layer, _Image]:
    kernel = (draw(st.integers(1, min(image[1], 3))), draw(st.integers(1, min(image[2], 3))))
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    height, width = ((image[1 + axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1))
    layer = MaxPool2d(kernel, stride) if draw(st.booleans()) else AvgPool2d(kernel, stride)
    return layer, (image[0], height, width)
