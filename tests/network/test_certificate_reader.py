"""Identities of certificates, from identity.json or by `cryptography`, and their checks before anything is sent."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from cbdsl.network import certificates
from cbdsl.network.doctor import ConnectionCheck
from cbdsl.network.provision import provision
from cbdsl.network.tls import IDENTITY, SERVER_NAME, check_member, make_context, organization_of, read_identity
from support.member_keys import authority, member, put
from support.refusals import refused_as


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], "lab", ["localhost", "::1"])
    return folder


@pytest.fixture(params=["from identity.json", "by cryptography"])
def copied(request: pytest.FixtureRequest, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the keys whose certificates are read in one of the two ways."""
    copy = tmp_path / "copy"
    shutil.copytree(keys, copy)
    if request.param == "from identity.json":
        monkeypatch.setitem(sys.modules, "cbdsl.network.certificates", None)  # as on a device
    else:
        for path in copy.rglob(IDENTITY):
            path.unlink()
    return copy


def test_names_and_dates_are_those_of_the_certificate(copied: Path) -> None:
    for path in (copied / "server/server.crt", copied / "monitor/monitor.crt", *copied.glob("workers/*/worker.crt")):
        known = x509.load_pem_x509_certificate(path.read_bytes())
        found = read_identity(path)
        assert found is not None
        assert found.name == known.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        assert found.organization == known.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
        assert (found.begins, found.ends) == (known.not_valid_before_utc, known.not_valid_after_utc)
        assert found.swarm == "lab"


def test_a_device_without_the_file_or_with_that_of_another_certificate_has_no_identity(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cbdsl.network.certificates", None)  # as on a device
    anna, bert = keys / "workers" / "anna", keys / "workers" / "bert"
    shutil.copy(anna / "worker.crt", tmp_path / "worker.crt")
    assert read_identity(tmp_path / "worker.crt") is None
    shutil.copy(bert / IDENTITY, tmp_path / IDENTITY)
    assert read_identity(tmp_path / "worker.crt") is None
    address = member(keys, 1, certificate=tmp_path / "worker.crt", key=anna / "worker.key")
    check_member(address, "lab", "whoever")  # a folder of an earlier release connects as before
    make_context(address)
    found = {each.step: each for each in ConnectionCheck(address)._files()}
    assert found["certificate"].well is None
    assert "identity.json" in found["certificate"].text
    assert "--renew" in found["certificate"].text


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"name": 3}', None])
def test_a_damaged_identity_is_named(keys: Path, tmp_path: Path, content: str | None) -> None:
    home = keys / "workers" / "anna"
    shutil.copy(home / "worker.crt", tmp_path / "worker.crt")
    dated = json.dumps({**json.loads((home / IDENTITY).read_text()), "not_after": "soon"})
    (tmp_path / IDENTITY).write_text(dated if content is None else content)
    with refused_as("damaged-file", IDENTITY):
        read_identity(tmp_path / "worker.crt")


def test_certificates_of_others_are_read_too(tmp_path: Path) -> None:
    path, key = tmp_path / "c.crt", tmp_path / "c.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "40000", "-utf8"]  # past 2050
    subject = ["-subj", "/C=DE/O=Überall GmbH/OU=x/CN=gerät-7/emailAddress=a@b.c"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", path], check=True, capture_output=True)
    found = read_identity(path)
    assert found is not None
    assert (found.name, found.organization, found.provisioned, found.swarm) == ("gerät-7", "Überall GmbH", False, "")
    assert found.ends > datetime(2100, 1, 1, tzinfo=UTC)
    assert found.name_problem(path, "lab", "anna") == "", "only our own brokers go by these names"


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.crt").write_bytes(content)
    with refused_as("unreadable-file", "x.crt is not a certificate: ", "Give the .crt"):
        read_identity(tmp_path / "x.crt")
    with refused_as("unreadable-file", "Is a directory"):
        read_identity(tmp_path)


def test_another_name_or_swarm_is_said_before_anything_is_sent(keys: Path) -> None:
    check_member(member(keys, 1), "lab", "anna")
    with refused_as("not-allowed", "is the certificate of 'anna', not of 'bert'", "Give --id anna, or"):
        check_member(member(keys, 1), "lab", "bert")
    with refused_as("not-allowed", "of the swarm 'lab', not of 'lib'", "Give --swarm lab, or"):
        check_member(member(keys, 1), "lib", "anna")
    with refused_as("not-allowed", "certificate of 'anna', not of the parameter server. Give server.crt"):
        check_member(member(keys, 1), "lab", SERVER_NAME)


def test_a_swarm_with_the_longest_name_is_known_by_its_beginning(tmp_path: Path) -> None:
    long = "s" * 64
    provision(tmp_path / "keys", ["anna"], long, ["localhost"])
    check_member(member(tmp_path / "keys", 1), long, "anna")
    assert len(organization_of(long)) == 64
    with refused_as("not-allowed", "not of 'short'"):
        check_member(member(tmp_path / "keys", 1), "short", "anna")


@pytest.mark.parametrize(
    ("days", "backdated", "words"),
    [(9, 1, "expires on 20"), (-1, 9, "expired on 20"), (9, -2, "is not valid before 20"), (400, 1, "")],
)
def test_the_dates_are_a_warning_for_the_clock_may_be_wrong(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    days: int, backdated: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(certificates, "_BACKDATED", timedelta(days=backdated))
    put(tmp_path, "worker", authority(keys).issue_client(organization_of("lab"), "anna", days))
    address = member(keys, 1, certificate=tmp_path / "worker.crt", key=tmp_path / "worker.key")
    with caplog.at_level(logging.WARNING, "cbdsl.network"):
        check_member(address, "lab", "anna")
    assert (words in caplog.text) if words else not caplog.text
