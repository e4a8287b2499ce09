"""What a module computes of shapes alone, and the ways to see a sample in another shape."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any

from cbdsl.engines.architecture import Shape


class _Size(Enum):
    BATCH = "the number of samples"

    def __repr__(self) -> str:
        return self.value


BATCH = _Size.BATCH
"""The one size that nobody knows while a module is read."""

COMPARISONS: tuple[object, ...] = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
COMPUTED: tuple[object, ...] = (
    operator.getitem, operator.mul, operator.floordiv, operator.mod, operator.add, operator.sub, operator.neg,
    operator.iadd, operator.isub, operator.imul, math.prod, *COMPARISONS,
)  # fmt: skip
"""What may be done with sizes."""


def asked_of(shape: tuple[Any, ...], asked: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """A question about a shape, answered; None if it is none."""
    if asked in [("size",), (getattr, "shape")]:
        return shape
    if asked[0] == "size" and len(asked) == 2 and isinstance(asked[1], int) and -len(shape) <= asked[1] < len(shape):
        return shape[asked[1]]
    return len(shape) if asked in [("dim",), (getattr, "ndim")] else None


def holds_batch(value: Any) -> bool:  # noqa: ANN401
    """Whether the number of samples is part of it."""
    return BATCH in value if isinstance(value, tuple) else value is BATCH


def reshaped(shape: Shape, *given: Any) -> Shape | None:  # noqa: ANN401
    """The shape of a sample after view or reshape; None where samples do not stay apart."""
    sizes: Sequence[Any] = given[0] if len(given) == 1 and isinstance(given[0], tuple) else given
    numbers = math.prod(shape)
    batch, *rest = sizes or (None,)
    if not all(isinstance(size, int) for size in rest) or not (batch is BATCH or batch == -1):
        return None
    if batch is BATCH and rest.count(-1) == 1:
        known = math.prod(size for size in rest if size != -1)
        rest = [numbers // max(known, 1) if size == -1 else size for size in rest]
    return tuple(rest) if rest and min(rest) > 0 and math.prod(rest) == numbers else None


def flattened(shape: Shape, start_dim: Any = 0, end_dim: Any = -1) -> Shape | None:  # noqa: ANN401
    """The shape of a sample whose axes from one to another become one."""
    places = _places((start_dim, end_dim), 1 + len(shape))
    if places is None or not 1 <= places[0] <= places[1]:
        return None
    first, last = places[0] - 1, places[1]
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


def squeezed(shape: Shape, dim: Any = None) -> Shape | None:  # noqa: ANN401
    """The shape of a sample without some axes, where their size is 1; None where samples do not stay apart."""
    places = _places(dim, 1 + len(shape))
    if places is None or 0 in places:
        return None
    return tuple(size for place, size in enumerate(shape, 1) if place not in places or size != 1) or None


def unsqueezed(shape: Shape, dim: Any = None) -> Shape | None:  # noqa: ANN401
    """The shape of a sample with one axis more."""
    places = _places(dim, 2 + len(shape))
    if places is None or len(places) != 1 or places[0] == 0:
        return None
    return (*shape[: places[0] - 1], 1, *shape[places[0] - 1 :])


def averaged(shape: Shape, dim: Any = None) -> tuple[int, ...] | None:  # noqa: ANN401
    """The axes of a sample, from 1 for the channels, over which a mean is taken; None unless all lie behind those."""
    places = _places(dim, 1 + len(shape))
    return places if places and min(places) > 1 else None


def _places(dims: Any, axes: int) -> tuple[int, ...] | None:  # noqa: ANN401
    """Axes counted from the front; None if they are none."""
    listed = dims if isinstance(dims, list | tuple) else (dims,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and -axes <= each < axes for each in listed):
        return None
    return tuple(each % axes for each in listed)


VIEWED = {"reshape": reshaped, "flatten": flattened, "squeeze": squeezed, "unsqueeze": unsqueezed}
