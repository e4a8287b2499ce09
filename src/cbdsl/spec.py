"""The spec: a frozen description of one run, the same in Python, in TOML and on the command line.

In this order: the groups of settings and `Spec`; reading from mappings and TOML; the hash of a spec; settings by their
dotted names. An unknown key, a wrong type or an impossible value raises a UserError here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w

from cbdsl import register
from cbdsl.errors import UserError, close_to, shown, unknown
from cbdsl.util.files import read_text
from cbdsl.util.formatting import html_table
from cbdsl.util.serialize import Bounds, check_fields, field_types, from_plain, setting, to_plain

Shared = Literal["default", "none", "score", "train", "both"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Optimiser = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "decay", "cosine", "warmup"]
Task = Literal["classification", "regression", "reconstruction"]

LOSSES = ("cross-entropy", "mse", "mae", "huber")
LOSSES_OF_TASKS: Mapping[Task, tuple[str, ...]] = {  # the first one is the task's own
    "classification": ("cross-entropy",),
    "regression": ("mse", "mae", "huber"),
    "reconstruction": ("mse", "mae", "huber"),
}


# The types of settings, with their limits.
_MOST = 10**9
Text = Annotated[str, Bounds(printable=True)]
Count = Annotated[int, Bounds(0, _MOST)]
CountFromOne = Annotated[int, Bounds(1, _MOST)]
Positive = Annotated[float, Bounds(0.0, above=True)]
Share = Annotated[float, Bounds(0.0, 1.0)]
Momentum = Annotated[float, Bounds(0.0, 0.9999)]
Inertia = Annotated[float, Bounds(0.0, 10.0)]
Attraction = Annotated[float, Bounds(0.0, 100.0)]


class _Group:
    """Settings that belong together; `LocalSpec` has those that begin with `local.`"""

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__.removesuffix('Spec').lower()}.")


@dataclass(frozen=True)
class DataSpec(_Group):
    """Which data, and which worker holds which samples (Sec. VI.A)."""

    source: Text = setting(
        "mnist",
        "a data set's name (see `cbdsl list data`), a folder of IDX files, an .npz file, or a .csv or .parquet table",
    )
    partition: Text = setting(
        "iid",
        "who holds which sample: iid, shards, dirichlet, similarity, quantile, cluster, quantity, feature, by-client",
    )
    samples_per_worker: CountFromOne = setting(300, "samples that each worker holds, K_i, not for shards and by-client")
    shard_size: CountFromOne = setting(300, "samples in a shard")
    shards_per_worker: CountFromOne = setting(2, "shards that each worker holds; for quantile and cluster, pieces")
    dirichlet_alpha: Positive = setting(0.5, "for dirichlet: the smaller, the fewer classes each worker has")
    similarity: Share = setting(0.1, "gamma, the share of a worker's samples that is drawn i.i.d.")
    shared_training: Count = setting(150, "samples in the shared training set, |D_tr|")
    shared_scoring: Count = setting(2000, "samples in the shared scoring set, |D_sc|; 0 only if no worker scores on it")
    holdout: Count = setting(2000, "samples in the server's private set")
    shared_source: Text = setting(
        "", "D_tr and D_sc from this file of `cbdsl generate`; empty: training samples of the source"
    )
    task: Literal["auto", "classification", "regression", "reconstruction"] = setting(
        "auto", "what is learned: classes, real targets, or the samples themselves; auto: as the data set says"
    )
    target: Text = setting("", "the columns of a table that are targets, by name, separated by commas")
    local_test: Annotated[float, Bounds(0.0, 0.9)] = setting(
        0.0, "share of each worker's samples that it holds back; models are measured on them, worker by worker"
    )
    local_test_every: Count = setting(
        0, "number of rounds between measurements on held-back samples; 0: measure only at the end"
    )
    overlap: bool = setting(
        False,
        "workers may hold the same samples: each draws from all of them, so there may be more workers than samples",
    )


@dataclass(frozen=True)
class LocalSpec(_Group):
    """How a worker trains in one round: mini-batch SGD (Sec. VI.B), or Adam."""

    epochs: Annotated[int, Bounds(0, 100_000)] = setting(1, "passes over D_i and D_tr")
    steps: Annotated[int, Bounds(0, 100_000_000)] = setting(0, "if not 0: this many batches instead of whole epochs")
    batch_size: Annotated[int, Bounds(1, 10_000_000)] = setting(10, "samples in a mini-batch")
    learning_rate: Positive = setting(0.005, "of the optimiser, alpha")
    momentum: Momentum = setting(0.0, "of SGD; starts at zero in every round")
    weight_decay: Annotated[float, Bounds(0.0, 1e6)] = setting(0.0, "L2 penalty; for adamw the decoupled decay")
    decay: Positive = setting(1.0, "the learning rate is multiplied by this after every round")
    optimiser: Optimiser = setting("sgd", "what makes a step of a gradient; its state starts anew in every round")
    schedule: Schedule = setting(
        "constant",
        "the learning rate over the steps of one round, or over a run: constant, decay (linear to 0), cosine (to 0), "
        "or warmup (up from 0 over the first tenth)",
    )
    schedule_over: Literal["round", "run"] = setting(
        "round", "what the schedule covers: the steps of each round, or the rounds of the run"
    )
    batchnorm: Literal["shared", "own"] = setting(
        "shared", "factors and offsets of BatchNorm layers: averaged, or each worker's own (FedBN, torch engine)"
    )
    clip: Annotated[float, Bounds(0.0, 1e6)] = setting(0.0, "largest norm of a batch's gradient; 0: any")
    augment: Text = setting("", "changes features while a model trains on them (`cbdsl list augmentations`), on torch")


@dataclass(frozen=True)
class SwarmSpec(_Group):
    """The coefficients and variants of the update equation (Sec. III.C)."""

    inertia: tuple[Inertia, Inertia] = setting(
        (1.0, 0.0), "c0 in the first and in the last round; one number means constant"
    )
    cognitive: Attraction = setting(1.0, "delta_1: c1 ~ U(0, delta_1)")
    social: Attraction = setting(1.0, "delta_2: c2 ~ U(0, delta_2)")
    draw: Literal["worker", "parameter"] = setting("worker", "one c1 and c2 per worker and round, or one per parameter")
    sgd_from: Literal["current", "moved"] = setting("current", "SGD starts at w_t (as printed) or after the swarm move")
    velocity: Literal["full", "swarm"] = setting("full", "v = w_{t+1} - w_t (as printed) or the swarm terms alone")
    start: Literal["together", "apart"] = setting("together", "one initial model for all, or one per worker")
    storage: Text = setting("float32", "type of positions and velocities; only float32 is left")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.storage != "float32":
            raise UserError(
                f"swarm.storage={shown(self.storage)} was removed: positions and velocities are float32. Leave it out.",
                code="not-supported",
            )


@dataclass(frozen=True)
class VerificationSpec(_Group):
    """How the server measures a claim (Algorithm 1, line 11)."""

    tolerance: Share = setting(1e-4, "|measured - claimed| <= tolerance * max(1, claimed)")


@dataclass(frozen=True)
class DefenceSpec(_Group):
    """Defences of the server beyond Algorithm 1; the defaults are the paper's server."""

    declared: Annotated[int, Bounds(-1, _MOST)] = setting(
        -1, "how many attackers the server assumes; -1: as many as there are"
    )
    aggregator: Text = setting("mean", "how averaging methods combine models, such as 'median' or 'nnm+krum'")
    invitations: Count = setting(10, "at most this many per round, or K more than the declared attackers; 0: no limit")
    guard: bool = setting(False, "measure uploads on the private hold-out, too")
    false_alarm: Annotated[float, Bounds(1e-300, 0.5)] = setting(
        1e-4, "chance that the guard declines one honest upload as memorised"
    )
    commitment: bool = setting(False, "a claim comes with a digest of its model")


