"""Why there is no connection to a broker, in words: what was found, what it may mean, what to do.

Certificates decide it on both sides. What is wrong with the broker's is found here; what the broker finds wrong with
ours it says after the handshake, in an alert that is easily lost behind what was sent meanwhile: `refusal` listens.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from cbdsl.deploy.broker import PASSWORD_VARIABLE, connect_packet
from cbdsl.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from cbdsl.deploy.link import Address

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
