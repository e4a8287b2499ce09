"""D_G from a file: the samples that `cbdsl generate` writes, which a run takes instead of training samples.

Knows the file and how a run uses it; never makes a sample.
"""

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

# A part of the file, what it is called, and the setting that says how many of its samples a run uses.
_PARTS = {"training": "D_tr", "scoring": "D_sc", "holdout": "hold-out"}
_SETTINGS = {"training": "shared_training", "scoring": "shared_scoring", "holdout": "holdout"}
_ARRAYS = tuple(f"{part}_{kind}" for part in _PARTS for kind in ("features", "labels"))


@dataclass(frozen=True, eq=False)
class SharedSet:
    """D_tr, D_sc and, if the server is to have no samples of its own either, a hold-out; as a network is given them."""

    training: Samples
    scoring: Samples
    holdout: Samples | None = None


def with_shared(data: Dataset, parts: Split, spec: DataSpec) -> tuple[Dataset, Split]:
    """The same data with the samples of `spec.shared_source` behind the training set, and D_tr and D_sc among those.

    The hold-out stays the server's own unless the file has one. Without a file nothing changes.
    """
    if not spec.shared_source:
        return data, parts
    path = Path(spec.shared_source)
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
    """As many samples as the spec says; they are in no order."""
    wanted = getattr(spec, _SETTINGS[part])
    if wanted > len(samples):
        raise UserError(
            f"{path} has {len(samples):,} samples of {_PARTS[part]}; data.{_SETTINGS[part]} is {wanted:,}. Set it "
            "lower, or generate more: cbdsl generate."
        )
    return samples.taken(np.arange(wanted, dtype=np.int32))


def read_shared(path: Path, data: Dataset) -> SharedSet:
    """The samples of a file, checked against the data of the run that uses them."""
    wanted = f"a file that `cbdsl generate` wrote: the arrays {', '.join(_ARRAYS[:4])}"
    arrays = read_arrays(path, _ARRAYS[:4], "shared samples", wanted, (*_ARRAYS[4:], *SCALES))
    _check_scaling(path, arrays, data)
    there = [part for part in _PARTS if {f"{part}_features", f"{part}_labels"} & set(arrays)]
    found = SharedSet(**{part: _part(path, arrays, part, data) for part in there})
    labels = np.concatenate([found.training.labels, found.scoring.labels])
    empty = np.flatnonzero(np.bincount(labels, minlength=data.classes) == 0).tolist()
    if empty:
        raise UserError(
            f"{path} has no sample of class {', '.join(map(str, empty[:10]))} in D_tr and D_sc; this run's data "
            f"({data.name}) have {data.classes:,} classes. Generate the file from the same data: "
            f"cbdsl generate --data {data.name}"
        )
    return found


def _part(path: Path, arrays: Mapping[str, NDArray[Any]], part: str, data: Dataset) -> Samples:
    for kind in ("features", "labels"):
        if f"{part}_{kind}" not in arrays:
            raise UserError(f"{path} has no array {part}_{kind}: its {_PARTS[part]} is not whole. Generate it again.")
    features, labels = arrays[f"{part}_features"], arrays[f"{part}_labels"]
    if features.dtype.kind not in "fiub" or features.shape[1:] != data.shape:
        raise UserError(
            f"{path} holds {features.dtype} samples of shape {features.shape[1:]}; this run's data ({data.name}) are "
            f"numbers of shape {data.shape}. Generate the file from the same data: cbdsl generate --data {data.name}"
        )
    try:
        require_memory(4 * features.size, "Its samples take", "Generate fewer.")
        scaled = data.scaling.apply(features) if data.scaling else features
        samples = make_samples(scaled, labels, _PARTS[part])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if int(samples.labels.max()) >= data.classes:
        raise UserError(
            f"{path} has the label {samples.labels.max()} in {_PARTS[part]}; this run's data ({data.name}) have "
            f"{data.classes} classes, from 0."
        )
    return samples


