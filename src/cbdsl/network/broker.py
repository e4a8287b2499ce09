"""A broker for as long as it is needed, on loopback alone: mosquitto if there is one, else amqtt in its own process."""

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
"""Bytes of a message that a broker need take: a chunk of 100 KiB, what describes it, its topic, and room."""
QUEUE_LIMIT = 128 * 1024 * 1024
"""Bytes that may wait for one client: who joins is sent the model and the shared samples at once."""

_READY_SECONDS = 20.0
STOP_SECONDS = 5.0
_ATTEMPTS = 3
_HASH_TURNS = 101  # of mosquitto's own passwords; ours are long and random
_LISTENER = re.compile(r"(?m)^listener\b.*$")

USERNAME = "swarm"
PASSWORD_VARIABLE = "CBDSL_BROKER_PASSWORD"
"""Where a password is handed over: other users can read a command line, not an environment."""

_NOT_ROOT = ("mosquitto", "nobody")  # who a broker is that root starts: the first there is

# Runs before the broker in the broker's own process: it then ends with its parent, however the parent ends, may open as
# many files as this machine allows, and is not root where it need not be.
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
    sys.exit("the process that asked for a broker is gone")
os.execv(sys.argv[4], sys.argv[4:])
"""

_WELCOME = b"\x20\x02\x00\x00"  # the CONNACK of MQTT 3.1.1
_DISCONNECT = b"\xe0\x00"

_PLAIN_CONFIG = f"""\
# Written by cbdsl for a broker that lives as long as one command, on this machine alone.
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
    """A broker that runs: where it listens, which kind it is, the process to kill to see what happens."""

    host: str
    port: int
    kind: str
    pid: int
    server_port: int  # for server and monitor; the same as `port` where the configuration has one listener


@contextmanager
def running_broker(
    folder: Path, kind: Kind = "auto", config: Path | None = None, port: int = 0, password: str = ""
) -> Iterator[Broker]:
    """Start a broker on loopback, yield it once it answers, end it whatever happens; it logs to `folder`.

    password: whoever connects must be `USERNAME` and know it; without one, and without a configuration, anybody may.
    """
    chosen = _choose(kind, config)
    folder.mkdir(parents=True, exist_ok=True)
    text = (config.read_text(encoding="utf-8") if config else _PLAIN_CONFIG) if chosen == "mosquitto" else ""
    process, ports = _start(_BrokerPlan(chosen, folder, text, config, password), port)
    try:
        yield Broker(LOOPBACK, ports[0], chosen, process.pid, ports[-1])
    finally:
        end(process)


@dataclass(frozen=True)
class _BrokerPlan:
    """What is to be started."""

    kind: str
    folder: Path
    text: str  # of the configuration, if it is mosquitto
    config: Path | None  # where that is from, if it was given
    password: str

    @property
    def listeners(self) -> int:
        return max(1, len(_LISTENER.findall(self.text)))


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


def _start(plan: _BrokerPlan, port: int) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start on the port asked for, or on a free one; a free one may be taken before we have it, hence the attempts."""
    for attempt in range(1, _ATTEMPTS + 1):
        ports = [port or _free_port(), *(_free_port() for _ in range(1, plan.listeners))]
        for number in ports:
            _check_free(number)
        process = _launch(plan, ports)
        try:
            _await_ready(process, ports[0], plan)
        except UserError:
            end(process)
            if port or attempt == _ATTEMPTS:
                raise
        except BaseException:
            end(process)
            raise
        else:
            return process, ports
    raise AssertionError("unreachable")


def _launch(plan: _BrokerPlan, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    folder, environment, user = plan.folder, dict(os.environ), (os.geteuid(), os.getegid())
    if plan.kind == "mosquitto":
        text = _on_loopback(plan.text, ports)
        if plan.config is None:
            text = f"{text}{_who_may_come(folder, plan.password)}"
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
    where = plan.config.parent if plan.config else folder  # relative paths start at the configuration's own folder
    with (folder / "broker.log").open("ab") as log:
        return subprocess.Popen(  # a session of its own: Ctrl-C is for us, and we end the broker last
            command, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=environment,
        )  # fmt: skip


def _hand_over(folder: Path, user: tuple[int, int]) -> tuple[int, int]:
    """Who the broker runs as. Instead of root somebody else, who is let into this folder, not into those above it."""
    if user[0] != 0:
        return user
    import pwd  # noqa: PLC0415 - not on every platform

    there = {one.pw_name: (one.pw_uid, one.pw_gid) for one in pwd.getpwall()}
    somebody = next((there[name] for name in _NOT_ROOT if name in there), None)
    if somebody is None:
        return user
    folder.chmod(folder.stat().st_mode | 0o011)
    for path in (folder / "mosquitto.conf", folder / "passwords"):
        if path.exists():
            os.chown(path, *somebody)
    return somebody


def _on_loopback(text: str, ports: Sequence[int]) -> str:
    """The configuration with its listeners on loopback, and without the change of user that root would get."""
    left = iter(ports)
    moved = _LISTENER.sub(lambda _: f"listener {next(left)} {LOOPBACK}", text)
    if not _LISTENER.search(text):
        moved = f"listener {ports[0]} {LOOPBACK}\n{text}"
    # As root mosquitto becomes another user, who may not read the keys and whom no guard ends with us.
    return re.sub(r"(?m)^user\b.*$", "", moved) + ("\nuser root\n" if os.geteuid() == 0 else "\n")


def _who_may_come(folder: Path, password: str) -> str:
    """Everybody on this machine, or whoever knows the password, of which the broker's file has a hash."""
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
            raise UserError(f"Port {port} on {LOOPBACK}: {error.strerror}. Give a free port, or none.") from error


def _await_ready(process: subprocess.Popen[bytes], port: int, plan: _BrokerPlan) -> None:
    deadline, log = time.monotonic() + _READY_SECONDS, plan.folder / "broker.log"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"The broker ended at once with code {process.returncode}. Its last words: {_tail(log)}")
        if _answers(port, plan):
            return
        time.sleep(0.02)
    raise UserError(f"The broker did not answer within {_READY_SECONDS:.0f} s. Its last words: {_tail(log)}")


def _answers(port: int, plan: _BrokerPlan) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            if (
                plan.config is not None
            ):  # it listens only after it has read its keys; more it says to certificates alone
                return True
            connection.sendall(connect_packet(plan.password))
            welcomed = connection.recv(len(_WELCOME)) == _WELCOME
            connection.sendall(_DISCONNECT)
            return welcomed
    except OSError:
        return False


def connect_packet(password: str) -> bytes:
    """MQTT 3.1.1 CONNECT with a clean session and no client id."""
    words = (USERNAME.encode(), password.encode()) if password else ()
    body = b"\x00\x04MQTT\x04" + (b"\xc2" if password else b"\x02") + b"\x00\x0a\x00\x00"
    body += b"".join(len(word).to_bytes(2, "big") + word for word in words)
    return b"\x10" + bytes([len(body)]) + body


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
