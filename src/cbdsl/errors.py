"""`UserError`, raised for input that a user can correct, and the messages that several modules share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


_LONGEST = 200  # letters of a value in a message


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a whole number of thousands of digits" if isinstance(value, int) else "something too deep to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text):,} letters)"


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
