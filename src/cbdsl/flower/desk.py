"""A worker's files at a node: what it keeps from one message to the next, because nothing else outlives a message.

A ClientApp may be another process every time, and what Flower keeps for it is lost with the node. Every file is written
whole, and those that a claim rests on before the claim is sent. For its owner's eyes alone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.data import cache
from cbdsl.deploy import wire
from cbdsl.deploy.memory import Keeper
from cbdsl.deploy.wire import Announcement
from cbdsl.files import private_folder, write_atomically


class Desk:
    """The folder of one worker in one run."""

    def __init__(self, state: str, run: bytes, worker: int) -> None:
        """state: the folder that the node's owner gives to all runs; empty: in the user's cache folder."""
        self._run = (Path(state).expanduser() if state else cache.folder() / "flower") / run.hex()
        self.folder = self._run / f"worker-{worker}"

    @property
    def samples(self) -> Path:
        """The samples that were dealt to it."""
        return self.folder / "samples.npz"

    @property
    def keeper(self) -> Keeper:
        """Its particle and the shared samples; the folder is made if need be."""
        private_folder(self._run)
        return Keeper(self.folder)

    def take_up(self, announcement: Announcement, dealt: str, shared: bytes) -> bytes:
        """Keep what the server announces; gives the worker's token, by which it is known if its node is another one."""
        keeper = self.keeper
        if shared:
            keeper.save_shared(shared)
        write_atomically(self.folder / "dealt.toml", dealt.encode(), private=True)
        write_atomically(self.folder / "announcement", wire.encode(announcement), private=True)
        token = self._read("token")
        if len(token) != wire.SESSION_BYTES:
            token = os.urandom(wire.SESSION_BYTES)
            write_atomically(self.folder / "token", token, private=True)
        return token

    def announced(self) -> tuple[Announcement, str] | None:
        """What was announced, and the spec by which samples are dealt (empty: it has its own); none: nothing was."""
        content = self._read("announcement")
        return (wire.decode(content, Announcement), self._read("dealt.toml").decode()) if content else None

    def held(self) -> tuple[bytes, Floats]:
        """w^g as it came last, (V D,), and its hash; empty if there is none, or none that can be used."""
        content = self._read("global")
        return (wire.digest_of(content), wire.weights_from_bytes(content)) if content else (b"", np.empty(0, "f4"))

    def hold(self, model: Floats) -> None:
        """Keep w^g."""
        write_atomically(self.folder / "global", wire.weights_to_bytes(model), private=True)

    def lay_out(self, round_number: int, upload: bytes | None) -> None:
        """Keep what it uploads in a round if it is asked to; none: it stays silent."""
        for old in self.folder.glob("upload-*"):
            old.unlink(missing_ok=True)
        if upload is not None:
            content = wire.digest_of(upload) + upload
            write_atomically(self.folder / f"upload-{round_number}", content, private=True)

    def laid_out(self, round_number: int) -> bytes | None:
        """What it uploads in a round; none also if the file is damaged: a half of a model is not what was claimed."""
        content = self._read(f"upload-{round_number}")
        digest, upload = content[: wire.DIGEST_BYTES], content[wire.DIGEST_BYTES :]
        return upload if digest and digest == wire.digest_of(upload) else None

    def clear(self) -> None:
        """The run is over: keep nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._run.is_dir() and not any(self._run.iterdir()):
            shutil.rmtree(self._run, ignore_errors=True)

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else b""
