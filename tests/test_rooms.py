"""The rooms of the house and their arrows: every import points to a room below, or stays at home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cbdsl

HOUSE = Path(cbdsl.__file__).parent

# From the cellar to the roof. Rooms on one floor may visit each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "arrays",
        "errors",
        "files",
        "archives",
        "machine",
        "plain",
        "plugins",
        "register",
        "rng",
        "settings",
        "spec",
        "spec_groups",
        "presets",
        "student",
        "text",
    ),
    ("codecs", "data", "engines", "models"),
    ("workers",),
    ("methods",),
    ("protocol",),
    ("byzantine",),
    ("swarms",),
    ("runs", "callbacks"),
    ("watch",),
    ("theory",),
    ("deploy",),
    ("flower",),
    ("study",),
    ("report", "export"),
    ("testing",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> list[Path]:
    return sorted(HOUSE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of our own, wherever it stands; what only types need does not count."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if names == ["cbdsl"]:
                names = [f"cbdsl.{alias.name}" for alias in node.names if alias.name != "__version__"]
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("cbdsl."))


def test_every_module_lives_in_a_room_with_a_floor() -> None:
    assert {room_of(path) for path in modules()} == set(FLOOR_OF)


def test_no_arrow_points_upwards() -> None:
    wrong = [
        f"{path.relative_to(HOUSE)}:{line} ({room_of(path)}) imports {room}"
        for path in modules()
        for line, room in imports_of(path)
        if FLOOR_OF[room] > FLOOR_OF[room_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_protocol_knows_no_transport_no_data_and_no_torch() -> None:
    for room, forbidden in (("protocol", {"torch", "paho", "cbor2"}), ("workers", {"torch", "paho"})):
        for path in (HOUSE / room).glob("*.py"):
            words = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                for name in (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
            }
            assert not words & forbidden, path
            assert "data" not in {room for _, room in imports_of(path)}, path


def test_no_module_is_longer_than_four_hundred_lines() -> None:
    long = {str(path.relative_to(HOUSE)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}
