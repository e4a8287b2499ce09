"""The page of `cbdsl generate`: what the samples look like, and what they give away. Reads results, makes none."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.data.shared import unscaled
from cbdsl.report.html import Section, bullets, document, picture, table
from cbdsl.report.style import INK, new_figure
from cbdsl.studies.generate import Distances, GeneratedSet, Membership, sentences
from cbdsl.util.files import write_atomically

_EACH = 8  # samples of a class
_MOST_CLASSES = 12
_SHADES = 6  # of a picture on the page


def write(made: GeneratedSet, command: str) -> Path:
    """Write samples.png and generated.html into the folder; gives the page."""
    shown = _shown(made)
    _save_grid(made.folder / "samples.png", shown)
    page = made.folder / "generated.html"
    write_atomically(page, build(made, shown, command).encode())
    return page


def build(made: GeneratedSet, shown: Floats, command: str) -> str:
    """The page; shown: (classes, samples, *shape)."""
    sections = [
        Section("samples", "Samples", "What it makes", picture(_drawn(shown), "Every row a class, drawn at random.")),
        Section("privacy", "Privacy", "What they give away", _privacy(made)),
        Section("method", "Method", "How this was made", _method(made, command)),
    ]
    found = made.privacy
    lead = (
        f"{len(made.shared.training):,} samples of D_tr and {len(made.shared.scoring):,} of D_sc that nobody ever had, "
        f"learned from {len(made.material.samples):,} samples of {escape(made.whose)}. Whoever has them can tell which "
        f"samples it learned from with an advantage of {_points(found.by_samples)} points (0: guessing)."
    )
    return document("D_G from a generator", lead, sections)


def _points(found: Membership) -> str:
    return f"{100 * found.advantage:.1f} ± {100 * found.advantage_error:.1f}"


def _privacy(made: GeneratedSet) -> str:
    found = made.privacy

    def row(words: str, one: Distances) -> tuple[str, ...]:
        return words, f"{one.lowest:.3f}", f"{one.hundredth:.3f}", f"{one.median:.3f}"

    distances = table(
        ("From, to the nearest", "Lowest", "Hundredth", "Median"),
        [
            row("generated, learned from", found.generated_to_members),
            row("generated, unseen", found.generated_to_unseen),
            row("unseen, learned from", found.unseen_to_members),
        ],
    )
    tests = table(
        ("An attacker has", "Area under the curve", "Advantage, points"),
        [
            (words, f"{one.area:.3f} ± {one.area_error:.3f}", _points(one))
            for words, one in (
                ("the generated samples", found.by_samples),
                ("the generator itself", found.by_generator),
            )
        ],
    )
    return (
        f"<p>Root mean square differences, {found.generated:,} generated samples, {found.compared:,} that were learned "
        f"from, {found.compared:,} unseen ({escape(made.material.unseen_are)}). Copies would be nearer to what was "
        f"learned from than to what was not: {found.closer_to_members:.1%} ± {found.closer_error:.1%} of the generated "
        f"are, where chance is 50 %.</p>{distances}"
        "<p>Membership: is a sample among those learned from? Area 0.5 and advantage 0 are guessing; ± is one standard "
        f"error.</p>{tests}"
        "<p>What these numbers do not prove: they are of two simple attacks, on average over samples. A rare sample "
        "may be far easier to find out than the average, an attacker may know more, and nothing here is differential "
        "privacy.</p>"
    )


def _method(made: GeneratedSet, command: str) -> str:
    words = bullets(escape(line.strip()) for line in sentences(made)[:1])
    return (
        f"<p>Made by <code>{escape(command)}</code>.</p>{words}<p>Beside this page: <code>shared.npz</code> (for "
        "<code>--set data.shared_source=</code>), <code>privacy.json</code>, <code>samples.png</code>, "
        "<code>generate.json</code>, <code>passes.jsonl</code> and <code>checkpoint.npz</code>; README.txt says what "
        "is what.</p>"
    )


def _shown(made: GeneratedSet) -> Floats:
    """Some samples of each class, from 0 to 1: (classes, samples, *shape)."""
    samples: Samples = made.shared.scoring
    features = unscaled(samples.features, made.material.scaling).astype(np.float32)
    low, high = features.min(), features.max()
    rows = [np.flatnonzero(samples.labels == one) for one in range(min(made.material.kind.classes, _MOST_CLASSES))]
    each = max(1, min(_EACH, *map(len, rows)))
    return np.stack([(features[row[:each]] - low) / max(high - low, 1e-9) for row in rows if len(row)])


def _is_image(shown: Floats) -> bool:
    return shown.ndim == 5 and shown.shape[2] in {1, 3}


def _save_grid(path: Path, shown: Floats) -> None:
    classes, each = shown.shape[:2]
    figure = new_figure(0.7 * each, 0.7 * classes)
    axes = np.asarray(figure.subplots(classes, each, squeeze=False))
    for one in range(classes):
        for place in range(each):
            axes[one, place].set_axis_off()
            if _is_image(shown):
                image = np.moveaxis(shown[one, place], 0, -1)
                axes[one, place].imshow(
                    image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1
                )
            else:
                axes[one, place].plot(_rows(shown[one, place]).T, color=INK, linewidth=0.4)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _drawn(shown: Floats) -> str:
    """The grid as an SVG of the page's own colours: grey images as runs of equal shades, other samples as lines."""
    classes, each = shown.shape[:2]
    grey = shown.mean(2) if _is_image(shown) else None
    height, width = (shown.shape[3], shown.shape[4]) if grey is not None else (28, 40)
    step = (height + 4, width + 4)
    parts = []
    for one in range(classes):
        for place in range(each):
            corner = place * step[1], one * step[0]
            parts.append(
                _pixels(grey[one, place], corner)
                if grey is not None
                else _lines(shown[one, place], corner, height, width)
            )
    return (
        f'<svg role="img" aria-label="generated samples, every row a class" viewBox="0 0 {each * step[1]} '
        f'{classes * step[0]}" style="max-width:{3 * each * step[1]}px">{"".join(parts)}</svg>'
    )


def _pixels(image: Floats, corner: tuple[int, int]) -> str:
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


def _rows(sample: Floats) -> Doubles:
    """A sample as lines: one for each channel, or a single one if it is flat."""
    return sample.reshape(len(sample) if sample.ndim > 1 else 1, -1).astype(np.float64)


def _lines(sample: Floats, corner: tuple[int, int], height: int, width: int) -> str:
    rows = _rows(sample)
    across = np.linspace(0, width, rows.shape[1]) + corner[0]
    return "".join(
        '<polyline fill="none" stroke="var(--ink)" stroke-width="0.4" points="'
        + " ".join(f"{x:.1f},{corner[1] + height * (1 - y):.1f}" for x, y in zip(across, row, strict=True))
        + '"/>'
        for row in rows
    )
