"""Reads and writes the file of a synthetic shared set D_G (`cbdsl generate`), and puts it into a run's data."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.data.dataset import SCALES, Dataset, Scaling, make_samples, read_arrays
from cbdsl.data.partition import Split
from cbdsl.errors import UserError
from cbdsl.spec import DataSpec
from cbdsl.util.files import write_atomically
from cbdsl.util.memory import require_memory

# The parts of the file: their names in messages, and the settings for the number of samples that a run uses.
_PARTS = {"training": "D_tr", "scoring": "D_sc", "holdout": "hold-out"}
_SETTINGS = {"training": "shared_training", "scoring": "shared_scoring", "holdout": "holdout"}
_ARRAYS = tuple(f"{part}_{kind}" for part in _PARTS for kind in ("features", "labels"))


@dataclass(frozen=True, eq=False)
class SharedSet:
    """D_tr, D_sc and perhaps a hold-out for the server, scaled for a network."""

    training: Samples
    scoring: Samples
    holdout: Samples | None = None


def add_shared(data: Dataset, parts: Split, spec: DataSpec) -> tuple[Dataset, Split]:
    """Append the samples of `spec.shared_source` to the training set, and use them as D_tr and D_sc.

    They replace the hold-out, too, if the file has one. Without a file nothing changes.
    """
    if not spec.shared_source:
        return data, parts
    path = Path(spec.shared_source)
    if data.task != "classification":
        raise UserError(
            f"data.shared_source is {path}, whose samples have classes; the task here is {data.task}. Leave it out: "
            "D_tr and D_sc are then training samples.",
            code="conflict",
        )
    found = read_shared(path, data)
    taken = {part: _first(samples, part, spec, path) for part, samples in vars(found).items() if samples is not None}
    require_memory(data.train.features.nbytes, "The training set and the shared samples take", "Use fewer samples.")
    ends = np.cumsum([len(data.train), *map(len, taken.values())])
    places: dict[str, Indices] = {
        part: np.arange(first, last, dtype=np.int32) for part, first, last in zip(taken, ends, ends[1:], strict=False)
    }
    owners = data.clients
    if owners is not None:
        owners = np.concatenate([owners, np.full(ends[-1] - ends[0], -1, np.int32)])
    return (
        replace(data, train=Samples.joined([data.train, *taken.values()]), clients=owners),
        replace(
            parts,
            shared_training=places["training"],
            shared_scoring=places["scoring"],
            holdout=places.get("holdout", parts.holdout),
        ),
    )


def _first(samples: Samples, part: str, spec: DataSpec, path: Path) -> Samples:
    """Return the first samples of a part, as many as the spec says."""
    wanted = getattr(spec, _SETTINGS[part])
    if wanted > len(samples):
        raise UserError(
            f"{path} has {len(samples):,} samples of {_PARTS[part]}; data.{_SETTINGS[part]} is {wanted:,}. Set it "
            "lower, or generate more: cbdsl generate.",
            code="out-of-range",
        )
    return samples.taken(np.arange(wanted, dtype=np.int32))


def read_shared(path: Path, data: Dataset) -> SharedSet:
    """Read the samples of a file, and check them against the data of the run."""
    wanted = f"a file that `cbdsl generate` wrote: the arrays {', '.join(_ARRAYS[:4])}"
    arrays = read_arrays(path, _ARRAYS[:4], "shared samples", wanted, (*_ARRAYS[4:], *SCALES))
    _check_scaling(path, arrays, data)
    there = [part for part in _PARTS if {f"{part}_features", f"{part}_labels"} & set(arrays)]
    found = SharedSet(**{part: _read_part(path, arrays, part, data) for part in there})
    labels = np.concatenate([found.training.labels, found.scoring.labels])
    empty = np.flatnonzero(np.bincount(labels, minlength=data.classes) == 0).tolist()
    if empty:
        raise UserError(
            f"{path} has no sample of class {', '.join(map(str, empty[:10]))} in D_tr and D_sc; this run's data "
            f"({data.name}) have {data.classes:,} classes. Generate the file from the same data: "
            f"cbdsl generate --data {data.name}",
            code="wrong-shape",
        )
    return found


def _read_part(path: Path, arrays: Mapping[str, NDArray[Any]], part: str, data: Dataset) -> Samples:
    for kind in ("features", "labels"):
        if f"{part}_{kind}" not in arrays:
            raise UserError(
                f"{path} has no array {part}_{kind} for {_PARTS[part]}. Generate it again.", code="damaged-file"
            )
    features, labels = arrays[f"{part}_features"], arrays[f"{part}_labels"]
    if features.dtype.kind not in "fiub" or features.shape[1:] != data.shape:
        raise UserError(
            f"{path} has {features.dtype} samples of shape {features.shape[1:]}; this run's data ({data.name}) are "
            f"numbers of shape {data.shape}. Generate the file from the same data: cbdsl generate --data {data.name}",
            code="wrong-shape",
        )
    try:
        require_memory(4 * features.size, "Its samples take", "Generate fewer.")
        scaled = data.scaling.apply(features) if data.scaling else features
        samples = make_samples(scaled, labels, _PARTS[part])
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code) from error
    if int(samples.labels.max()) >= data.classes:
        raise UserError(
            f"{path} has the label {samples.labels.max()} in {_PARTS[part]}; this run's data ({data.name}) have "
            f"{data.classes} classes, from 0.",
            code="out-of-range",
        )
    return samples


def _check_scaling(path: Path, arrays: Mapping[str, NDArray[Any]], data: Dataset) -> None:
    """Check that the file's samples are to be scaled like the data."""
    found = [arrays[name] for name in SCALES if name in arrays]
    numbers = all(one.ndim == 1 and one.dtype.kind in "fiub" and len(one) == len(found[0]) for one in found)
    if len(found) == 1 or not numbers:
        given = ", ".join(f"{name} {arrays[name].dtype} {arrays[name].shape}" for name in SCALES if name in arrays)
        raise UserError(
            f"{path} must have the mean and deviation of each channel, in {SCALES[0]} and {SCALES[1]}, as many numbers "
            f"in both; given {given}. Generate it again: cbdsl generate --data {data.name}",
            code="damaged-file",
        )
    own = _scales(data.scaling)
    stored = [np.array(found)] if found else []
    if not _equal_scales(own, stored):
        raise UserError(
            f"{path} was made for {_describe_scaled(stored)}; this run's data ({data.name}) have "
            f"{_describe_scaled(own)}. Generate the file from the same data: "
            f"cbdsl generate --data {data.name}",
            code="conflict",
        )


