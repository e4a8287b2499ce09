"""Packages as small as can be, in the form of the real ones: a pickle of an old pandas frame, PNGs, archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cbdsl.data.catalogue import CatalogueEntry, Client, Package, PackageFile
from cbdsl.data.formats import CHANNELS

# Pickles, written instruction by instruction: no pandas of today writes what pandas wrote in 2020.


def whole(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def text(words: str) -> bytes:
    content = words.encode("utf-8")
    return b"X" + struct.pack("<I", len(content)) + content


def name(path: str) -> bytes:
    module, _, last = path.partition(" ")
    return f"c{module}\n{last}\n".encode()


def group(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def listed(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def mapping(pairs: Mapping[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs.items()) + b"u"


def call(path: str, *arguments: bytes, state: bytes = b"") -> bytes:
    return name(path) + group(*arguments) + b"R" + (state + b"b" if state else b"")


def raw(content: bytes) -> bytes:
    return call("_codecs encode", text(content.decode("latin1")), text("latin1"))


def array(kind: str, order: str, shape: Sequence[int], values: bytes) -> bytes:
    dtype_state = group(whole(3), text(order), b"N", b"N", b"N", whole(-1), whole(-1), whole(0))
    dtype = call("numpy dtype", text(kind), whole(0), whole(1), state=dtype_state)
    state = group(whole(1), group(*map(whole, shape)), dtype, b"I00\n", values)
    return call("numpy.core.multiarray _reconstruct", name("numpy ndarray"), group(whole(0)), raw(b"b"), state=state)


def index(names: Sequence[str]) -> bytes:
    inside = array("O8", "|", [len(names)], listed(*map(text, names)))
    return call(
        "pandas.core.indexes.base _new_Index",
        name("pandas.core.indexes.base Index"),
        mapping({text("data"): inside, text("name"): b"N"}),
    )


def frame(signals: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    """signals: (6, n); labels: (n,)."""
    whole_numbers = np.stack([np.arange(len(labels)), labels]).astype("<i8")
    blocks = listed(
        array("f8", "<", signals.shape, raw(signals.astype("<f8").tobytes())),
        array("i8", "<", whole_numbers.shape, raw(whole_numbers.tobytes())),
    )
    names = listed(index(CHANNELS), index(("sequence", "label")))
    axes = listed(index((*CHANNELS, "sequence", "label")), index(()))
    manager = call(
        "copy_reg _reconstructor",
        name("pandas.core.internals.managers BlockManager"),
        name("__builtin__ object"),
        b"N",
        state=group(axes, blocks, names, mapping({})),
    )
    return call(
        "copy_reg _reconstructor",
        name("pandas.core.frame DataFrame"),
        name("__builtin__ object"),
        b"N",
        state=mapping({text("_data"): manager}),
    )


def recordings(people: Mapping[int, Sequence[bytes]]) -> bytes:
    """The pickle of frames by person, packed."""
    return gzip.compress(mapping({whole(person): listed(*frames) for person, frames in people.items()}) + b".", mtime=0)


# Images


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(lines: np.ndarray[Any, Any], width: int, colour: int = 2, **header: int) -> bytes:
    """lines: a filter's number and the filtered bytes of each row."""
    values = {"height": len(lines), "bits": 8, "interlaced": 0} | header
    head = struct.pack(">IIBBBBB", width, values["height"], values["bits"], colour, 0, 0, values["interlaced"])
    packed = zlib.compress(lines.astype(np.uint8).tobytes())
    middle = len(packed) // 2
    chunks = (b"IHDR", head), (b"tEXt", b"made"), (b"IDAT", packed[:middle]), (b"IDAT", packed[middle:]), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def cifar10_parts(batch: int = 4) -> dict[str, bytes]:
    """The files of CIFAR-10's package with a few images, row filters 0, 1, 2 and 4 among them."""
    rng = np.random.default_rng(0)
    parts = {}
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        lines = rng.integers(0, 256, (batch, 1 + 3072))
        lines[:, 0] = np.resize([0, 1, 2, 4], batch)
        parts[f"{stem}.png"] = png(lines, 1024)
    parts["train_lables.json"] = json.dumps([each % 10 for each in range(5 * batch)]).encode()
    parts["test_lables.json"] = json.dumps([each % 10 for each in range(batch)]).encode()
    return parts


def idx(values: np.ndarray[Any, Any]) -> bytes:
    """An IDX file of unsigned bytes, packed."""
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return gzip.compress(head + values.astype(np.uint8).tobytes(), mtime=0)


# Archives


def tar(files: Mapping[str, bytes], packing: str = "gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    packers = {"gz": lambda content: gzip.compress(content, mtime=0), "xz": lzma.compress, "": bytes}
    return packers[packing](buffer.getvalue())


def deb(files: Mapping[str, bytes], packing: str = "xz", member: str = "data.tar.xz") -> bytes:
    content = b"!<arch>\n"
    for label, inside in (("debian-binary", b"2.0\n"), ("control.tar.gz", b"odd"), (member, tar(files, packing))):
        content += f"{label:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(inside):<10}`\n".encode() + inside
        content += b"\n" * (len(inside) % 2)
    return content


def entry(
    named: str, client: Client, package: bytes, files: Mapping[str, bytes], content: str, rebuilt: bool = False
) -> CatalogueEntry:
    """The facts about a made package."""
    parts = tuple(PackageFile(path, len(inside), hashlib.sha256(inside).hexdigest()) for path, inside in files.items())
    digest = hashlib.sha256(package).hexdigest()
    made = Package(client, "made-package", "1.0.0", len(package), digest, parts, rebuilt)
    return CatalogueEntry(named, "made", "everybody's", "nowhere", made, 1_000_000, content)
