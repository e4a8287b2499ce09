"""A page server for tests, and requests to it over real sockets, down to the bytes."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from cbdsl.watch.page_server import PageServer, start


def page(folder: Path, host: str = "127.0.0.1") -> PageServer:
    return start(folder, host, 0, tick_seconds=0.05)


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer; keywords are headers, with _ for -."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = "" if answer.length is None else answer.read().decode()  # a stream has no end
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


def raw(server: PageServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        while read := connection.recv(2**16):
            found += read
        return found


class Stream:
    """One page's events."""

    def __init__(self, server: PageServer, path: str = "/events") -> None:
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", path)
        self.answer: HTTPResponse = self._connection.getresponse()

    def next(self) -> dict[str, Any]:
        while True:
            line = self.answer.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found

    def until(self, round_number: int) -> list[dict[str, Any]]:
        """All news up to a round."""
        found = [self.next()]
        while found[-1]["facts"]["round"] < round_number:
            found.append(self.next())
        return found

    def close(self) -> None:
        self.answer.close()
        self._connection.close()
