from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cbdsl.cli.main import main
from cbdsl.errors import UserError
from cbdsl.network import provision as module
from cbdsl.network.mqtt import Address
from cbdsl.network.provision import add_workers, allow_models, provision, read_settings, reissue, renew, revoke
from cbdsl.network.roster import worker_names
from cbdsl.network.session import check_upload_size
from cbdsl.network.tls import MONITOR_NAME, SERVER_NAME, read_largest_model
from cbdsl.network.topics import check_name
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.refusals import refused_as

FOR_A_WORKER = ("README.txt", "ca.crt", "identity.json", "worker.crt", "worker.key")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    provision(tmp_path / "keys", ["anna", "bert"], "lab", ["broker.local", "10.0.0.5"], days=90, plugin="")
    return tmp_path / "keys"


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def common_name(path: Path) -> str:
    return str(certificate(path).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def cbdsl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command line, in this process."""

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["cbdsl", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    return run


def test_every_machine_has_a_folder_of_its_own(keys: Path) -> None:
    assert sorted(contents(keys)) == [
        "README.txt",
        "broker/acl", "broker/broker.crt", "broker/broker.key", "broker/ca.crt", "broker/conf.d/cbdsl.conf",
        "broker/crl.pem", "broker/mosquitto.conf", "broker/staff-ca.crt",
        *(f"ca/{name}" for name in ("admin.crt", "admin.key", "ca.crt", "ca.key")),
        "ca/issued/anna.crt", "ca/issued/bert.crt", "ca/staff-ca.crt", "ca/staff-ca.key",
        *(f"monitor/{name}" for name in ("README.txt", "ca.crt", "identity.json", "monitor.crt", "monitor.key")),
        "provision.json",
        *(f"server/{name}" for name in ("README.txt", "ca.crt", "identity.json", "limits.json")),
        *(f"server/{name}" for name in ("roster.txt", "server.crt", "server.key")),
        *(f"workers/anna/{name}" for name in FOR_A_WORKER), *(f"workers/bert/{name}" for name in FOR_A_WORKER),
    ]  # fmt: skip
    assert common_name(keys / "workers" / "anna" / "worker.crt") == "anna"
    assert common_name(keys / "server" / "server.crt") == SERVER_NAME
    assert (keys / "server" / "roster.txt").read_text() == "anna\nbert\n"
    for reserved in (SERVER_NAME, MONITOR_NAME):
        with pytest.raises(UserError):
            check_name(reserved, "worker")  # no worker can have these rights by its name


def test_keys_are_secret_and_folders_closed(keys: Path) -> None:
    for path in [keys, *keys.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600 if path.suffix == ".key" or path.name == "acl" else 0o644), (
            path
        )


def test_each_key_fits_its_certificate_and_no_other(keys: Path) -> None:
    public = set()
    for path in keys.rglob("*.key"):
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)
        assert key.public_key() == certificate(path.with_suffix(".crt")).public_key()
        public.add(key.public_key().public_numbers().x)
    assert len(public) == 8


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("workers/anna/worker.crt", ExtendedKeyUsageOID.CLIENT_AUTH),
        ("server/server.crt", ExtendedKeyUsageOID.CLIENT_AUTH),
        ("monitor/monitor.crt", ExtendedKeyUsageOID.CLIENT_AUTH),
        ("ca/admin.crt", ExtendedKeyUsageOID.CLIENT_AUTH),
        ("broker/broker.crt", ExtendedKeyUsageOID.SERVER_AUTH),
    ],
)
def test_a_certificate_says_what_it_is_good_for(keys: Path, path: str, usage: Any) -> None:  # noqa: ANN401
    staff = "staff-ca.crt" if path.startswith(("server", "monitor", "ca/admin")) else "ca.crt"
    authority, made = certificate(keys / "ca" / staff), certificate(keys / path)
    made.verify_directly_issued_by(authority)
    extensions = made.extensions
    assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
    assert extensions.get_extension_for_class(x509.BasicConstraints).critical
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key_usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert key_usage.critical
    assert key_usage.value.digital_signature
    assert not key_usage.value.key_cert_sign
    assert made.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)  # a clock may be behind
    assert abs(made.not_valid_after_utc - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=5)


def test_the_authority_signs_members_and_no_authority(keys: Path) -> None:
    extensions = certificate(keys / "ca" / "ca.crt").extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert usage.crl_sign
    assert not usage.digital_signature


def test_the_broker_has_all_its_names(keys: Path) -> None:
    names = (
        certificate(keys / "broker" / "broker.crt")
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    assert names.get_values_for_type(x509.DNSName) == ["broker.local", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1", "::1"]


def test_the_readme_commands_are_ones_that_cbdsl_knows(keys: Path, cbdsl: Callable[..., Said]) -> None:
    for readme, command in (("workers/anna/README.txt", "work"), ("server/README.txt", "serve")):
        text = (keys / readme).read_text().replace("\\\n", "")
        words = shlex.split(next(line for line in text.splitlines() if line.strip().startswith("cbdsl ")))
        assert words[:2] == ["cbdsl", command]
        options = {word for word in words if word.startswith("--")}
        known = cbdsl(command, "--help")
        if known.code == 0:
            assert options <= set(re.findall(r"--[a-z-]+", known.out))
    assert "--id anna --broker mqtts://broker.local:8883 --swarm lab" in (keys / "workers/anna/README.txt").read_text()


def test_an_ipv6_broker_stands_in_brackets(tmp_path: Path) -> None:
    assert provision(tmp_path / "keys", ["a"], "lab", ["fe80::1"], port=1).url == "mqtts://[fe80::1]:1"


def test_nothing_is_overwritten(keys: Path) -> None:
    before = contents(keys)
    with refused_as("exists-already", keys):
        provision(keys, ["anna"], "lab", ["localhost"])
    with refused_as("exists-already", "'bert'"):
        add_workers(keys, ["carl", "bert"])
    assert contents(keys) == before


def test_workers_are_added_and_the_brokers_limits_grow_with_them(keys: Path) -> None:
    before = contents(keys)
    add_workers(keys, ["carl"])
    after = contents(keys)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {
        "ca/issued/carl.crt", "server/roster.txt", "broker/conf.d/cbdsl.conf", "broker/acl",
        *(f"workers/carl/{name}" for name in FOR_A_WORKER),
    }  # fmt: skip
    assert read_settings(keys).workers == ("anna", "bert", "carl")
    assert (keys / "server" / "roster.txt").read_text() == "anna\nbert\ncarl\n"


def settings(keys: Path, word: str) -> list[str]:
    lines = (keys / "broker" / "conf.d" / "cbdsl.conf").read_text().splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{word} ")]


def test_adding_that_was_interrupted_is_done_by_doing_it_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = module._write, 0

    def fails(*words: Any, **rest: Any) -> None:  # noqa: ANN401
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        write(*words, **rest)

    monkeypatch.setattr(module, "_write", fails)
    for after in range(1, 9):
        name, left = f"new-{after}", after
        with pytest.raises(KeyboardInterrupt):
            add_workers(keys, [name])
        assert name not in (keys / "server" / "roster.txt").read_text().split()
        add_workers(keys, [name])
        home = keys / "workers" / name
        assert sorted(path.name for path in home.iterdir() if path.name[0] != ".") == sorted(FOR_A_WORKER)
        assert (keys / "server" / "roster.txt").read_text().split().count(name) == 1
        assert f"user CN={name},O=cbdsl lab\n" in (keys / "broker" / "acl").read_text()
        with refused_as("exists-already", name):
            add_workers(keys, [name])


def test_who_is_put_back_keeps_its_keys(keys: Path) -> None:
    (keys / "server" / "roster.txt").write_text("bert\n")
    before = contents(keys / "workers" / "anna")
    add_workers(keys, ["anna"])
    assert contents(keys / "workers" / "anna") == before
    assert (keys / "server" / "roster.txt").read_text() == "bert\nanna\n"


def test_what_is_replaced_keeps_its_owner_and_mode(keys: Path) -> None:
    rules = keys / "broker" / "acl"
    rules.chmod(0o640)
    somebody = 12345 if os.geteuid() == 0 else os.getuid()
    os.chown(rules, somebody, -1)
    changes: list[Callable[[], object]] = [
        lambda: add_workers(keys, ["carl"]), lambda: revoke(keys, ["bert"]), lambda: renew(keys),
    ]  # fmt: skip
    for change in changes:
        change()
        assert (rules.stat().st_uid, rules.stat().st_mode & 0o777) == (somebody, 0o640)
    assert (keys / "workers" / "anna" / "worker.key").stat().st_mode & 0o777 == 0o600


def test_limits_follow_from_the_roster(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    provision(keys, ["anna"], "lab", ["localhost"], plugin="")
    few = {word: int(settings(keys, word)[0]) for word in ("max_connections", "max_queued_messages", "memory_limit")}
    add_workers(keys, [f"w{number}" for number in range(30)])
    many = {word: int(settings(keys, word)[0]) for word in few}
    assert all(many[word] > few[word] for word in few)
    assert many["max_connections"] == few["max_connections"] + 60
    assert f"{read_settings(keys).open_files:,} open files" in (keys / "broker" / "conf.d" / "cbdsl.conf").read_text()
    assert read_settings(keys).open_files > sum(int(count) for count in settings(keys, "max_connections"))


def test_server_and_monitor_have_a_listener_of_their_own(tmp_path: Path, keys: Path) -> None:
    assert settings(keys, "listener") == ["8883", "8884 127.0.0.1"]
    assert "--broker mqtts://localhost:8884 --swarm lab" in (keys / "server" / "README.txt").read_text()
    assert "-h localhost -p 8884 " in (keys / "monitor" / "README.txt").read_text()
    provision(tmp_path / "far", ["a"], "lab", ["hub"], server_host="10.0.0.9", server_port=9000)
    assert settings(tmp_path / "far", "listener") == ["8883", "9000"]
    assert "--broker mqtts://10.0.0.9:9000 " in (tmp_path / "far" / "server" / "README.txt").read_text()
    names = certificate(tmp_path / "far" / "broker" / "broker.crt").extensions
    addresses = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.IPAddress)
    assert "10.0.0.9" in map(str, addresses)
    with refused_as("conflict", 8883):
        provision(tmp_path / "same", ["a"], "lab", ["hub"], server_port=8883)


def test_workers_may_upload_as_many_pieces_as_the_largest_model_has(keys: Path) -> None:
    def rules() -> list[str]:
        text = (keys / "broker" / "acl").read_text()
        return [str(number) for number in re.findall(r"(?m)^topic write .*/anna/upload/(.*)$", text)]

    assert rules() == [str(number) for number in range(40)]  # 4 MB
    allow_models(keys, 60_000)
    assert rules() == ["0", "1", "2"]
    assert read_largest_model(keys / "server" / "server.crt") == 60_000
    add_workers(keys, ["carl"])
    revoke(keys, ["bert"])
    renew(keys)
    assert rules() == ["0", "1", "2"]
    with refused_as("out-of-range", "given 0"):
        allow_models(keys, 0)


def test_a_server_refuses_a_model_that_its_broker_would_not_pass_on(keys: Path) -> None:
    stage = Experiment.prepare(resolve(Spec(model="cnn")), threads=1, deal=False)
    address = Address("hub", 1, True, certificate=keys / "server" / "server.crt")
    check_upload_size(stage, address)
    allow_models(keys, 20_000)  # one piece
    with refused_as("too-large", f"--largest-model {stage.engine.size}", "20,000", "limits.json"):
        check_upload_size(stage, address)
    check_upload_size(stage, Address("hub", 1))
    (keys / "server" / "limits.json").write_text("{")
    with refused_as("damaged-file", "limits.json"):
        check_upload_size(stage, address)
    (keys / "server" / "limits.json").unlink()  # as in a folder of an earlier release
    check_upload_size(stage, address)


def test_a_folder_of_an_earlier_release_is_brought_up_to_date(keys: Path) -> None:
    path = keys / "provision.json"
    stored = json.loads(path.read_text())
    for key in ("server_host", "server_port", "largest_model"):
        del stored[key]
    path.write_text(json.dumps(stored))
    (keys / "broker" / "mosquitto.conf").write_text("listener 8883\n")
    renew(keys)
    assert settings(keys, "listener") == ["8883", "8884 127.0.0.1"]
    assert "mqtts://localhost:8884" in (keys / "server" / "README.txt").read_text()
    assert json.loads(path.read_text())["server_port"] == 8884


def test_who_is_revoked_leaves_the_roster(keys: Path) -> None:
    roster = keys / "server" / "roster.txt"
    roster.write_text("# the shed\nbert\nanna\n")
    revoke(keys, ["anna"])
    assert roster.read_text() == "# the shed\nbert\n"
    add_workers(keys, ["carl"])
    assert roster.read_text() == "# the shed\nbert\ncarl\n"
    roster.unlink()
    revoke(keys, ["bert"])
    assert not roster.exists()


def test_revocation_covers_every_certificate_a_worker_ever_had(keys: Path) -> None:
    old = certificate(keys / "workers" / "anna" / "worker.crt").serial_number
    renew(keys)
    new = certificate(keys / "workers" / "anna" / "worker.crt").serial_number
    assert old != new
    revoke(keys, ["anna"])
    revoked = x509.load_pem_x509_crl((keys / "broker" / "crl.pem").read_bytes())  # the first of two
    assert {entry.serial_number for entry in revoked} == {old, new}
    assert revoked.is_signature_valid(certificate(keys / "ca" / "ca.crt").public_key())  # type: ignore[arg-type]
    assert revoked.next_update_utc == certificate(keys / "ca" / "ca.crt").not_valid_after_utc
    assert "CN=anna" not in (keys / "broker" / "acl").read_text()
    revoke(keys, ["bert"])  # and the earlier one stays revoked
    assert len(list(x509.load_pem_x509_crl((keys / "broker" / "crl.pem").read_bytes()))) == 4
    assert read_settings(keys).revoked == ("anna", "bert")
    kept = contents(keys / "workers")
    renew(keys)
    assert contents(keys / "workers") == kept  # who is out gets no new keys
    with refused_as("exists-already", "anna"):
        add_workers(keys, ["anna"])


def test_a_worker_can_be_revoked_when_its_folder_is_long_gone(keys: Path) -> None:
    for path in (keys / "workers" / "anna").iterdir():
        path.unlink()
    (keys / "workers" / "anna").rmdir()
    revoke(keys, ["anna"])
    assert len(list(x509.load_pem_x509_crl((keys / "broker" / "crl.pem").read_bytes()))) == 1


def test_a_new_key_replaces_a_revoked_one(keys: Path) -> None:
    old = certificate(keys / "workers" / "anna" / "worker.crt").serial_number
    revoke(keys, ["anna"])
    assert "anna" in reissue(keys, ["anna"]).members
    new = certificate(keys / "workers" / "anna" / "worker.crt").serial_number
    revoked = {entry.serial_number for entry in x509.load_pem_x509_crl((keys / "broker" / "crl.pem").read_bytes())}
    assert revoked == {old}
    assert new != old
    assert (keys / "server" / "roster.txt").read_text() == "bert\nanna\n"
    assert "user CN=anna,O=cbdsl lab\n" in (keys / "broker" / "acl").read_text()
    with refused_as("unknown-name", "nobody"):
        reissue(keys, ["nobody"])


def request(folder: Path, key: Any) -> Path:  # noqa: ANN401 - of any kind
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    (folder / "device.csr").write_bytes(builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM))
    return folder / "device.csr"


def test_a_device_keeps_the_key_that_it_made(keys: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    add_workers(keys, ["porch"], [request(tmp_path, key)])
    home = keys / "workers" / "porch"
    assert sorted(path.name for path in home.iterdir()) == ["README.txt", "ca.crt", "identity.json", "worker.crt"]
    assert certificate(home / "worker.crt").public_key() == key.public_key()
    assert common_name(home / "worker.crt") == "porch"
    again = ed25519.Ed25519PrivateKey.generate()
    reissue(keys, ["anna"], [request(tmp_path, again)])
    assert certificate(keys / "workers" / "anna" / "worker.crt").public_key() == again.public_key()
    assert not (keys / "workers" / "anna" / "worker.key").exists()
    before = contents(keys)
    small = request(tmp_path, rsa.generate_private_key(65537, 1024))
    with refused_as("unreadable-file", small):
        add_workers(keys, ["shed"], [small])
    small.write_text("nothing")
    with refused_as("unreadable-file", "openssl req"):
        add_workers(keys, ["shed"], [small])
    with refused_as("conflict", "2 workers"):
        add_workers(keys, ["shed", "barn"], [small])
    assert contents(keys) == before


def test_a_key_that_a_device_made_is_renewed_and_never_reissued(keys: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    reissue(keys, ["anna"], [request(tmp_path, key)])
    home, before = keys / "workers" / "anna", contents(keys / "workers" / "anna")
    renew(keys)
    assert certificate(home / "worker.crt").public_key() == key.public_key()
    assert not (home / "worker.key").exists()
    assert contents(home) != before
    with refused_as("conflict", "anna"):
        reissue(keys, ["anna"], [request(tmp_path, key)])
    assert "anna" in read_settings(keys).members


def test_a_request_is_a_small_file_with_a_key_that_brokers_take(keys: Path, tmp_path: Path) -> None:
    before = contents(keys)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "absent"):
        with refused_as("unreadable-file", path):
            reissue(keys, ["anna"], [path])
    for curve in (ec.SECP256K1(), ec.SECP224R1(), ec.SECP192R1(), ec.BrainpoolP256R1()):
        with refused_as("unreadable-file", "P-256"):
            reissue(keys, ["anna"], [request(tmp_path, ec.generate_private_key(curve))])
    assert contents(keys) == before


def test_a_folder_with_an_acl_file_is_given_the_plugin(keys: Path, cbdsl: Callable[..., Said]) -> None:
    def rules() -> str:
        return (keys / "broker" / "conf.d" / "cbdsl.conf").read_text()

    assert "--renew --plugin PATH" in rules()  # what it says is done here
    assert cbdsl("provision", str(keys), "--renew", "--plugin", "/opt/security.so").code == 0
    assert "\nplugin /opt/security.so\n" in rules()
    assert (keys / "broker" / "dynamic-security.json").exists()
    assert read_settings(keys).plugin == "/opt/security.so"
    assert cbdsl("provision", str(keys), "--renew", "--plugin", "none").code == 0
    assert "\nacl_file acl\n" in rules()
    assert cbdsl("provision", str(keys), "--revoke", "anna", "--plugin", "none").code == 2


@pytest.mark.parametrize(
    "change", [{"days": 10**9}, {"days": -5}, {"port": 99999}, {"largest_model": 0}, {"revoked": ["nobody"]}]
)
def test_settings_edited_by_hand_are_checked(keys: Path, change: dict[str, Any]) -> None:
    path = keys / "provision.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = contents(keys)
    with pytest.raises(UserError):
        add_workers(keys, ["carl"])
    assert contents(keys) == before


def test_a_damaged_record_of_revoked_keys_is_named(keys: Path) -> None:
    (keys / "ca" / "revoked.txt").write_text("no number\n")
    with refused_as("damaged-file", "revoked.txt"):
        revoke(keys, ["anna"])


def test_lines_of_the_owner_survive_every_change(keys: Path) -> None:
    main = keys / "broker" / "mosquitto.conf"
    main.write_text(main.read_text() + "log_dest file mine.log\n")
    before = main.read_bytes()
    changes: list[Callable[[], object]] = [
        lambda: add_workers(keys, ["carl"]), lambda: revoke(keys, ["bert"]), lambda: renew(keys),
        lambda: reissue(keys, ["bert"]), lambda: allow_models(keys, 7),
    ]  # fmt: skip
    for change in changes:
        change()
        assert main.read_bytes() == before


def _add(keys: Path, name: str) -> None:
    add_workers(keys, [name])


def _revoke(keys: Path, name: str) -> None:
    revoke(keys, [name])


def test_no_revocation_is_lost_beside_additions(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(12)]
    provision(tmp_path / "keys", names, "lab", ["localhost"], plugin="")
    work = [(_revoke, name) for name in names] + [(_add, f"new-{name}") for name in names]
    with ThreadPoolExecutor(8) as pool:  # a lock of the folder is held by an open file, so threads contend as processes
        futures = [pool.submit(change, tmp_path / "keys", name) for change, name in work[::2] + work[1::2]]
        for future in futures:
            future.result()
    made = read_settings(tmp_path / "keys")
    assert made.revoked == tuple(sorted(names))
    assert made.members == tuple(sorted(f"new-{name}" for name in names))
    assert len(list(x509.load_pem_x509_crl((tmp_path / "keys" / "broker" / "crl.pem").read_bytes()))) == 12
    rules = (tmp_path / "keys" / "broker" / "acl").read_text()
    assert [f"user CN={name},O=cbdsl lab\n" in rules for name in (*names, *made.members)] == [False] * 12 + [True] * 12


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_worker", fail)
    with refused_as("unwritable-file", "No space left"):
        provision(tmp_path / "keys", ["anna"], "lab", ["localhost"])
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_taken_are_passed_over() -> None:
    assert worker_names(2, 1) == ("worker-1", "worker-2")
    assert worker_names(2, 1, ["worker-1", "anna", "worker-3"]) == ("worker-2", "worker-4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give either --workers"),
        (["--workers", "2", "--names", "a,b"], "Give either --workers"),
        (["--workers", "0"], "given 0"),
        (["--names", "a,,b"], "'' cannot be the name of a worker"),
        (["--names", "../../etc"], "cannot be the name of a worker"),
        (["--names", "a,b,a"], "'a' is given twice"),
        (["--names", "#"], "cannot be the name of a worker"),
        (["--workers", "1", "--swarm", "a/b"], "'a/b' cannot be the name of a swarm"),
        (["--workers", "1", "--host", "bad host"], "'bad host' is neither"),
        (["--workers", "1", "--host", "*.local"], "is neither"),
        (["--workers", "1", "--port", "70000"], "given 70000"),
        (["--workers", "1", "--days", "99999"], "given 99999"),
        (["--workers", "1", "--largest-model", "0"], "given 0"),
        (["--workers", "1", "--port", "9", "--server-port", "9"], "need a port each"),
        (["--largest-model", "7"], "was not made by this command"),
        (["--add", "--workers", "1", "--largest-model", "7"], "are given together"),
        (["--add", "--workers", "1"], "was not made by this command"),
        (["--revoke", "a"], "was not made by this command"),
        (["--workers", "1", "--sign", "x.csr"], "--sign has no effect alone"),
        (["--reissue", "a"], "was not made by this command"),
        (["--add", "--renew", "--workers", "1"], "--add and --renew are given together"),
        (["--add", "--workers", "1", "--swarm", "x"], "--swarm is fixed"),
        (["--renew", "--workers", "1"], "have no effect with --renew"),
    ],
)
def test_bad_wishes_get_one_line_and_leave_nothing(
    words: list[str], message: str, tmp_path: Path, cbdsl: Callable[..., Said]
) -> None:
    said = cbdsl("provision", str(tmp_path / "keys"), *words)
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_from_first_to_last(tmp_path: Path, cbdsl: Callable[..., Said]) -> None:
    keys = str(tmp_path / "keys")
    made = cbdsl("provision", keys, "--workers", "2", "--swarm", "lab", "--host", "broker.local")
    assert made.code == 0
    assert "2 workers" in made.out
    assert "mqtts://broker.local:8883" in made.out
    more = cbdsl("provision", keys, "--add", "--workers", "2")
    assert "worker-3, worker-4" in more.out
    assert "restart it" in more.out
    assert "in 3 pieces" in cbdsl("provision", keys, "--largest-model", "60000").out
    gone = cbdsl("provision", keys, "--revoke", "worker-1", "--revoke", "worker-3")
    assert "Revoked: worker-1, worker-3." in gone.out
    assert cbdsl("provision", keys, "--renew").code == 0
    unknown = cbdsl("provision", keys, "--revoke", "nobody")
    assert unknown.code == 2
    assert "There is no worker 'nobody'" in unknown.err
    assert "worker-1, worker-2" in unknown.err


def test_damaged_folders_are_named(keys: Path) -> None:
    (keys / "ca" / "ca.key").write_text("rubbish")
    with refused_as("damaged-file", keys / "ca"):
        revoke(keys, ["anna"])
    (keys / "provision.json").write_text("{")
    with refused_as("damaged-file", "provision.json"):
        read_settings(keys)
