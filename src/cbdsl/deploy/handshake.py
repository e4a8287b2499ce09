"""Why there is no connection to a broker, in words: what was found, what it may mean, what to do.

Certificates decide it on both sides. What is wrong with the broker's is found here; what the broker finds wrong with
ours it says after the handshake, in an alert that is easily lost behind what was sent meanwhile: `refusal` listens.
"""

from __future__ import annotations

import socket
import ssl

_LISTEN_SECONDS = 3.0

_NOT_YET_VALID, _EXPIRED, _PURPOSE, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 26, 62, 64  # numbers of OpenSSL's X509_V_ERR

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


def explain(error: BaseException | None, host: str) -> str:
    """What an attempt to connect failed of; empty if there is nothing to say but that it failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _wrong_broker(error, host)
    if isinstance(error, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)):
        return "it hangs up at once. All its connections may be taken (max_connections), or it does not speak TLS there"
    if isinstance(error, ssl.SSLError) and error.reason:
        return next((meaning for word, meaning in _ALERTS.items() if error.reason.endswith(word)), str(error))
    if isinstance(error, socket.gaierror):
        return f"no address is known for '{host}'. Check the name"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there. Is it running, and is the port right?"
    return ""


def _wrong_broker(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in {_NOT_YET_VALID, _EXPIRED}:
        when = "is no longer valid" if error.verify_code == _EXPIRED else "is not valid yet"
        return f"its certificate {when} by the clock of this machine. {_CLOCK}"
    if error.verify_code in {_OTHER_NAME, _OTHER_ADDRESS}:
        return (
            f"its certificate is not for '{host}'. Reach it by a name or address that was given to `cbdsl provision` "
            "with --host; if you do, somebody else answers there"
        )
    if error.verify_code == _PURPOSE:
        return "it shows a member's certificate, not a broker's: somebody pretends to be the broker. Find out who"
    return (
        "its certificate is not by this swarm's authority (--ca). Either --ca is of another swarm, or somebody between "
        "here and the broker answers in its place. Nothing was sent. Compare the ca.crt of both; if they are the "
        "same, find out who answers"
    )


def refusal(host: str, port: int, context: ssl.SSLContext) -> str:
    """Connect, send nothing and listen: what the broker has against our certificate; empty if it says nothing."""
    try:
        with (
            socket.create_connection((host, port), timeout=_LISTEN_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=host) as secure,
        ):
            secure.recv(1)
    except TimeoutError:  # it waits for us to speak: the certificate is fine
        return ""
    except OSError as error:
        return explain(error, host)
    return ""
