"""The small parts of a deployment: addresses, bytes, names, patience."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.algorithm.messages import Claim
from cbdsl.errors import UserError
from cbdsl.network import topics
from cbdsl.network.journal import Events, Journal
from cbdsl.network.mqtt import (
    Address,
    Meter,
    MqttLink,
    add_counts,
    exposure_warning,
    packet_bytes,
    parse_address,
    total_bytes,
)
from cbdsl.network.roster import Roster, worker_names
from cbdsl.network.session import link_maker
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.wire import digest_of
from support.refusals import refused_as


@pytest.mark.parametrize("size", [0, 1, 90, 100, 200, 16_300, 16_400, 102_400])
def test_the_bytes_counted_are_the_bytes_sent(size: int) -> None:
    """A broker of ten lines: it welcomes, then counts what comes up to the goodbye."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x20\x02\x00\x00")
                while not received.endswith(b"\xe0\x00") and (more := connection.recv(1 << 20)):
                    received.extend(more)
            done.set()

        threading.Thread(target=answer, daemon=True).start()
        meter, up = Meter(), threading.Event()
        link = MqttLink(Address("127.0.0.1", listener.getsockname()[1]), lambda *_: None, up.set, meter)
        link.open()
        assert up.wait(20)
        link.publish("cbdsl/s/from/w/claim", bytes(size))
        link.close(seconds=0.5)
        assert done.wait(20)
    assert len(received) - 2 == packet_bytes("cbdsl/s/from/w/claim", size)  # two are the goodbye
    assert meter.counts()["sent"] == {"claim": [1, packet_bytes("cbdsl/s/from/w/claim", size)]}
    assert meter.counts()["received"] == {"acknowledgement": [1, 4]}


def test_the_loss_of_a_broker_and_its_end_are_events(tmp_path: Path) -> None:
    ups = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as connections:

        def answer() -> None:
            for _ in range(2):
                connection = connections.enter_context(listener.accept()[0])
                connection.recv(1000)
                connection.sendall(b"\x20\x02\x00\x00")
                if ups.acquire(timeout=20):
                    connection.shutdown(socket.SHUT_RDWR)

        address, events = Address("127.0.0.1", listener.getsockname()[1]), Events(tmp_path / "events.jsonl")
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        link = link_maker(address, Meter(), events)(lambda *_: None, ups.release)
        link.open()
        thread.join(40)
        link.close()
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [one["event"] for one in found][:2] == ["broker_lost", "broker_back"]
    assert 0 <= found[1]["seconds"] < 60


def test_counts_go_on_after_a_restart_and_add_up(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    for _ in range(2):
        meter = Meter(path)
        meter.count("sent", "cbdsl/s/from/w/claim", 10)
        meter.save()
    counts = Meter(path).counts()
    assert counts["sent"]["claim"] == [2, 2 * packet_bytes("cbdsl/s/from/w/claim", 10)]
    assert total_bytes(add_counts([counts, counts]), "sent") == 2 * total_bytes(counts, "sent")
    path.write_text("[1, 2")
    assert Meter(path).counts() == {"sent": {}, "received": {}}


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        (topics.spec("s"), "spec"),
        (topics.model("s", 3), "model"),
        (topics.to_worker("s", "w", "invitation"), "invitation"),
        (topics.from_worker("s", "w", "upload/7"), "upload"), ("cbdsl", "other"),
    ],
)  # fmt: skip
def test_the_kind_of_a_message_is_in_its_topic(topic: str, kind: str) -> None:
    assert topics.kind_of(topic) == kind


@pytest.mark.parametrize(
    "topic",
    [
        "cbdsl/s/from/w/upload", "cbdsl/s/from/w/upload/x", "cbdsl/s/from/w/upload/1/2", "cbdsl/s/from/w/claim/1",
        "cbdsl/s/from/w", "cbdsl/s/from/a b/claim", "cbdsl/s/from//claim", "cbdsl/t/from/w/claim",
        "cbdsl/s/from/w/upload/00", "cbdsl/s/from/w/upload/9999999", "cbdsl/s/from/" + "x" * 65 + "/claim", "",
    ],
)  # fmt: skip
def test_a_topic_of_nobody_is_from_nobody(topic: str) -> None:
    assert topics.parse_origin("s", topic) is None


def test_addresses() -> None:
    assert parse_address("mqtt://hub") == Address("hub", 1883)
    assert parse_address("127.0.0.1:99") == Address("127.0.0.1", 99)
    assert parse_address("mqtts://me:secret@hub") == Address("hub", 8883, True, username="me", password="secret")
    assert "secret" not in str(parse_address("mqtts://me:secret@hub"))
    assert parse_address("wss://hub/broker/") == Address("hub", 443, True, path="/broker")
    assert str(parse_address("ws://hub:9001")) == "ws://hub:9001/mqtt"
    for wrong in ("http://hub", "mqtt://", "mqtt://hub:port", "mqtt://hub/path"):
        with pytest.raises(UserError):
            parse_address(wrong)
    with refused_as("conflict", "TLS"):
        parse_address("mqtt://hub", ca=Path(__file__))
    with refused_as("missing-file", "/nowhere.pem"):
        parse_address("mqtts://hub", ca=Path("/nowhere.pem"))


def test_only_loopback_goes_without_tls_unwarned() -> None:
    assert exposure_warning(Address("127.0.0.1", 1883)) == ""
    assert exposure_warning(Address("localhost", 1883)) == ""
    assert exposure_warning(Address("10.1.2.3", 8883, tls=True)) == ""
    assert exposure_warning(Address("10.1.2.3", 1883)).startswith("WARNING")
    assert exposure_warning(Address("no-such-host.invalid", 1883)).startswith("WARNING")


