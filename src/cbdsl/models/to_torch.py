"""Torch modules of layers and networks, and their weights as flat arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES, Architecture
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.layers import ArchitectureError, Layer, Shape


def parameter_count(module: nn.Module) -> int:
    """Return P, the number of parameters, frozen ones included."""
    return sum(parameter.numel() for parameter in module.parameters())


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that train, by name: those that require a gradient."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen_of(module: nn.Module) -> FrozenWeights | None:
    """Return the weights of a module that do not train; None if all do."""
    trains = [np.full(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    if not trains or np.concatenate(trains).all():
        return None
    return FrozenWeights(to_flat(module), np.concatenate(trains))


def freeze(module: nn.Module, frozen: FrozenWeights) -> nn.Module:
    """Write frozen weights into a module, in place, so that they do not train; return the module."""
    load_flat(module, frozen.fill(to_flat(module)[frozen.trains]))
    offset = 0
    for parameter in module.parameters():
        end = offset + parameter.numel()
        parameter.requires_grad_(bool(frozen.trains[offset:end].any()))
        offset = end
    return module


def to_flat(module: nn.Module) -> Floats:
    """Concatenate all parameters of a module in their own order, (P,); a copy."""
    parts = [parameter.detach().reshape(-1).to(torch.float32) for parameter in module.parameters()]
    return torch.cat(parts).numpy().copy()


def load_flat(module: nn.Module, weights: Floats) -> None:
    """Write all weights (P,) into a module, in place."""
    expected = parameter_count(module)
    if weights.shape != (expected,):
        raise UserError(
            f"The model has {expected:,} parameters, but the weights given have shape {weights.shape}.",
            code="wrong-shape",
        )
    offset = 0
    with torch.no_grad():
        for parameter in module.parameters():
            count = parameter.numel()
            part = np.ascontiguousarray(weights[offset : offset + count])
            parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
            offset += count


def module_weights(build: Callable[[], nn.Module], seed: int) -> Floats:
    """Return all weights (P,) of a module that is built after `torch.manual_seed(seed)`.

    The state of torch's global generator is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_flat(build())


def module_of(architecture: Architecture) -> nn.Module:
    """Build a module with one torch layer per layer; '0.weight' are the weights of layer 0."""
    parts = [_BUILD[type(layer)](layer) for layer in architecture.layers]
    return nn.Sequential(*parts) if architecture.is_chain else GraphModule(parts, architecture.reads)


class GraphModule(nn.Module):
    """Layers that read each other's results."""

    def __init__(self, parts: list[nn.Module], reads: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)
        self.reads = reads

    def forward(self, samples: Tensor) -> Tensor:
        """Run every layer once, in order; drop each result after its last reader."""
        last_reader = {other: number for number, read in enumerate(self.reads) for other in read}
        made = {SAMPLES: samples}
        for number, (part, read) in enumerate(zip(self.children(), self.reads, strict=True)):
            made[number] = part(*(made[other] for other in read))
            for other in {*read}:
                if last_reader[other] == number:
                    del made[other]
        return made[len(self.reads) - 1]


class SumModule(nn.Module):
    """`Add` in torch."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return the sum, added up from first to last."""
        for other in others:
            first = first + other
        return first


class ConcatModule(nn.Module):
    """`Concat` in torch."""

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return all channels, one tensor after the other."""
        return torch.cat(tensors, 1)


class ScaleModule(nn.Module):
    """`Scale` in torch. Its constants are neither parameters nor part of a saved model."""

    factors: Tensor
    offsets: Tensor

    def __init__(self, layer: layers.Scale) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor(layer.factors), persistent=False)
        self.register_buffer("offsets", torch.tensor(layer.offsets), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Return x * factors + offsets, channel by channel."""
        behind = (1,) * (samples.dim() - 2)
        return samples * self.factors.view(-1, *behind) + self.offsets.view(-1, *behind)


class GruModule(nn.GRU):
    """`Gru` in torch: one layer that returns its states alone."""

    def __init__(self, layer: layers.Gru) -> None:
        super().__init__(layer.inputs, layer.hidden, bias=layer.bias, batch_first=True)
        self.last = layer.last

    def forward(self, samples: Tensor) -> Tensor:  # type: ignore[override]
        """Return the last state (N, H), or those after all steps (N, L, H)."""
        states: Tensor = super().forward(samples)[0]
        return states[:, -1] if self.last else states


class LstmModule(nn.LSTM):
    """`Lstm` in torch: one layer that returns its states alone."""

    def __init__(self, layer: layers.Lstm) -> None:
        super().__init__(layer.inputs, layer.hidden, bias=layer.bias, batch_first=True)
        self.last = layer.last

    def forward(self, samples: Tensor) -> Tensor:  # type: ignore[override]
        """Return the last state (N, H), or those after all steps (N, L, H)."""
        states: Tensor = super().forward(samples)[0]
        return states[:, -1] if self.last else states


