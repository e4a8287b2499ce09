"""TLS for members of a swarm: certificates and contexts, and `explain`, which says why a connection failed."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl.errors import UserError
from cbdsl.network.broker import PASSWORD_VARIABLE, connect_packet
from cbdsl.util.files import read_json
from cbdsl.util.formatting import single_line
from cbdsl.util.serialize import from_plain

if TYPE_CHECKING:
    from cbdsl.network.mqtt import Address

SERVER_NAME, MONITOR_NAME, ADMIN_NAME = "parameter.server", "swarm.monitor", "broker.admin"
"""Names that no worker can have, because of the dot."""

IDENTITY = "identity.json"
LIMITS = "limits.json"
"""The file beside a certificate that says whose it is, so that a device need not parse certificates."""

SOON = timedelta(days=30)
"""A certificate that expires within this time gives a warning."""

_log = logging.getLogger("cbdsl.network")

_ORGANIZATION = "cbdsl "  # prefix of the swarm's name: the organization in every certificate of `provision`
_LONGEST_NAME = 64  # characters of a name in a certificate; a longer one was cut
_MOST_BYTES = 2**20  # of a file
_PROBE_SECONDS = 3.0  # for each connection that only finds out what listens there

# --- certificates


@dataclass(frozen=True)
class Identity:
    """The owner and the dates of a certificate; `cbdsl provision` writes them as identity.json beside it."""

    name: str  # the common name; may be empty
    organization: str
    not_before: str  # ISO 8601
    not_after: str
    fingerprint: bytes  # SHA-256 of the certificate

    @property
    def begins(self) -> datetime:
        """The first moment at which it is valid."""
        return datetime.fromisoformat(self.not_before)

    @property
    def ends(self) -> datetime:
        """The last moment at which it is valid."""
        return datetime.fromisoformat(self.not_after)

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
            wrong = f"{path} is the certificate of '{self.name}', not of the parameter server"
            return f"{wrong}. Give server.crt and its key."
        return (
            f"{path} is the certificate of '{self.name}', not of '{name}'; the broker checks it. "
            f"Give --id {self.name}, or the --cert and --key of '{name}'."
        )


def broker_user(swarm: str, name: str) -> str:
    """Return a member's user name on a provisioned broker; it contains the swarm's name, so it is unique."""
    return f"CN={name},O={organization_of(swarm)}"


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
    if identity is None:
        return
    problem = identity.name_problem(address.certificate, swarm, name)
    if problem:
        raise UserError(problem, code="not-allowed")
    expiring = f"expires on {format_time(identity.ends)}" if identity.ends < now + SOON else ""
    problem = identity.date_problem(now) or expiring
    if problem:
        _log.warning("%s %s. If the clock is right: cbdsl provision DIR --renew", address.certificate, problem)


def read_largest_model(certificate: Path) -> int | None:
    """Read from beside the server's certificate how many numbers an upload may have at the broker; None: unknown."""
    path = certificate.with_name(LIMITS)
    try:
        return int(read_json(_read(path).decode("utf-8"))["largest_model"]) if path.exists() else None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}). Copy it again, or remove it.", code="damaged-file") from error


def read_identity(certificate: Path) -> Identity | None:
    """Read the identity.json beside a certificate; None if there is none, or if it is of another certificate.

    Without the file, `cryptography` reads the certificate itself, where it is installed; devices do without it.
    """
    found = _PEM.search(_read(certificate))
    if found is None:
        raise UserError(
            f"{certificate} is not a certificate: it contains no PEM. Give the .crt that `cbdsl provision` wrote.",
            code="unreadable-file",
        )
    path = certificate.with_name(IDENTITY)
    if path.exists():
        try:
            identity = from_plain(Identity, read_json(_read(path).decode("utf-8")))
            if identity.ends <= identity.begins:
                raise ValueError("its dates are in the wrong order")
        except (ValueError, TypeError) as error:  # TypeError: a date without its time zone
            raise UserError(
                f"{path} is damaged ({single_line(str(error))}). Copy it again, or remove it.", code="damaged-file"
            ) from error
        if identity.fingerprint == hashlib.sha256(base64.b64decode(found[1])).digest():
            return identity
    try:
        from cbdsl.network.certificates import identity_of  # noqa: PLC0415 - a device does without
    except ImportError:
        return None
    try:
        return identity_of(found[0])
    except ValueError as error:
        raise UserError(
            f"{certificate} is not a certificate: {single_line(str(error))}. Give the .crt that `cbdsl provision` "
            "wrote.",
            code="unreadable-file",
        ) from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Give the .crt that `cbdsl provision` wrote.",
            code="unreadable-file",
        ) from error


def identity_of_peer(secure: ssl.SSLSocket) -> Identity:
    """Return the identity of the verified certificate at the other end."""
    found: dict[str, Any] = secure.getpeercert() or {}
    subject = {key: value for group in found["subject"] for key, value in group}
    dates = (datetime.fromtimestamp(ssl.cert_time_to_seconds(found[key]), UTC) for key in ("notBefore", "notAfter"))
    begins, ends = (date.isoformat() for date in dates)
    fingerprint = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").digest()
    return Identity(subject.get("commonName", ""), subject.get("organizationName", ""), begins, ends, fingerprint)


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")


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

RIGHTS = "Check --swarm and --id; after `cbdsl provision --add` the broker needs the new rules: see its output"
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
_IGNORE_DATES = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME
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
        dates = _broker_dates(address)
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


def _broker_dates(address: Address) -> str:
    """Return why the broker's certificate is not valid now, with the dates; "" if they cannot be found out."""
    context = make_context(address)
    context.verify_flags |= ssl.VerifyFlags(_IGNORE_DATES)
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host) as secure,
        ):
            return identity_of_peer(secure).date_problem(datetime.now(UTC))
    except OSError:
        return ""


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
    if address.path:
        return f"it closes the connection at once. Check the path {address.path}, or it may be at its connection limit"
    if address.tls:
        if _answers_mqtt(address):
            return f"the broker there uses no TLS. Give its port for TLS, such as 8883, or write mqtt://{address.host}"
    elif _answers_tls(address):
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


def _answers_tls(address: Address) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), timeout=_PROBE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=address.host),
        ):
            return True
    except OSError as error:
        return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
