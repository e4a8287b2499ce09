"""Parts by name: attacks, aggregators, selections, methods, partitions, models, data and codecs, ours or a guest's.

    @cbdsl.register.attack("my-attack")
    class MyAttack(cbdsl.Attack): ...

A part is a class whose arguments are its settings, or a function whose keyword-only arguments are. The first
paragraph of its documentation is what `cbdsl list` shows. Nothing here knows what a part does; the contracts
stand with their rooms.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
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


attack = Register("attack", tuple(f"cbdsl.byzantine.{name}" for name in ("on_weights", "on_protocol", "adaptive")))
aggregator = Register("aggregator", ("cbdsl.protocol.aggregators",))
selection = Register("selection", ("cbdsl.protocol.selection", "cbdsl.protocol.rotation"))
method = Register("method", tuple(f"cbdsl.methods.{name}" for name in (
    "cb_dsl", "restart", "fedavg", "fedpso", "pso", "fedprox", "scaffold", "fedavgm", "fedadam",
)))  # fmt: skip
partition = Register("partition", ("cbdsl.data.partition",))
model = Register("model", ("cbdsl.models.zoo",))
dataset = Register("data set", ("cbdsl.data.sources", "cbdsl.data.fetched"))

codec = Register("codec", ("cbdsl.codecs.uniform", "cbdsl.codecs.sparse", "cbdsl.codecs.adaptive"))

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
