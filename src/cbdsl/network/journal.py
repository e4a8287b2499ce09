"""What the server heard in the round it is playing, so that a round cut off by a crash ends as it would have ended.

Claims, uploads and back_offs are written before anything is decided on them. A server that starts again plays the round
again with what is written here: who was refuted is refuted again, what was accepted is accepted again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cbor2
import numpy as np

from cbdsl.algorithm.messages import Claim, Upload, WorkerId
from cbdsl.network.wire import DIGEST_BYTES, digest_of, weights_from_bytes, weights_to_bytes
from cbdsl.util.files import private_file
from cbdsl.util.formatting import format_bytes

_log = logging.getLogger("cbdsl.deploy")

_HEADER = DIGEST_BYTES + 4


class Journal:
    """An append-only file for one round; the next round starts it afresh."""

    def __init__(self, path: Path) -> None:
        """Read what an earlier process left; what is damaged, and whatever follows it, is as if it were not there.

        Then those workers are asked again: it costs them time, and nobody a verdict.
        """
        self._path = path
        self._round = 0
        self.claims: Mapping[WorkerId, Claim] | None = None
        self.uploads: dict[WorkerId, Upload | None] = {}  # none: invited and silent
        whole = kept = 0
        content = path.read_bytes() if path.exists() else b""
        for payload, end in _entries(content):
            try:
                self._take(cbor2.loads(payload))
            except Exception:  # whatever a foreign entry leads the decoder to
                break
            whole, kept = end, kept + 1
        if whole != len(content):
            _log.warning(
                "%s: the last %s are damaged or cut off and are left out; %d %s kept, and workers are asked again for "
                "what is missing",
                path, format_bytes(len(content) - whole), kept, "entry is" if kept == 1 else "entries are",
            )  # fmt: skip
            with path.open("r+b") as file:
                file.truncate(whole)

    def begin(self, round_number: int) -> None:
        """Start a round, unless it is the one this journal is of."""
        if self._round != round_number:
            self._path.unlink(missing_ok=True)
            self._round, self.claims, self.uploads = round_number, None, {}

    def note_claims(self, claims: Mapping[WorkerId, Claim]) -> None:
        """Write down who claimed what."""
        rows = [[worker, claim.score, claim.commitment] for worker, claim in sorted(claims.items())]
        self._append([self._round, "claims", rows])
        self.claims = dict(claims)

    def note_upload(self, worker: WorkerId, upload: Upload | None) -> None:
        """Write down an upload, or that an invited worker stayed silent."""
        numbers = isinstance(upload, np.ndarray)
        content = weights_to_bytes(upload) if isinstance(upload, np.ndarray) else upload
        self._append([self._round, "upload", [worker, content, numbers]])
        self.uploads[worker] = upload

    def _take(self, entry: list[Any]) -> None:
        round_number, kind, content = entry
        if round_number != self._round:
            self._round, self.claims, self.uploads = round_number, None, {}
        if kind == "claims":
            self.claims = {worker: Claim(score, commitment) for worker, score, commitment in content}
        else:
            worker, upload, numbers = content
            self.uploads[worker] = weights_from_bytes(upload) if numbers else upload

    def _append(self, entry: list[Any]) -> None:
        payload = cbor2.dumps(entry)
        with private_file(self._path, "ab") as file:
            file.write(digest_of(payload) + len(payload).to_bytes(4, "big") + payload)
            file.flush()
            os.fsync(file.fileno())


def _entries(content: bytes) -> list[tuple[bytes, int]]:
    """The whole entries of a journal, each with the place where it ends."""
    entries: list[tuple[bytes, int]] = []
    position = 0
    while position + _HEADER <= len(content):
        digest = content[position : position + DIGEST_BYTES]
        start = position + _HEADER
        end = start + int.from_bytes(content[position + DIGEST_BYTES : start], "big")
        payload = content[start:end]
        if len(payload) != end - start or digest_of(payload) != digest:
            break
        entries.append((payload, end))
        position = end
    return entries
