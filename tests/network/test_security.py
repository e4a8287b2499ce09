"""A real mosquitto under the provisioned rules, and everything that a stranger or a member gone bad may try."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cbdsl.network import topics
from cbdsl.network.access_rules import find_plugin
from cbdsl.network.broker import Broker, find_mosquitto, running_broker
from cbdsl.network.certificates import Authority
from cbdsl.network.mqtt import Meter, MqttLink, parse_address
from cbdsl.network.provision import add_workers, provision, read_settings, reissue, renew, revoke, update_broker
from cbdsl.network.tls import SERVER_NAME
from support.deployment import memory_of
from support.mqtt_client import Client, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_mosquitto() is None,
        reason="no mosquitto: apt-get install mosquitto",
    ),
]
SWARM = "lab"
ROOT = f"cbdsl/{SWARM}"
Connect = Callable[..., Client]


def context(folder: Path, role: str) -> ssl.SSLContext:
    """TLS as server and workers use it."""
    made = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if role:
        made.load_cert_chain(folder / f"{role}.crt", folder / f"{role}.key")
    return made


def worker(keys: Path, name: str) -> ssl.SSLContext:
    return context(keys / "workers" / name, "worker")


@pytest.fixture(scope="module", params=["plugin", "acl"])
def keys(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if request.param == "plugin" and find_plugin() is None:
        pytest.skip("no dynamic-security plugin beside mosquitto")
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], SWARM, ["localhost"], plugin="" if request.param == "acl" else None)
    return folder


@pytest.fixture
def broker(keys: Path, tmp_path: Path) -> Iterator[Broker]:
    with running_broker(tmp_path, config=keys / "broker" / "mosquitto.conf") as running:
        yield running
    for kept in (keys / "broker" / "data").iterdir():
        kept.unlink()


@pytest.fixture
def connect(broker: Broker) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connected(tls: ssl.SSLContext | None, name: str = "", **options: object) -> Client:
            client = Client(broker.port, name, tls, **options).connect()  # type: ignore[arg-type]
            stack.callback(client.close)
            return client

        yield connected


@pytest.fixture
def server(connect: Connect, keys: Path) -> Client:
    client = connect(context(keys / "server", "server"))
    client.subscribe(f"{ROOT}/from/+/#")
    return client


def settle(anna: Client, server: Client) -> None:
    """Everything that came before is through once this message is: a broker keeps the order of one client."""
    server.received.clear()
    anna.publish(f"{ROOT}/from/anna/hello", b"settled")
    assert wait_for(lambda: server.received), "the broker no longer passes on what is allowed"


def test_members_do_their_work(connect: Connect, keys: Path, server: Client) -> None:
    anna = connect(worker(keys, "anna"))
    server.publish(f"{ROOT}/down/model/0", b"weights", retain=True)
    anna.subscribe(f"{ROOT}/down/#", f"{ROOT}/to/anna/#")
    assert wait_for(lambda: anna.received == [(f"{ROOT}/down/model/0", b"weights", True)])
    for_anna = [f"{ROOT}/to/anna/{what}" for what in ("welcome", "invitation", "start/0")]
    for topic in for_anna:
        server.publish(topic, b"you")
    assert wait_for(lambda: anna.topics()[1:] == for_anna)
    for what in ("hello", "claim", "upload/0", "upload/17", "status"):
        anna.publish(f"{ROOT}/from/anna/{what}", os.urandom(100 * 1024))
    assert wait_for(lambda: len(server.received) == 5)


def _link(keys: Path, who: str, role: str, broker: Broker, received: list[tuple[str, bytes]]) -> MqttLink:
    home = keys / who
    url = f"mqtts://localhost:{broker.port}"
    address = parse_address(url, keys / "server" / "ca.crt", home / f"{role}.crt", home / f"{role}.key")
    return MqttLink(address, lambda topic, payload: received.append((topic, payload)), lambda: None, Meter())


def test_the_programs_own_connection_works_under_these_rules(keys: Path, broker: Broker, tmp_path: Path) -> None:
    provision(tmp_path / "other", ["anna"], SWARM, ["localhost"])
    heard: list[tuple[str, bytes]] = []
    server = _link(keys, "server", "server", broker, heard)
    server.subscribe(topics.from_all(SWARM))
    member = _link(keys, "workers/anna", "worker", broker, heard)
    stranger = _link(keys, str(tmp_path / "other" / "workers" / "anna"), "worker", broker, heard)
    for link in (server, member, stranger):
        link.open()
    try:
        assert server.connected.wait(5)
        assert member.connected.wait(5)
        member.publish(f"{ROOT}/from/anna/status", b"honest", retain=True)  # comes, whoever was there first
        stranger.publish(f"{ROOT}/from/anna/status", b"strange", retain=True)
        assert wait_for(lambda: heard == [(f"{ROOT}/from/anna/status", b"honest")]), heard
        assert not stranger.connected.wait(0.5)  # it tries again and again, and never raises
        assert len(heard) == 1
    finally:
        for link in (server, member, stranger):
            link.close()


def test_the_monitor_sees_statistics_and_who_is_there_alone(connect: Connect, keys: Path, server: Client) -> None:
    monitor, anna = connect(context(keys / "monitor", "monitor")), connect(worker(keys, "anna"))
    monitor.subscribe("#", "$SYS/broker/version", f"{ROOT}/from/+/status")
    server.publish(f"{ROOT}/down/model/0", b"weights", retain=True)
    server.publish(f"{ROOT}/to/anna/welcome", b"you")
    monitor.publish(f"{ROOT}/down/order", b"forged")
    monitor.publish(f"{ROOT}/from/anna/claim", b"forged")
    anna.publish(f"{ROOT}/from/anna/claim", b"score")
    anna.publish(f"{ROOT}/from/anna/status", b"there")
    assert wait_for(lambda: len(server.received) == 2)
    assert wait_for(lambda: len(monitor.received) == 2)
    assert sorted(monitor.topics()) == ["$SYS/broker/version", f"{ROOT}/from/anna/status"]
    assert all(payload != b"forged" for _, payload, _ in server.received)


def test_whoever_has_no_certificate_is_refused(connect: Connect, keys: Path) -> None:
    with pytest.raises(OSError, match=r"closed|certificate|reset"):
        connect(context(keys / "server", ""))
    with pytest.raises(OSError, match=r"closed|reset"):
        connect(None)  # not even TLS


def test_a_stranger_with_the_right_name_from_another_authority_is_refused(
    connect: Connect, keys: Path, tmp_path: Path
) -> None:
    provision(tmp_path / "other", ["anna"], SWARM, ["localhost"])
    stranger = ssl.create_default_context(cafile=str(keys / "ca" / "ca.crt"))
    home = tmp_path / "other" / "workers" / "anna"
    stranger.load_cert_chain(home / "worker.crt", home / "worker.key")
    with pytest.raises(OSError, match=r"closed|unknown ca|reset"):
        connect(stranger)
    with pytest.raises(ssl.SSLCertVerificationError):  # and members do not talk to a stranger's broker
        connect(worker(tmp_path / "other", "anna"))


def _context_of(folder: Path, keys: Path, name: str, days: int, broker: bool = False) -> ssl.SSLContext:
    """A certificate that the authority signed and `cbdsl provision` would not."""
    authority = Authority.load((keys / "ca" / "ca.crt").read_bytes(), (keys / "ca" / "ca.key").read_bytes())
    issued = authority.issue_broker("x", [name], days) if broker else authority.issue_client("x", name, days)
    (folder / "ca.crt").write_bytes(authority.pem().certificate)
    (folder / "x.crt").write_bytes(issued.certificate)
    (folder / "x.key").write_bytes(issued.key)
    return context(folder, "x")


def test_an_expired_certificate_is_refused(connect: Connect, keys: Path, tmp_path: Path) -> None:
    expired = _context_of(tmp_path, keys, "anna", days=0)
    time.sleep(1.1)
    with pytest.raises(OSError, match=r"closed|expired|reset"):
        connect(expired)


def test_the_brokers_certificate_makes_no_client(connect: Connect, keys: Path) -> None:
    with pytest.raises(OSError, match=r"closed|unsupported|reset"):
        connect(context(keys / "broker", "broker"))


def test_a_workers_certificate_makes_no_broker(keys: Path) -> None:
    pretender = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    home = keys / "workers" / "bert"
    pretender.load_cert_chain(home / "worker.crt", home / "worker.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError), pretender.wrap_socket(listener.accept()[0], server_side=True):
                pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
            Client(listener.getsockname()[1], tls=worker(keys, "anna")).connect()
        thread.join(5)


def test_a_worker_cannot_speak_as_another_one_nor_as_the_server(connect: Connect, keys: Path, server: Client) -> None:
    bert, anna = connect(worker(keys, "bert")), connect(worker(keys, "anna"))
    bert.subscribe(f"{ROOT}/down/#", f"{ROOT}/to/bert/#")
    bert.received.clear()
    for topic in (
        *(f"{ROOT}/from/bert/{what}" for what in ("hello", "claim", "upload/0", "status")),
        f"{ROOT}/from/anna", f"{ROOT}/from/anna/upload", f"{ROOT}/from/anna/upload/0/0", f"{ROOT}/from/anna/else",
        f"{ROOT}/from/Anna/claim", f"{ROOT}/from//claim", f"{ROOT}/from/{SERVER_NAME}/claim",
        f"{ROOT}/down/order", f"{ROOT}/down/model/0", f"{ROOT}/to/bert/invitation", f"{ROOT}/to/anna/welcome",
        "cbdsl/other/from/anna/claim", "elsewhere", "$SYS/broker/uptime",
    ):  # fmt: skip
        anna.publish(topic, b"forged", retain=True)
    settle(anna, server)
    assert server.topics() == [f"{ROOT}/from/anna/hello"]
    assert not bert.received
    watch = connect(context(keys / "server", "server"))  # nothing was kept either
    watch.subscribe(f"{ROOT}/#", "elsewhere", "cbdsl/other/#")
    assert not [payload for _, payload, _ in watch.received if payload == b"forged"]


def test_a_worker_reads_nothing_that_is_not_for_it(connect: Connect, keys: Path, server: Client) -> None:
    anna, bert = connect(worker(keys, "anna")), connect(worker(keys, "bert"))
    bert.publish(f"{ROOT}/from/bert/status", b"secret", retain=True)
    anna.subscribe(
        "#",
        f"{ROOT}/#",
        f"{ROOT}/to/bert/#",
        f"{ROOT}/to/+/#",
        f"{ROOT}/from/#",
        f"{ROOT}/from/anna/#",
        "$SYS/#",
        f"{ROOT}/to/anna/#",
    )
    server.publish(f"{ROOT}/to/bert/invitation", b"secret")
    server.publish(f"{ROOT}/down/secret", b"secret", retain=True)
    bert.publish(f"{ROOT}/from/bert/claim", b"secret")
    server.publish(f"{ROOT}/to/anna/welcome", b"open")
    assert wait_for(lambda: (f"{ROOT}/to/anna/welcome", b"open", False) in anna.received)
    assert not [topic for topic, payload, _ in anna.received if payload == b"secret" or topic.startswith("$SYS")]


def test_a_user_name_or_a_client_id_lends_nobody_rights(connect: Connect, keys: Path, server: Client) -> None:
    bert = connect(worker(keys, "bert"))
    bert.subscribe(f"{ROOT}/to/bert/#", f"{ROOT}/down/#")
    bert.received.clear()
    anna = connect(worker(keys, "anna"), "bert", username=SERVER_NAME)
    anna.subscribe(f"{ROOT}/to/bert/#", f"{ROOT}/from/#")
    anna.publish(f"{ROOT}/down/order", b"forged")
    anna.publish(f"{ROOT}/from/bert/claim", b"forged")
    settle(anna, server)
    assert server.topics() == [f"{ROOT}/from/anna/hello"]
    assert not bert.received
    assert not bert.losses, "a member threw another one out by taking its client id"
    server.publish(f"{ROOT}/to/bert/invitation", b"now")
    assert wait_for(lambda: bert.topics() == [f"{ROOT}/to/bert/invitation"])
    assert not anna.received


def test_a_waiting_session_cannot_be_stolen(connect: Connect, keys: Path, broker: Broker, server: Client) -> None:
    bert = Client(broker.port, "bert", worker(keys, "bert"), clean=False).connect()
    bert.subscribe(f"{ROOT}/to/bert/#")
    bert.close()
    server.publish(f"{ROOT}/to/bert/invitation", b"waits")
    thief = connect(worker(keys, "anna"), "bert", clean=False)
    settle(thief, server)
    assert not thief.received
    back = connect(worker(keys, "bert"), "whatever", clean=False)
    assert wait_for(lambda: back.topics() == [f"{ROOT}/to/bert/invitation"])
    connect(worker(keys, "bert"))  # a clean session, so that nothing is left


def test_one_certificate_has_one_connection(connect: Connect, keys: Path) -> None:
    first = connect(worker(keys, "anna"), "one")
    connect(worker(keys, "anna"), "two")
    assert wait_for(lambda: first.losses)


def test_a_last_will_is_bound_by_the_rules(keys: Path, broker: Broker, server: Client) -> None:
    try:
        forger = Client(broker.port, "", worker(keys, "anna"), will=f"{ROOT}/from/bert/status").connect()
        forger.vanish()
    except PermissionError:
        pass  # refused when it connects: as good
    honest = Client(broker.port, "", worker(keys, "anna"), will=f"{ROOT}/from/anna/status").connect()
    honest.vanish()
    assert wait_for(lambda: (f"{ROOT}/from/anna/status", b"gone", False) in server.received)
    assert (f"{ROOT}/from/bert/status", b"gone", False) not in server.received


def test_a_wildcard_for_a_name_opens_nothing(connect: Connect, keys: Path, tmp_path: Path, server: Client) -> None:
    plus = connect(_context_of(tmp_path, keys, "+", days=1))
    plus.subscribe(f"{ROOT}/to/+/#", f"{ROOT}/to/bert/#")
    server.publish(f"{ROOT}/to/bert/invitation", b"secret")
    settle(connect(worker(keys, "anna")), server)
    assert not plus.received


def _cut_off(client: Client) -> bool:
    return wait_for(lambda: client.losses)


def test_oversized_messages_are_refused(connect: Connect, keys: Path, broker: Broker, server: Client) -> None:
    anna = connect(worker(keys, "anna"))
    for size in (120 * 1024, 3 * 1024 * 1024):
        huge = connect(worker(keys, "bert"))
        huge.publish_later(f"{ROOT}/from/bert/upload/0", bytes(size))
        assert _cut_off(huge), "a sender of huge packets is not cut off"
    settle(anna, server)
    assert server.topics() == [f"{ROOT}/from/anna/hello"]
    status = Path(f"/proc/{broker.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 64 * 1024


def test_a_huge_length_that_is_only_announced_takes_no_memory(keys: Path, broker: Broker) -> None:
    with (
        socket.create_connection(("127.0.0.1", broker.port), timeout=10) as raw,
        worker(keys, "anna").wrap_socket(raw, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x0a\x00\x00")
        assert secure.recv(4) == b"\x20\x02\x00\x00"
        secure.sendall(b"\x32\xff\xff\xff\x7f")  # a PUBLISH of 256 MB
        assert not secure.recv(64), "the broker waits for 256 MB instead of hanging up"


@pytest.mark.parametrize("plugin", [None, ""], ids=["plugin", "acl"])
def test_revoked_added_and_renewed_workers(tmp_path: Path, plugin: str | None) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna", "bert"], SWARM, ["localhost"], plugin=plugin)
    lost = worker(keys, "anna")
    renew(keys)
    fresh = worker(keys, "anna")
    config = keys / "broker" / "mosquitto.conf"
    with running_broker(tmp_path / "log", config=config) as broker, ExitStack() as stack:

        def connect(tls: ssl.SSLContext) -> Client:
            client = Client(broker.port, "", tls).connect()
            stack.callback(client.close)
            return client

        server, bert = connect(context(keys / "server", "server")), connect(worker(keys, "bert"))
        server.subscribe(f"{ROOT}/from/#")
        anna = connect(lost)  # renewed, but its old certificate has not expired
        settle(anna, server)
        revoke(keys, ["anna"])
        add_workers(keys, ["carl"])
        known = replace(read_settings(keys), server_port=broker.server_port)
        assert not known.plugin or update_broker(known) == 4  # a role and a client each
        os.kill(broker.pid, signal.SIGHUP)  # reads acl and crl.pem anew
        time.sleep(0.5)
        server.received.clear()
        if known.plugin:
            assert wait_for(lambda: anna.losses), "a revoked worker's connection goes on"
        else:
            anna.publish(f"{ROOT}/from/anna/claim", b"still here")
        bert.publish(f"{ROOT}/from/bert/claim", b"fine")
        connect(worker(keys, "carl")).publish(f"{ROOT}/from/carl/hello", b"new")
        assert wait_for(lambda: len(server.received) == 2)
        assert sorted(server.topics()) == [f"{ROOT}/from/bert/claim", f"{ROOT}/from/carl/hello"]
        for certificate in (lost, fresh):
            with pytest.raises(OSError, match=r"closed|revoked|reset"):
                connect(certificate)
        server.publish(f"{ROOT}/down/order", b"kept", retain=True)
    with running_broker(tmp_path / "log", config=config) as broker, ExitStack() as stack:
        with pytest.raises(OSError, match=r"closed|revoked|reset"):
            connect(fresh)
        back = connect(worker(keys, "bert"))
        back.subscribe(f"{ROOT}/down/#")
        assert wait_for(lambda: back.received == [(f"{ROOT}/down/order", b"kept", True)])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, Broker]]:
    """A broker with the plugin, and the folder of its keys with the ports at which it runs."""
    if find_plugin() is None:
        pytest.skip("no dynamic-security plugin beside mosquitto")
    keys = tmp_path / "keys"
    provision(keys, ["anna", "bert"], SWARM, ["localhost"])
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        yield keys, broker


def test_who_was_early_gets_in_without_a_restart(live: tuple[Path, Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, broker = live
    monkeypatch.setattr("cbdsl.network.mqtt._REFUSED_PAUSE", 0.3)
    heard: list[tuple[str, bytes]] = []
    server = _link(keys, "server", "server", broker, heard)
    server.subscribe(topics.from_all(SWARM))
    add_workers(keys, ["carl"])
    carl = _link(keys, "workers/carl", "worker", broker, heard)
    carl.subscribe(topics.to_worker(SWARM, "carl", "#"))
    for link in (server, carl):
        link.open()
    try:
        assert server.connected.wait(5)
        assert carl.connected.wait(5)
        server.publish(topics.to_worker(SWARM, "carl", "welcome"), b"early")
        assert not wait_for(lambda: heard, 1)
        update_broker(replace(read_settings(keys), server_port=broker.server_port), rewrite=True)

        def welcomed() -> bool:
            server.publish(topics.to_worker(SWARM, "carl", "welcome"), b"now")
            return bool(heard)

        assert wait_for(welcomed, 20)
        carl.publish(topics.from_worker(SWARM, "carl", "hello"), b"here")
        assert wait_for(lambda: (topics.from_worker(SWARM, "carl", "hello"), b"here") in heard)
    finally:
        for link in (server, carl):
            link.close()


def test_a_key_that_was_replaced_no_longer_works(live: tuple[Path, Broker]) -> None:
    keys, broker = live
    old = worker(keys, "anna")
    client = Client(broker.port, "", old).connect()
    reissue(keys, ["anna"])
    update_broker(replace(read_settings(keys), server_port=broker.server_port), kick=["anna"])
    assert wait_for(lambda: client.losses)
    os.kill(broker.pid, signal.SIGHUP)
    time.sleep(0.5)
    with pytest.raises(OSError, match=r"closed|revoked|reset"):
        Client(broker.port, "", old).connect()
    Client(broker.port, "", worker(keys, "anna")).connect().close()


def test_no_worker_is_admitted_at_the_servers_listener(live: tuple[Path, Broker]) -> None:
    keys, broker = live
    Client(broker.server_port, "", context(keys / "monitor", "monitor")).connect().close()
    with pytest.raises(OSError, match=r"closed|unknown ca|reset|refused"):
        Client(broker.server_port, "", worker(keys, "anna")).connect()
    Client(broker.server_port, "", context(keys / "server", "server")).connect().close()


def test_a_flood_of_subscriptions_is_refused_and_takes_no_memory(live: tuple[Path, Broker]) -> None:
    """acl files do not judge subscriptions: deep filters filled the broker's memory, and it ended."""
    keys, broker = live
    anna, server = Client(broker.port, "", worker(keys, "anna")).connect(), context(keys / "server", "server")
    before = memory_of(broker.pid)
    deep = "/".join("x" * 190)
    for start in range(0, 12_000, 100):
        anna.subscribe(*(f"{ROOT}/down/{number}/{deep}" for number in range(start, start + 100)))
    assert memory_of(broker.pid) - before < 4 * 1024
    listener = Client(broker.server_port, "", server).connect()
    listener.subscribe(f"{ROOT}/from/+/#")
    settle(anna, listener)
    for client in (anna, listener):
        client.close()


