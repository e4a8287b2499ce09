"""Checks whether workers can train a torch module of a user."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cbdsl.errors import UserError
from cbdsl.models.architecture import describe_outputs, fits_outputs
from cbdsl.models.batch_statistics import hold_statistics
from cbdsl.models.from_torch import copy_module, first_line, group_norm_instead
from cbdsl.models.layers import ArchitectureError, Shape
from cbdsl.models.to_torch import parameter_count, trained_parameters
from cbdsl.spec import Task

_ADVICE = (
    " Here: replace {}, or use a method in which everybody uploads (--method fedavg). There no worker claims a score, "
    "which a server without the worker's statistics could not reproduce."
)
_LOGGER = logging.getLogger("cbdsl")


def check_trainable(
    module: nn.Module, shape: Shape, classes: int, task: Task = "classification", statistics: bool = False
) -> None:
    """Refuse a module that cannot be trained on samples of one shape for a task, and say what to do.

    classes: how many there are, or how many outputs another task asks for.

    Copies of it are given two samples of zeros, as in training and as in scoring. Neither the module nor the state of
    torch's global generator changes. statistics: whether those of BatchNorm may stay where they are computed.
    """
    check_layers(module, statistics)
    for training in (True, False):
        probe = _copy_for_workers(module).train(training)
        hold_statistics(probe)
        before = buffers_of(probe)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(not training):
            output = _probe_output(probe, shape, training)
        _check_output(output, classes, task)
        check_buffers(before, probe)


def check_layers(module: nn.Module, statistics: bool = False) -> None:
    """Refuse a module without parameters, or with torch layers that keep running statistics.

    statistics: whether those of BatchNorm may stay where they are computed.
    """
    if parameter_count(module) == 0:
        raise UserError("The model has no parameters; there is nothing to learn.", code="invalid-part")
    if not trained_parameters(module):
        raise UserError(
            "All weights of the model are frozen (requires_grad is False); there is nothing to learn. Let at least its "
            "last layer train.",
            code="invalid-part",
        )
    probe = _copy_for_workers(module).train()  # a layer that is kept out of training keeps its statistics as they are
    norms = [
        (name, layer)
        for name, layer in probe.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.training
        and not (statistics and isinstance(layer, nn.modules.batchnorm._BatchNorm))
    ]
    if names := [buffer for name, layer in norms for buffer, _ in layer.named_buffers(name)]:
        lines = [group_norm_instead(layer) for _, layer in norms if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        raise _stateful_error(names, _ADVICE.format(lines[0]) if lines else "")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers of a module."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def check_buffers(before: Mapping[str, Tensor], module: nn.Module) -> None:
    """Refuse a module whose buffers changed while it ran."""
    after = dict(module.named_buffers())
    if names := [name for name in {**before, **after} if not _equal(before.get(name), after.get(name))]:
        raise _stateful_error(names)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _stateful_error(names: list[str], line: str = "") -> UserError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UserError(
        f"The model keeps state beside its parameters ({', '.join(names[:3])}{more}), which workers do not exchange: "
        "it changes while the model runs. Use layers without running statistics: GroupNorm or LayerNorm instead of "
        f"BatchNorm, or track_running_stats=False.{line} Tables that never change are fine; fill them when the model "
        "is built.",
        code="not-supported",
    )


def _copy_for_workers(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU in float32, as engines do."""
    try:
        return copy_module(module)
    except ArchitectureError as error:
        raise UserError(
            f"Every worker needs a copy of the model, but {error}. Let its attributes be parameters, buffers and plain "
            "values, nothing that was computed from parameters.",
            code="invalid-part",
        ) from error


def _probe_output(probe: nn.Module, shape: Shape, training: bool) -> object:
    try:
        return probe(torch.zeros(2, *shape))
    except Exception as error:
        if _takes_whole_numbers(probe, shape):
            raise UserError(
                f"The model takes whole numbers, but features are float32 ({first_line(error)}). "
                "Let its forward begin with x.long(), for example in a small module before nn.Embedding; "
                "float32 holds whole numbers up to 16,777,216 exactly.",
                code="wrong-type",
            ) from error
        raise UserError(
            f"The model fails in {'training' if training else 'scoring'} on two float32 samples of shape {shape}, "
            f"the shape of the data ({first_line(error)}). Build it for samples of that shape, or reshape the data.",
            code="wrong-shape",
        ) from error


def _takes_whole_numbers(probe: nn.Module, shape: Shape) -> bool:
    try:
        probe(torch.zeros(2, *shape, dtype=torch.int64))
    except Exception:
        return False
    return True


def _check_output(output: object, classes: int, task: Task) -> None:
    kind = "logits" if task == "classification" else "numbers"
    wanted, needed = f"give one row of {classes} {kind} per sample, (N, {classes})", describe_outputs(classes, task)
    if not isinstance(output, Tensor):
        raise UserError(
            f"The model returns a {type(output).__name__}, not a tensor, but {needed}; {wanted}.", code="wrong-type"
        )
    if not output.is_floating_point():
        raise UserError(f"The model returns numbers of type {output.dtype}, not float32; {wanted}.", code="wrong-type")
    if output.ndim != 2 or len(output) != 2:
        fits = output.ndim > 2 and output[0].numel() == classes  # as the reconstruction of a sample in its own shape
        raise UserError(
            f"The model makes an output of shape {tuple(output.shape)} from 2 samples, but {needed}; {wanted}, here "
            f"(2, {classes}). End with nn.Flatten(){'' if fits else f' and nn.Linear(..., {classes})'}.",
            code="wrong-shape",
        )
    if not fits_outputs(output.shape[1], classes, task):
        raise UserError(
            f"The model has {output.shape[1]} outputs, but {needed}; give its last layer {classes} outputs.",
            code="wrong-shape",
        )
    if not output.requires_grad and _are_probabilities(output):  # once: in scoring
        why = "The loss takes logits and applies the softmax itself, so training will be slow"
        if task != "classification":
            why = f"Outputs that add up to 1 cannot be those of a {task}"
        _LOGGER.warning(
            f"The model seems to end in a softmax: its outputs are probabilities. {why}. Leave the last softmax out."
        )


def _are_probabilities(output: Tensor) -> bool:
    """Return whether every row is not negative and adds up to 1."""
    rows = output.detach()
    close = (rows.sum(1) - 1).abs() < (1e-5 if rows.shape[1] > 1 else 1e-12)  # one number may be near 1 by chance
    return bool((rows >= 0).all()) and bool(close.all())
