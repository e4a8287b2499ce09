"""TLS for members of a swarm: certificates and contexts, and `explain`, which says why a connection failed."""

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

SERVER_NAME, MONITOR_NAME = "parameter.server", "swarm.monitor"
"""Common names that no worker can have, because of the dot."""

SOON = timedelta(days=30)
"""A certificate that expires within this time gives a warning."""

_log = logging.getLogger("cbdsl.network")

_ORGANIZATION = "cbdsl "  # prefix of the swarm's name: the organization in every certificate of `provision`
_LONGEST_NAME = 64  # letters of a name in a certificate; a longer one was cut
_MOST_BYTES = 2**20  # of a file with a certificate
_PROBE_SECONDS = 3.0  # for each connection that only finds out what listens there

# --- certificates


@dataclass(frozen=True)
class Identity:
    """The owner and the dates of a certificate."""

    name: str  # the common name; may be empty
    organization: str
    begins: datetime
    ends: datetime

    @property
    def provisioned(self) -> bool:
        """Whether it looks like a certificate of `cbdsl provision`, whose brokers check its names."""
        return self.organization.startswith(_ORGANIZATION)

    @property
    def swarm(self) -> str:
        """The swarm's name, or "" if it contains none."""
        return self.organization.removeprefix(_ORGANIZATION) if self.provisioned else ""

    def date_problem(self, now: datetime) -> str:
        """Return why it is not valid now, with the dates, or ""."""
        clock = f"this machine's clock says {format_time(now)}"
        if now < self.begins:
            return f"is not valid before {format_time(self.begins)}, and {clock}"
        return f"expired on {format_time(self.ends)}, and {clock}" if now > self.ends else ""

    def name_problem(self, path: Path, swarm: str, name: str) -> str:
        """Return why a broker that checks names rejects this certificate, in the file `path`, for a member; or ""."""
        if not self.provisioned:
            return ""
        if self.organization != organization_of(swarm):
            return (
                f"{path} is a certificate of the swarm '{self.swarm}', not of '{swarm}'; the broker would deliver "
                f"nothing. Give --swarm {self.swarm}, or the --ca, --cert and --key of '{swarm}'."
            )
        if self.name == name:
            return ""
        if name == SERVER_NAME:
            return (
                f"{path} is the certificate of '{self.name}', not of the parameter server. Give server.crt and its key."
            )
        return (
            f"{path} is the certificate of '{self.name}', not of '{name}'; the broker checks it. "
            f"Give --id {self.name}, or the --cert and --key of '{name}'."
        )


def organization_of(swarm: str) -> str:
    """Return the organization in the certificates of a swarm's members."""
    return f"{_ORGANIZATION}{swarm}"[:_LONGEST_NAME]


def format_time(when: datetime) -> str:
    """Format a time in UTC."""
    return f"{when:%Y-%m-%d %H:%M} UTC"


def check_member(address: Address, swarm: str, name: str) -> None:
    """Raise UserError if the certificate is not this member's: the broker would silently deliver nothing.

    Dates give a warning only, because the clock may be wrong and be set later.
    """
    if address.certificate is None:
        return
    identity, now = read_identity(address.certificate), datetime.now(UTC)
    problem = identity.name_problem(address.certificate, swarm, name)
    if problem:
        raise UserError(problem, code="not-allowed")
    expiring = f"expires on {format_time(identity.ends)}" if identity.ends < now + SOON else ""
    problem = identity.date_problem(now) or expiring
    if problem:
        _log.warning("%s %s. If the clock is right: cbdsl provision DIR --renew", address.certificate, problem)


def read_identity(path: Path) -> Identity:
    """Read the first certificate of a PEM file."""
    try:
        with path.open("rb") as file:
            found = _PEM.search(file.read(_MOST_BYTES))
        if found is None:
            raise ValueError("it contains no PEM certificate")
        return parse_identity(base64.b64decode(found[1]))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else single_line(str(error))
        raise UserError(
            f"{path} is not a certificate: {why}. Give the .crt that `cbdsl provision` wrote.", code="unreadable-file"
        ) from error


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
_SEQUENCE, _OID, _VERSION = 0x30, 0x06, 0xA0  # tags of DER
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_TEXTS = {0x0C: "utf-8", 0x13: "ascii", 0x14: "latin-1", 0x16: "ascii", 0x1E: "utf-16-be"}
_OID_NAME, _OID_ORGANIZATION = b"\x55\x04\x03", b"\x55\x04\x0a"  # 2.5.4.3 and 2.5.4.10


