"""`Dataset` and its readers: the embedded MNIST, folders of IDX files, .npz files; and the scaling of features."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl import register
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.data.table import TABLES, read_table
from cbdsl.data.targets import check_anomalies, check_targets, make_targets, name_classes
from cbdsl.errors import UserError, shown, unknown
from cbdsl.register import CUSTOM
from cbdsl.spec import DataSpec, Options, Task, words
from cbdsl.util.formatting import html_table
from cbdsl.util.memory import require_memory
from cbdsl.util.npz import load_arrays

SCALES = ("feature_mean", "feature_deviation")
SHADES = np.arange(256) / 255.0  # (256,)
_AT_ONCE = 2**18  # numbers that fit the processor's cache
_LARGEST = 1e30


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation per channel. shades: the features were bytes, of which 255 counts as 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    shades: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "deviation"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values or not all(map(_is_number, values)):
                raise UserError(
                    f"the {name} of features is {shown(values)}; give a finite number per channel.", code="wrong-type"
                )
        if len(self.mean) != len(self.deviation) or min(self.deviation) < 1 / _LARGEST:
            raise UserError(
                f"features have {len(self.mean)} means and {len(self.deviation)} deviations from {min(self.deviation)};"
                " give as many of both, the deviations above 0.",
                code="out-of-range",
            )
        if not isinstance(self.shades, bool):
            raise UserError(f"shades is {shown(self.shades)}; give true or false.", code="wrong-type")

    @staticmethod
    def measured(values: NDArray[Any]) -> Scaling:
        """Return the scaling to mean 0 and deviation 1 of each channel of (N, C, ...); one that is constant stays."""
        axes = (0, *range(2, values.ndim))
        mean, deviation = (
            np.asarray(found, np.float64)
            for found in (np.mean(values, axes, np.float64), np.std(values, axes, np.float64))
        )
        varies = deviation > 1e-9 * np.maximum(1e-9, np.abs(mean))
        return Scaling(tuple(mean.tolist()), tuple(np.where(varies, deviation, 1.0).tolist()))

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]]) -> Scaling | None:
        """Return the scaling in a data set's arrays, or None."""
        if SCALES[0] not in arrays:
            return None
        mean, deviation = (tuple(map(float, arrays[name])) for name in SCALES)
        return Scaling(mean, deviation, arrays["train_features"].dtype == np.uint8)

    def apply(self, features: NDArray[Any]) -> Floats:
        """Scale features (N, C, ...) of a file for a network."""
        return scale_features(features, np.array(self.mean), np.array(self.deviation))

    def invert(self, features: Floats) -> Floats:
        """Undo the scaling of features (N, C, ...); shades become numbers from 0 to 1."""
        shape = (1, -1, *([1] * (features.ndim - 2)))
        mean, deviation = (np.array(values, np.float32).reshape(shape) for values in (self.mean, self.deviation))
        return np.asarray(features * deviation + mean, np.float32)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # NaN is not


