"""Registry of components by name, built-in or from a plugin file."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from cbdsl.errors import UserError, unknown

CUSTOM = "custom"  # what a spec calls a part that has no name
OWN = 'One of your own comes with its file: --plugin FILE, in Python Spec(plugins=("FILE",)).'

_Part = TypeVar("_Part", bound=Callable[..., Any])


class Register:
    """The parts of one kind."""

    def __init__(self, kind: str, homes: tuple[str, ...]) -> None:
        """homes: modules that hold the built-in parts; imported when a part is first looked up."""
        self.kind, self._homes = kind, homes
        self._parts: dict[str, Callable[..., Any]] = {}

    def __call__(self, name: str) -> Callable[[_Part], _Part]:
        """Register what is defined below under a name; use it as a decorator."""

        def keep(part: _Part) -> _Part:
            if not part.__module__.startswith("cbdsl."):
                self._open()  # so that a guest learns of a name that is taken, and not the package
            known = self._parts.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
                raise UserError(
                    f"The {self.kind} '{name}' exists already, in {known.__module__}. Give yours another name."
                )
            self._parts[name] = part
            return part

        if name == CUSTOM:
            raise UserError(f"No {self.kind} can be called '{CUSTOM}': that stands for parts given in Python.")
        if not name or any(sign.isspace() or sign in ".,+=" for sign in name):
            raise UserError(f"No {self.kind} can be called '{name}': a name has no spaces and none of . , + =")
        return keep

    def names(self) -> list[str]:
        """All names, built-in parts first."""
        self._open()
        return list(self._parts)

    def __contains__(self, name: object) -> bool:
        self._open()
        return name in self._parts

    def get(self, name: str) -> Any:  # noqa: ANN401 - a class or a function of any kind
        """The class or function behind a name."""
        self._open()
        if name not in self._parts:
            raise unknown(self.kind, name, self._parts, OWN)
        return self._parts[name]

    def make(self, name: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The part with its settings: an instance of a class, or a function with its keyword arguments bound."""
        part, known = self.get(name), self.settings(name)
        values = {}
        for key, value in options.items():
            if key not in known:
                allowed = ", ".join(known) or "none"
                raise UserError(f"The {self.kind} '{name}' has no setting '{key}'. It has: {allowed}.")
            values[key] = _fitting(value, known[key], f"{key} of the {self.kind} '{name}'")
        needed = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in values]
        if needed:
            raise UserError(
                f"The {self.kind} '{name}' needs a value for {needed[0]}: --set options.{name}.{needed[0]}=..."
            )
        if inspect.isclass(part):
            return part(**values)
        return functools.partial(part, **values) if values else part

    def settings(self, name: str) -> dict[str, Any]:
        """The settings of a part and their defaults."""
        part = self.get(name)
        parameters = inspect.signature(part).parameters.values()
        wanted = [each for each in parameters if inspect.isclass(part) or each.kind is each.KEYWORD_ONLY]
        return {each.name: each.default for each in wanted if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}

    def summary(self, name: str) -> str:
        """The first paragraph of a part's documentation."""
        lines = inspect.cleandoc(self.get(name).__doc__ or "").split("\n\n")[0].split()
        return " ".join(lines)

    def drop(self, name: str) -> None:
        """Take out one part."""
        self._parts.pop(name, None)

    def forget(self, module: str) -> None:
        """Take out what a module registered, so that it can be imported again."""
        self._parts = {name: part for name, part in self._parts.items() if part.__module__ != module}

    def _open(self) -> None:
        homes, self._homes = self._homes, ()
        for home in homes:
            import_module(home)


def _fitting(value: Any, default: Any, what: str) -> Any:  # noqa: ANN401 - whatever a setting holds
    """A value as the default's type, or an error."""
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if default is inspect.Parameter.empty or default is None or fits:
        return value
    raise UserError(f"{what} takes a value like {default!r}; given {value!r}.")


attack = Register("attack", tuple(f"cbdsl.attacks.{name}" for name in ("weights", "protocol", "adaptive")))
aggregator = Register("aggregator", ("cbdsl.algorithm.aggregators",))
selection = Register("selection", ("cbdsl.algorithm.selection", "cbdsl.algorithm.rotation"))
method = Register("method", ("cbdsl.algorithm.methods",))
partition = Register("partition", ("cbdsl.data.partition",))
model = Register("model", ("cbdsl.models.zoo",))
dataset = Register("data set", ("cbdsl.data.dataset", "cbdsl.data.download"))
codec = Register("codec", ("cbdsl.codecs.quantize", "cbdsl.codecs.topk"))

ALL = {
    "attacks": attack,
    "aggregators": aggregator,
    "selections": selection,
    "methods": method,
    "partitions": partition,
    "models": model,
    "data": dataset,
    "codecs": codec,
}


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
    if wanted in model and model.get(wanted).__qualname__.startswith(_FROM_A_FILE):
        model.drop(wanted)  # a class of that name in another file: whoever runs it names its file again
    model(wanted)(make)


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
    for kind in ALL.values():
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
