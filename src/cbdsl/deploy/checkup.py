"""A device's way to its broker, looked at step by step: name, port, certificates, TLS, login, announcement, memory.

Every step is one line. The first one that makes the rest meaningless is the last. Nothing is changed anywhere; and with
a certificate there is no login unless asked for: the broker would end the connection of a worker that has the same.
"""

from __future__ import annotations

import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from cbdsl.deploy.handshake import RIGHTS, context_of, explain, not_let_in, refusal, shown_certificate
from cbdsl.deploy.identity import SOON, Identity, identity_of, misfit, moment, read_identity
from cbdsl.deploy.link import Address, exposed
from cbdsl.deploy.visit import Visit, visit
from cbdsl.errors import UserError

_SECONDS = 5.0  # that an address has to answer
_NO_BROKER = "It is no broker, or one that hangs. Check the port"


@dataclass(frozen=True)
class Finding:
    """One step."""

    step: str
    text: str
    well: bool | None = True  # none: it was not looked at
    last: bool = False  # what follows would mean nothing


def wrong(step: str, text: str, last: bool = False) -> Finding:
    """A step that found something to mend."""
    return Finding(step, text if text.endswith((".", "?")) else f"{text}.", well=False, last=last)


@dataclass
class Way:
    """What is looked at, and what was found on the way that later steps need."""

    address: Address
    swarm: str = ""  # from the certificate, if not given
    name: str = ""  # likewise
    connect: bool = False  # log in, even with a certificate
    announcement: bytes = b""

    def look(self) -> Iterator[Finding]:
        """Every step in turn, until one makes the rest meaningless."""
        for step in (self._host, self._files, self._tls, self._login):
            for finding in step():
                yield finding
                if finding.last:
                    return

    def _host(self) -> Iterator[Finding]:
        host, port = self.address.host, self.address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield wrong("host", explain(error, self.address), last=True)
            return
        yield Finding("host", f"{host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in found))}.")
        try:
            with socket.create_connection((host, port), timeout=_SECONDS) as connection:
                yield Finding("port", f"{connection.getpeername()[0]} answers at port {port}.")
        except OSError as error:
            yield wrong("port", f"port {port}: {explain(error, self.address) or error}", last=True)

    def _files(self) -> Iterator[Finding]:
        address, now = self.address, datetime.now(UTC)
        if address.certificate is None or address.key is None:
            if address.tls:
                yield Finding("certificate", "none was given (--cert, --key).", None)
            return
        try:
            identity = read_identity(address.certificate)
        except UserError as error:
            yield wrong("certificate", str(error), last=True)
            return
        self.swarm, self.name = self.swarm or identity.swarm, self.name or identity.name
        yield _dated("certificate", identity, f"{address.certificate} is of '{identity.name}'", now)
        fault = misfit(identity, address.certificate, self.swarm, self.name)
        if fault:
            yield wrong("name", fault)
        mode = address.key.stat().st_mode
        if not mode & stat.S_IRWXO:
            yield Finding("key", f"{address.key} is not for everybody's eyes.")
        else:
            yield wrong(
                "key",
                f"{address.key} is open to everybody on this machine ({mode & 0o777:o}). Do: chmod 600 {address.key}",
            )

    def _tls(self) -> Iterator[Finding]:
        address = self.address
        if not address.tls:
            warning = exposed(address).removeprefix("WARNING: ")
            yield wrong("tls", warning) if warning else Finding("tls", "none, and none is needed on this machine.")
            return
        try:
            context = context_of(address)
        except UserError as error:
            yield wrong("key", str(error), last=True)
            return
        try:
            with (
                socket.create_connection((address.host, address.port), timeout=_SECONDS) as raw,
                context.wrap_socket(raw, server_hostname=address.host) as secure,
            ):
                yield Finding(
                    "tls", f"{secure.version()}, and the broker's certificate is by the authority in {_ca(address)}."
                )
                shown = identity_of(secure.getpeercert(binary_form=True) or b"")
        except TimeoutError:
            yield wrong("broker", f"it takes the connection and says nothing. {_NO_BROKER}", last=True)
            return
        except (OSError, ValueError) as error:
            yield wrong("broker", f"{explain(error, address) or error}{self._dates(error)}", last=True)
            return
        now = datetime.now(UTC)
        yield _dated("broker", shown, f"its certificate is for '{address.host}'", now)
        yield Finding(
            "clock", f"{moment(now)}, within the dates of the broker's certificate; brokers do not tell their time."
        )
        objection = "" if self.connect else refusal(address, context)  # a login hears it, too
        if objection:
            yield wrong("accepted", objection, last=True)

    def _dates(self, error: Exception) -> str:
        """The dates of a certificate that does not fit the clock."""
        if not isinstance(error, ssl.SSLCertVerificationError) or error.verify_code not in {9, 10}:
            return ""
        try:
            obstacle = identity_of(shown_certificate(self.address) or b"").obstacle(datetime.now(UTC))
        except ValueError:
            return ""
        return f". It {obstacle}" if obstacle else ""

    def _login(self) -> Iterator[Finding]:
        if self.address.certificate is not None and not self.connect:
            yield Finding(
                "login", "not tried: a certificate has one connection, and a worker that runs with it would lose its "
                "own. Where none runs, add --connect.", None,
            )  # fmt: skip
            return
        context = context_of(self.address) if self.address.tls else None
        swarm = self.swarm or "swarm"
        seen = visit(self.address, context, swarm, self.name)
        if seen.login:
            yield wrong("login", f"the broker refuses it: {not_let_in(seen.login, self.address)}", last=True)
        elif seen.lost:
            yield wrong("login", self._cut_off(context), last=True)
        else:
            self.announcement = seen.announcement
            yield Finding("login", "the broker lets us in.")
            yield from _rights(seen, swarm, self.name)

    def _cut_off(self, context: ssl.SSLContext | None) -> str:
        why = refusal(self.address, context)
        if why:
            return why
        other = "; or a worker runs with this certificate, and took its connection back" if context is not None else ""
        return f"the broker hung up, or said nothing for too long: it may be ending, or full{other}. Try again."