def parse_identity(certificate: bytes) -> Identity:
    """Parse a certificate in DER; ValueError if it is not one."""
    outer = dict(_parts(certificate)).get(_SEQUENCE, b"")
    parts = [part for part in _parts(dict(_parts(outer, 1)).get(_SEQUENCE, b"")) if part[0] != _VERSION]
    if len(parts) < 5:  # serial, algorithm, issuer, validity, subject
        raise ValueError("it is not an X.509 certificate")
    times = [_time(*one) for one in _parts(parts[3][1])]
    if len(times) != 2:
        raise ValueError("it has no dates of validity")
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
    """Yield tag and content of the first `most` DER values; ValueError if a length is wrong."""
    position = 0
    while position < len(content) and most:
        start, most = position + 2, most - 1
        length = content[position + 1] if start <= len(content) else 0x80
        if length & 0x80:
            width = length & 0x7F
            start, length = start + width, int.from_bytes(content[start : start + width], "big") if width else -1
        if not 0 <= length <= len(content) - start:
            raise ValueError("it is truncated")
        yield content[position], content[start : start + length]
        position = start + length


# --- contexts


def make_context(address: Address) -> ssl.SSLContext:
    """Build a TLS context with the files of an address; UserError names a file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=str(address.ca) if address.ca else None)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"{address.ca} is not the certificate of an authority ({_reason(error)}). Give the ca.crt of this swarm.",
            code="unreadable-file",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = address.certificate, address.key
    if certificate is None or key is None:
        return context

    def refuse_pass_phrase() -> str:
        raise UserError(
            f"{key} is locked with a pass phrase. Unlock it: openssl pkey -in {key} -out OPEN.key, and give that.",
            code="not-supported",
        )

    try:
        context.load_cert_chain(certificate, key, refuse_pass_phrase)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(f"{key} is not the key of {certificate}. Give a matching pair.", code="conflict") from error
        raise UserError(
            f"{certificate} or {key} cannot be used: {_reason(error)}. Give readable PEM files of this swarm.",
            code="unreadable-file",
        ) from error
    return context


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or "no PEM").lower().replace("_", " ")


# --- why a connection failed

RIGHTS = "Check --swarm and --id; after `cbdsl provision --add` copy broker/acl to the broker and restart it"
"""What to do if a broker does not let a member read or write."""

_OF_THIS_SWARM = "Give the --cert and --key of this swarm"
_CLOCK = "Check the clocks of both machines first; then `cbdsl provision DIR --renew` makes new certificates"
_REJECTED = (
    f"the broker does not accept this certificate: it is of another authority, or not a member's. {_OF_THIS_SWARM}"
)
_NO_CERTIFICATE = "the broker requires a certificate, and none was given that it accepts. Give --cert and --key"
_ALERTS = {  # by the end of OpenSSL's word for them
    "CERTIFICATE_REQUIRED": _NO_CERTIFICATE,
    "HANDSHAKE_FAILURE": _NO_CERTIFICATE,
    "UNKNOWN_CA": _REJECTED,
    "BAD_CERTIFICATE": _REJECTED,
    "UNSUPPORTED_CERTIFICATE": _REJECTED,
    "CERTIFICATE_UNKNOWN": _REJECTED,
    "CERTIFICATE_EXPIRED": f"for the broker this certificate has expired or is not valid yet. {_CLOCK}",
    "CERTIFICATE_REVOKED": "this certificate is revoked: this member is excluded. If that was an error it needs a new "
    "name: cbdsl provision DIR --add --names NAME",
    "WRONG_VERSION_NUMBER": "what answers there does not use TLS. Check the port",
}
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64  # OpenSSL's X509_V_ERR
_CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


def explain(cause: object, address: Address, context: ssl.SSLContext | None = None) -> str:
    """Explain in one sentence, without its full stop, why there is no connection; "" if there is nothing to explain.

    cause: the error, or the broker's answer to the login, or None if it closed the connection without an answer. In
    the last case it is connected to again, with `context`, to find out.
    """
    if cause is None and context is not None:
        cause = _closing_error(address, context)
        if cause is None:
            return ""
    if cause is None or isinstance(cause, _CLOSED):
        return _explain_closed(address)
    if isinstance(cause, Exception):
        return _explain_error(cause, address)
    if address.username:
        return f"{cause}. Check the user name in the address, and the password in {PASSWORD_VARIABLE}"
    return f"{cause}. It requires a user name (mqtt://NAME@HOST, and {PASSWORD_VARIABLE}) or a certificate"


def _explain_error(error: Exception, address: Address) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, address)
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return next((meaning for word, meaning in _ALERTS.items() if reason.endswith(word)), str(error))
    if isinstance(error, socket.gaierror):
        return f"no address is known for '{address.host}'. Check the name, and this machine's network"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there. Check the port, and that the broker runs"
    if isinstance(error, TimeoutError):
        return "no answer in time. Check name and port, that the machine is on, and firewalls on the way"
    return getattr(error, "strerror", None) or str(error)


def _explain_certificate(error: ssl.SSLCertVerificationError, address: Address) -> str:
    """Explain why the broker's certificate is not accepted."""
    if error.verify_code in {_NOT_YET_VALID, _EXPIRED}:
        try:
            dates = parse_identity(presented_certificate(address) or b"").date_problem(datetime.now(UTC))
        except ValueError:
            dates = ""
        when = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return f"its certificate {dates or when}. {_CLOCK}"
    if error.verify_code in {_OTHER_NAME, _OTHER_ADDRESS}:
        return (
            f"its certificate is not for '{address.host}'. Use a name or address that was given to `cbdsl provision` "
            "with --host; if you do, another machine answers there"
        )
    if address.ca is None:
        return (
            "no --ca was given, and no authority that this system knows has signed its certificate. Nothing was sent. "
            "Give the ca.crt of this swarm: --ca ca.crt"
        )
    return (
        "its certificate is not a broker's certificate by this swarm's authority (--ca). Either --ca is of another "
        "swarm, or another machine pretends to be the broker. Nothing was sent. Compare the ca.crt of both"
    )


