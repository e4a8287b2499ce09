"""Every UserError that the package raises has a code, and codes are few."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import cbdsl

SOURCE = Path(cbdsl.__file__).parent
MOST = 40  # a program that handles errors by code should need few of them


def name_of(function: ast.expr) -> str:
    """Return the last name of what is called; nothing if it has none."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def errors() -> list[tuple[str, ast.expr | None]]:
    """Return the place and the code of each UserError in the source."""
    found: list[tuple[str, ast.expr | None]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_of(node.func).endswith("UserError"):
                code = next((one.value for one in node.keywords if one.arg == "code"), None)
                found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", code))
    return found


def literals(code: ast.expr | None) -> set[str]:
    """Return the codes that an expression can be.

    `error.code` has none: the codes of another error are found where that is raised.
    """
    values = [one.value for one in ast.walk(code or ast.Pass()) if isinstance(one, ast.Constant)]
    return {value for value in values if isinstance(value, str)}


def test_every_error_has_a_code() -> None:
    without = [place for place, code in errors() if code is None]
    assert not without, "\n".join(without)


def test_codes_are_few_and_written_alike() -> None:
    codes = {name for _, code in errors() for name in literals(code)}
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes), codes
    assert len(codes) <= MOST, f"{len(codes)}: {sorted(codes)}"