def scale_features(
    features: NDArray[Any], mean: NDArray[Any] | None = None, deviation: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Subtract each channel's mean from features (N, C, ...) and divide by its deviation, as float32.

    mean, deviation: (C,); without both the features are returned unchanged. Bytes are shades: 255 counts as 1.
    """
    if mean is None and deviation is None:
        return features
    channels = features.shape[1:2]
    for name, values in zip(SCALES, (mean, deviation), strict=True):
        if values is None or values.shape != channels or not np.isfinite(values).all():
            found = "nothing" if values is None else f"{values.dtype} {values.shape}"
            raise UserError(
                f"{name} must have a finite number per channel, {channels}; given {found}.", code="wrong-shape"
            )
    assert mean is not None
    assert deviation is not None
    if not (deviation > 0).all():
        raise UserError(f"feature_deviation must be above 0; given {deviation.tolist()}.", code="out-of-range")
    result = np.empty(features.shape, np.float32)
    at_once = max(1, _AT_ONCE // max(1, features[:1].size))
    for channel, (middle, spread) in enumerate(zip(mean, deviation, strict=True)):
        shades = np.asarray((SHADES - middle) / max(spread, 1e-6), np.float32)
        for start in range(0, len(features), at_once):
            part = slice(start, start + at_once), channel
            with np.errstate(over="ignore"):  # too large for a float32 becomes infinite, and is refused later
                values = np.asarray(features[part])
                if values.dtype == np.uint8:
                    result[part] = np.take(shades, values, mode="clip")  # clip: no check, as no byte is out of range
                else:
                    result[part] = (values - np.float64(middle)) / spread
    return result


Bytes = NDArray[np.uint8]

EMBEDDED = "mnist"
MOST_CLASSES = 1_000_000

Scale: TypeAlias = tuple[float, float]
"""Mean and deviation of the pixels of a training set, where white is 1."""

_EMBEDDED_SCALE: Scale = (0.1306604762738429, 0.3081078038564627)  # as `measure_scale` returns it
_LARGEST_GAIN = 1032  # largest ratio of gzip
_PIECE = 2**15  # bytes of a packed file that are unpacked at once


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training samples, test samples, and what is learned: classes, real targets, or the samples themselves.

    >>> import numpy as np
    >>> features, labels = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    >>> data = Dataset.from_arrays(features, labels, features[:2], labels[:2])
    >>> len(data.train), data.shape, data.classes
    (4, (4,), 2)
    >>> data = Dataset.from_arrays(features, [0.5, 1.5, 2.5, 4.0], features[:2], [0.0, 1.0], task="regression")
    >>> data.task, data.classes, data.outputs
    ('regression', 0, 1)
    """

    train: Samples
    test: Samples
    classes: int  # 0 if the task is not classification
    name: str = CUSTOM
    clients: Indices | None = None  # (N,), the client of each training sample, -1: of none; None: not known
    scaling: Scaling | None = None  # None: the features are as they were given
    class_names: tuple[str, ...] = ()  # empty: classes are called by their numbers
    task: Task = "classification"
    target_scaling: Scaling | None = None  # of a regression's targets, a channel each
    target_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return name, sizes and task in one line."""
        return f"Dataset({', '.join(f'{name}: {text}' for name, text in self._rows())})"

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        learned = f"{self.classes} classes" if self.task == "classification" else self.task
        rows = [
            ("name", self.name), ("training samples", f"{len(self.train):,}"), ("test samples", f"{len(self.test):,}"),
            ("shape", " x ".join(map(str, self.shape))), ("task", learned),
        ]  # fmt: skip
        clients = 0 if self.clients is None else len(np.unique(self.clients[self.clients >= 0]))
        return [*rows, *([("clients", f"{clients:,}")] if clients else [])]

    @property
    def outputs(self) -> int:
        """How many numbers a model has to make of a sample: one per class, target or feature."""
        if self.task == "classification":
            return self.classes
        return math.prod(self.shape) if self.task == "reconstruction" else int(self.train.labels.shape[1])

    def in_unit(self, outputs: Floats) -> Floats:
        """Return predictions or targets (N, T) in the unit in which the targets were given; others as they are."""
        return outputs if self.target_scaling is None else self.target_scaling.invert(outputs)

    def scale(self, features: ArrayLike, labels: ArrayLike | None, part: str = "worker's") -> Samples:
        """Return more samples of a regression or a reconstruction, scaled like these. part: their name in errors."""
        values = _finite_features(features, part)
        if values.shape[1:] == self.shape and self.scaling is not None:
            values = self.scaling.apply(values)
        if self.task == "reconstruction":
            return Samples(values, np.zeros(len(values), np.int32))
        targets = make_targets(labels, len(values), part)
        if targets.shape[1] != self.outputs:
            raise UserError(
                f"The {part} samples have {targets.shape[1]} targets each; the data's have {self.outputs}.",
                code="wrong-shape",
            )
        assert self.target_scaling is not None
        return Samples(values, self.target_scaling.apply(targets))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.train.features.shape[1:]

    @staticmethod
    def from_arrays(  # noqa: PLR0913 - all but the first four by name
        train_features: ArrayLike,
        train_labels: ArrayLike | None,
        test_features: ArrayLike,
        test_labels: ArrayLike | None,
        name: str = CUSTOM,
        clients: ArrayLike | None = None,
        *,
        task: Task = "classification",
        scale: bool | None = None,
        target_names: Sequence[str] = (),
    ) -> Dataset:
        """Build a data set from features (N, ...) and, by task, labels, targets or nothing.

        classification: integer labels from 0, or text, whose values become the classes. regression: targets (N,) or
        (N, T), which are scaled to mean 0 and deviation 1; results are in their unit. reconstruction: None, and None or
        1 for each test sample that is not normal, 0 for the others.
        clients: the number of each training sample's client, (N,), for the partition "by-client"; -1: of none.
        scale: scale each channel of the features to mean 0 and deviation 1 over the training samples; if None, unless
        the task is classification.
        """
        if task not in get_args(Task):
            raise unknown("task", task, get_args(Task))
        scaling: Scaling | None = None
        if task != "classification" if scale is None else scale:
            raw = _finite_features(train_features, "training")
            scaling = Scaling.measured(raw) if raw.ndim > 1 and raw.size else None
            if scaling is not None:
                train_features, test_features = (
                    scaling.apply(one) if one.shape[1:] == raw.shape[1:] else one
                    for one in (raw, _finite_features(test_features, "test"))
                )
        if task == "classification":
            names, train_labels, test_labels = name_classes(train_labels, test_labels)
            train = make_samples(train_features, train_labels, "training")
            data = _dataset(train, make_samples(test_features, test_labels, "test"), name)
            data = replace(data, class_names=names)
        else:
            data = _without_classes(train_features, train_labels, test_features, test_labels, name, task, target_names)
        owners = None if clients is None else _clients(clients, len(data.train))
        return replace(data, clients=owners, scaling=scaling)

    def with_clients(self, own: Sequence[Dataset | Samples | tuple[ArrayLike, ArrayLike]]) -> Dataset:
        """Return the data with one set of samples per client added; the samples from before belong to no client.

        own: per client a data set (its training part), samples, or a pair of features and labels.
        """
        if not own:
            raise UserError("clients is empty; give one set of samples per worker.", code="wrong-shape")
        parts = [_client_samples(number, one, self) for number, one in enumerate(own)]
        for number, part in enumerate(parts):
            if part.features.shape[1:] != self.shape:
                raise UserError(
                    f"Client {number} has samples of shape {part.features.shape[1:]}; the data's have {self.shape}.",
                    code="wrong-shape",
                )
            if self.task == "classification" and int(part.labels.max()) >= self.classes:
                raise UserError(
                    f"Client {number} has the label {part.labels.max()}; there are {self.classes} classes.",
                    code="out-of-range",
                )
        numbers = np.repeat(np.arange(-1, len(parts)), [len(self.train), *map(len, parts)]).astype(np.int32)
        return replace(self, train=Samples.joined([self.train, *parts]), clients=numbers, name=CUSTOM)

    def as_task(self, task: str) -> Dataset:
        """Return the data for another task: labels become targets, or are left out; "auto" is the data's own task."""
        if task in {"auto", self.task}:
            return self
        if task == "classification":
            raise UserError(
                f"data.task is classification, but {self.name} has no classes: its task is {self.task}. Leave data.task"
                " out, or give data with labels.",
                code="conflict",
            )
        if task == "regression" and self.task == "reconstruction":
            raise UserError(
                f"data.task is regression, but {self.name} has no targets. Leave data.task out, or give targets.",
                code="conflict",
            )
        labels = (self.train.labels, self.test.labels) if task == "regression" else (None, None)
        made = _without_classes(
            self.train.features, labels[0], self.test.features, labels[1], self.name,
            "regression" if task == "regression" else "reconstruction", (),
        )  # fmt: skip
        return replace(made, clients=self.clients, scaling=self.scaling)


def _without_classes(
    train_features: ArrayLike,
    train_labels: ArrayLike | None,
    test_features: ArrayLike,
    test_labels: ArrayLike | None,
    name: str,
    task: Task,
    target_names: Sequence[str],
) -> Dataset:
    """Build the data set of a regression or a reconstruction from scaled features."""
    features = [_finite_features(one, part) for one, part in ((train_features, "training"), (test_features, "test"))]
    _check_features(*features)
    if task == "reconstruction":
        if train_labels is not None:
            raise UserError(
                "A reconstruction has no targets: they are the samples themselves. Give None for those of the training "
                "set.",
                code="wrong-shape",
            )
        anomalies = check_anomalies(test_labels, len(features[1]))
        none = np.zeros(len(features[0]), np.int32)
        return Dataset(Samples(features[0], none), Samples(features[1], anomalies), 0, name, task=task)
    train, test = check_targets(train_labels, len(features[0]), test_labels, len(features[1]), tuple(target_names))
    scaling = Scaling.measured(train)
    return Dataset(
        Samples(features[0], scaling.apply(train)), Samples(features[1], scaling.apply(test)), 0, name, task=task,
        target_scaling=scaling, target_names=tuple(target_names),
    )  # fmt: skip


def _check_features(train: Floats, test: Floats) -> None:
    for part, values in (("training", train), ("test", test)):
        if values.ndim < 2 or not values.size:
            raise UserError(
                f"The {part} set needs features (N, ...) with N > 0; given {values.shape}.", code="wrong-shape"
            )
    _check_shapes(train, test)


def load_data(spec: DataSpec, options: Options) -> Dataset:
    """Load the data that a spec names."""
    return load(spec.source, options.of(spec.source), spec.task, words(spec.target))


def load(
    source: str, options: Mapping[str, Any] | None = None, task: str = "auto", targets: Sequence[str] = ()
) -> Dataset:
    """Load a registered data set (`mnist` is embedded), the IDX files of a folder, an .npz file or a table, for a task.

    targets: the columns of a .csv or .parquet file that are targets.
    """
    if Path(source).suffix in TABLES and source not in register.dataset:
        return read_tabular(Path(source), task, targets)
    if targets:
        raise UserError(
            f"data.target is {', '.join(targets)}, but '{source}' is not a table ({' or '.join(TABLES)}). "
            "Leave it out.",
            code="no-effect",
        )
    if Path(source).suffix == ".npz" and source not in register.dataset and Path(source).is_file():
        return read_npz(Path(source), task)
    return _load(source, options).as_task(task)


def _load(source: str, options: Mapping[str, Any] | None) -> Dataset:
    if source in register.dataset:
        data = register.dataset.make(source, options or {})()
        if not isinstance(data, Dataset):
            raise UserError(
                f"The data set '{source}' is a {type(data).__name__}; its function must return a Dataset.",
                code="invalid-part",
            )
        return replace(data, name=source)
    if source == CUSTOM:
        raise UserError(
            "The data of this run was given as arrays in Python; give it again with data=Dataset(...), and with "
            "clients=[...] if there were any.",
            code="missing-value",
        )
    path = Path(source)
    if path.suffix == ".npz" and not path.exists():
        raise UserError(f"The data file {source} is missing (from {Path.cwd()}). Give its path.", code="missing-file")
    if not path.is_dir():
        raise UserError(
            f"Data '{source}' is neither a data set by name ({', '.join(register.dataset.names())}) nor a folder nor "
            "an .npz file nor a table. Give a folder that holds the four IDX files of MNIST, Fashion-MNIST, KMNIST or "
            f"EMNIST, or an .npz file with the arrays {', '.join(_ARRAYS)}. {register.OWN}",
            code="unknown-name",
        )
    return read_idx_folder(path, source)


_ARRAYS = ("train_features", "train_labels", "test_features", "test_labels")


def read_tabular(path: Path, task: str, targets: Sequence[str]) -> Dataset:
    """Read a data set from a table; every fifth line is in the test set.

    A regression predicts the target columns, a classification a single one; a reconstruction uses all columns.
    """
    known: Task = "classification" if task == "classification" else "regression" if targets else "reconstruction"
    if (task == "auto" and not targets) or task not in {"auto", known} or (known == "classification") > len(targets):
        raise UserError(
            f"{path} is a table, and the task is {task} with {'the' if targets else 'no'} targets"
            f"{' ' * bool(targets)}{', '.join(targets)}. Name the columns to predict (data.target=NAME), or set "
            "data.task=reconstruction without a target.",
            code="conflict",
        )
    table = read_table(path)
    features, values = table.divide(targets)
    labels: NDArray[Any] | None = None if known == "reconstruction" else values
    if known == "classification":
        if len(targets) > 1:
            raise UserError(f"Classes are in one column; given data.target={','.join(targets)}.", code="conflict")
        labels = table.labels(targets[0])
    else:
        table.require_numbers(targets)
    test = np.arange(len(features)) % 5 == 4
    known_labels, unseen = (None, None) if labels is None else (labels[~test], labels[test])
    try:
        data = Dataset.from_arrays(
            features[~test], known_labels, features[test], unseen, str(path), task=known, scale=True,
            target_names=targets,
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code) from error
    return replace(data, target_names=tuple(targets))


def read_npz(path: Path, task: str = "auto") -> Dataset:
    """Read an .npz file with features (N, ...) and labels or targets; scale features if the file says how."""
    return build_dataset(path, read_dataset_arrays(path, task), task)


def read_dataset_arrays(path: Path, task: str = "auto") -> dict[str, NDArray[Any]]:
    """Read the arrays of a data set's .npz file as they are stored. A reconstruction needs no labels."""
    needed: tuple[str, ...] = _ARRAYS
    kind = "numbers (N,), or (N, T)" if task == "regression" else "whole numbers (N,)"
    if task == "reconstruction":
        needed, kind = (_ARRAYS[0], _ARRAYS[2]), ""
    wanted = f"an .npz file with the arrays {', '.join(needed)}: numbers (N, ...){' and ' * bool(kind)}{kind}"
    if task == "auto":
        wanted += ". For an anomaly detector, which needs no labels, set data.task=reconstruction"
    arrays = read_arrays(path, needed, "data", wanted, ("train_clients", *SCALES, *set(_ARRAYS) - set(needed)))
    for name in arrays:
        if arrays[name].dtype.kind not in ("fiubU" if name in _ARRAYS[1::2] else "fiub"):  # classes may be text
            raise UserError(f"{name} in {path} has the type {arrays[name].dtype}; give numbers.", code="wrong-type")
    return arrays


def build_dataset(path: Path, arrays: Mapping[str, NDArray[Any]], task: str = "auto") -> Dataset:
    """Build a data set from the arrays of a file."""
    copied = [name for name in _ARRAYS if (name in arrays and arrays[name].dtype != np.float32) or SCALES[0] in arrays]
    needed = sum(4 * arrays[name].size for name in copied)
    require_memory(needed, f"The samples in {path} take", "Give fewer.")
    try:
        train, test = (
            scale_features(arrays[f"{part}_features"], *map(arrays.get, SCALES)) for part in ("train", "test")
        )
        labels, marks = arrays.get("train_labels"), arrays.get("test_labels")
        known: Task = "regression" if task == "regression" else "classification"
        if task == "reconstruction":
            known, labels = "reconstruction", None
        clients, scale = arrays.get("train_clients"), False if SCALES[0] in arrays else None
        data = Dataset.from_arrays(train, labels, test, marks, str(path), clients, task=known, scale=scale)
        return data if scale is None else replace(data, scaling=Scaling.of(arrays))
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code) from error