class TransposeModule(nn.Module):
    """`Transpose` in torch."""

    def forward(self, samples: Tensor) -> Tensor:
        """Return the same numbers with the axes behind the samples changed."""
        return samples.transpose(1, 2)


@dataclass(frozen=True)
class TorchLayer:
    """One torch class: the layer kind it is, how to convert both ways, and which functions compute the same."""

    kind: type[Layer] | None  # None: it computes nothing
    module: type[nn.Module]
    describe: Callable[[str, Any, Shape], Layer | None]  # of its name in errors, the module and the shape it is given
    build: Callable[[Any], nn.Module] | None = None  # from a layer; None: modules of this class are only read
    functions: tuple[object, ...] = ()  # and names of tensor methods
    functions_in_place: tuple[object, ...] = ()
    from_call: Callable[..., nn.Module] | None = None  # of a sample's shape and a function's arguments; None: `module`


def _activation(
    kind: type[Layer], module: type[nn.Module], *functions: object, in_place: tuple[object, ...] = ()
) -> TorchLayer:
    """Return the row of an activation without settings."""
    return TorchLayer(kind, module, lambda *_: kind(), lambda _: module(), functions, in_place)


def _sizes(value: Any, axes: int) -> Shape:  # noqa: ANN401
    """Return one size per axis."""
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _convolution(kind: Any, module: Any) -> TorchLayer:  # noqa: ANN401 - two classes each, with tuples of one length
    axes = kind.AXES

    def build(layer: layers.Conv1d | layers.Conv2d) -> nn.Module:
        made: nn.Module = module(
            layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding, groups=layer.groups, bias=layer.bias
        )
        return made

    def describe(label: str, part: nn.Conv1d | nn.Conv2d, _shape: Shape) -> Layer:
        kernel, stride = _sizes(part.kernel_size, axes), _sizes(part.stride, axes)
        if set(_sizes(part.dilation, axes)) != {1}:
            raise ArchitectureError(f"{label} has dilation {part.dilation}; only dilation 1 is native")
        if part.padding_mode != "zeros":
            raise ArchitectureError(f"{label} pads with {part.padding_mode}, not with zeros; use padding_mode='zeros'")
        if part.padding == "same":
            if any(size % 2 == 0 for size in kernel):
                raise ArchitectureError(
                    f"{label} pads an even kernel on one side more than on the other; use an odd kernel or a number as "
                    "padding"
                )
            padding = tuple(size // 2 for size in kernel)
        else:
            padding = (0,) * axes if isinstance(part.padding, str) else _sizes(part.padding, axes)
        described: Layer = kind(
            part.in_channels, part.out_channels, kernel, padding, part.bias is not None, stride, part.groups
        )
        return described

    return TorchLayer(kind, module, describe, build)


def _max_pool(kind: Any, module: Any, *functions: object) -> TorchLayer:  # noqa: ANN401
    def describe(label: str, part: nn.MaxPool1d | nn.MaxPool2d, _shape: Shape) -> Layer:
        if set(_sizes(part.dilation, kind.AXES)) != {1} or part.ceil_mode or part.return_indices:
            raise ArchitectureError(f"{label} has dilation, ceil_mode or return_indices; leave them out")
        sizes = (_sizes(value, kind.AXES) for value in (part.kernel_size, part.stride, part.padding))
        described: Layer = kind(*sizes)
        return described

    def from_call(
        _shape: Shape,
        kernel_size: Any,  # noqa: ANN401
        stride: Any = None,  # noqa: ANN401
        padding: Any = 0,  # noqa: ANN401
        dilation: Any = 1,  # noqa: ANN401
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> nn.Module:
        made: nn.Module = module(kernel_size, stride, padding, dilation, return_indices, ceil_mode)
        return made

    return TorchLayer(kind, module, describe, partial(_build_pool, module), functions, (), from_call)


def _average_pool(kind: Any, module: Any, function: object) -> TorchLayer:  # noqa: ANN401
    def describe(label: str, part: nn.AvgPool1d | nn.AvgPool2d, _shape: Shape) -> Layer:
        padding = _sizes(part.padding, kind.AXES)
        if part.ceil_mode or getattr(part, "divisor_override", None):
            raise ArchitectureError(f"{label} has ceil_mode or divisor_override; leave them out")
        if any(padding) and not part.count_include_pad:
            raise ArchitectureError(
                f"{label} leaves its border out of the mean; use count_include_pad=True or padding=0"
            )
        described: Layer = kind(_sizes(part.kernel_size, kind.AXES), _sizes(part.stride, kind.AXES), padding)
        return described

    return TorchLayer(kind, module, describe, partial(_build_pool, module), (function,))


def _build_pool(module: Any, layer: Any) -> nn.Module:  # noqa: ANN401
    made: nn.Module = module(layer.kernel, layer.stride, layer.padding)
    return made


def _adaptive_pool(kind: Any, module: type[nn.Module], function: object) -> TorchLayer:  # noqa: ANN401
    """Return the row of a pooling to a given size, which is a plain one where that size divides the side."""

    def describe(label: str, part: Any, shape: Shape) -> Layer:  # noqa: ANN401
        if getattr(part, "return_indices", False):
            raise ArchitectureError(f"{label} has return_indices; leave it out")
        if len(shape) != 1 + kind.AXES:
            raise ArchitectureError(f"{label} pools {kind.AXES} axes beside the channels but is given {shape}")
        asked = part.output_size if isinstance(part.output_size, list | tuple) else (part.output_size,) * kind.AXES
        sizes = [side if size is None else size for size, side in zip(asked, shape[1:], strict=True)]
        if any(size < 1 or side % size for size, side in zip(sizes, shape[1:], strict=True)):
            raise ArchitectureError(
                f"{label} makes {tuple(sizes)} of {shape[1:]}; only sizes that divide these are native, such as 1"
            )
        window = tuple(side // size for size, side in zip(sizes, shape[1:], strict=True))
        described: Layer = kind(window, window)
        return described

    return TorchLayer(kind, module, describe, functions=(function,))


def _describe_group_norm(label: str, part: nn.GroupNorm, _shape: Shape) -> Layer:
    if part.affine and part.bias is None:
        raise ArchitectureError(f"{label} has factors but no offsets; use bias=True or affine=False")
    return layers.GroupNorm(part.num_groups, part.num_channels, part.affine, part.eps)


def _group_norm_from_call(
    shape: Shape, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> nn.Module:
    del weight, bias  # the reader refuses tensors
    return nn.GroupNorm(num_groups, shape[0], eps, affine=False)


def _describe_layer_norm(_label: str, part: nn.LayerNorm, _shape: Shape) -> Layer:
    affine = part.elementwise_affine
    bias = part.bias is not None if affine else True
    return layers.LayerNorm(tuple(part.normalized_shape), affine, bias, part.eps)


def _layer_norm_from_call(
    _shape: Shape, normalized_shape: Shape, weight: None = None, bias: None = None, eps: float = 1e-5
) -> nn.Module:
    del weight, bias
    return nn.LayerNorm(list(normalized_shape), eps, elementwise_affine=False)


def _instance_norm(module: type[nn.Module], axes: int) -> TorchLayer:
    def describe(label: str, part: nn.InstanceNorm1d | nn.InstanceNorm2d, shape: Shape) -> Layer:
        if part.track_running_stats:
            raise ArchitectureError(f"{label} keeps running statistics; use track_running_stats=False")
        if len(shape) != 1 + axes:
            raise ArchitectureError(f"{label} takes {axes} axes beside the channels but is given {shape}")
        return layers.GroupNorm(part.num_features, part.num_features, part.affine, part.eps)

    return TorchLayer(layers.GroupNorm, module, describe)


def _recurrent(kind: Any, module: Any, single: Any) -> tuple[TorchLayer, ...]:  # noqa: ANN401
    """Return the rows of torch's own class, whose first layer is described, and of the class that is built."""

    def describe(label: str, part: nn.RNNBase, _shape: Shape) -> Layer:
        for name, wanted, advice in (
            ("batch_first", True, "give it samples (N, steps, inputs) and batch_first=True"),
            ("bidirectional", False, "layers of both directions run on torch"),
            ("proj_size", 0, "projections run on torch"),
        ):
            if getattr(part, name) != wanted:
                raise ArchitectureError(f"{label} has {name}={getattr(part, name)}: {advice}")
        if part.dropout and part.num_layers > 1:
            raise ArchitectureError(f"{label} has dropout={part.dropout}: put nn.Dropout between layers of their own")
        described: Layer = kind(part.input_size, part.hidden_size, part.bias, getattr(part, "last", False))
        return described

    return TorchLayer(kind, module, describe), TorchLayer(kind, single, describe, single)


def _describe_softplus(label: str, part: nn.Softplus, _shape: Shape) -> Layer:
    if (part.beta, part.threshold) != (1, 20):
        raise ArchitectureError(
            f"{label} has beta {part.beta} and threshold {part.threshold}; only 1 and 20 are native"
        )
    return layers.Softplus()


def _dropout_from_call(_shape: Shape, p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace).train(training)


TORCH_LAYERS = (
    _convolution(layers.Conv1d, nn.Conv1d),
    _convolution(layers.Conv2d, nn.Conv2d),
    TorchLayer(
        layers.Linear,
        nn.Linear,
        lambda _, part, __: layers.Linear(part.in_features, part.out_features, part.bias is not None),
        lambda layer: nn.Linear(layer.inputs, layer.outputs, layer.bias),
    ),
    TorchLayer(
        layers.GroupNorm,
        nn.GroupNorm,
        _describe_group_norm,
        lambda layer: nn.GroupNorm(layer.groups, layer.channels, layer.epsilon, layer.affine),
        (functional.group_norm,),
        from_call=_group_norm_from_call,
    ),
    TorchLayer(
        layers.LayerNorm,
        nn.LayerNorm,
        _describe_layer_norm,
        lambda layer: nn.LayerNorm(layer.shape, layer.epsilon, layer.affine, layer.bias),
        (functional.layer_norm,),
        from_call=_layer_norm_from_call,
    ),
    _instance_norm(nn.InstanceNorm1d, 1),
    _instance_norm(nn.InstanceNorm2d, 2),
    _activation(
        layers.Relu, nn.ReLU, "relu", torch.relu, functional.relu, in_place=("relu_", torch.relu_, functional.relu_)
    ),
    _activation(layers.Relu6, nn.ReLU6, functional.relu6),
    TorchLayer(
        layers.LeakyRelu,
        nn.LeakyReLU,
        lambda _, part, __: layers.LeakyRelu(part.negative_slope),
        lambda layer: nn.LeakyReLU(layer.slope),
        (functional.leaky_relu,),
        (functional.leaky_relu_,),
    ),
    TorchLayer(
        layers.Gelu,
        nn.GELU,
        lambda _, part, __: layers.Gelu(part.approximate == "tanh"),
        lambda layer: nn.GELU("tanh" if layer.approximate else "none"),
        (functional.gelu,),
    ),
    _activation(layers.Silu, nn.SiLU, functional.silu),
    _activation(layers.Hardswish, nn.Hardswish, functional.hardswish),
    TorchLayer(layers.Softplus, nn.Softplus, _describe_softplus, lambda _: nn.Softplus(), (functional.softplus,)),
    _activation(layers.Tanh, nn.Tanh, "tanh", torch.tanh, in_place=("tanh_", torch.tanh_)),
    _activation(layers.Sigmoid, nn.Sigmoid, "sigmoid", torch.sigmoid, in_place=("sigmoid_", torch.sigmoid_)),
    _max_pool(layers.MaxPool1d, nn.MaxPool1d, functional.max_pool1d, torch.max_pool1d),
    _max_pool(layers.MaxPool2d, nn.MaxPool2d, functional.max_pool2d, torch.max_pool2d),
    _average_pool(layers.AvgPool1d, nn.AvgPool1d, functional.avg_pool1d),
    _average_pool(layers.AvgPool2d, nn.AvgPool2d, functional.avg_pool2d),
    _adaptive_pool(layers.AvgPool1d, nn.AdaptiveAvgPool1d, functional.adaptive_avg_pool1d),
    _adaptive_pool(layers.AvgPool2d, nn.AdaptiveAvgPool2d, functional.adaptive_avg_pool2d),
    _adaptive_pool(layers.MaxPool1d, nn.AdaptiveMaxPool1d, functional.adaptive_max_pool1d),
    _adaptive_pool(layers.MaxPool2d, nn.AdaptiveMaxPool2d, functional.adaptive_max_pool2d),
    TorchLayer(layers.Flatten, nn.Flatten, lambda *_: layers.Flatten(), lambda _: nn.Flatten()),
    TorchLayer(None, nn.Identity, lambda *_: None, functions=("contiguous", "float")),  # samples are float32
    TorchLayer(
        layers.Dropout,
        nn.Dropout,
        lambda _, part, __: layers.Dropout(part.p) if part.training and part.p > 0 else None,
        lambda layer: nn.Dropout(layer.chance),
        (functional.dropout, torch.dropout),
        (torch.dropout_,),
        _dropout_from_call,
    ),
    TorchLayer(
        layers.Scale,
        ScaleModule,
        lambda _, part, __: layers.Scale(tuple(part.factors.tolist()), tuple(part.offsets.tolist())),
        ScaleModule,
    ),
    *_recurrent(layers.Gru, nn.GRU, GruModule),
    *_recurrent(layers.Lstm, nn.LSTM, LstmModule),
    TorchLayer(layers.Transpose, TransposeModule, lambda *_: layers.Transpose(), lambda _: TransposeModule()),
    TorchLayer(layers.Add, SumModule, lambda *_: layers.Add(), lambda _: SumModule()),
    TorchLayer(layers.Concat, ConcatModule, lambda *_: layers.Concat(), lambda _: ConcatModule()),
)
"""All torch classes and functions that are layers: the one table of this back end, for both directions."""

_BUILD = {row.kind: row.build for row in TORCH_LAYERS if row.build is not None}
