"""Losses on torch: the mean that a step takes, and those of single samples, as the native engine computes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss, l1_loss, mse_loss

from cbdsl.engines.loss import Loss
from cbdsl.errors import UserError


def mean_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch: outputs (B, C), labels (B,) or targets (B, C)."""
    if loss.function is not None:
        return sample_losses(loss, outputs, targets).mean()
    if loss.reads_labels:
        return cross_entropy(outputs, targets, label_smoothing=loss.setting)
    return _errors(loss, outputs, targets, "mean")


def sample_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every sample, (B,): a mean over its outputs, in double precision if the device has it."""
    if loss.function is not None:
        return _check(loss.function(outputs, targets), len(outputs))
    if loss.reads_labels:
        return cross_entropy(outputs, targets, reduction="none", label_smoothing=loss.setting)
    precision = torch.float32 if outputs.device.type == "mps" else torch.float64
    return _errors(loss, outputs, targets, "none").mean(1, dtype=precision)


def _check(found: object, count: int) -> Tensor:
    """Return what a function of the user's own made; refuse what is not the loss of every sample, or negative."""
    if not isinstance(found, Tensor) or found.shape != (count,) or not found.is_floating_point():
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"The loss must return a number for each sample, a tensor of shape ({count},); it returns {what}. Take the "
            "mean over outputs alone: .mean(1).",
            code="invalid-part",
        )
    if bool((found < 0).any()):
        raise UserError(
            f"The loss of a sample is {found.min().item():g}; a claim of a negative score is refused by the server. "
            "Give a loss that is never negative.",
            code="invalid-part",
        )
    return found


def _errors(loss: Loss, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    if loss.name == "mae":
        return l1_loss(outputs, targets, reduction=reduction)
    if loss.name == "huber":
        return huber_loss(outputs, targets, reduction=reduction, delta=loss.setting)
    return mse_loss(outputs, targets, reduction=reduction)