@dataclass(frozen=True)
class SelectionSpec(_Group):
    """Which workers the server invites, and how it combines the models that it verified."""

    name: Text = setting(
        "best", "'best' (the paper's), 'soup' (an average of the K best), 'rotation' (K in turn), or your own"
    )
    k: Count = setting(0, "K: how many models may be combined; 0: the rule's own default")


@dataclass(frozen=True)
class ServerSpec(_Group):
    """How the server applies an average of uploads."""

    momentum: Momentum = setting(
        0.5, "m <- momentum m + mean step, w^g <- w^g + m; for selections that take an average's step"
    )


@dataclass(frozen=True)
class CodecSpec(_Group):
    """How models are compressed; `cbdsl list codecs` has all codecs."""

    up: Text = setting("none", "from workers to the server, against the w^g that they have")
    down: Text = setting("none", "from the server to workers, against the w^g that they had")


@dataclass(frozen=True)
class AttackSpec(_Group):
    """Which workers attack, and with which attack."""

    name: Text = setting("liar", "what the attackers do; `cbdsl list attacks` has all of them")
    byzantine: Count = setting(0, "how many of the workers are attackers")
    scale: Annotated[float, Bounds(0.0, 1e9)] = setting(
        0.0, "how strong, in the attack's own measure; 0: the attack's default"
    )


