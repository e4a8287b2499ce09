"""Clients of a provisioned broker."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from cbdsl.network.provision import provision
from support.light_workers import connect as connect_packet, context_of

SWARM = "lab"

NAMES = ["anna", "bert", "carl"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    provision(tmp_path / "keys", NAMES, SWARM, ["localhost"])
    return tmp_path / "keys"


def member(keys: Path, name: str, port: int) -> ssl.SSLSocket:
    """A member's connection, to be misused by hand."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=20)
    secure = context_of(keys, name).wrap_socket(raw, server_hostname="localhost")
    secure.sendall(connect_packet(name))
    assert secure.recv(4) == b"\x20\x02\x00\x00"
    return secure
