from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbdsl.network import broker as brokers
from cbdsl.network.broker import USERNAME, Broker, Kind, find_mosquitto, running_broker
from cbdsl.network.mqtt import Meter, MqttLink, parse_address
from support.mqtt_client import Client, wait_for
from support.refusals import refused_as

pytestmark = pytest.mark.slow

CHUNK = os.urandom(100 * 1024)
needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto")
EACH_KIND = pytest.mark.parametrize("kind", [pytest.param("mosquitto", marks=needs_mosquitto), "embedded"])


@pytest.fixture
def broker(tmp_path: Path, kind: Kind) -> Iterator[Broker]:
    with running_broker(tmp_path, kind) as running:
        yield running


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listening_at(port: int) -> set[str]:
    """Addresses, as Linux writes them, at which somebody listens on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")}


def connect(broker: Broker, name: str) -> Client:
    return Client(broker.port, name).connect()


@EACH_KIND
def test_latecomers_get_what_is_retained_whole(broker: Broker) -> None:
    server = connect(broker, "server")
    for number in range(3):
        server.publish(f"cbdsl/s/down/model/{number}", CHUNK, retain=True)
    server.publish("cbdsl/s/down/model/2", b"", retain=True)  # forgotten again
    late = connect(broker, "late")
    late.subscribe("cbdsl/s/down/#")
    assert wait_for(lambda: len(late.received) == 2)
    assert sorted(late.received) == [(f"cbdsl/s/down/model/{number}", CHUNK, True) for number in range(2)]
    late.close()
    server.close()


@EACH_KIND
def test_a_hundred_messages_arrive_once_and_in_order(broker: Broker) -> None:
    server, worker = connect(broker, "server"), connect(broker, "worker")
    server.subscribe("cbdsl/s/from/+/#")
    for number in range(100):
        worker.publish_later(f"cbdsl/s/from/worker/upload/{number}", CHUNK[: number * 1024])
    assert wait_for(lambda: len(server.received) == 100)
    assert server.topics() == [f"cbdsl/s/from/worker/upload/{number}" for number in range(100)]
    assert [len(payload) for _, payload, _ in server.received] == [number * 1024 for number in range(100)]
    worker.close()
    server.close()


@EACH_KIND
def test_a_message_larger_than_any_of_ours_is_not_passed_on(broker: Broker) -> None:
    server, huge, worker = connect(broker, "server"), connect(broker, "huge"), connect(broker, "worker")
    server.subscribe("cbdsl/s/from/#")
    huge.publish_later("cbdsl/s/from/huge/upload/0", CHUNK + CHUNK)  # mosquitto cuts the sender off, amqtt does not
    if broker.kind == "mosquitto":
        assert wait_for(lambda: huge.losses)
    worker.publish("cbdsl/s/from/worker/upload/1", CHUNK)
    assert wait_for(lambda: server.received)
    assert server.topics() == ["cbdsl/s/from/worker/upload/1"]
    huge.close()
    worker.close()
    server.close()


@EACH_KIND
def test_a_last_will_is_delivered_and_retained(broker: Broker) -> None:
    server = connect(broker, "server")
    server.subscribe("cbdsl/s/from/#")
    worker = Client(broker.port, "worker", will="cbdsl/s/from/worker/status").connect()
    worker.vanish()
    assert wait_for(lambda: server.received == [("cbdsl/s/from/worker/status", b"gone", False)])
    late = connect(broker, "late")
    late.subscribe("cbdsl/s/from/#")
    assert wait_for(lambda: late.received == [("cbdsl/s/from/worker/status", b"gone", True)])
    late.close()
    server.close()


@EACH_KIND
def test_a_client_id_has_one_connection_at_a_time(broker: Broker) -> None:
    first = connect(broker, "worker")
    second = connect(broker, "worker")
    assert wait_for(lambda: first.losses)
    first.close()
    second.close()


@EACH_KIND
def test_a_durable_session_gets_what_was_sent_meanwhile(broker: Broker) -> None:
    server, worker = connect(broker, "server"), Client(broker.port, "worker", clean=False).connect()
    worker.subscribe("cbdsl/s/to/worker/#")
    worker.close()
    server.publish("cbdsl/s/to/worker/invitation", b"now")
    back = Client(broker.port, "worker", clean=False).connect()
    assert wait_for(lambda: back.topics() == ["cbdsl/s/to/worker/invitation"])
    back.close()
    server.close()


@EACH_KIND
def test_sixty_clients_at_once_each_get_their_part(broker: Broker) -> None:
    server = connect(broker, "server")
    for number in range(4):
        server.publish(f"cbdsl/s/down/model/{number}", CHUNK, retain=True)
    workers = [connect(broker, f"worker-{number}") for number in range(60)]
    for number, worker in enumerate(workers):
        worker.subscribe("cbdsl/s/down/#", f"cbdsl/s/to/worker-{number}/#")
    assert wait_for(lambda: all(len(worker.received) == 4 for worker in workers), 30)
    for number in range(60):
        server.publish_later(f"cbdsl/s/to/worker-{number}/invitation", b"%d" % number)
    assert wait_for(lambda: all(len(worker.received) == 5 for worker in workers), 30)
    assert all(worker.received[4][1] == b"%d" % number for number, worker in enumerate(workers))
    for client in [*workers, server]:
        client.close()


@EACH_KIND
def test_with_a_password_nobody_else_on_this_machine_gets_in(tmp_path: Path, kind: Kind) -> None:
    with running_broker(tmp_path, kind, password="known to us") as broker:
        for username, password in (("", ""), (brokers.USERNAME, ""), (brokers.USERNAME, "guess"), ("x", "known to us")):
            with pytest.raises(OSError, match=r"uthori|closed|refused|reset|password"):
                Client(broker.port, "stranger", username=username, password=password).connect()
        ours = Client(broker.port, "ours", username=brokers.USERNAME, password="known to us").connect()
        ours.subscribe("cbdsl/s/down/#")
        ours.publish("cbdsl/s/down/order", b"1")
        assert wait_for(lambda: ours.received)
        ours.close()
        words = Path(f"/proc/{broker.pid}/cmdline").read_bytes()
    for path in tmp_path.rglob("*"):
        assert b"known to us" not in path.read_bytes(), path
        assert path.name != "passwords" or path.stat().st_mode & 0o077 == 0
    assert b"known to us" not in words


def test_clients_of_the_embedded_broker_get_nothing_they_did_not_ask_for(tmp_path: Path) -> None:
    with running_broker(tmp_path, "embedded") as broker:
        server, other = connect(broker, "server"), connect(broker, "other")
        server.publish("cbdsl/s/down/order", b"1", retain=True)
        other.subscribe("cbdsl/s/down/#")
        silent = connect(broker, "silent")  # amqtt alone would send it what the other subscribed to
        silent.subscribe("cbdsl/s/to/silent/#")
        server.publish("cbdsl/s/to/silent/welcome", b"0")
        assert wait_for(lambda: silent.received)
        assert silent.topics() == ["cbdsl/s/to/silent/welcome"]
        for client in (server, other, silent):
            client.close()


@EACH_KIND
def test_garbage_does_not_stop_it(broker: Broker) -> None:
    server, worker = connect(broker, "server"), connect(broker, "worker")
    server.subscribe("cbdsl/s/from/#")
    beginnings = [b"", b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x0a\x00\x00"]  # nothing, or a proper CONNECT
    held = []
    for number in range(60):
        stream = socket.create_connection(("127.0.0.1", broker.port), timeout=5)
        stream.sendall(beginnings[number % 2] + os.urandom(1 + 37 * number))
        held.append(stream)
    for number in range(20):
        worker.publish_later(f"cbdsl/s/from/worker/upload/{number}", CHUNK)
    assert wait_for(lambda: len(server.received) == 20)
    for stream in held:
        stream.close()
    connect(broker, "late").close()
    worker.close()
    server.close()


@EACH_KIND
def test_it_listens_on_loopback_alone(broker: Broker) -> None:
    assert listening_at(broker.port) == {f"0100007F:{broker.port:04X}"}


@EACH_KIND
def test_it_ends_with_the_block_and_can_start_again_on_its_port(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(ZeroDivisionError), running_broker(tmp_path, kind) as first:
        raise ZeroDivisionError
    assert not alive(first.pid)
    with running_broker(tmp_path, kind, port=first.port) as second:
        os.kill(second.pid, signal.SIGKILL)
        assert wait_for(lambda: not alive(second.pid))
        with running_broker(tmp_path, kind, port=first.port) as third:
            assert third.port == first.port
            connect(third, "client").close()
    assert third.kind == kind
    assert not alive(third.pid)


@EACH_KIND
def test_it_ends_when_its_parent_is_killed(tmp_path: Path, kind: Kind) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        from cbdsl.network.broker import running_broker
        with running_broker(Path({str(tmp_path)!r}), {kind!r}) as broker:
            print(broker.pid, flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert wait_for(lambda: not alive(pid))


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refused_as("conflict", f"Port {port} on 127.0.0.1"), running_broker(tmp_path, port=port):
            pass


def test_mosquitto_asked_for_and_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "find_mosquitto", lambda: None)
    with refused_as("missing-package", "apt install mosquitto"), running_broker(tmp_path, "mosquitto"):
        pass
    with refused_as("missing-package", "mosquitto"), running_broker(tmp_path, config=tmp_path / "m"):
        pass
    with running_broker(tmp_path) as broker:
        assert broker.kind == "embedded"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with refused_as("missing-package", "amqtt"), running_broker(tmp_path):
        pass


def test_impossible_wishes(tmp_path: Path) -> None:
    with refused_as("conflict", "configuration"), running_broker(tmp_path, "embedded", tmp_path / "m"):
        pass
    with refused_as("unknown-name", "rabbit"), running_broker(tmp_path, "rabbit"):  # type: ignore[arg-type]
        pass


@needs_mosquitto
def test_a_broken_configuration_is_quoted(tmp_path: Path) -> None:
    config = tmp_path / "broken.conf"
    config.write_text("no_such_setting 3\n")
    with refused_as("connection-failed", "no_such_setting"), running_broker(tmp_path / "log", config=config):
        pass


@needs_mosquitto
def test_every_listener_of_a_configuration_is_moved_to_loopback(tmp_path: Path) -> None:
    config = tmp_path / "two.conf"
    config.write_text("listener 1\nlistener 2 0.0.0.0\nallow_anonymous true\n")
    with running_broker(tmp_path / "log", config=config) as broker:
        assert broker.server_port != broker.port
        server, worker = Client(broker.server_port, "server").connect(), connect(broker, "worker")
        server.subscribe("cbdsl/s/from/#")
        worker.publish("cbdsl/s/from/worker/hello", b"here")
        assert wait_for(lambda: server.received)
        for port in (broker.port, broker.server_port):
            assert listening_at(port) == {f"0100007F:{port:04X}"}
        server.close()
        worker.close()


@needs_mosquitto
@pytest.mark.parametrize("password", ["", "secret"])
def test_mosquitto_has_nothing_to_warn_of(tmp_path: Path, password: str) -> None:
    private = tmp_path / "run"
    private.mkdir(mode=0o700)  # as a run's folder is: who the broker becomes may not enter it
    with running_broker(private / "broker", "mosquitto", password=password) as running:
        client = Client(running.port, "anybody", username=USERNAME, password=password or "guess").connect()
        client.close()
        user = Path(f"/proc/{running.pid}").stat().st_uid
        assert user == (os.geteuid() or user)
        assert user, "the broker runs as root"
    log = (private / "broker" / "broker.log").read_text()
    assert "as anybody" in log
    assert not re.findall(r"(?i).*(?:warning|deprecated|recommended|error).*", log)


WEB_BROKER = """
import asyncio, sys
from amqtt.broker import Broker

async def main() -> None:
    listener = {"type": "ws", "bind": "127.0.0.1:" + sys.argv[1]}
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {}}
    await Broker({"listeners": {"default": listener}, "plugins": plugins}).start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_messages_travel_over_websockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    heard: list[tuple[str, bytes]] = []
    broker = subprocess.Popen([sys.executable, "-c", WEB_BROKER, str(port)], stderr=subprocess.DEVNULL)
    address = parse_address(f"ws://127.0.0.1:{port}/mqtt")
    link = MqttLink(address, lambda topic, payload: heard.append((topic, payload)), lambda: None, Meter())
    link.subscribe("cbdsl/lab/#")
    try:
        link.open()  # it tries again until the broker listens
        assert link.connected.wait(40)
        link.publish("cbdsl/lab/down/order", bytes(50_000))
        assert wait_for(lambda: heard)
    finally:
        link.close()
        brokers.end_process(broker)
    assert heard == [("cbdsl/lab/down/order", bytes(50_000))]
