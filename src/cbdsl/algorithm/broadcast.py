"""Versions of w^g: encodes each for the workers, and decodes uploads against the version they belong to.

Version 0 is a vector of zeros, which every worker has. Each later w^g is sent as its difference to the one before. If
an upload becomes w^g and was packed against that version, its own bytes are relayed, so that workers get the model that
was verified. Otherwise the server encodes the model, and w^g is what the bytes decode to. Every few versions w^g is
sent whole (a keyframe), for workers that were away. Without a codec every version is whole.
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
    """An upload against a w^g that the server no longer keeps; an honest worker can send one."""


@dataclass(frozen=True, eq=False)
class EncodedModel:
    """A model as workers will have it, and the bytes that encode it."""

    model: Floats  # (D,)
    update: bytes  # empty: it is sent whole


def encode_model(model: Floats, state: ServerState, codecs: Codecs, score: Score | None = None) -> EncodedModel:
    """Encode a model that the server made, (D,). score: for codecs that measure what a bit costs."""
    if not codecs.down.relative:
        return EncodedModel(model, b"")

    def scores(rows: Floats) -> Doubles:
        return np.full(len(rows), np.nan) if score is None else np.array([score(row) for row in rows])

    first = state.version == 0
    codec, reference = (FIRST_CODEC, np.zeros_like(model)) if first else (codecs.down, state.global_best)
    sent = codec.transmit(model[None], reference, scores)
    pack = codec.encode_pack(sent.packs[0], len(model))
    return EncodedModel(sent.models[0], bytes([FIRST if first else MADE]) + pack)


def relay_upload(model: Floats, upload: bytes | Floats, state: ServerState, codecs: Codecs) -> EncodedModel | None:
    """Return an upload's model with its own bytes, or None if not all workers can decode them."""
    if isinstance(upload, np.ndarray) or not codecs.down.relative:
        return None
    version, content = unwrap_version(upload)
    return EncodedModel(model, bytes([RELAYED]) + content) if version == state.version else None


def adopt_model(state: ServerState, new: EncodedModel, codecs: Codecs) -> ServerState:
    """Return the server with its next w^g, not sent to any worker yet; with the current one if it cannot be sent."""
    if new.update and not np.isfinite(new.model).all():
        return state
    version, model = state.version + 1, np.array(new.model, np.float32)  # not a worker's own row, which will change
    kept = (*state.references, model)[-KEPT_VERSIONS:] if codecs.up.relative or codecs.down.relative else ()
    updates = (*state.updates, new.update)[-KEPT_VERSIONS:] if codecs.down.relative else ()
    return replace(state, global_best=model, version=version, references=kept, updates=updates)


def decode_upload(upload: bytes | Floats, state: ServerState, codecs: Codecs, size: int) -> Floats:
    """Decode an upload to (size,); raise CodecError if it is not a model, `StaleError` if its w^g is gone."""
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
    """Return the size of an upload in bytes."""
    return NUMBER_BYTES * upload.size if isinstance(upload, np.ndarray) else len(upload)


def bytes_to_catch_up(state: ServerState, told: int, message: Floats, codecs: Codecs) -> int:
    """Return the bytes that a worker with version `told` receives: the updates since, or a keyframe before them."""
    if not codecs.down.relative:
        return NUMBER_BYTES * message.size
    first = state.version - len(state.updates)  # the updates lead on from there
    away = told < first
    start = keyframe_before(state.version) if away else told
    whole = NUMBER_BYTES * message.size if away else 0
    return whole + sum(len(update) for update in state.updates[start - first :])


def keyframe_before(version: int) -> int:
    """Return the last version that was sent whole; version 0, all zeros, need not be."""
    return version - version % KEPT_VERSIONS


def keyframe_of(state: ServerState) -> Floats | None:
    """Return the last version that was sent whole, (D,), where differences are sent; None if that was all zeros."""
    age = state.version - keyframe_before(state.version)
    return state.references[-1 - age] if state.updates and age < state.version else None