def test_two_swarms_on_one_broker_have_no_power_over_each_other(tmp_path: Path) -> None:
    for swarm in (SWARM, "garden"):
        provision(tmp_path / swarm, ["anna"], swarm, ["localhost"], plugin="")
    home, other = tmp_path / SWARM / "broker", tmp_path / "garden" / "broker"
    for name in ("acl", "ca.crt", "crl.pem", "staff-ca.crt"):  # both are joined by hand
        (home / name).write_bytes((home / name).read_bytes() + b"\n" + (other / name).read_bytes())

    def joined(swarm: str, who: str, role: str) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(tmp_path / SWARM / "ca" / "ca.crt"))
        made.load_cert_chain(tmp_path / swarm / who / f"{role}.crt", tmp_path / swarm / who / f"{role}.key")
        return made

    with running_broker(tmp_path / "log", config=home / "mosquitto.conf") as broker, ExitStack() as stack:
        anna, ours, theirs, namesake = (
            Client(broker.port, "", joined(*whose)).connect()
            for whose in (
                (SWARM, "workers/anna", "worker"), (SWARM, "server", "server"),
                ("garden", "server", "server"), ("garden", "workers/anna", "worker"),
            )
        )  # fmt: skip
        for client in (anna, ours, theirs, namesake):
            stack.callback(client.close)
        ours.subscribe(f"{ROOT}/from/+/#")
        anna.subscribe(f"{ROOT}/down/#", f"{ROOT}/to/anna/#")
        theirs.publish(f"{ROOT}/down/order", b"forged", retain=True)
        theirs.publish(f"{ROOT}/to/anna/welcome", b"forged")
        namesake.publish(f"{ROOT}/from/anna/claim", b"forged")
        settle(anna, ours)
        assert ours.topics() == [f"{ROOT}/from/anna/hello"]
        assert not anna.received
        assert not anna.losses, "the member of the same name in the other swarm ended the connection"


