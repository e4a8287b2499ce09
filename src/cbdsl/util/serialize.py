"""Converts dataclasses to plain values, as in JSON, and back by the types of their fields.

JSON has no NaN and no infinity: a float that is not finite becomes None, which is read as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cbdsl.errors import shown

_Type = TypeVar("_Type")
_PLAIN: dict[Any, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
_LARGEST = 2**1000  # whole numbers that a float holds


def to_plain(value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return dictionaries, lists, text and finite numbers; a dataclass becomes a dictionary of its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: type[_Type], value: object) -> _Type:
    """Return the value of a type that `to_plain` wrote; unknown keys are ignored.

    A missing field is a KeyError that names it, such as `theorem1.printed.bound`; a value of another type is a
    TypeError.
    """
    return cast(_Type, _read(kind, value, ""))


def _read(hint: Any, value: Any, place: str) -> Any:  # noqa: ANN401, PLR0911 - any type of a field; a line for each
    if is_dataclass(hint):
        return _read_fields(cast(type, hint), value, place)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, UnionType}:
        return _read_either(arguments, value, place)
    if origin is tuple and arguments[-1:] != (...,):
        if len(_listed(value, place)) != len(arguments):
            raise TypeError(f"{place or 'The value'} has {len(value)} items instead of {len(arguments)}.")
        return tuple(_read(kind, item, place) for kind, item in zip(arguments, value, strict=True))
    if origin in {tuple, list, Sequence}:
        items = [_read(arguments[0], item, place) for item in _listed(value, place)]
        return items if origin is list else tuple(items)
    if origin in {dict, Mapping}:
        return {key: _read(arguments[1], item, f"{place}.{key}") for key, item in _keyed(value, place).items()}
    if hint is float:
        if value is None:
            return math.nan
        if type(value) is int and abs(value) < _LARGEST:
            return float(value)
    if hint in _PLAIN and type(value) is not hint:
        raise TypeError(f"{place or 'The value'} must be {_PLAIN[hint]}; found {shown(value)}.")
    return value


def _read_fields(kind: type, value: Any, place: str) -> Any:  # noqa: ANN401
    found, start = _keyed(value, place), f"{place}." if place else ""
    values = {}
    for name, hint in _hints(kind).items():
        if name not in found:
            raise KeyError(start + name)
        values[name] = _read(hint, found[name], start + name)
    return kind(**values)


def _read_either(kinds: tuple[Any, ...], value: Any, place: str) -> Any:  # noqa: ANN401
    """Read a value that may be None; among several other types it is returned as it is."""
    others = [kind for kind in kinds if kind is not NoneType]
    if value is None and len(others) < len(kinds):
        return None
    return _read(others[0], value, place) if len(others) == 1 else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _keyed(value: Any, place: str) -> Mapping[str, Any]:  # noqa: ANN401
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"{place or 'The value'} must be an object with keys; found {shown(value)}.")


def _listed(value: Any, place: str) -> Sequence[Any]:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return value
    raise TypeError(f"{place or 'The value'} must be a list; found {shown(value)}.")
