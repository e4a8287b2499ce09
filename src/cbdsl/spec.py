"""What to run: one frozen description, the same in Python, in TOML and on the command line.

An unknown key, a wrong type or an impossible value is an error here, before anything is run or written.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

from cbdsl.errors import UserError, close_to, shown, unknown
from cbdsl.files import read_text
from cbdsl.plugins import digest_of as plugin_digest
from cbdsl.spec_groups import (
    AttackSpec,
    CodecSpec,
    DataSpec,
    DefenceSpec,
    Device,
    LocalSpec,
    SelectionSpec,
    ServerSpec,
    Shared,
    SwarmSpec,
    VerificationSpec,
    at_least,
)

MINIMAL_HOLDOUT = 20  # samples: fewer say nothing about a model
MOST_WORKERS = 1_000_000


@dataclass(frozen=True)
class Spec:
    """One run, whole: two runs with equal specs give equal numbers."""

    preset: str = ""  # the preset it starts from: what a TOML file leaves out is as there, or the default
    method: str = "cb-dsl"  # how workers learn together; `cbdsl list methods` has all of them
    shared: Shared = "default"  # which part of D_G workers use; the default is the method's own
    workers: int = 50  # how many workers there are, U
    participation: float = 1.0  # workers in a round: a fraction (0.5 is half, 1 is all), or a whole number from 2
    rounds: int = 30  # communication rounds, T
    seed: int = 0  # seed of everything random
    model: str = "cnn"  # a network's name, or "custom": a module given in Python
    init: str = ""  # start from this model: a run's folder or a .safetensors file; empty: drawn at random
    engine: str = "auto"  # auto, native or torch
    device: Device = "auto"  # where torch runs: cpu, cuda or mps; auto: a GPU if torch runs the model and sees one
    plugins: tuple[str, ...] = ()  # files or modules that register parts of your own
    data: DataSpec = field(default_factory=DataSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    swarm: SwarmSpec = field(default_factory=SwarmSpec)
    verification: VerificationSpec = field(default_factory=VerificationSpec)
    defence: DefenceSpec = field(default_factory=DefenceSpec)
    selection: SelectionSpec = field(default_factory=SelectionSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    codec: CodecSpec = field(default_factory=CodecSpec)
    attack: AttackSpec = field(default_factory=AttackSpec)
    options: Options = field(default_factory=lambda: Options({}))  # settings of parts by name: options.fedprox.mu=0.1

    def __post_init__(self) -> None:
        at_least(1, "workers", self.workers, MOST_WORKERS)
        at_least(1, "rounds", self.rounds)
        at_least(0, "seed", self.seed, 2**128)
        whole = float(self.participation).is_integer() and 1 <= self.participation <= self.workers
        if not (0 < self.participation <= 1 or whole):
            raise UserError(
                f"participation must be a share above 0 and up to 1, or a whole number of workers from 2 to "
                f"{self.workers}; given {self.participation:g}."
            )
        if self.attack.byzantine > self.workers:
            raise UserError(
                f"{self.attack.byzantine} Byzantine workers of {self.workers}; there cannot be more than all."
            )
        if self.defence.declared > self.workers:
            raise UserError(f"defence.declared is {self.defence.declared}, but there are {self.workers} workers.")
        if self.defence.guard and min(self.data.holdout, self.data.shared_scoring) < MINIMAL_HOLDOUT:
            raise UserError(
                f"The guard needs {MINIMAL_HOLDOUT} samples or more on either side; data.holdout is "
                f"{self.data.holdout}, data.shared_scoring is {self.data.shared_scoring}."
            )

    @property
    def shares_training(self) -> bool:
        """Whether workers train on D_tr beside their own data."""
        return self.shared in ("train", "both")

    @property
    def shares_scoring(self) -> bool:
        """Whether workers score on D_sc and the server verifies with it."""
        return self.shared in ("score", "both")

    @property
    def participants(self) -> int:
        """How many workers take part in a round while nobody is banned."""
        return self.participants_of(self.workers)

    def participants_of(self, members: int) -> int:
        """The same where there are so many workers."""
        share = self.participation <= 1
        return max(1, round(self.participation * members)) if share else round(self.participation)

    def to_tree(self) -> dict[str, Any]:
        """The spec as nested dictionaries of plain values."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    def key(self) -> str:
        """A hash of all that decides a run's numbers: equal for equal runs, and for no others.

        Not the preset's name; and of plugins, an initial model and a file of shared samples what is in them, not where
        they are. Other data in files is known by its path, and a part that was given in Python by nothing but "custom".
        """
        plugins = [plugin_digest(name) for name in self.plugins]
        tree = {**self.to_tree(), "preset": "", "plugins": plugins, "init": init_digest(self.init)}
        if self.device == "auto":  # runs from before there were devices keep their key
            del tree["device"]
        tree["data"]["shared_source"] = content_digest(Path(self.data.shared_source))
        if not self.data.shared_source:  # and those from before there were generators
            del tree["data"]["shared_source"]
        if self.swarm.storage == "float32":  # and those from before there was another
            del tree["swarm"]["storage"]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The spec as TOML text, every value written out."""
        return tomli_w.dumps(self.to_tree())

    def with_settings(self, settings: Mapping[str, Any]) -> Spec:
        """A copy with dotted keys set, such as {"local.epochs": 3} or {"options.fedprox.mu": 0.1}."""
        tree = self.to_tree()
        if settings.get("preset", self.preset) != self.preset:
            raise UserError(
                f"preset says where a spec starts, and cannot be set; given {shown(settings['preset'])}. Start there: "
                'cbdsl.preset("NAME"), --preset NAME, or preset = "NAME" in a TOML file.'
            )
        for dotted, value in settings.items():
            branch = tree
            *path, leaf = dotted.split(".")
            for step in path:
                branch = branch.setdefault(step, {}) if path[0] == "options" else branch.get(step, {})
                if not isinstance(branch, dict):
                    raise unknown_setting(dotted)
            if leaf not in branch and path[:1] != ["options"]:
                raise unknown_setting(dotted)
            if path[:1] == ["options"] and len(path) != 2:
                raise UserError(
                    f"'{dotted}' names no part's setting. Write options.PART.SETTING, as in options.fedprox.mu."
                )
            branch[leaf] = value
        return from_mapping(tree)


_OTHER_WORDS = {
    "lr": "local.learning_rate", "eta": "local.learning_rate", "epoch": "local.epochs", "local_epochs": "local.epochs",
    "batch": "local.batch_size", "bs": "local.batch_size", "clients": "workers", "n_clients": "workers",
    "num_clients": "workers", "num_workers": "workers", "num_rounds": "rounds", "n_rounds": "rounds",
    "attackers": "attack.byzantine", "dataset": "data.source", "alpha": "data.dirichlet_alpha", "c0": "swarm.inertia",
    "c1": "swarm.cognitive", "c2": "swarm.social",
}  # fmt: skip
"""What others, and the paper, call some settings."""


def unknown_setting(dotted: str) -> UserError:
    """Say that there is no such setting, and which one may be meant."""
    keys = dotted_keys()
    meant = _OTHER_WORDS.get(dotted.rpartition(".")[2].lower()) or next(iter(close_to(dotted, keys)), "")
    if not meant:
        return unknown("setting", dotted, keys)
    return UserError(f"Unknown setting {shown(dotted)}. Did you mean '{meant}'? All of them: cbdsl list settings.")


def init_file(source: str) -> Path:
    """The file behind `init`: a model's, or that of a run's folder."""
    path = Path(source)
    return path / "model.safetensors" if path.is_dir() else path


def init_digest(source: str) -> str:
    """A hash of the model that a run starts from; the text itself where there is no such file."""
    path = init_file(source)
    return content_digest(path) if source and path.is_file() else source


def content_digest(path: Path) -> str:
    """A hash of what is in a file; its path where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else str(path)


