"""The commands, settings, parts and Python names that were recorded in surface.json still exist.

Additions pass. `surface.py` says how to remove something on purpose and how to record anew.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

from support import surface

SMALL: dict[str, Any] = {
    "commands": {"run": {"options": {"--rounds": {"flag": False}}, "positional": ["spec"], "needs": []}},
    "settings": {"shared": {"values": ["none", "both"], "default": "none"}},
    "json": {"run --json": {"uploads": ["int"], "list": {"[]": {"name": ["str"]}}}},
}


def changed(*path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    tree = copy.deepcopy(SMALL)
    branch = tree
    for step in path[:-1]:
        branch = branch[step]
    if value is None:
        del branch[path[-1]]
    else:
        branch[path[-1]] = value
    return tree


@pytest.mark.slow
def test_nothing_that_was_recorded_is_gone() -> None:
    done = subprocess.run([sys.executable, surface.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_removal_has_a_reason() -> None:
    _, removed = surface.read()
    assert all(reason.strip() for reason in removed.values())


@pytest.mark.parametrize(
    "tree",
    [
        SMALL,
        changed("commands", "sweep", value={}),
        changed("commands", "run", "options", "--new", value={"flag": True}),
        changed("commands", "run", "positional", value=["spec", "other"]),
        changed("settings", "shared", "values", value=["none", "both", "train"]),
        changed("json", "run --json", "uploads", value=[]),
        changed("json", "run --json", "uploads", value=["float", "int"]),
    ],
)
def test_additions_pass(tree: dict[str, Any]) -> None:
    assert list(surface.missing(SMALL, tree)) == []


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (changed("commands", "run", value=None), "commands/run"),
        (changed("commands", "run", "options", "--rounds", value=None), "commands/run/options/--rounds"),
        (changed("commands", "run", "needs", value=["--new"]), "commands/run/needs/--new is new"),
        (changed("commands", "run", "positional", value=["other", "spec"]), "commands/run/positional"),
        (changed("settings", "shared", "values", value=["none"]), "settings/shared/values/both"),
        (changed("settings", "shared", "default", value="both"), "settings/shared/default"),
        (changed("json", "run --json", "uploads", value=["float"]), "json/run --json/uploads/int"),
        (changed("json", "run --json", "list", "[]", "name", value=None), "json/run --json/list/[]/name"),
    ],
)
def test_removals_fail_unless_they_are_listed(tree: dict[str, Any], path: str) -> None:
    gone = list(surface.missing(SMALL, tree))
    assert len(gone) == 1
    assert gone[0].startswith(path)
    assert surface.unexplained(gone, {}) == gone
    assert surface.unexplained(gone, {path.rpartition("/")[0]: "a reason"}) == []


def test_shapes_of_the_items_of_a_list_are_merged() -> None:
    assert surface.shape([{"a": 1}, {"a": 0.5, "b": None}, {"b": "x"}]) == {"[]": {"a": ["float", "int"], "b": ["str"]}}
