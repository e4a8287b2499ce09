"""Converts between dataclasses and plain values, as in JSON and TOML, by the types and limits of fields.

Bounds are part of a field's type, `Annotated[int, Bounds(0, 9)]`. A value that does not fit raises a UserError that
names its place, such as `local.epochs`. JSON has no NaN and no infinity: `to_plain` writes None instead of them.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cbdsl.errors import UserError, shown, unknown

_Type = TypeVar("_Type")
_WORDS: dict[Any, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false", bytes: "hex"}
_LARGEST = 1.7e308  # whole numbers that a float holds
_NO_LIMIT = 10**9  # a larger limit says nothing to a user


@dataclass(frozen=True)
class Bounds:
    """Bounds of a finite number, or of the length of text, bytes and lists."""

    least: float = -sys.float_info.max
    most: float = sys.float_info.max
    above: bool = False  # `least` itself is excluded
    printable: bool = False  # text without control characters that UTF-8 can encode

    def problem(self, value: Any) -> str:  # noqa: ANN401 - a number or something with a length
        """Return how a value has to be, such as "at least 1", or "" if it is."""
        size, what = (value, "") if isinstance(value, (int, float)) else (len(value), "of length ")
        if not size >= self.least or (self.above and size == self.least):
            return f"{what}{'above' if self.above else 'at least'} {_format(self.least)}"
        if not size <= self.most:
            return f"{what}at most {_format(self.most)}"
        hidden = self.printable and any(unicodedata.category(sign) in {"Cc", "Cs"} for sign in value)
        return "text without control characters, in UTF-8" if hidden else ""

    def __str__(self) -> str:
        start = f"{'above' if self.above else 'from'} {_format(self.least)}" if self.least > -sys.float_info.max else ""
        return start + (f" to {_format(self.most)}" if self.most < _NO_LIMIT else "")


def _format(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def setting(default: Any, description: str, key: str = "") -> Any:  # noqa: ANN401 - a field of any type
    """Return a dataclass field with its description. key: its name in plain values, if that is another one."""
    return field(default=default, metadata={"description": description, "key": key})


@dataclass(frozen=True)
class FieldType:
    """The name, type, limits and description of a field."""

    name: str
    key: str  # in plain values
    hint: Any  # with the limits
    bare: Any  # without them
    limits: tuple[Bounds, ...]
    choices: tuple[object, ...]  # of a Literal
    has_default: bool
    description: str

    def accepts(self, value: object) -> bool:
        """Return whether a value is of exactly this type, one of its choices, and within its limits."""
        fits = value in self.choices if self.choices else type(value) is self.bare
        return fits and not any(limits.problem(value) for limits in self.limits)

    def allowed(self) -> str:
        """Return the choices or limits in words, or ""."""
        return ", ".join(map(str, self.choices or self.limits))


def field_types(kind: type) -> tuple[FieldType, ...]:
    """Return the fields of a dataclass that its constructor takes."""
    return _field_types(kind)


@cache
def _field_types(kind: type) -> tuple[FieldType, ...]:
    found, hints = [], get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint, notes = hints[each.name], each.metadata
        bare, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        key, description = notes.get("key") or each.name, notes.get("description", "")
        choices = get_args(bare) if get_origin(bare) is Literal else ()
        if each.init:
            found.append(FieldType(each.name, key, hint, bare, tuple(limits), choices, has_default, description))
    return tuple(found)


def to_plain(value: object, finite: bool = True) -> Any:  # noqa: ANN401 - any JSON value
    """Return dictionaries, lists, text and numbers; a dataclass becomes a dictionary, and bytes become hex digits.

    finite: write None for a float that is not finite.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {each.key: to_plain(getattr(value, each.name), finite) for each in field_types(type(value))}
    if isinstance(value, Mapping):
        return {key: to_plain(item, finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, finite) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value


def from_plain(
    kind: type[_Type],
    value: object,
    place: str = "",
    *,
    defaults: bool = False,
    unknown_key: Callable[[str], Exception] | None = None,
    nan: bool = False,
) -> _Type:
    """Return the value of a type from plain values; a class may have a static method `from_plain(value, place)`.

    place: the value's name in errors. defaults: a field that is missing has its default, if it has one.
    unknown_key: returns the error for a key that is not a field; None ignores such keys. nan: read None as NaN.
    """
    return cast(_Type, _Reader(defaults, unknown_key, nan).read(kind, value, place))


def check_value(value: object, limits: Bounds, place: str) -> None:
    """Refuse a value outside of limits. place: its name in the error."""
    problem = limits.problem(value)
    if problem:
        raise _refusal(place, problem, value, "wrong-type" if isinstance(value, str) else "out-of-range")


def check_fields(value: object, prefix: str = "") -> None:
    """Refuse a dataclass with a field of another type or outside its limits. prefix: of the names in errors."""
    for each in field_types(type(value)):
        found = getattr(value, each.name)
        if not each.accepts(found):
            _Reader().read(each.hint, found, prefix + each.key)


@dataclass(frozen=True)
class _Reader:
    defaults: bool = False
    unknown_key: Callable[[str], Exception] | None = None
    nan: bool = False

    def read(self, hint: Any, value: Any, place: str) -> Any:  # noqa: ANN401, PLR0911 - a return per kind of type
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            found = self.read(arguments[0], value, place)
            for limits in arguments[1:]:
                check_value(found, limits, place)
            return found
        if is_dataclass(hint):
            return value if isinstance(value, cast(type, hint)) else self._read_fields(cast(type, hint), value, place)
        if hasattr(hint, "from_plain"):
            return hint.from_plain(value, place)
        if origin is Literal and value not in arguments:
            raise unknown(f"value of {place}", value if isinstance(value, str) else shown(value), arguments)
        if origin in {Union, UnionType}:
            others = [kind for kind in arguments if kind is not NoneType]
            is_none = value is None and len(others) < len(arguments)
            return self.read(others[0], value, place) if len(others) == 1 and not is_none else value
        if origin in {tuple, list, Sequence}:
            return self._read_items(origin, arguments, value, place)
        if origin in {dict, Mapping}:
            found = _keyed(value, place)
            return {key: self.read(arguments[1], item, f"{place}.{key}") for key, item in found.items()}
        return self._read_scalar(hint, value, place) if hint in _WORDS else value

    def _read_fields(self, kind: type, value: Any, place: str) -> Any:  # noqa: ANN401
        start, values = f"{place}." if place else "", {}
        by_key = {each.key: each for each in field_types(kind)}
        found = _keyed(value, place)
        for key in found:
            if key not in by_key and self.unknown_key is not None:
                raise self.unknown_key(f"{start}{key}")
        for key, each in by_key.items():
            if key in found:
                given = found[key]
                values[each.name] = given if each.accepts(given) else self.read(each.hint, given, start + key)
            elif not (self.defaults and each.has_default):
                raise UserError(f"{start}{key} is missing.", code="missing-value")
        return kind(**values)

    def _read_items(self, origin: Any, arguments: tuple[Any, ...], value: Any, place: str) -> Any:  # noqa: ANN401
        if not isinstance(value, (list, tuple)):
            raise _refusal(place, "a list", value)
        kinds = arguments if origin is tuple and arguments[-1] is not ... else arguments[:1] * len(value)
        if len(value) != len(kinds):
            raise _refusal(place, f"a list of {len(kinds)}", value)
        items = [self.read(kind, item, place) for kind, item in zip(kinds, value, strict=True)]
        return items if origin is list else tuple(items)

    def _read_scalar(self, hint: Any, value: Any, place: str) -> Any:  # noqa: ANN401
        is_number = isinstance(value, (Integral, float)) and not isinstance(value, bool)
        if hint is float and is_number and (isinstance(value, float) or abs(value) <= _LARGEST):
            return float(value)
        if hint is float and value is None and self.nan:
            return math.nan
        if hint is int and is_number and (isinstance(value, Integral) or value.is_integer()):
            return int(value)
        if hint in {str, bool, bytes} and isinstance(value, hint):
            return value
        if hint is bytes and isinstance(value, str) and set(value) <= set("0123456789abcdef") and len(value) % 2 == 0:
            return bytes.fromhex(value)
        raise _refusal(place, _WORDS[hint], value)


def _keyed(value: Any, place: str) -> Mapping[str, Any]:  # noqa: ANN401
    if isinstance(value, Mapping):
        return value
    raise _refusal(place, "a group of keys with values", value)


def _refusal(place: str, wanted: str, value: object, code: str = "wrong-type") -> UserError:
    return UserError(f"{place or 'The value'} must be {wanted}; given {shown(value)}.", code=code)
