"""Workers and servers whose state is lost, damaged, doubled or set back: nobody is banned for it, nobody is stuck."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import cbdsl
from cbdsl.algorithm.messages import Claim
from cbdsl.network import topics, wire
from cbdsl.network.mqtt import Address
from cbdsl.network.server import ServerConfig
from cbdsl.network.session import open_run, serve
from cbdsl.network.wire import Announcement, Hello, Invitation
from support.bus import Bus
from support.helpers import small_spec
from support.worker_threads import PACE, PASSED_OVER, Crew, crew, play, prepared

pytestmark = pytest.mark.slow

CODECS = pytest.mark.parametrize("codec", ["none", "q4"])


def deleted(state: Path) -> None:
    state.unlink()


def one_byte_flipped(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


def cut_short(state: Path) -> None:
    state.write_bytes(state.read_bytes()[:-7])


class Mishap:
    """Happens to the first workers that are invited, between their claim and the invitation."""

    def __init__(self, workers: Crew, happen: Callable[[Path], None], times: int) -> None:
        self.workers, self.happen, self.times = workers, happen, times
        self.hit: list[int] = []

    def __call__(self, topic: str) -> bool:
        name = topic.split("/")[3] if topic.count("/") > 3 else ""
        if not topic.endswith("/invitation") or len(self.hit) == self.times:
            return False
        number = self.workers.names.index(name)
        if number in self.hit:
            return False
        self.hit.append(number)
        self.workers.stop(number)
        self.happen(self.workers.folder / name / "state.npz")
        self.workers.start(number)
        return True


@pytest.mark.parametrize("happen", [deleted, one_byte_flipped, cut_short])
@pytest.mark.parametrize("settings", [{}, {"codec__up": "q4", "codec__down": "q4", "defence__commitment": True}])
def test_nobody_is_banned_whose_state_is_lost_between_claim_and_invitation(
    settings: dict[str, object], happen: Callable[[Path], None], tmp_path: Path
) -> None:
    stage, bus = prepared(small_spec(swarm__inertia=0.9, **settings)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        workers.bus.lose = mishap = Mishap(workers, happen, 3)
        served = play(bus, stage, tmp_path, workers.names)
    assert mishap.hit
    assert served.result.summary.banned == []
    assert served.result.rounds[-1].round == stage.spec.rounds


def test_a_worker_stays_silent_if_it_is_invited_for_a_claim_that_it_has_not_made(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=3)), Bus()
    foreign: list[bytes] = []
    with crew(bus, stage, tmp_path) as workers:
        deliver = bus.publish

        def publish(topic: str, payload: bytes, retain: bool = False) -> None:
            if topic.endswith("/invitation") and not foreign:
                invitation = wire.decode(payload, Invitation)
                foreign.append(payload)
                payload = wire.encode(Invitation(invitation.run, invitation.round, wire.pack_claim(Claim(0.125))))
            deliver(topic, payload, retain)

        bus.publish = publish  # type: ignore[method-assign]
        served = play(bus, stage, tmp_path, workers.names, PASSED_OVER)
    assert len(foreign) == 1
    assert served.result.summary.banned == []
    assert [verdict for line in served.result.rounds for verdict in line.silent] != []


def stopped_after(round_number: int) -> Callable[[cbdsl.RoundRecord], None]:
    """Ends a server as a signal would."""

    def stop(line: cbdsl.RoundRecord) -> None:
        if line.round == round_number:
            raise KeyboardInterrupt

    return stop


def set_back(workers: Crew, run: Path) -> None:
    """Play seven rounds, and restore the server's folder from a backup made after three."""
    backup = run.with_name("backup")
    for rounds in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            play(workers.bus, workers.stage, run.parent, workers.names, on_round=stopped_after(rounds))
        if rounds == 3:
            shutil.copytree(run, backup)
    shutil.rmtree(run)
    shutil.copytree(backup, run)


@CODECS
@pytest.mark.parametrize("again", [False, True])
def test_a_server_set_back_to_a_backup_goes_on_with_workers_that_are_ahead(
    codec: str, again: bool, tmp_path: Path
) -> None:
    """again: the workers were stopped and started in between, too; one of them comes late."""
    stage, bus = prepared(small_spec(rounds=9, codec__up=codec, codec__down=codec, defence__commitment=True)), Bus()
    run = tmp_path / "run"
    with crew(bus, stage, tmp_path) as workers:
        set_back(workers, run)
        if again:
            for number in range(6):
                workers.stop(number)
            for number in range(5):
                workers.start(number)

        def late(line: cbdsl.RoundRecord) -> None:
            if again and line.round == 6:
                workers.start(5)

        config = ServerConfig("s", Address("127.0.0.1", 1), replace(PACE, join_seconds=2.0), workers.names)
        served = serve(stage, open_run(stage, run), config, on_round=late, make_link=bus.link)
    assert served.result.summary.banned == []
    assert [line.traffic["score"][0] for line in served.result.rounds][-2:] == [6, 6]


