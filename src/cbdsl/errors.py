"""`UserError`, raised for input that a user can correct, the messages that several modules share, and old names."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class UserError(ValueError):
    """Invalid input. The message says what was given, what is allowed and what to do.

    The command line prints the message alone and exits with code 2. `code` is a stable name for programs and tests,
    such as "unknown-name"; the wording of the message may change between versions.

    >>> raise UserError("The number of rounds is 0; give at least 1.", code="out-of-range")
    Traceback (most recent call last):
    ...
    cbdsl.errors.UserError: The number of rounds is 0; give at least 1.
    """

    def __init__(self, message: str, *, code: str = "invalid-input") -> None:
        super().__init__(message)
        self.code = code


_LONGEST = 200  # characters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a whole number of thousands of digits" if isinstance(value, int) else "something too deep to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text):,} characters)"


def close_to(given: str, names: Iterable[str]) -> list[str]:
    """Return the closest of the names, or an empty list."""
    return difflib.get_close_matches(given[:_LONGEST], list(names), n=1)


def unknown(kind: str, given: str, allowed: Iterable[str], besides: str = "") -> UserError:
    """Build the error for an unknown name, with the closest match and all allowed names.

    besides: a last sentence, for example how else to give the value.
    """
    names = list(allowed)
    close = close_to(given, names)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return UserError(
        f"Unknown {kind} {shown(given)}.{hint} Allowed: {', '.join(names)}.{besides and ' '}{besides}",
        code="unknown-name",
    )


def missing(package: str, extra: str, why: str) -> UserError:
    """Build the error for a package that is not installed, with the command that installs it."""
    return UserError(
        f"{package} is needed here, because {why}; it is not installed. Try pip install 'cbdsl[{extra}]'.",
        code="missing-package",
    )


def renamed(old: str, method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return a method under its old name, until 1.0: it warns, and calls the method by its new one."""

    @functools.wraps(method, updated=())
    def call(*arguments: _Given.args, **options: _Given.kwargs) -> _Result:
        new = method.__name__
        warnings.warn(f"{old} is now {new}; the old name goes in 1.0", DeprecationWarning, stacklevel=2)
        result: _Result = getattr(arguments[0], new)(*arguments[1:], **options)
        return result

    return call
