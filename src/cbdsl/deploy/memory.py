"""What a worker keeps between rounds and restarts: written whole, before the claim that rests on it is sent.

For its owner's eyes alone. Whatever is found in the folder, reading it takes no more memory than the state of this run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbdsl.deploy.wire import NO_DIGEST, RUN_BYTES, digest_of
from cbdsl.files import private_folder, write_atomically
from cbdsl.protocol.messages import Claim
from cbdsl.text import one_line
from cbdsl.workers.swarm import Particles

_log = logging.getLogger("cbdsl.deploy")

README = """\
The state of a worker (`cbdsl work --state`); with it the worker goes on after a stop. Nothing here is ever sent whole.

README.txt         this page
state.npz          position, velocity and best model after the last round, and what was claimed; without it the worker
                   starts from the global model
shared.bin         the shared samples as the server sent them, so that they are fetched once
model.safetensors  the trained model of the last run; `cbdsl predict` and `cbdsl export` use it
wire.json          bytes on this worker's connection, by direction and kind of message
samples.npz        its own samples, and worker.log what it said, where `cbdsl swarm` put them here
.NAME.partial      a file that was being written when the process was killed; it may be removed
"""

_MOST_META = 4096  # bytes of what is not a model
_HEADER = 4096  # bytes that describe an array, at most


@dataclass(frozen=True, eq=False)
class Memory:
    """A worker after a round."""

    run: bytes
    worker: int
    round: int
    particles: Particles  # one row
    claim: Claim | None  # what it said; none in FedAvg
    version: int  # of the w^g that it had
    model_digest: bytes  # of that one's numbers


class Last(NamedTuple):
    """The state on disk, in a few words."""

    run: bytes
    round: int
    version: int
    model_digest: bytes


_NEVER = Last(bytes(RUN_BYTES), 0, 0, NO_DIGEST)


class Keeper:
    """The folder of one worker."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._state, self._shared = folder / "state.npz", folder / "shared.bin"
        self._shared_digest: bytes | None = None  # of what is in the file; none: not looked at yet
        self.ledger = folder / "wire.json"
        with contextlib.suppress(OSError):  # no state is lost without it
            write_atomically(folder / "README.txt", README.encode(), private=True)

    def save(self, memory: Memory) -> None:
        """Write the state whole, or leave the old one."""
        claim = memory.claim
        meta = {
            "run": memory.run.hex(),
            "worker": memory.worker,
            "round": memory.round,
            "claim": None if claim is None else [float(claim.score).hex(), claim.commitment.hex()],
            "version": memory.version,
            "model": memory.model_digest.hex(),
        }
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, meta=np.array(json.dumps(meta)), **vars(memory.particles))
        write_atomically(self._state, buffer.getbuffer(), private=True)

    def load(self, run: bytes, worker: int, size: int, pack: int) -> Memory | None:
        """The state of this run; none if there is none, or none that can be used. pack: bytes of a packed model."""
        if not self._state.exists():
            return None
        try:
            with zipfile.ZipFile(self._state) as stored:
                meta = _meta(stored)
                if meta["run"] != run.hex() or meta["worker"] != worker:
                    return None
                claim = meta["claim"] and Claim(float.fromhex(meta["claim"][0]), bytes.fromhex(meta["claim"][1]))
                models = ("positions", "velocities", "personal_best")
                arrays = {name: _array(stored, name, (1, size), np.float32) for name in models}
                particles = Particles(
                    **arrays,
                    personal_score=_array(stored, "personal_score", (1,), np.float64),
                    packs=_array(stored, "packs", (1, pack), np.uint8),
                    versions=_array(stored, "versions", (1,), np.int32),
                )
                digest = bytes.fromhex(meta["model"])
                return Memory(run, worker, int(meta["round"]), particles, claim, int(meta["version"]), digest)
        except Exception as error:  # a damaged archive fails in many ways; no state is worth any of them
            text = one_line(str(error)) or type(error).__name__
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, text)
            return None

    def last(self) -> Last:
        """What the state is of, whichever run that is; zeros if there is none."""
        try:
            with zipfile.ZipFile(self._state) as stored:
                meta = _meta(stored)
            run, digest = bytes.fromhex(meta["run"]), bytes.fromhex(meta["model"])
            return Last(run, int(meta["round"]), int(meta["version"]), digest)
        except Exception:  # as above; whoever wants to use the state says what is wrong with it
            return _NEVER

    def forget(self) -> None:
        """Have no state any more."""
        self._state.unlink(missing_ok=True)

    def save_shared(self, content: bytes) -> None:
        """Keep the shared samples as they came."""
        write_atomically(self._shared, content, private=True)
        self._shared_digest = digest_of(content)

    def load_shared(self, digest: bytes, size: int) -> bytes | None:
        """The shared samples with this hash and of so many bytes, if they are here."""
        if not self._shared.exists() or self._shared.stat().st_size != size:
            return None
        if self._shared_digest not in {None, digest}:
            return None
        content = self._shared.read_bytes()
        self._shared_digest = digest_of(content)
        return content if self._shared_digest == digest else None


def _meta(stored: zipfile.ZipFile) -> dict[str, Any]:
    meta = json.loads(str(_read(stored, "meta", _MOST_META)))
    if not isinstance(meta, dict) or not 0 <= int(meta["round"]) < 2**31 or len(bytes.fromhex(meta["run"])) != 8:
        raise ValueError("a state that makes no sense")
    return meta


def _array(stored: zipfile.ZipFile, name: str, shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
    array = _read(stored, name, int(np.prod(shape)) * np.dtype(kind).itemsize)
    if array.shape != shape or array.dtype != kind:
        raise ValueError("a model of the wrong size")
    return array


def _read(stored: zipfile.ZipFile, name: str, most: int) -> NDArray[Any]:
    """An array of at most so many bytes, by what the archive says of it and by what its header says."""
    entry = stored.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most + _HEADER:
        raise ValueError("an array of the wrong size")
    content = io.BytesIO(stored.read(entry))
    if np.lib.format.read_magic(content) != (1, 0):
        raise ValueError("an array of another format")
    shape, _, kind = np.lib.format.read_array_header_1_0(content, max_header_size=_HEADER)
    if kind.hasobject or entry.file_size - content.tell() != int(np.prod(shape, dtype=object)) * kind.itemsize:
        raise ValueError("an array of the wrong size")
    return np.frombuffer(content.getbuffer(), kind, offset=content.tell()).reshape(shape).copy()
