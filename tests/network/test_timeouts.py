"""Who is waited for, and how long: the rules, and members that dawdle over a bus in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cbdsl.network import topics, wire
from cbdsl.network.server import NetworkSwarm
from cbdsl.network.timeouts import DeadlineHistory, Deadlines, RateLimiter, compute_common_limit, upload_limit
from cbdsl.network.topics import MessageOrigin
from cbdsl.network.wire import Hello, OrderMessage, Status, Welcome
from support.bus import Bus
from support.refusals import refused_as
from support.scripted_workers import NAMES, RUN, SIZE, Scripted, bus, make, order, refused

__all__ = ["bus", "make"]  # fixtures

LIMITS = Deadlines(round_seconds=600, upload_seconds=60, slack=10, least_seconds=2)


def test_the_others_have_so_many_times_as_long_as_most_took() -> None:
    assert compute_common_limit([], 5, LIMITS) == 600
    assert compute_common_limit([1, 2], 5, LIMITS) == 600  # no majority yet
    assert compute_common_limit([1, 2, 3], 5, LIMITS) == 30
    assert compute_common_limit([1, 2, 3, 59], 5, LIMITS) == 30  # a late answer moves nothing
    assert compute_common_limit([0.01, 0.01, 0.02], 5, LIMITS) == pytest.approx(0.2)
    assert compute_common_limit([90, 90, 90], 5, LIMITS) == 600
    assert compute_common_limit([1], 2, LIMITS) == 600  # one of two is no majority


def test_uploads_have_so_many_times_as_long_as_they_took_before() -> None:
    assert upload_limit([1, 1], LIMITS) == 60
    assert upload_limit([1, 1, 50], LIMITS) == 10
    assert upload_limit([0.1] * 3, LIMITS) == 2
    assert upload_limit([30] * 3, LIMITS) == 60


def test_patience_with_a_worker_is_used_up_and_comes_back_slowly() -> None:
    history = DeadlineHistory(2.0)
    history.note_waiting(1.5, 1.6)
    assert history.patience == pytest.approx(0.58)
    history.note_waiting(9.0, 2.0)
    assert history.patience == pytest.approx(0.1)
    for _ in range(1000):
        history.note_waiting(0.0, 1.0)
    assert history.patience == 2.0


def test_slack_below_one_is_an_error() -> None:
    with refused_as("out-of-range", "slack", 0.5):
        Deadlines(slack=0.5)
    with refused_as("out-of-range", "slack"):
        Deadlines(slack=float("nan"))


def rounds_waited(late: Callable[[int], bool], rounds: int) -> list[int]:
    """The rounds that wait for a worker; it answers, but too late where `late` says so."""
    history, waited = DeadlineHistory(2.0), []
    for number in range(1, rounds + 1):
        if history.is_waited_for(number):
            waited.append(number)
            if late(number):
                history.note_missed(number)
                history.note_answer()
            else:
                history.note_in_time()
    return waited


def test_one_lapse_is_passed_over_for_two_rounds() -> None:
    assert rounds_waited(lambda number: number == 3, 8) == [1, 2, 3, 6, 7, 8]


def test_who_is_always_late_is_waited_for_ever_more_rarely() -> None:
    assert rounds_waited(lambda _: True, 100) == [1, 4, 9, 18, 35, 68]


def test_who_answers_in_time_now_and_then_is_not_waited_for_more_often_than_it_earns() -> None:
    history, late = DeadlineHistory(2.0), 0
    for number in range(1, 1001):
        if history.is_waited_for(number):
            if history._in_time < 3:  # three times good, then late: it takes turns with others
                history.note_in_time()
            else:
                late += 1
                history.note_missed(number)
                history.note_answer()
    assert late <= 9


def test_a_lapse_is_made_up_for_by_answers_in_time() -> None:
    history = DeadlineHistory(2.0)
    history.note_missed(1)
    history.note_answer()
    for _ in range(20):
        history.note_in_time()
    history.note_missed(50)
    history.note_answer()
    assert not history.is_waited_for(52)
    assert history.is_waited_for(53)  # as after a first lapse


def test_who_never_answers_is_waited_for_once() -> None:
    history = DeadlineHistory(2.0)
    history.note_missed(1)
    assert not any(history.is_waited_for(number) for number in range(2, 200))


def test_pauses_double_and_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("cbdsl.network.timeouts.time.monotonic", lambda: now[0])
    limiter = RateLimiter(306)

    def flood() -> float:
        for _ in range(10_000):
            accepted, pause = limiter.charge("a")
            if pause:
                assert not accepted
                return pause
        return 0.0

    pauses = []
    for _ in range(12):
        pauses.append(flood())
        assert limiter.charge("a") == (False, 0.0)
        assert limiter.charge("b") == (True, 0.0)
        assert limiter.shut_out() == {"a"}
        now[0] += pauses[-1] + 1
        assert limiter.shut_out() == set()
        assert limiter.charge("a")[0]
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600]
    now[0] += 6001
    assert flood() == 2


class Dawdler(Scripted):
    """Claims when `seconds` have passed, from another thread."""

    seconds = 0.0

    def claim(self, round_number: int, score: float | None = None) -> None:
        threading.Timer(self.seconds, lambda: Scripted.claim(self, round_number, score)).start()


def test_a_member_that_answers_just_before_each_deadline_costs_few_rounds(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    names = (*NAMES, "dot", "eve")
    network = make(Deadlines(round_seconds=2.0, join_seconds=5, slack=5, least_seconds=0.4), names, 5)
    for name in names[:4]:
        Scripted(bus, name)
    Dawdler(bus, "eve").seconds = 1.8
    network.gather()
    slow = []
    for number in range(1, 31):
        started = time.monotonic()
        assert len(network.report(order(number, participants=(0, 1, 2, 3, 4)))) >= 4
        if time.monotonic() - started > 0.35:
            slow.append(number)
    assert len(slow) <= 5  # 1, 4, 9, 18 and one for a busy machine
    network.close()


def test_whoever_is_a_little_slower_than_the_others_is_not_passed_over_for_ever(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    names = (*NAMES, "dot", "eve")
    network = make(Deadlines(round_seconds=5, join_seconds=5, least_seconds=2), names, 5)
    for name in names[:4]:
        Dawdler(bus, name).seconds = 0.1
    slower = Dawdler(bus, "eve", mute=True)
    network.gather()
    assert len(network.report(order(1, participants=(0, 1, 2, 3, 4)))) == 4
    slower.script.clear()
    slower.seconds = 0.25  # later than all others, each time
    answered = []
    for number in range(2, 9):
        answered.append(len(network.report(order(number, participants=(0, 1, 2, 3, 4)))))
        time.sleep(0.2)
    assert answered[-3:] == [5, 5, 5]


def test_stallers_do_not_keep_the_uploads_of_others_waiting(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(round_seconds=30, upload_seconds=30, join_seconds=5, least_seconds=0.2))
    Scripted(bus, "ann", stalls=True)
    Scripted(bus, "bob")
    Scripted(bus, "cyd")
    network.gather()
    for number in range(1, 5):
        network.report(order(number))
        assert set(network.upload([1])) == {1}
    started = time.monotonic()
    assert network.upload([0]) == {}
    assert time.monotonic() - started < 15


def test_a_hundred_workers_at_once_are_all_enrolled_and_welcomed(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(names=(), places=100)
    for number in range(100):
        Scripted(bus, f"w{number}")
    network.gather()
    assert len(network._roster.names) == 100
    welcomed = {topic.split("/")[3] for topic, _ in bus.sent if topic.endswith("/welcome")}
    assert len(welcomed) == 100
    assert len(network.report(order(1, participants=tuple(range(100))))) == 100


def test_a_member_with_malformed_hellos_keeps_nobody_out(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(names=(), places=8)
    for number in range(2000):
        bus.publish(topics.from_worker("s", "mallory", "hello"), b"junk %d" % number)
    for number in range(8):
        Scripted(bus, f"w{number}")
    network.gather()
    assert len(network._roster.names) == 8
    assert refused(network)["too many messages"] > 1000


def test_names_that_strangers_invent_are_forgotten(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make()
    for number in range(3000):
        bus.publish(topics.from_worker("s", f"stranger-{number}", "claim"), b"junk")
    assert len(network._limiter._strangers) <= 1000
    assert len(network._availability) <= 3


def test_whoever_is_enrolled_between_two_others_is_welcomed(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    """A hello that comes while gathering ends is enrolled by whichever thread is next."""
    network = make(names=(), places=3)
    Scripted(bus, "ann")
    network.gather()
    with network._lock:
        network._take(MessageOrigin("bob", "hello", 0), hello_of("bob"))
    Scripted(bus, "cyd")
    welcomed = {topic.split("/")[3] for topic, _ in bus.sent if topic.endswith("/welcome")}
    assert welcomed == {"ann", "bob", "cyd"}


def hello_of(
    name: str, round_number: int = 0, version: int = 0, run: bytes = bytes(8), model: bytes = bytes(16)
) -> bytes:
    return wire.encode(Hello(name.encode().ljust(8, b"."), 7, round_number, run, version, model, "test"))


def test_a_start_model_is_sent_once_however_often_a_worker_says_hello(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make()
    network._starts = [bytes(4 * SIZE)] * 3
    for _ in range(300):
        bus.publish(topics.from_worker("s", "ann", "hello"), hello_of("ann"))
    sent = sum(len(payload) for topic, payload in bus.sent if "/start/" in topic)
    assert 4 * SIZE <= sent < 2 * 4 * SIZE


@pytest.mark.parametrize(
    ("round_number", "version", "known", "forget"),
    [(1, 1, True, 0), (3, 1, True, 0), (4, 1, True, 4), (3, 2, True, 3), (3, 1, False, 3), (2, 0, False, 0)],
)
def test_a_state_that_is_ahead_or_of_another_history_is_to_be_forgotten(
    round_number: int, version: int, known: bool, forget: int, bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make()
    network._played = 2  # rounds are over, w^g is version 1
    digest = network.retained.digests[1] if known else b"another-history!"
    bus.publish(topics.from_worker("s", "ann", "hello"), hello_of("ann", round_number, version, RUN, digest))
    welcome = [wire.decode(payload, Welcome) for topic, payload in bus.sent if topic.endswith("ann/welcome")][-1]
    assert welcome.forget == forget


def test_what_an_earlier_process_left_is_cleared(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    late = OrderMessage(RUN, 9, "swarm", b"\x07", 1.0, 0.1, 9, bytes(16))
    bus.publish(topics.order("s"), wire.encode(late), retain=True)
    bus.publish(topics.model("s", 7), b"of a larger model", retain=True)
    make()
    assert topics.order("s") not in bus.retained
    assert topics.model("s", 7) not in bus.retained
    assert topics.spec("s") in bus.retained


def test_whoever_says_hello_without_its_state_may_claim_again(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(round_seconds=30, upload_seconds=30, join_seconds=5))
    workers = [Scripted(bus, name, mute=name == "cyd") for name in NAMES]
    network.gather()

    def reborn() -> None:
        workers[0].greet()
        workers[0].claim(1, 0.25)
        workers[2].script.clear()
        workers[2].claim(1)

    threading.Timer(0.3, reborn).start()
    claims = network.report(order(1))
    assert (claims[0].score, len(claims)) == (0.25, 3)
    threading.Timer(0.3, workers[1].greet).start()
    workers[1].script["stalls"] = True
    started = time.monotonic()
    assert network.upload([1]) == {}  # silence at once
    assert time.monotonic() - started < 15


EVERYBODY = (*NAMES, "dot", "eve")


def seconds_of_rounds(network: NetworkSwarm, rounds: int) -> list[float]:
    seconds = []
    for number in range(1, rounds + 1):
        started = time.monotonic()
        network.report(order(number, participants=(0, 1, 2, 3, 4)))
        seconds.append(time.monotonic() - started)
    return seconds


class Fickle(Scripted):
    """Claims and withdraws its claim again and again, and ends without one."""

    def claim(self, round_number: int, score: float | None = None) -> None:
        for _ in range(22):
            Scripted.claim(self, round_number, score)
            self.say("hello", hello_of(self.name))


def test_an_answer_that_is_given_and_withdrawn_many_times_makes_up_for_no_lapse(
    bus: Bus, make: Callable[..., NetworkSwarm]
) -> None:
    network = make(Deadlines(round_seconds=5, join_seconds=5, least_seconds=0.3), EVERYBODY, 5)
    for name in EVERYBODY[:4]:
        Dawdler(bus, name).seconds = 0.05
    Fickle(bus, "eve")
    network.gather()
    seconds = seconds_of_rounds(network, 15)
    assert sum(one > 0.4 for one in seconds) <= 5  # 1, 4, 9 and two for a busy machine


class Vanishing(Scripted):
    """Is there when a round begins, and gone before its deadline."""

    def claim(self, round_number: int, score: float | None = None) -> None:
        Scripted.claim(self, max(0, round_number - 1), score)  # it is heard, but not in time
        self.say("status", wire.encode(Status(True, self.session)))
        threading.Timer(0.4, lambda: self.say("status", wire.encode(Status(False, self.session)))).start()


def test_whoever_vanishes_before_each_deadline_costs_few_rounds(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(round_seconds=5, join_seconds=5, least_seconds=0.5, grace_seconds=0.1), EVERYBODY, 5)
    for name in EVERYBODY[:4]:
        Dawdler(bus, name).seconds = 0.05
    Vanishing(bus, "eve")
    network.gather()
    seconds = seconds_of_rounds(network, 15)
    assert sum(one > 0.35 for one in seconds) <= 5  # 1, 4, 9 and two for a busy machine


class SlowSender(Scripted):
    """Sends its model when `seconds` have passed, from another thread."""

    seconds = 0.0

    def send(self, round_number: int) -> None:
        threading.Timer(self.seconds, lambda: Scripted.send(self, round_number)).start()


def test_whoever_sends_its_model_last_is_not_passed_over_for_ever(bus: Bus, make: Callable[..., NetworkSwarm]) -> None:
    network = make(Deadlines(round_seconds=5, join_seconds=5, least_seconds=2), EVERYBODY, 5)
    for name in EVERYBODY[:4]:
        SlowSender(bus, name).seconds = 0.1
    slower = SlowSender(bus, "eve", stalls=True)
    network.gather()
    everybody, sent = (0, 1, 2, 3, 4), []
    for number in range(1, 10):
        network.report(order(number, "average", everybody))
        sent.append(len(network.upload(everybody)))
        time.sleep(0.2)
        slower.script.clear()
        slower.seconds = 0.25  # later than all others, each time
    assert sent[0] == 4
    assert sent[-3:] == [5, 5, 5]