@register.dataset(EMBEDDED)
@cache
def embedded_mnist() -> Dataset:
    """MNIST, inside the package: 60,000 training and 10,000 test images of 28 x 28 pixels, ten digits."""
    folder = Path(__file__).with_name("mnist")
    if not folder.exists():
        raise UserError(
            "This installation was built for devices, without MNIST (CBDSL_DEVICE=1). Give other data, or install the "
            "whole package.",
            code="not-supported",
        )
    return read_idx_folder(folder, EMBEDDED, _EMBEDDED_SCALE)


def read_idx_folder(folder: Path, name: str, scale: Scale | None = None) -> Dataset:
    """Read the four IDX files of a folder; scale pixels to mean 0 and deviation 1 over the training set.

    scale: the training set's mean and deviation, if known.
    """
    train_images, train_labels = _read_part(folder, ("train",))
    test_images, test_labels = _read_part(folder, ("t10k", "test"))
    mean, deviation = scale or measure_scale(train_images)
    scaling = Scaling((mean,), (max(deviation, 1e-6),), shades=True)
    train = _samples(scaling.apply(train_images[:, None]), train_labels, "training")
    test = _samples(scaling.apply(test_images[:, None]), test_labels, "test")
    return replace(_dataset(train, test, name), scaling=scaling)


