"""Layering test: a package imports only packages below it, and modules import one another without cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cbdsl

SOURCE = Path(cbdsl.__file__).parent
# Bottom to top. A package may import those in its own line and in the lines below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("arrays", "errors", "rng", "util"),
    ("spec", "register"),
    ("codecs",),
    ("data",),
    ("models",),
    ("engines",),
    ("presets",),
    ("algorithm",),
    ("attacks",),
    ("swarms",),
    ("runs",),
    ("watch",),
    ("theory",),
    ("network",),
    ("flower",),
    ("studies",),
    ("report", "export"),
    ("testing",),
    ("callbacks", "cli"),
    ("__init__", "__main__"),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def package_of(path: Path) -> str:
    return name_of(path).split(".")[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def parsed(path: Path) -> tuple[list[ast.AST], set[int]]:
    """Return the imports in a file and the `id` of each one that is for type checking alone."""
    nodes = list(ast.walk(tree_of(path)))
    blocks = [node for node in nodes if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))], for_types


def imports_of(path: Path, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each import of our own, except those for type checking alone."""
    nodes, for_types = parsed(path)
    for node in tree_of(path).body if top_level else nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.removeprefix("cbdsl.")) for name in names if name.startswith("cbdsl."))


def test_every_module_is_in_a_package_with_a_layer() -> None:
    assert {package_of(path) for path in modules()} == set(LAYER_OF)


def test_no_import_points_upwards() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in modules()
        for line, name in imports_of(path)
        if name != "__version__" and LAYER_OF[name.split(".")[0]] > LAYER_OF[package_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_one_another_without_cycles() -> None:
    known = {name_of(path): path for path in modules()}
    graph = {
        name: {parent for _, found in imports_of(path, top_level=True) for parent in (found, found.rpartition(".")[0])}
        & set(known)
        for name, path in known.items()
    }
    while free := {name for name, needed in graph.items() if not needed - {name}}:
        graph = {name: needed - free for name, needed in graph.items() if name not in free}
    assert not graph, f"These modules import each other in a circle: {sorted(graph)}"


def test_the_algorithm_knows_no_transport_no_data_and_no_torch() -> None:
    for path in (SOURCE / "algorithm").glob("*.py"):
        tree, _ = parsed(path)
        found = {
            name.split(".")[0]
            for node in tree
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not found & {"torch", "paho", "cbor2"}, path
        assert "data" not in {name.split(".")[0] for _, name in imports_of(path)}, path
