"""Sizes and settings of layers, checked: what is no size is an error that says what would be one."""

from __future__ import annotations

import math
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

LARGEST = 2**31 - 1
"""Sizes are 32-bit whole numbers for the kernels."""


class ArchitectureError(ValueError):
    """A network that cannot be described, or whose layers do not fit together."""


def bordered(shape: Shape, padding: Shape) -> int:
    """Numbers of a sample with a border; its rows are a little longer than they look."""
    sides = [side + 2 * pad for side, pad in zip(shape[1:], padding, strict=True)]
    return shape[0] * math.prod(sides[:-1]) * (sides[-1] + 3)


def is_size(value: object, least: int = 1) -> bool:
    """Whether it is a whole number that a kernel can take."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def check_size(name: str, value: object) -> None:
    """Refuse what is no size."""
    if not is_size(value):
        raise ArchitectureError(f"{name} is {value!r}; give a whole number of at least 1")


def check_sizes(name: str, values: object, least: int, count: int | None) -> None:
    """Refuse what is not so many sizes; count: None for any number of them."""
    if not isinstance(values, tuple) or len(values) != (count or max(len(values), 1)):
        how_many = {1: "(one,)", 2: "a pair of"}.get(count or 0, "a few")
        raise ArchitectureError(f"{name} is {values!r}; give {how_many} whole numbers")
    if not all(is_size(value, least) for value in values):
        raise ArchitectureError(f"{name} is {values!r}; give whole numbers of at least {least}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ArchitectureError(f"{name} is {value!r}; give true or false")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Refuse what is no number between two others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ArchitectureError(f"{name} is {value!r}; give a number from {least:g} to {most:g}")