def _read_part(folder: Path, words: tuple[str, ...]) -> tuple[Bytes, Bytes]:
    """Read images (N, height, width) and labels (N,)."""
    images = read_idx(_find(folder, words, "images"), dimensions=3)
    labels_path = _find(folder, words, "labels")
    labels = read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_path} has {len(labels):,} labels for {len(images):,} images; the files do not match.",
            code="wrong-shape",
        )
    return images, labels


def measure_scale(images: Bytes) -> Scale:
    """Return mean and deviation of all pixels, where white is 1."""
    counts = _shade_counts(images.reshape(-1))
    mean = np.average(SHADES, weights=counts)
    return float(mean), float(np.sqrt(np.average((SHADES - mean) ** 2, weights=counts)))


def _shade_counts(pixels: Bytes) -> NDArray[np.int64]:
    """Count the pixels of each shade, (256,); by pairs, which takes half the time."""
    even = len(pixels) - len(pixels) % 2
    pairs = pixels[:even].view(np.uint16)
    counts = np.zeros(2**16, np.int64)
    for start in range(0, len(pairs), _AT_ONCE):
        counts += np.bincount(pairs[start : start + _AT_ONCE], minlength=2**16)
    first_and_second = counts.reshape(256, 256)
    alone = np.bincount(pixels[even:], minlength=256)
    return np.asarray(first_and_second.sum(axis=0) + first_and_second.sum(axis=1) + alone)