@dataclass(frozen=True)
class DropoutSpec(_Group):
    """Participants that drop out of a round, for simulations."""

    after_order: Share = setting(
        0.0, "probability that a participant receives the order and does nothing in that round"
    )
    after_claim: Share = setting(0.0, "probability that a participant trains and claims, but its upload never arrives")


MINIMAL_HOLDOUT = 20  # samples: fewer say nothing about a model
MOST_WORKERS = 1_000_000


@dataclass(frozen=True)
class Spec:
    """A description of one run; runs with equal specs give equal numbers.

    >>> spec = Spec(workers=10, rounds=5).with_settings({"local.epochs": 3})
    >>> spec.local.epochs, spec.method
    (3, 'cb-dsl')
    >>> Spec(rounds=0)
    Traceback (most recent call last):
    ...
    cbdsl.errors.UserError: rounds must be at least 1; given 0.
    """

    preset: Text = setting("", "the preset it starts from: what a TOML file leaves out is as there, or the default")
    method: Text = setting("cb-dsl", "how workers learn together; `cbdsl list methods` has all of them")
    shared: Shared = setting("default", "which part of D_G workers use; the default is the method's own")
    workers: Annotated[int, Bounds(1, MOST_WORKERS)] = setting(50, "how many workers there are, U")
    participation: float = setting(
        1.0, "workers in a round: a fraction (0.5 is half, 1 is all), or a whole number from 2"
    )
    rounds: CountFromOne = setting(30, "communication rounds, T")
    seed: Annotated[int, Bounds(0, 2**128)] = setting(0, "seed of everything random")
    model: Text = setting("cnn", "a network's name, or 'custom': a module given in Python")
    init: Text = setting(
        "",
        "start from this model: a run's folder, a .safetensors file, 'server' (its own model); empty: random",
    )
    engine: Text = setting("auto", "what computes: auto, native or torch")
    device: Device = setting(
        "auto", "where torch runs: cpu, cuda or mps; auto: a GPU if torch runs the model and sees one"
    )
    plugins: tuple[Text, ...] = setting((), "files or modules that register parts of your own")
    data: DataSpec = field(default_factory=DataSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    swarm: SwarmSpec = field(default_factory=SwarmSpec)
    verification: VerificationSpec = field(default_factory=VerificationSpec)
    defence: DefenceSpec = field(default_factory=DefenceSpec)
    selection: SelectionSpec = field(default_factory=SelectionSpec)
    server: ServerSpec = field(default_factory=ServerSpec)
    codec: CodecSpec = field(default_factory=CodecSpec)
    attack: AttackSpec = field(default_factory=AttackSpec)
    options: Options = field(
        default_factory=lambda: Options({}),
        metadata={"description": "settings of parts by name: options.fedprox.mu=0.1"},
    )
    loss: Text = setting("", "cross-entropy, mse, mae or huber; empty: cross-entropy for classes, otherwise mse")
    dropout: DropoutSpec = field(default_factory=DropoutSpec)

    def __post_init__(self) -> None:
        check_fields(self)
        whole = float(self.participation).is_integer() and 1 <= self.participation <= self.workers
        if not (0 < self.participation <= 1 or whole):
            raise UserError(
                f"participation must be a share above 0 and up to 1, or a whole number of workers from 2 to "
                f"{self.workers}; given {self.participation:g}.",
                code="out-of-range",
            )
        if self.attack.byzantine > self.workers:
            raise UserError(
                f"{self.attack.byzantine} Byzantine workers of {self.workers}; there cannot be more than all.",
                code="out-of-range",
            )
        if self.defence.declared > self.workers:
            raise UserError(
                f"defence.declared is {self.defence.declared}, but there are {self.workers} workers.",
                code="out-of-range",
            )
        if self.defence.guard and min(self.data.holdout, self.data.shared_scoring) < MINIMAL_HOLDOUT:
            raise UserError(
                f"The guard needs {MINIMAL_HOLDOUT} samples or more on either side; data.holdout is "
                f"{self.data.holdout}, data.shared_scoring is {self.data.shared_scoring}.",
                code="out-of-range",
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
        """The number of workers that take part in a round while no worker is banned."""
        return self.participants_of(self.workers)

    def participants_of(self, members: int) -> int:
        """Return how many of `members` workers take part in a round."""
        share = self.participation <= 1
        return max(1, round(self.participation * members)) if share else round(self.participation)

    def to_tree(self) -> dict[str, Any]:
        """Return the spec as nested dictionaries of plain values."""
        tree: dict[str, Any] = to_plain(self, finite=False)
        return tree

    def __repr__(self) -> str:
        """Return the settings that are not the defaults: `Spec(rounds=5, local.epochs=3)`."""
        return f"Spec({', '.join(f'{key}={value!r}' for key, value in differences(self, Spec()).items())})"

    def _repr_html_(self) -> str:
        changed = differences(self, Spec())
        return html_table((key, as_text(value)) for key, value in changed.items()) if changed else "<p>Spec()</p>"

    def key(self) -> str:
        """Return a hash of everything that determines a run's numbers.

        Settings that the method decides are filled in first, so that this is the key of the run. The preset's name does
        not count.
        Plugins, an initial model and a file of shared samples count by their content; other data in files counts by its
        path, and a part that was given in Python as "custom".
        """
        plugins = [register.plugin_digest(name) for name in self.plugins]
        whole = write_out(self)
        tree = {**whole.to_tree(), "preset": "", "plugins": plugins, "init": init_digest(self.init)}
        tree["data"]["shared_source"] = self.data.shared_source and content_digest(Path(self.data.shared_source))
        _drop_defaults(tree, _ADDED_LATER)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """Return the spec as TOML text, with every value but those of `_LEFT_OUT`."""
        tree = self.to_tree()
        _drop_defaults(tree, _LEFT_OUT)
        return tomli_w.dumps(tree)

    def with_settings(self, settings: Mapping[str, Any]) -> Spec:
        """Return a copy with dotted keys set, such as {"local.epochs": 3} or {"options.fedprox.mu": 0.1}.

        An option's name stands for its setting, as in {"attack": "alie"}; see `full_key`.
        Another method, or another number of attackers, resets what was written out for the old one; see `_resets`.
        """
        tree = self.to_tree()
        settings = {key if isinstance(value, Mapping) else full_key(key): value for key, value in settings.items()}
        if settings.get("preset", self.preset) != self.preset:
            raise UserError(
                f"preset says where a spec starts, and cannot be set; given {shown(settings['preset'])}. Start there: "
                'cbdsl.preset("NAME"), --preset NAME, or preset = "NAME" in a TOML file.',
                code="not-allowed",
            )
        for dotted, value in {**_resets(self, settings), **settings}.items():
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
                    f"'{dotted}' names no part's setting. Write options.PART.SETTING, as in options.fedprox.mu.",
                    code="unknown-setting",
                )
            branch[leaf] = value
        return from_mapping(tree)


def write_out(spec: Spec, method: Any = None) -> Spec:  # noqa: ANN401 - an `algorithm.methods.Method`
    """Return the spec with all settings filled in that its method and its number of attackers decide.

    method: given in Python instead of by name. The settings of an unknown method stay as they are.
    """
    if method is None and spec.method not in register.method and spec.method != register.CUSTOM:
        register.load(spec.plugins)
    known = method or (register.method.get(spec.method) if spec.method in register.method else None)
    declared = spec.attack.byzantine if spec.defence.declared < 0 else spec.defence.declared
    shared = spec.shared if spec.shared != "default" or known is None else known.shared
    selects = getattr(known, "selects", "") if spec.selection.name == "best" else ""
    return replace(
        spec,
        shared=shared,
        swarm=replace(spec.swarm, **getattr(known, "fixes", {})),
        defence=replace(spec.defence, declared=declared),
        selection=replace(spec.selection, name=selects or spec.selection.name),
    )


class Options(Mapping[str, Mapping[str, "str | int | float | bool"]]):
    """Settings of parts by the part's name and the setting's name; frozen, and equal by content."""

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
        """Return the settings of one part; empty if none are set."""
        return self._tree.get(part, {})

    @staticmethod
    def from_plain(value: object, place: str) -> Options:
        """Read a table of settings per part: numbers, text, true or false, or lists of them."""
        if isinstance(value, Options):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(each, Mapping) for each in value.values()):
            raise UserError(
                f"{place} takes a table of settings per part, such as [options.fedprox]; given {shown(value)}.",
                code="wrong-type",
            )
        for part, values in value.items():
            for name, one in values.items():
                for item in one if isinstance(one, (list, tuple)) else [one]:
                    _check_option(item, f"{place}.{part}.{name}")
        return Options(value)


