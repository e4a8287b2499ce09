from __future__ import annotations

import io
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from cbdsl.data.formats import read_png
from support.made_packages import chunk, png
from support.refusals import refused_as

LINES = np.zeros((2, 1 + 3 * 3), np.uint8)
WHOLE = png(LINES, 3)


def test_pixels_are_read() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    np.testing.assert_array_equal(read_png(file.getvalue(), 5, 4, "RGB"), pixels)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a, perhaps",
        WHOLE[:40],
        png(LINES, 4),
        png(LINES, 3, bits=16),
        png(LINES, 3, colour=3),
        png(LINES + np.eye(2, 10, dtype=np.uint8) * 9, 3),
        WHOLE[:8] + chunk(b"IDAT", b"x") + chunk(b"IEND", b""),
        WHOLE[:33] + chunk(b"IDAT", b"no zlib") + chunk(b"IEND", b""),
        WHOLE[:33] + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""),
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with refused_as("damaged-file"):
        read_png(content, 2, 3, "RGB")


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused_as("missing-package", "cbdsl[data]"):
        read_png(WHOLE, 2, 3, "RGB")
