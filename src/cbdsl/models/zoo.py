"""The networks that come with the package, as descriptions: layers and sizes, no weights, no torch.

`cbdsl.models.initial` draws their first weights, an engine trains them, and
`cbdsl.engines.torch_modules` builds the torch module where one is wanted.
"""

from __future__ import annotations

import math

from cbdsl import register
from cbdsl.engines.architecture import (
    Architecture,
    ArchitectureError,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Shape,
)
from cbdsl.errors import UserError


@register.model("cnn")
def cnn(shape: Shape, classes: int) -> Architecture:
    """Table I of the paper: two convolutions, three dense layers; 44,426 parameters on MNIST."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise UserError(
            f"The model 'cnn' needs images of shape (channels, height, width) with at least 16 x 16 pixels; "
            f"the data has shape {shape}. Choose --model mlp or --model softmax, or give a module of your own."
        )
    channels, height, width = shape
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return _network(
        "cnn",
        shape,
        Conv2d(channels, 6, (5, 5)),
        Relu(),
        MaxPool2d((2, 2), (2, 2)),
        Conv2d(6, 16, (5, 5)),
        Relu(),
        MaxPool2d((2, 2), (2, 2)),
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


@register.model("softmax")
def softmax(shape: Shape, classes: int) -> Architecture:
    """Softmax regression: 7,850 parameters on MNIST, and a convex problem."""
    return _network("softmax", shape, Flatten(), Linear(math.prod(shape), classes))


def _network(name: str, shape: Shape, *layers: Layer) -> Architecture:
    """Describe a network; samples that are neither rows nor images, such as (channels, length), count as rows.

    Those networks flatten them first, so the weights are the same; `choose_engine` sees to it that they get an engine.
    """
    try:
        return Architecture(shape if len(shape) in {1, 3} else (math.prod(shape),), layers)
    except ArchitectureError as error:
        raise UserError(f"The model '{name}' cannot be built for data of shape {shape}: {error}.") from error