@CODECS
@pytest.mark.parametrize("method", ["cb-dsl", "fedavg"])
def test_a_server_set_back_is_heard_by_workers_that_took_no_part_in_the_rounds_that_are_lost(
    method: str, codec: str, tmp_path: Path
) -> None:
    """Their states are of the common history; the orders and models that they last heard of are not."""
    settings = {"method": method, "codec__up": codec, "codec__down": codec}
    stage, bus = prepared(small_spec(rounds=9, participation=2, **settings)), Bus()
    run = tmp_path / "run"
    with crew(bus, stage, tmp_path) as workers:
        set_back(workers, run)
        config = ServerConfig("s", Address("127.0.0.1", 1), replace(PACE, join_seconds=2.0), workers.names)
        served = serve(stage, open_run(stage, run), config, make_link=bus.link)
    kind = "score" if method == "cb-dsl" else "upload"
    assert served.result.summary.banned == []
    assert [line.traffic[kind][0] for line in served.result.rounds] == [2] * 9


def test_whoever_played_on_before_it_heard_that_its_state_is_astray_is_believed_again(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=4)), Bus()

    with crew(bus, stage, tmp_path) as workers:

        def astray(line: cbdsl.RoundRecord) -> None:
            if line.round == 2:  # as if it had come back with a state of another history, and the next order with it
                worker = workers.workers[1]
                assert worker._state is not None
                version = worker._state.version
                hello = Hello(worker._session, 7, 1, served_run(bus), version, b"another-history!", "test")
                bus.publish(topics.from_worker("s", "w1", "hello"), wire.encode(hello))

        served = play(bus, stage, tmp_path, workers.names, on_round=astray)
    assert [line.traffic["score"][0] for line in served.result.rounds] == [6] * 4


def served_run(bus: Bus) -> bytes:
    return wire.decode(bus.retained[topics.spec("s")], Announcement).run


def test_a_server_without_its_checkpoint_plays_the_run_again_from_its_first_round(tmp_path: Path) -> None:
    """As the error about a damaged checkpoint says."""
    stage, bus = prepared(small_spec(rounds=6)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        with pytest.raises(KeyboardInterrupt):
            play(bus, stage, tmp_path, workers.names, on_round=stopped_after(4))
        (tmp_path / "run" / "checkpoint.npz").unlink()
        served = play(bus, stage, tmp_path, workers.names)
    assert served.result.summary.banned == []
    assert [line.traffic["score"][0] for line in served.result.rounds] == [6] * 6


def test_workers_hear_the_end_from_a_server_that_was_killed_before_it_could_say_so(tmp_path: Path) -> None:
    stage, bus = prepared(small_spec(rounds=3)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        with pytest.raises(KeyboardInterrupt):
            play(bus, stage, tmp_path, workers.names, on_round=stopped_after(3))
        assert all(thread.is_alive() for thread in workers.threads.values())
        played = play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(10)
        assert not any(thread.is_alive() for thread in workers.threads.values())
    assert played.result.summary.banned == []
    assert {topic.split("/")[3] for topic in bus.retained} == {"spec", "order", "model"}


def test_a_worker_that_is_welcomed_late_says_hello_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.network.worker._HELLO_SECONDS", (0.2, 1.0))
    monkeypatch.setattr("cbdsl.network.worker._WAIT_SECONDS", 0.05)
    stage, bus = prepared(small_spec(rounds=2)), Bus()
    lost: list[str] = []

    def lose(topic: str) -> bool:
        drop = topic.endswith("w1/welcome") and len(lost) < 3
        lost.extend([topic] if drop else [])
        return drop

    bus.lose = lose
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert len(lost) == 3
    assert served.result.rounds[0].traffic["score"][0] == 6


def test_clones_with_other_states_get_nobody_banned(tmp_path: Path) -> None:
    """Two processes under one name, as from a copied card; the broker hands messages to both."""
    stage, bus = prepared(small_spec(rounds=6, swarm__inertia=0.9)), Bus()
    with crew(bus, stage, tmp_path) as workers:
        twin = Crew(bus, stage, tmp_path / "twin")

        def clone(line: cbdsl.RoundRecord) -> None:
            if line.round == 2:
                for number in range(4):
                    twin.start(number)

        served = play(bus, stage, tmp_path, workers.names, on_round=clone)
        for number in twin.workers:
            twin.stop(number)
    assert served.result.summary.banned == []
