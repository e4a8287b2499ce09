"""Helpers of all checks: a component's name, laws that can fail, small data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbdsl.arrays import NamedArrays
from cbdsl.data.dataset import Dataset
from cbdsl.register import Register
from cbdsl.spec import Spec


@dataclass(frozen=True)
class Laws:
    """The laws for one component."""

    kind: str
    part: str

    def require(self, kept: object, law: str, seen: str) -> None:
        """Fail unless the law holds."""
        if not kept:
            raise AssertionError(f"The {self.kind} {self.part} breaks a law: {law}. {seen}")

    @contextmanager
    def expect_no_error(self, case: str) -> Iterator[None]:
        """Fail if the component raises an exception in a case."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"The {self.kind} {self.part} breaks a law: it works {case}. It raises {what}"
            ) from error

    def require_unchanged(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Fail if the component changed its arguments."""
        for name, value in before.items():
            self.require(
                is_identical(value, after[name]),
                "it does not write into what it is given",
                f"It changed {name} in place.",
            )


def is_identical(one: object, other: object) -> bool:
    """Return whether two values are equal to the bit; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    left, right = np.asarray(one), np.asarray(other)
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def is_floats(value: object) -> bool:
    """Return whether a value is an array of floating-point numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def make_part(kind: Register, part: object) -> tuple[Any, Laws]:
    """Return a component, created if it is given by name or as a class with defaults, and the laws for it."""
    if isinstance(part, str):
        return kind.make(part, {}), Laws(kind.kind, f"'{part}'")
    named = getattr(part, "func", part)
    name = getattr(named, "__qualname__", None) or type(part).__qualname__
    return (part() if isinstance(part, type) else part), Laws(kind.kind, name)


def survives_stop(rounds: Callable[[Any, NamedArrays, int, range], Sequence[tuple[Any, ...]]], part: object) -> bool:
    """Return whether a copy of a part, given only its memory, continues like one that was not stopped.

    rounds(part, memory, world, numbers): plays some rounds of a world and returns a tuple for each, the memory last.
    Another world is played in between, which overwrites state that is hidden in a module or a class.
    """
    kept = copy.deepcopy(part)
    whole = rounds(copy.deepcopy(kept), {}, 0, range(1, 5))
    rounds(copy.deepcopy(kept), {}, 1, range(1, 4))
    resumed = rounds(kept, whole[1][-1], 0, range(3, 5))
    return all(map(are_equal, whole[2:], resumed))


def are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - numbers, arrays, None, and tuples and dicts of them
    """Return whether two results are equal to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_identical(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return is_identical(one, other)


def small_data() -> Dataset:
    """Return three clouds of points in six dimensions."""
    rng = np.random.default_rng(5)
    centres = 2 * rng.normal(size=(3, 6))
    labels = np.arange(400) % 3
    features = centres[labels] + rng.normal(size=(400, 6))
    return Dataset.from_arrays(features[:300], labels[:300], features[300:], labels[300:], clients=np.arange(300) % 6)


def small_spec(**settings: object) -> Spec:
    """Return a spec for the small data that takes milliseconds; keywords use __ for a dot."""
    base: dict[str, object] = {
        "model": "softmax",
        "workers": 5,
        "rounds": 4,
        "seed": 3,
        "data.samples_per_worker": 20,
        "data.shared_training": 12,
        "data.shared_scoring": 30,
        "data.holdout": 0,
        "data.shard_size": 10,
        "local.learning_rate": 0.05,
    }
    return Spec().with_settings(base | {key.replace("__", "."): value for key, value in settings.items()})
