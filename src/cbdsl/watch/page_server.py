"""Serves the folder of a run or a sweep as a live page over HTTP. It only reads."""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cbdsl.errors import UserError, missing

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise missing(error.name or "starlette", "watch", "it serves the live page") from error

from cbdsl.watch import metrics
from cbdsl.watch.run_state import RunView, ViewerPosition
from cbdsl.watch.sweep_state import RUNS, SweepView

USUAL_PORT = 8750
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_TOKEN_BYTES = 18
_LEAST_TOKEN = 16  # characters
_HEALTH = "/health"
_MOST_CONNECTIONS = 64
_TICK_SECONDS = 0.5  # between looks at the folder for one page
_COMMENT_SECONDS = 15.0  # after which an empty comment keeps a connection open
_END_SECONDS = 2  # for open connections to end with the server
_PACKAGE = Path(__file__).parent
_FILES = {
    "/": _PACKAGE / "page.html",
    "/page.css": _PACKAGE.parent / "report" / "page.css",  # the pages of the reports have the same
    "/watch.css": _PACKAGE / "watch.css",
    "/page.js": _PACKAGE / "page.js",
    "/charts.js": _PACKAGE / "charts.js",
    "/workers.js": _PACKAGE / "workers.js",
}
_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]


def start(
    folder: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    tick_seconds: float = _TICK_SECONDS,
    token: str = "",
) -> PageServer:
    """Build a server that listens already. Without a port it is the usual one, or a free one if that is taken."""
    if token and not (len(token) >= _LEAST_TOKEN and re.fullmatch("[A-Za-z0-9_-]+", token)):
        raise UserError(
            f"The token must have at least {_LEAST_TOKEN} letters, digits, '-' or '_'. Make one: "
            "python3 -c 'import secrets; print(secrets.token_urlsafe(18))'",
            code="invalid-name",
        )
    try:
        return PageServer(folder, host, USUAL_PORT if port is None else port, tick_seconds, token)
    except OSError as error:
        if port is not None or isinstance(error, socket.gaierror):
            reason = error.strerror or str(error)
            raise UserError(
                f"Nothing can listen at {host}, port {port or USUAL_PORT}: {reason}. Give another --port or --host.",
                code="connection-failed",
            ) from error
        return PageServer(folder, host, 0, tick_seconds, token)


class PageServer:
    """Serves the page of a folder that contains one run or many, or will. It runs in a thread inside a `with` block."""

    def __init__(self, folder: Path, host: str, port: int, tick_seconds: float, token: str = "") -> None:
        """token: secret in the URL if other machines can connect; a random one if not given."""
        self._folder, self._run, self._sweep = folder, RunView(folder), SweepView(folder)
        self._host, self._tick_seconds = host, tick_seconds
        self.token = "" if is_loopback(host) else token or secrets.token_urlsafe(_TOKEN_BYTES)
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        pages = [
            *(Route(path, functools.partial(self._send_file, file)) for path, file in _FILES.items()),
            Route("/metrics", self._send_metrics),
            Route("/round", self._send_round),
            Route("/events", self._send_events),
        ]
        guard = Middleware(AccessControl, host=host, token=self.token)
        app = Starlette(routes=[*pages, Mount(f"/{RUNS}/{{run}}", routes=pages)], middleware=[guard])
        app.router.redirect_slashes = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, log_level="critical",
                access_log=False, server_header=False, headers=_HEADERS, limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=_END_SECONDS,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with the token if one is needed."""
        name = socket.gethostname() if self._host in {"0.0.0.0", "::"} else self._host
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{self.port}/" + (f"{self.token}/" if self.token else "")

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _find_view(self, request: Request) -> RunView | SweepView | None:
        """Return what a request is about: the folder's run, all of its runs, or one of them if it exists."""
        is_sweep = not (self._folder / "spec.toml").is_file() and self._sweep.has_runs()
        if "run" in request.path_params:
            return self._sweep.open_run(request.path_params["run"]) if is_sweep else None
        return self._sweep if is_sweep else self._run

    def _get_view(self, request: Request) -> RunView | SweepView:
        view = self._find_view(request)
        if view is None:
            raise HTTPException(404)
        return view

    def _send_file(self, file: Path, request: Request) -> Response:
        self._get_view(request)
        return FileResponse(file)

    def _send_metrics(self, request: Request) -> Response:
        view = self._get_view(request)
        text = metrics.describe_run(view) if isinstance(view, RunView) else metrics.describe_sweep(view)
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    def _send_round(self, request: Request) -> Response:
        view, number = self._get_view(request), request.query_params.get("number", "")
        found = view.replay(int(number)) if isinstance(view, RunView) and number.isdecimal() else None
        if found is None:
            raise HTTPException(404, "There is no such round.")
        return Response(_format_json(found), media_type="application/json")

    async def _send_events(self, request: Request) -> Response:
        await run_in_threadpool(self._get_view, request)
        kind = "text/event-stream"
        return (
            Response(media_type=kind)
            if request.method == "HEAD"
            else StreamingResponse(self._stream_news(request), 200, media_type=kind)
        )

    async def _stream_news(self, request: Request) -> AsyncIterator[str]:
        """Yield everything new for one page until it is closed or the server ends."""
        seen, before, sent = ViewerPosition(), "", 0.0
        while not self._server.should_exit:
            message, seen = await run_in_threadpool(self._next_message, request, seen)
            text = _format_json(message)
            if text != before:
                yield f"data: {text}\n\n"
                before, sent = text, time.monotonic()
            elif time.monotonic() - sent > _COMMENT_SECONDS:
                yield ": \n\n"
                sent = time.monotonic()
            await asyncio.sleep(self._tick_seconds)

    def _next_message(self, request: Request, seen: ViewerPosition) -> tuple[dict[str, Any], ViewerPosition]:
        view = self._find_view(request)
        if isinstance(view, RunView):
            return view.collect_news(seen)
        return (view.make_table() if view else {"facts": {"kind": "gone"}}), seen


class AccessControl:
    """Refuses requests from other sites and, if other machines can connect, those whose path lacks the token."""

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self._app, self._host, self._token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request, and pass on any other without the token in its path."""
        reason, path = self._objection(Headers(scope=scope)), self._path_behind_token(scope["path"])
        if scope["path"] == _HEALTH:  # for monitors, which need no more than that it answers
            await PlainTextResponse("ok\n")(scope, receive, send)
        elif reason:
            await PlainTextResponse(reason, 403)(scope, receive, send)
        elif path is None:
            await PlainTextResponse("Not Found", 404)(scope, receive, send)
        else:
            await self._app({**scope, "path": path}, receive, send)

    def _objection(self, headers: Headers) -> str:
        """Return why a request is refused, whatever its path; empty if it is not."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return "The Host header does not name this machine."
        origin = headers.get("origin")
        foreign = origin is not None and origin not in {f"http://{host}", f"https://{host}"}
        elsewhere = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        if foreign or (elsewhere and headers.get("sec-fetch-dest") != "document"):  # to follow a link is harmless
            return "The request comes from a page of another site."
        return ""

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine. Foreign names may be made to point here (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in _LOOPBACK_NAMES | {self._host.lower()}:
            return True
        own = socket.gethostname().lower()
        return bool(self._token) and (_is_address(name) or name in {own, f"{own}.local", socket.getfqdn().lower()})

    def _path_behind_token(self, path: str) -> str | None:
        """Return the path without the token in front of it, or None if the token is missing or wrong."""
        if not self._token:
            return path
        given, _, rest = path.removeprefix("/").partition("/")
        return f"/{rest}" if hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()) else None


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _format_json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
