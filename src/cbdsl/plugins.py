"""Guests' files: imported once, so that the parts in them are registered, and known by what is in them.

Only what a user names on the command line or in Python is ever imported, and what a run's own folder says. A spec that
came over a network names none.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cbdsl.errors import UserError


def load(names: Iterable[str]) -> tuple[str, ...]:
    """Import plugins, each a file or a module; their names as they go into a spec: files by their whole path."""
    return tuple(_load(_whole(name)) for name in names)


@cache
def _load(name: str) -> str:
    path = Path(name)
    try:
        if path.suffix == ".py":
            module = f"cbdsl_plugin_{path.stem}_{digest_of(name)}"
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        else:
            importlib.import_module(name)
    except UserError as error:
        raise UserError(f"The plugin {name} cannot be used: {error}") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"The plugin {name} cannot be imported: {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno}). Mend it, or leave it out."
        ) from error
    return name


def digest_of(name: str) -> str:
    """A hash of what is in a plugin, or an error if it is not there."""
    path = source_of(name)
    if path is None:
        raise UserError(f"The plugin '{name}' is neither a Python file nor a module that can be imported.")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def source_of(name: str) -> Path | None:
    """The file behind a plugin."""
    if Path(name).suffix == ".py":
        return Path(name) if Path(name).is_file() else None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _whole(name: str) -> str:
    if source_of(name) is None:
        raise UserError(
            f"The plugin '{name}' is neither a Python file nor a module that can be imported. Give a path such as "
            "my_parts.py, or the name of an installed module."
        )
    return str(Path(name).resolve()) if Path(name).suffix == ".py" else name