def elsewhere(home: Path) -> tuple[int, int]:
    """Have a broker's folder use two free ports; which ones."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = (int(first.getsockname()[1]), int(second.getsockname()[1]))
    config, outer, inner = home / "conf.d" / "cbdsl.conf", f"listener {ports[0]} 127.0.0.1", f"listener {ports[1]}"
    config.write_text(config.read_text().replace("listener 8883", outer).replace("listener 8884", inner))
    return ports


def give_away(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        shutil.chown(path, "mosquitto", "mosquitto")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a broker that becomes somebody else")
def test_a_broker_that_is_somebody_else_reads_the_new_rules(tmp_path: Path) -> None:
    """Who is revoked in the very folder that a broker runs in is silenced by a reload, and the rules are not lost."""
    keys, ours = tmp_path / "keys", tmp_path / "keys" / "broker"
    provision(keys, ["anna", "bert"], SWARM, ["localhost"], plugin="")
    for folder in (tmp_path, *tmp_path.parents):  # it has to get there
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    keys.chmod(0o711)
    ports = elsewhere(ours)
    give_away(ours)
    log = tmp_path / "broker.log"
    with log.open("wb") as file, ExitStack() as stack:
        process = subprocess.Popen([str(find_mosquitto()), "-c", "mosquitto.conf"], cwd=ours, stdout=file, stderr=file)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        assert wait_for(lambda: " running" in log.read_text() or process.poll() is not None, 20)
        server = Client(ports[1], "", context(keys / "server", "server")).connect()
        anna = Client(ports[0], "", worker(keys, "anna")).connect()
        bert = Client(ports[0], "", worker(keys, "bert")).connect()
        for client in (server, anna, bert):
            stack.callback(client.close)
        server.subscribe(f"{ROOT}/from/#")
        anna.subscribe(f"{ROOT}/down/#")
        settle(anna, server)
        revoke(keys, ["anna"])
        process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: "Reloading config" in log.read_text(), 20)
        time.sleep(0.5)
        server.received.clear()
        anna.received.clear()
        anna.publish(f"{ROOT}/from/anna/claim", b"still here")
        anna.publish(f"{ROOT}/from/bert/claim", b"as somebody else")
        bert.publish(f"{ROOT}/from/bert/hello", b"fine")
        server.publish(f"{ROOT}/down/order", b"not for anna")
        assert wait_for(lambda: server.topics() == [f"{ROOT}/from/bert/hello"])
        time.sleep(0.5)
        assert anna.received == []
        assert "nable to open" not in log.read_text()


@pytest.mark.parametrize("as_root", [True, False])
def test_the_broker_starts_as_the_page_says_and_warns_of_nothing(tmp_path: Path, as_root: bool) -> None:
    """As root, who becomes the user mosquitto, and as that user itself; by whoever else runs the tests, as that one."""
    ours, root = tmp_path / "broker", os.geteuid() == 0
    provision(tmp_path / "keys", ["anna", "bert"], SWARM, ["localhost"])
    revoke(tmp_path / "keys", ["bert"])
    shutil.copytree(tmp_path / "keys" / "broker", ours)
    ports = elsewhere(ours)
    if root:
        give_away(ours)
    user = {"user": "mosquitto", "group": "mosquitto", "extra_groups": []} if root and not as_root else {}
    log = tmp_path / "broker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(find_mosquitto()), "-c", "mosquitto.conf"], cwd=ours, stdout=file, stderr=file, **user,  # type: ignore[call-overload]
        )  # fmt: skip
    try:
        assert wait_for(lambda: " running" in log.read_text() or process.poll() is not None, 20)
        anna = Client(ports[0], "", worker(tmp_path / "keys", "anna")).connect()
        anna.close()
        assert wait_for(lambda: "CN=anna,O=cbdsl lab disconnected" in log.read_text())
        assert Path(f"/proc/{process.pid}").stat().st_uid, "it is still root"
    finally:
        process.terminate()
        process.wait(20)
    assert not re.findall(r"(?i).*(?:warning|deprecated|recommended|error).*", log.read_text())
