"""Guests' files: imported once, so that the parts in them are registered, and known by what is in them.

Only what a user names on the command line or in Python is ever imported, and what a run's own folder says. A spec that
came over a network names none. `my_net.py:Net` also makes a model of the class Net in that file, under its name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbdsl import register
from cbdsl.errors import UserError


def load(names: Iterable[str]) -> tuple[str, ...]:
    """Import plugins, each a file or a module; their names as they go into a spec: files by their whole path."""
    return tuple(_load(_whole(name)) for name in names)


_FROM_A_FILE = "model in a file: "

_loaded: dict[str, tuple[str, str]] = {}
"""The hash of what was imported under a plugin's name, and its module: a plugin that was edited is imported again."""


def model_in(name: str) -> tuple[str, str]:
    """`my_net.py:Net` as the file and what is meant in it; the latter is empty where nothing is."""
    file, colon, wanted = name.rpartition(".py:")
    return (f"{file}.py", wanted) if colon else (name, "")


def _load(name: str) -> str:
    name, wanted = model_in(name)
    module = _import(name)
    if not wanted:
        return name
    _register_model(name, wanted, sys.modules[module])
    return f"{name}:{wanted}"


def _register_model(name: str, wanted: str, module: Any) -> None:  # noqa: ANN401
    """Make a model of a class or function that knows nothing of registers."""
    part = getattr(module, wanted, None)
    if not callable(part):
        found = [
            each
            for each, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise UserError(f"{name} has no class or function {wanted}. It has: {', '.join(found) or 'no class'}.")
    required = [each.name for each in inspect.signature(part).parameters.values() if _is_required(each)]
    if len(required) not in {0, 2}:
        raise UserError(
            f"{wanted} in {name} needs {', '.join(required)}. Give a class that is made without arguments, or a "
            "function of a sample's shape and the number of classes."
        )

    def make(shape: tuple[int, ...], classes: int) -> Any:  # noqa: ANN401 - an Architecture or a module
        return part(shape, classes) if required else part()

    make.__module__, make.__qualname__ = module.__name__, f"{_FROM_A_FILE}{wanted}"
    make.__doc__ = inspect.getdoc(part) if part.__doc__ else f"From {Path(name).name}."
    if wanted in register.model and register.model.get(wanted).__qualname__.startswith(_FROM_A_FILE):
        register.model.drop(wanted)  # a class of that name in another file: whoever runs it names its file again
    register.model(wanted)(make)


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    return named and parameter.default is parameter.empty


def _import(name: str) -> str:
    """Import a plugin unless that was done; the name of its module."""
    digest, path = digest_of(name), Path(name)
    if name in _loaded and _loaded[name][0] == digest:
        return _loaded[name][1]
    module = f"cbdsl_plugin_{path.stem}_{digest}" if path.suffix == ".py" else name
    if name in _loaded:
        _forget(_loaded.pop(name)[1])
    try:
        if path.suffix == ".py":
            _run_file(path, module)
        elif module in sys.modules:
            importlib.reload(sys.modules[module])
        else:
            importlib.import_module(module)
    except UserError as error:
        _forget(module)
        raise UserError(f"The plugin {name} cannot be used: {error}") from error
    except Exception as error:
        _forget(module)
        raise UserError(
            f"The plugin {name} cannot be imported: {type(error).__name__}: {error} ({_place(error, path)}). "
            "Mend it, or leave it out."
        ) from error
    _loaded[name] = digest, module
    return module


def _run_file(path: Path, module: str) -> None:
    if module in sys.modules:  # the same content from another place
        return
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])


def _forget(module: str) -> None:
    """Take a plugin's parts out of every register, unless the same content is in use under another name."""
    if any(module == other for _, other in _loaded.values()):
        return
    for kind in register.ALL.values():
        kind.forget(module)
    if module.startswith("cbdsl_plugin_"):
        sys.modules.pop(module, None)


def _place(error: Exception, path: Path) -> str:
    """Where an error comes from: the last line of the plugin itself that was reached."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    where = (own or list(frames))[-1]
    return f"{where.filename}, line {where.lineno}"


def module_of(name: str) -> str:
    """The module that a plugin was imported as."""
    return _loaded[model_in(name)[0]][1]


def digest_of(name: str) -> str:
    """A hash of what is in a plugin, or an error if it is not there."""
    path = source_of(name)
    if path is None:
        raise UserError(f"The plugin '{name}' is neither a Python file nor a module that can be imported.")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def source_of(name: str) -> Path | None:
    """The file behind a plugin."""
    name, _ = model_in(name)
    if Path(name).suffix == ".py":
        return Path(name) if Path(name).is_file() else None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _whole(name: str) -> str:
    file, wanted = model_in(name)
    if source_of(name) is None:
        if Path(file).suffix == ".py":
            raise UserError(f"There is no file {file}{f', which was to hold the model {wanted}' * bool(wanted)}.")
        raise UserError(
            f"The plugin '{name}' is neither a Python file nor a module that can be imported. Give a path such as "
            "my_parts.py, or the name of an installed module."
        )
    whole = str(Path(file).resolve()) if Path(file).suffix == ".py" else file
    return f"{whole}:{wanted}" if wanted else whole
