"""Runs a broker on loopback during one command: mosquitto if it is installed, else amqtt in its own process."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cbdsl.errors import UserError, unknown

Kind = Literal["auto", "mosquitto", "embedded"]
KINDS = ("auto", "mosquitto", "embedded")
LOOPBACK = "127.0.0.1"
MESSAGE_LIMIT = 112 * 1024
"""Bytes of the largest message that a broker must accept: a piece of 100 KiB, its fields, its topic, and a reserve."""
QUEUE_LIMIT = 128 * 1024 * 1024
"""Bytes that may wait for one client: a worker that joins is sent the model and the shared samples at once."""

_READY_SECONDS = 20.0
STOP_SECONDS = 5.0
_ATTEMPTS = 3
_HASH_TURNS = 101  # of mosquitto's own passwords; ours are long and random
_LISTENER = re.compile(r"(?m)^listener\b.*$")

USERNAME = "swarm"
PASSWORD_VARIABLE = "CBDSL_BROKER_PASSWORD"
"""The environment variable of the password: other users can read a command line, but not an environment."""

_NOT_ROOT = ("mosquitto", "nobody")  # users that a broker started by root runs as: the first that exists

# Runs before the broker in the broker's own process: the broker then ends with its parent, however the parent ends, may
# open as many files as this machine allows, and is not root where it need not be.
_GUARD = """
import ctypes, os, resource, signal, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
user, group = int(sys.argv[2]), int(sys.argv[3])
if user != os.geteuid():
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # after that: a change of user undoes it
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started the broker is gone")
os.execv(sys.argv[4], sys.argv[4:])
"""

_CONNACK = b"\x20\x02\x00\x00"  # of MQTT 3.1.1
_DISCONNECT = b"\xe0\x00"

_PLAIN_CONFIG = f"""\
# Written by cbdsl for a broker that runs during one command, on this machine alone.
persistence false
max_packet_size {MESSAGE_LIMIT}
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
    """A running broker."""

    host: str
    port: int
    kind: str
    pid: int
    server_port: int  # for server and monitor; equal to `port` if the configuration has one listener


@contextmanager
def running_broker(
    folder: Path,
    kind: Kind = "auto",
    config: Path | None = None,
    port: int = 0,
    password: str = "",
    server_port: int = 0,
) -> Iterator[Broker]:
    """Start a broker on loopback, yield it when it answers, and end it; it logs to `folder`.

    config: of mosquitto. port, server_port: of its first and its second listener; a free one if not given.
    password: clients must give it and `USERNAME`; without it and without a config anybody may connect.
    """
    chosen = _choose(kind, config)
    folder.mkdir(parents=True, exist_ok=True)
    text = (_read_config(config) if config else _PLAIN_CONFIG) if chosen == "mosquitto" else ""
    process, ports = _start(_BrokerPlan(chosen, folder, text, config, password), port, server_port)
    try:
        yield Broker(LOOPBACK, ports[0], chosen, process.pid, ports[-1])
    finally:
        end_process(process)


@dataclass(frozen=True)
class _BrokerPlan:
    """What to start."""

    kind: str
    folder: Path
    text: str  # of the configuration, for mosquitto
    config: Path | None  # the file that the text is from, if one was given
    password: str

    @property
    def listeners(self) -> int:
        return max(1, len(_LISTENER.findall(self.text)))


def find_mosquitto() -> str | None:
    """Return the path of mosquitto: on PATH, or where Debian installs it, which is not on every user's PATH."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return shutil.which("mosquitto", path=places)


def _choose(kind: str, config: Path | None) -> str:
    if kind not in KINDS:
        raise unknown("broker", kind, KINDS)
    if config is not None and kind == "embedded":
        raise UserError(
            "The embedded broker reads no configuration file. Leave the file out, or choose mosquitto.", code="conflict"
        )
    if kind != "embedded" and find_mosquitto():
        return "mosquitto"
    if kind == "mosquitto" or config is not None:
        raise UserError(
            "mosquitto is required here and is neither on PATH nor in /usr/sbin. Install it (Debian, Raspberry Pi OS: "
            "apt install mosquitto; macOS: brew install mosquitto), or choose the embedded broker.",
            code="missing-package",
        )
    if importlib.util.find_spec("amqtt") is None:
        raise UserError(
            "There is no broker: neither mosquitto nor the Python package amqtt is installed. Install one.",
            code="missing-package",
        )
    return "embedded"


def _start(plan: _BrokerPlan, port: int, server_port: int) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start on the given port, or on a free one; another process may take that first, hence the attempts."""
    attempts = 1 if port else _ATTEMPTS
    while True:
        ports = [port or _free_port(), *(server_port or _free_port() for _ in range(1, plan.listeners))]
        for number in ports:
            _check_free(number)
        process = _launch(plan, ports)
        attempts -= 1
        try:
            _await_ready(process, ports, plan)
        except BaseException as error:
            end_process(process)
            if attempts and isinstance(error, UserError):
                continue
            raise
        return process, ports