class Options(Mapping[str, Mapping[str, "str | int | float | bool"]]):
    """Settings of parts: their names, then the names and values of their settings. Frozen, and equal by content."""

    def __init__(self, tree: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._tree = {part: dict(sorted(values.items())) for part, values in sorted((tree or {}).items()) if values}

    def __getitem__(self, part: str) -> Mapping[str, Any]:
        return MappingProxyType(self._tree[part])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __hash__(self) -> int:
        return hash(json.dumps(self._tree, sort_keys=True))

    def of(self, part: str) -> Mapping[str, Any]:
        """The settings of one part; empty if none are set."""
        return self._tree.get(part, {})


def from_mapping(tree: Mapping[str, Any]) -> Spec:
    """Build a spec from nested mappings, as TOML gives them; keys left out keep their defaults."""
    return _build(Spec, tree, "")


def from_toml(text: str, name: str = "the spec") -> Spec:
    """Build a spec from TOML text."""
    return from_mapping(_toml_tree(text, name))


def _toml_tree(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UserError(f"{name} is not valid TOML: {error}.") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The values of TOML text; ValueError if there are none, however deep or long its parts are."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(path: Path) -> Spec:
    """Read a spec from a TOML file."""
    return from_mapping(read_tree(path))


def read_tree(path: Path) -> dict[str, Any]:
    """The values in a spec's TOML file, not looked at yet."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"The spec {path} cannot be read: {error}.") from error
    return _toml_tree(text, str(path))


_Section = TypeVar("_Section")
_LARGEST = 1.7e308  # numbers that a float holds


def _build(kind: type[_Section], tree: Mapping[str, Any], prefix: str) -> _Section:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            raise unknown_setting(prefix + key)
        values[key] = _convert(hints[key], value, prefix + key)
    return kind(**values)


def _convert(hint: Any, value: Any, key: str) -> Any:  # noqa: ANN401 - any type of a spec's field
    """Convert a plain value to a field's type, or say what is wrong with it."""
    if is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return _build(hint, value, key + ".")
        raise UserError(
            f"{key} is a group of settings, not a value; given {shown(value)}. Set one of its keys, such as {key}.x=1."
        )
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value in allowed:
            return value
        raise unknown(f"value of {key}", value if isinstance(value, str) else shown(value), allowed)
    if hint is Options:
        if not isinstance(value, Mapping) or not all(isinstance(each, Mapping) for each in value.values()):
            raise UserError(
                f"{key} takes tables of settings, one a part, such as [options.fedprox]; given {shown(value)}."
            )
        return Options(
            {
                part: {name: _option(one, f"{key}.{part}.{name}") for name, one in values.items()}
                for part, values in value.items()
            }
        )
    if get_origin(hint) is tuple:
        return _convert_several(hint, value, key)
    return _convert_single(hint, value, key)


def _convert_several(hint: Any, value: Any, key: str) -> Any:  # noqa: ANN401
    if hint == tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{key} takes a list of texts; given {shown(value)}.")
        return tuple(_convert_single(str, item, key) for item in value)
    pair = value if isinstance(value, (list, tuple)) else (value, value)  # one number stands for both
    if len(pair) != 2:
        raise UserError(f"{key} takes one number or two, [first, last]; given {shown(value)}.")
    return tuple(_convert_single(float, item, key) for item in pair)


def _convert_single(hint: Any, value: Any, key: str) -> Any:  # noqa: ANN401
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number and not (isinstance(value, int) and abs(value) > _LARGEST):
        return float(value)
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if (hint is str and isinstance(value, str) and _is_text(value)) or (hint is bool and isinstance(value, bool)):
        return value
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    extra = " without control signs, in UTF-8" if hint is str and isinstance(value, str) else ""
    raise UserError(f"{key} takes {words[hint]}{extra}; given {shown(value)}.")


def _is_text(value: str) -> bool:
    """Whether text can be written to a file and shown on a terminal."""
    return not any(unicodedata.category(sign) in {"Cc", "Cs"} for sign in value)


def _option(value: Any, key: str) -> Any:  # noqa: ANN401 - a setting of a part
    """A part's setting: a plain value, or a list of them."""
    for item in value if isinstance(value, (list, tuple)) else [value]:
        huge = isinstance(item, int) and abs(item) > _LARGEST
        if huge or not isinstance(item, (bool, int, float, str)) or (isinstance(item, str) and not _is_text(item)):
            raise UserError(f"{key} takes numbers, text, true or false; given {shown(value)}.")
    return value


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a spec
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def sections() -> dict[str, type[Any]]:
    """The groups of settings, such as {"local": LocalSpec}; "" is the spec itself."""
    hints = get_type_hints(Spec)
    return {"": Spec, **{name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}}


def dotted_keys() -> list[str]:
    """Every setting by its dotted name; parts' own settings, `options.*`, are as many as there are parts."""
    groups = sections()
    return [
        f"{group}.{each.name}" if group else each.name
        for group, kind in groups.items()
        for each in fields(kind)
        if group or each.name not in groups
    ]
