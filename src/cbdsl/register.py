"""Registry of components by name, built-in or from a plugin file."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cbdsl.errors import UserError, unknown
from cbdsl.util.serialize import from_plain

CUSTOM = "custom"  # what a spec calls a part that has no name
OWN = 'One of your own comes with its file: --plugin FILE, in Python Spec(plugins=("FILE",)).'

_Part = TypeVar("_Part", bound=Callable[..., Any])


class Register:
    """The parts of one kind, by name.

    >>> from cbdsl.register import Register
    >>> greeting = Register("greeting", homes=())
    >>> @greeting("polite")
    ... def polite(name, *, mark="."):
    ...     return f"Good day, {name}{mark}"
    >>> greeting.names(), greeting.settings("polite")
    (['polite'], {'mark': '.'})
    >>> greeting.make("polite", {"mark": "!"})("Ada")
    'Good day, Ada!'
    """

    def __init__(self, kind: str, homes: tuple[str, ...]) -> None:
        """homes: the modules that contain the built-in parts; imported when a part is first looked up."""
        self.kind, self._homes = kind, homes
        self._parts: dict[str, Callable[..., Any]] = {}
        self._families: dict[str, str] = {}
        self._ranges: dict[str, Mapping[str, tuple[float, float]]] = {}
        self._lock = threading.RLock()

    def __call__(
        self, name: str, *, family: str = "", ranges: Mapping[str, tuple[float, float]] | None = None
    ) -> Callable[[_Part], _Part]:
        """Return a decorator that registers a class or function under this name.

        family: the group to which it belongs, for lists and for selecting all parts of a group.
        ranges: the lowest and highest value of numeric settings; others may have any finite value.
        """
        if name == CUSTOM:
            raise UserError(
                f"No {self.kind} can be called '{CUSTOM}': that stands for parts given in Python.", code="not-allowed"
            )
        if not name or any(sign.isspace() or sign in ".,+=" for sign in name):
            raise UserError(
                f"No {self.kind} can be called '{name}': a name has no spaces and none of . , + =", code="not-allowed"
            )

        def add(part: _Part) -> _Part:
            if not part.__module__.startswith("cbdsl."):
                self._import_homes()  # so that the plugin is told if a built-in part has this name
            known = self._parts.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
                raise UserError(
                    f"The {self.kind} '{name}' exists already, in {known.__module__}. Give yours another name.",
                    code="exists-already",
                )
            self._parts[name], self._families[name], self._ranges[name] = part, family, ranges or {}
            return part

        return add

    def names(self) -> list[str]:
        """Return all names, built-in parts first."""
        self._import_homes()
        return list(self._parts)

    def __contains__(self, name: object) -> bool:
        self._import_homes()
        return name in self._parts

    def get(self, name: str) -> Any:  # noqa: ANN401 - a class or a function of any kind
        """Return the class or function with this name."""
        self._import_homes()
        if name not in self._parts:
            raise unknown(self.kind, name, self._parts, OWN)
        return self._parts[name]

    def make(self, name: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return the part with its settings: an instance of a class, or a function with keyword arguments bound."""
        part, known = self.get(name), self.settings(name)
        values = {}
        for key, value in options.items():
            if key not in known:
                allowed = ", ".join(known) or "none"
                raise UserError(
                    f"The {self.kind} '{name}' has no setting '{key}'. It has: {allowed}.", code="unknown-setting"
                )
            what = f"{key} of the {self.kind} '{name}'"
            values[key] = _convert(value, known[key], what)
            _check_range(values[key], *self._ranges[name].get(key, (-math.inf, math.inf)), what)
        needed = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in values]
        if needed:
            raise UserError(
                f"The {self.kind} '{name}' needs a value for {needed[0]}: --set options.{name}.{needed[0]}=...",
                code="missing-setting",
            )
        if inspect.isclass(part):
            return part(**values)
        return functools.partial(part, **values) if values else part

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of a part with their defaults."""
        return dict(_settings_of(self.get(name)))

    def summary(self, name: str) -> str:
        """Return the first paragraph of a part's documentation."""
        lines = inspect.cleandoc(self.get(name).__doc__ or "").split("\n\n")[0].split()
        return " ".join(lines)

    def family(self, name: str) -> str:
        """Return the family of a part; "" if it was registered without one."""
        self.get(name)
        return self._families[name]

    def drop(self, name: str) -> None:
        """Remove one part."""
        self._parts.pop(name, None)

    def forget(self, module: str) -> None:
        """Remove the parts that a module registered, so that it can be imported again."""
        self._parts = {name: part for name, part in self._parts.items() if part.__module__ != module}

    def _import_homes(self) -> None:
        """Import the built-in parts unless that is done. If an import fails, each later lookup raises its error."""
        with self._lock:
            for home in self._homes:
                importlib.import_module(home)
            self._homes = ()


