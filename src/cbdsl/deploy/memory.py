"""What a worker keeps between rounds and restarts: written whole, before the claim that rests on it is sent."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbdsl.deploy.wire import DIGEST_BYTES, RUN_BYTES, digest_of
from cbdsl.files import write_atomically
from cbdsl.protocol.messages import Claim
from cbdsl.workers.swarm import Particles

_log = logging.getLogger("cbdsl.deploy")


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


_NEVER = Last(bytes(RUN_BYTES), 0, 0, bytes(DIGEST_BYTES))


class Keeper:
    """The folder of one worker."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._state, self._shared = folder / "state.npz", folder / "shared.bin"
        self.ledger = folder / "wire.json"

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
        write_atomically(self._state, buffer.getvalue())

    def load(self, run: bytes, worker: int, size: int, pack: int) -> Memory | None:
        """The state of this run; none if there is none, or none that can be used. pack: bytes of a packed model."""
        if not self._state.exists():
            return None
        try:
            with np.load(self._state, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            meta = json.loads(str(arrays.pop("meta")))
            if meta["run"] != run.hex() or meta["worker"] != worker:
                return None
            claim = meta["claim"] and Claim(float.fromhex(meta["claim"][0]), bytes.fromhex(meta["claim"][1]))
            particles = Particles(**arrays)
            models = particles.positions, particles.velocities, particles.personal_best
            if any(rows.shape != (1, size) for rows in models) or particles.packs.shape != (1, pack):
                raise ValueError("a model of the wrong size")
            digest = bytes.fromhex(meta["model"])
            return Memory(run, worker, int(meta["round"]), particles, claim, int(meta["version"]), digest)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, error)
            return None

    def last(self) -> Last:
        """What the state is of, whichever run that is; zeros if there is none."""
        try:
            with np.load(self._state, allow_pickle=False) as stored:
                meta = json.loads(str(stored["meta"]))
            run, digest = bytes.fromhex(meta["run"]), bytes.fromhex(meta["model"])
            return Last(run, int(meta["round"]), int(meta["version"]), digest)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return _NEVER

    def forget(self) -> None:
        """Have no state any more."""
        self._state.unlink(missing_ok=True)

    def save_shared(self, content: bytes) -> None:
        """Keep the shared samples as they came."""
        write_atomically(self._shared, content)

    def load_shared(self, digest: bytes) -> bytes | None:
        """The shared samples with this hash, if they are here."""
        content = self._shared.read_bytes() if self._shared.exists() else b""
        return content if content and digest_of(content) == digest else None
