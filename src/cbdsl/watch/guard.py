"""Who may ask: a request must name this machine, come from no other page, and bring the token where there is one.

A page of some other site can make a browser send requests here, also under a name of its own that suddenly means this
machine (DNS rebinding). Such requests name that site in Host or Origin, and are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from email.message import Message

_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_TOKEN_BYTES = 18


@dataclass(frozen=True)
class Guard:
    """What is demanded of a request; no token: only this machine can ask at all."""

    host: str  # that the server is bound to
    token: str = ""

    @staticmethod
    def of(host: str) -> Guard:
        """The guard of a server on this address: whoever else can reach it has to know a token."""
        return Guard(host, "" if is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES))

    def objection(self, headers: Message) -> str:
        """Why a request is refused, whatever it asks for; empty if it is not."""
        host = headers.get("Host") or ""
        if not self._is_ours(host):
            return "This is not the name of this machine."
        origin = headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
            return "A page of another site asks."
        elsewhere = (headers.get("Sec-Fetch-Site") or "none") not in {"none", "same-origin"}
        if elsewhere and headers.get("Sec-Fetch-Dest") != "document":  # to follow a link to the page is no harm
            return "A page of another site asks."
        return ""

    def path_behind(self, path: str) -> str | None:
        """The path without the token in front of it; none if the token is missing or wrong."""
        if not self.token:
            return path
        given, _, rest = path.removeprefix("/").partition("/")
        return f"/{rest}" if hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()) else None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine: an address cannot be made to mean another one, a name can."""
        name = _name_of(host).lower()
        if name in _LOOPBACK_NAMES | {self.host.lower()}:
            return True
        if not self.token:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            own = socket.gethostname().lower()
            return name in {own, f"{own}.local", socket.getfqdn().lower()}
        return True


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
