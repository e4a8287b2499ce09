"""The server's side over a bus in memory, with workers that follow a script."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbdsl.algorithm.messages import Claim
from cbdsl.network import topics, wire
from cbdsl.network.journal import Journal
from cbdsl.network.roster import Roster
from cbdsl.network.server import NetworkSwarm
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.wire import OrderMessage, Piece, Status
from support.bus import Bus, BusLink
from support.refusals import refused_as
from support.scripted_workers import NAMES, QUICK, RUN, Scripted, bus, make, model, order, refused

__all__ = ["bus", "make"]  # fixtures


def test_a_round_closes_when_everybody_answered(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for number, name in enumerate(NAMES):
        Scripted(bus, name, 0.25 * (number + 1))
    network.gather()
    assert network.report(order()) == {0: Claim(0.25), 1: Claim(0.5), 2: Claim(0.75)}
    assert np.array_equal(network.upload([1])[1], model(0.5))
    assert refused(network) == {}


def test_duplicates_and_late_answers_change_nothing(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    bus.copies = 3
    workers = [Scripted(bus, name, 0.5) for name in NAMES]
    network.gather()
    assert network.report(order(1)) == dict.fromkeys(range(3), Claim(0.5))
    assert len(network.upload([0, 2])) == 2
    assert network.report(order(2)) == dict.fromkeys(range(3), Claim(0.5))
    workers[0].claim(1, 0.125)  # a reply to an old round
    workers[0].claim(9, 0.125)  # and to one that nobody played
    workers[0].claim(2, 0.125)  # another one than before
    workers[0].send(2)  # nobody asked
    assert network.open_round.claims[0] == Claim(0.5)
    assert set(refused(network)) == {
        "claim: from an earlier round", "claim: from a future round", "upload: not requested",
        "claim: a different claim from the one already received this round",
    }  # fmt: skip


def test_a_deadline_closes_a_round_and_the_missing_are_not_waited_for_again(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make()
    Scripted(bus, "ann", 0.5)
    Scripted(bus, "bob", 0.5, mute=True)
    slow = Scripted(bus, "cyd", 0.5, mute=True)
    network.gather()
    started = time.monotonic()
    assert set(network.report(order(1))) == {0}
    assert time.monotonic() - started >= QUICK.round_seconds
    started = time.monotonic()
    assert set(network.report(order(2))) == {0}
    assert time.monotonic() - started < QUICK.round_seconds
    slow.script.clear()
    assert set(network.report(order(3))) == {0, 2}  # it is back


def test_a_worker_that_only_says_that_it_is_there_costs_one_deadline(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    workers = {name: Scripted(bus, name, mute=name == "cyd") for name in NAMES}
    network = make()
    for number in (1, 2, 3):
        started = time.monotonic()
        assert set(network.report(order(number))) == {0, 1}
        assert (time.monotonic() - started > 0.5) is (number == 1)
        workers["cyd"].greet()
    workers["cyd"].script.clear()
    answered = {worker for number in range(4, 9) for worker in network.report(order(number))}
    assert 2 in answered  # whoever answers in time is in again


def test_a_quorum_closes_a_round_early(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(quorum=0.6, round_seconds=30, join_seconds=5))
    Scripted(bus, "ann")
    Scripted(bus, "bob")
    Scripted(bus, "cyd", mute=True)
    network.gather()
    assert set(network.report(order())) == {0, 1}


def test_a_worker_whose_will_was_read_is_not_waited_for(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(round_seconds=30, join_seconds=5, grace_seconds=0.1))
    workers = [Scripted(bus, name) for name in NAMES]
    network.gather()
    workers[1].link.vanish()
    assert set(network.report(order())) == {0, 2}
    Scripted(bus, "bob")
    assert set(network.report(order(2))) == {0, 1, 2}


def test_the_will_of_an_older_connection_says_nothing(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for name in NAMES:
        Scripted(bus, name)
    network.gather()
    bus.publish(topics.from_worker("s", "ann", "status"), wire.encode(Status(False, b"old-life")), retain=True)
    assert "ann" in network.online()


def test_a_staller_is_passed_over_and_may_come_back(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    staller = Scripted(bus, "ann", stalls=True)
    Scripted(bus, "bob")
    Scripted(bus, "cyd")
    network.gather()
    network.report(order(1))
    assert network.upload([0]) == {}
    staller.script.clear()
    network.report(order(2))
    assert set(network.upload([0])) == {0}


def test_a_model_of_another_size_ends_the_wait_at_once(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(upload_seconds=30, join_seconds=5))
    for name in NAMES[1:]:
        Scripted(bus, name)
    bad = Scripted(bus, "ann", stalls=True)
    network.gather()
    network.report(order())
    wrong = Piece(RUN, 1, bytes(16), 12, 0, bytes(12))
    threading.Timer(0.2, lambda: bad.say("upload/0", wire.encode(wrong))).start()
    started = time.monotonic()
    assert network.upload([0]) == {}
    assert time.monotonic() - started < 10
    assert refused(network) == {"upload: a model of the wrong size": 1}


def test_a_half_sent_model_is_no_model(
    bus: Bus, make: Callable[..., NetworkSwarm], caplog: pytest.LogCaptureFixture
) -> None:
    network = make()
    for name in NAMES:
        Scripted(bus, name)
    bus.lose = lambda topic: topic.endswith("upload/1")
    network.gather()
    network.report(order())
    assert network.upload([0]) == {}
    assert "worker ann: 1 of 2 pieces" in caplog.text
    bus.lose = lambda topic: False  # noqa: ARG005
    network.report(order(2))
    assert set(network.upload([0])) == {0}


def test_a_claim_and_an_invitation_that_a_broker_dropped_are_asked_for_again(
    bus: Bus, make: Callable[..., NetworkSwarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.2)
    network = make(Deadlines(round_seconds=30, upload_seconds=30, join_seconds=5))
    for name in NAMES:
        Scripted(bus, name)
    network.gather()
    lost: list[str] = []

    def lose_once(topic: str) -> bool:
        if topic not in lost and topic.endswith(("bob/claim", "ann/invitation")):
            lost.append(topic)
            return True
        return False

    bus.lose = lose_once
    assert set(network.report(order())) == {0, 1, 2}
    assert set(network.upload([0])) == {0}
    assert len(lost) == 2


def test_an_average_round_takes_everybodys_model(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for number, name in enumerate(NAMES):
        Scripted(bus, name, number)
    network.gather()
    assert network.report(order(1, "average")) == {}
    models = network.upload((0, 1, 2))
    assert [float(models[number][0]) for number in range(3)] == [0, 1, 2]


def test_a_model_that_a_broker_dropped_in_an_average_round_is_asked_for_again(
    bus: Bus, make: Callable[..., NetworkSwarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.network.server.REPEAT_SECONDS", 0.2)
    network = make(Deadlines(round_seconds=30, upload_seconds=30, join_seconds=5))
    for number, name in enumerate(NAMES):
        Scripted(bus, name, number)
    network.gather()
    lost: list[str] = []

    def lose_once(topic: str) -> bool:
        lose = not lost and topic.endswith("bob/upload/0")
        lost.extend([topic] * lose)
        return lose

    bus.lose = lose_once
    network.report(order(1, "average"))
    assert set(network.upload((0, 1, 2))) == {0, 1, 2}
    assert len(lost) == 1


def test_strangers_are_refused_and_a_roster_keeps_its_numbers(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for name in NAMES:
        Scripted(bus, name)
    stranger = Scripted(bus, "eve")
    network.gather()
    assert set(network.report(order())) == {0, 1, 2}
    stranger.send(1)
    assert "claim: from an unknown worker" in refused(network)
    assert "hello: from an unknown worker" in refused(network)


def test_without_a_roster_numbers_go_by_name_and_latecomers_come_last(
    bus: Bus, make: Callable[..., NetworkSwarm], tmp_path: Path
) -> None:
    network = make(names=())
    Scripted(bus, "zoe")
    Scripted(bus, "bob")
    network.gather()
    assert ",".join(network._roster.names) == "bob,zoe"
    Scripted(bus, "ann")
    assert ",".join(network._roster.names) == "bob,zoe,ann"
    Scripted(bus, "eve")  # no place left
    assert ",".join(network._roster.names) == "bob,zoe,ann"
    assert Roster(tmp_path / "roster.json", 3).names == ("bob", "zoe", "ann")


def test_nobody_at_all_is_an_error_that_says_what_to_do(make: Callable[..., NetworkSwarm]) -> None:
    with refused_as("no-workers", "cbdsl work"):
        make().gather()


def test_silence_of_all_is_waited_for_and_then_an_error(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for name in NAMES:
        Scripted(bus, name, mute=True)
    network.gather()
    with refused_as("no-workers", "Round 1", "2 periods"):
        network.report(order())


def test_nonsense_claims_go_to_the_server_and_no_further(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for name, score in zip(NAMES, (math.nan, math.inf, -1.0), strict=True):
        Scripted(bus, name, score)
    network.gather()
    claims = network.report(order())
    assert math.isnan(claims[0].score)
    assert (claims[1].score, claims[2].score) == (math.inf, -1.0)


def test_a_flood_is_counted_and_nothing_of_it_is_kept(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for name in NAMES:
        Scripted(bus, name)
    network.gather()
    network.report(order())
    rng = np.random.default_rng(0)
    for number in range(12_000):
        junk = rng.bytes(int(rng.integers(0, 60)))
        what = ("claim", "upload/0", "hello", "status", "upload/99999", "nonsense/7")[number % 6]
        name = ("ann", f"stranger-{number}", "bob")[number % 3]
        network.handle(f"cbdsl/s/from/{name}/{what}", junk)
    bus.sent.clear()
    counted = refused(network)
    assert counted["too many messages"] > 2_000
    assert len(counted) < 30  # reasons, not messages
    assert len(network._availability) <= 3
    assert network.open_round.assemblies == {}
    assert set(network.report(order(2))) >= {2}  # whoever did not take part in the flood is heard


def test_a_server_that_starts_again_ends_the_round_as_it_would_have_ended(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    first = make()
    workers = [Scripted(bus, name, 0.5) for name in NAMES]
    workers[2].script["stalls"] = True
    first.gather()
    claims = first.report(order())
    sent = first.upload([0])
    assert first.upload([2]) == {}
    first.close()  # killed here: the round is not over
    for worker in workers:
        worker.script["mute"] = worker.script["stalls"] = True  # and nobody says it again
    second = make()
    assert second.report(order()) == claims
    assert np.array_equal(second.upload([0])[0], sent[0])
    started = time.monotonic()
    assert second.upload([2]) == {}  # silent then, silent now, without another wait
    assert time.monotonic() - started < QUICK.upload_seconds


def test_a_torn_journal_keeps_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path)
    journal.begin(4)
    journal.note_claims({1: Claim(0.5, b"x" * 16)})
    whole = path.stat().st_size
    journal.note_upload(1, model(2.0))
    full = path.read_bytes()
    for cut in (whole, whole + 3, whole + 25, len(full) - 1):
        path.write_bytes(full[:cut])
        again = Journal(path)
        again.begin(4)
        assert again.claims == {1: Claim(0.5, b"x" * 16)}
        assert again.uploads == {}
        assert path.stat().st_size == whole
    path.write_bytes(full)
    again = Journal(path)
    again.begin(4)
    assert np.array_equal(again.uploads[1], model(2.0))  # type: ignore[arg-type]
    again.begin(5)
    assert again.claims is None
    assert not path.exists()


@pytest.mark.parametrize("taken", [True, False])
def test_the_end_waits_until_the_broker_has_taken_the_trained_model(
    taken: bool,
    make: Callable[..., NetworkSwarm],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("cbdsl.network.server._FINISH_SECONDS", 0.1)
    monkeypatch.setattr("cbdsl.network.server._SLOW_CONNECTION", 1e9 if not taken else 1)
    looks: list[float] = []

    def settled(_: BusLink, seconds: float) -> bool:
        looks.append(seconds)
        time.sleep(0.02)
        return taken and len(looks) > 30

    network = make()
    monkeypatch.setattr(BusLink, "settled", settled)
    network.finish(1, model(7.0), 2, ())
    assert len(looks) == 31 if taken else 1 <= len(looks) < 31
    assert ("Give the same command again" in caplog.text) is not taken


def test_what_is_said_again_does_not_come_after_what_was_said_since(make: Callable[..., NetworkSwarm]) -> None:
    network, topic = make(), topics.order("s")
    network.report(replace(order(), participants=()))
    broker: dict[str, bytes] = {}
    threads: list[threading.Thread] = []

    def slowly(where: str, payload: bytes) -> None:
        if where == topic and not threads:
            threads.append(threading.Thread(target=network.retained.set_order, args=(1, "finish")))
            threads[0].start()
            threads[0].join(0.3)
        broker[where] = payload

    network.retained._publish = slowly
    network.retained.publish_all()
    threads[0].join(10)
    assert wire.decode(broker[topic], OrderMessage).task == "finish"


def test_the_end_leaves_the_trained_model_on_the_broker_and_nothing_else(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make()
    workers = [Scripted(bus, name) for name in NAMES]
    network.gather()
    network.report(order())

    def leave(worker: Scripted, topic: str, payload: bytes) -> None:
        if topic.endswith("/order") and payload and wire.decode(payload, OrderMessage).task == "finish":
            worker.say("status", b"", retain=True)

    for worker in workers:
        worker.script["hear"] = leave
    network.finish(1, model(7.0), 2, ())
    down = {topics.spec("s"), topics.order("s"), *(topics.model("s", piece) for piece in range(2))}
    assert bus.retained.keys() == down
    last = wire.decode(bus.retained[topics.order("s")], OrderMessage)
    assert (last.task, last.version, last.model_digest) == (
        "finish",
        2,
        wire.digest_of(wire.weights_to_bytes(model(7.0))),
    )


def flood(bus: Bus, name: str, messages: int = 1000) -> None:
    for _ in range(messages):
        bus.publish(topics.from_worker("s", name, "claim"), b"junk")


def test_the_server_does_not_subscribe_to_a_member_that_floods(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    (link,) = bus.links
    assert link.patterns == [topics.from_all("s")]
    flood(bus, "ann")
    assert link.patterns == [topics.from_worker("s", name, "#") for name in ("bob", "cyd")]
    network._update_members(("ann", "bob", "dot"))  # by name: a newcomer is subscribed to, a worker that left is not
    assert link.patterns == [topics.from_worker("s", name, "#") for name in ("bob", "dot")]
    for name in ("bob", "dot"):
        flood(bus, name)
    assert link.patterns == []
    network._limiter._members.clear()  # as if the pauses were over
    network._update_subscriptions()
    assert link.patterns == [topics.from_all("s")]


def test_where_anybody_may_connect_a_flood_is_refused_and_no_subscription_ends(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make(names=())
    flood(bus, "ann")
    assert refused(network)["too many messages"] > 500
    assert bus.links[0].patterns == [topics.from_all("s")]


class SlowLink:
    """Notes what the broker would send; takes its time, so that calls of two threads meet."""

    def __init__(self) -> None:
        self.heard: set[str] = set()

    def subscribe(self, *patterns: str) -> None:
        time.sleep(0.002)
        self.heard |= set(patterns)
        time.sleep(0.002)

    def unsubscribe(self, *patterns: str) -> None:
        self.heard -= set(patterns)

    def close(self) -> None:
        pass


def test_the_server_receives_the_others_when_one_is_shut_out_while_another_pause_ends(
    make: Callable[..., NetworkSwarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread notes a flood while a timer ends an earlier pause."""
    network, link, looks = make(), SlowLink(), itertools.count()
    network._link, network._patterns = link, []  # type: ignore[assignment]
    monkeypatch.setattr(network._limiter, "shut_out", lambda: {"ann"} if next(looks) % 2 else set())
    for _ in range(20):
        threads = [threading.Thread(target=network._update_subscriptions) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert link.heard == set(network._patterns)
