"""Activations: layers that bend every number by itself."""

from __future__ import annotations

from dataclasses import dataclass

from cbdsl.engines.layer import Layer
from cbdsl.engines.sizes import Shape, check_flag, check_number


@dataclass(frozen=True)
class Relu(Layer):
    """max(0, x)."""


@dataclass(frozen=True)
class Relu6(Layer):
    """max(0, x), and 6 at most."""


@dataclass(frozen=True)
class LeakyRelu(Layer):
    """x, and slope * x below zero."""

    slope: float = 0.01

    def _after(self, shape: Shape) -> Shape:
        check_number("slope", self.slope, 0.0, 1.0)
        return shape


@dataclass(frozen=True)
class Tanh(Layer):
    """The hyperbolic tangent."""


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + e^-x)."""


@dataclass(frozen=True)
class Silu(Layer):
    """x / (1 + e^-x), also called swish."""


@dataclass(frozen=True)
class Hardswish(Layer):
    """x * min(max(x + 3, 0), 6) / 6."""


@dataclass(frozen=True)
class Gelu(Layer):
    """x times the normal distribution's share below x; by its tanh formula if approximate."""

    approximate: bool = False

    def _after(self, shape: Shape) -> Shape:
        check_flag("approximate", self.approximate)
        return shape