def _check_scaling(path: Path, arrays: Mapping[str, NDArray[Any]], data: Dataset) -> None:
    """The file's samples are those of a source, to be scaled as that source was."""
    found = [arrays[name] for name in SCALES if name in arrays]
    numbers = all(one.ndim == 1 and one.dtype.kind in "fiub" and len(one) == len(found[0]) for one in found)
    if len(found) == 1 or not numbers:
        given = ", ".join(f"{name} {arrays[name].dtype} {arrays[name].shape}" for name in SCALES if name in arrays)
        raise UserError(
            f"{path} must say of each channel by what mean and deviation its features are scaled, in {SCALES[0]} and "
            f"{SCALES[1]}, as many numbers in both; given {given}. Generate it again: cbdsl generate --data {data.name}"
        )
    own = _scales(data.scaling)
    stored = [np.array(found)] if found else []
    if not _alike(own, stored):
        raise UserError(
            f"{path} was made for features scaled by {_scale_words(stored)}; those of this run's data ({data.name}) "
            f"are scaled by {_scale_words(own)}. Generate the file from the same data: "
            f"cbdsl generate --data {data.name}"
        )


def check_source(source: str, given: Dataset, data: Dataset) -> None:
    """Refuse data to learn from of which a run with other data would take no file."""
    theirs, own = _scales(given.scaling), _scales(data.scaling)
    for fits, first, second in (
        (given.shape == data.shape, f"samples of shape {given.shape}", f"samples of shape {data.shape}"),
        (given.classes == data.classes, f"{given.classes:,} classes", f"{data.classes:,}"),
        (_alike(theirs, own), f"features scaled by {_scale_words(theirs)}", f"features scaled by {_scale_words(own)}"),
    ):
        if not fits:
            raise UserError(
                f"{source} has {first}; the spec's data ({data.name}) have {second}, and no run on those takes what is "
                "learned here. Name the data of your runs with --data, or learn from samples like theirs."
            )


def _scales(scaling: Scaling | None) -> list[NDArray[Any]]:
    return [np.array([scaling.mean, scaling.deviation])] if scaling else []


def _alike(own: list[NDArray[Any]], stored: list[NDArray[Any]]) -> bool:
    return len(own) == len(stored) and all(
        a.shape == b.shape and np.allclose(a, b, 1e-6, 1e-9) for a, b in zip(own, stored, strict=True)
    )


def _scale_words(scales: list[NDArray[Any]]) -> str:
    return f"means {scales[0][0].tolist()} and deviations {scales[0][1].tolist()}" if scales else "nothing"


def write_shared(path: Path, shared: SharedSet, scaling: Scaling | None) -> None:
    """Write a file that `read_shared` reads; the same samples give the same bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    for part, samples in vars(shared).items():
        if samples is not None:
            arrays[f"{part}_features"] = unscaled(samples.features, scaling)
            arrays[f"{part}_labels"] = samples.labels
    if scaling is not None:
        arrays |= dict(zip(SCALES, (np.array(scaling.mean), np.array(scaling.deviation)), strict=True))
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getbuffer())


def unscaled(features: Floats, scaling: Scaling | None) -> NDArray[Any]:
    """Features (N, C, ...) as a source has them: shades as bytes."""
    if scaling is None:
        return features
    raw = raw_of(features, scaling)
    return np.rint(255 * raw.clip(0, 1)).astype(np.uint8) if scaling.shades else raw


def raw_of(features: Floats, scaling: Scaling) -> Floats:
    """Features (N, C, ...) before they were scaled; shades from 0 to 1."""
    shape = (1, -1, *([1] * (features.ndim - 2)))
    mean, deviation = (np.array(values, np.float32).reshape(shape) for values in (scaling.mean, scaling.deviation))
    return np.asarray(features * deviation + mean, np.float32)
