"""What a worker keeps between rounds and restarts: written whole, before the claim that rests on it is sent."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.deploy.wire import digest_of
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
            return Memory(run, worker, int(meta["round"]), particles, claim)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, error)
            return None

    def last(self) -> tuple[bytes, int] | None:
        """The run and round of the state, whichever run it is of."""
        try:
            with np.load(self._state, allow_pickle=False) as stored:
                meta = json.loads(str(stored["meta"]))
            return bytes.fromhex(meta["run"]), int(meta["round"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None

    def save_shared(self, content: bytes) -> None:
        """Keep the shared samples as they came."""
        write_atomically(self._shared, content)

    def load_shared(self, digest: bytes) -> bytes | None:
        """The shared samples with this hash, if they are here."""
        content = self._shared.read_bytes() if self._shared.exists() else b""
        return content if content and digest_of(content) == digest else None
