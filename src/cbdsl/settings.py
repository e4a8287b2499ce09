"""Settings as text: how the command line reads them, and what each one means."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cbdsl.errors import UserError, shown
from cbdsl.spec import Spec, dotted_keys, parse_toml, sections


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `key=value` of the command line; the value is TOML, or else a plain word."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"{shown(text)} is not a setting. Write --set key=value, such as --set local.epochs=3.")
    try:
        return key.strip(), parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    except ValueError as error:
        raise UserError(f"The value of {shown(key.strip())} cannot be read ({error}); given {shown(value)}.") from error


def words(text: str) -> tuple[str, ...]:
    """`a, b` -> ("a", "b")."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str, name: str) -> tuple[int, ...]:
    """`1, 5` -> (1, 5)."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise UserError(
            f"{name} takes whole numbers separated by commas, such as 1,5,20; given {shown(text)}."
        ) from None


def setting_values(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    """The values of dotted keys, such as {"local.epochs": 3}; all of them can be hashed."""
    return {key: _value(spec, key) for key in keys}


def _value(spec: Spec, key: str) -> Any:  # noqa: ANN401 - any value of a spec
    group, _, rest = key.partition(".")
    if group == "options" and rest:
        part, _, name = rest.partition(".")
        return spec.options.of(part).get(name)  # none: the part's own default
    value: Any = getattr(spec, group)
    return getattr(value, rest) if rest else value


def option_keys(specs: Iterable[Spec]) -> list[str]:
    """The parts' own settings that any of these specs sets, dotted."""
    found = {f"options.{part}.{name}": None for spec in specs for part in spec.options for name in spec.options[part]}
    return list(found)


def explanations() -> dict[str, str]:
    """One line for every setting, by its dotted name: the comment that stands beside it in `cbdsl.spec`."""
    found = {}
    for group, kind in sections().items():
        for name, words in re.findall(r"^    (\w+): [^\n]*?  # (.+)$", inspect.getsource(kind), re.MULTILINE):
            found[f"{group}.{name}" if group else name] = words
    return {key: found[key] for key in dotted_keys() if key in found}


@dataclass(frozen=True)
class Line:
    """One setting of the reference."""

    key: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class Group:
    """Settings that belong together."""

    title: str
    lines: tuple[Line, ...]


def reference() -> list[Group]:
    """Every setting with its default and its meaning, in groups."""
    meanings, defaults = explanations(), setting_values(Spec(), dotted_keys())
    groups = []
    for group, kind in sections().items():
        keys = [key for key in dotted_keys() if key.rpartition(".")[0] == group and key in meanings]
        title = f"{group}: {inspect.getdoc(kind)}" if group else "The run"
        groups.append(Group(title, tuple(Line(key, defaults[key], meanings[key]) for key in keys)))
    return groups


def as_text(value: Any) -> str:  # noqa: ANN401 - any value of a spec
    """A value as `--set` reads it and TOML writes it."""
    return json.dumps(value, default=dict)


def differences(spec: Spec, start: Spec) -> dict[str, Any]:
    """What a spec says that another does not, by dotted name."""
    keys = [*(key for key in dotted_keys() if key != "options"), *option_keys([spec])]
    own, other = setting_values(spec, keys), setting_values(start, keys)
    return {key: value for key, value in own.items() if value != other[key]}
