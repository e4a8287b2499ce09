"""How models cross the gap: w^g to the workers, version by version, and uploads against the version they belong to.

Version 0 is a vector of zeros, which everybody has. Every later w^g goes out as its difference to the one before:
the winner's own bytes where they were packed against that (relayed, so nobody gets another model than was verified),
otherwise encoded here; then what the bytes decode to is w^g, for the server too. Now and then a version is put out
whole (a keyframe), for those who were away. Without a codec every version is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cbdsl.algorithm.ledger import NUMBER_BYTES
from cbdsl.algorithm.messages import ServerState
from cbdsl.algorithm.verification import Score
from cbdsl.arrays import Doubles, Floats
from cbdsl.codecs.envelope import FIRST, FIRST_CODEC, KEPT_VERSIONS, MADE, RELAYED, Codecs, unwrap_version

STALE = "packed against a global model that is gone"


class StaleError(Exception):
    """An upload against a w^g that the server no longer keeps. Nobody's fault."""


@dataclass(frozen=True, eq=False)
class EncodedModel:
    """A model as everybody will have it, and the bytes that take it there."""

    model: Floats  # (D,)
    update: bytes  # empty: it goes whole


def encode_model(model: Floats, state: ServerState, codecs: Codecs, score: Score | None = None) -> EncodedModel:
    """A model that the server made, (D,), as it will arrive. score: for codecs that measure what a bit costs."""
    if not codecs.down.relative:
        return EncodedModel(model, b"")

    def scores(rows: Floats) -> Doubles:
        return np.full(len(rows), np.nan) if score is None else np.array([score(row) for row in rows])

    first = state.version == 0
    codec, reference = (FIRST_CODEC, np.zeros_like(model)) if first else (codecs.down, state.global_best)
    sent = codec.sent(model[None], reference, scores)
    return EncodedModel(sent.models[0], bytes([FIRST if first else MADE]) + codec.closed(sent.packs[0], len(model)))


def relay_upload(model: Floats, upload: bytes | Floats, state: ServerState, codecs: Codecs) -> EncodedModel | None:
    """One worker's model with the bytes it came in; none if not everybody can decode them."""
    if isinstance(upload, np.ndarray) or not codecs.down.relative:
        return None
    version, content = unwrap_version(upload)
    return EncodedModel(model, bytes([RELAYED]) + content) if version == state.version else None


def adopt_model(state: ServerState, new: EncodedModel, codecs: Codecs) -> ServerState:
    """The server with its next w^g, which nobody has been told yet; with the present one if the next cannot be sent."""
    if new.update and not np.isfinite(new.model).all():
        return state
    version, model = state.version + 1, np.array(new.model, np.float32)  # not a worker's own row, which will change
    kept = (*state.references, model)[-KEPT_VERSIONS:] if codecs.up.relative or codecs.down.relative else ()
    updates = (*state.updates, new.update)[-KEPT_VERSIONS:] if codecs.down.relative else ()
    return replace(state, global_best=model, version=version, references=kept, updates=updates)


def decode_upload(upload: bytes | Floats, state: ServerState, codecs: Codecs, size: int) -> Floats:
    """The numbers in an upload, (size,); CodecError if there are none, `StaleError` if its w^g is gone."""
    if isinstance(upload, np.ndarray):
        return upload
    if not codecs.up.relative:
        return codecs.up.decode(upload, np.broadcast_to(np.float32(0), size))
    version, content = unwrap_version(upload)
    place = version - (state.version + 1 - len(state.references))
    if not 0 <= place < len(state.references):
        raise StaleError
    return codecs.up.decode(content, state.references[place])


def bytes_of(upload: bytes | Floats) -> int:
    """How many bytes an upload took."""
    return NUMBER_BYTES * upload.size if isinstance(upload, np.ndarray) else len(upload)


def bytes_to_catch_up(state: ServerState, told: int, message: Floats, codecs: Codecs) -> int:
    """How many bytes a worker gets that last heard of version `told`: the updates since, or a keyframe before them."""
    if not codecs.down.relative:
        return NUMBER_BYTES * message.size
    first = state.version - len(state.updates)  # the updates lead on from there
    away = told < first
    start = keyframe_before(state.version) if away else told
    whole = NUMBER_BYTES * message.size if away else 0
    return whole + sum(len(update) for update in state.updates[start - first :])


def keyframe_before(version: int) -> int:
    """The last version that was put out whole; version 0, all zeros, need not be."""
    return version - version % KEPT_VERSIONS


def keyframe_of(state: ServerState) -> Floats | None:
    """The last version that was put out whole, (D,), where differences are sent; none if that was all zeros."""
    age = state.version - keyframe_before(state.version)
    return state.references[-1 - age] if state.updates and age < state.version else None
