"""The page of `cbdsl generate`: the generated samples and what they reveal."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from markupsafe import Markup

from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.data.shared import unscale
from cbdsl.report.figures import INK, new_figure
from cbdsl.report.pages import PageFigure, Table, write_page
from cbdsl.studies.generate import GeneratedSet, Membership, Privacy, describe_result

_PER_CLASS = 8  # samples of a class
_MOST_CLASSES = 12
_SHADES = 6  # of a picture on the page


def write_generated_page(result: GeneratedSet, command: str) -> Path:
    """Write samples.png and generated.html into the folder; return the page."""
    examples = _choose_examples(result)
    _save_grid(result.folder / "samples.png", examples)
    return write_page(
        result.folder / "generated.html",
        "generated.html.j2",
        result=result,
        command=command,
        summary=describe_result(result)[0],
        samples=PageFigure(_draw_grid(examples)),
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


def _is_image(examples: Floats) -> bool:
    return examples.ndim == 5 and examples.shape[2] in {1, 3}


def _save_grid(path: Path, examples: Floats) -> None:
    classes, each = examples.shape[:2]
    figure = new_figure(0.7 * each, 0.7 * classes)
    axes = np.asarray(figure.subplots(classes, each, squeeze=False))
    for one in range(classes):
        for place in range(each):
            axes[one, place].set_axis_off()
            if _is_image(examples):
                image = np.moveaxis(examples[one, place], 0, -1)
                axes[one, place].imshow(
                    image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1
                )
            else:
                axes[one, place].plot(_split_channels(examples[one, place]).T, color=INK, linewidth=0.4)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_grid(examples: Floats) -> Markup:
    """Return the grid as an SVG in the page's colours: images as runs of equal shades, other samples as lines."""
    classes, each = examples.shape[:2]
    grey = examples.mean(2) if _is_image(examples) else None
    height, width = (examples.shape[3], examples.shape[4]) if grey is not None else (28, 40)
    step = (height + 4, width + 4)
    parts = []
    for one in range(classes):
        for place in range(each):
            corner = place * step[1], one * step[0]
            parts.append(
                _draw_pixels(grey[one, place], corner)
                if grey is not None
                else _draw_lines(examples[one, place], corner, height, width)
            )
    return Markup(
        f'<svg role="img" aria-label="generated samples, every row a class" viewBox="0 0 {each * step[1]} '
        f'{classes * step[0]}" style="max-width:{3 * each * step[1]}px">{"".join(parts)}</svg>'
    )


def _draw_pixels(image: Floats, corner: tuple[int, int]) -> str:
    levels = np.rint(image * (_SHADES - 1)).astype(int)
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        ends = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        for first, last in pairwise(ends):
            if row[first]:
                run = f"M{corner[0] + first} {corner[1] + y}h{last - first}v1h{first - last}z"
                paths.setdefault(int(row[first]), []).append(run)
    return "".join(
        f'<path fill="var(--ink)" fill-opacity="{level / (_SHADES - 1):.1f}" d="{"".join(runs)}"/>'
        for level, runs in sorted(paths.items())
    )


def _split_channels(sample: Floats) -> Doubles:
    """Return a sample as lines, one per channel."""
    return sample.reshape(len(sample) if sample.ndim > 1 else 1, -1).astype(np.float64)


def _draw_lines(sample: Floats, corner: tuple[int, int], height: int, width: int) -> str:
    rows = _split_channels(sample)
    across = np.linspace(0, width, rows.shape[1]) + corner[0]
    return "".join(
        '<polyline fill="none" stroke="var(--ink)" stroke-width="0.4" points="'
        + " ".join(f"{x:.1f},{corner[1] + height * (1 - y):.1f}" for x, y in zip(across, row, strict=True))
        + '"/>'
        for row in rows
    )