def _check_option(value: object, place: str) -> None:
    if not isinstance(value, bool):
        from_plain(Text if isinstance(value, str) else float, value, place)  # also no number that a float cannot hold


def _resets(start: Spec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that return to their defaults when others change, unless they are given, too.

    A resolved spec has written out what its method decides and how many attackers there are. Another method brings its
    own shared data and update equation; one in which nobody is invited has no selection, guard or codec of a selection.
    """
    found: dict[str, Any] = {}
    if "attack.byzantine" in settings:
        found["defence.declared"] = -1
    if "method" not in settings:
        return found
    found["shared"] = "default"
    old, new = (
        register.method.get(name) if name in register.method.names() else None
        for name in (start.method, settings["method"])
    )
    found |= {f"swarm.{key}": getattr(SwarmSpec(), key) for key in getattr(old, "fixes", ())}
    if (chosen := getattr(old, "selects", "")) and start.selection.name == chosen:
        found["selection.name"] = "best"
    if getattr(new, "conversation", "swarm") != "swarm" and start.selection.name != "best":
        found |= {f"selection.{each.name}": each.default for each in fields(SelectionSpec)}
        found |= {f"codec.{each.name}": each.default for each in fields(CodecSpec)}
        found |= {"defence.guard": False, "defence.commitment": False}
    return found


def from_mapping(tree: Mapping[str, Any]) -> Spec:
    """Build a spec from nested mappings, as TOML gives them; keys left out keep their defaults."""
    swarm = tree.get("swarm")
    if isinstance(swarm, Mapping) and isinstance(swarm.get("inertia"), (int, float)):  # one number stands for both
        tree = {**tree, "swarm": {**swarm, "inertia": [swarm["inertia"]] * 2}}
    return from_plain(Spec, tree, defaults=True, unknown_key=unknown_setting)


def from_toml(text: str, name: str = "the spec") -> Spec:
    """Build a spec from TOML text."""
    return from_mapping(_toml_tree(text, name))


def _toml_tree(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UserError(f"{name} is not valid TOML: {error}.", code="unreadable-file") from error


_DEEPEST_KEY = 100


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text; ValueError if it is not TOML, or nested too deeply."""
    if any(
        line.partition("=")[0].count(".") > _DEEPEST_KEY for line in text.splitlines() if "=" in line or "[" in line
    ):
        raise ValueError(f"a key has more than {_DEEPEST_KEY} dots")  # the parser's time grows with their square
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(path: Path) -> Spec:
    """Read a spec from a TOML file."""
    return from_mapping(read_tree(path))


def read_tree(path: Path) -> dict[str, Any]:
    """Read the values of a spec's TOML file without checking them."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"The spec {path} cannot be read: {error}.", code="unreadable-file") from error
    return _toml_tree(text, str(path))


_LEFT_OUT = (
    ("local", "batchnorm", "shared"),
    ("local", "optimiser", "sgd"), ("local", "schedule", "constant"), ("local", "clip", 0.0), ("local", "augment", ""),
    ("local", "schedule_over", "round"), ("", "loss", ""), ("data", "target", ""), ("data", "task", "auto"),
    ("dropout", "after_order", 0.0), ("dropout", "after_claim", 0.0),
    ("data", "local_test", 0.0), ("data", "local_test_every", 0), ("data", "overlap", False),
)  # fmt: skip
"""Settings that texts leave out at their defaults, so that earlier versions read a spec that does without them."""

_ADDED_LATER = (("", "device", "auto"), ("data", "shared_source", ""), ("swarm", "storage", "float32"), *_LEFT_OUT)
"""Settings that did not exist in the first version: at their defaults they are no part of the key."""


def _drop_defaults(tree: dict[str, Any], entries: Iterable[tuple[str, str, Any]]) -> None:
    for group, name, default in entries:
        settings = tree[group] if group else tree
        if settings[name] == default:
            del settings[name]
        if not settings:  # a group that came later
            del tree[group]


INIT_SERVER = "server"  # the value of `init` for the server's own model; see `Experiment.prepare`


def init_file(source: str) -> Path:
    """Return the file behind `init`: a model's, or that of a run's folder."""
    path = Path(source)
    return path / "model.safetensors" if path.is_dir() else path


def init_digest(source: str) -> str:
    """Return a hash of the model that a run starts from; the text itself where there is no such file."""
    path = init_file(source)
    return content_digest(path) if source and path.is_file() else source


def content_digest(path: Path) -> str:
    """Return a hash of a file's content; its path where there is no such file."""
    if not path.is_file():
        return str(path)
    status = path.stat()
    return _digest_of_version(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=256)
def _digest_of_version(path: Path, *_: int) -> str:
    """Return a hash of a file's content; computed once per version of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


_OTHER_WORDS = {
    "lr": "local.learning_rate", "eta": "local.learning_rate", "epoch": "local.epochs", "local_epochs": "local.epochs",
    "batch": "local.batch_size", "bs": "local.batch_size", "clients": "workers", "n_clients": "workers",
    "num_clients": "workers", "num_workers": "workers", "num_rounds": "rounds", "n_rounds": "rounds",
    "attackers": "attack.byzantine", "dataset": "data.source", "alpha": "data.dirichlet_alpha", "c0": "swarm.inertia",
    "c1": "swarm.cognitive", "c2": "swarm.social",
}  # fmt: skip
"""Other names of some settings, in the paper and in other packages."""


def unknown_setting(dotted: str) -> UserError:
    """Build the error for an unknown setting, with the one that may be meant."""
    keys = dotted_keys()
    meant = _OTHER_WORDS.get(dotted.rpartition(".")[2].lower()) or next(iter(close_to(dotted, keys)), "")
    if not meant:
        return UserError(str(unknown("setting", dotted, keys)), code="unknown-setting")
    return UserError(
        f"Unknown setting {shown(dotted)}. Did you mean '{meant}'? All of them: cbdsl list settings.",
        code="unknown-setting",
    )


def sections() -> dict[str, type[Any]]:
    """Return the groups of settings, such as {"local": LocalSpec}; "" is the spec itself."""
    hints = get_type_hints(Spec)
    return {"": Spec, **{name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}}


def dotted_keys() -> list[str]:
    """Return every setting by its dotted name, without the settings of parts (`options.*`)."""
    groups = sections()
    return [
        f"{group}.{each.name}" if group else each.name
        for group, kind in groups.items()
        for each in fields(kind)
        if group or each.name not in groups
    ]


_SHORT_KEYS: Mapping[str, str] = {  # names of options that stand for one setting
    "aggregator": "defence.aggregator",
    "attack": "attack.name",
    "byzantine": "attack.byzantine",
    "data": "data.source",
    "select": "selection.name",
}


def full_key(key: str) -> str:
    """Return the dotted key that an option's name stands for; other keys unchanged."""
    return _SHORT_KEYS.get(key, key)


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `key=value` of the command line; the value is TOML, or else a plain word. The key may be a short one."""
    name, separator, value = text.partition("=")
    key = full_key(name.strip())
    if not separator or not key:
        raise UserError(
            f"{shown(text)} is not a setting. Write --set key=value, such as --set local.epochs=3.",
            code="unknown-setting",
        )
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    except ValueError as error:
        raise UserError(
            f"The value of {shown(key)} cannot be read ({error}); given {shown(value)}.", code="wrong-type"
        ) from error


def words(text: str) -> tuple[str, ...]:
    """Split at commas: `a, b` -> ("a", "b")."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Parse whole numbers: `1, 5` -> (1, 5)."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise UserError(
            f"{name} takes whole numbers separated by commas, such as 1,5,20; given {shown(text)}.", code="wrong-type"
        ) from None


def setting_values(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of dotted keys, such as {"local.epochs": 3}; all of them can be hashed."""
    return {key: _value(spec, key) for key in keys}


def _value(spec: Spec, key: str) -> Any:  # noqa: ANN401 - any value of a spec
    group, _, rest = key.partition(".")
    if group == "options" and rest:
        part, _, name = rest.partition(".")
        return spec.options.of(part).get(name)  # None: the part's own default
    value: Any = getattr(spec, group)
    return getattr(value, rest) if rest else value


def option_keys(specs: Iterable[Spec]) -> list[str]:
    """Return the dotted names of the parts' settings that any of these specs sets."""
    found = {f"options.{part}.{name}": None for spec in specs for part in spec.options for name in spec.options[part]}
    return list(found)


@dataclass(frozen=True)
class SettingLine:
    """One setting of the reference."""

    key: str
    default: Any
    meaning: str
    allowed: str  # its choices or limits; empty: any value of the default's type


@dataclass(frozen=True)
class SettingGroup:
    """Settings that belong together."""

    title: str
    lines: tuple[SettingLine, ...]


def reference() -> list[SettingGroup]:
    """Return every setting with its default, its meaning and its limits, in groups."""
    groups, found = sections(), []
    for group, kind in groups.items():
        own = [each for each in field_types(kind) if group or each.name not in groups]
        keys = [f"{group}.{each.name}" if group else each.name for each in own]
        defaults = setting_values(Spec(), keys)
        lines = (
            SettingLine(key, defaults[key], each.description, each.allowed())
            for key, each in zip(keys, own, strict=True)
        )
        found.append(SettingGroup(f"{group}: {inspect.getdoc(kind)}" if group else "The run", tuple(lines)))
    return found


def describe_setting(key: str) -> str:
    """Return the description of a setting as a sentence, for `--help`."""
    group, _, name = key.rpartition(".")
    text = next(each.description for each in field_types(sections()[group]) if each.name == name)
    return f"{text[0].upper()}{text[1:]}."


def as_text(value: Any) -> str:  # noqa: ANN401 - any value of a spec
    """Format a value as `--set` reads it and TOML writes it."""
    return json.dumps(value, default=dict)


def differences(spec: Spec, start: Spec) -> dict[str, Any]:
    """Return the settings in which a spec differs from another, by dotted name."""
    keys = [*(key for key in dotted_keys() if key != "options"), *option_keys([spec])]
    own, other = setting_values(spec, keys), setting_values(start, keys)
    return {key: value for key, value in own.items() if value != other[key]}
