"""What a search looks through: settings and their ranges, seen as points of a cube. Runs nothing.

A point has one number from 0 to 1 for every setting that is searched; a whole number or a word owns an equal part of
that span.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.errors import UserError, shown
from cbdsl.runs.resolve import resolve, to_vary
from cbdsl.settings import parse_setting, setting_values, words
from cbdsl.spec import Spec, dotted_keys, unknown_setting

_HOW = (
    "Write --over swarm.inertia=0.1..1, --over local.learning_rate=1e-3..1e-1:log, or --over local.batch_size=5,10,20."
)
_NEVER = ("seed", "rounds", "preset", "data.source", "data.holdout")
_LOOKED_AT = (0.0, 0.382, 1.0)  # places of a range: a number of workers may be right at both ends, and not between
_MOST_CHECKED = 1000  # combinations; a second
_DIGITS = 4  # of a number that is tried: more would only make a spec hard to read


@dataclass(frozen=True)
class Axis:
    """One setting: a range of numbers, or values to choose from."""

    key: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def value(self, place: float) -> Any:  # noqa: ANN401 - any value of a spec
        """The value at a place from 0 to 1."""
        share = min(max(place, 0.0), 1.0)
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.whole:
            low, high = int(self.low), int(self.high)
            if self.log:
                return min(max(round(math.exp(self._between(math.log(low), math.log(high), share))), low), high)
            return min(low + int(share * (high - low + 1)), high)
        if self.log:
            found = math.exp(self._between(math.log(self.low), math.log(self.high), share))
        else:
            found = self._between(self.low, self.high, share)
        return min(max(float(f"{found:.{_DIGITS}g}"), self.low), self.high)

    def place(self, value: Any) -> float | None:  # noqa: ANN401 - any value of a spec
        """Where a value lies, from 0 to 1; none if the range does not have it."""
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices) if value in self.choices else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        if self.whole and not self.log:
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)

    @staticmethod
    def _between(low: float, high: float, share: float) -> float:
        return low + (high - low) * share


@dataclass(frozen=True)
class Space:
    """All settings that are searched, around a spec that has the others."""

    start: Spec
    axes: tuple[Axis, ...]
    given: tuple[str, ...] = ()  # settings of the start that a user gave by options

    def __post_init__(self) -> None:
        keys = [axis.key for axis in self.axes]
        if not keys:
            raise UserError(f"There is nothing to tune. {_HOW}")
        if len(set(keys)) != len(keys):
            raise UserError(f"A setting can be searched once; given {', '.join(keys)}.")

    def values(self, point: Floats) -> dict[str, Any]:
        """The settings at a point (K,)."""
        return {axis.key: axis.value(float(place)) for axis, place in zip(self.axes, point, strict=True)}

    def spec(self, values: Mapping[str, Any], seed: int) -> Spec:
        """The run with these settings and a seed, to be resolved."""
        start = to_vary(self.start, [axis.key for axis in self.axes], self.given)
        return start.with_settings({**values, "seed": seed})

    def checks(self) -> Iterator[dict[str, Any]]:
        """Settings that show whether a search can be held: every choice, and the ends of ranges, alone and together."""
        for axis in self.axes:
            yield from self.along(axis)
        ends = [axis.choices or (axis.value(0.0), axis.value(1.0)) for axis in self.axes]
        for together in itertools.islice(itertools.product(*ends), _MOST_CHECKED):
            yield {axis.key: value for axis, value in zip(self.axes, together, strict=True)}

    def along(self, axis: Axis) -> list[dict[str, Any]]:
        """Settings that differ in one of them alone: every choice, or some places of the range."""
        usual = {one.key: one.value(0.0) for one in self.axes}
        values = axis.choices or [axis.value(place) for place in _LOOKED_AT]
        return [{**usual, axis.key: value} for value in values]

    def own_point(self) -> Floats | None:
        """Where the spec itself lies, (K,); none if it is outside."""
        values = setting_values(resolve(self.start), [axis.key for axis in self.axes])
        places = [axis.place(_single(values[axis.key])) for axis in self.axes]
        return None if None in places else np.array(places, np.float32)


def parse_range(text: str, start: Spec) -> Axis:
    """Parse `key=0.1..1`, `key=1e-3..1e-1:log` or `key=a,b,c` of the command line."""
    key, _ = parse_setting(text)
    if not key.startswith("options.") and key not in dotted_keys():
        raise unknown_setting(key)
    if key in _NEVER:
        raise UserError(f"{key} is nothing to tune: results would not be comparable. {_HOW}")
    span = text.partition("=")[2].strip()
    if ".." not in span or "," in span:
        return _choices(key, span, text)
    span, _, scale = span.partition(":")
    if scale not in {"", "log", "linear"}:
        raise UserError(f"{shown(text)} asks for the scale {shown(scale)}; there are log and linear.")
    present = _present(start, key)
    if isinstance(present, str | bool):
        values = "true,false" if isinstance(present, bool) else "a,b"
        raise UserError(f"{key} is no number, and has no range; given {shown(span)}. Write --over {key}={values}.")
    try:
        low, high = (float(end) for end in span.split(".."))
    except ValueError:
        raise UserError(f"{shown(text)} is not a range of numbers. {_HOW}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{shown(text)} is an empty range: it must begin below its end, both finite. {_HOW}")
    if scale == "log" and low <= 0:
        raise UserError(f"{shown(text)}: a logarithmic range begins above 0; given {low:g}.")
    whole = isinstance(present, int) or (present is None and all(map(_is_whole, span.split(".."))))
    if whole and not (low.is_integer() and high.is_integer()):
        raise UserError(f"{key} takes whole numbers; given {shown(span)}.")
    axis = Axis(key, low, high, scale == "log", whole)
    for end in (0.0, 1.0):
        start.with_settings({key: axis.value(end)})  # says what is wrong with it
    return axis


def _choices(key: str, span: str, text: str) -> Axis:
    found = parse_setting(f"{key}=[{span}]")[1]
    values = tuple(found if isinstance(found, list) else [parse_setting(f"{key}={word}")[1] for word in words(span)])
    if all(value == values[0] for value in values):
        raise UserError(f"{shown(text)} leaves no choice. {_HOW}")
    return Axis(key, choices=values)


def _present(start: Spec, key: str) -> Any:  # noqa: ANN401 - any value of a spec
    """The value that a setting has, or its part's default; none if neither is known."""
    value = _single(setting_values(start, [key])[key])
    if value is None:
        part, _, name = key.removeprefix("options.").partition(".")
        defaults = [kind.settings(part).get(name) for kind in register.ALL.values() if part in kind]
        value = next((one for one in defaults if one is not None and one is not inspect.Parameter.empty), None)
    return value


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _single(value: Any) -> Any:  # noqa: ANN401 - any value of a spec
    """A pair of equal numbers is one number: swarm.inertia may be given as one."""
    pair = isinstance(value, tuple) and len(value) == 2 and value[0] == value[1]
    return value[0] if pair else value