def check_source(source: str, given: Dataset, data: Dataset) -> None:
    """Check that a run with `data` can use samples that are generated from `given`."""
    theirs, own = _scales(given.scaling), _scales(data.scaling)
    for fits, first, second in (
        (given.shape == data.shape, f"samples of shape {given.shape}", f"samples of shape {data.shape}"),
        (given.classes == data.classes, f"{given.classes:,} classes", f"{data.classes:,}"),
        (_equal_scales(theirs, own), _describe_scaled(theirs), _describe_scaled(own)),
    ):
        if not fits:
            raise UserError(
                f"{source} has {first}; the spec's data ({data.name}) have {second}, so its runs cannot use samples "
                "generated from it. Give the data of your runs with --data, or use samples like theirs.",
                code="conflict",
            )


def _scales(scaling: Scaling | None) -> list[NDArray[Any]]:
    return [np.array([scaling.mean, scaling.deviation])] if scaling else []


def _equal_scales(own: list[NDArray[Any]], stored: list[NDArray[Any]]) -> bool:
    return len(own) == len(stored) and all(
        a.shape == b.shape and np.allclose(a, b, 1e-6, 1e-9) for a, b in zip(own, stored, strict=True)
    )


def _describe_scaled(scales: list[NDArray[Any]]) -> str:
    by = f"means {scales[0][0].tolist()} and deviations {scales[0][1].tolist()}" if scales else "nothing"
    return f"features scaled by {by}"


def write_shared(path: Path, shared: SharedSet, scaling: Scaling | None) -> None:
    """Write a file for `read_shared`; the same samples give the same bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    for part, samples in vars(shared).items():
        if samples is not None:
            arrays[f"{part}_features"] = unscale(samples.features, scaling)
            arrays[f"{part}_labels"] = samples.labels
    if scaling is not None:
        arrays |= dict(zip(SCALES, (np.array(scaling.mean), np.array(scaling.deviation)), strict=True))
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getbuffer())


def unscale(features: Floats, scaling: Scaling | None) -> NDArray[Any]:
    """Undo the scaling of features (N, C, ...); shades become bytes."""
    if scaling is None:
        return features
    raw = unscale_to_floats(features, scaling)
    return np.rint(255 * raw.clip(0, 1)).astype(np.uint8) if scaling.shades else raw


def unscale_to_floats(features: Floats, scaling: Scaling) -> Floats:
    """Undo the scaling of features (N, C, ...); shades become numbers from 0 to 1."""
    shape = (1, -1, *([1] * (features.ndim - 2)))
    mean, deviation = (np.array(values, np.float32).reshape(shape) for values in (scaling.mean, scaling.deviation))
    return np.asarray(features * deviation + mean, np.float32)
