"""How models travel in a run: a codec in each direction, uploads with the version of their reference, and updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.codec import Codec, CodecError, Packs, deflate
from cbdsl.codecs.quantize import Q8, Whole
from cbdsl.errors import UserError
from cbdsl.spec import Spec

KEPT_VERSIONS = 4  # how many versions of w^g a server keeps to decode uploads with, the current one among them
VERSION_BYTES = 4
RELAYED, MADE, FIRST = range(3)  # whose bytes an update holds: a worker's, the server's, or the first of all
FIRST_CODEC = Q8()  # the initial model is not a small difference: it gets more bits


@dataclass(frozen=True, eq=False)
class Codecs:
    """The codecs of a run."""

    up: Codec = field(default_factory=Whole)
    down: Codec = field(default_factory=Whole)


def make_codecs(spec: Spec) -> Codecs:
    """Build the codecs that a spec names."""
    return Codecs(_named(spec, spec.codec.up), _named(spec, spec.codec.down))


def _named(spec: Spec, name: str) -> Codec:
    made = register.codec.make(name, spec.options.of(name))
    if not isinstance(made, Codec):
        raise UserError(
            f"The codec '{name}' is a {type(made).__name__}; it must be a cbdsl.Codec.", code="invalid-part"
        )
    return made


def apply_update(update: bytes, before: Floats, codecs: Codecs) -> Floats:
    """Return the next w^g from an update and the one before (D,); raise CodecError if the update is invalid."""
    if not update or update[0] > FIRST:
        raise CodecError("not an update")
    codec = {RELAYED: codecs.up, MADE: codecs.down, FIRST: FIRST_CODEC}[update[0]]
    return codec.decode(update[1:], before)


def longest_update(codecs: Codecs, size: int) -> int:
    """Return the most bytes that an update of a model of `size` numbers takes."""
    return 2 + max(codec.longest_pack(size) for codec in (codecs.up, codecs.down, FIRST_CODEC))


def content_of(codec: Codec, upload: Floats, pack: Packs, version: int) -> Floats | bytes:
    """Return what an honest worker sends: its upload (D,), or the pack (C,) of it behind the version of its w^g."""
    return wrap_version(codec.encode_pack(pack, len(upload)), version) if codec.relative else upload


def encode_content(codec: Codec, model: Floats, received: Floats, version: int) -> tuple[Floats | bytes, Floats]:
    """Encode any model (V D,) against the w^g received; return what is sent and what it decodes to."""
    if not codec.relative:
        return model, model
    pack, arrives = codec.transmit_one(model, received)
    return wrap_version(deflate(pack), version), arrives


def wrap_version(content: bytes, version: int) -> bytes:
    """Put the version of the w^g that a model was encoded against in front of it."""
    return version.to_bytes(VERSION_BYTES, "little") + content


def unwrap_version(upload: bytes) -> tuple[int, bytes]:
    """Return version and encoded model of an upload; raise CodecError if it is too short."""
    if len(upload) < VERSION_BYTES:
        raise CodecError("not a packed model")
    return int.from_bytes(upload[:VERSION_BYTES], "little"), upload[VERSION_BYTES:]
