"""What a member's own connection says when there is none: each line provoked against a real broker, or an impostor.

What certificates of others do to it is in tests/hostile/test_broker_in_the_middle.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cbdsl.network.broker import USERNAME, Broker, find_mosquitto, running_broker
from cbdsl.network.mqtt import Address, Meter, MqttLink, parse_address
from cbdsl.network.provision import provision, revoke
from support.impostors import impostor, web_page
from support.member_keys import authority, member, put
from support.mqtt_client import Client, wait_for
from support.refusals import refused_as

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], "lab", ["localhost"])
    return folder


@pytest.fixture(scope="module")
def broker(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = keys / "broker" / "mosquitto.conf"
    with running_broker(tmp_path_factory.mktemp("log"), "mosquitto", config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def hear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbdsl.network")


@contextlib.contextmanager
def opened(address: Address) -> Iterator[MqttLink]:
    link = MqttLink(address, lambda *_: None, lambda: None, Meter())
    link.open()
    try:
        yield link
    finally:
        link.close()


def said_to(address: Address, caplog: pytest.LogCaptureFixture) -> str:
    with opened(address) as link:
        assert wait_for(lambda: caplog.messages, 60)
        assert not link.is_up()
    return str(caplog.messages[0])


def test_a_wrong_host_name(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = said_to(member(keys, 8883, host="nowhere.invalid"), caplog)
    assert re.search("cannot reach .*no address is known for 'nowhere.invalid'. Check the name", said)


def test_a_name_that_the_certificate_does_not_have(
    keys: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_to(member(keys, broker.port, host="127.1"), caplog)  # the same machine by a name of its own
    assert "its certificate is not for '127.1'. Use a name" in said


def test_a_host_name_that_cannot_be(keys: Path) -> None:
    del keys
    for name in ("a..b", "x" * 64 + ".local"):
        with refused_as("invalid-address", name):
            parse_address(f"mqtt://{name}:1883")


def test_a_port_where_nobody_listens(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "nothing listens there. Check the port, and that the broker runs" in said_to(member(keys, port), caplog)


def test_tls_to_a_broker_without(keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_broker(tmp_path, "mosquitto", password="x") as plain:
        assert "the broker there uses no TLS. Give its port for TLS" in said_to(member(keys, plain.port), caplog)


def test_no_tls_to_a_broker_with_it(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    said = said_to(Address("localhost", broker.port), caplog)
    assert "the broker there uses TLS. Write mqtts:// instead of mqtt://" in said


def test_something_else_listens(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with impostor(web_page) as port:
        assert "what answers there does not use TLS. Check the port" in said_to(member(keys, port), caplog)
        caplog.clear()
        assert "what answers there is not an MQTT broker. Check the port" in said_to(Address("localhost", port), caplog)


def test_no_ca_was_given(keys: Path, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    said = said_to(member(keys, broker.port, ca=None), caplog)
    assert re.search("will not talk to .*no --ca was given.* Give the ca.crt of this swarm: --ca ca.crt", said)


def test_a_wrong_password_and_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_broker(tmp_path, "mosquitto", password="secret") as plain:
        wrong = Address("localhost", plain.port, username=USERNAME, password="guess")
        assert "Check the user name in the address, and the password in CBDSL_BROKER_PASSWORD" in said_to(wrong, caplog)
        caplog.clear()
        assert "It requires a user name" in said_to(Address("localhost", plain.port), caplog)


def test_a_broker_that_does_not_let_us_hear(caplog: pytest.LogCaptureFixture) -> None:
    """mosquitto's own rules are silent; brokers that answer a subscription with a refusal are heard."""

    def refuses(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"\x20\x02\x00\x00")
        asked = connection.recv(4096)
        connection.sendall(b"\x90\x03" + asked[2:4] + b"\x80")
        connection.recv(4096)

    with impostor(refuses) as port:
        link = MqttLink(Address("localhost", port), lambda *_: None, lambda: None, Meter())
        link.subscribe("cbdsl/lab/down/spec")
        link.open()
        try:
            assert wait_for(lambda: "refuses a subscription. Check --swarm and --id" in caplog.text, 30)
        finally:
            link.close()


