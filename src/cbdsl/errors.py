"""The one exception for what a user can mend: the message says what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints the message alone and exits with code 2."""


_LONGEST = 200  # letters of a value in a message


def shown(value: object) -> str:
    """A value that a user gave, as a message shows it: shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a whole number of thousands of digits" if isinstance(value, int) else "something too deep to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text):,} letters)"


def close_to(given: str, names: Iterable[str]) -> list[str]:
    """The name that was probably meant, if there is one."""
    return difflib.get_close_matches(given[:_LONGEST], list(names), n=1)


def unknown(kind: str, given: str, allowed: Iterable[str], besides: str = "") -> UserError:
    """Say that a name is unknown, what it may have meant and which names there are; besides: how else to get one."""
    names = list(allowed)
    close = close_to(given, names)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return UserError(f"Unknown {kind} {shown(given)}.{hint} Allowed: {', '.join(names)}.{besides and ' '}{besides}")


def missing(package: str, extra: str, why: str) -> UserError:
    """Say that a package is needed but not installed, why it is needed, and how to get it."""
    return UserError(f"{package} is needed here, because {why}; it is not installed. Try pip install 'cbdsl[{extra}]'.")
