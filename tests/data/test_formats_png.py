from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cbdsl.data.formats import read_png
from cbdsl.errors import UserError
from support.made_packages import chunk, png

COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> colour type


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.sampled_from(sorted(COLOURS)))
def test_every_filter_is_undone_as_others_undo_it(seed: int, height: int, width: int, channels: int) -> None:
    rng = np.random.default_rng(seed)
    lines = rng.integers(0, 256, (height, 1 + width * channels))
    lines[:, 0] = rng.integers(0, 5, height)
    content = png(lines, width, COLOURS[channels])
    known = np.asarray(Image.open(io.BytesIO(content))).reshape(height, width, channels)
    np.testing.assert_array_equal(read_png(content, height, width, channels), known)


LINES = np.zeros((2, 1 + 3 * 3), np.uint8)
WHOLE = png(LINES, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it starts with"),
        (b"GIF89a, perhaps", "it starts with"),
        (WHOLE[:40], "no end"),
        (WHOLE[:-12], "no end"),
        (WHOLE[:-1], "no end"),
        (WHOLE.replace(b"made", b"Made"), "checksum is wrong"),
        (png(LINES, 4), "has 4 x 2 pixels.*expected 3 x 2"),
        (png(LINES, 3, bits=16), "16 bits"),
        (png(LINES, 3, interlaced=1), "interlacing 1"),
        (png(LINES, 3, colour=3), "colour type 3"),
        (png(LINES[:1], 3, height=2), "more or fewer pixels"),
        (png(np.zeros((500, 10)), 3, height=2), "more or fewer pixels"),
        (png(LINES + np.eye(2, 10, dtype=np.uint8) * 9, 3), "filter 9 in row 0"),
        (WHOLE[:8] + chunk(b"IDAT", b"x") + chunk(b"IEND", b""), "no header"),
        (WHOLE[:33] + chunk(b"IDAT", b"no zlib") + chunk(b"IEND", b""), "cannot be unpacked"),
    ],
)
def test_anything_else_is_an_error_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_png(content, 2, 3, 3)


def test_a_bomb_is_unpacked_no_further_than_asked_for() -> None:
    bomb = zlib.compress(bytes(2**26), 9)
    content = WHOLE[:33] + chunk(b"IDAT", bomb) + chunk(b"IEND", b"")
    with pytest.raises(UserError, match="more or fewer pixels"):
        read_png(content, 2, 3, 3)


@given(st.integers(8, len(WHOLE) - 1), st.integers(1, 255))
def test_a_damaged_image_is_never_read_as_another(place: int, change: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[place] ^= change
    try:
        np.testing.assert_array_equal(read_png(bytes(damaged), 2, 3, 3), 0)
    except UserError as error:
        assert str(error)
