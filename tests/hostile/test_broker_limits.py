"""What strangers and members can take of a provisioned broker: connections, memory, what it keeps over a restart."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cbdsl.network import topics
from cbdsl.network.broker import Broker, find_mosquitto, running_broker
from cbdsl.network.mqtt import Address, Meter, MqttLink
from cbdsl.network.provision import read_settings
from support.broker_members import NAMES, SWARM, keys, member
from support.deployment import memory_of
from support.light_workers import context_of, publish
from support.mqtt_client import Client, wait_for

__all__ = ["keys"]  # a fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]
PIECE = os.urandom(100 * 1024)


@pytest.fixture
def start(keys: Path, tmp_path: Path) -> Iterator[Callable[[], Broker]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf"))


def server_context(keys: Path, role: str = "server") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(keys / role / "ca.crt"))
    made.load_cert_chain(keys / role / f"{role}.crt", keys / role / f"{role}.key")
    return made


def acknowledged(connection: ssl.SSLSocket, count: int) -> int:
    """How many acknowledgements come, up to so many."""
    heard = 0
    with suppress(OSError):
        while heard < 4 * count and (more := connection.recv(4096)):
            heard += len(more)
    return heard // 4


def kept_for(keys: Path, broker: Broker) -> list[str]:
    """The topics below `from/` of which the broker keeps something."""
    watch = Client(broker.server_port, "", server_context(keys)).connect()
    watch.subscribe(topics.from_all(SWARM))
    marker = topics.from_worker(SWARM, "anna", "hello")
    watch.publish(marker, b"through")
    assert wait_for(lambda: (marker, b"through", False) in watch.received, 30)
    watch.close()
    return sorted(topic for topic, _, retained in watch.received if retained)


def leave_junk(keys: Path, broker: Broker, pieces: int) -> None:
    with member(keys, "anna", broker.port) as anna:
        for number in range(pieces):
            topic = topics.from_worker(SWARM, "anna", f"upload/{number}")
            anna.sendall(publish(topic, PIECE, number + 1, retain=True))
        assert acknowledged(anna, pieces) == pieces


def test_strangers_who_take_every_connection_keep_neither_server_nor_monitor_out(
    keys: Path, start: Callable[[], Broker]
) -> None:
    broker = start()
    anna = Client(broker.port, "", context_of(keys, "anna")).connect()
    with ExitStack() as stack:
        for _ in range(read_settings(keys).connections + 20):
            stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), timeout=10))
        with pytest.raises(OSError, match=r"closed|reset|EOF"):
            Client(broker.port, "", context_of(keys, "bert")).connect()
        server = Client(broker.server_port, "", server_context(keys)).connect()
        server.subscribe(topics.from_all(SWARM))
        anna.publish(topics.from_worker(SWARM, "anna", "claim"), b"score")
        assert wait_for(lambda: server.received)
        Client(broker.server_port, "", server_context(keys, "monitor")).connect().close()
        server.close()
    bert: list[Client] = []

    def back() -> bool:
        with suppress(OSError):
            bert.append(Client(broker.port, "", context_of(keys, "bert")).connect())
        return bool(bert)

    assert wait_for(back, 30), "the strangers are gone and there is still no room"
    for client in (anna, *bert):
        client.close()


def test_the_servers_listener_is_open_to_this_machine_alone(keys: Path, start: Callable[[], Broker]) -> None:
    start()
    lines = (keys / "broker" / "conf.d" / "cbdsl.conf").read_text().splitlines()
    assert [line for line in lines if line.startswith("listener")] == ["listener 8883", "listener 8884 127.0.0.1"]


def test_a_member_leaves_no_more_on_the_broker_than_one_model(keys: Path, start: Callable[[], Broker]) -> None:
    broker = start()
    before = memory_of(broker.pid)
    leave_junk(keys, broker, 600)  # 60 MB
    assert len(kept_for(keys, broker)) == read_settings(keys).pieces == 40
    assert memory_of(broker.pid) - before < 30 * 1024


def test_the_server_clears_what_should_not_be_kept(keys: Path, tmp_path: Path, start: Callable[[], Broker]) -> None:
    with running_broker(tmp_path / "first", config=keys / "broker" / "mosquitto.conf") as broker:
        leave_junk(keys, broker, 5)
        anna = Client(broker.port, "", context_of(keys, "anna")).connect()
        for what in ("hello", "claim", "status"):
            anna.publish(topics.from_worker(SWARM, "anna", what), b"\x01", retain=True)
        anna.close()
    broker, home = start(), keys / "server"  # all of it outlives the restart
    heard: list[tuple[str, bytes]] = []
    address = Address("localhost", broker.server_port, True, home / "ca.crt", home / "server.crt", home / "server.key")
    link = MqttLink(address, lambda topic, payload: heard.append((topic, payload)), lambda: None, Meter())
    link.subscribe(topics.from_all(SWARM))
    link.open()
    status = topics.from_worker(SWARM, "anna", "status")
    assert wait_for(lambda: heard)
    bert = Client(broker.port, "", context_of(keys, "bert")).connect()
    bert.publish(topics.from_worker(SWARM, "bert", "claim"), b"live")
    assert wait_for(lambda: len(heard) > 1)
    link.close()
    bert.close()
    assert heard == [(status, b"\x01"), (topics.from_worker(SWARM, "bert", "claim"), b"live")]
    assert kept_for(keys, broker) == [status]


def test_messages_of_quality_two_that_are_never_released_take_no_memory(
    keys: Path, start: Callable[[], Broker]
) -> None:
    broker = start()
    before = memory_of(broker.pid)
    topic = topics.from_worker(SWARM, "anna", "upload/0")
    with member(keys, "anna", broker.port) as anna, suppress(OSError):
        for number in range(1000):  # 100 MB
            anna.sendall(publish(topic, PIECE, number + 1, qos=2))
    assert memory_of(broker.pid, "VmHWM") - before < 16 * 1024


def test_at_its_memory_limit_the_broker_lives_and_grows_no_further(keys: Path, start: Callable[[], Broker]) -> None:
    config = keys / "broker" / "mosquitto.conf"
    text = config.read_text()
    config.write_text(re.sub(r"(?m)^memory_limit \d+$", f"memory_limit {9 * 2**20}", text))
    broker = start()
    for name in NAMES:
        with member(keys, name, broker.port) as one, suppress(OSError):
            for number in range(40):
                one.sendall(
                    publish(topics.from_worker(SWARM, name, f"upload/{number}"), PIECE, number + 1, retain=True)
                )
            acknowledged(one, 40)
    assert memory_of(broker.pid) < 40 * 1024
    assert Path(f"/proc/{broker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
