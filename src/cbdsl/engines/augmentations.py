"""Augmentations: functions that change the features of a batch while a model trains on it, on the torch engine.

An augmentation takes a tensor (B, *shape) and returns one of that shape, made anew in every step. It draws random
numbers from torch alone, whose generator is seeded for every worker and round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cbdsl import register
from cbdsl.errors import UserError, missing
from cbdsl.register import CUSTOM
from cbdsl.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

Augmentation = Callable[..., Any]
"""A function of a batch (B, *shape) that returns a batch of that shape."""


@register.augmentation("noise")
def noise(batch: Tensor, *, deviation: float = 0.1) -> Tensor:
    """Normal noise on every number."""
    return batch + deviation * batch.new_empty(batch.shape).normal_()


def build_augmentation(spec: Spec, shape: tuple[int, ...], given: Augmentation | None = None) -> Augmentation | None:
    """Return the augmentation that a spec names, or the given one, tried on two samples; None if there is none."""
    name = spec.local.augment
    if not name:
        return None
    if given is None and name == CUSTOM:
        raise UserError(
            "The augmentation of this run was given in Python; give it again with augmentation=...", code="missing-part"
        )
    made: Augmentation = given or register.augmentation.make(name, spec.options.of(name))
    try:
        import torch  # noqa: PLC0415 - only runs with an augmentation need it
    except ModuleNotFoundError as error:
        raise missing("torch", "torch", "the run has an augmentation") from error
    _try(made, shape, torch)
    return made


def _try(augmentation: Augmentation, shape: tuple[int, ...], torch: Any) -> None:  # noqa: ANN401 - the module
    """Refuse an augmentation that fails on two samples of a shape, or makes something else of them."""
    with torch.random.fork_rng(devices=[]):
        try:
            found = augmentation(torch.zeros(2, *shape))
        except Exception as error:
            raise UserError(
                f"The augmentation fails on a batch of two samples of shape {shape} ({type(error).__name__}: {error}). "
                f"It is given a tensor (B, *{shape}), and returns one of that shape.",
                code="invalid-part",
            ) from error
    good = isinstance(found, torch.Tensor) and found.shape == (2, *shape) and found.dtype == torch.float32
    if not good:
        made = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise UserError(
            f"The augmentation makes {made} of two samples of shape {shape}; return a float32 tensor (2, *{shape}).",
            code="wrong-shape",
        )