def test_a_broker_that_comes_back_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_broker(tmp_path / "first", "mosquitto") as first:
        address = Address("localhost", first.port)
        with opened(address) as link:
            assert wait_for(link.is_up, 30)
            assert not caplog.messages, "a connection that is made at once is not worth a word"
            os.kill(first.pid, signal.SIGKILL)
            assert wait_for(lambda: "cannot reach" in caplog.text, 30)
            with running_broker(tmp_path / "second", "mosquitto", port=first.port):
                assert wait_for(link.is_up, 60)
                lost, absent, back = caplog.messages
    assert lost == f"lost the broker at {address}; trying again"
    assert "nothing listens there" in absent
    assert re.fullmatch(rf"connected again to the broker at {address} after \d+ s", back)


def test_who_is_shut_out_by_a_restart_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna", "bert"], "lab", ["localhost"])
    config = keys / "broker" / "mosquitto.conf"
    started = running_broker(tmp_path / "log", "mosquitto", config=config)
    with started as first, opened(member(keys, first.port)) as link:
        assert wait_for(link.is_up, 30)
        revoke(keys, ["anna"])
        os.kill(first.pid, signal.SIGKILL)
        assert wait_for(lambda: "nothing listens there" in caplog.text, 30)
        with running_broker(tmp_path / "log", "mosquitto", config=config, port=first.port):
            assert wait_for(lambda: "this member is excluded" in caplog.text, 60), caplog.messages


def test_another_reason_of_the_same_kind_is_said_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna"], "lab", ["localhost"])
    monkeypatch.setattr("cbdsl.network.certificates._BACKDATED", timedelta(days=1))
    config = keys / "broker" / "mosquitto.conf"
    put(keys / "broker", "broker", authority(keys).issue_broker("x", ["elsewhere.local"], 9))
    with running_broker(tmp_path / "log", "mosquitto", config=config) as first, opened(member(keys, first.port)):
        assert wait_for(lambda: "its certificate is not for 'localhost'" in caplog.text, 30)
        put(keys / "broker", "broker", authority(keys).issue_broker("x", ["localhost"], 0))  # past its time
        os.kill(first.pid, signal.SIGHUP)  # mosquitto reads its certificate again
        assert wait_for(lambda: "expired on 20" in caplog.text, 60), caplog.messages


def test_two_processes_with_one_certificate_are_told_so_once(
    keys: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    address = member(keys, broker.port)
    with opened(address), opened(address):
        assert wait_for(lambda: "If another process uses this certificate" in caplog.text, 60)
        heard = len(caplog.messages)
        assert not wait_for(lambda: len(caplog.messages) > heard + 6, 3), "it goes on and on"


def test_keys_that_cannot_be_used_are_named(keys: Path, tmp_path: Path) -> None:
    home, garbage, locked = keys / "workers" / "anna", tmp_path / "garbage", tmp_path / "locked.key"
    garbage.write_bytes(os.urandom(300))
    unlock = ["openssl", "pkey", "-in", str(home / "worker.key"), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(unlock, check=True)
    for changes, code in (
        ({"key": keys / "workers" / "bert" / "worker.key"}, "conflict"),
        ({"key": locked}, "not-supported"),
        ({"key": garbage}, "unreadable-file"),
        ({"certificate": garbage}, "unreadable-file"),
        ({"ca": garbage}, "unreadable-file"),
        ({"ca": home / "worker.key"}, "unreadable-file"),
        ({"key": tmp_path}, "unreadable-file"),
    ):
        with refused_as(code, *changes.values()):
            MqttLink(member(keys, 1, "anna", **changes), lambda *_: None, lambda: None, Meter())


def test_a_client_that_is_thrown_out_was_there(keys: Path, broker: Broker) -> None:
    """What the safe default of `cbdsl doctor` rests on: one certificate, one connection."""
    home = keys / "workers" / "bert"
    context = ssl.create_default_context(cafile=str(home / "ca.crt"))
    context.load_cert_chain(home / "worker.crt", home / "worker.key")
    first = Client(broker.port, "first", context).connect()
    second = Client(broker.port, "second", context).connect()
    assert wait_for(lambda: first.losses)
    first.close()
    second.close()
