"""Reads certificates and explains why a connection failed."""

from __future__ import annotations

import base64
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cbdsl.errors import UserError
from cbdsl.network.broker import PASSWORD_VARIABLE, connect_packet
from cbdsl.util.formatting import single_line

if TYPE_CHECKING:
    from cbdsl.network.mqtt import Address
if TYPE_CHECKING:
    from pathlib import Path

    from cbdsl.network.mqtt import Address

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
        why = error.strerror if isinstance(error, OSError) else single_line(str(error))
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
                yield inner[0][1], single_line(inner[1][1].decode(_TEXTS.get(inner[1][0], "latin-1")))


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


_LISTEN_SECONDS = 3.0

_NOT_YET_VALID, _EXPIRED, _PURPOSE, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 26, 62, 64  # numbers of OpenSSL's X509_V_ERR
_HANGS_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

RIGHTS = "Check --swarm and --id; after `cbdsl provision --add` copy broker/acl to the broker and restart it"
_CLOCK = "Check the clocks of both machines first; then `cbdsl provision DIR --renew` makes new certificates"
_ALERTS = {
    "CERTIFICATE_REQUIRED": "the broker wants a certificate, and none was given. Give --cert and --key",
    "HANDSHAKE_FAILURE": "the broker wants a certificate, and none was given that it takes. Give --cert and --key",
    "UNKNOWN_CA": "the broker does not know the authority of this certificate. Give the --cert and --key of this swarm",
    "CERTIFICATE_EXPIRED": f"the broker says that this certificate is past its time or before it. {_CLOCK}",
    "CERTIFICATE_REVOKED": "the broker says that this certificate is revoked: this member was shut out. If that was an "
    "error it needs a certificate under a new name: cbdsl provision DIR --add --names NAME",
    "BAD_CERTIFICATE": "the broker cannot use this certificate. Give the --cert and --key of this swarm",
    "UNSUPPORTED_CERTIFICATE": "the broker says that this certificate is not one for members. Give a member's --cert",
    "WRONG_VERSION_NUMBER": "what answers there does not speak TLS. Check the port",
    "CERTIFICATE_UNKNOWN": "the broker does not accept this certificate. Give the --cert and --key of this swarm",
}