def _ca(address: Address) -> str:
    return str(address.ca) if address.ca else "this system's list"


def _dated(step: str, identity: Identity, what: str, now: datetime) -> Finding:
    obstacle = identity.obstacle(now)
    if obstacle:
        return wrong(
            step,
            f"{what} and {obstacle}. Check the clock; if it is right: cbdsl provision DIR --renew, and copy again.",
        )
    days = (identity.ends - now).days
    soon = ". That is soon: cbdsl provision DIR --renew" if identity.ends - now < SOON else ""
    return Finding(step, f"{what}, good until {moment(identity.ends)}, {days:,} days from now{soon}.")


def _rights(seen: Visit, swarm: str, name: str) -> Iterator[Finding]:
    """What the broker lets a member do, and who else is there."""
    if seen.may_write is False:
        yield wrong("rights", f"the broker does not let '{name}' write in the swarm '{swarm}'. {RIGHTS}")
        return
    if not seen.may_read or (seen.server_listens and not seen.announcement):
        yield wrong("rights", f"a server is there, and the broker does not let '{name}' hear it. {RIGHTS}")
        return
    if seen.may_write is None:
        why = "the broker does not say what it lets through" if name else "not looked at without a name; give --id"
        yield Finding("rights", f"{why}.", None)
    else:
        yield Finding("rights", f"'{name}' may write in the swarm '{swarm}'.")
    if seen.announcement and seen.server_listens is not False:
        yield Finding(
            "server", "a run is announced. Whether its roster names this worker the server tells workers alone."
        )
    elif seen.announcement:
        yield Finding("server", "a run is announced, but its server is not connected now. Start it again.", None)
    else:
        yield Finding("server", f"no run is announced in the swarm '{swarm}': `cbdsl serve` has not begun.", None)
