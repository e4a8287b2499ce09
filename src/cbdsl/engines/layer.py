"""What every layer of a described network says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cbdsl.engines.sizes import ArchitectureError, Shape


@dataclass(frozen=True)
class Layer:
    """One step of a network. It takes one tensor, unless it says otherwise."""

    def after(self, *given: Shape) -> Shape:
        """Shape of a sample behind it, or an ArchitectureError that says what would fit."""
        if len(given) != 1:
            raise ArchitectureError(f"takes one tensor but is given {len(given)}")
        return self._after(given[0])

    def _after(self, shape: Shape) -> Shape:
        return shape

    def tensors(self) -> dict[str, Shape]:
        """What it learns: names and shapes, in the order of flat weights."""
        return {}

    def multiply_adds(self, result: Shape) -> int:  # noqa: ARG002
        """Of one sample, with this result; layers without a matrix of weights count as none."""
        return 0

    def drawn_inputs(self) -> int:
        """Numbers that one output is made of, where weights are drawn at random; 0 where they are not."""
        return 0

    @property
    def size(self) -> int:
        """Numbers that it learns."""
        return sum(math.prod(shape) for shape in self.tensors().values())