def _closing_error(address: Address, context: ssl.SSLContext) -> OSError | None:
    """Connect, send nothing, and return the error with which the broker closes the connection; None if it does not."""
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as secure,
        ):
            secure.recv(1)
    except TimeoutError:  # it waits for a login: the certificate is accepted
        return None
    except OSError as error:
        return error
    return None


def _explain_closed(address: Address) -> str:
    """Explain a connection that was closed without an answer by looking at what listens there."""
    try:
        socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS).close()
    except (ConnectionRefusedError, TimeoutError, socket.gaierror) as error:  # it ended meanwhile
        return _explain_error(error, address)
    except OSError:
        pass
    if address.tls:
        if _answers_mqtt(address):
            return f"the broker there uses no TLS. Give its port for TLS, such as 8883, or write mqtt://{address.host}"
    elif presented_certificate(address) is not None:
        return "the broker there uses TLS. Write mqtts:// instead of mqtt://, with --ca, --cert and --key"
    elif not _answers_mqtt(address):
        return "what answers there is not an MQTT broker. Check the port"
    return "it closes the connection at once. It may be at its connection limit (max_connections), or not a broker"


def _answers_mqtt(address: Address) -> bool:
    """Return whether a login without TLS is answered, accepted or not."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as connection:
            connection.sendall(connect_packet(""))
            return connection.recv(2) == b"\x20\x02"
    except OSError:
        return False


def presented_certificate(address: Address) -> bytes | None:
    """Return the unverified certificate in DER that is presented there; b"" if TLS has none, None without TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as secure,
        ):
            return secure.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        return b"" if "ALERT" in (error.reason or "") else None
    except OSError:
        return None
