"""Serves the folder of a run or a sweep as a live page over HTTP. It only reads."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from cbdsl.errors import UserError
from cbdsl.watch import metrics
from cbdsl.watch.run_state import RunView, ViewerPosition
from cbdsl.watch.sweep_state import RUNS, SweepView

_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_TOKEN_BYTES = 18


@dataclass(frozen=True)
class AccessControl:
    """The conditions for a request. Without a token only this machine can connect."""

    host: str  # the address that the server is bound to
    token: str = ""

    @staticmethod
    def of(host: str) -> AccessControl:
        """Build the conditions for a server at this address: from other machines a token is needed."""
        return AccessControl(host, "" if is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES))

    def objection(self, headers: Message) -> str:
        """Return why a request is refused, whatever its path; empty if it is not."""
        host = headers.get("Host") or ""
        if not self._is_ours(host):
            return "The Host header does not name this machine."
        origin = headers.get("Origin")
        foreign = origin is not None and origin not in {f"http://{host}", f"https://{host}"}
        elsewhere = (headers.get("Sec-Fetch-Site") or "none") not in {"none", "same-origin"}
        if foreign or (elsewhere and headers.get("Sec-Fetch-Dest") != "document"):  # to follow a link is harmless
            return "The request comes from a page of another site."
        return ""

    def path_behind(self, path: str) -> str | None:
        """Return the path without the token in front of it, or None if the token is missing or wrong."""
        if not self.token:
            return path
        given, _, rest = path.removeprefix("/").partition("/")
        return f"/{rest}" if hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()) else None

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine. Foreign names may be made to point here (DNS rebinding)."""
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
    """Return whether an address can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


USUAL_PORT = 8750
_MOST_STREAMS = 16  # open pages
_MOST_REQUESTS = 64  # connections at a time
_TICK = 0.5  # seconds between looks at the folder for one page
_BREATH = 15.0  # seconds after which an empty comment is sent: so a closed page is noticed
_REQUEST_SECONDS = 10.0  # that a request may take to arrive
_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/workers.js": ("workers.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class WatchedFolder:
    """A folder that contains one run or many; it may be written later."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._run, self._sweep = folder, RunView(folder), SweepView(folder)

    def find(self, path: str) -> tuple[RunView | SweepView | None, str]:
        """Return the view that a path is about, if it exists, and the rest: `/metrics` of `/runs/NAME/metrics`."""
        is_sweep = not (self._folder / "spec.toml").is_file() and self._sweep.has_runs()
        view = self._sweep if is_sweep else self._run
        words = path.split("/", 3)
        if len(words) == 4 and words[1] == RUNS:
            return (view.run(words[2]) if isinstance(view, SweepView) else None), f"/{words[3]}"
        return view, path


class PageServer(ThreadingHTTPServer):
    """Serves the page of one folder."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.watched, self.guard = WatchedFolder(folder), AccessControl.of(host)
        self.streams = threading.BoundedSemaphore(_MOST_STREAMS)
        self._requests = threading.BoundedSemaphore(_MOST_REQUESTS)
        self.stopping = threading.Event()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with the token if one is needed."""
        host = self.guard.host
        name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{self.server_address[1]}/" + (f"{self.guard.token}/" if self.guard.token else "")

    def server_bind(self) -> None:
        """See `http.server.HTTPServer`; without a DNS query for this machine's name."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base
        """Start a thread for the request, unless there are too many."""
        if self._requests.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """See `socketserver.ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._requests.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Ignore connections that are closed early."""


def start(folder: Path, host: str = "127.0.0.1", port: int | None = None) -> PageServer:
    """Start a server. Without a port it is the usual one, or a free one if that is taken."""
    try:
        return PageServer(folder, host, USUAL_PORT if port is None else port)
    except OSError as error:
        if port is not None or isinstance(error, socket.gaierror):
            reason = error.strerror or str(error)
            raise UserError(
                f"Nothing can listen at {host}, port {port or USUAL_PORT}: {reason}. Give another --port or --host.",
                code="connection-failed",
            ) from error
        return PageServer(folder, host, 0)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    server_version, sys_version = "cbdsl", ""
    timeout = _REQUEST_SECONDS

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Refuse any method but GET and HEAD."""
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def do_GET(self) -> None:
        """Answer a request."""
        objection = self.server.guard.objection(self.headers)
        if objection:
            self._answer(HTTPStatus.FORBIDDEN, objection)
            return
        asked, _, query = self.path.partition("?")
        path = self.server.guard.path_behind(asked)
        view, path = self.server.watched.find(path) if path is not None else (None, "")
        if view is None:
            self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.")
        elif path in _PAGE:
            name, kind = _PAGE[path]
            self._answer(HTTPStatus.OK, (resources.files("cbdsl.watch") / name).read_text(encoding="utf-8"), kind)
        elif path == "/metrics":
            text = metrics.describe_run(view) if isinstance(view, RunView) else metrics.describe_sweep(view)
            self._answer(HTTPStatus.OK, text, metrics.CONTENT_TYPE)
        elif path == "/events":
            self._stream()
        elif path == "/round" and isinstance(view, RunView):
            self._replay(view, query)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def do_HEAD(self) -> None:
        """Answer a request with the headers alone."""
        self.do_GET()

    def _replay(self, view: RunView, query: str) -> None:
        wanted = parse_qs(query).get("number", [""])[0]
        found = view.at(int(wanted)) if wanted.isdecimal() and len(wanted) < 10 else None
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND, "There is no such round.")
        else:
            self._answer(HTTPStatus.OK, _json(found), "application/json")

    def _stream(self) -> None:
        if self.command == "HEAD" or not self.server.streams.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MOST_STREAMS} pages are open already. Close one of them.")
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            with contextlib.suppress(OSError):  # the page was closed
                self._send_news()
        finally:
            self.server.streams.release()

    def _send_news(self) -> None:
        """Send everything new to one page until it is closed or the server ends."""
        seen, before, sent = ViewerPosition(), "", 0.0
        asked = self.server.guard.path_behind(self.path.partition("?")[0]) or ""
        while not self.server.stopping.is_set():
            view, _ = self.server.watched.find(asked)
            if isinstance(view, RunView):
                message, seen = view.news(seen)
            else:
                message = view.table() if view else {"facts": {"kind": "gone"}}
            text = _json(message)
            if text != before:
                self.wfile.write(f"data: {text}\n\n".encode())
                before, sent = text, time.monotonic()
            elif time.monotonic() - sent > _BREATH:
                self.wfile.write(b": \n\n")
                sent = time.monotonic()
            self.server.stopping.wait(_TICK)

    def _refuse_method(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "This page can only be read.")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode()
        self._begin(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing: a page sends requests all the time."""


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