@functools.lru_cache  # a spec is checked several times per run, and a signature costs more than the rest of it
def _settings_of(part: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the settings of a class or function with their defaults."""
    parameters = inspect.signature(part).parameters.values()
    wanted = [each for each in parameters if inspect.isclass(part) or each.kind is each.KEYWORD_ONLY]
    return {each.name: each.default for each in wanted if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}


def _convert(value: Any, default: Any, what: str) -> Any:  # noqa: ANN401 - any setting
    """Return a value as the type of the default, or raise UserError."""
    if default is inspect.Parameter.empty or default is None:
        return value
    try:
        return from_plain(tuple[Any, ...] if isinstance(default, tuple) else type(default), value)
    except UserError as error:
        raise UserError(f"{what} takes a value like {default!r}; given {value!r}.", code=error.code) from error


def _check_range(value: object, least: float, most: float, what: str) -> None:
    """Refuse a number that is not finite or outside of a range, before a run begins."""
    if not isinstance(value, (int, float)) or (least <= value <= most and abs(value) < math.inf):
        return
    allowed = f"from {least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
    raise UserError(
        f"{what} must be {allowed if least > -math.inf else 'a finite number'}; given {value}.", code="out-of-range"
    )


attack = Register("attack", tuple(f"cbdsl.attacks.{name}" for name in ("weights", "protocol", "adaptive", "backdoors")))
aggregator = Register(
    "aggregator", tuple(f"cbdsl.algorithm.aggregators{family}" for family in ("", "_filtering", "_trial"))
)
preaggregation = Register("pre-aggregation", ("cbdsl.algorithm.aggregators",))
selection = Register("selection", ("cbdsl.algorithm.selection", "cbdsl.algorithm.rotation"))
method = Register("method", ("cbdsl.algorithm.methods", "cbdsl.algorithm.methods_more", "cbdsl.algorithm.alone"))
partition = Register("partition", ("cbdsl.data.partition",))
model = Register("model", ("cbdsl.models.zoo",))
dataset = Register("data set", ("cbdsl.data.dataset", "cbdsl.data.generated", "cbdsl.data.download"))
metric = Register("metric", ("cbdsl.runs.metrics",))
augmentation = Register("augmentation", ("cbdsl.engines.augmentations",))
codec = Register("codec", ("cbdsl.codecs.quantize", "cbdsl.codecs.topk"))

ALL = {
    "attacks": attack,
    "aggregators": aggregator,
    "pre-aggregations": preaggregation,
    "selections": selection,
    "methods": method,
    "partitions": partition,
    "models": model,
    "data": dataset,
    "codecs": codec,
    "augmentations": augmentation,
    "metrics": metric,
}


_FROM_A_FILE = "model in a file: "  # begins the qualified name of a model from a plugin file

_neighbours: dict[str, tuple[str, str]] = {}
"""File and content hash of the modules that plugins imported from their folders."""

_loaded: dict[str, tuple[str, str]] = {}
"""Content hash and module of each plugin; a plugin that was edited is imported again."""


def load(names: Iterable[str]) -> tuple[str, ...]:
    """Import plugins, each a file or a module, and return their names for a spec: files by absolute path.

    `my_net.py:Net` also registers the class or function Net of the file as a model.
    """
    return tuple(_load(name) for name in names)


def split_plugin_name(name: str) -> tuple[str, str]:
    """Split `my_net.py:Net` into file and model; the model is empty if none is named."""
    file, colon, wanted = name.rpartition(".py:")
    return (f"{file}.py", wanted) if colon else (name, "")


def plugin_source(name: str) -> Path | None:
    """Return the file of a plugin, or None if there is none."""
    name, _ = split_plugin_name(name)
    if Path(name).suffix == ".py":
        return Path(name) if Path(name).is_file() else None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def plugin_neighbours(name: str) -> dict[str, Path]:
    """Return the files that a plugin imports from its folder, directly or not, by their path in that folder.

    They are found from the import statements: modules, and packages with all Python files in them.
    """
    path, found = plugin_source(name), dict[str, Path]()
    if path is None or Path(split_plugin_name(name)[0]).suffix != ".py":
        return found
    folder, left = path.parent, [path]
    while left:
        for imported in _imported_names(left.pop().read_bytes()):
            file, package = folder / f"{imported}.py", folder / imported
            inside = sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else []
            for one in inside or [file] * file.is_file():
                if one != path and str(one.relative_to(folder)) not in found:
                    found[str(one.relative_to(folder))] = one
                    left.append(one)
    return dict(sorted(found.items()))


@functools.lru_cache
def _imported_names(source: bytes) -> frozenset[str]:
    """Return the top-level names of the modules that a Python file imports; none if it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return frozenset(each.partition(".")[0] for each in [*whole, *parts])


def plugin_digest(name: str) -> str:
    """Return a hash of the content of a plugin, and of the files beside it that it imports."""
    path, (file, wanted) = plugin_source(name), split_plugin_name(name)
    if path is not None:
        digest = hashlib.sha256(path.read_bytes())
        for place, other in plugin_neighbours(name).items():
            digest.update(f"{place}\0{hashlib.sha256(other.read_bytes()).hexdigest()}".encode())
        return digest.hexdigest()[:16]
    if Path(file).suffix == ".py":
        raise UserError(
            f"There is no file {file}{f', which was to hold the model {wanted}' * bool(wanted)}.", code="missing-file"
        )
    raise UserError(
        f"The plugin '{name}' is neither a Python file nor a module that can be imported. Give a path such as "
        "my_parts.py, or the name of an installed module.",
        code="missing-file",
    )


def plugin_modules(name: str) -> list[str]:
    """Return the names under which a plugin file and the files that it imports beside it were imported."""
    own = _loaded[split_plugin_name(name)[0]][1]
    if not own.startswith("cbdsl_plugin_"):
        return []  # an installed module
    return [own, *(other for other in map(_module_of, plugin_neighbours(name)) if other in sys.modules)]


def _module_of(place: str) -> str:
    """Return the name under which a file beside a plugin is imported."""
    return ".".join(Path(place).with_suffix("").parts).removesuffix(".__init__")


def _load(name: str) -> str:
    file, wanted = split_plugin_name(name)
    digest = plugin_digest(name)
    if Path(file).suffix == ".py":
        file = str(Path(file).resolve())
    module = _import(file, digest)
    if not wanted:
        return file
    _register_model(file, wanted, sys.modules[module])
    return f"{file}:{wanted}"


def _register_model(file: str, wanted: str, module: ModuleType) -> None:
    """Register a class or function of a plugin file as a model."""
    part = getattr(module, wanted, None)
    if not callable(part):
        found = [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise UserError(
            f"{file} has no class or function {wanted}. It has: {', '.join(found) or 'no class'}.", code="unknown-name"
        )
    required = [each.name for each in inspect.signature(part).parameters.values() if _is_required(each)]
    if len(required) not in {0, 2}:
        raise UserError(
            f"{wanted} in {file} needs {', '.join(required)}. Give a class that is made without arguments, or a "
            "function of a sample's shape and the number of classes.",
            code="not-supported",
        )

    def make(shape: tuple[int, ...], classes: int) -> Any:  # noqa: ANN401 - an Architecture or a module
        return part(shape, classes) if required else part()

    make.__module__, make.__qualname__ = module.__name__, f"{_FROM_A_FILE}{wanted}"
    make.__doc__ = inspect.getdoc(part) if part.__doc__ else f"From {Path(file).name}."
    if wanted in model and model.get(wanted).__qualname__.startswith(_FROM_A_FILE):
        model.drop(wanted)  # a class of that name in another file: the file that was loaded last counts
    model(wanted)(make)


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    return named and parameter.default is parameter.empty


def _import(name: str, digest: str) -> str:
    """Import a plugin unless this content is imported already, and return the name of its module."""
    if name in _loaded and _loaded[name][0] == digest:
        return _loaded[name][1]
    path = Path(name)
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
        raise UserError(f"The plugin {name} cannot be used: {error}", code=error.code) from error
    except Exception as error:
        _forget(module)
        raise UserError(
            f"The plugin {name} cannot be imported: {type(error).__name__}: {error} ({_place_of(error, path)}). "
            f"{_remedy(error)}, or leave it out.",
            code="invalid-part",
        ) from error
    _loaded[name] = digest, module
    return module


def _run_file(path: Path, module: str) -> None:
    if module in sys.modules:  # a file with the same content elsewhere
        return
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    for place, file in plugin_neighbours(str(path)).items():
        name, content = _module_of(place), (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
        if name not in sys.modules or _neighbours.get(name, content) != content:  # edited, or in another folder
            sys.modules.pop(name, None)
            _neighbours[name] = content
    sys.modules[module] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        spec.loader.exec_module(sys.modules[module])
    finally:
        sys.path.remove(str(path.parent))


def _forget(module: str) -> None:
    """Remove a plugin's parts from every register, unless a plugin with the same content uses the module."""
    if any(module == other for _, other in _loaded.values()):
        return
    for kind in ALL.values():
        kind.forget(module)
    if module.startswith("cbdsl_plugin_"):
        sys.modules.pop(module, None)


def _remedy(error: Exception) -> str:
    """Return what to do about a plugin that cannot be imported."""
    without_torch = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return "Try pip install 'cbdsl[torch]'" if without_torch else "Correct it"


def _place_of(error: Exception, path: Path) -> str:
    """Return file and line of an error, if possible in the plugin itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    where = (own or list(frames))[-1]
    return f"{where.filename}, line {where.lineno}"