def _launch(plan: _BrokerPlan, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    folder, environment, user = plan.folder, dict(os.environ), (os.geteuid(), os.getegid())
    if plan.kind == "mosquitto":
        text = _on_loopback(plan.text, ports)
        if plan.config is None:
            text += _access_settings(folder, plan.password)
        written = folder / "mosquitto.conf"
        written.write_text(text, encoding="utf-8")
        command = [str(find_mosquitto()), "-c", str(written.resolve()) if plan.config else written.name]
        if plan.config is None and sys.platform == "linux":
            user = _hand_over(folder, user)
    else:
        command = [sys.executable, "-m", "cbdsl.network.embedded_broker", str(ports[0])]
        environment[PASSWORD_VARIABLE] = plan.password
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *map(str, user), *command]
    where = plan.config.parent if plan.config else folder  # relative paths start at the configuration's folder
    with (folder / "broker.log").open("ab") as log:
        return subprocess.Popen(  # in its own session: Ctrl-C is for this process, which ends the broker last
            command, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=environment,
        )  # fmt: skip


def _hand_over(folder: Path, user: tuple[int, int]) -> tuple[int, int]:
    """Return user and group of the broker: not root, but a user that may enter this folder, not those above it."""
    if user[0] != 0:
        return user
    import pwd  # noqa: PLC0415 - not on every platform

    users = {one.pw_name: (one.pw_uid, one.pw_gid) for one in pwd.getpwall()}
    other = next((users[name] for name in _NOT_ROOT if name in users), None)
    if other is None:
        return user
    folder.chmod(folder.stat().st_mode | 0o011)
    for path in (folder / "mosquitto.conf", folder / "passwords"):
        if path.exists():
            os.chown(path, *other)
    return other


def _read_config(path: Path) -> str:
    """Read a configuration, with the files of `include_dir` in their places."""

    def read_included(found: re.Match[str]) -> str:
        return "\n".join(one.read_text(encoding="utf-8") for one in sorted((path.parent / found[1]).glob("*.conf")))

    return re.sub(r"(?m)^include_dir\s+(\S+)\s*$", read_included, path.read_text(encoding="utf-8"))


def _on_loopback(text: str, ports: Sequence[int]) -> str:
    """Move the listeners of a configuration to loopback, and remove its change of user."""
    left = iter(ports)
    moved = _LISTENER.sub(lambda _: f"listener {next(left)} {LOOPBACK}", text)
    if not _LISTENER.search(text):
        moved = f"listener {ports[0]} {LOOPBACK}\n{text}"
    # As root mosquitto would change to a user that cannot read the keys, and would not end with this process.
    return re.sub(r"(?m)^user\b.*$", "", moved) + ("\nuser root\n" if os.geteuid() == 0 else "\n")


def _access_settings(folder: Path, password: str) -> str:
    """Return the settings of access: anybody on this machine or, with a password, clients that give it."""
    if not password:
        return "allow_anonymous true\n"
    salt = os.urandom(12)
    hashed = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _HASH_TURNS)
    words = ["", "7", str(_HASH_TURNS), *(base64.b64encode(one).decode() for one in (salt, hashed))]
    path = folder / "passwords"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{USERNAME}:{'$'.join(words)}\n")
    return f"allow_anonymous false\npassword_file {path.name}\n"


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
            message = f"Port {port} on {LOOPBACK}: {error.strerror}. Give a free port, or none."
            raise UserError(message, code="conflict") from error


def _await_ready(process: subprocess.Popen[bytes], ports: Sequence[int], plan: _BrokerPlan) -> None:
    deadline, log = time.monotonic() + _READY_SECONDS, plan.folder / "broker.log"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(
                f"The broker ended at once with code {process.returncode}. Last lines of its log: {_tail(log)}",
                code="connection-failed",
            )
        if all(_answers(port, plan) for port in ports):
            return
        time.sleep(0.02)
    raise UserError(
        f"The broker did not answer within {_READY_SECONDS:.0f} s. Last lines of its log: {_tail(log)}",
        code="connection-failed",
    )


def _answers(port: int, plan: _BrokerPlan) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            if plan.config is not None:  # it listens after it has read its keys; for more we need a certificate
                return True
            connection.sendall(connect_packet(plan.password))
            welcomed = connection.recv(len(_CONNACK)) == _CONNACK
            connection.sendall(_DISCONNECT)
            return welcomed
    except OSError:
        return False


def connect_packet(password: str) -> bytes:
    """Return an MQTT 3.1.1 CONNECT packet with a clean session and no client id."""
    words = (USERNAME.encode(), password.encode()) if password else ()
    body = b"\x00\x04MQTT\x04" + (b"\xc2" if password else b"\x02") + b"\x00\x0a\x00\x00"
    body += b"".join(len(word).to_bytes(2, "big") + word for word in words)
    return b"\x10" + bytes([len(body)]) + body


def _tail(log: Path, lines: int = 5) -> str:
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return " / ".join(line.strip() for line in last) or "none"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, a few seconds, SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
