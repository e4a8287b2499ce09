"""What a certificate says of itself: whose it is, of which swarm, from when to when. Read here without any library.

A worker installs the core alone, and Python's `ssl` tells only of a certificate that the other end has shown and that
passed. No signature is checked here: that is OpenSSL's part, at the handshake.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cbdsl.errors import UserError
from cbdsl.text import one_line

if TYPE_CHECKING:
    from cbdsl.deploy.link import Address

SERVER_NAME, MONITOR_NAME = "parameter.server", "swarm.monitor"
"""Common names that no worker can have, for their dots."""

_log = logging.getLogger("cbdsl.deploy")

_ORGANIZATION = "cbdsl "  # stands before the swarm's name, as the organization of every certificate of `provision`
SOON = timedelta(days=30)  # what ends within so long is said

_MOST_BYTES = 2**20  # of a file with a certificate
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
_SEQUENCE, _SET, _OID, _VERSION = 0x30, 0x31, 0x06, 0xA0  # tags of DER
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_TEXTS = {0x0C: "utf-8", 0x13: "ascii", 0x14: "latin-1", 0x16: "ascii", 0x1E: "utf-16-be"}
_OID_NAME, _OID_ORGANIZATION = b"\x55\x04\x03", b"\x55\x04\x0a"  # 2.5.4.3 and 2.5.4.10
_LONGEST_NAME = 64  # letters of a name in a certificate: a longer one was cut


@dataclass(frozen=True)
class Identity:
    """Whom a certificate is for, and when it can be used."""

    name: str  # the common name; empty if it has none
    organization: str
    begins: datetime
    ends: datetime

    @property
    def provisioned(self) -> bool:
        """Whether it looks like one by `cbdsl provision`, whose brokers go by its names."""
        return self.organization.startswith(_ORGANIZATION)

    @property
    def swarm(self) -> str:
        """The swarm it is for; empty if it does not say."""
        return self.organization.removeprefix(_ORGANIZATION) if self.provisioned else ""

    def is_of(self, swarm: str) -> bool:
        """Whether it can be one of this swarm; also where it does not say."""
        return not self.provisioned or self.organization == organization_of(swarm)

    def obstacle(self, now: datetime) -> str:
        """Why it cannot be used now, with the dates; empty if it can."""
        clock = f"this machine's clock says {moment(now)}"
        if now < self.begins:
            return f"is not valid before {moment(self.begins)}, and {clock}"
        return f"expired on {moment(self.ends)}, and {clock}" if now > self.ends else ""


def organization_of(swarm: str) -> str:
    """What stands in the certificates of a swarm's members."""
    return f"{_ORGANIZATION}{swarm}"[:_LONGEST_NAME]


def check_member(address: Address, swarm: str, name: str) -> None:
    """An error if the certificate is not one of this member: the broker would pass on nothing, without a word.

    A certificate that is past its time or before it is a warning: the clock may be what is wrong, and be set later.
    """
    if address.certificate is None:
        return
    identity, now = read_identity(address.certificate), datetime.now(UTC)
    fault = misfit(identity, address.certificate, swarm, name)
    if fault:
        raise UserError(fault)
    obstacle = identity.obstacle(now) or (f"expires on {moment(identity.ends)}" if identity.ends < now + SOON else "")
    if obstacle:
        _log.warning("%s %s. If the clock is right: cbdsl provision DIR --renew", address.certificate, obstacle)


def misfit(identity: Identity, path: Path, swarm: str, name: str) -> str:
    """Why a broker that goes by names would not take this certificate for this member; empty if it would."""
    if not identity.provisioned:
        return ""
    if not identity.is_of(swarm):
        return (
            f"{path} is a certificate of the swarm '{identity.swarm}', not of '{swarm}': the broker would pass nothing "
            f"on. Give --swarm {identity.swarm}, or the --ca, --cert and --key of '{swarm}'."
        )
    if identity.name == name:
        return ""
    if name == SERVER_NAME:
        return (
            f"{path} is the certificate of '{identity.name}', not of the parameter server. Give server.crt and its key."
        )
    given = f"{path} is the certificate of '{identity.name}', not of '{name}', and the broker goes by the certificate."
    return f"{given} Give --id {identity.name}, or the --cert and --key of '{name}'."


def read_identity(path: Path) -> Identity:
    """The first certificate of a PEM file; UserError if there is none, or none that can be understood."""
    try:
        with path.open("rb") as file:
            found = _PEM.search(file.read(_MOST_BYTES))
        if found is None:
            raise ValueError("it holds no PEM certificate")
        return identity_of(base64.b64decode(found[1]))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(str(error))
        raise UserError(f"{path} is no certificate: {why}. Give the .crt that `cbdsl provision` wrote.") from error


def identity_of(certificate: bytes) -> Identity:
    """What a certificate in DER says; ValueError if it is none."""
    outer = dict(_parts(certificate)).get(_SEQUENCE, b"")
    parts = [part for part in _parts(dict(_parts(outer, 1)).get(_SEQUENCE, b"")) if part[0] != _VERSION]
    if len(parts) < 5:  # serial, algorithm, issuer, validity, subject
        raise ValueError("it is not an X.509 certificate")
    times = [_time(*one) for one in _parts(parts[3][1])]
    if len(times) != 2:
        raise ValueError("it does not say from when to when it is valid")
    names = dict(_names(parts[4][1]))
    return Identity(names.get(_OID_NAME, ""), names.get(_OID_ORGANIZATION, ""), *times)


def _names(subject: bytes) -> Iterator[tuple[bytes, str]]:
    for _, group in _parts(subject):
        for _, pair in _parts(group):
            inner = list(_parts(pair))
            if len(inner) == 2 and inner[0][0] == _OID:
                yield inner[0][1], one_line(inner[1][1].decode(_TEXTS.get(inner[1][0], "latin-1")))


def _time(tag: int, text: bytes) -> datetime:
    if tag not in _TIMES:
        raise ValueError("it has a date of an unknown kind")
    return datetime.strptime(text.decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)


def _parts(content: bytes, most: int = 1000) -> Iterator[tuple[int, bytes]]:
    """Tag and content of the first DER values one after the other; ValueError if their lengths do not hold."""
    position = 0
    while position < len(content) and most:
        start, most = position + 2, most - 1
        length = content[position + 1] if start <= len(content) else 0x80
        if length & 0x80:
            width = length & 0x7F
            start, length = start + width, int.from_bytes(content[start : start + width], "big") if width else -1
        if not 0 <= length <= len(content) - start:
            raise ValueError("it is torn")
        yield content[position], content[start : start + length]
        position = start + length


def moment(when: datetime) -> str:
    """A time as people read it."""
    return f"{when:%Y-%m-%d %H:%M} UTC"
