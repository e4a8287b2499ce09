"""The networks that come with the package, as descriptions."""

from __future__ import annotations

import math

from cbdsl import register
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture, Draft
from cbdsl.models.layers import (
    Add,
    ArchitectureError,
    AvgPool2d,
    Conv1d,
    Conv2d,
    Flatten,
    GroupNorm,
    Gru,
    Layer,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Shape,
    Transpose,
)

_GROUPS = 8  # of GroupNorm, where channels allow
_POOL2 = MaxPool2d((2, 2), (2, 2))
_HALVE = MaxPool1d((2,), (2,))


@register.model("cnn")
def cnn(shape: Shape, classes: int) -> Architecture:
    """Table I of the paper: two convolutions, three dense layers; 44,426 parameters on MNIST."""
    _need_images("cnn", shape, 16)
    channels, height, width = shape
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return _network(
        "cnn",
        shape,
        Conv2d(channels, 6, (5, 5)),
        Relu(),
        _POOL2,
        Conv2d(6, 16, (5, 5)),
        Relu(),
        _POOL2,
        Flatten(),
        Linear(16 * pooled[0] * pooled[1], 120),
        Relu(),
        Linear(120, 84),
        Relu(),
        Linear(84, classes),
    )


@register.model("mlp")
def mlp(shape: Shape, classes: int) -> Architecture:
    """One hidden layer of 64 units: 50,890 parameters on MNIST."""
    return _network("mlp", shape, Flatten(), Linear(math.prod(shape), 64), Relu(), Linear(64, classes))


@register.model("autoencoder")
def autoencoder(shape: Shape, classes: int) -> Architecture:
    """Three hidden layers of 64, 16 and 64 units, for a reconstruction: 103,328 parameters on MNIST."""
    code = (Linear(64, 16), Relu(), Linear(16, 64), Relu())
    return _network("autoencoder", shape, Flatten(), Linear(math.prod(shape), 64), Relu(), *code, Linear(64, classes))


@register.model("softmax")
def softmax(shape: Shape, classes: int) -> Architecture:
    """Softmax regression: 7,850 parameters on MNIST, and a convex problem."""
    return _network("softmax", shape, Flatten(), Linear(math.prod(shape), classes))


