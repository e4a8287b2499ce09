"""Whoever cannot or must not connect is told why: false brokers, false members, clocks, full houses."""

from __future__ import annotations

import logging
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cbdsl.network import certificates
from cbdsl.network.broker import find_mosquitto, running_broker
from cbdsl.network.certificates import Authority, IssuedCertificate
from cbdsl.network.mqtt import Address, Meter, MqttLink
from cbdsl.network.provision import provision, revoke
from support.mqtt_client import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], "lab", ["localhost"])
    return folder


@pytest.fixture
def keys(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def hear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cbdsl.network")


def authority(keys: Path) -> Authority:
    return Authority.load((keys / "ca" / "ca.crt").read_bytes(), (keys / "ca" / "ca.key").read_bytes())


def put(folder: Path, stem: str, issued: IssuedCertificate) -> None:
    (folder / f"{stem}.crt").write_bytes(issued.certificate)
    (folder / f"{stem}.key").write_bytes(issued.key)


def member(keys: Path, port: int, name: str = "anna") -> Address:
    home = keys / "workers" / name
    return Address("localhost", port, True, home / "ca.crt", home / "worker.crt", home / "worker.key")


def said_to(address: Address, caplog: pytest.LogCaptureFixture) -> str:
    """What a member's own connection has to say of its first attempt, which fails."""
    link = MqttLink(address, lambda *_: None, lambda: None, Meter())
    link.open()
    try:
        assert wait_for(lambda: caplog.messages, 30)
        assert not link.connected.is_set()
        return str(caplog.messages[0])
    finally:
        link.close()


@pytest.fixture
def broker_port(keys: Path, tmp_path: Path) -> Iterator[int]:
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        yield broker.port


def test_a_broker_of_another_authority(tmp_path: Path, broker_port: int, caplog: pytest.LogCaptureFixture) -> None:
    provision(tmp_path / "other", ["anna"], "lab", ["localhost"])
    said = said_to(member(tmp_path / "other", broker_port), caplog)
    assert re.search(
        "will not talk to the broker at mqtts://localhost.* not a broker's certificate by this swarm's authority", said
    )
    assert "another machine pretends to be the broker" in said
    assert "cannot reach" not in said


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (("elsewhere.local", 9, 1), "is not for 'localhost'"),
        (("localhost", 0, 1), "its certificate expired on 20"),
        (("localhost", 9, -2), "its certificate is not valid before 20"),
    ],
)
def test_a_broker_of_another_name_or_time(
    keys: Path, tmp_path: Path, shown: tuple[str, int, int], words: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host, days, backdated = shown
    monkeypatch.setattr(certificates, "_BACKDATED", timedelta(days=backdated))
    put(keys / "broker", "broker", authority(keys).issue_broker("x", [host], days))
    time.sleep(1.1)  # certificates count in seconds
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        assert words in said_to(member(keys, broker.port), caplog)


def test_a_member_that_pretends_to_be_the_broker(keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(keys / "broker", "broker", authority(keys).issue_client("x", "bert", 9))
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        assert "another machine pretends to be the broker" in said_to(member(keys, broker.port), caplog)


def test_no_certificate(keys: Path, broker_port: int, caplog: pytest.LogCaptureFixture) -> None:
    address = Address("localhost", broker_port, True, keys / "server" / "ca.crt")
    assert "requires a certificate, and none was given" in said_to(address, caplog)


def test_a_revoked_certificate(keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    revoke(keys, ["anna"])
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        assert "this certificate is revoked" in said_to(member(keys, broker.port), caplog)


def test_an_expired_certificate(keys: Path, broker_port: int, caplog: pytest.LogCaptureFixture) -> None:
    put(keys / "workers" / "anna", "worker", authority(keys).issue_client("x", "anna", 0))
    time.sleep(1.1)
    assert "this certificate has expired" in said_to(member(keys, broker_port), caplog)


def test_a_certificate_of_another_authority(
    keys: Path, tmp_path: Path, broker_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    provision(tmp_path / "other", ["anna"], "lab", ["localhost"])
    stranger = tmp_path / "other" / "workers" / "anna"
    ca = keys / "server" / "ca.crt"
    address = Address("localhost", broker_port, True, ca, stranger / "worker.crt", stranger / "worker.key")
    assert "does not accept this certificate: it is of another authority" in said_to(address, caplog)


def test_a_broker_that_is_full(keys: Path, broker_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        for _ in range(2 * 2 + 100 + 30):  # more than there are places: where one is given up, another is waiting
            stack.enter_context(socket.create_connection(("127.0.0.1", broker_port)))
        said = said_to(member(keys, broker_port), caplog)
    assert "cannot reach" in said
    assert "It may be at its connection limit" in said


def test_a_broker_without_tls_and_none_at_all(keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_broker(tmp_path / "log") as broker:
        said = said_to(member(keys, broker.port), caplog)
    assert "the broker there uses no TLS" in said
    caplog.clear()
    assert "nothing listens there" in said_to(member(keys, broker.port), caplog)
