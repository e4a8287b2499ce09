"""`cbdsl doctor --broker`: each line provoked against a real broker or an impostor, on a bare installation too."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import cbdsl as package
from cbdsl.cli.app import app
from cbdsl.network import certificates, doctor as network_doctor
from cbdsl.network.broker import Broker, find_mosquitto, running_broker
from cbdsl.network.mqtt import Address, parse_address
from cbdsl.network.provision import add_workers, provision, revoke
from cbdsl.network.tls import make_context, organization_of
from support.bare_environment import bare
from support.deployment import deployment, pictures, tiny_spec
from support.helpers import blobs, cbdsl, perceptron, small_spec
from support.impostors import impostor, mute, web_page
from support.member_keys import authority, options, put
from support.mqtt_client import Client, wait_for
from support.refusals import refused_as

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]
Said = dict[str, tuple[str, str]]  # by step: sign and text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], "lab", ["localhost"])
    return folder


@pytest.fixture
def keys(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def broker(keys: Path, tmp_path: Path) -> Iterator[Broker]:
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as running:
        yield running


def examined(code: int, stdout: str) -> Said:
    rows = [line.split(None, 2) for line in stdout.splitlines()]
    assert code == (1 if any(sign == "WRONG" for _, sign, _ in rows) else 0), stdout
    return {step: (sign, text) for step, sign, text in rows}


def doctor(*words: str) -> Said:
    """What it says, in this process: to start one takes longer than to look."""
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return examined(done.exit_code, done.stdout)


def at(port: int) -> list[str]:
    return ["--broker", f"mqtts://localhost:{port}"]


def test_all_is_well_and_nobody_is_disturbed_unless_asked_for(keys: Path, broker: Broker, tmp_path: Path) -> None:
    said = doctor(*at(broker.port), *options(keys), "--id", "anna", "--swarm", "lab")
    steps = ["host", "port", "certificate", "key", "tls", "broker", "clock", "login", "memory"]
    assert list(said) == steps
    assert [said[step][0] for step in steps] == ["ok"] * 7 + ["-"] * 2
    assert "a certificate has one connection" in said["login"][1]
    assert "as anna" not in (tmp_path / "log" / "broker.log").read_text(), "it logged in without being asked"
    said = doctor(*at(broker.port), *options(keys), "--connect")  # name and swarm are the certificate's
    assert said["login"] == ("ok", "the broker lets us in.")
    assert said["rights"] == ("ok", "'anna' may write in the swarm 'lab'.")
    assert said["server"] == ("-", "no run is announced in the swarm 'lab': `cbdsl serve` has not begun.")


def test_a_bare_device_can_be_examined(keys: Path, broker: Broker, tmp_path: Path) -> None:
    done = bare("doctor", *at(broker.port), *options(keys), "--connect", cwd=tmp_path)
    assert not done.stderr
    said = examined(done.returncode, done.stdout)
    assert said["rights"][0] == "ok"


def test_names_and_ports(keys: Path, broker: Broker) -> None:
    said = doctor("--broker", "mqtts://nowhere.invalid:8883", *options(keys))
    assert list(said) == ["host"]
    assert "no address is known for 'nowhere.invalid'" in said["host"][1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    said = doctor(*at(free), *options(keys))
    assert list(said) == ["host", "port"]
    assert "nothing listens there" in said["port"][1]
    said = doctor("--broker", f"mqtts://127.1:{broker.port}", *options(keys))
    assert "its certificate is not for '127.1'" in said["broker"][1]
    said = doctor("--broker", f"mqtt://localhost:{broker.port}")
    assert said["login"] == (
        "WRONG",
        "the broker there uses TLS. Write mqtts:// instead of mqtt://, with --ca, --cert and --key.",
    )
    with impostor(web_page) as port:
        assert "does not use TLS. Check the port" in doctor(*at(port), *options(keys))["broker"][1]
        said = doctor("--broker", f"mqtt://localhost:{port}")
        assert "is not an MQTT broker" in said["login"][1]


def test_a_broker_without_tls(keys: Path, tmp_path: Path) -> None:
    with running_broker(tmp_path / "log", "mosquitto") as plain:
        said = doctor(*at(plain.port), *options(keys))
        assert "the broker there uses no TLS" in said["broker"][1]
        said = doctor("--broker", f"mqtt://localhost:{plain.port}", "--id", "anna")
        assert (said["login"][0], said["rights"][0]) == ("ok", "ok")
    with running_broker(tmp_path / "log", "mosquitto", password="secret") as closed:
        said = doctor("--broker", f"mqtt://localhost:{closed.port}")
        assert said["login"][0] == "WRONG"
        assert "It requires a user name" in said["login"][1]


def test_an_ipv6_address(keys: Path, tmp_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    home = tmp_path / "six"
    shutil.copytree(keys / "broker", home)
    text = (home / "conf.d" / "cbdsl.conf").read_text().splitlines()
    lines = [f"listener {port} ::1" if line.startswith("listener 8883") else line for line in text]
    start = next(number for number, line in enumerate(lines) if line.startswith("listener 8884"))
    end = next(number for number, line in enumerate(lines) if line.startswith("allow_anonymous"))
    (home / "conf.d" / "cbdsl.conf").write_text("\n".join([*lines[:start], *lines[end:], "user root", ""]))
    with (tmp_path / "six.log").open("wb") as log:
        process = subprocess.Popen([str(find_mosquitto()), "-c", "mosquitto.conf"], cwd=home, stdout=log, stderr=log)
    try:
        assert wait_for(lambda: "running" in (tmp_path / "six.log").read_text(), 20)
        said = doctor("--broker", f"mqtts://[::1]:{port}", *options(keys), "--connect")
        assert said["host"] == ("ok", "::1 is ::1.")
        assert said["rights"][0] == "ok"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("backdated", [1, -2])
def test_certificates_outside_their_time(
    keys: Path, tmp_path: Path, backdated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    days, words = (0, "expired on 20") if backdated == 1 else (9, "is not valid before 20")
    monkeypatch.setattr(certificates, "_BACKDATED", timedelta(days=backdated))
    put(keys / "workers" / "anna", "worker", authority(keys).issue_client(organization_of("lab"), "anna", days))
    put(keys / "broker", "broker", authority(keys).issue_broker("x", ["localhost"], days))
    time.sleep(1.1)
    with running_broker(tmp_path / "log", config=keys / "broker" / "mosquitto.conf") as broker:
        said = doctor(*at(broker.port), *options(keys))
    for step in ("certificate", "broker"):
        assert said[step][0] == "WRONG"
        assert words in said[step][1]
        assert "this machine's clock says 20" in said[step][1]


def test_what_the_broker_has_against_us(keys: Path, tmp_path: Path, broker: Broker) -> None:
    home = keys / "workers" / "anna"
    said = doctor(*at(broker.port))
    assert "no --ca was given" in said["broker"][1]
    said = doctor(*at(broker.port), "--ca", str(home / "ca.crt"))
    assert "requires a certificate, and none was given" in said["accepted"][1]
    provision(tmp_path / "other", ["anna"], "lab", ["localhost"])
    assert (
        "not a broker's certificate by this swarm's authority"
        in doctor(*at(broker.port), *options(tmp_path / "other"))["broker"][1]
    )
    foreign = [*options(tmp_path / "other")[2:], "--ca", str(home / "ca.crt")]
    assert "it is of another authority" in doctor(*at(broker.port), *foreign)["accepted"][1]
    revoke(keys, ["anna"])
    os.kill(broker.pid, signal.SIGHUP)
    assert wait_for(lambda: "is revoked" in str(doctor(*at(broker.port), *options(keys)).get("accepted")), 30)


def test_files_that_cannot_be_used(keys: Path, tmp_path: Path, broker: Broker) -> None:
    home, garbage = keys / "workers" / "anna", tmp_path / "garbage"
    garbage.write_bytes(os.urandom(400))
    names = {"--ca": home / "ca.crt", "--cert": home / "worker.crt", "--key": home / "worker.key"}

    def given(**changes: Path) -> list[str]:
        chosen = names | {f"--{name}": path for name, path in changes.items()}
        return [word for name, path in chosen.items() for word in (name, str(path))]

    locked = tmp_path / "locked.key"
    lock = ["openssl", "pkey", "-in", str(names["--key"]), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(lock, check=True)
    for changes, step, words in (
        ({"cert": garbage}, "certificate", "garbage is not a certificate"),
        ({"ca": garbage}, "key", "garbage is not the certificate of an authority"),
        ({"key": garbage}, "key", "garbage cannot be used"),
        ({"key": keys / "workers" / "bert" / "worker.key"}, "key", "is not the key of"),
        ({"key": locked}, "key", "locked with a pass phrase"),
    ):
        said = doctor(*at(broker.port), *given(**changes))
        assert said[step][0] == "WRONG"
        assert words in said[step][1]
        assert "tls" not in said, "it went on"
    names["--key"].chmod(0o644)
    said = doctor(*at(broker.port), *given())
    assert said["key"][0] == "WRONG"
    assert "can be read by every user of this machine (644). Do: chmod 600" in said["key"][1]
    assert said["tls"][0] == "ok"
    with refused_as("missing-file"):
        parse_address(f"mqtts://localhost:{broker.port}", *(names | {"--cert": tmp_path}).values())


def test_another_name_swarm_or_rule(keys: Path, broker: Broker) -> None:
    said = doctor(*at(broker.port), *options(keys), "--id", "bert", "--connect")
    assert "is the certificate of 'anna', not of 'bert'" in said["name"][1]
    assert "does not let 'bert' write in the swarm 'lab'" in said["rights"][1]
    said = doctor(*at(broker.port), *options(keys), "--swarm", "lib", "--connect")
    assert "of the swarm 'lab', not of 'lib'" in said["name"][1]
    assert "does not let 'anna' write in the swarm 'lib'" in said["rights"][1]
    add_workers(keys, ["carl"])  # and the broker is not told
    home = keys / "server"
    context = make_context(Address("x", 1, True, home / "ca.crt", home / "server.crt", home / "server.key"))
    server = Client(broker.port, "", context).connect()
    server.subscribe("cbdsl/lab/from/+/#")
    server.publish("cbdsl/lab/down/spec", b"something", retain=True)
    said = doctor(*at(broker.port), *options(keys, "carl"), "--connect")
    assert said["rights"][0] == "WRONG"
    assert "does not let 'carl' write" in said["rights"][1]
    assert "Check --swarm and --id; after `cbdsl provision --add`" in said["rights"][1]
    said = doctor(*at(broker.port), *options(keys), "--connect")
    assert "Server and workers should use the same release" in said["model"][1]
    assert all(payload == b"" for topic, payload, _ in server.received if topic.endswith("/hello"))
    server.close()


def test_a_host_that_takes_the_connection_and_says_nothing(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_doctor, "SECONDS", 0.3)
    monkeypatch.setattr("cbdsl.network.tls._PROBE_SECONDS", 0.3)
    del tmp_path
    home = keys / "workers" / "anna"
    with impostor(mute) as port:
        address = Address("localhost", port, True, home / "ca.crt", home / "worker.crt", home / "worker.key")
        last = list(network_doctor.ConnectionCheck(address).findings())[-1]
        assert (last.step, last.well) == ("broker", False)
        assert "accepts the connection and does not answer" in last.text
        last = list(network_doctor.ConnectionCheck(Address("localhost", port)).findings())[-1]
        assert (last.step, last.well) == ("login", False)
        assert "is not an MQTT broker" in last.text


@pytest.mark.parametrize("after", ["tls", "login"])
def test_a_broker_that_dies_meanwhile(keys: Path, broker: Broker, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = keys / "workers" / "anna"
    address = Address("localhost", broker.port, True, home / "ca.crt", home / "worker.crt", home / "worker.key")
    honest = network_doctor._try_rights

    def kill() -> None:
        os.kill(broker.pid, signal.SIGKILL)
        wait_for(lambda: _is_gone(broker.port), 20)

    def dying(*words: object) -> None:
        kill()
        honest(*words)  # type: ignore[arg-type]

    if after == "login":
        monkeypatch.setattr(network_doctor, "_try_rights", dying)
    found = []
    for one in network_doctor.ConnectionCheck(address, connect=True).findings():
        found.append(one)
        if one.step == after == "tls":
            kill()
    assert found[-1].well is False
    assert "nothing listens there" in found[-1].text


def _is_gone(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


def test_a_running_swarm_a_devices_samples_and_its_memory(tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "data"), workers=2, rounds=2)
    with deployment(tmp_path, spec, "mosquitto") as made:
        made.start_server("--join-seconds", "300")
        made.start_worker(made.names[0])
        samples = tmp_path / "workers" / made.names[1] / "samples.npz"
        way = ["--broker", str(made.address), "--swarm", "test", "--id", made.names[1]]

        def announced() -> bool:
            return "a run is announced." in doctor(*way)["server"][1]

        assert wait_for(announced, 60)
        said = doctor(*way, "--data", str(samples))
        assert {said[step][0] for step in ("server", "samples", "memory")} == {"ok"}
        assert "260 parameters take about" in said["memory"][1]
        odd = tmp_path / "odd.npz"
        np.savez(odd, features=np.zeros((3, 5), np.float32), labels=np.zeros(3, np.int32))
        assert (
            "samples of shape (1, 8, 8), and the data has 4 classes" in doctor(*way, "--data", str(odd))["samples"][1]
        )
        said = doctor(*way, "--data", str(samples), "--memory", "1M")
        assert said["memory"][0] == "WRONG"
        assert "--memory" in said["memory"][1]
        made.start_worker(made.names[1])  # and the swarm plays as if nobody had looked
        made.wait_for_end()
        assert not (made.out / "refused.json").exists(), "the server took offence"


def test_memory_for_a_trained_model(tmp_path: Path) -> None:
    package.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / "run")
    with running_broker(tmp_path / "log", "mosquitto") as plain:
        said = doctor("--broker", f"mqtt://localhost:{plain.port}", "--model", str(tmp_path / "run"))
    assert said["memory"][0] == "ok"
    assert "parameters take about" in said["memory"][1]


def test_options_without_a_broker_are_refused(tmp_path: Path) -> None:
    done = cbdsl("doctor", "--id", "anna", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Give --broker" in done.stderr
