"""The layers of a torch module as plain data. Reads sizes only, never weights, and never changes a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from cbdsl.engines.architecture import (
    ArchitectureError,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Pair,
    Relu,
    Sigmoid,
    Tanh,
)


def layers_of(module: nn.Module) -> list[Layer]:
    """Every layer of a torch module; an ArchitectureError names the first one that has no description."""
    seen: set[int] = set()
    layers = []
    for name, part in _leaves(module, ""):
        for parameter in part.parameters(recurse=False):
            if id(parameter) in seen:
                raise ArchitectureError(f"{name} shares its weights with a layer before it")
            if not parameter.requires_grad:
                raise ArchitectureError(f"{name} has frozen weights")
            seen.add(id(parameter))
        layer = _describe(name, part)
        if layer is not None:
            layers.append(layer)
    return layers


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ArchitectureError(f"{name or 'the module'} carries hooks")
    if type(module) is nn.Sequential:
        for key, part in module._modules.items():
            if part is not None:
                yield from _leaves(part, f"{name}.{key}" if name else f"layer {key}")
    else:
        yield name or "the module", module


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _describe(name: str, part: nn.Module) -> Layer | None:
    """One torch layer as plain data; None for one that does nothing."""
    # The exact class: a subclass may compute anything.
    describe = DESCRIBE.get(type(part))
    label = f"{name} ({type(part).__name__})"
    if describe is None:
        known = ", ".join(kind.__name__ for kind in DESCRIBE)
        raise ArchitectureError(f"{label} is not one of {known}")
    return describe(label, part)


def _describe_flatten(label: str, part: nn.Flatten) -> Flatten:
    if (part.start_dim, part.end_dim) != (1, -1):
        raise ArchitectureError(f"{label} flattens dimensions {part.start_dim} to {part.end_dim}, not a whole sample")
    return Flatten()


def _describe_dropout(label: str, part: nn.Dropout) -> None:
    if part.p > 0:
        raise ArchitectureError(f"{label} draws random numbers while it trains")


def _describe_linear(_label: str, part: nn.Linear) -> Linear:
    return Linear(part.in_features, part.out_features, part.bias is not None)


def _describe_max_pool(label: str, part: nn.MaxPool2d) -> MaxPool2d:
    if _pair(part.padding) != (0, 0) or _pair(part.dilation) != (1, 1) or part.ceil_mode or part.return_indices:
        raise ArchitectureError(f"{label} has padding, dilation, ceil_mode or return_indices")
    return MaxPool2d(_pair(part.kernel_size), _pair(part.stride))


def _describe_average_pool(label: str, part: nn.AvgPool2d) -> AvgPool2d:
    if _pair(part.padding) != (0, 0) or part.ceil_mode or part.divisor_override:
        raise ArchitectureError(f"{label} has padding, ceil_mode or divisor_override")
    return AvgPool2d(_pair(part.kernel_size), _pair(part.stride))


def _describe_convolution(label: str, part: nn.Conv2d) -> Conv2d:
    kernel = _pair(part.kernel_size)
    if _pair(part.stride) != (1, 1) or _pair(part.dilation) != (1, 1) or part.groups != 1:
        raise ArchitectureError(f"{label} has a stride, dilation or groups other than 1")
    if part.padding_mode != "zeros":
        raise ArchitectureError(f"{label} pads with {part.padding_mode}, not with zeros")
    if part.padding == "same":
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise ArchitectureError(f"{label} pads an even kernel on one side more than on the other")
        padding = (kernel[0] // 2, kernel[1] // 2)
    elif isinstance(part.padding, str):
        padding = (0, 0)
    else:
        padding = _pair(part.padding)
    return Conv2d(part.in_channels, part.out_channels, kernel, padding, part.bias is not None)


DESCRIBE: dict[type[nn.Module], Callable[..., Layer | None]] = {
    nn.Conv2d: _describe_convolution,
    nn.ReLU: lambda *_: Relu(),
    nn.Tanh: lambda *_: Tanh(),
    nn.Sigmoid: lambda *_: Sigmoid(),
    nn.MaxPool2d: _describe_max_pool,
    nn.AvgPool2d: _describe_average_pool,
    nn.Flatten: _describe_flatten,
    nn.Linear: _describe_linear,
    nn.Identity: lambda *_: None,
    nn.Dropout: _describe_dropout,
}
