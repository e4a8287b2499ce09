"""kill -9 of workers, server and broker at random moments: whatever dies, a run ends with the simulator's numbers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbdsl.network.session import read_secret, save_secret
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import read_result
from cbdsl.runs.loop import play_rounds
from cbdsl.spec import Spec
from support.deployment import Deployment, brokers, comparable, deployment, pictures, tiny_spec, wait_until

pytestmark = pytest.mark.slow

FEW, MANY = 5, 10  # kills
APART = 3  # rounds from one kill to the next, at most
PATIENT = ("--round-seconds", "600", "--upload-seconds", "600", "--join-seconds", "600", "--grace-seconds", "600",
           "--least-seconds", "600")  # fmt: skip
SECRET = 0x5EC2E7  # of the server's folder
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

    def strike(self, kills: int) -> None:
        """Of five kills three are of workers, one of the server, one of the broker, in any order."""
        turns = [self._worker, self._worker, self._worker, self._server, self._broker] * (kills // 5)
        self._rng.shuffle(turns)
        for kill in turns:
            self._at_some_moment(kill)

    def _at_some_moment(self, kill: Callable[[], None]) -> None:
        """Within the next few rounds, at whatever moment of a round that is."""
        made, rng = self._made, self._rng
        stop = made.rounds_played() + rng.randint(0, APART - 1)
        wait_until(lambda: made.rounds_played() >= stop or made.server_ended(), 300)
        time.sleep(rng.uniform(0.0, 0.05))
        assert not made.server_ended(), (made.folder / "server.log").read_text()[-3000:]
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


def assert_as_simulated_with_the_secret(out: Path, spec: Spec) -> None:
    """The run in a folder has the verdicts, bytes, accuracies and weights of the simulator, to the bit.

    `cbdsl serve` draws its hold-out and the order of its own step by a secret. What is a copy, and what the guard
    thinks of a model, depends on it, killed or not: so the simulator's server is told the same secret.
    """
    assert read_secret(out) == SECRET
    told = Experiment.prepare(spec, threads=1, secret=SECRET)
    stage = replace(Experiment.prepare(spec, threads=1), server=told.server)
    simulated = list(play_rounds(stage, stage.first_state()))
    _, _, records = read_result(out)
    assert comparable(records) == comparable([played.record for played in simulated])
    with np.load(out / "checkpoint.npz") as stored:
        assert np.array_equal(stored["global_best"], simulated[-1].state.global_best)


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
    length = 2 * APART * kills  # a run that is over before its last kill fails
    spec = tiny_spec(
        pictures(tmp_path / "data"), workers=5, rounds=length, codec__up=codec, codec__down=codec, **METHODS[method]
    )
    with deployment(tmp_path, spec, brokers()[0]) as made:
        made.out.mkdir()
        save_secret(made.out, SECRET)
        started = time.monotonic()
        made.start_workers()
        made.start_server(*PATIENT)
        reaper = Reaper(made, f"{kills} {codec} {method}")
        wait_until(lambda: made.rounds_played() >= 1, 300)
        reaper.strike(kills)
        assert reaper.killed.total() == kills
        made.wait_for_end(600)
        print(f"{codec} {method}: {dict(reaper.killed)} in {length} rounds, {time.monotonic() - started:.0f} s")
        assert_as_simulated_with_the_secret(made.out, spec)
