"""What a certificate says, read without any library, and what is made of it before anything is sent."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from cbdsl.network import certificates
from cbdsl.network.provision import provision
from cbdsl.network.tls import SERVER_NAME, check_member, organization_of, parse_identity, read_identity
from support.member_keys import authority, member, put
from support.refusals import refused_as


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "lab"
    provision(folder, ["anna", "bert"], "lab", ["localhost", "::1"])
    return folder


def test_names_and_dates_are_those_that_cryptography_reads(keys: Path) -> None:
    for path in (*keys.glob("*/*.crt"), *keys.glob("workers/*/*.crt")):
        known = x509.load_pem_x509_certificate(path.read_bytes())
        found = read_identity(path)
        assert found.name == known.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        assert found.organization == known.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
        assert (found.begins, found.ends) == (known.not_valid_before_utc, known.not_valid_after_utc)
        assert found.swarm == "lab"


def test_certificates_of_others_are_read_too(tmp_path: Path) -> None:
    path, key = tmp_path / "c.crt", tmp_path / "c.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "40000", "-utf8"]  # past 2050
    subject = ["-subj", "/C=DE/O=Überall GmbH/OU=x/CN=gerät-7/emailAddress=a@b.c"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", path], check=True, capture_output=True)
    found = read_identity(path)
    assert (found.name, found.organization, found.provisioned, found.swarm) == ("gerät-7", "Überall GmbH", False, "")
    assert found.ends > datetime(2100, 1, 1, tzinfo=UTC)
    assert found.name_problem(path, "lab", "anna") == "", "only our own brokers go by these names"


@given(st.binary(max_size=300))
def test_whatever_the_bytes_the_answer_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_identity(content)


def test_torn_and_changed_certificates_are_read_or_refused(keys: Path) -> None:
    whole = x509.load_pem_x509_certificate((keys / "workers/anna/worker.crt").read_bytes()).public_bytes(Encoding.DER)
    for position in range(len(whole)):
        for content in (whole[:position], whole[:position] + bytes([whole[position] ^ 0x81]) + whole[position + 1 :]):
            with contextlib.suppress(ValueError):
                parse_identity(content)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.crt").write_bytes(content)
    with refused_as("unreadable-file", "x.crt is not a certificate: ", "Give the .crt"):
        read_identity(tmp_path / "x.crt")
    with refused_as("unreadable-file", "is not a certificate: Is a directory"):
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
