"""Random losses of state on real processes: nobody honest is ever banned, and the run goes on."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from support.deployment import Deployment, brokers, deployment, pictures, tiny_spec, wait_until

pytestmark = pytest.mark.slow

SHORT, LONG = 12, 200  # mishaps
ROUNDS = 4000  # more than there is time for


class Misfortune:
    """What can happen to devices and to the server's folder; each method is one mishap."""

    def __init__(self, made: Deployment, seed: int) -> None:
        self.made, self.rng = made, random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.banned: list[int] = []
        self.uploads = 0
        self._copies: dict[str, bytes] = {}  # of older states, as a backup or a cloned card has them
        self._backup = made.folder / "backup"
        self._twins: list[subprocess.Popen[bytes]] = []

    def strike(self) -> None:
        """One more, drawn at random."""
        happen = self.rng.choice(
            [self.deleted, self.deleted, self.flipped, self.cut, self.restored, self.cloned, self.frozen, self.set_back]
        )
        happen()
        self.happened[happen.__name__] += 1

    def _state(self, name: str) -> Path:
        return self.made.folder / "workers" / name / "state.npz"

    def _rebirth(self, change: bool = True) -> tuple[str, Path]:
        """A worker dies, at whatever moment that is; `change` its state before it is started again."""
        name = self.rng.choice(self.made.names)
        wait_until(self._state(name).exists)
        if self.rng.random() < 0.3:
            self._copies[name] = self._state(name).read_bytes()
        self.made.kill_worker(name)
        if not change:
            self.made.start_worker(name)
        return name, self._state(name)

    def deleted(self) -> None:
        name, state = self._rebirth()
        state.unlink(missing_ok=True)
        self.made.start_worker(name)

    def flipped(self) -> None:
        name, state = self._rebirth()
        content = bytearray(state.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        state.write_bytes(content)
        self.made.start_worker(name)

    def cut(self) -> None:
        name, state = self._rebirth()
        state.write_bytes(state.read_bytes()[: self.rng.randrange(state.stat().st_size)])
        self.made.start_worker(name)

    def restored(self) -> None:
        name, state = self._rebirth()
        state.write_bytes(self._copies.get(name, state.read_bytes()))
        self.made.start_worker(name)

    def cloned(self) -> None:
        """A second process under the same name with an older state, or none; the first one does not know."""
        name = self.rng.choice(self.made.names)
        home = self.made.folder / "workers" / name
        twin = self.made.folder / f"twin-{self.happened['cloned']}"
        twin.mkdir()
        shutil.copy(home / "samples.npz", twin / "samples.npz")
        if name in self._copies:
            (twin / "state.npz").write_bytes(self._copies[name])
        self._twins.append(self.made.twin(name, twin))
        if len(self._twins) > 3:
            self._end(self._twins.pop(0))

    def frozen(self) -> None:
        """A device that sleeps for a while and does not know it: for it, the clock jumps."""
        process = self.made.workers[self.rng.choice(self.made.names)]
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.5, 3.0))
        process.send_signal(signal.SIGCONT)

    def set_back(self) -> None:
        """The server's machine fails, and its folder is restored from a backup that some rounds are missing in."""
        self.made.kill_server()
        self.look()
        if self._backup.exists() and self.rng.random() < 0.7:
            shutil.rmtree(self.made.out)
            shutil.copytree(self._backup, self.made.out)
        else:
            shutil.rmtree(self._backup, ignore_errors=True)
            shutil.copytree(self.made.out, self._backup)
        self.made.start_server(*PACE)

    def look(self) -> None:
        """Who was banned so far; what a backup makes undone was done all the same."""
        for line in (self.made.out / "rounds.jsonl").read_text().splitlines():
            record = json.loads(line)
            self.banned += record["banned"]
            self.uploads += record["uploads"]

    def end(self) -> None:
        for twin in self._twins:
            self._end(twin)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait()


PACE = ("--round-seconds", "6", "--upload-seconds", "2", "--join-seconds", "3", "--least-seconds", "2",
        "--grace-seconds", "1")  # fmt: skip


@pytest.mark.parametrize(
    ("mishaps", "codec"),
    [
        (SHORT, "q4"),
        pytest.param(LONG // 2, "none", marks=pytest.mark.hostile),
        pytest.param(LONG // 2, "q4", marks=pytest.mark.hostile),
    ],
)
def test_nobody_honest_is_banned_whatever_is_lost(mishaps: int, codec: str, tmp_path: Path) -> None:
    spec = tiny_spec(
        pictures(tmp_path / "data"), workers=6, rounds=ROUNDS, swarm__inertia=0.9, codec__up=codec, codec__down=codec,
        defence__commitment=True, selection__name="soup", selection__k=3,
    )  # fmt: skip
    with deployment(tmp_path, spec, brokers()[0]) as made:
        made.start_workers()
        made.start_server(*PACE)
        misfortune = Misfortune(made, seed=mishaps)
        try:
            wait_until(lambda: made.rounds_played() >= 2)
            for _ in range(mishaps):
                misfortune.strike()
                time.sleep(misfortune.rng.uniform(0.0, 0.6))
            before = made.rounds_played()
            wait_until(lambda: made.rounds_played() >= before + 3 or made.server_ended())
            assert not made.server_ended(), (made.folder / "server.log").read_text()[-3000:]
        finally:
            misfortune.end()
        made.kill_server()
        misfortune.look()
        assert misfortune.uploads > 0
        assert misfortune.banned == [], (made.folder / "server.log").read_text()[-3000:]