@register.model("har-cnn")
def har_cnn(shape: Shape, classes: int) -> Architecture:
    """Windows of sensors, (channels, length): three convolutions and two dense layers, after Ronao and Cho (2016)."""
    channels, length = _need_windows("har-cnn", shape)
    return _network(
        "har-cnn",
        shape,
        Conv1d(channels, 32, (5,), padding=(2,)),
        Relu(),
        _HALVE,
        Conv1d(32, 32, (5,), padding=(2,)),
        Relu(),
        _HALVE,
        Conv1d(32, 32, (5,), padding=(2,)),
        Relu(),
        _HALVE,
        Flatten(),
        Linear(32 * (length // 8), 64),
        Relu(),
        Linear(64, classes),
    )


@register.model("har-gru")
def har_gru(shape: Shape, classes: int) -> Architecture:
    """Windows of sensors, (channels, length): a convolution with stride 4 and a GRU of 64 units."""
    channels, _ = _need_windows("har-gru", shape)
    return _network(
        "har-gru",
        shape,
        Conv1d(channels, 32, (8,), padding=(2,), stride=(4,)),
        Relu(),
        Transpose(),
        Gru(32, 64),
        Linear(64, classes),
    )


@register.model("ds-cnn")
def ds_cnn(shape: Shape, classes: int) -> Architecture:
    """Depthwise separable, the keyword-spotting network of MLPerf Tiny (Zhang et al. 2017), with GroupNorm."""
    _need_images("ds-cnn", shape, 8)
    net = Draft(shape)
    _convolve(net, Conv2d(shape[0], 64, (10, 4), (5, 2), False, (2, 2)))
    for _ in range(4):
        _separable(net, 64, 64, 1)
    return _classified(net, classes)


@register.model("resnet8")
def resnet8(shape: Shape, classes: int) -> Architecture:
    """Three residual blocks of 16, 32 and 64 channels, the CIFAR-10 network of MLPerf Tiny, with GroupNorm."""
    _need_images("resnet8", shape, 8)
    net = Draft(shape)
    last = _convolve(net, Conv2d(shape[0], 16, (3, 3), (1, 1), False))
    before = 16
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        _convolve(net, Conv2d(before, channels, (3, 3), (1, 1), False, (stride, stride)), last)
        net.add(Conv2d(channels, channels, (3, 3), (1, 1), False))
        branch = net.add(GroupNorm(_GROUPS, channels))
        if stride != 1:
            last = net.add(Conv2d(before, channels, (1, 1), (0, 0), False, (stride, stride)), last)
        net.add(Add(), branch, last)
        last, before = net.add(Relu()), channels
    return _classified(net, classes)


@register.model("mobilenet-025")
def mobilenet(shape: Shape, classes: int) -> Architecture:
    """MobileNet (Howard et al. 2017) at a quarter of its width, as in MLPerf Tiny, with GroupNorm."""
    _need_images("mobilenet-025", shape, 32)
    net = Draft(shape)
    _convolve(net, Conv2d(shape[0], 8, (3, 3), (1, 1), False, (2, 2)))
    before = 8
    for channels, stride in (
        (16, 1),
        (32, 2),
        (32, 1),
        (64, 2),
        (64, 1),
        (128, 2),
        *[(128, 1)] * 5,
        (256, 2),
        (256, 1),
    ):
        _separable(net, before, channels, stride)
        before = channels
    return _classified(net, classes)


USUAL: dict[str, tuple[Shape, int]] = {
    "autoencoder": ((1, 28, 28), 784),
    "har-cnn": ((6, 128), 6),  # windows of a telephone's sensors, as in `hapt`
    "har-gru": ((6, 128), 6),
    "ds-cnn": ((1, 49, 10), 12),  # a second of speech
    "resnet8": ((3, 32, 32), 10),  # CIFAR-10
    "mobilenet-025": ((3, 96, 96), 2),  # visual wake words
}
"""Sample shape and classes that a network was designed for, if not those of MNIST."""


def usual(name: str) -> Architecture:
    """Return a network for the samples that it was designed for."""
    made = register.model.get(name)(*USUAL.get(name, ((1, 28, 28), 10)))
    if not isinstance(made, Architecture):
        raise UserError(
            f"The model '{name}' is a torch module; only networks that are described are measured.",
            code="not-supported",
        )
    return made


def _convolve(net: Draft, layer: Conv2d, *reads: int) -> int:
    """Add a convolution, its norm and a ReLU; return the number of the result."""
    net.add(layer, *reads)
    net.add(GroupNorm(math.gcd(_GROUPS, layer.outputs), layer.outputs))
    return net.add(Relu())


def _separable(net: Draft, inputs: int, outputs: int, stride: int) -> None:
    """Add a depthwise and a pointwise convolution."""
    _convolve(net, Conv2d(inputs, inputs, (3, 3), (1, 1), False, (stride, stride), groups=inputs))
    _convolve(net, Conv2d(inputs, outputs, (1, 1), (0, 0), False))


def _classified(net: Draft, classes: int) -> Architecture:
    """Add the mean of every channel and a dense layer; return the network."""
    channels, height, width = net.shape_of(net.last)
    net.add(AvgPool2d((height, width), (height, width)))
    net.add(Flatten())
    net.add(Linear(channels, classes))
    return net.architecture()


def _need_windows(name: str, shape: Shape) -> Shape:
    """Return the channels and the length of a window; refuse other shapes."""
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 16:
        raise UserError(
            f"The model '{name}' needs windows (channels, length) of at least 16 readings; the data has shape "
            f"{shape}. Choose --model cnn for images, --model mlp for anything else, or give a module of your own.",
            code="wrong-shape",
        )
    return shape


def _need_images(name: str, shape: Shape, side: int) -> None:
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < side:
        raise UserError(
            f"The model '{name}' needs images of shape (channels, height, width) with at least {side} x {side} pixels; "
            f"the data has shape {shape}. Choose {_others(shape)}, or give a module of your own.",
            code="wrong-shape",
        )


def _others(shape: Shape) -> str:
    """Return options for data that are not images."""
    return f"{'--model har-cnn, ' * (len(shape) == 2)}--model mlp or --model softmax"


def _network(name: str, shape: Shape, *layers: Layer) -> Architecture:
    """Return a chain of layers; samples with more axes than images become rows."""
    try:
        return Architecture(shape if len(shape) <= 3 else (math.prod(shape),), layers)
    except ArchitectureError as error:
        raise UserError(
            f"The model '{name}' cannot be built for data of shape {shape}: {error}.", code="wrong-shape"
        ) from error
