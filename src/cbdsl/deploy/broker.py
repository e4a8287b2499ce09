"""A broker for as long as it is needed, on loopback alone: mosquitto if there is one, else amqtt in its own process."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cbdsl.errors import UserError, unknown

Kind = Literal["auto", "mosquitto", "embedded"]
KINDS = ("auto", "mosquitto", "embedded")
LOOPBACK = "127.0.0.1"
MESSAGE_LIMIT = 112 * 1024
"""Bytes of payload a broker need take: a chunk of 100 KiB, what describes it, and room."""
QUEUE_LIMIT = 128 * 1024 * 1024
"""Bytes that may wait for one client: who joins is sent the model and the shared samples at once."""

_READY_SECONDS = 20.0
STOP_SECONDS = 5.0
_ATTEMPTS = 3

# Runs before the broker in the broker's own process: it then ends with its parent, however the parent ends.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that asked for a broker is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

# MQTT 3.1.1 CONNECT with a clean session and no client id, and the CONNACK that welcomes it.
_CONNECT = b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x0a\x00\x00"
_WELCOME = b"\x20\x02\x00\x00"
_DISCONNECT = b"\xe0\x00"

_PLAIN_CONFIG = f"""\
# Written by cbdsl for a broker that lives as long as one command, on this machine alone.
allow_anonymous true
persistence false
message_size_limit {MESSAGE_LIMIT}
max_queued_messages 5000
max_queued_bytes {QUEUE_LIMIT}
set_tcp_nodelay true
sys_interval 1
log_type error
log_type warning
log_type notice
"""


@dataclass(frozen=True)
class Broker:
    """A broker that runs: where it listens, which kind it is, the process to kill to see what happens."""

    host: str
    port: int
    kind: str
    pid: int


@contextmanager
def running_broker(folder: Path, kind: Kind = "auto", config: Path | None = None, port: int = 0) -> Iterator[Broker]:
    """Start a broker on loopback, yield it once it answers, end it whatever happens; it logs to `folder`."""
    chosen = _choose(kind, config)
    folder.mkdir(parents=True, exist_ok=True)
    process, port = _start(chosen, folder, config, port)
    try:
        yield Broker(LOOPBACK, port, chosen, process.pid)
    finally:
        end(process)


def find_mosquitto() -> str | None:
    """Where mosquitto is: on PATH, or where Debian puts it, which is not on everybody's PATH."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return shutil.which("mosquitto", path=places)


def _choose(kind: str, config: Path | None) -> str:
    if kind not in KINDS:
        raise unknown("broker", kind, KINDS)
    if config is not None and kind == "embedded":
        raise UserError("The embedded broker reads no configuration file. Leave the file out, or ask for mosquitto.")
    if kind != "embedded" and find_mosquitto():
        return "mosquitto"
    if kind == "mosquitto" or config is not None:
        raise UserError(
            "mosquitto was asked for and is neither on PATH nor in /usr/sbin. Install it (Debian, Raspberry Pi OS: "
            "apt install mosquitto; macOS: brew install mosquitto), or ask for the embedded broker."
        )
    if importlib.util.find_spec("amqtt") is None:
        raise UserError("There is no broker: neither mosquitto nor the Python package amqtt is installed. Install one.")
    return "embedded"


def _start(kind: str, folder: Path, config: Path | None, port: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start on the port asked for, or on a free one; a free one may be taken before we have it, hence the attempts."""
    for attempt in range(1, _ATTEMPTS + 1):
        number = port or _free_port()
        _check_free(number)
        process = _launch(kind, folder, config, number)
        try:
            _await_ready(process, number, folder / "broker.log", speaks_tls=config is not None)
        except UserError:
            end(process)
            if port or attempt == _ATTEMPTS:
                raise
        except BaseException:
            end(process)
            raise
        else:
            return process, number
    raise AssertionError("unreachable")


def _launch(kind: str, folder: Path, config: Path | None, port: int) -> subprocess.Popen[bytes]:
    if kind == "mosquitto":
        written = folder / "mosquitto.conf"
        text = config.read_text(encoding="utf-8") if config else _PLAIN_CONFIG
        written.write_text(_on_loopback(text, port), encoding="utf-8")
        command = [str(find_mosquitto()), "-c", str(written.resolve())]
    else:
        command = [sys.executable, "-m", "cbdsl.deploy.embedded", str(port)]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]
    where = config.parent if config else folder  # a configuration's relative paths start at the file's own folder
    with (folder / "broker.log").open("ab") as log:
        return subprocess.Popen(  # a session of its own: Ctrl-C is for us, and we end the broker last
            command, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _on_loopback(text: str, port: int) -> str:
    """The configuration with its listener on loopback at `port`, and without the change of user that root would get."""
    listener = f"listener {port} {LOOPBACK}"
    found = len(re.findall(r"(?m)^listener\b", text))
    if found > 1:
        raise UserError(f"The configuration has {found} listeners; a broker on loopback has one. Leave one of them.")
    moved = re.sub(r"(?m)^listener\b.*$", listener, text) if found else f"{listener}\n{text}"
    # As root mosquitto becomes another user, who may not read the keys and whom no guard ends with us.
    return re.sub(r"(?m)^user\b.*$", "", moved) + ("\nuser root\n" if os.geteuid() == 0 else "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UserError(f"Port {port} on {LOOPBACK}: {error.strerror}. Give a free port, or none.") from error


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path, speaks_tls: bool) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"The broker ended at once with code {process.returncode}. Its last words: {_tail(log)}")
        if _answers(port, speaks_tls):
            return
        time.sleep(0.02)
    raise UserError(f"The broker did not answer within {_READY_SECONDS:.0f} s. Its last words: {_tail(log)}")


def _answers(port: int, speaks_tls: bool) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            if speaks_tls:  # it listens only after it has read its keys; more it says to certificates alone
                return True
            connection.sendall(_CONNECT)
            welcomed = connection.recv(len(_WELCOME)) == _WELCOME
            connection.sendall(_DISCONNECT)
            return welcomed
    except OSError:
        return False


def _tail(log: Path, lines: int = 5) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return " / ".join(line.strip() for line in said) or "none"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process: ask, wait a moment, then insist."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
