"""Where torch computes: which devices it sees, samples brought there, and settings under which it repeats itself.

Nothing here stays changed: settings of torch, its generators and the environment are put back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbdsl.arrays import PADDING, Indices, Samples
from cbdsl.errors import UserError

CPU = torch.device("cpu")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS may add up in another order every time


def accelerators() -> list[str]:
    """The kinds of GPU that torch can use here, the best first; empty if there are none."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, there in found.items() if there]


def device_named(name: str) -> torch.device:
    """The device that a user asked for; "auto" is a GPU where there is one."""
    there = accelerators()
    if name == "auto":
        return torch.device(there[0]) if there else CPU
    if name != "cpu" and name not in there:
        raise UserError(
            f"The device {name} was asked for, but torch {torch.__version__} sees none here; it sees: "
            f"{', '.join(['cpu', *there])}. Use --device auto or --device cpu, or install torch for that GPU."
        )
    return torch.device(name)


def brought(samples: Samples, indices: Indices, device: torch.device) -> tuple[Tensor, Tensor, Indices]:
    """Features and labels on a device, of those samples alone that are named, and the indices into them.

    They are brought anew for every call: what would be kept there might be out of date, and fill the device.
    """
    used, places = np.unique(indices, return_inverse=True)
    places = places.reshape(indices.shape)
    if len(used) and used[0] == PADDING:
        used, places = used[1:], places - 1  # padding comes first, and stays -1
    features = torch.from_numpy(np.asarray(samples.features[used], np.float32)).to(device)
    labels = torch.from_numpy(samples.labels[used].astype(np.int64)).to(device)
    return features, labels, places.astype(np.int32)


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a module on this device may draw from: the CPU's, and the device's own."""
    own = [] if device.type == "cpu" else [_backend(device).get_rng_state()]
    return [torch.get_rng_state(), *own]


def put_back(states: list[Tensor], device: torch.device) -> None:
    """Set the generators to states that `generator_states` gave."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        _backend(device).set_rng_state(states[1])


def seed_generators(seed: int, device: torch.device) -> None:
    """Start the same generators from a seed; no other device's."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _backend(device).manual_seed(seed)


def same_states(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether nothing was drawn between two calls of `generator_states`."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Put the states of the generators back at the end."""
    states = generator_states(device)
    try:
        yield
    finally:
        put_back(states, device)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make torch repeat itself on a device, to the bit, and keep float32 whole; afterwards all is as it was.

    An operation that has no such form on the device is a UserError.
    """
    workspace = os.environ.get(_WORKSPACE)
    saved = [(write, read()) for read, write in _SETTINGS if _readable(read)]
    try:
        _be_strict()
        yield
    except RuntimeError as error:  # torch has no class of its own for what is told from the text
        if explained := _explained(error, device):
            raise explained from error
        raise
    finally:
        for write, value in saved:
            write(value)
        os.environ.pop(_WORKSPACE, None)
        if workspace is not None:
            os.environ[_WORKSPACE] = workspace


def _be_strict() -> None:
    os.environ[_WORKSPACE] = ":4096:8"
    torch.set_num_threads(1)  # how an operation is split over threads shows in its last digits
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose a kernel by its speed at the moment
    torch.set_float32_matmul_precision("highest")  # TF32 has ten bits of mantissa
    torch.backends.cudnn.allow_tf32 = False


def _explained(error: RuntimeError, device: torch.device) -> UserError | None:
    text = str(error)
    if "out of memory" in text.lower():
        return UserError(
            f"The device {device.type} has not enough free memory for this model ({text.splitlines()[0]}). "
            "Use --device cpu, a smaller model, or a lower local.batch_size."
        )
    if "deterministic" in text and device.type != "cpu":
        return UserError(
            f"The model has an operation that does not repeat its numbers on {device.type} "
            f"({text.splitlines()[0]}). Use --device cpu, or another layer."
        )
    return None


def _backend(device: torch.device) -> Any:  # noqa: ANN401 - torch.cuda or torch.mps, which share these functions
    return getattr(torch, device.type)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:  # noqa: ANN401
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _readable(read: Callable[[], Any]) -> bool:
    """Whether this torch has a setting, and can say what it is: it cannot if old and new names of it were mixed."""
    try:
        read()
    except (AttributeError, RuntimeError):
        return False
    return True


# How to read and how to write each setting that `_be_strict` changes; precision has old names and, since torch 2.9, new
# ones, which are written last because the old ones change them too.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (_determinism, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    _attribute(torch.backends.cudnn, "deterministic"),
    _attribute(torch.backends.cudnn, "benchmark"),
    _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(torch.backends.cudnn, "allow_tf32"),
    _attribute(torch.backends.cuda.matmul, "fp32_precision"),
    *(
        _attribute(getattr(torch.backends.cudnn, name), "fp32_precision")
        for name in ("conv", "rnn")
        if hasattr(torch.backends.cudnn, name)
    ),
)