def test_bad_certificates_are_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    with refused_as("unreadable-file", "bad.pem"):
        MqttLink(Address("127.0.0.1", 1, True, bad), lambda *_: None, lambda: None, Meter())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Deadlines(quorum=0), lambda: Deadlines(quorum=1.1), lambda: Deadlines(round_seconds=-1),
        lambda: Deadlines(patience=0), lambda: Deadlines(upload_seconds=float("nan")),
    ],
)  # fmt: skip
def test_an_impossible_pace_is_an_error(make: Callable[[], Deadlines]) -> None:
    with pytest.raises(UserError):
        make()


@pytest.mark.parametrize(
    ("quorum", "expected", "needed"), [(1.0, 8, 8), (0.5, 8, 4), (0.5, 7, 4), (0.1, 8, 1), (1, 0, 1)]
)
def test_how_many_make_a_quorum(quorum: float, expected: int, needed: int) -> None:
    assert Deadlines(quorum=quorum).needed(expected) == needed


def test_a_roster_keeps_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    roster = Roster(path, 2, ("b", "a"))
    assert (roster.number("b"), roster.number("a"), roster.number("c")) == (0, 1, None)
    roster.note_samples("a", 30)
    roster.note_samples("a", 10**9)  # a worker cannot grow while a run is played
    roster.save()
    again = Roster(path, 2)
    assert (again.names, again.samples(1), again.samples(0)) == (("b", "a"), 30, 1)
    assert not again.has_room_for("c")
    for wrong in (("a", "a"), ("a",), ("a", "b/c")):
        with pytest.raises(UserError):
            Roster(tmp_path / "new.json", 2, wrong)
    path.write_text('{"names": 3}')
    with refused_as("damaged-file", "roster.json"):
        Roster(path, 2)


def test_a_refusal_is_logged_once_and_counted_always(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(tmp_path / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            events.refuse("claim: not CBOR", "eve")
    assert len(caplog.records) == 1
    assert events.refusals["claim: not CBOR"] == 500
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "events.jsonl").read_text())["worker"] == "eve"


def test_names_of_local_workers_sort_like_their_numbers() -> None:
    assert worker_names(3) == ("worker-0", "worker-1", "worker-2")
    assert list(worker_names(120, digits=3)) == sorted(worker_names(120, digits=3))


def test_every_offender_is_logged_and_strangers_only_so_many(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl", lambda name: name.startswith("member-"))
    for number in range(500):
        events.refuse("hello: not CBOR", f"made-up-{number}")
    for number in range(300):
        for _ in range(2):
            events.refuse("hello: not CBOR", f"member-{number}")
    noted = [json.loads(line)["worker"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (len(noted), len(set(noted))) == (400, 400)
    assert events.refusals == {"hello: not CBOR": 1100}
    assert len(events.offences()) == 400
    assert events.offences()[0][1:] == ("hello: not CBOR", 2)


def test_the_newest_events_are_kept_and_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.network.journal._MOST_BYTES", 500)
    events = Events(tmp_path / "events.jsonl")
    for number in range(100):
        events.note("there", number=number)
    newest, older = (tmp_path / name for name in ("events.jsonl", "events.old.jsonl"))
    assert json.loads(newest.read_text().splitlines()[-1])["number"] == 99
    assert (
        json.loads(older.read_text().splitlines()[-1])["number"] + 1
        == json.loads(newest.read_text().splitlines()[0])["number"]
    )
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "events.old.jsonl"}
    assert max(newest.stat().st_size, older.stat().st_size) < 700


def test_a_damaged_journal_says_what_it_keeps_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path)
    journal.begin(7)
    journal.note_claims({0: Claim(0.5), 1: Claim(0.25)})
    whole = path.stat().st_size
    journal.note_upload(1, np.ones(3, np.float32))
    journal.note_upload(0, None)
    content = bytearray(path.read_bytes())
    content[whole + 30] ^= 1
    path.write_bytes(bytes(content))
    with caplog.at_level(logging.WARNING):
        again = Journal(path)
    assert (again.claims, again.uploads) == ({0: Claim(0.5), 1: Claim(0.25)}, {})
    assert "1 entry is kept" in caplog.text
    assert "asked again" in caplog.text
    assert path.stat().st_size == whole
    again.note_upload(0, None)
    assert Journal(path).uploads == {0: None}


@given(st.binary(max_size=200), st.booleans())
def test_whatever_the_bytes_of_a_journal_it_starts(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, signed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "journal.bin"
    path.write_bytes(digest_of(content) + len(content).to_bytes(4, "big") + content if signed else content)
    Journal(path)


def test_a_roster_for_more_than_a_network_holds_or_with_impossible_numbers_is_an_error(tmp_path: Path) -> None:
    with refused_as("too-large", "100,000"):
        Roster(tmp_path / "roster.json", 100_001)
    for samples in ("-1", "9" * 400, "9" * 5000):
        (tmp_path / "roster.json").write_text(f'{{"names": ["a"], "closed": true, "samples": {{"a": {samples}}}}}')
        with refused_as("damaged-file", "roster.json"):
            Roster(tmp_path / "roster.json", 1)


def test_a_roster_is_written_by_two_threads_at_once(tmp_path: Path) -> None:
    """The link's thread enrols while the main thread begins a round."""
    roster, errors = Roster(tmp_path / "roster.json", 200), []

    def enrol() -> None:
        for number in range(200):
            roster.enrol([f"w{number}"])
            roster.note_samples(f"w{number}", number)

    thread = threading.Thread(target=enrol)
    thread.start()
    while thread.is_alive():
        try:
            roster.save()
        except OSError as error:
            errors.append(error)
    roster.save()
    assert errors == []
    assert Roster(tmp_path / "roster.json", 200).names == tuple(f"w{number}" for number in range(200))