def explain(error: BaseException | None, address: Address) -> str:
    """What an attempt to connect failed of; empty if there is nothing to say but that it failed.

    Where the broker only hung up, it is asked once more what it speaks.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _wrong_broker(error, address)
    if isinstance(error, _HANGS_UP):
        return _hung_up(address)
    if isinstance(error, ssl.SSLError) and error.reason:
        return next((meaning for word, meaning in _ALERTS.items() if error.reason.endswith(word)), str(error))
    if isinstance(error, socket.gaierror):
        return f"no address is known for '{address.host}'. Check the name, and that this machine has a network"
    plain = {
        ConnectionRefusedError: "nobody listens there. It does not run, or at another port: look at both",
        TimeoutError: "nothing answers in time. Check name and port, that the machine is on, and firewalls on the way",
    }
    return plain.get(type(error), error.strerror or "") if isinstance(error, OSError) else ""


def _wrong_broker(error: ssl.SSLCertVerificationError, address: Address) -> str:
    if error.verify_code in {_NOT_YET_VALID, _EXPIRED}:
        when = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return f"its certificate {when} by the clock of this machine. {_CLOCK}"
    if error.verify_code in {_OTHER_NAME, _OTHER_ADDRESS}:
        return (
            f"its certificate is not for '{address.host}'. Reach it by a name or address that was given to `cbdsl "
            "provision` with --host; if you do, somebody else answers there"
        )
    if error.verify_code == _PURPOSE:
        return "it shows a member's certificate, not a broker's: somebody pretends to be the broker. Find out who"
    if address.ca is None:
        return (
            "no --ca was given, and none of the authorities that this system knows has signed its certificate. Nothing "
            "was sent. Give the ca.crt of this swarm: --ca ca.crt"
        )
    return (
        "its certificate is not by this swarm's authority (--ca). Either --ca is of another swarm, or somebody between "
        "here and the broker answers in its place. Nothing was sent. Compare the ca.crt of both; if they are the "
        "same, find out who answers"
    )


def _hung_up(address: Address) -> str:
    """What to make of a connection that was closed without a word."""
    try:
        socket.create_connection((address.host, address.port), timeout=_LISTEN_SECONDS).close()
    except (ConnectionRefusedError, TimeoutError, socket.gaierror) as error:  # meanwhile it is gone
        return explain(error, address)
    except OSError:
        pass
    if address.tls and _speaks_mqtt(address):
        return f"it speaks MQTT there, but without TLS. Give its port for TLS, 8883 say, or write mqtt://{address.host}"
    if not address.tls and shown_certificate(address) is not None:
        return "it speaks TLS there. Write mqtts:// instead of mqtt://, with --ca, --cert and --key"
    if not address.tls and not _speaks_mqtt(address):
        return "what answers there is no MQTT broker. Check the port"
    return "it hangs up at once. All its connections may be taken (max_connections), or it is no broker. Check the port"


def refusal(address: Address, context: ssl.SSLContext | None) -> str:
    """Why the broker hangs up: connect, send nothing and listen to what it has against us; empty if it says nothing."""
    if context is None:
        return _hung_up(address)
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_LISTEN_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as secure,
        ):
            secure.recv(1)
    except TimeoutError:  # it waits for us to speak: the certificate is fine
        return ""
    except OSError as error:
        return explain(error, address)
    return ""


def not_let_in(reason: str, address: Address) -> str:
    """What a broker means that answers a login with a refusal."""
    if address.username:
        return f"{reason}. Check the user name in the address, and the password in {PASSWORD_VARIABLE}"
    return f"{reason}. It wants a user name (mqtt://NAME@HOST, and {PASSWORD_VARIABLE}) or a certificate that it knows"


def _speaks_mqtt(address: Address) -> bool:
    """Whether a login without TLS is answered, with whatever."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_LISTEN_SECONDS) as connection:
            connection.sendall(connect_packet(""))
            return connection.recv(2) == b"\x20\x02"
    except OSError:
        return False


def shown_certificate(address: Address) -> bytes | None:
    """The certificate in DER that whoever answers there shows, for looking at: it proves nothing. None: no TLS there.

    Empty where TLS is spoken and none is shown.
    """
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_LISTEN_SECONDS) as raw,
            anybody.wrap_socket(raw, server_hostname=address.host) as secure,
        ):
            return secure.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        return b"" if "ALERT" in (error.reason or "") else None
    except OSError:
        return None


def context_of(address: Address) -> ssl.SSLContext:
    """TLS with the files of an address; an error names the one that is wrong."""
    try:
        context = ssl.create_default_context(cafile=str(address.ca) if address.ca else None)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"The certificates cannot be used: {address.ca} is no authority's certificate ({_words(error)}). Give the "
            "ca.crt of this swarm."
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if address.certificate is not None and address.key is not None:
        _load(context, address.certificate, address.key)
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def locked() -> str:
        raise UserError(
            f"{key} is locked with a pass phrase, which nobody is there to type. Unlock it: openssl pkey -in {key} "
            "-out OPEN.key, and give that."
        )

    try:
        context.load_cert_chain(certificate, key, locked)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"The certificates cannot be used: {key} is not the key of {certificate}. Give a pair that fits."
            ) from error
        raise UserError(
            f"The certificates cannot be used: {certificate} or {key} is not what it should be ({_words(error)}). Give "
            "the PEM files of this swarm."
        ) from error
    except OSError as error:
        raise UserError(
            f"The certificates cannot be used: {certificate} or {key} cannot be read: {error.strerror}. Who runs this "
            "must own them."
        ) from error


def _words(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or "no PEM").lower().replace("_", " ")
