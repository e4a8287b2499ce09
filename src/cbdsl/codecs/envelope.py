"""How models travel in a run: a codec up, a codec down, and what a worker makes of an update from the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.base import Codec, CodecError
from cbdsl.codecs.quantize import Q8, Whole
from cbdsl.errors import UserError
from cbdsl.spec import Spec

RELAYED, MADE, FIRST = range(3)  # whose bytes an update holds: a worker's, the server's, or the first of all
FIRST_CODEC = Q8()  # the initial model is no small difference: it gets more bits


@dataclass(frozen=True, eq=False)
class Codecs:
    """How models travel."""

    up: Codec = field(default_factory=Whole)
    down: Codec = field(default_factory=Whole)


def codecs_of(spec: Spec) -> Codecs:
    """How models travel in a run."""
    return Codecs(_named(spec, spec.codec.up), _named(spec, spec.codec.down))


def _named(spec: Spec, name: str) -> Codec:
    made = register.codec.make(name, spec.options.of(name))
    if not isinstance(made, Codec):
        raise UserError(f"The codec '{name}' is a {type(made).__name__}; it must be a cbdsl.Codec.")
    return made


def updated(update: bytes, before: Floats, codecs: Codecs) -> Floats:
    """What a worker makes of an update: the next w^g, from the one it had (D,); CodecError if that cannot be."""
    if not update or update[0] > FIRST:
        raise CodecError("not an update")
    codec = {RELAYED: codecs.up, MADE: codecs.down, FIRST: FIRST_CODEC}[update[0]]
    return codec.decode(update[1:], before)


def longest_update(codecs: Codecs, size: int) -> int:
    """How many bytes an update of a model of `size` numbers takes at most."""
    return 2 + max(codec.longest(size) for codec in (codecs.up, codecs.down, FIRST_CODEC))
