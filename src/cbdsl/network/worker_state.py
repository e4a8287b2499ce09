"""The state of a worker after a round, and the folder in which it is kept."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbdsl.algorithm.messages import Claim
from cbdsl.algorithm.particles import Particles
from cbdsl.arrays import Floats, NamedArrays
from cbdsl.network.wire import (
    MAX_ROUND,
    NO_DIGEST,
    RUN_BYTES,
    digest_of,
)
from cbdsl.util.files import private_folder, write_atomically
from cbdsl.util.formatting import single_line
from cbdsl.util.npz import array_names, load_arrays
from cbdsl.util.serialize import Bounds, from_plain, to_plain

_log = logging.getLogger("cbdsl.network")

README = """\
The state of a worker (`cbdsl work --state`), from which it continues after a stop. Nothing here is ever sent whole.

README.txt         this page
state.npz          position, velocity and best model after the last round, and what was claimed; without it the worker
                   starts from the global model
shared.bin         the shared samples as the server sent them, so that they are fetched once
model.safetensors  the trained model of the last run; `cbdsl predict` and `cbdsl export` use it
wire.json          bytes on this worker's connection, by direction and kind of message
samples.npz        its own samples, and worker.log its messages, where `cbdsl swarm` put them here
.NAME.partial      a file that was being written when the process was killed; it may be removed
"""

_MOST_META = 16384  # bytes of what is not a model
_MOST_VECTORS = 8  # in a message that an attacker received, or in its memory
_MEMORY = "memory."


@dataclass(frozen=True, eq=False)
class WorkerState:
    """A worker after a round."""

    run: bytes
    worker: int
    round: int
    particles: Particles  # one row
    claim: Claim | None  # what it claimed; None where everybody uploads
    version: int  # of the w^g that it had
    model_digest: bytes  # of that one's numbers
    received: Floats | None = None  # what the server sent, (V D,); attackers alone need it
    initial: Floats | None = None  # the model that it started from, (D,); attackers alone need it
    memory: NamedArrays = field(default_factory=dict)  # an attacker's memory


@dataclass(frozen=True)
class _StateMeta:
    """What the file of a state holds beside arrays."""

    run: Annotated[bytes, Bounds(RUN_BYTES, RUN_BYTES)]
    worker: int
    round: Annotated[int, Bounds(0, MAX_ROUND)]
    claim: tuple[str, bytes] | None  # the score as a hexadecimal float, and the commitment
    version: int
    model: bytes  # digest


class StateSummary(NamedTuple):
    """Run, round and model version of a saved state."""

    run: bytes
    round: int
    version: int
    model_digest: bytes


_NEVER = StateSummary(bytes(RUN_BYTES), 0, 0, NO_DIGEST)


class WorkerStateFolder:
    """The folder of one worker."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._state, self._shared = folder / "state.npz", folder / "shared.bin"
        self._shared_digest: bytes | None = None  # of the file's content; None: not read yet
        self.ledger = folder / "wire.json"
        with contextlib.suppress(OSError):  # no state is lost without it
            write_atomically(folder / "README.txt", README.encode(), private=True)

    def save(self, state: WorkerState) -> None:
        """Write the state atomically."""
        claim = state.claim
        made = None if claim is None else (float(claim.score).hex(), claim.commitment)
        meta = to_plain(_StateMeta(state.run, state.worker, state.round, made, state.version, state.model_digest))
        arrays = {**vars(state.particles), "received": state.received, "initial": state.initial}
        there = {name: array for name, array in arrays.items() if array is not None}
        there |= {f"{_MEMORY}{name}": array for name, array in state.memory.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, meta=np.array(json.dumps(meta)), **there)
        write_atomically(self._state, buffer.getbuffer(), private=True)

    def load(self, run: bytes, worker: int, size: int, pack: int) -> WorkerState | None:
        """Return the state of this run, or None if there is none that can be used. pack: bytes of a packed model."""
        if not self._state.exists():
            return None
        try:
            meta = self._meta()
            if (meta.run, meta.worker) != (run, worker):
                return None
            claim = None if meta.claim is None else Claim(float.fromhex(meta.claim[0]), meta.claim[1])
            arrays = self._arrays(size, pack)
            received, initial = arrays.pop("received", None), arrays.pop("initial", None)
            memory = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_MEMORY)}
            return WorkerState(
                run, worker, meta.round, Particles(**arrays), claim, meta.version, meta.model, received, initial,
                {name.removeprefix(_MEMORY): array for name, array in memory.items()},
            )  # fmt: skip
        except Exception as error:  # damaged content fails in many ways, and none may stop the worker
            text = single_line(str(error)) or type(error).__name__
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, text)
            return None

    def last(self) -> StateSummary:
        """Return run, round and model version of the saved state, whichever run it is of; zeros if there is none."""
        try:
            meta = self._meta()
            return StateSummary(meta.run, meta.round, meta.version, meta.model)
        except Exception:  # as above; `load` logs what is wrong with it
            return _NEVER

    def forget(self) -> None:
        """Delete the saved state."""
        self._state.unlink(missing_ok=True)

    def save_shared(self, content: bytes) -> None:
        """Write the shared samples as they were received."""
        write_atomically(self._shared, content, private=True)
        self._shared_digest = digest_of(content)

    def load_shared(self, digest: bytes, size: int) -> bytes | None:
        """Return the shared samples with this hash and size in bytes, or None."""
        if not self._shared.exists() or self._shared.stat().st_size != size:
            return None
        if self._shared_digest not in {None, digest}:
            return None
        content = self._shared.read_bytes()
        self._shared_digest = digest_of(content)
        return content if self._shared_digest == digest else None

    def _meta(self) -> _StateMeta:
        return from_plain(_StateMeta, json.loads(str(load_arrays(self._state, ["meta"], most=_MOST_META)["meta"])))

    def _arrays(self, size: int, pack: int) -> dict[str, NDArray[Any]]:
        """Read one worker's particles and, of an attacker, what the server sent and the initial model."""
        most = 4 * size * (4 + 2 * _MOST_VECTORS) + pack + 4096
        memory = [name for name in array_names(self._state) if name.startswith(_MEMORY)]
        optional = ("received", "initial", *memory)
        arrays = load_arrays(self._state, [each.name for each in fields(Particles)], optional, most=most)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(arrays, (1, size))
        shapes |= {"personal_score": (1,), "versions": (1,), "packs": (1, pack), "initial": (size,)}
        if "received" in arrays:
            shapes["received"] = (arrays["received"].size,)
        kinds = {"personal_score": np.float64, "versions": np.int32, "packs": np.uint8}
        for name, array in arrays.items():
            if name not in memory and (array.shape != shapes[name] or array.dtype != kinds.get(name, np.float32)):
                raise ValueError("a model of the wrong size")
        return arrays
