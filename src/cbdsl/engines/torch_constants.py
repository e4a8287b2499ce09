"""Arithmetic with constants as a layer: plain numbers, or tables with one number a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cbdsl.engines.architecture import ArchitectureError, Scale, Shape

Numbers = tuple[float, ...]


def scale(operation: str, constant: Any, shape: Shape, constant_first: bool) -> Scale | None:  # noqa: ANN401
    """What a sample of `shape` becomes with a constant added, subtracted, multiplied or divided; None if not that."""
    values = _numbers(constant, shape)
    match operation, constant_first:
        case "add", _:
            return Scale(offsets=values)
        case "sub", False:
            return Scale(offsets=_each(values, lambda value: -value))
        case "sub", True:
            return Scale((-1.0,), values)
        case "mul", _:
            return Scale(values)
        case "div", False:
            return Scale(_each(values, lambda value: 1 / value))
    return None


def _numbers(constant: Any, shape: Shape) -> Numbers:  # noqa: ANN401
    """One number, or one a channel."""
    if isinstance(constant, bool) or not isinstance(constant, int | float | Tensor):
        raise ArchitectureError(f"it computes with {constant!r:.40}; only numbers and tables of numbers are known")
    table = torch.as_tensor(constant)
    if table.is_complex() or (table.dtype == torch.float64 and table.dim() > 0):
        raise ArchitectureError(f"its table is {table.dtype}, which makes all that follows so; write .float()")
    axes = 1 + len(shape)
    sizes = (1,) * (axes - table.dim()) + tuple(table.shape)
    if len(sizes) != axes or (table.numel() != 1 and sizes != (1, shape[0], *(1,) * (axes - 2))):
        channels = (shape[0],) if axes == 2 else (shape[0], *(1,) * (axes - 2))
        raise ArchitectureError(
            f"its table has shape {tuple(table.shape)}; one number for all, or one a channel, {channels}, is native"
        )
    return tuple(table.detach().float().flatten().tolist())


def _each(values: Numbers, compute: Callable[[Tensor], Tensor]) -> Numbers:
    """As torch computes it, in float32; 0 has no sign."""
    return tuple((compute(torch.tensor(values)) + 0.0).tolist())
