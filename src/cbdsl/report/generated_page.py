"""The page of `cbdsl generate`: the generated samples and what they reveal."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from cbdsl.arrays import Floats, Samples
from cbdsl.data.shared import unscale
from cbdsl.report.figures import INK, new_figure
from cbdsl.report.pages import Table, write_page
from cbdsl.studies.generate import GeneratedSet, Membership, Privacy, describe_result

_PER_CLASS = 8  # samples of a class
_MOST_CLASSES = 12


def write_generated_page(result: GeneratedSet, command: str) -> Path:
    """Write samples.png and generated.html into the folder; return the page."""
    picture = result.folder / "samples.png"
    _save_grid(picture, _choose_examples(result))
    return write_page(
        result.folder / "generated.html",
        "generated.html.j2",
        result=result,
        command=command,
        summary=describe_result(result)[0],
        picture=base64.b64encode(picture.read_bytes()).decode(),
        advantage=_format_points(result.privacy.by_samples),
        distances=tabulate_distances(result.privacy),
        tests=tabulate_tests(result.privacy),
    )


def tabulate_distances(privacy: Privacy) -> Table:
    """Return how near generated, learned and unseen samples are to each other."""
    kinds = {
        "generated, learned from": privacy.generated_to_members,
        "generated, unseen": privacy.generated_to_unseen,
        "unseen, learned from": privacy.unseen_to_members,
    }
    rows = [(words, f"{one.lowest:.3f}", f"{one.hundredth:.3f}", f"{one.median:.3f}") for words, one in kinds.items()]
    return Table(("From, to the nearest", "Lowest", "Hundredth", "Median"), rows, wide=False)


def tabulate_tests(privacy: Privacy) -> Table:
    """Return the results of the membership tests."""
    kinds = {"the generated samples": privacy.by_samples, "the generator itself": privacy.by_generator}
    rows = [(words, f"{one.area:.3f} ± {one.area_error:.3f}", _format_points(one)) for words, one in kinds.items()]
    return Table(("An attacker has", "Area under the curve", "Advantage, points"), rows, wide=False)


def _format_points(found: Membership) -> str:
    return f"{100 * found.advantage:.1f} ± {100 * found.advantage_error:.1f}"


def _choose_examples(result: GeneratedSet) -> Floats:
    """Return some samples of each class, from 0 to 1: (classes, samples, *shape)."""
    samples: Samples = result.shared.scoring
    features = unscale(samples.features, result.data.scaling).astype(np.float32)
    low, high = features.min(), features.max()
    rows = [np.flatnonzero(samples.labels == one) for one in range(min(result.data.kind.classes, _MOST_CLASSES))]
    each = max(1, min(_PER_CLASS, *map(len, rows)))
    return np.stack([(features[row[:each]] - low) / max(high - low, 1e-9) for row in rows if len(row)])


def _save_grid(path: Path, examples: Floats) -> None:
    """Draw images as they are, and other samples as one line per channel."""
    classes, each, *shape = examples.shape
    figure = new_figure(0.7 * each, 0.7 * classes)
    places = np.asarray(figure.subplots(classes, each, squeeze=False)).flat
    for place, sample in zip(places, examples.reshape(-1, *shape), strict=True):
        place.set_axis_off()
        if sample.ndim == 3 and len(sample) in {1, 3}:
            place.imshow(np.moveaxis(sample, 0, -1), cmap="gray", vmin=0, vmax=1)
        else:
            place.plot(sample.reshape(len(sample) if sample.ndim > 1 else 1, -1).T, color=INK, linewidth=0.4)
    figure.savefig(path, dpi=110, metadata={"Software": None})
