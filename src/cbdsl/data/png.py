"""PNG images of eight bits a channel, without interlacing: enough for pictures that are data, with nothing to install.

Bounded: an image is unpacked only up to the size that was asked for.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from cbdsl.errors import UserError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type: grey, colour, and both with transparency

Bytes = NDArray[np.uint8]


def read_png(content: bytes, height: int, width: int, channels: int) -> Bytes:
    """The pixels of an image of exactly this size, (height, width, channels); UserError if it is anything else."""
    if content[:8] != _SIGNATURE:
        raise UserError(f"It is no PNG image (it starts with {content[:8].hex() or 'nothing'}).")
    header, packed = _chunks(content)
    if len(header) != 13:
        raise UserError("The PNG image has no header: truncated or damaged.")
    found = struct.unpack(">IIBBBBB", header)
    if found[:3] + found[4:] != (width, height, 8, 0, 0, 0) or _CHANNELS.get(found[3]) != channels:
        raise UserError(
            f"The PNG image has {found[0]} x {found[1]} pixels, {found[2]} bits, colour type {found[3]}, interlacing "
            f"{found[6]}; expected {width} x {height}, 8 bits, {channels} channel(s), none."
        )
    expected = height * (1 + width * channels)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, expected + 1)
    except zlib.error as error:
        raise UserError(f"The PNG image cannot be unpacked ({error}): truncated or damaged.") from error
    if len(raw) != expected or not (unpacker.eof or not unpacker.decompress(unpacker.unconsumed_tail, 1)):
        raise UserError("The PNG image has more or fewer pixels than it announces: truncated or damaged.")
    lines = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * channels)
    return _unfiltered(lines, channels).reshape(height, width, channels)


def _chunks(content: bytes) -> tuple[bytes, bytes]:
    """The header, and the packed pixels put together; every chunk used has the checksum it should have."""
    header, pixels, place = b"", [], 8
    while place + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        data = content[place + 8 : place + 8 + length]
        end = place + 12 + length
        if end > len(content) or zlib.crc32(kind + data) != struct.unpack_from(">I", content, end - 4)[0]:
            raise UserError("The PNG image is truncated or damaged: a checksum is wrong.")
        if kind == b"IHDR":
            header = data
        elif kind == b"IDAT":
            pixels.append(data)
        elif kind == b"IEND":
            return header, b"".join(pixels)
        place = end
    raise UserError("The PNG image has no end: truncated.")


def _unfiltered(lines: Bytes, channels: int) -> Bytes:
    """Rows of pixels, each restored from its filter, the pixels before it and the row above."""
    rows = np.empty((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1], np.uint8)
    for number, line in enumerate(lines):
        kind, values = int(line[0]), line[1:]
        if kind == 0:
            rows[number] = values
        elif kind == 1:  # the pixel to the left is added: a running sum
            rows[number] = np.add.accumulate(values.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
        elif kind == 2:
            rows[number] = values + above
        elif kind in {3, 4}:
            rows[number] = _one_by_one(kind, values.tolist(), above.tolist(), channels)
        else:
            raise UserError(f"The PNG image has the filter {kind} in row {number}; there are 0 to 4. It is damaged.")
        above = rows[number]
    return rows


def _one_by_one(kind: int, values: list[int], above: list[int], channels: int) -> list[int]:
    """A row filtered by averages (3) or by Paeth's predictor (4)."""
    row: list[int] = []
    for place, value in enumerate(values):
        left = row[place - channels] if place >= channels else 0
        corner = above[place - channels] if place >= channels else 0
        up = above[place]
        row.append((value + ((left + up) // 2 if kind == 3 else _paeth(left, up, corner))) % 256)
    return row


def _paeth(left: int, up: int, corner: int) -> int:
    """Whichever of the three is nearest to left + up - corner; the first of them if several are."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))
