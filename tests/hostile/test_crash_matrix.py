"""kill -9 of workers, server and broker at random moments: whatever dies, a run ends with the simulator's numbers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment import Deployment, assert_as_simulated, brokers, deployment, pictures, tiny_spec, wait_until

FEW, MANY = 5, 10  # kills
APART = 3  # rounds from one kill to the next, at most
PATIENT = ("--round-seconds", "600", "--upload-seconds", "600", "--join-seconds", "600", "--grace-seconds", "600",
           "--least-seconds", "600")  # fmt: skip
METHODS: dict[str, dict[str, object]] = {
    "best": {"method": "cb-dsl"},
    "soup": {"method": "cb-dsl", "selection__name": "soup", "selection__k": 3},
    "fedavg": {"method": "fedavg"},
    "rotation": {"method": "restart", "selection__name": "rotation", "selection__k": 2, "defence__guard": True},
}


class Reaper:
    """Kills one after the other, and starts each again at once; some while another is still on its way back."""

    def __init__(self, made: Deployment, seed: str) -> None:
        self._made, self._rng = made, random.Random(seed)
        self.killed: Counter[str] = Counter()

    def strike(self) -> None:
        """Kill somebody, within the next few rounds, at whatever moment of a round that is."""
        made, rng = self._made, self._rng
        stop = made.rounds_played() + rng.randint(0, APART - 1)
        wait_until(lambda: made.rounds_played() >= stop or made.server_ended(), 300)
        time.sleep(rng.uniform(0.0, 0.05))
        assert not made.server_ended(), (made.folder / "server.log").read_text()[-3000:]
        kill: Callable[[], None] = rng.choice([self._worker, self._worker, self._worker, self._server, self._broker])
        kill()
        self.killed[kill.__name__.strip("_")] += 1

    def _worker(self) -> None:
        name = self._rng.choice(self._made.names)
        self._made.kill_worker(name)
        self._made.start_worker(name)

    def _server(self) -> None:
        self._made.kill_server()
        self._made.start_server(*PATIENT)

    def _broker(self) -> None:
        self._made.kill_broker()


@pytest.mark.parametrize(
    ("kills", "codec", "method"),
    [
        (FEW, "q4", "soup"),
        *(
            pytest.param(MANY, codec, method, marks=pytest.mark.hostile)
            for codec in ("none", "q4")
            for method in METHODS
        ),
    ],
)
def test_whatever_is_killed_no_number_changes(kills: int, codec: str, method: str, tmp_path: Path) -> None:
    rounds = 2 * APART * kills  # a run that is over before its last kill fails
    spec = tiny_spec(
        pictures(tmp_path / "data"), workers=5, rounds=rounds, codec__up=codec, codec__down=codec, **METHODS[method]
    )
    with deployment(tmp_path, spec, brokers()[0]) as made:
        started = time.monotonic()
        made.start_workers()
        made.start_server(*PATIENT)
        reaper = Reaper(made, f"{kills} {codec} {method}")
        wait_until(lambda: made.rounds_played() >= 1, 300)
        for _ in range(kills):
            reaper.strike()
        made.wait_for_end(600)
        print(f"{codec} {method}: {dict(reaper.killed)} in {rounds} rounds, {time.monotonic() - started:.0f} s")
        assert_as_simulated(made.out, spec)