def read_arrays(
    path: Path, names: Sequence[str], what: str, wanted: str, optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file. what, wanted: what an error calls them, and what to give instead."""
    try:
        return load_arrays(path, names, optional)
    except ValueError as error:
        raise UserError(
            f"The {what} in {path} cannot be read ({error}). Give {wanted}.", code="unreadable-file"
        ) from error


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an IDX file of unsigned bytes, gzipped or not."""
    try:
        require_memory(path.stat().st_size, f"{path} takes", "Give a smaller one.")
        return parse_idx(str(path), path.read_bytes(), dimensions)
    except OSError as error:
        raise _damaged(str(path), error) from error


def parse_idx(path: str, raw: bytes, dimensions: int) -> Bytes:
    """Parse an IDX file of unsigned bytes, gzipped or not. path: its name in errors."""
    try:
        packed, header = raw[:2] == b"\x1f\x8b", 4 + 4 * dimensions
        start = _unpack_start(raw, header) if packed else raw[:header]
        shape = _shape_of(path, start, dimensions)
        expected = header + math.prod(shape)
        content = _unpack(raw, expected) if packed else np.frombuffer(raw, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    if len(content) != expected:
        found = f"{len(content):,}" if len(content) < expected else "more"
        raise UserError(
            f"{path} has the shape {shape} in its header, {expected:,} bytes, but has {found}: truncated or damaged.",
            code="damaged-file",
        )
    return content[header:].reshape(shape)


def _damaged(path: str, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({error}). It is truncated or damaged: copy it again.", code="damaged-file"
    )


def _shape_of(path: str, start: bytes, dimensions: int) -> tuple[int, ...]:
    """Return the shape in the header of an IDX file, if there is memory for it."""
    if len(start) < 4 or start[:3] != b"\x00\x00\x08":
        raise UserError(
            f"{path} is not an IDX file of unsigned bytes (it starts with {start[:4].hex() or 'nothing'}).",
            code="unreadable-file",
        )
    if start[3] != dimensions:
        raise UserError(
            f"{path} has an array of {start[3]} dimension(s); {dimensions} expected. "
            "Image and label files may have been swapped or misnamed.",
            code="wrong-shape",
        )
    if len(start) < 4 + 4 * dimensions:
        raise UserError(f"{path} ends within its header: truncated or damaged.", code="damaged-file")
    shape = struct.unpack(f">{dimensions}I", start[4:])
    needed = 5 * math.prod(shape)  # a byte and a float32 each
    require_memory(
        needed, f"{path} has the shape {shape} in its header, which takes", "Give a smaller one, or copy it again."
    )
    return shape


def _unpack_start(packed: bytes, length: int) -> bytes:
    """Unpack the first bytes of a gzip file."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        return file.read(length)


def _unpack(packed: bytes, expected: int) -> Bytes:
    """Unpack a gzip file, to at most one byte more than expected.

    Small pieces stay in the processor's cache, and numpy's memory costs less to touch for the first time than that of
    `bytes`: together half the time of `gzip.GzipFile`, which handles the unusual cases.
    """
    content = np.empty(min(expected, _LARGEST_GAIN * len(packed)), np.uint8)
    source, stream, filled = memoryview(packed), zlib.decompressobj(wbits=31), 0
    for start in range(0, len(packed), _PIECE):
        piece = stream.decompress(source[start : start + _PIECE])
        if filled + len(piece) > len(content):
            break
        content[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    if filled == len(content) and stream.eof and not stream.unused_data:
        return content
    return np.frombuffer(_unpack_start(packed, expected + 1), np.uint8)  # several streams, or an error with a reason


def _find(folder: Path, words: tuple[str, ...], kind: str) -> Path:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be read: {error.strerror}.", code="unreadable-file") from error
    names = [path for path in files if "idx" in path.name and kind in path.name and path.is_file()]
    found = [path for path in names if any(word in path.name for word in words)]
    if len(found) != 1:
        listing = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"{folder} must contain exactly one IDX file of {words[0]} {kind} "
            f"(such as {words[0]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte, gzipped or not); found: {listing}.",
            code="missing-file",
        )
    return found[0]


def make_samples(features: ArrayLike, labels: ArrayLike, part: str) -> Samples:
    """Build labelled samples from arrays and check them. part: what an error calls them."""
    return _samples(_finite_features(features, part), labels, part)


def _finite_features(features: ArrayLike, part: str) -> Floats:
    with np.errstate(over="ignore"):  # too large for a float32 becomes infinite, and is refused
        values = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(values).all():
        raise UserError(
            f"The features of the {part} set have NaN or infinite values; clean them first.", code="out-of-range"
        )
    return values


def _samples(features: Floats, labels: ArrayLike, part: str) -> Samples:
    raw = np.asarray(labels)
    if raw.ndim != 1 or features.ndim < 2 or len(features) != len(raw) or not len(raw):
        raise UserError(
            f"The {part} set needs features (N, ...) and labels (N,) with N > 0; "
            f"given {features.shape} and {raw.shape}.",
            code="wrong-shape",
        )
    if not features[0].size:
        raise UserError(
            f"A sample of the {part} set has no numbers; given features {features.shape}.", code="wrong-shape"
        )
    whole = np.issubdtype(raw.dtype, np.integer)
    if not whole or _outside(raw, 0, MOST_CLASSES):
        found = f"{raw.dtype} from {raw.min()} to {raw.max()}" if whole else str(raw.dtype)
        hint = " For real numbers this is regression: set task (data.task=regression)." * (raw.dtype.kind == "f")
        raise UserError(
            f"The labels of the {part} set must be integers from 0, below {MOST_CLASSES:,}; given {found}.{hint}",
            code="out-of-range",
        )
    return Samples(features, raw.astype(np.int32))


def _check_shapes(train: Floats, test: Floats) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"Training samples have shape {train.shape[1:]} and test samples {test.shape[1:]}; they must be equal.",
            code="wrong-shape",
        )


def _dataset(train: Samples, test: Samples, name: str) -> Dataset:
    _check_shapes(train.features, test.features)
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    if classes < 2:
        raise UserError(
            "All labels are 0; a classification problem needs at least two classes, labelled 0, 1, ...",
            code="out-of-range",
        )
    return Dataset(train, test, classes, name)


def _clients(numbers: ArrayLike, samples: int) -> Indices:
    raw = np.asarray(numbers)
    if raw.shape != (samples,) or not np.issubdtype(raw.dtype, np.integer) or _outside(raw, -1, 2**31):
        raise UserError(
            f"clients must be whole numbers from 0 (-1: no client), one per training sample ({samples:,}); given "
            f"{raw.dtype} {raw.shape}.",
            code="wrong-shape",
        )
    return raw.astype(np.int32)


def _outside(values: NDArray[Any], low: int, high: int) -> bool:
    """Return whether a value is below `low` or not below `high`."""
    return bool(len(values)) and not low <= values.min() <= values.max() < high


def _client_samples(number: int, own: Dataset | Samples | tuple[ArrayLike, ArrayLike], data: Dataset) -> Samples:
    """Return one client's samples, scaled like the data of a regression or a reconstruction."""
    if isinstance(own, Dataset):
        return own.train
    if not isinstance(own, Samples) and not (isinstance(own, (tuple, list)) and len(own) == 2):
        raise UserError(
            f"Client {number} is a {type(own).__name__}; give a Dataset, Samples, or a pair of features and labels.",
            code="wrong-type",
        )
    features, labels = (own.features, own.labels) if isinstance(own, Samples) else own
    if not len(np.asarray(features)) or (labels is not None and not len(np.asarray(labels))):
        raise UserError(f"Client {number} has no samples. Leave it out, or give it some.", code="wrong-shape")
    part = f"client {number}'s"
    return make_samples(features, labels, part) if data.task == "classification" else data.scale(features, labels, part)
